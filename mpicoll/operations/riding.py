"""Calls that are made again with arrays of the same shapes; on one node the data of small ones is sent with their round.

On one node the extension makes the whole call (:class:`mpicoll._native.SharedOperation`). A call whose members differ, or
that has to wait longer than a moment, goes on in :func:`_finish`. Through MPI a small call is made by :func:`cross`. Whatever is
not as usual, on this member or on another, goes the long way of ``repeating``: all members learn in the round whether the
data of all is there.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from functools import partial
from itertools import combinations, pairwise
from types import FrameType
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.checks.memory_in_use import claims
from mpicoll.errors import AGREED, CollectiveMismatchError
from mpicoll.groups import registry
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.groups.registry import default
from mpicoll.memory.arithmetic import without_warnings
from mpicoll.memory.layouts import joined
from mpicoll.operations import execution, repeating
from mpicoll.operations.failures import wrap
from mpicoll.operations.repeating import REPEATED_BYTES, Repeated
from mpicoll.runtime import signals, waiting
from mpicoll.runtime.call_site import caller
from mpicoll.runtime.mpi_library import retain_frames
from mpicoll.runtime.native import found as extension
from mpicoll.runtime.native import name_of
from mpicoll.transports.base import SMALL_BYTES, Kind, Movement
from mpicoll.transports.control import Round, make_words
from mpicoll.transports.shm.control import EAGER_BYTES
from mpicoll.transports.shm.transport import poll_ns

MOST = 256

_ident = threading.get_ident
_guard = signals.guard
_threads = signals.threads
_pending = waiting.pending
_flights = claims.flights
_ndarray = np.ndarray
_default = default

_FEW = 3


class Ride:
    """A call of one member, prepared to be made again with arrays of the same shapes.

    What a member passes is an array, a list of arrays, or None where it passes nothing.

    Attributes:
        again: the same call, as it is made the long way.
        shared: the call as the extension makes it; None if it goes through MPI.
        crosses: whether it is a small one that goes through MPI, in place.
        moves: whether anything is moved: all but a barrier.
        thread: the one that made it last, of a call that crosses.
        body: the words of its rounds.
        lists: whether this member passes a list, or gets one.
        agreement: of the group.
        segment: the memory of a call that brings more than there is room for beside a record; None for the others.
        width: bytes of the pieces of a call that the extension makes in several; 0 for the others.
        poll_ns: how long a member polls for another one before it waits as every call does.
        idle: what makes it when it is waited for later, and is at rest.
    """

    __slots__ = (
        "_recv",
        "_send",
        "again",
        "agreement",
        "body",
        "crosses",
        "dtype",
        "idle",
        "lists",
        "moves",
        "op",
        "poll_ns",
        "segment",
        "shared",
        "thread",
        "width",
    )

    def __init__(self, group: ProcessGroup, again: Repeated, dtype: np.dtype[Any], send: Any, recv: Any) -> None:
        agreement = group.pair.agreement
        on_node = agreement.channel.carries_data
        kind, size = again.kind, group.size()
        self.again, self.agreement, self.dtype = again, agreement, dtype
        self._send, self._recv = _shapes(send), _shapes(recv)
        self.idle: list[Any] = []
        self.body: tuple[int, ...] = ()
        self.lists = isinstance(send, list) or isinstance(recv, list)
        self.moves, self.thread, self.op = kind is not Kind.BARRIER, 0, again.op
        self.segment: Any = None
        self.shared: Any = None
        self.width = 0
        brings = again.nbytes * (size if kind in _PARTED else 1)
        self.poll_ns = 0
        multiple = registry.state().thread_multiple
        in_place = kind in (Kind.BARRIER, Kind.ALL_REDUCE, Kind.BROADCAST)
        self.crosses = not on_node and group.level == "full" and multiple and in_place and again.nbytes <= SMALL_BYTES
        if self.crosses:
            self.body = make_words(again.fingerprint, again.nbytes)
        if not on_node or not multiple:
            return
        if brings > EAGER_BYTES:
            node = group.pair.through(kind, again.nbytes)
            if node is not None:
                self.segment, self.width = node.in_pieces(kind, brings, dtype)
                self.segment = self.segment or node.in_one_step(kind, brings)
            if self.segment is None:
                return
        # Of a piece: the extension holds the interpreter lock while it polls.
        self.poll_ns = poll_ns(self.width or brings, waiting.oversubscribed)
        print_ = execution.plain_print(group, again.op, again.fingerprint)
        # A member whose data does not come with the round posts 0 for eager bytes, and all go the long way.
        self.body = make_words(print_, again.nbytes, detail=again.detail, eager=again.nbytes + 1)
        rows = isinstance(self._recv, tuple) and kind in (Kind.ALL_GATHER, Kind.GATHER, Kind.ALL_TO_ALL)
        result = "list" if isinstance(recv, list) else "rows" if rows else "reduced" if again.mpi_op else "copied"
        self.shared = extension.SharedOperation(
            ring=agreement.channel.ring,  # type: ignore[attr-defined]
            segment=self.segment,
            order=agreement.order,
            words=self.body,
            dtype=dtype,
            itemsize=max(dtype.itemsize, 1),
            sends=math.prod(self._send) * dtype.itemsize
            if isinstance(self._send, tuple)
            else brings
            if self._send
            else 0,
            offset=group.rank() * again.nbytes if kind in _PARTED else 0,
            block=again.nbytes,
            width=self.width or max(again.nbytes, 1),
            root=again.root,
            send=self._send,
            recv=self._recv,
            result="" if recv is None else result,
            reduction=name_of(again.mpi_op, dtype),
            average=again.average,
            in_place=kind in (Kind.ALL_REDUCE, Kind.REDUCE),
            poll_ns=self.poll_ns,
        )

    def fits(self, send: Any, recv: Any) -> bool:
        """Whether arrays can be moved as they are; those that are in no list are known to have the shape and the dtype."""
        if self.lists:
            return self._fit(send, self._send, False) and self._fit(recv, self._recv, True)
        if recv is None:
            return send is None or _readable(send)
        return type(recv) is _ndarray and recv.flags.carray and (send is recv or send is None or _readable(send))

    def _fit(self, given: Any, shapes: Any, writes: bool) -> bool:
        if not isinstance(shapes, list):
            return given is None or (_readable(given) and (not writes or given.flags.writeable))
        if type(given) is not list or len(given) != len(shapes) or (writes and not apart(given)):
            return False
        for each, shape in zip(given, shapes, strict=True):
            if type(each) is not _ndarray or each.shape != shape or each.dtype != self.dtype:
                return False
            if not (each.flags.carray if writes else _readable(each)):
                return False
        return True

    def movement(self, send: Any, recv: Any) -> tuple[Movement, Callable[[], None] | None]:
        """Return what is moved the long way, and what is done after it."""
        again = self.again
        kind = again.kind
        if kind is Kind.BARRIER:
            return Movement(kind), None
        send, recv = None if self._send is None else send, None if self._recv is None else recv
        if kind in (Kind.ALL_REDUCE, Kind.BROADCAST) or (kind is Kind.REDUCE and recv is not None):
            flat = (send if recv is None else recv).reshape(-1)
            return Movement(kind, recv=flat, op=again.mpi_op, root=again.root), None
        after = None
        if isinstance(recv, list):
            into: Any = joined(recv)
            if into is None:
                into = np.empty(sum(each.size for each in recv), self.dtype)
                after = partial(_unpack, into, recv)
        else:
            into = None if recv is None else recv.reshape(-1)
        if isinstance(send, list):
            whole = joined(send)
            send = np.concatenate([each.reshape(-1) for each in send]) if whole is None else whole
        elif send is not None:
            send = send.reshape(-1)
        if send is not None and into is not None and np.may_share_memory(send, into):
            send = send.copy()  # MPI forbids that its buffers overlap
        counts = None
        if kind is Kind.ALL_TO_ALL:
            counts = [again.detail] * self.agreement.comm.Get_size()
        move = Movement(
            kind, send=send, recv=into, sendcounts=counts, recvcounts=counts, op=again.mpi_op, root=again.root
        )
        return move, after


_PARTED = (Kind.SCATTER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL)
"""Where a member brings a block for each of the others."""


def _shapes(given: Any) -> Any:
    return [each.shape for each in given] if isinstance(given, list) else None if given is None else given.shape


def _readable(given: Any) -> bool:
    if type(given) is not _ndarray:
        return False
    flags = given.flags
    return bool(flags.c_contiguous and flags.aligned)


def apart(arrays: list[Any]) -> bool:
    """Whether it is certain that no two arrays of a list have bytes in common."""
    if any(type(each) is not _ndarray for each in arrays):
        return False
    if all(each.base is None for each in arrays):  # each has memory of its own
        return len(set(map(id, arrays))) == len(arrays)
    if len(arrays) <= _FEW:
        return not any(np.may_share_memory(one, other) for one, other in combinations(arrays, 2))
    places = sorted((each.__array_interface__["data"][0], each.nbytes) for each in arrays)
    return all(start + nbytes <= after for (start, nbytes), (after, _) in pairwise(places))


def _unpack(packed: Any, arrays: list[Any]) -> None:
    at = 0
    for each in arrays:
        each.reshape(-1)[...] = packed[at : at + each.size]
        at += each.size


def learn(group: ProcessGroup, key: Any, again: Repeated, dtype: np.dtype[Any], send: Any, recv: Any) -> None:
    """Keep a call of plain arrays that this member's program makes just now, for the next time.

    Args:
        key: what the program gave; None where the call cannot be made again in short.
        send, recv: what this member passes, and where its result goes.
    """
    if key is None or group.gone() or again.nbytes * group.size() > REPEATED_BYTES:
        return
    node = group.pair.through(again.kind, again.nbytes)
    if node is not None and not node.ready:
        return  # this call makes its memory: the next one is kept
    if len(group.rides) >= MOST:
        group.rides.clear()
    made = Ride(group, again, dtype, send, recv)
    if made.fits(send, recv):
        group.rides[key] = made


def again(group: Any, key: Any, send: Any, recv: Any, depth: int = 2) -> bool:
    """Make a call again that was kept; False, and nothing done, where that cannot be.

    Args:
        group: as the program gave it.
        key: as for :func:`learn`.
        send, recv: as for :func:`learn`; arrays that are not in lists are plain ones of the shape and dtype in the key.
        depth: frames between this function and the program.
    """
    known: Any = _default.world if group is None else group
    try:
        found = known.rides[key]
    except (KeyError, AttributeError, TypeError):  # not made before; no group, or not a member
        return False
    frame = caller(depth)
    if found.shared is not None and extension.run(known, found, send, recv, frame):
        return True
    if send is not None or recv is not None:
        # What is usual here, and not in a function: a call of one takes as long as all of this.
        usual = send is recv and type(recv) is _ndarray and not found.lists and recv.flags.carray
        if not usual and not found.fits(send, recv):
            return False
    if found.crosses and cross(known, found, send if recv is None else recv, frame):
        return True
    return repeat(known, found, send, recv, frame)


def repeat(group: ProcessGroup, known: Ride, send: Any, recv: Any, frame: FrameType) -> bool:
    """Make a call again the long way; False, and nothing done, where its memory may be in use."""
    if _flights:
        return False
    with signals.guard:  # to the end: a Ctrl-C that is noted in a call that is complete must not keep its results back
        move, after = known.movement(send, recv)
        repeating.repeat(group, known.again, move, frame)
        if after is not None:
            after()
    return True


def cross(group: ProcessGroup, known: Ride, array: Any, frame: FrameType) -> bool:
    """Make a small call again through MPI; False, and nothing done, where something else is under way.

    As ``operations.repeating.repeat`` does it, where all is as usual: in one function.

    Args:
        array: input and output.
        frame: of the program's call.
    """
    again, agreement = known.again, known.agreement
    order = agreement.order
    wrong: BaseException | None = None
    began = False
    try:
        with group.lock:
            call = order.issued
            if not agreement.is_idle() or _pending or _flights or group.turn is not None:
                return False
            plan = group.plans.get(again.plan_key) if known.moves else None
            if (plan is None and known.moves) or MPI.Is_finalized():
                return False
            began = True
            if known.thread != _ident():
                known.thread = _ident()
                _threads.add(known.thread)
            order.issued = call + 1
            order.calls += 1
            # What it alone knows of is let go when the call is over: its end may run the program's code.
            _before = group.last
            group.last = again.op, frame.f_code, frame.f_lasti
            made_round = agreement.post(known.body)
            polls = 2 if waiting.oversubscribed else waiting.SPIN_POLLS
            test = made_round.Test
            for _ in range(polls):
                if not test():
                    continue
                break
            else:
                repeating.finish_request(group, again, frame, made_round)
            agreed = repeating.outcome(made_round, known.body)
            if agreed is not None:
                move, _ = known.movement(array, array)
                repeating.go_on(group, again, move, frame, call, agreed)
            elif plan is not None:
                group.plans.move_to_end(again.plan_key)
                flat = array.reshape(-1)
                request = plan.start_in_place(flat)
                test = request.Test
                for _ in range(polls):
                    if not test():
                        continue
                    break
                else:
                    repeating.finish_request(group, again, frame, request)
                plan.finish_in_place(flat)
            order.moving = call + 1
            if again.average:
                without_warnings(np.divide, array, group.size(), out=array)
            return True
    except CollectiveMismatchError as error:
        wrong = error
        raise
    except BaseException as error:
        wrong = error
        retain_frames(error)
        if began:
            _give_up(group, again, frame, error)
        raise
    finally:
        if _guard.noted is not None:
            _guard.answer(wrong)


def _give_up(group: ProcessGroup, again: Repeated, frame: FrameType, error: BaseException) -> None:
    """Leave a call that something struck: a handler of the program's may raise between any two lines."""
    if isinstance(error, MPI.Exception):
        patience = repeating.patience_of(group, again, frame)
        patience.withdraw(error)
        raise wrap(error, group, patience.call) from error
    if group.broken is None and not getattr(error, AGREED, False):
        repeating.patience_of(group, again, frame).withdraw(error)


def _go_on(
    group: ProcessGroup, known: Ride, send: Any, recv: Any, frame: FrameType, made_round: Round, call: int
) -> None:
    """Go the long way: somebody's data is not there, or somebody makes another call."""
    move, after = known.movement(send, recv)
    agreed = made_round.agreed()
    made_round.release()
    repeating.go_on(group, known.again, move, frame, call, agreed)
    if known.again.average and move.recv is not None:
        without_warnings(np.divide, move.recv, group.size(), out=move.recv)
    if after is not None:
        after()


def _end(group: ProcessGroup, known: Ride, send: Any, recv: Any, frame: FrameType) -> None:
    """Wait for the others in a call that is posted, and read its result."""
    order, segment = known.agreement.order, known.segment
    call, number = order.issued - 1, order.round
    made_round = known.agreement.channel.posted(number)  # type: ignore[attr-defined]
    if not made_round.Test():
        repeating.finish_request(group, known.again, frame, made_round)
    order.posted = call + 1
    if not made_round.unanimous(known.body):
        _go_on(group, known, send, recv, frame, made_round, call)
        return
    order.moving = call + 1
    if segment is not None:
        segment.advance()
    if known.width:
        extension.run_rest(group, known, send, recv, frame)
    else:
        known.shared.read(number if segment is None else segment.step, recv)


def _or_give_up(group: ProcessGroup, known: Ride, frame: FrameType, do: Callable[[], object]) -> None:
    """Go on with a call that the extension has posted; give it up where something strikes it."""
    wrong: BaseException | None = None
    try:
        do()
    except CollectiveMismatchError as error:
        wrong = error
        raise
    except BaseException as error:
        wrong = error
        retain_frames(error)
        _give_up(group, known.again, frame, error)
        raise
    finally:
        if _guard.noted is not None:
            _guard.answer(wrong)


def _finish(group: ProcessGroup, known: Ride, send: Any, recv: Any, frame: FrameType) -> bool:
    """Go on with a call that the extension leaves to Python; the group's lock is held."""
    _or_give_up(group, known, frame, lambda: _end(group, known, send, recv, frame))
    return True


def _await(group: ProcessGroup, known: Ride, frame: FrameType, step: int, root_only: bool) -> None:
    """Wait for the others, or for the root, in the midst of a call that the extension makes in pieces."""
    rank = known.again.root if root_only else -1
    reached = waiting.Condition(partial(known.segment.has_reached, step, rank))
    _or_give_up(group, known, frame, lambda: repeating.finish_request(group, known.again, frame, reached))


def _lose(group: ProcessGroup, known: Ride, frame: FrameType, call: int, error: BaseException) -> None:
    """Give a call up that the extension has posted, where ``_finish`` could not: a signal's handler raised as it began."""
    if known.agreement.order.posted == call and group.broken is None:
        retain_frames(error)
        _give_up(group, known.again, frame, error)


signals.guard.inside.update((_or_give_up.__code__, _finish.__code__, _await.__code__, _lose.__code__, cross.__code__))


if extension is not None:
    extension.configure(_finish, _lose, _await, _pending, _flights, _threads, Ride, ProcessGroup)


def _forget_in_child() -> None:
    known = registry.current()
    if known is not None:
        for group in known.groups.values():
            group.rides = {}


os.register_at_fork(after_in_child=_forget_in_child)
