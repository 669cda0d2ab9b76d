/* `deepinfer version`: what this program is made of and what it finds on this machine.
 *
 * The instruction-set levels are those of the processor's kernels: which this machine has, and which are in use under
 * the cap that --cpu-isa sets. */
#include "backend/backend.h"
#include "cli.h"

/* Appends the levels of the processor, found and in use. */
static di_status put_levels(di_strbuf *out, const di_options *opt, di_error *err) {
    di_backend cpu;
    di_device *device;
    di_device_info info;
    di_device_config config = {.n_threads = 1, .isa = opt->cpu_isa};
    di_status st = di_backend_find("cpu", &cpu, err);
    if (!st)
        st = cpu.device->open(&device, &config, err);
    if (st)
        return st;
    st = cpu.device->info(device, &info, err);
    if (!st) {
        di_strbuf_printf(out, "processor: %s\ninstruction-set levels found: %s\n", info.name, info.levels_found);
        di_strbuf_printf(out, "instruction-set levels in use: %s\n", info.levels);
    }
    cpu.device->close(device);
    return st;
}

int di_cmd_version(const di_options *opt) {
    di_strbuf out = {0}, backends = {0};
    di_error err;
    di_strbuf_printf(&out, "deepinfer %s\nbackends:\n", DI_CLI_VERSION);
    di_backend_list(&backends);
    for (const char *line = di_strbuf_str(&backends); *line;) {
        size_t len = strcspn(line, "\n");
        di_strbuf_printf(&out, "  %.*s\n", (int)len, line);
        line += len + (line[len] == '\n');
    }
    di_status st = put_levels(&out, opt, &err);
    if (!st)
        st = di_strbuf_status(&out, &err);
    if (!st) {
        st = di_cli_print(out.data, out.len, &err);
    }
    di_strbuf_deinit(&out);
    di_strbuf_deinit(&backends);
    return st ? di_cli_fail(&err) : 0;
}
