"""Process groups: who is in them, their communicators and counters, and the default group."""

from __future__ import annotations

import importlib
import threading
import warnings
from collections import OrderedDict
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from mpicoll.checks.call import Site
from mpicoll.checks.envelope import Told
from mpicoll.errors import GroupBrokenError
from mpicoll.kept import keep

if TYPE_CHECKING:
    from mpicoll.checks.agreement import Flags
    from mpicoll.checks.board import Board
    from mpicoll.communicators import Pair, Pool
    from mpicoll.deferred import Deferred
    from mpicoll.engines.base import Movement, Plan
    from mpicoll.engines.device import Link
    from mpicoll.persistent import PersistentReceive, PersistentSend
    from mpicoll.riding import Ride
    from mpicoll.settings import Level, Settings
    from mpicoll.topology import Topology
    from mpicoll.work import Operation

__all__ = [
    "NON_MEMBER",
    "NOT_INITIALIZED",
    "GroupMember",
    "Kept",
    "ProcessGroup",
    "State",
    "current",
    "default",
    "get_backend",
    "get_global_rank",
    "get_group_rank",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group",
    "is_initialized",
    "member_or_warn",
    "need_member",
    "peer_rank",
    "resolve",
    "set_state",
    "state",
]

T = TypeVar("T")

NON_MEMBER = -100
"""What ``new_group`` returns to a rank that is not in the group (``GroupMember.NON_GROUP_MEMBER``)."""

NOT_INITIALIZED = "Default process group has not been initialized, please make sure to call init_process_group."
MOST_PLANS = 128


class Turn(Protocol):
    """A block that is open in this process, whose other ranks wait for its end or are about to meet there."""

    def refuse(self, op: str, site: Site) -> Exception:
        """Return the error of a collective inside it."""

    def group(self) -> ProcessGroup | None:
        """Return its group, if that has been made."""


class Stopping(Protocol):
    """What answers signals on a group (``stopping.OnSignal``)."""

    stopped: bool
    passes: int

    def remove(self) -> None:
        """Remove it."""

    def brings(self) -> int:
        """Return what this rank brings to an agreement."""

    def take(self, brought: int) -> None:
        """Take the largest of what the ranks brought."""

    def carried(self, flags: Flags) -> Movement:
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


class _Slots:
    """What each call of a group reads or writes, at a known place in it: machine code finds it there."""

    __slots__ = ("calls", "last", "lock", "turn")


class ProcessGroup(_Slots):
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
        self.group_name = name
        self.group_desc = desc or "undefined"
        self.display = display or name
        self.ranks = pair.ranks
        self.pair = pair
        self.timeout = timeout
        self.level = level
        self.calls = 0
        # Its last call: op, code and instruction, or what has them.
        self.last: tuple[str, CodeType, int] | PersistentSend | PersistentReceive | None = None
        self.broken: str | None = None
        self.destroyed = False
        self.turn: Turn | None = None  # what keeps its collectives out: a block that one rank runs first
        self.stopping: Stopping | None = None  # what answers signals on it, on all members alike
        self.lock = threading.RLock()  # held through a collective: one at a time on a group
        self.posting = threading.Lock()  # held while a message is posted: other threads may send during a collective
        self.unwaited: dict[int, Operation | Deferred] = {}
        self.told = Told()
        self.sends = Kept()
        self.receives = Kept()
        self.persistent: list[PersistentSend | PersistentReceive] = []
        self.seen: set[Any] = set()
        # Lists of objects sent to and received from each rank of the group: their numbers are compared.
        self.objects_sent: dict[int, int] = {}
        self.objects_received: dict[int, int] = {}
        self._counting = threading.Lock()
        self._sent: dict[tuple[int, int], int] = {}
        self._received: dict[tuple[int, int], int] = {}
        self.plans: OrderedDict[Any, Plan] = OrderedDict()  # made and freed by all members at the same calls
        self.own_plans: OrderedDict[Any, Plan] = OrderedDict()  # of calls that make no round: this rank's own affair
        self.rides: dict[Any, Ride] = {}  # calls that may be made again
        pair.receiver.torn = lambda error: self.give_up(f"{type(error).__name__} struck while its messages were taken")
        self.link: Link | None = None  # the memory of a GPU that its members share
        self.bound_device_id: Any = None  # torch's, of which scripts ask
        self._rank = rank
        self._size = len(pair.ranks)

    if not TYPE_CHECKING:  # a misspelt attribute is to be found

        def __getattr__(self, name: str) -> Any:
            """Return a method of torch's that is made of the calls, which are above this module."""
            if not name.startswith("__"):
                method = importlib.import_module("mpicoll.methods").METHODS.get(name)
                if method is not None:
                    return partial(method, self)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def rank(self) -> int:
        """Return this rank in the group."""
        return self._rank

    def size(self) -> int:
        """Return the number of members."""
        return self._size

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

    def last_call(self) -> str:
        """Return the last call that was made on this group and its place in the program, or ""."""
        if self.last is None:
            return ""
        op, code, instruction = self.last if isinstance(self.last, tuple) else self.last.place
        return f"{op} at {Site(code, instruction)}"

    def give_up(self, why: str) -> None:
        """Mark the group broken; the first reason stays."""
        if self.broken is None:
            self.broken = why
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

    def by_rank(self, counts: dict[tuple[int, int], T]) -> dict[tuple[int, int], T]:
        """Return what is known of messages by (global rank, tag) from the same by (rank in the group, tag)."""
        return {(self.ranks[peer], tag): count for (peer, tag), count in counts.items()}

    @property
    def sent(self) -> dict[tuple[int, int], int]:
        """Messages sent so far, by (rank in the group, tag)."""
        return self._with_persistent(self._sent, True)

    @property
    def received(self) -> dict[tuple[int, int], int]:
        """Messages received so far, by (rank in the group, tag)."""
        return self._with_persistent(self._received, False)

    def _with_persistent(self, counted: dict[tuple[int, int], int], sending: bool) -> dict[tuple[int, int], int]:
        with self._counting:
            counts = dict(counted)
            for each in self.persistent:
                if each.sending != sending or not each.count:
                    continue
                _count(counts, each.peer, each.tag, each.count)
        return counts

    def count_sent(self, peer: int, tag: int) -> None:
        """Count a message that was sent."""
        with self._counting:
            _count(self._sent, peer, tag, 1)

    def count_received(self, peer: int, tag: int) -> None:
        """Count a message that was received."""
        with self._counting:
            _count(self._received, peer, tag, 1)

    def retire(self, again: PersistentSend | PersistentReceive) -> None:
        """Free a persistent send or receive that is used no more, and take over its count."""
        with self._counting:
            self.persistent.remove(again)
            _count(self._sent if again.sending else self._received, again.peer, again.tag, again.count)
        again.free()

    @staticmethod
    def by_peer(counts: dict[tuple[int, int], int]) -> dict[int, int]:
        """Return messages for each peer from messages for each peer and tag."""
        totals: dict[int, int] = {}
        for (peer, _), count in counts.items():
            totals[peer] = totals.get(peer, 0) + count
        return totals

    def free_plans(self) -> None:
        """Free every plan and persistent message (none may be under way); of a group that was given up none, for good."""
        self.sends, self.receives, self.rides = Kept(), Kept(), {}
        if self.pair.receiver.posted:  # receives that nobody waits for: a later group's messages are not for them
            self.pair.spoiled = True
        if self.pair.spoiled:
            keep(self.persistent, self.plans, self.own_plans)
            return
        while self.persistent:
            self.retire(self.persistent[-1])
        for plans in (self.plans, self.own_plans):
            while plans:
                plans.popitem()[1].free()


def _count(counts: dict[tuple[int, int], int], peer: int, tag: int, messages: int) -> None:
    counts[peer, tag] = counts.get((peer, tag), 0) + messages


@dataclass
class State:
    """What this process knows while a default group lives."""

    world: ProcessGroup
    board: Board
    pool: Pool
    settings: Settings
    topology: Topology
    on_failure: str
    pid: int
    thread_multiple: bool
    thread: int
    groups: dict[str, ProcessGroup] = field(default_factory=dict)
    created: int = 0
    secret: bytes = b""
    node: ProcessGroup | None = None
    leaders: ProcessGroup | None = None
    base: Counters | None = None
    blocks: list[Turn] = field(default_factory=list)


class Counters(Protocol):
    """What is kept of groups that were destroyed, by their names, the last one last."""

    calls: dict[str, int]
    sent: dict[str, dict[tuple[int, int], int]]
    received: dict[str, dict[tuple[int, int], int]]

    def settle(self, name: str, to: set[int], by: set[int]) -> None:
        """Forget the messages on one of them that all have come."""


class _Default:
    """The default group, for those who ask in every call."""

    __slots__ = ("world",)

    def __init__(self) -> None:
        self.world: ProcessGroup | None = None


default = _Default()
_state: State | None = None

doomed = ""
"""What has ended this rank's program, or a thread of it that communicated: other threads and exit handlers may still wait."""


def set_state(new: State | None) -> None:
    """Install or remove the default group; for ``runtime`` alone."""
    global _state
    _state = new
    default.world = None if new is None else new.world


def state() -> State:
    """Return the state, or raise torch's ValueError when there is no default group."""
    if _state is None:
        raise ValueError(NOT_INITIALIZED)
    return _state


def current() -> State | None:
    """Return the state, or None when there is no default group."""
    return _state


def is_initialized() -> bool:
    """Whether the default process group has been initialised (torch.distributed.is_initialized)."""
    return _state is not None


def resolve(group: Any) -> ProcessGroup | None:
    """Return the group that a ``group=`` argument means, or None when this rank is not a member.

    Raises:
        ValueError: there is no default group, or the group is destroyed or belongs to an earlier default group, or it is no
            group at all (as torch).
    """
    known = state()
    if group is None:
        return known.world
    if isinstance(group, ProcessGroup):
        if known.groups.get(group.group_name) is not group:
            raise ValueError(
                f"Invalid process group specified: group {group.display} was destroyed or is not of this process"
            )
        return group
    if isinstance(group, int) and group == NON_MEMBER:
        return None
    raise ValueError(
        f"Invalid process group specified: group must be a ProcessGroup or None, not {type(group).__name__}"
    )


def member_or_warn(group: Any, operation: str, stacklevel: int = 3) -> ProcessGroup | None:
    """Return the group, or warn as torch does and return None when this rank is not in it."""
    found = resolve(group)
    if found is None:
        warnings.warn(
            f"Running {operation} on global rank {state().world.rank()} which does not belong to the given group.",
            stacklevel=stacklevel,
        )
    return found


def rank_not_in_group(group: Any) -> bool:
    """Whether this rank is no member of a group (torch.distributed._rank_not_in_group)."""
    return group is not None and resolve(group) is None


def default_group() -> ProcessGroup:
    """Return the default group; ValueError where there is none (torch.distributed.distributed_c10d._get_default_group)."""
    return state().world


def need_member(group: Any) -> ProcessGroup:
    """Return the group, or raise, as torch's send does, when this rank is not in it."""
    found = resolve(group)
    if found is None:
        raise ValueError("Invalid process group specified: this rank is not in the group")
    return found


def peer_rank(
    group: ProcessGroup, global_rank: int | None, group_rank: int | None, name: str, default: int | None = None
) -> int:
    """Return the rank in the group that ``src=``/``group_src=`` (or dst, peer) means.

    Raises:
        ValueError: both given, neither given, or not a member (torch's texts).
        TypeError: not an integer.
    """
    if global_rank is not None and group_rank is not None:
        raise ValueError(f"Can't specify both group_rank and global_rank ({name}= and group_{name}=)")
    if global_rank is None and group_rank is None:
        global_rank = default
        if default is None:
            raise ValueError(f"Must specify global_rank or group_rank ({name}= or group_{name}=)")
    if group_rank is not None:
        _integer(group_rank, f"group_{name}")
        if not 0 <= group_rank < group.size():
            raise ValueError(
                f"group_{name}={group_rank} is not a rank of group {group.display} of {group.size()} ranks"
            )
        return group_rank
    assert global_rank is not None
    _integer(global_rank, name)
    try:
        return group.ranks.index(global_rank)
    except ValueError:
        raise ValueError(f"Global rank {global_rank} is not part of group {group.display}") from None


def _integer(value: Any, name: str) -> None:
    if not hasattr(value, "__index__") or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}")


def get_rank(group: Any = None) -> int:
    """Return this process's rank in ``group`` (default: the world), or -1 when it is not a member.

    Raises:
        ValueError: there is no default group.

    Source: torch.distributed.get_rank.
    """
    found = resolve(group)
    return -1 if found is None else found.rank()


def get_world_size(group: Any = None) -> int:
    """Return the number of ranks in ``group`` (default: the world), or -1 when this rank is not a member.

    Source: torch.distributed.get_world_size.
    """
    found = resolve(group)
    return -1 if found is None else found.size()


def get_backend(group: Any = None) -> str:
    """Return ``"mpi"``.

    Raises:
        ValueError: there is no default group, or this rank is not a member.

    Source: torch.distributed.get_backend.
    """
    if resolve(group) is None:
        raise ValueError("Invalid process group specified")
    return "mpi"


def get_process_group_ranks(group: Any) -> list[int]:
    """Return the global ranks of ``group`` (None: the world), by rank in the group.

    Raises:
        KeyError: this rank is not a member (as torch).

    Source: torch.distributed.get_process_group_ranks.
    """
    found = resolve(group)
    if found is None:
        raise KeyError(group)
    return list(found.ranks)


def get_group_rank(group: Any, global_rank: int) -> int:
    """Return the rank in ``group`` of a global rank (on the world: the rank itself).

    Raises:
        ValueError: the rank is not in the group.

    Source: torch.distributed.get_group_rank.
    """
    found = resolve(group)
    if found is state().world:
        return global_rank
    if found is None:
        raise ValueError(f"Group {group} is not registered, please create group with new_group API")
    return peer_rank(found, global_rank, None, "global_rank")


def get_global_rank(group: Any, group_rank: int) -> int:
    """Return the global rank of a rank in ``group`` (on the world: the rank itself).

    Raises:
        ValueError: the group has no such rank.

    Source: torch.distributed.get_global_rank.
    """
    found = resolve(group)
    if found is state().world:
        return group_rank
    if found is None:
        raise ValueError(f"Group {group} is not registered, please create group with new_group API")
    if not 0 <= group_rank < found.size():
        raise ValueError(f"Group rank {group_rank} is not part of group {found.display}")
    return found.ranks[group_rank]


class _WorldMeta(type):
    """Makes ``group.WORLD`` a live view of the default group."""

    @property
    def WORLD(cls) -> ProcessGroup | None:
        """The default group, or None before ``init_process_group``."""
        return None if _state is None else _state.world

    @WORLD.setter
    def WORLD(cls, to: ProcessGroup | None) -> None:
        """Raise, where it is not the default group already: on it all ranks agree on what concerns the job as a whole."""
        if to is not cls.WORLD:
            raise AttributeError(
                "group.WORLD is set by init_process_group alone, as all ranks of the job meet in it: pass group= to calls, or "
                "give init_process_group a communicator of the ranks as comm="
            )


class group(metaclass=_WorldMeta):
    """``group.WORLD``: the default group (torch.distributed.group)."""


class GroupMember(metaclass=_WorldMeta):
    """``GroupMember.WORLD`` and ``GroupMember.NON_GROUP_MEMBER`` (torch.distributed.GroupMember)."""

    NON_GROUP_MEMBER = NON_MEMBER
