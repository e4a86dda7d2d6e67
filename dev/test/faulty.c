// faulty.c: the CPU trainer with a fault on purpose, FAULT="KIND STEP RANK" in the environment:
//   nan     one gradient of process RANK is not a number in step STEP
//   nans    the same in step STEP and all later ones
//   router  the router's loss of all processes is not a number, so that nothing is updated
//   spike   the gradients of all processes are a thousand times too large
//   moment  after step STEP one second moment is infinite
//   dead    after step STEP the last gain is so large that no loss is finite
//   killed  process RANK gets SIGKILL
//   full    none: a sample's text goes through the model whole, for every token
// With LATE in the environment it calls itself a GPU, and prints how many outcomes were read after
// the next step had begun.
#include "../../llmc/run/run.h"
#include <signal.h>
#include "../../llmc/run/util.h"

static struct { char kind[16]; long long step, rank, now; } fault;
static long long updated, late;               // the step of the last update; outcomes read late
static Layout layout;

static bool fault_is(const char *kind) {
    return !strcmp(fault.kind, kind) && fault.now == fault.step;
}
static bool fault_is_here(void) {
    return comm_launcher() ? atoll(getenv(comm_launcher()->rank)) == fault.rank : fault.rank == 0;
}

static Gpt *faulty_create(const Model *m, const Setup *setup) {
    layout = setup_layout(m, setup);
    return judge_fp32.create(m, setup);
}

static void faulty_zero_grads(Gpt *gpt) {
    fault.now++;
    judge_fp32.zero_grads(gpt);
    bool nan = fault_is("nan") || (!strcmp(fault.kind, "nans") && fault.now >= fault.step);
    if (nan && fault_is_here())
        *(float *)judge_fp32.tensor(gpt, GRADS, &layout.entries[layout.count - 1]) = NAN;
    if (fault_is("killed") && fault_is_here()) raise(SIGKILL);
}

static void faulty_backward(Gpt *gpt, double scale, int last) {
    judge_fp32.backward(gpt, fault_is("spike") ? 1000 * scale : scale, last);
}

static void faulty_update(Gpt *gpt, const Optimizer *o) {
    updated = fault.now;
    if (fault_is("router")) return;
    judge_fp32.update(gpt, o);
    const Entry *e = &layout.entries[layout.count - 1];         // the gain of the last norm
    if (fault_is("moment")) *(float *)judge_fp32.tensor(gpt, ADAM_V, e) = INFINITY;
    if (fault_is("dead"))
        for (int64_t i = 0; i < e->size; i++)
            ((float *)judge_fp32.tensor(gpt, WEIGHTS, e))[i] = 3e38f;
}

static Update faulty_outcome(Gpt *gpt) {
    late += fault.now > updated;
    if (!strcmp(fault.kind, "router") && fault.step == updated)
        return (Update){.loss = {.ce = 1, .router = NAN}, .norm = 1};
    return judge_fp32.outcome(gpt);
}

// A window that begins again does so with the last tokens of the text, and a new one.
static int32_t text[1 << 12];
static int length, from;
static void full_decode(Gpt *gpt, const int32_t *inputs, int n, int at) {
    int again = at || !length ? 0 : n - 1;
    if (!at) from = length - again;
    CHECK(from + at + again == length && length + n <= 1 << 12 &&
              !memcmp(inputs, text + from + at, (size_t)again * sizeof *text),
          "a sample goes on at %d of %d tokens\n  -> run_sample", from + at, length);
    memcpy(text + length, inputs + again, (size_t)(n - again) * sizeof *text);
    length += n - again;
    judge_fp32.forward(gpt, text + from, NULL, 1, length - from);
}
static const void *full_logits(Gpt *gpt, int64_t row) {
    return judge_fp32.logits(gpt, length - from - 1 + row);
}

int main(int argc, char **argv) {
    const char *text = getenv("FAULT");
    CHECK(text && sscanf(text, "%15s %lld %lld", fault.kind, &fault.step, &fault.rank) == 3,
          "FAULT=\"%s\": expected KIND STEP RANK\n  -> FAULT=\"nan 7 0\"", text ? text : "");
    Trainer t = judge_fp32;
    t.create = faulty_create;
    t.zero_grads = faulty_zero_grads;
    t.backward = faulty_backward;
    t.update = faulty_update;
    t.outcome = faulty_outcome;
    if (getenv("LATE")) t.device = "cuda";
    if (!strcmp(fault.kind, "full")) t.decode = full_decode, t.logits = full_logits;
    Run *run = run_open(&t, argc, argv);
    if (!run) return 0;
    int status = train(run);
    if (getenv("LATE")) printf("%lld outcomes were read late\n", late);
    if (status == 0) evaluate(run);
    if (status == 0) sample(run);
    return run_close(run, status);
}
