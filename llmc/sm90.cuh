// sm90.cuh: the PTX instructions that only compute capability 9.0 has, one small device function
// each: products of a warpgroup (wgmma), copies of tiles by the tensor memory accelerator (TMA),
// barriers that count bytes (mbarrier), and registers that move between warpgroups. For bfloat16,
// by nvcc -arch=sm_90a. The emulator has its own (dev/emu/sm90.h); dev/ptx executes them as nvcc
// wrote them. Semantics: NVIDIA's "PTX ISA", "Asynchronous Warpgroup Level Matrix Instructions",
// "cp.async.bulk.tensor" and "mbarrier".
//
// wgmma multiplies D (64 x N, float) += A (64 x 16) B (16 x N). A warpgroup is four warps, numbered
// from a multiple of four on. Warp w of it has rows 16 w to 16 w + 15 of D, in pieces as
// mma.cuh draws them: column 8 n + 2 quad + j of row 16 w + 8 i + lane / 4 is d[4 n + 2 i + j]. An
// A in registers is an A of mma.sync. Operands in shared memory are described by 64 bits
// (tile_descriptor). The product runs in the background: from wgmma_fence, which every thread calls
// when its registers are ready, to wgmma_wait nobody may touch D, A or the tiles. The compiler does
// not know that; settle(D) and settle(A) before the fence and settle(D) after the wait tell it.
//
// A tile of 64 columns has rows of 128 bytes, one behind the other, and begins at a multiple of
// 1024 bytes. TMA and wgmma see it with a swizzle of 128 bytes: the i-th 16 bytes of row r lie
// at place i ^ r % 8, so that the same columns of 8 rows lie in different banks. A wider matrix is
// several tiles, one behind the other.
//
// Loads and stores reach shared memory by the generic proxy, TMA and wgmma by the asynchronous one.
// After stores, fence_async makes them visible to TMA and wgmma; then follows a barrier. A load by
// TMA is visible to whoever has waited for its mbarrier.
#pragma once
#include <cuda.h>
#include "mma.cuh"

enum { WARPGROUP = 128, GROUP_ROWS = 64 };  // threads; rows of their D
enum { TILE_WIDTH = 64, TILE_ROW = TILE_WIDTH * 2, TILE_ALIGN = 1024 };  // columns; bytes
enum { STEP_BYTES = 32 };                   // of 16 columns
enum Major { MAJOR_K, MAJOR_MN };  // rows of a tile run along the depth K, or along M or N

// Whether the code that is being compiled may have these instructions: kernels have empty bodies
// for other GPUs. (The host's pass, which is for no GPU, keeps the bodies.)
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define SM90_CODE 1
#else
#define SM90_CODE 0
#endif

// SHARED_TILES(name): dynamic shared memory for tiles and barriers. A kernel with it has no other
// shared arrays, so that it begins at a multiple of TILE_ALIGN.
#if defined(__CUDACC__)
#define SHARED_TILES(name) extern __shared__ __align__(TILE_ALIGN) unsigned char name[]
#else
#include "../dev/emu/sm90.h"
#endif

// Describes a matrix in shared memory to wgmma. The tile begins at `tile` and has the swizzle of
// 128 bytes; from 8 of its rows to the next 8 there are 1024 bytes.
//   MAJOR_K    rows of the tile are rows of A or columns of B. 16 columns on in the depth, `tile`
//              is 32 bytes further.
//   MAJOR_MN   rows of the tile are the depth; from 64 columns to the next 64 there are `lead`
//              bytes. 16 rows on in the depth, `tile` is 2048 bytes further.
__device__ inline uint64_t tile_descriptor(const void *tile, int lead = 16) {
    return (uint64_t)(shared_address(tile) >> 4) | (uint64_t)(lead >> 4) << 16 |
           (uint64_t)(8 * TILE_ROW >> 4) << 32 | 1ull << 62;
}

// The number of this warpgroup in the block. The shuffle tells the compiler that all lanes agree.
__device__ inline int warpgroup_index(void) {
    return __shfl_sync(0xffffffffu, (int)threadIdx.x / WARPGROUP, 0);
}

// The first of this lane's rows among the 64 of its warpgroup. The second is 8 further.
__device__ inline int group_row(void) {
    return threadIdx.x % WARPGROUP / WARP * 16 + threadIdx.x % WARP / 4;
}

// The address of this element in a tile, whose rows have 64.
__device__ inline __nv_bfloat16 *tile_at(void *tile, int row, int column) {
    int place = (column / 8 ^ row % 8) * 8 + column % 8;
    return static_cast<__nv_bfloat16 *>(tile) + row * TILE_WIDTH + place;
}

// A place in a ring of stages, and the parity of its barriers' phase in this round.
template <int STAGES> struct Ring {
    int stage, parity;
    __device__ void next(void) {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// ------------------------------------------------------------------------------------- tensor maps

// A tensor in global memory as TMA sees it: bfloat16 [size[3], size[2], size[1], size[0]], of which
// dimension i + 1 has a stride of stride[i] elements. A copy moves a box[3] x box[2] x box[1] x
// box[0] of it, box[0] being at most 64. Elements outside of the tensor are loaded as zeros, and
// not stored.
struct TensorBox {
    const void *at;
    int64_t size[4], stride[3];
    int box[4];
};

// Kernels take the map as a `const __grid_constant__ CUtensorMap` parameter. The type comes with
// CUDA 12, whose drivers all have this function; gpu_find refuses older drivers.
static inline CUtensorMap tensor_map(const TensorBox &t) {
    decltype(&cuTensorMapEncodeTiled) encode = nullptr;
    CUtensorMap map;
#if CUDART_VERSION >= 12050
    cudaCheck(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void **)&encode, 12000,
                                               cudaEnableDefault));
#else
    cudaCheck(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", (void **)&encode,
                                      cudaEnableDefault));
#endif
    cuuint64_t size[4], stride[3];
    cuuint32_t box[4], steps[4] = {1, 1, 1, 1};
    for (int i = 0; i < 4; i++) size[i] = t.size[i], box[i] = t.box[i];
    for (int i = 0; i < 3; i++) stride[i] = t.stride[i] * sizeof(__nv_bfloat16);
    CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, (void *)t.at, size, stride,
                             box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    CHECK(result == CUDA_SUCCESS,
          "the driver refused a tensor map, error %d: [%lld, %lld, %lld, %lld] in boxes of "
          "[%d, %d, %d, %d]\n  -> --kernels mma; please report it with the command line",
          (int)result, (long long)t.size[3], (long long)t.size[2], (long long)t.size[1],
          (long long)t.size[0], t.box[3], t.box[2], t.box[1], t.box[0]);
    return map;
}

#if defined(__CUDACC__)
// --------------------------------------------------------------------------------------- barriers

// An mbarrier for `arrivals` and for the bytes of copies. Its phases have parity 0, 1, 0, ...
__device__ inline void mbarrier_init(uint64_t *barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                 :: "r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes new barriers known to TMA. The other threads know them after __syncthreads.
__device__ inline void mbarrier_init_fence(void) {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void mbarrier_arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
                 :: "r"(shared_address(barrier)) : "memory");
}

// Arrives, and adds `bytes` to those that the phase waits for.
__device__ inline void mbarrier_expect(uint64_t *barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Waits until the phase of this parity is complete. Right after mbarrier_init the phase before the
// first, of parity 1, counts as complete.
__device__ inline void mbarrier_wait(uint64_t *barrier, int parity) {
    uint32_t complete;
    do {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
                     "selp.u32 %0, 1, 0, p;}"
                     : "=r"(complete) : "r"(shared_address(barrier)), "r"(parity) : "memory");
    } while (!complete);
}

// A barrier of `threads` threads, whole warps of the block. Number 0 is that of __syncthreads.
__device__ inline void named_sync(int number, int threads) {
    asm volatile("bar.sync %0, %1;" :: "r"(number), "r"(threads) : "memory");
}

// Arrives there, without waiting.
__device__ inline void named_arrive(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" :: "r"(number), "r"(threads) : "memory");
}

// What this thread wrote to shared memory will be visible to TMA and wgmma, after a barrier.
__device__ inline void fence_async(void) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// -------------------------------------------------------------------------------------------- TMA

// One thread copies the box that begins at these elements to a tile; its bytes count at the
// barrier.
__device__ inline void tma_load(void *tile, const CUtensorMap *map, uint64_t *barrier, int x0,
                                int x1, int x2, int x3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];"
                 :: "r"(shared_address(tile)), "l"(map), "r"(shared_address(barrier)), "r"(x0),
                    "r"(x1), "r"(x2), "r"(x3) : "memory");
}

// One thread copies a tile to the box that begins at these elements.
__device__ inline void tma_store(const CUtensorMap *map, const void *tile, int x0, int x1, int x2,
                                 int x3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group "
                 "[%0, {%2, %3, %4, %5}], [%1];"
                 :: "l"(map), "r"(shared_address(tile)), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
                 : "memory");
}

// Puts the stores since the last tma_commit into one group.
__device__ inline void tma_commit(void) {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until this thread's stores have read their tiles; the end of the kernel waits for the rest.
__device__ inline void tma_wait_read(void) {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// ------------------------------------------------------------------------------------------ wgmma

// The registers have their values here. Costs no instruction.
template <int COUNT> __device__ void settle(float (&x)[COUNT]) {
    UNROLL for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(x[i]) :: "memory");
}
template <int COUNT> __device__ void settle(uint32_t (&x)[COUNT]) {
    UNROLL for (int i = 0; i < COUNT; i++) asm volatile("" : "+r"(x[i]) :: "memory");
}

// Before the first wgmma, and again when D or A have been touched in registers.
__device__ inline void wgmma_fence(void) { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Puts the products since the last wgmma_commit into one group.
__device__ inline void wgmma_commit(void) {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until all but the latest GROUPS groups are complete.
template <int GROUPS> __device__ void wgmma_wait(void) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(GROUPS) : "memory");
}

// The registers of D, as text and as operands.
#define D_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
             "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define D_48 D_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define D_64 D_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define D_128 D_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, " \
    "%79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, " \
    "%97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
    "%127"
#define TO_8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), \
                "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define TO_32 TO_8(0), TO_8(8), TO_8(16), TO_8(24)
#define TO_48 TO_32, TO_8(32), TO_8(40)
#define TO_64 TO_48, TO_8(48), TO_8(56)
#define TO_128 TO_64, TO_8(64), TO_8(72), TO_8(80), TO_8(88), TO_8(96), TO_8(104), TO_8(112), \
               TO_8(120)

// D += A B, or D = A B unless `add`, for an N of twice COUNT. A is a descriptor or four registers,
// b a descriptor. P0 to P6 are the numbers of the operands after D.
#define WGMMA(COUNT, N, P0, P1, P2, P3, P4, P5, P6) \
    template <Major A, Major B> \
    __device__ void wgmma(float (&d)[COUNT], uint64_t a, uint64_t b, bool add) { \
        asm volatile("{.reg .pred p; setp.ne.b32 p, %" P2 ", 0; " \
                     "wgmma.mma_async.sync.aligned.m64n" N "k16.f32.bf16.bf16 {" D_##COUNT "}, " \
                     "%" P0 ", %" P1 ", p, 1, 1, %" P3 ", %" P4 ";}" \
                     : TO_##COUNT : "l"(a), "l"(b), "r"((int)add), "n"((int)A), "n"((int)B)); \
    } \
    template <Major B> \
    __device__ void wgmma(float (&d)[COUNT], const uint32_t (&a)[4], uint64_t b, bool add) { \
        asm volatile("{.reg .pred p; setp.ne.b32 p, %" P5 ", 0; " \
                     "wgmma.mma_async.sync.aligned.m64n" N "k16.f32.bf16.bf16 {" D_##COUNT "}, " \
                     "{%" P0 ", %" P1 ", %" P2 ", %" P3 "}, %" P4 ", p, 1, 1, %" P6 ";}" \
                     : TO_##COUNT : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), \
                       "r"((int)add), "n"((int)B)); \
    }
WGMMA(32, "64", "32", "33", "34", "35", "36", "37", "38")
WGMMA(48, "96", "48", "49", "50", "51", "52", "53", "54")
WGMMA(64, "128", "64", "65", "66", "67", "68", "69", "70")
WGMMA(128, "256", "128", "129", "130", "131", "132", "133", "134")

// -------------------------------------------------------------------------------------- registers

// All warps of a warpgroup give registers back, down to COUNT a thread, or take some, up to COUNT,
// as soon as others have given them. COUNT: 24 to 256, a multiple of 8; ptxas refuses another.
template <int COUNT> __device__ void registers_give(void) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COUNT));
}
template <int COUNT> __device__ void registers_take(void) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COUNT));
}
#endif

// ------------------------------------------------------------------------------------------- rings

// Barriers of a ring of stages: which is full, and which is empty again.
struct RingBarriers { uint64_t *full, *empty; };

// fillers: arrivals that fill a stage. One lane of each consumer warp empties it.
template <int STAGES> __device__ void ring_init(RingBarriers r, int fillers) {
    int warps = (blockDim.x - WARPGROUP) / WARP;
    for (int i = 0; i < STAGES; i++) {
        mbarrier_init(r.full + i, fillers);
        mbarrier_init(r.empty + i, warps);
    }
}

// This warp is done with a stage.
template <int STAGES> __device__ void stage_release(RingBarriers r, Ring<STAGES> at) {
    if (threadIdx.x % WARP == 0) mbarrier_arrive(r.empty + at.stage);
}
