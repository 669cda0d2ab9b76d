/* attention of the portable level: the body that levels share, with this level's vectors, and the scratch of both. */
#include "lanes_portable.h"

#include "attention_body.h"

void di_cpu_need_portable_attention(const di_limits *limits, di_cpu_need *need) {
    di_cpu_need own = need_of(limits);
    di_cpu_need_raise(need, own.shared, own.worker);
}
