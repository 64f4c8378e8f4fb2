/* The memory of pending calls: the claims, which checks/memory_in_use.py makes and holds, and contents that are held to find writes of the
   program: all bytes, or a sample of large memory. No code of Python runs here. */

#include "objects.h"

/* ---- the claims ---- */

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

/* An array as equal blocks at equal distances: along the dimension of the largest stride. */
typedef struct {
    const char *start;
    Py_ssize_t bytes;         /* from the first byte to the last one */
    Py_ssize_t period, width; /* the distance of the blocks, and the bytes of each; 0 and `bytes`: one block */
} Blocked;

static Blocked blocked(const char *start, Py_ssize_t bytes, const Array *array)
{
    Blocked found = {start, bytes, 0, bytes};
    for (int i = 0; i < array->nd; i++) {
        const Py_ssize_t stride = array->strides[i] < 0 ? -array->strides[i] : array->strides[i];
        if (array->dimensions[i] > 1 && stride > found.period) {
            found.period = stride;
            found.width = bytes - (array->dimensions[i] - 1) * stride;
        }
    }
    return found;
}

/* Return whether two arrays share no byte though they overlap, as two columns of a grid do; 0: that is not known. */
static int are_interleaved(const Blocked *a, const Blocked *b)
{
    const Py_ssize_t period = a->period > b->period ? a->period : b->period;
    const Py_ssize_t wide_a = a->period == period ? a->width : a->bytes, wide_b = b->period == period ? b->width : b->bytes;
    if (period == 0)
        return 0;
    Py_ssize_t between = (b->start - a->start) % period;
    between += between < 0 ? period : 0;
    return between >= wide_a && period - between >= wide_b;
}

/* Return whether a claim of one array, which stands at `start`, may overlap the memory: both only read, or share no byte. 0: Python has to
   compare. */
static int may_overlap(PyObject *claim, const char *start, Py_ssize_t bytes, const Use *use)
{
    if (use->array == NULL || (PyObject *)Py_TYPE(claim) != known.claim)
        return 0;
    PyObject *reads = PyObject_GetAttr(claim, known.reads), *writes = PyObject_GetAttr(claim, known.does_write);
    PyObject *array = PyObject_GetAttr(claim, known.of_array);
    int found = 0;
    if (reads == Py_False && writes != NULL && array != NULL && Py_IS_TYPE(array, known.array)) {
        const Blocked mine = blocked(use->start, use->bytes, use->array), other = blocked(start, bytes, (Array *)array);
        found = (!use->writes && writes == Py_False) || are_interleaved(&mine, &other);
    }
    Py_XDECREF(reads);
    Py_XDECREF(writes);
    Py_XDECREF(array);
    PyErr_Clear(); /* Python finds the error again */
    return found;
}

int claims_are_apart(const Use *use)
{
    PyObject *claim, *value;
    Py_ssize_t at = 0, first = (Py_ssize_t)use->start;
    if (PyDict_Size(known.claims) == 0)
        return 1;
    if (PyDict_Size(known.claims) > CLAIMS_COMPARED || PyObject_Size(known.dropped) != 0)
        return 0;
    while (PyDict_Next(known.claims, &at, &claim, &value)) {
        const Py_ssize_t begins = claim_address(claim, known.start), ends = claim_address(claim, known.end);
        if (PyErr_Occurred())
            return -1;
        if (first < ends && begins < first + use->bytes && !may_overlap(claim, (const char *)begins, ends - begins, use))
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

/* ---- the contents ---- */

enum {
    END_BYTES = 128,  /* at both ends of a sample */
    PLACE_BYTES = 32, /* at each place in between; a place stands in one line of the cache */
    ONE = 1 << 16,    /* so that all parts have equal lengths, and no bytes are left over */
    RULES = 4         /* at most */
};

/* How many places a sample has: one for so many bytes, but at most so many. The rule that gives most places counts. */
static struct {
    Py_ssize_t bytes, places;
} rules[RULES];

typedef struct {
    Py_ssize_t places; /* -1: all bytes are held, and no sample */
    Py_ssize_t skew;   /* bytes before the first part */
    uint64_t part;     /* PLACE_BYTES of a part, in each of which one place stands anywhere; times ONE */
} Sample;

PyObject *set_places(PyObject *Py_UNUSED(module), PyObject *given)
{
    Py_ssize_t read[RULES][2] = {{0}};
    if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) > RULES)
        return PyErr_Format(PyExc_TypeError, "at most %d rules, in a tuple", RULES);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); i++) {
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(given, i), "nn", &read[i][0], &read[i][1]))
            return NULL;
        if (read[i][0] < 1 || read[i][1] < 0 || read[i][1] > UINT16_MAX)
            return PyErr_Format(PyExc_ValueError, "a rule is a number of bytes and the largest number of places");
    }
    for (int i = 0; i < RULES; i++) {
        rules[i].bytes = read[i][0];
        rules[i].places = read[i][1];
    }
    Py_RETURN_NONE;
}

/* Of the places of a list one half belongs to the arrays in equal shares, the other half by their bytes. */
static Sample sample_of(Py_ssize_t bytes, Together all, const char *data)
{
    Sample sample = {-1, 0, 0};
    if (all.bytes <= SNAPSHOT_BYTES)
        return sample;
    Py_ssize_t most = 0;
    for (int i = 0; i < RULES && rules[i].bytes > 0; i++) {
        const Py_ssize_t wanted = all.bytes / rules[i].bytes, places = wanted < rules[i].places ? wanted : rules[i].places;
        most = places > most ? places : most;
    }
    const Py_ssize_t half = most / 2, places = half / all.arrays + half * (bytes / 64) / (all.bytes / 64);
    if (bytes <= 2 * END_BYTES + (places + 1) * PLACE_BYTES)
        return sample;
    sample.places = places;
    sample.skew = (Py_ssize_t)(-(uintptr_t)data & (PLACE_BYTES - 1));
    if (places > 0)
        sample.part = (uint64_t)((bytes - sample.skew) / PLACE_BYTES) * ONE / (uint64_t)places;
    return sample;
}

/* A walk over the places of a sample. */
typedef struct {
    const char *start;
    uint64_t at, part, within; /* where the next part begins, its length, and the places in it, one of which is read; the first two times ONE */
    uint32_t mixed, add;       /* which one: a quadratic sequence, as the elements that a program writes are often at equal distances */
} Walk;

static Walk walk_of(const char *data, const Sample *sample)
{
    return (Walk){data + sample->skew, 0, sample->part, sample->part / ONE, 0, 0x85EBCA77u + 0x9E3779B1u};
}

static inline const char *next_place(Walk *walk)
{
    const char *place = walk->start + (walk->at / ONE + (walk->mixed * walk->within >> 32)) * PLACE_BYTES;
    walk->at += walk->part;
    walk->mixed += walk->add;
    walk->add += 2 * 0x85EBCA77u;
    return place;
}

Py_ssize_t contents_size(Py_ssize_t bytes, Together all)
{
    const Py_ssize_t places = sample_of(bytes, all, NULL).places;
    return places < 0 ? bytes : 2 * END_BYTES + places * PLACE_BYTES;
}

Py_ssize_t contents_copy(char *to, const char *data, Py_ssize_t bytes, Together all)
{
    const Sample sample = sample_of(bytes, all, data);
    if (sample.places < 0) {
        memcpy(to, data, (size_t)bytes);
        return bytes;
    }
    memcpy(to, data, END_BYTES);
    memcpy(to + END_BYTES, data + bytes - END_BYTES, END_BYTES);
    to += 2 * END_BYTES;
    Walk walk = walk_of(data, &sample);
    for (Py_ssize_t i = 0; i < sample.places; i++)
        memcpy(to + i * PLACE_BYTES, next_place(&walk), PLACE_BYTES);
    return 2 * END_BYTES + sample.places * PLACE_BYTES;
}

/* Memory that is read in one instruction, wherever it begins. */
typedef int64_t Word __attribute__((vector_size(16), aligned(1), may_alias));
enum { PLACE_WORDS = PLACE_BYTES / sizeof(Word) };

int contents_differ(const char *held, const char *data, Py_ssize_t bytes, Together all)
{
    const Sample sample = sample_of(bytes, all, data);
    if (sample.places < 0)
        return memcmp(held, data, (size_t)bytes) != 0;
    if (memcmp(held, data, END_BYTES) != 0 || memcmp(held + END_BYTES, data + bytes - END_BYTES, END_BYTES) != 0)
        return 1;
    held += 2 * END_BYTES;
    Walk walk = walk_of(data, &sample);
    Word found = {0};
    for (Py_ssize_t i = 0; i < sample.places; i++) {
        const Word *then = (const Word *)(held + i * PLACE_BYTES), *now = (const Word *)next_place(&walk);
        for (int word = 0; word < PLACE_WORDS; word++)
            found |= then[word] ^ now[word];
    }
    return (found[0] | found[1]) != 0;
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

/* The arrays of an array or a list, as a C array of objects; NULL if Python has to read one of them. */
static PyObject **arrays_of(PyObject **given, Together *all)
{
    const int is_list = PyList_CheckExact(*given);
    PyObject **each = is_list ? ((PyListObject *)*given)->ob_item : given;
    *all = (Together){0, is_list ? PyList_GET_SIZE(*given) : 1};
    for (Py_ssize_t i = 0; i < all->arrays; i++) {
        const Py_ssize_t bytes = bytes_of(each[i]);
        if (bytes < 0)
            return NULL;
        all->bytes += bytes;
    }
    return each;
}

static Py_ssize_t size_of(PyObject **each, Together all)
{
    Py_ssize_t size = 0;
    for (Py_ssize_t i = 0; i < all.arrays; i++)
        size += contents_size(bytes_of(each[i]), all);
    return size;
}

PyObject *contents(PyObject *Py_UNUSED(module), PyObject *arrays)
{
    Together all;
    PyObject **each = arrays_of(&arrays, &all);
    if (each == NULL && all.arrays > 0)
        Py_RETURN_NONE;
    PyObject *found = PyBytes_FromStringAndSize(NULL, size_of(each, all));
    char *to = found == NULL ? NULL : PyBytes_AS_STRING(found);
    for (Py_ssize_t i = 0; to != NULL && i < all.arrays; i++)
        to += contents_copy(to, memory(each[i]), bytes_of(each[i]), all);
    return found;
}

PyObject *differ(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 2 || !PyBytes_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "differ(arrays, what contents() has returned)");
        return NULL;
    }
    Together all;
    PyObject *arrays = args[0], **each = arrays_of(&arrays, &all);
    if (each == NULL && all.arrays > 0)
        Py_RETURN_NONE;
    int found = size_of(each, all) != PyBytes_GET_SIZE(args[1]);
    const char *held = PyBytes_AS_STRING(args[1]);
    for (Py_ssize_t i = 0; !found && i < all.arrays; i++) {
        const Py_ssize_t bytes = bytes_of(each[i]);
        found = contents_differ(held, memory(each[i]), bytes, all);
        held += contents_size(bytes, all);
    }
    return PyBool_FromLong(found);
}
