// save.c: the content of a checkpoint, and how --resume, --from and --init-from read it. A resumed
// run ends with the same bits as an unbroken one. Weights and moments that are not finite are never
// saved, and are refused when they are read.
//
//   step_00000200/  model.safetensors      weights
//                   optimizer.safetensors  AdamW's moments: exp_avg.NAME, exp_avg_sq.NAME; Muon's
//                                          momentum: momentum_buffer.NAME (names of PyTorch)
//                   state.json             step, counters, hash of the data, windows of spikes.h
//                   config.json            flags
//                   plans.json             matrix plans of the GPU
//                   manifest.json          size and checksum of each (checkpoint.h)
#include "run.h"
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

static const char EDITED[] = "this file was edited or damaged: use another checkpoint";
static const char OTHER_MODEL[] = "give the flags and the NORM_MODE of the model in this file";
static const char *const PREFIX[TENSOR_KINDS] = {"", "", "exp_avg.", "exp_avg_sq."};

// Whether the entry has such a tensor: Muon keeps no second moment.
static bool has_kind(int kind, const Entry *e) { return kind != ADAM_V || !e->muon; }

// ---------------------------------------------------------------------------------------- weights

// Every value is a function of the seed, the tensor's name and its index (init.h), so the number of
// threads and processes changes no weight.
void run_init_weights(Run *r) {
    for (const Entry *e = r->layout.entries; e < r->layout.end; e++) {
        void *w = r->t->tensor(r->gpt, WEIGHTS, e);
        double std = init_std(&r->init, &r->m, e);
        uint64_t key = init_key(&r->init, e);
#pragma omp parallel for schedule(static)
        for (int64_t i = 0; i < e->size; i++)
            real_put(w, r->t->element, i, init_value(&r->init, &r->m, e, std, key, i));
    }
    r->t->store(r->gpt, WEIGHTS, 0);
    r->t->normalize(r->gpt);
}

// Hashes the weights without the padding of the vocabulary.
unsigned long long run_hash(Run *r) {
    Hash h = hash_begin();
    r->t->fetch(r->gpt, WEIGHTS);
    for (const Entry *e = r->layout.entries; e < r->layout.end; e++) {
        size_t bytes = entry_rows(&r->m, e) * e->row.cols * r->t->element;
        hash_add(&h, r->t->tensor(r->gpt, WEIGHTS, e), bytes);
    }
    uint64_t hash = hash_end(&h);
    comm_check_weights(&r->comm, hash);
    return hash;
}

// An entry as a tensor of a safetensors file, without the padding of the vocabulary; its name goes
// into `name`. Vectors have rank 1.
static Tensor entry_tensor(Run *r, int kind, const Entry *e, char name[128]) {
    bool vector = e->row.rows == 1;
    const char *prefix = kind == ADAM_M && e->muon ? "momentum_buffer." : PREFIX[kind];
    return (Tensor){
        .name = check_format(name, 128, "%s%s", prefix, e->name),
        .dtype = r->t->element == sizeof(float) ? "F32" : "F64",
        .rank = vector ? 1 : 2,
        .shape = {vector ? e->row.cols : entry_rows(&r->m, e), vector ? 0 : e->row.cols},
    };
}

// Reads the weights, or this process's shard of the moments, of one entry.
static void read_entry(Run *r, const SafetensorsFile *file, const char *path, int kind,
                       const Entry *e) {
    char name[128];
    Tensor want = entry_tensor(r, kind, e, name);
    const Tensor *t = safetensors_find(file, name);
    CHECK(t, "%s: expected a tensor %s, found none\n  -> %s", path, name, OTHER_MODEL);
    const long long *found = t->shape, *expected = want.shape;
    // A smaller --seq takes the first of the learned positions.
    bool positions = e->id == PARAM_wpe && kind == WEIGHTS;
    bool fits = found[0] == expected[0] || (positions && found[0] > expected[0]);
    CHECK(fits && t->rank == want.rank && found[1] == expected[1],
          "%s: %s: expected the shape [%lld, %lld], found [%lld, %lld]\n  -> %s%s", path, name,
          expected[0], expected[1], found[0], found[1], OTHER_MODEL,
          positions ? ", or a smaller --seq" : "");

    // Every process holds all weights, and its shard of the moments (ZeRO-1).
    Part part = {0, e->size};
    if (kind >= ADAM_M) part = entry_part(e, r->comm.rank, r->comm.size);
    void *x = r->t->tensor(r->gpt, kind, e);
    safetensors_read_real(t, part.first, part.size, x, r->t->element);
    long long bad = real_count_bad(x, r->t->element, part.size);
    CHECK(!bad,
          "%s: %lld values of %s are infinite or NaN\n"
          "  -> use an earlier checkpoint, or another copy of the weights", path, bad, name);
}

// Reads a file of weights or moments. It must have the model's entries and no other tensor.
static void read_tensors(Run *r, const char *path, int first_kind, int last_kind) {
    SafetensorsFile file;
    char error[ERROR_CAP];
    int expected = 0;
    CHECK(safetensors_open(path, &file, error),
          "%s: expected a whole safetensors file, found: %s\n"
          "  -> check the path, copy or download the file again, or convert it",
          path, error);
    for (int kind = first_kind; kind <= last_kind; kind++) {
        for (const Entry *e = r->layout.entries; e < r->layout.end; e++) {
            if (!has_kind(kind, e)) continue;
            read_entry(r, &file, path, kind, e);
            expected++;
        }
        r->t->store(r->gpt, kind, r->updates);
    }
    CHECK(file.count == expected, "%s: expected %d tensors, found %d\n  -> %s", path, expected,
          file.count, OTHER_MODEL);
    safetensors_close(&file);
}

// from: a .safetensors file, a checkpoint, or a run, whose newest whole checkpoint is read.
void run_read_weights(Run *r, const char *from) {
    char dir[PATH_CAP], path[PATH_CAP];
    const char *end = strrchr(from, '.');
    if (!end || strcmp(end, ".safetensors"))
        from = path_join(path, checkpoint_find(from, dir), "model.safetensors");
    read_tensors(r, from, WEIGHTS, WEIGHTS);
}

// ------------------------------------------------------------------------------------------- save

// One tensor that is written to a file.
typedef struct {
    Run *r;
    int kind;
    const Entry *e;
    char *whole;                          // where process 0 assembles shards; NULL: there are none
    char name[128];
} Gather;

// The tensor's data, called when its turn in the file comes. Every process sends its shard of the
// moments to process 0, which assembles them.
static const void *gather(void *source) {
    const Gather *g = source;
    Comm *c = &g->r->comm;
    char *own = g->r->t->tensor(g->r->gpt, g->kind, g->e);
    if (!g->whole) return own;
    for (int rank = 0; rank < c->size; rank++) {
        Part part = entry_part(g->e, rank, c->size);
        size_t element = g->r->t->element, bytes = part.size * element;
        char *place = g->whole + part.first * element;
        if (rank) comm_move(c, c->rank ? own : place, bytes, rank, 0);
        else if (!c->rank) memcpy(place, own, bytes);
    }
    return g->whole;
}

// Process 0 writes the file, and holds one whole tensor of the moments at a time. The others send
// their shards.
void run_save_tensors(Run *r, Checkpoint *c, const char *file, int first_kind, int last_kind) {
    int entries = r->layout.count, count = 0, most = entries * (last_kind - first_kind + 1);
    int64_t largest = 0;
    for (const Entry *e = r->layout.entries; e < r->layout.end; e++)
        if (e->size > largest) largest = e->size;
    char *whole = NULL;
    if (first_kind >= ADAM_M && r->comm.size > 1)
        whole = check_alloc(r->comm.rank ? 1 : largest * r->t->element, "a tensor of a checkpoint");
    Tensor *tensors = check_alloc(most * sizeof *tensors, "a checkpoint");
    Gather *gathers = check_alloc(most * sizeof *gathers, "a checkpoint");
    for (int kind = first_kind; kind <= last_kind; kind++) {
        r->t->fetch(r->gpt, kind);
        for (int k = 0; k < entries; k++) {
            const Entry *e = &r->layout.entries[k];
            if (!has_kind(kind, e)) continue;
            Gather *g = &gathers[count];
            *g = (Gather){r, kind, e, whole, ""};
            Tensor *t = &tensors[count++];
            *t = entry_tensor(r, kind, e, g->name);
            t->bring = gather;
            t->source = g;
        }
    }
    // Sender and receiver go through the tensors in the same order.
    if (!r->comm.rank) checkpoint_add_tensors(c, file, tensors, count);
    else for (int i = 0; i < count; i++) gather(&gathers[i]);
    free(tensors);
    free(gathers);
    free(whole);
}

// A window of the last losses or gradient norms (spikes.h).
static void write_window(Log *state, const char *name, const SpikeWindow *w) {
    log_nest(state, name, '{');
    log_int(state, "row", w->in_a_row);
    log_nest(state, "values", '[');
    for (int k = 0; k < w->count; k++) log_real(state, NULL, w->values[k]);
    log_unnest(state, ']');
    log_unnest(state, '}');
}

// state.json: everything that a resumed run needs besides tensors and flags.
static char *state_text(const Run *r) {
    Log state;
    log_begin(&state);
    log_int(&state, "step", r->step);
    log_int(&state, "updates", r->updates);
    log_int(&state, "tokens", r->tokens);
    log_int(&state, "bad", r->bad);
    log_int(&state, "epoch", run_epoch(r));
    log_int(&state, "sample", r->step * r->f->batch % r->data.samples);
    log_hex(&state, "data_xxh64", r->data.content);
    log_hex(&state, "val_data_xxh64", r->val.content);
    write_window(&state, "losses", &r->losses);
    write_window(&state, "norms", &r->norms);
    return log_take(&state);
}

// Waits for the hash of the shards. All processes must read the same ones.
void run_know_data(Run *r, DataLoader *d) {
    if (!d->tokens) return;
    CHECK(comm_agree(&r->comm, loader_hash_end(d)),
          "the processes read different data\n  -> put the same shards on every machine");
}

// Whether `name` in `folder` still leads to the open file or folder fd. Device and inode number
// identify a file whatever its name. flags: 0 follows a link, AT_SYMLINK_NOFOLLOW does not.
static bool file_is(int fd, int folder, const char *name, int flags) {
    struct stat held, named;
    return fstat(fd, &held) == 0 && fstatat(folder, name, &named, flags) == 0 &&
           held.st_ino == named.st_ino && held.st_dev == named.st_dev;
}

// Before a save: refuses a run's folder that was removed. One that was moved is accepted.
static void check_folder_exists(const Run *r) {
    struct stat info;
    if (r->comm.rank || file_is(r->folder, AT_FDCWD, r->out, 0)) return;
    CHECK_WRITE(fstat(r->folder, &info) == 0 && info.st_nlink,
                "%s was removed while the run trained: step %lld cannot be saved\n"
                "  -> begin again, with another --out", r->out, r->step);
}

// After a save: refuses to go on if the folder was moved, or the log removed or replaced.
static void check_folder_in_place(const Run *r) {
    // Linux gives the current path of an open folder.
    char link[64], now[PATH_CAP];
    check_format(link, sizeof link, "/proc/self/fd/%d", r->folder);
    ssize_t n = readlink(link, now, sizeof now - 1);
    now[n > 0 ? n : 0] = 0;
    CHECK_WRITE(file_is(r->folder, AT_FDCWD, r->out, 0),
                "%s is no longer this run's folder: it was moved, with step %lld saved in it\n"
                "  -> --out %s --resume required", r->out, r->step, now);
    const char *log = file_name(r->log.path);
    CHECK_WRITE(file_is(r->log.fd, r->folder, log, AT_SYMLINK_NOFOLLOW),
                "%s was removed or replaced while the run wrote to it; step %lld is saved\n"
                "  -> --resume required goes on, with a new log", r->log.path,
                r->step);
}

// Adds an allocated text and frees it; NULL: nothing.
static void add_text(Checkpoint *c, const char *name, char *text) {
    if (text) checkpoint_add_text(c, name, text);
    free(text);
}

// Saves a checkpoint. Older ones are pruned (--keep-last) only if the new one is usable and the
// last step was finite; otherwise the user may need them.
bool run_save(Run *r) {
    Checkpoint c;
    bool first = !r->comm.rank;
    check_folder_exists(r);
    if (!r->data.content) run_know_data(r, &r->data);     // state.json needs the hash
    if (!r->val.content) run_know_data(r, &r->val);

    // The log is synced first, so it has every step up to the checkpoint.
    log_sync(&r->log);
    if (first) checkpoint_begin(&c, r->folder, r->out, r->step);
    run_save_tensors(r, &c, "model.safetensors", WEIGHTS, WEIGHTS);
    run_save_tensors(r, &c, "optimizer.safetensors", ADAM_M, ADAM_V);

    // All processes must reach the same decision. They wait here for process 0, and its disk.
    comm_broadcast(&r->comm, &c.bad, sizeof c.bad);
    r->saved_updates = r->updates;
    if (c.bad) {
        if (first) checkpoint_abandon(&c);
        return false;
    }
    bool prune = r->f->keep_last && !r->bad && run_is_usable(r);
    r->saved = true;
    if (!first) return true;
    add_text(&c, "config.json", run_config(r));
    add_text(&c, "plans.json", r->t->plans ? r->t->plans(r->gpt) : NULL);
    add_text(&c, "state.json", state_text(r));
    checkpoint_commit(&c);
    check_folder_in_place(r);
    if (prune) checkpoint_prune(r->folder, r->out, r->step, r->f->keep_last, r->f->keep_every);
    return true;
}

// ----------------------------------------------------------------------------------------- resume

// An integer of state.json, from 0 to max.
static int64_t read_int(const Json *state, const char *name, long long max, const char *path) {
    long long value = json_get_int(state, name, path);
    CHECK(value >= 0 && value <= max, "%s: expected \"%s\" from 0 to %lld, found %lld\n  -> %s",
          path, name, max, value, EDITED);
    return value;
}

// The inverse of write_window. The file may have been edited, so counts are checked.
static void read_window(SpikeWindow *w, const Json *state, const char *name, const char *path) {
    const Json *window = json_need(state, name, JSON_OBJECT, path);
    const Json *values = json_need(window, "values", JSON_ARRAY, path);
    w->in_a_row = read_int(window, "row", SPIKES_IN_A_ROW, path);
    w->count = 0;
    for (const Json *v = values->first; v; v = v->next) {
        bool fits = w->count < SPIKE_WINDOW && (v->kind == JSON_INT || v->kind == JSON_REAL);
        CHECK(fits, "%s: expected up to %d numbers in \"%s\"\n  -> %s", path, SPIKE_WINDOW, name,
              EDITED);
        w->values[w->count++] = v->number;
    }
}

// The run's config.json may have been replaced: flags that may not change must equal those of the
// checkpoint's copy.
static void check_config(const Run *r, const char *dir) {
    FlagSet was;
    char path[PATH_CAP], a[FLAG_CAP], b[FLAG_CAP];
    flags_default(&was);
    config_read(&was, path_join(path, dir, "config.json"), r->t);
    // Compared as text, as the user would type them.
    for (int i = 0; i < FLAG_COUNT; i++) {
        const char *now = flag_text(a, r->f, &FLAGS[i]);
        const char *then = flag_text(b, &was.f, &FLAGS[i]);
        CHECK(FLAGS[i].resume != FIXED || !strcmp(now, then),
              "%s/config.json: expected \"%s\": \"%s\" as in its checkpoint, found \"%s\"\n"
              "  -> cp %s %s/", r->f->out, FLAGS[i].field, then, now, path, r->f->out);
    }
}

// Training data must have the same hash as before, wherever it is now. Other validation data gives
// a warning.
static void check_data(Run *r, const Json *state, const char *path) {
    DataLoader *loaders[] = {&r->data, &r->val};
    static const char *const NAMES[] = {"data_xxh64", "val_data_xxh64"};
    bool same[2];
    for (int i = 0; i < 2; i++) loader_hash_begin(loaders[i]);    // both at once
    for (int i = 0; i < 2; i++) {
        run_know_data(r, loaders[i]);
        same[i] = strtoull(json_get_string(state, NAMES[i], path), NULL, 16) == loaders[i]->content;
    }
    CHECK(same[0],
          "%s: the training data is not what this run was trained on: its hash is %016llx\n"
          "  -> --data with the same shards, wherever they are now", path,
          (unsigned long long)r->data.content);
    if (!same[1] && !r->comm.rank)
        fprintf(stderr, "warning: the validation data is not what this run was validated with\n");
}

// The step, read first, bounds updates and tokens. The position in the data follows from it too;
// the file must agree.
static void read_state(Run *r, const char *path) {
    Json *state = json_read_file(path, NULL);
    int64_t batch = r->f->batch, tokens = batch * r->m.T;
    r->step = read_int(state, "step", INT64_MAX / tokens, path);
    r->updates = read_int(state, "updates", r->step, path);
    r->tokens = read_int(state, "tokens", r->step * tokens, path);
    r->bad = read_int(state, "bad", INT32_MAX, path);
    r->epoch = run_epoch(r);
    long long epoch = json_get_int(state, "epoch", path);
    long long sample = json_get_int(state, "sample", path);
    CHECK(epoch == r->epoch && sample == r->step * batch % r->data.samples,
          "%s: the data position, epoch %lld and sample %lld, is not that of step %lld\n  -> %s",
          path, epoch, sample, r->step, EDITED);
    check_data(r, state, path);
    read_window(&r->losses, state, "losses", path);
    read_window(&r->norms, state, "norms", path);
    json_free(state);
}

// Continues from the newest whole checkpoint. Process 0 looks for it, and all read the same one.
void run_resume(Run *r) {
    char dir[PATH_CAP] = "", path[PATH_CAP];
    size_t size;
    if (!r->comm.rank) checkpoint_find(r->f->out, dir);
    comm_broadcast(&r->comm, dir, sizeof dir);
    // Flags and counters before tensors: a refusal comes before large files are read.
    check_config(r, dir);
    read_state(r, path_join(path, dir, "state.json"));
    read_tensors(r, path_join(path, dir, "model.safetensors"), WEIGHTS, WEIGHTS);
    read_tensors(r, path_join(path, dir, "optimizer.safetensors"), ADAM_M, ADAM_V);
    // Without plans the matrix products are timed again.
    char *plans = file_read(path_join(path, dir, "plans.json"), JSON_MOST, &size);
    if (r->t->prepare) r->t->prepare(r->gpt, plans, path);
    free(plans);
    printf("resumed from %s at step %lld\n", dir, r->step);
}
