// train.c: the training loop and its reports: log lines, progress, validation, statistics.
#include "run.h"
#include <errno.h>
#include <math.h>
#include <unistd.h>
#include "describe.h"
#include "schedule.h"
#include "util.h"

enum { DIVERGED_STEPS = 10 };             // steps in a row that are not finite end the run
enum { PACES_ENOUGH = 8 };                // lines of progress before a pace can be called slow

// ---------------------------------------------------------------------------------- micro-batches

// The micro-batches of this process's share of `samples` samples from number `first` on:
//     MicroBatches b = micro_batches(r, data, first, samples);
//     while (next_micro_batch(r, &b)) ... r->inputs, r->targets, b.B
typedef struct MicroBatches {
    DataLoader *data;
    int64_t at, end;                      // samples
    int B;                                // sequences of this micro-batch
    bool last;                            // it is the last one of this process
} MicroBatches;

static MicroBatches micro_batches(const Run *r, DataLoader *data, int64_t first, int64_t samples) {
    int64_t rank = r->comm.rank, size = r->comm.size;
    return (MicroBatches){
        .data = data,
        .at = first + samples * rank / size,
        .end = first + samples * (rank + 1) / size,
    };
}

static bool next_micro_batch(Run *r, MicroBatches *b) {
    int64_t left = b->end - b->at, T = r->m.T;
    if (left <= 0) return false;
    b->B = left < r->micro ? left : r->micro;
    for (int i = 0; i < b->B; i++)
        loader_sample(b->data, b->at + i, r->inputs + i * T, r->targets + i * T);
    b->at += b->B;
    b->last = b->at == b->end;
    return true;
}

// Runs the forward of these samples alone.
static void forward_samples(Run *r, DataLoader *data, int64_t first, int64_t samples) {
    MicroBatches b = micro_batches(r, data, first, samples);
    while (next_micro_batch(r, &b))
        r->t->forward(r->gpt, r->inputs, r->targets, b.B, r->m.T);
}

bool run_is_usable(Run *r) {
    forward_samples(r, &r->data, r->step * r->f->batch, r->f->batch);
    Loss loss = r->t->loss(r->gpt);
    return isfinite(loss.ce + loss.z + loss.router);
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

int64_t run_val_samples(const Run *r) {
    int64_t limit = r->f->val_tokens ? CEIL_DIV(r->f->val_tokens, r->f->seq) : r->val.samples;
    return limit < r->val.samples ? limit : r->val.samples;
}

// A line of the log begins with the step.
static Log *begin_line(Run *r) {
    log_begin(&r->log);
    log_int(&r->log, "step", r->step);
    return &r->log;
}

// Sets *loss to the mean cross-entropy of the validation samples. False: a signal stopped it. All
// processes work on the same samples at a time, and ask for signals between them.
static bool validate(Run *r, double *loss) {
    int64_t samples = run_val_samples(r), piece = (int64_t)r->micro * r->comm.size;
    for (int64_t at = 0; at < samples; at += piece) {
        if (comm_signal(&r->comm)) return false;
        forward_samples(r, &r->val, at, samples - at < piece ? samples - at : piece);
    }
    *loss = r->t->loss(r->gpt).ce;
    return true;
}

// A validation that a signal stopped leaves no line: the resumed run does it again, as it does
// tasks.
static void log_validation(Run *r) {
    double loss, floor = r->val.floor;
    if (!validate(r, &loss)) return;
    uint64_t hash = run_hash(r);
    Log *log = begin_line(r);
    log_real(log, "val_loss", loss);
    if (!isnan(floor)) log_real(log, "val_above_floor", loss - floor);
    log_hex(log, "weights", hash);
    log_end(log);
    printf("step %6lld/%lld  validation loss %.4f", r->step, (long long)r->f->steps,
           loss);
    if (!isnan(floor)) printf(" (floor %.4f, +%.4f)", floor, loss - floor);
    printf("  weights %016llx\n", (unsigned long long)hash);
    fflush(stdout);
}

static void log_tasks(Run *r) {
    TaskScorer s = {r->t, r->gpt, &r->comm, r->micro, r->m.T, r->m.V, r->inputs};
    for (Task *t = r->tasks.task; t < r->tasks.task + r->tasks.count; t++)
        if (!task_score(t, &s)) return;
    Log *log = begin_line(r);
    tasks_report(&r->tasks, log);
    log_end(log);
}

void evaluate(Run *r) {
    double loss = NAN;
    if (!r->f->eval) return;
    validate(r, &loss);
    uint64_t hash = run_hash(r);
    printf("validation loss %.6f, weights %016llx\n", loss, (unsigned long long)hash);
    if (r->tasks.count) log_tasks(r);
}

// --------------------------------------------------------------------------------------- log lines

// Arrays by layer. Dense layers have null where routers have values.
static void log_layer_values(Run *r, Log *log) {
    static const char *const NAMES[] = {
        "residual_rms", "attn_ratio", "ffn_ratio", "attn_logit_max",
        "router_max_load", "router_dead", "router_entropy", "router_balance", "router_sequence",
        "router_z"};
    const Moe *moe = &r->m.moe;
    for (int i = 0; i < (moe->E ? 10 : 4); i++) {
        log_nest(log, NAMES[i], '[');
        for (const LayerStats *s = r->layers; s < r->layers + r->m.L; s++) {
            bool routed = moe->E && s - r->layers >= moe->dense;
            double sum = 0, max = 0, dead = 0;
            for (int e = 0; e < moe->E && routed; e++) {
                sum += s->load[e];
                max = fmax(max, s->load[e]);
                dead += s->load[e] == 0;
            }
            const double values[] = {
                s->residual_rms, s->attn_ratio, s->ffn_ratio, s->attn_logit_max,
                max * moe->E / sum, dead, s->entropy, s->balance, s->sequence, s->router_z};
            log_real(log, NULL, i < 4 || routed ? values[i] : NAN);
        }
        log_unnest(log, ']');
    }
}

// By layer with experts: the part of its tokens that each expert got.
static void log_loads(Run *r, Log *log) {
    int E = r->m.moe.E;
    log_nest(log, "router_load", '{');
    for (int l = r->m.moe.dense; l < r->m.L; l++) {
        char key[16];
        const double *load = r->layers[l].load;
        double sum = 0;
        for (int e = 0; e < E; e++) sum += load[e];
        log_nest(log, check_format(key, sizeof key, "%d", l), '[');
        for (int e = 0; e < E; e++) log_real(log, NULL, load[e] / sum);
        log_unnest(log, ']');
    }
    log_unnest(log, '}');
}

// --norms-every: arrays by layer, objects by tensor. applied: the update, NULL if it was skipped.
static void log_stats(Run *r, const AdamW *applied) {
    int count = r->layout.count;
    TensorStats *tensors = check_alloc(count * sizeof *tensors, "statistics of tensors");
    r->t->stats(r->gpt, applied, r->layers, tensors);
    Log *log = begin_line(r);
    log_layer_values(r, log);
    if (r->m.moe.E) log_loads(r, log);
    for (int ratios = 0; ratios < 2; ratios++) {
        log_nest(log, ratios ? "update_ratios" : "grad_norms", '{');
        for (int k = 0; k < count; k++) {
            const TensorStats *s = &tensors[k];
            log_real(log, r->layout.entries[k].name, ratios ? s->update / s->weight : s->grad);
        }
        log_unnest(log, '}');
    }
    log_end(log);
    free(tensors);
}

// The line of every step. lr: the scheduled rate, before group factors.
static void log_step(Run *r, const Update *u, const char *event, double lr, double seconds) {
    Log *log = begin_line(r);
    log_real(log, "loss", u->loss.ce);
    if (!isnan(r->data.floor)) log_real(log, "above_floor", u->loss.ce - r->data.floor);
    if (r->m.moe.E) log_real(log, "router_loss", u->loss.router);
    log_real(log, "lr", lr);
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

// doc/failures.md shows how to repeat such a step.
static void print_event(const Run *r, const char *event, const Update *u) {
    long long end = r->step * r->f->batch, first = end - r->f->batch;
    printf("step %lld: %s: loss %g (z %.1f), gradient norm %g (z %.1f), samples %lld to %lld; %s\n",
           r->step, event, u->loss.ce, r->loss_z, u->norm, r->norm_z,
           first, end - 1,
           u->applied ? "the update was applied" : "the weights stay as they are");
}

// Says once that training has become less than half as fast as the median of the lines before.
// seconds: of training so far.
void run_note_pace(Run *r, double seconds) {
    Pace *p = &r->pace;
    double sorted[PACES], rate = (r->tokens - p->tokens) / (seconds - p->seconds);
    int n = p->count < PACES ? p->count : PACES;
    memcpy(sorted, p->rates, sizeof sorted);
    double median = n >= PACES_ENOUGH ? spike_median(sorted, n) : 0;
    if (rate < median / 2 && !p->noted) {
        printf("note: %.0f tok/s is less than half of the median, %.0f: is the machine shared or "
               "throttled?\n"
               "  -> top and nvidia-smi show it; OMP_NUM_THREADS=N leaves cores to others\n",
               rate, median);
        p->noted = true;
    }
    p->rates[p->count++ % PACES] = rate;
    p->seconds = seconds;
    p->tokens = r->tokens;
}

// The line on the terminal: at the first and last step, and every two seconds.
static void print_progress(Run *r, double loss, double lr, double norm) {
    const Flags *f = r->f;
    double now = clock_seconds(), seconds = now - r->started;
    double rate = (r->tokens - r->started_tokens) / seconds;
    bool due = now - r->printed >= 2;
    if (!due && r->step > 1 && r->step < f->steps) return;
    if (due) run_note_pace(r, seconds);
    char eta[32];
    double tokens_left = (f->steps - r->step) * f->batch * r->m.T;
    printf("step %6lld/%lld  loss %.4f", r->step, (long long)f->steps, loss);
    if (!isnan(r->data.floor)) printf(" (floor +%.4f)", loss - r->data.floor);
    printf("  lr %.2e  grad %.3f  %.0f tok/s", lr, norm, rate);
    if (r->peak > 0)
        printf(" (%.0f %% of peak)", 100 * rate * show_flops(&r->m, &r->layout) / r->peak);
    printf("  ETA %s\n", log_duration(eta, sizeof eta, tokens_left / rate));
    fflush(stdout);
    r->printed = now;
}

// ---------------------------------------------------------------------------------- begin and end

// The folder and its log, the data's hash, the clocks.
static void begin_training(Run *r) {
    const Flags *f = r->f;
    run_open_folder(r);
    if (!r->val.content) loader_hash_begin(&r->val);
    if (!r->data.content) {
        double gigabytes = loader_gigabytes(&r->data);
        loader_hash_begin(&r->data);
        if (gigabytes > 1)
            printf("hashing %.1f GB of shards in the background, for --resume\n", gigabytes);
    }
    r->layers = check_alloc(r->m.L * sizeof *r->layers, "statistics of layers");
    if (r->comm.size > 1)
        printf("%d processes, each with a part of every batch and of the optimizer's state\n",
               r->comm.size);
    printf("run %s, %s on the %s, git %s; %lld samples of %lld tokens an epoch%s\n\n", r->out,
           r->t->precision, strcmp(r->t->device, "cpu") ? "GPU" : "CPU", r->t->commit,
           r->data.samples, (long long)f->seq,
           r->has_val ? "" : "; no validation data");
    comm_broadcast(&r->comm, &r->log.validated, sizeof r->log.validated);
    comm_broadcast(&r->comm, &r->log.tasked, sizeof r->log.tasked);
    r->saved = r->step > 0;
    r->validated = r->log.validated;
    r->tasked = r->log.tasked;
    r->saved_updates = r->saved ? r->updates : -1;
    r->peak = r->t->peak ? r->t->peak() : 0;
    comm_all_reduce(&r->comm, &r->peak, 1, COMM_SUM);
    r->started = clock_seconds();
    r->started_tokens = r->pace.tokens = r->tokens;
    if (r->step >= f->steps)
        printf("note: the run is at step %lld of --steps %lld: nothing to train\n"
               "  -> a larger --steps\n", r->step, (long long)f->steps);
    comm_catch_signals();
}

// Says that the run diverged, and which checkpoint has its last finite weights.
static int diverged(const Run *r) {
    char last[PATH_CAP] = "no checkpoint";
    char why[80] = "weights or moments are infinite or NaN and were not saved";
    if (r->comm.rank) return EXIT_DIVERGED;
    int64_t step = checkpoint_step_below(r->out, r->step + 1);
    if (step >= 0) checkpoint_path(last, r->out, step);
    if (r->bad) check_format(why, sizeof why, "%d steps in a row were not finite", r->bad);
    fprintf(stderr,
            "error: %s: the run diverged at step %lld; its last finite weights are in %s\n"
            "  -> a smaller --lr, a longer --warmup, or another --init\n",
            why, r->step, last);
    return EXIT_DIVERGED;
}

// Saves weights that are still finite before the run ends.
static int end_diverged(Run *r) {
    if (r->updates != r->saved_updates) run_save(r);
    return diverged(r);
}

static int stop_by_signal(Run *r, int signal) {
    if (r->step > 0 && !r->saved && !run_save(r)) return diverged(r);
    printf("\nstopped at step %lld; --out %s --resume auto goes on\n", r->step, r->out);
    return 128 + signal;
}

static void print_end(Run *r) {
    uint64_t hash = run_hash(r);
    printf("\nweights %016llx after %lld steps, %lld tokens; see %s\n", (unsigned long long)hash,
           r->step, r->tokens, r->out);
}

// -------------------------------------------------------------------------------------- the loop

// The learning rate of the next step, and the limits above which --skip-spikes skips it.
static AdamW next_adamw(const Run *r) {
    AdamW o = schedule_adamw(r->f, schedule_lr(r->f, r->step + 1), r->updates + 1);
    if (r->f->skip_spikes) {
        o.max_ce = spike_limit(&r->losses, r->f->spike_z);
        o.max_norm = spike_limit(&r->norms, r->f->spike_z);
    }
    return o;
}

// Counts a step and looks for spikes. Returns what to report of it, NULL: nothing.
static const char *count_step(Run *r, const Update *u) {
    double z = r->f->spike_z;
    r->loss_z = spike_z(&r->losses, u->loss.ce);
    r->norm_z = spike_z(&r->norms, u->norm);
    bool finite = isfinite(u->loss.ce + u->loss.z + u->loss.router + u->norm);
    bool loss_spike = z > 0 && r->loss_z > z, norm_spike = z > 0 && r->norm_z > z;
    if (finite) {
        spike_add(&r->losses, u->loss.ce, loss_spike);
        spike_add(&r->norms, u->norm, norm_spike);
    }
    r->step++;
    r->updates += u->applied;
    r->tokens += r->f->batch * r->m.T;
    r->bad = finite ? 0 : r->bad + 1;
    r->saved = r->validated = r->tasked = false;
    if (!finite) return "not finite";
    if (loss_spike) return "a spike of the loss";
    return norm_spike ? "a spike of the gradient norm" : NULL;
}

// Whether something that happens every so many steps is due now: also at the end, never at step 0.
static bool is_due(const Run *r, int64_t every) {
    bool last = r->step >= r->f->steps;
    return r->step > 0 && (last || (every && r->step % every == 0));
}

int train(Run *r) {
    const Trainer *t = r->t;
    const Flags *f = r->f;
    int status = -1;                                      // still training
    if (!r->training) return 0;
    begin_training(r);
    while (status < 0) {
        // Checkpoint, validation and tasks of the last step. They are no training time.
        double begin = clock_seconds();
        if (is_due(r, f->save_every) && !r->saved && !run_save(r)) {
            status = diverged(r);
            break;
        }
        if (is_due(r, f->val_every) && !r->validated && r->has_val) log_validation(r);
        if (is_due(r, f->val_every) && !r->tasked && r->tasks.count) log_tasks(r);
        r->started += clock_seconds() - begin;

        int signal = comm_signal(&r->comm);
        if (signal) {
            status = stop_by_signal(r, signal);
            break;
        }
        if (r->step >= f->steps) {
            status = r->bad ? end_diverged(r) : 0;
            break;
        }

        // Gradients of the whole batch, accumulated over micro-batches.
        begin = clock_seconds();
        bool measured = f->norms_every && ((r->step + 1) % f->norms_every == 0 || r->step == 0);
        double scale = 1.0 / (f->batch * r->m.T);     // the loss is a mean over tokens
        check_epoch(r);
        MicroBatches b = micro_batches(r, &r->data, r->step * f->batch, f->batch);
        if (measured) t->stats_begin(r->gpt);
        t->zero_grads(r->gpt);
        while (next_micro_batch(r, &b)) {
            t->forward(r->gpt, r->inputs, r->targets, b.B, r->m.T);
            t->backward(r->gpt, scale, b.last);
        }

        // Gradient clipping and AdamW. A loss or gradient that is not finite never reaches the
        // weights: that step is skipped, and DIVERGED_STEPS of them in a row end the run.
        AdamW adamw = next_adamw(r);
        Update u = t->update(r->gpt, &adamw);
        const char *event = count_step(r, &u);

        double lr = schedule_lr(f, r->step);
        log_step(r, &u, event, lr, clock_seconds() - begin);
        if (measured) log_stats(r, u.applied ? &adamw : NULL);
        if (event) print_event(r, event, &u);
        print_progress(r, u.loss.ce, lr, u.norm);
        if (r->bad >= DIVERGED_STEPS) status = end_diverged(r);
    }
    comm_release_signals(status == 0);
    if (status == 0) print_end(r);
    return status;
}
