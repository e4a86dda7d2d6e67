// train.h: a run, as the main of train_gpt.c and of train_gpt.cu drives it.
#pragma once
#include "trainer.h"
#ifdef __cplusplus
extern "C" {
#endif

typedef struct Run Run;                       // run.h

// From the command line to a model that is ready: flags, data, weights. Everything that a user can
// get wrong is refused here, before any work. NULL: the command was --help, --version or --show,
// and is done.
Run *run_open(const Trainer *t, int argc, char **argv);

// The training loop. Returns the exit status: 0 when the last step is done, 128 + the signal that
// stopped the run, or EXIT_DIVERGED. Does nothing in a command that only reads a model (--from).
int train(Run *r);

void evaluate(Run *r);                        // --eval: validation loss and --tasks
void sample(Run *r);                          // --sample, --prompt: prints generated text
int run_close(Run *r, int status);            // frees everything; returns status
#ifdef __cplusplus
}
#endif
