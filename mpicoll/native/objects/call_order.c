/* CallOrder: the numbers of the calls of a group. checks/order.py has the same class for ranks without the extension. */

#include "objects.h"

static PyObject *order_issue(CallOrder *self, PyObject *Py_UNUSED(nothing))
{
    return PyLong_FromLongLong(self->issued++);
}

static PyObject *order_may_move(CallOrder *self, PyObject *given)
{
    const int64_t number = PyLong_AsLongLong(given);
    return number == -1 && PyErr_Occurred() ? NULL : PyBool_FromLong(self->moving >= number);
}

static PyObject *order_pass_on(CallOrder *self, PyObject *given)
{
    const int64_t number = PyLong_AsLongLong(given);
    if (number == -1 && PyErr_Occurred())
        return NULL;
    self->moving += self->moving == number;
    Py_RETURN_NONE;
}

static PyMethodDef order_methods[] = {
    {"issue", (PyCFunction)order_issue, METH_NOARGS, "Return the number of the next call, and count the call as issued."},
    {"may_move", (PyCFunction)order_may_move, METH_O, "Return whether the data of all earlier calls has been posted."},
    {"pass_on", (PyCFunction)order_pass_on, METH_O, "Let the data of the next call move, if it is the turn of this call."},
    {NULL},
};

static PyMemberDef order_members[] = {
    {"issued", T_LONGLONG, offsetof(CallOrder, issued), 0, "The number of the next call to issue."},
    {"posted", T_LONGLONG, offsetof(CallOrder, posted), 0, "The number of the next call to post its round."},
    {"moving", T_LONGLONG, offsetof(CallOrder, moving), 0, "The number of the next call to move its data."},
    {"round", T_LONGLONG, offsetof(CallOrder, round), 0, "Rounds made."},
    {"calls", T_LONGLONG, offsetof(CallOrder, calls), 0, "Calls of the program made on the group."},
    {"closed", T_INT, offsetof(CallOrder, closed), 0, "Not 0: the extension starts no call; the general way says why."},
    {NULL},
};

PyTypeObject OrderType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpicoll._native.CallOrder",
    .tp_basicsize = sizeof(CallOrder),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "The numbers of a group's calls.",
    .tp_new = PyType_GenericNew,
    .tp_methods = order_methods,
    .tp_members = order_members,
};
