/* The arithmetic probe behind di_device_ops.measure. */
#ifndef DI_CUDA_PROBE_H
#define DI_CUDA_PROBE_H

#include "cuda.h"

/* Puts n rounds of Hopper's widest multiplies on the stream; returns the operations that they are. */
double di_cuda_probe_sm90(const di_device *dev, cudaStream_t stream, int n, float *out);

#endif
