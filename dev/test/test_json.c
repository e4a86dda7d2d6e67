// test_json.c: what the JSON reader accepts and refuses, where it points when it refuses, and that
// the writer's output parses.
#include "../../llmc/run/files.h"
#include "../../llmc/rand.h"
#include "test.h"

// Parses a copy that ends exactly where its allocation ends: a sanitizer sees every read beyond n.
static bool parse_copy(const char *text, size_t n, Json **out, char *error) {
    char *copy = (char *)malloc(n ? n : 1);
    if (n) memcpy(copy, text, n);
    *out = json_try_parse(copy, n, error);
    free(copy);
    return *out != NULL;
}

static void test_accept(void) {
    static const char *const TEXTS[] = {
        "{}",
        "[]",
        " [ ] ",
        "\t{\r\n}\n",
        "null",
        "true",
        "false",
        "0",
        "-0",
        "12",
        "-1.5",
        "1e5",
        "1E+5",
        "0.5e-3",
        "0e0",
        "\"\"",
        "\"a\"",
        "\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"",
        "\"\\u0041\\uD83D\\uDE00\"",
        "\"\x7f\"",
        "\"\xC2\x80\xDF\xBF\"",
        "\"\xE0\xA0\x80\xED\x9F\xBF\xEE\x80\x80\xEF\xBF\xBF\"",
        "\"\xF0\x90\x80\x80\xF4\x8F\xBF\xBF\"",
        "[1,[2,[3]],{\"a\":{}}]",
        "{\"a\":1,\"b\":[true,false,null],\"\":\"\"}",
        "{\"a\" : 1 , \"A\" : 2}",
        "1e-999",
    };
    for (size_t i = 0; i < sizeof TEXTS / sizeof TEXTS[0]; i++) {
        Json *root;
        char error[256] = "";
        bool ok = parse_copy(TEXTS[i], strlen(TEXTS[i]), &root, error);
        EXPECT(ok && root, "%s was refused: %s", TEXTS[i], error);
        json_free(root);
    }
}

static void test_reject(void) {
    static const struct {
        const char *text, *reason;
    } ROWS[] = {
        {"", "byte 0: expected a value, found the end"},
        {"  ", "byte 2:"},
        {"tru", "byte 0:"},
        {"nul", "byte 0:"},
        {"True", "byte 0:"},
        {"NaN", "byte 0:"},
        {"-Infinity", "byte 1: expected a digit"},
        {"01", "byte 1: expected the end, found '1'"},
        {"-", "byte 1:"},
        {"-01", "byte 2:"},
        {"1.", "byte 2: expected a digit"},
        {".5", "byte 0:"},
        {"1e", "byte 2: expected a digit"},
        {"1e+", "byte 3:"},
        {"+1", "byte 0:"},
        {"0x1", "byte 1:"},
        {"1e999", "byte 0: expected a number in a double's range"},
        {"-1e999", "in a double's range"},
        {"[1,]", "byte 3: expected a value, found ']'"},
        {"[1 2]", "byte 3: expected ',' or ']', found '2'"},
        {"[", "byte 1:"},
        {"]", "byte 0:"},
        {"[1}", "byte 2: expected ',' or ']'"},
        {"[,1]", "byte 1:"},
        {"{\"a\":1]", "byte 6: expected ',' or '}'"},
        {"{", "byte 1:"},
        {"{a:1}", "byte 1: expected the name of a member"},
        {"{\"a\"}", "byte 4: expected ':'"},
        {"{\"a\":}", "byte 5:"},
        {"{\"a\":1,}", "byte 7:"},
        {"{'a':1}", "byte 1:"},
        {"{1:1}", "byte 1:"},
        {"[]x", "byte 2: expected the end, found 'x'"},
        {"1 2", "byte 2:"},
        {"{\"a\":1,\"b\":2,\"a\":3}", "has \"a\" twice"},
        {"{\"a\":1,\"\\u0061\":3}", "has \"a\" twice"},
        {"\"", "byte 1: expected the closing quote"},
        {"\"abc", "byte 4:"},
        {"\"\\", "byte 2:"},
        {"\"\\\"", "byte 3:"},
        {"\"\\x\"", "byte 2:"},
        {"\"a\nb\"", "byte 2: expected no control character"},
        {"\"\x1f\"", "byte 1:"},
        {"\"\\u12\"", "byte 5: expected four hex"},
        {"\"\\u123g\"", "byte 6:"},
        {"\"\\u", "byte 3:"},
        {"\"\\u0000\"", "\\u0000 inside"},
        {"\"\\uD800\"", "both halves"},
        {"\"\\uDC00\"", "both halves"},
        {"\"\\uD800\\u0041\"", "both halves"},
        {"\"\\uD800\\uD800\"", "both halves"},
        {"\"\\uD800\\uE000\"", "both halves"},
        {"\"\x80\"", "byte 1: expected valid UTF-8, found byte 0x80"},
        {"\"\xC1\xBF\"", "UTF-8"},
        {"\"\xC3\"", "UTF-8"},
        {"\"\xE0\x9F\xBF\"", "UTF-8"},
        {"\"\xED\xA0\x80\"", "UTF-8"},
        {"\"\xF0\x8F\xBF\xBF\"", "UTF-8"},
        {"\"\xF4\x90\x80\x80\"", "UTF-8"},
        {"\"\xF5\x80\x80\x80\"", "UTF-8"},
        {"\"\xE2\x82", "UTF-8"},
        {"\xEF\xBB\xBF{}", "byte 0: expected a value, found byte 0xEF"},
        {"/**/1", "byte 0:"},
        {"\v1", "byte 0:"},
    };
    for (size_t i = 0; i < sizeof ROWS / sizeof ROWS[0]; i++) {
        Json *root;
        char error[256] = "";
        bool ok = parse_copy(ROWS[i].text, strlen(ROWS[i].text), &root, error);
        EXPECT(!ok && !root && strstr(error, ROWS[i].reason), "%s: expected \"%s\", found \"%s\"",
               ROWS[i].text, ROWS[i].reason, ok ? "accepted" : error);
        json_free(root);
    }
    Json *root;
    char error[256];
    size_t many = 2 * (size_t)JSON_VALUES + 3;  // [0,0,...,0] with one too many
    char *zeros = (char *)malloc(many);
    for (size_t i = 0; i < many; i++) zeros[i] = i % 2 ? '0' : ',';
    zeros[0] = '[';
    zeros[many - 1] = ']';
    EXPECT(!json_try_parse(zeros, many, error) && strstr(error, "values"),
           "a million of values too many: %s", error);
    free(zeros);
    EXPECT(!parse_copy("[1]\0", 4, &root, error), "a zero byte behind the text was accepted");
}

static void test_limits(void) {
    char text[600], error[256];
    Json *root;
    for (size_t depth = 64; depth <= 65; depth++) {
        memset(text, '[', depth);
        memset(text + depth, ']', depth);
        bool ok = parse_copy(text, 2 * depth, &root, error);
        EXPECT(ok == (depth == 64), "%zu nested arrays: %s", depth, ok ? "accepted" : error);
        json_free(root);
    }
    // A million brackets neither overflow the stack nor take long.
    size_t n = 1000000;
    char *deep = (char *)malloc(n);
    memset(deep, '[', n);
    EXPECT(!parse_copy(deep, n, &root, error), "a million brackets were accepted");
    free(deep);
}

static void test_values(void) {
    static const char TEXT[] = "{\"max\":9223372036854775807,\"min\":-9223372036854775808,\"big\":"
                               "9223372036854775808,\"third\":0.3333333333333333,"
                               "\"exp\":1e3,\"minus\":-0,\"yes\":true,\"no\":false,\"none\":null,"
                               "\"text\":\"a\\u00e9\\u20AC\\uD83D\\uDE00\\n\",\"list\":[10,20,30]}";
    Json *root = json_parse(TEXT, sizeof TEXT - 1, "test");
    EXPECT(json_get_int(root, "max", "test") == INT64_MAX &&
               json_get_int(root, "min", "test") == INT64_MIN,
           "int64 limits are not exact");
    EXPECT(json_get(root, "big")->kind == JSON_REAL &&
               json_get_number(root, "big", "test") == 0x1p63,
           "2^63 is not a real");
    EXPECT(json_get_number(root, "third", "test") == 0.3333333333333333, "a real is not exact");
    EXPECT(json_get(root, "exp")->kind == JSON_REAL && json_get_number(root, "exp", "test") == 1000,
           "1e3 is not the real 1000");
    EXPECT(signbit(json_get_number(root, "minus", "test")), "-0 lost its sign");
    EXPECT(json_get_bool(root, "yes", "test") && !json_get_bool(root, "no", "test"),
           "true or false is wrong");
    EXPECT(isnan(json_get_number(root, "none", "test")), "null as a number is not NaN");
    EXPECT(strcmp(json_get_string(root, "text", "test"),
                  "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\n") == 0,
           "escapes are decoded wrongly");
    const Json *list = json_get(root, "list");
    EXPECT(list->count == 3 && list->first->integer == 10 && list->first->next->next->integer == 30,
           "the order of elements is lost");
    EXPECT(!json_get(root, "absent") && !json_get(list, "max") && !json_get(NULL, "max"),
           "an absent member was found");
    EXPECT(strcmp(root->first->key, "max") == 0 && root->count == 11,
           "the order of members is lost");
    json_free(root);
}

// Many members: duplicates and look-ups must not cost the square of their number.
static void test_many(void) {
    const int members = 200000;
    char *text = NULL, key[32];
    size_t n;
    FILE *f = open_memstream(&text, &n);
    for (int i = 0; i < members; i++) fprintf(f, "%s\"key%d\":%d", i ? "," : "{", i, i);
    fputc('}', f);
    fclose(f);
    Json *root = json_parse(text, n, "test");
    int wrong = 0;
    for (int i = 0; i < members; i++)
        wrong += json_get_int(root, check_format(key, sizeof key, "key%d", i), "test") != i;
    EXPECT(wrong == 0, "%d of %d members are wrong", wrong, members);
    json_free(root);
    free(text);
}

// Damaged texts are refused or read, never overread: run under a sanitizer this is a small fuzzer.
static void test_damage(void) {
    static const char TEXT[] = "{\"a\":[1,-2.5e3,\"x\\u00e9\\uD83D\\uDE00\xE2\x82\xAC\\\"\"],\"b\":"
                               "{\"c\":null,\"d\":[true,false]}}";
    size_t n = sizeof TEXT - 1;
    char text[sizeof TEXT], error[256];
    Json *root;
    for (size_t cut = 0; cut < n; cut++) {
        EXPECT(!parse_copy(TEXT, cut, &root, error), "accepted although cut at byte %zu", cut);
        json_free(root);
    }
    int refused = 0;
    for (uint64_t i = 0; i < 20000; i++) {
        memcpy(text, TEXT, n);
        for (uint64_t k = 0; k <= i % 3; k++)
            text[rand_at(1, 8 * i + 2 * k) % n] = (char)rand_at(1, 8 * i + 2 * k + 1);
        refused += !parse_copy(text, n, &root, error);
        json_free(root);
    }
    EXPECT(refused > 10000 && refused < 20000, "%d of 20000 damaged texts were refused", refused);
}

// Writes s as JSON and reads it back.
static void expect_string(const char *s, const char *back) {
    char *text = NULL;
    size_t n;
    FILE *f = open_memstream(&text, &n);
    json_write_string(f, s);
    fclose(f);
    Json *root;
    char error[256] = "";
    bool ok = parse_copy(text, n, &root, error);
    EXPECT(ok && root->kind == JSON_STRING && strcmp(root->text, back) == 0, "%s reads back as %s",
           text, ok ? root->text : error);
    json_free(root);
    free(text);
}

static void expect_number(double value, const char *written) {
    char *text = NULL;
    size_t n;
    FILE *f = open_memstream(&text, &n);
    json_write_number(f, value);
    fclose(f);
    if (written) EXPECT(strcmp(text, written) == 0, "expected %s, found %s", written, text);
    Json *root;
    char error[256] = "";
    bool ok = parse_copy(text, n, &root, error);
    EXPECT(ok &&
               (isfinite(value) ? memcmp(&root->number, &value, 8) == 0 : root->kind == JSON_NULL),
           "%a was written as %s", value, text);
    json_free(root);
    free(text);
}

static void test_writer(void) {
    char all[128] = "";
    for (int i = 1; i < 128; i++) all[i - 1] = (char)i;
    all[127] = 0;
    expect_string(all, all);
    expect_string("", "");
    expect_string("\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80", "\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80");
    expect_string("a\x80z", "a\xEF\xBF\xBDz");  // invalid bytes, one replacement each
    expect_string("\xED\xA0\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD");
    expect_string("\xE2\x82", "\xEF\xBF\xBD\xEF\xBF\xBD");
    for (uint64_t i = 0; i < 500; i++) {  // whatever the bytes, the output parses
        char bytes[9] = "", *text = NULL;
        for (uint64_t k = 0; k < 8; k++) bytes[k] = (char)(rand_at(2, 8 * i + k) % 255 + 1);
        size_t n;
        FILE *f = open_memstream(&text, &n);
        json_write_string(f, bytes);
        fclose(f);
        Json *root;
        char error[256] = "";
        EXPECT(parse_copy(text, n, &root, error), "%s does not parse: %s", text, error);
        json_free(root);
        free(text);
    }
    expect_number(0, "0");
    expect_number(-0.0, "-0");
    expect_number(200, "200");
    expect_number(0.1, "0.1");
    expect_number(3e-4, "0.0003");
    expect_number(NAN, "null");
    expect_number(INFINITY, "null");
    expect_number(-INFINITY, "null");
    expect_number(0x1.fffffffffffffp1023, NULL);
    expect_number(0x1p-1074, NULL);
    for (uint64_t i = 0; i < 2000; i++) {
        uint64_t bits = rand_at(3, i);
        double value;
        memcpy(&value, &bits, 8);
        expect_number(value, NULL);
    }
}

static void parse_broken(void *arg) {
    json_parse((const char *)arg, strlen((const char *)arg), "state.json");
}
static void need_int(void *arg) {
    Json *root = json_parse((const char *)arg, strlen((const char *)arg), "state.json");
    json_get_int(root, "step", "state.json");
}
static void read_missing(void *arg) { json_read_file((const char *)arg, NULL); }

static void test_files(void) {
    char path[512];
    check_format(path, sizeof path, "%s/a.json", test_dir("json"));
    FILE *f = fopen(path, "w");
    fputs("{\"pad\":\"", f);
    for (int i = 0; i < 10000; i++) fputc('x', f);
    fputs("\",\"step\":7}", f);
    fclose(f);
    Json *root = json_read_file(path, NULL);
    EXPECT(json_get_int(root, "step", path) == 7 &&
               strlen(json_get_string(root, "pad", path)) == 10000,
           "a file is read wrongly");
    json_free(root);
    size_t n;
    int ended = 0, sizes = 300;  // behind the bytes of a file of any size there is a zero
    for (int size = 0; size < sizes; size++) {
        char bytes[300];
        memset(bytes, 'x', sizeof bytes);
        f = fopen(path, "wb");
        fwrite(bytes, 1, (size_t)size, f);
        fclose(f);
        char *text = file_read(path, INT64_MAX, &n);
        ended += n == (size_t)size && strlen(text) == n;
        free(text);
    }
    EXPECT(ended == sizes, "of %d files, %d are read with a zero behind them", sizes, ended);
    EXPECT(!file_read(test_dir("json"), INT64_MAX, &n) && errno == EISDIR,
           "a folder was read as a file");
    EXPECT_REFUSAL(read_missing, (void *)"build/test/json/absent.json",
                   "cannot read build/test/json/absent.json");
    EXPECT_REFUSAL(parse_broken, (void *)"{\"step\" 7}",
                   "state.json is not valid JSON: byte 8: expected ':', found '7'");
    EXPECT_REFUSAL(need_int, (void *)"{\"steps\":7}",
                   "state.json: expected \"step\" to be an integer, found no such member");
    EXPECT_REFUSAL(need_int, (void *)"{\"step\":7.5}",
                   "expected \"step\" to be an integer, found a number");
}

void test_json(void) {
    test_accept();
    test_reject();
    test_limits();
    test_values();
    test_many();
    test_damage();
    test_writer();
    test_files();
}
