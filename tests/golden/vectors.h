/* Vector files (JSON lines) and the tokenizer that most of them were made with.
 *
 * The released tokenizer.json is not part of the repository: tests/official_tokenizer.sh makes it. Tests that need it
 * ask for it here and are skipped by name where it is absent. Faults end the test. */
#ifndef DI_TEST_VECTORS_H
#define DI_TEST_VECTORS_H

#include "base/base.h"
#include "text/tokenizer.h"

/* Calls fn with every row of tests/data/vectors/<name> that has an `id`; returns how many there were. */
int vectors_each(const char *name, void (*fn)(const di_json *row, void *ctx), void *ctx);

/* The released tokenizer, opened once for the whole program; NULL where the file is absent. */
const di_tokenizer *vectors_official_tokenizer(void);
#define VECTORS_NO_OFFICIAL "the released tokenizer.json is absent: run tests/official_tokenizer.sh"
/* The tokenizer of the tiny model, opened once. */
const di_tokenizer *vectors_tiny_tokenizer(void);

/* SHA-256 as 64 hexadecimal digits. */
void vectors_sha256(const void *data, size_t n, char out[65]);
/* Decodes base64 (with padding). */
void vectors_base64(di_strbuf *out, const char *s);

#endif
