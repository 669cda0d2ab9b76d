/* Drawing where the logits are: a step's rows in one upload, one operation, and a few bytes of every row back. It is
 * put on the stream behind the forward, and the host waits for the bytes alone: what it puts there in between runs on.
 *
 * The rows are put together by draw.c, which also knows what their tokens mean. Memory of the device grows with the
 * largest step so far; the blacklist lies there from the start. */
#include "engine_internal.h"

typedef di_status alloc_fn(di_device *dev, size_t n_bytes, void **out, di_error *err);
typedef void free_fn(di_device *dev, void *p);

/* Memory of at least n bytes in *p, whose contents are lost. */
static di_status grow(const di_runner *r, void **p, size_t *cap, size_t n_bytes, alloc_fn *make, free_fn *release,
                      di_error *err) {
    if (n_bytes <= *cap)
        return DI_OK;
    size_t bytes = DI_MAX(DI_MAX(n_bytes, 2 * *cap), (size_t)4096);
    void *grown = NULL;
    di_status st = make(r->device, bytes, &grown, err);
    if (st)
        return di_error_context(err, st, "drawing rows");
    if (*p)
        release(r->device, *p);
    *p = grown;
    *cap = bytes;
    return DI_OK;
}

di_status di_drawer_init(di_runner *r, di_error *err) {
    di_drawer *d = &r->drawer;
    size_t n_bytes = (size_t)DI_CEIL_DIV(r->n_vocab, 32) * sizeof(uint32_t);
    di_status st = r->backend->device->event_create(r->device, &d->is_drawn, err);
    if (st || !r->blacklist)
        return st;
    if ((st = r->backend->device->alloc(r->device, n_bytes, (void **)&d->blacklist, err)))
        return st;
    return r->backend->device->upload(r->device, d->blacklist, r->blacklist, n_bytes, err);
}

void di_drawer_deinit(di_runner *r) {
    di_drawer *d = &r->drawer;
    const di_device_ops *device = r->backend->device;
    void *const blocks[] = {d->input, d->output, d->tops, d->tokens, d->blacklist};
    void *const host[] = {d->results, d->top, d->confidences};
    for (size_t i = 0; i < DI_COUNT(blocks); i++) {
        if (blocks[i])
            device->free(r->device, blocks[i]);
    }
    for (size_t i = 0; i < DI_COUNT(host); i++) {
        if (host[i])
            device->free_host(r->device, host[i]);
    }
    device->event_destroy(d->is_drawn);
    di_sample_pack_deinit(&d->pack);
    *d = (di_drawer){0};
}

di_status di_drawer_begin(di_runner *r, int32_t n_rows, di_error *err) {
    return di_sample_pack_begin(&r->drawer.pack, n_rows, r->n_vocab, err);
}

static di_status make_room(di_runner *r, size_t n, size_t n_top, di_error *err) {
    const di_device_ops *device = r->backend->device;
    di_drawer *d = &r->drawer;
    const struct {
        void **p;
        size_t *cap, n_bytes;
        bool is_host;
    } blocks[] = {
        {&d->input, &d->input_bytes, di_sample_pack_bytes(&d->pack), false},
        {&d->output, &d->output_bytes, n * sizeof(di_sample_result), false},
        {&d->tops, &d->tops_bytes, n_top * sizeof(di_sample_top), false},
        {&d->tokens, &d->tokens_bytes, n * sizeof(int32_t), false},
        {&d->results, &d->results_bytes, n * sizeof(di_sample_result), true},
        {&d->top, &d->top_bytes, n_top * sizeof(di_sample_top), true},
        {&d->confidences, &d->confidences_bytes, n * sizeof(float), true},
    };
    di_status st = DI_OK;
    for (size_t i = 0; i < DI_COUNT(blocks) && !st; i++)
        st = grow(r, blocks[i].p, blocks[i].cap, blocks[i].n_bytes,
                  blocks[i].is_host ? device->alloc_host : device->alloc,
                  blocks[i].is_host ? device->free_host : device->free, err);
    return st;
}

di_status di_drawer_send(di_runner *r, di_error *err) {
    di_drawer *d = &r->drawer;
    const di_sample_pack *pack = &d->pack;
    di_status st = make_room(r, (size_t)pack->n_rows, (size_t)pack->n_top, err);
    return st ? st : r->backend->device->upload(r->device, d->input, pack->memory, di_sample_pack_bytes(pack), err);
}

di_status di_drawer_put(di_runner *r, const float *logits, int32_t first, int32_t n, di_error *err) {
    const di_drawer *d = &r->drawer;
    const di_sample_pack *pack = &d->pack;
    di_sample_rows_args args = {
        .logits = logits,
        .n_vocab = r->n_vocab,
        .n_rows = n,
        .rows = (const di_sample_row *)d->input + first,
        .plan = di_sample_pack_rows(pack) + first,
        .words = (const uint32_t *)(const void *)((const uint8_t *)d->input + di_sample_pack_words_at(pack)),
        .blacklist = d->blacklist,
        .results = (di_sample_result *)d->output + first,
        .tokens = (int32_t *)d->tokens + first,
        .top = d->tops,
    };
    return r->executor.sample(r->executor.self, &args, err);
}

di_status di_drawer_fetch_confidences(di_runner *r, const float *conf, int32_t first, int32_t n, di_error *err) {
    return r->backend->device->stream_download(r->executor.stream, (float *)r->drawer.confidences + first, conf,
                                               (size_t)n * sizeof *conf, err);
}

di_status di_drawer_fetch(di_runner *r, di_error *err) {
    const di_device_ops *device = r->backend->device;
    di_stream *stream = r->executor.stream;
    di_drawer *d = &r->drawer;
    size_t n = (size_t)d->pack.n_rows, n_top = (size_t)d->pack.n_top;
    di_status st = device->stream_download(stream, d->results, d->output, n * sizeof(di_sample_result), err);
    if (!st && n_top > 0)
        st = device->stream_download(stream, d->top, d->tops, n_top * sizeof(di_sample_top), err);
    return st ? st : device->event_record(d->is_drawn, stream, err);
}

di_status di_drawer_launch(di_runner *r, const float *logits, di_error *err) {
    int32_t n = r->drawer.pack.n_rows;
    if (n == 0)
        return DI_OK;
    di_status st = di_drawer_send(r, err);
    if (!st)
        st = di_drawer_put(r, logits, 0, n, err);
    return st ? st : di_drawer_fetch(r, err);
}

di_status di_drawer_wait(di_runner *r, di_logprob *top, di_error *err) {
    const di_drawer *d = &r->drawer;
    if (d->pack.n_rows == 0)
        return DI_OK;
    di_status st = r->backend->device->event_wait(d->is_drawn, err);
    if (!st && d->pack.n_top > 0)
        memcpy(top, d->top, (size_t)d->pack.n_top * sizeof *top);
    return st;
}

di_status di_drawer_run(di_runner *r, const float *logits, di_logprob *top, di_error *err) {
    di_status st = di_drawer_launch(r, logits, err);
    return st ? st : di_drawer_wait(r, top, err);
}
