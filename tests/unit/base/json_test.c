/* JSON: what is accepted and refused, exact integers, key order, and the text style of chat prompts. Printed numbers
 * are the values that the chat format states, and the shortest forms that Python's repr and JavaScript agree on. */
#include "harness.h"

#include "base/base.h"

static di_json *parse(const char *text) {
    di_json *v = NULL;
    di_error err;
    di_test_ok(di_json_parse(&v, text, strlen(text), &err), &err);
    return v;
}

/* Parses and writes again. */
static void assert_rewritten(const char *text, di_json_style style, const char *want) {
    di_json *v = parse(text);
    di_strbuf out = {0};
    di_json_write(&out, v, style);
    assert_string_equal(di_strbuf_str(&out), want);
    di_strbuf_deinit(&out);
    di_json_free(v);
}

static void numbers_print_in_the_style_of_the_chat_format(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        {"1e16", "1e+16"},
        {"1e-7", "1e-07"},
        {"5e-324", "5e-324"},
        {"-0", "-0.0"},
        {"-0.0", "-0.0"},
        {"1e3", "1000.0"},
        {"1e15", "1000000000000000.0"},
        {"123456789012345680.0", "1.2345678901234568e+17"},
        {"9007199254740993.0", "9007199254740992.0"},
        {"0.0001", "0.0001"},
        {"0.00001", "1e-05"},
        {"0.00012345", "0.00012345"},
        {"0.1", "0.1"},
        {"0.30000000000000004", "0.30000000000000004"},
        {"1.0", "1.0"},
        {"100.0", "100.0"},
        {"3.14", "3.14"},
        {"-2.5e-10", "-2.5e-10"},
        {"1.7976931348623157e308", "1.7976931348623157e+308"},
        {"2.2250738585072014e-308", "2.2250738585072014e-308"},
        {"0", "0"},
        {"-1", "-1"},
        {"9223372036854775807", "9223372036854775807"},
        {"9223372036854775808", "9223372036854775808"},
        {"18446744073709551615", "18446744073709551615"},
        {"18446744073709551616", "1.8446744073709552e+19"},
        {"-9223372036854775808", "-9223372036854775808"},
        {"-9223372036854775809", "-9.223372036854776e+18"},
        {"1E+2", "100.0"},
        /* 2^-44: the nearest decimal of 16 digits lies too far below, its upper neighbour reads back. */
        {"5.684341886080802e-14", "5.684341886080802e-14"},
        {"9.5367431640625e-07", "9.5367431640625e-07"},
        {"1e23", "1e+23"},
        {"9.999999999999999e22", "1e+23"},
        {"1e-999", "0.0"},
    };
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        assert_rewritten(cases[i][0], DI_JSON_SPACED, cases[i][1]);
    }
}

static void special_doubles_print_as_null(void **state) {
    (void)state;
    di_strbuf out = {0};
    di_json_write_double(&out, NAN);
    di_json_write_double(&out, INFINITY);
    assert_string_equal(di_strbuf_str(&out), "nullnull");
    di_strbuf_deinit(&out);
    di_json *v = di_json_new_real(NAN);
    assert_true(di_json_is(v, DI_JSON_NULL));
    di_json_free(v);
}

static void every_double_reads_back(void **state) {
    (void)state;
    uint64_t rng = 1;
    for (int i = 0; i < 20000; i++) {
        uint64_t bits = di_test_random(&rng);
        if (i < 2100) {
            bits = (uint64_t)i << 52; /* all powers of two, where the spacing changes */
        }
        double v, back;
        memcpy(&v, &bits, sizeof v);
        if (!isfinite(v)) {
            continue;
        }
        di_strbuf out = {0};
        di_json_write_double(&out, v);
        assert_true(di_parse_double(di_strbuf_str(&out), &back));
        assert_memory_equal(&back, &v, sizeof v);
        di_strbuf_deinit(&out);
    }
}

static void styles_differ_in_their_separators(void **state) {
    (void)state;
    const char *text = " { \"b\" : [ 1 , true , null , [ ] , { } ] , \"a\" : \"x\" } ";
    assert_rewritten(text, DI_JSON_COMPACT, "{\"b\":[1,true,null,[],{}],\"a\":\"x\"}");
    assert_rewritten(text, DI_JSON_SPACED, "{\"b\": [1, true, null, [], {}], \"a\": \"x\"}");
}

static void keys_keep_their_order_and_duplicates_their_place(void **state) {
    (void)state;
    assert_rewritten("{\"z\":1,\"a\":2,\"m\":3,\"a\":{\"n\":4}}", DI_JSON_COMPACT, "{\"z\":1,\"a\":{\"n\":4},\"m\":3}");
    di_strbuf text = {0};
    di_strbuf_putc(&text, '{');
    for (int i = 0; i < 1000; i++) {
        di_strbuf_printf(&text, "%s\"k%d\":%d", i ? "," : "", (i * 7919) % 1000, i);
    }
    di_strbuf_putc(&text, '}');
    assert_rewritten(text.data, DI_JSON_COMPACT, text.data);
    di_strbuf_deinit(&text);
}

static void strings_escape_only_what_must_be(void **state) {
    (void)state;
    assert_rewritten("\"\\u00e9\\u20ac\\ud83e\\udd8a\"", DI_JSON_COMPACT, "\"\u00e9\u20ac\U0001F98A\"");
    assert_rewritten("\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u0001\\u001F\\u007f\\u0000\"", DI_JSON_COMPACT,
                     "\"\\\"\\\\/\\b\\f\\n\\r\\t\\u0001\\u001f\x7f\\u0000\"");
    assert_rewritten("\"\u2028</script>\"", DI_JSON_COMPACT, "\"\u2028</script>\"");
    di_strbuf out = {0};
    di_json_write_escaped(&out, "a\"b", 3);
    di_json_write_string(&out, NULL, 0);
    assert_string_equal(di_strbuf_str(&out), "a\\\"b\"\"");
    di_strbuf_deinit(&out);
}

static void strings_may_hold_nul(void **state) {
    (void)state;
    di_json *v = parse("{\"k\\u0000x\":\"a\\u0000b\"}");
    void *it = di_json_iter(v);
    size_t len;
    assert_memory_equal(di_json_iter_key(it, &len), "k\0x", 4);
    assert_int_equal(len, 3);
    assert_memory_equal(di_json_str(di_json_iter_value(it), &len), "a\0b", 4);
    assert_int_equal(len, 3);
    assert_null(di_json_iter_next(v, it));
    di_json *copy = di_json_copy(v), *other = parse("{\"k\":\"a\\u0000b\"}");
    assert_true(di_json_equal(v, copy));
    assert_false(di_json_equal(v, other));
    di_json_free(other);
    di_json_free(copy);
    di_json_free(v);
}

static void kinds_and_getters(void **state) {
    (void)state;
    di_json *v = parse("[null,true,-3,18446744073709551615,0.5,\"s\",[7],{\"k\":8},-0]");
    static const di_json_type kinds[] = {DI_JSON_NULL,   DI_JSON_BOOL,  DI_JSON_INT,    DI_JSON_UINT, DI_JSON_REAL,
                                         DI_JSON_STRING, DI_JSON_ARRAY, DI_JSON_OBJECT, DI_JSON_REAL};
    static const char *const names[] = {"null",   "boolean", "integer", "integer", "number",
                                        "string", "array",   "object",  "number"};
    assert_int_equal(di_json_array_len(v), DI_COUNT(kinds));
    for (size_t i = 0; i < DI_COUNT(kinds); i++) {
        assert_int_equal(di_json_kind(di_json_at(v, i)), kinds[i]);
        assert_string_equal(di_json_kind_name(di_json_at(v, i)), names[i]);
    }
    assert_true(di_json_bool(di_json_at(v, 1)));
    assert_int_equal(di_json_int(di_json_at(v, 2)), -3);
    assert_int_equal(di_json_uint(di_json_at(v, 2)), 0);
    assert_true(di_json_uint(di_json_at(v, 3)) == UINT64_MAX);
    assert_int_equal(di_json_int(di_json_at(v, 3)), 0);
    assert_true(di_json_number(di_json_at(v, 2)) == -3.0);
    assert_true(di_json_number(di_json_at(v, 3)) == 18446744073709551615.0);
    assert_true(di_json_number(di_json_at(v, 4)) == 0.5);
    assert_true(signbit(di_json_number(di_json_at(v, 8))));
    assert_string_equal(di_json_str(di_json_at(v, 5), NULL), "s");
    assert_null(di_json_str(di_json_at(v, 3), NULL)); /* an unsigned integer is no string */
    assert_null(di_json_str(di_json_at(v, 2), NULL));
    assert_int_equal(di_json_int(di_json_get(di_json_at(v, 7), "k")), 8);
    assert_null(di_json_get(di_json_at(v, 7), "absent"));
    assert_null(di_json_get(di_json_at(v, 6), "k"));
    assert_null(di_json_at(v, 100));
    assert_null(di_json_at(NULL, 0));
    assert_int_equal(di_json_kind(NULL), DI_JSON_NULL);
    assert_false(di_json_is(NULL, DI_JSON_NULL));
    assert_string_equal(di_json_kind_name(NULL), "nothing");
    assert_int_equal(di_json_object_len(di_json_at(v, 7)), 1);
    assert_null(di_json_iter(di_json_at(v, 6)));
    assert_null(di_json_iter(NULL));
    di_json_free(v);
    di_json_free(NULL);
}

static void builders_make_what_was_asked(void **state) {
    (void)state;
    di_json *o = di_json_new_object();
    di_json *a = di_json_new_array();
    assert_true(di_json_append(a, di_json_new_int(INT64_MIN)));
    assert_true(di_json_append(a, di_json_new_uint(UINT64_MAX)));
    assert_true(di_json_append(a, di_json_new_uint(7)));
    assert_true(di_json_append(a, di_json_new_real(2)));
    assert_true(di_json_append(a, di_json_new_bool(false)));
    assert_true(di_json_append(a, di_json_new_null()));
    assert_true(di_json_append(a, di_json_new_string("x\xFFy", 3))); /* repaired */
    assert_true(di_json_append(a, di_json_new_string(NULL, 0)));
    assert_false(di_json_append(a, NULL));
    assert_true(di_json_set(o, "a", a));
    assert_false(di_json_set(o, "b", NULL));
    di_strbuf out = {0};
    di_json_write(&out, o, DI_JSON_COMPACT);
    assert_string_equal(out.data,
                        "{\"a\":[-9223372036854775808,18446744073709551615,7,2.0,false,null,\"x\uFFFDy\",\"\"]}");
    di_json *copy = di_json_copy(o);
    assert_true(di_json_equal(o, copy));
    assert_true(di_json_append(di_json_get(copy, "a"), di_json_new_int(1)));
    assert_false(di_json_equal(o, copy));
    assert_ptr_equal(di_json_ref(o), o);
    di_json_free(o);
    assert_int_equal(di_json_object_len(o), 1);
    di_json_free(o);
    di_json_free(copy);
    di_strbuf_deinit(&out);
}

static void bad_texts_are_refused_with_their_place(void **state) {
    (void)state;
    static const struct {
        const char *text, *where, *what;
    } cases[] = {
        {"", "line 1 column 1", "unexpected end"},
        {"   ", "line 1 column 4", "unexpected end"},
        {"{", "line 1 column 2", "key"},
        {"{\"a\":1,}", "line 1 column 8", "key"},
        {"[1,]", "line 1 column 4", "expected a value"},
        {"[1 2]", "line 1 column 4", "',' or ']'"},
        {"{\"a\" 1}", "line 1 column 6", "':'"},
        {"{a:1}", "line 1 column 2", "key"},
        {"[\n  1,\n  x]", "line 3 column 3", "expected a value"},
        {"\"\u00e9\u20ac\" x", "line 1 column 6", "behind the value"},
        {"01", "line 1 column 2", "starts with 0"},
        {"-", "line 1 column 2", "digit"},
        {"+1", "line 1 column 1", "expected a value"},
        {"1.", "line 1 column 3", "decimal point"},
        {".5", "line 1 column 1", "expected a value"},
        {"1e", "line 1 column 3", "exponent"},
        {"1e+", "line 1 column 4", "exponent"},
        {"1e400", "line 1 column 1", "too large"},
        {"-1e400", "line 1 column 1", "too large"},
        {"NaN", "line 1 column 1", "expected a value"},
        {"Infinity", "line 1 column 1", "expected a value"},
        {"tru", "line 1 column 1", "expected a value"},
        {"nulls", "line 1 column 5", "behind the value"},
        {"'a'", "line 1 column 1", "expected a value"},
        {"\"a", "line 1 column 3", "unexpected end"},
        {"\"a\nb\"", "line 1 column 3", "control character"},
        {"\"\\x\"", "line 1 column 2", "escape"},
        {"\"\\", "line 1 column 2", "escape"},
        {"\"\\u12\"", "line 1 column 2", "hexadecimal"},
        {"\"\\ud800\"", "line 1 column 2", "surrogate"},
        {"\"\\udc00\"", "line 1 column 2", "surrogate"},
        {"\"\\ud800\\u0041\"", "line 1 column 2", "surrogate"},
        {"\"\xC3\"", "line 1 column 2", "UTF-8"},
        {"\"\xED\xA0\x80\"", "line 1 column 2", "UTF-8"},
        {"\xEF\xBB\xBF{}", "line 1 column 1", "expected a value"},
        {"[1]//", "line 1 column 4", "behind the value"},
        {"\f1", "line 1 column 1", "expected a value"},
    };
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        di_json *v = (di_json *)&v;
        di_error err = {.message = ""};
        assert_int_equal(di_json_parse(&v, cases[i].text, strlen(cases[i].text), &err), DI_ERR_FORMAT);
        assert_ptr_equal(v, &v); /* untouched */
        assert_contains(err.message, cases[i].where);
        assert_contains(err.message, cases[i].what);
    }
    di_json *v;
    assert_int_equal(di_json_parse(&v, NULL, 0, NULL), DI_ERR_FORMAT);
    assert_int_equal(di_json_parse(&v, "1\0", 2, NULL), DI_ERR_FORMAT);
}

static void nesting_is_limited_to_512(void **state) {
    (void)state;
    for (int depth = 512; depth <= 513; depth++) {
        for (int is_object = 0; is_object < 2; is_object++) {
            di_strbuf text = {0};
            for (int i = 0; i < depth; i++) {
                di_strbuf_puts(&text, is_object ? "{\"a\":" : "[");
            }
            di_strbuf_putc(&text, '1');
            for (int i = 0; i < depth; i++) {
                di_strbuf_putc(&text, is_object ? '}' : ']');
            }
            di_json *v = NULL;
            di_error err;
            di_status st = di_json_parse(&v, text.data, text.len, &err);
            if (depth == 512) {
                assert_int_equal(st, DI_OK);
                di_strbuf out = {0};
                di_json_write(&out, v, DI_JSON_COMPACT);
                assert_string_equal(di_strbuf_str(&out), text.data);
                di_strbuf_deinit(&out);
            } else {
                assert_int_equal(st, DI_ERR_FORMAT);
                assert_contains(err.message, "512");
            }
            di_json_free(v);
            di_strbuf_deinit(&text);
        }
    }
    /* A flood of brackets is refused as early. */
    char *flood = malloc(1 << 20);
    memset(flood, '[', 1 << 20);
    di_json *v = NULL;
    assert_int_equal(di_json_parse(&v, flood, 1 << 20, NULL), DI_ERR_FORMAT);
    free(flood);
}

DI_TEST_GROUP(json, cmocka_unit_test(numbers_print_in_the_style_of_the_chat_format),
              cmocka_unit_test(special_doubles_print_as_null), cmocka_unit_test(every_double_reads_back),
              cmocka_unit_test(styles_differ_in_their_separators),
              cmocka_unit_test(keys_keep_their_order_and_duplicates_their_place),
              cmocka_unit_test(strings_escape_only_what_must_be), cmocka_unit_test(strings_may_hold_nul),
              cmocka_unit_test(kinds_and_getters), cmocka_unit_test(builders_make_what_was_asked),
              cmocka_unit_test(bad_texts_are_refused_with_their_place), cmocka_unit_test(nesting_is_limited_to_512))
