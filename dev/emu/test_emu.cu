// test_emu.cu: what the emulator runs right, and the bugs it must report. Also compiled by nvcc
// (test.sh), which proves that both compilers take the file.
//
//   test_emu CASE      a correct case prints nothing and exits with 0, whatever EMU_SEED; a planted
//                      bug stops, or gives a wrong result (status 1)
#include <stdio.h>
#include <string.h>
#include <functional>
#include <vector>
#include <cuda_bf16.h>
#include "../../llmc/mma.cuh"

#define EXPECT(cond) \
    CHECK(cond, "wrong result: expected %s\n  -> EMU_SEED repeats this order", #cond)
enum Bug {
    NONE, NO_BARRIER, NO_LOOP_BARRIER, NO_SYNCWARP, DIVERGENT, EXIT_DIVERGENT, SHARED_OUT,
    DYNAMIC_OUT, GLOBAL_OUT, HALF_WARP, UNSET_SHARED, WRONG_MASK, MIXED_WARP, ACTIVE_MASK,
    NOT_IN_MASK, NO_EVENT, PINNED_REUSE, BLOCK_RACE, DEEP_STACK, GRAPH_REUSE, NO_COPY_WAIT,
    LATE_COPY_WAIT, NO_COMMIT, NO_COPY_BARRIER, EARLY_COPY, HALF_MMA, MATRIX_OUT, COPY_OUT,
    MISALIGNED
};

// ----------------------------------------- kernels, right for NONE and broken on purpose otherwise
// The sum over the block in every thread; called more than once in a kernel, hence the last
// barrier.
template <Bug BUG> __device__ static float block_sum(float x) {
    SHARED(float, partial, 32);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = CEIL_DIV(blockDim.x, 32);
    x = warp_sum(x);
    if (BUG == UNSET_SHARED && lane == 0) partial[warp] += x;
    else if (lane == 0) partial[warp] = x;
    if (BUG != NO_BARRIER) __syncthreads();
    x = warp_sum(lane < warps ? partial[lane] : 0.0f);
    if (BUG != NO_LOOP_BARRIER) __syncthreads();
    return x;
}

// Row sums: one block a row, several sums in a row's loop.
template <Bug BUG> __global__ void __launch_bounds__(1024)
    rows_kernel(float *out, const float *in, size_t columns, int repeat) {
    if (BUG == HALF_WARP && threadIdx.x % 32 >= 16) return;
    float x = 0, sum = 0;
    size_t limit = BUG == GLOBAL_OUT ? columns + 1 : columns;
    for (size_t i = threadIdx.x; i < limit; i += blockDim.x)
        x += __ldg(in + blockIdx.x * columns + i);
    for (int r = 0; r < repeat; r++) sum += block_sum<BUG>(x * (float)(r + 1));
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

// out[c][r] = in[r][c] over tiles of 32 x 32 with 8 rows of threads.
template <Bug BUG>
__global__ void transpose_kernel(float *out, const float *in, int rows, int columns) {
    typedef float Row[33];
    SHARED(Row, tile, 32);
    int c = blockIdx.x * 32 + threadIdx.x, r = blockIdx.y * 32 + threadIdx.y;
    for (int j = 0; j < 32; j += 8)
        if (r + j < rows && c < columns)
            tile[threadIdx.y + j][threadIdx.x] = in[(r + j) * columns + c];
    float *flat = &tile[0][0];
    if (BUG == SHARED_OUT && threadIdx.y == 7) flat[32 * 33] = 0;
    if (BUG != NO_BARRIER) __syncthreads();
    c = blockIdx.y * 32 + threadIdx.x, r = blockIdx.x * 32 + threadIdx.y;
    for (int j = 0; j < 32; j += 8)
        if (r + j < columns && c < rows)
            out[(r + j) * rows + c] = tile[threadIdx.x][threadIdx.y + j];
}

// Grid-stride scaled copy, four bfloat16 at a time.
struct __align__(8) FourHalves { __nv_bfloat16 v[4]; };
__global__ void scale_kernel(FourHalves *out, const FourHalves *in, __nv_bfloat16 scale, size_t n) {
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        FourHalves f = in[i];
        for (int k = 0; k < 4; k++)
            f.v[k] = __float2bfloat16(__bfloat162float(f.v[k]) * __bfloat162float(scale));
        out[i] = f;
    }
}

// Reverses a block's elements through dynamic shared memory, odd sizes included; threads beyond n
// leave early.
template <Bug BUG> __global__ void reverse_kernel(int *x, int n) {
    SHARED_DYNAMIC(int, all);
    int i = threadIdx.x;
    if (BUG != DIVERGENT && BUG != EXIT_DIVERGENT && i >= n) return;
    if (i < n) all[i] = x[i];
    if (BUG == DYNAMIC_OUT && i == 0) all[n] = 0;
    if (BUG == DIVERGENT) {
        if (i < n) __syncthreads();
        else __syncthreads();
    } else if (BUG == EXIT_DIVERGENT) {
        if (i < n) __syncthreads();
        else __syncwarp();
    } else __syncthreads();
    if (i < n) x[i] = all[n - 1 - i];
}

// Scan, segments, votes and partial masks in one warp of `blockDim.x` lanes; out holds four ints a
// lane.
template <Bug BUG> __global__ void warp_kernel(int *out) {
    SHARED(int, cell, 32);
    int lane = threadIdx.x, n = blockDim.x, sum = lane;
    unsigned mask = n == 32 ? 0xffffffffu : (1u << n) - 1;
    unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u & mask;
    for (int d = 1; d < n; d <<= 1) {
        int other = __shfl_up_sync(mask, sum, d);
        if (lane >= d) sum += other;
    }
    out[4 * lane] = sum;
    if (lane < 16)
        out[4 * lane + 1] = __shfl_sync(BUG == WRONG_MASK ? 0xffffffffu : half, lane, 3, 8);
    else
        out[4 * lane + 1] = BUG == MIXED_WARP && lane % 2 ? __any_sync(half, 1)
                                                          : (int)__ballot_sync(half, lane & 1);
    if (BUG == NOT_IN_MASK) __syncwarp(~half);
    cell[lane] = sum;
    if (BUG != NO_SYNCWARP) __syncwarp(mask);
    out[4 * lane + 2] = cell[n - 1 - lane];
    if (BUG == ACTIVE_MASK) mask = __activemask();
    out[4 * lane + 3] = __shfl_down_sync(mask, lane, 1, 4) + 100 * __any_sync(mask, lane == 2) +
                        1000 * __all_sync(mask, lane < 2);
}

__device__ __noinline__ static void set(float *p, float x) { *p = x; }
template <Bug BUG> __global__ void count_kernel(int *n, float *x, unsigned *flags) {
    atomicAdd(n, 1);
    float half;  // on the stack: another block's threads use the same addresses
    set(&half, 0.5f);
    atomicAdd(x, half);
    atomicOr(flags, 1u << blockIdx.x);
    if (BUG == BLOCK_RACE) x[1] = (float)threadIdx.x;
}

__global__ void add_kernel(int *out, const int *a, const int *b, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = a[i] * 3 + b[i];
}

// Who comes last: of the blocks, and of block 3's threads before and after a barrier. A race, made
// to look at the order.
__global__ void order_kernel(int *last) {
    last[0] = blockIdx.x;
    if (blockIdx.x == 3) last[1] = threadIdx.x;
    __syncthreads();
    if (blockIdx.x == 3) last[2] = threadIdx.x;
}

// Two threads without a barrier between write and read: thread 1 leaves the first barrier after
// thread 0 has come to the second.
__global__ void late_kernel(int *out) {
    SHARED(int, x, 1);
    __syncthreads();
    if (threadIdx.x == 0) x[0] = 1;
    else out[0] = x[0];
    __syncthreads();
}

// Two warps: out[warp] = A B_0 + A B_1, A and both B of 16 x 16, of which B's rows from `rows` on
// count as zeros. The first warp's lanes bring A and B to shared memory, 16 bytes each. To warp 0 a
// tile of B is B, to warp 1 B's transpose.
template <Bug BUG> __global__ void matrix_kernel(float *out, const __nv_bfloat16 *a,
                                                 const __nv_bfloat16 *b, int rows) {
    typedef __nv_bfloat16 Row[24];
    SHARED(Row, tile, 32);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = lane / 2, c = lane % 2 * 8;
    uint32_t left[4], right[4];
    float d[2][4] = {};
    if (warp == 0) {
        copy_async(&tile[r][c], a + 16 * r + c, true);
        copy_commit();
    }
    for (int round = 0; round < 2; round++) {
        if (warp == 0) {
            copy_async(&tile[16 + r][c + (BUG == MISALIGNED)], b + 16 * (rows * round + r) + c,
                       BUG == COPY_OUT || r < rows);
            if (BUG != NO_COMMIT) copy_commit();
            if (round == 0) copy_wait<1>();
        }
        __syncthreads();
        if (round == 0) ldmatrix<false>(left, &tile[lane % 16][lane / 16 * 8]);
        if (warp == 0 && BUG != LATE_COPY_WAIT) copy_wait<BUG == NO_COPY_WAIT ? 1 : 0>();
        if (BUG != NO_COPY_BARRIER) __syncthreads();
        if (BUG == HALF_MMA && lane >= 16) return;
        if (warp == 0)
            ldmatrix<true>(right,
                           &tile[16 + lane % 16][lane / 16 * 8] + (BUG == MATRIX_OUT ? 24 : 0));
        else ldmatrix<false>(right, &tile[16 + lane / 16 * 8 + lane % 8][lane / 8 % 2 * 8]);
        for (int n = 0; n < 2; n++) mma_bf16(d[n], left, right + 2 * n);
        if (BUG != EARLY_COPY) __syncthreads();
    }
    if (BUG == LATE_COPY_WAIT) copy_wait<0>();
    for (int n = 0; n < 2; n++)
        for (int i = 0; i < 4; i++)
            out[warp * 256 + (lane / 4 + i / 2 * 8) * 16 + n * 8 + lane % 4 * 2 + i % 2] = d[n][i];
}

// Half a warp comes to a matrix product.
__global__ void half_mma_kernel(float *out) {
    uint32_t a[4] = {}, b[2] = {};
    float d[4] = {};
    if (threadIdx.x < 16) return;
    mma_bf16(d, a, b);
    out[threadIdx.x] = d[0];
}

// The values that lanes of segments of `width` lanes get from `delta` lanes before, after, and at
// lane `delta` of the segment.
__global__ void segments_kernel(int *out, int width, int delta) {
    int lane = threadIdx.x;
    out[lane] = __shfl_up_sync(0xffffffffu, 100 + lane, delta, width);
    out[32 + lane] = __shfl_down_sync(0xffffffffu, 100 + lane, delta, width);
    out[64 + lane] = __shfl_sync(0xffffffffu, 100 + lane, delta, width);
}

// No end: every level has its own array and hands it down.
__device__ static float deep(volatile const float *above, int level) {
    volatile float here[256];
    for (int i = 0; i < 256; i++) here[i] = above[i % 8] + (float)level;
    return level < 1000000 ? deep(here, level + 1) + here[level % 256] : here[0];
}
__global__ void deep_kernel(float *out) { float x[8] = {0}; out[threadIdx.x] = deep(x, 0); }

// ------------------------------------------------------------------ cases
template <typename T> static T *to_device(const std::vector<T> &x) {
    T *p;
    cudaCheck(cudaMalloc((void **)&p, x.size() * sizeof(T)));
    cudaCheck(cudaMemcpy(p, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}
template <typename T> static std::vector<T> take(T *p, size_t n) {
    std::vector<T> x(n);
    cudaCheck(cudaMemcpy(x.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
    cudaCheck(cudaFree(p));
    return x;
}

template <Bug BUG> static void rows_case(int block) {
    const int rows = 5, columns = 301, repeat = BUG == UNSET_SHARED ? 1 : 3;
    std::vector<float> in(rows * columns);
    for (size_t i = 0; i < in.size(); i++) in[i] = (float)(int)(i * 7 % 23);
    float *d_in = to_device(in), *d_out = to_device(std::vector<float>(rows));
    LAUNCH(rows_kernel<BUG>, rows, block, 0, 0, d_out, d_in, columns, repeat);
    std::vector<float> out = take(d_out, rows);
    cudaCheck(cudaFree(d_in));
    for (int r = 0; r < rows; r++) {
        float sum = 0;
        for (int c = 0; c < columns; c++) sum += in[r * columns + c];
        EXPECT(out[r] == sum * (repeat * (repeat + 1) / 2));
    }
}

template <Bug BUG> static void transpose_case(void) {
    const int rows = 45, columns = 70;
    std::vector<float> in(rows * columns);
    for (size_t i = 0; i < in.size(); i++) in[i] = (float)i;
    float *d_in = to_device(in), *d_out = to_device(std::vector<float>(in.size()));
    LAUNCH(transpose_kernel<BUG>, dim3(CEIL_DIV(columns, 32), CEIL_DIV(rows, 32)), dim3(32, 8), 0,
           0, d_out, d_in, rows, columns);
    std::vector<float> out = take(d_out, in.size());
    cudaCheck(cudaFree(d_in));
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) EXPECT(out[c * rows + r] == in[r * columns + c]);
}

static void bf16_case(void) {
    const size_t n = 1000;
    std::vector<FourHalves> in(n);
    for (size_t i = 0; i < 4 * n; i++) in[i / 4].v[i % 4] = __float2bfloat16((float)i * 0.37f);
    FourHalves *d_in = to_device(in), *d_out = to_device(std::vector<FourHalves>(n));
    LAUNCH(scale_kernel, 3, 64, 0, 0, d_out, d_in, __float2bfloat16(0.5f), n);
    std::vector<FourHalves> out = take(d_out, n);
    cudaCheck(cudaFree(d_in));
    for (size_t i = 0; i < 4 * n; i++)
        EXPECT(__bfloat162float(out[i / 4].v[i % 4]) ==
               0.5f * __bfloat162float(in[i / 4].v[i % 4]));
    EXPECT(fabsf(__bfloat162float(out[999].v[3]) / (0.5f * 3999 * 0.37f) - 1) < 1.0f / 256);
}

template <Bug BUG> static void reverse_case(void) {
    const int n = 83;
    std::vector<int> in(n);
    for (int i = 0; i < n; i++) in[i] = i * i;
    int *d = to_device(in);
    LAUNCH(reverse_kernel<BUG>, 1, 96, n * sizeof(int), 0, d, n);
    std::vector<int> out = take(d, n);
    for (int i = 0; i < n; i++) EXPECT(out[i] == in[n - 1 - i]);
}

template <Bug BUG> static void warp_case(int n) {
    int *d = to_device(std::vector<int>(4 * n));
    LAUNCH(warp_kernel<BUG>, 1, n, 0, 0, d);
    std::vector<int> out = take(d, 4 * n);
    for (int lane = 0; lane < n; lane++) {
        int back = n - 1 - lane, odd = 0;
        for (int i = 16; i < n; i++) odd |= (i & 1) << i;
        EXPECT(out[4 * lane] == lane * (lane + 1) / 2);
        EXPECT(out[4 * lane + 1] == (lane < 16 ? (lane & ~7) + 3 : odd));
        EXPECT(out[4 * lane + 2] == back * (back + 1) / 2);
        EXPECT(out[4 * lane + 3] == (lane % 4 == 3 ? lane : lane + 1) + 100);
    }
}

template <Bug BUG> static void atomics_case(void) {
    int *n = to_device(std::vector<int>(1));
    float *x = to_device(std::vector<float>(2));
    unsigned *flags = to_device(std::vector<unsigned>(1));
    LAUNCH(count_kernel<BUG>, 7, 40, 0, 0, n, x, flags);
    EXPECT(take(n, 1)[0] == 280 && take(x, 2)[0] == 140.0f && take(flags, 1)[0] == 127);
}

// Two streams that hand a buffer over three times; the result is read through pinned memory.
template <Bug BUG> static void streams_case(void) {
    const int n = 100;
    cudaStream_t s, t;
    cudaEvent_t ready, used;
    cudaCheck(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    cudaCheck(cudaStreamCreateWithFlags(&t, cudaStreamNonBlocking));
    cudaCheck(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming));
    cudaCheck(cudaEventCreateWithFlags(&used, cudaEventDisableTiming));
    int *a = to_device(std::vector<int>(n));
    int *b = to_device(std::vector<int>(n, 1));
    int *sum = to_device(std::vector<int>(n));
    int *pinned;
    cudaCheck(cudaMallocHost((void **)&pinned, n * sizeof(int)));
    for (int i = 0; i < n; i++) pinned[i] = i;
    cudaCheck(cudaMemcpyAsync(a, pinned, n * sizeof(int), cudaMemcpyHostToDevice, s));
    if (BUG == PINNED_REUSE) memset(pinned, 0, n * sizeof(int));
    for (int round = 0; round < 3; round++) {
        LAUNCH(add_kernel, CEIL_DIV(n, 32), 32, 0, s, a, a, b, n);                   // a = 3a + 1
        cudaCheck(cudaEventRecord(ready, s));
        if (BUG != NO_EVENT) cudaCheck(cudaStreamWaitEvent(t, ready, 0));
        LAUNCH(add_kernel, CEIL_DIV(n, 32), 32, 0, t, sum, sum, a, n);  // sum = 3 sum + a
        cudaCheck(cudaEventRecord(used, t));
        cudaCheck(cudaStreamWaitEvent(s, used, 0));
    }
    cudaCheck(cudaMemcpyAsync(pinned, sum, n * sizeof(int), cudaMemcpyDeviceToHost, t));
    cudaCheck(cudaStreamSynchronize(t));
    for (int i = 0; i < n; i++) {
        int x = i, y = 0;
        for (int round = 0; round < 3; round++) x = 3 * x + 1, y = 3 * y + x;
        EXPECT(pinned[i] == y);
    }
    cudaCheck(cudaEventDestroy(ready));
    cudaCheck(cudaEventDestroy(used));
    cudaCheck(cudaStreamDestroy(s));
    cudaCheck(cudaStreamDestroy(t));
    cudaCheck(cudaFreeHost(pinned));
    cudaCheck(cudaFree(a));
    cudaCheck(cudaFree(b));
    cudaCheck(cudaFree(sum));
}

// The legacy default stream waits for blocking streams and they for it.
static void default_stream_case(void) {
    cudaStream_t s;
    cudaCheck(cudaStreamCreate(&s));
    int *a = to_device(std::vector<int>(40, 5)), *b = to_device(std::vector<int>(40, 1));
    // 3a + 1, 4a
    for (int i = 0; i < 4; i++)
        LAUNCH(add_kernel, 2, 32, 0, i % 2 ? s : 0, a, a, i % 2 ? a : b, 40);
    EXPECT(take(a, 40)[39] == (((5 * 3 + 1) * 4) * 3 + 1) * 4);
    cudaCheck(cudaFree(b));
    cudaCheck(cudaStreamDestroy(s));
}

// A graph of copies, kernels and a memset, recorded once and launched three times; what it reads
// from pinned memory is what lies there when it runs, and the arguments of its kernels are those of
// the recording. Work before it in the stream runs first.
template <Bug BUG> static void graph_case(void) {
    const int n = 100;
    cudaStream_t s;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    cudaStreamCaptureStatus status;
    cudaCheck(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    int *a = to_device(std::vector<int>(n));
    int *b = to_device(std::vector<int>(n, 1));
    int *sum = to_device(std::vector<int>(n, 7));
    int *pinned;
    cudaCheck(cudaMallocHost((void **)&pinned, 2 * n * sizeof(int)));
    // b = 4, in the stream before the recording
    LAUNCH(add_kernel, CEIL_DIV(n, 32), 32, 0, s, b, b, b, n);
    cudaCheck(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    cudaCheck(cudaMemcpyAsync(a, pinned, n * sizeof(int), cudaMemcpyHostToDevice, s));
    LAUNCH(add_kernel, CEIL_DIV(n, 32), 32, 0, s, a, a, b, n);                   // a = 3 pinned + 4
    LAUNCH(add_kernel, CEIL_DIV(n, 32), 32, 0, s, sum, sum, a, n);               // sum = 3 sum + a
    cudaCheck(cudaMemcpyAsync(pinned + n, sum, n * sizeof(int), cudaMemcpyDeviceToHost, s));
    cudaCheck(cudaMemsetAsync(a, 0, n * sizeof(int), s));
    cudaCheck(cudaStreamIsCapturing(s, &status));
    EXPECT(status == cudaStreamCaptureStatusActive);
    cudaCheck(cudaStreamEndCapture(s, &graph));
    cudaCheck(cudaStreamIsCapturing(s, &status));
    EXPECT(status == cudaStreamCaptureStatusNone);
    cudaCheck(cudaGraphInstantiate(&executable, graph, 0));
    cudaCheck(cudaGraphDestroy(graph));
    for (int round = 0, y = 7; round < 3; round++) {
        for (int i = 0; i < n; i++) pinned[i] = round;
        cudaCheck(cudaGraphLaunch(executable, s));
        if (BUG != GRAPH_REUSE || round == 2) cudaCheck(cudaStreamSynchronize(s));
        y = 3 * y + 3 * round + 4;
        if (BUG != GRAPH_REUSE || round == 2) EXPECT(pinned[n] == y && pinned[2 * n - 1] == y);
    }
    EXPECT(take(a, n)[n - 1] == 0);
    cudaCheck(cudaGraphExecDestroy(executable));
    cudaCheck(cudaStreamDestroy(s));
    cudaCheck(cudaFreeHost(pinned));
    cudaCheck(cudaFree(b));
    cudaCheck(cudaFree(sum));
}

// A call that a recording does not take spoils it: more work is refused, its end gives no graph,
// and the next one is as good as new.
static void graph_refuses(cudaStreamCaptureMode mode, const char *what, cudaError_t expected,
                          const std::function<cudaError_t(cudaStream_t)> &call) {
    cudaStream_t s;
    cudaGraph_t graph;
    cudaStreamCaptureStatus status;
    int *a = to_device(std::vector<int>(8, 1));
    cudaCheck(cudaStreamCreate(&s));
    cudaCheck(cudaStreamBeginCapture(s, mode));
    cudaError_t found = call(s);
    CHECK(found == expected, "%s: expected %s, found %s\n  -> dev/emu/emu.cpp, graphs", what,
          cudaGetErrorString(expected), cudaGetErrorString(found));
    cudaCheck(cudaStreamIsCapturing(s, &status));
    EXPECT(status ==
           (expected ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive));
    EXPECT(cudaMemsetAsync(a, 0, 4, s) ==
           (expected ? cudaErrorStreamCaptureInvalidated : cudaSuccess));
    EXPECT(cudaStreamEndCapture(s, &graph) ==
               (expected ? cudaErrorStreamCaptureInvalidated : cudaSuccess) &&
           (graph == NULL) == (expected != cudaSuccess));
    if (graph) cudaCheck(cudaGraphDestroy(graph));
    cudaGetLastError();
    cudaCheck(cudaMemsetAsync(a, 0, 4, s));
    EXPECT(take(a, 2)[0] == 0);
    cudaCheck(cudaStreamDestroy(s));
}

static void graph_refusals(void) {
    const cudaStreamCaptureMode strict = cudaStreamCaptureModeThreadLocal;
    const cudaStreamCaptureMode relaxed = cudaStreamCaptureModeRelaxed;
    const cudaError_t unsupported = cudaErrorStreamCaptureUnsupported;
    cudaEvent_t event;
    cudaGraph_t graph;
    cudaStream_t free_stream;
    int *a = to_device(std::vector<int>(8)), x[8] = {0}, *p = NULL;
    cudaCheck(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    cudaCheck(cudaStreamCreateWithFlags(&free_stream, cudaStreamNonBlocking));
    graph_refuses(strict, "synchronization", unsupported,
                  [](cudaStream_t s) { return cudaStreamSynchronize(s); });
    graph_refuses(relaxed, "synchronization", unsupported,
                  [](cudaStream_t s) { return cudaStreamSynchronize(s); });
    graph_refuses(relaxed, "the whole device", unsupported,
                  [](cudaStream_t) { return cudaDeviceSynchronize(); });
    graph_refuses(strict, "cudaMalloc", unsupported,
                  [&](cudaStream_t) { return cudaMalloc((void **)&p, 8); });
    graph_refuses(strict, "cudaFree", unsupported, [&](cudaStream_t) { return cudaFree(a); });
    graph_refuses(relaxed, "cudaMalloc, relaxed", cudaSuccess,
                  [&](cudaStream_t) { return cudaMalloc((void **)&p, 8); });
    graph_refuses(strict, "cudaMemcpy", unsupported,
                  [&](cudaStream_t) { return cudaMemcpy(x, a, 8, cudaMemcpyDeviceToHost); });
    graph_refuses(strict, "pageable memory", unsupported, [&](cudaStream_t s) {
        return cudaMemcpyAsync(a, x, 8, cudaMemcpyHostToDevice, s);
    });
    graph_refuses(relaxed, "pageable memory", unsupported, [&](cudaStream_t s) {
        return cudaMemcpyAsync(x, a, 8, cudaMemcpyDeviceToHost, s);
    });
    graph_refuses(strict, "an event", unsupported,
                  [&](cudaStream_t s) { return cudaEventRecord(event, s); });
    graph_refuses(strict, "an awaited event", unsupported,
                  [&](cudaStream_t s) { return cudaStreamWaitEvent(s, event, 0); });
    graph_refuses(strict, "the default stream", cudaErrorStreamCaptureImplicit,
                  [&](cudaStream_t) { return cudaMemsetAsync(a, 0, 8, 0); });
    graph_refuses(strict, "another stream", cudaSuccess,
                  [&](cudaStream_t) { return cudaMemsetAsync(a, 0, 8, free_stream); });
    EXPECT(cudaStreamBeginCapture(0, strict) == unsupported);
    EXPECT(cudaStreamEndCapture(free_stream, &graph) == cudaErrorIllegalState);
    cudaGetLastError();
    cudaCheck(cudaStreamDestroy(free_stream));
    cudaCheck(cudaEventDestroy(event));
    cudaCheck(cudaFree(p));
    cudaCheck(cudaFree(a));
}

// Prints how the runtime describes the machine, one word a line (test.sh sets the EMU_ variables).
static void device_case(void) {
    int devices = -1, driver, runtime, major, minor, shared, value;
    cudaFuncAttributes attributes;
    size_t free_bytes, total;
    cudaError_t count = cudaGetDeviceCount(&devices);
    cudaError_t image = cudaFuncGetAttributes(&attributes, (const void *)add_kernel);
    cudaCheck(cudaDriverGetVersion(&driver));
    cudaCheck(cudaRuntimeGetVersion(&runtime));
    cudaCheck(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    cudaCheck(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
    cudaCheck(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    cudaCheck(cudaFuncSetAttribute((const void *)add_kernel,
                                   cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    EXPECT(cudaFuncSetAttribute((const void *)add_kernel,
                                cudaFuncAttributeMaxDynamicSharedMemorySize,
                                shared + 1) == cudaErrorInvalidValue);
    EXPECT(cudaDeviceGetAttribute(&value, cudaDevAttrMaxPitch, 0) == cudaErrorInvalidValue);
    cudaCheck(cudaMemGetInfo(&free_bytes, &total));
    EXPECT(runtime == CUDART_VERSION);
    printf("devices %d: %s\ndriver %d\ncompute %d.%d: %s\nmemory %zu\nshared %d\n", devices,
           cudaGetErrorString(count), driver, major, minor, cudaGetErrorString(image), total,
           shared);
    void *p;
    if (total < 1 << 24)
        EXPECT(cudaMalloc(&p, total) == cudaSuccess &&
               cudaMalloc(&p, 1) == cudaErrorMemoryAllocation);
    cudaGetLastError();
    int *q = NULL;
    LAUNCH(add_kernel, 1, 1, 0, 0, q, q, q, 0);
    cudaCheck(cudaDeviceSynchronize());
}

// The API's refusals, and its answers about memory.
static void api_case(void) {
    float *p, x = 0;
    size_t before, after, total;
    cudaCheck(cudaMemGetInfo(&before, &total));
    cudaCheck(cudaMalloc((void **)&p, 4000));
    cudaCheck(cudaMemGetInfo(&after, &total));
    EXPECT(before - after == 4000);
    EXPECT(cudaMemcpy(p, &x, 4, cudaMemcpyDeviceToHost) == cudaErrorInvalidMemcpyDirection);
    EXPECT(cudaMemcpy(p + 999, p, 8, cudaMemcpyDeviceToDevice) == cudaErrorInvalidValue);
    EXPECT(cudaMemset(p + 1, 0, 4000) == cudaErrorInvalidValue);
    EXPECT(cudaFree(p + 1) == cudaErrorInvalidValue);
    EXPECT(cudaGetLastError() == cudaErrorInvalidValue && cudaGetLastError() == cudaSuccess);
    cudaCheck(cudaMemcpy(&x, p + 999, 4, cudaMemcpyDeviceToHost));
    EXPECT(x != x);
    x = 3;
    cudaCheck(cudaMemcpyAsync(p, &x, 4, cudaMemcpyHostToDevice, 0));
    x = 4;
    cudaCheck(cudaMemcpyAsync(&x, p, 4, cudaMemcpyDeviceToHost, 0));
    EXPECT(x == 3);
    cudaCheck(cudaFree(p));
    EXPECT(cudaFree(p) == cudaErrorInvalidValue);
    EXPECT(cudaMalloc((void **)&p, (size_t)1 << 50) == cudaErrorMemoryAllocation);
    cudaGetLastError();
}

static void too_many_threads(void) {
    int *p = to_device(std::vector<int>(1));
    LAUNCH(add_kernel, 1, 1025, 0, 0, p, p, p, 1);
}

static void late_case(void) {
    int *p = to_device(std::vector<int>(1));
    LAUNCH(late_kernel, 1, 2, 0, 0, p);
    take(p, 1);
}

static void stack_case(void) {
    float *p = to_device(std::vector<float>(2));
    LAUNCH(deep_kernel, 1, 2, 0, 0, p);
    take(p, 2);
}

static float small_integer(int i) { return (float)(i * 37 % 23 - 11); }

template <Bug BUG> static void matrix_case(void) {
    const int rows = 13;
    std::vector<__nv_bfloat16> a(256), b(2 * rows * 16);
    for (int i = 0; i < 256; i++) a[i] = __float2bfloat16(small_integer(i));
    for (int i = 0; i < 2 * rows * 16; i++) b[i] = __float2bfloat16(small_integer(i + 1000));
    __nv_bfloat16 *d_a = to_device(a), *d_b = to_device(b);
    float *d_out = to_device(std::vector<float>(512));
    LAUNCH(matrix_kernel<BUG>, 1, 64, 0, 0, d_out, d_a, d_b, rows);
    std::vector<float> out = take(d_out, 512);
    cudaCheck(cudaFree(d_a));
    cudaCheck(cudaFree(d_b));
    for (int i = 0; i < 16; i++) for (int j = 0; j < 16; j++) {
        float plain = 0, transposed = 0;
        for (int round = 0; round < 2; round++) for (int k = 0; k < 16; k++) {
            float a_k = small_integer(16 * i + k);
            if (k < rows) plain += a_k * small_integer(1000 + 16 * (rows * round + k) + j);
            if (j < rows) transposed += a_k * small_integer(1000 + 16 * (rows * round + j) + k);
        }
        EXPECT(out[16 * i + j] == plain);
        EXPECT(out[256 + 16 * i + j] == transposed);
    }
}

static void half_mma_case(void) {
    float *p = to_device(std::vector<float>(32));
    LAUNCH(half_mma_kernel, 1, 32, 0, 0, p);
    take(p, 32);
}

static void segments_case(void) {
    for (int width = 1; width <= 32; width *= 2) for (int delta = 0; delta < width; delta++) {
        int *d = to_device(std::vector<int>(96));
        LAUNCH(segments_kernel, 1, 32, 0, 0, d, width, delta);
        std::vector<int> out = take(d, 96);
        for (int lane = 0; lane < 32; lane++) {
            int place = lane % width;
            EXPECT(out[lane] == 100 + (place >= delta ? lane - delta : lane));
            EXPECT(out[32 + lane] == 100 + (place + delta < width ? lane + delta : lane));
            EXPECT(out[64 + lane] == 100 + lane - place + delta);
        }
    }
}

static void order_case(void) {
    int *d = to_device(std::vector<int>(3));
    LAUNCH(order_kernel, 8, 32, 0, 0, d);
    std::vector<int> last = take(d, 3);
    printf("block %d\nbefore %d\nafter %d\n", last[0], last[1], last[2]);
}

// Without arguments: what a GPU can run too.
static void all_correct(void) {
    for (int block = 32; block <= 1024; block *= 2) rows_case<NONE>(block);
    transpose_case<NONE>();
    bf16_case();
    reverse_case<NONE>();
    warp_case<NONE>(32);
    warp_case<NONE>(28);
    segments_case();
    matrix_case<NONE>();
    atomics_case<NONE>();
    streams_case<NONE>();
    default_stream_case();
    graph_case<NONE>();
}

int main(int argc, char **argv) {
    struct Case { const char *name; void (*run)(void); };
    const Case cases[] = {
        {"correct", all_correct},
        {"api", api_case},
        {"graph", graph_case<NONE>},
        {"graph_refusals", graph_refusals},
        {"graph_reuse", graph_case<GRAPH_REUSE>},
        {"device", device_case},
        {"rows", [] { rows_case<NONE>(96); }},
        {"transpose", transpose_case<NONE>},
        {"bf16", bf16_case},
        {"reverse", reverse_case<NONE>},
        {"warp", [] { warp_case<NONE>(28); }},
        {"atomics", atomics_case<NONE>},
        {"streams", streams_case<NONE>},
        {"default_stream", default_stream_case},
        {"no_barrier", transpose_case<NO_BARRIER>},
        {"no_sum_barrier", [] { rows_case<NO_BARRIER>(96); }},
        {"no_loop_barrier", [] { rows_case<NO_LOOP_BARRIER>(96); }},
        {"no_syncwarp", [] { warp_case<NO_SYNCWARP>(32); }},
        {"block_race", atomics_case<BLOCK_RACE>},
        {"divergent", reverse_case<DIVERGENT>},
        {"deadlock", reverse_case<EXIT_DIVERGENT>},
        {"half_warp", [] { rows_case<HALF_WARP>(96); }},
        {"wrong_mask", [] { warp_case<WRONG_MASK>(32); }},
        {"mixed_warp", [] { warp_case<MIXED_WARP>(32); }},
        {"not_in_mask", [] { warp_case<NOT_IN_MASK>(32); }},
        {"active_mask", [] { warp_case<ACTIVE_MASK>(32); }},
        {"shared_out", transpose_case<SHARED_OUT>},
        {"dynamic_out", reverse_case<DYNAMIC_OUT>},
        {"global_out", [] { rows_case<GLOBAL_OUT>(96); }},
        {"unset_shared", [] { rows_case<UNSET_SHARED>(96); }},
        {"no_event", streams_case<NO_EVENT>},
        {"pinned_reuse", streams_case<PINNED_REUSE>},
        {"too_many_threads", too_many_threads},
        {"deep_stack", stack_case},
        {"order", order_case},
        {"late", late_case},
        {"segments", segments_case},
        {"matrix", matrix_case<NONE>},
        {"half_mma", half_mma_case},
        {"half_ldmatrix", matrix_case<HALF_MMA>},
        {"no_copy_wait", matrix_case<NO_COPY_WAIT>},
        {"late_copy_wait", matrix_case<LATE_COPY_WAIT>},
        {"no_commit", matrix_case<NO_COMMIT>},
        {"misaligned", matrix_case<MISALIGNED>},
        {"no_copy_barrier", matrix_case<NO_COPY_BARRIER>},
        {"early_copy", matrix_case<EARLY_COPY>},
        {"matrix_out", matrix_case<MATRIX_OUT>},
        {"copy_out", matrix_case<COPY_OUT>},
    };
    const char *name = argc > 1 ? argv[1] : "correct";
    for (const Case &c : cases) if (!strcmp(c.name, name)) { c.run(); return 0; }
    fprintf(stderr, "error: no case %s\n  -> one of:", name);
    for (const Case &c : cases) fprintf(stderr, " %s", c.name);
    fprintf(stderr, "\n");
    return 2;
}
