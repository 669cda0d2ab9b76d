/* Writes docs/options.md from the table of options: the target `docs`. The one argument is the file to write. */
#include "base/base.h"

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: options_doc FILE\n");
        return 2;
    }
    di_strbuf out = {0};
    di_options_markdown(&out);
    FILE *file = fopen(argv[1], "w");
    bool is_ok = file && !out.failed && fwrite(out.data, 1, out.len, file) == out.len;
    if (file && fclose(file) != 0) {
        is_ok = false;
    }
    if (!is_ok) {
        perror(argv[1]);
    }
    di_strbuf_deinit(&out);
    return is_ok ? 0 : 1;
}
