// log.h: log.jsonl, one JSON object a line; seconds as words.
//
// A line reaches the file in one write when it is whole, and the disk with the next checkpoint. Without a file (fd 0: of several processes one has it) nothing is written. After a kill
// the last line may be cut: log_open drops it, and with it the steps that the resumed run is going to do again. `validated`, `tasked`: the step it goes on from has its validation, its tasks in the log.
#pragma once
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include "files.h"
#include "json.h"

typedef struct { int fd; FILE *line; char *text; size_t length; const char *separator; bool validated, tasked; char path[PATH_CAP]; } Log;

// Whether a line of an earlier part of the run stays when it goes on from `step`; notes the validation and the tasks of that very step.
static inline bool log_keeps(Log *log, const char *line, size_t n, int64_t step) {
    Json *root;
    char error[256];
    if (!json_try_parse(line, n, &root, error)) return false;
    const Json *at = json_get(root, "step");
    bool keep = at && at->kind == JSON_INT && at->integer <= step;
    bool last = keep && at->integer == step;
    log->validated = log->validated || (last && json_get(root, "val_loss"));
    log->tasked = log->tasked || (last && json_get(root, "task_results"));
    json_free(root);
    return keep;
}

// Opens the log of a run that goes on from `step` (0: begins), in the run's folder. A link of that
// name is refused.
static inline void log_open(Log *log, int folder, const char *path, int64_t step) {
    memset(log, 0, sizeof *log);
    check_format(log->path, sizeof log->path, "%s", path);
    size_t n = 0, kept = 0;
    struct stat info;
    bool link =
        fstatat(folder, file_name(path), &info, AT_SYMLINK_NOFOLLOW) == 0 && S_ISLNK(info.st_mode);
    CHECK(!link, "%s is a link, which would lead out of the run\n  -> move it away", path);
    char *old = file_read(path, INT64_MAX, &n);
    CHECK(old || errno == ENOENT, "cannot read %s: %s\n  -> move it away, or another --out", path, strerror(errno));
    for (size_t at = 0; old && at < n;) {
        char *end = (char *)memchr(old + at, '\n', n - at);
        if (!end) break;
        size_t length = (size_t)(end - (old + at)) + 1;
        if (step > 0 && log_keeps(log, old + at, length - 1, step)) { memmove(old + kept, old + at, length); kept += length; }
        at += length;
    }
    if (old) {                                              // written anew under another name: a kill here loses nothing
        file_write_in(folder, path, old, kept);
        free(old);
    }
    log->fd = openat(folder, file_name(path),
                     O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0666);
    CHECK_WRITE(log->fd > 0,
                "cannot write %s: %s\n  -> another --out, or remove what has that name", path,
                strerror(errno));
}

static inline void log_begin(Log *log) {
    log->line = text_begin(&log->text, &log->length, "a line of the log");
    fputc('{', log->line);
    log->separator = "";
}

static inline void log_key(Log *log, const char *key) {
    fputs(log->separator, log->line);
    if (key) json_write_string(log->line, key);
    if (key) fputs(": ", log->line);
    log->separator = ", ";
}

static inline void log_int(Log *log, const char *key, int64_t value) {
    log_key(log, key);
    fprintf(log->line, "%lld", (long long)value);
}

static inline void log_real(Log *log, const char *key, double value) {
    log_key(log, key);
    json_write_number(log->line, value);
}

static inline void log_text(Log *log, const char *key, const char *value) {
    log_key(log, key);
    json_write_string(log->line, value);
}

// Values in brackets: '{' with keys, '[' where the key of each is NULL.
static inline void log_nest(Log *log, const char *key, char bracket) {
    log_key(log, key);
    fputc(bracket, log->line);
    log->separator = "";
}

static inline void log_unnest(Log *log, char bracket) {
    fputc(bracket, log->line);
    log->separator = ", ";
}

// The line by itself, for another file; to be freed.
static inline char *log_take(Log *log) {
    text_end(log->line, "}\n", "a line of the log");
    return log->text;
}

static inline void log_end(Log *log) {
    char *text = log_take(log);
    for (size_t at = 0; log->fd && at < log->length;) {
        ssize_t written = write(log->fd, text + at, log->length - at);
        CHECK_WRITE(written > 0 || errno == EINTR, "cannot write %s: %s\n  -> free space on that disk and continue with --resume required", log->path, strerror(errno));
        at += written > 0 ? (size_t)written : 0;
    }
    free(text);
}

// Before a checkpoint: a run that goes on from there finds the lines up to it.
static inline void log_sync(Log *log) {
    CHECK_WRITE(!log->fd || fsync(log->fd) == 0 || errno == EINVAL, "cannot bring %s to the disk: %s\n  -> check that its disk is sound and continue with --resume required", log->path, strerror(errno));
}

static inline void log_close(Log *log) { if (log->fd) close(log->fd); }

// 3:07, 1:02:33
static inline const char *log_duration(char *buf, size_t cap, double seconds) {
    long long s = (long long)(seconds + 0.5);
    if (s >= 3600) return check_format(buf, cap, "%lld:%02lld:%02lld", s / 3600, s / 60 % 60, s % 60);
    return check_format(buf, cap, "%lld:%02lld", s / 60, s % 60);
}
