/* moe and moe_route of the neon level: the body that all levels share, with this level's vectors. */
#include "lanes_neon.h"

#include "moe_body.h"
