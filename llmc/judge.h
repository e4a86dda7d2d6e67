// judge.h: what a trainer on any device offers, as a table of functions. train_gpt.c exports one such table per precision:
// judge_fp64 is the judge that proofs compare with, judge_fp32 the CPU trainer. The services of trainer.h drive either.
#pragma once
#include "memory.h"

typedef struct Gpt Gpt;                                   // a model with its memory, private to the device

enum { WEIGHTS, GRADS, ADAM_M, ADAM_V, TENSOR_KINDS };

typedef struct Loss { double ce, z; } Loss;               // means over tokens, nats: cross-entropy and --z-loss * logsumexp^2

// One AdamW step (Loshchilov, Hutter 2019). scale multiplies every gradient (clipping); lr[] and decay[] per group of tensors.h;
// step counts from 1; gains decay towards gain_target (1: Gemma's 1 + w).
typedef struct AdamW { double lr[4], decay[3], beta1, beta2, eps, scale, gain_target; int64_t step; } AdamW;

typedef struct Trainer {
    const char *precision;                                // fp32, fp64
    size_t element;                                       // bytes of one weight
    Gpt *(*create)(const Model *m, int B, int T, int recompute, int training, double z_loss);
    void (*destroy)(Gpt *gpt);
    // Host address of an entry's weights, gradients or moments.
    void *(*tensor)(Gpt *gpt, int kind, const Entry *e);
    // Loss of B sequences of T tokens; keeps what backward needs. targets may be NULL: logits only.
    Loss (*forward)(Gpt *gpt, const int32_t *inputs, const int32_t *targets, int B, int T);
    // Adds the gradient of scale * (sum over the tokens of the last forward) to GRADS. Consumes the logits.
    void (*backward)(Gpt *gpt, double scale);
    const void *(*logits)(Gpt *gpt, int64_t row);         // V values, of the last forward
    void (*zero_grads)(Gpt *gpt);
    double (*grad_norm)(Gpt *gpt, const Entry *e);        // L2 norm of one entry's gradient, or of all for NULL
    void (*update)(Gpt *gpt, const AdamW *adamw);
} Trainer;

#ifdef __cplusplus
extern "C" {
#endif
extern const Trainer judge_fp32, judge_fp64;
#ifdef __cplusplus
}
#endif
