// test.h: what every test file shares. A test is a function that calls EXPECT; test_gpt.c lists the
// functions and prints "N passed, M failed". Nothing here needs a GPU, a network or Python.
#pragma once
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include "../../llmc/run/json.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct { int passed, failed; const char *name; } TestCount;
extern TestCount test_count;

// Counts one check; a failure prints the message and goes on.
#define EXPECT(cond, ...) test_expect((cond), #cond, __FILE__, __LINE__, __VA_ARGS__)
__attribute__((format(printf, 5, 6)))
void test_expect(bool ok, const char *what, const char *file, int line, const char *fmt, ...);

// Runs body(arg) in a child process and expects it to exit with a non-zero status (not a signal)
// after printing `words` on stderr: how a refusal is tested.
void test_expect_refusal(void (*body)(void *), void *arg, const char *words, const char *file,
                         int line);
#define EXPECT_REFUSAL(body, arg, words) test_expect_refusal(body, arg, words, __FILE__, __LINE__)

// A fresh folder under build/test for one test's files; removed first when it exists. Returned
// string is static per call slot.
const char *test_dir(const char *name);

// Writes a small tokenizer.bin (test_tokenizer.c): the bytes, " the", "ing" and a few more. Text
// with U+0340 is refused.
void test_write_tokenizer(const char *path);

// One function per file in dev/test/ and one per section of test_gpt.c.
void test_stories(void);
void test_gemm(void);
void test_bf16(void);
void test_json(void);
void test_checkpoint(void);
void test_comm(void);
void test_dataloader(void);
void test_shard(void);
void test_tokenizer(void);
void test_equations(void);
void test_oracle(void);
void test_flags(void);
void test_schedule(void);
void test_sampler(void);
void test_logger(void);
void test_eval(void);
void test_spikes(void);
void test_pace(void);
void test_run(void);
void test_run_sample(void);
void test_run_tokens(void);
void test_room(void);
void test_micro_batch(void);
void test_command(void);
void test_run_refusals(void);

#ifdef __cplusplus
}
#endif

// Members of what tests read, as json_get_int.
static inline bool json_get_bool(const Json *object, const char *key, const char *where) {
    return json_need(object, key, JSON_BOOL, where)->integer;
}

// null reads as NaN: that is how json_write_number writes what is not finite.
static inline double json_get_number(const Json *object, const char *key, const char *where) {
    const Json *v = json_get(object, key);
    if (v && v->kind == JSON_NULL) return NAN;
    return json_need(object, key, v && v->kind == JSON_INT ? JSON_INT : JSON_REAL, where)->number;
}
