// tokenize.c: text to the tokens of a tokenizer, as int32, and how fast.   build/tokenize
// tokenizer.bin < text > tokens A NUL byte separates texts, and -1 their tokens.
#include <time.h>
#include "../../llmc/run/tokenizer.h"
#include "../../llmc/run/util.h"

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int main(int argc, char **argv) {
    CHECK(argc == 2,
          "expected the name of a tokenizer, found %d arguments\n  -> build/tokenize tokenizer.bin "
          "< text > tokens",
          argc - 1);
    Tokenizer t;
    char error[ERROR_CAP];
    CHECK(tokenizer_open(argv[1], &t, error),
          "%s: %s\n  -> python3 data/get.py tokenizer --out FILE writes a sound one", argv[1],
          error);
    char *text = NULL;
    size_t n = 0, room = 0;
    for (size_t got = 1; got; n += got) {
        if (room - n < 1 << 20) text = realloc(text, room = 2 * room + (1 << 20));
        CHECK(text, "no memory for %zu bytes of text\n  -> a part of it at a time", room);
        got = fread(text + n, 1, room - n, stdin);
    }
    int32_t *tokens = check_alloc((2 * n + 1) * sizeof *tokens, "the tokens");
    int64_t count = 0;
    double start = seconds();
    for (size_t at = 0; at < n;) {
        const char *nul = memchr(text + at, 0, n - at);
        size_t end = nul ? (size_t)(nul - text) : n;
        count += tokenizer_encode(&t, text + at, end - at, tokens + count);
        if (nul) tokens[count++] = -1;
        at = end + 1;
    }
    double took = seconds() - start;
    fprintf(stderr, "%zu bytes, %lld tokens, %.4f s, %.1f MB/s\n", n, (long long)count, took,
            (double)n * 1e-6 / took);
    bool written = fwrite(tokens, sizeof *tokens, (size_t)count, stdout) == (size_t)count &&
                   fflush(stdout) == 0;
    CHECK(written, "expected to write %lld tokens, found: %s\n  -> free disk space",
          (long long)count, strerror(errno));
    tokenizer_close(&t);
    free(tokens);
    free(text);
    return 0;
}
