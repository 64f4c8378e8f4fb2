/* Segment: the counters and buffers of segment.c, for Python. */

#include "objects.h"

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

PyTypeObject SegmentType = {
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
