// files.h: files that survive a kill at any instant, and folders held open.
//
// A file is written under a temporary name, synced to the disk (fsync) and then renamed. So its
// name always leads to all of the old content or all of the new. Functions that take an open folder
// and a path work in the folder and use the path for messages; the file's name is the last part of
// the path. A folder that is renamed while it is open still receives the files written into it.
#pragma once
#include <dirent.h>
#include "../rand.h"
#include "util.h"

#define PATH_CAP 1024

bool file_exists(const char *path);
bool is_folder(const char *path);

char *path_join(char *path, const char *folder, const char *name);    // "folder/name"
char *file_parent(char *dir, const char *path);  // the path of the folder that a file is in
const char *file_name(const char *path);         // the last part of a path

// Opens a regular file for reading; -1 with errno set. Refuses folders (EISDIR), and pipes and
// devices (ENOTSUP): a pipe may never begin, a device may never end.
int file_open(const char *path, int64_t *size);
const char *file_error(void);  // errno in words, after one of the functions that read

// Reads up to `bytes` bytes at `offset`; fewer only at the end of the file. -1 with errno set.
int64_t file_read_at(int fd, void *out, int64_t bytes, int64_t offset);

// The bytes of a regular file and a zero after them, for the caller to free; NULL with errno set.
// Refuses files of more than `most` bytes (EFBIG) before it takes memory.
char *file_read(const char *path, int64_t most, size_t *n);

// XXH64 of a regular file, and its length; false with errno set when it cannot be read. done: NULL,
// or counts the bytes hashed so far, for another thread to read.
bool file_hash(const char *path, Hash *hash, _Atomic int64_t *done);

// A file that is being written as <path>.tmp.
typedef struct {
    int folder, fd;  // folder: of the caller, who closes it after file_commit
    char path[PATH_CAP], temp[PATH_CAP];
    Hash hash;  // of what was added, with its length
} FileWriter;

// A .tmp that a kill left, or a link of that name, is removed and never written through.
void file_begin(FileWriter *w, int folder, const char *path);
void file_add(FileWriter *w, const void *data, size_t n);
Hash file_commit(FileWriter *w);

// A whole file at once: it holds what it held before or all of the data, whatever happens.
Hash file_write_in(int folder, const char *path, const void *data, size_t n);

int folder_open(const char *path);

// Makes the folder `path`, whose parent is open, and opens it. Whatever has that name already is
// refused: a link would lead out of the run. The caller syncs the parent.
int folder_make_in(int parent, const char *path);

// Makes a folder and those above it, and syncs their names to the disk. false with errno set when
// the folder exists (EEXIST) or cannot be made.
bool folder_make(const char *path);

// Removes the file, link or folder of plain files called `name`; true also if there is none. Links
// are never followed.
bool folder_remove(int folder, const char *name);

// Syncs the names in a folder to the disk; path: a file in it, for the message.
void folder_sync(int folder, const char *path);
