/* Rounds of the members of a group on one node. The protocol is described in ring.h. */

#include "ring.h"

#include "poll.h"

#include <string.h>

int poll_yields;

char *ring_record(const Ring *ring, int rank, int64_t number)
{
    return ring->base + rank * ring->stride + (number % RING_PLACES) * (8 * RING_WORDS);
}

char *ring_eager(const Ring *ring, int rank, int64_t number)
{
    return ring->base + rank * ring->stride + RING_PLACES * (8 * RING_WORDS) + (number % RING_PLACES) * RING_EAGER_BYTES;
}

static int64_t time_of(const Ring *ring, int rank, int64_t number)
{
    int64_t time;
    memcpy(&time, ring_record(ring, rank, number) + 8 * RECORD_TIME, sizeof time);
    return time;
}

int64_t ring_write(const Ring *ring, int64_t number, const int64_t words[RING_SAID])
{
    char *record = ring_record(ring, ring->me, number);
    const int64_t time = now_ns();
    memcpy(record + 8 * RECORD_SAID, words, 8 * RING_SAID);
    memcpy(record + 8 * RECORD_TIME, &time, sizeof time);
    return time;
}

void ring_post(const Ring *ring, int64_t number)
{
    store(ring_record(ring, ring->me, number) + 8 * RECORD_NUMBER, number);
}

int ring_is_over(const Ring *ring, int64_t number, int64_t began, int64_t budget)
{
    for (int rank = 0; rank < ring->size; rank++)
        if (rank != ring->me && !poll_for(ring_record(ring, rank, number) + 8 * RECORD_NUMBER, number, began, budget))
            return 0;
    return 1;
}

void ring_withdraw(const Ring *ring, int64_t number)
{
    for (int64_t last = number; number > 0 && number > last - RING_AHEAD; number--)
        if (!ring_is_over(ring, number, 0, -1))
            store(ring_record(ring, ring->me, number) + 8 * RECORD_NUMBER, 0);
}

int ring_is_unanimous(const Ring *ring, int64_t number)
{
    const char *mine = ring_record(ring, ring->me, number) + 8 * RECORD_SAID;
    for (int rank = 0; rank < ring->size; rank++)
        if (rank != ring->me && memcmp(ring_record(ring, rank, number) + 8 * RECORD_SAID, mine, 8 * RING_COMPARED) != 0)
            return 0;
    return 1;
}

int64_t ring_spread(const Ring *ring, int64_t number)
{
    int64_t first = time_of(ring, 0, number), last = first;
    for (int rank = 1; rank < ring->size; rank++) {
        const int64_t time = time_of(ring, rank, number);
        first = time < first ? time : first;
        last = time > last ? time : last;
    }
    return last - first;
}

void ring_maxima(const Ring *ring, int64_t number, RingMaxima *maxima)
{
    for (int rank = 0; rank < ring->size; rank++) {
        int64_t words[RING_SAID];
        memcpy(words, ring_record(ring, rank, number) + 8 * RECORD_SAID, sizeof words);
        for (int i = 0; i < RING_SAID; i++)
            if (rank == 0 || words[i] > maxima->words[i])
                maxima->words[i] = words[i];
        const int64_t time = time_of(ring, rank, number);
        if (rank == 0 || time < maxima->first)
            maxima->first = time;
        if (rank == 0 || time > maxima->last)
            maxima->last = time;
    }
}
