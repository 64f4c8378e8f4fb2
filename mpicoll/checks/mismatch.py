"""What follows a round whose members differ: each tells all others what it called, and all raise.

The exchange uses messages on the control communicator with tags that nothing else uses there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

import numpy as np
from mpi4py import MPI

from mpicoll.checks.levels import EVERY
from mpicoll.diagnosis.call import Call, Made
from mpicoll.diagnosis.report.entries import Table, entry_of, merge, runs_of, table_of
from mpicoll.diagnosis.report.texts import MESSAGE_WIDTH, mismatch
from mpicoll.errors import CollectiveMismatchError
from mpicoll.runtime.call_site import Site
from mpicoll.transports.base import Request

_T = TypeVar("_T")


def explain(
    comm: MPI.Intracomm, call: Call, group_name: str, ranks: tuple[int, ...], waited: float = 0.0
) -> Generator[Request, None, None]:
    """Tell all members what every member called, and raise: ``call.error`` here, CollectiveMismatchError on the others.

    Args:
        comm: the control communicator of the group.
        call: what this rank called.
        group_name: for the message.
        ranks: global ranks of the members, by rank in the group.
        waited: seconds that this member had posted its round before the last one did.
    """
    call.explaining = True
    me = comm.Get_rank()
    said, closing = call, "No default group was made." if call.op == "init_process_group" else ""
    if call.made or call.closes:
        said, closing = yield from _first_difference(comm, call)
    mine = entry_of(said, ranks[me], waited=waited)
    table = yield from _merge_tables(comm, table_of([mine]))
    wanted = table.missing()
    if wanted is not None:
        again = yield from _merge_tables(comm, table_of([mine] if mine.fingerprint() == wanted else []))
        table = table.with_rows(again)
    if call.error is not None:
        if any(row.problem != mine.problem for row in table.rows) and hasattr(call.error, "add_note"):
            # In one line: the others print what all have called, and here the error says what is wrong.
            told = mismatch(group_name, runs_of(ranks), said.seq, table, closing)
            call.error.add_note(f"{call.name}: {told.one_line()}")
        raise call.error
    report = mismatch(group_name, runs_of(ranks), said.seq, table, closing)
    error = CollectiveMismatchError(report.text(ranks[me], MESSAGE_WIDTH))
    report.put_on(error)
    right = [row.ranks[0][0] for row in table.rows if not row.problem] or [run[0] for run in table.more]
    error.reporter = min(right, default=min(ranks))
    raise error


def _first_difference(comm: MPI.Intracomm, call: Call) -> Generator[Request, None, tuple[Call, str]]:
    """Find the first place where the members' calls since the last comparison differ.

    Not by a collective of MPI: where one member has made a call more than another, their next ones would not fit.

    Returns:
        This member's call there, and what has to be said of the calls that have moved data already; "" if none has.
    """
    mine = np.zeros(2 * (EVERY + 2), np.int64)
    here = len(call.made) + call.closes
    mine[:2] = here, -here
    for i, (_, print_, *_) in enumerate(call.made, 1):
        mine[2 * i : 2 * i + 2] = print_, -print_
    highest = yield from _all_merge(
        comm, mine, np.maximum, np.ndarray.tobytes, lambda told: np.frombuffer(told, np.int64)
    )
    most, least = int(highest[0]), -int(highest[1])
    differ = np.flatnonzero(highest[2::2] != -highest[3::2])
    if not differ.size:
        return call, ""
    at = int(differ[0])
    if most == least == at + 1 and not call.closes:
        return call, ""  # the members differ in the call that compares, and nothing has moved
    said = call
    if at < len(call.made) - (not call.closes):
        made = Made(*call.made[at])
        said = Call(made.op, made.key, Site(made.code, made.instruction), seq=made.seq)
    call.apart = most != least
    closing = f"Compared every {EVERY} calls: what moved since call {said.seq} may be wrong."
    if not call.closes:
        closing += (
            " The ranks are out of step: the group is broken now." if call.apart else " The group can still be used."
        )
    return said, closing


def _merge_tables(comm: MPI.Intracomm, table: Table) -> Generator[Request, None, Table]:
    return _all_merge(comm, table, merge, Table.pack, Table.unpack)


def _all_merge(
    comm: MPI.Intracomm,
    mine: _T,
    merge: Callable[[_T, _T], _T],
    pack: Callable[[_T], bytes],
    unpack: Callable[[bytes], _T],
) -> Generator[Request, None, _T]:
    """Merge what all members pass up a binomial tree, and return the result on all of them.

    One member may be at the next call while another still reads: the messages of a pair come in their order.
    """
    me, size = comm.Get_rank(), comm.Get_size()
    last = comm.Get_attr(MPI.TAG_UB) or 32767  # what MPI gives at least
    up, down = last - 1, last - 2
    said = mine
    bit = 1
    while bit < size and not me & bit:
        if me + bit < size:
            told = _Incoming(comm, me + bit, up)
            yield told
            said = merge(said, unpack(told.message))
        bit *= 2
    if bit < size:
        yield comm.Isend(np.frombuffer(pack(said), np.uint8), me - bit, up)
        told = _Incoming(comm, me - bit, down)
        yield told
        packed = told.message
        said = unpack(packed)
    else:
        packed = pack(said)
    message = np.frombuffer(packed, np.uint8)
    sends = []
    while bit > 1:
        bit //= 2
        if me + bit < size:
            sends.append(comm.Isend(message, me + bit, down))
    yield from sends
    return said


class _Incoming:
    """A message of unknown length from one member (a Request)."""

    __slots__ = ("_buffer", "_comm", "_request", "_source", "_tag")

    def __init__(self, comm: MPI.Intracomm, source: int, tag: int) -> None:
        self._comm = comm
        self._source = source
        self._tag = tag
        self._request: MPI.Request | None = None
        self._buffer = np.empty(0, np.uint8)

    @property
    def message(self) -> bytes:
        return self._buffer.tobytes()

    def Test(self) -> bool:
        if self._request is None:
            status = MPI.Status()
            found = self._comm.Improbe(self._source, self._tag, status)
            if found is None:
                return False
            self._buffer = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            self._request = found.Irecv(self._buffer)
        return self._request.Test()
