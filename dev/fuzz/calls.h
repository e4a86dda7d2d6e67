// calls.h: the four calls of the C library that code under test makes to fuzz.h instead.
// dev/fuzz/run.sh includes it before every service (llmc/run/*.c), fuzz.h before the code of a
// target.
#pragma once
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

__attribute__((noreturn)) void fuzz_exit(int status);
FILE *fuzz_fopen(const char *path, const char *mode);
int fuzz_fclose(FILE *f);
int fuzz_vsnprintf(char *out, size_t cap, const char *fmt, va_list args);

#define exit fuzz_exit
#define fopen fuzz_fopen
#define fclose fuzz_fclose
#define vsnprintf fuzz_vsnprintf
