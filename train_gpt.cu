// train_gpt.cu: the CUDA trainer. The same models, placements, flags, data and checkpoints as train_gpt.c, on one NVIDIA GPU, or on several with a process each.
//
// 1. Memory, the model, the step, and the table of functions the shared services drive (llmc/run/trainer.h). Layers are in llmc/*.cuh, the block in llmc/block.cuh.
// 2. Built once per precision: PREC=bf16 keeps weights and activations in bfloat16 beside float master weights; PREC=fp32 keeps everything in float.
//    Arithmetic inside kernels, statistics, parameter gradients and AdamW's moments are float in both.
// 3. A step does not wait for the GPU: batches are copied from two pinned buffers in turn, the losses, the norm, the clip factor and the decision whether the
//    update happens stay on the device; the host reads them once, at the step's end.
// 4. No floating-point atomics, fixed orders of summation: the same command gives the same bits. (Of several processes NCCL's order is its own.)
// 5. Several processes (llmc/run/comm.h): in a step's last backward each layer's gradients travel to their owners while the layers below are computed; what the step
//    decides on is added up on the device; each process updates its parts, which then go to all. What lies where is said at gpt_count.
#include "llmc/gpu.cuh"
#include "llmc/nccl.cuh"
#include "llmc/run/trainer.h"
#include "llmc/block.cuh"
#include "llmc/adamw.cuh"
#include "llmc/run/train.h"

// ------------------------------------------------------------------------------------------------------------------ memory

struct Gpt {
    Model m;
    Setup setup;
    Sizes max, now;                                     // the micro-batch memory was made for, and the one in work
    Layout layout;
    ActLayout act_layout;
    Gpu gpu;
    Nccl nccl;
    real *weights, *acts, *grads;                       // weights of the products; activations and their gradients
    float *tensors[TENSOR_KINDS];                       // master weights (in fp32 the weights themselves), parameter gradients, moments
    float *host[TENSOR_KINDS], *logits_row;             // the host's copies, each made when it is first asked for
    float **router_bias;                                // of each layer, among the master weights: nullptr where it has none
    float2 *rotary;
    int32_t *staged[2], *batch;                         // pinned, in turn, and on the device: inputs | targets | groups of equal tokens
    cudaEvent_t copied[2];
    int turn;
    UpdateEntry *entries, *host_entries;
    UpdateState *state, *host_state;
    LayerSums *layer_sums, *host_layer_sums;            // what --norms-every shows: of each layer, each entry
    TensorSums *tensor_sums, *host_tensor_sums;
    double *router_sums, *host_router_sums;             // of each layer ROUTER_SUMS sums and E loads
    bool watching;
    int64_t seen, watched;                              // tokens in state->sums, in layer_sums
    real *kv_cache;                                         // keys and values of a text, layer by layer; made when extend first asks for it
    int cached, cached_before;                              // how many of its rows are there, under these weights; extending: those before the rows in work
    bool decoding;
    cudaGraphExec_t forward_graph, backward_graph;
    double scale;                                       // of the backward in work, and in its graph
    bool preparing;                                     // the dry step of gpt_prepare: nothing is recorded
    bool traveling;                                     // in the backward in work gradients go to their owners
};

enum { SCRATCH_ROWS = 512, RESERVE_MIB = 512, NCCL_MIB = 512 };      // partial sums of a gain; what CUDA's own code takes; room for NCCL's buffers, an estimate

static inline int64_t batch_ints(int64_t n) { return 4 * n + 2; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// A router's chunks of a micro-batch (moe.cuh), and one row of the gains of all experts, are room that only experts take.
static inline int64_t scratch_floats(const Model *m, const Setup *setup) {
    RouterShape r = {setup->B, setup->T, m->moe.E, m->moe.K, 0, 0, 0, 0, 0};
    return most((int64_t)SCRATCH_ROWS * most(2 * most(m->F, MLP_WIDTH), 4 * m->C), most((int64_t)router_scratch(r), (int64_t)m->moe.E * most(2 * m->F, m->C)));
}
static inline int64_t router_doubles(const Model *m) { return (int64_t)m->L * (ROUTER_SUMS + m->moe.E); }
static inline int gpt_ratio(void) { return (int)(sizeof(wide) / sizeof(real)); }

// Where processes are several, all have the weights of the products and their own sums of gradients, whole. Moments they have of what they own alone (memory.h), and
// so it is with master weights where these are others than the products' (bf16): they come together where gradients lie, which between steps nobody needs.
static int64_t gpt_count(const Layout *layout, int kind, bool training) {
    bool owned = kind >= ADAM_M || (kind == WEIGHTS && training && gpt_ratio() > 1);
    return owned ? layout->state : layout->total;
}

static inline int64_t kv_cache_values(const Model *m, int T) { return (int64_t)m->L * T * kv_cache_width(m); }

// Bytes on the device: all that gpt_create takes, and what extend does.
static double gpt_bytes(const Model *m, const Setup *setup, double tables) {
    Layout layout = layout_make(m);
    size_t bytes = (size_t)batch_ints((int64_t)setup->B * setup->T) * sizeof(int32_t) +
                   (size_t)scratch_floats(m, setup) * sizeof(float) +
                   (size_t)m->L * sizeof(LayerSums) + (size_t)router_doubles(m) * sizeof(double) +
                   (size_t)layout.count * (sizeof(UpdateEntry) + sizeof(TensorSums)) +
                   PLANS_WORKSPACE + ((size_t)RESERVE_MIB << 20);
    if (comm_size(setup->comm) > 1) bytes += (size_t)NCCL_MIB << 20;
    layout_free(&layout);
    return tables + (double)bytes;
}

// What the kernels ask of a model's sizes: attention of its heads and its sequence; 16-byte rows, of logits of routers too; biases of products that are one, side by side without gaps.
static void gpt_refuse(const Model *m) {
    int longest = attention_kernels(qk_size(m), m->HS)->longest;
    CHECK(m->T <= longest, "--seq %d; on a GPU with heads of %d it is at most %d\n  -> --seq %d, or make train_gpt DEVICE=cpu", m->T, m->HS, longest, longest);
    CHECK(m->kv_rank % 16 == 0, "--kv-rank %d; on a GPU it must be a multiple of 16\n  -> --kv-rank %d, or make train_gpt DEVICE=cpu", m->kv_rank, CEIL_DIV(m->kv_rank, 16) * 16);
    CHECK(m->F % 8 == 0, "--ffn %d; on a GPU it must be a multiple of 8\n  -> --ffn %d, or make train_gpt DEVICE=cpu", m->F, CEIL_DIV(m->F, 8) * 8);
    CHECK(m->moe.dense_F % 8 == 0, "--dense-ffn %d; on a GPU it must be a multiple of 8\n  -> --dense-ffn %d, or make train_gpt DEVICE=cpu", m->moe.dense_F, CEIL_DIV(m->moe.dense_F, 8) * 8);
    CHECK(m->moe.E % 8 == 0 && m->moe.E <= ROUTER_MOST, "--experts %d; on a GPU they must be a multiple of 8, at most %d\n  -> --experts %d, or make train_gpt DEVICE=cpu", m->moe.E, ROUTER_MOST,
          m->moe.E < ROUTER_MOST ? CEIL_DIV(m->moe.E, 8) * 8 : ROUTER_MOST);
    CHECK(!m->bias || (m->NH * m->HS % ALIGN == 0 && m->KV * m->HS % ALIGN == 0 && (!m->swiglu || m->F % ALIGN == 0)),
          "--bias on with heads of %d x %d and %d, --ffn %d; on a GPU biases must be multiples of %d\n  -> --bias off, or make train_gpt DEVICE=cpu", m->NH, m->HS, m->KV, m->F, ALIGN);
}

static double gpt_room(const Model *m, const Setup *setup) {
    size_t free_bytes, total;
    int devices = 0;
    Gpu gpu = {};
    gpt_refuse(m);
    if (cudaGetDeviceCount(&devices) != cudaSuccess || !devices) return NAN;
    gpu_open(&gpu, comm_local(setup->comm));
    cudaCheck(cudaMemGetInfo(&free_bytes, &total));
    gpu_close(&gpu);
    return (double)free_bytes;
}

template <typename T> static T *device_alloc(int64_t count, const char *what) {
    T *p = nullptr;
    cudaError_t error = cudaMalloc((void **)&p, (size_t)count * sizeof(T));
    CHECK(error == cudaSuccess, "no GPU memory for %s (%lld MiB): %s\n  -> a smaller --micro-batch, or --recompute on; nvidia-smi shows who else uses the GPU", what, (long long)(count * (int64_t)sizeof(T) >> 20), cudaGetErrorString(error));
    return p;
}

template <typename T> static T *pinned_alloc(int64_t count) {
    T *p = nullptr;
    cudaCheck(cudaMallocHost((void **)&p, (size_t)count * sizeof(T)));
    memset((void *)p, 0, (size_t)count * sizeof(T));
    return p;
}

// Whether this process has master weights of its parts alone.
static bool gpt_has_parts(const Gpt *g) { return g->nccl.size > 1 && g->setup.training && gpt_ratio() > 1; }

static void gpt_alloc_tensors(Gpt *g) {
    for (int kind = 0; kind < setup_kinds(&g->setup); kind++) {
        int64_t count = gpt_count(&g->layout, kind, g->setup.training);
        g->tensors[kind] = device_alloc<float>(count, "the parameters, their gradients and moments");
        cudaCheck(cudaMemsetAsync(g->tensors[kind], 0, (size_t)count * sizeof(float), g->gpu.stream));
    }
    g->router_bias = (float **)check_alloc((size_t)g->m.L * sizeof *g->router_bias, "a list of layers");
    for (const Entry *e = g->layout.entries; e < g->layout.entries + g->layout.count; e++)
        if (e->id == PARAM_router_bias) g->router_bias[e->layer] = g->tensors[WEIGHTS] + (gpt_has_parts(g) ? e->state : e->offset);
    g->weights = gpt_ratio() > 1 ? device_alloc<real>(g->layout.total, "the weights of the products") : (real *)g->tensors[WEIGHTS];
    g->acts = device_alloc<real>(g->act_layout.acts, "the activations");
    if (g->setup.training) g->grads = device_alloc<real>(g->act_layout.grads, "the gradients of activations");
}

static void gpt_alloc_step(Gpt *g) {
    const Model *m = &g->m;
    g->batch = device_alloc<int32_t>(batch_ints(g->max.n), "a batch");
    for (int k = 0; k < 2; k++) {
        g->staged[k] = pinned_alloc<int32_t>(batch_ints(g->max.n));
        cudaCheck(cudaEventCreateWithFlags(&g->copied[k], cudaEventDisableTiming));
    }
    g->gpu.scratch_size = (size_t)scratch_floats(m, &g->setup);
    g->gpu.scratch = device_alloc<float>((int64_t)g->gpu.scratch_size, "partial sums");
    g->state = device_alloc<UpdateState>(1, "the state of an update");
    cudaCheck(cudaMemsetAsync(g->state, 0, sizeof *g->state, g->gpu.stream));
    g->entries = device_alloc<UpdateEntry>(g->layout.count, "the list of tensors");
    g->host_entries = pinned_alloc<UpdateEntry>(g->layout.count);
    g->layer_sums = device_alloc<LayerSums>(m->L, "what is measured of layers");
    g->host_layer_sums = pinned_alloc<LayerSums>(m->L);
    g->tensor_sums = device_alloc<TensorSums>(g->layout.count, "what is measured of tensors");
    g->host_tensor_sums = pinned_alloc<TensorSums>(g->layout.count);
    g->router_sums = device_alloc<double>(router_doubles(m), "what is measured of routers");
    g->host_router_sums = pinned_alloc<double>(router_doubles(m));
    g->host_state = pinned_alloc<UpdateState>(1);
    g->logits_row = pinned_alloc<float>(m->Vp);
    if (!m->rope) return;
    int64_t count = (int64_t)m->T * rotary_size(m) / 2;
    float2 *table = (float2 *)check_alloc((size_t)count * sizeof *table, "the rotary angles");
    rotary_table(table, m->T, rotary_size(m), m->theta);
    g->rotary = device_alloc<float2>(count, "the rotary angles");
    cudaCheck(cudaMemcpyAsync(g->rotary, table, (size_t)count * sizeof *table, cudaMemcpyHostToDevice, g->gpu.stream));
    cudaCheck(cudaStreamSynchronize(g->gpu.stream));
    free(table);
}

static Gpt *gpt_create(const Model *m, const Setup *setup) {
    Gpt *g = (Gpt *)check_alloc(sizeof *g, "the model");
    gpt_refuse(m);
    gpu_open(&g->gpu, comm_local(setup->comm));
    g->m = *m;
    g->setup = *setup;
    g->now = g->max = sizes_make(m, setup->B, setup->T, setup->recompute, 0, gpt_ratio());
    g->layout = layout_make(m);
    layout_share(&g->layout, comm_rank(setup->comm), comm_size(setup->comm));
    g->act_layout = act_layout_make(m, &g->max);
    nccl_open(&g->nccl, setup->comm);
    g->gpu.plans = plans_create(setup->tf32);
    gpt_alloc_tensors(g);
    gpt_alloc_step(g);
    return g;
}

static void gpt_destroy(Gpt *g) {
    cudaCheck(cudaStreamSynchronize(g->gpu.stream));
    nccl_close(&g->nccl);
    if (g->forward_graph) cudaCheck(cudaGraphExecDestroy(g->forward_graph));
    if (g->backward_graph) cudaCheck(cudaGraphExecDestroy(g->backward_graph));
    void *device[] = {gpt_ratio() > 1 ? g->weights : nullptr, g->acts, g->grads, g->kv_cache, g->rotary, g->batch, g->gpu.scratch, g->state, g->entries, g->layer_sums, g->tensor_sums, g->router_sums};
    for (void *p : device) cudaCheck(cudaFree(p));
    for (int kind = 0; kind < TENSOR_KINDS; kind++) {
        cudaCheck(cudaFree(g->tensors[kind]));
        free(g->host[kind]);
    }
    void *pinned[] = {g->staged[0], g->staged[1], g->host_entries, g->host_layer_sums, g->host_tensor_sums, g->host_router_sums, g->host_state, g->logits_row};
    for (void *p : pinned) cudaCheck(cudaFreeHost(p));
    for (int k = 0; k < 2; k++) cudaCheck(cudaEventDestroy(g->copied[k]));
    free(g->router_bias);
    plans_destroy(g->gpu.plans);
    gpu_close(&g->gpu);
    layout_free(&g->layout);
    act_layout_free(&g->act_layout);
    free(g);
}

// ------------------------------------------------------------------------------------------------------------------ the model

static const int32_t *gpt_inputs(const Gpt *g) { return g->batch; }
static const int32_t *gpt_targets(const Gpt *g) { return g->batch + g->now.n; }
static const int32_t *gpt_groups(const Gpt *g) { return g->batch + 2 * g->now.n; }

static Block gpt_block(const Gpt *g, int l) {
    KvCache cache = kv_cache_view(&g->m, g->decoding ? g->kv_cache : nullptr, g->max.T, l, g->cached_before);
    const float2 *rotary = g->rotary ? g->rotary + (int64_t)cache.cached * rotary_size(&g->m) / 2 : nullptr;
    return Block{&g->m, &g->now, place_at(&g->m, l), params_view(&g->layout, g->weights, l), grads_view(&g->layout, g->tensors[GRADS], l),
                 acts_view(&g->act_layout, &g->m, &g->max, g->acts, l, 0), acts_view(&g->act_layout, &g->m, &g->max, g->grads, l, 1), cache, rotary,
                 g->router_bias[l], (float)(g->scale * g->now.n), (Gpu *)&g->gpu};
}

static const real *gpt_head(const Gpt *g, const Block *b) { return g->m.tied ? b->w.wte : b->w.wlm; }

// What a router has to say of its forward: into the loss, the loads that its bias follows, and where it is watched.
static void model_count(Gpt *g, const Block *b, int l) {
    double *sums = g->router_sums + l * (ROUTER_SUMS + (int64_t)g->m.moe.E);
    RouterStats stats = {g->watching ? sums : nullptr, g->watching ? sums + ROUTER_SUMS : nullptr};
    Routed o = routed(b);
    router_count(&g->state->sums[2], b->a.loads, stats, &o, b->a.rz, router_shape(b), &g->gpu);
}

// nGPT's s_z: logits have a gain, which the classifier applies.
static Norm logits_gain(const Block *b) { return block_norm(b, b->p.logits, b->w.logits_w, nullptr, b->dw.logits_w, nullptr, nullptr, nullptr); }

// From tokens to the stream out of the last block. counted: routers' losses are part of this forward's.
static real *model_stream(Gpt *g, bool counted) {
    const Model *m = &g->m;
    Block b = gpt_block(g, 0);
    Norm emb = NORM(&b, emb);
    const real *wpe = b.w.wpe ? b.w.wpe + (int64_t)b.cache.cached * m->C : nullptr;
    embedding_forward(emb.site.on ? b.a.raw : b.a.e, gpt_inputs(g), b.w.wte, wpe, g->now.B, g->now.T, m->C, (float)m->emb_scale, &g->gpu);
    real *x = slot_forward(&emb, b.a.e, emb.site.on ? b.a.raw : b.a.e, &g->gpu);
    for (int l = 0; l < m->L; l++) {
        b = gpt_block(g, l);
        block_row(&b)->forward(&b, x);
        if (b.p.moe && counted) model_count(g, &b, l);
        if (g->watching && !g->decoding) block_watch(&b, &g->layer_sums[l], x);
        x = b.a.x;
    }
    return x;
}

// The logits of the rows in work, of which x is the stream; or what becomes them with their gain.
static void model_head(Gpt *g, real *x) {
    Block b = gpt_block(g, g->m.L - 1);
    Norm fin = NORM(&b, fin);
    x = slot_forward(&fin, b.a.fx, x, &g->gpu);
    linear_forward(b.a.logits, x, gpt_head(g, &b), nullptr, nullptr, 0, linear_shape(&b, g->m.Vp, g->m.C, 1), &g->gpu);
}

// From tokens to losses; where a backward can follow, logits become their gradient here, in the one pass over them, except where they have a gain.
static void model_loss(Gpt *g) {
    model_head(g, model_stream(g, true));
    Block b = gpt_block(g, 0);
    Norm gain = logits_gain(&b);
    if (gain.site.on) gained_classifier_forward(b.a.losses, b.a.logsum, b.a.logits, gpt_targets(g), &gain, g->m.V, &g->gpu);
    else classifier(b.a.losses, b.a.logsum, b.a.logits, gpt_targets(g), g->now.n, g->m.V, g->m.Vp, (float)g->setup.z_loss, g->setup.training, &g->gpu);
    loss_sums(g->state->sums, b.a.losses, b.a.logsum, g->now.n, (float)g->setup.z_loss, &g->gpu);
}

static void model_logits(Gpt *g, real *x) {
    model_head(g, x);
    Block b = gpt_block(g, 0);
    Norm gain = logits_gain(&b);
    slot_forward(&gain, b.a.logits, b.a.logits, &g->gpu);
}

// The gradients of layer l (-1: of the model) are complete here: they travel to their owners.
static void model_reduce(Gpt *g, int l) {
    if (!g->traveling) return;
    nccl_begin(&g->nccl, &g->gpu);
    for (const Entry *e = g->layout.entries; e < g->layout.entries + g->layout.count; e++)
        for (int rank = 0; rank < g->nccl.size && e->layer == l && !entry_is_common(e); rank++) {
            Part part = entry_part(e, rank, g->nccl.size);
            nccl_reduce(&g->nccl, g->tensors[GRADS] + e->offset + part.first, part.size, rank);
        }
    nccl_end(&g->nccl);
}

static void model_backward(Gpt *g) {
    const Model *m = &g->m;
    Block b = gpt_block(g, m->L - 1);
    Norm fin = NORM(&b, fin), gain = logits_gain(&b);
    LinearShape head = linear_shape(&b, m->Vp, m->C, 1);
    if (gain.site.on) gained_classifier_backward(b.a.logits, b.a.logsum, gpt_targets(g), &gain, m->V, (float)g->setup.z_loss, (float)g->scale, &g->gpu);
    linear_backward_weight(m->tied ? b.dw.wte : b.dw.wlm, nullptr, b.a.logits, fin.site.on ? b.a.fx : b.a.x, (float)g->scale, head, &g->gpu);
    linear_backward_input(fin.site.on ? b.d.fx : b.d.x, b.a.logits, gpt_head(g, &b), nullptr, 0, (float)g->scale, head, &g->gpu);
    slot_backward(&fin, b.d.x, b.d.fx, b.a.x, &g->gpu);
    for (int l = m->L - 1; l >= 0; l--) {
        Block below = gpt_block(g, l > 0 ? l - 1 : 0);
        real *in = l > 0 ? below.a.x : b.a.e, *din = l > 0 ? below.d.x : b.d.e;
        if (g->setup.recompute == RECOMPUTE_ON) block_row(&b)->forward(&b, in);
        if (g->setup.recompute == RECOMPUTE_CHEAP) block_recompute(&b, in);
        block_row(&b)->backward(&b, din, in);
        model_reduce(g, l);
        b = below;
    }
    Norm emb = NORM(&b, emb);
    real *de = slot_backward(&emb, b.d.raw, b.d.e, b.a.raw, &g->gpu);
    embedding_backward(b.dw.wte, b.dw.wpe, de, gpt_inputs(g), gpt_groups(g), g->now.B, g->now.T, m->C, (float)m->emb_scale, &g->gpu);
    model_reduce(g, -1);
}

// ------------------------------------------------------------------------------------------------------------------ a micro-step

// Runs `work`, or its recorded graph: with --graph on a whole micro-batch is one launch forward and one backward. What is measured, or talks to other processes, is
// in no graph.
static void gpt_replay(Gpt *g, cudaGraphExec_t *graph, void (*work)(Gpt *)) {
    bool whole = g->setup.graph && g->setup.training && g->now.n == g->max.n && g->now.T == g->max.T && !g->preparing && !g->watching && !g->traveling;
    if (!whole) { work(g); return; }
    if (!*graph) {
        cudaGraph_t recorded;
        cudaCheck(cudaStreamBeginCapture(g->gpu.stream, cudaStreamCaptureModeThreadLocal));
        work(g);
        cudaCheck(cudaStreamEndCapture(g->gpu.stream, &recorded));
        cudaCheck(cudaGraphInstantiate(graph, recorded, 0));
        cudaCheck(cudaGraphDestroy(recorded));
    }
    cudaCheck(cudaGraphLaunch(*graph, g->gpu.stream));
}

// Copies part of what is staged to the device. The buffer is free again when the event has passed.
static void gpt_copy(Gpt *g, int64_t first, int64_t count) {
    cudaCheck(cudaMemcpyAsync(g->batch + first, g->staged[g->turn] + first, (size_t)count * sizeof *g->batch, cudaMemcpyHostToDevice, g->gpu.stream));
    cudaCheck(cudaEventRecord(g->copied[g->turn], g->gpu.stream));
}

// Copies a batch to the device while it works on the one before; tokens outside of the vocabulary are refused first.
static void gpt_stage(Gpt *g, const int32_t *inputs, const int32_t *targets) {
    int64_t n = g->now.n;
    int32_t *staged = g->staged[g->turn ^= 1];
    tokens_check("token", inputs, n, g->m.V);
    cudaCheck(cudaEventSynchronize(g->copied[g->turn]));
    memcpy(staged, inputs, (size_t)n * sizeof *inputs);
    if (targets) {
        tokens_check("target", targets, n, g->m.V);
        memcpy(staged + n, targets, (size_t)n * sizeof *targets);
    }
    gpt_copy(g, 0, targets ? 2 * n : n);
}

static void gpt_forward(Gpt *g, const int32_t *inputs, const int32_t *targets, int B, int T) {
    CHECK(B * T <= g->max.n && T <= g->max.T, "a batch of %d x %d tokens where memory was made for %d x %d", B, T, g->max.B, g->max.T);
    g->now.B = B;
    g->now.T = T;
    g->now.n = B * T;
    if (g->watching) g->watched += g->now.n;
    gpt_stage(g, inputs, targets);
    if (!targets) { model_logits(g, model_stream(g, false)); return; }
    gpt_replay(g, &g->forward_graph, model_loss);
    g->seen += g->now.n;
}

// The new rows go through the blocks as any others do, and attention reads the keys and values of those before.
static void gpt_decode(Gpt *g, const int32_t *inputs, int n, int position) {
    decode_check(n, position, g->cached, g->max.T);
    if (!g->kv_cache) g->kv_cache = device_alloc<real>(kv_cache_values(&g->m, g->max.T), "the keys and values of a text");
    g->now.B = 1;
    g->now.T = g->now.n = n;
    g->decoding = true;
    g->cached_before = position;
    gpt_stage(g, inputs, nullptr);
    real *x = model_stream(g, false);
    g->now.T = g->now.n = 1;                                // of the last row alone
    model_logits(g, x + (int64_t)(n - 1) * g->m.C);
    g->cached = position + n;
    g->decoding = false;
}

static void gpt_backward(Gpt *g, double scale, int last) {
    if (g->backward_graph && scale != g->scale) {
        cudaCheck(cudaGraphExecDestroy(g->backward_graph));
        g->backward_graph = nullptr;
    }
    g->scale = scale;
    int64_t n = g->now.n;
    token_groups(g->staged[g->turn] + 2 * n, g->staged[g->turn], n);          // while the GPU goes forward
    gpt_copy(g, 2 * n, batch_ints(n) - 2 * n);
    g->traveling = last && g->nccl.size > 1;
    gpt_replay(g, &g->backward_graph, model_backward);
    g->traveling = false;
}

static void gpt_zero_grads(Gpt *g) {
    cudaCheck(cudaMemsetAsync(g->tensors[GRADS], 0, (size_t)g->layout.total * sizeof(float), g->gpu.stream));
    for (int l = g->m.moe.dense; l < g->m.L && g->m.moe.E; l++)
        cudaCheck(cudaMemsetAsync(gpt_block(g, l).a.loads, 0, (size_t)g->m.moe.E * sizeof(wide), g->gpu.stream));
}

// ------------------------------------------------------------------------------------------------------------------ what the host reads and sets

// From the device to the host, when the work before is done.
static void gpt_bring(Gpt *g, void *to, const void *from, size_t bytes) {
    cudaCheck(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, g->gpu.stream));
    cudaCheck(cudaStreamSynchronize(g->gpu.stream));
}

// Adds up over processes, on the device, what is the same for all: the sums of the state, and the loads that selection biases follow.
static void gpt_add_up(Gpt *g) {
    if (g->nccl.size == 1) return;
    g->host_state->seen = (double)g->seen;
    cudaCheck(cudaMemcpyAsync(&g->state->seen, &g->host_state->seen, sizeof(double), cudaMemcpyHostToDevice, g->gpu.stream));
    for (int spread = 0; spread < 2; spread++) {
        nccl_begin(&g->nccl, &g->gpu);
        if (spread) nccl_broadcast(&g->nccl, g->state->sums, REDUCED_SUMS, 0);
        else nccl_reduce(&g->nccl, g->state->sums, REDUCED_SUMS, 0);
        for (int l = 0; l < g->m.L; l++) {
            if (!g->router_bias[l]) continue;
            if (spread) nccl_broadcast(&g->nccl, gpt_block(g, l).a.loads, g->m.moe.E, 0);
            else nccl_reduce(&g->nccl, gpt_block(g, l).a.loads, g->m.moe.E, 0);
        }
        nccl_end(&g->nccl);
    }
    nccl_join(&g->nccl, &g->gpu);
}

// The parts of `whole`, which lies as parameters do, go from their owners to all.
template <typename T> static void gpt_spread(Gpt *g, T *whole) {
    if (g->nccl.size == 1) return;
    nccl_begin(&g->nccl, &g->gpu);
    for (const Entry *e = g->layout.entries; e < g->layout.entries + g->layout.count; e++)
        for (int rank = 0; rank < g->nccl.size && !entry_is_common(e); rank++) {
            Part part = entry_part(e, rank, g->nccl.size);
            nccl_broadcast(&g->nccl, whole + e->offset + part.first, part.size, rank);
        }
    nccl_end(&g->nccl);
    nccl_join(&g->nccl, &g->gpu);
}

// Brings the state of the device to the host, and starts the sums anew.
static Loss gpt_read_loss(Gpt *g) {
    cudaCheck(cudaMemcpyAsync(g->host_state, g->state, sizeof *g->state, cudaMemcpyDeviceToHost, g->gpu.stream));
    cudaCheck(cudaMemsetAsync(g->state->sums, 0, sizeof g->state->sums, g->gpu.stream));
    cudaCheck(cudaStreamSynchronize(g->gpu.stream));
    double seen = g->nccl.size > 1 ? g->host_state->seen : (double)g->seen, n = seen > 0 ? seen : 1;
    Loss loss = {g->host_state->sums[0] / n, g->host_state->sums[1] / n, g->host_state->sums[2] / n};
    g->seen = 0;
    return loss;
}

static Loss gpt_loss(Gpt *g) {
    gpt_add_up(g);
    return gpt_read_loss(g);
}

static uint64_t gpt_rounding(const Gpt *g, int64_t step) { return rand_key(g->setup.seed, "rounding", (uint64_t)step); }

// Brings the rates of each entry to the device, and the lines that nGPT keeps. Returns the rates that all share.
static AdamWStep gpt_rates(Gpt *g, const AdamW *o) {
    double tokens = g->nccl.size > 1 ? (double)(g->setup.batch * g->max.T) : (double)g->seen;         // of all processes
    for (int k = 0; k < g->layout.count; k++) {
        const Entry *e = &g->layout.entries[k];
        EntryLines lines = entry_lines(&g->m, e);
        Part part = entry_part(e, g->nccl.rank, g->nccl.size);
        float lr = e->row.lr == LR_BALANCE ? 0 : (float)o->lr[e->row.lr];              // gpt_balance moves these
        g->host_entries[k] = UpdateEntry{e->offset + part.first, e->state, part.size, lr, (float)o->decay[e->row.decay], e->row.init == ROLE_GAIN ? (float)o->gain_target : 0, lines.length, lines.step};
    }
    cudaCheck(cudaMemcpyAsync(g->entries, g->host_entries, (size_t)g->layout.count * sizeof *g->entries, cudaMemcpyHostToDevice, g->gpu.stream));
    return AdamWStep{(float)o->beta1, (float)o->beta2, (float)o->eps, (float)(1 / (1 - pow(o->beta1, (double)o->step))), (float)(1 / (1 - pow(o->beta2, (double)o->step))),
                     (float)o->clip, g->setup.stochastic, gpt_rounding(g, o->step), o->max_ce * tokens, o->max_norm};
}

static Arenas gpt_arenas(const Gpt *g) { return Arenas{g->weights, g->tensors[WEIGHTS], g->tensors[ADAM_M], g->tensors[ADAM_V], g->tensors[GRADS], g->layout.state}; }

static void gpt_balance(Gpt *g, double rate) {
    for (int l = 0; l < g->m.L; l++) {
        Block b = gpt_block(g, l);
        if (b.router_bias) router_balance(b.router_bias, b.a.loads, g->m.moe.E, (float)rate, &g->state->finite, &g->gpu);
    }
}

static Update gpt_update(Gpt *g, const AdamW *o) {
    AdamWStep step = gpt_rates(g, o);
    if (g->nccl.size == 1) adamw_update(gpt_arenas(g), g->entries, g->layout.count, g->state, step, &g->gpu);
    else {
        nccl_join(&g->nccl, &g->gpu);                          // gradients have come to their owners
        shard_square(&g->state->square, gpt_arenas(g), g->entries, g->layout.count, &g->gpu);
        gpt_add_up(g);
        adamw_apply(gpt_arenas(g), g->entries, g->layout.count, g->state, step, &g->gpu);
    }
    g->cached = 0;                                          // of the weights before
    gpt_balance(g, o->lr[LR_BALANCE]);
    if (g->m.mode->unit) ngpt_normalize(gpt_arenas(g), g->entries, g->layout.count, g->state, step, &g->gpu);
    gpt_spread(g, g->weights);
    Loss loss = gpt_read_loss(g);
    return Update{loss, g->host_state->norm, g->host_state->finite};
}

static void gpt_stats_begin(Gpt *g) {
    g->watching = true;
    g->watched = 0;
    for (int l = 0; l < g->m.L; l++) g->host_layer_sums[l] = LayerSums{{}, -INFINITY};
    cudaCheck(cudaMemcpyAsync(g->layer_sums, g->host_layer_sums, (size_t)g->m.L * sizeof *g->layer_sums, cudaMemcpyHostToDevice, g->gpu.stream));
    cudaCheck(cudaMemsetAsync(g->router_sums, 0, (size_t)router_doubles(&g->m) * sizeof(double), g->gpu.stream));
}

static void layer_stats(Gpt *g, LayerStats *layers) {
    g->watching = false;
    cudaCheck(cudaMemcpyAsync(g->host_layer_sums, g->layer_sums, (size_t)g->m.L * sizeof *g->layer_sums, cudaMemcpyDeviceToHost, g->gpu.stream));     // one wait for both
    gpt_bring(g, g->host_router_sums, g->router_sums, (size_t)router_doubles(&g->m) * sizeof(double));
    int L = g->m.L;
    double n = (double)g->watched, *squares = (double *)check_alloc((size_t)L * (LAYER_SQUARES + 1) * sizeof *squares, "what is measured of layers"), *logits = squares + (int64_t)L * LAYER_SQUARES;
    for (int l = 0; l < L; l++) {
        memcpy(squares + (int64_t)l * LAYER_SQUARES, g->host_layer_sums[l].squares, sizeof g->host_layer_sums[l].squares);
        logits[l] = g->host_layer_sums[l].logit;
    }
    comm_combine(g->setup.comm, &n, 1, COMM_SUM);
    comm_combine(g->setup.comm, squares, (int64_t)L * LAYER_SQUARES, COMM_SUM);
    comm_combine(g->setup.comm, logits, L, COMM_MAX);
    comm_combine(g->setup.comm, g->host_router_sums, router_doubles(&g->m), COMM_SUM);
    for (int l = 0; l < L; l++) {
        const double *s = squares + (int64_t)l * LAYER_SQUARES, *r = g->host_router_sums + l * (ROUTER_SUMS + (int64_t)g->m.moe.E);
        layers[l] = LayerStats{sqrt(s[STREAM] / (n * g->m.C)), sqrt(s[ATTN_BRANCH] / s[ATTN_SKIP]), sqrt(s[FFN_BRANCH] / s[FFN_SKIP]), logits[l],
                               r[ROUTER_ENTROPY] / n, r[ROUTER_BALANCE] / n, r[ROUTER_SEQUENCE] / n, r[ROUTER_Z] / n, r + ROUTER_SUMS};
    }
    free(squares);
}

// As after step 0.
static void gpt_normalize(Gpt *g) {
    AdamW none = {};
    AdamWStep step = gpt_rates(g, &none);
    if (g->m.mode->unit) ngpt_normalize(gpt_arenas(g), g->entries, g->layout.count, nullptr, step, &g->gpu);
    gpt_spread(g, g->weights);
    cudaCheck(cudaStreamSynchronize(g->gpu.stream));           // the list of entries is the host's to change again
}

// What gpt_balance has just done to a layer's selection bias, which has no gradient; computed again from the loads.
static TensorStats balance_stats(Gpt *g, const Entry *e, float rate) {
    int E = g->m.moe.E;
    float *w = (float *)check_alloc(2 * (size_t)E * sizeof *w, "a selection bias and loads"), *load = w + E, sum = 0;
    double before = 0, moved = 0;
    gpt_bring(g, w, g->router_bias[e->layer], (size_t)E * sizeof *w);
    gpt_bring(g, load, gpt_block(g, e->layer).a.loads, (size_t)E * sizeof *load);
    for (int j = 0; j < E; j++) sum += load[j];
    for (int j = 0; j < E; j++) {
        double step = router_balance_step(load[j], sum, E, rate);
        before += (w[j] - step) * (w[j] - step);
        moved += step * step;
    }
    free(w);
    return TensorStats{0, sqrt(before), sqrt(moved)};
}

// Without an update all rates are 0, and so are the steps.
static void tensor_stats(Gpt *g, const AdamW *applied, TensorStats *tensors) {
    AdamW none = {};
    none.eps = none.step = 1;
    AdamWStep step = gpt_rates(g, applied ? applied : &none);
    tensor_sums(g->tensor_sums, gpt_arenas(g), g->entries, g->layout.count, step, &g->gpu);
    gpt_bring(g, g->host_tensor_sums, g->tensor_sums, (size_t)g->layout.count * sizeof *g->tensor_sums);
    comm_combine(g->setup.comm, g->host_tensor_sums[0].squares, (int64_t)g->layout.count * TENSOR_SQUARES, COMM_SUM);
    for (int k = 0; k < g->layout.count; k++) {
        const double *s = g->host_tensor_sums[k].squares;
        tensors[k] = TensorStats{sqrt(s[TENSOR_GRAD]), sqrt(s[TENSOR_WEIGHT]), sqrt(s[TENSOR_STEP])};
        if (entry_is_common(&g->layout.entries[k])) tensors[k] = balance_stats(g, &g->layout.entries[k], applied ? (float)applied->lr[LR_BALANCE] : 0);
    }
}

static void gpt_stats(Gpt *g, const AdamW *applied, LayerStats *layers, TensorStats *tensors) {
    if (layers) layer_stats(g, layers);
    if (tensors) tensor_stats(g, applied, tensors);
}

// What is fetched and stored of a kind: of master weights that are in parts the whole, in the place of gradients.
static float *gpt_whole(Gpt *g, int kind) { return g->tensors[kind == WEIGHTS && gpt_has_parts(g) ? GRADS : kind]; }
static size_t gpt_whole_bytes(const Gpt *g, int kind) { return (size_t)(kind >= ADAM_M ? g->layout.state : g->layout.total) * sizeof(float); }

// Gradients and moments only a save or an event asks for, which steps do not wait for; a kind that this model has not is NULL.
static float *gpt_host(Gpt *g, int kind) {
    if (!g->host[kind] && g->tensors[kind]) g->host[kind] = (float *)check_alloc(gpt_whole_bytes(g, kind), "the host's copy of the parameters or moments");
    return g->host[kind];
}

static void *gpt_tensor(Gpt *g, int kind, const Entry *e) {
    float *all = gpt_host(g, kind);
    return all ? all + (kind >= ADAM_M ? e->state : e->offset) : NULL;
}

// This process's parts of the master weights, from where they lie to their places among all, or back.
static void gpt_copy_parts(Gpt *g, bool back) {
    for (const Entry *e = g->layout.entries; e < g->layout.entries + g->layout.count; e++) {
        Part part = entry_part(e, g->nccl.rank, g->nccl.size);
        float *own = g->tensors[WEIGHTS] + e->state, *place = gpt_whole(g, WEIGHTS) + e->offset + part.first;
        cudaCheck(cudaMemcpyAsync(back ? own : place, back ? place : own, (size_t)part.size * sizeof(float), cudaMemcpyDeviceToDevice, g->gpu.stream));
    }
}

// Whole weights of the products, rounded by the owner of each part, are the same on all processes, or something has failed.
static void gpt_compare(Gpt *g) {
    size_t bytes = (size_t)g->layout.total * sizeof(real);
    Hash h = hash_begin();
    float *room = gpt_host(g, GRADS);
    gpt_bring(g, room, g->weights, bytes);
    hash_add(&h, room, bytes);
    comm_check_weights(g->setup.comm, hash_end(&h));
}

static void gpt_fetch(Gpt *g, int kind) {
    if (kind == WEIGHTS && gpt_has_parts(g)) {
        gpt_compare(g);
        gpt_copy_parts(g, false);
        gpt_spread(g, gpt_whole(g, WEIGHTS));
    }
    gpt_bring(g, gpt_host(g, kind), gpt_whole(g, kind), gpt_whole_bytes(g, kind));
}

static void gpt_store(Gpt *g, int kind, int64_t step) {
    cudaCheck(cudaMemcpyAsync(gpt_whole(g, kind), gpt_host(g, kind), gpt_whole_bytes(g, kind), cudaMemcpyHostToDevice, g->gpu.stream));
    if (kind == WEIGHTS) weights_round(g->weights, gpt_whole(g, kind), g->layout.total, g->setup.stochastic, gpt_rounding(g, step), &g->gpu);
    if (kind == WEIGHTS && gpt_has_parts(g)) gpt_copy_parts(g, true);
    g->cached = 0;
    cudaCheck(cudaStreamSynchronize(g->gpu.stream));
}

static const void *gpt_logits(Gpt *g, int64_t row) {
    real *z = gpt_block(g, 0).a.logits + row * g->m.Vp, *raw = (real *)g->logits_row;
    gpt_bring(g, raw, z, (size_t)g->m.V * sizeof(real));
    for (int64_t i = g->m.V - 1; i >= 0; i--) g->logits_row[i] = to_float(raw[i]);        // from the end: a float takes the place of two bfloat16
    return g->logits_row;
}

// Process 0's plans to all: another algorithm adds in another order, and its plans are the ones that are kept with the run.
static void gpt_share_plans(Gpt *g) {
    Comm *comm = g->setup.comm;
    char *text = comm_rank(comm) ? NULL : plans_text(g->gpu.plans);
    uint64_t size = text ? strlen(text) + 1 : 0;
    comm_broadcast(comm, &size, sizeof size);
    if (!text) text = (char *)check_alloc(size, "the plans of matrix products");
    comm_broadcast(comm, text, size);
    if (comm_rank(comm)) plans_read(g->gpu.plans, text, "process 0");
    free(text);
}

// One dry step over tokens 0: kernels are loaded, and with --tune on each matrix product without a plan is timed in its place, by process 0 before the others begin.
// Weights and moments stay as they are.
static void gpt_prepare(Gpt *g, const char *plans, const char *path) {
    if (!g->setup.training) return;
    if (plans) plans_read(g->gpu.plans, plans, path);
    int32_t *zeros = (int32_t *)check_alloc((size_t)g->max.n * sizeof *zeros, "a batch");
    if (comm_rank(g->setup.comm)) gpt_share_plans(g);
    g->gpu.plans->tuning = g->setup.tune;
    g->preparing = true;
    gpt_forward(g, zeros, zeros, g->max.B, g->max.T);
    gpt_backward(g, 1, 0);
    g->gpu.plans->tuning = false;
    if (!comm_rank(g->setup.comm)) gpt_share_plans(g);
    gpt_loss(g);
    g->preparing = false;
    free(zeros);
}

static char *gpt_plans(Gpt *g) { return plans_text(g->gpu.plans); }

// ------------------------------------------------------------------------------------------------------------------ main

const Trainer NAMED(cuda_, PREC) = {
    .device = "cuda", .precision = QUOTED(PREC), .mode = &MODES[NORM_MODE], .commit = GIT_HASH,
    .element = sizeof(float), .storage = sizeof(real),
    .create = gpt_create, .destroy = gpt_destroy,
    .tensor = gpt_tensor, .fetch = gpt_fetch, .store = gpt_store, .normalize = gpt_normalize,
    .zero_grads = gpt_zero_grads, .forward = gpt_forward, .backward = gpt_backward,
    .update = gpt_update, .loss = gpt_loss, .decode = gpt_decode, .logits = gpt_logits,
    .stats_begin = gpt_stats_begin, .stats = gpt_stats,
    .prepare = gpt_prepare, .plans = gpt_plans, .bytes = gpt_bytes, .room = gpt_room,
    .peak = nullptr,
};

int main(int argc, char **argv) { return trainer_main(&NAMED(cuda_, PREC), argc, argv); }
