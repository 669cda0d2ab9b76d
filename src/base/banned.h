/* Functions that this project doesn't use, made unusable; the build includes this file ahead of every source file.
 *
 * They write without a bound, keep hidden state, or read numbers without telling an error. The headers that declare
 * them come first, because a poisoned name may not appear again, not even in a declaration. In their place: di_strbuf,
 * snprintf, memcpy with a length, di_parse_i64 and its kin. */
#ifndef DI_BASE_BANNED_H
#define DI_BASE_BANNED_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#pragma GCC poison strcpy stpcpy strcat strncat strncpy strtok sprintf vsprintf gets
#pragma GCC poison atoi atol atoll atof tmpnam tempnam mktemp rand srand

#endif
