/* gemm of the neon level: the body that all levels share, with this level's vectors. */
#include "lanes_neon.h"

#include "gemm_body.h"
