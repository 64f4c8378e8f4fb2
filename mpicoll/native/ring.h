/* Rounds of the members of a group on one node: a ring of records for each member, in memory that they share.

   To post round k, a member writes its record of k and then the number k into the record. The round is over for a member that
   finds k in the records of all. A member posts round k only when it has read all of round k - RING_AHEAD. So all members
   have posted that round, and each of them had read all of round k - 2 RING_AHEAD before. The ring has 2 RING_AHEAD places:
   the record that round k overwrites has been read by all.

   Beside each record stand RING_EAGER_BYTES for data that the member sends with the round.

   The number is stored with release order and loaded with acquire order (C11, 5.1.2.4): a member that loads k sees all that was
   written before k was stored. */

#ifndef MPICOLL_RING_H
#define MPICOLL_RING_H

#include <stddef.h>
#include <stdint.h>

enum { RING_AHEAD = 8, RING_PLACES = 2 * RING_AHEAD, RING_WORDS = 16, RING_EAGER_BYTES = 2048 };
/* A record: its number, the words that are compared, one that is not, the posting time. 128 bytes: processors fetch cache lines in
   pairs. The words are those of transports/control.py. */
enum { RING_COMPARED = 11, RING_SAID = 12 };
enum { RECORD_NUMBER = 0, RECORD_SAID = 1, RECORD_TIME = RECORD_SAID + RING_SAID };
enum { RING_BYTES = RING_PLACES * (8 * RING_WORDS + RING_EAGER_BYTES) }; /* of a member */

typedef struct {
    char *base;
    ptrdiff_t stride; /* bytes from member to member */
    int me, size;
} Ring;

typedef struct {
    int64_t words[RING_SAID]; /* the largest of each word */
    int64_t first, last;      /* posting times, in nanoseconds */
} RingMaxima;

/* Return the record, or the eager data, of a member for a round. */
char *ring_record(const Ring *ring, int rank, int64_t number);
char *ring_eager(const Ring *ring, int rank, int64_t number);

/* Write the record of this member, with the time, without its number. Return the time. */
int64_t ring_write(const Ring *ring, int64_t number, const int64_t words[RING_SAID]);
/* Store the number: the others may read the record and the eager data from now on. */
void ring_post(const Ring *ring, int64_t number);
/* Take back the rounds up to `number` that are not over: they are never over for members that post them later. */
void ring_withdraw(const Ring *ring, int64_t number);
/* Return whether all others have posted the round. Poll until `budget` nanoseconds after `began`. */
int ring_is_over(const Ring *ring, int64_t number, int64_t began, int64_t budget);
/* Return whether all others have posted the words that this member posted, but for the last; the round is over. */
int ring_is_unanimous(const Ring *ring, int64_t number);
/* Return the nanoseconds between the first and the last post of a round that is over. */
int64_t ring_spread(const Ring *ring, int64_t number);
void ring_maxima(const Ring *ring, int64_t number, RingMaxima *maxima);

#endif
