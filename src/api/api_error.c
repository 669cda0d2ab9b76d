/* Error bodies: one message, in the words of whichever API was asked.
 *
 * A status of ours becomes an HTTP status by the list in status.h; types and codes go by the HTTP status, since the
 * server has reasons of its own (keys, paths, sizes) that are no status of the engine. */
#include "api.h"

const char *di_status_error_type(di_status status) {
    if (status == DI_ERR_BUSY)
        return "rate_limit_error";
    return di_status_http(status) < 500 && status != DI_ERR_CANCELLED ? "invalid_request_error" : "server_error";
}

static const char *openai_type(int http_status) {
    switch (http_status) {
    case 401:
        return "authentication_error";
    case 403:
        return "permission_error";
    case 429:
        return "rate_limit_error";
    default:
        return http_status < 500 ? "invalid_request_error" : "server_error";
    }
}

/* The code is the type where there is nothing more to say. */
static const char *openai_code(int http_status, const char *param) {
    if (http_status == 401) {
        return "invalid_api_key";
    }
    if (http_status == 404 && strcmp(param, "model") == 0) {
        return "model_not_found";
    }
    return http_status == 503 ? "service_unavailable" : openai_type(http_status);
}

static const char *anthropic_type(int http_status) {
    switch (http_status) {
    case 401:
        return "authentication_error";
    case 403:
        return "permission_error";
    case 404:
        return "not_found_error";
    case 413:
        return "request_too_large";
    case 429:
        return "rate_limit_error";
    case 503:
    case 529:
        return "overloaded_error";
    default:
        return http_status < 500 ? "invalid_request_error" : "api_error";
    }
}

/* A string, or null for none. */
static void write_text(di_strbuf *out, const char *text) {
    if (text && text[0]) {
        di_json_write_string(out, text, strlen(text));
    } else {
        di_strbuf_puts(out, "null");
    }
}

/* Messages may quote a request, cut anywhere. */
static void write_message(di_strbuf *out, const char *message) {
    di_strbuf repaired = {0};
    di_utf8_repair(&repaired, message, strlen(message));
    di_json_write_string(out, di_strbuf_str(&repaired), repaired.len);
    out->failed = out->failed || repaired.failed;
    di_strbuf_deinit(&repaired);
}

static void write_openai(di_strbuf *out, const char *message, const char *type, const char *param, const char *code) {
    di_strbuf_puts(out, "{\"message\":");
    write_message(out, message);
    di_strbuf_printf(out, ",\"type\":\"%s\",\"param\":", type);
    write_text(out, param);
    di_strbuf_printf(out, ",\"code\":\"%s\"}", code);
}

void di_request_error_json(di_strbuf *out, const di_request *request, di_status status, const di_error *err) {
    const char *type = di_status_error_type(status);
    write_openai(out, err->message, type, request->vendor_compat ? NULL : request->param, type);
}

static void write_anthropic(di_strbuf *out, const char *message, int http_status, const char *param,
                            const char *request_id) {
    di_strbuf_printf(out, "{\"type\":\"error\",\"error\":{\"type\":\"%s\",\"message\":", anthropic_type(http_status));
    write_message(out, message);
    if (http_status == 400 && strcmp(param, "thread") == 0) {
        /* The code by which clients know that they have to send whole conversations. */
        di_strbuf_puts(out, ",\"details\":{\"error_code\":\"thread_unsupported_request\"}");
    }
    di_strbuf_puts(out, "},\"request_id\":");
    write_text(out, request_id);
    di_strbuf_putc(out, '}');
}

void di_api_error_json(di_strbuf *out, di_api_kind api, int http_status, const char *message, const char *param,
                       const char *request_id) {
    param = param ? param : "";
    if (api == DI_API_MESSAGES) {
        write_anthropic(out, message, http_status, param, request_id);
        return;
    }
    di_strbuf_puts(out, "{\"error\":");
    write_openai(out, message, openai_type(http_status), param, openai_code(http_status, param));
    di_strbuf_putc(out, '}');
}
