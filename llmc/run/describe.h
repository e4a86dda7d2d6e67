// describe.h: the sizes, FLOPs and memory of a model, computed from its tables, the largest
// micro-batch that fits, and what --show prints. Nothing is allocated on the device.
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

// Sets the micro-batch, and refuses a model that does not fit into memory. Every process calls it.
void memory_choose(Run *r);

void show_model(const Run *r, bool tables);   // a summary; tables: also layers and tensors
void show(const Run *r);                      // what --show names
