/* What the files of the chat format share: appending to a prompt.
 *
 * chat.c writes messages, chat_tools.c the instruction block. Failures are sticky (di_prompt.failed, di_strbuf), so
 * that neither checks after each piece; di_chat_render reports them. */
#ifndef DI_CHAT_INTERNAL_H
#define DI_CHAT_INTERNAL_H

#include "chat.h"

void di_prompt_special(di_prompt *prompt, di_chat_special special);
void di_prompt_text(di_prompt *prompt, const char *s);
void di_prompt_bytes(di_prompt *prompt, const char *s, size_t n);

/* The instruction block of chat.md 4 with the tools that are not deferred, from its leading blank line on. */
void di_prompt_tool_block(di_prompt *prompt, const di_chat_tool *tools, size_t n_tools);
/* One line of JSON a tool, joined by LF; with_deferred: also those that are deferred. */
void di_prompt_tool_lines(di_prompt *prompt, const di_chat_tool *tools, size_t n_tools, bool with_deferred);

#endif
