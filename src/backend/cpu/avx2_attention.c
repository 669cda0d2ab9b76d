/* attention of the avx2 level: the body that levels share, with this level's vectors. */
#include "lanes_avx2.h"

#include "attention_body.h"
