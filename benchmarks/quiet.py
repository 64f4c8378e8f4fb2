"""Rounds of a measurement on a machine that others use as well: those in which they used it least are kept.

A round is repeated until enough of them were undisturbed, or the time is up. How much others took is known from the kernel: the
processor time of the whole machine, what a hypervisor took away among it, less that of the ranks themselves. One node only.
``BENCHMARK_SECONDS`` says how long to wait for undisturbed rounds (120 s for each measurement). With 0 a measurement has at most
3 rounds of few calls: a test of a script needs figures, whatever they are. On a busy machine a call may take a millisecond.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["few", "middle", "rounds"]

T = TypeVar("T")

UNDISTURBED = 0.02
"""Share of the machine's processor time that others may take in a round that counts as undisturbed."""
SECONDS = float(os.environ.get("BENCHMARK_SECONDS", "120"))
"""Time after which disturbed rounds are taken, too."""
FEW = 3
TICKS = os.sysconf("SC_CLK_TCK")


def few(calls: int) -> int:
    """Return how many calls a round makes: so many, or a hundredth in a test."""
    return calls if SECONDS else max(1, calls // 100)


def middle(values: Sequence[float], digits: int = 2) -> str:
    """Return the median and, in brackets, the quartiles."""
    low, half, high = statistics.quantiles(values if len(values) > 1 else [*values] * 2, n=4)
    return f"{half:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def rounds(
    comm: Any,
    once: Callable[[], T],
    wanted: int,
    seconds: float = 120.0,
    children: Sequence[int] = (),
    shares: list[float] | None = None,
) -> list[T]:
    """Return what ``wanted`` rounds of ``once`` came to, those that were disturbed least, in their order.

    Called by all ranks of ``comm``, which keep the same rounds. Says on standard error which were kept.

    Args:
        children: processes of the measurement beside the ranks.
        shares: takes the largest share of the machine that others took in a round that is kept.
    """
    wanted = wanted if SECONDS else min(wanted, FEW)
    once()
    found: list[tuple[float, int, T]] = []
    end = time.monotonic() + SECONDS
    going = True
    while going:
        before = _clocks(comm, children)
        value = once()
        busy, ours, whole = (now - then for now, then in zip(_clocks(comm, children), before, strict=True))
        found.append((max(0.0, busy - ours) / max(whole, 1 / TICKS), len(found), value))
        good = sum(share <= UNDISTURBED for share, _, _ in found)
        enough = good >= wanted or (time.monotonic() > end and len(found) >= wanted)
        found, going = _alike(comm, found, not enough)
    kept = sorted(found, key=lambda item: item[0])[:wanted]
    most = max(share for share, _, _ in kept)
    if shares is not None:
        shares.append(most)
    if comm.Get_rank() == 0:
        text = f"# {wanted} of {len(found)} rounds kept, in which others took at most {most:.1%} of the machine"
        print(text, file=sys.stderr, flush=True)
    return [value for _, _, value in sorted(kept, key=lambda item: item[1])]


def _alike(comm: Any, found: list[tuple[float, int, T]], going: bool) -> tuple[list[tuple[float, int, T]], bool]:
    """Give the last round rank 0's share, and return its word on whether to go on."""
    (share, number, value), rest = found[-1], found[:-1]
    share, going = comm.bcast((share, going), 0)
    return [*rest, (share, number, value)], going


def _clocks(comm: Any, children: Sequence[int]) -> tuple[float, float, float]:
    """Return seconds of processor time: of all that ran, of this measurement, and of the whole machine, idle or not."""
    mine = sum(os.times()[:2]) + sum(map(_seconds_of, children))
    ours = comm.allreduce(mine)
    words = (
        Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )  # user nice system idle iowait irq softirq steal
    ticks = [int(word) / TICKS for word in words]
    return sum(ticks) - ticks[3] - ticks[4], ours, sum(ticks)


def _seconds_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS
