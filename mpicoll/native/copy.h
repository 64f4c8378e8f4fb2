/* Copies into memory that other processes read.

   A store into a cache line that another core has read waits until that core has given the line up: on one machine 9 ns a line in
   some jobs and 31 ns in others, which may differ in where their memory lies. A non-temporal store does not wait: it goes to the main
   memory, 2 to 5 ns a line, from where the reader gets the line a little later. Which is faster depends on the machine, on the
   size of a copy and on where the processes are. So each writer takes the time of both, for each size. It uses non-temporal stores if
   these save more time than the reader may lose: 600 ns a copy, and 4 ns a line. */

#ifndef MPICOLL_COPY_H
#define MPICOLL_COPY_H

#include <stddef.h>
#include <stdint.h>

enum { STORES_LEAST = 4096, STORES_SIZES = 8 }; /* bytes of a copy whose time is taken; ranges of sizes, each twice the one before */

/* How long copies of about one size take. */
typedef struct {
    int64_t ns[2]; /* for 64 KiB, by ordinary and by non-temporal stores */
    int64_t best;  /* the same of the copies of this run */
    uint32_t count;
} StoreTimes;

typedef struct {
    StoreTimes of_size[STORES_SIZES];
} Stores;

/* Return whether a write of so many bytes shall use non-temporal stores. */
int stores_pass_cache(const Stores *stores, ptrdiff_t bytes);
/* Copy into shared memory, from memory that no other process writes meanwhile. Every byte is written before the next atomic store of
   this thread. NULL: by ordinary stores. */
void copy_out(Stores *stores, char *to, const char *from, ptrdiff_t bytes);
/* As copy_out, by non-temporal stores, where the processor has them. */
void copy_past_cache(char *to, const char *from, ptrdiff_t bytes);

/* The elements of an array at any distances, in C order. */
typedef struct {
    char *first;
    int nd;
    const ptrdiff_t *counts, *strides; /* elements, none 0, and bytes */
    ptrdiff_t itemsize;
} Strided;

/* Copy the elements one behind the other, or from there to where they stand. */
void strided_pack(char *to, const Strided *from);
void strided_unpack(const Strided *to, const char *from);
/* Return whether the elements are others than those that strided_pack() has written. */
int strided_differ(const Strided *array, const char *packed);
/* Return where the first byte of all elements stands, and the bytes up to the end of the last one. */
char *strided_span(const Strided *array, ptrdiff_t *bytes);
/* Return whether no two elements have a byte in common; 0, too, if that is not seen from the order of the strides. */
int strided_are_distinct(const Strided *array);

#endif
