// gpu.cuh: the basis of every CUDA file. Kernel launches, shared memory, error checks, the storage
// type, 16-byte loads and stores, sums over warps and blocks, and the context of launchers.
//
//   LAUNCH(kernel, grid, block, dynamic_shared_bytes, stream, arguments...)
//                                  the kernel may be a template: LAUNCH(copy_kernel<float, 4>, ...)
//   SHARED(type, name, count);     a static shared array: sizeof(name) is its size in bytes
//   SHARED_DYNAMIC(type, name);    a pointer to the dynamic_shared_bytes of the launch
//
// Arguments are converted to the kernel's parameter types as in any call; an empty pointer is
// nullptr (0 and NULL are integers here). Both kinds of shared arrays are 16-byte aligned.
// A launch that the device refuses ends the program with the launch's text, file and line.
//
// nvcc compiles these files for GPUs. A C++ compiler compiles the same files for the emulator,
// which defines SHARED, SHARED_DYNAMIC, UNROLL and the functions in PTX itself (dev/emu/emu.h).
//
// Computed floor, in head comments: the least time on an H200 for the bytes that a layer moves or
// for its products, whichever is longer. Memory counts 4.3 TB/s, 0.9 of the datasheet's 4.8;
// products in bf16 790 TFLOP/s, 0.8 of the datasheet's 989 (dev/bench/gpu/layers.py: other GPUs).
//
// REAL is the storage type of weights and activations, `real` below: float or __nv_bfloat16
// (PREC=fp32, bf16). Arithmetic is always in float. Statistics, parameter gradients, moments and
// master weights are stored as float, `wide` below.
#pragma once
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <float.h>
#include <type_traits>
#include "run/util.h"

#define LAUNCH(...) launch_kernel(__FILE__, __LINE__, #__VA_ARGS__, __VA_ARGS__)
#define cudaCheck(call) cuda_check(call, #call, __FILE__, __LINE__)

#if defined(__CUDACC__)
#define SHARED(type, name, count) __shared__ __align__(16) type name[count]
#define SHARED_DYNAMIC(type, name) \
    extern __shared__ __align__(16) unsigned char shared_dynamic[]; \
    type *name = reinterpret_cast<type *>(shared_dynamic)
// UNROLL for (...): an array stays in registers only if all its indices are constants.
#define UNROLL _Pragma("unroll")
#endif

// Errors of a kernel that ran before: an illegal address, a timeout, or one of the codes 714 to 719
// (stack, instruction, misaligned address, address space, program counter, any other failure).
// Every later call returns the same error, launches included, so the call that reports it is not
// the one that failed.
static inline bool kernel_failed(cudaError_t error) {
    return error == cudaErrorIllegalAddress || error == cudaErrorLaunchTimeout ||
           (error >= cudaErrorHardwareStackError && error <= cudaErrorLaunchFailure);
}

static inline void cuda_check(cudaError_t error, const char *call, const char *file, int line) {
    const char *what = cudaGetErrorString(error);
    if (kernel_failed(error))
        check_failed(EXIT_REFUSED, file, line,
                     "CUDA: a kernel launched before failed: %s; found by %s\n"
                     "  -> CUDA_LAUNCH_BLOCKING=1 ends there, compute-sanitizer names its line",
                     what, call);
    if (error != cudaSuccess)
        check_failed(EXIT_REFUSED, file, line,
                     "CUDA: %s: %s\n  -> nvidia-smi shows whether the GPU is well and free",
                     call, what);
}

// Ends the program with a report of a refused launch.
static inline void launch_failed(const char *file, int line, const char *text, cudaError_t error,
                                 dim3 grid, dim3 block, size_t dynamic) {
    check_failed(EXIT_REFUSED, file, line,
                 "a launch was refused: %s: LAUNCH(%s) with grid (%u, %u, %u), block (%u, %u, %u), "
                 "%zu bytes of dynamic shared memory\n"
                 "  -> at most 1024 threads a block, no more shared memory than this GPU has, no "
                 "empty grid, at most 65535 blocks along y and z",
                 cudaGetErrorString(error), text, grid.x, grid.y, grid.z, block.x, block.y, block.z,
                 dynamic);
}

template <typename... P, typename... A>
static void launch_kernel(const char *file, int line, const char *text, void (*kernel)(P...),
                          dim3 grid, dim3 block, size_t dynamic, cudaStream_t stream,
                          A... arguments) {
    static_assert(sizeof...(P) == sizeof...(A),
                  "LAUNCH: the kernel takes another number of arguments");
#if defined(__CUDACC__)
    // Up to 48 KiB need no permission. Static arrays count too: next to dynamic ones they are less
    // than 2 KiB.
    if (dynamic > 46 << 10)
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)dynamic);
    kernel<<<grid, block, dynamic, stream>>>(arguments...);
#else
    emu_launch(file, line, text, grid, block, dynamic, stream, [=] { kernel(arguments...); });
#endif
    cudaError_t error = cudaGetLastError();
    if (kernel_failed(error)) cuda_check(error, text, file, line);
    if (error != cudaSuccess) launch_failed(file, line, text, error, grid, block, dynamic);
}

// ------------------------------------------------------------------------------------------ types

typedef REAL Real;
#define real Real
#define wide float

enum { WARP = 32, PACK = 16 / sizeof(real) };  // PACK: values in 16 bytes, loaded at once
enum { SET, ADD };  // how a kernel writes a result: over what is there, or added to it

// Stores a T of 8 or 16 bytes to global memory in one access. nvcc may split a copy of bfloat16, or
// a memcpy from memory, into accesses of 4, 2 or 1 bytes (make arch-check looks).
template <typename T> __device__ void words_store(void *p, const T &x) {
    std::conditional_t<sizeof(T) == 16, uint4, uint2> words;
    memcpy(&words, &x, sizeof words);
    __stwb(static_cast<decltype(words) *>(p), words);
}

// 16 bytes of the storage type, in bf16 half the registers of Floats. Rows of all matrices begin at
// multiples of 16 bytes (refuse_model in train_gpt.cu refuses other sizes).
struct alignas(16) Pack {
    uint32_t v[4];
};
__device__ inline Pack pack_load(const real *p) {
    uint4 words = *reinterpret_cast<const uint4 *>(p);
    Pack x;
    memcpy(&x, &words, sizeof x);
    return x;
}
__device__ inline void pack_store(real *p, const Pack &x) { words_store(p, x); }

// A pack as floats, to compute with: sums, products and multiples by element. Loops over a pack
// have a constant length, so they unroll and the values stay in registers.
struct alignas(16) Floats {
    float v[PACK];
};
__device__ inline Floats operator+(Floats x, const Floats &y) {
    for (int k = 0; k < PACK; k++) x.v[k] += y.v[k];
    return x;
}
__device__ inline Floats operator*(Floats x, const Floats &y) {
    for (int k = 0; k < PACK; k++) x.v[k] *= y.v[k];
    return x;
}
__device__ inline Floats operator*(float a, Floats x) {
    for (int k = 0; k < PACK; k++) x.v[k] *= a;
    return x;
}

// The sums of a pack's columns in a row of floats, to be copied as a whole: 16 bytes at a time.
__device__ inline Floats *sums_at(wide *rows, int64_t row, int width, int column) {
    return reinterpret_cast<Floats *>(rows + row * width + column);
}

// Four neighbours in an array of floats, also 16 bytes.
enum { FOUR = 4 };
struct alignas(16) Four {
    float v[FOUR];
};

// Heads inside wider rows: at[i * ld + h * head] is the first element of head h of row i.
struct Heads {
    real *at;
    int ld, head;
};

template <typename T> __host__ __device__ float to_float(T x) { return float(x); }
// Rounds to nearest, ties to even.
__host__ __device__ inline real to_real(float x) { return real(x); }

__device__ inline Floats pack_floats(const Pack &x) {
    Floats y;
    real own[PACK];
    memcpy((void *)own, &x, sizeof own);
    for (int k = 0; k < PACK; k++) y.v[k] = to_float(own[k]);
    return y;
}

// Rounds two values at a time: bf16 has an instruction for pairs.
__device__ inline Pack pack_round(const Floats &x) {
    Pack y;
    for (int k = 0; k < PACK; k += 2) {
        if constexpr (sizeof(real) == sizeof(float)) memcpy(&y.v[k], &x.v[k], 8);
        else {
            __nv_bfloat162 two = __floats2bfloat162_rn(x.v[k], x.v[k + 1]);
            memcpy(&y.v[k / 2], &two, 4);
        }
    }
    return y;
}

// 16 bytes of memory to floats, and back; stores are to global memory.
__device__ inline Floats floats_load(const real *p) { return pack_floats(pack_load(p)); }
__device__ inline void floats_store(real *p, const Floats &x) { pack_store(p, pack_round(x)); }

#if defined(__CUDACC__)
// 2^x, correct to two units in the last place; 0 for -infinity.
__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

// ------------------------------------------------------------------------------------------- sums

// Reductions over groups of neighbouring lanes, by default the whole warp. All lanes of the warp
// take part, and every lane gets the result of its group; the order is fixed.
template <typename T, typename Combine>
__device__ T warp_all(T x, Combine combine, int lanes = WARP) {
    for (int apart = lanes / 2; apart > 0; apart /= 2)
        x = combine(x, __shfl_xor_sync(0xffffffffu, x, apart));
    return x;
}
template <typename T> __device__ T warp_sum(T x, int lanes = WARP) {
    return warp_all(x, [](T a, T b) { return a + b; }, lanes);
}
__device__ inline float warp_max(float x, int lanes = WARP) {
    return warp_all(x, [](float a, float b) { return fmaxf(a, b); }, lanes);
}

// Reductions over a block of whole warps. Every thread gets the result; the order is fixed.
// May be called in a loop: the two barriers keep the rounds apart.
template <typename T, typename Warp> __device__ T block_all(T x, T none, Warp over_warp) {
    SHARED(T, partial, WARP);
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    x = over_warp(x);
    __syncthreads();
    if (lane == 0) partial[warp] = x;
    __syncthreads();
    return over_warp(lane < warps ? partial[lane] : none);
}
template <typename T> __device__ T block_sum(T x) {
    return block_all(x, T(0), [](T y) { return warp_sum(y); });
}
__device__ inline float block_max(float x) {
    return block_all(x, -FLT_MAX, [](float y) { return warp_max(y); });
}

// In double, which no square of a float overflows.
__device__ inline double square(float x) { return (double)x * x; }

// One block adds up partial sums, so there is one order.
enum { SUMS_THREADS = 512 };

// `count` threads rounded up to whole warps, at most `limit`.
static inline int threads_for(int64_t count, int limit) {
    return count < limit ? (int)CEIL_DIV(count, WARP) * WARP : limit;
}

// ------------------------------------------------------------------------------------------- rows
// Kernels over n rows with the grid (row, part of the row): a block has a row and a part of it, a
// thread 16 bytes of the part.

enum { ROW_THREADS = 128 };

static inline dim3 row_grid(int64_t n, int width) {
    return dim3(n, CEIL_DIV(width / PACK, ROW_THREADS));
}

// The column of this thread's 16 bytes; the width of the row or more past its end.
__device__ inline int row_column(void) {
    return (blockIdx.y * blockDim.x + threadIdx.x) * PACK;
}

// The index of this thread in a grid along x, and the number of threads.
__device__ inline int64_t grid_thread(void) {
    return (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
}
__device__ inline int64_t grid_threads(void) { return (int64_t)gridDim.x * blockDim.x; }

// ---------------------------------------------------------------------------------------- context

// The context that launchers share.
struct Gpu {
    cudaStream_t stream;
    int capability;            // compute capability, 90 for 9.0
    int processors;            // multiprocessors
    size_t l2_bytes;           // of the L2 cache
    size_t shared_bytes;       // of shared memory that a block may have
    float *scratch;            // partial sums between two kernels of one launcher, in stream order
    size_t scratch_size;       // in floats
    struct Plans *plans;       // of matrix products (linear.cuh)
};

// Scratch for `count` values of T. train_gpt.cu allocates enough for all launchers.
template <typename T> static T *scratch_for(size_t count, const Gpu *gpu) {
    CHECK(count * sizeof(T) <= gpu->scratch_size * sizeof(float),
          "expected %zu bytes of scratch, found %zu\n  -> a bug: report it with the command line",
          count * sizeof(T), gpu->scratch_size * sizeof(float));
    return (T *)gpu->scratch;
}

// ------------------------------------------------------------------------------------- the device

// gpu_open asks for this kernel's code: a program that was built for other GPUs has none for this
// one.
static __global__ void probe_kernel(void) {}

// Checks that there is a driver, that it is as new as the toolkit, and that it sees a GPU.
// Returns the number of GPUs.
static inline int gpu_find(void) {
    int count = 0, driver = 0, toolkit = 0;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    cudaError_t found = cudaGetDeviceCount(&count);
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&toolkit);
    CHECK(driver > 0, "expected an NVIDIA driver, found none\n"
          "  -> install it (nvidia-smi then lists the GPUs), "
          "or use the CPU: make train_gpt DEVICE=cpu");
    CHECK(found != cudaErrorInsufficientDriver,
          "expected a driver for CUDA %d.%d or later, found one for CUDA %d.%d\n"
          "  -> update the driver, or build with its toolkit: make train_gpt NVCC=...",
          toolkit / 1000, toolkit % 1000 / 10, driver / 1000, driver % 1000 / 10);
    CHECK(found != cudaErrorNoDevice,
          "expected an NVIDIA GPU, found none%s%s\n"
          "  -> nvidia-smi lists those there are; without one: make train_gpt DEVICE=cpu",
          visible ? "; CUDA_VISIBLE_DEVICES=" : "", visible ? visible : "");
    cudaCheck(found);
    return count;
}

// Opens GPU number `local` of those that CUDA_VISIBLE_DEVICES leaves, or the only one. Refuses a
// GPU that the program cannot use, with the reason. The caller sets scratch and plans.
static inline void gpu_open(Gpu *gpu, int local) {
    cudaDeviceProp device;
    cudaFuncAttributes probe;
    int count = gpu_find();
    memset(gpu, 0, sizeof *gpu);
    CHECK(count == 1 || local < count,
          "process %d of this machine (counted from 0) has no GPU of its own: there are %d here\n"
          "  -> at most %d processes on this machine", local, count, count);
    int id = count == 1 ? 0 : local;
    cudaCheck(cudaSetDevice(id));
    cudaCheck(cudaGetDeviceProperties(&device, id));
    CHECK(device.major >= 8,
          "expected a GPU of compute capability 8.0 (A100, RTX 30) or later, found %s with %d.%d\n"
          "  -> CUDA_VISIBLE_DEVICES=... chooses another; without one: make train_gpt DEVICE=cpu",
          device.name, device.major, device.minor);
    cudaError_t loaded = cudaFuncGetAttributes(&probe, (const void *)probe_kernel);
    CHECK(loaded != cudaErrorNoKernelImageForDevice && loaded != cudaErrorInvalidDeviceFunction,
          "this program was not built for %s, compute capability %d.%d\n"
          "  -> make train_gpt ARCH=%d%d%s",
          device.name, device.major, device.minor, device.major, device.minor,
          device.major == 9 ? "a" : "");
    cudaCheck(loaded);
    cudaCheck(cudaStreamCreateWithFlags(&gpu->stream, cudaStreamNonBlocking));
    gpu->capability = 10 * device.major + device.minor;
    gpu->processors = device.multiProcessorCount;
    gpu->l2_bytes = device.l2CacheSize;
    gpu->shared_bytes = device.sharedMemPerBlockOptin;
}

static inline void gpu_close(Gpu *gpu) {
    cudaCheck(cudaStreamDestroy(gpu->stream));
    memset(gpu, 0, sizeof *gpu);
}
