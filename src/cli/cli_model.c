/* Options into a loaded model and its engine, requests into the engine, numbers out of it.
 *
 * Everything that `run`, `chat` and `bench` would otherwise each do: the progress bar, the defaults of requests, the
 * check for what is not supported yet, the statistics. */
#include <sys/resource.h>
#include <unistd.h>

#include "cli_model.h"

#define FORMAT_BYTES_MAX ((size_t)16 << 20) /* of a schema or a grammar */

/* ---- options ------------------------------------------------------------------------------------------------------
 */

di_status di_cli_request_options(di_request_options *out, const di_options *opt, di_error *err) {
    di_request_options_init(out, opt->vendor_compat);
    if (!opt->vendor_compat || di_options_is_set(opt, DI_OPT_reasoning)) {
        di_status st = di_effort_parse(opt->reasoning, &out->effort_default, err);
        if (st)
            return st;
    }
    di_sampling *s = &out->sampling;
    s->temperature = opt->temperature;
    s->top_p = opt->top_p;
    s->top_k = opt->top_k;
    s->min_p = opt->min_p;
    s->presence_penalty = opt->presence_penalty;
    s->frequency_penalty = opt->frequency_penalty;
    s->repetition_penalty = opt->repetition_penalty;
    s->has_seed = di_options_is_set(opt, DI_OPT_seed);
    s->seed = opt->seed;
    s->max_tokens = opt->max_tokens;
    s->min_tokens = opt->min_tokens;
    s->ignore_eos = opt->ignore_eos;
    s->n_logprobs = (int32_t)opt->logprobs;
    s->n_prompt_logprobs = (int32_t)opt->prompt_logprobs;
    s->logprobs_processed = strcmp(opt->logprobs_mode, "processed") == 0;
    return DI_OK;
}

/* The stop strings of the command line with their lengths, which live as long as the model. */
static di_status set_stops(di_cli_model *m, const di_options *opt, di_error *err) {
    if (opt->stop.n == 0)
        return DI_OK;
    size_t *len = calloc(opt->stop.n, sizeof *len);
    if (!len)
        return di_fail(err, DI_ERR_MEMORY, "%zu stop strings", opt->stop.n);
    for (size_t i = 0; i < opt->stop.n; i++)
        len[i] = strlen(opt->stop.items[i]);
    m->defaults.sampling.n_stop = opt->stop.n;
    m->defaults.sampling.stop = opt->stop.items;
    m->defaults.sampling.stop_len = len;
    return DI_OK;
}

/* The format of the command line: at most one of --json-schema, --regex and --ebnf. */
static di_status set_format(di_cli_model *m, const di_options *opt, di_error *err) {
    const struct {
        const char *flag, *value;
        di_constraint_kind kind;
        bool is_file;
    } formats[] = {
        {"--json-schema", opt->json_schema, DI_CONSTRAINT_JSON, true},
        {"--regex", opt->regex, DI_CONSTRAINT_REGEX, false},
        {"--ebnf", opt->ebnf, DI_CONSTRAINT_EBNF, true},
    };
    const char *first = NULL;
    for (size_t i = 0; i < DI_COUNT(formats); i++) {
        if (!formats[i].value)
            continue;
        if (first)
            return di_fail(err, DI_ERR_ARG, "%s and %s: expected one of them", first, formats[i].flag);
        first = formats[i].flag;
        m->defaults.format = formats[i].kind;
        if (formats[i].is_file) {
            di_status st = di_file_read(formats[i].value, FORMAT_BYTES_MAX, &m->format, err);
            if (st == DI_ERR_NOT_FOUND) /* of the model's files that is another fault */
                err->code = st = DI_ERR_ARG;
            if (st)
                return di_error_context(err, st, "%s", formats[i].flag);
            m->defaults.format_text = (di_chat_text){m->format.data, m->format.len};
        } else {
            m->defaults.format_text = (di_chat_text){formats[i].value, strlen(formats[i].value)};
        }
    }
    di_json *schema = NULL;
    if (m->defaults.format != DI_CONSTRAINT_JSON)
        return DI_OK;
    di_status st = di_json_parse(&schema, m->format.data, m->format.len, err);
    di_json_free(schema);
    if (st == DI_ERR_FORMAT)
        err->code = st = DI_ERR_ARG;
    return di_error_context(err, st, "--json-schema '%s'", opt->json_schema);
}

/* ---- loading ------------------------------------------------------------------------------------------------------
 */

typedef struct progress {
    int64_t start_ns, shown_ns;
    bool is_shown;
} progress;

/* A bar on standard error. The first 0.2 s show nothing: a model that loads at once needs no bar. */
static void show_progress(void *user, uint64_t done, uint64_t total) {
    enum { WIDTH = 40 };
    progress *p = user;
    int64_t now_ns = di_clock_ns();
    if (now_ns - p->start_ns < 200000000 || now_ns - p->shown_ns < 50000000 || total == 0)
        return;
    p->shown_ns = now_ns;
    p->is_shown = true;
    int n = (int)(WIDTH * ((double)done / (double)total));
    static const char full[] = "========================================",
                      none[] = "                                        ";
    fprintf(stderr, "\rloading weights [%.*s%.*s] %3d %% of %.1f GiB", n, full, WIDTH - n, none,
            (int)(100 * ((double)done / (double)total)), (double)total / 0x1p30);
    fflush(stderr);
}

static di_status open_model(di_cli_model *m, const di_options *opt, const di_trace *trace, di_error *err) {
    di_load_options load;
    di_status st = di_cli_load_options(&load, opt, err);
    if (st)
        return st;
    load.trace = trace;
    progress p = {.start_ns = di_clock_ns()};
    if (isatty(STDERR_FILENO)) {
        load.progress = show_progress;
        load.user = &p;
    }
    st = di_load_open(&m->loaded, &load, err);
    if (p.is_shown) {
        fputs("\r\033[K", stderr);
        fflush(stderr);
    }
    return st;
}

di_status di_cli_trace_open(di_trace **out, const di_options *opt, di_error *err) {
    *out = NULL;
    return opt->trace ? di_trace_open(out, opt->trace, err) : DI_OK;
}

void di_cli_trace_close(di_trace *trace) {
    di_error err = {0};
    if (di_trace_close(trace, &err))
        di_error_log("%s", err.message);
}

di_status di_cli_model_open(di_cli_model *m, const di_options *opt, di_error *err) {
    *m = (di_cli_model){0};
    di_trace *trace;
    di_status st = di_cli_trace_open(&trace, opt, err);
    if (st)
        return st;
    st = di_cli_model_open_traced(m, opt, trace, err);
    if (st) {
        di_cli_trace_close(trace);
    } else {
        m->trace = trace;
    }
    return st;
}

di_status di_cli_model_open_traced(di_cli_model *m, const di_options *opt, const di_trace *trace, di_error *err) {
    *m = (di_cli_model){.start_ns = di_clock_ns()};
    di_status st = di_cli_request_options(&m->defaults, opt, err);
    if (!st)
        st = set_stops(m, opt, err);
    if (!st)
        st = set_format(m, opt, err);
    if (!st)
        st = open_model(m, opt, trace, err);
    if (!st)
        st = di_load_core(&m->loaded, &m->engine, err);
    if (!st)
        st = di_constrainer_init(&m->constrainer, &m->loaded,
                                 &(di_constrain_options){.n_threads = (int)opt->grammar_threads,
                                                         .cache_bytes = (size_t)opt->grammar_cache,
                                                         .timeout_ns = (int64_t)((double)opt->grammar_timeout * 1e9)},
                                 err);
    if (st) {
        di_cli_model_close(m);
        return st;
    }
    if (m->loaded.tok) {
        m->has_vocab = di_chat_vocab_init(&m->vocab, m->loaded.tok, &m->vocab_error) == DI_OK;
    } else {
        di_fail(&m->vocab_error, DI_ERR_REQUEST, "the model has no tokenizer: only prompts of token ids can be run");
    }
    return DI_OK;
}

void di_cli_model_close(di_cli_model *m) {
    di_core_destroy(m->engine);
    m->engine = NULL;
    di_constrainer_deinit(&m->constrainer);
    di_load_close(&m->loaded);
    di_cli_trace_close(m->trace);
    m->trace = NULL;
    free((void *)m->defaults.sampling.stop_len);
    m->defaults.sampling.stop_len = NULL;
    m->defaults.sampling.n_stop = 0;
    di_strbuf_deinit(&m->format);
}

/* ---- requests -----------------------------------------------------------------------------------------------------
 */

/* Hands a request over, with the grammar that its output follows; NULL: none. */
static di_status submit(di_cli_model *m, const di_request *request, di_grammar *grammar, di_core_callback callback,
                        void *user, uint64_t *id, di_error *err) {
    di_ids ids = {0};
    di_grammar_source source;
    const di_grammar_vocab *vocab = NULL;
    bool is_chat = request->input == DI_INPUT_CHAT;
    di_status st = di_line_check(request, err);
    if (!st && request->input != DI_INPUT_IDS && !(m->loaded.tok && (m->has_vocab || !is_chat)))
        st = di_fail(err, DI_ERR_REQUEST, "%s", m->vocab_error.message);
    if (!st)
        st = di_request_encode(request, m->loaded.tok, &m->vocab, NULL, &ids, err);
    if (!st && grammar)
        st = di_constrainer_vocab(&m->constrainer, &vocab, err);
    if (!st) {
        di_submission submission = {
            .ids = ids.data,
            .n_ids = ids.len,
            .sampling = request->sampling,
            .parse = is_chat ? &request->parse : NULL,
            .constraint = grammar ? di_grammar_source_init(&source, grammar, vocab) : NULL,
            .n = (int32_t)request->n,
            .forced_first = request->forced,
            .n_forced_first = request->n_forced,
            .priority = request->priority,
            .caller = request->caller.data,
            .caller_len = request->caller.len,
            .cache_salt = request->cache_salt.data,
            .cache_salt_len = request->cache_salt.len,
            .callback = callback,
            .user = user,
        };
        submission.sampling.max_tokens =
            di_request_max_tokens(request, (int64_t)ids.len, m->loaded.plan.engine.context_max);
        st = di_core_submit(m->engine, &submission, id, err);
    }
    di_ids_deinit(&ids);
    return st;
}

di_status di_cli_submit(di_cli_model *m, const di_request *request, di_core_callback callback, void *user, uint64_t *id,
                        di_error *err) {
    di_grammar *grammar;
    di_status st = di_constrainer_compile(&m->constrainer, request, &grammar, err);
    if (!st)
        st = submit(m, request, grammar, callback, user, id, err);
    di_grammar_release(grammar);
    return st;
}

di_status di_cli_submit_job(di_cli_model *m, const di_request *request, di_grammar_job *job, di_core_callback callback,
                            void *user, uint64_t *id, di_error *err) {
    di_grammar *grammar = NULL;
    di_status st = job ? di_constrain_context(request, di_grammar_job_take(job, &grammar, err), err) : DI_OK;
    if (!st)
        st = submit(m, request, grammar, callback, user, id, err);
    di_grammar_release(grammar);
    return st;
}

/* ---- statistics ---------------------------------------------------------------------------------------------------
 */

static double seconds(int64_t ns) {
    return (double)ns * 1e-9;
}

static double rate(int64_t n, int64_t ns) {
    return ns > 0 ? (double)n / seconds(ns) : 0;
}

void di_cli_print_request_stats(const di_generation *gen) {
    int64_t decode_ns = gen->last_ns - gen->first_ns;
    fprintf(stderr, "prompt: %lld tokens, %lld of them cached, first token after %.3f s (%.0f tokens/s)\n",
            (long long)gen->n_prompt, (long long)gen->n_cached,
            gen->first_ns ? seconds(gen->first_ns - gen->submit_ns) : 0.0,
            gen->first_ns ? rate(gen->n_prompt, gen->first_ns - gen->start_ns) : 0.0);
    fprintf(stderr, "answer: %lld tokens in %.3f s (%.1f tokens/s), finish reason %s", (long long)gen->n_tokens,
            seconds(decode_ns), gen->n_tokens > 1 ? rate(gen->n_tokens - 1, decode_ns) : 0.0,
            di_finish_name(gen->finish));
    if (gen->has_seed)
        fprintf(stderr, ", seed %llu", (unsigned long long)gen->seed);
    fputc('\n', stderr);
}

void di_cli_print_stats(const di_cli_model *m) {
    di_core_stats s;
    di_core_stats_get(m->engine, &s);
    struct rusage usage = {0};
    getrusage(RUSAGE_SELF, &usage);
    int64_t total_ns = di_clock_ns() - m->start_ns;
    fprintf(stderr, "requests: %lld in %.3f s, model loaded in %.3f s\n", (long long)s.n_finished, seconds(total_ns),
            seconds(m->loaded.load_ns));
    fprintf(stderr, "tokens: %lld of prompts, %lld of answers, in %lld steps; forward %.3f s, sampling %.3f s\n",
            (long long)s.prompt_tokens, (long long)s.output_tokens, (long long)s.n_steps, seconds(s.forward_ns),
            seconds(s.sample_ns));
    di_cli_print_draft_stats(&s);
    fprintf(stderr, "prefix cache: %lld tokens of prompts from %lld hits of %lld, %d blocks and %d snapshots kept\n",
            (long long)s.cached_tokens, (long long)s.cache_hits, (long long)s.cache_queries, s.blocks_cached,
            s.snapshots);
    fprintf(stderr,
            "scheduling: waited %.3f s on average before the first step and %.3f s at most for the first token; %lld "
            "preempted, %lld tokens run again, compute idle for %.3f s between steps\n",
            s.n_ttft ? seconds(s.queue_sum_ns) / (double)s.n_ttft : 0.0, seconds(s.ttft_max_ns),
            (long long)s.n_preempted, (long long)s.recomputed_tokens, seconds(s.wait_ns));
    if (s.device_busy_ns > 0)
        fprintf(stderr, "device: %.3f s at work, %.3f s idle between steps\n", seconds(s.device_busy_ns),
                seconds(s.device_idle_ns));
    if (s.n_error || s.n_abort || s.n_refused_busy || s.n_refused_invalid || s.n_expired)
        fprintf(stderr,
                "not completed: %lld failed (%lld too late), %lld aborted, %lld refused as busy, %lld as invalid\n",
                (long long)s.n_error, (long long)s.n_expired, (long long)s.n_abort, (long long)s.n_refused_busy,
                (long long)s.n_refused_invalid);
    if (m->loaded.plan.engine.ttft_goal_ns > 0 || m->loaded.plan.engine.tpot_goal_ns > 0)
        fprintf(stderr,
                "goals: missed by %lld first tokens and %lld answers; the first token gave way in %lld steps, the time "
                "per token in %lld\n",
                (long long)s.ttft_goal_missed, (long long)s.tpot_goal_missed, (long long)s.ttft_gave_way,
                (long long)s.tpot_gave_way);
    fprintf(stderr, "memory: %.1f MiB resident at most, %.1f MiB planned; %d of %d KV blocks used at most\n",
            (double)usage.ru_maxrss / 1024.0, (double)m->loaded.plan.total_bytes / 0x1p20, s.blocks_used_max, s.blocks);
    if (s.replay_keep > 0) {
        fprintf(stderr, "replay: the last %lld tokens of a prompt, %s\n", (long long)s.replay_keep,
                s.is_replay_exact ? "exact" : "approximate");
    }
}
