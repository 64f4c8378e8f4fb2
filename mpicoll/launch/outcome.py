"""Decide how a job ended: its exit code, and the rank that is named as the first that failed. Pure."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from mpicoll.launch.environment import Family
from mpicoll.launch.job_folder import Record

GRACE = 1.0  # seconds that a job gets to end by itself after a failure, and between asking for its end and killing its processes
LEFT_GRACE = 10.0  # the same for a rank that has left with exit code 0 and without MPI_Finalize
FINALIZE_GRACE = 30.0  # the same for ranks in MPI_Finalize, if the programs of all ranks have ended

GivenUp = Literal["", "after a failure", "in MPI_Finalize"]

_FAILED = ("exit", "fail")
_SIGNALS = {129, 130, 131, 134, 137, 143, 9, 15}


@dataclass(frozen=True)
class Outcome:
    """The job's exit code, and the rank that failed first if it is known.

    Attributes:
        early: a rank that ended without an error before it, which made ``rank`` fail.
        intended: a rank has ended the job by intent, and has printed why.
        left: the process of ``rank`` has ended with exit code 0, and not in an orderly way.
        finalizing: every program had ended without an error, and MPI_Finalize did not return on some ranks.
    """

    code: int
    rank: int | None = None
    early: int | None = None
    intended: bool = False
    left: bool = False
    finalizing: bool = False

    @property
    def text(self) -> str:
        """The outcome in words."""
        if self.finalizing:
            return (
                f"rank {self.rank} has ended, and MPI_Finalize did not return on other ranks within {FINALIZE_GRACE:g} s; ended "
                "the job. Every program had ended without an error. With MPICH a message that no rank has received makes "
                "MPI_Finalize fail"
            )
        if self.left:
            return f"rank {self.rank} ended with exit code 0 and without MPI_Finalize; ended the job: exit code {self.code}"
        if self.early is None:
            return f"rank {self.rank} failed first: {describe(self.code)}"
        return f"rank {self.early} ended first, and rank {self.rank} failed because of it: {describe(self.code)}"


def is_left_in_finalize(records: Sequence[Record], nprocs: int, lives: Callable[[int, int], bool]) -> bool:
    """Return whether the programs of all ranks have ended without an error, and only some processes, with exit code 0.

    MPI_Finalize returns when all ranks have called it. If it fails on a rank, or a rank ends without it, it does not return on
    the other ranks.

    Args:
        nprocs: number of ranks.
        lives: returns whether a process, the first argument, lives as a child of the second: a program that a rank has started
            and waited for is no rank.
    """
    shells = {record.rank: record.value for record in records if record.kind == "start"}
    exits = {record.rank: record.value for record in records if record.kind == "exit"}
    ends = {record.rank: record.value for record in records if record.kind == "end" and record.rank not in exits}
    all_ended = bool(exits and ends) and not any(exits.values()) and exits.keys() | ends.keys() == shells.keys()
    return all_ended and len(shells) == nprocs and all(lives(process, shells[rank]) for rank, process in ends.items())


def time_to_end(records: Sequence[Record], finalizing: bool = False) -> float | None:
    """Return the seconds after which a job with these records is ended if its launcher does not end it; None: the job goes on.

    MPICH 5.0: if a rank dies before MPI_Init, mpiexec leaves the other ranks waiting in MPI_Init without end; with the option
    -disable-auto-cleanup also in any other call, if a rank ends with exit code 0 without MPI_Finalize.

    Args:
        finalizing: as :func:`is_left_in_finalize` returns.
    """
    if any(record.kind == "exit" and record.value for record in records):
        return GRACE
    if any(record.kind == "died" for record in records):
        return LEFT_GRACE
    return FINALIZE_GRACE if finalizing else None


def decide(
    records: Sequence[Record], mpiexec_code: int, family: Family, *, local: bool = True, given_up: GivenUp = ""
) -> Outcome:
    """Return the exit code of the rank that failed first; pure.

    Args:
        given_up: why `mpicoll run` has ended the job, if its launcher did not.

    The first recorded failure counts, with two exceptions. After ``MPI_Abort(7)`` the launcher kills every rank, the caller
    included, and only the launcher knows the 7. This does not apply if a rank that failed later, with its own code, ended the
    job, for example because it lost the killed rank. And if ranks fail because a rank has ended with exit code 0, they record
    this rank first; the launcher kills the others.
    """
    code = 128 - mpiexec_code if mpiexec_code < 0 else mpiexec_code
    if stop := next((record for record in records if record.kind == "stop"), None):
        return Outcome(stop.value, intended=True)
    first = next((record for record in records if record.kind in _FAILED and record.value != 0), None)
    if not local and code != 0:
        return Outcome(code)
    if given_up == "in MPI_Finalize":
        return Outcome(0, next(record.rank for record in records if record.kind == "exit"), finalizing=True)
    died = next((record for record in records if record.kind == "died" and given_up), None)
    if died is not None and Record("exit", died.rank, 0) in records:
        return Outcome(1, died.rank, left=True)
    without = next((record for record in records if record.kind in ("early", "lost")), None)
    if without is not None and (first is None or records.index(without) < records.index(first)):
        # On a busy machine the shell of a killed rank may record its end last.
        own = next((record for record in records if record.kind == "exit" and record.rank == without.rank), None)
        after = records[records.index(without) + 1 :]
        failed = next(
            (record for record in after if record.kind in ("fail", "blame") and record.rank != without.rank), None
        )
        if without.kind == "lost" and own is not None and own.value:
            first = own
        elif failed is not None:
            return Outcome(failed.value, failed.rank, without.rank)
    if first is None:
        return Outcome(code or int(died is not None))
    killed = first.kind == "exit" and first.value in (129, 130, 131, 137, 143)
    # MPICH's mpiexec combines the codes of all ranks by OR; codes of signals only combine to one of _SIGNALS again.
    signals = _SIGNALS if family == "mpich" else {first.value}
    later = {record.value for record in records if record.kind in ("fail", "blame")}
    if killed and code != 0 and code not in signals | later:
        return Outcome(code)
    return Outcome(first.value, first.rank)


def describe(code: int) -> str:
    """Return an exit code in words."""
    if 128 < code < 128 + signal.NSIG:
        try:
            return f"killed by {signal.Signals(code - 128).name} (exit code {code})"
        except ValueError:
            pass
    return f"exit code {code}"
