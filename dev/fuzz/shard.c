// shard.c: token shards from any bytes, and all their samples. The first byte is the sequence
// length, the second how many files there are.
//
// 0: the rest of the input is one file as it stands. Else each file is 16 bytes (the header's first
// four words), one byte n, and n bytes of tokens: the fuzzer need not carry the header's thousand
// zeros.
#include "fuzz.h"
#include <sys/stat.h>
#include "../../llmc/run/data.h"

enum { FILES = 8, SAMPLES = 4096 };

static DataLoader loader;  // outlives a refusal, which leaves a file open

// Every token is in range, and a target is the next input.
static void read_samples(DataLoader *d) {
    int32_t inputs[256], targets[256];
    for (int64_t i = 0; i < 2 * d->samples && i < SAMPLES; i++) {
        loader_sample(d, i, inputs, targets);
        for (int64_t t = 0; t < d->seq; t++) {
            must(inputs[t] >= 0 && inputs[t] < d->limit && targets[t] >= 0 &&
                 targets[t] < d->limit);
            must(t == 0 || inputs[t] == targets[t - 1]);
        }
    }
}

static void write_file(int number, const void *head, size_t words, const void *tokens, size_t n) {
    uint8_t bytes[SHARD_HEADER_BYTES + 256] = {0};
    char path[FUZZ_PATH], name[32];
    memcpy(bytes, head, words);
    memcpy(bytes + SHARD_HEADER_BYTES, tokens, n);
    snprintf(name, sizeof name, "shards/train_%d.bin", number);
    fuzz_file(path, name, bytes, SHARD_HEADER_BYTES + n);
}

static void clear_folder(void) {
    char path[FUZZ_PATH], name[32];
    for (int i = 0; i < FILES; i++) {
        snprintf(name, sizeof name, "shards/train_%d.bin", i);
        remove(fuzz_path(path, name));
    }
}

static void open_shards(const uint8_t *data, size_t size) {
    char path[FUZZ_PATH];
    int seq = 1 + data[0] % 64, files = data[1] % (FILES + 1);
    const uint8_t *at = data + 2, *end = data + size;
    if (!files) fuzz_file(path, "one.bin", at, (size_t)(end - at));
    for (int i = 0; i < files && end - at >= 17; i++) {
        size_t n = at[16] < end - at - 17 ? at[16] : (size_t)(end - at - 17);
        write_file(i, at, 16, at + 17, n);
        at += 17 + n;
    }
    loader_open(&loader, files ? fuzz_path(path, "shards") : path, "train", seq, data[0] >= 128,
                data[0]);
    read_samples(&loader);
    loader_close(&loader);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char path[FUZZ_PATH];
    if (size < 2) return 0;
    mkdir(fuzz_path(path, "shards"), 0777);
    fuzz_once(open_shards, data, size, false);
    if (loader.fd > 0) close(loader.fd);
    memset(&loader, 0, sizeof loader);
    if (data[1] % (FILES + 1)) clear_folder();
    return 0;
}
