/* The pages that are embedded in the program: the chat page, the plots, their scripts and styles. Nothing is read from
 * a disk: what is not in the table does not exist. */
#include "server_internal.h"

#include <web_files.h> /* made by the build: CMakeLists.txt */

static const char *type_of(const char *path) {
    static const char *const types[][2] = {{".html", "text/html; charset=utf-8"},
                                           {".css", "text/css; charset=utf-8"},
                                           {".js", "text/javascript; charset=utf-8"},
                                           {".svg", "image/svg+xml"}};
    const char *end = strrchr(path, '.');
    for (size_t i = 0; end && i < DI_COUNT(types); i++) {
        if (strcmp(end, types[i][0]) == 0)
            return types[i][1];
    }
    return "application/octet-stream";
}

const di_web_file *di_web_find(const char *path) {
    const char *own = strcmp(path, "/") == 0 ? "chat.html" : strcmp(path, "/stats") == 0 ? "stats.html" : path;
    for (size_t i = 0; i < DI_COUNT(files); i++) {
        if (strcmp(files[i].path, own) == 0)
            return &files[i];
    }
    return NULL;
}

void di_run_web(di_exchange *x) {
    const di_web_file *file = di_web_find(x->rest);
    if (!file) {
        di_exchange_fail(x, 404, NULL, "there is no such file");
        return;
    }
    x->static_reply = file->data;
    x->static_len = (size_t)(file->end - file->data);
    x->content_type = type_of(file->path);
    di_exchange_answer(x, 200);
}
