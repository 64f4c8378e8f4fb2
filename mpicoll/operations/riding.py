"""Calls that are made again with arrays of the same shapes; on one node the data of small ones rides along in their round.

Such a small call costs about as much as the few lines of Python here: everything that can be known before is kept, one
attribute is looked up where a function would be called, and nothing is allocated. Whatever is not as usual, on this member or
on another, goes the long way of ``repeating``: all members learn in the round whether everybody's data is there.

Where the extension was built (``_riding.c``), it makes the same steps in place of :func:`ride_in_python`, and hands on
to :func:`_finish` what is not as usual.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import combinations, pairwise
from types import FrameType
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.checks.agreement import Lane, Ticket
from mpicoll.checks.memory_in_use import claims
from mpicoll.diagnosis.call import NOTHING
from mpicoll.errors import AGREED, CollectiveMismatchError
from mpicoll.groups import registry
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.groups.registry import default
from mpicoll.memory.arithmetic import quiet_runner, quietly
from mpicoll.memory.layouts import joined
from mpicoll.operations import execution, repeating
from mpicoll.operations.repeating import REPEATED_BYTES, Repeated
from mpicoll.runtime import signals, waiting
from mpicoll.runtime.call_site import caller
from mpicoll.runtime.mpi_library import keep_of
from mpicoll.runtime.native import found, name_of
from mpicoll.runtime.native import why_not as no_extension
from mpicoll.transports.base import SMALL_BYTES, Kind, Movement
from mpicoll.transports.shm.control import MASK, RIDING_BYTES, Rounds
from mpicoll.transports.shm.segment import Meeting, Segment
from mpicoll.transports.shm.transport import OPS, PATIENCE, PATIENCE_CROWDED

MOST = 256
POLLS, POLLS_CROWDED = 400, 2

_now = time.monotonic_ns
_ident = threading.get_ident
_guard = signals.guard
_threads = signals.threads
_pending = waiting.pending
_flights = claims.flights
_ndarray = np.ndarray
_default = default


FOLD, SUM_UP, IN_TURN, COPY, EACH = "fold", "sum up", "in turn", "copy", "each"
_FEW = 3
MANY = 4
"""Members from which on one call of NumPy over all of them is faster than one for each."""


class Ride:
    """A call of one member, prepared to be made again with arrays of the same shapes; a small one rides.

    What a member passes is an array, a list of arrays, or None where it passes nothing.

    Attributes:
        again: the same call, as it is made the long way.
        crosses: whether it is a small one that goes through MPI, in place.
        moves: whether anything is moved: all but a barrier.
        thread: the one that made it last.
        body: what its records, or its rounds, say.
        rides: whether its data rides along; what follows is of such calls alone.
        lists: whether this member passes a list, or gets one.
        lane, at, counters: of the group's rounds.
        take: what is done with the others' elements: reduced into the result (by a call for each, or one for all rows, or for one
            element of each), copied into it, or each copied into one array of it; "" where there is none.
        target: the shape that the result is given for that, where it is another than its own.
        combine: reduces two arrays into a third, or all rows of an array.
        segment: the memory of a call that brings more than there is room for beside a record, and of a step of the node engine
            then; None for the others.
        views: for each place of the ring, or for even and odd steps, where this member writes its elements and what it reads;
            made when they are needed.
        width: bytes of the pieces of a call that the extension makes in several; 0 for the others.
        idle: what makes it when it is waited for later, and is at rest.
        inside: the place of this member's own elements among what it reduces, which are those of the result; or -1.
        polls: how often a member looks for another one before it waits as every call does.
    """

    __slots__ = (
        "_recv",
        "_rounds",
        "_send",
        "again",
        "at",
        "body",
        "combine",
        "counters",
        "crosses",
        "dtype",
        "idle",
        "inside",
        "lane",
        "lists",
        "moves",
        "op",
        "polls",
        "quick",
        "rides",
        "segment",
        "take",
        "target",
        "thread",
        "views",
        "width",
    )

    def __init__(self, group: ProcessGroup, again: Repeated, dtype: np.dtype[Any], send: Any, recv: Any) -> None:
        rounds = group.pair.lane.shared
        kind, size = again.kind, group.size()
        self.again, self.lane, self._rounds, self.dtype = again, group.pair.lane, rounds, dtype
        self._send, self._recv = _shapes(send), _shapes(recv)
        self.idle: list[Any] = []
        self.lists = isinstance(send, list) or isinstance(recv, list)
        brings = again.nbytes * (size if kind in _PARTED else 1)
        self.segment: Segment | None = None
        self.width = 0
        small = brings <= RIDING_BYTES
        if not small and rounds is not None:
            node = group.pair.through(kind, again.nbytes)
            if node is not None and registry.state().pool.extension:  # alike on all members
                self.segment, self.width = node.in_pieces(kind, brings, dtype)
            if node is not None and self.segment is None:
                self.segment = node.in_one_step(kind, brings)
        rides = rounds is not None and registry.state().thread_multiple
        self.rides = rides and (small or self.segment is not None)
        self.target: tuple[int, ...] | None = None
        self.take = "" if recv is None else EACH if isinstance(recv, list) else FOLD if again.mpi_op else COPY
        if self.take == COPY and kind in (Kind.ALL_GATHER, Kind.ALL_TO_ALL):
            self.target = (size, recv.size // size)
        self.moves, self.thread = kind is not Kind.BARRIER, 0
        self.op, self.quick = again.op, None
        in_place = kind in (Kind.BARRIER, Kind.ALL_REDUCE, Kind.BROADCAST)
        self.crosses = rounds is None and group.level == "full" and registry.state().thread_multiple
        self.crosses = self.crosses and in_place and again.nbytes <= SMALL_BYTES
        if self.crosses:
            print_ = again.fingerprint
            self.body: Any = (print_, -print_, 0, 0, 0, again.nbytes, NOTHING, NOTHING, 0, 0)
        if not self.rides or rounds is None:
            return
        self.at, self.counters = rounds.at, rounds.counters
        print_ = execution.plain_print(group, again.op, again.fingerprint)
        against = again.detail if again.detail == NOTHING else -again.detail
        there = again.nbytes + 1  # where a member does not ride: 0, and all go the long way
        words: Any = np.array((print_, -print_, 0, 0, 0, again.nbytes, again.detail, against, 0, there), np.int64)
        self.body = memoryview(words).cast("B").cast("q")
        self.combine = None
        if self.take == FOLD:
            if size >= MANY and self.segment is None:
                # NumPy adds one element each of many in pairs, and rows one after the other.
                self.take = SUM_UP if recv.size > 1 else IN_TURN
            self.combine = _combine(again.mpi_op, dtype, self.take)
        self.views: list[tuple[Any, Any] | None] = [None] * (MASK + 1)
        self.polls = POLLS_CROWDED if waiting.crowded else POLLS + brings // 64
        self.inside = rounds.me if size == 2 and kind in (Kind.ALL_REDUCE, Kind.REDUCE) else -1
        self.quick = self._prepared(rounds, brings)
        if self.width and (self.quick is None or bool(self.take) != self.quick.takes):
            self.rides, self.quick = False, None  # of elements that are NumPy's affair

    def _prepared(self, rounds: Rounds, brings: int) -> Any:
        """Return the call as the extension makes it; None where there is no extension, or the call is none for it."""
        again, dtype = self.again, self.dtype
        if extension is None or not registry.state().pool.extension:
            return None
        blocks = [shape for shapes in (self._send, self._recv) if isinstance(shapes, list) for shape in shapes]
        if any(dtype.itemsize * math.prod(shape) != again.nbytes for shape in blocks):
            return None
        take = "rows" if self.target is not None else "reduce" if self.take in (FOLD, SUM_UP, IN_TURN) else self.take
        return extension.Quick(
            **rounds.layout(),
            **(rounds.layout_beside() if self.segment is None else self.segment.layout()),
            lane=self.lane,
            segment=self.segment,
            body=self.body,
            dtype=dtype,
            itemsize=max(dtype.itemsize, 1),
            brings=0 if self._send is None else brings,
            start=rounds.me * again.nbytes if again.kind in _PARTED else 0,
            nbytes=again.nbytes,
            root=again.root,
            send=self._send,
            recv=self._recv,
            take=take,
            reduction=name_of(again.mpi_op, dtype),
            average=again.average,
            in_place=again.kind in (Kind.ALL_REDUCE, Kind.REDUCE),
            width=self.width or again.nbytes,
            patience=PATIENCE_CROWDED if waiting.crowded else PATIENCE + (self.width or brings) // 2,
        )

    def look(self, place: int) -> tuple[Any, Any]:
        """Return the views for a place of the ring, and keep them."""
        rounds, again, dtype, send, recv = self._rounds, self.again, self.dtype, self._send, self._recv
        assert rounds is not None
        nbytes, memory = again.nbytes, self.segment or rounds
        own: Any = None
        if isinstance(send, list):
            own = [memory.beside(place, rounds.me, dtype, shape, i * nbytes) for i, shape in enumerate(send)]
        elif send is not None:
            own = memory.beside(place, rounds.me, dtype, send)
        start = rounds.me * nbytes if again.kind in _PARTED else 0  # of this member's part of what another brings
        everybody = range(rounds.size)
        theirs: Any = None
        if isinstance(recv, list):
            theirs = [memory.beside(place, rank, dtype, recv[rank], start) for rank in everybody]
        elif self.take in (SUM_UP, IN_TURN) and recv is not None:
            theirs = memory.across(place, dtype, math.prod(recv), start)
        elif self.take == FOLD and recv is not None:
            theirs = [memory.beside(place, rank, dtype, recv, start) for rank in everybody]
        elif self.target is not None:
            theirs = memory.across(place, dtype, self.target[1], start)
        elif recv is not None:
            theirs = memory.beside(place, again.root, dtype, recv, start)
        found = self.views[place] = own, theirs
        return found

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
            counts = [again.detail] * self.lane.size
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


def _combine(op: str, dtype: np.dtype[Any], take: str) -> Callable[..., Any]:
    """Return what reduces arrays of a dtype: it says nothing of overflows, and leaves no settings behind.

    Args:
        take: how it is called: as a ufunc, or its ``reduce``, or its ``accumulate``, which goes in the order of the ranks.
    """
    numpy: Any = OPS[op]
    ufunc: Callable[..., Any] = {SUM_UP: numpy.reduce, IN_TURN: numpy.accumulate}.get(take, numpy)
    if dtype.kind in "biu":
        return ufunc  # it has nothing to say
    # A context of its own, where ``quietly`` would look for that of the thread: a group's calls are made one at a time.
    return partial(quiet_runner(), ufunc)


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
    if found.quick is not None and ride(known, found, send, recv, frame):
        return True
    if send is not None or recv is not None:
        # What is usual here, and not in a function: a call of one takes as long as all of this.
        usual = send is recv and type(recv) is _ndarray and not found.lists and recv.flags.carray
        if not usual and not found.fits(send, recv):
            return False
    if found.quick is None and found.rides and ride(known, found, send, recv, frame):
        return True
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


def ride_in_python(group: ProcessGroup, known: Ride, send: Any, recv: Any, frame: FrameType) -> bool:
    """Make a small call again; False, and nothing done, where something else is under way.

    Args:
        send, recv: as the call was prepared for; what is input and output is both.
        frame: of the program's call.
    """
    again, lane, counters = known.again, known.lane, known.counters
    wrong: BaseException | None = None
    began = False
    try:
        with group.lock:
            call = lane.issued
            if lane.turn != call or _pending or _flights or group.turn is not None:
                return False
            segment = known.segment
            if segment is not None and not _all_have_read(segment, known.polls):
                return False
            began = True
            if known.thread != _ident():
                known.thread = _ident()
                _threads.add(known.thread)
            lane.issued = call + 1
            lane.rounds = number = lane.rounds + 1
            place = number & MASK
            mine, where, clock, others, _bodies = known.at[place]
            mine[:] = known.body
            if known.moves:
                which = place if segment is None else (segment.step + 1) & 1
                own = (known.views[which] or known.look(which))[0]
                if own is not None:
                    if own.__class__ is list:
                        for view, each in zip(own, send, strict=True):
                            view[...] = each
                    else:
                        own[...] = send
            group.calls += 1
            # What it alone knows of is let go when the call is over: its end may run the program's code.
            _before = group.last
            group.last = again.op, frame.f_code, frame.f_lasti
            if segment is not None:
                segment.drain()
            counters[clock] = _now()
            counters[where] = number  # from here on the others may go on
            polls = known.polls
            for other in others:
                while True:
                    if counters[other] >= number:
                        break
                    polls -= 1
                    if polls >= 0:
                        continue
                    _wait(group, known, frame, place, number)
            _end(group, known, send, recv, frame, place)
            return True
    except CollectiveMismatchError as error:
        wrong = error
        raise
    except BaseException as error:
        wrong = error
        keep_of(error)
        if began:
            _give_up(group, again, frame, error)
        raise
    finally:
        if _guard.noted is not None:
            _guard.answer(wrong)


def cross(group: ProcessGroup, known: Ride, array: Any, frame: FrameType) -> bool:
    """Make a small call again through MPI; False, and nothing done, where something else is under way.

    As ``operations.repeating.repeat`` does it, where all is as usual: in one function, as :func:`ride` is.

    Args:
        array: input and output.
        frame: of the program's call.
    """
    again, lane = known.again, known.lane
    wrong: BaseException | None = None
    began = False
    try:
        with group.lock:
            call = lane.issued
            if lane.turn != call or lane.posted != call or _pending or _flights or group.turn is not None:
                return False
            plan = group.plans.get(again.plan_key) if known.moves else None
            slot: Any = lane.slot_at_rest()
            if slot is None or (plan is None and known.moves) or MPI.Is_finalized():
                return False
            began = True
            if known.thread != _ident():
                known.thread = _ident()
                _threads.add(known.thread)
            lane.issued = call + 1
            group.calls += 1
            # What it alone knows of is let go when the call is over: its end may run the program's code.
            _before = group.last
            group.last = again.op, frame.f_code, frame.f_lasti
            lane.rounds += 1
            slot.fill(lane.rounds, known.body)
            slot.busy = True
            slot.request.Start()
            lane.posted = call + 1
            polls = 2 if waiting.crowded else waiting.SPIN_POLLS
            test = slot.request.Test
            for _ in range(polls):
                if not test():
                    continue
                break
            else:
                repeating.finish_request(group, again, frame, slot.request)
            flags = slot.plain(again.fingerprint)
            if flags is not None:
                move, _ = known.movement(array, array)
                repeating.go_on(group, again, move, frame, Ticket(lane, call), flags)
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
            lane.turn = call + 1
            if again.average:
                quietly(np.divide, array, group.size(), out=array)
            return True
    except CollectiveMismatchError as error:
        wrong = error
        raise
    except BaseException as error:
        wrong = error
        keep_of(error)
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
        patience.give_up(error)
        raise execution.wrap(error, group, patience.call) from error
    if group.broken is None and not getattr(error, AGREED, False):
        repeating.patience_of(group, again, frame).give_up(error)


def _all_have_read(segment: Segment, polls: int) -> bool:
    """Whether nobody reads any more what stood in this member's next buffer; looked for for a while."""
    step = segment.step
    return segment.all_at(step) or any(segment.all_at(step) for _ in range(polls))


def _wait(group: ProcessGroup, known: Ride, frame: FrameType, place: int, number: int) -> None:
    slot = known.lane.slot(place)
    slot.number = number
    repeating.finish_request(group, known.again, frame, slot)


def _go_on(group: ProcessGroup, known: Ride, send: Any, recv: Any, frame: FrameType, place: int, call: int) -> None:
    """Go the long way: somebody's data is not there, or somebody makes another call."""
    move, after = known.movement(send, recv)
    repeating.go_on(group, known.again, move, frame, Ticket(known.lane, call), known.lane.slot(place).flags())
    if known.again.average and move.recv is not None:
        quietly(np.divide, move.recv, group.size(), out=move.recv)
    if after is not None:
        after()


def _end(group: ProcessGroup, known: Ride, send: Any, recv: Any, frame: FrameType, place: int) -> None:
    """Wait for the others in a call that is posted, and take its result."""
    lane, counters, body, segment = known.lane, known.counters, known.body, known.segment
    call, number = lane.issued - 1, lane.rounds
    _, _, _, others, bodies = known.at[place]
    for other in others:
        while counters[other] < number:
            _wait(group, known, frame, place, number)
    lane.posted = call + 1
    for each in bodies:
        if each != body:
            _go_on(group, known, send, recv, frame, place, call)
            return
    lane.turn = call + 1
    if segment is not None:
        place = (segment.step + 1) & 1
        segment.come(segment.step + 1)
    if known.width:
        extension.rest(group, known, send, recv, frame)
    else:
        collect(group, known, recv, place)


def collect(group: ProcessGroup, known: Ride, recv: Any, place: int) -> None:
    """Take the result of a call that is over, from a place of its memory."""
    take, quick = known.take, known.quick
    if not take:
        return
    if quick is not None and quick.takes:  # as those do it that did not have to wait: the same bits on all
        quick.take(place, recv)
        return
    theirs = (known.views[place] or known.look(place))[1]
    combine: Any = known.combine
    if take == FOLD:
        inside = known.inside
        if inside < 0:
            combine(theirs[0], theirs[1], out=recv)
        elif inside:
            combine(theirs[0], recv, out=recv)
        else:
            combine(recv, theirs[1], out=recv)
        for rank in range(2, len(theirs)):
            combine(recv, theirs[rank], out=recv)
    elif take == SUM_UP:
        combine(theirs, 0, known.dtype, recv.reshape(-1))
    elif take == IN_TURN:
        recv.reshape(-1)[...] = combine(theirs, 0, known.dtype)[-1]
    elif take == COPY:
        (recv if known.target is None else recv.reshape(known.target))[...] = theirs
    elif take == EACH:
        for each, view in zip(recv, theirs, strict=True):
            each[...] = view
    if known.again.average:
        quietly(np.divide, recv, group.size(), out=recv)


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
        keep_of(error)
        _give_up(group, known.again, frame, error)
        raise
    finally:
        if _guard.noted is not None:
            _guard.answer(wrong)


def _finish(group: ProcessGroup, known: Ride, send: Any, recv: Any, frame: FrameType) -> bool:
    """Go on with a call that the extension leaves to Python; the group's lock is held."""
    _or_give_up(group, known, frame, lambda: _end(group, known, send, recv, frame, known.lane.rounds & MASK))
    return True


def _await(group: ProcessGroup, known: Ride, frame: FrameType, step: int, root_alone: bool) -> None:
    """Wait for the others, or for the root, in the midst of a call that the extension makes in pieces."""
    segment = known.segment
    assert segment is not None
    peers = (segment.places[known.again.root],) if root_alone else segment.peers
    meeting = Meeting(segment.counters, peers, step)
    _or_give_up(group, known, frame, lambda: repeating.finish_request(group, known.again, frame, meeting))


def _lose(group: ProcessGroup, known: Ride, frame: FrameType, call: int, error: BaseException) -> None:
    """Give a call up that the extension has posted, where ``_finish`` could not: a signal's handler raised as it began."""
    if known.lane.posted == call and group.broken is None:
        keep_of(error)
        _give_up(group, known.again, frame, error)


signals.guard.inside.update(
    (ride_in_python.__code__, _or_give_up.__code__, _finish.__code__, _await.__code__, _lose.__code__, cross.__code__)
)


def _prepared_extension() -> tuple[Any, str]:
    """Return the extension, told of what it needs; or None, and why it cannot be used."""
    if found is None:
        return None, no_extension
    probe = np.zeros((2, 3))
    address = probe.__array_interface__["data"][0]
    mine = (ride_in_python, _finish, _lose, _await, _pending, _flights, _threads)
    try:
        found.prepare(*mine, Ride, Lane, ProcessGroup, Segment, probe, address)
    except TypeError as error:
        return None, str(error)
    return found, ""


extension, why_not = _prepared_extension()
ride: Callable[[ProcessGroup, Ride, Any, Any, FrameType], bool]
ride = ride_in_python if extension is None else extension.ride
"""Make a small call again, as :func:`ride_in_python` does it."""


def _forget_in_child() -> None:
    known = registry.current()
    if known is not None:
        for group in known.groups.values():
            group.rides = {}


os.register_at_fork(after_in_child=_forget_in_child)
