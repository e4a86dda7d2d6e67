// qkv.cuh: between the products that make q, k and v and attention: the norms of q, k and v (norm.cuh) and rotary positions, in one kernel each way.
//
// Rows of q have NH heads of QK channels, rows of k KV, and rows of v KV heads of HS. For each of the three:
//   forward    to = rope(N(raw))         backward    draw = N'(rope^-1(d); raw), gradients of gains and biases ADDed
// N where there is a norm; where there is none `to` may be raw, and draw d: it turns in place. Where a part has neither norm nor rope nothing is touched.
// RoPE (Su et al. 2021), half-split: of the last R channels of every head of q and k the pair (i, i + R/2) turns by t theta^(-2i/R); v is not turned.
// Statistics run over each head (a gain of its size, shared by the heads) or over the full part.
//
// UNIT (nGPT, Loshchilov et al. 2024, eq 15-16) is the other order, for parts with norms: to = N(rope(raw)), draw = rope^-1(N'(d; rope(raw))). Each head has gains of
// its own, times a constant, and those of q and k are one vector.
// LATENT (DeepSeek-V2 2024, eq 14-18): R < QK, and a head of k is put together: QK - R channels are its own, the last R come from one place for all heads. What
// backward leaves there is each head's, and latent_sum adds it up.
//
// A team of threads (norm.cuh) takes a head, or a full part; a thread holds both packs of each of its pairs, so rotating needs no exchange.
// Values moved per value of q, k (v), and the computed floor at 4.3 TB/s in bf16 for n = 32768, NH = KV = 12, QK = 128 (q and k: 3072 values a row):
//   rope alone  forward 2, backward 2    0.094 ms each       norm and rope  forward 2 (raw; to)  0.094,  backward 3 (d, raw; draw)  0.140 ms
// LATENT the same, but that the forward of k reads its last R once for all heads, and latent_sum reads them again: n = 32768, NH = 16, QK = 192, R = 64: 0.017 ms
// The table of angles is read from the caches: the heads of a row, neighbours in a block, share its 8 R / 2 bytes.
#pragma once
#include <limits.h>
#include <math.h>
#include <type_traits>
#include "norm.cuh"

typedef struct QkvShape {
    int B, T, NH, KV, QK, R, HS;
    const float2 *rotary;                                      // [T, R / 2] (cos, sin); nullptr without RoPE
} QkvShape;

// Where q, k and v lie, or their gradients. turned, for LATENT: where the last R channels of heads do, the others being in `of`.
typedef struct QkvPlaces { Heads of[3], turned[3]; } QkvPlaces;

// In one row: [q | k | v], heads side by side.
static inline QkvPlaces qkv_row(real *row, int NH, int KV, int HS) {
    int ld = (NH + 2 * KV) * HS;
    return {{{row, ld, HS}, {row + NH * HS, ld, HS}, {row + (NH + KV) * HS, ld, HS}}, {}};
}

// The table, computed in double on the host.
static inline void rotary_table(float2 *host, int T, int R, double theta) {
    for (int t = 0; t < T; t++)
        for (int i = 0; i < R / 2; i++) {
            double angle = t * pow(theta, -2.0 * i / R);
            host[(int64_t)t * (R / 2) + i] = {(float)cos(angle), (float)sin(angle)};
        }
}

// ------------------------------------------------------------------------------------------------------------------ parts

// q, k or v as the kernels walk it: `groups` lines of `width` values a row, of one head or of all; of a head the first `low` channels do not turn. Blocks are shared out:
// `chunks` for each of the `sets` of lines with gains of their own, for each part in turn; none for a part without work. partial: where this part's sums for gain and
// bias go (backward).
typedef struct PartPlace { Heads of, turned; } PartPlace;
typedef struct QkvPart {
    Norm norm;
    PartPlace raw, d, to;                                      // d: backward alone, where `to` is draw
    int groups, width, head, low, rotate, sets, chunks;
    float *partial;
} QkvPart;

typedef struct QkvParts {
    QkvPart of[3];
    int n, T, half;                                            // rows, and of a sequence; angles of a row of the table
    const float2 *rotary;
    int pairs;                                                 // of packs, in the widest line
    bool unit, latent;
} QkvParts;

enum { QKV_CHUNKS = 1024 };                                    // blocks of a part; a team takes many lines, and works out its columns once

static inline PartPlace part_place(const QkvPlaces *places, int p) { return {places->of[p], places->turned[p]}; }

static inline QkvParts qkv_parts(const QkvPlaces *to, const QkvPlaces *d, const QkvPlaces *raw, const Norm norms[3], QkvShape s) {
    QkvParts parts = {{}, s.B * s.T, s.T, s.R / 2, s.rotary, 0, false, s.R < s.QK};
    bool full = false;
    for (int p = 0; p < 3; p++) {
        full |= norms[p].site.on && norms[p].site.width != (p < 2 ? s.QK : s.HS);
        parts.unit |= norms[p].site.on == L2;
    }
    CHECK(s.HS % (2 * PACK) == 0 && s.R % (2 * PACK) == 0, "a head of %d values, of which %d turn: expected multiples of %d\n  -> another --heads, --width or --rope-size",
          s.HS, s.R, 2 * PACK);
    for (int p = 0; p < 3; p++) {
        const Site *site = &norms[p].site;
        int heads = p == 0 ? s.NH : s.KV, head = p < 2 ? s.QK : s.HS, rotate = s.rotary && p < 2, width = site->on ? site->width : full ? heads * head : head;
        int sets = site->on == L2 ? heads : 1;
        CHECK((width == head || width == heads * head) && (!site->on || site->gains == sets * width) && (!parts.unit || !(site->on || rotate) || (site->on == L2 && width == head)),
              "a norm of q, k or v over %d values with %d gains: expected a head of %d or %d heads", width, site->gains, head, heads);
        CHECK((int64_t)parts.n * heads < INT_MAX / 2, "%d x %d rows of %d heads are too many for one kernel\n  -> a smaller --micro-batch", s.B, s.T, heads);
        parts.of[p] = {norms[p], part_place(raw, p), part_place(d, p), part_place(to, p), heads * head / width, width, head, p < 2 ? s.QK - s.R : head, rotate, sets, 0, nullptr};
        if ((site->on || rotate) && width / PACK / 2 > parts.pairs) parts.pairs = width / PACK / 2;
    }
    return parts;
}

// Calls launch with the kernels' template arguments: the team, UNIT and LATENT. A thread holds two packs of a pair, so blocks become smaller with 4 pairs, not 8.
template <typename F> static inline void qkv_launch(const QkvParts *parts, F launch) {
    std::false_type no;
    std::true_type yes;
    auto any = [&](auto latent) { team_launch<Team<4, 1>, Team<8, 1>, Team<16, 1>, Team<32, 2>, Team<32, 4, 128>, Team<256, 1>, Team<256, 2>, Team<256, 4>>(parts->pairs, [&](auto team) { launch(team, no, latent); }); };
    auto of_heads = [&](auto latent) { team_launch<Team<4, 1>, Team<8, 1>, Team<16, 1>, Team<32, 2>>(parts->pairs, [&](auto team) { launch(team, yes, latent); }); };
    if (!parts->pairs) return;
    if (parts->unit) parts->latent ? of_heads(yes) : of_heads(no);
    else parts->latent ? any(yes) : any(no);
}

// Sets the part's chunks: as many as there are with a line of a set for each team, or at most this many. Returns its blocks.
static inline int qkv_blocks(QkvParts *parts, int p, int teams, int most) {
    QkvPart *part = &parts->of[p];
    int chunks = CEIL_DIV(parts->n * (part->groups / part->sets), teams);
    part->chunks = !part->norm.site.on && !part->rotate ? 0 : chunks < most ? chunks : most;
    return part->chunks * part->sets;
}

// The part of this block, and in *block its number among the part's blocks.
static __device__ inline const QkvPart &qkv_block_part(const QkvParts &parts, int *block) {
    int p = 0;
    for (*block = blockIdx.x; *block >= parts.of[p].chunks * parts.of[p].sets; p++) *block -= parts.of[p].chunks * parts.of[p].sets;
    return parts.of[p];
}

// A line as (row, group) of a part. A team begins at some line and goes on by the same step, so only the start divides.
typedef struct Line { int row, group; } Line;

static __device__ inline Line line_at(int line, int groups) { return {line / groups, line % groups}; }
static __device__ inline Line line_next(Line line, Line step, int groups) {
    Line next = {line.row + step.row, line.group + step.group};
    return next.group < groups ? next : Line{next.row + 1, next.group - groups};
}

// As line_columns, in pairs: packs 2i and 2i + 1 are half of a head apart; LATENT, half of the channels that turn, or of those that do not.
template <typename TEAM, bool LATENT> static __device__ inline void pair_columns(int (&column)[2 * TEAM::PACKS], int width, const QkvPart &part) {
    int half = part.head / 2 / PACK;
    UNROLL for (int i = 0; i < TEAM::PACKS; i++) {
        int pair = i * TEAM::THREADS + threadIdx.x % TEAM::THREADS, c = pair / half * part.head + pair % half * PACK, apart = part.head / 2;
        if (LATENT) {
            bool turns = pair % half * PACK >= part.low / 2;
            c += turns ? part.low / 2 : 0;
            apart = turns ? (part.head - part.low) / 2 : part.low / 2;
        }
        column[2 * i] = c < width ? c : -1;
        column[2 * i + 1] = c < width ? c + apart : -1;
    }
}

// Where a column of a line lies. But for LATENT raw, d and to lie alike, and one offset serves all.
template <bool LATENT> static __device__ inline real *column_at(const PartPlace &p, const QkvPart &part, Line line, int column) {
    if constexpr (!LATENT) return p.of.at + (int64_t)line.row * part.raw.of.ld + line.group * part.width + column;
    int h = line.group + column / part.head, channel = column % part.head;             // a full line is group 0
    if (channel < part.low) return p.of.at + (int64_t)line.row * p.of.ld + h * p.of.head + channel;
    return p.turned.at + (int64_t)line.row * p.turned.ld + h * p.turned.head + channel - part.low;
}

template <bool LATENT, int N> static __device__ inline void part_load(Bits (&x)[N], const PartPlace &p, const QkvPart &part, Line line, const int (&column)[N]) {
    UNROLL for (int i = 0; i < N; i++) x[i] = column[i] >= 0 ? bits_load(column_at<LATENT>(p, part, line, column[i]), 0) : Bits{};
}

template <bool LATENT, int N> static __device__ inline void part_store(const PartPlace &p, const QkvPart &part, Line line, const Floats (&x)[N], const int (&column)[N]) {
    UNROLL for (int i = 0; i < N; i++)
        if (column[i] >= 0) pack_store(column_at<LATENT>(p, part, line, column[i]), pack_round(x[i]));
}

template <int N> static __device__ inline void line_unpack(Floats (&x)[N], const Bits (&bits)[N]) { UNROLL for (int i = 0; i < N; i++) x[i] = bits_floats(bits[i]); }

// Turns the pairs of a line by the angles of its row; direction -1 turns back.
template <bool LATENT, int N> static __device__ inline void line_rotate(Floats (&x)[N], const int (&column)[N], const QkvParts &parts, const QkvPart &part, int row, float direction) {
    if (!part.rotate) return;
    const float2 *rotary = parts.rotary + (int64_t)(row % parts.T) * parts.half;
    UNROLL for (int i = 0; i < N; i += 2) {
        int channel = column[i] % part.head - (LATENT ? part.low : 0);
        if (column[i] < 0 || channel < 0) continue;
        const float4 *turn = reinterpret_cast<const float4 *>(rotary + channel);
        for (int k = 0; k < PACK; k++) {
            float4 two = turn[k / 2];                          // cos, sin of this angle and of a neighbour
            float c = k % 2 ? two.z : two.x, s = direction * (k % 2 ? two.w : two.y), first = x[i].v[k], second = x[i + 1].v[k];
            x[i].v[k] = first * c - second * s;
            x[i + 1].v[k] = second * c + first * s;
        }
    }
}

// ------------------------------------------------------------------------------------------------------------------ forward

template <typename TEAM, bool UNIT, bool LATENT> static __global__ void __launch_bounds__(TEAM::BLOCK, 1) qkv_forward_kernel(QkvParts parts) {
    constexpr int N = 2 * TEAM::PACKS;
    int column[N], block;
    const QkvPart &part = qkv_block_part(parts, &block);
    int blocks = part.chunks * part.sets;
    Line line = line_at(block * TEAM::TEAMS + threadIdx.x / TEAM::THREADS, part.groups), step = line_at(blocks * TEAM::TEAMS, part.groups);
    for (int first = block * TEAM::TEAMS; first < parts.n * part.groups; first += blocks * TEAM::TEAMS) {
        Bits raw[N];
        Floats x[N];
        pair_columns<TEAM, LATENT>(column, line.row < parts.n ? part.width : 0, part);
        part_load<LATENT>(raw, part.raw, part, line, column);
        line_unpack(x, raw);
        if (UNIT) line_rotate<LATENT>(x, column, parts, part, line.row, 1);
        if (part.norm.site.on) line_normalize<TEAM>(x, column, part.norm, (int64_t)line.row * part.groups + line.group, UNIT ? line.group : 0, UNIT ? (float)part.norm.site.scale : 1);
        if (!UNIT) line_rotate<LATENT>(x, column, parts, part, line.row, 1);
        part_store<LATENT>(part.to, part, line, x, column);
        line = line_next(line, step, part.groups);
    }
}

static inline void qkv_forward_launch(QkvParts *parts, Gpu *gpu) {
    qkv_launch(parts, [&](auto team, auto unit, auto latent) {
        typedef decltype(team) TEAM;
        int blocks = 0;
        for (int p = 0; p < 3; p++) blocks += qkv_blocks(parts, p, TEAM::TEAMS, QKV_CHUNKS);
        LAUNCH(qkv_forward_kernel<TEAM, decltype(unit)::value, decltype(latent)::value>, blocks, TEAM::BLOCK, 0, gpu->stream, *parts);
    });
}

static inline void qkv_forward(const QkvPlaces *to, const QkvPlaces *raw, const Norm norms[3], QkvShape s, Gpu *gpu) {
    QkvParts parts = qkv_parts(to, raw, raw, norms, s);
    qkv_forward_launch(&parts, gpu);
}

// ------------------------------------------------------------------------------------------------------------------ backward

// The turned-back gradient is rounded to `real`, as between two kernels, before the norm's backward; UNIT, what the norm reads.
template <typename TEAM, bool UNIT, bool LATENT>
static __global__ void __launch_bounds__(TEAM::BLOCK, TEAM::PACKS == 1 ? 3 : TEAM::PACKS == 2 && !UNIT ? 2 : 1) qkv_backward_kernel(QkvParts parts) {
    constexpr int N = 2 * TEAM::PACKS;
    int column[N], chunk, set = 0;
    const QkvPart &part = qkv_block_part(parts, &chunk);
    const bool on = part.norm.site.on;
    int groups = part.groups, gains = part.width;
    float scale = UNIT ? (float)part.norm.site.scale : 1;
    if (UNIT) set = chunk % part.sets, chunk /= part.sets, groups /= part.sets, gains *= part.sets;
    const real *w = part.norm.w + set * part.width;
    GainSums sums = {};
    if (on) sums = gains_begin<TEAM, N>(part.norm.b != nullptr);
    Line line = line_at(chunk * TEAM::TEAMS + threadIdx.x / TEAM::THREADS, groups), step = line_at(part.chunks * TEAM::TEAMS, groups);
    for (int first = chunk * TEAM::TEAMS; first < parts.n * groups; first += part.chunks * TEAM::TEAMS, line = line_next(line, step, groups)) {
        Line own = {line.row, line.group + set};
        Bits dy[N], x[N], gain[N];
        Floats d[N];
        pair_columns<TEAM, LATENT>(column, line.row < parts.n ? part.width : 0, part);
        part_load<LATENT>(dy, part.d, part, own, column);
        if (on) part_load<LATENT>(x, part.raw, part, own, column);
        UNROLL for (int i = 0; i < N; i++) gain[i] = bits_load(on ? w : nullptr, column[i]);
        if (UNIT) line_unpack(d, x);
        else line_unpack(d, dy);
        line_rotate<LATENT>(d, column, parts, part, line.row, UNIT ? 1 : -1);
        UNROLL for (int i = 0; i < N; i++) (UNIT ? x[i] : dy[i]) = bits_round(d[i]);
        if (!on) part_store<LATENT>(part.to, part, own, d, column);
        else {
            Moments m = line_kept(part.norm, (int64_t)line.row * part.groups + own.group, column);
            Slopes s = line_slopes<TEAM>(dy, x, column, w, m, part.width, part.norm.b != nullptr, scale);
            unpack_again(dy), unpack_again(x);
            UNROLL for (int i = 0; i < N; i++) {
                if (column[i] < 0) continue;
                d[i] = pack_slope<TEAM>(sums, i, dy[i], x[i], gain[i], m, s, scale);
                if (!UNIT) pack_store(column_at<LATENT>(part.to, part, own, column[i]), pack_round(d[i]));
            }
            if (!UNIT) continue;
            line_rotate<LATENT>(d, column, parts, part, line.row, -1);
            part_store<LATENT>(part.to, part, own, d, column);
        }
    }
    if (!on) return;
    pair_columns<TEAM, LATENT>(column, part.width, part);
    float *partial = part.partial + set * part.width;
    gains_store<TEAM>(partial + (int64_t)chunk * gains, sums.w, column);
    if (sums.b) gains_store<TEAM>(partial + (int64_t)(part.chunks + chunk) * gains, sums.b, column);
}

static inline void qkv_backward_launch(QkvParts *parts, Gpu *gpu) {
    size_t each = 0;                                           // floats of partial sums, a chunk of every part
    for (const QkvPart &part : parts->of) each += part.norm.site.on ? (size_t)part.norm.site.gains * (part.norm.b ? 2 : 1) : 0;
    qkv_launch(parts, [&](auto team, auto unit, auto latent) {
        typedef decltype(team) TEAM;
        PartialList list = {};
        float *partial = gpu->scratch;
        bool bias = false;
        int blocks = 0;
        for (int p = 0; p < 3; p++) {
            QkvPart *part = &parts->of[p];
            const Norm *norm = &part->norm;
            blocks += qkv_blocks(parts, p, TEAM::TEAMS, norm->site.on ? gain_chunks(norm->site.gains, each, gpu) : QKV_CHUNKS);
            part->partial = partial;
            if (!norm->site.on) continue;
            bias |= norm->b != nullptr;
            if (list.count && list.of[0].gradient == norm->dw) list.of[0].chunks += part->chunks;      // q and k of one gain: theirs are one list of chunks
            else partials_of(&list, norm, partial, part->chunks);
            partial += (size_t)part->chunks * norm->site.gains * (norm->b ? 2 : 1);
        }
        size_t shared = each ? gains_bytes<TEAM, 2 * TEAM::PACKS>(bias) : 0;
        LAUNCH(qkv_backward_kernel<TEAM, decltype(unit)::value, decltype(latent)::value>, blocks, TEAM::BLOCK, shared, gpu->stream, *parts);
        partials_add(&list, gpu);
    });
}

// raw is read where a part has a norm. draw may be d where it lies alike.
static inline void qkv_backward(const QkvPlaces *draw, const QkvPlaces *d, const QkvPlaces *raw, const Norm norms[3], QkvShape s, Gpu *gpu) {
    QkvParts parts = qkv_parts(draw, d, raw, norms, s);
    qkv_backward_launch(&parts, gpu);
}

// ------------------------------------------------------------------------------------------------------------------ the latent
// Latent attention's other norm and its sum lie in rows of something wider too. The latent is one head of norm->site.width channels that do not turn.

static inline QkvParts latent_parts(Heads to, Heads d, Heads raw, const Norm *norm) {
    int width = norm->site.width;
    QkvParts parts = {{}, (int)norm->n, 1, 0, nullptr, width / PACK / 2, false, true};
    CHECK(width % (2 * PACK) == 0, "a latent of %d values: expected a multiple of %d\n  -> another --kv-rank", width, 2 * PACK);
    for (QkvPart &part : parts.of) part.sets = 1;
    parts.of[0] = {*norm, {raw, {}}, {d, {}}, {to, {}}, 1, width, width, width, 0, 1, 0, nullptr};
    return parts;
}

static inline void latent_norm_forward(Heads to, Heads raw, const Norm *norm, Gpu *gpu) {
    QkvParts parts = latent_parts(to, raw, raw, norm);
    qkv_forward_launch(&parts, gpu);
}

// SETs draw and ADDs the gradients of gains and biases.
static inline void latent_norm_backward(Heads draw, Heads d, Heads raw, const Norm *norm, Gpu *gpu) {
    QkvParts parts = latent_parts(draw, d, raw, norm);
    qkv_backward_launch(&parts, gpu);
}

enum { LATENT_THREADS = 128 };

// A thread: 16 bytes of a row's R values.
static __global__ void __launch_bounds__(LATENT_THREADS) latent_sum_kernel(Heads to, Heads x, int n, int heads, int R) {
    int i = blockIdx.x * LATENT_THREADS + threadIdx.x, row = i / (R / PACK), j = i % (R / PACK) * PACK;
    if (row >= n) return;
    const real *from = x.at + (int64_t)row * x.ld + j;
    Floats sum = {};
    for (int h = 0; h < heads; h++) {
        Floats x_h = pack_floats(pack_load(from + h * x.head));
        for (int k = 0; k < PACK; k++) sum.v[k] += x_h.v[k];
    }
    pack_store(to.at + (int64_t)row * to.ld + j, pack_round(sum));
}

// to = sum over heads of x, R values each, in n rows.
static inline void latent_sum(Heads to, Heads x, int n, int heads, int R, Gpu *gpu) {
    LAUNCH(latent_sum_kernel, CEIL_DIV(n * (R / PACK), LATENT_THREADS), LATENT_THREADS, 0, gpu->stream, to, x, n, heads, R);
}
