// test_shard.c: build/shard turns text into shards from which the text comes back byte for byte,
// splits it where it says, and leaves nothing behind when it refuses. --stories writes the tokens
// that the trainer reads from its built-in corpus.
#include "../../llmc/run/data.h"
#include <sys/stat.h>
#include "test.h"

static void write_text(const char *dir, const char *name, const char *text, size_t length) {
    char path[512];
    FILE *f = fopen(check_format(path, sizeof path, "%s/%s", dir, name), "wb");
    CHECK(f && fwrite(text, 1, length, f) == length && fclose(f) == 0,
          "%s: cannot be written\n  -> run the tests from the root of the repository", path);
}

// Runs build/shard with these arguments, and %s for the folder; its output is in DIR/log.txt
// afterwards. Returns the exit status.
PRINTF_LIKE(2, 3) static int run(const char *dir, const char *fmt, ...) {
    char arguments[1024], command[2048];
    va_list args;
    va_start(args, fmt);
    vsnprintf(arguments, sizeof arguments, fmt, args);
    va_end(args);
    int status = system(check_format(command, sizeof command, "build/shard %s > '%s/log.txt' 2>&1",
                                     arguments, dir));
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static char *read_file(const char *path, size_t *length) {
    FILE *f = fopen(path, "rb");
    char *text = (char *)check_alloc(4 << 20, "a file of a test");
    *length = f ? fread(text, 1, (4 << 20) - 1, f) : 0;
    if (f) fclose(f);
    return text;
}

static bool log_says(const char *dir, const char *words) {
    char path[512];
    size_t n;
    char *text = read_file(check_format(path, sizeof path, "%s/log.txt", dir), &n);
    bool found = strstr(text, words) != NULL;
    if (!found) printf("%s: expected \"%s\", found:\n%s\n", path, words, text);
    free(text);
    return found;
}

static int count_files(const char *dir) {
    DIR *d = opendir(dir);
    int n = 0;
    if (!d) return 0;
    while (readdir(d)) n++;
    closedir(d);
    return n - 2;  // without . and ..
}

// The tokens of one split, read as training reads them: windows of one token give all tokens but
// the last as inputs.
static int64_t read_split(const char *dir, const char *split, char *text) {
    DataLoader d;
    int32_t input = 0, target = 0;
    loader_open(&d, dir, split, 1, 0, 0);
    for (int64_t i = 0; i < d.samples; i++) {
        loader_sample(&d, i, &input, &target);
        text[i] = (char)input;
    }
    text[d.samples] = (char)target;
    int64_t n = d.tokens;
    EXPECT(d.vocab == 256 && d.width == 2, "vocabulary %d, %d bytes per token", d.vocab, d.width);
    loader_close(&d);
    return n;
}

// Expects the split to hold exactly these bytes.
static void expect_split(const char *dir, const char *split, const char *expected, size_t length) {
    char *text = (char *)check_alloc(4 << 20, "a split");
    int64_t n = read_split(dir, split, text);
    EXPECT(n == (int64_t)length && memcmp(text, expected, length) == 0,
           "%s, %s: %lld tokens for %zu, or other ones", dir, split, (long long)n, length);
    free(text);
}
#define EXPECT_SPLIT(dir, split, literal) expect_split(dir, split, literal, sizeof literal - 1)

// One ASCII document of TinyShakespeare's size: nanoGPT trains on its first 1,003,854 characters.
static void test_one_document(void) {
    enum { BYTES = 1115394, CUT = 1003854 };
    const char *dir = test_dir("shard one");
    char *text = (char *)check_alloc(BYTES + 1, "a text"), out[256];
    for (int i = 0; i < BYTES; i++)
        text[1 + i] = (char)(i % 61 == 60 ? '\n' : ' ' + (i * 7 + i / 1000) % 90);
    write_text(dir, "in put.txt", text + 1, BYTES);
    EXPECT(run(dir, "--out '%s/out' '%s/in put.txt'", dir, dir) == 0, "build/shard failed");
    EXPECT(log_says(dir, "1003855 tokens in 1 shard\n") &&
               log_says(dir, "111541 tokens in 1 shard\n"),
           "the summary");
    EXPECT(log_says(dir, "next: ./train_gpt --data 'build/test/shard one/out'"),
           "the next command");
    check_format(out, sizeof out, "%s/out", dir);
    EXPECT(count_files(out) == 2, "%d files in %s", count_files(out), out);
    expect_split(out, "train", text, 1 + CUT);  // text[0] is the separator
    text[CUT] = 0;
    expect_split(out, "val", text + CUT, 1 + BYTES - CUT);

    EXPECT(run(dir, "--out '%s/out' '%s/in put.txt'", dir, dir) == 1 &&
               log_says(dir, "found train_000000.bin\n  -> remove the old *.bin files"),
           "overwriting");
    EXPECT(run(dir, "--out='%s/many' --shard-tokens=100000 '%s/in put.txt'", dir, dir) == 0,
           "build/shard failed");
    check_format(out, sizeof out, "%s/many", dir);
    EXPECT(count_files(out) == 11 + 2, "%d files in %s", count_files(out), out);
    text[CUT] = (char)(' ' + ((CUT - 1) * 7 + (CUT - 1) / 1000) % 90);
    expect_split(out, "train", text, 1 + CUT);
    free(text);
}

static void test_documents(void) {
    const char *dir = test_dir("shard_documents");
    char out[256];
    EXPECT(mkdir("build/test/shard_documents/in", 0777) == 0 &&
               mkdir("build/test/shard_documents/in/b", 0777) == 0,
           "no folder");
    write_text(dir, "in/c", "cccc", 4);  // not in the order of their names
    write_text(dir, "in/b/2", "bb", 2);
    write_text(dir, "in/b/1", "b", 1);
    write_text(dir, "in/a", "aaa", 3);
    write_text(dir, "in/empty", "", 0);
    write_text(dir, "in/.hidden", "\xFF", 1);
    write_text(dir, "last", "zzzzzzzzzz", 10);

    EXPECT(run(dir, "--out %s/1 %s/in %s/last --val-fraction 0.35", dir, dir, dir) == 0,
           "build/shard failed");
    // The cut is at 13 of 20, within the last document.
    check_format(out, sizeof out, "%s/1", dir);
    EXPECT_SPLIT(out, "train", "\0aaa\0b\0bb\0cccc\0zzz");
    EXPECT_SPLIT(out, "val", "\0zzzzzzz");
    EXPECT(log_says(dir, "20 bytes of 5 documents"), "the summary");

    EXPECT(run(dir, "--out %s/2 %s/last %s/in --val-fraction=0.7", dir, dir, dir) == 0,
           "build/shard failed");
    // The cut is at 6 of 20; whole documents follow.
    check_format(out, sizeof out, "%s/2", dir);
    EXPECT_SPLIT(out, "train", "\0zzzzzz");
    EXPECT_SPLIT(out, "val", "\0zzzz\0aaa\0b\0bb\0cccc");

    EXPECT(run(dir, "--out %s/3 %s/in/b/2 %s/in/a %s/in/c %s/in/b/1 --val-fraction 0.5", dir, dir,
               dir, dir, dir) == 0,
           "build/shard failed");
    // The cut is at 5 of 10, between two documents: one separator.
    check_format(out, sizeof out, "%s/3", dir);
    EXPECT_SPLIT(out, "train", "\0bb\0aaa");
    EXPECT_SPLIT(out, "val", "\0cccc\0b");

    EXPECT(run(dir, "--out %s/4 --shard-tokens 1 --val-fraction 0 %s/in/a", dir, dir) == 0,
           "build/shard failed");
    check_format(out, sizeof out, "%s/4", dir);
    EXPECT_SPLIT(out, "train", "\0aaa");
    EXPECT(count_files(out) == 4, "%d files for 4 tokens and no validation", count_files(out));
}

// The cut never parts a character: it moves on to the next one.
static void test_characters(void) {
    // Characters of 1, 1, 2, 3, 4, 1 and 1 bytes: 13 in all.
    static const char text[] = "aa\xC3\xA9\xE2\x82\xAC\xF0\x9F\x8C\xB3zz";
    const char *dir = test_dir("shard_characters");
    char out[256], expected[32];
    write_text(dir, "text", text, 13);
    for (int cut = 1; cut < 12; cut++) {
        static const int moved[] = {0, 1, 2, 4, 4, 7, 7, 7, 11, 11, 11, 11};
        EXPECT(run(dir, "--out %s/%d --val-fraction %.4f %s/text", dir, cut, 1.0 - (cut + 0.5) / 13,
                   dir) == 0,
               "build/shard failed");
        check_format(out, sizeof out, "%s/%d", dir, cut);
        memcpy(expected + 1, text, 13);
        expected[0] = 0;
        expect_split(out, "train", expected, (size_t)moved[cut] + 1);
        expected[moved[cut]] = 0;
        expect_split(out, "val", expected + moved[cut], (size_t)(14 - moved[cut]));
    }

    // The first and the last character of every length, and those beside the surrogates.
    char all[4 * 2048];
    static const char good[] = "\x01\x7F\xC2\x80\xDF\xBF\xE0\xA0\x80\xED\x9F\xBF\xEE\x80\x80\xEF"
                               "\xBF\xBF\xF0\x90\x80\x80\xF4\x8F\xBF\xBF";
    memset(all, 'x', sizeof all);
    memcpy(all, good, sizeof good - 1);
    write_text(dir, "good", all, sizeof all);
    EXPECT(run(dir, "--out %s/good_out %s/good", dir, dir) == 0, "valid characters refused");
}

static void test_refused_text(void) {
    static const struct { const char *bytes; int offset; } bad[] = {
        {"\x80", 0},
        {"\xFF", 0},
        {"\xC0\x80", 0},
        {"\xC1\xBF", 0},
        {"a\xE0\x9F\xBF", 1},
        {"ab\xED\xA0\x80", 2},
        {"\xF0\x8F\xBF\xBF", 0},
        {"\xF4\x90\x80\x80", 0},
        {"\xF5\x80\x80\x80", 0},
        {"abc\xC3(", 3},
        {"a\xE2\x82(", 1},
        {"\xF0\x9F\x8Cz", 0},
        {"abcde\xE2\x82", 5},
    };
    const char *dir = test_dir("shard_refused");
    char words[128], out[256];
    check_format(out, sizeof out, "%s/out", dir);
    write_text(dir, "a_good", "some good text", 14);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        write_text(dir, "bad", bad[i].bytes, strlen(bad[i].bytes));
        EXPECT(run(dir, "--out %s %s/a_good %s/bad --shard-tokens 5", out, dir, dir) == 1,
               "case %zu is accepted", i);
        check_format(words, sizeof words,
                     "shard_refused/bad: expected UTF-8, found an invalid character at offset %d\n",
                     bad[i].offset);
        EXPECT(log_says(dir, words), "case %zu", i);
        EXPECT(log_says(dir, "iconv -f"), "case %zu", i);
        EXPECT(count_files(out) == 0, "case %zu: %d files left behind", i, count_files(out));
    }
    write_text(dir, "bad", "abc\0def", 7);
    EXPECT(run(dir, "--out %s %s/a_good %s/bad", out, dir, dir) == 1 &&
               log_says(dir, "bad: expected text, found a NUL byte at offset 3:"),
           "a NUL byte");
    EXPECT(count_files(out) == 0, "%d files left behind", count_files(out));

    write_text(dir, "rows.parquet", "PAR1\x15\x04\0\0PAR1", 12);
    EXPECT(run(dir, "--out %s %s/rows.parquet", out, dir) == 1, "Parquet is accepted");
    EXPECT(log_says(dir, "rows.parquet: expected text, found Parquet\n"), "Parquet");
    check_format(words, sizeof words, "python3 data/get.py --out %s %s/rows.parquet ", out, dir);
    EXPECT(log_says(dir, words), "what reads it");
    write_text(dir, "rows.parquet", "PAR1 is how a Parquet file begins", 33);
    EXPECT(run(dir, "--out %s/text %s/rows.parquet", dir, dir) == 0, "a text that begins like it");

    char *large = (char *)check_alloc(3 << 20, "a text");  // beyond the first chunk that is read
    memset(large, 'x', 3 << 20);
    large[(2 << 20) + 12345] = (char)0xFE;
    write_text(dir, "bad", large, 3 << 20);
    EXPECT(run(dir, "--out %s %s/bad", out, dir) == 1 && log_says(dir, "at offset 2109497\n"),
           "a late invalid byte");
    free(large);
}

// Every sample of a split, read from shards and from the built-in corpus.
static void compare_stories(const char *dir, const char *split, int64_t tokens) {
    enum { SEQ = 97 };
    DataLoader shards, stories;
    int32_t found[2][SEQ], expected[2][SEQ];
    int wrong = 0;
    loader_open(&shards, dir, split, SEQ, 0, 0);
    loader_open(&stories, "", split, SEQ, 0, 1);
    EXPECT(shards.vocab == stories.vocab, "%s: vocabulary %d, not %d", split, shards.vocab,
           stories.vocab);
    EXPECT(shards.tokens == tokens, "%s: %lld tokens, expected %lld", split,
           (long long)shards.tokens, (long long)tokens);
    for (int64_t i = 0; i < shards.samples; i++) {
        loader_sample(&shards, i, found[0], found[1]);
        loader_sample(&stories, i, expected[0], expected[1]);
        wrong += memcmp(found, expected, sizeof found) != 0;
    }
    EXPECT(wrong == 0, "%s: %d samples are not the trainer's", split, wrong);
    loader_close(&shards);
    loader_close(&stories);
}

static void test_stories_as_shards(void) {
    const char *dir = test_dir("shard_stories");
    char out[256];
    check_format(out, sizeof out, "%s/out", dir);
    EXPECT(run(dir, "--out %s --stories 70000 --shard-tokens 50000", out) == 0,
           "build/shard failed");
    EXPECT(count_files(out) == 2 + 3, "%d files in %s", count_files(out), out);
    EXPECT(log_says(dir, "the built-in corpus, vocabulary 256") &&
               log_says(dir, "next: ./train_gpt --data build/test/shard_stories/out"),
           "the summary");
    compare_stories(out, "train", 70000);
    compare_stories(out, "val", CORPUS_VAL_TOKENS);

    EXPECT(run(dir, "--out %s/all --stories %d", dir, CORPUS_TRAIN_TOKENS) == 0, "a whole epoch");
    compare_stories(check_format(out, sizeof out, "%s/all", dir), "train", CORPUS_TRAIN_TOKENS);
    EXPECT(run(dir, "--out %s/no --stories %d", dir, CORPUS_TRAIN_TOKENS + 1) == 1 &&
               log_says(dir, "--stories: expected a whole number from 1 to 2097153"),
           "more than an epoch");
    EXPECT(run(dir, "--out %s/no --stories 100 README.md", dir) == 1 &&
               log_says(dir, "--stories: expected no file"),
           "stories and a file");
    EXPECT(run(dir, "--out %s/no --stories 100 --val-fraction 0.1", dir) == 1 &&
               log_says(dir, "--stories: expected no file and no --val-fraction"),
           "stories and a fraction");
}

static void test_refused_commands(void) {
    // %s: the folder of the test
    static const struct { const char *arguments, *words, *what; } wrong[] = {
        {"%s/text", "found no --out\n  -> ./shard --out DIR FILE...", "no --out"},
        {"--out %s/out", "expected text, found 0 bytes", "no file"},
        {"--out %s/out %s/empty", "expected text, found 0 bytes", "an empty file"},
        {"--out %s/out %s/missing",
         "missing: expected a text file or a folder, found: No such file", "a missing file"},
        {"--out %s/out /dev/null", "/dev/null: expected a regular file", "a device"},
        {"--out %s/out %s/text --valfraction 0.1", "unknown option --valfraction",
         "an unknown option"},
        {"--out %s/out %s/text --output x", "unknown option --output", "an unknown option"},
        {"%s/text --out", "--out: expected a value", "no value"},
        {"--out %s/out %s/text --val-fraction 1", "found 1\n", "fraction 1"},
        {"--out %s/out %s/text --val-fraction nan", "found nan\n", "fraction nan"},
        {"--out %s/out %s/text --val-fraction 0.1x", "found 0.1x\n", "fraction 0.1x"},
        {"--out %s/out %s/text --shard-tokens 0", "found 0\n", "no tokens per shard"},
        {"--out %s/out %s/text --shard-tokens 1e8", "found 1e8\n", "1e8 tokens per shard"},
        {"--out %s/out %s/short", "expected text for both splits, found 1 bytes",
         "too short a text"},
        {"--out %s/text %s/text", "text: expected a folder for the shards", "a file for a folder"},
        {"--out %s/no/such %s/text", "mkdir -p", "no folder above"},
    };
    const char *dir = test_dir("shard_commands");
    write_text(dir, "text", "some text to shard", 18);
    write_text(dir, "short", "x", 1);
    write_text(dir, "empty", "", 0);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        EXPECT(run(dir, wrong[i].arguments, dir, dir) == 1 && log_says(dir, wrong[i].words), "%s",
               wrong[i].what);
    }
    EXPECT(count_files("build/test/shard_commands/out") == 0, "a wrong command left %d files",
           count_files("build/test/shard_commands/out"));
    EXPECT(run(dir, "--help") == 0 && log_says(dir, "--shard-tokens N"), "--help");
}

// A file-size limit of 4 kB, as on a full disk: status 2, and nothing is left.
static void test_failed_write(void) {
    const char *dir = test_dir("shard_failed_write");
    char text[8000], command[512], out[256];
    memset(text, 'x', sizeof text);
    write_text(dir, "text", text, sizeof text);
    check_format(out, sizeof out, "%s/out", dir);
    int status = system(check_format(
        command, sizeof command,
        "ulimit -f 8 && build/shard --out %s %s/text > %s/log.txt 2>&1", out, dir, dir));
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 2, "status %d of a failed write", status);
    EXPECT(log_says(dir, "expected to write train shards there, found: File too large\n"), "why");
    EXPECT(count_files(out) == 0, "%d files left behind", count_files(out));
}

void test_shard(void) {
    test_one_document();
    test_documents();
    test_characters();
    test_refused_text();
    test_refused_commands();
    test_failed_write();
    test_stories_as_shards();
}
