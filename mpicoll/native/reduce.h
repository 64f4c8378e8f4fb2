/* Reductions of two arrays, element by element, by an operation of MPI: bit for bit what NumPy computes. */

#ifndef MPICOLL_REDUCE_H
#define MPICOLL_REDUCE_H

#include <stddef.h>

/* Write one[i] OP other[i] to out[i], for `count` parts. `out` may be `one` or `other`. */
typedef void (*ReduceFunction)(char *out, const char *one, const char *other, ptrdiff_t count);

/* Divide `count` elements by a number of members, in place, as numpy.divide does. */
typedef void (*DivideFunction)(char *out, ptrdiff_t count, ptrdiff_t by);

typedef struct {
    const char *name; /* MPI's name of the operation, and NumPy's kind and bytes of the elements: "SUM f8" */
    ReduceFunction reduce;
    DivideFunction divide; /* NULL where no average exists */
    int parts;             /* numbers in an element: 2 for complex, otherwise 1 */
} Reduction;

/* Return the reduction of that name, or NULL. */
const Reduction *find_reduction(const char *name);
/* Return the bytes of an element, which the name says. */
ptrdiff_t reduction_itemsize(const Reduction *reduction);

#endif
