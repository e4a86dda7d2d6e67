// describe.h: the sizes, FLOPs and memory of a model, computed from its tables, and what --show
// prints. Nothing is allocated on the device. These functions read t, f, m, init, layout and
// setup of a Run.
#pragma once
#include "train.h"

// Parameters of a tensor, and of the model. active: only those that one token uses, K of E experts.
double tensor_size(const Model *m, const Entry *e, bool active);
double parameter_count(const Model *m, const Layout *layout, bool active);
// Floating-point operations of training on one token: 6 for each weight of its matrix products (the
// LM head's included, the embedding's not), and 3 L NH (QK + HS) T for the causal half of
// attention: L layers, NH heads, QK and HS channels of q or k and of v. llm.c does the same; others
// count the full square.
double flops_per_token(const Model *m, const Layout *layout);

// Bytes that the device needs in this process.
double memory_needed(const Run *r, const Setup *setup);
// The largest micro-batch that fits into `limit` bytes, among the divisors of the batch up to a
// process's share of it; 0: none. setup: with any B.
int memory_fitting(const Run *r, Setup setup, double limit);
// The flags that fit into `limit` bytes: the largest micro-batch at each level of recompute.
enum { ADVICE_CAP = 256 };
char *memory_advice(char text[ADVICE_CAP], const Run *r, double limit);

void show_model(const Run *r, bool tables);   // a summary; tables: also layers and tensors
void show_memory(const Run *r);               // needed and free; the flags that fit
void show_models(const Mode *mode);           // the named models, under a placement
void show_modes(void);                        // the table of modes.h
