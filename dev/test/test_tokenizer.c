// test_tokenizer.c: the pieces of each pattern and the order of merges on examples worked by hand,
// merging against a slow version written from the definition, special tokens, SentencePiece's
// characters, text that comes back from its tokens, and files that are refused. The tokenizers are
// made here, a few hundred tokens each; dev/test/test_tokenizer.py compares with tiktoken and
// tokenizers over megabytes.
#include <fcntl.h>
#include <time.h>
#include <unistd.h>
#include "../../llmc/rand.h"
#include "../../llmc/run/tokenizer.h"
#include "test.h"

enum { FILE_MOST = 1 << 15, FIRST_MERGE = 256 };

typedef struct {
    unsigned char bytes[FILE_MOST];
    size_t n;
} Image;  // a tokenizer's file in memory

static void put_word(Image *m, size_t at, uint32_t word) {
    memcpy(m->bytes + at, &word, sizeof word);
}

// Counts one more in a word of the header.
static void count_one(Image *m, int index) {
    uint32_t word;
    memcpy(&word, m->bytes + 4 * index, sizeof word);
    put_word(m, 4 * (size_t)index, word + 1);
}

static void put_token(Image *m, const char *bytes, size_t n) {
    m->bytes[m->n] = (unsigned char)n;
    memcpy(m->bytes + m->n + 1, bytes, n);
    m->n += 1 + n;
    count_one(m, TOKENIZER_COUNT);
}

static void put_range(Image *m, int kind, uint32_t first, uint32_t last) {
    put_word(m, m->n, first);
    put_word(m, m->n + 4, last);
    m->n += 8;
    count_one(m, TOKENIZER_RANGES + kind - CLASS_LETTER);
}

// Header and single bytes; their ids are scrambled, so that a byte is not its own token.
static void begin_image(Image *m) {
    memset(m, 0, sizeof *m);
    m->n = TOKENIZER_HEADER_BYTES;
    put_word(m, 0, TOKENIZER_MAGIC);
    put_word(m, 4, 2);
    for (int i = 0; i < 256; i++) put_token(m, &(char){(char)(7 * i + 33)}, 1);
}

// Excerpts of Unicode's classes. A character in no range is other: punctuation, marks, emoji.
static void put_ranges(Image *m) {
    static const uint32_t LETTERS[][2] = {{'A', 'Z'},       {'a', 'z'},        {0xAA, 0xAA},
                                          {0xC0, 0xD6},     {0xD8, 0xF6},      {0xF8, 0x2C1},
                                          {0x391, 0x3A1},   {0x3A3, 0x3FF},    {0x4E00, 0x9FFF},
                                          {0xAC00, 0xD7A3}, {0x1D400, 0x1D433}};
    static const uint32_t NUMBERS[][2] = {
        {'0', '9'}, {0xB2, 0xB3}, {0xB9, 0xB9}, {0x660, 0x669}, {0x1D7CE, 0x1D7FF}};
    static const uint32_t SPACES[][2] = {
        {9, 13},          {' ', ' '},       {0x85, 0x85},     {0xA0, 0xA0},     {0x1680, 0x1680},
        {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F}, {0x3000, 0x3000}};
    for (size_t i = 0; i < sizeof LETTERS / sizeof *LETTERS; i++)
        put_range(m, CLASS_LETTER, LETTERS[i][0], LETTERS[i][1]);
    for (size_t i = 0; i < sizeof NUMBERS / sizeof *NUMBERS; i++)
        put_range(m, CLASS_NUMBER, NUMBERS[i][0], NUMBERS[i][1]);
    for (size_t i = 0; i < sizeof SPACES / sizeof *SPACES; i++)
        put_range(m, CLASS_SPACE, SPACES[i][0], SPACES[i][1]);
}

static const char *const MERGES[] = {
    "aa", "ab",  "bc", "aaaa",     "abc",  "qrs", "rs",       "st",
    " t", "he",  "in", "ing",      " the", "ef",  "cde",      "de",
    "cd", "efg", "'t", "\xC3\xA9", "zyx",  "  ",  "absolute", "internationalism"};
enum { MERGE_COUNT = sizeof MERGES / sizeof *MERGES, LONGEST_TOKEN = FIRST_MERGE + MERGE_COUNT };
static const char END[] = "<|endoftext|>";

// The tokenizer of most tests. Its last tokens are 255 times y and the end of text.
static void small_image(Image *m, bool ranges) {
    begin_image(m);
    for (int i = 0; i < MERGE_COUNT; i++) put_token(m, MERGES[i], strlen(MERGES[i]));
    char longest[255];
    memset(longest, 'y', sizeof longest);
    put_token(m, longest, sizeof longest);
    put_word(m, 4 * TOKENIZER_END, LONGEST_TOKEN + 1);
    put_token(m, END, sizeof END - 1);
    if (ranges) put_ranges(m);
}

static const char *write_image(const Image *m, size_t n, const char *path) {
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(m->bytes, 1, n, f) == n && fclose(f) == 0,
          "%s: cannot be written\n  -> run the tests from the root of the repository", path);
    return path;
}

void test_write_tokenizer(const char *path) {
    static Image m;
    small_image(&m, true);
    put_word(&m, 4, 3);
    put_range(&m, CLASS_REPLACED, 0x340, 0x341);
    write_image(&m, m.n, path);
}

static void open_image(const Image *m, Tokenizer *t, const char *path) {
    char error[ERROR_CAP];
    bool opened = tokenizer_open(write_image(m, m->n, path), t, error);
    CHECK(opened, "%s: %s\n  -> run the test again", path, error);
}

// Encodes a copy that ends where its allocation ends, into as many tokens as there may be: a
// sanitizer sees every step beyond.
static int64_t encode_copy(const Tokenizer *t, const char *text, size_t n, int32_t **tokens) {
    char *copy = (char *)check_alloc(n, "a text");
    *tokens = (int32_t *)check_alloc((2 * n + 1) * sizeof **tokens, "tokens");
    if (n) memcpy(copy, text, n);
    int64_t count = tokenizer_encode(t, copy, n, *tokens);
    free(copy);
    return count;
}

// Do the tokens of this text give it back?
static bool comes_back(const Tokenizer *t, const char *text, size_t n) {
    int32_t *tokens;
    int64_t count = encode_copy(t, text, n, &tokens);
    size_t at = 0, length;
    bool same = count <= (int64_t)n;
    for (int64_t i = 0; i < count && same; i++) {
        const char *bytes = tokenizer_decode(t, tokens[i], &length);
        same = tokens[i] != t->end && length <= n - at && memcmp(bytes, text + at, length) == 0;
        at += length;
    }
    free(tokens);
    return same && at == n;
}

// ---- pieces

// Each row is a text with bars where it is cut. tiktoken cuts them so too.
static const char *const GPT2_PIECES[] = {
    "I| don|'t",
    "we|'ll| they|'ve| you|'re| I|'d| I|'m| it|'s",
    "DON|'|T",
    "it|'|S",
    "'s|o",
    "'t|is",
    "'|lo",
    "'|l",
    "'|l|'",
    "'ve|x",
    "'|v",
    "'re",
    "'|r",
    "'|rx",
    "'|ex",
    "'|le",
    "x|'",
    "x|'|l",
    "'d|'d",
    "'|x",
    "'| s",
    " '|s",
    "''|s",
    " ''|s",
    "x| '|ll",
    "'m|m",
    "'|1",
    "'s|1",
    "'|\xC2\xA0",
    "a",
    " ",
    " a",
    "a| b",
    "a|  | b",
    "  | x",
    "x|   ",
    "x| ",
    "   ",
    "  |\n|x",
    "\n\n| x",
    "\n|x",
    "\t|\t|x",
    "\r\n\r|\n|x",
    "x| \n",
    "x| |\t|y",
    "x|\t| y",
    " \t\n\v\f\r",
    "x|\xC2\xA0|y",
    "x|\xC2\xA0|\xC2\xA0|y",
    "x| |\xE3\x80\x80|y",
    "x|\xE3\x80\x80| y",
    "x|\xC2\x85|y",
    "x|\x1C| y",
    "x|\xE2\x80\xA8",
    "x|\xE2\x80\x8B|y",
    "x| \xE2\x80\x8B|y",
    "12345",
    " 2023|ad",
    "3|.|14",
    "x|\xC2\xB2",
    " \xC2\xB2\x33",
    "7|  | 7",
    "\xD9\xA3\xD9\xA4",
    "\xD9\xA3\x33|a",
    " ...|hm",
    "a|,|b",
    "$|5",
    "(|x|)",
    " (|x|)",
    "a|_|b",
    "!?| !?",
    "--| --",
    "e|\xCC\x81|x",
    "e|\xCC\x81!|x",
    "\xCE\xB1\xCE\xB2| \xCE\xB3",
    "\xC3\xA9t\xC3\xA9",
    "a|\xC3\x97|b",
    "\xE4\xBD\xA0\xE5\xA5\xBD|\xEF\xBC\x8C|\xE4\xB8\x96\xE7\x95\x8C",
    "\xE4\xB8\xAD\xE6\x96\x87|12",
    "a|\xF0\x9F\x91\xA9\xE2\x80\x8D\xF0\x9F\x92\xBB|b",
    " \xF0\x9F\x91\x8D\xF0\x9F\x8F\xBD",
    "\xF0\x9D\x90\x80\xF0\x9D\x90\x81|\xF0\x9D\x9F\x8F",
    "\xEA\xB0\x80\xED\x9E\xA3|\xEE\x80\x80",
    "<|",
    "\x7F|a",
    "\xF4\x8F\xBF\xBF|a",
    NULL};

// Llama 3's, with at most three digits.
static const char *const LLAMA3_PIECES[] = {
    "I| don|'t", "DON|'T", "IT|'S", "'LL|x", "'Ve|x", "'RE|'re", "'lo", "'x", "''|s", "x|'ll",
    "don|'\xC5\xBF|x",  // the long s
    "'\xC5\xBE",  // the next letter
    "a| b", "a|\tb", "a|,b", "a|,,|b", "(x|)", " (|x", "a|\xC2\xA0y", "x| \n\n|y", "\n|x",
    "x|\r\n\r\n| y", "x| \n \n|  | y", "  |\tb", "   | x", "x|  ", "x| \n", "!!\n\n|x",
    "x|\n|  ", "x|\r\n|\t ", "\n|  ",
    " !|\xC2\xA0\n|x", "!\r\n|!", "123|456|7", " |12", "  | |12", "123|4", "12|x", "a|1|b|2",
    "x|\xC2\xB2\x33|y", "\xE4\xB8\xAD\xE6\x96\x87|12|\xEF\xBC\x8C\xE4\xB8\xAD", "e|\xCC\x81x",
    "e|\xCC\x81!", "e|\xCC\x81|1", "\n|1", "\xF0\x9F\x91\x8Dx", "x|\xE2\x80\xA8\n|y", "\t|1",
    "\r|a", NULL};

// GPT-2's, behind a cut around every digit, as SmolLM2 has it.
static const char *const DIGIT_PIECES[] = {
    "I| don|'t", "1|2|3", "a| |1|2| b", "a|  |1", "a|  | b", "\n\n|1", "x| $|5", "x|\t|\t|y", "'|1",
    "'s|1", "1|'s", "IT|'|S", "x| \n|1", "  ", " |\xC2\xB2|3",
    NULL};

static void test_pieces(const Tokenizer *t, const char *const *rows) {
    for (size_t i = 0; rows[i]; i++) {
        char text[128], cut[256];
        size_t n = 0, out = 0;
        for (const char *c = rows[i]; *c; c++)
            if (*c != '|' || strcmp(rows[i], "<|") == 0) text[n++] = *c;
        for (size_t at = 0; at < n;) {
            size_t end = tokenizer_piece(t, text, n, at);
            if (at > 0) cut[out++] = '|';
            memcpy(cut + out, text + at, end - at);
            out += end - at;
            at = end;
        }
        cut[out] = 0;
        EXPECT(strcmp(cut, rows[i]) == 0, "expected %s, found %s", rows[i], cut);
    }
}

static void test_ends(const Tokenizer *t) {
    EXPECT(tokenizer_piece(t, "'\0s", 3, 0) == 2 && tokenizer_piece(t, "a\0b", 3, 1) == 2 &&
               tokenizer_piece(t, "'se", 1, 0) == 1,
           "NUL bytes, or reading beyond the end");
}

// ---- merges

// Each row is a text and its tokens with bars between them.
static void test_merges(const Tokenizer *t) {
    static const char *const ROWS[] = {
        "aa",
        "aa|a",
        "aaaa",
        "aaaa|a",
        "aaaa|aa",
        "aaaa|aa|a",
        "aaaa|aaaa",
        "aaaa|aaaa|a",  // the leftmost of equals first: (aa)(aa)(aa) becomes (aaaa)(aa)
        "aa|b",
        "aa|bc",
        "abc",
        "x|abc",
        "x|abc|x",
        "aa|ab",
        "b|ab",  // ab before bc, and then abc; aa before ab
        "p|qrs",
        "qrs|t",
        "rs|t",  // rs before st; with q it makes a token lower than itself
        "cde|x",
        "bc|de|x",
        "cde",
        "cd|efg",
        "cd|ef|x",
        "d|efg",  // de before cd, and then cde; bc and ef before both
        "zyx",
        "z|y|x|z",
        " |z|y|x",
        "absolute",
        "internationalism",  // a token that no merges lead to, only as a piece of its own
        " the",
        " t|h",
        "b|ing",
        "ing",
        " |ing",
        "i|'t",
        "he|'t| t",
        "\xC3\xA9|t|\xC3\xA9",
        "  ",
        "  | ",
        "  | the",
        "\xE4|\xB8|\xAD",
        "<|e|n|d|o|f|t|e|x|t",
    };
    for (size_t i = 0; i < sizeof ROWS / sizeof *ROWS; i++) {
        char text[128], cut[256];
        size_t n = 0, out = 0, length;
        for (const char *c = ROWS[i]; *c; c++)
            if (*c != '|') text[n++] = *c;
        int32_t *tokens;
        int64_t count = encode_copy(t, text, n, &tokens);
        for (int64_t k = 0; k < count; k++) {
            const char *bytes = tokenizer_decode(t, tokens[k], &length);
            if (k > 0) cut[out++] = '|';
            memcpy(cut + out, bytes, length);
            out += length;
        }
        cut[out] = 0;
        EXPECT(strcmp(cut, ROWS[i]) == 0, "expected %s, found %s", ROWS[i], cut);
        free(tokens);
    }
    char many[256];
    int32_t *tokens;
    memset(many, 'y', sizeof many);
    EXPECT(encode_copy(t, many, 255, &tokens) == 1 && tokens[0] == LONGEST_TOKEN,
           "255 times y is not one token");
    free(tokens);
    EXPECT(encode_copy(t, many, 256, &tokens) == 256 && tokens[0] == tokens[255],
           "256 times y is not that many tokens");
    free(tokens);
    EXPECT(encode_copy(t, "abc!", 4, &tokens) == 2 && tokens[0] == FIRST_MERGE + 4 &&
               tokens[1] == 0,
           "abc! is not its two ids");
    free(tokens);
    EXPECT(encode_copy(t, "", 0, &tokens) == 0, "no text has tokens");
    free(tokens);
    EXPECT(comes_back(t, END, sizeof END - 1) && comes_back(t, "a\0b", 3),
           "%s or a NUL byte in a text", END);
}

// A hash table as full as it can be.
static void test_table(const char *path) {
    Image m;
    Tokenizer full;
    begin_image(&m);
    for (int i = 0; i < 256; i++) put_token(&m, (char[]){(char)i, 'x'}, 2);
    put_word(&m, 4 * TOKENIZER_END, 511);
    put_ranges(&m);
    open_image(&m, &full, path);
    EXPECT(full.count == 512 && comes_back(&full, "axbxc", 5), "512 tokens");
    tokenizer_close(&full);
}

// Byte-pair encoding as it is defined: join the leftmost of the lowest, until nothing can be
// joined.
static int64_t merge_slowly(const Tokenizer *t, const char *word, size_t n, int32_t *tokens) {
    size_t *starts = (size_t *)malloc((n + 1) * sizeof *starts), parts = n;
    for (size_t i = 0; i <= n; i++) starts[i] = i;
    for (;;) {
        int32_t lowest = -1;
        size_t where = 0;
        for (size_t i = 0; i + 1 < parts; i++) {
            int32_t token = tokenizer_find(t, word + starts[i], starts[i + 2] - starts[i]);
            if (token >= 0 && (lowest < 0 || token < lowest)) lowest = token, where = i;
        }
        if (lowest < 0) break;
        memmove(starts + where + 1, starts + where + 2, (parts - where - 1) * sizeof *starts);
        parts--;
    }
    for (size_t i = 0; i < parts; i++)
        tokens[i] = tokenizer_find(t, word + starts[i], starts[i + 1] - starts[i]);
    free(starts);
    return (int64_t)parts;
}

// Random words of a, b and c under random tokens of a, b and c, whose order follows no rule; one of
// them is the end-of-text token.
static void test_random_merges(const char *path) {
    for (uint64_t round = 0; round < 40; round++) {
        Image m;
        Tokenizer t;
        uint64_t draw = 0;
        begin_image(&m);
        for (uint64_t seen[200] = {0}, i = 0, key = 0; i < 200; i++) {
            char token[6];
            size_t n = 2 + rand_at(round, draw++) % (round % 2 ? 2 : 5);
            key = n;
            for (size_t k = 0; k < n; k++)
                key = key * 3 + rand_at(round, draw++) % 3, token[k] = (char)('a' + key % 3);
            bool known = false;
            for (uint64_t k = 0; k < i; k++) known = known || seen[k] == key * 8 + n;
            if (!known) put_token(&m, token, n);
            seen[i] = key * 8 + n;
        }
        put_word(&m, 4 * TOKENIZER_END, FIRST_MERGE + 3);
        put_ranges(&m);
        open_image(&m, &t, path);
        int wrong = 0;
        for (size_t n = 2; n < 700; n += n < 300 ? 1 + round % 3 : 97) {
            char word[700];
            int32_t *tokens, slow[700];
            for (size_t k = 0; k < n; k++) word[k] = (char)('a' + rand_at(round, draw++) % 3);
            int64_t count = encode_copy(&t, word, n, &tokens), expected = 1;
            slow[0] = tokenizer_find(&t, word, n);
            if (slow[0] < 0) expected = merge_slowly(&t, word, n, slow);
            wrong += count != expected || memcmp(tokens, slow, (size_t)count * sizeof *slow) != 0;
            for (int64_t k = 0; k < count; k++) wrong += tokens[k] == t.end;
            free(tokens);
        }
        EXPECT(wrong == 0, "vocabulary %d: %d words are merged otherwise", (int)round, wrong);
        tokenizer_close(&t);
    }
}

// A word of a million bytes takes about as long as a million bytes of words, and each level of the
// rows has been used.
static void test_long_words(const Tokenizer *t) {
    enum { BYTES = 1000003 };
    static const char *const PATTERNS[] = {"a", " ", "abcde", "qrst", "\xC3\xA9", "\n ", "!"};
    char *text = (char *)malloc(BYTES);
    for (size_t row = 0; row < sizeof PATTERNS / sizeof *PATTERNS; row++) {
        size_t n = BYTES / strlen(PATTERNS[row]) * strlen(PATTERNS[row]);
        for (size_t i = 0; i < n; i++) text[i] = PATTERNS[row][i % strlen(PATTERNS[row])];
        clock_t start = clock();
        bool same = comes_back(t, text, n);
        double took = (double)(clock() - start) / CLOCKS_PER_SEC;
        EXPECT(same && took < 5.0, "%s a million times: %s, %.2f s", PATTERNS[row],
               same ? "comes back" : "does not come back", took);
    }
    int32_t *tokens;
    memset(text, 'a', BYTES);
    int64_t count = encode_copy(t, text, BYTES, &tokens);
    const int32_t one = tokenizer_find(t, "a", 1), two = FIRST_MERGE, four = FIRST_MERGE + 3;
    bool right = count == BYTES / 4 + 2 && tokens[0] == four && tokens[count - 3] == four &&
                 tokens[count - 2] == two && tokens[count - 1] == one;
    EXPECT(right, "1000003 times a: %lld tokens, not 250000 of four, one of two and one of one",
           (long long)count);
    free(tokens);
    free(text);
}

// ---- version 3: patterns, ranks, special tokens, SentencePiece

enum { CUT, DIGITS, PREFIX, BYTES, ORDER, NAMES, ATTACHED };  // words behind TOKENIZER_HOW

static void put_how(Image *m, int word, uint32_t value) {
    put_word(m, 4 * (size_t)(TOKENIZER_HOW + word), value);
}

// Adds an id to the list ORDER or NAMES, which lie behind the ranges, one after the other.
static void put_listed(Image *m, int word, uint32_t id) {
    put_word(m, 4, 3);
    put_word(m, m->n, id);
    m->n += 4;
    count_one(m, TOKENIZER_HOW + word);
}

// The tokens of a text as words: each token in bars, a token of how.bytes as <XX>.
static void expect_tokens(const Tokenizer *t, const char *text, const char *expected) {
    int32_t *tokens;
    int64_t count = encode_copy(t, text, strlen(text), &tokens);
    char found[512] = "";
    size_t out = 0, n;
    for (int64_t i = 0; i < count; i++) {
        const char *bytes = tokenizer_decode(t, tokens[i], &n);
        bool byte = t->how.bytes && (uint32_t)tokens[i] - t->how.bytes < 256;
        out += (size_t)snprintf(found + out, sizeof found - out, i ? "|" : "");
        if (byte) out += (size_t)snprintf(found + out, sizeof found - out, "<%02X>", *bytes & 0xFF);
        else out += (size_t)snprintf(found + out, sizeof found - out, "%.*s", (int)n, bytes);
    }
    EXPECT(strcmp(found, expected) == 0, "%s: expected %s, found %s", text, expected, found);
    free(tokens);
}

static const char *const NAMED[] = {"<s>", "<s>x", "[INST]", "1", "q\xC3", "\xA9q"};
enum { FIRST_NAME = LONGEST_TOKEN + 2, NAME_COUNT = 6 };

// small_image with special tokens behind the end-of-text token. Merging makes single
// bytes and seven tokens, in another order than that of ids.
static void named_image(Image *m) {
    small_image(m, false);
    for (int i = 0; i < NAME_COUNT; i++) put_token(m, NAMED[i], strlen(NAMED[i]));
    put_ranges(m);
    for (uint32_t i = 0; i < FIRST_MERGE; i++) put_listed(m, ORDER, i);
    static const int RANKS[] = {9, 8, 10, 7, 6, 1, 0};  // he, " t", in, st, rs, ab, aa of MERGES
    for (size_t i = 0; i < sizeof RANKS / sizeof *RANKS; i++)
        put_listed(m, ORDER, (uint32_t)(FIRST_MERGE + RANKS[i]));
    put_listed(m, NAMES, LONGEST_TOKEN + 1);
    for (uint32_t i = 0; i < NAME_COUNT; i++) put_listed(m, NAMES, FIRST_NAME + i);
}

static void test_names(const char *path) {
    static const char *const ROWS[][2] = {
        {"the", "t|he"},
        {" the", " t|he"},
        {"ing", "in|g"},                       // ing is in no list
        {"rst", "r|st"},                       // st before rs
        {"aab", "a|ab"},                       // ab before aa
        {"<|endoftext|>", "<|endoftext|>"},
        {"a<s>in", "a|<s>|in"},
        {"<s>x", "<s>x"},                      // the longest name
        {"<s><s>xx", "<s>|<s>x|x"},
        {" <s> in<s", " |<s>| |in|<|s"},
        {"[INST] he[INST]", "[INST]| |he|[INST]"},
        {"a1 1", "a|1| |1"},
        {"\xC3\xA9q", "\xC3|\xA9|q"},          // a name that ends within a character
        {"q\xC3\xA9", "q|\xC3|\xA9"},
    };
    Image m;
    Tokenizer t;
    named_image(&m);
    m.bytes[m.n++] = 'x';                      // attached bytes are nobody's
    put_how(&m, ATTACHED, 1);
    open_image(&m, &t, path);
    alarm(60);                                 // a step of no bytes would be without end
    for (size_t i = 0; i < sizeof ROWS / sizeof *ROWS; i++)
        expect_tokens(&t, ROWS[i][0], ROWS[i][1]);
    alarm(0);
    int32_t *tokens;
    EXPECT(encode_copy(&t, "a1", 2, &tokens) == 2 && tokens[1] == FIRST_NAME + 3,
           "a special token's id");
    EXPECT(tokenizer_encode(&t, "a<s>", 3, tokens) == 3, "a name that ends behind the text");
    free(tokens);
    EXPECT(tokenizer_find(&t, "ing", 3) < 0 && tokenizer_find(&t, "<s>", 3) < 0 &&
               tokenizer_find(&t, "he", 2) == FIRST_MERGE + 9,
           "merging makes a token that is not listed");
    tokenizer_close(&t);
}

// SentencePiece's kind: 3 special tokens, 256 of bytes, then characters and merges; U+00E9 is a
// character of its own, U+00E8 is not.
static void piece_image(Image *m, uint32_t prefix) {
    static const char *const PIECES[] = {" ", "a", "b", "A", "\xC3\xA9", " a", "ab", "  ",
                                         "a\xC3\xA9", "ab ab", "\xE4\xB8\xAD"};
    enum { FIRST = 259, COUNT = sizeof PIECES / sizeof *PIECES };
    memset(m, 0, sizeof *m);
    m->n = TOKENIZER_HEADER_BYTES;
    put_word(m, 0, TOKENIZER_MAGIC);
    put_token(m, "<unk>", 5);
    put_token(m, "<s>", 3);
    put_token(m, "</s>", 4);
    for (int i = 0; i < 256; i++) put_token(m, &(char){(char)i}, 1);
    for (int i = 0; i < COUNT; i++) put_token(m, PIECES[i], strlen(PIECES[i]));
    put_word(m, 4 * TOKENIZER_END, 1);
    put_range(m, CLASS_SPACE, ' ', ' ');
    put_range(m, CLASS_REPLACED, 0x2581, 0x2581);
    put_how(m, CUT, CUT_NOT);
    put_how(m, PREFIX, prefix);
    put_how(m, BYTES, 3);
    for (uint32_t i = 0; i < COUNT; i++) put_listed(m, ORDER, FIRST + i);
    put_listed(m, NAMES, 1);
    put_listed(m, NAMES, 2);
}

static void test_sentencepiece(const char *path) {
    // A text, and its tokens without a prefix, with one before the whole text, and before each.
    static const char *const ROWS[][4] = {
        {"a", "a", " a", " a"},
        {" a", " a", " a", " | a"},
        {"b", "b", " |b", " |b"},
        {"aA", "a|A", " a|A", " a|A"},
        {"ab", "ab", " a|b", " a|b"},          // " a" is of lower rank than "ab"
        {"bab", "b|ab", " |b|ab", " |b|ab"},
        {"a\xC3\xA9", "a\xC3\xA9", " a|\xC3\xA9", " a|\xC3\xA9"},
        {"\xC3\xA8", "<C3>|<A8>", " |<C3>|<A8>", " |<C3>|<A8>"},
        {"\xE4\xB8\xAD" "b", "\xE4\xB8\xAD|b", " |\xE4\xB8\xAD|b", " |\xE4\xB8\xAD|b"},
        {"b\n", "b|<0A>", " |b|<0A>", " |b|<0A>"},
        {"   a", "  | a", "  | a", "  | | a"},
        {"<s>a", "<s>|a", "<s>|a", "<s>| a"},
        {"a</s>a", "a|</s>|a", " a|</s>|a", " a|</s>| a"},
        {"<s><s>", "<s>|<s>", "<s>|<s>", "<s>|<s>"},
        {"ab ab", "ab ab", " a|b| a|b", " a|b| a|b"},  // a whole text that is a token
    };
    for (uint32_t prefix = PREFIX_NONE; prefix <= PREFIX_EACH; prefix++) {
        Image m;
        Tokenizer t;
        piece_image(&m, prefix);
        open_image(&m, &t, path);
        for (size_t i = 0; i < sizeof ROWS / sizeof *ROWS; i++)
            expect_tokens(&t, ROWS[i][0], ROWS[i][1 + prefix]);
        tokenizer_close(&t);
    }
}

static void test_patterns(const char *path) {
    static const struct { uint32_t cut, digits; const char *const *rows; } WAYS[] = {
        {CUT_LLAMA3, 3, LLAMA3_PIECES}, {CUT_GPT2, 1, DIGIT_PIECES}, {CUT_GPT2, 0, GPT2_PIECES}};
    Image m;
    Tokenizer t;
    for (size_t i = 0; i < sizeof WAYS / sizeof *WAYS; i++) {
        small_image(&m, true);
        put_range(&m, CLASS_SORTED, 0x300, 0x301);     // no letter, no space: other
        put_word(&m, 4, 3);
        put_how(&m, CUT, WAYS[i].cut);
        put_how(&m, DIGITS, WAYS[i].digits);
        open_image(&m, &t, path);
        test_pieces(&t, WAYS[i].rows);
        tokenizer_close(&t);
    }
    small_image(&m, true);
    put_how(&m, CUT, CUT_LLAMA3);
    put_how(&m, DIGITS, 1);
    open_image(&m, &t, path);
    test_pieces(&t, (const char *const[]){"1|2| |3|x", "\xC2\xB2|3", " |1", NULL});
    tokenizer_close(&t);
    put_how(&m, DIGITS, 0);
    open_image(&m, &t, path);
    test_pieces(&t, (const char *const[]){" |123|x", "1|'s|1", NULL});
    tokenizer_close(&t);
    small_image(&m, true);
    put_how(&m, CUT, CUT_NOT);
    open_image(&m, &t, path);
    test_pieces(&t, (const char *const[]){"I don't 12\n x", NULL});
    tokenizer_close(&t);
}

// ---- text that comes back

static size_t random_text(uint64_t key, char *text, size_t most) {
    static const char ASCII[] = "   '''\n\t\r sdmtlvreSDMT0123456789.,!?<|>_-abcdefgh";
    size_t n = 0;
    for (uint64_t i = 0; n + 4 <= most; i++) {
        uint64_t draw = rand_at(key, i), kind = draw >> 56 & 7;
        uint32_t code = (uint32_t)(draw % (kind < 5    ? 1
                                           : kind == 5 ? 0x800
                                           : kind == 6 ? 0x10000
                                                       : 0x110000));
        if (kind < 5) code = (unsigned char)ASCII[draw % (sizeof ASCII - 1)];
        if (code - 0xD800 < 0x800) code += 0x800;
        n = (size_t)(utf8_put(text + n, code) - text);
    }
    return n;
}

static void test_round_trip(const Tokenizer *t) {
    char text[1200];
    for (uint64_t key = 0; key < 4000; key++) {
        size_t n = random_text(key, text, key % 50 ? 4 + key % 60 : sizeof text);
        EXPECT(comes_back(t, text, n), "random text %d does not come back from its tokens",
               (int)key);
    }
    char every[0x1000 * 4];
    int lost = 0;
    for (uint32_t page = 0; page < 0x110; page++) {
        size_t n = 0;
        for (uint32_t code = page << 12; code < (page + 1) << 12; code++)
            if (code - 0xD800 >= 0x800) n = (size_t)(utf8_put(every + n, code) - every);
        lost += !comes_back(t, every, n);
    }
    EXPECT(lost == 0, "%d of 272 pages of Unicode do not come back", lost);
}

// ---- refusals

typedef struct {
    const Tokenizer *t;
    const char *text;
    size_t n;
    int32_t token;
} Call;

static void encode_body(void *arg) {
    Call *c = (Call *)arg;
    int32_t *tokens;
    encode_copy(c->t, c->text, c->n, &tokens);
}

static void decode_body(void *arg) {
    size_t n;
    tokenizer_decode(((Call *)arg)->t, ((Call *)arg)->token, &n);
}

static void test_calls_refused(const Tokenizer *t, const char *path) {
    static const struct {
        const char *text;
        size_t offset;
    } BAD[] = {
        {"\x80", 0},
        {"ab\xC1\xBF", 2},
        {"ab \xC3", 3},
        {"\xE0\x9F\xBF", 0},
        {"a\xED\xA0\x80", 1},
        {"\xF0\x8F\xBF\xBF", 0},
        {"\xF4\x90\x80\x80", 0},
        {"\xF5\x80\x80\x80", 0},
        {"x\xE2\x82", 1},
        {"\xC3\xA9\xFF", 2},
        {" \xFFx", 1},
        {"'\xC3", 1},
        {"\xF0\x9F\x91", 0},
    };
    for (size_t i = 0; i < sizeof BAD / sizeof *BAD; i++) {
        char words[80];
        check_format(words, sizeof words, "invalid character at offset %zu\n", BAD[i].offset);
        EXPECT_REFUSAL(encode_body, (&(Call){t, BAD[i].text, strlen(BAD[i].text), 0}), words);
    }
    EXPECT_REFUSAL(decode_body, (&(Call){t, "", 0, t->count}),
                   "expected a token from 0 to 281, found 282");
    EXPECT_REFUSAL(decode_body, (&(Call){t, "", 0, -1}), "found -1");
    Image m;
    Tokenizer plain;
    size_t n;
    small_image(&m, false);  // as llm.c writes it
    open_image(&m, &plain, path);
    EXPECT(!plain.classes && t->classes && plain.count == t->count && plain.end == t->count - 1,
           "a file without ranges does not open as one that only decodes");
    const char *bytes = tokenizer_decode(&plain, FIRST_MERGE + 11, &n);
    EXPECT(n == 3 && memcmp(bytes, "ing", 3) == 0, "it does not decode");
    EXPECT_REFUSAL(encode_body, (&(Call){&plain, "a", 1, 0}), "python3 data/tokenizer.py");
    tokenizer_close(&plain);
    small_image(&m, true);
    put_range(&m, CLASS_REPLACED, 0x340, 0x341);
    put_range(&m, CLASS_SORTED, 0x300, 0x301);
    open_image(&m, &plain, path);
    EXPECT_REFUSAL(encode_body, (&(Call){&plain, "ab\xCD\x80", 4, 0}),
                   "replace the character at offset 2");
    EXPECT_REFUSAL(encode_body, (&(Call){&plain, "a\xCC\x80\xCC\x81", 5, 0}),
                   "at offset 3, or sort it");
    EXPECT(comes_back(&plain, "a\xCC\x80" "b\xCC\x81", 6), "marks of two characters are refused");
    tokenizer_close(&plain);
    small_image(&m, true);
    put_word(&m, 4 * TOKENIZER_END, 242);  // which is 0xBF
    open_image(&m, &plain, path);
    EXPECT_REFUSAL(encode_body, (&(Call){&plain, "a\xC3\xBF", 3, 0}),
                   "no token is the single byte 0xBF");
    tokenizer_close(&plain);
}

static void expect_refused(const char *path, const char *words) {
    char error[256] = "";
    Tokenizer t;
    bool opened = tokenizer_open(path, &t, error);
    EXPECT(!opened && strstr(error, words), "%s: expected \"%s\", found \"%s\"", path, words,
           opened ? "opened" : error);
    EXPECT(!t.file && !t.where && !t.slots && !t.classes, "what is refused leaves something open");
}

static void test_files_refused(const char *dir, const char *path) {
    enum { TOKENS_AT = TOKENIZER_HEADER_BYTES };
    Image m;
    small_image(&m, false);
    const size_t ranges = m.n;  // where they begin: 11 of letters, 5 of numbers, 10 of spaces
    small_image(&m, true);
    const size_t size = m.n, numbers = ranges + 8 * 11, spaces = numbers + 8 * 5;
    const struct {
        size_t at, bytes;
        uint32_t value;
        const char *words;
    } ROWS[] = {
        {0, 4, 20240520,
         "version 2 or 3, found 2116 bytes with 20240520"},
        {4, 4, 1, "found 2116 bytes with 20240328 and 1"},
        {4, 4, 4, "found 2116 bytes with 20240328 and 4"},
        {28, 4, 1, "expected 216 bytes of ranges"},
        {32, 4, UINT32_MAX, "expected 34359738568 bytes"},
        {36, 4, CUT_NOT + 1, "expected a way to cut text, found 3, 0 and 0"},
        {44, 4, PREFIX_EACH + 1, "expected a way to cut text, found 0, 3 and 0"},
        {48, 4, 27, "expected a way to cut text, found 0, 0 and 27"},
        {48, 4, UINT32_MAX, "expected a way to cut text, found 0, 0 and 4294967295"},
        {52, 4, 1, "expected 212 bytes of ranges and lists, found 208"},
        {56, 4, UINT32_MAX, "expected 17179869388 bytes of ranges and lists"},
        {60, 4, 1, "expected 209 bytes of ranges and lists"},
        {8, 4, 0, "expected 1 to 546 tokens, one of them the end-of-text token, found 0"},
        {8, 4, 1048577, "found 1048577"},
        {8, 4, UINT32_MAX, "found 4294967295"},
        {8, 4, 281, "found 281 and the end-of-text token 281"},
        {8, 4, 283, "expected 208 bytes of ranges and lists, found 142"},
        {12, 4, 282, "found 282 and the end-of-text token 282"},
        {12, 4, UINT32_MAX, "the end-of-text token 4294967295"},
        {16, 4, 12, "expected 216 bytes of ranges"},
        {20, 4, 4, "expected 200 bytes"},
        {24, 4, UINT32_MAX, "expected 34359738488 bytes of ranges"},
        {16, 4, 0, "expected 120 bytes"},
        {TOKENS_AT, 1, 0, "byte 1024: token 0 of 282 is empty or cut"},
        {TOKENS_AT + 3, 1, 33, "tokens 0 and 1 are the same"},
        {ranges, 4, 'Z' + 1, "expected a range, found U+005B to U+005A"},
        {ranges + 8, 4, 'Z', "U+005A is in two classes"},
        {ranges + 8 * 10 + 4, 4, 0x110000, "expected a range, found U+1D400 to U+110000"},
        {ranges + 8 * 10 + 4, 4, UINT32_MAX, "expected a range"},
        {numbers, 4, UINT32_MAX, "expected a range"},
        {numbers + 4, 4, 'A', "U+0041 is in two classes"},
        {spaces + 12, 4, '0', "U+0030 is in two classes"},
        {spaces + 8, 8, 0, "U+0020 is not a space"},
    };
    for (size_t i = 0; i < sizeof ROWS / sizeof *ROWS; i++) {
        small_image(&m, true);
        for (size_t k = 0; k < ROWS[i].bytes; k++)
            m.bytes[ROWS[i].at + k] = (unsigned char)(ROWS[i].value >> 8 * (k % 4));
        expect_refused(write_image(&m, size, path), ROWS[i].words);
    }
    small_image(&m, true);
    put_word(&m, spaces + 8, 14);
    put_word(&m, spaces + 12, 15);
    expect_refused(write_image(&m, size, path), "U+0020 is not a space");
    small_image(&m, false);
    expect_refused(write_image(&m, ranges - 1, path),
                   "byte 1894: token 281 of 282 is empty or cut");
    put_word(&m, 4 * TOKENIZER_COUNT, 283);
    expect_refused(write_image(&m, ranges, path), "byte 1908: token 282 of 283 is empty or cut");
    small_image(&m, true);
    expect_refused(write_image(&m, size + 1, path),
                   "expected 208 bytes of ranges and lists, found 209");
    expect_refused(write_image(&m, 1000, path), "found 1000 bytes with 0 and 0");
    expect_refused(write_image(&m, 0, path), "found 0 bytes with 0 and 0");
    write_image(&m, size, path);
    CHECK(truncate(path, 5000000000) == 0, "no room for a sparse file");
    expect_refused(path, "File too large");
    expect_refused(dir, "Is a directory");
    expect_refused("/dev/zero", "a pipe or device");
    expect_refused("build/no/such/file", "No such file");
    named_image(&m);
    put_word(&m, m.n - 4, LONGEST_TOKEN + 2 + NAME_COUNT);
    expect_refused(write_image(&m, m.n, path), "token 288 of 288 is listed");
    put_word(&m, m.n - 4, UINT32_MAX);
    expect_refused(write_image(&m, m.n, path), "token 4294967295 of 288 is listed");
    named_image(&m);
    put_word(&m, m.n - 4 * (NAME_COUNT + 2), 7);       // the last of the order
    expect_refused(write_image(&m, m.n, path), "tokens 7 and 7 are the same");
    piece_image(&m, PREFIX_EACH);
    put_how(&m, BYTES, 16);                            // 16 + 256 is one too many
    expect_refused(write_image(&m, m.n, path), "expected a way to cut text, found 2, 2 and 16");
}

// Files of version 3 that are cut, or have one other bit: opened or refused.
static void test_lists_damaged(const char *path) {
    Image m;
    Tokenizer t;
    char error[256];
    int opened = 0;
    piece_image(&m, PREFIX_FIRST);
    write_image(&m, m.n, path);
    for (size_t n = m.n; n-- > 0;)
        opened += truncate(path, (off_t)n) != 0 || tokenizer_open(path, &t, error);
    EXPECT(opened == 0, "%d of %zu cut files are opened", opened, m.n);
    int fd = open(write_image(&m, m.n, path), O_WRONLY);
    for (size_t bit = 8 * 4; bit < 8 * m.n; bit++) {
        if (bit >= 8 * 64 && bit < 8 * TOKENIZER_HEADER_BYTES) continue;
        const unsigned char flipped = (unsigned char)(m.bytes[bit / 8] ^ 1 << bit % 8);
        CHECK(pwrite(fd, &flipped, 1, (off_t)(bit / 8)) == 1, "%s cannot be written", path);
        if (tokenizer_open(path, &t, error)) tokenizer_close(&t), opened++;
        CHECK(pwrite(fd, &m.bytes[bit / 8], 1, (off_t)(bit / 8)) == 1, "%s cannot be written",
              path);
    }
    close(fd);
    EXPECT(opened > 100, "only %d files with one other bit are opened", opened);
}

// A damaged file is refused, or it is a tokenizer: a text comes back from its tokens.
static void test_files_damaged(const char *path) {
    static const char TEXT[] =
        "  The cat's abcde aaaaaaa\n\xC3\xA9\xE4\xB8\xAD 123 <|endoftext|> \xF0\x9F\x91\x8D!";
    char error[256];
    Image m;
    Tokenizer t;
    small_image(&m, true);
    const size_t size = m.n;
    int opened = 0;
    write_image(&m, size,
                path);  // once, and changed in place: a new file each time would wait for the disk
    for (size_t n = size; n-- > 0;)
        opened += truncate(path, (off_t)n) != 0 || tokenizer_open(path, &t, error);
    EXPECT(opened == 0, "%d of %zu cut files are opened", opened, size);
    int fd = open(write_image(&m, size, path), O_WRONLY);
    for (size_t bit = 0; bit < 8 * size;
         bit += bit < 8 * 32 ? 1 : 7) {  // the rest of the header means nothing yet
        if (bit >= 8 * 32 && bit < 8 * TOKENIZER_HEADER_BYTES) continue;
        const unsigned char flipped = (unsigned char)(m.bytes[bit / 8] ^ 1 << bit % 8);
        CHECK(pwrite(fd, &flipped, 1, (off_t)(bit / 8)) == 1, "%s cannot be written", path);
        if (tokenizer_open(path, &t, error)) {
            EXPECT(!t.classes || comes_back(&t, TEXT, sizeof TEXT - 1),
                   "bit %zu: it opens, and a text does not come back", bit);
            tokenizer_close(&t);
            opened++;
        }
        CHECK(pwrite(fd, &m.bytes[bit / 8], 1, (off_t)(bit / 8)) == 1, "%s cannot be written",
              path);
    }
    close(fd);
    EXPECT(opened > 100, "only %d files with one other bit are opened", opened);
}

void test_tokenizer(void) {
    char path[512];
    const char *dir = test_dir("tokenizer");
    check_format(path, sizeof path, "%s/tokenizer.bin", dir);
    Image m;
    Tokenizer t;
    small_image(&m, true);
    open_image(&m, &t, path);
    test_pieces(&t, GPT2_PIECES);
    test_ends(&t);
    test_merges(&t);
    test_table(path);
    test_random_merges(path);
    test_long_words(&t);
    test_round_trip(&t);
    test_calls_refused(&t, path);
    test_files_refused(dir, path);
    test_files_damaged(path);
    test_lists_damaged(path);
    test_patterns(path);
    test_names(path);
    test_sentencepiece(path);
    tokenizer_close(&t);
}
