// product.cu: the ladder of a matrix product in bfloat16 on compute capability 9.0, C = A B^T with
// A [M, K], B [N, K] and C [M, N]. Its last step is the skeleton of llmc's kernels for that GPU.
//
//   1 naive      a thread an element
//   2 tile       a warpgroup a tile of 64 x 128: TMA brings 64 columns of A and B, wgmma multiplies
//                them, and so on. Each waits for the other
//   3 ring       a tile of 128 x 128: one thread brings tiles ahead of time, into a ring of stages;
//                two warpgroups multiply them. Barriers say which stage is full and which is empty.
//                C passes through shared memory, and TMA stores it
//
// To run: sh dev/kernels/run.sh; in the emulator sizes are small and there are no times.
#include "ladder.cuh"
#include "../../llmc/sm90.cuh"

// M is `REPEAT` times 100 rows, which are the same: the truth is that of 100.
static const int REPEAT = TIMED ? 640 : 2;
static const int ROWS = 100;
static const int M = REPEAT * ROWS;
static const int N = TIMED ? 3072 : 200;
static const int K = TIMED ? 768 : 328;

// ----------------------------------------------------------------------------------------- 1 naive

static __global__ void naive_kernel(real *c, const real *a, const real *b) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, m = i / N, n = i % N;
    if (m >= M) return;
    float sum = 0;
    for (int k = 0; k < K; k++) sum += to_float(a[(int64_t)m * K + k]) * to_float(b[n * K + k]);
    c[(int64_t)m * N + n] = to_real(sum);
}

// ------------------------------------------------------------------------------------------ 2 tile

enum { TILE_ROWS = 64, TILE_COLUMNS = 128, TILE_DEPTH = TILE_WIDTH };

// d += A B^T for a tile of 64 rows of A and one of 128 rows of B, 64 columns each.
static __device__ void multiply(float (&d)[64], const unsigned char *a, const unsigned char *b,
                                bool add) {
    settle(d);
    wgmma_fence();
    UNROLL for (int k = 0; k < TILE_DEPTH / 16; k++) {
        wgmma<MAJOR_K, MAJOR_K>(d, tile_descriptor(a + k * STEP_BYTES),
                                tile_descriptor(b + k * STEP_BYTES), add || k > 0);
    }
    wgmma_commit();
}

static __global__ void __launch_bounds__(WARPGROUP)
    tile_kernel(real *c, const __grid_constant__ CUtensorMap a_map,
                const __grid_constant__ CUtensorMap b_map) {
    SHARED_TILES(tiles);
    unsigned char *a = tiles, *b = tiles + TILE_ROWS * TILE_ROW;
    uint64_t *full = reinterpret_cast<uint64_t *>(b + TILE_COLUMNS * TILE_ROW);
    int m = blockIdx.y * TILE_ROWS, n = blockIdx.x * TILE_COLUMNS;
    float d[64];
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        mbarrier_init_fence();
    }
    __syncthreads();
    for (int k = 0, parity = 0; k < K; k += TILE_DEPTH, parity ^= 1) {
        if (threadIdx.x == 0) {
            mbarrier_expect(full, (TILE_ROWS + TILE_COLUMNS) * TILE_ROW);
            tma_load(a, &a_map, full, k, m, 0, 0);
            tma_load(b, &b_map, full, k, n, 0, 0);
        }
        mbarrier_wait(full, parity);
        multiply(d, a, b, k > 0);
        wgmma_wait<0>();
        settle(d);
        __syncthreads();  // everyone is done with these tiles
    }
    int lane = threadIdx.x % WARP, row0 = m + threadIdx.x / WARP * 16 + lane / 4;
    UNROLL for (int i = 0; i < 64; i++) {
        int row = row0 + i / 2 % 2 * 8, column = n + i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (row < M && column < N) c[(int64_t)row * N + column] = to_real(d[i]);
    }
}

// ------------------------------------------------------------------------------------------ 3 ring

enum { STAGES = 4, CONSUMERS = 2, RING_THREADS = (CONSUMERS + 1) * WARPGROUP };
enum { A_BYTES = CONSUMERS * TILE_ROWS * TILE_ROW, B_BYTES = TILE_COLUMNS * TILE_ROW };
enum { C_BYTES = TILE_ROWS * TILE_COLUMNS * 2, BARRIER_BYTES = 2 * STAGES * sizeof(uint64_t) };
enum { RING_BYTES = STAGES * (A_BYTES + B_BYTES) + CONSUMERS * C_BYTES + BARRIER_BYTES };

// Rounds a warpgroup's d to two tiles, one behind the other, and stores them.
static __device__ void store_tiles(const CUtensorMap *c_map, unsigned char *c, const float (&d)[64],
                                   int m, int n, int group) {
    int thread = threadIdx.x % WARPGROUP, lane = thread % WARP;
    UNROLL for (int i = 0; i < 64; i += 2) {
        int row = thread / WARP * 16 + i / 2 % 2 * 8 + lane / 4, column = i / 4 * 8 + lane % 4 * 2;
        unsigned char *tile = c + column / TILE_WIDTH * TILE_ROWS * TILE_ROW;
        *reinterpret_cast<__nv_bfloat162 *>(tile_at(tile, row, column % TILE_WIDTH)) =
            __floats2bfloat162_rn(d[i], d[i + 1]);
    }
    fence_async();
    named_sync(1 + group, WARPGROUP);
    if (thread > 0) return;
    tma_store(c_map, c, n, m, 0, 0);
    tma_store(c_map, c + TILE_ROWS * TILE_ROW, n + TILE_WIDTH, m, 0, 0);
    tma_commit();
    tma_wait_read();
}

static __global__ void __launch_bounds__(RING_THREADS)
    ring_kernel(const __grid_constant__ CUtensorMap a_map,
                const __grid_constant__ CUtensorMap b_map,
                const __grid_constant__ CUtensorMap c_map) {
    SHARED_TILES(tiles);
    unsigned char *a = tiles, *b = a + STAGES * A_BYTES, *c = b + STAGES * B_BYTES;
    uint64_t *full = reinterpret_cast<uint64_t *>(c + CONSUMERS * C_BYTES), *empty = full + STAGES;
    int m = blockIdx.y * CONSUMERS * TILE_ROWS, n = blockIdx.x * TILE_COLUMNS;
    int group = warpgroup_index() - 1;  // -1: the producer
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(full + s, 1);
            mbarrier_init(empty + s, CONSUMERS * WARPGROUP / WARP);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    Ring<STAGES> ring = {0, 0};
    if (group < 0) {
        registers_give<40>();
        for (int k = 0; k < K && threadIdx.x == 0; k += TILE_DEPTH, ring.next()) {
            int s = ring.stage;
            mbarrier_wait(empty + s, ring.parity ^ 1);
            mbarrier_expect(full + s, A_BYTES + B_BYTES);
            tma_load(a + s * A_BYTES, &a_map, full + s, k, m, 0, 0);
            tma_load(b + s * B_BYTES, &b_map, full + s, k, n, 0, 0);
        }
        return;
    }
    registers_take<232>();
    float d[64];
    unsigned char *own = a + group * TILE_ROWS * TILE_ROW;
    for (int k = 0; k < K; k += TILE_DEPTH, ring.next()) {
        mbarrier_wait(full + ring.stage, ring.parity);
        multiply(d, own + ring.stage * A_BYTES, b + ring.stage * B_BYTES, k > 0);
        wgmma_wait<0>();
        settle(d);
        if (threadIdx.x % WARP == 0) mbarrier_arrive(empty + ring.stage);
    }
    store_tiles(&c_map, c + group * C_BYTES, d, m + group * TILE_ROWS, n, group);
}

// -------------------------------------------------------------------------------------- the ladder

// A matrix of rows x columns, in boxes of `box` rows and 64 columns.
static CUtensorMap matrix_map(const real *x, int rows, int columns, int box) {
    int64_t all = (int64_t)rows * columns;
    return tensor_map({x, {columns, rows, 1, 1}, {columns, all, all}, {TILE_WIDTH, box, 1, 1}});
}

int main(void) {
    Values a_host = random_values(ROWS * K, 1), b_host = random_values(N * K, 2), truth(ROWS * N);
    real *a = device_repeat(&a_host, REPEAT), *b = device_copy<real>(&b_host);
    real *c = device_empty<real>((size_t)M * N);
    for (int m = 0; m < ROWS; m++)
        for (int n = 0; n < N; n++)
            for (int k = 0; k < K; k++) truth[m * N + n] += a_host[m * K + k] * b_host[n * K + k];
    Gpu *gpu = test_gpu();
    double floor = 2.0 * M * N * K / FLOP_PER_MS;
    real *last = c + (size_t)(M - ROWS) * N;
    std::vector<LadderResult> result = {{"C", last, nullptr, &truth}};
    dim3 tiles(CEIL_DIV(N, TILE_COLUMNS), CEIL_DIV(M, TILE_ROWS));
    dim3 pairs(tiles.x, CEIL_DIV(M, CONSUMERS * TILE_ROWS));

    ladder_header("product: reads A, B; writes C", floor);
    ladder_step("1 naive", floor, result, gpu, [&] {
        LAUNCH(naive_kernel, CEIL_DIV(M * N, 128), 128, 0, gpu->stream, c, a, b);
    });
    ladder_step("2 tile", floor, result, gpu, [&] {
        LAUNCH(tile_kernel, tiles, WARPGROUP, (TILE_ROWS + TILE_COLUMNS) * TILE_ROW + 8,
               gpu->stream, c, matrix_map(a, M, K, TILE_ROWS), matrix_map(b, N, K, TILE_COLUMNS));
    });
    ladder_step("3 ring", floor, result, gpu, [&] {
        LAUNCH(ring_kernel, pairs, RING_THREADS, RING_BYTES, gpu->stream,
               matrix_map(a, M, K, CONSUMERS * TILE_ROWS), matrix_map(b, N, K, TILE_COLUMNS),
               matrix_map(c, M, N, TILE_ROWS));
    });
    return ladder_end();
}
