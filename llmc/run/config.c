// config.c: from the command line to flags, model and config.json. Read it from its end:
// flags_resolve merges the sources of flags, later over earlier. Refusals name both flags with
// their values, as typed, and end in the flag or command that helps. Nothing is written here.
#include "run.h"
#include "json.h"

// ---------------------------------------------------------------------------- refusals

enum { PLACEMENT = FLAG_COUNT };              // stands for NORM_MODE where a flag is expected

// A flag and its value as they would be typed (1e-3 and 0.001 are the same), or the placement.
static const char *typed(char text[PATH_CAP], const Flags *f, const Mode *mode, int flag) {
    char name[FLAG_CAP], buf[FLAG_CAP];
    if (flag == PLACEMENT) return check_format(text, PATH_CAP, "NORM_MODE=%s", mode->name);
    const char *value = flag_text(buf, f, &FLAGS[flag]);
    return check_format(text, PATH_CAP, "%s %s", flag_name(name, &FLAGS[flag]),
                        *value ? value : "\"\"");
}

// Refuses flags that contradict another flag or the placement. Each row has the condition, both
// flags and what to do. Values outside a flag's own range were refused before (flag_set).
static void refuse_pairs(const FlagSet *set, const Mode *mode) {
    const Flags *f = &set->f;
    int64_t heads = f->heads, latent = f->kv_rank, E = f->experts, K = f->experts_per_token;
    int64_t micro = f->micro_batch, tokens = (micro ? micro : f->batch) * f->seq;
    bool own = f->head_size, odd = (own ? f->head_size : f->width / heads) % 2;
    bool rope = f->positions == POSITIONS_ROPE, fewer = f->kv_heads && f->kv_heads != heads;
    bool from = *f->from;
    // A user's --micro-batch must divide the batch, and so must one over which the balance loss is
    // defined. Any other one may leave a smaller last micro-batch.
    bool divides = micro && (set->by[FLAG_micro_batch] == BY_USER || (E && f->balance_loss > 0));
    // The widths of a token's experts add up to the width of one row, an int. 2^24 leaves room for
    // [gate | up]. Without --ffn the larger default counts, 4 times the width.
    bool wide = (K + f->shared_experts) * (f->ffn ? f->ffn : 4 * f->width) > 1 << 24;
    const struct { bool found; int flag, other; const char *hint; } rows[] = {
        {!own && f->width % heads, FLAG_heads, FLAG_width,
         "a divisor of the width, or --head-size"},
        {fewer && heads % f->kv_heads, FLAG_kv_heads, FLAG_heads, "a divisor of the heads"},
        // RoPE turns pairs of channels; latent attention has rotary channels of its own.
        {!latent && rope && odd, own ? FLAG_head_size : FLAG_heads,
         own ? FLAG_positions : FLAG_width,
         "an even head size (width / heads), or --positions learned"},
        // MLA keeps one latent a token in place of keys and values (DeepSeek-V2, arXiv 2405.04434).
        {latent && fewer, FLAG_kv_rank, FLAG_kv_heads,
         "--kv-heads 0: latent attention makes keys and values for every head"},
        {latent && f->bias, FLAG_kv_rank, FLAG_bias,
         "--bias off: latent attention has no biases"},
        {latent && !rope, FLAG_kv_rank, FLAG_positions,
         "--positions rope: latent attention has no others"},
        {latent && f->rope_size % 2, FLAG_kv_rank, FLAG_rope_size,
         "an even --rope-size: RoPE rotates pairs of channels"},
        // nGPT: the gain s_qk, which q and k share, has a value for every channel of every head.
        {mode->unit && fewer, FLAG_kv_heads, PLACEMENT,
         "--kv-heads 0: q and k of a head share their gain"},
        {mode->unit && !rope, FLAG_positions, PLACEMENT, "--positions rope"},
        {mode->unit && f->decay_gains == GAINS_TO_ONE, FLAG_decay_gains, PLACEMENT,
         "--decay-gains off: nGPT's gains are not around one"},
        // A preset's --bias is silently dropped (model_from_flags), a user's is refused.
        {(mode->sdd || mode->unit) && f->bias && set->by[FLAG_bias] == BY_USER, FLAG_bias,
         PLACEMENT, "--bias off: SDD and nGPT have no biases"},
        {mode->unit && f->norm == NORM_DYT, FLAG_norm, PLACEMENT,
         "--norm rms: nGPT scales to length 1 in place of norms"},
        {mode->fin && f->final_norm == FINAL_NORM_OFF, FLAG_final_norm, PLACEMENT,
         "--final-norm auto: without it the LM head reads a stream that has no norm"},
        {E && K > E, FLAG_experts_per_token, FLAG_experts, "at most as many as there are"},
        {E && f->dense_layers >= f->layers, FLAG_dense_layers, FLAG_layers,
         "fewer, so that a layer has experts, or --experts 0"},
        {E && f->bias == BIAS_ON, FLAG_experts, FLAG_bias, "--bias off: experts have no biases"},
        {E && wide, FLAG_experts_per_token, FLAG_ffn,
         "a smaller --ffn, or fewer experts: those of a token may be 2^24 wide together"},
        {divides && f->batch % micro, FLAG_micro_batch, FLAG_batch, "a divisor of the batch"},
        // Kernels index rows of a micro-batch with 32 bits.
        {tokens * (E ? K : 1) > INT32_MAX, micro ? FLAG_micro_batch : FLAG_batch, FLAG_seq,
         "a --micro-batch of less than 2^31 tokens, each counted once per expert"},
        // Loads too, one for each sequence and expert.
        {(tokens / f->seq + 1) * E > INT32_MAX, micro ? FLAG_micro_batch : FLAG_batch, FLAG_experts,
         "a smaller --micro-batch"},
        // With --steps alone this is a short trial, and only noted (run_refuse).
        {f->schedule_steps && f->schedule_steps < f->warmup, FLAG_schedule_steps, FLAG_warmup,
         "a longer schedule or a shorter warmup"},
        // --from reads a run, and trains and writes nothing.
        {from && !f->eval && !f->sample, FLAG_from, FLAG_sample, "--eval, or --sample TOKENS"},
        {from && *f->config, FLAG_from, FLAG_config, "leave out --config, which begins a run"},
        {from && set->by[FLAG_init_from] == BY_USER, FLAG_from, FLAG_init_from,
         "leave out --init-from"},
        {from && *f->out, FLAG_from, FLAG_out,
         "leave out --out: no run is written; to continue training: --out RUN --resume required"},
        {f->skip_spikes && !f->spike_z, FLAG_skip_spikes, FLAG_spike_z, "--spike-z 10"},
        {f->keep_every && !f->keep_last, FLAG_keep_every, FLAG_keep_last,
         "--keep-last 1: with 0 all checkpoints are kept"},
    };
    char flag[PATH_CAP], other[PATH_CAP];
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        CHECK(!rows[i].found, "%s does not go with %s\n  -> %s",
              typed(flag, f, mode, rows[i].flag), typed(other, f, mode, rows[i].other),
              rows[i].hint);
}

// Refuses flags of the user that need another flag or another build. A row names the flags from
// `first` to `last` of flags.h. A preset or a run may have them: one recipe serves several
// placements and devices.
static void refuse_useless(const FlagSet *set, const Trainer *t) {
    char flag[PATH_CAP], schedule[PATH_CAP];
    const Flags *f = &set->f;
    const Mode *mode = t->mode;
    const char *prec = t->precision;
    typed(schedule, f, mode, FLAG_schedule);
    const struct { bool useless; int first, last; const char *needed, *found; } rows[] = {
        {f->rope_factor == 1, FLAG_rope_original, FLAG_rope_original, "--rope-factor N",
         "--rope-factor 1"},
        {!f->kv_rank, FLAG_rope_size, FLAG_rope_size, "--kv-rank N", "--kv-rank 0"},
        {!f->experts, FLAG_experts_per_token, FLAG_balance_rate, "--experts N", "--experts 0"},
        {!f->dense_layers, FLAG_dense_ffn, FLAG_dense_ffn, "--dense-layers N", "--dense-layers 0"},
        {f->positions == POSITIONS_ROPE, FLAG_restart_positions, FLAG_restart_positions,
         "--positions learned", "--positions rope"},
        {!f->mask_documents, FLAG_restart_positions, FLAG_restart_positions, "--mask-documents on",
         "--mask-documents off"},
        {f->schedule != SCHEDULE_WSD, FLAG_decay_part, FLAG_decay_part, "--schedule wsd", schedule},
        {!f->width_base, FLAG_width_power, FLAG_width_power, "--width-base N", "--width-base 0"},
        {f->optimizer != OPTIMIZER_MUON, FLAG_muon_lr, FLAG_muon_scale, "--optimizer muon",
         "--optimizer adamw"},
        {f->eval && !*f->from, FLAG_eval, FLAG_eval, "--from RUN", "no --from"},
        {!*f->from && !strcmp(f->prompt, "-"), FLAG_prompt, FLAG_prompt, "--from RUN", "no --from"},
        {f->resume && !*f->out, FLAG_resume, FLAG_resume, "--out RUN", "no --out"},
        {f->norm != NORM_DYT, FLAG_dyt_alpha, FLAG_dyt_alpha, "--norm dyt",
         f->norm ? "--norm layer" : "--norm rms"},
        {!mode->sdd, FLAG_sdd, FLAG_sdd, "NORM_MODE=SDD (or SDD_PRE)", mode->name},
        {!mode->early, FLAG_mix_ratio, FLAG_mix_ratio, "NORM_MODE=MIX_LN", mode->name},
        {!on_gpu(t), FLAG_tf32, FLAG_graph, "DEVICE=cuda", t->device},
        {f->tf32 && strcmp(prec, "fp32"), FLAG_tf32, FLAG_tf32, "PREC=fp32", prec},
        {f->rounding && strcmp(prec, "bf16"), FLAG_rounding, FLAG_rounding, "PREC=bf16", prec},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (int k = rows[i].first; rows[i].useless && k <= rows[i].last; k++)
            CHECK(set->by[k] != BY_USER,
                  "%s needs %s, found %s\n  -> leave it out, or %s%s",
                  typed(flag, f, mode, k), rows[i].needed, rows[i].found,
                  *rows[i].needed == '-' ? "" : "make train_gpt ", rows[i].needed);
}

// This runs after all sources of flags are merged: a preset or a run may contradict the user too.
// A warmup that fills the schedule is allowed, with a note.
void run_refuse(const FlagSet *set, const Trainer *t) {
    const Flags *f = &set->f;
    refuse_useless(set, t);
    refuse_pairs(set, t->mode);
    if (!*f->from && f->steps && f->warmup >= schedule_end(f))
        printf("note: the warmup of %lld steps fills the schedule of %lld: the learning rate never "
               "falls\n  -> a smaller --warmup\n", f->warmup, schedule_end(f));
}

// ---------------------------------------------------------------------------- flags to model

Model model_from_flags(const Flags *f, const Mode *mode) {
    int64_t C = f->width, V = f->vocab ? f->vocab : CORPUS_VOCAB;
    int64_t K = f->experts_per_token, shared = f->shared_experts;
    bool swiglu = f->activation == ACTIVATION_SWIGLU;
    // SwiGLU has three matrices, GELU two: 8/3 and 4 times the width give as many parameters.
    int64_t F = swiglu ? CEIL_DIV(8 * C / 3, 32) * 32 : 4 * C;
    if (f->ffn) F = f->ffn;
    Model m = {
        .mode = mode,
        .sdd = &SDDS[f->sdd],
        .L = f->layers,
        .C = C,
        .NH = f->heads,
        .KV = f->kv_heads ? f->kv_heads : f->heads,
        .HS = f->head_size ? f->head_size : C / f->heads,
        .F = F,
        .V = V,
        .Vp = CEIL_DIV(V, 128) * 128,         // the head's product has whole tiles
        .T = f->seq,
        .kv_rank = f->kv_rank,
        .rope_size = f->kv_rank ? f->rope_size : 0,
        .norm = f->norm,
        .dyt_alpha = f->dyt_alpha,
        .bias = mode->sdd || mode->unit ? BIAS_OFF : f->bias,
        .rope = f->positions == POSITIONS_ROPE,
        .swiglu = swiglu,
        .tied = f->tied,
        .fin = f->final_norm == FINAL_NORM_AUTO ? mode->fin : f->final_norm == FINAL_NORM_ON,
        .theta = f->rope_theta,
        .rope_factor = f->rope_factor,
        .rope_original = f->rope_original,
        .eps = f->eps,
        .emb_scale = f->emb_scale ? sqrt(C) : 1,
        .mix_ratio = f->mix_ratio,
    };
    // Mixture of experts: F is the width of each expert. By default a dense layer is as wide as all
    // experts of one token together.
    if (f->experts) m.moe = (Moe){
        .E = f->experts,
        .K = K,
        .dense = f->dense_layers,
        .dense_F = f->dense_ffn ? f->dense_ffn : (K + shared) * F,
        .shared_F = shared * F,
        .router = f->router,
        .losses = f->router_losses,
        .scale = f->router_scale,
        .balance = f->balance_loss,
        .sequence = f->sequence_loss,
        .z = f->router_z_loss,
        .bias_rate = f->balance_rate,
    };
    return m;
}

// --init auto: the placement's own initialization, else --init-baseline.
Init init_from_flags(const Flags *f, const Mode *mode) {
    int own = mode->init ? init_find(mode->init) : f->init_baseline;
    // Choice 0 of --init is auto; the others are the rows of INIT_TABLE.
    return (Init){f->init ? f->init - 1 : own, f->init_std, f->seed};
}

// ---------------------------------------------------------------------------- config.json

// A command for hints: copies config.json from the newest checkpoint. Both %s are the run's folder.
#define RESTORE "cp \"$(ls -d %s/step_* | tail -n 1)/config.json\" %s/"

// The last lines of a config.json: a checksum of the bytes before them, and its closing brace.
static const char *config_end(char buf[64], const char *text, size_t n) {
    unsigned long long hash = hash_bytes(text, n);
    return check_format(buf, 64, ",\n  \"xxh64\": \"%016llx\"\n}\n", hash);
}

// {"norm_c_version": 2, "norm_mode": "SPAN", "precision": "fp32", ..., "flags": {"model": ...},
// "xxh64": "..."}. Flags of one command (ONCE) are left out, so the same run has the same text.
char *run_config(const Run *r) {
    const Model *m = &r->m;
    char *text, buf[64];
    const char *before = "{";
    size_t n = 0;
    FILE *file = text_begin(&text, &n);
    fprintf(file,
            "{\n  \"norm_c_version\": %d,\n  \"norm_mode\": \"%s\",\n  \"precision\": \"%s\",\n"
            "  \"git\": \"%s\",\n  \"parameters\": %.0f,\n  \"active_parameters\": %.0f,\n"
            "  \"flops_per_token\": %.0f,\n  \"initialization\": \"%s\",\n  \"unigram_entropy\": ",
            CONFIG_VERSION, m->mode->name, r->t->precision, r->t->commit,
            parameter_count(m, &r->layout, false), parameter_count(m, &r->layout, true),
            flops_per_token(m, &r->layout), INITS[r->init.scheme].name);
    json_write_number(file, r->unigram);
    fprintf(file, ",\n  \"flags\": ");
    for (const FlagRow *row = FLAGS; row < FLAGS + FLAG_COUNT; row++) {
        if (row->resume == ONCE) continue;
        fprintf(file, "%s\n    \"%s\": ", before, row->field);
        json_write_string(file, flag_text(buf, r->f, row));
        before = ",";
    }
    fprintf(file, "\n  }");
    fflush(file);                             // brings text and n up to date
    text_end(file, config_end(buf, text, n));
    return text;
}

// A placement is compiled in: another one needs another program.
static void check_mode(const Json *root, const char *path, const Mode *mode) {
    const char *was = json_get_string(root, "norm_mode", path);
    CHECK(!strcmp(was, mode->name),
          "%s: expected a run of NORM_MODE=%s, found %s\n  -> make train_gpt NORM_MODE=%s", path,
          mode->name, was, was);
}

// Reads the "flags" of a config.json. A file written by hand (--config) may have numbers as values.
// Flags of one command (ONCE) are refused in it, and ignored in a run's file.
static void config_read_flags(FlagSet *set, const Json *root, const char *path, bool by_hand) {
    char number[64];
    const Json *flags = json_need(root, "flags", JSON_OBJECT, path);
    for (const Json *v = flags->first; v; v = v->next) {
        const FlagRow *row = flag_find(v->key, path, "./train_gpt --help lists all flags; a run "
                                       "needs the version of norm.c that wrote it");
        // %.17g gives back every double.
        bool is_number = by_hand && (v->kind == JSON_INT || v->kind == JSON_REAL);
        const char *text = is_number ? check_format(number, sizeof number, "%.17g", v->number)
                                     : json_get_string(flags, v->key, path);
        // An --out in a file would send every run to one folder.
        CHECK(!by_hand || row->resume != ONCE,
              "%s: expected flags of a run, found \"%s\"\n"
              "  -> give it on the command line instead", path, v->key);
        if (row->resume != ONCE) flag_set(set, row, text, BY_CHECKPOINT);
    }
}

// Sets the flags of a config.json, and returns it parsed, with its version, checksum and mode
// checked. Version 1 has no checksum.
static Json *config_open(FlagSet *set, const char *path, const Mode *mode) {
    char *text, end[64], run[PATH_CAP];
    Json *root = json_read_file(path, &text);
    long long version = json_get_int(root, "norm_c_version", path);
    CHECK(version <= CONFIG_VERSION,
          "%s: expected a version of the format up to %d, found %lld\n  -> use a newer norm.c",
          path, CONFIG_VERSION, version);
    if (version > 1 || json_get(root, "xxh64")) {
        // The checksum is the last member and covers the text before its comma.
        char *tail = strrchr(text, ',');
        CHECK(tail && !strcmp(tail, config_end(end, text, tail - text)),
              "%s: its text does not match its checksum (xxh64): it was edited or damaged\n"
              "  -> restore it: " RESTORE "; to change a value, give its flag on the command line",
              path, file_parent(run, path), run);
    }
    free(text);
    check_mode(root, path, mode);
    config_read_flags(set, root, path, false);
    return root;
}

// A run in fp64 continues only in fp64: its weights on disk are doubles.
bool config_read(FlagSet *set, const char *path, const Trainer *t) {
    Json *root = config_open(set, path, t->mode);
    const char *was = json_get_string(root, "precision", path);
    bool other = strcmp(was, t->precision) != 0;
    bool fp64 = !strcmp(was, "fp64") || !strcmp(t->precision, "fp64");
    CHECK(!other || !fp64, "%s: expected a run in %s, found %s\n"
          "  -> make train_gpt NORM_MODE=%s PREC=%s", path, t->precision, was, t->mode->name, was);
    json_free(root);
    return other;
}

// ---------------------------------------------------------------------------- which flag wins

// Refuses a flag that differs from its value in the run or model `where`.
static void check_same(int flag, const Flags *is, const char *where, const FlagSet *given) {
    static const char *const SOURCES[] = {"", "by --model", "in --config", "on the command line"};
    char was[PATH_CAP], now[PATH_CAP];
    CHECK(!strcmp(typed(was, is, NULL, flag), typed(now, &given->f, NULL, flag)),
          "%s in %s and %s %s; it may not change\n"
          "  -> leave the flag out, or begin another run (--out) without --from and --init-from",
          was, where, now, SOURCES[given->by[flag]]);
}

// The value goes through its text, so flag_set checks the copy as well.
static void flag_copy(FlagSet *set, int flag, const Flags *from, int by) {
    char value[FLAG_CAP];
    flag_set(set, &FLAGS[flag], flag_text(value, from, &FLAGS[flag]), by);
}

// Refuses flags of the model, of the command line, --config or --model, that differ from those of
// the weights. --seq and the losses of routers concern only training, and may differ.
void config_init_from(FlagSet *set, const FlagSet *given, const Trainer *t) {
    char path[PATH_CAP];
    const char *folder = given->f.init_from;
    // A model.safetensors alone names no flags.
    if (!file_exists(path_join(path, folder, "config.json"))) return;
    FlagSet theirs;
    flags_default(&theirs);
    json_free(config_open(&theirs, path, t->mode));
    for (int i = FLAG_model + 1; i < FLAG_init; i++) {
        bool is_free = i == FLAG_seq || (i >= FLAG_balance_loss && i <= FLAG_balance_rate);
        // The preset of a --model on the command line is already in set.
        bool by_model = given->by[FLAG_model] == BY_USER && set->by[i] == BY_PRESET;
        bool is_given = given->by[i] >= BY_CHECKPOINT;
        if (!is_free && (is_given || by_model))
            check_same(i, &theirs.f, folder, is_given ? given : set);
        flag_copy(set, i, &theirs.f, BY_PRESET);
    }
}

// --config: flags of a run's config.json, or of one written by hand. The command line and its
// --model override them.
static void config_begin(FlagSet *given, const Mode *mode, int argc, char **argv) {
    const char *path = given->f.config, *model = given->f.model;
    bool by_model = given->by[FLAG_model] == BY_USER;
    Json *root = json_read_file(path, NULL);
    // A file written by hand need not name a placement.
    if (json_get(root, "norm_mode")) check_mode(root, path, mode);
    flags_default(given);
    config_read_flags(given, root, path, true);
    json_free(root);
    if (by_model) flags_preset(given, model);
    // The command line was parsed once to find --config. Now it overrides that file.
    flags_parse(given, argc - 1, argv + 1, BY_USER);
}

// --from pins the flags of the model that is read, except --seq. A resumed run keeps its own values
// of the flags that may change, whatever --config says.
void flags_override(FlagSet *set, const FlagSet *given, bool found) {
    bool reading = *given->f.from;                         // set holds the flags of that run
    for (int i = 0; i < FLAG_COUNT; i++) {
        int by = given->by[i], resume = FLAGS[i].resume;
        // set already has the defaults and presets of `given`, and the run's flags over them.
        if (by < BY_CHECKPOINT || (by == BY_CHECKPOINT && found && resume == FREE)) continue;
        bool pinned = (found && resume == FIXED) || (reading && i < FLAG_init && i != FLAG_seq);
        if (pinned) check_same(i, &set->f, "this run", given);
        flag_copy(set, i, &given->f, by);
    }
    // With --data, a model that is read is not validated on the old run's --val-data.
    if (reading && given->by[FLAG_data] == BY_USER && given->by[FLAG_val_data] != BY_USER)
        flag_set(set, &FLAGS[FLAG_val_data], "", BY_DEFAULT);
}

// Whether a file of that name is in a folder.
static bool folder_has(const char *folder, const char *file) {
    char path[PATH_CAP];
    return file_exists(path_join(path, folder, file));
}

// A folder with a manifest is a checkpoint. Its checksums are verified before it is used.
const char *checkpoint_find(const char *path, char *dir) {
    char why[ERROR_CAP];
    if (folder_has(path, "manifest.json")) {
        CHECK(checkpoint_verify(path, why),
              "%s is damaged: %s\n  -> use another checkpoint of that run", path, why);
        return path;
    }
    CHECK(is_folder(path),
          "%s: expected the folder of a run or of a checkpoint, found none\n"
          "  -> ls runs/", path);
    CHECK(checkpoint_latest(path, dir),
          "%s holds no checkpoint\n  -> train with --save-every, or give another run", path);
    return dir;
}

// A log or a checkpoint without config.json is a damaged run: neither resumed nor overwritten.
bool run_found(const char *out, int resume) {
    char run[PATH_CAP];
    CHECK(!file_exists(out) || is_folder(out),
          "--out: expected a folder, or a new name for one; %s is a file\n  -> another --out", out);
    CHECK(!folder_has(out, "manifest.json"),
          "--out %s is a checkpoint of the run %s; nothing was overwritten\n"
          "  -> --out %s --resume auto continues that run, --from %s only reads the checkpoint",
          out, file_parent(run, out), run, out);
    bool whole = folder_has(out, "config.json");
    bool found =
        whole || folder_has(out, "log.jsonl") || checkpoint_step_below(out, INT64_MAX) >= 0;
    // Without --resume an existing run is safe from a repeated command.
    CHECK(!found || resume,
          "%s already holds a run; nothing was overwritten\n"
          "  -> --resume auto continues it, another --out begins anew, --from %s --sample N only "
          "reads it", out, out);
    CHECK(!found || whole,
          "%s holds a run without its config.json; nothing was overwritten\n"
          "  -> copy it from a checkpoint: " RESTORE "; or another --out", out, out, out);
    return found;
}

bool flags_resolve(FlagSet *set, const Trainer *t, int argc, char **argv) {
    FlagSet given;
    char dir[PATH_CAP], config[PATH_CAP];
    const char *base = NULL;                               // the run that is resumed or read
    bool found = false, resuming = false;
    flags_default(&given);
    flags_parse(&given, argc - 1, argv + 1, BY_USER);
    if (*given.f.config) config_begin(&given, t->mode, argc, argv);
    flags_default(set);
    flags_preset(set, given.f.model);
    // nGPT, section 2.6: normalized matrices need no warmup and no weight decay.
    if (t->mode->unit) flags_parse_text(set, "--warmup 0 --weight-decay 0", BY_PRESET);
    const Flags *f = &given.f;
    // The flags of the run that is read or resumed override the preset.
    if (*f->from) base = checkpoint_find(f->from, dir);
    else if (*f->out && !f->show) {
        found = run_found(f->out, f->resume);
        // A run killed before its first checkpoint is found and not resumed: its flags stay, and
        // its log begins again. --resume required refuses it.
        resuming = found && checkpoint_step_below(f->out, INT64_MAX) >= 0;
        CHECK(resuming || f->resume != RESUME_REQUIRED,
              "%s holds no checkpoint to resume from\n  -> --resume auto begins anew", f->out);
        if (found && !resuming)
            printf("resume: %s has no checkpoint yet; beginning again at step 0\n", f->out);
    }
    if (found) base = f->out;
    if (base && config_read(set, path_join(config, base, "config.json"), t))
        printf("note: the weights of a run in %s are used in %s\n",
               strcmp(t->precision, "fp32") ? "fp32" : "bf16",
               t->precision);
    // A resumed run read its --init-from when it began.
    if (!found && *f->init_from) config_init_from(set, &given, t);
    // The user's flags come last. If they move the end of the schedule, the learning rate of all
    // later steps changes.
    long long before = schedule_end(&set->f);
    flags_override(set, &given, found);
    long long end = schedule_end(&set->f);
    // The checkpoint that was found, even if the run writes another one meanwhile.
    if (*f->from) flag_set(set, &FLAGS[FLAG_from], base, BY_USER);
    // These notes reveal a mistyped --out or --steps.
    if (*f->out && f->resume && !found && !f->show)
        printf("resume: no run in %s yet; a new one begins: %s on %s\n", f->out, set->f.model,
               *set->f.data ? set->f.data : "the built-in stories");
    if (resuming && end != before)
        printf("note: the learning rate schedule now ends at step %lld, not at %lld\n"
               "  -> --schedule-steps %lld keeps it as it was\n", end, before, before);
    return resuming;
}
