/* Files: read-only mappings, whole-file reads, path joining. */
#ifndef DI_BASE_FILE_H
#define DI_BASE_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "strbuf.h"

typedef struct di_mapping {
    const uint8_t *data; /* owned by the mapping; NULL for an empty file */
    size_t n_bytes;
} di_mapping;

/* Maps a regular file read-only (shared, so that pages are the page cache's). Errors name the path: DI_ERR_NOT_FOUND,
 * DI_ERR_IO. */
di_status di_mapping_open(di_mapping *map, const char *path, di_error *err);
void di_mapping_close(di_mapping *map);

/* Appends the whole file to out; more than max_bytes is DI_ERR_RANGE. Path "-" is standard input. */
di_status di_file_read(const char *path, size_t max_bytes, di_strbuf *out, di_error *err);
bool di_path_exists(const char *path);
bool di_path_is_dir(const char *path);
/* out = dir + "/" + name (out is reset first). */
void di_path_join(di_strbuf *out, const char *dir, const char *name);

#endif
