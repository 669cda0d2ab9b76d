/* The emulation of a GPU itself: mistakes in kernels are named, nothing is made up, launches can be repeated. What its
 * functions compute is sm90_test.c's. */
#include "harness.h"

#ifdef DI_TWIN_EMU
#include "cuda_emu_api.h"

const char *di_test_fault(const char *name, const float *in, float *out);
bool di_test_refuses(void);
void di_test_graph(float *p, int n_launches);

static float in[1024], out[1024];

static void fault_is(const char *name, const char *part) {
    for (uint64_t seed = 0; seed < 3; seed++) {
        di_emu_set_schedule(seed, true);
        di_emu_set_quiet(true);
        const char *text = di_test_fault(name, in, out);
        di_emu_set_quiet(false);
        if (!strstr(text, part))
            fail_msg("%s: '%s' does not contain '%s'", name, text, part);
    }
    di_emu_set_schedule(0, true);
}

static void mistakes_are_named(void **state) {
    (void)state;
    fault_is("half_at_barrier", "48 at __syncthreads");
    fault_is("half_at_barrier", "16 of 64 have ended");
    fault_is("lanes_apart", "lanes of warp 0 meet at");
    fault_is("not_in_mask", "is not in it");
    fault_is("past_the_end", "dynamic shared memory of 100 bytes is written at byte 100");
    fault_is("no_barrier_there", "not initialised");
    fault_is("too_many_arrivals", "more arrivals than the 2");
    fault_is("bytes_never_come", "64 at an mbarrier");
    fault_is("store_not_awaited", "bulk stores are under way");
    fault_is("multiply_not_awaited", "multiplies are under way");
    fault_is("warps_differ", "different multiplies");
    fault_is("tensor_version", "fixed bits are wrong");
    fault_is("tensor_start", "inside an atom");
    fault_is("tensor_scale_type", "scales are not UE8M0");
    fault_is("tensor_columns", "the block has columns 448 to 512");
    fault_is("tensor_kept", "has not given back");
    fault_is("tensor_of_two", "of two threads (0 and 1)");
    fault_is("tensor_quarter", "expected lanes from 0 on");
    fault_is("misaligned", "misaligned");
    fault_is("look_for_ever", "nothing happens");
}

static void nothing_is_made_up(void **state) {
    (void)state;
    for (int i = 0; i < 128; i++)
        in[i] = (float)i;
    assert_string_equal(di_test_fault("never_written", in, out), "");
    for (int i = 0; i < 64; i++)
        assert_true(isnan(out[i]));
    assert_string_equal(di_test_fault("read_too_early", in, out), "");
    for (int i = 0; i < 32; i++) {
        assert_true(out[i] == -1.0f);
        assert_true(out[32 + i] == (float)(4 * i));
    }
    di_emu_set_schedule(0, false); /* early copies hide the mistake */
    assert_string_equal(di_test_fault("read_too_early", in, out), "");
    assert_true(out[3] == 12.0f);
    di_emu_set_schedule(0, true);
    /* In rising order the last thread writes last; shuffled, another one does. */
    assert_string_equal(di_test_fault("order_of_threads", in, out), "");
    assert_true(out[7] == 31.0f);
    bool has_other = false;
    for (uint64_t seed = 1; seed < 10; seed++) {
        di_emu_set_schedule(seed, true);
        assert_string_equal(di_test_fault("order_of_threads", in, out), "");
        has_other = has_other || out[7] != 31.0f;
    }
    di_emu_set_schedule(0, true);
    assert_true(has_other);
}

static void launches_repeat(void **state) {
    (void)state;
    memset(out, 0, sizeof out);
    di_test_graph(out, 3);
    for (int i = 0; i < 1024; i++)
        assert_true(out[i] == 3.0f);
    di_emu_set_quiet(true);
    assert_true(di_test_refuses());
    di_emu_set_quiet(false);
    assert_string_equal(di_test_fault("order_of_threads", in, out), "");
}

DI_TEST_GROUP(emulation, cmocka_unit_test(mistakes_are_named), cmocka_unit_test(nothing_is_made_up),
              cmocka_unit_test(launches_repeat))
#endif
