/* Reading vector files, and the small codecs that they need. SHA-256 is FIPS 180-4's, written out. */
#include "vectors.h"

#include "harness.h"

int vectors_each(const char *name, void (*fn)(const di_json *row, void *ctx), void *ctx) {
    char path[256];
    snprintf(path, sizeof path, "vectors/%s", name);
    FILE *file = fopen(di_test_data(path), "r");
    if (!file) {
        fail_msg("%s can't be opened", di_test_data(path));
    }
    char *line = NULL;
    size_t cap = 0;
    int n_rows = 0;
    for (ssize_t n; (n = getline(&line, &cap, file)) > 0;) {
        di_json *row = NULL;
        di_error err;
        di_test_ok(di_json_parse(&row, line, (size_t)n, &err), &err);
        if (di_json_get(row, "id")) { /* the first lines describe the file */
            fn(row, ctx);
            n_rows++;
        }
        di_json_free(row);
    }
    free(line);
    fclose(file);
    return n_rows;
}

static di_tokenizer *official, *tiny;

__attribute__((destructor)) static void close_tokenizers(void) {
    di_tokenizer_close(official);
    di_tokenizer_close(tiny);
}

const di_tokenizer *vectors_official_tokenizer(void) {
    const char *path = di_test_source("build/cache/tokenizer.json");
    if (!official && di_path_exists(path)) {
        di_error err;
        di_test_ok(di_tokenizer_open(&official, path, &err), &err);
    }
    return official;
}

const di_tokenizer *vectors_tiny_tokenizer(void) {
    if (!tiny) {
        di_error err;
        di_test_ok(di_tokenizer_open(&tiny, di_test_source("models/tiny/tokenizer.json"), &err), &err);
    }
    return tiny;
}

static uint32_t rotate(uint32_t x, int n) {
    return x >> n | x << (32 - n);
}

static void sha256_block(uint32_t h[8], const uint8_t *p) {
    static const uint32_t k[64] = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
        0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
        0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
        0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
        0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
        0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
    uint32_t w[64], v[8];
    for (int i = 0; i < 16; i++) {
        w[i] = (uint32_t)p[4 * i] << 24 | (uint32_t)p[4 * i + 1] << 16 | (uint32_t)p[4 * i + 2] << 8 | p[4 * i + 3];
    }
    for (int i = 16; i < 64; i++) {
        uint32_t s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3;
        uint32_t s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10;
        w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    memcpy(v, h, sizeof v);
    for (int i = 0; i < 64; i++) {
        uint32_t s1 = rotate(v[4], 6) ^ rotate(v[4], 11) ^ rotate(v[4], 25);
        uint32_t t1 = v[7] + s1 + ((v[4] & v[5]) ^ (~v[4] & v[6])) + k[i] + w[i];
        uint32_t s0 = rotate(v[0], 2) ^ rotate(v[0], 13) ^ rotate(v[0], 22);
        uint32_t t2 = s0 + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
        memmove(v + 1, v, 7 * sizeof v[0]);
        v[4] += t1;
        v[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++) {
        h[i] += v[i];
    }
}

void vectors_sha256(const void *data, size_t n, char out[65]) {
    uint32_t h[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    const uint8_t *p = data;
    uint8_t tail[128] = {0};
    size_t left = n;
    for (; left >= 64; left -= 64, p += 64) {
        sha256_block(h, p);
    }
    memcpy(tail, p, left);
    tail[left] = 0x80;
    size_t n_tail = left < 56 ? 64 : 128;
    for (int i = 0; i < 8; i++) {
        tail[n_tail - 1 - (size_t)i] = (uint8_t)((uint64_t)n * 8 >> 8 * i);
    }
    for (size_t at = 0; at < n_tail; at += 64) {
        sha256_block(h, tail + at);
    }
    for (int i = 0; i < 8; i++) {
        snprintf(out + 8 * i, 9, "%08x", (unsigned)h[i]);
    }
}

void vectors_base64(di_strbuf *out, const char *s) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    uint32_t bits = 0;
    int n_bits = 0;
    for (; *s && *s != '='; s++) {
        const char *digit = strchr(digits, *s);
        assert_non_null(digit);
        bits = bits << 6 | (uint32_t)(digit - digits);
        n_bits += 6;
        if (n_bits >= 8) {
            n_bits -= 8;
            di_strbuf_putc(out, (char)(bits >> n_bits & 0xFF));
        }
    }
}
