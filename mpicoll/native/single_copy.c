/* SINGLE_COPY: blocks are copied once, out of the memory of one process into that of another.

   A member has a table of entries in its buffer, one for each member, and its own entry for what all may know of this member:

   1. Each member writes where the blocks stand that it sends and receives, and goes to the next step.
   2. The two members of a block share its pieces, which the entry of the receiver numbers: the receiver reads pieces, and the sender
      writes pieces when its own blocks are there. Then a member notes, in its buffer of the next step, whether the kernel has copied all,
      and goes to that step.
   3. When all members are at this step, all blocks are there. If a copy has failed, the blocks move as those of COPY_BLOCKS: memory that
      was mapped for a device, say, cannot be copied by the kernel. */

#include "segment.h"

#include "poll.h"

#include <string.h>
#include <unistd.h>

enum { GIVEN_UP = 2, NUMBERED_PIECES = 1 << 30, REVOKE_NS = 1000 * 1000 * 1000 };
enum { MOST_AT_ONCE = 4 * 1024 * 1024 }; /* bytes of one system call: some milliseconds */

/* What a member writes of its blocks with another member. Its own entry has the process in `sends`, and in `failed` whether a copy failed. */
typedef struct {
    int64_t sends, sent_bytes, receives, received_bytes;
    _Atomic int64_t next; /* number of the next piece of the block that is received */
    _Atomic int64_t busy; /* whether the sender may be writing a piece */
    _Atomic int64_t failed; /* 1: the kernel has not copied all; or GIVEN_UP */
    int64_t unused;
} Entry;

_Static_assert(sizeof(Entry) == SINGLE_COPY_ENTRY, "the bytes of an entry");

/* Return the entry that a member has written for its blocks with another. */
static Entry *entry_of(const Segment *segment, int64_t step, int rank, int other)
{
    return (Entry *)segment_buffer(segment, rank, step) + other;
}

void single_copy_announce(const Transfer *transfer, int64_t step)
{
    const Segment *segment = transfer->segment;
    Entry *own = entry_of(segment, step, segment->me, 0);
    memset(own, 0, (size_t)segment->size * sizeof *own);
    for (int i = 0; i < transfer->writes; i++) {
        const Block *block = &transfer->blocks[i];
        for (int rank = 0; rank < segment->size; rank++)
            if (block->peer < 0 || block->peer == rank) {
                own[rank].sends = (int64_t)(uintptr_t)block->memory;
                own[rank].sent_bytes = block->bytes;
            }
    }
    for (int i = transfer->writes; i < transfer->writes + transfer->reads; i++) {
        const Block *block = &transfer->blocks[i];
        own[block->rank].receives = (int64_t)(uintptr_t)block->memory;
        own[block->rank].received_bytes = block->bytes;
    }
    own[segment->me].sends = getpid();
}

/* Return the bytes of a piece of a block. Two members share a block in halves if the sender receives none from the other. Otherwise each
   reads its own as a whole: 4 MiB in pieces of 64 KiB take 1.7 times as long (measured). */
static ptrdiff_t piece_bytes(ptrdiff_t bytes, int both_ways)
{
    const ptrdiff_t piece = both_ways ? bytes : (bytes + 8191) / 8192 * 4096;
    return piece < MOST_AT_ONCE ? piece : MOST_AT_ONCE;
}

/* Return the bytes of the block from one member to another: 0 if there is none. */
static ptrdiff_t block_bytes(const Segment *segment, int from, int to)
{
    const int64_t sent = entry_of(segment, segment->step, from, to)->sent_bytes;
    const int64_t received = entry_of(segment, segment->step, to, from)->received_bytes;
    return sent < received ? sent : received;
}

/* Copy the next piece of the block from one member to another, of which this member is one. Return 1, 0 if none is left, or -1 if the
   kernel does not copy the piece. */
static int copy_piece(const Segment *segment, int from, int to)
{
    const Entry *sent = entry_of(segment, segment->step, from, to);
    Entry *received = entry_of(segment, segment->step, to, from);
    const int receives = to == segment->me;
    const ptrdiff_t bytes = block_bytes(segment, from, to), piece = piece_bytes(bytes, block_bytes(segment, to, from) != 0);
    int found = 0;
    if (bytes == 0)
        return 0;
    if (!receives)
        atomic_fetch_add(&received->busy, 1); /* before the number is taken: see single_copy_revoke() */
    const int64_t at = atomic_fetch_add(&received->next, 1) * piece;
    if (at < bytes) {
        const ptrdiff_t many = bytes - at < piece ? bytes - at : piece;
        const int64_t pid = entry_of(segment, segment->step, receives ? from : to, receives ? from : to)->sends;
        const int64_t source = sent->sends + at, target = received->receives + at;
        const int copied = receives ? peer_read(pid, (char *)(uintptr_t)target, source, many)
                                    : peer_write(pid, (const char *)(uintptr_t)source, target, many);
        found = copied ? 1 : -1;
    }
    if (!receives)
        atomic_fetch_sub(&received->busy, 1);
    return found;
}

/* Copy one piece, before the first the own block. This member first reads what it receives, from the next member on, and then writes what other members have not read. */
static void copy_next(Transfer *transfer)
{
    Segment *segment = transfer->segment;
    if (transfer->result) {
        const ptrdiff_t most = MOST_AT_ONCE, many = transfer->result < most ? transfer->result : most;
        memmove(transfer->recv, transfer->send, (size_t)many); /* may be the same memory */
        transfer->send += many;
        transfer->recv += many;
        transfer->result -= many;
        return;
    }
    const int size = segment->size, others = size - 1, distance = transfer->exchange % others + 1;
    const int reads = transfer->exchange < others, peer = (segment->me + (reads ? distance : size - distance)) % size;
    const int found = reads ? copy_piece(segment, peer, segment->me) : copy_piece(segment, segment->me, peer);
    if (found <= 0)
        transfer->exchange++;
    if (found < 0 || transfer->exchange == 2 * others) {
        entry_of(segment, segment->step + 1, segment->me, segment->me)->failed = found < 0; /* read in that step */
        segment_advance(segment);
        transfer->phase = 2;
    }
}

int single_copy_step(Transfer *transfer)
{
    Segment *segment = transfer->segment;
    transfer->wanted = segment->step;
    if (!segment_all_at(segment, segment->step, now_ns(), transfer->budget))
        return 0;
    if (transfer->phase == 0) {
        single_copy_announce(transfer, segment->step + 1);
        segment_advance(segment);
        transfer->phase = 1;
        return 1;
    }
    if (transfer->phase == 1) {
        copy_next(transfer);
        return 1;
    }
    int failed = 0;
    for (int rank = 0; rank < segment->size; rank++) {
        const int64_t found = atomic_load(&entry_of(segment, segment->step, rank, rank)->failed);
        if (found == GIVEN_UP) { /* what was read there may have changed meanwhile: wait for a step that this member never reaches */
            transfer->wanted = segment->step + 1;
            return 0;
        }
        failed |= found != 0;
    }
    transfer->phase = 0;
    transfer->kind = COPY_BLOCKS;
    transfer->done = failed ? 0 : transfer->total;
    return 1;
}

void single_copy_revoke(Transfer *transfer)
{
    const Segment *segment = transfer->segment;
    if (transfer->kind != SINGLE_COPY || transfer->phase == 0)
        return;
    if (transfer->phase == 2)
        atomic_store(&entry_of(segment, segment->step, segment->me, segment->me)->failed, GIVEN_UP);
    const int64_t began = now_ns(), step = transfer->phase == 1 ? segment->step : segment->step - 1;
    for (int rank = 0; rank < segment->size; rank++) {
        Entry *entry = entry_of(segment, step, segment->me, rank);
        atomic_store(&entry->next, NUMBERED_PIECES);
        while (atomic_load(&entry->busy) != 0 && now_ns() - began < REVOKE_NS) /* a member that was killed leaves the number */
            sched_yield();
    }
}
