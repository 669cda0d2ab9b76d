/* JSON schemas as grammars, keyword by keyword: texts that are accepted and refused, what a refused schema says, what
 * is left out laxly. The right answers are the standard's (draft 2020-12; draft 4 and OpenAPI for older spellings),
 * with the choices of this front end: keys in order, no undeclared keys beside `properties`, canonical numbers. */
#include "grammar_rig.h"

enum { TEXTS_MAX = 14 };

typedef struct schema_case {
    const char *schema;
    const char *accepted[TEXTS_MAX], *refused[TEXTS_MAX];
} schema_case;

static void check_cases(const schema_case *cases, size_t n) {
    for (size_t i = 0; i < n; i++) {
        di_pda p = {0};
        di_error err = {0};
        if (!rig_compile(&p, cases[i].schema, false, &err))
            fail_msg("%s: %s", cases[i].schema, err.message);
        for (const char *const *text = cases[i].accepted; *text; text++) {
            if (!rig_accepts(&p, *text, strlen(*text)))
                fail_msg("%s: '%s' is not accepted", cases[i].schema, *text);
        }
        for (const char *const *text = cases[i].refused; *text; text++) {
            if (rig_accepts(&p, *text, strlen(*text)))
                fail_msg("%s: '%s' is accepted", cases[i].schema, *text);
        }
        di_pda_deinit(&p);
    }
}

static void types_and_values(void **state) {
    (void)state;
    static const schema_case cases[] = {
        {"{\"type\":\"string\"}",
         {"\"\"", "\"a\"", "\"\\u0000\"", "\"\\uD83D\\uDE00\"", "\"\xF0\x9F\x98\x80\"", "\"\\/\\b\""},
         {"", "a", "\"", "\"\\ud83d\"", "\"\\ude00\\ud83d\"", "\"\x01\"", "\"\\x\"", "\"\"\"", "1"}},
        {"{\"type\":\"integer\"}",
         {"0", "-1", "10", "123456789012345678901234567890"},
         {"-0", "01", "1.0", "1e1", "+1", "", "-"}},
        {"{\"type\":\"number\"}",
         {"0", "-0", "0.0", "-1.50", "1e5", "1E-07", "2.5e+30", "1e-300", "10"},
         {".5", "5.", "01", "1e", "1e+", "1e123", "1e-1234", "0x1", "NaN"}},
        {"{\"type\":[\"boolean\",\"null\"]}", {"true", "false", "null"}, {"True", "0", "\"\"", "nul"}},
        {"{\"type\":\"string\",\"nullable\":true}", {"null", "\"a\""}, {"1"}},
        {"{\"type\":[\"integer\",\"number\"]}", {"1", "1.5"}, {"\"1\""}},
        {"{}",
         {"1", "\"a\"", "null", "[]", "{}", "[1, {\"a\": [true]}]", "{\"a\":{\"b\":[[]]}}"},
         {"[1,]", "{\"a\"}", "{a:1}", "[1 2]", "{\"a\":1,}", " 1", "1 "}},
        {"{\"enum\":[\"a\",1,2.5,null,[1,{\"k\":\"v\"}]]}",
         {"\"a\"", "\"\\u0061\"", "1", "2.5", "null", "[1,{\"k\":\"v\"}]", "[ 1 , { \"k\" : \"v\" } ]"},
         {"\"b\"", "2", "2.50", "[1]", "{}", "true"}},
        {"{\"const\":\"\\\"\\\\\\n\\u00e9\\ud83d\\ude00\"}",
         {"\"\\\"\\\\\\n\xC3\xA9\xF0\x9F\x98\x80\"", "\"\\u0022\\u005C\\u000a\\u00E9\\uD83D\\uDE00\""},
         {"\"\\\"\\\\n\xC3\xA9\xF0\x9F\x98\x80\"", "\"\""}},
        {"{\"const\":1e2}", {"100"}, {"1e2", "100.0", "10"}},
        {"{\"const\":-0.0}", {"0"}, {"-0", "0.0"}},
        {"{\"const\":1e-7}", {"0.0000001"}, {"1e-7", "0"}},
        {"{\"const\":18446744073709551615}", {"18446744073709551615"}, {"18446744073709551616"}},
        {"{\"type\":\"integer\",\"enum\":[1,\"a\",2.0,2.5]}", {"1", "2"}, {"\"a\"", "2.5", "2.0"}},
        {"{\"enum\":[\"ab\",\"abc\",\"b\"],\"minLength\":2,\"pattern\":\"^a\"}", {"\"ab\"", "\"abc\""}, {"\"b\""}},
        {"{\"title\":\"t\",\"description\":\"d\",\"default\":1,\"examples\":[2],\"x-own\":{},\"$comment\":\"\","
         "\"type\":\"null\"}",
         {"null"},
         {"1"}},
    };
    check_cases(cases, DI_COUNT(cases));
}

static void numbers(void **state) {
    (void)state;
    static const schema_case cases[] = {
        {"{\"type\":\"integer\",\"minimum\":9007199254740993}",
         {"9007199254740993", "9007199254740994", "10000000000000000"},
         {"9007199254740992", "-9007199254740993", "0"}},
        {"{\"type\":\"integer\",\"maximum\":-9223372036854775808}",
         {"-9223372036854775808", "-9223372036854775809", "-99999999999999999999"},
         {"-9223372036854775807", "0", "1"}},
        {"{\"type\":\"integer\",\"exclusiveMinimum\":-1,\"exclusiveMaximum\":1}", {"0"}, {"-1", "1", "-0", "00"}},
        {"{\"type\":\"integer\",\"minimum\":0.5,\"maximum\":3.5}", {"1", "2", "3"}, {"0", "4", "-1"}},
        {"{\"type\":\"integer\",\"minimum\":-12,\"maximum\":-9}",
         {"-12", "-10", "-9"},
         {"-13", "-8", "9", "-1", "-100"}},
        {"{\"type\":\"number\",\"minimum\":0.1,\"maximum\":0.3}",
         {"0.1", "0.10", "0.2", "0.29999", "0.3", "0.300"},
         {"0.09999", "0", "0.3000001", "1", "-0.2", "0.31"}},
        {"{\"type\":\"number\",\"exclusiveMinimum\":0,\"exclusiveMaximum\":1}",
         {"0.5", "0.0001", "0.999"},
         {"0", "0.0", "1", "1.0", "-0.5", "0.000"}},
        {"{\"type\":\"number\",\"maximum\":-1e-3}", {"-0.001", "-0.01", "-5", "-5.5"}, {"0", "-0.0009", "1"}},
        {"{\"type\":\"number\",\"minimum\":1e300}",
         {"1000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
          "0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
          "00000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"},
         {"1", "99999999", "1e299"}},
        {"{\"minimum\":5,\"exclusiveMinimum\":true,\"type\":\"integer\"}", {"6"}, {"5", "4"}},
        {"{\"maximum\":5,\"exclusiveMaximum\":false,\"type\":\"integer\"}", {"5"}, {"6"}},
        {"{\"minimum\":5,\"exclusiveMinimum\":7,\"type\":\"integer\"}", {"8"}, {"7", "6"}},
        {"{\"type\":\"integer\",\"multipleOf\":7}", {"0", "7", "-14", "700"}, {"1", "-13", "71"}},
        {"{\"type\":\"integer\",\"multipleOf\":2.5}", {"0", "5", "-10"}, {"2", "3", "2.5"}},
        {"{\"type\":\"number\",\"multipleOf\":0.01}", {"0", "1.2", "1.25", "-3", "3.00"}, {"1.255", "1.250", "0.001"}},
        {"{\"type\":\"number\",\"multipleOf\":0.25,\"minimum\":1}",
         {"1", "1.25", "1.5", "2.75"},
         {"0.75", "1.3", "1.1"}},
        {"{\"type\":\"number\",\"multipleOf\":3}", {"3", "-9", "0"}, {"4", "3.5"}},
        {"{\"type\":\"integer\",\"minimum\":10,\"maximum\":30,\"multipleOf\":10}",
         {"10", "20", "30"},
         {"0", "15", "40"}},
        {"{\"type\":\"integer\",\"not\":{\"enum\":[0,5]}}", {"1", "-5", "50"}, {"0", "5"}},
        {"{\"type\":\"number\",\"not\":{\"type\":\"integer\"}}", {"1.5", "-0.1"}, {"1", "1.0", "0", "2.00"}},
        {"{\"type\":\"integer\",\"not\":{\"multipleOf\":3}}", {"1", "2", "-4"}, {"0", "3", "-9"}},
        {"{\"type\":\"number\",\"not\":{\"minimum\":2}}", {"1.99", "-3"}, {"2", "2.0", "3"}},
    };
    check_cases(cases, DI_COUNT(cases));
}

static void strings(void **state) {
    (void)state;
    static const schema_case cases[] = {
        {"{\"type\":\"string\",\"minLength\":1,\"maxLength\":2}",
         {"\"a\"", "\"\xC3\xA9\xC3\xA9\"", "\"\xF0\x9F\x98\x80\"", "\"\\ud83d\\ude00\\n\""},
         {"\"\"", "\"abc\""}},
        {"{\"type\":\"string\",\"pattern\":\"^a+$\",\"maxLength\":3}",
         {"\"a\"", "\"aaa\""},
         {"\"\"", "\"aaaa\"", "\"b\""}},
        {"{\"type\":\"string\",\"pattern\":\"b\",\"maxLength\":3}",
         {"\"b\"", "\"abc\"", "\"\\u0062\"", "\"\\\"b\""},
         {"\"\"", "\"abcd\"", "\"acc\""}},
        {"{\"type\":\"string\",\"allOf\":[{\"pattern\":\"^[a-z]+$\"},{\"pattern\":\"x\"},{\"minLength\":3}]}",
         {"\"abx\"", "\"xxxx\""},
         {"\"abc\"", "\"x\"", "\"aXx\""}},
        {"{\"type\":\"string\",\"pattern\":\"^[\\\"\\\\\\\\/\\n]$\"}",
         {"\"\\\"\"", "\"\\\\\"", "\"/\"", "\"\\/\"", "\"\\n\"", "\"\\u000A\""},
         {"\"a\"", "\"\"\"", "\"\\\""}},
        {"{\"type\":\"string\",\"pattern\":\"^\\u00e9$\"}", {"\"\xC3\xA9\"", "\"\\u00e9\"", "\"\\u00E9\""}, {"\"e\""}},
        {"{\"type\":\"string\",\"not\":{\"pattern\":\"^a\"}}", {"\"\"", "\"ba\""}, {"\"a\"", "\"abc\"", "\"\\u0061\""}},
        {"{\"type\":\"string\",\"not\":{\"const\":\"no\"}}", {"\"n\"", "\"\"", "\"nope\""}, {"\"no\"", "\"n\\u006f\""}},
        {"{\"type\":\"string\",\"not\":{\"maxLength\":2}}", {"\"abc\""}, {"\"ab\"", "1"}},
        {"{\"type\":\"string\",\"format\":\"date\"}",
         {"\"2024-02-29\"", "\"2000-02-29\"", "\"2023-12-31\"", "\"0001-01-01\""},
         {"\"1900-02-29\"", "\"2023-02-29\"", "\"2023-04-31\"", "\"2023-00-01\"", "\"23-01-01\"", "\"2023-1-01\""}},
        {"{\"type\":\"string\",\"format\":\"date-time\"}",
         {"\"2024-02-29T23:59:59Z\"", "\"2024-01-01T00:00:00.125+05:30\""},
         {"\"2024-02-29 23:59:59Z\"", "\"2024-02-29T24:00:00Z\"", "\"2024-02-29T23:59:59\"",
          "\"2023-02-29T00:00:00Z\""}},
        {"{\"type\":\"string\",\"format\":\"duration\"}",
         {"\"P1D\"", "\"PT36H\"", "\"P1Y2M3DT4H5M6S\"", "\"P2W\""},
         {"\"P\"", "\"PT\"", "\"1D\"", "\"P1D2H\"", "\"P1Y2W\"", "\"P1DT\""}},
        {"{\"type\":\"string\",\"format\":\"email\"}",
         {"\"a.b+c@example.co.uk\"", "\"a@b\""},
         {"\"a\"", "\"@b\"", "\".a@b\"", "\"a..b@c\"", "\"a@-b\"", "\"a b@c\""}},
        {"{\"type\":\"string\",\"format\":\"hostname\"}",
         {"\"localhost\"", "\"a-b.example.com\""},
         {"\"-a\"", "\"a-\"", "\"a..b\"", "\"a_b\"", "\"\""}},
        {"{\"type\":\"string\",\"format\":\"ipv4\"}",
         {"\"0.0.0.0\"", "\"255.1.20.199\""},
         {"\"256.0.0.1\"", "\"1.2.3\"", "\"01.2.3.4\""}},
        {"{\"type\":\"string\",\"format\":\"ipv6\"}",
         {"\"::\"", "\"::1\"", "\"1:2:3:4:5:6:7:8\"", "\"fe80::A:1\"", "\"::ffff:1.2.3.4\"", "\"1::\"",
          "\"1:2:3:4:5:6::8\""},
         {"\"1:2:3:4:5:6:7\"", "\"1::2::3\"", "\":::\"", "\"12345::\"", "\"1:2:3:4:5:6:7:8:9\"", "\"::1.2.3\""}},
        {"{\"type\":\"string\",\"format\":\"uuid\"}",
         {"\"123e4567-e89b-12d3-A456-426614174000\""},
         {"\"123e4567e89b12d3a456426614174000\"", "\"g23e4567-e89b-12d3-a456-426614174000\""}},
        {"{\"type\":\"string\",\"format\":\"uri\"}",
         {"\"https://a.example/b?c=d#e\"", "\"mailto:a@b\"", "\"urn:x:1\"", "\"http://[::1]:80/\""},
         {"\"//a\"", "\"a b:c\"", "\"/a\"", "\"http://a b\"", "\"http://%zz\""}},
        {"{\"type\":\"string\",\"format\":\"uri-reference\"}",
         {"\"/a/b\"", "\"?q\"", "\"\"", "\"a:b\""},
         {"\"\\\\\\\\a\"", "\" \""}},
        {"{\"type\":\"string\",\"format\":\"json-pointer\"}", {"\"\"", "\"/a~0b/~1\""}, {"\"a\"", "\"/~2\"", "\"/~\""}},
        {"{\"type\":\"string\",\"format\":\"time\"}", {"\"23:59:00\""}, {"\"24:00:00\"", "\"1:00:00\""}},
        {"{\"type\":\"string\",\"format\":\"regex\"}",
         {"\"\"", "\"^[a-z0-9]+(?:-\\\\d{2,})*$\"", "\"a|(b(c)?)*?\"", "\"\\\\bx\\\\.y\"", "\"[^\\\\]]\""},
         {"\"(\"", "\"a**\"", "\"*\"", "\"[\"", "\"[z-a]\"", "\"a{3,1}\"", "\"\\\\\"", "\"(?=a)\"", "\"^*\"",
          "\"a)\""}},
        {"{\"type\":\"string\",\"format\":\"int32\"}", {"\"anything\""}, {"1"}},
        /* Lengths along a pattern with high limits: no text that is too long, all usual ones. */
        {"{\"type\":\"string\",\"format\":\"uri\",\"minLength\":1,\"maxLength\":65536}",
         {"\"https://example.com/a/b?c\""},
         {"\"\""}},
        {"{\"type\":\"string\",\"format\":\"date\",\"pattern\":\"^20\"}", {"\"2024-01-01\""}, {"\"1999-01-01\""}},
    };
    check_cases(cases, DI_COUNT(cases));
}

static void objects(void **state) {
    (void)state;
    static const schema_case cases[] = {
        {"{\"type\":\"object\"}",
         {"{}", "{\"a\":1}", "{ \"a\" : [ ] , \"b\" : { } }", "{\"\":\"\"}", "{\"a\":1,\"a\":2}"},
         {"[]", "{,}", "{\"a\":1 \"b\":2}", "{\"a\":01}"}},
        {"{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"},\"b\":{},\"c\":{\"type\":\"null\"}},"
         "\"required\":[\"b\"]}",
         {"{\"b\":1}", "{\"a\":1,\"b\":[]}", "{\"b\":{},\"c\":null}", "{\"a\":1,\"b\":2,\"c\":null}",
          "{\"\\u0061\":1,\"b\":2}"},
         {"{}", "{\"a\":1}", "{\"b\":1,\"a\":1}", "{\"b\":1,\"d\":1}", "{\"a\":1,\"a\":1,\"b\":1}", "{\"b\":1,}"}},
        {"{\"type\":\"object\",\"properties\":{}}", {"{}", "{ }"}, {"{\"a\":1}"}},
        {"{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"},\"ab\":{\"type\":\"integer\"}},"
         "\"additionalProperties\":{\"type\":\"boolean\"}}",
         {"{}", "{\"a\":1}", "{\"a\":1,\"ab\":2,\"abc\":true,\"b\":false}", "{\"\":true}", "{\"A\":true}",
          "{\"\\n\":true}", "{\"b\\u0061\":true}", "{\"a\\\"\":true}"},
         {"{\"a\":true}", "{\"ab\":true}", "{\"\\u0061\":true}", "{\"a\\u0062\":true}", "{\"abc\":1}"}},
        {"{\"type\":\"object\",\"properties\":{\"\\\"\":{\"type\":\"null\"}},\"additionalProperties\":{\"type\":"
         "\"integer\"}}",
         {"{\"\\\"\":null,\"\\\\\":1}", "{\"\\\"\\\"\":1}"},
         {"{\"\\\"\":1}", "{\"\\u0022\":1}"}},
        {"{\"type\":\"object\",\"patternProperties\":{\"^n\":{\"type\":\"integer\"},\"s$\":{\"minimum\":5}},"
         "\"additionalProperties\":{\"type\":\"null\"}}",
         {"{\"n\":1}", "{\"ns\":6}", "{\"xs\":\"a\"}", "{\"x\":null}", "{\"xs\":7,\"n\":1,\"x\":null}"},
         {"{\"n\":\"a\"}", "{\"ns\":4}", "{\"xs\":4}", "{\"x\":1}", "{\"\\u006e\":null}"}},
        {"{\"type\":\"object\",\"properties\":{\"na\":{\"maximum\":3}},\"patternProperties\":{\"^n\":{\"type\":"
         "\"integer\"}}}",
         {"{\"na\":3}", "{\"na\":1,\"nb\":9}", "{}"},
         {"{\"na\":4}", "{\"na\":\"x\"}", "{\"x\":1}", "{\"nb\":\"x\"}"}},
        {"{\"type\":\"object\",\"propertyNames\":{\"maxLength\":2,\"pattern\":\"^[a-c]\"}}",
         {"{}", "{\"a\":1,\"bz\":2}"},
         {"{\"abc\":1}", "{\"d\":1}", "{\"\":1}"}},
        {"{\"type\":\"object\",\"propertyNames\":{\"enum\":[\"x\",\"y\"]},\"additionalProperties\":{\"type\":"
         "\"integer\"}}",
         {"{\"x\":1}", "{\"y\":1,\"x\":2}"},
         {"{\"z\":1}", "{\"x\":true}"}},
        {"{\"type\":\"object\",\"minProperties\":1,\"maxProperties\":2}",
         {"{\"a\":1}", "{\"a\":1,\"b\":2}"},
         {"{}", "{\"a\":1,\"b\":2,\"c\":3}"}},
        {"{\"type\":\"object\",\"properties\":{\"a\":{},\"b\":{},\"c\":{}},\"minProperties\":2,\"maxProperties\":2}",
         {"{\"a\":1,\"b\":1}", "{\"b\":1,\"c\":1}", "{\"a\":1,\"c\":1}"},
         {"{}", "{\"a\":1}", "{\"a\":1,\"b\":1,\"c\":1}"}},
        {"{\"type\":\"object\",\"properties\":{\"a\":{}},\"additionalProperties\":true,\"minProperties\":2,"
         "\"maxProperties\":3}",
         {"{\"a\":1,\"b\":1}", "{\"a\":1,\"b\":1,\"c\":1}"},
         {"{\"a\":1}", "{\"b\":1}", "{\"b\":1,\"b\":1}", "{\"a\":1,\"b\":1,\"c\":1,\"d\":1}"}},
        {"{\"type\":\"object\",\"properties\":{\"a\":false,\"b\":{}}}", {"{\"b\":1}", "{}"}, {"{\"a\":1}"}},
        {"{\"type\":\"object\",\"required\":[\"k\"]}", {"{\"k\":1}", "{\"k\":1,\"z\":2}"}, {"{}", "{\"z\":1}"}},
        {"{\"type\":\"object\",\"properties\":{\"a\":{},\"b\":{}},\"dependentRequired\":{\"b\":[\"a\"]}}",
         {"{}", "{\"a\":1}", "{\"a\":1,\"b\":2}"},
         {"{\"b\":2}"}},
        {"{\"type\":\"object\",\"properties\":{\"a\":{},\"b\":{}},\"dependencies\":{\"a\":[\"b\"],\"b\":{"
         "\"properties\":"
         "{\"a\":{\"type\":\"null\"}}}}}",
         {"{}", "{\"a\":null,\"b\":2}", "{\"b\":2}"},
         {"{\"a\":1}", "{\"a\":1,\"b\":2}"}},
        {"{\"type\":\"object\",\"properties\":{\"a\":{}},\"allOf\":[{\"properties\":{\"b\":{}}}],"
         "\"unevaluatedProperties\":false}",
         {"{\"a\":1,\"b\":1}"},
         {"{\"c\":1}"}},
        {"{\"type\":\"object\",\"properties\":{\"a\":{}},\"unevaluatedProperties\":{\"type\":\"integer\"}}",
         {"{\"a\":\"x\",\"b\":1}"},
         {"{\"b\":\"x\"}"}},
    };
    check_cases(cases, DI_COUNT(cases));
}

static void arrays(void **state) {
    (void)state;
    static const schema_case cases[] = {
        {"{\"type\":\"array\",\"items\":{\"type\":\"integer\"},\"minItems\":2,\"maxItems\":3}",
         {"[1,2]", "[1,2,3]", "[ 1 ,\n2 ]"},
         {"[]", "[1]", "[1,2,3,4]", "[1,\"a\"]", "[1,2,]"}},
        {"{\"type\":\"array\",\"maxItems\":0}", {"[]", "[ ]"}, {"[1]"}},
        {"{\"type\":\"array\",\"items\":false}", {"[]"}, {"[1]"}},
        {"{\"type\":\"array\",\"prefixItems\":[{\"type\":\"null\"},{\"type\":\"boolean\"}],\"items\":{\"type\":"
         "\"integer\"},"
         "\"minItems\":1,\"maxItems\":4}",
         {"[null]", "[null,true]", "[null,true,1,2]"},
         {"[]", "[true]", "[null,1]", "[null,true,1,2,3]", "[null,true,true]"}},
        {"{\"type\":\"array\",\"items\":[{\"type\":\"null\"}],\"additionalItems\":{\"type\":\"integer\"}}",
         {"[]", "[null]", "[null,1,2]"},
         {"[1]", "[null,null]"}},
        {"{\"type\":\"array\",\"items\":[{\"type\":\"null\"}],\"additionalItems\":false}", {"[null]"}, {"[null,1]"}},
        {"{\"type\":\"array\",\"contains\":{\"type\":\"null\"}}", {"[null]", "[1,null,2]"}, {"[]", "[1]"}},
        {"{\"type\":\"array\",\"items\":{\"type\":\"integer\"},\"contains\":{\"minimum\":5},\"minContains\":2,"
         "\"maxContains\":3,\"maxItems\":5}",
         {"[5,6]", "[1,5,2,6]", "[5,5,5,1,1]"},
         {"[]", "[5]", "[5,5,5,5]", "[1,1,1,1,5]", "[5,5,1,1,1,1]"}},
        {"{\"type\":\"array\",\"contains\":{\"const\":1},\"minContains\":0}", {"[]", "[2]"}, {"1"}},
        {"{\"type\":\"array\",\"contains\":{\"const\":1},\"minContains\":0,\"maxContains\":1}",
         {"[]", "[1]", "[2,1,2]"},
         {"[1,1]", "[1,2,1]"}},
        {"{\"type\":\"array\",\"not\":{\"contains\":{\"type\":\"null\"}}}", {"[]", "[1,2]"}, {"[null]", "[1,null]"}},
        {"{\"type\":\"array\",\"not\":{\"items\":{\"type\":\"integer\"}}}",
         {"[null]", "[1,null]"},
         {"[]", "[1]", "[1,2]"}},
        {"{\"type\":\"array\",\"uniqueItems\":true,\"items\":{\"enum\":[\"a\",\"b\",\"c\"]},\"minItems\":1}",
         {"[\"a\"]", "[\"c\",\"a\"]", "[\"b\",\"c\",\"a\"]"},
         {"[]", "[\"a\",\"a\"]", "[\"a\",\"b\",\"a\"]", "[\"a\",\"b\",\"c\",\"a\"]"}},
        {"{\"type\":\"array\",\"uniqueItems\":true,\"items\":{\"type\":\"boolean\"}}",
         {"[]", "[true,false]"},
         {"[true,true]", "[true,false,true]"}},
        {"{\"type\":\"array\",\"uniqueItems\":true,\"maxItems\":1}", {"[]", "[{}]"}, {"[1,2]"}},
        {"{\"type\":\"array\",\"uniqueItems\":false}", {"[1,1]"}, {"[1"}},
        {"{\"type\":\"array\",\"prefixItems\":[{\"type\":\"null\"}],\"unevaluatedItems\":false}",
         {"[null]"},
         {"[null,1]"}},
    };
    check_cases(cases, DI_COUNT(cases));
}

static void combinations(void **state) {
    (void)state;
    static const schema_case cases[] = {
        {"{\"anyOf\":[{\"type\":\"string\"},{\"type\":\"integer\",\"minimum\":3}]}", {"\"a\"", "3"}, {"2", "null"}},
        {"{\"type\":\"integer\",\"anyOf\":[{\"minimum\":10},{\"maximum\":0}],\"maximum\":12}",
         {"0", "11"},
         {"5", "13"}},
        {"{\"oneOf\":[{\"type\":\"integer\"},{\"type\":\"number\",\"minimum\":2}]}", {"1", "2.5"}, {"2", "1.5", "3"}},
        {"{\"oneOf\":[{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"}},\"required\":[\"a\"]},"
         "{\"type\":\"object\",\"properties\":{\"b\":{\"type\":\"integer\"}},\"required\":[\"b\"]}]}",
         {"{\"a\":1}", "{\"b\":1}"},
         {"{}", "{\"a\":1,\"b\":1}"}},
        {"{\"type\":\"object\",\"properties\":{\"a\":{},\"b\":{}},\"oneOf\":[{\"required\":[\"a\"]},{\"required\":["
         "\"b\"]}]}",
         {"{\"a\":1}", "{\"b\":1}"},
         {"{}", "{\"a\":1,\"b\":1}"}},
        {"{\"type\":\"object\",\"properties\":{\"a\":{},\"b\":{}},\"anyOf\":[{\"required\":[\"a\"]},{\"required\":["
         "\"b\"]}]}",
         {"{\"a\":1}", "{\"b\":1}", "{\"a\":1,\"b\":1}"},
         {"{}"}},
        {"{\"allOf\":[{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"}},\"required\":[\"a\"]},"
         "{\"properties\":{\"a\":{\"minimum\":3},\"b\":{\"type\":\"null\"}}}]}",
         {"{\"a\":3}", "{\"a\":4,\"b\":null}"},
         {"{\"a\":2}", "{\"b\":null}", "{\"a\":3,\"c\":1}"}},
        {"{\"allOf\":[{\"type\":\"object\",\"properties\":{\"a\":{}},\"additionalProperties\":false},"
         "{\"properties\":{\"b\":{}}}]}",
         {"{\"a\":1}", "{}"},
         {"{\"b\":1}", "{\"a\":1,\"b\":1}"}},
        {"{\"not\":{\"type\":[\"string\",\"object\",\"array\"]}}", {"1", "null", "true"}, {"\"a\"", "{}", "[]"}},
        {"{\"type\":\"string\",\"not\":{\"enum\":[\"a\",\"b\"]}}", {"\"c\"", "\"\""}, {"\"a\"", "\"b\""}},
        {"{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"}},\"not\":{\"required\":[\"a\"]}}",
         {"{}"},
         {"{\"a\":1}"}},
        {"{\"not\":{\"not\":{\"type\":\"null\"}}}", {"null"}, {"1"}},
        {"{\"type\":\"integer\",\"not\":{\"anyOf\":[{\"maximum\":0},{\"multipleOf\":2}]}}",
         {"1", "3"},
         {"0", "-1", "2"}},
        {"{\"type\":\"object\",\"properties\":{\"kind\":{\"enum\":[\"x\",\"y\"]},\"n\":{}},\"required\":[\"kind\"],"
         "\"if\":{\"properties\":{\"kind\":{\"const\":\"x\"}}},\"then\":{\"properties\":{\"n\":{\"type\":\"integer\"}},"
         "\"required\":[\"n\"]},\"else\":{\"properties\":{\"n\":{\"type\":\"null\"}}}}",
         {"{\"kind\":\"x\",\"n\":1}", "{\"kind\":\"y\"}", "{\"kind\":\"y\",\"n\":null}"},
         {"{\"kind\":\"x\"}", "{\"kind\":\"x\",\"n\":null}", "{\"kind\":\"y\",\"n\":1}", "{}"}},
        {"{\"if\":{\"type\":\"integer\"},\"then\":{\"minimum\":1}}", {"1", "\"a\"", "0.5"}, {"0"}},
        {"{\"then\":{\"minimum\":1},\"type\":\"integer\"}", {"0"}, {"null"}},
        {"{\"dependentSchemas\":{\"a\":{\"required\":[\"b\"]}},\"type\":\"object\",\"properties\":{\"a\":{},\"b\":{}}}",
         {"{}", "{\"b\":1}", "{\"a\":1,\"b\":1}"},
         {"{\"a\":1}"}},
    };
    check_cases(cases, DI_COUNT(cases));
}

static void references(void **state) {
    (void)state;
    static const schema_case cases[] = {
        {"{\"$ref\":\"#/$defs/a\",\"maximum\":5,\"$defs\":{\"a\":{\"type\":\"integer\",\"minimum\":3}}}",
         {"3", "5"},
         {"2", "6"}},
        {"{\"$ref\":\"#/definitions/a%20b~1c\",\"definitions\":{\"a b/c\":{\"type\":\"null\"}}}", {"null"}, {"1"}},
        {"{\"$ref\":\"#here\",\"$defs\":{\"a\":{\"$anchor\":\"here\",\"type\":\"null\"}}}", {"null"}, {"1"}},
        {"{\"$id\":\"https://x.example/root.json\",\"$ref\":\"item.json\",\"$defs\":{\"i\":{\"$id\":\"item.json\","
         "\"$ref\":\"#/$defs/n\",\"$defs\":{\"n\":{\"type\":\"null\"}}}}}",
         {"null"},
         {"1"}},
        {"{\"type\":\"array\",\"items\":{\"$ref\":\"#\"},\"maxItems\":2}", {"[]", "[[],[[]]]"}, {"[1]", "[[],[],[]]"}},
        {"{\"$ref\":\"#/$defs/"
         "t\",\"$defs\":{\"t\":{\"anyOf\":[{\"type\":\"null\"},{\"type\":\"object\",\"properties\":{"
         "\"l\":{\"$ref\":\"#/$defs/t\"},\"r\":{\"$ref\":\"#/$defs/t\"}},\"required\":[\"l\",\"r\"]}]}}}",
         {"null", "{\"l\":null,\"r\":{\"l\":null,\"r\":null}}"},
         {"{\"l\":null}", "{}"}},
        {"{\"properties\":{\"a\":{\"$ref\":\"#/properties/b\"},\"b\":{\"type\":\"null\"}},\"type\":\"object\"}",
         {"{\"a\":null,\"b\":null}"},
         {"{\"a\":1}"}},
    };
    check_cases(cases, DI_COUNT(cases));
}

typedef struct error_case {
    const char *schema, *message;
    const char *lax; /* NULL: refused laxly too; else a text that is then accepted */
} error_case;

static void errors_name_the_keyword(void **state) {
    (void)state;
    static const error_case cases[] = {
        {"{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"array\",\"uniqueItems\":true}}}",
         "/properties/a/uniqueItems: can't be guaranteed", "{\"a\":[1,1]}"},
        {"{\"$ref\":\"https://other.example/s\"}", "/$ref: can't be guaranteed", "1"},
        {"{\"type\":\"object\",\"minProperties\":2}", "/minProperties: can't be guaranteed", "{\"a\":1}"},
        {"{\"oneOf\":[{\"minimum\":1},{\"format\":\"date\"}],\"type\":[\"object\"]}", "/oneOf: can't be guaranteed",
         "{}"},
        {"{\"type\":\"integer\",\"multipleOf\":0.123456789}", "/multipleOf: can't be guaranteed", "1"},
        {"{\"$ref\":\"#/$defs/none\"}", "/$ref: '#/$defs/none' is not in the schema", NULL},
        {"{\"$ref\":5}", "/$ref: is integer, expected a reference", NULL},
        {"{\"$ref\":\"#\"}", "refers to itself", NULL},
        {"{\"$defs\":{\"a\":{\"allOf\":[{\"$ref\":\"#/$defs/a\"}]}},\"$ref\":\"#/$defs/a\"}", "refers to itself", NULL},
        {"{\"type\":\"int\"}", "/type: 'int' is no type", NULL},
        {"{\"type\":[\"string\",5]}", "/type: element 1 is no type", NULL},
        {"{\"type\":5}", "/type: is integer, expected", NULL},
        {"{\"a/b\":1,\"properties\":{\"a/b~\":{\"minLength\":-1}}}",
         "/properties/a~1b~0/minLength: is integer, expected", NULL},
        {"{\"type\":\"string\",\"minLength\":3,\"maxLength\":2}", "/minLength: 3 is more than the maximum, 2", NULL},
        {"{\"type\":\"array\",\"minItems\":3,\"maxItems\":2}", "/minItems: 3 is more than the maximum, 2", NULL},
        {"{\"type\":\"integer\",\"minimum\":3,\"maximum\":2}", "/minimum: is more than the maximum", NULL},
        {"{\"type\":\"integer\",\"exclusiveMinimum\":2,\"exclusiveMaximum\":3}", "no value satisfies it", NULL},
        {"{\"multipleOf\":0}", "/multipleOf: is not above 0", NULL},
        {"{\"enum\":[]}", "/enum: is array, expected a list of at least one value", NULL},
        {"{\"enum\":5}", "/enum: is integer, expected", NULL},
        {"{\"required\":[1]}", "/required: element 0 is integer, expected a key", NULL},
        {"{\"properties\":[]}", "/properties: is array, expected an object of schemas", NULL},
        {"{\"properties\":{\"a\":5}}", "/properties: the value of 'a' is integer, expected a schema", NULL},
        {"{\"items\":5}", "/items: is integer, expected a schema", NULL},
        {"{\"anyOf\":[]}", "/anyOf: is array, expected a list of schemas", NULL},
        {"{\"pattern\":\"(\"}", "/pattern: ", NULL},
        {"{\"type\":\"string\",\"pattern\":\"(?=a)b\"}", "/pattern: ", NULL},
        {"{\"const\":1,\"type\":\"string\"}", "no value satisfies it", NULL},
        {"{\"type\":\"object\",\"properties\":{\"a\":{\"enum\":[1],\"minimum\":2}},\"required\":[\"a\"]}",
         "/properties/a: no value satisfies it", NULL},
        {"false", "no value satisfies it", NULL},
        {"5", "the schema is integer, expected an object, true or false", NULL},
    };
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        di_pda p = {0};
        di_error err = {0};
        if (rig_compile(&p, cases[i].schema, false, &err))
            fail_msg("%s is not refused", cases[i].schema);
        assert_int_equal(err.code, DI_ERR_REQUEST);
        if (!strstr(err.message, cases[i].message))
            fail_msg("%s: '%s', expected '%s'", cases[i].schema, err.message, cases[i].message);
        bool is_compiled = rig_compile(&p, cases[i].schema, true, &err);
        if (is_compiled != (cases[i].lax != NULL))
            fail_msg("%s: %s laxly: %s", cases[i].schema, is_compiled ? "compiled" : "refused", err.message);
        if (is_compiled && !rig_accepts(&p, cases[i].lax, strlen(cases[i].lax)))
            fail_msg("%s: '%s' is not accepted laxly", cases[i].schema, cases[i].lax);
        di_pda_deinit(&p);
    }
}

/* White space between tokens: a blank, and a new line with as much indentation as deep nesting takes. */
static void white_space_is_bounded(void **state) {
    (void)state;
    di_pda p = {0};
    di_error err = {0};
    assert_true(rig_compile(&p, "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"array\"}}}", false, &err));
    char text[512];
    snprintf(text, sizeof text, "{\n%20s\"a\"\t:\r\n[ \n%24s]\n}", "", "");
    assert_true(rig_accepts(&p, text, strlen(text)));
    bool is_accepted = false;
    assert_int_equal(rig_run(&p, "{  \"a\"", 6, &is_accepted), 2);
    assert_int_equal(rig_run(&p, "{\n\n\"a\"", 7, &is_accepted), 2);
    snprintf(text, sizeof text, "{\n%400s", "");
    assert_true(rig_run(&p, text, strlen(text), &is_accepted) < 100);
    di_pda_deinit(&p);
}

static void objects_of_any_kind(void **state) {
    (void)state;
    di_gram g;
    di_pda p = {0};
    di_error err = {0};
    di_gram_init(&g, NULL);
    di_test_ok(di_gram_object(&g, &err), &err);
    di_test_ok(di_pda_init(&p, &g, &err), &err);
    di_gram_deinit(&g);
    assert_true(rig_accepts(&p, "{}", 2));
    assert_true(rig_accepts(&p, "{\"a\": [1, {\"b\": null}]}", 23));
    assert_false(rig_accepts(&p, "[]", 2));
    assert_false(rig_accepts(&p, "1", 1));
    di_pda_deinit(&p);
}

/* Compiles one side of a part of a schema: what its strings hold, or its other values. */
static bool part_accepts(const char *schema, const char *key, bool is_text, const char *text) {
    di_json *root = NULL;
    di_error err = {0};
    di_gram g;
    di_pda p = {0};
    di_test_ok(di_json_parse(&root, schema, strlen(schema), &err), &err);
    di_gram_init(&g, NULL);
    const di_json *part = key ? di_json_get(di_json_get(root, "properties"), key) : NULL;
    const di_node *any = di_node_bytes(&g, "any text", 8);
    const di_node *node = di_node_schema_part(&g, root, part, false, is_text, any);
    di_test_ok(di_gram_status(&g, &err), &err);
    bool is_accepted = false;
    if (node->kind != DI_NODE_NEVER) {
        g.root = di_gram_rule_add(&g, "root", 4);
        di_gram_rule_define(&g, g.root, node);
        di_test_ok(di_pda_init(&p, &g, &err), &err);
        is_accepted = rig_accepts(&p, text, strlen(text));
        di_pda_deinit(&p);
    }
    di_gram_deinit(&g);
    di_json_free(root);
    return is_accepted;
}

static void parts_have_strings_and_others(void **state) {
    (void)state;
    static const char schema[] = "{\"properties\":{\"a\":{\"enum\":[\"x\\\"y\",1]},\"b\":{\"$ref\":\"#/$defs/s\"},"
                                 "\"c\":{\"type\":\"integer\"}},\"$defs\":{\"s\":{\"type\":[\"string\",\"null\"],"
                                 "\"maxLength\":2}}}";
    assert_true(part_accepts(schema, "a", true, "x\"y"));
    assert_false(part_accepts(schema, "a", true, "\"x\\\"y\""));
    assert_false(part_accepts(schema, "a", true, "1"));
    assert_true(part_accepts(schema, "a", false, "1"));
    assert_false(part_accepts(schema, "a", false, "\"x\\\"y\""));
    assert_true(part_accepts(schema, "b", true, "\n\""));
    assert_false(part_accepts(schema, "b", true, "abc"));
    assert_true(part_accepts(schema, "b", false, "null"));
    assert_false(part_accepts(schema, "c", true, "1"));
    assert_true(part_accepts(schema, "c", false, "12"));
    assert_true(part_accepts(schema, NULL, true, "any text"));
    assert_false(part_accepts(schema, NULL, true, "text"));
    assert_true(part_accepts(schema, NULL, false, "{\"a\":\"text\"}"));
    assert_false(part_accepts(schema, NULL, false, "\"text\""));
}

static void put_many(di_strbuf *out, const char *head, const char *format, int n, const char *tail) {
    di_strbuf_puts(out, head);
    for (int i = 0; i < n; i++) {
        di_strbuf_puts(out, i ? "," : "");
        for (const char *c = format; *c; c++) {
            if (*c == '@')
                di_strbuf_printf(out, "%d", i);
            else
                di_strbuf_putc(out, *c);
        }
    }
    di_strbuf_puts(out, tail);
}

/* Large and self-multiplying schemas compile or end in an error, within the limits. */
static void hostile_schemas_end(void **state) {
    (void)state;
    static const struct {
        const char *head, *format, *tail, *accepted; /* NULL: an error is fine */
        int n;
    } cases[] = {
        {"{\"enum\":[", "\"a value of some length, number @\"", "]}", "\"a value of some length, number 7\"", 20000},
        {"{\"type\":\"object\",\"properties\":{", "\"property@\":{\"type\":\"null\"}", "}}", "{\"property7\":null}",
         2000},
        {"{\"allOf\":[", "{\"anyOf\":[{\"required\":[\"a@\"]},{\"required\":[\"b@\"]}]}", "]}", NULL, 40},
        {"{\"oneOf\":[", "{\"type\":\"object\",\"properties\":{\"k\":{\"const\":@}},\"required\":[\"k\"]}", "]}",
         "{\"k\":7}", 60},
        {"{\"type\":\"object\",\"properties\":{\"k\":{\"type\":\"integer\"},\"v\":{}},\"required\":[\"k\"],\"allOf\":[",
         "{\"if\":{\"properties\":{\"k\":{\"const\":@}}},\"then\":{\"required\":[\"v\"]}}", "]}", "{\"k\":7,\"v\":1}",
         30},
        {"{\"$ref\":\"#/$defs/d99\",\"$defs\":{\"d99\":{\"type\":\"null\"},",
         "\"d@\":{\"anyOf\":[{\"$ref\":\"#/$defs/d99\"},{\"$ref\":\"#/$defs/d99\"}]}", "}}", "null", 90},
        {"{\"patternProperties\":{", "\"a@?\":{\"minimum\":@}", "},\"type\":\"object\"}", NULL, 12},
        {"", "{\"items\":", "true}", NULL, 0},
    };
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        di_strbuf schema = {0};
        put_many(&schema, cases[i].head, cases[i].format, cases[i].n, cases[i].tail);
        if (cases[i].n == 0) { /* nesting near the reader's limit */
            di_strbuf_reset(&schema);
            for (int k = 0; k < 500; k++)
                di_strbuf_puts(&schema, "{\"items\":");
            di_strbuf_puts(&schema, "true");
            for (int k = 0; k < 500; k++)
                di_strbuf_puts(&schema, "}");
        }
        di_pda p = {0};
        di_error err = {0};
        bool is_compiled = rig_compile(&p, schema.data, false, &err);
        if (cases[i].accepted) {
            if (!is_compiled)
                fail_msg("%s: %s", cases[i].head, err.message);
            assert_true(rig_accepts(&p, cases[i].accepted, strlen(cases[i].accepted)));
        }
        di_pda_deinit(&p);
        di_strbuf_deinit(&schema);
    }
}

DI_TEST_GROUP(grammar_schema, cmocka_unit_test(types_and_values), cmocka_unit_test(numbers), cmocka_unit_test(strings),
              cmocka_unit_test(objects), cmocka_unit_test(arrays), cmocka_unit_test(combinations),
              cmocka_unit_test(references), cmocka_unit_test(errors_name_the_keyword),
              cmocka_unit_test(white_space_is_bounded), cmocka_unit_test(objects_of_any_kind),
              cmocka_unit_test(parts_have_strings_and_others), cmocka_unit_test(hostile_schemas_end))
