/* Histograms of bytes. Nearly all exponents of a tile lie in a few neighbouring binades: this window is counted many keys
 * at a time, keys outside of it one by one or, if there are many, in interleaved tables (a single one would stall on
 * store forwarding). */

#ifndef PRECDOCTOR_HISTOGRAM_H
#define PRECDOCTOR_HISTOGRAM_H

#include "widen.h"

#ifdef __AVX512VBMI__
enum { BYTES = 64, WINDOW = 16, FEW = 32 };
#elif defined __AVX2__
enum { BYTES = 32, WINDOW = 16, FEW = 128 };
#else
enum { BYTES = 16, WINDOW = 8, FEW = 32 };
#endif
enum { TABLES = 8 };
typedef uint8_t bytes_t __attribute__((vector_size(BYTES)));

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

/* Returns one bit per byte of a comparison's result. */
INLINE uint64_t mask_of(bytes_t v) {
    uint64_t mask = 0;
#ifdef __SSE2__
    __m128i part[BYTES / 16];
    memcpy(part, &v, BYTES);
    for (int i = 0; i < BYTES / 16; i++) mask |= (uint64_t)(uint32_t)_mm_movemask_epi8(part[i]) << 16 * i;
#else
    for (int i = 0; i < BYTES; i++) mask |= (uint64_t)(v[i] & 1) << i;
#endif
    return mask;
}

/* ---- a window ------------------------------------------------------------------------------------------------------ */

/* Sets counts[j] to how often first + j occurs among n keys, a multiple of BYTES. Returns how often 0 occurs. */
#ifdef __AVX512VBMI__

/* Adds to each byte j of `counts`' groups of eight how many of a group's keys a table gives bit j. */
INLINE __m512i count_bits(__m512i counts, __m512i table, __m512i places) {
    /* This affine product of the identity with eight bytes, read as a bit matrix, transposes the matrix. */
    const __m512i identity = _mm512_set1_epi64((long long)0x8040201008040201);
    __m512i bits = _mm512_gf2p8affine_epi64_epi8(identity, _mm512_shuffle_epi8(table, places), 0);
    return _mm512_add_epi8(counts, _mm512_popcnt_epi8(bits));
}

INLINE __m128i sum_of_groups(__m512i counts) {
    const __m512i zero = _mm512_setzero_si512();
    __m512i wide = _mm512_add_epi16(_mm512_unpacklo_epi8(counts, zero), _mm512_unpackhi_epi8(counts, zero));
    __m256i half = _mm256_add_epi16(_mm512_castsi512_si256(wide), _mm512_extracti64x4_epi64(wide, 1));
    return _mm_add_epi16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

static int count_places(const uint8_t *keys, int n, int first, uint16_t *counts) {
    enum { AT_ONCE = 31 * BYTES }; /* eights: no byte overflows */
    const __m128i one_bit = _mm_setr_epi8(1, 2, 4, 8, 16, 32, 64, -128, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m512i lower = _mm512_broadcast_i32x4(one_bit), upper = _mm512_broadcast_i32x4(_mm_slli_si128(one_bit, 8));
    const __m512i base = _mm512_set1_epi8((char)first), reach = _mm512_set1_epi8(0x70);
    __m128i low = _mm_setzero_si128(), high = low;
    int zeros = 0;
    for (int from = 0; from < n; from += AT_ONCE) {
        __m512i lows = _mm512_setzero_si512(), highs = lows;
        for (int i = from; i < n && i < from + AT_ONCE; i += BYTES) {
            /* Places from 16 up get the sign bit, for which a shuffle returns 0. */
            __m512i key = _mm512_loadu_si512(keys + i), places = _mm512_adds_epu8(_mm512_sub_epi8(key, base), reach);
            lows = count_bits(lows, lower, places);
            highs = count_bits(highs, upper, places);
            zeros += __builtin_popcountll(_mm512_testn_epi8_mask(key, key));
        }
        low = _mm_add_epi16(low, sum_of_groups(lows));
        high = _mm_add_epi16(high, sum_of_groups(highs));
    }
    memcpy(counts, &low, sizeof low);
    memcpy(counts + 8, &high, sizeof high);
    return zeros;
}

#elif defined __AVX2__

/* A table gives each key one bit of a byte, and 256 numbers count one bit of a register each: 32 lanes times eight bits.
 * Each binary digit of the numbers has a register of its own, and eight registers are added at a time by full adders
 * (Harley and Seal's population count). Then the lanes are summed. */
enum { GROUP = 8 * BYTES, AT_ONCE = 8 * GROUP };

typedef struct {
    __m256i ones, twos, fours;
} numbers_t;

/* Adds two bits to a digit; returns the carry. */
INLINE __m256i add_two(__m256i *digit, __m256i b, __m256i c) {
    __m256i a = *digit, either = _mm256_xor_si256(a, b);
    *digit = _mm256_xor_si256(either, c);
    return _mm256_or_si256(_mm256_and_si256(a, b), _mm256_and_si256(either, c));
}

/* Adds eight bits to each number; returns the carry, which counts eights. */
INLINE __m256i add_eight(numbers_t *to, const __m256i bits[8]) {
    __m256i two[4], four[2];
    for (int i = 0; i < 4; i++) two[i] = add_two(&to->ones, bits[2 * i], bits[2 * i + 1]);
    for (int i = 0; i < 2; i++) four[i] = add_two(&to->twos, two[2 * i], two[2 * i + 1]);
    return add_two(&to->fours, four[0], four[1]);
}

INLINE __m256i look_up_eight(numbers_t *to, __m256i table, const __m256i places[8]) {
    __m256i bits[8];
    for (int i = 0; i < 8; i++) bits[i] = _mm256_shuffle_epi8(table, places[i]);
    return add_eight(to, bits);
}

/* Returns one digit of the numbers of bits j and j + 4, in its place in the lower and upper four bits of each byte. */
INLINE __m256i digit_at(__m256i digit, int which, int j) {
    int left = which - j;
    digit = left < 0 ? _mm256_srli_epi16(digit, -left) : _mm256_slli_epi16(digit, left);
    return _mm256_and_si256(digit, _mm256_set1_epi8((char)(0x11 << which)));
}

INLINE __m256i or_three(__m256i a, __m256i b, __m256i c) { return _mm256_or_si256(_mm256_or_si256(a, b), c); }

/* Sets counts[j] to the sum of the 32 numbers of bit j, plus eight times `eights`. */
INLINE void sum_numbers(numbers_t low, const __m256i eights[8], uint16_t counts[8]) {
    const __m256i half = _mm256_set1_epi8(0x0f), zero = _mm256_setzero_si256();
    numbers_t high = {zero, zero, zero};
    __m256i top = add_eight(&high, eights), sums[2] = {zero, zero};
    for (int j = 3; j >= 0; j--) {
        __m256i few = or_three(digit_at(low.ones, 0, j), digit_at(low.twos, 1, j), digit_at(low.fours, 2, j));
        __m256i many = or_three(digit_at(high.twos, 0, j), digit_at(high.fours, 1, j), digit_at(top, 2, j));
        few = _mm256_or_si256(few, digit_at(high.ones, 3, j));
        __m256i here = _mm256_or_si256(_mm256_and_si256(few, half), _mm256_slli_epi16(_mm256_and_si256(many, half), 4));
        few = _mm256_srli_epi16(few, 4);
        __m256i there = _mm256_or_si256(_mm256_and_si256(few, half), _mm256_andnot_si256(half, many));
        sums[0] = _mm256_or_si256(_mm256_slli_epi64(sums[0], 16), _mm256_sad_epu8(here, zero));
        sums[1] = _mm256_or_si256(_mm256_slli_epi64(sums[1], 16), _mm256_sad_epu8(there, zero));
    }
    __m256i both = _mm256_add_epi16(_mm256_unpacklo_epi64(sums[0], sums[1]), _mm256_unpackhi_epi64(sums[0], sums[1]));
    __m128i all = _mm_add_epi16(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    memcpy(counts, &all, sizeof all);
}

INLINE __m256i place_of(__m256i key, __m256i first, __m256i *zeros) {
    *zeros = _mm256_sub_epi8(*zeros, _mm256_cmpeq_epi8(key, _mm256_setzero_si256()));
    /* Places from 16 up get the sign bit, for which a shuffle returns 0. */
    return _mm256_adds_epu8(_mm256_sub_epi8(key, first), _mm256_set1_epi8(0x70));
}

/* Returns the places of a group's first n keys; places of other keys are out of range and not counted. */
INLINE void find_places(const uint8_t *keys, int n, __m256i first, __m256i places[8], __m256i *zeros) {
    for (int j = 0; j < 8; j++)
        places[j] = j * BYTES < n ? place_of((__m256i)bytes_at(keys + j * BYTES), first, zeros) : _mm256_set1_epi8(-1);
}

static int count_at_once(const uint8_t *keys, int n, int first, uint16_t *counts) {
    const __m128i one_bit = _mm_setr_epi8(1, 2, 4, 8, 16, 32, 64, -128, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m256i lower = _mm256_broadcastsi128_si256(one_bit), zero = _mm256_setzero_si256();
    const __m256i upper = _mm256_broadcastsi128_si256(_mm_slli_si128(one_bit, 8)), base = _mm256_set1_epi8((char)first);
    numbers_t lows = {zero, zero, zero}, highs = lows;
    __m256i places[8], low_eights[8], high_eights[8], zeros = zero;
    int group = 0;
    for (; group * GROUP < n; group++) {
        const uint8_t *from = keys + group * GROUP;
        if (n - group * GROUP >= GROUP) find_places(from, GROUP, base, places, &zeros);
        else find_places(from, n - group * GROUP, base, places, &zeros);
        low_eights[group] = look_up_eight(&lows, lower, places);
        high_eights[group] = look_up_eight(&highs, upper, places);
    }
    for (; group < 8; group++) low_eights[group] = high_eights[group] = zero;
    sum_numbers(lows, low_eights, counts);
    sum_numbers(highs, high_eights, counts + 8);
    return sum_of((bytes_t)zeros);
}

static int count_places(const uint8_t *keys, int n, int first, uint16_t *counts) {
    int zeros = count_at_once(keys, n < AT_ONCE ? n : AT_ONCE, first, counts);
    for (int i = AT_ONCE; i < n; i += AT_ONCE) {
        uint16_t more[WINDOW];
        zeros += count_at_once(keys + i, n - i < AT_ONCE ? n - i : AT_ONCE, first, more);
        for (int j = 0; j < WINDOW; j++) counts[j] = (uint16_t)(counts[j] + more[j]);
    }
    return zeros;
}

#else

static int count_places(const uint8_t *keys, int n, int first, uint16_t *counts) {
    bytes_t totals[WINDOW], target[WINDOW], zeros = all_of(0);
    for (int j = 0; j < WINDOW; j++) totals[j] = all_of(0), target[j] = all_of(first + j);
    for (int i = 0; i < n; i += BYTES) { /* at most 144 times: no byte overflows */
        bytes_t key = bytes_at(keys + i);
        for (int j = 0; j < WINDOW; j++) totals[j] -= (bytes_t)(key == target[j]);
        zeros -= (bytes_t)(key == 0);
    }
    for (int j = 0; j < WINDOW; j++) counts[j] = (uint16_t)sum_of(totals[j]);
    return sum_of(zeros);
}

#endif

/* Adds to out[] how often each of first .. first + WINDOW - 1 below `end` occurs. Returns the sum; *zeros receives the
 * number of zeros. 1 <= first <= 256 - WINDOW, so that no zero looks like a key of the window. */
static int count_window(const uint8_t *keys, int n, int first, int end, int64_t *out, int *zeros) {
    uint16_t counts[WINDOW];
    int total = 0;
    *zeros = count_places(keys, n, first, counts);
    for (int j = 0; j < WINDOW && first + j < end; j++) {
        if (counts[j]) out[first + j] += counts[j]; /* out[] may be shorter than the window */
        total += counts[j];
    }
    return total;
}

/* ---- all keys ------------------------------------------------------------------------------------------------------ */

/* Adds to out[] how often each key outside low .. high occurs. */
static void count_outside(const uint8_t *keys, int n, int low, int high, int64_t *out) {
    bytes_t base = all_of(low), span = all_of(high - low);
    for (int i = 0; i < n; i += BYTES) {
        bytes_t key = bytes_at(keys + i);
        uint64_t mask = mask_of((bytes_t)((key - base) > span) & (bytes_t)(key != 0));
        for (; mask; mask &= mask - 1) out[keys[i + __builtin_ctzll(mask)]]++;
    }
}

/* Adds to out[] how often each key occurs, over interleaved tables. Returns the number of non-zero keys. */
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
    while (top && !table[0][top]) top--; /* out[] may be shorter than a table */
    for (int k = 1; k <= top; k++) out[k] += table[0][k];
    return n - table[0][0];
}

/* Adds to out[1 .. 255] how often each non-zero key occurs; returns the number of non-zero keys.
 *   keys    n keys, with room for zeros after them up to a multiple of BYTES
 *   first   first key of the window that holds most keys
 *   on      offset of a second window: +WINDOW or -WINDOW
 *   spread  number of coming calls that skip the windows, because keys were too far apart */
static int count_keys(uint8_t *keys, int n, int first, int on, int64_t *out, uint8_t *spread) {
    int padded = (n + BYTES - 1) / BYTES * BYTES;
    memset(keys + n, 0, (size_t)(padded - n));
    if (*spread) {
        --*spread;
        return count_all(keys, padded, out);
    }
    if (first < 1) first = 1;
    int low = first, high = first + WINDOW - 1, zeros, unused;
    int left = padded - count_window(keys, padded, first, 256, out, &zeros) - zeros;
    if (left > n / FEW) { /* counting many keys one by one costs an unpredictable branch each */
        int second = first + on < 1 ? 1 : first + on;
        left -= count_window(keys, padded, second, on < 0 ? first : 256, out, &unused);
        low = second < low ? second : low;
        high = second > first ? second + WINDOW - 1 : high;
    }
    if (left > n / 8) *spread = 15;
    if (left) count_outside(keys, padded, low, high, out);
    return padded - zeros;
}

#endif
