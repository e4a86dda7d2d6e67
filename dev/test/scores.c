// scores.c: the score of every sequence of --tasks, one a line: task, example, log p, whether each
// token is the likeliest; then the completion of its example that log p chooses, and the one that
// log p over length chooses. For comparisons that need more than sums (dev/test/test_lm_eval.py).
//
//   scores --from RUN --eval --tasks FILES
#include "../../llmc/run/run.h"

int main(int argc, char **argv) {
    Run run, *r = &run;
    memset(r, 0, sizeof *r);
    Trainer t = judge_fp32;
    t.mode = &MODES[NORM_MODE];
    r->t = &t;
    comm_open(&r->comm, r->t->device);
    flags_resolve(&r->set, r->t, argc, argv);
    r->f = &r->set.f;
    r->m = model_from_flags(r->f, t.mode);
    r->micro = (int)r->f->batch;
    r->layout = layout_make(&r->m);
    layout_share(&r->layout, &r->m, false, 0, 1);
    run_open_tokenizer(r);
    tasks_open(&r->tasks, r->f->tasks, r);
    Setup setup = run_setup(r);
    r->gpt = r->t->create(&r->m, &setup);
    r->inputs = check_alloc((size_t)setup.B * (size_t)setup.T * sizeof *r->inputs, "a batch");
    run_read_weights(r, r->f->from);
    for (Task *t = r->tasks.task; t < r->tasks.task + r->tasks.count; t++) {
        task_score(t, r);
        for (int64_t at = 0, next; at < t->rows; at = next) {
            int chosen = task_choice(t, at, false, &next);
            int by_length = task_choice(t, at, true, &next);
            for (int64_t i = at; i < next; i++)
                printf("%s %d %.9g %d %d %d\n", t->name, t->row[i].example, t->scores[2 * i],
                       t->scores[2 * i + 1] == 1, chosen, by_length);
        }
    }
    r->t->destroy(r->gpt);
    return 0;
}
