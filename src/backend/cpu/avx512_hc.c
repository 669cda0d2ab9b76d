/* hc_mix and hc_post of the avx512 level: the body that all levels share, with this level's vectors. */
#include "lanes_avx512.h"

#include "hc_body.h"
