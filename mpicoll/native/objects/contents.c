/* The contents of memory that pending calls use, to find writes of the program: all bytes, or a sample of large memory. */

#include "objects.h"

enum {
    END_BYTES = 128,  /* at both ends of a sample */
    PLACE_BYTES = 16, /* at each place in between */
    EACH_BYTES = 256 * 1024, /* one place for so many bytes, */
    LEAST_PLACES = 4, /* but at least and at most so many */
    MOST_PLACES = 256
};

static Py_ssize_t places_of(Py_ssize_t bytes)
{
    const Py_ssize_t places = bytes / EACH_BYTES;
    return places < LEAST_PLACES ? LEAST_PLACES : places > MOST_PLACES ? MOST_PLACES : places;
}

Py_ssize_t contents_size(Py_ssize_t bytes, int sampled)
{
    const Py_ssize_t size = 2 * END_BYTES + places_of(bytes) * PLACE_BYTES;
    return sampled && bytes > size ? size : bytes;
}

void contents_copy(char *to, const char *data, Py_ssize_t bytes, int sampled)
{
    if (contents_size(bytes, sampled) == bytes) {
        memcpy(to, data, (size_t)bytes);
        return;
    }
    const Py_ssize_t places = places_of(bytes), step = bytes / places / PLACE_BYTES * PLACE_BYTES;
    for (Py_ssize_t i = 0; i < places; i++) /* from main memory all at once, and not one after the other */
        __builtin_prefetch(data + i * step);
    memcpy(to, data, END_BYTES);
    memcpy(to + END_BYTES, data + bytes - END_BYTES, END_BYTES);
    to += 2 * END_BYTES;
    for (Py_ssize_t i = 0; i < places; i++)
        memcpy(to + i * PLACE_BYTES, data + i * step, PLACE_BYTES);
}

int contents_differ(const char *held, const char *data, Py_ssize_t bytes, int sampled)
{
    char sample[2 * END_BYTES + MOST_PLACES * PLACE_BYTES];
    const Py_ssize_t size = contents_size(bytes, sampled);
    if (size == bytes)
        return memcmp(held, data, (size_t)bytes) != 0;
    contents_copy(sample, data, bytes, sampled);
    return memcmp(held, sample, (size_t)size) != 0;
}

/* Return the bytes of an array of NumPy or of each in a list, in one bytes object; None if one is not in one piece of memory. */
PyObject *contents(PyObject *Py_UNUSED(module), PyObject *arrays)
{
    const int is_list = PyList_CheckExact(arrays);
    const Py_ssize_t count = is_list ? PyList_GET_SIZE(arrays) : 1;
    Py_buffer *views = PyMem_Calloc((size_t)count + 1, sizeof *views);
    PyObject *found = NULL;
    Py_ssize_t taken = 0, total = 0, size = 0;
    if (views == NULL)
        return PyErr_NoMemory();
    for (; taken < count; taken++) {
        if (PyObject_GetBuffer(is_list ? PyList_GET_ITEM(arrays, taken) : arrays, &views[taken], PyBUF_SIMPLE) < 0)
            break;
        total += views[taken].len;
    }
    if (taken < count) {
        if (PyErr_ExceptionMatches(PyExc_BufferError) || PyErr_ExceptionMatches(PyExc_ValueError)) {
            PyErr_Clear();
            found = Py_NewRef(Py_None);
        }
    } else {
        const int sampled = total > SNAPSHOT_BYTES;
        for (Py_ssize_t i = 0; i < count; i++)
            size += contents_size(views[i].len, sampled);
        found = PyBytes_FromStringAndSize(NULL, size);
        char *to = found == NULL ? NULL : PyBytes_AS_STRING(found);
        for (Py_ssize_t i = 0; to != NULL && i < count; i++) {
            contents_copy(to, views[i].buf, views[i].len, sampled);
            to += contents_size(views[i].len, sampled);
        }
    }
    for (Py_ssize_t i = 0; i < taken; i++)
        PyBuffer_Release(&views[i]);
    PyMem_Free(views);
    return found;
}
