/* Copies into memory that other processes read: by ordinary or by non-temporal stores. copy.h says when. */

#include "copy.h"

#include "poll.h"

#include <string.h>

#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__) /* gcc's thread sanitizer knows neither such stores nor fences */
#include <emmintrin.h>
#define PASSES_CACHE 1
#else
#define PASSES_CACHE 0
#endif

enum {
    LINE = 64,
    UNIT = 64 * 1024,   /* bytes to which a time refers */
    READER_NS = 600,    /* what the reader waits longer, if the data come from the main memory: for the first line, */
    READER_LINE_NS = 4, /* and for each line (measured: 1.5 to 3; what hardly pays is not done) */
    RUN = 16,           /* copies in sequence by one kind of stores: the first still meet the caches that the other kind has left */
    TIMED = 4,          /* the last ones of a run */
    OTHER_EACH = 32,    /* of so many runs one uses the other kind of stores, as processes move between cores, and calls change; */
    OTHER_RARELY = 256, /* of so many, if that takes three times as long */
};

static int size_of(ptrdiff_t bytes)
{
    int size = 0;
    while (size < STORES_SIZES - 1 && bytes >= (ptrdiff_t)STORES_LEAST << (size + 1))
        size++;
    return size;
}

/* Return whether non-temporal stores save more time than their reader loses. */
static int faster(const Stores *stores, int size)
{
    const StoreTimes *times = &stores->of_size[size];
    return times->ns[1] + READER_LINE_NS * (UNIT / LINE) + READER_NS * UNIT / (STORES_LEAST << size) < times->ns[0];
}

/* Return by which kind of stores a run shall write. */
static int kind_of(const Stores *stores, int size, uint32_t run)
{
    const int best = faster(stores, size);
    const int64_t *ns = stores->of_size[size].ns;
    const uint32_t each = ns[!best] > 3 * ns[best] ? OTHER_RARELY : OTHER_EACH;
    return run < 2 ? (int)run : run % each == each / 2 ? !best : best;
}

int stores_pass_cache(const Stores *stores, ptrdiff_t bytes)
{
    return PASSES_CACHE && bytes >= STORES_LEAST && faster(stores, size_of(bytes));
}

void copy_past_cache(char *to, const char *from, ptrdiff_t bytes)
{
#if PASSES_CACHE
    const ptrdiff_t before = -(uintptr_t)to % LINE, head = bytes < before ? bytes : before;
    memcpy(to, from, (size_t)head);
    ptrdiff_t at = head;
    for (; at + LINE <= bytes; at += LINE) {
        const __m128i *source = (const __m128i *)(from + at);
        __m128i *line = (__m128i *)(to + at);
        const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
        const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(line, a);
        _mm_stream_si128(line + 1, b);
        _mm_stream_si128(line + 2, c);
        _mm_stream_si128(line + 3, d);
    }
    memcpy(to + at, from + at, (size_t)(bytes - at));
    _mm_sfence(); /* later ordinary stores may pass non-temporal ones (Intel 64 and IA-32 Architectures SDM, 1, 10.4.6.2) */
#else
    memcpy(to, from, (size_t)bytes);
#endif
}

static void copy(int kind, char *to, const char *from, ptrdiff_t bytes)
{
    if (kind) {
        copy_past_cache(to, from, bytes);
        return;
    }
    memcpy(to, from, (size_t)bytes);
#if !defined(__SANITIZE_THREAD__)
    if (bytes >= STORES_LEAST) /* the C library copies much at once by non-temporal stores, too */
        atomic_thread_fence(memory_order_seq_cst);
#endif
}

void copy_out(Stores *stores, char *to, const char *from, ptrdiff_t bytes)
{
    if (bytes <= 0)
        return;
    if (!PASSES_CACHE || stores == NULL || bytes < STORES_LEAST) {
        copy(0, to, from, bytes);
        return;
    }
    const int size = size_of(bytes);
    StoreTimes *times = &stores->of_size[size];
    const uint32_t number = times->count++, run = number / RUN, place = number % RUN;
    const int kind = kind_of(stores, size, run);
    if (place < RUN - TIMED) {
        copy(kind, to, from, bytes);
        return;
    }
    const int64_t began = now_ns();
    copy(kind, to, from, bytes);
    const int64_t ns = (now_ns() - began) * UNIT / bytes;
    if (place == RUN - TIMED || ns < times->best)
        times->best = ns;
    if (place < RUN - 1)
        return;
    int64_t *known = &times->ns[kind];
    const int64_t more = times->best - *known;
    *known += run < 2 ? more : more / (more > 0 ? 8 : 2); /* a run that meets what other programs do is often slower, never faster */
}
