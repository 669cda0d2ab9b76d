/* Finding a backend by name and checking its tables.
 *
 * This build has the CPU; it is linked in and always there. The other names are known, so that asking for one of them
 * is answered with what is missing rather than with a spelling error. Nothing falls back silently: `auto` logs its
 * choice, and a backend asked for by name runs or is an error. */
#include "backend.h"

#include "cpu/cpu.h"

typedef struct backend_row {
    const char *name;
    const di_device_ops *device; /* NULL: not in this build */
    const di_ops *ops;
} backend_row;

static const backend_row rows[] = {
    {"cpu", &di_cpu_device_ops, &di_cpu_ops},
    {"nvidia", NULL, NULL},
    {"ascend", NULL, NULL},
};

/* Appends ", name" to a list of at most `cap` bytes; a list that is full stays as it is. */
static void list_add(char *list, size_t cap, const char *name) {
    size_t len = strlen(list);
    if (len + strlen(name) + 3 <= cap)
        snprintf(list + len, cap - len, "%s%s", len ? ", " : "", name);
}

di_status di_backend_check(const di_device_ops *device, const di_ops *ops, di_error *err) {
    const char *name = device->name ? device->name : "?";
    if (device->abi != DI_BACKEND_ABI || ops->abi != DI_BACKEND_ABI) {
        return di_fail(err, DI_ERR_DEVICE,
                       "backend '%s': tables of ABI %u and %u, expected %d; install the module that belongs "
                       "to this program",
                       name, (unsigned)device->abi, (unsigned)ops->abi, DI_BACKEND_ABI);
    }
    if (device->size != sizeof *device || ops->size != sizeof *ops) {
        return di_fail(err, DI_ERR_DEVICE,
                       "backend '%s': tables of %u and %u bytes, expected %zu and %zu; install the module "
                       "that belongs to this program",
                       name, (unsigned)device->size, (unsigned)ops->size, sizeof *device, sizeof *ops);
    }
    const struct {
        const char *name;
        bool is_there;
    } entries[] = {
#define ENTRY(f) {"device " #f, device->f != NULL}
        ENTRY(open),          ENTRY(close),          ENTRY(info),        ENTRY(reserve),        ENTRY(scratch_bytes),
        ENTRY(alloc),         ENTRY(free),           ENTRY(upload),      ENTRY(download),       ENTRY(copy),
        ENTRY(stream_create), ENTRY(stream_destroy), ENTRY(stream_sync), ENTRY(stream_refused), ENTRY(measure),
        ENTRY(host_threads),  ENTRY(host_run),
#undef ENTRY
#define ENTRY(f) {#f, ops->f != NULL},
        DI_OPS_LIST(ENTRY)
#undef ENTRY
    };
    char missing[600] = "";
    for (size_t i = 0; i < DI_COUNT(entries); i++) {
        if (!entries[i].is_there)
            list_add(missing, sizeof missing, entries[i].name);
    }
    if (missing[0])
        return di_fail(err, DI_ERR_DEVICE, "backend '%s' lacks what the model needs: %s", name, missing);
    return DI_OK;
}

di_status di_backend_find(const char *name, di_backend *out, di_error *err) {
    bool is_auto = strcmp(name, "auto") == 0;
    const char *wanted = is_auto ? "cpu" : name;
    for (size_t i = 0; i < DI_COUNT(rows); i++) {
        if (strcmp(rows[i].name, wanted) != 0)
            continue;
        if (!rows[i].device) {
            return di_fail(err, DI_ERR_DEVICE,
                           "accelerator '%s' asked for, but this build has no module for it; use 'cpu' or "
                           "'auto'",
                           name);
        }
        di_status st = di_backend_check(rows[i].device, rows[i].ops, err);
        if (st)
            return st;
        *out = (di_backend){.device = rows[i].device, .ops = rows[i].ops};
        if (is_auto)
            di_info("accelerator auto: runs on the cpu, the only backend of this build");
        return DI_OK;
    }
    return di_fail(err, DI_ERR_ARG, "accelerator '%s' is unknown; expected auto, cpu, nvidia or ascend", name);
}

void di_backend_list(di_strbuf *out) {
    for (size_t i = 0; i < DI_COUNT(rows); i++) {
        if (rows[i].device)
            di_strbuf_printf(out, "%s\n", rows[i].name);
    }
}
