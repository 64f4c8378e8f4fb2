"""What a rank says it calls: fingerprints, places, and names of ranks."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from typing import Any

from mpicoll.diagnosis.call import CallDescription, fingerprint
from mpicoll.diagnosis.report.entries import compress_ranks, name_ranks
from mpicoll.runtime.call_site import CallSite, call_site

KEY = ("ReduceOp.SUM", "float64", ("elements", 1000), ("blocks", (1, 2, 3)))


def place() -> CallSite:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return CallSite(frame.f_back.f_code, frame.f_back.f_lasti)


def test_fingerprints_are_the_same_in_every_process() -> None:
    """The fingerprint of a call does not depend on the hash seed of a process."""
    program = f"from mpicoll.diagnosis.call import fingerprint; print(fingerprint('all_reduce', {KEY!r}))"
    prints = {str(fingerprint("all_reduce", KEY))}
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        prints.add(done.stdout.strip())
    assert len(prints) == 1


def test_fingerprints_tell_calls_apart() -> None:
    """Another function, op, dtype or size has another fingerprint, of 62 bits."""
    calls: list[tuple[str, tuple[Any, ...]]] = [("all_reduce", KEY), ("reduce", KEY), ("all_reduce", KEY[1:])]
    calls += [("all_reduce", ("float64", ("elements", n))) for n in range(10_000)]
    prints = [fingerprint(op, key) for op, key in calls]
    assert len(set(prints)) == len(prints)
    assert all(0 <= number < 2**62 for number in prints)
    assert fingerprint("all_reduce", KEY) == prints[0]  # the cache was emptied in between


def test_a_site_is_the_line_of_the_call() -> None:
    """A site names its file and line, also in a call over several lines."""
    frame = inspect.currentframe()
    assert frame is not None
    site = place()
    assert str(site) == f"{__file__}:{frame.f_lineno - 1}"
    first = str(
        place(),
    )
    assert int(first.rpartition(":")[2]) in range(frame.f_lineno - 4, frame.f_lineno)
    assert str(call_site()) == f"{__file__}:{frame.f_lineno}"
    assert not CallSite.inside(frame.f_code)
    assert CallSite.inside(call_site.__code__)


def test_ranks_are_compressed() -> None:
    """Ranks are sorted, and runs of them written as ranges."""
    for ranks, text in (
        ([], ""),
        ([3], "3"),
        ([0, 1], "0-1"),
        ([7, 2, 3, 4, 0, 6, 5], "0, 2-7"),
        ((5, 1, 3), "1, 3, 5"),
        ({10, 11, 12, 1}, "1, 10-12"),
    ):
        assert compress_ranks(ranks) == text
    assert name_ranks([4]) == "rank 4"
    assert name_ranks({0, 1, 2, 5}) == "ranks 0-2, 5"


def test_calls_are_described_as_one_writes_them() -> None:
    """A call is written with its op, root, dtype and number of elements; long lists are cut."""
    site = place()
    assert CallDescription("barrier", (), site).describe() == "barrier()"
    key = ("ReduceOp.SUM", ("root", 3), "float32", ("elements", 1000))
    assert CallDescription("reduce", key, site).describe() == "reduce(ReduceOp.SUM, root 3, float32, 1000 elements)"
    blocks = CallDescription("all_gather", (("blocks", tuple(range(20))),), site).describe()
    assert blocks == "all_gather(blocks [0, 1, 2, 3, 4, 5, 6, 7, …])"
    assert CallDescription("gather", (), site, error=ValueError("x")).describe() == "gather(…)"
