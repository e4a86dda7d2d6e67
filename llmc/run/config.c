// config.c: from the command line to flags, model and config.json. Read it from its end:
// flags_resolve is the order in which flags win.
#include "config.h"
#include "checkpoint.h"
#include "data.h"
#include "json.h"

// ---------------------------------------------------------------------------- refusals

// A combination that makes no sense, and the message: what was found, and what to do. Flags of a
// preset or a run that have no effect are not refused, only those that the user gave.
#define REFUSE(condition, ...) CHECK(!(condition), __VA_ARGS__)
#define user(flag) (set->by[FLAG_##flag] == BY_USER)

static void refuse_useless(bool useless, const char *flag, const char *where) {
    REFUSE(useless, "%s only means something %s\n  -> leave it out", flag, where);
}

// Heads, positions and latent attention.
static void refuse_attention(const FlagSet *set, const Mode *mode) {
    const Flags *f = &set->f;
    const long long width = f->width, heads = f->heads, kv_heads = f->kv_heads;
    const bool rope = f->positions == POSITIONS_ROPE, fewer = kv_heads && kv_heads != heads;
    REFUSE(width % heads, "--heads %lld does not divide --width %lld\n"
           "  -> choose heads among the divisors of the width", heads, width);
    REFUSE(kv_heads && heads % kv_heads, "--kv-heads %lld does not divide --heads %lld\n"
           "  -> choose kv heads among the divisors of the heads", kv_heads, heads);
    REFUSE(!f->kv_rank && rope && width / heads % 2,
           "--positions rope needs an even head size, found %lld\n"
           "  -> other --heads, or --positions learned", width / heads);
    refuse_useless(!f->kv_rank && user(rope_size), "--rope-size", "with --kv-rank");
    REFUSE(f->kv_rank && fewer,
           "latent attention makes keys and values for every head\n  -> leave out --kv-heads");
    REFUSE(f->kv_rank && f->bias, "latent attention has no biases\n  -> --bias off");
    REFUSE(f->kv_rank && !rope, "latent attention has rotary positions\n  -> --positions rope");
    REFUSE(f->kv_rank && f->rope_size % 2,
           "--rope-size %lld is odd; rotary positions turn pairs\n  -> an even one",
           (long long)f->rope_size);
    // nGPT: the gain s_qk, which q and k share, has a value for every channel of every head.
    REFUSE(mode->unit && fewer,
           "%s scales q and k by one vector, so they have as many heads\n"
           "  -> leave out --kv-heads", mode->name);
    REFUSE(mode->unit && !rope, "%s has rotary positions\n  -> --positions rope", mode->name);
}

// Mixture of experts. Without it none of its flags has an effect.
static void refuse_experts(const FlagSet *set) {
    const Flags *f = &set->f;
    const long long K = f->experts_per_token, dense = f->dense_layers;
    bool given = user(experts_per_token) || user(shared_experts) || user(dense_layers) ||
                 user(dense_ffn) || user(router) || user(router_scale) || user(balance_loss) ||
                 user(sequence_loss) || user(router_z_loss) || user(router_losses) ||
                 user(balance_rate);
    REFUSE(!f->experts && given, "flags of routers and experts only mean something with experts\n"
           "  -> --experts 8, or leave them out");
    if (!f->experts) return;
    REFUSE(K > f->experts, "--experts-per-token %lld of --experts %lld\n"
           "  -> at most as many as there are", K, (long long)f->experts);
    REFUSE(dense >= f->layers, "--dense-layers %lld of --layers %lld leaves none with experts\n"
           "  -> fewer, or --experts 0", dense, (long long)f->layers);
    REFUSE(f->bias, "experts have no biases\n  -> --bias off");
    refuse_useless(!dense && user(dense_ffn), "--dense-ffn", "with --dense-layers");
    // Widths are int, and rows of a token's experts lie side by side.
    REFUSE((K + f->shared_experts) * (f->ffn ? f->ffn : 4 * f->width) > 1 << 24,
           "the experts of a token are too wide together, expected a hidden width of less than "
           "2^24\n  -> a smaller --ffn, --experts-per-token or --shared-experts");
}

// Flags that contradict the placement.
static void refuse_mode(const FlagSet *set, const Mode *mode) {
    const Flags *f = &set->f;
    REFUSE(mode->unit && f->decay_gains == GAINS_TO_ONE,
           "%s has no gains around one\n  -> --decay-gains off", mode->name);
    REFUSE(mode->sdd && user(bias) && f->bias,
           "SDD's linears have no bias\n  -> leave out --bias on");
    refuse_useless(!mode->sdd && user(sdd), "--sdd", "for NORM_MODE=SDD and SDD_PRE");
    refuse_useless(!mode->early && user(mix_ratio), "--mix-ratio", "for NORM_MODE=MIX_LN");
    // With a norm after the last sublayer the head may do without one of its own.
    REFUSE(mode->fin && f->final_norm == FINAL_NORM_OFF,
           "%s leaves the stream without a norm, so the head needs the final norm\n"
           "  -> --final-norm auto", mode->name);
}

// A flag of one precision on a GPU.
static void refuse_precision(bool given, const char *flag, const char *is, const char *needed) {
    REFUSE(given && strcmp(is, needed), "%s only means something for PREC=%s, this is %s\n"
           "  -> leave it out, or make train_gpt PREC=%s", flag, needed, is, needed);
}

static void refuse_device(const FlagSet *set, const char *device, const char *precision) {
    const Flags *f = &set->f;
    REFUSE(!strcmp(device, "cpu") && (user(tf32) || user(rounding) || user(tune) || user(graph)),
           "--tf32, --rounding, --tune and --graph only mean something on a GPU\n"
           "  -> leave them out, or make train_gpt DEVICE=cuda");
    refuse_precision(f->tf32 && user(tf32), "--tf32", precision, "fp32");
    refuse_precision(f->rounding && user(rounding), "--rounding", precision, "bf16");
}

// Batches, the schedule, and flags that say what the program is to do.
static void refuse_run(const FlagSet *set) {
    const Flags *f = &set->f;
    const long long batch = f->batch, micro = f->micro_batch;
    // A micro-batch must divide the batch if the user gave it, or if the balance loss is defined
    // over it. Any other one may leave a smaller last micro-batch.
    const bool fixed = user(micro_batch) || (f->experts && f->balance_loss > 0);
    // Kernels index rows of a micro-batch with 32 bits.
    const int64_t rows = (micro ? micro : batch) * f->seq * (f->experts ? f->experts_per_token : 1);
    REFUSE(fixed && micro && batch % micro, "--micro-batch %lld does not divide --batch %lld\n"
           "  -> choose it among the divisors of the batch", micro, batch);
    REFUSE(rows > INT32_MAX, "a micro-batch of %lld sequences of %lld tokens: expected less than "
           "2^31 tokens, counted for each of their experts\n  -> a smaller --micro-batch",
           micro ? micro : batch, (long long)f->seq);
    REFUSE(f->schedule_steps && f->schedule_steps < f->warmup,
           "--schedule-steps %lld ends before --warmup %lld\n"
           "  -> a longer schedule or a shorter warmup", (long long)f->schedule_steps,
           (long long)f->warmup);
    // Commands: --from reads a run, --out writes one.
    REFUSE(f->eval && !*f->from, "--eval needs a model\n  -> --from RUN");
    REFUSE(*f->from && !f->eval && !f->sample,
           "--from needs something to do\n  -> --eval, or --sample TOKENS");
    REFUSE(*f->config && *f->from,
           "--config begins a run, and --from reads one\n  -> leave out --config");
    REFUSE(!strcmp(f->prompt, "-") && !*f->from,
           "--prompt - reads prompts for a model that exists already\n"
           "  -> ./train_gpt --from RUN --prompt -, when the run has ended");
    REFUSE(*f->from && *f->out, "--from only evaluates or samples and writes no run\n"
           "  -> leave out --out; to continue training: --out RUN --resume required");
    REFUSE(f->skip_spikes && !f->spike_z,
           "--skip-spikes needs a limit for spikes\n  -> --spike-z 10");
    REFUSE(f->keep_every && !f->keep_last,
           "--keep-every adds to the checkpoints of --keep-last, and without that flag all stay\n"
           "  -> --keep-last 1 --keep-every %lld", (long long)f->keep_every);
    REFUSE(f->resume && !*f->out, "--resume needs the run's folder\n  -> --out RUN");
}

// The first refusal ends the program. A warmup that fills the schedule is legal, and noted.
void run_refuse(const FlagSet *set, const Mode *mode, const char *device, const char *precision) {
    const Flags *f = &set->f;
    refuse_attention(set, mode);
    refuse_experts(set);
    refuse_mode(set, mode);
    refuse_device(set, device, precision);
    refuse_run(set);
    long long end = schedule_end(f);
    if (!*f->from && f->steps && f->warmup >= end)
        printf("note: the warmup (%lld steps) fills the schedule (%lld): the rate never falls\n"
               "  -> a smaller --warmup\n", (long long)f->warmup, end);
}
#undef user

// ---------------------------------------------------------------------------- flags to model

// F: the width of each expert.
static Moe moe_from_flags(const Flags *f, int F) {
    int K = (int)f->experts_per_token, shared = (int)f->shared_experts;
    if (!f->experts) return (Moe){.E = 0};
    return (Moe){
        .E = (int)f->experts,
        .K = K,
        .dense = (int)f->dense_layers,
        // A dense layer is as wide as the experts that a token goes through in the others.
        .dense_F = f->dense_ffn ? (int)f->dense_ffn : (K + shared) * F,
        .shared_F = shared * F,
        .router = f->router,
        .losses = f->router_losses,
        .scale = f->router_scale,
        .balance = f->balance_loss,
        .sequence = f->sequence_loss,
        .z = f->router_z_loss,
        .bias_rate = f->balance_rate,
    };
}

Model model_from_flags(const Flags *f, const Mode *mode) {
    int C = (int)f->width, V = f->vocab ? (int)f->vocab : CORPUS_VOCAB;
    bool swiglu = f->activation == ACTIVATION_SWIGLU;
    // SwiGLU has three matrices, GELU two: 8/3 and 4 times the width give as many parameters.
    int F = swiglu ? CEIL_DIV(8 * C / 3, 32) * 32 : 4 * C;
    if (f->ffn) F = (int)f->ffn;
    return (Model){
        .mode = mode,
        .sdd = &SDDS[f->sdd],
        .L = (int)f->layers,
        .C = C,
        .NH = (int)f->heads,
        .KV = (int)(f->kv_heads ? f->kv_heads : f->heads),
        .HS = C / (int)f->heads,
        .F = F,
        .V = V,
        .Vp = CEIL_DIV(V, 128) * 128,         // the head's product has whole tiles
        .T = (int)f->seq,
        .kv_rank = (int)f->kv_rank,
        .rope_size = f->kv_rank ? (int)f->rope_size : 0,
        .moe = moe_from_flags(f, F),
        .layernorm = f->norm,
        .bias = f->bias && !mode->sdd && !mode->unit,
        .rope = f->positions == POSITIONS_ROPE,
        .swiglu = swiglu,
        .tied = f->tied,
        .fin = f->final_norm == FINAL_NORM_AUTO ? mode->fin : f->final_norm == FINAL_NORM_ON,
        .theta = f->rope_theta,
        .eps = f->eps,
        .emb_scale = f->emb_scale ? sqrt((double)C) : 1,
        .mix_ratio = f->mix_ratio,
    };
}

Init init_from_flags(const Flags *f, const Mode *mode) {
    int own = mode->init ? init_find(mode->init) : f->init_baseline;
    // Choice 0 of --init is auto; the others are the rows of INIT_TABLE.
    return (Init){f->init ? f->init - 1 : own, f->init_std, (uint64_t)f->seed};
}

// ---------------------------------------------------------------------------- config.json

// The last lines of a config.json: a checksum of the bytes before them, and its closing brace.
static const char *config_end(char buf[64], const char *text, size_t n) {
    Hash hash = hash_begin();
    hash_add(&hash, text, n);
    unsigned long long sum = hash_end(&hash);
    return check_format(buf, 64, ",\n  \"xxh64\": \"%016llx\"\n}\n", sum);
}

// {"norm_c_version": 2, "norm_mode": "SPAN", "precision": "fp32", ..., "flags": {"model": ...},
// "xxh64": "..."}. Flags of one command (ONCE) are left out, so the same run has the same text.
char *config_text(const Flags *f, const Model *m, const Layout *layout, const Init *init,
                  const Trainer *t, double unigram) {
    char *text = NULL, buf[64];
    const char *before = "";
    size_t n = 0;
    FILE *file = text_begin(&text, &n, "config.json");
    fprintf(file, "{\n  \"norm_c_version\": %d,\n  \"norm_mode\": \"%s\",\n", CONFIG_VERSION,
            m->mode->name);
    fprintf(file, "  \"precision\": \"%s\",\n  \"git\": \"%s\",\n", t->precision, t->commit);
    fprintf(file, "  \"parameters\": %lld,\n  \"active_parameters\": %lld,\n",
            (long long)show_parameters(m, layout, false),
            (long long)show_parameters(m, layout, true));
    fprintf(file, "  \"flops_per_token\": %.0f,\n  \"initialization\": \"%s\",\n",
            show_flops(m, layout), INITS[init->scheme].name);
    fprintf(file, "  \"unigram_entropy\": ");
    json_write_number(file, unigram);
    fprintf(file, ",\n  \"flags\": {\n");
    for (int i = 0; i < FLAG_COUNT; i++) {
        if (FLAGS[i].resume == ONCE) continue;
        fprintf(file, "%s    \"%s\": ", before, FLAGS[i].field);
        json_write_string(file, flag_text(buf, sizeof buf, f, &FLAGS[i]));
        before = ",\n";
    }
    fprintf(file, "\n  }");
    fflush(file);
    text_end(file, config_end(buf, text, n), "config.json");
    return text;
}

// A placement is compiled in: another one needs another program.
static void config_check_mode(const Json *root, const char *path, const Mode *mode) {
    const char *was = json_get_string(root, "norm_mode", path);
    CHECK(!strcmp(was, mode->name),
          "%s: a run of %s, this program is %s\n  -> make train_gpt NORM_MODE=%s", path, was,
          mode->name, was);
}

// Reads the "flags" of a config.json. A file written by hand (--config) may have numbers as values;
// flags of one command alone are refused there, and passed over elsewhere.
static void config_read_flags(FlagSet *set, const Json *root, const char *path, bool by_hand) {
    char number[64];
    const Json *flags = json_need(root, "flags", JSON_OBJECT, path);
    for (const Json *v = flags->first; v; v = v->next) {
        int i = 0;
        while (i < FLAG_COUNT && strcmp(FLAGS[i].field, v->key)) i++;
        Nearest near = nearest_begin(v->key);
        for (int k = 0; k < FLAG_COUNT; k++) nearest_add(&near, FLAGS[k].field, FLAGS[k].field);
        CHECK(i < FLAG_COUNT, "%s: unknown flag \"%s\"\n  -> %suse the norm.c that wrote the file",
              path, v->key, near.text);
        // %.17g gives back every double.
        bool is_number = by_hand && (v->kind == JSON_INT || v->kind == JSON_REAL);
        const char *text = is_number ? check_format(number, sizeof number, "%.17g", v->number)
                                     : json_get_string(flags, v->key, path);
        CHECK(!by_hand || FLAGS[i].resume != ONCE,
              "%s: \"%s\" is of one command and not of a run\n"
              "  -> leave it out, and give it on the command line", path, v->key);
        if (FLAGS[i].resume != ONCE) flag_set(set, &FLAGS[i], text, BY_CHECKPOINT);
    }
}

// A config.json, parsed and checked: version, checksum and mode. Version 1 has no checksum.
static Json *config_open(const char *path, const Mode *mode) {
    size_t n;
    char *text = file_read(path, JSON_MOST, &n), end[64], run[PATH_CAP];
    CHECK(text, "cannot read %s: %s\n  -> check the path", path, strerror(errno));
    Json *root = json_parse(text, n, path);
    int64_t version = json_get_int(root, "norm_c_version", path);
    CHECK(version <= CONFIG_VERSION,
          "%s: written by version %lld of the format, this program knows up to %d\n"
          "  -> use a newer norm.c", path, (long long)version, CONFIG_VERSION);
    if (version > 1 || json_get(root, "xxh64")) {
        // The checksum is the last member: what lies before its comma is what it covers.
        const char *tail = strrchr(text, ',');
        bool whole = tail && !strcmp(tail, config_end(end, text, (size_t)(tail - text)));
        CHECK(whole,
              "%s: its text does not match its checksum (xxh64): edited or damaged\n"
              "  -> restore it: cp \"$(ls -d %s/step_* | tail -n 1)/config.json\" %s/; "
              "to change a value, give its flag on the command line",
              path, file_parent(run, path), run);
    }
    config_check_mode(root, path, mode);
    free(text);
    return root;
}

// fp64 has other weights on disk than fp32 and bf16, and other results.
bool config_read(FlagSet *set, const char *path, const Trainer *t) {
    Json *root = config_open(path, t->mode);
    const char *was = json_get_string(root, "precision", path);
    bool other = strcmp(was, t->precision) != 0;
    bool fp64 = !strcmp(was, "fp64") || !strcmp(t->precision, "fp64");
    CHECK(!other || !fp64, "%s: a run in %s, this program computes in %s\n"
          "  -> make train_gpt NORM_MODE=%s PREC=%s", path, was, t->precision, t->mode->name, was);
    config_read_flags(set, root, path, false);
    json_free(root);
    return other;
}

// ---------------------------------------------------------------------------- which flag wins

// A flag of the model that says otherwise, on the command line or by --model, is refused. --seq and
// the losses of routers only shape the training, and may differ.
void config_init_from(FlagSet *set, const FlagSet *given, const Trainer *t) {
    char path[PATH_CAP], is[64], was[64], name[64];
    const char *folder = given->f.init_from;
    if (!is_folder(folder)) return;                        // a model.safetensors names no flags
    Json *root = config_open(check_format(path, sizeof path, "%s/config.json", folder), t->mode);
    FlagSet theirs;
    flags_default(&theirs);
    config_read_flags(&theirs, root, path, false);
    json_free(root);
    for (int i = FLAG_model + 1; i < FLAG_init; i++) {
        bool is_free = i == FLAG_seq || (i >= FLAG_balance_loss && i <= FLAG_balance_rate);
        const FlagRow *row = &FLAGS[i];
        // The preset of a --model on the command line is already in set.
        bool by_model = given->by[FLAG_model] == BY_USER && set->by[i] == BY_PRESET;
        bool by_given = given->by[i] >= BY_CHECKPOINT;
        const char *source = given->by[i] == BY_USER ? "on the command line" : "in --config";
        const char *a = flag_text(is, sizeof is, &theirs.f, row);
        const char *b = flag_text(was, sizeof was, by_given ? &given->f : &set->f, row);
        flag_name(name, sizeof name, row);
        CHECK(is_free || !strcmp(a, b) || (!by_model && !by_given),
              "%s is %s in %s and %s %s\n  -> leave it out", name, a, folder, b,
              by_given ? source : "by --model");
        flag_set(set, row, a, BY_PRESET);
    }
}

// --config: the flags of a run's config.json, or of one written by hand, lie below the command line
// and its --model.
static void config_begin(FlagSet *given, const Mode *mode) {
    char buf[64];
    FlagSet user = *given;
    Json *root = json_read_file(user.f.config);
    if (json_get(root, "norm_mode")) config_check_mode(root, user.f.config, mode);
    config_read_flags(given, root, user.f.config, true);
    json_free(root);
    // The file's flags have overwritten the user's in `given`: put the user's back on top.
    if (user.by[FLAG_model] == BY_USER) flags_preset(given, user.f.model);
    for (int i = 0; i < FLAG_COUNT; i++) {
        const char *text = flag_text(buf, sizeof buf, &user.f, &FLAGS[i]);
        if (user.by[i] == BY_USER) flag_set(given, &FLAGS[i], text, BY_USER);
    }
}

// Reading a model (--from) pins the model's flags except --seq. A run that goes on keeps its own
// values of the flags that may change, whatever --config says.
void flags_override(FlagSet *set, const FlagSet *given, bool resuming) {
    char was[64], now[64], name[64];
    bool reading = *given->f.from;                         // set holds the flags of that run
    for (int i = 0; i < FLAG_COUNT; i++) {
        const FlagRow *row = &FLAGS[i];
        bool file = given->by[i] == BY_CHECKPOINT;
        if (given->by[i] != BY_USER && (!file || (resuming && row->resume == FREE))) continue;
        // Texts compare what the user sees: 1e-3 and 0.001 are the same rate.
        const char *a = flag_text(was, sizeof was, &set->f, row);
        const char *b = flag_text(now, sizeof now, &given->f, row);
        flag_name(name, sizeof name, row);
        bool pinned = (resuming && row->resume == FIXED) ||
                      (reading && i < FLAG_init && i != FLAG_seq);
        CHECK(!pinned || !strcmp(a, b), "%s is %s in this run and %s %s; it may not change\n"
              "  -> leave %s out, or start another run with another --out", name, a, b,
              file ? "in --config" : "on the command line", name);
        flag_set(set, row, b, given->by[i]);
    }
    // A model that is read with other data is not validated on the old run's.
    if (reading && given->by[FLAG_data] == BY_USER && given->by[FLAG_val_data] != BY_USER)
        flag_set(set, &FLAGS[FLAG_val_data], "", BY_DEFAULT);
}

// A manifest makes a folder a checkpoint. Its checksums are read before it is used.
void checkpoint_find(const char *path, char *dir) {
    char config[PATH_CAP], why[256];
    check_format(config, sizeof config, "%s/manifest.json", path);
    if (file_exists(config)) {
        check_format(dir, PATH_CAP, "%s", path);
        CHECK(checkpoint_verify(dir, why),
              "%s is damaged: %s\n  -> use another checkpoint of that run", dir, why);
        return;
    }
    CHECK(is_folder(path), "%s: expected the folder of a run or of a checkpoint\n  -> ls runs/",
          path);
    CHECK(checkpoint_latest(path, INT64_MAX, dir),
          "%s holds no checkpoint\n  -> train with --save-every, or give another run", path);
}

// A log or a checkpoint without config.json is a damaged run: neither resumed nor overwritten.
bool run_found(const char *out, int resume) {
    char manifest[PATH_CAP], config[PATH_CAP], log[PATH_CAP], run[PATH_CAP];
    check_format(manifest, sizeof manifest, "%s/manifest.json", out);
    check_format(config, sizeof config, "%s/config.json", out);
    check_format(log, sizeof log, "%s/log.jsonl", out);
    CHECK(!file_exists(out) || is_folder(out), "--out %s is a file\n  -> another --out", out);
    CHECK(!file_exists(manifest),
          "--out %s is a checkpoint of the run %s; nothing was overwritten\n"
          "  -> --out %s --resume auto continues that run, --from %s only reads the checkpoint",
          out, file_parent(run, out), run, out);
    bool whole = file_exists(config);
    bool found = whole || file_exists(log) || checkpoint_step_below(out, INT64_MAX) >= 0;
    CHECK(!found || resume,
          "%s already holds a run; nothing was overwritten\n"
          "  -> --resume auto continues it, another --out begins anew, --from %s --sample N only "
          "reads it", out, out);
    CHECK(!found || whole,
          "%s holds a run without its config.json; nothing was overwritten\n"
          "  -> copy it from a checkpoint: cp \"$(ls -d %s/step_* | tail -n 1)/config.json\" %s/",
          out, out, out);
    return found;
}

// Whether --out holds a run (*found) with a checkpoint to resume from.
static bool out_resumes(const Flags *f, bool *found) {
    *found = run_found(f->out, f->resume);
    bool resuming = *found && checkpoint_step_below(f->out, INT64_MAX) >= 0;
    CHECK(resuming || f->resume != RESUME_REQUIRED,
          "%s holds no checkpoint to resume from\n  -> --resume auto begins anew", f->out);
    if (*found && !resuming)
        printf("resume: %s has no checkpoint yet; beginning again at step 0\n", f->out);
    return resuming;
}

bool flags_resolve(FlagSet *set, const Trainer *t, int argc, char **argv) {
    FlagSet given;
    char base[PATH_CAP] = "", config[PATH_CAP];            // of the run that goes on or is read
    bool found = false, resuming = false;
    flags_default(&given);
    flags_parse(&given, argc - 1, argv + 1, BY_USER);
    if (*given.f.config) config_begin(&given, t->mode);
    flags_default(set);
    flags_preset(set, given.f.model);
    // nGPT, section 2.6: normalized matrices need neither.
    if (t->mode->unit) flags_parse_text(set, "--warmup 0 --weight-decay 0", BY_PRESET);
    const Flags *f = &given.f;
    // The run that is read or goes on lies over the preset.
    if (*f->from) checkpoint_find(f->from, base);
    else if (*f->out && !*f->show) resuming = out_resumes(f, &found);
    if (found) check_format(base, sizeof base, "%s", f->out);
    check_format(config, sizeof config, "%s/config.json", base);
    if (*base && config_read(set, config, t))
        printf("note: a run in %s goes on in %s\n", strcmp(t->precision, "fp32") ? "fp32" : "bf16",
               t->precision);
    // A run that goes on has read its --init-from when it began.
    if (!found && *f->init_from) config_init_from(set, &given, t);
    long long before = schedule_end(&set->f);
    flags_override(set, &given, found);
    long long end = schedule_end(&set->f);
    // Say what happens, in case --out or --steps is a mistake.
    if (*f->out && f->resume && !found)
        printf("resume: no run in %s yet; a new one begins: %s on %s\n", f->out, set->f.model,
               *set->f.data ? set->f.data : "the built-in stories");
    if (resuming && end != before)
        printf("note: the schedule now ends at step %lld, not %lld, and the rate follows it\n"
               "  -> --schedule-steps %lld keeps it as it was\n", end, before, before);
    return resuming;
}
