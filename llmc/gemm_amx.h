// gemm_amx.h: gemm.h's kernel for AMX, Intel's unit for matrices: 2 x 2 of its tiles. GPT-2 124M in bf16, with squares, 2.7 times as fast (dev/bench/cpu/RESULTS.md). For speed
// alone: without this file gemm.h is complete. Included by it, whose names it uses, where they are known.
#pragma once

#if AMX
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
// Linux gives the registers of AMX, 8 KiB a thread, to programs that ask (Documentation/arch/x86/xstate.rst).
static __attribute__((constructor)) void gemm_ask(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0) return;
    fprintf(stderr, "this system does not let programs use AMX, which this build's bf16 products need\n  -> build with CFLAGS='-O3 -march=native -mno-amx-bf16'\n");
    exit(1);
}

// All eight registers: 16 lines of 64 bytes.
static inline void gemm_begin(void) {
    static const struct { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t lines[16]; } shape = {
        1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};     // constant: gcc's word says that eight bytes of it are read, and other stores may go
    _tile_loadconfig(&shape);
}
static inline void gemm_end(void) { _tile_release(); }

// out, MR rows `stride` apart, (+)= alpha (panel of A) (panel of B) over the units s of K. The unit itself can only write a product, or add it to what is there.
// With every instruction's depth four lines of what is ahead are fetched, and four rows of `out`, then of the block below: 1.07 (GPT-2 124M) to 1.13 times as fast.
static __attribute__((noinline)) void gemm_kernel(real *out, int64_t stride, const Panel *a, const Panel *b, Span s, real alpha, bool add, Ahead *ahead, int64_t rows) {
    (void)rows;
    Ahead rest = *ahead;
    const real *row = out;
    real block[MR * NR], *c = out;
    bool itself = alpha == 1;
    int64_t line = itself ? stride : NR, bytes = line * (int64_t)sizeof(real);
    if (!itself) c = block;
    if (itself && add) {
        _tile_loadd(0, c, bytes);
        _tile_loadd(1, c + 16, bytes);
        _tile_loadd(2, c + 16 * line, bytes);
        _tile_loadd(3, c + 16 * line + 16, bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    const Unit *at_a = a->p + s.from * MR, *at_b = b->p + s.from * NR;
    for (int64_t k = s.from; k < s.to; k += 16, at_a += 16 * MR, at_b += 16 * NR) {
        for (int i = 0; i < 4; i++, row += stride) {
            gemm_fetch(&rest);
            for (int j = 0; j < NR; j += LINE) __builtin_prefetch(row + j, 1);
        }
        _tile_loadd(4, at_a, 64);
        _tile_loadd(6, at_b, 4 * NR);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, at_b + 16, 4 * NR);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, at_a + 256, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    *ahead = rest;
    _tile_stored(0, c, bytes);
    _tile_stored(1, c + 16, bytes);
    _tile_stored(2, c + 16 * line, bytes);
    _tile_stored(3, c + 16 * line + 16, bytes);
    for (int64_t r = 0; r < MR && !itself; r++)
        for (int64_t j = 0; j < NR; j++) out[r * stride + j] = (add ? out[r * stride + j] : 0) + alpha * block[r * NR + j];
}
#endif
