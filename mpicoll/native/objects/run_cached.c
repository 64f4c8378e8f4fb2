/* run_cached(): the first function that a collective call of the program reaches; and how the frame of the program is found. */

#include "objects.h"

/* The arguments of run_cached(); the last two may be missing. */
enum { OP, OF_GROUP, CACHED, PREPARE, ARGUMENTS, ASYNC_OP, TIMEOUT, OF_NAME, STREAM, LEAST, ALIAS = LEAST, DEPTH, MOST };
enum { KEY, INPUT, OUTPUT, OUTPUTS, FIELDS }; /* of the argument CACHED */

/* A copy of a list: a finalizer that empties a list of the program during the call must not change the call. */
static PyObject *held(PyObject *arrays)
{
    return PyList_CheckExact(arrays) ? PyList_GetSlice(arrays, 0, PyList_GET_SIZE(arrays)) : Py_NewRef(arrays);
}

/* Return the prepared operation of a signature, or NULL: none, no group, or not a member; or with an exception of a signal handler. The
   attribute of a group is a slot: only an object that is no group raises when it is looked at, which the general way reports. */
static PyObject *find_prepared(PyObject *group, PyObject *key)
{
    PyObject *all = PyObject_GetAttr(group, known.prepared), *found = NULL;
    if (all == NULL) {
        if (PyErr_ExceptionMatches(PyExc_Exception))
            PyErr_Clear();
        return NULL;
    }
    if (PyDict_CheckExact(all))
        found = Py_XNewRef(PyDict_GetItemWithError(all, key));
    Py_DECREF(all);
    if (PyErr_ExceptionMatches(PyExc_TypeError)) /* the signature has no hash */
        PyErr_Clear();
    return found;
}

/* Make the call of a prepared operation in shared memory. Return True; False, and nothing was done; or NULL and an exception. */
static PyObject *try_run(PyObject *group, PyObject *prepared, PyObject *const *fields, PyObject *depth)
{
    PyObject *frame = NULL, *send = NULL, *recv = NULL, *made = NULL;
    PyObject *shared = PyObject_GetAttr(prepared, known.shared);
    if (shared == NULL)
        return NULL;
    if (!Py_IS_TYPE(shared, &SharedOperationType))
        made = Py_NewRef(Py_False);
    else if ((frame = PyObject_CallOneArg(known.frame, depth)) == NULL) {
        if (PyErr_ExceptionMatches(PyExc_ValueError)) { /* C has called: the general way finds the place */
            PyErr_Clear();
            made = Py_NewRef(Py_False);
        }
    } else if ((send = held(fields[INPUT])) != NULL &&
               (recv = fields[OUTPUT] == fields[INPUT] ? Py_NewRef(send) : held(fields[OUTPUT])) != NULL)
        made = shared_run((SharedOperation *)shared, (PyObject *[]){group, prepared, send, recv, frame}, PLAIN);
    Py_XDECREF(recv);
    Py_XDECREF(send);
    Py_XDECREF(frame);
    Py_DECREF(shared);
    return made;
}

PyObject *run_cached(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (known.run_cached == NULL || count < LEAST || count > MOST || !PyTuple_Check(args[CACHED]) ||
        PyTuple_GET_SIZE(args[CACHED]) != FIELDS) {
        PyErr_SetString(PyExc_TypeError, "run_cached: other arguments than those of the function in Python");
        return NULL;
    }
    PyObject *const *fields = &PyTuple_GET_ITEM(args[CACHED], 0);
    if (fields[KEY] != Py_None && args[ASYNC_OP] == Py_False && args[TIMEOUT] == Py_None && args[OF_NAME] == Py_None) {
        PyObject *group = args[OF_GROUP] == Py_None ? PyObject_GetAttr(known.default_group, known.world) : Py_NewRef(args[OF_GROUP]);
        if (group == NULL)
            return NULL;
        PyObject *prepared = find_prepared(group, fields[KEY]), *made = NULL;
        if (prepared != NULL)
            made = try_run(group, prepared, fields, count > DEPTH ? args[DEPTH] : known.one);
        Py_XDECREF(prepared);
        Py_DECREF(group);
        if (PyErr_Occurred())
            return NULL;
        Py_XDECREF(made); /* True and False stay */
        if (made == Py_True)
            Py_RETURN_NONE;
    }
    return PyObject_Vectorcall(known.run_cached, args, (size_t)count, NULL);
}

/* Return the innermost frame whose code is not in one of the files to pass; None if there is no such frame, or `files` does not name its
   file. */
PyObject *find_frame_outside(PyObject *Py_UNUSED(module), PyObject *files)
{
    if (!PyDict_CheckExact(files)) {
        PyErr_SetString(PyExc_TypeError, "find_frame_outside(files): a dictionary of the names of files");
        return NULL;
    }
    PyFrameObject *frame = PyThreadState_GetFrame(PyThreadState_Get());
    while (frame != NULL) {
        PyCodeObject *code = PyFrame_GetCode(frame);
        PyObject *passed = PyDict_GetItemWithError(files, code->co_filename);
        Py_DECREF(code);
        if (passed != NULL && passed != Py_True)
            return (PyObject *)frame;
        PyFrameObject *caller = passed == NULL ? NULL : PyFrame_GetBack(frame);
        Py_DECREF(frame);
        frame = caller;
    }
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}
