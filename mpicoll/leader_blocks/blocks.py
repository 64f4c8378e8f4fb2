"""Blocks that one rank runs first while the others wait: zero_first, run_first, ordered, and their familiar names.

The rank that goes first runs its block without talking to anybody. At its end it broadcasts how that went, and what it has
to share: this is the call in which the others have been waiting. At the end of the block all meet once more, so that a
failure of any is known to all.
"""

from __future__ import annotations

import functools
import math
import os
import pickle
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, NoReturn, ParamSpec, TypeVar, overload

import numpy as np

from mpicoll.diagnosis.call import Call, name_ranks
from mpicoll.diagnosis.job_state import last_seen
from mpicoll.diagnosis.wait_policy import CallWait
from mpicoll.errors import (
    ARGUMENT,
    CollectiveMismatchError,
    DistError,
    FirstFailedError,
    PeerFailedError,
    in_one_line,
)
from mpicoll.groups import registry
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.groups.registry import JobWithGroups
from mpicoll.leader_blocks.published_files import Published, announce, await_visible, path_list
from mpicoll.operations import execution
from mpicoll.operations.group_creation import group_of_node
from mpicoll.runtime import signals
from mpicoll.runtime.call_site import Site, call_site, traceback_site
from mpicoll.runtime.output import say
from mpicoll.runtime.signals import Terminated
from mpicoll.transports.base import Kind, Movement

P = ParamSpec("P")
R = TypeVar("R")
Scope = Literal["world", "node"] | ProcessGroup

_END, _FAILURE = "end of ", "failure in "
"""What the calls at the end of a block are named with."""


class Turn:
    """What ``with zero_first() as turn`` gives.

    Attributes:
        is_leader: this rank goes first.
        leader: global rank of the one that does; 0 where there is no default group.
    """

    def __init__(self, leader: int, is_leader: bool, alone: bool = False) -> None:
        self.leader = leader
        self.is_leader = is_leader
        self._alone = alone
        self._told = _Told()
        self._value: Any = None
        self._over = False

    @property
    def value(self) -> Any:
        """What the leader has shared, a copy on the other ranks; None when it shared nothing."""
        return self._value

    def share(self, value: Any) -> None:
        """Give ``value`` to the other ranks as their ``turn.value``; for the leader. It is pickled on the spot.

        Raises:
            RuntimeError: this rank is not the leader, or the block is over.
            PicklingError, TypeError: what pickle raises for a value that cannot be pickled.
        """
        if not self.is_leader:
            raise RuntimeError(f"turn.share: rank {self.leader} shares a value; this rank reads turn.value")
        if self._over:
            raise RuntimeError("turn.share: the block is over, and the other ranks have read what was shared in it")
        if not self._alone:
            self._told.value = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        self._value = value

    def publish(self, *paths: Any) -> None:
        """Add to what is published at the end of the leader's block (see :func:`zero_first`); elsewhere without effect.

        Raises:
            TypeError: not paths.
            RuntimeError: the block is over.
        """
        if self._over:
            raise RuntimeError("turn.publish: the block is over")
        self._told.paths += path_list(paths)

    def _take(self, told: _Told, block: str) -> None:
        """Become what the leader has told of its own turn."""
        if told.value is not None:
            try:
                self._value = pickle.loads(told.value)
            except Exception as error:
                error.args = (f"what rank {self.leader} shared in {block} cannot be loaded here: {error}",)
                raise


@dataclass
class _Told:
    """What the leader tells of its turn.

    Attributes:
        value: pickled.
        paths: to be published.
        label: of a block inside another: its kind, with its name or else its place in the program.
        failure: how a block inside another failed.
        inner: the blocks inside it, in the order in which the leader entered them.
        taken: how many of them this rank has come past.
    """

    value: bytes | None = None
    paths: list[str] = field(default_factory=list)
    label: tuple[str, ...] = ()
    failure: _Failure | None = None
    inner: list[_Told] = field(default_factory=list)
    taken: int = 0

    def nothing(self) -> bool:
        return self.value is None and not self.inner

    def all_paths(self) -> Iterator[str]:
        if self.failure is None:
            yield from self.paths
            for told in self.inner:
                yield from told.all_paths()

    def next(self, label: tuple[str, ...]) -> _Told | None:
        """Return the next block inside this one that the leader entered under a label; past those that it alone entered."""
        for at in range(self.taken, len(self.inner)):
            if self.inner[at].label == label:
                self.taken = at + 1
                return self.inner[at]
        return None


@dataclass(frozen=True)
class _Failure:
    """How a rank's block failed, as others read it."""

    kind: str
    text: str
    trace: str
    place: str

    def __str__(self) -> str:
        return (f"{self.kind}: {self.text}" if self.text else self.kind) + (f" (at {self.place})" if self.place else "")


def _failure_of(error: BaseException) -> _Failure:
    place = traceback_site(error.__traceback__)
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        said = in_one_line(error)
    except Exception:
        said = "(its text cannot be made)"
    kind = "SystemExit" if isinstance(error, SystemExit) else type(error).__name__
    return _Failure(kind, said[:1000], text[-20_000:], place)


def _seconds(value: Any, name: str) -> float:
    """Return a time in seconds that was given as a number or as a timedelta."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be seconds or a timedelta, not {type(value).__name__}")
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value}")
    return float(value)


# --- the scope ---


class _Members:
    """The ranks of a scope, and its group, which for a node is made when it is first needed: only by that node's ranks.

    Attributes:
        ranks: global ranks, the one that goes first in front.
        key: the same for the same scope.
    """

    def __init__(self, known: JobWithGroups, scope: Any) -> None:
        self.known = known
        self._group: ProcessGroup | None = None
        if isinstance(scope, str) and scope == "node":
            self.ranks: tuple[int, ...] = known.topology.local_ranks
            self.key = "node"
            self.display = f"node {known.topology.hosts[known.topology.node]}"
            self._group = known.node
        elif isinstance(scope, str) and scope == "world":
            self._use(known.world)
        elif isinstance(scope, str):
            raise ValueError(f'scope must be "world", "node" or a ProcessGroup, not {scope!r}')
        else:
            found = registry.resolve(scope)
            if found is None:
                raise ValueError(
                    f"rank {known.world.rank()} is not in the group given as scope: only its members may run the block"
                )
            self._use(found)

    def _use(self, group: ProcessGroup) -> None:
        self.ranks, self.key, self.display, self._group = group.ranks, group.group_name, group.display, group

    @property
    def me(self) -> int:
        return self.known.world.rank()

    @property
    def known_group(self) -> ProcessGroup | None:
        """The group, if it has been made."""
        return self._group

    def group(self, op: str, site: Site, watch: _Watch | None = None) -> ProcessGroup:
        """Return the group; of a node all ranks call it, unless it has been made."""
        if self._group is None:
            self._group = group_of_node(self.known, op, site, watch)
        return self._group

    def enter(self, op: str) -> None:
        """Raise when this process or thread may not communicate, or the group cannot be used."""
        execution.enter(self._group or self.known.world, op)


# --- waiting for a rank that is in its block ---


class _Watch:
    """The wait for one rank that is in its block: without a limit while it lives, and not in silence.

    A rank of this node lives as long as its process holds its record lock. One of another node gives signs of life; without
    any for the limit of the group it is taken for lost.
    """

    def __init__(self, members: _Members, leader: int, what: str, limit: float | None) -> None:
        known = members.known
        self.leader = leader
        self.what = what
        self.limit = math.inf if limit is None else limit
        self.silence = math.inf
        board = known.board
        if not (board.slots is not None and leader in board.slots.ranks):
            group = members.known_group
            self.silence = (group or known.world).timeout
        here = known.topology.local_ranks
        self._speaks = min((r for r in members.ranks if r != leader and r in here), default=-1) == known.world.rank()
        self._began = time.monotonic()
        self._next = known.settings.stall_warn
        self._host = known.topology.hosts[known.topology.node_of[leader]]

    def look(self) -> bool:
        """Say now and then for whom this rank waits; whether that one has given no sign of life for too long."""
        now = time.monotonic()
        waited = now - self._began
        if waited >= self._next:
            while self._next <= waited:
                self._next *= 2
            if self._speaks:
                place = last_seen(self.leader)
                text = f"mpicoll: waiting {_duration(waited)} for rank {self.leader} ({self._host}) in {self.what}"
                say(f"{text}; {place}\n" if place else f"{text}\n")
        heard = registry.state().board.alive.get(self.leader, 0.0)
        return now - max(self._began, heard) > self.silence


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class _TurnWait(CallWait):
    """The wait in a call that a rank makes when its block has ended."""

    __slots__ = ("watch",)

    def __init__(self, watch: _Watch, group: ProcessGroup, call: Call, limit: float) -> None:
        super().__init__(group, call, min(limit, watch.limit))
        self.watch = watch

    def check(self, waited: float) -> BaseException | None:
        """Return an error when this wait can never end, or the rank it is for is lost."""
        failure = super().check(waited)
        if failure is None and self.watch.look():
            self.limit = self.watch.silence
            failure = self.timed_out(waited)
        return failure

    def stalled(self, waited: float) -> None:
        """Say nothing: the watch does."""


class _SignsOfLife:
    """What a rank in its block sends to those of other nodes that wait for it, from a thread: a message now and then."""

    def __init__(self, members: _Members) -> None:
        known = members.known
        slots = known.board.slots
        away = [r for r in members.ranks if r != members.me and not (slots is not None and r in slots.ranks)]
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if away and known.thread_multiple:
            group = members.known_group or known.world
            every = group.timeout / 4
            board = known.board

            def send() -> None:
                while not self._stop.wait(every):
                    board.post("alive", None, away)

            self._thread = threading.Thread(target=send, name="mpicoll-alive", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()


# --- telling the others ---

_HEAD = struct.Struct("<?Q")
_WHOLE = 512
_INLINE = _WHOLE - _HEAD.size


def _tell(
    group: ProcessGroup,
    call: Callable[[str], Call],
    root: int,
    said: tuple[bool, bytes] | None = None,
    watch: _Watch | None = None,
) -> tuple[bool, bytes]:
    """Broadcast (did it go well, more) from one member, in one small message if it fits; return what it says.

    Args:
        call: makes the description of this rank's call.
        root: rank in the group.
        said: on the root.
        watch: how the others wait for it.
    """
    head = np.zeros(_WHOLE, np.uint8)
    if said is not None:
        well, more = said
        _HEAD.pack_into(head.data, 0, well, len(more))
        head[_HEAD.size : _HEAD.size + len(more)] = np.frombuffer(more[:_INLINE], np.uint8)
    this = call("")
    execution.enter(group, this.op)
    this.key = (*this.key, ("root", group.ranks[root]))
    limit = group.timeout
    if watch is not None and said is None:
        this.wait_policy = functools.partial(_TurnWait, watch)
        limit = math.inf
    execution.run(group, this, Movement(Kind.BROADCAST, recv=head, root=root), outputs=[head], limit=limit)
    well, length = _HEAD.unpack_from(head.data)
    if length <= _INLINE:
        return well, head[_HEAD.size : _HEAD.size + length].tobytes()
    body = np.frombuffer(said[1], np.uint8).copy() if said is not None else np.empty(length, np.uint8)
    rest = call("more of ")
    rest.key = (*this.key, ("bytes", length))
    execution.run(group, rest, Movement(Kind.BROADCAST, recv=body, root=root), outputs=[body])
    return well, body.tobytes()


# --- blocks that are open in this process ---


class _Open:
    """A block of this process that is open: nested ones look here, and so does each collective of its group."""

    def __init__(self, block: _Block | _Ordered, members: _Members, leader: int, *, meets: bool) -> None:
        self.block = block
        self.members = members
        self.leader = leader
        self.meets = meets
        """All members meet at its end, so no collective of theirs can be made inside."""
        self.thread = threading.get_ident()
        self.life: _SignsOfLife | None = None
        self.turn: Turn | None = None
        self.inside: list[_Told] = []  # this block and those inside it that are passed through, the innermost last

    def begin(self) -> None:
        if self.turn is not None:
            self.inside.append(self.turn._told)
        self.members.known.blocks.append(self)
        group = self.members.known_group
        if group is not None and (self.meets or self.members.me == self.leader):
            group.turn = self

    def end(self) -> None:
        with suppress(ValueError):
            self.members.known.blocks.remove(self)
        group = self.members.known_group
        if group is not None and group.turn is self:
            group.turn = None

    def group(self) -> ProcessGroup | None:
        """Return the group, if it has been made."""
        return self.members.known_group

    def refuse(self, op: str, site: Site) -> CollectiveMismatchError:
        """Return the error of a collective of this group inside the block."""
        me = self.members.me
        others = [rank for rank in self.members.ranks if rank != me]
        if me == self.leader:
            why = f"{name_ranks(others)} of the group {_verb(others)} for this block to end, and cannot take part"
        else:
            why = "all ranks meet at the end of the block, some may be there already"
        error = CollectiveMismatchError(
            f"{op} on group {self.members.display} at {site} inside {self.block.describe()}: {why}. Move it out of the block"
            + (f", or use turn.share() to hand on what rank {self.leader} has" if self.turn is not None else "")
        )
        error.group, error.ranks = self.members.display, [me]
        return error


def _verb(ranks: list[int]) -> str:
    return "wait" if len(ranks) != 1 else "waits"


def _outer(members: _Members, kind: str, block: _Block | _Ordered) -> _Open | None:
    """Return the open block of the same scope around this one, if any.

    Raises:
        CollectiveMismatchError: ranks of this scope wait outside an open block for its end, so they can never come.
    """
    thread = threading.get_ident()
    there = [each for each in tuple(members.known.blocks) if isinstance(each, _Open)]
    mine = [each for each in there if each.thread == thread]
    other = next((each for each in there if each.thread != thread and each.members.key == members.key), None)
    if other is not None:
        raise CollectiveMismatchError(
            f"{block.describe()} while another thread of this rank is in {other.block.describe()}: one at a time for each "
            "group. Give each thread a group of its own"
        )
    same = next((each for each in reversed(mine) if each.members.key == members.key), None)
    if same is not None and isinstance(same.block, _Block) and kind == "zero_first":
        return same
    for each in reversed(mine):
        me, wait = members.me, set(each.members.ranks) & set(members.ranks)
        if isinstance(each.block, _Block) and me != each.leader:
            wait &= {each.leader} if each.meets else set()
        wait -= {me}
        if wait:
            waiting_there = sorted(wait)
            error = CollectiveMismatchError(
                f"{block.describe()} inside {each.block.describe()}: {name_ranks(waiting_there)} of group {members.display} "
                f"{_verb(waiting_there)} for the outer block to end, and cannot come to the inner one. Put the blocks one "
                "after the other, or give them the same scope"
            )
            error.group, error.ranks = members.display, [me]
            raise error
    return None


# --- the block ---


class _Block:
    """``with zero_first():`` and what is built on it. Can be entered again when it has been left."""

    def __init__(
        self,
        name: Any,
        scope: Any,
        timeout: Any,
        rejoin: bool,
        publish: Any,
        visibility_timeout: Any,
        *,
        op: str = "zero_first",
        applies: bool = True,
        check: Callable[[JobWithGroups], None] | None = None,
    ) -> None:
        self.op = op
        self.site = call_site()
        if isinstance(publish, Iterator):
            publish = list(publish)  # the block may be entered again
        self._given = name, timeout, publish, visibility_timeout
        self._scope = scope
        self._rejoin = bool(rejoin)
        self._applies = applies
        self._check = check
        self._name: str | None = None
        self._limit: float | None = None
        self._paths: list[str] = []
        self._visible = 0.0
        self._entered: list[_Open | _Passed | None] = []

    def describe(self) -> str:
        """Return the block as messages name it."""
        name = self._given[0]
        return f"{self.op}({name!r}) at {self.site}" if isinstance(name, str) else f"{self.op} at {self.site}"

    def _what(self) -> str:
        return repr(self._name) if self._name else self.describe()

    def _call(self, where: str = "") -> Call:
        key: tuple[Any, ...] = (("name", self._name),) if self._name is not None else ()
        if not self._rejoin:
            key = (*key, ("rejoin", False))
        return Call(where + self.op, key, self.site, compared=True)

    def _read_arguments(self, known: JobWithGroups) -> None:
        name, timeout, publish, visible = self._given
        execution.check_name(name)
        self._name = name
        self._limit = None if timeout is None else _seconds(timeout, "timeout")
        self._paths = path_list(publish)
        self._visible = _seconds(visible, "visibility_timeout")
        if self._check is not None:
            self._check(known)

    def __enter__(self) -> Turn:
        known = registry.current() if self._applies else None
        if known is None:
            return self._alone(0)
        members = _Members(known, self._scope)
        problem: Exception | None = None
        try:
            self._read_arguments(known)
        except Exception as error:
            problem = error
        if len(members.ranks) == 1:
            if problem is not None:
                raise problem
            return self._alone(members.me)
        members.enter(self.op)
        outer = _outer(members, "zero_first", self)
        if problem is not None:
            if outer is not None:
                raise problem
            self._refuse(members, problem)
        if outer is not None:
            return self._pass_through(outer)
        leader = members.ranks[0]
        opened = _Open(self, members, leader, meets=self._rejoin)
        opened.turn = turn = Turn(leader, members.me == leader)
        if turn.is_leader:
            turn._told.paths += self._paths
            opened.life = _SignsOfLife(members)
        else:
            self._await_leader(opened)
        opened.begin()
        self._entered.append(opened)
        return turn

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        opened = self._entered.pop()
        if isinstance(error, GeneratorExit):
            error = None  # a generator that its user has not read to the end: the block ended well
        if isinstance(opened, _Passed):
            opened.end(error)
        if not isinstance(opened, _Open):
            return
        opened.end()
        members, turn = opened.members, opened.turn
        assert turn is not None
        turn._over = True
        if os.getpid() != members.known.pid:
            return  # a forked child, which is none of the ranks
        if not turn.is_leader:
            self._meet(members, error, 0.0)
            return
        with signals.guard:
            self._end_turn(opened, turn, error)

    def _end_turn(self, opened: _Open, turn: Turn, error: BaseException | None) -> None:
        """Tell the others how the leader's turn has ended, and meet them."""
        members = opened.members
        published: list[Published] = []
        problem = error
        assert opened.life is not None
        try:
            if problem is None:
                published = announce(turn._told.all_paths())
        except BaseException as found:  # whatever it is, the others are waiting
            problem = found
        finally:
            opened.life.stop()
        try:
            if problem is not None:
                said = False, pickle.dumps(_failure_of(problem))
            else:
                said = True, b"" if turn._told.nothing() and not published else pickle.dumps((turn._told, published))
            _tell(members.group(self.op, self.site), self._call, 0, said)
        except BaseException:
            if error is None:
                raise
            return  # what this rank raises is what went wrong first
        if problem is None:
            struck = _struck()
            self._meet(members, struck, self._visible if published else 0.0)
            if struck is not None:
                raise struck
        elif error is None:
            raise problem

    def _alone(self, leader: int) -> Turn:
        self._entered.append(None)
        return Turn(leader, True, alone=True)

    def _refuse(self, members: _Members, problem: Exception) -> NoReturn:
        """Raise for wrong arguments, on all ranks where calls are compared."""
        setattr(problem, ARGUMENT, True)
        call = Call(self.op, (), self.site, error=problem)
        execution.run(members.group(self.op, self.site), call, None, outputs=[])
        raise AssertionError("a call with wrong arguments always raises") from problem

    def _pass_through(self, outer: _Open) -> Turn:
        """Return the turn of a block inside another of the same scope: what it shares travels with the outer one."""
        assert outer.turn is not None
        turn = Turn(outer.leader, outer.turn.is_leader)
        around = outer.inside[-1]
        label = (self.op, f"name {self._name}" if self._name is not None else str(self.site))
        if turn.is_leader:
            turn._told.label = label
            turn._told.paths += self._paths
            around.inner.append(turn._told)
        else:
            told = around.next(label)
            if told is None:
                raise CollectiveMismatchError(
                    f"{self.describe()} inside {outer.block.describe()}: rank {outer.leader} has not entered it there, so "
                    "nothing is known of its turn. All ranks enter the same blocks inside a block"
                )
            if told.failure is not None:
                host = _host(outer.members, outer.leader)
                raise _first_failed(outer.members, outer.leader, host, self.describe(), told.failure)
            turn._told = told
            turn._take(told, self.describe())
        outer.inside.append(turn._told)
        self._entered.append(_Passed(outer, turn))
        return turn

    def _await_leader(self, opened: _Open) -> None:
        """Wait until the leader has ended its block, and take what it tells.

        Raises:
            FirstFailedError: its block failed.
            TimeoutError: what it published is not seen here.
        """
        members, turn, leader = opened.members, opened.turn, opened.leader
        assert turn is not None
        with signals.guard:
            watch = _Watch(members, leader, self._what(), self._limit)
            well, more = _tell(members.group(self.op, self.site, watch), self._call, 0, watch=watch)
            struck = _struck()
            if not well:
                if struck is not None:
                    raise struck
                raise _first_failed(members, leader, _host(members, leader), self.describe(), pickle.loads(more))
            published: list[Published] = []
            try:
                if struck is not None:
                    raise struck
                if more:
                    turn._told, published = pickle.loads(more)
                    turn._take(turn._told, self.describe())
            except BaseException as error:
                self._meet(members, error, self._visible if published else 0.0)
                raise
        if published:
            known = members.known
            here = known.topology.hosts[known.topology.node]
            try:
                await_visible(published, self._visible, writer=f"rank {leader} ({_host(members, leader)})", host=here)
            except BaseException as error:
                self._meet(members, error, self._visible)
                raise

    def _meet(self, members: _Members, error: BaseException | None, longer: float) -> None:
        """Meet the others at the end of the block.

        Args:
            error: what this rank is about to raise.
            longer: seconds beyond the limit of the group that others may need.

        Raises:
            PeerFailedError: the block of another rank failed, and this one's did not.
        """
        if not self._rejoin:
            return
        group = members.group(self.op, self.site)
        size, me = group.size(), group.rank()
        failed = np.array([size - me if error is not None else 0], np.int64)
        struck: BaseException | None = None
        try:
            with signals.guard:
                execution.enter(group, self.op)
                move = Movement(Kind.ALL_REDUCE, recv=failed, op="MAX")
                execution.run(group, self._call(_END), move, outputs=[failed], limit=group.timeout + longer)
                struck = _struck()
                if not failed[0]:
                    if struck is not None:
                        raise struck
                    return
                first = size - int(failed[0])
                said = (False, pickle.dumps(_failure_of(error))) if first == me and error is not None else None
                _, more = _tell(group, lambda where: self._call(f"{where}{_FAILURE}"), first, said)
        except BaseException:
            if error is None:
                raise
            return  # what this rank raises is what went wrong first
        if error is None:
            if struck is not None:
                raise struck
            raise _peer_failed(members, members.ranks[first], self.describe(), pickle.loads(more))


class _Passed:
    """A block inside another of the same scope."""

    def __init__(self, outer: _Open, turn: Turn) -> None:
        self.outer = outer
        self.turn = turn

    def end(self, error: BaseException | None) -> None:
        """Leave it; a failure on the leader is told to the others, which have not come to it yet."""
        self.turn._over = True
        inside, told = self.outer.inside, self.turn._told
        if any(each is told for each in inside):
            while inside[-1] is not told:
                inside.pop()
            inside.pop()
        if error is not None and self.turn.is_leader:
            told.failure = _failure_of(error)


def _struck() -> BaseException | None:
    """Return what has struck this rank in a call that was complete all the same, to be raised when all have been told."""
    noted = signals.guard.pop()
    if isinstance(noted, Terminated):
        signals.guard.noted = noted  # it ends the process when the call returns
        return None
    return noted


def _host(members: _Members, rank: int) -> str:
    topology = members.known.topology
    return topology.hosts[topology.node_of[rank]]


def _first_failed(
    members: _Members, leader: int, host: str, block: str, how: _Failure, turn: bool = True
) -> FirstFailedError:
    error = FirstFailedError(
        f"rank {leader} ({host}), which goes {'first in' if turn else 'before this one in'} {block}, failed: {how}; "
        f"rank {members.me} did not run the block\n"
        f"The traceback of rank {leader}:\n{how.trace}"
    )
    return _about(error, members, leader)


def _peer_failed(members: _Members, rank: int, block: str, how: _Failure) -> PeerFailedError:
    return _about(PeerFailedError(f"rank {rank} failed in {block}: {how}"), members, rank)


E = TypeVar("E", bound=DistError)


def _about(error: E, members: _Members, rank: int) -> E:
    error.group, error.ranks, error.reporter = members.display, (rank,), rank
    return error


def zero_first(
    name: str | None = None,
    *,
    scope: Scope = "world",
    timeout: float | timedelta | None = None,
    rejoin: bool = True,
    publish: Any = (),
    visibility_timeout: float | timedelta = 60.0,
) -> _Block:
    """Return a context manager whose block one rank runs first, while the others wait::

        with dist.zero_first("download", publish=[path]) as turn:
            if turn.is_leader:
                download(path)
            data = load(path)

    Called by all ranks of the scope, which all run the block. The leader runs it at once; the others when the leader's has
    ended well. Without a default group, or with one rank, the block just runs. Inside a block of the same scope it is
    passed through. A collective of the same ranks inside the block raises at once.

    Args:
        name: for messages; the same on all ranks.
        scope: ``"world"``: rank 0 goes first. ``"node"``: the first rank of each node does, and no node waits for another.
            A ProcessGroup: its rank 0; called by its members alone.
        timeout: seconds, or a timedelta, that the others wait for the leader at most. Default: as long as it lives; a
            leader on another node that gives no sign of life for the limit of the group is taken for lost.
        rejoin: all ranks meet at the end of the block (within the limit of the group), so that all learn of a failure.
            False: each goes on by itself.
        publish: paths that the leader writes. They are flushed to disk at the end of its block, and the others wait until
            they see them as they are, also on a file system of several hosts.
        visibility_timeout: seconds, or a timedelta, that they look for them.

    Returns:
        A context manager that gives a :class:`Turn`: ``is_leader``, ``leader``, ``share(value)``, ``value``.

    Raises:
        FirstFailedError: on the others: the leader's block failed, so they have not run theirs. The leader keeps its own
            exception. The group can still be used.
        PeerFailedError: at the end of the block: it failed on another rank, which keeps its own exception. The group can
            still be used.
        CollectiveMismatchError: ranks of the scope wait for an outer block, or make another call.
        CollectiveTimeoutError: a limit passed; the group is broken.
        TimeoutError: what was published cannot be seen here.
        TypeError, ValueError: wrong arguments, or this rank is not in the group.

    Source: the helpers of yolov5 (torch_distributed_zero_first), accelerate (main_process_first) and others.
    """
    return _Block(name, scope, timeout, rejoin, publish, visibility_timeout)


def local_zero_first(
    name: str | None = None,
    *,
    timeout: float | timedelta | None = None,
    rejoin: bool = True,
    publish: Any = (),
    visibility_timeout: float | timedelta = 60.0,
) -> _Block:
    """Return :func:`zero_first` with ``scope="node"``: the first rank of each node goes first there."""
    return _Block(name, "node", timeout, rejoin, publish, visibility_timeout)


# --- functions ---


def run_first(fn: Callable[..., R], *args: Any, scope: Scope = "world", share: bool = True, **kwargs: Any) -> R | None:
    """Run ``fn(*args, **kwargs)`` on one rank only, and return its value on all ranks.

    Called by all ranks of the scope. Inside a :func:`zero_first` of the same scope it is passed through.

    Args:
        fn: the function; only the leader's is run.
        scope: as in :func:`zero_first`.
        share: the others get a (pickled) copy of the value; False: they get None.

    Raises:
        FirstFailedError: on the others: it raised, or its value cannot be pickled. The leader keeps its own exception.
        Others as :func:`zero_first`.
    """
    with _Block(_function_name(fn), scope, None, False, (), 60.0, op="run_first") as turn:
        value: R | None = None
        if turn.is_leader:
            value = fn(*args, **kwargs)
            if share:
                turn.share(value)
    return value if turn.is_leader else turn.value


def _function_name(fn: Any) -> str:
    return str(getattr(fn, "__qualname__", None) or type(fn).__qualname__)


@overload
def first(fn: Callable[P, R], /) -> Callable[P, R | None]: ...


@overload
def first(*, scope: Scope = "world", share: bool = True) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...


def first(fn: Any = None, /, *, scope: Scope = "world", share: bool = True) -> Any:
    """Make a function one that a single rank runs, and whose value all ranks return: :func:`run_first` as a decorator.

    ``@first``, or ``@first(scope="node")``.
    """

    def decorate(function: Callable[..., R]) -> Callable[..., R | None]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> R | None:
            bound = functools.update_wrapper(functools.partial(function, *args, **kwargs), function)
            return run_first(bound, scope=scope, share=share)

        return wrapper

    if fn is not None and not callable(fn):
        raise TypeError(f'first: {fn!r} is no function; options are named: @first(scope="node")')
    return decorate if fn is None else decorate(fn)


def rank_zero_only(fn: Callable[P, R]) -> Callable[P, R | None]:
    """Make a function one that rank 0 of the world runs; the others return None. Nobody waits, nothing is sent.

    Before ``init_process_group`` it runs everywhere, as there are no ranks yet.
    """

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
        known = registry.current()
        if known is not None and known.world.rank() != 0:
            return None
        return fn(*args, **kwargs)

    return wrapper


# --- one after the other ---


class _Ordered:
    """``with ordered():``."""

    op = "ordered"

    def __init__(self, scope: Any) -> None:
        self.site = call_site()
        self._scope = scope
        self._entered: list[_Open | None] = []

    def describe(self) -> str:
        """Return the block as messages name it."""
        return f"ordered at {self.site}"

    def _call(self, where: str = "") -> Call:
        return Call(f"{where}ordered", (), self.site, compared=True)

    def __enter__(self) -> None:
        known = registry.current()
        if known is None:
            self._entered.append(None)
            return
        members = _Members(known, "world" if self._scope is None else self._scope)
        if len(members.ranks) == 1:
            self._entered.append(None)
            return
        members.enter("ordered")
        _outer(members, "ordered", self)
        place = members.ranks.index(members.me)
        with signals.guard:
            struck: BaseException | None = None
            for turn in range(place):
                struck = self._await(members, turn, struck, before=True)
            if struck is not None:
                self._tell_others(members, place, struck)
                raise struck
        opened = _Open(self, members, members.me, meets=True)
        opened.life = _SignsOfLife(members)
        opened.begin()
        self._entered.append(opened)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        opened = self._entered.pop()
        if opened is None:
            return
        opened.end()
        members = opened.members
        if os.getpid() != members.known.pid:
            return  # a forked child, which is none of the ranks
        assert opened.life is not None
        opened.life.stop()
        if isinstance(error, GeneratorExit):
            error = None
        place = members.ranks.index(members.me)
        with signals.guard:
            try:
                self._tell_others(members, place, error)
            except BaseException:
                if error is None:
                    raise
            if error is not None:
                return
            struck = _struck()
            for turn in range(place + 1, len(members.ranks)):
                struck = self._await(members, turn, struck, before=False)
            if struck is not None:
                raise struck

    def _tell_others(self, members: _Members, place: int, error: BaseException | None) -> None:
        said = (True, b"") if error is None else (False, pickle.dumps(_failure_of(error)))
        _tell(members.group(self.op, self.site), self._call, place, said)

    def _await(
        self, members: _Members, turn: int, struck: BaseException | None, *, before: bool
    ) -> BaseException | None:
        """Wait for the end of another rank's turn; return what has struck this rank so far."""
        rank = members.ranks[turn]
        watch = _Watch(members, rank, self.describe(), None)
        well, more = _tell(members.group(self.op, self.site, watch), self._call, turn, watch=watch)
        struck = struck or _struck()
        if not well:
            if struck is not None:
                raise struck
            how = pickle.loads(more)
            if before:
                raise _first_failed(members, rank, _host(members, rank), self.describe(), how, turn=False)
            raise _peer_failed(members, rank, self.describe(), how)
        return struck


def ordered(group: Any = None) -> _Ordered:
    """Return a context manager whose block the ranks run one after the other, by their rank in the group.

    Called by all members. All leave it together, when the last has ended its block. Without a default group, or with one
    rank, the block just runs. No collective of the group can be made inside.

    Args:
        group: the group; default the world. ``"node"``: the ranks of each node, one after the other.

    Raises:
        FirstFailedError: the block of a rank before this one failed, so this one has not run its own.
        PeerFailedError: that of a later one failed.
        Others as :func:`zero_first`.
    """
    return _Ordered(group)


# --- familiar names ---


def torch_distributed_zero_first(local_rank: int) -> _Block:
    """Return :func:`local_zero_first`, under the name that it has in yolov5 and its descendants.

    Args:
        local_rank: this rank's place on its node, as in ``LOCAL_RANK``; -1: not distributed, the block just runs.

    Raises:
        ValueError: it is not this rank's place on its node. A rank of the world is meant: use :func:`zero_first`.
    """
    return _familiar("torch_distributed_zero_first", local_rank)


def wait_for_the_master(local_rank: int | None = None) -> _Block:
    """Return :func:`local_zero_first`, under the name that it has in super-gradients.

    Args:
        local_rank: None, or this rank's place on its node, as in ``LOCAL_RANK``.

    Raises:
        ValueError: it is not this rank's place on its node.
    """
    return _familiar("wait_for_the_master", local_rank)


def main_process_first(local: bool = True, desc: str | None = None) -> _Block:
    """Return :func:`zero_first`, under the name that it has in transformers (and, for the world alone, in accelerate).

    Args:
        local: the first rank of each node goes first there (transformers' default); False: rank 0 of the world, as in
            accelerate, whose local_main_process_first is :func:`local_zero_first`.
        desc: what the block does, for messages.
    """
    return _Block(desc, "node" if local else "world", None, True, (), 60.0, op="main_process_first")


def _familiar(op: str, local_rank: Any) -> _Block:
    def check(known: JobWithGroups) -> None:
        if local_rank is None:
            return
        if isinstance(local_rank, bool) or not hasattr(local_rank, "__index__"):
            raise TypeError(f"local_rank must be an integer, not {type(local_rank).__name__}")
        if int(local_rank) != known.topology.local_rank:
            raise ValueError(
                f"local_rank={local_rank} on rank {known.world.rank()}, which is number {known.topology.local_rank} on its "
                "node: pass LOCAL_RANK. Where rank 0 of the world is to go first, use zero_first()"
            )

    applies = not (hasattr(local_rank, "__index__") and int(local_rank) == -1)
    return _Block(None, "node", None, True, (), 60.0, op=op, applies=applies, check=check)
