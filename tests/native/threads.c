/* Threads are the members of a group, on one ring and one segment: for the thread sanitizer, which sees one process only.

   threads MEMBERS TURNS SEED: in each turn all members make some rounds with eager data, or a call in one step, or a transfer,
   with delays of their own, and check all that they read. Exits with 1 at the first wrong number. With ROOM_BYTES above 4 KiB some
   members use non-temporal stores, if they are built without the thread sanitizer. */

#include "ring.h"
#include "segment.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef ROOM_BYTES
#define ROOM_BYTES 512
#endif

enum { MOST = 8, ROOM = ROOM_BYTES, FIRST = MOST * SEGMENT_LINE, STRIDE = RING_BYTES, ELEMENTS = 3000 };

static char ring_memory[MOST * STRIDE] __attribute__((aligned(4096)));
static char segment_memory[FIRST + MOST * SEGMENT_BUFFERS * ROOM] __attribute__((aligned(4096)));
static int64_t arrays[MOST][ELEMENTS]; /* of REDUCE_IN_PLACE */
static int size, turns, seed;

typedef struct {
    int me;
    unsigned own, common; /* random numbers: of this member, and the same for all */
    Ring ring;
    int64_t posted, seen; /* rounds */
    Segment segment;
} Member;

static void check(int is_right, const char *what, const Member *member, int64_t at)
{
    if (is_right)
        return;
    fprintf(stderr, "member %d: wrong %s at %lld\n", member->me, what, (long long)at);
    exit(1);
}

static void delay(Member *member)
{
    switch (rand_r(&member->own) % 8) {
    case 0:
        usleep((useconds_t)(rand_r(&member->own) % 100));
        break;
    case 1:
    case 2:
        sched_yield();
    }
}

static int any(Member *member, int below)
{
    return (int)((unsigned)rand_r(&member->common) % (unsigned)below);
}

/* An element of a member, and the sum of those of all. */
static int64_t element(int rank, int64_t turn, ptrdiff_t i)
{
    return (rank + 1) * (turn + 1) + i;
}

static int64_t sum(int64_t turn, ptrdiff_t i)
{
    int64_t all = 0;
    for (int rank = 0; rank < size; rank++)
        all += element(rank, turn, i);
    return all;
}

static void fill(int64_t *at, int rank, int64_t turn, ptrdiff_t from, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++)
        at[i] = element(rank, turn, from + i);
}

/* ---- rounds ---- */

static void post(Member *member, int with_data)
{
    const int64_t number = ++member->posted;
    int64_t words[RING_SAID];
    for (int i = 0; i < RING_SAID; i++)
        words[i] = number * (i - 4) + (number % 5 == 0 && i == 3 ? member->me : 0);
    delay(member);
    if (with_data)
        fill((int64_t *)ring_eager(&member->ring, member->me, number), member->me, number, 0, RING_EAGER_BYTES / 8);
    ring_write(&member->ring, number, words);
    delay(member);
    ring_post(&member->ring, number);
}

static void await_round(Member *member, int with_data)
{
    const int64_t number = ++member->seen;
    RingMaxima maxima = {{0}, 0, 0};
    while (!ring_is_over(&member->ring, number, 0, -1))
        delay(member);
    check(ring_is_unanimous(&member->ring, number) == (number % 5 != 0 || size == 1), "unanimous", member, number);
    ring_maxima(&member->ring, number, &maxima);
    for (int i = 0; i < RING_SAID; i++)
        check(maxima.words[i] == number * (i - 4) + (number % 5 == 0 && i == 3 ? size - 1 : 0), "word", member, number);
    check(ring_spread(&member->ring, number) == maxima.last - maxima.first && maxima.last >= maxima.first, "time", member, number);
    for (int rank = 0; with_data && rank < size; rank++) {
        const int64_t *data = (const int64_t *)ring_eager(&member->ring, rank, number);
        for (ptrdiff_t i = 0; i < RING_EAGER_BYTES / 8; i++)
            check(data[i] == element(rank, number, i), "eager data", member, number);
    }
}

/* Some rounds with data, of which a member may be RING_AHEAD before it reads the first. */
static void rounds(Member *member)
{
    for (int left = 3 * RING_PLACES; left || member->seen < member->posted;)
        if (left && member->posted - member->seen < RING_AHEAD && (member->posted == member->seen || rand_r(&member->own) % 2)) {
            post(member, 1);
            left--;
        } else
            await_round(member, 1);
}

/* As SharedOperation: all write into their buffers, post a round, and read when it is over. */
static void one_step(Member *member, int64_t turn)
{
    Segment *segment = &member->segment;
    while (!segment_all_at(segment, segment->step, 0, -1))
        delay(member);
    fill((int64_t *)segment_buffer(segment, member->me, segment->step + 1), member->me, turn, 0, ROOM / 8);
    post(member, 0);
    await_round(member, 0);
    segment_advance(segment);
    delay(member);
    for (int rank = 0; rank < size; rank++) {
        const int64_t *data = (const int64_t *)segment_buffer(segment, rank, segment->step);
        for (ptrdiff_t i = 0; i < ROOM / 8; i++)
            check(data[i] == element(rank, turn, i), "data of one step", member, turn);
    }
}

/* ---- transfers ---- */

static void complete(Member *member, Transfer *transfer)
{
    transfer->segment = &member->segment;
    transfer->budget = rand_r(&member->own) % 2 ? -1 : 1000;
    while (!transfer_advance(transfer))
        delay(member);
    delay(member);
}

/* Each member sends a block of its own length to each. */
static void copy(Member *member, int64_t turn)
{
    int64_t sent[MOST][200], got[MOST][200];
    Block blocks[2 * MOST];
    int lengths[MOST][MOST];
    const ptrdiff_t place = ROOM / size / 16 * 16;
    Transfer transfer = {.kind = COPY_BLOCKS, .width = 8 * (1 + any(member, (int)place / 8)), .blocks = blocks};
    for (int from = 0; from < size; from++)
        for (int to = 0; to < size; to++) {
            lengths[from][to] = any(member, 200);
            if (8 * lengths[from][to] > transfer.total)
                transfer.total = 8 * lengths[from][to];
        }
    for (int to = 0; to < size; to++) {
        fill(sent[to], member->me, turn + to, 0, lengths[member->me][to]);
        blocks[transfer.writes++] = (Block){(char *)sent[to], 8 * lengths[member->me][to], member->me, to * place, to};
    }
    for (int from = 0; from < size; from++)
        blocks[transfer.writes + transfer.reads++] =
            (Block){(char *)got[from], 8 * lengths[from][member->me], from, member->me * place, -1};
    complete(member, &transfer);
    for (int from = 0; from < size; from++)
        for (ptrdiff_t i = 0; i < lengths[from][member->me]; i++)
            check(got[from][i] == element(from, turn + member->me, i), "copy", member, turn);
}

/* Each member sends a block to some, from process to process; two members share the pieces of a block. */
static void copy_once(Member *member, int64_t turn)
{
    enum { LONGEST = 2500 };
    static int64_t sent[MOST][MOST][LONGEST], got[MOST][MOST][LONGEST];
    Block blocks[2 * MOST];
    int lengths[MOST][MOST];
    const int me = member->me;
    Transfer transfer = {.kind = SINGLE_COPY, .total = 8 * LONGEST, .width = 64, .blocks = blocks};
    for (int from = 0; from < size; from++)
        for (int to = 0; to < size; to++)
            lengths[from][to] = any(member, 3) ? any(member, LONGEST) : 0;
    for (int to = 0; to < size; to++) {
        fill(sent[me][to], me, turn + to, 0, lengths[me][to]);
        if (to != me)
            blocks[transfer.writes++] = (Block){(char *)sent[me][to], 8 * lengths[me][to], me, 0, to};
    }
    for (int from = 0; from < size; from++)
        if (from != me)
            blocks[transfer.writes + transfer.reads++] = (Block){(char *)got[me][from], 8 * lengths[from][me], from, 0, -1};
    transfer.send = (char *)sent[me][me];
    transfer.recv = (char *)got[me][me];
    transfer.result = 8 * lengths[me][me];
    complete(member, &transfer);
    for (int from = 0; from < size; from++)
        for (ptrdiff_t i = 0; i < lengths[from][me]; i++)
            check(got[me][from][i] == element(from, turn + me, i), "single copy", member, turn);
}

/* Sums for all or for one, in place or not, whole or in parts. */
static void reduce(Member *member, int64_t turn, enum TransferKind kind)
{
    int64_t send[ELEMENTS], recv[ELEMENTS];
    const ptrdiff_t count = 1 + any(member, ELEMENTS - 1);
    const int root = any(member, size + 1) - 1, in_place = any(member, 2);
    int64_t *out = in_place ? send : recv;
    Block block = {(char *)send, 8 * count, member->me, 0, -1};
    Transfer transfer = {.kind = kind, .total = 8 * count, .width = 8 * (1 + any(member, ROOM / 8)), .blocks = &block};
    transfer.writes = kind == REDUCE;
    transfer.send = (char *)send;
    transfer.recv = root < 0 || root == member->me ? (char *)out : NULL;
    transfer.result = 8 * count;
    transfer.reduce = find_reduction("SUM i8")->reduce;
    transfer.itemsize = transfer.part = 8;
    fill(send, member->me, turn, 0, count);
    complete(member, &transfer);
    for (ptrdiff_t i = 0; transfer.recv && i < count; i++)
        check(out[i] == sum(turn, i), kind == REDUCE ? "sum" : "sum of parts", member, turn);
}

static void announce(Member *member, int64_t turn)
{
    Transfer transfer = {.kind = ANNOUNCE, .total = 1, .width = 1, .words = {turn, member->me}};
    complete(member, &transfer);
    for (int rank = 0; rank < size; rank++) {
        int64_t words[2];
        memcpy(words, segment_counter(&member->segment, rank) + 8, sizeof words);
        check(words[0] == turn && words[1] == rank, "announcement", member, turn);
    }
}

static void reduce_in_place(Member *member, int64_t turn)
{
    char *of_all[MOST];
    const ptrdiff_t count = 1 + any(member, ELEMENTS - 1);
    Transfer transfer = {.kind = REDUCE_IN_PLACE, .total = 8 * count, .width = 8 * (1 + any(member, ELEMENTS)), .arrays = of_all};
    for (int rank = 0; rank < size; rank++)
        of_all[rank] = (char *)arrays[rank];
    transfer.reduce = find_reduction("SUM i8")->reduce;
    transfer.itemsize = transfer.part = 8;
    fill(arrays[member->me], member->me, turn, 0, count);
    announce(member, turn); /* all have filled their arrays */
    complete(member, &transfer);
    for (ptrdiff_t i = 0; i < count; i++)
        check(arrays[member->me][i] == sum(turn, i), "sum in place", member, turn);
}

static void *run(void *given)
{
    Member *member = given;
    for (int64_t turn = 0; turn < turns; turn++)
        switch (any(member, 8)) {
        case 0:
            rounds(member);
            break;
        case 1:
            one_step(member, turn);
            break;
        case 2:
            copy(member, turn);
            break;
        case 3:
            reduce(member, turn, REDUCE);
            break;
        case 4:
            reduce(member, turn, REDUCE_PARTS);
            break;
        case 5:
            reduce_in_place(member, turn);
            break;
        case 6:
            copy_once(member, turn);
            break;
        default:
            announce(member, turn);
            /* The words of the next announcement are written when all have read these. */
            segment_advance(&member->segment);
            while (!segment_all_at(&member->segment, member->segment.step, 0, -1))
                delay(member);
        }
    return NULL;
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    size = atoi(argv[1]);
    turns = atoi(argv[2]);
    seed = atoi(argv[3]);
    if (size < 2 || size > MOST)
        return 2;
    pthread_t threads[MOST];
    static Member members[MOST];
    for (int me = 0; me < size; me++) {
        members[me].me = me;
        members[me].own = (unsigned)(seed * MOST + me);
        members[me].common = (unsigned)seed;
        members[me].ring = (Ring){ring_memory, STRIDE, me, size};
        members[me].segment = (Segment){.base = segment_memory, .first = FIRST, .room = ROOM, .me = me, .size = size};
        if ((seed + me) % 2) /* this member takes ordinary stores for slow */
            for (int i = 0; i < STORES_SIZES; i++)
                members[me].segment.stores.of_size[i] = (StoreTimes){.ns = {1 << 24, 1}, .count = 1 << 16};
        if (pthread_create(&threads[me], NULL, run, &members[me]) != 0)
            return 2;
    }
    for (int me = 0; me < size; me++)
        pthread_join(threads[me], NULL);
    printf("%d members made %d turns: %lld rounds, %lld steps\n", size, turns, (long long)members[0].seen,
           (long long)members[0].segment.step);
    return 0;
}
