// tokenizer.c: see tokenizer.h.
#include "tokenizer.h"
#include "files.h"

enum { MOST_TOKENS = 1 << 20 };  // the largest vocabularies in use have a quarter of it
enum { CODES = 0x110000 };       // code points of Unicode
enum { MOST_BYTES = TOKENIZER_HEADER_BYTES + MOST_TOKENS * 256 + CODES * 8 };  // of a file

// Also closes a tokenizer that was opened in part.
void tokenizer_close(Tokenizer *t) {
    free(t->file);
    free(t->where);
    free(t->slots);
    free(t->classes);
    memset(t, 0, sizeof *t);
}

// ----------------------------------------------------------------------------- from bytes to token

// The slot of these bytes, or the empty slot where they belong (open addressing, linear probing).
// At most half of the slots are used, so an empty one ends every search.
static int32_t *find_slot(const Tokenizer *t, const void *bytes, size_t n) {
    uint64_t i = hash_bytes(bytes, n) & t->mask;
    for (; t->slots[i] >= 0; i = (i + 1) & t->mask) {
        const uint8_t *known = t->file + t->where[t->slots[i]];
        if (known[-1] == n && memcmp(known, bytes, n) == 0) break;
    }
    return &t->slots[i];
}

int32_t tokenizer_find(const Tokenizer *t, const char *bytes, size_t n) {
    int32_t token = *find_slot(t, bytes, n);
    return token == t->end ? -1 : token;
}

// A pointer into the file: nothing is copied.
const char *tokenizer_decode(const Tokenizer *t, int32_t token, size_t *n) {
    CHECK(token >= 0 && token < t->count,
          "expected a token from 0 to %d, found %d\n"
          "  -> the tokenizer that the text was encoded with",
          t->count - 1, token);
    const uint8_t *bytes = t->file + t->where[token];
    *n = bytes[-1];
    return (const char *)bytes;
}

// ---------------------------------------------------------------------------------------- the file

// The little-endian word at offset `at` of the file; it may be unaligned.
static uint32_t word_at(const Tokenizer *t, size_t at) {
    uint32_t word;
    memcpy(&word, t->file + at, sizeof word);
    return word;
}

// Reads the file, and the counts of its header.
static bool read_header(const char *path, Tokenizer *t, char *error) {
    t->file = (uint8_t *)file_read(path, MOST_BYTES, &t->size);
    if (!t->file) return error_set(error, "expected a tokenizer, found: %s", file_error());
    bool whole = t->size >= TOKENIZER_HEADER_BYTES;
    uint32_t magic = whole ? word_at(t, 0) : 0, version = whole ? word_at(t, 4) : 0;
    if (magic != TOKENIZER_MAGIC || version != TOKENIZER_VERSION)
        return error_set(error,
                         "expected a tokenizer with magic %d and version %d, found %zu bytes with "
                         "%u and %u",
                         TOKENIZER_MAGIC, TOKENIZER_VERSION, t->size, magic, version);
    uint32_t count = word_at(t, 4 * TOKENIZER_COUNT), end = word_at(t, 4 * TOKENIZER_END);
    // A token takes two bytes or more, so the file's size bounds the memory for any header.
    uint32_t most = (t->size - TOKENIZER_HEADER_BYTES) / 2;
    if (most > MOST_TOKENS) most = MOST_TOKENS;
    if (count < 1 || count > most || end >= count)
        return error_set(error,
                         "expected 1 to %u tokens, one of them the end-of-text token, found %u "
                         "and the end-of-text token %u",
                         most, count, end);
    t->count = count;
    t->end = end;
    return true;
}

// Fills where and slots, and advances *at past the tokens.
static bool read_tokens(Tokenizer *t, size_t *at, char *error) {
    // At least twice as many slots as tokens, a power of two.
    for (t->mask = 1; t->mask < 2u * t->count;) t->mask *= 2;
    size_t slots = t->mask-- * sizeof *t->slots;
    t->where = check_alloc(t->count * sizeof *t->where, "a tokenizer");
    t->slots = check_alloc(slots, "a tokenizer");
    memset(t->slots, 0xFF, slots);  // -1
    for (int32_t token = 0; token < t->count; token++) {
        size_t left = t->size - *at, length = left ? t->file[*at] : 0;
        if (length == 0 || length >= left)
            return error_set(error, "byte %zu: token %d of %d is empty or cut", *at, token,
                             t->count);
        t->where[token] = *at + 1;
        *at += 1 + length;
        int32_t *slot = find_slot(t, t->file + t->where[token], length);
        if (*slot >= 0) return error_set(error, "tokens %d and %d are the same", *slot, token);
        *slot = token;
    }
    return true;
}

// Fills classes from the ranges, the last part of the file.
static bool read_ranges(Tokenizer *t, size_t at, char *error) {
    uint64_t counts[4] = {0}, ranges = 0;
    for (int kind = CLASS_LETTER; kind <= CLASS_SPACE; kind++)
        ranges += counts[kind] = word_at(t, 4 * (TOKENIZER_RANGES + kind - 1));
    if (t->size - at != 8 * ranges)
        return error_set(error, "expected %llu bytes of ranges of characters, found %zu",
                         8ull * ranges, t->size - at);
    t->encodes = ranges;
    // A file of llm.c ends here: it decodes only.
    if (!ranges) return true;
    t->classes = check_alloc(CODES, "the classes of characters");
    for (int kind = CLASS_LETTER; kind <= CLASS_SPACE; kind++)
        for (; counts[kind]; counts[kind]--, at += 8) {
            uint32_t first = word_at(t, at), last = word_at(t, at + 4);
            if (last < first || last >= CODES)
                return error_set(error, "byte %zu: expected a range, found U+%04X to U+%04X", at,
                                 first, last);
            // Each code point is set once, so hostile ranges take no more time than valid ones.
            for (uint32_t code = first; code <= last; code++) {
                if (t->classes[code]) return error_set(error, "U+%04X is in two classes", code);
                t->classes[code] = kind;
            }
        }
    return true;
}

// Refuses a file that cannot encode all text: the pattern needs U+0020 as a space, and merges start
// from tokens of single bytes.
static bool check_encodes(const Tokenizer *t, char *error) {
    if (t->classes[' '] != CLASS_SPACE) return error_set(error, "U+0020 is not a space");
    for (int byte = 0; byte < 256; byte++)
        if (tokenizer_find(t, &(char){byte}, 1) < 0)
            return error_set(error, "no token is the single byte 0x%02X", byte);
    return true;
}

bool tokenizer_try_open(const char *path, Tokenizer *t, char *error) {
    size_t at = TOKENIZER_HEADER_BYTES;
    memset(t, 0, sizeof *t);
    bool ok = read_header(path, t, error) && read_tokens(t, &at, error) &&
              read_ranges(t, at, error) && (!t->encodes || check_encodes(t, error));
    if (!ok) tokenizer_close(t);
    return ok;
}

void tokenizer_open(const char *path, Tokenizer *t) {
    char error[ERROR_CAP];
    CHECK(tokenizer_try_open(path, t, error),
          "%s: %s\n  -> python3 data/get.py tokenizer --out FILE writes a sound one", path, error);
}

// ------------------------------------------------------------------------------------------ pieces

// The class of the character at `at`, and its length in bytes.
static int class_at(const Tokenizer *t, const char *text, size_t n, size_t at, size_t *length) {
    uint32_t code = (uint8_t)text[at];
    *length = utf8_length(text + at, n - at);
    CHECK(*length,
          "expected UTF-8, found an invalid character at offset %zu\n"
          "  -> convert it (iconv -f ISO-8859-1 -t UTF-8 FILE > NEW, with its real encoding)",
          at);
    if (*length > 1) code &= 0x7Fu >> *length;
    for (size_t i = 1; i < *length; i++) code = code << 6 | ((uint8_t)text[at + i] & 0x3F);
    return t->classes[code];
}

// Tries the alternatives of the pattern (tokenizer.h) in order.
size_t tokenizer_piece(const Tokenizer *t, const char *text, size_t n, size_t at) {
    size_t length, last = at;  // last: where the last character of the run begins
    if (text[at] == '\'') {
        char a = at + 1 < n ? text[at + 1] : 0, b = at + 2 < n ? text[at + 2] : 0;
        if (a == 's' || a == 'd' || a == 'm' || a == 't') return at + 2;
        if ((a == 'l' && b == 'l') || ((a == 'v' || a == 'r') && b == 'e')) return at + 3;
    }
    // A run of characters of one class, after an optional space.
    int kind = class_at(t, text, n, at, &length);
    size_t next = at + length;
    if (text[at] == ' ' && next < n) {  // a space belongs to the word after it
        int following = class_at(t, text, n, next, &length);
        if (following != CLASS_SPACE) kind = following, next += length;
    }
    while (next < n && class_at(t, text, n, next, &length) == kind) last = next, next += length;
    // \s+(?!\S): of several spaces the last one belongs to the next word. \s+: a single one does
    // not.
    return kind == CLASS_SPACE && next < n && last > at ? last : next;
}

// ------------------------------------------------------------------------------------------ merges

// Byte-pair encoding (BPE) of a piece. It starts as single bytes. Among all adjacent parts whose
// bytes together are a token, the pair with the lowest token id is merged, the leftmost one first,
// until no pair is left. Ids have the order in which merges were learned, so no list of merges is
// needed. A binary heap has the possible merges, lowest id first, so a piece of n bytes takes
// n log n steps. An entry is stale, and skipped, if the two parts at its place no longer have as
// many bytes as its token.
typedef struct {
    const Tokenizer *t;
    const char *piece;
    size_t n;          // bytes of the piece
    uint64_t *heap;    // [3 n] token << 32 | where the left part begins
    size_t count;      // of the heap
    uint32_t *length;  // [n] bytes of the part that begins here, 0: none does
    uint32_t *before;  // [n] where the part before the one that begins here begins
} Merges;

// Invariant: heap[i] is at most heap[2 i + 1] and heap[2 i + 2].
static void heap_add(Merges *m, uint64_t entry) {
    size_t i = m->count++;
    for (; i > 0 && m->heap[(i - 1) / 2] > entry; i = (i - 1) / 2)
        m->heap[i] = m->heap[(i - 1) / 2];
    m->heap[i] = entry;
}

// Removes the least entry; the last one sinks from the root to its place.
static uint64_t heap_take(Merges *m) {
    uint64_t least = m->heap[0], entry = m->heap[--m->count];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < m->count; i = child) {
        if (child + 1 < m->count && m->heap[child + 1] < m->heap[child]) child++;
        if (m->heap[child] >= entry) break;
        m->heap[i] = m->heap[child];
    }
    m->heap[i] = entry;
    return least;
}

// Adds the merge of the part at i with the next one, if together they are a token.
static void merges_add(Merges *m, size_t i) {
    size_t next = i + m->length[i];
    if (next >= m->n) return;
    size_t length = m->length[i] + m->length[next];
    int32_t token = tokenizer_find(m->t, m->piece + i, length);
    if (token >= 0) heap_add(m, (uint64_t)token << 32 | i);
}

// Writes the tokens of a piece of n bytes, at most n, and returns how many. The heap gets less than
// 3 n entries: n - 1 at first, and two for each of at most n - 1 merges.
static int64_t merge_piece(const Tokenizer *t, const char *piece, size_t n, int32_t *tokens) {
    uint64_t *heap = check_alloc(4 * n * sizeof *heap, "a word");
    uint32_t *length = (uint32_t *)(heap + 3 * n), *before = length + n;
    Merges m = {t, piece, n, heap, 0, length, before};
    int64_t count = 0;
    for (size_t i = 0; i < n; i++) {
        length[i] = 1;
        before[i] = i - 1;
    }
    for (size_t i = 0; i < n; i++) merges_add(&m, i);
    while (m.count) {
        uint64_t entry = heap_take(&m);
        size_t i = (uint32_t)entry, next = i + length[i];
        size_t bytes = t->file[t->where[entry >> 32] - 1];  // of the entry's token
        if (!length[i] || next >= n || length[i] + length[next] != bytes) continue;
        length[i] = bytes;
        length[next] = 0;
        if (i + bytes < n) before[i + bytes] = i;
        merges_add(&m, i);
        if (i > 0) merges_add(&m, before[i]);
    }
    // The parts that are left, from left to right.
    for (size_t i = 0; i < n; i += length[i])
        tokens[count++] = tokenizer_find(t, piece + i, length[i]);
    free(heap);
    return count;
}

int64_t tokenizer_encode(const Tokenizer *t, const char *text, size_t n, int32_t *tokens) {
    CHECK(t->encodes,
          "expected a tokenizer with classes of characters, found one that only decodes\n"
          "  -> python3 data/get.py tokenizer --out FILE writes one that encodes");
    int64_t count = 0;
    for (size_t at = 0, end; at < n; at = end) {
        end = tokenizer_piece(t, text, n, at);
        size_t length = end - at;
        // Most pieces are a token as a whole.
        int32_t token = tokenizer_find(t, text + at, length);  // of the whole piece
        if (token >= 0) {
            tokens[count++] = token;
            continue;
        }
        CHECK(length < UINT32_MAX,
              "expected words below 4 GiB, found one of %zu bytes at offset %zu\n"
              "  -> check that this is text, and break its lines",
              length, at);
        count += merge_piece(t, text + at, length, tokens + count);
    }
    return count;
}
