/* Widens bfloat16 to float and rounds it back: by chance, or keeping what is cut off. The bits are those of stochastic_rounding.py. */

#include "kernels.h"

static inline uint32_t mixed(uint32_t x) { /* lowbias32: each bit of x changes half of the bits of the result */
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

static inline uint16_t rounded(float value, uint32_t noise) {
    const uint32_t bits = bits_of(value), size = bits & 0x7fffffffu;
    const uint32_t up = bits + (size < 0x7f800000u ? noise >> 16 : 0u); /* finite ones end at infinity at most */
    return (uint16_t)(size > 0x7f800000u ? 0x7fc0u : up >> 16);
}

/* The elements come in runs of numbers that follow one another: `firsts[run]`, and so many of them as `counts[run]`. */
void zero_fn_round_randomly(
    const float *restrict values, uint16_t *restrict into, const int64_t *firsts, const int64_t *counts, int64_t runs,
    int64_t key
) {
    for (int64_t run = 0; run < runs; run++) {
        uint64_t number = (uint64_t)firsts[run], left = (uint64_t)counts[run];
        while (left) { /* the upper half of a number is the same for all that are rounded at once */
            const uint32_t low = (uint32_t)number, high = mixed((uint32_t)(number >> 32) ^ (uint32_t)key);
            const uint64_t here = (1ull << 32) - low, count = left < here ? left : here;
            for (uint64_t i = 0; i < count; i++) into[i] = rounded(values[i], mixed((low + (uint32_t)i) ^ high));
            values += count, into += count, number += count, left -= count;
        }
    }
}

void zero_fn_widen(const uint16_t *restrict halves, const uint16_t *restrict lost, float *restrict into, int64_t numel) {
    if (lost) for (int64_t i = 0; i < numel; i++) into[i] = of_bfloat16(halves[i]) + of_bfloat16(lost[i]);
    else for (int64_t i = 0; i < numel; i++) into[i] = of_bfloat16(halves[i]);
}

void zero_fn_round_to_two(const float *restrict values, uint16_t *restrict into, uint16_t *restrict lost, int64_t numel) {
    for (int64_t i = 0; i < numel; i++) {
        into[i] = to_bfloat16(values[i]);
        const float rest = values[i] - of_bfloat16(into[i]);
        lost[i] = (bits_of(rest) & 0x7fffffffu) < 0x7f800000u ? to_bfloat16(rest) : 0; /* of infinity, and beyond it, nothing */
    }
}
