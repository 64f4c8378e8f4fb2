"""Broadcast, reductions and barriers, with torch.distributed's names and arguments."""

from __future__ import annotations

import pdb
import sys
import warnings
from datetime import timedelta
from typing import Any

import numpy as np

from mpicoll.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DeadlockError,
    DistError,
    PeerExitedError,
    PeerFailedError,
)
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.groups.registry import state
from mpicoll.memory.memory import AnyArray
from mpicoll.memory.protocols import view_of
from mpicoll.memory.reduce_op import RedOpType, ReduceOp
from mpicoll.operations.prepare import collectives as prepare
from mpicoll.operations.prepare.refusal import member, refuse
from mpicoll.operations.prepare.run import (
    NOT_CACHED,
    Cached,
    run_cached,
)
from mpicoll.operations.work import Work
from mpicoll.runtime.call_site import call_site
from mpicoll.runtime.settings import has_type, need_timedelta

_ndarray = np.ndarray
_BARRIER = Cached("barrier", None, None, [])


def broadcast(
    tensor: AnyArray,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
    stream: Any = None,
) -> Work | None:
    """Copy ``tensor`` of one rank to all members of the group.

    All members call this function with the same source, dtype and number of elements.

    Args:
        tensor: on the source the array to send, on other members the array for the result. An array of any shape and layout;
            its elements move in C order (docs/arrays.md).
        src: global rank of the source; or ``group_src``, its rank in the group.
        group: the group; default the world. A rank that is not in the group gets None, and a warning.
        async_op: return a :class:`Work` at once; otherwise return None when the call is complete on this rank.
        timeout: time limit of this call; default the limit of the group.
        name: a name for this call, the same on all members (or None on all).
        stream: for arrays on a GPU, a stream of CuPy or torch, or an object with ``__cuda_stream__``; default the current
            stream. The call reads after earlier work of the stream, and writes before later work of the stream (docs/gpu.md).

    Raises:
        TypeError, ValueError: wrong arguments, before anything moves. At check level ``full`` the other members raise
            CollectiveMismatchError; at ``roll`` and ``off`` only this rank raises.
        CollectiveMismatchError: the members made different calls, or the arguments of a member are wrong; the group can be used.
        BufferInUseError: a pending operation uses the same memory, and one of both operations writes the memory (the other
            members raise CollectiveMismatchError); or the program wrote the memory before ``wait`` of the Work. Only at ``full``.
        CollectiveTimeoutError: a member did not make this call within the limit.
        PeerFailedError, PeerExitedError: a member failed, or ended without making this call.
        DeadlockError: ranks, including this rank, certainly wait for each other for ever.
        GroupBrokenError: a member withdrew from a call of the group, before or during this call.
        DistBackendError: MPI reported an error.

    After CollectiveTimeoutError, and each error below it in the list, the group is broken. With ``async_op``, ``wait`` of the
    Work raises the errors that depend on other members.

    Source: torch.distributed.broadcast; MPI-4.1 section 6.4.
    """
    array = tensor if type(tensor) is _ndarray else view_of(tensor)
    plain = array is not None and type(src) is int and group_src is None
    cached = (("broadcast", src, array.dtype, array.shape), array, array, tensor) if plain else NOT_CACHED
    arguments = tensor, src, group_src
    return run_cached("broadcast", group, cached, prepare.broadcast, arguments, async_op, timeout, name, stream)


def all_reduce(
    tensor: AnyArray,
    op: RedOpType | ReduceOp = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
    stream: Any = None,
) -> Work | None:
    """Reduce ``tensor`` over all members, in place; all members hold the result.

    All members call this function with the same op, dtype and number of elements.

    Args:
        tensor: input and output. float16 and bfloat16 are reduced as float32, and rounded once.
        op: SUM, AVG (floating point and complex), PRODUCT, MIN, MAX, BAND, BOR, BXOR (integers and bool) or
            ``PREMUL_SUM(factor)``. On bool SUM and MAX are logical or, PRODUCT and MIN logical and.
        group, async_op, timeout, name, stream: as in :func:`broadcast`.

    Raises:
        RuntimeError, ValueError: the op is not defined on this dtype; raised as other wrong arguments.
        Others as :func:`broadcast`.

    Source: torch.distributed.all_reduce; MPI-4.1 section 6.9.6.
    """
    array = tensor if type(tensor) is _ndarray else view_of(tensor)
    plain = array is not None and type(op) is RedOpType
    cached = ((op, array.dtype, array.shape), array, array, tensor) if plain else NOT_CACHED
    arguments = tensor, op, async_op
    return run_cached("all_reduce", group, cached, prepare.all_reduce, arguments, async_op, timeout, name, stream)


def reduce(
    tensor: AnyArray,
    dst: int | None = None,
    op: RedOpType | ReduceOp = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
    stream: Any = None,
) -> Work | None:
    """Reduce ``tensor`` over all members into ``tensor`` of the rank ``dst``; other members keep their ``tensor``.

    All members call this function with the same destination, op, dtype and number of elements.

    Args:
        tensor: input, and on the destination output.
        dst: global rank of the destination; or ``group_dst``, its rank in the group.
        op: as in :func:`all_reduce`.
        group, async_op, timeout, name, stream: as in :func:`broadcast`.

    Raises: as :func:`all_reduce`.

    Source: torch.distributed.reduce; MPI-4.1 section 6.9.1.
    """
    array = tensor if type(tensor) is _ndarray else view_of(tensor)
    plain = array is not None and type(op) is RedOpType and type(dst) is int and group_dst is None
    cached = (("reduce", op, dst, array.dtype, array.shape), array, array, tensor) if plain else NOT_CACHED
    arguments = tensor, dst, op, group_dst
    return run_cached("reduce", group, cached, prepare.reduce, arguments, async_op, timeout, name, stream)


def barrier(
    group: Any = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    timeout: timedelta | None = None,
    *,
    name: str | None = None,
) -> Work | None:
    """Wait until all members have called this function.

    All members call this function, or :func:`monitored_barrier` in its place.

    Args:
        group: the group; default the world.
        device_ids: a list, accepted and ignored, as on torch's CPU backends.
        async_op, timeout, name: as in :func:`broadcast`.

    Raises: as :func:`broadcast`, except BufferInUseError. A barrier is compared at check level ``roll``, too.

    Source: torch.distributed.barrier; MPI-4.1 section 6.3.
    """
    cached, arguments = _BARRIER if device_ids is None else NOT_CACHED, (device_ids, async_op)
    return run_cached("barrier", group, cached, prepare.barrier, arguments, async_op, timeout, name, None)


def monitored_barrier(
    group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait until all members have called this function; otherwise name, on rank 0 of the group, a missing rank.

    All members call this function, or :func:`barrier` in its place. The two differ in the text of the exceptions, which here
    begins with torch's text.

    Args:
        group: the group; default the world. A rank that is not in the group gets a warning.
        timeout: time limit of this call; default the limit of the group. A float is seconds, with a warning, as in torch.
            With ``timedelta(0)`` the call ends after 0.1 s, whereas in other calls it means the limit of the group.
        wait_all_ranks: rank 0 names all missing ranks, not only the first.

    Raises:
        CollectiveTimeoutError, PeerFailedError, PeerExitedError: a member did not make this call within the limit, failed, or
            ended. On rank 0 the text begins ``[Rank 0]: Rank 3 failed to pass monitoredBarrier in 2000 ms``, or
            ``[Rank 0]: Ranks 1, 3 failed …`` with ``wait_all_ranks``; on other ranks it says that this rank reached the
            barrier. These are ranks in the group; ``err.ranks`` has global ranks.
        CollectiveMismatchError, DeadlockError: a member is in another call; the text begins in the same way, without the time.
        Others as :func:`barrier`.

    Source: torch.distributed.monitored_barrier (in torch for gloo only).
    """
    found = member(group, "monitored_barrier")
    if found is None:
        return
    limit: Any = timeout
    if has_type(timeout, float):
        warnings.warn(
            f"Please specify timeout arg as a timedelta: {timeout} is taken as seconds", UserWarning, stacklevel=2
        )
        try:
            limit = timeout = timedelta(seconds=limit)
        except (OverflowError, ValueError):  # infinite, or no number
            refuse(
                found, "barrier", call_site(), ValueError(f"timeout must be finite, got {timeout}"), "monitored_barrier"
            )
    if has_type(limit, timedelta) and limit >= timedelta(0):  # a negative limit is refused
        limit = max(limit, _AT_ONCE)
    try:
        run_cached("barrier", found, _BARRIER, prepare.barrier, (None, False), False, limit, None, None)
    except (CollectiveTimeoutError, PeerFailedError, PeerExitedError) as error:
        limit = found.timeout if timeout is None else need_timedelta(timeout).total_seconds()
        _put_before(error, found, error.ranks, limit, wait_all_ranks)
        raise
    except (CollectiveMismatchError, DeadlockError) as error:
        me = found.ranks[found.rank()]
        mine = [(call["op"], call["group"]) for call in error.calls if me in call["ranks"]]
        came = {rank for call in error.calls if (call["op"], call["group"]) in mine for rank in call["ranks"]} | {me}
        _put_before(error, found, set(found.ranks) - came, None, wait_all_ranks)
        raise


def _put_before(error: DistError, group: ProcessGroup, missing: Any, seconds: float | None, every: bool) -> None:
    """Put torch's text before the text of an error; ``seconds``: the limit of the call, None if the limit has not passed."""
    error.args = (f"{_in_torchs_words(group, missing, seconds, every)}\n{error}", *error.args[1:])


def _in_torchs_words(group: ProcessGroup, missing: Any, seconds: float | None, every: bool) -> str:
    me = group.rank()
    if me:
        return (
            f"Rank {me} successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. "
            "Rank 0 names the rank that is missing:"
        )
    ranks = [place for place, rank in enumerate(group.ranks) if rank in set(missing)]
    first = f"Rank {ranks[0]}" if ranks else "A rank"
    who = "Ranks " + ", ".join(map(str, ranks)) if every and ranks else first
    failed = f"[Rank 0]: {who} failed to pass monitoredBarrier"
    if seconds is None:
        return failed + ":"
    passed = f"{round(seconds * 1000)} ms"
    if seconds <= 0:
        passed += f". Rank 0 timed out in monitoredBarrier after {passed}"
    return f"{failed} in {passed}"


_AT_ONCE = timedelta(milliseconds=100)


_skipped = 0


def breakpoint(rank: int = 0, skip: int = 0, timeout_s: float = 3600) -> None:
    """Open a debugger's prompt on one rank, while other ranks wait for that rank in a barrier.

    All ranks of the world call this function.

    Args:
        rank: global rank that stops. Launchers give their standard input to rank 0 only.
        skip: number of calls that return at once, before the first call that stops.
        timeout_s: seconds for which the other ranks wait.

    Raises: as :func:`barrier`.

    Source: torch.distributed.breakpoint.
    """
    global _skipped
    if _skipped < skip:
        _skipped += 1
        return
    if state().world.rank() == rank:
        sys.stdout.write(
            f"mpicoll: rank {rank} stops here, and the other ranks wait: `up` shows the line that called breakpoint\n"
        )
        sys.stdout.flush()
        pdb.set_trace()
    barrier(timeout=timedelta(seconds=timeout_s))
