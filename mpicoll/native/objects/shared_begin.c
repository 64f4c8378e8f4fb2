/* The start and the end of an asynchronous call of a SharedOperation, whose request has the fields of RequestFields. */

#include "objects.h"

/* Post a call in one piece, which all earlier calls allow, and count it. Return the number of its round. Nothing can fail. */
static int64_t post(SharedOperation *self, PyObject *send, PyObject *recv, const int64_t words[RING_SAID])
{
    CallOrder *order = self->order;
    const int64_t number = order->round + 1;
    shared_write_data(self, self->segment == NULL ? number : self->segment->segment.step + 1, send, recv, 0);
    ring_write(&self->ring->ring, number, words);
    ring_post(&self->ring->ring, number); /* from here on the others may go on */
    order->round = number;
    order->calls++;
    order->posted = ++order->issued;
    return number;
}

PyObject *shared_start(SharedOperation *self, PyObject *send)
{
    CallOrder *order = self->order;
    if (self->segment != NULL || self->parts || order->posted != order->issued)
        return PyLong_FromLong(-1);
    if (!shared_fits(self, &self->send, send, READABLE)) {
        PyErr_SetString(PyExc_ValueError, "the arrays are not those that the call was prepared for");
        return NULL;
    }
    return PyLong_FromLongLong(post(self, send, NULL, self->words));
}

PyObject *shared_state(SharedOperation *self, PyObject *args)
{
    long long call, number, budget;
    if (!PyArg_ParseTuple(args, "LLL", &call, &number, &budget))
        return NULL;
    const Ring *ring = &self->ring->ring;
    if (self->order->moving != call || !ring_is_over(ring, number, now_ns(), budget))
        return PyLong_FromLong(0);
    return PyLong_FromLong(shared_is_agreed(self, number) ? 1 : 2);
}

/* Read the result of a posted call in one piece; poll for the other members for so long. The results are those of complete(). */
static int complete(SharedOperation *self, int64_t call, int64_t number, PyObject *recv, PyObject *before, int64_t budget)
{
    CallOrder *order = self->order;
    const Ring *ring = &self->ring->ring;
    if (order->moving != call || !ring_is_over(ring, number, budget < 0 ? 0 : now_ns(), budget))
        return 0;
    if (!shared_is_agreed(self, number))
        return 2;
    const int64_t at = self->segment == NULL ? number : self->segment->segment.step + 1;
    if (shared_largest_apart(self, at))
        return 0; /* Python moves the data in steps */
    if (is_in_steps(self) || !shared_fits(self, &self->recv, recv, WRITABLE) || !shared_parts_are_same(self, at, recv, 1))
        return 4;
    if (self->recv.arrays && (!self->parts || self->result == EXCHANGED) && shared_is_changed(self, &self->recv, recv, before))
        return 3;
    if (self->segment != NULL)
        segment_advance(&self->segment->segment);
    shared_read_result(self, self->segment == NULL ? number : self->segment->segment.step, recv, 0);
    order->moving = call + 1;
    return 1;
}

PyObject *shared_complete(SharedOperation *self, PyObject *const *args, Py_ssize_t count)
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

/* The arguments of begin(), the first of which are those of run(). The name and the words with it are None without a name. */
enum { CODE = FRAME, INSTRUCTION, BEGIN_LIMIT, OUTPUTS, PLACES, BEGIN_NAME, BEGIN_WORDS, CLAIM, BEGIN };

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

/* Return a request of the call, with all that is known before its round is posted; it may be that the call is not started. */
static Request *new_request(SharedOperation *self, PyObject *const *args)
{
    Request *request = (Request *)request_new((PyTypeObject *)known.request, NULL, NULL);
    if (request == NULL)
        return NULL;
    request->limit = PyFloat_AsDouble(args[BEGIN_LIMIT]);
    if (!PyErr_Occurred())
        request->instruction = PyLong_AsLongLong(args[INSTRUCTION]);
    request_set(request, REQUEST_group, args[GROUP]);
    request_set(request, REQUEST_prepared, args[PREPARED]);
    request_set(request, REQUEST_schedule, self->segment == NULL ? known.at_once : known.eager);
    request_set(request, REQUEST_words, args[BEGIN_WORDS] == Py_None ? self->given_words : args[BEGIN_WORDS]);
    request_set(request, REQUEST_name, args[BEGIN_NAME]);
    request_set(request, REQUEST_state, known.posted);
    request_set(request, REQUEST_send, args[SEND]);
    request_set(request, REQUEST_recv, args[RECV]);
    request_set(request, REQUEST_arrays, args[RECV]);
    request_set(request, REQUEST_code, args[CODE]);
    /* A signal handler of the program may raise in what is called here. */
    if (PyErr_Occurred() || !request_give(request, REQUEST__lock, PyObject_CallNoArgs(known.lock)) ||
        !request_give(request, REQUEST_outputs, listed(args[OUTPUTS])) || !request_give(request, REQUEST_returned, PyLong_FromLong(-1)) ||
        (args[CLAIM] != Py_None &&
         !request_claim(request, args[CLAIM] == Py_True ? claim_of(args[RECV], 1) : Py_NewRef(args[CLAIM])))) {
        request_discard(request);
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

/* Return where all the memory of the call begins, and the bytes up to its end; NULL and 0 without memory. */
static const char *span(const SharedOperation *self, PyObject *const *args, Py_ssize_t *bytes)
{
    Py_ssize_t sent = 0, received = 0;
    const char *from = self->send.arrays ? shared_span(self, &self->send, args[SEND], &sent) : NULL;
    const char *to = self->recv.arrays ? shared_span(self, &self->recv, args[RECV], &received) : NULL;
    const char *start = from == NULL || (to != NULL && to < from) ? to : from;
    const char *end = from == NULL || (to != NULL && to + received > from + sent) ? to + received : from + sent;
    *bytes = end - start;
    return start;
}

/* Return whether the memory is certainly apart from that of all pending calls; -1 and an exception without memory. */
static int is_apart(const SharedOperation *self, PyObject *const *args)
{
    Py_ssize_t bytes;
    const char *start = span(self, args, &bytes);
    return start == NULL ? 1 : claims_are_apart(&(Use){start, bytes, NULL, 1});
}

/* Whether the input and the output are such as the call was prepared for. */
static int fits(const SharedOperation *self, PyObject *const pair[2])
{
    return shared_fits(self, &self->send, pair[0], READABLE) && shared_fits(self, &self->recv, pair[1], WRITABLE) &&
           shared_parts_are_disjoint(self, pair[0], pair[1]);
}

PyObject *shared_accepts(SharedOperation *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2 || known.array == NULL) {
        PyErr_SetString(PyExc_TypeError, "accepts(send, recv)");
        return NULL;
    }
    return PyBool_FromLong(fits(self, args));
}

/* Post the call with the group's lock held. Return 1, 0 if that is impossible, or -1 and an exception. Nothing is allocated here that the
   garbage collector counts, so no code of the program runs. */
static int begin(SharedOperation *self, PyObject *const *args, const int64_t words[RING_SAID], Request *request, PyObject *site,
                 PyObject **old)
{
    const CallOrder *order = self->order;
    PyObject *claim = request->objects[REQUEST_claim];
    const int64_t number = order->round + 1;
    if (order->closed || order->posted != order->issued || !fits(self, args + SEND))
        return 0;
    const Segment *segment = self->segment == NULL ? NULL : &self->segment->segment;
    if (segment != NULL && (order->moving != order->issued || !segment_all_at(segment, segment->step, now_ns(), self->budget)))
        return 0; /* earlier data is still to move, or a member may still read */
    const int apart = is_none(claim) ? 1 : is_apart(self, args);
    if (apart != 1)
        return apart;
    const int full = is_busy(PyList_GET_ITEM(args[PLACES], (number - RING_AHEAD) & (RING_PLACES - 1)));
    if (full)
        return full < 0 ? -1 : 0;
    const int seals = !is_none(claim) && self->recv.arrays != 0;
    PyObject *before = seals ? shared_contents(self, &self->recv, args[RECV]) : PyBytes_FromStringAndSize(NULL, 0);
    if (!request_give(request, REQUEST_before, before))
        return -1;
    PyObject *place = PyList_GET_ITEM(args[PLACES], number & (RING_PLACES - 1)), *at = PyLong_FromLongLong(number);
    *old = PyObject_GetAttr(args[GROUP], known.last);
    int failed = at == NULL || *old == NULL || PyObject_SetAttr(place, known.number, at) < 0 || note_thread(&self->thread) < 0 ||
                 PyObject_SetAttr(args[GROUP], known.last, site) < 0;
    Py_XDECREF(at);
    if (failed || PyList_Append(known.pending, (PyObject *)request) < 0)
        return -1;
    Py_ssize_t bytes;
    const char *start = span(self, args, &bytes);
    if (request_add_claim(request, start, bytes) < 0 || PyObject_SetAttr(place, known.busy, Py_True) < 0) {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        const Py_ssize_t last = PyList_GET_SIZE(known.pending);
        failed = PyList_SetSlice(known.pending, last - 1, last, NULL) < 0;
        failed |= !is_none(claim) && claims_remove(claim) < 0;
        PyErr_Clear();
        PyErr_Restore(type, value, traceback);
        return -1;
    }
    request->number = order->issued;
    request->posted_round = post(self, args[SEND], args[RECV], words);
    request->seq = order->calls;
    request->shared = (SharedOperation *)Py_NewRef((PyObject *)self);
    request_set(request, REQUEST_round, place);
    return 1;
}

PyObject *shared_begin(SharedOperation *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != BEGIN || !PyList_CheckExact(args[PLACES]) || PyList_GET_SIZE(args[PLACES]) != RING_PLACES ||
        known.array == NULL) {
        PyErr_SetString(PyExc_TypeError, "begin(group, prepared, send, recv, code, instruction, limit, outputs, places, name, words, claim)");
        return NULL;
    }
    if (known.request == NULL || is_in_steps(self) || (self->parts && self->result != EXCHANGED) ||
        PyList_GET_SIZE(known.observers) != 0 || !fits(self, args + SEND))
        Py_RETURN_NONE;
    int64_t given[RING_SAID], *words = self->words;
    if (args[BEGIN_WORDS] != Py_None && !ring_parse_words(args[BEGIN_WORDS], words = given))
        return NULL;
    const int apart = args[CLAIM] == Py_None ? 1 : is_apart(self, args);
    if (apart != 1)
        return apart < 0 ? NULL : Py_NewRef(Py_None);
    PyObject *site = PyTuple_Pack(3, self->op, args[CODE], args[INSTRUCTION]), *old = NULL;
    Request *request = site == NULL ? NULL : new_request(self, args);
    if (request == NULL || shared_take_lock(self, args[GROUP]) < 0) {
        if (request != NULL)
            request_discard(request);
        Py_XDECREF(site);
        return NULL;
    }
    const int made = begin(self, args, words, request, site, &old);
    PyObject *type = NULL, *value = NULL, *traceback = NULL;
    if (made < 0)
        PyErr_Fetch(&type, &value, &traceback);
    PyObject *done = PyObject_CallNoArgs(self->release);
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
        request_discard(request);
        return failed ? NULL : Py_NewRef(Py_None);
    }
    return (PyObject *)request;
}

/* Return whether the program has written an array that a call only reads; -1 and an exception without memory. */
static int is_written(PyObject *claim)
{
    PyObject *reads = is_none(claim) ? NULL : PyObject_GetAttr(claim, known.reads);
    if (reads != Py_True) {
        Py_XDECREF(reads);
        return is_none(claim) || reads != NULL ? 0 : -1;
    }
    Py_DECREF(reads);
    PyObject *verdict = PyObject_CallMethodNoArgs(claim, known.verdict);
    Py_XDECREF(verdict);
    return verdict == NULL ? -1 : verdict != Py_None;
}

PyObject *request_finish(Request *self, PyObject *Py_UNUSED(nothing))
{
    const int written = self->shared == NULL ? 0 : is_written(self->objects[REQUEST_claim]); /* runs code of Python */
    if (written != 0)
        return written < 0 ? NULL : Py_NewRef(Py_False);
    SharedOperation *shared = self->shared;
    PyObject *const *objects = self->objects;
    const int message = shared == NULL && is_message(objects[REQUEST_held]);
    const int may = shared == NULL && !message ? 0 : request_may_finish(self, message ? known.moving : known.posted);
    if (may != 1)
        return may < 0 ? NULL : Py_NewRef(Py_False);
    int done, failed = 0;
    if (message)
        done = message_finish(self);
    else {
        if (note_thread(&shared->thread) < 0)
            return NULL;
        done = !shared->order->closed && complete(shared, self->number, self->posted_round, objects[REQUEST_recv],
                                                  objects[REQUEST_before], shared->budget) == 1;
    }
    if (done <= 0)
        return done < 0 ? NULL : Py_NewRef(Py_False);
    request_set(self, REQUEST_state, known.complete);
    if (!message) {
        failed = PyObject_SetAttr(objects[REQUEST_round], known.busy, Py_False) < 0;
        request_set(self, REQUEST_round, NULL);
        self->shared = NULL;
        Py_DECREF(shared);
    }
    failed |= request_release(self) < 0;
    return failed ? NULL : Py_NewRef(Py_True);
}
