/* Blocks of floats as codes of eight bits and a scale. codes.py says what the codes are, and brings the numbers of the maps.

   Loops are written so that compilers keep them in lanes of 16 bits, of which a vector has most: the upper half of a float
   decides its code. Where the compiler knows the bends it adds the constants up and does not see the averages any more. */

#include "kernels.h"
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* A float has bits of its place in a binade, of which 2^FINENESS steps are made; its upper half begins at bit HALF. */
enum { MANTISSA = 23, BIAS = 127, FINENESS = 4, HALF = 16, STEP = MANTISSA - FINENESS - HALF };

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE void encode(
    const float *restrict values, int64_t numel, const Map *map, int is_signed, float scale, uint8_t *restrict codes
) {
    uint16_t bends[BENDS];
    for (int b = 0; b < BENDS; b++) bends[b] = map->bends[b] << STEP;
    const uint16_t highest = is_signed ? 127 : 255, most = (highest - 1) << STEP;
    const uint16_t zero = map->zero_binades << (MANTISSA - HALF);
    for (int64_t i = 0; i < numel; i++) {
        const uint16_t half = bits_of(values[i] / scale) >> HALF;
        const uint16_t distance = (uint16_t)(BIAS << (MANTISSA - HALF)) - (uint16_t)(half & 0x7fff);
        uint16_t below = distance; /* 1, in steps of the first codes; rounded up here and in averages, so that it is rounded once */
        for (int b = 0; b < BENDS; b++) {
            const uint16_t bend = bends[b], average = (below + bend + 1) >> 1;
            below = average < below ? average : below;
        }
        below = below < most ? below : most;
        const uint16_t rounded = below + (1 << (STEP - 1)) - 1; /* any addend in [0, 1 << STEP) rounds, but not to the nearest */
        uint8_t code = highest - (uint8_t)((uint16_t)(rounded << (8 - STEP)) >> 8);
        if (is_signed) code |= (int16_t)half < 0 ? 128 : 0;
        const int is_zero = is_signed ? distance > zero : values[i] == 0.0f;
        codes[i] = is_zero ? 0 : code;
    }
}

INLINE void decode(
    const uint8_t *restrict codes, int64_t numel, const Map *map, int is_signed, float scale, float *restrict values
) {
    uint16_t bends[BENDS];
    memcpy(bends, map->bends, sizeof bends);
    for (int64_t i = 0; i < numel; i++) {
        const uint16_t code = is_signed ? codes[i] & 127 : codes[i];
        uint16_t below = (is_signed ? 127 : 255) - code;
        for (int b = BENDS - 1; b >= 0; b--) {
            const uint16_t beyond = below > bends[b] ? below : bends[b];
            below += (uint16_t)(beyond - bends[b]);
        }
        uint16_t half = (uint16_t)((BIAS << FINENESS) - below) << STEP;
        if (is_signed) half |= (uint16_t)(codes[i] & 128) << 8;
        half = code ? half : 0;
        values[i] = of_bits((uint32_t)half << HALF) * scale;
    }
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

void zero_fn_decode_blocks(const uint8_t *codes, int64_t numel, const Map *map, const float *scales, float *values) {
    if (map->is_signed) EACH_BLOCK(numel, decode(codes + begin, count, map, 1, scales[block], values + begin))
    else EACH_BLOCK(numel, decode(codes + begin, count, map, 0, scales[block], values + begin))
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
    const int64_t begin = task * TASK_NUMEL;
    const float *scales = work->scales + begin / CODED_NUMEL;
    zero_fn_decode_blocks(work->codes + begin, numel_of(work, begin), work->map, scales, work->values + begin);
}

void zero_fn_encode(
    float *values, uint8_t *codes, float *scales, int64_t numel, const Map *map, int32_t is_given, int32_t threads
) {
    const Work work = {values, scales, codes, numel, map, is_given};
    zero_fn_by_threads(encode_task, &work, (numel + TASK_NUMEL - 1) / TASK_NUMEL, threads);
}

void zero_fn_decode(float *values, uint8_t *codes, float *scales, int64_t numel, const Map *map, int32_t threads) {
    const Work work = {values, scales, codes, numel, map, 0};
    zero_fn_by_threads(decode_task, &work, (numel + TASK_NUMEL - 1) / TASK_NUMEL, threads);
}
