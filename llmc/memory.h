// memory.h: from a table row (tensors.h) to a size, to an offset in an arena, to a pointer. A view
// of layer l is a struct with one pointer for each row: Params, Grads, Acts. An arena is one
// allocation that holds many tensors.
//
// A tensor that does not exist in a model or layer takes no memory and its pointer is NULL: code
// that uses it crashes instead of computing something wrong. One exception: the value after an
// empty slot is the value before it (acts_view). Offsets count elements, so that one layout serves
// float, double and bfloat16. The including file defines `real`, the storage type, and `wide`, the
// type of statistics and of parameters' gradients, if that differs.
#pragma once
#include "run/util.h"
#include "tensors.h"

// Every tensor starts at a multiple of ALIGN elements. On a GPU refuse_model (train_gpt.cu) refuses
// sizes that leave gaps between the neighbours wq_b, wk_b, wv_b, or between wg_b and wu_b.
enum { ALIGN = 32 };

static inline int64_t memory_padded(int64_t elements) {
    return CEIL_DIV(elements, ALIGN) * ALIGN;
}

// The total with one more tensor. The size of one tensor fits in 64 bits; the sum of a hundred
// thousand might not.
static inline int64_t memory_add(int64_t total, int64_t elements) {
    CHECK(total < INT64_MAX / 16 - memory_padded(elements),
          "expected tensors of less than 2^59 elements in all, found more\n"
          "  -> a smaller --micro-batch, --seq or --model");
    return total + memory_padded(elements);
}

// ------------------------------------------------------------------------------ parameters

#define PARAM_ENUM(field, ...) PARAM_##field,
enum { PARAM_TABLE(PARAM_ENUM) PARAM_COUNT };

// One row of the parameter table (tensors.h), evaluated.
typedef struct {
    const char *name;                     // in checkpoints; %d: the layer
    int64_t rows, cols;
    int role, decay, lr;                  // ROLE_*, DECAY_*, LR_*
    double gain;                          // initial value of a gain
    int exists;
} ParamRow;

// A parameter tensor that exists.
typedef struct {
    ParamRow row;
    int id;          // PARAM_*
    int layer;       // -1: of the model
    char name[96];
    int64_t size;    // elements
    int64_t offset;  // in the arenas of weights and of gradients
    // From here on set by layout_share, 0 before:
    int owner;       // the process that updates it (ZeRO-1)
    int64_t state;   // offset in arenas of this process's shards: first moments, on GPUs sharded
                     // master weights
    int64_t second;  // the same for second moments; Muon's matrices have none
    int muon;        // matrices that Muon updates, stacked; 0: AdamW updates the tensor
} Entry;

typedef struct {
    Entry *entries, *end;  // [count], and one past the last
    int count;
    int64_t total;    // elements of the weights
    int64_t state;    // elements of an arena of this process's shards (layout_share)
    int64_t second;   // elements of the second moments in this process
    // [id]: of the model's tensors. [(layer + 1) * PARAM_COUNT + id]: of all that a layer sees.
    int64_t *offset;  // -1: absent
} Layout;

// An array of offsets, all -1: absent.
static inline int64_t *layout_offsets(size_t count) {
    int64_t *offset =
        (int64_t *)check_alloc(count * sizeof *offset, "the offsets of tensors");
    for (size_t i = 0; i < count; i++) offset[i] = -1;
    return offset;
}

// Tensors of the model come first (l = -1), then layer by layer in table order, so that the tensors
// of a layer are neighbours.
static inline Layout layout_make(const Model *m) {
    const int C = m->C, T = m->T, Vp = m->Vp, F = m->F, E = m->moe.E;
    const int NH = m->NH, KV = m->KV, HS = m->HS, QK = qk_size(m);
    Layout t;
    memset(&t, 0, sizeof t);
    size_t places = (size_t)(m->L + 1) * PARAM_COUNT;
    t.entries = t.end = (Entry *)check_alloc(places * sizeof(Entry), "the list of parameters");
    t.offset = layout_offsets(places);
    for (int l = -1; l < m->L; l++) {
        LayerMode mode = layer_mode(m, l < 0 ? 0 : l), *p = &mode;
#define PARAM_EVAL(field, name, r, c, role, gain, exists) \
        {name, r, c, role, ROLES[role].decay, ROLES[role].lr, gain, exists},
        const ParamRow rows[] = { PARAM_TABLE(PARAM_EVAL) };
        for (int id = 0; id < PARAM_COUNT; id++) {
            bool per_layer = strchr(rows[id].name, '%') != NULL;
            int64_t *offset = &t.offset[(l + 1) * PARAM_COUNT + id];
            *offset = t.offset[id];  // a tensor of the model, which every layer sees; else -1
            if (!rows[id].exists || per_layer != (l >= 0)) continue;
            Entry *e = t.end++;
            e->row = rows[id];
            e->id = id;
            e->layer = l;
            e->size = e->row.rows * e->row.cols;
            e->offset = *offset = t.total;
            check_format(e->name, sizeof e->name, e->row.name, l);  // the model's names have no %d
            t.total = memory_add(t.total, e->size);
        }
    }
    t.count = t.end - t.entries;
    return t;
}

// The shard of a tensor that a process owns (ZeRO-1): it keeps the moments of these elements and
// updates them. A tensor has one owner, with two exceptions. Embeddings and head, the largest, are
// split: every process owns some of their rows. Selection biases, which have no gradient, are
// common: every process updates all of them, alike.
typedef struct {
    int64_t first, size;  // elements
} Part;

static inline bool entry_is_common(const Entry *e) { return e->row.lr == LR_BALANCE; }

static inline Part entry_part(const Entry *e, int rank, int processes) {
    Part part = {0, e->owner == rank || entry_is_common(e) ? e->size : 0};
    if (e->row.role != ROLE_EMBEDDING && e->row.role != ROLE_HEAD) return part;
    part.first = e->row.rows * rank / processes * e->row.cols;
    part.size = e->row.rows * (rank + 1) / processes * e->row.cols - part.first;
    return part;
}

// Whether a linear reads the tensor. The first micro-step of a step SETs its gradient, one product.
// Gradients of vectors, of wpe and of an untied wte are zeroed instead, then ADDed to.
static inline bool entry_is_linear(const Model *m, const Entry *e) {
    if (e->row.role == ROLE_EMBEDDING) return e->id == PARAM_wte && m->tied;
    return e->row.role < ROLE_ZERO;
}

// The lines of a matrix that nGPT keeps at length 1 (section 2.3) are vectors of the residual
// stream's space: the rows of a matrix that reads the stream, the columns of an output projection,
// which writes to it. Matrices of experts are stacked. A router, which nGPT's paper does not have,
// is not normalized.
typedef struct {
    int length;  // elements of a line; 0: no lines
    int stride;  // from one element to the next
} EntryLines;

static inline EntryLines entry_lines(const Model *m, const Entry *e) {
    int role = e->row.role, cols = (int)e->row.cols;
    EntryLines none = {0, 0}, rows = {cols, 1}, columns = {m->C, cols};
    if (!m->mode->unit || role >= ROLE_ZERO || role == ROLE_ROUTER) return none;
    return role == ROLE_OUT ? columns : rows;
}

// ZeRO-1: takes the tensors in order, and gives each to the process that has the fewest elements so
// far. muon: --optimizer muon.
static inline void layout_share(Layout *t, const Model *m, bool muon, int rank, int processes) {
    int64_t *load =
        (int64_t *)check_alloc((size_t)processes * sizeof *load, "the loads of processes");
    t->state = t->second = 0;
    for (Entry *e = t->entries; e < t->end; e++) {
        e->owner = 0;
        for (int r = 1; r < processes; r++)
            if (load[r] < load[e->owner]) e->owner = r;
        for (int r = 0; r < processes; r++) load[r] += entry_part(e, r, processes).size;
        int64_t own = entry_part(e, rank, processes).size;
        bool experts = e->id == PARAM_xg || e->id == PARAM_xu || e->id == PARAM_xd;
        int matrices = experts ? m->moe.E : 1;
        e->muon = (muon && ROLES[e->row.role].muon) ? matrices : 0;
        e->state = t->state;
        e->second = t->second;
        t->state = memory_add(t->state, own);
        if (!e->muon) t->second = memory_add(t->second, own);
    }
    free(load);
}

// Elements of Muon's scratch: for a matrix [rows, cols] two copies of it and two of [k, k], k its
// smaller side; for the largest matrix, or with `together` for all matrices of the largest tensor.
static inline int64_t layout_muon_scratch(const Layout *t, bool together) {
    int64_t most = 0;
    for (const Entry *e = t->entries; e < t->end; e++) {
        if (!e->muon) continue;
        int64_t rows = e->row.rows / e->muon, cols = e->row.cols, k = least(rows, cols);
        int64_t size = 2 * (rows * cols + k * k) * (together ? e->muon : 1);
        if (size > most) most = size;
    }
    return most;
}

// Rows without the padding of the vocabulary, whose rows stay zero and are not saved. Their logits
// take no part in the loss.
static inline int64_t entry_rows(const Model *m, const Entry *e) {
    bool vocabulary = e->id == PARAM_wte || e->id == PARAM_wlm || e->id == PARAM_logits_w;
    return vocabulary ? m->V : e->row.rows;
}

static inline void layout_free(Layout *t) {
    free(t->entries);
    free(t->offset);
}

// ------------------------------------------------------------------------------ activations

#define ACT_ENUM(field, ...) ACT_##field,
enum { ACT_TABLE(ACT_ENUM) ACT_COUNT };

// One row of the activation table (tensors.h), evaluated.
typedef struct {
    const char *field;
    int copies;          // layer l uses copy l % copies
    int64_t rows, cols;
    int64_t size;        // in elements of the storage type
    int grads;           // copies of the gradient; 0: none, ALIASED: the row's own storage
    int exists;
} ActRow;

static inline void act_rows(ActRow rows[ACT_COUNT], const Model *m, const Sizes *s, int l) {
    LayerMode mode = layer_mode(m, l), *p = &mode;
    const int B = s->B, n = s->n, keep = s->keep, cheap = s->cheap;
    const int cpu = s->threads != 0, gpu = !cpu;
    const int L = m->L, C = m->C, Vp = m->Vp, F = m->F, E = m->moe.E, K = m->moe.K;
    const int NH = m->NH, KV = m->KV, HS = m->HS, QK = qk_size(m), up = m->swiglu ? 2 : 1;
#define SIZE_real 1
#define SIZE_wide s->ratio
#define SIZE_int32_t s->ratio
#define ACT_EVAL(field, type, copies, r, c, grads, exists) \
    {#field, copies, r, c, (int64_t)(r) * (c) * SIZE_##type, grads, exists},
    const ActRow all[] = {ACT_TABLE(ACT_EVAL)};
    memcpy(rows, all, sizeof all);
}

typedef struct {
    int64_t *act, *grad;   // offsets in layer l: [l * ACT_COUNT + id]; -1: absent. act owns both
    int64_t acts, grads;   // elements of the two arenas
} ActLayout;

// Layers l, l + copies, ... share a copy: the first of them that has the row reserves its room.
// offset: of the row in layer 0.
static inline void act_place(int64_t *offset, int64_t *total, int l, int copies, int64_t size) {
    int64_t *own = &offset[l * ACT_COUNT];
    for (int k = l - copies; k >= 0 && *own < 0; k -= copies) *own = offset[k * ACT_COUNT];
    if (*own >= 0) return;
    *own = *total;
    *total = memory_add(*total, size);
}

static inline ActLayout act_layout_make(const Model *m, const Sizes *s) {
    ActLayout t;
    memset(&t, 0, sizeof t);
    ActRow rows[ACT_COUNT];
    size_t places = (size_t)m->L * ACT_COUNT;
    t.act = layout_offsets(2 * places);
    t.grad = t.act + places;
    for (int l = 0; l < m->L; l++) {
        act_rows(rows, m, s, l);
        for (int id = 0; id < ACT_COUNT; id++) {
            const ActRow *r = &rows[id];
            if (!r->exists) continue;
            act_place(&t.act[id], &t.acts, l, r->copies, r->size);
            if (r->grads > 0) act_place(&t.grad[id], &t.grads, l, r->grads, r->size);
        }
    }
    return t;
}

// ------------------------------------------------------------------------------ views

#ifdef real
#ifndef wide
#define wide real
#endif
// One pointer for each row of the table, in its order: these structs are filled as arrays.
typedef struct {
#define PARAM_FIELD(field, ...) real *field;
    PARAM_TABLE(PARAM_FIELD)
} Params;

typedef struct {
#define GRAD_FIELD(field, ...) wide *field;
    PARAM_TABLE(GRAD_FIELD)
} Grads;

typedef struct {
#define ACT_FIELD(field, type, ...) type *field;
    ACT_TABLE(ACT_FIELD)
} Acts;

// Fills a view, a struct of `count` pointers into the arena `base`, from row `row` of the offsets:
// of parameters row l + 1 holds what layer l sees, its own tensors and the model's.
static inline void view_fill(void *view, const int64_t *offset, int row, int count, void *base,
                             size_t element) {
    for (int id = 0; id < count; id++) {
        int64_t at = offset[row * count + id];
        void *p = at < 0 || !base ? NULL : (char *)base + at * (int64_t)element;
        memcpy((char *)view + id * sizeof p, &p, sizeof p);
    }
}

static inline Params params_view(const Layout *t, real *base, int l) {
    Params v;
    view_fill(&v, t->offset, l + 1, PARAM_COUNT, base, sizeof *base);
    return v;
}

static inline Grads grads_view(const Layout *t, wide *base, int l) {
    Grads v;
    view_fill(&v, t->offset, l + 1, PARAM_COUNT, base, sizeof *base);
    return v;
}

// The activations of layer l, or their gradients; offset: ActLayout's. NULL: there is none. Where
// the values before and after a slot share a place, because the slot is empty or a GPU kernel needs
// no second one, both names lead to it. ai, ao, fo, sy and qkvn stay NULL.
static inline Acts acts_view(const int64_t *offset, real *base, int l) {
    Acts v;
    view_fill(&v, offset, l, ACT_COUNT, base, sizeof *base);
#define SAME(missing, own) if (!v.missing) v.missing = v.own;
    SAME(raw, e) SAME(qn, q) SAME(kn, k) SAME(vn, v) SAME(cn, c) SAME(as, mid) SAME(fi, mid)
    SAME(gun, gu) SAME(xgun, xgu) SAME(xyn, xy) SAME(fs, x) SAME(fx, x) SAME(z, logits)
#undef SAME
    return v;
}

// The KV cache of one layer: keys and values of all positions of one text (tensors.h,
// kv_cache_width). k is NULL in a forward of whole sequences.
typedef struct {
    real *k;     // [T, KV, QK]
    real *v;     // [T, KV, HS]
    int cached;  // positions already filled
} KvCache;

// The KV cache of layer l; base holds layer after layer, NULL: there is none.
static inline KvCache kv_cache_view(const Model *m, real *base, int T, int l, int cached) {
    KvCache v = {NULL, NULL, 0};
    if (!base) return v;
    v.k = base + (int64_t)l * T * kv_cache_width(m);
    v.v = v.k + (int64_t)T * m->KV * qk_size(m);
    v.cached = cached;
    return v;
}
#endif
