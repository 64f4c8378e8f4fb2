"""Measure how long a cache line takes from one rank's core to another's, and label windows of a measurement by it.

Two cores of a virtual machine can share a cache or not, and that changes by the second. So the ranks pass a word of shared
memory around before and after a window. The latency of one handover is what remains without the time of the Python lines, which
each rank measures with a word of its own. A window is *near* if both latencies are below a boundary, *far* if both are above, and
dropped if they differ or if one is above ``DISTURBED``: then a rank has lost its core.

The boundary is the place between 150 and 400 ns with the fewest latencies of the run beside it. On a virtual machine with two
cores of a Xeon (model 207) near handovers take 62 to 147 ns (5 % and 95 % of 13,440; the median is 103 ns).
"""

from __future__ import annotations

import math
import mmap
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

__all__ = ["LABELS", "Probe", "boundary_of", "label_of"]

LABELS = ("near", "far")
CHUNKS, ROUNDS = 9, 20
"""A latency is the median of so many chunks of so many rounds."""
NEAREST, FARTHEST, DISTURBED = 150.0, 400.0, 1000.0
"""Nanoseconds: the boundary is between the first two."""


def ring(words: Any, rank: int, size: int, start: int, rounds: int, crowded: bool) -> int:
    """Pass the first word around the ranks, each of which adds 1, and return the nanoseconds."""
    begun = time.perf_counter_ns()
    for number in range(start + rank, start + rank + rounds * size, size):
        while words[0] != number:
            if crowded:
                os.sched_yield()
        words[0] = number + 1
    return time.perf_counter_ns() - begun


class Probe:
    """Measure latencies, called by all ranks of a node, which leave a measurement at the same time.

    Args:
        path: A file of one page of zeros that all ranks map.
    """

    def __init__(self, path: str, rank: int, size: int) -> None:
        with open(path, "r+b") as file:
            self._words: Any = memoryview(mmap.mmap(file.fileno(), mmap.PAGESIZE)).cast("q")
        self._rank, self._size, self._start = rank, size, 0
        self.crowded = size > len(os.sched_getaffinity(0))

    def latency(self) -> float:
        """Return the nanoseconds of one handover."""
        own, handovers, chunks = memoryview(bytearray(8)).cast("q"), self._size * ROUNDS, []
        lines = statistics.median(ring(own, 0, 1, each * handovers, handovers, False) for each in range(CHUNKS))
        for _ in range(1 if self.crowded else CHUNKS):
            chunks.append(ring(self._words, self._rank, self._size, self._start, ROUNDS, self.crowded))
            self._start += handovers
        return float(statistics.median(chunks) - lines) / handovers


def boundary_of(latencies: Sequence[float]) -> float:
    """Return the place with the fewest latencies within 15 %; of several such places the most central one."""
    steps, centre = 50, math.sqrt(NEAREST * FARTHEST)

    def crowd(place: float) -> tuple[int, float]:
        return sum(place / 1.15 < each < place * 1.15 for each in latencies), abs(math.log(place / centre))

    places = [NEAREST * math.pow(FARTHEST / NEAREST, step / steps) for step in range(steps + 1)]
    return min(places, key=crowd)


def label_of(before: float, after: float, boundary: float) -> str:
    """Return the label of a window, or "" if the window is to be dropped."""
    low, high = sorted((before, after))
    if high > DISTURBED or low < boundary <= high:
        return ""
    return "near" if high < boundary else "far"
