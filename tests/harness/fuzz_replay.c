/* Runs a fuzz target over the files of its corpus, for builds without libFuzzer: CI replays the corpus under
 * sanitizers. Arguments are files or folders of files; none is an error, so that an empty corpus doesn't pass unseen.
 */
#include <dirent.h>
#include <errno.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int run_file(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) {
        fprintf(stderr, "%s: %s\n", path, strerror(errno));
        return 0;
    }
    uint8_t *data = NULL;
    size_t size = 0, cap = 0, n = 0;
    do {
        size += n;
        if (size == cap) {
            cap = cap ? cap * 2 : 4096;
            data = realloc(data, cap);
            if (!data) {
                fprintf(stderr, "%s: out of memory\n", path);
                fclose(file);
                return 0;
            }
        }
        n = fread(data + size, 1, cap - size, file);
    } while (n > 0);
    fclose(file);
    /* An exact copy, so that a sanitizer sees a read behind the end. */
    uint8_t *exact = malloc(size ? size : 1);
    if (exact) {
        memcpy(exact, data, size);
        LLVMFuzzerTestOneInput(exact, size);
    }
    free(exact);
    free(data);
    return 1;
}

int main(int argc, char **argv) {
    int n_files = 0;
    for (int i = 1; i < argc; i++) {
        DIR *dir = opendir(argv[i]);
        if (!dir) {
            n_files += run_file(argv[i]);
            continue;
        }
        struct dirent *entry;
        while ((entry = readdir(dir))) {
            char path[4096];
            if (entry->d_name[0] != '.' &&
                snprintf(path, sizeof path, "%s/%s", argv[i], entry->d_name) < (int)sizeof path) {
                n_files += run_file(path);
            }
        }
        closedir(dir);
    }
    printf("%d inputs\n", n_files);
    return n_files > 0 ? 0 : 1;
}
