/* MessageFields: the fields of a persistent message (transports/mpi/messages.py has the same class for ranks without the extension), and
   the start and the end of a message whose elements are in its envelope.

   From the start of the request of MPI on nothing can fail but MPI, and no code of the program runs on this thread. */

#include "objects.h"

#define MESSAGE_FIELDS(_) \
    _(request) _(start) _(test) _(buffer) _(words) _(elements) _(payloads) _(code) _(described) _(rank) _(tag) _(shape) _(dtype) \
    _(key) _(acquire) _(release) _(posted) _(waiting) _(queues) _(current) _(polls) _(instruction) _(count) _(_datatype) _(_make) _(_post)

#define FIELD(name) MESSAGE_##name,
enum { MESSAGE_FIELDS(FIELD) MESSAGE_OBJECTS };
#undef FIELD

typedef struct {
    PyObject_HEAD
    PyObject *objects[MESSAGE_OBJECTS];
    int64_t peer, begun, spins, expected;
    Py_ssize_t inside; /* bytes of the elements in the envelope; -1: the elements move apart */
    unsigned long thread; /* that started the message last */
    char compares, taken;
} Message;

static int message_traverse(Message *self, visitproc visit, void *arg)
{
    for (int i = 0; i < MESSAGE_OBJECTS; i++)
        Py_VISIT(self->objects[i]);
    return 0;
}

static int message_clear(Message *self)
{
    for (int i = 0; i < MESSAGE_OBJECTS; i++)
        Py_CLEAR(self->objects[i]);
    return 0;
}

static void message_dealloc(Message *self)
{
    PyObject_GC_UnTrack(self);
    message_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *message_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    Message *self = (Message *)type->tp_alloc(type, 0);
    for (int i = 0; self != NULL && i < MESSAGE_OBJECTS; i++)
        self->objects[i] = Py_NewRef(Py_None);
    return (PyObject *)self;
}

static PyObject *message_take(Message *self, PyObject *Py_UNUSED(nothing))
{
    if (self->taken) {
        PyErr_SetString(PyExc_IndexError, "the message is in use");
        return NULL;
    }
    self->taken = 1;
    Py_RETURN_NONE;
}

static PyObject *message_give_back(Message *self, PyObject *Py_UNUSED(nothing))
{
    self->taken = 0;
    Py_RETURN_NONE;
}

static int message_fits(const Message *self, PyObject *given, int flags)
{
    return array_matches(given, self->objects[MESSAGE_dtype], self->objects[MESSAGE_shape], flags);
}

/* ---- the start ---- */

enum { MESSAGE_GROUP, MESSAGE_ARRAY, MESSAGE_CODE, MESSAGE_INSTRUCTION, MESSAGE_ARGUMENTS };

static char *elements(const Message *self)
{
    return memory(self->objects[MESSAGE_buffer]) + 2 * sizeof(int64_t);
}

static int receives(const Message *self)
{
    return !is_none(self->objects[MESSAGE_posted]);
}

/* Whether the request of MPI may be started now: no other call has it, and no other receive may get its message. -1: an exception. */
static int is_free(const Message *self, PyObject *const *args, int64_t instruction)
{
    PyObject *const *objects = self->objects;
    if (is_none(objects[MESSAGE_rank]) || self->taken)
        return 0;
    if (!receives(self))
        return objects[MESSAGE_code] == args[MESSAGE_CODE] && PyLong_AsLongLong(objects[MESSAGE_instruction]) == instruction;
    if (PyList_GET_SIZE(objects[MESSAGE_waiting]) != 0 || PyDict_GET_SIZE(objects[MESSAGE_queues]) != 0)
        return 0;
    const int posted = PySequence_Contains(objects[MESSAGE_posted], objects[MESSAGE_key]);
    return posted < 0 ? -1 : !posted;
}

static Request *message_request(Message *self, PyObject *const *args, int64_t instruction)
{
    const int receiving = receives(self);
    PyObject *array = args[MESSAGE_ARRAY], *limit = PyObject_GetAttr(args[MESSAGE_GROUP], known.timeout);
    Request *request = limit == NULL ? NULL : (Request *)request_new((PyTypeObject *)(receiving ? known.receive : known.send), NULL, NULL);
    if (request != NULL) {
        PyObject *outputs = PyList_New(1);
        if (outputs != NULL)
            PyList_SET_ITEM(outputs, 0, Py_NewRef(array));
        request->limit = PyFloat_AsDouble(limit);
        request->instruction = instruction;
        request_set(request, REQUEST_group, args[MESSAGE_GROUP]);
        request_set(request, REQUEST_state, known.moving);
        request_set(request, REQUEST_code, args[MESSAGE_CODE]);
        request_set(request, REQUEST_held, (PyObject *)self);
        request_set(request, REQUEST_peer, self->objects[MESSAGE_rank]);
        request_set(request, REQUEST_arrays, array);
        request->tag = PyLong_AsLongLong(self->objects[MESSAGE_tag]);
        /* A signal handler of the program may raise in what is called here. */
        if (!request_give(request, REQUEST_outputs, outputs) || PyErr_Occurred() ||
            !request_give(request, REQUEST_returned, PyLong_FromLong(-1)) ||
            !request_give(request, REQUEST__lock, PyObject_CallNoArgs(known.lock)) ||
            (self->compares && !request_claim(request, claim_of(array, receiving)))) {
            request_discard(request);
            request = NULL;
        }
    }
    Py_XDECREF(limit);
    return request;
}

/* Start the request of MPI. Return 1, 0 if that is impossible now, or -1 and an exception. */
static int message_start(Message *self, PyObject *const *args, Request *request)
{
    PyObject **objects = self->objects, *array = args[MESSAGE_ARRAY];
    const int receiving = receives(self), free = is_free(self, args, request->instruction);
    if (free != 1 || !message_fits(self, array, receiving ? WRITABLE : READABLE))
        return free < 0 ? -1 : 0;
    const int apart = self->compares ? claims_are_apart(memory(array), self->inside) : 1;
    if (apart != 1)
        return apart;
    if (receiving && self->compares && !request_give(request, REQUEST_before, PyBytes_FromStringAndSize(memory(array), self->inside)))
        return -1;
    if (note_thread(&self->thread) < 0)
        return -1;
    if (request_add_claim(request, memory(array), self->inside) < 0 ||
        (receiving && (PyList_Append(known.pending, (PyObject *)request) < 0 ||
                       PyList_Append(objects[MESSAGE_posted], objects[MESSAGE_key]) < 0))) {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        if (request_release(request) < 0)
            PyErr_Clear();
        PyErr_Restore(type, value, traceback);
        return -1;
    }
    if (receiving) {
        Py_XSETREF(objects[MESSAGE_code], Py_NewRef(args[MESSAGE_CODE]));
        Py_XSETREF(objects[MESSAGE_instruction], Py_NewRef(args[MESSAGE_INSTRUCTION]));
    } else {
        self->taken = 1;
        self->begun++;
        memcpy(elements(self), memory(array), (size_t)self->inside);
    }
    Py_XSETREF(objects[MESSAGE_current], Py_NewRef((PyObject *)request));
    request->advancing = 1; /* MPI starts the message without the interpreter lock: no other thread may test it meanwhile */
    PyObject *done = PyObject_CallNoArgs(objects[MESSAGE_start]);
    request->advancing = 0;
    Py_XDECREF(done);
    return done == NULL ? -1 : 1;
}

static PyObject *message_begin(Message *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != MESSAGE_ARGUMENTS) {
        PyErr_SetString(PyExc_TypeError, "begin(group, array, code, instruction)");
        return NULL;
    }
    if (known.request == NULL || known.send == NULL || self->inside < 0 || PyList_GET_SIZE(known.observers) != 0)
        Py_RETURN_NONE;
    const int receiving = receives(self);
    const int64_t instruction = PyLong_AsLongLong(args[MESSAGE_INSTRUCTION]);
    if (instruction == -1 && PyErr_Occurred())
        return NULL;
    const int free = is_free(self, args, instruction);
    if (free != 1 || !message_fits(self, args[MESSAGE_ARRAY], receiving ? WRITABLE : READABLE))
        return free < 0 ? NULL : Py_NewRef(Py_None);
    const int apart = self->compares ? claims_are_apart(memory(args[MESSAGE_ARRAY]), self->inside) : 1;
    if (apart != 1)
        return apart < 0 ? NULL : Py_NewRef(Py_None);
    Request *request = message_request(self, args, instruction);
    if (request == NULL)
        return NULL;
    PyObject *no[] = {Py_False}, *lock = receiving ? PyObject_Vectorcall(self->objects[MESSAGE_acquire], no, 1, NULL) : Py_NewRef(Py_True);
    int made = lock == NULL ? -1 : lock == Py_True;
    Py_XDECREF(lock);
    if (made == 1) {
        made = message_start(self, args, request);
        if (receiving) {
            PyObject *type, *value, *traceback;
            PyErr_Fetch(&type, &value, &traceback);
            Py_XDECREF(PyObject_CallNoArgs(self->objects[MESSAGE_release]));
            PyErr_Restore(type, value, traceback);
        }
    }
    if (made == 1)
        return (PyObject *)request;
    if (self->objects[MESSAGE_current] != (PyObject *)request)
        request_discard(request);
    else
        Py_DECREF(request);
    return made < 0 ? NULL : Py_NewRef(Py_None);
}

/* ---- the end ---- */

/* Poll the request of MPI. Return 1 if it is complete, 0 if not, -1 and an exception. */
static int message_poll(const Message *self)
{
    for (int64_t i = 0; i <= self->spins; i++) {
        PyObject *done = PyObject_CallNoArgs(self->objects[MESSAGE_test]);
        if (done == NULL)
            return -1;
        Py_DECREF(done);
        if (done == Py_True)
            return 1;
        if (poll_yields)
            sched_yield();
    }
    return 0;
}

/* Complete a request of a message that message_begin() has started. Return 1; 0 and change nothing if the message is not complete, or
   is not as expected, or the array was written; or -1 and an exception. */
int message_finish(Request *request)
{
    Message *self = (Message *)request->objects[REQUEST_held];
    PyObject *array = request->objects[REQUEST_arrays];
    const int receiving = receives(self);
    if (self->objects[MESSAGE_current] != (PyObject *)request)
        return 0;
    request->advancing = 1; /* MPI is polled without the interpreter lock */
    const int done = message_poll(self);
    request->advancing = 0;
    if (done < 0) {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        PyErr_NormalizeException(&type, &value, &traceback);
        PyObject *stored = value == NULL ? NULL : PyObject_CallMethod((PyObject *)request, "_react", "O", value);
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
        Py_XDECREF(stored);
        return stored == NULL ? -1 : 0;
    }
    const int compares = !is_none(request->objects[REQUEST_claim]);
    /* Another thread may have asked for a future meanwhile. A request of MPI that is complete is complete in Python's test, too. */
    const int may = done ? request_may_finish(request, known.moving) : 0;
    if (may != 1 || !message_fits(self, array, receiving ? WRITABLE : READABLE))
        return may < 0 ? -1 : 0;
    if (receiving) {
        PyObject *before = request->objects[REQUEST_before];
        const size_t bytes = (size_t)self->inside;
        if (*(int64_t *)memory(self->objects[MESSAGE_buffer]) != self->expected ||
            (compares && (is_none(before) || memcmp(memory(array), PyBytes_AS_STRING(before), bytes) != 0)))
            return 0;
        PyObject *peer = PyLong_FromLongLong(self->peer);
        if (peer == NULL || drop_item(self->objects[MESSAGE_posted], self->objects[MESSAGE_key]) < 0) {
            Py_XDECREF(peer);
            return -1;
        }
        request_give(request, REQUEST_returned, peer);
        memcpy(memory(array), elements(self), bytes);
        self->begun++;
    } else {
        if (compares && memcmp(memory(array), elements(self), (size_t)self->inside) != 0)
            return 0;
        self->taken = 0;
    }
    Py_XSETREF(self->objects[MESSAGE_current], Py_NewRef(Py_None));
    return 1;
}

int is_message(PyObject *held)
{
    return held != NULL && PyObject_TypeCheck(held, &MessageType);
}

/* ---- the type ---- */

/* T_OBJECT_EX: CPython reads such a field as one of a class in Python with __slots__, which takes a fifth of the time of T_OBJECT. */
#define FIELD(name) {#name, T_OBJECT_EX, offsetof(Message, objects) + MESSAGE_##name * sizeof(PyObject *), 0, NULL},
static PyMemberDef message_members[] = {
    MESSAGE_FIELDS(FIELD)
    {"peer", T_LONGLONG, offsetof(Message, peer), 0, NULL},
    {"begun", T_LONGLONG, offsetof(Message, begun), 0, NULL},
    {"spins", T_LONGLONG, offsetof(Message, spins), 0, NULL},
    {"expected", T_LONGLONG, offsetof(Message, expected), 0, NULL},
    {"inside", T_PYSSIZET, offsetof(Message, inside), 0, NULL},
    {"compares", T_BOOL, offsetof(Message, compares), 0, NULL},
    {NULL},
};
#undef FIELD

static PyMethodDef message_methods[] = {
    {"take", (PyCFunction)message_take, METH_NOARGS,
     "Acquire the right to use the message, which one call has at a time; raise IndexError if another call has it."},
    {"give_back", (PyCFunction)message_give_back, METH_NOARGS, "Release the right to use the message."},
    {"begin", (PyCFunction)(void (*)(void))message_begin, METH_FASTCALL,
     "Start the message on an array of the program: begin(group, array, code, instruction). Return its request; None, with nothing\n"
     "done, if another call uses the message, or its elements move apart, or the array does not fit or may be in use."},
    {NULL},
};

PyTypeObject MessageType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpicoll._native.MessageFields",
    .tp_basicsize = sizeof(Message),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "The fields of a persistent message; each is None or 0 until it is set.",
    .tp_new = message_new,
    .tp_traverse = (traverseproc)message_traverse,
    .tp_clear = (inquiry)message_clear,
    .tp_dealloc = (destructor)message_dealloc,
    .tp_methods = message_methods,
    .tp_members = message_members,
};
