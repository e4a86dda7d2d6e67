// run.h: the state of a run, and the functions by which these files share it:
//   config.c   flags, the model, config.json
//   start.c    from the command line to a model that is ready
//   train.c    the training loop, its log lines and its progress
//   save.c     checkpoints: save, resume, --init-from, --from
//   sample.c   generated text
#pragma once
#include "checkpoint.h"
#include "config.h"
#include "data.h"
#include "eval.h"
#include "log.h"
#include "spikes.h"
#include "tokenizer.h"
#include "train.h"
#include "../init.h"

// Training speed, to notice a machine that slows down.
typedef struct {
    SpikeWindow rates;                    // tokens per second at the last lines of progress
    double seconds;                       // training time at the last line,
    int64_t tokens;                       // and tokens
    bool noted;                           // the note on slow training was printed
} Pace;

struct Run {
    const Trainer *t;
    FlagSet set;
    const Flags *f;                       // set.f
    bool training;                        // without --from
    bool resuming;                        // from a checkpoint in --out
    Comm comm;
    Model m;
    Init init;
    Layout layout;
    Setup setup;
    Gpt *gpt;

    DataLoader data, val;
    bool has_val;
    double unigram;                       // entropy of the validation tokens, nats; NAN: no data
    Tokenizer tokenizer;                  // count 0: none; tokens then print as bytes or numbers
    Tasks tasks;
    int32_t *inputs, *targets;            // [micro, T] one micro-batch
    int micro;                            // sequences of a micro-batch

    char out[PATH_CAP];                   // the run's folder,
    int folder;                           // its descriptor, open and locked; 0: none
    Log log;
    long long step, updates, tokens;      // steps done; updates applied; tokens seen
    bool saved;                           // this step has a checkpoint
    int64_t saved_updates;                // updates at the last save, done or refused; -1: none
    int bad;                              // steps in a row that were not finite
    int64_t epoch;                        // the last epoch at whose start the data was hashed
    SpikeWindow losses, norms;            // the last losses and gradient norms
    double loss_z, norm_z;                // robust z-scores of the last step
    bool unfinished;                      // the last step's outcome has not been read
    bool measured;                        // the last step's layers were measured (--norms-every)
    Optimizer optimizer;                  // of the last step
    double lr;                            // its scheduled rate, without --width-base's factors

    double started, printed;              // seconds: start of training, last line of progress,
    double finished;                      // and the end of the last step
    int64_t started_tokens;
    double peak;                          // FLOP/s of all devices; 0: unknown
    Pace pace;
};

// config.c
char *run_config(const Run *r);           // the text of config.json; to be freed

// save.c
void run_init_weights(Run *r);            // random, by init.h
void run_read_weights(Run *r, const char *from);      // of a run, a checkpoint, a model.safetensors
void run_resume(Run *r);                  // from the newest whole checkpoint in --out
bool run_save(Run *r);                    // false: not all is finite, nothing was saved
unsigned long long run_hash(Run *r);      // of all weights: equal hashes mean equal models
void run_know_data(Run *r, DataLoader *d);            // waits for the data's hash
void run_save_tensors(Run *r, Checkpoint *c, const char *file, int first_kind, int last_kind);

// train.c
bool run_is_usable(Run *r);               // the loss of the next, unseen batch is finite
int64_t run_epoch(const Run *r);          // of the first sample of the next step
int64_t run_val_samples(const Run *r);    // of one validation
Log *run_begin_line(Run *r);              // of the log, with the step as its first member
void run_note_pace(Run *r, double seconds);           // notes once that training has become slow

// start.c
void run_open_folder(Run *r);             // makes --out, writes config.json, opens the log
void run_open_tokenizer(Run *r);
Setup run_setup(const Run *r);

// sample.c
// Draws the next token: softmax with temperature over the V logits, or over the k largest (k = 0:
// all; ties with the k-th are kept). temperature 0 takes the largest logit. u: uniform in [0, 1).
// weights [2 V]: scratch memory.
int sample_token(const double *logits, int V, double temperature, int64_t k, double u,
                 double *weights);
