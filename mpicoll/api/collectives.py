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
from mpicoll.groups.registry import default, member_or_warn, state
from mpicoll.memory.memory import AnyArray
from mpicoll.memory.reduce_op import RedOpType, ReduceOp
from mpicoll.operations import dispatch
from mpicoll.operations.prepare import collectives as prepare
from mpicoll.operations.prepare.run import (
    NOT_CACHED,
    Cached,
    run_cached,
    run_prepared,
)
from mpicoll.operations.work import Work
from mpicoll.runtime.call_site import caller

_ndarray = np.ndarray


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

    Called by all members with the same source, dtype and number of elements.

    Args:
        tensor: on the source what is sent, on the others where it is received; an array of any layout, whose elements move
            in C order (docs/arrays.md).
        src: global rank of the source; or ``group_src``, its rank in the group.
        group: the group; default the world.
        async_op: return a :class:`Work` at once.
        timeout: the limit of this call; default the group's.
        name: a name for this call, which must be the same on all members (or given by none).
        stream: of arrays on a GPU, the stream before whose later work the results are there, and after whose earlier work the
            elements are read: CuPy's, torch's, or what has ``__cuda_stream__``. Default the current one (docs/gpu.md).

    Raises:
        TypeError, ValueError: wrong arguments, before anything moves. At check level ``full`` the other members raise
            CollectiveMismatchError; at the others this rank alone raises.
        CollectiveMismatchError: the members made different calls, or the arguments of one are wrong; the group is still good.
        BufferInUseError: an operation under way uses the same memory, and one of the two writes it (of this the other members
            raise CollectiveMismatchError); or it was written before the Work's ``wait``. At ``full`` alone.
        CollectiveTimeoutError: a member did not come within the limit.
        PeerFailedError, PeerExitedError: a member failed, or ended without making this call.
        DeadlockError: it is certain that ranks, this one among them, wait for each other and nobody can release them.
        GroupBrokenError: a member gave the group up, while this one waited or before.
        DistBackendError: MPI reported an error.

    After the last five the group is broken. With ``async_op`` what the others do shows in the Work's ``wait``.

    Source: torch.distributed.broadcast; MPI-4.1 section 6.4.
    """
    array = tensor if type(tensor) is _ndarray else dispatch.view_of(tensor)
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
    """Reduce ``tensor`` over all members, in place; all of them hold the result.

    Called by all members with the same op, dtype and number of elements.

    Args:
        tensor: input and output. float16 and bfloat16 are reduced as float32, and rounded once.
        op: SUM, AVG (floating point and complex), PRODUCT, MIN, MAX, BAND, BOR, BXOR (integers and bool) or
            ``PREMUL_SUM(factor)``. On bool SUM and MAX are logical or, PRODUCT and MIN logical and.
        group, async_op, timeout, name, stream: as in :func:`broadcast`.

    Raises:
        RuntimeError, ValueError: the op has no meaning on this dtype.
        Others as :func:`broadcast`.

    Source: torch.distributed.all_reduce; MPI-4.1 section 6.9.6.
    """
    key: Any = None
    array = tensor if type(tensor) is _ndarray else dispatch.view_of(tensor)
    if array is not None and type(op) is RedOpType:
        known: Any = default.world if group is None else group
        key = (op, array.dtype, array.shape)
        if not async_op and timeout is None and name is None:
            try:  # as dispatch.again, without the call of it, which takes a sixth of what all takes
                prepared = known.prepared[key]
            except (KeyError, AttributeError, TypeError):
                pass
            else:
                if prepared.shared is not None and prepared.shared.run(known, prepared, array, array, caller()):
                    return None
    cached, arguments = Cached(key, array, array, tensor), (tensor, op, async_op)
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
    """Reduce ``tensor`` over all members; the rank ``dst`` holds the result in ``tensor``, the others keep theirs.

    Called by all members with the same destination, op, dtype and number of elements.

    Args:
        tensor: input, and on the destination output.
        dst: global rank of the destination; or ``group_dst``, its rank in the group.
        op: as in :func:`all_reduce`.
        group, async_op, timeout, name, stream: as in :func:`broadcast`.

    Raises: as :func:`all_reduce`.

    Source: torch.distributed.reduce; MPI-4.1 section 6.9.1.
    """
    array = tensor if type(tensor) is _ndarray else dispatch.view_of(tensor)
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
    """Return when all members have called it.

    Called by all members.

    Args:
        group: the group; default the world.
        async_op: return a :class:`Work` at once.
        device_ids: taken and ignored, as on torch's CPU backends (a list of integers).
        timeout: the limit of this call; default the group's.
        name: a name for this barrier, which must be the same on all members (or given by none).

    Raises: as :func:`broadcast`, but for memory. It compares at check level ``roll``, too.

    Source: torch.distributed.barrier; MPI-4.1 section 6.3.
    """
    if device_ids is None:
        known: Any = default.world if group is None else group
        prepared: Any = None
        try:  # as dispatch.again, without the call of it
            prepared = known.prepared["barrier"]
        except (KeyError, AttributeError):
            pass
        if prepared is not None and (known.stopping is None or async_op):
            plain = not async_op and timeout is None and name is None
            if plain and prepared.shared is not None and prepared.shared.run(known, prepared, None, None, caller()):
                return None
            made = dispatch.again(group, "barrier", None, None, 2, timeout, name, async_op, [])
            if isinstance(made, Work):
                return made
            if made:
                return None
    return run_prepared("barrier", group, prepare.barrier, (device_ids, async_op), async_op, timeout, name)


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
