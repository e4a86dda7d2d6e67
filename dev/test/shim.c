// shim.c: a disk that fails on purpose, as a library for LD_PRELOAD. It counts the calls that
// change something below the folder SHIM_DIR (absolute, and so are the paths the program uses):
// opening to write, write, fsync, renameat, mkdir, mkdirat, unlinkat. SHIM="KIND N" in the
// environment:
//   count 0   nothing fails; at its end the program says on stderr how many calls there were
//   kill N    the process gets SIGKILL before call N
//   power N   the same, and files end where their last fsync left them; names stay
//   error N   call N fails with EIO, which to fsync is a disk that is failing
//   sync N    the N-th fsync does
//   full N    there is room for N bytes
//   short N   every other write takes half of what it is given; which ones, N decides
// SHIM_LATE=FILE is apart from these: once the file exists, clocks are a day ahead.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static struct {
    char kind[16];
    long long n, calls, syncs, bytes;
    const char *dir;
} shim = {.n = -1};
// files that were opened to write: how much of each is on the disk
static struct { int fd; ino_t file; off_t safe; } opened[1024];
static int count;

__attribute__((constructor)) static void shim_begin(void) {
    const char *text = getenv("SHIM");
    shim.dir = getenv("SHIM_DIR");
    if (!shim.dir || !text || sscanf(text, "%15s %lld", shim.kind, &shim.n) != 2) shim.dir = NULL;
}
__attribute__((destructor)) static void shim_end(void) {
    if (shim.dir && shim.calls && !strcmp(shim.kind, "count"))
        fprintf(stderr, "shim: %lld calls\n", shim.calls);
}

static int is(const char *kind) { return !strcmp(shim.kind, kind); }
static int below(const char *path) {
    return shim.dir && !strncmp(path, shim.dir, strlen(shim.dir));
}
static int below_fd(int fd) {
    char name[64], path[4096];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t n = shim.dir ? readlink(name, path, sizeof path - 1) : -1;
    path[n > 0 ? n : 0] = 0;
    return n > 0 && below(path);
}

// Before a call that counts. Whether it is to fail.
static int fails(void) {
    int hit = ++shim.calls == shim.n;
    for (int i = 0; i < count && hit && is("power"); i++) {
        struct stat info;
        if (fstat(opened[i].fd, &info) == 0 && info.st_size > opened[i].safe &&
            ftruncate(opened[i].fd, opened[i].safe) != 0)
            abort();
    }
    if (hit && (is("kill") || is("power"))) kill(getpid(), SIGKILL);
    if (hit && is("error")) errno = EIO;
    return hit && is("error");
}

static void remember(int fd, off_t safe) {
    struct stat info;
    if (fd < 0 || fstat(fd, &info) != 0) return;
    for (int i = 0; i < count; i++)
        if (opened[i].file == info.st_ino) {
            opened[i].safe = safe < 0 ? info.st_size : safe;
            return;
        }
    if (safe < 0 || !is("power")) return;
    if (count == sizeof opened / sizeof *opened) abort();
    opened[count].fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    opened[count].file = info.st_ino;
    opened[count++].safe = safe;
}

// Opens and, where it counts, remembers what the file holds already, which is taken for safe.
static int open_at(int folder, const char *path, int flags, mode_t mode, int is_below) {
    int counts = is_below && (flags & O_ACCMODE) != O_RDONLY;
    if (counts && fails()) return -1;
    int fd = (int)syscall(SYS_openat, folder, path, flags, mode);
    struct stat info;
    if (counts && fd >= 0 && fstat(fd, &info) == 0) remember(fd, info.st_size);
    return fd;
}

#define MODE(flags, mode) do { \
    va_list args; \
    va_start(args, flags); \
    mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(args, mode_t) : 0; \
    va_end(args); } while (0)

int open(const char *path, int flags, ...) {
    mode_t mode;
    MODE(flags, mode);
    return open_at(AT_FDCWD, path, flags, mode, below(path));
}

int openat(int folder, const char *path, int flags, ...) {
    mode_t mode;
    MODE(flags, mode);
    return open_at(folder, path, flags, mode, below_fd(folder));
}

ssize_t write(int fd, const void *data, size_t n) {
    if (n == 0 || !below_fd(fd)) return syscall(SYS_write, fd, data, n);
    if (fails()) return -1;
    unsigned long long dice = (unsigned long long)(shim.n + shim.calls) * 0x9e3779b97f4a7c15ull;
    if (is("short") && n > 1 && dice >> 63) n /= 2;
    if (is("full") && shim.bytes + (long long)n > shim.n) n = (size_t)(shim.n - shim.bytes);
    if (n == 0) { errno = ENOSPC; return -1; }
    ssize_t written = syscall(SYS_write, fd, data, n);
    shim.bytes += written > 0 ? written : 0;
    return written;
}

int fsync(int fd) {
    if (!below_fd(fd)) return (int)syscall(SYS_fsync, fd);
    if (fails()) return -1;
    if (is("sync") && ++shim.syncs == shim.n) { errno = EIO; return -1; }
    int rc = (int)syscall(SYS_fsync, fd);
    if (rc == 0) remember(fd, -1);
    return rc;
}

int mkdir(const char *path, mode_t mode) {
    return below(path) && fails() ? -1 : (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode);
}
int mkdirat(int folder, const char *path, mode_t mode) {
    return below_fd(folder) && fails() ? -1 : (int)syscall(SYS_mkdirat, folder, path, mode);
}
int renameat(int folder, const char *from, int other, const char *to) {
    return below_fd(folder) && fails() ? -1
                                       : (int)syscall(SYS_renameat2, folder, from, other, to, 0);
}
int unlinkat(int folder, const char *path, int flags) {
    return below_fd(folder) && fails() ? -1 : (int)syscall(SYS_unlinkat, folder, path, flags);
}
int clock_gettime(clockid_t which, struct timespec *now) {
    const char *late = getenv("SHIM_LATE");
    int rc = (int)syscall(SYS_clock_gettime, which, now);
    if (late && access(late, F_OK) == 0) now->tv_sec += 24 * 60 * 60;
    return rc;
}
