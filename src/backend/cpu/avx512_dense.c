/* rms_norm, quant, rope, engram_gate of the avx512 level: the body that all levels share, with this level's vectors. */
#include "lanes_avx512.h"

#include "dense_body.h"
