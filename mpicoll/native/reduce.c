/* Reductions of two arrays: one row of the table for each operation of MPI and each native dtype.

   Each operation is rounded by itself (built with -ffp-contract=off). Half types are reduced as float32 (memory/half.py). */

#include "reduce.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

#define ELEMENTWISE(NAME, TYPE, EXPRESSION)                                                             \
    FOR_EACH_PROCESSOR static void NAME(char *out, const char *one, const char *other, ptrdiff_t count) \
    {                                                                                                   \
        TYPE *z = (TYPE *)out;                                                                          \
        const TYPE *x = (const TYPE *)one, *y = (const TYPE *)other;                                    \
        for (ptrdiff_t i = 0; i < count; i++) {                                                         \
            const TYPE a = x[i], b = y[i];                                                              \
            z[i] = (TYPE)(EXPRESSION);                                                                  \
        }                                                                                               \
    }

#define INTEGERS(S, U, N)                                     \
    ELEMENTWISE(sum_##N, U, a + b)                            \
    ELEMENTWISE(prod_##N, U, (uint64_t)a *(uint64_t)b)        \
    ELEMENTWISE(band_##N, U, a &b)                            \
    ELEMENTWISE(bor_##N, U, a | b)                            \
    ELEMENTWISE(bxor_##N, U, a ^ b)                           \
    ELEMENTWISE(max_i##N, S, a > b ? a : b)                   \
    ELEMENTWISE(min_i##N, S, a < b ? a : b)                   \
    ELEMENTWISE(max_u##N, U, a > b ? a : b)                   \
    ELEMENTWISE(min_u##N, U, a < b ? a : b)

INTEGERS(int8_t, uint8_t, 1)
INTEGERS(int16_t, uint16_t, 2)
INTEGERS(int32_t, uint32_t, 4)
INTEGERS(int64_t, uint64_t, 8)

/* A NaN stays. Of two equal numbers, as of two zeros, the second is the result: so do NumPy's vector loops. */
#define REALS(TYPE, NAME)                                            \
    ELEMENTWISE(sum_##NAME, TYPE, a + b)                             \
    ELEMENTWISE(prod_##NAME, TYPE, a *b)                             \
    ELEMENTWISE(max_##NAME, TYPE, ((a > b) | (a != a)) ? a : b)      \
    ELEMENTWISE(min_##NAME, TYPE, ((a < b) | (a != a)) ? a : b)      \
    static void divide_##NAME(char *out, ptrdiff_t count, ptrdiff_t by) \
    {                                                                \
        TYPE *x = (TYPE *)out;                                       \
        for (ptrdiff_t i = 0; i < count; i++)                        \
            x[i] = x[i] / (TYPE)by;                                  \
    }                                                                \
    /* numpy.divide divides complex numbers as Smith (CACM 5(8), 1962) does. */ \
    static void divide_complex_##NAME(char *out, ptrdiff_t count, ptrdiff_t by) \
    {                                                                \
        TYPE *x = (TYPE *)out;                                       \
        const TYPE ratio = (TYPE)0 / (TYPE)by, scale = (TYPE)1 / ((TYPE)by + (TYPE)0 * ratio); \
        for (ptrdiff_t i = 0; i < 2 * count; i += 2) {               \
            const TYPE real = x[i], imaginary = x[i + 1];            \
            x[i] = (real + imaginary * ratio) * scale;               \
            x[i + 1] = (imaginary - real * ratio) * scale;           \
        }                                                            \
    }

REALS(float, f4)
REALS(double, f8)
REALS(long double, ld)

ELEMENTWISE(either, uint8_t, (a | b) != 0)
ELEMENTWISE(both, uint8_t, (a != 0) & (b != 0))
ELEMENTWISE(one_only, uint8_t, (a != 0) ^ (b != 0))

#define INTEGER_ROWS(N)                                                                                           \
    {"SUM i" #N, sum_##N, NULL, 1}, {"SUM u" #N, sum_##N, NULL, 1}, {"PROD i" #N, prod_##N, NULL, 1},             \
        {"PROD u" #N, prod_##N, NULL, 1}, {"BAND i" #N, band_##N, NULL, 1}, {"BAND u" #N, band_##N, NULL, 1},     \
        {"BOR i" #N, bor_##N, NULL, 1}, {"BOR u" #N, bor_##N, NULL, 1}, {"BXOR i" #N, bxor_##N, NULL, 1},         \
        {"BXOR u" #N, bxor_##N, NULL, 1}, {"MAX i" #N, max_i##N, NULL, 1}, {"MAX u" #N, max_u##N, NULL, 1},       \
        {"MIN i" #N, min_i##N, NULL, 1}, {"MIN u" #N, min_u##N, NULL, 1}
#define REAL_ROWS(CODE, COMPLEX, NAME)                                                                            \
    {"SUM " CODE, sum_##NAME, divide_##NAME, 1}, {"PROD " CODE, prod_##NAME, NULL, 1},                            \
        {"MAX " CODE, max_##NAME, NULL, 1}, {"MIN " CODE, min_##NAME, NULL, 1},                                   \
        {"SUM " COMPLEX, sum_##NAME, divide_complex_##NAME, 2}

static const Reduction table[] = {
    INTEGER_ROWS(1), INTEGER_ROWS(2), INTEGER_ROWS(4), INTEGER_ROWS(8),
    REAL_ROWS("f4", "c8", f4), REAL_ROWS("f8", "c16", f8),
#if __SIZEOF_LONG_DOUBLE__ == 16
    REAL_ROWS("f16", "c32", ld),
#elif __SIZEOF_LONG_DOUBLE__ == 12
    REAL_ROWS("f12", "c24", ld),
#endif
    {"LOR b1", either, NULL, 1}, {"LAND b1", both, NULL, 1}, {"LXOR b1", one_only, NULL, 1},
};

const Reduction *find_reduction(const char *name)
{
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (strcmp(table[i].name, name) == 0)
            return &table[i];
    return NULL;
}

ptrdiff_t reduction_itemsize(const Reduction *reduction)
{
    return strtol(strchr(reduction->name, ' ') + 2, NULL, 10);
}
