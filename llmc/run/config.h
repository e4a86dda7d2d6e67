// config.h: what a run is, from its command line: flags with their preset and the run they go on from, the refusals, the model, and config.json.
// flags_resolve at the end is the order in which they win.
#pragma once
#include "checkpoint.h"
#include "data.h"
#include "../init.h"
#include "trainer.h"
#include "presets.h"
#include "schedule.h"
#include "describe.h"

enum { CONFIG_VERSION = 2 };                    // 2: with a checksum

// ------------------------------------------------------------------------------------------------------------------ flags to model

// Combinations that make no sense, refused by name. f: the flags; r: the mode's row; device, precision: of the trainer; user(x): x was given on the command line.
#define user(flag) (set->by[FLAG_##flag] == BY_USER)
#define REFUSAL_TABLE(REFUSE) \
REFUSE(f->width % f->heads, \
      "--heads %lld does not divide --width %lld\n  -> choose heads among the divisors of the width", (long long)f->heads, (long long)f->width) \
REFUSE(f->kv_heads && f->heads % f->kv_heads, \
      "--kv-heads %lld does not divide --heads %lld\n  -> choose kv heads among the divisors of the heads", (long long)f->kv_heads, (long long)f->heads) \
REFUSE(f->experts && f->experts_per_token > f->experts, \
      "--experts-per-token %lld of --experts %lld\n  -> at most as many as there are", (long long)f->experts_per_token, (long long)f->experts) \
REFUSE(f->experts && f->dense_layers >= f->layers, "--dense-layers %lld of --layers %lld leaves none with experts\n  -> fewer, or --experts 0", (long long)f->dense_layers, (long long)f->layers) \
REFUSE(f->experts && f->bias, "experts have no biases\n  -> --bias off") \
REFUSE(!f->experts && (user(experts_per_token) || user(shared_experts) || user(dense_layers) || user(dense_ffn) || user(router) || user(router_scale) || user(balance_loss) || \
                       user(sequence_loss) || user(router_z_loss) || user(router_losses) || user(balance_rate)), \
      "flags of routers and experts only mean something with experts\n  -> --experts 8, or leave them out") \
REFUSE(f->experts && !f->dense_layers && user(dense_ffn), "--dense-ffn only means something with --dense-layers\n  -> leave it out") \
REFUSE(!f->kv_rank && user(rope_size), "--rope-size only means something with --kv-rank\n  -> leave it out") \
REFUSE(f->kv_rank && f->kv_heads && f->kv_heads != f->heads, "latent attention makes keys and values for every head\n  -> leave out --kv-heads") \
REFUSE(f->kv_rank && f->bias, "latent attention has no biases\n  -> --bias off") \
REFUSE(f->kv_rank && f->positions != POSITIONS_ROPE, "latent attention has rotary positions\n  -> --positions rope") \
REFUSE(f->kv_rank && f->rope_size % 2, "--rope-size %lld is odd; rotary positions turn pairs\n  -> an even one", (long long)f->rope_size) \
REFUSE(r->unit && f->kv_heads && f->kv_heads != f->heads, "%s scales q and k by one vector, so they have as many heads\n  -> leave out --kv-heads", r->name) \
REFUSE(r->unit && f->positions != POSITIONS_ROPE, "%s has rotary positions\n  -> --positions rope", r->name) \
REFUSE(r->unit && f->decay_gains == GAINS_TO_ONE, "%s has no gains around one\n  -> --decay-gains off", r->name) \
REFUSE(!f->kv_rank && f->positions == POSITIONS_ROPE && f->width / f->heads % 2, \
      "--positions rope needs an even head size, found %lld\n  -> other --heads, or --positions learned", (long long)(f->width / f->heads)) \
REFUSE((user(micro_batch) || (f->experts && f->balance_loss > 0)) && f->micro_batch && f->batch % f->micro_batch, \
      "--micro-batch %lld does not divide --batch %lld\n  -> choose it among the divisors of the batch", (long long)f->micro_batch, (long long)f->batch) \
REFUSE(f->experts && (f->experts_per_token + f->shared_experts) * (f->ffn ? f->ffn : 4 * f->width) > 1 << 24, \
      "the experts of a token are too wide together, expected a hidden width of less than 2^24\n  -> a smaller --ffn, --experts-per-token or --shared-experts") \
REFUSE((f->micro_batch ? f->micro_batch : f->batch) * f->seq * (f->experts ? f->experts_per_token : 1) > INT32_MAX, \
      "a micro-batch of %lld sequences of %lld tokens: expected less than 2^31 tokens, counted for each of their experts\n  -> a smaller --micro-batch", (long long)(f->micro_batch ? f->micro_batch : f->batch), (long long)f->seq) \
REFUSE(!strcmp(device, "cpu") && (user(tf32) || user(rounding) || user(tune) || user(graph)), "--tf32, --rounding, --tune and --graph only mean something on a GPU\n  -> leave them out, or make train_gpt DEVICE=cuda") \
REFUSE(f->tf32 && user(tf32) && strcmp(precision, "fp32"), "--tf32 only means something for PREC=fp32, this is %s\n  -> leave it out, or make train_gpt PREC=fp32", precision) \
REFUSE(f->rounding && user(rounding) && strcmp(precision, "bf16"), "--rounding only means something for PREC=bf16, this is %s\n  -> leave it out, or make train_gpt PREC=bf16", precision) \
REFUSE(r->sdd && user(bias) && f->bias, "SDD's linears have no bias\n  -> leave out --bias on") \
REFUSE(!r->sdd && user(sdd), "--sdd only means something for NORM_MODE=SDD and SDD_PRE\n  -> leave it out") \
REFUSE(r->early < 0 && user(mix_ratio), "--mix-ratio only means something for NORM_MODE=MIX_LN\n  -> leave it out") \
REFUSE(r->fin && f->final_norm == FINAL_NORM_OFF, "%s leaves the stream un-normed, so the head needs the final norm\n  -> --final-norm auto", r->name) \
REFUSE(f->schedule_steps && f->schedule_steps < f->warmup, \
      "--schedule-steps %lld ends before --warmup %lld\n  -> a longer schedule or a shorter warmup", (long long)f->schedule_steps, (long long)f->warmup) \
REFUSE(f->eval && !*f->from, "--eval needs a model\n  -> --from RUN") \
REFUSE(*f->from && !f->eval && !f->sample, "--from needs something to do\n  -> --eval, or --sample TOKENS") \
REFUSE(*f->config && *f->from, \
       "--config begins a run, and --from reads one\n  -> leave out --config") \
REFUSE(!strcmp(f->prompt, "-") && !*f->from, \
       "--prompt - reads prompts for a model that is there already\n" \
       "  -> ./train_gpt --from RUN --prompt -, when the run has ended") \
REFUSE(*f->from && *f->out, "--from only evaluates or samples and writes no run\n  -> leave out --out; to train on: --out RUN --resume required") \
REFUSE(f->skip_spikes && !f->spike_z, "--skip-spikes needs to know what a spike is\n  -> --spike-z 10") \
REFUSE(f->keep_every && !f->keep_last, "--keep-every adds to the newest checkpoints that stay, and without --keep-last all do\n  -> --keep-last 1 --keep-every %lld", (long long)f->keep_every) \
REFUSE(f->resume && !*f->out, "--resume needs the run's folder\n  -> --out RUN")

static inline void run_refuse(const FlagSet *set, const Mode *r, const char *device, const char *precision) {
    const Flags *f = &set->f;
#define REFUSE(condition, ...) CHECK(!(condition), __VA_ARGS__);
    REFUSAL_TABLE(REFUSE)
#undef REFUSE
    int64_t end = schedule_end(f);
    if (!*f->from && f->steps && f->warmup >= end) printf("note: the warmup (%lld steps) fills the schedule (%lld): the rate never falls\n  -> a smaller --warmup\n", (long long)f->warmup, (long long)end);
}
#undef user

static inline Model model_from_flags(const Flags *f, const Mode *mode) {
    Model m;
    memset(&m, 0, sizeof m);
    m.mode = mode;
    m.sdd = &SDDS[f->sdd];
    m.L = (int)f->layers;
    m.C = (int)f->width;
    m.NH = (int)f->heads;
    m.KV = (int)(f->kv_heads ? f->kv_heads : f->heads);
    m.HS = m.C / m.NH;
    m.V = f->vocab ? (int)f->vocab : CORPUS_VOCAB;
    m.Vp = CEIL_DIV(m.V, 128) * 128;
    m.T = (int)f->seq;
    m.layernorm = f->norm;
    m.bias = f->bias && !mode->sdd && !mode->unit;
    m.rope = f->positions == POSITIONS_ROPE;
    m.swiglu = f->activation == ACTIVATION_SWIGLU;
    m.F = f->ffn ? (int)f->ffn : m.swiglu ? CEIL_DIV(8 * m.C / 3, 32) * 32 : 4 * m.C;
    m.kv_rank = (int)f->kv_rank;
    m.rope_size = m.kv_rank ? (int)f->rope_size : 0;
    if (f->experts) {
        int dense = (int)(f->dense_ffn ? f->dense_ffn : (f->experts_per_token + f->shared_experts) * m.F);
        Moe moe = {(int)f->experts, (int)f->experts_per_token, (int)f->dense_layers, dense, (int)f->shared_experts * m.F, f->router, f->router_losses,
                   f->router_scale, f->balance_loss, f->sequence_loss, f->router_z_loss, f->balance_rate};
        m.moe = moe;
    }
    m.tied = f->tied;
    m.fin = f->final_norm == FINAL_NORM_AUTO ? mode->fin : f->final_norm == FINAL_NORM_ON;
    m.theta = f->rope_theta;
    m.eps = f->eps;
    m.emb_scale = f->emb_scale ? sqrt((double)m.C) : 1;
    m.mix_ratio = f->mix_ratio;
    return m;
}

static inline Init init_from_flags(const Flags *f, const Mode *mode) {
    Init init = {f->init ? f->init - 1 : mode->init == INIT_BASELINE ? f->init_baseline : mode->init, f->init_std, (uint64_t)f->seed};
    return init;
}

static inline void flags_default(FlagSet *set) {
    memset(set, 0, sizeof *set);
    for (int i = 0; i < FLAG_COUNT; i++) flag_set(set, &FLAGS[i], FLAGS[i].def, BY_DEFAULT);
}

static inline void flags_preset(FlagSet *set, const char *name) {
    int i = 0;
    Nearest near = nearest_begin(name);
    for (int k = 0; k < PRESET_COUNT; k++) nearest_add(&near, PRESETS[k].name, PRESETS[k].name);
    while (i < PRESET_COUNT && strcmp(PRESETS[i].name, name)) i++;
    CHECK(i < PRESET_COUNT, "no model named %s\n  -> %s./train_gpt --show models lists them", name,
          near.text);
    flags_parse_text(set, PRESETS[i].flags, BY_PRESET);
    flag_set(set, &FLAGS[FLAG_model], name, BY_PRESET);
}

// ------------------------------------------------------------------------------------------------------------------ config.json

// The last lines of a config.json: a checksum of the bytes before them, to its closing brace.
static inline const char *config_end(char buf[64], const char *text, size_t n) {
    Hash hash = hash_begin();
    hash_add(&hash, text, n);
    unsigned long long sum = hash_end(&hash);
    return check_format(buf, 64, ",\n  \"xxh64\": \"%016llx\"\n}\n", sum);
}

static inline char *config_text(const Flags *f, const Model *m, const Layout *layout, const Init *init, const Trainer *t, double unigram) {
    char *text = NULL, buf[64];
    size_t n = 0;
    FILE *file = text_begin(&text, &n, "config.json");
    fprintf(file, "{\n  \"norm_c_version\": %d,\n  \"norm_mode\": \"%s\",\n  \"precision\": \"%s\",\n  \"git\": \"%s\",\n  \"parameters\": %lld,\n  \"active_parameters\": %lld,\n  \"flops_per_token\": %.0f,\n  \"initialization\": \"%s\",\n  \"unigram_entropy\": ", CONFIG_VERSION,
            m->mode->name, t->precision, t->commit, (long long)show_parameters(m, layout, false), (long long)show_parameters(m, layout, true), show_flops(m, layout), INITS[init->scheme].name);
    json_write_number(file, unigram);
    fprintf(file, ",\n  \"flags\": {\n");
    for (int i = 0, first = 1; i < FLAG_COUNT; i++) {
        if (FLAGS[i].resume == ONCE) continue;
        fprintf(file, "%s    \"%s\": ", first ? "" : ",\n", FLAGS[i].field);
        json_write_string(file, flag_text(buf, sizeof buf, f, &FLAGS[i]));
        first = 0;
    }
    fprintf(file, "\n  }");
    fflush(file);
    text_end(file, config_end(buf, text, n), "config.json");
    return text;
}

// The placement that a config.json names must be this program's.
static inline void config_check_mode(const Json *root, const char *path, const Trainer *t) {
    const char *mode = json_get_string(root, "norm_mode", path), *is = t->mode->name;
    CHECK(!strcmp(mode, is), "%s: a run of %s, this program is %s\n"
          "  -> make train_gpt NORM_MODE=%s", path, mode, is, mode);
}

// The "flags" of a config.json. In one written by hand (--config) values may be numbers, and flags
// of one command alone are refused, which are otherwise passed over.
static inline void config_read_flags(FlagSet *set, const Json *root, const char *path,
                                     bool by_hand) {
    char number[64];
    const Json *flags = json_need(root, "flags", JSON_OBJECT, path);
    for (const Json *v = flags->first; v; v = v->next) {
        int i = 0;
        while (i < FLAG_COUNT && strcmp(FLAGS[i].field, v->key)) i++;
        Nearest near = nearest_begin(v->key);
        for (int k = 0; k < FLAG_COUNT; k++) nearest_add(&near, FLAGS[k].field, FLAGS[k].field);
        CHECK(i < FLAG_COUNT, "%s: unknown flag \"%s\"\n  -> %suse the norm.c that wrote the file",
              path, v->key, near.text);
        bool is_number = by_hand && (v->kind == JSON_INT || v->kind == JSON_REAL);
        const char *text = is_number ? check_format(number, sizeof number, "%.17g", v->number)
                                     : json_get_string(flags, v->key, path);
        CHECK(!by_hand || FLAGS[i].resume != ONCE, "%s: \"%s\" is of one command and not of a run\n"
              "  -> leave it out, and give it on the command line", path, v->key);
        if (FLAGS[i].resume != ONCE) flag_set(set, &FLAGS[i], text, BY_CHECKPOINT);
    }
}

// A config.json, parsed: it has a known version, its checksum holds, and its mode is this
// program's. Files of version 1 have no checksum.
static inline Json *config_open(const char *path, const Trainer *t) {
    size_t n;
    char *text = file_read(path, JSON_MOST, &n), end[64], run[PATH_CAP];
    CHECK(text, "cannot read %s: %s\n  -> check the path", path, strerror(errno));
    Json *root = json_parse(text, n, path);
    int64_t version = json_get_int(root, "norm_c_version", path);
    CHECK(version <= CONFIG_VERSION,
          "%s: written by version %lld of the format, this program knows up to %d\n"
          "  -> use a newer norm.c", path, (long long)version, CONFIG_VERSION);
    if (version > 1 || json_get(root, "xxh64")) {
        const char *tail = strrchr(text, ',');
        bool whole = tail && !strcmp(tail, config_end(end, text, (size_t)(tail - text)));
        CHECK(whole,
              "%s: its text does not match its checksum (xxh64): edited or damaged\n"
              "  -> restore it: cp \"$(ls -d %s/step_* | tail -n 1)/config.json\" %s/; "
              "to change a value, give its flag on the command line",
              path, file_parent(run, path), run);
    }
    config_check_mode(root, path, t);
    free(text);
    return root;
}

// The flags of an earlier run, or of a checkpoint, become the base. Returns whether its precision
// is the other one of fp32 and bf16: both keep their weights in fp32.
static inline bool config_read(FlagSet *set, const char *path, const Trainer *t) {
    const char *precision = t->precision;
    Json *root = config_open(path, t);
    const char *was = json_get_string(root, "precision", path);
    bool other = strcmp(was, precision) != 0;
    bool fp64 = !strcmp(was, "fp64") || !strcmp(precision, "fp64");
    CHECK(!other || !fp64, "%s: a run in %s, this program computes in %s\n"
          "  -> make train_gpt NORM_MODE=%s PREC=%s", path, was, precision, t->mode->name,
          was);
    config_read_flags(set, root, path, false);
    json_free(root);
    return other;
}

// --init-from FOLDER, a run or a checkpoint: the new run's model is the one in its config.json.
// Flags that only shape the training (losses of routers, --seq) stay free; a flag of the model that
// says otherwise, on the command line or by --model, is refused.
static inline void config_init_from(FlagSet *set, const FlagSet *given, const Trainer *t) {
    char path[PATH_CAP], is[64], was[64], name[64];
    const char *folder = given->f.init_from;
    if (!is_folder(folder)) return;
    Json *root = config_open(check_format(path, sizeof path, "%s/config.json", folder), t);
    FlagSet theirs;
    flags_default(&theirs);
    config_read_flags(&theirs, root, path, false);
    json_free(root);
    for (int i = FLAG_model + 1; i < FLAG_init; i++) {
        bool is_free = i == FLAG_seq || (i >= FLAG_balance_loss && i <= FLAG_balance_rate);
        const FlagRow *row = &FLAGS[i];
        bool by_model = given->by[FLAG_model] == BY_USER && set->by[i] == BY_PRESET;
        bool by_given = given->by[i] >= BY_CHECKPOINT;
        const char *a = flag_text(is, sizeof is, &theirs.f, row);
        const char *b = flag_text(was, sizeof was, by_given ? &given->f : &set->f, row);
        flag_name(name, sizeof name, row);
        CHECK(is_free || !strcmp(a, b) || (!by_model && !by_given),
              "%s is %s in %s and %s %s\n  -> leave it out", name, a, folder, b,
              !by_given ? "by --model" : given->by[i] == BY_USER ? "on the command line"
                                                                 : "in --config");
        flag_set(set, row, a, BY_PRESET);
    }
}

// --config: the flags of a run's config.json, or of one written by hand.
static inline void config_begin(FlagSet *given, const char *path, const Trainer *t) {
    Json *root = json_read_file(path);
    if (json_get(root, "norm_mode")) config_check_mode(root, path, t);
    config_read_flags(given, root, path, true);
    json_free(root);
}

// The command line over that base, with --config below it: what may not change must not. Reading a
// model (--from) pins the model alone, and not its --seq. A run that goes on has its own values of
// what may change, whatever --config says.
static inline void flags_override(FlagSet *set, const FlagSet *given, bool resuming) {
    char was[64], now[64], name[64];
    bool reading = *given->f.from;
    for (int i = 0; i < FLAG_COUNT; i++) {
        const FlagRow *row = &FLAGS[i];
        bool file = given->by[i] == BY_CHECKPOINT;
        if (given->by[i] != BY_USER && (!file || (resuming && row->resume == FREE))) continue;
        const char *a = flag_text(was, sizeof was, &set->f, row);
        const char *b = flag_text(now, sizeof now, &given->f, row);
        flag_name(name, sizeof name, row);
        bool pinned = (resuming && row->resume == FIXED) || (reading && i < FLAG_init && i != FLAG_seq);
        CHECK(!pinned || !strcmp(a, b), "%s is %s in this run and %s %s; it may not change\n"
              "  -> leave %s out, or start another run with another --out", name, a, b,
              file ? "in --config" : "on the command line", name);
        flag_set(set, row, b, given->by[i]);
    }
    // A model read with other data is not validated on the old run's.
    if (reading && given->by[FLAG_data] == BY_USER && given->by[FLAG_val_data] != BY_USER) flag_set(set, &FLAGS[FLAG_val_data], "", BY_DEFAULT);
}

// The checkpoint directory of a run (its newest whole one), or the checkpoint itself.
static inline void checkpoint_find(const char *path, char *dir) {
    char config[PATH_CAP], why[256];
    check_format(config, sizeof config, "%s/manifest.json", path);
    if (file_exists(config)) {
        check_format(dir, PATH_CAP, "%s", path);
        CHECK(checkpoint_verify(dir, why, sizeof why), "%s is damaged: %s\n  -> use another checkpoint of that run", dir, why);
        return;
    }
    CHECK(is_folder(path), "%s: expected the folder of a run or of a checkpoint\n  -> ls runs/", path);
    CHECK(checkpoint_latest(path, INT64_MAX, dir), "%s holds no checkpoint\n  -> train with --save-every, or give another run", path);
}

// Whether --out holds a run, and whether that may be: nothing is ever overwritten.
static inline bool run_found(const char *out, int resume) {
    char config[PATH_CAP], log[PATH_CAP], run[PATH_CAP];
    CHECK(!file_exists(out) || is_folder(out), "--out %s is a file\n  -> another --out", out);
    CHECK(!file_exists(check_format(config, sizeof config, "%s/manifest.json", out)), "--out %s is a checkpoint of the run %s; nothing was overwritten\n  -> --out %s --resume auto goes on with that run, --from %s only reads the checkpoint",
          out, file_parent(run, out), run, out);
    check_format(config, sizeof config, "%s/config.json", out);
    check_format(log, sizeof log, "%s/log.jsonl", out);
    bool whole = file_exists(config), found = whole || file_exists(log) || checkpoint_step_below(out, INT64_MAX) >= 0;
    CHECK(!found || resume, "%s already holds a run; nothing was overwritten\n  -> --resume auto goes on with it, another --out begins anew, --from %s --sample N only reads it", out, out);
    CHECK(!found || whole,
          "%s holds a run without its config.json; nothing was overwritten\n"
          "  -> copy it from a checkpoint: cp \"$(ls -d %s/step_* | tail -n 1)/config.json\" %s/",
          out, out, out);
    return found;
}

// Command line -> flags. Later wins: defaults, the preset, the run that is continued or read,
// --config, the command line.
// Returns whether there is a checkpoint to go on from; a run killed before its first one begins again, with its own flags.
static inline bool flags_resolve(FlagSet *set, const Trainer *t, int argc, char **argv) {
    FlagSet given;
    char dir[PATH_CAP], config[PATH_CAP] = "", buf[64];
    flags_default(&given);
    flags_parse(&given, argc - 1, argv + 1, BY_USER);
    if (*given.f.config) {                                 // below the command line and its --model
        FlagSet user = given;
        config_begin(&given, user.f.config, t);
        if (user.by[FLAG_model] == BY_USER) flags_preset(&given, user.f.model);
        for (int i = 0; i < FLAG_COUNT; i++) {
            const char *text = flag_text(buf, sizeof buf, &user.f, &FLAGS[i]);
            if (user.by[i] == BY_USER) flag_set(&given, &FLAGS[i], text, BY_USER);
        }
    }
    flags_default(set);
    flags_preset(set, given.f.model);
    if (t->mode->unit) flags_parse_text(set, "--warmup 0 --weight-decay 0", BY_PRESET);     // nGPT section 2.6: normalized matrices need neither
    bool found = false, resuming = false;
    if (*given.f.from) {
        checkpoint_find(given.f.from, dir);
        check_format(config, sizeof config, "%s/config.json", dir);
    } else if (*given.f.out && !*given.f.show) {
        found = run_found(given.f.out, given.f.resume);
        if (found) check_format(config, sizeof config, "%s/config.json", given.f.out);
        resuming = found && checkpoint_step_below(given.f.out, INT64_MAX) >= 0;
        CHECK(resuming || given.f.resume != RESUME_REQUIRED, "%s holds no checkpoint to resume from\n  -> --resume auto begins anew", given.f.out);
        if (found && !resuming) printf("resume: %s has no checkpoint yet; beginning again at step 0\n", given.f.out);
    }
    if (*config && config_read(set, config, t)) printf("note: a run in %s goes on in %s\n", strcmp(t->precision, "fp32") ? "fp32" : "bf16", t->precision);
    if (!found && *given.f.init_from) config_init_from(set, &given, t);
    int64_t end = schedule_end(&set->f);
    flags_override(set, &given, found);
    if (*given.f.out && given.f.resume && !found) printf("resume: no run in %s yet; a new one begins: %s on %s\n", given.f.out, set->f.model, *set->f.data ? set->f.data : "the built-in stories");
    if (resuming && schedule_end(&set->f) != end)
        printf("note: the schedule now ends at step %lld, not %lld, and the rate follows it\n  -> --schedule-steps %lld keeps it as it was\n", (long long)schedule_end(&set->f), (long long)end, (long long)end);
    return resuming;
}
