/* The claims of memory of pending calls, which checks/memory_in_use.py makes and holds. No code of Python runs here. */

#include "objects.h"

enum { CLAIMS_COMPARED = 32 }; /* with more of them Python finds those that are near in less time */

/* Read an address of a claim; return -1 and an exception if there is none. */
static Py_ssize_t claim_address(PyObject *claim, PyObject *name)
{
    PyObject *found = PyObject_GetAttr(claim, name);
    const Py_ssize_t address = found == NULL ? -1 : PyLong_AsSsize_t(found);
    Py_XDECREF(found);
    return address;
}

static int claim_set(PyObject *claim, PyObject *name, Py_ssize_t address)
{
    PyObject *given = PyLong_FromSsize_t(address);
    const int failed = given == NULL || PyObject_SetAttr(claim, name, given) < 0;
    Py_XDECREF(given);
    return -failed;
}

int claims_are_apart(const char *start, Py_ssize_t bytes)
{
    PyObject *claim, *value;
    Py_ssize_t at = 0, first = (Py_ssize_t)start;
    if (PyDict_Size(known.claims) == 0)
        return 1;
    if (PyDict_Size(known.claims) > CLAIMS_COMPARED || PyObject_Size(known.dropped) != 0)
        return 0;
    while (PyDict_Next(known.claims, &at, &claim, &value)) {
        const Py_ssize_t begins = claim_address(claim, known.start), ends = claim_address(claim, known.end);
        if (PyErr_Occurred())
            return -1;
        if (first < ends && begins < first + bytes)
            return 0;
    }
    return 1;
}

int claims_add(PyObject *claim, const char *start, Py_ssize_t bytes)
{
    if (claim_set(claim, known.start, (Py_ssize_t)start) < 0 || claim_set(claim, known.end, (Py_ssize_t)start + bytes) < 0 ||
        PySet_Add(known.reusable, claim) < 0)
        return -1;
    return PyDict_SetItem(known.claims, claim, Py_None);
}

int claims_remove(PyObject *claim)
{
    const int is_active = PyDict_Contains(known.claims, claim);
    if (is_active < 0 || (is_active && PyDict_DelItem(known.claims, claim) < 0))
        return -1;
    return PySet_Discard(known.reusable, claim) < 0 ? -1 : 0;
}
