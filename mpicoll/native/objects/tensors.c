/* tensor_array(): the memory of a tensor of torch as an array of NumPy. It reads attributes of the tensor as Python does, and needs no header of torch. */

#include "objects.h"

/* The memory of a tensor. It refers to the storage, not the tensor, which may get another storage. */
typedef struct {
    PyObject_HEAD
    void *start;
    Py_ssize_t bytes;
    PyObject *storage;
} TensorMemory;

static int memory_buffer(TensorMemory *self, Py_buffer *view, int flags)
{
    return PyBuffer_FillInfo(view, (PyObject *)self, self->start, self->bytes, 0, flags);
}

static void memory_dealloc(TensorMemory *self)
{
    Py_XDECREF(self->storage);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyBufferProcs memory_as_buffer = {.bf_getbuffer = (getbufferproc)memory_buffer};

PyTypeObject TensorMemoryType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "mpicoll._native.TensorMemory",
    .tp_doc = "The memory of a tensor.",
    .tp_basicsize = sizeof(TensorMemory),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_as_buffer = &memory_as_buffer,
    .tp_dealloc = (destructor)memory_dealloc,
};

/* The attributes of a tensor, as strings that tensors_ready() makes. */
enum { IS_CPU, IS_NESTED, IS_CONJ, IS_NEG, IS_CONTIGUOUS, DTYPE, LAYOUT, SHAPE, NBYTES, DATA_PTR, STORAGE, NAMES };
enum { FIRST_METHOD = IS_CONJ, QUESTIONS = DTYPE }; /* the attributes before QUESTIONS, which are True or False; methods among them */
static const char *const names_in_c[NAMES] = {"is_cpu", "is_nested", "is_conj", "is_neg", "is_contiguous", "dtype",
                                         "layout", "shape", "nbytes", "data_ptr", "untyped_storage"};
static PyObject *names[NAMES];

int tensors_ready(void)
{
    for (int each = 0; each < NAMES; each++)
        if ((names[each] = PyUnicode_InternFromString(names_in_c[each])) == NULL)
            return -1;
    return PyType_Ready(&TensorMemoryType);
}

/* Return whether the memory of a tensor is all elements of the tensor, in C order; -1 and an exception if that is not known. The caller has
   found the dtype, so the tensor is not quantized. */
static int is_plain(PyObject *tensor, PyObject *strided)
{
    for (int each = 0; each < QUESTIONS; each++) {
        PyObject *answer = each < FIRST_METHOD ? PyObject_GetAttr(tensor, names[each]) : PyObject_CallMethodNoArgs(tensor, names[each]);
        if (answer == NULL)
            return -1;
        Py_DECREF(answer); /* True and False are never freed */
        if (answer != (each == IS_CPU || each == IS_CONTIGUOUS ? Py_True : Py_False))
            return 0;
    }
    PyObject *layout = PyObject_GetAttr(tensor, names[LAYOUT]);
    Py_XDECREF(layout); /* torch keeps all layouts */
    return layout == NULL ? -1 : layout == strided;
}

/* Return the value of an integer of Python, and release the integer; -1 and an exception if there is none. */
static Py_ssize_t read_integer(PyObject *given)
{
    const Py_ssize_t found = given == NULL ? -1 : (Py_ssize_t)PyLong_AsSize_t(given);
    Py_XDECREF(given);
    return found;
}

/* Return the memory of a plain tensor; NULL if the tensor has no memory, or NULL and an exception. */
static PyObject *memory_of(PyObject *tensor)
{
    const Py_ssize_t address = read_integer(PyObject_CallMethodNoArgs(tensor, names[DATA_PTR]));
    const Py_ssize_t bytes = address == 0 || PyErr_Occurred() ? 0 : read_integer(PyObject_GetAttr(tensor, names[NBYTES]));
    if (bytes <= 0 || PyErr_Occurred())
        return NULL;
    TensorMemory *made = PyObject_New(TensorMemory, &TensorMemoryType);
    if (made == NULL)
        return NULL;
    made->start = (void *)address;
    made->bytes = bytes;
    made->storage = PyObject_CallMethodNoArgs(tensor, names[STORAGE]);
    if (made->storage == NULL)
        Py_CLEAR(made);
    return (PyObject *)made;
}

/* Return an array of the memory of a tensor; NULL if the tensor is not plain, or NULL and an exception. */
static PyObject *array_of(PyObject *tensor, PyObject *strided, PyObject *dtypes)
{
    PyObject *torch_dtype = PyObject_GetAttr(tensor, names[DTYPE]);
    if (torch_dtype == NULL)
        return NULL;
    PyObject *dtype = PyDict_GetItemWithError(dtypes, torch_dtype), *memory = NULL, *shape = NULL, *array = NULL;
    Py_DECREF(torch_dtype);
    if (dtype != NULL && is_plain(tensor, strided) > 0 && (memory = memory_of(tensor)) != NULL &&
        (shape = PyObject_GetAttr(tensor, names[SHAPE])) != NULL)
        array = PyObject_CallFunctionObjArgs((PyObject *)known.array, shape, dtype, memory, NULL);
    Py_XDECREF(shape);
    Py_XDECREF(memory);
    return array;
}

/* The arguments: the tensor, the type torch.Tensor, torch.strided, and the dtypes of NumPy by those of torch. */
PyObject *tensor_array(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 4 || !PyDict_CheckExact(args[3]) || known.array == NULL) {
        PyErr_SetString(PyExc_TypeError, "tensor_array(tensor, type, strided, dtypes)");
        return NULL;
    }
    PyObject *array = (PyObject *)Py_TYPE(args[0]) == args[1] ? array_of(args[0], args[2], args[3]) : NULL;
    if (array != NULL)
        return array;
    if (PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_Exception))
            return NULL;
        PyErr_Clear(); /* Python reads the tensor again, and tells what is wrong */
    }
    Py_RETURN_NONE;
}
