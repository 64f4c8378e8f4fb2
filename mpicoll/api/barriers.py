"""Barriers with something around them: one that says who is missing in torch's words, and one behind a debugger's prompt."""

from __future__ import annotations

import pdb
import sys
import warnings
from datetime import timedelta
from typing import Any

from mpicoll.api.collectives import barrier
from mpicoll.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DeadlockError,
    DistError,
    PeerExitedError,
    PeerFailedError,
)
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.groups.registry import member_or_warn, state


def monitored_barrier(
    group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """Return when all members have called it; otherwise rank 0 of the group names the rank that has not come.

    Called by all members. It is :func:`barrier` (which another member may call in its stead) with torch's words in the
    exceptions, before those of the library.

    Args:
        group: the group; default the world.
        timeout: the limit of this call; default the group's. A float, seconds, is taken with a warning, as in torch; and
            ``timedelta(0)`` is over at once, where elsewhere it means the group's limit.
        wait_all_ranks: rank 0 names all that are missing, and not the first of them alone.

    Raises:
        CollectiveTimeoutError, PeerFailedError, PeerExitedError: a member did not come within the limit, failed, or ended
            without coming. On rank 0 the text begins ``[Rank 0]: Rank 3 failed to pass monitoredBarrier in 2000 ms``, or
            ``[Rank 0]: Ranks 1, 3 failed …`` with ``wait_all_ranks``; on the others it says that they came. Ranks are those
            in the group; ``err.ranks`` has the global ones.
        CollectiveMismatchError, DeadlockError: a member is in another call; the text begins likewise.
        Others as :func:`barrier`.

    Source: torch.distributed.monitored_barrier (there for gloo alone).
    """
    found = member_or_warn(group, "monitored_barrier")
    if found is None:
        return
    if isinstance(timeout, float):
        warnings.warn(
            f"Please specify timeout arg as a timedelta: {timeout} is taken as seconds", UserWarning, stacklevel=2
        )
        timeout = timedelta(seconds=timeout)
    limit = max(timeout, _AT_ONCE) if isinstance(timeout, timedelta) else timeout
    try:
        barrier(found, timeout=limit)
    except (CollectiveTimeoutError, PeerFailedError, PeerExitedError) as error:
        _put_before(error, found, error.ranks, timeout, wait_all_ranks)
        raise
    except (CollectiveMismatchError, DeadlockError) as error:
        me = found.ranks[found.rank()]
        mine = [(call["op"], call["group"]) for call in error.calls if me in call["ranks"]]
        came = {rank for call in error.calls if (call["op"], call["group"]) in mine for rank in call["ranks"]} | {me}
        _put_before(error, found, set(found.ranks) - came, timeout, wait_all_ranks)
        raise


def _put_before(error: DistError, group: ProcessGroup, missing: Any, timeout: Any, every: bool) -> None:
    """Put torch's words before those of an error."""
    seconds = group.timeout if timeout is None else timeout.total_seconds()
    error.args = (f"{_in_torchs_words(group, missing, seconds, every)}\n{error}", *error.args[1:])


def _in_torchs_words(group: ProcessGroup, missing: Any, seconds: float, every: bool) -> str:
    me = group.rank()
    if me:
        return (
            f"Rank {me} successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. "
            "Rank 0 names the rank that is missing:"
        )
    ranks = [place for place, rank in enumerate(group.ranks) if rank in set(missing)]
    first = f"Rank {ranks[0]}" if ranks else "A rank"
    who = "Ranks " + ", ".join(map(str, ranks)) if every and ranks else first
    passed = f"{round(seconds * 1000)} ms"
    if seconds <= 0:
        passed += f". Rank 0 timed out in monitoredBarrier after {passed}"
    return f"[Rank 0]: {who} failed to pass monitoredBarrier in {passed}"


_AT_ONCE = timedelta(milliseconds=100)


_skipped = 0


def breakpoint(rank: int = 0, skip: int = 0, timeout_s: float = 3600) -> None:
    """Open a debugger's prompt on one rank, while the others wait for it in a barrier.

    Called by all ranks of the world.

    Args:
        rank: the rank that stops. Launchers give their standard input to rank 0 alone.
        skip: how many calls pass by before the first that stops.
        timeout_s: seconds for which the others wait.

    Raises: as :func:`barrier`.

    Source: torch.distributed.breakpoint.
    """
    global _skipped
    if _skipped < skip:
        _skipped += 1
        return
    if state().world.rank() == rank:
        sys.stdout.write(
            f"mpicoll: rank {rank} stops here, and the others wait: `up` is the line that called breakpoint\n"
        )
        sys.stdout.flush()
        pdb.set_trace()
    barrier(timeout=timedelta(seconds=timeout_s))
