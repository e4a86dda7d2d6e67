// experts.cuh: the products of experts. For each form the run has chosen the kernels of moe.cuh
// (mma.sync) or, on compute capability 9.0, those of experts_sm90.cuh (wgmma).
//
//   experts_forward, experts_backward    the products, with the kernels of gpu->plans
//   experts_choose                       compares both kinds on this GPU when training begins, and
//                                        chooses
#pragma once
#include "experts_sm90.cuh"
#include "kinds.cuh"

template <int FORM> static inline void grouped_product(const Grouped &f, Gpu *gpu) {
    if constexpr (sizeof(real) == 2)
        if (by_wgmma(gpu, EXPERTS_FORWARD + FORM)) return grouped_launch_sm90<FORM>(f, gpu);
    grouped_launch<FORM>(f, gpu);
}

// y[row] = c x[row] W_e^T, SET.
static inline void experts_forward(real *y, const real *x, const Experts &e, Gpu *gpu) {
    grouped_product<FORWARD>({e, x, e.w, y}, gpu);
}

// dW_e = c dy^T x over the rows of e, SET or ADD;  dx[row] = c dy[row] W_e, SET.
static inline void experts_backward(real *dx, const real *dy, const real *x, const Experts &e,
                                    Gpu *gpu) {
    grouped_product<WEIGHT>({e, dy, x, nullptr}, gpu);
    grouped_product<INPUT>({e, dy, e.w, dx}, gpu);
}

// ------------------------------------------------------------------------------------- the choice

// The arrays of a comparison, for the products of a layer, one after the other: up, whose rows may
// be gathered, and down. result: of each kind, y, dx or dw.
struct ExpertsTrial {
    Experts products[2];
    int64_t tokens;
    real *x, *dy, *w, *result[2];
    int64_t result_size;       // elements of one result
};

static inline int64_t experts_weights(const Experts &e) {
    return (int64_t)e.E * e.parts * e.width * e.in;
}

// Rows of experts as a router may leave them, at `to` on the device: start, source and tiles.
// Expert 0 has none and expert 1 twice its share; every token has the same number of rows.
static inline void experts_rows(ExpertsTrial *t, int64_t rows, int32_t *to, Gpu *gpu) {
    int E = t->products[0].E;
    int64_t bound = row_tiles(rows, E), count = E + 1 + rows + 2 * bound;
    int32_t *start = (int32_t *)check_alloc(count * sizeof *start, "rows of experts");
    int32_t *source = start + E + 1, *tiles = source + rows, n = 0;
    for (int e = 0; e < E; e++) start[e] = e > 1 ? (int32_t)(rows * e / E) : 0;
    start[E] = (int32_t)rows;
    for (int64_t i = 0; i < rows; i++) source[i] = (int32_t)(i % t->tokens);
    for (int e = 0; e < E; e++)
        for (int32_t row = start[e]; row < start[e + 1]; row += ROW_TILE, n++)
            tiles[2 * n] = e, tiles[2 * n + 1] = row;
    for (; n < bound; n++) tiles[2 * n] = -1, tiles[2 * n + 1] = (int32_t)rows;
    cudaCheck(cudaMemcpyAsync(to, start, count * sizeof *to, cudaMemcpyHostToDevice, gpu->stream));
    cudaCheck(cudaStreamSynchronize(gpu->stream));
    free(start);
    for (Experts &e : t->products) {
        e.rows = rows, e.start = to, e.tiles = to + E + 1 + rows;
        if (e.source) e.source = to + E + 1;
        e.w = t->w, e.to_dw = SET;
    }
}

// Makes a trial of as many experts and tokens as fit in the arena; tokens is 0 if not even one
// does.
static inline ExpertsTrial experts_trial(const Experts products[2], int64_t tokens, Arena arena,
                                         Gpu *gpu) {
    ExpertsTrial t = {{products[0], products[1]}, tokens, nullptr, nullptr, nullptr, {}, 0};
    int64_t each = products[0].rows / tokens, per_float = sizeof(wide) / sizeof(real);
    while (t.tokens) {
        int E = t.products[0].E;
        int64_t rows = t.tokens * each, x = 0, dy = 0, w = 0;
        for (const Experts &e : t.products) {
            x = max(x, rows * e.in);
            dy = max(dy, rows * e.parts * e.width);
            w = max(w, experts_weights(e));
        }
        t.result_size = max(max(x, dy), w * per_float);
        Arena rest = arena;
        t.x = rest.take<real>(x), t.dy = rest.take<real>(dy), t.w = rest.take<real>(w);
        for (real *&result : t.result) result = rest.take<real>(t.result_size);
        int32_t *indices = rest.take<int32_t>(E + 1 + rows + 2 * row_tiles(rows, E));
        if (rest.at <= rest.end) {
            experts_rows(&t, rows, indices, gpu);
            fill_random(t.x, t.result[0] - t.x, gpu);  // and dy and w
            return t;
        }
        if (w > x && E > 1) for (Experts &e : t.products) e.E = (e.E + 1) / 2;
        else t.tokens /= 2;
    }
    return t;
}

// Runs a form of one product by one kind of kernels.
static inline void product_run(const ExpertsTrial &t, Experts e, int layer, int wgmma, Gpu *gpu) {
    real *result = t.result[wgmma];
    e.dw = (wide *)result;
    by_kind(layer, wgmma, gpu, [&] {
        if (layer == EXPERTS_FORWARD) grouped_product<FORWARD>({e, t.x, e.w, result}, gpu);
        if (layer == EXPERTS_INPUT) grouped_product<INPUT>({e, t.dy, e.w, result}, gpu);
        if (layer == EXPERTS_WEIGHT) grouped_product<WEIGHT>({e, t.dy, t.x, nullptr}, gpu);
    });
}

static inline void trial_run(const ExpertsTrial &t, int layer, int wgmma, Gpu *gpu) {
    for (const Experts &e : t.products) product_run(t, e, layer, wgmma, gpu);
}

// Whether both kinds compute the same. All results begin as NaN, so that a missing one shows. dW
// is SET, then added to.
static inline bool trial_agrees(const ExpertsTrial &t, int layer, double *error, Gpu *gpu) {
    for (Experts e : t.products) {
        for (int kind = 0; kind < 2; kind++) {
            cudaCheck(cudaMemsetAsync(t.result[kind], 0xff, t.result_size * sizeof(real),
                                      gpu->stream));
            for (int to_dw = SET; to_dw <= (layer == EXPERTS_WEIGHT ? ADD : SET); to_dw++) {
                e.to_dw = to_dw;
                product_run(t, e, layer, kind, gpu);
            }
        }
        int64_t n = e.rows * (layer == EXPERTS_FORWARD ? e.parts * e.width : e.in);
        bool same = layer == EXPERTS_WEIGHT
                        ? compare((wide *)t.result[1], (wide *)t.result[0], experts_weights(e),
                                  error, gpu)
                        : compare(t.result[1], t.result[0], n, error, gpu);
        if (!same) return false;
    }
    return true;
}

// Chooses the kernels of experts. products: the run's, up and down, for this many tokens. arena:
// memory that nobody uses yet.
static inline void experts_choose(const Experts products[2], int64_t tokens, int wanted,
                                  real *arena, int64_t count, Gpu *gpu) {
    bool possible = sizeof(real) == 2 && gpu->capability == 90 && wanted != KERNELS_MMA;
    ExpertsTrial t = {};
    if (possible) t = experts_trial(products, tokens, {arena, arena + count}, gpu);
    if (!t.tokens) wanted = KERNELS_MMA;
    for (int layer : {EXPERTS_FORWARD, EXPERTS_INPUT, EXPERTS_WEIGHT})
        gpu->plans->kinds[layer] = kind_choose(t, layer, wanted, gpu);
}
