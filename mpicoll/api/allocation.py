"""Allocate arrays in memory that the ranks of a node share."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

import numpy as np

from mpicoll.diagnosis.call import CallDescription
from mpicoll.errors import wrong_argument
from mpicoll.memory.dtypes import element
from mpicoll.operations import composed, execution
from mpicoll.operations.prepare.refusal import member
from mpicoll.runtime.call_site import call_site
from mpicoll.runtime.settings import need_bool
from mpicoll.runtime.waiting import Pollable
from mpicoll.transports.control import Agreed


def empty(shape: Any, dtype: Any = float, *, group: Any = None, shared: bool = True) -> Any:
    """Return an array without initial values, in memory that the members share if they are on one node.

    All members call this function with the same arguments. An ``all_reduce`` of such an array, or of the same contiguous part of
    the array on all members, reduces 64 KiB and more in place (on two members 2 MiB and more): no element is copied into other
    memory first. Other calls use the array as any array. Between start and end of a call on the array, its contents may change,
    as those of any array of a call.

    Args:
        shape: an int or a tuple of ints, as for numpy.empty.
        dtype: a dtype that can be moved (docs/arrays.md).
        group: the group; default the world. Only calls on this group reduce the array in place. A rank that is not in the group
            gets None, and a warning.
        shared: False: an ordinary array, without communication.

    Returns:
        A numpy.ndarray: an ordinary array if the members are on several nodes, if there is no shared memory, and with
        ``MPICOLL_ENGINE=mpi``. The memory is freed when no array of any member uses it. The memory is in ``/dev/shm``, which may
        be small in a container, and does not count for ``MPICOLL_SHM_MB``.

    Raises:
        TypeError, ValueError: a wrong shape or dtype. At check level ``full`` the other members raise CollectiveMismatchError.
        CollectiveMismatchError: the members passed different shapes or dtypes.
        Others as :func:`mpicoll.broadcast`.

    Source: torch.distributed._symmetric_memory.empty; MPI_Win_allocate_shared (MPI-4.1 section 12.2.3).
    """
    size: tuple[int, ...] = ()
    kind = np.dtype(float)
    error: Exception | None = None
    try:
        shared = need_bool(shared, "shared")
    except Exception as wrong:
        error = wrong
    if error is None and not shared:
        return np.empty(shape, dtype)
    found = member(group, "empty")
    if found is None:
        return None
    execution.enter(found, "empty")
    try:
        if error is not None:
            raise error
        size, kind = _shape(shape), np.dtype(dtype)
        element(kind)
    except Exception as wrong:
        error = wrong_argument(wrong)
    nbytes = math.prod(size) * kind.itemsize
    call = CallDescription("empty", (size, str(kind)) if error is None else (), call_site(), error=error)
    node = found.pair.node
    memory: list[Any] = []

    def steps(agreed: Agreed) -> Generator[Pollable, None, None]:
        if node is not None and nbytes and found.pair.selection.mode != "mpi":
            yield from node.prepare()
            if node.usable:
                made = yield from node.share(nbytes)
                if not isinstance(made, str):
                    memory.append(made)
                    found.prepared.clear()  # a cached call may get such an array from now on, and must reduce it in place

    composed.run(found, call, steps)
    return np.asarray(memory[0]).view(kind).reshape(size) if memory else np.empty(size, kind)


def _shape(shape: Any) -> tuple[int, ...]:
    given = (shape,) if hasattr(shape, "__index__") else tuple(shape)
    if any(not hasattr(each, "__index__") or isinstance(each, bool) for each in given):
        raise TypeError(f"shape must be an integer or a tuple of integers, got {shape!r}")
    size = tuple(int(each) for each in given)
    if min(size, default=0) < 0:
        raise ValueError(f"negative dimensions are not allowed: {shape!r}")
    return size
