// tokenizer.c: any bytes as a tokenizer file. A file that opens takes a fixed text to tokens and
// back, and the input itself, which may be refused.
//
// First byte, lowest bit: the rest is the file as it stands. Else sixteen words of header follow,
// without the 960 zeros, and with the next bit the 256 single bytes come before the tokens, so that
// the fuzzer need not find out that encoding wants them all.
#include "fuzz.h"
#include "../../llmc/run/tokenizer.h"
#include "../../llmc/run/util.h"

enum { WORDS = 16, LONG = 600 };

static const char TEXT[] = "To be, or  not to be: I'll've DON'T 1234 caf\303\251 \342\202\254 "
                           "\360\237\231\202\n\t x\302\240y <s>!\r\n  7  ";

// Tokens are those of the table, in number at most what tokenizer.h says. Their bytes are the text,
// unless a prefix goes before it or bytes have tokens of their own, whose text nobody checks.
static void encode_and_back(const Tokenizer *t, const char *text, size_t n) {
    int32_t *tokens = check_alloc((2 * n + 1) * sizeof *tokens, "tokens");
    int64_t count = tokenizer_encode(t, text, n, tokens);
    size_t at = 0, length;
    must(count >= 0 && count <= (int64_t)(2 * n + 1));
    for (int64_t i = 0; i < count; i++) {
        const char *bytes = tokenizer_decode(t, tokens[i], &length);
        if (t->how.prefix || t->how.bytes) continue;
        must(length <= n - at && memcmp(text + at, bytes, length) == 0);
        at += length;
    }
    must(t->how.prefix || t->how.bytes || at == n);
    free(tokens);
}

static void write_file(char *path, const uint8_t *data, size_t size) {
    if (data[0] & 1) {
        fuzz_file(path, "tokenizer.bin", data + 1, size - 1);
        return;
    }
    size_t words = size - 1 < 4 * WORDS ? size - 1 : 4 * WORDS, at = TOKENIZER_HEADER_BYTES;
    uint8_t *bytes = calloc(1, TOKENIZER_HEADER_BYTES + 512 + size);
    memcpy(bytes, data + 1, words);
    for (int i = 0; (data[0] & 2) && i < 256; i++, at += 2) {
        bytes[at] = 1;
        bytes[at + 1] = (uint8_t)i;
    }
    memcpy(bytes + at, data + 1 + words, size - 1 - words);
    fuzz_file(path, "tokenizer.bin", bytes, at + size - 1 - words);
    free(bytes);
}

static void use(const uint8_t *data, size_t size) {
    char path[FUZZ_PATH], error[256] = "", word[LONG];
    Tokenizer t;
    size_t n;
    write_file(path, data, size);
    if (!tokenizer_open(path, &t, error)) {
        must(*error);
        return;
    }
    must(t.end >= 0 && t.end < t.count);
    for (int32_t i = 0; i < t.count; i++) {
        const char *bytes = tokenizer_decode(&t, i, &n);
        int32_t token = tokenizer_find(&t, bytes, n);
        must(n >= 1 && n <= 255 && (t.how.order || token == i || i == t.end));
        must(token < 0 || (token < t.count && token != t.end));
    }
    memset(word, 'x', sizeof word);
    encode_and_back(&t, TEXT, sizeof TEXT - 1);
    encode_and_back(&t, word, sizeof word);
    encode_and_back(&t, (const char *)data, size);
    tokenizer_close(&t);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size) fuzz_once(use, data, size, false);
    return 0;
}
