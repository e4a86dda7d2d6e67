// util.c: see util.h.
#include "util.h"
#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

// ------------------------------------------------------------------------------------------ errors

// The buffers are static, because the message may be that there is no memory.
void check_failed(int status, const char *file, int line, const char *fmt, ...) {
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

// A message may contain names from a file, so it is escaped.
bool error_set(char *error, const char *fmt, ...) {
    char message[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(message, sizeof message, fmt, args);
    va_end(args);
    text_escape(error, ERROR_CAP, message, strlen(message));
    return false;
}

// ------------------------------------------------------------------------------------------ memory

// Memory is aligned to cache lines, so no aligned vector straddles two. Large blocks ask Linux for
// pages of 2 MiB: far fewer page faults, and products that read columns stay within the address
// cache (TLB). All threads together zero the largest blocks, which spreads them over NUMA nodes.
void *check_alloc(size_t bytes, const char *what) {
    const size_t line = 64, huge = 2 << 20;
    bool large = bytes >= huge;
    void *p = NULL;
    CHECK(posix_memalign(&p, large ? huge : line, bytes ? bytes : 1) == 0,
          "no memory for %s (%zu MiB)\n"
          "  -> a smaller --micro-batch, --seq or --model, or --recompute",
          what, bytes >> 20);
#ifdef MADV_HUGEPAGE
    if (large) madvise(p, bytes, MADV_HUGEPAGE);
#endif
#pragma omp parallel for schedule(static) if (bytes >= 32 * huge)
    for (size_t i = 0; i < bytes; i += huge)
        memset((char *)p + i, 0, least(bytes - i, huge));
    return p;
}

// The size follows from n alone: no capacity is stored.
void *check_grow(void *list, int64_t n, size_t bytes, const char *what) {
    if (n & (n - 1)) return list;
    list = realloc(list, (n ? 2 * n : 1) * bytes);
    CHECK(list, "no memory for %s of length %lld\n  -> fewer or smaller files", what,
          (long long)n);
    return list;
}

// -------------------------------------------------------------------------------------------- text

// A truncated path would name another file.
char *check_format(char *buf, size_t cap, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(buf, cap, fmt, args);
    va_end(args);
    CHECK(n >= 0 && (size_t)n < cap,
          "a name or path longer than %zu bytes: %.60s...\n  -> use a shorter path", cap - 1, buf);
    return buf;
}

char *text_escape(char *out, size_t cap, const char *text, size_t n) {
    size_t used = 0;
    for (size_t i = 0; i < n && used + 5 <= cap; i++) {
        uint8_t c = (uint8_t)text[i];
        bool control = (c < 0x20 && c != '\n' && c != '\t') || c == 0x7F;
        if (control) used += snprintf(out + used, 5, "\\x%02x", c);
        else out[used++] = text[i];
    }
    out[used] = 0;
    return out;
}

// The stream grows the memory itself.
FILE *text_begin(char **text, size_t *size) {
    FILE *f = open_memstream(text, size);
    CHECK(f, "no memory for a text\n  -> a smaller --model or --micro-batch");
    return f;
}

// On such a stream glibc forgets that a write found no memory: ferror and fclose do not report it.
// But then the write of the last piece fails as well.
void text_end(FILE *f, const char *last) {
    bool whole = fputs(last, f) >= 0;
    CHECK(fclose(f) == 0 && whole, "no memory for a text\n  -> a smaller --model or --micro-batch");
}

// RFC 3629, section 4: the first byte gives the length; the second byte decides about overlong
// forms, surrogates and the last code.
size_t utf8_length(const char *text, size_t n) {
    const uint8_t *p = (const uint8_t *)text;
    if (p[0] < 0x80) return 1;
    size_t length = 2 + (p[0] >= 0xE0) + (p[0] >= 0xF0);
    if (p[0] < 0xC2 || p[0] > 0xF4 || n < length) return 0;
    for (size_t i = 1; i < length; i++)
        if ((p[i] & 0xC0) != 0x80) return 0;
    bool overlong = (p[0] == 0xE0 && p[1] < 0xA0) || (p[0] == 0xF0 && p[1] < 0x90);
    bool surrogate = p[0] == 0xED && p[1] > 0x9F;
    bool beyond = p[0] == 0xF4 && p[1] > 0x8F;
    return overlong || surrogate || beyond ? 0 : length;
}

// No character is longer than 4 bytes, and the final zero ends one that is cut short.
const char *utf8_end(const char *text) {
    for (size_t length = 1; *text && length; text += length) length = utf8_length(text, 4);
    return text;
}

// The inverse of utf8_length: 6 bits a byte after a first byte that tells how many follow.
char *utf8_put(char *out, uint32_t code) {
    static const uint8_t FIRST[] = {0, 0xC0, 0xE0, 0xF0};
    int more = (code >= 0x80) + (code >= 0x800) + (code >= 0x10000);  // bytes after the first
    *out++ = FIRST[more] | code >> 6 * more;
    while (more-- > 0) *out++ = 0x80 | (code >> 6 * more & 63);
    return out;
}

// ---------------------------------------------------------------------------------- clock, streams

double clock_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

// open returns the lowest free number.
void check_streams_begin(void) {
    int fd = 0;
    while (fd >= 0 && fd <= STDERR_FILENO) fd = open("/dev/null", O_RDWR);
    if (fd >= 0) close(fd);
}

// A full disk may show only when buffers are flushed, after the last print.
void check_streams_end(void) {
    CHECK_WRITE(fflush(stdout) == 0 && !ferror(stdout),
                "cannot write all of the output: %m\n  -> free space where stdout goes");
}
