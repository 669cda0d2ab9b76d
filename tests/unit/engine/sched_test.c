/* The waiting queue and the pace by themselves: order, shares, places kept, callers forgotten, goals. */
#include "engine/sched/sched.h"
#include "harness.h"

/* ---- queue --------------------------------------------------------------------------------------------------------
 */

static void item_make(di_sched_queue *q, di_sched_item *item, const char *caller, int32_t priority, uint64_t arrival) {
    di_error err = {0};
    *item = (di_sched_item){.priority = priority, .arrival = arrival, .is_ready = true};
    di_test_ok(di_sched_attach(q, item, caller, caller ? strlen(caller) : 0, &err), &err);
}

static void item_push(di_sched_queue *q, di_sched_item *item, const char *caller, int32_t priority, uint64_t arrival) {
    item_make(q, item, caller, priority, arrival);
    di_sched_push(q, item);
}

static void queue_open(di_sched_queue *q) {
    di_error err = {0};
    di_test_ok(di_sched_queue_init(q, &err), &err);
}

/* Takes the next item out and charges its rows. */
static di_sched_item *serve(di_sched_queue *q, int64_t n_rows) {
    di_sched_item *item = di_sched_peek(q);
    assert_non_null(item);
    assert_ptr_equal(di_sched_peek(q), item); /* looking changes nothing */
    di_sched_remove(q, item);
    di_sched_charge(q, item, n_rows);
    return item;
}

static void items_drop(di_sched_queue *q, di_sched_item *items, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (items[i].is_queued)
            di_sched_remove(q, &items[i]);
        di_sched_detach(q, &items[i]);
    }
    di_sched_queue_deinit(q);
}

static void priority_goes_before_all(void **state) {
    (void)state;
    di_sched_queue q;
    queue_open(&q);
    di_sched_item items[6];
    item_push(&q, &items[0], "a", 5, 1);
    item_push(&q, &items[1], "b", 0, 2);
    item_push(&q, &items[2], "a", -3, 3);
    item_push(&q, &items[3], "b", INT32_MAX, 4);
    item_push(&q, &items[4], "c", INT32_MIN, 5);
    item_push(&q, &items[5], "a", 0, 6);
    /* Rows of 0, so that no caller falls behind. */
    const int order[] = {4, 2, 1, 5, 0, 3};
    for (size_t i = 0; i < DI_COUNT(order); i++)
        assert_ptr_equal(serve(&q, 0), &items[order[i]]);
    assert_null(di_sched_peek(&q));
    items_drop(&q, items, DI_COUNT(items));
}

static void caller_is_served_by_arrival(void **state) {
    (void)state;
    di_sched_queue q;
    queue_open(&q);
    di_sched_item items[50];
    for (int i = 0; i < 50; i++) /* pushed in an order of its own, as what comes back from a preemption is */
        item_push(&q, &items[i], "a", 0, (uint64_t)(i * 7 % 50));
    for (uint64_t i = 0; i < 50; i++)
        assert_int_equal(serve(&q, 100)->arrival, i);
    items_drop(&q, items, DI_COUNT(items));
}

static void interrupted_goes_before_new_within_its_priority(void **state) {
    (void)state;
    di_sched_queue q;
    queue_open(&q);
    di_sched_item items[5];
    item_push(&q, &items[0], "a", 0, 1);
    item_push(&q, &items[1], "b", 0, 2);
    item_push(&q, &items[2], "c", -1, 3);
    item_make(&q, &items[3], "d", 0, 4);
    item_make(&q, &items[4], "e", 0, 5);
    di_sched_charge(&q, &items[3], 1000); /* both have run, the later one less */
    di_sched_charge(&q, &items[4], 10);
    items[3].is_resumed = items[4].is_resumed = true;
    di_sched_push(&q, &items[4]);
    di_sched_push(&q, &items[3]);
    const int order[] = {2, 3, 4, 0, 1};
    for (size_t i = 0; i < DI_COUNT(order); i++)
        assert_ptr_equal(serve(&q, 0), &items[order[i]]);
    items_drop(&q, items, DI_COUNT(items));
}

static void nobody_and_the_empty_name_are_one_caller(void **state) {
    (void)state;
    di_sched_queue q;
    queue_open(&q);
    di_sched_item items[3];
    item_push(&q, &items[0], NULL, 0, 1);
    item_push(&q, &items[1], "", 0, 2);
    assert_int_equal(q.n_callers, 1);
    item_make(&q, &items[2], "x", 0, 3);
    assert_int_equal(q.n_callers, 2);
    items_drop(&q, items, DI_COUNT(items));
}

static void items_that_are_not_ready_keep_their_place(void **state) {
    (void)state;
    di_sched_queue q;
    queue_open(&q);
    di_sched_item items[4];
    for (int i = 0; i < 4; i++)
        item_push(&q, &items[i], "a", 0, (uint64_t)i);
    items[0].is_ready = items[1].is_ready = false;
    assert_ptr_equal(serve(&q, 1), &items[2]);
    items[0].is_ready = true; /* now it is before all others again */
    assert_ptr_equal(serve(&q, 1), &items[0]);
    assert_ptr_equal(serve(&q, 1), &items[3]);
    assert_null(di_sched_peek(&q));
    assert_int_equal(q.n_items, 1);
    items[1].is_ready = true;
    assert_ptr_equal(serve(&q, 1), &items[1]);
    items_drop(&q, items, DI_COUNT(items));
}

/* Callers that always have something waiting get rows in equal parts, whatever sizes their requests have: no two are
 * ever further apart than the largest request and one step more. */
DI_PROPERTY(waiting_callers_get_equal_shares, 20) {
    enum { CALLERS = 7, EACH = 3, ROWS_MAX = 2000 };
    uint64_t rng = seed, arrival = 0;
    di_sched_queue q;
    queue_open(&q);
    di_sched_item items[CALLERS * EACH];
    int64_t served[CALLERS] = {0}, largest[CALLERS];
    char names[CALLERS][8];
    for (int c = 0; c < CALLERS; c++) {
        snprintf(names[c], sizeof names[c], "user%d", c);
        largest[c] = di_test_random_range(&rng, 1, ROWS_MAX);
        for (int i = 0; i < EACH; i++)
            item_push(&q, &items[c * EACH + i], names[c], 0, ++arrival);
    }
    for (int turn = 0; turn < 20000; turn++) {
        di_sched_item *item = di_sched_peek(&q);
        int c = (int)(item - items) / EACH;
        int64_t rows = di_test_random_range(&rng, 1, largest[c]);
        serve(&q, rows);
        served[c] += rows;
        item->arrival = ++arrival; /* its next request */
        di_sched_push(&q, item);
        int64_t least = served[0], most = served[0];
        for (int k = 1; k < CALLERS; k++) {
            least = DI_MIN(least, served[k]);
            most = DI_MAX(most, served[k]);
        }
        assert_true(most - least <= ROWS_MAX);
    }
    items_drop(&q, items, DI_COUNT(items));
}

static void idling_earns_nothing(void **state) {
    (void)state;
    di_sched_queue q;
    queue_open(&q);
    di_sched_item busy[2], idle[2];
    item_push(&q, &busy[0], "busy", 0, 1);
    item_push(&q, &busy[1], "busy", 0, 2);
    item_push(&q, &idle[0], "idle", 0, 3);
    item_make(&q, &idle[1], "idle", 0, 4);
    uint64_t arrival = 4;
    assert_ptr_equal(serve(&q, 100), &busy[0]);
    assert_ptr_equal(serve(&q, 100), &idle[0]);
    for (int i = 0; i < 1000; i++) { /* alone for a long time */
        di_sched_item *item = &busy[i % 2];
        if (!item->is_queued) {
            item->arrival = ++arrival;
            di_sched_push(&q, item);
        }
        serve(&q, 100);
    }
    /* Both have much to do now. The one that was away gets its half and no more. */
    int n_idle = 0;
    for (int i = 0; i < 40; i++) {
        for (int k = 0; k < 2; k++) {
            di_sched_item *all[] = {&busy[k], &idle[k]};
            for (int j = 0; j < 2; j++) {
                if (!all[j]->is_queued) {
                    all[j]->arrival = ++arrival;
                    di_sched_push(&q, all[j]);
                }
            }
        }
        const di_sched_item *item = serve(&q, 100);
        n_idle += item == &idle[0] || item == &idle[1];
    }
    assert_in_range(n_idle, 18, 22);
    di_sched_item *all[] = {&busy[0], &busy[1], &idle[0], &idle[1]};
    for (size_t i = 0; i < DI_COUNT(all); i++) {
        if (all[i]->is_queued)
            di_sched_remove(&q, all[i]);
        di_sched_detach(&q, all[i]);
    }
    di_sched_queue_deinit(&q);
}

/* Rows of a class of requests that goes before others say nothing about the shares within those. */
static void shares_hold_beside_a_caller_of_higher_priority(void **state) {
    (void)state;
    di_sched_queue q;
    queue_open(&q);
    enum { N = 24 };
    di_sched_item first, a[N], b[N];
    uint64_t arrival = 0;
    item_push(&q, &b[0], "b", 0, ++arrival);
    item_push(&q, &first, "first", -1, ++arrival);
    for (int i = 0; i < 1000; i++) { /* b waits, a is not there yet */
        assert_ptr_equal(serve(&q, 1000), &first);
        di_sched_push(&q, &first);
    }
    assert_ptr_equal(serve(&q, 1000), &first);
    for (int i = 0; i < N; i++) {
        item_push(&q, &a[i], "a", 0, ++arrival);
        if (i > 0)
            item_push(&q, &b[i], "b", 0, ++arrival);
    }
    int n_a = 0;
    for (int i = 0; i < 20; i++) {
        const di_sched_item *item = serve(&q, 100);
        n_a += item >= a && item < a + N;
    }
    assert_in_range(n_a, 9, 11);
    for (int i = 0; i < N; i++) {
        if (a[i].is_queued)
            di_sched_remove(&q, &a[i]);
        di_sched_detach(&q, &a[i]);
    }
    di_sched_detach(&q, &first);
    items_drop(&q, b, N);
}

/* Strangers that come once each, without end, don't keep a caller that was served before from its turn for ever. */
static void passing_callers_do_not_starve_a_regular(void **state) {
    (void)state;
    di_sched_queue q;
    queue_open(&q);
    enum { STRANGERS = 4, ROWS = 100 };
    di_sched_item regular[2], strangers[STRANGERS];
    uint64_t arrival = 0;
    item_push(&q, &regular[0], "regular", 0, ++arrival);
    item_make(&q, &regular[1], "regular", 0, ++arrival);
    char name[24];
    int n = 0;
    for (; n < STRANGERS; n++) {
        snprintf(name, sizeof name, "stranger%d", n);
        item_push(&q, &strangers[n], name, 0, ++arrival);
    }
    assert_ptr_equal(serve(&q, 10 * ROWS), &regular[0]);
    di_sched_push(&q, &regular[1]); /* its next one waits while strangers come and go */
    int turns = 0;
    for (;; turns++) {
        assert_true(turns < 1000);
        di_sched_item *item = serve(&q, ROWS);
        if (item == &regular[1])
            break;
        di_sched_detach(&q, item);
        snprintf(name, sizeof name, "stranger%d", n++);
        item_push(&q, item, name, 0, ++arrival);
    }
    /* Five callers share: it was ten requests ahead of its share, which the others' rows make up in fifty. */
    assert_true(turns <= 60);
    di_sched_detach(&q, &regular[0]);
    di_sched_detach(&q, &regular[1]);
    items_drop(&q, strangers, STRANGERS);
}

static void callers_are_forgotten_when_gone(void **state) {
    (void)state;
    enum { AT_ONCE = 5, CALLERS = 100000 };
    di_sched_queue q;
    queue_open(&q);
    di_sched_item items[AT_ONCE] = {{0}};
    char name[24];
    for (int i = 0; i < CALLERS; i++) {
        di_sched_item *item = &items[i % AT_ONCE];
        if (item->is_queued)
            di_sched_remove(&q, item);
        di_sched_detach(&q, item);
        snprintf(name, sizeof name, "caller %d", i);
        item_push(&q, item, name, i % 3, (uint64_t)i);
        assert_in_range(q.n_callers, 1, AT_ONCE);
        serve(&q, 10);
    }
    assert_in_range(q.cap, 1, 16); /* the table is what it was */
    items_drop(&q, items, AT_ONCE);
}

/* Many callers at once: the table grows, and each is found again. */
static void many_callers_stay_apart(void **state) {
    (void)state;
    enum { N = 2000 };
    di_sched_queue q;
    queue_open(&q);
    di_sched_item *items = calloc(2 * N, sizeof *items);
    assert_non_null(items);
    char name[24];
    for (int i = 0; i < 2 * N; i++) {
        snprintf(name, sizeof name, "%d", i % N);
        item_push(&q, &items[i], name, 0, (uint64_t)i);
    }
    assert_int_equal(q.n_callers, N);
    for (int i = 0; i < 2 * N; i++) /* everyone's first, then everyone's second */
        assert_ptr_equal(serve(&q, 10), &items[i]);
    for (int i = 0; i < 2 * N; i++)
        di_sched_detach(&q, &items[i]);
    assert_int_equal(q.n_callers, 0);
    free(items);
    di_sched_queue_deinit(&q);
}

/* Whatever is pushed, removed, blocked and unblocked: what comes out is the least by the rule. */
DI_PROPERTY(queue_follows_its_rule, 30) {
    enum { N = 60, CALLERS = 5 };
    uint64_t rng = seed, arrival = 0;
    di_sched_queue q;
    queue_open(&q);
    di_sched_item items[N];
    char name[8];
    for (int i = 0; i < N; i++) {
        snprintf(name, sizeof name, "%d", i % CALLERS);
        item_make(&q, &items[i], name, (int32_t)di_test_random_range(&rng, -1, 1), ++arrival);
    }
    int64_t n_queued = 0;
    for (int turn = 0; turn < 3000; turn++) {
        di_sched_item *item = &items[di_test_random(&rng) % N];
        switch (di_test_random(&rng) % 4) {
        case 0:
            item->is_ready = !item->is_ready;
            break;
        case 1:
            if (item->is_queued)
                di_sched_remove(&q, item);
            else
                di_sched_push(&q, item);
            n_queued += item->is_queued ? 1 : -1;
            break;
        case 2:
            di_sched_charge(&q, item, di_test_random_range(&rng, 0, 50));
            break;
        default:
            break;
        }
        assert_int_equal(q.n_items, n_queued);
        const di_sched_item *next = di_sched_peek(&q);
        for (int i = 0; i < N; i++) {
            if (!items[i].is_queued || !items[i].is_ready)
                continue;
            assert_non_null(next);
            assert_true(next->is_queued && next->is_ready && next->priority <= items[i].priority);
            if (items[i].caller == next->caller && items[i].priority == next->priority)
                assert_true(next->arrival <= items[i].arrival);
        }
    }
    items_drop(&q, items, N);
}

static void count_item(void *user, di_sched_item *item) {
    (void)item;
    ++*(int *)user;
}

typedef struct dropper {
    di_sched_queue *queue;
    int n;
} dropper;

static void drop_item(void *user, di_sched_item *item) {
    dropper *d = user;
    d->n++;
    di_sched_remove(d->queue, item);
}

static void each_visits_all_and_may_remove(void **state) {
    (void)state;
    di_sched_queue q;
    queue_open(&q);
    di_sched_item items[12];
    char name[8];
    for (int i = 0; i < 12; i++) {
        snprintf(name, sizeof name, "%d", i % 4);
        item_push(&q, &items[i], name, 0, (uint64_t)i);
    }
    int n = 0;
    di_sched_each(&q, count_item, &n);
    assert_int_equal(n, 12);
    dropper d = {&q, 0};
    di_sched_each(&q, drop_item, &d);
    assert_int_equal(d.n, 12);
    assert_int_equal(q.n_items, 0);
    items_drop(&q, items, DI_COUNT(items));
}

/* ---- pace ---------------------------------------------------------------------------------------------------------
 */

/* A machine with steps of 10 ms, and 0.1 ms more for each prompt row. */
static di_pace measured(int64_t ttft_goal_ms, int64_t tpot_goal_ms) {
    di_pace p = {.ttft_goal_ns = ttft_goal_ms * 1000000, .tpot_goal_ns = tpot_goal_ms * 1000000};
    for (int i = 0; i < 200; i++)
        di_pace_learn(&p, 0, 8, 10000000);
    for (int i = 0; i < 200; i++)
        di_pace_learn(&p, 100, 8, 20000000);
    return p;
}

static di_pace_ask ask_for(int64_t rows, int64_t waited_ms, int64_t rows_to_go) {
    return (di_pace_ask){.rows_max = rows,
                         .rows_wanted = rows,
                         .n_decode = 8,
                         .waited_ns = waited_ms < 0 ? -1 : waited_ms * 1000000,
                         .rows_to_go = rows_to_go};
}

static void pace_learns_what_a_step_costs(void **state) {
    (void)state;
    di_pace p = measured(0, 0);
    assert_true(fabs(p.base_ns - 1e7) < 1e3);
    assert_true(fabs(p.prompt_row_ns - 1e5) < 1e2);
    /* Another machine: the means follow. */
    for (int i = 0; i < 200; i++)
        di_pace_learn(&p, 0, 8, 30000000);
    assert_true(fabs(p.base_ns - 3e7) < 1e3);
    /* A step that is shorter than its decode rows alone costs something all the same. */
    di_pace q = {0};
    di_pace_learn(&q, 0, 1, 1000000);
    di_pace_learn(&q, 10, 1, 500000);
    assert_true(q.prompt_row_ns > 0);
}

static void without_a_goal_all_rows_run(void **state) {
    (void)state;
    di_pace p = measured(0, 0), fresh = {.tpot_goal_ns = 1}, alone = measured(0, 15);
    di_pace_ask ask = ask_for(4000, 0, 8000);
    assert_int_equal(di_pace_rows(&p, &ask), 4000);
    assert_int_equal(di_pace_rows(&fresh, &ask), 4000); /* nothing is measured yet */
    ask.n_decode = 0;                                   /* nobody would be slowed */
    assert_int_equal(di_pace_rows(&alone, &ask), 4000);
    ask.rows_max = 0;
    assert_int_equal(di_pace_rows(&p, &ask), 0);
    ask.rows_max = 50;
    assert_int_equal(di_pace_rows(&p, &ask), 50);
    assert_int_equal(p.ttft_gave_way + p.tpot_gave_way + alone.ttft_gave_way + alone.tpot_gave_way, 0);
}

static void goal_per_token_bounds_prompt_rows(void **state) {
    (void)state;
    di_pace p = measured(0, 15);
    di_pace_ask ask = ask_for(4000, 0, 8000);
    assert_in_range(di_pace_rows(&p, &ask), 49, 51); /* 15 ms - 10 ms at 0.1 ms a row */
    di_pace hard = measured(0, 5);                   /* not even decode rows alone are within the goal */
    assert_int_equal(di_pace_rows(&hard, &ask), 16); /* but a prompt moves */
}

static void goals_give_way_and_are_counted(void **state) {
    (void)state;
    /* 1,000 rows in steps of 50 take 20 * 10 + 100 = 300 ms, in one step 110 ms. */
    di_pace p = measured(500, 15);
    di_pace_ask ask = ask_for(4000, 100, 1000);
    assert_in_range(di_pace_rows(&p, &ask), 49, 51); /* 400 ms left: both goals hold */
    assert_int_equal(p.ttft_gave_way + p.tpot_gave_way, 0);
    ask = ask_for(4000, 300, 1000); /* 200 ms left: only all rows at once do it */
    assert_int_equal(di_pace_rows(&p, &ask), 4000);
    assert_int_equal(p.tpot_gave_way, 1);
    assert_int_equal(p.ttft_gave_way, 0);
    ask = ask_for(4000, 450, 1000); /* 50 ms left: too late, the others are not slowed for nothing */
    assert_in_range(di_pace_rows(&p, &ask), 49, 51);
    assert_int_equal(p.tpot_gave_way, 1);
    assert_int_equal(p.ttft_gave_way, 1);
    ask = ask_for(4000, -1, 1000); /* a prompt that is run again has had its first token */
    assert_in_range(di_pace_rows(&p, &ask), 49, 51);
    assert_int_equal(p.tpot_gave_way + p.ttft_gave_way, 2);
}

DI_TEST_GROUP(sched_queue, cmocka_unit_test(priority_goes_before_all), cmocka_unit_test(caller_is_served_by_arrival),
              cmocka_unit_test(interrupted_goes_before_new_within_its_priority),
              cmocka_unit_test(nobody_and_the_empty_name_are_one_caller),
              cmocka_unit_test(items_that_are_not_ready_keep_their_place),
              cmocka_unit_test(waiting_callers_get_equal_shares), cmocka_unit_test(idling_earns_nothing),
              cmocka_unit_test(shares_hold_beside_a_caller_of_higher_priority),
              cmocka_unit_test(passing_callers_do_not_starve_a_regular),
              cmocka_unit_test(callers_are_forgotten_when_gone), cmocka_unit_test(many_callers_stay_apart),
              cmocka_unit_test(queue_follows_its_rule), cmocka_unit_test(each_visits_all_and_may_remove));
DI_TEST_GROUP(sched_pace, cmocka_unit_test(pace_learns_what_a_step_costs),
              cmocka_unit_test(without_a_goal_all_rows_run), cmocka_unit_test(goal_per_token_bounds_prompt_rows),
              cmocka_unit_test(goals_give_way_and_are_counted));
