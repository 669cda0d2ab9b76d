/* Fuzz target: the event streams that `bench serve` reads. However the bytes are cut, the events are the same; looking
 * into their data never reads beyond it. */
#include "cli/bench_sse.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static di_status on_event(void *user, const char *name, const char *data, size_t len, di_error *err) {
    di_strbuf *out = user;
    di_sse_chunk chunk;
    (void)err;
    DI_ASSERT(data[len] == '\0');
    di_sse_chunk_read(data, len, &chunk);
    DI_ASSERT(chunk.prompt_tokens >= -1 && chunk.output_tokens >= -1);
    di_strbuf_printf(out, "%s %zu %d%d%d %lld %lld:", name, len, chunk.is_end, chunk.is_error, chunk.has_text,
                     (long long)chunk.prompt_tokens, (long long)chunk.output_tokens);
    di_strbuf_append(out, data, len);
    return DI_OK;
}

/* The events of the bytes, fed in pieces of n; 0: at once. */
static void read_all(di_strbuf *out, const uint8_t *data, size_t size, size_t n) {
    di_error err;
    di_sse sse = {.callback = on_event, .user = out};
    for (size_t at = 0; at < size;) {
        size_t len = n == 0 || n > size - at ? size - at : n;
        DI_ASSERT(di_sse_feed(&sse, (const char *)data + at, len, &err) == DI_OK);
        at += len;
    }
    di_sse_deinit(&sse);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    di_strbuf whole = {0}, cut = {0};
    if (size == 0)
        return 0;
    read_all(&whole, data + 1, size - 1, 0);
    read_all(&cut, data + 1, size - 1, 1 + data[0] % 32u); /* the first byte says how */
    DI_ASSERT(whole.len == cut.len && (whole.len == 0 || memcmp(whole.data, cut.data, whole.len) == 0));
    di_strbuf_deinit(&whole);
    di_strbuf_deinit(&cut);
    return 0;
}
