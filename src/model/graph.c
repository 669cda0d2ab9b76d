/* Recordings: batches of equal shape run as one graph of the device instead of operation by operation.
 *
 * A step of a large model is more than a thousand operations, most of them shorter than the time that it takes to start
 * one from the host. Where the device can record (backend.h), a batch of decoding rows is filled up to a number of rows
 * that comes again (prepare.c), so that nothing but the contents of its arrays changes; the first run of a shape goes
 * operation by operation, the second is recorded, later ones are launched. What a recording depends on is its key; it
 * is dropped with the forward. */
#include "forward_internal.h"

enum { ROWS_MAX = 256, RECORDINGS_MAX = 256 };

int32_t di_graph_rows(const di_forward *fw, int32_t n) {
    const di_model *mo = fw->model;
    if (!mo->backend.device->graph_launch || n > ROWS_MAX)
        return 0;
    int32_t step = n <= 32 ? 1 : n <= 64 ? 8 : n <= 128 ? 16 : 32;
    int32_t padded = (int32_t)DI_ROUND_UP(n, step);
    return padded <= DI_MIN(mo->rows_max, mo->logits_max) ? padded : n;
}

static di_recording *find(di_forward *fw, const di_recording *key) {
    for (int32_t i = 0; i < fw->n_recordings; i++) {
        di_recording *r = &fw->recordings[i];
        if (r->kind == key->kind && r->n_rows == key->n_rows && r->n_seqs == key->n_seqs && r->pages == key->pages &&
            r->slots == key->slots && r->taps == key->taps && r->fed == key->fed)
            return r;
    }
    if (fw->n_recordings == RECORDINGS_MAX)
        return NULL;
    if (!fw->recordings && !(fw->recordings = calloc(RECORDINGS_MAX, sizeof *fw->recordings)))
        return NULL;
    di_recording *r = &fw->recordings[fw->n_recordings++];
    *r = *key;
    return r;
}

/* Records what `put` puts on the stream. A run that can't be recorded is none that can't be done: it goes on without.
 */
static di_status record(di_forward *fw, di_recording *r, int32_t index, di_status (*put)(di_forward *fw, int32_t)) {
    const di_device_ops *dev = fw->model->backend.device;
    di_error why = {.message = ""};
    DI_TRY(dev->graph_begin(fw->stream, fw->err));
    di_status st = put(fw, index);
    if (st) {
        di_graph *half = NULL;
        if (dev->graph_end(fw->stream, &half, &why) == DI_OK)
            dev->graph_destroy(half);
        return st;
    }
    if (dev->graph_end(fw->stream, &r->graph, &why)) {
        di_warn("steps of %d rows run operation by operation: %s", r->n_rows, why.message);
        r->graph = NULL;
        return put(fw, index);
    }
    return dev->graph_launch(fw->stream, r->graph, fw->err);
}

di_status di_graph_run(di_forward *fw, int32_t kind, int32_t index, di_status (*put)(di_forward *fw, int32_t)) {
    DI_TRY(di_side_join(fw)); /* left by one that failed */
    if (!fw->is_recordable) {
        fw->n_unrecorded += fw->has_others && fw->model->backend.device->graph_launch;
        return put(fw, index);
    }
    const di_rows *rows = &fw->set[0].rows;
    di_recording key = {.kind = kind + index, .n_rows = rows->n_rows, .n_seqs = rows->n_seqs, .slots = fw->slots};
    if (kind == DI_RECORD_FORWARD) {
        key.pages = fw->pages;
        key.taps = fw->taps;
        key.fed = fw->fed;
    }
    di_recording *r = find(fw, &key);
    if (!r)
        return put(fw, index);
    fw->n_unrecorded += ++r->n_runs <= 2;
    if (r->n_runs == 1)
        return put(fw, index);
    if (r->graph)
        return fw->model->backend.device->graph_launch(fw->stream, r->graph, fw->err);
    return r->n_runs == 2 ? record(fw, r, index, put) : put(fw, index);
}

void di_graph_drop(di_forward *fw) {
    for (int32_t i = 0; i < fw->n_recordings; i++) {
        if (fw->recordings[i].graph)
            fw->model->backend.device->graph_destroy(fw->recordings[i].graph);
    }
    free(fw->recordings);
    fw->recordings = NULL;
    fw->n_recordings = 0;
}
