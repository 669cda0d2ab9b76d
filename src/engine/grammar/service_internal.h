/* What tests of the service replace: how a grammar is compiled, and the clock. */
#ifndef DI_GRAMMAR_SERVICE_INTERNAL_H
#define DI_GRAMMAR_SERVICE_INTERNAL_H

#include "grammar.h"

enum {
    DI_GRAMMAR_FAILURES_MAX = 64,   /* that are kept, */
    DI_GRAMMAR_FAILURE_SECONDS = 60 /* and for how long */
};

typedef struct di_grammar_service_hooks {
    /* As di_grammar_compile; called by several threads at once. */
    di_status (*compile)(void *ctx, di_grammar **out, const di_grammar_spec *spec, const di_grammar_limits *limits,
                         di_error *err);
    int64_t (*clock_ns)(void *ctx); /* called with the service's lock held, too */
    void *ctx;
    int64_t slice_ns; /* of a first attempt */
} di_grammar_service_hooks;

/* As di_grammar_service_create; hooks are copied. */
di_status di_grammar_service_make(di_grammar_service **out, const di_grammar_service_options *options,
                                  const di_grammar_service_hooks *hooks, di_error *err);

#endif
