// json.h: a strict JSON reader (RFC 8259) into a tree, and two functions that write JSON.
//
// The reader accepts exactly the grammar, in UTF-8. It also refuses texts that two readers might
// read differently: duplicate keys, numbers that overflow a double, \u0000 (so every string is a C
// string). Limits: 64 nested containers, JSON_VALUES values. An error names the byte offset.
// The C locale is assumed (decimal point): the program never calls setlocale.
#pragma once
#include "util.h"

#ifdef __cplusplus
extern "C" {
#endif

// A safetensors header of 128 layers with 512 experts has 1.6 million values.
#define JSON_VALUES (1 << 22)
#define JSON_MOST 100000000  // bytes of a file, and of a safetensors header (that format's limit)

typedef enum {
    JSON_NULL, JSON_BOOL, JSON_INT, JSON_REAL, JSON_STRING, JSON_ARRAY, JSON_OBJECT
} JsonKind;

typedef struct Json {
    JsonKind kind;
    int64_t integer;     // JSON_INT: no point, no exponent, within int64, exact; JSON_BOOL: 0, 1
    double number;       // JSON_INT and JSON_REAL
    const char *text;    // JSON_STRING
    const char *key;     // of a member of an object, otherwise NULL
    struct Json *first;  // elements or members in the order of the text: first, first->next, ...
    struct Json *next;
    struct Json **sorted;  // JSON_OBJECT: the members in the order of their keys, for json_get
    size_t count;          // of elements or members
} Json;

// Parses n bytes. NULL: error (of ERROR_CAP bytes) says why not.
Json *json_try_parse(const char *text, size_t n, char *error);

// The same, but a fault ends the program; `where` is the file's name, for the message.
Json *json_parse(const char *text, size_t n, const char *where);
Json *json_read_file(const char *path, char **text);  // text: NULL, or receives it, to be freed
void json_free(Json *v);

// The member of that name, or NULL: also when `object` is NULL or not an object, so calls nest.
const Json *json_get(const Json *object, const char *key);

// Members that must exist and have that kind; `where` as above.
const Json *json_need(const Json *object, const char *key, JsonKind kind, const char *where);
int64_t json_get_int(const Json *object, const char *key, const char *where);
const char *json_get_string(const Json *object, const char *key, const char *where);

// In quotes, escaped. A byte that is not UTF-8 becomes U+FFFD, so the output always parses.
void json_write_string(FILE *f, const char *text);

// The fewest digits, from 15 on, that read back as the same double. NaN and infinity become null.
void json_write_number(FILE *f, double value);

#ifdef __cplusplus
}
#endif
