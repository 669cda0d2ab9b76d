/* BPE against the definition, written as plainly as it reads: both paths of bpe.c (scan and heap) give what repeated
 * merging of the lowest rank, leftmost first, gives. Vocabularies and pieces are random, over few letters, so that most
 * pairs have a rank and merges reach far. */
#include "harness.h"
#include "text/tokenizer_internal.h"

enum { LETTERS = 3, MERGES_MAX = 60, PIECE_MAX = 400 };

typedef struct vocabulary {
    int32_t left[MERGES_MAX], right[MERGES_MAX], result[MERGES_MAX]; /* by rank */
    int n_merges;
    di_merges table;
    int32_t byte_ids[256];
} vocabulary;

static void make_vocabulary(vocabulary *v, uint64_t *rng) {
    int32_t n_ids = LETTERS;
    di_error err;
    *v = (vocabulary){0};
    for (int b = 0; b < 256; b++) {
        v->byte_ids[b] = b % LETTERS;
    }
    di_test_ok(di_merges_reserve(&v->table, MERGES_MAX, &err), &err);
    int n = (int)di_test_random_range(rng, 0, MERGES_MAX);
    for (int i = 0; i < n; i++) {
        int32_t left = (int32_t)di_test_random_range(rng, 0, n_ids - 1);
        int32_t right = (int32_t)di_test_random_range(rng, 0, n_ids - 1);
        bool is_known = false;
        for (int k = 0; k < v->n_merges; k++) {
            is_known = is_known || (v->left[k] == left && v->right[k] == right);
        }
        if (!is_known) {
            int k = v->n_merges++;
            v->left[k] = left;
            v->right[k] = right;
            v->result[k] = n_ids++;
        }
    }
    /* Ranks need not follow the order in which entries were made. */
    for (int i = v->n_merges - 1; i > 0; i--) {
        int k = (int)di_test_random_range(rng, 0, i);
        int32_t l = v->left[i], r = v->right[i], e = v->result[i];
        v->left[i] = v->left[k], v->right[i] = v->right[k], v->result[i] = v->result[k];
        v->left[k] = l, v->right[k] = r, v->result[k] = e;
    }
    for (int i = 0; i < v->n_merges; i++) {
        di_merges_add(&v->table, v->left[i], v->right[i], (uint32_t)i, v->result[i]);
    }
}

static size_t merge_plainly(const vocabulary *v, int32_t *ids, size_t n) {
    for (int rank = 0; rank < v->n_merges;) {
        size_t at = 0;
        while (at + 1 < n && !(ids[at] == v->left[rank] && ids[at + 1] == v->right[rank])) {
            at++;
        }
        if (at + 1 >= n) {
            rank++;
            continue;
        }
        ids[at] = v->result[rank];
        memmove(&ids[at + 1], &ids[at + 2], (n - at - 2) * sizeof *ids);
        n--;
        rank = 0; /* the new entry may have a lower rank with its neighbours */
    }
    return n;
}

DI_PROPERTY(gives_what_the_definition_gives, 400) {
    uint64_t rng = seed;
    vocabulary v;
    di_bpe_scratch scratch = {0};
    di_ids got = {0};
    di_error err;
    make_vocabulary(&v, &rng);
    for (int round = 0; round < 6; round++) {
        char piece[PIECE_MAX];
        int32_t want[PIECE_MAX];
        size_t n = (size_t)di_test_random_range(&rng, 1, round % 2 ? PIECE_MAX : 60);
        int letters = (int)di_test_random_range(&rng, 1, LETTERS);
        for (size_t i = 0; i < n; i++) {
            piece[i] = (char)(di_test_random(&rng) % (uint64_t)letters);
            want[i] = v.byte_ids[(unsigned char)piece[i]];
        }
        size_t n_want = merge_plainly(&v, want, n);
        got.len = 0;
        di_test_ok(di_bpe_encode(&v.table, v.byte_ids, &scratch, piece, n, &got, &err), &err);
        assert_int_equal(got.len, n_want);
        assert_memory_equal(got.data, want, n_want * sizeof *want);
    }
    di_ids_deinit(&got);
    di_bpe_scratch_deinit(&scratch);
    di_merges_deinit(&v.table);
}

DI_TEST_GROUP(bpe, cmocka_unit_test(gives_what_the_definition_gives));
