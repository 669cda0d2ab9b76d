/* Rendering of a conversation: chat.md sections 3 to 7 in one pass over the messages.
 *
 * The prompt grows as text plus marks. A mark is a special token that the renderer itself inserts, in the instruction
 * block for tools (chat_tools.c) too; whatever a request spells is plain text. Adjacent plain pieces form one run, and
 * a run is what the tokenizer sees on its own. Memory failures are sticky, so that the renderer reads like the format
 * and checks once at its end. */
#include "chat.h"

#include "chat_internal.h"

/* ------------------------------------------------------------------ the prompt and its marks */

static const char *const special_texts[DI_CHAT_N_SPECIAL] = {
    [DI_CHAT_BOS] = "<｜begin▁of▁sentence｜>",
    [DI_CHAT_EOS] = "<｜end▁of▁sentence｜>",
    [DI_CHAT_SYS] = "<｜System｜>",
    [DI_CHAT_USER_MARK] = "<｜User｜>",
    [DI_CHAT_ASSISTANT_MARK] = "<｜Assistant｜>",
    [DI_CHAT_THINK] = "<think>",
    [DI_CHAT_END_THINK] = "</think>",
    [DI_CHAT_DSML] = "｜DSML｜",
    [DI_CHAT_REMINDER_MARK] = "<｜latest_reminder｜>",
    [DI_CHAT_IMAGE] = "<｜image｜>",
};

/* The image placeholder is printed by one name and stored in the vocabulary under another. */
static const char image_entry[] = "<｜deepseek_image｜>";

const char *di_chat_special_text(di_chat_special special) {
    return special_texts[special];
}

di_status di_chat_vocab_init(di_chat_vocab *vocab, const di_tokenizer *tok, di_error *err) {
    di_chat_vocab found;
    for (int i = 0; i < DI_CHAT_N_SPECIAL; i++) {
        const char *entry = i == DI_CHAT_IMAGE ? image_entry : special_texts[i];
        found.ids[i] = di_tokenizer_find(tok, entry);
        bool is_needed = i != DI_CHAT_IMAGE && i != DI_CHAT_REMINDER_MARK;
        if (found.ids[i] < 0 && is_needed) {
            return di_fail(err, DI_ERR_UNSUPPORTED, "tokenizer: the chat format's token '%s' is missing", entry);
        }
    }
    *vocab = found;
    return DI_OK;
}

void di_prompt_deinit(di_prompt *prompt) {
    di_strbuf_deinit(&prompt->text);
    free(prompt->marks);
    *prompt = (di_prompt){0};
}

void di_prompt_reset(di_prompt *prompt) {
    di_strbuf_reset(&prompt->text);
    prompt->n_marks = 0;
    prompt->failed = false;
}

void di_prompt_special(di_prompt *prompt, di_chat_special special) {
    if (prompt->n_marks == prompt->cap) {
        size_t cap = prompt->cap ? 2 * prompt->cap : 32, n_bytes;
        di_prompt_mark *marks = di_size_mul(&n_bytes, cap, sizeof *marks) ? realloc(prompt->marks, n_bytes) : NULL;
        if (!marks) {
            prompt->failed = true;
            return;
        }
        prompt->marks = marks;
        prompt->cap = cap;
    }
    size_t begin = prompt->text.len;
    di_strbuf_puts(&prompt->text, special_texts[special]);
    prompt->marks[prompt->n_marks++] = (di_prompt_mark){.begin = begin, .end = prompt->text.len, .special = special};
}

void di_prompt_text(di_prompt *prompt, const char *s) {
    di_strbuf_puts(&prompt->text, s);
}

void di_prompt_bytes(di_prompt *prompt, const char *s, size_t n) {
    if (n > 0) {
        di_strbuf_append(&prompt->text, s, n);
    }
}

di_status di_prompt_encode(const di_prompt *prompt, const di_tokenizer *tok, const di_chat_vocab *vocab, di_ids *out,
                           di_error *err) {
    const char *text = di_strbuf_str(&prompt->text);
    size_t at = 0;
    di_status st = DI_OK;
    for (size_t i = 0; i <= prompt->n_marks; i++) {
        size_t end = i < prompt->n_marks ? prompt->marks[i].begin : prompt->text.len;
        if (end > at && (st = di_tokenizer_encode(tok, text + at, end - at, true, out, err))) {
            return st;
        }
        if (i == prompt->n_marks) {
            break;
        }
        const di_prompt_mark *mark = &prompt->marks[i];
        int32_t id = vocab->ids[mark->special];
        if (id < 0) {
            return di_fail(err, DI_ERR_UNSUPPORTED, "the prompt needs the token '%s', which this tokenizer lacks",
                           mark->special == DI_CHAT_IMAGE ? image_entry : special_texts[mark->special]);
        }
        if ((st = di_ids_append(out, &id, 1, err))) {
            return st;
        }
        at = mark->end;
    }
    return DI_OK;
}

/* ------------------------------------------------------------------ parts of a message */

static void put_content(di_prompt *prompt, const di_chat_message *m) {
    for (size_t i = 0; i < m->n_parts; i++) {
        const di_chat_part *part = &m->parts[i];
        if (i > 0) {
            di_prompt_text(prompt, "\n\n");
        }
        if (part->is_image) {
            di_prompt_special(prompt, DI_CHAT_IMAGE);
        } else {
            di_prompt_bytes(prompt, part->text.data, part->text.len);
        }
    }
}

/* Whether put_content would print anything; two empty parts do, their separator. */
static bool has_content(const di_chat_message *m) {
    return m->n_parts > 1 || (m->n_parts == 1 && (m->parts[0].is_image || m->parts[0].text.len > 0));
}

static void put_tag(di_prompt *prompt, const char *before, const char *after) {
    di_prompt_text(prompt, before);
    di_prompt_special(prompt, DI_CHAT_DSML);
    di_prompt_text(prompt, after);
}

void di_prompt_open_calls(di_prompt *prompt) {
    put_tag(prompt, "\n\n<", " calls>\n");
}

/* One parameter of an invocation. Names and string values are printed as they are: the format has no escapes. */
static void put_parameter(di_prompt *prompt, const char *key, size_t key_len, const di_json *value) {
    put_tag(prompt, "<", " parameter name=\"");
    di_prompt_bytes(prompt, key, key_len);
    size_t len = 0;
    const char *text = di_json_str(value, &len);
    if (text) {
        di_prompt_text(prompt, "\" string=\"true\">");
        di_prompt_bytes(prompt, text, len);
    } else {
        di_prompt_text(prompt, "\" string=\"false\">");
        di_json_write(&prompt->text, value, DI_JSON_SPACED);
    }
    put_tag(prompt, "</", " parameter>");
}

/* Arguments that are not a JSON object are shown whole, as one parameter named `arguments`. */
static void put_call(di_prompt *prompt, const di_chat_call *call) {
    put_tag(prompt, "<", " invoke name=\"");
    di_prompt_bytes(prompt, call->name.data, call->name.len);
    di_prompt_text(prompt, "\">\n");

    di_json *arguments = NULL;
    di_status st =
        di_json_parse(&arguments, call->arguments.len ? call->arguments.data : "", call->arguments.len, NULL);
    if (st == DI_ERR_MEMORY) {
        prompt->failed = true;
    } else if (st == DI_OK && di_json_is(arguments, DI_JSON_OBJECT)) {
        bool is_first = true;
        for (void *it = di_json_iter(arguments); it; it = di_json_iter_next(arguments, it)) {
            if (!is_first) {
                di_prompt_text(prompt, "\n");
            }
            is_first = false;
            size_t key_len;
            const char *key = di_json_iter_key(it, &key_len);
            put_parameter(prompt, key, key_len, di_json_iter_value(it));
        }
    } else {
        put_tag(prompt, "<", " parameter name=\"arguments\" string=\"true\">");
        di_prompt_bytes(prompt, call->arguments.data, call->arguments.len);
        put_tag(prompt, "</", " parameter>");
    }
    di_json_free(arguments);

    di_prompt_text(prompt, "\n");
    put_tag(prompt, "</", " invoke>");
}

static void put_calls(di_prompt *prompt, const di_chat_message *m) {
    if (m->n_calls == 0) {
        return;
    }
    di_prompt_open_calls(prompt);
    for (size_t i = 0; i < m->n_calls; i++) {
        if (i > 0) {
            di_prompt_text(prompt, "\n");
        }
        put_call(prompt, &m->calls[i]);
    }
    put_tag(prompt, "\n</", " calls>");
}

/* ------------------------------------------------------------------ messages */

static void put_assistant(di_prompt *prompt, const di_chat *chat, const di_chat_message *m, bool keeps_reasoning) {
    di_prompt_special(prompt, DI_CHAT_ASSISTANT_MARK);
    if (chat->thinking && keeps_reasoning) {
        di_prompt_special(prompt, DI_CHAT_THINK);
        di_prompt_bytes(prompt, m->reasoning.data, m->reasoning.len);
    }
    di_prompt_special(prompt, DI_CHAT_END_THINK);
    put_content(prompt, m);
    put_calls(prompt, m);
    di_prompt_special(prompt, DI_CHAT_EOS);
}

/* The last message stays open: the model goes on with its reasoning, or with its content where there is some. */
static void put_prefix(di_prompt *prompt, const di_chat *chat, const di_chat_message *m) {
    di_prompt_special(prompt, DI_CHAT_ASSISTANT_MARK);
    if (chat->thinking) {
        di_prompt_special(prompt, DI_CHAT_THINK);
        di_prompt_bytes(prompt, m->reasoning.data, m->reasoning.len);
    }
    if (!chat->thinking || has_content(m)) {
        di_prompt_special(prompt, DI_CHAT_END_THINK);
        put_content(prompt, m);
    }
}

typedef struct result_slot {
    int64_t call; /* position of its call in the assistant message, 0 when unknown */
    size_t message;
} result_slot;

static int compare_slots(const void *a, const void *b) {
    const result_slot *x = a, *y = b;
    if (x->call != y->call) {
        return x->call < y->call ? -1 : 1;
    }
    return x->message < y->message ? -1 : x->message > y->message;
}

/* Fills slots with the results among messages first .. end-1, sorted by the position of their call in `caller` (NULL:
 * no calls before them). The map makes long runs linear. */
static bool sort_results(const di_chat *chat, const di_chat_message *caller, size_t first, size_t end,
                         result_slot *slots) {
    di_map positions = {0};
    bool ok = true;
    for (size_t i = 0; caller && i < caller->n_calls && ok; i++) {
        const di_chat_text *id = &caller->calls[i].id;
        int64_t seen;
        if (!di_map_get(&positions, id->len ? id->data : "", id->len, &seen)) {
            ok = di_map_set(&positions, id->len ? id->data : "", id->len, (int64_t)i, NULL, NULL) == DI_OK;
        }
    }
    size_t n = 0;
    for (size_t i = first; i < end && ok; i++) {
        const di_chat_message *m = &chat->messages[i];
        if (m->role == DI_CHAT_TOOL) {
            slots[n] = (result_slot){.call = 0, .message = i};
            (void)di_map_get(&positions, m->call_id.len ? m->call_id.data : "", m->call_id.len, &slots[n].call);
            n++;
        }
    }
    di_map_deinit(&positions);
    if (ok && n > 1) {
        qsort(slots, n, sizeof *slots, compare_slots);
    }
    return ok;
}

/* One turn of user-class messages, first .. end-1: user bodies keep their places, results are sorted among theirs. */
static void put_user_run(di_prompt *prompt, const di_chat *chat, const di_chat_message *caller, size_t first,
                         size_t end) {
    size_t n_bytes, n_results = 0, next = 0;
    for (size_t i = first; i < end; i++) {
        n_results += chat->messages[i].role == DI_CHAT_TOOL;
    }
    result_slot *slots = NULL;
    if (n_results > 0) {
        slots = di_size_mul(&n_bytes, n_results, sizeof *slots) ? malloc(n_bytes) : NULL;
        if (!slots || !sort_results(chat, caller, first, end, slots)) {
            free(slots);
            prompt->failed = true;
            return;
        }
    }
    di_prompt_special(prompt, DI_CHAT_USER_MARK);
    for (size_t i = first; i < end; i++) {
        if (i > first) {
            di_prompt_text(prompt, "\n\n");
        }
        if (chat->messages[i].role == DI_CHAT_USER) {
            put_content(prompt, &chat->messages[i]);
        } else {
            di_prompt_text(prompt, "<tool_result>");
            put_content(prompt, &chat->messages[slots[next++].message]);
            di_prompt_text(prompt, "</tool_result>");
        }
    }
    free(slots);
}

/* Tools that were deferred and that a system message loads; this does not count as offering tools. */
static void put_loaded_tools(di_prompt *prompt, const di_chat_message *m) {
    if (m->n_tools > 0) {
        di_prompt_text(prompt, "\n\n### Updated Tool Schemas\n\n");
        di_prompt_tool_lines(prompt, m->tools, m->n_tools, true);
    }
}

/* The block before the first message: the effort, a first system message, tools and response format. Returns the number
 * of messages that it took. */
static size_t put_opening(di_prompt *prompt, const di_chat *chat, bool offers_tools) {
    bool has_system = chat->n_messages > 0 && chat->messages[0].role == DI_CHAT_SYSTEM;
    bool has_format = chat->format == DI_CHAT_FORMAT_JSON_OBJECT || chat->format == DI_CHAT_FORMAT_JSON_SCHEMA;
    if (!chat->thinking && !has_system && !offers_tools && !has_format) {
        return 0;
    }
    di_prompt_special(prompt, DI_CHAT_SYS);
    if (chat->thinking) {
        di_strbuf_printf(
            &prompt->text,
            "Reasoning Effort: %d (range 1-100, the higher the value, the more thorough the reasoning)\n\n",
            chat->effort);
    }
    if (has_system) {
        put_content(prompt, &chat->messages[0]);
        put_loaded_tools(prompt, &chat->messages[0]);
    }
    if (offers_tools) {
        di_prompt_tool_block(prompt, chat->tools, chat->n_tools);
    }
    if (has_format) {
        di_prompt_text(prompt,
                       "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n");
        if (chat->format == DI_CHAT_FORMAT_JSON_OBJECT) {
            di_prompt_text(prompt, "{\"type\": \"json_object\"}");
        } else {
            di_json_write(&prompt->text, chat->schema, DI_JSON_SPACED);
        }
    }
    return has_system ? 1 : 0;
}

di_status di_chat_render(const di_chat *chat, di_prompt *prompt, di_error *err) {
    di_prompt_reset(prompt);
    if (chat->thinking && (chat->effort < 1 || chat->effort > 100)) {
        return di_fail(err, DI_ERR_RANGE, "effort %d, expected 1 to 100", chat->effort);
    }
    bool offers_tools = di_chat_offers_tools(chat);
    di_prompt_special(prompt, DI_CHAT_BOS);
    size_t i = put_opening(prompt, chat, offers_tools);
    const di_chat_message *caller = NULL; /* the nearest assistant message with calls */
    bool is_open = false;
    while (i < chat->n_messages) {
        const di_chat_message *m = &chat->messages[i];
        size_t end = i + 1;
        switch (m->role) {
        case DI_CHAT_SYSTEM:
            di_prompt_special(prompt, DI_CHAT_SYS);
            put_content(prompt, m);
            put_loaded_tools(prompt, m);
            break;
        case DI_CHAT_USER:
        case DI_CHAT_TOOL:
            while (end < chat->n_messages &&
                   (chat->messages[end].role == DI_CHAT_USER || chat->messages[end].role == DI_CHAT_TOOL)) {
                end++;
            }
            put_user_run(prompt, chat, caller, i, end);
            break;
        case DI_CHAT_REMINDER:
            while (end < chat->n_messages && chat->messages[end].role == DI_CHAT_REMINDER) {
                end++;
            }
            di_prompt_special(prompt, DI_CHAT_REMINDER_MARK);
            put_content(prompt, m);
            break;
        case DI_CHAT_ASSISTANT:
            if (m->is_prefix && end == chat->n_messages) {
                put_prefix(prompt, chat, m);
                is_open = true;
            } else {
                put_assistant(prompt, chat, m, offers_tools);
            }
            if (m->n_calls > 0) {
                caller = m;
            }
            break;
        }
        i = end;
    }
    if (!is_open) {
        di_prompt_special(prompt, DI_CHAT_ASSISTANT_MARK);
        di_prompt_special(prompt, chat->thinking ? DI_CHAT_THINK : DI_CHAT_END_THINK);
        if (offers_tools && chat->tool_choice == DI_CHAT_CHOICE_REQUIRED && !chat->thinking) {
            di_prompt_open_calls(prompt);
        }
    }
    if (prompt->failed) {
        return di_fail(err, DI_ERR_MEMORY, "rendering a conversation of %zu messages", chat->n_messages);
    }
    return di_strbuf_status(&prompt->text, err);
}

bool di_chat_offers_tools(const di_chat *chat) {
    if (chat->tool_choice == DI_CHAT_CHOICE_NONE) {
        return false;
    }
    for (size_t i = 0; i < chat->n_tools; i++) {
        if (!chat->tools[i].is_deferred) {
            return true;
        }
    }
    return false;
}

di_chat_stage di_chat_stage_of(const di_chat *chat) {
    if (!chat->thinking) {
        return DI_CHAT_STAGE_CONTENT;
    }
    const di_chat_message *last = chat->n_messages ? &chat->messages[chat->n_messages - 1] : NULL;
    if (!last || last->role != DI_CHAT_ASSISTANT || !last->is_prefix) {
        return DI_CHAT_STAGE_REASONING;
    }
    if (has_content(last)) {
        return DI_CHAT_STAGE_CONTENT_RESUMED;
    }
    return last->reasoning.len > 0 ? DI_CHAT_STAGE_REASONING_RESUMED : DI_CHAT_STAGE_REASONING;
}
