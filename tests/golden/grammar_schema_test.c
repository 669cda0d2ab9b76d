/* JSON schemas against golden vectors: whether a text is valid, by a validator of draft 2020-12 that asserts formats
 * (the file's first line says which), and whether the grammar of another engine takes it. No invalid text is accepted;
 * valid ones are, but for those that a generation grammar leaves out on purpose, which are listed here by why. */
#include "vectors.h"

#include "grammar_rig.h"

/* Rows whose text is valid and isn't a text of the grammar. */
static const char *const spaces_around[] = {"sj-a-011", "sj-a-012", "sj-a-025", "sj-a-044", "sj-a-330"};
static const char *const other_numbers[] = {"sj-a-014", "sj-a-017", "sj-a-019", "sj-a-071",
                                            "sj-a-196", "sj-a-219", "sj-a-224"};
static const char *const key_order[] = {"sj-a-095", "sj-a-122", "sj-a-187", "sj-a-295"};
static const char *const undeclared_keys[] = {"sj-a-098", "sj-a-113"};
static const char *const refused_by_name[] = {"sj-a-177"}; /* uniqueItems of any values */

static bool is_listed(const char *const *ids, size_t n, const char *id) {
    for (size_t i = 0; i < n; i++) {
        if (strcmp(ids[i], id) == 0)
            return true;
    }
    return false;
}

static bool is_left_out(const char *id) {
    return is_listed(spaces_around, DI_COUNT(spaces_around), id) ||
           is_listed(other_numbers, DI_COUNT(other_numbers), id) || is_listed(key_order, DI_COUNT(key_order), id) ||
           is_listed(undeclared_keys, DI_COUNT(undeclared_keys), id) ||
           is_listed(refused_by_name, DI_COUNT(refused_by_name), id);
}

static int n_wrong;

static void check_row(const di_json *row, void *ctx) {
    (void)ctx;
    const char *id = di_json_str(di_json_get(row, "id"), NULL);
    const di_json *peer = di_json_get(row, "xgrammar");
    bool is_valid = di_json_bool(di_json_get(row, "valid"));
    size_t len = 0;
    const char *text = di_json_str(di_json_get(row, "text"), &len);
    di_pda p = {0};
    di_error err = {0};
    bool is_compiled = rig_compile_json(&p, di_json_get(row, "schema"), false, &err);
    bool is_accepted = is_compiled && rig_accepts(&p, text, len);
    bool is_wanted = is_valid && !is_left_out(id);
    if (is_accepted != is_wanted || (is_left_out(id) && (!is_valid || di_json_bool(peer)))) {
        print_error("%s: '%s' is %svalid, %s%s\n", id, text, is_valid ? "" : "in",
                    is_accepted ? "accepted" : "not accepted", is_left_out(id) ? ", and listed as left out" : "");
        if (!is_compiled)
            print_error("    %s\n", err.message);
        n_wrong++;
    }
    /* A schema is refused with the place of what is refused, and never one that the other engine takes, but for
     * uniqueItems, which that one ignores. */
    if (!is_compiled && strcmp(di_json_kind_name(peer), "string") != 0)
        assert_contains(err.message, "/uniqueItems: can't be guaranteed");
    di_pda_deinit(&p);
}

static void schemas_agree_with_every_vector(void **state) {
    (void)state;
    assert_int_equal(vectors_each("../grammar/so_json_schema.jsonl", check_row, NULL), 342);
    assert_int_equal(n_wrong, 0);
}

DI_TEST_GROUP(grammar_schema, cmocka_unit_test(schemas_agree_with_every_vector))
