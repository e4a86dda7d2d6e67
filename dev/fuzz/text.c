// text.c: any bytes as text for ./shard. It accepts exactly the UTF-8 without NUL, writes every
// byte, and leaves nothing behind when it refuses. The first three bytes: part for validation,
// tokens per shard, length of the first of two documents.
#include "fuzz.h"
#define main shard_main
#include "../../data/shard.c"
#undef main
#include "../../llmc/run/json.h"

enum { LEAST_SHARD = 8, LONGEST = 600 };  // longer texts take time and reach nothing new

typedef struct {
    size_t tokens, separators, bytes;
    int files;
    const uint8_t *text;
    size_t size;
} Seen;

static void run_shard(const uint8_t *data, size_t size) {
    char out[FUZZ_PATH], first[FUZZ_PATH], second[FUZZ_PATH], fraction[32], tokens[32];
    size_t cut = data[2] < size - 3 ? data[2] : size - 3;
    fuzz_path(out, "out");
    fuzz_file(first, "1.txt", data + 3, cut);
    fuzz_file(second, "2.txt", data + 3 + cut, size - 3 - cut);
    snprintf(fraction, sizeof fraction, "%.3f", data[0] / 256.0);
    snprintf(tokens, sizeof tokens, "%d", LEAST_SHARD + data[1]);
    char *argv[] = {"./shard",        "--out", out,   "--val-fraction", fraction,
                    "--shard-tokens", tokens,  first, second,           NULL};
    must(shard_main(9, argv) == 0);
}

// One shard of the output: its tokens are the text's bytes, in order, and separators.
static void see_shard(Seen *seen, const char *path) {
    FILE *f = fopen(path, "rb");
    uint16_t tokens[SHARD_HEADER_BYTES / 2 + LEAST_SHARD + 256];
    size_t n = fread(tokens, 2, sizeof tokens / 2, f);
    fclose(f);
    seen->files++;
    for (size_t i = SHARD_HEADER_BYTES / 2; i < n; i++) {
        if (tokens[i] == SEPARATOR) {
            seen->separators++;
            continue;
        }
        must(seen->bytes < seen->size && tokens[i] == seen->text[seen->bytes]);
        seen->bytes++;
    }
}

static void see_folder(Seen *seen) {
    char out[FUZZ_PATH], path[FUZZ_PATH];
    struct dirent **entries;
    int n = scandir(fuzz_path(out, "out"), &entries, NULL, alphasort);
    for (int i = 0; i < n; i++) {
        bool dots = strcmp(entries[i]->d_name, ".") == 0 || strcmp(entries[i]->d_name, "..") == 0;
        check_format(path, sizeof path, "%s/%s", out, entries[i]->d_name);
        if (!dots) {
            see_shard(seen, path);
            remove(path);
        }
        free(entries[i]);
    }
    if (n >= 0) free(entries);
}

static bool valid_text(const uint8_t *text, size_t n) {
    for (size_t at = 0, length; at < n; at += length) {
        length = utf8_length((const char *)text + at, n - at);
        if (!length || !text[at]) return false;
    }
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 3 || size > LONGEST) return 0;
    size_t bytes = size - 3, cut = data[2] < bytes ? data[2] : bytes;
    bool valid = valid_text(data + 3, cut) && valid_text(data + 3 + cut, bytes - cut);
    Seen seen = {0, 0, 0, 0, data + 3, bytes};
    bool accepted = fuzz_once(run_shard, data, size, false);
    see_folder(&seen);
    if (accepted) {
        size_t documents = (cut > 0) + (bytes > cut);
        must(valid && seen.bytes == bytes && seen.separators >= documents &&
             seen.separators <= documents + 1);
    } else {
        must(seen.files == 0 && (!valid || !bytes || data[0]));
    }
    return 0;
}
