/* Copies into memory that other processes read: by ordinary or by non-temporal stores. copy.h says when. And copies of arrays whose elements
   stand at any distances. */

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

/* ---- elements at any distances ---- */

enum Way { PACK, UNPACK, COMPARE };

/* Move or compare some items of `size` bytes, a constant in each call that is expanded. Return whether two differ. */
static inline __attribute__((always_inline)) int items_of(char *at, ptrdiff_t step, char *packed, ptrdiff_t count, size_t size, enum Way way)
{
    int found = 0;
    for (ptrdiff_t i = 0; i < count && !found; i++, at += step, packed += size)
        if (way == COMPARE)
            found = memcmp(at, packed, size) != 0;
        else
            memcpy(way == PACK ? packed : at, way == PACK ? at : packed, size);
    return found;
}

/* Move some items of `bytes` bytes; `step` bytes apart in the array, and one behind the other in `packed`. Return whether two differ. */
static int items(char *at, ptrdiff_t step, char *packed, ptrdiff_t count, size_t bytes, enum Way way)
{
#define OF_WAY(size) \
    (way == PACK ? items_of(at, step, packed, count, (size), PACK) \
     : way == UNPACK ? items_of(at, step, packed, count, (size), UNPACK) \
                     : items_of(at, step, packed, count, (size), COMPARE))
    switch (bytes) {
    case 1:
        return OF_WAY(1);
    case 2:
        return OF_WAY(2);
    case 4:
        return OF_WAY(4);
    case 8:
        return OF_WAY(8);
    case 16:
        return OF_WAY(16);
    case 32:
        return OF_WAY(32);
    default:
        return OF_WAY(bytes);
    }
#undef OF_WAY
}

/* Move the elements of the dimensions from `from` to `to`, behind which each item has `bytes` bytes; all of them have `whole` bytes. */
static int walk(const Strided *array, int from, int to, char *at, char *packed, ptrdiff_t whole, ptrdiff_t bytes, enum Way way)
{
    if (from >= to)
        return items(at, bytes, packed, 1, (size_t)bytes, way);
    if (from == to - 1)
        return items(at, array->strides[from], packed, array->counts[from], (size_t)bytes, way);
    const ptrdiff_t part = whole / array->counts[from];
    for (ptrdiff_t i = 0; i < array->counts[from]; i++)
        if (walk(array, from + 1, to, at + i * array->strides[from], packed + i * part, part, bytes, way))
            return 1;
    return 0;
}

static int walk_all(const Strided *array, char *packed, enum Way way)
{
    ptrdiff_t bytes = array->itemsize, whole = array->itemsize;
    int to = array->nd;
    for (; to > 0 && (array->counts[to - 1] == 1 || array->strides[to - 1] == bytes); to--)
        bytes *= array->counts[to - 1]; /* these elements stand one behind the other */
    for (int i = 0; i < array->nd; i++)
        whole *= array->counts[i];
    return walk(array, 0, to, array->first, packed, whole, bytes, way);
}

void strided_pack(char *to, const Strided *from)
{
    walk_all(from, to, PACK);
}

void strided_unpack(const Strided *to, const char *from)
{
    walk_all(to, (char *)from, UNPACK);
}

int strided_differ(const Strided *array, const char *packed)
{
    return walk_all(array, (char *)packed, COMPARE);
}

char *strided_span(const Strided *array, ptrdiff_t *bytes)
{
    char *start = array->first;
    *bytes = array->itemsize;
    for (int i = 0; i < array->nd; i++) {
        const ptrdiff_t last = (array->counts[i] - 1) * array->strides[i];
        start += last < 0 ? last : 0;
        *bytes += last < 0 ? -last : last;
    }
    return start;
}

static ptrdiff_t distance(const Strided *array, int dimension)
{
    return array->strides[dimension] < 0 ? -array->strides[dimension] : array->strides[dimension];
}

int strided_are_distinct(const Strided *array)
{
    for (int i = 0; i < array->nd; i++) {
        ptrdiff_t covered = array->itemsize; /* by the dimensions of smaller strides */
        for (int j = 0; j < array->nd; j++) {
            if (i == j || array->counts[j] == 1)
                continue;
            if (distance(array, j) == distance(array, i) && array->counts[i] > 1)
                return 0;
            covered += distance(array, j) < distance(array, i) ? (array->counts[j] - 1) * distance(array, j) : 0;
        }
        if (array->counts[i] > 1 && distance(array, i) < covered)
            return 0;
    }
    return 1;
}
