"""A process group: its members, communicators, counters and prepared calls."""

from __future__ import annotations

import threading
import time
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from mpicoll.diagnosis import job_state
from mpicoll.diagnosis.membership import Membership, OpenBlock, count
from mpicoll.errors import CollectiveMismatchError, GroupBrokenError
from mpicoll.runtime import signals, waiting
from mpicoll.runtime.call_site import program_level
from mpicoll.runtime.mpi_library import retain_for_ever
from mpicoll.runtime.settings import need_timedelta
from mpicoll.transports.mpi.envelope import KnownSites

if TYPE_CHECKING:
    from mpicoll.groups.communicators import CommunicatorPair
    from mpicoll.runtime.settings import Level
    from mpicoll.transports.base import Movement, Plan
    from mpicoll.transports.control import Agreed


T = TypeVar("T")
MOST_PLANS = 128
MOST_NAMED = 16
"""Most places of calls that an error lists."""
MOMENT, EXCHANGED_WITHIN = 0.1, 2.0
"""Seconds for which pending calls are progressed, as an error may be on its way: all calls, and while members exchange calls."""

_NEVER = -(1 << 62)


class Stopping(Protocol):
    """Answers signals on a group (``training.stop_requests.OnSignal``)."""

    stopped: bool
    passes: int

    def remove(self) -> None:
        """Stop answering signals."""

    def brings(self) -> int:
        """Return the signal word of this rank."""

    def take(self, brought: int) -> None:
        """Receive the largest signal word of all ranks."""

    def carried(self, agreed: Agreed) -> Movement:
        """Receive the signal word of the round of a barrier."""

    def deliver(self) -> None:
        """Call the handler if the ranks have just agreed on a signal."""


class MessageCache(dict[Any, Any]):
    """Persistent sends, or receives, of a group by the arguments of the program, the oldest first.

    Attributes:
        last: the message used last, or None: most programs use it next, and a comparison is faster than a hash.
    """

    __slots__ = ("last",)

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None

    def drop(self, key: Any) -> Any:
        """Remove and return a message; a thread that looked it up before must not find it as the last one."""
        again = self.pop(key)
        again.rank = None
        if self.last is again:
            self.last = None
        return again


class PendingError(Protocol):
    """A request that has failed, or fails when the members have exchanged their calls."""

    def complete(self, limit: float) -> None:
        """Wait at most ``limit`` seconds for the end of the request, and raise its error."""

    def is_known(self) -> None:
        """Note that the program knows the outcome of the request, which is over."""


def _no_method(name: str) -> Callable[..., Any] | None:
    return None


_find_method: Callable[[str], Callable[..., Any] | None] = _no_method


def register_methods(find: Callable[[str], Callable[..., Any] | None]) -> None:
    """Register ``find(name)``, which returns a method of groups that is made of the public calls, or None."""
    global _find_method
    _find_method = find


class ProcessGroup(Membership):
    """An ordered set of ranks with communicators of its own.

    :func:`init_process_group` and :func:`new_group` make groups, and calls get them as ``group=``. ``ranks`` are global ranks.

    As in torch, calls are also methods: ``allreduce(tensors, op)``, ``broadcast(tensors, root)``, ``allgather``,
    ``reduce_scatter``, ``alltoall``, ``send(tensors, dst, tag)``, ``recv``, ``barrier()`` and others return a :class:`Work`.
    ``root``, ``dst`` and ``src`` are ranks in the group, and a tensor may be passed in a list of one.
    """

    def __init__(
        self,
        name: str,
        pair: CommunicatorPair,
        rank: int,
        timeout: float,
        *,
        level: Level = "full",
        display: str = "",
        desc: str | None = None,
    ) -> None:
        super().__init__(name, display or name, pair.ranks, rank, timeout, level, pair.receiver, pair.agreement.order)
        self.group_desc = desc or "undefined"
        self.pair = pair
        self._unknown_mismatch: PendingError | None = None
        self.waited: PendingError | None = (
            None  # the blocking call that waits beside asynchronous calls, and holds the lock
        )
        self.entered_block = None  # open block of a leader: the group refuses collectives
        self.stopping: Stopping | None = None  # answers signals on the group, on all members alike
        self.lock = threading.RLock()  # a thread holds it during a collective: one collective at a time
        self.posting = (
            threading.Lock()
        )  # a thread holds it to post a message: other threads may send during a collective
        self.known_sites = KnownSites()
        self.sends = MessageCache()
        self.receives = MessageCache()
        self.seen: set[Any] = set()
        # Numbers of lists of objects sent to and received from each rank of the group, which receives compare.
        self.objects_sent: dict[int, int] = {}
        self.objects_received: dict[int, int] = {}
        self.plans: OrderedDict[Any, Plan] = OrderedDict()  # all members make and free them at the same calls
        self.own_plans: OrderedDict[Any, Plan] = OrderedDict()  # of calls without a round: only of this rank
        self.prepared: dict[Any, Any] = {}  # calls that were prepared, by signature
        # Signatures of calls of unequal blocks, which are prepared when they are made again.
        self.unequal: dict[Any, None] = {}
        pair.receiver.torn = lambda error: self.give_up(
            f"{type(error).__name__} was raised while messages were received"
        )
        self.opened: dict[str, Any] = {}  # transports that the members have opened for this group only, by name
        self.bound_device_id: Any = None  # an attribute of torch's groups, which scripts read

    if not TYPE_CHECKING:  # so that mypy finds misspelt attributes

        def __getattr__(self, name: str) -> Any:
            """Return a method of torch's that is made of the public calls, which are in a higher layer."""
            if not name.startswith("__"):
                method = _find_method(name)
                if method is not None:
                    return partial(method, self)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def name(self) -> str:
        """Return the name of the backend, ``"mpi"``."""
        return "mpi"

    @property
    def entered_block(self) -> OpenBlock | None:
        """The open block of a leader, in which the group refuses collectives, or None."""
        return self._entered_block

    @entered_block.setter
    def entered_block(self, block: OpenBlock | None) -> None:
        if block is not None:
            self.order.closed = 1
        self._entered_block = block
        self._open_if_free()

    @property
    def unknown_mismatch(self) -> PendingError | None:
        """The asynchronous call that failed as the calls of the members differ, while the program does not know that, or None.

        The group refuses collectives meanwhile: the other members may be told that the group can still be used.
        """
        return self._unknown_mismatch

    @unknown_mismatch.setter
    def unknown_mismatch(self, request: PendingError | None) -> None:
        if request is not None:
            self.order.closed = 1
        self._unknown_mismatch = request
        self._open_if_free()

    def _open_if_free(self) -> None:
        if self._entered_block is None and self._unknown_mismatch is None and not self.destroyed:
            self.order.closed = 0

    def started(self) -> list[Any]:
        """Return the asynchronous calls whose end the program does not know."""
        unknown = self._unknown_mismatch
        calls = *self.unwaited.values(), *self.futures.values(), *([] if unknown is None else [unknown])
        return [*dict.fromkeys(calls)]

    def untold(self) -> list[Any]:
        """Return the asynchronous calls that the program has not waited for, or whose error the program does not know.

        A future that failed as the group is broken does not count: the group broke by another error.
        """
        futures = tuple(self.futures.values())  # another thread may drop futures meanwhile
        pending = {id(each) for each in futures if isinstance(each.error, (type(None), GroupBrokenError))}
        return [each for each in self.started() if id(each) not in pending]

    def tell_mismatch(self, limit: float) -> None:
        """Raise the error of :attr:`unknown_mismatch`, if there is one. The caller has the lock, and makes a collective next.

        Args:
            limit: seconds that this rank waits if the members still exchange their calls.
        """
        unknown = self._unknown_mismatch
        if unknown is not None:
            try:
                unknown.complete(limit)
            finally:
                if self._unknown_mismatch is None:
                    unknown.is_known()

    @property
    def compares(self) -> bool:
        """Whether messages are compared; at other levels than ``full`` a message only has to fit."""
        return self.level == "full"

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of every later call of this group on this rank. Calls that were started keep their limit.

        Raises:
            TypeError: not a timedelta.
            ValueError: not positive.
        """
        self.timeout = need_timedelta(timeout, positive=True).total_seconds()

    def __repr__(self) -> str:
        return f"<ProcessGroup {self.display}: rank {self._rank} of {self._size}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            f"cannot pickle or copy {self!r}: its communicators belong to this process. Leave the group out of objects that are "
            "copied, saved or sent, or give the object that holds the group a __getstate__ without it"
        )

    def usable(self, operation: str) -> None:
        """Raise if the group is destroyed (ValueError) or broken (GroupBrokenError)."""
        if self.destroyed:
            raise ValueError(
                f"Invalid process group specified: {operation} on group {self.display}, which was destroyed at "
                f"{self.destroyed_at}"
            )
        if self.broken is not None:
            raise GroupBrokenError(
                f"{operation} on group {self.display}: the group cannot be used any more, because {self.broken}. "
                "Ranks that go on need a new group, which its members alone make: "
                "new_group(ranks that have not ended, use_local_synchronization=True)"
            )

    def gone(self) -> bool:
        """Return whether the group is broken or destroyed, so that no pending call can complete."""
        return self.broken is not None or self.destroyed

    def give_up(self, why: str, *, told: bool = False) -> None:
        """Mark the group broken (the first reason stays), and drop the prepared calls."""
        super().give_up(why, told=told)
        self.order.posted = self.order.moving = _NEVER  # no call of this group posts or moves any more
        if told:
            self.pair.agreement.channel.withdraw(self.order.round)
        self.pair.spoiled = True
        self.sends, self.receives, self.prepared = MessageCache(), MessageCache(), {}

    def warn_of_threads(self) -> None:
        """Warn if another thread of this rank is in a blocking collective of the group, in which this thread begins one.

        A thread that waits for a Work of an earlier call does not count.
        """
        known = job_state.current() if self.order.issued != self.order.moving else None
        if known is None:
            return
        waits = tuple(known.waits.items())
        inside = [
            ident
            for ident, wait in waits
            if wait.group is self and wait.peer is None and not getattr(wait.call, "async_op", False)
        ]
        me = threading.get_ident()
        if inside and me not in inside:
            names = {each.ident: each.name for each in threading.enumerate()}
            both = " and ".join(sorted(names.get(ident, str(ident)) for ident in (inside[0], me)))
            warnings.warn(
                f"threads {both} make collective calls of group {self.display} at the same time. Their order may differ from "
                "rank to rank, and then each thread may get the data of the other. Give each thread a group of its own "
                "(new_group), or make all calls of a group in one thread",
                RuntimeWarning,
                stacklevel=program_level(),
            )

    @staticmethod
    def plan(plans: OrderedDict[Any, Plan], key: Any, make: Callable[[], Plan]) -> Plan:
        """Return the cached plan, or make and cache it, and free the one used longest ago if there are too many.

        Plans of agreed calls are the same on all members, which make these in one order.
        """
        if key not in plans:
            plans[key] = make()
            if len(plans) > MOST_PLANS:
                plans.popitem(last=False)[1].free()
        plans.move_to_end(key)
        return plans[key]

    @staticmethod
    def keep_newest(table: dict[Any, Any], key: Any, value: Any, most: int) -> None:
        """Add an entry to a table, in place of the oldest entry if there are ``most``."""
        if len(table) >= most:
            table.pop(next(iter(table)), None)
        table[key] = value

    def retire(self, again: Any) -> None:
        """Free a persistent send or receive that is not used any more, and add its count to the group's."""
        with self._counting:
            self.persistent.remove(again)
            count(self._sent if again.sending else self._received, again.peer, again.tag, again.count + again.begun)
        again.free()

    def free_plans(self) -> None:
        """Free all plans and persistent messages, which must not be started; retain those of a broken group for ever."""
        self.sends, self.receives, self.prepared = MessageCache(), MessageCache(), {}
        if self.pair.receiver.posted:  # posted receives that no call waits for would get messages of a later group
            self.pair.spoiled = True
        if self.pair.spoiled:
            retain_for_ever(self.persistent, self.plans, self.own_plans)
            return
        while self.persistent:
            self.retire(self.persistent[-1])
        for plans in (self.plans, self.own_plans):
            while plans:
                plans.popitem()[1].free()


def name_started(calls: Iterable[Any]) -> str:
    """Return calls and the places that started them: ``isend issued at a.py:3 (9 times); irecv issued at a.py:5``."""
    counted = Counter(f"{each.call.op} issued at {each.call.site}" for each in calls)
    named = [f"{text} ({times} times)" if times > 1 else text for text, times in counted.items()]
    more = [f"calls at {len(named) - MOST_NAMED} other places"] if len(named) > MOST_NAMED else []
    return "; ".join([*named[:MOST_NAMED], *more])


def untold(groups: Iterable[ProcessGroup]) -> list[Any]:
    """Progress the pending calls of groups for a moment, and return the calls that the program does not know the end of.

    The calls whose members made different calls come first, then other calls that have failed: later errors follow from them.
    """
    groups = tuple(groups)
    started = [call for group in groups for call in group.started() if call.error is None]
    began = time.monotonic()
    while started and time.monotonic() < began + _moment(started):
        started = _pending(started)
        waiting.serve()
        time.sleep(MOMENT / 1000)
    return sorted((call for group in groups for call in group.untold()), key=_rank_of)


def _moment(calls: list[Any]) -> float:
    return EXCHANGED_WITHIN if any(call.call.explaining for call in calls) else MOMENT


def _pending(calls: list[Any]) -> list[Any]:
    with signals.guard:
        is_over = [call.Test() for call in calls]
    return [call for call, over in zip(calls, is_over, strict=True) if not over]


def _rank_of(call: Any) -> int:
    return 0 if isinstance(call.error, CollectiveMismatchError) else 1 if call.error is not None else 2
