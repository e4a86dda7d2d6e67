// free_memory.c: see free_memory.h.
#include "free_memory.h"
#include <math.h>
#include <sys/resource.h>
#include <unistd.h>
#include "util.h"

// The number that follows `key` at the start of a line of a file; NAN: there is none.
static double read_number(const char *root, const char *folder, const char *file, const char *key) {
    char path[1024], line[512];
    double value = NAN;
    FILE *f = fopen(check_format(path, sizeof path, "%s%s/%s", root, folder, file), "r");
    while (f && isnan(value) && fgets(line, sizeof line, f))
        if (!strncmp(line, key, strlen(key))) sscanf(line + strlen(key), "%lf", &value);
    if (f) fclose(f);
    return value;
}

// The files of a control group: limit, use, and the parts of the use that are file cache, which
// the system can drop.
typedef struct Names {
    const char *limit, *use, *cache[2];
} Names;

// The least that is left in a control group and in those above it.
static double group_free(const char *root, const char *base, char *group, const Names *names) {
    char folder[1024];
    double least = INFINITY;
    for (char *end = group + strlen(group); end; end = strrchr(group, '/')) {
        *end = 0;
        check_format(folder, sizeof folder, "%s%s", base, group);
        double left = read_number(root, folder, names->limit, "");
        left -= read_number(root, folder, names->use, "");
        for (int i = 0; i < 2; i++) {
            double cache = read_number(root, folder, "memory.stat", names->cache[i]);
            left += isnan(cache) ? 0 : cache;
        }
        if (left < least) least = left;
    }
    return least;
}

// The least that is left in all control groups of this process. /proc/self/cgroup has one line
// each: 0::/group in v2, 5:cpu,memory:/group in v1.
static double groups_free(const char *root) {
    static const Names V1 = {"memory.limit_in_bytes", "memory.usage_in_bytes",
                             {"total_inactive_file ", "total_active_file "}};
    static const Names V2 = {"memory.max", "memory.current", {"inactive_file ", "active_file "}};
    char path[1024], line[1024];
    double least = INFINITY;
    FILE *f = fopen(check_format(path, sizeof path, "%s/proc/self/cgroup", root), "r");
    while (f && fgets(line, sizeof line, f)) {
        char *controllers = strchr(line, ':');
        char *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group) continue;
        *group++ = 0;
        group[strcspn(group, "\n")] = 0;
        bool v1 = strstr(controllers, "memory") != NULL;
        if (!v1 && controllers[1]) continue;      // another controller of v1
        double left = v1 ? group_free(root, "/sys/fs/cgroup/memory", group, &V1)
                         : group_free(root, "/sys/fs/cgroup", group, &V2);
        if (left < least) least = left;
    }
    if (f) fclose(f);
    return least;
}

double free_memory(const char *root, int processes) {
    double available = 1024 * read_number(root, "/proc", "meminfo", "MemAvailable:");
    double groups = groups_free(root);
    double least = (groups < available ? groups : available) / processes;
    struct rlimit space;
    if (getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY) {
        double used = read_number(root, "/proc/self", "statm", "") * sysconf(_SC_PAGESIZE);
        if (space.rlim_cur - used < least) least = space.rlim_cur - used;
    }
    return least < 0 ? 0 : least;
}
