// train.c: the training loop and its reports: log lines, progress, validation, statistics. Read it
// from its end: train is the table of contents. A kill loses at most the steps since the last
// checkpoint. A loss or gradient that is not finite never reaches the weights.
#include "run.h"

enum { DIVERGED_STEPS = 10 };             // steps in a row that are not finite end the run
enum { PACES_ENOUGH = 8 };                // lines of progress before training can be called slow

// ---------------------------------------------------------------------------------- micro-batches

// The micro-batches of this process's share of `samples` samples from number `first` on:
//     MicroBatches b = micro_batches(r, data, first, samples);
//     while (next_micro_batch(r, &b)) ... r->inputs, r->targets, b.B
typedef struct {
    DataLoader *data;
    int64_t at, end;                      // the next sample, and the one after the last
    int B;                                // sequences of this micro-batch
} MicroBatches;

// Process `rank` takes the samples from rank / size to (rank + 1) / size of all. Shares differ by
// at most one sample. The order of the samples does not depend on the number of processes.
static MicroBatches micro_batches(const Run *r, DataLoader *data, int64_t first, int64_t samples) {
    int64_t rank = r->comm.rank, size = r->comm.size;
    return (MicroBatches){
        .data = data,
        .at = first + samples * rank / size,
        .end = first + samples * (rank + 1) / size,
    };
}

// Reads the next micro-batch; the last one may be smaller. False: there is none left.
static bool next_micro_batch(Run *r, MicroBatches *b) {
    int64_t left = b->end - b->at, T = r->m.T;
    if (left <= 0) return false;
    b->B = least(left, r->micro);
    for (int i = 0; i < b->B; i++)
        loader_sample(b->data, b->at + i, r->inputs + i * T, r->targets + i * T);
    b->at += b->B;
    return true;
}

// Forward of these samples, without backward.
static void forward_samples(Run *r, DataLoader *data, int64_t first, int64_t samples) {
    MicroBatches b = micro_batches(r, data, first, samples);
    while (next_micro_batch(r, &b))
        r->t->forward(r->gpt, r->inputs, r->targets, b.B, r->m.T);
}

// Finite weights may give an infinite loss: such a checkpoint must not replace the last usable one
// (--keep-last). t->loss returns and clears the losses of these forwards.
bool run_is_usable(Run *r) {
    forward_samples(r, &r->data, r->step * r->f->batch, r->f->batch);
    return loss_is_finite(r->t->loss(r->gpt));
}

int64_t run_epoch(const Run *r) { return r->step * r->f->batch / r->data.samples; }

// At the start of an epoch the shards are hashed again: they may have changed on the disk.
static void check_epoch(Run *r) {
    if (r->epoch == run_epoch(r)) return;
    run_know_data(r, &r->data);
    loader_hash_begin(&r->data);
    r->epoch = run_epoch(r);
}

// ------------------------------------------------------------------------------------- validation

// --val-tokens in samples, rounded up; 0: all.
int64_t run_val_samples(const Run *r) {
    int64_t all = r->val.samples, limit = CEIL_DIV(r->f->val_tokens, r->f->seq);
    return limit && limit < all ? limit : all;
}

Log *run_begin_line(Run *r) {
    log_begin(&r->log);
    log_int(&r->log, "step", r->step);
    return &r->log;
}

// Sets *loss to the mean cross-entropy of the validation samples. False: a signal stopped it. All
// processes check for signals, then score one piece of the samples together, and so on.
static bool validate(Run *r, double *loss) {
    int64_t samples = run_val_samples(r), piece = (int64_t)r->micro * r->comm.size;
    for (int64_t at = 0; at < samples; at += piece) {
        if (comm_signal(&r->comm)) return false;
        forward_samples(r, &r->val, at, least(samples - at, piece));
    }
    *loss = r->t->loss(r->gpt).ce;
    return true;
}

// A validation that a signal stopped logs no line, so the resumed run does it again.
static void log_validation(Run *r) {
    double loss, floor = r->val.floor;
    if (!validate(r, &loss)) return;
    unsigned long long hash = run_hash(r);
    Log *log = run_begin_line(r);
    log_real(log, "val_loss", loss);
    if (!isnan(floor)) log_real(log, "val_above_floor", loss - floor);
    log_hex(log, "weights", hash);
    log_end(log);
    // The floor is the entropy of the built-in corpus: no model's loss can fall below it.
    printf("step %6lld/%lld  validation loss %.4f", r->step, r->f->steps, loss);
    if (!isnan(floor)) printf(" (floor %.4f, +%.4f)", floor, loss - floor);
    printf("  weights %016llx\n", hash);
    fflush(stdout);
}

// The line is logged after the last task. A signal before that leaves no line, so the resumed run
// does all tasks again.
static void log_tasks(Run *r) {
    for (Task *t = r->tasks.task; t < r->tasks.task + r->tasks.count; t++)
        if (!task_score(t, r)) return;
    Log *log = run_begin_line(r);
    tasks_report(&r->tasks, log);
    log_end(log);
}

// --from only reads the run: nothing is added to its log.
void evaluate(Run *r) {
    double loss = NAN;
    if (!r->f->eval) return;
    validate(r, &loss);
    printf("validation loss %.6f, weights %016llx\n", loss, run_hash(r));
    if (r->tasks.count) log_tasks(r);
}

// --------------------------------------------------------------------------------------- log lines

// Arrays with a value for each layer. Dense layers have null for the values of routers.
static void log_layer_values(const Run *r, Log *log, const LayerStats *layers) {
    enum { DENSE_VALUES = 4, VALUES = 10 };
    static const char *const NAMES[VALUES] = {
        "residual_rms", "attn_ratio", "ffn_ratio", "attn_logit_max",
        "router_max_load", "router_dead", "router_entropy", "router_balance", "router_sequence",
        "router_z"};
    const Moe *moe = &r->m.moe;
    for (int i = 0; i < (moe->E ? VALUES : DENSE_VALUES); i++) {
        log_nest(log, NAMES[i], '[');
        for (int l = 0; l < r->m.L; l++) {
            const LayerStats *s = &layers[l];
            const double *sums = s->sums.squares, *router = s->router, *load = router + ROUTER_SUMS;
            bool routed = moe->E && l >= moe->dense;
            double n = s->tokens, max = 0, dead = 0;
            for (int e = 0; e < moe->E; e++) {
                max = fmax(max, load[e]);
                dead += load[e] == 0;
            }
            const double values[VALUES] = {
                sqrt(sums[STREAM] / (n * r->m.C)), sqrt(sums[ATTN_BRANCH] / sums[ATTN_SKIP]),
                sqrt(sums[FFN_BRANCH] / sums[FFN_SKIP]), s->sums.logit,
                max * moe->E / (n * moe->K), dead,
                router[ROUTER_ENTROPY] / n, router[ROUTER_BALANCE] / n,
                router[ROUTER_SEQUENCE] / n, router[ROUTER_Z] / n};
            log_real(log, NULL, i < DENSE_VALUES || routed ? values[i] : NAN);
        }
        log_unnest(log, ']');
    }
}

// For each layer with experts: the part of its tokens that each expert received. A token counts K
// times, once for each of its experts.
static void log_loads(const Run *r, Log *log, const LayerStats *layers) {
    const Moe *moe = &r->m.moe;
    log_nest(log, "router_load", '{');
    for (int l = moe->dense; l < r->m.L; l++) {
        char key[16];
        const double *load = layers[l].router + ROUTER_SUMS;
        log_nest(log, check_format(key, sizeof key, "%d", l), '[');
        for (int e = 0; e < moe->E; e++) log_real(log, NULL, load[e] / (layers[l].tokens * moe->K));
        log_unnest(log, ']');
    }
    log_unnest(log, '}');
}

// --norms-every: arrays by layer, objects by tensor.
static void log_stats(Run *r) {
    int count = r->layout.count;
    LayerStats *layers = r->t->layer_stats(r->gpt);
    TensorStats *tensors = r->t->tensor_stats(r->gpt, &r->optimizer);
    // All-reduce: sums over processes, and the maximum of the attention scores.
    for (LayerStats *s = layers; s < layers + r->m.L; s++) {
        comm_all_reduce(&r->comm, s->sums.squares, LAYER_SQUARES, COMM_SUM);
        comm_all_reduce(&r->comm, &s->sums.logit, 1, COMM_MAX);
        comm_all_reduce(&r->comm, &s->tokens, 1, COMM_SUM);
        comm_all_reduce(&r->comm, s->router, router_size(&r->m), COMM_SUM);
    }
    // TensorStats has only doubles.
    comm_all_reduce(&r->comm, &tensors->grad, count * (sizeof *tensors / sizeof(double)), COMM_SUM);
    Log *log = run_begin_line(r);
    log_layer_values(r, log, layers);
    if (r->m.moe.E) log_loads(r, log, layers);
    for (int ratios = 0; ratios < 2; ratios++) {
        log_nest(log, ratios ? "update_ratios" : "grad_norms", '{');
        for (int k = 0; k < count; k++) {
            const TensorStats *s = &tensors[k];
            double value = ratios ? sqrt(s->update) / sqrt(s->weight) : sqrt(s->grad);
            log_real(log, r->layout.entries[k].name, value);
        }
        log_unnest(log, '}');
    }
    log_end(log);
}

// The line of every step. event: NULL, or what happened; then the step's samples are logged as
// well, so that it can be repeated.
static void log_step(Run *r, const Update *u, const char *event, double seconds) {
    Log *log = run_begin_line(r);
    log_real(log, "loss", u->loss.ce);
    if (!isnan(r->data.floor)) log_real(log, "above_floor", u->loss.ce - r->data.floor);
    if (r->m.moe.E) log_real(log, "router_loss", u->loss.router);
    log_real(log, "lr", r->lr);
    log_real(log, "grad_norm", u->norm);
    log_int(log, "tokens", r->tokens);
    log_real(log, "ms", seconds * 1e3);
    if (event) {
        log_text(log, "event", event);
        log_int(log, "first_sample", (r->step - 1) * r->f->batch);
        log_int(log, "samples", r->f->batch);
        log_real(log, "loss_z", r->loss_z);
        log_real(log, "grad_norm_z", r->norm_z);
    }
    if (!u->applied) log_text(log, "skipped", event ? event : "above the limit");
    log_end(log);
}

// ---------------------------------------------------------------------------------------- terminal

// doc/failures.md explains how to repeat such a step.
static void print_event(const Run *r, const char *event, const Update *u) {
    long long end = r->step * r->f->batch, first = end - r->f->batch;
    printf("step %lld: %s: loss %g (z %.1f), gradient norm %g (z %.1f), samples %lld to %lld; %s\n",
           r->step, event, u->loss.ce, r->loss_z, u->norm, r->norm_z, first, end - 1,
           u->applied ? "the update was applied" : "the weights stay as they are");
}

// Notes once that training has become less than half as fast as the median of earlier lines.
// seconds: of training so far.
void run_note_pace(Run *r, double seconds) {
    Pace *p = &r->pace;
    double rate = (r->tokens - p->tokens) / (seconds - p->seconds);
    double median = p->rates.count < PACES_ENOUGH ? 0 : spike_level(&p->rates);
    if (rate < median / 2 && !p->noted) {
        printf("note: %.0f tok/s is less than half of the median, %.0f: the machine may be shared "
               "or throttled\n"
               "  -> top and nvidia-smi show it; OMP_NUM_THREADS=N leaves cores to others\n",
               rate, median);
        p->noted = true;
    }
    spike_add(&p->rates, rate, false);
    p->seconds = seconds;
    p->tokens = r->tokens;
}

// The line on the terminal: at the first and last step, and every two seconds.
static void print_progress(Run *r, const Update *u) {
    const Flags *f = r->f;
    double now = clock_seconds(), seconds = now - r->started;
    double rate = (r->tokens - r->started_tokens) / seconds;
    bool due = now - r->printed >= 2;                     // a terminal needs no more
    if (!due && r->step > 1 && r->step < f->steps) return;
    if (due) run_note_pace(r, seconds);
    // The ETA assumes the mean rate so far, without validations and checkpoints.
    char eta[32];
    double tokens_left = (double)(f->steps - r->step) * f->batch * r->m.T;
    printf("step %6lld/%lld  loss %.4f", r->step, f->steps, u->loss.ce);
    if (!isnan(r->data.floor)) printf(" (floor +%.4f)", u->loss.ce - r->data.floor);
    printf("  lr %.2e  grad %.3f  %.0f tok/s", r->lr, u->norm, rate);
    if (r->peak > 0)
        printf(" (%.0f %% of peak)", 100 * rate * flops_per_token(&r->m, &r->layout) / r->peak);
    printf("  ETA %s\n", log_duration(eta, tokens_left / rate));
    fflush(stdout);
    r->printed = now;
}

// ---------------------------------------------------------------------------------- begin and end

// Opens the folder and its log, starts the hash of the data and the clocks.
static void begin_training(Run *r) {
    const Flags *f = r->f;
    run_open_folder(r);
    // A resumed run has compared the hashes already.
    if (!r->val.content) loader_hash_begin(&r->val);
    if (!r->data.content) {
        double gigabytes = loader_gigabytes(&r->data);
        loader_hash_begin(&r->data);
        if (gigabytes > 1)
            printf("hashing %.1f GB of shards in the background, for --resume\n", gigabytes);
    }
    if (r->comm.size > 1)
        printf("%d processes, each with a part of every batch and of the optimizer's state\n",
               r->comm.size);
    printf("run %s, %s on the %s, git %s; %lld samples of %lld tokens an epoch%s\n\n", r->out,
           r->t->precision, on_gpu(r->t) ? "GPU" : "CPU", r->t->commit, r->data.samples, f->seq,
           r->has_val ? "" : "; no validation data");
    // Process 0 knows from the log whether the resumed step has its validation and its tasks.
    comm_broadcast(&r->comm, &r->log.validated, sizeof r->log.validated);
    comm_broadcast(&r->comm, &r->log.tasked, sizeof r->log.tasked);
    r->saved = r->step > 0;
    r->saved_updates = r->saved ? r->updates : -1;
    r->peak = r->t->peak ? r->t->peak() : 0;
    comm_all_reduce(&r->comm, &r->peak, 1, COMM_SUM);
    r->started = r->finished = clock_seconds();            // loading is not training time
    r->started_tokens = r->pace.tokens = r->tokens;
    if (r->step >= f->steps)
        printf("note: the run is at step %lld of --steps %lld: nothing to train\n"
               "  -> a larger --steps\n", r->step, f->steps);
    comm_catch_signals();
}

// Prints that the run diverged, and which checkpoint has its last finite weights. Bad steps were
// skipped, so the weights may be finite: saves them first, unless no update was applied since the
// last save, done or refused.
static int end_diverged(Run *r) {
    char last[PATH_CAP] = "no checkpoint";
    char why[80] = "weights or moments are infinite or NaN and were not saved";
    if (r->updates != r->saved_updates) run_save(r);
    if (r->comm.rank) return EXIT_DIVERGED;               // process 0 prints for all
    int64_t step = checkpoint_step_below(r->out, r->step + 1);
    if (step >= 0) checkpoint_path(last, r->out, step);
    if (r->bad) check_format(why, sizeof why, "%d steps in a row were not finite", r->bad);
    fprintf(stderr,
            "error: %s: the run diverged at step %lld; its last finite weights are in %s\n"
            "  -> a smaller --lr, a longer --warmup, or another --init\n",
            why, r->step, last);
    return EXIT_DIVERGED;
}

// Saves the step, unless it is saved already. Shells expect the status 128 + signal. -1: diverged.
static int stop_by_signal(Run *r, int signal) {
    if (r->step > 0 && !r->saved && !run_save(r)) return -1;
    printf("\nstopped at step %lld; --out %s --resume auto goes on\n", r->step, r->out);
    return 128 + signal;
}

// -------------------------------------------------------------------------------------- the loop

// The settings of the next update, and the limits above which --skip-spikes skips it. Bias
// correction counts updates: a skipped step does not count.
static Optimizer next_optimizer(const Run *r) {
    Optimizer o = schedule_optimizer(r->f, r->lr, r->updates + 1);
    if (r->f->skip_spikes) {
        o.max_ce = spike_limit(&r->losses, r->f->spike_z);
        o.max_norm = spike_limit(&r->norms, r->f->spike_z);
    }
    return o;
}

// Judges the last step and looks for spikes. Returns the event to report; NULL: none.
static const char *judge_step(Run *r, const Update *u) {
    double z = r->f->spike_z;                             // 0: no spikes
    r->loss_z = spike_z(&r->losses, u->loss.ce);
    r->norm_z = spike_z(&r->norms, u->norm);
    bool finite = loss_is_finite(u->loss) && isfinite(u->norm);
    bool loss_spike = z > 0 && r->loss_z > z, norm_spike = z > 0 && r->norm_z > z;
    // A step that is not finite does not enter the windows.
    if (finite) {
        spike_add(&r->losses, u->loss.ce, loss_spike);
        spike_add(&r->norms, u->norm, norm_spike);
    }
    r->updates += u->applied;
    r->bad = finite ? 0 : r->bad + 1;
    if (!finite) return "not finite";
    if (loss_spike) return "a spike of the loss";
    return norm_spike ? "a spike of the gradient norm" : NULL;
}

// Waits for the update of the last step, and reports it: the log, spikes, progress. Returns false
// if too many steps in a row were not finite.
static bool finish_step(Run *r) {
    if (!r->unfinished) return true;
    Update u = r->t->outcome(r->gpt);
    const char *event = judge_step(r, &u);
    double now = clock_seconds();
    log_step(r, &u, event, now - r->finished);
    r->finished = now;
    // For the statistics of a skipped step: no rate, and nothing that divides by 0.
    if (!u.applied) r->optimizer = (Optimizer){.eps = 1, .step = 1};
    if (r->measured) log_stats(r);
    if (event) print_event(r, event, &u);
    print_progress(r, &u);                            // prints only when a line is due
    r->unfinished = false;
    return r->bad < DIVERGED_STEPS;
}

// Whether something that happens every `every` steps (0: only at the end) is due: never at step 0,
// always at the last step.
static bool is_due(const Run *r, int64_t every) {
    bool last = r->step >= r->f->steps;
    return r->step > 0 && (last || (every && r->step % every == 0));
}

int train(Run *r) {
    const Trainer *t = r->t;
    const Flags *f = r->f;
    int status = -1;                                      // none: still training, or diverged
    if (!r->training) return 0;
    begin_training(r);
    while (status < 0) {
        // A GPU begins the next step before the last one is reported, unless the layers of either
        // are measured, or a checkpoint or validation of the last one is due.
        bool measured = f->norms_every && ((r->step + 1) % f->norms_every == 0 || r->step == 0);
        bool due = is_due(r, f->save_every) || is_due(r, f->val_every);
        bool wait = !on_gpu(t) || measured || r->measured || due;
        if (wait && !finish_step(r)) break;
        r->measured = measured;

        // Checkpoint, validation and tasks of the step that has just ended. A resumed run does
        // those that a kill prevented. They are not training time.
        double begin = clock_seconds();
        if (is_due(r, f->save_every) && !r->saved && !run_save(r)) break;
        if (is_due(r, f->val_every)) {
            if (!r->log.validated && r->has_val) log_validation(r);
            if (!r->log.tasked && r->tasks.count) log_tasks(r);
        }
        double pause = clock_seconds() - begin;
        r->started += pause;
        r->finished += pause;

        // SIGINT and SIGTERM end a run between two steps, the same step on all processes.
        int signal = comm_signal(&r->comm);
        if (signal) {
            if (finish_step(r)) status = stop_by_signal(r, signal);
            break;
        }
        // The end of the run. It has diverged if the last step was not finite.
        if (r->step >= f->steps) {
            if (!r->bad) status = 0;
            break;
        }

        // Gradients of the whole batch, accumulated over micro-batches.
        double scale = 1.0 / (f->batch * r->m.T);     // the loss is a mean over tokens
        check_epoch(r);
        MicroBatches b = micro_batches(r, &r->data, r->step * f->batch, f->batch);
        if (measured) t->stats_begin(r->gpt);
        t->zero_grads(r->gpt);
        while (next_micro_batch(r, &b)) {
            t->forward(r->gpt, r->inputs, r->targets, b.B, r->m.T);
            t->backward(r->gpt, scale, b.at == b.end);
        }

        // The update, once it is known whether the step before was applied.
        if (!finish_step(r)) break;
        r->lr = schedule_lr(f, r->step + 1);
        r->optimizer = next_optimizer(r);
        t->update(r->gpt, &r->optimizer);
        r->step++;
        r->tokens += f->batch * r->m.T;
        r->unfinished = true;
        r->saved = r->log.validated = r->log.tasked = false;
    }
    if (status < 0) status = end_diverged(r);
    comm_release_signals(status == 0);
    // Equal hashes mean bit-identical weights: the line to compare two runs by.
    if (status == 0)
        printf("\nweights %016llx after %lld steps, %lld tokens; see %s\n", run_hash(r), r->step,
               r->tokens, r->out);
    return status;
}
