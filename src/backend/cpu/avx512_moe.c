/* moe and moe_route of the avx512 level: the body that all levels share, with this level's vectors. */
#include "lanes_avx512.h"

#include "moe_body.h"
