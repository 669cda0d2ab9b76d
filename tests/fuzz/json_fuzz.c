/* The JSON reader and writer: what is read is written, read again and equal, in both styles; what is refused has a
 * message that is valid UTF-8. */
#include "base/base.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    di_json *v = NULL, *again = NULL;
    di_error err;
    if (di_json_parse(&v, (const char *)data, size, &err)) {
        DI_ASSERT(di_utf8_valid(err.message, strlen(err.message)));
        return 0;
    }
    for (int style = DI_JSON_COMPACT; style <= DI_JSON_SPACED; style++) {
        di_strbuf out = {0};
        di_json_write(&out, v, (di_json_style)style);
        DI_ASSERT(di_strbuf_status(&out, NULL) == DI_OK);
        DI_ASSERT(di_json_parse(&again, out.data, out.len, &err) == DI_OK);
        DI_ASSERT(di_json_equal(v, again));
        di_json_free(again);
        di_strbuf_deinit(&out);
    }
    di_json_free(v);
    return 0;
}
