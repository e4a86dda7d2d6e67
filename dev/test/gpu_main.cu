// gpu_main.cu: runs the tests of CUDA code that are linked with it.
//
//   ./test_gpt-fp32 [words]    only those whose name contains one of the words, or is NAME where
//                              the word is =NAME
//   ./test_gpt-fp32 --list     their names
#include "gpu_test.cuh"
#include <stdarg.h>

TestCount test_count;

void test_expect(bool ok, const char *what, const char *file, int line, const char *fmt, ...) {
    if (ok) { test_count.passed++; return; }
    test_count.failed++;
    va_list args;
    va_start(args, fmt);
    printf("FAILED %s: ", test_count.name);
    vprintf(fmt, args);
    printf("  [%s, %s:%d]\n", what, file, line);
    va_end(args);
    fflush(stdout);
}

static bool wants(const char *name, int count, char **words) {
    for (int i = 0; i < count; i++)
        if (*words[i] == '=' ? !strcmp(name, words[i] + 1) : strstr(name, words[i]) != NULL)
            return true;
    return !count;
}

int main(int argc, char **argv) {
    bool list = argc == 2 && !strcmp(argv[1], "--list");
    for (const GpuTest *t = GpuTest::first(); list && t; t = t->next) puts(t->name);
    if (list) return 0;
    for (const GpuTest *t = GpuTest::first(); t; t = t->next) {
        if (!wants(t->name, argc - 1, argv + 1)) continue;
        int failed = test_count.failed, passed = test_count.passed;
        test_count.name = t->name;
        t->run();
        cudaCheck(cudaDeviceSynchronize());
        printf("%-28s %s  (%d checks)\n", t->name, test_count.failed == failed ? "ok" : "FAILED",
               test_count.passed - passed);
        fflush(stdout);
    }
    printf("%d passed, %d failed\n", test_count.passed, test_count.failed);
    return test_count.failed > 0;
}
