/* One step of AdamW, or of Adam without weight decay, over many pieces in one pass, by all threads.

   The arithmetic is that of torch's fused optimizers on the CPU, operation by operation: which products and sums are fused
   into one rounding is spelled out here, and the compiler may not choose (-ffp-contract=off). Where builds of torch differ in
   that choice the caller names one; see adam.py. */

#include "kernels.h"
#include <math.h>

enum { SEPARATE, FUSED_DECAY, FUSED_GRADIENT }; /* v * b + (c * g) * g: nothing, the first, or the second product fused */

typedef struct {
    float *param;
    void *exp_avg, *exp_avg_sq; /* float; or codes, if they have scales, one for each CODED_NUMEL of them */
    float *exp_avg_scales, *exp_avg_sq_scales;
    uint16_t *send;           /* the stepped parameter in bfloat16; null if nobody wants it */
    const void *grad;         /* float, or bfloat16 */
    int64_t numel;
    int64_t first_block;      /* blocks of the pieces before this one */
    int64_t grad_is_bfloat16;
    float negated_step_size, bias_correction2_sqrt;
} Piece;

typedef struct {
    float exp_avg_weight, exp_avg_sq_weight, beta2, eps;
    float param_factor;       /* 1 - lr * weight_decay */
    int32_t fuses_lerp;
    int32_t body, tail;       /* how exp_avg_sq is rounded, in whole vectors and after the last of them */
    int32_t vector_numel;     /* elements of a vector of torch's kernel */
    Map exp_avg_map, exp_avg_sq_map;
} Rates;

enum { BLOCK_NUMEL = 1 << 15 }; /* a multiple of CODED_NUMEL, and that one of every vector_numel */

static inline float weighted_square(float average, float decay, float weight, float grad, int form) {
    const float product = weight * grad;
    if (form == FUSED_DECAY) return fmaf(average, decay, product * grad);
    if (form == FUSED_GRADIENT) return fmaf(product, grad, average * decay);
    return average * decay + product * grad;
}

/* Moments in eight bits of one block: as shares of their scales in bfloat16, and where the new ones are written. */
typedef struct {
    const uint16_t *shares, *sq_shares;
    float scale, sq_scale;
    float *exp_avg, *exp_avg_sq;
} Coded;

/* The loop. What is constant where it is called decides what is left of it. */
INLINE void run(
    const Piece *piece, int64_t begin, int64_t end, const Rates *rates, int is_bfloat16, int sends, int fuses_lerp,
    int form, int is_coded, const Coded *coded
) {
    float *restrict param = piece->param;
    float *restrict exp_avg = is_coded ? coded->exp_avg : piece->exp_avg;
    float *restrict exp_avg_sq = is_coded ? coded->exp_avg_sq : piece->exp_avg_sq;
    const uint16_t *restrict shares = is_coded ? coded->shares : NULL, *restrict sq_shares = is_coded ? coded->sq_shares : NULL;
    const float *restrict grads = piece->grad;
    const uint16_t *restrict half_grads = piece->grad;
    uint16_t *restrict send = piece->send;
    const float weight = rates->exp_avg_weight, square_weight = rates->exp_avg_sq_weight, beta2 = rates->beta2;
    const float eps = rates->eps, factor = rates->param_factor;
    const float step_size = piece->negated_step_size, correction = piece->bias_correction2_sqrt;
    const int is_near = fabsf(weight) < 0.5f; /* a lerp begins at the end that it is nearer to */
    const float slope = is_near ? weight : weight - 1.0f;
    const float scale = is_coded ? coded->scale : 0.0f, sq_scale = is_coded ? coded->sq_scale : 0.0f;

    for (int64_t i = begin; i < end; i++) {
        const float g = is_bfloat16 ? of_bfloat16(half_grads[i]) : grads[i];
        const float m = is_coded ? of_bfloat16(shares[i]) * scale : exp_avg[i];
        const float v = is_coded ? of_bfloat16(sq_shares[i]) * sq_scale : exp_avg_sq[i];
        const float way = g - m, start = is_near ? m : g;
        const float average = fuses_lerp ? fmaf(slope, way, start) : start + slope * way;
        const float square = weighted_square(v, beta2, square_weight, g, form);
        exp_avg[i] = average;
        exp_avg_sq[i] = square;

        const float p = param[i] * factor + step_size * average / (sqrtf(square) / correction + eps);
        param[i] = p;
        if (sends) send[i] = to_bfloat16(p);
    }
}

/* Whole vectors of builds of torch by GCC have loops of their own; all others share one. */
INLINE void run_as(
    const Piece *piece, int64_t begin, int64_t end, const Rates *rates, int form, int is_coded, const Coded *coded
) {
    const int is_half = piece->grad_is_bfloat16 != 0, sends = piece->send != NULL, fuses = rates->fuses_lerp;
    if (form != FUSED_GRADIENT || !fuses) run(piece, begin, end, rates, is_half, sends, fuses, form, is_coded, coded);
    else if (is_half && sends) run(piece, begin, end, rates, 1, 1, 1, FUSED_GRADIENT, is_coded, coded);
    else if (is_half) run(piece, begin, end, rates, 1, 0, 1, FUSED_GRADIENT, is_coded, coded);
    else if (sends) run(piece, begin, end, rates, 0, 1, 1, FUSED_GRADIENT, is_coded, coded);
    else run(piece, begin, end, rates, 0, 0, 1, FUSED_GRADIENT, is_coded, coded);
}

static void run_form(const Piece *piece, int64_t begin, int64_t end, const Rates *rates, int form, const Coded *coded) {
    if (coded == NULL) run_as(piece, begin, end, rates, form, 0, NULL);
    else run_as(piece, begin, end, rates, form, 1, coded);
}

static void run_range(const Piece *piece, int64_t begin, int64_t end, const Rates *rates, const Coded *coded) {
    const int64_t vectors_end = end - end % rates->vector_numel; /* differs from end at the end of the piece only */
    run_form(piece, begin, vectors_end, rates, rates->body, coded);
    if (vectors_end < end) run_form(piece, vectors_end, end, rates, rates->tail, coded);
}

/* In the first cache moments are decoded, stepped and encoded. */
static void run_coded(const Piece *piece, int64_t begin, int64_t end, const Rates *rates) {
    enum { DECODED_NUMEL = 2 * CODED_NUMEL };
    uint16_t shares[DECODED_NUMEL], sq_shares[DECODED_NUMEL];
    float exp_avg[DECODED_NUMEL], exp_avg_sq[DECODED_NUMEL];
    for (int64_t i = begin; i < end; i += DECODED_NUMEL) {
        const int64_t numel = end - i < DECODED_NUMEL ? end - i : DECODED_NUMEL;
        uint8_t *codes = (uint8_t *)piece->exp_avg + i, *sq_codes = (uint8_t *)piece->exp_avg_sq + i;
        float *scales = piece->exp_avg_scales + i / CODED_NUMEL, *sq_scales = piece->exp_avg_sq_scales + i / CODED_NUMEL;
        zero_fn_shares(codes, numel, &rates->exp_avg_map, shares);
        zero_fn_shares(sq_codes, numel, &rates->exp_avg_sq_map, sq_shares);
        for (int64_t at = 0, block = 0; at < numel; at += CODED_NUMEL, block++) {
            Piece part = *piece;
            part.param += i + at;
            part.grad = (const char *)part.grad + (i + at) * (part.grad_is_bfloat16 ? 2 : 4);
            if (part.send != NULL) part.send += i + at;
            const Coded coded = {shares + at, sq_shares + at, scales[block], sq_scales[block], exp_avg + at, exp_avg_sq + at};
            run_range(&part, 0, numel - at < CODED_NUMEL ? numel - at : CODED_NUMEL, rates, &coded);
        }
        zero_fn_encode_blocks(exp_avg, numel, &rates->exp_avg_map, 0, scales, codes);
        zero_fn_encode_blocks(exp_avg_sq, numel, &rates->exp_avg_sq_map, 0, sq_scales, sq_codes);
    }
}

typedef struct {
    const Piece *pieces;
    int64_t count;
    const Rates *rates;
} Work;

static void run_block(const void *argument, int64_t block) {
    const Work *work = argument;
    int64_t low = 0, high = work->count - 1; /* the last piece that begins at or before it */
    while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (work->pieces[middle].first_block <= block) low = middle;
        else high = middle - 1;
    }
    const Piece *piece = work->pieces + low;
    const int64_t begin = (block - piece->first_block) * BLOCK_NUMEL;
    const int64_t end = piece->numel - begin < BLOCK_NUMEL ? piece->numel : begin + BLOCK_NUMEL;
    if (piece->exp_avg_scales != NULL) run_coded(piece, begin, end, work->rates);
    else run_range(piece, begin, end, work->rates, NULL);
}

int64_t zero_fn_adam_block_numel(void) { return BLOCK_NUMEL; }

/* Pieces that share a block of memory must not be given together. */
void zero_fn_adam(const Piece *pieces, int64_t count, int64_t blocks, const Rates *rates, int64_t threads) {
    const Work work = {pieces, count, rates};
    zero_fn_by_threads(run_block, &work, blocks, threads);
}
