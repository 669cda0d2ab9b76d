/* How long the device works on what the runner puts on its stream, and how long it waits for the host in between.
 *
 * A span is a step's forward with its draw, a round of drafts, or, of a round in which the host takes part (masks,
 * penalties), what the device does between two turns of the host: an event in front of it and one behind, which the
 * device stamps as it passes them. Spans are added up once both have come. A clock that fails says less than there was,
 * and hurts nothing. */
#include "engine_internal.h"

di_status di_device_clock_init(di_runner *r, di_error *err) {
    di_device_clock *c = &r->clock;
    di_status st = DI_OK;
    for (int i = 0; i < DI_DEVICE_SPANS && !st; i++) {
        st = r->backend->device->event_create(r->device, &c->begins[i], err);
        if (!st)
            st = r->backend->device->event_create(r->device, &c->ends[i], err);
    }
    return st;
}

void di_device_clock_deinit(di_runner *r) {
    for (int i = 0; i < DI_DEVICE_SPANS; i++) {
        r->backend->device->event_destroy(r->clock.begins[i]);
        r->backend->device->event_destroy(r->clock.ends[i]);
    }
    r->clock = (di_device_clock){0};
}

void di_device_clock_begin(di_runner *r, bool follows) {
    di_device_clock *c = &r->clock;
    if (!r->executor.launch)
        return;
    c->n_begun = c->n_ended; /* one that never ended has failed */
    int64_t i = c->n_begun % DI_DEVICE_SPANS;
    if (r->backend->device->event_record(c->begins[i], r->executor.stream, NULL))
        return;
    c->follows[i] = follows && c->n_begun > 0;
    c->n_begun++;
}

void di_device_clock_end(di_runner *r) {
    di_device_clock *c = &r->clock;
    if (c->n_begun == c->n_ended ||
        r->backend->device->event_record(c->ends[c->n_ended % DI_DEVICE_SPANS], r->executor.stream, NULL))
        return;
    c->n_ended++;
}

void di_device_clock_settle(di_runner *r) {
    di_device_clock *c = &r->clock;
    int64_t busy_ns, idle_ns;
    /* The places of older spans are taken already, and with them that of the one before the first. */
    c->n_settled = DI_MAX(c->n_settled, c->n_begun - DI_DEVICE_SPANS + 1);
    for (; c->n_settled < c->n_ended; c->n_settled++) {
        int64_t i = c->n_settled % DI_DEVICE_SPANS, before = (c->n_settled + DI_DEVICE_SPANS - 1) % DI_DEVICE_SPANS;
        if (!r->backend->device->event_elapsed(c->begins[i], c->ends[i], &busy_ns))
            return;
        c->busy_ns += busy_ns;
        if (c->follows[i] && r->backend->device->event_elapsed(c->ends[before], c->begins[i], &idle_ns))
            c->idle_ns += DI_MAX(idle_ns, 0);
    }
}
