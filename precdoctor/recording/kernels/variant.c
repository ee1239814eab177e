/* The work on one tile after another, in plain C and vector extensions; the build compiles this file once per instruction
 * set (VARIANT names the function, -m flags choose the instructions). All variants give the same bits: the floating-point
 * sums use the same 16 lanes everywhere and no fused multiply-add (-ffp-contract=off).
 *
 * A tile of at most 2048 elements is read several times while it lies in L1: fingerprint, a reduction, exponent keys as
 * bytes, then histograms of such bytes. A histogram is counted by comparing against a few neighbouring values at once;
 * what falls outside is counted one by one, or, if that is much, over interleaved tables (one would stall on store
 * forwarding). Classification is by integer bits, so it does not depend on flush-to-zero modes. Rare content (NaN, Inf,
 * FP32 subnormals, sums that could leave FP32's range) is found from the tile's extremes; such a tile, and any of FP64,
 * takes the second path, with 16-bit keys and sums in FP64. */

#include "stats.h"

#include <math.h>
#include <string.h>

#ifdef __SSE2__
#include <immintrin.h>
#endif

#ifdef __AVX2__
enum { BYTES = 32 };
#else
enum { BYTES = 16 };
#endif
typedef uint8_t bytes_t __attribute__((vector_size(BYTES)));

enum { LANES = 16, WINDOW = 8, TABLES = 8, WIDEST = 128 };
#define INLINE static inline __attribute__((always_inline))

/* Largest finite value and smallest normal number of each dtype, as FP32 magnitude bits. */
static const uint32_t LARGEST[] = {0x7f7fffff, 0x477fe000, 0x7f7f0000, 0x43e00000, 0x47600000, 0x43700000, 0x47600000};
static const uint32_t SMALLEST_NORMAL[] = {0x00800000, 0x38800000, 0x00800000, 0x3c800000,
                                           0x38800000, 0x3c000000, 0x38000000};

/* ---- widening ---------------------------------------------------------------------------------------------------- */

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

/* The value of FP32 magnitude bits; exact for subnormals even when denormals are taken for zero. */
INLINE double value_of(uint32_t magnitude) {
    return magnitude < 0x00800000 ? (double)magnitude * 0x1p-149 : (double)from_bits(magnitude);
}

/* A format narrower than FP32 by arithmetic on its code; no step makes an FP32 subnormal. `special` is the first
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

/* n elements of anything but FP64 as FP32 bits: `data` itself, or `buffer` filled. */
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

/* ---- fingerprint -------------------------------------------------------------------------------------------------- */

#ifdef __AVX2__
/* The loop below on eight words at a time: products of the even and the odd words, without unpacking them first. */
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

/* mix(b, i) of reference.py over n words, summed. `base` is (index + 1) times the golden ratio. */
#define DEFINE_MIX(NAME, WORD, LOAD)                                                                                   \
    static uint64_t NAME(const WORD *restrict words, int n, uint32_t base) {                                           \
        uint64_t total = 0;                                                                                            \
        int i = 0;                                                                                                     \
        MIX_EIGHTS(LOAD)                                                                                               \
        for (; i < n; i++, base += 0x9e3779b1u) {                                                                      \
            uint32_t a = words[i] + base;                                                                              \
            a ^= a >> 15;                                                                                              \
            uint32_t c = a * 0x85ebca6bu;                                                                              \
            c ^= c >> 13;                                                                                              \
            total += (uint64_t)a * c;                                                                                  \
        }                                                                                                              \
        return total;                                                                                                  \
    }
DEFINE_MIX(mix32, uint32_t, WORDS32)
DEFINE_MIX(mix16, uint16_t, WORDS16)
DEFINE_MIX(mix8, uint8_t, WORDS8)

static uint64_t mix(const void *data, dtype_t dtype, int n, uint64_t index) {
    uint32_t base = (uint32_t)((dtype == F64 ? 2 * index : index) + 1) * 0x9e3779b1u;
    if (dtype == F64) return mix32(data, 2 * n, base);
    if (dtype == F32) return mix32(data, n, base);
    if (dtype == F16 || dtype == BF16) return mix16(data, n, base);
    return mix8(data, n, base);
}

/* ---- histograms of bytes ------------------------------------------------------------------------------------------ */

INLINE bytes_t bytes_at(const uint8_t *from) {
    bytes_t v;
    memcpy(&v, from, BYTES);
    return v;
}

INLINE bytes_t all_of(int value) { return (bytes_t){0} + (uint8_t)value; }

INLINE int sum_of(bytes_t v) {
    int total = 0;
#ifdef __SSE2__
    __m128i part[BYTES / 16], sum = _mm_setzero_si128();
    memcpy(part, &v, BYTES);
    for (int i = 0; i < BYTES / 16; i++) sum = _mm_add_epi64(sum, _mm_sad_epu8(part[i], _mm_setzero_si128()));
    total = _mm_cvtsi128_si32(sum) + _mm_extract_epi16(sum, 4);
#else
    for (int i = 0; i < BYTES; i++) total += v[i];
#endif
    return total;
}

/* One bit per byte of a comparison's result. */
INLINE uint32_t mask_of(bytes_t v) {
    uint32_t mask = 0;
#ifdef __SSE2__
    __m128i part[BYTES / 16];
    memcpy(part, &v, BYTES);
    for (int i = 0; i < BYTES / 16; i++) mask |= (uint32_t)_mm_movemask_epi8(part[i]) << 16 * i;
#else
    for (int i = 0; i < BYTES; i++) mask |= (uint32_t)(v[i] & 1) << i;
#endif
    return mask;
}

/* Adds to out[] how often each of first .. first + 7 occurs, of which only those below `end` count. Returns the sum;
 * *nonzero receives the number of non-zero keys. */
static int count_window(const uint8_t *keys, int n, int first, int end, int64_t *out, int *nonzero) {
    bytes_t counts[WINDOW], target[WINDOW], zeros = {0};
    int total = 0;
    for (int j = 0; j < WINDOW; j++) counts[j] = all_of(0), target[j] = all_of(first + j);
    for (int i = 0; i < n; i += BYTES) { /* at most 128 times: no byte overflows */
        bytes_t key = bytes_at(keys + i);
        for (int j = 0; j < WINDOW; j++) counts[j] -= (bytes_t)(key == target[j]);
        zeros -= (bytes_t)(key == 0);
    }
    for (int j = 0; j < WINDOW && first + j < end; j++) {
        int count = sum_of(counts[j]);
        if (count) out[first + j] += count; /* here, too */
        total += count;
    }
    *nonzero = n - sum_of(zeros);
    return total;
}

/* ... how often each key outside low .. high occurs. */
static void count_outside(const uint8_t *keys, int n, int low, int high, int64_t *out) {
    bytes_t base = all_of(low), span = all_of(high - low);
    for (int i = 0; i < n; i += BYTES) {
        bytes_t key = bytes_at(keys + i);
        uint32_t mask = mask_of((bytes_t)((key - base) > span) & (bytes_t)(key != 0));
        for (; mask; mask &= mask - 1) out[keys[i + __builtin_ctz(mask)]]++;
    }
}

/* ... how often any key occurs, over interleaved tables. Returns the number of non-zero keys. */
static int count_all(const uint8_t *keys, int n, int64_t *out) {
    uint16_t table[TABLES][256];
    memset(table, 0, sizeof table);
    for (int i = 0; i < n; i += TABLES) {
        uint64_t eight;
        memcpy(&eight, keys + i, 8);
        for (int j = 0; j < TABLES; j++, eight >>= 8) table[j][eight & 0xff]++;
    }
    for (int j = 1; j < TABLES; j++)
        for (int k = 0; k < 256; k++) table[0][k] += table[j][k];
    int top = 255;
    while (top && !table[0][top]) top--; /* out[] need not reach beyond what occurs */
    for (int k = 1; k <= top; k++) out[k] += table[0][k];
    return n - table[0][0];
}

/* Adds to out[1 .. 255] how often each non-zero key occurs; returns how many there are.
 *   keys    n of them, followed by zeros up to a multiple of BYTES
 *   first   a value most of them are near to, and which way on: +8 or -8
 *   spread  how many more times not to try comparing, because keys were too far apart */
static int count_keys(uint8_t *keys, int n, int first, int on, int64_t *out, uint8_t *spread) {
    int padded = (n + BYTES - 1) / BYTES * BYTES, nonzero, unused;
    memset(keys + n, 0, (size_t)(padded - n));
    if (*spread) {
        --*spread;
        return count_all(keys, padded, out);
    }
    if (first < 1) first = 1;
    int low = first, high = first + WINDOW - 1;
    int left = -count_window(keys, padded, first, 256, out, &nonzero);
    left += nonzero;
    if (left > n / 32) {
        int second = first + on < 1 ? 1 : first + on;
        left -= count_window(keys, padded, second, on < 0 ? first : 256, out, &unused);
        low = second < low ? second : low;
        high = second > first ? second + WINDOW - 1 : high;
    }
    if (left > n / 8) *spread = 15;
    if (left) count_outside(keys, padded, low, high, out);
    return nonzero;
}

/* ---- blocks ------------------------------------------------------------------------------------------------------- */

/* For each block of `size` keys (0: no exponent): its largest key; for each key, one more than how far it is below that,
 * at most BLOCK_BINS, and 0 for 0. */
INLINE void distances(const uint8_t *restrict keys, int n, int size, uint8_t *restrict below, uint8_t *restrict peaks) {
    for (int b = 0; b * size < n; b++) {
        const uint8_t *block = keys + b * size;
        uint8_t *distance = below + b * size, peak = 0;
        for (int i = 0; i < size; i++) peak = block[i] > peak ? block[i] : peak;
        for (int i = 0; i < size; i++) {
            uint8_t d = (uint8_t)(peak - block[i]);
            d = d < BLOCK_BINS - 1 ? d : BLOCK_BINS - 1;
            distance[i] = block[i] ? (uint8_t)(d + 1) : 0;
        }
        peaks[b] = peak;
    }
}

static void distances_of(const uint8_t *keys, int n, int size, uint8_t *below, uint8_t *peaks) {
    switch (size) { /* the constant size is what lets the loops become a few vector operations */
    case 1: distances(keys, n, 1, below, peaks); break;
    case 2: distances(keys, n, 2, below, peaks); break;
    case 4: distances(keys, n, 4, below, peaks); break;
    case 8: distances(keys, n, 8, below, peaks); break;
    case 16: distances(keys, n, 16, below, peaks); break;
    case 32: distances(keys, n, 32, below, peaks); break;
    case 64: distances(keys, n, 64, below, peaks); break;
    default: distances(keys, n, 128, below, peaks); break;
    }
}

/* Columns of a tile's row once it is padded for blocks: blocks of any size then begin at its multiples, and a block
 * larger than the row is the row. */
static int padded_columns(int columns) {
    int width = 1;
    if (columns > WIDEST) return (columns + WIDEST - 1) / WIDEST * WIDEST;
    while (width < columns) width *= 2;
    return width;
}

static int64_t *block_row(int64_t *ints, int which) { return ints + BLOCKS + which * (BLOCK_WIDTH + HIST_WIDTH); }

/* Block histograms of rows x columns keys; a key's histogram entry is `shift` more. */
static void count_blocks(const uint8_t *keys, int rows, int columns, int shift, int want, state_t *state) {
    uint8_t padded[TILE + 2 * WIDEST], below[TILE + 2 * WIDEST], peaks[TILE + 2 * WIDEST];
    int width = padded_columns(columns), n = rows * width;
    if (width != columns) {
        memset(padded, 0, (size_t)n);
        for (int r = 0; r < rows; r++) memcpy(padded + r * width, keys + r * columns, (size_t)columns);
        keys = padded;
    }
    for (int which = 0; which < BLOCK_SIZES; which++) {
        if (!(want >> which & 1)) continue;
        static const int sizes[BLOCK_SIZES] = {16, 32, 128};
        int size = sizes[which] < width ? sizes[which] : width, count = n / size, top = 0;
        int64_t *relative = block_row(state->ints, which), *peak_row = relative + BLOCK_WIDTH;
        uint8_t never = 0;
        distances_of(keys, n, size, below, peaks);
        count_keys(below, n, 1, WINDOW, relative - 1, &state->spread[2 + which]);
        for (int b = 0; b < count; b++) top = peaks[b] > top ? peaks[b] : top;
        int real = rows * ((columns + sizes[which] - 1) / sizes[which]);
        peak_row[0] += real - count_keys(peaks, count, top - WINDOW + 1, -WINDOW, peak_row + shift, &never);
    }
}

/* ---- sums and extremes ------------------------------------------------------------------------------------------ */

typedef struct {
    uint32_t highest, lowest; /* magnitude bits; lowest over non-zero ones, minus one */
    double sum, sum_sq;
} extremes_t;

static extremes_t reduce(const uint32_t *restrict bits, int n) {
    uint32_t highest[LANES] = {0}, lowest[LANES];
    float sum[LANES] = {0}, sum_sq[LANES] = {0};
    memset(lowest, 0xff, sizeof lowest);
    int i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) {
            uint32_t magnitude = bits[i + j] & 0x7fffffff;
            float value = from_bits(bits[i + j]);
            highest[j] = magnitude > highest[j] ? magnitude : highest[j];
            lowest[j] = magnitude - 1 < lowest[j] ? magnitude - 1 : lowest[j];
            sum[j] += value;
            sum_sq[j] += value * value;
        }
    for (int j = 0; j < LANES && i + j < n; j++) {
        uint32_t magnitude = bits[i + j] & 0x7fffffff;
        float value = from_bits(bits[i + j]);
        highest[j] = magnitude > highest[j] ? magnitude : highest[j];
        lowest[j] = magnitude - 1 < lowest[j] ? magnitude - 1 : lowest[j];
        sum[j] += value;
        sum_sq[j] += value * value;
    }
    extremes_t all = {0, 0xffffffff, 0.0, 0.0};
    for (int j = 0; j < LANES; j++) {
        all.highest = highest[j] > all.highest ? highest[j] : all.highest;
        all.lowest = lowest[j] < all.lowest ? lowest[j] : all.lowest;
        all.sum += sum[j];
        all.sum_sq += sum_sq[j];
    }
    return all;
}

/* ---- the second path: 16-bit histogram entries ---------------------------------------------------------------------- */

/* The histogram entry of FP32 magnitude bits; 0 for zero, Inf and NaN. */
INLINE uint16_t entry_of(uint32_t magnitude) {
    uint32_t below = magnitude - 1;
    int normal = (int)(below >> 23) - 127;
    int subnormal = (int)(to_bits((float)(int32_t)(below & 0x7fffff)) >> 23) - 127 - 149;
    int k = below < 0x00800000 ? subnormal : normal;
    k = k < -150 ? -150 : k; /* the smallest subnormal closes its bin */
    return magnitude == 0 || magnitude >= 0x7f800000 ? 0 : (uint16_t)(1 + k - EXP_MIN);
}

INLINE uint16_t entry_of64(uint64_t magnitude) {
    int field = (int)(magnitude >> 52), k = (int)((magnitude - 1) >> 52) - 1023;
    k = k < EXP_MIN ? EXP_MIN : k > EXP_MAX ? EXP_MAX : k;
    return magnitude == 0 || field == 0x7ff ? 0 : (uint16_t)(1 + k - EXP_MIN);
}

/* Entries more than 254 binades apart: nothing is fast about them. */
static void count_far_apart(const uint16_t *entries, int rows, int columns, int want, state_t *state) {
    for (int i = 0; i < rows * columns; i++)
        if (entries[i]) state->ints[HIST + entries[i]]++;
    for (int which = 0; which < BLOCK_SIZES; which++) {
        if (!(want >> which & 1)) continue;
        int size = which == 0 ? 16 : which == 1 ? 32 : 128;
        int64_t *relative = block_row(state->ints, which), *peak_row = relative + BLOCK_WIDTH;
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < columns; c += size) {
                const uint16_t *block = entries + r * columns + c;
                int length = columns - c < size ? columns - c : size, peak = 0;
                for (int i = 0; i < length; i++) peak = block[i] > peak ? block[i] : peak;
                for (int i = 0; i < length; i++) {
                    int d = peak - block[i];
                    if (block[i]) relative[d < BLOCK_BINS ? d : BLOCK_BINS - 1]++;
                }
                peak_row[peak]++;
            }
    }
}

static void count_entries(const uint16_t *entries, int rows, int columns, int bad, int want, state_t *state) {
    uint8_t keys[TILE + BYTES];
    int n = rows * columns, nonzero = 0;
    uint16_t high = 0, low = 0xffff;
    for (int i = 0; i < n; i++) {
        uint16_t below = (uint16_t)(entries[i] - 1);
        high = entries[i] > high ? entries[i] : high;
        low = below < low ? below : low;
    }
    for (int i = 0; i < n; i++) nonzero += entries[i] != 0;
    if (!high) low = 0;
    state->ints[HIST] += n - nonzero - bad;
    if (high && high - low > 255) {
        count_far_apart(entries, rows, columns, want, state);
        return;
    }
    for (int i = 0; i < n; i++) keys[i] = entries[i] ? (uint8_t)(entries[i] - low) : 0;
    count_keys(keys, n, high - low - WINDOW + 1, -WINDOW, state->ints + HIST + low, &state->spread[0]);
    if (want) count_blocks(keys, rows, columns, low, want, state);
}

static void merge_extremes(double amax, double amin, double *floats) {
    /* Compared as integers: FP64 subnormals must not be taken for zeros. */
    if (floats[AMAX] < 0 || to_bits64(amax) > to_bits64(floats[AMAX])) floats[AMAX] = amax;
    if (to_bits64(amin) < to_bits64(floats[AMIN])) floats[AMIN] = amin;
}

static void add_sums(const double *restrict values, int n, state_t *state) {
    enum { WIDE_LANES = 8 };
    double sum[WIDE_LANES] = {0}, sum_sq[WIDE_LANES] = {0};
    int i = 0;
    for (; i + WIDE_LANES <= n; i += WIDE_LANES)
        for (int j = 0; j < WIDE_LANES; j++) sum[j] += values[i + j], sum_sq[j] += values[i + j] * values[i + j];
    for (; i < n; i++) sum[0] += values[i], sum_sq[0] += values[i] * values[i];
    for (int j = 0; j < WIDE_LANES; j++) state->sum += sum[j], state->sum_sq += sum_sq[j];
}

/* Counts NaN and Inf into the slot and `bad`; `nan`, `pos` and `neg` are tests of element i. */
#define COUNT_BAD(n, nan, pos, neg)                                                                                    \
    int nans = 0, ups = 0, downs = 0;                                                                                  \
    for (int i = 0; i < n; i++) nans += (nan), ups += (pos), downs += (neg);                                           \
    state->ints[NOT_A_NUMBER] += nans;                                                                                 \
    state->ints[POS_INF] += ups;                                                                                       \
    state->ints[NEG_INF] += downs;                                                                                     \
    bad = nans + ups + downs;                                                                                          \
    state->bad += bad

/* `all` are the extremes of the bits as they are. */
static void rare_tile(const uint32_t *restrict bits, extremes_t all, int rows, int columns, int want, state_t *state) {
    uint16_t entries[TILE];
    double finite[TILE];
    int n = rows * columns, bad = 0;
    if (all.highest >= 0x7f800000) {
        COUNT_BAD(n, (bits[i] & 0x7fffffff) > 0x7f800000, bits[i] == 0x7f800000, bits[i] == 0xff800000);
        all.highest = 0;
        for (int i = 0; i < n; i++) {
            uint32_t magnitude = bits[i] & 0x7fffffff, known = magnitude < 0x7f800000 ? magnitude : 0;
            all.highest = known > all.highest ? known : all.highest;
        }
        if (!all.highest) all.lowest = 0xffffffff;
    }
    for (int i = 0; i < n; i++) entries[i] = entry_of(bits[i] & 0x7fffffff);
    for (int i = 0; i < n; i++) finite[i] = from_bits((bits[i] & 0x7fffffff) < 0x7f800000 ? bits[i] : 0);
    add_sums(finite, n, state);
    merge_extremes(value_of(all.highest), all.highest ? value_of(all.lowest + 1) : INFINITY, state->floats);
    count_entries(entries, rows, columns, bad, want, state);
}

static void tile_f64(const double *restrict data, int rows, int columns, int want, state_t *state) {
    enum { FIELD = 52 };
    const uint64_t top = (uint64_t)0x7ff << FIELD, all = ~(uint64_t)0 >> 1;
    uint16_t entries[TILE];
    double finite[TILE];
    uint64_t highest = 0, lowest = ~(uint64_t)0;
    int n = rows * columns, bad = 0, subnormal = 0, at_max = 0;
    COUNT_BAD(n, (to_bits64(data[i]) & all) > top, to_bits64(data[i]) == top, to_bits64(data[i]) == (top | ~all));
    for (int i = 0; i < n; i++) {
        uint64_t magnitude = to_bits64(data[i]) & all, known = magnitude < top ? magnitude : 0;
        highest = known > highest ? known : highest;
        lowest = known - 1 < lowest ? known - 1 : lowest;
        subnormal += magnitude - 1 < ((uint64_t)1 << FIELD) - 1;
        at_max += magnitude == top - 1;
    }
    for (int i = 0; i < n; i++) entries[i] = entry_of64(to_bits64(data[i]) & all);
    for (int i = 0; i < n; i++) finite[i] = (to_bits64(data[i]) & all) < top ? data[i] : 0.0;
    add_sums(finite, n, state);
    state->ints[SUBNORMAL] += subnormal;
    state->ints[AT_MAX] += at_max;
    merge_extremes(from_bits64(highest), highest ? from_bits64(lowest + 1) : INFINITY, state->floats);
    count_entries(entries, rows, columns, bad, want, state);
}

/* ---- the first path -------------------------------------------------------------------------------------------------- */

static int count_between(const uint32_t *restrict bits, int n, uint32_t low, uint32_t high) {
    int count = 0;
    for (int i = 0; i < n; i++) count += (bits[i] & 0x7fffffff) - low <= high - low;
    return count;
}

/* A key is the exponent field of the FP32 just below |x|, plus one; 0 for zero. Here no larger than 182. */
enum { KEY_TO_ENTRY = -127 - EXP_MIN };
INLINE int key_of(uint32_t magnitude) { return (int)(((magnitude - 1) >> 23) + 1); }

static void make_keys(const uint32_t *restrict bits, int n, uint8_t *restrict keys) {
    int i = 0;
#ifdef __AVX2__
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff), one = _mm256_set1_epi32(1);
    for (; i + 32 <= n; i += 32) {
        __m256i v[4];
        for (int j = 0; j < 4; j++) {
            v[j] = _mm256_loadu_si256((const __m256i *)(const void *)(bits + i + 8 * j));
            v[j] = _mm256_srli_epi32(_mm256_sub_epi32(_mm256_and_si256(v[j], magnitude), one), 23);
        }
        /* The fields fit a byte, except zero's 511, which saturates to 255; one more makes it 0. */
        __m256i low = _mm256_packus_epi32(v[0], v[1]), high = _mm256_packus_epi32(v[2], v[3]);
        __m256i mixed = _mm256_packus_epi16(low, high);
        mixed = _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        _mm256_storeu_si256((__m256i *)(void *)(keys + i), _mm256_add_epi8(mixed, _mm256_set1_epi8(1)));
    }
#endif
    for (; i < n; i++) keys[i] = (uint8_t)key_of(bits[i] & 0x7fffffff);
}

static void tile_f32(const uint32_t *restrict bits, dtype_t dtype, int rows, int columns, int want, state_t *state) {
    uint8_t keys[TILE + BYTES];
    int n = rows * columns;
    extremes_t all = reduce(bits, n);
    if (all.lowest != 0xffffffff && all.lowest + 1 < SMALLEST_NORMAL[dtype])
        state->ints[SUBNORMAL] += count_between(bits, n, 1, SMALLEST_NORMAL[dtype] - 1);
    if (all.highest >= LARGEST[dtype])
        state->ints[AT_MAX] += count_between(bits, n, LARGEST[dtype], LARGEST[dtype]);
    /* 2^54 and 2^-50: squares of 2048 such elements stay normal FP32 numbers. */
    if (all.highest && (all.highest > 0x5a800000 || all.highest < 0x26800000 || all.lowest + 1 < 0x00800000)) {
        rare_tile(bits, all, rows, columns, want, state);
        return;
    }
    merge_extremes(from_bits(all.highest), all.highest ? from_bits(all.lowest + 1) : INFINITY, state->floats);
    state->sum += all.sum;
    state->sum_sq += all.sum_sq;
    make_keys(bits, n, keys);
    int top = all.highest ? key_of(all.highest) : 0;
    int nonzero = count_keys(keys, n, top - WINDOW + 1, -WINDOW, state->ints + HIST + KEY_TO_ENTRY, &state->spread[1]);
    state->ints[HIST] += n - nonzero;
    if (want) count_blocks(keys, rows, columns, KEY_TO_ENTRY, want, state);
}

/* ---- tiles of a tensor ------------------------------------------------------------------------------------------------ */

static int width_of(dtype_t dtype) {
    return dtype == F64 ? 8 : dtype == F32 ? 4 : dtype == F16 || dtype == BF16 ? 2 : 1;
}

/* Copies a tile into one piece, walking memory along the shorter stride. */
#define DEFINE_GATHER(NAME, ELEMENT)                                                                                   \
    static void NAME(const plan_t *plan, const void *data, int rows, int columns, void *buffer) {                      \
        const ELEMENT *from = data;                                                                                    \
        ELEMENT *to = buffer;                                                                                          \
        int64_t down = plan->row_stride, along = plan->column_stride;                                                  \
        if (along == 1)                                                                                                \
            for (int r = 0; r < rows; r++) memcpy(to + r * columns, from + r * down, (size_t)columns * sizeof *to);    \
        else if (down < along)                                                                                         \
            for (int c = 0; c < columns; c++)                                                                          \
                for (int r = 0; r < rows; r++) to[r * columns + c] = from[r * down + c * along];                       \
        else                                                                                                           \
            for (int r = 0; r < rows; r++)                                                                             \
                for (int c = 0; c < columns; c++) to[r * columns + c] = from[r * down + c * along];                    \
    }
DEFINE_GATHER(gather8, uint8_t)
DEFINE_GATHER(gather16, uint16_t)
DEFINE_GATHER(gather32, uint32_t)
DEFINE_GATHER(gather64, uint64_t)

static void gather(const plan_t *plan, const void *from, int rows, int columns, void *to) {
    switch (width_of((dtype_t)plan->dtype)) {
    case 1: gather8(plan, from, rows, columns, to); break;
    case 2: gather16(plan, from, rows, columns, to); break;
    case 4: gather32(plan, from, rows, columns, to); break;
    default: gather64(plan, from, rows, columns, to); break;
    }
}

/* Statistics of the stored difference, elements that did not change although they should have, and exponent(intended) -
 * exponent(weight) where both exist. `at`: index of the first of n elements. */
static void update_tile(const subject_t *subject, int64_t at, int n, state_t *state) {
    dtype_t dtype = (dtype_t)subject->plan->dtype;
    uint32_t old_buffer[TILE], new_buffer[TILE], stored[TILE];
    uint16_t step[TILE], weight[TILE];
    uint8_t relative[TILE + BYTES], top = 0;
    const uint32_t *before = load(subject->data + at * width_of(dtype), dtype, n, old_buffer);
    const uint32_t *after = load(subject->after + at * width_of(dtype), dtype, n, new_buffer);
    if (subject->wide) {
        const uint64_t *intended = (const uint64_t *)(const void *)subject->intended + at;
        for (int i = 0; i < n; i++) step[i] = entry_of64(intended[i] & ~(uint64_t)0 >> 1);
    } else {
        const uint32_t *intended = (const uint32_t *)(const void *)subject->intended + at;
        for (int i = 0; i < n; i++) step[i] = entry_of(intended[i] & 0x7fffffff);
    }
    int unchanged = 0;
    for (int i = 0; i < n; i++) {
        stored[i] = to_bits(from_bits(after[i]) - from_bits(before[i]));
        weight[i] = entry_of(before[i] & 0x7fffffff);
        unchanged += (step[i] != 0) & (before[i] == after[i]);
    }
    for (int i = 0; i < n; i++) {
        int r = step[i] - weight[i];
        r = r < REL_MIN ? REL_MIN : r > REL_MAX ? REL_MAX : r;
        relative[i] = step[i] && weight[i] ? (uint8_t)(r - REL_MIN + 1) : 0;
        top = relative[i] > top ? relative[i] : top;
    }
    state->ints[UNCHANGED] += unchanged;
    count_keys(relative, n, top - WINDOW + 1, -WINDOW, state->ints + REL - 1, &state->spread[2]);
    state->ints[FINGERPRINT] = (int64_t)((uint64_t)state->ints[FINGERPRINT] + mix(stored, F32, n, (uint64_t)at));
    tile_f32(stored, F32, 1, n, 0, state);
}

static void value_tile(const plan_t *plan, const void *data, int64_t index, int rows, int columns, int fingerprint_only,
                       state_t *state) {
    dtype_t dtype = (dtype_t)plan->dtype;
    int width = width_of(dtype), n = rows * columns, want = (int)plan->want;
    uint64_t gathered[TILE], fingerprint = 0;
    uint32_t wide[TILE];
    if (plan->column_stride != 1 || (rows > 1 && plan->row_stride != columns)) {
        gather(plan, data, rows, columns, gathered);
        data = gathered;
    }
    if (rows == 1 || plan->row_pitch == columns) fingerprint = mix(data, dtype, n, (uint64_t)index);
    else
        for (int r = 0; r < rows; r++)
            fingerprint += mix((const char *)data + r * columns * width, dtype, columns,
                               (uint64_t)(index + r * plan->row_pitch));
    state->ints[FINGERPRINT] = (int64_t)((uint64_t)state->ints[FINGERPRINT] + fingerprint);
    if (fingerprint_only) return;
    if (dtype == F64) tile_f64(data, rows, columns, want, state);
    else tile_f32(load(data, dtype, n, wide), dtype, rows, columns, want, state);
}

/* ---- what is looked at on every step ------------------------------------------------------------------------------------ */

/* Sums are in FP64, whose range the squares of FP32 numbers do not leave. */
static double look_f64(const double *restrict data, int n, double *sum_sq) {
    double highest[LANES] = {0}, squares[LANES] = {0}, amax = 0.0;
    int i = 0, nans = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) {
            double magnitude = from_bits64(to_bits64(data[i + j]) & ~(uint64_t)0 >> 1);
            highest[j] = magnitude > highest[j] ? magnitude : highest[j];
            squares[j] += magnitude * magnitude;
            nans += magnitude != magnitude;
        }
    for (; i < n; i++) {
        double magnitude = from_bits64(to_bits64(data[i]) & ~(uint64_t)0 >> 1);
        highest[0] = magnitude > highest[0] ? magnitude : highest[0];
        squares[0] += magnitude * magnitude;
        nans += magnitude != magnitude;
    }
    for (int j = 0; j < LANES; j++) amax = highest[j] > amax ? highest[j] : amax, *sum_sq += squares[j];
    return nans ? NAN : amax;
}

static uint32_t look_f32(const uint32_t *restrict bits, int n, double *sum_sq) {
    uint32_t highest[LANES] = {0}, top = 0;
    double squares[LANES] = {0};
    int i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) {
            uint32_t magnitude = bits[i + j] & 0x7fffffff;
            double value = (double)from_bits(bits[i + j]);
            highest[j] = magnitude > highest[j] ? magnitude : highest[j];
            squares[j] += value * value;
        }
    for (; i < n; i++) {
        uint32_t magnitude = bits[i] & 0x7fffffff;
        double value = (double)from_bits(bits[i]);
        highest[0] = magnitude > highest[0] ? magnitude : highest[0];
        squares[0] += value * value;
    }
    for (int j = 0; j < LANES; j++) top = highest[j] > top ? highest[j] : top, *sum_sq += squares[j];
    return top;
}

#define JOINED(a, b) a##b
#define NAMED(a, b) JOINED(a, b)
look_t NAMED(VARIANT, _look)(const char *data, dtype_t dtype, int64_t n) {
    look_t look = {0.0, 0.0};
    uint32_t wide[TILE], highest = 0;
    for (int64_t at = 0; at < n; at += TILE) {
        int count = n - at < TILE ? (int)(n - at) : TILE;
        const char *from = data + at * width_of(dtype);
        if (dtype == F64) {
            double amax = look_f64((const double *)(const void *)from, count, &look.sum_sq);
            if (amax > look.amax || amax != amax) look.amax = amax;
        } else {
            uint32_t top = look_f32(load(from, dtype, count, wide), count, &look.sum_sq);
            highest = top > highest ? top : highest;
        }
    }
    if (dtype != F64) look.amax = highest < 0x7f800000 ? value_of(highest) : (double)from_bits(highest);
    return look;
}

/* Tiles first .. end - 1 of the subject. */
void VARIANT(const subject_t *subject, int64_t first, int64_t end, state_t *state) {
    const plan_t *plan = subject->plan;
    int across = plan->row_stride < plan->column_stride;
    for (int64_t tile = first; tile < end; tile++) {
        /* Whichever way the next tile is nearer: its cache lines and pages are. */
        int64_t inner = across ? plan->row_tiles : plan->column_tiles, rest = tile / inner;
        int64_t other = across ? plan->column_tiles : plan->row_tiles;
        int64_t r = (across ? tile % inner : rest % other) * plan->tile_rows;
        int64_t c = (across ? rest % other : tile % inner) * plan->tile_columns;
        int64_t offset = r * plan->row_stride + c * plan->column_stride, index = r * plan->row_pitch + c;
        rest /= other;
        for (int64_t d = plan->outer - 1; d >= 0; d--) {
            offset += rest % plan->size[d] * plan->stride[d];
            index += rest % plan->size[d] * plan->pitch[d];
            rest /= plan->size[d];
        }
        int64_t rows = plan->rows - r < plan->tile_rows ? plan->rows - r : plan->tile_rows;
        int64_t columns = plan->columns - c < plan->tile_columns ? plan->columns - c : plan->tile_columns;
        if (subject->after) update_tile(subject, index, (int)(rows * columns), state);
        else
            value_tile(plan, subject->data + offset * width_of((dtype_t)plan->dtype), index, (int)rows, (int)columns,
                       subject->fingerprint_only, state);
    }
}
