/* The pace: how many prompt rows a step may have so that the goals hold (sched.h). */
#include "sched.h"

/* Where the goal can't be met, prompts go on all the same. */
#define ROWS_MIN 16

#define LEARN 0.1 /* weight of the newest step in a running mean */

static void mix(double *mean, double value) {
    *mean = *mean > 0 ? *mean + LEARN * (value - *mean) : value;
}

void di_pace_learn(di_pace *p, int64_t n_prompt_rows, int64_t n_decode_rows, int64_t step_ns) {
    double ns = (double)step_ns;
    if (n_prompt_rows == 0) {
        if (n_decode_rows > 0)
            mix(&p->base_ns, ns);
        return;
    }
    /* Without a measured base the whole step is charged to its prompt rows: too dear rather than too cheap. */
    double rest = ns - (n_decode_rows > 0 ? p->base_ns : 0);
    mix(&p->prompt_row_ns, DI_MAX(rest, 0.1 * ns) / (double)n_prompt_rows);
}

int64_t di_pace_rows(di_pace *p, const di_pace_ask *ask) {
    int64_t rows = DI_MIN(ask->rows_max, ask->rows_wanted);
    if (rows <= 0 || p->tpot_goal_ns <= 0 || ask->n_decode == 0 || p->prompt_row_ns <= 0)
        return DI_MAX(rows, 0);
    double left_ns = (double)p->tpot_goal_ns - p->base_ns;
    int64_t within = left_ns > 0 ? (int64_t)DI_MIN(left_ns / p->prompt_row_ns, 1e15) : 0;
    within = DI_MAX(within, ROWS_MIN);
    if (within >= rows)
        return rows;
    if (p->ttft_goal_ns <= 0 || ask->waited_ns < 0)
        return within;
    /* Two ways to go on: all rows at once, or only those within the goal of the others. */
    double fast_ns = p->base_ns + (double)ask->rows_to_go * p->prompt_row_ns;
    int64_t n_steps = DI_CEIL_DIV(ask->rows_to_go, within);
    double slow_ns = (double)n_steps * p->base_ns + (double)ask->rows_to_go * p->prompt_row_ns;
    double left_to_goal = (double)(p->ttft_goal_ns - ask->waited_ns);
    if (slow_ns <= left_to_goal)
        return within;
    if (fast_ns <= left_to_goal) {
        p->tpot_gave_way++;
        return rows;
    }
    p->ttft_gave_way++;
    return within;
}
