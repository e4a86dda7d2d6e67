// free_memory.h: how many bytes of memory this process can still take, on Linux: its part of those that
// the system calls available, within the limits of its control groups (cgroups v1 and v2), and
// within its address space (ulimit -v). NAN elsewhere.
#pragma once
#include <math.h>
#include <sys/resource.h>
#include <unistd.h>
#include "util.h"

// The number that follows `key` at the beginning of a line of a file; NAN: there is none.
static inline double room_number(const char *root, const char *file, const char *key) {
    char path[1024], line[512];
    double value = NAN;
    FILE *f = fopen(check_format(path, sizeof path, "%s%s", root, file), "r");
    while (f && isnan(value) && fgets(line, sizeof line, f))
        if (!strncmp(line, key, strlen(key))) sscanf(line + strlen(key), "%lf", &value);
    if (f) fclose(f);
    return value;
}

// The least that is left in a control group and those above it: its limit (names[0]), less what is
// in use (names[1]), but for file cache that can go (names[2], names[3]).
static inline double room_group(const char *root, const char *base, char *group,
                                const char *const names[4]) {
    char path[1024];
    double least = INFINITY;
    for (char *end = group + strlen(group); end; end = strrchr(group, '/')) {
        double value[4];
        *end = 0;
        for (int i = 0; i < 4; i++) {
            const char *file = i < 2 ? names[i] : "memory.stat";
            check_format(path, sizeof path, "%s%s/%s", base, group, file);
            value[i] = room_number(root, path, i < 2 ? "" : names[i]);
        }
        double left = value[0] - value[1];
        for (int i = 2; i < 4; i++) left += isnan(value[i]) ? 0 : value[i];
        if (left < least) least = left;
    }
    return least;
}

// processes: so many share the machine. root: "", or where a test has put its own /proc and /sys.
static inline double room_free(const char *root, int processes) {
    static const char *const NAMES[2][4] = {
        {"memory.max", "memory.current", "inactive_file ", "active_file "},
        {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ",
         "total_active_file "}};
    char path[1024], line[1024];
    double room = 1024 * room_number(root, "/proc/meminfo", "MemAvailable:"), left;
    FILE *f = fopen(check_format(path, sizeof path, "%s/proc/self/cgroup", root), "r");
    while (f && fgets(line, sizeof line, f)) {             // 0::/group, of v1 5:cpu,memory:/group
        char *controllers = strchr(line, ':');
        char *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group) continue;
        *group++ = 0;
        group[strcspn(group, "\n")] = 0;
        bool v1 = strstr(controllers, "memory") != NULL;
        if (!v1 && controllers[1]) continue;
        left = room_group(root, v1 ? "/sys/fs/cgroup/memory" : "/sys/fs/cgroup", group, NAMES[v1]);
        if (left < room) room = left;
    }
    if (f) fclose(f);
    room /= processes;
    struct rlimit space;
    if (getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY) {
        left = (double)space.rlim_cur
               - room_number(root, "/proc/self/statm", "") * (double)sysconf(_SC_PAGESIZE);
        if (left < room) room = left;
    }
    return room < 0 ? 0 : room;
}
