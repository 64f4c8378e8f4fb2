"""Guard the architecture at run time: how many files a call enters, and how often a lower layer calls a higher one.

A walk is one call on rank 0 of two, recorded by ``tests/support/walks.py``. Its length is the number of files of the package that
it enters. A climb is a call from a file of a lower layer to a function in a file of a higher layer. A climb that repeats
counts once. Each walk is made several times, and the shortest recording counts, so a busy machine does not lengthen a walk.

The numbers of `TODAY` may only shrink. A change that shortens a walk also lowers its numbers here.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

import pytest
from jobs import ROOT, run_job
from walks import NATIVE, PROGRAM, Recording

import mpicoll
from mpicoll.runtime import native

LAYERS = ("api", "lifecycle", "operations", "groups", "checks", "diagnosis", "transports", "memory", "runtime")
"""From top to bottom. A call goes down or stays in its layer."""

PRESENT = {"errors.py": "runtime"}
"""The layers of files that are not in the folder of their layer."""

DATA = frozenset({"operations/states.py", "memory/memory.py"})
"""Small files of data on the way, which a walk does not count."""

HANDED_IN: dict[str, frozenset[str]] = {
    # Progress of what is waited for. The second and the third name go when all that can be waited for has `Test`.
    "Test": frozenset(),
    "advance": frozenset(),
    "wrapped": frozenset({"waiting.py"}),
    # The wait policy.
    "check": frozenset({"waiting.py"}),
    "stalled": frozenset({"waiting.py"}),
    "timed_out": frozenset({"waiting.py"}),
    "withdraw": frozenset({"waiting.py", NATIVE}),
    # A registered service, which answers questions of other ranks in every long wait.
    "poll": frozenset({"waiting.py"}),
    # Whether the program waits for a call that differs, and how the exchange after a mismatch merges what the members tell.
    "is_settled": frozenset({"mismatch.py"}),
    "hold_back": frozenset({"mismatch.py"}),
    "pack": frozenset({"exchange.py"}),
    "merge": frozenset({"exchange.py"}),
    "unpack": frozenset({"exchange.py"}),
    # The call that the extension begins and Python completes, or that it leaves to Python.
    "_await": frozenset({NATIVE}),
    "_finish": frozenset({NATIVE}),
    "_give_up": frozenset({NATIVE}),
    "_run_cached": frozenset({NATIVE}),
    "complete": frozenset({NATIVE}),
    # The class of the claims that the extension makes.
    "__init__": frozenset({NATIVE}),
    # The request of a claim of memory.
    "expected": frozenset({"memory_in_use.py"}),
    "unclaimed": frozenset({"memory_in_use.py"}),
}
"""Functions that a lower layer may call in a higher one, because a caller handed them in.

The values are the names of the files that may do so. An empty set stands for all files.
"""


class Row(NamedTuple):
    """The numbers of a walk."""

    files: int
    climbs: int


TARGETS = {
    "prepared": Row(3, 0),
    "late_member": Row(9, 0),
    "over_mpi": Row(11, 0),
    "first_time": Row(17, 0),
    "asynchronous": Row(9, 0),
    "messages": Row(7, 0),
    "mismatch": Row(8, 0),
    "device_array": Row(17, 0),
}
"""The numbers to reach. A walk without one has numbers of today only."""

TODAY = {
    "prepared": Row(3, 0),
    "late_member": Row(17, 0),
    "over_mpi": Row(25, 0),
    "first_time": Row(35, 0),
    "asynchronous": Row(7, 0),
    "asynchronous_late": Row(28, 0),
    "messages": Row(5, 0),
    "messages_late": Row(16, 0),
    "mismatch": Row(27, 0),
    "device_array": Row(37, 0),
}
"""The numbers that a walk may have now. They may only shrink, except that a file which has two jobs may be split."""

REACHED = {"prepared", "asynchronous", "messages"}
"""The walks whose numbers of today may not be above their targets any more."""

SETTINGS: dict[str, str | None] = {
    "MPICOLL_CHECK": None,
    "MPICOLL_EXTENSION": None,
    "MPICOLL_PROGRESS": None,
    "MPICOLL_SHM_MB": None,
    "MPICOLL_CUDA": "off",
    "MPICOLL_CUDA_IPC": "off",  # the copies to the host are the walk, and not the reduction on a GPU that ranks share
}
BELOW_TRANSPORTS = frozenset({"find_frame_outside", "tensor_array"})
"""Functions of the extension for the lowest layer and for the memory; its other functions are of the transports."""
LONGEST = 60
"""Files of a path that a failure prints."""


def layer_of(path: str) -> int | None:
    """Return the number of the layer of a file, 0 for the highest; None for a file beside the layers."""
    folder = path.split("/")[0]
    name = "transports" if path == NATIVE else PRESENT.get(path, PRESENT.get(folder, folder))
    return LAYERS.index(name) if name in LAYERS else None


def files_of(recording: Recording) -> list[str]:
    """Return the files of a walk that count, in the order in which they are entered first."""
    return [each for each in dict.fromkeys(recording["path"]) if each not in DATA]


def climbs_of(recording: Recording) -> list[str]:
    """Return the calls from a lower layer into a higher one, without those of functions that were handed in."""
    found = []
    for caller, entered, function in recording["calls"]:
        below, above = layer_of(caller), None if function in BELOW_TRANSPORTS else layer_of(entered)
        callers = HANDED_IN.get(function)
        handed_in = callers is not None and (not callers or caller.rpartition("/")[2] in callers)
        if below is not None and above is not None and below > above and not handed_in:
            found.append(f"{caller} calls {function} of {entered}")
    return found


def numbers_of(recording: Recording) -> Row:
    return Row(len(files_of(recording)), len(climbs_of(recording)))


def picture_of(recording: Recording) -> str:
    """Return what a failure prints of a walk."""
    path = recording["path"]
    more = [f"... ({len(path)} in all)"] if len(path) > LONGEST else []
    return "\n".join(
        [
            "files: " + ", ".join(files_of(recording)),
            *(f"climb: {each}" for each in climbs_of(recording)),
            "path: " + " => ".join(path[:LONGEST] + more),
        ]
    )


def walk(engine: str, *names: str) -> dict[str, list[Recording]]:
    """Make walks in a job of two ranks, and return their recordings."""
    path = os.pathsep.join([str(ROOT / "tests" / "support"), str(ROOT)])
    settings = {**SETTINGS, "MPICOLL_ENGINE": engine, "PYTHONPATH": path}
    job = run_job(ROOT / "tests" / "support" / "walks.py", 2, limit=120, args=names, env=settings)
    assert job.returncode == 0, job
    found: dict[str, list[Recording]] = json.loads(job.out[0])
    return found


@pytest.fixture(scope="module")
def walks() -> dict[str, list[Recording]]:
    """All walks, each with the recordings that differ."""
    if native.found is None:
        pytest.skip(f"the walks are those with the C extension: {native.why_not}")
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two ranks on one core wait for each other in every call")
    found = walk("auto", *(name for name in TODAY if name != "over_mpi"))
    found["over_mpi"] = walk("mpi", "late_member")["late_member"]
    return found


@pytest.mark.parametrize("name", TODAY)
def test_a_walk_is_no_longer_than_today(name: str, walks: dict[str, list[Recording]]) -> None:
    """A call enters at most as many files, and climbs at most as often, as the table says."""
    if not walks[name] and os.getloadavg()[0] > 2 * len(os.sched_getaffinity(0)):
        pytest.skip("the machine is so busy that the ranks never made the call at the same time")
    assert walks[name], f"{name}: rank 0 waited in every call, or in no call where rank 1 was late"
    shortest = min(walks[name], key=numbers_of)
    found, today, picture = numbers_of(shortest), TODAY[name], picture_of(shortest)
    unplaced = [each for each in shortest["path"] if layer_of(each) is None]
    assert not unplaced, f"{name} enters files beside the layers: {unplaced}\n{picture}"
    assert found.files <= today.files, f"{name} enters {found.files} files, not {today.files}\n{picture}"
    assert found.climbs <= today.climbs, f"{name} climbs {found.climbs} times, not {today.climbs}\n{picture}"


def test_targets_stay_reached() -> None:
    """A walk that has reached its target is named, and its numbers stay there."""
    reached = {name for name, to in TARGETS.items() if all(a <= b for a, b in zip(TODAY[name], to, strict=True))}
    assert reached == REACHED


def test_the_table_of_layers_names_files_that_exist() -> None:
    """A file that is moved or deleted has no row any more, and each row names a layer."""
    package = Path(mpicoll.__file__).parent
    assert [each for each in PRESENT if not (package / each).exists()] == []
    assert set(PRESENT.values()) <= set(LAYERS)


def test_a_climb_is_counted() -> None:
    """A call to a higher layer counts, also out of the extension, and a call down or of what was handed in does not."""
    calls = [
        (PROGRAM, "api/messages.py", "send"),
        ("api/messages.py", "memory/adapt.py", "adapt"),
        ("memory/adapt.py", "api/messages.py", "help"),
        ("runtime/waiting.py", "diagnosis/wait_policy.py", "check"),
        ("memory/adapt.py", "diagnosis/wait_policy.py", "check"),
        ("memory/adapt.py", "operations/request.py", "Test"),
        (NATIVE, "operations/request.py", "start"),
        (NATIVE, "operations/request.py", "complete"),
        ("runtime/call_site.py", NATIVE, "find_frame_outside"),
        ("runtime/call_site.py", NATIVE, "run"),
    ]
    recording: Recording = {"path": ["api/messages.py", "operations/states.py", "api/messages.py"], "calls": calls}
    assert climbs_of(recording) == [
        "memory/adapt.py calls help of api/messages.py",
        "memory/adapt.py calls check of diagnosis/wait_policy.py",
        f"{NATIVE} calls start of operations/request.py",
        f"runtime/call_site.py calls run of {NATIVE}",
    ]
    assert numbers_of(recording) == Row(1, 4)
