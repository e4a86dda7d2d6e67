// data.c: see data.h.
//
// A window of T + 1 tokens gives a sample: its first T are the inputs, its last T the targets. With
// T = 4 and the stream  a b c d e f g h i  window 0 is  a b c d e  and window 1 is  e f g h i.
#include "data.h"
#include "../../data/stories.h"
#include <fnmatch.h>
#include <glob.h>
#include <math.h>
#include <unistd.h>

// ----------------------------------------------------------------------------- the built-in corpus

// Writes at least `tokens` bytes of an epoch: stories, each after a NUL byte. No two epochs share a
// story number. Validation has one text for all seeds, so that runs with different seeds are
// compared on the same bytes. d->floor: the text's entropy in nats a byte, over whole stories.
static void corpus_write(DataLoader *d, int64_t epoch, int64_t tokens) {
    uint64_t seed = stories_seed(d->validation ? 0 : d->seed, d->validation);
    double nats = 0;
    int64_t end = 0;
    for (uint64_t i = 0; end < tokens; i++) {
        uint64_t story = (uint64_t)epoch << 32 | i;
        size_t length = 0;
        d->text[end++] = 0;
        nats += stories_write(seed, story, d->text + end, STORIES_MAX_BYTES, &length);
        end += length;
    }
    d->floor = nats / end;
    d->epoch = epoch;
}

// Writes the text again, only as far as the samples reach.
void loader_floor(DataLoader *d, int64_t samples) {
    if (d->text) corpus_write(d, d->epoch, samples * d->seq);
}

// ------------------------------------------------------------------------------------------ shards

// Appends a shard to the stream. The only place in the trainer that reads a shard's header; refuses
// one that does not fit the file or the shards before it.
static void shard_add(DataLoader *d, const char *path) {
    d->shards = check_grow(d->shards, d->shard_count, sizeof(Shard), "a list of shards");
    Shard *s = &d->shards[d->shard_count++];
    s->hash = 0;
    check_format(s->path, sizeof s->path, "%s", path);
    int32_t head[SHARD_HEADER_BYTES / 4] = {0};
    int64_t size;
    int fd = file_open(path, &size);
    CHECK(fd >= 0,
          "%s: this shard cannot be opened: %s\n"
          "  -> --data FILE, FOLDER or 'PATTERN', of files that may be read; without --data: the "
          "built-in corpus",
          path, file_error());
    long long got = file_read_at(fd, head, SHARD_HEADER_BYTES, 0);
    close(fd);

    // The magic number implies the width and the version.
    int magic = head[SHARD_MAGIC], count = head[SHARD_TOKENS], vocab = head[SHARD_VOCAB];
    int bytes = head[SHARD_BYTES], words = head[SHARD_WORDS];
    bool wide = magic == SHARD_MAGIC_32;
    CHECK(got == SHARD_HEADER_BYTES && (wide || magic == SHARD_MAGIC_16),
          "%s is not a shard: expected %d bytes with magic %d or %d, found %lld bytes with magic "
          "%d\n  -> make shard && ./shard --out DIR your.txt, then --data DIR; python3 data/get.py "
          "tasks, for --tasks",
          path, SHARD_HEADER_BYTES, SHARD_MAGIC_16, SHARD_MAGIC_32, got, magic);
    int width = wide ? 4 : 2, version = wide ? SHARD_VERSION_32 : SHARD_VERSION_16;
    CHECK(head[SHARD_VERSION] == version && count > 0 && vocab >= 0 && bytes >= 0 && words >= 0,
          "%s: expected version %d, at least one token, and a vocabulary, bytes and words of 0 "
          "(unknown) or more, found version %d, %d tokens, vocabulary %d, %d bytes, %d words\n"
          "  -> write this shard again, or remove it",
          path, version, head[SHARD_VERSION], count, vocab, bytes, words);
    // A truncated download is the usual fault.
    long long need = SHARD_HEADER_BYTES + (int64_t)count * width;
    CHECK(size == need,
          "%s: expected %lld bytes for its %d tokens of %d bytes, found %lld\n"
          "  -> copy or download this shard again",
          path, need, count, width, (long long)size);

    // All shards must have the width and vocabulary of the first.
    if (s == d->shards) d->width = width, d->vocab = vocab;
    CHECK(width == d->width && vocab == d->vocab,
          "%s: expected %d-byte tokens of vocabulary %d as in %s, found %d-byte tokens of "
          "vocabulary %d\n  -> move one of the two away: all shards of a run have one tokenizer",
          path, d->width, d->vocab, d->shards->path, width, vocab);
    s->first = d->tokens;
    s->count = count;
    d->tokens += count;
    d->bytes += bytes;
    d->words += words;
}

// FNM_PERIOD: * is not the dot of a hidden file, such as one called just ".bin".
bool shard_named(const char *name) { return fnmatch("*.bin", name, FNM_PERIOD) == 0; }

static int is_shard(const struct dirent *entry) { return shard_named(entry->d_name); }

// The program never calls setlocale, so alphasort compares bytes.
int shard_scan(const char *folder, struct dirent ***entries) {
    return scandir(folder, entries, is_shard, alphasort);
}

// The shards of one split in a folder: *.bin, not hidden, whose name contains the split's.
static void shard_list_folder(DataLoader *d, const char *path, const char *split) {
    char file[PATH_CAP];
    struct dirent **entries;
    int n = shard_scan(path, &entries);
    CHECK(n >= 0, "%s: cannot read this folder of shards: %m\n  -> check its permissions", path);
    // The names of both splits are checked, whichever is asked for.
    for (int i = 0; i < n; i++) {
        const char *name = entries[i]->d_name;
        CHECK(!strstr(name, "train") || !strstr(name, "val"),  // it would be in both splits
              "%s/%s: expected \"train\" or \"val\" in the name, found both\n"
              "  -> rename the file",
              path, name);
        if (strstr(name, split)) shard_add(d, path_join(file, path, name));
        free(entries[i]);
    }
    free(entries);
    CHECK(d->shard_count,
          "%s: expected files named *%s*.bin, found none among its %d .bin files\n"
          "  -> --data 'FOLDER/PATTERN', --val-data too; from text: ./shard --out DIR your.txt",
          path, split, n);
}

// A file or folder with exactly this name is taken first; otherwise the name is a glob pattern.
static void shard_list(DataLoader *d, const char *path, const char *split) {
    glob_t found;
    if (is_folder(path)) shard_list_folder(d, path, split);
    else if (file_exists(path) || glob(path, 0, NULL, &found) != 0) shard_add(d, path);
    else {
        for (size_t i = 0; i < found.gl_pathc; i++) shard_add(d, found.gl_pathv[i]);
        globfree(&found);
    }
}

void loader_open(DataLoader *d, const char *path, const char *split, int seq, bool shuffle,
                 uint64_t seed) {
    *d = (DataLoader){.seq = seq, .shuffle = shuffle, .seed = seed, .floor = NAN};
    d->validation = !strcmp(split, "val");
    if (*path) {
        shard_list(d, path, split);
        d->raw = check_alloc((seq + 1L) * d->width, "one sample");
    } else {
        d->tokens = d->validation ? CORPUS_VAL_TOKENS : CORPUS_TRAIN_TOKENS;
        d->vocab = CORPUS_VOCAB;
        // The last story reaches beyond the last token.
        d->text = check_alloc(d->tokens + 1 + STORIES_MAX_BYTES, "the built-in corpus");
        corpus_write(d, 0, d->tokens);
        d->content = hash_bytes(d->text, d->tokens);
    }
    d->window = check_alloc((seq + 1L) * sizeof *d->window, "one sample");
    // The model's vocabulary may lower the limit later.
    d->limit = d->vocab ? d->vocab : (int64_t)INT32_MAX + 1;
    d->samples = (d->tokens - 1) / seq;
    CHECK(d->samples > 0,
          "%s: expected at least seq + 1 = %d tokens for one sample, found %lld in the %s split "
          "(seq %d)\n  -> --seq %lld or less, or more text",
          *path ? path : "built-in corpus", seq + 1, d->tokens, split, seq,
          (d->tokens > 1 ? d->tokens - 1 : 1));
}

// A running hasher stops after its current shard.
void loader_close(DataLoader *d) {
    d->stop = true;
    if (d->hashing) pthread_join(d->hasher, NULL);
    if (d->open) close(d->fd);
    free(d->shards);
    free(d->raw);
    free(d->window);
    free(d->text);
    memset(d, 0, sizeof *d);
}

// ---------------------------------------------------------------------------- the identity of data

// The thread's function: hashes every shard, and compares with the hash of an earlier pass, if any.
static void *shard_hash_all(void *loader) {
    DataLoader *d = loader;
    for (Shard *s = d->shards; s < d->shards + d->shard_count && !d->bad; s++) {
        Hash hash;
        if (d->stop) break;  // loader_close waits
        // A shard that cannot be read, or that has changed, ends the pass.
        d->error = file_hash(s->path, &hash, &d->hashed_bytes) ? 0 : errno;
        uint64_t now = hash_end(&hash);
        if (d->error || (s->hash && s->hash != now)) d->bad = s;
        s->hash = now;
    }
    d->hashed = true;
    return NULL;
}

// Does nothing while the thread runs, and for the built-in corpus, whose hash is known.
void loader_hash_begin(DataLoader *d) {
    if (d->hashing || !d->shard_count) return;
    d->hashed = false;
    d->hashed_bytes = 0;
    errno = pthread_create(&d->hasher, NULL, shard_hash_all, d);
    CHECK(!errno,
          "cannot start a thread that hashes the data: %m\n"
          "  -> close other programs, or raise the limit on threads (ulimit -u)");
    d->hashing = true;
}

// From the headers: no token is read.
double loader_gigabytes(const DataLoader *d) {
    return 1e-9 * (d->tokens * d->width + d->shard_count * SHARD_HEADER_BYTES);
}

// Polls the thread instead of joining it at once, so that progress can be printed.
uint64_t loader_hash_end(DataLoader *d) {
    if (!d->hashing) return d->content;
    double printed = clock_seconds();
    while (!d->hashed) {
        usleep(1000);
        if (clock_seconds() - printed < 2) continue;
        printf("hashing the data: %.1f of %.1f GB\n", 1e-9 * d->hashed_bytes, loader_gigabytes(d));
        fflush(stdout);
        printed = clock_seconds();
    }
    pthread_join(d->hasher, NULL);
    d->hashing = false;
    // The thread has ended: its results are read without locks.
    CHECK(!d->bad,
          "%s: expected the shard that this run began with, found %s\n"
          "  -> restore the shard; " GO_ON,
          d->bad->path, d->error ? strerror(d->error) : "other bytes");
    // The hash covers bytes and their order, not names: shards may be renamed or moved.
    Hash content = hash_begin();
    for (const Shard *s = d->shards; s < d->shards + d->shard_count; s++)
        hash_add(&content, &s->hash, sizeof s->hash);
    return d->content = hash_end(&content);
}

// ----------------------------------------------------------------------------------------- samples

// The shard that holds token `at`, opened. Only one is open at a time: a folder may hold more
// shards than a process may open.
static const Shard *shard_seek(DataLoader *d, int64_t at) {
    const Shard *s = d->shards, *end = s + d->shard_count;
    while (end - s > 1) {  // binary search: a folder may hold many
        const Shard *middle = s + (end - s) / 2;
        if (middle->first <= at) s = middle;
        else end = middle;
    }
    // Windows of one shard often follow each other: it stays open.
    if (s != d->open) {
        if (d->open) close(d->fd);
        int64_t size;
        d->fd = file_open(s->path, &size);
        CHECK(d->fd >= 0,
              "%s: expected this shard to stay readable while training, found: %s\n"
              "  -> put it back; " GO_ON,
              s->path, file_error());
        d->open = s;
    }
    return s;
}

// Reads and widens the T + 1 tokens from `at` on, piece by piece where they lie in several shards.
static void shard_window(DataLoader *d, int64_t at) {
    for (int64_t done = 0; done < d->seq + 1;) {
        const Shard *s = shard_seek(d, at + done);
        long long skip = at + done - s->first, n = least(s->count - skip, d->seq + 1 - done);
        long long bytes = n * d->width, offset = SHARD_HEADER_BYTES + skip * d->width;
        long long got = file_read_at(d->fd, d->raw, bytes, offset);
        CHECK(got == bytes,
              "%s: expected %lld bytes at token %lld, found %lld: %s\n"
              "  -> restore the shard; " GO_ON,
              s->path, bytes, skip, got,
              got < 0 ? file_error() : "the file has changed since the start");
        // A token beyond the vocabulary would read outside the embedding.
        for (int64_t i = 0; i < n; i++) {
            long long token = d->width == 2 ? ((uint16_t *)d->raw)[i] : ((uint32_t *)d->raw)[i];
            CHECK(token < d->limit,
                  "%s: expected tokens below %lld, found %lld at position %lld\n"
                  "  -> --vocab %lld or more, or shards of the right tokenizer",
                  s->path, d->limit, token, skip + i, token + 1);
            d->window[done++] = token;
        }
    }
}

// The order is a permutation of the epoch's windows, computed for one window at a time (rand.h): no
// table, and any sample can be asked for.
void loader_sample(DataLoader *d, int64_t index, int32_t *inputs, int32_t *targets) {
    int64_t epoch = index / d->samples, window = index % d->samples;
    if (d->shuffle) {
        uint64_t key = rand_key(d->seed, "shuffle", (uint64_t)epoch);
        window = rand_permute(key, window, d->samples);
    }
    int64_t first = window * d->seq;
    if (!d->text) shard_window(d, first);
    else {
        // The validation text is the same in every epoch.
        if (epoch != d->epoch && !d->validation) corpus_write(d, epoch, d->tokens);
        for (int64_t t = 0; t <= d->seq; t++) d->window[t] = (uint8_t)d->text[first + t];
    }
    // Targets are the inputs shifted by one token.
    memcpy(inputs, d->window, d->seq * sizeof *inputs);
    memcpy(targets, d->window + 1, d->seq * sizeof *targets);
}
