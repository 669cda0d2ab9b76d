/* gemm by panels, at the width of the level that includes this. Included after lanes_<level>.h. */
#include "panel_gemm_body.h"

static di_status gemm(di_stream *stream, const di_gemm_args *a) {
    return panel_gemm(stream, a, di_cpu_shared(stream), stream->dev->have.shared);
}

void DI_INSTALL(gemm)(di_cpu_kernels *k) {
    k->gemm = gemm;
}
