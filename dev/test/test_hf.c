// test_hf.c: llmc/hf.h. Folders as Hugging Face transformers write them, with values that say whose they are: each of our tensors must hold the ones that belong there, by
// names, shapes and steps written here from transformers' own classes and not from the table under test. Broken folders are refused. (dev/test/test_hf.py asks transformers.)
#include "test.h"
#include "../../llmc/config.h"
#include "files.h"

typedef struct { const char *name; int64_t rows, cols; } Theirs;                       // rows 0: a vector
typedef struct { const char *ours, *theirs; int64_t row, rows, cols, by_row, by_col, at; } Belongs;   // ours[row + i][j] = theirs[i * by_row + j * by_col + at]

// Small numbers that all types hold exactly.
static double value_of(const char *name, int64_t i) { return (double)(rand_at(rand_key(5, name, 0), (uint64_t)i) % 256) / 64 - 2; }

static const char GPT2_CONFIG[] = "{\"architectures\": [\"GPT2LMHeadModel\"], \"n_layer\": 2, \"n_embd\": 8, \"n_head\": 2, \"n_positions\": 6, \"n_inner\": null, \"vocab_size\": 11, "
    "\"layer_norm_epsilon\": 1e-03, \"activation_function\": \"gelu_new\", \"tie_word_embeddings\": true, \"attn_pdrop\": 0.1}";
#define GPT2_LAYER(l) {"transformer.h." l ".ln_1.weight", 0, 8}, {"transformer.h." l ".ln_1.bias", 0, 8}, {"transformer.h." l ".attn.c_attn.weight", 8, 24}, {"transformer.h." l ".attn.c_attn.bias", 0, 24}, \
    {"transformer.h." l ".attn.c_proj.weight", 8, 8}, {"transformer.h." l ".attn.c_proj.bias", 0, 8}, {"transformer.h." l ".ln_2.weight", 0, 8}, {"transformer.h." l ".ln_2.bias", 0, 8}, \
    {"transformer.h." l ".mlp.c_fc.weight", 8, 32}, {"transformer.h." l ".mlp.c_fc.bias", 0, 32}, {"transformer.h." l ".mlp.c_proj.weight", 32, 8}, {"transformer.h." l ".mlp.c_proj.bias", 0, 8}
static const Theirs GPT2_TENSORS[] = {{"transformer.wte.weight", 11, 8}, {"transformer.wpe.weight", 6, 8}, GPT2_LAYER("0"), GPT2_LAYER("1"), {"transformer.ln_f.weight", 0, 8}, {"transformer.ln_f.bias", 0, 8},
    {"transformer.h.0.attn.bias", 6, 6}};
static const Belongs GPT2_BELONGS[] = {
    {"model.embed_tokens.weight", "transformer.wte.weight", 0, 11, 8, 8, 1, 0}, {"model.embed_positions.weight", "transformer.wpe.weight", 0, 6, 8, 8, 1, 0},
    {"model.layers.1.input_layernorm.weight", "transformer.h.1.ln_1.weight", 0, 1, 8, 0, 1, 0}, {"model.layers.1.input_layernorm.bias", "transformer.h.1.ln_1.bias", 0, 1, 8, 0, 1, 0},
    {"model.layers.1.self_attn.q_proj.weight", "transformer.h.1.attn.c_attn.weight", 0, 8, 8, 1, 24, 0}, {"model.layers.1.self_attn.k_proj.weight", "transformer.h.1.attn.c_attn.weight", 0, 8, 8, 1, 24, 8},
    {"model.layers.0.self_attn.v_proj.weight", "transformer.h.0.attn.c_attn.weight", 0, 8, 8, 1, 24, 16}, {"model.layers.1.self_attn.q_proj.bias", "transformer.h.1.attn.c_attn.bias", 0, 1, 8, 0, 1, 0},
    {"model.layers.1.self_attn.k_proj.bias", "transformer.h.1.attn.c_attn.bias", 0, 1, 8, 0, 1, 8}, {"model.layers.1.self_attn.v_proj.bias", "transformer.h.1.attn.c_attn.bias", 0, 1, 8, 0, 1, 16},
    {"model.layers.0.self_attn.o_proj.weight", "transformer.h.0.attn.c_proj.weight", 0, 8, 8, 1, 8, 0}, {"model.layers.0.self_attn.o_proj.bias", "transformer.h.0.attn.c_proj.bias", 0, 1, 8, 0, 1, 0},
    {"model.layers.1.pre_feedforward_layernorm.weight", "transformer.h.1.ln_2.weight", 0, 1, 8, 0, 1, 0}, {"model.layers.1.mlp.up_proj.weight", "transformer.h.1.mlp.c_fc.weight", 0, 32, 8, 1, 32, 0},
    {"model.layers.1.mlp.up_proj.bias", "transformer.h.1.mlp.c_fc.bias", 0, 1, 32, 0, 1, 0}, {"model.layers.1.mlp.down_proj.weight", "transformer.h.1.mlp.c_proj.weight", 0, 8, 32, 1, 8, 0},
    {"model.layers.1.mlp.down_proj.bias", "transformer.h.1.mlp.c_proj.bias", 0, 1, 8, 0, 1, 0}, {"model.norm.weight", "transformer.ln_f.weight", 0, 1, 8, 0, 1, 0}, {"model.norm.bias", "transformer.ln_f.bias", 0, 1, 8, 0, 1, 0}};

#define MIXTRAL "model.layers.0.block_sparse_moe."
static const char MIXTRAL_CONFIG[] = "{\"architectures\": [\"MixtralForCausalLM\"], \"num_hidden_layers\": 1, \"hidden_size\": 8, \"num_attention_heads\": 2, \"num_key_value_heads\": 1, \"intermediate_size\": 5, "
    "\"max_position_embeddings\": 6, \"vocab_size\": 11, \"rms_norm_eps\": 1e-05, \"hidden_act\": \"silu\", \"num_local_experts\": 2, \"num_experts_per_tok\": 1, \"sliding_window\": null, "
    "\"rope_parameters\": {\"rope_theta\": 500.0, \"rope_type\": \"default\"}, \"tie_word_embeddings\": false}";
static const Theirs MIXTRAL_TENSORS[] = {{"model.embed_tokens.weight", 11, 8}, {"lm_head.weight", 11, 8}, {"model.norm.weight", 0, 8}, {"model.layers.0.input_layernorm.weight", 0, 8},
    {"model.layers.0.post_attention_layernorm.weight", 0, 8}, {"model.layers.0.self_attn.q_proj.weight", 8, 8}, {"model.layers.0.self_attn.k_proj.weight", 4, 8}, {"model.layers.0.self_attn.v_proj.weight", 4, 8},
    {"model.layers.0.self_attn.o_proj.weight", 8, 8}, {MIXTRAL "gate.weight", 2, 8}, {MIXTRAL "experts.0.w1.weight", 5, 8}, {MIXTRAL "experts.0.w2.weight", 8, 5}, {MIXTRAL "experts.0.w3.weight", 5, 8},
    {MIXTRAL "experts.1.w1.weight", 5, 8}, {MIXTRAL "experts.1.w2.weight", 8, 5}, {MIXTRAL "experts.1.w3.weight", 5, 8}};
static const Belongs MIXTRAL_BELONGS[] = {
    {"lm_head.weight", "lm_head.weight", 0, 11, 8, 8, 1, 0}, {"model.layers.0.pre_feedforward_layernorm.weight", "model.layers.0.post_attention_layernorm.weight", 0, 1, 8, 0, 1, 0},
    {"model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.k_proj.weight", 0, 4, 8, 8, 1, 0}, {"model.layers.0.mlp.gate.weight", MIXTRAL "gate.weight", 0, 2, 8, 8, 1, 0},
    {"model.layers.0.mlp.experts.gate_proj.weight", MIXTRAL "experts.1.w1.weight", 5, 5, 8, 8, 1, 0}, {"model.layers.0.mlp.experts.up_proj.weight", MIXTRAL "experts.1.w3.weight", 5, 5, 8, 8, 1, 0},
    {"model.layers.0.mlp.experts.up_proj.weight", MIXTRAL "experts.0.w3.weight", 0, 5, 8, 8, 1, 0}, {"model.layers.0.mlp.experts.down_proj.weight", MIXTRAL "experts.1.w2.weight", 8, 8, 5, 5, 1, 0}};

// A folder: a model, and what is unusual about this one. from, to: in config.json; index: the files are two shards, and this is added to the index (" for nothing).
typedef struct { const char *from, *to, *drop, *add, *misshape, *dtype, *index, *words, *flags; } Folder;
typedef struct { const char *config; const Theirs *tensors; size_t count; } Source;
static const Source GPT2_SOURCE = {GPT2_CONFIG, GPT2_TENSORS, sizeof GPT2_TENSORS / sizeof *GPT2_TENSORS}, MIXTRAL_SOURCE = {MIXTRAL_CONFIG, MIXTRAL_TENSORS, sizeof MIXTRAL_TENSORS / sizeof *MIXTRAL_TENSORS};

static void *values(const char *name, int64_t count, const char *dtype) {
    char *out = (char *)check_alloc((size_t)count * 8, "values");
    for (int64_t i = 0; i < count; i++) {
        float v = (float)value_of(name, i);
        uint32_t bits;
        memcpy(&bits, &v, 4);
        uint16_t brain = (uint16_t)(bits >> 16), half = v == 0 ? 0 : (uint16_t)((bits >> 16 & 0x8000) | ((bits >> 13 & 0x3ffff) - (112 << 10)));
        int bytes = tensor_dtype_bytes(dtype);
        memcpy(out + i * bytes, bytes == 4 ? (void *)&v : !strcmp(dtype, "BF16") ? &brain : &half, (size_t)bytes);
    }
    return out;
}

static const char *write_folder(const Source *s, const Folder *f) {
    const char *dir = test_dir("hf");
    char path[PATH_CAP], config[2048], index[8192] = "{\"weight_map\": {";
    Tensor tensors[64] = {{0}};
    int count = 0;
    const char *at = f->from ? strstr(s->config, f->from) : NULL;
    CHECK(!f->from || at, "no %s in the config\n  -> correct the test", f->from);
    if (at) check_format(config, sizeof config, "%.*s%s%s", (int)(at - s->config), s->config, f->to, at + strlen(f->from));
    write_text(check_format(path, sizeof path, "%s/config.json", dir), at ? config : s->config);
    const char *add = f->add;
    for (size_t i = 0; i < s->count + (add != NULL); i++) {
        Theirs extra = {add, 11, 8};
        const Theirs *t = i < s->count ? &s->tensors[i] : &extra;
        if (f->drop && !strcmp(t->name, f->drop)) continue;
        Tensor one = {.name = t->name, .dtype = f->dtype ? f->dtype : "F32", .rank = t->rows ? 2 : 1, .shape = {t->rows ? t->rows : t->cols, t->cols}};
        if (strstr(t->name, ".attn.bias")) one.dtype = "BOOL";               // a mask
        if (f->misshape && !strcmp(t->name, f->misshape)) one.shape[0]++;
        one.data = values(t->name, tensor_count(&one), one.dtype);
        tensors[count++] = one;
    }
    if (!f->index) write_tensors(check_format(path, sizeof path, "%s/model.safetensors", dir), tensors, count);
    else {
        write_tensors(check_format(path, sizeof path, "%s/one.safetensors", dir), tensors, count / 2);
        write_tensors(check_format(path, sizeof path, "%s/two.safetensors", dir), tensors + count / 2, count - count / 2);
        for (int i = 0; i < count; i++) {
            size_t n = strlen(index);
            check_format(index + n, sizeof index - n, "%s\"%s\": \"%s.safetensors\"", i ? ", " : "", tensors[i].name, i < count / 2 ? "one" : "two");
        }
        size_t n = strlen(index);
        check_format(index + n, sizeof index - n, "%s}}", f->index);
        write_text(check_format(path, sizeof path, "%s/model.safetensors.index.json", dir), index);
    }
    for (int i = 0; i < count; i++) free((void *)(uintptr_t)tensors[i].data);
    return dir;
}

typedef struct { FlagSet set; Model m; Layout layout; Gpt *gpt; } Read;

static Read read_folder(const char *dir, const char *flags) {
    Read r;
    FlagSet given, before;
    flags_default(&r.set);
    flags_default(&given);
    flags_parse_text(&given, flags, BY_USER);
    if (given.by[FLAG_model] == BY_USER) flags_preset(&r.set, given.f.model);
    before = r.set;
    hf_read_config(&r.set, dir, "PRE");
    hf_check_flags(&r.set, &before, &given, dir);
    flags_override(&r.set, &given, false);
    r.m = model_from_flags(&r.set.f, &MODES[MODE_PRE]);
    r.layout = layout_make(&r.m);
    r.gpt = judge_fp64.create(&r.m, &(Setup){.B = 1, .T = r.m.T, .batch = 1});
    hf_read_weights(&judge_fp64, r.gpt, &r.m, &r.layout, dir);
    return r;
}

static void free_read(Read *r) {
    judge_fp64.destroy(r->gpt);
    layout_free(&r->layout);
}

static void expect_belongs(const Read *r, const Belongs *b, int count, const char *how) {
    for (; count-- > 0; b++) {
        const Entry *e = r->layout.entries, *end = e + r->layout.count;
        while (e < end && strcmp(e->name, b->ours)) e++;
        EXPECT(e < end && e->row.cols == b->cols, "%s: %s is not a tensor of %lld columns", how, b->ours, (long long)b->cols);
        if (e == end) continue;
        const double *w = (const double *)judge_fp64.tensor(r->gpt, WEIGHTS, e) + b->row * b->cols;
        int64_t wrong = 0;
        for (int64_t i = 0; i < b->rows; i++)
            for (int64_t j = 0; j < b->cols; j++) wrong += w[i * b->cols + j] != value_of(b->theirs, i * b->by_row + j * b->by_col + b->at);
        EXPECT(wrong == 0, "%s: %lld of %lld values of %s are not those of %s", how, (long long)wrong, (long long)(b->rows * b->cols), b->ours, b->theirs);
    }
}

static void test_values(void) {
    static const char *const DTYPES[] = {"F32", "BF16", "F16"};
    for (int i = 0; i < 6; i++) {
        Folder f = {.dtype = DTYPES[i % 3], .index = i < 3 ? NULL : ""};
        Read r = read_folder(write_folder(&GPT2_SOURCE, &f), "");
        EXPECT(r.m.L == 2 && r.m.C == 8 && r.m.NH == 2 && r.m.F == 32 && r.m.V == 11 && r.m.T == 6 && r.m.eps == 1e-3 && r.m.layernorm && r.m.bias && !r.m.rope && !r.m.swiglu && r.m.tied, "GPT-2's config.json");
        expect_belongs(&r, GPT2_BELONGS, sizeof GPT2_BELONGS / sizeof *GPT2_BELONGS, f.dtype);
        free_read(&r);
        r = read_folder(write_folder(&MIXTRAL_SOURCE, &f), "");
        EXPECT(r.m.KV == 1 && r.m.F == 5 && r.m.theta == 500 && r.m.moe.E == 2 && r.m.moe.K == 1 && r.m.moe.router == ROUTER_SOFTMAX_RENORM && !r.m.tied && r.m.rope && r.m.swiglu && !r.m.layernorm, "Mixtral's config.json");
        expect_belongs(&r, MIXTRAL_BELONGS, sizeof MIXTRAL_BELONGS / sizeof *MIXTRAL_BELONGS, f.dtype);
        free_read(&r);
    }
    Folder shorter = {.flags = ""};
    Read r = read_folder(write_folder(&GPT2_SOURCE, &shorter), "--seq 4 --model nanogpt-char --width 8 --layers 2 --heads 2 --bias on --eps 1e-3 --vocab 11");
    Belongs first = {"model.embed_positions.weight", "transformer.wpe.weight", 0, 4, 8, 8, 1, 0};
    EXPECT(r.m.T == 4 && r.set.f.lr == 1e-3 && r.set.f.beta2 == 0.99, "a shorter --seq, and what --model says of training");
    expect_belongs(&r, &first, 1, "the first positions");
    free_read(&r);
}

static void body_read(void *arg) {
    const Folder *f = (const Folder *)arg;
    Read r = read_folder(write_folder(f->to && f->from && strstr(MIXTRAL_CONFIG, f->from) && !strstr(GPT2_CONFIG, f->from) ? &MIXTRAL_SOURCE : &GPT2_SOURCE, f), f->flags ? f->flags : "");
    free_read(&r);
}

static void test_refused_folders(void) {
    static Folder refused[] = {
        {.from = "GPT2LMHeadModel", .to = "FooForCausalLM", .words = "found FooForCausalLM"}, {.from = "[\"GPT2LMHeadModel\"]", .to = "[]", .words = "found another list"},
        {.from = "GPT2LMHeadModel", .to = "Olmo2ForCausalLM", .words = "make train_gpt NORM_MODE=OLMO2"}, {.from = "\"n_layer\": 2, ", .to = "", .words = "expected \"n_layer\", found no such member"},
        {.from = "\"n_layer\": 2", .to = "\"n_layer\": \"x\"", .words = "--layers=x: expected a number"}, {.from = "\"n_layer\": 2", .to = "\"n_layer\": true", .words = "expected \"n_layer\" to be a number"},
        {.from = "\"n_layer\": 2", .to = "\"n_layer\": 1", .words = "holds transformer.h.1"}, {.from = "\"n_layer\": 2", .to = "\"n_layer\": 3", .words = "no tensor transformer.h.2.ln_1.weight"},
        {.from = "\"vocab_size\": 11", .to = "\"vocab_size\": 12", .words = "wte.weight has shape [11, 8], expected [12, 8]"}, {.from = "gelu_new", .to = "gelu", .words = "\"activation_function\" is gelu; this program only computes gelu_new"},
        {.from = "\"attn_pdrop\": 0.1", .to = "\"scale_attn_by_inverse_layer_idx\": true", .words = "\"scale_attn_by_inverse_layer_idx\" is true"},
        {.from = "\"attn_pdrop\": 0.1", .to = "\"quantization_config\": {\"bits\": 4}", .words = "\"quantization_config\" is {...}"}, {.from = "{\"arch", .to = "[{\"arch", .words = "not valid JSON"},
        {.from = "\"sliding_window\": null", .to = "\"sliding_window\": 4096", .words = "\"sliding_window\" is 4096"}, {.from = "\"hidden_act\": \"silu\"", .to = "\"hidden_act\": \"gelu\"", .words = "\"hidden_act\" is gelu; this program only computes silu"},
        {.from = "\"hidden_act\": \"silu\"", .to = "\"head_dim\": 8", .words = "\"head_dim\" is 8; this program only computes null|head, the width of a head, hidden_size / num_attention_heads = 4"}, {.from = "\"hidden_act\": \"silu\"", .to = "\"attention_bias\": true", .words = "\"attention_bias\" is true"},
        {.from = "\"hidden_act\": \"silu\"", .to = "\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2}", .words = "\"rope_scaling\" is {...}"},
        {.from = "\"rope_type\": \"default\"", .to = "\"rope_type\": \"yarn\"", .words = "\"rope_parameters.rope_type\" is yarn"},
        {.from = "\"rope_type\": \"default\"", .to = "\"partial_rotary_factor\": 0.5", .words = "partial_rotary_factor\" is 0.5"},
        {.from = "\"rope_theta\": 500.0, ", .to = "", .words = "expected \"rope_theta\", found no such member"},
        {.from = "\"tie_word_embeddings\": false", .to = "\"tie_word_embeddings\": true", .words = "lm_head.weight is not the embedding"},
        {.drop = "lm_head.weight", .from = "\"hidden_act\": \"silu\"", .to = "\"hidden_act\": \"silu\"", .words = "no tensor lm_head.weight"},
        {.from = "\"tie_word_embeddings\": true", .to = "\"tie_word_embeddings\": false", .words = "no tensor lm_head.weight"}, {.add = "lm_head.weight", .words = "lm_head.weight is not the embedding"},
        {.drop = "transformer.h.1.attn.c_attn.bias", .words = "no tensor transformer.h.1.attn.c_attn.bias"}, {.add = "transformer.h.0.attn.c_more.weight", .words = "holds transformer.h.0.attn.c_more.weight"},
        {.misshape = "transformer.h.1.attn.c_attn.weight", .words = "c_attn.weight has shape [9, 24], expected [8, 24]"}, {.misshape = "transformer.ln_f.bias", .words = "ln_f.bias has shape [9, 1], expected [8, 1]"},
        {.dtype = "I32", .words = "in F32, BF16 or F16, found I32"}, {.index = ", \"x\": \"../x.safetensors\"", .words = "a file of this folder, found ../x.safetensors"},
        {.index = ", \"x\": \"/etc/passwd\"", .words = "a file of this folder, found /etc/passwd"}, {.index = ", \"x\": \".hidden\"", .words = "found .hidden"}, {.index = ", \"x\": 5", .words = "found no name"},
        {.index = ", \"x\": \"three.safetensors\"", .words = "three.safetensors: expected a whole safetensors file"},
        {.flags = "--layers 3", .words = "and 3 on the command line"}, {.flags = "--norm rms", .words = "--norm is layer in "}, {.flags = "--positions rope", .words = "--positions is learned in"},
        {.flags = "--model gpt2-124M", .words = "and 12 by --model"}, {.flags = "--seq 7", .words = "wpe.weight has shape [6, 8], expected [7, 8]"}};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) EXPECT_REFUSAL(body_read, &refused[i], refused[i].words);
    Folder ignored = {.add = "transformer.h.1.attn.masked_bias"};
    Read r = read_folder(write_folder(&GPT2_SOURCE, &ignored), "");
    free_read(&r);
}

// arg: the file, and after a space a command that damages it
static void body_damage(void *arg) {
    char path[PATH_CAP];
    struct stat info;
    const char *name = (const char *)arg;
    Folder f = {.index = strncmp(name, "two", 3) ? NULL : ""};
    const char *dir = write_folder(&GPT2_SOURCE, &f), *how = strchr(name, ' ') + 1;
    check_format(path, sizeof path, "%s/%.*s", dir, (int)(how - 1 - name), name);
    bool done = stat(path, &info) == 0 && (strcmp(how, "cut") ? unlink(path) == 0 : truncate(path, info.st_size - 4) == 0);
    Read r = read_folder(done ? dir : "nothing was damaged", "");
    free_read(&r);
}

void test_hf(void) {
    test_values();
    test_refused_folders();
    EXPECT_REFUSAL(body_damage, (void *)"model.safetensors cut", "model.safetensors: expected a whole safetensors file");
    EXPECT_REFUSAL(body_damage, (void *)"two.safetensors cut", "two.safetensors: expected a whole safetensors file");
    EXPECT_REFUSAL(body_damage, (void *)"model.safetensors lost", "found neither");
    EXPECT_REFUSAL(body_damage, (void *)"two.safetensors lost", "two.safetensors: expected a whole safetensors file, found: No such file");
    EXPECT_REFUSAL(body_damage, (void *)"config.json lost", "cannot read");
}
