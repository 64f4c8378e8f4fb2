/* In the place of libcuda.so.1 on a machine without a GPU, so that an MPI that knows of CUDA loads, and takes memory for a device's.

   Memory of the host is the device's, too, at an address that is lower by AWAY, from which nobody can read. So a library that
   copies by way of the driver what it is handed gives right results, and one that reads it ends by a signal. Programs that hand
   over no such address see a device without memory. Streams and events have come as soon as they are asked for. All that is not
   here says that CUDA is not initialised (build_openmpi.sh adds it). */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t Address;
enum { OK = 0, INVALID_VALUE = 1 };
static const Address AWAY = (Address)0x20 << 40;

/* On x86-64 Linux programs are at 0x55 or 0x56, libraries and what is mapped below 0x80 (times 2**40). */
static int on_device(Address at)
{
    Address top = at >> 40;
    return top == 0x35 || top == 0x36 || (top >= 0x5a && top <= 0x5f);
}

static void *readable(Address at) { return (void *)(on_device(at) ? at + AWAY : at); }

static int copy(Address to, Address from, size_t bytes)
{
    memmove(readable(to), readable(from), bytes);
    return OK;
}

int cuInit(unsigned flags) { return OK; }
int cuDeviceGetCount(int *count) { *count = 1; return OK; }
int cuDeviceGet(int *device, int number) { *device = 0; return OK; }
int cuDeviceGetAttribute(int *value, int which, int device) { *value = 0; return OK; }

int cuCtxGetCurrent(void **context) { *context = (void *)1; return OK; }
int cuCtxSetCurrent(void *context) { return OK; }
int cuCtxPushCurrent_v2(void *context) { return OK; }
int cuCtxPopCurrent_v2(void **context) { *context = (void *)1; return OK; }
int cuCtxGetDevice(int *device) { *device = 0; return OK; }

int cuStreamCreate(void **stream, unsigned flags) { *stream = (void *)1; return OK; }
int cuStreamDestroy_v2(void *stream) { return OK; }
int cuStreamSynchronize(void *stream) { return OK; }
int cuEventCreate(void **event, unsigned flags) { *event = (void *)1; return OK; }
int cuEventDestroy_v2(void *event) { return OK; }
int cuEventRecord(void *event, void *stream) { return OK; }
int cuEventQuery(void *event) { return OK; }
int cuEventSynchronize(void *event) { return OK; }

int cuMemHostRegister_v2(void *memory, size_t bytes, unsigned flags) { return OK; }
int cuMemHostUnregister(void *memory) { return OK; }
int cuMemAlloc_v2(Address *at, size_t bytes) { *at = (Address)malloc(bytes) - AWAY; return OK; }
int cuMemFree_v2(Address at) { free(readable(at)); return OK; }
int cuMemcpy(Address to, Address from, size_t bytes) { return copy(to, from, bytes); }
int cuMemcpyAsync(Address to, Address from, size_t bytes, void *stream) { return copy(to, from, bytes); }
int cuMemcpyDtoH_v2(Address to, Address from, size_t bytes) { return copy(to, from, bytes); }
int cuMemcpyHtoD_v2(Address to, Address from, size_t bytes) { return copy(to, from, bytes); }
int cuMemcpyDtoD_v2(Address to, Address from, size_t bytes) { return copy(to, from, bytes); }
int cuMemcpyDtoHAsync_v2(Address to, Address from, size_t bytes, void *stream) { return copy(to, from, bytes); }
int cuMemcpyHtoDAsync_v2(Address to, Address from, size_t bytes, void *stream) { return copy(to, from, bytes); }
int cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, void *stream) { return copy(to, from, bytes); }

static int tell(void *into, int attribute, Address at)
{
    if (!on_device(at)) return INVALID_VALUE; /* as of memory that CUDA knows nothing of */
    switch (attribute) {
    case 1: *(void **)into = (void *)1; return OK; /* its context */
    case 2: *(unsigned *)into = 2; return OK;      /* memory of a device */
    case 7: *(Address *)into = 1; return OK;       /* the number of its allocation */
    case 8: *(unsigned *)into = 0; return OK;      /* not managed */
    case 9: *(int *)into = 0; return OK;           /* which device */
    default: return INVALID_VALUE;
    }
}

int cuPointerGetAttribute(void *into, int attribute, Address at) { return tell(into, attribute, at); }

int cuPointerGetAttributes(unsigned count, int *attributes, void **into, Address at)
{
    for (unsigned each = 0; each < count; each++)
        if (tell(into[each], attributes[each], at)) return INVALID_VALUE;
    return OK;
}
