/* What speculation brings at most by the model of costs: the ratio that a measured one is set beside.
 *
 * For every length k the expected tokens of a step that verifies k drafts, over the predicted times of that step and of
 * the drafting round, against the step of one row. Confidences, which let a policy verify more where it is sure and
 * less where it isn't, are left out: a policy that uses them well can come out above. */
#include "engine_internal.h"

double di_core_speedup_bound(const di_core *core, const di_core_stats *held, int64_t context) {
    const di_spec_cost *cost = &core->runner.cost;
    if (core->runner.n_drafts == 0)
        return 1;
    if (!di_spec_cost_is_ready(cost) || !di_spec_cost_draft_is_ready(cost))
        return 0;
    double plain_ns = di_spec_cost_step_ns(cost, 1, context) - di_spec_cost_plain_saves_ns(cost, 1, context);
    double draft_ns = di_spec_cost_draft_ns(cost, 1);
    double tokens = 1, best = 1;
    for (int32_t k = 1; k <= core->runner.n_drafts && held->verified_at[k - 1] > 0; k++) {
        /* A draft is counted as accepted with all before it, so these are the products of the chances already. */
        tokens += (double)held->accepted_at[k - 1] / (double)held->verified_at[k - 1];
        double ns = di_spec_cost_step_ns(cost, 1 + k, context) + draft_ns;
        best = DI_MAX(best, tokens * plain_ns / ns);
    }
    return best;
}
