// util.h: the one way this program refuses to go on; memory, texts, a clock and streams, which every part needs.
//
// CHECK(cond, "what was expected, what was found\n  -> what to do", ...) prints the message with file and line on stderr
// and exits with status 1; CHECK_WRITE, of what could not be written, with status 2. Every message for a user ends in a "->" line that names the command or flag
// that helps.
// It works in every build: nothing here depends on NDEBUG, and host code is never compiled with fast-math.
#pragma once
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#if defined(__GNUC__)
#define PRINTF_LIKE(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define PRINTF_LIKE(fmt, args)
#endif
#define CHECK(cond, ...) do { if (!(cond)) check_failed(EXIT_REFUSED, __FILE__, __LINE__, __VA_ARGS__); } while (0)
#define CHECK_WRITE(cond, ...) do { if (!(cond)) check_failed(EXIT_WRITE, __FILE__, __LINE__, __VA_ARGS__); } while (0)
#define CEIL_DIV(a, b) (((a) + (b) - 1) / (b))

// How a program ends, besides 0 and 128 + the signal that stopped it; README, "When things go wrong", says what each asks for.
enum { EXIT_REFUSED = 1, EXIT_WRITE, EXIT_DIVERGED, EXIT_LOST };

// Copies n bytes of text with ASCII control characters, other than newline and tab, as \x1b: text
// from a file must not drive the terminal. Text that does not fit is cut.
static inline char *text_escape(char *out, size_t cap, const char *text, size_t n) {
    size_t used = 0;
    for (size_t i = 0; i < n && used + 5 <= cap; i++) {
        unsigned char c = (unsigned char)text[i];
        bool control = (c < 0x20 && c != '\n' && c != '\t') || c == 0x7F;
        if (control) used += (size_t)snprintf(out + used, 5, "\\x%02x", c);
        else out[used++] = text[i];
    }
    out[used] = 0;
    return out;
}

// The same, of any length, on stdout.
static inline void text_print(const char *text, size_t n) {
    char shown[1024];
    for (size_t at = 0, piece; at < n; at += piece) {
        piece = n - at < 200 ? n - at : 200;
        fputs(text_escape(shown, sizeof shown, text + at, piece), stdout);
    }
}

PRINTF_LIKE(4, 5) static inline void check_failed(int status, const char *file, int line, const char *fmt, ...) {
    static char message[1 << 18], shown[1 << 19];
    const char *base = strrchr(file, '/');
    va_list args;
    va_start(args, fmt);
    vsnprintf(message, sizeof message, fmt, args);
    va_end(args);
    fflush(stdout);
    text_escape(shown, sizeof shown, message, strlen(message));
    fprintf(stderr, "error: %s\n  (%s:%d)\n", shown, base ? base + 1 : file, line);
    exit(status);
}

// Zeroed memory or a clear end. A step computes in what was taken before the first one; logs, saves and tasks take their own. It begins with a
// cache line, so that vectors of aligned rows lie in one line each. Large memory asks Linux for pages of 2 MiB: far fewer page faults, and products that read columns stay within the address cache
// (TLB). What is larger still all threads zero, which spreads it over the memories of a machine that has several.
static inline void *check_alloc(size_t bytes, const char *what) {
    const size_t line = 64, huge = 2 << 20;
    void *p = NULL;
    int large = bytes >= huge, failed = posix_memalign(&p, large ? huge : line, bytes ? bytes : 1);
    CHECK(!failed, "no memory for %s (%zu MiB)\n  -> a smaller --micro-batch, --seq or --model, or --recompute", what, bytes >> 20);
#ifdef MADV_HUGEPAGE
    if (large) madvise(p, bytes, MADV_HUGEPAGE);
#endif
#pragma omp parallel for schedule(static) if (bytes >= 32 * huge)
    for (size_t i = 0; i < bytes; i += huge) memset((char *)p + i, 0, bytes - i < huge ? bytes - i : huge);
    return p;
}

// Writes a formatted string of any length into buf, or ends if it does not fit: paths are never cut silently.
PRINTF_LIKE(3, 4) static inline char *check_format(char *buf, size_t cap, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(buf, cap, fmt, args);
    va_end(args);
    CHECK(n >= 0 && (size_t)n < cap, "a name or path longer than %zu bytes: %.60s...\n  -> use a shorter path", cap - 1, buf);
    return buf;
}

// A text that grows in memory: what is written between the two is in *text, *size bytes long, and is the caller's to free. glibc does not remember on such a stream
// that a write found no memory, and neither ferror nor fclose says so; but then the last piece finds none either.
static inline FILE *text_begin(char **text, size_t *size, const char *what) {
    FILE *f = open_memstream(text, size);
    CHECK(f, "no memory for %s\n  -> a smaller --model or --micro-batch", what);
    return f;
}

static inline void text_end(FILE *f, const char *last, const char *what) {
    bool whole = fputs(last, f) >= 0;
    CHECK(fclose(f) == 0 && whole, "no memory for %s\n  -> a smaller --model or --micro-batch", what);
}

// Of a clock that nobody sets.
static inline double clock_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Called first: where stdin, stdout or stderr is closed, the next file opened would take its number and be printed into.
static inline void check_streams_begin(void) {
    int fd = 0;
    while (fd >= 0 && fd <= STDERR_FILENO) fd = open("/dev/null", O_RDWR);
    if (fd >= 0) close(fd);
}

// Called last: what was printed has arrived.
static inline void check_streams_end(void) {
    CHECK_WRITE(fflush(stdout) == 0 && !ferror(stdout), "cannot write all of the output: %s\n  -> free space where stdout goes", strerror(errno));
}
