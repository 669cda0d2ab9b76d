/* What the processor's arithmetic can do at most: the level's probe on every thread at once, the best of a few tries.
 */
#include "peak.h"

enum { PARTS_A_THREAD = 8, TRIES = 5, STEPS = 400000 };

typedef struct peak_job {
    double (*peak)(int64_t n, const float *from, float *to);
    double done[64 * PARTS_A_THREAD];
} peak_job;

static void peak_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts, (void)worker;
    peak_job *job = ctx;
    float from[32], to[16];
    for (int i = 0; i < 32; i++) /* sums stay finite: factors below one */
        from[i] = 0.5f + (float)i / 128;
    job->done[part] = job->peak(STEPS / 4, from, to) + (to[0] != to[0] ? 1 : 0);
}

di_status di_cpu_measure(di_device *dev, double *peak, double *read_bandwidth, di_error *err) {
    *read_bandwidth = 0;
    int n_parts = di_pool_threads(dev->pool) * PARTS_A_THREAD;
    if (!dev->kernels.peak)
        return di_fail(err, DI_ERR_UNSUPPORTED, "cpu: level '%s' has no arithmetic probe",
                       di_cpu_level_name(dev->level));
    n_parts = DI_MIN(n_parts, 64 * PARTS_A_THREAD);
    pthread_mutex_lock(&dev->lock);
    *peak = 0;
    for (int t = 0; t < TRIES; t++) {
        peak_job job = {.peak = dev->kernels.peak};
        double all = 0;
        int64_t start_ns = di_clock_ns();
        di_pool_run(dev->pool, peak_part, &job, n_parts);
        double seconds = (double)(di_clock_ns() - start_ns) * 1e-9;
        for (int i = 0; i < n_parts; i++)
            all += job.done[i];
        *peak = DI_MAX(*peak, all / seconds);
    }
    pthread_mutex_unlock(&dev->lock);
    return DI_OK;
}
