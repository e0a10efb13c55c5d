/* Blocks of floats as codes of eight bits and a scale. codes.py says what the codes are, and brings the numbers of the maps.

   The upper half of a float decides its code. Loops are written so that compilers keep halves in lanes of 16 bits, of which a
   vector has most. (Where a compiler knows the bends it adds constants up, and does not see the averages any more.) */

#include "kernels.h"
#include <string.h>

/* A float has MANTISSA bits of its place in a binade, of which 2^FINENESS steps are made. Its upper half begins at bit HALF. */
enum { MANTISSA = 23, BIAS = 127, FINENESS = 4, HALF = 16, STEP = MANTISSA - FINENESS - HALF };
enum { ONE = BIAS << (MANTISSA - HALF), TOP = 0x7fff }; /* halves of 1.0, and above those of all floats */

/* Shares are measured by how far below TOP they are. Averages with a bend make one step of two, and are rounded up as the whole
   is, so that it is rounded once. */
INLINE void encode(
    const float *restrict values, int64_t numel, const Map *map, int is_signed, float scale, uint8_t *restrict codes
) {
    const int highest = is_signed ? 127 : 255, offset = TOP - ONE;
    uint16_t bends[BENDS];
    for (int b = 0; b < BENDS; b++) bends[b] = (map->bends[b] << STEP) + offset;
    const uint16_t most = ((highest - 1) << STEP) + offset, zero = (map->zero_binades << (MANTISSA - HALF)) + offset;
    const uint16_t rounding = 128; /* any in [0, 256) rounds, but not to the nearest */
    const uint16_t above = (highest << 8) + rounding + (offset << (8 - STEP));
    for (int64_t i = 0; i < numel; i++) {
        const uint16_t half = bits_of(values[i] / scale) >> HALF, distance = ~half & TOP;
        uint16_t below = distance;
        for (int b = 0; b < BENDS; b++) {
            const uint16_t bend = bends[b], average = (below + bend + 1) >> 1;
            below = average < below ? average : below;
        }
        below = below < most ? below : most;
        const uint16_t fixed = above - (uint16_t)(below << (8 - STEP)); /* the code, with eight bits after the point */
        uint8_t code = fixed >> 8;
        if (is_signed) code |= (int16_t)half < 0 ? 128 : 0;
        const int is_zero = is_signed ? distance > zero : values[i] == 0.0f;
        codes[i] = is_zero ? 0 : code;
    }
}

INLINE void shares_of(const uint8_t *restrict codes, int64_t numel, const Map *map, int is_signed, uint16_t *restrict shares) {
    const int highest = is_signed ? 127 : 255;
    uint16_t lines[BENDS + 1]; /* what those between bends have at code 0; the right one is the least of all */
    for (int b = 0, line = ONE; b <= BENDS; b++) {
        lines[b] = line - (highest << (STEP + b));
        if (b < BENDS) line += map->bends[b] << (STEP + b);
    }
    for (int64_t i = 0; i < numel; i++) {
        const uint16_t code = is_signed ? codes[i] & 127 : codes[i];
        uint16_t least = UINT16_MAX;
        for (int b = 0; b <= BENDS; b++) {
            const uint16_t share = (uint16_t)(code << (STEP + b)) + lines[b];
            least = share < least ? share : least;
        }
        if (is_signed) least |= (uint16_t)(codes[i] & 128) << 8;
        shares[i] = code ? least : 0;
    }
}

void zero_fn_shares(const uint8_t *codes, int64_t numel, const Map *map, uint16_t *shares) {
    if (map->is_signed) shares_of(codes, numel, map, 1, shares);
    else shares_of(codes, numel, map, 0, shares);
}

INLINE float scale_of(const float *values, int64_t numel) {
    int32_t most = 0; /* as integers sizes have their order, and NaN is above infinity */
    for (int64_t i = 0; i < numel; i++) {
        const int32_t size = bits_of(values[i]) & INT32_MAX;
        most = size > most ? size : most;
    }
    return of_bits(most < 0x7f800000 ? most : 0x7fc00000);
}

/* Calls with a constant `numel` have loops of their own. */
#define EACH_BLOCK(numel, call) \
    for (int64_t begin = 0; begin < (numel); begin += CODED_NUMEL) { \
        const int64_t block = begin / CODED_NUMEL; \
        if ((numel) - begin >= CODED_NUMEL) { const int64_t count = CODED_NUMEL; call; } \
        else { const int64_t count = (numel) - begin; call; } \
    }

INLINE void encode_blocks(
    const float *values, int64_t numel, const Map *map, int is_signed, const float *scales, uint8_t *codes
) {
    EACH_BLOCK(numel, {
        if (scales[block] > 0.0f) encode(values + begin, count, map, is_signed, scales[block], codes + begin);
        else memset(codes + begin, 0, count);
    })
}

void zero_fn_encode_blocks(
    const float *values, int64_t numel, const Map *map, int is_given, float *scales, uint8_t *codes
) {
    if (!is_given) EACH_BLOCK(numel, scales[block] = scale_of(values + begin, count))
    if (map->is_signed) encode_blocks(values, numel, map, 1, scales, codes);
    else encode_blocks(values, numel, map, 0, scales, codes);
}

typedef struct {
    float *values, *scales;
    uint8_t *codes;
    int64_t numel;
    const Map *map;
    int32_t is_given;
} Work;

enum { TASK_NUMEL = 1 << 12 }; /* values of a task stay in the first cache between the two passes over them */

INLINE int64_t numel_of(const Work *work, int64_t begin) {
    return work->numel - begin < TASK_NUMEL ? work->numel - begin : TASK_NUMEL;
}

static void encode_task(const void *argument, int64_t task) {
    const Work *work = argument;
    const int64_t begin = task * TASK_NUMEL;
    float *scales = work->scales + begin / CODED_NUMEL;
    zero_fn_encode_blocks(work->values + begin, numel_of(work, begin), work->map, work->is_given, scales, work->codes + begin);
}

static void decode_task(const void *argument, int64_t task) {
    const Work *work = argument;
    const int64_t begin = task * TASK_NUMEL, numel = numel_of(work, begin);
    float *values = work->values + begin;
    uint16_t shares[TASK_NUMEL];
    zero_fn_shares(work->codes + begin, numel, work->map, shares);
    for (int64_t at = 0; at < numel; at += CODED_NUMEL) {
        const float scale = work->scales[(begin + at) / CODED_NUMEL];
        for (int64_t i = at; i < numel && i < at + CODED_NUMEL; i++) values[i] = of_bits((uint32_t)shares[i] << HALF) * scale;
    }
}

void zero_fn_encode(
    float *values, uint8_t *codes, float *scales, int64_t numel, const Map *map, int64_t is_given, int64_t threads
) {
    const Work work = {values, scales, codes, numel, map, is_given};
    zero_fn_by_threads(encode_task, &work, (numel + TASK_NUMEL - 1) / TASK_NUMEL, threads);
}

void zero_fn_decode(float *values, uint8_t *codes, float *scales, int64_t numel, const Map *map, int64_t threads) {
    const Work work = {values, scales, codes, numel, map, 0};
    zero_fn_by_threads(decode_task, &work, (numel + TASK_NUMEL - 1) / TASK_NUMEL, threads);
}
