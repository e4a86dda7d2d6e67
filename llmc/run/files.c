// files.c: see files.h.
//
// Data that was synced (fsync) survives a power cut, and so does a name whose folder was synced.
// Hence the order of file_commit: sync the data, rename, sync the folder. If only the process is
// killed, nothing that write has passed to the kernel is lost.
#include "files.h"
#include <fcntl.h>
#include <libgen.h>
#include <sys/stat.h>
#include <unistd.h>

static const size_t PIECE = 1 << 20;  // bytes hashed while they are still in the cache

// --------------------------------------------------------------------------------------- questions

bool file_exists(const char *path) { return access(path, F_OK) == 0; }

// Links are followed.
bool is_folder(const char *path) {
    struct stat info;
    return stat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

char *path_join(char *path, const char *folder, const char *name) {
    return check_format(path, PATH_CAP, "%s/%s", folder, name);
}

// "a/b" and "a/b/" -> "a"; "a" -> "."; "/a" -> "/". dirname changes its argument, and may return a
// constant.
char *file_parent(char *dir, const char *path) {
    char copy[PATH_CAP];
    check_format(copy, sizeof copy, "%s", path);
    return check_format(dir, PATH_CAP, "%s", dirname(copy));
}

// No path that comes here ends in a slash.
const char *file_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

// ----------------------------------------------------------------------------------------- reading

// O_NONBLOCK: open does not wait for the other end of a pipe, which may never come.
int file_open(const char *path, int64_t *size) {
    struct stat info = {0};  // of an open file: fstat does not fail
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return -1;
    fstat(fd, &info);
    *size = info.st_size;
    if (S_ISREG(info.st_mode)) return fd;
    close(fd);
    errno = S_ISDIR(info.st_mode) ? EISDIR : ENOTSUP;
    return -1;
}

// The text of strerror for ENOTSUP, "operation not supported", would not tell what is wrong.
const char *file_error(void) {
    return errno == ENOTSUP ? "it is a pipe or device" : strerror(errno);
}

// A read may be cut short by a signal, or by a file system over a network.
int64_t file_read_at(int fd, void *out, int64_t bytes, int64_t offset) {
    int64_t done = 0;
    while (done < bytes) {
        ssize_t n = pread(fd, (char *)out + done, bytes - done, offset + done);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return -1;
        if (n == 0) break;
        done += n;
    }
    return done;
}

// malloc, not check_alloc: the caller's message names the file that does not fit into memory.
char *file_read(const char *path, int64_t most, size_t *n) {
    int64_t size;
    int fd = file_open(path, &size);
    if (fd < 0) return NULL;
    // The size is known before any memory is taken.
    char *text = size > most ? NULL : malloc(size + 1);
    int64_t got = text ? file_read_at(fd, text, size, 0) : -1;
    int problem = size > most ? EFBIG : errno;
    close(fd);
    if (got >= 0) {
        text[*n = got] = 0;
        return text;
    }
    free(text);
    errno = problem;
    return NULL;
}

// The hash counts its bytes: its length is the offset of the next piece.
bool file_hash(const char *path, Hash *hash, _Atomic int64_t *done) {
    int64_t size, got;
    int fd = file_open(path, &size);
    *hash = hash_begin();
    if (fd < 0) return false;
    char *buffer = check_alloc(PIECE, "a checksum");
    while ((got = file_read_at(fd, buffer, PIECE, hash->length)) > 0) {
        hash_add(hash, buffer, got);
        if (done) *done += got;
    }
    int problem = errno;  // of the read, if it failed
    free(buffer);
    close(fd);
    errno = problem;
    return got == 0;
}

// ----------------------------------------------------------------------------------------- writing

void file_begin(FileWriter *w, int folder, const char *path) {
    w->folder = folder;
    w->hash = hash_begin();
    check_format(w->path, sizeof w->path, "%s", path);
    const char *temp = file_name(check_format(w->temp, sizeof w->temp, "%s.tmp", path));
    // O_EXCL and O_NOFOLLOW: the file is new and this process's own, whatever lay there.
    unlinkat(folder, temp, 0);
    w->fd = openat(folder, temp, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    CHECK_WRITE(w->fd >= 0,
                "cannot create %s: %m\n  -> check that its folder exists and may be written to",
                w->temp);
}

// A write may be cut short (a full disk, a signal). The write of the rest then reports why.
void file_add(FileWriter *w, const void *data, size_t n) {
    const char *p = data;
    while (n) {
        ssize_t written = write(w->fd, p, least(n, PIECE));
        if (written < 0 && errno == EINTR) continue;
        CHECK_WRITE(written > 0,
                    "cannot write %s after %lld bytes: %m\n"
                    "  -> free space on that disk, or write to another one",
                    w->temp, (long long)w->hash.length);
        hash_add(&w->hash, p, written);
        p += written;
        n -= written;
    }
}

// fsync before rename: otherwise a crash may leave an empty file under the new name.
Hash file_commit(FileWriter *w) {
    bool ok = fsync(w->fd) == 0 && close(w->fd) == 0 &&
              renameat(w->folder, file_name(w->temp), w->folder, file_name(w->path)) == 0;
    CHECK_WRITE(ok, "cannot finish %s: %m\n  -> free space on that disk, or write to another one",
                w->path);
    folder_sync(w->folder, w->path);
    return w->hash;
}

// For files that fit into memory: config.json, state.json, the manifest, a tokenizer.
Hash file_write_in(int folder, const char *path, const void *data, size_t n) {
    FileWriter w;
    file_begin(&w, folder, path);
    file_add(&w, data, n);
    return file_commit(&w);
}

// ----------------------------------------------------------------------------------------- folders

// A new name is on the disk only when its folder is synced. Some file systems cannot sync folders
// (EINVAL).
void folder_sync(int folder, const char *path) {
    char dir[PATH_CAP];
    CHECK_WRITE(fsync(folder) == 0 || errno == EINVAL,
                "cannot sync the folder %s: %m\n  -> check the disk for errors",
                file_parent(dir, path));
}

// The folder stays open for as long as a run writes into it.
int folder_open(const char *path) {
    int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    CHECK_WRITE(folder >= 0,
                "cannot open the folder %s: %m\n  -> check that it exists and may be written to",
                path);
    return folder;
}

// O_NOFOLLOW: a link of that name is an error (ELOOP).
static int open_in(int parent, const char *name) {
    return openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

int folder_make_in(int parent, const char *path) {
    const char *name = file_name(path);
    int fd = mkdirat(parent, name, 0777) == 0 ? open_in(parent, name) : -1;
    CHECK_WRITE(fd >= 0,
                "cannot make the folder %s: %m\n"
                "  -> free space on that disk, or move away a file or link of that name",
                path);
    return fd;
}

// Like mkdir -p: tries the innermost folder first.
bool folder_make(const char *path) {
    char above[PATH_CAP];
    bool has_parent = strlen(file_parent(above, path)) < strlen(path);  // not "." or "/"
    bool made = mkdir(path, 0777) == 0;
    if (!made && errno == ENOENT && has_parent && (folder_make(above) || errno == EEXIST))
        made = mkdir(path, 0777) == 0;
    if (!made) return false;  // errno says why
    int folder = folder_open(above);
    folder_sync(folder, path);
    close(folder);
    return true;
}

// unlinkat fails for a folder with EISDIR on Linux, with EPERM elsewhere. closedir closes fd.
bool folder_remove(int folder, const char *name) {
    if (unlinkat(folder, name, 0) == 0 || errno == ENOENT) return true;
    if (errno != EISDIR && errno != EPERM) return false;
    int fd = open_in(folder, name);
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    if (!d) return false;
    // A folder inside is not removed; then the last unlinkat fails.
    for (struct dirent *e; (e = readdir(d));)
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, "..")) unlinkat(fd, e->d_name, 0);
    closedir(d);
    return unlinkat(folder, name, AT_REMOVEDIR) == 0;
}
