// mma.cuh: the PTX instructions attention and experts stand on, one small device function each. Beside the instruction is a twin in C++ for the emulator (dev/emu), where
// the lanes of a warp hand each other their operands. For bfloat16 and compute capability 8.0 or later.
//
// mma_bf16 multiplies matrices that lie spread over the registers of a warp: D (16 x 8, float) += A (16 x 16) B (16 x 8). They are made of pieces of 8 x 8.
// Lane 4 * row + quad, row = 0..7, quad = 0..3, holds two neighbours of each piece; bfloat16 are packed in a register, the first in the low half:
//
//     a piece:       column 0, 1     2, 3     4, 5     6, 7           A:  a[0] a[2]        B:  b[0]        D:  d[0], d[1]
//        row 0         lane  0   lane  1  lane  2  lane  3                a[1] a[3]            b[1]            d[2], d[3]
//        row 1         lane  4   lane  5  lane  6  lane  7
//         ...                                                     B's pieces are transposed: `row` is the column of B, the two neighbours
//        row 7         lane 28   lane 29  lane 30  lane 31        lie below each other. So b[0] is B's rows 2 quad and 2 quad + 1.
//
// Two D side by side, rounded to bfloat16, are an A for the next product, and nothing moves between lanes.
//
// ldmatrix fills four registers with pieces: lane 8 i + r names the address of row r of piece i, 16 bytes. TRANSPOSED deals out each piece's transpose: it
// makes a B of rows that lie in memory as the rows of B, the plain form one of rows that are B's columns.
#pragma once
#include <string.h>
#include "gpu.cuh"

#if !defined(__CUDACC__)
// The value at an even or odd column of a piece, from the register that holds it.
static inline float mma_half(uint32_t held, int column) { return __uint_as_float(held >> column % 2 * 16 << 16); }
#endif

static __device__ inline void mma_bf16(float d[4], const uint32_t a[4], const uint32_t b[2]) {
#if defined(__CUDACC__)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    struct Operands { uint32_t a[4], b[2]; } mine = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
    const EmuLanes<Operands> lanes = emu_exchange("mma", mine);
    int row = emu_lane() / 4, quad = emu_lane() % 4;
    for (int i = 0; i < 4; i++) {
        int column = 2 * quad + i % 2;
        for (int k = 0; k < 16; k++) {
            float a_k = mma_half(lanes[4 * row + k % 8 / 2].a[i / 2 + k / 8 * 2], k), b_k = mma_half(lanes[4 * column + k % 8 / 2].b[k / 8], k);
            d[i] += a_k * b_k;
        }
    }
#endif
}

// r[i]: piece i, or its transpose. row: this lane's address, 16-byte aligned.
template <bool TRANSPOSED> static __device__ inline void ldmatrix(uint32_t r[4], const __nv_bfloat16 *row) {
#if defined(__CUDACC__)
    uint32_t address = (uint32_t)__cvta_generic_to_shared(row);
    if constexpr (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
    }
#else
    const EmuLanes<const __nv_bfloat16 *> rows = emu_exchange(TRANSPOSED ? "ldmatrix.trans" : "ldmatrix", row);
    int own = emu_lane() / 4, pair = emu_lane() % 4 * 2;
    if ((uintptr_t)row % 16) emu_misaligned("ldmatrix", row, __FILE__, __LINE__);
    for (int i = 0; i < 4; i++) {
        __nv_bfloat16 two[2];
        for (int j = 0; j < 2; j++) two[j] = TRANSPOSED ? rows[8 * i + pair + j][own] : rows[8 * i + own][pair + j];
        memcpy(&r[i], two, sizeof two);
    }
#endif
}

// 16 bytes from global to shared memory, or zeros unless `present` (then nothing is read). They are there after copy_commit, a wait for that group, and, for
// other threads, a barrier; until then the place belongs to the copy.
static __device__ inline void copy_async(void *to, const void *from, bool present) {
#if defined(__CUDACC__)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"((uint32_t)__cvta_generic_to_shared(to)), "l"(__cvta_generic_to_global(from)), "r"(present ? 16 : 0) : "memory");
#else
    emu_copy(to, from, present);
#endif
}

// Closes the group of the copies begun since the last one.
static __device__ inline void copy_commit(void) {
#if defined(__CUDACC__)
    asm volatile("cp.async.commit_group;" ::: "memory");
#else
    emu_copy_commit();
#endif
}

// Waits until at most the latest GROUPS groups of this thread are under way.
template <int GROUPS> static __device__ inline void copy_wait(void) {
#if defined(__CUDACC__)
    asm volatile("cp.async.wait_group %0;" :: "n"(GROUPS) : "memory");
#else
    emu_copy_wait(GROUPS);
#endif
}
