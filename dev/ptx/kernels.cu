// kernels.cu: the launchers of train_gpt.cu as plain C functions, which Python calls (gpu.py). A
// number is an int64_t or a double, and everything else a pointer. So Python mirrors no struct: a
// struct with many fields is filled here by a set_ function. Nothing here computes: grids, shared
// memory and arguments of kernels are the launchers' own.
//
// It includes the trainer, so its PTX holds exactly the kernels of train_gpt.cu.
#define main trainer_main
#include "../../train_gpt.cu"

typedef int64_t Int;

static Gpu context, *gpu = &context;
static Heads heads[18];        // attention: q, k, v, then their gradients; qkv: see places_of
static Norm norms[3];
static Router router;
static Experts experts;
static Linear linear;
static AdamWStep adamw_step;
static Arenas arenas;
static Logits logits;

extern "C" {
void set_scratch(float *at, Int floats) {
    context.scratch = at;
    context.scratch_size = floats;
    cudaDeviceProp device;
    cudaCheck(cudaGetDeviceProperties(&device, 0));
    context.processors = device.multiProcessorCount;
    context.shared_bytes = device.sharedMemPerBlockOptin;
}

// -------------------------------------------------------------------------------------- attention

void set_heads(Int slot, real *at, Int ld, Int head) { heads[slot] = {at, (int)ld, (int)head}; }

static int32_t *begins, *ends;  // of documents
void set_documents(int32_t *b, int32_t *e) { begins = b, ends = e; }

static AttentionShape shape_of(const Int *s, double scale) {    // B, T, NH, KV, QK, HS
    AttentionShape shape = attention_shape(s[0], s[1], s[2], s[3], s[4], s[5], scale);
    shape.begins = begins, shape.ends = ends;
    return shape;
}
void run_attention_forward(real *c, wide *peak, wide *lse, const Int *shape, double scale) {
    attention_forward(c, peak, lse, heads, shape_of(shape, scale), gpu);
}
void run_attention_backward(wide *D, real *dc, real *c, wide *lse, const Int *shape, double scale) {
    attention_backward(heads + 3, D, dc, c, lse, heads, shape_of(shape, scale), gpu);
}
// The kinds of kernels that these layers have, as digits. Plans keep mma.sync.
static Int kinds_chosen(int first, int end) {
    Int kinds = 0;
    for (int layer = first; layer < end; layer++) {
        kinds = 10 * kinds + context.plans->kinds[layer];
        context.plans->kinds[layer] = BY_MMA;
    }
    return kinds;
}
// Chooses by comparing; returns the kinds of forward and backward.
Int run_attend_choose(real *arena, Int count, const Int *shape, double scale) {
    if (!context.plans) context.plans = plans_create(0);
    context.capability = sizeof(real) == 2 ? 90 : 0;
    attend_choose(shape_of(shape, scale), KERNELS_WGMMA, arena, count, gpu);
    return kinds_chosen(ATTENTION_FORWARD, EXPERTS_FORWARD);
}
void run_decode(real *c, real *k, real *v, Int cached, const Int *shape, double scale) {
    KvCache cache = {};
    cache.k = k;
    cache.v = v;
    cache.cached = cached;
    kv_cache_fill(cache, heads, shape_of(shape, scale), gpu);
    attention_decode(c, heads[0], cache, shape_of(shape, scale), gpu);
}

// ------------------------------------------------------------------------------------------ norms

void set_norm(Int slot, Int on, Int groups, Int width, Int gains, double scale, Int n, double eps) {
    norms[slot] = {};
    Site &site = norms[slot].site;
    site.on = on;
    site.groups = groups;
    site.width = width;
    site.gains = gains;
    site.scale = scale;
    norms[slot].n = n;
    norms[slot].eps = eps;
}
void set_norm_arrays(Int slot, real *w, real *b, wide *dw, wide *db, wide *mean, wide *rstd) {
    Norm &norm = norms[slot];
    norm.w = w;
    norm.b = b;
    norm.dw = dw;
    norm.db = db;
    norm.mean = mean;
    norm.rstd = rstd;
    norm.site.bias = b != nullptr;
}
void set_norm_alpha(Int slot, real *alpha, wide *dalpha) {
    norms[slot].alpha = alpha;
    norms[slot].dalpha = dalpha;
}
void set_norm_experts(Int slot, int32_t *start, Int count) {
    norms[slot].start = start;
    norms[slot].experts = count;
}

// norms[0] is the next norm, norms[1] the out norm.
void run_add_norm(real *s, real *z, real *y, real *skip, double a) {
    add_norm_forward({s, z, y, skip, (float)a, &norms[1], &norms[0]}, gpu);
}
void run_norm_backward(real *dx, real *sum, real *dy, real *x, real *add, real *other, double a,
                       double b, double c) {
    norm_backward(&norms[0], {dx, sum, dy, x, add, other, (float)a, (float)b, (float)c}, gpu);
}

// norms[0] is of y, norms[1] of the sum.
void run_interpolate_forward(real *z, real *y, real *skip, real *p) {
    Interpolation f = {p, nullptr, norms[0], norms[1]};
    interpolate_forward(z, y, skip, &f, gpu);
}
void run_interpolate_backward(real *dy, real *dskip, real *dz, real *z, real *y, real *skip,
                              real *p, wide *dp) {
    Interpolation f = {p, dp, norms[0], norms[1]};
    interpolate_backward({dy, dskip, dz, z, y, skip}, &f, gpu);
}
void run_gain_forward(real *y, real *x) { gain_forward(y, x, &norms[0], gpu); }
void run_gain_backward(real *dx, real *dy, real *x) { gain_backward(dx, dy, x, &norms[0], gpu); }

// --------------------------------------------------------------------------------- q, k and v; ffn

// heads[3 i + part]: i = 0, 1: `of` and `turned` of the results, 2, 3: of d, 4, 5: of raw.
static QkvPlaces places_of(int i) {
    QkvPlaces places;
    for (int p = 0; p < 3; p++) {
        places.of[p] = heads[3 * i + p];
        places.turned[p] = heads[3 * i + 3 + p];
    }
    return places;
}
static QkvParts parts_of(const Int *s, float2 *rotary) {        // B, T, NH, KV, QK, R, HS
    QkvShape shape = {(int)s[0], (int)s[1], (int)s[2], (int)s[3],
                      (int)s[4], (int)s[5], (int)s[6], rotary};
    return qkv_parts(places_of(0), places_of(2), places_of(4), norms, shape);
}
void run_qkv_forward(const Int *shape, float2 *rotary) {
    qkv_forward(parts_of(shape, rotary), gpu);
}
void run_qkv_backward(const Int *shape, float2 *rotary) {
    qkv_backward(parts_of(shape, rotary), gpu);
}

// heads[0] results, heads[1] gradients, heads[2] inputs
void run_latent_forward(void) {
    qkv_forward(latent_parts(heads[0], {}, heads[2], &norms[0]), gpu);
}
void run_latent_backward(void) {
    qkv_backward(latent_parts(heads[0], heads[1], heads[2], &norms[0]), gpu);
}
void run_latent_sum(Int n, Int count, Int R) { latent_sum(heads[0], heads[1], n, count, R, gpu); }

void run_activation_forward(real *h, real *gu, Int n, Int F, Int swiglu) {
    activation_forward(h, gu, n, F, swiglu, gpu);
}
void run_activation_backward(real *dgu, real *dh, real *gu, Int n, Int F, Int swiglu) {
    activation_backward(dgu, dh, gu, n, F, swiglu, gpu);
}

// -------------------------------------------------------------------------------- router, experts

void set_router(Int B, Int T, Int E, Int K, Int kind, double scale, double balance, double sequence,
                double z_loss) {
    router = {};
    router.B = B;
    router.T = T;
    router.E = E;
    router.K = K;
    router.kind = kind;
    router.scale = scale;
    router.balance = balance;
    router.sequence = sequence;
    router.z_loss = z_loss;
}
void set_router_inputs(wide *z, wide *bias) {
    router.z = z;
    router.bias = bias;
}
void set_router_results(wide *gate, wide *lse, wide *entropy, wide *load, wide *share,
                        int32_t *choice, int32_t *place, int32_t *start, int32_t *source,
                        int32_t *tiles) {
    router.gate = gate;
    router.lse = lse;
    router.entropy = entropy;
    router.load = load;
    router.share = share;
    router.choice = choice;
    router.place = place;
    router.start = start;
    router.source = source;
    router.tiles = tiles;
}
Int router_tiles(Int rows, Int E) { return row_tiles(rows, E); }
void run_router_forward(void) { router_forward(router, gpu); }
void run_router_backward(real *dz, wide *dgate, double dloss) {
    router_backward(dz, dgate, router, dloss, gpu);
}
void run_router_count(double *loss, wide *loads, double *stats) {
    router_count(loss, loads, stats, router, gpu);
}
void run_router_balance(wide *bias, wide *loads, Int E, double rate, int *applied) {
    router_balance(bias, loads, E, rate, applied, gpu);
}
void run_combine(real *y, real *rows, real *add, double scale, Int C) {
    combine(y, rows, router, {add, (float)scale}, C, gpu);
}
void run_combine_backward(real *drows, wide *dgate, real *dy, real *rows, Int C) {
    combine_backward(drows, dgate, dy, rows, router, C, gpu);
}

void set_experts(real *w, wide *dw, Int E, Int parts, Int width, Int in, double c, Int rows,
                 int32_t *start, int32_t *tiles, int32_t *source) {
    experts = {w, dw, (int)E, (int)parts, (int)width, (int)in, (float)c, rows, start, tiles,
               source};
}
// From now on the products of experts are by these kernels.
void set_experts_kind(Int kind) {
    if (!context.plans) context.plans = plans_create(0);
    for (int layer = EXPERTS_FORWARD; layer <= EXPERTS_WEIGHT; layer++)
        context.plans->kinds[layer] = (uint8_t)kind;
}
// Chooses for such experts, up, and one part down; returns the kinds of the three forms.
Int run_experts_choose(real *arena, Int count, Int tokens, Int K) {
    Experts products[2] = {experts, experts};
    products[0].rows = products[1].rows = tokens * K;
    products[1].parts = 1;
    products[1].width = experts.in;
    products[1].in = experts.width;
    products[1].source = nullptr;
    context.capability = sizeof(real) == 2 ? 90 : 0;
    experts_choose(products, tokens, KERNELS_WGMMA, arena, count, gpu);
    return kinds_chosen(EXPERTS_FORWARD, LAYERS_OF_TWO_KINDS);
}
void run_experts_forward(real *y, real *x) { experts_forward(y, x, experts, gpu); }
void run_experts_backward(real *dx, real *dy, real *x) {
    experts_backward(dx, dy, x, experts, gpu);
}

// --------------------------------------------------------------------------------- loss, embedding

void set_logits(real *z, wide *losses, wide *logsum, int32_t *targets, Int n, Int V, Int Vp,
                double z_loss) {
    logits = {z, losses, logsum, targets, n, (int)V, (int)Vp, (float)z_loss, Norm{}};
}
void set_logits_gain(void) { logits.gain = norms[0]; }
void run_classifier(Int gradient) { classifier(logits, gradient, gpu); }
void run_gained_classifier_backward(double scale) {
    gained_classifier_backward(logits, scale, gpu);
}
void run_loss_sums(double *sums) { loss_sums(sums, logits, gpu); }

void run_embedding_forward(real *e, int32_t *tokens, real *wte, real *wpe, Int B, Int T, Int C,
                           double scale) {
    embedding_forward(e, tokens, wte, wpe, begins, B, T, C, scale, gpu);
}
Int group_ints(Int n) { return 4 * n; }
void run_token_groups(int32_t *groups, int32_t *tokens, int32_t *from, Int B, Int T) {
    token_groups(groups, tokens, B * T);
    position_groups(groups, from, B * T, T);
}
void run_embedding_backward(wide *dwte, wide *dwpe, real *de, int32_t *groups, Int B, Int T, Int C,
                            double scale) {
    embedding_backward(dwte, dwpe, de, groups, B, T, C, scale, gpu);
}

// ----------------------------------------------------------------------------------------- linear
// The products themselves are computed by dev/emu/cublaslt.cpp, on the CPU.

void set_linear(real *w, real *b, wide *dw, wide *db, Int n, Int out, Int in, double c) {
    if (!context.plans) context.plans = plans_create(0);
    linear = {w, b, dw, db, n, (int)out, (int)in, (float)c};
}
void run_linear_forward(real *y, real *x, real *add, double scale) {
    linear_forward(y, x, linear, {add, (float)scale}, gpu);
}
void run_linear_gelu_forward(real *h, real *pre, real *x) {
    linear_gelu_forward(h, pre, x, linear, gpu);
}
void run_linear_backward(real *dx, real *dy, real *x, real *add, double scale) {
    linear_backward(dx, dy, x, linear, {add, (float)scale}, gpu);
}
void run_probe(void) { LAUNCH(probe_kernel, 1, 1, 0, gpu->stream); }

// ------------------------------------------------------------------------------- AdamW, statistics

void set_arenas(real *w, float *master, float *m, float *v, float *d, Int total) {
    arenas = {w, master, m, v, d, total};
}
void set_step(double beta1, double beta2, double eps, double correct1, double correct2, double clip,
              Int stochastic, Int key, double max_ce, double max_norm) {
    adamw_step = {(float)beta1, (float)beta2, (float)eps, (float)correct1, (float)correct2,
                  (float)clip, (int)stochastic, (uint64_t)key, max_ce, max_norm};
}
Int entry_bytes(void) { return sizeof(UpdateEntry); }
void set_entry(UpdateEntry *entries, Int k, Int offset, Int state, Int size, double lr,
               double decay, double target, Int line, Int step) {
    entries[k] = {offset, state, size, (float)lr, (float)decay, (float)target, (int)line,
                  (int)step};
}
Int state_bytes(void) { return sizeof(UpdateState); }
void set_state(UpdateState *state, double sum0, double sum1, double sum2) {
    *state = {};
    state->sums[0] = sum0;
    state->sums[1] = sum1;
    state->sums[2] = sum2;
}
// to: square, norm, clip_factor, applied
void get_state(double *to, const UpdateState *state) {
    to[0] = state->sums[SUM_SQUARE];
    to[1] = state->norm;
    to[2] = state->clip_factor;
    to[3] = state->applied;
}
void run_gradient_square(UpdateState *state, const UpdateEntry *entries, Int count) {
    gradient_square(&state->sums[SUM_SQUARE], arenas, entries, count, gpu);
}
void run_adamw(const UpdateEntry *entries, Int count, UpdateState *state) {
    adamw_apply(arenas, entries, count, state, adamw_step, gpu);
}
void run_normalize(const UpdateEntry *entries, Int count, const UpdateState *state) {
    ngpt_normalize(arenas, entries, count, state, adamw_step, gpu);
}
void run_weights_round(Int stochastic, Int key) {
    weights_round(arenas.w, arenas.master, arenas.total, stochastic, key, gpu);
}
void run_tensor_sums(TensorStats *sums, const UpdateEntry *entries, Int count) {
    for (Int k = 0; k < count; k++)
        tensor_sums(sums + k, arenas, entries + k, adamw_step, gpu, nullptr);
}
void set_muon(UpdateEntry *entry, double scale) { entry->scale = (float)scale; }
// x: where the direction is copied to.
void run_muon(real *scratch, const UpdateEntry *entry, UpdateState *state, Int count, Int rows,
              Int cols, double momentum, real *x, TensorStats *sums) {
    if (!context.plans) context.plans = plans_create(0);
    MuonTensor m = {*entry, (int)count, (int)rows, (int)cols, scratch};
    muon_apply(m, arenas, state, adamw_step, (float)momentum, gpu);
    const real *last = muon_direction(m, arenas, state, (float)momentum, false, gpu);
    memcpy(x, last, m.e.size * sizeof(real));
    tensor_sums(sums, arenas, entry, adamw_step, gpu, last);
}
// Index 0 is attention, 1 the ffn. p is nullptr but for nGPT.
void run_layer_sums(LayerSums *sums, real *const *s, real *const *skip, real *x, wide *peak,
                    const double *a, Int n, Int C, Int rows, wide *const *rstd, real *const *p) {
    for (int k = 0; k < 2; k++)
        sublayer_stats(&sums->squares[ATTN_BRANCH + 2 * k], s[k], s[k], skip[k], a[k],
                       p ? p[k] : nullptr, p ? rstd[k] : nullptr, n, (int)C, gpu);
    squares_add(&sums->squares[STREAM], {x, nullptr, 0, 1}, n, (int)C, gpu);
    peak_add(&sums->logit, peak, rows, gpu);
}

// The trainer with these flags. A launch that fails ends the program.
Int run_trainer(Int argc, char **argv) { return trainer_main(argc, argv); }
}
