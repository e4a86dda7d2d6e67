// mma.cuh: the PTX instructions under attention and experts, one small device function each: matrix
// products on tensor cores (mma), loads for them (ldmatrix), and asynchronous copies (cp.async).
// For bfloat16 and compute capability 8.0 or later. The emulator has its own (dev/emu/ptx.h).
//
// mma_bf16 multiplies matrices that are spread over the registers of a warp:
// D (16 x 8, float) += A (16 x 16) B (16 x 8). They are made of pieces of 8 x 8. Lane
// 4 * row + quad, with row = 0..7 and quad = 0..3, holds two neighbours of each piece. A register
// holds two bfloat16, the first in its low half:
//
//     a piece:    column 0, 1     2, 3     4, 5     6, 7       A:  a[0] a[2]    D:  d[0], d[1]
//        row 0      lane  0   lane  1  lane  2  lane  3            a[1] a[3]        d[2], d[3]
//        row 1      lane  4   lane  5  lane  6  lane  7
//         ...                                                  B:  b[0]
//        row 7      lane 28   lane 29  lane 30  lane 31            b[1]
//
// The pieces of B are transposed: `row` is the column of B, and the two neighbours lie one below
// the other. So b[0] holds B's rows 2 quad and 2 quad + 1.
//
// Two D side by side, rounded to bfloat16, are an A of the next product: no value changes lanes.
//
// ldmatrix fills four registers with pieces: lane 8 i + r gives the address of row r of piece i, 16
// bytes. TRANSPOSED loads the transpose of each piece. A B whose rows are rows in memory needs
// TRANSPOSED; a B whose columns are rows in memory needs the plain form.
#pragma once
#include "gpu.cuh"

#if defined(__CUDACC__)
__device__ inline uint32_t shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

// volatile keeps the place of instructions that a whole warp executes together.
__device__ inline void mma_bf16(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// r[i] = piece i, or its transpose. row: this lane's address, 16-byte aligned.
template <bool TRANSPOSED> __device__ void ldmatrix(uint32_t r[4], const __nv_bfloat16 *row) {
    uint32_t address = shared_address(row);
    if constexpr (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address) : "memory");
    }
}

// Starts a copy of 16 bytes from global to shared memory; unless `present` it writes zeros and
// reads nothing. The thread sees the bytes after copy_commit and a copy_wait for that group, other
// threads after a barrier that follows. Until then nobody may touch the destination.
__device__ inline void copy_async(void *to, const void *from, bool present) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(shared_address(to)), "l"(__cvta_generic_to_global(from)),
                    "r"(present ? 16 : 0) : "memory");
}

// Puts the copies started since the last copy_commit into one group.
__device__ inline void copy_commit(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the latest GROUPS groups of this thread are complete.
template <int GROUPS> __device__ void copy_wait(void) {
    asm volatile("cp.async.wait_group %0;" :: "n"(GROUPS) : "memory");
}
#endif
