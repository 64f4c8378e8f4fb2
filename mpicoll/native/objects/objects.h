/* The objects of mpicoll._native, and the functions that several of their files use. */

#ifndef MPICOLL_OBJECTS_H
#define MPICOLL_OBJECTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <frameobject.h>
#include <structmember.h>
#include <stdint.h>
#include <string.h>

#include "../copy.h"
#include "../poll.h"
#include "../half.h"
#include "../reduce.h"
#include "../ring.h"
#include "../segment.h"

enum { C_CONTIGUOUS = 0x1, READABLE = 0x101, WRITABLE = 0x501 }; /* NumPy's flags: C-contiguous; and aligned; and writeable */

enum { SNAPSHOT_BYTES = 64 * 1024 }; /* the largest memory that is compared as a whole, to find writes of the program */

/* The head of an ndarray, which NumPy's own macros read in every extension module. check_arrays() compares it with an array. */
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

/* The head of a dtype, which has been the same since NumPy 1. check_arrays() compares it, too. */
typedef struct {
    PyObject_HEAD
    PyObject *typeobj;
    char kind, type, byteorder, flags;
    int type_num;
} Descr;

/* ---- the objects, each in a file of its name ---- */

typedef struct {
    PyObject_HEAD
    int64_t issued, posted, moving, round, calls;
    int closed;
} CallOrder;

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    Ring ring;
} RingObject;

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    Segment segment;
} SegmentObject;

typedef struct {
    PyObject_HEAD
    SegmentObject *segment;
    Transfer transfer;
    Py_buffer *held; /* the memory that the transfer reads and writes */
    Py_ssize_t holds;
    int is_running;  /* in a thread that has released the interpreter lock */
} TransferObject;

#define REQUEST_FIELDS(_) \
    _(group) _(_call) _(prepared) _(schedule) _(claim) _(words) _(outputs) _(peer) _(held) _(state) _(round) _(agreed) _(error) \
    _(returned) _(future) _(landing) _(_transfer) _(steps) _(_current) _(_lock) _(send) _(recv) _(arrays) _(spread) _(code) _(name) \
    _(made) _(before) _(after) _(wrong) _(move) _(unpack) _(plan) _(into)

#define FIELD(name) REQUEST_##name,
enum { REQUEST_FIELDS(FIELD) REQUEST_OBJECTS };
#undef FIELD

typedef struct SharedOperation SharedOperation;

typedef struct {
    PyObject_HEAD
    PyObject *objects[REQUEST_OBJECTS]; /* NULL: None */
    SharedOperation *shared; /* of a call that begin() has posted and finish() may complete; else NULL */
    int64_t posted_round;    /* by begin() */
    int64_t number, seq, tag, instruction;
    double limit, polled, next_look;
    char waited, awaited, told, in_effect, advancing;
} Request;

#define MESSAGE_FIELDS(_) \
    _(request) _(start) _(test) _(buffer) _(words) _(elements) _(payloads) _(code) _(described) _(rank) _(tag) _(shape) _(dtype) \
    _(packed) _(key) _(acquire) _(release) _(posted) _(waiting) _(queues) _(current) _(polls) _(instruction) _(count) _(_datatype) _(_make) _(_post)

#define FIELD(name) MESSAGE_##name,
enum { MESSAGE_FIELDS(FIELD) MESSAGE_OBJECTS };
#undef FIELD

typedef struct {
    PyObject_HEAD
    PyObject *objects[MESSAGE_OBJECTS];
    int64_t peer, begun, spins, expected;
    Py_ssize_t inside; /* bytes of the elements in the envelope; -1: the elements move apart */
    Py_ssize_t nbytes; /* of the elements */
    unsigned long thread; /* that started the message last */
    char compares, taken;
} Message;

enum Result { NOTHING, REDUCED, COPIED, ROWS, LIST, EXCHANGED };

/* The arrays that a member passes, or that its result goes to. */
typedef struct {
    Py_ssize_t arrays; /* 0: none; -1: one, in no list */
    Py_ssize_t count;  /* elements of all arrays */
    Py_ssize_t *counts; /* elements of each in a list */
    int *nd;
    Py_ssize_t **dimensions; /* of each in a list: one piece of memory */
} Given;

struct SharedOperation {
    PyObject_HEAD
    RingObject *ring;
    SegmentObject *segment; /* NULL: the data stands beside the records */
    CallOrder *order;
    PyObject *acquire, *release; /* of the lock of the group */
    PyObject *op;
    PyObject *dtype;
    PyObject *given_words; /* `words` in a tuple */
    int64_t words[RING_SAID];
    Py_ssize_t itemsize;
    Py_ssize_t sends;         /* bytes that this member writes */
    Py_ssize_t offset, block; /* bytes: where that begins what this member reads of the data of another, and its length */
    Py_ssize_t width;         /* bytes of a piece; `block` if the call has one piece only */
    int copies_once;          /* blocks move from process to process, and in pieces where the kernel does not copy them */
    int parts;                /* of a call of items of any length: how many a member sends, bytes objects or, if EXCHANGED, arrays; else 0 */
    Py_ssize_t place;         /* bytes between the pieces for two members in the buffer of a member that sends each another block; else 0: items
                                 of an exchange have to stand in the data of a member */
    Block *blocks;            /* room for two blocks a member */
    int64_t announced;        /* shared_places() of the last call */
    int root;
    enum Result result;
    int in_place; /* the terms of this member stand where the result goes */
    const Reduction *reduction;
    int average;
    Given send, recv;
    int64_t budget; /* nanoseconds of polling for others before Python waits */
    unsigned long thread;
};

/* ---- what the module knows of the rest of the library ---- */

typedef struct {
    PyObject *finish, *withdraw, *await; /* of operations/dispatch.py: continue a posted call, give a call up, wait in the midst of one */
    PyObject *pending, *claims, *reusable, *dropped, *threads, *observers;
    PyObject *inside; /* threads that wait in a call: a call that they make is one of a signal handler, which Python refuses */
    PyObject *main_number;
    unsigned long main; /* of the main thread */
    PyObject *request, *lock, *claim;          /* types */
    PyObject *posted, *complete;               /* states */
    PyObject *at_once, *eager;                 /* schedules of a call whose data comes with its round: beside the record; in the segment */
    PyObject *send, *receive, *moving;         /* the types of the requests of messages, and their state */
    PyTypeObject *array;
    PyObject *last, *broken, *busy, *number, *of_claim, *reads, *verdict, *found, *start, *end, *f_lasti, *timeout; /* names */
    PyObject *start_mpi, *test_mpi;            /* names of the methods of mpi4py */
    PyObject *payload_of;                      /* name of a method of messages in Python */
    PyObject *acquire, *release;               /* and of those of a lock */
    PyObject *warn_of_threads;                 /* and of one of a group */
    PyObject *of_array, *does_write;           /* names of the fields of a claim */
    PyObject *writes, *nothing;                /* a name in a tuple, and an empty one */
    PyObject *run_cached, *frame;              /* in Python: the function that makes any call, and sys._getframe */
    PyObject *default_group;                   /* its attribute `world` is the group of calls without group= */
    PyObject *prepared, *shared, *world, *one; /* names, and the number */
} Known;

extern Known known;

/* ---- what several files use ---- */

/* Whether the extension moves all data of a call in several steps. */
static inline int is_in_steps(const SharedOperation *self)
{
    return self->copies_once || self->width < self->block;
}

extern PyTypeObject MessageType, OrderType, RingType, SegmentType, TransferType, RequestType, SharedOperationType;

static inline int is_made(const void *base, const char *what)
{
    if (base == NULL)
        PyErr_Format(PyExc_ValueError, "the %s was not made", what);
    return base != NULL;
}

static inline char *memory(PyObject *array)
{
    return ((Array *)array)->data;
}

/* Parse the words of a round; return 0 and set an exception if they are none. */
int ring_parse_words(PyObject *given, int64_t words[RING_SAID]);

/* Memory that a call is about to use. */
typedef struct {
    const char *start;
    Py_ssize_t bytes;
    const Array *array; /* all of it; NULL: of several arrays */
    int writes;         /* 0: an array is only read */
} Use;

/* Return whether memory is certainly apart from that of all claims; 0: Python has to compare. -1 and an exception: out of memory. */
int claims_are_apart(const Use *use);
/* Add or remove a claim of such memory; return -1 and an exception without memory. */
int claims_add(PyObject *claim, const char *start, Py_ssize_t bytes);
int claims_remove(PyObject *claim);

PyObject *request_new(PyTypeObject *type, PyObject *args, PyObject *kwargs);
PyObject *request_finish(Request *self, PyObject *nothing);
PyObject *message_move(Message *self, PyObject *const *args, Py_ssize_t count);
/* Return whether finish() may complete a request of a state: nothing else is to be done at its end, and its group is not broken. -1 and
   an exception if that cannot be found out. */
int request_may_finish(const Request *self, PyObject *state);

static inline int is_none(PyObject *given)
{
    return given == NULL || given == Py_None;
}

/* Set a field of a request. */
static inline void request_set(Request *request, int field, PyObject *value)
{
    PyObject *old = request->objects[field];
    request->objects[field] = Py_XNewRef(value);
    Py_XDECREF(old);
}

/* Set a field to a new reference, which is taken over; return 0 if there is none, as an exception is set. */
static inline int request_give(Request *request, int field, PyObject *value)
{
    request_set(request, field, value);
    Py_XDECREF(value);
    return value != NULL;
}

/* Set the claim of a request: the memory that the call uses until the program has waited for it. Return 0 and an exception without. */
int request_claim(Request *request, PyObject *claim);
/* Make a claim of one array; return NULL and an exception without memory. */
PyObject *claim_of(PyObject *array, int writes);
/* Release a request that is not started: its claim refers to it. */
void request_discard(Request *request);
/* Add the claim of a request, if it has one, to those of the process; return -1 and an exception without memory. */
int request_add_claim(Request *request, const char *start, Py_ssize_t bytes);
/* Remove the claim of a request, and the request from the pending ones; return -1 and an exception if that fails. */
int request_release(Request *request);
/* Remove an item from a list, if it is there; return -1 and an exception if that fails. */
int drop_item(PyObject *list, PyObject *item);

/* Return whether an object is an array with these flags, this very dtype, and the shape in a tuple of integers. */
int array_matches(PyObject *given, PyObject *dtype, PyObject *shape, int flags);

/* The elements of a message in its envelope, which stand behind two words. */
static inline char *message_elements(const Message *self)
{
    return memory(self->objects[MESSAGE_buffer]) + 2 * sizeof(int64_t);
}

static inline int message_receives(const Message *self)
{
    return !is_none(self->objects[MESSAGE_posted]);
}

static inline int message_is_apart(const Message *self)
{
    return self->inside < 0;
}

static inline int is_contiguous(PyObject *array)
{
    return (((Array *)array)->flags & C_CONTIGUOUS) != 0;
}

/* Return whether a message can move an array of the program, where it stands or through memory of the message. */
int message_fits(const Message *self, PyObject *given);
/* Where the memory of an array stands, for the claims. */
Use message_use(const Message *self, PyObject *array);
/* Copy the elements of a send to memory of the message; nothing if they move from where they stand. */
void message_pack(const Message *self, PyObject *array);
/* Copy the elements of a receive from memory of the message, if they came in the envelope or, `packed`, to memory beside it. */
void message_unpack(const Message *self, PyObject *array, int packed);
/* Return whether an array has the elements that message_pack() has copied. */
int message_is_as_packed(const Message *self, PyObject *array);

/* The arguments of begin() and move(): the group only for begin(). */
enum { MESSAGE_ARRAY, MESSAGE_CODE, MESSAGE_INSTRUCTION, MESSAGE_GROUP, MESSAGE_ARGUMENTS };

/* Return whether the request of MPI may be started now: no other call has it, and no other receive may get its message. -1 and an exception
   if that cannot be found out. */
int message_is_free(const Message *self, PyObject *const *args, int64_t instruction);
/* Return the persistent request of the elements of an array, which move apart; NULL: Python has to make it, or an exception is set. */
PyObject *message_payload(const Message *self, PyObject *array);
/* Return the contents of an array, to find writes of the program; NULL and an exception without memory. */
PyObject *message_contents(const Message *self, PyObject *array);
/* Return whether an array that fits has other contents than message_contents() has returned. */
int message_is_changed(const Message *self, PyObject *array, PyObject *held);
/* Acquire the lock under which such messages are posted. Return 1, 0 if another thread has it, or -1 and an exception. */
int message_lock(const Message *self);
/* Release the lock; an exception that is set stays. */
void message_unlock(const Message *self);
/* Note the call site of a receive. */
void message_note_site(Message *self, PyObject *const *args);
/* Copy the elements that are sent in the envelope, and start the requests of MPI: of the message, and of elements that are sent apart.
   Return -1 and an exception if MPI fails. */
int message_post(Message *self, PyObject *const *args, PyObject *payload);
/* Call a method of a request of MPI without arguments. Return -1 and an exception if MPI fails, 1 if the result is True, or else 0. */
int call_mpi(PyObject *request, PyObject *name);
/* Complete the request of a message that the extension has started. Return 1; 0 if the message is not complete, not as expected, or if
   the program has written the array: Python goes on from there; or -1 and an exception. */
int message_finish(Request *request);
int is_message(PyObject *held);

/* Take the lock of the group; return -1 and an exception if that fails. If another thread has the lock, the group may warn. */
int shared_take_lock(SharedOperation *self, PyObject *group);

/* Make `given` from None, the shape of an array, or a list of shapes; return -1 and an exception if it is none of them. */
int shared_given_init(Given *given, PyObject *shapes);
void shared_given_free(Given *given);
/* Whether two dtypes are the same. Those of arrays that were unpickled are other objects. No code of Python runs here. */
int shared_is_same_dtype(PyObject *dtype, PyObject *wanted);
/* Return whether what a program passes is what the call was prepared for. No code of Python runs here. */
int shared_fits(const SharedOperation *self, const Given *wanted, PyObject *given, int flags);
#define SHARED_CHANGED "the arrays of a call were changed while it waited for the others"

/* The arrays of a call, of which one is sampled. */
typedef struct {
    Py_ssize_t bytes, arrays;
} Together;

/* The bytes that are held of memory to compare later: all, or a sample of both ends and places in between. */
Py_ssize_t contents_size(Py_ssize_t bytes, Together all);
/* Copy these bytes, and return how many they are. */
Py_ssize_t contents_copy(char *to, const char *data, Py_ssize_t bytes, Together all);
int contents_differ(const char *held, const char *data, Py_ssize_t bytes, Together all);
/* Return whether such arrays have other contents than contents() has returned; None for arrays that only Python can read. */
PyObject *differ(PyObject *module, PyObject *const *args, Py_ssize_t count);
/* Set how many places are sampled, in a tuple of rules: one place for so many bytes, but at most so many places. */
PyObject *set_places(PyObject *module, PyObject *rules);
/* Return the bytes of an array of NumPy or of each in a list, in one bytes object; None for arrays that only Python can read. */
PyObject *contents(PyObject *module, PyObject *arrays);

/* Where the memory of such arrays begins, and the bytes up to its end; NULL and 0 without arrays. */
const char *shared_span(const SharedOperation *self, const Given *arrays, PyObject *given, Py_ssize_t *bytes);
/* Return the contents of such arrays in bytes, sampled above SNAPSHOT_BYTES; NULL and an exception without memory. */
PyObject *shared_contents(const SharedOperation *self, const Given *arrays, PyObject *given);
/* Return whether such arrays have other contents than these; 0 if these are none. */
int shared_is_changed(const SharedOperation *self, const Given *arrays, PyObject *given, PyObject *held);

/* Calls of items of any length (shared_parts.c). */
/* The bytes of an item of a call in parts: a bytes object, or an array of an exchange. */
Py_ssize_t shared_part_bytes(const SharedOperation *self, PyObject *item);
int shared_parts_fit(const SharedOperation *self, const Given *wanted, PyObject *given);
/* Return whether the arrays that this member passes, or those for its result, still have the lengths that it has written for a step or a
   round. */
int shared_parts_are_same(const SharedOperation *self, int64_t at, PyObject *list, int receives);
/* Return whether the items that a member sends in an exchange stand apart. */
int shared_parts_stand_apart(const SharedOperation *self, int rank, int64_t at);
/* Return the bytes of the largest item of an exchange that stands apart, and so moves when the members have compared the lengths; 0 if none
   does. The same on all members. */
Py_ssize_t shared_largest_apart(const SharedOperation *self, int64_t at);
/* Return whether no item that would be sent from where it stands, except that of the member for itself, is in memory of the result. */
int shared_parts_are_disjoint(const SharedOperation *self, PyObject *send, PyObject *recv);
/* Return a number of the addresses of all arrays of an exchange, as shared_places() does. */
int64_t shared_parts_places(PyObject *send, PyObject *recv);
/* Make the transfer of the items that stand apart, behind the step in which the members have compared the lengths; the blocks are those of
   the operation. */
Transfer shared_parts_transfer(const SharedOperation *self, PyObject *send, PyObject *recv);
void shared_write_parts(const SharedOperation *self, char *to, PyObject *send, PyObject *recv);
/* Read what another member has written for this member into the item of a list. */
void shared_read_part(const SharedOperation *self, const char *data, PyObject *recv, int item);
/* Return whether all members make the call of a round that is over, and expect what they are sent. */
int shared_is_agreed(const SharedOperation *self, int64_t number);

/* Write the piece of the data that begins at `from`, for the round or the step `at`. */
void shared_write_data(const SharedOperation *self, int64_t at, PyObject *send, PyObject *recv, Py_ssize_t from);
/* Return where the data of a member stands: for a step of the segment, or for a round. */
static inline char *shared_data(const SharedOperation *self, int rank, int64_t at)
{
    return self->segment == NULL ? ring_eager(&self->ring->ring, rank, at) : segment_buffer(&self->segment->segment, rank, at);
}
/* Read the piece of the result that begins at `from`. */
void shared_read_result(const SharedOperation *self, int64_t at, PyObject *recv, Py_ssize_t from);
/* Make the transfer of a call that copies once, whose arrays fit; the blocks are those of the operation. */
Transfer shared_transfer(const SharedOperation *self, PyObject *send, PyObject *recv);
/* Return a number of the addresses of the blocks: that of other addresses is another one, in all likelihood. */
int64_t shared_places(const Transfer *transfer);
/* Return whether a member writes no bytes that it also sends: the arrays share at most the block of the member for itself. */
int shared_is_apart(const SharedOperation *self, PyObject *send, PyObject *recv);
/* Note that this thread makes calls, if it has not made the last one; return -1 and an exception without memory. */
int note_thread(unsigned long *last);

/* The arguments of run(): the last three only if the program gives the call a limit or a name. */
enum { GROUP, PREPARED, SEND, RECV, FRAME, PLAIN, LIMIT = PLAIN, NAME, WORDS, EXTENDED };

/* run_cached() of operations/prepare/run.py; in C for a call that is waited for, in shared memory, prepared for its signature. */
PyObject *run_cached(PyObject *module, PyObject *const *args, Py_ssize_t count);

PyObject *find_frame_outside(PyObject *module, PyObject *files);
PyObject *tensor_array(PyObject *module, PyObject *const *args, Py_ssize_t count);
int tensors_ready(void);

PyObject *shared_run(SharedOperation *self, PyObject *const *args, Py_ssize_t count);
PyObject *shared_run_rest(SharedOperation *self, PyObject *const *args, Py_ssize_t count);
PyObject *shared_start(SharedOperation *self, PyObject *send);
PyObject *shared_state(SharedOperation *self, PyObject *args);
PyObject *shared_complete(SharedOperation *self, PyObject *const *args, Py_ssize_t count);
PyObject *shared_accepts(SharedOperation *self, PyObject *const *args, Py_ssize_t count);
PyObject *shared_begin(SharedOperation *self, PyObject *const *args, Py_ssize_t count);

#endif
