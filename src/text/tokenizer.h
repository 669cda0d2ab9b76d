/* Tokenizer: byte-level BPE by tokenizer.json (tokenizer.md), and the incremental decoder. */
#ifndef DI_TOKENIZER_H
#define DI_TOKENIZER_H

#include "base/base.h"

typedef struct di_tokenizer di_tokenizer; /* read-only after open; any thread may encode and decode */

/* Growing list of token ids; zeroed storage is empty. */
typedef struct di_ids {
    int32_t *data; /* owned */
    size_t len, cap;
} di_ids;
void di_ids_deinit(di_ids *ids);
di_status di_ids_append(di_ids *ids, const int32_t *v, size_t n, di_error *err);

/* Reads tokenizer.json; DI_ERR_FORMAT names what is missing, DI_ERR_UNSUPPORTED a pipeline other than tokenizer.md 2.
 */
di_status di_tokenizer_open(di_tokenizer **out, const char *path, di_error *err);
di_status di_tokenizer_parse(di_tokenizer **out, const char *text, size_t len, di_error *err);
void di_tokenizer_close(di_tokenizer *tok);
int32_t di_tokenizer_size(const di_tokenizer *tok); /* ids are 0 .. size-1, added tokens included */
/* Id of an entry by its exact spelling (added tokens first), -1 when there is none. */
int32_t di_tokenizer_find(const di_tokenizer *tok, const char *spelling);
bool di_tokenizer_is_special(const di_tokenizer *tok, int32_t id); /* the added token's special flag */
bool di_tokenizer_is_added(const di_tokenizer *tok, int32_t id);   /* with that flag or not */

/* Appends the ids of text (repaired to valid UTF-8 first; at most 512 MiB, else DI_ERR_RANGE). plain: added tokens are
 * not recognised. */
di_status di_tokenizer_encode(const di_tokenizer *tok, const char *text, size_t len, bool plain, di_ids *out,
                              di_error *err);
/* Bytes that an id stands for, "" for an unknown id; a view into the tokenizer. */
const char *di_tokenizer_bytes(const di_tokenizer *tok, int32_t id, size_t *len);
/* Appends the text of ids, ill-formed bytes as U+FFFD. */
di_status di_tokenizer_decode(const di_tokenizer *tok, const int32_t *ids, size_t n, bool skip_special, di_strbuf *out,
                              di_error *err);

/* Streaming decode: appends what id releases (may be nothing); at most three bytes wait. */
typedef struct di_detokenizer {
    const di_tokenizer *tok; /* borrowed */
    char pending[4];
    int n_pending;
} di_detokenizer;
void di_detokenizer_init(di_detokenizer *d, const di_tokenizer *tok);
void di_detokenizer_push(di_detokenizer *d, int32_t id, di_strbuf *out);
void di_detokenizer_flush(di_detokenizer *d, di_strbuf *out); /* end of stream */

/* The Engram class map (tokenizer.md 8): class of every id, map [size]; returns the number of classes in *n_classes. On
 * failure map may be partly written. */
di_status di_tokenizer_engram_map(const di_tokenizer *tok, int32_t *map, int32_t *n_classes, di_error *err);

#endif
