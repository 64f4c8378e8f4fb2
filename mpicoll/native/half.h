/* Half types, as 16-bit words, to float32 and back, rounded to nearest, ties to even. A NaN stays a NaN, with its sign. */

#ifndef MPICOLL_HALF_H
#define MPICOLL_HALF_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    const char *name;
    void (*widen)(float *to, const uint16_t *from, ptrdiff_t count);
    void (*narrow)(uint16_t *to, const float *from, ptrdiff_t count);
} HalfType;

/* Return the half type of that name; NULL if this processor has no instructions for it, or there is none. */
const HalfType *find_half_type(const char *name);

#endif
