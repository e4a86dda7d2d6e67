// util.h: errors, memory, text, a clock and standard streams, for every part of the program.
//
// CHECK(cond, "what was expected, what was found\n  -> what to do", ...) prints the message with
// file and line on stderr and exits with status 1 if cond is false. CHECK_WRITE does the same with
// status 2, for output that cannot be written. A message for a user ends in a "->" line that names
// the command or the flag that helps. Both are active in every build, unlike assert. The conversion
// %m prints errno in words, as strerror does; it takes no argument (glibc, musl).
#pragma once
#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PRINTF_LIKE(fmt, args) __attribute__((format(printf, fmt, args)))
#define CHECK(cond, ...) \
    ((cond) ? (void)0 : check_failed(EXIT_REFUSED, __FILE__, __LINE__, __VA_ARGS__))
#define CHECK_WRITE(cond, ...) \
    ((cond) ? (void)0 : check_failed(EXIT_WRITE, __FILE__, __LINE__, __VA_ARGS__))
#define CEIL_DIV(a, b) (((a) + (b) - 1) / (b))
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t clamp(int64_t x, int64_t low, int64_t high) {
    return x < low ? low : least(x, high);
}
// The hint after an error that leaves the run's checkpoints whole.
#define GO_ON "--resume required goes on from the last checkpoint"

// Exit statuses besides 0 and 128 + the signal that stopped the program. doc/failures.md says what
// to do after each.
enum { EXIT_REFUSED = 1, EXIT_WRITE, EXIT_DIVERGED, EXIT_LOST };

enum { ERROR_CAP = 256 };  // bytes of every `error`: why a function returned false

// CHECK and CHECK_WRITE call this. It never returns, and compilers keep it out of hot loops.
PRINTF_LIKE(4, 5) __attribute__((noreturn, cold))
void check_failed(int status, const char *file, int line, const char *fmt, ...);

// Zeroed memory; ends the program if there is not enough. `what` names its purpose in the message.
void *check_alloc(size_t bytes, const char *what);

// A list of n items, with memory for one more; the list may move. Its capacity doubles at powers of
// two, so n appends take linear time.
void *check_grow(void *list, int64_t n, size_t bytes, const char *what);

// Formats into buf; ends the program if the text does not fit, so no path is ever truncated.
PRINTF_LIKE(3, 4) char *check_format(char *buf, size_t cap, const char *fmt, ...);

// Formats the reason for a failure into error, cut to ERROR_CAP bytes, and returns false.
PRINTF_LIKE(2, 3) bool error_set(char *error, const char *fmt, ...);

// Copies n bytes of text. ASCII control characters other than newline and tab become escapes such
// as \x1b: text from a file must not control the terminal. Text that does not fit is truncated.
char *text_escape(char *out, size_t cap, const char *text, size_t n);

// A stream that writes into memory. After text_end, which writes the last piece, *text holds *size
// bytes and a zero, and the caller frees it.
FILE *text_begin(char **text, size_t *size);
void text_end(FILE *f, const char *last);

// Bytes of the UTF-8 character that begins at text, where n >= 1 bytes are left. 0: it is cut
// short, overlong, a surrogate or past U+10FFFF.
size_t utf8_length(const char *text, size_t n);
const char *utf8_end(const char *text);    // the first byte that is not UTF-8, or the final zero
char *utf8_put(char *out, uint32_t code);  // writes the character, returns the place after it

double clock_seconds(void);  // on the monotonic clock, which clock adjustments do not move

// A program calls these first and last. begin opens /dev/null for closed standard streams;
// otherwise the next file opened would take their number and receive the output. end fails if
// output could not be written.
void check_streams_begin(void);
void check_streams_end(void);

#ifdef __cplusplus
}
#endif
