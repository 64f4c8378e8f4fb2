/* Looking for a number that another process stores: for a bounded time. */

#ifndef MPICOLL_POLL_H
#define MPICOLL_POLL_H

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#if defined(__x86_64__) || defined(__i386__)
#define RELAX() __builtin_ia32_pause()
#else
#define RELAX() ((void)0)
#endif

enum { POLLS_BETWEEN_CLOCKS = 32 };

/* Whether a poll yields the core each time it has read the clock: the process that is waited for may need this core. */
extern int poll_yields;

static inline int64_t load(const char *at)
{
    return atomic_load_explicit((const _Atomic int64_t *)at, memory_order_acquire);
}

static inline void store(char *at, int64_t value)
{
    atomic_store_explicit((_Atomic int64_t *)at, value, memory_order_release);
}

/* Return nanoseconds of the clock of time.monotonic_ns. */
static inline int64_t now_ns(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (int64_t)at.tv_sec * 1000000000 + at.tv_nsec;
}

/* Return whether the number at `at` is `value` or above. Poll until `budget` nanoseconds after `began`; negative: look once. */
static inline int poll_for(const char *at, int64_t value, int64_t began, int64_t budget)
{
    for (int polls = 0; load(at) < value; polls++) {
        if (budget < 0)
            return 0;
        if (polls == POLLS_BETWEEN_CLOCKS) {
            polls = 0;
            if (now_ns() - began > budget)
                return 0;
            if (poll_yields)
                sched_yield();
        }
        RELAX();
    }
    return 1;
}

#endif
