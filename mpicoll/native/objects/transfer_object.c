/* SharedTransfer: a movement of larger data through a segment. */

#include "objects.h"

static void transfer_dealloc(TransferObject *self)
{
    for (Py_ssize_t i = 0; i < self->holds; i++)
        PyBuffer_Release(&self->held[i]);
    PyMem_Free(self->held);
    PyMem_Free(self->transfer.blocks);
    PyMem_Free(self->transfer.arrays);
    Py_XDECREF(self->segment);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static Py_buffer *hold(TransferObject *self, PyObject *memory, int flags)
{
    Py_buffer *buffer = &self->held[self->holds];
    if (PyObject_GetBuffer(memory, buffer, flags) < 0)
        return NULL;
    self->holds++;
    return buffer;
}

static int add_blocks(TransferObject *self, PyObject *given, int flags, int *count)
{
    Transfer *transfer = &self->transfer;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given); i++) {
        Block *block = &transfer->blocks[transfer->writes + transfer->reads];
        PyObject *memory, *tuple = PyList_GET_ITEM(given, i);
        if (!PyTuple_Check(tuple)) {
            PyErr_SetString(PyExc_TypeError, "a block is a tuple: the member whose buffer it is in, where in it, the memory[, who reads it]");
            return -1;
        }
        block->peer = -1;
        if (!PyArg_ParseTuple(tuple, "inO|i", &block->rank, &block->at, &memory, &block->peer))
            return -1;
        const Py_buffer *buffer = hold(self, memory, flags);
        if (buffer == NULL)
            return -1;
        block->memory = buffer->buf;
        block->bytes = buffer->len;
        (*count)++;
    }
    return 0;
}

/* What cannot be true of a transfer that stays in its memory. */
static int is_wrong(const Transfer *transfer, const Segment *segment, Py_ssize_t sent, Py_ssize_t arrays, int is_reduction)
{
    if (transfer->width <= 0 || transfer->total < 0 || transfer->itemsize <= 0)
        return 1;
    int wrong = 0;
    for (int i = 0; i < transfer->writes + transfer->reads; i++) {
        const Block *block = &transfer->blocks[i];
        const ptrdiff_t most = block->bytes < transfer->width ? block->bytes : transfer->width;
        wrong |= block->rank < 0 || block->rank >= segment->size || block->peer >= segment->size || block->at < 0 || block->at > segment->room - most;
        wrong |= block->bytes > transfer->total || (i < transfer->writes && block->rank != segment->me);
    }
    if (transfer->kind == SINGLE_COPY)
        wrong |= segment->size < 2 || segment->room / SINGLE_COPY_ENTRY < segment->size || sent != transfer->result;
    if (!is_reduction)
        return wrong || (transfer->kind != COPY_BLOCKS && transfer->kind != SINGLE_COPY && transfer->kind != ANNOUNCE);
    wrong |= transfer->reduce == NULL || segment->size < 2 || transfer->reads > 0 || transfer->width % transfer->itemsize != 0;
    wrong |= transfer->read_at < 0 || transfer->read_at > segment->room - (transfer->result < transfer->width ? transfer->result : transfer->width);
    wrong |= transfer->result > transfer->total || transfer->result % transfer->itemsize != 0;
    if (transfer->kind == REDUCE_IN_PLACE)
        return wrong || arrays != segment->size || transfer->total % transfer->itemsize != 0;
    if (transfer->kind == REDUCE_PARTS)
        return wrong || sent != transfer->total || transfer->width > segment->room || transfer->writes ||
               (transfer->recv != NULL && transfer->result != transfer->total);
    return wrong || transfer->kind != REDUCE || (transfer->recv != NULL && sent < transfer->result);
}

static int transfer_init(TransferObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"segment", "kind", "total", "width", "poll_ns", "writes", "reads", "send", "recv", "read_at",
                            "reduction", "itemsize", "words", "arrays", NULL};
    Transfer *transfer = &self->transfer;
    PyObject *writes, *reads, *send = Py_None, *recv = Py_None, *arrays = Py_None;
    const char *kind, *reduction = "";
    long long budget, words[2] = {0, 0};
    Py_ssize_t sent = 0, itemsize = 1, read_at = 0, many = 0;
    static const char *const kinds[] = {
        [COPY_BLOCKS] = "copy", [SINGLE_COPY] = "single copy", [REDUCE] = "reduce", [REDUCE_PARTS] = "parts", [ANNOUNCE] = "announce",
        [REDUCE_IN_PLACE] = "in place",
    };
    if (self->segment != NULL) {
        PyErr_SetString(PyExc_TypeError, "a transfer is made once");
        return -1;
    }
    writes = reads = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!snnL|O!O!OOnsn(LL)O", names, &SegmentType, &self->segment, &kind,
                                     &transfer->total, &transfer->width, &budget, &PyList_Type, &writes, &PyList_Type, &reads,
                                     &send, &recv, &read_at, &reduction, &itemsize, &words[0], &words[1], &arrays)) {
        self->segment = NULL;
        return -1;
    }
    Py_INCREF(self->segment);
    if (!is_made(self->segment->segment.base, "segment"))
        return -1;
    int found = -1;
    for (int i = 0; i < (int)(sizeof kinds / sizeof *kinds); i++)
        if (strcmp(kinds[i], kind) == 0)
            found = i;
    const Reduction *row = *reduction ? find_reduction(reduction) : NULL;
    if (found < 0 || (arrays != Py_None && !PyList_Check(arrays))) {
        PyErr_SetString(PyExc_TypeError, "no such kind of transfer, or arrays that are no list");
        return -1;
    }
    const Py_ssize_t blocks = (writes ? PyList_GET_SIZE(writes) : 0) + (reads ? PyList_GET_SIZE(reads) : 0);
    many = arrays == Py_None ? 0 : PyList_GET_SIZE(arrays);
    self->held = PyMem_Calloc((size_t)(blocks + many + 2), sizeof *self->held);
    transfer->blocks = PyMem_Calloc((size_t)blocks + 1, sizeof *transfer->blocks);
    transfer->arrays = PyMem_Calloc((size_t)many + 1, sizeof *transfer->arrays);
    if (self->held == NULL || transfer->blocks == NULL || transfer->arrays == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    transfer->kind = (enum TransferKind)found;
    transfer->budget = budget;
    transfer->itemsize = itemsize;
    transfer->read_at = read_at;
    transfer->words[0] = words[0];
    transfer->words[1] = words[1];
    if (row != NULL && itemsize == reduction_itemsize(row)) {
        transfer->reduce = row->reduce;
        transfer->part = itemsize / row->parts;
    }
    if (writes != NULL && add_blocks(self, writes, PyBUF_SIMPLE, &transfer->writes) < 0)
        return -1;
    if (reads != NULL && add_blocks(self, reads, PyBUF_WRITABLE, &transfer->reads) < 0)
        return -1;
    if (send != Py_None) {
        const Py_buffer *buffer = hold(self, send, PyBUF_SIMPLE);
        if (buffer == NULL)
            return -1;
        transfer->send = buffer->buf;
        sent = buffer->len;
    }
    if (recv != Py_None) {
        const Py_buffer *buffer = hold(self, recv, PyBUF_WRITABLE);
        if (buffer == NULL)
            return -1;
        transfer->recv = buffer->buf;
        transfer->result = buffer->len;
    }
    int wrong = 0;
    for (Py_ssize_t i = 0; i < many; i++) {
        const Py_buffer *buffer = hold(self, PyList_GET_ITEM(arrays, i), PyBUF_WRITABLE);
        if (buffer == NULL)
            return -1;
        transfer->arrays[i] = buffer->buf;
        wrong |= buffer->len != transfer->total;
    }
    if (wrong || is_wrong(transfer, &self->segment->segment, sent, many, *reduction != 0)) {
        PyErr_SetString(PyExc_ValueError, "the transfer does not fit into its memory");
        return -1;
    }
    transfer->segment = &self->segment->segment; /* without one, Test() refuses what was not made */
    return 0;
}

static PyObject *transfer_test(TransferObject *self, PyObject *Py_UNUSED(nothing))
{
    int over;
    if (!is_made(self->transfer.segment, "transfer"))
        return NULL;
    if (self->is_running) /* another thread progresses the transfer */
        Py_RETURN_FALSE;
    self->is_running = 1;
    Py_BEGIN_ALLOW_THREADS
    over = transfer_advance(&self->transfer);
    Py_END_ALLOW_THREADS
    self->is_running = 0;
    return PyBool_FromLong(over);
}

static PyObject *transfer_waiting(TransferObject *self, void *Py_UNUSED(closure))
{
    if (!is_made(self->transfer.segment, "transfer"))
        return NULL;
    PyObject *ranks = PyList_New(0);
    for (int rank = 0; ranks != NULL && rank < self->transfer.segment->size; rank++)
        if (transfer_waits_for(&self->transfer, rank)) {
            PyObject *number = PyLong_FromLong(rank);
            if (number == NULL || PyList_Append(ranks, number) < 0)
                Py_CLEAR(ranks);
            Py_XDECREF(number);
        }
    return ranks == NULL ? NULL : Py_BuildValue("LN", (long long)self->transfer.wanted, ranks);
}

static PyObject *transfer_revoke(TransferObject *self, PyObject *Py_UNUSED(nothing))
{
    if (!is_made(self->transfer.segment, "transfer"))
        return NULL;
    if (!self->is_running) {
        Py_BEGIN_ALLOW_THREADS
        single_copy_revoke(&self->transfer);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

static PyMethodDef transfer_methods[] = {
    {"revoke", (PyCFunction)transfer_revoke, METH_NOARGS,
     "Before this member gives the transfer up: no other member copies into its memory any more."},
    {"Test", (PyCFunction)transfer_test, METH_NOARGS,
     "Move on as far as the others are, without the interpreter lock. Return whether the transfer is complete."},
    {NULL},
};

static PyGetSetDef transfer_getset[] = {
    {"waits_for", (getter)transfer_waiting, NULL, "The step that others have to reach, and the ranks that have not.", NULL},
    {NULL},
};

PyTypeObject TransferType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpicoll._native.SharedTransfer",
    .tp_basicsize = sizeof(TransferObject),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "One movement through a segment, as this member makes it; complete when Test() returns True.",
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)transfer_init,
    .tp_dealloc = (destructor)transfer_dealloc,
    .tp_methods = transfer_methods,
    .tp_getset = transfer_getset,
};
