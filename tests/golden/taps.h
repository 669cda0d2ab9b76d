/* A tap that compares what a forward shows with golden tensors of the same names, and can put the golden values in
 * place of its own, so that the next stage is fed with golden inputs. */
#ifndef DI_TEST_TAPS_H
#define DI_TEST_TAPS_H

#include "golden.h"
#include "rig.h"

typedef struct tap_compare {
    const golden *g;
    double tolerance; /* of float tensors: relative, of the golden rows' root mean square; integers must be equal */
    double rounded_tolerance; /* of attn_out and of entries (rig_rounded_tolerance); 0: the same */
    /* Not NULL: after comparing, the last rows, window records and pages of sequence 0 are replaced by the golden ones,
     * so that each stage is fed with golden inputs. Only the last row is compared then: inputs of earlier rows are not
     * in the files. */
    const rig *inject;
    bool is_partial;  /* the golden file lacks early cache rows: what reads caches (scores, choices, attn_out) is not
                         compared */
    int64_t n_tokens; /* of the whole prompt; with inject */
    int n_seen, n_wrong;
    double worst;
} tap_compare;

/* A di_tap_fn; user is a tap_compare. Golden tensors hold the last rows of what is shown. */
void tap_compare_fn(void *user, const char *name, di_dtype dtype, int64_t n_rows, int64_t n_cols, void *data);

#endif
