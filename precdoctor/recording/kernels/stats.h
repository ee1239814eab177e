/* Shared by stats.c (entry points, threads) and variant.c (the work, compiled once per instruction set). The numbers
 * repeat row_layout.py. */

#ifndef PRECDOCTOR_STATS_H
#define PRECDOCTOR_STATS_H

#include <stdint.h>

/* Incremented whenever an entry point is added or changed. */
enum { ABI = 6 };
enum {
    NUMEL, LAUNCHES, ORDER, FIRST_BAD_ORDER, SUBNORMAL, AT_MAX, UNCHANGED, FINGERPRINT, NOT_A_NUMBER, POS_INF, NEG_INF,
    HIST
};
enum { EXP_MIN = -160, EXP_MAX = 160, HIST_WIDTH = 1 + EXP_MAX - EXP_MIN + 1 };
enum { REL_MIN = -64, REL_MAX = 63, REL_WIDTH = REL_MAX - REL_MIN + 2 };
enum { REL = HIST + HIST_WIDTH, BLOCK_BINS = 64, BLOCK_WIDTH = BLOCK_BINS + 1, BLOCKS = REL + REL_WIDTH };
enum { BLOCK_SIZES = 3, INT_WIDTH = BLOCKS + BLOCK_SIZES * (BLOCK_WIDTH + HIST_WIDTH) };
enum { AMAX, AMIN, SUM, SUM_SQ, FLOAT_WIDTH };

/* The order of CODES in native_cpu.py. */
typedef enum { F32, F16, BF16, F8_E4M3FN, F8_E5M2, F8_E4M3FNUZ, F8_E5M2FNUZ, F64 } dtype_t;

/* Bytes per element. */
static inline int width_of(dtype_t dtype) {
    return dtype == F64 ? 8 : dtype == F32 ? 4 : dtype == F16 || dtype == BF16 ? 2 : 1;
}

/* Maximum elements of a tile: as FP32 they fill a quarter of an L1 cache. */
enum { TILE = 2048, MAX_OUTER = 8 };

/* How to iterate over a tensor, written by _pack in native_cpu.py. Elements are visited in tiles of tile_rows x
 * tile_columns along two of its dimensions: the last one, along which blocks run, and the one that is closest in memory
 * among the others. Strides count elements of memory, pitches elements in logical order. */
typedef struct {
    int64_t dtype, want; /* want, bit b: histogram blocks of 16, 32, 128 */
    int64_t numel;
    uint64_t seed; /* of the fingerprint */
    int64_t columns, column_stride;
    int64_t rows, row_stride, row_pitch;
    int64_t tile_rows, tile_columns, row_tiles, column_tiles, tiles;
    int64_t outer; /* number of further dimensions, outermost first */
    int64_t size[MAX_OUTER], stride[MAX_OUTER], pitch[MAX_OUTER];
} plan_t;

/* Adam's intended update, in FP32: first * factor / (sqrt(second) / root + eps) - weight * decay. */
typedef struct {
    const float *first, *second;
    float factor, root, eps, decay;
} adam_t;

/* The data to measure: a tensor, or (after != NULL) an update of a contiguous one. */
typedef struct {
    const plan_t *plan;
    const char *data;
    const char *after;     /* the weight after the step */
    const char *intended;  /* the intended update: FP32, or FP64 if wide */
    const adam_t *adam;    /* or the terms to compute it from */
    int wide;
    int fingerprint_only;
} subject_t;

/* The counters of one thread. The sums are those of one shard: their rounding then does not depend on which thread took
 * which shard. */
typedef struct {
    int64_t *ints; /* a slot's row, or a private one to be merged */
    double *floats;
    double sum, sum_sq;
    int64_t bad;
    uint8_t spread[2 + BLOCK_SIZES]; /* per histogram: number of coming tiles for which no window is tried */
} state_t;

typedef void measure_tiles_t(const subject_t *subject, int64_t first, int64_t end, state_t *state);

/* Amax of n contiguous elements, finite exactly if all elements are, and the sum of their squares. */
typedef struct {
    double amax, sum_sq;
} look_t;

typedef look_t look_at_t(const char *data, dtype_t dtype, int64_t n);

measure_tiles_t precdoctor_tiles_baseline, precdoctor_tiles_avx2, precdoctor_tiles_avx512;
look_at_t precdoctor_tiles_baseline_look, precdoctor_tiles_avx2_look, precdoctor_tiles_avx512_look;

#endif
