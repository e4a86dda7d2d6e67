// flags.h: TABLE 4, one row for each command-line flag. Parsing (--lr=3e-4, --lr 3e-4), --help,
// presets, the run's config.json, and what may change on resume all follow from the row.
#pragma once
#include "../init.h"
#include "schedule.h"
#include "util.h"

// A flag's type, and its value in Flags: long long, double, text, or the index of the choice.
enum { INT, NUMBER, TEXT, CHOICE, SWITCH };
// On resume: may not change | may change | belongs to one command and is not saved with the run.
enum { FIXED, FREE, ONCE };

// Choices that are the rows of another table: "a|b|c", and "|a|b|c" for those after a first one.
#define MORE_CHOICES(TABLE) TABLE(TABLE_CHOICE)
#define CHOICES_OF(TABLE) &MORE_CHOICES(TABLE)[1]
#define TABLE_CHOICE(id, word, ...) "|" word

// FLAG(field, type, help), followed by FREE or ONCE unless the flag is FIXED. The flag's name is
// the field's with '-' for '_'. Types, with the default as it would be typed:
//   INT(default, low, high)   NUMBER(default, low, high)   TEXT(default)
//   CHOICE(default, "a|b|c")  SWITCH(default): off|on
// A flag whose choices begin with off needs no value: without one it takes the second, usually on.

// The architecture. --resume, --from and --init-from take these from config.json and refuse other
// values (flags_override and config_init_from have the exceptions).
#define MODEL_FLAGS(FLAG) \
FLAG(model, TEXT(stories), \
     "named model and its training (--show models); other flags override it") \
FLAG(layers, INT(4, 1, 4096), "number of blocks") \
FLAG(width, INT(128, 1, 1 << 20), "channels of the residual stream") \
FLAG(heads, INT(4, 1, 4096), "attention heads") \
FLAG(head_size, INT(0, 0, 4096), "channels of a head; 0: width / heads") \
FLAG(kv_heads, INT(0, 0, 4096), \
     "key/value heads (grouped-query attention); must divide --heads; 0: --heads") \
FLAG(kv_rank, INT(0, 0, 1 << 20), \
     "latent attention (MLA): channels of the latent of keys and values; 0: off") \
FLAG(rope_size, INT(64, 2, 1 << 16), \
     "with --kv-rank: rotary channels of a q or k head, besides its --head-size") \
FLAG(ffn, INT(0, 0, 1 << 22), \
     "width of the ffn or of an expert; 0: 4 width (GELU), 8/3 width (SwiGLU, a multiple of 32)") \
FLAG(experts, INT(0, 0, 1 << 14), \
     "routed experts in a layer (mixture of experts); 0: a dense ffn") \
FLAG(experts_per_token, INT(2, 1, 1 << 14), "routed experts for each token (top-k of the router)") \
FLAG(shared_experts, INT(0, 0, 1 << 14), \
     "shared experts, which every token uses: one ffn of this many times --ffn") \
FLAG(dense_layers, INT(0, 0, 4096), "number of first layers with a dense ffn in place of experts") \
FLAG(dense_ffn, INT(0, 0, 1 << 22), \
     "ffn width of --dense-layers; 0: that of a token's experts, shared ones included") \
FLAG(router, CHOICE(softmax, "softmax|softmax-renorm|sigmoid"), \
     "gates, the weights of a token's experts; softmax-renorm, sigmoid: divided by their sum") \
FLAG(router_scale, NUMBER(1, 0, 1000), "factor of all gates") \
FLAG(balance_loss, NUMBER(0.01, 0, 10), \
     "weight of the load balance loss of each micro-batch (OLMoE: 0.01)") \
FLAG(sequence_loss, NUMBER(0, 0, 10), \
     "weight of the load balance loss of each sequence (DeepSeek-V3: 1e-4)") \
FLAG(router_z_loss, NUMBER(0.001, 0, 10), \
     "weight of the squared log-sum-exp of router logits (OLMoE: 0.001)") \
FLAG(router_losses, CHOICE(mean, "mean|sum"), \
     "over layers: mean, and the z-loss / --experts-per-token (OLMoE); or sum (DeepSeek)") \
FLAG(balance_rate, NUMBER(0, 0, 1), \
     "step of the router's selection bias, in place of a loss (DeepSeek-V3: 0.001); 0: no bias") \
FLAG(vocab, INT(0, 0, 1 << 24), \
     "vocabulary size; 0: the data's (256, bytes, for the built-in stories)") \
FLAG(seq, INT(128, 1, 1 << 22), "tokens in a sequence (context length)") \
FLAG(norm, CHOICE(rms, "rms|layer|dyt"), \
     "RMSNorm; LayerNorm, with bias; or DyT, gain tanh(alpha x) + bias with a learned alpha") \
FLAG(bias, CHOICE(off, "off|on|qkv"), "biases in linears; qkv: only in those of q, k and v") \
FLAG(positions, CHOICE(rope, "rope|learned"), "rotary (RoPE) or learned positions") \
FLAG(activation, CHOICE(swiglu, "swiglu|gelu"), "activation of the ffn") \
FLAG(tied, SWITCH(on), "the LM head shares the embedding's weights") \
FLAG(rope_theta, NUMBER(10000, 1, 1e9), "base of RoPE's angles") \
FLAG(rope_factor, NUMBER(1, 1, 1e6), \
     "Llama 3's RoPE: slow pairs of channels turn this many times slower; 1: off") \
FLAG(rope_original, INT(8192, 1, 1 << 24), \
     "with --rope-factor: the original --seq; a pair that turns less than once in it is slow") \
FLAG(eps, NUMBER(1e-5, 0, 1), "epsilon of norms, under the square root") \
FLAG(emb_scale, CHOICE(one, "one|sqrt-width"), \
     "factor of the embedding: 1, or sqrt(width) as in Gemma") \
FLAG(final_norm, CHOICE(auto, "auto|off|on"), "norm before the LM head; auto: the placement's") \
FLAG(mix_ratio, NUMBER(0.25, 0, 1), \
     "MIX_LN: fraction of the layers, counted from the first, that are POST") \
FLAG(sdd, CHOICE(paper, CHOICES_OF(SDD_TABLE)), \
     "SDD: settings of the paper or of the released code")

// Initialization, batches, learning rate and AdamW. Most are FIXED, so that a run is trained by one
// recipe. FREE ones decide when it ends, how it fits into memory, or what is measured.
#define TRAINING_FLAGS(FLAG) \
FLAG(init, CHOICE(auto, "auto" MORE_CHOICES(INIT_TABLE)), \
     "initialization; auto: the placement's, else --init-baseline") \
FLAG(init_baseline, CHOICE(scale, CHOICES_OF(INIT_TABLE)), \
     "initialization for placements without their own") \
FLAG(init_std, NUMBER(0, 0, 10), "base standard deviation; 0: the initialization's own") \
FLAG(dyt_alpha, NUMBER(0.5, 0, 100), "with --norm dyt: every alpha at the start") \
FLAG(seed, INT(1, 0, 1e15), "seed of weights, data order and samples") \
FLAG(batch, INT(12, 1, 1 << 24), "sequences in a step, over all processes") \
FLAG(micro_batch, INT(0, 0, 1 << 24), \
     "sequences in memory at once (gradient accumulation); 0: as many as fit, chosen once", FREE) \
FLAG(steps, INT(1000, 0, 1e12), "optimizer steps", FREE) \
FLAG(lr, NUMBER(1e-3, 0, 10), "peak learning rate") \
FLAG(min_lr, NUMBER(0.1, 0, 1), "learning rate at the end of the schedule, as a fraction of --lr") \
FLAG(warmup, INT(100, 0, 1e12), "steps of linear warmup") \
FLAG(schedule, CHOICE(cosine, CHOICES_OF(SCHEDULE_TABLE)), \
     "learning rate schedule after the warmup") \
FLAG(schedule_steps, INT(0, 0, 1e12), "step at which the schedule ends; 0: --steps", FREE) \
FLAG(decay_part, NUMBER(0.2, 0, 1), \
     "wsd: last fraction of the steps after the warmup, in which the rate falls") \
FLAG(width_base, INT(0, 0, 1 << 20), \
     "width at which --lr was tuned: scales the rate of matrices; 0: off") \
FLAG(width_power, CHOICE(1, "1|0.5"), \
     "matrices' rate x (width_base / width)^power; 1: full alignment, 0.5: none (Everett et al.)") \
FLAG(weight_decay, NUMBER(0.1, 0, 10), "AdamW's weight decay of matrices") \
FLAG(decay_gains, CHOICE(off, "off|zero|one"), \
     "weight decay of norm gains and biases; gains towards zero, or one (Gemma's 1 + w)") \
FLAG(decay_embeddings, SWITCH(on), "weight decay of embeddings") \
FLAG(beta1, NUMBER(0.9, 0, 0.999999), "AdamW: decay of the first moment") \
FLAG(beta2, NUMBER(0.95, 0, 0.999999), "AdamW: decay of the second moment") \
FLAG(adam_eps, NUMBER(1e-8, 1e-30, 1), "AdamW: epsilon, added to the root of the second moment") \
FLAG(optimizer, CHOICE(adamw, "adamw|muon"), \
     "muon: for the matrices of blocks, with AdamW for embeddings, head, router, gains, biases") \
FLAG(muon_lr, NUMBER(0, 0, 10), "Muon: peak learning rate of its matrices; 0: --lr") \
FLAG(muon_momentum, NUMBER(0.95, 0, 0.999999), "Muon: decay of the momentum (Nesterov)") \
FLAG(muon_scale, CHOICE(match-rms-adamw, "match-rms-adamw|original"), \
     "Muon: update x 0.2 sqrt(max(rows, cols)), for AdamW's rates; or sqrt(max(1, rows / cols))") \
FLAG(mask_documents, SWITCH(off), \
     "attention stays within a document, which begins at the tokenizer's separator (bytes: 0)") \
FLAG(restart_positions, SWITCH(off), \
     "with --mask-documents and --positions learned: positions count from the document's start") \
FLAG(clip, NUMBER(1, 0, 1e9), "gradient clipping: largest global norm; 0: off") \
FLAG(spike_z, NUMBER(10, 0, 1e9), \
     "report a loss or gradient norm this many robust deviations above the median of the last " \
     "128; 0: none", FREE) \
FLAG(skip_spikes, SWITCH(off), "skip the update at a spike (--spike-z)", FREE) \
FLAG(z_loss, NUMBER(0, 0, 1), \
     "weight of the squared log-sum-exp of the logits (OLMo 2: 1e-5)") \
FLAG(recompute, CHOICE(off, "off|on|cheap"), \
     "recompute in backward, to save memory; on: all but the stream between blocks; cheap: " \
     "outputs of norms and activation functions", FREE) \
FLAG(tf32, SWITCH(off), "GPU, PREC=fp32: matrix products in TF32") \
FLAG(rounding, CHOICE(nearest, "nearest|stochastic"), \
     "GPU, PREC=bf16: rounding of updated weights to bf16") \
FLAG(tune, SWITCH(on), \
     "GPU: time algorithms of matrix products once for the run; off: the library's first choice", \
     FREE) \
FLAG(kernels, CHOICE(auto, "auto|mma|wgmma"), \
     "GPU: attention and experts by mma.sync or, compute capability 9.0 and PREC=bf16, by wgmma; " \
     "auto: wgmma if it agrees and is faster, mma with --tune off", FREE) \
FLAG(graph, SWITCH(off), \
     "GPU: run a micro-step as two CUDA graphs; faster if batches are small", FREE)

// Data. FREE, because shards may be moved; a run compares their content with the hash in its
// checkpoint.
#define DATA_FLAGS(FLAG) \
FLAG(data, TEXT(), \
     "a shard, 'pattern' or folder of shards (make shard); empty: the built-in stories", FREE) \
FLAG(val_data, TEXT(), "the same for validation; empty: the val shards in --data", FREE) \
FLAG(tokenizer, TEXT(), \
     "tokenizer.bin for prompts and samples; empty: the run's, or the one in --data", FREE)

// The run's folder, what is written to it and when, and commands that only read a run.
#define RUN_FLAGS(FLAG) \
FLAG(out, TEXT(), "the run's folder; empty: runs/<placement>-<model>-<time>", ONCE) \
FLAG(val_every, INT(250, 0, 1e12), "steps between validations; 0: only at the end", FREE) \
FLAG(val_tokens, INT(0, 0, 1e15), "tokens in a validation; 0: the whole split", FREE) \
FLAG(tasks, TEXT(), \
     "task files or folders of them (a,b,...), scored at validations and by --eval " \
     "(data/get.py tasks)", FREE) \
FLAG(save_every, INT(500, 0, 1e12), "steps between checkpoints; 0: only at the end", FREE) \
FLAG(keep_last, INT(0, 0, 1e12), "keep the newest N checkpoints; 0: all", FREE) \
FLAG(keep_every, INT(0, 0, 1e12), \
     "also keep checkpoints of steps that are multiples of N; 0: none", FREE) \
FLAG(norms_every, INT(100, 0, 1e12), \
     "steps between log lines with statistics of layers and tensors; 0: none", FREE) \
FLAG(config, TEXT(), "flags of a config.json: a run's, or {\"flags\": {\"lr\": \"1e-3\"}}", ONCE) \
FLAG(resume, CHOICE(never, "never|auto|required"), \
     "continue the run in --out; auto: if there is one; required: refuse if it has no " \
     "checkpoint", ONCE) \
FLAG(init_from, TEXT(), "initial weights: of a run, a checkpoint or a model.safetensors") \
FLAG(from, TEXT(), "a run or checkpoint to read for --eval or --sample, without training", ONCE) \
FLAG(eval, SWITCH(off), "with --from: validation loss, and scores of --tasks", ONCE) \
FLAG(sample, INT(400, 0, 1 << 20), \
     "tokens to generate at the end, or with --from; past --seq, the context becomes the last " \
     "--seq / 2", FREE) \
FLAG(prompt, TEXT(), \
     "text that the sample continues; -, with --from: each line of standard input", FREE) \
FLAG(temperature, NUMBER(0.8, 0, 100), \
     "softmax temperature of the sample; 0: take the most likely token", FREE) \
FLAG(top_k, INT(0, 0, 1 << 24), "sample from the k most likely tokens; 0: from all", FREE) \
FLAG(show, CHOICE(off, "off|model|models|modes|config"), \
     "print the model's tables, named models, placements or config.json, and stop", ONCE)

#define FLAG_TABLE(FLAG) MODEL_FLAGS(FLAG) TRAINING_FLAGS(FLAG) DATA_FLAGS(FLAG) RUN_FLAGS(FLAG)

// One field per flag. `FIELD_##type` turns INT(4, 1, 4096) into FIELD_INT(4, 1, 4096), that is
// long long; flags.c makes the rest of the row in the same way.
#define FIELD_INT(...) long long
#define FIELD_NUMBER(...) double
#define FIELD_TEXT(...) const char *
#define FIELD_CHOICE(...) int
#define FIELD_SWITCH(...) int
struct Flags {
#define FLAG_FIELD(field, type, ...) FIELD_##type field;
    FLAG_TABLE(FLAG_FIELD)
};

// Choices that code asks for by name, in the order of their rows. (NORM_, ROUTER_, LOSSES_ and
// BIAS_ are in modes.h, RECOMPUTE_ in tensors.h, INIT_ in init.h, the others in trainer.h.)
enum { POSITIONS_ROPE, POSITIONS_LEARNED };
enum { ACTIVATION_SWIGLU, ACTIVATION_GELU };
enum { FINAL_NORM_AUTO, FINAL_NORM_OFF, FINAL_NORM_ON };
enum { WIDTH_POWER_1, WIDTH_POWER_HALF };
enum { RESUME_NEVER, RESUME_AUTO, RESUME_REQUIRED };
enum { GAINS_KEPT, GAINS_TO_ZERO, GAINS_TO_ONE };
enum { SHOW_OFF, SHOW_MODEL, SHOW_MODELS, SHOW_MODES, SHOW_CONFIG };

#define FLAG_ENUM(field, ...) FLAG_##field,
enum { FLAG_TABLE(FLAG_ENUM) FLAG_COUNT };

typedef struct {
    const char *field;                        // kv_heads
    int kind;                                 // INT, ...
    const char *def;                          // default, as it would be typed
    double low, high;                         // range of INT and NUMBER
    const char *choices;                      // "" if it has none
    size_t offset;                            // in Flags
    const char *help;                         // one line of --help
    int resume;                               // FIXED, FREE or ONCE
} FlagRow;
extern const FlagRow FLAGS[FLAG_COUNT];

// The source that set a flag; a later source in this list overrides an earlier one. BY_PRESET:
// --model, the placement, or the model of --init-from. BY_CHECKPOINT: the config.json of a run, or
// --config.
enum { BY_DEFAULT, BY_PRESET, BY_CHECKPOINT, BY_USER };
typedef struct {
    Flags f;
    unsigned char by[FLAG_COUNT];             // BY_*
} FlagSet;

// Names of flags, and values that are not text, fit into FLAG_CAP bytes.
enum { FLAG_CAP = 64 };
// kv_heads -> --kv-heads, in name.
char *flag_name(char name[FLAG_CAP], const FlagRow *row);
// The row of kv-heads or kv_heads. An unknown name is refused; `where` and hint are for the
// message.
const FlagRow *flag_find(const char *name, const char *where, const char *hint);
// The word at an index of "a|b|c", or NULL.
const char *flag_word(char buf[FLAG_CAP], const char *choices, int index);
// Sets a flag from text; a wrong type, choice or range is refused.
void flag_set(FlagSet *s, const FlagRow *row, const char *value, int by);
// The value as text, as it would be typed.
const char *flag_text(char buf[FLAG_CAP], const Flags *f, const FlagRow *row);

void flags_default(FlagSet *s);
// Parse the words of a command line, or of a text that is split at spaces.
void flags_parse(FlagSet *s, int count, char *const *words, int by);
void flags_parse_text(FlagSet *s, const char *text, int by);
// Prints every flag with its value in f, or the one named `only`.
void flags_help(const Flags *f, const char *only);

// Suggestions for a mistyped word: the names that begin with it, otherwise those with the smallest
// edit distance, at most about one edit for three letters. text: "did you mean a or b? ", or "".
typedef struct {
    const char *word;                         // that was mistyped
    int best;                                 // edits of the names in text, or the limit
    char text[160];
} Nearest;
Nearest nearest_begin(const char *word);
void nearest_add(Nearest *n, const char *name, const char *shown);
