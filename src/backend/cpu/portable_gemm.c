/* gemm of the portable level: the body that all levels share, with this level's vectors. */
#include "lanes_portable.h"

#include "gemm_body.h"
