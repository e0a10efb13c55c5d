/* Rounds float to bfloat16 up or down by chance, so that the mean is the float. The same bits as by torch; see rounding.py. */

#include <stdint.h>
#include <string.h>

static inline uint32_t mixed(uint32_t x) { /* lowbias32: each bit of x changes half of the bits of the result */
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

static inline uint16_t rounded(float value, uint32_t noise) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t size = bits & 0x7fffffffu;
    const uint32_t up = bits + (size < 0x7f800000u ? noise >> 16 : 0u); /* finite ones end at infinity at most */
    return (uint16_t)(size > 0x7f800000u ? 0x7fc0u : up >> 16);
}

/* The elements come in runs of numbers that follow one another: `firsts[run]`, and so many of them as `counts[run]`. */
void zero_fn_round_randomly(
    const float *restrict values, uint16_t *restrict into, const int64_t *firsts, const int64_t *counts, int64_t runs,
    uint32_t key
) {
    for (int64_t run = 0; run < runs; run++) {
        uint64_t number = (uint64_t)firsts[run], left = (uint64_t)counts[run];
        while (left) { /* the upper half of a number is the same for all that are rounded at once */
            const uint32_t low = (uint32_t)number, high = mixed((uint32_t)(number >> 32) ^ key);
            const uint64_t here = (1ull << 32) - low, count = left < here ? left : here;
            for (uint64_t i = 0; i < count; i++) into[i] = rounded(values[i], mixed((low + (uint32_t)i) ^ high));
            values += count, into += count, number += count, left -= count;
        }
    }
}
