// test_oracle.c: link 3 of the chain of trust. Another implementation of every placement
// (dev/oracle/oracle.py: PyTorch, double precision, automatic differentiation, torch.optim's AdamW
// and Muon)
// must give the judge's losses, gradients and parameters after three steps. Needs its goldens only,
// not Python.
//
// dev/oracle/goldens/*.safetensors, written by the safetensors library; oracle.py's first comment
// says what they hold.
#include "files.h"
#include "../../llmc/run/trainer.h"
#include "test.h"

#define FOLDER "dev/oracle/goldens/"
#define REMEDY "\n  -> python3 dev/oracle/oracle.py"

// Differences allowed: of a loss relative to it, of a tensor to its norm. A gradient that is zero
// but for rounding (a key's bias) has no scale of its own: 1e-6 of the whole gradient's norm takes
// its place.
static const double LOSS_ERROR = 1e-12, TENSOR_ERROR = 1e-9, SMALLEST = 1e-6;
enum { STEPS = 3 };

// One file: models of one shape.
typedef struct {
    const char *path;
    SafetensorsFile file;
    Json *about;
    const Json *settings;
    const Tensor **weights;
    int count;
} Golden;

// One model, its optimizer, and the entries of its layout in the order of the golden tensors.
typedef struct {
    const Golden *g;
    const Json *json;
    const char *name;
    Model m;
    Layout layout;
    const Entry **order;
    int B, T, micro, optimizer;
    double z_loss, clip, *gradients, *parameters, steps[STEPS][4];
    Optimizer settings;          // of an update
    Documents documents;
    int32_t *inputs, *targets;
} Case;

// ----------------------------------------------------------------------------------------- reading

static int by_name(const void *a, const void *b) {
    return strcmp((*(const Tensor *const *)a)->name, (*(const Tensor *const *)b)->name);
}

// Weights are what is no batch and no result: names with "model." or "lm_head." in front, in the
// order of their bytes.
static bool open_golden(Golden *g, const char *path) {
    char error[256];
    *g = (Golden){.path = path};
    bool ok = safetensors_open(path, &g->file, error);
    EXPECT(ok, "%s: expected a golden, found: %s" REMEDY, path, error);
    if (!ok) return false;
    const char *text = json_get_string(json_get(g->file.header, "__metadata__"), "oracle", path);
    g->about = json_parse(text, strlen(text), path);
    g->settings = json_need(g->about, "settings", JSON_OBJECT, path);
    g->weights = (const Tensor **)check_alloc((size_t)g->file.count * sizeof *g->weights,
                                              "the weights of a golden");
    for (int i = 0; i < g->file.count; i++) {
        const char *name = g->file.tensors[i].name;
        if (!strncmp(name, "model.", 6) || !strncmp(name, "lm_head.", 8))
            g->weights[g->count++] = &g->file.tensors[i];
    }
    qsort(g->weights, (size_t)g->count, sizeof *g->weights, by_name);
    return true;
}

static void close_golden(Golden *g) {
    json_free(g->about);
    free(g->weights);
    safetensors_close(&g->file);
}

// The case's own setting, or the file's.
static const Json *holder(const Case *c, const char *key) {
    return json_get(c->json, key) ? c->json : c->g->settings;
}
static int integer(const Case *c, const char *key) {
    return (int)json_get_int(holder(c, key), key, c->g->path);
}
static int yes(const Case *c, const char *key) {
    return json_get_bool(holder(c, key), key, c->g->path);
}
static double number(const Case *c, const char *key) {
    return json_get_number(holder(c, key), key, c->g->path);
}

static void numbers(const Case *c, const char *key, double *out, size_t count) {
    const Json *array = json_need(holder(c, key), key, JSON_ARRAY, c->g->path);
    EXPECT(array->count == count, "%s %s: %zu values of %s, expected %zu", c->g->path, c->name,
           array->count, key, count);
    size_t i = 0;
    for (const Json *v = array->first; v && i < count; v = v->next) out[i++] = v->number;
}

static int choice(const Case *c, const char *key, const char *const *names, int count) {
    const char *name = json_get_string(holder(c, key), key, c->g->path);
    int i = 0;
    while (i < count && strcmp(names[i], name) != 0) i++;
    CHECK(i < count, "%s %s: no %s %s" REMEDY, c->g->path, c->name, key, name);
    return i;
}

static Moe read_moe(const Case *c) {
    static const char *const ROUTERS[] = {"softmax", "softmax-renorm", "sigmoid"},
                             *const LOSSES[] = {"mean", "sum"};
    return (Moe){.E = integer(c, "moe.E"), .K = integer(c, "moe.K"),
                 .dense = integer(c, "moe.dense"), .dense_F = integer(c, "moe.dense_F"),
                 .shared_F = integer(c, "moe.shared_F"),
                 .router = choice(c, "moe.router", ROUTERS, 3),
                 .losses = choice(c, "moe.losses", LOSSES, 2), .scale = number(c, "moe.scale"),
                 .balance = number(c, "moe.balance"), .sequence = number(c, "moe.sequence"),
                 .z = number(c, "moe.z"),
                 .bias_rate = number(c, "moe.bias_rate")};
}

// A model as the trainer makes it of flags: the mode's own norm before the head, unless the case
// forces one.
static Model read_model(const Case *c) {
    const char *mode = json_get_string(c->json, "mode", c->g->path);
    const char *sdd = json_get_string(holder(c, "sdd"), "sdd", c->g->path);
    Model m = {.L = integer(c, "L"), .C = integer(c, "C"), .NH = integer(c, "NH"),
               .KV = integer(c, "KV"), .HS = integer(c, "HS"), .F = integer(c, "F"),
               .V = integer(c, "V"), .Vp = integer(c, "Vp"), .T = integer(c, "T"),
               .kv_rank = integer(c, "kv_rank"), .rope_size = integer(c, "rope_size"),
               .norm = yes(c, "dyt") ? NORM_DYT : yes(c, "layernorm"), .rope = yes(c, "rope"),
               .bias = yes(c, "qkv_bias") ? BIAS_QKV : yes(c, "bias"),
               .swiglu = yes(c, "swiglu"), .tied = yes(c, "tied"), .theta = number(c, "theta"),
               .rope_factor = number(c, "rope_factor"),
               .rope_original = number(c, "rope_original"),
               .eps = number(c, "eps"), .emb_scale = number(c, "emb_scale"),
               .mix_ratio = number(c, "mix_ratio")};
    if (integer(c, "moe.E")) m.moe = read_moe(c);
    for (int i = 0; i < MODE_COUNT; i++)
        if (MODES[i].selectable && !strcmp(MODES[i].name, mode)) m.mode = &MODES[i];
    for (int i = 0; i < SDD_COUNT; i++) if (!strcmp(SDDS[i].name, sdd)) m.sdd = &SDDS[i];
    CHECK(m.mode && m.sdd,
          "%s %s: expected a mode and an SDD setting of llmc/modes.h, found %s and %s\n  -> rename "
          "or remove it in dev/oracle/oracle.py, then"
          " python3 dev/oracle/oracle.py",
          c->g->path, c->name, mode, sdd);
    m.fin = yes(c, "final_norm") || m.mode->fin;
    return m;
}

static Optimizer read_optimizer(const Case *c) {
    Optimizer o = {.eps = number(c, "adam_eps"), .gain_target = number(c, "gain_target")};
    double betas[2] = {0, 0};
    numbers(c, "lr", o.lr, LR_BALANCE);
    o.lr[LR_BALANCE] = number(c, "moe.bias_rate");
    numbers(c, "decay", o.decay, 3);
    numbers(c, "betas", betas, 2);
    static const char *const SCALES[] = {"match_rms_adamw", "original"};
    o.muon_lr = number(c, "muon_lr");
    o.momentum = number(c, "momentum");
    o.muon_scale = choice(c, "muon_scale", SCALES, 2);
    o.beta1 = betas[0];
    o.beta2 = betas[1];
    return o;
}

static int64_t used(const Case *c, const Entry *e) { return entry_rows(&c->m, e) * e->row.cols; }

// Pairs the golden tensors of the case with the model's: none of either may be left over. Returns
// the values in all, or -1.
static int64_t pair_tensors(Case *c) {
    const Json *list = json_need(c->json, "tensors", JSON_ARRAY, c->g->path);
    int64_t total = 0;
    int found = 0, failed = test_count.failed;
    c->order = (const Entry **)check_alloc(list->count * sizeof *c->order, "the order of tensors");
    bool *met = (bool *)check_alloc((size_t)c->layout.count, "the tensors met");
    for (const Json *v = list->first; v; v = v->next) {
        CHECK(v->integer >= 0 && v->integer < c->g->count, "%s %s: no weight %lld" REMEDY,
              c->g->path, c->name, (long long)v->integer);
        const Tensor *t = c->g->weights[v->integer];
        int k = 0;
        while (k < c->layout.count && strcmp(c->layout.entries[k].name, t->name) != 0) k++;
        EXPECT(k < c->layout.count, "%s %s: the equations need %s, the model has no such tensor",
               c->g->path, c->name, t->name);
        if (k == c->layout.count) continue;
        const Entry *e = c->order[found++] = &c->layout.entries[k];
        bool fits = t->rank == 2 ? t->shape[0] == entry_rows(&c->m, e) && t->shape[1] == e->row.cols
                                 : t->rank == 1 && t->shape[0] >= e->size;
        EXPECT(fits, "%s %s: %s has %lld values in the golden, %lld x %lld in the model",
               c->g->path, c->name, t->name, (long long)tensor_count(t),
               (long long)entry_rows(&c->m, e), (long long)e->row.cols);
        met[k] = true;
        total += used(c, e);
    }
    for (int k = 0; k < c->layout.count; k++)
        EXPECT(met[k], "%s %s: no equation reads %s", c->g->path, c->name,
               c->layout.entries[k].name);
    free(met);
    return failed == test_count.failed ? total : -1;
}

// <case>.<what>, or <what> without a case: `count` values of that type.
static const Tensor *result(const Case *c, const char *of, const char *what, const char *dtype,
                            int64_t count) {
    char name[128];
    const Tensor *t = safetensors_find(&c->g->file, check_format(name, sizeof name, "%s%s%s", of,
                                                                 *of ? "." : "", what));
    bool ok = t && !strcmp(t->dtype, dtype) && tensor_count(t) == count;
    EXPECT(ok, "%s: expected %lld values in %s, found %lld" REMEDY, c->g->path, (long long)count,
           name, t ? (long long)tensor_count(t) : -1);
    return ok ? t : NULL;
}

static double *doubles(const Case *c, const char *what, int64_t count) {
    const Tensor *t = result(c, c->name, what, "F64", count);
    double *x = (double *)check_alloc((size_t)count * sizeof *x, "a golden");
    if (t) safetensors_read_real(t, 0, INT64_MAX, x, sizeof(double));
    return x;
}

static int32_t *batches(const Case *c, const char *what) {
    const Tensor *t = result(c, "", what, "I32", (int64_t)STEPS * c->B * c->T);
    int32_t *x =
        (int32_t *)check_alloc((size_t)STEPS * c->B * c->T * sizeof *x, "the batches of a golden");
    if (t) memcpy(x, t->data, (size_t)tensor_bytes(t));
    return x;
}

static bool read_case(Case *c, const Golden *g, const Json *json) {
    *c = (Case){.g = g, .json = json, .name = json->key};
    int failed = test_count.failed;
    c->m = read_model(c);
    static const char *const OPTIMIZERS[] = {"adamw", "muon"};
    c->settings = read_optimizer(c);
    c->optimizer = choice(c, "optimizer", OPTIMIZERS, 2);
    int separator = integer(c, "separator");
    c->documents = (Documents){separator >= 0, yes(c, "restart"), separator};
    c->B = integer(c, "B");
    c->T = integer(c, "seq");
    c->micro = integer(c, "micro");
    c->z_loss = number(c, "z_loss");
    c->clip = number(c, "clip");
    c->layout = layout_make(&c->m);
    int64_t total = pair_tensors(c);
    if (total < 0) return false;
    double *steps = doubles(c, "steps", STEPS * 4);
    memcpy(c->steps, steps, sizeof c->steps);
    free(steps);
    c->gradients = doubles(c, "gradients", total);
    c->parameters = doubles(c, "parameters", total);
    c->inputs = batches(c, "inputs");
    c->targets = batches(c, "targets");
    return failed == test_count.failed;
}

static void free_case(Case *c) {
    layout_free(&c->layout);
    free(c->order);
    free(c->gradients);
    free(c->parameters);
    free(c->inputs);
    free(c->targets);
}

// --------------------------------------------------------------------------------------- comparing

static void load_weights(const Case *c, Gpt *gpt) {
    for (int k = 0; k < c->layout.count; k++) {
        const Entry *e = c->order[k];
        const Tensor *t = safetensors_find(&c->g->file, e->name);
        double *whole = (double *)check_alloc((size_t)tensor_count(t) * sizeof *whole, "a weight");
        safetensors_read_real(t, 0, INT64_MAX, whole, sizeof(double));
        memcpy(judge_fp64.tensor(gpt, WEIGHTS, e), whole, (size_t)used(c, e) * sizeof *whole);
        free(whole);
    }
}

static double norm_of(const double *x, const double *less, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += (x[i] - (less ? less[i] : 0)) * (x[i] - (less ? less[i] : 0));
    return sqrt(sum);
}

// Each tensor against its part of `want`; what pads the vocabulary is zero.
static void compare_tensors(const Case *c, Gpt *gpt, int kind, const double *want, double least,
                            const char *how) {
    for (int k = 0; k < c->layout.count; k++) {
        const Entry *e = c->order[k];
        const double *x = (const double *)judge_fp64.tensor(gpt, kind, e);
        int64_t n = used(c, e), stray = 0;
        double error = norm_of(x, want, n), scale = fmax(norm_of(want, NULL, n), least);
        for (int64_t i = n; i < e->size; i++) stray += x[i] != 0;
        EXPECT(error <= TENSOR_ERROR * scale, "%s %s %s: %s of %s differ by %.2g of %.2g",
               c->g->path, c->name, how, kind == GRADS ? "gradients" : "parameters", e->name, error,
               scale);
        EXPECT(stray == 0, "%s %s %s: %d values of the padding of %s are not zero", c->g->path,
               c->name, how, (int)stray, e->name);
        want += n;
    }
}

static void compare_number(const Case *c, int step, const char *what, double got, double want,
                           double error, const char *how) {
    EXPECT(fabs(got - want) <= error * fabs(want),
           "%s %s %s: %s of step %d is %.17g, expected %.17g", c->g->path, c->name, how, what,
           step + 1, got, want);
}

// Three steps, in micro-batches of `micro` sequences, in memory for sequences as long as the
// context.
static void compare_case(const Case *c, int micro, int recompute) {
    const Trainer *t = &judge_fp64;
    char how[64];
    check_format(how, sizeof how, "in micro-batches of %d%s", micro,
                 recompute ? " with recompute" : "");
    Gpt *gpt = t->create(&c->m, &(Setup){.B = micro, .T = c->m.T, .recompute = recompute,
                                         .training = 1, .optimizer = c->optimizer,
                                         .documents = c->documents,
                                         .z_loss = c->z_loss});
    Optimizer o = c->settings;
    load_weights(c, gpt);
    for (int step = 0; step < STEPS; step++) {
        t->zero_grads(gpt);
        for (int b = 0; b < c->B; b += micro) {
            int64_t at = ((int64_t)step * c->B + b) * c->T;
            t->forward(gpt, c->inputs + at, c->targets + at, micro, c->T);
            t->backward(gpt, 1.0 / (c->B * c->T), 0);
        }
        if (step == 0) compare_tensors(c, gpt, GRADS, c->gradients, SMALLEST * c->steps[0][3], how);
        o.clip = c->clip;
        o.step = step + 1;
        t->update(gpt, &o);
        Update u = t->outcome(gpt);
        compare_number(c, step, "the loss", u.loss.ce, c->steps[step][0], LOSS_ERROR, how);
        compare_number(c, step, "the z-loss", u.loss.z, c->steps[step][1], LOSS_ERROR, how);
        compare_number(c, step, "the routers' losses", u.loss.router, c->steps[step][2], LOSS_ERROR,
                       how);
        compare_number(c, step, "the gradient's norm", u.norm, c->steps[step][3], TENSOR_ERROR,
                       how);
    }
    compare_tensors(c, gpt, WEIGHTS, c->parameters, 0, how);
    t->destroy(gpt);
}

// Goldens of another oracle.py prove nothing about this one.
static void check_text(const Golden *g) {
    size_t n;
    const char *was = json_get_string(g->about, "text", g->path);
    char *text = file_read("dev/oracle/oracle.py", INT64_MAX, &n);
    EXPECT(text && n == strlen(was) && !memcmp(text, was, n),
           "dev/oracle/oracle.py has changed since " FOLDER " was written" REMEDY);
    free(text);
}

static void test_golden(const char *path, bool met[MODE_COUNT][3]) {
    Golden g;
    if (!open_golden(&g, path)) return;
    for (const Json *json = json_need(g.about, "cases", JSON_OBJECT, path)->first; json;
         json = json->next) {
        Case c;
        if (read_case(&c, &g, json)) {
            // a loss over micro-batches: over the golden's, and no others
            bool balances = c.m.moe.balance > 0;
            compare_case(&c, balances ? c.micro : c.B, 0);
            compare_case(&c, balances ? c.micro : 1, 1);
            met[c.m.mode - MODES][c.m.norm] = true;
        }
        free_case(&c);
    }
    close_golden(&g);
}

void test_oracle(void) {
    Golden first;
    bool met[MODE_COUNT][3] = {{false}};
    char path[256];
    if (!open_golden(&first, FOLDER "gpt2.safetensors")) return;
    check_text(&first);
    for (const Json *name = json_need(first.about, "files", JSON_ARRAY, first.path)->first; name;
         name = name->next)
        test_golden(check_format(path, sizeof path, FOLDER "%s", name->text), met);
    close_golden(&first);
    for (int mode = 0; mode < MODE_COUNT; mode++)
        for (int family = 0; family < 2 && MODES[mode].selectable; family++)
            EXPECT(met[mode][family],
                   "%s has no golden with %s: write its equations into dev/oracle/oracle.py" REMEDY,
                   MODES[mode].name, family ? "LayerNorm" : "RMSNorm");
}
