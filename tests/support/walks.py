"""Record the walks of calls: the files of the package that a call enters on this rank.

As a program, this is a job of two ranks that makes the walks named on its command line. Rank 0 records, and prints the
recordings as one line of JSON.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypedDict

import numpy as np

import mpicoll as dist

PACKAGE = os.path.dirname(dist.__file__) + os.sep
PROGRAM = "the program"
NATIVE = "_native"
EXTENSION = "mpicoll._native"
LATE = 0.03
"""Seconds that rank 1 sleeps before its call. Below 50 ms, so that the members need no meeting before a call of MPI."""
WAITED = 0.02
"""Seconds that rank 0 was in a call at least in which it waited for rank 1."""
WARM = 5
"""Calls before the first that is recorded: a group makes its memory in the first, and modules are imported."""
LATE_CALLS, MOST_LATE_CALLS = 10, 20
PREPARED_CALLS, MOST_PREPARED_CALLS = 10, 2000
"""Calls that count after which a walk ends, and calls after which it ends however many of them count."""
TOGETHER = 0.003
"""Seconds in which the ranks get ready to make a call at the same time."""
NEVER = -1.0
WAITING = "waiting.py"
"""The file that has the waiting loop."""
COUNT = 1 << 17
"""Elements of 1 MiB."""

Array = np.ndarray[Any, Any]


class Recording(TypedDict):
    """The walk of one call: ``path``: the files in order; ``calls``: caller, file entered and function entered, each once."""

    path: list[str]
    calls: list[tuple[str, str, str]]


@dataclass
class Recorder:
    """A profiler of the calling thread that notes the files of the package that are entered.

    A call belongs to the next frame of the package on the stack, so a function of another library that calls back does not
    hide the caller. Functions of the C extension count as one file, `NATIVE`, also as callers. Resuming a generator is a
    call. Constructors of the extension's types are no calls for the profiler.
    """

    path: list[str] = field(default_factory=list)
    calls: dict[tuple[str, str, str], None] = field(default_factory=dict)
    _native: list[FrameType] = field(default_factory=list)
    """Frames that are in a function of the extension."""

    def __enter__(self) -> Recorder:
        gc.disable()  # the collected objects are no part of the call
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()

    def recording(self) -> Recording:
        return {"path": self.path, "calls": list(self.calls)}

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            entered = file_of(frame)
            if entered:
                self._note(self._nearest(frame.f_back), entered, frame.f_code.co_name)
        elif event == "c_call":
            if is_native(argument):
                self._note(self._nearest(frame), NATIVE, argument.__name__)
                self._native.append(frame)
        elif event in ("c_return", "c_exception") and is_native(argument):
            self._native.pop()

    def _nearest(self, frame: FrameType | None) -> str:
        """Return the file of the first frame of the package from ``frame`` on outwards."""
        while frame is not None:
            if self._native and frame is self._native[-1]:
                return NATIVE
            found = file_of(frame)
            if found:
                return found
            frame = frame.f_back
        return PROGRAM

    def _note(self, caller: str, entered: str, function: str) -> None:
        if not self.path or self.path[-1] != entered:
            self.path.append(entered)
        self.calls[caller, entered, function] = None


def file_of(frame: FrameType) -> str:
    """Return the file of a frame relative to the package, or "" for a file of another library."""
    name = frame.f_code.co_filename
    return name[len(PACKAGE) :].replace(os.sep, "/") if name.startswith(PACKAGE) else ""


def is_native(function: Any) -> bool:
    """Return whether a built-in function or method belongs to the C extension."""
    owner = getattr(function, "__self__", None)
    module = getattr(function, "__module__", None)
    types = type(owner).__mro__ if module is None else ()  # a method may be one that a class of the package inherits
    return EXTENSION in (module, getattr(owner, "__name__", None), *(each.__module__ for each in types))


def record(call: Callable[[int], object], *, late: bool = True) -> list[Recording]:
    """Make a call again and again, and return the recordings that differ.

    Only calls count in which rank 0 waited for rank 1 if rank 1 is late, and did not wait otherwise. On a busy machine there are
    other calls in between.

    Args:
        call: makes the call. Its argument counts the calls; the first `WARM` are not recorded.
        late: Rank 1 sleeps before each call. Otherwise the ranks make the call at the same time.
    """
    found: dict[str, Recording] = {}
    first, left, start = dist.get_rank() == 0, LATE_CALLS if late else PREPARED_CALLS, np.zeros(1)
    for number in range(WARM + (MOST_LATE_CALLS if late else MOST_PREPARED_CALLS)):
        start[0] = time.monotonic() + TOGETHER if left else NEVER
        dist.broadcast(start, 0)
        if start[0] == NEVER:
            break
        time.sleep(max(0.0, start[0] - time.monotonic()))
        if number >= WARM and late and not first:
            time.sleep(LATE)
        if number < WARM or not first:
            call(number)
            continue
        began = time.monotonic()
        with Recorder() as recorder:
            call(number)
        seconds, recording = time.monotonic() - began, recorder.recording()
        if seconds >= WAITED if late else not any(each.endswith(WAITING) for each in recording["path"]):
            left -= 1
            kind = json.dumps([sorted(set(recording["path"])), sorted(recording["calls"])])
            found.setdefault(kind, recording)
    return list(found.values())


def prepared() -> list[Recording]:
    """Make a blocking call again while the other member makes the same call."""
    x = np.ones(COUNT)
    return record(lambda _: dist.all_reduce(x), late=False)


def late_member() -> list[Recording]:
    """Make a blocking call again and wait for the other member."""
    x = np.ones(COUNT)
    return record(lambda _: dist.all_reduce(x))


def first_time() -> list[Recording]:
    """Make a blocking call on an array of a new shape."""
    arrays = [np.ones(COUNT + more) for more in range(WARM + MOST_LATE_CALLS)]
    return record(lambda number: dist.all_reduce(arrays[number]))


def asynchronous() -> list[Recording]:
    """Start a call that moves in one step, and wait for it, while the other member does the same."""
    return record(all_reduce_later(COUNT >> 4), late=False)


def asynchronous_late() -> list[Recording]:
    """Start a call that moves in pieces, and wait for it and for the other member."""
    return record(all_reduce_later(COUNT))


def all_reduce_later(count: int) -> Callable[[int], None]:
    """Return a function that starts an ``all_reduce`` and waits for the Work."""
    x = np.ones(count)

    def call(_: int) -> None:
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()

    return call


def messages() -> list[Recording]:
    """Send and receive a small message asynchronously, while the other rank does the same."""
    return record(exchange(), late=False)


def messages_late() -> list[Recording]:
    """Send and receive a small message asynchronously, and wait for the other rank."""
    return record(exchange())


def exchange() -> Callable[[int], None]:
    """Return a function that exchanges two messages with the other rank."""
    x, y, other = np.ones(8), np.zeros(8), 1 - dist.get_rank()

    def call(_: int) -> None:
        sent, received = dist.isend(x, other), dist.irecv(y, other)
        assert sent is not None
        assert received is not None
        received.wait()
        sent.wait()

    return call


def mismatch() -> list[Recording]:
    """Call with another operator than the other member, each time on a group of its own."""
    x, op = np.ones(COUNT), (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[dist.get_rank()]
    groups = [dist.new_group() for _ in range(WARM + MOST_LATE_CALLS)]
    for group in groups:
        for _ in range(WARM):
            dist.all_reduce(x, group=group)

    def call(number: int) -> None:
        try:
            dist.all_reduce(x, op, group=groups[number])
        except dist.CollectiveMismatchError:
            return
        raise AssertionError("the members made different calls, and none was told")

    return record(call)


def device_array() -> list[Recording]:
    """Make a blocking call on arrays of new shapes on a GPU that MPI does not support."""
    from standin_gpu import Gpu

    from mpicoll.memory.device import runtime as device_runtime

    gpu = Gpu("eager")
    device_runtime._runtime = gpu
    arrays: list[Any] = [gpu.array_of(np.ones(COUNT + more)) for more in range(WARM + MOST_LATE_CALLS)]
    return record(lambda number: dist.all_reduce(arrays[number]))


WALKS = {
    each.__name__: each
    for each in (
        *(prepared, late_member, first_time, asynchronous, asynchronous_late),
        *(messages, messages_late, mismatch, device_array),
    )
}


def main() -> None:
    dist.init_process_group()
    walks = {name: WALKS[name]() for name in sys.argv[1:]}
    if dist.get_rank() == 0:
        print(json.dumps(walks))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
