/* Plain prompts: bodies of /v1/completions, and lines of `run --input`, which have a prompt or messages.
 *
 * A prompt is a text or a list of ids; completions may have several of them. The hosted service has no plain prompts,
 * so its rules do not apply here. The fields that say how the answer is sampled are those of chat. */
#include "request_internal.h"

enum { CHOICES_MAX = 4096 }; /* of one body: prompts times samples */

static di_status read_ids_prompt(di_reader *r, const di_json *list, const char *at, di_request_prompt *prompt) {
    prompt->input = DI_INPUT_IDS;
    di_status st = di_read_token_ids(r, list, at, &prompt->ids, &prompt->n_ids);
    if (st == DI_OK && prompt->n_ids == 0) {
        st = di_refuse(r, at, "%s: an empty prompt, expected one token or more", at);
    }
    return st;
}

/* A plain request: its first prompt is the one that all who know only one prompt see. */
static void set_prompts(di_reader *r, const di_request_prompt *prompts) {
    di_request *q = r->req;
    q->vendor_compat = false;
    q->input = prompts[0].input;
    q->text = prompts[0].text;
    q->ids = prompts[0].ids;
    q->n_ids = prompts[0].n_ids;
}

/* ------------------------------------------------------------------ completions */

static di_status read_text_prompt(di_reader *r, const di_json *v, const char *at, di_request_prompt *prompt) {
    prompt->input = DI_INPUT_TEXT;
    prompt->text = di_text_of(v);
    /* With a begin mark an empty text is the beginning of some text. */
    return prompt->text.len > 0 || !r->req->is_without_bos
               ? DI_OK
               : di_refuse(r, at, "%s: an empty text without a begin mark, expected one character or more", at);
}

/* An element of a list of prompts. */
static di_status read_prompt_at(di_reader *r, const di_json *v, const char *at, di_request_prompt *prompt) {
    if (di_json_is(v, DI_JSON_STRING)) {
        return read_text_prompt(r, v, at, prompt);
    }
    if (di_json_is(v, DI_JSON_ARRAY)) {
        return read_ids_prompt(r, v, at, prompt);
    }
    return di_refuse_body(r, at, "'%s': expected a string or a list of token ids, found %s", at, di_json_kind_name(v));
}

/* `prompt`: a string, a list of ids, or a list of strings and lists of ids. */
static di_status read_prompts(di_reader *r, const di_json *body) {
    const di_json *v = di_json_get(body, "prompt"), *first = di_json_at(v, 0);
    bool is_list = di_json_is(v, DI_JSON_ARRAY);
    if (!v || di_json_is(v, DI_JSON_NULL)) {
        return di_refuse_body(r, "prompt", "missing field `prompt`");
    }
    if (!is_list && !di_json_is(v, DI_JSON_STRING)) {
        return di_refuse_body(r, "prompt", "'prompt': expected a string or a list, found %s", di_json_kind_name(v));
    }
    if (is_list && di_json_array_len(v) == 0) {
        return di_refuse(r, "prompt", "prompt: an empty list, expected one prompt or more");
    }
    bool is_one = !is_list || di_json_is(first, DI_JSON_INT) || di_json_is(first, DI_JSON_UINT);
    size_t n = is_one ? 1 : di_json_array_len(v);
    if (n > CHOICES_MAX) {
        return di_refuse(r, "prompt", "prompt: a list of %zu, expected at most %d prompts", n, CHOICES_MAX);
    }
    di_request_prompt *prompts = di_arena_calloc(&r->req->arena, n, sizeof *prompts);
    if (!prompts) {
        return di_reader_no_memory(r);
    }
    di_status st = is_one ? read_prompt_at(r, v, "prompt", prompts) : DI_OK;
    for (size_t i = 0; !is_one && i < n && st == DI_OK; i++) {
        st = read_prompt_at(r, di_json_at(v, i), di_place_of("prompt[%zu]", i).text, &prompts[i]);
    }
    r->req->n_prompts = n;
    r->req->prompts = prompts;
    set_prompts(r, prompts);
    return st;
}

/* Fields of the API that have one value that can be done. */
static di_status check_the_rest(di_reader *r, const di_json *body) {
    const di_request *q = r->req;
    di_chat_text suffix = {0};
    int64_t best_of = q->n;
    bool has;
    di_status st = di_read_string(r, body, "", "suffix", &suffix, &has);
    if (st || (st = di_read_int(r, body, "", "best_of", &best_of, &has))) {
        return st;
    }
    if (suffix.len > 0) {
        return di_refuse(r, "suffix", "suffix: text before a given end is not supported, expected it to be absent");
    }
    if (best_of != q->n) {
        return di_refuse(r, "best_of", "best_of: %lld, expected n, which is %lld: all samples are given back",
                         (long long)best_of, (long long)q->n);
    }
    if (q->n > CHOICES_MAX / (int64_t)q->n_prompts) {
        return di_refuse(r, "n", "n: %lld samples of %zu prompts, expected at most %d in all", (long long)q->n,
                         q->n_prompts, CHOICES_MAX);
    }
    return DI_OK;
}

di_status di_read_completions(di_reader *r, const di_json *body) {
    di_request *q = r->req;
    bool adds_specials = true;
    q->vendor_compat = false;
    di_status st = di_read_model(r, body);
    if (st || (st = di_read_bool(r, body, "", "add_special_tokens", &adds_specials, NULL))) {
        return st;
    }
    q->is_without_bos = !adds_specials;
    if ((st = read_prompts(r, body)) || (st = di_read_bool(r, body, "", "echo", &q->echo, NULL)) ||
        (st = di_read_sampling(r, body, &di_chat_field_names)) || (st = check_the_rest(r, body))) {
        return st;
    }
    return di_read_response_format(r, body);
}

/* ------------------------------------------------------------------ lines */

di_status di_read_line(di_reader *r, const di_json *body) {
    const di_json *messages = di_json_get(body, "messages"), *ids;
    bool has_prompt, has_messages = messages && !di_json_is(messages, DI_JSON_NULL);
    di_request_prompt prompt = {.input = DI_INPUT_TEXT};
    r->req->id = di_json_get(body, "id");
    di_status st = di_read_string(r, body, "", "prompt", &prompt.text, &has_prompt);
    if (st || (st = di_read_array(r, body, "", "prompt_token_ids", &ids))) {
        return st;
    }
    int n_inputs = has_messages + has_prompt + (ids != NULL);
    if (n_inputs != 1) {
        return di_refuse(r, n_inputs ? "prompt" : "messages",
                         "%s of messages, prompt and prompt_token_ids, expected exactly one",
                         n_inputs ? "more than one" : "none");
    }
    if (has_messages) {
        return di_read_chat(r, body);
    }
    if (ids && (st = read_ids_prompt(r, ids, "prompt_token_ids", &prompt))) {
        return st;
    }
    if (!ids && prompt.text.len == 0) {
        return di_refuse(r, "prompt", "prompt: an empty text, expected one character or more");
    }
    set_prompts(r, &prompt);
    st = di_read_sampling(r, body, &di_chat_field_names);
    return st ? st : di_read_response_format(r, body);
}
