/* UTF-8, number readers, hashes, files, logs and the CPU's name. Values of hashes are the published ones. */
#include "harness.h"

#include <fcntl.h>
#include <limits.h>
#include <locale.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "base/base.h"

static void hashes_match_published_values(void **state) {
    (void)state;
    assert_true(di_hash_fnv1a("", 0) == 0xcbf29ce484222325u);
    assert_true(di_hash_fnv1a("a", 1) == 0xaf63dc4c8601ec8cu);
    assert_true(di_hash_fnv1a("foobar", 6) == 0x85944171f73967e8u);
    /* First output of splitmix64 from state 0: the finaliser over the golden-ratio increment. */
    assert_true(di_mix64(0x9E3779B97F4A7C15u) == 0xe220a8397b1dcdafu);
}

static void utf8_round_trips_every_scalar(void **state) {
    (void)state;
    for (uint32_t cp = 0; cp <= 0x10FFFF; cp += cp < 0x1000 ? 1 : 13) {
        if (cp >= 0xD800 && cp <= 0xDFFF) {
            continue;
        }
        char bytes[4];
        size_t n = di_utf8_encode(cp, bytes), skip;
        uint32_t back = 0;
        assert_int_equal(n, cp < 0x80 ? 1 : cp < 0x800 ? 2 : cp < 0x10000 ? 3 : 4);
        assert_int_equal(di_utf8_decode(bytes, n, &back, &skip), n);
        assert_int_equal(back, cp);
        if (n > 1) {
            assert_int_equal(di_utf8_decode(bytes, n - 1, &back, &skip), 0);
            assert_int_equal(skip, n - 1);
        }
    }
}

static void utf8_refuses_ill_formed(void **state) {
    (void)state;
    static const struct {
        const char *bytes;
        size_t skip;
    } cases[] = {
        {"\x80", 1},             /* a lone continuation */
        {"\xC0\x80", 1},         /* overlong NUL */
        {"\xC1\xBF", 1},         /* overlong */
        {"\xE0\x9F\xBF", 1},     /* overlong: the second byte already fits nothing */
        {"\xED\xA0\x80", 1},     /* surrogate */
        {"\xF0\x8F\xBF\xBF", 1}, /* overlong */
        {"\xF4\x90\x80\x80", 1}, /* above U+10FFFF */
        {"\xF5\x80\x80\x80", 1}, /* no such lead byte */
        {"\xFF", 1},
        {"\xE2\x82", 2}, /* cut */
        {"\xE2\x82"
         "a",
         2},                     /* broken off by ASCII */
        {"\xF0\x9F\xA6", 3},     /* cut */
        {"\xF0\x9F\xA6\xF0", 3}, /* broken off by a lead byte */
    };
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        size_t skip = 0;
        assert_int_equal(di_utf8_decode(cases[i].bytes, strlen(cases[i].bytes), NULL, &skip), 0);
        assert_int_equal(skip, cases[i].skip);
        assert_false(di_utf8_valid(cases[i].bytes, strlen(cases[i].bytes)));
    }
    assert_int_equal(di_utf8_decode("", 0, NULL, NULL), 0);
    assert_true(di_utf8_valid("", 0));
    assert_true(di_utf8_valid("a\0\xC3\xA9", 4));
}

static void utf8_repairs_maximal_subparts(void **state) {
    (void)state;
    /* The example of the Unicode standard, chapter 3 table 3-8, and two neighbours (tables 3-9 and 3-11). */
    static const struct {
        const char *in, *out;
    } cases[] = {
        {"\xC0\xAF\xE0\x80\xBF\xF0\x81\x82"
         "A",
         "\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFDA"},
        {"\xED\xA0\x80\xED\xBF\xBF\xED\xAF"
         "A",
         "\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFDA"},
        {"\xE1\x80\xE2\xF0\x91\x92\xF1\xBF"
         "A",
         "\uFFFD\uFFFD\uFFFD\uFFFDA"},
        {"clean \xE2\x82\xAC", "clean \xE2\x82\xAC"},
        {"", ""},
    };
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        di_strbuf out = {0};
        di_utf8_repair(&out, cases[i].in, strlen(cases[i].in));
        assert_string_equal(di_strbuf_str(&out), cases[i].out);
        di_strbuf_deinit(&out);
    }
    di_strbuf out = {0};
    di_utf8_repair(&out, NULL, 0);
    assert_int_equal(out.len, 0);
    di_strbuf_deinit(&out);
}

static void integers_are_whole_and_in_range(void **state) {
    (void)state;
    int64_t i = 5;
    uint64_t u = 5;
    assert_true(di_parse_i64("-9223372036854775808", &i));
    assert_true(i == INT64_MIN);
    assert_true(di_parse_i64("9223372036854775807", &i));
    assert_true(i == INT64_MAX);
    assert_true(di_parse_i64("-0", &i));
    assert_int_equal(i, 0);
    i = 5;
    static const char *const bad[] = {"",   "-", "+1", " 1", "1 ", "1x", "0x10", "1.0", "1e3", "9223372036854775808",
                                      "--1"};
    for (size_t n = 0; n < DI_COUNT(bad); n++) {
        assert_false(di_parse_i64(bad[n], &i));
        assert_int_equal(i, 5);
    }
    assert_true(di_parse_u64("18446744073709551615", &u));
    assert_true(u == UINT64_MAX);
    assert_false(di_parse_u64("18446744073709551616", &u));
    assert_false(di_parse_u64("-1", &u));
    assert_false(di_parse_u64("", &u));
}

static void doubles_are_whole_and_finite_or_named(void **state) {
    (void)state;
    double d = 5;
    assert_true(di_parse_double("0.1", &d) && d == 0.1);
    assert_true(di_parse_double("-2.5e-3", &d) && d == -2.5e-3);
    assert_true(di_parse_double(".5", &d) && d == 0.5);
    assert_true(di_parse_double("5e-324", &d) && d == 5e-324);
    assert_true(di_parse_double("1e-999", &d) && d == 0);
    assert_true(di_parse_double("inf", &d) && isinf(d));
    assert_true(di_parse_double("NaN", &d) && isnan(d));
    d = 5;
    static const char *const bad[] = {"",    " 1", "1 ", "0x1p3", "1e999",  "-1e999",
                                      "1,5", "e5", ".",  "-",     "nan(1)", "--1"};
    for (size_t n = 0; n < DI_COUNT(bad); n++) {
        assert_false(di_parse_double(bad[n], &d));
        assert_true(d == 5);
    }
}

static void numbers_do_not_depend_on_the_locale(void **state) {
    (void)state;
    if (!setlocale(LC_ALL, "de_DE.UTF-8") && !setlocale(LC_ALL, "de_DE") && !setlocale(LC_ALL, "fr_FR.UTF-8")) {
        di_test_skip("no locale with a decimal comma is installed");
    }
    double d = 0;
    bool is_ok = di_parse_double("1.5", &d);
    di_strbuf out = {0};
    di_json_write_double(&out, 0.25);
    setlocale(LC_ALL, "C");
    assert_true(is_ok && d == 1.5);
    assert_string_equal(di_strbuf_str(&out), "0.25");
    di_strbuf_deinit(&out);
}

static void clock_moves_forward(void **state) {
    (void)state;
    int64_t before = di_clock_ns();
    assert_true(before > 0);
    assert_true(di_clock_ns() >= before);
}

static void random_values_differ(void **state) {
    (void)state;
    assert_true(di_random_u64() != di_random_u64());
}

static void write_file(const char *path, const char *data, size_t n) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, n, file), n);
    assert_int_equal(fclose(file), 0);
}

static void mapping_shows_the_file(void **state) {
    (void)state;
    const char *path = di_test_tmp("mapped");
    di_error err;
    di_mapping map = {0};
    write_file(path, "hello\0world", 11);
    di_test_ok(di_mapping_open(&map, path, &err), &err);
    assert_int_equal(map.n_bytes, 11);
    assert_memory_equal(map.data, "hello\0world", 11);
    di_mapping_close(&map);
    assert_null(map.data);
    di_mapping_close(&map);

    write_file(path, "", 0);
    di_test_ok(di_mapping_open(&map, path, &err), &err);
    assert_int_equal(map.n_bytes, 0);
    assert_null(map.data);
    di_mapping_close(&map);
}

static void files_that_cannot_be_had_are_named(void **state) {
    (void)state;
    di_error err;
    di_mapping map = {0};
    di_strbuf out = {0};
    assert_int_equal(di_mapping_open(&map, "/nonexistent/x", &err), DI_ERR_NOT_FOUND);
    assert_string_equal(err.message, "'/nonexistent/x': no such file");
    assert_int_equal(di_file_read("/nonexistent/x", 100, &out, &err), DI_ERR_NOT_FOUND);
    assert_int_equal(di_mapping_open(&map, "/", &err), DI_ERR_IO);
    assert_string_equal(err.message, "'/': expected a regular file, found a folder");
    assert_int_equal(di_mapping_open(&map, "/dev/null", &err), DI_ERR_IO);
    assert_int_equal(di_file_read("/", 100, &out, &err), DI_ERR_IO);
    assert_contains(err.message, "'/'");
    const char *path = di_test_tmp("locked");
    write_file(path, "x", 1);
    assert_int_equal(chmod(path, 0), 0);
    if (geteuid() != 0) {
        assert_int_equal(di_mapping_open(&map, path, &err), DI_ERR_NOT_FOUND);
        assert_contains(err.message, "permission denied");
    }
    di_strbuf_deinit(&out);
}

static void file_read_appends_within_its_limit(void **state) {
    (void)state;
    const char *path = di_test_tmp("read");
    di_error err;
    di_strbuf out = {0};
    char *big = malloc(200000);
    memset(big, 'x', 200000);
    write_file(path, big, 200000);
    di_strbuf_puts(&out, "before:");
    di_test_ok(di_file_read(path, 200000, &out, &err), &err);
    assert_int_equal(out.len, 200007);
    assert_memory_equal(out.data, "before:xxx", 10);
    di_strbuf_reset(&out);
    assert_int_equal(di_file_read(path, 199999, &out, &err), DI_ERR_RANGE);
    assert_contains(err.message, "more than 199999 bytes");
    free(big);
    di_strbuf_deinit(&out);
}

static void standard_input_is_a_dash(void **state) {
    (void)state;
    const char *path = di_test_tmp("stdin");
    di_error err;
    di_strbuf out = {0};
    write_file(path, "typed", 5);
    int saved = dup(STDIN_FILENO);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    assert_true(saved >= 0 && fd >= 0);
    assert_int_equal(dup2(fd, STDIN_FILENO), STDIN_FILENO);
    close(fd);
    di_status st = di_file_read("-", 100, &out, &err);
    dup2(saved, STDIN_FILENO);
    close(saved);
    assert_int_equal(st, DI_OK);
    assert_string_equal(di_strbuf_str(&out), "typed");
    di_strbuf_deinit(&out);
}

static void paths_join(void **state) {
    (void)state;
    di_strbuf out = {0};
    di_path_join(&out, "a/b", "c");
    assert_string_equal(out.data, "a/b/c");
    di_path_join(&out, "a/b/", "c");
    assert_string_equal(out.data, "a/b/c");
    di_path_join(&out, "/", "c");
    assert_string_equal(out.data, "/c");
    di_strbuf_deinit(&out);
    assert_true(di_path_is_dir("/"));
    assert_true(di_path_exists("/dev/null"));
    assert_false(di_path_is_dir("/dev/null"));
    assert_false(di_path_exists("/nonexistent"));
}

/* What two log calls write at a level. */
static void capture_log(di_log_level level, char *text, size_t size) {
    const char *path = di_test_tmp("log");
    fflush(stderr);
    int saved = dup(STDERR_FILENO);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    dup2(fd, STDERR_FILENO);
    di_log_set_level(level);
    char long_text[4000];
    memset(long_text, 'y', sizeof long_text - 1);
    long_text[sizeof long_text - 1] = '\0';
    di_warn("found %d", 3);
    di_debug("%s", long_text);
    di_log_set_level(DI_LOG_WARN);
    dup2(saved, STDERR_FILENO);
    close(saved);
    ssize_t n = pread(fd, text, size - 1, 0);
    close(fd);
    text[n > 0 ? n : 0] = '\0';
}

static void log_lines_obey_the_level(void **state) {
    (void)state;
    static char text[8192];
    assert_int_equal(di_log_get_level(), DI_LOG_WARN);
    capture_log(DI_LOG_ERROR, text, sizeof text);
    assert_string_equal(text, "");
    capture_log(DI_LOG_WARN, text, sizeof text);
    assert_string_equal(text, "deepinfer: warning: found 3\n");
    capture_log(DI_LOG_DEBUG, text, sizeof text);
    assert_contains(text, "deepinfer: warning: found 3\ndeepinfer: debug: yyy");
    size_t len = strlen(text);
    assert_int_equal(text[len - 1], '\n'); /* cut, but still one whole line */
    assert_int_equal(text[len - 2], 'y');
}

static void cpu_names_are_read(void **state) {
    (void)state;
    static const char x86[] = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel\t\t: 207\n"
                              "model name\t: Intel(R) Xeon(R) Gold 6430 \nstepping\t: 8\n\n"
                              "processor\t: 1\nmodel name\t: another\n";
    static const char arm[] = "processor\t: 0\nBogoMIPS\t: 50.00\nCPU implementer\t: 0x41\n"
                              "CPU architecture: 8\nCPU part\t: 0xd0c\nCPU revision\t: 1\n";
    char name[128], fallback[128];
    di_cpu_name_from(x86, name, sizeof name);
    assert_string_equal(name, "Intel(R) Xeon(R) Gold 6430");
    di_cpu_name_from(x86, name, 6);
    assert_string_equal(name, "Intel");
    di_cpu_name_from("model name\t: no line end", name, sizeof name);
    assert_string_equal(name, "no line end");

    struct utsname system;
    assert_int_equal(uname(&system), 0);
    long n = sysconf(_SC_NPROCESSORS_CONF);
    snprintf(fallback, sizeof fallback, "%s 0x41 0xd0c, %ld processors", system.machine, n);
    di_cpu_name_from(arm, name, sizeof name);
    assert_string_equal(name, fallback);
    snprintf(fallback, sizeof fallback, "%s, %ld processors", system.machine, n);
    static const char *const nameless[] = {
        "",
        "\n\n",
        "model name",
        "model name\t:",
        "model name\t: \nflags\t: x\n",
        "the model name\t: x\n",
        "CPU part\t: 0xd0c\n",
    };
    for (size_t i = 0; i < DI_COUNT(nameless); i++) {
        di_cpu_name_from(nameless[i], name, sizeof name);
        assert_string_equal(name, fallback);
    }
}

/* The machine's own name is what its first "model name" line says, or the fallback. */
static void cpu_name_is_the_machine_s(void **state) {
    (void)state;
    char name[256], again[256], line[512];
    di_cpu_name(name, sizeof name);
    di_cpu_name(again, sizeof again);
    assert_string_equal(name, again);
    assert_true(name[0] != '\0');
    FILE *f = fopen("/proc/cpuinfo", "re");
    if (!f) {
        di_test_skip("no /proc/cpuinfo");
    }
    bool is_named = false;
    while (!is_named && fgets(line, sizeof line, f)) {
        is_named = strncmp(line, "model name", 10) == 0;
    }
    fclose(f);
    if (is_named) {
        assert_contains(line, name);
    } else {
        assert_contains(name, "processors");
    }
}

static void hexadecimal_digits_are_read(void **state) {
    (void)state;
    static const char digits[] = "0123456789abcdef", capitals[] = "ABCDEF";
    for (int c = CHAR_MIN; c <= CHAR_MAX; c++) {
        const char *small = c ? strchr(digits, c) : NULL, *capital = c ? strchr(capitals, c) : NULL;
        int expected = small ? (int)(small - digits) : capital ? 10 + (int)(capital - capitals) : -1;
        assert_int_equal(di_hex_digit((char)c), expected);
    }
}

DI_TEST_GROUP(util, cmocka_unit_test(hashes_match_published_values), cmocka_unit_test(utf8_round_trips_every_scalar),
              cmocka_unit_test(utf8_refuses_ill_formed), cmocka_unit_test(utf8_repairs_maximal_subparts),
              cmocka_unit_test(integers_are_whole_and_in_range), cmocka_unit_test(hexadecimal_digits_are_read),
              cmocka_unit_test(doubles_are_whole_and_finite_or_named),
              cmocka_unit_test(numbers_do_not_depend_on_the_locale), cmocka_unit_test(clock_moves_forward),
              cmocka_unit_test(random_values_differ), cmocka_unit_test(mapping_shows_the_file),
              cmocka_unit_test(files_that_cannot_be_had_are_named),
              cmocka_unit_test(file_read_appends_within_its_limit), cmocka_unit_test(standard_input_is_a_dash),
              cmocka_unit_test(paths_join), cmocka_unit_test(log_lines_obey_the_level),
              cmocka_unit_test(cpu_names_are_read), cmocka_unit_test(cpu_name_is_the_machine_s))
