// log.c: see log.h. Refuses a log.jsonl that is not a plain file. A line that cannot be written (a
// full disk) ends the program with EXIT_WRITE.
#include "log.h"
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include "json.h"

// ----------------------------------------------------------------------------------- the log file

// Moves the lines up to `step`, from which the run resumes, to the front of the old text; returns
// their bytes. Also notes whether that step has its validation and its tasks. The last line is
// dropped if a kill has cut it. A new run (step 0) keeps none.
static size_t keep_lines(Log *log, char *old, size_t n, int64_t step) {
    char *line = old, *kept = old, *end, error[ERROR_CAP];
    for (; step && (end = memchr(line, '\n', old + n - line)); line = end + 1) {
        size_t length = end + 1 - line;
        // A line that does not parse was damaged on the disk: it has no step, and is dropped.
        Json *root = json_try_parse(line, length - 1, error);
        const Json *at = json_get(root, "step");
        bool keep = at && at->kind == JSON_INT && at->integer <= step;
        if (keep && at->integer == step) {
            log->validated |= json_get(root, "val_loss") != NULL;
            log->tasked |= json_get(root, "task_results") != NULL;
        }
        json_free(root);
        if (!keep) continue;
        memmove(kept, line, length);
        kept += length;
    }
    return kept - old;
}

void log_open(Log *log, int folder, const char *path, int64_t step) {
    memset(log, 0, sizeof *log);
    // The file is opened by its name in the open folder, which may be moved meanwhile.
    check_format(log->path, sizeof log->path, "%s", path);
    const char *name = file_name(log->path);
    struct stat info;
    size_t n;
    CHECK(fstatat(folder, name, &info, AT_SYMLINK_NOFOLLOW) || !S_ISLNK(info.st_mode),
          "%s: expected a plain file, found a link\n  -> move it away", path);
    char *old = file_read(path, INT64_MAX, &n);
    CHECK(old || errno == ENOENT, "cannot read %s: %s\n  -> move it away, or another --out", path,
          file_error());
    if (old) {                                    // a new file, renamed: a kill here loses nothing
        file_write_in(folder, path, old, keep_lines(log, old, n, step));
        free(old);
    }
    // O_APPEND: a line goes to the end even if another program has added one.
    log->fd = openat(folder, name, O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0666);
    CHECK_WRITE(log->fd > 0,
                "cannot write %s: %m\n  -> remove or rename it, or another --out", path);
}

// EINVAL: the file system has no fsync.
void log_sync(Log *log) {
    CHECK_WRITE(!log->fd || fsync(log->fd) == 0 || errno == EINVAL,
                "cannot sync %s: %m\n"
                "  -> check the disk for errors; " GO_ON, log->path);
}

void log_close(Log *log) {
    if (log->fd) close(log->fd);
}

// ----------------------------------------------------------------------------------------- a line

// The line is built in memory, so that one write takes it.
void log_begin(Log *log) {
    log->line = text_begin(&log->text, &log->length);
    fputc('{', log->line);
    log->separator = "";
}

// Writes the separator and the key; returns the stream for the value.
static FILE *begin_member(Log *log, const char *key) {
    fputs(log->separator, log->line);
    if (key) {
        json_write_string(log->line, key);
        fputs(": ", log->line);
    }
    log->separator = ", ";
    return log->line;
}

void log_int(Log *log, const char *key, long long value) {
    fprintf(begin_member(log, key), "%lld", value);
}

void log_real(Log *log, const char *key, double value) {
    json_write_number(begin_member(log, key), value);
}

void log_text(Log *log, const char *key, const char *value) {
    json_write_string(begin_member(log, key), value);
}

// As text: readers of JSON may read numbers as doubles, which have 53 bits.
void log_hex(Log *log, const char *key, unsigned long long hash) {
    fprintf(begin_member(log, key), "\"%016llx\"", hash);
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

// Also for other JSON texts, such as state.json (save.c).
char *log_take(Log *log) {
    text_end(log->line, "}\n");
    return log->text;
}

// Usually one write takes the whole line. On a nearly full disk or after a signal the rest follows.
void log_end(Log *log) {
    char *text = log_take(log);
    for (size_t at = 0; log->fd && at < log->length;) {
        ssize_t written = write(log->fd, text + at, log->length - at);
        CHECK_WRITE(written > 0 || errno == EINTR,
                    "cannot write %s: %m\n  -> free space on that disk; " GO_ON, log->path);
        at += written > 0 ? written : 0;
    }
    free(text);
}

const char *log_duration(char buf[32], double seconds) {
    long long s = seconds + 0.5;
    if (s < 3600) return check_format(buf, 32, "%lld:%02lld", s / 60, s % 60);
    return check_format(buf, 32, "%lld:%02lld:%02lld", s / 3600, s / 60 % 60, s % 60);
}
