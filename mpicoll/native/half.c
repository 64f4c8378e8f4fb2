/* Conversions of half types, on x86-64 with the instructions AVX2 and F16C. Other processors convert bfloat16 only. */

#include "half.h"

#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>
#define HAS_FLOAT16 1
#define FOR_AVX2 __attribute__((target("avx2,f16c")))

static int is_able(void)
{
    static int able = -1; /* a virtual machine may take long for the instruction CPUID */
    if (able < 0) {
        unsigned a, b, c = 0, d;
        able = __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
    }
    return able;
}

FOR_AVX2 static void widen_eight(float *to, const uint16_t *from)
{
    _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)));
}

FOR_AVX2 static void narrow_eight(uint16_t *to, const float *from)
{
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph(_mm256_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT));
}

#define IN_EIGHTS(NAME, EIGHT, TO, FROM)                                \
    FOR_AVX2 static void NAME(TO *to, const FROM *from, ptrdiff_t count) \
    {                                                                   \
        const ptrdiff_t whole = count - count % 8, rest = count - whole; \
        for (ptrdiff_t i = 0; i < whole; i += 8)                        \
            EIGHT(to + i, from + i);                                    \
        FROM last[8] = {0};                                             \
        TO converted[8];                                                \
        memcpy(last, from + whole, (size_t)rest * sizeof *last);        \
        EIGHT(converted, last);                                         \
        memcpy(to + whole, converted, (size_t)rest * sizeof *converted); \
    }

IN_EIGHTS(widen_float16, widen_eight, float, uint16_t)
IN_EIGHTS(narrow_float16, narrow_eight, uint16_t, float)

#else
#define HAS_FLOAT16 0
#define FOR_AVX2

static int is_able(void)
{
    return 1;
}

#endif

FOR_AVX2 static void widen_bfloat16(float *to, const uint16_t *from, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        uint16_t word; /* the memory need not be aligned */
        memcpy(&word, from + i, sizeof word);
        const uint32_t bits = (uint32_t)word << 16;
        memcpy(to + i, &bits, sizeof bits);
    }
}

/* To round, add just under half a unit, and one more if the last bit is set. A carry into the exponent is right, up to infinity.
   NaNs are treated apart, as a carry could reach their sign. */
FOR_AVX2 static void narrow_bfloat16(uint16_t *to, const float *from, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, from + i, sizeof bits);
        const uint32_t upper = bits >> 16, rounded = (bits + 0x7FFF + (upper & 1)) >> 16;
        const uint16_t word = (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? upper | 0x0040 : rounded);
        memcpy(to + i, &word, sizeof word);
    }
}

static const HalfType types[] = {
#if HAS_FLOAT16
    {"float16", widen_float16, narrow_float16},
#endif
    {"bfloat16", widen_bfloat16, narrow_bfloat16},
};

const HalfType *find_half_type(const char *name)
{
    for (size_t i = 0; is_able() && i < sizeof types / sizeof *types; i++)
        if (strcmp(types[i].name, name) == 0)
            return &types[i];
    return NULL;
}
