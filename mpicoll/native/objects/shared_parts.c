/* Calls of a SharedOperation whose members send items of any length: bytes objects, or the arrays of an exchange.

   The data of a member, `sends` bytes at most, begins with the length in bytes of each item that the member sends. In an exchange the
   lengths that the member expects from each member follow. Behind the lengths the items stand, one behind the other. In an exchange the
   members compare all lengths, so that all of them move the data in another way if one pair differs. */

#include "objects.h"

static int lengths(const SharedOperation *self)
{
    return self->result == EXCHANGED ? 2 * self->parts : self->parts;
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
    Py_ssize_t room = self->sends - (Py_ssize_t)sizeof(int64_t) * lengths(self);
    for (Py_ssize_t i = 0; i < wanted->arrays; i++) {
        PyObject *item = PyList_GET_ITEM(given, i);
        if (!is_item(self, item, sends ? READABLE : WRITABLE) || (sends ? shared_part_bytes(self, item) > room : overlaps(self, given, i)))
            return 0;
        room -= sends ? shared_part_bytes(self, item) : 0;
    }
    return 1;
}

int shared_parts_are_same(const SharedOperation *self, int64_t at, PyObject *recv)
{
    const char *mine = shared_data(self, self->ring->ring.me, at);
    for (int i = 0; self->result == EXCHANGED && i < self->parts; i++)
        if (shared_part_bytes(self, PyList_GET_ITEM(recv, i)) != length_at(mine, self->parts + i))
            return 0;
    return 1;
}

void shared_write_parts(const SharedOperation *self, char *to, PyObject *send, PyObject *recv)
{
    char *next = to + sizeof(int64_t) * (size_t)lengths(self);
    for (Py_ssize_t i = 0; i < self->send.arrays; i++) {
        PyObject *item = PyList_GET_ITEM(send, i);
        const int64_t bytes = shared_part_bytes(self, item);
        memcpy(to + i * (Py_ssize_t)sizeof bytes, &bytes, sizeof bytes);
        memcpy(next, self->result == EXCHANGED ? memory(item) : PyBytes_AS_STRING(item), (size_t)bytes);
        next += bytes;
    }
    if (self->result != EXCHANGED)
        return;
    for (Py_ssize_t i = 0; i < self->parts; i++) {
        const int64_t bytes = shared_part_bytes(self, PyList_GET_ITEM(recv, i));
        memcpy(to + (self->parts + i) * (Py_ssize_t)sizeof bytes, &bytes, sizeof bytes);
    }
}

void shared_read_part(const SharedOperation *self, const char *data, PyObject *recv, int item)
{
    const int mine = self->parts == 1 ? 0 : self->ring->ring.me;
    int64_t from = (int64_t)sizeof from * lengths(self), bytes = 0;
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
