/* API keys: who may ask, how much at once and how often.
 *
 *   # comment
 *   KEY [name=TEXT] [requests=N] [rate=N]
 *
 * A secret is compared with every key there is, each over its whole length, so that the time of an answer tells neither
 * how much of a guess was right nor which key came near. Limits of a key are its own: one that is used up costs the
 * others nothing. */
#include "server_internal.h"

void di_keys_init(di_keys *keys, int64_t requests_max, int64_t rate_max) {
    *keys = (di_keys){.requests_max = requests_max, .rate_max = rate_max};
    pthread_mutex_init(&keys->mutex, NULL);
}

void di_key_release(di_key *key) {
    if (!key || atomic_fetch_sub(&key->n_refs, 1) > 1)
        return;
    if (key->secret)
        explicit_bzero(key->secret, strlen(key->secret));
    free(key->secret);
    free(key->name);
    pthread_mutex_destroy(&key->mutex);
    free(key);
}

static void free_list(di_key **items, size_t n) {
    for (size_t i = 0; i < n; i++)
        di_key_release(items[i]);
    free(items);
}

void di_keys_deinit(di_keys *keys) {
    free_list(keys->items, keys->n);
    pthread_mutex_destroy(&keys->mutex);
    *keys = (di_keys){0};
}

/* ---- reading ------------------------------------------------------------------------------------------------------
 */

typedef struct key_list {
    di_key **items;
    size_t n, cap;
} key_list;

/* A new key at the list's end; NULL: err says why not. */
static di_key *add_key(key_list *list, const di_keys *keys, const char *secret, di_error *err) {
    for (size_t i = 0; i < list->n; i++) {
        if (strcmp(list->items[i]->secret, secret) == 0) {
            di_fail(err, DI_ERR_FORMAT, "the same key twice");
            return NULL;
        }
    }
    if (list->n == list->cap) {
        size_t cap = list->cap ? 2 * list->cap : 16;
        di_key **items = realloc(list->items, cap * sizeof *items);
        if (!items) {
            di_fail(err, DI_ERR_MEMORY, "keys");
            return NULL;
        }
        list->items = items;
        list->cap = cap;
    }
    char name[32];
    snprintf(name, sizeof name, "key %zu", list->n + 1);
    di_key *key = calloc(1, sizeof *key);
    char *own_secret = strdup(secret), *own_name = strdup(name);
    if (!key || !own_secret || !own_name) {
        free(key);
        free(own_secret);
        free(own_name);
        di_fail(err, DI_ERR_MEMORY, "keys");
        return NULL;
    }
    atomic_store(&key->n_refs, 1);
    pthread_mutex_init(&key->mutex, NULL);
    key->requests_max = keys->requests_max;
    key->rate_max = keys->rate_max;
    key->secret = own_secret;
    key->name = own_name;
    list->items[list->n++] = key;
    return key;
}

static di_status read_word(di_key *key, const char *word, di_error *err) {
    int64_t n;
    if (strncmp(word, "name=", 5) == 0 && word[5]) {
        char *name = strdup(word + 5);
        if (!name)
            return di_fail(err, DI_ERR_MEMORY, "keys");
        free(key->name);
        key->name = name;
        return DI_OK;
    }
    if (strncmp(word, "requests=", 9) == 0 && di_parse_i64(word + 9, &n) && n >= 0) {
        key->requests_max = n;
        return DI_OK;
    }
    if (strncmp(word, "rate=", 5) == 0 && di_parse_i64(word + 5, &n) && n >= 0) {
        key->rate_max = n;
        return DI_OK;
    }
    return di_fail(err, DI_ERR_FORMAT, "'%.60s', expected name=TEXT, requests=N or rate=N", word);
}

static di_status read_line(key_list *list, const di_keys *keys, char *line, di_error *err) {
    char *rest, *word = strtok_r(line, " \t\r", &rest);
    if (!word || *word == '#')
        return DI_OK;
    di_key *key = add_key(list, keys, word, err);
    di_status st = key ? DI_OK : err->code;
    while (key && !st && (word = strtok_r(NULL, " \t\r", &rest)) && *word != '#')
        st = read_word(key, word, err);
    return st;
}

static di_status read_file(key_list *list, const di_keys *keys, const char *path, di_error *err) {
    di_strbuf text = {0};
    di_status st = di_file_read(path, 1 << 20, &text, err);
    if (!st && memchr(di_strbuf_str(&text), '\0', text.len))
        st = di_fail(err, DI_ERR_FORMAT, "'%s': a NUL byte, expected text", path);
    char *rest, *line = st || !text.data ? NULL : text.data;
    for (int number = 1; !st && line; number++) {
        rest = strchr(line, '\n');
        if (rest)
            *rest++ = '\0';
        st = read_line(list, keys, line, err);
        if (st) {
            char where[64];
            snprintf(where, sizeof where, "line %d", number);
            st = di_error_context(err, st, "'%s', %s", path, where);
        }
        line = rest;
    }
    if (text.data)
        explicit_bzero(text.data, text.len);
    di_strbuf_deinit(&text);
    return st;
}

/* A key that was there before goes on with its counts, under its new limits. */
static void take_over(di_keys *keys, key_list *list) {
    for (size_t i = 0; i < list->n; i++) {
        for (size_t k = 0; k < keys->n; k++) {
            di_key *old = keys->items[k], *new = list->items[i];
            if (strcmp(old->secret, new->secret) != 0)
                continue;
            pthread_mutex_lock(&old->mutex);
            old->requests_max = new->requests_max;
            old->rate_max = new->rate_max;
            pthread_mutex_unlock(&old->mutex);
            if (strcmp(old->name, new->name) != 0)
                continue; /* its name may be in use: the new one starts afresh */
            atomic_fetch_add(&old->n_refs, 1);
            di_key_release(new);
            list->items[i] = old;
            break;
        }
    }
}

di_status di_keys_load(di_keys *keys, const char *const *given, size_t n_given, const char *file, di_error *err) {
    di_error local;
    err = err ? err : &local;
    key_list list = {0};
    di_status st = DI_OK;
    for (size_t i = 0; !st && i < n_given; i++) {
        if (!*given[i])
            di_fail(err, DI_ERR_ARG, "api-key: an empty key");
        st = *given[i] && add_key(&list, keys, given[i], err) ? DI_OK : err->code;
    }
    if (!st && file)
        st = read_file(&list, keys, file, err);
    if (!st && file && list.n == 0)
        st = di_fail(err, DI_ERR_FORMAT, "'%s': no keys, so that nobody could ask", file);
    if (st) {
        free_list(list.items, list.n);
        return st;
    }
    pthread_mutex_lock(&keys->mutex);
    take_over(keys, &list);
    di_key **old = keys->items;
    size_t n_old = keys->n;
    keys->items = list.items;
    keys->n = list.n;
    pthread_mutex_unlock(&keys->mutex);
    free_list(old, n_old);
    return DI_OK;
}

/* ---- asking -------------------------------------------------------------------------------------------------------
 */

bool di_keys_are_needed(di_keys *keys) {
    pthread_mutex_lock(&keys->mutex);
    bool is_needed = keys->n > 0;
    pthread_mutex_unlock(&keys->mutex);
    return is_needed;
}

/* Takes the same time for every guess of one length. */
static bool is_same(const char *secret, const char *guess, size_t n_guess) {
    size_t n = strlen(secret);
    unsigned char difference = n != n_guess;
    for (size_t i = 0; i < n; i++)
        difference |= (unsigned char)(secret[i] ^ (n_guess ? guess[i % n_guess] : 0));
    return difference == 0;
}

di_key *di_keys_find(di_keys *keys, const char *secret, size_t len) {
    di_key *found = NULL;
    pthread_mutex_lock(&keys->mutex);
    for (size_t i = 0; i < keys->n; i++)
        found = is_same(keys->items[i]->secret, secret, len) ? keys->items[i] : found;
    if (found)
        atomic_fetch_add(&found->n_refs, 1);
    pthread_mutex_unlock(&keys->mutex);
    return found;
}

bool di_key_enter(di_key *key, int64_t now_ns, const char **why, int64_t *retry_s) {
    bool is_good = true;
    pthread_mutex_lock(&key->mutex);
    if (key->requests_max > 0 && atomic_load(&key->n_running) >= key->requests_max) {
        *why = "this key has as many requests at once as it may have";
        *retry_s = 1;
        is_good = false;
    } else if (key->rate_max > 0) {
        double per_ns = (double)key->rate_max / 60e9;
        key->tokens += key->filled_ns ? (double)(now_ns - key->filled_ns) * per_ns : (double)key->rate_max;
        key->tokens = DI_MIN(key->tokens, (double)key->rate_max);
        key->filled_ns = now_ns;
        is_good = key->tokens >= 1;
        if (is_good) {
            key->tokens -= 1;
        } else {
            *why = "this key has made as many requests in a minute as it may";
            *retry_s = (int64_t)((1 - key->tokens) / per_ns / 1e9) + 1;
        }
    }
    if (is_good)
        atomic_fetch_add(&key->n_running, 1);
    pthread_mutex_unlock(&key->mutex);
    return is_good;
}

bool di_key_add(di_key *key, int64_t n, int64_t share, const char **why, int64_t *retry_s) {
    bool is_good = true;
    pthread_mutex_lock(&key->mutex);
    int64_t running = atomic_load(&key->n_running) + n;
    if (key->requests_max > 0 && running > key->requests_max && n > 0) {
        *why = "this key has as many samples at once as it may have";
        is_good = false;
    } else if (share > 0 && running > share) {
        *why = "this key has its share of the queue: the rest is for others";
        is_good = false;
    }
    *retry_s = is_good ? *retry_s : 1;
    if (is_good)
        atomic_fetch_add(&key->n_running, n);
    pthread_mutex_unlock(&key->mutex);
    return is_good;
}

void di_key_leave(di_key *key, int64_t n) {
    atomic_fetch_sub(&key->n_running, n);
}
