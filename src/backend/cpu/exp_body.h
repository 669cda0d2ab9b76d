/* di_expf of DI_LANES values: the operations of tensor/math_inline.h in their order, with selects for its conditions,
 * which compilers would make branches of. Included after lanes_<level>.h. */
#ifndef DI_CPU_EXP_BODY_H
#define DI_CPU_EXP_BODY_H

#include "lanes.h"
#include "tensor/math_inline.h"

/* a where mask is set, else b. */
DI_INLINE di_v di_v_select(di_vi mask, di_v a, di_v b) {
    return (di_v)(((di_vi)a & mask) | ((di_vi)b & ~mask));
}

/* Lane by lane a > b ? a : b. */
DI_INLINE di_v di_v_max(di_v a, di_v b) {
    return di_v_select(a > b, a, b);
}

DI_INLINE di_v di_v_exp(di_v x) {
    const di_v least = di_v_splat(DI_EXPF_MIN), most = di_v_splat(DI_EXPF_MAX), shift = di_v_splat(0x1.8p23f);
    di_v c = di_v_select(x < least, least, x);
    c = di_v_select(c > most, most, c);
    di_v kf = c * di_v_splat(0x1.715476p0f) + shift;
    di_vi k_exponent = (di_vi)((di_vu)kf << 23);
    kf = kf - shift;
    di_v r = (c - kf * di_v_splat(0x1.62e4p-1f)) - kf * di_v_splat(0x1.7f7d1cp-20f);
    di_v p = di_v_splat(0x1.a01a02p-13f);
    p = p * r + di_v_splat(0x1.6c16c2p-10f);
    p = p * r + di_v_splat(0x1.111112p-7f);
    p = p * r + di_v_splat(0x1.555556p-5f);
    p = p * r + di_v_splat(0x1.555556p-3f);
    p = p * r + di_v_splat(0.5f);
    di_v y = di_v_splat(1.0f) + (r + (r * r) * p);
    y = (di_v)((di_vi)y + k_exponent);
    y = (di_v)((di_vi)y & ~(x < least));
    y = di_v_select(x > most, di_v_splat(__builtin_inff()), y);
    return di_v_select(x != x, x, y);
}

#endif
