/* Rows of tensors as they travel. values/wire.py says what a record is, and records.py what codes are.

   A block is worked on as floats in the first cache, stage by stage. Stages called with a constant `numel` have loops of their
   own. Sums of floats keep their order: torch computes the same bits. */

#include "kernels.h"
#include <float.h>

enum { MOST_NUMEL = 1 << 12, USUAL_NUMEL = 256, TASK_BLOCKS = 16 }; /* of a block; of what a thread takes */
enum { INT4, INT8, FLOAT8 };

typedef struct { /* as records.py lists them */
    int64_t rows, row_numel, blocks, numel, rotated, head_nbytes, nbytes;
    int64_t codes, is_symmetric, highest; /* the largest code, or how many follow that of the least value */
    int64_t mantissa, bias;               /* of a float of eight bits */
    int64_t is_bfloat16, held_is_bfloat16, threads;
} Form;

typedef struct Work {
    void (*block)(const struct Work *work, int64_t block, int64_t begin, int64_t numel);
    const Form *form;
    const void *const *sources; /* ended by NULL: values and what is held; or parts */
    void *out;
    int32_t adds;
} Work;

/* Floats in lanes, and each with the one whose place differs in one bit. */
enum { LANES = 16 };
typedef float Floats __attribute__((vector_size(LANES * sizeof(float))));
typedef uint32_t Words __attribute__((vector_size(LANES * sizeof(float))));

#define EACH_LANE(of, h) {of(0, h), of(1, h), of(2, h), of(3, h), of(4, h), of(5, h), of(6, h), of(7, h), \
    of(8, h), of(9, h), of(10, h), of(11, h), of(12, h), of(13, h), of(14, h), of(15, h)}
#define OTHER(lane, h) values[lane ^ h]
#define SIGN(lane, h) (lane & h) / h << 31
#define MIX(h) values = (Floats)EACH_LANE(OTHER, h) + (Floats)((Words)values ^ (Words)EACH_LANE(SIGN, h##u))

/* Butterflies of elements h = 1, 2, 4, ... apart: (a, b) becomes (a + b, a - b). */
INLINE void rotate_runs(float *y, int64_t numel, int64_t rotated) {
    int64_t h = 1;
    if (rotated >= LANES) {
        for (int64_t i = 0; i < numel; i += LANES) {
            Floats values;
            memcpy(&values, y + i, sizeof values);
            MIX(1), MIX(2), MIX(4), MIX(8);
            memcpy(y + i, &values, sizeof values);
        }
        for (h = LANES; h < rotated; h *= 2)
            for (int64_t run = 0; run < numel; run += 2 * h)
                for (int64_t i = run; i < run + h; i += LANES) {
                    Floats a, b;
                    memcpy(&a, y + i, sizeof a);
                    memcpy(&b, y + i + h, sizeof b);
                    const Floats sum = a + b, difference = a - b;
                    memcpy(y + i, &sum, sizeof sum);
                    memcpy(y + i + h, &difference, sizeof difference);
                }
    }
    for (; h < rotated; h *= 2)
        for (int64_t run = 0; run < numel; run += 2 * h)
            for (int64_t i = run; i < run + h; i++) {
                const float a = y[i], b = y[i + h];
                y[i] = a + b, y[i + h] = a - b;
            }
}

static void rotate(float *y, int64_t numel, int64_t rotated) {
    if (numel == USUAL_NUMEL && rotated == USUAL_NUMEL) rotate_runs(y, USUAL_NUMEL, USUAL_NUMEL);
    else rotate_runs(y, numel, rotated);
}

INLINE void load(float *restrict y, const void *values, int is_bfloat16, int64_t begin, int64_t numel) {
    if (is_bfloat16) for (int64_t i = 0; i < numel; i++) y[i] = of_bfloat16(((const uint16_t *)values)[begin + i]);
    else memcpy(y, (const float *)values + begin, numel * sizeof *y);
}

/* How wide the codes must reach, from `least` on; NaN or infinity if any value is. */
INLINE float width_of(const float *y, int64_t numel, int is_symmetric, float *least) {
    int32_t most = INT32_MIN, low = INT32_MAX; /* as integers floats without signs have their order, and NaN is above infinity */
    if (is_symmetric) {
        for (int64_t i = 0; i < numel; i++) {
            const int32_t size = bits_of(y[i]) & INT32_MAX;
            most = size > most ? size : most;
        }
        *least = 0.0f;
        return of_bits(most);
    }
    for (int64_t i = 0; i < numel; i++) {
        const int32_t bits = bits_of(y[i]), ordered = bits ^ (bits >> 31 & INT32_MAX);
        most = ordered > most ? ordered : most;
        low = ordered < low ? ordered : low;
    }
    *least = of_bits(low ^ (low >> 31 & INT32_MAX)) + 0.0f; /* no negative zero */
    return of_bits(most ^ (most >> 31 & INT32_MAX)) - *least;
}

INLINE uint32_t int_of(float share) { return bits_of(share + 0x1.8p23f); } /* to nearest, ties to even, in the lowest bits */

INLINE uint8_t float8_of(float share, int mantissa, int bias) { /* to nearest, ties to even */
    const int shift = 23 - mantissa;
    const uint32_t bits = bits_of(share), size = bits & INT32_MAX;
    const uint32_t whole = (size - ((uint32_t)(127 - bias) << 23) + (1u << (shift - 1)) - 1 + (size >> shift & 1)) >> shift;
    const uint32_t unit = (uint32_t)(128 - bias + shift) << 23; /* what is added to it leaves the last bit of small ones */
    const uint32_t small = bits_of(of_bits(size) + of_bits(unit)) - unit;
    return (size < (uint32_t)(128 - bias) << 23 ? small : whole) | (bits >> 24 & 128);
}

INLINE float of_float8(uint8_t code, int mantissa, int bias) { /* no code of a record is NaN or infinite */
    return of_bits((code & 127u) << (23 - mantissa) | (code & 128u) << 24) * of_bits((uint32_t)(254 - bias) << 23);
}

INLINE void encode_block(float *restrict y, int64_t numel, const Form *form, uint8_t *restrict record) {
    float head[2];
    const float width = width_of(y, numel, form->is_symmetric, head + 1), least = head[1];
    const int is_finite = width <= FLT_MAX, is_coded = is_finite && width >= 0x1p-100f;
    head[0] = is_coded ? width / form->highest : is_finite ? 0.0f : of_bits(0x7fc00000);
    if (!is_finite) head[1] = 0.0f;
    memcpy(record, head, form->head_nbytes);
    uint8_t *restrict codes = record + form->head_nbytes;
    if (!is_coded) {
        memset(codes, 0, form->nbytes - form->head_nbytes);
        return;
    }
    memset(record + form->nbytes - 4, 0, 4); /* codes may end before */
    const float inverse = form->highest / width;
    if (form->codes == INT4) {
        const int64_t half = (numel + 1) / 2;
        if (numel & 1) y[numel] = least; /* becomes code 0 */
        for (int64_t i = 0; i < half; i++) {
            const uint32_t low = int_of((y[i] - least) * inverse), high = int_of((y[i + half] - least) * inverse);
            codes[i] = (low & 15) | high << 4;
        }
    } else if (form->codes == INT8) {
        for (int64_t i = 0; i < numel; i++) codes[i] = int_of((y[i] - least) * inverse);
    } else {
        const int mantissa = form->mantissa, bias = form->bias;
        for (int64_t i = 0; i < numel; i++) codes[i] = float8_of(y[i] * inverse, mantissa, bias);
    }
}

INLINE void decode_block(float *restrict y, int64_t numel, const Form *form, const uint8_t *restrict record) {
    float head[2] = {0};
    memcpy(head, record, form->head_nbytes);
    const float scale = head[0], least = head[1];
    const uint8_t *restrict codes = record + form->head_nbytes;
    if (form->codes == INT4) {
        const int32_t sign = form->is_symmetric ? 8 : 0; /* flipped and subtracted, it counts as negative */
        const int64_t half = (numel + 1) / 2;
        for (int64_t i = 0; i < half; i++) {
            const int32_t low = ((codes[i] & 15) ^ sign) - sign, high = ((codes[i] >> 4) ^ sign) - sign;
            y[i] = (float)low * scale + least, y[i + half] = (float)high * scale + least;
        }
    } else if (form->codes == INT8) {
        const int32_t sign = form->is_symmetric ? 128 : 0;
        for (int64_t i = 0; i < numel; i++) y[i] = (float)((codes[i] ^ sign) - sign) * scale + least;
    } else {
        const int mantissa = form->mantissa, bias = form->bias;
        for (int64_t i = 0; i < numel; i++) y[i] = of_float8(codes[i], mantissa, bias) * scale;
    }
}

static void encode(const Work *work, int64_t block, int64_t begin, int64_t numel) {
    const Form *form = work->form;
    float y[MOST_NUMEL + 1], held[MOST_NUMEL];
    load(y, work->sources[0], form->is_bfloat16, begin, numel);
    if (work->sources[1]) {
        load(held, work->sources[1], form->held_is_bfloat16, begin, numel);
        for (int64_t i = 0; i < numel; i++) y[i] -= held[i];
    }
    for (int64_t i = numel; i < form->numel; i++) y[i] = 0.0f;
    if (form->rotated > 1) rotate(y, form->numel, form->rotated);
    uint8_t *record = (uint8_t *)work->out + block * form->nbytes;
    if (form->numel == USUAL_NUMEL) encode_block(y, USUAL_NUMEL, form, record);
    else encode_block(y, form->numel, form, record);
}

static void decode(float *y, const Form *form, const uint8_t *record) {
    if (form->numel == USUAL_NUMEL) decode_block(y, USUAL_NUMEL, form, record);
    else decode_block(y, form->numel, form, record);
    if (form->rotated > 1) {
        rotate(y, form->numel, form->rotated);
        for (int64_t i = 0; i < form->numel; i++) y[i] *= 1.0f / form->rotated;
    }
}

static void decode_mean(const Work *work, int64_t block, int64_t begin, int64_t numel) {
    const Form *form = work->form;
    float sum[MOST_NUMEL + 1], y[MOST_NUMEL + 1];
    int count = 1;
    decode(sum, form, (const uint8_t *)work->sources[0] + block * form->nbytes);
    for (; work->sources[count]; count++) {
        decode(y, form, (const uint8_t *)work->sources[count] + block * form->nbytes);
        for (int64_t i = 0; i < numel; i++) sum[i] += y[i];
    }
    if (count > 1) for (int64_t i = 0; i < numel; i++) sum[i] /= count;
    if (work->adds) {
        load(y, work->out, form->is_bfloat16, begin, numel);
        for (int64_t i = 0; i < numel; i++) sum[i] = y[i] + sum[i];
    }
    if (form->is_bfloat16) for (int64_t i = 0; i < numel; i++) ((uint16_t *)work->out)[begin + i] = to_bfloat16(sum[i]);
    else memcpy((float *)work->out + begin, sum, numel * sizeof *sum);
}

static void take_blocks(const void *argument, int64_t task) {
    const Work *work = argument;
    const Form *form = work->form;
    const int64_t end = (task + 1) * TASK_BLOCKS, all = form->rows * form->blocks;
    for (int64_t block = task * TASK_BLOCKS; block < end && block < all; block++) {
        const int64_t column = block % form->blocks * form->numel, begin = block / form->blocks * form->row_numel + column;
        const int64_t rest = form->row_numel - column;
        work->block(work, block, begin, rest < form->numel ? rest : form->numel);
    }
}

static void by_threads(const Work *work, const Form *form) {
    zero_fn_by_threads(take_blocks, work, (form->rows * form->blocks + TASK_BLOCKS - 1) / TASK_BLOCKS, form->threads);
}

void zero_fn_encode_records(const Form *form, const void *const *sources, void *out) {
    by_threads(&(Work){encode, form, sources, out, 0}, form);
}

/* The mean of the parts in their order; or the only one, which may be added to `out`. */
void zero_fn_decode_records(const Form *form, const void *const *parts, void *out, int32_t adds) {
    by_threads(&(Work){decode_mean, form, parts, out, adds}, form);
}
