// log.h: log.jsonl, one JSON object a line.
//
// A line reaches the file in one write when it is complete, and the disk with the next checkpoint.
// A kill may cut the last line: log_open drops it, and also the lines of steps that the resumed run
// will repeat. With several processes only process 0 has a file; the others write nothing.
#pragma once
#include "files.h"

typedef struct {
    int fd;                               // 0: no file
    FILE *line;                           // the current line, a stream in memory,
    char *text;                           // its text,
    size_t length;                        // and bytes
    const char *separator;                // before the next member
    bool validated, tasked;               // the validation, the tasks of this step are logged
    char path[PATH_CAP];
} Log;

// step: the step that the run resumes from; 0: a new run. folder: the run's, open. A link at path
// is refused.
void log_open(Log *log, int folder, const char *path, int64_t step);
void log_sync(Log *log);                  // before a checkpoint
void log_close(Log *log);

// A line: log_begin, members, log_end. key is NULL inside an array.
void log_begin(Log *log);
void log_int(Log *log, const char *key, long long value);
void log_real(Log *log, const char *key, double value);               // NaN and infinities: null
void log_text(Log *log, const char *key, const char *value);
void log_hex(Log *log, const char *key, unsigned long long hash);     // 16 hexadecimal digits
void log_nest(Log *log, const char *key, char bracket);               // '{' or '['
void log_unnest(Log *log, char bracket);                              // '}' or ']'
void log_end(Log *log);
char *log_take(Log *log);                 // ends the line, returns its text, which the caller frees

// "3:07" or "1:02:33".
const char *log_duration(char buf[32], double seconds);
