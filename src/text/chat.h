/* The chat format: a conversation rendered into a prompt (chat.md, sections 1 to 8).
 *
 * A conversation is plain data in a request's arena: messages in order, the tools on offer, a response format, the
 * thinking flag and the effort. Rendering gives the prompt's text together with the byte ranges that are special
 * tokens; only what the renderer itself inserts is special, everything that came with a request is plain text, whatever
 * it spells. Ids come last: each special range is one id, each plain run between two of them is encoded on its own.
 * What a request body must look like, and which bodies are refused, is api/'s business. */
#ifndef DI_CHAT_H
#define DI_CHAT_H

#include "base/base.h"

#include "tokenizer.h"

/* Bytes with a length (they may hold NUL), borrowed from the request's arena or JSON. {NULL, 0} is the empty text. */
typedef struct di_chat_text {
    const char *data;
    size_t len;
} di_chat_text;

typedef enum di_chat_role {
    DI_CHAT_SYSTEM,
    DI_CHAT_USER,
    DI_CHAT_ASSISTANT,
    DI_CHAT_TOOL, /* the result of one call */
    DI_CHAT_REMINDER
} di_chat_role;

typedef enum di_chat_detail {
    DI_CHAT_DETAIL_HIGH,
    DI_CHAT_DETAIL_LOW,
    DI_CHAT_DETAIL_ORIGINAL,
    DI_CHAT_DETAIL_AUTO
} di_chat_detail;

/* One part of a message's content: text, or an image (text = its URL or data URL, which the renderer does not print).
 */
typedef struct di_chat_part {
    bool is_image;
    di_chat_detail detail; /* images: for preprocessing only */
    di_chat_text text;
    di_chat_text path; /* images: where it stands in the request body, for messages */
} di_chat_part;

typedef struct di_chat_call {
    di_chat_text id, name;
    di_chat_text arguments; /* JSON text as received */
} di_chat_call;

typedef struct di_chat_tool {
    di_chat_text name;
    bool has_description;
    di_chat_text description;
    const di_json
        *parameters; /* NULL: none given, shown as {}; with `strict` already normalised (di_chat_strict_schema) */
    bool has_strict, strict;
    bool is_deferred; /* not shown until a later system message loads it */
} di_chat_tool;

typedef struct di_chat_message {
    di_chat_role role;
    size_t n_parts;
    const di_chat_part *parts;
    bool has_reasoning;
    di_chat_text reasoning; /* assistant */
    size_t n_calls;
    const di_chat_call *calls; /* assistant */
    di_chat_text call_id;      /* tool: the call that it answers */
    size_t n_tools;
    const di_chat_tool *tools; /* system: the deferred tools that it loads */
    bool is_prefix;            /* assistant, last: stays open and the model goes on */
} di_chat_message;

typedef enum di_chat_tool_choice {
    DI_CHAT_CHOICE_AUTO,
    DI_CHAT_CHOICE_NONE,
    DI_CHAT_CHOICE_REQUIRED
} di_chat_tool_choice;

typedef enum di_chat_format {
    DI_CHAT_FORMAT_TEXT,
    DI_CHAT_FORMAT_JSON_OBJECT,
    DI_CHAT_FORMAT_JSON_SCHEMA,
    DI_CHAT_FORMAT_REGEX
} di_chat_format;

enum { DI_CHAT_EFFORT_LOW = 50, DI_CHAT_EFFORT_HIGH = 75, DI_CHAT_EFFORT_MAX = 100 };

/* Zeroed storage is an empty conversation without thinking. All pointers are borrowed: the arena and the JSON values
 * that they come from must outlive the conversation. */
typedef struct di_chat {
    size_t n_messages;
    const di_chat_message *messages;
    size_t n_tools;
    const di_chat_tool *tools;
    di_chat_tool_choice tool_choice;
    di_chat_format format;
    const di_json *schema; /* JSON_SCHEMA */
    bool thinking;
    int effort; /* 1..100, read with thinking on */
} di_chat;

/* At least one tool that is not deferred is offered to the model (tool choice not none). */
bool di_chat_offers_tools(const di_chat *chat);

/* Where the parser of the model's output begins (chat.md 7 and 9). */
typedef enum di_chat_stage {
    DI_CHAT_STAGE_CONTENT,           /* thinking off: content, leading LFs removed */
    DI_CHAT_STAGE_REASONING,         /* reasoning, leading LFs removed */
    DI_CHAT_STAGE_REASONING_RESUMED, /* reasoning, LFs kept */
    DI_CHAT_STAGE_CONTENT_RESUMED    /* content, LFs kept */
} di_chat_stage;
di_chat_stage di_chat_stage_of(const di_chat *chat);

/* The special tokens that the renderer inserts. */
typedef enum di_chat_special {
    DI_CHAT_BOS,
    DI_CHAT_EOS,
    DI_CHAT_SYS,
    DI_CHAT_USER_MARK,
    DI_CHAT_ASSISTANT_MARK,
    DI_CHAT_THINK,
    DI_CHAT_END_THINK,
    DI_CHAT_DSML,
    DI_CHAT_REMINDER_MARK,
    DI_CHAT_IMAGE,
    DI_CHAT_N_SPECIAL
} di_chat_special;

/* As printed in a prompt; the image's differs from its entry in the tokenizer. */
const char *di_chat_special_text(di_chat_special special);

/* Ids of the special tokens in one tokenizer. The last two may be absent (-1). */
typedef struct di_chat_vocab {
    int32_t ids[DI_CHAT_N_SPECIAL];
} di_chat_vocab;
/* Looks the spellings up; DI_ERR_UNSUPPORTED names the first that is missing among those that must exist. */
di_status di_chat_vocab_init(di_chat_vocab *vocab, const di_tokenizer *tok, di_error *err);

/* Half-open byte range of a prompt's text that is one special token. */
typedef struct di_prompt_mark {
    size_t begin, end;
    di_chat_special special;
} di_prompt_mark;

/* A rendered prompt; zeroed storage is a valid empty one. */
typedef struct di_prompt {
    di_strbuf text;
    di_prompt_mark *marks; /* owned; in order, not overlapping */
    size_t n_marks, cap;
    bool failed; /* memory was short while rendering; di_chat_render reports it */
} di_prompt;
void di_prompt_deinit(di_prompt *prompt);
void di_prompt_reset(di_prompt *prompt); /* keeps the memory */

/* Renders the conversation into prompt (reset first). Fails only when memory is short, or with DI_ERR_RANGE for an
 * effort outside 1..100: any sequence of messages has a rendering, and what must not be rendered is refused before. */
di_status di_chat_render(const di_chat *chat, di_prompt *prompt, di_error *err);

/* Appends the ids of prompt. DI_ERR_UNSUPPORTED when it uses a special token that the tokenizer lacks. */
di_status di_prompt_encode(const di_prompt *prompt, const di_tokenizer *tok, const di_chat_vocab *vocab, di_ids *out,
                           di_error *err);

/* The forced opening of a call block, `LF LF < DSML ` calls> LF`: part of the prompt with tool choice `required` and
 * thinking off; with thinking on the engine forces its ids after END_THINK. */
void di_prompt_open_calls(di_prompt *prompt);

/* The parameters of a `strict` tool, normalised: in every object schema `additionalProperties` is false and `required`
 * lists all properties, added keys after the others and `required` last. A new value that the caller frees; NULL when
 * memory is short or schemas nest deeper than 512. */
di_json *di_chat_strict_schema(const di_json *schema);

/* Appends the tool list as a grammar takes it: compact JSON, an array of {"type":"function","function":{name,
 * description, parameters, strict}} of all tools that are not deferred. */
void di_chat_tools_json(di_strbuf *out, const di_chat_tool *tools, size_t n_tools);

/* The grid of an image in the prompt (chat.md 8): H rows of W patch positions, each row closed by an end mark, between
 * a start and an end mark. */
typedef struct di_image_grid {
    int64_t width, height;               /* in positions: W and H */
    int64_t width_pixels, height_pixels; /* the size that the image is brought to, multiples of the patch */
    int64_t n_positions;                 /* H * (W + 1) + 2 */
} di_image_grid;
/* Of an image of width x height pixels; DI_ERR_RANGE unless both are 1 .. 2^31-1. */
di_status di_image_grid_of(int64_t width, int64_t height, di_image_grid *grid, di_error *err);

#endif
