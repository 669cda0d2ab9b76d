/* Finding a backend by name and checking its tables.
 *
 * The CPU is linked in and always there. The others are modules, opened by full path from one folder: the one that the
 * caller set, else the one that holds this very code (the program's, or libdeepinfer.so's). A module that is missing or
 * of another build, or a machine without its device, is told apart in the message. Nothing falls back silently: `auto`
 * logs its choice, and a backend asked for by name runs or is an error. */
#include <dlfcn.h>
#include <unistd.h>

#include "backend.h"

#include "cpu/cpu.h"

typedef struct backend_row {
    const char *name;
    const char *file; /* NULL: linked in */
} backend_row;

/* By falling preference of `auto`. */
static const backend_row rows[] = {
    {"nvidia", "libdeepinfer-cuda.so"},
    {"ascend", "libdeepinfer-ascend.so"},
    {"cpu", NULL},
};

static const char *module_dir; /* set before threads start; NULL: beside this code */

void di_backend_set_dir(const char *dir) {
    module_dir = dir;
}

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
        ENTRY(probe),           ENTRY(open),         ENTRY(close),          ENTRY(info),          ENTRY(reserve),
        ENTRY(scratch_bytes),   ENTRY(alloc),        ENTRY(free),           ENTRY(alloc_host),    ENTRY(free_host),
        ENTRY(experts_place),   ENTRY(upload),       ENTRY(download),       ENTRY(copy),          ENTRY(stream_create),
        ENTRY(stream_destroy),  ENTRY(stream_sync),  ENTRY(stream_refused), ENTRY(stream_upload), ENTRY(stream_copy),
        ENTRY(stream_download), ENTRY(event_create), ENTRY(event_destroy),  ENTRY(event_record),  ENTRY(event_wait),
        ENTRY(event_elapsed),   ENTRY(measure),      ENTRY(host_threads),   ENTRY(host_run),
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

/* "<folder>/<file>" of a module. */
static di_status module_path(const backend_row *row, di_strbuf *out, di_error *err) {
    Dl_info self;
    const char *end;
    if (module_dir) {
        di_strbuf_printf(out, "%s/%s", module_dir, row->file);
    } else if (dladdr((const void *)&rows, &self) && self.dli_fname && (end = strrchr(self.dli_fname, '/'))) {
        di_strbuf_printf(out, "%.*s/%s", (int)(end - self.dli_fname), self.dli_fname, row->file);
    } else { /* started by a bare name: the kernel knows where it lies */
        char path[4096];
        ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
        if (n < 0)
            return di_fail(err, DI_ERR_DEVICE, "accelerator '%s': the folder of its module is not known", row->name);
        path[n] = 0;
        end = strrchr(path, '/');
        di_strbuf_printf(out, "%.*s/%s", end ? (int)(end - path) : 1, end ? path : ".", row->file);
    }
    return di_strbuf_status(out, err);
}

/* Opens a module; it stays open until the process ends. */
static di_status open_module(const backend_row *row, const char *path, di_backend *out, di_error *err) {
    if (!di_path_exists(path))
        return di_fail(err, DI_ERR_DEVICE,
                       "accelerator '%s' asked for, but there is no module '%s'; use 'cpu' or 'auto', or build with "
                       "-DDEEPINFER_ACCELERATOR=%s",
                       row->name, path, row->name);
    void *module = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!module)
        return di_fail(err, DI_ERR_DEVICE, "accelerator '%s': %s", row->name, dlerror());
    const di_backend *(*tables)(int log_level);
    *(void **)&tables = dlsym(module, "di_backend_module");
    if (!tables) {
        dlclose(module);
        return di_fail(err, DI_ERR_DEVICE, "accelerator '%s': '%s' is not a module of this program", row->name, path);
    }
    *out = *tables((int)di_log_get_level());
    return DI_OK;
}

static di_status open_row(const backend_row *row, di_backend *out, di_error *err) {
    di_strbuf path = {0};
    di_backend found = {.device = &di_cpu_device_ops, .ops = &di_cpu_ops};
    di_status st = DI_OK;
    if (row->file && !(st = module_path(row, &path, err)))
        st = open_module(row, path.data, &found, err);
    if (!st)
        st = di_backend_check(found.device, found.ops, err);
    if (!st)
        st = found.device->probe(err);
    if (!st)
        *out = found;
    di_strbuf_deinit(&path);
    return st;
}

di_status di_backend_find(const char *name, di_backend *out, di_error *err) {
    bool is_auto = strcmp(name, "auto") == 0;
    for (size_t i = 0; i < DI_COUNT(rows); i++) {
        di_error why = {.message = ""};
        if (!is_auto && strcmp(rows[i].name, name) != 0)
            continue;
        di_status st = open_row(&rows[i], out, is_auto ? &why : err);
        if (!is_auto || (st && !rows[i].file))
            return st;
        if (st == DI_OK) {
            di_info("accelerator auto: runs on '%s'", rows[i].name);
            return DI_OK;
        }
        di_info("accelerator auto: not on '%s': %s", rows[i].name, why.message);
    }
    return di_fail(err, DI_ERR_ARG, "accelerator '%s' is unknown; expected auto, cpu, nvidia or ascend", name);
}

void di_backend_list(di_strbuf *out) {
    for (size_t i = DI_COUNT(rows); i-- > 0;) {
        di_backend found;
        di_error why = {.message = ""};
        if (open_row(&rows[i], &found, &why) == DI_OK)
            di_strbuf_printf(out, "%s\n", rows[i].name);
    }
}
