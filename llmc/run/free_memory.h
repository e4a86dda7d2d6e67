// free_memory.h: how much memory this process can still take, on Linux.
#pragma once

// Bytes: this process's share of the memory that Linux reports as available, within the limits of
// its control groups (cgroups v1 and v2) and of its address space (ulimit -v). NAN elsewhere.
// root: "", or a folder with a test's own /proc and /sys. processes: those that share the machine.
double free_memory(const char *root, int processes);
