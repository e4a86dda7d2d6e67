// checkpoint.c: see checkpoint.h. A save, in order of time:
//
//   remove .tmp-step                   what a kill left
//   .tmp-step/model.safetensors ...    each written as <name>.tmp, synced, renamed
//   .tmp-step/manifest.json            sizes and hashes of the files above
//   remove step_200                    if a damaged one exists
//   rename .tmp-step -> step_200       a kill before this line: step_100 stays the newest
//   sync the run's folder              a kill after it: step_200 is the newest
#include "checkpoint.h"
#include <sys/stat.h>
#include <unistd.h>

static const char TEMP[] = ".tmp-step";  // only one checkpoint is written at a time

// ------------------------------------------------------------------------------------------- names

char *checkpoint_path(char *buf, const char *run_dir, int64_t step) {
    return check_format(buf, PATH_CAP, "%s/step_%08lld", run_dir, (long long)step);
}

// The step in a folder's name; -1: it is not exactly the name of a checkpoint, as checkpoint_path
// writes it. Folders like step_7 and step_00000007x are never touched.
static int64_t step_of(const char *name) {
    char again[64];
    if (strncmp(name, "step_", 5)) return -1;
    long long step = strtoll(name + 5, NULL, 10);
    snprintf(again, sizeof again, "step_%08lld", step);
    return !strcmp(again, name) ? step : -1;
}

// ----------------------------------------------------------------------------------------- writing

// A folder that has the temporary name was left by a kill.
void checkpoint_begin(Checkpoint *c, int run, const char *run_dir, int64_t step) {
    memset(c, 0, sizeof *c);
    c->run = run;
    checkpoint_path(c->path, run_dir, step);
    path_join(c->temp, run_dir, TEMP);
    CHECK_WRITE(folder_remove(run, TEMP),
                "cannot remove what is left of a checkpoint, %s: %m\n  -> remove it by hand",
                c->temp);
    c->folder = folder_make_in(run, c->temp);
}

// A line of the manifest. Names are this program's own and need no escapes.
static void note_file(Checkpoint *c, const char *name, Hash hash) {
    size_t used = strlen(c->manifest);
    unsigned long long bytes = hash.length, sum = hash_end(&hash);
    check_format(c->manifest + used, sizeof c->manifest - used,
                 "%s\"%s\": {\"size\": %llu, \"xxh64\": \"%016llx\"}",
                 used ? ",\n" : "{\n", name, bytes, sum);
}

// The hash is taken of the bytes as they are written, not read back.
void checkpoint_add_tensors(Checkpoint *c, const char *name, const Tensor *tensors, int count) {
    char path[PATH_CAP];
    path_join(path, c->temp, name);
    note_file(c, name, safetensors_write(c->folder, path, tensors, count, &c->bad));
}

static Hash write_text(Checkpoint *c, const char *name, const char *text) {
    char path[PATH_CAP];
    return file_write_in(c->folder, path_join(path, c->temp, name), text, strlen(text));
}

void checkpoint_add_text(Checkpoint *c, const char *name, const char *text) {
    note_file(c, name, write_text(c, name, text));
}

// Called when a file turns out to hold weights or moments that are not finite.
void checkpoint_abandon(Checkpoint *c) {
    close(c->folder);
    folder_remove(c->run, TEMP);
}

// The manifest is written last and every file is on the disk, so a folder with the final name is
// whole. A folder that has this name already is damaged (checkpoint.h): a kill between its removal
// and the rename loses nothing that a resume could use.
void checkpoint_commit(Checkpoint *c) {
    size_t used = strlen(c->manifest);
    check_format(c->manifest + used, sizeof c->manifest - used, "\n}\n");
    write_text(c, "manifest.json", c->manifest);
    close(c->folder);

    const char *plain = file_name(c->path);
    CHECK_WRITE(folder_remove(c->run, plain) && renameat(c->run, TEMP, c->run, plain) == 0,
                "cannot rename %s to %s: %m\n  -> make the run's folder writable (chmod)", c->temp,
                plain);
    folder_sync(c->run, c->path);
}

// ----------------------------------------------------------------------------------------- reading

// Compares a file with its member of the manifest. A hostile name must not lead out of the folder.
static bool verify_file(const char *dir, const Json *entry, char *error) {
    const char *name = entry->key;
    const Json *size = json_get(entry, "size"), *xxh64 = json_get(entry, "xxh64");
    bool plain = *name && *name != '.' && !strchr(name, '/') && strlen(name) < 64;
    bool valid = plain && size && size->kind == JSON_INT && xxh64 && xxh64->kind == JSON_STRING;
    if (!valid)
        return error_set(error, "manifest.json: expected a plain file name, a size and an xxh64, "
                         "found \"%.80s\"", name);

    // The message has both sizes: they tell a truncated file from a changed one.
    char path[PATH_CAP], found[17];
    Hash hash;
    if (!file_hash(path_join(path, dir, name), &hash, NULL))
        return error_set(error, "%s: %s", name, file_error());
    // Compared as text: strtoull would read some damaged digits as the same number.
    check_format(found, sizeof found, "%016llx", (unsigned long long)hash_end(&hash));
    long long bytes = hash.length, wanted = size->integer;
    return (bytes == wanted && !strcmp(found, xxh64->text)) ||
           error_set(error, "%s: expected %lld bytes with checksum %.16s, found %lld with %s",
                     name, wanted, xxh64->text, bytes, found);
}

// A JSON file of a checkpoint, for json_free; NULL with the reason in error.
static Json *read_json(const char *dir, const char *name, char *error) {
    char path[PATH_CAP], why[ERROR_CAP];
    size_t n;
    char *text = file_read(path_join(path, dir, name), JSON_MOST, &n);
    Json *root = text ? json_try_parse(text, n, why) : NULL;
    if (!root) error_set(error, "%s: %s", name, text ? why : file_error());
    free(text);
    return root;
}

// The manifest names every file, so one that is missing is found as well as one that is damaged.
bool checkpoint_verify(const char *dir, char *error) {
    Json *manifest = read_json(dir, "manifest.json", error);
    if (!manifest) return false;
    bool ok = (manifest->kind == JSON_OBJECT && manifest->count > 0) ||
              error_set(error, "manifest.json: expected an object of files");
    for (const Json *entry = manifest->first; ok && entry; entry = entry->next)
        ok = verify_file(dir, entry, error);
    json_free(manifest);
    return ok;
}

// Whether dir is a whole checkpoint of this step.
static bool is_whole(const char *dir, int64_t step, char *error) {
    if (!checkpoint_verify(dir, error)) return false;
    Json *state = read_json(dir, "state.json", error);
    if (!state) return false;
    const Json *at = json_get(state, "step");
    long long stated = at && at->kind == JSON_INT ? at->integer : -1;
    json_free(state);
    return stated == step ||
           error_set(error, "its state.json is of step %lld: the folder was renamed", stated);
}

// A run that does not exist yet has no checkpoint.
int64_t checkpoint_step_below(const char *run_dir, int64_t below) {
    int64_t best = -1;
    DIR *d = opendir(run_dir);
    CHECK(d || errno == ENOENT, "cannot list %s: %m\n  -> make this folder readable (chmod)",
          run_dir);
    if (!d) return -1;
    // Checkpoints are found by their names; none is opened here.
    for (struct dirent *e; (e = readdir(d));) {
        int64_t step = step_of(e->d_name);
        if (step < below && step > best) best = step;
    }
    closedir(d);
    return best;
}

// A checkpoint that disappears while it is read was pruned by a process that trains: a newer one
// exists, and the search begins again.
bool checkpoint_latest(const char *run_dir, char *dir) {
    char error[ERROR_CAP];
    struct stat info;
    bool damaged = false;
    for (int64_t step = INT64_MAX; (step = checkpoint_step_below(run_dir, step)) >= 0;) {
        if (is_whole(checkpoint_path(dir, run_dir, step), step, error)) return true;
        if (lstat(dir, &info) != 0 && errno == ENOENT) {
            step = INT64_MAX;
            continue;
        }
        fprintf(stderr, "warning: passing over the damaged checkpoint %s: %s\n", dir, error);
        damaged = true;
    }
    // A run without checkpoints is new. If all are damaged, the user must decide.
    CHECK(!damaged,
          "every checkpoint in %s is damaged\n"
          "  -> restore one from a copy, or remove them to begin anew",
          run_dir);
    return false;
}

// A checkpoint is first renamed to .tmp-step: a kill leaves none half removed under its final name,
// and the next checkpoint_begin removes the rest.
void checkpoint_prune(int run, const char *run_dir, int64_t newest, int64_t last, int64_t every) {
    char path[PATH_CAP];
    int64_t step = newest + 1, newer = 0;             // checkpoints newer than this one
    for (; last > 0 && (step = checkpoint_step_below(run_dir, step)) >= 0; newer++) {
        if (newer < last || (every && step % every == 0)) continue;
        const char *plain = file_name(checkpoint_path(path, run_dir, step));
        CHECK_WRITE(renameat(run, plain, run, TEMP) == 0 && folder_remove(run, TEMP),
                    "cannot remove %s, now %s/%s: %m\n  -> remove it by hand, or --keep-last 0",
                    path, run_dir, TEMP);
    }
}
