"""Explain a mismatch after a round whose members differ: exchange the calls of all members, and raise on all.

The exchange uses messages on the control communicator (:mod:`mpicoll.transports.mpi.exchange`).
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import numpy as np

from mpicoll.checks.levels import EVERY
from mpicoll.diagnosis.call import CallDescription, Made
from mpicoll.diagnosis.report.entries import Table, entry_of, merge, name_runs, runs_of, table_of
from mpicoll.diagnosis.report.texts import PENDING_CALLS, blocks_differ, mismatch
from mpicoll.errors import CollectiveMismatchError
from mpicoll.runtime.call_site import CallSite
from mpicoll.runtime.waiting import Condition, Pollable
from mpicoll.transports.mpi.exchange import merge_all

GRACE = 0.05
"""Seconds that an exchange waits for the program to wait for its asynchronous call, or to make its next call of the group."""


def explain(
    comm: Any,
    call: CallDescription,
    group_name: str,
    ranks: tuple[int, ...],
    waited: float = 0.0,
    blocks: str | None = None,
) -> Generator[Pollable, None, None]:
    """Exchange the calls of all members, and raise: ``call.error`` if this rank has one, otherwise CollectiveMismatchError.

    Args:
        comm: the control communicator of the group.
        call: the call of this rank.
        group_name: for the message.
        ranks: global ranks of the members, by rank in the group.
        waited: seconds from this member's post of the round to the post of the last member.
        blocks: which blocks of this member do not fit those of other members; None if the calls themselves differ.
    """
    call.explaining = True
    if call.issuer is not None and not call.issuer.is_settled():
        issuer, end = call.issuer, time.monotonic() + GRACE
        # The program may be about to wait for a call that it has just started.
        yield Condition(lambda: issuer.is_settled() or time.monotonic() > end)
    me = comm.Get_rank()
    compared, closing = call, "No default group was made." if call.op == "init_process_group" else ""
    if call.made or call.closes:
        compared, closing = yield from _first_difference(comm, call)
    mine = entry_of(compared, ranks[me], waited=waited)
    if blocks is not None:
        mine = replace(mine, problem=blocks)
    alone = call.issuer is None or call.issuer.hold_back()
    table = yield from _merge_tables(comm, table_of([mine], () if alone else mine.ranks))
    wanted = table.missing()
    if wanted is not None:
        again = yield from _merge_tables(comm, table_of([mine] if mine.fingerprint() == wanted else []))
        table = table.with_rows(again)
    if table.pending and not call.closes:
        closing = PENDING_CALLS(ranks=name_runs(table.pending))
        call.breaks = (
            f"asynchronous calls of it were pending when the calls of its ranks differed (call {call.seq}, on this rank "
            f"{call.name} at {call.site}: its CollectiveMismatchError has the report)"
        )
    if call.error is not None:
        if any(row.problem != mine.problem for row in table.rows) and hasattr(call.error, "add_note"):
            # In one line: this error says what is wrong, and other members print the whole report.
            report = mismatch(group_name, runs_of(ranks), compared.seq, table, closing)
            call.error.add_note(f"{call.name}: {report.one_line()}")
        raise call.error
    report = (mismatch if blocks is None else blocks_differ)(group_name, runs_of(ranks), compared.seq, table, closing)
    error = report.as_error(CollectiveMismatchError, ranks[me])
    right = [row.ranks[0][0] for row in table.rows if not row.problem] or [run[0] for run in table.more]
    error.reporter = min(right, default=min(ranks))
    raise error


def _first_difference(comm: Any, call: CallDescription) -> Generator[Pollable, None, tuple[CallDescription, str]]:
    """Find the first difference of the members' calls since the last comparison.

    The exchange is no collective of MPI: if a member has made one call more than another member, their next calls do not match.

    Returns:
        The call of this member at that place, and a sentence on the calls that have moved data already; "" if no call has.
    """
    mine = np.zeros(2 * (EVERY + 2), np.int64)
    here = len(call.made) + call.closes
    mine[:2] = here, -here
    for i, (_, print_, *_) in enumerate(call.made, 1):
        mine[2 * i : 2 * i + 2] = print_, -print_
    highest = yield from merge_all(
        comm, mine, np.maximum, np.ndarray.tobytes, lambda packed: np.frombuffer(packed, np.int64)
    )
    most, least = int(highest[0]), -int(highest[1])
    differ = np.flatnonzero(highest[2::2] != -highest[3::2])
    if not differ.size:
        return call, ""
    at = int(differ[0])
    if most == least == at + 1 and not call.closes:
        return call, ""  # the members differ in the call of this comparison, and nothing has moved
    found = call
    if at < len(call.made) - (not call.closes):
        made = Made(*call.made[at])
        found = CallDescription(made.op, made.key, CallSite(made.code, made.instruction), seq=made.seq)
    call.breaks = "its ranks made unequal numbers of calls" if most != least else ""
    closing = f"Calls are compared every {EVERY} calls: data moved since call {found.seq} may be wrong."
    if not call.closes:
        closing += (
            " The ranks made unequal numbers of calls: the group is broken now."
            if call.breaks
            else " The group can still be used."
        )
    return found, closing


def _merge_tables(comm: Any, table: Table) -> Generator[Pollable, None, Table]:
    return merge_all(comm, table, merge, Table.pack, Table.unpack)
