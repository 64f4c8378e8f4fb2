/* The setting of all polls of this process. */

#include "poll.h"

int poll_yields;
