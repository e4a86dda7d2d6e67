// sm90.h: the device functions of sm90.cuh for the emulator. Tiles, descriptors and tensor maps are
// read in the hardware's format, or by their fields: NVIDIA's "PTX ISA", "Asynchronous Warpgroup
// Level Matrix Shared Memory Layout", "Matrix Descriptor" and "Tensor Map"; CUTLASS
// (cute/atom/mma_traits_sm90_gmma.hpp) names the same layouts.
//
// Whatever the hardware does in the background happens as late as it may:
//   - a load by TMA leaves NaN in its tile, until somebody waits for its mbarrier;
//   - a store by TMA reads its tile when its thread waits for it;
//   - a product leaves NaN in D, and reads its tiles when its thread waits for it.
// So what nobody waits for is wrong, and what comes too early destroys a tile in use. TMA and wgmma
// see shared memory as it was at the block's last fence_async. ThreadSanitizer sees a load write
// its tile twice, by the thread that begins it and by the first that waits; a product read its
// tiles, by its thread when it waits; and only barriers order anything.
#pragma once
#include "async.h"

void *emu_shared_tiles(void);
#define SHARED_TILES(name) unsigned char *name = static_cast<unsigned char *>(emu_shared_tiles())

static inline uint32_t shared_address(const void *p, EMU_SITE) {
    return emu_shared_address(p, file, line);
}

// Where a swizzle of `width` bytes puts the byte at an address: 16-byte pieces change places by the
// number of their 128 bytes. width 16: none.
static inline uint32_t emu_swizzled(uint32_t address, int width) {
    return address ^ (address >> 7 & (uint32_t)(width / 16 - 1)) << 4;
}

// --------------------------------------------------------------------------------------- barriers

// The word is the runtime's. ThreadSanitizer sees it written by init, and read by all others.
static inline void mbarrier_init(uint64_t *barrier, int arrivals, EMU_SITE) {
    *const_cast<volatile uint64_t *>(barrier) = 0;
    emu_mbarrier_init(barrier, arrivals, file, line);
}
static inline void mbarrier_init_fence(void) { emu_mbarrier_fence(); }
static inline void emu_mbarrier_look(const uint64_t *barrier) {
    (void)*const_cast<const volatile uint64_t *>(barrier);
}
static inline void mbarrier_arrive(uint64_t *barrier, EMU_SITE) {
    emu_mbarrier_look(barrier);
    emu_mbarrier_arrive(barrier, 0, file, line);
}
static inline void mbarrier_expect(uint64_t *barrier, int bytes, EMU_SITE) {
    emu_mbarrier_look(barrier);
    emu_mbarrier_arrive(barrier, bytes, file, line);
}
static inline void mbarrier_wait(uint64_t *barrier, int parity, EMU_SITE) {
    emu_mbarrier_look(barrier);
    while (!emu_mbarrier_done(barrier, parity, file, line)) {
        EmuLoad load;
        if (!emu_load_next(barrier, &load)) {
            emu_mbarrier_sleep(barrier, file, line);
            continue;
        }
        memcpy(load.tile, load.data, load.bytes);
        memcpy(emu_async_view(load.tile), load.data, load.bytes);
        emu_mbarrier_landed(load);
    }
}

static inline void named_sync(int number, int threads, EMU_SITE) {
    emu_named_barrier(number, threads, true, file, line);
}
static inline void named_arrive(int number, int threads, EMU_SITE) {
    emu_named_barrier(number, threads, false, file, line);
}
static inline void fence_async(void) { emu_async_fence(); }

// -------------------------------------------------------------------------------------------- TMA

// Calls use(offset in the tile, element in memory or nullptr if it lies outside of the tensor) for
// every element of the box that begins at x. The tile is dense, dimension 0 innermost.
template <typename F> static inline void emu_box(const EmuMap &map, const int *x, F use) {
    int at[5] = {}, size = 1;
    for (int i = 0; i < map.rank; i++) size *= map.box[i];
    for (int n = 0; n < size; n++) {
        uint64_t address = map.at;
        bool inside = true;
        for (int i = 0; i < map.rank; i++) {
            int64_t e = (int64_t)x[i] + at[i];
            inside = inside && e >= 0 && e < map.size[i];
            address += (uint64_t)e * (i ? map.stride[i - 1] : map.element);
        }
        use((uint32_t)(n * map.element),
            inside ? reinterpret_cast<unsigned char *>(address) : nullptr);
        for (int i = 0; i < map.rank && ++at[i] == map.box[i]; i++) at[i] = 0;
    }
}

static inline EmuMap emu_map(const CUtensorMap *from, const void *tile, const char *file,
                             int line) {
    EmuMap map;
    memcpy(&map, from, sizeof map);
    if (map.mark != EMU_MAP_MARK || map.rank != 4)
        emu_refuse("pass what tensor_map returned, as const __grid_constant__ CUtensorMap",
                   "no tensor map of four dimensions", file, line);
    if (shared_address(tile, file, line) % (map.swizzle == 128 ? 1024 : 128))
        emu_refuse("tiles begin at multiples of 1024 bytes with a swizzle of 128 bytes",
                   "a misaligned tile", file, line);
    return map;
}

static inline void tma_load(void *tile, const CUtensorMap *from, uint64_t *barrier, int x0, int x1,
                            int x2, int x3, EMU_SITE) {
    const EmuMap map = emu_map(from, tile, file, line);
    const int x[4] = {x0, x1, x2, x3};
    const uint32_t start = shared_address(tile, file, line);
    size_t bytes = (size_t)map.element * map.box[0] * map.box[1] * map.box[2] * map.box[3];
    unsigned char *data = static_cast<unsigned char *>(calloc(bytes, 1));
    emu_mbarrier_look(barrier);
    unsigned char *to = emu_shared_at(start, bytes, "tma_load", file, line);
    emu_box(map, x, [&](uint32_t offset, const unsigned char *element) {
        uint32_t place = emu_swizzled(start + offset, map.swizzle) - start;
        if (element) memcpy(data + place, element, map.element);
    });
    memset(to, 0xff, bytes);
    memset(emu_async_view(to), 0xff, bytes);
    emu_load_begin({barrier, to, bytes, data, file, line});
}

static inline void tma_store(const CUtensorMap *to, const void *tile, int x0, int x1, int x2,
                             int x3, EMU_SITE) {
    const EmuMap map = emu_map(to, tile, file, line);
    size_t bytes = (size_t)map.element * map.box[0] * map.box[1] * map.box[2] * map.box[3];
    const unsigned char *from =
        emu_shared_at(shared_address(tile, file, line), bytes, "tma_store", file, line);
    emu_store_begin({map, from, {x0, x1, x2, x3}, 0});
}
static inline void tma_commit(void) { emu_store_commit(); }
static inline void tma_wait_read(EMU_SITE) {
    EmuStore store;
    while (emu_store_next(&store)) {
        const uint32_t start = shared_address(store.tile, file, line);
        const unsigned char *view = emu_async_view(store.tile);
        emu_box(store.map, store.x, [&](uint32_t offset, unsigned char *element) {
            uint32_t place = emu_swizzled(start + offset, store.map.swizzle) - start;
            (void)*const_cast<const volatile unsigned char *>(store.tile + place);
            if (element) memcpy(element, view + place, store.map.element);
        });
    }
}

// ------------------------------------------------------------------------------------------ wgmma

template <int COUNT> static inline void settle(float (&)[COUNT]) {}
template <int COUNT> static inline void settle(uint32_t (&)[COUNT]) {}
static inline void wgmma_fence(void) { emu_product_fence(); }
static inline void wgmma_commit(void) { emu_product_commit(); }

// Element (i, k) of an operand in shared memory: row i of A or column i of B, depth k. Bits of the
// descriptor: 0-13 the address, 16-29 the leading and 32-45 the stride byte offset, each without
// its low four bits; 49-51 the base offset; 62-63 the swizzle: none, 128, 64 or 32 bytes.
static inline float emu_operand(uint64_t descriptor, bool across, int i, int k, const char *file,
                                int line) {
    const int swizzles[4] = {16, 128, 64, 32};
    const int width = swizzles[descriptor >> 62], pieces = width / 16;
    const uint32_t start = (uint32_t)(descriptor & 0x3fff) << 4;
    const uint32_t lead = (uint32_t)(descriptor >> 16 & 0x3fff) << 4;
    const uint32_t stride = (uint32_t)(descriptor >> 32 & 0x3fff) << 4;
    const uint32_t unit = (uint32_t)width;
    const uint32_t u = (uint32_t)i, d = (uint32_t)k;
    uint32_t at;
    if (!across) at = u % 8 * unit + u / 8 * stride + d / 8 * (pieces == 1 ? lead : 16) + d % 8 * 2;
    else if (pieces == 1) at = u % 8 * 2 + u / 8 * stride + d % 8 * 16 + d / 8 * lead;
    else at = u % (8 * pieces) * 2 + u / (8 * pieces) * lead + d % 8 * unit + d / 8 * stride;
    if (descriptor >> 49 & 7)
        emu_refuse("let tiles begin where their swizzle does", "a base offset", file, line);
    const uint32_t address = emu_swizzled(start + at, width);
    unsigned char *p = emu_shared_at(address, 2, "wgmma", file, line);
    uint16_t bits;
    (void)*reinterpret_cast<const volatile uint16_t *>(p);
    memcpy(&bits, emu_async_view(p), 2);
    return __uint_as_float((uint32_t)bits << 16);
}

static inline float emu_left(const EmuProduct &p, int i, int k) {
    if (p.in_registers) return mma_half(p.a[k % 8 / 2][i + k / 8 * 2], k);
    int row = (int)threadIdx.x % 128 / 32 * 16 + i * 8 + emu_lane() / 4;
    return emu_operand(p.a_tile, p.a_across, row, k, p.file, p.line);
}

// D = A B (+ D), this lane's part, each sum over k in order.
static inline void emu_product(EmuProduct *p) {
    float left[2][16], sum[128];
    for (int i = 0; i < 2; i++) for (int k = 0; k < 16; k++) left[i][k] = emu_left(*p, i, k);
    for (int n = 0; n < p->width / 8; n++) for (int j = 0; j < 2; j++) {
        for (int i = 0; i < 2; i++) {
            float *s = &sum[4 * n + 2 * i + j];
            *s = p->add ? p->sums[4 * n + 2 * i + j] : 0;
        }
        for (int k = 0; k < 16; k++) {
            float right = emu_operand(p->b_tile, p->b_across, 8 * n + 2 * (emu_lane() % 4) + j, k,
                                      p->file, p->line);
            for (int i = 0; i < 2; i++) sum[4 * n + 2 * i + j] += left[i][k] * right;
        }
    }
    if (emu_product_wrong()) sum[0] += 1;
    memcpy(p->sums, sum, sizeof(float) * p->width / 2);
}

// All lanes bring the same descriptors, and A's registers.
template <int COUNT>
static inline void emu_wgmma(float (&d)[COUNT], const uint32_t *a, uint64_t a_tile, uint64_t b_tile,
                             Major A, Major B, bool add, const char *file, int line) {
    struct Operands {
        uint32_t a[4];
        uint64_t a_tile, b_tile;
        int width, add;
    } mine = {{}, a_tile, b_tile, 2 * COUNT, add};
    if (a) memcpy(mine.a, a, sizeof mine.a);
    const EmuLanes<Operands> lanes = emu_exchange("wgmma", mine, file, line);
    EmuProduct p = {};
    for (int l = 0; l < 32; l++)
        if (lanes[l].a_tile != a_tile || lanes[l].b_tile != b_tile || lanes[l].add != add ||
            lanes[l].width != 2 * COUNT)
            emu_refuse("all lanes give wgmma the same descriptors", "wgmma of two kinds", file,
                       line);
    for (int l = 0; l < 4; l++) memcpy(p.a[l], lanes[emu_lane() / 4 * 4 + l].a, sizeof p.a[l]);
    p.d = d, p.width = 2 * COUNT, p.add = add, p.in_registers = a != nullptr;
    p.a_across = A == MAJOR_MN, p.b_across = B == MAJOR_MN, p.a_tile = a_tile, p.b_tile = b_tile;
    p.chained = emu_product_chained(d, file, line), p.file = file, p.line = line;
    if (!p.chained) memcpy(p.sums, d, sizeof d);
    if (!p.chained) memset(d, 0xff, sizeof d);
    emu_product_begin(p);
}
template <Major A, Major B, int COUNT>
static inline void wgmma(float (&d)[COUNT], uint64_t a, uint64_t b, bool add, EMU_SITE) {
    emu_wgmma(d, nullptr, a, b, A, B, add, file, line);
}
template <Major B, int COUNT>
static inline void wgmma(float (&d)[COUNT], const uint32_t (&a)[4], uint64_t b, bool add,
                         EMU_SITE) {
    emu_wgmma(d, a, 0, b, MAJOR_K, B, add, file, line);
}

// Products come to their ends in order. The last one of a D leaves it there. The lanes of the warp
// wait for each other, as .sync says.
static inline void emu_wgmma_wait(int groups, const char *file, int line) {
    EmuProduct p;
    while (emu_product_next(groups, &p)) {
        emu_product(&p);
        if (emu_product_hand_on(p)) continue;
        for (int i = 0; i < p.width / 2; i++)
            if (__float_as_uint(p.d[i]) != 0xffffffffu)
                emu_refuse("wait for the product first", "D was written during wgmma", p.file,
                           p.line);
        memcpy(p.d, p.sums, sizeof(float) * p.width / 2);
    }
    __syncwarp(0xffffffffu, file, line);
}
template <int GROUPS> static inline void wgmma_wait(EMU_SITE) {
    emu_wgmma_wait(GROUPS, file, line);
}

// -------------------------------------------------------------------------------------- registers

template <int COUNT> static inline void registers_give(EMU_SITE) {
    emu_registers(COUNT, false, file, line);
}
template <int COUNT> static inline void registers_take(EMU_SITE) {
    emu_registers(COUNT, true, file, line);
}
