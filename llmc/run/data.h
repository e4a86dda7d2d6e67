// data.h: samples of T inputs and T targets, from shards on disk or from the built-in corpus.
//
// A shard is llm.c's format: a header of 256 int32 (magic, version, number of tokens; vocabulary,
// and bytes and words of the text, or 0 where unknown; then zeros) and the tokens, of 2 bytes each
// (magic 20240520, version 1) or 4 (magic 20240801, version 7). Little-endian, as x86-64 and
// AArch64 are. data/README.md draws it, data/shard.c writes it.
//
// The tokens of all shards, in the order of their names, are one stream of N tokens. Window w has
// the tokens w*T .. w*T+T-1 as inputs and the tokens w*T+1 .. w*T+T as targets; a window may
// straddle shards. An epoch has (N-1)/T windows, each once; the last (N-1)%T tokens are left over.
// Sample number i is a function of (seed, i) alone: nothing here counts calls, so a resumed run
// continues where it stopped.
//
// The built-in corpus (data/stories.c) is such a stream in memory, generated anew for every epoch
// of training, so it never repeats.
//
// A hash of the shards' XXH64 hashes, in their order, identifies the data. A thread computes it
// while the run trains. A damaged shard, or one that changes during the run, ends the program.
#pragma once
#include <pthread.h>
#include "files.h"

enum { SHARD_HEADER_BYTES = 1024 };
enum { SHARD_MAGIC_16 = 20240520, SHARD_VERSION_16 = 1 };
enum { SHARD_MAGIC_32 = 20240801, SHARD_VERSION_32 = 7 };
// Words of the header.
enum { SHARD_MAGIC, SHARD_VERSION, SHARD_TOKENS, SHARD_VOCAB, SHARD_BYTES, SHARD_WORDS };

// Tokens of the built-in corpus: a power of two are inputs; one more is the target of the last.
// Generating an epoch takes a tenth of a second at its start.
enum { CORPUS_TRAIN_TOKENS = (1 << 21) + 1, CORPUS_VAL_TOKENS = (1 << 17) + 1, CORPUS_VOCAB = 256 };

typedef struct {
    char path[PATH_CAP];
    int64_t first, count;  // it holds the tokens first .. first + count - 1 of the stream
    uint64_t hash;         // of the file; 0: not known yet
} Shard;

// One loader serves one thread, beside its hasher.
typedef struct {
    int64_t seq;              // T
    long long tokens, samples;                // of an epoch: N, and (N-1)/T
    int vocab;                // 0: unknown
    int64_t bytes, words;     // of the text, by the shards' headers; 0: unknown
    long long limit;          // the first token that is refused; the caller may lower it
    double floor;             // nats per token that no model can beat on average; NAN: unknown
    bool shuffle, validation;
    uint64_t seed;
    Shard *shards;
    int64_t shard_count;
    const Shard *open;        // the one shard that is open, as fd; NULL: none
    int fd, width;            // width: bytes per token
    void *raw;                // [T + 1] tokens as they are on disk
    int32_t *window;          // [T + 1] tokens of one sample
    char *text;               // the built-in corpus of this epoch, or NULL
    int64_t epoch;
    uint64_t content;         // identifies the data; 0: not known yet

    pthread_t hasher;         // the thread that hashes shards; both threads use the atomic fields
    bool hashing;             // it runs, or has not been joined
    _Atomic bool hashed;      // the pass has ended
    _Atomic bool stop;        // loader_close asks for its end
    _Atomic int64_t hashed_bytes;
    const Shard *bad;         // the first shard that cannot be read, or has changed
    int error;                // errno of reading it; 0: it has changed
} DataLoader;

// path: "" for the built-in corpus, a shard, a folder (its *train*.bin or *val*.bin, by split), or
// a glob pattern. Faults in the data end the program.
void loader_open(DataLoader *d, const char *path, const char *split, int seq, bool shuffle,
                 uint64_t seed);
void loader_close(DataLoader *d);

// Sample number `index`, counted from the start of training: inputs [T] and targets [T].
void loader_sample(DataLoader *d, int64_t index, int32_t *inputs, int32_t *targets);

// Sets d->floor to the entropy of the first `samples` samples, if only those are read (validation).
void loader_floor(DataLoader *d, int64_t samples);

// begin starts a thread that hashes the shards. end waits for it, with a line of progress every two
// seconds, and returns d->content. It ends the program if a shard has changed since the last pass.
void loader_hash_begin(DataLoader *d);
uint64_t loader_hash_end(DataLoader *d);
double loader_gigabytes(const DataLoader *d);

bool shard_named(const char *name);       // it ends in .bin and is not hidden
// The files of such names in a folder, sorted by name. Returns how many; -1, with errno set, if it
// is not a folder. The caller frees each entry and the list (scandir).
int shard_scan(const char *folder, struct dirent ***entries);
