/* The work on one tile after another, in plain C and vector extensions; the build compiles this file once per instruction
 * set (VARIANT names the function, -m flags choose the instructions). All variants give the same bits: the floating-point
 * sums use the same 16 lanes everywhere and no fused multiply-add (-ffp-contract=off).
 *
 * A tile of at most 2048 elements stays in L1 until it is finished. First it is scanned: fingerprint, sums, extremes, and
 * exponent keys as bytes (scan.h; with AVX2 and AVX-512 in one pass, so that computation overlaps with waiting for
 * memory). Then histograms of these bytes are counted (histogram.h). Classification is by integer bits, so
 * it does not depend on flush-to-zero modes. Rare content (NaN, Inf, FP32 subnormals, sums that could leave FP32's range)
 * is found from the tile's extremes; such a tile, and any of FP64, takes the second path, with 16-bit keys and sums in
 * FP64. */

#include "histogram.h"
#include "scan.h"

#include <math.h>

enum { WIDEST = 128 };

/* Largest finite value and smallest normal number of each dtype, as FP32 magnitude bits. */
static const uint32_t LARGEST[] = {0x7f7fffff, 0x477fe000, 0x7f7f0000, 0x43e00000, 0x47600000, 0x43700000, 0x47600000};
static const uint32_t SMALLEST_NORMAL[] = {0x00800000, 0x38800000, 0x00800000, 0x3c800000,
                                           0x38800000, 0x3c000000, 0x38000000};

/* ---- blocks ------------------------------------------------------------------------------------------------------- */

/* Computes for each block of `size` keys (0: no exponent) its largest key; and for each key its distance to that plus one,
 * at most BLOCK_BINS, but 0 for key 0. */
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
    switch (size) { /* a constant size lets the compiler vectorise the loops */
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

/* Returns the length of a tile's row after padding for blocks: blocks of any size then begin at multiples of their size,
 * and a block longer than the row is the whole row. */
static int padded_columns(int columns) {
    int width = 1;
    if (columns > WIDEST) return (columns + WIDEST - 1) / WIDEST * WIDEST;
    while (width < columns) width *= 2;
    return width;
}

static int64_t *block_row(int64_t *ints, int which) { return ints + BLOCKS + which * (BLOCK_WIDTH + HIST_WIDTH); }

/* Counts block histograms of rows x columns keys; the histogram entry of a key is key + shift. */
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

/* ---- the second path: 16-bit histogram entries ---------------------------------------------------------------------- */

/* Returns the histogram entry of FP32 magnitude bits; 0 for zero, Inf and NaN. */
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

/* Counts entries more than 254 binades apart, which do not fit bytes; slow and rare. */
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
    /* Compared as integers, because flush-to-zero modes would take FP64 subnormals for zeros. */
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

/* Adds the numbers of NaN and Inf to the slot and sets `bad`; `nan`, `pos` and `neg` are tests of element i. */
#define COUNT_BAD(n, nan, pos, neg)                                                                                    \
    int nans = 0, ups = 0, downs = 0;                                                                                  \
    for (int i = 0; i < n; i++) nans += (nan), ups += (pos), downs += (neg);                                           \
    state->ints[NOT_A_NUMBER] += nans;                                                                                 \
    state->ints[POS_INF] += ups;                                                                                       \
    state->ints[NEG_INF] += downs;                                                                                     \
    bad = nans + ups + downs;                                                                                          \
    state->bad += bad

/* Measures a tile with rare content. `all`: extremes of the bits, non-finite elements included. */
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

INLINE void add_fingerprint(uint64_t share, state_t *state) {
    state->ints[FINGERPRINT] = (int64_t)((uint64_t)state->ints[FINGERPRINT] + share);
}

/* Measures a tile of at most 32 bits per element. Adds its share of the fingerprint if `index`, that of the first element,
 * is given; then the elements must be neighbours in logical order. */
static void tile_f32(const void *data, dtype_t dtype, int rows, int columns, const uint64_t *index, int want,
                     state_t *state) {
    uint8_t keys[TILE + BYTES];
    uint32_t wide[TILE];
    int n = rows * columns;
    extremes_t all;
    const uint32_t *bits = scan_bits(data, dtype, n, wide);
    add_fingerprint(scan(data, bits, dtype, n, index, keys, &all), state);
    int subnormals = all.lowest != 0xffffffff && all.lowest + 1 < SMALLEST_NORMAL[dtype];
    int at_max = all.highest >= LARGEST[dtype];
    /* 2^54 and 2^-50: squares of 2048 such elements stay normal FP32 numbers. */
    int rare = all.highest && (all.highest > 0x5a800000 || all.highest < 0x26800000 || all.lowest + 1 < 0x00800000);
    if (!bits && (subnormals || at_max || rare)) bits = load(data, dtype, n, wide);
    if (subnormals) state->ints[SUBNORMAL] += count_between(bits, n, 1, SMALLEST_NORMAL[dtype] - 1);
    if (at_max) state->ints[AT_MAX] += count_between(bits, n, LARGEST[dtype], LARGEST[dtype]);
    if (rare) {
        rare_tile(bits, all, rows, columns, want, state);
        return;
    }
    merge_extremes(from_bits(all.highest), all.highest ? from_bits(all.lowest + 1) : INFINITY, state->floats);
    state->sum += all.sum;
    state->sum_sq += all.sum_sq;
    int top = all.highest ? key_of(all.highest) : 0;
    int nonzero = count_keys(keys, n, top - WINDOW + 1, -WINDOW, state->ints + HIST + KEY_TO_ENTRY, &state->spread[1]);
    state->ints[HIST] += n - nonzero;
    if (want) count_blocks(keys, rows, columns, KEY_TO_ENTRY, want, state);
}

/* ---- tiles of a tensor ------------------------------------------------------------------------------------------------ */

/* Copies a tile into contiguous memory, reading along the shorter stride. */
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

/* Computes the exponents of Adam's intended update, with the same roundings as torch.optim. */
static void adam_steps(const adam_t *adam, const uint32_t *restrict before, int64_t at, int n, uint16_t *restrict step) {
    const float *restrict first = adam->first + at, *restrict second = adam->second + at;
    float factor = adam->factor, root = adam->root, eps = adam->eps, decay = adam->decay, update[TILE];
    for (int i = 0; i < n; i++) update[i] = first[i] * factor / (sqrtf(second[i]) / root + eps);
    if (decay != 0.0f)
        for (int i = 0; i < n; i++) update[i] -= from_bits(before[i]) * decay;
    for (int i = 0; i < n; i++) step[i] = entry_of(to_bits(update[i]) & 0x7fffffff);
}

/* Measures the stored difference, elements unchanged despite an intended update, and exponent(intended) -
 * exponent(weight) if both exist. `at`: index of the first of n elements. */
static void update_tile(const subject_t *subject, int64_t at, int n, state_t *state) {
    dtype_t dtype = (dtype_t)subject->plan->dtype;
    uint32_t old_buffer[TILE], new_buffer[TILE], stored[TILE];
    uint16_t step[TILE], weight[TILE];
    uint8_t relative[TILE + BYTES], top = 0;
    const uint32_t *before = load(subject->data + at * width_of(dtype), dtype, n, old_buffer);
    const uint32_t *after = load(subject->after + at * width_of(dtype), dtype, n, new_buffer);
    if (subject->adam) {
        adam_steps(subject->adam, before, at, n, step);
    } else if (subject->wide) {
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
        int16_t r = (int16_t)(step[i] - weight[i]);
        r = r < REL_MIN ? REL_MIN : r;
        r = r > REL_MAX ? REL_MAX : r;
        relative[i] = (step[i] != 0) & (weight[i] != 0) ? (uint8_t)(r - REL_MIN + 1) : 0;
    }
    for (int i = 0; i < n; i++) top = relative[i] > top ? relative[i] : top;
    state->ints[UNCHANGED] += unchanged;
    count_keys(relative, n, top - WINDOW + 1, -WINDOW, state->ints + REL - 1, &state->spread[2]);
    uint64_t index = (uint64_t)at;
    tile_f32(stored, F32, 1, n, &index, 0, state);
}

static void value_tile(const plan_t *plan, const void *data, uint64_t index, int rows, int columns,
                       int fingerprint_only, state_t *state) {
    dtype_t dtype = (dtype_t)plan->dtype;
    int want = (int)plan->want, length = columns, lines = rows;
    uint64_t gathered[TILE];
    if (plan->column_stride != 1 || (rows > 1 && plan->row_stride != columns)) {
        gather(plan, data, rows, columns, gathered);
        data = gathered;
    }
    if (plan->row_pitch == columns) length *= rows, lines = 1;
    int apart = fingerprint_only || dtype == F64 || lines > 1;
    for (int r = 0; apart && r < lines; r++) {
        const char *line = (const char *)data + r * length * width_of(dtype);
        add_fingerprint(mix(line, dtype, length, index + (uint64_t)(r * plan->row_pitch)), state);
    }
    if (fingerprint_only) return;
    if (dtype == F64) tile_f64(data, rows, columns, want, state);
    else tile_f32(data, dtype, rows, columns, apart ? NULL : &index, want, state);
}

/* ---- amax and sum of squares of every step -------------------------------------------------------------------------- */

/* Sums are in FP64, whose range holds the squares of FP32 numbers. */
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

#ifdef __AVX2__

/* Adds the squares of sixteen elements to four registers of four doubles. */
INLINE void add_squares(const float *from, __m256d squares[4]) {
    for (int j = 0; j < 4; j++) {
        __m256d value = _mm256_cvtps_pd(_mm_loadu_ps(from + 4 * j));
        squares[j] = _mm256_add_pd(squares[j], _mm256_mul_pd(value, value));
    }
}

/* The two loops of the other branch as one, with a prefetch, because memory is the bottleneck here. Returns the number of
 * elements read. */
INLINE int look_at_sixteens(const uint32_t *bits, int n, uint32_t *highest, double *squares) {
    __m256i top[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    __m256d sums[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()};
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        __builtin_prefetch((const char *)(bits + i) + AHEAD);
        for (int j = 0; j < 2; j++) {
            __m256i eight = _mm256_loadu_si256((const __m256i *)(const void *)(bits + i + 8 * j));
            top[j] = _mm256_max_epu32(top[j], _mm256_and_si256(eight, magnitude));
        }
        add_squares((const float *)(const void *)(bits + i), sums);
    }
    memcpy(highest, top, sizeof top);
    memcpy(squares, sums, sizeof sums);
    return i;
}

#else

/* Two loops, because compilers do not vectorise one loop over numbers of two widths. */
static int look_at_sixteens(const uint32_t *restrict bits, int n, uint32_t *restrict highest, double *restrict squares) {
    int whole = n / LANES * LANES;
    for (int i = 0; i < whole; i += LANES)
        for (int j = 0; j < LANES; j++) {
            uint32_t magnitude = bits[i + j] & 0x7fffffff;
            highest[j] = magnitude > highest[j] ? magnitude : highest[j];
        }
    for (int i = 0; i < whole; i += LANES)
        for (int j = 0; j < LANES; j++) {
            double value = (double)from_bits(bits[i + j]);
            squares[j] += value * value;
        }
    return whole;
}

#endif

static uint32_t look_f32(const uint32_t *bits, int n, double *sum_sq) {
    uint32_t highest[LANES] = {0}, top = 0;
    double squares[LANES] = {0};
    for (int i = look_at_sixteens(bits, n, highest, squares); i < n; i++) {
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

/* Measures tiles first .. end - 1 of the subject. */
void VARIANT(const subject_t *subject, int64_t first, int64_t end, state_t *state) {
    const plan_t *plan = subject->plan;
    int across = plan->row_stride < plan->column_stride;
    for (int64_t tile = first; tile < end; tile++) {
        /* Iterates in the direction in which the next tile is closer in memory, for its cache lines and pages. */
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
            value_tile(plan, subject->data + offset * width_of((dtype_t)plan->dtype), (uint64_t)index, (int)rows,
                       (int)columns, subject->fingerprint_only, state);
    }
}
