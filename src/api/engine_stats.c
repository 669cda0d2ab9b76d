/* Statistics of the public API: the core's counters as of the last step, readable from any thread.
 *
 * The engine's thread copies them after each step; what never reaches the core (requests that are refused on their
 * caller's thread, samples that their callback ended) is added when they are read. */
#include "engine_api.h"

void di_engine_stats_publish(di_engine *e) {
    di_core_stats now;
    di_core_stats_get(e->core, &now);
    now.n_error -= e->n_cut;
    now.n_abort += e->n_cut;
    pthread_mutex_lock(&e->stats_mutex);
    e->stats = now;
    pthread_mutex_unlock(&e->stats_mutex);
}

static void read_stats(const di_engine *engine, di_engine_stats_t *out) {
    di_engine *e = (di_engine *)(uintptr_t)engine; /* for the lock */
    pthread_mutex_lock(&e->stats_mutex);
    di_core_stats s = e->stats;
    pthread_mutex_unlock(&e->stats_mutex);
    s.n_refused_busy += atomic_load(&e->n_refused_busy);
    s.n_refused_invalid += atomic_load(&e->n_refused_invalid);
    *out = (di_engine_stats_t){.struct_size = sizeof *out};
#define COPY(type, kind, name, meaning) out->name = (type)s.name;
    DI_ENGINE_STATS_LIST(COPY)
#undef COPY
}

void di_engine_stats(const di_engine *engine, di_engine_stats_t *out) {
    di_engine_stats_t all;
    size_t struct_size = out->struct_size;
    read_stats(engine, &all);
    memcpy(out, &all, DI_MIN(struct_size, sizeof all));
    if (struct_size >= sizeof struct_size)
        out->struct_size = DI_MIN(struct_size, sizeof all);
}

static void write_int(di_strbuf *out, const void *value) {
    di_strbuf_printf(out, "%lld", (long long)*(const int64_t *)value);
}

static void write_double(di_strbuf *out, const void *value) {
    di_json_write_double(out, *(const double *)value);
}

di_status di_engine_stats_json(const di_engine *engine, char **json, size_t *len, di_error *err) {
    di_engine_stats_t s;
    di_strbuf out = {0};
    read_stats(engine, &s);
#define WRITE(type, kind, name, meaning)                                                                               \
    di_strbuf_puts(&out, out.len ? ",\"" #name "\":" : "{\"" #name "\":");                                             \
    _Generic(s.name, double : write_double, int64_t : write_int)(&out, &s.name);
    DI_ENGINE_STATS_LIST(WRITE)
#undef WRITE
    di_strbuf_putc(&out, '}');
    di_status st = di_strbuf_status(&out, err);
    if (st) {
        di_strbuf_deinit(&out);
        return st;
    }
    *json = out.data;
    if (len)
        *len = out.len;
    return DI_OK;
}
