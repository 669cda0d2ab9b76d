/* hc_mix and hc_post of the portable level: the body that all levels share, with this level's vectors. */
#include "lanes_portable.h"

#include "hc_body.h"
