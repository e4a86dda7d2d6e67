// hf.h: models of Hugging Face transformers as a beginning: a folder's config.json becomes flags, its safetensors this program's tensors.
//
//   FOLDER/config.json, model.safetensors | model.safetensors.index.json and the shards it names
//
// Four tables say all of it, and dev/export_hf.py reads the same rows for the way back: the classes, their keys that are flags of ours, their keys that must
// have one value, and the tensors that have another name or form there. RoPE is half-split on both sides. What has no row is refused by name.
#pragma once
#include "checkpoint.h"
#include "flags.h"
#include "judge.h"

enum { IS_GPT2 = 1, IS_LLAMA = 2, IS_MISTRAL = 4, IS_OLMO2 = 8, IS_QWEN3 = 16, IS_MIXTRAL = 32, IS_FLEX = 64, IS_QWEN3M = 128, IS_DEEPSEEK = 256 };
#define HF_MOES (IS_MIXTRAL | IS_FLEX | IS_QWEN3M | IS_DEEPSEEK)
#define HF_ROPES (IS_LLAMA | IS_MISTRAL | IS_OLMO2 | IS_QWEN3 | HF_MOES)
#define HF_ALL (IS_GPT2 | HF_ROPES)

// CLASS(bit, class, model_type, its placement, its flags)
#define HF_LLAMA "--norm rms --bias off --positions rope --activation swiglu "
#define HF_CLASS_TABLE(CLASS) \
CLASS(IS_GPT2,     "GPT2LMHeadModel",       "gpt2",        "PRE",        "--norm layer --bias on --positions learned --activation gelu") \
CLASS(IS_LLAMA,    "LlamaForCausalLM",      "llama",       "PRE",        HF_LLAMA) \
CLASS(IS_MISTRAL,  "MistralForCausalLM",    "mistral",     "PRE",        HF_LLAMA) \
CLASS(IS_OLMO2,    "Olmo2ForCausalLM",      "olmo2",       "OLMO2",      HF_LLAMA) \
CLASS(IS_QWEN3,    "Qwen3ForCausalLM",      "qwen3",       "PRE_QK_PRE", HF_LLAMA) \
CLASS(IS_MIXTRAL,  "MixtralForCausalLM",    "mixtral",     "PRE",        HF_LLAMA "--router softmax-renorm") \
CLASS(IS_FLEX,     "FlexOlmoForCausalLM",   "flex_olmo",   "OLMO2",      HF_LLAMA) \
CLASS(IS_QWEN3M,   "Qwen3MoeForCausalLM",   "qwen3_moe",   "PRE_QK_PRE", HF_LLAMA) \
CLASS(IS_DEEPSEEK, "DeepseekV3ForCausalLM", "deepseek_v3", "PRE",        HF_LLAMA "--router sigmoid --balance-rate 0.001")

// KEY(classes, key of config.json, our flag, its value where the key is missing or null: "" the next row for the flag says it, NULL one of them must be there).
// "a.b" is b of a; true and false are the flag's choices 1 and 0.
#define HF_KEY_TABLE(KEY) \
KEY(IS_GPT2, "n_layer", layers, NULL)   KEY(IS_GPT2, "n_embd", width, NULL)   KEY(IS_GPT2, "n_head", heads, NULL)   KEY(IS_GPT2, "n_inner", ffn, "0") \
KEY(IS_GPT2, "n_positions", seq, NULL)  KEY(IS_GPT2, "layer_norm_epsilon", eps, "1e-5") \
KEY(IS_GPT2, "tie_word_embeddings", tied, "on")  KEY(HF_ROPES, "tie_word_embeddings", tied, "off")  KEY(HF_ALL, "vocab_size", vocab, NULL) \
KEY(HF_ROPES, "num_hidden_layers", layers, NULL)  KEY(HF_ROPES, "hidden_size", width, NULL)  KEY(HF_ROPES, "num_attention_heads", heads, NULL) \
KEY(HF_ROPES, "num_key_value_heads", kv_heads, "0")  KEY(HF_ROPES, "max_position_embeddings", seq, NULL)  KEY(HF_ROPES, "rms_norm_eps", eps, NULL) \
KEY(HF_ROPES, "rope_parameters.rope_theta", rope_theta, "")  KEY(IS_LLAMA, "rope_theta", rope_theta, "10000")  KEY(HF_ROPES & ~IS_LLAMA, "rope_theta", rope_theta, NULL) \
KEY(HF_ROPES & ~(IS_QWEN3M | IS_DEEPSEEK), "intermediate_size", ffn, NULL)  KEY(IS_QWEN3M | IS_DEEPSEEK, "moe_intermediate_size", ffn, NULL) \
KEY(IS_FLEX | IS_QWEN3M, "num_local_experts", experts, "")  KEY(IS_FLEX | IS_QWEN3M, "num_experts", experts, NULL)  KEY(IS_MIXTRAL, "num_local_experts", experts, NULL) \
KEY(HF_MOES, "num_experts_per_tok", experts_per_token, NULL)  KEY(IS_FLEX | IS_QWEN3M, "norm_topk_prob", router, "softmax") \
KEY(IS_DEEPSEEK, "n_routed_experts", experts, NULL)  KEY(IS_DEEPSEEK, "n_shared_experts", shared_experts, NULL)  KEY(IS_DEEPSEEK, "first_k_dense_replace", dense_layers, NULL) \
KEY(IS_DEEPSEEK, "intermediate_size", dense_ffn, NULL)  KEY(IS_DEEPSEEK, "routed_scaling_factor", router_scale, NULL) \
KEY(IS_DEEPSEEK, "kv_lora_rank", kv_rank, NULL)  KEY(IS_DEEPSEEK, "qk_rope_head_dim", rope_size, NULL)

// MUST(classes, key, what it is where it is missing, the values that this program computes; head: width / heads)
#define HF_MUST_TABLE(MUST) \
MUST(HF_ALL, "quantization_config", "null", "null") \
MUST(IS_GPT2, "activation_function", "gelu_new", "gelu_new|gelu_pytorch_tanh")  MUST(IS_GPT2, "scale_attn_weights", "true", "true") \
MUST(IS_GPT2, "scale_attn_by_inverse_layer_idx", "false", "false")  MUST(IS_GPT2, "add_cross_attention", "false", "false") \
MUST(HF_ROPES, "hidden_act", "silu", "silu")  MUST(HF_ROPES, "attention_bias", "false", "false")  MUST(IS_LLAMA, "mlp_bias", "false", "false") \
MUST(HF_ROPES, "rope_scaling", "null", "null")  MUST(HF_ROPES, "rope_parameters.rope_type", "default", "default") \
MUST(HF_ROPES, "rope_parameters.partial_rotary_factor", "1", "1")  MUST(HF_ROPES, "partial_rotary_factor", "1", "1") \
MUST(IS_MISTRAL, "sliding_window", "4096", "null")  MUST(IS_MIXTRAL, "sliding_window", "null", "null")  MUST(IS_QWEN3 | IS_QWEN3M, "use_sliding_window", "false", "false") \
MUST(IS_LLAMA | IS_MISTRAL | IS_OLMO2 | IS_MIXTRAL | IS_FLEX, "head_dim", "null", "null|head")  MUST(IS_QWEN3 | IS_QWEN3M, "head_dim", "128", "head") \
MUST(IS_QWEN3M, "decoder_sparse_step", "1", "1")  MUST(IS_QWEN3M, "mlp_only_layers", "[]", "[]|null") \
MUST(IS_DEEPSEEK, "q_lora_rank", "1536", "null")  MUST(IS_DEEPSEEK, "qk_nope_head_dim", "128", "head")  MUST(IS_DEEPSEEK, "v_head_dim", "128", "head") \
MUST(IS_DEEPSEEK, "n_group", "8", "1")  MUST(IS_DEEPSEEK, "topk_group", "4", "1")  MUST(IS_DEEPSEEK, "norm_topk_prob", "true", "true") \
MUST(IS_DEEPSEEK, "rope_interleave", "true", "false")  MUST(IS_DEEPSEEK, "rms_norm_eps", "1e-06", "1e-06")           /* its norm of the latent knows no other */

// TENSOR(classes, our name, theirs, whether theirs is [in, out], our part of how many that it holds one after the other). %d: the layer, then the expert.
#define HF_BLOCK "model.layers.%d."
#define HF_GPT2_BOTH(TENSOR, ours, theirs, turned, part, parts) \
TENSOR(IS_GPT2, ours ".weight", theirs ".weight", turned, part, parts) \
TENSOR(IS_GPT2, ours ".bias",   theirs ".bias",   0,      part, parts)
#define HF_EXPERTS(TENSOR, classes, part, theirs) TENSOR(classes, HF_BLOCK "mlp.experts." part ".weight", theirs, 0, 0, 1)
#define HF_TENSOR_TABLE(TENSOR) \
TENSOR(IS_GPT2, "model.embed_tokens.weight", "transformer.wte.weight", 0, 0, 1) \
TENSOR(IS_GPT2, "model.embed_positions.weight", "transformer.wpe.weight", 0, 0, 1) \
HF_GPT2_BOTH(TENSOR, "model.norm", "transformer.ln_f", 0, 0, 1) \
HF_GPT2_BOTH(TENSOR, HF_BLOCK "input_layernorm", "transformer.h.%d.ln_1", 0, 0, 1) \
HF_GPT2_BOTH(TENSOR, HF_BLOCK "self_attn.q_proj", "transformer.h.%d.attn.c_attn", 1, 0, 3) \
HF_GPT2_BOTH(TENSOR, HF_BLOCK "self_attn.k_proj", "transformer.h.%d.attn.c_attn", 1, 1, 3) \
HF_GPT2_BOTH(TENSOR, HF_BLOCK "self_attn.v_proj", "transformer.h.%d.attn.c_attn", 1, 2, 3) \
HF_GPT2_BOTH(TENSOR, HF_BLOCK "self_attn.o_proj", "transformer.h.%d.attn.c_proj", 1, 0, 1) \
HF_GPT2_BOTH(TENSOR, HF_BLOCK "pre_feedforward_layernorm", "transformer.h.%d.ln_2", 0, 0, 1) \
HF_GPT2_BOTH(TENSOR, HF_BLOCK "mlp.up_proj", "transformer.h.%d.mlp.c_fc", 1, 0, 1) \
HF_GPT2_BOTH(TENSOR, HF_BLOCK "mlp.down_proj", "transformer.h.%d.mlp.c_proj", 1, 0, 1) \
TENSOR(HF_ROPES & ~(IS_OLMO2 | IS_FLEX), HF_BLOCK "pre_feedforward_layernorm.weight", HF_BLOCK "post_attention_layernorm.weight", 0, 0, 1) \
TENSOR(IS_MIXTRAL, HF_BLOCK "mlp.gate.weight", HF_BLOCK "block_sparse_moe.gate.weight", 0, 0, 1) \
HF_EXPERTS(TENSOR, IS_MIXTRAL, "gate_proj", HF_BLOCK "block_sparse_moe.experts.%d.w1.weight") \
HF_EXPERTS(TENSOR, IS_MIXTRAL, "up_proj",   HF_BLOCK "block_sparse_moe.experts.%d.w3.weight") \
HF_EXPERTS(TENSOR, IS_MIXTRAL, "down_proj", HF_BLOCK "block_sparse_moe.experts.%d.w2.weight") \
HF_EXPERTS(TENSOR, IS_FLEX | IS_QWEN3M | IS_DEEPSEEK, "gate_proj", HF_BLOCK "mlp.experts.%d.gate_proj.weight") \
HF_EXPERTS(TENSOR, IS_FLEX | IS_QWEN3M | IS_DEEPSEEK, "up_proj",   HF_BLOCK "mlp.experts.%d.up_proj.weight") \
HF_EXPERTS(TENSOR, IS_FLEX | IS_QWEN3M | IS_DEEPSEEK, "down_proj", HF_BLOCK "mlp.experts.%d.down_proj.weight")

// What folders hold besides weights: masks and angles that older versions of transformers kept as tensors.
static const char *const HF_BUFFERS[] = {".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"};

typedef struct { int is; const char *name, *model_type, *mode, *flags; } HfClass;
typedef struct { int classes; const char *key; int flag; const char *missing; } HfKey;
typedef struct { int classes; const char *key, *missing, *allowed; } HfMust;
typedef struct { int classes; const char *ours, *theirs; int turned, part, parts; } HfTensor;
#define HF_ROW(...) {__VA_ARGS__},
#define HF_KEY_ROW(classes, key, flag, missing) {classes, key, FLAG_##flag, missing},
static const HfClass HF_CLASSES[] = { HF_CLASS_TABLE(HF_ROW) };
static const HfKey HF_KEYS[] = { HF_KEY_TABLE(HF_KEY_ROW) };
static const HfMust HF_MUSTS[] = { HF_MUST_TABLE(HF_ROW) };
static const HfTensor HF_TENSORS[] = { HF_TENSOR_TABLE(HF_ROW) };
#undef HF_ROW
#undef HF_KEY_ROW
enum { HF_CLASS_COUNT = sizeof HF_CLASSES / sizeof *HF_CLASSES, HF_KEY_COUNT = sizeof HF_KEYS / sizeof *HF_KEYS,
       HF_MUST_COUNT = sizeof HF_MUSTS / sizeof *HF_MUSTS, HF_TENSOR_COUNT = sizeof HF_TENSORS / sizeof *HF_TENSORS };

// ------------------------------------------------------------------------------------------------------------------ config.json

// Whether this is a folder of theirs: with a config.json that is not this program's, and no checkpoint.
static inline bool hf_is_folder(const char *path) {
    char file[PATH_CAP];
    if (!*path || file_exists(check_format(file, sizeof file, "%s/manifest.json", path))) return false;
    if (!file_exists(check_format(file, sizeof file, "%s/config.json", path)) || checkpoint_step_below(path, INT64_MAX) >= 0) return false;
    Json *config = json_read_file(file);
    bool theirs = !json_get(config, "norm_c_version");
    json_free(config);
    return theirs;
}

static inline const HfClass *hf_class(const Json *config, const char *where) {
    const Json *list = json_need(config, "architectures", JSON_ARRAY, where);
    const char *name = list->count == 1 && list->first->kind == JSON_STRING ? list->first->text : "another list";
    char known[512] = "";
    for (int i = 0; i < HF_CLASS_COUNT; i++) {
        if (!strcmp(HF_CLASSES[i].name, name)) return &HF_CLASSES[i];
        snprintf(known + strlen(known), sizeof known - strlen(known), "%s%s", i ? ", " : "", HF_CLASSES[i].name);
    }
    CHECK(false, "%s: expected \"architectures\" to be one of %s; found %s\n  -> a model of one of these classes; what dev/export_hf.py wrote as NormForCausalLM: --init-from FOLDER/model.safetensors, with the flags of its run", where, known, name);
    return NULL;
}

// The member "a", or "a.b"; NULL where it is missing or null.
static inline const Json *hf_get(const Json *config, const char *key) {
    char first[64];
    const char *dot = strchr(key, '.');
    const Json *v = dot ? json_get(json_get(config, check_format(first, sizeof first, "%.*s", (int)(dot - key), key)), dot + 1) : json_get(config, key);
    return v && v->kind != JSON_NULL ? v : NULL;
}

// A value as it would be typed.
static inline const char *hf_text(char *buf, size_t cap, const Json *v) {
    if (v->kind == JSON_STRING) return v->text;
    if (v->kind == JSON_BOOL) return v->boolean ? "true" : "false";
    if (v->kind == JSON_ARRAY || v->kind == JSON_OBJECT) return !v->count ? "[]" : v->kind == JSON_ARRAY ? "[...]" : "{...}";
    return check_format(buf, cap, "%.15g", v->number);
}

// What the model is, from the folder's config.json: all flags that shape one; mode: of the program.
static inline void hf_read_config(FlagSet *set, const char *folder, const char *mode) {
    char path[PATH_CAP], buf[64], head[32];
    bool told[FLAG_COUNT] = {false};
    Json *config = json_read_file(check_format(path, sizeof path, "%s/config.json", folder));
    const HfClass *c = hf_class(config, path);
    CHECK(!strcmp(c->mode, mode), "%s: %s is a model of %s, this program is %s\n  -> make train_gpt NORM_MODE=%s", path, c->name, c->mode, mode, c->mode);
    for (int i = FLAG_model + 1; i < FLAG_init; i++) flag_set(set, &FLAGS[i], FLAGS[i].def, BY_DEFAULT);
    flags_parse_text(set, c->flags, BY_CHECKPOINT);
    flag_set(set, &FLAGS[FLAG_model], c->name, BY_CHECKPOINT);
    for (const HfKey *k = HF_KEYS; k < HF_KEYS + HF_KEY_COUNT; k++) {
        const Json *v = hf_get(config, k->key);
        const FlagRow *row = &FLAGS[k->flag];
        if (!(k->classes & c->is) || told[k->flag] || (!v && k->missing && !*k->missing)) continue;
        CHECK(v || k->missing, "%s: expected \"%s\", found no such member\n  -> the config.json that belongs to these weights", path, k->key);
        const char *text = v ? hf_text(buf, sizeof buf, v) : k->missing;
        if (v && v->kind == JSON_BOOL) {                     // the flag's choice 0 or 1
            CHECK(*row->choices, "%s: expected \"%s\" to be a number, found %s\n  -> the config.json that belongs to these weights", path, k->key, text);
            text = flag_word(buf, sizeof buf, row->choices, v->boolean);
        }
        flag_set(set, row, text, BY_CHECKPOINT);
        told[k->flag] = true;
    }
    check_format(head, sizeof head, "%lld", (long long)(set->f.width / set->f.heads));
    for (const HfMust *k = HF_MUSTS; k < HF_MUSTS + HF_MUST_COUNT; k++) {
        if (!(k->classes & c->is)) continue;
        const Json *v = hf_get(config, k->key);
        bool of_head = strstr(k->allowed, "head") != NULL, said = v || json_get(config, k->key);        // null counts as said
        const char *text = v ? hf_text(buf, sizeof buf, v) : said ? "null" : k->missing;
        CHECK(flag_choice(k->allowed, text) >= 0 || (of_head && !strcmp(text, head)), "%s: \"%s\" is %s%s; this program only computes %s%s%s\n  -> another model", path, k->key, text,
              said ? "" : " where it is not said", k->allowed, of_head ? ", the width of a head, hidden_size / num_attention_heads = " : "", of_head ? head : "");
    }
    json_free(config);
}

// Flags on the command line, or of a --model there, that say otherwise than the folder's config.json; what only trains (losses of routers, --seq) is free.
static inline bool hf_is_fixed(int flag) { return flag > FLAG_model && flag < FLAG_init && flag != FLAG_seq && (flag < FLAG_balance_loss || flag > FLAG_balance_rate); }

static inline void hf_check_flags(const FlagSet *set, const FlagSet *before, const FlagSet *given, const char *folder) {
    char is[64], was[64], name[64];
    for (int i = 0; i < FLAG_COUNT; i++) {
        bool by_model = given->by[FLAG_model] == BY_USER && before->by[i] == BY_PRESET;
        const FlagSet *other = by_model ? before : NULL;
        if (given->by[i] >= BY_CHECKPOINT) other = given;
        if (!other || !hf_is_fixed(i)) continue;
        const char *a = flag_text(is, sizeof is, &set->f, &FLAGS[i]), *b = flag_text(was, sizeof was, &other->f, &FLAGS[i]);
        flag_name(name, sizeof name, &FLAGS[i]);
        CHECK(!strcmp(a, b), "%s is %s in %s and %s %s\n  -> leave it out", name, a, folder, b,
              other == before ? "by --model" : given->by[i] == BY_USER ? "on the command line"
                                                                       : "in --config");
    }
}

// ------------------------------------------------------------------------------------------------------------------ weights

// The tensors of a folder's files, in one list; used: those that were asked for.
typedef struct { SafetensorsFile *files; const Tensor **tensors; bool *used; int file_count, count; } HfTensors;

static inline const Tensor *hf_find(HfTensors *all, const char *name) {
    for (int i = 0; i < all->count; i++) {
        const char *has = all->tensors[i]->name;
        // Folders of the model without its head leave out the first word.
        if (strcmp(has, name) && (strncmp(name, "transformer.", 12) || strcmp(has, name + 12))) continue;
        all->used[i] = true;
        return all->tensors[i];
    }
    return NULL;
}

// model.safetensors, or the shards of the index, each a file of the folder.
static inline HfTensors hf_open(const char *folder) {
    HfTensors all;
    char path[PATH_CAP], index_path[PATH_CAP];
    Json *index = NULL;
    const Json *map = NULL, *first = NULL;
    memset(&all, 0, sizeof all);
    if (!file_exists(check_format(path, sizeof path, "%s/model.safetensors", folder))) {
        check_format(index_path, sizeof index_path, "%s/model.safetensors.index.json", folder);
        CHECK(file_exists(index_path), "%s: expected model.safetensors or model.safetensors.index.json, found neither\n  -> convert the weights to safetensors", folder);
        index = json_read_file(index_path);
        map = json_need(index, "weight_map", JSON_OBJECT, index_path);
        CHECK(map->count, "%s: expected tensors and their files in \"weight_map\", found none\n  -> download the file again", index_path);
    }
    all.files = (SafetensorsFile *)check_alloc((map ? map->count : 1) * sizeof *all.files, "the list of files");
    if (!map) safetensors_open(path, &all.files[all.file_count++]);
    for (const Json *t = map ? map->first : NULL; t; t = t->next) {
        bool plain = t->kind == JSON_STRING && *t->text && *t->text != '.' && !strchr(t->text, '/');
        CHECK(plain, "%s: expected %s in a file of this folder, found %s\n  -> download the index again, and do not trust where it is from", index_path, t->key,
              t->kind == JSON_STRING ? t->text : "no name");
        for (first = map->first; first != t && strcmp(first->text, t->text); first = first->next) {}
        if (first == t) safetensors_open(check_format(path, sizeof path, "%s/%s", folder, t->text), &all.files[all.file_count++]);
    }
    for (int i = 0; i < all.file_count; i++) all.count += all.files[i].count;
    all.tensors = (const Tensor **)check_alloc((size_t)all.count * sizeof *all.tensors, "the list of tensors");
    all.used = (bool *)check_alloc((size_t)all.count, "the list of tensors");
    for (int i = 0, n = 0; i < all.file_count; i++)
        for (int k = 0; k < all.files[i].count; k++) all.tensors[n++] = &all.files[i].tensors[k];
    json_free(index);
    return all;
}

// One of our tensors; of experts, whose matrices are one below the other, one of theirs for each.
static inline void hf_read_entry(HfTensors *all, const HfClass *c, const Model *m, const Entry *e, void *weights, size_t element, const char *folder) {
    HfTensor same = {0, e->row.name, e->row.name, 0, 0, 1};
    const HfTensor *row = &same;
    for (const HfTensor *t = HF_TENSORS; t < HF_TENSORS + HF_TENSOR_COUNT; t++)
        if ((t->classes & c->is) && !strcmp(t->ours, e->row.name)) row = t;
    int copies = strstr(row->theirs, "experts.%d") ? m->moe.E : 1, rank = e->row.rows == 1 ? 1 : 2;
    int64_t rows = (rank == 1 ? e->row.cols : entry_rows(m, e)) / copies, cols = rank == 1 ? 1 : e->row.cols, want[2] = {rows * row->parts, cols};
    if (row->turned) want[0] = cols, want[1] = rows * row->parts;
    for (int x = 0; x < copies; x++) {
        char name[128];
        const Tensor *t = hf_find(all, check_format(name, sizeof name, row->theirs, e->layer, x));
        CHECK(t, "%s has no tensor %s, which its config.json needs\n  -> all files of the model, and the config.json that belongs to them", folder, name);
        CHECK(tensor_fits(t, rank, want, e->id == PARAM_wpe),                               // a shorter --seq takes the first positions
              "%s: %s has shape [%lld, %lld], expected [%lld, %lld]\n  -> the config.json that belongs to these weights%s", folder, name, (long long)(t->rank > 0 ? t->shape[0] : 1),
              (long long)(t->rank > 1 ? t->shape[1] : 1), (long long)want[0], (long long)want[1], e->id == PARAM_wpe ? ", or a smaller --seq" : "");
        int bytes = tensor_dtype_bytes(t->dtype);
        bool bfloat = !strcmp(t->dtype, "BF16");
        CHECK(bfloat || t->dtype[0] == 'F', "%s: expected %s in F32, BF16 or F16, found %s\n  -> convert the file", folder, name, t->dtype);
#pragma omp parallel for schedule(static)
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < cols; j++) {
                int64_t at = row->part * rows + i, to = (x * rows + i) * cols + j;
                real_put(weights, element, to, tensor_real(t, bytes, bfloat, row->turned ? j * want[1] + at : at * cols + j));
            }
    }
}

// All weights of the model from a folder that hf_read_config described.
static inline void hf_read_weights(const Trainer *t, Gpt *gpt, const Model *m, const Layout *layout, const char *folder) {
    char path[PATH_CAP];
    Json *config = json_read_file(check_format(path, sizeof path, "%s/config.json", folder));
    const HfClass *c = hf_class(config, path);
    HfTensors all = hf_open(folder);
    for (int k = 0; k < layout->count; k++) {
        const Entry *e = &layout->entries[k];
        hf_read_entry(&all, c, m, e, t->tensor(gpt, WEIGHTS, e), t->element, folder);
        real_check_finite(t->tensor(gpt, WEIGHTS, e), t->element, e->size, folder, e->name);
    }
    t->store(gpt, WEIGHTS, 0);
    const Tensor *head = m->tied ? hf_find(&all, "lm_head.weight") : NULL, *wte = head ? hf_find(&all, c->is == IS_GPT2 ? "transformer.wte.weight" : "model.embed_tokens.weight") : NULL;
    CHECK(!head || (tensor_bytes(head) == tensor_bytes(wte) && !memcmp(head->data, wte->data, (size_t)tensor_bytes(wte))),
          "%s: \"tie_word_embeddings\" is true, but lm_head.weight is not the embedding\n  -> false, if the head is its own", path);
    for (int i = 0; i < all.count; i++) {
        const char *name = all.tensors[i]->name;
        for (size_t b = 0; b < sizeof HF_BUFFERS / sizeof *HF_BUFFERS; b++) {
            size_t n = strlen(name), end = strlen(HF_BUFFERS[b]);
            if (n > end && !strcmp(name + n - end, HF_BUFFERS[b])) all.used[i] = true;
        }
        CHECK(all.used[i], "%s holds %s, which a %s of this config.json does not have\n  -> the config.json that belongs to these weights", folder, name, c->name);
    }
    for (int i = 0; i < all.file_count; i++) safetensors_close(&all.files[i]);
    free(all.files);
    free(all.tensors);
    free(all.used);
    json_free(config);
}
