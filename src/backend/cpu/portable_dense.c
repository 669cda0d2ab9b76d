/* rms_norm, quant, rope, engram_gate of the portable level: the body that all levels share, with this level's vectors.
 */
#include "lanes_portable.h"

#include "dense_body.h"
