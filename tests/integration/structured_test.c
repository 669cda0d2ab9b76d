/* Structured outputs as the program gives them, on the model that ships: calls of tools, formats behind thinking, what
 * cannot be guaranteed, samples, log-probabilities, stops; the same bits with and without drafts and when a request has
 * lost its memory on the way; hostile grammars among good ones. What an output has to be is told by its grammar, not by
 * what the model has said before. */
#include "base/base.h"
#include "program.h"

/* ---- running batches -----------------------------------------------------------------------------------------------
 */

enum { ANSWERS_MAX = 64 };

typedef struct batch {
    int status, n;
    di_json *answer[ANSWERS_MAX];
    di_strbuf err;
} batch;

static void batch_free(batch *b) {
    for (int i = 0; i < b->n; i++)
        di_json_free(b->answer[i]);
    di_strbuf_deinit(&b->err);
}

static void read_answers(batch *b, const char *path) {
    di_error err = {0};
    di_strbuf out = {0};
    di_test_ok(di_file_read(path, 1 << 24, &out, &err), &err);
    for (const char *at = di_strbuf_str(&out), *end; (end = strchr(at, '\n')); at = end + 1) {
        assert_true(b->n < ANSWERS_MAX);
        di_test_ok(di_json_parse(&b->answer[b->n++], at, (size_t)(end - at), &err), &err);
    }
    di_strbuf_deinit(&out);
}

/* Adds a line, in which ' stands for ". */
static void add(di_strbuf *lines, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void add(di_strbuf *lines, const char *fmt, ...) {
    char *line = NULL;
    va_list args;
    va_start(args, fmt);
    assert_true(vasprintf(&line, fmt, args) >= 0);
    va_end(args);
    size_t start = lines->len;
    di_strbuf_puts(lines, line);
    free(line);
    di_strbuf_putc(lines, '\n');
    for (size_t i = start; i < lines->len; i++) {
        if (lines->data[i] == '\'')
            lines->data[i] = '"';
    }
}

/* The same for a line whose output follows a schema; fields end with a comma. */
static void add_schema(di_strbuf *lines, const char *fields, const char *schema) {
    add(lines, "{%s'response_format':{'type':'json_schema','json_schema':{'name':'a','schema':%s}}}", fields, schema);
}

/* "deepinfer run --input LINES options". Empties the lines. */
static batch run(di_strbuf *lines, const char *options) {
    batch b = {0};
    di_error error = {0};
    const char *in = di_test_tmp("lines.jsonl"), *out = di_test_tmp("answers.jsonl"), *err = di_test_tmp("errors.txt");
    FILE *file = fopen(in, "w");
    assert_non_null(file);
    assert_int_equal(fwrite(di_strbuf_str(lines), 1, lines->len, file), lines->len);
    assert_int_equal(fclose(file), 0);
    di_strbuf_deinit(lines);
    di_strbuf command = {0};
    di_strbuf_printf(&command, "'%s' run --input '%s' %s >'%s' 2>'%s'", DI_TEST_PROGRAM, in, options, out, err);
    int status = system(di_strbuf_str(&command));
    assert_true(WIFEXITED(status));
    b.status = WEXITSTATUS(status);
    read_answers(&b, out);
    di_test_ok(di_file_read(err, 1 << 20, &b.err, &error), &error);
    di_strbuf_deinit(&command);
    return b;
}

static const char *str(const di_json *v, const char *key) {
    const char *s = di_json_str(di_json_get(v, key), NULL);
    return s ? s : "(none)";
}

static const char *error_of(const di_json *answer) {
    return str(di_json_get(answer, "error"), "message");
}

static bool has_stopped(const di_json *answer) {
    if (di_json_get(answer, "error"))
        fail_msg("%s", error_of(answer));
    return strcmp(str(answer, "finish_reason"), "stop") == 0;
}

static di_json *parse(const char *text) {
    di_json *v = NULL;
    di_error err = {0};
    if (di_json_parse(&v, text, strlen(text), &err))
        fail_msg("'%s': %s", text, err.message);
    return v;
}

#define SUM "'messages':[{'role':'user','content':'What is 47 + 38?'}]"
#define JSON "'messages':[{'role':'user','content':'Answer with JSON.'}]"
#define PARIS "'messages':[{'role':'user','content':'What is the weather in Paris?'}]"

/* ---- calls of tools ------------------------------------------------------------------------------------------------
 */

/* Bounded on all sides but the length of the city's name, so that calls end by themselves. */
#define WEATHER                                                                                                        \
    "{'type':'function','function':{'name':'weather','parameters':{'type':'object','properties':{"                     \
    "'city':{'type':'string'},'unit':{'type':'string','enum':['C','F']},"                                              \
    "'days':{'type':'integer','minimum':1,'maximum':9},'place':{'type':'object','properties':{"                        \
    "'lat':{'type':'integer','minimum':-90,'maximum':90},'ok':{'type':'boolean'}},'required':['lat','ok'],"            \
    "'additionalProperties':false}},'required':['city','days','place'],'additionalProperties':false}}}"
#define CLOCK                                                                                                          \
    "{'type':'function','function':{'name':'clock','parameters':{'type':'object','properties':{"                       \
    "'zone':{'type':'string','maxLength':8}},'required':['zone'],'additionalProperties':false}}}"
#define TOOLS "'tools':[" WEATHER "," CLOCK "]"

static void assert_weather(const di_json *args) {
    const di_json *unit = di_json_get(args, "unit"), *place = di_json_get(args, "place");
    assert_true(di_json_is(di_json_get(args, "city"), DI_JSON_STRING));
    assert_true(di_json_is(di_json_get(args, "days"), DI_JSON_INT));
    assert_in_range(di_json_int(di_json_get(args, "days")), 1, 9);
    assert_int_equal(di_json_object_len(place), 2);
    assert_true(di_json_is(di_json_get(place, "lat"), DI_JSON_INT));
    assert_true(di_json_int(di_json_get(place, "lat")) >= -90 && di_json_int(di_json_get(place, "lat")) <= 90);
    assert_true(di_json_is(di_json_get(place, "ok"), DI_JSON_BOOL));
    if (unit)
        assert_true(strcmp(str(args, "unit"), "C") == 0 || strcmp(str(args, "unit"), "F") == 0);
    assert_int_equal(di_json_object_len(args), 3 + (unit != NULL));
}

static void assert_clock(const di_json *args) {
    assert_int_equal(di_json_object_len(args), 1);
    assert_true(di_json_is(di_json_get(args, "zone"), DI_JSON_STRING));
    int n_codes = 0;
    for (const char *at = str(args, "zone"); *at; at++)
        n_codes += (*at & 0xC0) != 0x80;
    assert_true(n_codes <= 8);
}

/* All calls of an answer that ended by itself are calls of these tools. */
static int64_t assert_calls(const di_json *answer, const char *only) {
    const di_json *calls = di_json_get(di_json_get(answer, "message"), "tool_calls");
    int64_t n = (int64_t)di_json_array_len(calls);
    for (int64_t i = 0; i < n; i++) {
        const di_json *function = di_json_get(di_json_at(calls, (size_t)i), "function");
        const char *name = str(function, "name");
        di_json *args = parse(str(function, "arguments"));
        assert_true(!only || strcmp(name, only) == 0);
        if (strcmp(name, "weather") == 0) {
            assert_weather(args);
        } else {
            assert_string_equal(name, "clock");
            assert_clock(args);
        }
        di_json_free(args);
    }
    return n;
}

static void calls_obey_their_schemas(void **state) {
    (void)state;
    static const struct {
        const char *choice, *only;
        bool is_required;
    } rows[] = {
        {"'auto'", NULL, false},
        {"'required'", NULL, true},
        {"{'type':'function','function':{'name':'weather'}}", "weather", true},
        {"{'type':'function','function':{'name':'clock'}}", "clock", true},
    };
    enum { SEEDS = 1, PER_ROW = 2 * SEEDS };
    di_strbuf lines = {0};
    for (size_t i = 0; i < DI_COUNT(rows); i++) {
        for (int k = 0; k < PER_ROW; k++)
            add(&lines, "{" PARIS "," TOOLS ",'tool_choice':%s,'seed':%d,'reasoning_effort':'%s','max_tokens':300}",
                rows[i].choice, k, k < SEEDS ? "none" : "high");
    }
    batch b = run(&lines, "");
    assert_int_equal(b.status, 0);
    assert_int_equal(b.n, DI_COUNT(rows) * PER_ROW);
    int n_stopped = 0;
    for (int i = 0; i < b.n; i++) {
        const di_json *message = di_json_get(b.answer[i], "message");
        if (!has_stopped(b.answer[i]))
            continue;
        int64_t n = assert_calls(b.answer[i], rows[i / PER_ROW].only);
        if (rows[i / PER_ROW].is_required) {
            assert_true(n > 0);
            assert_string_equal(str(message, "content"), "");
        }
        assert_int_equal(di_json_get(message, "reasoning_content") != NULL, i % PER_ROW >= SEEDS);
        n_stopped++;
    }
    assert_true(n_stopped > b.n / 2); /* white space may go on, but hardly does */
    batch_free(&b);
}

static void calls_that_are_not_wanted(void **state) {
    (void)state;
    di_strbuf lines = {0};
    add(&lines, "{" PARIS "," TOOLS ",'tool_choice':'none','regex':'[a-z]{5}'}");
    add(&lines, "{" PARIS "," TOOLS ",'tool_choice':{'type':'function','function':{'name':'no'}}}");
    add(&lines, "{" PARIS ",'tool_choice':'required','choice':['yes','no']}");
    add(&lines, "{" PARIS "," TOOLS ",'choice':['left','right'],'seed':5,'max_tokens':300}");
    batch b = run(&lines, "");
    assert_int_equal(b.status, 1);
    assert_int_equal(b.n, 4);
    assert_true(has_stopped(b.answer[0]));
    assert_int_equal(strlen(str(b.answer[0], "text")), 5);
    assert_null(di_json_get(di_json_get(b.answer[0], "message"), "tool_calls"));
    assert_contains(error_of(b.answer[1]), "no function named 'no'");
    assert_true(has_stopped(b.answer[2])); /* nothing can be required where nothing is offered */
    assert_true(strcmp(str(b.answer[2], "text"), "yes") == 0 || strcmp(str(b.answer[2], "text"), "no") == 0);
    const di_json *message = di_json_get(b.answer[3], "message");
    if (has_stopped(b.answer[3]) && assert_calls(b.answer[3], NULL) == 0) /* a format beside tools: one or the other */
        assert_true(strcmp(str(message, "content"), "left") == 0 || strcmp(str(message, "content"), "right") == 0);
    batch_free(&b);
}

/* A strict tool's schema is kept or refused by name; another's is kept as far as it can be. */
static void strict_tools_are_kept_or_refused(void **state) {
    (void)state;
    static const char *const rows[][2] = {
        {"'properties':{'u':{'type':'array','uniqueItems':true}}", "/properties/u/uniqueItems"},
        {"'allOf':[{'properties':{'u':{'type':'integer'}},'required':['u']}]", "tool 'f': /allOf"},
        {"'$ref':'#/$defs/p','$defs':{'p':{'required':['u']}}", "tool 'f': /$ref"},
        {"'patternProperties':{'^x':{'type':'integer'}}", "tool 'f': /patternProperties"},
    };
    enum { ROWS = DI_COUNT(rows) };
    di_strbuf lines = {0};
    for (int i = 0; i < 2 * ROWS; i++)
        add(&lines,
            "{'messages':[{'role':'user','content':'hi'}],'tool_choice':'required','seed':1,'max_tokens':%d,'tools':["
            "{'type':'function','function':{'name':'f','strict':%s,'parameters':{'type':'object',%s}}}]}",
            i < ROWS ? 100 : 1, i < ROWS ? "true" : "false", rows[i % ROWS][0]);
    batch b = run(&lines, "");
    assert_int_equal(b.status, 1);
    assert_int_equal(b.n, 2 * ROWS);
    for (int i = 0; i < ROWS; i++) {
        assert_contains(error_of(b.answer[i]), rows[i][1]);
        assert_contains(error_of(b.answer[i]), "tools: ");
        assert_null(di_json_get(b.answer[ROWS + i], "error"));
    }
    batch_free(&b);
}

/* ---- formats -------------------------------------------------------------------------------------------------------
 */

/* Thinking is as free as without a format, bit for bit; the format begins right behind its end. */
static void formats_begin_behind_thinking(void **state) {
    (void)state;
    di_strbuf lines = {0};
    add(&lines, "{" SUM ",'reasoning_effort':'high','temperature':0}");
    add(&lines, "{" SUM ",'reasoning_effort':'high','temperature':0,'regex':'[A-C]{4}'}");
    add(&lines, "{" SUM ",'thinking':{'type':'enabled'},'temperature':0,'response_format':{'type':'json_object'},"
                "'max_tokens':100}");
    add_schema(&lines, SUM ",'reasoning_effort':'high','temperature':0,",
               "{'type':'integer','minimum':85,'maximum':85}");
    batch b = run(&lines, "");
    assert_int_equal(b.status, 0);
    assert_int_equal(b.n, 4);
    const char *thought = str(di_json_get(b.answer[0], "message"), "reasoning_content");
    assert_contains(thought, "47");
    for (int i = 1; i < b.n; i++)
        assert_string_equal(str(di_json_get(b.answer[i], "message"), "reasoning_content"), thought);
    assert_true(has_stopped(b.answer[1]));
    const char *letters = str(di_json_get(b.answer[1], "message"), "content");
    assert_int_equal(strlen(letters), 4);
    assert_int_equal(strspn(letters, "ABC"), 4);
    if (has_stopped(b.answer[2])) {
        di_json *object = parse(str(di_json_get(b.answer[2], "message"), "content"));
        assert_true(di_json_is(object, DI_JSON_OBJECT));
        di_json_free(object);
    }
    const char *text = str(b.answer[3], "text"), *mark = strstr(text, "</think>");
    assert_non_null(mark);
    di_json *sum = parse(mark + strlen("</think>")); /* 85, 8.5e1, .. */
    assert_true(di_json_number(sum) == 85);
    di_json_free(sum);
    batch_free(&b);
}

static void objects_are_json(void **state) {
    (void)state;
    di_strbuf lines = {0};
    for (int i = 0; i < 6; i++)
        add(&lines, "{" JSON ",'response_format':{'type':'json_object'},'seed':%d,'max_tokens':200}", i);
    batch b = run(&lines, "");
    assert_int_equal(b.status, 0);
    assert_int_equal(b.n, 6);
    int n_stopped = 0;
    for (int i = 0; i < b.n; i++) {
        if (!has_stopped(b.answer[i]))
            continue;
        di_json *object = parse(str(di_json_get(b.answer[i], "message"), "content"));
        assert_true(di_json_is(object, DI_JSON_OBJECT));
        di_json_free(object);
        n_stopped++;
    }
    assert_true(n_stopped > 0);
    batch_free(&b);
}

/* What no automaton can keep is refused, unless the request says that it need not be. */
static void strict_says_what_must_be_guaranteed(void **state) {
    (void)state;
    static const char *const strict[] = {"", "'strict':true,", "'strict':null,", "'strict':false,", "'strict':'no',"};
    di_strbuf lines = {0};
    for (size_t i = 0; i < DI_COUNT(strict); i++)
        add(&lines,
            "{'prompt':'x','seed':1,'max_tokens':100,'response_format':{'type':'json_schema','json_schema':{%s'schema':"
            "{'type':'array','uniqueItems':true,'maxItems':2,'items':{'type':'string','maxLength':3}}}}}",
            strict[i]);
    batch b = run(&lines, "");
    assert_int_equal(b.status, 1);
    assert_int_equal(b.n, 5);
    for (int i = 0; i < 3; i++) {
        assert_contains(error_of(b.answer[i]), "/uniqueItems");
        assert_string_equal(str(di_json_get(b.answer[i], "error"), "type"), "invalid_request_error");
    }
    if (has_stopped(b.answer[3])) { /* what is left of the schema holds */
        di_json *list = parse(str(b.answer[3], "text"));
        assert_true(di_json_is(list, DI_JSON_ARRAY));
        assert_true(di_json_array_len(list) <= 2);
        for (size_t i = 0; i < di_json_array_len(list); i++)
            assert_true(di_json_is(di_json_at(list, i), DI_JSON_STRING));
        di_json_free(list);
    }
    assert_contains(error_of(b.answer[4]), "strict': expected");
    batch_free(&b);
}

static void formats_that_are_wrong_are_named(void **state) {
    (void)state;
    static const struct {
        const char *fields, *error;
    } rows[] = {
        {"'regex':'a','ebnf':'root ::= root'", "only one of response_format, regex, ebnf and choice"},
        {"'choice':['a'],'response_format':{'type':'json_object'}", "only one of"},
        {"'regex':5", "'regex': expected a string, found integer"},
        {"'choice':[]", "choice: an empty list"},
        {"'choice':['a',7]", "'choice[1]': expected a string, found integer"},
        {"'response_format':{'type':'xml'}", "unknown variant `xml`"},
        {"'response_format':{'type':'regex'}", "missing field `regex`"},
        {"'response_format':{'type':'json_schema'}", "missing field `json_schema`"},
        {"'response_format':{'type':'json_schema','json_schema':{}}", "expected a JSON schema, found nothing"},
        {"'regex':'(a'", "position 0: '(' has no ')'"},
        {"'regex':'(?=a)b'", "look-ahead"},
        {"'regex':'(a)\\\\1'", "back-references"},
        {"'ebnf':'root ::= a'", "the rule 'a' is not defined"},
        {"'ebnf':''", "there is no rule 'root'"},
        {"'ebnf':'root ::= root'", "no text matches"},
    };
    static const char *const schemas[][2] = {
        {"[]", "expected a JSON schema, found array"},
        {"false", "no value satisfies it"},
        {"{'type':'integer','not':{'type':'integer'}}", "no value satisfies it"},
        {"{'$ref':'#/$defs/none'}", "/$ref: '#/$defs/none' is not in the schema"},
        {"{'$ref':'#'}", "refers to itself"},
        {"{'$ref':'https://example.com/s'}", "not part of the schema"},
    };
    enum { FIELDS = DI_COUNT(rows), SCHEMAS = DI_COUNT(schemas) };
    di_strbuf lines = {0};
    for (int i = 0; i < FIELDS; i++)
        add(&lines, "{'prompt':'x',%s}", rows[i].fields);
    for (int i = 0; i < SCHEMAS; i++)
        add_schema(&lines, "'prompt':'x',", schemas[i][0]);
    batch b = run(&lines, "");
    assert_int_equal(b.status, 1);
    assert_int_equal(b.n, FIELDS + SCHEMAS);
    for (int i = 0; i < b.n; i++) {
        assert_contains(error_of(b.answer[i]), i < FIELDS ? rows[i].error : schemas[i - FIELDS][1]);
        assert_string_equal(str(b.answer[i], "finish_reason"), "error");
        assert_string_equal(str(b.answer[i], "text"), "");
    }
    batch_free(&b);
}

static void empty_formats_are_formats(void **state) {
    (void)state;
    di_strbuf lines = {0};
    add(&lines, "{'prompt':'x','regex':''}");
    add(&lines, "{'prompt':'x','choice':['']}");
    add(&lines, "{'prompt':'x','ebnf':'root ::= %s'}", "\\\"\\\"");
    add_schema(&lines, "'prompt':'x','seed':1,'max_tokens':60,", "{}");
    add_schema(&lines, "'prompt':'x','seed':2,'max_tokens':60,", "true");
    batch b = run(&lines, "");
    assert_int_equal(b.status, 0);
    assert_int_equal(b.n, 5);
    for (int i = 0; i < 3; i++) { /* the end mark is all there can be */
        assert_true(has_stopped(b.answer[i]));
        assert_string_equal(str(b.answer[i], "text"), "");
        assert_int_equal(di_json_array_len(di_json_get(b.answer[i], "token_ids")), 1);
    }
    for (int i = 3; i < 5; i++) {
        if (has_stopped(b.answer[i]))
            di_json_free(parse(str(b.answer[i], "text")));
    }
    batch_free(&b);
}

/* ---- with other fields ---------------------------------------------------------------------------------------------
 */

static void samples_follow_the_format_each(void **state) {
    (void)state;
    di_strbuf lines = {0};
    add(&lines, "{'prompt':'x','regex':'[a-f]{3}|[0-9]{4}','seed':20,'n':4}");
    for (int i = 0; i < 4; i++)
        add(&lines, "{'prompt':'x','regex':'[a-f]{3}|[0-9]{4}','seed':%d}", 20 + i);
    batch b = run(&lines, "");
    assert_int_equal(b.status, 0);
    assert_int_equal(b.n, 8);
    for (int i = 0; i < 4; i++) {
        const char *text = str(b.answer[i], "text");
        assert_true(has_stopped(b.answer[i]));
        assert_true((strspn(text, "abcdef") == 3 && !text[3]) || (strspn(text, "0123456789") == 4 && !text[4]));
        assert_string_equal(str(b.answer[4 + i], "text"), text);
    }
    batch_free(&b);
}

/* Log-probabilities are those of the tokens that the grammar allows: a certain one has 0, two that exclude each other
 * add up to 1. */
static void log_probabilities_are_of_what_is_allowed(void **state) {
    (void)state;
    di_strbuf lines = {0};
    add(&lines, "{'prompt':'x','regex':'[yz]','seed':1,'logprobs':5}");
    batch b = run(&lines, "");
    assert_int_equal(b.status, 0);
    assert_int_equal(b.n, 1);
    const di_json *all = di_json_get(b.answer[0], "logprobs");
    assert_int_equal(di_json_array_len(all), 2);
    const di_json *first = di_json_get(di_json_at(all, 0), "top"), *end = di_json_at(all, 1);
    assert_int_equal(di_json_array_len(first), 2);
    double sum = 0;
    for (size_t i = 0; i < 2; i++)
        sum += exp(di_json_number(di_json_at(di_json_at(first, i), 1)));
    assert_true(fabs(sum - 1) < 1e-5); /* fp32 logarithms of two numbers */
    assert_int_equal(di_json_array_len(di_json_get(end, "top")), 1);
    assert_true(di_json_number(di_json_get(end, "logprob")) == 0);
    batch_free(&b);
}

static void stops_and_limits_stay(void **state) {
    (void)state;
    di_strbuf lines = {0};
    add(&lines, "{'prompt':'x','regex':'abcdef','stop':['d']}");
    add(&lines, "{'prompt':'x','regex':'abcdef','ignore_eos':true,'max_tokens':50}");
    add(&lines, "{'prompt':'x','regex':'a{1000}','max_tokens':7}");
    add(&lines, "{'prompt':'x','regex':'yes','max_tokens':1000000000000000000}");
    add(&lines, "{'prompt':'x','regex':'aaa','min_tokens':5}");
    add(&lines, "{'prompt':'x','regex':'[0-9]','temperature':0,'repetition_penalty':2,'top_p':0.01}");
    batch b = run(&lines, "");
    assert_int_equal(b.status, 1);
    assert_int_equal(b.n, 6);
    assert_string_equal(str(b.answer[0], "text"), "abc");
    assert_true(has_stopped(b.answer[0]));
    assert_string_equal(str(b.answer[1], "text"), "abcdef"); /* nothing but the end mark is allowed behind it */
    assert_true(has_stopped(b.answer[1]));
    assert_string_equal(str(b.answer[2], "finish_reason"), "length");
    assert_int_equal(di_json_array_len(di_json_get(b.answer[2], "token_ids")), 7);
    assert_int_equal(strspn(str(b.answer[2], "text"), "a"), strlen(str(b.answer[2], "text")));
    assert_string_equal(str(b.answer[3], "text"), "yes");
    assert_contains(error_of(b.answer[4]), "no token"); /* it can't go on, and may not end */
    assert_int_equal(strlen(str(b.answer[5], "text")), 1);
    batch_free(&b);
}

/* ---- the same bits -------------------------------------------------------------------------------------------------
 */

/* Everything that must not depend on speed and memory. */
static void assert_same(const di_json *a, const di_json *b) {
    static const char *const keys[] = {"text", "token_ids", "finish_reason", "seed", "logprobs"};
    for (size_t i = 0; i < DI_COUNT(keys); i++) {
        const di_json *x = di_json_get(a, keys[i]), *y = di_json_get(b, keys[i]);
        assert_int_equal(x != NULL, y != NULL);
        if (x && !di_json_equal(x, y))
            fail_msg("%s: '%s' and '%s'", keys[i], str(a, "text"), str(b, "text"));
    }
}

static void add_mixed(di_strbuf *lines) {
    add(lines, "{'prompt':'Once upon a time','regex':'([A-Za-z]{1,9}[ ,.]){8}','seed':1,'logprobs':2}");
    add(lines, "{'prompt':'Once','ebnf':'root ::= [(] root [)] | [a-z ]+ [!]','seed':2,'max_tokens':30,'logprobs':0}");
    add(lines, "{" JSON ",'response_format':{'type':'json_object'},'seed':3,'max_tokens':40}");
    add(lines, "{" PARIS ",'tools':[" CLOCK "],'tool_choice':'required','seed':4,'max_tokens':60,"
               "'reasoning_effort':'high'}");
    add(lines, "{'prompt':'x','choice':['red','green','greenish'],'seed':5,'n':3}");
    add(lines, "{'prompt':'Once','seed':6,'max_tokens':30}");
}

static void drafts_change_no_structured_output(void **state) {
    (void)state;
    static const char *const options[] = {
        "--draft-tokens 5 --draft-policy fixed --chunk 16 --max-seqs 3",
        "--draft-tokens 5 --draft-policy cost --draft-temperatures 0.5 --grammar-cache 0",
        "--draft-tokens 3 --draft-policy reference --async off",
    };
    di_strbuf lines = {0};
    add_mixed(&lines);
    batch plain = run(&lines, "--draft-tokens 0");
    assert_int_equal(plain.status, 0);
    assert_int_equal(plain.n, 8);
    for (size_t i = 0; i < DI_COUNT(options); i++) {
        add_mixed(&lines);
        batch b = run(&lines, options[i]);
        assert_int_equal(b.status, 0);
        assert_int_equal(b.n, plain.n);
        for (int k = 0; k < b.n; k++)
            assert_same(b.answer[k], plain.answer[k]);
        batch_free(&b);
    }
    batch_free(&plain);
}

/* Under `rejection` the bits may differ, the format may not. */
static void rejection_keeps_formats(void **state) {
    (void)state;
    di_strbuf lines = {0};
    for (int i = 0; i < 8; i++)
        add(&lines, "{'prompt':'Once','regex':'([a-f]{2}[0-9]{2} ){6}','seed':%d}", i);
    batch b = run(&lines, "--accept rejection --draft-policy fixed");
    assert_int_equal(b.status, 0);
    assert_int_equal(b.n, 8);
    for (int i = 0; i < b.n; i++) {
        const char *at = str(b.answer[i], "text");
        assert_true(has_stopped(b.answer[i]));
        assert_int_equal(strlen(at), 30);
        for (; *at; at += 5)
            assert_true(strspn(at, "abcdef") == 2 && strspn(at + 2, "0123456789") == 2 && at[4] == ' ');
    }
    batch_free(&b);
}

/* Two requests of up to three blocks each in a cache of four: one has to give its memory to the other, and comes back
 * with its place in the grammar. */
static void preempted_requests_keep_their_place(void **state) {
    (void)state;
    static const char *const options[] = {"", "--max-seqs 2 --max-model-len 512 --kv-memory 180K --stats"};
    batch both[2];
    for (int i = 0; i < 2; i++) {
        di_strbuf lines = {0};
        add(&lines, "{'prompt':'The fox','seed':1,'max_tokens':270,'regex':'([a-z]{2,9} ){400}'}");
        add(&lines, "{'prompt':'The fox','seed':2,'max_tokens':270,'ebnf':'root ::= [a-z]+ [ ,] root | [.]'}");
        both[i] = run(&lines, options[i]);
    }
    batch roomy = both[0], tight = both[1];
    assert_int_equal(roomy.status, 0);
    assert_int_equal(tight.status, 0);
    assert_int_equal(tight.n, 2);
    for (int i = 0; i < 2; i++)
        assert_same(tight.answer[i], roomy.answer[i]);
    const char *at = strstr(di_strbuf_str(&tight.err), "for the first token; ");
    long long n_preempted = 0;
    assert_non_null(at);
    assert_int_equal(sscanf(at, "for the first token; %lld preempted", &n_preempted), 1);
    assert_true(n_preempted > 0);
    batch_free(&roomy);
    batch_free(&tight);
}

/* ---- hostile grammars ----------------------------------------------------------------------------------------------
 */

static void add_good(di_strbuf *lines) {
    add(lines, "{'prompt':'The fox','regex':'[a-f]{3}','seed':1}");
    add(lines, "{'prompt':'The fox','choice':['left','right'],'seed':2}");
    add(lines, "{" JSON ",'response_format':{'type':'json_object'},'seed':3,'max_tokens':30}");
}

/* A text of n times the same. */
static const char *times(di_strbuf *memory, const char *text, int n) {
    di_strbuf_truncate(memory, 0);
    for (int i = 0; i < n; i++)
        di_strbuf_puts(memory, text);
    return di_strbuf_str(memory);
}

/* Grammars that blow up: what their errors say. */
static int add_refused(di_strbuf *lines, const char *errors[]) {
    int n = 0;
    di_strbuf open = {0}, schema = {0};
    di_strbuf_printf(&schema, "%strue", times(&open, "{'items':", 300));
    di_strbuf_puts(&schema, times(&open, "}", 300));
    add_schema(lines, "'prompt':'x',", di_strbuf_str(&schema));
    errors[n++] = "nested deeper than";
    add(lines, "{'prompt':'x','regex':'%s'}", times(&open, "(", 1000));
    errors[n++] = "groups nest deeper than";
    /* An intersection has to be determinized, which these do not like. */
    add_schema(lines, "'prompt':'x',",
               "{'allOf':[{'type':'string','pattern':'(a|b)*a(a|b){40}c'},"
               "{'pattern':'(a|b)*a(a|b){40}d'}]}");
    errors[n++] = "response_format: ";
    /* Each definition doubles the combinations of the one before. */
    di_strbuf_truncate(&schema, 0);
    di_strbuf_puts(&schema, "{'$ref':'#/$defs/d30','$defs':{'d0':{'type':'null'}");
    for (int i = 0; i < 30; i++)
        di_strbuf_printf(&schema,
                         ",'d%d':{'anyOf':[{'items':{'$ref':'#/$defs/d%d'}},{'allOf':[{'$ref':'#/$defs/d%d'},"
                         "{'$ref':'#/$defs/d%d'}]}]}",
                         i + 1, i, i, i);
    di_strbuf_puts(&schema, "}}");
    add_schema(lines, "'prompt':'x',", di_strbuf_str(&schema));
    errors[n++] = "response_format: ";
    di_strbuf_deinit(&open);
    di_strbuf_deinit(&schema);
    return n;
}

/* Grammars that are only large or ambiguous. */
static int add_large(di_strbuf *lines) {
    add(lines, "{'prompt':'x','max_tokens':20,'regex':'(a|b)*a(a|b){5000}'}");
    add(lines, "{'prompt':'x','max_tokens':20,'regex':'(((a{1,100}){1,100}){1,100}){1,100}'}");
    add(lines, "{'prompt':'x','max_tokens':20,'ebnf':'root ::= s [.]\\ns ::= s s | s s s | [a-z]?'}");
    di_strbuf list = {0};
    di_strbuf_puts(&list, "{'enum':[0");
    for (int i = 0; list.len < 1 << 20; i++)
        di_strbuf_printf(&list, ",'item %d of a list that is long'", i);
    di_strbuf_puts(&list, "]}");
    add_schema(lines, "'prompt':'x','max_tokens':20,", di_strbuf_str(&list));
    di_strbuf_deinit(&list);
    return 4; /* the last of them may also be too much for the limit of memory */
}

static void hostile_grammars_harm_themselves_alone(void **state) {
    (void)state;
    const char *errors[8];
    di_strbuf lines = {0};
    add_good(&lines);
    batch good = run(&lines, "");
    add_good(&lines);
    int n_refused = add_refused(&lines, errors), n_large = add_large(&lines);
    add_good(&lines);
    batch all = run(&lines, "");
    assert_int_equal(good.status, 0);
    assert_int_equal(all.status, 1);
    assert_int_equal(all.n, n_refused + n_large + 6);
    for (int i = 0; i < 3; i++) {
        assert_same(all.answer[i], good.answer[i]);
        assert_same(all.answer[3 + n_refused + n_large + i], good.answer[i]);
    }
    for (int i = 0; i < n_refused; i++)
        assert_contains(error_of(all.answer[3 + i]), errors[i]);
    for (int i = 0; i < n_large; i++) {
        const di_json *answer = all.answer[3 + n_refused + i];
        if (i == n_large - 1 && di_json_get(answer, "error"))
            assert_contains(error_of(answer), "takes more than 64 MiB");
        else
            (void)has_stopped(answer); /* or gone on, but no error */
    }
    batch_free(&good);
    batch_free(&all);
}

/* A thousandth of a second is short for a list like this on any machine. */
static void time_to_compile_is_limited(void **state) {
    (void)state;
    di_strbuf lines = {0};
    di_strbuf_puts(&lines, "{\"prompt\":\"x\",\"choice\":[\"0\"");
    for (int i = 1; i < 200000; i++)
        di_strbuf_printf(&lines, ",\"%d\"", i);
    add(&lines, "]}");
    batch b = run(&lines, "--grammar-timeout 0.001 --grammar-threads 1");
    assert_int_equal(b.status, 1);
    assert_int_equal(b.n, 1);
    assert_contains(error_of(b.answer[0]), "choice: the grammar takes longer than 0.001 s to compile");
    batch_free(&b);
}

/* ---- the command line ----------------------------------------------------------------------------------------------
 */

/* The last line of what "deepinfer args" writes, both streams, and its exit status. */
static int tell(const char *args, char *out, size_t size) {
    return di_test_shell(out, size, "'%s' %s 2>&1 </dev/null", DI_TEST_PROGRAM, args);
}

static void options_are_formats_of_all_requests(void **state) {
    (void)state;
    char out[4096], args[2048];
    assert_int_equal(tell("run hi --regex '[0-9]{4}' --seed 1", out, sizeof out), 0);
    assert_int_equal(strlen(out), 5);
    assert_int_equal(strspn(out, "0123456789"), 4);
    const char *schema = di_test_write("schema.json", "{\"type\":\"boolean\"}");
    snprintf(args, sizeof args, "run --raw hi --json-schema '%s' --seed 1", schema);
    assert_int_equal(tell(args, out, sizeof out), 0);
    assert_true(strcmp(out, "true\n") == 0 || strcmp(out, "false\n") == 0);
    snprintf(args, sizeof args, "run hi --ebnf '%s' --seed 1",
             di_test_write("rules.ebnf", "root ::= \"a\" root | \"b\"\n"));
    assert_int_equal(tell(args, out, sizeof out), 0);
    assert_int_equal(strspn(out, "a"), strlen(out) - 2);
    assert_contains(out, "b\n");

    /* A line's own format goes before the option's. */
    snprintf(args, sizeof args, "--json-schema '%s'", schema);
    di_strbuf lines = {0};
    add(&lines, "{'prompt':'x','seed':1}");
    add(&lines, "{'prompt':'x','regex':'own'}");
    batch b = run(&lines, args);
    assert_int_equal(b.status, 0);
    assert_true(strcmp(str(b.answer[0], "text"), "true") == 0 || strcmp(str(b.answer[0], "text"), "false") == 0);
    assert_string_equal(str(b.answer[1], "text"), "own");
    batch_free(&b);
}

static void wrong_options_are_named(void **state) {
    (void)state;
    const char *cut = di_test_write("cut.json", "{\"type\":");
    const struct {
        const char *args, *file;
        int status;
        const char *part;
    } rows[] = {
        {"--regex a --ebnf x", "", 2, "--regex and --ebnf: expected one of them"},
        {"--json-schema /nonexistent/s.json", "", 2, "--json-schema: '/nonexistent/s.json'"},
        {"--ebnf /nonexistent/s.ebnf", "", 2, "--ebnf: '/nonexistent/s.ebnf'"},
        {"--json-schema", cut, 2, "invalid JSON at line 1"},
        {"--regex '('", "", 1, "position 0: '(' has no ')'"},
        {"--accept perhaps", "", 2, "--accept: found 'perhaps', expected coupled or rejection"},
        {"--draft-policy all", "", 2, "--draft-policy: found 'all', expected cost, reference or fixed"},
        {"--draft-temperatures 1,x", "", 2, "--draft-temperatures"},
        {"--grammar-timeout 0", "", 2, "--grammar-timeout"},
        {"--grammar-threads 0", "", 2, "--grammar-threads"},
        {"--grammar-cache lots", "", 2, "--grammar-cache"},
    };
    char shown[1024];
    assert_int_equal(tell("grammar --ebnf /nonexistent/s.ebnf", shown, sizeof shown), 2);
    assert_contains(shown, "--ebnf: '/nonexistent/s.ebnf'");
    for (size_t i = 0; i < DI_COUNT(rows); i++) {
        char out[4096], args[2048];
        snprintf(args, sizeof args, "run hi %s %s", rows[i].args, rows[i].file);
        int status = tell(args, out, sizeof out);
        if (status != rows[i].status)
            fail_msg("'%s': status %d, expected %d: %s", args, status, rows[i].status, out);
        assert_contains(out, rows[i].part);
    }
}

DI_TEST_GROUP(structured, cmocka_unit_test(calls_obey_their_schemas), cmocka_unit_test(calls_that_are_not_wanted),
              cmocka_unit_test(strict_tools_are_kept_or_refused), cmocka_unit_test(formats_begin_behind_thinking),
              cmocka_unit_test(objects_are_json), cmocka_unit_test(strict_says_what_must_be_guaranteed),
              cmocka_unit_test(formats_that_are_wrong_are_named), cmocka_unit_test(empty_formats_are_formats),
              cmocka_unit_test(samples_follow_the_format_each),
              cmocka_unit_test(log_probabilities_are_of_what_is_allowed), cmocka_unit_test(stops_and_limits_stay),
              cmocka_unit_test(drafts_change_no_structured_output), cmocka_unit_test(rejection_keeps_formats),
              cmocka_unit_test(preempted_requests_keep_their_place),
              cmocka_unit_test(hostile_grammars_harm_themselves_alone), cmocka_unit_test(time_to_compile_is_limited),
              cmocka_unit_test(options_are_formats_of_all_requests), cmocka_unit_test(wrong_options_are_named));
