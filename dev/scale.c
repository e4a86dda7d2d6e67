// scale.c: prints a model's sizes on several GPUs, as the code computes them, for dev/scale.py. A
// line is a name, then one number or a row of numbers.
//   entry  layer (-1: of the model), elements, whether its matrices are experts'
//   share  processes, elements of one process's moments
//   model  sizes and weights that a token meets, in the order of dev/scale.py's `sizes`
//   acts   level of --recompute, micro-batch, bytes in bf16 with gradients
#include "llmc/run/config.h"

int main(int argc, char **argv) {
    static const int PROCESSES[] = {8, 64};
    static const int LEVELS[] = {RECOMPUTE_OFF, RECOMPUTE_CHEAP, RECOMPUTE_ON};
    FlagSet set;
    const Trainer trainer = {
        .device = "cuda", .precision = "bf16", .mode = &MODES[NORM_MODE], .commit = GIT_HASH};
    flags_resolve(&set, &trainer, argc, argv);
    Model m = model_from_flags(&set.f, trainer.mode);
    Layout t = layout_make(&m);
    double hidden = 0;
    double experts = 0;
    double head = 0;
    double ffn = 0;
    double rows = (double)moe_layers(&m) * m.moe.K;
    double flops = flops_per_token(&m, &t);
    for (Entry *e = t.entries; e < t.end; e++) {
        bool expert = tensor_size(&m, e, true) != tensor_size(&m, e, false);
        if (e->row.lr == LR_HEAD) head += tensor_size(&m, e, true);
        if (e->row.lr == LR_HIDDEN) *(expert ? &experts : &hidden) += tensor_size(&m, e, true);
        printf("entry %d %lld %d\n", e->layer, (long long)e->size, expert);
    }
    for (int l = 0; l < m.L; l++) ffn += layer_mode(&m, l).F;
    printf("model %d %d %d %d %d %lld %.0f %.0f %.0f %.0f %.0f %.0f %.0f\n", m.L, m.C, m.T, m.Vp,
           m.NH * qk_size(&m), (long long)set.f.batch, ffn, rows * m.F, rows * m.C, hidden, experts,
           head, flops);
    for (int p = 0; p < 2; p++)
        for (int r = 0; r < PROCESSES[p]; r++) {
            layout_share(&t, &m, false, r, PROCESSES[p]);
            printf("share %d %lld\n", PROCESSES[p], (long long)t.state);
        }
    for (int i = 0; i < 3; i++)
        for (int B = 1; B <= 32; B *= 2) {
            Setup setup = {.B = B, .T = m.T, .recompute = LEVELS[i]};
            Sizes s = sizes_make(&m, &setup, 0, 2);
            ActLayout a = act_layout_make(&m, &s);
            printf("acts %d %d %lld\n", i, B, (long long)(a.acts + a.grads) * 2);
        }
}
