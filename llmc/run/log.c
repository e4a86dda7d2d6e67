// log.c: see log.h. Errors: what is at the path is no plain file, or the line does not reach it
// (EXIT_WRITE, for a full disk); the hint goes on from the last checkpoint.
#include "log.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <sys/stat.h>
#include <unistd.h>
#include "json.h"
#include "util.h"

// ----------------------------------------------------------------------------------- the log file

// Whether a line of the earlier part of the run stays when the run goes on from `step`. Also notes
// the validation and the tasks of that very step.
static bool keep_line(Log *log, const char *line, size_t n, int64_t step) {
    Json *root;
    char error[ERROR_CAP];
    // A line that does not parse was damaged on the disk: the log stays readable without it.
    if (!json_try_parse(line, n, &root, error)) return false;
    const Json *at = json_get(root, "step");
    bool keep = at && at->kind == JSON_INT && at->integer <= step;
    if (keep && at->integer == step) {
        log->validated |= json_get(root, "val_loss") != NULL;
        log->tasked |= json_get(root, "task_results") != NULL;
    }
    json_free(root);
    return keep;
}

// Moves the lines that stay to the front of the old text; returns their bytes. A kill may have cut
// the last line: it has no end, and goes. A new run keeps nothing.
static size_t keep_lines(Log *log, char *old, size_t n, int64_t step) {
    char *line = old, *kept = old, *end;
    while (step && (end = memchr(line, '\n', old + n - line))) {
        size_t length = end + 1 - line;
        if (keep_line(log, line, length - 1, step)) {
            memmove(kept, line, length);
            kept += length;
        }
        line = end + 1;
    }
    return kept - old;
}

void log_open(Log *log, int folder, const char *path, int64_t step) {
    memset(log, 0, sizeof *log);
    // Names below the open folder: the log stays in it, wherever it is moved meanwhile.
    check_format(log->path, sizeof log->path, "%s", path);
    const char *name = file_name(log->path);
    struct stat info;
    size_t n;
    CHECK(fstatat(folder, name, &info, AT_SYMLINK_NOFOLLOW) || !S_ISLNK(info.st_mode),
          "%s is a link, which would lead out of the run\n  -> move it away", path);
    char *old = file_read(path, INT64_MAX, &n);
    CHECK(old || errno == ENOENT, "cannot read %s: %s\n  -> move it away, or another --out", path,
          strerror(errno));
    if (old) {                                    // a new file, renamed: a kill here loses nothing
        file_write_in(folder, path, old, keep_lines(log, old, n, step));
        free(old);
    }
    // O_APPEND: a line lands behind the others even if another program has added one.
    log->fd = openat(folder, name, O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0666);
    CHECK_WRITE(log->fd > 0,
                "cannot write %s: %s\n  -> another --out, or remove what has that name", path,
                strerror(errno));
}

// EINVAL: the file system has no fsync.
void log_sync(Log *log) {
    CHECK_WRITE(!log->fd || fsync(log->fd) == 0 || errno == EINVAL,
                "cannot bring %s to the disk: %s\n"
                "  -> check its disk, then --resume required", log->path, strerror(errno));
}

// Lines are in the file already.
void log_close(Log *log) {
    if (log->fd) close(log->fd);
}

// ----------------------------------------------------------------------------------------- a line

// The line is built in memory, so it can be written at once.
void log_begin(Log *log) {
    log->line = text_begin(&log->text, &log->length, "a line of the log");
    fputc('{', log->line);
    log->separator = "";
}

// Writes what stands before a value; returns where the value goes.
static FILE *begin_member(Log *log, const char *key) {
    fputs(log->separator, log->line);
    if (key) {
        json_write_string(log->line, key);
        fputs(": ", log->line);
    }
    log->separator = ", ";
    return log->line;
}

void log_int(Log *log, const char *key, int64_t value) {
    fprintf(begin_member(log, key), "%" PRId64, value);
}

// NaN and infinity are null, which JSON has.
void log_real(Log *log, const char *key, double value) {
    json_write_number(begin_member(log, key), value);
}

void log_text(Log *log, const char *key, const char *value) {
    json_write_string(begin_member(log, key), value);
}

// As text: a reader of JSON may take numbers for doubles, which have 53 bits.
void log_hex(Log *log, const char *key, uint64_t hash) {
    fprintf(begin_member(log, key), "\"%016" PRIx64 "\"", hash);
}

// The first member of an object or array has no comma before it.
void log_nest(Log *log, const char *key, char bracket) {
    fputc(bracket, begin_member(log, key));
    log->separator = "";
}

// A member or element that follows needs a comma.
void log_unnest(Log *log, char bracket) {
    fputc(bracket, log->line);
    log->separator = ", ";
}

// Also for texts that are no line of the log, such as state.json (save.c).
char *log_take(Log *log) {
    text_end(log->line, "}\n", "a line of the log");
    return log->text;
}

// One write takes the whole line, except near a full disk or under a signal: then the rest follows.
void log_end(Log *log) {
    char *text = log_take(log);
    for (size_t at = 0; log->fd && at < log->length;) {
        ssize_t written = write(log->fd, text + at, log->length - at);
        CHECK_WRITE(written > 0 || errno == EINTR,
                    "cannot write %s: %s\n  -> free space on that disk, then --resume required",
                    log->path, strerror(errno));
        at += written > 0 ? written : 0;
    }
    free(text);
}

// Hours only from one hour on.
const char *log_duration(char *buf, size_t cap, double seconds) {
    long long s = (long long)(seconds + 0.5);
    if (s < 3600) return check_format(buf, cap, "%lld:%02lld", s / 60, s % 60);
    return check_format(buf, cap, "%lld:%02lld:%02lld", s / 3600, s / 60 % 60, s % 60);
}
