/* The arrays, or bytes objects, that a SharedOperation was prepared for, whether those that a program passes are such, and the blocks in
   arrays of a call that copies once, from process to process. */

#include "objects.h"

int array_matches(PyObject *given, PyObject *dtype, PyObject *shape, int flags)
{
    const Array *array = (Array *)given;
    if (!Py_IS_TYPE(given, known.array) || (array->flags & flags) != flags || array->descr != dtype ||
        array->nd != PyTuple_GET_SIZE(shape))
        return 0;
    for (int i = 0; i < array->nd; i++)
        if (PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, i)) != array->dimensions[i]) {
            PyErr_Clear();
            return 0;
        }
    return 1;
}

void shared_given_free(Given *given)
{
    PyMem_Free(given->counts);
    PyMem_Free(given->nd);
    PyMem_Free(given->dimensions);
    memset(given, 0, sizeof *given);
}

/* Return the number of elements of a shape, -1 and an exception if it is none. */
static Py_ssize_t elements_of(PyObject *shape, Py_ssize_t *dimensions)
{
    Py_ssize_t count = 1;
    if (!PyTuple_Check(shape)) {
        PyErr_SetString(PyExc_TypeError, "a shape is a tuple");
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shape); i++) {
        const Py_ssize_t length = PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, i));
        if (length == -1 && PyErr_Occurred())
            return -1;
        if (length < 0 || (length > 0 && count > PY_SSIZE_T_MAX / 64 / length)) {
            PyErr_SetString(PyExc_ValueError, "no such shape");
            return -1;
        }
        count *= length;
        if (dimensions != NULL)
            dimensions[i] = length;
    }
    return count;
}

int shared_given_init(Given *given, PyObject *shapes)
{
    if (shapes == Py_None)
        return 0;
    if (PyTuple_Check(shapes)) {
        given->arrays = -1;
        given->count = elements_of(shapes, NULL);
        return given->count < 0 ? -1 : 0;
    }
    if (!PyList_Check(shapes)) {
        PyErr_SetString(PyExc_TypeError, "shapes are None, a tuple, or a list of tuples");
        return -1;
    }
    const Py_ssize_t many = PyList_GET_SIZE(shapes);
    Py_ssize_t lengths = 0;
    for (Py_ssize_t i = 0; i < many; i++)
        lengths += PyTuple_Check(PyList_GET_ITEM(shapes, i)) ? PyTuple_GET_SIZE(PyList_GET_ITEM(shapes, i)) : 0;
    given->counts = PyMem_Calloc((size_t)many + 1, sizeof *given->counts);
    given->nd = PyMem_Calloc((size_t)many + 1, sizeof *given->nd);
    given->dimensions = PyMem_Malloc((size_t)(many + 1) * sizeof *given->dimensions + (size_t)(lengths + 1) * sizeof **given->dimensions);
    if (given->counts == NULL || given->nd == NULL || given->dimensions == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    Py_ssize_t *next = (Py_ssize_t *)(given->dimensions + many + 1);
    for (Py_ssize_t i = 0; i < many; i++) {
        PyObject *shape = PyList_GET_ITEM(shapes, i);
        given->dimensions[i] = next;
        given->counts[i] = elements_of(shape, next);
        if (given->counts[i] < 0)
            return -1;
        given->count += given->counts[i];
        given->nd[i] = (int)PyTuple_GET_SIZE(shape);
        next += given->nd[i];
    }
    given->arrays = many;
    return 0;
}

static int has(const SharedOperation *self, PyObject *given, Py_ssize_t count, int flags)
{
    if (!Py_IS_TYPE(given, known.array))
        return 0;
    const Array *array = (Array *)given;
    if ((array->flags & flags) != flags || !shared_is_same_dtype(array->descr, self->dtype))
        return 0;
    Py_ssize_t found = 1;
    for (int i = 0; i < array->nd; i++)
        found *= array->dimensions[i];
    return found == count;
}

int shared_fits(const SharedOperation *self, const Given *wanted, PyObject *given, int flags)
{
    if (wanted->arrays == 0) /* an array that is input on one member and output on another is passed as both */
        return given == Py_None || Py_IS_TYPE(given, known.array);
    if (self->parts)
        return shared_parts_fit(self, wanted, given);
    if (wanted->arrays < 0)
        return has(self, given, wanted->count, flags);
    if (!PyList_CheckExact(given) || PyList_GET_SIZE(given) != wanted->arrays)
        return 0;
    for (Py_ssize_t i = 0; i < wanted->arrays; i++) {
        PyObject *each = PyList_GET_ITEM(given, i);
        if (!has(self, each, wanted->counts[i], flags))
            return 0;
        const Array *array = (Array *)each;
        if (array->nd != wanted->nd[i])
            return 0;
        for (int j = 0; j < array->nd; j++)
            if (array->dimensions[j] != wanted->dimensions[i][j])
                return 0;
        if (flags == WRITABLE) /* results go into memory of their own */
            for (Py_ssize_t j = 0; j < i; j++) {
                const char *other = memory(PyList_GET_ITEM(given, j));
                if (array->data < other + wanted->counts[j] * self->itemsize &&
                    other < array->data + wanted->counts[i] * self->itemsize)
                    return 0;
            }
    }
    return 1;
}

/* The arrays that are given in a call: as a C array of objects, their number, and the bytes of all. */
typedef struct {
    const SharedOperation *self;
    const Given *wanted;
    PyObject **each;
    Together all;
} Items;

static Py_ssize_t bytes_of(const Items *items, Py_ssize_t i)
{
    if (items->self->parts)
        return shared_part_bytes(items->self, items->each[i]);
    return (items->wanted->arrays < 0 ? items->wanted->count : items->wanted->counts[i]) * items->self->itemsize;
}

static Items items_of(const SharedOperation *self, const Given *wanted, PyObject **given)
{
    const int one = wanted->arrays < 0;
    Items items = {self, wanted, one ? given : ((PyListObject *)*given)->ob_item, {0, one ? 1 : wanted->arrays}};
    for (Py_ssize_t i = 0; i < items.all.arrays; i++)
        items.all.bytes += bytes_of(&items, i);
    return items;
}

const char *shared_span(const SharedOperation *self, const Given *arrays, PyObject *given, Py_ssize_t *bytes)
{
    const Items items = items_of(self, arrays, &given);
    const char *start = NULL, *end = NULL;
    for (Py_ssize_t i = 0; i < items.all.arrays; i++) {
        const char *first = memory(items.each[i]), *last = first + bytes_of(&items, i);
        start = start == NULL || first < start ? first : start;
        end = end == NULL || last > end ? last : end;
    }
    *bytes = end - start;
    return start;
}

/* Return the size of the contents of such arrays. */
static Py_ssize_t size_of(const Items *items)
{
    Py_ssize_t size = 0;
    for (Py_ssize_t i = 0; i < items->all.arrays; i++)
        size += contents_size(bytes_of(items, i), items->all);
    return size;
}

PyObject *shared_contents(const SharedOperation *self, const Given *arrays, PyObject *given)
{
    const Items items = items_of(self, arrays, &given);
    PyObject *found = PyBytes_FromStringAndSize(NULL, size_of(&items));
    char *to = found == NULL ? NULL : PyBytes_AS_STRING(found);
    for (Py_ssize_t i = 0; to != NULL && i < items.all.arrays; i++)
        to += contents_copy(to, memory(items.each[i]), bytes_of(&items, i), items.all);
    return found;
}

int shared_is_changed(const SharedOperation *self, const Given *arrays, PyObject *given, PyObject *held)
{
    const Items items = items_of(self, arrays, &given);
    if (!PyBytes_Check(held) || PyBytes_GET_SIZE(held) != size_of(&items))
        return 0;
    const char *at = PyBytes_AS_STRING(held);
    for (Py_ssize_t i = 0; i < items.all.arrays; i++) {
        const Py_ssize_t bytes = bytes_of(&items, i);
        if (contents_differ(at, memory(items.each[i]), bytes, items.all))
            return 1;
        at += contents_size(bytes, items.all);
    }
    return 0;
}

/* ---- of a call that copies once ---- */

enum { MOST_POLLING_NS = 5 * 1000 * 1000 }; /* signal handlers wait so long */

/* Return where the block for or of a member begins in arrays that have one for each, and the bytes of the block. */
static char *part_of(const SharedOperation *self, const Given *arrays, PyObject *given, int rank, ptrdiff_t *bytes)
{
    if (arrays->arrays < 0) {
        *bytes = self->block;
        return memory(given) + rank * self->block;
    }
    *bytes = arrays->counts[rank] * self->itemsize;
    return memory(PyList_GET_ITEM(given, rank));
}

/* Make the transfer of a call whose blocks are known before the call. */
static Transfer transfer_of_blocks(const SharedOperation *self, PyObject *send, PyObject *recv)
{
    Segment *segment = &self->segment->segment;
    Transfer transfer = {.segment = segment, .kind = SINGLE_COPY, .total = self->block, .width = self->width, .itemsize = 1,
                         .blocks = self->blocks};
    Block *next = self->blocks;
    const int me = segment->me, copied = self->result == COPIED;
    ptrdiff_t bytes;
    if (self->send.arrays && !self->place) {
        *next++ = (Block){memory(send), self->sends, me, 0, -1};
        transfer.send = memory(send);
    } else if (self->send.arrays)
        for (int rank = 0; rank < segment->size; rank++) {
            char *part = part_of(self, &self->send, send, rank, &bytes);
            if (rank == me)
                transfer.send = part;
            else
                *next++ = (Block){part, bytes, me, rank * self->place, rank};
        }
    transfer.writes = (int)(next - self->blocks);
    for (int rank = 0; self->result != NOTHING && rank < segment->size; rank++) {
        if (copied && rank != self->root)
            continue;
        char *part = copied ? memory(recv) : part_of(self, &self->recv, recv, rank, &bytes);
        if (copied)
            bytes = self->recv.count * self->itemsize;
        if (rank == me) {
            transfer.recv = part;
            transfer.result = bytes;
        } else
            *next++ = (Block){part, bytes, rank, me * self->place, -1};
    }
    transfer.reads = (int)(next - self->blocks) - transfer.writes;
    return transfer;
}

Transfer shared_transfer(const SharedOperation *self, PyObject *send, PyObject *recv)
{
    Transfer transfer = self->parts ? shared_parts_transfer(self, send, recv) : transfer_of_blocks(self, send, recv);
    transfer.budget = self->budget + (transfer.total / 2 < MOST_POLLING_NS ? transfer.total / 2 : MOST_POLLING_NS);
    return transfer;
}

int64_t shared_places(const Transfer *transfer)
{
    uint64_t found = (uint64_t)(uintptr_t)transfer->send * 31 + (uint64_t)(uintptr_t)transfer->recv;
    for (int i = 0; i < transfer->writes + transfer->reads; i++)
        found = found * 31 + (uint64_t)(uintptr_t)transfer->blocks[i].memory;
    return (int64_t)found;
}

static int overlap(const char *one, ptrdiff_t bytes, const char *other, ptrdiff_t others)
{
    return one < other + others && other < one + bytes;
}

int shared_is_apart(const SharedOperation *self, PyObject *send, PyObject *recv)
{
    Py_ssize_t sent, received;
    if (!self->send.arrays || self->result == NOTHING)
        return 1;
    const char *from = shared_span(self, &self->send, send, &sent), *to = shared_span(self, &self->recv, recv, &received);
    if (!overlap(from, sent, to, received))
        return 1;
    const Transfer transfer = transfer_of_blocks(self, send, recv);
    const Block *writes = transfer.blocks, *reads = transfer.blocks + transfer.writes;
    const int in_place = transfer.send == transfer.recv; /* the copy of the own block changes nothing */
    if (!in_place && overlap(transfer.send, transfer.result, transfer.recv, transfer.result))
        return 0;
    for (int i = 0; i < transfer.writes; i++) {
        if (!in_place && overlap(writes[i].memory, writes[i].bytes, transfer.recv, transfer.result))
            return 0;
        for (int j = 0; j < transfer.reads; j++)
            if (overlap(writes[i].memory, writes[i].bytes, reads[j].memory, reads[j].bytes))
                return 0;
    }
    for (int j = 0; j < transfer.reads; j++)
        if (overlap(transfer.send, transfer.result, reads[j].memory, reads[j].bytes))
            return 0;
    return 1;
}
