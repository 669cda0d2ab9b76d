/* The base layer: what every other folder stands on, over the C library and POSIX only (JSON by jansson).
 *
 * Owns: errors with context, checked sizes, arenas, string buffers, maps, log, options, thread pool, files and mmap,
 * traces, clock, hashing, UTF-8 and JSON. Leaves numbers to tensor/, text rules to text/. This is the one header of the
 * folder that other folders include; the files it includes are its chapters. */
#ifndef DI_BASE_H
#define DI_BASE_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "deepinfer/status.h"

#include "arena.h"
#include "error.h"
#include "file.h"
#include "json.h"
#include "log.h"
#include "map.h"
#include "options.h"
#include "pool.h"
#include "strbuf.h"
#include "trace.h"
#include "util.h"

#endif
