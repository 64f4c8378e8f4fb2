"""Report the calls of mpicoll that the ranks of a hanging test wait in."""

from __future__ import annotations

import base64
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from mpicoll.diagnosis.report.entries import RankState, Table, merge, runs_of, table_of
from mpicoll.diagnosis.report.texts import calls_now


def account_of(rank: int, size: int) -> dict[str, Any]:
    """Return this process's calls as JSON data; empty if it has no default group. Never raises.

    Args:
        rank, size: of this process in the world of the plugin, which is the world of the job.
    """
    # An import here would wait for a thread that hangs in an import. Without the module the process has made no call.
    job_state = sys.modules.get("mpicoll.diagnosis.job_state")
    try:
        if job_state is None or (known := job_state.current()) is None:
            return {}
        same = (known.world.rank(), known.world.size()) == (rank, size)
        return {"table": base64.b85encode(table_of(job_state.calls_now(rank)).pack()).decode(), "same": same}
    except Exception as error:
        return {"trouble": f"{type(error).__name__}: {error}"}


def lines_of(accounts: Mapping[int, Mapping[str, Any]], silent: Sequence[int]) -> list[str]:
    """Return the report of the calls that the ranks are in, line by line; empty if the library is not used. Never raises.

    Args:
        accounts: the calls of each rank that answered (see :func:`account_of`).
        silent: ranks that did not answer.
    """
    if not any(accounts.values()):
        return []
    try:
        return _lines(accounts, silent)
    except Exception as error:
        return [f"the calls of the ranks cannot be read: {type(error).__name__}: {error}"]


def _lines(accounts: Mapping[int, Mapping[str, Any]], silent: Sequence[int]) -> list[str]:
    table = Table()
    entries = []
    for rank, account in accounts.items():
        ranks = ((rank, rank),)
        if "table" in account:
            table = merge(table, Table.unpack(base64.b85decode(account["table"])))
        elif "trouble" in account:
            entries.append(RankState(ranks, state="silent", problem=f"its calls cannot be read: {account['trouble']}"))
        else:
            entries.append(RankState(ranks, state="late", problem="has no default group"))
    same = all(account.get("same", True) for account in accounts.values())
    for rank in silent:
        # Ranks of this node record where they are, also ranks that do not answer now.
        job_state = sys.modules.get("mpicoll.diagnosis.job_state") if same else None
        seen = job_state.last_seen(rank) if job_state is not None else ""
        entries.append(
            RankState(((rank, rank),), state="silent", problem="does not answer" + (f": {seen}" if seen else ""))
        )
    note = "" if same else "Ranks inside the calls are ranks of the communicator that the default group was made on."
    members = runs_of([*accounts, *silent])
    return calls_now(merge(table, table_of(entries)), members, note).text().splitlines()
