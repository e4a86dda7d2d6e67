// json.c: see json.h.
//
// A recursive descent parser: one function for each rule of the grammar. It advances r->at past
// what it has read; on an error it writes what it expected and returns false. The text is copied
// once, with a zero after it, so the functions of string.h stop at its end; strings are decoded in
// place.
#include "json.h"
#include "files.h"
#include <ctype.h>
#include <math.h>

enum { JSON_DEPTH = 64 };

typedef struct {
    char *at, *begin, *end;  // a copy of the text with a zero at its end; strings are decoded in it
    char *error;             // of the caller, ERROR_CAP bytes
    int values;              // so far
} Reader;

// ----------------------------------------------------------------------------------------- reading

// Every error names the byte offset, what the grammar expects there, and what was found.
static bool expected(Reader *r, const char *what) {
    char found[16] = "the end";
    uint8_t c = *r->at;
    if (r->at < r->end) snprintf(found, sizeof found, isgraph(c) ? "'%c'" : "byte 0x%02X", c);
    return error_set(r->error, "byte %zu: expected %s, found %s", (size_t)(r->at - r->begin), what,
                     found);
}

// Steps over the word if it comes next. The zero after the copy ends every comparison.
static bool take(Reader *r, const char *word) {
    size_t n = strlen(word);
    if (strncmp(r->at, word, n)) return false;
    r->at += n;
    return true;
}

// The four white space characters of RFC 8259.
static void take_space(Reader *r) { r->at += strspn(r->at, " \t\r\n"); }

// False: there is no digit.
static bool take_digits(Reader *r) {
    size_t n = strspn(r->at, "0123456789");
    r->at += n;
    return n > 0;
}

// -? (0 | [1-9][0-9]*) (. [0-9]+)? ([eE] [+-]? [0-9]+)?   strtod and strtoll would accept more, so
// the grammar is checked first.
static bool read_number(Reader *r, Json *v) {
    char *from = r->at, *end;
    take(r, "-");
    bool ok = take(r, "0") || take_digits(r);
    if (ok && take(r, ".")) ok = take_digits(r);
    if (ok && (take(r, "e") || take(r, "E"))) {
        if (!take(r, "+")) take(r, "-");
        ok = take_digits(r);
    }
    if (!ok) return expected(r, "a digit");
    // The same text is read twice: as a double, and exactly if it is an integer.
    v->number = strtod(from, NULL);
    if (isinf(v->number)) {
        r->at = from;
        return expected(r, "a number in a double's range");
    }
    errno = 0;  // strtoll sets ERANGE beyond int64: then the value is a double
    v->integer = strtoll(from, &end, 10);  // it ends before a point or an exponent
    v->kind = end == r->at && !errno ? JSON_INT : JSON_REAL;
    return true;
}

// The four digits of \u00e9.
static bool read_hex4(Reader *r, uint32_t *code) {
    char digits[5] = "";
    for (int i = 0; i < 4; i++) {
        if (!isxdigit((uint8_t)*r->at))
            return expected(r, "four hexadecimal digits after \\u");
        digits[i] = *r->at++;
    }
    *code = strtoul(digits, NULL, 16);
    return true;
}

// The escape after a backslash. A character outside the basic plane is two escapes: a high
// surrogate, then a low one.
static bool read_escape(Reader *r, char **out) {
    static const char LETTERS[] = "\"\\/bfnrt", MEANINGS[] = "\"\\/\b\f\n\r\t";
    size_t letter = strcspn(LETTERS, (char[2]){*r->at});
    if (LETTERS[letter]) {
        *(*out)++ = MEANINGS[letter];
        r->at++;
        return true;
    }
    if (!take(r, "u")) return expected(r, "one of \"\\/bfnrtu after the backslash");
    // The basic plane takes one escape of four digits.
    uint32_t code = 0, low = 0;
    if (!read_hex4(r, &code)) return false;
    if (code == 0) return expected(r, "no \\u0000 inside a string");
    if (code >= 0xD800 && code < 0xE000) {
        bool high = code < 0xDC00 && take(r, "\\u");
        if (high && !read_hex4(r, &low)) return false;
        if (low < 0xDC00 || low >= 0xE000) return expected(r, "both halves of a surrogate pair");
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    }
    *out = utf8_put(*out, code);
    return true;
}

// The rest of a string, after its opening quote. It is decoded in place, which works because an
// escape is never shorter than its character: \n is two bytes for one, \u20AC six for three.
static bool read_string(Reader *r, const char **text) {
    char *out = r->at;
    *text = out;
    while (!take(r, "\"")) {
        if (r->at == r->end) return expected(r, "the closing quote of a string");
        if ((uint8_t)*r->at < 0x20)
            return expected(r, "no control character inside a string (\\n, \\u001F)");
        if (take(r, "\\")) {
            if (!read_escape(r, &out)) return false;
            continue;
        }
        // Whole characters are moved, so that an invalid one is refused at its own offset.
        size_t length = utf8_length(r->at, r->end - r->at);
        if (!length) return expected(r, "valid UTF-8");
        memmove(out, r->at, length);
        out += length;
        r->at += length;
    }
    *out = 0;
    return true;
}

// Compares two members by strcmp: sort_members and json_get must agree on the order.
static int compare_keys(const void *a, const void *b) {
    return strcmp((*(Json *const *)a)->key, (*(Json *const *)b)->key);
}

// Sorting brings equal keys together, so duplicates are found in n log n steps.
static bool sort_members(Reader *r, Json *object) {
    Json **sorted = object->sorted = check_alloc(object->count * sizeof *sorted, "a JSON object");
    size_t n = 0;
    for (Json *m = object->first; m; m = m->next) sorted[n++] = m;
    qsort(sorted, n, sizeof *sorted, compare_keys);
    for (size_t i = 1; i < n; i++)
        if (compare_keys(&sorted[i - 1], &sorted[i]) == 0)
            return error_set(r->error, "byte %zu: the object that ends here has \"%s\" twice",
                             (size_t)(r->at - r->begin), sorted[i]->key);
    return true;
}

// Arrays and objects hold values, which may be arrays and objects: the rules call each other.
static bool read_value(Reader *r, int depth, Json *v);

// The name of a member and the colon after it.
static bool read_key(Reader *r, Json *member) {
    take_space(r);
    if (!take(r, "\"")) return expected(r, "the name of a member in double quotes");
    if (!read_string(r, &member->key)) return false;
    take_space(r);
    return take(r, ":") || expected(r, "':'");
}

// An array or an object. Every item is added to the tree before it is read, so that json_free of
// the root frees all of them after an error.
static bool read_items(Reader *r, int depth, Json *v, bool object) {
    const char *close = object ? "}" : "]";
    if (depth == JSON_DEPTH) return expected(r, "at most 64 nested arrays and objects");
    v->kind = object ? JSON_OBJECT : JSON_ARRAY;
    take_space(r);
    if (take(r, close)) return true;
    for (Json **link = &v->first;; link = &(*link)->next) {
        if (++r->values > JSON_VALUES) return expected(r, "fewer values");
        // Append to the linked list.
        Json *item = *link = check_alloc(sizeof *item, "a JSON value");
        v->count++;
        if (object && !read_key(r, item)) return false;
        if (!read_value(r, depth + 1, item)) return false;
        if (take(r, close)) return !object || sort_members(r, v);
        if (!take(r, ",")) return expected(r, object ? "',' or '}'" : "',' or ']'");
    }
}

// A value and the space around it.
static bool read_value(Reader *r, int depth, Json *v) {
    bool ok = true;
    take_space(r);
    if (take(r, "{")) ok = read_items(r, depth, v, true);
    else if (take(r, "[")) ok = read_items(r, depth, v, false);
    else if (take(r, "\"")) v->kind = JSON_STRING, ok = read_string(r, &v->text);
    else if (*r->at == '-' || isdigit((uint8_t)*r->at)) ok = read_number(r, v);
    else if ((v->integer = take(r, "true")) || take(r, "false")) v->kind = JSON_BOOL;
    else ok = take(r, "null") || expected(r, "a value");
    take_space(r);
    return ok;
}

// One block of memory has the root and the copy of the text, so json_free of the root frees both.
Json *json_try_parse(const char *text, size_t n, char *error) {
    Json *root = check_alloc(sizeof *root + n + 1, "a JSON text");
    char *copy = memcpy(root + 1, text, n);
    Reader r = {copy, copy, copy + n, error, 0};
    if (read_value(&r, 0, root) && (r.at == r.end || expected(&r, "the end"))) return root;
    json_free(root);
    return NULL;
}

#define REPAIR "\n  -> repair the file, or restore it from its source"

// The caller may free or change the text: the tree has its own copy.
Json *json_parse(const char *text, size_t n, const char *where) {
    char error[ERROR_CAP];
    Json *root = json_try_parse(text, n, error);
    CHECK(root, "%s is not valid JSON: %s" REPAIR, where, error);
    return root;
}

// A missing file and a damaged one need different remedies, so their messages differ.
Json *json_read_file(const char *path, char **text) {
    size_t n;
    char *read = file_read(path, JSON_MOST, &n);
    CHECK(read, "cannot read %s: %s\n  -> check the path", path, file_error());
    Json *root = json_parse(read, n, path);
    if (text) *text = read;
    else free(read);
    return root;
}

// Recursion is as deep as the nesting, which JSON_DEPTH limits; siblings are a loop.
void json_free(Json *v) {
    while (v) {
        Json *next = v->next;
        json_free(v->first);
        free(v->sorted);
        free(v);
        v = next;
    }
}

// ----------------------------------------------------------------------------------------- members

// Binary search: a config has a hundred members, a header of tensors many thousands.
const Json *json_get(const Json *object, const char *key) {
    if (!object || !object->sorted) return NULL;
    const Json wanted = {.key = key}, *at = &wanted;
    Json **found = bsearch(&at, object->sorted, object->count, sizeof *found, compare_keys);
    return found ? *found : NULL;
}

const Json *json_need(const Json *object, const char *key, JsonKind kind, const char *where) {
    static const char *const KINDS[] = {
        "null", "true or false", "an integer", "a number", "a string", "an array", "an object"};
    const Json *v = json_get(object, key);
    CHECK(v && v->kind == kind, "%s: expected \"%s\" to be %s, found %s" REPAIR, where, key,
          KINDS[kind], v ? KINDS[v->kind] : "no such member");
    return v;
}

int64_t json_get_int(const Json *object, const char *key, const char *where) {
    return json_need(object, key, JSON_INT, where)->integer;
}

const char *json_get_string(const Json *object, const char *key, const char *where) {
    return json_need(object, key, JSON_STRING, where)->text;
}

// ----------------------------------------------------------------------------------------- writing

// Escapes only what JSON demands: quotes, backslashes and control characters. Each invalid byte is
// replaced on its own: valid UTF-8 may follow right after it.
void json_write_string(FILE *f, const char *text) {
    fputc('"', f);
    for (size_t n; *text; text += n ? n : 1) {
        n = utf8_length(text, 4);
        if (!n) fputs("\xEF\xBF\xBD", f);
        else if (*text == '\n') fputs("\\n", f);
        else if (*text == '"' || *text == '\\') fprintf(f, "\\%c", *text);
        else if ((uint8_t)*text < 0x20) fprintf(f, "\\u%04X", *text);
        else fwrite(text, 1, n, f);
    }
    fputc('"', f);
}

// Any decimal number of 15 digits survives text -> double -> text; 17 digits suffice for any
// double.
void json_write_number(FILE *f, double value) {
    char text[32] = "null";
    for (int digits = 15; isfinite(value) && digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        if (strtod(text, NULL) == value) break;
    }
    fputs(text, f);
}
