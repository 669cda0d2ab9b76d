/* Number bounds of JSON schemas: the numbers that a grammar accepts are exactly those within, for random bounds,
 * multiples and candidates close to them. Values are integers in units of 10^-k here, so that comparing is exact and
 * shares nothing with the automata over digits. */
#include "grammar_rig.h"

typedef __int128 wide;

/* value * 10^-decimals as JSON writes it, with n_zeros more zeros behind the point. */
static void put_number(di_strbuf *out, wide value, int decimals, int n_zeros, bool is_shortest) {
    char digits[64];
    int n = 0;
    bool is_negative = value < 0;
    for (wide v = is_negative ? -value : value; v > 0 || n <= decimals; v /= 10)
        digits[n++] = (char)('0' + (int)(v % 10));
    int last = 0; /* digits behind it are left out */
    while (is_shortest && last < decimals && digits[last] == '0')
        last++;
    if (is_negative)
        di_strbuf_putc(out, '-');
    for (int i = n - 1; i >= last; i--) {
        di_strbuf_putc(out, digits[i]);
        if (i == decimals && i > last)
            di_strbuf_putc(out, '.');
    }
    if (last == decimals && n_zeros)
        di_strbuf_putc(out, '.');
    for (int i = 0; i < n_zeros; i++)
        di_strbuf_putc(out, '0');
}

static wide random_value(uint64_t *rng, int digits_max) {
    wide limit = 1;
    for (int64_t n = di_test_random_range(rng, 0, digits_max); n > 0; n--)
        limit *= 10;
    wide value = (wide)(di_test_random(rng) >> 1) % limit;
    if (di_test_random(rng) % 4 == 0)
        value = limit - (di_test_random(rng) % 2); /* 1000, 999 */
    return di_test_random(rng) % 2 ? -value : value;
}

typedef struct limits {
    bool has_low, has_high, is_low_exclusive, is_high_exclusive;
    wide low, high, multiple; /* 0: none */
    int decimals;
    bool is_integer;
} limits;

static bool is_within(const limits *l, wide v) {
    wide unit = 1;
    for (int i = 0; i < l->decimals; i++)
        unit *= 10;
    return (!l->has_low || v > l->low || (v == l->low && !l->is_low_exclusive)) &&
           (!l->has_high || v < l->high || (v == l->high && !l->is_high_exclusive)) &&
           (!l->multiple || v % l->multiple == 0) && (!l->is_integer || v % unit == 0);
}

static void put_schema(di_strbuf *out, const limits *l) {
    di_strbuf_printf(out, "{\"type\":\"%s\"", l->is_integer ? "integer" : "number");
    if (l->has_low) {
        di_strbuf_printf(out, ",\"%s\":", l->is_low_exclusive ? "exclusiveMinimum" : "minimum");
        put_number(out, l->low, l->decimals, 0, true);
    }
    if (l->has_high) {
        di_strbuf_printf(out, ",\"%s\":", l->is_high_exclusive ? "exclusiveMaximum" : "maximum");
        put_number(out, l->high, l->decimals, 0, true);
    }
    if (l->multiple) {
        di_strbuf_puts(out, ",\"multipleOf\":");
        put_number(out, l->multiple, l->decimals, 0, true);
    }
    di_strbuf_putc(out, '}');
}

static void check_candidate(di_pda *p, const limits *l, const char *schema, wide v, int n_zeros) {
    di_strbuf text = {0};
    put_number(&text, v, l->decimals, n_zeros, true);
    bool is_accepted = rig_accepts(p, text.data, text.len);
    /* Integers have no point, and multiples no more decimals than their divisor: such spellings may be refused. */
    bool may_differ = n_zeros > 0 && (l->is_integer || l->multiple);
    if (may_differ ? is_accepted && !is_within(l, v) : is_accepted != is_within(l, v))
        fail_msg("%s: '%s' is %saccepted", schema, text.data, is_accepted ? "" : "not ");
    di_strbuf_deinit(&text);
}

static void check_limits(uint64_t *rng, const limits *l) {
    di_strbuf schema = {0};
    di_pda p = {0};
    di_error err = {0};
    put_schema(&schema, l);
    if (!rig_compile(&p, schema.data, false, &err)) {
        /* Fine where nothing is within: no value between the bounds, looked for where there may be few. */
        assert_true(l->has_low && l->has_high);
        for (wide v = l->low; v <= l->high && v <= l->low + 5000; v++) {
            if (is_within(l, v))
                fail_msg("%s: %s", schema.data, err.message);
        }
        di_strbuf_deinit(&schema);
        return;
    }
    for (int i = 0; i < 120; i++) {
        wide base = i % 3 == 0 && l->has_low ? l->low : i % 3 == 1 && l->has_high ? l->high : 0;
        wide v = base + random_value(rng, i % 5 ? 2 : 17);
        if (l->multiple && i % 2)
            v = v / l->multiple * l->multiple;
        check_candidate(&p, l, schema.data, v, i % 7 == 0 ? (int)di_test_random_range(rng, 1, 3) : 0);
    }
    di_pda_deinit(&p);
    di_strbuf_deinit(&schema);
}

/* At most 15 digits, so that every bound is the shortest decimal of its double. */
DI_PROPERTY(decimals_are_those_within, 300) {
    uint64_t rng = seed;
    limits l = {.decimals = (int)di_test_random_range(&rng, 0, 5), .is_integer = di_test_random(&rng) % 3 == 0};
    l.has_low = di_test_random(&rng) % 4 != 0;
    l.has_high = di_test_random(&rng) % 4 != 0;
    l.low = random_value(&rng, 14);
    l.high = di_test_random(&rng) % 2 ? l.low + 1 + (wide)(di_test_random(&rng) % 2000) : random_value(&rng, 14);
    if (l.has_low && l.has_high && l.low > l.high) {
        wide low = l.high;
        l.high = l.low;
        l.low = low;
    }
    l.is_low_exclusive = di_test_random(&rng) % 2;
    l.is_high_exclusive = di_test_random(&rng) % 2;
    if (di_test_random(&rng) % 4 == 0)
        l.multiple = di_test_random_range(&rng, 1, 60);
    check_limits(&rng, &l);
}

/* Integers of 64 bits, where doubles would not tell neighbours apart. */
DI_PROPERTY(large_integers_are_those_within, 200) {
    uint64_t rng = seed;
    limits l = {.is_integer = true, .has_low = true, .has_high = di_test_random(&rng) % 2};
    l.low = (wide)(int64_t)di_test_random(&rng);
    if (di_test_random(&rng) % 4 == 0)
        l.low = di_test_random(&rng) % 2 ? INT64_MIN : INT64_MAX;
    l.high = l.low + (wide)(di_test_random(&rng) >> (di_test_random(&rng) % 63));
    if (l.high > UINT64_MAX)
        l.high = UINT64_MAX;
    l.is_low_exclusive = di_test_random(&rng) % 2;
    check_limits(&rng, &l);
}

DI_TEST_GROUP(grammar_number, cmocka_unit_test(decimals_are_those_within),
              cmocka_unit_test(large_integers_are_those_within))
