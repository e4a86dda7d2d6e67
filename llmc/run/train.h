// train.h: the run, the same on every device: the run's folder, data, steps, validation, checkpoints, samples.
// trainer_run at the end is the table of contents.
//
// Exit status: check.h.
#pragma once
#include "checkpoint.h"
#include "data.h"
#ifdef __cplusplus
extern "C" {
#endif
#include "config.h"
#ifdef __cplusplus
}
#endif
#include "eval.h"
#include "spikes.h"
#include "log.h"
#include "sample.h"
#include "../threads.h"
#include "tokenizer.h"
#include <sys/file.h>

enum { DIVERGED_STEPS = 10 };

// Tokens a second between lines of progress, to notice a machine that slows down.
enum { PACES = 32, PACES_ENOUGH = 8 };
typedef struct Pace { double rates[PACES], busy; int64_t tokens; int count; bool said; } Pace;

typedef struct Run {
    const Trainer *t;
    FlagSet set;
    const Flags *f;
    Comm comm;
    Model m;
    Init init;
    Layout layout;
    Gpt *gpt;
    int micro;                                  // sequences of a micro-batch
    DataLoader train, val;
    bool has_val;
    double unigram;                             // of the validation data, see run_unigram; NAN: none
    Tokenizer tokenizer;                        // none where count is 0: then a token is a byte if the vocabulary is 256, and a number elsewhere
    Tasks tasks;
    int32_t *inputs, *targets;
    int64_t epoch;                              // of the last step, whose data is hashed
    char out[PATH_CAP];
    int folder;                                 // the run's, open and locked; 0: none
    Log log;
    int64_t step, updates, tokens;              // steps done; of these, updates applied; tokens seen
    int bad;                                    // steps in a row whose loss or gradient was not finite
    SpikeWindow losses, norms;
    double loss_z, norm_z;                      // of the last step (spikes.h)
    LayerStats *layers;                         // of the last measured step
    double started, printed, peak;
    int64_t started_at;
    Pace pace;
} Run;

// ------------------------------------------------------------------------------------------------------------------ weights and checkpoints

static inline char *run_config(const Run *r) { return config_text(r->f, &r->m, &r->layout, &r->init, r->t, r->unigram); }

static inline void run_init_weights(Run *r) {
    for (int k = 0; k < r->layout.count; k++) {
        const Entry *e = &r->layout.entries[k];
        void *w = r->t->tensor(r->gpt, WEIGHTS, e);
        double std = init_std(&r->init, &r->m, e);
        uint64_t key = init_key(&r->init, e);
#pragma omp parallel for schedule(static)
        for (int64_t i = 0; i < e->size; i++) real_put(w, r->t->element, i, init_value(&r->init, &r->m, e, std, key, i));
    }
    r->t->store(r->gpt, WEIGHTS, 0);
    r->t->normalize(r->gpt);
}

// A hash of all weights in use: two runs that print the same one hold the same model, and so do all processes of a run.
static inline uint64_t run_hash(Run *r) {
    Hash h = hash_begin();
    r->t->fetch(r->gpt, WEIGHTS);
    for (int k = 0; k < r->layout.count; k++) {
        const Entry *e = &r->layout.entries[k];
        hash_add(&h, r->t->tensor(r->gpt, WEIGHTS, e), (size_t)(entry_rows(&r->m, e) * e->row.cols) * r->t->element);
    }
    uint64_t hash = hash_end(&h);
    comm_check_weights(&r->comm, hash);
    return hash;
}

// An entry as a tensor of a safetensors file: vectors have rank 1, the padding of the vocabulary stays out.
static inline Tensor run_tensor(Run *r, int kind, const Entry *e, const char *name) {
    Tensor t;
    memset(&t, 0, sizeof t);
    t.name = name;
    t.dtype = r->t->element == sizeof(float) ? "F32" : "F64";
    t.rank = e->row.rows == 1 ? 1 : 2;
    t.shape[0] = e->row.rows == 1 ? e->row.cols : entry_rows(&r->m, e);
    t.shape[1] = e->row.cols;
    t.data = r->t->tensor(r->gpt, kind, e);
    return t;
}

static const char *const MOMENT_NAMES[TENSOR_KINDS] = {"", "", "exp_avg.", "exp_avg_sq."};

// Reads every entry's weights, or the moments of the parts that this process owns; a missing or misshapen tensor is refused, and so is one too many. A shorter --seq takes the first
// of learned positions.
static inline void run_read_tensors(Run *r, const char *path, int first, int last) {
    SafetensorsFile file;
    char name[128];
    int expected = 0;
    safetensors_open(path, &file);
    for (int kind = first; kind <= last; kind++)
        for (int k = 0; k < r->layout.count; k++, expected++) {
            const Entry *e = &r->layout.entries[k];
            const Tensor *t = safetensors_find(&file, check_format(name, sizeof name, "%s%s", MOMENT_NAMES[kind], e->name));
            Tensor want = run_tensor(r, kind, e, name);
            CHECK(t, "%s has no tensor %s, which this model needs\n  -> the model's flags and NORM_MODE must be those of the file", path, name);
            CHECK(tensor_fits(t, want.rank, want.shape, e->id == PARAM_wpe && kind == WEIGHTS),
                  "%s: %s has shape [%lld, %lld], expected [%lld, %lld]\n  -> the model's flags must be those of the file%s", path, name, (long long)t->shape[0],
                  (long long)t->shape[1], (long long)want.shape[0], (long long)want.shape[1], e->id == PARAM_wpe ? ", or a smaller --seq" : "");
            Part part = {0, e->size};
            if (kind >= ADAM_M) part = entry_part(e, r->comm.rank, r->comm.size);
            void *x = r->t->tensor(r->gpt, kind, e); // the file has no padding of the vocabulary
            safetensors_read_real(t, part.first, part.size, x, r->t->element);
            real_check_finite(x, r->t->element, part.size, path, name);
        }
    for (int kind = first; kind <= last; kind++) r->t->store(r->gpt, kind, r->updates);
    CHECK(file.count == expected, "%s has %d tensors, this model %d\n  -> the model's flags and NORM_MODE must be those of the file", path, file.count, expected);
    safetensors_close(&file);
}

static inline void run_read_weights(Run *r, const char *from) {
    char dir[PATH_CAP], path[PATH_CAP];
    size_t n = strlen(from);
    if (n > 12 && !strcmp(from + n - 12, ".safetensors")) check_format(path, sizeof path, "%s", from);
    else {
        checkpoint_find(from, dir);
        check_format(path, sizeof path, "%s/model.safetensors", dir);
    }
    run_read_tensors(r, path, WEIGHTS, WEIGHTS);
}

// Waits until it is known what data is (d->content), and compares it between processes.
static inline void run_know_data(Run *r, DataLoader *d) {
    if (!d->tokens) return;
    CHECK(comm_agree(&r->comm, loader_hash_end(d)),
          "the processes read different data\n  -> the same shards on every machine");
}

static const char PLANS[] = "plans.json";

// One tensor on its way into a file: of moments, the parts of several processes come together in `room` of the first one (NULL: it is all here).
typedef struct Gather { Run *r; int kind; const Entry *e; char *room, name[128]; } Gather;

static inline const void *run_gather(void *source) {
    const Gather *g = (const Gather *)source;
    Comm *c = &g->r->comm;
    size_t element = g->r->t->element;
    char *own = (char *)g->r->t->tensor(g->r->gpt, g->kind, g->e);
    for (int rank = 0; g->room && rank < c->size; rank++) {
        Part part = entry_part(g->e, rank, c->size);
        char *at = g->room + (size_t)part.first * element;
        if (rank) comm_move(c, c->rank ? own : at, (size_t)part.size * element, rank, 0);
        else if (!c->rank) memcpy(at, own, (size_t)part.size * element);
    }
    return g->room ? g->room : own;
}

// A file of weights or moments. Process 0 writes it, the others give what they have.
static inline void run_save_tensors(Run *r, Checkpoint *c, const char *file, int first, int last) {
    int most = r->layout.count * (last - first + 1), count = 0;
    size_t largest = 0;
    Tensor *tensors = (Tensor *)check_alloc((size_t)most * sizeof *tensors, "a checkpoint");
    Gather *gathers = (Gather *)check_alloc((size_t)most * sizeof *gathers, "a checkpoint");
    for (int k = 0; k < r->layout.count; k++) largest = (size_t)r->layout.entries[k].size > largest ? (size_t)r->layout.entries[k].size : largest;
    char *room = first == WEIGHTS || r->comm.size == 1 ? NULL : (char *)check_alloc(largest * r->t->element, "a tensor of a checkpoint");
    for (int kind = first; kind <= last; kind++) {
        r->t->fetch(r->gpt, kind);
        for (int k = 0; k < r->layout.count; k++, count++) {
            const Entry *e = &r->layout.entries[k];
            Gather *g = &gathers[count];
            g->r = r, g->kind = kind, g->e = e, g->room = room;
            tensors[count] = run_tensor(r, kind, e, check_format(g->name, sizeof g->name, "%s%s", MOMENT_NAMES[kind], e->name));
            tensors[count].bring = run_gather;
            tensors[count].source = g;
        }
    }
    if (!r->comm.rank) checkpoint_add_tensors(c, file, tensors, count);
    else for (int i = 0; i < count; i++) run_gather(&gathers[i]);
    free(tensors);
    free(gathers);
    free(room);
}

// What shapes the future besides tensors and flags: all that a resumed run needs to know.
static inline char *run_state_text(Run *r) {
    Log state;
    char hash[32];
    int64_t sample = r->step * r->f->batch;
    const struct { const char *name; const SpikeWindow *window; } windows[] = {{"losses", &r->losses}, {"norms", &r->norms}};
    log_begin(&state);
    log_int(&state, "step", r->step);
    log_int(&state, "updates", r->updates);
    log_int(&state, "tokens", r->tokens);
    log_int(&state, "bad", r->bad);
    log_int(&state, "epoch", sample / r->train.samples);
    log_int(&state, "sample", sample % r->train.samples);
    log_text(&state, "data_xxh64",
             check_format(hash, sizeof hash, "%016llx", (unsigned long long)r->train.content));
    log_text(&state, "val_data_xxh64",
             check_format(hash, sizeof hash, "%016llx", (unsigned long long)r->val.content));
    for (int i = 0; i < 2; i++) {
        log_nest(&state, windows[i].name, '{');
        log_int(&state, "row", windows[i].window->row);
        log_nest(&state, "values", '[');
        for (int k = 0; k < windows[i].window->count; k++) log_real(&state, NULL, windows[i].window->values[k]);
        log_unnest(&state, ']');
        log_unnest(&state, '}');
    }
    return log_take(&state);
}

// An integer of state.json, from 0 to `most`.
static inline int64_t run_read_int(const Json *state, const char *name, int64_t most,
                                   const char *path) {
    int64_t value = json_get_int(state, name, path);
    CHECK(value >= 0 && value <= most,
          "%s: expected \"%s\" from 0 to %lld, found %lld\n"
          "  -> was the file edited? use another checkpoint",
          path, name, (long long)most, (long long)value);
    return value;
}

static inline void run_read_window(SpikeWindow *w, const Json *state, const char *name, const char *path) {
    if (!json_get(state, name)) return;                    // by a norm.c that knew of no spikes
    const Json *window = json_need(state, name, JSON_OBJECT, path), *values = json_need(window, "values", JSON_ARRAY, path);
    w->row = (int)run_read_int(window, "row", SPIKES_IN_A_ROW, path);
    w->count = 0;
    CHECK(values->count <= SPIKE_WINDOW, "%s: %zu values in \"%s\", expected at most %d\n  -> was the file edited? use another checkpoint", path, values->count, name, SPIKE_WINDOW);
    for (const Json *v = values->first; v; v = v->next) {
        CHECK(v->kind == JSON_INT || v->kind == JSON_REAL, "%s: expected numbers in \"%s\"\n  -> was the file edited? use another checkpoint", path, name);
        w->values[w->count++] = v->number;
    }
}

// The losses of `samples` samples from number `first` on, in micro-batches; with scale > 0 also
// their gradients. Each process takes its share of them.
static inline void run_batches(Run *r, DataLoader *data, int64_t first, int64_t samples,
                               double scale) {
    int64_t end = first + samples * (r->comm.rank + 1) / r->comm.size;
    for (int64_t at = first + samples * r->comm.rank / r->comm.size; at < end;) {
        int B = (int)(end - at < r->micro ? end - at : r->micro);
        for (int b = 0; b < B; b++)
            loader_sample(data, at + b, r->inputs + (int64_t)b * r->m.T,
                          r->targets + (int64_t)b * r->m.T);
        r->t->forward(r->gpt, r->inputs, r->targets, B, r->m.T);
        at += B;
        if (scale > 0) r->t->backward(r->gpt, scale, at == end);
    }
}

// Whether the weights still predict: the loss of the next batch, which this step's weights have not
// seen, is finite.
static inline bool run_is_usable(Run *r) {
    run_batches(r, &r->train, r->step * r->f->batch, r->f->batch, 0);
    Loss loss = r->t->loss(r->gpt);
    return isfinite(loss.ce + loss.z + loss.router);
}

// After a save: the folder and the log are still those that the run writes to. A checkpoint written
// into a folder that was renamed lies in it, whole.
static inline void run_check_folder(const Run *r) {
    char link[64], now[PATH_CAP];
    ssize_t n = readlink(check_format(link, sizeof link, "/proc/self/fd/%d", r->folder), now,
                         sizeof now - 1);
    now[n > 0 ? n : 0] = 0;
    CHECK_WRITE(file_is(r->folder, AT_FDCWD, r->out, true),
                "%s is no longer this run's folder: it was moved. The "
                "checkpoint of step %lld is in it\n  -> --out %s --resume required",
                r->out, (long long)r->step, now);
    CHECK_WRITE(file_is(r->log.fd, r->folder, file_name(r->log.path), false),
                "%s was removed or replaced while the run wrote "
                "to it; step %lld is saved\n  -> --resume required goes on, with a new log",
                r->log.path, (long long)r->step);
}

// Saves a checkpoint. Returns false, with nothing saved, when weights or moments are infinite or
// NaN. Older checkpoints go (--keep-last) only if the new one is usable and the last step was
// finite: otherwise they are what one goes back to.
static inline bool run_save(Run *r) {
    Checkpoint c;
    struct stat info;
    bool there = r->comm.rank || file_is(r->folder, AT_FDCWD, r->out, true)
                 || (fstat(r->folder, &info) == 0 && info.st_nlink);
    CHECK_WRITE(there,
                "%s was removed while the run trained: step %lld cannot be saved\n  -> begin "
                "again, with another --out",
                r->out, (long long)r->step);
    // The first save waits for the hash of the data; a later epoch's is compared when it is there.
    if (!r->train.content) run_know_data(r, &r->train);
    if (!r->val.content) run_know_data(r, &r->val);
    log_sync(&r->log);
    if (!r->comm.rank) checkpoint_begin(&c, r->folder, r->out, r->step);
    run_save_tensors(r, &c, "model.safetensors", WEIGHTS, WEIGHTS);
    run_save_tensors(r, &c, "optimizer.safetensors", ADAM_M, ADAM_V);
    bool prune = r->f->keep_last && !r->bad && run_is_usable(r);
    double bad = r->comm.rank ? 0 : (double)c.bad;
    comm_combine(&r->comm, &bad, 1, COMM_MAX);
    if (bad > 0 && !r->comm.rank) checkpoint_abandon(&c);
    if (bad > 0 || r->comm.rank) return bad == 0;
    char *config = run_config(r), *plans = r->t->plans ? r->t->plans(r->gpt) : NULL;
    checkpoint_add_text(&c, "config.json", config);
    if (plans) checkpoint_add_text(&c, PLANS, plans);
    char *state = run_state_text(r);
    checkpoint_add_text(&c, "state.json", state);
    checkpoint_commit(&c);
    run_check_folder(r);
    if (prune) checkpoint_prune(r->folder, r->out, r->step, r->f->keep_last, r->f->keep_every);
    free(config);
    free(plans);
    free(state);
    return true;
}

// The run's config.json is whole, but is it this run's? What may not change is as in the
// checkpoint's copy.
static inline void run_check_config(const Run *r, const char *dir) {
    FlagSet was;
    char path[PATH_CAP], a[64], b[64];
    flags_default(&was);
    config_read(&was, check_format(path, sizeof path, "%s/config.json", dir), r->t);
    for (int i = 0; i < FLAG_COUNT; i++) {
        const char *now = flag_text(a, sizeof a, r->f, &FLAGS[i]), *then = flag_text(b, sizeof b, &was.f, &FLAGS[i]);
        CHECK(FLAGS[i].resume != FIXED || !strcmp(now, then), "%s/config.json: expected \"%s\": \"%s\" as in its checkpoint, found \"%s\"\n  -> cp %s %s/", r->out,
              FLAGS[i].field, then, now, path, r->out);
    }
}

// Training data must be what it was, byte for byte, wherever it lies now. Other validation data is
// a warning.
static inline void run_check_data(Run *r, const Json *state, const char *path) {
    if (!json_get(state, "data_xxh64")) {
        printf("note: this checkpoint, of an older norm.c, does not say what its data was\n");
        return;
    }
    char train[32], val[32];
    loader_hash_begin(&r->train);
    loader_hash_begin(&r->val);
    run_know_data(r, &r->train);
    run_know_data(r, &r->val);
    check_format(train, sizeof train, "%016llx", (unsigned long long)r->train.content);
    check_format(val, sizeof val, "%016llx", (unsigned long long)r->val.content);
    CHECK(!strcmp(train, json_get_string(state, "data_xxh64", path)),
          "%s: the training data is not what this run was trained "
          "on: its hash is %s\n  -> --data with the shards as they were; they may have moved",
          path, train);
    if (strcmp(val, json_get_string(state, "val_data_xxh64", path)) && !r->comm.rank)
        fprintf(stderr, "warning: the validation data is not what this run was validated with: "
                        "losses before and after do not compare\n");
}

// The epoch of the first sample of the next step.
static inline int64_t run_epoch(const Run *r) { return r->step * r->f->batch / r->train.samples; }

// Goes on from the newest whole checkpoint.
static inline void run_resume(Run *r) {
    char dir[PATH_CAP], path[PATH_CAP];
    size_t size;
    memset(dir, 0, sizeof dir);
    if (!r->comm.rank) CHECK(checkpoint_latest(r->out, INT64_MAX, dir), "%s holds no checkpoint\n  -> --resume auto begins anew", r->out);
    comm_broadcast(&r->comm, dir, sizeof dir);
    run_check_config(r, dir);
    Json *state = json_read_file(check_format(path, sizeof path, "%s/state.json", dir));
    int64_t batch = r->f->batch, tokens = batch * r->m.T;
    r->step = run_read_int(state, "step", INT64_MAX / tokens, path);
    r->updates = run_read_int(state, "updates", r->step, path);
    r->tokens = run_read_int(state, "tokens", r->step * tokens, path);
    r->bad = (int)run_read_int(state, "bad", INT32_MAX, path);
    r->epoch = run_epoch(r);
    int64_t epoch = json_get_int(state, "epoch", path);
    int64_t sample = json_get_int(state, "sample", path);
    CHECK(epoch == r->epoch && sample == r->step * batch % r->train.samples,
          "%s: the data position, epoch %lld and sample %lld, is not that of step %lld\n"
          "  -> was the file edited? use another checkpoint",
          path, (long long)epoch, (long long)sample, (long long)r->step);
    run_check_data(r, state, path);
    run_read_window(&r->losses, state, "losses", path);
    run_read_window(&r->norms, state, "norms", path);
    json_free(state);
    run_read_tensors(r, check_format(path, sizeof path, "%s/model.safetensors", dir), WEIGHTS, WEIGHTS);
    run_read_tensors(r, check_format(path, sizeof path, "%s/optimizer.safetensors", dir), ADAM_M, ADAM_V);
    char *plans = file_exists(check_format(path, sizeof path, "%s/%s", dir, PLANS))
                      ? file_read(path, JSON_MOST, &size)
                      : NULL;
    if (r->t->prepare) r->t->prepare(r->gpt, plans, path);
    free(plans);
    printf("resumed from %s at step %lld\n", dir, (long long)r->step);
}

// ------------------------------------------------------------------------------------------------------------------ steps

static inline int64_t run_val_samples(const Run *r) {
    int64_t most = r->f->val_tokens ? CEIL_DIV(r->f->val_tokens, r->f->seq) : r->val.samples;
    return most < r->val.samples ? most : r->val.samples;
}

// False: a signal stopped it. All processes do their parts of the same batches, and ask between them.
static inline bool run_validate(Run *r, double *loss) {
    int64_t samples = run_val_samples(r), batch = (int64_t)r->micro * r->comm.size;
    for (int64_t at = 0; at < samples; at += batch) {
        if (comm_signal(&r->comm)) return false;
        run_batches(r, &r->val, at, samples - at < batch ? samples - at : batch, 0);
    }
    *loss = r->t->loss(r->gpt).ce;
    return true;
}

// A validation of a run that trains, on the terminal and in the log. One that was stopped leaves nothing there: the run that goes on makes up for it, as for tasks.
static inline void run_log_validation(Run *r) {
    double val_loss;
    char hash[32];
    if (!run_validate(r, &val_loss)) return;
    log_begin(&r->log);
    log_int(&r->log, "step", r->step);
    log_real(&r->log, "val_loss", val_loss);
    if (!isnan(r->val.floor)) log_real(&r->log, "val_above_floor", val_loss - r->val.floor);
    log_text(&r->log, "weights", check_format(hash, sizeof hash, "%016llx", (unsigned long long)run_hash(r)));
    log_end(&r->log);
    printf("step %6lld/%lld  validation loss %.4f", (long long)r->step, (long long)r->f->steps, val_loss);
    if (!isnan(r->val.floor)) printf(" (floor %.4f, +%.4f)", r->val.floor, val_loss - r->val.floor);
    printf("  weights %s\n", hash);
    fflush(stdout);
}

static inline void run_open_tasks(Run *r) {
    TaskReader reader = {r->m.V, r->m.T, &r->tokenizer};
    tasks_open(&r->tasks, r->f->tasks, &reader);
}

// --tasks, on the terminal and as a line of the log.
static inline void run_tasks(Run *r) {
    TaskScorer s = {r->t, r->gpt, &r->comm, r->micro, r->m.T, r->m.V, r->inputs};
    for (Task *t = r->tasks.task; t < r->tasks.task + r->tasks.count; t++)
        if (!task_score(t, &s)) return;
    log_begin(&r->log);
    log_int(&r->log, "step", r->step);
    tasks_report(&r->tasks, &r->log);
    log_end(&r->log);
}

// Says once when training has become less than half as fast as the median of the lines of progress
// before.
static inline void run_note_pace(Run *r, double busy) {
    Pace *p = &r->pace;
    double sorted[PACES], rate = (double)(r->tokens - p->tokens) / (busy - p->busy);
    int n = p->count < PACES ? p->count : PACES;
    memcpy(sorted, p->rates, sizeof sorted);
    double median = n >= PACES_ENOUGH ? spike_median(sorted, n) : 0;
    if (rate < median / 2 && !p->said) {
        printf("note: %.0f tok/s is less than half of the median, %.0f: do other programs use this "
               "machine, or is it throttled?\n"
               "  -> top and nvidia-smi show them; OMP_NUM_THREADS=N leaves cores to others\n",
               rate, median);
        p->said = true;
    }
    p->rates[p->count++ % PACES] = rate;
    p->busy = busy;
    p->tokens = r->tokens;
}

// The line on the terminal: at the first and last step and every two seconds.
static inline void run_progress(Run *r, double loss, double lr, double norm) {
    const Flags *f = r->f;
    double now = clock_seconds(), rate = (double)(r->tokens - r->started_at) / (now - r->started);
    if (now - r->printed < 2 && r->step > 1 && r->step < f->steps) return;
    if (now - r->printed >= 2) run_note_pace(r, now - r->started);
    char eta[32], above[48] = "", part[32] = "";
    if (!isnan(r->train.floor)) check_format(above, sizeof above, " (floor +%.4f)", loss - r->train.floor);
    if (r->peak > 0) check_format(part, sizeof part, " (%.0f %% of peak)", 100 * rate * show_flops(&r->m, &r->layout) / r->peak);
    log_duration(eta, sizeof eta, (double)(f->steps - r->step) * (double)(f->batch * r->m.T) / rate);
    printf("step %6lld/%lld  loss %.4f%s  lr %.2e  grad %.3f  %.0f tok/s%s  ETA %s\n", (long long)r->step, (long long)f->steps, loss, above, lr, norm, rate, part, eta);
    fflush(stdout);
    r->printed = now;
}

// Arrays by layer of what judge.h measures. With routers of each of them too (null in dense layers): the largest load over the mean, experts without a token, entropy and losses,
// and by layer the part of its tokens that each expert got.
static inline void run_log_layers(Log *log, const Model *m, const LayerStats *layers) {
    bool routers = m->moe.E > 0;
    static const char *const NAMES[] = {"residual_rms", "attn_ratio", "ffn_ratio", "attn_logit_max",
                                        "router_max_load", "router_dead", "router_entropy", "router_balance", "router_sequence", "router_z"};
    for (int i = 0; i < (routers ? 10 : 4); i++) {
        log_nest(log, NAMES[i], '[');
        for (int l = 0; l < m->L; l++) {
            const LayerStats *s = &layers[l];
            bool router = i >= 4, absent = router && l < m->moe.dense;
            double sum = 0, most = 0, dead = 0;
            for (int e = 0; e < m->moe.E && router && !absent; e++) {
                sum += s->load[e];
                most = s->load[e] > most ? s->load[e] : most;
                dead += s->load[e] == 0;
            }
            const double values[] = {s->residual_rms, s->attn_ratio, s->ffn_ratio, s->attn_logit_max, most * m->moe.E / sum, dead, s->entropy, s->balance, s->sequence, s->router_z};
            log_real(log, NULL, absent ? NAN : values[i]);
        }
        log_unnest(log, ']');
    }
    if (!routers) return;
    log_nest(log, "router_load", '{');
    for (int l = m->moe.dense; l < m->L; l++) {
        char key[16];
        double sum = 0;
        for (int e = 0; e < m->moe.E; e++) sum += layers[l].load[e];
        log_nest(log, check_format(key, sizeof key, "%d", l), '[');
        for (int e = 0; e < m->moe.E; e++) log_real(log, NULL, layers[l].load[e] / sum);
        log_unnest(log, ']');
    }
    log_unnest(log, '}');
}

// The line with a step's diagnostics (judge.h): arrays by layer, objects by tensor. applied: the update, NULL where the step was skipped.
static inline void run_log_stats(Run *r, const AdamW *applied) {
    int count = r->layout.count;
    TensorStats *tensors = (TensorStats *)check_alloc((size_t)count * sizeof *tensors, "what is measured of tensors");
    r->t->stats(r->gpt, applied, r->layers, tensors);
    log_begin(&r->log);
    log_int(&r->log, "step", r->step);
    run_log_layers(&r->log, &r->m, r->layers);
    log_nest(&r->log, "grad_norms", '{');
    for (int k = 0; k < count; k++) log_real(&r->log, r->layout.entries[k].name, tensors[k].grad);
    log_unnest(&r->log, '}');
    log_nest(&r->log, "update_ratios", '{');
    for (int k = 0; k < count; k++) log_real(&r->log, r->layout.entries[k].name, tensors[k].update / tensors[k].weight);
    log_unnest(&r->log, '}');
    log_end(&r->log);
    free(tensors);
}

static inline void run_log_flags(const Run *r, Log *log) {
    char value[64];
    for (int i = 0; i < FLAG_COUNT; i++) log_text(log, FLAGS[i].field, flag_text(value, sizeof value, r->f, &FLAGS[i]));
}

// The gradients of the batch of the next step. At the start of an epoch its data is hashed again.
static inline void run_gradients(Run *r) {
    if (r->epoch != run_epoch(r)) {
        run_know_data(r, &r->train);
        loader_hash_begin(&r->train);
        r->epoch = run_epoch(r);
    }
    r->t->zero_grads(r->gpt);
    run_batches(r, &r->train, r->step * r->f->batch, r->f->batch, 1.0 / (double)(r->f->batch * r->m.T));
}

// The update by these gradients: *o is how, *u what it found. Returns the event, NULL for none.
static inline const char *run_update(Run *r, AdamW *o, Update *u) {
    const Flags *f = r->f;
    *o = schedule_adamw(f, schedule_lr(f, r->step + 1), r->updates + 1);
    if (f->skip_spikes) {
        o->max_ce = spike_limit(&r->losses, f->spike_z);
        o->max_norm = spike_limit(&r->norms, f->spike_z);
    }
    *u = r->t->update(r->gpt, o);
    r->loss_z = spike_z(&r->losses, u->loss.ce);
    r->norm_z = spike_z(&r->norms, u->norm);
    bool finite = isfinite(u->loss.ce + u->loss.z + u->loss.router + u->norm), high = f->spike_z > 0 && r->loss_z > f->spike_z, steep = f->spike_z > 0 && r->norm_z > f->spike_z;
    if (finite) spike_add(&r->losses, u->loss.ce, high);
    if (finite) spike_add(&r->norms, u->norm, steep);
    r->updates += u->applied;
    r->bad = finite ? 0 : r->bad + 1;
    r->step++;
    r->tokens += f->batch * r->m.T;
    return !finite ? "not finite" : high ? "a spike of the loss" : steep ? "a spike of the gradient norm" : NULL;
}

// Says what a step met, and with which samples: doc/failures.md shows how to do such a step again.
static inline void run_print_event(const Run *r, const char *event, const Update *u) {
    int64_t first = (r->step - 1) * r->f->batch;
    printf("step %lld: %s: loss %g (z %.1f), gradient norm %g (z %.1f), samples %lld to %lld; %s\n",
           (long long)r->step, event, u->loss.ce, r->loss_z, u->norm, r->norm_z, (long long)first,
           (long long)(first + r->f->batch - 1),
           u->applied ? "the update was applied" : "the weights stay as they are");
}

// One step: gradients of the whole batch, clipping, update. A loss or gradient that is not finite
// never reaches the weights: the step is skipped and said; DIVERGED_STEPS of them in a row end the
// run.
static inline void run_step(Run *r) {
    const Flags *f = r->f;
    double begin = clock_seconds();
    bool measured = f->norms_every && ((r->step + 1) % f->norms_every == 0 || r->step == 0);
    AdamW o;
    Update u;
    if (measured) r->t->stats_begin(r->gpt);
    run_gradients(r);
    const char *event = run_update(r, &o, &u);

    double seconds = clock_seconds() - begin;
    log_begin(&r->log);
    log_int(&r->log, "step", r->step);
    log_real(&r->log, "loss", u.loss.ce);
    if (!isnan(r->train.floor)) log_real(&r->log, "above_floor", u.loss.ce - r->train.floor);
    if (r->m.moe.E) log_real(&r->log, "router_loss", u.loss.router);
    log_real(&r->log, "lr", o.lr[LR_EMBEDDING]);
    log_real(&r->log, "grad_norm", u.norm);
    log_int(&r->log, "tokens", r->tokens);
    log_real(&r->log, "ms", seconds * 1e3);
    if (event) {
        log_text(&r->log, "event", event);
        log_int(&r->log, "first_sample", (r->step - 1) * f->batch);
        log_int(&r->log, "samples", f->batch);
        log_real(&r->log, "loss_z", r->loss_z);
        log_real(&r->log, "grad_norm_z", r->norm_z);
    }
    if (!u.applied) log_text(&r->log, "skipped", event ? event : "above the limit");
    log_end(&r->log);
    if (measured) run_log_stats(r, u.applied ? &o : NULL);
    if (event) run_print_event(r, event, &u);
    run_progress(r, u.loss.ce, o.lr[LR_EMBEDDING], u.norm);
}

// ------------------------------------------------------------------------------------------------------------------ samples

// The token that begins a document, and stands for its end.
static inline int32_t run_separator(const Run *r) { return r->tokenizer.count ? r->tokenizer.end : 0; }

// A token as text: a separator as an empty line, and as a number what nothing is known about.
static inline void run_print_token(const Run *r, int32_t token) {
    size_t n;
    if (token == run_separator(r)) printf("\n\n");
    else if (token < r->tokenizer.count) {
        const char *bytes = tokenizer_decode(&r->tokenizer, token, &n);
        text_print(bytes, n);
    } else if (r->m.V == CORPUS_VOCAB) {
        char byte = (char)token;
        text_print(&byte, 1);
    } else printf("%d ", token);
}

// Prints a prompt of so many bytes and f->sample tokens after it. The model reads the prompt at
// once (prefill), then a token at a time (decode): tokens [from, read) are in its cache. Where they
// are T, the last half of them is read again, as the beginning of a text. number: of the prompt,
// each has its own random numbers.
static inline void run_sample_text(Run *r, const char *prompt, size_t bytes, int64_t number) {
    const Flags *f = r->f;
    int64_t V = r->m.V, T = r->m.T, from = 0, read = 0, count[2] = {0}, begin = 1 + (int64_t)bytes;
    double seconds[2] = {0};
    size_t most = (size_t)(begin + f->sample);
    int32_t *tokens = (int32_t *)check_alloc(most * sizeof *tokens, "a sample");
    double *logits = (double *)check_alloc((size_t)V * sizeof *logits, "logits"), *weights = (double *)check_alloc((size_t)(2 * V) * sizeof *weights, "weights");
    uint64_t key = rand_key((uint64_t)f->seed, "sample", (uint64_t)(r->step + number));
    tokens[0] = run_separator(r);
    Tokenizer *t = &r->tokenizer;
    if (t->count && bytes) begin = 1 + tokenizer_encode(t, prompt, bytes, tokens + 1);
    else for (size_t i = 0; i < bytes; i++) tokens[1 + i] = (unsigned char)prompt[i];
    if (begin > T)
        printf("note: a prompt of %lld tokens, the model reads %lld at once: it sees the last "
               "%lld\n", (long long)begin - 1, (long long)T, (long long)CEIL_DIV(T, 2));
    text_print(prompt, bytes);
    for (int64_t n = begin; n < begin + f->sample; n++) {
        double sum = 0, start = clock_seconds();
        if (n - from > T) from = read = n - CEIL_DIV(T, 2);
        int decode = read > from;
        r->t->decode(r->gpt, tokens + read, (int)(n - read), (int)(read - from));
        const void *row = r->t->logits(r->gpt, 0);
        count[decode] += n - read;
        read = n;
        for (int i = 0; i < V; i++) sum += logits[i] = real_get(row, r->t->element, i);
        CHECK(isfinite(sum), "the model's logits are not finite\n  -> sample from an earlier checkpoint");
        tokens[n] = sample_token(logits, (int)V, f->temperature, f->top_k, rand_uniform(key, (uint64_t)n), weights);
        seconds[decode] += clock_seconds() - start;
        run_print_token(r, tokens[n]);
        fflush(stdout);
    }
    printf("\nprefill %lld tokens at %.0f tok/s", (long long)count[0], (double)count[0] / seconds[0]);
    if (count[1]) printf(", decode %lld at %.0f tok/s", (long long)count[1], (double)count[1] / seconds[1]);
    printf("\n");
    free(tokens);
    free(logits);
    free(weights);
}

// The sample of --prompt, or with - one of each line of standard input, a pipe or a terminal.
static inline void run_sample(Run *r) {
    char *line = NULL;
    size_t cap = 0;
    if (strcmp(r->f->prompt, "-")) {
        run_sample_text(r, r->f->prompt, strlen(r->f->prompt), 0);
        return;
    }
    for (int64_t number = 0;; number++) {
        if (isatty(STDIN_FILENO)) printf("> ");
        fflush(stdout);
        ssize_t n = getline(&line, &cap, stdin);
        if (n < 0) break;
        run_sample_text(r, line, (size_t)n - (line[n - 1] == '\n'), number);
    }
    CHECK(!ferror(stdin), "cannot read prompts from standard input: %s\n  -> --prompt TEXT",
          strerror(errno));
    free(line);
}

// ------------------------------------------------------------------------------------------------------------------ the run

// Data and model must agree on the vocabulary, or it is said where they do not. --vocab 0 takes the data's.
static inline void run_check_vocab(Run *r, DataLoader *d, const char *what) {
    char text[32];
    CHECK(d->vocab || r->f->vocab, "%s data does not name its vocabulary\n  -> --vocab 50257 if its tokens are GPT-2's", what);
    if (!r->f->vocab) flag_set(&r->set, &FLAGS[FLAG_vocab], check_format(text, sizeof text, "%d", d->vocab), BY_DEFAULT);
    int64_t V = r->f->vocab;
    CHECK(d->vocab <= V, "%s data has a vocabulary of %d, the model of %lld\n  -> --vocab %d", what, d->vocab, (long long)V, d->vocab);
    if (!d->vocab) {
        d->limit = V;
        printf("%s data does not name its vocabulary; tokens of %lld and more will be refused\n", what, (long long)V);
    } else if (d->vocab < V) printf("%s data has a vocabulary of %d, the model of %lld: the rest goes unused\n", what, d->vocab, (long long)V);
}

static inline void run_open_data(Run *r, bool training) {
    const Flags *f = r->f;
    const char *val = *f->val_data ? f->val_data : f->data;
    r->has_val = *f->val_data || !*f->data || is_folder(f->data);
    if (training) {
        loader_open(&r->train, f->data, "train", (int)f->seq, 1, (uint64_t)f->seed);
        run_check_vocab(r, &r->train, "training");
    }
    CHECK(training || r->has_val || file_exists(f->data), "--eval needs validation data, and this run's, %s, is not here\n  -> put it back, or --val-data PATH", f->data);
    CHECK(training || r->has_val, "--eval needs validation data\n  -> --val-data PATH");
    if (r->has_val) {
        loader_open(&r->val, val, "val", (int)f->seq, 0, 0);
        run_check_vocab(r, &r->val, "validation");
        loader_floor(&r->val, run_val_samples(r));
    }
    CHECK(!training || !r->has_val || !r->train.vocab || !r->val.vocab || r->train.vocab == r->val.vocab,
          "training data has a vocabulary of %d, validation data one of %d\n  -> --val-data with shards of the same tokenizer", r->train.vocab, r->val.vocab);
}

// Entropy of the frequencies of the tokens that validations predict, in nats: what a model reaches that looks at none of the tokens before. One that ends there
// has collapsed (dev/ablate.py).
static inline double run_unigram(Run *r) {
    int64_t T = r->f->seq, V = r->f->vocab ? r->f->vocab : (int64_t)CORPUS_VOCAB, samples = run_val_samples(r);
    int32_t *inputs = (int32_t *)check_alloc((size_t)T * sizeof *inputs, "a sample"), *targets = (int32_t *)check_alloc((size_t)T * sizeof *targets, "a sample");
    int64_t *counts = (int64_t *)check_alloc((size_t)V * sizeof *counts, "the frequencies of tokens");
    for (int64_t i = 0; i < samples; i++) {
        loader_sample(&r->val, i, inputs, targets);
        for (int64_t t = 0; t < T; t++) counts[targets[t]]++;
    }
    double entropy = 0, all = (double)(samples * T);
    for (int64_t v = 0; v < V; v++) if (counts[v]) entropy -= (double)counts[v] / all * log((double)counts[v] / all);
    free(inputs);
    free(targets);
    free(counts);
    return entropy;
}

// The tokenizer: --tokenizer, or the run's own, or where the run had it from, or the one beside its data. None is needed but for prompts of models that do not read bytes.
static inline void run_open_tokenizer(Run *r) {
    const Flags *f = r->f;
    char path[PATH_CAP] = "";
    const struct { const char *at, *below; } places[] = {{f->from, "/tokenizer.bin"}, {f->from, "/../tokenizer.bin"}, {f->out, "/tokenizer.bin"}, {f->tokenizer, ""},
                                                         {f->init_from, "/tokenizer.bin"}, {f->data, "/tokenizer.bin"}};
    if (r->set.by[FLAG_tokenizer] == BY_USER) check_format(path, PATH_CAP, "%s", f->tokenizer);
    for (int i = 0; i < 6 && !*path; i++)
        if (*places[i].at && !file_exists(check_format(path, PATH_CAP, "%s%s", places[i].at, places[i].below))) *path = 0;
    bool prompt = *f->prompt && f->sample;
    if (*path) {
        Tokenizer *t = &r->tokenizer;
        tokenizer_open(path, t);
        CHECK(t->count <= r->m.V, "%s has %d tokens, the model a vocabulary of %d\n  -> --tokenizer FILE, the one of this model's data", path, t->count, r->m.V);
        CHECK(!prompt || t->encodes, "%s only decodes, and the prompt needs to be encoded\n  -> --tokenizer FILE: python3 data/get.py tokenizer writes GPT-2's", path);
        if (t->count < r->m.V) printf("%s has %d tokens, the model a vocabulary of %d: the rest would be shown as numbers\n", path, t->count, r->m.V);
    }
    if (!*path && r->m.V != CORPUS_VOCAB && f->sample) printf("note: no tokenizer.bin, so samples are the numbers of tokens\n  -> --tokenizer FILE\n");
    CHECK(!prompt || *path || r->m.V == CORPUS_VOCAB, "--prompt needs the tokenizer of this model's data\n  -> --tokenizer FILE: python3 data/get.py tokenizer writes GPT-2's");
}

// A copy in the run's folder: to sample from the run, nothing else is needed. Another --tokenizer takes its place.
static inline void run_keep_tokenizer(Run *r) {
    char path[PATH_CAP];
    if (!r->tokenizer.count || (file_exists(check_format(path, sizeof path, "%s/tokenizer.bin", r->out)) && r->set.by[FLAG_tokenizer] != BY_USER)) return;
    file_write_in(r->folder, path, r->tokenizer.file, r->tokenizer.size);
}

static inline Setup run_setup(Run *r, bool training) {
    const Flags *f = r->f;
    Setup s;
    s.B = r->micro;
    s.T = r->m.T;
    s.recompute = training ? f->recompute : RECOMPUTE_ON;       // without a backward nothing needs to be kept
    s.training = training;
    s.decodes = f->sample > 0;
    s.z_loss = f->z_loss;
    s.batch = f->batch;
    s.tf32 = f->tf32;
    s.stochastic = f->rounding;
    s.tune = f->tune;
    s.graph = f->graph;
    s.seed = (uint64_t)f->seed;
    s.comm = &r->comm;
    return s;
}

// The micro-batch: as many sequences of a process's share of the batch as its memory has room for.
// The number is kept with the run's flags, so that a run that goes on elsewhere computes the same
// bits. A number that was given is taken as it is, and so is the batch where a loss is defined over
// it.
static inline void run_choose_micro(Run *r, Setup *setup) {
    const Flags *f = r->f;
    char text[256];
    double room = r->t->room(&r->m, setup), needed = memory_needed(r->t, &r->m, setup);
    const double gib = 1 << 30;
    bool given = f->micro_batch && (setup->training || r->set.by[FLAG_micro_batch] == BY_USER);
    bool chooses = !given && !(f->experts && f->balance_loss > 0);
    int B = chooses && needed > room ? memory_fitting(r->t, &r->m, setup, room) : setup->B;
    double least = -(double)B;
    comm_combine(&r->comm, &least, 1, COMM_MAX);           // the same for all processes
    B = (int)-least;
    if (B && B < setup->B) {
        printf("micro-batches of %d sequences, as many as fit into %.2f GiB\n", B, room / gib);
        setup->B = r->micro = B;
        needed = memory_needed(r->t, &r->m, setup);
    }
    CHECK(!(needed > room), "no memory: this takes %.2f GiB, and %.2f GiB are free\n  -> %s",
          needed / gib, room / gib, memory_advice(text, sizeof text, r->t, &r->m, setup, room));
    if (!chooses || !setup->training) return;
    check_format(text, sizeof text, "%d", B);
    flag_set(&r->set, &FLAGS[FLAG_micro_batch], text, BY_DEFAULT);
}

// What --show prints, before any memory is taken.
static inline int run_show(Run *r, const Setup *setup) {
    enum { SHOW_MODEL, SHOW_MODELS, SHOW_MODES, SHOW_CONFIG };
    int what = flag_choice("model|models|modes|config", r->f->show);
    CHECK(what >= 0, "--show %s: expected model, models, modes or config\n  -> --show modes", r->f->show);
    if (what == SHOW_MODES) show_modes();
    if (what == SHOW_CONFIG) {
        char *config = run_config(r);
        printf("%s", config);
        free(config);
    }
    if (what == SHOW_MODEL) {
        show_model(&r->m, &r->init, r->f->model, r->t, setup, true);
        show_memory(r->t, &r->m, setup);
    }
    if (what == SHOW_MODELS) show_models(r->m.mode);
    return 0;
}

// One process trains a run: a second one would take the log from the first. The lock goes with the process; some file systems have none.
static inline int run_lock(const char *out) {
    int folder = folder_open(out);
    CHECK(flock(folder, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK,
          "%s is in use by another process\n  -> wait for it to end, or another --out", out);
    return folder;
}

// Of several processes one keeps the folder and the log; all know its name.
static inline void run_open_folder(Run *r) {
    char path[PATH_CAP], name[PATH_CAP], stamp[32];
    const Flags *f = r->f;
    if (r->comm.rank) {
        comm_broadcast(&r->comm, r->out, sizeof r->out);
        return;
    }
    time_t now = time(NULL);
    const struct tm *local = localtime(&now);             // NULL where the clock's year has no room
    if (local) strftime(stamp, sizeof stamp, "%Y%m%d-%H%M%S", local);
    else check_format(stamp, sizeof stamp, "%lld", (long long)now);
    if (*f->out) check_format(r->out, sizeof r->out, "%s", f->out);
    else check_format(r->out, sizeof r->out, "runs/%s-%s-%s", r->m.mode->name, f->model, stamp);
    check_format(name, sizeof name, "%s", r->out);
    bool made = folder_make(r->out);
    for (int i = 2; !*f->out && !made && errno == EEXIST; i++)                // another run began in this second
        made = folder_make(check_format(r->out, sizeof r->out, "%s-%d", name, i));
    bool there = made || (*f->out && errno == EEXIST && is_folder(r->out)), full = errno == ENOSPC || errno == EDQUOT;
    if (!there) check_failed(full ? EXIT_WRITE : EXIT_REFUSED, __FILE__, __LINE__, "cannot make the folder %s: %s\n  -> another --out", r->out, strerror(errno));
    if (!r->folder) { // it was not there when this process began: by now it may hold a run
        r->folder = run_lock(r->out);
        if (!made) run_found(r->out, 0);
    }
    char *config = run_config(r);
    file_write_text(r->folder, check_format(path, sizeof path, "%s/config.json", r->out), config);
    free(config);
    log_open(&r->log, r->folder, check_format(path, sizeof path, "%s/log.jsonl", r->out), r->step);
    log_begin(&r->log);                                    // the first line, and the first after each resume: what runs here
    log_int(&r->log, "step", r->step);
    log_text(&r->log, "norm_mode", r->m.mode->name);
    log_text(&r->log, "device", r->t->device);
    log_text(&r->log, "precision", r->t->precision);
    log_text(&r->log, "git", r->t->commit);
    log_int(&r->log, "processes", r->comm.size);
    run_log_flags(r, &r->log);
    log_end(&r->log);
    comm_broadcast(&r->comm, r->out, sizeof r->out);
}

// Says that the run diverged, and where its last checkpoint is, whose weights are finite. Returns
// the exit status.
static inline int run_diverged(const Run *r) {
    char last[PATH_CAP];
    if (r->comm.rank) return EXIT_DIVERGED;
    int64_t step = checkpoint_step_below(r->out, r->step + 1);
    if (step < 0) check_format(last, sizeof last, "there is no checkpoint");
    else check_format(last, sizeof last, "its last finite weights are in %s/step_%08lld", r->out,
                      (long long)step);
    if (r->bad) fprintf(stderr, "error: %d steps in a row were not finite: ", r->bad);
    else fprintf(stderr, "error: weights or moments are infinite or NaN and were not saved: ");
    fprintf(stderr,
            "the run diverged at step %lld; %s\n"
            "  -> a smaller --lr, a longer --warmup, or another --init\n",
            (long long)r->step, last);
    return EXIT_DIVERGED;
}

// Returns the program's exit status.
static inline int run_steps(Run *r) {
    const Flags *f = r->f;
    bool saved = r->step > 0, validated = r->log.validated, tasked = r->log.tasked;
    comm_broadcast(&r->comm, &validated, sizeof validated);
    comm_broadcast(&r->comm, &tasked, sizeof tasked);
    int64_t kept = saved ? r->updates : -1;                // of the weights that the last checkpoint holds
    r->peak = r->t->peak ? r->t->peak() : 0;
    comm_combine(&r->comm, &r->peak, 1, COMM_SUM);
    r->started = clock_seconds();
    r->started_at = r->pace.tokens = r->tokens;
    if (r->step >= f->steps) printf("note: the run is at step %lld of --steps %lld: nothing to train\n  -> a larger --steps\n", (long long)r->step, (long long)f->steps);
    for (;;) {
        bool last = r->step >= f->steps;
        double begin = clock_seconds();
        if (r->step > 0 && !saved && (last || (f->save_every && r->step % f->save_every == 0))) {
            if (!run_save(r)) return run_diverged(r);
            saved = true;
            kept = r->updates;
        }
        bool due = r->step > 0 && (last || (f->val_every && r->step % f->val_every == 0));
        if (due && r->has_val && !validated) run_log_validation(r);
        if (due && r->tasks.count && !tasked) run_tasks(r);
        r->started += clock_seconds() - begin;                                 // tokens/s is that of training
        int signal = comm_signal(&r->comm);
        if (signal) {
            if (r->step > 0 && !saved && !run_save(r)) return run_diverged(r);
            printf("\nstopped at step %lld; --out %s --resume auto goes on\n", (long long)r->step, r->out);
            return 128 + signal;
        }
        if (!last) {
            run_step(r);
            saved = validated = tasked = false;
        }
        if (r->bad >= DIVERGED_STEPS || (last && r->bad)) {
            if (r->updates != kept) run_save(r);
            return run_diverged(r);
        }
        if (last) return 0;
    }
}

// While the run trains a signal waits for the step in work; before and after that it ends the program.
static inline int run_train(Run *r) {
    struct sigaction stop, interrupt, terminate;
    memset(&stop, 0, sizeof stop);
    stop.sa_handler = comm_stop;
    stop.sa_flags = SA_RESTART;
    sigaction(SIGINT, &stop, &interrupt);
    sigaction(SIGTERM, &stop, &terminate);
    int status = run_steps(r);
    sigaction(SIGINT, &interrupt, NULL);
    sigaction(SIGTERM, &terminate, NULL);
    if (!status && comm_stopped) raise(comm_stopped);      // it came when nobody asked any more
    return status;
}

// A run, from its folder to its last line; returns the exit status.
static inline int run_training(Run *r) {
    run_open_folder(r);
    if (!r->val.content) loader_hash_begin(&r->val);
    if (!r->train.content) {
        loader_hash_begin(&r->train);
        double gigabytes = loader_gigabytes(&r->train);
        if (gigabytes > 1)
            printf("hashing %.1f GB of shards beside the training, to know the data again\n",
                   gigabytes);
    }
    r->layers = (LayerStats *)check_alloc((size_t)r->m.L * sizeof *r->layers, "the statistics of layers");
    if (!r->comm.rank) run_keep_tokenizer(r);
    if (r->comm.size > 1) printf("%d processes, each with a part of every batch and of the optimizer's state\n", r->comm.size);
    printf("run %s, %s on the %s, git %s; %lld samples of %lld tokens an epoch%s\n\n", r->out, r->t->precision, strcmp(r->t->device, "cpu") ? "GPU" : "CPU", r->t->commit, (long long)r->train.samples,
           (long long)r->f->seq, r->has_val ? "" : "; no validation data");
    int status = run_train(r);
    if (status) return status;
    uint64_t hash = run_hash(r);
    printf("\nweights %016llx after %lld steps, %lld tokens; see %s\n", (unsigned long long)hash, (long long)r->step, (long long)r->tokens, r->out);
    return 0;
}

static inline void run_eval(Run *r) {
    double loss = NAN;
    run_validate(r, &loss);
    uint64_t hash = run_hash(r);
    printf("validation loss %.6f, weights %016llx\n", loss, (unsigned long long)hash);
    if (r->tasks.count) run_tasks(r);
}

// The weights to begin with, and the plans of products: of the run that goes on; of another model; or new ones.
static inline void run_begin(Run *r, bool resuming) {
    const Flags *f = r->f;
    if (resuming) {
        check_format(r->out, sizeof r->out, "%s", f->out);
        run_resume(r);
        return;
    }
    if (*f->from) run_read_weights(r, f->from);
    else if (*f->init_from) run_read_weights(r, f->init_from);
    else run_init_weights(r);
    if (!*f->from && r->t->prepare) r->t->prepare(r->gpt, NULL, NULL);
}

static inline int run_version(const Trainer *t) {
    printf("norm.c, %s, %s on the %s, git %s\n", t->mode->name, t->precision, t->device,
           t->commit);
    return 0;
}

static inline int run_help(const char *only) {
    FlagSet set;
    flags_default(&set);
    flags_preset(&set, set.f.model);
    flags_help(&set.f, only);
    return 0;
}

// All processes were begun alike, and each has samples of every batch.
static inline void run_check_processes(Run *r, bool resuming) {
    char *config = run_config(r);
    Hash hash = hash_begin();
    hash_add(&hash, config, strlen(config));
    hash_add(&hash, &resuming, sizeof resuming);           // one that sees no checkpoint begins anew
    CHECK(comm_agree(&r->comm, hash_end(&hash)), "the processes have different flags, data or builds, or see different checkpoints in --out\n  -> begin all of them with one command, with --out on a disk that they share");
    free(config);
    CHECK(r->f->batch >= r->comm.size, "--batch %lld for %d processes: expected at least a sequence for each\n  -> a larger --batch, or fewer processes", (long long)r->f->batch, r->comm.size);
}

static inline int run_end(Run *r, int status) {
    loader_close(&r->train);
    loader_close(&r->val);
    tasks_close(&r->tasks);
    tokenizer_close(&r->tokenizer);
    log_close(&r->log);
    if (r->gpt) r->t->destroy(r->gpt);
    comm_close(&r->comm);
    return status;
}

static inline int trainer_run(const Trainer *t, int argc, char **argv) {
    Run run, *r = &run;
    memset(r, 0, sizeof *r);
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--help")) return run_help(i + 1 < argc ? argv[i + 1] : NULL);
        if (!strcmp(argv[i], "--version")) return run_version(t);
    }
    r->t = t;
    comm_open(&r->comm, t->device);
    bool resuming = flags_resolve(&r->set, t, argc, argv);
    const Flags *f = r->f = &r->set.f;
    bool training = !*f->from;
    if (*f->out && !*f->show && is_folder(f->out) && !r->comm.rank) r->folder = run_lock(f->out);
    run_refuse(&r->set, t->mode, t->device, t->precision);
    bool configure = !*f->show || !strcmp(f->show, "config");
    if (f->eval || (training && (configure || *f->data))) run_open_data(r, training);
    r->unigram = training && configure && r->has_val ? run_unigram(r) : NAN;
    r->m = model_from_flags(f, t->mode);
    r->init = init_from_flags(f, r->m.mode);
    // A run that began on fewer processes may have kept a larger micro-batch than the share here.
    int64_t share = CEIL_DIV(f->batch, r->comm.size);
    r->micro = (int)(f->micro_batch && f->micro_batch < share ? f->micro_batch : share);
    if (!training && !f->eval) r->micro = 1;
    Setup setup = run_setup(r, training);
    r->layout = layout_make(&r->m);
    layout_share(&r->layout, r->comm.rank, r->comm.size);
    if (*f->show) return run_end(r, run_show(r, &setup));
    run_check_processes(r, resuming);
    run_choose_micro(r, &setup);

    run_open_tokenizer(r);
    if (f->eval || training) run_open_tasks(r);
    show_model(&r->m, &r->init, f->model, t, &setup, false);
    size_t batch = (size_t)setup.B * (size_t)setup.T * sizeof(int32_t);
    r->inputs = (int32_t *)check_alloc(batch, "a batch");
    r->targets = (int32_t *)check_alloc(batch, "a batch");
    r->gpt = t->create(&r->m, &setup);
    run_begin(r, resuming);

    int status = training ? run_training(r) : 0;
    if (status) return run_end(r, status);
    if (f->eval) run_eval(r);
    if (!r->comm.rank && f->sample && (!f->eval || r->set.by[FLAG_sample] == BY_USER)) {
        printf("\n");
        run_sample(r);
    }
    return run_end(r, 0);
}

static inline int trainer_main(const Trainer *t, int argc, char **argv) {
    check_streams_begin();
    threads_begin(argv);
    signal(SIGXFSZ, SIG_IGN); // a file at its size limit is a failed write, as on a full disk
    int status = trainer_run(t, argc, argv);
    check_streams_end();
    return status;
}
