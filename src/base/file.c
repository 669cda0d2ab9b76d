/* Files: read-only mappings, whole-file reads, path joining.
 *
 * A file that isn't there and one that may not be read are both DI_ERR_NOT_FOUND: to the person at the keyboard they
 * are one case, "the file that you named can't be had", and share an exit status. */
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "error.h"

/* An error from errno that names the path and, where the cause is common, what to do. */
static di_status fail_errno(di_error *err, const char *path, const char *what, int code) {
    switch (code) {
    case ENOENT:
    case ENOTDIR:
        return di_fail(err, DI_ERR_NOT_FOUND, "'%s': no such file", path);
    case EACCES:
    case EPERM:
        return di_fail(err, DI_ERR_NOT_FOUND, "'%s': permission denied, make it readable for this user", path);
    case ENOMEM:
        return di_fail(err, DI_ERR_MEMORY, "'%s': %s: out of memory", path, what);
    default:
        return di_fail(err, DI_ERR_IO, "'%s': %s: %s", path, what, strerrordesc_np(code));
    }
}

di_status di_mapping_open(di_mapping *map, const char *path, di_error *err) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return fail_errno(err, path, "open", errno);
    }
    di_status st = DI_OK;
    struct stat info;
    if (fstat(fd, &info) != 0) {
        st = fail_errno(err, path, "stat", errno);
    } else if (!S_ISREG(info.st_mode)) {
        st = di_fail(err, DI_ERR_IO, "'%s': expected a regular file, found a %s", path,
                     S_ISDIR(info.st_mode) ? "folder" : "special file");
    } else if (info.st_size == 0) {
        *map = (di_mapping){0};
    } else {
        void *data = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_SHARED, fd, 0);
        if (data == MAP_FAILED) {
            st = fail_errno(err, path, "map", errno);
        } else {
            *map = (di_mapping){.data = data, .n_bytes = (size_t)info.st_size};
        }
    }
    close(fd); /* the mapping keeps the file */
    return st;
}

void di_mapping_close(di_mapping *map) {
    if (map->data) {
        munmap((void *)(uintptr_t)map->data, map->n_bytes);
    }
    *map = (di_mapping){0};
}

di_status di_file_read(const char *path, size_t max_bytes, di_strbuf *out, di_error *err) {
    bool is_stdin = path[0] == '-' && path[1] == '\0';
    const char *name = is_stdin ? "standard input" : path;
    int fd = is_stdin ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return fail_errno(err, path, "open", errno);
    }
    di_status st = DI_OK;
    size_t n_read = 0;
    for (;;) {
        char chunk[65536];
        ssize_t n = read(fd, chunk, sizeof chunk);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            st = fail_errno(err, name, "read", errno);
            break;
        }
        if (n == 0) {
            break;
        }
        if ((size_t)n > max_bytes - n_read) {
            st = di_fail(err, DI_ERR_RANGE, "'%s': more than %zu bytes", name, max_bytes);
            break;
        }
        n_read += (size_t)n;
        di_strbuf_append(out, chunk, (size_t)n);
    }
    if (!is_stdin) {
        close(fd);
    }
    return st ? st : di_strbuf_status(out, err);
}

bool di_path_exists(const char *path) {
    struct stat info;
    return stat(path, &info) == 0;
}

bool di_path_is_dir(const char *path) {
    struct stat info;
    return stat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

void di_path_join(di_strbuf *out, const char *dir, const char *name) {
    di_strbuf_reset(out);
    di_strbuf_puts(out, dir);
    if (out->len > 0 && out->data[out->len - 1] != '/') {
        di_strbuf_putc(out, '/');
    }
    di_strbuf_puts(out, name);
}
