/* `deepinfer version`: what this program is made of and what it finds on this machine.
 *
 * The instruction sets that are found are those that kernels could use; the ones compiled in are those that they do use. */
#include "backend/backend.h"
#include "cli.h"

/* Appends the processor's instruction sets beyond the baseline, a space before each. */
static void put_found(di_strbuf *out) {
    size_t before = out->len;
#if defined(__x86_64__)
    /* The names must be literals. */
#define PUT(name)                                                                                                      \
    if (__builtin_cpu_supports(name)) {                                                                                \
        di_strbuf_puts(out, " " name);                                                                                 \
    }
    __builtin_cpu_init();
    PUT("avx2")
    PUT("fma")
    PUT("avx512f")
    PUT("avx512bw")
    PUT("avx512vl")
    PUT("avx512vnni")
    PUT("avx512bf16")
#undef PUT
#endif
    if (out->len == before) {
        di_strbuf_puts(out, " none beyond the baseline");
    }
}

int di_cmd_version(const di_options *opt) {
    (void)opt;
    di_strbuf out = {0}, backends = {0};
    di_error err;
    di_strbuf_printf(&out, "deepinfer %s\nbackends:\n", DI_CLI_VERSION);
    di_backend_list(&backends);
    for (const char *line = di_strbuf_str(&backends); *line;) {
        size_t len = strcspn(line, "\n");
        di_strbuf_printf(&out, "  %.*s\n", (int)len, line);
        line += len + (line[len] == '\n');
    }
    di_strbuf_puts(&out, "instruction sets compiled in: portable C for the baseline\ninstruction sets found:");
    put_found(&out);
    di_strbuf_putc(&out, '\n');
    di_status st = di_strbuf_status(&out, &err);
    if (!st) {
        st = di_cli_print(out.data, out.len, &err);
    }
    di_strbuf_deinit(&out);
    di_strbuf_deinit(&backends);
    return st ? di_cli_fail(&err) : 0;
}
