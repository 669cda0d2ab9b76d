/* The arithmetic probe behind di_device_ops.measure. */
#ifndef DI_CPU_PEAK_H
#define DI_CPU_PEAK_H

#include "cpu.h"

/* Operations per second of bf16 products by the device's level and threads. */
di_status di_cpu_measure(di_device *dev, double *peak, double *read_bandwidth, di_error *err);

#endif
