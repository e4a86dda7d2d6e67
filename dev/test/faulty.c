// faulty.c: the CPU trainer with a fault on purpose, FAULT="KIND STEP RANK" in the environment:
//   nan     one gradient of process RANK is not a number in step STEP;   nans: in that one and all later ones
//   spike   the gradients of all processes are a thousand times too large
//   killed  process RANK gets SIGKILL
#include "../../llmc/trainer.h"

static struct { char kind[16]; long long step, rank, now; } fault;
static Layout layout;

static bool fault_is(const char *kind) { return !strcmp(fault.kind, kind) && fault.now == fault.step; }
static bool fault_is_here(void) { return comm_launcher() ? atoll(getenv(comm_launcher()->rank)) == fault.rank : fault.rank == 0; }

static Gpt *faulty_create(const Model *m, const Setup *setup) {
    layout = layout_make(m);
    return judge_fp32.create(m, setup);
}

static void faulty_zero_grads(Gpt *gpt) {
    fault.now++;
    judge_fp32.zero_grads(gpt);
    bool nan = fault_is("nan") || (!strcmp(fault.kind, "nans") && fault.now >= fault.step);
    if (nan && fault_is_here()) *(float *)judge_fp32.tensor(gpt, GRADS, &layout.entries[layout.count - 1]) = NAN;
    if (fault_is("killed") && fault_is_here()) raise(SIGKILL);
}

static void faulty_backward(Gpt *gpt, double scale, int last) { judge_fp32.backward(gpt, fault_is("spike") ? 1000 * scale : scale, last); }

int main(int argc, char **argv) {
    const char *text = getenv("FAULT");
    CHECK(text && sscanf(text, "%15s %lld %lld", fault.kind, &fault.step, &fault.rank) == 3, "FAULT=\"%s\": expected KIND STEP RANK\n  -> FAULT=\"nan 7 0\"", text ? text : "");
    Trainer t = judge_fp32;
    t.create = faulty_create;
    t.zero_grads = faulty_zero_grads;
    t.backward = faulty_backward;
    return trainer_main(&t, argc, argv);
}
