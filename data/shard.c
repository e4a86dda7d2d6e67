// shard.c: UTF-8 text -> shards of bytes for training (the format is in data/README.md).
//
//     make shard && ./shard --out DIR FILE...
//
// Every byte of text is a token of a vocabulary of 256, and every file is a document. A document
// begins with the separator, token 0, so text must not contain NUL bytes. Validation is the end of
// the text: all documents in order are one sequence of bytes, cut at (1 - fraction) of it or at the
// first character that begins after that. Both parts begin with a separator. Memory does not grow
// with the text. Shards get their names only when all text has been read and found valid.
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>
#include "../llmc/run/data.h"
#include "../llmc/run/util.h"

enum {
    SEPARATOR = 0,
    TRAIN = 0,
    VAL = 1,
    MAX_PATH = 4096,
    BUFFER_TOKENS = 1 << 16,
    READ_BYTES = 1 << 20
};

static const char *const SPLITS[] = {"train", "val"};

typedef struct {
    char *path;
    int64_t bytes;
} Document;
typedef struct {
    Document *list;
    int64_t count, bytes;
} Documents;

typedef struct {
    const char *dir;
    int64_t shard_tokens;
    int part;                      // TRAIN or VAL: where tokens go now
    int64_t tokens[2], shards[2];  // of each part, so far
    FILE *file;                    // the shard being written, or NULL
    int64_t in_shard;              // its tokens, the buffered ones included
    int buffered;
    uint16_t buffer[BUFFER_TOKENS];
} Writer;

typedef struct {
    int due;
    unsigned char low, high;
} Utf8;  // continuation bytes still due, and the range of the next one

typedef struct {
    int64_t total, done;
    double start, last;
    bool terminal;
} Progress;

static void help(void) {
    printf(
        "usage: ./shard --out DIR FILE...\n\n"
        "Writes UTF-8 text as shards of bytes: DIR/train_000000.bin ..., DIR/val_000000.bin ...\n"
        "FILE may be a folder: all its files, sorted, with those of its folders; hidden files, "
        "empty ones and *.bin are skipped.\n"
        "Every file is a document and begins with the separator, token 0. The end of the text is "
        "the validation split.\n\n"
        "  --out DIR            where the shards go; made when missing\n"
        "  --val-fraction 0.1   part of the text for validation, 0 for none\n"
        "  --shard-tokens N     tokens per shard, 100000000 by default\n"
        "  --help\n\n"
        "then: ./train_gpt --data DIR\n");
}

// ---- the documents: paths and sizes in order

static void add_document(Documents *d, const char *path, int64_t bytes) {
    int64_t n = d->count++;
    if ((n & (n - 1)) == 0) d->list = realloc(d->list, (size_t)(n ? 2 * n : 1) * sizeof(Document));
    CHECK(d->list, "no memory for a list of %lld files\n  -> fewer and larger files", (long long)n);
    d->list[n].path = check_alloc(strlen(path) + 1, "the path of a file");
    strcpy(d->list[n].path, path);
    d->list[n].bytes = bytes;
    d->bytes += bytes;
}

static int visible(const struct dirent *entry) { return entry->d_name[0] != '.'; }

// Within a folder shards are not taken for text.
static int maybe_text(const struct dirent *entry) {
    return visible(entry) && !shard_named(entry->d_name);
}

static void add_path(Documents *d, const char *path, bool named) {
    struct stat info;
    CHECK(stat(path, &info) == 0,
          "%s: expected a text file or a folder, found: %s\n  -> check the path", path,
          strerror(errno));
    if (S_ISDIR(info.st_mode)) {
        struct dirent **entries;
        int n = scandir(path, &entries, maybe_text, shard_order);
        CHECK(n >= 0,
              "%s: expected a folder of text, found that it cannot be read: %s\n  -> check its "
              "permissions",
              path, strerror(errno));
        char *inside = check_alloc(
            MAX_PATH, "the path of a file");  // not on the stack: folders may lie two thousand deep
        for (int i = 0; i < n; i++) {
            add_path(d, check_format(inside, MAX_PATH, "%s/%s", path, entries[i]->d_name), false);
            free(entries[i]);
        }
        free(inside);
        free(entries);
    } else if (S_ISREG(info.st_mode)) {
        if (info.st_size > 0) add_document(d, path, info.st_size);
    } else {  // sockets and pipes within a folder are no text; one asked for by name is a mistake
        CHECK(!named,
              "%s: expected a regular file, found a pipe or device: the size must be known before "
              "the split\n  -> write the text to a file first",
              path);
    }
}

// ---- the shards: written under hidden names, renamed together at the end

static char *shard_name(const Writer *w, char *path, int part, int64_t number, bool final) {
    return check_format(path, MAX_PATH, "%s/%s%s_%06lld.bin%s", w->dir, final ? "" : ".",
                        SPLITS[part], (long long)number, final ? "" : ".tmp");
}

static void discard_shards(Writer *w) {
    char path[MAX_PATH];
    if (w->file) fclose(w->file);
    for (int part = TRAIN; part <= VAL; part++) {
        for (int64_t i = 0; i < w->shards[part]; i++) remove(shard_name(w, path, part, i, false));
    }
}

static void check_write(Writer *w, bool ok) {
    if (ok) return;
    int error = errno;
    discard_shards(w);
    CHECK(
        false,
        "%s: expected to write %s shards there, found: %s\n  -> free disk space, or another --out",
        w->dir, SPLITS[w->part], strerror(error));
}

static void flush_tokens(Writer *w) {
    check_write(w, fwrite(w->buffer, sizeof *w->buffer, (size_t)w->buffered, w->file) ==
                       (size_t)w->buffered);
    w->buffered = 0;
}

static void begin_shard(Writer *w) {
    char path[MAX_PATH];
    int32_t header[SHARD_HEADER_BYTES / 4] = {
        0};  // filled in by end_shard: an unfinished shard is not a valid one
    w->file = fopen(shard_name(w, path, w->part, w->shards[w->part], false), "wb");
    check_write(w, w->file);
    w->shards[w->part]++;
    w->in_shard = 0;
    check_write(w, fwrite(header, sizeof header, 1, w->file) == 1);
}

static void end_shard(Writer *w) {
    if (!w->file) return;
    int32_t header[SHARD_HEADER_BYTES / 4] = {0};
    header[SHARD_MAGIC] = SHARD_MAGIC_16;
    header[SHARD_VERSION] = SHARD_VERSION_16;
    header[SHARD_TOKENS] = (int32_t)w->in_shard;
    header[SHARD_VOCAB] = CORPUS_VOCAB;
    flush_tokens(w);
    check_write(w, fseek(w->file, 0, SEEK_SET) == 0 &&
                       fwrite(header, sizeof header, 1, w->file) == 1 && fflush(w->file) == 0 &&
                       fsync(fileno(w->file)) == 0);
    FILE *file = w->file;
    w->file = NULL;
    check_write(w, fclose(file) == 0);
}

static void put_token(Writer *w, unsigned char token) {
    if (!w->file) begin_shard(w);
    w->buffer[w->buffered++] = token;
    w->in_shard++;
    w->tokens[w->part]++;
    if (w->buffered == BUFFER_TOKENS) flush_tokens(w);
    if (w->in_shard == w->shard_tokens) end_shard(w);
}

static void begin_validation(Writer *w) {
    end_shard(w);
    w->part = VAL;
}

static void publish_shards(Writer *w) {
    char from[MAX_PATH], to[MAX_PATH];
    for (int part = TRAIN; part <= VAL; part++) {
        for (int64_t i = 0; i < w->shards[part]; i++) {
            check_write(w, rename(shard_name(w, from, part, i, false),
                                  shard_name(w, to, part, i, true)) == 0);
        }
    }
    int dir = open(w->dir, O_RDONLY);  // the names are on disk only when the folder is
    check_write(w, dir >= 0 && fsync(dir) == 0);
    close(dir);
}

static void prepare_folder(const char *dir) {
    CHECK(mkdir(dir, 0777) == 0 || errno == EEXIST,
          "%s: expected to make this folder, found: %s\n  -> mkdir -p the folder above it, or "
          "another --out",
          dir, strerror(errno));
    struct dirent **entries;
    int n = scandir(dir, &entries, visible, shard_order);
    CHECK(n >= 0, "%s: expected a folder for the shards, found: %s\n  -> another --out", dir,
          strerror(errno));
    for (int i = 0; i < n;
         i++) {  // any .bin file: training would read old and new ones as one text
        CHECK(!shard_named(entries[i]->d_name),
              "%s: expected a folder without shards, found %s\n  -> remove the old *.bin files, or "
              "another --out",
              dir, entries[i]->d_name);
        free(entries[i]);
    }
    free(entries);
}

// ---- the text

// Takes the next byte of text; false where it cannot be valid. The range of a character's second
// byte excludes overlong forms (E0, F0), surrogates (ED) and what lies beyond U+10FFFF (F4): RFC
// 3629, section 4.
static bool utf8_next(Utf8 *u, unsigned char c) {
    if (u->due) {
        bool ok = c >= u->low && c <= u->high;
        u->due--;
        u->low = 0x80;
        u->high = 0xBF;
        return ok;
    }
    u->due = c < 0x80 ? 0 : c < 0xE0 ? 1 : c < 0xF0 ? 2 : 3;
    u->low = c == 0xE0 ? 0xA0 : c == 0xF0 ? 0x90 : 0x80;
    u->high = c == 0xED ? 0x9F : c == 0xF4 ? 0x8F : 0xBF;
    return c < 0x80 || (c >= 0xC2 && c <= 0xF4);
}

// One line a second that overwrites itself on a terminal; in a log file one line every ten seconds.
static void show_progress(Progress *p) {
    double now = clock_seconds();
    if (now - p->last < (p->terminal ? 1.0 : 10.0)) return;
    p->last = now;
    double rate = (double)p->done / (now - p->start);
    fprintf(stderr, "%lld of %lld MB, %.0f MB/s, %.0f s to go%s", (long long)(p->done / 1000000),
            (long long)(p->total / 1000000), rate * 1e-6, (double)(p->total - p->done) / rate,
            p->terminal ? "   \r" : "\n");
}

static void refuse_text(Writer *w, const char *path, int64_t offset, bool nul) {
    discard_shards(w);
    char magic[4] = {0};
    FILE *in = fopen(path, "rb");
    bool parquet = in && fread(magic, 1, 4, in) == 4 && !memcmp(magic, "PAR1", 4);
    if (in) fclose(in);
    CHECK(!parquet,
          "%s: expected text, found Parquet\n"
          "  -> python3 data/get.py --out %s %s reads its column text, as GPT-2's tokens",
          path, w->dir, path);
    CHECK(!nul,
          "%s: expected text, found a NUL byte at offset %lld: token 0 separates documents\n"
          "  -> remove it (tr -d '\\000' < FILE > NEW), or convert UTF-16 (iconv -f UTF-16 -t "
          "UTF-8 FILE > NEW), or leave this file out",
          path, (long long)offset);
    CHECK(false,
          "%s: expected UTF-8, found an invalid character at offset %lld\n"
          "  -> convert it (iconv -f ISO-8859-1 -t UTF-8 FILE > NEW, with its real encoding), or "
          "leave this file out",
          path, (long long)offset);
}

// Writes one document. `cut` is the byte of the whole text, counted over all documents, where
// validation begins.
static void write_document(Writer *w, const Document *doc, int64_t cut, unsigned char *chunk,
                           Progress *p) {
    FILE *in = fopen(doc->path, "rb");
    if (!in) discard_shards(w);
    CHECK(in,
          "%s: expected a text file, found that it cannot be opened: %s\n  -> check its "
          "permissions, or leave it out",
          doc->path, strerror(errno));
    int64_t before = p->done, at = 0, character = 0;
    Utf8 state = {0, 0, 0};
    if (w->part == TRAIN && before >= cut) begin_validation(w);
    put_token(w, SEPARATOR);
    for (size_t n; (n = fread(chunk, 1, READ_BYTES, in)) > 0;) {
        for (size_t i = 0; i < n; i++, at++) {
            if (state.due == 0) {  // only between characters may the text be cut
                character = at;
                if (w->part == TRAIN && before + at >= cut) {
                    begin_validation(w);
                    put_token(w, SEPARATOR);
                }
            }
            if (chunk[i] == SEPARATOR) refuse_text(w, doc->path, at, true);
            if (!utf8_next(&state, chunk[i])) refuse_text(w, doc->path, character, false);
            put_token(w, chunk[i]);
        }
        p->done = before + at;
        show_progress(p);
    }
    fclose(in);
    if (at != doc->bytes) discard_shards(w);
    CHECK(at == doc->bytes,
          "%s: expected %lld bytes as at the start, found %lld\n  -> run again when nothing writes "
          "to this file",
          doc->path, (long long)doc->bytes, (long long)at);
    if (state.due) refuse_text(w, doc->path, character, false);
}

// ---- the command line

typedef struct {
    const char *out;
    double val_fraction;
    int64_t shard_tokens;
    Documents documents;
} Options;

// Is this argument `--name` or `--name=value`?
static bool is_option(const char *argument, const char *name) {
    size_t length = strlen(name);
    return strncmp(argument, name, length) == 0 &&
           (argument[length] == 0 || argument[length] == '=');
}

// The value of `--name value` or `--name=value` at argv[*i], or NULL where that is another
// argument.
static const char *option(int argc, char **argv, int *i, const char *name) {
    size_t length = strlen(name);
    if (!is_option(argv[*i], name)) return NULL;
    for (int k = 1; k < *i; k++)
        CHECK(!is_option(argv[k], name), "%s is given twice\n  -> give it once", name);
    if (argv[*i][length] == '=') return argv[*i] + length + 1;
    CHECK(*i + 1 < argc, "%s: expected a value, found the end of the line\n  -> ./shard --help",
          name);
    return argv[++*i];
}

static Options parse(int argc, char **argv) {
    Options o = {NULL, 0.1, 100000000, {NULL, 0, 0}};
    const char *value;
    char *end;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0) {
            help();
            exit(0);
        } else if ((value = option(argc, argv, &i, "--out"))) {
            o.out = value;
        } else if ((value = option(argc, argv, &i, "--val-fraction"))) {
            o.val_fraction = strtod(value, &end);
            CHECK(end != value && *end == 0 && o.val_fraction >= 0.0 && o.val_fraction < 1.0,
                  "--val-fraction: expected a number from 0 to below 1, found %s\n  -> "
                  "--val-fraction 0.1",
                  value);
        } else if ((value = option(argc, argv, &i, "--shard-tokens"))) {
            o.shard_tokens = strtoll(value, &end, 10);
            CHECK(end != value && *end == 0 && o.shard_tokens >= 1 && o.shard_tokens <= INT32_MAX,
                  "--shard-tokens: expected a whole number from 1 to %d, found %s\n  -> "
                  "--shard-tokens 100000000",
                  INT32_MAX, value);
        } else {
            CHECK(argv[i][0] != '-',
                  "unknown option %s\n  -> ./shard --help, or ./%s for a file of that name",
                  argv[i], argv[i]);
            add_path(&o.documents, argv[i], true);
        }
    }
    CHECK(o.out && *o.out,
          "expected a folder for the shards, found no --out\n  -> ./shard --out DIR FILE...");
    CHECK(o.documents.bytes > 0,
          "expected text, found %lld bytes in the files given\n  -> ./shard --out DIR FILE...",
          (long long)o.documents.bytes);
    return o;
}

int main(int argc, char **argv) {
    check_streams_begin();
    signal(SIGXFSZ, SIG_IGN);  // a file at its size limit is a failed write, as on a full disk
    Options o = parse(argc, argv);
    Documents *text = &o.documents;
    prepare_folder(o.out);
    Writer *w = check_alloc(sizeof *w, "the buffer of a shard");
    unsigned char *chunk = check_alloc(READ_BYTES, "the buffer of a text");
    w->dir = o.out;
    w->shard_tokens = o.shard_tokens;
    int64_t cut = (int64_t)((1.0 - o.val_fraction) * (double)text->bytes);

    double now = clock_seconds();
    Progress progress = {text->bytes, 0, now, now, isatty(STDERR_FILENO) != 0};
    for (int64_t i = 0; i < text->count; i++)
        write_document(w, &text->list[i], cut, chunk, &progress);
    end_shard(w);
    if (progress.terminal && progress.last > progress.start) fprintf(stderr, "\n");
    if (!w->tokens[TRAIN] || (o.val_fraction > 0.0 && !w->tokens[VAL])) {
        discard_shards(w);
        CHECK(false,
              "expected text for both splits, found %lld bytes in all: too few for --val-fraction "
              "%g\n  -> more text, or --val-fraction 0",
              (long long)text->bytes, o.val_fraction);
    }
    publish_shards(w);

    for (int part = TRAIN; part <= VAL; part++) {
        printf("%-5s  %lld tokens in %lld shard%s\n", SPLITS[part], (long long)w->tokens[part],
               (long long)w->shards[part], w->shards[part] == 1 ? "" : "s");
    }
    const char *quote = strpbrk(o.out, " \t()&;*?$\"") || !w->tokens[VAL] ? "'" : "";
    printf("%lld bytes of %lld document%s, vocabulary %d: a token is a byte, 0 begins a "
           "document\nnext: ./train_gpt --data %s%s%s%s --model llama-char\n",
           (long long)text->bytes, (long long)text->count, text->count == 1 ? "" : "s",
           CORPUS_VOCAB, quote, o.out, w->tokens[VAL] ? "" : "/*.bin", quote);
    for (int64_t i = 0; i < text->count; i++) free(text->list[i].path);
    free(text->list);
    free(chunk);
    free(w);
    check_streams_end();
    return 0;
}
