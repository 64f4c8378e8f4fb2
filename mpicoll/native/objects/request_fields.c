/* RequestFields: the fields of a request. operations/states.py has the same class for ranks without the extension. */

#include "objects.h"

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

PyObject *request_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
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

static PyMethodDef request_methods[] = {
    {"finish", (PyCFunction)request_finish, METH_NOARGS,
     "Complete a call that SharedOperation.begin has started, and release its claim. Return False, with nothing done, if the call is\n"
     "not over within the time that a call polls, or not as this member says, or if anything else is to be done at its end."},
    {NULL},
};

PyTypeObject RequestType = {
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
