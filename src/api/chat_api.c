/* The public chat API (include/deepinfer/text.h): a request body to its prompt and ids.
 *
 * What the body means is request.c's business, the format text/chat.c's; here results move into memory of the caller's
 * own, which di_free releases. */
#include "api.h"

#include "deepinfer/text.h"

static di_status read_options(const di_chat_encode_options *given, di_api_kind *api, di_request_options *options,
                              di_error *err) {
    const di_chat_encode_options none = {0};
    given = given ? given : &none;
    *api = DI_API_CHAT;
    if (given->api && (!di_api_kind_parse(given->api, api) || *api == DI_API_LINE || *api == DI_API_COMPLETIONS)) {
        return di_fail(err, DI_ERR_ARG, "api '%s', expected chat, responses or messages", given->api);
    }
    di_request_options_init(options, given->vendor_compat);
    return given->reasoning ? di_effort_parse(given->reasoning, &options->effort_default, err) : DI_OK;
}

di_status di_chat_encode(const di_tokenizer *tok, const char *body, size_t len, const di_chat_encode_options *options,
                         char **prompt, size_t *prompt_len, int32_t **ids, size_t *n_ids, di_error *err) {
    di_request request = {0};
    di_request_options request_options;
    di_chat_vocab vocab;
    di_api_kind api;
    di_prompt rendered = {0};
    di_ids encoded = {0};
    di_status st;
    if ((st = read_options(options, &api, &request_options, err)) || (st = di_chat_vocab_init(&vocab, tok, err)) ||
        (st = di_request_parse(&request, api, body, len, &request_options, err)) ||
        (st = di_request_encode(&request, tok, &vocab, &rendered, &encoded, err))) {
        goto out;
    }
    /* A prompt always has its begin-of-sentence mark, so neither buffer is empty; ownership moves to the caller. */
    *prompt = rendered.text.data;
    *ids = encoded.data;
    *n_ids = encoded.len;
    if (prompt_len) {
        *prompt_len = rendered.text.len;
    }
    rendered.text = (di_strbuf){0};
    encoded = (di_ids){0};
out:
    di_ids_deinit(&encoded);
    di_prompt_deinit(&rendered);
    di_request_deinit(&request);
    return st;
}
