/* Rows of tensors as they travel. values/wire.py says what a record is, and wire_codes.py what codes are.

   A block is worked on as floats in the first cache, stage by stage. Stages called with a constant `numel` have loops of their
   own. Sums of floats keep their order: torch computes the same bits. */

#include "kernels.h"
#include <float.h>

enum { MOST_NUMEL = 1 << 12, USUAL_NUMEL = 256, TASK_BLOCKS = 16 }; /* of a block; of what a thread takes */
enum { INT4, INT8, FLOAT8, LINE_NBYTES = 64, AHEAD_NBYTES = 1 << 11 }; /* codes; of the cache */

typedef struct { /* as wire_codes.py lists them */
    int64_t rows, row_numel, blocks, numel, rotated, nbytes;
    int64_t codes, highest; /* the largest code */
    int64_t mantissa, bias;               /* of a float of eight bits */
    int64_t is_bfloat16, held_is_bfloat16, encodes, adds, threads;
} Form;

typedef struct {
    const Form *form;
    const void *const *sources; /* ended by NULL: values and what is held; or parts */
    void *out;
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

/* Of runs of `lines` times h elements, 1, 2 or 4, those that are h and 2 h apart; and first those in a line. */
INLINE void rotate_lines(float *y, int64_t numel, int64_t h, int lines, int is_first) {
    for (int64_t run = 0; run < numel; run += lines * h)
        for (float *at = y + run; at < y + run + h; at += LANES) {
            Floats of_line[4];
            for (int line = 0; line < lines; line++) {
                Floats values;
                memcpy(&values, at + line * h, sizeof values);
                if (is_first) MIX(1), MIX(2), MIX(4), MIX(8);
                of_line[line] = values;
            }
            for (int apart = 1; apart < lines; apart *= 2)
                for (int line = 0; line < lines; line++)
                    if (!(line & apart)) {
                        const Floats a = of_line[line], b = of_line[line + apart];
                        of_line[line] = a + b, of_line[line + apart] = a - b;
                    }
            for (int line = 0; line < lines; line++) memcpy(at + line * h, of_line + line, sizeof *of_line);
        }
}

/* Butterflies of elements h = 1, 2, 4, ... apart: (a, b) becomes (a + b, a - b). */
static void rotate(float *y, int64_t numel, int64_t rotated) {
    int64_t h = LANES;
    if (rotated < LANES) {
        for (h = 1; h < rotated; h *= 2)
            for (int64_t i = 0; i < numel; i++)
                if (!(i & h)) {
                    const float a = y[i], b = y[i + h];
                    y[i] = a + b, y[i + h] = a - b;
                }
    } else if (rotated == LANES) rotate_lines(y, numel, h, 1, 1);
    else if (rotated == 2 * LANES) rotate_lines(y, numel, h, 2, 1);
    else {
        rotate_lines(y, numel, h, 4, 1);
        for (h *= 4; 2 * h < rotated; h *= 4) rotate_lines(y, numel, h, 4, 0);
        if (h < rotated) rotate_lines(y, numel, h, 2, 0);
    }
}

/* Begins to fetch what comes after a block: the processor guesses late, for between blocks it reads nothing new. */
INLINE void fetch_after(const void *values, int is_bfloat16, int64_t begin, int64_t numel) {
    const int64_t size = is_bfloat16 ? 2 : 4;
    const char *from = (const char *)values + begin * size + AHEAD_NBYTES;
    for (const char *line = from; line < from + numel * size; line += LINE_NBYTES) __builtin_prefetch(line);
}

INLINE void load(float *restrict y, const void *values, int is_bfloat16, int64_t begin, int64_t numel) {
    fetch_after(values, is_bfloat16, begin, numel);
    if (is_bfloat16) for (int64_t i = 0; i < numel; i++) y[i] = of_bfloat16(((const uint16_t *)values)[begin + i]);
    else memcpy(y, (const float *)values + begin, numel * sizeof *y);
}

/* The largest absolute value; NaN or infinity if any value is. */
INLINE float largest_of(const float *y, int64_t numel) {
    int32_t most = INT32_MIN; /* as integers floats without signs have their order, and NaN is above infinity */
    for (int64_t i = 0; i < numel; i++) {
        const int32_t size = bits_of(y[i]) & INT32_MAX;
        most = size > most ? size : most;
    }
    return of_bits(most);
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
    const float largest = largest_of(y, numel);
    const int is_finite = largest <= FLT_MAX, is_coded = is_finite && largest >= 0x1p-100f;
    const float scale = is_coded ? largest / form->highest : is_finite ? 0.0f : of_bits(0x7fc00000);
    memset(record, 0, form->nbytes);
    memcpy(record, &scale, sizeof scale);
    if (!is_coded) return;
    uint8_t *restrict codes = record + sizeof scale;
    const float inverse = form->highest / largest;
    if (form->codes == INT4) {
        const int64_t half = (numel + 1) / 2;
        if (numel & 1) y[numel] = 0.0f; /* becomes code 0 */
        for (int64_t i = 0; i < half; i++) {
            const uint32_t low = int_of(y[i] * inverse), high = int_of(y[i + half] * inverse);
            codes[i] = (low & 15) | high << 4;
        }
    } else if (form->codes == INT8) {
        for (int64_t i = 0; i < numel; i++) codes[i] = int_of(y[i] * inverse);
    } else {
        const int mantissa = form->mantissa, bias = form->bias;
        for (int64_t i = 0; i < numel; i++) codes[i] = float8_of(y[i] * inverse, mantissa, bias);
    }
}

INLINE void decode_block(float *restrict y, int64_t numel, const Form *form, const uint8_t *restrict record) {
    float scale;
    memcpy(&scale, record, sizeof scale);
    const uint8_t *restrict codes = record + sizeof scale;
    const int64_t half = (numel + 1) / 2;
    const int32_t sign = form->codes == INT4 ? 8 : 128; /* flipped and subtracted, it is negative */
    if (form->codes == INT4)
        for (int64_t i = 0; i < half; i++) {
            const int32_t low = ((codes[i] & 15) ^ sign) - sign, high = ((codes[i] >> 4) ^ sign) - sign;
            y[i] = (float)low * scale, y[i + half] = (float)high * scale;
        }
    else if (form->codes == INT8)
        for (int64_t i = 0; i < numel; i++) y[i] = (float)((codes[i] ^ sign) - sign) * scale;
    else {
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
    fetch_after(work->out, form->is_bfloat16, begin, numel); /* to be written */
    decode(sum, form, (const uint8_t *)work->sources[0] + block * form->nbytes);
    for (; work->sources[count]; count++) {
        decode(y, form, (const uint8_t *)work->sources[count] + block * form->nbytes);
        for (int64_t i = 0; i < numel; i++) sum[i] += y[i];
    }
    if (count & (count - 1)) for (int64_t i = 0; i < numel; i++) sum[i] /= count;
    else if (count > 1) for (int64_t i = 0; i < numel; i++) sum[i] *= 1.0f / count; /* the same bits, sooner */
    if (form->adds) {
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
        const int64_t rest = form->row_numel - column, numel = rest < form->numel ? rest : form->numel;
        if (form->encodes) encode(work, block, begin, numel);
        else decode_mean(work, block, begin, numel);
    }
}

/* Records of values, or of how they differ from what is held; or the mean of parts, or the only one, which may be added. */
void zero_fn_records(const Form *form, const void *const *sources, void *out) {
    const int64_t tasks = (form->rows * form->blocks + TASK_BLOCKS - 1) / TASK_BLOCKS;
    zero_fn_by_threads(take_blocks, &(Work){form, sources, out}, tasks, form->threads);
}
