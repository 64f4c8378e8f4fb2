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

int note_thread(unsigned long *last)
{
    const unsigned long thread = PyThread_get_thread_ident();
    if (*last == thread)
        return 0;
    PyObject *ident = PyLong_FromUnsignedLong(thread);
    const int failed = ident == NULL || PySet_Add(known.threads, ident) < 0;
    Py_XDECREF(ident);
    if (!failed)
        *last = thread;
    return -failed;
}

PyObject *claim_of(PyObject *array, int writes)
{
    PyObject *const claimed[] = {array, writes ? Py_True : Py_False};
    return PyObject_Vectorcall(known.claim, claimed, 1, known.writes);
}

int request_claim(Request *request, PyObject *claim)
{
    if (claim != NULL && PyObject_SetAttr(claim, known.of_claim, (PyObject *)request) < 0)
        Py_CLEAR(claim);
    return request_give(request, REQUEST_claim, claim);
}

void request_discard(Request *request)
{
    request_set(request, REQUEST_claim, NULL);
    Py_DECREF(request);
}

int request_add_claim(Request *request, const char *start, Py_ssize_t bytes)
{
    PyObject *claim = request->objects[REQUEST_claim];
    return is_none(claim) ? 0 : claims_add(claim, start, bytes);
}

int drop_item(PyObject *list, PyObject *item)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++)
        if (PyList_GET_ITEM(list, i) == item)
            return PyList_SetSlice(list, i, i + 1, NULL);
    return 0;
}

int request_may_finish(const Request *self, PyObject *state)
{
    PyObject *const *objects = self->objects;
    if (known.request == NULL || self->advancing || objects[REQUEST_state] != state || !is_none(objects[REQUEST_landing]) ||
        !is_none(objects[REQUEST_future]) || !is_none(objects[REQUEST_error]) || PyList_GET_SIZE(known.observers) != 0)
        return 0;
    PyObject *broken = PyObject_GetAttr(objects[REQUEST_group], known.broken);
    Py_XDECREF(broken);
    return broken == NULL ? -1 : broken == Py_None;
}

int request_release(Request *request)
{
    PyObject *claim = request->objects[REQUEST_claim];
    int failed = drop_item(known.pending, (PyObject *)request) < 0;
    if (!is_none(claim)) {
        failed |= claims_remove(claim) < 0;
        failed |= PyObject_SetAttr(claim, known.of_claim, Py_None) < 0 || PyObject_SetAttr(claim, known.found, known.nothing) < 0;
        request_set(request, REQUEST_claim, NULL);
    }
    return -failed;
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
    {"awaited", T_BOOL, offsetof(Request, awaited), 0, NULL},
    {"told", T_BOOL, offsetof(Request, told), 0, NULL},
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
