"""The last line of a report: what the reader can do next, from what differs. Plain sentences, no effects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mpicoll.diagnosis.report.entries import Entry, Runs, count, join, name_runs

_WIDTH = 40
_SENDS = ("send", "isend")


def after_mismatch(expected: Entry | None, rows: Sequence[Entry], differs: Sequence[frozenset[str]], odd: Runs) -> str:
    """Return what to do about different calls.

    Args:
        expected: what the rows are compared with.
        rows, differs: the other calls, and the names of the parts in which each differs.
        odd: the ranks that made them; empty where it cannot be said who is wrong.
    """
    who = name_runs(odd, _WIDTH) if odd else "the ranks"
    lacking = {row.lacks for row in rows if row.problem}
    if lacking == {"memory"}:
        return f"free memory on {who}, or make the call with less data; nothing is wrong with the calls of the others"
    if lacking == {"GPU"}:
        return (
            f"find what failed on the GPU of {who} before this call (CUDA_LAUNCH_BLOCKING=1 shows where); CUDA works there again "
            "in a new process alone"
        )
    if lacking:
        return f"correct the arguments on {who}; nothing is wrong with the calls of the others"
    if expected is None or not rows:
        return "compare the lines above"
    names = frozenset().union(*differs)
    if "function" in names:
        return (
            "the ranks are not at the same call: look for one that only some ranks make (a condition on the rank, loops of "
            "other lengths) or make in another order, at or before these lines"
        )
    apart = len({row.site for row in (expected, *rows)}) > 1
    first = f"if the arguments are meant so, {who} skipped or repeated a call before; else " if apart else ""
    if len(names) > 1:
        words = ", ".join(sorted(name or "options" for name in names))
        return first + f"make these alike on all ranks: {words}"
    name = next(iter(names), "")
    wanted = dict(expected.key).get("dtype", "")
    if name == "dtype" and not wanted.startswith(("[", "{")):  # nobody casts structured arrays
        if not odd:
            return first + "pass the same dtype on all ranks"
        return first + f"cast before the call on {who}: x = x.astype({wanted!r})"
    return first + _ALIKE.get(name, f"pass the same {name or 'options'} on all ranks")


_ALIKE = {
    "op": "pass the same reduction on all ranks",
    "root": "pass the same root (src=, dst=: a global rank) on all ranks",
    "elements": "pass as many elements on every rank: pad, or use a call that takes blocks of different sizes",
    "blocks": "pass lists with the same sizes in the same order on all ranks",
    "objects": "pass lists of the same length on all ranks",
    "ranks": "list the same ranks on all ranks: all ranks call new_group for every group, in the same order",
    "layout": "pass arrays of the same shapes and dtypes in the same order on all ranks",
    "check": "give all ranks the same check level: check=, or MPICOLL_CHECK in the environment of all",
    "on_failure": "pass the same on_failure= on all ranks",
    "name": "the ranks are at differently named calls: look for one that only some ranks make",
}


def after_deadlock(waits: Sequence[Entry], gone: Runs, unasked: bool = False) -> str:
    """Return what to do about ranks that wait for each other, or for ranks that are gone.

    Args:
        unasked: a message has come from a rank that one is waited for of, with a tag that nobody waits for.
    """
    entries = [entry for entry in waits if entry.state == "waits"]
    if unasked:
        return (
            "a message has come with another tag than is waited for: if it is the one, pass the same tag= to its send and "
            "its receive"
        )
    if gone:
        return f"{name_runs(gone, _WIDTH)} ended without the call that is waited for: make it there too, or leave it out here"
    point_to_point = [entry for entry in entries if entry.peer is not None]
    if not point_to_point:
        if len({entry.group for entry in entries}) > 1:
            return "call the groups' collectives in the same order on all ranks that are in several of them"
        return "make the same collectives in the same order on all members of the group"
    if len(point_to_point) < len(entries):
        return (
            "some ranks wait in a collective while others wait for a message: the message must be sent before, or the "
            "receive come after"
        )
    if any(entry.peer == -1 for entry in entries):
        return "every rank waits for a message and none is on its way: let one of them send first"
    if all(entry.op in _SENDS for entry in entries):
        return "large sends end when they are received: start irecv first, or exchange with batch_isend_irecv"
    if not any(entry.op in _SENDS for entry in entries):
        return (
            "all receive first: send first on some of the ranks (even ones, say), start irecv before send, or use "
            "batch_isend_irecv"
        )
    return "a send and its receive must name each other's rank and the same tag: compare the rows"


def after_time_limit(rows: Iterable[Entry], late: Runs, unasked: int = 0, behind: bool | None = None) -> str:
    """Return what to do about ranks that are late, where ``unasked`` others may be late as well.

    ``behind``: whether this rank's GPU has not come to the call yet; None where its arrays are on the host.
    """
    if unasked and not late:
        return "see what ranks far from this one print: they ask others who is late"
    if not late and behind:
        return "this rank waits for its GPU: kernels that were put on the stream before the call have not ended"
    if not late and behind is not None:
        return (
            "the transfer itself does not end: is the GPU of another rank behind, a rank stopped, or the network down?"
        )
    if not late:
        return "the transfer itself does not end: is a rank stopped, or the network down?"
    elsewhere = join(run for row in rows if row.state == "late" for run in row.ranks)
    if elsewhere:
        is_ = "is" if count(elsewhere) == 1 else "are"
        return f"see why {name_runs(elsewhere, _WIDTH)} {is_} elsewhere: a call that only some ranks make, or skip?"
    does, it = ("does", "it is") if count(late) == 1 else ("do", "they are")
    return (
        f"see what {name_runs(late, _WIDTH)} {does} (py-spy dump, its log); if {it} only slow, raise the limit: timeout= "
        "or MPICOLL_TIMEOUT"
    )


def after_exit(gone: Runs) -> str:
    """Return what to do about ranks that ended early."""
    return (
        f"see why {name_runs(gone, _WIDTH)} ended before this call: an early return, a shorter loop, or a call that only "
        "the others make"
    )


def after_failure(gone: Runs) -> str:
    """Return what to do about ranks that failed."""
    return f"the cause is the error on {name_runs(gone, _WIDTH)}; this rank did nothing wrong"
