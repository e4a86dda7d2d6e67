// train_gpt.cu: the CUDA trainer. The same models, placements, flags, data and checkpoints as
// train_gpt.c, on one NVIDIA GPU, or on several with one process each.
//
// 1. This file holds memory, the model, the step, and the table of functions that the services of
//    llmc/run/ call (llmc/run/trainer.h). Layers are in llmc/*.cuh, the block in llmc/block.cuh.
// 2. It is built once per precision. PREC=bf16 keeps weights and activations in bfloat16 beside
//    float master weights; PREC=fp32 keeps everything in float. Arithmetic inside kernels,
//    statistics, gradients of parameters and AdamW's moments are float in both.
// 3. A step does not wait for the GPU. Batches are copied from two pinned buffers in turn. Losses,
//    gradient norm, clip factor and the decision to update stay on the device; the host reads them
//    while the device works on the next step.
// 4. No floating-point atomics and fixed orders of summation: the same command gives the same bits.
//    (With several processes the order is NCCL's.)
// 5. Several processes (llmc/run/comm.h): in the last backward of a step the gradients of each
//    layer are reduced to their owners while the layers below are computed. Each process updates
//    its shards of the weights and broadcasts them. entry_part (memory.h) says which those are.
//
// The path of a step. train.c calls the gpt_ functions; read them in this order:
//
//   gpt_zero_grads
//   gpt_forward    stage_batch -> blocks_forward -> lm_head_forward -> classifier  } for each
//   gpt_backward   loss_backward: LM head, blocks from last to first, embedding    } micro-batch
//   gpt_update     gradient_square -> all_reduce_state -> adamw_apply -> muon_update -> all_gather
//                  -> send_state
//   gpt_outcome    waits for the losses, the norm and the decision
#include "llmc/gpu.cuh"
#include "llmc/nccl.cuh"
#include "llmc/run/trainer.h"
#include "llmc/block.cuh"
#include "llmc/embed.cuh"
#include "llmc/loss.cuh"
#include "llmc/adamw.cuh"
#include "llmc/muon.cuh"
#include "llmc/rand.h"
#include "llmc/run/train.h"

// ----------------------------------------------------------------------------------------- memory
// All memory is allocated in gpt_create, except the KV cache and the host's copies:
//   tensors   an arena of floats for each kind (master weights, gradients, two moments), laid out
//             by memory.h: Entry.offset in whole arenas, Entry.state or .second in those of shards
//   weights   bf16: the weights as products read them, laid out like the gradients
//   acts      activations, and `act_grads` their gradients, of the largest micro-batch
//   mirrors   small arrays that the host fills or reads

// An array that the device and the host both have. The host's is pinned.
template <typename T> struct Mirror {
    T *device, *host;
    int64_t count;
};

enum { ARRAYS_MAX = 32 };

struct Gpt {
    Model m;
    Setup setup;
    Sizes max, now;                       // the largest micro-batch, and the current one
    Layout layout;
    ActLayout act_layout;
    Gpu gpu;
    Nccl nccl;

    real *weights;                        // as matrix products read them
    real *acts, *act_grads;               // activations, and their gradients
    real *muon;                           // Muon's scratch (layout_muon_scratch)
    float *tensors[TENSOR_KINDS];         // master weights (fp32: the weights), gradients, moments
    float *host[TENSOR_KINDS];            // copies for the host, each made when first asked for
    float *logits_row;                    // [Vp] pinned
    float **router_bias;                  // [L] among the master weights; nullptr: no such bias
    Mirror<float2> rotary;                // [T, rotary_size / 2] cos, sin

    int32_t *staged[2], *batch;           // pinned; device. Each: BATCH_* arrays
    cudaEvent_t copied[2];                // the staged buffer may be written again
    int turn;                             // index of the staged buffer of the current micro-batch

    Mirror<UpdateEntry> entries;          // [count] one per entry of the layout
    Mirror<UpdateState> state;            // [1]
    cudaEvent_t reached;                  // the work that the host waits for is done
    int64_t seen;                         // tokens in the sums of `state`

    bool measuring;                       // statistics are taken (stats_begin)
    int64_t measured;                     // tokens in layer_sums
    Mirror<LayerSums> layer_sums;         // [L]
    Mirror<TensorStats> tensor_stats;     // [count]
    Mirror<double> router_sums;           // [L, router_size]
    LayerStats *layer_stats;              // [L] for the host

    real *kv_cache;                       // [L, T, kv_cache_width]; allocated by the first decode
    int cached;                           // tokens in it, computed with the present weights
    int cached_before;                    // decode: tokens in it before the current ones
    bool decoding;

    cudaGraphExec_t forward_graph;
    cudaGraphExec_t backward_graphs[2];   // by dw_of_linears
    int dw_of_linears;                    // SET in the first backward of a step, then ADD
    double scale;                         // gpt_backward's argument, also in backward_graphs
    bool preparing;                       // the dry step of gpt_prepare
    bool reducing;                        // the current backward reduces gradients to their owners

    void *device[ARRAYS_MAX], *pinned[ARRAYS_MAX];    // what device_alloc and pinned_alloc gave
    int device_count, pinned_count;
};

// These two let `for (const Entry &e : g->layout)` visit every parameter tensor.
static const Entry *begin(const Layout &layout) { return layout.entries; }
static const Entry *end(const Layout &layout) { return layout.end; }

// Rows of scratch, each as wide as the widest gain or bias: 256 chunks of a long gain and 256 of
// its bias (gain_chunks), or COLUMN_SPLITS partial sums of a linear's bias. Wider sums get fewer
// chunks.
enum { SCRATCH_ROWS = 512 };
// Memory that the tables do not count, in MiB; both numbers are estimates. RESERVE_MIB: the code of
// all kernels (cuBLASLt's too), small lists and statistics. NCCL_MIB: NCCL's buffers, with several
// processes; users report 1.6 GB (issue 864 of github.com/NVIDIA/nccl).
enum { RESERVE_MIB = 512, NCCL_MIB = 1536 };

// Arrays of n in a batch. GROUPS are four (token_groups), BEGINS and ENDS the borders of documents.
enum { BATCH_INPUTS, BATCH_TARGETS, BATCH_GROUPS, BATCH_BEGINS = 6, BATCH_ENDS, BATCH_ARRAYS };

// Elements of the storage type in a float. In bf16 there are master weights besides the
// weights that products read.
enum { RATIO = sizeof(wide) / sizeof(real), MASTER_WEIGHTS = RATIO > 1 };

// Gpu.scratch holds one of these at a time, so it is as large as the largest: partial sums of
// gains and biases, sums over a router's chunks (moe.cuh), one row of all experts' gains or of
// nGPT's for logits, doubles of Muon.
static int64_t scratch_floats(const Model *m, const Setup *setup) {
    int64_t router = router_scratch(setup->B, setup->T, m->moe.E);
    int64_t widest = max(2 * max(m->F, mlp_width(m)), max(4 * m->C, qkv_width(m)));
    int64_t gains = max((int64_t)m->moe.E * max(2 * m->F, m->C), (int64_t)m->Vp);
    int64_t muon = 2 * MUON_PIECES * max((int64_t)m->moe.E, (int64_t)1);
    return max(max(SCRATCH_ROWS * widest, muon), max(router, gains));
}

// Bytes in all: `tables` for tensors and activations, the batch, scratch, RoPE's table, cuBLASLt's
// workspace, and the reserve.
static double gpt_bytes(const Model *m, const Setup *setup, double tables) {
    int64_t reserve = RESERVE_MIB + (comm_size(setup->comm) > 1 ? NCCL_MIB : 0);
    int64_t batch = (int64_t)setup->B * setup->T * BATCH_ARRAYS * sizeof(int32_t);
    int64_t scratch = scratch_floats(m, setup) * sizeof(float);
    int64_t rotary = (int64_t)m->T * rotary_size(m) * sizeof(float);
    return tables + (batch + scratch + rotary + PLANS_WORKSPACE + (reserve << 20));
}

// Refuses a size that the CPU accepts and the kernels do not. right: the size to use instead.
// rule, bound: "at most", 1024, for example.
static void refuse_unless(int right, const char *flag, int value, const char *rule, int bound) {
    CHECK(value == right,
          "%s %d; on a GPU it must be %s %d\n  -> %s %d, or make train_gpt DEVICE=cpu", flag, value,
          rule, bound, flag, right);
}

static void refuse_unless_multiple(const char *flag, int value, int of) {
    refuse_unless(CEIL_DIV(value, of) * of, flag, value, "a multiple of", of);
}

static void refuse_above(const char *flag, int value, int most) {
    refuse_unless(min(value, most), flag, value, "at most", most);
}

// A block holds a line of a norm in registers: of q, k, v and latents at most 2048 packs, of others
// 16384 values. The backward of LayerNorm and DyT keeps a sum for each gain and bias of a line in
// shared memory: lines of more than 8192 values need 128 KiB. GPUs of compute capability 8.6, 8.9
// and 12 have 99.
static void refuse_wide_norms(const Model *m, bool training) {
    int shared;
    // Without a GPU --show counts on enough; gpu_open refuses to train.
    if (cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0))
        shared = INT_MAX;
    for (int l = 0; l < m->L; l++) {
        LayerMode p = layer_mode(m, l);
        for (const Site *s = &p.emb; s <= &p.shared_out; s++) {
            int most = s >= &p.q && s <= &p.latent ? 2048 * PACK : 16384;
            if (training && s->bias && shared < 128 << 10) most = 8192;
            CHECK(!s->on || s->on == SCALE || s->width <= most,
                  "a norm over %d values; on a GPU like this at most %d\n"
                  "  -> a smaller --width, --ffn or --kv-rank, fewer --heads, --norm rms or "
                  "--sdd paper, or make train_gpt DEVICE=cpu", s->width, most);
        }
    }
}

// The kernels need head sizes that attention is compiled for, sequences that its grid can cover,
// rows of a multiple of 16 bytes (logits of routers too), and no gaps between the biases of linears
// that are one product.
static void refuse_model(const Model *m, const Setup *setup) {
    refuse_wide_norms(m, setup->training);
    refuse_above("--seq", m->T, attention_longest(qk_size(m), m->HS));
    refuse_unless_multiple("--width", m->C, 8);
    refuse_unless_multiple("--kv-rank", m->kv_rank, 16);
    refuse_unless_multiple("--ffn", m->F, 8);
    refuse_unless_multiple("--dense-ffn", m->moe.dense_F, 8);
    refuse_above("--experts", m->moe.E, ROUTER_MOST);
    refuse_unless_multiple("--experts", m->moe.E, 8);
    bool aligned = m->NH * m->HS % ALIGN == 0 && m->KV * m->HS % ALIGN == 0
                   && (m->bias == BIAS_QKV || !m->swiglu || m->F % ALIGN == 0);
    CHECK(!m->bias || aligned,
          "biases with heads of %d x %d and %d, --ffn %d; on a GPU they must be multiples of %d\n"
          "  -> --bias off, or make train_gpt DEVICE=cpu", m->NH, m->HS, m->KV, m->F, ALIGN);
}

// Free bytes of the GPU that this process would use; NAN without a GPU.
static double gpt_free_bytes(const Model *m, const Setup *setup) {
    size_t free_bytes, total;
    int devices = 0;
    Gpu gpu = {};
    refuse_model(m, setup);
    if (cudaGetDeviceCount(&devices) != cudaSuccess || !devices) return NAN;
    gpu_open(&gpu, comm_local_rank(setup->comm));
    cudaCheck(cudaMemGetInfo(&free_bytes, &total));
    gpu_close(&gpu);
    return free_bytes;
}

// Device memory and pinned memory have a list each, from which gpt_destroy frees them. It frees the
// rest by name: the host's copies and router_bias.
static void list_add(void **list, int *count, void *p) {
    CHECK(*count < ARRAYS_MAX, "more than %d arrays\n  -> a larger ARRAYS_MAX in train_gpt.cu",
          ARRAYS_MAX);
    list[(*count)++] = p;
}

template <typename T> static T *device_alloc(Gpt *g, int64_t count, const char *what) {
    T *p = nullptr;
    cudaError_t error = cudaMalloc((void **)&p, count * sizeof(T));
    CHECK(error == cudaSuccess,
          "no GPU memory for %s (%lld MiB): %s\n  -> a smaller --micro-batch or --model, or "
          "--recompute on; nvidia-smi shows who else uses the GPU", what,
          (long long)(count * (int64_t)sizeof(T) >> 20), cudaGetErrorString(error));
    list_add(g->device, &g->device_count, p);
    return p;
}

template <typename T> static T *pinned_alloc(Gpt *g, int64_t count) {
    T *p = nullptr;
    cudaCheck(cudaMallocHost((void **)&p, count * sizeof(T)));
    memset((void *)p, 0, count * sizeof(T));
    list_add(g->pinned, &g->pinned_count, p);
    return p;
}

template <typename T> static void mirror_alloc(Gpt *g, Mirror<T> *x, int64_t count) {
    *x = {device_alloc<T>(g, count, "lists and statistics"), pinned_alloc<T>(g, count), count};
}

// Copies from host to device, back, or on the device, in the order of the stream. Results for the
// host have arrived after wait.
template <typename T> static void copy(Gpt *g, T *to, const T *from, int64_t count) {
    cudaCheck(cudaMemcpyAsync(to, from, count * sizeof(T), cudaMemcpyDefault, g->gpu.stream));
}

template <typename T> static void to_device(Gpt *g, Mirror<T> x) {
    copy(g, x.device, x.host, x.count);
}
template <typename T> static void to_host(Gpt *g, Mirror<T> x) {
    copy(g, x.host, x.device, x.count);
}

template <typename T> static void clear(Gpt *g, T *x, int64_t count) {
    if (count) cudaCheck(cudaMemsetAsync(x, 0, count * sizeof(T), g->gpu.stream));
}

// Waits until the device has done all work given to it, transfers too, with a time limit: a
// transfer may never end. Waits without a limit (kinds.cuh, linear.cuh) come while there is none.
static void wait(Gpt *g) {
    nccl_join(&g->nccl, &g->gpu);
    cudaCheck(cudaEventRecord(g->reached, g->gpu.stream));
    nccl_wait(&g->nccl, g->reached);
}

// Whether this process has only its shards of the master weights (ZeRO-1, memory.h). The full ones
// are gathered in the gradients' buffer, which is free between steps.
static bool has_shards(const Gpt *g) {
    return g->nccl.size > 1 && g->setup.training && MASTER_WEIGHTS;
}

// Arenas: parameters with their gradients and moments, then activations with theirs.
static void alloc_tensors(Gpt *g) {
    for (int kind = 0; kind < setup_kinds(&g->setup); kind++) {
        bool sharded = kind == WEIGHTS && has_shards(g);
        int64_t count = sharded ? g->layout.state : arena_size(&g->layout, kind);
        g->tensors[kind] = device_alloc<float>(g, count, "parameters, gradients and moments");
        clear(g, g->tensors[kind], count);
    }
    // Selection biases are read from the master weights, layer by layer.
    g->router_bias = (float **)check_alloc(g->m.L * sizeof(float *), "a list of layers");
    for (const Entry &e : g->layout) {
        int64_t offset = has_shards(g) ? e.state : e.offset;
        if (e.id == PARAM_router_bias) g->router_bias[e.layer] = g->tensors[WEIGHTS] + offset;
    }
    g->weights = (real *)g->tensors[WEIGHTS];
    if (MASTER_WEIGHTS)
        g->weights = device_alloc<real>(g, g->layout.total, "the weights of matrix products");
    g->acts = device_alloc<real>(g, g->act_layout.acts, "activations");
    if (g->setup.training)
        g->act_grads = device_alloc<real>(g, g->act_layout.grads, "the gradients of activations");
}

// Allocates the arrays that a step needs besides the arenas.
static void alloc_step(Gpt *g) {
    int count = g->layout.count;
    int64_t batch = (int64_t)g->max.n * BATCH_ARRAYS;
    g->batch = device_alloc<int32_t>(g, batch, "a batch");
    for (int k = 0; k < 2; k++) {
        g->staged[k] = pinned_alloc<int32_t>(g, batch);
        cudaCheck(cudaEventCreateWithFlags(&g->copied[k], cudaEventDisableTiming));
    }
    g->gpu.scratch_size = scratch_floats(&g->m, &g->setup);
    g->gpu.scratch = device_alloc<float>(g, g->gpu.scratch_size, "partial sums");
    int64_t muon = g->setup.training ? layout_muon_scratch(&g->layout, true) : 0;
    if (muon) g->muon = device_alloc<real>(g, muon, "Muon's scratch");
    mirror_alloc(g, &g->state, 1);
    cudaCheck(cudaEventCreateWithFlags(&g->reached, cudaEventDisableTiming));
    to_device(g, g->state);
    mirror_alloc(g, &g->entries, count);
    mirror_alloc(g, &g->layer_sums, g->m.L);
    mirror_alloc(g, &g->tensor_stats, count);
    mirror_alloc(g, &g->router_sums, g->m.L * router_size(&g->m));
    g->layer_stats = pinned_alloc<LayerStats>(g, g->m.L);
    g->logits_row = pinned_alloc<float>(g, g->m.Vp);
    if (!g->m.rope) return;
    // RoPE's cosines and sines, computed once in double on the host.
    mirror_alloc(g, &g->rotary, (int64_t)g->m.T * rotary_size(&g->m) / 2);
    rotary_table(g->rotary.host, g->m.T, &g->m);
    to_device(g, g->rotary);
}

// The loads of experts are sums since gpt_zero_grads. Evaluations add to them, which nobody reads.
static void clear_loads(Gpt *g) {
    for (int l = g->m.moe.dense; l < g->m.L && g->m.moe.E; l++)
        clear(g, acts_view(g->act_layout.act, g->acts, l).loads, g->m.moe.E);
}

static Gpt *gpt_create(const Model *m, const Setup *setup) {
    Gpt *g = (Gpt *)check_alloc(sizeof *g, "the model");
    // Refusals come first: they name the flag to change, which a failed allocation cannot.
    refuse_model(m, setup);
    gpu_open(&g->gpu, comm_local_rank(setup->comm));
    g->m = *m;
    g->setup = *setup;
    g->now = g->max = sizes_make(m, setup, 0, RATIO);
    // Sizes and offsets of all tensors, before any of them is allocated.
    g->layout = setup_layout(m, setup);
    g->act_layout = act_layout_make(m, &g->max);
    nccl_open(&g->nccl, setup->comm);
    g->gpu.plans = plans_create(setup->tf32);
    alloc_tensors(g);
    alloc_step(g);
    clear_loads(g);
    return g;
}

// Unused places of the lists are null, which cudaFree and free ignore.
static void gpt_destroy(Gpt *g) {
    wait(g);
    nccl_close(&g->nccl);
    for (cudaGraphExec_t graph :
         {g->forward_graph, g->backward_graphs[SET], g->backward_graphs[ADD]})
        if (graph) cudaCheck(cudaGraphExecDestroy(graph));
    for (void *p : g->device) cudaCheck(cudaFree(p));
    for (void *p : g->pinned) cudaCheck(cudaFreeHost(p));
    for (float *p : g->host) free(p);
    for (cudaEvent_t event : g->copied) cudaCheck(cudaEventDestroy(event));
    cudaCheck(cudaEventDestroy(g->reached));
    free(g->router_bias);
    plans_destroy(g->gpu.plans);
    gpu_close(&g->gpu);
    layout_free(&g->layout);
    free(g->act_layout.act);
    free(g);
}

// -------------------------------------------------------------------------------------- the model

// An array of the current batch, on the device.
static int32_t *batch_array(const Gpt *g, int which) {
    return g->batch + which * (int64_t)g->now.n;
}

// Layer l: pointers into the arenas, for the current micro-batch. While decoding, it has its part
// of the KV cache, and RoPE's table begins at the position of the first new token.
static Block gpt_block(const Gpt *g, int l) {
    bool masked = g->setup.documents.mask && !g->decoding;
    real *cache_base = g->decoding ? g->kv_cache : nullptr;
    KvCache cache = kv_cache_view(&g->m, cache_base, g->max.T, l, g->cached_before);
    const float2 *rotary = g->rotary.device;
    if (rotary) rotary += (int64_t)cache.cached * rotary_size(&g->m) / 2;
    return {&g->m, &g->now, layer_mode(&g->m, l),
            params_view(&g->layout, g->weights, l),
            grads_view(&g->layout, g->tensors[GRADS], l),
            acts_view(g->act_layout.act, g->acts, l),
            acts_view(g->act_layout.grad, g->act_grads, l),
            cache, rotary, g->router_bias[l], (float)(g->scale * g->now.n),
            g->dw_of_linears, masked ? batch_array(g, BATCH_BEGINS) : nullptr,
            masked ? batch_array(g, BATCH_ENDS) : nullptr, (Gpu *)&g->gpu};
}

// The embedding counts positions from these (--restart-positions), or from 0. begins: of the host's
// batch or of the device's.
static const int32_t *restarts(const Gpt *g, const int32_t *begins) {
    return g->setup.documents.restart ? begins : nullptr;
}

// The LM head's matrix W [Vp, C]: the embedding's (tied), or its own.
static Linear lm_head_linear(const Block &b, double c) {
    if (b.m->tied) return LINEAR(b, wte, b.m->Vp, b.m->C, c);
    return LINEAR(b, wlm, b.m->Vp, b.m->C, c);
}

// Logits and targets as the classifier (loss.cuh) reads them. nGPT's s_z is a gain on logits, which
// the classifier applies.
static Logits logits_of(const Gpt *g, const Block &b) {
    Norm gain = {b.p.logits, b.w.logits_w, nullptr, b.dw.logits_w, nullptr, nullptr, nullptr,
                 b.s->n, 0};
    return {b.a.logits, b.a.losses, b.a.logsum, batch_array(g, BATCH_TARGETS), g->now.n,
            g->m.V, g->m.Vp, (float)g->setup.z_loss, gain};
}

// From tokens to the residual stream out of the last block. counted: routers add their losses to
// the state's, and count the tokens of their experts.
static real *blocks_forward(Gpt *g, bool counted) {
    const Model *m = &g->m;
    Block b = gpt_block(g, 0);
    const real *wpe = b.w.wpe ? b.w.wpe + (int64_t)b.cache.cached * m->C : nullptr;
    embedding_forward(b.a.raw, g->batch, b.w.wte, wpe, restarts(g, b.begins), g->now.B, g->now.T,
                      m->C, m->emb_scale, &g->gpu);
    real *x = slot_forward(NORM(b, emb), b.a.e, b.a.raw, &g->gpu);
    for (int l = 0; l < m->L; l++) {
        b = gpt_block(g, l);
        block_forward(b, x);
        double *sums = g->router_sums.device + l * router_size(m);
        if (b.p.moe && counted)
            router_count(&g->state.device->sums[SUM_ROUTER], b.a.loads,
                         g->measuring ? sums : nullptr, block_router(b), &g->gpu);
        if (g->measuring && !g->decoding) block_stats(b, &g->layer_sums.device[l], x);
        x = b.a.x;
    }
    return x;
}

// Logits of the current rows, before nGPT's gain. x: the residual stream out of the last block.
// Returns the last layer, whose view holds the logits.
static Block lm_head_forward(Gpt *g, real *x) {
    Block b = gpt_block(g, g->m.L - 1);
    x = slot_forward(NORM(b, fin), b.a.fx, x, &g->gpu);
    linear_forward(b.a.logits, x, lm_head_linear(b, 1), {}, &g->gpu);
    return b;
}

// From tokens to losses. In training the classifier also overwrites the logits with their gradient,
// unless they have a gain (nGPT).
static void loss_forward(Gpt *g) {
    Block b = lm_head_forward(g, blocks_forward(g, true));
    Logits logits = logits_of(g, b);
    classifier(logits, g->setup.training, &g->gpu);
    loss_sums(g->state.device->sums, logits, &g->gpu);
}

// Logits as a sampler reads them, with nGPT's gain.
static void logits_forward(Gpt *g, real *x) {
    Block b = lm_head_forward(g, x);
    slot_forward(logits_of(g, b).gain, b.a.logits, b.a.logits, &g->gpu);
}

// Reduces or broadcasts every process's shards of `whole`, which is laid out like the parameters.
// layer: moves its tensors only; -1: those of no layer, such as the embedding; or ALL_LAYERS.
enum { ALL_LAYERS = -2 };
template <typename T>
static void move_shards(Gpt *g, int how, T *whole, int layer) {
    nccl_begin(&g->nccl, &g->gpu);
    for (const Entry &e : g->layout) {
        if (entry_is_common(&e) || (layer != ALL_LAYERS && layer != e.layer)) continue;
        for (int rank = 0; rank < g->nccl.size; rank++) {
            Part part = entry_part(&e, rank, g->nccl.size);
            nccl_start(&g->nccl, how, whole + e.offset + part.first, part.size, rank);
        }
    }
    nccl_end(&g->nccl);
}

// The gradients of layer l (-1: of the model) are complete: they are reduced to their owners, in
// the background (reduce-scatter).
static void reduce_gradients(Gpt *g, int l) {
    if (g->reducing) move_shards(g, COMM_REDUCE, g->tensors[GRADS], l);
}

// From the gradient of the logits to that of the embedding. With --recompute a layer's forward, or
// the cheap parts of it, is repeated before its backward.
static void loss_backward(Gpt *g) {
    const Model *m = &g->m;
    Block b = gpt_block(g, m->L - 1);
    Logits logits = logits_of(g, b);
    // b.a.logits already holds the gradient of the logits, unless they have a gain. It still lacks
    // the factor g->scale, which the LM head's product applies.
    if (logits.gain.site.on) gained_classifier_backward(logits, g->scale, &g->gpu);
    linear_backward(b.d.fx, b.a.logits, b.a.fx, lm_head_linear(b, g->scale), {}, &g->gpu);
    slot_backward(NORM(b, fin), b.d.x, b.d.fx, b.a.x, &g->gpu);
    // The stream into layer l is the output of the layer below, or the embedding.
    for (int l = m->L - 1; l >= 0; l--) {
        Block below = gpt_block(g, l > 0 ? l - 1 : 0);
        real *in = l > 0 ? below.a.x : b.a.e, *din = l > 0 ? below.d.x : b.d.e;
        if (g->setup.recompute == RECOMPUTE_ON) block_forward(b, in);
        if (g->setup.recompute == RECOMPUTE_CHEAP) block_recompute(b, in);
        block_backward(b, din, in);
        reduce_gradients(g, l);
        b = below;
    }
    slot_backward(NORM(b, emb), b.d.raw, b.d.e, b.a.raw, &g->gpu);
    embedding_backward(b.dw.wte, b.dw.wpe, b.d.raw, batch_array(g, BATCH_GROUPS), g->now.B,
                       g->now.T, m->C, m->emb_scale, &g->gpu);
    reduce_gradients(g, -1);
}

// ----------------------------------------------------------------------------------- a micro-batch

// Runs `work`; with `--graph on`, a recorded CUDA graph of it: a micro-batch is then one launch
// forward and one backward. Work that takes statistics or talks to other processes is in no graph.
static void run_graph(Gpt *g, cudaGraphExec_t *graph, void (*work)(Gpt *)) {
    bool full = g->now.n == g->max.n && g->now.T == g->max.T;
    bool plain = !g->preparing && !g->measuring && !g->reducing;
    if (!g->setup.graph || !g->setup.training || !full || !plain) return work(g);
    // The first time, the work is recorded, with plans that exist. Its arguments are those of every
    // later micro-batch: arenas and sizes stay, and so does the batch's address.
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

// Copies a part of the staged batch to the device. The event says when the buffer is free again.
static void copy_staged(Gpt *g, int64_t first, int64_t count) {
    copy(g, g->batch + first, g->staged[g->turn] + first, count);
    cudaCheck(cudaEventRecord(g->copied[g->turn], g->gpu.stream));
}

// Stages a batch while the device works on the one before.
static void stage_batch(Gpt *g, const int32_t *inputs, const int32_t *targets) {
    int64_t n = g->now.n;
    g->turn ^= 1;
    int32_t *staged = g->staged[g->turn];
    nccl_wait(&g->nccl, g->copied[g->turn]);              // until the device has read this buffer
    memcpy(staged, inputs, n * sizeof *inputs);
    if (targets) memcpy(staged + n, targets, n * sizeof *targets);
    copy_staged(g, 0, targets ? 2 * n : n);
    Documents d = g->setup.documents;
    if (!d.mask || g->decoding) return;
    int32_t *begins = staged + BATCH_BEGINS * n;
    documents_find(begins, staged + BATCH_ENDS * n, inputs, g->now.B, g->now.T, d.separator);
    copy_staged(g, BATCH_BEGINS * n, 2 * n);
}

static void gpt_forward(Gpt *g, const int32_t *inputs, const int32_t *targets, int B, int T) {
    sizes_set(&g->now, &g->max, B, T);
    if (g->measuring) g->measured += g->now.n;
    stage_batch(g, inputs, targets);
    if (!targets) return logits_forward(g, blocks_forward(g, false));
    run_graph(g, &g->forward_graph, loss_forward);
    g->seen += g->now.n;
}

// The n new tokens go through the blocks as a micro-batch of one sequence. Attention reads the keys
// and values of earlier tokens from the KV cache (decode.cuh).
static void gpt_decode(Gpt *g, const int32_t *inputs, int n, int position) {
    decode_check(n, position, g->cached, g->max.T);
    int64_t cache = (int64_t)g->m.L * g->max.T * kv_cache_width(&g->m);
    if (!g->kv_cache) g->kv_cache = device_alloc<real>(g, cache, "the KV cache");
    sizes_set(&g->now, &g->max, 1, n);
    g->decoding = true;
    g->cached_before = position;
    stage_batch(g, inputs, nullptr);
    real *x = blocks_forward(g, false);
    sizes_set(&g->now, &g->max, 1, 1);  // logits of the last token alone
    logits_forward(g, x + (int64_t)(n - 1) * g->m.C);
    g->cached = position + n;
    g->decoding = false;
}

// scale is an argument of kernels in the recorded graph, so another scale needs another graph.
static void gpt_backward(Gpt *g, double scale, int last) {
    for (cudaGraphExec_t &graph : g->backward_graphs) {
        if (!graph || scale == g->scale) continue;
        cudaCheck(cudaGraphExecDestroy(graph));
        graph = nullptr;
    }
    g->scale = scale;
    int64_t n = g->now.n;
    int32_t *staged = g->staged[g->turn];
    // The embedding's backward reads sorted places (embed.cuh). They are sorted while the GPU works
    // on the forward.
    int32_t *groups = staged + BATCH_GROUPS * n;
    token_groups(groups, staged, n);
    if (!g->m.rope)
        position_groups(groups, restarts(g, staged + BATCH_BEGINS * n), n, g->now.T);
    copy_staged(g, BATCH_GROUPS * n, g->m.rope ? 2 * n : 4 * n);
    g->reducing = last && g->nccl.size > 1;
    run_graph(g, &g->backward_graphs[g->dw_of_linears], loss_backward);
    g->reducing = false;
    g->dw_of_linears = ADD;
}

// Begins a step: zeroes all gradients except those of linears, which its first backward SETs.
static void gpt_zero_grads(Gpt *g) {
    int64_t done = 0;
    for (const Entry &e : g->layout) {
        if (!entry_is_linear(&g->m, &e)) continue;
        clear(g, g->tensors[GRADS] + done, e.offset - done);
        done = e.offset + e.size;
    }
    clear(g, g->tensors[GRADS] + done, g->layout.total - done);
    g->dw_of_linears = SET;
    clear_loads(g);
}

// --------------------------------------------------------------------------------------- the step

// All-reduces, on the device, what all processes need to make the same decision: the sums of the
// state, and the loads of experts, which move the selection biases. It is a reduce to process 0,
// then a broadcast.
static void all_reduce_state(Gpt *g) {
    double *tokens = &g->state.host->sums[SUM_TOKENS];
    *tokens = g->seen;
    copy(g, &g->state.device->sums[SUM_TOKENS], tokens, 1);
    g->seen = 0;
    if (g->nccl.size == 1) return;
    for (int how : {COMM_REDUCE, COMM_BROADCAST}) {
        nccl_begin(&g->nccl, &g->gpu);
        nccl_start(&g->nccl, how, g->state.device->sums, REDUCED_SUMS, 0);
        for (int l = 0; l < g->m.L; l++)
            if (g->router_bias[l])
                nccl_start(&g->nccl, how, gpt_block(g, l).a.loads, g->m.moe.E, 0);
        nccl_end(&g->nccl);
    }
    nccl_join(&g->nccl, &g->gpu);
}

// All-gather: the owners' shards of `whole`, which is laid out like the parameters, go to all.
template <typename T> static void all_gather(Gpt *g, T *whole) {
    if (g->nccl.size == 1) return;
    move_shards(g, COMM_BROADCAST, whole, ALL_LAYERS);
    nccl_join(&g->nccl, &g->gpu);
}

// Sends the state to the host, and begins new sums.
static void send_state(Gpt *g) {
    to_host(g, g->state);
    clear(g, &g->state.device->sums, 1);
    cudaCheck(cudaEventRecord(g->reached, g->gpu.stream));
}

// Waits for the state that was sent last, but not for work that was given to the device since.
static Update gpt_outcome(Gpt *g) {
    nccl_wait(&g->nccl, g->reached);
    const UpdateState *s = g->state.host;
    double n = max(s->sums[SUM_TOKENS], 1.0);
    Loss loss = {s->sums[SUM_CE] / n, s->sums[SUM_Z] / n, s->sums[SUM_ROUTER] / n};
    return {loss, s->norm, s->applied};
}

// Mean losses since the last gpt_loss or gpt_update, over all processes.
static Loss gpt_loss(Gpt *g) {
    all_reduce_state(g);
    send_state(g);
    return gpt_outcome(g).loss;
}

// The random stream of stochastic rounding in a step.
static uint64_t rounding_key(const Gpt *g, int64_t step) {
    return rand_key(g->setup.seed, "rounding", step);
}

// Sends each entry's learning rate, decay and nGPT lines to the device. Returns the settings that
// all entries share.
static AdamWStep send_rates(Gpt *g, const Optimizer *o) {
    nccl_wait(&g->nccl, g->reached);  // until the last update has read entries.host
    double tokens = g->seen;                              // of all processes
    if (g->nccl.size > 1) tokens = g->setup.batch * g->max.T;
    for (int k = 0; k < g->layout.count; k++) {
        const Entry *e = &g->layout.entries[k];
        EntryLines lines = entry_lines(&g->m, e);
        Part part = entry_part(e, g->nccl.rank, g->nccl.size);
        double lr = e->muon ? o->muon_lr : o->lr[e->row.lr];
        if (e->row.lr == LR_BALANCE) lr = 0;              // balance_routers moves these
        double scale = e->muon ? muon_scale(o, e->row.rows / e->muon, e->row.cols) : 0;
        float target = e->row.role == ROLE_GAIN ? o->gain_target : 0;
        g->entries.host[k] = UpdateEntry{
            e->offset + part.first, e->state, part.size, (float)lr, (float)o->decay[e->row.decay],
            target, lines.length, lines.stride, e->state - e->second, (float)scale};
    }
    to_device(g, g->entries);
    // The moments begin at zero; these factors correct their bias (Kingma, Ba 2015, section 3).
    float correct1 = 1 / (1 - pow(o->beta1, o->step));
    float correct2 = 1 / (1 - pow(o->beta2, o->step));
    return {(float)o->beta1, (float)o->beta2, (float)o->eps, correct1, correct2,
            (float)o->clip, g->setup.stochastic, rounding_key(g, o->step),
            o->max_ce * tokens, o->max_norm};
}

// The arenas as the kernels of an update see them (adamw.cuh).
static Arenas gpt_arenas(const Gpt *g) {
    return {g->weights, g->tensors[WEIGHTS], g->tensors[ADAM_M], g->tensors[ADAM_V],
            g->tensors[GRADS], g->layout.state};
}

// The matrices of entry k as muon.cuh sees them. For an update, send_rates has filled its entry.
static MuonTensor muon_tensor(const Gpt *g, int k) {
    const Entry *e = &g->layout.entries[k];
    return {g->entries.host[k], e->muon, (int)(e->row.rows / e->muon), (int)e->row.cols, g->muon};
}

// Muon's step for the matrices that this process owns.
static void muon_update(Gpt *g, const Optimizer *o, const AdamWStep &step) {
    for (int k = 0; k < g->layout.count; k++) {
        if (!g->layout.entries[k].muon || !g->entries.host[k].size) continue;
        muon_apply(muon_tensor(g, k), gpt_arenas(g), g->state.device, step, (float)o->momentum,
                   &g->gpu);
    }
}

// Moves the selection bias of each router.
static void balance_routers(Gpt *g, double rate) {
    for (int l = 0; l < g->m.L; l++) {
        Block b = gpt_block(g, l);
        if (!b.router_bias) continue;
        router_balance(b.router_bias, b.a.loads, g->m.moe.E, rate, &g->state.device->applied,
                       &g->gpu);
    }
}

// Gradient clipping, AdamW and Muon, nGPT's normalization; each process updates its shards. All of
// it runs on the device, and changes nothing if decide_kernel refuses the step (adamw.cuh).
static void gpt_update(Gpt *g, const Optimizer *o) {
    AdamWStep step = send_rates(g, o);
    Arenas arenas = gpt_arenas(g);
    const UpdateEntry *entries = g->entries.device;
    UpdateState *state = g->state.device;
    int count = g->layout.count;
    nccl_join(&g->nccl, &g->gpu);                         // gradients have reached their owners
    gradient_square(&state->sums[SUM_SQUARE], arenas, entries, count, &g->gpu);
    all_reduce_state(g);
    adamw_apply(arenas, entries, count, state, step, &g->gpu);
    muon_update(g, o, step);
    g->cached = 0;                                        // the KV cache is stale
    balance_routers(g, o->lr[LR_BALANCE]);
    if (g->m.mode->unit) ngpt_normalize(arenas, entries, count, state, step, &g->gpu);
    all_gather(g, g->weights);
    send_state(g);
}

// After weights were set: nGPT's matrices get rows (or columns) of length 1, as after an update.
static void gpt_normalize(Gpt *g) {
    Optimizer none = {};
    AdamWStep step = send_rates(g, &none);
    if (g->m.mode->unit)
        ngpt_normalize(gpt_arenas(g), g->entries.device, g->layout.count, nullptr, step, &g->gpu);
    all_gather(g, g->weights);
    wait(g);                                              // entries.host may be written again
}

// ------------------------------------------------------------------------------------- statistics

// Restarts the sums of layers and routers.
static void gpt_stats_begin(Gpt *g) {
    g->measuring = true;
    g->measured = 0;
    for (int l = 0; l < g->m.L; l++) g->layer_sums.host[l] = LayerSums{{}, -INFINITY};
    to_device(g, g->layer_sums);
    clear(g, g->router_sums.device, g->router_sums.count);
}

static LayerStats *gpt_layer_stats(Gpt *g) {
    g->measuring = false;
    to_host(g, g->layer_sums);
    to_host(g, g->router_sums);
    wait(g);
    for (int l = 0; l < g->m.L; l++)
        g->layer_stats[l] = LayerStats{g->layer_sums.host[l], (double)g->measured,
                                       g->router_sums.host + l * router_size(&g->m)};
    return g->layer_stats;
}

// A selection bias has no gradient: the step that balance_routers has just made is recomputed
// from the loads. Every process has made the same step, so process 0 alone returns it.
static TensorStats balance_stats(Gpt *g, const Entry *e, float rate) {
    int E = g->m.moe.E;
    float *w = (float *)check_alloc(2 * (size_t)E * sizeof *w, "a selection bias and loads");
    float *load = w + E, sum = 0;
    TensorStats sums = {};
    copy(g, w, g->router_bias[e->layer], E);
    copy(g, load, gpt_block(g, e->layer).a.loads, E);
    wait(g);
    for (int j = 0; j < E; j++) sum += load[j];
    for (int j = 0; j < E && !g->nccl.rank; j++) {
        double step = router_balance_step(load[j], sum, E, rate);
        sums.weight += (w[j] - step) * (w[j] - step);
        sums.update += step * step;
    }
    free(w);
    return sums;
}

static TensorStats *gpt_tensor_stats(Gpt *g, const Optimizer *applied) {
    TensorStats *stats = g->tensor_stats.host;
    AdamWStep step = send_rates(g, applied);
    for (int k = 0; k < g->layout.count; k++) {
        const real *x = nullptr;
        if (g->layout.entries[k].muon && g->entries.host[k].size)
            x = muon_direction(muon_tensor(g, k), gpt_arenas(g), g->state.device,
                               (float)applied->momentum, false, &g->gpu);
        tensor_sums(g->tensor_stats.device + k, gpt_arenas(g), g->entries.device + k, step,
                    &g->gpu, x);
    }
    to_host(g, g->tensor_stats);
    wait(g);
    for (const Entry &e : g->layout)
        if (entry_is_common(&e))
            stats[&e - g->layout.entries] = balance_stats(g, &e, (float)applied->lr[LR_BALANCE]);
    return stats;
}

// ------------------------------------------------------------------- tensors as the host sees them

// The buffer for all of a kind. Sharded master weights are gathered in the gradients' buffer.
static float *whole_tensors(Gpt *g, int kind) {
    return g->tensors[kind == WEIGHTS && has_shards(g) ? GRADS : kind];
}

// The host's copy; NULL for a kind that this model does not have.
static float *host_tensors(Gpt *g, int kind) {
    if (!g->host[kind] && g->tensors[kind])
        g->host[kind] = (float *)check_alloc(arena_size(&g->layout, kind) * sizeof(float),
                                             "the host's copy of parameters or moments");
    return g->host[kind];
}

static void *gpt_tensor(Gpt *g, int kind, const Entry *e) {
    float *all = host_tensors(g, kind);
    return all ? all + entry_place(e, kind) : NULL;
}

// Copies this process's shards of the master weights to their places among all, or back.
static void copy_shards(Gpt *g, bool back) {
    for (const Entry &e : g->layout) {
        Part part = entry_part(&e, g->nccl.rank, g->nccl.size);
        float *shard = g->tensors[WEIGHTS] + e.state;
        float *place = whole_tensors(g, WEIGHTS) + e.offset + part.first;
        copy(g, back ? shard : place, back ? place : shard, part.size);
    }
}

// Checks that the weights that products read are the same on all processes: a checkpoint has one
// copy. The host's copy of gradients serves as a buffer.
static void compare_weights(Gpt *g) {
    Hash h = hash_begin();
    real *weights = (real *)host_tensors(g, GRADS);
    copy(g, weights, g->weights, g->layout.total);
    wait(g);
    hash_add(&h, weights, g->layout.total * sizeof *weights);
    comm_check_weights(g->setup.comm, hash_end(&h));
}

// Brings the host's copy up to date. Sharded master weights are gathered first.
static void gpt_fetch(Gpt *g, int kind) {
    if (kind == WEIGHTS && has_shards(g)) {
        compare_weights(g);
        copy_shards(g, false);
        all_gather(g, whole_tensors(g, WEIGHTS));
        wait(g);                                          // copy would wait too, without a limit
    }
    copy(g, host_tensors(g, kind), whole_tensors(g, kind), arena_size(&g->layout, kind));
    wait(g);
}

// Sends the host's copy to the device. The products' weights are rounded again, with the random
// bits of update `step`.
static void gpt_store(Gpt *g, int kind, int64_t step) {
    float *whole = whole_tensors(g, kind);
    copy(g, whole, host_tensors(g, kind), arena_size(&g->layout, kind));
    if (kind == WEIGHTS) {
        weights_round(g->weights, whole, g->layout.total, g->setup.stochastic,
                      rounding_key(g, step), &g->gpu);
        if (has_shards(g)) copy_shards(g, true);
    }
    g->cached = 0;                                        // the KV cache is stale
    wait(g);
}

// One row of logits as floats.
static const void *gpt_logits(Gpt *g, int64_t row) {
    real *raw = (real *)g->logits_row;
    copy(g, raw, gpt_block(g, 0).a.logits + row * g->m.Vp, g->m.V);
    wait(g);
    // In place and from the end, because a float is as large as two bfloat16.
    for (int64_t i = g->m.V - 1; i >= 0; i--) g->logits_row[i] = to_float(raw[i]);
    return g->logits_row;
}

// ------------------------------------------------------------------------------------ matrix plans

// Gives all processes the matrix plans of process 0, as text (linear.cuh). All then sum in the same
// order, and the plans that process 0 saves with the run are those of all.
static void share_plans(Gpt *g) {
    Comm *comm = g->setup.comm;
    char *text = g->nccl.rank ? nullptr : plans_text(g->gpu.plans);
    uint64_t size = text ? strlen(text) + 1 : 0;
    comm_broadcast(comm, &size, sizeof size);
    if (!text) text = (char *)check_alloc(size, "matrix plans");
    comm_broadcast(comm, text, size);
    if (g->nccl.rank) plans_read(g->gpu.plans, text, "process 0");
    free(text);
}

// Compares the two kinds of kernels, in the activations' memory, and chooses between them.
static void choose_kernels(Gpt *g) {
    int wanted = g->setup.kernels;
    Block b = gpt_block(g, 0);
    attend_choose(attn_shape(b), wanted, g->acts, g->act_layout.acts, &g->gpu);
    if (!moe_layers(&g->m)) return;
    b = gpt_block(g, g->m.L - 1);
    const Experts products[2] = {experts_up(b), experts_down(b)};
    experts_choose(products, b.s->n, wanted, g->acts, g->act_layout.acts, &g->gpu);
}

// Process 0 goes first and compares the two kinds of kernels; the others wait for its plans. Each
// process runs forward and backward on a batch of zeros, twice if a step has several micro-batches:
// the second backward ADDs to the gradients that the first SETs, with other plans. This loads the
// kernels of both, and with --tune times the algorithms of every product that has no plan, on the
// product's own arrays. Weights and moments stay as they are.
static void gpt_prepare(Gpt *g, const char *plans, const char *path) {
    if (!g->setup.training) return;
    if (plans) plans_read(g->gpu.plans, plans, path);
    int32_t *zeros = (int32_t *)check_alloc(g->max.n * sizeof *zeros, "a batch");
    if (g->nccl.rank) share_plans(g);
    g->gpu.plans->tuning = g->setup.tune;
    if (!g->nccl.rank) choose_kernels(g);
    g->preparing = true;
    int micros = g->setup.batch > (int64_t)g->max.B * g->nccl.size ? 2 : 1;
    for (int micro = 0; micro < micros; micro++) {
        gpt_forward(g, zeros, zeros, g->max.B, g->max.T);
        gpt_backward(g, 1, 0);
    }
    for (int k = 0; k < g->layout.count; k++)             // Muon's products, on its scratch
        if (g->layout.entries[k].muon) muon_iterate(muon_tensor(g, k), &g->gpu);
    g->gpu.plans->tuning = false;
    g->gpu.plans->prepared = g->gpu.plans->count;
    if (!g->nccl.rank) share_plans(g);
    gpt_loss(g);                                          // drops the dry step's losses
    g->preparing = false;
    free(zeros);
}

static char *gpt_plans(Gpt *g) { return plans_text(g->gpu.plans); }

// The name of a layer that has kernels of two kinds, and the kind in use; nullptr after the last.
static const char *gpt_kernels(Gpt *g, int layer, const char **kind) {
    if (layer == (moe_layers(&g->m) ? LAYERS_OF_TWO_KINDS : EXPERTS_FORWARD)) return nullptr;
    *kind = KIND_NAMES[g->gpu.plans->kinds[layer]];
    return LAYER_NAMES[layer];
}

// ------------------------------------------------------------------------------------------- main

const Trainer NAMED(cuda_, PREC) = {
    .device = "cuda", .precision = QUOTED(PREC), .mode = &MODES[NORM_MODE], .commit = GIT_HASH,
    .element = sizeof(float), .storage = sizeof(real),
    .create = gpt_create, .destroy = gpt_destroy,
    .tensor = gpt_tensor, .fetch = gpt_fetch, .store = gpt_store, .normalize = gpt_normalize,
    .zero_grads = gpt_zero_grads, .forward = gpt_forward, .backward = gpt_backward,
    .update = gpt_update, .outcome = gpt_outcome, .loss = gpt_loss,
    .decode = gpt_decode, .logits = gpt_logits,
    .stats_begin = gpt_stats_begin, .layer_stats = gpt_layer_stats,
    .tensor_stats = gpt_tensor_stats,
    .prepare = gpt_prepare, .plans = gpt_plans, .kernels = gpt_kernels,
    .bytes = gpt_bytes, .free_bytes = gpt_free_bytes, .peak = nullptr,
};

int main(int argc, char **argv) {
    Run *run = run_open(&NAMED(cuda_, PREC), argc, argv);       // flags, data, model, weights
    if (!run) return 0;                                       // --help, --version, --show
    int status = train(run);                                  // the loop: llmc/run/train.c
    if (status == 0) evaluate(run);
    if (status == 0) sample(run);
    return run_close(run, status);
}
