// tokenizer.h: GPT-2's tokenizer: UTF-8 text to tokens and back.
//
// The file is llm.c's gpt2_tokenizer.bin (version 2) with what encoding needs behind it; llm.c's readers stop before that.
//
//     header: 256 x uint32, little-endian as x86-64 and AArch64 are     tokens, in the order of their ids       ranges, as uint32
//     +----------+---+---+-------------+---------+---------+--------+   +--------+--------------+--        --+-------+------+--
//     | 20240328 | 2 | n | end of text | letters | numbers | spaces |...| length | length bytes |  n of them | first | last | ...
//     +----------+---+---+-------------+---------+---------+--------+   +--------+--------------+--        --+-------+------+--
//
// The ranges are what \p{L}, \p{N} and \s match, so the file and not this code decides which Unicode it is. llm.c's own file has none of
// them: it decodes, and does not encode.
//
// Encoding cuts the text into pieces by GPT-2's pattern, a space with the word after it,
//     '(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// and a piece into tokens by byte-pair encoding: a piece that is a token is that token; any other starts as single bytes, and the two
// neighbours that together are the token of the lowest id become it, the leftmost first, until no neighbours are a token. The merges
// were learned in the order of the ids, so no list of them is needed. The end-of-text token is never a result.
//
// Sources: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.2, and their code's pattern; tiktoken, whose
// ids and algorithm these are; llm.c's train_gpt2.py (write_tokenizer) for the file. dev/test/test_tokenizer.py compares with tiktoken.
#pragma once
#include "util.h"
#include "json.h"
#include "../rand.h"
#include <errno.h>
#include <sys/stat.h>

enum { TOKENIZER_MAGIC = 20240328, TOKENIZER_VERSION = 2, TOKENIZER_HEADER_BYTES = 1024 };
enum { TOKENIZER_COUNT = 2, TOKENIZER_END = 3, TOKENIZER_RANGES = 4 };                 // words of the header
enum { TOKENIZER_MOST = 1 << 20 };                                                     // tokens; the largest vocabularies in use have a quarter of it
enum { TOKENIZER_CODES = 0x110000 };                                                   // of Unicode
enum { TOKENIZER_MOST_BYTES = TOKENIZER_HEADER_BYTES + TOKENIZER_MOST * 256 + TOKENIZER_CODES * 8 };
enum { TOKENIZER_SHORT = 256 };                                                        // bytes of a piece that is merged on the stack
enum { CLASS_OTHER, CLASS_LETTER, CLASS_NUMBER, CLASS_SPACE };

static const uint32_t TOKENIZER_NO_MERGE = UINT32_MAX;                                 // what tokenizer_find's -1 is as uint32

typedef struct { uint32_t tag; int32_t token; } TokenSlot;                             // token -1: empty

typedef struct {
    int32_t count, end;            // tokens; the end-of-text token
    bool encodes;                  // the file has ranges
    unsigned char *file;           // as it is on disk
    size_t size;                   // of that
    uint32_t *where;               // the bytes of each token in it; how many is the byte before them
    TokenSlot *slots;              // hash table from bytes to token
    uint64_t mask;                 // its size - 1
    unsigned char *classes;        // one per code point
} Tokenizer;

static inline void tokenizer_close(Tokenizer *t) {
    free(t->file);
    free(t->where);
    free(t->slots);
    free(t->classes);
    memset(t, 0, sizeof *t);
}

// ------------------------------------------------------------------------------------------------------ from bytes to token

// Of n >= 1 bytes; the last word is put together from two loads that may overlap.
static inline uint64_t tokenizer_hash(const unsigned char *p, size_t n) {
    uint64_t h = n * HASH_P1, word;
    for (; n > 8; n -= 8, p += 8) h = rand_mix(h ^ hash_word(p));
    if (n >= 4) {
        uint32_t low, high;
        memcpy(&low, p, 4);
        memcpy(&high, p + n - 4, 4);
        word = (uint64_t)high << 32 | low;
    } else {
        word = (uint64_t)p[n - 1] << 16 | (uint64_t)p[n / 2] << 8 | p[0];
    }
    return rand_mix(h ^ word);
}

// The slot of these bytes, or the empty one where they belong.
static inline TokenSlot *tokenizer_slot(const Tokenizer *t, const unsigned char *p, size_t n, uint64_t hash) {
    uint64_t i = hash & t->mask;
    for (; t->slots[i].token >= 0; i = (i + 1) & t->mask) {
        const unsigned char *bytes = t->file + t->where[t->slots[i].token];
        if (t->slots[i].tag == hash >> 32 && bytes[-1] == n && memcmp(bytes, p, n) == 0) break;
    }
    return &t->slots[i];
}

// The token of these bytes, -1 for none; the end-of-text token is no text.
static inline int32_t tokenizer_find(const Tokenizer *t, const unsigned char *p, size_t n) {
    int32_t token = n > 255 ? -1 : tokenizer_slot(t, p, n, tokenizer_hash(p, n))->token;
    return token == t->end ? -1 : token;
}

// -------------------------------------------------------------------------------------------------------------- the file

static inline uint32_t tokenizer_word(const Tokenizer *t, size_t at) {
    uint32_t word;
    memcpy(&word, t->file + at, sizeof word);
    return word;
}

// Reads the file and what its header says. A file larger than any tokenizer is not read.
static inline bool tokenizer_read(const char *path, Tokenizer *t, size_t *size, char *error, size_t cap) {
    t->file = (unsigned char *)file_read(path, TOKENIZER_MOST_BYTES, size);
    if (!t->file) return error_set(error, cap, "expected a tokenizer, found: %s", strerror(errno));
    if (*size < TOKENIZER_HEADER_BYTES) return error_set(error, cap, "expected %d bytes of header, found %zu", TOKENIZER_HEADER_BYTES, *size);
    uint32_t magic = tokenizer_word(t, 0), version = tokenizer_word(t, 4);
    uint32_t count = tokenizer_word(t, 4 * TOKENIZER_COUNT), end = tokenizer_word(t, 4 * TOKENIZER_END);
    if (magic != TOKENIZER_MAGIC) return error_set(error, cap, "expected a tokenizer with magic %d, found magic %u", TOKENIZER_MAGIC, magic);
    if (version != TOKENIZER_VERSION) return error_set(error, cap, "expected version %d, found %u", TOKENIZER_VERSION, version);
    if (count < 1 || count > TOKENIZER_MOST) return error_set(error, cap, "expected 1 to %d tokens, found the count %u", TOKENIZER_MOST, count);
    if (*size < TOKENIZER_HEADER_BYTES + 2 * (size_t)count) return error_set(error, cap, "expected at least %zu bytes for %u tokens, found %zu", TOKENIZER_HEADER_BYTES + 2 * (size_t)count, count, *size);
    if (end >= count) return error_set(error, cap, "expected an end-of-text token below %u, found %u", count, end);
    t->count = (int32_t)count;
    t->end = (int32_t)end;
    return true;
}

// Fills where and slots from the tokens, and moves *at behind them.
static inline bool tokenizer_read_tokens(Tokenizer *t, size_t size, size_t *at, char *error, size_t cap) {
    size_t room = 2;
    while (room < 2 * (size_t)t->count) room *= 2;
    t->mask = room - 1;
    t->where = (uint32_t *)check_alloc((size_t)t->count * sizeof *t->where, "the tokens of a tokenizer");
    t->slots = (TokenSlot *)check_alloc(room * sizeof *t->slots, "the tokens of a tokenizer");
    memset(t->slots, 0xFF, room * sizeof *t->slots);
    for (int32_t token = 0; token < t->count; token++) {
        if (*at >= size) return error_set(error, cap, "byte %zu: expected %d tokens, found the end after %d", *at, t->count, token);
        size_t length = t->file[*at];
        if (length == 0) return error_set(error, cap, "byte %zu: expected 1 to 255 bytes for token %d, found 0", *at, token);
        size_t left = size - *at - 1;
        if (left < length) return error_set(error, cap, "byte %zu: expected %zu bytes of token %d, found the end after %zu", *at, length, token, left);
        t->where[token] = (uint32_t)(*at + 1);
        *at += 1 + length;
        const unsigned char *bytes = t->file + t->where[token];
        uint64_t hash = tokenizer_hash(bytes, length);
        TokenSlot *slot = tokenizer_slot(t, bytes, length, hash);
        if (slot->token >= 0) return error_set(error, cap, "expected tokens that differ, found the same bytes as token %d and %d", slot->token, token);
        slot->tag = (uint32_t)(hash >> 32);
        slot->token = token;
    }
    return true;
}

// Fills classes from the ranges, which end the file.
static inline bool tokenizer_read_ranges(Tokenizer *t, size_t size, size_t at, char *error, size_t cap) {
    static const char *const NAMES[] = {"", "letters", "numbers", "spaces"};
    uint64_t ranges = 0;
    for (int i = 0; i < 3; i++) ranges += tokenizer_word(t, 4 * (size_t)(TOKENIZER_RANGES + i));
    if (size - at != 8 * ranges) {
        return error_set(error, cap, "expected %llu bytes for the %llu ranges of letters, numbers and spaces, found %zu",
                         (unsigned long long)(8 * ranges), (unsigned long long)ranges, size - at);
    }
    t->encodes = ranges > 0;
    if (!t->encodes) return true;
    t->classes = (unsigned char *)check_alloc(TOKENIZER_CODES, "the classes of characters");
    for (int kind = CLASS_LETTER; kind <= CLASS_SPACE; kind++) {
        int64_t before = -1;
        for (uint32_t left = tokenizer_word(t, 4 * (size_t)(TOKENIZER_RANGES + kind - CLASS_LETTER)); left; left--, at += 8) {
            uint32_t first = tokenizer_word(t, at), last = tokenizer_word(t, at + 4);
            if (first <= before || last < first || last >= TOKENIZER_CODES) {
                return error_set(error, cap, "byte %zu: expected a range of %s between U+%04X and U+10FFFF, found U+%04X to U+%04X",
                                 at, NAMES[kind], (unsigned)(before + 1), first, last);
            }
            for (uint32_t code = first; code <= last; code++) {
                const char *other = NAMES[t->classes[code]];
                if (*other) return error_set(error, cap, "expected U+%04X in one class, found it among %s and %s", code, other, NAMES[kind]);
                t->classes[code] = (unsigned char)kind;
            }
            before = last;
        }
    }
    return t->classes[0x20] == CLASS_SPACE || error_set(error, cap, "expected U+0020 among the spaces, found it elsewhere");
}

// Merging begins with single bytes: of each there must be a token.
static inline bool tokenizer_check_bytes(const Tokenizer *t, char *error, size_t cap) {
    for (unsigned byte = 0; byte < 256; byte++) {
        const unsigned char p = (unsigned char)byte;
        if (tokenizer_find(t, &p, 1) < 0) return error_set(error, cap, "expected every single byte as a token to encode with, found none for byte 0x%02X", byte);
    }
    return true;
}

// Opens a tokenizer, or says why not and leaves nothing to close. Whatever the file holds, the program goes on.
static inline bool tokenizer_try_open(const char *path, Tokenizer *t, char *error, size_t cap) {
    size_t size = 0, at = TOKENIZER_HEADER_BYTES;
    memset(t, 0, sizeof *t);
    bool ok = tokenizer_read(path, t, &size, error, cap) && tokenizer_read_tokens(t, size, &at, error, cap)
              && tokenizer_read_ranges(t, size, at, error, cap) && (!t->encodes || tokenizer_check_bytes(t, error, cap));
    t->size = size;
    if (!ok) tokenizer_close(t);
    return ok;
}

static inline void tokenizer_open(const char *path, Tokenizer *t) {
    char error[256];
    CHECK(tokenizer_try_open(path, t, error, sizeof error), "%s: %s\n  -> python3 data/get.py tokenizer --out FILE writes a sound one", path, error);
}

// ---------------------------------------------------------------------------------------------------------------- decoding

// The bytes of a token; they are UTF-8 only together with those of its neighbours.
static inline const char *tokenizer_decode(const Tokenizer *t, int32_t token, size_t *n) {
    CHECK(token >= 0 && token < t->count, "expected a token from 0 to %d, found %d\n  -> the tokenizer that the text was encoded with", t->count - 1, token);
    const unsigned char *bytes = t->file + t->where[token];
    *n = bytes[-1];
    return (const char *)bytes;
}

// ---------------------------------------------------------------------------------------------------------------- encoding

// The class of the character at `at`, and its length in bytes.
static inline int tokenizer_class(const Tokenizer *t, const char *text, size_t n, size_t at, size_t *length) {
    uint32_t code = (unsigned char)text[at];
    *length = 1;
    if (code < 0x80) return t->classes[code];
    *length = json_utf8_length(text + at, n - at);
    CHECK(*length, "expected UTF-8, found an invalid character at offset %zu\n"
          "  -> convert the text (iconv -f ISO-8859-1 -t UTF-8 FILE > NEW, with its real encoding)", at);
    code &= 0x7Fu >> *length;
    for (size_t i = 1; i < *length; i++) code = code << 6 | ((unsigned char)text[at + i] & 0x3F);
    return t->classes[code];
}

// Where the piece that begins at `at` ends: the pattern's alternatives in their order.
static inline size_t tokenizer_piece(const Tokenizer *t, const char *text, size_t n, size_t at) {
    size_t length, last = at;                              // last: where the last character of the run begins
    if (text[at] == '\'') {
        char a = at + 1 < n ? text[at + 1] : 0, b = at + 2 < n ? text[at + 2] : 0;
        if (a == 's' || a == 'd' || a == 'm' || a == 't') return at + 2;
        if ((a == 'l' && b == 'l') || ((a == 'v' || a == 'r') && b == 'e')) return at + 3;
    }
    int kind = tokenizer_class(t, text, n, at, &length);
    size_t next = at + length;
    if (text[at] == ' ' && next < n) {                     // a space belongs to what follows, if that is no space
        int following = tokenizer_class(t, text, n, next, &length);
        if (following != CLASS_SPACE) kind = following, next += length;
    }
    while (next < n && tokenizer_class(t, text, n, next, &length) == kind) last = next, next += length;
    // Spaces before a word leave it the last one, \s+(?!\S); where there is only one, \s+ takes it.
    return kind == CLASS_SPACE && next < n && last > at ? last : next;
}

// Merging keeps the parts of a piece as a list: next[i] and prev[i] are where the neighbours of the part at i begin. tree[leaves + i] is the token
// that the part at i makes with the next one, and tree[k] the lower of tree[2 k] and tree[2 k + 1]. So the lowest of all, tree[1], is kept and
// found in log n steps: n log n in all, whatever the text.
typedef struct { uint32_t *next, *prev, *tree; size_t leaves; } TokenizerParts;        // leaves: the power of two that is not below n

#define TOKENIZER_PARTS_WORDS(n) (6 * (n))                                             // of memory: next, prev, and a tree of two words for each leaf

static inline uint32_t tokenizer_lower(uint32_t a, uint32_t b) { return a < b ? a : b; }

// The n bytes of a piece as parts, laid out in memory.
static inline void tokenizer_parts(const Tokenizer *t, const unsigned char *p, size_t n, TokenizerParts *parts, uint32_t *memory) {
    parts->next = memory;
    parts->prev = memory + n;
    parts->tree = memory + 2 * n;
    for (parts->leaves = 1; parts->leaves < n;) parts->leaves *= 2;
    for (size_t i = 0; i < n; i++) {
        parts->next[i] = (uint32_t)i + 1;
        parts->prev[i] = (uint32_t)i - 1;
    }
    for (size_t i = 0; i < parts->leaves; i++) parts->tree[parts->leaves + i] = i + 1 < n ? (uint32_t)tokenizer_find(t, p + i, 2) : TOKENIZER_NO_MERGE;
    for (size_t k = parts->leaves - 1; k > 0; k--) parts->tree[k] = tokenizer_lower(parts->tree[2 * k], parts->tree[2 * k + 1]);
}

static inline void tokenizer_set_merge(TokenizerParts *parts, size_t i, uint32_t token) {
    uint32_t *tree = parts->tree;
    for (tree[i += parts->leaves] = token; i /= 2; tree[i] = token) {
        token = tokenizer_lower(tree[2 * i], tree[2 * i + 1]);
        if (tree[i] == token) break;
    }
}

// The leftmost part that makes this token, the lowest of all.
static inline size_t tokenizer_leftmost(const TokenizerParts *parts, uint32_t token) {
    size_t i = 1;
    while (i < parts->leaves) i = 2 * i + (parts->tree[2 * i] != token);
    return i - parts->leaves;
}

// The token that the part at i makes with the next part.
static inline uint32_t tokenizer_merge_at(const Tokenizer *t, const unsigned char *p, size_t n, const uint32_t *next, size_t i) {
    return next[i] < n ? (uint32_t)tokenizer_find(t, p + i, next[next[i]] - i) : TOKENIZER_NO_MERGE;
}

// Encodes a piece that is not a token; `tokens` has room for n.
static inline int64_t tokenizer_merge(const Tokenizer *t, const unsigned char *p, size_t n, int32_t *tokens, uint32_t *memory) {
    TokenizerParts parts;
    int64_t count = 0;
    tokenizer_parts(t, p, n, &parts, memory);
    for (size_t i = 0; i < n; i++) tokens[i] = tokenizer_find(t, p + i, 1);
    for (uint32_t token; (token = parts.tree[1]) != TOKENIZER_NO_MERGE;) {
        size_t i = tokenizer_leftmost(&parts, token), gone = parts.next[i];
        tokens[i] = (int32_t)token;
        parts.next[i] = parts.next[gone];
        if (parts.next[i] < n) parts.prev[parts.next[i]] = (uint32_t)i;
        tokenizer_set_merge(&parts, gone, TOKENIZER_NO_MERGE);
        tokenizer_set_merge(&parts, i, tokenizer_merge_at(t, p, n, parts.next, i));
        if (i > 0) tokenizer_set_merge(&parts, parts.prev[i], tokenizer_merge_at(t, p, n, parts.next, parts.prev[i]));
    }
    for (size_t i = 0; i < n; i = parts.next[i]) tokens[count++] = tokens[i];
    return count;
}

// Writes the tokens of n bytes of UTF-8 and returns how many; `tokens` has room for n. Several threads may share a tokenizer. Memory is
// taken for long words only.
static inline int64_t tokenizer_encode(const Tokenizer *t, const char *text, size_t n, int32_t *tokens) {
    CHECK(t->encodes, "expected a tokenizer with its classes of characters, found one that only decodes, as llm.c writes it\n"
          "  -> python3 data/get.py tokenizer --out FILE writes one that encodes");
    uint32_t on_stack[TOKENIZER_PARTS_WORDS(TOKENIZER_SHORT)];
    int64_t count = 0;
    for (size_t at = 0, end; at < n; at = end) {
        end = tokenizer_piece(t, text, n, at);
        const unsigned char *piece = (const unsigned char *)text + at;
        size_t length = end - at;
        int32_t token = tokenizer_find(t, piece, length);
        if (token >= 0) {
            tokens[count++] = token;
            continue;
        }
        CHECK(length < TOKENIZER_NO_MERGE, "expected words below 4 GiB, found one of %zu bytes at offset %zu\n"
              "  -> check that this is text, and break its lines", length, at);
        uint32_t *memory = on_stack;
        if (length > TOKENIZER_SHORT) memory = (uint32_t *)check_alloc(TOKENIZER_PARTS_WORDS(length) * sizeof *memory, "a long word");
        count += tokenizer_merge(t, piece, length, tokens + count, memory);
        if (memory != on_stack) free(memory);
    }
    return count;
}
