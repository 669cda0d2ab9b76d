/* index_select of the avx2 level: the steps that levels share, with this level's vectors. */
#include "lanes_avx2.h"

#include "index_body.h"

static const di_index_steps steps = {panel_query, panel_scores, panel_best, block_max};

static di_status index_select(di_stream *stream, const di_index_select_args *a) {
    return di_cpu_index_run(stream, a, &steps);
}

void di_cpu_install_avx2_index(di_cpu_kernels *k) {
    k->index_select = index_select;
    k->topk = panel_best;
}
