/* The extension module mpicoll._native: shared memory of the members of a group on one node, for Python.

   Ring (ring.c) and Segment (segment.c) are the memory. A SharedTransfer moves larger data through a segment. A
   SharedOperation is a collective call prepared for its arrays: run() makes the whole call with the interpreter lock held, from the
   lock of the group to the result. A call that has to wait longer than a moment, or whose members differ, is continued in Python
   (operations/dispatch.py) from where it stands. begin() starts a small asynchronous call; its request has the fields of
   RequestFields, whose finish() completes the call.

   Between the first word that run() writes and the last element that it reads nothing can fail, and nothing of the program
   runs. Larger movements release the interpreter lock. */

#include "objects/objects.h"

#ifndef VERSION
#define VERSION "unknown" /* setup.py gives the sum of the sources, which mpicoll/runtime/native.py compares */
#endif

Known known;

/* ---- configuration ---- */

static PyObject *configure(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *finish, *withdraw, *await, *pending, *claims, *threads, *inside;
    if (!PyArg_ParseTuple(args, "OOOO!O!O!O!", &finish, &withdraw, &await, &PyList_Type, &pending, &PyDict_Type, &claims, &PySet_Type,
                          &threads, &PySet_Type, &inside))
        return NULL;
    Known next = known;
    next.finish = Py_NewRef(finish);
    next.withdraw = Py_NewRef(withdraw);
    next.await = Py_NewRef(await);
    next.pending = Py_NewRef(pending);
    next.claims = Py_NewRef(claims);
    next.threads = Py_NewRef(threads);
    next.inside = Py_NewRef(inside);
    known = next; /* the references of an earlier configuration are few, and stay */
    Py_RETURN_NONE;
}

/* Know what the start and the end of an asynchronous call use; without an argument forget that, as in a forked child. */
static PyObject *configure_requests(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *request = NULL, *lock, *claim, *reusable, *dropped, *observers, *posted, *complete, *at_once, *eager;
    if (PyTuple_GET_SIZE(args) == 0) {
        known.request = NULL; /* the references stay */
        Py_RETURN_NONE;
    }
    if (!PyArg_ParseTuple(args, "O!OO!O!OO!OOOO", &PyType_Type, &request, &lock, &PyType_Type, &claim, &PySet_Type, &reusable,
                          &dropped, &PyList_Type, &observers, &posted, &complete, &at_once, &eager))
        return NULL;
    if (!PyType_IsSubtype((PyTypeObject *)request, &RequestType)) {
        PyErr_SetString(PyExc_TypeError, "the requests have other fields");
        return NULL;
    }
    known.lock = Py_NewRef(lock);
    known.claim = Py_NewRef(claim);
    known.reusable = Py_NewRef(reusable);
    known.dropped = Py_NewRef(dropped);
    known.observers = Py_NewRef(observers);
    known.posted = Py_NewRef(posted);
    known.complete = Py_NewRef(complete);
    known.at_once = Py_NewRef(at_once);
    known.eager = Py_NewRef(eager);
    known.request = Py_NewRef(request);
    Py_RETURN_NONE;
}

/* Know what a call of the program uses. */
static PyObject *configure_calls(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *default_group, *frame, *general, *thread;
    if (!PyArg_ParseTuple(args, "OOOO!", &default_group, &frame, &general, &PyLong_Type, &thread))
        return NULL;
    known.main = PyLong_AsUnsignedLong(thread);
    if (PyErr_Occurred())
        return NULL;
    known.main_number = Py_NewRef(thread);
    known.default_group = Py_NewRef(default_group);
    known.frame = Py_NewRef(frame);
    known.run_cached = Py_NewRef(general);
    Py_RETURN_NONE;
}

/* Know what the start and the end of a message use. */
static PyObject *configure_messages(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *send, *receive, *moving;
    if (!PyArg_ParseTuple(args, "O!O!O", &PyType_Type, &send, &PyType_Type, &receive, &moving))
        return NULL;
    if (!PyType_IsSubtype((PyTypeObject *)send, &RequestType) || !PyType_IsSubtype((PyTypeObject *)receive, &RequestType)) {
        PyErr_SetString(PyExc_TypeError, "the requests have other fields");
        return NULL;
    }
    known.send = Py_NewRef(send);
    known.receive = Py_NewRef(receive);
    known.moving = Py_NewRef(moving);
    Py_RETURN_NONE;
}

/* Compare an array of float64 of the shape (2, 3) with its description in Python, and note the type of arrays. */
static PyObject *check_arrays(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *probe;
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "OK", &probe, &address))
        return NULL;
    const Array *array = (Array *)probe;
    int wrong = Py_TYPE(probe)->tp_basicsize < (Py_ssize_t)sizeof(Array) || array->data != (char *)(uintptr_t)address;
    wrong = wrong || array->nd != 2 || array->dimensions[0] != 2 || array->dimensions[1] != 3;
    wrong = wrong || (array->flags & WRITABLE) != WRITABLE || Py_TYPE(array->descr)->tp_basicsize < (Py_ssize_t)sizeof(Descr);
    const Descr *dtype = wrong ? NULL : (Descr *)array->descr;
    if (wrong || dtype->kind != 'f' || dtype->type != 'd' || dtype->byteorder != '=' || dtype->type_num != 12) {
        PyErr_SetString(PyExc_TypeError, "this NumPy's arrays are not laid out as those of NumPy 1 and 2");
        return NULL;
    }
    known.array = (PyTypeObject *)Py_NewRef((PyObject *)Py_TYPE(probe));
    Py_RETURN_NONE;
}

/* ---- functions of the module ---- */

static PyObject *reduce_rows(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *rows, *out;
    const char *name;
    Py_ssize_t size;
    Py_buffer from = {0}, to = {0};
    if (!PyArg_ParseTuple(args, "OnOs", &rows, &size, &out, &name))
        return NULL;
    const Reduction *reduction = find_reduction(name);
    if (PyObject_GetBuffer(rows, &from, PyBUF_SIMPLE) < 0)
        return NULL;
    if (PyObject_GetBuffer(out, &to, PyBUF_SIMPLE | PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&from);
        return NULL;
    }
    const ptrdiff_t bytes = reduction == NULL ? 0 : reduction_itemsize(reduction);
    const int wrong = reduction == NULL || size < 2 || from.len != size * to.len || to.len % bytes != 0;
    if (!wrong) {
        const char *one = from.buf;
        const Py_ssize_t parts = to.len / bytes * reduction->parts;
        reduction->reduce(to.buf, one, one + to.len, parts);
        for (Py_ssize_t rank = 2; rank < size; rank++)
            reduction->reduce(to.buf, to.buf, one + rank * to.len, parts);
    }
    PyBuffer_Release(&from);
    PyBuffer_Release(&to);
    if (wrong) {
        PyErr_SetString(PyExc_ValueError, "reduce_rows: no such reduction, or memory of another size");
        return NULL;
    }
    Py_RETURN_NONE;
}

/* Convert between words of a half type and float32: from the first to the second memory, by the sizes of their elements. */
static PyObject *convert_half(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *name;
    Py_buffer from, to;
    if (!PyArg_ParseTuple(args, "sy*w*", &name, &from, &to))
        return NULL;
    const HalfType *type = find_half_type(name);
    const int widens = to.len == 2 * from.len, wrong = !widens && from.len != 2 * to.len;
    if (type != NULL && !wrong) {
        if (widens)
            type->widen(to.buf, from.buf, from.len / (Py_ssize_t)sizeof(uint16_t));
        else
            type->narrow(to.buf, from.buf, to.len / (Py_ssize_t)sizeof(uint16_t));
    }
    PyBuffer_Release(&from);
    PyBuffer_Release(&to);
    if (wrong) {
        PyErr_SetString(PyExc_ValueError, "convert_half: one memory must be twice as large as the other");
        return NULL;
    }
    return PyBool_FromLong(type != NULL);
}

static PyObject *get_peer_word(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(nothing))
{
    const PeerWord word = peer_word();
    return Py_BuildValue("LLL", (long long)word.pid, (long long)word.address, (long long)word.value);
}

static PyObject *allows_copies(PyObject *Py_UNUSED(module), PyObject *args)
{
    long long pid, address, value;
    if (!PyArg_ParseTuple(args, "LLL", &pid, &address, &value))
        return NULL;
    return PyBool_FromLong(peer_allows_copies((PeerWord){pid, address, value}));
}

static PyObject *set_yields(PyObject *Py_UNUSED(module), PyObject *yields)
{
    const int whether = PyObject_IsTrue(yields);
    if (whether < 0)
        return NULL;
    poll_yields = whether;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"check_arrays", check_arrays, METH_VARARGS,
     "Check how NumPy lays out arrays: check_arrays(array, address of its data). TypeError: not as expected."},
    {"configure_requests", configure_requests, METH_VARARGS,
     "Know what the start and the end of an asynchronous call use: configure_requests(Request, RLock, RequestClaim, reusable and dropped claims,\n"
     "observers, POSTED, COMPLETE, AT_ONCE, EAGER). Without an argument such calls are made in Python from now on."},
    {"configure_messages", configure_messages, METH_VARARGS,
     "Know what the start and the end of a message use: configure_messages(type of a send, type of a receive, MOVING)."},
    {"configure", configure, METH_VARARGS, "Tell the module what it needs of the library."},
    {"configure_calls", configure_calls, METH_VARARGS,
     "Know what a call of the program uses: configure_calls(object whose `world` is the default group, sys._getframe, run_cached in\n"
     "Python, number of the main thread)."},
    {"run_cached", (PyCFunction)(void (*)(void))run_cached, METH_FASTCALL, "Make a call: as run_cached of operations/prepare/run.py."},
    {"contents", contents, METH_O,
     "Return the bytes of an array, or of each in a list, to find writes of the program; a sample of more than SNAPSHOT_BYTES.\n"
     "None if an array is not in one piece of memory, or has fields."},
    {"differ", (PyCFunction)(void (*)(void))differ, METH_FASTCALL,
     "Return whether arrays have other contents than before: differ(arrays, what contents() has returned). None as contents()."},
    {"set_places", set_places, METH_O,
     "Set how many places contents() samples: set_places(((bytes, most), ...)), one place for so many bytes, but at most so many. The\n"
     "rule that gives most places counts."},
    {"peer_word", get_peer_word, METH_NOARGS,
     "Return the number of this process, and the address and the value of a word in its memory that no other process has there."},
    {"allows_copies", allows_copies, METH_VARARGS,
     "Return whether this process can read and write the memory of another process: allows_copies(*what peer_word() has returned there)."},
    {"set_yields", set_yields, METH_O,
     "Set whether what polls for other members yields the core: True if ranks of this node share cores."},
    {"find_frame_outside", find_frame_outside, METH_O,
     "Return the innermost frame whose code is not in one of the files to pass: find_frame_outside({name of a file: whether to pass it}).\n"
     "None if there is no such frame, or if the dictionary does not name its file."},
    {"tensor_array", (PyCFunction)(void (*)(void))tensor_array, METH_FASTCALL,
     "Return an array of the memory of a tensor of torch: tensor_array(tensor, torch.Tensor, torch.strided, dtypes by those of torch).\n"
     "None for a tensor that Python has to look at."},
    {"reduce_rows", reduce_rows, METH_VARARGS,
     "Reduce rows in their order: reduce_rows(rows, number of rows, out, \"SUM f8\")."},
    {"convert_half", convert_half, METH_VARARGS,
     "Convert words of a half type to float32, or back, and return whether that was possible: convert_half(\"float16\", from, to)."},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "mpicoll._native",
    .m_doc = "Shared memory of the members of a group on one node.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void)
{
    const struct {
        const char *name;
        PyTypeObject *type;
    } types[] = {
        {"CallOrder", &OrderType}, {"Ring", &RingType}, {"Segment", &SegmentType}, {"SharedTransfer", &TransferType}, {"SharedOperation", &SharedOperationType}, {"RequestFields", &RequestType}, {"MessageFields", &MessageType}};
    const struct {
        const char *name;
        long value;
    } constants[] = {
        {"AHEAD", RING_AHEAD},           {"PLACES", RING_PLACES}, {"EAGER_BYTES", RING_EAGER_BYTES}, {"RING_BYTES", RING_BYTES},
        {"COMPARED", RING_COMPARED}, {"SAID", RING_SAID}, {"SEGMENT_LINE", SEGMENT_LINE}, {"BUFFERS", SEGMENT_BUFFERS}, {"SINGLE_COPY_ENTRY", SINGLE_COPY_ENTRY}, {"SNAPSHOT_BYTES", SNAPSHOT_BYTES}};
    known.last = PyUnicode_InternFromString("last");
    known.f_lasti = PyUnicode_InternFromString("f_lasti");
    known.broken = PyUnicode_InternFromString("broken");
    known.busy = PyUnicode_InternFromString("busy");
    known.number = PyUnicode_InternFromString("number");
    known.timeout = PyUnicode_InternFromString("timeout");
    known.reads = PyUnicode_InternFromString("reads");
    known.verdict = PyUnicode_InternFromString("verdict");
    known.of_claim = PyUnicode_InternFromString("request");
    known.found = PyUnicode_InternFromString("_found");
    known.start = PyUnicode_InternFromString("start");
    known.end = PyUnicode_InternFromString("end");
    known.start_mpi = PyUnicode_InternFromString("Start");
    known.test_mpi = PyUnicode_InternFromString("Test");
    known.payload_of = PyUnicode_InternFromString("payload_of");
    known.acquire = PyUnicode_InternFromString("acquire");
    known.release = PyUnicode_InternFromString("release");
    known.warn_of_threads = PyUnicode_InternFromString("warn_of_threads");
    known.of_array = PyUnicode_InternFromString("array");
    known.does_write = PyUnicode_InternFromString("_writes");
    known.writes = Py_BuildValue("(s)", "writes");
    known.nothing = PyTuple_New(0);
    known.prepared = PyUnicode_InternFromString("prepared");
    known.shared = PyUnicode_InternFromString("shared");
    known.world = PyUnicode_InternFromString("world");
    known.one = PyLong_FromLong(1);
    if (PyErr_Occurred() || tensors_ready() < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    int failed = module == NULL || PyModule_AddStringConstant(module, "VERSION", VERSION) < 0;
    for (size_t i = 0; !failed && i < sizeof types / sizeof *types; i++)
        failed = PyType_Ready(types[i].type) < 0 || PyModule_AddObjectRef(module, types[i].name, (PyObject *)types[i].type) < 0;
    for (size_t i = 0; !failed && i < sizeof constants / sizeof *constants; i++)
        failed = PyModule_AddIntConstant(module, constants[i].name, constants[i].value) < 0;
    if (failed) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
