// gpu_main.cu: runs the tests of CUDA code that are linked with it. ./test_gpt-fp32 [words]: only those whose name contains one of the words.
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

int main(int argc, char **argv) {
    for (const GpuTest *t = GpuTest::first(); t; t = t->next) {
        bool wanted = argc < 2;
        for (int i = 1; i < argc; i++) wanted |= strstr(t->name, argv[i]) != NULL;
        if (!wanted) continue;
        int failed = test_count.failed, passed = test_count.passed;
        test_count.name = t->name;
        t->run();
        cudaCheck(cudaDeviceSynchronize());
        printf("%-28s %s  (%d checks)\n", t->name, test_count.failed == failed ? "ok" : "FAILED", test_count.passed - passed);
        fflush(stdout);
    }
    printf("%d passed, %d failed\n", test_count.passed, test_count.failed);
    return test_count.failed > 0;
}
