/* What the kernels use of each other. */

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

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

INLINE float of_bfloat16(uint16_t half) { return of_bits((uint32_t)half << 16); }

INLINE uint16_t to_bfloat16(float value) { /* to nearest, ties to even; every NaN becomes one */
    const uint32_t bits = bits_of(value), rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

/* Runs tasks 0, 1, ... by up to so many threads. Those that cannot be started are done without. */
void zero_fn_by_threads(void (*task)(const void *work, int64_t number), const void *work, int64_t tasks, int32_t threads);

enum { CODED_NUMEL = 256, BENDS = 4 }; /* elements that share a scale; see codes.py for the rest */

typedef struct {
    uint16_t bends[BENDS];
    uint16_t zero_binades; /* of the signed map: what is below 2^-zero_binades becomes zero */
    uint16_t is_signed;
} Map;

/* Of blocks that follow each other. Where `is_given` is 0 scales are found and written. */
void zero_fn_encode_blocks(const float *values, int64_t numel, const Map *map, int is_given, float *scales, uint8_t *codes);

/* The shares of their scales that codes stand for, in bfloat16, which holds them exactly. */
void zero_fn_shares(const uint8_t *codes, int64_t numel, const Map *map, uint16_t *shares);
