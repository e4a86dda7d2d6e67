// flags.h: TABLE 4, one row per command-line flag. The row drives parsing (--lr=3e-4 and --lr 3e-4), --help, presets, the run's
// config.json, and what may change when a run is resumed.
#pragma once
#include <ctype.h>
#include <errno.h>
#include <stddef.h>
#include <strings.h>
#include <math.h>
#include "util.h"
#include "json.h"

typedef int64_t FlagINT;
typedef double FlagNUMBER;
typedef const char *FlagTEXT;
typedef int FlagCHOICE;                          // index into the choices
typedef int FlagSWITCH;                          // on | off
enum { INT, NUMBER, TEXT, CHOICE, SWITCH };
enum { FIXED, FREE, ONCE };                      // on resume: must be what it was | may change | belongs to one command, not to the run

// FLAG(field, kind, default, low, high, choices, on resume, help). The flag's name is the field's with '-' for '_'.
#define FLAG_TABLE(FLAG) \
/* the model */ \
FLAG(model,        TEXT,   "stories", 0, 0, "", FIXED, "named model, see --show models; other flags override its own") \
FLAG(layers,       INT,    "4",     1, 4096,    "", FIXED, "blocks") \
FLAG(width,        INT,    "128",   1, 1 << 20, "", FIXED, "channels of the stream") \
FLAG(heads,        INT,    "4",     1, 4096,    "", FIXED, "attention heads; must divide the width") \
FLAG(kv_heads,     INT,    "0",     0, 4096,    "", FIXED, "key/value heads; must divide the heads; 0: as many") \
FLAG(kv_rank,      INT,    "0",     0, 1 << 20, "", FIXED, "latent attention (MLA): width of the latent that keys and values are made from; 0: none") \
FLAG(rope_size,    INT,    "64",    2, 1 << 16, "", FIXED, "latent attention: rotary channels that a head of q and k has besides width / heads") \
FLAG(ffn,          INT,    "0",     0, 1 << 22, "", FIXED, "hidden width of the ffn, of each expert; 0: 4 width (GELU), 8/3 width up to a multiple of 32 (SwiGLU)") \
FLAG(experts,      INT,    "0",     0, 1 << 14, "", FIXED, "routed experts of a layer (mixture of experts); 0: the ffn is dense") \
FLAG(experts_per_token, INT, "2",   1, 1 << 14, "", FIXED, "experts that a token goes through") \
FLAG(shared_experts, INT,  "0",     0, 1 << 14, "", FIXED, "experts that every token goes through besides, as one ffn of so many times --ffn") \
FLAG(dense_layers, INT,    "0",     0, 4096,    "", FIXED, "leading layers whose ffn is dense") \
FLAG(dense_ffn,    INT,    "0",     0, 1 << 22, "", FIXED, "their hidden width; 0: that of the experts of a token, shared ones too") \
FLAG(router,       CHOICE, "softmax", 0, 0, "softmax|softmax-renorm|sigmoid", FIXED, "gates: softmax over all experts; the same, of the chosen ones divided by their sum; sigmoids divided by their sum") \
FLAG(router_scale, NUMBER, "1",     0, 1000, "", FIXED, "multiplies the gates") \
FLAG(balance_loss, NUMBER, "0.01",  0, 10, "", FIXED, "adds this times the load balance loss over a micro-batch (OLMoE: 0.01)") \
FLAG(sequence_loss, NUMBER, "0",    0, 10, "", FIXED, "adds this times the load balance loss over each sequence (DeepSeek-V3: 1e-4)") \
FLAG(router_z_loss, NUMBER, "0.001", 0, 10, "", FIXED, "adds this times the squared log-sum-exp of the router's logits (OLMoE: 0.001)") \
FLAG(router_losses, CHOICE, "mean", 0, 0, "mean|sum", FIXED, "over layers: mean, and the router's z-loss divided by the experts of a token (OLMoE); or sum (DeepSeek)") \
FLAG(balance_rate, NUMBER, "0",     0, 1, "", FIXED, "step of a selection bias that balances without a loss (DeepSeek-V3: 0.001); 0: no such bias") \
FLAG(vocab,        INT,    "0",     0, 1 << 24, "", FIXED, "vocabulary; 0: that of the data (256, bytes, for the built-in stories)") \
FLAG(seq,          INT,    "128",   1, 1 << 22, "", FIXED, "tokens of a sequence") \
FLAG(norm,         CHOICE, "rms",   0, 0, "rms|layer", FIXED, "RMSNorm, or LayerNorm with bias") \
FLAG(bias,         SWITCH, "off",   0, 0, "off|on", FIXED, "biases in linears") \
FLAG(positions,    CHOICE, "rope",  0, 0, "rope|learned", FIXED, "rotary or learned positions") \
FLAG(activation,   CHOICE, "swiglu", 0, 0, "swiglu|gelu", FIXED, "of the ffn") \
FLAG(tied,         SWITCH, "on",    0, 0, "off|on", FIXED, "the head is the embedding") \
FLAG(rope_theta,   NUMBER,   "10000", 1, 1e9, "", FIXED, "base of the rotary angles") \
FLAG(eps,          NUMBER,   "1e-5",  0, 1, "", FIXED, "inside the norms' square root") \
FLAG(emb_scale,    CHOICE, "one",   0, 0, "one|sqrt-width", FIXED, "multiplies the embedding; sqrt-width: Gemma") \
FLAG(final_norm,   CHOICE, "auto",  0, 0, "auto|off|on", FIXED, "norm before the head; auto: as the mode says") \
FLAG(mix_ratio,    NUMBER,   "0.25",  0, 1, "", FIXED, "MIX_LN: the part of the layers that is POST") \
FLAG(sdd,          CHOICE, "paper", 0, 0, "paper|code", FIXED, "SDD: the paper's settings or the released code's") \
/* how it starts and learns */ \
FLAG(init,         CHOICE, "auto",  0, 0, "auto|normal|depth|megatron|scale|scale-recipe|global|olmo|deepnorm", FIXED, "initialization; auto: the mode's, or --init-baseline") \
FLAG(init_baseline, CHOICE, "scale", 0, 0, "normal|depth|megatron|scale|scale-recipe|global|olmo|deepnorm", FIXED, "the initialization --init auto takes for modes that name none") \
FLAG(init_std,     NUMBER,   "0",     0, 10, "", FIXED, "base sigma; 0: the initialization's own") \
FLAG(seed,         INT,    "1",     0, 1e15, "", FIXED, "of weights, data order and samples") \
FLAG(batch,        INT,    "12",    1, 1 << 24, "", FIXED, "sequences per step, over everything") \
FLAG(micro_batch,  INT,    "0",     0, 1 << 24, "", FREE, \
     "sequences in memory at a time; 0: as many as fit, chosen once and kept with the run") \
FLAG(steps,        INT,    "1000",  0, 1e12, "", FREE,  "optimizer steps") \
FLAG(lr,           NUMBER,   "1e-3",  0, 10, "", FIXED, "peak learning rate") \
FLAG(min_lr,       NUMBER,   "0.1",   0, 1, "", FIXED, "end of the schedule, as a part of the peak") \
FLAG(warmup,       INT,    "100",   0, 1e12, "", FIXED, "steps of linear warmup") \
FLAG(schedule,     CHOICE, "cosine", 0, 0, "cosine|wsd|linear|constant", FIXED, "after the warmup") \
FLAG(schedule_steps, INT,  "0",     0, 1e12, "", FREE,  "step at which the schedule ends; 0: --steps") \
FLAG(decay_part,   NUMBER,   "0.2",   0, 1, "", FIXED, "wsd: the last part of the steps after the warmup, in which the rate falls") \
FLAG(width_base,   INT,    "0",     0, 1 << 20, "", FIXED, "width at which --lr was tuned: scales the rate of matrices; 0: off") \
FLAG(width_power,  CHOICE, "1",     0, 0, "1|0.5", FIXED, "rate x (width_base / width)^power: full alignment 1, none 0.5 (Everett et al. 2024)") \
FLAG(weight_decay, NUMBER,   "0.1",   0, 10, "", FIXED, "AdamW, on matrices") \
FLAG(decay_gains,  CHOICE, "off",   0, 0, "off|zero|one", FIXED, "decay norm gains and biases too: gains towards zero, or towards one (Gemma's 1 + w)") \
FLAG(decay_embeddings, SWITCH, "on", 0, 0, "off|on", FIXED, "decay embeddings too") \
FLAG(beta1,        NUMBER,   "0.9",   0, 0.999999, "", FIXED, "AdamW") \
FLAG(beta2,        NUMBER,   "0.95",  0, 0.999999, "", FIXED, "AdamW") \
FLAG(adam_eps,     NUMBER,   "1e-8",  1e-30, 1, "", FIXED, "AdamW") \
FLAG(clip,         NUMBER,   "1",     0, 1e9, "", FIXED, "largest global gradient norm; 0: off") \
FLAG(spike_z,      NUMBER,   "10",    0, 1e9, "", FREE,  "a loss or gradient norm so many robust deviations above the last ones is a spike, and an event; 0: none is") \
FLAG(skip_spikes,  SWITCH, "off",   0, 0, "off|on", FREE,  "no update from a spike, as from what is not finite") \
FLAG(z_loss,       NUMBER,   "0",     0, 1, "", FIXED, "adds this times the squared log-sum-exp of the logits (OLMo 2: 1e-5)") \
FLAG(recompute,    SWITCH, "off",   0, 0, "off|on|cheap", FREE, "compute again in backward: on: all but the stream between blocks; cheap: norms' and activations' outputs") \
FLAG(tf32,         SWITCH, "off",   0, 0, "off|on", FIXED, "PREC=fp32 on a GPU: products of numbers rounded to TF32") \
FLAG(rounding,     CHOICE, "nearest", 0, 0, "nearest|stochastic", FIXED, "PREC=bf16: how new weights are rounded for the products") \
FLAG(tune,         SWITCH, "on",    0, 0, "off|on", FREE,  "on a GPU: choose plans of matrix products by timing and keep them with the run; off: the library's first, the same in every run") \
FLAG(graph,        SWITCH, "off",   0, 0, "off|on", FREE,  "on a GPU: a micro-step is one CUDA graph; faster where batches are small") \
/* data */ \
FLAG(data,         TEXT,   "", 0, 0, "", FREE,  "a shard, a pattern or a folder of shards (make shard); empty: the built-in stories") \
FLAG(val_data,     TEXT,   "", 0, 0, "", FREE,  "the same for validation; empty: the val shards of --data") \
FLAG(tokenizer,    TEXT,   "", 0, 0, "", FREE,  "tokenizer.bin for prompts and samples; empty: the run's own, or the one in the folder of --data") \
/* the run */ \
FLAG(out,          TEXT,   "", 0, 0, "", ONCE,  "the run's folder; empty: runs/<mode>-<model>-<time>") \
FLAG(val_every,    INT,    "250",   0, 1e12, "", FREE,  "steps between validations; 0: at the end only") \
FLAG(val_tokens,   INT,    "0",     0, 1e15, "", FREE,  "tokens of a validation; 0: the whole split") \
FLAG(tasks,        TEXT,   "", 0, 0, "", FREE,  "files of tasks, with commas between them, or folders of them, evaluated at each validation and by --eval (data/get.py tasks)") \
FLAG(save_every,   INT,    "500",   0, 1e12, "", FREE,  "steps between checkpoints; 0: at the end only") \
FLAG(keep_last,    INT,    "0",     0, 1e12, "", FREE,  "checkpoints that stay, the newest; 0: all") \
FLAG(keep_every,   INT,    "0",     0, 1e12, "", FREE,  "and those of every so many steps; 0: no others") \
FLAG(norms_every,  INT,    "100",   0, 1e12, "", FREE,  "steps between lines with diagnostics of every layer and tensor (README); 0: none") \
FLAG(config,       TEXT,   "", 0, 0, "", ONCE, \
     "begins with the flags of this config.json, a run's or {\"flags\": {\"lr\": \"1e-3\"}}") \
FLAG(resume,       CHOICE, "never", 0, 0, "never|auto|required", ONCE,  "continue the run in --out: if there is one, or else fail") \
FLAG(init_from,    TEXT,   "", 0, 0, "", FIXED, "start from the weights of a run, a checkpoint or a model.safetensors") \
FLAG(from,         TEXT,   "", 0, 0, "", ONCE,  "a run or a checkpoint to --eval or --sample without training") \
FLAG(eval,         SWITCH, "off",   0, 0, "off|on", ONCE,  "with --from: validation loss and --tasks, no training") \
FLAG(sample,       INT,    "400",   0, 1 << 20, "", FREE,  "tokens to sample at the end, or with --from; a text of --seq tokens goes on with its last half as the beginning") \
FLAG(prompt,       TEXT,   "", 0, 0, "", FREE, \
     "text the sample continues; with --from, -: each line of standard input") \
FLAG(temperature,  NUMBER,   "0.8",   0, 100, "", FREE,  "of the sample; 0: the likeliest token") \
FLAG(top_k,        INT,    "0",     0, 1 << 24, "", FREE,  "sample among the k likeliest tokens; 0: all") \
FLAG(show,         TEXT,   "", 0, 0, "", ONCE,  "print the expanded tables and stop: model|models|modes|config (--show alone: model; config: config.json)")

typedef struct Flags {
#define FLAG_FIELD(field, kind, ...) Flag##kind field;
    FLAG_TABLE(FLAG_FIELD)
#undef FLAG_FIELD
} Flags;

// Choices that code asks for by name, in the order of their rows. (Others stand where their meaning does: INIT_, ROUTER_, LOSSES_, RECOMPUTE_, SCHEDULE_.)
enum { POSITIONS_ROPE, POSITIONS_LEARNED };
enum { ACTIVATION_SWIGLU, ACTIVATION_GELU };
enum { FINAL_NORM_AUTO, FINAL_NORM_OFF, FINAL_NORM_ON };
enum { WIDTH_POWER_1, WIDTH_POWER_HALF };
enum { RESUME_NEVER, RESUME_AUTO, RESUME_REQUIRED };
enum { GAINS_KEPT, GAINS_TO_ZERO, GAINS_TO_ONE };

#define FLAG_ENUM(field, ...) FLAG_##field,
enum { FLAG_TABLE(FLAG_ENUM) FLAG_COUNT };
#undef FLAG_ENUM

typedef struct FlagRow { const char *field; int kind; const char *def; double low, high; const char *choices; int resume; const char *help; size_t offset; } FlagRow;
#define FLAG_ROW(field, kind, def, low, high, choices, resume, help) {#field, kind, def, (double)(low), (double)(high), choices, resume, help, offsetof(Flags, field)},
static const FlagRow FLAGS[] = { FLAG_TABLE(FLAG_ROW) };
#undef FLAG_ROW

// Who set a flag last; a later source may override an earlier one. BY_CHECKPOINT: a config.json.
enum { BY_DEFAULT, BY_PRESET, BY_CHECKPOINT, BY_USER };
typedef struct FlagSet { Flags f; unsigned char by[FLAG_COUNT]; } FlagSet;

static inline void flag_name(char *name, size_t cap, const FlagRow *row) {
    check_format(name, cap, "--%s", row->field);
    for (char *c = name; *c; c++) if (*c == '_') *c = '-';
}

static inline const FlagRow *flag_find(const char *name) {
    char full[64];
    for (int i = 0; i < FLAG_COUNT; i++) {
        flag_name(full, sizeof full, &FLAGS[i]);
        if (!strcmp(full, name)) return &FLAGS[i];
    }
    return NULL;
}

// The names that a mistyped word may stand for: those that begin with it, or else those the fewest
// edits away, about one for three letters at most. text: "did you mean a or b? ", or "".
typedef struct { const char *word; int best; char text[160]; } Nearest;

static inline Nearest nearest_begin(const char *word) {
    Nearest n = {word, ((int)strlen(word) + 1) / 3, ""};
    return n;
}

// Insertions, deletions and replacements that make one word of another, by Levenshtein's table.
static inline int nearest_edits(const char *a, const char *b) {
    int row[64], n = (int)strlen(b);
    if (n > 63) return n;
    for (int j = 0; j <= n; j++) row[j] = j;
    for (int i = 0; a[i]; i++) {
        int diagonal = row[0], best;
        row[0] = i + 1;
        for (int j = 1; j <= n; j++, diagonal = best) {
            best = row[j];
            int least =
                diagonal + (tolower((unsigned char)a[i]) != tolower((unsigned char)b[j - 1]));
            if (row[j] + 1 < least) least = row[j] + 1;
            if (row[j - 1] + 1 < least) least = row[j - 1] + 1;
            row[j] = least;
        }
    }
    return row[n];
}

static inline void nearest_add(Nearest *n, const char *name, const char *shown) {
    size_t length = strlen(n->word), have;
    bool begins = length > 1 && !strncasecmp(name, n->word, length);
    int edits = begins ? 0 : nearest_edits(n->word, name);
    if (!length || edits > n->best) return;
    if (edits < n->best) *n->text = 0;
    n->best = edits;
    have = strlen(n->text);
    if (have + strlen(shown) + 24 > sizeof n->text) return;
    if (have) check_format(n->text + have - 2, sizeof n->text - have, " or %s? ", shown);
    else check_format(n->text, sizeof n->text, "did you mean %s? ", shown);
}

// Index of value in "a|b|c", or -1.
static inline int flag_choice(const char *choices, const char *value) {
    int index = 0;
    for (const char *c = choices;; index++) {
        size_t n = strcspn(c, "|");
        if (strlen(value) == n && !memcmp(c, value, n)) return index;
        if (!c[n]) return -1;
        c += n + 1;
    }
}

// The word of "a|b|c" that has this index, NULL: there are fewer.
static inline const char *flag_word(char *buf, size_t cap, const char *choices, int index) {
    for (; index > 0; index--) {
        choices += strcspn(choices, "|");
        if (!*choices++) return NULL;
    }
    return check_format(buf, cap, "%.*s", (int)strcspn(choices, "|"), choices);
}

// A text in other bytes would come back from config.json as another one.
static inline bool flag_is_utf8(const char *text) {
    for (size_t left = strlen(text), length; left; text += length, left -= length) {
        length = utf8_length(text, left);
        if (!length) return false;
    }
    return true;
}

static inline void flag_set(FlagSet *s, const FlagRow *row, const char *value, int by) {
    char name[64], word[64], *end;
    char *at = (char *)&s->f + row->offset;
    flag_name(name, sizeof name, row);
    s->by[row - FLAGS] = (unsigned char)by;
    errno = 0;
    if (row->kind == TEXT) {
        CHECK(row->resume == ONCE || flag_is_utf8(value), "%s: expected UTF-8, found other bytes, which config.json cannot hold\n  -> rename the file, or convert the text", name);
        *(FlagTEXT *)at = strdup(value);
        CHECK(*(FlagTEXT *)at, "no memory for %s\n  -> a shorter text", name);
        return;
    }
    if (row->kind == CHOICE || row->kind == SWITCH) {
        int index = flag_choice(row->choices, value);
        if (index < 0) {
            Nearest near = nearest_begin(value);
            for (int i = 0; flag_word(word, sizeof word, row->choices, i); i++)
                nearest_add(&near, word, word);
            CHECK(false, "%s=%s: expected %s\n  -> %s%s", name, value, row->choices, near.text,
                  row->help);
        }
        *(int *)at = index;
        return;
    }
    double number = strtod(value, &end);
    CHECK(*value && !*end && errno == 0 && isfinite(number), "%s=%s: expected a number from %g to %g\n  -> %s", name, value, row->low, row->high, row->help);
    CHECK(number >= row->low && number <= row->high, "%s=%s is out of range: expected %g to %g\n  -> %s", name, value, row->low, row->high, row->help);
    CHECK(row->kind == NUMBER || number == floor(number), "%s=%s: expected a whole number\n  -> %s", name, value, row->help);
    if (row->kind == INT) *(int64_t *)at = (int64_t)number;
    else *(double *)at = number;
}

// The value as text, as it would be typed.
static inline const char *flag_text(char *buf, size_t cap, const Flags *f, const FlagRow *row) {
    const char *at = (const char *)f + row->offset;
    if (row->kind == TEXT) return *(const FlagTEXT *)at;
    if (row->kind == INT) return check_format(buf, cap, "%lld", (long long)*(const int64_t *)at);
    if (row->kind == NUMBER) return check_format(buf, cap, "%.15g", *(const double *)at);
    return flag_word(buf, cap, row->choices, *(const int *)at);
}

// The known flags that an unknown one may be meant for.
static inline Nearest flag_nearest(const char *word) {
    char name[64];
    Nearest near = nearest_begin(word + strspn(word, "-"));
    for (int i = 0; i < FLAG_COUNT; i++) {
        flag_name(name, sizeof name, &FLAGS[i]);
        nearest_add(&near, name + 2, name);
    }
    return near;
}

// The flag `only` with its value in f, or where it is NULL every flag.
static inline void flags_help(const Flags *f, const char *only) {
    char name[64], value[64];
    int shown = 0;
    if (!only) printf("usage: ./train_gpt [--flag value | --flag=value]...      --model sets many "
                      "of them; --show prints what results\n"
                      "       ./train_gpt --help [FLAG] | --version\n"
                      "       mpirun -np 2 ./train_gpt ...      as root, or without slots: "
                      "README.md, \"Several processes\"\n\n");
    for (int i = 0; i < FLAG_COUNT; i++) {
        const FlagRow *row = &FLAGS[i];
        flag_name(name, sizeof name, row);
        if (only && strcmp(only, name) && strcmp(only, name + 2)) continue;
        printf("  %-20s %s%s%s%s [%s]\n", name, row->choices, *row->choices ? ": " : "", row->help,
               row->resume == FREE ? "; may change on resume" : "",
               flag_text(value, sizeof value, f, row));
        shown++;
    }
    CHECK(shown, "--help %s: expected a flag, found none of that name\n"
          "  -> %s./train_gpt --help lists all", only, flag_nearest(only).text);
}

// Words of a command line or of a preset. Switches may stand alone: --recompute.
static inline void flags_parse(FlagSet *s, int count, char *const *words, int by) {
    for (int i = 0; i < count; i++) {
        const char *word = words[i], *equals = strchr(word, '=');
        char given[64];                                    // --flag of --flag=value
        snprintf(given, sizeof given, "%.*s", (int)strcspn(word, "="), word);
        const FlagRow *row = flag_find(given);
        CHECK(word[0] == '-', "expected a flag, found \"%s\"\n  -> a value with a space needs quotes; ./train_gpt --help lists the flags", word);
        CHECK(row, "unknown flag %s\n  -> %s./train_gpt --help lists all", word,
              flag_nearest(given).text);
        CHECK(by != BY_USER || s->by[row - FLAGS] != BY_USER, "%s is given twice\n  -> give it once", word);
        bool alone = !equals && (i + 1 == count || !strncmp(words[i + 1], "--", 2));
        if (alone && row->kind == SWITCH) flag_set(s, row, "on", by);
        else if (alone && row == &FLAGS[FLAG_show]) flag_set(s, row, "model", by);
        else {
            CHECK(!alone, "%s needs a value\n  -> %s %s: %s", word, word, *row->choices ? row->choices : "VALUE", row->help);
            flag_set(s, row, equals ? equals + 1 : words[++i], by);
        }
    }
}

static inline void flags_parse_text(FlagSet *s, const char *text, int by) {
    char copy[1024], *words[128], *save = NULL;
    int count = 0;
    check_format(copy, sizeof copy, "%s", text);
    for (char *w = strtok_r(copy, " ", &save); w; w = strtok_r(NULL, " ", &save)) words[count++] = w;
    flags_parse(s, count, words, by);
}
