// attention_sm90.cuh: attention.cuh for compute capability 9.0, by wgmma and TMA (sm90.cuh). The
// equations, the layout of all arrays, and what forward saves are those of attention.cuh. Heads of
// 64, 96 and 128, in forward also QK 192 with HS 128, in bfloat16.
//
// A block is a producer and two or three consumers, each a warpgroup. One thread of the producer
// copies tiles by TMA into a ring of stages; for each stage two mbarriers say that it is full, or
// empty again. A consumer owns 64 rows of the result, 16 a warp. Its sums, and the probabilities
// that are the left operand of the next product, stay in registers; the producer gives up most
// of its own for them.
//
//             rows, kept   streamed                             per tile
//   forward   Q            K, V of all keys up to the last row  S = Q K^T, softmax, C += P V
//   dq        Q, dC        K, V of all keys up to the last row  S = Q K^T, dP = dC V^T, dQ += dS K
//   dkv       K, V         Q, dC, lse, D of all queries from    S^T = K Q^T, dP^T = V dC^T,
//                          the first row on, of all heads       dV += P^T dC, dK += dS^T Q
//                          of the group
//
// This is FlashAttention-3's plan (Shah et al. 2024): the last product of a tile is under way while
// the exponentials of the next tile are computed, and in forward consumers take turns (Turns).
// Backward is two kernels, as in attention.cuh, so that each result is written once, by one block:
// no atomics, the same bits in every run.
#pragma once
#include <climits>
#include "attention.cuh"
#include "sm90.cuh"

// ------------------------------------------------------------------------------------------- tiles

// Tiles in shared memory have 64 columns (TILE_WIDTH). A matrix of `size` columns has several, and
// its last one may be part zeros.
template <int SIZE> static constexpr int TILES_OF = (SIZE + TILE_WIDTH - 1) / TILE_WIDTH;
template <int SIZE, int ROWS> static constexpr int BYTES_OF = TILES_OF<SIZE> * ROWS * TILE_ROW;

template <int QK_SIZE, int HS_SIZE> struct ForwardTiles {
    static constexpr int QK = QK_SIZE, HS = HS_SIZE, KEYS = 128, STAGES = 2;
    static constexpr int CONSUMERS = QK == 64 ? 3 : 2, QUERIES = CONSUMERS * GROUP_ROWS;
    static constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP;
    // Registers of a thread after the producer has given most of its own to the consumers.
    static constexpr int PRODUCERS = CONSUMERS == 3 ? 32 : 24;
    static constexpr int CONSUMERS_OWN = CONSUMERS == 3 ? 160 : 240;
    static constexpr int Q_BYTES = BYTES_OF<QK, QUERIES>;
    static constexpr int K_BYTES = BYTES_OF<QK, KEYS>, V_BYTES = BYTES_OF<HS, KEYS>;
    static constexpr int BYTES = Q_BYTES + STAGES * (K_BYTES + V_BYTES) + (1 + 4 * STAGES) * 8;
    static_assert(BYTES <= 227 << 10, "smaller tiles");
};

// A tensor map of [B, T, heads, size], in boxes of one head and `rows` positions.
static inline CUtensorMap heads_map(Heads x, int heads, int size, int rows, AttentionShape s) {
    return tensor_map({x.at,
                       {size, heads, s.T, s.B},
                       {x.head, x.ld, (int64_t)s.T * x.ld},
                       {TILE_WIDTH, 1, rows, 1}});
}

// Copies ROWS positions from `first` on of head h of sequence b, as all tiles of a matrix.
template <int SIZE, int ROWS>
__device__ void tiles_load(unsigned char *to, const CUtensorMap *map, uint64_t *full, int first,
                           int h, int b) {
    for (int t = 0; t < TILES_OF<SIZE>; t++)
        tma_load(to + t * ROWS * TILE_ROW, map, full, t * TILE_WIDTH, h, first, b);
}

// Fills a stage as soon as it is empty.
template <int SIZE, int ROWS, int STAGES>
__device__ void stage_fill(unsigned char *ring, const CUtensorMap *map, RingBarriers r,
                           Ring<STAGES> at, int first, int h, int b) {
    constexpr int BYTES = BYTES_OF<SIZE, ROWS>;
    uint64_t *full = r.full + at.stage;
    mbarrier_wait(r.empty + at.stage, at.parity ^ 1);
    mbarrier_expect(full, BYTES);
    tiles_load<SIZE, ROWS>(ring + at.stage * BYTES, map, full, first, h, b);
}

// Waits for a stage and gives it back, unused.
template <int STAGES> __device__ void stage_skip(RingBarriers r, Ring<STAGES> at) {
    mbarrier_wait(r.full + at.stage, at.parity);
    stage_release(r, at);
}

// ---------------------------------------------------------------------------------------- products

// Begins d = X Y^T: 64 rows of X, `x_rows` of which a tile has, by N rows of Y.
template <int SIZE, int N>
__device__ void rows_by_rows(float (&d)[N / 2], const unsigned char *x, int x_rows,
                             const unsigned char *y) {
    UNROLL for (int k = 0; k < SIZE / 16; k++) {
        int tile = k / 4, step = k % 4 * STEP_BYTES;
        wgmma<MAJOR_K, MAJOR_K>(d, tile_descriptor(x + tile * x_rows * TILE_ROW + step),
                                tile_descriptor(y + tile * N * TILE_ROW + step), k > 0);
    }
}

// Begins d = P Y, or d += P Y, for a P of 64 rows and N columns in registers and N rows of Y.
template <int SIZE, int N>
__device__ void sums_by_tile(float (&d)[SIZE / 2], const uint32_t (&p)[N / 16][4],
                             const unsigned char *y, bool add) {
    UNROLL for (int k = 0; k < N / 16; k++) {
        uint64_t right = tile_descriptor(y + k * 16 * TILE_ROW, N * TILE_ROW);
        wgmma<MAJOR_MN>(d, p[k], right, add || k > 0);
    }
}

// Rounds sums to a left operand.
template <int N> __device__ void sums_round(uint32_t (&p)[N / 16][4], const float (&s)[N / 2]) {
    UNROLL for (int k = 0; k < N / 16; k++) left_round(p[k], s + 8 * k);
}

template <int N> __device__ void settle(uint32_t (&p)[N][4]) {
    UNROLL for (int k = 0; k < N; k++) settle(p[k]);
}

// ------------------------------------------------------------------------------------------- store

// Rounds a consumer's sums, 64 rows, into its rows of tiles that nobody uses any more, and stores
// them by TMA: positions from row0 on of head h of sequence b.
template <int SIZE>
__device__ void group_store(const CUtensorMap *map, unsigned char *own, int tile_rows,
                            const float (&x)[SIZE / 2], int row0, int h, int b) {
    int thread = threadIdx.x % WARPGROUP, group = threadIdx.x / WARPGROUP;
    named_sync(group, WARPGROUP);  // all four warps are done with their products
    UNROLL for (int i = 0; i < SIZE / 2; i += 2) {
        int row = group_row() + i / 2 % 2 * 8, column = i / 4 * 8 + thread % 4 * 2;
        unsigned char *tile = own + column / TILE_WIDTH * tile_rows * TILE_ROW;
        *reinterpret_cast<__nv_bfloat162 *>(tile_at(tile, row, column % TILE_WIDTH)) =
            __floats2bfloat162_rn(x[i], x[i + 1]);
    }
    fence_async();
    named_sync(group, WARPGROUP);
    if (thread > 0) return;
    for (int t = 0; t < TILES_OF<SIZE>; t++)
        tma_store(map, own + t * tile_rows * TILE_ROW, t * TILE_WIDTH, h, row0, b);
    tma_commit();
    tma_wait_read();
}

// ----------------------------------------------------------------------------------------- forward

struct ForwardMaps { CUtensorMap q, k, v, c; };

// A block's place: sequence, head, kv head, first query, and the tiles of keys that it needs.
struct BlockPlace { int b, h, g, first, begin, end; };

template <int QUERIES, int KEYS> __device__ BlockPlace block_place(AttentionShape s) {
    int b = head_of_block() / s.NH, h = head_of_block() % s.NH;
    int first = (gridDim.y - 1 - blockIdx.y) * QUERIES;
    int begin = border_at(s.begins, b, first, s.T, 0) / KEYS;
    int end = CEIL_DIV(min(first + QUERIES, s.T), KEYS);
    return {b, h, h / (s.NH / s.KV), first, begin, end};
}

// The places of a block's arrays in shared memory.
template <typename Tiles> struct ForwardShared {
    unsigned char *q, *k, *v;
    uint64_t *q_full;
    RingBarriers k_ring, v_ring;
    __device__ ForwardShared(unsigned char *shared) {
        constexpr int STAGES = Tiles::STAGES;
        q = shared, k = q + Tiles::Q_BYTES, v = k + STAGES * Tiles::K_BYTES;
        q_full = reinterpret_cast<uint64_t *>(v + STAGES * Tiles::V_BYTES);
        k_ring = {q_full + 1, q_full + 1 + STAGES};
        v_ring = {k_ring.empty + STAGES, k_ring.empty + 2 * STAGES};
    }
    __device__ void init(void) {
        if (threadIdx.x == 0) {
            mbarrier_init(q_full, 1);
            ring_init<Tiles::STAGES>(k_ring, 1);
            ring_init<Tiles::STAGES>(v_ring, 1);
            mbarrier_init_fence();
        }
        __syncthreads();
    }
};

template <typename Tiles>
__device__ void forward_produce(const ForwardMaps &maps, const ForwardShared<Tiles> &shared,
                                BlockPlace p) {
    mbarrier_expect(shared.q_full, Tiles::Q_BYTES);
    tiles_load<Tiles::QK, Tiles::QUERIES>(shared.q, &maps.q, shared.q_full, p.first, p.h, p.b);
    Ring<Tiles::STAGES> at = {0, 0};
    for (int i = p.begin; i < p.end; i++, at.next()) {
        int key0 = i * Tiles::KEYS;
        stage_fill<Tiles::QK, Tiles::KEYS>(shared.k, &maps.k, shared.k_ring, at, key0, p.g, p.b);
        stage_fill<Tiles::HS, Tiles::KEYS>(shared.v, &maps.v, shared.v_ring, at, key0, p.g, p.b);
    }
}

// Consumers begin the products of a tile one after the other, so that the tensor cores work for one
// while another computes exponentials (ping-pong: FlashAttention-3, section 3.1). A consumer takes
// one turn for each tile of the block. It waits at its own barrier, where the consumer before it
// arrives. Nobody takes the turn that the last tile passes on.
template <int CONSUMERS> struct Turns {
    static constexpr int BARRIER = 4;   // of consumer 0; 1 to 3 are those of group_store
    int own, next;
    __device__ Turns(int consumer)
        : own(BARRIER + consumer), next(BARRIER + (consumer + 1) % CONSUMERS) {
        if (consumer == CONSUMERS - 1) pass();
    }
    __device__ void take(void) { named_sync(own, 2 * WARPGROUP); }
    __device__ void pass(void) { named_arrive(next, 2 * WARPGROUP); }
};

// The sums of 64 rows from row0 on, at q, over the tiles of keys from place.begin to `end`.
template <typename Tiles>
__device__ void forward_consume(float (&c)[Tiles::HS / 2], RunningSoftmax &m,
                                const unsigned char *q, const ForwardShared<Tiles> &shared,
                                BlockPlace place, int row0, int end, AttentionShape shape,
                                Turns<Tiles::CONSUMERS> &turns) {
    constexpr int KEYS = Tiles::KEYS;
    RingBarriers k_ring = shared.k_ring, v_ring = shared.v_ring;
    int row = row0 + group_row(), b = place.b, T = shape.T;
    int last_begin = border_at(shape.begins, b, row0 + GROUP_ROWS - 1, T, 0);  // of the last row
    float s[KEYS / 2], shrink[2];
    uint32_t p[KEYS / 16][4];
    Ring<Tiles::STAGES> at = {0, 0}, before = {0, 0};  // before: the tile before
    auto scores = [&] {
        const unsigned char *k = shared.k + at.stage * Tiles::K_BYTES;
        rows_by_rows<Tiles::QK, KEYS>(s, q, Tiles::QUERIES, k);
        wgmma_commit();
    };
    auto sums = [&](bool add) {
        sums_by_tile<Tiles::HS, KEYS>(c, p, shared.v + before.stage * Tiles::V_BYTES, add);
        wgmma_commit();
    };
    auto probabilities = [&](int tile) {
        settle(s);
        stage_release(k_ring, at);
        int key0 = tile * KEYS;
        if (key0 + KEYS > row0) causal_mask<false>(s, -key0, row);
        if (key0 < last_begin) document_mask<false>(s, shape.begins, b, T, row, key0);
        softmax_update(m, s, shrink, shape.log2_scale);
        settle(s);
        // V will be needed soon. This loop also keeps ptxas from moving the next wgmma_wait up,
        // before the exponentials.
        mbarrier_wait(v_ring.full + at.stage, at.parity);
    };
    mbarrier_wait(k_ring.full, 0);
    turns.take();
    wgmma_fence();
    scores();
    turns.pass();
    wgmma_wait<0>();
    probabilities(place.begin);
    sums_round<KEYS>(p, s);
    at.next();
    for (int tile = place.begin + 1; tile < end; tile++, at.next(), before.next()) {
        mbarrier_wait(k_ring.full + at.stage, at.parity);
        settle(c);
        settle(p);
        turns.take();
        wgmma_fence();
        scores();
        sums(tile > place.begin + 1);
        turns.pass();
        wgmma_wait<1>();
        probabilities(tile);
        wgmma_wait<0>();
        settle(c);
        stage_release(v_ring, before);
        rows_scale(c, shrink);
        sums_round<KEYS>(p, s);
    }
    settle(c);
    settle(p);
    wgmma_fence();
    sums(end > place.begin + 1);
    wgmma_wait<0>();
    settle(c);
    stage_release(v_ring, before);
}

template <typename Tiles>
__global__ void __launch_bounds__(Tiles::THREADS, 1)
attention_forward_sm90_kernel(const __grid_constant__ ForwardMaps maps, wide *peak, wide *lse,
                              AttentionShape s) {
#if SM90_CODE
    SHARED_TILES(tiles);
    ForwardShared<Tiles> shared(tiles);
    BlockPlace place = block_place<Tiles::QUERIES, Tiles::KEYS>(s);
    shared.init();
    int group = warpgroup_index() - 1;  // -1: the producer
    if (group < 0) {
        registers_give<Tiles::PRODUCERS>();
        if (threadIdx.x == 0) forward_produce<Tiles>(maps, shared, place);
        return;
    }
    registers_take<Tiles::CONSUMERS_OWN>();
    int row0 = place.first + group * GROUP_ROWS;
    bool live = row0 < s.T;
    int end = live ? CEIL_DIV(min(row0 + GROUP_ROWS, s.T), Tiles::KEYS) : place.begin;
    unsigned char *own = shared.q + group * GROUP_ROWS * TILE_ROW;
    mbarrier_wait(shared.q_full, 0);
    float c[Tiles::HS / 2];
    RunningSoftmax m;
    Turns<Tiles::CONSUMERS> turns(group);
    if (live) forward_consume<Tiles>(c, m, own, shared, place, row0, end, s, turns);
    for (int i = end - place.begin; i < place.end - place.begin; i++) {  // keys after these queries
        Ring<Tiles::STAGES> at = {i % Tiles::STAGES, i / Tiles::STAGES % 2};
        turns.take();
        turns.pass();
        stage_skip(shared.k_ring, at);
        stage_skip(shared.v_ring, at);
    }
    if (!live) return;
    softmax_end(m, c, peak, lse, row0 + group_row(), s.T);
    group_store<Tiles::HS>(&maps.c, own, Tiles::QUERIES, c, row0, place.h, place.b);
#endif
}

// ---------------------------------------------------------------------------------------- backward

// Own rows of two matrices, of QK and HS columns, and pairs of such tiles that are streamed.
// BY_KEYS: dkv, otherwise dq.
template <int QK_SIZE, int HS_SIZE, bool BY_KEYS> struct BackwardTiles {
    static constexpr int QK = QK_SIZE, HS = HS_SIZE, CONSUMERS = 2, ROWS = CONSUMERS * GROUP_ROWS;
    static constexpr int COLUMNS = BY_KEYS || QK > 64 ? 64 : 128;
    static constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP;
    static constexpr int X_BYTES = BYTES_OF<QK, ROWS>, Y_BYTES = BYTES_OF<HS, ROWS>;
    static constexpr int U_BYTES = BYTES_OF<QK, COLUMNS>, W_BYTES = BYTES_OF<HS, COLUMNS>;
    // Whether a tile's last products are under way while the next tile's first ones are: it takes
    // registers for both.
    static constexpr bool OVERLAP = !BY_KEYS || QK < 128;
    static constexpr int FLOATS = BY_KEYS ? 2 * COLUMNS : 0;      // lse and D of a stage
    static constexpr int STAGE = U_BYTES + W_BYTES + FLOATS * 4;
    // With two, a consumer of dkv that skips a tile would wait for the stage that it still holds.
    static constexpr int STAGES = 3;
    static constexpr int BYTES = X_BYTES + Y_BYTES + STAGES * STAGE + (1 + 2 * STAGES) * 8;
    static_assert(BYTES <= 227 << 10, "smaller tiles");
};

// x, y: own rows. u, w: streamed. dx, dy: the gradients of x and y; dq has no dy.
struct BackwardMaps { CUtensorMap x, y, u, w, dx, dy; };

// The places of a block's arrays in shared memory.
template <typename Tiles> struct BackwardShared {
    unsigned char *x, *y, *u, *w;
    float *lse;                // [STAGES, 2, COLUMNS]: lse, D
    uint64_t *own;
    RingBarriers ring;
    __device__ BackwardShared(unsigned char *shared) {
        x = shared, y = x + Tiles::X_BYTES, u = y + Tiles::Y_BYTES;
        w = u + Tiles::STAGES * Tiles::U_BYTES;
        lse = reinterpret_cast<float *>(w + Tiles::STAGES * Tiles::W_BYTES);
        own = reinterpret_cast<uint64_t *>(lse + Tiles::STAGES * Tiles::FLOATS);
        ring = {own + 1, own + 1 + Tiles::STAGES};
    }
    __device__ void init(void) {
        if (threadIdx.x == 0) {
            mbarrier_init(own, 1);
            ring_init<Tiles::STAGES>(ring, Tiles::FLOATS ? 1 + WARP : 1);
            mbarrier_init_fence();
        }
        __syncthreads();
    }
    // One thread copies: fill_own the block's own rows, fill the streamed tiles of a stage.
    __device__ void fill_own(const BackwardMaps &maps, int first, int h, int b) {
        mbarrier_expect(own, Tiles::X_BYTES + Tiles::Y_BYTES);
        tiles_load<Tiles::QK, Tiles::ROWS>(x, &maps.x, own, first, h, b);
        tiles_load<Tiles::HS, Tiles::ROWS>(y, &maps.y, own, first, h, b);
    }
    __device__ void fill(const BackwardMaps &maps, int stage, int first, int h, int b) {
        constexpr int N = Tiles::COLUMNS;
        uint64_t *full = ring.full + stage;
        mbarrier_expect(full, Tiles::U_BYTES + Tiles::W_BYTES);
        tiles_load<Tiles::QK, N>(u + stage * Tiles::U_BYTES, &maps.u, full, first, h, b);
        tiles_load<Tiles::HS, N>(w + stage * Tiles::W_BYTES, &maps.w, full, first, h, b);
    }
};

// A consumer's walk over the streamed tiles. For each, S (rows of x by rows of u) and dP (rows of y
// by rows of w) are computed; scores(s) makes S the probabilities while dP is under way; then
// products(s, dp, u, w) begins the sums with them. They end together with S of the next tile, or at
// once without OVERLAP.
template <typename Tiles> struct BackwardWalk {
    static constexpr int N = Tiles::COLUMNS;
    const BackwardShared<Tiles> &shared;
    const unsigned char *x, *y;    // this consumer's rows
    Ring<Tiles::STAGES> at = {0, 0}, before = {0, 0};
    bool begun = false;            // the tile before has products under way
    __device__ BackwardWalk(const BackwardShared<Tiles> &from, int group)
        : shared(from), x(from.x + group * GROUP_ROWS * TILE_ROW),
          y(from.y + group * GROUP_ROWS * TILE_ROW) {}

    template <typename Scores, typename Products>
    __device__ void tile(Scores scores, Products products) {
        const unsigned char *u = shared.u + at.stage * Tiles::U_BYTES;
        const unsigned char *w = shared.w + at.stage * Tiles::W_BYTES;
        float s[N / 2], dp[N / 2];
        mbarrier_wait(shared.ring.full + at.stage, at.parity);
        wgmma_fence();
        rows_by_rows<Tiles::QK, N>(s, x, Tiles::ROWS, u);
        wgmma_commit();
        rows_by_rows<Tiles::HS, N>(dp, y, Tiles::ROWS, w);
        wgmma_commit();
        wgmma_wait<1>();
        settle(s);
        if (begun) stage_release(shared.ring, before);
        scores(s);
        settle(s);
        mbarrier_wait(shared.ring.full + at.stage, at.parity);  // ptxas moves no wait above it
        wgmma_wait<0>();
        settle(dp);
        products(s, dp, u, w);
        wgmma_commit();
        if constexpr (Tiles::OVERLAP) begun = true, before = at;
        else {
            wgmma_wait<0>();
            stage_release(shared.ring, at);
        }
        at.next();
    }
    // A tile that the causal mask hides from all of these rows.
    __device__ void skip(void) {
        stage_skip(shared.ring, at);
        at.next();
    }
    __device__ void end(void) {
        wgmma_wait<0>();
        if (begun) stage_release(shared.ring, before);
    }
};

template <typename Tiles>
__global__ void __launch_bounds__(Tiles::THREADS, 1)
attention_dq_sm90_kernel(const __grid_constant__ BackwardMaps maps, const wide *lse, const wide *D,
                         AttentionShape s) {
#if SM90_CODE
    constexpr int KEYS = Tiles::COLUMNS;
    SHARED_TILES(tiles);
    BackwardShared<Tiles> shared(tiles);
    BlockPlace place = block_place<Tiles::ROWS, KEYS>(s);
    int b = place.b, begin = place.begin, end = place.end, group = warpgroup_index() - 1;
    shared.init();
    if (group < 0) {
        registers_give<24>();
        if (threadIdx.x > 0) return;
        shared.fill_own(maps, place.first, place.h, b);
        Ring<Tiles::STAGES> at = {0, 0};
        for (int i = begin; i < end; i++, at.next()) {
            mbarrier_wait(shared.ring.empty + at.stage, at.parity ^ 1);
            shared.fill(maps, at.stage, i * KEYS, place.g, b);
        }
        return;
    }
    registers_take<240>();
    int row0 = place.first + group * GROUP_ROWS, t = row0 + group_row();
    int own_end = row0 < s.T ? CEIL_DIV(min(row0 + GROUP_ROWS, s.T), KEYS) : begin;
    int last_begin = border_at(s.begins, b, row0 + GROUP_ROWS - 1, s.T, 0);  // of the last row
    float dq[Tiles::QK / 2], lse_t[2], D_t[2];
    UNROLL for (int i = 0; i < 2; i++) {
        int64_t row = (int64_t)head_of_block() * s.T + t + 8 * i;
        lse_t[i] = t + 8 * i < s.T ? lse[row] : 0;
        D_t[i] = t + 8 * i < s.T ? D[row] : 0;
    }
    BackwardWalk<Tiles> walk(shared, group);
    uint32_t ds[KEYS / 16][4];
    mbarrier_wait(shared.own, 0);
    for (int i = begin; i < own_end; i++)
        walk.tile(
            [&](float (&p)[KEYS / 2]) {
                if (i * KEYS + KEYS > row0) causal_mask<false>(p, -i * KEYS, t);
                if (i * KEYS < last_begin)
                    document_mask<false>(p, s.begins, b, s.T, t, i * KEYS);
                UNROLL for (int e = 0; e < KEYS / 2; e++)
                    p[e] = exp2_fast(fmaf(p[e], s.log2_scale, -lse_t[e / 2 % 2]));
            },
            [&](const float (&p)[KEYS / 2], float (&dp)[KEYS / 2], const unsigned char *u,
                const unsigned char *) {
                UNROLL for (int e = 0; e < KEYS / 2; e++)
                    dp[e] = p[e] * (dp[e] - D_t[e / 2 % 2]);
                sums_round<KEYS>(ds, dp);
                settle(ds);
                wgmma_fence();
                // dQ += dS K, scaled at the end
                sums_by_tile<Tiles::QK, KEYS>(dq, ds, u, i > begin);
            });
    walk.end();
    settle(dq);
    for (int i = own_end; i < end; i++) walk.skip();
    if (row0 >= s.T) return;
    rows_scale(dq, {s.scale, s.scale});
    group_store<Tiles::QK>(&maps.dx, shared.x + group * GROUP_ROWS * TILE_ROW, Tiles::ROWS, dq,
                           row0, place.h, b);
#endif
}

// lse and D of COLUMNS queries from `first` on, by one warp. From T on they are 0, and so are the
// rows of Q and dC: such queries add nothing.
template <int COLUMNS>
__device__ void saved_load(float *to, const wide *lse, const wide *D, int first, int T) {
    for (int i = threadIdx.x % WARP; i < COLUMNS; i += WARP) {
        to[i] = first + i < T ? lse[first + i] : 0;
        to[COLUMNS + i] = first + i < T ? D[first + i] : 0;
    }
}

// The grid and the walk over queries are those of attention_dkv_kernel.
template <typename Tiles>
__global__ void __launch_bounds__(Tiles::THREADS, 1)
attention_dkv_sm90_kernel(const __grid_constant__ BackwardMaps maps, const wide *lse, const wide *D,
                          AttentionShape s) {
#if SM90_CODE
    constexpr int QUERIES = Tiles::COLUMNS;
    SHARED_TILES(tiles);
    BackwardShared<Tiles> shared(tiles);
    int b = blockIdx.x / s.KV, g = blockIdx.x % s.KV, heads = s.NH / s.KV;
    int first = blockIdx.y * Tiles::ROWS;
    int end = border_at(s.ends, b, first + Tiles::ROWS - 1, s.T, s.T);
    int steps = CEIL_DIV(end - first, QUERIES);
    int group = warpgroup_index() - 1;
    shared.init();
    if (group < 0) {
        registers_give<24>();
        if (threadIdx.x >= WARP) return;
        if (threadIdx.x == 0) shared.fill_own(maps, first, g, b);
        Ring<Tiles::STAGES> at = {0, 0};
        for (int i = 0; i < heads * steps; i++, at.next()) {
            int h = g * heads + i / steps, query0 = first + i % steps * QUERIES;
            int64_t row0 = ((int64_t)b * s.NH + h) * s.T;
            mbarrier_wait(shared.ring.empty + at.stage, at.parity ^ 1);
            if (threadIdx.x == 0) shared.fill(maps, at.stage, query0, h, b);
            saved_load<QUERIES>(shared.lse + at.stage * Tiles::FLOATS, lse + row0, D + row0, query0,
                                s.T);
            mbarrier_arrive(shared.ring.full + at.stage);
        }
        return;
    }
    registers_take<240>();
    int row0 = first + group * GROUP_ROWS, row = row0 + group_row();
    int first_end = border_at(s.ends, b, row0, s.T, INT_MAX);  // of the first row's document
    float dk[Tiles::QK / 2] = {}, dv[Tiles::HS / 2] = {};
    settle(dk);
    settle(dv);
    uint32_t p_left[QUERIES / 16][4], ds_left[QUERIES / 16][4];
    BackwardWalk<Tiles> walk(shared, group);
    mbarrier_wait(shared.own, 0);
    for (int i = 0; i < heads * steps; i++) {
        int query0 = first + i % steps * QUERIES;
        if (row0 >= s.T || query0 + QUERIES <= row0) {
            walk.skip();
            continue;
        }
        const float *saved = shared.lse + walk.at.stage * Tiles::FLOATS + threadIdx.x % 4 * 2;
        walk.tile(
            [&](float (&p)[QUERIES / 2]) {
                if (query0 < row0 + GROUP_ROWS) causal_mask<true>(p, -query0, row);
                if (query0 + QUERIES > first_end)
                    document_mask<true>(p, s.ends, b, s.T, row, query0);
                UNROLL for (int e = 0; e < QUERIES / 2; e++) {
                    float lse_t = saved[e / 4 * 8 + e % 2];
                    p[e] = exp2_fast(fmaf(p[e], s.log2_scale, -lse_t));
                }
            },
            [&](const float (&p)[QUERIES / 2], float (&dp)[QUERIES / 2], const unsigned char *u,
                const unsigned char *w) {
                UNROLL for (int e = 0; e < QUERIES / 2; e++)
                    dp[e] = p[e] * (dp[e] - saved[QUERIES + e / 4 * 8 + e % 2]);
                sums_round<QUERIES>(p_left, p);
                sums_round<QUERIES>(ds_left, dp);
                settle(p_left);
                settle(ds_left);
                wgmma_fence();
                sums_by_tile<Tiles::HS, QUERIES>(dv, p_left, w, true);   // dV += P^T dC
                sums_by_tile<Tiles::QK, QUERIES>(dk, ds_left, u, true);  // dK += dS^T Q
            });
    }
    walk.end();
    settle(dk);
    settle(dv);
    if (row0 >= s.T) return;
    rows_scale(dk, {s.scale, s.scale});
    int own = group * GROUP_ROWS * TILE_ROW;
    group_store<Tiles::QK>(&maps.dx, shared.x + own, Tiles::ROWS, dk, row0, g, b);
    group_store<Tiles::HS>(&maps.dy, shared.y + own, Tiles::ROWS, dv, row0, g, b);
#endif
}

// --------------------------------------------------------------------------------------- launchers

// The sizes of heads that have kernels.
template <typename F> static bool forward_launch_sm90(int QK, int HS, F launch) {
    return head_launch<HeadSizes<64, 64>, HeadSizes<96, 96>, HeadSizes<128, 128>,
                       HeadSizes<192, 128>>(QK, HS, launch);
}
template <typename F> static bool backward_launch_sm90(int QK, int HS, F launch) {
    return head_launch<HeadSizes<64, 64>, HeadSizes<96, 96>, HeadSizes<128, 128>>(QK, HS, launch);
}

// Launches forward by wgmma; returns false, and launches nothing, if these heads have no kernel. A
// template, so that fp32 does not instantiate it.
template <typename T>
static bool attention_forward_sm90(T *c, wide *peak, wide *lse, const Heads qkv[3],
                                   AttentionShape s, Gpu *gpu) {
    return forward_launch_sm90(s.QK, s.HS, [&](auto sizes) {
        typedef ForwardTiles<sizes.QK, sizes.HS> Tiles;
        Heads c_heads = {c, s.NH * s.HS, s.HS};
        ForwardMaps maps = {heads_map(qkv[0], s.NH, s.QK, Tiles::QUERIES, s),
                            heads_map(qkv[1], s.KV, s.QK, Tiles::KEYS, s),
                            heads_map(qkv[2], s.KV, s.HS, Tiles::KEYS, s),
                            heads_map(c_heads, s.NH, s.HS, GROUP_ROWS, s)};
        dim3 grid = query_grid(CEIL_DIV(s.T, Tiles::QUERIES), s, gpu);
        LAUNCH(attention_forward_sm90_kernel<Tiles>, grid, Tiles::THREADS, Tiles::BYTES,
               gpu->stream, maps, peak, lse, s);
    });
}

// SETs d = {dq, dk, dv}, as attention_backward does.
template <typename T>
static bool attention_backward_sm90(const Heads d[3], wide *D, T *dc, const T *c, const wide *lse,
                                    const Heads qkv[3], AttentionShape s, Gpu *gpu) {
    return backward_launch_sm90(s.QK, s.HS, [&](auto sizes) {
        typedef BackwardTiles<sizes.QK, sizes.HS, false> Queries;
        typedef BackwardTiles<sizes.QK, sizes.HS, true> Keys;
        int64_t blocks = CEIL_DIV((int64_t)s.B * s.NH * s.T * 4, DOT_THREADS);
        LAUNCH(attention_dot_kernel, blocks, DOT_THREADS, 0, gpu->stream, D, dc, c, s);
        Heads dc_heads = {dc, s.NH * s.HS, s.HS};
        auto map = [&](Heads x, int heads, int size, int rows) {
            return heads_map(x, heads, size, rows, s);
        };
        unsigned tiles = CEIL_DIV(s.T, Keys::ROWS);
        dim3 keys(s.B * s.KV, tiles), queries = query_grid(tiles, s, gpu);
        BackwardMaps of_keys = {
            map(qkv[1], s.KV, s.QK, Keys::ROWS), map(qkv[2], s.KV, s.HS, Keys::ROWS),
            map(qkv[0], s.NH, s.QK, Keys::COLUMNS), map(dc_heads, s.NH, s.HS, Keys::COLUMNS),
            map(d[1], s.KV, s.QK, GROUP_ROWS), map(d[2], s.KV, s.HS, GROUP_ROWS)};
        LAUNCH(attention_dkv_sm90_kernel<Keys>, keys, Keys::THREADS, Keys::BYTES, gpu->stream,
               of_keys, lse, D, s);
        BackwardMaps of_queries = {
            map(qkv[0], s.NH, s.QK, Queries::ROWS), map(dc_heads, s.NH, s.HS, Queries::ROWS),
            map(qkv[1], s.KV, s.QK, Queries::COLUMNS),
            map(qkv[2], s.KV, s.HS, Queries::COLUMNS),
            map(d[0], s.NH, s.QK, GROUP_ROWS), map(d[0], s.NH, s.QK, GROUP_ROWS)};
        LAUNCH(attention_dq_sm90_kernel<Queries>, queries, Queries::THREADS, Queries::BYTES,
               gpu->stream, of_queries, lse, D, s);
    });
}
