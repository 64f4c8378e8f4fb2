/* Copies from and to the memory of another process on this node, by one system call (process_vm_readv(2), Linux 3.2). The kernel
   allows them between processes of one user that may trace each other. */

#ifndef MPICOLL_PEER_MEMORY_H
#define MPICOLL_PEER_MEMORY_H

#include <stddef.h>
#include <stdint.h>

/* What identifies a process to its peers: a word of its memory that no other process has at this address. */
typedef struct {
    int64_t pid, address, value;
} PeerWord;

/* Return the word of this process. A forked process has its own. */
PeerWord peer_word(void);
/* Return whether this process can read and write the memory of the process with this word. The word stays as it is. */
int peer_allows_copies(PeerWord word);
/* Copy bytes from or to the memory of a process; return 0 if the kernel does not copy all of them. */
int peer_read(int64_t pid, char *local, int64_t remote, ptrdiff_t bytes);
int peer_write(int64_t pid, const char *local, int64_t remote, ptrdiff_t bytes);

#endif
