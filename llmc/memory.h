// memory.h: table row -> size -> offset in an arena -> pointer; and the view of layer l, a struct with one pointer per row.
//
// A tensor that does not exist in a model or layer takes no memory and its pointer is NULL: using it crashes instead of lying.
// Offsets count elements, so one layout serves float, double and bfloat16. The includer defines `real`, the storage type, and where statistics and
// gradients of parameters are of another, `wide`.
#pragma once
#include <stdbool.h>
#include "run/util.h"
#include "tensors.h"
#include "threads.h"

enum { ALIGN = 32 };                             // every tensor starts at a multiple of so many elements; heads are too, so [wq wk wv] and [bq bk bv] have no gaps

static inline int64_t memory_padded(int64_t elements) { return CEIL_DIV(elements, (int64_t)ALIGN) * ALIGN; }

// total with one more tensor: no single tensor overflows, a hundred thousand of them could.
static inline int64_t memory_add(int64_t total, int64_t elements) {
    CHECK(total < INT64_MAX / 16 - memory_padded(elements), "expected tensors of less than 2^59 elements in all, found more\n  -> a smaller --micro-batch, --seq or --model");
    return total + memory_padded(elements);
}

// ---------------------------------------------------------------------------------------------------------------- parameters

#define PARAM_ENUM(field, ...) PARAM_##field,
enum { PARAM_TABLE(PARAM_ENUM) PARAM_COUNT };
#undef PARAM_ENUM

typedef struct ParamRow {
    const char *name;
    int64_t rows, cols;
    int init, decay, lr;                      // by its role (tensors.h)
    double gain;
    int exists;
} ParamRow;

// The parameter table evaluated for layer l of model m.
static inline void param_rows(ParamRow rows[PARAM_COUNT], const Model *m, int l) {
    Place place = place_at(m, l), *p = &place;
    const int C = m->C, T = m->T, Vp = m->Vp, F = m->F, E = m->moe.E;
    const int NH = m->NH, KV = m->KV, HS = m->HS, QK = qk_size(m);
#define PARAM_EVAL(field, name, r, c, role, gain, exists) \
    {name, r, c, ROLES[role].init, ROLES[role].decay, ROLES[role].lr, gain, exists},
    const ParamRow all[] = { PARAM_TABLE(PARAM_EVAL) };
#undef PARAM_EVAL
    memcpy(rows, all, sizeof all);
}

static inline bool row_is_per_layer(const ParamRow *row) { return strchr(row->name, '%') != NULL; }

// One tensor that exists: a row of the table in one layer (-1: of the model). Its moments lie at `state` in their arena, which differs where there are several processes.
typedef struct Entry { ParamRow row; int id, layer; char name[96]; int64_t size, offset; int owner; int64_t state; } Entry;

// total: elements of weights, state: of each moment;   offset[(layer + 1) * PARAM_COUNT + id], -1: absent
typedef struct Layout { Entry *entries; int count; int64_t total, state, *offset; } Layout;

static inline void layout_add(Layout *t, const ParamRow *row, int id, int layer) {
    if (!row->exists) return;
    Entry *e = &t->entries[t->count++];
    e->row = *row;
    e->id = id;
    e->layer = layer;
    e->size = row->rows * row->cols;
    e->offset = e->state = t->total;
    if (layer < 0) check_format(e->name, sizeof e->name, "%s", row->name);
    else check_format(e->name, sizeof e->name, LAYER_NAME "%s", layer, row->name + strlen(LAYER_NAME));
    t->offset[(layer + 1) * PARAM_COUNT + id] = e->offset;
    t->state = t->total = memory_add(t->total, e->size);
}

// Model-level tensors first, then layer by layer in table order: a layer's tensors are neighbours.
static inline Layout layout_make(const Model *m) {
    Layout t;
    memset(&t, 0, sizeof t);
    ParamRow rows[PARAM_COUNT];
    int64_t places = (int64_t)(m->L + 1) * PARAM_COUNT;
    t.entries = (Entry *)check_alloc((size_t)places * sizeof(Entry), "the list of parameters");
    t.offset = (int64_t *)check_alloc((size_t)places * sizeof(int64_t), "the offsets of parameters");
    for (int64_t i = 0; i < places; i++) t.offset[i] = -1;
    for (int l = -1; l < m->L; l++) {
        param_rows(rows, m, l < 0 ? 0 : l);
        for (int id = 0; id < PARAM_COUNT; id++)
            if (row_is_per_layer(&rows[id]) == (l >= 0)) layout_add(&t, &rows[id], id, l);
    }
    return t;
}

// What a process owns of an entry: it keeps the moments of these elements, and updates them (ZeRO-1). Entries have one owner, except embeddings and head, the
// largest, of which every process has some rows; and selection biases, which have no gradient: every process moves all of them, alike.
typedef struct Part { int64_t first, size; } Part;

static inline bool entry_is_split(const Entry *e) { return e->row.init == ROLE_EMBEDDING || e->row.init == ROLE_HEAD; }

static inline bool entry_is_common(const Entry *e) { return e->row.lr == LR_BALANCE; }

static inline Part entry_part(const Entry *e, int rank, int processes) {
    Part part = {0, e->owner == rank || entry_is_common(e) ? e->size : 0};
    if (!entry_is_split(e)) return part;
    part.first = e->row.rows * rank / processes * e->row.cols;
    part.size = e->row.rows * (rank + 1) / processes * e->row.cols - part.first;
    return part;
}

// How nGPT keeps matrices (section 2.3): each row divided by its length, as it meets the stream in a dot product; of output projections, which write to the
// stream, each column. The experts' are one below the other. The router, which nGPT does not know, stays as it is. `length` elements, `step` apart; 0: as they are.
typedef struct EntryLines { int length, step; } EntryLines;

static inline EntryLines entry_lines(const Model *m, const Entry *e) {
    bool unit = m->mode->unit && e->row.init != ROLE_GAIN && e->row.init != ROLE_ZERO && e->id != PARAM_router;
    bool out = e->row.init == ROLE_OUT;
    EntryLines none = {0, 0}, rows = {(int)e->row.cols, 1}, columns = {m->C, (int)e->row.cols};
    return !unit ? none : out ? columns : rows;
}

// Shares entries out: in their order, each to the process that has least so far.
static inline void layout_share(Layout *t, int rank, int processes) {
    int64_t *load = (int64_t *)check_alloc((size_t)processes * sizeof *load, "the loads of processes");
    t->state = 0;
    for (Entry *e = t->entries; e < t->entries + t->count; e++) {
        e->owner = 0;
        for (int r = 1; r < processes; r++) if (load[r] < load[e->owner]) e->owner = r;
        for (int r = 0; r < processes; r++) load[r] += entry_part(e, r, processes).size;
        e->state = t->state;
        t->state = memory_add(t->state, entry_part(e, rank, processes).size);
    }
    free(load);
}

// Rows in use: the padded vocabulary's last rows are zero, are never read, and stay out of files.
static inline int64_t entry_rows(const Model *m, const Entry *e) { return e->id == PARAM_wte || e->id == PARAM_wlm || e->id == PARAM_logits_w ? m->V : e->row.rows; }

static inline void layout_free(Layout *t) { free(t->entries); free(t->offset); }

// ---------------------------------------------------------------------------------------------------------------- activations

#define ACT_ENUM(field, ...) ACT_##field,
enum { ACT_TABLE(ACT_ENUM) ACT_COUNT };
#undef ACT_ENUM

typedef struct ActRow { const char *field; int copies; int64_t rows, cols, size; int grads, exists; } ActRow;      // size: in elements of the storage type

static inline void act_rows(ActRow rows[ACT_COUNT], const Model *m, const Sizes *s, int l) {
    Place place = place_at(m, l), *p = &place;
    const int B = s->B, n = s->n, keep = s->keep, cheap = s->cheap, cpu = s->threads != 0, gpu = !cpu;
    const int L = m->L, C = m->C, Vp = m->Vp, F = m->F, E = m->moe.E, K = m->moe.K;
    const int NH = m->NH, KV = m->KV, HS = m->HS, QK = qk_size(m), up = m->swiglu ? 2 : 1;
#define SIZE_real 1
#define SIZE_wide s->ratio
#define SIZE_int32_t s->ratio
#define ACT_EVAL(field, type, copies, r, c, grads, exists) {#field, copies, r, c, (int64_t)(r) * (c) * SIZE_##type, grads, exists},
    const ActRow all[] = { ACT_TABLE(ACT_EVAL) };
#undef ACT_EVAL
#undef SIZE_real
#undef SIZE_wide
#undef SIZE_int32_t
    memcpy(rows, all, sizeof all);
}

// Where copy c of each activation and of each gradient lies: [c * ACT_COUNT + id], -1: absent.
typedef struct ActLayout { int64_t *act, *grad; int64_t acts, grads; } ActLayout;

static inline void act_place(int64_t *offset, int64_t *total, int64_t size) {
    if (*offset < 0) { *offset = *total; *total = memory_add(*total, size); }
}

static inline ActLayout act_layout_make(const Model *m, const Sizes *s) {
    ActLayout t;
    memset(&t, 0, sizeof t);
    ActRow rows[ACT_COUNT];
    size_t places = (size_t)m->L * ACT_COUNT;
    t.act = (int64_t *)check_alloc(places * sizeof(int64_t), "the offsets of activations");
    t.grad = (int64_t *)check_alloc(places * sizeof(int64_t), "the offsets of gradients");
    for (size_t i = 0; i < places; i++) t.act[i] = t.grad[i] = -1;
    for (int l = 0; l < m->L; l++) {
        act_rows(rows, m, s, l);
        for (int id = 0; id < ACT_COUNT; id++) {
            if (!rows[id].exists) continue;
            act_place(&t.act[(l % rows[id].copies) * ACT_COUNT + id], &t.acts, rows[id].size);
            if (rows[id].grads > 0) act_place(&t.grad[(l % rows[id].grads) * ACT_COUNT + id], &t.grads, rows[id].size);
        }
    }
    return t;
}

static inline void act_layout_free(ActLayout *t) { free(t->act); free(t->grad); }

// ---------------------------------------------------------------------------------------------------------------- views

#ifdef real
#ifndef wide
#define wide real
#endif
// One pointer per row of the table, and in its order: the structs of this section are filled as arrays.
typedef struct Params {
#define PARAM_FIELD(field, ...) real *field;
    PARAM_TABLE(PARAM_FIELD)
#undef PARAM_FIELD
} Params;

typedef struct Grads {
#define GRAD_FIELD(field, ...) wide *field;
    PARAM_TABLE(GRAD_FIELD)
#undef GRAD_FIELD
} Grads;

typedef struct Acts {
#define ACT_FIELD(field, type, ...) type *field;
    ACT_TABLE(ACT_FIELD)
#undef ACT_FIELD
} Acts;

// Element offset of parameter `id` as layer l sees it, -1 where it does not exist.
static inline int64_t layout_offset(const Layout *t, int id, int l) {
    int64_t model = t->offset[id];
    return model >= 0 ? model : t->offset[(int64_t)(l + 1) * PARAM_COUNT + id];
}

// The parameters (gradients) that lie in `base`: the model's and layer l's.
static inline void layout_view(void *view, const Layout *t, void *base, size_t element, int l) {
    void *field[PARAM_COUNT];
    for (int id = 0; id < PARAM_COUNT; id++) {
        int64_t at = layout_offset(t, id, l);
        field[id] = at < 0 || !base ? NULL : (char *)base + at * (int64_t)element;
    }
    memcpy(view, field, sizeof field);
}

static inline Params params_view(const Layout *t, real *base, int l) { Params v; layout_view(&v, t, base, sizeof *base, l); return v; }
static inline Grads grads_view(const Layout *t, wide *base, int l) { Grads v; layout_view(&v, t, base, sizeof *base, l); return v; }

// The activations of layer l, or with `grad` their gradients.
static inline Acts acts_view(const ActLayout *t, const Model *m, const Sizes *s, real *base, int l, int grad) {
    Acts v;
    ActRow rows[ACT_COUNT];
    void *field[ACT_COUNT];
    const int64_t *offset = grad ? t->grad : t->act;
    act_rows(rows, m, s, l);
    for (int id = 0; id < ACT_COUNT; id++) {
        int copies = grad ? rows[id].grads : rows[id].copies;
        int64_t at = copies > 0 && rows[id].exists ? offset[(int64_t)(l % copies) * ACT_COUNT + id] : -1;
        field[id] = at < 0 || !base ? NULL : (void *)(base + at);
    }
    memcpy(&v, field, sizeof v);
    return v;
}

// k [T, KV, QK] and v [T, KV, HS] of all positions of one text, in one layer (tensors.h, kv_cache_width), and how many there are already. k is NULL in a forward of whole sequences.
typedef struct KvCache { real *k, *v; int cached; } KvCache;

// Those of layer l, which lie in `base` layer by layer.
static inline KvCache kv_cache_view(const Model *m, real *base, int T, int l, int cached) {
    KvCache v = {NULL, NULL, 0};
    if (!base) return v;
    v.k = base + (int64_t)l * T * kv_cache_width(m);
    v.v = v.k + (int64_t)T * m->KV * qk_size(m);
    v.cached = cached;
    return v;
}
#endif
