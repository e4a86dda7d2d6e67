// attend.cuh: attention by the kernels that the run has chosen: those of attention.cuh (mma.sync),
// or on compute capability 9.0 those of attention_sm90.cuh (wgmma), separately for each pass.
//
//   attend_forward, attend_backward    the layer, with the kernels of gpu->plans
//   attend_choose                      compares both kinds on this GPU when training begins, and
//                                      chooses
#pragma once
#include "attention_sm90.cuh"
#include "kinds.cuh"
#include "qkv.cuh"

static inline void attend_forward(real *c, wide *peak, wide *lse, const Heads qkv[3],
                                  AttentionShape s, Gpu *gpu) {
    if constexpr (sizeof(real) == 2)
        if (by_wgmma(gpu, ATTENTION_FORWARD) && attention_forward_sm90(c, peak, lse, qkv, s, gpu))
            return;
    attention_forward(c, peak, lse, qkv, s, gpu);
}

static inline void attend_backward(const Heads d[3], wide *D, real *dc, const real *c,
                                   const wide *lse, const Heads qkv[3], AttentionShape s,
                                   Gpu *gpu) {
    if constexpr (sizeof(real) == 2)
        if (by_wgmma(gpu, ATTENTION_BACKWARD) &&
            attention_backward_sm90<real>(d, D, dc, c, lse, qkv, s, gpu))
            return;
    attention_backward(d, D, dc, c, lse, qkv, s, gpu);
}

// ------------------------------------------------------------------------------------- the choice

// Documents of more than a third of T tokens, whose borders lie inside tiles.
static __global__ void fill_documents_kernel(int32_t *begins, int32_t *ends, int n, int T) {
    int bt = (int)grid_thread(), size = T * 3 / 8 + 1;
    if (bt >= n) return;
    begins[bt] = bt % T / size * size;
    ends[bt] = min(begins[bt] + size, T);
}

// The arrays of a comparison. x: rows of q, k and v. c, d, lse and peak: what each kind computes.
struct AttentionTrial {
    AttentionShape s;
    int64_t n, width;
    real *x, *dc, *c[2], *d[2];
    wide *lse[2], *peak[2], *D;
};

// As many sequences as fit in the arena; s.B is 0 if not even one does.
static inline AttentionTrial attention_trial(AttentionShape s, Arena arena) {
    for (;; s.B--) {
        int64_t n = (int64_t)s.B * s.T, heads = n * s.NH;
        AttentionTrial t = {};
        Arena rest = arena;
        t.s = s, t.n = n, t.width = (int64_t)(s.NH + s.KV) * s.QK + (int64_t)s.KV * s.HS;
        t.x = rest.take<real>(n * t.width), t.dc = rest.take<real>(heads * s.HS);
        for (int kind = 0; kind < 2; kind++) {
            t.c[kind] = rest.take<real>(heads * s.HS), t.d[kind] = rest.take<real>(n * t.width);
            t.lse[kind] = rest.take<wide>(heads), t.peak[kind] = rest.take<wide>(heads);
        }
        t.D = rest.take<wide>(heads);
        if (rest.at <= rest.end) return t;
    }
}

// Runs a layer by one kind of kernels. Backward reads what forward by mma.sync has saved.
static inline void trial_run(const AttentionTrial &t, int layer, int wgmma, Gpu *gpu) {
    AttentionShape s = t.s;
    QkvPlaces qkv = qkv_row(t.x, s.NH, s.KV, s.QK, s.HS);
    QkvPlaces d = qkv_row(t.d[wgmma], s.NH, s.KV, s.QK, s.HS);
    by_kind(layer, wgmma, gpu, [&] {
        if (layer == ATTENTION_BACKWARD)
            attend_backward(d.of, t.D, t.dc, t.c[0], t.lse[0], qkv.of, s, gpu);
        else attend_forward(t.c[wgmma], t.peak[wgmma], t.lse[wgmma], qkv.of, s, gpu);
    });
}

// Whether both kinds compute the same. All results begin as NaN, so that a missing one shows.
static inline bool trial_agrees(const AttentionTrial &t, int layer, double *error, Gpu *gpu) {
    int64_t rows = t.n * t.s.NH, results = (real *)t.D - t.c[0];
    cudaCheck(cudaMemsetAsync(t.c[0], 0xff, results * sizeof(real), gpu->stream));
    if (layer == ATTENTION_BACKWARD) trial_run(t, ATTENTION_FORWARD, 0, gpu);
    for (int wgmma : {0, 1}) trial_run(t, layer, wgmma, gpu);
    if (layer == ATTENTION_BACKWARD) return compare(t.d[1], t.d[0], t.n * t.width, error, gpu);
    return compare(t.c[1], t.c[0], rows * t.s.HS, error, gpu) &&
           compare(t.lse[1], t.lse[0], rows, error, gpu) &&
           compare(t.peak[1], t.peak[0], rows, error, gpu);
}

// Whether a layer has kernels by wgmma on this GPU.
static inline bool attend_possible(AttentionShape s, int layer, const Gpu *gpu) {
    auto nothing = [](auto) {};
    if (sizeof(real) != 2 || gpu->capability != 90) return false;
    if (layer == ATTENTION_FORWARD) return forward_launch_sm90(s.QK, s.HS, nothing);
    return backward_launch_sm90(s.QK, s.HS, nothing);
}

// Chooses the kernels of attention. s: the run's sizes. arena, and s.begins and s.ends: memory that
// nobody uses yet.
static inline void attend_choose(AttentionShape s, int wanted, real *arena, int64_t count,
                                 Gpu *gpu) {
    AttentionTrial t = attention_trial(s, {arena, arena + count});
    CHECK(wanted != KERNELS_WGMMA || attend_possible(s, ATTENTION_FORWARD, gpu),
          "--kernels wgmma needs PREC=bf16, compute capability 9.0 and heads of 64, 96, 128 or "
          "192/128, found %s, %d.%d and %d/%d\n  -> --kernels auto",
          sizeof(real) == 2 ? "bf16" : "fp32", gpu->capability / 10, gpu->capability % 10, s.QK,
          s.HS);
    if (t.s.B) {
        fill_random(t.x, t.c[0] - t.x, gpu);  // and dc
        if (s.begins)
            LAUNCH(fill_documents_kernel, CEIL_DIV(t.n, COMPARE_THREADS), COMPARE_THREADS, 0,
                   gpu->stream, const_cast<int32_t *>(s.begins), const_cast<int32_t *>(s.ends),
                   (int)t.n, s.T);
    }
    for (int layer : {ATTENTION_FORWARD, ATTENTION_BACKWARD}) {
        bool possible = t.s.B && attend_possible(s, layer, gpu);
        int kernels = possible ? wanted : KERNELS_MMA;
        gpu->plans->kinds[layer] = kind_choose(t, layer, kernels, gpu);
    }
}
