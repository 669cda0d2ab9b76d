/* Streams the answer to one question with the C API: load a model, submit a conversation, print what comes.
 *
 *     stream MODEL_DIR "QUESTION" */
#include "deepinfer/deepinfer.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What the main thread waits for; written by the engine's thread. */
typedef struct answer {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    bool is_done; /* lock: mutex */
    bool has_failed;
} answer;

static int on_event(void *user, const di_engine_event *event) {
    answer *a = user;
    if (event->kind == DI_ENGINE_OUTPUT && event->output == DI_ENGINE_CONTENT) {
        fwrite(event->text, 1, event->text_len, stdout);
        fflush(stdout);
    } else if (event->kind == DI_ENGINE_DONE) {
        const di_engine_result *r = event->result;
        printf("\n");
        fprintf(stderr, "%lld + %lld tokens, finish reason %s\n", (long long)r->n_prompt, (long long)r->n_tokens,
                r->finish_reason);
        if (r->error.code)
            fprintf(stderr, "stream: %s\n", r->error.message);
        pthread_mutex_lock(&a->mutex);
        a->is_done = true;
        a->has_failed = r->error.code != DI_OK;
        pthread_cond_signal(&a->changed);
        pthread_mutex_unlock(&a->mutex);
    }
    return 0; /* anything else would end the answer here */
}

/* The question as the body of a request. */
static char *make_body(const char *question) {
    char *body = NULL;
    size_t size;
    FILE *out = open_memstream(&body, &size);
    if (!out)
        return NULL;
    fprintf(out, "{\"messages\":[{\"role\":\"user\",\"content\":\"");
    for (const char *p = question; *p; p++) {
        if (*p == '"' || *p == '\\' || (unsigned char)*p < 0x20)
            fprintf(out, "\\u%04x", (unsigned char)*p);
        else
            fputc(*p, out);
    }
    fprintf(out, "\"}],\"temperature\":0}");
    return fclose(out) ? NULL : body;
}

static di_status ask(di_engine *engine, const char *question, answer *a, di_error *err) {
    char *body = make_body(question);
    if (!body) {
        snprintf(err->message, sizeof err->message, "out of memory");
        return DI_ERR_MEMORY;
    }
    di_engine_request request;
    di_engine_request_init(&request, sizeof request);
    request.json = body;
    request.json_len = strlen(body);
    request.events = DI_ENGINE_WANTS_TEXT;
    di_status status = di_engine_submit(engine, &request, on_event, a, NULL, err);
    free(body); /* everything was copied */
    if (status)
        return status;
    pthread_mutex_lock(&a->mutex);
    while (!a->is_done)
        pthread_cond_wait(&a->changed, &a->mutex);
    pthread_mutex_unlock(&a->mutex);
    return DI_OK;
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: stream MODEL_DIR QUESTION\n");
        return 2;
    }
    di_error err;
    di_engine *engine = NULL;
    di_engine_config config;
    answer a = {.mutex = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    di_engine_config_init(&config, sizeof config);
    config.model = argv[1];
    di_status status = di_engine_create(&config, &engine, &err);
    if (!status)
        status = ask(engine, argv[2], &a, &err);
    if (status)
        fprintf(stderr, "stream: %s\n", err.message);
    di_engine_destroy(engine);
    return status ? di_status_exit(status) : a.has_failed;
}
