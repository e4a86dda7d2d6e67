// test_dataloader.c: every sample holds exactly the tokens it should, in an order that depends on
// (seed, index) alone; shards that are not what they say are refused. In most shards written here a
// token is its own position in the stream, so a sample says where it was read.
#include <fcntl.h>
#include <unistd.h>
#include "../../data/stories.h"
#include "../../llmc/rand.h"
#include "../../llmc/run/data.h"
#include "test.h"

enum { MAX_SEQ = 64 };

// Writes a shard of `count` tokens first, first+1, ... of `width` bytes.
static void write_shard(const char *path, int64_t first, int32_t count, int width, int32_t vocab) {
    int32_t header[SHARD_HEADER_BYTES / 4] = {0};
    header[SHARD_MAGIC] = width == 2 ? SHARD_MAGIC_16 : SHARD_MAGIC_32;
    header[SHARD_VERSION] = width == 2 ? SHARD_VERSION_16 : SHARD_VERSION_32;
    header[SHARD_TOKENS] = count;
    header[SHARD_VOCAB] = vocab;
    FILE *f = fopen(path, "wb");
    CHECK(f, "%s: cannot be written\n  -> run the tests from the root of the repository", path);
    fwrite(header, sizeof header, 1, f);
    for (int64_t i = first; i < first + count; i++) {
        uint32_t token = (uint32_t)i;
        fwrite(&token, (size_t)width, 1, f);
    }
    fclose(f);
}

// Shards of the given sizes, written last one first, so that the folder's own order is not the
// names'. Returns the number of tokens.
static int64_t write_shards(const char *dir, const char *split, const int *sizes, int count,
                            int width, int32_t vocab) {
    char path[256];
    int64_t total = 0, first;
    for (int i = 0; i < count; i++) total += sizes[i];
    first = total;
    for (int i = count - 1; i >= 0; i--) {
        first -= sizes[i];
        write_shard(check_format(path, sizeof path, "%s/some_%s_%06d.bin", dir, split, i), first,
                    sizes[i], width, vocab);
    }
    return total;
}

// Every sample of two epochs in order; returns how many are not what the position says.
static int64_t wrong_samples(DataLoader *d) {
    int32_t inputs[MAX_SEQ], targets[MAX_SEQ];
    int64_t wrong = 0;
    for (int64_t i = 0; i < 2 * d->samples; i++) {
        loader_sample(d, i, inputs, targets);
        bool same = true;
        for (int64_t t = 0; t < d->seq; t++) {
            int64_t token = i % d->samples * d->seq + t;
            same = same && inputs[t] == token && targets[t] == token + 1;
        }
        wrong += !same;
    }
    return wrong;
}

static void test_windows(void) {
    static const int sizes[] = {1, 7, 64, 3, 1, 1, 129, 31, 2, 250};
    static const int seqs[] = {1, 2, 7, 8, 16, 63};
    for (int width = 2; width <= 4; width += 2) {
        const char *dir = test_dir("loader_windows");
        int64_t n = write_shards(dir, "train", sizes, 10, width, 0);
        for (int s = 0; s < 6; s++) {
            DataLoader d;
            loader_open(&d, dir, "train", seqs[s], 0, 1);
            EXPECT(d.tokens == n && d.samples == (n - 1) / seqs[s],
                   "width %d seq %d: %lld tokens, %lld samples", width, seqs[s],
                   (long long)d.tokens, (long long)d.samples);
            EXPECT(d.vocab == 0 && isnan(d.floor), "vocab %d, floor %g: neither is known", d.vocab,
                   d.floor);
            EXPECT(wrong_samples(&d) == 0,
                   "width %d seq %d: a sample holds other tokens than its window", width, seqs[s]);
            loader_close(&d);
        }
    }
}

// The place of sample `index` in a stream whose tokens are their positions.
static int64_t start_of(DataLoader *d, int64_t index) {
    int32_t inputs[MAX_SEQ], targets[MAX_SEQ];
    loader_sample(d, index, inputs, targets);
    return inputs[0];
}

static void test_order(void) {
    enum { SEQ = 8, SAMPLES = 61, TOKENS = SAMPLES * SEQ + 1 };
    static const int sizes[] = {100, 5, 300, TOKENS - 405};
    const char *dir = test_dir("loader_order");
    write_shards(dir, "train", sizes, 4, 4, 0);
    DataLoader d, again, other;
    loader_open(&d, dir, "train", SEQ, 1, 1);
    loader_open(&again, dir, "train", SEQ, 1, 1);
    loader_open(&other, dir, "train", SEQ, 1, 2);
    EXPECT(d.samples == SAMPLES, "%lld samples", (long long)d.samples);

    int64_t start[3 * SAMPLES];
    int kept[3] = {0}, same_seed = 0;
    for (int e = 0; e < 3; e++) {
        int seen[TOKENS] = {0}, wrong = 0;
        for (int i = 0; i < SAMPLES; i++) {
            int32_t inputs[SEQ], targets[SEQ];
            loader_sample(&d, e * SAMPLES + i, inputs, targets);
            start[e * SAMPLES + i] = inputs[0];
            for (int t = 0; t < SEQ; t++) {
                wrong += targets[t] != inputs[t] + 1;
                seen[inputs[t]]++;
            }
            kept[e] +=
                inputs[0] ==
                (e ? start[i] : i * SEQ);  // against the unshuffled order, then against epoch 0
            same_seed += inputs[0] == start_of(&other, e * SAMPLES + i);
        }
        for (int t = 0; t < TOKENS - 1; t++) wrong += seen[t] != 1;
        EXPECT(wrong == 0 && seen[TOKENS - 1] == 0,
               "epoch %d: %d tokens not seen exactly once as an input", e, wrong);
        EXPECT(kept[e] < SAMPLES / 4, "epoch %d: %d of %d samples stand where they stood", e,
               kept[e], SAMPLES);
    }
    EXPECT(same_seed < 3 * SAMPLES / 4, "another seed: %d of %d samples in the same place",
           same_seed, 3 * SAMPLES);

    for (int bit = 0; bit < 48; bit++) {  // every bit of the epoch's number counts
        int same = 0;
        for (int i = 0; i < SAMPLES; i++)
            same += start_of(&d, (1ll << bit) * SAMPLES + i) == start[i];
        EXPECT(same < SAMPLES / 4, "epoch 2^%d: %d samples stand as in epoch 0", bit, same);
    }

    int wrong = 0;  // backwards; then as two processes would with micro-batches of three
    for (int64_t i = 3 * SAMPLES - 1; i >= 0; i--) wrong += start_of(&again, i) != start[i];
    EXPECT(wrong == 0, "%d samples depend on the order of asking", wrong);
    for (int64_t step = 0; step < 3 * SAMPLES / 6; step++) {
        for (int64_t k = 0; k < 3; k++) {
            wrong += start_of(&d, step * 6 + k) != start[step * 6 + k];
            wrong += start_of(&again, step * 6 + 3 + k) != start[step * 6 + 3 + k];
        }
    }
    EXPECT(wrong == 0, "%d samples depend on how the batch is split", wrong);
    loader_close(&d);
    loader_close(&again);
    loader_close(&other);
}

static void test_paths(void) {
    static const int sizes[] = {20, 30}, val_sizes[] = {17};
    const char *dir = test_dir("loader paths");
    char path[256];
    write_shards(dir, "train", sizes, 2, 2, 300);
    write_shards(dir, "val", val_sizes, 1, 2, 300);
    write_shard(check_format(path, sizeof path, "%s/.train.bin", dir), 0, 5, 2,
                300);  // not taken: hidden, and no *.bin
    write_shard(check_format(path, sizeof path, "%s/train.bin.tmp", dir), 0, 5, 2, 300);
    DataLoader d;
    loader_open(&d, dir, "train", 4, 0, 0);
    EXPECT(d.tokens == 50 && d.vocab == 300 && d.limit == 300,
           "folder, train: %lld tokens, vocabulary %d", (long long)d.tokens, d.vocab);
    loader_close(&d);
    loader_open(&d, dir, "val", 4, 0, 0);
    EXPECT(d.tokens == 17, "folder, val: %lld tokens", (long long)d.tokens);
    loader_close(&d);
    loader_open(&d, check_format(path, sizeof path, "%s/some_train_000001.bin", dir), "val", 4, 0,
                0);
    EXPECT(d.tokens == 30 && start_of(&d, 0) == 20, "a file is taken for any split: %lld tokens",
           (long long)d.tokens);
    loader_close(&d);
    loader_open(&d, check_format(path, sizeof path, "%s/*00000[01].bin", dir), "train", 4, 0, 0);
    EXPECT(d.tokens == 67 && start_of(&d, 0) == 0, "a pattern: %lld tokens", (long long)d.tokens);
    loader_close(&d);
}

// More than 4 GiB in one shard, all of it holes but the last tokens; and more shards than a process
// may have files open.
static void test_sizes(void) {
    const char *dir = test_dir("loader_sizes");
    char path[256];
    const int32_t count = 1342177281;  // 5 GiB of 4-byte tokens and one more
    check_format(path, sizeof path, "%s/train_0.bin", dir);
    write_shard(path, 0, 0, 4, 0);
    int fd = open(path, O_RDWR);
    uint32_t last[3] = {7, 8, 9};
    int64_t size = SHARD_HEADER_BYTES + 4ll * count;
    bool ok = pwrite(fd, &count, 4, 4 * SHARD_TOKENS) == 4 && ftruncate(fd, size) == 0 &&
              pwrite(fd, last, 12, size - 12) == 12;
    EXPECT(ok, "%s cannot be written", path);
    close(fd);
    write_shard(check_format(path, sizeof path, "%s/train_1.bin", dir), 10, 64, 4, 0);
    DataLoader d;
    int32_t inputs[MAX_SEQ], targets[MAX_SEQ];
    loader_open(&d, dir, "train", 4, 0, 0);
    loader_sample(&d, (count - 1) / 4 - 1, inputs, targets);
    EXPECT(inputs[1] == 0 && inputs[2] == 7 && inputs[3] == 8 && targets[1] == 7 && targets[3] == 9,
           "the far end reads %d %d %d %d -> %d", inputs[0], inputs[1], inputs[2], inputs[3],
           targets[3]);
    loader_sample(&d, (count - 1) / 4, inputs, targets);
    EXPECT(inputs[0] == 9 && inputs[1] == 10 && inputs[3] == 12 && targets[3] == 13,
           "across the far end reads %d %d %d %d -> %d", inputs[0], inputs[1], inputs[2], inputs[3],
           targets[3]);
    loader_close(&d);

    enum { SHARDS = 3000 };
    static int sizes[SHARDS];
    for (int i = 0; i < SHARDS; i++) sizes[i] = 1 + i % 3;
    dir = test_dir("loader_many");
    int64_t n = write_shards(dir, "train", sizes, SHARDS, 4, 0);
    loader_open(&d, dir, "train", 16, 0, 0);
    EXPECT(d.tokens == n && wrong_samples(&d) == 0, "%d shards of one to three tokens: %lld tokens",
           SHARDS, (long long)d.tokens);
    EXPECT(d.fd < 1000, "descriptor %d: shards stay open", d.fd);
    loader_close(&d);
    test_dir("loader_sizes");  // removes what is large
    test_dir("loader_many");
}

// ---- refusals: what to open, and the sample to read or -1

typedef struct {
    const char *path, *split;
    int seq;
    int64_t sample, limit;
    const char *shrink;
} Request;

static void ask(void *arg) {
    const Request *r = (const Request *)arg;
    int32_t inputs[MAX_SEQ], targets[MAX_SEQ];
    DataLoader d;
    loader_open(&d, r->path, r->split, r->seq, 0, 1);
    if (r->limit) d.limit = r->limit;
    if (r->shrink)
        CHECK(truncate(r->shrink, SHARD_HEADER_BYTES + 100) == 0, "cannot shrink %s", r->shrink);
    if (r->sample >= 0) loader_sample(&d, r->sample, inputs, targets);
}

// A good shard of 100 2-byte tokens with one word of its header changed, its size changed by `grow`
// bytes.
static const char *bad_shard(int word, int32_t value, int grow) {
    static char path[256];
    check_format(path, sizeof path, "%s/train.bin", test_dir("loader_bad"));
    write_shard(path, 0, 100, 2, 0);
    int fd = open(path, O_RDWR);
    bool ok = (word < 0 || pwrite(fd, &value, 4, 4 * word) == 4) &&
              ftruncate(fd, SHARD_HEADER_BYTES + 200 + grow) == 0;
    EXPECT(ok, "%s cannot be written", path);
    close(fd);
    return path;
}

static void refuse(const char *path, int seq, int64_t sample, int64_t limit, const char *shrink,
                   const char *words) {
    Request r = {path, "train", seq, sample, limit, shrink};
    EXPECT_REFUSAL(ask, &r, words);
}

static void test_bad_shards(void) {
    char path[256], empty[256];
    check_format(empty, sizeof empty, "%s", test_dir("loader_none"));
    refuse(check_format(path, sizeof path, "%s/missing", empty), 4, -1, 0, NULL,
           "missing: this shard cannot be opened: No such file");
    refuse(check_format(path, sizeof path, "%s/*.bin", empty), 4, -1, 0, NULL,
           "*.bin: this shard cannot be opened: No such file");
    refuse(empty, 4, -1, 0, NULL,
           "expected files named *train*.bin, found none among its 0 .bin files");
    write_shard(check_format(path, sizeof path, "%s/val.bin", empty), 0, 9, 2, 0);
    refuse(empty, 4, -1, 0, NULL, "found none among its 1 .bin files");
    write_shard(check_format(path, sizeof path, "%s/retrieval_train.bin", empty), 0, 9, 2, 0);
    refuse(empty, 4, -1, 0, NULL, "found both");
    refuse("/dev/null", 4, -1, 0, NULL, "it is a pipe or device");

    refuse(bad_shard(SHARD_MAGIC, 1, 0), 4, -1, 0, NULL,
           "train.bin is not a shard: expected 1024 bytes with magic");
    refuse(bad_shard(-1, 0, -201), 4, -1, 0, NULL, "found 1023 bytes with");
    refuse(bad_shard(SHARD_VERSION, 2, 0), 4, -1, 0, NULL,
           "expected version 1, at least one token, and a vocabulary, bytes and words of 0 "
           "(unknown) or more, found version 2");
    refuse(bad_shard(SHARD_MAGIC, SHARD_MAGIC_32, 200), 4, -1, 0, NULL,
           "expected version 7, at least one token");
    refuse(bad_shard(SHARD_TOKENS, -5, 0), 4, -1, 0, NULL, "-5 tokens");
    refuse(bad_shard(SHARD_TOKENS, 0, -200), 4, -1, 0, NULL, " 0 tokens");
    refuse(bad_shard(SHARD_BYTES, -1, 0), 4, -1, 0, NULL, "-1 bytes");
    refuse(bad_shard(SHARD_WORDS, -1, 0), 4, -1, 0, NULL, "-1 words");
    refuse(bad_shard(-1, 0, -1), 4, -1, 0, NULL,
           "expected 1224 bytes for its 100 tokens of 2 bytes, found 1223");
    refuse(bad_shard(-1, 0, 2), 4, -1, 0, NULL, "found 1226");
    refuse(bad_shard(SHARD_VOCAB, -1, 0), 4, -1, 0, NULL, "vocabulary -1");
    refuse(bad_shard(-1, 0, 0), 100, -1, 0, NULL,
           "expected at least seq + 1 = 101 tokens for one sample, found 100 in the train split "
           "(seq 100)\n  -> --seq 99 or less");

    // Sample 17 of four reads the tokens 68 to 72; each is its own value.
    refuse(bad_shard(-1, 0, 0), 4, 17, 72, NULL,
           "train.bin: expected tokens below 72, found 72 at position 72\n  -> --vocab 73");
    refuse(bad_shard(SHARD_VOCAB, 70, 0), 4, 17, 0, NULL,
           "expected tokens below 70, found 70 at position 70");
    const char *shrunk = bad_shard(-1, 0, 0);
    refuse(shrunk, 4, 12, 0, shrunk, "expected 10 bytes at token 48, found 4");

    check_format(path, sizeof path, "%s/train_1.bin", test_dir("loader_bad"));
    const char *first = "build/test/loader_bad/train_0.bin";
    write_shard(first, 0, 100, 2, 50257);
    write_shard(path, 0, 100, 2, 256);
    refuse("build/test/loader_bad", 4, -1, 0, NULL,
           "train_1.bin: expected 2-byte tokens of vocabulary 50257 as in "
           "build/test/loader_bad/train_0.bin, found 2-byte");
    write_shard(path, 0, 100, 4, 50257);
    refuse("build/test/loader_bad", 4, -1, 0, NULL, "found 4-byte tokens of vocabulary 50257");
    uint32_t huge = 0x80000000u;  // would be negative as an int32
    write_shard(first, 0, 100, 4, 0);
    int fd = open(first, O_RDWR);
    EXPECT(pwrite(fd, &huge, 4, SHARD_HEADER_BYTES) == 4, "%s cannot be written", first);
    close(fd);
    refuse(first, 4, 0, 0, NULL, "found 2147483648 at position 0");

    DataLoader d;  // the same shard just fits where nothing is to be refused
    loader_open(&d, bad_shard(-1, 0, 0), "train", 4, 0, 0);
    d.limit = 73;
    EXPECT(start_of(&d, 17) == 68, "sample 17 begins with %lld", (long long)start_of(&d, 17));
    loader_close(&d);
    loader_open(&d, bad_shard(-1, 0, 0), "train", 99, 0, 0);
    EXPECT(d.samples == 1, "%lld samples in as many tokens as one needs", (long long)d.samples);
    loader_close(&d);
}

// ---- the built-in corpus

static uint64_t hash_samples(DataLoader *d, int64_t first, int64_t count) {
    int32_t inputs[MAX_SEQ], targets[MAX_SEQ];
    Hash h = hash_begin();
    for (int64_t i = first; i < first + count; i++) {
        loader_sample(d, i, inputs, targets);
        hash_add(&h, inputs, (size_t)d->seq * sizeof *inputs);
        hash_add(&h, targets, (size_t)d->seq * sizeof *targets);
    }
    return hash_end(&h);
}

static void test_corpus(void) {
    enum { SEQ = 64, COUNT = 500 };
    DataLoader train, same, other, val, val_other;
    loader_open(&train, "", "train", SEQ, 0, 1);
    loader_open(&same, "", "train", SEQ, 0, 1);
    loader_open(&other, "", "train", SEQ, 0, 2);
    loader_open(&val, "", "val", SEQ, 0, 1);
    loader_open(&val_other, "", "val", SEQ, 0, 2);
    EXPECT(train.vocab == 256 && train.limit == 256 && val.vocab == 256, "vocabulary %d",
           train.vocab);
    EXPECT(train.samples == (1 << 21) / SEQ && val.samples == (1 << 17) / SEQ,
           "%lld and %lld samples", (long long)train.samples, (long long)val.samples);
    EXPECT(train.floor > 0.1 && train.floor < 2.0, "floor %g", train.floor);
    EXPECT(fabs(val.floor / train.floor - 1.0) < 0.02, "floors %g and %g", train.floor, val.floor);

    char text[STORIES_MAX_BYTES];  // of few samples the floor is that of the first stories
    double nats = 0;
    int64_t bytes = 0;
    for (uint64_t i = 0; bytes < 100 * SEQ; i++) {
        size_t length;
        nats += stories_write(stories_seed(0, 1), i, text, sizeof text, &length);
        bytes += 1 + (int64_t)length;
    }
    uint64_t before = hash_samples(&val_other, 0, COUNT);
    loader_floor(&val_other, 100);
    EXPECT(fabs(val_other.floor - nats / (double)bytes) < 1e-12 && val_other.floor != val.floor,
           "the floor of 100 samples is %g, expected %g", val_other.floor, nats / (double)bytes);
    EXPECT(before == hash_samples(&val_other, 0, COUNT), "asking for it changes the text");

    int32_t inputs[SEQ], targets[SEQ];
    int wrong = 0, separators = 0;
    for (int i = 0; i < COUNT; i++) {
        int32_t last = targets[SEQ - 1];
        loader_sample(&train, i, inputs, targets);
        wrong += i > 0 && inputs[0] != last;
        for (int t = 0; t < SEQ; t++) {
            wrong += inputs[t] < 0 || inputs[t] > 255 || (t > 0 && inputs[t] != targets[t - 1]);
            separators += inputs[t] == 0;
        }
        if (i == 0)
            EXPECT(inputs[0] == 0 && inputs[1] != 0, "the text begins with %d %d", inputs[0],
                   inputs[1]);
    }
    EXPECT(wrong == 0, "%d tokens do not follow from the one before", wrong);
    EXPECT(separators > COUNT * SEQ / STORIES_MAX_BYTES, "%d separators in %d bytes", separators,
           COUNT * SEQ);

    uint64_t epoch0 = hash_samples(&train, 0, COUNT),
             epoch1 = hash_samples(&train, train.samples, COUNT);
    EXPECT(epoch0 == hash_samples(&same, 0, COUNT), "the same seed has another text");
    EXPECT(epoch0 != hash_samples(&other, 0, COUNT), "another seed has the same text");
    EXPECT(epoch0 != epoch1, "epoch 1 repeats the text of epoch 0");
    EXPECT(epoch0 == hash_samples(&train, 0, COUNT), "epoch 0 is another text after epoch 1");
    EXPECT(epoch0 != hash_samples(&train, 8 * train.samples, COUNT), "epoch 8 repeats epoch 0");
    EXPECT(epoch0 != hash_samples(&train, train.samples << 16, COUNT), "epoch 65536 is epoch 0");
    EXPECT(epoch1 == hash_samples(&same, same.samples, COUNT),
           "epoch 1 has another text when it is reached later");
    uint64_t validation = hash_samples(&val, 0, COUNT);
    EXPECT(validation == hash_samples(&val_other, 0, COUNT),
           "validation depends on the seed of the run");
    EXPECT(validation == hash_samples(&val, val.samples, COUNT), "validation depends on the epoch");
    EXPECT(validation != epoch0, "validation is the text of training");
    other.seed = 0;  // the seed that validation uses
    other.epoch = -1;
    EXPECT(validation != hash_samples(&other, 0, COUNT),
           "validation is the text of training with seed 0");
    loader_close(&train);
    loader_close(&same);
    loader_close(&other);
    loader_close(&val);
    loader_close(&val_other);
}

// The content hash of the shards of a pattern.
static uint64_t content_of(const char *pattern) {
    DataLoader d;
    loader_open(&d, pattern, "train", 8, 1, 1);
    loader_hash_begin(&d);
    uint64_t content = loader_hash_end(&d);
    loader_close(&d);
    return content;
}

// Another token in the shard between two looks; a NULL path removes it.
static void change_between(void *path) {
    DataLoader d;
    loader_open(&d, "build/test/loader_content/*.bin", "train", 8, 1, 1);
    loader_hash_begin(&d);
    loader_hash_end(&d);
    if (path) write_shard((const char *)path, 5, 1000, 2, 0);
    else unlink("build/test/loader_content/b.bin");
    loader_hash_begin(&d);
    loader_hash_end(&d);
}

// Data is what its tokens are, in their order, wherever they lie.
static void test_content(void) {
    const char *dir = test_dir("loader_content");
    char a[256], b[256], pattern[256], moved[256];
    write_shard(check_format(a, sizeof a, "%s/a.bin", dir), 0, 1000, 2, 0);
    write_shard(check_format(b, sizeof b, "%s/b.bin", dir), 1000, 1000, 2, 0);
    check_format(pattern, sizeof pattern, "%s/*.bin", dir);
    uint64_t whole = content_of(pattern);
    EXPECT(whole && whole == content_of(pattern), "the same data twice");
    EXPECT(rename(b, check_format(moved, sizeof moved, "%s/c.bin", dir)) == 0 &&
               content_of(pattern) == whole,
           "its name does not count");
    EXPECT(rename(moved, check_format(b, sizeof b, "%s/0.bin", dir)) == 0 &&
               content_of(pattern) != whole,
           "its order does");
    unlink(b);
    write_shard(check_format(b, sizeof b, "%s/b.bin", dir), 1000, 1000, 2, 0);
    for (int32_t last = 0; last < 2; last++) {  // the last token of each shard is another
        FILE *f = fopen(last ? b : a, "r+b");
        fseek(f, -2, SEEK_END);
        int low = fgetc(f);
        fseek(f, -2, SEEK_END);
        fputc(low ^ 1, f);
        fclose(f);
        EXPECT(content_of(pattern) != whole, "another last token of shard %d is not seen", last);
        write_shard(last ? b : a, last ? 1000 : 0, 1000, 2, 0);
    }
    EXPECT(content_of(pattern) == whole, "and as it was");
    EXPECT_REFUSAL(change_between, b,
                   "b.bin: expected the shard that this run began with, found other bytes");
    EXPECT_REFUSAL(change_between, NULL, "that this run began with, found No such file");
}

void test_dataloader(void) {
    test_content();
    test_windows();
    test_order();
    test_paths();
    test_sizes();
    test_bad_shards();
    test_corpus();
}
