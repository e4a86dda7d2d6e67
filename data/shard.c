// shard.c: UTF-8 text -> shards of bytes for training (the format is in data/README.md).
//
//     make shard && ./shard --out DIR FILE...
//     make shard && ./shard --out DIR --stories N
//
// Every byte of text is a token of a vocabulary of 256, and every file is a document. A document
// begins with the separator, token 0, so text must not contain NUL bytes. Validation is the end of
// the text: all documents in order are one sequence of bytes, cut at (1 - fraction) of it or at the
// first character that begins after that. Both parts begin with a separator.
// Memory does not grow with the text. Shards are renamed to their final names only when all text
// has been read and is valid: a refused text or a kill leaves no shard.
//
// --stories writes the built-in corpus instead, for programs that read shards only (dev/probe.py).
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "../llmc/run/data.h"
#include "../llmc/run/util.h"

enum { SEPARATOR = 0 };          // the token that begins a document
enum { TRAIN = 0, VAL = 1 };     // the splits
enum { MAX_PATH = 4096 };        // bytes of a path, its end included
enum { BUFFER_TOKENS = 1 << 16, READ_BYTES = 1 << 20 };

static const char *const SPLITS[] = {"train", "val"};

// The files in the order of their tokens, and the bytes of each and of all.
typedef struct { char *path; int64_t bytes; } Document;
typedef struct { Document *list; int64_t count, bytes; } Documents;

// The place of the next token. A split begins a new shard after every shard_tokens tokens.
typedef struct {
    const char *dir;
    int64_t shard_tokens;
    int part;                        // the split that is being written: TRAIN or VAL
    int64_t tokens[2], shards[2];    // of each split, so far
    FILE *file;                      // the shard that is being written, or NULL
    int64_t in_shard;                // its tokens, the buffered ones included
    int buffered;
    uint16_t buffer[BUFFER_TOKENS];  // tokens as they lie in the file: uint16, little-endian
} Writer;

// Bytes of text, and seconds on the monotonic clock: of the start and of the last line printed.
typedef struct { int64_t total, done; double start, last; bool terminal; } Progress;

static void help(void) {
    printf("usage: ./shard --out DIR FILE...\n"
           "       ./shard --out DIR --stories N\n\n"
           "Writes UTF-8 text as shards of bytes: DIR/train_000000.bin ..., DIR/val_000000.bin\n"
           "... FILE may be a folder: all its files, sorted, with those of its folders; hidden\n"
           "files, empty ones and *.bin are skipped. Every file is a document and begins with the\n"
           "separator, token 0. The end of the text is the validation split.\n\n"
           "  --out DIR            where the shards go; made when missing\n"
           "  --val-fraction 0.1   part of the text for validation, 0 for none\n"
           "  --shard-tokens N     tokens per shard, 100000000 by default\n"
           "  --stories N          writes the built-in corpus: the first N tokens of training\n"
           "                       (of --seed 1) and the whole validation split\n"
           "  --help\n\n"
           "then: ./train_gpt --data DIR\n");
}

// ---- the documents: paths and sizes in order

// Appends a file.
static void add_document(Documents *d, const char *path, int64_t bytes) {
    d->list = check_grow(d->list, d->count, sizeof(Document), "a list of files");
    Document *document = &d->list[d->count++];
    document->path = check_alloc(strlen(path) + 1, "the path of a file");
    strcpy(document->path, path);
    document->bytes = bytes;
    d->bytes += bytes;
}

// A filter for scandir: hidden files are skipped, and shards, because a folder of text may contain
// the DIR of an earlier run.
static int maybe_text(const struct dirent *entry) {
    return entry->d_name[0] != '.' && !shard_named(entry->d_name);
}

// Appends a file, or all files of a folder and of its folders in the order of their names. named:
// the user gave this path. Empty files are skipped: a document without text would be a lone
// separator.
static void add_path(Documents *d, const char *path, bool named) {
    struct stat info;
    CHECK(stat(path, &info) == 0,
          "%s: expected a text file or a folder, found: %s\n  -> check the path",
          path, strerror(errno));
    if (S_ISDIR(info.st_mode)) {
        struct dirent **entries;
        int n = scandir(path, &entries, maybe_text, alphasort);
        CHECK(n >= 0,
              "%s: expected a folder of text, found that it cannot be read: %s\n"
              "  -> check its permissions",
              path, strerror(errno));
        // Not on the stack: folders may lie two thousand deep.
        char *inside = check_alloc(MAX_PATH, "the path of a file");
        for (int i = 0; i < n; i++) {
            add_path(d, check_format(inside, MAX_PATH, "%s/%s", path, entries[i]->d_name), false);
            free(entries[i]);
        }
        free(inside);
        free(entries);
    } else if (S_ISREG(info.st_mode)) {
        if (info.st_size > 0) add_document(d, path, info.st_size);
    } else {  // sockets and pipes in a folder are skipped; one that the user names is refused
        CHECK(!named,
              "%s: expected a regular file, whose size is known, found a pipe or device\n"
              "  -> write the text to a file first", path);
    }
}

// ---- the shards: written under hidden names, renamed together at the end

// The path of a shard: DIR/train_000000.bin. While it is written: DIR/.train_000000.bin.tmp, which
// readers ignore.
static char *shard_name(const Writer *w, char *path, int part, int64_t number, bool final) {
    return check_format(path, MAX_PATH, "%s/%s%s_%06lld.bin%s", w->dir, final ? "" : ".",
                        SPLITS[part], (long long)number, final ? "" : ".tmp");
}

// Removes every unpublished shard, so that a refused text leaves the folder as it was.
static void discard_shards(Writer *w) {
    char path[MAX_PATH];
    if (w->file) fclose(w->file);
    for (int part = TRAIN; part <= VAL; part++)
        for (int64_t i = 0; i < w->shards[part]; i++) remove(shard_name(w, path, part, i, false));
}

// Ends the program after a failed write, with errno of it. ok: the write succeeded.
static void check_write(Writer *w, bool ok) {
    if (ok) return;
    int error = errno;
    discard_shards(w);
    CHECK_WRITE(false,
                "%s: expected to write %s shards there, found: %s\n"
                "  -> free disk space, or another --out",
                w->dir, SPLITS[w->part], strerror(error));
}

// Writes the buffered tokens to the shard.
static void flush_tokens(Writer *w) {
    size_t count = (size_t)w->buffered;
    check_write(w, fwrite(w->buffer, sizeof *w->buffer, count, w->file) == count);
    w->buffered = 0;
}

// Opens the next shard of the split and writes zeros in place of its header.
static void begin_shard(Writer *w) {
    char path[MAX_PATH];
    // end_shard writes the header: an unfinished shard is not valid.
    int32_t header[SHARD_HEADER_BYTES / 4] = {0};
    w->file = fopen(shard_name(w, path, w->part, w->shards[w->part], false), "wb");
    check_write(w, w->file);
    w->shards[w->part]++;
    w->in_shard = 0;
    check_write(w, fwrite(header, sizeof header, 1, w->file) == 1);
}

// Writes the last tokens and the header, and waits until they are on the disk. Without an open
// shard it does nothing.
static void end_shard(Writer *w) {
    if (!w->file) return;
    int32_t header[SHARD_HEADER_BYTES / 4] = {0};  // all other words are 0
    header[SHARD_MAGIC] = SHARD_MAGIC_16;
    header[SHARD_VERSION] = SHARD_VERSION_16;
    header[SHARD_TOKENS] = (int32_t)w->in_shard;
    header[SHARD_VOCAB] = CORPUS_VOCAB;
    flush_tokens(w);
    check_write(w, fseek(w->file, 0, SEEK_SET) == 0 &&
                       fwrite(header, sizeof header, 1, w->file) == 1 && fflush(w->file) == 0 &&
                       fsync(fileno(w->file)) == 0);
    FILE *file = w->file;
    w->file = NULL;  // a failed fclose has closed it too: discard_shards must not do so again
    check_write(w, fclose(file) == 0);
}

// Appends a token to the split. The first token of a shard opens its file.
static void put_token(Writer *w, unsigned char token) {
    if (!w->file) begin_shard(w);
    w->buffer[w->buffered++] = token;
    w->in_shard++;
    w->tokens[w->part]++;
    if (w->buffered == BUFFER_TOKENS) flush_tokens(w);
    if (w->in_shard == w->shard_tokens) end_shard(w);
}

// The tokens from here on belong to the validation split.
static void begin_validation(Writer *w) {
    end_shard(w);
    w->part = VAL;
}

// Renames all shards to their final names, after every one of them is complete on the disk. A crash
// in between leaves complete shards and hidden files.
static void publish_shards(Writer *w) {
    char from[MAX_PATH], to[MAX_PATH];
    for (int part = TRAIN; part <= VAL; part++) {
        for (int64_t i = 0; i < w->shards[part]; i++) {
            shard_name(w, from, part, i, false);
            shard_name(w, to, part, i, true);
            check_write(w, rename(from, to) == 0);
        }
    }
    int folder = folder_open(w->dir);
    folder_sync(folder, to);
    close(folder);
}

// Makes the folder, or refuses one that holds shards already.
static void prepare_folder(const char *dir) {
    CHECK(mkdir(dir, 0777) == 0 || errno == EEXIST,
          "%s: expected to make this folder, found: %s\n"
          "  -> mkdir -p the folder above it, or another --out",
          dir, strerror(errno));
    struct dirent **entries;
    int n = shard_scan(dir, &entries);
    CHECK(n >= 0, "%s: expected a folder for the shards, found: %s\n  -> another --out", dir,
          strerror(errno));
    CHECK(!n,  // training would read old and new .bin files as one text
          "%s: expected a folder without shards, found %s\n"
          "  -> remove the old *.bin files, or another --out",
          dir, entries[0]->d_name);
    free(entries);
}

// ---- the text

// On a terminal one line that is overwritten every second; otherwise a line every ten seconds.
static void show_progress(Progress *p) {
    double now = clock_seconds();
    if (now - p->last < (p->terminal ? 1.0 : 10.0)) return;
    p->last = now;
    double rate = (double)p->done / (now - p->start);
    fprintf(stderr, "%lld of %lld MB, %.0f MB/s, %.0f s to go%s", (long long)(p->done / 1000000),
            (long long)(p->total / 1000000), rate * 1e-6, (double)(p->total - p->done) / rate,
            p->terminal ? "   \r" : "\n");
}

// Refuses text that is not valid, with the likely cause and what to do. nul: it is a NUL byte;
// otherwise a character that is not UTF-8. offset: its first byte in the file.
static void refuse_text(Writer *w, const char *path, int64_t offset, bool nul) {
    discard_shards(w);
    char magic[4] = {0};
    FILE *in = fopen(path, "rb");
    bool parquet = in && fread(magic, 1, 4, in) == 4 && !memcmp(magic, "PAR1", 4);
    if (in) fclose(in);
    CHECK(!parquet, "%s: expected text, found Parquet\n"
          "  -> python3 data/get.py --out %s %s reads its column text, as GPT-2's tokens",
          path, w->dir, path);
    CHECK(!nul,
          "%s: expected text, found a NUL byte at offset %lld: token 0 separates documents\n"
          "  -> remove it (tr -d '\\000' < FILE > NEW), or convert UTF-16 (iconv -f UTF-16 "
          "-t UTF-8 FILE > NEW), or leave this file out",
          path, (long long)offset);
    CHECK(false,
          "%s: expected UTF-8, found an invalid character at offset %lld\n"
          "  -> convert it (iconv -f ISO-8859-1 -t UTF-8 FILE > NEW, with its real encoding), or "
          "leave this file out",
          path, (long long)offset);
}

// Writes one document. cut: the byte of the whole text, counted over all documents, where
// validation begins.
static void write_document(Writer *w, const Document *doc, int64_t cut, char *chunk, Progress *p) {
    FILE *in = fopen(doc->path, "rb");
    if (!in) discard_shards(w);
    CHECK(in,
          "%s: expected a text file, found that it cannot be opened: %s\n"
          "  -> check its permissions, or leave it out",
          doc->path, strerror(errno));
    int64_t before = p->done, at = 0;  // bytes of the documents before, and of this one
    size_t rest = 0;                   // bytes of a character that the last read has cut
    if (w->part == TRAIN && before >= cut) begin_validation(w);
    put_token(w, SEPARATOR);
    for (size_t n; (n = fread(chunk + rest, 1, READ_BYTES - rest, in)) > 0;) {
        size_t i = 0, length;
        for (n += rest; i < n; i += length, at += length) {
            length = utf8_length(chunk + i, n - i);
            if (!length && n - i < 4) break;  // the next read may complete it
            if (!length || chunk[i] == SEPARATOR) refuse_text(w, doc->path, at, length > 0);
            if (w->part == TRAIN && before + at >= cut) {
                begin_validation(w);
                put_token(w, SEPARATOR);
            }
            for (size_t k = 0; k < length; k++) put_token(w, (unsigned char)chunk[i + k]);
        }
        rest = n - i;
        memmove(chunk, chunk + i, rest);
        p->done = before + at;
        show_progress(p);
    }
    fclose(in);
    // Another size moves the cut between the splits.
    int64_t size = at + (int64_t)rest;
    if (size != doc->bytes) discard_shards(w);
    CHECK(size == doc->bytes,
          "%s: expected %lld bytes as at the start, found %lld\n"
          "  -> run again when nothing writes to this file",
          doc->path, (long long)doc->bytes, (long long)size);
    if (rest) refuse_text(w, doc->path, at, false);
}

// Writes all documents, the last val_fraction of their bytes as the validation split.
static void write_text(Writer *w, const Documents *text, double val_fraction) {
    char *chunk = check_alloc(READ_BYTES, "the buffer of a text");
    int64_t cut = (int64_t)((1.0 - val_fraction) * (double)text->bytes);  // the first byte of VAL
    double now = clock_seconds();
    Progress progress = {text->bytes, 0, now, now, isatty(STDERR_FILENO) != 0};
    for (int64_t i = 0; i < text->count; i++)
        write_document(w, &text->list[i], cut, chunk, &progress);
    if (progress.terminal && progress.last > progress.start) fprintf(stderr, "\n");
    free(chunk);
    if (w->tokens[TRAIN] && (val_fraction == 0.0 || w->tokens[VAL])) return;
    discard_shards(w);
    CHECK(false,
          "expected text for both splits, found %lld bytes in all: too few for --val-fraction %g\n"
          "  -> more text, or --val-fraction 0",
          (long long)text->bytes, val_fraction);
}

// Writes the built-in corpus as the trainer reads it (data.h): the first tokens of its first epoch
// of training, and the whole validation text.
static void write_stories(Writer *w, int64_t tokens) {
    const uint64_t default_seed = 1;  // of --seed; every seed has the same validation text
    DataLoader train, val;
    loader_open(&train, "", "train", 1, 0, default_seed);
    loader_open(&val, "", "val", 1, 0, 0);
    for (int64_t i = 0; i < tokens; i++) put_token(w, (unsigned char)train.text[i]);
    begin_validation(w);
    for (int64_t i = 0; i < val.tokens; i++) put_token(w, (unsigned char)val.text[i]);
    loader_close(&train);
    loader_close(&val);
}

// ---- the command line

typedef struct {
    const char *out;
    double val_fraction;            // -1: not given
    int64_t shard_tokens, stories;  // stories: tokens of the built-in corpus; 0: write the files
    Documents documents;
} Options;

// Whether this argument is `--name` or `--name=value`.
static bool is_option(const char *argument, const char *name) {
    size_t length = strlen(name);
    return !strncmp(argument, name, length) && (!argument[length] || argument[length] == '=');
}

// The value of `--name value` or `--name=value` at argv[*i]; NULL if that is another argument.
static const char *option(int argc, char **argv, int *i, const char *name) {
    if (!is_option(argv[*i], name)) return NULL;
    for (int k = 1; k < *i; k++)
        CHECK(!is_option(argv[k], name), "%s is given twice\n  -> give it once", name);
    const char *value = strchr(argv[*i], '=');
    if (value) return value + 1;
    CHECK(*i + 1 < argc, "%s: expected a value, found the end of the line\n  -> ./shard --help",
          name);
    return argv[++*i];
}

// A whole number from 1 to most.
static int64_t parse_count(const char *name, const char *value, int64_t most, const char *example) {
    char *end;
    int64_t count = strtoll(value, &end, 10);
    CHECK(end != value && *end == 0 && count >= 1 && count <= most,
          "%s: expected a whole number from 1 to %lld, found %s\n  -> %s %s", name, (long long)most,
          value, name, example);
    return count;
}

// The part of the text for validation.
static double parse_fraction(const char *value) {
    char *end;
    double fraction = strtod(value, &end);
    CHECK(end != value && *end == 0 && fraction >= 0.0 && fraction < 1.0,
          "--val-fraction: expected a number from 0 to below 1, found %s\n  -> --val-fraction 0.1",
          value);
    return fraction;
}

// Reads and checks the command line. Sizes of all files are known afterwards.
static Options parse(int argc, char **argv) {
    Options o = {.val_fraction = -1.0, .shard_tokens = 100000000};
    const char *value;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0) {
            help();
            exit(0);
        } else if ((value = option(argc, argv, &i, "--out"))) {
            o.out = value;
        } else if ((value = option(argc, argv, &i, "--val-fraction"))) {
            o.val_fraction = parse_fraction(value);
        } else if ((value = option(argc, argv, &i, "--shard-tokens"))) {
            o.shard_tokens = parse_count("--shard-tokens", value, INT32_MAX, "100000000");
        } else if ((value = option(argc, argv, &i, "--stories"))) {
            o.stories = parse_count("--stories", value, CORPUS_TRAIN_TOKENS, "1000000");
        } else {
            CHECK(argv[i][0] != '-',
                  "unknown option %s\n  -> ./shard --help, or ./%s for a file of that name",
                  argv[i], argv[i]);
            add_path(&o.documents, argv[i], true);
        }
    }
    CHECK(o.out && *o.out,
          "expected a folder for the shards, found no --out\n  -> ./shard --out DIR FILE...");
    CHECK(!o.stories || (!o.documents.count && o.val_fraction < 0),
          "--stories: expected no file and no --val-fraction, as the built-in corpus has its own "
          "validation split\n  -> ./shard --out DIR --stories N");
    CHECK(o.stories || o.documents.bytes > 0,
          "expected text, found %lld bytes in the files given\n  -> ./shard --out DIR FILE...",
          (long long)o.documents.bytes);
    return o;
}

// Prints the size of both splits, and the command that trains on them.
static void summarize(const Writer *w, const Options *o) {
    const Documents *text = &o->documents;
    for (int part = TRAIN; part <= VAL; part++)
        printf("%-5s  %lld tokens in %lld shard%s\n", SPLITS[part], (long long)w->tokens[part],
               (long long)w->shards[part], w->shards[part] == 1 ? "" : "s");
    if (o->stories) {
        printf("the built-in corpus, ");
    } else {
        printf("%lld bytes of %lld document%s, ", (long long)text->bytes, (long long)text->count,
               text->count == 1 ? "" : "s");
    }
    // Quotes for a name that the shell would split, and for the pattern that takes the place of a
    // folder without validation shards.
    const char *quote = strpbrk(o->out, " \t()&;*?$\"") || !w->tokens[VAL] ? "'" : "";
    printf("vocabulary %d: a token is a byte, 0 begins a document\n"
           "next: ./train_gpt --data %s%s%s%s --model %s\n",
           CORPUS_VOCAB, quote, o->out, w->tokens[VAL] ? "" : "/*.bin", quote,
           o->stories ? "stories" : "llama-char");
}

int main(int argc, char **argv) {
    check_streams_begin();
    signal(SIGXFSZ, SIG_IGN);  // a file at its size limit is a failed write, as on a full disk
    Options o = parse(argc, argv);
    prepare_folder(o.out);
    Writer *w = check_alloc(sizeof *w, "the buffer of a shard");
    w->dir = o.out;
    w->shard_tokens = o.shard_tokens;
    if (o.stories) write_stories(w, o.stories);
    else write_text(w, &o.documents, o.val_fraction < 0 ? 0.1 : o.val_fraction);
    end_shard(w);
    publish_shards(w);
    summarize(w, &o);
    for (int64_t i = 0; i < o.documents.count; i++) free(o.documents.list[i].path);
    free(o.documents.list);
    free(w);
    check_streams_end();
    return 0;
}
