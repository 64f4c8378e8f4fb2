/* Copies into memory that other processes read. */

#include "copy.h"

#include <stdatomic.h>
#include <string.h>

void copy_out(char *to, const char *from, ptrdiff_t bytes)
{
    if (bytes <= 0)
        return;
    memcpy(to, from, (size_t)bytes);
#if !defined(__SANITIZE_THREAD__) /* gcc's thread sanitizer knows no fences */
    /* The C library copies much at once by non-temporal stores, which later ordinary stores may pass (Intel 64 and IA-32
       Architectures Software Developer's Manual, volume 1, section 10.4.6.2). */
    if (bytes >= 4096)
        atomic_thread_fence(memory_order_seq_cst);
#endif
}
