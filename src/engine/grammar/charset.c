/* Sets of code points (charset.h): growing, putting in order, properties of Unicode and groups of equal case.
 *
 * Properties come from libunistring's tables, one look for each code point. The planes that hold nothing but unassigned
 * or private code points are taken as a whole: their members have the same properties, save the last two of a plane. */
#include "charset.h"

#include <unicase.h>
#include <unictype.h>

enum { NAME_MAX_BYTES = 64, PLANE = 0x10000 };

void di_charset_deinit(di_charset *set) {
    free(set->ranges);
    *set = (di_charset){0};
}

void di_charset_reset(di_charset *set) {
    set->n = 0;
}

void di_charset_add(di_charset *set, uint32_t first, uint32_t last) {
    if (set->has_failed)
        return;
    if (set->n == set->cap) {
        size_t cap = DI_MAX(2 * set->cap, (size_t)64);
        di_code_range *grown = realloc(set->ranges, cap * sizeof *grown);
        if (!grown) {
            set->has_failed = true;
            return;
        }
        set->ranges = grown;
        set->cap = cap;
    }
    set->ranges[set->n++] = (di_code_range){first, last};
}

static int compare_ranges(const void *a, const void *b) {
    const di_code_range *x = a, *y = b;
    return x->first < y->first ? -1 : x->first > y->first;
}

void di_charset_tidy(di_charset *set) {
    if (set->n == 0)
        return;
    qsort(set->ranges, set->n, sizeof *set->ranges, compare_ranges);
    size_t n = 1;
    for (size_t i = 1; i < set->n; i++) {
        di_code_range r = set->ranges[i], *last = &set->ranges[n - 1];
        if (r.first <= last->last + 1)
            last->last = DI_MAX(last->last, r.last);
        else
            set->ranges[n++] = r;
    }
    set->n = n;
}

void di_charset_negate(di_charset *set) {
    di_charset_tidy(set);
    size_t n = set->n;
    uint32_t at = 0;
    for (size_t i = 0; i < n; i++) {
        di_code_range r = set->ranges[i];
        if (r.first > at)
            di_charset_add(set, at, r.first - 1);
        at = r.last + 1;
    }
    if (at <= DI_CODE_MAX)
        di_charset_add(set, at, DI_CODE_MAX);
    if (set->has_failed)
        return;
    memmove(set->ranges, set->ranges + n, (set->n - n) * sizeof *set->ranges);
    set->n -= n;
}

/* ---- properties ---- */

typedef enum property_kind { PROPERTY_CATEGORY, PROPERTY_SCRIPT, PROPERTY_BINARY } property_kind;

typedef struct property {
    property_kind kind;
    uc_general_category_t category;
    const uc_script_t *script;
    uc_property_t binary;
} property;

static bool has_property(const property *p, uint32_t code) {
    switch (p->kind) {
    case PROPERTY_CATEGORY:
        return uc_is_general_category(code, p->category);
    case PROPERTY_SCRIPT:
        return uc_is_script(code, p->script);
    case PROPERTY_BINARY:
        break;
    }
    return uc_is_property(code, p->binary);
}

static void add_members(di_charset *set, const property *p) {
    enum { NONE = -1 };
    int64_t first = NONE; /* of the range that is open */
    for (uint32_t code = 0; code <= DI_CODE_MAX; code++) {
        bool is_member = has_property(p, code);
        if (is_member && first == NONE) {
            first = code;
        } else if (!is_member && first != NONE) {
            di_charset_add(set, (uint32_t)first, code - 1);
            first = NONE;
        }
        uint32_t plane = code / PLANE;
        bool is_uniform = (plane >= 4 && plane <= 13) || plane >= 15;
        /* The private planes are assigned from their first code point on, which is what was just looked at. */
        if (is_uniform && code % PLANE == 0)
            code += PLANE - 3;
    }
    if (first != NONE)
        di_charset_add(set, (uint32_t)first, DI_CODE_MAX);
}

/* Lower case without what doesn't count in names. 0 when it doesn't fit. */
static size_t plain_name(char out[NAME_MAX_BYTES], const char *name, size_t len) {
    size_t n = 0;
    for (size_t i = 0; i < len; i++) {
        char c = name[i];
        if (c == ' ' || c == '-' || c == '_')
            continue;
        if (n + 1 == NAME_MAX_BYTES)
            return 0;
        out[n++] = (char)(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
    }
    out[n] = '\0';
    return n;
}

static bool is_plain(const char *plain, const char *name) {
    char other[NAME_MAX_BYTES];
    return plain_name(other, name, strlen(name)) > 0 && strcmp(plain, other) == 0;
}

static bool find_category(property *p, const char *plain) {
    /* Every category that libunistring has a name for, alone or as a group. */
    static const char *const shorts[] = {"L",  "LC", "Lu", "Ll", "Lt", "Lm", "Lo", "M",  "Mn", "Mc", "Me", "N",  "Nd",
                                         "Nl", "No", "P",  "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "S",  "Sm", "Sc",
                                         "Sk", "So", "Z",  "Zs", "Zl", "Zp", "C",  "Cc", "Cf", "Cs", "Co", "Cn"};
    for (size_t i = 0; i < DI_COUNT(shorts); i++) {
        uc_general_category_t category = uc_general_category_byname(shorts[i]);
        const char *name = uc_general_category_long_name(category);
        if (is_plain(plain, shorts[i]) || (name && is_plain(plain, name))) {
            *p = (property){.kind = PROPERTY_CATEGORY, .category = category};
            return true;
        }
    }
    return false;
}

static bool find_script(property *p, const char *plain) {
    const uc_script_t *scripts;
    size_t n;
    uc_all_scripts(&scripts, &n);
    for (size_t i = 0; i < n; i++) {
        if (is_plain(plain, scripts[i].name)) {
            *p = (property){.kind = PROPERTY_SCRIPT, .script = &scripts[i]};
            return true;
        }
    }
    return false;
}

static bool find_binary(property *p, const char *plain) {
    /* libunistring finds a property by its exact name alone. */
    static const char *const names[] = {"White_Space",
                                        "Alphabetic",
                                        "Default_Ignorable_Code_Point",
                                        "Uppercase",
                                        "Lowercase",
                                        "Cased",
                                        "Case_Ignorable",
                                        "Changes_When_Lowercased",
                                        "Changes_When_Uppercased",
                                        "Changes_When_Titlecased",
                                        "Changes_When_Casefolded",
                                        "Changes_When_Casemapped",
                                        "Soft_Dotted",
                                        "ID_Start",
                                        "ID_Continue",
                                        "XID_Start",
                                        "XID_Continue",
                                        "Pattern_White_Space",
                                        "Pattern_Syntax",
                                        "Join_Control",
                                        "Grapheme_Base",
                                        "Grapheme_Extend",
                                        "Bidi_Control",
                                        "Hex_Digit",
                                        "ASCII_Hex_Digit",
                                        "Ideographic",
                                        "Unified_Ideograph",
                                        "Radical",
                                        "Dash",
                                        "Hyphen",
                                        "Quotation_Mark",
                                        "Sentence_Terminal",
                                        "Terminal_Punctuation",
                                        "Diacritic",
                                        "Extender",
                                        "Math",
                                        "Emoji",
                                        "Emoji_Presentation",
                                        "Emoji_Modifier",
                                        "Emoji_Modifier_Base",
                                        "Emoji_Component",
                                        "Extended_Pictographic",
                                        "Noncharacter_Code_Point",
                                        "Deprecated",
                                        "Logical_Order_Exception",
                                        "Variation_Selector",
                                        "IDS_Binary_Operator",
                                        "IDS_Trinary_Operator"};
    for (size_t i = 0; i < DI_COUNT(names); i++) {
        if (!is_plain(plain, names[i]))
            continue;
        uc_property_t binary = uc_property_byname(names[i]);
        if (!uc_property_is_valid(binary))
            return false;
        *p = (property){.kind = PROPERTY_BINARY, .binary = binary};
        return true;
    }
    return false;
}

bool di_charset_add_property(di_charset *set, const char *name, size_t len) {
    char plain[NAME_MAX_BYTES];
    const char *equals = memchr(name, '=', len);
    property p;
    if (equals) {
        size_t n = (size_t)(equals - name);
        if (!plain_name(plain, name, n))
            return false;
        bool is_category = strcmp(plain, "gc") == 0 || strcmp(plain, "generalcategory") == 0;
        bool is_script = strcmp(plain, "sc") == 0 || strcmp(plain, "script") == 0;
        if (!plain_name(plain, equals + 1, len - n - 1))
            return false;
        if (!(is_category && find_category(&p, plain)) && !(is_script && find_script(&p, plain)))
            return false;
        add_members(set, &p);
        return true;
    }
    if (!plain_name(plain, name, len))
        return false;
    if (strcmp(plain, "any") == 0) {
        di_charset_add(set, 0, DI_CODE_MAX);
    } else if (strcmp(plain, "ascii") == 0) {
        di_charset_add(set, 0, 0x7F);
    } else if (strcmp(plain, "assigned") == 0) {
        di_charset others = {0};
        p = (property){.kind = PROPERTY_CATEGORY, .category = uc_general_category_byname("Cn")};
        add_members(&others, &p);
        di_charset_negate(&others);
        for (size_t i = 0; i < others.n; i++)
            di_charset_add(set, others.ranges[i].first, others.ranges[i].last);
        set->has_failed |= others.has_failed;
        di_charset_deinit(&others);
    } else if (find_category(&p, plain) || find_script(&p, plain) || find_binary(&p, plain)) {
        add_members(set, &p);
    } else {
        return false;
    }
    return true;
}

/* ---- case ---- */

/* Where cased letters are. Others have no other case, which the tests check against the whole of Unicode. */
static const di_code_range cased_blocks[] = {
    {0x41, 0x58F},    {0x10A0, 0x13FF}, {0x1C80, 0x2184},   {0x24B6, 0x24E9},   {0x2C00, 0x2DFF},   {0xA640, 0xABFF},
    {0xFB00, 0xFB1F}, {0xFF21, 0xFF5A}, {0x10400, 0x10FFF}, {0x11800, 0x118FF}, {0x16E00, 0x16EFF}, {0x1E900, 0x1E9FF},
};

/* Letters whose upper case is one text of several letters, so that no simple mapping leads from one to the other. */
static const uint32_t pairs_by_full_mapping[][2] = {{0x390, 0x1FD3}, {0x3B0, 0x1FE3}, {0xFB05, 0xFB06}};

typedef struct case_pair {
    uint32_t a, b;
} case_pair;

static int compare_codes(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static int32_t find_code(const uint32_t *codes, size_t n, uint32_t code) {
    const uint32_t *at = bsearch(&code, codes, n, sizeof *codes, compare_codes);
    return at ? (int32_t)(at - codes) : -1;
}

static size_t list_pairs(case_pair *out, size_t cap) {
    size_t n = 0;
    for (size_t k = 0; k < DI_COUNT(cased_blocks); k++) {
        for (uint32_t code = cased_blocks[k].first; code <= cased_blocks[k].last; code++) {
            uint32_t others[2] = {uc_tolower(code), uc_toupper(code)};
            for (int i = 0; i < 2; i++) {
                if (others[i] == code)
                    continue;
                if (n < cap)
                    out[n] = (case_pair){code, others[i]};
                n++;
            }
        }
    }
    for (size_t i = 0; i < DI_COUNT(pairs_by_full_mapping); i++, n++) {
        if (n < cap)
            out[n] = (case_pair){pairs_by_full_mapping[i][0], pairs_by_full_mapping[i][1]};
    }
    return n;
}

di_status di_case_groups_init(di_case_groups *c, di_error *err) {
    *c = (di_case_groups){0};
    enum { PAIRS_CAP = 8192 }; /* Unicode 14 has 2,800 */
    case_pair *pairs = malloc(PAIRS_CAP * sizeof *pairs);
    c->codes = malloc((size_t)2 * PAIRS_CAP * sizeof *c->codes);
    if (!pairs || !c->codes) {
        free(pairs);
        di_case_groups_deinit(c);
        return di_fail(err, DI_ERR_MEMORY, "a table of letters and their cases");
    }
    size_t n_pairs = DI_MIN(list_pairs(pairs, PAIRS_CAP), (size_t)PAIRS_CAP), n = 0;
    for (size_t i = 0; i < n_pairs; i++) {
        c->codes[2 * i] = pairs[i].a;
        c->codes[2 * i + 1] = pairs[i].b;
    }
    qsort(c->codes, 2 * n_pairs, sizeof *c->codes, compare_codes);
    for (size_t i = 0; i < 2 * n_pairs; i++) {
        if (n == 0 || c->codes[n - 1] != c->codes[i])
            c->codes[n++] = c->codes[i];
    }
    c->n = n;
    c->group = malloc((n + 1) * sizeof *c->group);
    c->next = malloc((n + 1) * sizeof *c->next);
    if (!c->group || !c->next) {
        free(pairs);
        di_case_groups_deinit(c);
        return di_fail(err, DI_ERR_MEMORY, "a table of letters and their cases");
    }
    for (size_t i = 0; i < n; i++)
        c->group[i] = c->next[i] = (int32_t)i;
    /* Joining two rings is one exchange; the smaller number names the joined group. Groups have at most five members.
     */
    for (size_t i = 0; i < n_pairs; i++) {
        int32_t a = find_code(c->codes, n, pairs[i].a), b = find_code(c->codes, n, pairs[i].b);
        if (c->group[a] == c->group[b])
            continue;
        int32_t group = DI_MIN(c->group[a], c->group[b]), next = c->next[a];
        c->next[a] = c->next[b];
        c->next[b] = next;
        int32_t at = a;
        do {
            c->group[at] = group;
            at = c->next[at];
        } while (at != a);
    }
    free(pairs);
    return DI_OK;
}

void di_case_groups_deinit(di_case_groups *c) {
    free(c->codes);
    free(c->group);
    free(c->next);
    *c = (di_case_groups){0};
}

void di_charset_add_cases(di_charset *set, const di_case_groups *c) {
    di_charset_tidy(set);
    size_t n = set->n;
    for (size_t k = 0; k < n && !set->has_failed; k++) {
        di_code_range r = set->ranges[k];
        size_t low = 0, high = c->n; /* the first letter of the range */
        while (low < high) {
            size_t middle = (low + high) / 2;
            if (c->codes[middle] < r.first)
                low = middle + 1;
            else
                high = middle;
        }
        for (; low < c->n && c->codes[low] <= r.last; low++) {
            for (int32_t at = c->next[low]; at != (int32_t)low; at = c->next[at]) {
                uint32_t code = c->codes[at];
                if (code < r.first || code > r.last)
                    di_charset_add(set, code, code);
            }
        }
    }
}

void di_charset_add_ascii_cases(di_charset *set) {
    di_charset_tidy(set);
    for (size_t k = 0, n = set->n; k < n && !set->has_failed; k++) {
        di_code_range r = set->ranges[k];
        uint32_t first = DI_MAX(r.first, (uint32_t)'A'), last = DI_MIN(r.last, (uint32_t)'Z');
        if (first <= last)
            di_charset_add(set, first + 'a' - 'A', last + 'a' - 'A');
        first = DI_MAX(r.first, (uint32_t)'a');
        last = DI_MIN(r.last, (uint32_t)'z');
        if (first <= last)
            di_charset_add(set, first - ('a' - 'A'), last - ('a' - 'A'));
    }
}
