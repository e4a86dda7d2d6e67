// gemm_amx.h: the kernel of gemm.h for AMX, Intel's matrix unit: a block is 2 x 2 of its tiles.
// It only adds speed: gemm.h, which includes it, is complete without it. With it and with packing
// in squares, GPT-2 124M in bf16 is 2.7 times as fast (figures: dev/bench/cpu/RESULTS.md).
#pragma once

#if AMX
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

// Linux gives the registers of AMX, 8 KiB a thread, to programs that ask for them
// (Documentation/arch/x86/xstate.rst).
static __attribute__((constructor)) void gemm_ask(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0) return;
    fprintf(stderr,
            "this system does not let programs use AMX, which this build's bf16 products need\n"
            "  -> build with CFLAGS='-O3 -march=native -mno-amx-bf16'\n");
    exit(1);
}

// Configures all eight tile registers: 16 rows of 64 bytes. The configuration is constant, because
// gcc declares that the intrinsic reads eight bytes of it, and would drop stores to the rest.
static inline void gemm_begin(void) {
    static const struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1,
                .bytes = {64, 64, 64, 64, 64, 64, 64, 64},
                .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&config);
}

static inline void gemm_end(void) { _tile_release(); }

// The unit can write a product or add it to a tile, and has no alpha: unless alpha is 1, the
// sum goes through `block`. With every 16 units of k it prefetches four lines of p->ahead and four
// rows of `out`, then of the block below: 1.07 (GPT-2 124M) to 1.13 times as fast.
NOINLINE void gemm_kernel(const KernelArgs *p) {
    Ahead rest = *p->ahead;
    real block[MR * NR];
    const real *row = p->out;
    bool direct = p->alpha == 1;
    real *c = direct ? p->out : block;
    int64_t line = direct ? p->stride : NR, bytes = line * (int64_t)sizeof(real);
    if (direct && p->add) {
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
    const Unit *a = p->a->p + p->s.from * MR, *b = p->b->p + p->s.from * NR;
    for (int64_t k = p->s.from; k < p->s.to; k += 16, a += 16 * MR, b += 16 * NR) {
        for (int i = 0; i < 4; i++, row += p->stride) {
            gemm_fetch(&rest);
            for (int j = 0; j < NR; j += LINE) __builtin_prefetch(row + j, 1);
        }
        _tile_loadd(4, a, 64);
        _tile_loadd(6, b, 4 * NR);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + 16, 4 * NR);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + 256, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    *p->ahead = rest;
    _tile_stored(0, c, bytes);
    _tile_stored(1, c + 16, bytes);
    _tile_stored(2, c + 16 * line, bytes);
    _tile_stored(3, c + 16 * line + 16, bytes);
    for (int64_t r = 0; r < MR && !direct; r++) {
        real *out = p->out + r * p->stride;
        for (int64_t j = 0; j < NR; j++)
            out[j] = (p->add ? out[j] : 0) + p->alpha * block[r * NR + j];
    }
}
#endif
