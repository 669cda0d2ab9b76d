/* moe and moe_route of the portable level: the body that all levels share, with this level's vectors. */
#include "lanes_portable.h"

#include "moe_body.h"
