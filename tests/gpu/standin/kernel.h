// What a kernel of CUDA needs to be compiled for the host: its names, and what runs all its threads.
//
// STANDIN_LOOPS: each thread of it takes what is left of a loop, so that one takes all. STANDIN_TOGETHER: its threads meet.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <limits.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <ucontext.h>
#include <vector_functions.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

// CuPy's headers ask which CUDA this is.
#define __CUDACC_VER_MAJOR__ 12
#define __CUDACC_VER_MINOR__ 9
#undef __global__
#undef __device__
#undef __host__
#undef __constant__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __shared__
#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __shared__ static thread_local
using std::max;
using std::min;

struct standin_three { unsigned x, y, z; };
static thread_local standin_three threadIdx, blockIdx, blockDim, gridDim;
static const int warpSize = 32;
static inline long long clock64() { timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1000000000ll + t.tv_nsec; }
static inline unsigned __float_as_uint(float f) { unsigned u; memcpy(&u, &f, 4); return u; }
static inline float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
#define __popc __builtin_popcount
#define __popcll __builtin_popcountll
#define __clz __builtin_clz
static inline int __float_as_int(float f) { int u; memcpy(&u, &f, 4); return u; }
static inline float __int_as_float(int u) { float f; memcpy(&f, &u, 4); return f; }
static inline double __longlong_as_double(long long u) { double f; memcpy(&f, &u, 8); return f; }
static inline long long __double_as_longlong(double f) { long long u; memcpy(&u, &f, 8); return u; }
// One thread after the other: nothing comes between.
template <class T> static inline T standin_swap(T *at, T value) { T old = *at; *at = value; return old; }
#define STANDIN_ATOMIC(T) \
    static inline T atomicAdd(T *at, T value) { return standin_swap(at, (T)(*at + value)); } \
    static inline T atomicSub(T *at, T value) { return standin_swap(at, (T)(*at - value)); } \
    static inline T atomicMax(T *at, T value) { return standin_swap(at, std::max(*at, value)); } \
    static inline T atomicMin(T *at, T value) { return standin_swap(at, std::min(*at, value)); } \
    static inline T atomicExch(T *at, T value) { return standin_swap(at, value); } \
    static inline T atomicCAS(T *at, T other, T value) { return standin_swap(at, *at == other ? value : *at); }
STANDIN_ATOMIC(int)
STANDIN_ATOMIC(unsigned)
STANDIN_ATOMIC(unsigned long long)
STANDIN_ATOMIC(unsigned short)
static inline float atomicAdd(float *at, float value) { return standin_swap(at, *at + value); }
static inline double atomicAdd(double *at, double value) { return standin_swap(at, *at + value); }
using std::isnan; using std::isinf; using std::isfinite; using std::signbit;

// The threads of a block, which meet in __syncthreads: each on a stack of its own.
static thread_local ucontext_t standin_home;
static thread_local std::vector<ucontext_t> *standin_threads;
static thread_local size_t standin_me;
static thread_local std::vector<char> *standin_over;
static thread_local std::function<void()> *standin_work;
static inline void __syncthreads() { swapcontext(&(*standin_threads)[standin_me], &standin_home); }
static inline void __threadfence() {}
static inline void __syncwarp(unsigned = 0) { __syncthreads(); }

static void standin_begin() {
    (*standin_work)();
    (*standin_over)[standin_me] = 1;
    setcontext(&standin_home);
}

static void standin_block(std::function<void()> &work) {
    size_t many = size_t(blockDim.x) * blockDim.y * blockDim.z, stack = 32 << 10;
    std::vector<ucontext_t> threads(many);
    std::vector<char> over(many, 0);
    static thread_local std::vector<char> stacks;  // kept: there are many blocks
    if (stacks.size() < many * stack) stacks.resize(many * stack);
    standin_threads = &threads; standin_over = &over; standin_work = &work;
    for (size_t at = 0; at < many; at++) {
        getcontext(&threads[at]);
        threads[at].uc_stack.ss_sp = &stacks[at * stack];
        threads[at].uc_stack.ss_size = stack;
        threads[at].uc_link = nullptr;
        makecontext(&threads[at], standin_begin, 0);
    }
    for (size_t left = many; left;) {
        left = 0;
        for (size_t at = 0; at < many; at++) {
            if (over[at]) continue;
            standin_me = at;
            threadIdx = {unsigned(at % blockDim.x), unsigned(at / blockDim.x % blockDim.y), unsigned(at / blockDim.x / blockDim.y)};
            swapcontext(&standin_home, &threads[at]);
            left += !over[at];
        }
    }
}

extern "C" void standin_run(void *bound, const unsigned *grid, const unsigned *block) {
    auto work = static_cast<std::function<void()> *>(bound);
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    if (STANDIN_LOOPS) {  // each thread takes what is left, so one takes all
        gridDim = blockDim = {1, 1, 1};
        blockIdx = threadIdx = {0, 0, 0};
        (*work)();
    } else {
        for (unsigned z = 0; z < gridDim.z; z++)
            for (unsigned y = 0; y < gridDim.y; y++)
                for (unsigned x = 0; x < gridDim.x; x++) {
                    blockIdx = {x, y, z};
                    if (STANDIN_TOGETHER) {
                        standin_block(*work);
                        continue;
                    }
                    for (unsigned k = 0; k < blockDim.z; k++)
                        for (unsigned j = 0; j < blockDim.y; j++)
                            for (unsigned i = 0; i < blockDim.x; i++) {
                                threadIdx = {i, j, k};
                                (*work)();
                            }
                }
    }
    delete work;
}

template <class... A, size_t... I>
static void *standin_bind_each(void (*kernel)(A...), void **p, std::index_sequence<I...>) {
    std::tuple<std::remove_cv_t<std::remove_reference_t<A>>...> held(*static_cast<std::remove_cv_t<std::remove_reference_t<A>> *>(p[I])...);
    return new std::function<void()>([=]() mutable { std::apply(kernel, held); });
}
template <class... A>
static void *standin_bind(void (*kernel)(A...), void **p) {
    return standin_bind_each(kernel, p, std::index_sequence_for<A...>());
}
