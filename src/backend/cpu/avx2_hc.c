/* hc_mix and hc_post of the avx2 level: the body that all levels share, with this level's vectors. */
#include "lanes_avx2.h"

#include "hc_body.h"
