/* A segment: memory that the members of a group on one node share, with a counter and two buffers for each member.

   Members move in steps. In a step a member may write into its buffer of that step (the two are used alternately). Then it stores the
   number of the step into its counter, and may read what others have written in the step. A member goes to the next step only
   after it has read what it wanted. So

   - what a member has written in step k may be read by a member that has loaded k from its counter;
   - a buffer may be written for step k when all counters are at k - 1: all members have read what stood there in step k - 2.

   All members make the same steps, whatever they read and write, since the number of steps follows from what they agreed on.
   Counters are stored with release order and loaded with acquire order (C11, 5.1.2.4). */

#ifndef MPICOLL_SEGMENT_H
#define MPICOLL_SEGMENT_H

#include "copy.h"
#include "peer_memory.h"
#include "reduce.h"

#include <stddef.h>
#include <stdint.h>

enum { SEGMENT_LINE = 128, SEGMENT_BUFFERS = 2 }; /* bytes between two counters: two cache lines */
enum { SINGLE_COPY_ENTRY = 64 }; /* bytes of a member's buffer for each member, in a transfer that copies once */

typedef struct {
    char *base;      /* counters of all members, then from `first` on their buffers */
    ptrdiff_t first;
    ptrdiff_t room;  /* bytes of a buffer */
    int me, size;
    int64_t step;    /* the last one of this member */
    Stores stores;   /* how this member writes into memory that others read */
} Segment;

char *segment_counter(const Segment *segment, int rank);
/* Return the buffer of a member for a step. */
char *segment_buffer(const Segment *segment, int rank, int64_t step);
/* Store the next step: what this member has written for it may be read. */
void segment_advance(Segment *segment);
/* Return whether all others are at a step. Poll until `budget` nanoseconds after `began`. */
int segment_all_at(const Segment *segment, int64_t step, int64_t began, int64_t budget);

/* ---- transfers: one movement of a group, as one member makes it ---- */

/* Bytes of this member's memory, and where they stand in a buffer. */
typedef struct {
    char *memory;
    ptrdiff_t bytes;
    int rank;     /* whose buffer */
    ptrdiff_t at; /* bytes from its start */
    int peer;     /* of a block that is written: the member that reads the block; -1: all others */
} Block;

enum TransferKind {
    COPY_BLOCKS,     /* write blocks, then read blocks of others */
    SINGLE_COPY,     /* the same blocks, from process to process (single_copy.c) */
    REDUCE,          /* write blocks; each member that wants the result reduces all terms */
    REDUCE_PARTS,    /* each member reduces its part of a piece, then reads the parts of the others: two steps a piece */
    ANNOUNCE,        /* tell the others two words */
    REDUCE_IN_PLACE, /* each member reduces its part of arrays that all members share, then reads the parts of the others */
};

typedef struct {
    Segment *segment;
    enum TransferKind kind;
    ptrdiff_t total, width; /* bytes of the largest block, and of a piece */
    int writes, reads;      /* number of blocks: `writes` of them, then `reads` */
    Block *blocks;
    const char *send;       /* terms of this member, and where the result goes (NULL: this member wants none); of SINGLE_COPY, the block */
                            /* of this member for itself, and where this block goes */
    char *recv;
    ptrdiff_t result;       /* bytes of the result of this member */
    ptrdiff_t read_at;      /* where the terms stand in the buffers of others */
    ReduceFunction reduce;
    ptrdiff_t itemsize, part; /* bytes of an element, and of a part of it that is reduced as a number */
    char **arrays;          /* of REDUCE_IN_PLACE: the array of each member */
    int64_t words[2];       /* of ANNOUNCE */
    int64_t budget;         /* nanoseconds of polling for others */
    /* state */
    ptrdiff_t done;         /* bytes of the pieces that are complete */
    int phase;
    int exchange;           /* of SINGLE_COPY: with which member, and in which direction */
    int is_late;            /* a member did not come within the budget */
    int64_t wanted;         /* the step that others have to reach */
} Transfer;

/* Move on as far as the others are, for at most TRANSFER_NS. Return whether the transfer is complete. */
enum { TRANSFER_NS = 50 * 1000 * 1000 };
int transfer_advance(Transfer *transfer);
/* Return whether member `rank` is one for which the transfer waits. */
int transfer_waits_for(const Transfer *transfer, int rank);
/* Write where the blocks of SINGLE_COPY stand, for a step that this member has not reached. */
void single_copy_announce(const Transfer *transfer, int64_t step);
/* Make one step of SINGLE_COPY, as far as the others are; return whether anything was done. */
int single_copy_step(Transfer *transfer);
/* Before this member gives a transfer up: no other member copies into its memory any more. */
void single_copy_revoke(Transfer *transfer);

#endif
