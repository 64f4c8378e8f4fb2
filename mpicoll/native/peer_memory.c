/* Copies between processes. Without process_vm_readv(2) no memory of another process can be read. */

#define _GNU_SOURCE

#include "peer_memory.h"

#include "poll.h"

#include <unistd.h>

#ifdef __linux__
#include <sys/uio.h>

typedef ssize_t (*Copy)(pid_t, const struct iovec *, unsigned long, const struct iovec *, unsigned long, unsigned long);

static int copy_all(Copy copy, int64_t pid, char *local, int64_t remote, ptrdiff_t bytes)
{
    for (ptrdiff_t done = 0; done < bytes;) {
        const struct iovec here = {local + done, (size_t)(bytes - done)};
        const struct iovec there = {(void *)(uintptr_t)(remote + done), (size_t)(bytes - done)};
        const ssize_t copied = copy((pid_t)pid, &here, 1, &there, 1, 0);
        if (copied <= 0)
            return 0;
        done += copied;
    }
    return 1;
}

int peer_read(int64_t pid, char *local, int64_t remote, ptrdiff_t bytes)
{
    return copy_all(process_vm_readv, pid, local, remote, bytes);
}

int peer_write(int64_t pid, const char *local, int64_t remote, ptrdiff_t bytes)
{
    return copy_all(process_vm_writev, pid, (char *)local, remote, bytes);
}
#else
int peer_read(int64_t pid, char *local, int64_t remote, ptrdiff_t bytes)
{
    (void)pid, (void)local, (void)remote, (void)bytes;
    return 0;
}

int peer_write(int64_t pid, const char *local, int64_t remote, ptrdiff_t bytes)
{
    (void)pid, (void)local, (void)remote, (void)bytes;
    return 0;
}
#endif

PeerWord peer_word(void)
{
    static int64_t word, owner;
    const int64_t pid = getpid();
    if (owner != pid) {
        word = (int64_t)((uint64_t)now_ns() << 22 | (uint64_t)pid); /* pids are less than 2^22 */
        owner = pid;
    }
    return (PeerWord){pid, (int64_t)(uintptr_t)&word, word};
}

int peer_allows_copies(PeerWord word)
{
    int64_t found = 0;
    return peer_read(word.pid, (char *)&found, word.address, sizeof found) && found == word.value &&
           peer_write(word.pid, (const char *)&found, word.address, sizeof found);
}
