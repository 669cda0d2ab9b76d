/* The arithmetic probe of AMX: bf16 tile products into four independent tiles of sums. */
#include <immintrin.h>

#include "cpu.h"

static double peak(int64_t n, const float *from, float *to) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t colsb[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    uint16_t tile[16 * 32];
    float sums[16 * 16];
    for (int i = 0; i < 8; i++) {
        config.colsb[i] = 64;
        config.rows[i] = 16;
    }
    for (int i = 0; i < 16 * 32; i++)
        tile[i] = di_f32_to_bf16(from[i % 32]);
    __asm__ volatile("" ::: "memory"); /* the compiler believes that only 8 bytes of the configuration are read */
    _tile_loadconfig(&config);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, tile, 64);
    _tile_loadd(5, tile, 64);
    _tile_loadd(6, tile, 64);
    _tile_loadd(7, tile, 64);
    for (int64_t i = 0; i < n; i++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums, 64);
    _tile_stored(2, sums, 64);
    _tile_stored(3, sums, 64);
    _tile_release();
    memcpy(to, sums, 16 * sizeof *to);
    return 4.0 * 2 * 16 * 16 * 32 * (double)n;
}

void di_cpu_install_amx_peak(di_cpu_kernels *k) {
    k->peak = peak;
}
