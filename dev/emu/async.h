// async.h: what the device functions of compute capability 9.0 (sm90.h, compiled with the kernels)
// and the runtime (emu.cpp) tell each other. The runtime keeps queues and barriers; tiles are read
// and written in sm90.h, for the sanitizers.
#pragma once
#include <stddef.h>
#include <stdint.h>

// A tensor map's fields, in the first bytes of the opaque CUtensorMap. This format is the
// emulator's own; the driver's is not documented.
struct EmuMap {
    uint64_t mark, at;                // EMU_MAP_MARK; address of the tensor
    uint64_t stride[4];               // bytes, of dimensions 1, 2, ...
    uint32_t size[5];                 // elements
    uint16_t box[5];
    uint8_t rank, element, swizzle;   // element: bytes of one; swizzle: bytes of the pattern, or 16
};
static const uint64_t EMU_MAP_MARK = 0x70616d20726f736eull;

// A load by TMA under way: it writes its tile when somebody waits for its barrier.
struct EmuLoad {
    uint64_t *barrier;
    unsigned char *tile;
    size_t bytes;
    unsigned char *data;              // swizzled, malloc
    const char *file;
    int line;
};

// A store by TMA under way: it reads its tile when its thread waits.
struct EmuStore {
    EmuMap map;
    const unsigned char *tile;
    int x[5], group;
};

// A wgmma of one lane under way: it reads its tiles when its thread waits.
struct EmuProduct {
    float *d, sums[128];              // sums: D so far, unless a product before it has them
    int width;                        // N
    bool add, chained, in_registers, a_across, b_across;   // across: MAJOR_MN
    uint32_t a[4][4];                 // A's registers of the quad's lanes
    uint64_t a_tile, b_tile;
    int group;
    const char *file;
    int line;
};

uint32_t emu_shared_address(const void *p, const char *file, int line);
unsigned char *emu_shared_at(uint32_t address, size_t bytes, const char *operation,
                             const char *file, int line);
// What TMA and wgmma see at p: shared memory as it was at the last fence_async.
unsigned char *emu_async_view(const void *p);
void emu_async_fence(void);

void emu_mbarrier_init(uint64_t *barrier, int arrivals, const char *file, int line);
void emu_mbarrier_fence(void);
void emu_mbarrier_arrive(uint64_t *barrier, int bytes, const char *file, int line);
// Whether the phase is complete. If not, the caller performs the loads of emu_load_next, calls
// emu_mbarrier_landed for each, and asks again; without any it waits until something happens.
bool emu_mbarrier_done(uint64_t *barrier, int parity, const char *file, int line);
void emu_mbarrier_sleep(uint64_t *barrier, const char *file, int line);
void emu_mbarrier_landed(const EmuLoad &load);
void emu_load_begin(const EmuLoad &load);
bool emu_load_next(const uint64_t *barrier, EmuLoad *load);

void emu_named_barrier(int number, int threads, bool wait, const char *file, int line);

void emu_store_begin(const EmuStore &store);
void emu_store_commit(void);
bool emu_store_next(EmuStore *store);

void emu_product_fence(void);
void emu_product_begin(const EmuProduct &product);
bool emu_product_chained(const float *d, const char *file, int line);
void emu_product_commit(void);
bool emu_product_wrong(void);         // a kernel that is to be wrong
// The oldest product of a group that must be complete; next_of gives its D to a later one.
bool emu_product_next(int groups, EmuProduct *product);
bool emu_product_hand_on(const EmuProduct &product);

void emu_registers(int count, bool take, const char *file, int line);
[[noreturn]] void emu_refuse(const char *help, const char *text, const char *file, int line);
