// exp.h: e^x and tanh x in float, in a form that compilers turn into vector instructions.
//
// e^x = 2^k * polynomial(r), where x = k ln 2 + r and |r| <= ln 2 / 2. The relative error is below
// 2e-7, tested over the whole range. Values below -87 give e^-87, values above 88 give e^88. A NaN
// stays a NaN.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float exp_float(float v) {
    v = v < -87.0f ? -87.0f : v;
    v = v > 88.0f ? 88.0f : v;
    float shifted = v * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
    float k = shifted - 12582912.0f;
    float r = (v - k * 0.693359375f) - k * -2.12194440e-4f;  // Cody, Waite: ln 2 in two parts
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, 4);
    bits = (bits - 0x4B400000u + 127u) << 23;  // k is in the low bits of shifted: the bits of 2^k
    float scale;
    memcpy(&scale, &bits, 4);
    return p * scale;
}

// tanh x = (1 - e) / (1 + e), e = e^(-2|x|), with the sign of x; near 0, where 1 - e would lose its
// digits, the series up to x^9. The relative error is below 2e-7; a NaN stays a NaN.
static inline float tanh_float(float v) {
    float e = exp_float(v < 0 ? 2 * v : -2 * v), far = (1 - e) / (1 + e), square = v * v;
    float p = 62.0f / 2835;
    p = p * square - 17.0f / 315;
    p = p * square + 2.0f / 15;
    p = p * square - 1.0f / 3;
    float near = v + v * square * p;
    far = v < 0 ? -far : far;
    return square < 0.09f ? near : far;
}
