/* Conversions between bits and values, and of narrower formats to FP32. */

#ifndef PRECDOCTOR_WIDEN_H
#define PRECDOCTOR_WIDEN_H

#include "stats.h"

#include <string.h>

#ifdef __SSE2__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

INLINE float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

INLINE double from_bits64(uint64_t bits) {
    double value;
    memcpy(&value, &bits, 8);
    return value;
}

INLINE uint64_t to_bits64(double value) {
    uint64_t bits;
    memcpy(&bits, &value, 8);
    return bits;
}

/* Returns the value of FP32 magnitude bits; exact for subnormals even in a denormals-are-zero mode. */
INLINE double value_of(uint32_t magnitude) {
    return magnitude < 0x00800000 ? (double)magnitude * 0x1p-149 : (double)from_bits(magnitude);
}

/* Converts a code of a narrower format to FP32 bits by arithmetic; no step makes an FP32 subnormal. `special` is the first
 * magnitude that is Inf or NaN. */
INLINE uint32_t widen(uint32_t magnitude, int mantissa_bits, int bias, uint32_t special) {
    uint32_t normal = (magnitude << (23 - mantissa_bits)) + ((uint32_t)(127 - bias) << 23);
    uint32_t subnormal = to_bits((float)(int32_t)magnitude * from_bits((uint32_t)(128 - bias - mantissa_bits) << 23));
    uint32_t bits = magnitude < 1u << mantissa_bits ? subnormal : normal;
    return magnitude >= special ? bits | 0x7f800000 : bits;
}

INLINE uint32_t widen_f16(uint32_t h) { return widen(h & 0x7fff, 10, 15, 0x7c00) | (h & 0x8000) << 16; }
INLINE uint32_t widen_e4m3fn(uint32_t b) { return widen(b & 0x7f, 3, 7, 0x7f) | (b & 0x80) << 24; }
/* The FNUZ formats have no Inf, no negative zero, and one NaN in its place. */
INLINE uint32_t widen_fnuz(uint32_t b, int mantissa_bits, int bias) {
    return b == 0x80 ? 0x7fc00000 : widen(b & 0x7f, mantissa_bits, bias, 0x80) | (b & 0x80) << 24;
}

static void widen_halves(const uint16_t *restrict h, int n, uint32_t *restrict bits) {
    int i = 0;
#ifdef __F16C__
    for (; i + 8 <= n; i += 8) {
        __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(h + i)));
        _mm256_storeu_si256((__m256i *)(void *)(bits + i), _mm256_castps_si256(wide));
    }
#endif
    for (; i < n; i++) bits[i] = widen_f16(h[i]);
}

/* Returns n elements of any dtype but FP64 as FP32 bits: `data` itself, or `buffer` after filling it. */
static const uint32_t *load(const void *data, dtype_t dtype, int n, uint32_t *restrict buffer) {
    const uint16_t *h = data;
    const uint8_t *b = data;
    uint16_t halves[TILE];
    switch (dtype) {
    case F16: widen_halves(h, n, buffer); break;
    case BF16:
        for (int i = 0; i < n; i++) buffer[i] = (uint32_t)h[i] << 16;
        break;
    case F8_E5M2: /* the upper half of an FP16 */
        for (int i = 0; i < n; i++) halves[i] = (uint16_t)(b[i] << 8);
        widen_halves(halves, n, buffer);
        break;
    case F8_E4M3FN:
        for (int i = 0; i < n; i++) buffer[i] = widen_e4m3fn(b[i]);
        break;
    case F8_E4M3FNUZ:
        for (int i = 0; i < n; i++) buffer[i] = widen_fnuz(b[i], 3, 8);
        break;
    case F8_E5M2FNUZ:
        for (int i = 0; i < n; i++) buffer[i] = widen_fnuz(b[i], 2, 16);
        break;
    default: return data;
    }
    return buffer;
}

#endif
