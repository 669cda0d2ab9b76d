/* Text: from bytes to token ids and back, the chat format, and the parser of the model's output.
 *
 * Owns: tokenizer.json (pre-tokenizer, BPE, added tokens), incremental detokenization, the Engram class map, chat
 * rendering, output parsing. Has no notion of a tensor, a request's parameters or a protocol. This is the one header of
 * the folder that other folders include; the files it includes are its chapters. */
#ifndef DI_TEXT_H
#define DI_TEXT_H

#include "base/base.h"

#include "tokenizer.h"
#include "chat.h"
#include "parser.h"

#endif
