// tokenizer.c: see tokenizer.h.
#include "tokenizer.h"
#include "files.h"

enum { MOST_TOKENS = 1 << 20 };  // the largest vocabularies in use have a quarter of it
enum { CODES = 0x110000 };       // code points of Unicode
enum { MOST_BYTES = 1 << 29 };   // of a file

// Also closes a tokenizer that was opened in part.
void tokenizer_close(Tokenizer *t) {
    free(t->file);
    free(t->where);
    free(t->order);
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
        const uint8_t *known = t->file + t->where[t->order[t->slots[i]]];
        if (known[-1] == n && memcmp(known, bytes, n) == 0) break;
    }
    return &t->slots[i];
}

int32_t tokenizer_find(const Tokenizer *t, const char *bytes, size_t n) {
    int32_t rank = *find_slot(t, bytes, n);
    return rank < 0 ? -1 : t->order[rank];
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
    if (magic != TOKENIZER_MAGIC || version < 2 || version > 3)
        return error_set(error,
                         "expected a tokenizer with magic %d and version 2 or 3, found %zu bytes "
                         "with %u and %u",
                         TOKENIZER_MAGIC, t->size, magic, version);
    uint32_t count = word_at(t, 4 * TOKENIZER_COUNT), end = word_at(t, 4 * TOKENIZER_END);
    // A token takes two bytes or more, so the file's size bounds the memory for any header.
    uint32_t most = least((t->size - TOKENIZER_HEADER_BYTES) / 2, MOST_TOKENS);
    if (count < 1 || count > most || end >= count)
        return error_set(error,
                         "expected 1 to %u tokens, one of them the end-of-text token, found %u "
                         "and the end-of-text token %u",
                         most, count, end);
    t->count = count;
    t->end = end;
    memcpy(&t->how, t->file + 4 * TOKENIZER_HOW, sizeof t->how);
    if (t->how.cut > CUT_NOT || t->how.prefix > PREFIX_EACH ||
        (t->how.bytes && t->how.bytes + 255ull >= count))
        return error_set(error, "expected a way to cut text, found %u, %u and %u", t->how.cut,
                         t->how.prefix, t->how.bytes);
    return true;
}

// Fills where, and advances *at past the tokens.
static bool read_tokens(Tokenizer *t, size_t *at, char *error) {
    t->where = check_alloc(t->count * sizeof *t->where, "a tokenizer");
    for (int32_t token = 0; token < t->count; token++) {
        size_t left = t->size - *at, length = left ? t->file[*at] : 0;
        if (length == 0 || length >= left)
            return error_set(error, "byte %zu: token %d of %d is empty or cut", *at, token,
                             t->count);
        t->where[token] = *at + 1;
        *at += 1 + length;
    }
    return true;
}

// Fills order, names and slots from the lists. In version 2, which has none, all tokens merge, in
// the order of ids.
static bool read_lists(Tokenizer *t, char *error) {
    uint32_t count = t->count, merging = t->how.order ? t->how.order : count;
    uint32_t all = merging + t->how.names;
    uint32_t listed = t->how.order + t->how.names, slots = 1;
    while (slots < 2 * count) slots *= 2;
    t->mask = slots - 1;
    t->slots = check_alloc(slots * sizeof *t->slots, "a tokenizer");
    memset(t->slots, 0xFF, slots * sizeof *t->slots);  // -1
    t->order = check_alloc(4 * all, "a tokenizer");
    t->names = t->order + merging;
    for (uint32_t rank = 0; rank < merging; rank++) t->order[rank] = rank;
    // The file's lists become the end of `order`.
    memcpy(t->order + all - listed, t->file + t->size - t->how.attached - 4 * listed, 4 * listed);
    for (uint32_t i = 0; i < all; i++) {
        uint32_t token = t->order[i];
        if (token >= count) return error_set(error, "token %u of %u is listed", token, count);
        if (i >= merging || token == (uint32_t)t->end) continue;
        const uint8_t *text = t->file + t->where[token];
        int32_t *slot = find_slot(t, text, text[-1]);
        if (*slot >= 0)
            return error_set(error, "tokens %d and %u are the same", t->order[*slot], token);
        *slot = i;
    }
    return true;
}

// Fills classes from the ranges. Lists of tokens and attached bytes follow, to the file's end.
static bool read_ranges(Tokenizer *t, size_t at, char *error) {
    uint64_t counts[CLASS_SORTED + 1] = {0}, ranges = 0;
    for (int kind = CLASS_LETTER; kind <= CLASS_SORTED; kind++)
        ranges += counts[kind] = word_at(t, 4 * (TOKENIZER_RANGES + kind - 1));
    uint64_t behind = 8 * ranges + 4ull * t->how.order + 4ull * t->how.names + t->how.attached;
    if (t->size - at != behind)
        return error_set(error, "expected %llu bytes of ranges and lists, found %zu",
                         behind + 0ull, t->size - at);
    // A file of llm.c ends here: it decodes only.
    if (!ranges) return true;
    t->classes = check_alloc(CODES, "the classes of characters");
    for (int kind = CLASS_LETTER; kind <= CLASS_SORTED; kind++)
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
    // The patterns need it.
    return t->classes[' '] == CLASS_SPACE || error_set(error, "U+0020 is not a space");
}

bool tokenizer_open(const char *path, Tokenizer *t, char *error) {
    size_t at = TOKENIZER_HEADER_BYTES;
    memset(t, 0, sizeof *t);
    bool ok = read_header(path, t, error) && read_tokens(t, &at, error) &&
              read_ranges(t, at, error) && read_lists(t, error);
    if (!ok) tokenizer_close(t);
    return ok;
}

// ------------------------------------------------------------------------------------------ pieces

// The code point of the character at `at`, and its length in bytes, 0 if it is not UTF-8.
static uint32_t code_at(const char *text, size_t n, size_t at, size_t *length) {
    uint32_t code = (uint8_t)text[at];
    *length = utf8_length(text + at, n - at);
    if (*length > 1) code &= 0x7Fu >> *length;
    for (size_t i = 1; i < *length; i++) code = code << 6 | ((uint8_t)text[at + i] & 0x3F);
    return code;
}

// The class of the character at `at` for the patterns, and its length in bytes.
static int class_at(const Tokenizer *t, const char *text, size_t n, size_t at, size_t *length) {
    return t->classes[code_at(text, n, at, length)] % CLASS_SORTED;  // SORTED counts as OTHER
}

static bool is_newline(char c) { return c == '\n' || c == '\r'; }

// Bytes of the contraction after an apostrophe: s, d, m, t, ll, ve or re; 0: there is none.
// `fold`: also in capitals, and with the long s, U+017F, whose capital is S.
static size_t contraction(const char *text, size_t n, bool fold) {
    const char small = fold ? 'a' - 'A' : 0;  // the bit that distinguishes them
    char a = n > 0 ? text[0] | small : 0, b = n > 1 ? text[1] | small : 0;
    if (a == 's' || a == 'd' || a == 'm' || a == 't') return 1;
    if ((a == 'l' && b == 'l') || ((a == 'v' || a == 'r') && b == 'e')) return 2;
    return fold && n > 1 && !memcmp(text, "\xC5\xBF", 2) ? 2 : 0;
}

// Tries the alternatives of the pattern (tokenizer.h) in order.
size_t tokenizer_piece(const Tokenizer *t, const char *text, size_t n, size_t at) {
    if (t->how.cut == CUT_NOT) return n;
    bool llama3 = t->how.cut == CUT_LLAMA3, space = text[at] == ' ';
    size_t length, last = at;  // last: where the last character of the run begins
    if (text[at] == '\'' && (length = contraction(text + at + 1, n - at - 1, llama3)))
        return at + 1 + length;
    // A run of characters of one class begins here or after one character: a space, or, before
    // letters in Llama 3's pattern, any but numbers and newlines.
    int kind = class_at(t, text, n, at, &length);
    size_t next = at + length;
    if (next < n && (space || (llama3 && kind != CLASS_NUMBER && !is_newline(text[at])))) {
        int to = class_at(t, text, n, next, &length);
        bool joins = to == CLASS_OTHER || (to == CLASS_NUMBER && !llama3 && !t->how.digits);
        if (to == CLASS_LETTER || (space && joins)) kind = to, next += length;
    }
    for (uint32_t count = 1; next < n && class_at(t, text, n, next, &length) == kind; count++) {
        if (kind == CLASS_NUMBER && count == t->how.digits) break;
        last = next;
        next += length;
    }
    if (llama3 && kind == CLASS_OTHER)
        while (next < n && is_newline(text[next])) next++;
    if (kind != CLASS_SPACE) return next;
    for (size_t i = next; llama3 && i > at; i--)  // \s*[\r\n]+
        if (is_newline(text[i - 1])) return i;
    // \s+(?!\S): the last of several spaces belongs to the next word. \s+: a single one is a piece.
    // At a text's end all spaces stay together; in GPT-2 with digits, also before a number.
    bool ends = next == n || (!llama3 && t->how.digits &&
                              class_at(t, text, n, next, &length) == CLASS_NUMBER);
    return last > at && !ends ? last : next;
}

// ------------------------------------------------------------------------------------------ merges

// The rank of the token that the part at i and the next one make; SIZE_MAX: none.
static size_t merged_rank(const Tokenizer *t, const char *piece, size_t n, const size_t *length,
                          size_t i) {
    size_t next = i + length[i];
    return next < n ? *find_slot(t, piece + i, length[i] + length[next]) : -1;
}

// Byte-pair encoding (BPE) of a piece. It starts as single bytes (SentencePiece: characters).
// Among all adjacent parts whose bytes together are a token, the pair with the token of lowest rank
// is merged, the leftmost one first, until no pair is left. Ranks follow the order in which merges
// were learned, so no list of pairs is needed.
//
// A sweep from left to right merges all pairs of the lowest rank. A merge makes two new pairs, with
// the part before and the part behind. A new pair whose rank is not above the lowest is merged at
// once: on its left all other pairs have higher ranks, on its right none has a lower one. So the
// order is that of one merge at a time, and a rank takes one sweep. Time grows with n times the
// number of ranks that are merged; a pattern that cuts the text keeps n short.
//
// Writes the tokens of a piece of n bytes, at most n, and returns how many. A part that is no token
// becomes its bytes.
static int64_t merge_piece(const Tokenizer *t, const char *piece, size_t n, int32_t *tokens) {
    // Three arrays [n], by where a part begins: its bytes, where the part before it begins, and its
    // merged_rank.
    size_t *length = check_alloc(3 * n * sizeof *length, "a word");
    size_t *before = length + n, *rank = before + n;
    int64_t count = 0;
    for (size_t i = 0, last = 0; i < n; last = i, i += length[i]) {
        length[i] = t->how.bytes ? utf8_length(piece + i, n - i) : 1;
        before[i] = last;
    }
    for (size_t i = 0; i < n; i += length[i]) rank[i] = merged_rank(t, piece, n, length, i);
    for (;;) {
        size_t lowest = SIZE_MAX;
        for (size_t i = 0; i < n; i += length[i])
            if (rank[i] < lowest) lowest = rank[i];
        if (lowest == SIZE_MAX) break;
        for (size_t i = 0; i < n;) {
            if (rank[i] > lowest) {
                i += length[i];
                continue;
            }
            length[i] += length[i + length[i]];
            if (i + length[i] < n) before[i + length[i]] = i;
            rank[i] = merged_rank(t, piece, n, length, i);
            rank[before[i]] = merged_rank(t, piece, n, length, before[i]);
            if (rank[before[i]] <= rank[i]) i = before[i];
        }
    }
    // The parts that are left, from left to right.
    for (size_t i = 0; i < n; i += length[i]) {
        int32_t token = tokenizer_find(t, piece + i, length[i]);
        // A character that is no token becomes tokens of bytes, which SentencePiece has.
        CHECK(token >= 0 || t->how.bytes,
              "no token is the single byte 0x%02X\n  -> text without it", piece[i] & 0xFF);
        if (token >= 0) tokens[count++] = token;
        for (size_t k = 0; token < 0 && k < length[i]; k++)
            tokens[count++] = t->how.bytes + (uint8_t)piece[i + k];
    }
    free(length);
    return count;
}

// -------------------------------------------------------------------------------------------- text

// Writes the tokens of text between special tokens. `first`: it begins the whole text.
static int64_t encode_words(const Tokenizer *t, const char *text, size_t n, bool first,
                            int32_t *tokens) {
    char *words = check_alloc(n + 1, "a text");
    int64_t count = 0;
    *words = ' ';  // the prefix
    memcpy(words + 1, text, n);
    first = first && *text != ' ' && t->how.prefix;
    for (size_t at = !first && t->how.prefix != PREFIX_EACH, end; at <= n; at = end) {
        end = tokenizer_piece(t, words, n + 1, at);
        // Most pieces are a token as a whole.
        int32_t token = tokenizer_find(t, words + at, end - at);
        if (token >= 0) tokens[count++] = token;
        else count += merge_piece(t, words + at, end - at, tokens + count);
    }
    free(words);
    return count;
}

// The longest special token whose name begins the text, and its length; -1: there is none.
static int32_t find_name(const Tokenizer *t, const char *text, size_t n, size_t *length) {
    int32_t longest = -1;
    size_t bytes;
    *length = 0;
    for (uint32_t i = 0; i < t->how.names; i++) {
        const char *name = tokenizer_decode(t, t->names[i], &bytes);
        // It ends where a character does.
        if (bytes > *length && bytes <= n && !memcmp(text, name, bytes) &&
            (bytes == n || utf8_length(text + bytes, n - bytes)))
            longest = t->names[i], *length = bytes;
    }
    return longest;
}

int64_t tokenizer_encode(const Tokenizer *t, const char *text, size_t n, int32_t *tokens) {
    CHECK(t->classes,
          "this tokenizer only decodes\n"
          "  -> python3 data/tokenizer.py FOLDER writes another, or says why not");
    int64_t count = 0;
    for (size_t at = 0, length, before = 0, kind; at < n; at += length, before = kind) {
        kind = t->classes[code_at(text, n, at, &length)];
        CHECK(length,
              "expected UTF-8, found an invalid character at offset %zu\n"
              "  -> convert it (iconv -f ISO-8859-1 -t UTF-8 FILE > NEW, with its real encoding)",
              at);
        CHECK(kind != CLASS_REPLACED && (kind != CLASS_SORTED || before != kind),
              "this tokenizer may first replace the character at offset %zu, or sort it\n"
              "  -> dev/export_hf.py, and this prompt in transformers",
              at);
    }
    for (size_t at = 0, end, length = 0; at < n; at = end + length) {
        int32_t name = -1;
        for (end = at; end < n; end += utf8_length(text + end, n - end))
            if ((name = find_name(t, text + end, n - end, &length)) >= 0) break;
        if (end > at) count += encode_words(t, text + at, end - at, !at, tokens + count);
        if (name >= 0) tokens[count++] = name;
    }
    return count;
}
