/* The mxfp4 product of llama.cpp's ggml for bench/peers.py: matrices as `deepinfer bench kernels` has them, timed on
 * request, so that the two programs can take turns.
 *
 *   ggml_mul_mat THREADS N_OUT N_IN BYTES       then a number of rows a line on standard input; for each, one pass
 *
 * A pass multiplies the rows with every matrix of BYTES of weights, or with the first 8 where there are 64 rows or
 * more; its time in seconds is the answer. The first line of output names the buffer that holds the weights: ggml's
 * repacked form where it has one for this machine, which is what llama.cpp would use. Built by bench/peers.sh. */
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

enum { FEW_MATS = 8, MANY_ROWS = 64 };

typedef struct peer {
    ggml_backend_t backend;
    struct ggml_context *ctx;    /* of the weights */
    ggml_backend_buffer_t store; /* theirs */
    int64_t n_out, n_in, n_mats;
    struct ggml_tensor **mats;
} peer;

static void fail(const char *what) {
    fprintf(stderr, "ggml_mul_mat: %s\n", what);
    exit(1);
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The buffer type of ggml's repacked weights, or NULL. */
static ggml_backend_buffer_type_t repacked_type(ggml_backend_dev_t dev) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(dev);
    ggml_backend_dev_get_extra_bufts_t get =
        (ggml_backend_dev_get_extra_bufts_t)ggml_backend_reg_get_proc_address(reg, "ggml_backend_dev_get_extra_bufts");
    for (ggml_backend_buffer_type_t *t = get ? get(dev) : NULL; t && *t; t++) {
        if (strstr(ggml_backend_buft_name(*t), "REPACK"))
            return *t;
    }
    return NULL;
}

/* Makes the matrices in a buffer type; false where products can't read them there. */
static bool make_mats(peer *p, ggml_backend_buffer_type_t type) {
    struct ggml_init_params params = {.mem_size = ggml_tensor_overhead() * (size_t)(p->n_mats + 8), .no_alloc = true};
    p->ctx = ggml_init(params);
    if (!p->ctx)
        fail("no context");
    for (int64_t i = 0; i < p->n_mats; i++)
        p->mats[i] = ggml_new_tensor_2d(p->ctx, GGML_TYPE_MXFP4, p->n_in, p->n_out);
    p->store = ggml_backend_alloc_ctx_tensors_from_buft(p->ctx, type);
    if (!p->store)
        fail("no memory for the weights");
    struct ggml_tensor *x = ggml_new_tensor_2d(p->ctx, GGML_TYPE_F32, p->n_in, 1);
    struct ggml_tensor *y = ggml_mul_mat(p->ctx, p->mats[0], x);
    if (ggml_backend_dev_supports_op(ggml_backend_get_device(p->backend), y))
        return true;
    ggml_backend_buffer_free(p->store);
    ggml_free(p->ctx);
    return false;
}

/* Codes at random, scales 2^-5 and 2^-4: a block is a scale byte and 16 bytes of codes. */
static void fill_mats(const peer *p) {
    size_t n_bytes = ggml_nbytes(p->mats[0]);
    uint8_t *bytes = malloc(n_bytes);
    uint64_t rng = 1;
    if (!bytes)
        fail("no memory for a matrix");
    for (int64_t i = 0; i < p->n_mats; i++) {
        for (size_t b = 0; b < n_bytes; b++) {
            rng = rng * 6364136223846793005u + 1442695040888963407u;
            bytes[b] = b % 17 ? (uint8_t)(rng >> 56) : (uint8_t)(0x7A + (rng >> 63));
        }
        ggml_backend_tensor_set(p->mats[i], bytes, 0, n_bytes);
    }
    free(bytes);
}

/* Products of so many rows with n of the matrices, as one graph. */
typedef struct graph {
    int64_t rows;
    struct ggml_context *ctx;
    ggml_backend_buffer_t store;
    struct ggml_cgraph *nodes;
} graph;

static graph make_graph(const peer *p, int64_t rows) {
    int64_t n = rows < MANY_ROWS || p->n_mats < FEW_MATS ? p->n_mats : FEW_MATS;
    size_t n_nodes = (size_t)n + 16;
    struct ggml_init_params params = {.mem_size = ggml_tensor_overhead() * (n_nodes + 16) +
                                                  ggml_graph_overhead_custom(n_nodes, false),
                                      .no_alloc = true};
    graph g = {.rows = rows, .ctx = ggml_init(params)};
    if (!g.ctx)
        fail("no context of a graph");
    g.nodes = ggml_new_graph_custom(g.ctx, n_nodes, false);
    struct ggml_tensor *x = ggml_new_tensor_2d(g.ctx, GGML_TYPE_F32, p->n_in, rows);
    for (int64_t i = 0; i < n; i++)
        ggml_build_forward_expand(g.nodes, ggml_mul_mat(g.ctx, p->mats[i], x));
    g.store = ggml_backend_alloc_ctx_tensors(g.ctx, p->backend);
    if (!g.store)
        fail("no memory for rows");
    float *values = malloc(ggml_nbytes(x));
    if (!values)
        fail("no memory for rows");
    for (int64_t i = 0; i < p->n_in * rows; i++)
        values[i] = (float)(i % 23) / 16 - 0.6f;
    ggml_backend_tensor_set(x, values, 0, ggml_nbytes(x));
    free(values);
    return g;
}

int main(int argc, char **argv) {
    if (argc != 5)
        fail("usage: ggml_mul_mat THREADS N_OUT N_IN BYTES");
    peer p = {.backend = ggml_backend_cpu_init(), .n_out = atoll(argv[2]), .n_in = atoll(argv[3])};
    if (!p.backend || p.n_out < 1 || p.n_in < 1)
        fail("no backend, or a size that is none");
    ggml_backend_cpu_set_n_threads(p.backend, atoi(argv[1]));
    p.n_mats = atoll(argv[4]) / (p.n_out * p.n_in / 32 * 17);
    p.n_mats = p.n_mats < 1 ? 1 : p.n_mats;
    p.mats = calloc((size_t)p.n_mats, sizeof *p.mats);
    if (!p.mats)
        fail("no memory");
    ggml_backend_dev_t dev = ggml_backend_get_device(p.backend);
    ggml_backend_buffer_type_t type = repacked_type(dev);
    if (!type || !make_mats(&p, type)) {
        type = ggml_backend_get_default_buffer_type(p.backend);
        if (!make_mats(&p, type))
            fail("this build has no product of mxfp4");
    }
    fill_mats(&p);
    printf("%s\n", ggml_backend_buft_name(type));
    fflush(stdout);
    char line[64];
    graph g = {0};
    while (fgets(line, sizeof line, stdin)) {
        int64_t rows = atoll(line);
        if (rows < 1)
            fail("a number of rows below 1");
        if (rows != g.rows) {
            if (g.ctx) {
                ggml_backend_buffer_free(g.store);
                ggml_free(g.ctx);
            }
            g = make_graph(&p, rows);
            ggml_backend_graph_compute(p.backend, g.nodes); /* to warm up */
        }
        double start = seconds();
        ggml_backend_graph_compute(p.backend, g.nodes);
        printf("%.9f %" PRId64 "\n", seconds() - start, rows < MANY_ROWS || p.n_mats < FEW_MATS ? p.n_mats : FEW_MATS);
        fflush(stdout);
    }
    return 0;
}
