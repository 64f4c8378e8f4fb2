"""Persistent calls: a handle that a loop starts and waits for many times.

A small array of members on one node is sent with the round of the call; other arrays move as in any asynchronous call.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from mpicoll.api import collectives
from mpicoll.diagnosis.call import CallDescription
from mpicoll.errors import ARGUMENT
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.memory.adapt import adapt
from mpicoll.memory.dtypes import resolve_reduction
from mpicoll.memory.half import wide
from mpicoll.memory.memory import AnyArray
from mpicoll.memory.reduce_op import RedOpType, ReduceOp
from mpicoll.operations import composed, dispatch, execution
from mpicoll.operations.prepare.refusal import member
from mpicoll.operations.work import Work
from mpicoll.runtime.call_site import CallSite, call_site, caller
from mpicoll.runtime.settings import need_timedelta

_OP = "all_reduce"


def all_reduce_init(tensor: AnyArray, op: RedOpType | ReduceOp = ReduceOp.SUM, group: Any = None) -> Plan | None:
    """Make a :class:`Plan`: an ``all_reduce`` of ``tensor`` that can be started many times.

    All members call this function with the same op, dtype and number of elements. The call waits for all members, and moves no
    data::

        plan = dist.all_reduce_init(x)
        for step in range(1000):
            fill(x)
            plan.start()
            something_else()
            plan.wait()  # x holds the sum

    Args:
        tensor: input and output of every start: any array that :func:`mpicoll.all_reduce` accepts. The plan always uses the
            present memory of the array, and keeps this memory alive.
        op: as in :func:`mpicoll.all_reduce`.
        group: the group; default the world. A rank that is not in the group gets None, and a warning.

    Raises:
        TypeError, ValueError, RuntimeError: wrong arguments, as for :func:`mpicoll.all_reduce`. The other members raise
            CollectiveMismatchError, at every check level.
        CollectiveMismatchError: the members made different calls, or the arguments of a member are wrong; the group can be used.
        CollectiveTimeoutError, PeerFailedError, PeerExitedError, DeadlockError, GroupBrokenError, DistBackendError: as
            :func:`mpicoll.broadcast`.

    Source: MPI-4.1 section 6.13 (MPI_Allreduce_init, MPI_Start, MPI_Wait).
    """
    found = member(group, "all_reduce_init")
    if found is None:
        return None
    site = call_site()
    execution.enter(found, "all_reduce_init")
    key: tuple[Any, ...] = ()
    error: Exception | None = None
    plan: Plan | None = None
    try:
        memory = wide(adapt(tensor, "tensor", writable=True))
        reduction = resolve_reduction(_OP, op, memory.dtype, memory.named)
        key = (str(reduction.op), memory.name, ("elements", memory.flat.size))
        plain = memory.pack is None and not memory.named
        plan = Plan(found, memory.flat if plain else tensor, op, site, key, memory.flat if plain else None)
    except Exception as wrong:
        setattr(wrong, ARGUMENT, True)
        error = wrong
    composed.agree(found, CallDescription("all_reduce_init", key, site, error=error), found.timeout)
    return plan


class Plan:
    """An ``all_reduce`` of one array, made once by :func:`all_reduce_init`, that can be started many times.

    Every ``start`` is a call of ``all_reduce`` with ``async_op=True``, compared with the calls of other members. These may start
    plans or call ``all_reduce``. Between ``start`` and ``wait`` the program may compute, and make other calls in the same order
    on all members of a group. The array must not be read or written in between.
    A plan that was started and never waited for is an error when its group is destroyed or the program ends. A plan needs no
    free. Only one thread at a time may use a plan.

    Source: MPI-4.1 section 6.13.
    """

    __slots__ = ("__weakref__", "_array", "_flat", "_key", "_op", "_site", "_started", "_work", "group")

    def __init__(
        self, group: ProcessGroup, array: Any, op: RedOpType | ReduceOp, site: CallSite, key: tuple[Any, ...], flat: Any
    ) -> None:
        self.group = group
        self._array, self._flat = array, flat
        self._op, self._key, self._site = op, key, site
        self._work: Work | None = None
        self._started = False

    def start(self) -> None:
        """Start an ``all_reduce`` of the present contents of the array, without waiting.

        All members start a plan, or call ``all_reduce`` with the same op, dtype and number of elements.

        Raises:
            RuntimeError: the plan was started and not waited for; no call was started.
            BufferInUseError: a pending operation uses the same memory (the other members raise CollectiveMismatchError). Only at
                check level ``full``.
            GroupBrokenError, ValueError: the group is broken, or destroyed.

        Source: MPI-4.1 section 3.9 (MPI_Start).
        """
        if self._started:
            raise RuntimeError(f"{self!r} was started and has not been waited for: call wait() before start()")
        frame, flat = caller(), self._flat
        self._work = None
        if flat is not None:
            signature = self._op, flat.dtype, flat.shape
            made = dispatch.again(self.group, signature, flat, flat, async_op=True, outputs=self._array)
            self._work = made if isinstance(made, Work) else None
        if self._work is None:
            self._work = collectives.all_reduce(self._array, self._op, self.group, async_op=True)
        self._site = CallSite(frame.f_code, frame.f_lasti)
        self._started = True

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until the started call is complete on this rank, and the array holds the result.

        Args:
            timeout: time limit of this wait; default the limit of the group.

        Raises:
            RuntimeError: the plan was not started.
            TypeError, ValueError: ``timeout`` is not a timedelta, or negative.
            Others as :meth:`mpicoll.Work.wait`. After a mismatch the plan can be started again.

        Source: MPI-4.1 section 3.7.3 (MPI_Wait).
        """
        if not self._started:
            raise RuntimeError(f"{self!r} was not started: call start() before wait()")
        if timeout is not None:
            need_timedelta(timeout)
        try:
            if self._work is not None:
                self._work.wait(timeout or timedelta(0))
        finally:
            if self._work is None or self._work._request.done:
                self._work = None
                self._started = False

    def is_completed(self) -> bool:
        """Return whether no call of the plan is pending; make progress, and never wait.

        A started call that is complete or failed is not pending. Nevertheless ``wait`` must be called before the next ``start``.

        Raises:
            CollectiveMismatchError, BufferInUseError, DistBackendError, PeerFailedError, PeerExitedError, GroupBrokenError,
                CollectiveTimeoutError: as :meth:`mpicoll.Work.is_completed`.
        """
        return self._work is None or self._work.is_completed()

    def __repr__(self) -> str:
        state = "at rest"
        if self._started:
            over = self._work is not None and self._work._request.done
            state = f"{'complete' if over else 'under way'}, started at {self._site}"
        name = CallDescription(_OP, self._key, self._site).describe() if self._key else _OP
        return f"<Plan {name} on group {self.group.display}: {state}>"
