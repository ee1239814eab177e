/* The CPU kernel: every statistic of a tensor in one pass over memory. Same results as reference.py, which is what it is
 * tested against; the meaning and place of each column are in layout.py, and the constants below repeat its numbers.
 *
 * A chunk of at most 2048 elements is widened to FP32 in L1 and read three times there: a vectorised reduction, exponent
 * keys as bytes, and a histogram over interleaved sub-tables (one table would stall on store forwarding). Classification
 * is by integer bits, so it does not depend on flush-to-zero modes. Rare content (NaN, Inf, FP32 subnormals, sums that
 * could leave FP32's range) is found from the chunk's extremes and that chunk is summed again element by element.
 *
 * Plain C11 and a C ABI: no Python, no torch. Nothing is allocated and no thread is started.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

enum { CHUNK = 2048, LANES = 16, TABLES = 8 };

/* layout.py */
enum {
    NUMEL, LAUNCHES, ORDER, FIRST_BAD_ORDER, SUBNORMAL, AT_MAX, UNCHANGED, FINGERPRINT, NOT_A_NUMBER, POS_INF, NEG_INF,
    HIST
};
enum { EXP_MIN = -160, EXP_MAX = 160, HIST_WIDTH = 1 + EXP_MAX - EXP_MIN + 1 };
enum { REL_MIN = -64, REL_MAX = 63, REL_WIDTH = REL_MAX - REL_MIN + 2 };
enum { BLOCK_BINS = 64, BLOCK_WIDTH = BLOCK_BINS + 1, BLOCKS = HIST + HIST_WIDTH + REL_WIDTH };
enum { INT_WIDTH = BLOCKS + 3 * (BLOCK_WIDTH + HIST_WIDTH) };
enum { AMAX, AMIN, SUM, SUM_SQ };
static const int BLOCK_SIZES[3] = {16, 32, 128};

typedef enum { F32, F16, BF16, F8_E4M3FN, F8_E5M2, F8_E4M3FNUZ, F8_E5M2FNUZ, F64 } dtype_t;

/* Largest finite value and smallest normal number of each dtype, as FP32 magnitude bits. */
static const uint32_t LARGEST[] = {0x7f7fffff, 0x477fe000, 0x7f7f0000, 0x43e00000, 0x47600000, 0x43700000, 0x47600000};
static const uint32_t SMALLEST_NORMAL[] = {0x00800000, 0x38800000, 0x00800000, 0x3c800000,
                                           0x38800000, 0x3c000000, 0x38000000};

/* Keys: exponent field of the FP32 just below |x|, plus one; 0 for zero, 255 for Inf and NaN and the top binade. */
enum { KEYS = 256, KEY_TO_HIST = -127 - EXP_MIN };

/* ---- widening --------------------------------------------------------------------------------------------------- */

static float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

/* FP16 without hardware support; no step produces an FP32 subnormal, so denormals-are-zero modes cannot interfere. */
static inline uint32_t widen_f16(uint16_t h) {
    uint32_t magnitude = h & 0x7fff;
    uint32_t normal = (magnitude << 13) + (112u << 23);
    uint32_t subnormal = to_bits((float)magnitude * 0x1p-24f);
    uint32_t special = (magnitude << 13) | 0x7f800000;
    uint32_t bits = magnitude < 0x0400 ? subnormal : magnitude >= 0x7c00 ? special : normal;
    return bits | (uint32_t)(h & 0x8000) << 16;
}

/* Any 8-bit format by table: 256 entries, filled on the first call. */
static uint32_t table_f8[4][256];
static int table_ready;

static void fill_tables(void) {
    static const struct { int exponent, mantissa, bias; } shape[4] = {{4, 3, 7}, {5, 2, 15}, {4, 3, 8}, {5, 2, 16}};
    for (int f = 0; f < 4; f++)
        for (int code = 0; code < 256; code++) {
            int mbits = shape[f].mantissa, magnitude = code & 0x7f;
            int e = magnitude >> mbits, m = magnitude & ((1 << mbits) - 1);
            float value = e ? ldexpf((float)((1 << mbits) + m), e - shape[f].bias - mbits)
                            : ldexpf((float)m, 1 - shape[f].bias - mbits);
            if (f == 0 && magnitude == 0x7f) value = NAN;
            if (f == 1 && e == 31) value = m ? NAN : INFINITY;
            if (f >= 2 && code == 0x80) value = NAN;
            table_f8[f][code] = to_bits(code & 0x80 ? -value : value);
        }
    table_ready = 1;
}

static int width_of(dtype_t dtype) {
    return dtype == F64 ? 8 : dtype == F32 ? 4 : dtype == F16 || dtype == BF16 ? 2 : 1;
}

/* n elements as FP32 bits and as the zero-extended words the fingerprint mixes. */
CLONES static void load(const void *data, dtype_t dtype, int n, uint32_t *restrict bits, uint32_t *restrict words) {
    if (dtype == F32) {
        memcpy(bits, data, (size_t)n * 4);
        memcpy(words, data, (size_t)n * 4);
    } else if (dtype == BF16) {
        const uint16_t *h = data;
        for (int i = 0; i < n; i++) words[i] = h[i], bits[i] = (uint32_t)h[i] << 16;
    } else if (dtype == F16) {
        const uint16_t *h = data;
        for (int i = 0; i < n; i++) words[i] = h[i], bits[i] = widen_f16(h[i]);
    } else {
        const uint8_t *b = data;
        const uint32_t *table = table_f8[dtype - F8_E4M3FN];
        for (int i = 0; i < n; i++) words[i] = b[i], bits[i] = table[b[i]];
    }
}

/* ---- one chunk -------------------------------------------------------------------------------------------------- */

typedef struct {
    uint32_t highest, lowest; /* magnitude bits; lowest over non-zero ones, minus one */
    double sum, sum_sq;
} extremes_t;

CLONES static extremes_t reduce(const uint32_t *restrict bits, int n) {
    uint32_t highest[LANES] = {0}, lowest[LANES];
    float sum[LANES] = {0}, sum_sq[LANES] = {0};
    memset(lowest, 0xff, sizeof lowest);
    for (int i = 0; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) {
            uint32_t magnitude = bits[i + j] & 0x7fffffff;
            uint32_t below = magnitude - 1;
            float value = from_bits(bits[i + j]);
            highest[j] = magnitude > highest[j] ? magnitude : highest[j];
            lowest[j] = below < lowest[j] ? below : lowest[j];
            sum[j] += value;
            sum_sq[j] += value * value;
        }
    for (int i = n / LANES * LANES, j = 0; i < n; i++, j++) {
        uint32_t magnitude = bits[i] & 0x7fffffff;
        float value = from_bits(bits[i]);
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

CLONES static void make_keys(const uint32_t *restrict bits, int n, uint8_t *restrict keys) {
    for (int i = 0; i < n; i++) keys[i] = (uint8_t)((((bits[i] & 0x7fffffff) - 1) >> 23) + 1);
}

/* Interleaved sub-tables of one histogram; they live as long as a call, so that small chunks do not pay for clearing. */
typedef struct {
    uint32_t count[TABLES][KEYS];
} tables_t;

static void count_keys(const uint8_t *restrict keys, int n, tables_t *restrict tables) {
    int i = 0;
    for (; i + TABLES <= n; i += TABLES)
        for (int j = 0; j < TABLES; j++) tables->count[j][keys[i + j]]++;
    for (; i < n; i++) tables->count[0][keys[i]]++;
}

/* Adds entries 0 .. KEYS - 1 to a histogram. */
static void add_tables(const tables_t *tables, int64_t *hist) {
    for (int j = 0; j < TABLES; j++)
        for (int k = 0; k < KEYS; k++) hist[k] += tables->count[j][k];
}

CLONES static int count_between(const uint32_t *restrict bits, int n, uint32_t low, uint32_t high) {
    int count = 0;
    for (int i = 0; i < n; i++) {
        uint32_t magnitude = bits[i] & 0x7fffffff;
        count += (magnitude >= low) & (magnitude <= high);
    }
    return count;
}

/* mix(b, i) of reference.py, summed. */
CLONES static uint64_t mix(const uint32_t *restrict words, int n, uint64_t start) {
    uint64_t total = 0;
    uint32_t base = (uint32_t)(start + 1) * 0x9e3779b1u;
    for (int i = 0; i < n; i++) {
        uint32_t a = words[i] + base + (uint32_t)i * 0x9e3779b1u;
        a ^= a >> 15;
        uint32_t c = a * 0x85ebca6bu;
        c ^= c >> 13;
        total += (uint64_t)a * c;
    }
    return total;
}

/* Histogram entry of a finite magnitude: the exponent field of the double just below it; 0 for zero. */
static inline int entry_of(double magnitude) {
    uint64_t bits;
    memcpy(&bits, &magnitude, 8);
    int k = (int)((bits - 1) >> 52) - 1023;
    k = k < EXP_MIN ? EXP_MIN : k > EXP_MAX ? EXP_MAX : k;
    return bits ? 1 + k - EXP_MIN : 0;
}

/* One element by the book; used for FP64 and for chunks with rare content. Returns its histogram entry, 0 if it has none. */
static int account(double value, int64_t *ints, double *floats, int64_t *bad) {
    if (isnan(value) || isinf(value)) {
        ints[isnan(value) ? NOT_A_NUMBER : value > 0 ? POS_INF : NEG_INF]++;
        ++*bad;
        return 0;
    }
    double magnitude = fabs(value);
    int entry = entry_of(magnitude);
    ints[HIST + entry]++;
    if (magnitude > floats[AMAX]) floats[AMAX] = magnitude;
    if (entry && magnitude < floats[AMIN]) floats[AMIN] = magnitude;
    floats[SUM] += value;
    floats[SUM_SQ] += value * value;
    return entry;
}

/* ---- blocks ------------------------------------------------------------------------------------------------------- */

typedef struct {
    int size;
    int64_t below[HIST_WIDTH]; /* by distance to the block's amax, in histogram entries */
    int64_t peak[HIST_WIDTH];  /* by histogram entry of the block's amax */
    tables_t distances;        /* of ordinary chunks; added to `below` in the end */
} blocks_t;

/* For each block of `size` keys (0 = no exponent) along rows: distances to its largest key, and what the peaks were. The
 * distances of keys without exponent equal the peak; they are taken back here so that counting needs no test. */
#define DEFINE_DISTANCES(NAME, KEY)                                                                                    \
    static inline __attribute__((always_inline)) void NAME(const KEY *restrict keys, int64_t rows, int64_t columns,    \
                                                           int size, int shift, KEY *restrict below, blocks_t *out) {  \
        for (int64_t r = 0; r < rows; r++)                                                                             \
            for (int64_t c = 0; c < columns; c += size) {                                                              \
                const KEY *block = keys + r * columns + c;                                                             \
                KEY *distance = below + r * columns + c, peak = 0;                                                     \
                int zeros = 0;                                                                                         \
                if (columns - c >= size) { /* the constant length is what lets this become a few vector operations */  \
                    for (int i = 0; i < size; i++) peak = block[i] > peak ? block[i] : peak;                           \
                    for (int i = 0; i < size; i++) zeros += block[i] == 0;                                             \
                    for (int i = 0; i < size; i++) distance[i] = (KEY)(peak - block[i]);                               \
                } else {                                                                                               \
                    int length = (int)(columns - c);                                                                   \
                    for (int i = 0; i < length; i++) peak = block[i] > peak ? block[i] : peak;                         \
                    for (int i = 0; i < length; i++) zeros += block[i] == 0;                                           \
                    for (int i = 0; i < length; i++) distance[i] = (KEY)(peak - block[i]);                             \
                }                                                                                                      \
                out->below[peak] -= zeros;                                                                             \
                out->peak[peak ? peak + shift : 0]++;                                                                  \
            }                                                                                                          \
    }
DEFINE_DISTANCES(distances_bytes, uint8_t)
DEFINE_DISTANCES(distances_words, uint16_t)

CLONES static void block_bytes(const uint8_t *keys, int64_t rows, int64_t columns, blocks_t *out) {
    uint8_t below[CHUNK];
    if (out->size == 16) distances_bytes(keys, rows, columns, 16, KEY_TO_HIST, below, out);
    else if (out->size == 32) distances_bytes(keys, rows, columns, 32, KEY_TO_HIST, below, out);
    else distances_bytes(keys, rows, columns, 128, KEY_TO_HIST, below, out);
    count_keys(below, (int)(rows * columns), &out->distances);
}

static void block_words(const uint16_t *keys, int64_t rows, int64_t columns, blocks_t *out) {
    uint16_t below[CHUNK];
    distances_words(keys, rows, columns, out->size, 0, below, out);
    for (int64_t i = 0; i < rows * columns; i++) out->below[below[i]]++;
}

static void store_blocks(blocks_t *blocks, int which, int64_t *ints) {
    int64_t *below = ints + BLOCKS + which * (BLOCK_WIDTH + HIST_WIDTH), *peak = below + BLOCK_WIDTH;
    add_tables(&blocks->distances, blocks->below);
    for (int d = 0; d < HIST_WIDTH; d++) below[d < BLOCK_BINS ? d : BLOCK_BINS - 1] += blocks->below[d];
    for (int e = 0; e < HIST_WIDTH; e++) peak[e] += blocks->peak[e];
}

/* ---- the entry points --------------------------------------------------------------------------------------------- */

/* A chunk of rare content, element by element; entries[] receives each one's histogram entry. */
static int64_t slow_chunk(const uint32_t *bits, int n, int64_t *ints, double *floats, uint16_t *entries) {
    int64_t bad = 0;
    for (int i = 0; i < n; i++) entries[i] = (uint16_t)account((double)from_bits(bits[i]), ints, floats, &bad);
    return bad;
}

static int64_t chunk(const void *data, dtype_t dtype, int64_t rows, int64_t columns, uint64_t start, int64_t *ints,
                     double *floats, tables_t *tables, blocks_t *blocks, int want) {
    uint32_t bits[CHUNK], words[CHUNK];
    uint8_t keys[CHUNK];
    int n = (int)(rows * columns);
    int64_t bad = 0;
    load(data, dtype, n, bits, words);
    ints[FINGERPRINT] = (int64_t)((uint64_t)ints[FINGERPRINT] + mix(words, n, start));
    extremes_t all = reduce(bits, n);
    if (all.lowest != 0xffffffff && all.lowest + 1 < SMALLEST_NORMAL[dtype])
        ints[SUBNORMAL] += count_between(bits, n, 1, SMALLEST_NORMAL[dtype] - 1);
    if (all.highest >= LARGEST[dtype]) ints[AT_MAX] += count_between(bits, n, LARGEST[dtype], LARGEST[dtype]);
    /* 2^54 and 2^-50: squares of 2048 such elements stay normal FP32 numbers. */
    int rare = all.highest && (all.highest > 0x5a800000 || all.highest < 0x26800000 || all.lowest + 1 < 0x00800000);
    if (rare) {
        uint16_t entries[CHUNK];
        bad = slow_chunk(bits, n, ints, floats, entries);
        for (int b = 0; b < 3; b++)
            if (want >> b & 1) block_words(entries, rows, columns, &blocks[b]);
        return bad;
    }
    if (floats[AMAX] < from_bits(all.highest)) floats[AMAX] = from_bits(all.highest);
    if (all.highest && from_bits(all.lowest + 1) < floats[AMIN]) floats[AMIN] = from_bits(all.lowest + 1);
    floats[SUM] += all.sum;
    floats[SUM_SQ] += all.sum_sq;
    make_keys(bits, n, keys);
    count_keys(keys, n, tables);
    for (int b = 0; b < 3; b++)
        if (want >> b & 1) block_bytes(keys, rows, columns, &blocks[b]);
    return 0;
}

/* What ordinary chunks counted, into the slot. */
static void store_keys(const tables_t *tables, int64_t *ints) {
    int64_t hist[KEYS] = {0};
    add_tables(tables, hist);
    ints[HIST] += hist[0];
    for (int k = 1; k < KEYS; k++) ints[HIST + KEY_TO_HIST + k] += hist[k];
}

static int64_t chunk_f64(const double *data, int64_t rows, int64_t columns, uint64_t start, int64_t *ints,
                         double *floats, blocks_t *blocks, int want) {
    uint16_t entries[CHUNK];
    int n = (int)(rows * columns);
    int64_t bad = 0;
    uint32_t words[2 * CHUNK];
    memcpy(words, data, (size_t)n * 8);
    ints[FINGERPRINT] = (int64_t)((uint64_t)ints[FINGERPRINT] + mix(words, 2 * n, 2 * start));
    for (int i = 0; i < n; i++) {
        double magnitude = fabs(data[i]);
        entries[i] = (uint16_t)account(data[i], ints, floats, &bad);
        ints[SUBNORMAL] += magnitude > 0 && magnitude < 0x1p-1022;
        ints[AT_MAX] += magnitude == 0x1.fffffffffffffp+1023;
    }
    for (int b = 0; b < 3; b++)
        if (want >> b & 1) block_words(entries, rows, columns, &blocks[b]);
    return bad;
}

/* Statistics of a contiguous piece of whole rows (or part of one row, cut at a multiple of 128).
 *   data     rows * columns elements of `dtype` (the order of dtype_t)
 *   start    logical index of the first one
 *   want     bit b: histogram blocks of BLOCK_SIZES[b]
 *   ints, floats   the slot's row
 * Returns the number of NaN and Inf. */
int64_t precdoctor_piece(const void *data, int32_t dtype, int64_t rows, int64_t columns, uint64_t start, int32_t want,
                         int64_t *ints, double *floats) {
    blocks_t blocks[3];
    tables_t tables;
    int64_t bad = 0;
    if (!table_ready) fill_tables();
    memset(&tables, 0, sizeof tables);
    for (int b = 0; b < 3; b++)
        if (want >> b & 1) memset(&blocks[b], 0, sizeof blocks[b]), blocks[b].size = BLOCK_SIZES[b];
    int64_t whole = columns < CHUNK ? CHUNK / columns : 1;
    for (int64_t r = 0; r < rows; r += whole) {
        int64_t count = rows - r < whole ? rows - r : whole;
        for (int64_t c = 0; c < columns; c += CHUNK) {
            int64_t length = columns - c < CHUNK ? columns - c : CHUNK;
            int64_t offset = r * columns + c;
            const char *from = (const char *)data + offset * width_of(dtype);
            bad += dtype == F64 ? chunk_f64((const double *)(const void *)from, count, length, start + (uint64_t)offset,
                                            ints, floats, blocks, want)
                                : chunk(from, dtype, count, length, start + (uint64_t)offset, ints, floats, &tables, blocks,
                                        want);
        }
    }
    for (int b = 0; b < 3; b++)
        if (want >> b & 1) store_blocks(&blocks[b], b, ints);
    store_keys(&tables, ints);
    return bad;
}

/* The columns that speak of the launch as a whole. */
void precdoctor_finish(int64_t numel, uint64_t seed, int64_t bad, int64_t *ints, int64_t *counter) {
    int64_t order = ++*counter;
    ints[NUMEL] += numel;
    ints[LAUNCHES]++;
    ints[FINGERPRINT] = (int64_t)((uint64_t)ints[FINGERPRINT] + seed);
    if (order < ints[ORDER]) ints[ORDER] = order;
    if (bad && order < ints[FIRST_BAD_ORDER]) ints[FIRST_BAD_ORDER] = order;
}

/* Both, for a contiguous tensor. */
void precdoctor_stat(const void *data, int32_t dtype, int64_t rows, int64_t columns, uint64_t seed, int32_t want,
                     int64_t *ints, double *floats, int64_t *counter) {
    int64_t bad = precdoctor_piece(data, dtype, rows, columns, 0, want, ints, floats);
    precdoctor_finish(rows * columns, seed, bad, ints, counter);
}

/* One chunk of an update: statistics of the stored difference, elements that did not change although they should have,
 * and exponent(intended) - exponent(weight) where both exist. */
static int64_t update_chunk(const uint32_t *restrict old_bits, const uint32_t *restrict new_bits,
                            const double *restrict intended, int n, uint64_t start, int64_t *ints, double *floats,
                            tables_t *tables) {
    float stored[CHUNK];
    int64_t unchanged = 0, *rel = ints + HIST + HIST_WIDTH;
    for (int i = 0; i < n; i++) stored[i] = from_bits(new_bits[i]) - from_bits(old_bits[i]);
    for (int i = 0; i < n; i++) {
        double step = fabs(intended[i]), weight = fabs((double)from_bits(old_bits[i]));
        if (!(step > 0.0 && step <= 0x1.fffffffffffffp+1023)) continue;
        unchanged += old_bits[i] == new_bits[i];
        if (!(weight > 0.0 && weight <= 0x1.fffffffffffffp+1023)) continue;
        int r = entry_of(step) - entry_of(weight) - REL_MIN;
        rel[r < 0 ? 0 : r > REL_MAX - REL_MIN ? REL_MAX - REL_MIN : r]++;
    }
    ints[UNCHANGED] += unchanged;
    return chunk(stored, F32, 1, n, start, ints, floats, tables, NULL, 0);
}

/* An update row, for a contiguous weight of at most 32 bits.
 *   before, after   n elements of `dtype`: the weight before and after the step
 *   intended        n elements of FP32 (wide = 0) or FP64 (wide = 1): what the optimizer meant to add
 * The stored difference is taken in FP32, and everything but the last two columns speaks of it as an FP32 tensor. */
void precdoctor_update(const void *before, const void *after, const void *intended, int32_t wide, int32_t dtype,
                       int64_t n, uint64_t seed, int64_t *ints, double *floats, int64_t *counter) {
    uint32_t old_bits[CHUNK], new_bits[CHUNK], words[CHUNK];
    double step[CHUNK];
    tables_t tables;
    int64_t bad = 0;
    memset(&tables, 0, sizeof tables);
    int size = width_of(dtype);
    if (!table_ready) fill_tables();
    for (int64_t at = 0; at < n; at += CHUNK) {
        int length = (int)(n - at < CHUNK ? n - at : CHUNK);
        load((const char *)before + at * size, dtype, length, old_bits, words);
        load((const char *)after + at * size, dtype, length, new_bits, words);
        for (int i = 0; i < length; i++)
            step[i] = wide ? ((const double *)intended)[at + i] : (double)((const float *)intended)[at + i];
        bad += update_chunk(old_bits, new_bits, step, length, (uint64_t)at, ints, floats, &tables);
    }
    store_keys(&tables, ints);
    precdoctor_finish(n, seed, bad, ints, counter);
}

/* What the loader checks before it trusts this library with a row: the layout it was compiled for. */
int64_t precdoctor_layout(void) { return INT_WIDTH; }
