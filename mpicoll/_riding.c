/* Calls that are made again, as mpicoll/operations/riding.py makes them: the same steps on the same memory, without the interpreter.

   Only what is usual is here. A call that has to wait for longer than a moment, whose members do not all say the same, or whose
   elements are of a kind that is not in the table below, is gone on with in Python (riding._finish), from where it stands. Ranks
   that have this module and ranks that have it not make the same calls with each other.

   The order in which memory is written and read is said by atomic loads and stores: what a member has written before it stores a
   number (release) is there for who has loaded that number (acquire). C11, 5.1.2.4; mpicoll/transports/shm/segment.py says it for Python.

   A call holds the interpreter lock all along, but where the lock of the group is waited for. Nothing of the program's runs between
   the first word that is written and the last one that is taken, and nothing there can fail. Larger movements let go of it. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <frameobject.h>
#include <structmember.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__) || defined(__i386__)
#define RELAX() __builtin_ia32_pause()
#else
#define RELAX() ((void)0)
#endif

#ifndef VERSION
#define VERSION "unknown" /* setup.py gives the sum of this file, which mpicoll/runtime/native.py looks for */
#endif

enum { WORDS = 16, BODY = 1, BODY_WORDS = 10, TIME = 11 }; /* of a record: transports/shm/control.py */
enum { LOOKS_BETWEEN_CLOCKS = 32 };
enum { READABLE = 0x101, CARRAY = 0x501 }; /* NumPy's flags: contiguous as in C and aligned; and writeable */

/* The head of an ndarray, which NumPy's own macros read in every extension module; prepare() compares it with one. */
typedef struct {
    PyObject_HEAD
    char *data;
    int nd;
    Py_ssize_t *dimensions;
    Py_ssize_t *strides;
    PyObject *base;
    PyObject *descr;
    int flags;
} Array;

/* The head of a dtype, which NumPy lays out alike since its first version; prepare() compares it, too. */
typedef struct {
    PyObject_HEAD
    PyObject *typeobj;
    char kind, type, byteorder, flags;
    int type_num;
} Descr;

/* ---- what is reduced here: to the letter what NumPy does, so that it does not matter who does it ---- */

typedef void (*Reduce)(char *into, const char *one, const char *other, Py_ssize_t count);
typedef void (*Divide)(char *into, Py_ssize_t count, Py_ssize_t by);

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

/* ``into`` may be ``one``. */
#define ELEMENTWISE(NAME, TYPE, EXPRESSION)                                                              \
    FOR_EACH_PROCESSOR static void NAME(char *into, const char *one, const char *other, Py_ssize_t count) \
    {                                                                                                    \
        TYPE *z = (TYPE *)into;                                                                          \
        const TYPE *x = (const TYPE *)one, *y = (const TYPE *)other;                                     \
        for (Py_ssize_t i = 0; i < count; i++) {                                                         \
            const TYPE a = x[i], b = y[i];                                                               \
            z[i] = (TYPE)(EXPRESSION);                                                                   \
        }                                                                                                \
    }

#define WHOLE(S, U, N)                               \
    ELEMENTWISE(sum_##N, U, a + b)                   \
    ELEMENTWISE(prod_##N, U, (uint64_t)a *(uint64_t)b) \
    ELEMENTWISE(band_##N, U, a &b)                   \
    ELEMENTWISE(bor_##N, U, a | b)                   \
    ELEMENTWISE(bxor_##N, U, a ^ b)                  \
    ELEMENTWISE(max_i##N, S, a > b ? a : b)          \
    ELEMENTWISE(min_i##N, S, a < b ? a : b)          \
    ELEMENTWISE(max_u##N, U, a > b ? a : b)          \
    ELEMENTWISE(min_u##N, U, a < b ? a : b)

WHOLE(int8_t, uint8_t, 1)
WHOLE(int16_t, uint16_t, 2)
WHOLE(int32_t, uint32_t, 4)
WHOLE(int64_t, uint64_t, 8)

ELEMENTWISE(sum_f4, float, a + b)
ELEMENTWISE(sum_f8, double, a + b)
ELEMENTWISE(prod_f4, float, a *b)
ELEMENTWISE(prod_f8, double, a *b)

/* A NaN stays; of two zeros the second: as NumPy's vector loops. */
ELEMENTWISE(max_f4, float, (a > b) | (a != a) ? a : b)
ELEMENTWISE(max_f8, double, (a > b) | (a != a) ? a : b)
ELEMENTWISE(min_f4, float, (a < b) | (a != a) ? a : b)
ELEMENTWISE(min_f8, double, (a < b) | (a != a) ? a : b)

ELEMENTWISE(any, uint8_t, (a | b) != 0)
ELEMENTWISE(all, uint8_t, (a != 0) & (b != 0))
ELEMENTWISE(odd, uint8_t, (a != 0) ^ (b != 0))

static void divide_f4(char *into, Py_ssize_t count, Py_ssize_t by)
{
    float *x = (float *)into;
    for (Py_ssize_t i = 0; i < count; i++)
        x[i] = x[i] / (float)by;
}

static void divide_f8(char *into, Py_ssize_t count, Py_ssize_t by)
{
    double *x = (double *)into;
    for (Py_ssize_t i = 0; i < count; i++)
        x[i] = x[i] / (double)by;
}

static const struct {
    const char *name; /* MPI's name of the op, and NumPy's kind and size of the elements */
    Reduce reduce;
    Divide divide;
    int parts; /* of an element */
} TABLE[] = {
#define WHOLE_ROWS(N)                                                                                                     \
    {"SUM i" #N, sum_##N, NULL, 1}, {"SUM u" #N, sum_##N, NULL, 1}, {"PROD i" #N, prod_##N, NULL, 1},                     \
        {"PROD u" #N, prod_##N, NULL, 1}, {"BAND i" #N, band_##N, NULL, 1}, {"BAND u" #N, band_##N, NULL, 1},             \
        {"BOR i" #N, bor_##N, NULL, 1}, {"BOR u" #N, bor_##N, NULL, 1}, {"BXOR i" #N, bxor_##N, NULL, 1},                 \
        {"BXOR u" #N, bxor_##N, NULL, 1}, {"MAX i" #N, max_i##N, NULL, 1}, {"MAX u" #N, max_u##N, NULL, 1},               \
        {"MIN i" #N, min_i##N, NULL, 1}, {"MIN u" #N, min_u##N, NULL, 1}
    WHOLE_ROWS(1), WHOLE_ROWS(2), WHOLE_ROWS(4), WHOLE_ROWS(8),
#define REAL_ROWS(N)                                                                                                      \
    {"SUM f" #N, sum_f##N, divide_f##N, 1}, {"PROD f" #N, prod_f##N, NULL, 1}, {"MAX f" #N, max_f##N, NULL, 1},           \
        {"MIN f" #N, min_f##N, NULL, 1}
    REAL_ROWS(4), REAL_ROWS(8),
    {"SUM c8", sum_f4, NULL, 2}, {"SUM c16", sum_f8, NULL, 2},
    {"LOR b1", any, NULL, 1}, {"LAND b1", all, NULL, 1}, {"LXOR b1", odd, NULL, 1},
};

/* ---- what it knows of the rest of the library ---- */

typedef struct {
    PyObject *in_python, *finish, *lose, *await; /* of riding: the call in Python, what goes on with one that is posted, and gives it up */
    PyObject *pending, *flights, *threads;
    PyTypeObject *array, *ride, *lane, *group, *segment;
    Py_ssize_t quick, op;                        /* slots of a prepared call */
    Py_ssize_t issued, posted, turn, rounds;     /* of a lane */
    Py_ssize_t calls, last, lock, kept_out;      /* of a group */
    Py_ssize_t step;                             /* of a segment */
    PyObject *acquire, *release, *f_lasti;       /* names */
} Known;

static Known known;

/* ---- one call of one member, prepared ---- */

enum Take { NOTHING, REDUCE, COPY, ROWS, EACH, IN_PYTHON };

/* What a member passes, or where its result goes: no array, one, or a list of arrays. */
typedef struct {
    Py_ssize_t arrays; /* 0: none; -1: one that is in no list */
    Py_ssize_t count;  /* elements of each */
    int *nd;
    Py_ssize_t **dimensions; /* of each in a list: one piece of memory */
} Given;

typedef struct {
    PyObject_HEAD
    Py_buffer rounds, data;
    PyObject *lane, *segment; /* segment: NULL where the elements stand beside the records */
    PyObject *dtype;
    char *records;        /* of member 0 */
    Py_ssize_t part;      /* bytes of a member's records, and what is beside them */
    char *elements;       /* of member 0, at place 0 */
    Py_ssize_t apart, room; /* bytes from member to member, and of each place */
    Py_ssize_t line;      /* bytes from counter to counter, in the memory of a segment */
    int me, size, ring;
    int64_t body[BODY_WORDS];
    Py_ssize_t brings, start, nbytes; /* bytes: this member's; of a block of another's, where it begins and how long it is */
    Py_ssize_t count, width; /* elements of a block, and bytes of the pieces in which it moves */
    int root;
    enum Take take;
    char takes, in_place; /* in place: what this member brings to a reduction stands where its result goes */
    Reduce reduce;
    Divide divide;
    int parts;
    Given send, recv;
    int64_t patience; /* nanoseconds of looking for the others before Python waits for them */
    unsigned long thread;
} Quick;

static PyTypeObject QuickType;
static void take(const Quick *quick, int place, PyObject *recv, Py_ssize_t at);
static int fits(const Quick *quick, const Given *wanted, PyObject *given, int flags);

static void given_free(Given *given)
{
    PyMem_Free(given->nd);
    PyMem_Free(given->dimensions);
    memset(given, 0, sizeof *given);
}

/* From None, the shape of an array, or a list of shapes. */
static int given_init(Given *given, PyObject *shapes, Py_ssize_t count)
{
    given_free(given);
    given->count = count;
    if (shapes == Py_None || PyTuple_Check(shapes)) {
        given->arrays = shapes == Py_None ? 0 : -1;
        return 0;
    }
    if (!PyList_Check(shapes)) {
        PyErr_SetString(PyExc_TypeError, "shapes are None, a tuple, or a list of tuples");
        return -1;
    }
    Py_ssize_t many = PyList_GET_SIZE(shapes), lengths = 0;
    for (Py_ssize_t i = 0; i < many; i++) {
        if (!PyTuple_Check(PyList_GET_ITEM(shapes, i))) {
            PyErr_SetString(PyExc_TypeError, "a shape is a tuple");
            return -1;
        }
        lengths += PyTuple_GET_SIZE(PyList_GET_ITEM(shapes, i));
    }
    given->nd = PyMem_Malloc((many + 1) * sizeof *given->nd);
    given->dimensions = PyMem_Malloc((many + 1) * sizeof *given->dimensions + (lengths + 1) * sizeof **given->dimensions);
    if (given->nd == NULL || given->dimensions == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    Py_ssize_t *next = (Py_ssize_t *)(given->dimensions + many + 1);
    for (Py_ssize_t i = 0; i < many; i++) {
        PyObject *shape = PyList_GET_ITEM(shapes, i);
        given->nd[i] = (int)PyTuple_GET_SIZE(shape);
        given->dimensions[i] = next;
        for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(shape); j++) {
            *next = PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, j));
            if (*next++ == -1 && PyErr_Occurred())
                return -1;
        }
    }
    given->arrays = many;
    return 0;
}

static int quick_init(Quick *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"rounds", "part",  "ring",   "me",    "size",   "data", "first",     "apart",   "room",
                            "places", "line",  "lane",   "segment", "body", "dtype", "itemsize", "brings",  "start",
                            "nbytes", "root",  "send",   "recv",  "take",   "reduction", "average", "in_place", "width", "patience", NULL};
    PyObject *rounds, *data, *lane, *segment, *dtype, *send, *recv;
    Py_buffer body;
    const char *take, *reduction;
    Py_ssize_t first, places, itemsize;
    int average, in_place;
    long long patience;
    if (self->lane != NULL) {
        PyErr_SetString(PyExc_TypeError, "a prepared call is made once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OniiiOnnnnnOOy*OnnnniOOssppnL", names, &rounds, &self->part, &self->ring,
                                     &self->me, &self->size, &data, &first, &self->apart, &self->room, &places, &self->line,
                                     &lane, &segment, &body, &dtype, &itemsize, &self->brings, &self->start, &self->nbytes,
                                     &self->root, &send, &recv, &take, &reduction, &average,
                                     &in_place, &self->width, &patience))
        return -1;
    int wrong = body.len != (Py_ssize_t)sizeof self->body;
    if (!wrong)
        memcpy(self->body, body.buf, sizeof self->body);
    PyBuffer_Release(&body);
    if (PyObject_GetBuffer(rounds, &self->rounds, PyBUF_SIMPLE | PyBUF_WRITABLE) < 0 ||
        PyObject_GetBuffer(data, &self->data, PyBUF_SIMPLE | PyBUF_WRITABLE) < 0)
        return -1;
    wrong |= self->ring <= 0 || (self->ring & (self->ring - 1)) || self->me < 0 || self->me >= self->size;
    wrong |= self->part < self->ring * WORDS * (Py_ssize_t)sizeof(int64_t) || self->part * self->size > self->rounds.len;
    wrong |= self->room < 0 || places * self->room > self->apart || first < 0;
    wrong |= first + (self->size - 1) * self->apart + places * self->room > self->data.len;
    wrong |= places != (segment == Py_None ? self->ring : 2) || (segment != Py_None && self->line * self->size > first);
    wrong |= self->brings < 0 || itemsize <= 0 || self->nbytes % itemsize;
    wrong |= self->start < 0 || self->nbytes < 0 || self->root >= self->size;
    if (self->width < self->nbytes) /* one array in several pieces */
        wrong |= self->width <= 0 || self->width > self->room || itemsize <= 0 || self->width % itemsize || segment == Py_None ||
                 self->start != 0 || (self->brings != 0 && self->brings != self->nbytes) || PyList_Check(send) ||
                 PyList_Check(recv) || strcmp(take, "rows") == 0;
    else
        wrong |= self->brings > self->room || self->start + self->nbytes > self->room;
    wrong |= segment != Py_None && !PyObject_TypeCheck(segment, known.segment);
    wrong |= !PyObject_TypeCheck(lane, known.lane);
    if (wrong) {
        PyErr_SetString(PyExc_ValueError, "a prepared call does not fit into its memory");
        return -1;
    }
    self->count = self->nbytes / itemsize;
    Py_ssize_t blocks = PyList_Check(send) ? PyList_GET_SIZE(send) : 1;
    if (PyList_Check(send) ? self->brings != blocks * self->nbytes : self->brings % itemsize != 0) {
        PyErr_SetString(PyExc_ValueError, "what a member brings is no such number of blocks");
        return -1;
    }
    if (given_init(&self->send, send, blocks ? self->brings / itemsize / blocks : 0) < 0 ||
        given_init(&self->recv, recv, self->count * (strcmp(take, "rows") == 0 ? self->size : 1)) < 0)
        return -1;
    self->take = IN_PYTHON;
    if (strcmp(take, "") == 0)
        self->take = NOTHING;
    else if (strcmp(take, "copy") == 0 && self->root >= 0 && self->recv.arrays < 0)
        self->take = COPY;
    else if (strcmp(take, "rows") == 0 && self->recv.arrays < 0)
        self->take = ROWS;
    else if (strcmp(take, "each") == 0 && self->recv.arrays == self->size)
        self->take = EACH;
    else if (strcmp(take, "reduce") == 0 && self->recv.arrays < 0)
        for (size_t i = 0; i < sizeof TABLE / sizeof *TABLE; i++)
            if (strcmp(TABLE[i].name, reduction) == 0 && (!average || TABLE[i].divide != NULL)) {
                self->take = REDUCE;
                self->reduce = TABLE[i].reduce;
                self->divide = average ? TABLE[i].divide : NULL;
                self->parts = TABLE[i].parts;
            }
    self->takes = self->take != IN_PYTHON && self->take != NOTHING;
    self->records = self->rounds.buf;
    self->elements = (char *)self->data.buf + first;
    self->patience = patience;
    self->in_place = (char)in_place;
    self->segment = segment == Py_None ? NULL : Py_NewRef(segment);
    self->dtype = Py_NewRef(dtype);
    self->lane = Py_NewRef(lane);
    return 0;
}

static int quick_traverse(Quick *self, visitproc visit, void *arg)
{
    Py_VISIT(self->lane);
    Py_VISIT(self->segment);
    Py_VISIT(self->dtype);
    return 0;
}

static int quick_clear(Quick *self)
{
    Py_CLEAR(self->lane);
    Py_CLEAR(self->segment);
    Py_CLEAR(self->dtype);
    return 0;
}

static void quick_dealloc(Quick *self)
{
    PyObject_GC_UnTrack(self);
    quick_clear(self);
    if (self->rounds.obj != NULL)
        PyBuffer_Release(&self->rounds);
    if (self->data.obj != NULL)
        PyBuffer_Release(&self->data);
    given_free(&self->send);
    given_free(&self->recv);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *quick_take(Quick *self, PyObject *args)
{
    int place;
    PyObject *recv;
    if (!PyArg_ParseTuple(args, "iO", &place, &recv))
        return NULL;
    if (place < 0 || place >= (self->segment == NULL ? self->ring : 2) || !self->takes || self->width < self->nbytes ||
        !fits(self, &self->recv, recv, CARRAY)) {
        PyErr_SetString(PyExc_ValueError, "the arrays that take the result were changed while the call waited for the others");
        return NULL;
    }
    take(self, place, recv, 0);
    Py_RETURN_NONE;
}

static PyMethodDef quick_methods[] = {
    {"take", (PyCFunction)quick_take, METH_VARARGS, "Take the result of a call that is over, from a place of its memory."},
    {NULL},
};

static PyMemberDef quick_members[] = {
    {"takes", T_BOOL, offsetof(Quick, takes), READONLY, "Whether there is a result that is taken here, and not in Python."},
    {NULL},
};

static PyTypeObject QuickType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpicoll._riding.Quick",
    .tp_basicsize = sizeof(Quick),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "A call of one member, prepared to be made again.",
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)quick_init,
    .tp_traverse = (traverseproc)quick_traverse,
    .tp_clear = (inquiry)quick_clear,
    .tp_dealloc = (destructor)quick_dealloc,
    .tp_members = quick_members,
    .tp_methods = quick_methods,
};

/* ---- what it knows of the rest of the library, found ---- */

#define SLOT(OBJECT, OFFSET) (*(PyObject **)((char *)(OBJECT) + (OFFSET)))

/* Where an attribute that a class names in __slots__ stands in its instances; -1 and an exception if it does not. */
static Py_ssize_t find_slot(PyTypeObject *type, const char *name)
{
    PyObject *found = PyObject_GetAttrString((PyObject *)type, name);
    if (found == NULL)
        return -1;
    Py_ssize_t offset = -1;
    if (Py_IS_TYPE(found, &PyMemberDescr_Type) && ((PyMemberDescrObject *)found)->d_member->type == T_OBJECT_EX)
        offset = ((PyMemberDescrObject *)found)->d_member->offset;
    else
        PyErr_Format(PyExc_TypeError, "%s.%s is no slot", type->tp_name, name);
    Py_DECREF(found);
    return offset;
}

static PyObject *prepare(PyObject *module, PyObject *args)
{
    PyObject *in_python, *finish, *lose, *await, *pending, *flights, *threads, *probe;
    PyTypeObject *ride, *lane, *group, *segment;
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "OOOOO!O!O!O!O!O!O!OK", &in_python, &finish, &lose, &await, &PyList_Type, &pending, &PySet_Type, &flights,
                          &PySet_Type, &threads, &PyType_Type, &ride, &PyType_Type, &lane, &PyType_Type, &group,
                          &PyType_Type, &segment, &probe, &address))
        return NULL;
    Known next = {.acquire = known.acquire, .release = known.release, .f_lasti = known.f_lasti};
    const struct {
        Py_ssize_t *at;
        PyTypeObject *type;
        const char *name;
    } slots[] = {
        {&next.quick, ride, "quick"},    {&next.op, ride, "op"},       {&next.issued, lane, "issued"},
        {&next.posted, lane, "posted"},  {&next.turn, lane, "turn"},   {&next.rounds, lane, "rounds"},
        {&next.calls, group, "calls"},   {&next.last, group, "last"},  {&next.lock, group, "lock"},
        {&next.kept_out, group, "turn"}, {&next.step, segment, "step"},
    };
    for (size_t i = 0; i < sizeof slots / sizeof *slots; i++)
        if ((*slots[i].at = find_slot(slots[i].type, slots[i].name)) < 0)
            return NULL;
    /* An array of float64 of the shape (2, 3), as Python describes it. */
    Array *array = (Array *)probe;
    int wrong = Py_TYPE(probe)->tp_basicsize < (Py_ssize_t)sizeof(Array) || array->data != (char *)(uintptr_t)address;
    wrong = wrong || array->nd != 2 || array->dimensions[0] != 2 || array->dimensions[1] != 3;
    wrong = wrong || (array->flags & CARRAY) != CARRAY || Py_TYPE(array->descr)->tp_basicsize < (Py_ssize_t)sizeof(Descr);
    const Descr *dtype = wrong ? NULL : (Descr *)array->descr;
    if (wrong || dtype->kind != 'f' || dtype->type != 'd' || dtype->byteorder != '=' || dtype->type_num != 12) {
        PyErr_SetString(PyExc_TypeError, "this NumPy's arrays are not laid out as those of NumPy 1 and 2");
        return NULL;
    }
    next.array = (PyTypeObject *)Py_NewRef((PyObject *)Py_TYPE(probe));
    next.in_python = Py_NewRef(in_python);
    next.finish = Py_NewRef(finish);
    next.lose = Py_NewRef(lose);
    next.await = Py_NewRef(await);
    next.pending = Py_NewRef(pending);
    next.flights = Py_NewRef(flights);
    next.threads = Py_NewRef(threads);
    next.ride = (PyTypeObject *)Py_NewRef((PyObject *)ride);
    next.lane = (PyTypeObject *)Py_NewRef((PyObject *)lane);
    next.group = (PyTypeObject *)Py_NewRef((PyObject *)group);
    next.segment = (PyTypeObject *)Py_NewRef((PyObject *)segment);
    known = next; /* what stood there before is kept: it is of modules, and of few of them */
    Py_RETURN_NONE;
}

/* ---- the call ---- */

static int64_t now(void)
{
    struct timespec at; /* the clock of time.monotonic_ns */
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (int64_t)at.tv_sec * 1000000000 + at.tv_nsec;
}

static int64_t *record(const Quick *quick, int rank, int place)
{
    return (int64_t *)(quick->records + rank * quick->part) + place * WORDS;
}

/* Where a member's elements stand. */
static char *elements(const Quick *quick, int rank, int place)
{
    return quick->elements + rank * quick->apart + place * quick->room;
}

static int64_t *counter(const Quick *quick, int rank)
{
    return (int64_t *)((char *)quick->data.buf + rank * quick->line);
}

/* Whether a number that another member writes comes to stand at a value or above it, looked for a while since ``began``. */
static int has_come(const int64_t *at, int64_t value, int64_t began, int64_t patience)
{
    for (int looks = 0; __atomic_load_n(at, __ATOMIC_ACQUIRE) < value; looks++) {
        if (looks == LOOKS_BETWEEN_CLOCKS) {
            looks = 0;
            if (now() - began > patience)
                return 0;
        }
        RELAX();
    }
    return 1;
}

/* Whether all others have posted a round (its number, at a place of the ring), or come to a step (place -1). */
static int have_all_come(const Quick *quick, int place, int64_t value, int64_t began)
{
    for (int rank = 0; rank < quick->size; rank++)
        if (rank != quick->me &&
            !has_come(place < 0 ? counter(quick, rank) : record(quick, rank, place), value, began, quick->patience))
            return 0;
    return 1;
}

static int do_all_say_the_same(const Quick *quick, int place)
{
    for (int rank = 0; rank < quick->size; rank++)
        if (rank != quick->me && memcmp(record(quick, rank, place) + BODY, quick->body, sizeof quick->body) != 0)
            return 0;
    return 1;
}

static char *memory(PyObject *array)
{
    return ((Array *)array)->data;
}

/* Bytes of the piece that begins at ``at``. */
static Py_ssize_t piece(const Quick *quick, Py_ssize_t at)
{
    return quick->nbytes - at < quick->width ? quick->nbytes - at : quick->width;
}

static void bring(const Quick *quick, int place, PyObject *send, Py_ssize_t at)
{
    char *to = elements(quick, quick->me, place);
    if (quick->send.arrays < 0)
        memcpy(to, memory(send) + at, quick->width < quick->nbytes ? piece(quick, at) : quick->brings);
    for (Py_ssize_t i = 0; i < quick->send.arrays; i++)
        memcpy(to + i * quick->nbytes, memory(PyList_GET_ITEM(send, i)), quick->nbytes);
}

/* What a member brings to a reduction. This one's may stand where the result goes, of which nothing is there after the second. */
static const char *term(const Quick *quick, int rank, int place, const char *into)
{
    return rank == quick->me && quick->in_place && rank < 2 ? into : elements(quick, rank, place) + quick->start;
}

/* Take the piece of the result that begins at ``at``. */
static void take(const Quick *quick, int place, PyObject *recv, Py_ssize_t at)
{
    char *into;
    Py_ssize_t many = piece(quick, at), count = quick->count ? many / (quick->nbytes / quick->count) : 0;
    switch (quick->take) {
    case REDUCE: /* in the order of the ranks */
        into = memory(recv) + at;
        if (quick->size == 1)
            memcpy(into, elements(quick, 0, place) + quick->start, many);
        for (int rank = 1; rank < quick->size; rank++)
            quick->reduce(into, rank == 1 ? term(quick, 0, place, into) : into, term(quick, rank, place, into),
                          count * quick->parts);
        if (quick->divide != NULL)
            quick->divide(into, count, quick->size);
        break;
    case COPY:
        memcpy(memory(recv) + at, elements(quick, quick->root, place) + quick->start, many);
        break;
    case ROWS:
        for (int rank = 0; rank < quick->size; rank++)
            memcpy(memory(recv) + rank * quick->nbytes, elements(quick, rank, place) + quick->start, quick->nbytes);
        break;
    case EACH:
        for (int rank = 0; rank < quick->size; rank++)
            memcpy(memory(PyList_GET_ITEM(recv, rank)), elements(quick, rank, place) + quick->start, quick->nbytes);
        break;
    default:
        break;
    }
}

/* ---- whether what a program passes is what the call was prepared for ---- */

/* Whether two dtypes are the same: those of arrays that came as bytes are other objects. Nothing of Python's runs here. */
static int is_same(PyObject *dtype, PyObject *wanted)
{
    const Descr *one = (Descr *)dtype, *other = (Descr *)wanted;
    if (dtype == wanted)
        return 1;
    return Py_TYPE(dtype) == Py_TYPE(wanted) && strchr("biufc", one->kind) != NULL && one->type_num == other->type_num &&
           one->byteorder == other->byteorder;
}

static int has(const Quick *quick, PyObject *given, Py_ssize_t count, int flags)
{
    if (!Py_IS_TYPE(given, known.array))
        return 0;
    const Array *array = (Array *)given;
    if ((array->flags & flags) != flags || !is_same(array->descr, quick->dtype))
        return 0;
    Py_ssize_t found = 1;
    for (int i = 0; i < array->nd; i++)
        found *= array->dimensions[i];
    return found == count;
}

static int fits(const Quick *quick, const Given *wanted, PyObject *given, int flags)
{
    if (wanted->arrays == 0) /* an array that is input on one member and output on another is passed as both */
        return given == Py_None || Py_IS_TYPE(given, known.array);
    if (wanted->arrays < 0)
        return has(quick, given, wanted->count, flags);
    if (!PyList_CheckExact(given) || PyList_GET_SIZE(given) != wanted->arrays)
        return 0;
    for (Py_ssize_t i = 0; i < wanted->arrays; i++) {
        PyObject *each = PyList_GET_ITEM(given, i);
        if (!has(quick, each, wanted->count, flags))
            return 0;
        const Array *array = (Array *)each;
        if (array->nd != wanted->nd[i])
            return 0;
        for (int j = 0; j < array->nd; j++)
            if (array->dimensions[j] != wanted->dimensions[i][j])
                return 0;
        if (flags == CARRAY) /* results go into memory of their own */
            for (Py_ssize_t j = 0; j < i; j++) {
                const char *other = memory(PyList_GET_ITEM(given, j));
                if (array->data < other + quick->nbytes && other < array->data + quick->nbytes)
                    return 0;
            }
    }
    return 1;
}

static PyObject *instruction(PyObject *frame)
{
#if PY_VERSION_HEX >= 0x030B0000
    return PyLong_FromLong(PyFrame_GetLasti((PyFrameObject *)frame));
#else
    return PyObject_GetAttr(frame, known.f_lasti);
#endif
}

/* (op, code, instruction) of the program's call. */
static PyObject *describe(PyObject *op, PyObject *frame)
{
    PyObject *place = PyTuple_New(3);
    PyObject *at = instruction(frame);
    if (place == NULL || at == NULL) {
        Py_XDECREF(place);
        Py_XDECREF(at);
        return NULL;
    }
    PyTuple_SET_ITEM(place, 0, Py_NewRef(op));
    PyTuple_SET_ITEM(place, 1, (PyObject *)PyFrame_GetCode((PyFrameObject *)frame));
    PyTuple_SET_ITEM(place, 2, at);
    return place;
}

/* Give a call up that is posted, where what goes on with it has raised before it could do so itself. */
static void lose(PyObject *const *args, int64_t call)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    PyObject *number = PyLong_FromLongLong(call), *done = NULL;
    /* A handler of a signal may raise as it begins, too. */
    for (int tries = 0; tries < 3 && number != NULL && done == NULL; tries++) {
        PyErr_Clear();
        done = PyObject_CallFunctionObjArgs(known.lose, args[0], args[1], args[4], number, value, NULL);
    }
    PyErr_Clear();
    if (done == NULL) { /* at the end of the stack, say: what can be done without a call */
        PyObject *why = PyUnicode_FromString("a call on it was struck, and could not be given up as usual");
        if (why == NULL || PyObject_SetAttrString(args[0], "broken", why) < 0)
            PyErr_Clear();
        Py_XDECREF(why);
    }
    Py_XDECREF(number);
    Py_XDECREF(done);
    PyErr_Restore(type, value, traceback);
}

static const char CHANGED[] = "the arrays of a call were changed while it waited for the others";

/* How far a call has come that moves in pieces. */
typedef struct {
    int64_t step, wanted; /* what this member has come to, and what it waits for others to come to */
    Py_ssize_t at;
    enum { WRITES, AWAITS, TAKES } next; /* of the piece at ``at`` */
} Progress;

/* Whether those have come to a step of which this member reads. */
static int are_sources_there(const Quick *quick, int64_t step)
{
    if (quick->take == COPY)
        return has_come(counter(quick, quick->root), step, now(), quick->patience);
    return have_all_come(quick, -1, step, now());
}

/* Move on as far as the others are; whether all is done. The steps are those of the node engine (mpicoll/transports/shm/transport.py). */
static int go_on(const Quick *quick, PyObject *send, PyObject *recv, Progress *progress)
{
    for (;;)
        switch (progress->next) {
        case TAKES:
            take(quick, (int)(progress->step & 1), recv, progress->at);
            progress->at += quick->width;
            if (progress->at >= quick->nbytes)
                return 1;
            progress->next = WRITES; /* fall through */
        case WRITES:
            progress->wanted = progress->step;
            if (quick->send.arrays) {
                if (!have_all_come(quick, -1, progress->step, now()))
                    return 0;
                bring(quick, (int)((progress->step + 1) & 1), send, progress->at);
                __atomic_thread_fence(__ATOMIC_SEQ_CST); /* much is copied by stores that others may pass */
            }
            progress->step++;
            __atomic_store_n(counter(quick, quick->me), progress->step, __ATOMIC_RELEASE);
            progress->next = AWAITS; /* fall through */
        case AWAITS:
            progress->wanted = progress->step;
            if (quick->recv.arrays && !are_sources_there(quick, progress->step))
                return 0;
            progress->next = TAKES;
        }
}

/* Take the first piece of a call whose round is over, and move the others. -1: what is waited for does not come, and an exception. */
static int in_pieces(PyObject *const *args, Quick *quick, int64_t step)
{
    Progress progress = {.step = step, .next = TAKES};
    PyObject *send = args[2], *recv = args[3];
    for (;;) {
        int over;
        Py_BEGIN_ALLOW_THREADS
        over = go_on(quick, send, recv, &progress);
        Py_END_ALLOW_THREADS
        PyObject *now_at = PyLong_FromLongLong(progress.step);
        if (now_at == NULL)
            return -1;
        Py_XSETREF(SLOT(quick->segment, known.step), now_at);
        if (over)
            return 0;
        PyObject *wanted = PyLong_FromLongLong(progress.wanted);
        if (wanted == NULL)
            return -1;
        PyObject *who = progress.next == AWAITS && quick->take == COPY ? Py_True : Py_False;
        PyObject *waited = PyObject_CallFunctionObjArgs(known.await, args[0], args[1], args[4], wanted, who, NULL);
        Py_DECREF(wanted);
        if (waited == NULL)
            return -1;
        Py_DECREF(waited);
        if (!fits(quick, &quick->send, send, READABLE) || !fits(quick, &quick->recv, recv, CARRAY)) {
            PyErr_SetString(PyExc_ValueError, CHANGED);
            return -1;
        }
    }
}

/* The rest of a call that is made in pieces, after a round for which Python has waited. */
static PyObject *rest(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    Quick *quick = count == 5 && known.ride != NULL && PyObject_TypeCheck(args[1], known.ride)
                       ? (Quick *)SLOT(args[1], known.quick) : NULL;
    if (quick == NULL || !Py_IS_TYPE((PyObject *)quick, &QuickType) || quick->width >= quick->nbytes ||
        !fits(quick, &quick->send, args[2], READABLE) || !fits(quick, &quick->recv, args[3], CARRAY)) {
        PyErr_SetString(PyExc_ValueError, CHANGED);
        return NULL;
    }
    int64_t step = PyLong_AsLongLong(SLOT(quick->segment, known.step));
    if (step == -1 && PyErr_Occurred())
        return NULL;
    Py_INCREF(quick);
    int failed = in_pieces(args, quick, step);
    Py_DECREF(quick);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

/* With the group's lock held. A new reference to True or False, or NULL.

   From fits() to take() nothing runs but what stands here: nothing is allocated that Python's search for cycles counts, and nothing
   is let go that may have a destructor. */
static PyObject *make(PyObject *const *args, Quick *quick, PyObject *said, PyObject **old)
{
    PyObject *group = args[0], *send = args[2], *recv = args[3];
    PyObject *lane = quick->lane, *segment = quick->segment;
    int64_t call = PyLong_AsLongLong(SLOT(lane, known.issued));
    int64_t turn = PyLong_AsLongLong(SLOT(lane, known.turn));
    int64_t number = PyLong_AsLongLong(SLOT(lane, known.rounds)) + 1;
    int64_t calls = PyLong_AsLongLong(SLOT(group, known.calls));
    int64_t step = segment == NULL ? 0 : PyLong_AsLongLong(SLOT(segment, known.step));
    if (PyErr_Occurred())
        return NULL;
    if (call != turn || PyList_GET_SIZE(known.pending) != 0 || PySet_GET_SIZE(known.flights) != 0 ||
        SLOT(group, known.kept_out) != Py_None)
        Py_RETURN_FALSE;
    if (!fits(quick, &quick->send, send, READABLE) || !fits(quick, &quick->recv, recv, CARRAY))
        Py_RETURN_FALSE;
    if (segment != NULL && !have_all_come(quick, -1, step, now())) /* somebody may still read what stood there */
        Py_RETURN_FALSE;
    unsigned long thread = PyThread_get_thread_ident();
    if (quick->thread != thread) {
        PyObject *ident = PyLong_FromUnsignedLong(thread);
        if (ident == NULL || PySet_Add(known.threads, ident) < 0) {
            Py_XDECREF(ident);
            return NULL;
        }
        Py_DECREF(ident);
        quick->thread = thread;
    }
    /* All that can fail is made before anything is said. */
    PyObject *next = PyLong_FromLongLong(call + 1), *round = PyLong_FromLongLong(number), *count = PyLong_FromLongLong(calls + 1);
    PyObject *stepped = PyLong_FromLongLong(step + 1), *done = NULL;
    if (next == NULL || round == NULL || count == NULL || stepped == NULL)
        goto end;
    int place = (int)(number & (quick->ring - 1)), which = segment == NULL ? place : (int)((step + 1) & 1);
    int64_t *words = record(quick, quick->me, place);
    memcpy(words + BODY, quick->body, sizeof quick->body);
    bring(quick, which, send, 0);
    if (segment != NULL)
        __atomic_thread_fence(__ATOMIC_SEQ_CST); /* much is copied by stores that others may pass */
    int64_t began = words[TIME] = now();
    __atomic_store_n(words, number, __ATOMIC_RELEASE); /* from here on the others may go on */
    Py_XSETREF(SLOT(lane, known.issued), Py_NewRef(next));
    Py_XSETREF(SLOT(lane, known.rounds), Py_NewRef(round));
    Py_XSETREF(SLOT(group, known.calls), Py_NewRef(count));
    *old = SLOT(group, known.last); /* it may be the last that knows of a function of the program's */
    SLOT(group, known.last) = Py_NewRef(said);
    if (have_all_come(quick, place, number, began) && do_all_say_the_same(quick, place) && quick->take != IN_PYTHON) {
        if (segment != NULL) {
            Py_XSETREF(SLOT(segment, known.step), Py_NewRef(stepped));
            __atomic_store_n(counter(quick, quick->me), step + 1, __ATOMIC_RELEASE);
        }
        Py_XSETREF(SLOT(lane, known.posted), Py_NewRef(next));
        Py_XSETREF(SLOT(lane, known.turn), Py_NewRef(next));
        if (quick->width < quick->nbytes)
            done = in_pieces(args, quick, step + 1) < 0 ? NULL : Py_NewRef(Py_True);
        else {
            take(quick, which, recv, 0);
            done = Py_NewRef(Py_True);
        }
    } else {
        done = PyObject_Vectorcall(known.finish, args, 5, NULL);
        if (done == NULL)
            lose(args, call);
        goto end;
    }
    if (done == NULL)
        lose(args, call + 1);
end:
    Py_XDECREF(next);
    Py_XDECREF(round);
    Py_XDECREF(count);
    Py_XDECREF(stepped);
    return done;
}

static PyObject *ride(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (count != 5 || known.group == NULL || !PyObject_TypeCheck(args[0], known.group) ||
        !PyObject_TypeCheck(args[1], known.ride) || !PyFrame_Check(args[4])) {
        PyErr_SetString(PyExc_TypeError, "ride(group, known, send, recv, frame)");
        return NULL;
    }
    Quick *quick = (Quick *)SLOT(args[1], known.quick);
    if (quick == NULL || !Py_IS_TYPE((PyObject *)quick, &QuickType))
        return PyObject_Vectorcall(known.in_python, args, count, NULL);
    PyObject *lock = SLOT(args[0], known.lock), *made = NULL, *old = NULL;
    PyObject *said = describe(SLOT(args[1], known.op), args[4]);
    PyObject *done = said == NULL ? NULL : PyObject_CallMethodNoArgs(lock, known.acquire);
    if (done == NULL) {
        Py_XDECREF(said);
        return NULL;
    }
    Py_DECREF(done);
    Py_INCREF(quick); /* the group may drop its prepared calls meanwhile */
    made = make(args, quick, said, &old);
    PyObject *type = NULL, *value = NULL, *traceback = NULL;
    if (made == NULL)
        PyErr_Fetch(&type, &value, &traceback);
    done = PyObject_CallMethodNoArgs(lock, known.release);
    if (done == NULL) {
        Py_XDECREF(made);
        made = NULL;
    } else
        Py_DECREF(done);
    if (type != NULL)
        PyErr_Restore(type, value, traceback);
    Py_DECREF(quick);
    Py_DECREF(said);
    Py_XDECREF(old);
    return made;
}

/* ---- larger movements of the node engine, in pieces: mpicoll/transports/shm/transport.py ---- */

/* A block of bytes that this member writes for others, or reads from one. */
typedef struct {
    Py_buffer memory;
    int rank;          /* whose buffer it is in */
    Py_ssize_t at;     /* where in it */
} Block;

typedef struct {
    PyObject_HEAD
    Py_buffer data;            /* of the segment */
    char *elements;            /* the buffer of member 0 of the even steps */
    Py_ssize_t apart, room, line;
    int me, size;
    int64_t step, wanted;      /* what this member has come to, and what it waits for others to come to */
    Py_ssize_t total, width, done; /* bytes */
    int has_written;           /* the piece at ``done``: it is the others' turn */
    Block *blocks;
    Py_ssize_t writes, reads;  /* blocks of each kind, in this order */
    Reduce reduce;             /* NULL: what is read is copied */
    Py_ssize_t part;           /* bytes of what is reduced as one */
    int64_t patience;
} Mover;

static void mover_free(Mover *self)
{
    for (Py_ssize_t i = 0; i < self->writes + self->reads; i++)
        PyBuffer_Release(&self->blocks[i].memory);
    self->writes = self->reads = 0;
    PyMem_Free(self->blocks);
    self->blocks = NULL;
    if (self->data.obj != NULL)
        PyBuffer_Release(&self->data);
}

static void mover_dealloc(Mover *self)
{
    mover_free(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int block_init(Block *block, PyObject *given, int flags)
{
    PyObject *memory;
    if (!PyTuple_Check(given)) {
        PyErr_SetString(PyExc_TypeError, "a block is a tuple: whose buffer, where in it, the memory");
        return -1;
    }
    if (!PyArg_ParseTuple(given, "inO", &block->rank, &block->at, &memory))
        return -1;
    return PyObject_GetBuffer(memory, &block->memory, flags);
}

static int mover_init(Mover *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"data", "first", "apart", "room", "places", "line", "me", "size", "step", "total", "width",
                            "writes", "reads", "reduction", "itemsize", "patience", NULL};
    PyObject *data, *writes, *reads;
    const char *reduction;
    Py_ssize_t first, itemsize;
    int places;
    long long step, patience;
    if (self->data.obj != NULL) {
        PyErr_SetString(PyExc_TypeError, "a movement is made once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OnnniniiLnnO!O!snL", names, &data, &first, &self->apart, &self->room,
                                     &places, &self->line, &self->me, &self->size, &step, &self->total, &self->width,
                                     &PyList_Type, &writes, &PyList_Type, &reads, &reduction, &itemsize, &patience))
        return -1;
    if (PyObject_GetBuffer(data, &self->data, PyBUF_SIMPLE | PyBUF_WRITABLE) < 0)
        return -1;
    Py_ssize_t many = PyList_GET_SIZE(writes) + PyList_GET_SIZE(reads);
    self->blocks = PyMem_Calloc(many + 1, sizeof *self->blocks);
    if (self->blocks == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (; self->writes < PyList_GET_SIZE(writes); self->writes++)
        if (block_init(&self->blocks[self->writes], PyList_GET_ITEM(writes, self->writes), PyBUF_SIMPLE) < 0)
            return -1;
    for (; self->reads < PyList_GET_SIZE(reads); self->reads++)
        if (block_init(&self->blocks[self->writes + self->reads], PyList_GET_ITEM(reads, self->reads), PyBUF_WRITABLE) < 0)
            return -1;
    int wrong = self->size < 1 || self->me < 0 || self->me >= self->size || places != 2 || self->room < 0 || first < 0;
    wrong |= self->line < 8 || self->line * self->size > first || self->apart < 2 * self->room || itemsize <= 0;
    wrong |= first + self->size * self->apart > self->data.len || self->width <= 0 || self->total < 0;
    for (Py_ssize_t i = 0; i < many; i++) {
        const Block *block = &self->blocks[i];
        Py_ssize_t most = block->memory.len < self->width ? block->memory.len : self->width;
        wrong |= block->rank < 0 || block->rank >= self->size || block->at < 0 || block->at + most > self->room;
    }
    self->part = itemsize;
    if (*reduction) {
        for (size_t i = 0; i < sizeof TABLE / sizeof *TABLE; i++)
            if (strcmp(TABLE[i].name, reduction) == 0 && itemsize % TABLE[i].parts == 0) {
                self->reduce = TABLE[i].reduce;
                self->part = itemsize / TABLE[i].parts;
            }
        /* Each result has the elements of all, this member's own among them, which stand in it. */
        wrong |= self->reduce == NULL || self->writes > 1 || self->reads > 1 || itemsize <= 0 || self->width % itemsize;
        for (Py_ssize_t i = 0; i < many; i++)
            wrong |= self->blocks[i].at != 0 || self->blocks[i].memory.len != self->total;
    }
    if (wrong) {
        PyErr_SetString(PyExc_ValueError, "a movement does not fit into its memory");
        return -1;
    }
    self->elements = (char *)self->data.buf + first;
    self->step = step;
    self->patience = patience;
    return 0;
}

static int64_t *stand(const Mover *self, int rank)
{
    return (int64_t *)((char *)self->data.buf + rank * self->line);
}

static char *buffer(const Mover *self, int rank, int64_t step)
{
    return self->elements + rank * self->apart + (step & 1) * self->room;
}

static int have_all_others(const Mover *self, int64_t step)
{
    int64_t began = now();
    for (int rank = 0; rank < self->size; rank++)
        if (rank != self->me && !has_come(stand(self, rank), step, began, self->patience))
            return 0;
    return 1;
}

/* Whether those have come to a step of which this member reads. */
static int have_sources(const Mover *self, int64_t step)
{
    int64_t began = now();
    for (Py_ssize_t i = self->writes; i < self->writes + self->reads; i++)
        if (!has_come(stand(self, self->blocks[i].rank), step, began, self->patience))
            return 0;
    return 1;
}

/* Bytes of a block in the piece at ``done``. */
static Py_ssize_t in_piece(const Mover *self, const Block *block)
{
    Py_ssize_t left = block->memory.len - self->done;
    return left < 0 ? 0 : left < self->width ? left : self->width;
}

static void write_piece(const Mover *self, int64_t step)
{
    for (Py_ssize_t i = 0; i < self->writes; i++) {
        const Block *block = &self->blocks[i];
        Py_ssize_t many = in_piece(self, block);
        if (many)
            memcpy(buffer(self, self->me, step) + block->at, (char *)block->memory.buf + self->done, many);
    }
}

static void read_piece(const Mover *self)
{
    for (Py_ssize_t i = self->writes; i < self->writes + self->reads; i++) {
        const Block *block = &self->blocks[i];
        Py_ssize_t many = in_piece(self, block);
        char *into = (char *)block->memory.buf + self->done;
        if (self->reduce == NULL) {
            if (many)
                memcpy(into, buffer(self, block->rank, self->step) + block->at, many);
            continue;
        }
        for (int rank = 1; rank < self->size; rank++) { /* in the order of the ranks; this member's own stand in the result */
            const char *one = rank > 1 || self->me == 0 ? into : buffer(self, 0, self->step);
            const char *other = rank == 1 && self->me == 1 ? into : buffer(self, rank, self->step);
            self->reduce(into, one, other, many / self->part);
        }
    }
}

/* Move on as far as the others are; whether all is done. */
static int move_on(Mover *self)
{
    while (self->done < self->total) {
        if (!self->has_written) {
            self->wanted = self->step;
            if (self->writes && !have_all_others(self, self->step))
                return 0;
            write_piece(self, self->step + 1);
            __atomic_thread_fence(__ATOMIC_SEQ_CST); /* much is copied by stores that others may pass */
            self->step++;
            self->has_written = 1;
            __atomic_store_n(stand(self, self->me), self->step, __ATOMIC_RELEASE);
        }
        if (self->reads) {
            self->wanted = self->step;
            if (!(self->reduce != NULL ? have_all_others(self, self->step) : have_sources(self, self->step)))
                return 0;
            read_piece(self);
        }
        self->has_written = 0;
        self->done += self->width;
    }
    return 1;
}

static PyObject *mover_go(Mover *self, PyObject *nothing)
{
    int over;
    if (self->elements == NULL) {
        PyErr_SetString(PyExc_ValueError, "the movement was not made");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    over = move_on(self);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(over);
}

static PyMethodDef mover_methods[] = {
    {"go", (PyCFunction)mover_go, METH_NOARGS,
     "Move on as far as the others are. Returns whether all is done; else they have to come to the step ``wanted``."},
    {NULL},
};

static PyMemberDef mover_members[] = {
    {"step", T_LONGLONG, offsetof(Mover, step), READONLY, "The step that this member has come to."},
    {"wanted", T_LONGLONG, offsetof(Mover, wanted), READONLY, "The step that others have to come to."},
    {"has_written", T_INT, offsetof(Mover, has_written), READONLY,
     "Whether it waits for those that it reads from; else for all that have read from it."},
    {NULL},
};

static PyTypeObject MoverType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpicoll._riding.Mover",
    .tp_basicsize = sizeof(Mover),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "One movement of the node engine, as this member makes it.",
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)mover_init,
    .tp_dealloc = (destructor)mover_dealloc,
    .tp_methods = mover_methods,
    .tp_members = mover_members,
};

/* Whether an array can be moved as it is by a message that was prepared: its dtype, its shape, one piece of memory. */
static PyObject *matches(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (count != 4 || !PyTuple_Check(args[2]) || known.array == NULL) {
        PyErr_SetString(PyExc_TypeError, "matches(tensor, dtype, shape, writes)");
        return NULL;
    }
    const Array *array = (Array *)args[0];
    const int flags = args[3] == Py_True ? CARRAY : READABLE;
    if (!Py_IS_TYPE(args[0], known.array) || (array->flags & flags) != flags || array->descr != args[1] ||
        array->nd != PyTuple_GET_SIZE(args[2]))
        Py_RETURN_FALSE;
    for (int i = 0; i < array->nd; i++)
        if (PyLong_AsSsize_t(PyTuple_GET_ITEM(args[2], i)) != array->dimensions[i]) {
            PyErr_Clear();
            Py_RETURN_FALSE;
        }
    Py_RETURN_TRUE;
}

static PyObject *knows(PyObject *module, PyObject *reduction)
{
    const char *wanted = PyUnicode_AsUTF8(reduction);
    if (wanted == NULL)
        return NULL;
    for (size_t i = 0; i < sizeof TABLE / sizeof *TABLE; i++)
        if (strcmp(TABLE[i].name, wanted) == 0)
            Py_RETURN_TRUE;
    Py_RETURN_FALSE;
}

static PyMethodDef methods[] = {
    {"knows", knows, METH_O, "Whether a reduction is one of those that are made here: \"SUM f8\"."},
    {"prepare", prepare, METH_VARARGS, "Take what the call needs of the rest of the library, and see that it is as expected."},
    {"matches", (PyCFunction)(void (*)(void))matches, METH_FASTCALL, "As mpicoll.operations.persistent.matches_in_python."},
    {"rest", (PyCFunction)(void (*)(void))rest, METH_FASTCALL, "Move what is left of a call that is made in pieces; as ride."},
    {"ride", (PyCFunction)(void (*)(void))ride, METH_FASTCALL, "Make a small call again: as mpicoll.operations.riding.ride_in_python."},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "mpicoll._riding",
    .m_doc = "Small calls that are made again, without the interpreter.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__riding(void)
{
    known.acquire = PyUnicode_InternFromString("acquire");
    known.release = PyUnicode_InternFromString("release");
    known.f_lasti = PyUnicode_InternFromString("f_lasti");
    if (known.acquire == NULL || known.release == NULL || known.f_lasti == NULL || PyType_Ready(&QuickType) < 0 ||
        PyType_Ready(&MoverType) < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    if (PyModule_AddObjectRef(module, "Quick", (PyObject *)&QuickType) < 0 ||
        PyModule_AddObjectRef(module, "Mover", (PyObject *)&MoverType) < 0 ||
        PyModule_AddStringConstant(module, "VERSION", VERSION) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
