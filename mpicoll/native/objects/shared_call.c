/* The blocking call of a SharedOperation. From the lock of the group to the result the interpreter lock is held; a call in several
   pieces releases it while they move. */

#include "objects.h"

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
            shared_read_result(self, segment->step, recv, progress->from);
            progress->from += self->width;
            if (progress->from >= self->block)
                return 1;
            progress->next = WRITE; /* fall through */
        case WRITE:
            progress->wanted = segment->step;
            if (self->send.arrays) {
                if (!segment_all_at(segment, segment->step, now_ns(), self->budget))
                    return 0;
                shared_write_data(self, segment->step + 1, send, recv, progress->from);
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

/* Wait in Python for members to reach a step, and check that the arrays are still those of the call; -1 and an exception if not. */
static int await(PyObject *const *args, Py_ssize_t count, SharedOperation *self, int64_t step, PyObject *root_only)
{
    PyObject *wanted = PyLong_FromLongLong(step);
    if (wanted == NULL)
        return -1;
    PyObject *waited = PyObject_CallFunctionObjArgs(known.await, args[GROUP], args[PREPARED], args[FRAME], wanted, root_only,
                                                    extra(args, count, LIMIT), extra(args, count, NAME), extra(args, count, WORDS), NULL);
    Py_DECREF(wanted);
    if (waited == NULL)
        return -1;
    Py_DECREF(waited);
    if (shared_fits(self, &self->send, args[SEND], READABLE) && shared_fits(self, &self->recv, args[RECV], WRITABLE))
        return 0;
    PyErr_SetString(PyExc_ValueError, SHARED_CHANGED);
    return -1;
}

/* Return a number of the addresses of the arrays of a call: that of other addresses is another one, in all likelihood. */
static int64_t places(const SharedOperation *self, PyObject *const *args)
{
    if (self->parts)
        return shared_parts_places(args[SEND], args[RECV]);
    const Transfer now = shared_transfer(self, args[SEND], args[RECV]);
    return shared_places(&now);
}

/* Return whether the arrays of a call are where the other members were told; else 0 and an exception. */
static int are_in_place(const SharedOperation *self, PyObject *const *args)
{
    if (places(self, args) == self->announced)
        return 1;
    PyErr_SetString(PyExc_ValueError, SHARED_CHANGED);
    return 0;
}

/* Copy the blocks of a call whose round is over, and whose members have announced them, or announce them now; the caller has copied lists.
   -1 and an exception: the others do not come, or an array has moved, as only ndarray.resize(refcheck=False) in a signal handler can
   let it. */
static int move_blocks(PyObject *const *args, Py_ssize_t count, SharedOperation *self)
{
    Transfer transfer = shared_transfer(self, args[SEND], args[RECV]);
    int over = 0, failed = 0;
    transfer.phase = self->copies_once;
    if (!self->copies_once)
        self->announced = places(self, args);
    while (!failed && !over) {
        failed = !are_in_place(self, args);
        if (failed)
            break;
        Py_BEGIN_ALLOW_THREADS
        over = transfer_advance(&transfer);
        Py_END_ALLOW_THREADS
        if (!over)
            failed = await(args, count, self, transfer.wanted, Py_False) < 0;
    }
    if (failed)
        single_copy_revoke(&transfer);
    return -failed;
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
        PyObject *root_only = progress.next == AWAIT && self->result == COPIED ? Py_True : Py_False;
        if (await(args, count, self, progress.wanted, root_only) < 0)
            return -1;
    }
}

/* Move the data of a call in several steps, or parts that stand apart; the round is over. */
static int move(PyObject *const *args, Py_ssize_t count, SharedOperation *self)
{
    return self->copies_once || self->parts ? move_blocks(args, count, self) : move_pieces(args, count, self);
}

/* Return whether the arguments are as many as run() takes, and the module was configured. */
static int are_arguments(PyObject *const *args, Py_ssize_t count, const char *what)
{
    if ((count == PLAIN || (count == EXTENDED && PyFrame_Check(args[FRAME]))) && known.finish != NULL && known.array != NULL)
        return 1;
    PyErr_SetString(PyExc_TypeError, what);
    return 0;
}

/* Whether the parts of an exchange have the lengths that the members have compared. */
static int are_as_posted(const SharedOperation *self, PyObject *const *args)
{
    const int64_t at = self->parts ? self->segment->segment.step : 0;
    return !self->parts || (shared_parts_are_same(self, at, args[SEND], 0) && shared_parts_are_same(self, at, args[RECV], 1));
}

PyObject *shared_run_rest(SharedOperation *self, PyObject *const *args, Py_ssize_t count)
{
    if (!are_arguments(args, count, "run_rest(group, prepared, send, recv, request)"))
        return NULL;
    if (!(is_in_steps(self) || (self->parts && self->place)) || !shared_fits(self, &self->send, args[SEND], READABLE) ||
        !shared_fits(self, &self->recv, args[RECV], WRITABLE) || !are_as_posted(self, args)) {
        PyErr_SetString(PyExc_ValueError, SHARED_CHANGED);
        return NULL;
    }
    Py_INCREF(self);
    const int failed = move(args, count, self);
    Py_DECREF(self);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

/* Make the call with the group's lock held. Return True or False, or NULL. From shared_fits() to shared_read_result() no object is
   allocated that the garbage collector counts, and none is released that may have a destructor. */
static PyObject *make(PyObject *const *args, Py_ssize_t count, SharedOperation *self, const int64_t words[RING_SAID], PyObject *site,
                      PyObject **old)
{
    PyObject *group = args[GROUP], *send = args[SEND], *recv = args[RECV], *done;
    CallOrder *order = self->order;
    Segment *segment = self->segment == NULL ? NULL : &self->segment->segment;
    Ring *ring = &self->ring->ring;
    const int64_t call = order->issued;
    if (order->closed || call != order->moving || PyList_GET_SIZE(known.pending) != 0 || PyDict_Size(known.claims) != 0 ||
        PySet_GET_SIZE(known.inside) != 0)
        Py_RETURN_FALSE;
    if (!shared_fits(self, &self->send, send, READABLE) || !shared_fits(self, &self->recv, recv, WRITABLE))
        Py_RETURN_FALSE;
    if (self->copies_once ? !shared_is_apart(self, send, recv) : !shared_parts_are_disjoint(self, send, recv))
        Py_RETURN_FALSE;
    if (segment != NULL && !segment_all_at(segment, segment->step, now_ns(), self->budget)) /* a member may still read */
        Py_RETURN_FALSE;
    if (note_thread(&self->thread) < 0)
        return NULL;
    *old = PyObject_GetAttr(group, known.last); /* perhaps the last reference to a function of the program */
    if (*old == NULL || PyObject_SetAttr(group, known.last, site) < 0)
        return NULL;
    const int64_t number = order->round + 1, at = segment == NULL ? number : segment->step + 1;
    if (self->copies_once) {
        const Transfer transfer = shared_transfer(self, send, recv);
        self->announced = shared_places(&transfer);
        single_copy_announce(&transfer, at);
    } else
        shared_write_data(self, at, send, recv, 0);
    const int64_t began = ring_write(ring, number, words);
    ring_post(ring, number); /* from here on the others may go on */
    order->issued = call + 1;
    order->round = number;
    order->calls++;
    if (!ring_is_over(ring, number, began, self->budget) || !shared_is_agreed(self, number)) {
        /* From here on Python runs signal handlers, whose calls are refused. */
        const int waits = PyThread_get_thread_ident() == known.main && PySet_GET_SIZE(known.inside) == 0;
        if (waits && PySet_Add(known.inside, known.main_number) < 0)
            PyErr_Clear();
        done = PyObject_Vectorcall(known.finish, args, (size_t)count, NULL);
        if (waits)
            PySet_Clear(known.inside);
        if (done == NULL)
            withdraw(args, count, call);
        return done;
    }
    if (segment != NULL)
        segment_advance(segment);
    order->posted = order->moving = call + 1;
    if (!is_in_steps(self))
        shared_read_result(self, at, recv, 0);
    if ((is_in_steps(self) || shared_largest_apart(self, at)) && move(args, count, self) < 0) {
        withdraw(args, count, call + 1);
        return NULL;
    }
    Py_RETURN_TRUE;
}

PyObject *shared_run(SharedOperation *self, PyObject *const *args, Py_ssize_t count)
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
        if (!ring_parse_words(args[WORDS], given))
            return NULL;
    }
    PyObject *made = NULL, *old = NULL;
    PyObject *site = describe(self->op, args[FRAME]);
    if (site == NULL || shared_take_lock(self, args[GROUP]) < 0) {
        Py_XDECREF(site);
        return NULL;
    }
    Py_INCREF(self); /* the group may drop its prepared calls meanwhile */
    made = make(args, count, self, words, site, &old);
    PyObject *type = NULL, *value = NULL, *traceback = NULL;
    if (made == NULL)
        PyErr_Fetch(&type, &value, &traceback);
    PyObject *done = PyObject_CallNoArgs(self->release);
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
