/* Copies and means that are written past the caches. See nontemporal.py for why. */

#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif

enum {
    LINE_NBYTES = 64,
    LANES = LINE_NBYTES / sizeof(float),
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

static inline __attribute__((always_inline)) float one_of(const void *part, int is_bfloat16, int64_t i) {
    if (!is_bfloat16) return ((const float *)part)[i];
    const uint32_t bits = (uint32_t)((const uint16_t *)part)[i] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline __attribute__((always_inline)) Floats line_of(const void *part, int is_bfloat16, int64_t i) {
    Floats values;
    if (!is_bfloat16) {
        memcpy(&values, (const float *)part + i, sizeof values);
    } else {
        Words bits;
        for (int lane = 0; lane < LANES; lane++) bits[lane] = (uint32_t)((const uint16_t *)part)[i + lane] << 16;
        memcpy(&values, &bits, sizeof values);
    }
    return values;
}

static inline __attribute__((always_inline)) void
mean_one(float *into, const void *const *parts, int64_t count, int is_bfloat16, int64_t i) {
    float sum = one_of(parts[0], is_bfloat16, i);
    for (int64_t part = 1; part < count; part++) sum += one_of(parts[part], is_bfloat16, i);
    into[i] = sum / (float)count;
}

static inline __attribute__((always_inline)) void
mean_line(float *into, const void *const *parts, int64_t count, int is_bfloat16, int64_t i) {
    Floats sum = line_of(parts[0], is_bfloat16, i);
    for (int64_t part = 1; part < count; part++) sum += line_of(parts[part], is_bfloat16, i);
    sum /= (float)count;
    write_line((char *)(into + i), (const char *)&sum);
}

/* The loop. What is constant where it is called decides what is left of it. */
static inline __attribute__((always_inline)) void
mean(float *into, const void *const *parts, int64_t count, int is_bfloat16, int64_t numel) {
    enum { PAGE_NUMEL = PAGE_NBYTES / sizeof(float) };
    const int64_t size = is_bfloat16 ? 2 : 4;
    int64_t i = 0;
    for (; i < numel && (intptr_t)(into + i) & (LINE_NBYTES - 1); i++) mean_one(into, parts, count, is_bfloat16, i);
    for (; i + PAGES * PAGE_NUMEL <= numel; i += PAGES * PAGE_NUMEL)
        for (int64_t pair = i; pair < i + PAGE_NUMEL; pair += 2 * LANES)
            for (int64_t at = pair; at < i + PAGES * PAGE_NUMEL; at += PAGE_NUMEL) {
                for (int64_t part = 0; part < count; part++) {
                    read_ahead((const char *)parts[part] + at * size);
                    read_ahead((const char *)parts[part] + (at + LANES) * size);
                }
                mean_line(into, parts, count, is_bfloat16, at);
                mean_line(into, parts, count, is_bfloat16, at + LANES);
            }
    for (; i + LANES <= numel; i += LANES) mean_line(into, parts, count, is_bfloat16, i);
    for (; i < numel; i++) mean_one(into, parts, count, is_bfloat16, i);
    order_writes();
}

/* The parts, all of one dtype, are added in their order, in float. `into` may be one of them. */
void zero_fn_mean(float *into, const void *const *parts, int64_t count, int32_t is_bfloat16, int64_t numel) {
    if (count == 2 && !is_bfloat16) mean(into, parts, 2, 0, numel);
    else if (count == 2) mean(into, parts, 2, 1, numel);
    else if (!is_bfloat16) mean(into, parts, count, 0, numel);
    else mean(into, parts, count, 1, numel);
}
