/* MessageFields: the fields of a persistent message (transports/mpi/messages.py has the same class for ranks without the extension), and
   the start of a message. Python makes the persistent requests of elements that move apart.

   From the start of the request of MPI on nothing can fail but MPI, and no code of the program runs on this thread. */

#include "objects.h"

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

/* ---- the array of a message, which may have its elements at any distances: then they move through memory of the message ---- */

enum { ALIGNED = 0x100, ALIGNED_WRITEABLE = 0x500 }; /* NumPy's flags */

/* The layout of an array that has elements. */
static Strided strided_of(const Message *self, PyObject *given)
{
    const Array *array = (Array *)given;
    Py_ssize_t count = 1;
    for (int i = 0; i < array->nd; i++)
        count *= array->dimensions[i];
    return (Strided){array->data, array->nd, array->dimensions, array->strides, self->nbytes / count};
}

/* The memory of the message for the elements of an array. */
static char *packed_memory(const Message *self)
{
    return message_is_apart(self) ? memory(self->objects[MESSAGE_packed]) : message_elements(self);
}

int message_fits(const Message *self, PyObject *given)
{
    const int receiving = message_receives(self);
    if (!array_matches(given, self->objects[MESSAGE_dtype], self->objects[MESSAGE_shape], receiving ? ALIGNED_WRITEABLE : ALIGNED))
        return 0;
    if (is_contiguous(given))
        return 1;
    if (message_is_apart(self) && is_none(self->objects[MESSAGE_packed]))
        return 0;
    const Strided array = strided_of(self, given);
    return !receiving || strided_are_distinct(&array);
}

Use message_use(const Message *self, PyObject *array)
{
    Use use = {memory(array), self->nbytes, (Array *)array, message_receives(self)};
    if (!is_contiguous(array)) {
        const Strided strided = strided_of(self, array);
        use.start = strided_span(&strided, &use.bytes);
    }
    return use;
}

void message_pack(const Message *self, PyObject *array)
{
    if (!is_contiguous(array)) {
        const Strided strided = strided_of(self, array);
        strided_pack(packed_memory(self), &strided);
    } else if (!message_is_apart(self))
        memcpy(message_elements(self), memory(array), (size_t)self->nbytes);
}

void message_unpack(const Message *self, PyObject *array, int packed)
{
    if ((packed || !message_is_apart(self)) && self->nbytes > 0) {
        const Strided strided = strided_of(self, array);
        strided_unpack(&strided, packed_memory(self));
    }
}

int message_is_as_packed(const Message *self, PyObject *array)
{
    if (is_contiguous(array))
        return memcmp(memory(array), message_elements(self), (size_t)self->nbytes) == 0;
    const Strided strided = strided_of(self, array);
    return !strided_differ(&strided, packed_memory(self));
}

PyObject *message_payload(const Message *self, PyObject *array)
{
    PyObject *payloads = self->objects[MESSAGE_payloads];
    PyObject *address = PyLong_FromVoidPtr(is_contiguous(array) ? memory(array) : packed_memory(self));
    PyObject *found = address == NULL || !PyDict_CheckExact(payloads) ? NULL : PyDict_GetItemWithError(payloads, address);
    Py_XDECREF(address);
    return Py_XNewRef(found);
}

PyObject *message_contents(const Message *self, PyObject *array)
{
    const Together all = {self->nbytes, 1};
    const int packed = is_contiguous(array);
    PyObject *found = PyBytes_FromStringAndSize(NULL, packed ? contents_size(self->nbytes, all) : self->nbytes);
    if (found != NULL && packed)
        contents_copy(PyBytes_AS_STRING(found), memory(array), self->nbytes, all);
    else if (found != NULL) {
        const Strided strided = strided_of(self, array);
        strided_pack(PyBytes_AS_STRING(found), &strided);
    }
    return found;
}

int message_is_changed(const Message *self, PyObject *array, PyObject *held)
{
    if (is_none(held))
        return 1;
    if (is_contiguous(array))
        return contents_differ(PyBytes_AS_STRING(held), memory(array), self->nbytes, (Together){self->nbytes, 1});
    const Strided strided = strided_of(self, array);
    return PyBytes_GET_SIZE(held) != self->nbytes || strided_differ(&strided, PyBytes_AS_STRING(held));
}

/* ---- what the start and the end of a message use ---- */

int is_message(PyObject *held)
{
    return held != NULL && PyObject_TypeCheck(held, &MessageType);
}

int call_mpi(PyObject *request, PyObject *name)
{
    PyObject *done = PyObject_CallMethodNoArgs(request, name);
    Py_XDECREF(done); /* True stays */
    return done == NULL ? -1 : done == Py_True;
}

int message_is_free(const Message *self, PyObject *const *args, int64_t instruction)
{
    PyObject *const *objects = self->objects;
    if (is_none(objects[MESSAGE_rank]) || self->taken)
        return 0;
    if (!message_receives(self))
        return objects[MESSAGE_code] == args[MESSAGE_CODE] && PyLong_AsLongLong(objects[MESSAGE_instruction]) == instruction;
    if (PyList_GET_SIZE(objects[MESSAGE_waiting]) != 0 || PyDict_GET_SIZE(objects[MESSAGE_queues]) != 0)
        return 0;
    const int posted = PySequence_Contains(objects[MESSAGE_posted], objects[MESSAGE_key]);
    return posted < 0 ? -1 : !posted;
}

int message_lock(const Message *self)
{
    PyObject *no[] = {Py_False}, *done = PyObject_Vectorcall(self->objects[MESSAGE_acquire], no, 1, NULL);
    Py_XDECREF(done); /* True stays */
    return done == NULL ? -1 : done == Py_True;
}

void message_unlock(const Message *self)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    Py_XDECREF(PyObject_CallNoArgs(self->objects[MESSAGE_release]));
    PyErr_Restore(type, value, traceback);
}

void message_note_site(Message *self, PyObject *const *args)
{
    Py_XSETREF(self->objects[MESSAGE_code], Py_NewRef(args[MESSAGE_CODE]));
    Py_XSETREF(self->objects[MESSAGE_instruction], Py_NewRef(args[MESSAGE_INSTRUCTION]));
}

int message_post(Message *self, PyObject *const *args, PyObject *payload)
{
    if (!message_receives(self)) {
        self->taken = 1;
        self->begun++;
        message_pack(self, args[MESSAGE_ARRAY]);
    }
    PyObject *done = PyObject_CallNoArgs(self->objects[MESSAGE_start]);
    Py_XDECREF(done);
    return done == NULL || (payload != NULL && call_mpi(payload, known.start_mpi) < 0) ? -1 : 0;
}

/* ---- the start of a message that is not waited for ---- */

/* Whether the extension can start a message of an array. Python takes samples of large arrays whose elements stand apart. */
static int message_may_begin(const Message *self, PyObject *array)
{
    return message_fits(self, array) && (is_contiguous(array) || !self->compares || self->nbytes <= SNAPSHOT_BYTES);
}

static Request *message_request(Message *self, PyObject *const *args, int64_t instruction)
{
    const int receiving = message_receives(self);
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
        if (message_is_apart(self) && !is_contiguous(array))
            request_set(request, receiving ? REQUEST_recv : REQUEST_send, self->objects[MESSAGE_packed]);
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
    const int receiving = message_receives(self), sends_apart = !receiving && message_is_apart(self);
    const int free = message_is_free(self, args, request->instruction);
    if (free != 1 || !message_may_begin(self, array))
        return free < 0 ? -1 : 0;
    const Use use = message_use(self, array);
    const int apart = self->compares ? claims_are_apart(&use) : 1;
    if (apart != 1)
        return apart;
    if (sends_apart && (payload = message_payload(self, array)) == NULL)
        return PyErr_Occurred() ? -1 : 0;
    int failed = self->compares && (receiving || sends_apart) &&
                 !request_give(request, receiving ? REQUEST_before : REQUEST_after, message_contents(self, array));
    failed = failed || note_thread(&self->thread) < 0;
    if (!failed && (request_add_claim(request, use.start, use.bytes) < 0 ||
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
    if (receiving)
        message_note_site(self, args);
    Py_XSETREF(objects[MESSAGE_current], Py_NewRef((PyObject *)request));
    request->advancing = 1; /* MPI starts the message without the interpreter lock: no other thread may test it meanwhile */
    failed = message_post(self, args, payload) < 0;
    request_set(request, REQUEST__current, payload);
    request->advancing = 0;
    Py_XDECREF(payload);
    return failed ? -1 : 1;
}

static PyObject *message_begin(Message *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != MESSAGE_ARGUMENTS) {
        PyErr_SetString(PyExc_TypeError, "begin(array, code, instruction, group)");
        return NULL;
    }
    if (known.request == NULL || known.send == NULL || PyList_GET_SIZE(known.observers) != 0)
        Py_RETURN_NONE;
    const int receiving = message_receives(self), locks = receiving || message_is_apart(self);
    const int64_t instruction = PyLong_AsLongLong(args[MESSAGE_INSTRUCTION]);
    if (instruction == -1 && PyErr_Occurred())
        return NULL;
    const int free = message_is_free(self, args, instruction);
    if (free != 1 || !message_may_begin(self, args[MESSAGE_ARRAY]))
        return free < 0 ? NULL : Py_NewRef(Py_None);
    const Use use = message_use(self, args[MESSAGE_ARRAY]);
    const int apart = self->compares ? claims_are_apart(&use) : 1;
    if (apart != 1)
        return apart < 0 ? NULL : Py_NewRef(Py_None);
    Request *request = message_request(self, args, instruction);
    if (request == NULL)
        return NULL;
    int made = locks ? message_lock(self) : 1;
    if (made == 1) {
        made = message_start(self, args, request);
        if (locks)
            message_unlock(self);
    }
    if (made == 1)
        return (PyObject *)request;
    if (self->objects[MESSAGE_current] != (PyObject *)request)
        request_discard(request);
    else
        Py_DECREF(request);
    return made < 0 ? NULL : Py_NewRef(Py_None);
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

static PyObject *fits(Message *self, PyObject *array)
{
    return PyBool_FromLong(known.array != NULL && PyTuple_Check(self->objects[MESSAGE_shape]) && message_fits(self, array));
}

static PyMethodDef message_methods[] = {
    {"fits", (PyCFunction)fits, METH_O,
     "Return whether the message can move an array of the program, where it stands or through memory of the message."},
    {"take", (PyCFunction)message_take, METH_NOARGS,
     "Acquire the right to use the message, which one call has at a time; raise IndexError if another call has it."},
    {"give_back", (PyCFunction)message_give_back, METH_NOARGS, "Release the right to use the message."},
    {"move", (PyCFunction)(void (*)(void))message_move, METH_FASTCALL,
     "Make the message, and poll MPI until all of it has moved: move(array, code, instruction). Return True if all has moved; None, with\n"
     "nothing done, as begin() does; False or the persistent request of the elements that move apart if something is pending: False if\n"
     "there is no such request, or if the envelope of a receive is pending or not as expected."},
    {"begin", (PyCFunction)(void (*)(void))message_begin, METH_FASTCALL,
     "Start the message on an array of the program: begin(array, code, instruction, group). Return its request; None, with nothing\n"
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
