// json.h: a small strict JSON reader (RFC 8259) into a tree, and two helpers that write JSON which always parses.
//
// The reader accepts exactly the grammar, in UTF-8, and refuses what two readers might understand differently: duplicate keys,
// numbers that overflow a double, \u0000 (so every string is a C string). Limits: 64 nested containers, 256 characters a number, four million values: a safetensors
// header of 128 layers with 512 experts has 1.6 million, and as many more would take more memory than the file can be worth.
// Errors name the byte offset, what was expected and what was found. json_parse ends the program, json_try_parse returns false.
// The C locale is assumed (strtod and printf with a decimal point): the program never calls setlocale.
#pragma once
#include "util.h"
#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <sys/stat.h>

#define JSON_DEPTH 64
#define JSON_NUMBER 256
#define JSON_VALUES (1 << 22)
#define JSON_MOST 100000000        // bytes of a file, and of a safetensors header, whose format has this limit

typedef enum { JSON_NULL, JSON_BOOL, JSON_INT, JSON_REAL, JSON_STRING, JSON_ARRAY, JSON_OBJECT } JsonKind;

typedef struct Json {
    JsonKind kind;
    bool boolean;
    int64_t integer;         // JSON_INT: written without point or exponent and within int64, kept exactly
    double number;           // JSON_INT and JSON_REAL
    char *text;              // JSON_STRING
    char *key;               // the name of this member of an object, else NULL
    struct Json *first;      // elements or members in the order of the text: first, first->next, ...
    struct Json *next;
    struct Json **sorted;    // JSON_OBJECT: the members in the order of their keys, for json_get
    size_t count;            // elements or members
} Json;

typedef struct { const char *text; size_t n, at; char *error; size_t cap; int values; } JsonReader;

// Writes the reason into error (cut to cap bytes) and returns false, so that a refusal is one line.
PRINTF_LIKE(3, 4) static inline bool error_set(char *error, size_t cap, const char *fmt, ...) {
    char message[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(message, sizeof message, fmt, args);
    va_end(args);
    text_escape(error, cap, message, strlen(message));
    return false;
}

// ---------------------------------------------------------------------------------------------------------------- reading

static inline bool json_expected(JsonReader *r, const char *what) {
    unsigned char c = r->at < r->n ? (unsigned char)r->text[r->at] : 0;
    if (r->at >= r->n) return error_set(r->error, r->cap, "byte %zu: expected %s, found the end", r->at, what);
    if (c <= ' ' || c >= 0x7F) return error_set(r->error, r->cap, "byte %zu: expected %s, found byte 0x%02X", r->at, what, c);
    return error_set(r->error, r->cap, "byte %zu: expected %s, found '%c'", r->at, what, c);
}

// Steps over c if it comes next.
static inline bool json_take(JsonReader *r, char c) {
    bool is_next = r->at < r->n && r->text[r->at] == c;
    if (is_next) r->at++;
    return is_next;
}

static inline bool json_take_word(JsonReader *r, const char *word) {
    size_t n = strlen(word);
    bool is_next = r->n - r->at >= n && memcmp(r->text + r->at, word, n) == 0;
    if (is_next) r->at += n;
    return is_next;
}

static inline void json_take_space(JsonReader *r) {
    while (json_take(r, ' ') || json_take(r, '\t') || json_take(r, '\n') || json_take(r, '\r')) {}
}

static inline size_t json_take_digits(JsonReader *r) {
    size_t from = r->at;
    while (r->at < r->n && r->text[r->at] >= '0' && r->text[r->at] <= '9') r->at++;
    return r->at - from;
}

static inline bool json_read_number(JsonReader *r, Json *v) {
    size_t from = r->at;
    bool integral = true;
    json_take(r, '-');
    if (!json_take(r, '0') && !json_take_digits(r)) return json_expected(r, "a digit");
    if (json_take(r, '.')) {
        integral = false;
        if (!json_take_digits(r)) return json_expected(r, "a digit after the point");
    }
    if (json_take(r, 'e') || json_take(r, 'E')) {
        integral = false;
        if (!json_take(r, '+')) json_take(r, '-');
        if (!json_take_digits(r)) return json_expected(r, "a digit of the exponent");
    }
    char token[JSON_NUMBER + 1];               // the text has no terminator, strtod needs one
    size_t length = r->at - from;
    if (length > JSON_NUMBER) return error_set(r->error, r->cap, "byte %zu: a number of more than %d characters", from, JSON_NUMBER);
    memcpy(token, r->text + from, length);
    token[length] = 0;
    v->number = strtod(token, NULL);
    if (isinf(v->number)) return error_set(r->error, r->cap, "byte %zu: a number too large for a double", from);
    errno = 0;
    v->integer = integral ? strtoll(token, NULL, 10) : 0;
    v->kind = integral && errno == 0 ? JSON_INT : JSON_REAL;
    return true;
}

// Bytes of the UTF-8 character at p, where n >= 1 bytes are left; 0 if it is cut short, overlong, a surrogate or past U+10FFFF.
static inline size_t json_utf8_length(const char *text, size_t n) {
    const unsigned char *p = (const unsigned char *)text;
    if (p[0] < 0x80) return 1;
    size_t length = p[0] >= 0xF0 ? 4 : p[0] >= 0xE0 ? 3 : 2;
    if (p[0] < 0xC2 || p[0] > 0xF4 || n < length) return 0;
    for (size_t i = 1; i < length; i++) if ((p[i] & 0xC0) != 0x80) return 0;
    bool overlong = (p[0] == 0xE0 && p[1] < 0xA0) || (p[0] == 0xF0 && p[1] < 0x90);
    bool surrogate = p[0] == 0xED && p[1] > 0x9F, beyond = p[0] == 0xF4 && p[1] > 0x8F;
    return overlong || surrogate || beyond ? 0 : length;
}

static inline char *json_put_utf8(char *out, uint32_t code) {
    if (code < 0x80) { *out++ = (char)code; return out; }
    if (code < 0x800) *out++ = (char)(0xC0 | code >> 6);
    else {
        if (code < 0x10000) *out++ = (char)(0xE0 | code >> 12);
        else {
            *out++ = (char)(0xF0 | code >> 18);
            *out++ = (char)(0x80 | (code >> 12 & 63));
        }
        *out++ = (char)(0x80 | (code >> 6 & 63));
    }
    *out++ = (char)(0x80 | (code & 63));
    return out;
}

static inline bool json_read_hex4(JsonReader *r, uint32_t *code) {
    *code = 0;
    for (int i = 0; i < 4; i++, r->at++) {
        char c = r->at < r->n ? r->text[r->at] : 0;
        int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
        if (digit < 0) return json_expected(r, "four hexadecimal digits after \\u");
        *code = *code << 4 | (uint32_t)digit;
    }
    return true;
}

// What follows a backslash. Characters outside the basic plane come as two escapes: a high surrogate, then a low one.
static inline bool json_read_escape(JsonReader *r, char **out) {
    static const char letters[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
    const char *letter = r->at < r->n ? (const char *)memchr(letters, r->text[r->at], sizeof letters - 1) : NULL;
    if (letter) {
        *(*out)++ = meanings[letter - letters];
        r->at++;
        return true;
    }
    if (!json_take(r, 'u')) return json_expected(r, "one of \"\\/bfnrtu after the backslash");
    uint32_t code, low = 0;
    if (!json_read_hex4(r, &code)) return false;
    if (code == 0) return error_set(r->error, r->cap, "byte %zu: \\u0000 inside a string", r->at);
    if (code >= 0xD800 && code < 0xE000) {
        bool high = code < 0xDC00 && json_take_word(r, "\\u");
        if (high && !json_read_hex4(r, &low)) return false;
        if (low < 0xDC00 || low >= 0xE000) return error_set(r->error, r->cap, "byte %zu: half of a surrogate pair", r->at);
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    }
    *out = json_put_utf8(*out, code);
    return true;
}

// The rest of a string, behind its opening quote. Decoding never lengthens it, so the distance to the closing quote is room enough.
static inline bool json_read_string(JsonReader *r, char **text) {
    size_t close = r->at;
    while (close < r->n && r->text[close] != '"') close += r->text[close] == '\\' ? 2 : 1;
    char *out = *text = (char *)check_alloc(close - r->at + 1, "a JSON string");
    while (!json_take(r, '"')) {
        if (r->at >= r->n) return json_expected(r, "the closing quote of a string");
        if ((unsigned char)r->text[r->at] < 0x20) return json_expected(r, "no control character inside a string (\\n, \\u001F)");
        if (json_take(r, '\\')) {
            if (!json_read_escape(r, &out)) return false;
            continue;
        }
        size_t length = json_utf8_length(r->text + r->at, r->n - r->at);
        if (!length) return json_expected(r, "valid UTF-8");
        memcpy(out, r->text + r->at, length);
        out += length;
        r->at += length;
    }
    return true;
}

static inline int json_compare_keys(const void *a, const void *b) {
    return strcmp((*(Json *const *)a)->key, (*(Json *const *)b)->key);
}

// Sorting brings equal keys together: duplicates cost n log n to find, and json_get can search by halves.
static inline bool json_sort_members(JsonReader *r, Json *object) {
    object->sorted = (Json **)check_alloc(object->count * sizeof(Json *), "a JSON object");
    size_t i = 0;
    for (Json *m = object->first; m; m = m->next) object->sorted[i++] = m;
    qsort(object->sorted, object->count, sizeof(Json *), json_compare_keys);
    for (i = 1; i < object->count; i++) {
        if (json_compare_keys(&object->sorted[i - 1], &object->sorted[i]) != 0) continue;
        return error_set(r->error, r->cap, "byte %zu: the object that ends here has the key \"%s\" twice", r->at, object->sorted[i]->key);
    }
    return true;
}

static inline bool json_read_value(JsonReader *r, int depth, Json *v);

// An array or an object. Every item hangs in the tree before it is read, so that json_free of the root finds all after an error.
static inline bool json_read_container(JsonReader *r, int depth, Json *v) {
    if (depth == JSON_DEPTH) return json_expected(r, "at most 64 arrays and objects inside each other");
    bool object = r->text[r->at++] == '{';
    char close = object ? '}' : ']';
    v->kind = object ? JSON_OBJECT : JSON_ARRAY;
    json_take_space(r);
    if (json_take(r, close)) return true;
    for (Json **link = &v->first;; link = &(*link)->next) {
        if (++r->values > JSON_VALUES) return error_set(r->error, r->cap, "byte %zu: more than %d values", r->at, JSON_VALUES);
        Json *item = *link = (Json *)check_alloc(sizeof(Json), "a JSON value");
        v->count++;
        json_take_space(r);
        if (object) {
            if (!json_take(r, '"')) return json_expected(r, "the name of a member in double quotes");
            if (!json_read_string(r, &item->key)) return false;
            json_take_space(r);
            if (!json_take(r, ':')) return json_expected(r, "':'");
            json_take_space(r);
        }
        if (!json_read_value(r, depth + 1, item)) return false;
        json_take_space(r);
        if (json_take(r, close)) return !object || json_sort_members(r, v);
        if (!json_take(r, ',')) return json_expected(r, object ? "',' or '}'" : "',' or ']'");
    }
}

static inline bool json_read_value(JsonReader *r, int depth, Json *v) {
    char c = r->at < r->n ? r->text[r->at] : 0;
    if (c == '{' || c == '[') return json_read_container(r, depth, v);
    if (c == '-' || (c >= '0' && c <= '9')) return json_read_number(r, v);
    if (json_take(r, '"')) {
        v->kind = JSON_STRING;
        return json_read_string(r, &v->text);
    }
    if (json_take_word(r, "null")) return true;
    v->kind = JSON_BOOL;
    v->boolean = json_take_word(r, "true");
    return v->boolean || json_take_word(r, "false") || json_expected(r, "a value");
}

static inline void json_free(Json *v) {
    while (v) {
        Json *next = v->next;
        json_free(v->first);
        free(v->text);
        free(v->key);
        free(v->sorted);
        free(v);
        v = next;
    }
}

// text need not end in a zero byte. After false, *out is NULL and error says why.
static inline bool json_try_parse(const char *text, size_t n, Json **out, char *error, size_t cap) {
    JsonReader r = {text, n, 0, error, cap, 0};
    *out = (Json *)check_alloc(sizeof(Json), "a JSON value");
    json_take_space(&r);
    bool ok = json_read_value(&r, 0, *out);
    if (ok) json_take_space(&r);
    if (ok && r.at < n) ok = json_expected(&r, "the end");
    if (!ok) {
        json_free(*out);
        *out = NULL;
    }
    return ok;
}

static inline Json *json_parse(const char *text, size_t n, const char *where) {
    Json *root;
    char error[256];
    bool ok = json_try_parse(text, n, &root, error, sizeof error);
    CHECK(ok, "%s is not valid JSON: %s\n  -> repair the file, or restore it from where it came from", where, error);
    return root;
}

// The bytes of a regular file and a zero behind them, to be freed, or NULL with errno set. Refuses
// pipes, which may never begin, devices, which may never end, and files of more than `most` bytes
// (EFBIG) before it takes memory.
static inline char *file_read(const char *path, int64_t most, size_t *n) {
    struct stat info;
    *n = 0;
    if (stat(path, &info) != 0) return NULL;
    if (!S_ISREG(info.st_mode)) {
        errno = S_ISDIR(info.st_mode) ? EISDIR : ENOTSUP;
        return NULL;
    }
    if (info.st_size > most) {
        errno = EFBIG;
        return NULL;
    }
    FILE *f = fopen(path, "rb");
    char *text = f ? (char *)malloc((size_t)info.st_size + 1) : NULL;
    if (text) *n = fread(text, 1, (size_t)info.st_size, f);
    int problem = !text || ferror(f) ? errno : 0;
    if (f) fclose(f);
    if (problem) {
        free(text);
        errno = problem;
        return NULL;
    }
    text[*n] = 0;
    return text;
}

static inline Json *json_read_file(const char *path) {
    size_t n;
    char *text = file_read(path, JSON_MOST, &n);
    CHECK(text, "cannot read %s: %s\n  -> check the path", path, strerror(errno));
    Json *root = json_parse(text, n, path);
    free(text);
    return root;
}

// The member of that name, or NULL: also where object is NULL or no object, so that calls can be nested.
static inline const Json *json_get(const Json *object, const char *key) {
    size_t low = 0, high = object && object->sorted ? object->count : 0;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(key, object->sorted[middle]->key);
        if (order == 0) return object->sorted[middle];
        if (order < 0) high = middle; else low = middle + 1;
    }
    return NULL;
}

// Members that must be there, and of that type; where is the file's name for the message.
static inline const Json *json_need(const Json *object, const char *key, JsonKind kind, const char *where) {
    static const char *const KINDS[] = {"null", "true or false", "an integer", "a number", "a string", "an array", "an object"};
    const Json *v = json_get(object, key);
    bool right = v && (v->kind == kind || (v->kind == JSON_INT && kind == JSON_REAL));
    CHECK(right, "%s: expected \"%s\" to be %s, found %s\n  -> repair the file, or restore it from where it came from", where, key,
          KINDS[kind], v ? KINDS[v->kind] : "no such member");
    return v;
}

static inline int64_t json_get_int(const Json *object, const char *key, const char *where) {
    return json_need(object, key, JSON_INT, where)->integer;
}

static inline const char *json_get_string(const Json *object, const char *key, const char *where) {
    return json_need(object, key, JSON_STRING, where)->text;
}

// ---------------------------------------------------------------------------------------------------------------- writing

// In quotes, escaped. A byte that is not UTF-8 becomes U+FFFD, so that the output parses whatever a file name or a prompt held.
static inline void json_write_string(FILE *f, const char *text) {
    fputc('"', f);
    for (size_t left = strlen(text), length; left; text += length, left -= length) {
        length = json_utf8_length(text, left);
        if (length == 0) {
            fputs("\xEF\xBF\xBD", f);
            length = 1;
        } else if (*text == '\n') fputs("\\n", f);
        else if (*text == '"' || *text == '\\') fprintf(f, "\\%c", *text);
        else if (length == 1 && *text < 0x20) fprintf(f, "\\u%04X", *text);
        else fwrite(text, 1, length, f);
    }
    fputc('"', f);
}

// The fewest digits, from 15 on, that read back as the same double. JSON has no NaN and no infinity: they become null.
static inline void json_write_number(FILE *f, double value) {
    char text[32] = "null";
    for (int digits = 15; isfinite(value) && digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        if (strtod(text, NULL) == value) break;
    }
    fputs(text, f);
}
