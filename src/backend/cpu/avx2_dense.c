/* rms_norm, quant, rope, engram_gate of the avx2 level: the body that all levels share, with this level's vectors. */
#include "lanes_avx2.h"

#include "dense_body.h"
