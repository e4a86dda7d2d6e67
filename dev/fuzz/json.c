// json.c: any bytes as JSON text. Accepted text is written back and read again as the same tree;
// any bytes as a C string become JSON that parses.
#include "fuzz.h"
#include "../../llmc/run/json.h"

static void write_tree(FILE *f, const Json *v) {
    static const char *const OPEN = "[{", *const CLOSE = "]}";
    if (v->kind == JSON_NULL) fputs("null", f);
    if (v->kind == JSON_BOOL) fputs(v->integer ? "true" : "false", f);
    if (v->kind == JSON_INT) fprintf(f, "%lld", (long long)v->integer);
    if (v->kind == JSON_REAL) json_write_number(f, v->number);
    if (v->kind == JSON_STRING) json_write_string(f, v->text);
    if (v->kind < JSON_ARRAY) return;
    fputc(OPEN[v->kind == JSON_OBJECT], f);
    for (const Json *item = v->first; item; item = item->next) {
        if (item != v->first) fputc(',', f);
        if (item->key) {
            json_write_string(f, item->key);
            fputc(':', f);
        }
        write_tree(f, item);
    }
    fputc(CLOSE[v->kind == JSON_OBJECT], f);
}

static bool same(const char *a, const char *b) {
    return (!a && !b) || (a && b && strcmp(a, b) == 0);
}

// A real number that is whole may come back as an integer.
static void expect_same(const Json *a, const Json *b) {
    bool numbers = (a->kind == JSON_INT || a->kind == JSON_REAL) &&
                   (b->kind == JSON_INT || b->kind == JSON_REAL);
    must(numbers || a->kind == b->kind);
    if (numbers) must(a->number == b->number && (a->kind != JSON_INT || a->integer == b->integer));
    must(a->count == b->count && same(a->text, b->text) && same(a->key, b->key));
    const Json *y = b->first;
    for (const Json *x = a->first; x; x = x->next, y = y->next) {
        must(y &&
             (a->kind != JSON_OBJECT || (json_get(a, x->key) == x && json_get(b, x->key) == y)));
        expect_same(x, y);
    }
    must(!y);
}

static void parse(const uint8_t *data, size_t size) {
    char error[256] = "", *text = NULL;
    size_t n = 0;
    Json *root = json_try_parse((const char *)data, size, error);
    if (!root) {
        must(*error);
        return;
    }
    FILE *f = open_memstream(&text, &n);
    write_tree(f, root);
    fclose(f);
    Json *again = json_try_parse(text, n, error);
    must(again);
    expect_same(root, again);
    json_free(root);
    json_free(again);
    free(text);
}

static void write_string(const uint8_t *data, size_t size) {
    char *word = check_alloc(size + 1, "a string"), *text = NULL;
    size_t n = 0;
    memcpy(word, data, size);
    FILE *f = open_memstream(&text, &n);
    json_write_string(f, word);
    fclose(f);
    Json *again = json_parse(text, n, "what json_write_string wrote");
    must(again->kind == JSON_STRING && (*utf8_end(word) || strcmp(again->text, word) == 0));
    json_free(again);
    free(text);
    free(word);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    must(fuzz_once(parse, data, size, false));
    must(fuzz_once(write_string, data, size, false));
    return 0;
}
