/* The version, and the public text API: results in memory of their own, over the growing buffers of src/text.
 *
 * The functions of include/deepinfer/text.h that take and give plain values are those of src/text themselves; only what
 * hands out memory is wrapped here. */
#include "deepinfer/deepinfer.h"
#include "text/text.h"

struct di_token_stream {
    di_detokenizer detokenizer;
    di_strbuf released; /* owned: what the last call gave out */
};

const char *di_version(void) {
    return DI_VERSION;
}

void di_free(void *memory) {
    free(memory);
}

di_status di_tokenizer_tokenize(const di_tokenizer *tok, const char *text, size_t len, bool plain, int32_t **ids,
                                size_t *n_ids, di_error *err) {
    di_ids out = {0};
    di_status status = di_tokenizer_encode(tok, text, len, plain, &out, err);
    if (!status && !out.data) { /* no ids are an array too, so that NULL never means success */
        out.data = calloc(1, sizeof *out.data);
        status = out.data ? DI_OK : di_fail(err, DI_ERR_MEMORY, "out of memory for token ids");
    }
    if (status) {
        di_ids_deinit(&out);
        return status;
    }
    *ids = out.data;
    *n_ids = out.len;
    return DI_OK;
}

di_status di_tokenizer_detokenize(const di_tokenizer *tok, const int32_t *ids, size_t n_ids, bool skip_special,
                                  char **text, size_t *len, di_error *err) {
    di_strbuf out = {0};
    di_status status = di_tokenizer_decode(tok, ids, n_ids, skip_special, &out, err);
    if (!status && !out.data) {
        out.data = calloc(1, 1);
        status = out.data ? DI_OK : di_fail(err, DI_ERR_MEMORY, "out of memory for a text");
    }
    if (status) {
        di_strbuf_deinit(&out);
        return status;
    }
    *text = out.data;
    if (len) {
        *len = out.len;
    }
    return DI_OK;
}

di_status di_token_stream_create(di_token_stream **out, const di_tokenizer *tok, di_error *err) {
    di_token_stream *stream = calloc(1, sizeof *stream);
    if (!stream) {
        return di_fail(err, DI_ERR_MEMORY, "out of memory for a token stream");
    }
    di_detokenizer_init(&stream->detokenizer, tok);
    *out = stream;
    return DI_OK;
}

void di_token_stream_destroy(di_token_stream *stream) {
    if (stream) {
        di_strbuf_deinit(&stream->released);
        free(stream);
    }
}

static di_status give_released(di_token_stream *stream, const char **text, size_t *len, di_error *err) {
    di_status status = di_strbuf_status(&stream->released, err);
    if (!status) {
        *text = di_strbuf_str(&stream->released);
        *len = stream->released.len;
    }
    return status;
}

di_status di_token_stream_push(di_token_stream *stream, int32_t id, const char **text, size_t *len, di_error *err) {
    di_strbuf_reset(&stream->released);
    di_detokenizer_push(&stream->detokenizer, id, &stream->released);
    return give_released(stream, text, len, err);
}

di_status di_token_stream_flush(di_token_stream *stream, const char **text, size_t *len, di_error *err) {
    di_strbuf_reset(&stream->released);
    di_detokenizer_flush(&stream->detokenizer, &stream->released);
    return give_released(stream, text, len, err);
}
