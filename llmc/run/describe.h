// describe.h: the sizes, costs and memory of a model, from its tables alone, and what --show prints
// of it. Nothing is allocated on the device. Of a Run these functions read t, m, init, layout and
// setup.
#pragma once
#include "train.h"

// Parameters of a tensor, and of the model. active: those that one token meets, of E experts K.
double show_size(const Model *m, const Entry *e, bool active);
double show_parameters(const Model *m, const Layout *layout, bool active);
// Floating-point operations of training on one token: 6 per weight of the matrix products that it
// meets (the head's included, the embedding's not) and 3 L NH (QK + HS) T for the causal half of
// attention. This is llm.c's convention; others count the full square.
double show_flops(const Model *m, const Layout *layout);

// Bytes that the device needs in this process.
double memory_needed(const Run *r, const Setup *setup);
// The largest micro-batch that fits into `limit` bytes, among the divisors of the batch up to a
// process's share of it; 0: none. setup: with any B.
int memory_fitting(const Run *r, Setup setup, double limit);
// The flags that fit into `limit` bytes: the largest micro-batch at each level of recompute.
enum { ADVICE_CAP = 256 };
char *memory_advice(char text[ADVICE_CAP], const Run *r, double limit);

void show_model(const Run *r, bool tables);   // a summary; tables: also layers and tensors
void show_memory(const Run *r);               // that the device needs and has; the flags that fit
void show_models(const Mode *mode);           // the named models, under a placement
void show_modes(void);                        // the table of modes.h
