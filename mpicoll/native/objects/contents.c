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
    for (Py_ssize_t i = 0; i < END_BYTES; i += 64)
        __builtin_prefetch(data + bytes - END_BYTES + i);
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

/* Return the bytes of an array of NumPy in one piece of memory; -1 for other objects, and for fields, as bytes between them may be of
   others. An array is read without its buffer, which NumPy describes anew each time, unless it has one element, whose size is unknown. */
static Py_ssize_t bytes_of(PyObject *given)
{
    const Array *array = (Array *)given;
    if (!PyObject_TypeCheck(given, known.array) || !(array->flags & C_CONTIGUOUS) || ((Descr *)array->descr)->kind == 'V')
        return -1;
    for (int i = 0; i < array->nd; i++)
        if (array->dimensions[i] == 0)
            return 0;
    for (int i = 0; i < array->nd; i++)
        if (array->dimensions[i] > 1)
            return array->dimensions[i] * array->strides[i];
    Py_buffer view;
    if (PyObject_GetBuffer(given, &view, PyBUF_SIMPLE) < 0) {
        PyErr_Clear();
        return -1;
    }
    PyBuffer_Release(&view);
    return view.len;
}

PyObject *contents(PyObject *Py_UNUSED(module), PyObject *arrays)
{
    const int is_list = PyList_CheckExact(arrays);
    const Py_ssize_t count = is_list ? PyList_GET_SIZE(arrays) : 1;
    PyObject **each = is_list ? ((PyListObject *)arrays)->ob_item : &arrays;
    Py_ssize_t total = 0, size = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        const Py_ssize_t bytes = bytes_of(each[i]);
        if (bytes < 0)
            Py_RETURN_NONE;
        total += bytes;
    }
    const int sampled = total > SNAPSHOT_BYTES;
    for (Py_ssize_t i = 0; i < count; i++)
        size += contents_size(bytes_of(each[i]), sampled);
    PyObject *found = PyBytes_FromStringAndSize(NULL, size);
    char *to = found == NULL ? NULL : PyBytes_AS_STRING(found);
    for (Py_ssize_t i = 0; to != NULL && i < count; i++) {
        const Py_ssize_t bytes = bytes_of(each[i]);
        contents_copy(to, memory(each[i]), bytes, sampled);
        to += contents_size(bytes, sampled);
    }
    return found;
}
