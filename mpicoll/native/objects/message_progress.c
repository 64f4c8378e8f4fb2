/* The end of messages that MessageFields.begin() has started, and messages that are waited for at once. */

#include "objects.h"

/* ---- the end of a message that is not waited for ---- */

enum { PENDING, MOVED, OTHERWISE }; /* what a test found; OTHERWISE: Python has to go on */

/* Test the request of the elements that move apart; NULL: the request of the message. Return 1 if it is complete, 0, or -1 and an exception. */
static int test_mpi(const Message *self, PyObject *payload)
{
    if (payload != NULL)
        return call_mpi(payload, known.test_mpi);
    PyObject *done = PyObject_CallNoArgs(self->objects[MESSAGE_test]);
    Py_XDECREF(done); /* True stays */
    return done == NULL ? -1 : done == Py_True;
}

/* Return whether a message can still move the array of its request, and as it was when the message began: where it stands or not. */
static int fits_as_begun(const Message *self, const Request *request)
{
    const int field = message_receives(self) ? REQUEST_recv : REQUEST_send;
    PyObject *array = request->objects[REQUEST_arrays];
    return message_fits(self, array) && (!message_is_apart(self) || is_none(request->objects[field]) == is_contiguous(array));
}

/* Request the elements that move apart of a message whose envelope has been received. Return 1; 0, and nothing was done, if the message is
   not as expected, or the program has written the array, or Python has to make the request; or -1 and an exception. */
static int receive_elements(Message *self, Request *request)
{
    PyObject *array = request->objects[REQUEST_arrays];
    if (*(int64_t *)memory(self->objects[MESSAGE_buffer]) != self->expected || !fits_as_begun(self, request) ||
        (!is_none(request->objects[REQUEST_claim]) && message_is_changed(self, array, request->objects[REQUEST_before])))
        return 0;
    PyObject *payload = message_payload(self, array);
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
    if (!message_receives(self) || is_none(objects[REQUEST__current])) {
        const int done = test_mpi(self, NULL);
        if (done != 1)
            return done;
        if (!message_is_apart(self))
            return MOVED;
        const int requested = message_receives(self) ? receive_elements(self, request) : 1;
        if (requested != 1)
            return requested < 0 ? -1 : OTHERWISE;
    }
    return test_mpi(self, objects[REQUEST__current]);
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
   hold the contents of the array once they have arrived there, as the program may not write the array before it has waited. Return 1; 0 if
   Python has to go on; or -1 and an exception. */
static int advance_receive(Message *self, Request *request)
{
    PyObject *array = request->objects[REQUEST_arrays];
    const int held = hold(request);
    if (held != 1)
        return held < 0 ? -1 : 1;
    int found = message_test(self, request);
    if (found == MOVED && !is_none(request->objects[REQUEST_claim])) {
        found = fits_as_begun(self, request) ? MOVED : OTHERWISE;
        if (found == MOVED)
            message_unpack(self, array, !is_contiguous(array));
        if (found == MOVED && !request_give(request, REQUEST_after, message_contents(self, array)))
            found = -1;
    }
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
        if (!message_is_apart(self) || (!is_none(request->objects[REQUEST__current]) &&
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
    const int held = message_is_apart(self) ? hold(request) : (request->advancing = 1);
    if (held != 1)
        return held < 0 ? -1 : OTHERWISE;
    for (int64_t left = self->spins; (found = message_test(self, request)) == PENDING && left > 0; left--) {
        alone = message_is_apart(self) ? advance_others(request) : 1;
        if (alone != 1)
            break;
        if (poll_yields)
            sched_yield();
    }
    if (message_is_apart(self))
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
    const int receiving = message_receives(self);
    if (self->objects[MESSAGE_current] != (PyObject *)request)
        return 0;
    const int found = message_poll(self, request);
    if (found != MOVED)
        return found < 0 ? -1 : 0;
    const int compares = !is_none(request->objects[REQUEST_claim]);
    /* Another thread may have asked for a future meanwhile. A request of MPI that is complete is complete in Python's test, too. */
    const int may = request_may_finish(request, known.moving);
    if (may != 1 || !fits_as_begun(self, request))
        return may < 0 ? -1 : 0;
    if (receiving) {
        if (message_is_apart(self) && !is_none(request->objects[REQUEST_after]) &&
            message_is_changed(self, array, request->objects[REQUEST_after]))
            return 0;
        if (!message_is_apart(self) && (*(int64_t *)memory(self->objects[MESSAGE_buffer]) != self->expected ||
                                (compares && message_is_changed(self, array, request->objects[REQUEST_before]))))
            return 0;
        PyObject *peer = PyLong_FromLongLong(self->peer);
        if (peer == NULL || drop_item(self->objects[MESSAGE_posted], self->objects[MESSAGE_key]) < 0) {
            Py_XDECREF(peer);
            return -1;
        }
        request_give(request, REQUEST_returned, peer);
        if (is_none(request->objects[REQUEST_after]))
            message_unpack(self, array, !is_contiguous(array));
        self->begun++;
    } else {
        if (compares && (message_is_apart(self) ? message_is_changed(self, array, request->objects[REQUEST_after])
                                                : !message_is_as_packed(self, array)))
            return 0;
        self->taken = 0;
    }
    Py_XSETREF(self->objects[MESSAGE_current], Py_NewRef(Py_None));
    return 1;
}

/* ---- a message that is waited for at once ---- */

/* Test a request as test_mpi() does, for some polls; fewer if a pending request has to progress in Python. */
static int poll_mpi(const Message *self, PyObject *payload)
{
    int done;
    for (int64_t left = self->spins; (done = test_mpi(self, payload)) == 0 && left > 0; left--) {
        const int alone = message_is_apart(self) ? advance_others(NULL) : 1;
        if (alone != 1)
            return alone;
        if (poll_yields)
            sched_yield();
    }
    return done;
}

/* Post a message whose lock this thread has. Return 1, with the request of elements that move apart in `payload`, and whether they move
   through `packed` memory; 0, and nothing was done,
   if that is impossible now; or -1 and an exception. */
static int move_post(Message *self, PyObject *const *args, int64_t instruction, PyObject **payload, int *packed)
{
    const int receiving = message_receives(self), free = message_is_free(self, args, instruction);
    if (free != 1 || !message_fits(self, args[MESSAGE_ARRAY]))
        return free < 0 ? -1 : 0;
    const Use use = message_use(self, args[MESSAGE_ARRAY]);
    const int apart = self->compares ? claims_are_apart(&use) : 1;
    if (apart != 1)
        return apart;
    if (receiving)
        message_note_site(self, args);
    if (message_is_apart(self)) {
        const int contiguous = is_contiguous(args[MESSAGE_ARRAY]);
        *payload = message_payload(self, args[MESSAGE_ARRAY]);
        if (*payload == NULL && !PyErr_Occurred()) {
            self->taken = !receiving; /* no other call may drop a request meanwhile, as Python runs; a receive has the lock for this */
            PyObject *moved = contiguous ? args[MESSAGE_ARRAY] : self->objects[MESSAGE_packed];
            *payload = PyObject_CallMethodOneArg((PyObject *)self, known.payload_of, moved);
            self->taken = 0;
        }
        if (*payload == NULL || *payload == Py_None)
            return *payload == NULL ? -1 : 0;
        /* Code of the program may have run. */
        if (!message_fits(self, args[MESSAGE_ARRAY]) || is_contiguous(args[MESSAGE_ARRAY]) != contiguous)
            return 0;
        *packed = !contiguous;
    }
    if (note_thread(&self->thread) < 0 || (receiving && PyList_Append(self->objects[MESSAGE_posted], self->objects[MESSAGE_key]) < 0))
        return -1;
    return message_post(self, args, receiving ? NULL : *payload) < 0 ? -1 : 1;
}

static PyObject *complete_send(Message *self, PyObject *payload)
{
    int done = poll_mpi(self, NULL);
    if (done == 1 && payload != NULL)
        done = poll_mpi(self, payload);
    if (done < 0)
        return NULL;
    if (done == 0)
        return Py_NewRef(payload == NULL ? Py_False : payload);
    self->taken = 0;
    return Py_NewRef(Py_True);
}

static PyObject *complete_receive(Message *self, PyObject *array, PyObject *payload, int packed)
{
    int done = poll_mpi(self, NULL);
    if (done != 1 || *(int64_t *)memory(self->objects[MESSAGE_buffer]) != self->expected || !message_fits(self, array))
        return done < 0 ? NULL : Py_NewRef(Py_False);
    if (payload != NULL) {
        done = call_mpi(payload, known.start_mpi) < 0 ? -1 : poll_mpi(self, payload);
        if (done != 1)
            return done < 0 ? NULL : Py_NewRef(payload);
    }
    if (!message_fits(self, array)) /* another thread may have changed it */
        return Py_NewRef(payload == NULL ? Py_False : payload);
    message_unpack(self, array, packed);
    self->begun++;
    return drop_item(self->objects[MESSAGE_posted], self->objects[MESSAGE_key]) < 0 ? NULL : Py_NewRef(Py_True);
}

PyObject *message_move(Message *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != MESSAGE_GROUP) {
        PyErr_SetString(PyExc_TypeError, "move(array, code, instruction)");
        return NULL;
    }
    const int receiving = message_receives(self), locks = receiving || message_is_apart(self);
    const int64_t instruction = PyLong_AsLongLong(args[MESSAGE_INSTRUCTION]);
    if (instruction == -1 && PyErr_Occurred())
        return NULL;
    PyObject *payload = NULL;
    int packed = 0, posted = known.request == NULL ? 0 : locks ? message_lock(self) : 1;
    if (posted == 1) {
        posted = move_post(self, args, instruction, &payload, &packed);
        if (locks)
            message_unlock(self);
    }
    PyObject *moved = posted < 0    ? NULL
                      : posted == 0 ? Py_NewRef(Py_None)
                      : receiving   ? complete_receive(self, args[MESSAGE_ARRAY], payload, packed)
                                    : complete_send(self, payload);
    Py_XDECREF(payload);
    return moved;
}
