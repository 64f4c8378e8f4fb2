"""The time that is left for the job, from its environment or its batch system."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

ASKED_WITHIN = 10.0
"""Seconds after which a command of the batch system is ended."""

ENDS = ("MPICOLL_JOB_END", "SLURM_JOB_END_TIME")
"""Variables with the end of the job in seconds since 1970; Slurm 22.05 does not set SLURM_JOB_END_TIME yet."""


def duration(text: str) -> float | None:
    """Return the seconds of ``[days-]hours:minutes:seconds``, ``minutes:seconds`` or ``days-hours``; None for other texts."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if found is None:
        return None
    days, *parts = found.groups()
    fields = [int(part) for part in parts if part]
    if days is None and len(fields) == 1:
        return None
    hours, minutes, seconds = [0, *fields][-3:] if days is None else [*fields, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60.0 + seconds


def hours_and_minutes(text: str) -> float | None:
    """Return the seconds of LSF's ``hours:minutes L``; None if there is no limit (``-``)."""
    found = re.match(r"\s*(\d+):(\d+)", text)
    return int(found[1]) * 3600.0 + int(found[2]) * 60.0 if found is not None else None


def qstat_left(text: str, now: float) -> float | None:
    """Return the seconds left from the output of PBS's ``qstat -f`` for a job; ``now``: seconds since 1970."""
    fields = dict(re.findall(r"^\s*([\w.]+) = (.*?)\s*$", text, re.MULTILINE))
    limit = duration(fields.get("Resource_List.walltime", ""))
    if limit is None:
        return None
    try:
        used = now - datetime.strptime(fields["stime"], "%a %b %d %H:%M:%S %Y").timestamp()
    except (KeyError, ValueError):
        used = duration(fields.get("resources_used.walltime", "")) or 0.0
    return limit - used


def _answer(command: Sequence[str]) -> str:
    """Return the output of a command of the batch system; "" if the command is missing or fails."""
    try:
        nothing = subprocess.DEVNULL
        return subprocess.check_output(command, stdin=nothing, stderr=nothing, text=True, timeout=ASKED_WITHIN)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""


class Clock:
    """The end of the job. The batch system is asked once; afterwards the clock of this process counts."""

    def __init__(
        self, environ: Mapping[str, str] | None = None, answer: Callable[[Sequence[str]], str] = _answer
    ) -> None:
        self._environ = os.environ if environ is None else environ
        self._answer = answer
        self._asked = False
        self._until: float | None = None  # time.monotonic

    def left(self, *, ask: bool) -> float | None:
        """Return the seconds left, or None if they are not known.

        Args:
            ask: whether to ask the batch system if no variable is set.
        """
        for name in ENDS:
            try:
                end = float(self._environ.get(name, ""))
            except ValueError:
                continue
            if end > 0:
                return end - time.time()
        if ask and not self._asked:
            self._asked = True
            left = self._ask()
            self._until = None if left is None else time.monotonic() + left
        return None if self._until is None else self._until - time.monotonic()

    def _ask(self) -> float | None:
        get = self._environ.get
        if job := get("SLURM_JOB_ID"):
            # In a job array one task has the id of the whole array, and squeue lists all tasks for this id.
            lines = (line.split() for line in self._answer(["squeue", "-h", "-j", job, "-o", "%A %L"]).splitlines())
            return next((duration(line[1]) for line in lines if line[:1] == [job] and len(line) == 2), None)
        if job := get("PBS_JOBID"):
            return qstat_left(self._answer(["qstat", "-f", job]), time.time())
        if job := get("LSB_JOBID"):
            return hours_and_minutes(self._answer(["bjobs", "-noheader", "-o", "time_left", job]))
        return None


clock = Clock()


def time_left() -> float | None:
    """Return the seconds until the time limit of the job, or None if no limit is known.

    Not a collective: each rank may call this function at any time, also before ``init_process_group``. The function reads
    ``MPICOLL_JOB_END`` or ``SLURM_JOB_END_TIME`` (seconds since 1970) if the variable is set. Otherwise the first call of a
    process asks the batch system (Slurm's ``squeue``, PBS's ``qstat``, LSF's ``bjobs``). That takes some milliseconds, or up to
    10 s if the batch system is busy; later calls read the clock. So in a large job call the function on one rank only, or set
    the variable in the batch script.

    The clocks of ranks differ: for a decision that must be the same on all ranks use ``should_stop(before=seconds)``.

    Source: squeue(1), format %L; LSF's bjobs, field time_left.
    """
    return clock.left(ask=True)
