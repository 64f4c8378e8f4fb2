/* The extension module mpicoll._native: shared memory of the members of a group on one node, for Python.

   Ring (ring.c) and Segment (segment.c) are the memory. A SharedTransfer moves larger data through a segment. A
   SharedOperation is a collective call prepared for its arrays: run() makes the whole call with the interpreter lock held, from the
   lock of the group to the result. A call that has to wait longer than a moment, or whose members differ, is continued in Python
   (operations/dispatch.py) from where it stands. begin() starts a small asynchronous call; its request has the fields of
   RequestFields, whose finish() completes the call.

   Between the first word that run() writes and the last element that it reads nothing can fail, and nothing of the program
   runs. Larger movements release the interpreter lock. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <frameobject.h>
#include <structmember.h>
#include <stdint.h>
#include <string.h>

#include "copy.h"
#include "poll.h"
#include "reduce.h"
#include "ring.h"
#include "segment.h"

#ifndef VERSION
#define VERSION "unknown" /* setup.py gives the sum of the sources, which mpicoll/runtime/native.py compares */
#endif

enum { READABLE = 0x101, WRITABLE = 0x501 }; /* NumPy's flags: C-contiguous and aligned; and writeable */

/* The head of an ndarray, which NumPy's own macros read in every extension module. check_arrays() compares it with an array. */
typedef struct {
    PyObject_HEAD
    char *data;
    int nd;
    Py_ssize_t *dimensions;
    Py_ssize_t *strides;
    PyObject *base;
    PyObject *descr;
    int flags;
} Array;

/* The head of a dtype, which has been the same since NumPy 1. check_arrays() compares it, too. */
typedef struct {
    PyObject_HEAD
    PyObject *typeobj;
    char kind, type, byteorder, flags;
    int type_num;
} Descr;

/* ---- the order of the calls of a group: checks/order.py has the same class for ranks without the extension ---- */

typedef struct {
    PyObject_HEAD
    int64_t issued, posted, moving, round, calls;
    int closed;
} CallOrder;

static PyObject *order_issue(CallOrder *self, PyObject *Py_UNUSED(nothing))
{
    return PyLong_FromLongLong(self->issued++);
}

static PyObject *order_may_move(CallOrder *self, PyObject *given)
{
    const int64_t number = PyLong_AsLongLong(given);
    return number == -1 && PyErr_Occurred() ? NULL : PyBool_FromLong(self->moving >= number);
}

static PyObject *order_pass_on(CallOrder *self, PyObject *given)
{
    const int64_t number = PyLong_AsLongLong(given);
    if (number == -1 && PyErr_Occurred())
        return NULL;
    self->moving += self->moving == number;
    Py_RETURN_NONE;
}

static PyMethodDef order_methods[] = {
    {"issue", (PyCFunction)order_issue, METH_NOARGS, "Return the number of the next call, and count the call as issued."},
    {"may_move", (PyCFunction)order_may_move, METH_O, "Return whether the data of all earlier calls has been posted."},
    {"pass_on", (PyCFunction)order_pass_on, METH_O, "Let the data of the next call move, if it is the turn of this call."},
    {NULL},
};

static PyMemberDef order_members[] = {
    {"issued", T_LONGLONG, offsetof(CallOrder, issued), 0, "The number of the next call to issue."},
    {"posted", T_LONGLONG, offsetof(CallOrder, posted), 0, "The number of the next call to post its round."},
    {"moving", T_LONGLONG, offsetof(CallOrder, moving), 0, "The number of the next call to move its data."},
    {"round", T_LONGLONG, offsetof(CallOrder, round), 0, "Rounds made."},
    {"calls", T_LONGLONG, offsetof(CallOrder, calls), 0, "Calls of the program made on the group."},
    {"closed", T_INT, offsetof(CallOrder, closed), 0, "Not 0: the extension starts no call; the general way says why."},
    {NULL},
};

static PyTypeObject OrderType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpicoll._native.CallOrder",
    .tp_basicsize = sizeof(CallOrder),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "The numbers of a group's calls.",
    .tp_new = PyType_GenericNew,
    .tp_methods = order_methods,
    .tp_members = order_members,
};

/* ---- rounds ---- */

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    Ring ring;
} RingObject;

static int ring_init(RingObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"memory", "me", "size", "stride", NULL};
    PyObject *memory;
    Ring ring = {0};
    if (self->memory.obj != NULL) {
        PyErr_SetString(PyExc_TypeError, "a ring is made once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Oiin", names, &memory, &ring.me, &ring.size, &ring.stride))
        return -1;
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_SIMPLE | PyBUF_WRITABLE) < 0)
        return -1;
    if (ring.size < 1 || ring.me < 0 || ring.me >= ring.size || ring.stride < RING_BYTES || ring.stride % 8 ||
        ring.stride > self->memory.len / ring.size || (uintptr_t)self->memory.buf % 16) {
        PyBuffer_Release(&self->memory);
        PyErr_SetString(PyExc_ValueError, "the memory is not that of a ring of these members");
        return -1;
    }
    ring.base = self->memory.buf;
    self->ring = ring;
    return 0;
}

static void ring_dealloc(RingObject *self)
{
    if (self->memory.obj != NULL)
        PyBuffer_Release(&self->memory);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int is_made(const void *base, const char *what)
{
    if (base == NULL)
        PyErr_Format(PyExc_ValueError, "the %s was not made", what);
    return base != NULL;
}

/* Parse the number of a round, of which there is at least one. */
static int round_number(RingObject *self, PyObject *given, int64_t *number)
{
    if (!is_made(self->ring.base, "ring"))
        return 0;
    *number = PyLong_AsLongLong(given);
    if (*number < 0 && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "rounds are numbered from 0");
    return !PyErr_Occurred();
}

/* Parse the words of a round; return 0 and set an exception if they are none. */
static int parse_words(PyObject *given, int64_t words[RING_SAID])
{
    if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != RING_SAID) {
        PyErr_Format(PyExc_TypeError, "words: a tuple of %d integers", RING_SAID);
        return 0;
    }
    for (int i = 0; i < RING_SAID && !PyErr_Occurred(); i++)
        words[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(given, i));
    return !PyErr_Occurred();
}

static PyObject *ring_write_words(RingObject *self, PyObject *const *args, Py_ssize_t count)
{
    int64_t number, words[RING_SAID];
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "write(number, words)");
        return NULL;
    }
    if (!round_number(self, args[0], &number) || !parse_words(args[1], words))
        return NULL;
    ring_write(&self->ring, number, words);
    Py_RETURN_NONE;
}

static PyObject *ring_post_round(RingObject *self, PyObject *given)
{
    int64_t number;
    if (!round_number(self, given, &number))
        return NULL;
    ring_post(&self->ring, number);
    Py_RETURN_NONE;
}

static PyObject *ring_withdraw_rounds(RingObject *self, PyObject *given)
{
    int64_t number;
    if (!round_number(self, given, &number))
        return NULL;
    ring_withdraw(&self->ring, number);
    Py_RETURN_NONE;
}

static PyObject *ring_over(RingObject *self, PyObject *given)
{
    int64_t number;
    if (!round_number(self, given, &number))
        return NULL;
    return PyBool_FromLong(ring_is_over(&self->ring, number, 0, -1));
}

static PyObject *ring_poll(RingObject *self, PyObject *args)
{
    long long number, budget;
    if (!is_made(self->ring.base, "ring") || !PyArg_ParseTuple(args, "LL", &number, &budget))
        return NULL;
    if (number < 0) {
        PyErr_SetString(PyExc_ValueError, "rounds are numbered from 0");
        return NULL;
    }
    return PyBool_FromLong(ring_is_over(&self->ring, number, now_ns(), budget));
}

static PyObject *ring_unanimous(RingObject *self, PyObject *given)
{
    int64_t number;
    if (!round_number(self, given, &number))
        return NULL;
    return PyBool_FromLong(ring_is_unanimous(&self->ring, number));
}

static PyObject *ring_spread_of(RingObject *self, PyObject *given)
{
    int64_t number;
    if (!round_number(self, given, &number))
        return NULL;
    return PyLong_FromLongLong(ring_spread(&self->ring, number));
}

static PyObject *ring_maxima_of(RingObject *self, PyObject *given)
{
    int64_t number, mine;
    RingMaxima maxima = {{0}, 0, 0};
    if (!round_number(self, given, &number))
        return NULL;
    ring_maxima(&self->ring, number, &maxima);
    memcpy(&mine, ring_record(&self->ring, self->ring.me, number) + 8 * RECORD_TIME, sizeof mine);
    PyObject *words = PyList_New(RING_SAID);
    for (int i = 0; words != NULL && i < RING_SAID; i++) {
        PyObject *word = PyLong_FromLongLong(maxima.words[i]);
        if (word == NULL)
            Py_CLEAR(words);
        else
            PyList_SET_ITEM(words, i, word);
    }
    return words == NULL ? NULL : Py_BuildValue("NLL", words, (long long)(maxima.last - maxima.first), (long long)(maxima.last - mine));
}

static PyMethodDef ring_methods[] = {
    {"write", (PyCFunction)(void (*)(void))ring_write_words, METH_FASTCALL,
     "Write the record of a round, with the time: write(number, words)."},
    {"post", (PyCFunction)ring_post_round, METH_O, "Post a round whose record is written."},
    {"withdraw", (PyCFunction)ring_withdraw_rounds, METH_O,
     "Take back the rounds up to this one that are not over: members that post them later find them never over."},
    {"is_over", (PyCFunction)ring_over, METH_O, "Return whether all others have posted a round."},
    {"poll", (PyCFunction)ring_poll, METH_VARARGS, "Return whether all others have posted a round; poll for so long: poll(number, nanoseconds)."},
    {"is_unanimous", (PyCFunction)ring_unanimous, METH_O, "Return whether all members posted the same words in a round that is over."},
    {"spread", (PyCFunction)ring_spread_of, METH_O, "Return the nanoseconds between the first and the last post of a round."},
    {"maxima", (PyCFunction)ring_maxima_of, METH_O,
     "Return the largest of each word, and the nanoseconds from the first post, and from this member's, to the last."},
    {NULL},
};

static PyMemberDef ring_members[] = {
    {"me", T_INT, offsetof(RingObject, ring.me), READONLY, "The rank of this member."},
    {"size", T_INT, offsetof(RingObject, ring.size), READONLY, "The number of members."},
    {NULL},
};

static PyTypeObject RingType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpicoll._native.Ring",
    .tp_basicsize = sizeof(RingObject),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Ring(memory, me, size, stride): rounds of the members of a group on one node.",
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)ring_init,
    .tp_dealloc = (destructor)ring_dealloc,
    .tp_methods = ring_methods,
    .tp_members = ring_members,
};

/* ---- segments ---- */

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    Segment segment;
} SegmentObject;

static int segment_init(SegmentObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"memory", "me", "size", "first", "room", NULL};
    PyObject *memory;
    Segment segment = {0};
    if (self->memory.obj != NULL) {
        PyErr_SetString(PyExc_TypeError, "a segment is made once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Oiinn", names, &memory, &segment.me, &segment.size, &segment.first,
                                     &segment.room))
        return -1;
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_SIMPLE | PyBUF_WRITABLE) < 0)
        return -1;
    if (segment.size < 1 || segment.me < 0 || segment.me >= segment.size || segment.room <= 0 || segment.room % 16 ||
        segment.first % 16 || segment.first < (Py_ssize_t)segment.size * SEGMENT_LINE || (uintptr_t)self->memory.buf % 16 ||
        segment.first > self->memory.len || segment.room > (self->memory.len - segment.first) / SEGMENT_BUFFERS / segment.size) {
        PyBuffer_Release(&self->memory);
        PyErr_SetString(PyExc_ValueError, "the memory is not that of a segment of these members");
        return -1;
    }
    segment.base = self->memory.buf;
    self->segment = segment;
    return 0;
}

static void segment_dealloc(SegmentObject *self)
{
    if (self->memory.obj != NULL)
        PyBuffer_Release(&self->memory);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *segment_advance_step(SegmentObject *self, PyObject *Py_UNUSED(nothing))
{
    if (!is_made(self->segment.base, "segment"))
        return NULL;
    segment_advance(&self->segment);
    Py_RETURN_NONE;
}

static PyObject *segment_reached(SegmentObject *self, PyObject *args)
{
    long long step;
    int rank = -1;
    if (!is_made(self->segment.base, "segment") || !PyArg_ParseTuple(args, "L|i", &step, &rank))
        return NULL;
    if (rank >= self->segment.size) {
        PyErr_SetString(PyExc_ValueError, "no such member");
        return NULL;
    }
    return PyBool_FromLong(rank < 0 ? segment_all_at(&self->segment, step, 0, -1)
                                    : load(segment_counter(&self->segment, rank)) >= step);
}

static PyObject *segment_announced(SegmentObject *self, PyObject *args)
{
    int rank;
    int64_t words[2];
    if (!is_made(self->segment.base, "segment") || !PyArg_ParseTuple(args, "i", &rank))
        return NULL;
    if (rank < 0 || rank >= self->segment.size) {
        PyErr_SetString(PyExc_ValueError, "no such member");
        return NULL;
    }
    memcpy(words, segment_counter(&self->segment, rank) + 8, sizeof words);
    return Py_BuildValue("LL", (long long)words[0], (long long)words[1]);
}

static PyMethodDef segment_methods[] = {
    {"advance", (PyCFunction)segment_advance_step, METH_NOARGS, "Go to the next step: what this member has written may be read."},
    {"has_reached", (PyCFunction)segment_reached, METH_VARARGS,
     "Return whether all others, or one member, are at a step: has_reached(step, rank=-1)."},
    {"announced", (PyCFunction)segment_announced, METH_VARARGS, "Return the two words that a member has announced last."},
    {NULL},
};

static PyMemberDef segment_members[] = {
    {"me", T_INT, offsetof(SegmentObject, segment.me), READONLY, "The rank of this member."},
    {"size", T_INT, offsetof(SegmentObject, segment.size), READONLY, "The number of members."},
    {"room", T_PYSSIZET, offsetof(SegmentObject, segment.room), READONLY, "Bytes of a buffer."},
    {"step", T_LONGLONG, offsetof(SegmentObject, segment.step), READONLY, "The step that this member is at."},
    {NULL},
};

static PyTypeObject SegmentType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpicoll._native.Segment",
    .tp_basicsize = sizeof(SegmentObject),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Segment(memory, me, size, first, room): a counter and two buffers for each member of a group on one node.",
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)segment_init,
    .tp_dealloc = (destructor)segment_dealloc,
    .tp_methods = segment_methods,
    .tp_members = segment_members,
};

/* ---- transfers through a segment ---- */

typedef struct {
    PyObject_HEAD
    SegmentObject *segment;
    Transfer transfer;
    Py_buffer *held; /* the memory that the transfer reads and writes */
    Py_ssize_t holds;
    int is_running;  /* in a thread that has released the interpreter lock */
} TransferObject;

static void transfer_dealloc(TransferObject *self)
{
    for (Py_ssize_t i = 0; i < self->holds; i++)
        PyBuffer_Release(&self->held[i]);
    PyMem_Free(self->held);
    PyMem_Free(self->transfer.blocks);
    PyMem_Free(self->transfer.arrays);
    Py_XDECREF(self->segment);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static Py_buffer *hold(TransferObject *self, PyObject *memory, int flags)
{
    Py_buffer *buffer = &self->held[self->holds];
    if (PyObject_GetBuffer(memory, buffer, flags) < 0)
        return NULL;
    self->holds++;
    return buffer;
}

static int add_blocks(TransferObject *self, PyObject *given, int flags, int *count)
{
    Transfer *transfer = &self->transfer;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given); i++) {
        Block *block = &transfer->blocks[transfer->writes + transfer->reads];
        PyObject *memory, *tuple = PyList_GET_ITEM(given, i);
        if (!PyTuple_Check(tuple)) {
            PyErr_SetString(PyExc_TypeError, "a block is a tuple: the member whose buffer it is in, where in it, the memory");
            return -1;
        }
        if (!PyArg_ParseTuple(tuple, "inO", &block->rank, &block->at, &memory))
            return -1;
        const Py_buffer *buffer = hold(self, memory, flags);
        if (buffer == NULL)
            return -1;
        block->memory = buffer->buf;
        block->bytes = buffer->len;
        (*count)++;
    }
    return 0;
}

/* What cannot be true of a transfer that stays in its memory. */
static int is_wrong(const Transfer *transfer, const Segment *segment, Py_ssize_t sent, Py_ssize_t arrays, int is_reduction)
{
    if (transfer->width <= 0 || transfer->total < 0 || transfer->itemsize <= 0)
        return 1;
    int wrong = 0;
    for (int i = 0; i < transfer->writes + transfer->reads; i++) {
        const Block *block = &transfer->blocks[i];
        const ptrdiff_t most = block->bytes < transfer->width ? block->bytes : transfer->width;
        wrong |= block->rank < 0 || block->rank >= segment->size || block->at < 0 || block->at > segment->room - most;
        wrong |= block->bytes > transfer->total || (i < transfer->writes && block->rank != segment->me);
    }
    if (!is_reduction)
        return wrong || (transfer->kind != COPY_BLOCKS && transfer->kind != ANNOUNCE);
    wrong |= transfer->reduce == NULL || segment->size < 2 || transfer->reads > 0 || transfer->width % transfer->itemsize != 0;
    wrong |= transfer->read_at < 0 || transfer->read_at > segment->room - (transfer->result < transfer->width ? transfer->result : transfer->width);
    wrong |= transfer->result > transfer->total || transfer->result % transfer->itemsize != 0;
    if (transfer->kind == REDUCE_IN_PLACE)
        return wrong || arrays != segment->size || transfer->total % transfer->itemsize != 0;
    if (transfer->kind == REDUCE_PARTS)
        return wrong || sent != transfer->total || transfer->width > segment->room || transfer->writes ||
               (transfer->recv != NULL && transfer->result != transfer->total);
    return wrong || transfer->kind != REDUCE || (transfer->recv != NULL && sent < transfer->result);
}

static int transfer_init(TransferObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"segment", "kind", "total", "width", "poll_ns", "writes", "reads", "send", "recv", "read_at",
                            "reduction", "itemsize", "words", "arrays", NULL};
    Transfer *transfer = &self->transfer;
    PyObject *writes, *reads, *send = Py_None, *recv = Py_None, *arrays = Py_None;
    const char *kind, *reduction = "";
    long long budget, words[2] = {0, 0};
    Py_ssize_t sent = 0, itemsize = 1, read_at = 0, many = 0;
    static const char *const kinds[] = {
        [COPY_BLOCKS] = "copy", [REDUCE] = "reduce", [REDUCE_PARTS] = "parts", [ANNOUNCE] = "announce",
        [REDUCE_IN_PLACE] = "in place",
    };
    if (self->segment != NULL) {
        PyErr_SetString(PyExc_TypeError, "a transfer is made once");
        return -1;
    }
    writes = reads = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!snnL|O!O!OOnsn(LL)O", names, &SegmentType, &self->segment, &kind,
                                     &transfer->total, &transfer->width, &budget, &PyList_Type, &writes, &PyList_Type, &reads,
                                     &send, &recv, &read_at, &reduction, &itemsize, &words[0], &words[1], &arrays)) {
        self->segment = NULL;
        return -1;
    }
    Py_INCREF(self->segment);
    if (!is_made(self->segment->segment.base, "segment"))
        return -1;
    int found = -1;
    for (int i = 0; i < (int)(sizeof kinds / sizeof *kinds); i++)
        if (strcmp(kinds[i], kind) == 0)
            found = i;
    const Reduction *row = *reduction ? find_reduction(reduction) : NULL;
    if (found < 0 || (arrays != Py_None && !PyList_Check(arrays))) {
        PyErr_SetString(PyExc_TypeError, "no such kind of transfer, or arrays that are no list");
        return -1;
    }
    const Py_ssize_t blocks = (writes ? PyList_GET_SIZE(writes) : 0) + (reads ? PyList_GET_SIZE(reads) : 0);
    many = arrays == Py_None ? 0 : PyList_GET_SIZE(arrays);
    self->held = PyMem_Calloc((size_t)(blocks + many + 2), sizeof *self->held);
    transfer->blocks = PyMem_Calloc((size_t)blocks + 1, sizeof *transfer->blocks);
    transfer->arrays = PyMem_Calloc((size_t)many + 1, sizeof *transfer->arrays);
    if (self->held == NULL || transfer->blocks == NULL || transfer->arrays == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    transfer->kind = (enum TransferKind)found;
    transfer->budget = budget;
    transfer->itemsize = itemsize;
    transfer->read_at = read_at;
    transfer->words[0] = words[0];
    transfer->words[1] = words[1];
    if (row != NULL && itemsize == reduction_itemsize(row)) {
        transfer->reduce = row->reduce;
        transfer->part = itemsize / row->parts;
    }
    if (writes != NULL && add_blocks(self, writes, PyBUF_SIMPLE, &transfer->writes) < 0)
        return -1;
    if (reads != NULL && add_blocks(self, reads, PyBUF_WRITABLE, &transfer->reads) < 0)
        return -1;
    if (send != Py_None) {
        const Py_buffer *buffer = hold(self, send, PyBUF_SIMPLE);
        if (buffer == NULL)
            return -1;
        transfer->send = buffer->buf;
        sent = buffer->len;
    }
    if (recv != Py_None) {
        const Py_buffer *buffer = hold(self, recv, PyBUF_WRITABLE);
        if (buffer == NULL)
            return -1;
        transfer->recv = buffer->buf;
        transfer->result = buffer->len;
    }
    int wrong = 0;
    for (Py_ssize_t i = 0; i < many; i++) {
        const Py_buffer *buffer = hold(self, PyList_GET_ITEM(arrays, i), PyBUF_WRITABLE);
        if (buffer == NULL)
            return -1;
        transfer->arrays[i] = buffer->buf;
        wrong |= buffer->len != transfer->total;
    }
    if (wrong || is_wrong(transfer, &self->segment->segment, sent, many, *reduction != 0)) {
        PyErr_SetString(PyExc_ValueError, "the transfer does not fit into its memory");
        return -1;
    }
    transfer->segment = &self->segment->segment; /* without one, Test() refuses what was not made */
    return 0;
}

static PyObject *transfer_test(TransferObject *self, PyObject *Py_UNUSED(nothing))
{
    int over;
    if (!is_made(self->transfer.segment, "transfer"))
        return NULL;
    if (self->is_running) /* another thread progresses the transfer */
        Py_RETURN_FALSE;
    self->is_running = 1;
    Py_BEGIN_ALLOW_THREADS
    over = transfer_advance(&self->transfer);
    Py_END_ALLOW_THREADS
    self->is_running = 0;
    return PyBool_FromLong(over);
}

static PyObject *transfer_waiting(TransferObject *self, void *Py_UNUSED(closure))
{
    if (!is_made(self->transfer.segment, "transfer"))
        return NULL;
    PyObject *ranks = PyList_New(0);
    for (int rank = 0; ranks != NULL && rank < self->transfer.segment->size; rank++)
        if (transfer_waits_for(&self->transfer, rank)) {
            PyObject *number = PyLong_FromLong(rank);
            if (number == NULL || PyList_Append(ranks, number) < 0)
                Py_CLEAR(ranks);
            Py_XDECREF(number);
        }
    return ranks == NULL ? NULL : Py_BuildValue("LN", (long long)self->transfer.wanted, ranks);
}

static PyMethodDef transfer_methods[] = {
    {"Test", (PyCFunction)transfer_test, METH_NOARGS,
     "Move on as far as the others are, without the interpreter lock. Return whether the transfer is complete."},
    {NULL},
};

static PyGetSetDef transfer_getset[] = {
    {"waits_for", (getter)transfer_waiting, NULL, "The step that others have to reach, and the ranks that have not.", NULL},
    {NULL},
};

static PyTypeObject TransferType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpicoll._native.SharedTransfer",
    .tp_basicsize = sizeof(TransferObject),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "One movement through a segment, as this member makes it; complete when Test() returns True.",
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)transfer_init,
    .tp_dealloc = (destructor)transfer_dealloc,
    .tp_methods = transfer_methods,
    .tp_getset = transfer_getset,
};

/* ---- what the module knows of the rest of the library ---- */

typedef struct {
    PyObject *finish, *withdraw, *await; /* of operations/dispatch.py: continue a posted call, give a call up, wait in the midst of one */
    PyObject *pending, *claims, *reusable, *threads, *observers;
    PyObject *request, *lock, *claim;          /* types */
    PyObject *posted, *complete, *at_once;     /* states, and the schedule of a call whose data comes with its round */
    PyTypeObject *array;
    PyObject *last, *broken, *busy, *number, *compares, *of_claim, *found, *f_lasti; /* names */
    PyObject *writes, *nothing;                /* a name in a tuple, and an empty one */
} Known;

static Known known;

/* ---- the fields of a request: operations/states.py has the same class for ranks without the extension ---- */

#define REQUEST_FIELDS(_) \
    _(group) _(_call) _(prepared) _(schedule) _(claim) _(words) _(outputs) _(peer) _(held) _(state) _(round) _(agreed) _(error) \
    _(returned) _(future) _(landing) _(_transfer) _(steps) _(_current) _(_lock) _(send) _(recv) _(arrays) _(spread) _(code) _(name) \
    _(made) _(before) _(after) _(move) _(unpack) _(plan)

#define FIELD(name) REQUEST_##name,
enum { REQUEST_FIELDS(FIELD) REQUEST_OBJECTS };
#undef FIELD

typedef struct SharedOperation SharedOperation;

typedef struct {
    PyObject_HEAD
    PyObject *objects[REQUEST_OBJECTS]; /* NULL: None */
    SharedOperation *shared; /* of a call that begin() has posted and finish() may complete; else NULL */
    int64_t posted_round;    /* by begin() */
    int64_t number, seq, tag, instruction;
    double limit, polled, next_look;
    char waited, in_effect, advancing;
} Request;

static int request_traverse(Request *self, visitproc visit, void *arg)
{
    for (int i = 0; i < REQUEST_OBJECTS; i++)
        Py_VISIT(self->objects[i]);
    Py_VISIT(self->shared);
    return 0;
}

static int request_clear(Request *self)
{
    for (int i = 0; i < REQUEST_OBJECTS; i++)
        Py_CLEAR(self->objects[i]);
    Py_CLEAR(self->shared);
    return 0;
}

static void request_dealloc(Request *self)
{
    PyObject_GC_UnTrack(self);
    request_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *request_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    Request *self = (Request *)type->tp_alloc(type, 0);
    if (self != NULL)
        self->number = -1;
    return (PyObject *)self;
}

#define FIELD(name) {#name, T_OBJECT, offsetof(Request, objects) + REQUEST_##name * sizeof(PyObject *), 0, NULL},
static PyMemberDef request_members[] = {
    REQUEST_FIELDS(FIELD)
    {"number", T_LONGLONG, offsetof(Request, number), 0, NULL},
    {"seq", T_LONGLONG, offsetof(Request, seq), 0, NULL},
    {"tag", T_LONGLONG, offsetof(Request, tag), 0, NULL},
    {"instruction", T_LONGLONG, offsetof(Request, instruction), 0, NULL},
    {"limit", T_DOUBLE, offsetof(Request, limit), 0, NULL},
    {"polled", T_DOUBLE, offsetof(Request, polled), 0, NULL},
    {"next_look", T_DOUBLE, offsetof(Request, next_look), 0, NULL},
    {"waited", T_BOOL, offsetof(Request, waited), 0, NULL},
    {"_in_effect", T_BOOL, offsetof(Request, in_effect), 0, NULL},
    {"_advancing", T_BOOL, offsetof(Request, advancing), 0, NULL},
    {NULL},
};
#undef FIELD

static PyObject *request_finish(Request *self, PyObject *Py_UNUSED(nothing));

static PyMethodDef request_methods[] = {
    {"finish", (PyCFunction)request_finish, METH_NOARGS,
     "Complete a call that SharedOperation.begin has started, and release its claim. Return False, with nothing done, if the call is\n"
     "not over within the time that a call polls, or not as this member says, or if anything else is to be done at its end."},
    {NULL},
};

static PyTypeObject RequestType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpicoll._native.RequestFields",
    .tp_basicsize = sizeof(Request),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "The fields of a request; each is None, 0 or False until it is set, and the number -1.",
    .tp_new = request_new,
    .tp_traverse = (traverseproc)request_traverse,
    .tp_clear = (inquiry)request_clear,
    .tp_dealloc = (destructor)request_dealloc,
    .tp_methods = request_methods,
    .tp_members = request_members,
};

/* ---- a collective call, prepared for its arrays ---- */

enum Result { NOTHING, REDUCED, COPIED, ROWS, LIST };

/* The arrays that a member passes, or that its result goes to. */
typedef struct {
    Py_ssize_t arrays; /* 0: none; -1: one, in no list */
    Py_ssize_t count;  /* elements of the one array */
    Py_ssize_t *counts; /* elements of each in a list */
    int *nd;
    Py_ssize_t **dimensions; /* of each in a list: one piece of memory */
} Given;

struct SharedOperation {
    PyObject_HEAD
    RingObject *ring;
    SegmentObject *segment; /* NULL: the data stands beside the records */
    CallOrder *order;
    PyObject *acquire, *release; /* of the lock of the group */
    PyObject *op;
    PyObject *dtype;
    PyObject *given_words; /* `words` in a tuple */
    int64_t words[RING_SAID];
    Py_ssize_t itemsize;
    Py_ssize_t sends;         /* bytes that this member writes */
    Py_ssize_t offset, block; /* bytes: where that begins what this member reads of the data of another, and its length */
    Py_ssize_t width;         /* bytes of a piece; `block` if the call has one piece only */
    int root;
    enum Result result;
    int in_place; /* the terms of this member stand where the result goes */
    const Reduction *reduction;
    int average;
    Given send, recv;
    int64_t budget; /* nanoseconds of polling for others before Python waits */
    unsigned long thread;
};

static PyTypeObject SharedOperationType;
static int fits(const SharedOperation *self, const Given *wanted, PyObject *given, int flags);

static void given_free(Given *given)
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

/* From None, the shape of an array, or a list of shapes. */
static int given_init(Given *given, PyObject *shapes)
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
        given->nd[i] = (int)PyTuple_GET_SIZE(shape);
        next += given->nd[i];
    }
    given->arrays = many;
    return 0;
}

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
    given_free(&self->send);
    given_free(&self->recv);
    Py_TYPE(self)->tp_free((PyObject *)self);
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
    if (self->width < self->block) { /* one array in several pieces */
        if (self->segment == NULL || self->width > room || self->width % self->itemsize || self->offset != 0 ||
            (self->sends != 0 && self->sends != self->block) || send->arrays > 0 || recv->arrays > 0 || self->result == ROWS ||
            (recv->arrays < 0 && recv->count * self->itemsize != self->block))
            return 0;
    } else if (self->sends > room || self->offset > room - self->block)
        return 0;
    if (send->arrays < 0 && send->count * self->itemsize != self->sends)
        return 0;
    for (Py_ssize_t i = 0; i < send->arrays; i++)
        if (send->counts[i] * self->itemsize > self->block || i * self->block > self->sends - send->counts[i] * self->itemsize)
            return 0;
    for (Py_ssize_t i = 0; i < recv->arrays; i++)
        if (recv->counts[i] * self->itemsize > self->block)
            return 0;
    switch (self->result) {
    case NOTHING:
        return 1;
    case REDUCED:
        return recv->arrays < 0 && self->reduction != NULL && recv->count * self->itemsize <= self->block && size > 0 &&
               self->itemsize == reduction_itemsize(self->reduction) && (!self->average || self->reduction->divide != NULL);
    case COPIED:
        return recv->arrays < 0 && self->root >= 0 && recv->count * self->itemsize <= self->block;
    case ROWS:
        return recv->arrays < 0 && recv->count * self->itemsize == size * self->block;
    case LIST:
        return recv->arrays == size;
    }
    return 0;
}

static PyObject *shared_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"op", "lock", "ring", "segment", "order", "words", "dtype", "itemsize", "sends", "offset", "block", "width", "root",
                            "send", "recv", "result", "reduction", "average", "in_place", "poll_ns", NULL};
    static const char *const results[] = {
        [NOTHING] = "", [REDUCED] = "reduced", [COPIED] = "copied", [ROWS] = "rows", [LIST] = "list"};
    PyObject *op, *lock, *ring, *segment, *order, *words, *dtype, *send, *recv;
    const char *result, *reduction;
    Py_ssize_t itemsize, sends, offset, block, width;
    int root, average, in_place;
    long long budget;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "UOO!OO!O!OnnnnniOOssppL", names, &op, &lock, &RingType, &ring, &segment, &OrderType, &order, &PyTuple_Type,
                                     &words, &dtype, &itemsize, &sends, &offset, &block, &width, &root, &send, &recv, &result,
                                     &reduction, &average, &in_place, &budget))
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
    self->reduction = find_reduction(reduction);
    if (PyErr_Occurred() || given_init(&self->send, send) < 0 || given_init(&self->recv, recv) < 0)
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

/* Where the data of a member stands: for a step of the segment, or for a round. */
static char *data_of(const SharedOperation *self, int rank, int64_t at)
{
    return self->segment == NULL ? ring_eager(&self->ring->ring, rank, at) : segment_buffer(&self->segment->segment, rank, at);
}

static char *memory(PyObject *array)
{
    return ((Array *)array)->data;
}

/* Bytes of the piece that begins at `from`. */
static Py_ssize_t piece(const SharedOperation *self, Py_ssize_t from)
{
    return self->block - from < self->width ? self->block - from : self->width;
}

static void write_data(const SharedOperation *self, int64_t at, PyObject *send, Py_ssize_t from)
{
    char *to = data_of(self, self->ring->ring.me, at);
    if (self->send.arrays < 0)
        copy_out(to, memory(send) + from, self->width < self->block ? piece(self, from) : self->sends);
    for (Py_ssize_t i = 0; i < self->send.arrays; i++)
        copy_out(to + i * self->block, memory(PyList_GET_ITEM(send, i)), self->send.counts[i] * self->itemsize);
}

/* Return the terms of a member. Two of them may stand where the result goes: the third finds its place overwritten. */
static const char *terms(const SharedOperation *self, int rank, int64_t at, const char *out)
{
    return rank == self->ring->ring.me && self->in_place && rank < 2 ? out : data_of(self, rank, at) + self->offset;
}

/* Read the piece of the result that begins at `from`. */
static void read_result(const SharedOperation *self, int64_t at, PyObject *recv, Py_ssize_t from)
{
    const int size = self->ring->ring.size;
    const Py_ssize_t bytes = self->width < self->block ? piece(self, from) : self->recv.count * self->itemsize;
    char *out;
    switch (self->result) {
    case REDUCED: /* in the order of the ranks */
        out = memory(recv) + from;
        if (size == 1)
            memcpy(out, data_of(self, 0, at) + self->offset, (size_t)bytes);
        for (int rank = 1; rank < size; rank++)
            self->reduction->reduce(out, rank == 1 ? terms(self, 0, at, out) : out, terms(self, rank, at, out),
                                    bytes / self->itemsize * self->reduction->parts);
        if (self->average)
            self->reduction->divide(out, bytes / self->itemsize, size);
        break;
    case COPIED:
        memcpy(memory(recv) + from, data_of(self, self->root, at) + self->offset, (size_t)bytes);
        break;
    case ROWS:
        for (int rank = 0; rank < size; rank++)
            memcpy(memory(recv) + rank * self->block, data_of(self, rank, at) + self->offset, (size_t)self->block);
        break;
    case LIST:
        for (int rank = 0; rank < size; rank++)
            memcpy(memory(PyList_GET_ITEM(recv, rank)), data_of(self, rank, at) + self->offset,
                   (size_t)(self->recv.counts[rank] * self->itemsize));
        break;
    case NOTHING:
        break;
    }
}

/* ---- whether what a program passes is what the call was prepared for ---- */

/* Whether the elements are in the byte order of the machine, which NumPy writes in two ways; single bytes have none. */
static int is_native(const Descr *dtype)
{
    const uint16_t one = 1;
    const char mine = *(const char *)&one ? '<' : '>';
    return dtype->byteorder == '=' || dtype->byteorder == '|' || dtype->byteorder == mine;
}

/* Whether two dtypes are the same. Those of arrays that were unpickled are other objects. No code of Python runs here. */
static int is_same(PyObject *dtype, PyObject *wanted)
{
    const Descr *one = (Descr *)dtype, *other = (Descr *)wanted;
    if (dtype == wanted)
        return 1;
    return Py_TYPE(dtype) == Py_TYPE(wanted) && strchr("biufc", one->kind) != NULL && one->type_num == other->type_num &&
           is_native(one) == is_native(other);
}

static int has(const SharedOperation *self, PyObject *given, Py_ssize_t count, int flags)
{
    if (!Py_IS_TYPE(given, known.array))
        return 0;
    const Array *array = (Array *)given;
    if ((array->flags & flags) != flags || !is_same(array->descr, self->dtype))
        return 0;
    Py_ssize_t found = 1;
    for (int i = 0; i < array->nd; i++)
        found *= array->dimensions[i];
    return found == count;
}

static int fits(const SharedOperation *self, const Given *wanted, PyObject *given, int flags)
{
    if (wanted->arrays == 0) /* an array that is input on one member and output on another is passed as both */
        return given == Py_None || Py_IS_TYPE(given, known.array);
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

static const char CHANGED[] = "the arrays of a call were changed while it waited for the others";

static PyObject *shared_write(SharedOperation *self, PyObject *args)
{
    long long number;
    PyObject *send;
    if (!PyArg_ParseTuple(args, "LO", &number, &send))
        return NULL;
    if (number < 0 || self->segment != NULL || !fits(self, &self->send, send, READABLE)) {
        PyErr_SetString(PyExc_ValueError, "the arrays are not those that the call was prepared for");
        return NULL;
    }
    write_data(self, number, send, 0);
    Py_RETURN_NONE;
}

static PyObject *shared_read(SharedOperation *self, PyObject *args)
{
    long long at;
    PyObject *recv;
    if (!PyArg_ParseTuple(args, "LO", &at, &recv))
        return NULL;
    if (at < 0 || self->width < self->block || !fits(self, &self->recv, recv, WRITABLE)) {
        PyErr_SetString(PyExc_ValueError, CHANGED);
        return NULL;
    }
    read_result(self, at, recv, 0);
    Py_RETURN_NONE;
}

/* Post a call in one piece, which all earlier calls allow, and count it. Return the number of its round. Nothing can fail. */
static int64_t post(SharedOperation *self, PyObject *send)
{
    CallOrder *order = self->order;
    const int64_t number = order->round + 1;
    write_data(self, number, send, 0);
    ring_write(&self->ring->ring, number, self->words);
    ring_post(&self->ring->ring, number); /* from here on the others may go on */
    order->round = number;
    order->calls++;
    order->posted = ++order->issued;
    return number;
}

static PyObject *shared_start(SharedOperation *self, PyObject *send)
{
    CallOrder *order = self->order;
    if (self->segment != NULL || order->posted != order->issued)
        return PyLong_FromLong(-1);
    if (!fits(self, &self->send, send, READABLE)) {
        PyErr_SetString(PyExc_ValueError, "the arrays are not those that the call was prepared for");
        return NULL;
    }
    return PyLong_FromLongLong(post(self, send));
}

static PyObject *shared_state(SharedOperation *self, PyObject *args)
{
    long long call, number, budget;
    if (!PyArg_ParseTuple(args, "LLL", &call, &number, &budget))
        return NULL;
    const Ring *ring = &self->ring->ring;
    if (self->order->moving != call || !ring_is_over(ring, number, now_ns(), budget))
        return PyLong_FromLong(0);
    return PyLong_FromLong(ring_is_unanimous(ring, number) ? 1 : 2);
}

/* Read the result of a posted call in one piece; poll for the other members for so long. The results are those of complete(). */
static int complete(SharedOperation *self, int64_t call, int64_t number, PyObject *recv, PyObject *before, int64_t budget)
{
    CallOrder *order = self->order;
    const Ring *ring = &self->ring->ring;
    if (order->moving != call || !ring_is_over(ring, number, budget < 0 ? 0 : now_ns(), budget))
        return 0;
    if (!ring_is_unanimous(ring, number))
        return 2;
    if (self->segment != NULL || self->width < self->block || !fits(self, &self->recv, recv, WRITABLE))
        return 4;
    if (PyBytes_Check(before) && self->recv.arrays < 0 && PyBytes_GET_SIZE(before) == self->recv.count * self->itemsize &&
        memcmp(PyBytes_AS_STRING(before), memory(recv), (size_t)PyBytes_GET_SIZE(before)) != 0)
        return 3;
    read_result(self, number, recv, 0);
    order->moving = call + 1;
    return 1;
}

static PyObject *shared_complete(SharedOperation *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "complete(call, number, recv, before)");
        return NULL;
    }
    const int64_t call = PyLong_AsLongLong(args[0]), number = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred())
        return NULL;
    if (number < 0) {
        PyErr_SetString(PyExc_ValueError, "rounds are numbered from 0");
        return NULL;
    }
    return PyLong_FromLong(complete(self, call, number, args[2], args[3], -1));
}

static PyObject *shared_begin(SharedOperation *self, PyObject *const *args, Py_ssize_t count);
static PyObject *shared_run(SharedOperation *self, PyObject *const *args, Py_ssize_t count);
static PyObject *shared_run_rest(SharedOperation *self, PyObject *const *args, Py_ssize_t count);

static PyMethodDef shared_methods[] = {
    {"write", (PyCFunction)shared_write, METH_VARARGS, "Write the data of a round that is not posted yet: write(number, send)."},
    {"start", (PyCFunction)shared_start, METH_O,
     "Write the data, post the round, and count the call; return the number of the round, -1 if earlier calls have not posted."},
    {"complete", (PyCFunction)(void (*)(void))shared_complete, METH_FASTCALL,
     "Read the result of a posted call in one piece: complete(call, number of the round, recv, before). Return 0 while the data may\n"
     "not be read, 1 if it was, 2 if not all members made the call, 3 if the bytes of recv are not those of before, unless that is empty,\n"
     "4 if recv is not what the call was prepared for."},
    {"begin", (PyCFunction)(void (*)(void))shared_begin, METH_FASTCALL,
     "Start the call in one piece, for a wait later: begin(group, prepared, send, recv, code, instruction, limit, outputs, places). Return the\n"
     "request, pending and with its claim of memory; None, with nothing done, if that is impossible. The places are those of the rounds."},
    {"run", (PyCFunction)(void (*)(void))shared_run, METH_FASTCALL,
     "Make the call: run(group, prepared, send, recv, frame[, limit, name, words]). Return False if nothing was done."},
    {"run_rest", (PyCFunction)(void (*)(void))shared_run_rest, METH_FASTCALL,
     "Move the pieces of a call whose round Python has waited for: run_rest(group, prepared, send, recv, request)."},
    {"state", (PyCFunction)shared_state, METH_VARARGS,
     "Return 0 while the data may not be read, 1 if all members made the call, 2 if not: state(call, number, nanoseconds)."},
    {"read", (PyCFunction)shared_read, METH_VARARGS,
     "Read the result of a call in one piece that is over: read(number of the round, or the step, recv)."},
    {NULL},
};

static PyTypeObject SharedOperationType = {
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

/* ---- configuration ---- */

static PyObject *configure(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *finish, *withdraw, *await, *pending, *claims, *threads;
    if (!PyArg_ParseTuple(args, "OOOO!O!O!", &finish, &withdraw, &await, &PyList_Type, &pending, &PySet_Type, &claims, &PySet_Type,
                          &threads))
        return NULL;
    Known next = known;
    next.finish = Py_NewRef(finish);
    next.withdraw = Py_NewRef(withdraw);
    next.await = Py_NewRef(await);
    next.pending = Py_NewRef(pending);
    next.claims = Py_NewRef(claims);
    next.threads = Py_NewRef(threads);
    known = next; /* the references of an earlier configuration are few, and stay */
    Py_RETURN_NONE;
}

/* Know what the start and the end of an asynchronous call use; without an argument forget that, as in a forked child. */
static PyObject *configure_requests(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *request = NULL, *lock, *claim, *reusable, *observers, *posted, *complete, *at_once;
    if (PyTuple_GET_SIZE(args) == 0) {
        known.request = NULL; /* the references stay */
        Py_RETURN_NONE;
    }
    if (!PyArg_ParseTuple(args, "O!OO!O!O!OOO", &PyType_Type, &request, &lock, &PyType_Type, &claim, &PySet_Type, &reusable, &PyList_Type,
                          &observers, &posted, &complete, &at_once))
        return NULL;
    if (!PyType_IsSubtype((PyTypeObject *)request, &RequestType)) {
        PyErr_SetString(PyExc_TypeError, "the requests have other fields");
        return NULL;
    }
    known.lock = Py_NewRef(lock);
    known.claim = Py_NewRef(claim);
    known.reusable = Py_NewRef(reusable);
    known.observers = Py_NewRef(observers);
    known.posted = Py_NewRef(posted);
    known.complete = Py_NewRef(complete);
    known.at_once = Py_NewRef(at_once);
    known.request = Py_NewRef(request);
    Py_RETURN_NONE;
}

/* Compare an array of float64 of the shape (2, 3) with its description in Python, and note the type of arrays. */
static PyObject *check_arrays(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *probe;
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "OK", &probe, &address))
        return NULL;
    const Array *array = (Array *)probe;
    int wrong = Py_TYPE(probe)->tp_basicsize < (Py_ssize_t)sizeof(Array) || array->data != (char *)(uintptr_t)address;
    wrong = wrong || array->nd != 2 || array->dimensions[0] != 2 || array->dimensions[1] != 3;
    wrong = wrong || (array->flags & WRITABLE) != WRITABLE || Py_TYPE(array->descr)->tp_basicsize < (Py_ssize_t)sizeof(Descr);
    const Descr *dtype = wrong ? NULL : (Descr *)array->descr;
    if (wrong || dtype->kind != 'f' || dtype->type != 'd' || dtype->byteorder != '=' || dtype->type_num != 12) {
        PyErr_SetString(PyExc_TypeError, "this NumPy's arrays are not laid out as those of NumPy 1 and 2");
        return NULL;
    }
    known.array = (PyTypeObject *)Py_NewRef((PyObject *)Py_TYPE(probe));
    Py_RETURN_NONE;
}

/* ---- the call ---- */

static PyObject *instruction(PyObject *frame)
{
#if PY_VERSION_HEX >= 0x030B0000
    return PyLong_FromLong(PyFrame_GetLasti((PyFrameObject *)frame));
#else
    return PyObject_GetAttr(frame, known.f_lasti);
#endif
}

/* Return (op, code, instruction) of the program's call. */
static PyObject *describe(PyObject *op, PyObject *frame)
{
    PyObject *site = PyTuple_New(3);
    PyObject *at = instruction(frame);
    if (site == NULL || at == NULL) {
        Py_XDECREF(site);
        Py_XDECREF(at);
        return NULL;
    }
    PyTuple_SET_ITEM(site, 0, Py_NewRef(op));
    PyTuple_SET_ITEM(site, 1, (PyObject *)PyFrame_GetCode((PyFrameObject *)frame));
    PyTuple_SET_ITEM(site, 2, at);
    return site;
}

/* The arguments of run(): the last three only if the program gives the call a limit or a name. */
enum { GROUP, PREPARED, SEND, RECV, FRAME, PLAIN, LIMIT = PLAIN, NAME, WORDS, EXTENDED };

static PyObject *extra(PyObject *const *args, Py_ssize_t count, int which)
{
    return count == EXTENDED ? args[which] : Py_None;
}

/* Give a posted call up if the function that continues it has raised before it could do so itself. */
static void withdraw(PyObject *const *args, Py_ssize_t count, int64_t call)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    PyObject *number = PyLong_FromLongLong(call), *done = NULL;
    /* A signal handler may raise as the function begins, too. */
    for (int tries = 0; tries < 3 && number != NULL && done == NULL; tries++) {
        PyErr_Clear();
        done = PyObject_CallFunctionObjArgs(known.withdraw, args[GROUP], args[PREPARED], args[FRAME], number, value,
                                            extra(args, count, LIMIT), extra(args, count, NAME), extra(args, count, WORDS), NULL);
    }
    PyErr_Clear();
    if (done == NULL) { /* at the end of the stack, say: mark the group broken without a call */
        PyObject *why = PyUnicode_FromString("a call on it was interrupted, and could not be given up as usual");
        if (why == NULL || PyObject_SetAttrString(args[GROUP], "broken", why) < 0)
            PyErr_Clear();
        Py_XDECREF(why);
    }
    Py_XDECREF(number);
    Py_XDECREF(done);
    PyErr_Restore(type, value, traceback);
}

/* How far a call in several pieces has come. */
typedef struct {
    int64_t wanted; /* the step that others have to reach */
    Py_ssize_t from;
    enum { WRITE, AWAIT, READ } next; /* of the piece at `from` */
} Progress;

/* Move on as far as the others are. Return whether the call is complete. */
static int advance(const SharedOperation *self, PyObject *send, PyObject *recv, Progress *progress)
{
    Segment *segment = &self->segment->segment;
    for (;;)
        switch (progress->next) {
        case READ:
            read_result(self, segment->step, recv, progress->from);
            progress->from += self->width;
            if (progress->from >= self->block)
                return 1;
            progress->next = WRITE; /* fall through */
        case WRITE:
            progress->wanted = segment->step;
            if (self->send.arrays) {
                if (!segment_all_at(segment, segment->step, now_ns(), self->budget))
                    return 0;
                write_data(self, segment->step + 1, send, progress->from);
            }
            segment_advance(segment);
            progress->next = AWAIT; /* fall through */
        case AWAIT:
            progress->wanted = segment->step;
            if (self->recv.arrays && (self->result == COPIED ? !poll_for(segment_counter(segment, self->root), segment->step,
                                                                         now_ns(), self->budget)
                                                             : !segment_all_at(segment, segment->step, now_ns(), self->budget)))
                return 0;
            progress->next = READ;
        }
}

/* Read the first piece of a call whose round is over, and move the others. -1 and an exception: the others do not come. */
static int move_pieces(PyObject *const *args, Py_ssize_t count, SharedOperation *self)
{
    Progress progress = {.next = READ};
    PyObject *send = args[SEND], *recv = args[RECV];
    for (;;) {
        int over;
        Py_BEGIN_ALLOW_THREADS
        over = advance(self, send, recv, &progress);
        Py_END_ALLOW_THREADS
        if (over)
            return 0;
        PyObject *wanted = PyLong_FromLongLong(progress.wanted);
        if (wanted == NULL)
            return -1;
        PyObject *root_only = progress.next == AWAIT && self->result == COPIED ? Py_True : Py_False;
        PyObject *waited = PyObject_CallFunctionObjArgs(known.await, args[GROUP], args[PREPARED], args[FRAME], wanted, root_only,
                                                        extra(args, count, LIMIT), extra(args, count, NAME),
                                                        extra(args, count, WORDS), NULL);
        Py_DECREF(wanted);
        if (waited == NULL)
            return -1;
        Py_DECREF(waited);
        if (!fits(self, &self->send, send, READABLE) || !fits(self, &self->recv, recv, WRITABLE)) {
            PyErr_SetString(PyExc_ValueError, CHANGED);
            return -1;
        }
    }
}

/* Return whether the arguments are as many as run() takes, and the module was configured. */
static int are_arguments(PyObject *const *args, Py_ssize_t count, const char *what)
{
    if ((count == PLAIN || (count == EXTENDED && PyFrame_Check(args[FRAME]))) && known.finish != NULL && known.array != NULL)
        return 1;
    PyErr_SetString(PyExc_TypeError, what);
    return 0;
}

static PyObject *shared_run_rest(SharedOperation *self, PyObject *const *args, Py_ssize_t count)
{
    if (!are_arguments(args, count, "run_rest(group, prepared, send, recv, request)"))
        return NULL;
    if (self->width >= self->block || !fits(self, &self->send, args[SEND], READABLE) ||
        !fits(self, &self->recv, args[RECV], WRITABLE)) {
        PyErr_SetString(PyExc_ValueError, CHANGED);
        return NULL;
    }
    Py_INCREF(self);
    const int failed = move_pieces(args, count, self);
    Py_DECREF(self);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

/* Note that this thread makes calls; return -1 and an exception without memory. */
static int note_thread(SharedOperation *self)
{
    const unsigned long thread = PyThread_get_thread_ident();
    if (self->thread == thread)
        return 0;
    PyObject *ident = PyLong_FromUnsignedLong(thread);
    const int failed = ident == NULL || PySet_Add(known.threads, ident) < 0;
    Py_XDECREF(ident);
    if (!failed)
        self->thread = thread;
    return -failed;
}

/* Make the call with the group's lock held. Return True or False, or NULL. From fits() to read_result() no object is allocated that
   the garbage collector counts, and none is released that may have a destructor. */
static PyObject *make(PyObject *const *args, Py_ssize_t count, SharedOperation *self, const int64_t words[RING_SAID], PyObject *site,
                      PyObject **old)
{
    PyObject *group = args[GROUP], *send = args[SEND], *recv = args[RECV], *done;
    CallOrder *order = self->order;
    Segment *segment = self->segment == NULL ? NULL : &self->segment->segment;
    Ring *ring = &self->ring->ring;
    const int64_t call = order->issued;
    if (order->closed || call != order->moving || PyList_GET_SIZE(known.pending) != 0 || PySet_GET_SIZE(known.claims) != 0)
        Py_RETURN_FALSE;
    if (!fits(self, &self->send, send, READABLE) || !fits(self, &self->recv, recv, WRITABLE))
        Py_RETURN_FALSE;
    if (segment != NULL && !segment_all_at(segment, segment->step, now_ns(), self->budget)) /* a member may still read */
        Py_RETURN_FALSE;
    if (note_thread(self) < 0)
        return NULL;
    *old = PyObject_GetAttr(group, known.last); /* perhaps the last reference to a function of the program */
    if (*old == NULL || PyObject_SetAttr(group, known.last, site) < 0)
        return NULL;
    const int64_t number = order->round + 1, at = segment == NULL ? number : segment->step + 1;
    write_data(self, at, send, 0);
    const int64_t began = ring_write(ring, number, words);
    ring_post(ring, number); /* from here on the others may go on */
    order->issued = call + 1;
    order->round = number;
    order->calls++;
    if (!ring_is_over(ring, number, began, self->budget) || !ring_is_unanimous(ring, number)) {
        done = PyObject_Vectorcall(known.finish, args, (size_t)count, NULL);
        if (done == NULL)
            withdraw(args, count, call);
        return done;
    }
    if (segment != NULL)
        segment_advance(segment);
    order->posted = order->moving = call + 1;
    if (self->width >= self->block)
        read_result(self, at, recv, 0);
    else if (move_pieces(args, count, self) < 0) {
        withdraw(args, count, call + 1);
        return NULL;
    }
    Py_RETURN_TRUE;
}

static PyObject *shared_run(SharedOperation *self, PyObject *const *args, Py_ssize_t count)
{
    if (!are_arguments(args, count, "run(group, prepared, send, recv, frame[, limit, name, words])"))
        return NULL;
    if (!PyFrame_Check(args[FRAME])) {
        PyErr_SetString(PyExc_TypeError, "run: the fifth argument is the frame of the program's call");
        return NULL;
    }
    int64_t given[RING_SAID], *words = self->words;
    if (extra(args, count, WORDS) != Py_None) {
        words = given;
        if (!parse_words(args[WORDS], given))
            return NULL;
    }
    PyObject *made = NULL, *old = NULL;
    PyObject *site = describe(self->op, args[FRAME]);
    PyObject *done = site == NULL ? NULL : PyObject_CallNoArgs(self->acquire);
    if (done == NULL) {
        Py_XDECREF(site);
        return NULL;
    }
    Py_DECREF(done);
    Py_INCREF(self); /* the group may drop its prepared calls meanwhile */
    made = make(args, count, self, words, site, &old);
    PyObject *type = NULL, *value = NULL, *traceback = NULL;
    if (made == NULL)
        PyErr_Fetch(&type, &value, &traceback);
    done = PyObject_CallNoArgs(self->release);
    if (done == NULL) {
        Py_XDECREF(made);
        made = NULL;
    } else
        Py_DECREF(done);
    if (type != NULL)
        PyErr_Restore(type, value, traceback);
    Py_DECREF(self);
    Py_DECREF(site);
    Py_XDECREF(old);
    return made;
}

/* ---- the start and the end of an asynchronous call ---- */

static void set(Request *request, int field, PyObject *value)
{
    PyObject *old = request->objects[field];
    request->objects[field] = Py_XNewRef(value);
    Py_XDECREF(old);
}

/* The arguments of begin(), the first of which are those of run(). */
enum { CODE = FRAME, INSTRUCTION, BEGIN_LIMIT, OUTPUTS, PLACES, BEGIN };

/* Set a field to a new reference, which is taken over; return 0 if there is none, as an exception is set. */
static int give(Request *request, int field, PyObject *value)
{
    set(request, field, value);
    Py_XDECREF(value);
    return value != NULL;
}

/* Set the claim of a request: the memory that the call uses until the program has waited for it. */
static int give_claim(Request *request, PyObject *recv)
{
    PyObject *const claimed[] = {recv, Py_True};
    PyObject *claim = PyObject_Vectorcall(known.claim, claimed, 1, known.writes);
    if (claim != NULL && PyObject_SetAttr(claim, known.of_claim, (PyObject *)request) < 0)
        Py_CLEAR(claim);
    return give(request, REQUEST_claim, claim);
}

/* The outputs as the program gave them, in a list. */
static PyObject *listed(PyObject *outputs)
{
    if (PyList_CheckExact(outputs))
        return PyList_GetSlice(outputs, 0, PY_SSIZE_T_MAX);
    PyObject *list = PyList_New(1);
    if (list != NULL)
        PyList_SET_ITEM(list, 0, Py_NewRef(outputs));
    return list;
}

/* Release a request that is not started: its claim refers to it. */
static void discard(Request *request)
{
    set(request, REQUEST_claim, NULL);
    Py_DECREF(request);
}

/* Return a request of the call, with all that is known before its round is posted; it may be that the call is not started. */
static Request *new_request(SharedOperation *self, PyObject *const *args, int claims)
{
    Request *request = (Request *)request_new((PyTypeObject *)known.request, NULL, NULL);
    if (request == NULL)
        return NULL;
    request->limit = PyFloat_AsDouble(args[BEGIN_LIMIT]);
    if (!PyErr_Occurred())
        request->instruction = PyLong_AsLongLong(args[INSTRUCTION]);
    set(request, REQUEST_group, args[GROUP]);
    set(request, REQUEST_prepared, args[PREPARED]);
    set(request, REQUEST_schedule, known.at_once);
    set(request, REQUEST_words, self->given_words);
    set(request, REQUEST_state, known.posted);
    set(request, REQUEST_send, args[SEND]);
    set(request, REQUEST_recv, args[RECV]);
    set(request, REQUEST_arrays, args[RECV]);
    set(request, REQUEST_code, args[CODE]);
    /* A signal handler of the program may raise in what is called here. */
    if (PyErr_Occurred() || !give(request, REQUEST__lock, PyObject_CallNoArgs(known.lock)) ||
        !give(request, REQUEST_outputs, listed(args[OUTPUTS])) || !give(request, REQUEST_returned, PyLong_FromLong(-1)) ||
        (claims && !give_claim(request, self->recv.arrays ? args[RECV] : Py_None))) {
        discard(request);
        return NULL;
    }
    return request;
}

static int is_busy(PyObject *place)
{
    PyObject *busy = PyObject_GetAttr(place, known.busy);
    const int found = busy == NULL ? -1 : busy == Py_True;
    Py_XDECREF(busy);
    return found;
}

/* Post the call with the group's lock held. Return 1, 0 if that is impossible, or -1 and an exception. Nothing is allocated here that the
   garbage collector counts, so no code of the program runs. */
static int begin(SharedOperation *self, PyObject *const *args, Request *request, PyObject *site, PyObject **old)
{
    const CallOrder *order = self->order;
    PyObject *claim = request->objects[REQUEST_claim];
    const int64_t number = order->round + 1;
    if (order->closed || order->posted != order->issued || (claim != NULL && PySet_GET_SIZE(known.claims) != 0) ||
        !fits(self, &self->send, args[SEND], READABLE) || !fits(self, &self->recv, args[RECV], WRITABLE))
        return 0;
    const int full = is_busy(PyList_GET_ITEM(args[PLACES], (number - RING_AHEAD) & (RING_PLACES - 1)));
    if (full)
        return full < 0 ? -1 : 0;
    const int compares = claim != NULL && self->recv.arrays != 0;
    if (!give(request, REQUEST_before, PyBytes_FromStringAndSize(compares ? memory(args[RECV]) : NULL,
                                                                 compares ? self->recv.count * self->itemsize : 0)))
        return -1;
    PyObject *place = PyList_GET_ITEM(args[PLACES], number & (RING_PLACES - 1)), *at = PyLong_FromLongLong(number);
    *old = PyObject_GetAttr(args[GROUP], known.last);
    int failed = at == NULL || *old == NULL || PyObject_SetAttr(place, known.number, at) < 0 || note_thread(self) < 0 ||
                 PyObject_SetAttr(args[GROUP], known.last, site) < 0;
    Py_XDECREF(at);
    if (failed || PyList_Append(known.pending, (PyObject *)request) < 0)
        return -1;
    failed = claim != NULL && (PySet_Add(known.reusable, claim) < 0 || PySet_Add(known.claims, claim) < 0);
    if (failed || PyObject_SetAttr(place, known.busy, Py_True) < 0) {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        const Py_ssize_t last = PyList_GET_SIZE(known.pending);
        failed = PyList_SetSlice(known.pending, last - 1, last, NULL) < 0;
        failed |= claim != NULL && (PySet_Discard(known.claims, claim) < 0 || PySet_Discard(known.reusable, claim) < 0);
        PyErr_Clear();
        PyErr_Restore(type, value, traceback);
        return -1;
    }
    request->number = order->issued;
    request->posted_round = post(self, args[SEND]);
    request->seq = order->calls;
    request->shared = (SharedOperation *)Py_NewRef((PyObject *)self);
    set(request, REQUEST_round, place);
    return 1;
}

static PyObject *shared_begin(SharedOperation *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != BEGIN || !PyList_CheckExact(args[PLACES]) || PyList_GET_SIZE(args[PLACES]) != RING_PLACES ||
        known.array == NULL) {
        PyErr_SetString(PyExc_TypeError, "begin(group, prepared, send, recv, code, instruction, limit, outputs, places)");
        return NULL;
    }
    if (known.request == NULL || self->segment != NULL || self->send.arrays > 0 || self->recv.arrays > 0 ||
        (self->send.arrays && (!self->recv.arrays || args[SEND] != args[RECV])) || PyList_GET_SIZE(known.observers) != 0 ||
        !fits(self, &self->recv, args[RECV], WRITABLE))
        Py_RETURN_NONE;
    PyObject *compares = PyObject_GetAttr(args[GROUP], known.compares);
    if (compares == NULL)
        return NULL;
    const int claims = compares == Py_True;
    Py_DECREF(compares);
    if (claims && PySet_GET_SIZE(known.claims) != 0)
        Py_RETURN_NONE;
    PyObject *site = PyTuple_Pack(3, self->op, args[CODE], args[INSTRUCTION]), *old = NULL;
    Request *request = site == NULL ? NULL : new_request(self, args, claims);
    PyObject *done = request == NULL ? NULL : PyObject_CallNoArgs(self->acquire);
    if (done == NULL) {
        if (request != NULL)
            discard(request);
        Py_XDECREF(site);
        return NULL;
    }
    Py_DECREF(done);
    const int made = begin(self, args, request, site, &old);
    PyObject *type = NULL, *value = NULL, *traceback = NULL;
    if (made < 0)
        PyErr_Fetch(&type, &value, &traceback);
    done = PyObject_CallNoArgs(self->release);
    if (type != NULL) {
        if (done == NULL)
            PyErr_Clear();
        PyErr_Restore(type, value, traceback);
    }
    Py_DECREF(site);
    Py_XDECREF(old);
    const int failed = made < 0 || done == NULL;
    Py_XDECREF(done);
    if (failed || made == 0) {
        discard(request);
        return failed ? NULL : Py_NewRef(Py_None);
    }
    return (PyObject *)request;
}

static int is_none(PyObject *given)
{
    return given == NULL || given == Py_None;
}

static PyObject *request_finish(Request *self, PyObject *Py_UNUSED(nothing))
{
    SharedOperation *shared = self->shared;
    PyObject *const *objects = self->objects, *claim = objects[REQUEST_claim], *recv = objects[REQUEST_recv];
    if (shared == NULL || known.request == NULL || self->advancing || objects[REQUEST_state] != known.posted ||
        !is_none(objects[REQUEST_landing]) || !is_none(objects[REQUEST_future]) || !is_none(objects[REQUEST_error]) ||
        PyList_GET_SIZE(known.observers) != 0)
        Py_RETURN_FALSE;
    PyObject *broken = PyObject_GetAttr(objects[REQUEST_group], known.broken);
    if (broken == NULL)
        return NULL;
    Py_DECREF(broken);
    if (note_thread(shared) < 0)
        return NULL;
    if (broken != Py_None || shared->order->closed ||
        complete(shared, self->number, self->posted_round, recv, objects[REQUEST_before], shared->budget) != 1)
        Py_RETURN_FALSE;
    set(self, REQUEST_state, known.complete);
    int failed = PyObject_SetAttr(objects[REQUEST_round], known.busy, Py_False) < 0;
    set(self, REQUEST_round, NULL);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(known.pending); i++)
        if (PyList_GET_ITEM(known.pending, i) == (PyObject *)self) {
            failed |= PyList_SetSlice(known.pending, i, i + 1, NULL) < 0;
            break;
        }
    if (claim != NULL) {
        failed |= PySet_Discard(known.claims, claim) < 0 || PySet_Discard(known.reusable, claim) < 0;
        failed |= PyObject_SetAttr(claim, known.of_claim, Py_None) < 0 || PyObject_SetAttr(claim, known.found, known.nothing) < 0;
        set(self, REQUEST_claim, NULL);
    }
    self->shared = NULL;
    Py_DECREF(shared);
    if (failed)
        return NULL;
    Py_RETURN_TRUE;
}

/* ---- functions of the module ---- */

static PyObject *matches(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 4 || !PyTuple_Check(args[2]) || known.array == NULL) {
        PyErr_SetString(PyExc_TypeError, "matches(array, dtype, shape, writable)");
        return NULL;
    }
    const Array *array = (Array *)args[0];
    const int flags = args[3] == Py_True ? WRITABLE : READABLE;
    if (!Py_IS_TYPE(args[0], known.array) || (array->flags & flags) != flags || array->descr != args[1] ||
        array->nd != PyTuple_GET_SIZE(args[2]))
        Py_RETURN_FALSE;
    for (int i = 0; i < array->nd; i++)
        if (PyLong_AsSsize_t(PyTuple_GET_ITEM(args[2], i)) != array->dimensions[i]) {
            PyErr_Clear();
            Py_RETURN_FALSE;
        }
    Py_RETURN_TRUE;
}

static PyObject *reduce_rows(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *rows, *out;
    const char *name;
    Py_ssize_t size;
    Py_buffer from = {0}, to = {0};
    if (!PyArg_ParseTuple(args, "OnOs", &rows, &size, &out, &name))
        return NULL;
    const Reduction *reduction = find_reduction(name);
    if (PyObject_GetBuffer(rows, &from, PyBUF_SIMPLE) < 0)
        return NULL;
    if (PyObject_GetBuffer(out, &to, PyBUF_SIMPLE | PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&from);
        return NULL;
    }
    const ptrdiff_t bytes = reduction == NULL ? 0 : reduction_itemsize(reduction);
    const int wrong = reduction == NULL || size < 2 || from.len != size * to.len || to.len % bytes != 0;
    if (!wrong) {
        const char *one = from.buf;
        const Py_ssize_t parts = to.len / bytes * reduction->parts;
        reduction->reduce(to.buf, one, one + to.len, parts);
        for (Py_ssize_t rank = 2; rank < size; rank++)
            reduction->reduce(to.buf, to.buf, one + rank * to.len, parts);
    }
    PyBuffer_Release(&from);
    PyBuffer_Release(&to);
    if (wrong) {
        PyErr_SetString(PyExc_ValueError, "reduce_rows: no such reduction, or memory of another size");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"check_arrays", check_arrays, METH_VARARGS,
     "Check how NumPy lays out arrays: check_arrays(array, address of its data). TypeError: not as expected."},
    {"configure_requests", configure_requests, METH_VARARGS,
     "Know what the start and the end of an asynchronous call use: configure_requests(Request, RLock, RequestClaim, reusable claims,\n"
     "observers, POSTED, COMPLETE, AT_ONCE). Without an argument such calls are made in Python from now on."},
    {"configure", configure, METH_VARARGS, "Tell the module what it needs of the library."},
    {"matches", (PyCFunction)(void (*)(void))matches, METH_FASTCALL,
     "Return whether an array has a dtype and a shape, in one piece of memory: matches(array, dtype, shape, writable)."},
    {"reduce_rows", reduce_rows, METH_VARARGS,
     "Reduce rows in their order: reduce_rows(rows, number of rows, out, \"SUM f8\")."},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "mpicoll._native",
    .m_doc = "Shared memory of the members of a group on one node.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void)
{
    const struct {
        const char *name;
        PyTypeObject *type;
    } types[] = {
        {"CallOrder", &OrderType}, {"Ring", &RingType}, {"Segment", &SegmentType}, {"SharedTransfer", &TransferType}, {"SharedOperation", &SharedOperationType}, {"RequestFields", &RequestType}};
    const struct {
        const char *name;
        long value;
    } constants[] = {
        {"AHEAD", RING_AHEAD},           {"PLACES", RING_PLACES}, {"EAGER_BYTES", RING_EAGER_BYTES}, {"RING_BYTES", RING_BYTES},
        {"COMPARED", RING_COMPARED}, {"SAID", RING_SAID}, {"SEGMENT_LINE", SEGMENT_LINE}, {"BUFFERS", SEGMENT_BUFFERS}};
    known.last = PyUnicode_InternFromString("last");
    known.f_lasti = PyUnicode_InternFromString("f_lasti");
    known.broken = PyUnicode_InternFromString("broken");
    known.busy = PyUnicode_InternFromString("busy");
    known.number = PyUnicode_InternFromString("number");
    known.compares = PyUnicode_InternFromString("compares");
    known.of_claim = PyUnicode_InternFromString("request");
    known.found = PyUnicode_InternFromString("_found");
    known.writes = Py_BuildValue("(s)", "writes");
    known.nothing = PyTuple_New(0);
    if (PyErr_Occurred())
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    int failed = module == NULL || PyModule_AddStringConstant(module, "VERSION", VERSION) < 0;
    for (size_t i = 0; !failed && i < sizeof types / sizeof *types; i++)
        failed = PyType_Ready(types[i].type) < 0 || PyModule_AddObjectRef(module, types[i].name, (PyObject *)types[i].type) < 0;
    for (size_t i = 0; !failed && i < sizeof constants / sizeof *constants; i++)
        failed = PyModule_AddIntConstant(module, constants[i].name, constants[i].value) < 0;
    if (failed) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
