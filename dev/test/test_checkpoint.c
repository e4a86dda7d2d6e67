// test_checkpoint.c: tensor files against bytes written by hand, and checkpoints against every kind
// of damage: cut files, flipped bits, missing files, full disks, and kills while they are written.
#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <sys/stat.h>
#include "files.h"
#include "test.h"
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

// -------------------------------------------------------------------------------------------- hash

static void test_hash(void) {
    EXPECT(hash_bytes("", 0) == 0xef46db3751d8e999u, "XXH64 of nothing");
    EXPECT(hash_bytes("a", 1) == 0xd24ec4f1a98c6e5bu, "XXH64 of a");
    EXPECT(hash_bytes("abc", 3) == 0x44bc2cf5ad770999u, "XXH64 of abc");
    unsigned char bytes[200];
    for (int i = 0; i < 200; i++) bytes[i] = (unsigned char)(i * 7 + 3);
    EXPECT(hash_bytes(bytes, 200) == 0xa6cb3c09bc829b24u, "XXH64 of 200 bytes");
    for (size_t n = 0; n <= 200; n++) {
        for (size_t piece = 1; piece < 48; piece += 3) {
            Hash h = hash_begin();
            for (size_t at = 0; at < n; at += piece)
                hash_add(&h, bytes + at, piece < n - at ? piece : n - at);
            EXPECT(hash_end(&h) == hash_bytes(bytes, n), "%zu bytes in pieces of %zu", n, piece);
        }
    }
}

// ----------------------------------------------------------------------------------------- tensors

static void write_bytes(const char *path, const void *data, size_t n) {
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(data, 1, n, f) == n && fclose(f) == 0,
          "cannot write %s\n  -> check build/test", path);
}

// A file from its header and data, the length in front.
static void write_safetensors(const char *path, const char *header, const void *data,
                              size_t bytes) {
    char file[2048];
    uint64_t n = strlen(header);
    memcpy(file, &n, 8);
    memcpy(file + 8, header, n);
    memcpy(file + 8 + n, data, bytes);
    write_bytes(path, file, 8 + n + bytes);
}

static void test_write_golden(const char *dir) {
    static const char HEADER[] = "{\"__metadata__\":{\"format\":\"pt\"},\"a\":{\"dtype\":\"F32\","
                                 "\"shape\":[2],\"data_offsets\":[0,8]},"
                                 "\"b\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[8,16]}}";
    static const unsigned char DATA[16] = {0,    0,    0x80, 0x3F, 0,    0,    0x20, 0xC0,
                                           0x9A, 0x99, 0x99, 0x99, 0x99, 0x99, 0xB9, 0x3F};
    float a[2] = {1, -2.5f};
    double b = 0.1;
    Tensor tensors[2] = {{"a", "F32", 1, {2}, .data = a}, {"b", "F64", 0, {0}, .data = &b}};
    char path[PATH_CAP];
    check_format(path, sizeof path, "%s/golden.safetensors", dir);
    Hash hash = write_tensors(path, tensors, 2);
    size_t n;
    char *file = file_read(path, INT64_MAX, &n);
    EXPECT(n == 208 && hash.length == 208 && hash_end(&hash) == 0x649b03c1a88a101fu,
           "%zu bytes, size %" PRIu64 ", hash %" PRIx64, n, hash.length, hash_end(&hash));
    EXPECT(memcmp(file, "\xB8\0\0\0\0\0\0\0", 8) == 0 &&
               memcmp(file + 8, HEADER, sizeof HEADER - 1) == 0,
           "the header differs");
    EXPECT(strspn(file + 8 + sizeof HEADER - 1, " ") >= 184 - (sizeof HEADER - 1) &&
               memcmp(file + 192, DATA, 16) == 0,
           "padding or data differ");
    free(file);
    EXPECT(access(strcat(path, ".tmp"), F_OK) != 0, "the temporary file is still there");
}

static void test_read_golden(const char *dir) {
    static const char HEADER[] =
        "{ \"half\":{\"shape\":[3],\"dtype\":\"F16\",\"data_offsets\":[1,7]}, "
        "\"byte\":{\"dtype\":\"U8\",\"shape\":[1],"
        "\"data_offsets\":[0,1]},\"bf\":{\"dtype\":\"BF16\",\"shape\":[2,1],\"data_offsets\":[7,11]"
        "},\"f\":{\"dtype\":\"F32\","
        "\"shape\":[],\"data_offsets\":[11,15]},\"d\":{\"dtype\":\"F64\",\"shape\":[1,1,1,1],"
        "\"data_offsets\":[15,23]}}";
    static const unsigned char DATA[23] = {7,    0,    0x3C, 1,    0x80, 0,    0xFC, 0x80,
                                           0x3F, 0x49, 0xC0, 0,    0,    0xC0, 0x3F, 0x9A,
                                           0x99, 0x99, 0x99, 0x99, 0x99, 0xB9, 0x3F};
    char path[PATH_CAP];
    check_format(path, sizeof path, "%s/hand.safetensors", dir);
    write_safetensors(path, HEADER, DATA, sizeof DATA);
    SafetensorsFile file;
    open_tensors(path, &file);
    double x[3];
    float y[3];
    safetensors_read_real(safetensors_find(&file, "half"), 0, INT64_MAX, x, sizeof(double));
    EXPECT(x[0] == 1 && x[1] == -0x1p-24 && x[2] == -INFINITY, "F16: %g %g %g", x[0], x[1], x[2]);
    safetensors_read_real(safetensors_find(&file, "half"), 0, INT64_MAX, y, sizeof(float));
    EXPECT(y[0] == 1 && y[1] == -0x1p-24f && y[2] == -INFINITY, "F16 to float: %g %g %g",
           (double)y[0], (double)y[1], (double)y[2]);
    safetensors_read_real(safetensors_find(&file, "bf"), 0, INT64_MAX, x, sizeof(double));
    EXPECT(x[0] == 1 && x[1] == -3.140625, "BF16: %g %g", x[0], x[1]);
    safetensors_read_real(safetensors_find(&file, "f"), 0, INT64_MAX, x, sizeof(double));
    EXPECT(x[0] == 1.5, "F32 to double: %g", x[0]);
    safetensors_read_real(safetensors_find(&file, "d"), 0, INT64_MAX, y, sizeof(float));
    EXPECT(y[0] == 0.1f, "F64 to float: %g", (double)y[0]);
    const Tensor *bf = safetensors_find(&file, "bf"), *byte = safetensors_find(&file, "byte");
    EXPECT(file.count == 5 && bf->rank == 2 && bf->shape[0] == 2 && bf->shape[1] == 1,
           "shapes differ");
    EXPECT(*(const unsigned char *)byte->data == 7 && !safetensors_find(&file, "F"),
           "names differ");
    safetensors_close(&file);
}

static double half_value(uint16_t bits) {
    Tensor t = {"half", "F16", 1, {1}, .data = &bits};
    double value;
    safetensors_read_real(&t, 0, 1, &value, sizeof value);
    return value;
}

static void test_half(void) {
    static const struct {
        unsigned bits;
        double value;
    } ROWS[] = {{0x3555, 0x1.554p-2},
                {0x7BFF, 65504},
                {0x0400, 0x1p-14},
                {0x03FF, 0x1.ff8p-15},
                {0xC000, -2},
                {0x7C00, INFINITY},
                {0, 0}};
    for (int i = 0; i < 7; i++) {
        double v = half_value((uint16_t)ROWS[i].bits);
        EXPECT(v == ROWS[i].value, "F16 %04X: expected %a, found %a", ROWS[i].bits, ROWS[i].value,
               v);
    }
    EXPECT(isnan(half_value(0x7E00)) && signbit(half_value(0x8000)), "F16 NaN or -0");
}

// Written values come back bit for bit: all bit patterns (NaNs with a payload too), ranks 0 to 4,
// an empty tensor, odd names.
static void test_round_trip(const char *dir) {
    enum { N = 70000 };
    float *single = (float *)check_alloc(N * sizeof(float), "a test");
    double *real = (double *)check_alloc(N * sizeof(double), "a test"), scalar = -0.0;
    for (uint64_t i = 0; i < N; i++) {
        uint64_t bits = rand_at(1, i);
        memcpy(&real[i], &bits, 8);
        memcpy(&single[i], &bits, 4);
    }
    Tensor tensors[] = {
        {"odd", "F32", 3, {3, 5, 7}, .data = single},
        {"scalar", "F64", 0, {0}, .data = &scalar},
        {"empty", "F32", 2, {0, 9}, .data = NULL},
        {"four", "F64", 4, {2, 1, 3, 5}, .data = real},
        {"a \"name\"\\\n\xC3\xA9", "F32", 1, {1}, .data = single + 9},
        {"large", "F64", 2, {N / 7, 7}, .data = real},
        {"", "F32", 1, {N}, .data = single},
    };
    const int count = sizeof tensors / sizeof tensors[0];
    char path[PATH_CAP];
    check_format(path, sizeof path, "%s/round.safetensors", dir);
    Hash hash = write_tensors(path, tensors, count), again;
    EXPECT(file_hash(path, &again, NULL) && again.length == hash.length &&
               hash_end(&again) == hash_end(&hash),
           "the file's hash differs");
    SafetensorsFile file;
    open_tensors(path, &file);
    EXPECT(file.count == count && hash.length == file.bytes, "%d tensors", file.count);
    void *copy = check_alloc(N * sizeof(double), "a test");
    for (int i = 0; i < count; i++) {
        const Tensor *want = &tensors[i], *t = safetensors_find(&file, want->name);
        bool same = t && strcmp(t->dtype, want->dtype) == 0 && t->rank == want->rank &&
                    memcmp(t->shape, want->shape, sizeof(int64_t) * (size_t)t->rank) == 0;
        EXPECT(same, "tensor %d: type or shape differ", i);
        if (!same) continue;
        safetensors_read_real(t, 0, INT64_MAX, copy, (size_t)tensor_dtype_bytes(want->dtype));
        EXPECT(tensor_bytes(want) == 0 || memcmp(copy, want->data, (size_t)tensor_bytes(want)) == 0,
               "tensor %s: data differ", t->name);
    }
    EXPECT(((uintptr_t)file.tensors[0].data & 63) == 0, "the data is not aligned to 64 bytes");
    safetensors_close(&file);
    hash = write_tensors(path, NULL, 0);
    open_tensors(path, &file);
    EXPECT(file.count == 0 && hash.length == 64, "a file of no tensors: %d, %" PRIu64 " bytes",
           file.count, hash.length);
    safetensors_close(&file);
    free(copy);
    free(single);
    free(real);
}

#define F32_2 "{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}"
static void open_file(void *path) {
    SafetensorsFile file;
    open_tensors((const char *)path, &file);
}

static void test_refused_tensors(const char *dir) {
    static const struct {
        const char *header;
        size_t bytes;
        const char *reason;
    } ROWS[] = {
        {"{\"a\":" F32_2 "}", 8, NULL},
        {"{}", 0, NULL},
        {"{\"a\":" F32_2 "}", 7, "bytes from 0 to 8 of the 7 bytes"},
        {"{\"a\":" F32_2 "}", 9, "byte 8 of the data belongs to no tensor"},
        {"{\"a\":" F32_2 ",\"a\":" F32_2 "}", 8, "\"a\" twice"},
        {"{\"a\":" F32_2 ",\"b\":" F32_2 "}", 8, "to several"},
        {" {\"a\":" F32_2 "}", 8, "begin with '{'"},
        {"", 8, "begin with '{'"},
        {"[]", 0, "begin with '{'"},
        {"{\"a\":" F32_2, 8, "expected ',' or '}'"},
        {"{\"a\":" F32_2 ",\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[10,12]}}", 12,
         "byte 8 of the data belongs to no tensor"},
        {"{\"a\":" F32_2 ",\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[7,9]}}", 9,
         "byte 8 of the data"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,8]}}", 8,
         "its shape does not take the bytes from 0 to 8"},
        {"{\"a\":{\"dtype\":\"F33\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8,
         "found the dtype \"F33\""},
        {"{\"mask\":{\"dtype\":\"BOOL\",\"shape\":[2,4],\"data_offsets\":[0,8]}}", 8, NULL},
        {"{\"a\":{\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "expected a \"dtype\""},
        {"{\"a\":7}", 0, "expected a \"dtype\""},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-2],\"data_offsets\":[0,8]}}", 8, "a \"shape\" of"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2.0],\"data_offsets\":[0,8]}}", 8, "a \"shape\" of"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,2],\"data_offsets\":[0,8]}}", 8,
         "at most 4 sizes"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":2,\"data_offsets\":[0,8]}}", 8, "a \"shape\" of"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0]}}", 8,
         "two \"data_offsets\""},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[-8,0]}}", 8,
         "two \"data_offsets\""},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,0]}}", 8, "its shape"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[9223372036854775800,"
         "9223372036854775807]}}",
         8, "its shape"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387906],\"data_offsets\":[0,8]}}", 8,
         "its shape"},  // 2^62 + 2: wraps to 8
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[1,0]}}", 0,
         "its shape"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0,
         "its shape"},  // 2^64: wraps to 0
        {"{\"__metadata__\":{\"x\":1},\"a\":" F32_2 "}", 8, NULL},
        {"{\"__metadata__\":[],\"a\":" F32_2 "}", 8, NULL},
    };
    static const char DATA[16];
    char path[PATH_CAP], error[256];
    check_format(path, sizeof path, "%s/refused.safetensors", dir);
    SafetensorsFile file;
    for (size_t i = 0; i < sizeof ROWS / sizeof ROWS[0]; i++) {
        write_safetensors(path, ROWS[i].header, DATA, ROWS[i].bytes);
        bool ok = safetensors_open(path, &file, error);
        if (ROWS[i].reason)
            EXPECT(!ok && strstr(error, ROWS[i].reason), "%s: expected \"%s\", found \"%s\"",
                   ROWS[i].header, ROWS[i].reason, ok ? "accepted" : error);
        else EXPECT(ok, "%s was refused: %s", ROWS[i].header, error);
        if (ok) safetensors_close(&file);
    }
    static const struct {
        const char *bytes;
        size_t n;
        const char *reason;
    } SHORT[] = {
        {"", 0, "cannot map its 0 bytes"},
        {"\2\0\0\0\0\0\0", 7, "found a header of 0 bytes in a file of 7"},
        {"\1\0\0\0\0\0\0\0", 8, "a header of 1 bytes in a file of 8"},
        {"\3\0\0\0\0\0\0\0{}", 10, "a header of 3 bytes in a file of 10"},
        {"\xFA\xFF\xFF\xFF\xFF\xFF\xFF\xFF{}", 10, "a header of 18446744073709551610 bytes"},
    };
    for (size_t i = 0; i < sizeof SHORT / sizeof SHORT[0]; i++) {
        write_bytes(path, SHORT[i].bytes, SHORT[i].n);
        bool ok = safetensors_open(path, &file, error);
        EXPECT(!ok && strstr(error, SHORT[i].reason), "row %zu: expected \"%s\", found \"%s\"", i,
               SHORT[i].reason, ok ? "accepted" : error);
    }
    EXPECT_REFUSAL(open_file, path, "expected 8 bytes and a header");
    write_safetensors(path, "{\"a\":{\"dtype\":\"F8_E4M3\",\"shape\":[8],\"data_offsets\":[0,8]}}",
                      DATA, 8);
    EXPECT_REFUSAL(open_file, path, "found the dtype \"F8_E4M3\"\n");
    EXPECT(!safetensors_open(dir, &file, error) && strstr(error, "regular file"),
           "a folder: %s", error);
    EXPECT_REFUSAL(open_file, (void *)"absent.safetensors", "No such file");
}

static void read_bytes(void *out) {
    Tensor t = {"tokens", "I32", 1, {1}, .data = "abc"};
    safetensors_read_real(&t, 0, INT64_MAX, out, sizeof(double));
}
static void read_mask(void *out) {
    Tensor t = {"mask", "BOOL", 1, {1}, .data = "abc"};
    safetensors_read_real(&t, 0, INT64_MAX, out, sizeof(double));
}

// ------------------------------------------------------------------------------------- checkpoints

static const char *const FILES[] = {"model.safetensors", "optimizer.safetensors", "config.json",
                                    "state.json", "manifest.json"};

// A checkpoint that knows who it is: id stands in the tensors and in state.json.
static void fill_checkpoint(Checkpoint *c, const char *run, int64_t step, int64_t id,
                            int64_t floats) {
    float *weights = (float *)check_alloc((size_t)floats * sizeof(float), "a test");
    double moment = 0.5 * (double)id;
    for (int64_t i = 0; i < floats; i++) weights[i] = (float)id;
    Tensor model = {"w", "F32", 1, {floats}, .data = weights},
           optimizer = {"m", "F64", 0, {0}, .data = &moment};
    char text[64];
    begin_checkpoint(c, run, step);
    checkpoint_add_tensors(c, "model.safetensors", &model, 1);
    checkpoint_add_tensors(c, "optimizer.safetensors", &optimizer, 1);
    checkpoint_add_text(c, "config.json", "{}\n");
    checkpoint_add_text(c, "state.json",
                        check_format(text, sizeof text,
                                     "{\"step\": %" PRId64 ", \"id\": %" PRId64 "}\n", step, id));
    free(weights);
}

static void write_checkpoint(const char *run, int64_t step, int64_t id, int64_t floats) {
    Checkpoint c;
    fill_checkpoint(&c, run, step, id, floats);
    checkpoint_commit(&c);
    close(c.run);
}

// The id of a checkpoint, or -1 when its parts disagree.
static int64_t read_checkpoint(const char *dir) {
    char path[PATH_CAP];
    Json *state = json_read_file(check_format(path, sizeof path, "%s/state.json", dir), NULL);
    int64_t id = json_get_int(state, "id", path);
    json_free(state);
    SafetensorsFile file;
    open_tensors(check_format(path, sizeof path, "%s/model.safetensors", dir), &file);
    const Tensor *w = safetensors_find(&file, "w");
    for (int64_t i = 0; i < w->shape[0]; i++)
        if (((const float *)w->data)[i] != (float)id) id = -1;
    safetensors_close(&file);
    return id;
}

// checkpoint_latest in a child process, which may refuse: the id found (0: without reading it), -1
// when there is none, -2 after a refusal, and what it said.
static int64_t latest_found(const char *run, bool read_it, char *said, size_t cap) {
    int words[2], answer[2];
    CHECK(pipe(words) == 0 && pipe(answer) == 0, "no pipe\n  -> close other programs");
    fflush(NULL);
    pid_t child = fork();
    CHECK(child >= 0, "no child process\n  -> close other programs");
    if (child == 0) {
        char dir[PATH_CAP];
        dup2(words[1], 2);
        int64_t id = checkpoint_latest(run, dir) ? read_it ? read_checkpoint(dir) : 0 : -1;
        _exit(write(answer[1], &id, sizeof id) != sizeof id);
    }
    close(words[1]);
    close(answer[1]);
    size_t n = 0;
    for (ssize_t got; n < cap - 1 && (got = read(words[0], said + n, cap - 1 - n)) > 0;)
        n += (size_t)got;
    said[n] = 0;
    int64_t id;
    if (read(answer[0], &id, sizeof id) != sizeof id) id = -2;
    close(words[0]);
    close(answer[0]);
    waitpid(child, NULL, 0);
    return id;
}
static int64_t latest(const char *run, char *said, size_t cap) {
    return latest_found(run, true, said, cap);
}

static void expect_latest(const char *run, int64_t id, const char *words, int line) {
    char said[4096];
    int64_t found = latest(run, said, sizeof said);
    EXPECT(found == id, "line %d: expected checkpoint %" PRId64 ", found %" PRId64 "; stderr: %s",
           line, id, found, said);
    EXPECT(words ? strstr(said, words) != NULL : said[0] == 0,
           "line %d: expected stderr \"%s\", found \"%s\"", line, words ? words : "", said);
}

static void call_latest(void *run) {
    char dir[PATH_CAP];
    checkpoint_latest((const char *)run, dir);
}

static void test_commit(const char *run) {
    char path[PATH_CAP], why[256] = "";
    struct stat info;
    expect_latest(run, -1, NULL, __LINE__);
    EXPECT(!checkpoint_latest("build/test/checkpoint/absent", path),
           "a checkpoint in an absent run");
    for (int64_t step = 100; step <= 300; step += 100) write_checkpoint(run, step, step, 10);
    write_checkpoint(run, 99, 99, 10);  // the highest step wins, not the last one written
    expect_latest(run, 300, NULL, __LINE__);
    check_format(path, sizeof path, "%s/step_00000200", run);
    EXPECT(checkpoint_verify(path, why) && read_checkpoint(path) == 200, "step 200: %s", why);
    write_checkpoint(run, 300, 301, 20);  // the same step again: replaced, nothing left over
    expect_latest(run, 301, NULL, __LINE__);
    EXPECT(lstat(check_format(path, sizeof path, "%s/.tmp-step", run), &info) != 0,
           "the temporary folder is still there");
    write_checkpoint(run, 1234567890, 5, 1);  // more digits than the padding
    expect_latest(run, 5, NULL, __LINE__);
    EXPECT(folder_remove(AT_FDCWD, check_format(path, sizeof path, "%s/step_1234567890", run)),
           "cannot remove %s", path);
    static const char *const STRANGERS[] = {"step_300",          "step_000000400", "step_00000400x",
                                            "step_-0000001",     "xstep_00000400", ".tmp-step_400",
                                            ".tmp-step"};
    for (int i = 0; i < 7; i++)
        mkdir(check_format(path, sizeof path, "%s/%s", run, STRANGERS[i]), 0777);
    expect_latest(run, 301, NULL, __LINE__);  // not names of checkpoints: not looked at
    write_checkpoint(run, 300, 300, 10);
    for (int i = 0; i < 7; i++) {  // and only what a checkpoint left unfinished is cleared
        bool there = lstat(check_format(path, sizeof path, "%s/%s", run, STRANGERS[i]), &info) == 0;
        EXPECT(there == (i < 6), "%s is %s", path, there ? "still there" : "gone");
    }
}

// Kinds of damage to a file of n bytes; each returns the new length of `bytes`, or -1 for no file.
enum { CUT, EMPTY, LONGER, MISSING, ZEROED, KINDS_OF_DAMAGE };
static int64_t damage(char *bytes, int64_t n, int kind) {
    if (kind == ZEROED) memset(bytes, 0, (size_t)n);
    bytes[n] = ' ';
    return kind == CUT       ? n - 1
           : kind == EMPTY   ? 0
           : kind == LONGER  ? n + 1
           : kind == MISSING ? -1
                             : n;
}

// Every kind of damage to every file of the newest checkpoint is seen, named, and the one before it
// taken instead.
static void test_damage(const char *run) {
    for (int f = 0; f < 5; f++) {
        char dir[PATH_CAP], path[PATH_CAP], why[256], bytes[1025];
        check_format(dir, sizeof dir, "%s/step_00000300", run);
        check_format(path, sizeof path, "%s/%s", dir, FILES[f]);
        size_t n;
        char *whole = file_read(path, INT64_MAX, &n);
        CHECK(whole && n < 1024, "%s is too large for this test\n  -> a smaller tensor", path);
        for (int kind = 0; kind < KINDS_OF_DAMAGE; kind++) {
            if (strcmp(FILES[f], "manifest.json") == 0 && kind == LONGER)
                continue;  // white space behind a manifest is no damage
            memcpy(bytes, whole, n);
            int64_t left = damage(bytes, (int64_t)n, kind);
            if (strcmp(FILES[f], "manifest.json") == 0 && kind == CUT)
                left--;  // nor is the lack of a last newline
            unlink(path);
            if (left >= 0) write_bytes(path, bytes, (size_t)left);
            EXPECT(!checkpoint_verify(dir, why) && strstr(why, FILES[f]), "%s, damage %d: %s",
                   FILES[f], kind, why);
            expect_latest(run, 200, FILES[f], __LINE__);
        }
        for (size_t bit = 0; bit < 8 * n; bit++) {
            memcpy(bytes, whole, n);
            bytes[bit / 8] = (char)(bytes[bit / 8] ^ 1 << bit % 8);
            write_bytes(path, bytes, n);
            EXPECT(!checkpoint_verify(dir, why), "%s, bit %zu flipped: not seen", FILES[f], bit);
        }
        write_bytes(path, whole, n);
        EXPECT(checkpoint_verify(dir, why), "repaired, but: %s", why);
        free(whole);
    }
    expect_latest(run, 300, NULL, __LINE__);
}

static void test_manifests(const char *run) {
    static const char *const TEXTS[] = {
        "{}",
        "[]",
        "[{\"size\":1,\"xxh64\":\"\"}]",
        "{\"state.json\":{}}",
        "{\"state.json\":1}",
        "{\"..\":{\"size\":0,\"xxh64\":\"x\"}}",
        "{\"\":{\"size\":4096,\"xxh64\":\"ef46db3751d8e999\"}}",
        "{\"../step_00000100/config.json\":{\"size\":3,\"xxh64\":\"7d441b099c11d3ba\"}}"};
    char dir[PATH_CAP], path[PATH_CAP], why[256];
    check_format(dir, sizeof dir, "%s/step_00000300", run);
    check_format(path, sizeof path, "%s/manifest.json", dir);
    size_t n;
    char *whole = file_read(path, INT64_MAX, &n);
    for (size_t i = 0; i < sizeof TEXTS / sizeof TEXTS[0]; i++) {
        write_bytes(path, TEXTS[i], strlen(TEXTS[i]));
        EXPECT(!checkpoint_verify(dir, why), "the manifest %s was accepted", TEXTS[i]);
    }
    char name[2001], text[2100];
    memset(name, 'x', 2000);
    name[2000] = 0;
    check_format(text, sizeof text, "{\"%s\": {\"size\": 1, \"xxh64\": \"x\"}}", name);
    write_bytes(path, text, strlen(text));
    EXPECT(!checkpoint_verify(dir, why), "a name of 2000 bytes was accepted");
    write_bytes(path, whole, n);
    free(whole);
}

static void test_all_damaged(const char *run) {
    char path[PATH_CAP];
    write_checkpoint(run, 7, 7, 10);
    CHECK(truncate(check_format(path, sizeof path, "%s/step_00000007/state.json", run), 3) == 0,
          "cannot truncate %s\n  -> check build/test", path);
    EXPECT_REFUSAL(call_latest, (void *)run, "every checkpoint in");
    write_checkpoint(run, 7, 8, 10);  // a damaged one is replaced like any other
    expect_latest(run, 8, NULL, __LINE__);
}

// -------------------------------------------------------------------------------------- full disks

// A checkpoint of 400 kB in a process whose files may have 100 kB: the write that crosses the limit
// is cut short, the next fails.
static void write_beyond_limit(void *run) {
    struct rlimit limit = {100000, 100000};
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    write_checkpoint((const char *)run, 300, 999, 100000);
}
static void write_to_file(void *path) { write_text((const char *)path, "{}"); }
static void begin_run(void *run) {
    Checkpoint c;
    begin_checkpoint(&c, (const char *)run, 1);
}
static void test_full_disk(const char *run) {
    EXPECT_REFUSAL(write_beyond_limit, (void *)run,
                   "model.safetensors.tmp after 100000 bytes: File too large\n  -> free space");
    expect_latest(run, 300, NULL, __LINE__);
    char path[PATH_CAP], temp[PATH_CAP];
    check_format(path, sizeof path, "%s/config.json", run);
    write_text(path, "before");
    check_format(temp, sizeof temp, "%s.tmp", path);
    size_t n;
    char *text;
    write_bytes(temp, "what a kill left of a longer file", 33);
    write_text(path, "after");
    text = file_read(path, INT64_MAX, &n);
    EXPECT(text && n == 5 && memcmp(text, "after", 5) == 0, "the file was not replaced");
    free(text);

    // A regular file where a folder is needed: refused for every user, root too.
    EXPECT_REFUSAL(begin_run, check_format(temp, sizeof temp, "%s/sub", path),
                   "cannot open the folder");
    EXPECT_REFUSAL(begin_run, path, "cannot open the folder");
    EXPECT_REFUSAL(call_latest, path, "cannot list");
    EXPECT_REFUSAL(write_to_file, check_format(temp, sizeof temp, "%s/file", path),
                   "cannot open the folder");
}

// ------------------------------------------------------------------------------------------- kills

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void wait_seconds(double seconds) {
    struct timespec t = {(time_t)seconds, (long)(1e9 * (seconds - floor(seconds)))};
    nanosleep(&t, NULL);
}

// Lets a commit of step 2 run up to its n-th stop (before a system call, after it, before the next
// one, ...) and kills it there. Returns whether it ended before that; traced says whether this
// machine lets one process trace another.
static bool commit_until(const char *run, int n, bool *traced) {
    fflush(NULL);
    pid_t child = fork();
    CHECK(child >= 0, "no child process\n  -> close other programs");
    if (child == 0) {
        Checkpoint c;
        fill_checkpoint(&c, run, 2, 2, 10);
        if (ptrace(PTRACE_TRACEME, 0, 0, 0) != 0) _exit(2);
        raise(SIGSTOP);
        checkpoint_commit(&c);
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    for (int i = 0; i < n && WIFSTOPPED(status); i++) {
        ptrace(PTRACE_SYSCALL, child, 0, 0);
        waitpid(child, &status, 0);
    }
    *traced = WIFSTOPPED(status) || WEXITSTATUS(status) == 0;
    if (!WIFSTOPPED(status)) return true;
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    return false;
}

static void begin_and_abandon(const char *run) {
    Checkpoint c;
    begin_checkpoint(&c, run, 3);
    checkpoint_abandon(&c);
    close(c.run);
}

// A damaged checkpoint of step 2, which a resume passed over, is written again beside the whole one
// of step 1. A kill at every system call of the commit: one of the two is found, and once it is the
// new one, it stays. The next begin does not lose it.
static void test_every_call(const char *run) {
    bool ended = false, traced = true;
    char said[4096], state[PATH_CAP];
    int64_t before = 2;
    check_format(state, sizeof state, "%s/step_00000002/state.json", run);
    write_checkpoint(run, 1, 1, 10);
    for (int n = 1; !ended && traced;
         n += 2) {  // before a call is the same place as after the last
        if (before == 2) {
            write_checkpoint(run, 2, 2, 10);
            CHECK(truncate(state, 3) == 0, "cannot truncate %s\n  -> check build/test", state);
        }
        ended = commit_until(run, n, &traced);
        int64_t found = latest(run, said, sizeof said);
        EXPECT(found == 1 || found == 2, "killed at stop %d: %d found; %s", n, (int)found, said);
        bool only = !said[0] || (found == 1 && strstr(said, "step_00000002"));
        EXPECT(only, "killed at stop %d: found %d; %s", n, (int)found, said);
        before = found;
        begin_and_abandon(run);
        EXPECT(latest(run, said, sizeof said) == found, "killed at stop %d: lost by the next begin",
               n);
    }
    if (traced) EXPECT(before == 2, "the commit ended, but the new checkpoint is not found");
    else
        printf("  note: no kill at every system call: this machine does not let a process trace "
               "another\n");
}

// Writes checkpoint after checkpoint, keeps the last two, and tells the id of every one it has
// committed, until it is killed.
static void write_forever(const char *run, int64_t id, int tell) {
    for (;; id++) {
        write_checkpoint(run, id, id, 3000);
        int folder = folder_open(run);
        checkpoint_prune(folder, run, id, 2, 0);
        close(folder);
        if (write(tell, &id, sizeof id) != sizeof id) _exit(1);
    }
}

// Kills a writer at staggered times: what it had committed is never lost, and what is found is
// never a mixture.
static void test_kills(const char *run) {
    int64_t committed = 2, rounds = 100, inside = 0;
    double start = now();
    write_checkpoint(run, committed, committed, 3000);
    double seconds = now() - start;  // of one checkpoint: the kills are spread over two of them
    for (int64_t round = 0; round < rounds; round++) {
        int ends[2];
        CHECK(pipe(ends) == 0, "no pipe\n  -> close other programs");
        fflush(NULL);
        pid_t child = fork();
        CHECK(child >= 0, "no child process\n  -> close other programs");
        if (child == 0) {
            close(ends[0]);  // a writer whose parent is gone ends with its next word
            write_forever(run, committed + 1, ends[1]);
        }
        close(ends[1]);
        wait_seconds(2 * seconds * (double)round / (double)rounds);
        kill(child, SIGKILL);
        int status;
        waitpid(child, &status, 0);
        EXPECT(WIFSIGNALED(status), "round %d: the writer ended by itself", (int)round);
        int64_t id;
        while (read(ends[0], &id, sizeof id) == sizeof id) committed = id;
        close(ends[0]);

        char path[PATH_CAP], said[4096];
        struct stat info;
        // One that has its manifest already is whole, or is being pruned.
        bool begun = lstat(check_format(path, sizeof path, "%s/.tmp-step", run), &info) == 0;
        inside += begun && lstat(strcat(path, "/manifest.json"), &info) != 0;
        int64_t found = latest(run, said, sizeof said);
        EXPECT(found == committed || found == committed + 1, "round %d: %d committed, %d found",
               (int)round, (int)committed, (int)found);
        EXPECT(said[0] == 0, "round %d: %s", (int)round, said);
        if (found > committed) committed = found;
    }
    EXPECT(inside > 20, "only %d of %d kills came while a checkpoint was being written",
           (int)inside, (int)rounds);
}

// Read while a process writes and prunes: there is always a whole one, and none that goes is called
// damaged.
static void test_pruning(const char *run) {
    char said[4096];
    write_checkpoint(run, 1, 1, 100000);
    fflush(NULL);
    pid_t child = fork();
    CHECK(child >= 0, "no child process\n  -> close other programs");
    if (child == 0)
        for (int64_t step = 2;; step++) {
            write_checkpoint(run, step, step, 100000);
            int folder = folder_open(run);
            checkpoint_prune(folder, run, step, 1, 0);
            close(folder);
        }
    int whole = 0, rounds = 100, status;
    for (int i = 0; i < rounds; i++)
        whole += latest_found(run, false, said, sizeof said) == 0 && !said[0];
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    EXPECT(whole == rounds,
           "in %d of %d looks the newest checkpoint was not found, or another was called damaged",
           rounds - whole, rounds);
}

// Whether the file still has its one line.
static bool is_precious(const char *path) {
    size_t n;
    char *text = file_read(path, INT64_MAX, &n);
    bool same = text && !strcmp(text, "precious");
    free(text);
    return same;
}

static void make_at_link(void *folder) { folder_make_in(*(int *)folder, "run/events"); }

// Files behind links in a run's folder are neither removed nor written to. A linked checkpoint is
// read, counts, and goes as a link.
static void test_links(const char *run) {
    char elsewhere[PATH_CAP], file[PATH_CAP], path[PATH_CAP];
    struct stat info;
    check_format(elsewhere, sizeof elsewhere, "%s_elsewhere", run);
    check_format(file, sizeof file, "%s/model.safetensors", elsewhere);
    mkdir(elsewhere, 0777);
    write_bytes(file, "precious", 8);
    char *target = realpath(elsewhere, NULL), *victim = realpath(file, NULL);
    write_checkpoint(run, 5, 5, 10);
    int folder = folder_open(run);
    static const char *const LINKS[] = {".tmp-step", "events", "step_00000002"};
    for (int i = 0; i < 3; i++)
        EXPECT(symlinkat(target, folder, LINKS[i]) == 0, "no link %s", LINKS[i]);
    EXPECT(symlinkat(victim, folder, "config.json.tmp") == 0, "no link");
    write_checkpoint(run, 6, 6, 10);
    EXPECT(is_precious(file), "a link with the name of a leftover was followed");
    file_write_in(folder, check_format(path, sizeof path, "%s/config.json", run), "{}", 2);
    EXPECT(is_precious(file), "a link with the name of a temporary file was followed");
    EXPECT_REFUSAL(make_at_link, &folder, "cannot make the folder run/events");

    checkpoint_prune(folder, run, 6, 3, 0);  // 6, 5 and the link of step 2 are three
    EXPECT(fstatat(folder, "step_00000002", &info, AT_SYMLINK_NOFOLLOW) == 0,
           "a linked checkpoint does not count");
    checkpoint_prune(folder, run, 6, 2, 0);
    EXPECT(fstatat(folder, "step_00000002", &info, AT_SYMLINK_NOFOLLOW) != 0,
           "the link of step 2 is still there");
    EXPECT(is_precious(file), "pruning followed a link");
    CHECK(renameat(folder, "step_00000006", AT_FDCWD,
                   check_format(path, sizeof path, "%s/moved", elsewhere)) == 0,
          "cannot move it");
    char *moved = realpath(path, NULL);
    CHECK(symlink(moved, check_format(file, sizeof file, "%s/step_00000006", run)) == 0, "no link");
    expect_latest(run, 6, NULL, __LINE__);
    free(target);
    free(victim);
    free(moved);
    close(folder);
}

// A checkpoint under the name of another step is passed over.
static void test_renamed(const char *run) {
    char plain[PATH_CAP], other[PATH_CAP];
    write_checkpoint(run, 1, 1, 10);
    write_checkpoint(run, 2, 2, 10);
    CHECK(rename(checkpoint_path(plain, run, 2), checkpoint_path(other, run, 7)) == 0,
          "cannot rename %s", plain);
    expect_latest(run, 1, "its state.json is of step 2: the folder was renamed", __LINE__);
}

// Weights without a state.json, as an import has them, are no checkpoint.
static void test_stateless(const char *run) {
    Checkpoint c;
    begin_checkpoint(&c, run, 8);
    checkpoint_add_text(&c, "config.json", "{}\n");
    checkpoint_commit(&c);
    close(c.run);
    expect_latest(run, 1, "state.json: No such file", __LINE__);
}

// The last piece finds no room, and closing says nothing, as in memory.
static void text_without_room(void *unused) {
    (void)unused;
    FILE *f = fopen("/dev/full", "w");
    CHECK(f && setvbuf(f, NULL, _IONBF, 0) == 0, "/dev/full cannot be written");
    text_end(f, "}\n");
}

static void test_text(void) {
    char *text = NULL;
    size_t n = 0;
    FILE *f = text_begin(&text, &n);
    fputc('{', f);
    text_end(f, "}\n");
    EXPECT(n == 3 && !strcmp(text, "{}\n"), "%zu bytes: %s", n, text);
    EXPECT_REFUSAL(text_without_room, NULL, "no memory for a text");
    free(text);
}

void test_checkpoint(void) {
    char dir[256], run[512], second[512];
    check_format(dir, sizeof dir, "%s", test_dir("checkpoint"));
    check_format(run, sizeof run, "%s/run", dir);
    test_hash();
    test_text();
    test_write_golden(dir);
    test_read_golden(dir);
    test_half();
    test_round_trip(dir);
    test_refused_tensors(dir);
    check_format(second, sizeof second, "%s/never.safetensors", dir);
    EXPECT_REFUSAL(read_bytes, second, "tensor tokens: expected F64");
    EXPECT_REFUSAL(read_mask, second, "tensor mask: expected F64, F32, BF16 or F16, found BOOL");
    mkdir(run, 0777);
    test_commit(run);
    test_damage(run);
    test_manifests(run);
    test_full_disk(run);
    check_format(second, sizeof second, "%s/second", dir);
    test_all_damaged(second);
    check_format(second, sizeof second, "%s/links", dir);
    test_links(second);
    check_format(second, sizeof second, "%s/renamed", dir);
    test_renamed(second);
    test_stateless(second);
    check_format(second, sizeof second, "%s/calls", dir);
    test_every_call(second);
    check_format(second, sizeof second, "%s/pruning", dir);
    test_pruning(second);
    check_format(second, sizeof second, "%s/kills", dir);
    test_kills(second);
}
