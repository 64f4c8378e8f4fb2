"""The line ``next:`` of a report: what the reader can do, chosen from what differs. Pure.

``docs/messages.md`` lists the messages of this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mpicoll.diagnosis.report.entries import Plural, RankState, Runs, count, join, name_runs
from mpicoll.errors import CAUSED_BY, Message

_WIDTH = 40
_SENDS = ("send", "isend", "send_object_list")

FREE_MEMORY = Message(
    "free memory on {ranks}, or make the call with less data; nothing is wrong with the calls of the other ranks",
    "Ranks lack the memory for the call.",
)
FIND_GPU_ERROR = Message(
    "find what failed on the GPU of {ranks} before this call (CUDA_LAUNCH_BLOCKING=1 shows where); CUDA works there again "
    "only in a new process",
    "The GPU of some ranks had failed before the call.",
)
CORRECT_ARGUMENTS = Message(
    "correct the arguments on {ranks}; nothing is wrong with the calls of the other ranks",
    "Ranks passed arguments that the call refuses.",
)
CORRECT_AND_COMPARE = Message(
    "correct the arguments on {ranks}; the calls of the other ranks differ, too: make them alike",
    "Ranks passed arguments that the call refuses, and other ranks made different calls.",
)
CORRECT_FIRST = Message(
    "correct the arguments on {ranks}: the call raises there when the other ranks have made it",
    "A wait that does not end: a rank made the call with arguments that it refused.",
)
ANOTHER_ERROR = Message(
    "; the error on {ranks} is another one",
    "Follows the message before if another rank has failed with an error of its own.",
)
SAME_SPLITS = Message(
    "make what the sender sends and what the receiver expects alike: for each pair of ranks, input_split_sizes and "
    "output_split_sizes, or the arrays of both lists; either may be wrong",
    "Blocks of all_to_all do not fit.",
)
COMPARE = Message("compare the lines above", "The calls differ in a way that cannot be named.")
DIFFERENT_FUNCTIONS = Message(
    "the ranks are not at the same call: look for a call that only some ranks make (a condition on the rank, loops of "
    "other lengths) or make in another order, at or before these lines",
    "Ranks call different functions.",
)
SKIPPED = Message(
    "if the arguments are intended, {ranks} skipped or repeated a call before; else ",
    "Precedes one of the following, if the calls that differ are in different lines of the program.",
)
IN_A_LOOP = Message(
    "; if the arguments are intended, {ranks} skipped or repeated a call before",
    "Follows one of the following, if one line makes the calls that differ, and is not at its first call.",
)
HANDLED_BEFORE = Message(
    "correct the error that {ranks} {n:was/were} handling; or, if that is intended, ",
    "Precedes one of the others, if ranks made their calls in an `except` or a `finally` block.",
)
MAKE_ALIKE = Message("make these parts alike on all ranks: {parts}", "The calls differ in several parts.")
SAME_DTYPE = Message("pass the same dtype on all ranks", "The dtypes differ, and no dtype has most ranks.")
CAST = Message("cast the array to {dtype} before the call on {ranks}", "Some ranks pass another dtype.")
SAME_PART = Message(
    "pass the same {part} on all ranks", "The calls differ in one part that none of the following names."
)
SAME_OP = Message("pass the same reduction on all ranks", "The reductions differ.")
SAME_ROOT = Message("pass the same root (src=, dst=: a global rank) on all ranks", "The roots differ.")
SAME_COUNT = Message(
    "pass the same number of elements on all ranks: pad, or use a call that takes blocks of different sizes",
    "The numbers of elements differ.",
)
SAME_BLOCKS = Message(
    "pass lists with the same sizes in the same order on all ranks", "Sizes in lists of blocks differ."
)
SAME_OBJECTS = Message("pass lists of the same length on all ranks", "Lengths of lists of objects differ.")
SAME_RANKS = Message(
    "list the same ranks on all ranks: all ranks call new_group for every group, in the same order",
    "The lists of ranks of `new_group` differ.",
)
SAME_LAYOUT = Message(
    "pass arrays of the same shapes and dtypes in the same order on all ranks",
    "The arrays of a call on several arrays differ.",
)
SAME_CHECK = Message(
    "give all ranks the same check level: check=, or MPICOLL_CHECK in the environment of all ranks",
    "The check levels differ.",
)
SAME_ON_FAILURE = Message("pass the same on_failure= on all ranks", "The values of `on_failure=` differ.")
SAME_NAME = Message(
    "the ranks are at differently named calls: look for a call that only some ranks make",
    "The values of `name=` differ.",
)
OTHER_TAG = Message(
    "a message has arrived with a tag that {ranks} {n:does/do} not wait for: if it is the expected message, pass the same tag= "
    "to its send and its receive; else ",
    "Precedes one of the others, if a rank waits for a message, and a message with another tag has arrived from a rank that it "
    "waits for.",
)
OTHER_GROUP = Message(
    "a message with this tag has arrived on another group: if it is the expected message, pass the same group= to its send "
    "and its receive; else ",
    "Precedes one of the others, if a rank waits for a message, and one with the same tag has arrived on another group.",
)
OTHER_SOURCE = Message(
    "; or a receive names another rank than the sender: a message with its tag has arrived on {ranks} from another rank",
    "Follows one of the others, if a rank waits for a message of one rank, and one with the same tag has arrived from another.",
)
MAKE_IT_THERE = Message(
    "{ranks} ended without a call that other ranks wait for: make this call on {ranks}, or remove the waiting calls",
    "A deadlock: the call that ranks wait in needs a rank that has ended.",
)
ORDER_OF_GROUPS = Message(
    "call the groups' collectives in the same order on all ranks that are in several of them",
    "A deadlock of collectives on several groups.",
)
ORDER_OF_CALLS = Message(
    "make the same collectives in the same order on all members of the group",
    "A deadlock of collectives on one group.",
)
SEND_BEFORE = Message(
    "some ranks wait in a collective and other ranks wait for a message: send the message before the collective, or receive "
    "it after the collective; or a rank left a loop early, or skipped a call or a send",
    "A deadlock of collectives and messages.",
)
NO_RANK_SENDS = Message(
    "no rank sends the message that {ranks} {n:waits/wait} for: send it before its sender waits or ends, or remove the receive",
    "A deadlock: a receive from any rank, and ranks have ended.",
)
ONE_SENDS_FIRST = Message(
    "every rank waits for a message and no rank sends: let one rank send first",
    "A deadlock of receives, one of them from any rank.",
)
RECEIVE_FIRST = Message(
    "a large send ends when its message is received: start irecv first, or exchange with batch_isend_irecv",
    "A deadlock of sends.",
)
ALL_RECEIVE = Message(
    "all ranks receive first: send first on some ranks (even ranks, for example), start irecv before send, or use "
    "batch_isend_irecv",
    "A deadlock of receives.",
)
NONE_SENDS = Message(
    "all ranks wait for messages that no rank has sent: look for a send that is missing, comes later, or has another rank or tag",
    "A deadlock of receives that were started with irecv or batch_isend_irecv.",
)
OBJECTS_IN_TURN = Message(
    "a send of large objects ends when they are received: send first on some ranks (even ranks, for example), and receive first "
    "on the other ranks",
    "A deadlock of sends or receives of objects.",
)
NAME_EACH_OTHER = Message(
    "a send and its receive must name each other's rank and the same tag: compare the rows",
    "A deadlock of sends and receives.",
)
READ_OTHERS = Message(
    "read what ranks far from this rank print: they ask other ranks for late members",
    "A time limit: no rank that was asked is late, and some were not asked.",
)
OWN_GPU = Message(
    "this rank waits for its GPU: kernels that were put on the stream before the call have not ended",
    "A time limit: no rank is late, but the stream of this rank's GPU has not reached the call.",
)
OTHER_GPU = Message(
    "the transfer does not end: check whether the GPU of another rank is behind, a rank is stopped, or the network is down",
    "A time limit: no rank is late, and the arrays are on GPUs.",
)
TRANSFER = Message(
    "the transfer does not end: check whether a rank is stopped, or the network is down",
    "A time limit: no rank is late.",
)
IS_STOPPED = Message(
    "the transfer does not end: check whether {ranks} {n:is/are} stopped (ps: state T)",
    "A time limit: no rank is late, and ranks that made the call do not answer.",
)
COMPUTES = Message(
    "call wait() or is_completed() of the started call earlier on {ranks}, or set MPICOLL_PROGRESS=thread; if {ranks} "
    "{n:is/are} only slow, increase the limit: timeout= or MPICOLL_TIMEOUT",
    "A time limit: ranks that started the call compute, and do not progress the call.",
)
WHY_ELSEWHERE = Message(
    "find why {ranks} {n:is/are} elsewhere: for example at a call that only some ranks make, or after a skipped call",
    "A time limit: the late ranks are in other calls, or in none.",
)
WHAT_DOES = Message(
    "find what {ranks} {n:does/do} (py-spy dump, logs); if {n:this rank is/these ranks are} only slow, increase the limit: "
    "timeout= or MPICOLL_TIMEOUT",
    "A time limit: the late ranks do not answer.",
)
WHY_ENDED = Message(
    "find why {ranks} ended before this call: an early return, a shorter loop, or a call that only other ranks make",
    "Ranks ended without the call.",
)
COMPARE_CALLS = Message(
    "the error on {ranks} is about the calls of several ranks: compare these, any of them may be wrong",
    "Ranks failed with an error between ranks, such as CollectiveMismatchError or CollectiveTimeoutError.",
)
CAUSE_IS_THERE = Message(
    "the cause is the error on {ranks}; this rank did nothing wrong",
    "Ranks failed with an error of their own, or were killed.",
)

_OF_TURNS = frozenset({"dtype", "elements", "blocks", "layout", "objects", "root"})
"""Parts of a call that differ if a rank is at another turn of a loop."""

BETWEEN_RANKS = (
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "DeadlockError",
    "GroupBrokenError",
    "PeerExitedError",
)
"""Errors that another rank may have caused, also the rank that learns of the failure."""

_BY_PART = {
    "op": SAME_OP,
    "root": SAME_ROOT,
    "elements": SAME_COUNT,
    "blocks": SAME_BLOCKS,
    "objects": SAME_OBJECTS,
    "ranks": SAME_RANKS,
    "layout": SAME_LAYOUT,
    "check": SAME_CHECK,
    "on_failure": SAME_ON_FAILURE,
    "name": SAME_NAME,
}


def after_mismatch(
    expected: RankState | None, rows: Sequence[RankState], differs: Sequence[frozenset[str]], odd: Runs
) -> str:
    """Return what to do about different calls.

    Args:
        expected: the call that the rows are compared with.
        rows, differs: the other calls, and for each the names of the parts in which it differs.
        odd: the ranks that made the other calls; empty if it is not known which ranks are wrong.
    """
    ranks = name_runs(odd, _WIDTH) if odd else "the ranks"
    lacking = {row.lacks for row in rows if row.problem}
    if lacking and all(row.problem.startswith(BETWEEN_RANKS) for row in rows if row.problem):
        return COMPARE_CALLS(ranks=ranks)
    if lacking:
        message = {"memory": FREE_MEMORY, "GPU": FIND_GPU_ERROR}.get(next(iter(lacking)), CORRECT_ARGUMENTS)
        if len(lacking) > 1:
            message = CORRECT_ARGUMENTS
        if message is CORRECT_ARGUMENTS and not all(row.problem for row in rows):
            ranks, message = (
                name_runs(join(run for row in rows if row.problem for run in row.ranks), _WIDTH),
                CORRECT_AND_COMPARE,
            )
        return message(ranks=ranks)
    if expected is None or not rows:
        return COMPARE.text
    names = frozenset().union(*differs)
    if "function" in names:
        return _handled((expected, *rows)) + DIFFERENT_FUNCTIONS.text
    elsewhere = len({(row.site, row.called_from) for row in (expected, *rows)}) > 1
    first = SKIPPED(ranks=ranks) if elsewhere else ""
    turns = not elsewhere and (expected.seq > 1 or names == {"root"}) and names <= _OF_TURNS and names != {"dtype"}
    last = IN_A_LOOP(ranks=ranks if odd else "a rank") if turns else ""
    if len(names) > 1:
        return first + MAKE_ALIKE(parts=", ".join(sorted(name or "options" for name in names))) + last
    name = next(iter(names), "")
    dtype = dict(expected.key).get("dtype", "")
    if name == "dtype" and not dtype.startswith(("[", "{")):  # structured arrays cannot be cast
        return first + (CAST(ranks=ranks, dtype=dtype) if odd else SAME_DTYPE.text) + last
    return first + _BY_PART.get(name, SAME_PART)(part=name or "options", ranks=ranks) + last


def after_arrival(differs: Mapping[str, Runs], otherwise: str) -> str:
    """Return what to do about messages that have arrived, and that no receive takes, followed by ``otherwise``.

    Args:
        differs: the receivers, under "tag" if the tag of a message is not that of a receive, under "group" if a message was
            sent on another group, under "source" if it comes from another rank.
    """
    ranks = differs.get("tag", ())
    tag = OTHER_TAG(ranks=name_runs(ranks, _WIDTH), n=Plural(count(ranks))) if ranks else ""
    source = OTHER_SOURCE(ranks=name_runs(differs["source"], _WIDTH)) if "source" in differs else ""
    return (OTHER_GROUP.text if "group" in differs else "") + tag + otherwise + source


def after_deadlock(waits: Sequence[RankState], gone: Runs) -> str:
    """Return what to do about ranks that wait for each other, or for ranks that have ended."""
    entries = [entry for entry in waits if entry.state == "waits"]
    point_to_point = [entry for entry in entries if entry.peer is not None]
    anyone = join(run for entry in entries if entry.peer == -1 for run in entry.ranks)
    refused = _refused(entries)
    if refused:
        return refused
    if gone and anyone:
        return NO_RANK_SENDS(ranks=name_runs(anyone, _WIDTH), n=Plural(count(anyone)))
    if gone:
        return MAKE_IT_THERE(ranks=name_runs(gone, _WIDTH))
    handled = _handled(entries)
    if not point_to_point:
        return handled + (ORDER_OF_GROUPS if len({entry.group for entry in entries}) > 1 else ORDER_OF_CALLS).text
    if len(point_to_point) < len(entries):
        return handled + SEND_BEFORE.text
    sends = [entry.op in _SENDS for entry in entries]
    if anyone and not any(sends):
        return ONE_SENDS_FIRST.text
    if any(sends) and not all(sends):
        return NAME_EACH_OTHER.text
    if any("object" in entry.op for entry in entries):
        return OBJECTS_IN_TURN.text
    if any(sends):
        return RECEIVE_FIRST.text
    return (NONE_SENDS if all(entry.op == "irecv" for entry in entries) else ALL_RECEIVE).text


def after_time_limit(rows: Iterable[RankState], late: Runs, unasked: int = 0, behind: bool | None = None) -> str:
    """Return what to do about ranks that are late.

    Args:
        rows: the states of the ranks.
        late: the ranks that are late.
        unasked: how many ranks were not asked; these ranks may be late, too.
        behind: whether this rank's GPU has not reached the call yet; None if its arrays are on the host.
    """
    rows = [*rows]
    refused = _refused(rows)
    if refused:
        return refused
    if not late:
        if unasked:
            return READ_OTHERS.text
        unheard = join(run for row in rows if row.state == "unheard" for run in row.ranks)
        computing = join(run for row in rows if row.state == "unheard" and row.problem for run in row.ranks)
        if computing:
            return COMPUTES(ranks=name_runs(computing, _WIDTH), n=Plural(count(computing)))
        if unheard:
            return IS_STOPPED(ranks=name_runs(unheard, _WIDTH), n=Plural(count(unheard)))
        return (TRANSFER if behind is None else OWN_GPU if behind else OTHER_GPU).text
    elsewhere = join(run for row in rows if row.state == "late" for run in row.ranks)
    message, ranks = (WHY_ELSEWHERE, elsewhere) if elsewhere else (WHAT_DOES, late)
    return message(ranks=name_runs(ranks, _WIDTH), n=Plural(count(ranks)))


def _handled(rows: Iterable[RankState]) -> str:
    """Return what to do about ranks that handle an exception; "" if they are more than the ranks that handle none."""
    rows = [*rows]
    ranks = join(run for row in rows if row.handling for run in row.ranks)
    usual = 2 * count(ranks) > count(join(run for row in rows for run in row.ranks))
    return "" if usual or not ranks else HANDLED_BEFORE(ranks=name_runs(ranks, _WIDTH), n=Plural(count(ranks)))


def _refused(rows: Iterable[RankState]) -> str:
    """Return what to do about waiting ranks that have refused the arguments of their calls; "" if there are none."""
    ranks = join(run for row in rows if row.state == "waits" and row.problem for run in row.ranks)
    return CORRECT_FIRST(ranks=name_runs(ranks, _WIDTH)) if ranks else ""


def after_exit(rows: Iterable[RankState], gone: Runs) -> str:
    """Return what to do about ranks that ended early; ``rows``: the states of the ranks."""
    refused = _refused(rows)
    return (f"{refused}; " if refused else "") + WHY_ENDED(ranks=name_runs(gone, _WIDTH))


def after_failure(rows: Iterable[RankState], gone: Runs, problem: str = "") -> str:
    """Return what to do about ranks that failed, the first with ``problem``; ``rows``: the states of the ranks."""
    refused = _refused(rows)
    if refused:
        return refused + ANOTHER_ERROR(ranks=name_runs(gone, _WIDTH))
    _, _, cause = problem.partition(CAUSED_BY)
    between = problem.startswith(BETWEEN_RANKS) or cause.startswith(BETWEEN_RANKS)
    return (COMPARE_CALLS if between else CAUSE_IS_THERE)(ranks=name_runs(gone, _WIDTH))
