/* Lines of `run --input`, any bytes: reading one ends in a request or a refusal, never in a fault, and what a refused
 * line gives back is one line of valid JSON with the right keys.
 *
 * The first byte picks the options, the rest is the line. */
#include "api/api.h"

static void check_result(const di_strbuf *out) {
    di_json *v = NULL;
    di_error err;
    DI_ASSERT(out->len > 0 && out->data[out->len - 1] == '\n');
    DI_ASSERT(memchr(out->data, '\n', out->len) == out->data + out->len - 1);
    DI_ASSERT(di_json_parse(&v, out->data, out->len - 1, &err) == DI_OK);
    DI_ASSERT(di_json_get(v, "id") && di_json_get(v, "text") && di_json_get(v, "token_ids"));
    const di_json *message = di_json_get(di_json_get(v, "error"), "message");
    DI_ASSERT(di_json_is(message, DI_JSON_STRING));
    di_json_free(v);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size == 0)
        return 0;
    di_request_options options;
    di_request_options_init(&options, data[0] & 1);
    if (data[0] & 2)
        options.effort_default = 50;
    di_request request;
    di_error err = {0};
    di_strbuf out = {0};
    di_status st = di_request_parse(&request, DI_API_LINE, (const char *)data + 1, size - 1, &options, &err);
    if (!st)
        st = di_line_check(&request, &err);
    if (!st) {
        DI_ASSERT(di_sampling_check(&request.sampling, &err) == DI_OK);
        DI_ASSERT(request.n >= 1 && request.n <= 4096);
        for (size_t i = 0; i < request.n_forced; i++)
            DI_ASSERT(request.forced[i] >= 0);
        int64_t n = di_request_max_tokens(&request, 100, 1000);
        DI_ASSERT(n >= 1 && n <= 900);
        if (request.input != DI_INPUT_IDS) {
            di_prompt prompt = {0};
            DI_ASSERT(di_request_encode(&request, NULL, NULL, &prompt, NULL, &err) == DI_OK);
            di_prompt_deinit(&prompt);
        }
    } else {
        DI_ASSERT(err.message[0]);
        di_line_error(&out, &request, st, &err);
        check_result(&out);
    }
    di_strbuf_deinit(&out);
    di_request_deinit(&request);
    return 0;
}
