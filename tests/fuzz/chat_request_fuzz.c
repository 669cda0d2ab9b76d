/* Any bytes as a request body: through every API and as a line, by both sets of rules. A refusal must have a message
 * that is an error object, a request that is taken must render, with its marks in order and where their spellings are.
 */
#include <stdlib.h>

#include "api/api.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool holds) {
    if (!holds) {
        abort();
    }
}

static void check_error(const di_request *request, di_status st, const di_error *err) {
    di_strbuf text = {0};
    di_json *v = NULL;
    require(st == DI_ERR_REQUEST && request->refusal != DI_REFUSAL_NONE && err->message[0]);
    di_request_error_json(&text, request, st, err);
    require(di_json_parse(&v, text.data, text.len, NULL) == DI_OK);
    di_json_free(v);
    di_strbuf_reset(&text);
    di_api_error_json(&text, request->api, 400, err->message, request->param, NULL);
    require(di_json_parse(&v, text.data, text.len, NULL) == DI_OK);
    di_json_free(v);
    di_strbuf_deinit(&text);
}

/* Completions: every prompt is a text or ids, and there are not more choices than can be counted. */
static void check_prompts(const di_request *request, di_prompt *prompt) {
    if (request->api != DI_API_COMPLETIONS) {
        return;
    }
    require(request->n_prompts >= 1 && request->prompts && request->input != DI_INPUT_CHAT);
    require(request->n >= 1 && (size_t)request->n * request->n_prompts <= 4096);
    for (size_t i = 0; i < request->n_prompts; i++) {
        require(di_request_encode_prompt(request, i, NULL, NULL, prompt, NULL, NULL) == DI_OK);
        require(prompt->n_marks == 0);
    }
}

static void check_prompt(const di_request *request, di_prompt *prompt) {
    check_prompts(request, prompt);
    require(di_request_encode(request, NULL, NULL, prompt, NULL, NULL) == DI_OK);
    size_t at = 0, n_images = 0;
    for (size_t i = 0; i < prompt->n_marks; i++) {
        const di_prompt_mark *mark = &prompt->marks[i];
        const char *spelling = di_chat_special_text(mark->special);
        require(mark->begin >= at && mark->end <= prompt->text.len && mark->end - mark->begin == strlen(spelling));
        require(memcmp(prompt->text.data + mark->begin, spelling, strlen(spelling)) == 0);
        n_images += mark->special == DI_CHAT_IMAGE;
        at = mark->end;
    }
    /* Of several reminders in a row only the first is rendered, and reminders have no images. */
    require(n_images == request->n_images);
    require(request->input != DI_INPUT_CHAT || prompt->marks[0].special == DI_CHAT_BOS);
    require(di_request_max_tokens(request, 100, 50) == 1);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    di_prompt prompt = {0};
    for (int i = 0; i < 10; i++) {
        di_request_options options;
        di_request_options_init(&options, i & 1);
        di_request request;
        di_error err = {0};
        di_status st = di_request_parse(&request, (di_api_kind)(i >> 1), (const char *)data, size, &options, &err);
        if (st) {
            check_error(&request, st, &err);
        } else {
            check_prompt(&request, &prompt);
        }
        di_request_deinit(&request);
    }
    di_prompt_deinit(&prompt);
    return 0;
}
