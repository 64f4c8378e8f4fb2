"""The progress thread in programs of their own: how they end, and what they are told. Each job has a hard limit."""

from __future__ import annotations

import textwrap

import pytest
from jobs import run_job

THREAD = {"MPICOLL_PROGRESS": "thread"}
HEAD = """
import concurrent.futures, os, signal, sys, threading, time
from datetime import timedelta
import numpy as np
import mpicoll as dist
from mpi4py import MPI
dist.init_process_group(timeout=timedelta(seconds=20))
r, n = dist.get_rank(), dist.get_world_size()

def until(condition):
    end = time.monotonic() + 20
    while not condition():
        if time.monotonic() > end:
            sys.exit("it never came true")
        time.sleep(0.001)

def came(future):
    # Without a look of the library, which would move it on.
    return lambda: concurrent.futures.Future.done(future)

def thread():
    return next((each for each in threading.enumerate() if each.name == "mpicoll-progress"), None)
"""


def test_a_value_that_it_does_not_take() -> None:
    """init_process_group raises on all ranks, also where only one has it."""
    program = """
    import os
    if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
        os.environ["MPICOLL_PROGRESS"] = "always"
    import mpicoll as dist
    try:
        dist.init_process_group()
    except (ValueError, dist.DistError) as error:
        print(type(error).__name__, error, flush=True)
    """
    job = run_job(program, 2, limit=30)
    assert not job.timed_out, job
    assert "ValueError MPICOLL_PROGRESS='always' is no valid value (none or thread)" in job.out[1], job
    assert "MPICOLL_PROGRESS='always'" in " ".join(job.out[0].split()), job


def test_an_mpi_without_threads() -> None:
    """One line says that the setting has no effect, and all goes on as without it."""
    program = HEAD.replace(
        "from mpi4py import MPI\n", "from mpi4py import MPI\nMPI.Query_thread = lambda: MPI.THREAD_SERIALIZED\n"
    )
    job = run_job(
        program + "dist.all_reduce(np.ones(100_000), async_op=True).wait()\nprint(thread())\n", 2, limit=30, env=THREAD
    )
    assert job.returncode == 0, job
    for rank in range(2):
        assert job.out[rank] == "None\n", job
        assert f"mpicoll: rank {rank}: MPICOLL_PROGRESS=thread has no effect" in job.err[rank], job


@pytest.mark.slow
def test_it_sleeps_while_nothing_is_under_way() -> None:
    """The kernel has not once run it, and the process has hardly used the processor."""
    job = run_job(
        HEAD
        + """
for _ in range(3):
    dist.all_reduce(np.ones(200_000), async_op=True).wait()
if n > 1:
    until(thread)
tid = thread().native_id
switches = lambda: [line for line in open(f"/proc/self/task/{tid}/status") if "ctxt_switches" in line]
def asleep():
    before = switches()
    time.sleep(0.1)
    return switches() == before
until(asleep)
before, used = switches(), time.process_time()
time.sleep(1)
print(switches() == before, time.process_time() - used < 0.3)
""",
        2,
        limit=60,
        env=THREAD,
    )
    assert job.returncode == 0, job
    assert job.out == ["True True\n"] * 2, job


@pytest.mark.parametrize(
    "ending",
    [
        "",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("sys.exit(3)", "raise ValueError('of its own')", "MPI.Finalize()")
        ),
    ],
)
def test_a_program_ends_with_operations_under_way(ending: str) -> None:
    """It ends at once, as it does without the thread: named are the calls that nobody waited for, or what has failed."""
    job = run_job(
        HEAD
        + f"""
if r == 0:
    works = [dist.all_reduce(np.ones(k), async_op=True) for k in (3, 50_000, 400_000)]
    works.append(dist.irecv(np.ones(4), 1))
    until(thread)
    {ending or "pass"}
else:
    time.sleep(0.5)
    dist.all_reduce(np.ones(3))
    {"" if ending else "time.sleep(0.5)"}
    {"sys.exit(3)" if ending == "sys.exit(3)" else "MPI.Finalize()" if "Final" in ending else "pass"}
""",
        2,
        limit=40,
        env={**THREAD, "MPICOLL_EXIT_GRACE": "3"},
    )
    assert not job.timed_out, job
    assert job.returncode != 0, job
    assert not job.left_running, job
    assert "Fatal Python error" not in job.stderr, job
    if ending in ("", "MPI.Finalize()"):
        assert "the program ended with operations that were never waited for: all_reduce issued at" in job.stderr, job
    if ending.startswith("raise"):
        assert job.stderr.count("ValueError: of its own") >= 1, job


def test_a_program_ends_well() -> None:
    """Whether it destroys its groups, or has a last operation complete while it ends, or computes; twenty times."""
    job = run_job(
        HEAD
        + """
for k in range(20):
    work = dist.all_reduce(np.ones(1000 * k + 1), async_op=True)
    if k % 2:
        until(came(work.get_future()))
    work.wait()
last = dist.all_reduce(np.ones(300_000), async_op=True)
last.get_future()  # observed, and perhaps still under way at the end
last.wait()
print("over", flush=True)
""",
        3,
        limit=60,
        env=THREAD,
    )
    assert job.returncode == 0, job
    assert job.out == ["over\n"] * 3, job
    assert not any(job.err), job


def test_a_fork() -> None:
    """A child that is forked while operations are under way has no such thread and ends well; the parent's go on."""
    job = run_job(
        HEAD
        + """
x = np.ones(400_000)
if r > 0:
    MPI.COMM_WORLD.Barrier()
work = dist.all_reduce(x, async_op=True)
if r == 0:
    if n > 1:
        until(thread)
    for how in (0, 1):
        child = os.fork()
        if child == 0:
            try:
                dist.all_reduce(np.ones(3), async_op=True)
            except RuntimeError as error:
                assert "forked child" in str(error)
                assert thread() is None
                os._exit(5) if how else sys.exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    MPI.COMM_WORLD.Barrier()
until(came(work.get_future()))
assert (x == n).all()
work.wait()
print("over", flush=True)
""",
        2,
        limit=60,
        env=THREAD,
    )
    assert job.returncode == 0, job
    assert job.out == ["over\n"] * 2, job


def test_a_peer_that_fails_is_raised_by_wait() -> None:
    """Not by the thread, which goes on with other groups' operations: by the wait for the one that cannot end."""
    job = run_job(
        HEAD
        + """
if r == 1:
    until(lambda: os.path.exists(sys.argv[0] + ".issued"))
    raise ValueError("of its own")
work = dist.all_reduce(np.ones(50_000), async_op=True)
until(thread)
open(sys.argv[0] + ".issued", "w").close()
try:
    work.wait()
except dist.PeerFailedError as error:
    print("told", "ValueError: of its own" in " ".join(str(error).split()), thread() is not None, flush=True)
    raise
""",
        2,
        limit=60,
        env={**THREAD, "MPICOLL_EXIT_GRACE": "3"},
    )
    assert not job.timed_out, job
    assert job.returncode == 1, job
    assert job.out[0] == "told True True\n", job


@pytest.mark.slow
def test_a_limit_holds() -> None:
    """The wait for an operation that the others never join ends at its limit, with the group broken."""
    job = run_job(
        HEAD
        + """
if r == 0:
    work = dist.all_reduce(np.ones(50_000), async_op=True)
    until(thread)
    try:
        work.wait(timedelta(seconds=0.5))
    except dist.CollectiveTimeoutError as error:
        print("told", "500ms in all_reduce" in " ".join(str(error).split()), flush=True)
else:
    time.sleep(3)
sys.exit(4)
""",
        2,
        limit=60,
        env=THREAD,
    )
    assert not job.timed_out, job
    assert job.returncode == 4, job
    assert job.out[0] == "told True\n", job


@pytest.mark.slow
def test_certainty() -> None:
    """A rank that computes, with something under way, is not blocked; ranks that wait for each other for ever are."""
    job = run_job(
        HEAD
        + """
works = [dist.all_reduce(np.ones(k), async_op=True) for k in (3, 50_000)]
if r == 0:
    dist.recv(np.ones(2), 1)  # while rank 1 computes
    print("received", flush=True)
else:
    extra = dist.irecv(np.ones(1), 0, tag=7)  # nobody sends it yet
    time.sleep(1.5)
    dist.send(np.ones(2), 0)
for work in works:
    work.wait()
if r == 0:
    dist.send(np.ones(1), 1, tag=7)
else:
    extra.wait()
group = dist.new_group()
late = [dist.all_reduce(np.ones(50_000), group=group, async_op=True)] if r == 0 else []  # rank 1 will not come to it
try:
    dist.recv(np.ones(3), 1 - r)
except dist.DeadlockError as error:
    print("certain", flush=True)
sys.exit(4)
""",
        2,
        limit=60,
        env=THREAD,
    )
    assert not job.timed_out, job
    assert job.returncode == 4, job
    assert job.out == ["received\ncertain\n", "certain\n"], job


def test_ctrl_c_and_handlers_that_raise() -> None:
    """A handler that raises while the program computes strikes the program, and no operation is lost by it."""
    job = run_job(
        HEAD
        + """
class Alarm(Exception):
    pass

def handle(number, frame):
    raise Alarm

signal.signal(signal.SIGALRM, handle)
struck, x = 0, np.zeros(60_000)
for k in range(30):
    x[:] = r + 1.0
    dist.barrier()
    work = dist.all_reduce(x, async_op=True)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.002)
        end = time.monotonic() + 0.01
        while True:  # as Python 3.13 wants it: cpython#130279
            if time.monotonic() >= end:
                break
            sum(range(100))
        time.sleep(5)
    except Alarm:
        struck += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    work.wait()
    assert (x == n * (n + 1) / 2).all(), k
print(struck, flush=True)
""",
        2,
        limit=90,
        env=THREAD,
    )
    assert job.returncode == 0, job
    assert job.out == ["30\n"] * 2, job


def test_a_callback_may_take_its_time() -> None:
    """What runs in the thread may still release others: no deadlock is certain meanwhile, and its value is not lost."""
    program = HEAD + textwrap.dedent("""
    x = np.zeros(4)
    if r == 0:
        future = dist.irecv(x, 1, tag=1).get_future()

        def callback(done):
            time.sleep(1.5)
            dist.send(x + 1, 1, tag=2)
            return 42

        later = future.then(callback)
        until(came(future))
        dist.recv(x, 1, tag=3)
        assert (x == 2).all()
        assert later.result() == 42
    else:
        time.sleep(0.3)
        dist.send(x, 0, tag=1)
        dist.recv(x, 0, tag=2)
        dist.send(x + 1, 0, tag=3)
    print("through", flush=True)
    """)
    job = run_job(program, 2, limit=30, env=THREAD)
    assert not job.timed_out, job
    assert job.returncode == 0, job
    assert all("through" in out for out in job.out), job
