/* Copies into memory that other processes read. */

#ifndef MPICOLL_COPY_H
#define MPICOLL_COPY_H

#include <stddef.h>

/* Copy private memory to shared memory. Every byte is written before the next atomic store of this thread. */
void copy_out(char *to, const char *from, ptrdiff_t bytes);

#endif
