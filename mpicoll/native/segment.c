/* Steps and transfers in the memory that the members of a group share. The protocol is described in segment.h. */

#include "segment.h"

#include "poll.h"

#include <string.h>

enum { BLOCK_BYTES = 8192 }; /* reduced at once where the result is then copied: the block stays in the nearest cache */

char *segment_counter(const Segment *segment, int rank)
{
    return segment->base + (ptrdiff_t)rank * SEGMENT_LINE;
}

char *segment_buffer(const Segment *segment, int rank, int64_t step)
{
    return segment->base + segment->first + ((ptrdiff_t)rank * SEGMENT_BUFFERS + (step & 1)) * segment->room;
}

void segment_advance(Segment *segment)
{
    store(segment_counter(segment, segment->me), ++segment->step);
}

int segment_all_at(const Segment *segment, int64_t step, int64_t began, int64_t budget)
{
    for (int rank = 0; rank < segment->size; rank++)
        if (rank != segment->me && !poll_for(segment_counter(segment, rank), step, began, budget))
            return 0;
    return 1;
}

/* ---- transfers ---- */

static ptrdiff_t least(ptrdiff_t one, ptrdiff_t other)
{
    return one < other ? one : other;
}

/* Bytes of the piece at `done` of something of `bytes` bytes. */
static ptrdiff_t piece_of(const Transfer *transfer, ptrdiff_t bytes)
{
    const ptrdiff_t left = bytes - transfer->done;
    return left < 0 ? 0 : least(left, transfer->width);
}

static int wait_for_all(Transfer *transfer)
{
    transfer->wanted = transfer->segment->step;
    return segment_all_at(transfer->segment, transfer->wanted, now_ns(), transfer->budget);
}

static int wait_for_sources(Transfer *transfer)
{
    const int64_t began = now_ns();
    transfer->wanted = transfer->segment->step;
    for (int i = transfer->writes; i < transfer->writes + transfer->reads; i++)
        if (!poll_for(segment_counter(transfer->segment, transfer->blocks[i].rank), transfer->wanted, began, transfer->budget))
            return 0;
    return 1;
}

/* Write this member's blocks of the piece, when all others have read what stood there, and go to the next step. */
static int write_blocks(Transfer *transfer)
{
    Segment *segment = transfer->segment;
    if (transfer->writes && !wait_for_all(transfer))
        return 0;
    char *buffer = segment_buffer(segment, segment->me, segment->step + 1);
    for (int i = 0; i < transfer->writes; i++) {
        const Block *block = &transfer->blocks[i];
        copy_out(&segment->stores, buffer + block->at, block->memory + transfer->done, piece_of(transfer, block->bytes));
    }
    segment_advance(segment);
    return 1;
}

static void read_blocks(const Transfer *transfer)
{
    const Segment *segment = transfer->segment;
    for (int i = transfer->writes; i < transfer->writes + transfer->reads; i++) {
        const Block *block = &transfer->blocks[i];
        const ptrdiff_t bytes = piece_of(transfer, block->bytes);
        if (bytes)
            memcpy(block->memory + transfer->done, segment_buffer(segment, block->rank, segment->step) + block->at, (size_t)bytes);
    }
}

/* Return the term of a member. Two terms at most may be reduced where the result goes: the third finds its place overwritten. */
static const char *term_of(const Transfer *transfer, int rank)
{
    const Segment *segment = transfer->segment;
    if (rank == segment->me && (transfer->send != transfer->recv || rank < 2))
        return transfer->send + transfer->done;
    return segment_buffer(segment, rank, segment->step) + transfer->read_at;
}

static void reduce_piece(const Transfer *transfer)
{
    const ptrdiff_t count = piece_of(transfer, transfer->result) / transfer->part;
    char *out = transfer->recv + transfer->done;
    if (!count)
        return;
    transfer->reduce(out, term_of(transfer, 0), term_of(transfer, 1), count);
    for (int rank = 2; rank < transfer->segment->size; rank++)
        transfer->reduce(out, out, term_of(transfer, rank), count);
}

/* Return where the part of a member begins in a range of `bytes`, in bytes. */
static ptrdiff_t edge(const Transfer *transfer, ptrdiff_t bytes, int rank)
{
    return bytes / transfer->itemsize * rank / transfer->segment->size * transfer->itemsize;
}

static int copy_blocks_step(Transfer *transfer)
{
    if (transfer->phase == 0) {
        if (!write_blocks(transfer))
            return 0;
        transfer->phase = 1;
    }
    if (transfer->reads) {
        if (!wait_for_sources(transfer))
            return 0;
        read_blocks(transfer);
    }
    transfer->phase = 0;
    transfer->done += transfer->width;
    return 1;
}

static int reduce_step(Transfer *transfer)
{
    if (transfer->phase == 0) {
        if (!write_blocks(transfer))
            return 0;
        transfer->phase = 1;
    }
    if (transfer->recv != NULL) {
        if (!wait_for_all(transfer))
            return 0;
        reduce_piece(transfer);
    }
    transfer->phase = 0;
    transfer->done += transfer->width;
    return 1;
}

/* Reduce the elements from `low` to `high` of the piece into this member's buffer of the next step. */
static void reduce_part(const Transfer *transfer, ptrdiff_t low, ptrdiff_t high)
{
    const Segment *segment = transfer->segment;
    const char *send = transfer->send + transfer->done;
    char *result = segment_buffer(segment, segment->me, segment->step + 1);
    char block[BLOCK_BYTES] __attribute__((aligned(64)));
    const int passes_cache = stores_pass_cache(&segment->stores, high - low);
    const ptrdiff_t most = passes_cache ? BLOCK_BYTES / transfer->itemsize * transfer->itemsize : high - low;
    for (ptrdiff_t at = low; at < high; at += most) {
        const ptrdiff_t bytes = least(most, high - at);
        char *out = passes_cache ? block : result + at;
        for (int rank = 1; rank < segment->size; rank++) {
            const char *one = rank > 1 ? out : (segment->me == 0 ? send : segment_buffer(segment, 0, segment->step)) + at;
            const char *other = (rank == segment->me ? send : segment_buffer(segment, rank, segment->step)) + at;
            transfer->reduce(out, one, other, bytes / transfer->part);
        }
        if (passes_cache)
            copy_past_cache(result + at, block, bytes);
    }
}

static int reduce_parts_step(Transfer *transfer)
{
    Segment *segment = transfer->segment;
    const ptrdiff_t bytes = piece_of(transfer, transfer->total);
    const ptrdiff_t low = edge(transfer, bytes, segment->me), high = edge(transfer, bytes, segment->me + 1);
    const char *send = transfer->send + transfer->done;
    if (!wait_for_all(transfer))
        return 0;
    switch (transfer->phase) {
    case 0: { /* write the parts of the others */
        char *buffer = segment_buffer(segment, segment->me, segment->step + 1);
        copy_out(&segment->stores, buffer, send, low);
        copy_out(&segment->stores, buffer + high, send + high, bytes - high);
        segment_advance(segment);
        transfer->phase = 1;
        return 1;
    }
    case 1: /* all are at this step: the buffer of the next one is not read any more */
        reduce_part(transfer, low, high);
        segment_advance(segment);
        transfer->phase = 2;
        if (transfer->recv != NULL)
            return 1;
        break;
    default: /* read all parts */
        for (int rank = 0; rank < segment->size; rank++) {
            const ptrdiff_t at = edge(transfer, bytes, rank), end = edge(transfer, bytes, rank + 1);
            memcpy(transfer->recv + transfer->done + at, segment_buffer(segment, rank, segment->step) + at, (size_t)(end - at));
        }
    }
    transfer->phase = 0;
    transfer->done += transfer->width;
    return 1;
}

static int announce_step(Transfer *transfer)
{
    Segment *segment = transfer->segment;
    if (!wait_for_all(transfer))
        return 0;
    if (transfer->phase == 0) {
        memcpy(segment_counter(segment, segment->me) + 8, transfer->words, sizeof transfer->words);
        segment_advance(segment);
        transfer->phase = 1;
        return 1;
    }
    transfer->done = transfer->total;
    return 1;
}

/* Reduce the elements from `at` on of the arrays of all members into this member's. */
static void reduce_arrays(const Transfer *transfer, ptrdiff_t at, ptrdiff_t bytes, int passes_cache)
{
    const int me = transfer->segment->me;
    char block[BLOCK_BYTES] __attribute__((aligned(64)));
    char *mine = transfer->arrays[me] + at, *out = passes_cache || me > 1 ? block : mine; /* the third terms are read later */
    for (int rank = 1; rank < transfer->segment->size; rank++)
        transfer->reduce(out, rank > 1 ? out : transfer->arrays[0] + at, transfer->arrays[rank] + at, bytes / transfer->part);
    if (passes_cache)
        copy_past_cache(mine, block, bytes);
    else if (out != mine)
        memcpy(mine, block, (size_t)bytes);
}

static int reduce_in_place_step(Transfer *transfer)
{
    Segment *segment = transfer->segment;
    if (transfer->phase == 0) { /* `done` goes through this member's part */
        const ptrdiff_t low = edge(transfer, transfer->total, segment->me), high = edge(transfer, transfer->total, segment->me + 1);
        const ptrdiff_t most = BLOCK_BYTES / transfer->itemsize * transfer->itemsize;
        const ptrdiff_t end = low + least(transfer->done + transfer->width, high - low);
        const int passes_cache = stores_pass_cache(&segment->stores, least(transfer->width, high - low));
        for (ptrdiff_t at = low + transfer->done; at < end; at += most)
            reduce_arrays(transfer, at, least(most, end - at), passes_cache);
        transfer->done += transfer->width;
        if (low + transfer->done < high)
            return 1;
        transfer->done = 0;
        segment_advance(segment);
        transfer->phase = 1;
        return 1;
    }
    if (!wait_for_all(transfer))
        return 0;
    if (transfer->phase == 1) { /* `done` goes through the whole */
        const ptrdiff_t end = least(transfer->done + transfer->width, transfer->total);
        for (int rank = 0; rank < segment->size; rank++) {
            ptrdiff_t at = edge(transfer, transfer->total, rank), stop = least(edge(transfer, transfer->total, rank + 1), end);
            at = at < transfer->done ? transfer->done : at;
            if (rank != segment->me && at < stop)
                copy_out(&segment->stores, transfer->arrays[segment->me] + at, transfer->arrays[rank] + at, stop - at);
        }
        if (end < transfer->total) {
            transfer->done = end;
            return 1;
        }
        segment_advance(segment);
        transfer->phase = 2;
        return 1;
    }
    transfer->done = transfer->total; /* all have read this member's array */
    return 1;
}

int transfer_advance(Transfer *transfer)
{
    static int (*const steps[])(Transfer *) = {
        [COPY_BLOCKS] = copy_blocks_step,   [SINGLE_COPY] = single_copy_step, [REDUCE] = reduce_step,
        [REDUCE_PARTS] = reduce_parts_step, [ANNOUNCE] = announce_step,       [REDUCE_IN_PLACE] = reduce_in_place_step,
    };
    const int64_t began = now_ns(), budget = transfer->budget;
    int moved = 1;
    if (transfer->is_late)
        transfer->budget = -1; /* the time for this member has passed: look once */
    while (transfer->done < transfer->total && (moved = steps[transfer->kind](transfer))) {
        transfer->budget = budget;
        if (now_ns() - began > TRANSFER_NS)
            break;
    }
    transfer->budget = budget;
    transfer->is_late = !moved;
    return transfer->done >= transfer->total;
}

int transfer_waits_for(const Transfer *transfer, int rank)
{
    if (rank == transfer->segment->me || load(segment_counter(transfer->segment, rank)) >= transfer->wanted)
        return 0;
    if (transfer->kind != COPY_BLOCKS || transfer->phase == 0)
        return 1;
    for (int i = transfer->writes; i < transfer->writes + transfer->reads; i++)
        if (transfer->blocks[i].rank == rank)
            return 1;
    return 0;
}
