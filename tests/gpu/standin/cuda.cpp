// CUDA on a machine that has no GPU, below the real CuPy: its runtime, its driver and its compiler, as far as CuPy calls them.
//
// Memory of the device is memory of the host that other processes can open. Each stream is a thread, which does what is put on it
// late, and beside the others, so that a missing wait gives a wrong result. Kernels are compiled for the host: kernel.h tells how.
// What CUDA refuses is refused: events, streams and kernels of another device than the current one, copies of the wrong kind, a
// handle that is opened twice. Memory that is freed is unmapped, so whoever still uses it ends by a signal.
//
//     STANDIN_GPUS     how many devices there are (1)
//     STANDIN_MB       how much memory each has (4096)
//     STANDIN_DELAY    microseconds by which what is put on a stream comes late, at most, one time in three (300)
//     STANDIN_TELL     say on stderr what fails, and when the device is waited for
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#define STANDIN extern "C" __attribute__((visibility("default")))

namespace {

int number_of(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text && *text ? atoi(text) : otherwise;
}

const int devices = number_of("STANDIN_GPUS", 1);
const int delay = number_of("STANDIN_DELAY", 300);
thread_local int current = 0;
thread_local cudaError_t last = cudaSuccess;

std::atomic<int> broken{0};  // once a kernel has done wrong, CUDA says so to all that is asked

cudaError_t failed(cudaError_t error, const char *where) {
    if (broken) error = cudaError_t(int(broken));
    if (getenv("STANDIN_TELL")) fprintf(stderr, "standin: %s: error %d\n", where, int(error));
    return last = error;
}

// What has been put on a stream, and whether it is over.
struct State {
    std::mutex lock;
    std::condition_variable told;
    bool over = false;
    void tell() {
        std::lock_guard<std::mutex> held(lock);
        over = true;
        told.notify_all();
    }
    void wait() {
        std::unique_lock<std::mutex> held(lock);
        told.wait(held, [this] { return over; });
    }
    bool asked() {
        std::lock_guard<std::mutex> held(lock);
        return over;
    }
};
using Told = std::shared_ptr<State>;

struct Stream {
    int device;
    bool blocking;  // it and the default stream wait for each other
    std::atomic<int> capture{cudaStreamCaptureStatusNone};  // what is put on it then would be kept in a graph
    std::mutex lock;
    std::condition_variable more;
    std::deque<std::function<void()>> waiting;
    Told last;
    std::minstd_rand chance;

    Stream(int device, bool blocking) : device(device), blocking(blocking), chance(getpid() * 31 + device) {
        std::thread([this] { work(); }).detach();
    }
    void work() {
        for (;;) {
            std::function<void()> next;
            {
                std::unique_lock<std::mutex> held(lock);
                more.wait(held, [this] { return !waiting.empty(); });
                next = std::move(waiting.front());
                waiting.pop_front();
            }
            if (delay) {
                auto late = std::chrono::microseconds(chance() % unsigned(delay + 1));
                if (chance() % 3 == 0) std::this_thread::sleep_for(late);
            }
            next();
        }
    }
    Told put(std::vector<Told> after, std::function<void()> what) {
        auto told = std::make_shared<State>();
        std::lock_guard<std::mutex> held(lock);
        waiting.push_back([told, after = std::move(after), what = std::move(what)] {
            for (auto &each : after) each->wait();
            what();
            told->tell();
        });
        last = told;
        more.notify_all();
        return told;
    }
    Told now() {
        std::lock_guard<std::mutex> held(lock);
        return last;
    }
};

struct Event {
    int device;
    std::mutex lock;
    Told told;
};

std::mutex world;
std::set<Stream *> streams;
std::set<Event *> events;
std::map<int, Stream *> defaults;

Stream *fresh(int device, bool blocking) {
    auto made = new Stream(device, blocking);
    std::lock_guard<std::mutex> held(world);
    streams.insert(made);
    return made;
}

Stream *default_of(int device) {
    {
        std::lock_guard<std::mutex> held(world);
        auto found = defaults.find(device);
        if (found != defaults.end()) return found->second;
    }
    auto made = fresh(device, true);
    std::lock_guard<std::mutex> held(world);
    return defaults.emplace(device, made).first->second;
}

// The stream of a handle; none where there is no such stream.
Stream *stream_of(void *handle) {
    if (broken) return nullptr;
    if (!handle || handle == cudaStreamLegacy) return default_of(current);
    if (handle == cudaStreamPerThread) {
        thread_local std::map<int, Stream *> own;
        if (!own[current]) own[current] = fresh(current, true);
        return own[current];
    }
    std::lock_guard<std::mutex> held(world);
    auto found = static_cast<Stream *>(handle);
    return streams.count(found) ? found : nullptr;
}

// Memory that is taken, or an event that is asked for, spoils all captures that are under way (as they are begun by default).
bool spoils_a_capture() {
    bool any = false;
    std::lock_guard<std::mutex> held(world);
    for (auto each : streams)
        if (each->capture != cudaStreamCaptureStatusNone) {
            each->capture = cudaStreamCaptureStatusInvalidated;
            any = true;
        }
    return any;
}

Told put(Stream *stream, std::function<void()> what, std::vector<Told> after = {}) {
    if (stream->capture != cudaStreamCaptureStatusNone) {
        auto told = std::make_shared<State>();
        told->tell();
        return told;
    }
    Stream *usual = stream->blocking ? default_of(stream->device) : nullptr;
    std::vector<Stream *> others;
    if (usual == stream) {
        std::lock_guard<std::mutex> held(world);
        for (auto each : streams)
            if (each->blocking && each != stream && each->device == stream->device) others.push_back(each);
    } else if (usual) {
        others.push_back(usual);
    }
    for (auto each : others)
        if (auto told = each->now()) after.push_back(told);
    return stream->put(std::move(after), std::move(what));
}

void wait_for_device(int device) {
    if (getenv("STANDIN_TELL")) fprintf(stderr, "standin: the device is waited for\n");
    std::vector<Stream *> all;
    {
        std::lock_guard<std::mutex> held(world);
        for (auto each : streams)
            if (each->device == device) all.push_back(each);
    }
    for (auto each : all)
        if (auto told = each->now()) told->wait();
}

// Memory of a device, and pinned memory of the host, by their addresses.
struct Memory {
    size_t nbytes;
    int device;
    enum { plain, asynchronous, pinned, opened } kind;
    std::string path;
};
std::mutex memories;
std::map<uintptr_t, Memory> known;
std::atomic<long> made{0};
size_t used = 0;
const size_t room = size_t(number_of("STANDIN_MB", 4096)) << 20;

const Memory *find(uintptr_t at, uintptr_t *base = nullptr) {  // with the lock held
    auto after = known.upper_bound(at);
    if (after == known.begin()) return nullptr;
    --after;
    if (at >= after->first + after->second.nbytes) return nullptr;
    if (base) *base = after->first;
    return &after->second;
}

size_t rounded(size_t nbytes) { return (nbytes + 4095) / 4096 * 4096; }

cudaError_t take(void **found, size_t nbytes, decltype(Memory::kind) kind) {
    *found = nullptr;
    if (!nbytes) return cudaSuccess;
    if (spoils_a_capture()) return failed(cudaErrorStreamCaptureUnsupported, "malloc");
    std::string path;
    int file = -1, flags = MAP_SHARED;
    if (kind == Memory::plain) {
        {
            std::lock_guard<std::mutex> held(memories);
            if (used + nbytes > room) return failed(cudaErrorMemoryAllocation, "malloc");
            used += nbytes;
        }
        path = "/dev/shm/standin." + std::to_string(getpid()) + "." + std::to_string(++made);
        file = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
        if (file < 0 || ftruncate(file, off_t(rounded(nbytes)))) return failed(cudaErrorMemoryAllocation, "malloc");
    } else {
        flags = MAP_PRIVATE | MAP_ANONYMOUS;
    }
    void *at = mmap(nullptr, rounded(nbytes), PROT_READ | PROT_WRITE, flags, file, 0);
    if (file >= 0) close(file);
    if (at == MAP_FAILED) return failed(cudaErrorMemoryAllocation, "malloc");
    if (kind != Memory::pinned && nbytes <= 64 << 20) memset(at, 0xab, nbytes);
    std::lock_guard<std::mutex> held(memories);
    known[uintptr_t(at)] = {nbytes, current, kind, path};
    *found = at;
    return cudaSuccess;
}

cudaError_t give(void *at, bool pinned) {
    if (!at) return cudaSuccess;
    Memory memory;
    {
        std::lock_guard<std::mutex> held(memories);
        auto found = known.find(uintptr_t(at));
        if (found == known.end() || (found->second.kind == Memory::pinned) != pinned || found->second.kind == Memory::opened)
            return failed(cudaErrorInvalidValue, "free");
        memory = found->second;
    }
    wait_for_device(memory.device);  // as cudaFree does
    std::lock_guard<std::mutex> held(memories);
    known.erase(uintptr_t(at));
    munmap(at, rounded(memory.nbytes));
    if (!memory.path.empty()) {
        unlink(memory.path.c_str());
        used -= memory.nbytes;
    }
    return cudaSuccess;
}

struct Leaving {  // files are left by nobody
    ~Leaving() {
        for (auto &each : known)
            if (each.second.kind == Memory::plain) unlink(each.second.path.c_str());
    }
} leaving;

bool on_device(const void *at, size_t nbytes) {
    std::lock_guard<std::mutex> held(memories);
    uintptr_t base = 0;
    auto found = find(uintptr_t(at), &base);
    return found && found->kind != Memory::pinned && uintptr_t(at) + nbytes <= base + found->nbytes;
}

bool is_pinned(const void *at) {
    std::lock_guard<std::mutex> held(memories);
    auto found = find(uintptr_t(at));
    return found && found->kind == Memory::pinned;
}

cudaError_t copy(void *target, const void *source, size_t nbytes, cudaMemcpyKind kind, void *handle, bool waits) {
    if (!nbytes) return cudaSuccess;
    auto stream = stream_of(handle);
    if (!stream) return failed(cudaErrorInvalidResourceHandle, "memcpy: no such stream");
    bool to = on_device(target, nbytes), from = on_device(source, nbytes);
    bool right = kind == cudaMemcpyHostToDevice     ? to && !from
                 : kind == cudaMemcpyDeviceToHost   ? from && !to
                 : kind == cudaMemcpyDeviceToDevice ? to && from
                                                    : true;
    if (!right) return failed(cudaErrorInvalidValue, "memcpy: not such memory");
    Told told;
    if (!from && !is_pinned(source)) {  // staged before this returns
        auto held = std::make_shared<std::vector<char>>((const char *)source, (const char *)source + nbytes);
        told = put(stream, [=] { memcpy(target, held->data(), nbytes); });
    } else {
        told = put(stream, [=] { memmove(target, source, nbytes); });
    }
    if (waits) told->wait();
    return cudaSuccess;
}

const char *code_of(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
    case cudaErrorStreamCaptureImplicit: return "cudaErrorStreamCaptureImplicit";
    default: return "cudaErrorUnknown";
    }
}

}  // namespace

// The runtime.

// For tests: as if a kernel had done wrong; 0: as if it had not.
STANDIN void standin_break(int error) { broken = error; }

STANDIN const char *cudaGetErrorName(cudaError_t error) { return code_of(error); }
STANDIN const char *cudaGetErrorString(cudaError_t) { return "said by a stand-in for CUDA"; }
STANDIN cudaError_t cudaGetLastError() {
    auto found = last;
    last = cudaSuccess;
    return found;
}
STANDIN cudaError_t cudaPeekAtLastError() { return last; }
STANDIN cudaError_t cudaDriverGetVersion(int *found) { return *found = 12090, cudaSuccess; }
STANDIN cudaError_t cudaRuntimeGetVersion(int *found) { return *found = 12090, cudaSuccess; }
STANDIN cudaError_t cudaGetDeviceCount(int *found) { return *found = devices, cudaSuccess; }
STANDIN cudaError_t cudaGetDevice(int *found) { return *found = current, cudaSuccess; }
STANDIN cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= devices) return failed(cudaErrorInvalidDevice, "setDevice");
    current = device;
    return cudaSuccess;
}
STANDIN cudaError_t cudaDeviceGetAttribute(int *found, cudaDeviceAttr asked, int) {
    switch (asked) {
    case cudaDevAttrComputeCapabilityMajor: *found = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *found = 0; break;
    case cudaDevAttrClockRate: *found = 1000000; break;
    case cudaDevAttrMemoryPoolsSupported: *found = 1; break;
    case cudaDevAttrWarpSize: *found = 32; break;
    case cudaDevAttrMaxThreadsPerBlock: *found = 1024; break;
    case cudaDevAttrMultiProcessorCount: *found = 4; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *found = 48 << 10; break;
    case cudaDevAttrMaxGridDimX: *found = 2147483647; break;
    default: *found = 0;
    }
    return cudaSuccess;
}
STANDIN cudaError_t cudaGetDeviceProperties_v2(cudaDeviceProp *found, int) {
    memset(found, 0, sizeof *found);
    strcpy(found->name, "a stand-in for a GPU");
    found->major = 9;
    found->totalGlobalMem = room;
    found->warpSize = 32;
    found->maxThreadsPerBlock = 1024;
    found->multiProcessorCount = 4;
    return cudaSuccess;
}
STANDIN cudaError_t cudaDeviceGetPCIBusId(char *found, int length, int device) {
    snprintf(found, size_t(length), "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}
STANDIN cudaError_t cudaDeviceSynchronize() {
    wait_for_device(current);
    return cudaSuccess;
}
STANDIN cudaError_t cudaDeviceCanAccessPeer(int *found, int, int) { return *found = 0, cudaSuccess; }
STANDIN cudaError_t cudaMalloc(void **found, size_t nbytes) { return take(found, nbytes, Memory::plain); }
STANDIN cudaError_t cudaMallocManaged(void **found, size_t nbytes, unsigned) { return take(found, nbytes, Memory::plain); }
STANDIN cudaError_t cudaFree(void *at) { return give(at, false); }
STANDIN cudaError_t cudaHostAlloc(void **found, size_t nbytes, unsigned) { return take(found, nbytes, Memory::pinned); }
STANDIN cudaError_t cudaFreeHost(void *at) { return give(at, true); }
STANDIN cudaError_t cudaMallocAsync(void **found, size_t nbytes, cudaStream_t) { return take(found, nbytes, Memory::asynchronous); }
STANDIN cudaError_t cudaMallocFromPoolAsync(void **found, size_t nbytes, cudaMemPool_t, cudaStream_t) {
    return take(found, nbytes, Memory::asynchronous);
}
STANDIN cudaError_t cudaFreeAsync(void *at, cudaStream_t) { return give(at, false); }
STANDIN cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *found, int) { return *found = cudaMemPool_t(1), cudaSuccess; }
STANDIN cudaError_t cudaDeviceGetMemPool(cudaMemPool_t *found, int) { return *found = cudaMemPool_t(1), cudaSuccess; }
STANDIN cudaError_t cudaDeviceSetMemPool(int, cudaMemPool_t) { return cudaSuccess; }
namespace {
std::map<int, uint64_t> of_pool;
}
STANDIN cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr asked, void *found) {
    return *static_cast<uint64_t *>(found) = of_pool[asked], cudaSuccess;
}
STANDIN cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr asked, void *value) {
    return of_pool[asked] = *static_cast<uint64_t *>(value), cudaSuccess;
}
STANDIN cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
STANDIN cudaError_t cudaMemPoolCreate(cudaMemPool_t *found, const cudaMemPoolProps *) { return *found = cudaMemPool_t(2), cudaSuccess; }
STANDIN cudaError_t cudaMemPoolDestroy(cudaMemPool_t) { return cudaSuccess; }
STANDIN cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    std::lock_guard<std::mutex> held(memories);
    *free = room - used, *total = room;
    return cudaSuccess;
}
STANDIN cudaError_t cudaMemcpy(void *target, const void *source, size_t nbytes, cudaMemcpyKind kind) {
    return copy(target, source, nbytes, kind, nullptr, true);
}
STANDIN cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t nbytes, cudaMemcpyKind kind, cudaStream_t stream) {
    return copy(target, source, nbytes, kind, stream, false);
}
STANDIN cudaError_t cudaMemcpyPeerAsync(void *target, int, const void *source, int, size_t nbytes, cudaStream_t stream) {
    return copy(target, source, nbytes, cudaMemcpyDeviceToDevice, stream, false);
}
STANDIN cudaError_t cudaMemcpyPeer(void *target, int, const void *source, int, size_t nbytes) {
    return copy(target, source, nbytes, cudaMemcpyDeviceToDevice, nullptr, true);
}
STANDIN cudaError_t cudaMemsetAsync(void *at, int value, size_t nbytes, cudaStream_t handle) {
    auto stream = stream_of(handle);
    if (!stream || !on_device(at, nbytes)) return failed(cudaErrorInvalidValue, "memset");
    put(stream, [=] { memset(at, value, nbytes); });
    return cudaSuccess;
}
STANDIN cudaError_t cudaMemset(void *at, int value, size_t nbytes) { return cudaMemsetAsync(at, value, nbytes, nullptr); }
STANDIN cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *found, const void *at) {
    memset(found, 0, sizeof *found);
    std::lock_guard<std::mutex> held(memories);
    auto memory = find(uintptr_t(at));
    found->device = memory ? memory->device : -2;
    found->type = !memory ? cudaMemoryTypeUnregistered : memory->kind == Memory::pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    found->devicePointer = memory ? const_cast<void *>(at) : nullptr;
    return cudaSuccess;
}
STANDIN cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *found, void *at) {
    std::lock_guard<std::mutex> held(memories);
    auto memory = find(uintptr_t(at));
    if (!memory || memory->kind != Memory::plain) return failed(cudaErrorInvalidValue, "ipcGetMemHandle");
    memset(found, 0, sizeof *found);
    snprintf(found->reserved, sizeof found->reserved, "%zu %s", memory->nbytes, memory->path.c_str());
    return cudaSuccess;
}
STANDIN cudaError_t cudaIpcOpenMemHandle(void **found, cudaIpcMemHandle_t handle, unsigned) {
    size_t nbytes = 0;
    char path[64] = "";
    sscanf(handle.reserved, "%zu %63s", &nbytes, path);
    std::lock_guard<std::mutex> held(memories);
    for (auto &each : known)
        if (each.second.path == path) return failed(cudaErrorInvalidValue, "ipcOpenMemHandle: open already, or this process's");
    int file = open(path, O_RDWR);
    if (file < 0) return failed(cudaErrorInvalidResourceHandle, "ipcOpenMemHandle");
    void *at = mmap(nullptr, rounded(nbytes), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (at == MAP_FAILED) return failed(cudaErrorMemoryAllocation, "ipcOpenMemHandle");
    known[uintptr_t(at)] = {nbytes, current, Memory::opened, path};
    *found = at;
    return cudaSuccess;
}
STANDIN cudaError_t cudaIpcCloseMemHandle(void *at) {
    wait_for_device(current);
    std::lock_guard<std::mutex> held(memories);
    auto found = known.find(uintptr_t(at));
    if (found == known.end() || found->second.kind != Memory::opened) return failed(cudaErrorInvalidValue, "ipcCloseMemHandle");
    munmap(at, rounded(found->second.nbytes));
    known.erase(found);
    return cudaSuccess;
}

STANDIN cudaError_t cudaStreamCreateWithFlags(cudaStream_t *found, unsigned flags) {
    *found = reinterpret_cast<cudaStream_t>(fresh(current, !(flags & cudaStreamNonBlocking)));
    return cudaSuccess;
}
STANDIN cudaError_t cudaStreamCreate(cudaStream_t *found) { return cudaStreamCreateWithFlags(found, 0); }
STANDIN cudaError_t cudaStreamCreateWithPriority(cudaStream_t *found, unsigned flags, int) {
    return cudaStreamCreateWithFlags(found, flags);
}
STANDIN cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    auto stream = stream_of(handle);
    if (!stream) return failed(cudaErrorInvalidResourceHandle, "streamDestroy");
    std::lock_guard<std::mutex> held(world);
    streams.erase(stream);  // what is on it still comes
    return cudaSuccess;
}
STANDIN cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    auto stream = stream_of(handle);
    if (!stream) return failed(cudaErrorInvalidResourceHandle, "streamSynchronize");
    put(stream, [] {})->wait();
    return cudaSuccess;
}
STANDIN cudaError_t cudaStreamQuery(cudaStream_t handle) {
    auto stream = stream_of(handle);
    if (!stream) return failed(cudaErrorInvalidResourceHandle, "streamQuery");
    auto told = stream->now();
    return !told || told->asked() ? cudaSuccess : cudaErrorNotReady;
}
STANDIN cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned *found) {
    auto stream = stream_of(handle);
    if (!stream) return failed(cudaErrorInvalidResourceHandle, "streamGetFlags");
    *found = stream->blocking ? 0 : cudaStreamNonBlocking;
    return cudaSuccess;
}
STANDIN cudaError_t cudaStreamGetPriority(cudaStream_t, int *found) { return *found = 0, cudaSuccess; }
STANDIN cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus *found) {
    auto stream = stream_of(handle);
    if (!stream) return failed(cudaErrorInvalidResourceHandle, "streamIsCapturing");
    *found = cudaStreamCaptureStatus(int(stream->capture));
    if (!handle || handle == cudaStreamLegacy) {
        std::lock_guard<std::mutex> held(world);
        for (auto each : streams)
            if (each->blocking && each->device == stream->device && each->capture != cudaStreamCaptureStatusNone)
                return cudaErrorStreamCaptureImplicit;
    }
    return cudaSuccess;
}
STANDIN cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode) {
    auto stream = stream_of(handle);
    if (!stream || !handle || handle == cudaStreamLegacy || stream->capture != cudaStreamCaptureStatusNone)
        return failed(cudaErrorStreamCaptureUnsupported, "streamBeginCapture");
    stream->capture = cudaStreamCaptureStatusActive;
    return cudaSuccess;
}
STANDIN cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *found) {
    auto stream = stream_of(handle);
    *found = nullptr;
    if (!stream) return failed(cudaErrorInvalidResourceHandle, "streamEndCapture");
    int was = stream->capture.exchange(cudaStreamCaptureStatusNone);
    if (was == cudaStreamCaptureStatusInvalidated) return failed(cudaErrorStreamCaptureInvalidated, "streamEndCapture");
    if (was == cudaStreamCaptureStatusNone) return failed(cudaErrorStreamCaptureUnmatched, "streamEndCapture");
    *found = reinterpret_cast<cudaGraph_t>(stream);  // graphs are made, and do nothing
    return cudaSuccess;
}
STANDIN cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
STANDIN cudaError_t cudaGraphInstantiate(cudaGraphExec_t *found, cudaGraph_t graph, unsigned long long) {
    return *found = reinterpret_cast<cudaGraphExec_t>(graph), cudaSuccess;
}
STANDIN cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
STANDIN cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
    auto stream = stream_of(handle);
    auto of = reinterpret_cast<Event *>(event);
    {
        std::lock_guard<std::mutex> held(world);
        if (!events.count(of)) return failed(cudaErrorInvalidResourceHandle, "streamWaitEvent: no such event");
    }
    if (!stream) return failed(cudaErrorInvalidResourceHandle, "streamWaitEvent: no such stream");
    Told told;
    {
        std::lock_guard<std::mutex> held(of->lock);
        told = of->told;
    }
    if (told) put(stream, [] {}, {told});
    return cudaSuccess;
}
STANDIN cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void *data) {
    auto stream = stream_of(handle);
    if (!stream) return failed(cudaErrorInvalidResourceHandle, "launchHostFunc");
    put(stream, [=] { function(data); });
    return cudaSuccess;
}
STANDIN cudaError_t cudaEventCreateWithFlags(cudaEvent_t *found, unsigned) {
    auto made = new Event{current, {}, {}};
    std::lock_guard<std::mutex> held(world);
    events.insert(made);
    *found = reinterpret_cast<cudaEvent_t>(made);
    return cudaSuccess;
}
STANDIN cudaError_t cudaEventCreate(cudaEvent_t *found) { return cudaEventCreateWithFlags(found, 0); }
STANDIN cudaError_t cudaEventDestroy(cudaEvent_t event) {
    auto of = reinterpret_cast<Event *>(event);
    std::lock_guard<std::mutex> held(world);
    if (!events.erase(of)) return failed(cudaErrorInvalidResourceHandle, "eventDestroy");
    delete of;
    return cudaSuccess;
}
namespace {
Event *event_of(cudaEvent_t event) {
    auto of = reinterpret_cast<Event *>(event);
    std::lock_guard<std::mutex> held(world);
    return events.count(of) ? of : nullptr;
}
Told told_by(Event *of) {
    std::lock_guard<std::mutex> held(of->lock);
    return of->told;
}
}  // namespace
STANDIN cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
    auto of = event_of(event);
    auto stream = stream_of(handle);
    if (!of || !stream || of->device != stream->device) return failed(cudaErrorInvalidResourceHandle, "eventRecord");
    auto told = put(stream, [] {});
    std::lock_guard<std::mutex> held(of->lock);
    of->told = told;
    return cudaSuccess;
}
STANDIN cudaError_t cudaEventQuery(cudaEvent_t event) {
    auto of = event_of(event);
    if (!of || broken) return failed(cudaErrorInvalidResourceHandle, "eventQuery");
    if (spoils_a_capture()) return failed(cudaErrorStreamCaptureUnsupported, "eventQuery");
    auto told = told_by(of);
    return !told || told->asked() ? cudaSuccess : cudaErrorNotReady;
}
STANDIN cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    auto of = event_of(event);
    if (!of || broken) return failed(cudaErrorInvalidResourceHandle, "eventSynchronize");
    if (spoils_a_capture()) return failed(cudaErrorStreamCaptureUnsupported, "eventSynchronize");
    if (auto told = told_by(of)) told->wait();
    return cudaSuccess;
}


// The driver.

STANDIN int standin_cuInit(unsigned) __asm__("cuInit");
STANDIN int standin_cuInit(unsigned) { return 0; }

// By other names here: the header has them with other types.
#define DRIVER(name, arguments) \
    STANDIN int standin_##name arguments __asm__(#name); \
    STANDIN int standin_##name arguments

DRIVER(cuGetErrorName, (int, const char **found)) { return *found = "CUDA_ERROR", 0; }
DRIVER(cuGetErrorString, (int, const char **found)) { return *found = "said by a stand-in for CUDA's driver", 0; }
DRIVER(cuCtxGetCurrent, (void **found)) { return *found = reinterpret_cast<void *>(uintptr_t(current) + 1), 0; }
DRIVER(cuCtxSetCurrent, (void *context)) { return context ? int(cudaSetDevice(int(uintptr_t(context)) - 1)) : 0; }
DRIVER(cuCtxGetDevice, (int *found)) { return *found = current, 0; }
DRIVER(cuDevicePrimaryCtxRelease_v2, (int)) { return 0; }
DRIVER(cuStreamGetCtx, (void *handle, void **found)) {
    auto stream = stream_of(handle);
    return stream ? (*found = reinterpret_cast<void *>(uintptr_t(stream->device) + 1), 0) : 400;
}
// What an MPI that knows of CUDA calls.
DRIVER(cuDeviceGetCount, (int *found)) { return *found = devices, 0; }
DRIVER(cuDeviceGet, (int *found, int number)) { return *found = number, 0; }
DRIVER(cuDeviceGetAttribute, (int *found, int asked, int device)) {
    return cudaDeviceGetAttribute(found, static_cast<cudaDeviceAttr>(asked), device);
}
DRIVER(cuDeviceGetPCIBusId, (char *found, int length, int device)) { return cudaDeviceGetPCIBusId(found, length, device); }
DRIVER(cuDeviceCanAccessPeer, (int *found, int, int)) { return *found = 0, 0; }
DRIVER(cuDevicePrimaryCtxGetState, (int, unsigned *flags, int *active)) { return *flags = 0, *active = 1, 0; }
DRIVER(cuDevicePrimaryCtxRetain, (void **found, int device)) {
    return *found = reinterpret_cast<void *>(uintptr_t(device) + 1), 0;
}
namespace {
thread_local std::vector<int> before;
}
DRIVER(cuCtxPushCurrent_v2, (void *context)) {
    before.push_back(current);
    return cudaSetDevice(int(uintptr_t(context)) - 1);
}
DRIVER(cuCtxPopCurrent_v2, (void **found)) {
    *found = reinterpret_cast<void *>(uintptr_t(current) + 1);
    if (!before.empty()) {
        current = before.back();
        before.pop_back();
    }
    return 0;
}
DRIVER(cuStreamCreate, (cudaStream_t *found, unsigned flags)) { return cudaStreamCreateWithFlags(found, flags); }
DRIVER(cuStreamDestroy_v2, (cudaStream_t stream)) { return cudaStreamDestroy(stream); }
DRIVER(cuStreamSynchronize, (cudaStream_t stream)) { return cudaStreamSynchronize(stream); }
DRIVER(cuEventCreate, (cudaEvent_t *found, unsigned flags)) { return cudaEventCreateWithFlags(found, flags); }
DRIVER(cuEventDestroy_v2, (cudaEvent_t event)) { return cudaEventDestroy(event); }
DRIVER(cuEventRecord, (cudaEvent_t event, cudaStream_t stream)) { return cudaEventRecord(event, stream); }
DRIVER(cuEventQuery, (cudaEvent_t event)) { return cudaEventQuery(event); }
DRIVER(cuEventSynchronize, (cudaEvent_t event)) { return cudaEventSynchronize(event); }
DRIVER(cuMemAlloc_v2, (void **found, size_t nbytes)) { return cudaMalloc(found, nbytes); }
DRIVER(cuMemFree_v2, (void *at)) { return cudaFree(at); }
DRIVER(cuMemHostRegister_v2, (void *, size_t, unsigned)) { return 0; }
DRIVER(cuMemHostUnregister, (void *)) { return 0; }
DRIVER(cuMemcpyAsync, (void *target, const void *source, size_t nbytes, cudaStream_t stream)) {
    return cudaMemcpyAsync(target, source, nbytes, cudaMemcpyDefault, stream);
}
DRIVER(cuMemcpy, (void *target, const void *source, size_t nbytes)) {
    return cudaMemcpy(target, source, nbytes, cudaMemcpyDefault);
}
DRIVER(cuMemGetAddressRange_v2, (uint64_t * base, size_t *nbytes, uint64_t at)) {
    std::lock_guard<std::mutex> held(memories);
    uintptr_t begin = 0;
    auto memory = find(uintptr_t(at), &begin);
    if (!memory) return CUDA_ERROR_NOT_FOUND;
    if (base) *base = begin;
    if (nbytes) *nbytes = memory->nbytes;
    return 0;
}
DRIVER(cuPointerSetAttribute, (const void *, int, uint64_t)) { return 0; }

namespace {
// What is said of memory; of that which CUDA knows nothing of, with the answers that mean so.
int tell(void *found, int asked, uint64_t at, bool strict) {
    std::lock_guard<std::mutex> held(memories);
    uintptr_t base = 0;
    auto memory = find(uintptr_t(at), &base);
    if (!memory && strict) return CUDA_ERROR_INVALID_VALUE;
    switch (asked) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *static_cast<void **>(found) = memory ? reinterpret_cast<void *>(uintptr_t(memory->device) + 1) : nullptr;
        return 0;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *static_cast<unsigned *>(found) = !memory ? 0 : memory->kind == Memory::pinned ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        return 0;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: *static_cast<uint64_t *>(found) = base; return 0;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *static_cast<unsigned *>(found) = 0; return 0;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *static_cast<int *>(found) = memory ? memory->device : -2; return 0;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        *static_cast<unsigned *>(found) = memory && memory->kind == Memory::plain;
        return 0;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *static_cast<uint64_t *>(found) = base; return 0;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}
}  // namespace
DRIVER(cuPointerGetAttribute, (void *found, int asked, uint64_t at)) { return tell(found, asked, at, true); }
DRIVER(cuPointerGetAttributes, (unsigned count, int *asked, void **found, uint64_t at)) {
    for (unsigned each = 0; each < count; each++)
        if (tell(found[each], asked[each], at, false)) return CUDA_ERROR_INVALID_VALUE;
    return 0;
}

namespace {
struct Function {
    void *(*bind)(void **);  // a std::function of one thread's work
    void (*run)(void *, const unsigned *, const unsigned *);
};
}  // namespace

DRIVER(cuModuleLoadData, (void **found, const void *image)) {
    // The image is a path: what the compiler below has made.
    *found = dlopen(static_cast<const char *>(image), RTLD_NOW | RTLD_LOCAL);
    if (!*found) fprintf(stderr, "standin: %s\n", dlerror());
    return *found ? 0 : CUDA_ERROR_INVALID_IMAGE;
}
DRIVER(cuModuleUnload, (void *)) { return 0; }
DRIVER(cuModuleGetFunction, (void **found, void *module, const char *name)) {
    auto bind = dlsym(module, ("standin_bind_" + std::string(name)).c_str());
    auto run = dlsym(module, "standin_run");
    if (!bind || !run) return CUDA_ERROR_NOT_FOUND;
    *found = new Function{reinterpret_cast<void *(*)(void **)>(bind),
                          reinterpret_cast<void (*)(void *, const unsigned *, const unsigned *)>(run)};
    return 0;
}
DRIVER(cuLaunchKernel, (void *of, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned, void *handle,
                        void **arguments, void **)) {
    auto stream = stream_of(handle);
    if (!stream || stream->device != current) return CUDA_ERROR_INVALID_HANDLE;
    auto function = static_cast<Function *>(of);
    auto bound = function->bind(arguments);
    std::vector<unsigned> grid{gx, gy, gz}, block{bx, by, bz};
    put(stream, [=] { function->run(bound, grid.data(), block.data()); });
    return 0;
}
DRIVER(cuFuncGetAttribute, (int *found, int, void *)) { return *found = 0, 0; }
DRIVER(cuFuncSetAttribute, (void *, int, int)) { return 0; }
DRIVER(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int *found, void *, int, size_t)) { return *found = 8, 0; }
DRIVER(cuOccupancyMaxPotentialBlockSize, (int *grid, int *block, void *, void *, size_t, int)) { return *grid = 4, *block = 128, 0; }

// The compiler.

namespace {
struct Program {
    std::string source, log, path;
    std::vector<std::string> names;
    std::map<std::string, std::string> lowered;
};
std::string own_folder() {
    Dl_info found;
    dladdr(reinterpret_cast<void *>(&own_folder), &found);
    std::string path = found.dli_fname;
    return path.substr(0, path.rfind('/'));
}
std::string read(const std::string &path) {
    std::ifstream file(path);
    std::stringstream all;
    all << file.rdbuf();
    return all.str();
}
}  // namespace

STANDIN int nvrtcVersion(int *major, int *minor) { return *major = 12, *minor = 9, 0; }
STANDIN const char *nvrtcGetErrorString(int) { return "said by a stand-in for CUDA's compiler"; }
STANDIN int nvrtcGetNumSupportedArchs(int *found) { return *found = 1, 0; }
STANDIN int nvrtcGetSupportedArchs(int *found) { return *found = 90, 0; }
STANDIN int nvrtcCreateProgram(Program **found, const char *source, const char *, int, const char **, const char **) {
    *found = new Program{source, "", "", {}, {}};
    return 0;
}
STANDIN int nvrtcDestroyProgram(Program **program) {
    delete *program;
    *program = nullptr;
    return 0;
}
STANDIN int nvrtcAddNameExpression(Program *program, const char *name) {
    program->names.push_back(name);
    return 0;
}
STANDIN int nvrtcGetLoweredName(Program *program, const char *name, const char **found) {
    *found = program->lowered[name].c_str();
    return 0;
}
STANDIN int nvrtcCompileProgram(Program *program, int count, const char **options) {
    std::string more;
    for (int at = 0; at < count; at++) {
        std::string option = options[at];
        if (option.rfind("-I", 0) == 0 || option.rfind("-D", 0) == 0) more += " '" + option + "'";
    }
    std::string folder = own_folder(), name = std::to_string(std::hash<std::string>()(program->source + more));
    mkdir((folder + "/kernels").c_str(), 0700);
    program->path = folder + "/kernels/" + name + ".so";
    std::string stem = folder + "/kernels/" + name + "." + std::to_string(getpid());  // other ranks compile the same
    std::set<std::string> kernels;
    std::regex kernel("__global__\\s+void\\s+(?:__launch_bounds__\\([^)]*\\)\\s+)?(\\w+)\\s*\\(");
    for (std::sregex_iterator at(program->source.begin(), program->source.end(), kernel), end; at != end; ++at)
        kernels.insert((*at)[1]);
    {
        std::ofstream file(stem + ".cpp");
        bool together = program->source.find("__syncthreads") != std::string::npos;
        bool loops = program->source.find("CUPY_FOR") != std::string::npos && !together;
        file << "#define STANDIN_TOGETHER " << together << "\n#define STANDIN_LOOPS " << loops << "\n#include \"kernel.h\"\n";
        file << program->source << "\n";
        for (auto &name : kernels) {
            file << "extern \"C\" void *standin_bind_" << name << "(void **p) { return standin_bind(&" << name << ", p); }\n";
            program->lowered[name] = name;
        }
    }
    std::string command = "g++ -w -O1 -fpermissive -shared -fPIC -std=c++17 -I'" + folder + "' -I'" + folder + "/include'" + more +
                          " -o '" + stem + ".so' '" + stem + ".cpp' >'" + stem + ".log' 2>&1";
    int code = system(command.c_str());
    program->log = read(stem + ".log");
    if (!code) rename((stem + ".so").c_str(), program->path.c_str());
    if (code && getenv("STANDIN_TELL")) fprintf(stderr, "standin: %s\n%s\n", command.c_str(), program->log.substr(0, 3000).c_str());
    return code ? 6 : 0;
}
STANDIN int nvrtcGetProgramLogSize(Program *program, size_t *found) { return *found = program->log.size() + 1, 0; }
STANDIN int nvrtcGetProgramLog(Program *program, char *found) { return strcpy(found, program->log.c_str()), 0; }
STANDIN int nvrtcGetCUBINSize(Program *program, size_t *found) { return *found = program->path.size() + 1, 0; }
STANDIN int nvrtcGetCUBIN(Program *program, char *found) { return strcpy(found, program->path.c_str()), 0; }
STANDIN int nvrtcGetPTXSize(Program *program, size_t *found) { return *found = program->path.size() + 1, 0; }
STANDIN int nvrtcGetPTX(Program *program, char *found) { return strcpy(found, program->path.c_str()), 0; }
