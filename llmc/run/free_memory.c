// free_memory.c: see free_memory.h. Numbers come from text files of Linux:
//   /proc/meminfo       MemAvailable: 16003968 kB      what can be taken without swapping
//   /proc/self/cgroup   0::/group in v2, 5:cpu,memory:/group in v1: this process's control groups
//   /proc/self/statm    2508 1080 ...                  address space, in pages
// The number of a missing file is NAN, which comparisons and fmin pass over: it limits nothing.
#include "free_memory.h"
#include <math.h>
#include <sys/resource.h>
#include <unistd.h>
#include "util.h"

static FILE *open_file(const char *root, const char *folder, const char *file) {
    char path[1024];
    return fopen(check_format(path, sizeof path, "%s%s/%s", root, folder, file), "r");
}

// The number that follows `key` at the start of a line of a file; NAN: there is none.
static double read_number(const char *root, const char *folder, const char *file, const char *key) {
    char line[512];
    double value = NAN;
    FILE *f = open_file(root, folder, file);
    // The first match counts: keys stand at the start of their line.
    while (f && isnan(value) && fgets(line, sizeof line, f))
        if (!strncmp(line, key, strlen(key))) sscanf(line + strlen(key), "%lf", &value);
    if (f) fclose(f);
    return value;
}

// The folder and the files of control groups: limit, use, and the parts of the use that are file
// cache, which the system can drop.
typedef struct Names {
    const char *base, *limit, *use, *cache[2];
} Names;
static const Names V1 = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                         {"total_inactive_file ", "total_active_file "}};
static const Names V2 = {"/sys/fs/cgroup", "memory.max", "memory.current",
                         {"inactive_file ", "active_file "}};

// The least that is left in a control group and in those above it: a limit holds for all below.
static double group_free(const char *root, char *group, const Names *names) {
    char folder[1024];
    double least = INFINITY;
    for (char *end = group + strlen(group); end; end = strrchr(group, '/')) {
        *end = 0;
        check_format(folder, sizeof folder, "%s%s", names->base, group);
        double left = read_number(root, folder, names->limit, "");
        left -= read_number(root, folder, names->use, "");
        for (int i = 0; i < 2; i++) {
            double cache = read_number(root, folder, "memory.stat", names->cache[i]);
            left += isnan(cache) ? 0 : cache;
        }
        least = fmin(least, left);
    }
    return least;
}

// The least that is left in all control groups of this process. v1 has a line for each controller,
// v2 one line in all, whose list of controllers is empty.
static double groups_free(const char *root) {
    char line[1024];
    double least = INFINITY;
    FILE *f = open_file(root, "/proc/self", "cgroup");
    while (f && fgets(line, sizeof line, f)) {
        char *controllers = strchr(line, ':');
        char *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group) continue;
        *group++ = 0;
        group[strcspn(group, "\n")] = 0;
        if (strstr(controllers, "memory")) least = fmin(least, group_free(root, group, &V1));
        else if (!controllers[1]) least = fmin(least, group_free(root, group, &V2));
    }
    if (f) fclose(f);
    return least;
}

double free_memory(const char *root, int processes) {
    double available = 1024 * read_number(root, "/proc", "meminfo", "MemAvailable:");
    double groups = groups_free(root);
    // NAN without MemAvailable.
    double least = (groups < available ? groups : available) / processes;
    // ulimit -v counts address space, which is more than the memory in use: the limit is strict.
    struct rlimit space;
    if (getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY) {
        double used = read_number(root, "/proc/self", "statm", "") * sysconf(_SC_PAGESIZE);
        least = fmin(least, space.rlim_cur - used);
    }
    return least < 0 ? 0 : least;
}
