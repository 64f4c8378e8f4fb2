"""A process group: its members, communicators, counters and prepared calls."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from mpicoll.diagnosis.membership import Membership, OpenBlock, count
from mpicoll.errors import GroupBrokenError
from mpicoll.runtime.mpi_library import retain_for_ever
from mpicoll.transports.mpi.envelope import Told

if TYPE_CHECKING:
    from mpicoll.groups.communicators import Pair
    from mpicoll.runtime.settings import Level
    from mpicoll.transports.base import Movement, Plan
    from mpicoll.transports.control import Agreed
    from mpicoll.transports.device.ipc import DeviceWindow


T = TypeVar("T")
MOST_PLANS = 128


class Stopping(Protocol):
    """What answers signals on a group (``training.stop_requests.OnSignal``)."""

    stopped: bool
    passes: int

    def remove(self) -> None:
        """Remove it."""

    def brings(self) -> int:
        """Return what this rank brings to an agreement."""

    def take(self, brought: int) -> None:
        """Take the largest of what the ranks brought."""

    def carried(self, agreed: Agreed) -> Movement:
        """Take what the round of a barrier has carried."""

    def deliver(self) -> None:
        """Call the handler where a signal has been agreed on just now."""


class Kept(dict[Any, Any]):
    """The persistent sends, or receives, that a group may use, by what the program passes, the one made longest ago first.

    Attributes:
        last: the one used last, as a program mostly uses it next: comparing is quicker than hashing; None before.
    """

    __slots__ = ("last",)

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None

    def drop(self, key: Any) -> Any:
        """Take one out; a thread that looked it up before must not find it as the last one."""
        again = self.pop(key)
        again.rank = None
        if self.last is again:
            self.last = None
        return again


def _no_method(name: str) -> Callable[..., Any] | None:
    return None


_find_method: Callable[[str], Callable[..., Any] | None] = _no_method


def register_methods(find: Callable[[str], Callable[..., Any] | None]) -> None:
    """Register what finds the methods of a group that are made of the public calls: ``find(name)``, None if there is no such."""
    global _find_method
    _find_method = find


class ProcessGroup(Membership):
    """An ordered set of ranks with communicators of its own.

    Made by :func:`init_process_group` and :func:`new_group`, passed as ``group=``. Ranks in ``ranks`` are global.

    The calls are its methods, too, as in torch: ``allreduce(tensors, op)``, ``broadcast(tensors, root)``, ``allgather``,
    ``reduce_scatter``, ``alltoall``, ``send(tensors, dst, tag)``, ``recv``, ``barrier()`` and their kin return a :class:`Work`;
    ``root``, ``dst`` and ``src`` are ranks in the group, and a tensor may stand in a list of one.
    """

    def __init__(
        self,
        name: str,
        pair: Pair,
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
        self.turn: OpenBlock | None = None  # what keeps its collectives out: a block that one rank runs first
        self.stopping: Stopping | None = None  # what answers signals on it, on all members alike
        self.lock = threading.RLock()  # held through a collective: one at a time on a group
        self.posting = threading.Lock()  # held while a message is posted: other threads may send during a collective
        self.told = Told()
        self.sends = Kept()
        self.receives = Kept()
        self.seen: set[Any] = set()
        # Lists of objects sent to and received from each rank of the group: their numbers are compared.
        self.objects_sent: dict[int, int] = {}
        self.objects_received: dict[int, int] = {}
        self.plans: OrderedDict[Any, Plan] = OrderedDict()  # made and freed by all members at the same calls
        self.own_plans: OrderedDict[Any, Plan] = OrderedDict()  # of calls that make no round: this rank's own affair
        self.rides: dict[Any, Any] = {}  # calls that may be made again
        pair.receiver.torn = lambda error: self.give_up(f"{type(error).__name__} struck while its messages were taken")
        self.device_window: DeviceWindow | None = None  # the memory of a GPU that its members share
        self.bound_device_id: Any = None  # torch's, of which scripts ask

    if not TYPE_CHECKING:  # a misspelt attribute is to be found

        def __getattr__(self, name: str) -> Any:
            """Return a method of torch's that is made of the calls, which are above this module."""
            if not name.startswith("__"):
                method = _find_method(name)
                if method is not None:
                    return partial(method, self)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def name(self) -> str:
        """Return the name of the backend, ``"mpi"``."""
        return "mpi"

    @property
    def compares(self) -> bool:
        """Whether calls on this group are compared; at every level but ``full`` a message only has to fit."""
        return self.level == "full"

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of every later wait of this group on this rank."""
        if not isinstance(timeout, timedelta):
            raise TypeError(f"Expected timeout argument to be of type datetime.timedelta, got {timeout!r}")
        self.timeout = timeout.total_seconds()

    def __repr__(self) -> str:
        return f"<ProcessGroup {self.display}: rank {self._rank} of {self._size}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            f"cannot pickle or copy {self!r}: its communicators belong to this process. Leave it out of what is copied, saved or "
            "sent, or give the object that holds it a __getstate__ without it"
        )

    def usable(self, operation: str) -> None:
        """Raise when the group is destroyed (ValueError) or was given up (GroupBrokenError)."""
        if self.destroyed:
            raise ValueError(
                f"Invalid process group specified: {operation} on group {self.display}, which was destroyed"
            )
        if self.broken is not None:
            raise GroupBrokenError(
                f"{operation} on group {self.display}: it cannot be used any more, because {self.broken}. "
                "Ranks that go on need a new group of ranks that are still there"
            )

    def gone(self) -> bool:
        """Whether nothing of this group is under way any more that would end well."""
        return self.broken is not None or self.destroyed

    def give_up(self, why: str) -> None:
        """Mark the group broken; the first reason stays. Drop the prepared calls."""
        super().give_up(why)
        self.pair.spoiled = True
        self.sends, self.receives, self.rides = Kept(), Kept(), {}

    @staticmethod
    def plan(plans: OrderedDict[Any, Plan], key: Any) -> Plan | None:
        """Return a plan that is kept; of agreed calls, which come in the same order on all members, all keep alike."""
        plan = plans.get(key)
        if plan is not None:
            plans.move_to_end(key)
        return plan

    @staticmethod
    def keep_plan(plans: OrderedDict[Any, Plan], key: Any, plan: Plan) -> None:
        """Cache a plan, and free the one that was used longest ago when there are too many."""
        plans[key] = plan
        if len(plans) > MOST_PLANS:
            plans.popitem(last=False)[1].free()

    def retire(self, again: Any) -> None:
        """Free a persistent send or receive that is used no more, and take over its count."""
        with self._counting:
            self.persistent.remove(again)
            count(self._sent if again.sending else self._received, again.peer, again.tag, again.count)
        again.free()

    def free_plans(self) -> None:
        """Free every plan and persistent message (none may be under way); of a group that was given up none, for good."""
        self.sends, self.receives, self.rides = Kept(), Kept(), {}
        if self.pair.receiver.posted:  # receives that nobody waits for: a later group's messages are not for them
            self.pair.spoiled = True
        if self.pair.spoiled:
            retain_for_ever(self.persistent, self.plans, self.own_plans)
            return
        while self.persistent:
            self.retire(self.persistent[-1])
        for plans in (self.plans, self.own_plans):
            while plans:
                plans.popitem()[1].free()
