// trainer.h: what a trainer on any device offers, as a table of functions. train_gpt.c exports one such table per precision:
// judge_fp64 is the judge that proofs compare with, judge_fp32 and judge_bf16 (bf16 products) the CPU trainer. The services of trainer.h drive either.
#pragma once
#include "comm.h"
#include "../memory.h"

typedef struct Gpt Gpt;                                   // a model with its memory, private to the device

enum { WEIGHTS, GRADS, ADAM_M, ADAM_V, TENSOR_KINDS };

// Means over tokens, nats: cross-entropy, --z-loss * logsumexp^2, and the losses of all routers with their coefficients.
typedef struct Loss { double ce, z, router; } Loss;

// One AdamW step (Loshchilov, Hutter 2019). clip: the largest norm of all gradients together, 0: none; lr[] and decay[] per group of tensors.h;
// step counts from 1; gains decay towards gain_target (1: Gemma's 1 + w). Where the cross-entropy or the norm is above most_ce, most_norm, nothing changes; 0: no such limit.
typedef struct AdamW { double lr[LR_GROUPS], decay[3], beta1, beta2, eps, clip, gain_target; int64_t step; double most_ce, most_norm; } AdamW;

typedef struct Update { Loss loss; double norm; int applied; } Update;   // what a step found: mean losses, norm before clipping, whether it changed the weights

// What is measured of a step: --norms-every logs it, events keep it. Of a layer, over the tokens of the forwards since watch: RMS of the stream that leaves the block; for each sublayer, with
// s = a skip + b y (modes.h), RMS(b y) / RMS(a skip); the largest attention logit.
// Of its router: mean entropy of the probabilities of experts, nats; its losses, without coefficients; and the tokens of each of the E experts, which lie in
// the model until the next watch.
typedef struct LayerStats { double residual_rms, attn_ratio, ffn_ratio, attn_logit_max, entropy, balance, sequence, router_z; const double *load; } LayerStats;
// Of a tensor after a step: L2 norms of its gradient before clipping, of its weights before the step, and of what the step subtracted from them.
typedef struct TensorStats { double grad, weight, update; } TensorStats;

// How a model is made. B x T: the largest micro-batch, of steps of `batch` sequences. extends: extend will be called. seed: of stochastic rounding. comm: the processes that train it (NULL: one).
typedef struct Setup { int B, T, recompute, training, extends; double z_loss; int64_t batch; int tf32, stochastic, tune, graph; uint64_t seed; Comm *comm; } Setup;

static inline int setup_kinds(const Setup *s) { return s->training ? TENSOR_KINDS : WEIGHTS + 1; }

// On a GPU forward, backward, zero_grads return before the work is done; loss, update and what reads memory wait for it.
// Several processes call loss, update and what follows it together: what these return is of all of them.
typedef struct Trainer {
    const char *device, *precision;                       // cpu | cuda;  fp32 | fp64 | bf16
    size_t element, storage;                              // bytes of a weight as the host sees it; of a weight or activation in the products
    Gpt *(*create)(const Model *m, const Setup *setup);
    void (*destroy)(Gpt *gpt);
    // Host address of an entry's weights or gradients, or of the moments of its part that this process owns. On a GPU a copy: fetch brings it up to date, store
    // sends it back; step: updates so far.
    void *(*tensor)(Gpt *gpt, int kind, const Entry *e);
    void (*fetch)(Gpt *gpt, int kind);
    void (*store)(Gpt *gpt, int kind, int64_t step);
    // B sequences of T tokens; keeps what backward needs and adds to the losses. targets may be NULL: logits only.
    void (*forward)(Gpt *gpt, const int32_t *inputs, const int32_t *targets, int B, int T);
    // Sampling: the next n tokens of one text, at positions `at`, at + 1, ... up to T of the setup. Keys and values of those before are kept (tensors.h, past_width), in memory
    // that the first call takes; at 0 another text begins, at a position before the last the text goes on from there. Gives the logits of the last token, as row 0: what
    // forward gives for it, on the CPU to the bit. Adds to no loss, is not measured, and of several processes concerns the one that asks, as each has all weights.
    void (*extend)(Gpt *gpt, const int32_t *inputs, int n, int at);
    // Adds the gradient of scale * (sum over the tokens of the last forward) to GRADS. Consumes the logits. last: of a step, nothing more is added before update.
    void (*backward)(Gpt *gpt, double scale, int last);
    Loss (*loss)(Gpt *gpt);                               // mean over the tokens of all forwards since it was last asked, by this or by update
    const void *(*logits)(Gpt *gpt, int64_t row);         // V values of the type of a weight, of the last forward without targets, or of the last extend
    void (*zero_grads)(Gpt *gpt);
    Update (*update)(Gpt *gpt, const AdamW *adamw);       // one step, where losses and gradients are finite and within limits; otherwise nothing changes
    void (*normalize)(Gpt *gpt);                          // nGPT: gives matrices the lengths they have after every update; elsewhere nothing
    void (*watch)(Gpt *gpt);                              // the forwards from here on are measured, until layer_stats is asked
    void (*layer_stats)(Gpt *gpt, LayerStats *layers);    // one for each layer
    void (*tensor_stats)(Gpt *gpt, const AdamW *applied, TensorStats *tensors);   // one for each entry; after the update that `applied` describes, NULL: none was
    // After weights are set, before the first step: takes the matrix plans of an earlier run, if any, and chooses by timing those that lack (setup.tune).
    // plans: as text, to keep with the run (NULL: none).
    void (*prepare)(Gpt *gpt, const char *plans, const char *path);
    char *(*plans)(Gpt *gpt);
    // Bytes of the device's memory that create and extend take where the tables say `tables`
    // (show.h), and how many are free, NAN: not known. room first refuses what the device cannot
    // compute.
    double (*bytes)(const Model *m, const Setup *setup, double tables);
    double (*room)(const Model *m, const Setup *setup);
    double (*peak)(void);                                 // FLOP/s of products that this machine can do at most, measured in a moment (NULL: not known)
} Trainer;

// What every device refuses: tokens outside of the vocabulary.
static inline void tokens_check(const char *what, const int32_t *tokens, int64_t n, int V) {
    for (int64_t i = 0; i < n; i++) CHECK(tokens[i] >= 0 && tokens[i] < V, "%s %d, expected 0..%d\n  -> --vocab must cover the data", what, tokens[i], V - 1);
}

// And rows of a text that are not there, or were made by weights that are no more.
static inline void extend_check(int n, int at, int rows, int T) {
    CHECK(n >= 1 && at >= 0 && n <= T - at, "%d tokens at position %d of a text, where memory was made for %d\n  -> begin again with the last of them at position 0, or a larger --seq", n, at, T);
    CHECK(at <= rows, "a text goes on at position %d, but the keys and values of only %d tokens before it are there, under these weights\n  -> give it from position %d on", at, rows, rows);
}

// NAMED(judge_, PREC), QUOTED(PREC): of the precision that is built.
#define JOIN(a, b) a##b
#define NAMED(a, b) JOIN(a, b)
#define SPELLED(a) #a
#define QUOTED(a) SPELLED(a)
#ifdef __cplusplus
extern "C" {
#endif
extern const Trainer judge_fp32, judge_bf16, judge_fp64, cuda_fp32, cuda_bf16;
#ifdef __cplusplus
}
#endif
