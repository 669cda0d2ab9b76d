/* DeepInfer: inference for DeepSeek-V4.1-Flash. This header is the whole public API; text.h and status.h can be used
 * alone. Every function that can fail returns a di_status and takes a `di_error *` last. Nothing in the library prints,
 * exits or aborts on bad input. */
#ifndef DEEPINFER_DEEPINFER_H
#define DEEPINFER_DEEPINFER_H

#include "deepinfer/status.h"
#include "deepinfer/text.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Version of this header, "major.minor.patch". */
#define DI_VERSION "0.1.0"

/* Version of the library, as DI_VERSION of the header that it was built with. */
DI_API const char *di_version(void);

#ifdef __cplusplus
}
#endif
#endif
