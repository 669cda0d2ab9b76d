/* Pre-tokenizer: cuts text into the pieces that BPE never merges across, by the regular expressions of tokenizer.json.
 */
#ifndef DI_PRETOKENIZE_H
#define DI_PRETOKENIZE_H

#include "base/base.h"

typedef struct di_pretok di_pretok; /* read-only after creation; any thread may run it */

/* Called for every piece from left to right; the pieces together are the text. Another status than DI_OK ends the run.
 */
typedef di_status (*di_piece_fn)(void *ctx, const char *piece, size_t n, di_error *err);

enum { DI_PRETOK_STEPS_MAX = 8 };

/* Compiles up to DI_PRETOK_STEPS_MAX patterns in the dialect of the file (Oniguruma, code points). Every step splits
 * each piece of the step before: a match is a piece of its own, what lies between matches stays as pieces.
 * DI_ERR_UNSUPPORTED names a construct whose meaning here would not be the file's. */
di_status di_pretok_create(di_pretok **out, const char *const *patterns, const size_t *lens, size_t n_patterns,
                           di_error *err);
void di_pretok_destroy(di_pretok *p);

/* Runs over text, which must be well-formed UTF-8. */
di_status di_pretok_run(const di_pretok *p, const char *text, size_t n, di_piece_fn fn, void *ctx, di_error *err);

#endif
