// tasks.c: any bytes as a file of tasks. A file that opens is used as scoring does: every token
// that would be read lies in the file, and below the vocabulary.
//
// The first byte is the sequence length. The second: 0, the rest is the file as it stands; odd,
// examples; even, a text, both with eight bytes for the header's words behind magic and version,
// and without its thousand zeros.
#include "fuzz.h"
#include "../../llmc/run/run.h"

enum { VOCAB = 512 };

static void check_rows(const Task *t, int T) {
    must(t->rows > 0 && t->examples > 0 && t->examples <= t->rows);
    for (int64_t i = 0; i < t->rows; i++) {
        const TaskRow *row = t->order[i];
        int inputs = row->inputs;
        must(inputs >= 1 && inputs <= T && row->scored >= 1 && row->scored <= inputs &&
             row->scored <= row->tokens - row->before && row->example < t->examples);
        must(i == 0 || inputs <= t->order[i - 1]->inputs);
        for (int64_t k = 0; k < row->tokens; k++) {
            int64_t at = k < row->before ? row->context + k : row->completion + k - row->before;
            must(at >= 0 && at < t->tokens && task_token(t, at) < VOCAB);
        }
    }
}

static void open_tasks(const uint8_t *data, size_t size) {
    char path[FUZZ_PATH];
    Run r = {.m.V = VOCAB, .m.T = 1 + data[0] % 64};
    Tasks tasks;
    if (data[1] && size >= 10) {
        int32_t head[SHARD_HEADER_BYTES / 4] = {data[1] % 2 ? EVAL_MAGIC : SHARD_MAGIC_16, 1};
        uint8_t *file = malloc(sizeof head + size);
        memcpy(head + 2, data + 2, 8);
        memcpy(file, head, sizeof head);
        memcpy(file + sizeof head, data + 10, size - 10);
        fuzz_file(path, "task.bin", file, sizeof head + size - 10);
        free(file);
    } else fuzz_file(path, "task.bin", data + 2, size - 2);
    tasks_open(&tasks, path, &r);
    check_rows(tasks.task, r.m.T);
    TaskMetric metrics[TASK_METRICS];
    must(task_metrics(tasks.task, metrics) >= 1);
    tasks_close(&tasks);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size >= 2) fuzz_once(open_tasks, data, size, false);
    return 0;
}
