// describe.h: the sizes, costs and memory of a model, from its tables alone, and what --show prints
// of it. Nothing is allocated on the device.
#pragma once
#include "../init.h"
#include "trainer.h"

// Parameters of a tensor, and of the model. active: those that one token meets, of E experts K.
double show_size(const Model *m, const Entry *e, bool active);
int64_t show_parameters(const Model *m, const Layout *layout, bool active);
// Floating-point operations of training on one token: 6 per weight of the matrix products that it
// meets (the head's included, the embedding's not) and 3 L NH (QK + HS) T for the causal half of
// attention. This is llm.c's convention; others count the full square.
double show_flops(const Model *m, const Layout *layout);

// Bytes that the device needs in this process.
double memory_needed(const Trainer *t, const Model *m, const Setup *setup);
// The largest micro-batch that fits into `room` bytes, among the divisors of the batch up to a
// process's share of it; 0: none.
int memory_fitting(const Trainer *t, const Model *m, const Setup *setup, double room);
// The flags that fit into `room` bytes: the largest micro-batch at each level of recompute.
char *memory_advice(char *text, size_t cap, const Trainer *t, const Model *m, const Setup *setup,
                    double room);

// A summary of the model called `name`; with tables also every layer, parameter and activation.
void show_model(const Model *m, const Init *init, const char *name, const Trainer *t,
                const Setup *setup, bool tables);
// The memory that the device needs and has, and the flags that fit.
void show_memory(const Trainer *t, const Model *m, const Setup *setup);
// The named models under a placement, and the table of modes.h.
void show_models(const Mode *mode);
void show_modes(void);
