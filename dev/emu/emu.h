// emu.h: the device language for g++ and clang++, so that a .cu file runs on a machine without a
// GPU (emu.cpp is the runtime). Force-included:
//
//   g++ -std=c++17 -x c++ -include dev/emu/emu.h -isystem /usr/local/cuda/include kernels.cu emu.o
//
// Types and API prototypes are the real toolkit's, so calls stay checked. This file has what our
// kernels use; anything else does not compile or does not link, rather than do something else.
// It is stricter than the hardware on purpose, and stops with kernel, block and thread where the
// hardware's manual says "undefined":
//   - __syncthreads: all live threads must stand at the same source line (exited ones count as
//     arrived)
//   - warp operations: all live lanes of the mask must take part, with the same operation; so must
//     a lane that a shuffle reads
//   - __activemask: the caller alone, the smallest legal answer, because code that expects more
//     relies on luck
//   - shuffles and votes order no memory: only __syncwarp, __syncthreads, __threadfence and kernel
//     boundaries do, which matters under ThreadSanitizer
// Not modelled: time, occupancy, coalescing, approximate functions, launch bounds, lazy loading.
// Functions that are PTX instructions in the core have C++ bodies in ptx.h; those of compute
// capability 9.0 in sm90.h, which llmc/sm90.cuh includes.
#pragma once
#include <functional>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <type_traits>
#include <cuda_runtime.h>
#include <cuda_bf16.h>

#undef __shared__
#define __shared__ \
    _Pragma("GCC error \"declare shared memory with SHARED or SHARED_DYNAMIC (gpu.cuh)\"")
#undef __launch_bounds__
#define __launch_bounds__(...)
#define __noinline__ __attribute__((noinline))
#undef __grid_constant__
#define __grid_constant__

// gpu.cuh's launches and shared memory. An array of SHARED has an address of its own as its key.
void emu_launch(const char *file, int line, const char *text, dim3 grid, dim3 block, size_t dynamic,
                cudaStream_t stream, std::function<void()> body);
void *emu_shared(const void *key, size_t bytes);
void *emu_shared_dynamic(void);
#define SHARED(type, name, count) \
    static char name##_key;       \
    type(&name)[count] =          \
        *static_cast<type(*)[count]>(emu_shared(&name##_key, sizeof(type) * (count)))
#define SHARED_DYNAMIC(type, name) type *name = static_cast<type *>(emu_shared_dynamic())
#define UNROLL  // g++ has no such pragma

// The fiber that runs now. These are functions of the uninstrumented runtime, so that a sanitizer
// sees the kernels alone.
const uint3 &emu_thread(void);
const uint3 &emu_block(void);
const dim3 &emu_block_size(void);
const dim3 &emu_grid_size(void);
int emu_lane(void);
void emu_barrier(const char *file, int line);
void emu_fence(void);
uint64_t emu_shuffle(const char *operation, unsigned mask, uint64_t value, int source,
                     const char *file, int line);
unsigned emu_vote(const char *operation, unsigned mask, bool value, const char *file, int line);

#define threadIdx emu_thread()
#define blockIdx emu_block()
#define blockDim emu_block_size()
#define gridDim emu_grid_size()
#define warpSize 32
// Default arguments: the place of the call.
#define EMU_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

static inline void __syncthreads(EMU_SITE) { emu_barrier(file, line); }
static inline void __syncwarp(unsigned mask = 0xffffffffu, EMU_SITE) {
    emu_vote("__syncwarp", mask, true, file, line);
}
static inline void __threadfence(void) { emu_fence(); }
static inline void __threadfence_block(void) { emu_fence(); }
static inline unsigned __activemask(void) { return 1u << emu_lane(); }
static inline unsigned __ballot_sync(unsigned mask, int p, EMU_SITE) {
    return emu_vote("__ballot_sync", mask, p != 0, file, line);
}
static inline int __any_sync(unsigned mask, int p, EMU_SITE) {
    return emu_vote("__any_sync", mask, p != 0, file, line) != 0;
}
static inline int __all_sync(unsigned mask, int p, EMU_SITE) {
    return emu_vote("__all_sync", mask, p == 0, file, line) == 0;
}

// The source lane is computed as the CUDA programming guide says (warp shuffle functions); segments
// of `width` lanes, a power of two.
template <typename T>
static inline T emu_shuffle_value(const char *operation, unsigned mask, T value, int source,
                                  const char *file, int line) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value,
                  "a shuffle moves at most 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    bits = emu_shuffle(operation, mask, bits, source, file, line);
    memcpy(&value, &bits, sizeof(T));
    return value;
}
template <typename T>
static inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMU_SITE) {
    return emu_shuffle_value("__shfl_sync", mask, value,
                             (emu_lane() & ~(width - 1)) | (source & (width - 1)), file, line);
}
template <typename T>
static inline T __shfl_xor_sync(unsigned mask, T value, int x, int width = 32, EMU_SITE) {
    int lane = emu_lane(), source = lane ^ x;
    return emu_shuffle_value("__shfl_xor_sync", mask, value,
                             source > (lane | (width - 1)) ? lane : source, file, line);
}
template <typename T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_SITE) {
    int lane = emu_lane(), source = lane + (int)delta;
    return emu_shuffle_value("__shfl_down_sync", mask, value,
                             source > (lane | (width - 1)) ? lane : source, file, line);
}
template <typename T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_SITE) {
    int lane = emu_lane(), source = lane - (int)delta;
    return emu_shuffle_value("__shfl_up_sync", mask, value,
                             source < (lane & ~(width - 1)) ? lane : source, file, line);
}

// Atomics are relaxed, as on the device: they order nothing else.
static inline int atomicAdd(int *p, int v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
static inline unsigned atomicAdd(unsigned *p, unsigned v) {
    return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}
static inline unsigned long long atomicAdd(unsigned long long *p, unsigned long long v) {
    return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}
static inline int atomicOr(int *p, int v) { return __atomic_fetch_or(p, v, __ATOMIC_RELAXED); }
static inline unsigned atomicOr(unsigned *p, unsigned v) {
    return __atomic_fetch_or(p, v, __ATOMIC_RELAXED);
}
static inline int atomicCAS(int *p, int expected, int v) {
    __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}
static inline int atomicMax(int *p, int v) {
    int old = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (old < v &&
           !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return old;
}
static inline float atomicAdd(float *p, float v) {
    uint32_t *bits = reinterpret_cast<uint32_t *>(p), sum;
    uint32_t old = __atomic_load_n(bits, __ATOMIC_RELAXED);
    float f;
    do {
        memcpy(&f, &old, 4);
        float s = f + v;
        memcpy(&sum, &s, 4);
    } while (
        !__atomic_compare_exchange_n(bits, &old, sum, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return f;
}

// Loads and stores with a cache hint.
template <typename T> static inline T __ldg(const T *p) { return *p; }
template <typename T> static inline T __ldcs(const T *p) { return *p; }
template <typename T> static inline T __ldcg(const T *p) { return *p; }
template <typename T> static inline void __stcs(T *p, T v) { *p = v; }
template <typename T> static inline void __stcg(T *p, T v) { *p = v; }
template <typename T> static inline void __stwb(T *p, T v) { *p = v; }

// Arithmetic that the C library does not name; the fast forms are the exact ones here (glibc
// declares the first two for itself, hence macros).
#define __expf expf
#define __logf logf
template <typename T> static inline T min(T a, T b) { return b < a ? b : a; }
template <typename T> static inline T max(T a, T b) { return a < b ? b : a; }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
template <typename To, typename From> static inline To emu_bits(From v) {
    To r;
    static_assert(sizeof r == sizeof v, "");
    memcpy(&r, &v, sizeof r);
    return r;
}
static inline unsigned __float_as_uint(float x) { return emu_bits<unsigned>(x); }
static inline int __float_as_int(float x) { return emu_bits<int>(x); }
static inline float __uint_as_float(unsigned x) { return emu_bits<float>(x); }
static inline float __int_as_float(int x) { return emu_bits<float>(x); }

#include "ptx.h"
