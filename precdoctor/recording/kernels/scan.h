/* One pass over the elements of a tile: its share of the fingerprint, sums and extremes, exponents as bytes. */

#ifndef PRECDOCTOR_SCAN_H
#define PRECDOCTOR_SCAN_H

#include "widen.h"

enum { LANES = 16 };
/* Prefetch distance, a page: the first line of a page and its address translation take longest. */
enum { AHEAD = 4096 };

/* ---- fingerprint -------------------------------------------------------------------------------------------------- */

#ifdef __AVX2__
/* The loop below on eight words at a time: products of the even and the odd words, without unpacking. */
INLINE __m256i mix_words(__m256i words, __m256i index, __m256i total) {
    __m256i a = _mm256_add_epi32(words, index);
    a = _mm256_xor_si256(a, _mm256_srli_epi32(a, 15));
    __m256i c = _mm256_mullo_epi32(a, _mm256_set1_epi32((int)0x85ebca6bu));
    c = _mm256_xor_si256(c, _mm256_srli_epi32(c, 13));
    __m256i even = _mm256_mul_epu32(a, c);
    __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(c, 32));
    return _mm256_add_epi64(total, _mm256_add_epi64(even, odd));
}

#define WORDS32(p) _mm256_loadu_si256((const __m256i *)(const void *)(p))
#define WORDS16(p) _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)(p)))
#define WORDS8(p) _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(p)))
#define MIX_EIGHTS(LOAD)                                                                                               \
    __m256i sums = _mm256_setzero_si256(), step = _mm256_set1_epi32((int)(8 * 0x9e3779b1u));                           \
    __m256i index = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32((int)0x9e3779b1u)); \
    index = _mm256_add_epi32(index, _mm256_set1_epi32((int)base));                                                     \
    for (; i + 8 <= n; i += 8, base += 8 * 0x9e3779b1u) {                                                              \
        sums = mix_words(LOAD(words + i), index, sums);                                                                \
        index = _mm256_add_epi32(index, step);                                                                         \
    }                                                                                                                  \
    uint64_t part[4];                                                                                                  \
    memcpy(part, &sums, sizeof part);                                                                                  \
    total = part[0] + part[1] + part[2] + part[3];
#else
#define MIX_EIGHTS(LOAD)
#endif

INLINE uint64_t mix_word(uint32_t word, uint32_t base) {
    uint32_t a = word + base;
    a ^= a >> 15;
    uint32_t c = a * 0x85ebca6bu;
    c ^= c >> 13;
    return (uint64_t)a * c;
}

/* Returns the sum of mix(b, i) of reference.py over n words. `base` is (index + 1) times GOLDEN. */
#define DEFINE_MIX(NAME, WORD, LOAD)                                                                                   \
    static uint64_t NAME(const WORD *restrict words, int n, uint32_t base) {                                           \
        uint64_t total = 0;                                                                                            \
        int i = 0;                                                                                                     \
        MIX_EIGHTS(LOAD)                                                                                               \
        for (; i < n; i++, base += 0x9e3779b1u) total += mix_word(words[i], base);                                     \
        return total;                                                                                                  \
    }
DEFINE_MIX(mix32, uint32_t, WORDS32)
DEFINE_MIX(mix16, uint16_t, WORDS16)
DEFINE_MIX(mix8, uint8_t, WORDS8)

INLINE uint32_t base_of(uint64_t index) { return (uint32_t)(index + 1) * 0x9e3779b1u; }

static uint64_t mix(const void *data, dtype_t dtype, int n, uint64_t index) {
    uint32_t base = base_of(dtype == F64 ? 2 * index : index);
    if (dtype == F64) return mix32(data, 2 * n, base);
    if (dtype == F32) return mix32(data, n, base);
    if (dtype == F16 || dtype == BF16) return mix16(data, n, base);
    return mix8(data, n, base);
}

/* ---- sums and extremes ------------------------------------------------------------------------------------------ */

typedef struct {
    uint32_t highest, lowest; /* magnitude bits; lowest: of the non-zero ones, minus one */
    double sum, sum_sq;
} extremes_t;

/* Merges the lanes, in the same order in every variant. */
static extremes_t across(const uint32_t *highest, const uint32_t *lowest, const float *sum, const float *sum_sq) {
    extremes_t all = {0, 0xffffffff, 0.0, 0.0};
    for (int j = 0; j < LANES; j++) {
        all.highest = highest[j] > all.highest ? highest[j] : all.highest;
        all.lowest = lowest[j] < all.lowest ? lowest[j] : all.lowest;
        all.sum += sum[j];
        all.sum_sq += sum_sq[j];
    }
    return all;
}

/* A key is the exponent field of the FP32 number just below |x|, plus one; 0 for zero. Here at most 182. */
enum { KEY_TO_ENTRY = -127 - EXP_MIN };
INLINE int key_of(uint32_t magnitude) { return (int)(((magnitude - 1) >> 23) + 1); }

INLINE void add_one(uint32_t bits, int lane, uint32_t *highest, uint32_t *lowest, float *sum, float *sum_sq) {
    uint32_t magnitude = bits & 0x7fffffff;
    float value = from_bits(bits);
    highest[lane] = magnitude > highest[lane] ? magnitude : highest[lane];
    lowest[lane] = magnitude - 1 < lowest[lane] ? magnitude - 1 : lowest[lane];
    sum[lane] += value;
    sum_sq[lane] += value * value;
}

/* ---- the scan ----------------------------------------------------------------------------------------------------- */

/* Returns the FP32 bits of n elements if scan needs them, else NULL. `buffer`: room for them. */
static const uint32_t *scan_bits(const void *data, dtype_t dtype, int n, uint32_t *buffer) {
#ifdef __AVX2__
    if (dtype == F16 || dtype == BF16) return NULL;
#endif
    return load(data, dtype, n, buffer);
}

/* Scans n elements of any dtype but FP64.
 *   bits   the result of scan_bits
 *   index  logical index of the first element, of which the others are the successors; NULL: no fingerprint
 *   keys   receives the keys; room for 64 more
 *   all    receives sums and extremes
 * Returns the elements' share of the fingerprint, 0 without an index. */
#ifdef __AVX512VBMI__

typedef struct {
    __m512i index, products, highest, lowest;
    __m512 sum, sum_sq;
} lanes_t;

/* One step of the loops of mix and reduce, on sixteen elements as words of the fingerprint and FP32 bits; `live` masks the
 * existing ones. Returns twice the bits of the number below |x|, whose top byte is the exponent field. */
INLINE __m512i scan_sixteen(lanes_t *lanes, __m512i words, __m512i bits, __mmask16 live) {
    __m512i a = _mm512_add_epi32(words, lanes->index);
    a = _mm512_maskz_xor_epi32(live, a, _mm512_srli_epi32(a, 15));
    __m512i c = _mm512_mullo_epi32(a, _mm512_set1_epi32((int)0x85ebca6bu));
    c = _mm512_xor_si512(c, _mm512_srli_epi32(c, 13));
    __m512i even = _mm512_mul_epu32(a, c);
    __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), _mm512_srli_epi64(c, 32));
    lanes->products = _mm512_add_epi64(lanes->products, _mm512_add_epi64(even, odd));
    lanes->index = _mm512_add_epi32(lanes->index, _mm512_set1_epi32((int)(16 * 0x9e3779b1u)));

    __m512 value = _mm512_castsi512_ps(bits);
    __m512i twice = _mm512_add_epi32(bits, bits), below = _mm512_sub_epi32(twice, _mm512_set1_epi32(2));
    lanes->highest = _mm512_max_epu32(lanes->highest, twice);
    lanes->lowest = _mm512_min_epu32(lanes->lowest, below);
    lanes->sum = _mm512_add_ps(lanes->sum, value);
    lanes->sum_sq = _mm512_add_ps(lanes->sum_sq, _mm512_mul_ps(value, value));
    return below;
}

/* Scans elements i to i + 15; `wide`: FP32 bits of FP8 elements, which no instruction converts. */
INLINE __m512i scan_at(lanes_t *lanes, const void *data, const uint32_t *wide, dtype_t dtype, int i, __mmask16 live) {
    __m512i words, bits;
    if (dtype == F32) {
        words = bits = _mm512_maskz_loadu_epi32(live, (const uint32_t *)data + i);
    } else if (dtype == F16 || dtype == BF16) {
        __m256i halves = _mm256_maskz_loadu_epi16(live, (const uint16_t *)data + i);
        words = _mm512_cvtepu16_epi32(halves);
        bits = dtype == BF16 ? _mm512_slli_epi32(words, 16) : _mm512_castps_si512(_mm512_cvtph_ps(halves));
    } else {
        words = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(live, (const uint8_t *)data + i));
        bits = _mm512_maskz_loadu_epi32(live, wide + i);
    }
    return scan_sixteen(lanes, words, bits, live);
}

/* Scans elements i to i + 63 and stores their keys. */
INLINE void scan_sixty_four(lanes_t *lanes, const void *data, const uint32_t *wide, dtype_t dtype, int i, uint64_t live,
                            __m512i top_bytes, uint8_t *keys) {
    __m512i below[4];
    for (int j = 0; j < 4; j++) below[j] = scan_at(lanes, data, wide, dtype, i + 16 * j, (__mmask16)(live >> 16 * j));
    __m512i low = _mm512_permutex2var_epi8(below[0], top_bytes, below[1]);
    __m512i high = _mm512_permutex2var_epi8(below[2], top_bytes, below[3]);
    __m512i fields = _mm512_inserti64x4(low, _mm512_castsi512_si256(high), 1);
    _mm512_storeu_si512(keys + i, _mm512_add_epi8(fields, _mm512_set1_epi8(1)));
}

INLINE uint64_t scan_as(dtype_t dtype, const void *data, const uint32_t *wide, int n, uint32_t base, uint8_t *keys,
                        extremes_t *all) {
    const __m512i golden = _mm512_set1_epi32((int)0x9e3779b1u), zero = _mm512_setzero_si512();
    const __m512i count = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i index = _mm512_add_epi32(_mm512_mullo_epi32(count, golden), _mm512_set1_epi32((int)base));
    lanes_t lanes = {index, zero, zero, _mm512_set1_epi32(-1), _mm512_setzero_ps(), _mm512_setzero_ps()};
    /* Bytes 3, 7, ... 127 of two registers. */
    __m512i top_bytes = _mm512_mullo_epi32(count, _mm512_set1_epi32(0x10101010));
    top_bytes = _mm512_add_epi32(top_bytes, _mm512_set1_epi32(0x0f0b0703));
    int i = 0;
    for (; i + 64 <= n; i += 64) scan_sixty_four(&lanes, data, wide, dtype, i, ~(uint64_t)0, top_bytes, keys);
    if (i < n) scan_sixty_four(&lanes, data, wide, dtype, i, ~(uint64_t)0 >> (64 - (n - i)), top_bytes, keys);
    uint32_t highest[LANES], lowest[LANES];
    float sum[LANES], sum_sq[LANES];
    lanes.highest = _mm512_srli_epi32(lanes.highest, 1);
    lanes.lowest = _mm512_srli_epi32(lanes.lowest, 1);
    memcpy(highest, &lanes.highest, sizeof highest), memcpy(lowest, &lanes.lowest, sizeof lowest);
    memcpy(sum, &lanes.sum, sizeof sum), memcpy(sum_sq, &lanes.sum_sq, sizeof sum_sq);
    *all = across(highest, lowest, sum, sum_sq);
    if (all->lowest == 0x7fffffff) all->lowest = 0xffffffff; /* all elements are zero: half of -1 or -2 */
    uint64_t products[LANES / 2], total = 0; /* _mm512_reduce_add_epi64 is signed and must not wrap */
    memcpy(products, &lanes.products, sizeof products);
    for (int j = 0; j < LANES / 2; j++) total += products[j];
    return total;
}

#elif defined __AVX2__

/* The scan on eight elements at a time: two registers hold the 16 lanes. */
typedef struct {
    __m256i index, products, highest[2], lowest[2];
    __m256 sum[2], sum_sq[2];
} lanes_t;

/* Returns the exponent fields of eight elements' magnitudes, each less one. */
INLINE __m256i scan_eight(lanes_t *lanes, int half, const void *data, const uint32_t *wide, dtype_t dtype, int i) {
    __m256i words, bits;
    if (dtype == F32) {
        words = bits = WORDS32((const uint32_t *)data + i);
    } else if (dtype == F16 || dtype == BF16) {
        __m128i halves = _mm_loadu_si128((const __m128i *)(const void *)((const uint16_t *)data + i));
        words = _mm256_cvtepu16_epi32(halves);
        bits = dtype == BF16 ? _mm256_slli_epi32(words, 16) : _mm256_castps_si256(_mm256_cvtph_ps(halves));
    } else {
        words = WORDS8((const uint8_t *)data + i);
        bits = WORDS32(wide + i);
    }
    lanes->products = mix_words(words, lanes->index, lanes->products);
    lanes->index = _mm256_add_epi32(lanes->index, _mm256_set1_epi32((int)(8 * 0x9e3779b1u)));

    __m256 value = _mm256_castsi256_ps(bits);
    __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    __m256i below = _mm256_sub_epi32(magnitude, _mm256_set1_epi32(1));
    lanes->highest[half] = _mm256_max_epu32(lanes->highest[half], magnitude);
    lanes->lowest[half] = _mm256_min_epu32(lanes->lowest[half], below);
    lanes->sum[half] = _mm256_add_ps(lanes->sum[half], value);
    lanes->sum_sq[half] = _mm256_add_ps(lanes->sum_sq[half], _mm256_mul_ps(value, value));
    return _mm256_srli_epi32(below, 23);
}

INLINE uint64_t scan_as(dtype_t dtype, const void *data, const uint32_t *wide, int n, uint32_t base, uint8_t *keys,
                        extremes_t *all) {
    const uint32_t golden = 0x9e3779b1u;
    const int width = dtype == F32 ? 4 : dtype == F16 || dtype == BF16 ? 2 : 1;
    const __m256i count = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), zero = _mm256_setzero_si256();
    const __m256i none = _mm256_set1_epi32(-1), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i index = _mm256_mullo_epi32(count, _mm256_set1_epi32((int)golden));
    index = _mm256_add_epi32(index, _mm256_set1_epi32((int)base));
    lanes_t lanes = {index, zero, {zero, zero}, {none, none}, {}, {}};
    int i = 0;
    for (; i + 32 <= n; i += 32) {
        __m256i fields[4];
        for (int k = 0; k < 32 * width; k += 64) __builtin_prefetch((const char *)data + i * width + AHEAD + k);
        for (int j = 0; j < 4; j++) fields[j] = scan_eight(&lanes, j & 1, data, wide, dtype, i + 8 * j);
        /* They fit a byte, except zero's 511, which saturates to 255; one more makes it 0. */
        __m256i low = _mm256_packus_epi32(fields[0], fields[1]), high = _mm256_packus_epi32(fields[2], fields[3]);
        __m256i mixed = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
        _mm256_storeu_si256((__m256i *)(void *)(keys + i), _mm256_add_epi8(mixed, _mm256_set1_epi8(1)));
    }
    uint32_t highest[LANES], lowest[LANES];
    float sum[LANES], sum_sq[LANES];
    uint64_t part[4], total = 0;
    memcpy(highest, lanes.highest, sizeof highest), memcpy(lowest, lanes.lowest, sizeof lowest);
    memcpy(sum, lanes.sum, sizeof sum), memcpy(sum_sq, lanes.sum_sq, sizeof sum_sq);
    memcpy(part, &lanes.products, sizeof part);
    for (int j = 0; j < 4; j++) total += part[j];
    for (base += (uint32_t)i * golden; i < n; i++, base += golden) {
        uint32_t word, bits;
        if (dtype == F32) word = bits = ((const uint32_t *)data)[i];
        else if (dtype == BF16) word = ((const uint16_t *)data)[i], bits = word << 16;
        else if (dtype == F16) word = ((const uint16_t *)data)[i], bits = widen_f16(word);
        else word = ((const uint8_t *)data)[i], bits = wide[i];
        add_one(bits, i % LANES, highest, lowest, sum, sum_sq);
        keys[i] = (uint8_t)key_of(bits & 0x7fffffff);
        total += mix_word(word, base);
    }
    *all = across(highest, lowest, sum, sum_sq);
    return total;
}

#endif

#ifdef __AVX2__

static uint64_t scan(const void *data, const uint32_t *bits, dtype_t dtype, int n, const uint64_t *index, uint8_t *keys,
                     extremes_t *all) {
    uint32_t base = index ? base_of(*index) : 0;
    uint64_t fingerprint;
    switch (dtype) {
    case F32: fingerprint = scan_as(F32, data, NULL, n, base, keys, all); break;
    case F16: fingerprint = scan_as(F16, data, NULL, n, base, keys, all); break;
    case BF16: fingerprint = scan_as(BF16, data, NULL, n, base, keys, all); break;
    default: fingerprint = scan_as(F8_E4M3FN, data, bits, n, base, keys, all);
    }
    return index ? fingerprint : 0;
}

#else

static extremes_t reduce(const uint32_t *restrict bits, int n) {
    uint32_t highest[LANES] = {0}, lowest[LANES];
    float sum[LANES] = {0}, sum_sq[LANES] = {0};
    memset(lowest, 0xff, sizeof lowest);
    int i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) add_one(bits[i + j], j, highest, lowest, sum, sum_sq);
    for (int j = 0; j < LANES && i + j < n; j++) add_one(bits[i + j], j, highest, lowest, sum, sum_sq);
    return across(highest, lowest, sum, sum_sq);
}

static void make_keys(const uint32_t *restrict bits, int n, uint8_t *restrict keys) {
    for (int i = 0; i < n; i++) keys[i] = (uint8_t)key_of(bits[i] & 0x7fffffff);
}

static uint64_t scan(const void *data, const uint32_t *bits, dtype_t dtype, int n, const uint64_t *index, uint8_t *keys,
                     extremes_t *all) {
    *all = reduce(bits, n);
    make_keys(bits, n, keys);
    return index ? mix(data, dtype, n, *index) : 0;
}

#endif

#endif
