/* The few tile instructions that amx_*.c use, as macros whose tile numbers are constants. Private to backend/cpu.
 *
 * The compiler sees tile registers only through these; what it must know about memory is said here. GCC 12 believes
 * that a configuration load reads 8 bytes, hence the barrier before it. A test puts a model of the instructions in
 * their place (DI_AMX_TILES), so that machines without AMX can check what is built on them. */
#ifndef DI_CPU_AMX_TILES_H
#define DI_CPU_AMX_TILES_H

#include <stddef.h>
#include <stdint.h>

/* Palette 1: up to 16 rows of up to 64 bytes for each of 8 tiles. */
typedef struct di_tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} di_tile_config;

#ifdef DI_AMX_TILES
#include DI_AMX_TILES
#else
#include <immintrin.h>

static inline void di_tile_configure(const di_tile_config *config) {
    __asm__ volatile("" : : "m"(*config) : "memory");
    _tile_loadconfig(config);
}
#define DI_TILE_RELEASE() _tile_release()
#define DI_TILE_ZERO(tile) _tile_zero(tile)
#define DI_TILE_LOAD(tile, base, stride) _tile_loadd(tile, base, stride)
#define DI_TILE_STORE(tile, base, stride) _tile_stored(tile, base, stride)
/* c += a . b: rows of pairs times pairs of rows, in the order of di_dot32 for 32 inputs. */
#define DI_TILE_DOT(c, a, b) _tile_dpbf16ps(c, a, b)
#endif

#endif
