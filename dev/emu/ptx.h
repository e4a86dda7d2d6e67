// ptx.h: the functions of gpu.cuh and mma.cuh that are PTX instructions, for the emulator (emu.h
// includes it). Lanes of a warp exchange their operands; errors name the line of the caller.
#pragma once

// 2^x
static inline float exp2_fast(float x) { return exp2f(x); }

// All 32 lanes of the warp bring a value and get everyone's; valid until the caller's next one.
void emu_exchange_bytes(const char *operation, const void *mine, size_t bytes, const void *all[32],
                        const char *file, int line);
template <typename T> struct EmuLanes {
    const void *all[32];
    const T &operator[](int lane) const { return *static_cast<const T *>(all[lane]); }
};
template <typename T>
static inline EmuLanes<T> emu_exchange(const char *operation, const T &mine, EMU_SITE) {
    EmuLanes<T> lanes;
    emu_exchange_bytes(operation, &mine, sizeof mine, lanes.all, file, line);
    return lanes;
}

// The value at an even or odd column of a piece, from the register that holds both.
static inline float mma_half(uint32_t held, int column) {
    return __uint_as_float(held >> column % 2 * 16 << 16);
}

// D += A B (mma.cuh), with the sum over k in order.
static inline void mma_bf16(float d[4], const uint32_t a[4], const uint32_t b[2], EMU_SITE) {
    struct Operands {
        uint32_t a[4], b[2];
    } mine = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
    const EmuLanes<Operands> lanes = emu_exchange("mma", mine, file, line);
    int row = emu_lane() / 4, quad = emu_lane() % 4;
    for (int i = 0; i < 4; i++) {
        int column = 2 * quad + i % 2;
        for (int k = 0; k < 16; k++) {
            float a_k = mma_half(lanes[4 * row + k % 8 / 2].a[i / 2 + k / 8 * 2], k);
            float b_k = mma_half(lanes[4 * column + k % 8 / 2].b[k / 8], k);
            d[i] += a_k * b_k;
        }
    }
}

void emu_misaligned(const char *operation, const void *p, const char *file, int line);
template <bool TRANSPOSED>
static inline void ldmatrix(uint32_t r[4], const __nv_bfloat16 *row, EMU_SITE) {
    const char *operation = TRANSPOSED ? "ldmatrix.trans" : "ldmatrix";
    const EmuLanes<const __nv_bfloat16 *> rows = emu_exchange(operation, row, file, line);
    int own = emu_lane() / 4, pair = emu_lane() % 4 * 2;
    if ((uintptr_t)row % 16) emu_misaligned("ldmatrix", row, file, line);
    for (int i = 0; i < 4; i++) {
        __nv_bfloat16 two[2];
        for (int j = 0; j < 2; j++)
            two[j] = TRANSPOSED ? rows[8 * i + pair + j][own] : rows[8 * i + own][pair + j];
        memcpy(&r[i], two, sizeof two);
    }
}

// cp.async: 16 bytes to shared memory (zeros unless present), which hold NaN from the call until
// the wait for the copy's group. So a copy that nobody waits for is wrong, and so is one that
// begins while others still read; ThreadSanitizer sees a write in both places.
void emu_copy_begin(void *to, const uint64_t value[2], const char *file, int line);
void emu_copy_commit(void);
void *emu_copy_next(int groups, uint64_t value[2]);
static inline void copy_async(void *to, const void *from, bool present, EMU_SITE) {
    uint64_t value[2] = {0, 0}, poison[2] = {~0ull, ~0ull};
    const void *odd = (uintptr_t)to % 16 ? to : from;
    if ((uintptr_t)odd % 16) emu_misaligned("cp.async", odd, file, line);
    if (present) memcpy(value, from, 16);
    memcpy(to, poison, 16);
    emu_copy_begin(to, value, file, line);
}
static inline void copy_commit(void) { emu_copy_commit(); }
static inline void emu_copy_wait(int groups) {
    uint64_t value[2];
    while (void *to = emu_copy_next(groups, value)) memcpy(to, value, 16);
}
template <int GROUPS> static inline void copy_wait(void) { emu_copy_wait(GROUPS); }
