// attention.cuh: causal self-attention as flash attention (Dao et al. 2022, Dao 2023): the T x T
// scores are never stored. Query heads share key and value heads in groups (grouped-query
// attention, Ainslie et al. 2023).
//
//   forward    S = scale Q K^T    P = softmax(S) over keys <= query    C = P V
//   backward   D = rowsum(dC * C)    P from S and lse    dP = dC V^T    dS = P * (dP - D)
//              dV = P^T dC    dQ = scale dS K    dK = scale dS^T Q
//
// Exponentials have base 2: lse = log2 sum_j e^(S_j) over the keys j of a row, and
// P = 2^(S log2(e) - lse). One multiplication, by log2_scale = scale log2(e), takes Q K^T to
// S log2(e).
//
//   q, k     [B T, NH, QK], [B T, KV, QK]    in rows of any pitch (Heads), as are their gradients
//   v        [B T, KV, HS]                   QK = HS except for latent attention
//   c, dc    [B T, NH, HS]
//   lse      [B, NH, T] float, saved for backward: log-sum-exp of each row of S, in base 2
//   peak     [B, NH, T] float: the largest score of each row of S, for statistics
//   D        [B, NH, T] float: scratch of backward
//   begins, ends    [B, T] int32: where a position's document begins and the next one does, in its
//            sequence (documents_find); nullptr: a sequence is one document
//
// Three kernels have one shape; a small fourth one computes D. A block of four warps (two in
// backward of heads of 192 in float) owns a tile of rows of one head, 16 or 32 rows a warp, and
// walks over tiles of columns of two matrices. While it works on one tile, the next is copied to
// the other half of a double buffer (cp.async). In bfloat16 a warp keeps as many of its rows in
// registers as fit there (OwnRows). Each result is written once, by one block: no atomics, one
// order of summation, the same bits in every run.
//
//             rows, kept   columns, streamed                    per tile
//   forward   Q            K, V of all keys up to the last row  S = Q K^T, online softmax, C += P V
//   dq        Q, dC        K, V of all keys up to the last row  S = Q K^T, dP = dC V^T, dQ += dS K
//   dkv       K, V         Q, dC of all queries from the first  S^T = K Q^T, dP^T = V dC^T,
//                          row on, of all heads of the group    dV += P^T dC, dK += dS^T Q
//
// The rows of the scores are the rows of the result. So the sums of one product, rounded, are the
// left operand of the next: the same registers of the same lanes (mma.cuh). This is why dkv works
// on S^T. Tiles above the diagonal are skipped, those on it masked. Blocks with the most tiles
// start first. With --mask-documents tiles of other documents are skipped too, and those that cross
// a border masked.
//
// Computed floors for GPT-2 in bf16 (B 64, T 1024, 12 heads of 64) at 790 TFLOP/s and 4.3 TB/s;
// half of T x T counts, a tensor has 101 MB:
//   forward    2 products, 103 GFLOP    0.130 ms    3 tensors read, 1 written    0.094 ms
//   D                                               2 tensors read               0.047 ms
//   backward   5 products, 258 GFLOP    0.326 ms    4 read, 3 written            0.164 ms
//   dq, dkv    3 + 4, 361 GFLOP         0.457 ms    4 read twice, 3 written      0.258 ms
//
// Backward has 5 products: S, dP, dV, dK and dQ. As two kernels, dq and dkv, it computes S and dP
// twice: 7 products. This avoids atomics, and partial sums of dQ in memory for each tile of keys.
// mma.sync reaches some 62 % of the tensor cores' rate on compute capability 9.0 (wgmma all of it),
// so the speed to expect is FlashAttention-2's. Tensor cores have no product of float's accuracy,
// so in float the same kernels use the ordinary multipliers.
#pragma once
#include "mma.cuh"

struct AttentionShape {
    int B, T, NH, KV, QK, HS;
    float scale, log2_scale;  // log2_scale = scale log2(e)
    const int32_t *begins, *ends;
};

static inline AttentionShape attention_shape(int B, int T, int NH, int KV, int QK, int HS,
                                             double scale) {
    return {B, T, NH, KV, QK, HS, (float)scale, (float)(scale * M_LOG2E), nullptr, nullptr};
}

// --------------------------------------------------------------------------------------- products
// The rows of a warp come in strips of 16. Lane = 4 * row + quad; mma.cuh draws a piece of 8 x 8.

// Sums of STRIPS * 16 rows and N columns: v[s][4 * n + 2 * i + j] belongs to row 16 s + 8 i + row
// and column 8 n + 2 quad + j. A product by wgmma has one strip (sm90.cuh), in the same order.
template <int STRIPS, int N> struct Strips { float v[STRIPS][N / 2]; };

// A left operand: 16 rows and columns. In float each element has its own register, in the order in
// which bf16 packs two.
template <typename T> struct Left;
template <> struct Left<__nv_bfloat16> { uint32_t r[4]; };
template <> struct Left<float> { float r[8]; };

// The place of the row that this lane gives to ldmatrix, of 16 rows and columns in memory. Their
// pieces come one below the other first (DOWN), or side by side.
template <bool DOWN, int PITCH> __device__ int piece_at(void) {
    int lane = threadIdx.x % WARP;
    if (DOWN) return lane % 16 * PITCH + lane / 16 * 8;
    return (lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 8;
}

// Loads a left operand whose element (0, 0) is at `tile` in shared memory. TRANSPOSED: its columns
// are rows there.
template <bool TRANSPOSED, int PITCH>
__device__ void left_load(Left<__nv_bfloat16> &a, const __nv_bfloat16 *tile) {
    ldmatrix<TRANSPOSED>(a.r, tile + piece_at<!TRANSPOSED, PITCH>());
}

template <bool TRANSPOSED, int PITCH> __device__ void left_load(Left<float> &a, const float *tile) {
    UNROLL for (int i = 0; i < 8; i++) {
        int row = threadIdx.x % WARP / 4 + i / 2 % 2 * 8;
        int column = i / 4 * 8 + 2 * (threadIdx.x % 4) + i % 2;
        a.r[i] = tile[TRANSPOSED ? column * PITCH + row : row * PITCH + column];
    }
}

// Makes a left operand of 16 columns of a strip of sums.
__device__ inline void left_round(uint32_t (&r)[4], const float *x) {
    UNROLL for (int i = 0; i < 4; i++) {
        __nv_bfloat162 two = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
        memcpy(&r[i], &two, 4);
    }
}

__device__ inline void left_round(float (&r)[8], const float *x) {
    UNROLL for (int i = 0; i < 8; i++) r[i] = x[i];
}

// d += a B for a B of 16 rows and N columns in shared memory. BY_ROWS: the rows of B begin at b,
// b + PITCH, ...; otherwise its columns do. One load of B serves all strips.
template <bool BY_ROWS, int PITCH, int STRIPS, int N>
__device__ void product(Strips<STRIPS, N> &d, const Left<__nv_bfloat16> (&a)[STRIPS],
                        const __nv_bfloat16 *b) {
    const __nv_bfloat16 *from = b + piece_at<BY_ROWS, PITCH>();
    UNROLL for (int n = 0; n < N / 16; n++) {
        uint32_t right[4];  // rows 0..7, 8..15 of columns 16 n to 16 n + 7, then of the next 8
        ldmatrix<BY_ROWS>(right, from + 16 * n * (BY_ROWS ? 1 : PITCH));
        UNROLL for (int s = 0; s < STRIPS; s++) {
            mma_bf16(d.v[s] + 8 * n, a[s].r, right);
            mma_bf16(d.v[s] + 8 * n + 4, a[s].r, right + 2);
        }
    }
}

template <bool BY_ROWS, int PITCH, int STRIPS, int N>
__device__ void product(Strips<STRIPS, N> &d, const Left<float> (&a)[STRIPS], const float *b) {
    int quad = threadIdx.x % 4;
    UNROLL for (int k = 0; k < 16; k++) {
        float left[STRIPS][2];  // column k of rows `row` and `row + 8`, from the lane that holds it
        UNROLL for (int s = 0; s < STRIPS; s++)
            UNROLL for (int i = 0; i < 2; i++) {
                float own = a[s].r[k / 8 * 4 + 2 * i + k % 2];
                left[s][i] = __shfl_sync(0xffffffffu, own, k % 8 / 2, 4);
            }
        UNROLL for (int n = 0; n < N / 8; n++)
            UNROLL for (int j = 0; j < 2; j++) {
                int column = 8 * n + 2 * quad + j;
                float right = BY_ROWS ? b[k * PITCH + column] : b[column * PITCH + k];
                UNROLL for (int s = 0; s < STRIPS; s++)
                    UNROLL for (int i = 0; i < 2; i++)
                        d.v[s][4 * n + 2 * i + j] += left[s][i] * right;
            }
    }
}

// ------------------------------------------------------------------------------------------ tiles

// A tile in shared memory has rows of SIZE elements, padded by 16 bytes, so that the 8 rows of a
// piece lie in different banks.
template <int SIZE> static constexpr int TILE_PITCH = SIZE + PACK;

// The rows of one head of one sequence.
struct HeadRows {
    const real *at;
    int64_t ld;
};

__device__ inline HeadRows head_rows(Heads x, int64_t b, int h, int T) {
    return {x.at + b * T * x.ld + h * x.head, x.ld};
}

// If QK == HS, v lies in rows of k's pitch, and one offset serves both. Otherwise v as it is.
template <typename Tiles> __device__ Heads beside(Heads v, Heads k) {
    return Tiles::QK == Tiles::HS ? Heads{v.at, k.ld, k.head} : v;
}

// Starts to copy rows first, first + 1, ... to a tile; rows from T on become zeros. A thread copies
// one column of 16 bytes (two in rows longer than 128) of every STEP-th row, so the next address is
// one addition away. If THREADS is not a multiple of the packs of a row, the last few threads idle.
template <int SIZE, int ROWS, int THREADS>
__device__ void tile_copy(real *tile, HeadRows x, int first, int T) {
    constexpr int WIDTH = SIZE > 128 ? 128 : SIZE, PACKS = WIDTH / PACK, STEP = THREADS / PACKS;
    int own = threadIdx.x / PACKS, column = threadIdx.x % PACKS * PACK;
    real *to = tile + own * TILE_PITCH<SIZE> + column;
    const real *from = x.at + (first + own) * x.ld + column;
    UNROLL for (int row = 0; row < ROWS;
                row += STEP, to += STEP * TILE_PITCH<SIZE>, from += STEP * x.ld) {
        if ((THREADS % PACKS && own >= STEP) || (ROWS % STEP && own + row >= ROWS)) continue;
        bool exists = first + own + row < T;
        copy_async(to, from, exists);
        if (SIZE > WIDTH && column < SIZE - WIDTH) copy_async(to + WIDTH, from + WIDTH, exists);
    }
}

// Half `step % 2` of the double buffer, filled by pair_copy.
template <typename Tiles> __device__ real *half_of(real *buffer, int step) {
    return buffer + step % 2 * Tiles::COLUMNS * Tiles::PITCHES;
}

// Starts to copy the same rows of two matrices, of QK and HS elements, to two adjacent tiles.
template <typename Tiles, int ROWS>
__device__ void pair_copy(real *to, HeadRows x, HeadRows y, int first, int T) {
    tile_copy<Tiles::QK, ROWS, Tiles::THREADS>(to, x, first, T);
    tile_copy<Tiles::HS, ROWS, Tiles::THREADS>(to + ROWS * TILE_PITCH<Tiles::QK>, y, first, T);
    copy_commit();
}

// The warp's rows in a tile, as left operands of 16 columns. bfloat16 keeps those of the first HELD
// columns in registers; the others pass through the last of `a`, loaded from shared memory each
// time. float keeps none: its sums leave no registers.
template <int SIZE, int STRIPS, int HELD> struct OwnRows {
    static constexpr int KEPT = sizeof(real) == 2 ? HELD / 16 : 0, PITCH = TILE_PITCH<SIZE>;
    const real *at;
    Left<real> a[KEPT + 1][STRIPS];
    __device__ void load(int k) {
        UNROLL for (int s = 0; s < STRIPS; s++)
            left_load<false, PITCH>(a[min(k, KEPT)][s], at + 16 * (s * PITCH + k));
    }
    // Once, when every thread has the tile.
    __device__ void keep(void) {
        UNROLL for (int k = 0; k < KEPT; k++) load(k);
    }
};

// d += X Y^T: rows of the warp by rows of a tile.
template <int SIZE, int STRIPS, int HELD, int N>
__device__ void rows_by_rows(Strips<STRIPS, N> &d, OwnRows<SIZE, STRIPS, HELD> &x, const real *y) {
    UNROLL for (int k = 0; k < SIZE / 16; k++) {
        if (k >= x.KEPT) x.load(k);
        product<false, TILE_PITCH<SIZE>>(d, x.a[min(k, x.KEPT)], y + 16 * k);
    }
}

// d += P Y: sums, rounded to the storage type, by a tile.
template <int SIZE, int STRIPS, int N>
__device__ void sums_by_tile(Strips<STRIPS, SIZE> &d, const Strips<STRIPS, N> &p, const real *y) {
    UNROLL for (int k = 0; k < N; k += 16) {
        Left<real> a[STRIPS];
        UNROLL for (int s = 0; s < STRIPS; s++) left_round(a[s].r, p.v[s] + k / 2);
        product<true, TILE_PITCH<SIZE>>(d, a, y + k * TILE_PITCH<SIZE>);
    }
}

// Causal mask of a strip: S = -infinity if the key comes after the query. Rows are queries, or keys
// if KEYS_IN_ROWS. Row 0 is `lead` positions after column 0; row: this lane's first.
template <bool KEYS_IN_ROWS, int N>
__device__ void causal_mask(float (&s)[N], int lead, int row) {
    int quad = threadIdx.x % 4;
    UNROLL for (int i = 0; i < N; i++) {
        // How many positions the column is ahead of the row.
        int ahead = i / 4 * 8 + 2 * quad + i % 2 - (i / 2 % 2 * 8 + row + lead);
        if (KEYS_IN_ROWS ? ahead < 0 : ahead > 0) s[i] = -INFINITY;
    }
}

// The same for a warp's strips. Tiles off the diagonal need no mask.
template <bool KEYS_IN_ROWS, int STRIPS, int N>
__device__ void mask(Strips<STRIPS, N> &p, int lead) {
    int row = threadIdx.x % WARP / 4;
    if (KEYS_IN_ROWS ? lead <= 1 - 16 * STRIPS : lead >= N - 1) return;
    UNROLL for (int s = 0; s < STRIPS; s++) causal_mask<KEYS_IN_ROWS>(p.v[s], lead, 16 * s + row);
}

// The border of the document of position t: `begins` or `ends`; `none` without documents.
__device__ inline int border_at(const int32_t *borders, int b, int t, int T, int none) {
    return borders ? borders[(int64_t)b * T + min(t, T - 1)] : none;
}

// Documents' mask of a strip: S = -infinity where query and key lie in different documents. With
// queries in rows it hides keys before the query's `begins`; with keys in rows (KEYS_IN_ROWS) it
// hides queries from the key's `ends` on. row, column0: positions of this lane's first row and of
// column 0.
template <bool KEYS_IN_ROWS, int N>
__device__ void document_mask(float (&s)[N], const int32_t *borders, int b, int T, int row,
                              int column0) {
    int border[2], quad = threadIdx.x % 4;
    UNROLL for (int i = 0; i < 2; i++)
        border[i] = border_at(borders, b, row + 8 * i, T, 0) - column0;
    UNROLL for (int i = 0; i < N; i++) {
        int column = i / 4 * 8 + 2 * quad + i % 2, at = border[i / 2 % 2];
        if (KEYS_IN_ROWS ? column >= at : column < at) s[i] = -INFINITY;
    }
}

// The same for a warp's strips of keys. begin: where the document of query `lane` of the tile
// begins; p has the queries from `first` on. It takes fewer registers than document_mask.
template <int STRIPS, int N>
__device__ void mask_queries(Strips<STRIPS, N> &p, int begin, int row0, int first) {
    int row = row0 + threadIdx.x % WARP / 4, quad = threadIdx.x % 4;
    UNROLL for (int n = 0; n < N / 8; n++)
        UNROLL for (int j = 0; j < 2; j++) {
            int begin_t = __shfl_sync(0xffffffffu, begin, first + 8 * n + 2 * quad + j);
            UNROLL for (int s = 0; s < STRIPS; s++)
                UNROLL for (int i = 0; i < 2; i++)
                    if (row + 16 * s + 8 * i < begin_t) p.v[s][4 * n + 2 * i + j] = -INFINITY;
        }
}

template <int STRIPS, int N> __device__ void scale_by(Strips<STRIPS, N> &x, float scale) {
    UNROLL for (int s = 0; s < STRIPS; s++)
        UNROLL for (int i = 0; i < N / 2; i++) x.v[s][i] *= scale;
}

// Writes the warp's sums to memory: at most `rows` rows and `columns` columns. They pass through
// the warp's own rows of a tile no longer in use, so that lanes write 16 bytes side by side.
template <int SIZE, int STRIPS>
__device__ void rows_store(real *to, int64_t ld, int rows, real *tile,
                           const Strips<STRIPS, SIZE> &x, int columns = SIZE) {
    struct alignas(2 * sizeof(real)) Two { real v[2]; };
    constexpr int PITCH = TILE_PITCH<SIZE>;
    int lane = threadIdx.x % WARP;
    __syncwarp();
    UNROLL for (int s = 0; s < STRIPS; s++)
        UNROLL for (int n = 0; n < SIZE / 8; n++)
            UNROLL for (int i = 0; i < 2; i++) {
                const float *from = &x.v[s][4 * n + 2 * i];
                Two two = {{to_real(from[0]), to_real(from[1])}};
                int row = 16 * s + 8 * i + lane / 4, column = 8 * n + 2 * (lane % 4);
                *reinterpret_cast<Two *>(tile + row * PITCH + column) = two;
            }
    __syncwarp();
    // Lanes take rows and columns as threads do in tile_copy.
    constexpr int WIDTH = SIZE > WARP * PACK ? WARP * PACK : SIZE;
    constexpr int PACKS = WIDTH / PACK, STEP = WARP / PACKS;
    int own = lane / PACKS, column = lane % PACKS * PACK;
    if (WARP % PACKS && own >= STEP) return;
    to += own * ld;
    UNROLL for (int row = own; row < own + 16 * STRIPS; row += STEP, to += STEP * ld)
        UNROLL for (int at = 0; at < SIZE; at += WIDTH) {
            if (row < rows && column + at < columns &&
                (16 * STRIPS % STEP == 0 || row < 16 * STRIPS)) {
                pack_store(to + column + at, pack_load(tile + row * PITCH + column + at));
            }
        }
}

// The same for the rows from row0 on of head h of sequence b.
template <int SIZE, int STRIPS>
__device__ void head_store(Heads x, int64_t b, int h, int row0, int T, real *tile,
                           const Strips<STRIPS, SIZE> &sums) {
    rows_store(x.at + (b * T + row0) * x.ld + h * x.head, x.ld, T - row0, tile, sums);
}

// ------------------------------------------------------------------------------------------ sizes

// Tiles of forward or backward that fit into 255 registers a thread, and into the 99 KiB of shared
// memory per block that every GPU from compute capability 8.0 on has.
template <int QK_SIZE, int HS_SIZE, bool BACK> struct AttentionTiles {
    static constexpr int QK = QK_SIZE, HS = HS_SIZE;
    static constexpr bool SMALL = QK <= 64, BF16 = sizeof(real) == 2;
    static constexpr int WARPS = BACK && !BF16 && QK > 128 ? 2 : 4;
    static constexpr int STRIPS = BF16 && (SMALL || !BACK) ? 2 : 1;
    static constexpr int COLUMNS = (BF16 || SMALL ? 32 : 16) * (BF16 && SMALL && !BACK ? 2 : 1);
    static constexpr int THREADS = WARPS * WARP, OWN_ROWS = 16 * STRIPS, ROWS = WARPS * OWN_ROWS;
    static constexpr int PITCHES = TILE_PITCH<QK> + TILE_PITCH<HS>;
    // Forward keeps the rows of Q, backward of two matrices.
    static constexpr int KEPT = BACK ? PITCHES : TILE_PITCH<QK>;
    static constexpr size_t BYTES = sizeof(real) * (KEPT * ROWS + PITCHES * 2 * COLUMNS);
    static_assert(BYTES <= 99 << 10, "smaller tiles");
};

// ---------------------------------------------------------------------------------------- forward

// For this lane's two rows of a strip: the largest score so far, times log2_scale, and this lane's
// part of the sum of 2^(score - max). max begins finite: a query may see no key of the first tile,
// if its document begins later.
struct RunningSoftmax { float max[2] = {-FLT_MAX, -FLT_MAX}, sum[2] = {}; };

// Online softmax of one tile: s, Q K^T, becomes 2^(s * scale - max), where scale is log2_scale.
// shrink: what earlier sums are to be multiplied by.
template <int N>
__device__ void softmax_update(RunningSoftmax &m, float (&s)[N], float (&shrink)[2], float scale) {
    UNROLL for (int i = 0; i < 2; i++) {
        float largest = -INFINITY;
        UNROLL for (int n = 2 * i; n < N; n += 4) largest = fmaxf(largest, fmaxf(s[n], s[n + 1]));
        float now = fmaxf(m.max[i], scale * warp_max(largest, 4));
        shrink[i] = exp2_fast(m.max[i] - now);
        m.max[i] = now;
        m.sum[i] *= shrink[i];
        UNROLL for (int n = 2 * i; n < N; n += 4)
            UNROLL for (int j = n; j < n + 2; j++) {
                s[j] = exp2_fast(fmaf(s[j], scale, -now));
                m.sum[i] += s[j];
            }
    }
}

template <int N> __device__ void rows_scale(float (&c)[N], const float (&factor)[2]) {
    UNROLL for (int i = 0; i < N; i++) c[i] *= factor[i / 2 % 2];
}

// The head of a block in forward and dq, counted over all sequences. The grid is query_grid's.
__device__ inline int head_of_block() { return blockIdx.z * gridDim.x + blockIdx.x; }

// After the last tile: a strip's sums P V become rows of C. t: this lane's first row. The first of
// the four lanes that share a row stores lse, and as peak the row's largest score, max ln 2. fmaxf
// drops a NaN and the sum keeps it, so peak is total then.
template <int N>
__device__ void softmax_end(const RunningSoftmax &m, float (&c)[N], wide *peak, wide *lse, int t,
                            int T) {
    float inverse[2];
    UNROLL for (int i = 0; i < 2; i++) {
        float total = warp_sum(m.sum[i], 4);
        inverse[i] = 1 / total;
        if (threadIdx.x % 4 || t + 8 * i >= T) continue;
        int64_t row = (int64_t)head_of_block() * T + t + 8 * i;
        lse[row] = m.max[i] + log2f(total);
        peak[row] = total == total ? m.max[i] * 0.693147181f : total;
    }
    rows_scale(c, inverse);
}

// A block's tile of queries in forward and dq. A head's last tiles start first.
struct QueryTile {
    int b, h, first;   // sequence, head, first row
    int own, row0;     // first row of the warp, in the tile and in the sequence
    int first_key;     // that a query of the tile sees
    HeadRows k, v;     // of the query head's kv head
};

template <typename Tiles> __device__ QueryTile query_tile(Heads k, Heads v, AttentionShape s) {
    int b = head_of_block() / s.NH, h = head_of_block() % s.NH, g = h / (s.NH / s.KV);
    int own = threadIdx.x / WARP * Tiles::OWN_ROWS;
    int first = (gridDim.y - 1 - blockIdx.y) * Tiles::ROWS;
    HeadRows k_g = head_rows(k, b, g, s.T), v_g = head_rows(beside<Tiles>(v, k), b, g, s.T);
    int first_key = border_at(s.begins, b, first, s.T, 0);
    return {b, h, first, own, first + own, first_key, k_g, v_g};
}

// Walks over the tiles of keys from the first that a query sees up to the last query. Own rows are
// kept once their copies are complete. Calls use(k_tile, v_tile, key0) for each tile that the
// causal mask does not hide from the whole warp; key0: the tile's first key.
template <typename Tiles, typename Use, typename... Own>
__device__ void walk_keys(const QueryTile &t, real *buffer, int T, Use use, Own &...own) {
    constexpr int COLUMNS = Tiles::COLUMNS;
    int first_tile = t.first_key / COLUMNS;
    int end_tile = CEIL_DIV(min(t.first + Tiles::ROWS, T), COLUMNS);
    auto begin = [&](int step) {
        pair_copy<Tiles, COLUMNS>(half_of<Tiles>(buffer, step), t.k, t.v, step * COLUMNS, T);
    };
    begin(first_tile);
    copy_wait<0>();
    __syncthreads();  // every thread has the tiles of queries
    (own.keep(), ...);
    for (int step = first_tile; step < end_tile; step++) {
        copy_wait<0>();
        __syncthreads();  // every thread has this tile, and is done with the one before
        if (step + 1 < end_tile) begin(step + 1);
        int key0 = step * COLUMNS;
        if (t.row0 >= T || key0 >= t.row0 + Tiles::OWN_ROWS) continue;  // nothing to add
        const real *k_tile = half_of<Tiles>(buffer, step);
        use(k_tile, k_tile + COLUMNS * TILE_PITCH<Tiles::QK>, key0);
    }
}

// Both masks of a warp's scores, of queries in rows and keys from key0 on. The border is loaded
// again for each tile: no register is left to keep it.
template <int STRIPS, int N>
__device__ void mask_keys(Strips<STRIPS, N> &p, const QueryTile &t, int key0, AttentionShape s) {
    int row = t.row0 + threadIdx.x % WARP / 4;
    mask<false>(p, t.row0 - key0);
    if (!s.begins) return;
    // The tile needs no mask if even the warp's last document begins at its first key or before.
    if (key0 < border_at(s.begins, t.b, t.row0 + 16 * STRIPS - 1, s.T, 0))
        UNROLL for (int i = 0; i < STRIPS; i++)
            document_mask<false>(p.v[i], s.begins, t.b, s.T, row + 16 * i, key0);
    __syncwarp();  // the products need the whole warp
}

template <typename Tiles>
__global__ void __launch_bounds__(Tiles::THREADS, 2)
attention_forward_kernel(real *c, wide *peak, wide *lse, Heads q, Heads k, Heads v,
                         AttentionShape s) {
    constexpr int QK = Tiles::QK, HS = Tiles::HS, PITCH = TILE_PITCH<QK>;
    constexpr int STRIPS = Tiles::STRIPS, ROWS = Tiles::ROWS;
    SHARED_DYNAMIC(real, q_tile);
    int lane = threadIdx.x % WARP;
    QueryTile tile = query_tile<Tiles>(k, v, s);
    real *q_rows = q_tile + tile.own * PITCH, *buffer = q_tile + ROWS * PITCH;
    Strips<STRIPS, HS> sums = {};
    RunningSoftmax m[STRIPS];

    HeadRows q_h = head_rows(q, tile.b, tile.h, s.T);
    tile_copy<QK, ROWS, Tiles::THREADS>(q_tile, q_h, tile.first, s.T);
    // Columns of Q that stay in registers: all up to 64, 32 of longer heads, none of 192.
    constexpr int LONG = QK > 128 ? 0 : 32, HELD = QK <= 64 ? QK : LONG;
    OwnRows<QK, STRIPS, HELD> own_q = {q_rows, {}};
    walk_keys<Tiles>(tile, buffer, s.T, [&](auto k_tile, auto v_tile, int key0) {
        Strips<STRIPS, Tiles::COLUMNS> p = {};
        rows_by_rows(p, own_q, k_tile);  // Q K^T
        mask_keys(p, tile, key0, s);
        UNROLL for (int i = 0; i < STRIPS; i++) {
            float shrink[2];
            softmax_update(m[i], p.v[i], shrink, s.log2_scale);
            rows_scale(sums.v[i], shrink);
        }
        sums_by_tile(sums, p, v_tile);  // C += P V
    }, own_q);
    UNROLL for (int i = 0; i < STRIPS; i++)
        softmax_end(m[i], sums.v[i], peak, lse, tile.row0 + 16 * i + lane / 4, s.T);
    head_store({c, s.NH * HS, HS}, tile.b, tile.h, tile.row0, s.T, q_rows, sums);
}

// --------------------------------------------------------------------------------------- backward

enum { DOT_THREADS = 128 };

// D = rowsum(dC * C): four lanes per row of a head, 16 bytes each.
static __global__ void __launch_bounds__(DOT_THREADS)
attention_dot_kernel(wide *D, const real *dc, const real *c, AttentionShape s) {
    int64_t row = grid_thread() / 4, bh = row / s.T, t = row % s.T;
    bool live = bh < (int64_t)s.B * s.NH;
    int64_t at = ((bh / s.NH * s.T + t) * s.NH + bh % s.NH) * s.HS;
    float sum = 0;
    for (int x = threadIdx.x % 4 * PACK; live && x < s.HS; x += 4 * PACK) {
        Floats dc_x = floats_load(dc + at + x), c_x = floats_load(c + at + x);
        for (int i = 0; i < PACK; i++) sum += dc_x.v[i] * c_x.v[i];
    }
    sum = warp_sum(sum, 4);
    if (live && threadIdx.x % 4 == 0) D[row] = sum;
}

// The inputs of both backward kernels.
struct AttentionSaved {
    Heads dc, q, k, v;
    const wide *lse, *D;
};

template <typename Tiles>
__global__ void __launch_bounds__(Tiles::THREADS, 2)
attention_dq_kernel(Heads dq, AttentionSaved a, AttentionShape s) {
    constexpr int QK = Tiles::QK, PITCH = TILE_PITCH<QK>, HS = Tiles::HS, C_PITCH = TILE_PITCH<HS>;
    constexpr int STRIPS = Tiles::STRIPS, COLUMNS = Tiles::COLUMNS, ROWS = Tiles::ROWS;
    SHARED_DYNAMIC(real, q_tile);
    QueryTile tile = query_tile<Tiles>(a.k, a.v, s);
    real *dc_tile = q_tile + ROWS * PITCH, *buffer = dc_tile + ROWS * C_PITCH;
    real *q_rows = q_tile + tile.own * PITCH, *dc_rows = dc_tile + tile.own * C_PITCH;
    Strips<STRIPS, QK> sums = {};
    float lse[STRIPS][2], D[STRIPS][2];

    HeadRows q_h = head_rows(a.q, tile.b, tile.h, s.T), dc_h = head_rows(a.dc, tile.b, tile.h, s.T);
    pair_copy<Tiles, ROWS>(q_tile, q_h, dc_h, tile.first, s.T);
    UNROLL for (int i = 0; i < 2 * STRIPS; i++) {
        int t = tile.row0 + 8 * i + threadIdx.x % WARP / 4;
        int64_t row = (int64_t)head_of_block() * s.T + t;
        lse[i / 2][i % 2] = t < s.T ? a.lse[row] : 0;
        D[i / 2][i % 2] = t < s.T ? a.D[row] : 0;
    }
    OwnRows<QK, STRIPS, QK> own_q = {q_rows, {}};
    OwnRows<HS, STRIPS, HS> own_dc = {dc_rows, {}};
    walk_keys<Tiles>(tile, buffer, s.T, [&](auto k_tile, auto v_tile, int key0) {
        Strips<STRIPS, COLUMNS> p = {}, ds = {};
        rows_by_rows(p, own_q, k_tile);    // Q K^T
        rows_by_rows(ds, own_dc, v_tile);  // dP = dC V^T
        mask_keys(p, tile, key0, s);
        UNROLL for (int m = 0; m < STRIPS; m++)
            UNROLL for (int i = 0; i < COLUMNS / 2; i++) {
                float p_i = exp2_fast(fmaf(p.v[m][i], s.log2_scale, -lse[m][i / 2 % 2]));
                ds.v[m][i] = p_i * (ds.v[m][i] - D[m][i / 2 % 2]);
            }
        sums_by_tile(sums, ds, k_tile);  // dQ += dS K, scaled at the end
    }, own_q, own_dc);
    scale_by(sums, s.scale);
    head_store(dq, tile.b, tile.h, tile.row0, s.T, q_rows, sums);
}

// Q K^T and dP of the columns from `first` on of one tile, keys in rows, become P and dS. Lane i
// holds lse and D of query i. scale: log2_scale.
template <int STRIPS, int N>
__device__ void scores_backward(Strips<STRIPS, N> &p, Strips<STRIPS, N> &ds, float lse, float D,
                                float scale, int first) {
    UNROLL for (int n = 0; n < N / 8; n++)
        UNROLL for (int j = 0; j < 2; j++) {
            int column = first + 8 * n + 2 * (threadIdx.x % 4) + j;
            float lse_t = __shfl_sync(0xffffffffu, lse, column);
            float D_t = __shfl_sync(0xffffffffu, D, column);
            UNROLL for (int s = 0; s < STRIPS; s++)
                UNROLL for (int i = 4 * n + j; i < 4 * n + 4; i += 2) {
                    p.v[s][i] = exp2_fast(fmaf(p.v[s][i], scale, -lse_t));
                    ds.v[s][i] = p.v[s][i] * (ds.v[s][i] - D_t);
                }
        }
}

// The grid is (kv head of a sequence, tile of keys). A block walks over the query heads of the
// group, one after the other, and for each over the queries up to the end of the last key's
// document. Queries from T on are rows of zeros with lse and D 0: they add nothing.
template <typename Tiles>
__global__ void __launch_bounds__(Tiles::THREADS, 2)
attention_dkv_kernel(Heads dk, Heads dv, AttentionSaved a, AttentionShape s) {
    constexpr int QK = Tiles::QK, PITCH = TILE_PITCH<QK>, HS = Tiles::HS, V_PITCH = TILE_PITCH<HS>;
    constexpr int STRIPS = Tiles::STRIPS, COLUMNS = Tiles::COLUMNS;
    constexpr int OWN_ROWS = Tiles::OWN_ROWS, ROWS = Tiles::ROWS;
    // Columns of K that stay in registers. If all of V's do too, N queries at a time fit.
    constexpr bool WIDE = QK > 128, PARTS = Tiles::BF16 && STRIPS == 1 && !WIDE;
    constexpr int HELD = PARTS ? QK - 32 : 32, N = PARTS ? 16 : COLUMNS;
    static_assert(COLUMNS <= WARP, "a lane has one query's lse and D");
    SHARED_DYNAMIC(real, k_tile);
    int own = threadIdx.x / WARP * OWN_ROWS;  // first row of the warp in the tile
    real *v_tile = k_tile + ROWS * PITCH, *buffer = v_tile + ROWS * V_PITCH;
    real *k_rows = k_tile + own * PITCH, *v_rows = v_tile + own * V_PITCH;
    int b = blockIdx.x / s.KV, g = blockIdx.x % s.KV, heads = s.NH / s.KV;
    int first = blockIdx.y * ROWS, row0 = first + own;
    // Queries up to the end of the last key's document.
    int tiles = CEIL_DIV(border_at(s.ends, b, first + ROWS - 1, s.T, s.T) - first, COLUMNS);
    Strips<STRIPS, QK> dk_sums = {};
    Strips<STRIPS, HS> dv_sums = {};
    int h = g * heads, next = first;  // of the coming step: its head and its first query
    auto begin = [&](int step) {
        HeadRows q_h = head_rows(a.q, b, h, s.T), dc_h = head_rows(a.dc, b, h, s.T);
        pair_copy<Tiles, COLUMNS>(half_of<Tiles>(buffer, step), q_h, dc_h, next, s.T);
    };

    HeadRows k_g = head_rows(beside<Tiles>(a.k, a.q), b, g, s.T);
    HeadRows v_g = head_rows(beside<Tiles>(a.v, a.q), b, g, s.T);
    pair_copy<Tiles, ROWS>(k_tile, k_g, v_g, first, s.T);
    begin(0);
    OwnRows<QK, STRIPS, WIDE ? 0 : HELD> own_k = {k_rows, {}};
    OwnRows<HS, STRIPS, PARTS ? HS : 0> own_v = {v_rows, {}};
    copy_wait<0>();
    __syncthreads();  // every thread has the tiles of keys
    own_k.keep(), own_v.keep();
    for (int step = 0; step < heads * tiles; step++) {
        int query0 = next, t = query0 + threadIdx.x % WARP;
        int64_t row = ((int64_t)b * s.NH + h) * s.T + t;
        float lse = t < s.T ? a.lse[row] : 0, D = t < s.T ? a.D[row] : 0;
        next += COLUMNS;
        if (next >= first + tiles * COLUMNS) next = first, h++;
        copy_wait<0>();
        __syncthreads();  // every thread has this tile, and is done with the one before
        if (step + 1 < heads * tiles) begin(step + 1);
        if (row0 >= s.T || query0 + COLUMNS <= row0) continue;  // nothing to add
        const real *q_tile = half_of<Tiles>(buffer, step);
        const real *dc_tile = q_tile + COLUMNS * PITCH;
        UNROLL for (int at = 0; at < COLUMNS; at += N) {
            const real *q_part = q_tile + at * PITCH, *dc_part = dc_tile + at * V_PITCH;
            Strips<STRIPS, N> p = {}, ds = {};
            rows_by_rows(p, own_k, q_part);    // K Q^T
            rows_by_rows(ds, own_v, dc_part);  // dP^T = V dC^T
            mask<true>(p, row0 - query0 - at);
            if (s.begins) {
                mask_queries(p, border_at(s.begins, b, t, s.T, 0), row0, at);
                __syncwarp();  // the products need the whole warp
            }
            scores_backward(p, ds, lse, D, s.log2_scale, at);
            sums_by_tile(dv_sums, p, dc_part);  // dV += P^T dC
            sums_by_tile(dk_sums, ds, q_part);  // dK += dS^T Q, scaled at the end
        }
    }
    scale_by(dk_sums, s.scale);
    head_store(dk, b, g, row0, s.T, k_rows, dk_sums);
    head_store(beside<Tiles>(dv, dk), b, g, row0, s.T, v_rows, dv_sums);
}

// -------------------------------------------------------------------------------------- launchers

template <int QK_SIZE, int HS_SIZE> struct HeadSizes {
    static constexpr int QK = QK_SIZE, HS = HS_SIZE;
};

// Calls launch with the one of these sizes that fits; returns false if none does.
template <typename First, typename... Others, typename F>
static bool head_launch(int QK, int HS, F launch) {
    if (QK == First::QK && HS == First::HS) return launch(First()), true;
    if constexpr (sizeof...(Others) > 0) return head_launch<Others...>(QK, HS, launch);
    return false;
}

// The head sizes that have kernels; the last three serve latent attention.
template <typename F> static void attention_launch(int QK, int HS, F launch) {
    bool found = head_launch<HeadSizes<32, 32>, HeadSizes<48, 48>, HeadSizes<64, 64>,
                             HeadSizes<96, 96>, HeadSizes<128, 128>, HeadSizes<48, 32>,
                             HeadSizes<96, 64>, HeadSizes<192, 128>>(QK, HS, launch);
    CHECK(found || QK == HS,
          "expected heads of 32, 64 or 128 with a --rope-size of half that on the GPU, "
          "found %d and %d\n  -> other --head-size or --rope-size, or make train_gpt DEVICE=cpu",
          HS, QK - HS);
    CHECK(found,
          "expected heads of 32, 48, 64, 96 or 128 on the GPU, found %d\n"
          "  -> --head-size, or make train_gpt DEVICE=cpu", HS);
}

// The longest sequence that the kernels take: a grid has at most 65,535 tiles of rows along y.
// Refuses heads that have no kernels.
static inline int attention_longest(int QK, int HS) {
    int rows = 0;
    attention_launch(QK, HS, [&](auto sizes) {
        rows = AttentionTiles<sizes.QK, sizes.HS, true>::ROWS;  // forward's are at least as many
    });
    return 65535 * rows;
}

// The grid (heads of a group, tiles of queries, groups); blocks start in this order. The keys and
// values of a group take at most a third of the L2 cache, and stay there while its tiles need them:
// on an H100 forward takes 0.90 of the time that it takes with all heads in one group.
static inline dim3 query_grid(unsigned tiles, AttentionShape s, const Gpu *gpu) {
    size_t bytes = (size_t)s.T * (s.QK + s.HS) * sizeof(real);
    int heads = s.B * s.NH, group = heads;
    while (group > 1 && (group * bytes > gpu->l2_bytes / 3 || heads % group)) group--;
    if (heads / group > 65535) group = heads;    // a grid has no more along z
    return dim3(group, tiles, heads / group);
}

static inline void attention_forward(real *c, wide *peak, wide *lse, const Heads qkv[3],
                                     AttentionShape s, Gpu *gpu) {
    attention_launch(s.QK, s.HS, [&](auto sizes) {
        typedef AttentionTiles<sizes.QK, sizes.HS, false> Tiles;
        dim3 grid = query_grid(CEIL_DIV(s.T, Tiles::ROWS), s, gpu);
        LAUNCH(attention_forward_kernel<Tiles>, grid, Tiles::THREADS, Tiles::BYTES, gpu->stream, c,
               peak, lse, qkv[0], qkv[1], qkv[2], s);
    });
}

// SETs d = {dq, dk, dv}; none of them may be the memory of q, k or v. D is scratch.
static inline void attention_backward(const Heads d[3], wide *D, real *dc, const real *c,
                                      const wide *lse, const Heads qkv[3], AttentionShape s,
                                      Gpu *gpu) {
    int64_t blocks = CEIL_DIV((int64_t)s.B * s.NH * s.T * 4, DOT_THREADS);
    LAUNCH(attention_dot_kernel, blocks, DOT_THREADS, 0, gpu->stream, D, dc, c, s);
    AttentionSaved a = {{dc, s.NH * s.HS, s.HS}, qkv[0], qkv[1], qkv[2], lse, D};
    attention_launch(s.QK, s.HS, [&](auto sizes) {
        typedef AttentionTiles<sizes.QK, sizes.HS, true> Tiles;
        unsigned tiles = CEIL_DIV(s.T, Tiles::ROWS);
        dim3 keys(s.B * s.KV, tiles), queries = query_grid(tiles, s, gpu);
        LAUNCH(attention_dkv_kernel<Tiles>, keys, Tiles::THREADS, Tiles::BYTES, gpu->stream, d[1],
               d[2], a, s);
        LAUNCH(attention_dq_kernel<Tiles>, queries, Tiles::THREADS, Tiles::BYTES, gpu->stream,
               d[0], a, s);
    });
}
