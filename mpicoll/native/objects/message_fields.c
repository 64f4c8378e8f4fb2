/* MessageFields: the fields of a persistent message (transports/mpi/messages.py has the same class for ranks without the extension), and
   the start and the end of a message. Python makes the persistent requests of elements that move apart.

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
    Py_ssize_t nbytes; /* of the elements */
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

static int is_apart(const Message *self)
{
    return self->inside < 0;
}

/* The persistent request of the elements of an array, which move apart; NULL: Python has to make the request, or an exception is set. */
static PyObject *payload_of(const Message *self, PyObject *array)
{
    PyObject *payloads = self->objects[MESSAGE_payloads], *address = PyLong_FromVoidPtr(memory(array));
    PyObject *found = address == NULL || !PyDict_CheckExact(payloads) ? NULL : PyDict_GetItemWithError(payloads, address);
    Py_XDECREF(address);
    return Py_XNewRef(found);
}

/* Call a method of a request of MPI without arguments. Return -1 and an exception if MPI fails, 1 if the result is True, or else 0. */
static int call_mpi(PyObject *request, PyObject *name)
{
    PyObject *done = PyObject_CallMethodNoArgs(request, name);
    Py_XDECREF(done); /* True stays */
    return done == NULL ? -1 : done == Py_True;
}

/* The contents of an array, to find writes of the program; NULL and an exception without memory. */
static PyObject *message_contents(const Message *self, PyObject *array)
{
    const Together all = {self->nbytes, 1};
    PyObject *found = PyBytes_FromStringAndSize(NULL, contents_size(self->nbytes, all));
    if (found != NULL)
        contents_copy(PyBytes_AS_STRING(found), memory(array), self->nbytes, all);
    return found;
}

/* Whether an array that fits has other contents than message_contents() has returned. */
static int message_is_changed(const Message *self, PyObject *array, PyObject *held)
{
    return is_none(held) || contents_differ(PyBytes_AS_STRING(held), memory(array), self->nbytes, (Together){self->nbytes, 1});
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

/* Start the requests of MPI. Return 1, 0 if that is impossible now, or -1 and an exception. */
static int message_start(Message *self, PyObject *const *args, Request *request)
{
    PyObject **objects = self->objects, *array = args[MESSAGE_ARRAY], *payload = NULL;
    const int receiving = receives(self), sends_apart = !receiving && is_apart(self), free = is_free(self, args, request->instruction);
    if (free != 1 || !message_fits(self, array, receiving ? WRITABLE : READABLE))
        return free < 0 ? -1 : 0;
    const int apart = self->compares ? claims_are_apart(memory(array), self->nbytes) : 1;
    if (apart != 1)
        return apart;
    if (sends_apart && (payload = payload_of(self, array)) == NULL)
        return PyErr_Occurred() ? -1 : 0;
    int failed = self->compares && (receiving || sends_apart) &&
                 !request_give(request, receiving ? REQUEST_before : REQUEST_after, message_contents(self, array));
    failed = failed || note_thread(&self->thread) < 0;
    if (!failed && (request_add_claim(request, memory(array), self->nbytes) < 0 ||
                    (receiving && (PyList_Append(known.pending, (PyObject *)request) < 0 ||
                                   PyList_Append(objects[MESSAGE_posted], objects[MESSAGE_key]) < 0)))) {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        if (request_release(request) < 0)
            PyErr_Clear();
        PyErr_Restore(type, value, traceback);
        failed = 1;
    }
    if (failed) {
        Py_XDECREF(payload);
        return -1;
    }
    if (receiving) {
        Py_XSETREF(objects[MESSAGE_code], Py_NewRef(args[MESSAGE_CODE]));
        Py_XSETREF(objects[MESSAGE_instruction], Py_NewRef(args[MESSAGE_INSTRUCTION]));
    } else {
        self->taken = 1;
        self->begun++;
        if (!sends_apart)
            memcpy(elements(self), memory(array), (size_t)self->nbytes);
    }
    Py_XSETREF(objects[MESSAGE_current], Py_NewRef((PyObject *)request));
    request->advancing = 1; /* MPI starts the message without the interpreter lock: no other thread may test it meanwhile */
    PyObject *done = PyObject_CallNoArgs(objects[MESSAGE_start]);
    failed = done == NULL || (sends_apart && call_mpi(payload, known.start_mpi) < 0);
    request_set(request, REQUEST__current, payload);
    request->advancing = 0;
    Py_XDECREF(payload);
    Py_XDECREF(done);
    return failed ? -1 : 1;
}

static PyObject *message_begin(Message *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != MESSAGE_ARGUMENTS) {
        PyErr_SetString(PyExc_TypeError, "begin(group, array, code, instruction)");
        return NULL;
    }
    if (known.request == NULL || known.send == NULL || PyList_GET_SIZE(known.observers) != 0)
        Py_RETURN_NONE;
    const int receiving = receives(self), locks = receiving || is_apart(self);
    const int64_t instruction = PyLong_AsLongLong(args[MESSAGE_INSTRUCTION]);
    if (instruction == -1 && PyErr_Occurred())
        return NULL;
    const int free = is_free(self, args, instruction);
    if (free != 1 || !message_fits(self, args[MESSAGE_ARRAY], receiving ? WRITABLE : READABLE))
        return free < 0 ? NULL : Py_NewRef(Py_None);
    const int apart = self->compares ? claims_are_apart(memory(args[MESSAGE_ARRAY]), self->nbytes) : 1;
    if (apart != 1)
        return apart < 0 ? NULL : Py_NewRef(Py_None);
    Request *request = message_request(self, args, instruction);
    if (request == NULL)
        return NULL;
    PyObject *no[] = {Py_False}, *lock = locks ? PyObject_Vectorcall(self->objects[MESSAGE_acquire], no, 1, NULL) : Py_NewRef(Py_True);
    int made = lock == NULL ? -1 : lock == Py_True;
    Py_XDECREF(lock);
    if (made == 1) {
        made = message_start(self, args, request);
        if (locks) {
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

enum { PENDING, MOVED, OTHERWISE }; /* what a test found; OTHERWISE: Python has to go on */

/* Request the elements that move apart of a message whose envelope has been received. Return 1; 0, and nothing was done, if the message is
   not as expected, or the program has written the array, or Python has to make the request; or -1 and an exception. */
static int receive_elements(Message *self, Request *request)
{
    PyObject *array = request->objects[REQUEST_arrays];
    if (*(int64_t *)memory(self->objects[MESSAGE_buffer]) != self->expected || !message_fits(self, array, WRITABLE) ||
        (!is_none(request->objects[REQUEST_claim]) && message_is_changed(self, array, request->objects[REQUEST_before])))
        return 0;
    PyObject *payload = payload_of(self, array);
    if (payload == NULL)
        return PyErr_Occurred() ? -1 : 0;
    request_set(request, REQUEST_before, NULL);
    const int failed = call_mpi(payload, known.start_mpi) < 0;
    request_set(request, REQUEST__current, payload);
    Py_DECREF(payload);
    return failed ? -1 : 1;
}

/* Acquire the right to test a request, as Request.Test does. Return 1, 0 if it is being tested or given up, or -1 and an exception. */
static int hold(Request *request)
{
    PyObject *held = PyObject_CallMethodOneArg(request->objects[REQUEST__lock], known.acquire, Py_False);
    Py_XDECREF(held); /* True stays */
    if (held != Py_True)
        return held == NULL ? -1 : 0;
    if (request->advancing || request->objects[REQUEST_state] != known.moving) {
        PyObject *done = PyObject_CallMethodNoArgs(request->objects[REQUEST__lock], known.release);
        Py_XDECREF(done);
        return done == NULL ? -1 : 0;
    }
    request->advancing = 1;
    return 1;
}

/* Release the right; an exception that is set stays. */
static void let_go(Request *request)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    request->advancing = 0;
    Py_XDECREF(PyObject_CallMethodNoArgs(request->objects[REQUEST__lock], known.release));
    PyErr_Restore(type, value, traceback);
}

/* Test the requests of MPI of a message, which this thread holds. Return what was found, or -1 and an exception. */
static int message_test(Message *self, Request *request)
{
    PyObject *const *objects = request->objects;
    if (!receives(self) || is_none(objects[REQUEST__current])) {
        PyObject *done = PyObject_CallNoArgs(self->objects[MESSAGE_test]);
        Py_XDECREF(done); /* True stays */
        if (done != Py_True)
            return done == NULL ? -1 : PENDING;
        if (!is_apart(self))
            return MOVED;
        const int requested = receives(self) ? receive_elements(self, request) : 1;
        if (requested != 1)
            return requested < 0 ? -1 : OTHERWISE;
    }
    return call_mpi(objects[REQUEST__current], known.test_mpi);
}

/* End a request with the exception that is set, which MPI has raised; return -1 if the exception is no outcome of the message. */
static int message_fail(Request *request)
{
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

/* Progress another receive whose elements move apart: request them, as their sender may wait for that and send to this rank afterwards; and
   hold the contents of the array once they have arrived, as the program may not write the array before it has waited. Return 1; 0 if
   Python has to go on; or -1 and an exception. */
static int advance_receive(Message *self, Request *request)
{
    PyObject *array = request->objects[REQUEST_arrays];
    const int held = hold(request);
    if (held != 1)
        return held < 0 ? -1 : 1;
    int found = message_test(self, request);
    if (found == MOVED && !is_none(request->objects[REQUEST_claim]))
        found = !message_fits(self, array, READABLE)                                       ? OTHERWISE
                : request_give(request, REQUEST_after, message_contents(self, array)) ? MOVED
                                                                                      : -1;
    let_go(request);
    if (found < 0)
        found = message_fail(request) < 0 ? -1 : OTHERWISE;
    return found < 0 ? -1 : found != OTHERWISE;
}

/* Progress the other receives that are pending. Return 1; 0 if a pending request has to progress in Python; or -1 and an exception. */
static int advance_others(const Request *mine)
{
    int alone = 1;
    for (Py_ssize_t i = 0; alone == 1 && i < PyList_GET_SIZE(known.pending); i++) {
        Request *request = (Request *)PyList_GET_ITEM(known.pending, i);
        if (request == mine)
            continue;
        if (!PyObject_TypeCheck((PyObject *)request, &RequestType) || !is_message(request->objects[REQUEST_held]))
            return 0;
        Message *self = (Message *)request->objects[REQUEST_held];
        if (request->objects[REQUEST_state] != known.moving)
            continue; /* it is over */
        if (self->objects[MESSAGE_current] != (PyObject *)request)
            return 0;
        if (!is_apart(self) || (!is_none(request->objects[REQUEST__current]) &&
                                (is_none(request->objects[REQUEST_claim]) || !is_none(request->objects[REQUEST_after]))))
            continue; /* MPI itself progresses all that has been posted */
        Py_INCREF(request);
        alone = advance_receive(self, request);
        Py_DECREF(request);
    }
    return alone;
}

/* Test a message until all of it has moved, for some polls; return what was found last, or -1 and an exception. */
static int message_poll(Message *self, Request *request)
{
    int found, alone = 1;
    /* MPI is polled without the interpreter lock: no other thread may test the message. Of few elements the flag alone says so: the lock
       takes a twentieth of their time. */
    const int held = is_apart(self) ? hold(request) : (request->advancing = 1);
    if (held != 1)
        return held < 0 ? -1 : OTHERWISE;
    for (int64_t left = self->spins; (found = message_test(self, request)) == PENDING && left > 0; left--) {
        alone = is_apart(self) ? advance_others(request) : 1;
        if (alone != 1)
            break;
        if (poll_yields)
            sched_yield();
    }
    if (is_apart(self))
        let_go(request);
    else
        request->advancing = 0;
    if (alone < 0 || (found < 0 && message_fail(request) < 0))
        return -1;
    return found < 0 ? OTHERWISE : found;
}

/* Complete a request of a message that message_begin() has started. Return 1; 0 if the message is not complete, or is not as expected, or
   the array was written: Python goes on from there; or -1 and an exception. */
int message_finish(Request *request)
{
    Message *self = (Message *)request->objects[REQUEST_held];
    PyObject *array = request->objects[REQUEST_arrays];
    const int receiving = receives(self);
    if (self->objects[MESSAGE_current] != (PyObject *)request)
        return 0;
    const int found = message_poll(self, request);
    if (found != MOVED)
        return found < 0 ? -1 : 0;
    const int compares = !is_none(request->objects[REQUEST_claim]);
    /* Another thread may have asked for a future meanwhile. A request of MPI that is complete is complete in Python's test, too. */
    const int may = request_may_finish(request, known.moving);
    if (may != 1 || !message_fits(self, array, receiving ? WRITABLE : READABLE))
        return may < 0 ? -1 : 0;
    if (receiving) {
        if (is_apart(self) && !is_none(request->objects[REQUEST_after]) &&
            message_is_changed(self, array, request->objects[REQUEST_after]))
            return 0;
        if (!is_apart(self) && (*(int64_t *)memory(self->objects[MESSAGE_buffer]) != self->expected ||
                                (compares && message_is_changed(self, array, request->objects[REQUEST_before]))))
            return 0;
        PyObject *peer = PyLong_FromLongLong(self->peer);
        if (peer == NULL || drop_item(self->objects[MESSAGE_posted], self->objects[MESSAGE_key]) < 0) {
            Py_XDECREF(peer);
            return -1;
        }
        request_give(request, REQUEST_returned, peer);
        if (!is_apart(self))
            memcpy(memory(array), elements(self), (size_t)self->nbytes);
        self->begun++;
    } else {
        if (compares && (is_apart(self) ? message_is_changed(self, array, request->objects[REQUEST_after])
                                        : memcmp(memory(array), elements(self), (size_t)self->nbytes) != 0))
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
    {"nbytes", T_PYSSIZET, offsetof(Message, nbytes), 0, NULL},
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
     "done, if another call uses the message, or the array does not fit, may be in use, or has no persistent request to be sent by."},
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
