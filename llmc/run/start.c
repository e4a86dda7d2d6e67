// start.c: from the command line to a model that is ready: flags, data, model, memory, weights.
// Read it from its end: run_open is the table of contents. Every mistake of a user is refused
// before anything is written. The run's folder is made last (run_open_folder).
#include "run.h"
#include <signal.h>
#include <sys/file.h>
#include <time.h>
#include "../threads.h"

// ------------------------------------------------------------------------------------------- data

// Data and model must agree on the vocabulary. --vocab 0 takes the data's. A header that names none
// needs --vocab, and each token is then checked when it is read (limit).
static void check_vocab(Run *r, DataLoader *d, const char *what) {
    char text[16];
    CHECK(d->vocab || r->f->vocab,
          "%s data does not say its vocabulary\n  -> --vocab 50257 if its tokens are GPT-2's",
          what);
    // Set as text, which checks its range; config.json keeps it.
    check_format(text, sizeof text, "%d", d->vocab);
    if (!r->f->vocab) flag_set(&r->set, &FLAGS[FLAG_vocab], text, BY_DEFAULT);
    int V = r->f->vocab;
    CHECK(d->vocab <= V,
          "%s data has a vocabulary of %d, the model one of %d\n"
          "  -> --vocab %d, or shards of the model's tokenizer", what, d->vocab, V, d->vocab);
    if (!d->vocab) {
        d->limit = V;
        printf("note: %s data does not say its vocabulary: tokens of %d and more are refused\n",
               what, V);
    } else if (d->vocab < V)
        printf("note: %s data has a vocabulary of %d%s, the model one of %d: the rest goes unused\n"
               "  -> --vocab %d; python3 data/get.py makes shards of GPT-2's tokens\n", what,
               d->vocab, d->vocab == CORPUS_VOCAB ? " (bytes)" : "", V, d->vocab);
}

// Training data: shuffled by the seed. Validation data: --val-data, else the val shards beside the
// training data, in their order. A single shard or pattern has none beside it.
static void open_data(Run *r) {
    const Flags *f = r->f;
    r->has_val = *f->val_data || !*f->data || is_folder(f->data);
    if (r->training) {
        loader_open(&r->data, f->data, "train", f->seq, 1, f->seed);
        check_vocab(r, &r->data, "training");
    }
    CHECK(r->training || r->has_val,
          "--eval: expected validation data, but %s %s\n  -> --val-data PATH", f->data,
          file_exists(f->data) ? "is not a folder" : "does not exist");
    if (!r->has_val) return;
    loader_open(&r->val, *f->val_data ? f->val_data : f->data, "val", f->seq, 0, 0);
    check_vocab(r, &r->val, "validation");
    // The built-in corpus has a known entropy; no model's loss can fall below it.
    loader_floor(&r->val, run_val_samples(r));
    int V = r->data.vocab, val_V = r->val.vocab;          // 0: no training, or not named
    CHECK(!V || !val_V || V == val_V,
          "training data has a vocabulary of %d, validation data one of %d\n"
          "  -> --val-data with shards of the same tokenizer", V, val_V);
}

// Entropy of the frequencies of the tokens that a validation predicts, in nats: the loss of a model
// that ignores the context. A run that ends there has collapsed (dev/ablate.py).
static double unigram_entropy(Run *r) {
    int64_t T = r->f->seq, samples = run_val_samples(r);
    int64_t V = r->f->vocab;
    // The run's own arrays come later: their size depends on the model, which depends on the data.
    int32_t *inputs = check_alloc(2 * T * sizeof *inputs, "a sample"), *targets = inputs + T;
    int64_t *counts = check_alloc(V * sizeof *counts, "the frequencies of tokens");
    for (int64_t i = 0; i < samples; i++) {
        loader_sample(&r->val, i, inputs, targets);
        for (int64_t t = 0; t < T; t++) counts[targets[t]]++;
    }
    double entropy = 0, all = samples * T;
    for (int64_t v = 0; v < V; v++)
        if (counts[v]) entropy -= counts[v] / all * log(counts[v] / all);
    free(inputs);
    free(counts);
    return entropy;
}

// Finds the tokenizer, in this order: --tokenizer of this command; the copy in the run that is read
// or resumed; the --tokenizer that this run began with; the one in --init-from, or in the run of
// that checkpoint; the one in --data. A prompt needs one, unless the model reads bytes.
static bool find_tokenizer(const Run *r, char *path) {
    const Flags *f = r->f;
    bool given = r->set.by[FLAG_tokenizer] == BY_USER && *f->tokenizer;
    const struct { const char *at, *below; } places[] = {{given ? f->tokenizer : "", ""},
        {f->from, "/tokenizer.bin"}, {f->from, "/../tokenizer.bin"}, {f->out, "/tokenizer.bin"},
        {f->tokenizer, ""}, {f->init_from, "/tokenizer.bin"}, {f->init_from, "/../tokenizer.bin"},
        {f->data, "/tokenizer.bin"}};
    // An empty flag is no place to look.
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        if (!*places[i].at) continue;
        check_format(path, PATH_CAP, "%s%s", places[i].at, places[i].below);
        if (given || file_exists(path)) return true;       // tokenizer_open refuses a missing one
    }
    return false;
}

static const char TOKENIZER_ADVICE[] =
    "--tokenizer FILE: python3 data/get.py tokenizer writes GPT-2's";

// Opens the tokenizer. It must fit the model's vocabulary, encode if there is a prompt, and name
// the separator of documents for --mask-documents. Without one samples print as bytes, or as
// numbers if the model's tokens are not bytes.
void run_open_tokenizer(Run *r) {
    Tokenizer *t = &r->tokenizer;
    char path[PATH_CAP] = "", error[ERROR_CAP];
    bool found = find_tokenizer(r, path), prompt = *r->f->prompt && r->f->sample;
    bool bytes = r->m.V == CORPUS_VOCAB;
    if (found) {
        CHECK(tokenizer_open(path, t, error),
              "%s: %s\n  -> python3 data/get.py tokenizer --out FILE writes a sound one", path,
              error);
        CHECK(t->count <= r->m.V,
              "%s has %d tokens, the model a vocabulary of %d\n"
              "  -> --tokenizer FILE, the one of this model's data", path, t->count, r->m.V);
        CHECK(!prompt || t->classes,
              "--prompt: expected a tokenizer that encodes; %s only decodes\n"
              "  -> dev/export_hf.py, and this prompt in transformers; or %s", path,
              TOKENIZER_ADVICE);
        // A prompt is refused now, not after training.
        if (prompt && strcmp(r->f->prompt, "-")) {
            size_t n = strlen(r->f->prompt);
            int32_t *tokens = check_alloc((2 * n + 1) * sizeof *tokens, "a prompt");
            tokenizer_encode(t, r->f->prompt, n, tokens);
            free(tokens);
        }
        if (t->count < r->m.V)
            printf("note: %s has %d tokens, the model a vocabulary of %d: the rest print as "
                   "numbers\n", path, t->count, r->m.V);
    } else if (!bytes && r->f->sample)
        printf("note: no tokenizer.bin: samples print as numbers\n  -> --tokenizer FILE\n");
    CHECK(!prompt || found || bytes, "--prompt needs the tokenizer of this model's data\n  -> %s",
          TOKENIZER_ADVICE);
    CHECK(!r->f->mask_documents || found || bytes,
          "--mask-documents: expected the tokenizer of this data, which names the token that "
          "begins documents, found none\n  -> %s", TOKENIZER_ADVICE);
    r->setup.documents.separator = t->end;                // 0 without a tokenizer
}

// --------------------------------------------------------------------------------------- the model

// How the device makes the model; tf32, stochastic, tune, graph and kernels concern a GPU alone.
Setup run_setup(const Run *r) {
    const Flags *f = r->f;
    return (Setup){
        .B = r->micro,
        .T = r->m.T,
        .recompute = r->training ? f->recompute : RECOMPUTE_ON,   // forward alone keeps nothing
        .training = r->training,
        .optimizer = f->optimizer,
        .documents = {.mask = f->mask_documents,
                      .restart = f->mask_documents && f->restart_positions},
        .z_loss = f->z_loss,
        .batch = f->batch,
        .tf32 = f->tf32,
        .stochastic = f->rounding,
        .tune = f->tune,
        .graph = f->graph,
        .kernels = f->kernels,
        .seed = f->seed,
        .comm = (Comm *)&r->comm,
    };
}

// The model's sizes and layout; no memory is taken yet.
static void make_model(Run *r) {
    const Flags *f = r->f;
    r->m = model_from_flags(f, r->t->mode);
    r->init = init_from_flags(f, r->m.mode);
    // The micro-batch of a run that began on fewer processes may be larger than the share here.
    int64_t share = CEIL_DIV(f->batch, r->comm.size);
    r->micro = f->micro_batch && f->micro_batch < share ? f->micro_batch : share;
    if (!r->training && !f->eval) r->micro = 1;           // --sample alone
    r->setup = run_setup(r);
    r->layout = setup_layout(&r->m, &r->setup);
}

// The first weights, and the matrix plans of the GPU. A resumed run takes both from its checkpoint.
static void load_weights(Run *r) {
    char path[PATH_CAP];
    const char *from = r->f->init_from;
    if (!r->training) from = path_join(path, r->f->from, "model.safetensors");
    if (r->resuming) run_resume(r);
    else if (*from) {
        run_read_weights(r, from);
        if (r->comm.size > 1) run_hash(r);        // each process may have its own file
    } else run_init_weights(r);
    if (!r->resuming && r->training && r->t->prepare) r->t->prepare(r->gpt, NULL, NULL);
}

// ------------------------------------------------------------------------------- the run's folder

// Locks the run: a second process that trained it would write into the same log. The lock ends with
// the process. File systems without locks are accepted.
static int lock_folder(const char *out) {
    int folder = folder_open(out);
    CHECK(flock(folder, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK,
          "%s is in use by another process\n  -> wait for it to end, or another --out", out);
    return folder;
}

// Makes the folder of --out; without --out, runs/<mode>-<model>-<time>, with a number appended if
// that exists. Returns whether it is new.
static bool make_folder(Run *r) {
    char name[PATH_CAP], stamp[32] = "";
    time_t now = time(NULL);
    const struct tm *local = localtime(&now);     // NULL if the year does not fit
    bool given = *r->f->out;
    if (local) strftime(stamp, sizeof stamp, "-%Y%m%d-%H%M%S", local);
    check_format(name, sizeof name, "runs/%s-%s%s", r->m.mode->name, r->f->model, stamp);
    bool made = folder_make(check_format(r->out, sizeof r->out, "%s", given ? r->f->out : name));
    for (int i = 2; !given && !made && errno == EEXIST; i++)
        made = folder_make(check_format(r->out, sizeof r->out, "%s-%d", name, i));
    bool there = made || (given && errno == EEXIST && is_folder(r->out));
    // A full disk is not the command's fault: it has its own exit status.
    int status = errno == ENOSPC || errno == EDQUOT ? EXIT_WRITE : EXIT_REFUSED;
    if (!there)
        check_failed(status, __FILE__, __LINE__, "cannot make the folder %s: %m\n"
                     "  -> another --out", r->out);
    return made;
}

// The first line of the log, and the first after each resume: the program and its flags, as text.
static void log_program(Run *r) {
    char value[FLAG_CAP];
    Log *log = run_begin_line(r);
    log_text(log, "norm_mode", r->m.mode->name);
    log_text(log, "device", r->t->device);
    log_text(log, "precision", r->t->precision);
    log_text(log, "git", r->t->commit);
    log_int(log, "processes", r->comm.size);
    const char *layer, *kind;
    for (int i = 0; r->t->kernels && (layer = r->t->kernels(r->gpt, i, &kind)); i++)
        log_text(log, layer, kind);
    for (int i = 0; i < FLAG_COUNT; i++)
        log_text(log, FLAGS[i].field, flag_text(value, r->f, &FLAGS[i]));
    log_end(log);
}

// Process 0 has the folder and the log; all processes know the folder's name.
void run_open_folder(Run *r) {
    char path[PATH_CAP];
    if (!r->comm.rank) {
        bool made = make_folder(r);
        if (!r->folder) {                         // it did not exist when this process began
            r->folder = lock_folder(r->out);
            if (!made) run_found(r->out, 0);      // but another process may have begun a run in it
        }
        char *config = run_config(r);
        path_join(path, r->out, "config.json");
        file_write_in(r->folder, path, config, strlen(config));
        free(config);
        log_open(&r->log, r->folder, path_join(path, r->out, "log.jsonl"), r->step);
        log_program(r);
        // A copy of the tokenizer, so that sampling from the run needs no other file. A --tokenizer
        // on the command line replaces it.
        path_join(path, r->out, "tokenizer.bin");
        bool replace = r->set.by[FLAG_tokenizer] == BY_USER || !file_exists(path);
        if (r->tokenizer.count && replace)
            file_write_in(r->folder, path, r->tokenizer.file, r->tokenizer.size);
    }
    comm_broadcast(&r->comm, r->out, sizeof r->out);
}

// --------------------------------------------------------------------------------------- run_open

// Commands that print something and end: --help [FLAG], --version.
static bool print_and_end(const Trainer *t, int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--version"))
            printf("norm.c, %s, %s on the %s, git %s\n", t->mode->name, t->precision, t->device,
                   t->commit);
        else if (!strcmp(argv[i], "--help")) {
            FlagSet set;
            flags_default(&set);
            flags_preset(&set, set.f.model);
            flags_help(&set.f, argv[i + 1]);      // argv ends with NULL
        } else continue;
        return true;
    }
    return false;
}

// Refuses processes that were started differently, or more processes than sequences in a batch.
static void check_processes(Run *r) {
    const Flags *f = r->f;
    char *config = run_config(r);
    // config.json has the flags, the build and the data's vocabulary and unigram entropy.
    uint64_t hash = hash_bytes(config, strlen(config)) + r->resuming;
    free(config);
    // All see the checkpoint to resume from, or none does.
    CHECK(comm_agree(&r->comm, hash),
          "the processes have different flags, data or builds, or see different checkpoints\n"
          "  -> start all of them with one command, with --out on a disk that they share");
    CHECK(f->batch >= r->comm.size,
          "--batch %lld for %d processes: expected at least one sequence for each\n"
          "  -> a larger --batch, or fewer processes", f->batch, r->comm.size);
    // A balance loss is defined over a --micro-batch: each must be whole.
    bool balanced = r->training && f->experts && f->balance_loss > 0;
    CHECK(!balanced || f->micro_batch < 2 || f->batch % (f->micro_batch * r->comm.size) == 0,
          "--balance-loss with --micro-batch %lld: expected a divisor of every process's share\n"
          "  -> another --micro-batch", f->micro_batch);
}

Run *run_open(const Trainer *t, int argc, char **argv) {
    check_streams_begin();
    threads_begin(argv);                  // may start the program again, with other variables
    signal(SIGXFSZ, SIG_IGN);             // a write past the file size limit then fails
    if (print_and_end(t, argc, argv)) {
        check_streams_end();
        return NULL;
    }
    Run *r = check_alloc(sizeof *r, "a run");
    r->t = t;
    // Before the first message: from here on only process 0 prints.
    comm_open(&r->comm, t->device);
    // Flags, and the lock: from here on no other process trains the run in --out.
    r->resuming = flags_resolve(&r->set, t, argc, argv);
    const Flags *f = r->f = &r->set.f;
    r->training = !*f->from;
    if (*f->out && !f->show && is_folder(f->out) && !r->comm.rank) r->folder = lock_folder(f->out);
    run_refuse(&r->set, t);

    // --show needs no data, except for config.json, which has the vocabulary and unigram entropy.
    bool configures = r->training && (!f->show || f->show == SHOW_CONFIG);
    if (f->eval || configures || (r->training && *f->data)) open_data(r);
    r->unigram = configures && r->has_val ? unigram_entropy(r) : NAN;
    make_model(r);
    if (f->show) {
        show(r);
        run_close(r, 0);
        return NULL;
    }
    check_processes(r);                   // before the first one takes memory
    memory_choose(r);
    run_open_tokenizer(r);
    if (f->eval || r->training) tasks_open(&r->tasks, f->tasks, r);
    show_model(r, false);

    // Memory: a micro-batch, the device's arenas, then the weights into them.
    size_t tokens = (size_t)r->micro * r->m.T;
    r->inputs = check_alloc(2 * tokens * sizeof *r->inputs, "a batch");
    r->targets = r->inputs + tokens;
    r->gpt = t->create(&r->m, &r->setup);
    load_weights(r);
    return r;
}

// Also called after --show, when most of a run was never opened: each close accepts zeroed memory.
int run_close(Run *r, int status) {
    loader_close(&r->data);
    loader_close(&r->val);
    tasks_close(&r->tasks);
    tokenizer_close(&r->tokenizer);
    log_close(&r->log);
    if (r->gpt) r->t->destroy(r->gpt);
    layout_free(&r->layout);
    free(r->inputs);
    comm_close(&r->comm);
    free(r);
    check_streams_end();
    return status;
}
