/* Result lines of `run --input`, written key by key in the order of interface.md.
 *
 * Every line has id, text, token_ids, finish_reason and usage, whether the request ran or was refused, so that a reader
 * needs no cases; index, message, seed, logprobs, prompt_logprobs and error come where they apply. */
#include "api.h"

/* What a request may ask for that has to be done or refused, never dropped. */
di_status di_line_check(const di_request *request, di_error *err) {
    if (request->n_images > 0) {
        const di_chat_text path = request->images[0]->path;
        return di_fail(err, DI_ERR_REQUEST, "'%.*s' is an image, images are not supported yet",
                       (int)DI_MIN(path.len, 200u), path.data ? path.data : "");
    }
    return DI_OK;
}

/* index: which of several samples, -1 = the only one. */
static void write_head(di_strbuf *out, const di_request *request, int32_t index, const char *text, size_t len) {
    di_strbuf_puts(out, "{\"id\":");
    if (request->id) {
        di_json_write(out, request->id, DI_JSON_COMPACT);
    } else {
        di_strbuf_puts(out, "null");
    }
    if (index >= 0)
        di_strbuf_printf(out, ",\"index\":%d", index);
    di_strbuf_puts(out, ",\"text\":");
    di_json_write_string(out, text, len);
}

static void write_ids(di_strbuf *out, const int32_t *ids, int64_t n) {
    di_strbuf_puts(out, ",\"token_ids\":[");
    for (int64_t i = 0; i < n; i++)
        di_strbuf_printf(out, "%s%d", i ? "," : "", ids[i]);
    di_strbuf_putc(out, ']');
}

static void write_usage(di_strbuf *out, const di_generation *gen) {
    static const di_generation none;
    gen = gen ? gen : &none;
    di_strbuf_printf(out,
                     ",\"usage\":{\"prompt_tokens\":%lld,\"completion_tokens\":%lld,\"cached_tokens\":%lld,"
                     "\"draft_tokens\":%lld,\"accepted_tokens\":%lld}",
                     (long long)gen->n_prompt, (long long)gen->n_tokens, (long long)gen->n_cached,
                     (long long)gen->n_drafts, (long long)gen->n_accepted);
}

/* A float of 32 bits in the shortest form that reads back as the same float. */
static void write_float(di_strbuf *out, float v) {
    char text[32];
    for (int digits = 6; digits <= 9; digits++) {
        double back;
        snprintf(text, sizeof text, "%.*g", digits, (double)v);
        if (di_parse_double(text, &back) && (float)back == v)
            break;
    }
    di_strbuf_puts(out, text);
}

/* A token with its log-probability and those of the n_top best there were. */
static void write_logprob(di_strbuf *out, int32_t token, float logprob, const di_logprob *top, int32_t n_top) {
    di_strbuf_printf(out, "{\"token_id\":%d,\"logprob\":", token);
    write_float(out, logprob);
    di_strbuf_puts(out, ",\"top\":[");
    for (int32_t k = 0; k < n_top && top[k].token >= 0; k++) {
        di_strbuf_printf(out, "%s[%d,", k ? "," : "", top[k].token);
        write_float(out, top[k].logprob);
        di_strbuf_putc(out, ']');
    }
    di_strbuf_puts(out, "]}");
}

static void write_logprobs(di_strbuf *out, const di_generation *gen) {
    di_strbuf_puts(out, ",\"logprobs\":[");
    for (int64_t i = 0; i < gen->n_tokens; i++) {
        if (i > 0)
            di_strbuf_putc(out, ',');
        write_logprob(out, gen->tokens[i], gen->logprobs[i], gen->n_top ? &gen->top[i * gen->n_top] : NULL, gen->n_top);
    }
    di_strbuf_putc(out, ']');
}

/* Nothing comes before the first token of a prompt, so it has none. */
static void write_prompt_logprobs(di_strbuf *out, const di_generation *gen) {
    di_strbuf_puts(out, ",\"prompt_logprobs\":[null");
    for (int64_t i = 1; i < gen->n_prompt; i++) {
        di_strbuf_putc(out, ',');
        write_logprob(out, gen->prompt[i], gen->prompt_logprobs[i],
                      gen->n_prompt_top ? &gen->prompt_top[i * gen->n_prompt_top] : NULL, gen->n_prompt_top);
    }
    di_strbuf_putc(out, ']');
}

static void write_error(di_strbuf *out, const di_request *request, di_status status, const di_error *err) {
    di_strbuf_puts(out, ",\"error\":");
    di_request_error_json(out, request, status, err);
}

void di_line_result(di_strbuf *out, const di_request *request, const di_generation *gen, const di_reply *reply) {
    write_head(out, request, request->n > 1 ? gen->index : -1, gen->text, gen->text_len);
    write_ids(out, gen->tokens, gen->n_tokens);
    di_json *message = reply ? di_reply_message(reply) : NULL;
    if (message) {
        di_strbuf_puts(out, ",\"message\":");
        di_json_write(out, message, DI_JSON_COMPACT);
        di_json_free(message);
    } else if (reply) {
        out->failed = true; /* memory is short: di_strbuf_status says so */
    }
    /* A line says how the generation ended; that it ended in calls is seen in the message. */
    di_finish finish = gen->finish == DI_FINISH_TOOL_CALLS ? DI_FINISH_STOP : gen->finish;
    di_strbuf_printf(out, ",\"finish_reason\":\"%s\"", di_finish_name(finish));
    if (gen->has_seed)
        di_strbuf_printf(out, ",\"seed\":%llu", (unsigned long long)gen->seed);
    write_usage(out, gen);
    if (request->sampling.n_logprobs >= 0 && (gen->logprobs || gen->n_tokens == 0))
        write_logprobs(out, gen);
    if (request->sampling.n_prompt_logprobs >= 0 && gen->prompt_logprobs)
        write_prompt_logprobs(out, gen);
    if (gen->finish == DI_FINISH_ERROR)
        write_error(out, request, gen->error.code, &gen->error);
    di_strbuf_puts(out, "}\n");
}

void di_line_error(di_strbuf *out, const di_request *request, di_status status, const di_error *err) {
    write_head(out, request, -1, "", 0);
    write_ids(out, NULL, 0);
    di_strbuf_puts(out, ",\"finish_reason\":\"error\"");
    write_usage(out, NULL);
    write_error(out, request, status, err);
    di_strbuf_puts(out, "}\n");
}
