// trainer.h: what a device provides. train_gpt.c and train_gpt.cu each fill one table of functions
// per precision; the services of llmc/run/ drive either of them and know neither.
//   judge_fp64               the judge that every proof compares with
//   judge_fp32, judge_bf16   the CPU trainer; bf16 rounds the operands of matrix products
//   cuda_fp32, cuda_bf16     the CUDA trainer
#pragma once
#include "comm.h"
#include "../memory.h"

#ifndef NORM_MODE                             // make train_gpt NORM_MODE=SPAN
#define NORM_MODE MODE_SPAN
#endif
#ifndef GIT_HASH
#define GIT_HASH "unknown"
#endif

typedef struct Gpt Gpt;                       // a model with its memory, private to the device

// ADAM_M: AdamW's first moment, or Muon's momentum.
enum { WEIGHTS, GRADS, ADAM_M, ADAM_V, TENSOR_KINDS };

// Means over tokens, in nats.
typedef struct {
    double ce;                                // cross-entropy
    double z;                                 // --z-loss * logsumexp^2 of the logits
    double router;                            // losses of all routers, times their coefficients
} Loss;

// One infinite or NaN term makes the sum infinite or NaN.
static inline bool loss_is_finite(Loss l) { return isfinite(l.ce + l.z + l.router); }

enum { OPTIMIZER_ADAMW, OPTIMIZER_MUON };         // in the order of --optimizer's choices
enum { MUON_MATCH_RMS_ADAMW, MUON_ORIGINAL };     // in the order of --muon-scale's choices

// The settings of one update: AdamW's (Loshchilov, Hutter 2019), and Muon's for its tensors.
typedef struct {
    double lr[LR_GROUPS], decay[DECAY_GROUPS];  // tensors.h
    double beta1, beta2, eps;
    double clip;                              // gradient clipping: largest global norm; 0: off
    double gain_target;                       // gains decay towards this (1: Gemma's 1 + w)
    int64_t step;                             // counts from 1
    double max_ce, max_norm;                  // skip the update above these (--skip-spikes); 0: off
    double muon_lr, momentum;                 // of Muon
    int muon_scale;                           // MUON_*
} Optimizer;

// The factor of Muon's update of a matrix: the one of Jordan et al. 2024, or one that gives the
// update AdamW's root mean square, about 0.2 (Liu et al. 2025, section 2.2).
static inline double muon_scale(const Optimizer *o, int64_t rows, int64_t cols) {
    double ratio = (double)rows / cols;
    if (o->muon_scale == MUON_ORIGINAL) return ratio > 1 ? sqrt(ratio) : 1;
    return 0.2 * sqrt((double)(ratio > 1 ? rows : cols));
}

// The result of a step: mean losses, gradient norm before clipping, whether the weights changed.
typedef struct {
    Loss loss;
    double norm;
    int applied;
} Update;

// Statistics of a layer (LayerStats) are over the tokens since stats_begin. A process returns sums;
// train.c adds up those of all processes and logs ratios and means.

// Sums of squares: the residual stream out of the block, and both terms of each sublayer's
// s = a skip + b yn (modes.h), the branch and the skip.
enum { STREAM, ATTN_BRANCH, ATTN_SKIP, FFN_BRANCH, FFN_SKIP, LAYER_SQUARES };
// Sums over tokens: the entropy of the router's probabilities, in nats, and the router's losses
// without their coefficients.
enum { ROUTER_ENTROPY, ROUTER_BALANCE, ROUTER_SEQUENCE, ROUTER_Z, ROUTER_SUMS };
typedef struct {
    double squares[LAYER_SQUARES];
    double logit;                             // largest attention score; begins at -INFINITY
} LayerSums;

typedef struct {
    LayerSums sums;
    double tokens;
    double *router;                           // [router_size] the sums, then tokens of each expert
} LayerStats;

static inline int64_t router_size(const Model *m) { return ROUTER_SUMS + m->moe.E; }

// Sums of squares of one tensor: its gradient before clipping, its weights before the step, and the
// change that the step made to them.
typedef struct {
    double grad, weight, update;
} TensorStats;

// --mask-documents: attention of a token stays within its document.
typedef struct {
    int mask;                                 // 0: a sequence is one document
    int restart;                              // learned positions count from the document's start
    int32_t separator;                        // the token that begins a document
} Documents;

// How a device makes a model.
typedef struct {
    int B, T;                                 // the largest micro-batch: sequences, tokens of each
    int recompute;                            // RECOMPUTE_* of tensors.h
    int training;                             // allocates gradients and AdamW's moments
    int optimizer;                            // OPTIMIZER_*
    Documents documents;
    double z_loss;
    int64_t batch;                            // sequences of a step, over all processes
    int tf32, stochastic, tune, graph;        // --tf32, --rounding, --tune, --graph; CUDA only
    int kernels;                              // --kernels: KERNELS_*; CUDA only
    uint64_t seed;                            // of stochastic rounding
    Comm *comm;                               // the processes that train it; NULL: one
} Setup;

enum { KERNELS_AUTO, KERNELS_MMA, KERNELS_WGMMA };

static inline int setup_kinds(const Setup *s) { return s->training ? TENSOR_KINDS : WEIGHTS + 1; }

// Elements of a kind, and the place of an entry among them. Moments: of this process's shards.
static inline int64_t arena_size(const Layout *t, int kind) {
    const int64_t sizes[] = {t->total, t->total, t->state, t->second};
    return sizes[kind];
}
static inline int64_t entry_place(const Entry *e, int kind) {
    const int64_t places[] = {e->offset, e->offset, e->state, e->second};
    return places[kind];
}

// The sizes of the largest micro-batch; threads, ratio: of the device.
static inline Sizes sizes_make(const Model *m, const Setup *s, int threads, int ratio) {
    int keep = s->recompute == RECOMPUTE_ON ? 1 : m->L;
    int cheap = s->recompute == RECOMPUTE_OFF ? m->L : 1;
    Sizes sizes = {s->B, s->T, s->B * s->T, keep, cheap, threads, ratio};
    return sizes;
}

// The parameters' layout, with this process's shards (ZeRO-1).
static inline Layout setup_layout(const Model *m, const Setup *s) {
    Layout t = layout_make(m);
    layout_share(&t, m, s->optimizer == OPTIMIZER_MUON, comm_rank(s->comm), comm_size(s->comm));
    return t;
}

// On a GPU forward, backward, zero_grads and update return before the work is done; loss, outcome
// and every function that reads memory wait for it. With several processes all of them must call
// loss and update together; the results are means over all processes.
typedef struct Trainer {
    const char *device, *precision;           // cpu | cuda;  fp32 | fp64 | bf16
    const Mode *mode;                         // the placement this program was built for
    const char *commit;                       // and the commit it was built from
    size_t element, storage;                  // bytes of a weight: on the host; in matrix products
    Gpt *(*create)(const Model *m, const Setup *setup);
    void (*destroy)(Gpt *gpt);

    // Host address of an entry's weights or gradients, or of the moments of the shard that this
    // process owns. On a GPU it is a copy: fetch brings it up to date, store sends it back.
    // store's step: updates so far.
    void *(*tensor)(Gpt *gpt, int kind, const Entry *e);
    void (*fetch)(Gpt *gpt, int kind);
    void (*store)(Gpt *gpt, int kind, int64_t step);
    void (*normalize)(Gpt *gpt);              // nGPT: matrices to unit length, as after an update

    void (*zero_grads)(Gpt *gpt);             // begins a step: backward follows before update
    // inputs, targets [B, T]: tokens of the vocabulary; readers of files and of texts check that.
    // Keeps the activations that backward reads, and adds to the losses. targets NULL: logits only.
    // --mask-documents applies here, and not to decode.
    void (*forward)(Gpt *gpt, const int32_t *inputs, const int32_t *targets, int B, int T);
    // Adds the gradient of scale * (sum of the last forward's losses) to GRADS; consumes the
    // logits. last: the last micro-batch of a step; its gradients may be reduced over processes.
    void (*backward)(Gpt *gpt, double scale, int last);
    // One step of the optimizer, if losses and gradients are finite and below the limits of
    // --skip-spikes; otherwise no weight or moment changes. Begins new sums of losses.
    void (*update)(Gpt *gpt, const Optimizer *o);
    // Waits for the last update, not for work queued after it, and returns its result.
    Update (*outcome)(Gpt *gpt);
    // Returns the mean losses since the last call of loss or update, and begins new sums.
    Loss (*loss)(Gpt *gpt);

    // Forward of the next n tokens of one text, from `position` on; like forward's they are of the
    // vocabulary. Keys and values of earlier positions are in the KV cache, which the first call
    // allocates; position 0 begins another text. Row 0 of logits then belongs to the last token; on
    // the CPU it has the bits of forward. Losses and statistics do not change. With several
    // processes only the caller takes part.
    void (*decode)(Gpt *gpt, const int32_t *inputs, int n, int position);
    // A row of V logits of the last forward without targets, or of the last decode.
    const void *(*logits)(Gpt *gpt, int64_t row);

    // Statistics of the forwards since stats_begin, one for each layer; and of the last update, one
    // for each entry. applied: that update, with rates of 0 if it was skipped. The device owns both
    // arrays; they are valid until the next call.
    void (*stats_begin)(Gpt *gpt);
    LayerStats *(*layer_stats)(Gpt *gpt);
    TensorStats *(*tensor_stats)(Gpt *gpt, const Optimizer *applied);

    // A matrix plan is the library's algorithm for one product. prepare comes after the weights are
    // set and before the first step: it takes the plans of an earlier run (NULL: none) and times
    // candidates for the missing ones (--tune). It also compares and chooses kernels (--kernels).
    // plans returns all as text, which the caller frees; kernels the choice, for the log. All three
    // are NULL on the CPU.
    void (*prepare)(Gpt *gpt, const char *plans, const char *path);
    char *(*plans)(Gpt *gpt);
    const char *(*kernels)(Gpt *gpt, int layer, const char **kind);

    // Bytes of the device's memory that create and decode take. tables: the sum of weights,
    // gradients, moments, activations and the KV cache (describe.h).
    double (*bytes)(const Model *m, const Setup *setup, double tables);
    // Bytes of it that are free; NAN: unknown. Refuses a model that the device cannot compute.
    double (*free_bytes)(const Model *m, const Setup *setup);
    double (*peak)(void);                     // FLOP/s of matrix products; NULL or 0: unknown
} Trainer;

static inline bool on_gpu(const Trainer *t) { return strcmp(t->device, "cpu") != 0; }

// Finds for each of the B T tokens where its document begins in its sequence, and, unless ends is
// NULL, where the next one does (T: nowhere). Tokens before the first separator are a document too.
static inline void documents_find(int32_t *begins, int32_t *ends, const int32_t *tokens, int B,
                                  int T, int32_t separator) {
    for (int64_t b = 0; b < B; b++) {
        const int32_t *row = tokens + b * T;
        int32_t begin = 0, end = T;
        for (int t = 0; t < T; t++) {
            if (row[t] == separator) begin = t;
            begins[b * T + t] = begin;
        }
        for (int t = T - 1; ends && t >= 0; t--) {
            ends[b * T + t] = end;
            if (row[t] == separator) end = t;
        }
    }
}

// Makes B sequences of T tokens the current micro-batch. Refuses more than was allocated for.
static inline void sizes_set(Sizes *now, const Sizes *max, int B, int T) {
    CHECK(B <= max->B && T <= max->T,
          "a batch of %d x %d tokens, but memory was allocated for %d x %d", B, T, max->B, max->T);
    now->B = B;
    now->T = T;
    now->n = B * T;
}

// Refuses a call of decode if the KV cache does not hold the tokens before `position`. It holds
// `cached` tokens of the text: none once the weights have changed.
static inline void decode_check(int n, int position, int cached, int T) {
    CHECK(n >= 1 && position >= 0 && n <= T - position,
          "%d tokens at position %d of a text, but the KV cache has room for %d\n"
          "  -> begin again with the last of them at position 0, or a larger --seq", n, position,
          T);
    CHECK(position <= cached,
          "decode at position %d, but the KV cache holds only %d tokens of this text\n"
          "  -> give it from position %d on", position, cached, cached);
}

// NAMED(judge_, PREC) and QUOTED(PREC) spell the precision that is being built.
#define JOIN(a, b) a##b
#define NAMED(a, b) JOIN(a, b)
#define SPELLED(a) #a
#define QUOTED(a) SPELLED(a)
extern const Trainer judge_fp32, judge_bf16, judge_fp64, cuda_fp32, cuda_bf16;
