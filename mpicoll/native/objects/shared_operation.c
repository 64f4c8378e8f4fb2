/* SharedOperation: a collective call of a group on one node, prepared for its arrays; how its data is written and read. */

#include "objects.h"

static int shared_traverse(SharedOperation *self, visitproc visit, void *arg)
{
    Py_VISIT(self->acquire);
    Py_VISIT(self->release);
    Py_VISIT(self->dtype);
    return 0;
}

static int shared_clear(SharedOperation *self)
{
    Py_CLEAR(self->acquire);
    Py_CLEAR(self->release);
    Py_CLEAR(self->dtype);
    return 0;
}

static void shared_dealloc(SharedOperation *self)
{
    PyObject_GC_UnTrack(self);
    shared_clear(self);
    Py_CLEAR(self->op);
    Py_CLEAR(self->given_words);
    Py_CLEAR(self->order);
    Py_CLEAR(self->ring);
    Py_CLEAR(self->segment);
    shared_given_free(&self->send);
    shared_given_free(&self->recv);
    PyMem_Free(self->blocks);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

int shared_take_lock(SharedOperation *self, PyObject *group)
{
    if (self->order->issued != self->order->moving) { /* a call is under way, maybe of another thread */
        PyObject *no[] = {Py_False}, *taken = PyObject_Vectorcall(self->acquire, no, 1, NULL);
        Py_XDECREF(taken); /* a bool, which stays */
        if (taken != Py_False)
            return taken == NULL ? -1 : 0;
        PyObject *warned = PyObject_CallMethodNoArgs(group, known.warn_of_threads);
        if (warned == NULL)
            return -1;
        Py_DECREF(warned);
    }
    PyObject *done = PyObject_CallNoArgs(self->acquire);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Whether the arrays of a list are reduced, each in its place. The data of a member is all of them, one behind the other. */
static int is_packed(const SharedOperation *self)
{
    return self->result == REDUCED && self->recv.arrays > 0;
}

/* Whether the arrays of a list have as many bytes each as a block. */
static int are_blocks(const SharedOperation *self, const Given *arrays)
{
    for (Py_ssize_t i = 0; i < arrays->arrays; i++)
        if (arrays->counts[i] * self->itemsize != self->block)
            return 0;
    return 1;
}

/* Whether the blocks of a call that copies once, and the pieces of these, are in its arrays and in the room of a member. */
static int is_single_copy(const SharedOperation *self, Py_ssize_t room)
{
    const int size = self->ring->ring.size, parted = self->place > 0; /* another block for each member */
    if (self->segment == NULL || size < 2 || room / SINGLE_COPY_ENTRY < size || self->place > room / size || self->reduction != NULL)
        return 0;
    if (self->width > (parted ? self->place : room) || !are_blocks(self, &self->send) || !are_blocks(self, &self->recv))
        return 0;
    if (self->send.arrays ? self->sends != self->block * (parted ? size : 1) : self->sends != 0)
        return 0;
    if (self->send.arrays > 0 && (!parted || self->send.arrays != size))
        return 0;
    /* A member that receives of all copies its own block, and so does the root of a scatter. */
    const int has_own = self->result == ROWS || self->result == LIST || (self->result == COPIED && self->root == self->ring->ring.me);
    return !has_own || (self->send.arrays && (self->result != COPIED || parted));
}

/* Whether the lengths of items of any length, at least, are in the room of a member, and the lists are those of the result. */
static int is_in_parts(const SharedOperation *self, Py_ssize_t room)
{
    const int size = self->ring->ring.size;
    if (self->copies_once || self->width != self->block || self->block != self->sends || self->sends > room || self->itemsize <= 0 ||
        (self->parts != 1 && self->parts != size) || self->sends / (Py_ssize_t)sizeof(int64_t) <= 2 * self->parts + 1)
        return 0;
    if (self->send.arrays != 0 && self->send.arrays != self->parts)
        return 0;
    switch (self->result) {
    case NOTHING:
        return self->recv.arrays == 0;
    case COPIED:
        return self->recv.arrays == 1 && self->root >= 0;
    case LIST:
        return self->recv.arrays == size && self->parts == 1;
    case EXCHANGED:
        return self->recv.arrays == size && self->send.arrays == size &&
               (self->place == 0 || (self->segment != NULL && room / SINGLE_COPY_ENTRY >= size && self->place <= room / size));
    default:
        return 0;
    }
}

/* Whether all that is written and read stays in the room of a member, and the arrays are those of the result. */
static int is_consistent(const SharedOperation *self)
{
    const int size = self->ring->ring.size;
    const Py_ssize_t room = self->segment == NULL ? RING_EAGER_BYTES : self->segment->segment.room;
    const Given *send = &self->send, *recv = &self->recv;
    if (self->itemsize <= 0 || self->sends < 0 || self->block < 0 || self->offset < 0 || self->width <= 0 || self->root >= size)
        return 0;
    if (self->segment != NULL && (self->segment->segment.size != size || self->segment->segment.me != self->ring->ring.me))
        return 0;
    if (self->parts)
        return is_in_parts(self, room);
    if (self->copies_once) {
        if (!is_single_copy(self, room))
            return 0;
    } else if (self->width < self->block) { /* one array in several pieces */
        if (self->segment == NULL || self->width > room || self->width % self->itemsize || self->offset != 0 ||
            (self->sends != 0 && self->sends != self->block) || send->arrays > 0 || recv->arrays > 0 || self->result == ROWS ||
            (recv->arrays < 0 && recv->count * self->itemsize != self->block))
            return 0;
    } else if (self->sends > room || self->offset > room - self->block)
        return 0;
    if (send->arrays < 0 && send->count * self->itemsize != self->sends)
        return 0;
    for (Py_ssize_t i = 0; i < send->arrays && !is_packed(self); i++)
        if (send->counts[i] * self->itemsize > self->block || i * self->block > self->sends - send->counts[i] * self->itemsize)
            return 0;
    for (Py_ssize_t i = 0; i < recv->arrays; i++)
        if (recv->counts[i] * self->itemsize > self->block)
            return 0;
    switch (self->result) {
    case NOTHING:
        return 1;
    case REDUCED:
        if (is_packed(self) && (send->arrays != recv->arrays || send->count * self->itemsize != self->sends || self->sends != self->block))
            return 0;
        return recv->arrays != 0 && self->reduction != NULL && recv->count * self->itemsize <= self->block && size > 0 &&
               self->itemsize == reduction_itemsize(self->reduction) && (!self->average || self->reduction->divide != NULL);
    case COPIED:
        return recv->arrays < 0 && self->root >= 0 && recv->count * self->itemsize <= self->block;
    case ROWS:
        return recv->arrays < 0 && recv->count * self->itemsize == size * self->block;
    case LIST:
        return recv->arrays == size;
    case EXCHANGED:
        break; /* only in parts */
    }
    return 0;
}

static PyObject *shared_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"op", "lock", "ring", "segment", "order", "words", "dtype", "itemsize", "sends", "offset", "block", "width", "root",
                            "send", "recv", "result", "reduction", "average", "in_place", "poll_ns", "place", "parts", NULL};
    static const char *const results[] = {
        [NOTHING] = "", [REDUCED] = "reduced", [COPIED] = "copied", [ROWS] = "rows", [LIST] = "list", [EXCHANGED] = "exchanged"};
    PyObject *op, *lock, *ring, *segment, *order, *words, *dtype, *send, *recv;
    const char *result, *reduction;
    Py_ssize_t itemsize, sends, offset, block, width;
    int root, average, in_place, parts = 0;
    Py_ssize_t place = -1;
    long long budget;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "UOO!OO!O!OnnnnniOOssppL|ni", names, &op, &lock, &RingType, &ring, &segment, &OrderType, &order, &PyTuple_Type,
                                     &words, &dtype, &itemsize, &sends, &offset, &block, &width, &root, &send, &recv, &result,
                                     &reduction, &average, &in_place, &budget, &place, &parts))
        return NULL;
    if (!is_made(((RingObject *)ring)->ring.base, "ring") ||
        (segment != Py_None && Py_IS_TYPE(segment, &SegmentType) && !is_made(((SegmentObject *)segment)->segment.base, "segment")))
        return NULL;
    SharedOperation *self = (SharedOperation *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->ring = (RingObject *)Py_NewRef(ring);
    int wrong = segment != Py_None && !Py_IS_TYPE(segment, &SegmentType);
    if (!wrong && segment != Py_None)
        self->segment = (SegmentObject *)Py_NewRef(segment);
    wrong |= PyTuple_GET_SIZE(words) != RING_SAID;
    for (int i = 0; !wrong && i < RING_SAID; i++)
        self->words[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(words, i));
    self->order = (CallOrder *)Py_NewRef(order);
    self->op = Py_NewRef(op);
    self->given_words = Py_NewRef(words);
    self->acquire = PyObject_GetAttrString(lock, "acquire");
    self->release = self->acquire == NULL ? NULL : PyObject_GetAttrString(lock, "release");
    self->dtype = Py_NewRef(dtype);
    self->itemsize = itemsize;
    self->sends = sends;
    self->offset = offset;
    self->block = block;
    self->width = width;
    self->root = root;
    self->average = average;
    self->in_place = in_place;
    self->budget = budget;
    self->copies_once = place >= 0 && parts == 0;
    self->place = place < 0 ? 0 : place;
    self->parts = parts;
    self->blocks = PyMem_Calloc(2 * (size_t)self->ring->ring.size, sizeof *self->blocks);
    if (self->blocks == NULL)
        PyErr_NoMemory();
    self->reduction = find_reduction(reduction);
    if (PyErr_Occurred() || shared_given_init(&self->send, send) < 0 || shared_given_init(&self->recv, recv) < 0)
        goto failed;
    int found = -1;
    for (int i = 0; i < (int)(sizeof results / sizeof *results); i++)
        if (strcmp(results[i], result) == 0)
            found = i;
    self->result = found < 0 ? NOTHING : (enum Result)found;
    if (wrong || found < 0 || !is_consistent(self)) {
        PyErr_SetString(PyExc_ValueError, "the call does not fit into its memory");
        goto failed;
    }
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

/* Bytes of the piece that begins at `from`. */
static Py_ssize_t piece(const SharedOperation *self, Py_ssize_t from)
{
    return self->block - from < self->width ? self->block - from : self->width;
}

void shared_write_data(const SharedOperation *self, int64_t at, PyObject *send, PyObject *recv, Py_ssize_t from)
{
    char *to = shared_data(self, self->ring->ring.me, at);
    Stores *stores = self->segment == NULL ? NULL : &self->segment->segment.stores;
    if (self->parts) {
        shared_write_parts(self, to, send, recv);
        return;
    }
    if (self->send.arrays < 0)
        copy_out(stores, to, memory(send) + from, self->width < self->block ? piece(self, from) : self->sends);
    for (Py_ssize_t i = 0; i < self->send.arrays; i++) {
        const Py_ssize_t bytes = self->send.counts[i] * self->itemsize;
        copy_out(stores, to, memory(PyList_GET_ITEM(send, i)), bytes);
        to += is_packed(self) ? bytes : self->block;
    }
}

/* Return the terms of a member. Two of them may stand where the result goes: the third finds its place overwritten. */
static const char *terms(const SharedOperation *self, int rank, int64_t at, Py_ssize_t offset, const char *out)
{
    return rank == self->ring->ring.me && self->in_place && rank < 2 ? out : shared_data(self, rank, at) + offset;
}

/* Reduce the terms of the members that begin at an offset of their data, in the order of the ranks. */
static void reduce(const SharedOperation *self, int64_t at, Py_ssize_t offset, char *out, Py_ssize_t bytes)
{
    const int size = self->ring->ring.size;
    if (size == 1)
        memcpy(out, shared_data(self, 0, at) + offset, (size_t)bytes);
    for (int rank = 1; rank < size; rank++)
        self->reduction->reduce(out, rank == 1 ? terms(self, 0, at, offset, out) : out, terms(self, rank, at, offset, out),
                                bytes / self->itemsize * self->reduction->parts);
    if (self->average)
        self->reduction->divide(out, bytes / self->itemsize, size);
}

/* Read the piece of the result that begins at `from`. */
void shared_read_result(const SharedOperation *self, int64_t at, PyObject *recv, Py_ssize_t from)
{
    const int size = self->ring->ring.size;
    const Py_ssize_t bytes = self->width < self->block ? piece(self, from) : self->recv.count * self->itemsize;
    Py_ssize_t offset = self->offset;
    for (Py_ssize_t i = 0; self->parts && i < self->recv.arrays; i++) {
        const int rank = self->result == COPIED ? self->root : (int)i;
        shared_read_part(self, shared_data(self, rank, at), recv, (int)i);
    }
    if (self->parts)
        return;
    switch (self->result) {
    case REDUCED:
        if (self->recv.arrays < 0)
            reduce(self, at, offset, memory(recv) + from, bytes);
        for (Py_ssize_t i = 0; i < self->recv.arrays; i++) {
            reduce(self, at, offset, memory(PyList_GET_ITEM(recv, i)), self->recv.counts[i] * self->itemsize);
            offset += self->recv.counts[i] * self->itemsize;
        }
        break;
    case COPIED:
        memcpy(memory(recv) + from, shared_data(self, self->root, at) + self->offset, (size_t)bytes);
        break;
    case ROWS:
        for (int rank = 0; rank < size; rank++)
            memcpy(memory(recv) + rank * self->block, shared_data(self, rank, at) + self->offset, (size_t)self->block);
        break;
    case LIST:
        for (int rank = 0; rank < size; rank++)
            memcpy(memory(PyList_GET_ITEM(recv, rank)), shared_data(self, rank, at) + self->offset,
                   (size_t)(self->recv.counts[rank] * self->itemsize));
        break;
    case NOTHING:
    case EXCHANGED:
        break;
    }
}

static PyObject *shared_write(SharedOperation *self, PyObject *args)
{
    long long number;
    PyObject *send, *recv = Py_None;
    if (!PyArg_ParseTuple(args, "LO|O", &number, &send, &recv))
        return NULL;
    if (number < 0 || is_in_steps(self) || !shared_fits(self, &self->send, send, READABLE) ||
        (self->parts && !shared_fits(self, &self->recv, recv, WRITABLE))) {
        PyErr_SetString(PyExc_ValueError, "the arrays are not those that the call was prepared for");
        return NULL;
    }
    shared_write_data(self, self->segment == NULL ? number : self->segment->segment.step + 1, send, recv, 0);
    Py_RETURN_NONE;
}

static PyObject *shared_read(SharedOperation *self, PyObject *args)
{
    long long at;
    PyObject *recv;
    if (!PyArg_ParseTuple(args, "LO", &at, &recv))
        return NULL;
    if (at < 0 || is_in_steps(self) || !shared_fits(self, &self->recv, recv, WRITABLE) ||
        !shared_parts_are_same(self, at, recv, 1)) {
        PyErr_SetString(PyExc_ValueError, SHARED_CHANGED);
        return NULL;
    }
    shared_read_result(self, at, recv, 0);
    Py_RETURN_NONE;
}

static PyObject *shared_apart(SharedOperation *self, PyObject *step)
{
    const long long at = PyLong_AsLongLong(step);
    if (at == -1 && PyErr_Occurred())
        return NULL;
    const Py_ssize_t largest = at < 0 ? 0 : shared_largest_apart(self, at);
    if (largest == 0)
        Py_RETURN_NONE;
    PyObject *ranks = PyList_New(0);
    for (int rank = 0; ranks != NULL && rank < self->parts; rank++) {
        PyObject *number = shared_parts_stand_apart(self, rank, at) ? PyLong_FromLong(rank) : NULL;
        if (PyErr_Occurred() || (number != NULL && PyList_Append(ranks, number) < 0))
            Py_CLEAR(ranks);
        Py_XDECREF(number);
    }
    return ranks == NULL ? NULL : Py_BuildValue("nN", largest, ranks);
}

static PyMethodDef shared_methods[] = {
    {"write", (PyCFunction)shared_write, METH_VARARGS, "Write the data of a round that is not posted yet, or of the next step of the segment: write(number, send[, recv])."},
    {"start", (PyCFunction)shared_start, METH_O,
     "Write the data, post the round, and count the call; return the number of the round, -1 if earlier calls have not posted."},
    {"complete", (PyCFunction)(void (*)(void))shared_complete, METH_FASTCALL,
     "Read the result of a posted call in one piece: complete(call, number of the round, recv, before). Return 0 while the data may\n"
     "not be read, 1 if it was, 2 if not all members made the call, 3 if the bytes of recv are not those of before, unless that is empty,\n"
     "4 if recv is not what the call was prepared for."},
    {"accepts", (PyCFunction)(void (*)(void))shared_accepts, METH_FASTCALL,
     "Return whether the arrays are such as the call was prepared for: accepts(send, recv)."},
    {"begin", (PyCFunction)(void (*)(void))shared_begin, METH_FASTCALL,
     "Start the call in one piece, for a wait later: begin(group, prepared, send, recv, code, instruction, limit, outputs, places, name,\n"
     "words, claim). Return the request, pending and with its claim of memory; None, with nothing done, if that is impossible. The places\n"
     "are those of the rounds; the words have the name, and both are None without one; the claim is None if calls are not compared,\n"
     "and True for one of recv that is made here."},
    {"run", (PyCFunction)(void (*)(void))shared_run, METH_FASTCALL,
     "Make the call: run(group, prepared, send, recv, frame[, limit, name, words]). Return False if nothing was done."},
    {"run_rest", (PyCFunction)(void (*)(void))shared_run_rest, METH_FASTCALL,
     "Move the pieces, or the parts that stand apart, of a call whose round Python has waited for:\n"
     "run_rest(group, prepared, send, recv, request)."},
    {"apart", (PyCFunction)shared_apart, METH_O,
     "Return what is left of an exchange when read() has read the parts of a step: the bytes of the largest part that stands apart, and\n"
     "the ranks whose parts do, the same on all members; None if nothing is left: apart(step)."},
    {"state", (PyCFunction)shared_state, METH_VARARGS,
     "Return 0 while the data may not be read, 1 if all members made the call, 2 if not: state(call, number, nanoseconds)."},
    {"read", (PyCFunction)shared_read, METH_VARARGS,
     "Read the result of a call in one piece that is over: read(number of the round, or the step, recv)."},
    {NULL},
};

PyTypeObject SharedOperationType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpicoll._native.SharedOperation",
    .tp_basicsize = sizeof(SharedOperation),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "A collective call of a group on one node, prepared for its arrays.",
    .tp_new = shared_new,
    .tp_traverse = (traverseproc)shared_traverse,
    .tp_clear = (inquiry)shared_clear,
    .tp_dealloc = (destructor)shared_dealloc,
    .tp_methods = shared_methods,
};
