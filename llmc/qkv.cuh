// qkv.cuh: between the fused q|k|v product and attention: the norms of q, k and v (norm.cuh) and rotary positions, in one kernel each way.
//
// Rows are [q: NH heads | k: KV heads | v: KV heads] of HS values. For each part of a row, q, k and v:
//   with a norm       normed = rope(N(raw))                    draw = N'(rope^-1(dnormed); raw), gradients of gains and biases ADDed
//   without           raw = rope(raw), in place                draw = rope^-1(draw), in place
// RoPE (Su et al. 2021), half-split: the pair (x_i, x_(i + HS/2)) of every head of q and k turns by t theta^(-2i/HS); v is not turned. Where a part has
// neither norm nor rope nothing is touched. Statistics run over each head (a gain of HS, shared by the heads) or over the full part.
//
// A team of threads (norm.cuh) takes a head, or a full part; a thread holds both packs of each of its pairs, so rotating needs no exchange.
// Values moved per value of q, k (v), and the computed floor at 4.3 TB/s in bf16 for n = 32768, NH = KV = 12, HS = 128 (q and k: 3072 values a row):
//   rope alone  forward 2, backward 2    0.094 ms each       norm and rope  forward 2 (raw; normed)  0.094,  backward 3 (dnormed, raw; draw)  0.140 ms
// The table of angles is read from the caches: the heads of a row, neighbours in a block, share its 8 HS / 2 bytes.
#pragma once
#include <limits.h>
#include <math.h>
#include "norm.cuh"

typedef struct QkvShape {
    int B, T, NH, KV, HS;
    const float2 *rotary;                                      // [T, HS / 2] (cos, sin); nullptr without RoPE
} QkvShape;

// The table, computed in double on the host.
static inline void rotary_table(float2 *host, int T, int HS, double theta) {
    for (int t = 0; t < T; t++)
        for (int i = 0; i < HS / 2; i++) {
            double angle = t * pow(theta, -2.0 * i / HS);
            host[(int64_t)t * (HS / 2) + i] = {(float)cos(angle), (float)sin(angle)};
        }
}

// ------------------------------------------------------------------------------------------------------------------ parts

// q, k or v as the kernels walk it: `groups` lines of `width` values a row, beginning at `offset`. Blocks are shared out: `chunks` for each part in turn,
// none for a part without work. partial: where this part's sums for gain and bias go (backward).
typedef struct QkvPart {
    Norm norm;
    int offset, groups, width, rotate, chunks;
    float *partial;
} QkvPart;

typedef struct QkvParts {
    QkvPart of[3];
    QkvShape s;
    int ld, pairs;                                             // length of a row; pairs of packs in the widest line
} QkvParts;

enum { QKV_CHUNKS = 1024 };                                    // blocks of a part; a team takes many lines, and works out its columns once

static inline QkvParts qkv_parts(const Norm norms[3], QkvShape s) {
    QkvParts parts = {};
    bool full = false;
    for (int p = 0; p < 3; p++) full |= norms[p].site.on && norms[p].site.width != s.HS;
    CHECK(s.HS % (2 * PACK) == 0, "a head of %d values: expected a multiple of %d\n  -> another --heads or --width", s.HS, 2 * PACK);
    parts.s = s;
    for (int p = 0; p < 3; p++) {
        QkvPart *part = &parts.of[p];
        int heads = p == 0 ? s.NH : s.KV, rotate = s.rotary != nullptr && p < 2, width = norms[p].site.on ? norms[p].site.width : full ? heads * s.HS : s.HS;
        CHECK((width == s.HS || width == heads * s.HS) && (!norms[p].site.on || norms[p].site.gains == width),
              "a norm of q, k or v over %d values with %d gains: expected a head of %d or %d heads", width, norms[p].site.gains, s.HS, heads);
        CHECK((int64_t)s.B * s.T * heads < INT_MAX / 2, "%d x %d rows of %d heads are too many for one kernel\n  -> a smaller --micro-batch", s.B, s.T, heads);
        *part = {norms[p], parts.ld, heads * s.HS / width, width, rotate, 0, nullptr};
        parts.ld += heads * s.HS;
        if ((norms[p].site.on || rotate) && width / PACK / 2 > parts.pairs) parts.pairs = width / PACK / 2;
    }
    return parts;
}

template <typename F> static inline void qkv_launch(int pairs, F launch) {
    if (pairs) team_launch<Team<4, 1>, Team<8, 1>, Team<16, 1>, Team<32, 2>, Team<32, 4>, Team<256, 1>, Team<256, 2>, Team<256, 4>>(pairs, launch);
}

// The part's blocks where each team would take one line, or at most this many.
static inline int qkv_blocks(const QkvParts *parts, int p, int teams, int most) {
    const QkvPart *part = &parts->of[p];
    int blocks = CEIL_DIV(parts->s.B * parts->s.T * part->groups, teams);
    return !part->norm.site.on && !part->rotate ? 0 : blocks < most ? blocks : most;
}

// The part of this block, and in *chunk its number among the part's blocks.
static __device__ inline const QkvPart &qkv_block_part(const QkvParts &parts, int *chunk) {
    int p = 0;
    for (*chunk = blockIdx.x; *chunk >= parts.of[p].chunks; p++) *chunk -= parts.of[p].chunks;
    return parts.of[p];
}

// A line as (row, group) of a part. A team begins at some line and goes on by the same step, so only the start divides.
typedef struct Line { int row, group; } Line;

static __device__ inline Line line_at(int line, int groups) { return {line / groups, line % groups}; }
static __device__ inline Line line_next(Line line, Line step, int groups) {
    Line next = {line.row + step.row, line.group + step.group};
    return next.group < groups ? next : Line{next.row + 1, next.group - groups};
}

// As line_columns, in pairs: packs 2i and 2i + 1 are HS / 2 values apart in one head.
template <typename TEAM> static __device__ inline void pair_columns(int (&column)[2 * TEAM::PACKS], int width, int HS) {
    int half = HS / 2 / PACK;
    UNROLL for (int i = 0; i < TEAM::PACKS; i++) {
        int pair = i * TEAM::THREADS + threadIdx.x % TEAM::THREADS, c = pair / half * HS + pair % half * PACK;
        column[2 * i] = c < width ? c : -1;
        column[2 * i + 1] = c < width ? c + HS / 2 : -1;
    }
}

// Turns the pairs of a line by the angles of its row; direction -1 turns back.
template <int N> static __device__ inline void line_rotate(Floats (&x)[N], const int (&column)[N], const float2 *rotary, int HS, float direction) {
    UNROLL for (int i = 0; i < N; i += 2) {
        if (column[i] < 0) continue;
        const float4 *turn = reinterpret_cast<const float4 *>(rotary + column[i] % HS);
        for (int k = 0; k < PACK; k++) {
            float4 two = turn[k / 2];                          // cos, sin of this angle and of a neighbour
            float c = k % 2 ? two.z : two.x, s = direction * (k % 2 ? two.w : two.y), first = x[i].v[k], second = x[i + 1].v[k];
            x[i].v[k] = first * c - second * s;
            x[i + 1].v[k] = second * c + first * s;
        }
    }
}

// ------------------------------------------------------------------------------------------------------------------ forward

template <typename TEAM> static __global__ void __launch_bounds__(TEAM::BLOCK, 1) qkv_forward_kernel(real *normed, real *raw, QkvParts parts) {
    int column[2 * TEAM::PACKS], n = parts.s.B * parts.s.T, HS = parts.s.HS, chunk;
    const QkvPart &part = qkv_block_part(parts, &chunk);
    real *to = part.norm.site.on ? normed : raw;
    Line line = line_at(chunk * TEAM::TEAMS + threadIdx.x / TEAM::THREADS, part.groups), step = line_at(part.chunks * TEAM::TEAMS, part.groups);
    for (int first = chunk * TEAM::TEAMS; first < n * part.groups; first += part.chunks * TEAM::TEAMS) {
        int64_t at = (int64_t)line.row * parts.ld + part.offset + line.group * part.width;
        Floats x[2 * TEAM::PACKS];
        pair_columns<TEAM>(column, line.row < n ? part.width : 0, HS);
        line_load(x, raw + at, column);
        if (part.norm.site.on) line_normalize<TEAM>(x, column, part.norm, (int64_t)line.row * part.groups + line.group, 0);
        if (part.rotate) line_rotate(x, column, parts.s.rotary + (int64_t)(line.row % parts.s.T) * (HS / 2), HS, 1);
        line_store(to + at, x, column);
        line = line_next(line, step, part.groups);
    }
}

// normed (of raw's shape; nullptr where no part has a norm) gets the parts with a norm, raw keeps what they were; other parts turn in place in raw.
static inline void qkv_forward(real *normed, real *raw, const Norm norms[3], QkvShape s, Gpu *gpu) {
    QkvParts parts = qkv_parts(norms, s);
    qkv_launch(parts.pairs, [&](auto team) {
        typedef decltype(team) TEAM;
        int blocks = 0;
        for (int p = 0; p < 3; p++) blocks += parts.of[p].chunks = qkv_blocks(&parts, p, TEAM::TEAMS, QKV_CHUNKS);
        LAUNCH(qkv_forward_kernel<TEAM>, blocks, TEAM::BLOCK, 0, gpu->stream, normed, raw, parts);
    });
}

// ------------------------------------------------------------------------------------------------------------------ backward

// The turned-back gradient is rounded to `real`, as between two kernels, before the norm's backward.
template <typename TEAM>
static __global__ void __launch_bounds__(TEAM::BLOCK, TEAM::PACKS == 1 ? 3 : 1) qkv_backward_kernel(real *draw, const real *dnormed, const real *raw, QkvParts parts) {
    constexpr int N = 2 * TEAM::PACKS;
    int column[N], n = parts.s.B * parts.s.T, HS = parts.s.HS, chunk;
    const QkvPart &part = qkv_block_part(parts, &chunk);
    const bool on = part.norm.site.on;
    GainSums sums = {};
    if (on) sums = gains_begin<TEAM, N>(part.norm.b != nullptr);
    Line line = line_at(chunk * TEAM::TEAMS + threadIdx.x / TEAM::THREADS, part.groups), step = line_at(part.chunks * TEAM::TEAMS, part.groups);
    for (int first = chunk * TEAM::TEAMS; first < n * part.groups; first += part.chunks * TEAM::TEAMS) {
        int64_t at = (int64_t)line.row * parts.ld + part.offset + line.group * part.width;
        Bits dy[N], x[N], gain[N];
        Floats d[N];
        pair_columns<TEAM>(column, line.row < n ? part.width : 0, HS);
        line_load(d, (on ? dnormed : draw) + at, column);
        UNROLL for (int i = 0; i < N; i++) x[i] = bits_load(on ? raw + at : nullptr, column[i]), gain[i] = bits_load(on ? part.norm.w : nullptr, column[i]);
        if (part.rotate) line_rotate(d, column, parts.s.rotary + (int64_t)(line.row % parts.s.T) * (HS / 2), HS, -1);
        if (!on) line_store(draw + at, d, column);
        else {
            Moments m = line_kept(part.norm, (int64_t)line.row * part.groups + line.group, column);
            bits_round(dy, d);
            Slopes s = line_slopes<TEAM>(dy, x, column, part.norm.w, m, part.width, part.norm.b != nullptr);
            unpack_again(dy), unpack_again(x);
            UNROLL for (int i = 0; i < N; i++)
                if (column[i] >= 0) pack_store(draw + at + column[i], pack_round(pack_slope<TEAM>(sums, i, dy[i], x[i], gain[i], m, s)));
        }
        line = line_next(line, step, part.groups);
    }
    if (!on) return;
    pair_columns<TEAM>(column, part.width, HS);
    gains_store<TEAM>(part.partial + (int64_t)chunk * part.width, sums.w, column);
    if (sums.b) gains_store<TEAM>(part.partial + (int64_t)(part.chunks + chunk) * part.width, sums.b, column);
}

// dnormed and raw are read where a part has a norm; draw is complete then, and turned back in place elsewhere. draw may be dnormed.
static inline void qkv_backward(real *draw, real *dnormed, const real *raw, const Norm norms[3], QkvShape s, Gpu *gpu) {
    QkvParts parts = qkv_parts(norms, s);
    size_t each = 0;                                           // floats of partial sums, a chunk of every part
    for (int p = 0; p < 3; p++) each += norms[p].site.on ? (size_t)norms[p].site.gains * (norms[p].b ? 2 : 1) : 0;
    qkv_launch(parts.pairs, [&](auto team) {
        typedef decltype(team) TEAM;
        PartialList list = {};
        float *partial = gpu->scratch;
        bool bias = false;
        int blocks = 0;
        for (int p = 0; p < 3; p++) {
            QkvPart *part = &parts.of[p];
            bool on = norms[p].site.on;
            part->chunks = qkv_blocks(&parts, p, TEAM::TEAMS, on ? gain_chunks(part->width, each, gpu) : QKV_CHUNKS);
            part->partial = partial;
            blocks += part->chunks;
            if (!on) continue;
            bias |= norms[p].b != nullptr;
            partials_of(&list, &norms[p], partial, part->chunks);
            partial += (size_t)part->chunks * part->width * (norms[p].b ? 2 : 1);
        }
        size_t shared = each ? gains_bytes<TEAM, 2 * TEAM::PACKS>(bias) : 0;
        LAUNCH(qkv_backward_kernel<TEAM>, blocks, TEAM::BLOCK, shared, gpu->stream, draw, dnormed, raw, parts);
        partials_add(&list, gpu);
    });
}
