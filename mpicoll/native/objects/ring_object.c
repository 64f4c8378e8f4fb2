/* Ring: the rounds of ring.c, for Python. CallOrder: the numbers of the calls of a group, which checks/order.py has for ranks without the
   extension. */

#include "objects.h"

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

int ring_parse_words(PyObject *given, int64_t words[RING_SAID])
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
    if (!round_number(self, args[0], &number) || !ring_parse_words(args[1], words))
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

PyTypeObject RingType = {
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

/* ---- CallOrder ---- */

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

PyTypeObject OrderType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpicoll._native.CallOrder",
    .tp_basicsize = sizeof(CallOrder),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "The numbers of a group's calls.",
    .tp_new = PyType_GenericNew,
    .tp_methods = order_methods,
    .tp_members = order_members,
};
