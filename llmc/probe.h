// probe.h: --probe, what a model does inside, for dev/probe.py. Of the first validation samples what judge.h names PROBE_*, as one safetensors file:
//
//   embedded.stream, .gradient         [tokens, width]      the stream into block 0, and dL/d(it); L: the sum of the tokens' losses
//   layers.3.stream, .gradient         [tokens, width]      out of block 3
//   layers.3.up, .hidden               [tokens, ffn]        where the ffn is dense
//
// Samples go through in micro-batches, and rows are written to their places: memory is that of one micro-batch. Free space is looked at first.
#pragma once
#include "checkpoint.h"
#include "dataloader.h"
#include "judge.h"
#include <sys/statvfs.h>

typedef struct Probe { const Trainer *t; Gpt *gpt; const Model *m; DataLoader *data; int micro; int64_t samples; } Probe;

typedef struct ProbeTensor { int kind, layer; int64_t width, at; char name[64]; } ProbeTensor;       // at: byte of its first row among all data

// As many samples as hold `tokens`, and no more than there are; 0: ten tokens for each channel of the widest ffn, with which its covariance is known well (SpanNorm's figure 8).
static inline int64_t probe_samples(const Model *m, const DataLoader *data, int64_t tokens) {
    int64_t widest = m->C, most;
    for (int l = 0; l < m->L; l++) widest = probe_width(m, PROBE_HIDDEN, l) > widest ? probe_width(m, PROBE_HIDDEN, l) : widest;
    most = CEIL_DIV(tokens ? tokens : 10 * widest, m->T);
    if (most > data->samples) printf("note: the validation data has %lld tokens, a probe would have %lld: spectra of the ffn are of what is there\n  -> --val-data with more\n",
                                     (long long)(data->samples * m->T), (long long)(most * m->T));
    return most < data->samples ? most : data->samples;
}

// What there is to write, in the order of the file. Returns how many.
static inline int probe_list(const Probe *p, ProbeTensor *list, Tensor *tensors) {
    static const char *const NAMES[] = {"stream", "gradient", "up", "hidden"};
    int64_t tokens = p->samples * p->m->T, at = 0;
    int count = 0;
    for (int l = -1; l < p->m->L; l++)
        for (int kind = 0; kind < PROBE_KINDS; kind++) {
            ProbeTensor *e = &list[count];
            Tensor t = {e->name, p->t->element == sizeof(float) ? "F32" : "F64", 2, {tokens, probe_width(p->m, kind, l)}, NULL, NULL, NULL};
            if (!t.shape[1]) continue;
            e->kind = kind, e->layer = l, e->width = t.shape[1], e->at = at;
            if (l < 0) check_format(e->name, sizeof e->name, "embedded.%s", NAMES[kind]);
            else check_format(e->name, sizeof e->name, "layers.%d.%s", l, NAMES[kind]);
            tensors[count++] = t;
            at += tensor_bytes(&t);
        }
    return count;
}

// The file, ready for rows. Returns where they begin.
static inline int64_t probe_begin(FileWriter *w, const char *path, const Tensor *tensors, int count) {
    struct statvfs disk;
    file_begin(w, path);
    int64_t data = safetensors_begin(w, tensors, count);
    double needed = (double)data, mib = 1.0 / (1 << 20);
    for (int i = 0; i < count; i++) needed += (double)tensor_bytes(&tensors[i]);
    bool known = fstatvfs(w->fd, &disk) == 0, room = !known || (double)disk.f_bavail * (double)disk.f_frsize > needed - (double)data;
    if (!room) unlink(w->temp);
    CHECK_WRITE(room, "%s takes %.0f MiB, that disk has %.0f free\n  -> another disk, or fewer --probe-tokens", path, needed * mib, (double)disk.f_bavail * (double)disk.f_frsize * mib);
    printf("probe: %lld tokens, %d tensors, %.1f MiB into %s\n", (long long)tensors[0].shape[0], count, needed * mib, path);
    return data;
}

// Goes through the samples, forward and backward, and writes the file. Returns the mean losses.
static inline Loss probe_write(const Probe *p, const char *path) {
    const Model *m = p->m;
    FileWriter w;
    int64_t widest = m->C;
    size_t most = (size_t)(m->L + 1) * PROBE_KINDS;
    ProbeTensor *list = (ProbeTensor *)check_alloc(most * sizeof *list, "a list of tensors");
    Tensor *tensors = (Tensor *)check_alloc(most * sizeof *tensors, "a list of tensors");
    int count = probe_list(p, list, tensors);
    for (int i = 0; i < count; i++) widest = list[i].width > widest ? list[i].width : widest;
    int64_t tokens = (int64_t)p->micro * m->T;
    int32_t *inputs = (int32_t *)check_alloc((size_t)tokens * 2 * sizeof *inputs, "a batch"), *targets = inputs + tokens;
    void *rows = check_alloc((size_t)(tokens * widest) * p->t->element, "activations of a micro-batch");
    int64_t data = probe_begin(&w, path, tensors, count);
    for (int64_t at = 0; at < p->samples; at += p->micro) {
        int B = (int)(p->samples - at < p->micro ? p->samples - at : p->micro);
        for (int b = 0; b < B; b++) loader_sample(p->data, at + b, inputs + (int64_t)b * m->T, targets + (int64_t)b * m->T);
        p->t->forward(p->gpt, inputs, targets, B, m->T);
        p->t->backward(p->gpt, 1, 0);
        for (int i = 0; i < count; i++) {
            int64_t row = list[i].width * (int64_t)p->t->element;
            p->t->activation(p->gpt, rows, list[i].kind, list[i].layer);
            file_put(&w, rows, (size_t)(B * m->T * row), data + list[i].at + at * m->T * row);
        }
        printf("\rprobe: %lld of %lld tokens ", (long long)((at + B) * m->T), (long long)(p->samples * m->T));
        fflush(stdout);
    }
    printf("\n");
    file_commit(&w);
    free(list);
    free(tensors);
    free(inputs);
    free(rows);
    return p->t->loss(p->gpt);
}
