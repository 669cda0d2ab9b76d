/* The lines of --stats about speculative decoding: what was verified and held, place by place in a round, what the
 * confidences were worth, what it saved. */
#include "cli_model.h"

/* Nothing of what was verified is left out, but empty places and tenths are. */
static void print_places(const di_core_stats *s) {
    fputs("drafts that held with all before them:", stderr);
    for (int j = 0; j < DI_SPEC_DRAFTS_MAX; j++) {
        if (s->verified_at[j] > 0)
            fprintf(stderr, "%s %d. %lld of %lld (%.1f %%)", j ? "," : "", j + 1, (long long)s->accepted_at[j],
                    (long long)s->verified_at[j], 100 * (double)s->accepted_at[j] / (double)s->verified_at[j]);
    }
    fputc('\n', stderr);
}

static void print_calibration(const di_core_stats *s) {
    int64_t n = 0;
    for (int i = 0; i < DI_SPEC_BINS; i++)
        n += s->calibration_n[i];
    if (n == 0)
        return;
    fprintf(stderr, "confidences: off by %.3f on average\n  confidence  drafts   mean    held\n", s->draft_error);
    for (int i = 0; i < DI_SPEC_BINS; i++) {
        double count = (double)s->calibration_n[i];
        if (s->calibration_n[i] > 0)
            fprintf(stderr, "  %.1f .. %.1f %8lld  %.3f %5.1f %%\n", (double)i / DI_SPEC_BINS,
                    (double)(i + 1) / DI_SPEC_BINS, (long long)s->calibration_n[i], s->calibration_sum[i] / count,
                    100 * (double)s->calibration_held[i] / count);
    }
}

void di_cli_print_draft_stats(const di_core_stats *s) {
    if (s->n_draft_rounds > 0 || s->draft_tokens > 0) {
        int64_t n_verifications = DI_MAX(s->verified_at[0], 1);
        fprintf(stderr,
                "drafts: made in %lld rounds of a request, %lld verified, %lld of them held, %.2f tokens a "
                "verification; drafting %.3f s",
                (long long)s->n_draft_rounds, (long long)s->draft_tokens, (long long)s->accepted_tokens,
                s->verified_at[0] > 0 ? 1 + (double)s->accepted_tokens / (double)n_verifications : 1.0,
                (double)s->draft_ns * 1e-9);
        if (s->n_draft_rounds > 0)
            fprintf(stderr, ", %s %.3f s by the model of step times", s->saved_ns < 0 ? "lost" : "saved",
                    (double)(s->saved_ns < 0 ? -s->saved_ns : s->saved_ns) * 1e-9);
        fputc('\n', stderr);
    }
    if (s->draft_tokens > 0)
        print_places(s);
    print_calibration(s);
    if (s->n_tested > 0)
        fprintf(stderr,
                "rejection: %lld drafts tested, %.1f %% expected to hold by their distributions; shared noise would "
                "have kept at least %.1f %%\n",
                (long long)s->n_tested, 100 * s->expected_sum / (double)s->n_tested,
                100 * s->bound_sum / (double)s->n_tested);
}
