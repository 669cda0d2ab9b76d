/* What hyper-connections share with fused operations (fused.cu). */
#ifndef DI_HC_CUH
#define DI_HC_CUH

#include "cuda.h"

enum { DI_CUDA_HC_MAX = 8 }; /* streams, at most */

#endif
