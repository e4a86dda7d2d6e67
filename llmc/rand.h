// rand.h: hashes and random numbers, all of them functions of (key, counter): no hidden state, no
// order of calls.
//
// The n-th number of a stream is a hash of (key, n). Initialization, shuffling and sampling give
// the same values for any number of threads or processes, and a checkpoint stores the position in
// a stream as one integer.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

// Kernels call these hashes on the device.
#ifdef __CUDACC__
#define HOST_AND_DEVICE __host__ __device__
#else
#define HOST_AND_DEVICE
#endif

// SplitMix64's finalizer (Steele, Lea, Flood 2014): a bijection on 64 bits.
HOST_AND_DEVICE static inline uint64_t rand_mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

// Number n of the stream `key`: 64 random bits.
HOST_AND_DEVICE static inline uint64_t rand_at(uint64_t key, uint64_t n) {
    return rand_mix(rand_mix(key + 0x9E3779B97F4A7C15ull) ^ rand_mix(n + 0xD1B54A32D192ED03ull));
}

// Uniform in [0, 1), 53 bits.
static inline double rand_uniform(uint64_t key, uint64_t n) {
    return (double)(rand_at(key, n) >> 11) * 0x1p-53;
}

// Standard normal (Box-Muller).
static inline double rand_normal(uint64_t key, uint64_t n) {
    double u = 1.0 - rand_uniform(key, 2 * n), v = rand_uniform(key, 2 * n + 1);
    return sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v);
}

// Standard normal truncated at +-limit: drawn again, with another key, until it is inside. The
// deviation is not corrected, as in torch's trunc_normal_.
static inline double rand_truncated(uint64_t key, uint64_t n, double limit) {
    double z = rand_normal(key, n);
    while (fabs(z) > limit) {
        key = rand_mix(key + 1);
        z = rand_normal(key, n);
    }
    return z;
}

// The position of i in a permutation of 0 .. n-1 that `key` selects: a four-round Feistel network
// on the next even number of bits, repeated until the result is below n (fewer than four times on
// average). It needs no table: a hundred billion samples take no memory.
static inline uint64_t rand_permute(uint64_t key, uint64_t i, uint64_t n) {
    int half = 1;
    while (half < 32 && (n - 1) >> (2 * half)) half++;
    uint64_t mask = (1ull << half) - 1;
    do {
        uint64_t left = i >> half, right = i & mask;
        for (uint64_t round = 0; round < 4; round++) {
            uint64_t next = left ^ (rand_at(key + round, right) & mask);
            left = right;
            right = next;
        }
        i = left << half | right;
    } while (i >= n);
    return i;
}

// XXH64 (Collet; the published xxHash specification), streaming: the checksum of checkpoints, the
// hash of the weights, and the key of a tensor's name. `xxhsum -H64` prints the same number. It
// reads little-endian words (x86-64, AArch64).
typedef struct {
    uint64_t lane[4];
    uint64_t length;         // bytes so far
    unsigned char tail[32];  // the stripe that is not full yet
} Hash;

#define HASH_P1 0x9E3779B185EBCA87ull
#define HASH_P2 0xC2B2AE3D27D4EB4Full
#define HASH_P3 0x165667B19E3779F9ull
#define HASH_P4 0x85EBCA77C2B2AE63ull
#define HASH_P5 0x27D4EB2F165667C5ull

static inline uint64_t hash_rotl(uint64_t x, int r) { return x << r | x >> (64 - r); }

static inline uint64_t hash_round(uint64_t acc, uint64_t word) {
    return hash_rotl(acc + word * HASH_P2, 31) * HASH_P1;
}

static inline uint64_t hash_word(const unsigned char *p) {
    uint64_t w;
    memcpy(&w, p, 8);
    return w;
}

static inline Hash hash_begin(void) {
    Hash h = {{HASH_P1 + HASH_P2, HASH_P2, 0, 0 - HASH_P1}, 0, {0}};
    return h;
}

// Adds 32 bytes.
static inline void hash_stripe(Hash *h, const unsigned char *p) {
    for (int i = 0; i < 4; i++) h->lane[i] = hash_round(h->lane[i], hash_word(p + 8 * i));
}

// Adds any number of bytes.
static inline void hash_add(Hash *h, const void *data, size_t n) {
    const unsigned char *p = (const unsigned char *)data;
    size_t have = h->length % 32;
    h->length += n;
    if (have) {  // complete the stripe begun last time
        size_t take = 32 - have < n ? 32 - have : n;
        memcpy(h->tail + have, p, take);
        p += take;
        n -= take;
        if (have + take < 32) return;
        hash_stripe(h, h->tail);
    }
    for (; n >= 32; n -= 32, p += 32) hash_stripe(h, p);
    if (n) memcpy(h->tail, p, n);
}

static inline uint64_t hash_end(const Hash *h) {
    uint64_t x = HASH_P5;
    if (h->length >= 32) {
        x = hash_rotl(h->lane[0], 1) + hash_rotl(h->lane[1], 7) + hash_rotl(h->lane[2], 12) +
            hash_rotl(h->lane[3], 18);
        for (int i = 0; i < 4; i++) x = (x ^ hash_round(0, h->lane[i])) * HASH_P1 + HASH_P4;
    }
    x += h->length;
    const unsigned char *p = h->tail;
    size_t n = h->length % 32;
    for (; n >= 8; n -= 8, p += 8)
        x = hash_rotl(x ^ hash_round(0, hash_word(p)), 27) * HASH_P1 + HASH_P4;
    if (n >= 4) {
        uint32_t w;
        memcpy(&w, p, 4);
        x = hash_rotl(x ^ w * HASH_P1, 23) * HASH_P2 + HASH_P3;
        n -= 4;
        p += 4;
    }
    for (; n; n--, p++) x = hash_rotl(x ^ *p * HASH_P5, 11) * HASH_P1;
    x = (x ^ x >> 33) * HASH_P2;
    x = (x ^ x >> 29) * HASH_P3;
    return x ^ x >> 32;
}

static inline uint64_t hash_bytes(const void *data, size_t n) {
    Hash h = hash_begin();
    hash_add(&h, data, n);
    return hash_end(&h);
}

// The key of a named random stream: the same name, index and seed give the same numbers in every
// mode and on every device.
static inline uint64_t rand_key(uint64_t seed, const char *name, uint64_t index) {
    return rand_at(rand_at(seed, hash_bytes(name, strlen(name))), index);
}
