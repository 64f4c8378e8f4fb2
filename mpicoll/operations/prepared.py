"""Prepared operations: calls that a group caches by their signature, so that the next such call takes less time.

A prepared operation holds what all starts share: the words of the rounds, kind and sizes, and the schedules. Other members do not
know whether this rank has prepared the call: the words of the round tell whether the data of this rank comes with the round. Each
start makes a :class:`mpicoll.operations.request.Request`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any

import numpy as np

from mpicoll.checks.levels import EVERY
from mpicoll.checks.memory_in_use import RequestClaim
from mpicoll.checks.memory_ranges import Snapshot, is_sampled
from mpicoll.diagnosis.call import CallDescription, fingerprint
from mpicoll.groups import registry
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.memory.layouts import are_disjoint
from mpicoll.operations import execution
from mpicoll.operations.request import Request, collectives_are_pending
from mpicoll.operations.schedules import (
    AT_ONCE,
    BLOCKING,
    EAGER,
    IN_SHARED_MEMORY,
    MEETING,
    NONBLOCKING,
    THROUGH_PLAN,
    UNCOMPARED,
    finish_copies,
    move_into_copies,
    movement,
)
from mpicoll.runtime import waiting
from mpicoll.runtime.call_site import CallSite
from mpicoll.runtime.native import found as extension
from mpicoll.runtime.native import name_of
from mpicoll.runtime.settings import has_type
from mpicoll.runtime.waiting import Steps
from mpicoll.transports.base import EAGER_BYTES, SMALL_BYTES, Kind
from mpicoll.transports.control import NOTHING, Words, make_words
from mpicoll.transports.selection import NEVER, Facts, Way, select
from mpicoll.transports.shm.transport import poll_ns

MOST = 256
"""Most prepared operations that a group caches."""

LARGEST = execution.NATIVE_BYTES
"""Most bytes that all members move in a prepared operation, so that one blocking call of MPI moves them."""

_ndarray = np.ndarray


class PreparedOperation:
    """A call of one rank, prepared for a group. Its input and its output are an array, a list of arrays, or None.

    Attributes:
        op, key, alias, detail: of the call.
        kind, mpi_op, root: of the movement.
        nbytes: of the largest block that this rank moves to or from one peer.
        average: divide the result by the number of members.
        words, eager_words: of a round without data, and of a round with the data of this rank, or with the places of its
            blocks if the call copies from process to process.
        shared: the operation of the extension; None if the call goes through MPI.
        later, later_words: the same for a call that is not waited for at once: its data comes with the round.
        segment: the memory of a call whose data has no room beside a record; otherwise None.
        width: bytes of a piece, if the extension makes the call in several pieces; otherwise 0.
        places: of the rounds of the group, if the extension starts the call; otherwise None.
        poll_ns: nanoseconds for which a member polls for another member before an ordinary wait.
        send_shapes, recv_shapes: the shape, or the list of shapes, of what this rank passes and receives; None for nothing.
        apart: the arrays of a list may stand apart in a call of MPI if one of them has at least so many bytes.
        lists: the input or the output is a list.
        uneven: the blocks differ in size, and this rank knows all sizes from its arguments.
        in_place: the array of the call is input and output.
        at_once: a small call over MPI, compared at level ``full``, which may be made without a request.
    """

    __slots__ = (
        "_named",
        "_way",
        "_way_later",
        "agreement",
        "alias",
        "apart",
        "at_once",
        "average",
        "detail",
        "dtype",
        "eager_words",
        "fingerprint",
        "in_place",
        "key",
        "kind",
        "later",
        "later_words",
        "lists",
        "mpi_op",
        "nbytes",
        "op",
        "places",
        "plan_key",
        "poll_ns",
        "recv_shapes",
        "root",
        "segment",
        "send_shapes",
        "shared",
        "uneven",
        "width",
        "words",
    )

    def __init__(
        self,
        op: str,
        key: tuple[Any, ...],
        kind: Kind,
        nbytes: int = 0,
        *,
        mpi_op: str = "",
        root: int = -1,
        average: bool = False,
        detail: int = NOTHING,
        alias: str = "",
        uneven: bool = False,
    ) -> None:
        self.op, self.key, self.alias, self.detail, self.uneven = op, key, alias, detail, uneven
        self.kind, self.nbytes, self.mpi_op, self.root, self.average = kind, nbytes, mpi_op, root, average

    def bind(self, group: ProcessGroup, dtype: np.dtype[Any], send: Any, recv: Any) -> PreparedOperation:
        """Prepare the call for a group, and for arrays of the dtype and the shapes of ``send`` and ``recv``."""
        kind, size, agreement = self.kind, group.size(), group.pair.agreement
        self.agreement, self.dtype = agreement, dtype
        self.send_shapes, self.recv_shapes = _shapes(send), _shapes(recv)
        self.lists = isinstance(send, list) or isinstance(recv, list)
        self.fingerprint = fingerprint(self.op, self.key)
        self.plan_key = (self.op, self.key, self.detail)
        print_ = execution.plain_print(group, self.op, self.fingerprint)
        self.words = self._round(print_)
        shared, carries_data = group.pair.through(kind, self.nbytes) is not None, agreement.channel.carries_data
        facts = partial(Facts, kind, size, self.nbytes, bool(self.mpi_op), shared, carries_data, uneven=self.uneven)
        self._way, self._way_later = select(facts()), select(facts(nonblocking=True))
        # In a reduction the blocks stand one behind the other.
        through_mpi = self._way is Way.BLOCKING and not self.mpi_op
        self.apart = group.pair.native.apart_from(kind) if through_mpi else NEVER
        self.eager_words = self.later_words = self.words
        self.segment = self.shared = self.later = self.places = None
        self.in_place = kind in (Kind.ALL_REDUCE, Kind.BROADCAST) and not self.lists
        over_mpi = not agreement.channel.carries_data and group.level == "full"
        self.at_once = over_mpi and self._way in (Way.ROUND, Way.PERSISTENT)
        self.width = self.poll_ns = 0
        self._named: tuple[Any, Words] = None, self.words
        if agreement.channel.carries_data and registry.state().thread_multiple:
            self._bind_shared(group, print_, send, recv)
        return self

    def _round(self, print_: int, eager: int = 0) -> Words:
        """Return the words of a round of this call."""
        return make_words(print_, self.nbytes, detail=self.detail, eager=eager)

    def _bind_shared(self, group: ProcessGroup, print_: int, send: Any, recv: Any) -> None:
        """Make the operations of the extension, unless the data of the call moves through MPI."""
        kind = self.kind
        brings, place, may_copy = self.nbytes * (group.size() if kind in _PARTED else 1), -1, True
        self.poll_ns = poll_ns(brings, waiting.oversubscribed)
        if brings > EAGER_BYTES:
            node = group.pair.through(kind, self.nbytes)
            if node is not None:
                copied = node.in_one_step(kind, brings)
                if not self.uneven:
                    self.segment, self.width, place = node.in_single_copy(kind, self.nbytes)
                if self.segment is None and not self.lists:
                    self.segment, self.width = node.in_pieces(kind, brings, self.dtype)
                self.segment, may_copy = self.segment or copied, copied is not None
            if self.segment is None:
                return
        self.places = self.agreement.channel.places  # type: ignore[attr-defined]
        # If the data of a member does not come with the round, its word for eager bytes is 0: then all move the general way.
        self.later_words = self._round(print_, self.nbytes + 1)
        if place >= 0 and may_copy:
            self.later = self._shared(group, send, recv, self.later_words, 0, -1)
        if self.width:  # for the bytes of a piece: the extension holds the interpreter lock while it polls
            self.poll_ns = poll_ns(self.width, waiting.oversubscribed)
        self.eager_words = self.later_words
        if place >= 0:
            self.eager_words = self._round(print_, -self.nbytes - 1)
        self.shared = self._shared(group, send, recv, self.eager_words, self.width, place)
        if self.later is None:
            self.later, self.later_words = self.shared, self.eager_words

    def _shared(
        self, group: ProcessGroup, send: Any, recv: Any, words: Words, width: int, place: int, **changed: Any
    ) -> Any:
        """Return an operation of the extension.

        Args:
            words: of its round.
            width: bytes of a piece; 0 for a call in one piece.
            place: of a call that copies from process to process, as ``in_single_copy`` returns it; otherwise -1.
            changed: arguments of the operation in place of those that follow from the arrays.
        """
        kind, channel = self.kind, self.agreement.channel  # type: Any, Any
        rows = isinstance(self.recv_shapes, tuple) and kind in (Kind.ALL_GATHER, Kind.GATHER, Kind.ALL_TO_ALL)
        result = "reduced" if self.mpi_op else "list" if isinstance(recv, list) else "rows" if rows else "copied"
        parted = kind in _PARTED
        arguments = {
            "op": self.op,
            "lock": group.lock,
            "ring": channel.ring,
            "segment": self.segment,
            "order": self.agreement.order,
            "words": words,
            "dtype": self.dtype,
            "itemsize": max(self.dtype.itemsize, 1),
            "sends": self._bytes_sent(group.size(), send),
            "offset": group.rank() * self.nbytes if parted else 0,
            "block": self.nbytes,
            "width": width or max(self.nbytes, 1),
            "root": self.root,
            "send": self.send_shapes,
            "recv": self.recv_shapes,
            "result": "" if recv is None else result,
            "reduction": name_of(self.mpi_op, self.dtype),
            "average": self.average,
            "in_place": kind in (Kind.ALL_REDUCE, Kind.REDUCE),
            "poll_ns": self.poll_ns,
            "place": place,
        }
        return extension.SharedOperation(**{**arguments, **changed})

    def _bytes_sent(self, size: int, send: Any) -> int:
        if self.send_shapes is None:
            return 0
        if self.kind in _PARTED:
            return self.nbytes * size
        return send.nbytes if self.uneven else self.nbytes

    @property
    def in_shared_memory(self) -> bool:
        """Whether the data moves through shared memory, if all members make the call in the same way."""
        return self._way is Way.SHARED_MEMORY

    def moves_lists(self, send: Any, recv: Any) -> bool:
        """Return whether an asynchronous call of such lists can be started as it was prepared."""
        return self.in_shared_memory or self._way_later is Way.NONBLOCKING

    @property
    def in_one_step(self) -> bool:
        """Whether one step of the segment takes all data of a call that is not waited for at once."""
        return self.segment is not None and (not self.width or self.later is not self.shared)

    def fits(self, send: Any, recv: Any) -> bool:
        """Return whether arrays fit the prepared operation, and can be moved without a copy.

        An array that is in no list is known to have the shape. Dtypes are compared by number: int64 has two equal dtypes.
        """
        if self.lists:
            return self._fit(send, self.send_shapes, False) and self._fit(recv, self.recv_shapes, True)
        if self.recv_shapes is None:
            if recv is not None and type(recv) is not _ndarray:  # a list of results on a rank that gets none
                return False
            return send is None or (is_readable(send) and _is(send, self.dtype))
        if type(recv) is not _ndarray or not _is(recv, self.dtype) or not recv.flags.carray:
            return False
        return send is recv or send is None or (is_readable(send) and _is(send, self.dtype))

    def _fit(self, given: Any, shapes: Any, writes: bool) -> bool:
        if not isinstance(shapes, list):
            return given is None or (
                is_readable(given) and _is(given, self.dtype) and (not writes or given.flags.writeable)
            )
        if type(given) is not list or len(given) != len(shapes) or (writes and not are_disjoint(given)):
            return False
        for each, shape in zip(given, shapes, strict=True):
            if type(each) is not _ndarray or each.shape != shape or not _is(each, self.dtype):
                return False
            if not (each.flags.carray if writes else is_readable(each)):
                return False
        return True

    def claim(self, send: Any, recv: Any) -> RequestClaim:
        """Return the claim of the memory of one start."""
        writes = recv if self.recv_shapes is not None else None
        if self.send_shapes is None or send is None or send is writes:
            return RequestClaim(writes, writes=True)
        return RequestClaim(writes, writes=True, reads=send if isinstance(send, list) else (send,))

    def describe(self, request: Request) -> CallDescription:
        """Return the description of one start."""
        key = self.key if request.name is None else (*self.key, ("name", request.name))
        call = CallDescription(
            self.op, key, CallSite(request.code, request.instruction), seq=request.seq, block_bytes=self.nbytes
        )
        call.detail, call.alias, call.made = self.detail, self.alias, request.made or []
        call.maker = request.group.maker_of(request.seq)
        call.passes, call.asynchronous = request.words is None, not request.waited
        call.async_op = call.asynchronous
        if request.words is not None:
            call.print = request.words[0]
        return call

    def steps(self, request: Request) -> Steps:
        """Return the steps of the general way: members make the call in different ways, or a member is late."""
        group, agreed = request.group, request.agreed
        move_into_copies(request)
        # In shared memory the arrays of a list may stand apart, whatever their size.
        moves_lists = self.lists and agreed is not None and not agreed.device
        node = group.pair.through(self.kind, agreed.block_bytes) if moves_lists else None
        move, after = movement(request, node is not None and node.ready), partial(finish_copies, request)
        if request.words is None:
            return execution.move_uncompared(group, request.call, move, request.number, None, None, after, None)
        assert agreed is not None
        return execution.move_agreed(
            group, request.call, move, request.number, None, None, after, request.limit, agreed
        )

    def poll(self, made: Any) -> bool:
        """Poll a round for ``poll_ns``, if it has a ring; return whether it is over."""
        return bool(made.poll(self.poll_ns) if self.poll_ns else made.Test())

    def begin(
        self,
        group: ProcessGroup,
        send: Any,
        recv: Any,
        code: CodeType,
        instruction: int,
        before: bytes | Snapshot = b"",
        arrays: Any = None,
        spread: Callable[[], None] | None = None,
        *,
        waited: bool = False,
        limit: float | None = None,
        name: str | None = None,
    ) -> Request:
        """Start the call, and return its request. The caller has the lock of the group, and has checked the group.

        Args:
            before, arrays, spread: fields of the request.
        """
        order = self.agreement.order
        at_once = AT_ONCE if type(before) is bytes and spread is None else EAGER
        request = Request(group, None, [recv], group.timeout if limit is None else limit, waited=waited)
        request.send, request.recv, request.code, request.instruction, request.name = (
            send,
            recv,
            code,
            instruction,
            name,
        )
        request.before, request.spread, request.arrays = before, spread, recv if arrays is None else arrays
        group.last = self.op, code, instruction
        shared, channel = self.later, self.agreement.channel  # type: Any, Any
        eager = shared is not None and self.segment is None
        may_post = eager and not waited and name is None and order.posted == order.issued
        if may_post and channel.room(order.round + 1):
            number, posted = order.issued, shared.start(send)
            if posted >= 0:
                request.seq = order.calls
                request.start_prepared(self, number, self.later_words, at_once, channel.take(posted))
                return request
        order.calls = request.seq = order.calls + 1
        number = order.issue()
        in_segment = not waited and self._is_segment_free(number)
        words = self._words(group, request, eager or in_segment)
        schedule: Any = None
        if words is None:
            schedule = UNCOMPARED if waited and self.plan_key[:2] in group.own_plans else None
        elif eager or in_segment:
            schedule = at_once if eager else EAGER
        else:
            schedule = self._schedule(group, request)
        request.start_prepared(self, number, words, schedule)
        return request

    def _is_segment_free(self, number: int) -> bool:
        """Return whether the call of a number may write its data, of one step, into the segment when it posts its round.

        The data of all earlier calls has moved, and all members have read the step before.
        """
        segment = self.segment
        if segment is None or not self.in_one_step or self.agreement.order.moving != number:
            return False
        free: bool = segment.has_reached(segment.step)
        return free

    def words_named(self, group: ProcessGroup, name: str, later: bool = False) -> Words:
        """Return the words of an eager round of a call to which the program gives a name."""
        last, words = self._named
        if last == (name, later):
            return words
        print_ = execution.plain_print(group, self.op, fingerprint(self.op, (*self.key, ("name", name))))
        words = (print_, -print_, *(self.later_words if later else self.eager_words)[2:])
        self._named = (name, later), words
        return words

    def _words(self, group: ProcessGroup, request: Request, eager: bool) -> Words | None:
        """Return the words of the round of one start; None: the call makes no round."""
        level, print_ = group.level, self.fingerprint
        words: Words = self.later_words if eager else self.words
        if request.name is not None:
            print_ = fingerprint(self.op, (*self.key, ("name", request.name)))
        if level == "full" or self.agreement.channel.carries_data:
            if request.name is None:
                if request.waited and not waiting.pending:
                    return words
                return (*words[:-1], int(not request.waited or collectives_are_pending()))
            print_ = execution.plain_print(group, self.op, print_)
        elif level == "roll":
            rolling = self.agreement.rolling
            key = self.key if request.name is None else (*self.key, ("name", request.name))
            rolling.made.append((request.seq, print_, self.op, key, request.code, request.instruction))
            if self._passes(group):
                return None
            print_, request.made = rolling.cut()
        elif self._passes(group):
            return None
        else:
            print_ = 0
        nonblocking = not request.waited or collectives_are_pending()
        return (print_, -print_, *words[2:-1], int(nonblocking))

    def _passes(self, group: ProcessGroup) -> bool:
        return (
            self.kind in execution.UNCOMPARED
            and not self.uneven
            and self.nbytes <= SMALL_BYTES
            and not (group.level == "roll" and group.calls % EVERY == 0)
        )

    def _schedule(self, group: ProcessGroup, request: Request) -> Any:
        """Return the schedule of a call, if all members make it as this member does; None: the general way."""
        way = self._way if request.waited else self._way_later
        if way is Way.ROUND:
            return MEETING
        if way is Way.SHARED_MEMORY:
            node = group.pair.through(self.kind, self.nbytes)
            in_place = request.spread is None and (not request.before or is_sampled(request.recv))
            return IN_SHARED_MEMORY if node is not None and node.ready and in_place else None
        if way is Way.NONBLOCKING:
            return NONBLOCKING
        if way is Way.PERSISTENT:
            return THROUGH_PLAN if self.plan_key in group.plans else None
        return BLOCKING if way is Way.BLOCKING else None


def prepared_of(group: Any, key: Any) -> PreparedOperation | None:
    """Return the prepared operation of a signature, or None if there is none, or if the object is no group."""
    try:
        found: PreparedOperation = group.prepared[key]
    except (KeyError, AttributeError, TypeError):  # not made before; no group, or not a member
        return None
    except Exception:
        if has_type(group, ProcessGroup):
            raise  # of a signal handler
        return None  # no group, and raises when looked at
    return found


_PARTED = (Kind.SCATTER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL)
"""Kinds in which a member has a block for each other member."""


def _shapes(given: Any) -> Any:
    return [each.shape for each in given] if isinstance(given, list) else None if given is None else given.shape


def _is(array: Any, dtype: np.dtype[Any]) -> bool:
    """Return whether an array has a dtype in native byte order, compared by number, as int64 has two equal dtypes."""
    found = array.dtype
    return found is dtype or (found.num == dtype.num and found.isnative)


def is_readable(given: Any) -> bool:
    """Return whether an object is an array whose elements can be moved without a copy."""
    if type(given) is not _ndarray:
        return False
    flags = given.flags
    return bool(flags.c_contiguous and flags.aligned)
