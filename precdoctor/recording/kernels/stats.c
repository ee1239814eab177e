/* The CPU kernel: every statistic of a tensor in one pass over memory, wherever its strides lead. Same results as
 * reference.py, against which it is tested; row_layout.py defines the columns.
 *
 * This file holds the C ABI, the choice of instructions and the threads; variant.c does the work.
 *
 * C11 and a C ABI: no Python, no torch. Nothing is allocated. Threads are those of the OpenMP runtime torch has loaded, by
 * its GOMP_parallel (GCC's, LLVM's and Intel's runtimes all export it); without it, or with `threads` < 2, none are used. */

#include "stats.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

/* Sums are rounded per shard and added in the order of shards, so that they do not depend on the number of threads. */
enum { MAX_SHARDS = 64, SHARD = 64 * 1024 };

typedef void parallel_t(void (*body)(void *), void *argument, unsigned threads, unsigned flags);
static parallel_t *parallel;
static measure_tiles_t *measure_tiles;
static look_at_t *look_at;

/* Selects a variant: 0 the best one this processor supports, else 1 baseline, 2 AVX2, 3 AVX-512. Returns the one that is
 * used from now on: a lower one if the processor, or the compiler (it built PRECDOCTOR_LEVELS of them), lacks it. */
int32_t precdoctor_choose(int32_t level) {
    int32_t best = 1;
    measure_tiles_t *variants[] = {
        precdoctor_tiles_baseline,
#if PRECDOCTOR_LEVELS > 1
        precdoctor_tiles_avx2,
#endif
#if PRECDOCTOR_LEVELS > 2
        precdoctor_tiles_avx512,
#endif
    };
    look_at_t *looks[] = {
        precdoctor_tiles_baseline_look,
#if PRECDOCTOR_LEVELS > 1
        precdoctor_tiles_avx2_look,
#endif
#if PRECDOCTOR_LEVELS > 2
        precdoctor_tiles_avx512_look,
#endif
    };
#if PRECDOCTOR_LEVELS > 1
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") /* and so F16C */) best = 2;
#endif
#if PRECDOCTOR_LEVELS > 2
    /* VBMI, BITALG, GFNI: since Ice Lake and Zen 4. Older processors slow down under AVX-512, so they use AVX2. */
    if (best == 2 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd") &&
        __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bitalg") && __builtin_cpu_supports("gfni"))
        best = 3;
#endif
    if (level > 0 && level < best) best = level;
    measure_tiles = variants[best - 1];
    look_at = looks[best - 1];
    return best;
}

/* The address of GOMP_parallel, or NULL. */
void precdoctor_use_threads(parallel_t *address) { parallel = address; }

typedef struct {
    const subject_t *subject;
    int64_t shards, next, bad;
    int64_t *ints;
    double *floats;
    double sums[MAX_SHARDS][2];
    char busy; /* guards ints, floats and bad */
} job_t;

static void run_shards(job_t *job, state_t *state) {
    int64_t tiles = job->subject->plan->tiles, shard;
    while ((shard = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->shards) {
        state->sum = state->sum_sq = 0.0;
        measure_tiles(job->subject, tiles * shard / job->shards, tiles * (shard + 1) / job->shards, state);
        job->sums[shard][0] = state->sum;
        job->sums[shard][1] = state->sum_sq;
    }
}

/* The body of one of several threads: counts in a private row and merges it at the end. */
static void run_apart(void *argument) {
    job_t *job = argument;
    int64_t ints[INT_WIDTH] = {0};
    double floats[FLOAT_WIDTH] = {-INFINITY, INFINITY, 0.0, 0.0};
    state_t state = {.ints = ints, .floats = floats};
    run_shards(job, &state);
    while (__atomic_test_and_set(&job->busy, __ATOMIC_ACQUIRE)) {}
    for (int i = 0; i < INT_WIDTH; i++) job->ints[i] = (int64_t)((uint64_t)job->ints[i] + (uint64_t)ints[i]);
    if (floats[AMAX] > job->floats[AMAX]) job->floats[AMAX] = floats[AMAX];
    if (floats[AMIN] < job->floats[AMIN]) job->floats[AMIN] = floats[AMIN];
    job->bad += state.bad;
    __atomic_clear(&job->busy, __ATOMIC_RELEASE);
}

/* Measures all tiles; leaves the sums in the job, and everything else in ints and floats. */
static void run(job_t *job, const subject_t *subject, int64_t *ints, double *floats, int32_t threads) {
    const plan_t *plan = subject->plan;
    int64_t shards = (plan->numel + SHARD - 1) / SHARD;
    if (shards > MAX_SHARDS) shards = MAX_SHARDS;
    if (shards > plan->tiles) shards = plan->tiles;
    job->subject = subject, job->shards = shards, job->next = 0, job->bad = 0, job->busy = 0;
    job->ints = ints, job->floats = floats;
    if (threads > 1 && shards > 1 && parallel) {
        parallel(run_apart, job, (unsigned)threads, 0);
    } else {
        state_t state = {.ints = ints, .floats = floats};
        run_shards(job, &state);
        job->bad = state.bad;
    }
}

/* Adds the columns of the launch as a whole to a slot. */
static void note_launch(int64_t *ints, int64_t *counter, int64_t numel, uint64_t fingerprint, int64_t bad) {
    int64_t order = ++*counter;
    ints[NUMEL] += numel;
    ints[LAUNCHES]++;
    ints[FINGERPRINT] = (int64_t)((uint64_t)ints[FINGERPRINT] + fingerprint);
    if (order < ints[ORDER]) ints[ORDER] = order;
    if (bad && order < ints[FIRST_BAD_ORDER]) ints[FIRST_BAD_ORDER] = order;
}

static void measure(const subject_t *subject, int64_t *ints, double *floats, int64_t *counter, int32_t threads) {
    job_t job;
    run(&job, subject, ints, floats, threads);
    for (int64_t s = 0; s < job.shards; s++) floats[SUM] += job.sums[s][0], floats[SUM_SQ] += job.sums[s][1];
    note_launch(ints, counter, subject->plan->numel, subject->plan->seed, job.bad);
}

/* Adds the statistics of a tensor to a slot.
 *   data     its first element
 *   plan     its dtype and shape, as native_cpu.py lays them out
 *   ints, floats, counter   the slot's row and the device's launch counter */
void precdoctor_stat(const void *data, const plan_t *plan, int64_t *ints, double *floats, int64_t *counter,
                     int32_t threads) {
    subject_t subject = {.plan = plan, .data = data};
    measure(&subject, ints, floats, counter, threads);
}

/* A hash of a few bytes from all over a contiguous tensor of at least 4096 bytes. If it differs from that of another
 * tensor, there is no need to compare fingerprints. */
uint64_t precdoctor_sample(const void *data, int64_t bytes) {
    enum { SAMPLES = 13 };
    uint64_t sample = 0, word;
    for (int i = 0; i < SAMPLES; i++) {
        memcpy(&word, (const char *)data + (bytes - 8) / (SAMPLES - 1) * i, sizeof word);
        sample = (sample ^ word) * 0x9e3779b97f4a7c15u;
        sample ^= sample >> 29;
    }
    return sample;
}

/* precdoctor_stat by copying the row of a slot that holds an equal tensor, as when a module returns its input. The
 * fingerprint of the current memory decides, so it does not matter who has written to the memory since.
 *   bytes, sample   bytes of a contiguous tensor; the result of precdoctor_sample for the tensor in that slot
 *   from_ints, from_floats   that slot's row, of a single launch with the same plan
 * Returns 0, with nothing done, if the tensors differ. */
int32_t precdoctor_again(const void *data, const plan_t *plan, int64_t *ints, double *floats, int64_t *counter,
                         int32_t threads, int64_t bytes, uint64_t sample, const int64_t *from_ints,
                         const double *from_floats) {
    if (from_ints[LAUNCHES] != 1 || from_ints[NUMEL] != plan->numel || ints == from_ints) return 0;
    if (precdoctor_sample(data, bytes) != sample) return 0;
    int64_t apart[INT_WIDTH] = {0};
    double unused[FLOAT_WIDTH] = {0};
    subject_t subject = {.plan = plan, .data = data, .fingerprint_only = 1};
    job_t job;
    run(&job, &subject, apart, unused, threads);
    uint64_t fingerprint = (uint64_t)apart[FINGERPRINT] + plan->seed;
    if (fingerprint != (uint64_t)from_ints[FINGERPRINT]) return 0;
    for (int i = SUBNORMAL; i < INT_WIDTH; i++) /* the skipped columns belong to updates and casts */
        if (i != FINGERPRINT && i != UNCHANGED && (i < REL || i >= BLOCKS)) ints[i] += from_ints[i];
    if (from_floats[AMAX] > floats[AMAX]) floats[AMAX] = from_floats[AMAX];
    if (from_floats[AMIN] < floats[AMIN]) floats[AMIN] = from_floats[AMIN];
    floats[SUM] += from_floats[SUM], floats[SUM_SQ] += from_floats[SUM_SQ];
    int64_t bad = from_ints[NOT_A_NUMBER] + from_ints[POS_INF] + from_ints[NEG_INF];
    note_launch(ints, counter, plan->numel, fingerprint, bad);
    return 1;
}

/* Adds an update row, for a contiguous weight of at most 32 bits.
 *   before, after   the weight before and after the step, laid out as in `plan`: one row
 *   intended        the intended update, FP32 (wide = 0) or FP64 (wide = 1)
 * The stored difference is taken in FP32; all columns but UNCHANGED and REL are the statistics of this FP32 tensor. */
void precdoctor_update(const void *before, const void *after, const void *intended, int32_t wide, const plan_t *plan,
                       int64_t *ints, double *floats, int64_t *counter, int32_t threads) {
    subject_t subject = {.plan = plan, .data = before, .after = after, .intended = intended, .wide = wide};
    measure(&subject, ints, floats, counter, threads);
}

/* precdoctor_update with Adam's intended update, which is computed on the fly instead of stored.
 *   first, second   Adam's FP32 moments, laid out like the weight
 *   terms           factor, root, eps, decay of adam_t */
void precdoctor_adam(const void *before, const void *after, const float *first, const float *second, const float *terms,
                     const plan_t *plan, int64_t *ints, double *floats, int64_t *counter, int32_t threads) {
    adam_t adam = {first, second, terms[0], terms[1], terms[2], terms[3]};
    subject_t subject = {.plan = plan, .data = before, .after = after, .adam = &adam};
    measure(&subject, ints, floats, counter, threads);
}

typedef struct {
    const char *data;
    dtype_t dtype;
    int64_t numel, width, shards, next;
    look_t found[MAX_SHARDS];
} glance_t;

static void look_at_shards(void *argument) {
    glance_t *job = argument;
    int64_t tiles = (job->numel + TILE - 1) / TILE, shard;
    while ((shard = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->shards) {
        int64_t first = tiles * shard / job->shards * TILE, end = tiles * (shard + 1) / job->shards * TILE;
        if (end > job->numel) end = job->numel;
        job->found[shard] = look_at(job->data + first * job->width, job->dtype, end - first);
    }
}

/* The check of every step: merges amax and sum of squares of `count` pieces of memory of one dtype, given by their
 * addresses and numbers of elements, into out[0] and out[1]. amax is NaN or Inf exactly if an element is. One thread
 * reads a piece of fewer than `alone` elements. */
void precdoctor_look(const int64_t *data, const int64_t *numel, int64_t count, int32_t dtype, double *out,
                     int32_t threads, int64_t alone) {
    int64_t width = width_of((dtype_t)dtype);
    for (int64_t p = 0; p < count; p++) {
        glance_t job = {.data = (const char *)(intptr_t)data[p], .dtype = (dtype_t)dtype, .numel = numel[p]};
        job.width = width, job.shards = (job.numel + SHARD - 1) / SHARD;
        if (job.shards > MAX_SHARDS) job.shards = MAX_SHARDS;
        if (threads > 1 && job.numel >= alone && parallel) parallel(look_at_shards, &job, (unsigned)threads, 0);
        else look_at_shards(&job);
        for (int64_t s = 0; s < job.shards; s++) {
            if (job.found[s].amax > out[0] || job.found[s].amax != job.found[s].amax) out[0] = job.found[s].amax;
            out[1] += job.found[s].sum_sq;
        }
    }
}

/* The number that the loader checks before it passes a row to this library: entry points, layout of the row and size of
 * the plan. */
int64_t precdoctor_layout(void) { return (ABI * 10000 + INT_WIDTH) * 1000 + (int64_t)(sizeof(plan_t) / 8); }
