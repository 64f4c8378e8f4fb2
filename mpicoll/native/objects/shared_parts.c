/* Calls of a SharedOperation whose members send items of any length: bytes objects, or the arrays of an exchange.

   The data of a member, `sends` bytes at most, begins with the length in bytes of each item that the member sends. In an exchange the
   lengths that the member expects from each member follow, and a word that tells whether the items stand apart. Behind the lengths the
   items stand, one behind the other, unless they have no room there: then they stand in the arrays of the program, and are copied from
   process to process when all members have compared the lengths (single_copy.c). In an exchange the members compare all lengths, so that
   all of them move the data in another way if one pair differs. */

#include "objects.h"

/* The words at the begin of the data of a member. */
static int lengths(const SharedOperation *self)
{
    return self->result == EXCHANGED ? 2 * self->parts + 1 : self->parts;
}

static Py_ssize_t room_of_items(const SharedOperation *self)
{
    return self->sends - (Py_ssize_t)sizeof(int64_t) * lengths(self);
}

static int64_t length_at(const char *data, int which)
{
    int64_t length;
    memcpy(&length, data + which * (Py_ssize_t)sizeof length, sizeof length);
    return length;
}

Py_ssize_t shared_part_bytes(const SharedOperation *self, PyObject *item)
{
    if (self->result != EXCHANGED)
        return PyBytes_GET_SIZE(item);
    const Array *array = (Array *)item;
    Py_ssize_t bytes = self->itemsize;
    for (int i = 0; i < array->nd; i++)
        bytes *= array->dimensions[i];
    return bytes;
}

/* Whether the elements are in the byte order of the machine, which NumPy writes in two ways; single bytes have none. */
static int is_native(const Descr *dtype)
{
    const uint16_t one = 1;
    const char mine = *(const char *)&one ? '<' : '>';
    return dtype->byteorder == '=' || dtype->byteorder == '|' || dtype->byteorder == mine;
}

int shared_is_same_dtype(PyObject *dtype, PyObject *wanted)
{
    const Descr *one = (Descr *)dtype, *other = (Descr *)wanted;
    if (dtype == wanted)
        return 1;
    return Py_TYPE(dtype) == Py_TYPE(wanted) && strchr("biufc", one->kind) != NULL && one->type_num == other->type_num &&
           is_native(one) == is_native(other);
}

static int is_item(const SharedOperation *self, PyObject *item, int flags)
{
    if (self->result != EXCHANGED)
        return PyBytes_CheckExact(item);
    const Array *array = (Array *)item;
    return Py_IS_TYPE(item, known.array) && (array->flags & flags) == flags && shared_is_same_dtype(array->descr, self->dtype);
}

/* Whether an array of a list begins before the end of another one: results go into memory of their own. */
static int overlaps(const SharedOperation *self, PyObject *list, Py_ssize_t item)
{
    const char *start = memory(PyList_GET_ITEM(list, item));
    const Py_ssize_t bytes = shared_part_bytes(self, PyList_GET_ITEM(list, item));
    for (Py_ssize_t i = 0; i < item; i++) {
        const char *other = memory(PyList_GET_ITEM(list, i));
        if (start < other + shared_part_bytes(self, PyList_GET_ITEM(list, i)) && other < start + bytes)
            return 1;
    }
    return 0;
}

int shared_parts_fit(const SharedOperation *self, const Given *wanted, PyObject *given)
{
    const int sends = wanted == &self->send;
    if (!PyList_CheckExact(given) || PyList_GET_SIZE(given) != wanted->arrays)
        return 0;
    if (!sends && self->result != EXCHANGED)
        return 1; /* new bytes objects go into the list */
    Py_ssize_t room = room_of_items(self);
    for (Py_ssize_t i = 0; i < wanted->arrays; i++) {
        PyObject *item = PyList_GET_ITEM(given, i);
        if (!is_item(self, item, sends ? READABLE : WRITABLE) || (!sends && overlaps(self, given, i)))
            return 0;
        room -= sends ? shared_part_bytes(self, item) : 0;
    }
    return room >= 0 || self->place > 0;
}

int shared_parts_are_same(const SharedOperation *self, int64_t at, PyObject *list, int receives)
{
    const char *mine = shared_data(self, self->ring->ring.me, at);
    for (int i = 0; self->result == EXCHANGED && i < self->parts; i++)
        if (shared_part_bytes(self, PyList_GET_ITEM(list, i)) != length_at(mine, (receives ? self->parts : 0) + i))
            return 0;
    return 1;
}

/* The bytes of all items that this member sends. */
static Py_ssize_t total(const SharedOperation *self, PyObject *send)
{
    Py_ssize_t bytes = 0;
    for (Py_ssize_t i = 0; i < self->send.arrays; i++)
        bytes += shared_part_bytes(self, PyList_GET_ITEM(send, i));
    return bytes;
}

void shared_write_parts(const SharedOperation *self, char *to, PyObject *send, PyObject *recv)
{
    char *next = to + sizeof(int64_t) * (size_t)lengths(self);
    const int64_t stand_apart = self->result == EXCHANGED && total(self, send) > room_of_items(self);
    for (Py_ssize_t i = 0; i < self->send.arrays; i++) {
        PyObject *item = PyList_GET_ITEM(send, i);
        const int64_t bytes = shared_part_bytes(self, item);
        memcpy(to + i * (Py_ssize_t)sizeof bytes, &bytes, sizeof bytes);
        if (stand_apart)
            continue;
        memcpy(next, self->result == EXCHANGED ? memory(item) : PyBytes_AS_STRING(item), (size_t)bytes);
        next += bytes;
    }
    if (self->result != EXCHANGED)
        return;
    memcpy(to + 2 * self->parts * (Py_ssize_t)sizeof stand_apart, &stand_apart, sizeof stand_apart);
    for (Py_ssize_t i = 0; i < self->parts; i++) {
        const int64_t bytes = shared_part_bytes(self, PyList_GET_ITEM(recv, i));
        memcpy(to + (self->parts + i) * (Py_ssize_t)sizeof bytes, &bytes, sizeof bytes);
    }
}

void shared_read_part(const SharedOperation *self, const char *data, PyObject *recv, int item)
{
    const int mine = self->parts == 1 ? 0 : self->ring->ring.me;
    int64_t from = (int64_t)sizeof from * lengths(self), bytes = 0;
    if (self->result == EXCHANGED && length_at(data, 2 * self->parts) != 0)
        return; /* the item is copied from process to process */
    for (int i = 0; i <= mine; i++) {
        from += bytes;
        bytes = length_at(data, i);
        if (bytes < 0 || bytes > self->sends - from) { /* not of this call: the item stays None */
            return;
        }
    }
    if (self->result == EXCHANGED) {
        memcpy(memory(PyList_GET_ITEM(recv, item)), data + from, (size_t)bytes);
        return;
    }
    PyObject *found = PyBytes_FromStringAndSize(data + from, (Py_ssize_t)bytes);
    if (found == NULL)
        PyErr_Clear(); /* without memory, too */
    else
        PyList_SetItem(recv, item, found);
}

int shared_is_agreed(const SharedOperation *self, int64_t number)
{
    const int size = self->ring->ring.size;
    if (!ring_is_unanimous(&self->ring->ring, number))
        return 0;
    const int64_t at = self->segment == NULL ? number : self->segment->segment.step + 1;
    for (int rank = 0; self->result == EXCHANGED && rank < size; rank++)
        for (int other = 0; other < size; other++)
            if (length_at(shared_data(self, rank, at), other) != length_at(shared_data(self, other, at), size + rank))
                return 0;
    return 1;
}

int shared_parts_stand_apart(const SharedOperation *self, int rank, int64_t at)
{
    return length_at(shared_data(self, rank, at), 2 * self->parts) != 0;
}

Py_ssize_t shared_largest_apart(const SharedOperation *self, int64_t at)
{
    Py_ssize_t largest = 0;
    for (int rank = 0; self->result == EXCHANGED && rank < self->parts; rank++)
        for (int other = 0; shared_parts_stand_apart(self, rank, at) && other < self->parts; other++) {
            const Py_ssize_t bytes = (Py_ssize_t)length_at(shared_data(self, rank, at), other);
            largest = bytes > largest ? bytes : largest;
        }
    return largest;
}

int shared_parts_are_disjoint(const SharedOperation *self, PyObject *send, PyObject *recv)
{
    if (self->result != EXCHANGED || total(self, send) <= room_of_items(self))
        return 1;
    for (Py_ssize_t i = 0; i < self->parts; i++) {
        PyObject *source = PyList_GET_ITEM(send, i);
        const char *from = memory(source);
        const Py_ssize_t bytes = shared_part_bytes(self, source);
        for (Py_ssize_t j = 0; j < self->parts; j++) {
            const char *to = memory(PyList_GET_ITEM(recv, j));
            const int in_place = i == self->ring->ring.me && j == i && from == to; /* the copy changes nothing */
            if (!in_place && from < to + shared_part_bytes(self, PyList_GET_ITEM(recv, j)) && to < from + bytes)
                return 0;
        }
    }
    return 1;
}

int64_t shared_parts_places(PyObject *send, PyObject *recv)
{
    uint64_t found = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(send); i++)
        found = found * 31 + (uint64_t)(uintptr_t)memory(PyList_GET_ITEM(send, i));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(recv); i++)
        found = found * 31 + (uint64_t)(uintptr_t)memory(PyList_GET_ITEM(recv, i));
    return (int64_t)found;
}

Transfer shared_parts_transfer(const SharedOperation *self, PyObject *send, PyObject *recv)
{
    Segment *segment = &self->segment->segment;
    const int me = segment->me, size = segment->size;
    Transfer transfer = {.segment = segment, .kind = SINGLE_COPY, .total = shared_largest_apart(self, segment->step), .itemsize = 1,
                         .blocks = self->blocks};
    Block *next = self->blocks;
    for (int rank = 0; rank < size && shared_parts_stand_apart(self, me, segment->step); rank++) {
        PyObject *item = PyList_GET_ITEM(send, rank);
        if (rank == me)
            transfer.send = memory(item);
        else
            *next++ = (Block){memory(item), shared_part_bytes(self, item), me, rank * self->place, rank};
    }
    transfer.writes = (int)(next - self->blocks);
    for (int rank = 0; rank < size; rank++) {
        PyObject *item = PyList_GET_ITEM(recv, rank);
        if (!shared_parts_stand_apart(self, rank, segment->step))
            continue;
        if (rank == me) {
            transfer.recv = memory(item);
            transfer.result = shared_part_bytes(self, item);
        } else
            *next++ = (Block){memory(item), shared_part_bytes(self, item), rank, me * self->place, -1};
    }
    transfer.reads = (int)(next - self->blocks) - transfer.writes;
    transfer.width = self->place;
    return transfer;
}
