/* `deepinfer info`, the program as it is: on the model that ships, on the released checkpoint (names and shapes over
 * sparse files), on made-up weights, and on folders with something wrong. */
#include "program.h"

#include "checkpoint_maker.h"

/* Runs `deepinfer info ARGS`, with standard error behind standard output. *status is the exit status. */
static char *run_info(const char *args, int *status) {
    size_t cap = 1 << 16;
    char *text = malloc(cap);
    assert_non_null(text);
    *status = di_test_shell(text, cap, "'%s' info %s 2>&1", DI_TEST_PROGRAM, args);
    return text;
}

static char *run_info_on(const char *dir, const char *args, int *status) {
    char all[4200];
    snprintf(all, sizeof all, "--model '%s' %s", dir, args);
    return run_info(all, status);
}

static void shipped_model_is_described(void **state) {
    (void)state;
    int status;
    char *text = run_info("", &status);
    assert_int_equal(status, 0);
    assert_contains(text, "DeepseekV41ForCausalLM, text only");
    assert_contains(text, "producers 0 to 3, consumers 4 to 7");
    assert_contains(text, "1980");
    assert_contains(text, "31826680 bytes");
    assert_contains(text, "3 files");
    assert_contains(text, "engram of 49796 rows");
    assert_contains(text, "17920 bytes"); /* a block: 128 tokens of 140 bytes */
    assert_contains(text, "8192 tokens a sequence");
    free(text);
}

static void released_checkpoint_is_described(void **state) {
    (void)state;
    made_dims dims = made_released();
    made_checkpoint m = {0};
    made_list(&m, &dims);
    made_place(&m, 48);
    char dir[2048];
    snprintf(dir, sizeof dir, "%s", di_test_tmp("released"));
    made_write(&m, dir, di_test_data("model/released.json"));
    made_deinit(&m);
    int status;
    char *text = run_info_on(dir, "--max-model-len 4096 --max-seqs 1", &status);
    assert_int_equal(status, 0);
    assert_contains(text, "96085");
    assert_contains(text, "510286023000 bytes (475.24 GiB)");
    assert_contains(text, "48 files");
    assert_contains(text, "text and images");
    assert_contains(text, "113920 bytes"); /* a block */
    assert_contains(text, "890.00 bytes"); /* a token */
    assert_contains(text, "indexer over the keys of 20, within candidates");
    free(text);

    /* A shard cut short is found without reading weights. */
    char path[4200];
    snprintf(path, sizeof path, "%s/model-00017-of-00048.safetensors", dir);
    struct stat info;
    assert_int_equal(stat(path, &info), 0);
    assert_int_equal(truncate(path, info.st_size - 1), 0);
    text = run_info_on(dir, "", &status);
    assert_int_equal(status, 3);
    assert_contains(text, "deepinfer: '");
    assert_contains(text, "model-00017-of-00048.safetensors': truncated");
    free(text);
}

/* The plan of weights that are made up needs no weights, and none are made. */
static void dummy_model_is_described(void **state) {
    (void)state;
    int status;
    char *text = run_info_on(di_test_data("real-shape"), "--dummy --max-model-len 1024 --max-seqs 1", &status);
    assert_int_equal(status, 0);
    assert_contains(text, "3470987944 bytes");
    assert_contains(text, "made up");
    free(text);
    text = run_info_on(di_test_data("real-shape"), "", &status);
    assert_int_equal(status, 3);
    assert_contains(text, "model.safetensors.index.json");
    free(text);
}

static void replay_says_whether_it_is_exact(void **state) {
    (void)state;
    static const struct {
        const char *args, *part;
    } rows[] = {
        {"--replay off", "replay                off"},
        {"--replay compact", "the last 253 tokens of a prompt: exact"},
        {"--replay mask --replay-keep 253", "the last 253 tokens of a prompt: exact"},
        {"--replay compact --replay-keep 252", "the last 252 tokens of a prompt: approximate (exact from 253 on)"},
        {"--replay mask --replay-keep 140", "the last 140 tokens of a prompt: approximate (exact from 253 on)"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        int status;
        char *text = run_info(rows[i].args, &status);
        assert_int_equal(status, 0);
        assert_contains(text, rows[i].part);
        free(text);
    }
}

static void exact_numerics_plan_floats(void **state) {
    (void)state;
    int status;
    char *text = run_info("--numerics exact", &status);
    assert_int_equal(status, 0);
    assert_contains(text, "exact numerics");
    assert_contains(text, "131072 bytes"); /* a block: (64 + 64 + 128) entries of 2 * 64 floats */
    free(text);
}

static void faults_have_their_exit_status(void **state) {
    (void)state;
    int status;
    char *text = run_info_on(di_test_tmp("no-such-folder"), "", &status);
    assert_int_equal(status, 3);
    assert_contains(text, "no-such-folder");
    free(text);
    text = run_info("--backend nvidia", &status);
    if (status != 0)
        assert_int_equal(status, 4); /* 0 where there is one */
    free(text);
    text = run_info("--no-such-option", &status);
    assert_int_equal(status, 2);
    free(text);
    text = run_info("--max-model-len 8193", &status);
    assert_int_equal(status, 2);
    assert_contains(text, "8192");
    free(text);
}

DI_TEST_GROUP(info, cmocka_unit_test(shipped_model_is_described), cmocka_unit_test(released_checkpoint_is_described),
              cmocka_unit_test(dummy_model_is_described), cmocka_unit_test(replay_says_whether_it_is_exact),
              cmocka_unit_test(exact_numerics_plan_floats), cmocka_unit_test(faults_have_their_exit_status));
