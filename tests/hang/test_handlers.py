"""Signal handlers of a program that end it by ``sys.exit``, or make a call, while their rank is in a call."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest
from jobs import run_job

EXITS = """
import os, signal, sys, time
from datetime import timedelta
from sys import exit as imported
import numpy as np
import mpicoll as dist

kind, moment, way = sys.argv[1], float(sys.argv[2]), sys.argv[3]
struck = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0"))) == 1


def handler(*_):
    if way == "raise":
        raise SystemExit(7)
    imported(7) if way == "imported" else sys.exit(7)


def strike():
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, moment)


if kind == "init_process_group":
    strike() if struck else time.sleep(1.5)
dist.init_process_group(timeout=timedelta(seconds=30))
x, large, peer = np.ones(4), np.ones(1 << 18), 1 - dist.get_rank()
dist.barrier()
if struck:
    strike()
elif not kind.endswith("again"):
    time.sleep(1.5)
began = time.monotonic()
try:
    if kind == "barrier":
        dist.barrier()
    elif kind == "all_reduce":
        dist.all_reduce(x)
    elif kind == "large":
        dist.all_reduce(large)
    elif kind == "asynchronous":
        dist.all_reduce(x, async_op=True).wait()
    elif kind == "objects":
        dist.all_gather_object([None, None], 3)
    elif kind == "new_group":
        dist.new_group([0, 1])
    elif kind == "recv":
        dist.recv(x, peer) if struck else dist.barrier()
    elif kind == "zero_first":
        with dist.zero_first():
            pass
        dist.barrier()
    elif kind == "new_group again":
        while True:
            dist.destroy_process_group(dist.new_group([0, 1]))
    elif kind == "all_reduce again":
        while True:
            dist.all_reduce(x)
    print("went on", flush=True)
except dist.PeerFailedError as error:
    print(f"PeerFailedError after {time.monotonic() - began < 10}: {'sys.exit(7)' in str(error)}", flush=True)
    raise
"""

KINDS = (
    *("barrier", "all_reduce", "large", "asynchronous", "objects", "new_group", "recv", "zero_first"),
    *("new_group again", "all_reduce again"),
)


WAYS = ("sys.exit", "raise", "imported") if sys.version_info >= (3, 12) else ("sys.exit",)
"""Ways to end the program between two calls whose code is known: Python 3.10 and 3.11 do not tell of a raise."""


def exits(kind: str, moment: float, way: str = "sys.exit") -> None:
    job = run_job(EXITS, 2, limit=60, args=(kind, str(moment), way))
    assert not job.timed_out, job
    assert job.returncode == 7, job
    assert job.seconds < 25, job  # the limit of the program is 30 s
    if kind != "init_process_group":  # before the ranks have met nothing can be told: the launcher ends the job
        assert job.out[0].splitlines() == ["PeerFailedError after True: True"], job


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        pytest.param(kind, way, marks=pytest.mark.slow if kind != KINDS[0] or way == "imported" else ())
        for kind in KINDS
        for way in (WAYS if kind.endswith("again") else ("sys.exit", "raise", "imported"))
    ],
)
def test_an_exit_in_a_call_keeps_its_code(kind: str, way: str) -> None:
    """The exit code is the program's, and the other rank raises PeerFailedError, which names ``sys.exit(7)``, at once."""
    exits(kind, 0.5, way)


@pytest.mark.slow
@pytest.mark.parametrize("moment", [0.1, 0.13, 0.16, 0.19, 0.22])
@pytest.mark.parametrize("kind", ["new_group again", "all_reduce again"])
@pytest.mark.parametrize("way", WAYS)
def test_an_exit_at_any_moment_keeps_its_code(kind: str, moment: float, way: str) -> None:
    """It does wherever in the call the handler strikes."""
    exits(kind, moment, way)


@pytest.mark.parametrize("way", ["sys.exit", "raise"])
def test_an_exit_in_mpi_init_keeps_its_code(way: str) -> None:
    """The handler runs when MPI has started: the job ends at once, and not after the limit of the other rank."""
    exits("init_process_group", 0.5, way)


KEPT = """
import argparse, sys, zipfile
import mpicoll as dist

dist.init_process_group()
saved = []
archive = zipfile.ZipFile(f"{sys.argv[1]}/{dist.get_rank()}.zip", "w")


def parse():
    try:
        argparse.ArgumentParser().parse_args(["--unknown"])
    except SystemExit as error:
        saved.append(error)
        found = error
        return found.code


def main():
    archive.writestr("name", "text")
    if dist.get_rank() == 1:
        print(parse(), flush=True)
    dist.barrier()
    return 0


raise SystemExit(main())
"""


def test_an_exit_that_was_caught_is_no_end(tmp_path: Path) -> None:
    """A SystemExit that the program keeps changes no exit code, and the library keeps no global of the program alive."""
    job = run_job(KEPT, 2, limit=40, args=(str(tmp_path),))
    assert job.returncode == 0, job
    assert job.out[1].splitlines() == ["2"], job
    for rank in range(2):
        with zipfile.ZipFile(tmp_path / f"{rank}.zip") as archive:
            assert archive.read("name") == b"text"


NESTED = """
import os, signal, sys, time
from datetime import timedelta
import numpy as np
import mpicoll as dist

outer, inner = sys.argv[1:]
dist.init_process_group(timeout=timedelta(seconds=30))
x, y, large = np.ones(4), np.ones(4), np.ones(1 << 18)
group = dist.new_group([0, 1])
dist.all_reduce(y), dist.all_reduce(y, group=group)
pending = None


def handler(_, frame):
    if not frame.f_code.co_filename.startswith(os.path.dirname(dist.__file__)):
        signal.setitimer(signal.ITIMER_REAL, 0.01)  # in the program's own loop
        return
    try:
        if inner == "all_reduce":
            dist.all_reduce(y)
        elif inner == "asynchronous":
            dist.all_reduce(y, async_op=True)
        elif inner == "another group":
            dist.all_reduce(y, group=group)
        elif inner == "isend":
            dist.isend(y, 0)
        elif inner == "wait":
            pending.wait()
    except RuntimeError as error:
        print(f"RuntimeError: {'signal handler' in str(error)}", flush=True)
        return
    print("the call was made", flush=True)


if dist.get_rank() == 1:
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
else:
    time.sleep(1.2)
if outer == "all_reduce":
    dist.all_reduce(x)
elif outer == "large":
    dist.all_reduce(large)
elif outer == "asynchronous":
    pending = dist.all_reduce(x, async_op=True)
    pending.wait()
elif outer == "future":
    pending = dist.all_reduce(x, async_op=True)
    pending.get_future().result(timeout=25)
elif outer == "polled":
    pending = dist.all_reduce(x, async_op=True)
    while not pending.is_completed():
        pass
elif outer == "recv":
    dist.recv(x, 0) if dist.get_rank() else dist.send(x + 1, 1)
elif outer == "objects":
    dist.all_gather_object([None, None], 3)
for _ in range(3):  # the ranks are in step: the handler's call took no number
    x[:] = 1
    dist.all_reduce(x)
    assert x[0] == 2
dist.barrier()
print("through", flush=True)
"""


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ("all_reduce", "all_reduce"),
        ("future", "all_reduce"),
        *(
            pytest.param(outer, inner, marks=pytest.mark.slow)
            for outer, inner in (
                ("all_reduce", "asynchronous"),
                ("polled", "all_reduce"),
                ("all_reduce", "another group"),
                ("all_reduce", "isend"),
                ("large", "all_reduce"),
                ("asynchronous", "all_reduce"),
                ("asynchronous", "wait"),
                ("future", "wait"),
                ("future", "another group"),
                ("recv", "all_reduce"),
                ("recv", "another group"),
                ("objects", "all_reduce"),
            )
        ),
    ],
)
@pytest.mark.parametrize("engine", ["auto", pytest.param("mpi", marks=pytest.mark.slow)])
def test_a_call_of_a_handler_is_refused(outer: str, inner: str, engine: str) -> None:
    """The handler gets RuntimeError at once, always the same one, and the call that it interrupted goes on."""
    job = run_job(NESTED, 2, limit=40, args=(outer, inner), env={"MPICOLL_ENGINE": engine})
    assert not job.timed_out, job
    assert job.returncode == 0, job
    assert job.out[0].splitlines() == ["through"], job
    assert job.out[1].splitlines() == ["RuntimeError: True", "through"], job


UNCAUGHT = """
import signal, time
import numpy as np
import mpicoll as dist

dist.init_process_group()
x = np.ones(4)
if dist.get_rank() == 1:
    signal.signal(signal.SIGALRM, lambda *_: dist.barrier())
    signal.setitimer(signal.ITIMER_REAL, 0.3)
else:
    time.sleep(1)
dist.all_reduce(x)
"""


def test_a_refused_call_shows_lines_of_the_program_only() -> None:
    """The traceback has the handler and the call that it interrupted, and no frame of the library, as for wrong arguments."""
    job = run_job(UNCAUGHT, 2, limit=40)
    assert job.returncode == 1, job
    assert job.err[1].count("  File ") == 2, job
    assert "dist.barrier()" in job.err[1], job
    assert "RuntimeError: barrier: a signal handler has made this call" in job.err[1], job
