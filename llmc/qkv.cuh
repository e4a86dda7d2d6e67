// qkv.cuh: QK norm (and norms of v) and RoPE, after the products that make q, k and v and before
// attention. One kernel does both in forward, another in backward; norms are norm.cuh's.
//
//   forward    to = rope(N(raw))
//   backward   draw = N'(rope^-1(d); raw), gradients of gains and biases ADDed
//
//   q  [B T, NH, QK]    k  [B T, KV, QK]    v  [B T, KV, HS]     each in rows of any pitch (Heads)
//   rotary  [T, R/2] (cos, sin) of each position; nullptr without RoPE
//   mean, rstd of each norm, saved for backward, which also reads raw where there is a norm
//
// N is the identity for a part without a norm. Then `to` may be raw, and draw may be d: RoPE works
// in place. A part with neither norm nor RoPE is left alone.
//
// RoPE (Su et al. 2021), half-split: it rotates the last R channels of every head of q and k, the
// pair (i, i + R/2) at position t by the angle t theta^(-2i/R). v does not rotate.
//
// A part is q, k or v. Statistics run over each head of a part, with one gain shared by the heads,
// or over its full width.
//
// KIND is the norm of the parts that have one: 1, L2 or DYT (modes.h).
//
// UNIT (L2) is nGPT's order (Loshchilov et al. 2024, eq 15-16) for parts with norms:
// to = N(rope(raw)), draw = rope^-1(N'(d; rope(raw))). Each head has a gain of its own, times a
// constant, and q and k share one gain vector.
//
// LATENT is multi-head latent attention (MLA, DeepSeek-V2 2024, eq 14-18): R < QK. The first QK - R
// channels of a k head are its own; the last R, which rotate, are the same for all heads. Backward
// gives each head a gradient of them, and latent_sum adds these up.
//
// A team of threads (norm.cuh) handles a head, or a full part. A thread holds both packs of each of
// its pairs, so a rotation needs no exchange between threads.
//
// Values moved per value of q, k (v), and the computed floor (gpu.cuh) in bf16 for n = 32768,
// NH = KV = 12, QK = 128 (q and k: 3072 values a row):
//   RoPE alone       forward  2 (raw; to)         0.094 ms    backward 2 (d; draw)    0.094 ms
//   norm and RoPE    forward  2 (raw; to)         0.094 ms    backward 3 (d, raw; draw)  0.140 ms
// LATENT moves the same, but forward reads the last R of k once for all heads, and latent_sum reads
// their gradients again: 0.017 ms for n = 32768, NH = 16, QK = 192, R = 64. The table of angles
// comes from the caches: the heads of a row, neighbours in a block, share its 8 R / 2 bytes.
#pragma once
#include "norm.cuh"

struct QkvShape {
    int B, T, NH, KV, QK, R, HS;
    const float2 *rotary;  // [T, R / 2] (cos, sin); nullptr without RoPE
};

// The memory of q, k and v, or of their gradients. With LATENT `turned` has the last R channels of
// the heads, which rotate, and `of` the others; otherwise `of` has all.
struct QkvPlaces { Heads of[3], turned[3]; };

// q, k and v in rows [q | k | v] with heads side by side.
static inline QkvPlaces qkv_row(real *row, int NH, int KV, int QK, int HS) {
    int ld = (NH + KV) * QK + KV * HS;
    return {{{row, ld, QK}, {row + NH * QK, ld, QK}, {row + (NH + KV) * QK, ld, HS}}, {}};
}

// The table of angles [T, R / 2], computed in double on the host.
static inline void rotary_table(float2 *host, int T, const Model *m) {
    int R = rotary_size(m);
    for (int i = 0; i < R / 2; i++) {
        double rate = rope_rate(m, i, R);
        for (int t = 0; t < T; t++) {
            double angle = t * rate;
            host[(int64_t)t * (R / 2) + i] = {(float)cos(angle), (float)sin(angle)};
        }
    }
}

// ------------------------------------------------------------------------------------------ parts

struct PartPlace { Heads of, turned; };

// A part (q, k or v) as the kernels walk it: `groups` lines per row, of one head or of all heads.
// Blocks are numbered part by part: each of a part's `sets` (lines with a gain of their own) gets
// `chunks` blocks; a part without work gets none.
struct QkvPart {
    Norm norm;
    PartPlace raw, d, to;  // backward: to is draw; d is unused in forward
    int groups, width;     // lines per row, values per line
    int head, low;         // values per head, and how many of the first ones do not rotate
    int rotate;
    int sets, chunks;
    float *partial;        // backward: as in norm_backward_kernel
};

struct QkvParts {
    QkvPart of[3];
    int n, T, half;        // rows, rows per sequence, angles per row of the table
    const float2 *rotary;
    int pairs;             // pairs of packs in the widest line
    int kind;              // KIND
    bool latent;
};

enum { QKV_CHUNKS = 1024 };  // of a set, at most; a team then takes several lines in turn

// The argument of qkv_forward and qkv_backward. Forward has no d. Backward: `to` is draw, which may
// be d if both have the same pitch; raw is read only for parts with a norm.
static inline QkvParts qkv_parts(const QkvPlaces &to, const QkvPlaces &d, const QkvPlaces &raw,
                                 const Norm norms[3], QkvShape s) {
    QkvParts parts = {{}, s.B * s.T, s.T, s.R / 2, s.rotary, 0, 1, s.R < s.QK};
    for (int p = 0; p < 3; p++) {
        const Site *site = &norms[p].site;
        int heads = p == 0 ? s.NH : s.KV, head = p < 2 ? s.QK : s.HS;
        int width = site->on ? site->width : head, sets = site->on == L2 ? heads : 1;
        int groups = heads * head / width, low = p < 2 ? s.QK - s.R : head;
        bool rotate = s.rotary && p < 2;
        parts.of[p] = {norms[p], {raw.of[p], raw.turned[p]}, {d.of[p], d.turned[p]},
                       {to.of[p], to.turned[p]}, groups, width, head, low, rotate, sets, 0,
                       nullptr};
        if (site->on) parts.kind = site->on;
        if (site->on || rotate) parts.pairs = max(parts.pairs, width / PACK / 2);
    }
    return parts;
}

// Calls launch with the template arguments of the kernels: the team, KIND and LATENT. A thread
// holds two packs per pair, so blocks become smaller from 4 pairs on, not from 8. DyT has fewer
// teams, as in norm_launch.
template <typename F> static inline void qkv_launch(const QkvParts *parts, F launch) {
    auto with = [&](auto latent) {
        auto of = [&](auto kind) { return [=](auto team) { launch(team, kind, latent); }; };
        if (parts->kind == L2)
            team_launch<Team<4, 1>, Team<8, 1>, Team<16, 1>, Team<32, 2>>(
                parts->pairs, of(std::integral_constant<int, L2>()));
        else if (parts->kind == DYT)
            team_launch<Team<4, 1>, Team<8, 1>, Team<32, 2>, Team<256, 1>, Team<256, 2>,
                        Team<256, 4>>(parts->pairs, of(std::integral_constant<int, DYT>()));
        else
            team_launch<Team<4, 1>, Team<8, 1>, Team<16, 1>, Team<32, 2>, Team<32, 4, 128>,
                        Team<256, 1>, Team<256, 2>, Team<256, 4>>(
                parts->pairs, of(std::integral_constant<int, 1>()));
    };
    if (!parts->pairs) return;
    parts->latent ? with(std::true_type()) : with(std::false_type());
}

// Sets the chunks of a part: enough for each team to have a line of a set, but at most max_chunks.
// Returns its blocks.
static inline int qkv_blocks(QkvParts *parts, int p, int teams, int max_chunks) {
    QkvPart *part = &parts->of[p];
    int chunks = CEIL_DIV(parts->n * (part->groups / part->sets), teams);
    part->chunks = part->norm.site.on || part->rotate ? min(chunks, max_chunks) : 0;
    return part->chunks * part->sets;
}

// The part of this block; *block becomes the block's number within the part.
__device__ inline const QkvPart &qkv_block_part(const QkvParts &parts, int *block) {
    int p = 0;
    for (*block = blockIdx.x; *block >= parts.of[p].chunks * parts.of[p].sets; p++) {
        *block -= parts.of[p].chunks * parts.of[p].sets;
    }
    return parts.of[p];
}

// A line of a part: its row, that row's position in the sequence, and its group in the row. A team
// advances by a constant step, so only the start divides.
struct PartLine { int row, t, group; };

__device__ inline PartLine part_line(int line, int groups, int T) {
    return {line / groups, line / groups % T, line % groups};
}

__device__ inline PartLine part_line_next(PartLine line, PartLine step, int groups, int T) {
    int carry = line.group + step.group >= groups, t = line.t + step.t + carry;
    return {line.row + step.row + carry, t < T ? t : t - T,
            line.group + step.group - (carry ? groups : 0)};
}

// The places of a thread's N packs in a line, and the number of each pair's head. Packs 2i and
// 2i + 1 are half a head apart; LATENT: half of the channels that rotate, or half of those that do
// not. Column -1: no pack here, or no lines left.
template <int N> struct Pairs { int column[N], head[N / 2]; };

// Once per thread, because it divides.
template <typename TEAM, bool LATENT>
__device__ Pairs<2 * TEAM::PACKS> line_pairs(const QkvPart &part) {
    Pairs<2 * TEAM::PACKS> pairs;
    int half = part.head / 2 / PACK;
    UNROLL for (int i = 0; i < TEAM::PACKS; i++) {
        int pair = i * TEAM::THREADS + threadIdx.x % TEAM::THREADS;
        int head = pair / half, c = pair % half * PACK, apart = part.head / 2;
        if (LATENT) {
            bool turns = c >= part.low / 2;
            c += turns ? part.low / 2 : 0;
            apart = turns ? (part.head - part.low) / 2 : part.low / 2;
        }
        c += head * part.head;
        pairs.head[i] = head;
        pairs.column[2 * i] = c < part.width ? c : -1;
        pairs.column[2 * i + 1] = c < part.width ? c + apart : -1;
    }
    return pairs;
}

// The address of pack i of a line. Except for LATENT, raw, d and to have the same pitch, so one
// offset serves all three.
template <bool LATENT, int N>
__device__ real *pack_at(const PartPlace &p, const QkvPart &part, PartLine line,
                         const Pairs<N> &pairs, int i) {
    int column = pairs.column[i], head = pairs.head[i / 2];
    if constexpr (!LATENT) {
        return p.of.at + (int64_t)line.row * part.raw.of.ld + line.group * part.width + column;
    }
    int channel = column - head * part.head;
    head += line.group;  // the group of a full line is 0
    if (channel < part.low) {
        return p.of.at + (int64_t)line.row * p.of.ld + head * p.of.head + channel;
    }
    return p.turned.at + (int64_t)line.row * p.turned.ld + head * p.turned.head + channel -
           part.low;
}

template <bool LATENT, int N>
__device__ void part_load(Pack (&x)[N], const PartPlace &p, const QkvPart &part, PartLine line,
                          const Pairs<N> &pairs) {
    UNROLL for (int i = 0; i < N; i++)
        x[i] = pairs.column[i] < 0 ? Pack{} : pack_load(pack_at<LATENT>(p, part, line, pairs, i));
}

template <bool LATENT, int N>
__device__ void part_store(const PartPlace &p, const QkvPart &part, PartLine line,
                           const Floats (&x)[N], const Pairs<N> &pairs) {
    UNROLL for (int i = 0; i < N; i++)
        if (pairs.column[i] >= 0) floats_store(pack_at<LATENT>(p, part, line, pairs, i), x[i]);
}

// RoPE: rotates the pairs of a line by the angles of position t; direction -1 rotates back.
template <bool LATENT, int N>
__device__ void line_rotate(Floats (&x)[N], const Pairs<N> &pairs, const QkvParts &parts,
                            const QkvPart &part, int t, float direction) {
    if (!part.rotate) return;
    const float2 *rotary = parts.rotary + (int64_t)t * parts.half;
    UNROLL for (int i = 0; i < N; i += 2) {
        int channel = pairs.column[i] - pairs.head[i / 2] * part.head - (LATENT ? part.low : 0);
        if (pairs.column[i] < 0 || channel < 0) continue;
        const float4 *turn = reinterpret_cast<const float4 *>(rotary + channel);
        for (int k = 0; k < PACK; k++) {
            float4 two = turn[k / 2];  // cos, sin of this angle and of a neighbour
            float c = k % 2 ? two.z : two.x;
            float s = direction * (k % 2 ? two.w : two.y);
            float first = x[i].v[k], second = x[i + 1].v[k];
            x[i].v[k] = first * c - second * s;
            x[i + 1].v[k] = second * c + first * s;
        }
    }
}

// ---------------------------------------------------------------------------------------- forward

template <typename TEAM, int KIND, bool LATENT>
__global__ void __launch_bounds__(TEAM::BLOCK, 1)
qkv_forward_kernel(QkvParts parts) {
    constexpr int N = 2 * TEAM::PACKS;
    constexpr bool UNIT = KIND == L2, TANH = KIND == DYT;
    int block;
    const QkvPart &part = qkv_block_part(parts, &block);
    int first = block * TEAM::TEAMS, stride = part.chunks * part.sets * TEAM::TEAMS;
    Pairs<N> pairs = line_pairs<TEAM, LATENT>(part);
    PartLine line = part_line(first + threadIdx.x / TEAM::THREADS, part.groups, parts.T);
    PartLine step = part_line(stride, part.groups, parts.T);
    for (; first < parts.n * part.groups; first += stride) {
        Pack raw[N];
        Floats x[N];
        UNROLL for (int &at : pairs.column) if (line.row >= parts.n) at = -1;
        part_load<LATENT>(raw, part.raw, part, line, pairs);
        UNROLL for (int i = 0; i < N; i++) x[i] = pack_floats(raw[i]);
        if (UNIT) line_rotate<LATENT>(x, pairs, parts, part, line.t, 1);
        if (part.norm.site.on) {
            int64_t number = (int64_t)line.row * part.groups + line.group;
            float scale = UNIT ? (float)part.norm.site.scale : 1;
            line_normalize<TEAM, TANH>(x, pairs.column, part.norm, number, UNIT ? line.group : 0,
                                       scale);
        }
        if (!UNIT) line_rotate<LATENT>(x, pairs, parts, part, line.t, 1);
        part_store<LATENT>(part.to, part, line, x, pairs);
        line = part_line_next(line, step, part.groups, parts.T);
    }
}

static inline void qkv_forward(QkvParts parts, Gpu *gpu) {
    qkv_launch(&parts, [&](auto team, auto kind, auto latent) {
        typedef decltype(team) TEAM;
        int blocks = 0;
        for (int p = 0; p < 3; p++) blocks += qkv_blocks(&parts, p, TEAM::TEAMS, QKV_CHUNKS);
        LAUNCH(qkv_forward_kernel<TEAM, kind, latent>, blocks, TEAM::BLOCK, 0, gpu->stream, parts);
    });
}

// --------------------------------------------------------------------------------------- backward

// Blocks per multiprocessor that registers must leave room for.
static constexpr int qkv_backward_blocks(int packs, bool unit) {
    if (packs == 1) return 3;
    return packs == 2 && !unit ? 2 : 1;
}

// A rotation's result is rounded to `real` for the norm, because registers hold it as Pack: the
// gradient rotated back; for UNIT the rotated input of the norm, which forward does not round.
template <typename TEAM, int KIND, bool LATENT>
__global__ void __launch_bounds__(TEAM::BLOCK, qkv_backward_blocks(TEAM::PACKS, KIND == L2))
qkv_backward_kernel(QkvParts parts) {
    constexpr int N = 2 * TEAM::PACKS;
    constexpr bool UNIT = KIND == L2, TANH = KIND == DYT;
    int chunk, set = 0;
    const QkvPart &part = qkv_block_part(parts, &chunk);
    const bool on = part.norm.site.on;
    int groups = part.groups, gains = part.width;
    float scale = UNIT ? (float)part.norm.site.scale : 1;
    if (UNIT) set = chunk % part.sets, chunk /= part.sets, groups /= part.sets, gains *= part.sets;
    const real *w = part.norm.w + set * part.width;
    GainSums sums = {};
    if (on) sums = gains_begin<TEAM, N>(part.norm.b != nullptr);
    int first = chunk * TEAM::TEAMS, stride = part.chunks * TEAM::TEAMS;
    Pairs<N> pairs = line_pairs<TEAM, LATENT>(part);
    const int (&column)[N] = pairs.column;
    PartLine line = part_line(first + threadIdx.x / TEAM::THREADS, groups, parts.T);
    PartLine step = part_line(stride, groups, parts.T);
    for (; first < parts.n * groups;
         first += stride, line = part_line_next(line, step, groups, parts.T)) {
        PartLine own = {line.row, line.t, line.group + set};
        Pack dy[N], x[N], gain[N];
        Floats d[N];
        UNROLL for (int &at : pairs.column) if (line.row >= parts.n) at = -1;
        part_load<LATENT>(dy, part.d, part, own, pairs);
        if (on) part_load<LATENT>(x, part.raw, part, own, pairs);
        pack_line(gain, on ? w : nullptr, column);
        UNROLL for (int i = 0; i < N; i++) d[i] = pack_floats(UNIT ? x[i] : dy[i]);
        line_rotate<LATENT>(d, pairs, parts, part, line.t, UNIT ? 1 : -1);
        UNROLL for (int i = 0; i < N; i++) (UNIT ? x[i] : dy[i]) = pack_round(d[i]);
        if (!on) {
            part_store<LATENT>(part.to, part, own, d, pairs);
            continue;
        }
        bool centered = part.norm.b != nullptr;
        Moments m = line_kept<TANH>(part.norm, (int64_t)line.row * part.groups + own.group, column);
        Slopes s = {};
        if (!TANH) {
            s = line_slopes<TEAM>(dy, x, gain, m, part.width, centered, scale);
            unpack_again(dy);
            unpack_again(x);
        }
        UNROLL for (int i = 0; i < N; i++) {
            if (column[i] < 0) continue;
            d[i] = pack_slope<TEAM, TANH>(sums, i, dy[i], x[i], gain[i], m, s, scale);
            if (UNIT) continue;
            floats_store(pack_at<LATENT>(part.to, part, own, pairs, i), d[i]);
        }
        if (!UNIT) continue;
        line_rotate<LATENT>(d, pairs, parts, part, line.t, -1);
        part_store<LATENT>(part.to, part, own, d, pairs);
    }
    if (!on) return;
    pairs = line_pairs<TEAM, LATENT>(part);
    int64_t before = (int64_t)(sums.b ? 2 : 1) * part.chunks * gains;  // sums of gains and biases
    if (TANH) alpha_store(part.partial + before + chunk, sums.alpha);
    float *partial = part.partial + set * part.width;
    gains_store<TEAM>(partial + (int64_t)chunk * gains, sums.w, column);
    if (sums.b) gains_store<TEAM>(partial + (int64_t)(part.chunks + chunk) * gains, sums.b, column);
}

static inline void qkv_backward(QkvParts parts, Gpu *gpu) {
    size_t each = 0;  // floats of partial sums for one chunk of every part
    for (const QkvPart &part : parts.of)
        if (part.norm.site.on) each += norm_sums(&part.norm);
    qkv_launch(&parts, [&](auto team, auto kind, auto latent) {
        typedef decltype(team) TEAM;
        PartialList list = {};
        float *partial = scratch_for<float>(each, gpu);  // gain_chunks leaves room for more
        bool bias = false;
        int blocks = 0;
        for (int p = 0; p < 3; p++) {
            QkvPart *part = &parts.of[p];
            const Norm *norm = &part->norm;
            bool on = norm->site.on;
            int max_chunks = on ? gain_chunks(norm->site.gains, each, gpu) : QKV_CHUNKS;
            blocks += qkv_blocks(&parts, p, TEAM::TEAMS, max_chunks);
            part->partial = partial;
            if (!on) continue;
            bias |= norm->b != nullptr;
            // q and k with one shared gain: their chunks are neighbours and form one list.
            bool joins = list.count && list.of[0].gradient == norm->dw;
            if (joins) list.of[0].chunks += part->chunks;
            else partials_of(&list, norm, partial, part->chunks);
            partial += part->chunks * norm_sums(norm);
        }
        size_t shared = each ? gains_bytes<TEAM, 2 * TEAM::PACKS>(bias) : 0;
        LAUNCH(qkv_backward_kernel<TEAM, kind, latent>, blocks, TEAM::BLOCK, shared, gpu->stream,
               parts);
        partials_add(list, gpu);
    });
}

// ------------------------------------------------------------------------------- latent attention
// The norm of the latent, which lies in rows of qkv, runs in the same kernels: they see it as one
// head of norm->site.width channels that does not rotate. Arguments as in qkv_parts.

static inline QkvParts latent_parts(Heads to, Heads d, Heads raw, const Norm *norm) {
    int width = norm->site.width;
    QkvParts parts = {{}, (int)norm->n, 1, 0, nullptr, width / PACK / 2, norm->site.on, true};
    for (QkvPart &part : parts.of) part.sets = 1;
    parts.of[0] = {*norm, {raw, {}}, {d, {}}, {to, {}}, 1, width, width, width, 0, 1, 0, nullptr};
    return parts;
}

enum { LATENT_THREADS = 128 };

// A thread handles 16 bytes of the R values of a row.
static __global__ void __launch_bounds__(LATENT_THREADS)
latent_sum_kernel(Heads to, Heads x, int n, int heads, int R) {
    int i = (int)grid_thread();
    int row = i / (R / PACK), j = i % (R / PACK) * PACK;
    if (row >= n) return;
    const real *from = x.at + (int64_t)row * x.ld + j;
    Floats sum = {};
    for (int h = 0; h < heads; h++) sum = sum + floats_load(from + h * x.head);
    floats_store(to.at + (int64_t)row * to.ld + j, sum);
}

// to = sum over heads of x, R values each, in n rows.
static inline void latent_sum(Heads to, Heads x, int n, int heads, int R, Gpu *gpu) {
    int blocks = CEIL_DIV(n * (R / PACK), LATENT_THREADS);
    LAUNCH(latent_sum_kernel, blocks, LATENT_THREADS, 0, gpu->stream, to, x, n, heads, R);
}
