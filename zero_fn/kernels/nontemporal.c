/* Copies and means that are written past the caches. See nontemporal.py for why. */

#include "kernels.h"
#ifdef __SSE2__
#include <immintrin.h>
#endif

enum {
    LINE_NBYTES = 64,
    PAGE_NBYTES = 4096,
    PAGES = 4,          /* written in turns, so that memory works on several of its rows */
    AHEAD_NBYTES = 512, /* how far reads are begun ahead of the processor's own guess, which ends with a page */
};

/* One line of the cache; `into` is aligned to it. */
static inline void write_line(char *into, const char *source) {
#if defined(__AVX512F__)
    _mm512_stream_si512((void *)into, _mm512_loadu_si512(source));
#elif defined(__AVX__)
    for (int at = 0; at < LINE_NBYTES; at += 32)
        _mm256_stream_si256((__m256i *)(into + at), _mm256_loadu_si256((const __m256i *)(source + at)));
#elif defined(__SSE2__)
    for (int at = 0; at < LINE_NBYTES; at += 16)
        _mm_stream_si128((__m128i *)(into + at), _mm_loadu_si128((const __m128i *)(source + at)));
#else
    memcpy(into, source, LINE_NBYTES);
#endif
}

/* Writes past the caches may overtake others: a peer must not hear of them before they are there. */
static inline void order_writes(void) {
#ifdef __SSE2__
    _mm_sfence();
#endif
}

static inline void read_ahead(const char *source) {
    __builtin_prefetch(source + AHEAD_NBYTES);
}

void zero_fn_copy(char *into, const char *source, int64_t nbytes) {
    int64_t head = -(intptr_t)into & (LINE_NBYTES - 1);
    if (head > nbytes) head = nbytes;
    memcpy(into, source, head);
    into += head, source += head, nbytes -= head;
    for (; nbytes >= PAGES * PAGE_NBYTES; nbytes -= PAGES * PAGE_NBYTES) {
        for (int64_t pair = 0; pair < PAGE_NBYTES; pair += 2 * LINE_NBYTES)
            for (int64_t at = pair; at < PAGES * PAGE_NBYTES; at += PAGE_NBYTES) {
                read_ahead(source + at);
                read_ahead(source + at + LINE_NBYTES);
                write_line(into + at, source + at);
                write_line(into + at + LINE_NBYTES, source + at + LINE_NBYTES);
            }
        into += PAGES * PAGE_NBYTES, source += PAGES * PAGE_NBYTES;
    }
    for (; nbytes >= LINE_NBYTES; nbytes -= LINE_NBYTES, into += LINE_NBYTES, source += LINE_NBYTES) write_line(into, source);
    memcpy(into, source, nbytes);
    order_writes();
}

typedef float Floats __attribute__((vector_size(LINE_NBYTES)));
typedef uint32_t Words __attribute__((vector_size(LINE_NBYTES)));
enum { LANES = LINE_NBYTES / sizeof(float) };

/* Which of float and bfloat16 the parts and the result are; constant where the loop is called. */
typedef struct {
    int parts_are_bfloat16, into_is_bfloat16;
} Form;

INLINE Floats widened(const uint16_t *halves) {
    float lanes[LANES];
    for (int lane = 0; lane < LANES; lane++) lanes[lane] = of_bfloat16(halves[lane]);
    Floats values;
    memcpy(&values, lanes, sizeof values);
    return values;
}

INLINE void round_to(uint16_t *halves, Floats values) { /* `to_bfloat16` of all at once, which compilers do not see in a loop */
    Words bits;
    memcpy(&bits, &values, sizeof bits);
    const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    for (int lane = 0; lane < LANES; lane++)
        halves[lane] = (uint16_t)((bits[lane] & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded[lane]);
}

/* Of the next `numel` elements, at most LANES; the lanes after them are of no use. */
INLINE Floats mean_from(const void *const *parts, int64_t count, Form form, int64_t i, int64_t numel) {
    const int64_t size = form.parts_are_bfloat16 ? 2 : 4;
    Floats sum = {0}, addend;
    for (int64_t part = 0; part < count; part++) {
        char raw[sizeof addend] = {0};
        memcpy(raw, (const char *)parts[part] + i * size, numel * size);
        if (form.parts_are_bfloat16) addend = widened((const uint16_t *)raw);
        else memcpy(&addend, raw, sizeof addend);
        sum = part ? sum + addend : addend;
    }
    return sum / (float)count;
}

/* One line of the result. */
INLINE void mean_line(void *into, const void *const *parts, int64_t count, Form form, int64_t i) {
    if (form.into_is_bfloat16) {
        uint16_t halves[2 * LANES];
        round_to(halves, mean_from(parts, count, form, i, LANES));
        round_to(halves + LANES, mean_from(parts, count, form, i + LANES, LANES));
        write_line((char *)((uint16_t *)into + i), (const char *)halves);
    } else {
        const Floats values = mean_from(parts, count, form, i, LANES);
        write_line((char *)((float *)into + i), (const char *)&values);
    }
}

/* Fewer than fill a line. */
INLINE void mean_rest(void *into, const void *const *parts, int64_t count, Form form, int64_t begin, int64_t end) {
    const int64_t size = form.into_is_bfloat16 ? 2 : 4;
    for (int64_t i = begin; i < end; i += LANES) {
        const int64_t numel = end - i < LANES ? end - i : LANES;
        const Floats values = mean_from(parts, count, form, i, numel);
        uint16_t halves[LANES];
        round_to(halves, values);
        memcpy((char *)into + i * size, form.into_is_bfloat16 ? (const void *)halves : (const void *)&values, numel * size);
    }
}

INLINE void mean(void *into, const void *const *parts, int64_t count, Form form, int64_t numel) {
    const int64_t into_size = form.into_is_bfloat16 ? 2 : 4, part_size = form.parts_are_bfloat16 ? 2 : 4;
    const int64_t line = LINE_NBYTES / into_size, page = PAGE_NBYTES / into_size;
    int64_t i = (-(intptr_t)into & (LINE_NBYTES - 1)) / into_size;
    if (i > numel) i = numel;
    mean_rest(into, parts, count, form, 0, i);
    for (; i + PAGES * page <= numel; i += PAGES * page)
        for (int64_t pair = i; pair < i + page; pair += 2 * line)
            for (int64_t at = pair; at < i + PAGES * page; at += page) {
                for (int64_t part = 0; part < count; part++)
                    for (int64_t ahead = 0; ahead < 2 * line * part_size; ahead += LINE_NBYTES)
                        read_ahead((const char *)parts[part] + at * part_size + ahead);
                mean_line(into, parts, count, form, at);
                mean_line(into, parts, count, form, at + line);
            }
    for (; i + line <= numel; i += line) mean_line(into, parts, count, form, i);
    mean_rest(into, parts, count, form, i, numel);
    order_writes();
}

/* The parts, all of one dtype, are added in their order, in float. `into` may be one of them. */
void zero_fn_mean(
    void *into, const void *const *parts, int64_t count, int64_t parts_are_bfloat16, int64_t into_is_bfloat16, int64_t numel
) {
    if (!parts_are_bfloat16 && !into_is_bfloat16 && count == 2) mean(into, parts, 2, (Form){0, 0}, numel);
    else if (!parts_are_bfloat16 && !into_is_bfloat16) mean(into, parts, count, (Form){0, 0}, numel);
    else if (!parts_are_bfloat16) mean(into, parts, count, (Form){0, 1}, numel);
    else if (!into_is_bfloat16) mean(into, parts, count, (Form){1, 0}, numel);
    else mean(into, parts, count, (Form){1, 1}, numel);
}
