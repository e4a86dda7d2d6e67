// vm.h: what the interpreter (vm.cpp) offers to the CUDA runtime (runtime.cpp) and to Python
// (gpu.py). Memory of the interpreted GPU is memory of the host: both use the same pointers.
#pragma once
#include <cstddef>
#include <cstdint>

struct Dim { uint32_t x, y, z; };

// A tensor map of TMA, in this interpreter's own format: cuTensorMapEncodeTiled of runtime.cpp
// writes it.
struct Map90 {
    enum : uint64_t { MAGIC = 0x3039706d61787470ull };
    uint64_t magic, at, size[5], stride[4];         // elements; bytes, of dimensions 1, 2, ...
    uint32_t box[5];
    uint8_t rank, swizzle;                          // swizzle: bytes, 16 for none
};

// A copy cannot read or write outside of one allocation, so the runtime asks where one ends.
enum { UNWRITTEN, WRITTEN };  // whether a kernel may read new memory before anything writes it

extern "C" {
// A GPU with this many bytes of shared memory for a block. The seed chooses the order of warps and
// blocks, and with `noise` the errors of approximate instructions.
void vm_open(uint64_t seed, int noise, int shared_limit);
int vm_shared_limit(void);

void *vm_alloc(uint64_t size, int written);
void vm_free(void *p);
void vm_written(void *p);                       // all of an allocation counts as written
void vm_written_part(const void *p, uint64_t bytes);
int vm_owns(const void *p, uint64_t bytes);     // the bytes lie inside one allocation
uint64_t vm_allocated(void);                    // bytes in all

// The names of the instructions, by number, until NULL: ptx.py translates names to numbers.
const char *vm_operation(int number);

// Loads a kernel, or replaces the one of this name. rows: [count, ROW], see load_row in vm.cpp.
void vm_kernel(const char *name, const int64_t *rows, int count, const int64_t *constants,
               int constant_count, const int32_t *special, const int32_t *sizes,
               const int32_t *parameters, int parameter_count, const int32_t *many,
               int many_count);
int vm_loaded(const char *name);
int vm_parameters(const char *name, const int32_t **places);   // (offset, bytes) of each
int vm_shared(const char *name);                // bytes of its static shared arrays

void vm_launch(const char *name, Dim grid, Dim block, void **arguments, uint32_t dynamic);

// The message of the launch that failed, "" for none. Further launches do nothing until vm_clear.
const char *vm_error(void);
void vm_clear(void);

int vm_hits(const char *name, uint8_t *hit);    // which instructions have run; returns their number
uint64_t vm_executed(void);                     // instructions of warps so far
}
