"""Waits end: limits, late and stopped ranks, Ctrl-C, signals, groups that nobody comes to. Each job has a hard limit."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from jobs import RunningJob, run_job

HEAD = """
import os, signal, sys, time
from datetime import timedelta
import numpy as np
import mpicoll as dist
"""
INIT = (
    HEAD
    + "dist.init_process_group(); dist.set_timeout(timedelta(seconds=2))\n"  # the start may take longer on a busy machine
    + "r, n = dist.get_rank(), dist.get_world_size()\n"
)


def test_a_late_rank_is_named() -> None:
    """Ranks that wait past the limit say who is late, and the late rank finds the group given up."""
    job = run_job(
        INIT
        + """
dist.barrier()
t = time.monotonic()
try:
    if r == 1:
        time.sleep(3.5)
    dist.all_reduce(np.ones(1))
except dist.CollectiveTimeoutError as error:
    assert isinstance(error, TimeoutError)
    print(f"{time.monotonic() - t:.2f} {error}", flush=True)
except dist.GroupBrokenError as error:
    print(f"broken {error}", flush=True)
try:
    dist.barrier()
except dist.GroupBrokenError as error:
    print("later:", error, flush=True)
time.sleep(1 if r == 1 else 3)
sys.exit(4)
""",
        3,
        limit=20,
    )
    assert not job.timed_out, job
    assert job.returncode == 4, job
    told = [
        out
        for out in (job.out[0], job.out[2])
        if "Timed out waiting 2 s in all_reduce #2 float64[1] SUM on group WORLD at job.py:" in out
    ]
    assert told, job
    for out in told:
        assert "rank 1 did not make the matching call" in out, job
        said = " ".join(out.split())
        assert "rank 1: did not make the matching call, it is at " in said, job
        assert "job.py:13 in <module>(), last known call barrier at job.py:9 " in said, job
        assert 1.9 < float(out.split()[0]) < 4, job
    assert "broken" in job.out[1] or "later" in job.out[1], job
    assert all("later: barrier on group WORLD: the group cannot be used any more" in out for out in job.out), job


@pytest.mark.slow
@pytest.mark.parametrize("extension", ["auto", "off"])
def test_a_late_rank_does_not_complete_a_call_that_was_given_up(extension: str) -> None:
    """Whichever way the call is made, the late rank raises, too: with its data beside the round, in pieces, or over MPI."""
    job = run_job(
        HEAD
        + """
dist.init_process_group(timeout=timedelta(seconds=20))
r, n = dist.get_rank(), dist.get_world_size()
short = timedelta(seconds=0.5)
small, large = np.ones(4), np.ones(2000)
calls = {
    "barrier": lambda group, limit: dist.barrier(group=group, **limit),
    "eager": lambda group, limit: dist.all_reduce(small, group=group, **limit),
    "pieces": lambda group, limit: dist.all_reduce(large, group=group, **limit),
    "asynchronous": lambda group, limit: dist.all_reduce(small, group=group, async_op=True, **limit).wait(),
}
for name, call in calls.items():
    for limit in ({}, {"timeout": short}):
        group = dist.new_group(timeout=short)
        for _ in range(3):
            call(group, {})
        dist.barrier()
        if r == 1:
            time.sleep(1.5)
        try:
            call(group, limit)
        except (dist.CollectiveTimeoutError, dist.GroupBrokenError) as error:
            print(name, type(error).__name__ if r == 1 else "left", flush=True)
        else:
            print(name, "complete", flush=True)
        dist.barrier()
print("through")
""",
        3,
        limit=90,
        env={"MPICOLL_EXTENSION": extension},
    )
    assert job.returncode == 0, job
    names = [name for name in ("barrier", "eager", "pieces", "asynchronous") for _ in range(2)]
    for rank, out in enumerate(job.out):
        outcome = "GroupBrokenError" if rank == 1 else "left"
        assert out.splitlines() == [*(f"{name} {outcome}" for name in names), "through"], job


@pytest.mark.slow
def test_the_late_rank_is_found_where_it_waits() -> None:
    """A rank that waits in another call is named with that call and its line."""
    job = run_job(
        INIT
        + """
try:
    if r == 1:
        dist.recv(np.ones(1), 2, timeout=timedelta(seconds=8))
    if r == 2:
        time.sleep(4)  # it computes, so nothing is certain
    dist.all_reduce(np.ones(1))
except dist.DistError as error:
    print(type(error).__name__, error, flush=True)
sys.exit(4)
""",
        3,
        limit=25,
    )
    assert not job.timed_out, job
    assert "CollectiveTimeoutError" in job.out[0], job
    text = " ".join(job.out[0].split())
    assert (
        "rank 1: has not made the matching call, and waits in recv float64[1] from rank 2 tag 0 at job.py:11" in text
    ), job


@pytest.mark.parametrize("before", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_initialise_again_after_a_late_rank(before: bool) -> None:
    """Ranks that gave init_process_group up call it again, and come together with the one that was late."""
    job = run_job(
        HEAD
        + f"before = {before}\n"
        + """
from mpi4py import MPI
if before:  # once there are communicators to use again they meet in another way
    dist.init_process_group()
    dist.barrier()
    dist.destroy_process_group()
late = MPI.COMM_WORLD.Get_rank() == 1
if late:
    time.sleep(3)
for tries in range(1, 31):
    try:
        dist.init_process_group(timeout=timedelta(seconds=1))
        break
    except dist.CollectiveTimeoutError as error:
        assert "not all 3 ranks have called it" in str(error), error
assert (tries == 1) == late, tries
x = np.ones(3)
dist.all_reduce(x)
assert x.tolist() == [3, 3, 3]
dist.destroy_process_group()
dist.init_process_group(timeout=timedelta(seconds=10))
dist.barrier()
print("together", flush=True)
""",
        3,
        limit=30,
    )
    assert job.returncode == 0, job
    assert job.out == ["together\n"] * 3, job


def test_a_limit_of_one_call() -> None:
    """timeout= of one call and Work.wait(timeout) hold instead of the limit of the group."""
    job = run_job(
        HEAD
        + """
dist.init_process_group()
r = dist.get_rank()
groups = [dist.new_group() for _ in range(3)]
t = time.monotonic()
if r == 0:
    for wait in (
        lambda: dist.barrier(group=groups[0], timeout=timedelta(seconds=0.5)),
        lambda: dist.all_reduce(np.ones(1), group=groups[1], async_op=True).wait(timedelta(seconds=0.5)),
        lambda: dist.recv(np.ones(1), 1, group=groups[2], timeout=timedelta(seconds=0.5)),
    ):
        try:
            wait()
        except dist.CollectiveTimeoutError as error:
            print(f"{time.monotonic() - t:.1f}", "500ms in" in str(error), flush=True)
else:
    time.sleep(4)  # it computes, so nothing is certain
dist.barrier()
sys.exit(0)
""",
        2,
        limit=25,
        env={"MPICOLL_TIMEOUT": "15"},
    )
    assert not job.timed_out, job
    assert job.out[0].count("True") == 3, job
    assert float(job.out[0].split()[-2]) < 4, job


@pytest.mark.slow
def test_stopped_after_it_agreed() -> None:
    """A rank stopped by SIGSTOP inside a large all_reduce: the others end past the limit, and say why."""

    def stop(job: RunningJob) -> None:
        job.wait_for("go", 0, 1)
        time.sleep(0.3)
        job.signal(signal.SIGSTOP, 1)

    job = run_job(
        INIT
        + """
x = np.ones(3_000_000)
dist.barrier()
print("go", flush=True)
while True:
    dist.all_reduce(x, dist.ReduceOp.MAX)
""",
        2,
        limit=25,
        meanwhile=stop,
    )
    assert not job.timed_out, job
    assert job.returncode != 0, job
    assert "past its limit" in job.err[0] or "Timed out waiting 2 s" in job.err[0], job


@pytest.mark.parametrize("engine", [pytest.param("auto", id="auto engine"), pytest.param("mpi", id="engine of MPI")])
def test_late_again_after_it_agreed(engine: str) -> None:
    """A rank is late, and again once all ranks know the call: ranks that meanwhile pass their limit leave it outside of MPI."""
    job = run_job(
        HEAD
        + """
from mpi4py import MPI
from mpicoll.operations import execution
move_agreed = execution.move_agreed
def late_to_move(group, call, *arguments):
    if late and "all_gather" in call.op:
        time.sleep(3)
    yield from move_agreed(group, call, *arguments)
execution.move_agreed = late_to_move
dist.init_process_group(timeout=timedelta(seconds=1), comm=MPI.COMM_WORLD, on_failure="raise")
late = dist.get_rank() == 1
x = np.ones(200_000)
dist.barrier()
time.sleep(0.8 * late)
try:
    dist.all_gather_into_tensor(np.empty(2 * x.size), x)
except dist.DistError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
""",
        2,
        limit=30,
        env={"MPICOLL_ENGINE": engine},
    )
    assert not job.timed_out, job
    assert job.out[1].startswith("GroupBrokenError: "), job
    assert "rank 0 gave the group up: time limit" in job.out[1], job
    assert job.out[0].startswith("CollectiveTimeoutError: "), job
    assert "rank 1: made this call, and does not progress the call: it is at " in job.out[0], job


@pytest.mark.parametrize("polls", [False, True])
@pytest.mark.parametrize("engine", [pytest.param("auto", id="auto engine"), pytest.param("mpi", id="engine of MPI")])
def test_a_rank_comes_while_its_place_is_asked_for(engine: str, polls: bool, tmp_path: Path) -> None:
    """A rank past its limit asks where the late rank is. If that rank makes the call meanwhile, the call completes on both.

    Otherwise the late rank would be alone in a call of MPI, which it cannot leave.
    """
    job = run_job(
        HEAD
        + f"""
from mpi4py import MPI
from mpicoll.diagnosis.wait_policy import CallWait
timed_out = CallWait.timed_out
def asks_for_long(self, waited):
    error = timed_out(self, waited)
    open("asked", "w").close()
    wait_for("calls")
    until = time.time() + 0.5
    while time.time() < until:
        MPI.COMM_WORLD.Iprobe()  # MPI progresses, as while a rank asks
    return error
def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.001)
CallWait.timed_out = asks_for_long
dist.init_process_group(timeout=timedelta(seconds=1), comm=MPI.COMM_WORLD, on_failure="raise")
x = np.ones(1 << 13)
dist.barrier()
if dist.get_rank() == 1:
    wait_for("asked")
    open("calls", "w").close()
try:
    if {polls}:
        work = dist.all_reduce(x, async_op=True)
        while not work.is_completed():
            time.sleep(0.001)
    else:
        dist.all_reduce(x)
    print("complete", x[0], flush=True)
except dist.DistError as error:
    print(f"{{type(error).__name__}}: {{error}}", flush=True)
""",
        2,
        limit=30,
        env={"MPICOLL_ENGINE": engine},
        cwd=tmp_path,
    )
    assert job.out == ["complete 2.0\n"] * 2, job


@pytest.mark.slow
def test_a_rank_never_initialises() -> None:
    """When one rank never calls init_process_group the others end at their limit."""
    job = run_job(
        HEAD
        + """
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    time.sleep(30)
else:
    dist.init_process_group(timeout=timedelta(seconds=1.5))
""",
        3,
        limit=20,
    )
    assert not job.timed_out, job
    assert job.returncode == 1, job
    assert job.seconds < 12, job
    assert "not all 3 ranks have called it" in job.err[0] + job.err[2], job


@pytest.mark.slow
def test_a_rank_never_starts_mpi() -> None:
    """When one rank never starts MPI the others, who wait inside MPI_Init, end at their limit with the place."""
    job = run_job(
        HEAD
        + """
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "-1")))
if rank == 1:
    time.sleep(30)
else:
    dist.init_process_group(timeout=timedelta(seconds=1.5))
""",
        2,
        limit=20,
    )
    assert not job.timed_out, job
    assert job.returncode != 0, job
    assert job.seconds < 12, job
    assert "in _wait_in_mpi_init_for_every_rank_of_the_job" in job.err[0], job
    assert "job.py" in job.err[0], job


def test_a_wrong_timeout_on_one_rank() -> None:
    """A limit that is none takes part in the start of the others, as every wrong argument does."""
    job = run_job(
        """
import os
from datetime import timedelta
import mpicoll as dist
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "-1")))
try:
    dist.init_process_group(timeout=timedelta(seconds=-rank) if rank else None)
except (ValueError, dist.CollectiveMismatchError) as error:
    print(type(error).__name__, error, flush=True)
""",
        2,
        limit=20,
    )
    assert not job.timed_out, job
    assert job.out[1].startswith("ValueError timeout must be positive"), job
    assert job.out[0].startswith("CollectiveMismatchError"), job
    assert "timeout must be positive" in job.out[0], job


@pytest.mark.parametrize("call", ["dist.all_reduce(x, timeout=3)", "dist.all_gather_object([None] * 2, lambda: 0)"])
@pytest.mark.parametrize(
    ("other", "error"),
    [
        ("time.sleep(3)", "CollectiveTimeoutError"),
        ("dist.recv(x, 0)", "DeadlockError"),
        ("sys.exit(0)", "PeerExitedError"),
        ("raise KeyError('no data')", "PeerFailedError"),
    ],
)
def test_wrong_arguments_while_another_rank_does_not_come(other: str, error: str, call: str) -> None:
    """A rank whose call refuses its arguments raises its own error, whatever ends the wait, and every report has that error."""
    job = run_job(
        HEAD
        + f"""
dist.init_process_group(timeout=timedelta(seconds=2))
x = np.ones(3)
if dist.get_rank() == 1:
    {other}
{call}
""",
        2,
        limit=20,
        env={"MPICOLL_STALL_WARN": "1"},
    )
    assert not job.timed_out, job
    assert job.returncode != 0, job
    before, _, after = job.err[0].partition("During handling of the above exception")
    own = "TypeError: Expected timeout argument" if "timeout" in call else "PicklingError: "
    assert f"mpicoll.errors.{error}: " in before, job
    assert f", raised {own}" in " ".join(before.replace("[rank 0]", "").split()), job
    assert "next: correct the arguments on rank 0" in before, job
    assert own in after, job
    if error == "CollectiveTimeoutError":
        assert "mpicoll: rank 0 has waited 1 s in " in before, job


@pytest.mark.slow
def test_a_traceback_that_the_program_asked_for() -> None:
    """faulthandler.dump_traceback_later is the program's: starting MPI leaves it alone."""
    job = run_job(
        """
import faulthandler, sys, time
import mpicoll as dist
faulthandler.dump_traceback_later(1.5, file=sys.stderr)
dist.init_process_group()
until = time.monotonic() + 1.8
while time.monotonic() < until:
    time.sleep(0.01)  # the program waits here
faulthandler.cancel_dump_traceback_later()
""",
        1,
        limit=20,
    )
    assert job.returncode == 0, job
    assert "Timeout (0:00:01.5" in job.err[0], job
    assert "job.py" in job.err[0], job


@pytest.mark.slow
def test_a_listed_rank_never_makes_the_group() -> None:
    """new_group(use_local_synchronization=True) names the listed rank that does not come, and the world stays good."""
    job = run_job(
        INIT
        + """
if r != 2:
    try:
        dist.new_group([0, 1, 2], use_local_synchronization=True)
    except dist.CollectiveTimeoutError as error:
        print(error, flush=True)
else:
    time.sleep(2.5)
x = np.ones(1)
dist.all_reduce(x)
print("sum", x[0], flush=True)
group = dist.new_group([0, 2], use_local_synchronization=True)
if r != 1:
    dist.all_reduce(x, group=group)
    print("pair", x[0], flush=True)
""",
        3,
        limit=25,
    )
    assert not job.timed_out, job
    assert job.returncode == 0, job
    for out in job.out[:2]:
        assert (
            "Timed out waiting 2 s in new_group ranks [0, 1, 2] use_local_synchronization on group WORLD at" in out
        ), job
        assert "rank 2 did not make the matching call" in out, job
        assert "No group was made." in out, job
    assert all("sum 3.0" in out for out in job.out), job
    assert "pair 6.0" in job.out[0], job


@pytest.mark.slow
def test_a_rank_never_makes_the_group() -> None:
    """new_group on the world ends at the limit when a rank does not call it."""
    job = run_job(INIT + "if r != 1: dist.new_group([0])\nelse: time.sleep(30)\n", 2, limit=25)
    assert not job.timed_out, job
    assert job.returncode == 1, job
    assert "Timed out waiting 2 s in new_group #1 ranks [0] on group WORLD" in job.err[0], job


def test_those_that_are_left_make_a_group() -> None:
    """After the world was given up the ranks that are there go on in a group of their own, and the late one does not matter."""
    job = run_job(
        INIT
        + """
def together(times):
    for _ in range(times):
        group = dist.new_group([0, 1], use_local_synchronization=True)
        x = np.ones(2)
        dist.all_reduce(x, group=group)
        assert (x == 2).all()
try:
    if r == 2:
        time.sleep(5)
    dist.all_reduce(np.ones(2), timeout=timedelta(seconds=1))
except dist.DistError as error:
    print(type(error).__name__, flush=True)
    if r < 2:
        together(3)
        time.sleep(5)
        together(3)
        print("went on", flush=True)
try:
    dist.new_group([0, 1])
except dist.GroupBrokenError as error:
    print("broken all the same", flush=True)
""",
        3,
        limit=40,
    )
    assert not job.timed_out, job
    assert job.returncode == 0, job
    assert "GroupBrokenError" in job.out[2], job
    for rank in (0, 1):
        assert "went on" in job.out[rank], job
    assert all("broken all the same" in out for out in job.out), job


def test_control_c_while_waiting() -> None:
    """Ctrl-C is answered within 0.2 s while waiting, and the peers learn of it."""
    sent = []

    def interrupt(job: RunningJob) -> None:
        job.wait_for("go", 0, 1)
        time.sleep(1.0)
        sent.append(time.time())
        job.signal(signal.SIGINT, 0)

    job = run_job(
        HEAD
        + """
dist.init_process_group()
r = dist.get_rank()
print("go", flush=True)
if r == 1:
    time.sleep(2.5)
try:
    dist.all_reduce(np.ones(1))
except KeyboardInterrupt:
    print("interrupted", time.time(), flush=True)
    time.sleep(2.5)
except dist.GroupBrokenError as error:
    print("broken", error, flush=True)
sys.exit(6)
""",
        2,
        limit=25,
        env={"MPICOLL_TIMEOUT": "20"},
        meanwhile=interrupt,
    )
    assert not job.timed_out, job
    when = float(job.out[0].split("interrupted")[1].split()[0])
    assert when - sent[0] < 0.2, job
    assert "broken" in job.out[1], job
    assert "rank 0 gave the group up: KeyboardInterrupt" in job.out[1], job


def test_control_c_at_any_moment() -> None:
    """Wherever Ctrl-C strikes around collectives, it is raised once, no later than the end of the call."""
    job = run_job(
        HEAD
        + """
dist.init_process_group()
r = dist.get_rank()
x = np.ones(1)
dist.all_reduce(x)  # imports what a call needs: CPython drops what a handler raises in its locks of imports
caught = 0
for i in range(60):
    # Alone in its group the rank always completes: what is tried here is that no interrupt is lost or comes twice.
    try:
        end = time.monotonic() + 0.003
        signal.setitimer(signal.ITIMER_REAL, 0.0003 + 0.00001 * i)
        while True:  # as Python 3.13 wants it: cpython#130279
            if time.monotonic() >= end:
                break
            dist.all_reduce(x, group=alone) if i else None
        while True:
            time.sleep(0.01)
    except KeyboardInterrupt:
        caught += 1
    alone = dist.new_group([r], use_local_synchronization=True) if not i else alone
assert caught == 60, caught
time.sleep(0.05)
print("caught", caught, flush=True)
""".replace(
            "caught = 0\n",
            "caught = 0\nsignal.signal(signal.SIGALRM, lambda *a: signal.raise_signal(signal.SIGINT))\n",
            1,
        ),
        2,
        limit=25,
    )
    assert job.returncode == 0, job
    assert all("caught 60" in out for out in job.out), job


@pytest.mark.slow
def test_an_exception_out_of_a_signal_handler() -> None:
    """What a signal handler of the program raises ends a wait, after the rank has withdrawn."""
    job = run_job(
        HEAD
        + """
dist.init_process_group()
class Limit(Exception):
    pass
def handler(*args):
    raise Limit
signal.signal(signal.SIGALRM, handler)
if dist.get_rank() == 0:
    signal.alarm(1)
    t = time.monotonic()
    try:
        dist.barrier()
    except Limit:
        print(f"limit after {time.monotonic() - t:.2f}", flush=True)
    time.sleep(2)
else:
    time.sleep(2)
    try:
        dist.barrier()
    except dist.GroupBrokenError as error:
        print("broken", error, flush=True)
sys.exit(6)
""",
        2,
        limit=25,
        env={"MPICOLL_TIMEOUT": "20"},
    )
    assert not job.timed_out, job
    assert "limit after 1." in job.out[0], job
    assert "broken" in job.out[1], job


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [6, 25])
def test_a_long_wait_is_cheap_and_speaks_once(seconds: int) -> None:
    """A rank that waits uses less than a tenth of a core, and says once who is missing."""
    job = run_job(
        HEAD
        + """
dist.init_process_group()
r = dist.get_rank()
dist.barrier()
if r == 2:
    time.sleep(int(sys.argv[1]))
cpu, t = time.process_time(), time.monotonic()
dist.barrier()
print((time.process_time() - cpu) / (time.monotonic() - t), flush=True)
""",
        3,
        limit=30 + seconds,
        args=[str(seconds)],
        env={"MPICOLL_STALL_WARN": "2"},
    )
    assert job.returncode == 0, job
    assert all(float(job.out[rank]) < 0.1 for rank in (0, 1)), job
    assert job.stderr.count("has waited") == 1, job
    assert "rank 2 did not make the matching call" in job.err[0], job


def test_rank_differs_on_settings() -> None:
    """A setting with a value that it does not take raises on all ranks, also when only one of them has it."""
    for who in (-1, 1):
        job = run_job(
            f"""
import os, sys
from mpi4py import MPI
if {who} in (-1, MPI.COMM_WORLD.rank):
    os.environ["MPICOLL_TIMEOUT"] = "soon"
import mpicoll as dist
try:
    dist.init_process_group()
except ValueError as error:
    print("ValueError", error, flush=True)
except dist.CollectiveMismatchError as error:
    print("mismatch", error, flush=True)
os.environ.pop("MPICOLL_TIMEOUT", None)
dist.init_process_group()
dist.barrier()
""",
            2,
            limit=25,
        )
        assert job.returncode == 0, job
        assert "ValueError MPICOLL_TIMEOUT='soon' is no valid value (seconds > 0)" in job.out[1], job
        assert ("ValueError" if who < 0 else "rank 1: init_process_group") in job.out[0], job
