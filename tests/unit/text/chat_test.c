/* The chat format by hand-written conversations: the rules of rendering one by one, trust of text, tools, strict
 * schemas, image grids, and ids through the tiny model's tokenizer. Expected prompts are chat.md's, written out. */
#include "harness.h"

#include "text/text.h"

#define BOS "<｜begin▁of▁sentence｜>"
#define EOS "<｜end▁of▁sentence｜>"
#define SYS "<｜System｜>"
#define USER "<｜User｜>"
#define ASSISTANT "<｜Assistant｜>"
#define REMINDER "<｜latest_reminder｜>"
#define DSML "｜DSML｜"
#define EFFORT_75 "Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough the reasoning)\n\n"

#define TEXT(s) ((di_chat_text){.data = (s), .len = sizeof(s) - 1})
#define PART(s) (&(di_chat_part){.text = TEXT(s)})
#define MESSAGE(r, s) ((di_chat_message){.role = (r), .n_parts = 1, .parts = PART(s)})

static void check(const di_chat *chat, const char *want) {
    di_prompt prompt = {0};
    di_error err;
    di_test_ok(di_chat_render(chat, &prompt, &err), &err);
    assert_string_equal(di_strbuf_str(&prompt.text), want);
    size_t at = 0;
    for (size_t i = 0; i < prompt.n_marks; i++) {
        const di_prompt_mark *mark = &prompt.marks[i];
        const char *spelling = di_chat_special_text(mark->special);
        assert_true(mark->begin >= at && mark->end - mark->begin == strlen(spelling));
        assert_memory_equal(prompt.text.data + mark->begin, spelling, strlen(spelling));
        at = mark->end;
    }
    di_prompt_deinit(&prompt);
}

static size_t count_marks(const di_chat *chat, di_chat_special special) {
    di_prompt prompt = {0};
    di_error err;
    size_t n = 0;
    di_test_ok(di_chat_render(chat, &prompt, &err), &err);
    for (size_t i = 0; i < prompt.n_marks; i++) {
        n += prompt.marks[i].special == special;
    }
    di_prompt_deinit(&prompt);
    return n;
}

static di_json *json_of(const char *text) {
    di_json *v = NULL;
    di_error err;
    di_test_ok(di_json_parse(&v, text, strlen(text), &err), &err);
    return v;
}

/* ------------------------------------------------------------------ rules of rendering */

static void empty_conversation_has_a_header(void **state) {
    (void)state;
    check(&(di_chat){0}, BOS ASSISTANT "</think>");
    check(&(di_chat){.thinking = true, .effort = 75}, BOS SYS EFFORT_75 ASSISTANT "<think>");
}

static void effort_is_checked(void **state) {
    (void)state;
    di_prompt prompt = {0};
    di_error err;
    for (int effort = 0; effort <= 101; effort += 101) {
        di_chat chat = {.thinking = true, .effort = effort};
        assert_int_equal(di_chat_render(&chat, &prompt, &err), DI_ERR_RANGE);
        assert_contains(err.message, "1 to 100");
    }
    di_prompt_deinit(&prompt);
}

static void system_messages_never_merge(void **state) {
    (void)state;
    di_chat_message m[] = {MESSAGE(DI_CHAT_SYSTEM, "a"), MESSAGE(DI_CHAT_SYSTEM, ""), MESSAGE(DI_CHAT_SYSTEM, "b\r\n")};
    check(&(di_chat){.n_messages = 3, .messages = m}, BOS SYS "a" SYS SYS "b\r\n" ASSISTANT "</think>");
    check(&(di_chat){.n_messages = 3, .messages = m, .thinking = true, .effort = 75},
          BOS SYS EFFORT_75 "a" SYS SYS "b\r\n" ASSISTANT "<think>");
}

static void user_class_forms_one_turn(void **state) {
    (void)state;
    di_chat_message m[] = {MESSAGE(DI_CHAT_USER, "a"),           MESSAGE(DI_CHAT_TOOL, ""),
                           MESSAGE(DI_CHAT_USER, " b "),         MESSAGE(DI_CHAT_REMINDER, "r"),
                           MESSAGE(DI_CHAT_REMINDER, "dropped"), MESSAGE(DI_CHAT_USER, "c")};
    check(&(di_chat){.n_messages = 6, .messages = m},
          BOS USER "a\n\n<tool_result></tool_result>\n\n b " REMINDER "r" USER "c" ASSISTANT "</think>");
}

static void results_are_sorted_among_their_places(void **state) {
    (void)state;
    di_chat_call calls[] = {{.id = TEXT("x"), .name = TEXT("f"), .arguments = TEXT("{}")},
                            {.id = TEXT("y"), .name = TEXT("f"), .arguments = TEXT("{}")},
                            {.id = TEXT("z"), .name = TEXT("f"), .arguments = TEXT("{}")}};
    di_chat_message m[] = {
        {.role = DI_CHAT_ASSISTANT, .n_calls = 3, .calls = calls},
        MESSAGE(DI_CHAT_TOOL, "3"),
        MESSAGE(DI_CHAT_USER, "u"),
        MESSAGE(DI_CHAT_TOOL, "2"),
        MESSAGE(DI_CHAT_TOOL, "?"),
        MESSAGE(DI_CHAT_TOOL, "1"),
    };
    m[1].call_id = TEXT("z");
    m[3].call_id = TEXT("y");
    m[4].call_id = TEXT("unknown");
    m[5].call_id = TEXT("x");
    di_prompt prompt = {0};
    di_error err;
    di_test_ok(di_chat_render(&(di_chat){.n_messages = 6, .messages = m}, &prompt, &err), &err);
    /* An unknown id counts as position 0, and equal positions keep their order. */
    assert_contains(di_strbuf_str(&prompt.text),
                    USER "<tool_result>?</tool_result>\n\nu\n\n<tool_result>1</tool_result>"
                         "\n\n<tool_result>2</tool_result>\n\n<tool_result>3</tool_result>");
    di_prompt_deinit(&prompt);
}

static void reasoning_is_kept_only_with_tools(void **state) {
    (void)state;
    di_chat_tool tool = {.name = TEXT("f")};
    di_chat_message m[] = {MESSAGE(DI_CHAT_ASSISTANT, "a"), MESSAGE(DI_CHAT_ASSISTANT, "b")};
    m[0].reasoning = TEXT("why");
    di_chat chat = {.n_messages = 2, .messages = m, .thinking = true, .effort = 75};
    check(&chat, BOS SYS EFFORT_75 ASSISTANT "</think>a" EOS ASSISTANT "</think>b" EOS ASSISTANT "<think>");
    chat.tools = &tool;
    chat.n_tools = 1;
    chat.tool_choice = DI_CHAT_CHOICE_NONE;
    check(&chat, BOS SYS EFFORT_75 ASSISTANT "</think>a" EOS ASSISTANT "</think>b" EOS ASSISTANT "<think>");
    tool.is_deferred = true;
    chat.tool_choice = DI_CHAT_CHOICE_AUTO;
    check(&chat, BOS SYS EFFORT_75 ASSISTANT "</think>a" EOS ASSISTANT "</think>b" EOS ASSISTANT "<think>");
    tool.is_deferred = false;
    di_prompt prompt = {0};
    di_error err;
    di_test_ok(di_chat_render(&chat, &prompt, &err), &err);
    assert_contains(di_strbuf_str(&prompt.text),
                    ASSISTANT "<think>why</think>a" EOS ASSISTANT "<think></think>b" EOS ASSISTANT "<think>");
    di_prompt_deinit(&prompt);
}

static void prefix_stays_open(void **state) {
    (void)state;
    di_chat_message m = {.role = DI_CHAT_ASSISTANT, .is_prefix = true};
    di_chat chat = {.n_messages = 1, .messages = &m, .thinking = true, .effort = 75};
    check(&chat, BOS SYS EFFORT_75 ASSISTANT "<think>");
    assert_int_equal(di_chat_stage_of(&chat), DI_CHAT_STAGE_REASONING);
    m.reasoning = TEXT("r");
    check(&chat, BOS SYS EFFORT_75 ASSISTANT "<think>r");
    assert_int_equal(di_chat_stage_of(&chat), DI_CHAT_STAGE_REASONING_RESUMED);
    m.n_parts = 1;
    m.parts = PART("c");
    check(&chat, BOS SYS EFFORT_75 ASSISTANT "<think>r</think>c");
    assert_int_equal(di_chat_stage_of(&chat), DI_CHAT_STAGE_CONTENT_RESUMED);
    chat.thinking = false;
    check(&chat, BOS ASSISTANT "</think>c");
    assert_int_equal(di_chat_stage_of(&chat), DI_CHAT_STAGE_CONTENT);
}

static void arguments_print_in_the_format(void **state) {
    (void)state;
    static const struct {
        di_chat_text arguments;
        const char *want;
    } cases[] = {
        {TEXT(" {\"s\": \"a\\n<b>\", \"n\": [1, 1e16, -0], \"o\": {}} "),
         "<" DSML " parameter name=\"s\" string=\"true\">a\n<b></" DSML " parameter>\n"
         "<" DSML " parameter name=\"n\" string=\"false\">[1, 1e+16, -0.0]</" DSML " parameter>\n"
         "<" DSML " parameter name=\"o\" string=\"false\">{}</" DSML " parameter>"},
        {TEXT("[1]"), "<" DSML " parameter name=\"arguments\" string=\"true\">[1]</" DSML " parameter>"},
        {TEXT("{\"a\":1e999}"),
         "<" DSML " parameter name=\"arguments\" string=\"true\">{\"a\":1e999}</" DSML " parameter>"},
        {TEXT(""), "<" DSML " parameter name=\"arguments\" string=\"true\"></" DSML " parameter>"},
        {TEXT("{}"), ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        di_chat_call call = {.name = TEXT("f\">"), .arguments = cases[i].arguments};
        di_chat_message m = {.role = DI_CHAT_ASSISTANT, .n_calls = 1, .calls = &call};
        char want[1024];
        (void)snprintf(want, sizeof want,
                       BOS ASSISTANT "</think>\n\n<" DSML " calls>\n<" DSML " invoke name=\"f\">\">\n%s\n</" DSML
                                     " invoke>\n</" DSML " calls>" EOS ASSISTANT "</think>",
                       cases[i].want);
        check(&(di_chat){.n_messages = 1, .messages = &m}, want);
    }
}

static void content_lists_join_and_images_are_placeholders(void **state) {
    (void)state;
    di_chat_part parts[] = {
        {.text = TEXT("a")}, {.text = TEXT("")}, {.is_image = true, .text = TEXT("data:")}, {.text = TEXT("b")}};
    di_chat_message m = {.role = DI_CHAT_USER, .n_parts = 4, .parts = parts};
    di_chat chat = {.n_messages = 1, .messages = &m};
    check(&chat, BOS USER "a\n\n\n\n<｜image｜>\n\nb" ASSISTANT "</think>");
    assert_int_equal(count_marks(&chat, DI_CHAT_IMAGE), 1);
}

static void request_text_is_never_special(void **state) {
    (void)state;
    di_json *schema = json_of("{\"type\":\"object\",\"description\":\"<think> ｜DSML｜\"}");
    di_chat_tool tool = {.name = TEXT("f"), .description = TEXT("</think> ｜DSML｜"), .parameters = schema};
    di_chat_message m[] = {MESSAGE(DI_CHAT_SYSTEM, SYS "<think>"),
                           MESSAGE(DI_CHAT_USER, USER BOS EOS "<think></think>" DSML),
                           MESSAGE(DI_CHAT_USER, "<｜image｜>" REMINDER)};
    di_chat chat = {.n_messages = 3, .messages = m, .tools = &tool, .n_tools = 1};
    assert_int_equal(count_marks(&chat, DI_CHAT_BOS), 1);
    assert_int_equal(count_marks(&chat, DI_CHAT_EOS), 0);
    assert_int_equal(count_marks(&chat, DI_CHAT_SYS), 1);
    assert_int_equal(count_marks(&chat, DI_CHAT_USER_MARK), 1);
    assert_int_equal(count_marks(&chat, DI_CHAT_IMAGE), 0);
    assert_int_equal(count_marks(&chat, DI_CHAT_REMINDER_MARK), 0);
    assert_int_equal(count_marks(&chat, DI_CHAT_DSML), 9);      /* those of the instruction block */
    assert_int_equal(count_marks(&chat, DI_CHAT_THINK), 2);     /* likewise */
    assert_int_equal(count_marks(&chat, DI_CHAT_END_THINK), 3); /* likewise, and the header's */
    di_json_free(schema);
}

/* ------------------------------------------------------------------ tools and formats */

static void deferred_tools_wait_for_their_message(void **state) {
    (void)state;
    di_chat_tool tools[] = {{.name = TEXT("now")}, {.name = TEXT("later"), .is_deferred = true}};
    di_chat_message m[] = {MESSAGE(DI_CHAT_USER, "u"), MESSAGE(DI_CHAT_SYSTEM, "s")};
    m[1].tools = &tools[1];
    m[1].n_tools = 1;
    di_chat chat = {.n_messages = 2, .messages = m, .tools = tools, .n_tools = 2};
    di_prompt prompt = {0};
    di_error err;
    di_test_ok(di_chat_render(&chat, &prompt, &err), &err);
    assert_contains(di_strbuf_str(&prompt.text),
                    "### Available Tool Schemas\n\n{\"name\": \"now\", \"description\": \"\", "
                    "\"parameters\": {}}\n\nYou MUST strictly follow");
    assert_contains(
        di_strbuf_str(&prompt.text), SYS
        "s\n\n### Updated Tool Schemas\n\n{\"name\": \"later\", \"description\": \"\", \"parameters\": {}}" ASSISTANT
        "</think>");
    di_prompt_deinit(&prompt);
}

static void required_forces_the_opening(void **state) {
    (void)state;
    di_chat_tool tool = {.name = TEXT("f")};
    di_chat chat = {.tools = &tool, .n_tools = 1, .tool_choice = DI_CHAT_CHOICE_REQUIRED};
    di_prompt prompt = {0};
    di_error err;
    di_test_ok(di_chat_render(&chat, &prompt, &err), &err);
    assert_contains(di_strbuf_str(&prompt.text), ASSISTANT "</think>\n\n<" DSML " calls>\n");
    assert_int_equal(prompt.marks[prompt.n_marks - 1].special, DI_CHAT_DSML);
    chat.thinking = true;
    chat.effort = 1;
    di_test_ok(di_chat_render(&chat, &prompt, &err), &err);
    assert_int_equal(prompt.marks[prompt.n_marks - 1].special, DI_CHAT_THINK);
    assert_int_equal(prompt.marks[prompt.n_marks - 1].end, prompt.text.len);
    di_prompt_deinit(&prompt);
}

static void response_format_follows_the_system_text(void **state) {
    (void)state;
    di_json *schema = json_of("{\"b\":1,\"a\":[]}");
    di_chat_message m = MESSAGE(DI_CHAT_SYSTEM, "s");
    di_chat chat = {.n_messages = 1, .messages = &m, .format = DI_CHAT_FORMAT_JSON_SCHEMA, .schema = schema};
    check(&chat, BOS SYS "s\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
                         "{\"b\": 1, \"a\": []}" ASSISTANT "</think>");
    chat.format = DI_CHAT_FORMAT_JSON_OBJECT;
    chat.n_messages = 0;
    check(&chat, BOS SYS "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
                         "{\"type\": \"json_object\"}" ASSISTANT "</think>");
    chat.format = DI_CHAT_FORMAT_REGEX;
    check(&chat, BOS ASSISTANT "</think>");
    di_json_free(schema);
}

static void strict_schemas_are_normalised(void **state) {
    (void)state;
    static const struct {
        const char *schema, *want;
    } cases[] = {
        {"{\"type\":\"object\",\"required\":[],\"properties\":{\"b\":{\"type\":\"string\"},\"a\":{}}}",
         "{\"type\":\"object\",\"properties\":{\"b\":{\"type\":\"string\"},\"a\":{}},\"additionalProperties\":false,"
         "\"required\":[\"b\",\"a\"]}"},
        {"{\"additionalProperties\":true,\"type\":[\"object\",\"null\"]}",
         "{\"additionalProperties\":false,\"type\":[\"object\",\"null\"],\"required\":[]}"},
        /* Schemas are found behind keywords; a property named like one is only a property, and data stays as it is. */
        {"{\"type\":\"object\",\"properties\":{\"properties\":{\"type\":\"array\",\"items\":{\"type\":\"object\"}},"
         "\"e\":{\"enum\":[{\"type\":\"object\"}]}}}",
         "{\"type\":\"object\",\"properties\":{\"properties\":{\"type\":\"array\",\"items\":{\"type\":\"object\","
         "\"additionalProperties\":false,\"required\":[]}},\"e\":{\"enum\":[{\"type\":\"object\"}]}},"
         "\"additionalProperties\":false,\"required\":[\"properties\",\"e\"]}"},
        {"{\"anyOf\":[{\"type\":\"object\"},true]}",
         "{\"anyOf\":[{\"type\":\"object\",\"additionalProperties\":false,\"required\":[]},true]}"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        di_json *schema = json_of(cases[i].schema), *got = di_chat_strict_schema(schema);
        di_strbuf text = {0};
        di_json_write(&text, got, DI_JSON_COMPACT);
        assert_string_equal(di_strbuf_str(&text), cases[i].want);
        di_strbuf_deinit(&text);
        di_json_free(got);
        di_json_free(schema);
    }
}

/* ------------------------------------------------------------------ ids */

static di_tokenizer *open_tiny(void) {
    di_tokenizer *tok = NULL;
    di_error err;
    di_test_ok(di_tokenizer_open(&tok, di_test_source("models/tiny/tokenizer.json"), &err), &err);
    return tok;
}

static void ids_are_marks_and_plain_runs(void **state) {
    (void)state;
    di_tokenizer *tok = open_tiny();
    di_chat_vocab vocab;
    di_error err;
    di_test_ok(di_chat_vocab_init(&vocab, tok, &err), &err);
    di_chat_message m[] = {MESSAGE(DI_CHAT_SYSTEM, "Be short."), MESSAGE(DI_CHAT_USER, USER "<think> Hi"),
                           MESSAGE(DI_CHAT_REMINDER, "now")};
    di_prompt prompt = {0};
    di_ids ids = {0};
    di_test_ok(di_chat_render(&(di_chat){.n_messages = 3, .messages = m}, &prompt, &err), &err);
    di_test_ok(di_prompt_encode(&prompt, tok, &vocab, &ids, &err), &err);
    static const char *const specials[] = {BOS, SYS, USER, REMINDER, ASSISTANT, "</think>"};
    size_t found = 0;
    for (size_t i = 0; i < ids.len; i++) {
        if (found < 6 && ids.data[i] == di_tokenizer_find(tok, specials[found])) {
            found++;
        } else {
            for (size_t j = 0; j < 6; j++) { /* the user's own spelling is no token */
                assert_int_not_equal(ids.data[i], di_tokenizer_find(tok, specials[j]));
            }
        }
    }
    assert_int_equal(found, 6);
    di_strbuf text = {0};
    di_test_ok(di_tokenizer_decode(tok, ids.data, ids.len, false, &text, &err), &err);
    assert_string_equal(di_strbuf_str(&text), di_strbuf_str(&prompt.text));
    di_strbuf_deinit(&text);
    di_ids_deinit(&ids);
    di_prompt_deinit(&prompt);
    di_tokenizer_close(tok);
}

static void a_missing_image_token_is_named(void **state) {
    (void)state;
    di_tokenizer *tok = open_tiny();
    di_chat_vocab vocab;
    di_error err;
    di_test_ok(di_chat_vocab_init(&vocab, tok, &err), &err);
    assert_int_equal(vocab.ids[DI_CHAT_IMAGE], -1);
    di_chat_part image = {.is_image = true};
    di_chat_message m = {.role = DI_CHAT_USER, .n_parts = 1, .parts = &image};
    di_prompt prompt = {0};
    di_ids ids = {0};
    di_test_ok(di_chat_render(&(di_chat){.n_messages = 1, .messages = &m}, &prompt, &err), &err);
    assert_int_equal(di_prompt_encode(&prompt, tok, &vocab, &ids, &err), DI_ERR_UNSUPPORTED);
    assert_contains(err.message, "<｜deepseek_image｜>");
    di_ids_deinit(&ids);
    di_prompt_deinit(&prompt);
    di_tokenizer_close(tok);
}

static void a_tokenizer_without_a_mark_is_refused(void **state) {
    (void)state;
    static const char before[] = SYS, after[] = "<｜Sistem｜>";
    di_strbuf file = {0};
    di_error err;
    di_test_ok(di_file_read(di_test_source("models/tiny/tokenizer.json"), 16 << 20, &file, &err), &err);
    char *at = file.data;
    while ((at = strstr(at, before)) != NULL) {
        memcpy(at, after, sizeof after - 1);
    }
    di_tokenizer *tok = NULL;
    di_chat_vocab vocab;
    di_test_ok(di_tokenizer_parse(&tok, file.data, file.len, &err), &err);
    assert_int_equal(di_chat_vocab_init(&vocab, tok, &err), DI_ERR_UNSUPPORTED);
    assert_contains(err.message, before);
    di_tokenizer_close(tok);
    di_strbuf_deinit(&file);
}

/* ------------------------------------------------------------------ images */

static void image_grids_follow_the_preprocessor(void **state) {
    (void)state;
    /* Sizes whose pixels, cells and positions the preprocessor's description lists. */
    static const struct {
        int64_t width, height, width_pixels, height_pixels, cells_wide, cells_high, n_positions;
    } cases[] = {
        {544, 544, 546, 546, 13, 13, 184},      {100, 100, 546, 546, 13, 13, 184},
        {640, 480, 644, 490, 16, 12, 206},      {1920, 1080, 1708, 966, 41, 23, 968},
        {4000, 3000, 1512, 1134, 36, 27, 1001}, {50, 20000, 42, 16800, 1, 400, 802},
        {20000, 50, 20006, 56, 477, 2, 958},    {1, 100000, 42, 21462, 1, 511, 1024},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        di_image_grid grid;
        di_error err;
        di_test_ok(di_image_grid_of(cases[i].width, cases[i].height, &grid, &err), &err);
        assert_int_equal(grid.width_pixels, cases[i].width_pixels);
        assert_int_equal(grid.height_pixels, cases[i].height_pixels);
        assert_int_equal(grid.width, cases[i].cells_wide);
        assert_int_equal(grid.height, cases[i].cells_high);
        assert_int_equal(grid.n_positions, cases[i].n_positions);
    }
}

static void image_sizes_are_checked(void **state) {
    (void)state;
    di_image_grid grid;
    di_error err;
    assert_int_equal(di_image_grid_of(0, 5, &grid, &err), DI_ERR_RANGE);
    assert_int_equal(di_image_grid_of(5, -1, &grid, &err), DI_ERR_RANGE);
    assert_int_equal(di_image_grid_of((int64_t)1 << 31, 5, &grid, &err), DI_ERR_RANGE);
    di_test_ok(di_image_grid_of(INT32_MAX, INT32_MAX, &grid, &err), &err);
    assert_true(grid.n_positions <= 1024);
    di_test_ok(di_image_grid_of(1, INT32_MAX, &grid, &err), &err);
    assert_true(grid.n_positions <= 1024);
    di_test_ok(di_image_grid_of(INT32_MAX, 1, &grid, &err), &err);
    assert_true(grid.n_positions <= 1024);
}

DI_TEST_GROUP(chat, cmocka_unit_test(empty_conversation_has_a_header), cmocka_unit_test(effort_is_checked),
              cmocka_unit_test(system_messages_never_merge), cmocka_unit_test(user_class_forms_one_turn),
              cmocka_unit_test(results_are_sorted_among_their_places),
              cmocka_unit_test(reasoning_is_kept_only_with_tools), cmocka_unit_test(prefix_stays_open),
              cmocka_unit_test(arguments_print_in_the_format),
              cmocka_unit_test(content_lists_join_and_images_are_placeholders),
              cmocka_unit_test(request_text_is_never_special), cmocka_unit_test(deferred_tools_wait_for_their_message),
              cmocka_unit_test(required_forces_the_opening), cmocka_unit_test(response_format_follows_the_system_text),
              cmocka_unit_test(strict_schemas_are_normalised), cmocka_unit_test(ids_are_marks_and_plain_runs),
              cmocka_unit_test(a_missing_image_token_is_named), cmocka_unit_test(a_tokenizer_without_a_mark_is_refused),
              cmocka_unit_test(image_grids_follow_the_preprocessor), cmocka_unit_test(image_sizes_are_checked));
