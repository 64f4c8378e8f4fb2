"""Signals whose handlers raise, at random moments of calls of every kind: an error or the right result, never a hang."""

from __future__ import annotations

import pytest
from jobs import run_job

from mpicoll.runtime import native

PROGRAM = """
import collections, random, signal, sys, time
from datetime import timedelta
import numpy as np
from mpi4py import MPI
import mpicoll as dist
from mpicoll.groups import registry
from mpicoll.operations import execution

class Stop(Exception):
    pass

def handler(*_):
    raise Stop

signal.signal(signal.SIGALRM, handler)
execution.NATIVE_BYTES, execution.BLOCKS = 1 << 18, 1  # many pieces
own = MPI.COMM_WORLD.Dup()  # the test's own
me, size = own.rank, own.size
rng = random.Random(int(sys.argv[1]))
seen = collections.Counter()

def call(kind, x, y):
    if kind == "small":
        for _ in range(20):
            dist.all_reduce(x[:4], dist.ReduceOp.MAX)
            dist.barrier()
    elif kind == "large":
        dist.all_reduce(x, dist.ReduceOp.MAX)
        dist.all_gather_into_tensor(np.empty(size * x.size), x)
    elif kind == "async":
        works = [dist.all_reduce(part, dist.ReduceOp.MAX, async_op=True) for part in (x[:4], y)]
        for work in reversed(works):
            work.wait()
        x[:] = size
    elif kind == "plan":
        plan = dist.all_reduce_init(x[:4], dist.ReduceOp.MAX)
        for _ in range(20):
            plan.start()
            plan.wait()
    else:
        other = np.empty_like(y)
        work = dist.isend(y, (me + 1) % size)
        dist.recv(other, (me - 1) % size)
        work.wait()

began = time.monotonic()
while own.bcast(time.monotonic() - began < 15, 0):
    dist.init_process_group(timeout=timedelta(seconds=1), comm=MPI.COMM_WORLD, on_failure="raise")
    kind, victim = rng.choice(("small", "large", "async", "messages", "plan")), rng.randrange(size)
    delay = rng.random() ** 2 * (0.004 if kind in ("small", "plan") else 0.02)
    x, y = np.full(200_000, me + 1.0), np.full(100_000, me + 1.0)
    dist.barrier()
    outcome = "right"
    try:
        if me == victim:
            signal.setitimer(signal.ITIMER_REAL, delay + 1e-6)
        try:
            call(kind, x, y)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        expected = {"small": x[0] == size, "large": (x == size).all(), "async": (y == size).all(), "messages": True}
        expected["plan"] = expected["small"]
        assert expected[kind], (kind, x, y)
    except Stop:
        outcome = "stopped"
        assert me == victim
    except dist.DistError as error:
        outcome = type(error).__name__
    seen[outcome] += 1
    request = own.Ibarrier()
    until = time.monotonic() + 20
    while not request.Test():  # a rank that is through answers the others
        dist.is_initialized()
        time.sleep(0.001)
        assert time.monotonic() < until, "hangs"
    try:
        dist.destroy_process_group()
    except dist.DistError:
        for group in list(registry.state().groups.values()):
            group.unwaited.clear()
        dist.destroy_process_group()
print(dict(seen), flush=True)
# Where the handler strikes before the call is posted, it takes part in the agreement as a wrong argument would; where it
# strikes outside the library, the others can only be late.
errors = {"CollectiveMismatchError", "GroupBrokenError", "DistError", "CollectiveTimeoutError"}
assert set(seen) <= {"right", "stopped", *errors}, seen
assert sum(seen.values()) >= 8, seen
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_handlers_that_raise_at_random_moments(size: int) -> None:
    """The rank that is struck raises what the handler raised or is through; the others get the result or an error."""
    job = run_job(PROGRAM, size, limit=90, args=[str(size)])
    assert not job.timed_out, job
    assert job.returncode == 0, job
    assert "right" in job.stdout, job
    assert "stopped" in job.stdout, job


@pytest.mark.slow
def test_a_message_that_never_comes_is_no_hang() -> None:
    """Messages that nobody received are dropped when a group is made of the same ranks again: within the limit."""
    job = run_job(
        """
from datetime import timedelta
from mpi4py import MPI
import mpicoll as dist
from mpicoll.groups import registry
start = dict(timeout=timedelta(seconds=2), comm=MPI.COMM_WORLD, on_failure="raise")
dist.init_process_group(**start)
if dist.get_rank() == 0:
    registry.state().world.count_sent(1, 0)
dist.destroy_process_group()
try:
    dist.init_process_group(**start)
    dist.barrier()
except dist.DistError as error:
    print(type(error).__name__, flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
dist.init_process_group(**start)
dist.barrier()
print("good", flush=True)
""",
        2,
        limit=30,
    )
    assert job.returncode == 0, job
    assert job.out[1].split() == ["CollectiveTimeoutError", "good"], job
    assert job.out[0].split() in (["GroupBrokenError", "good"], ["CollectiveTimeoutError", "good"]), job


def test_handlers_in_c_outlive_a_wait() -> None:
    """faulthandler.register, which Python's table of handlers knows nothing of, still dumps after a long wait and a call."""
    job = run_job(
        """
import faulthandler, os, signal, time
import numpy as np
import mpicoll as dist
dist.init_process_group()
signal.signal(signal.SIGUSR2, lambda *_: print("in Python", flush=True))
faulthandler.register(signal.SIGUSR1)
faulthandler.register(signal.SIGUSR2, chain=True)
if dist.get_rank() == 1:
    time.sleep(0.3)
dist.all_reduce(np.ones(100_000))  # the wait takes SIGTERM and SIGUSR1, the transfer what Python handles
if dist.get_rank() == 0:
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        os.kill(os.getpid(), number)
dist.barrier()
print("alive", flush=True)
""",
        2,
        limit=20,
    )
    assert not job.timed_out, job
    assert job.returncode == 0, job
    assert job.err[0].count("Current thread") == 2, job
    assert job.out[0].split("\n")[:2] == ["in Python", "alive"], job
    assert job.err[1] == "", job


def test_a_child_that_another_thread_forks_during_a_wait() -> None:
    """SIGTERM ends it and Ctrl-C and the program's handlers reach it, though the rank's main thread waits."""
    job = run_job(
        """
import os, signal, threading, time
import numpy as np
import mpicoll as dist
from mpicoll.runtime import signals
dist.init_process_group()
signal.signal(signal.SIGUSR2, lambda *_: print("handler", flush=True))

def child(number):
    pid = os.fork()
    if pid == 0:
        try:
            if number == signal.SIGUSR2:
                os.kill(os.getpid(), number)
                print("depth", signals.guard.depth, flush=True)
                os._exit(7)
            print("ready", flush=True)
            time.sleep(30)
        except KeyboardInterrupt:
            os._exit(8)
        os._exit(9)
    if number == signal.SIGINT:
        time.sleep(0.5)
    if number != signal.SIGUSR2:
        os.kill(pid, number)  # SIGTERM as soon as the child is there
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def fork():
    time.sleep(0.3)
    print([child(number) for number in (*[signal.SIGTERM] * 20, signal.SIGINT, signal.SIGUSR2)][-4:], flush=True)

if dist.get_rank() == 0:
    thread = threading.Thread(target=fork)
    thread.start()
else:
    time.sleep(1.5)
dist.all_reduce(np.ones(2))
if dist.get_rank() == 0:
    thread.join()
dist.barrier()
""",
        2,
        limit=20,
    )
    assert not job.timed_out, job
    assert job.returncode == 0, job
    assert "[-15, -15, 8, 7]" in job.out[0], job
    assert "handler\ndepth 0" in job.out[0], job


STRUCK = """
import os
import time
from datetime import timedelta
import numpy as np
from mpi4py import MPI
import mpicoll as dist
from mpicoll.checks.memory_in_use import claims
from mpicoll.groups import registry
from mpicoll.operations import execution
from mpicoll.operations.request import Request
from mpicoll.operations.work import Work
from mpicoll.transports.mpi.control import MpiControl
from mpicoll.transports.mpi.collectives import EagerMpiSchedule, persistent_collectives
from mpicoll.runtime import waiting
from mpicoll.transports.shm.control import RingRound

class Stop(Exception):
    pass

own = MPI.COMM_WORLD.Dup()
x, y, large = np.ones(1), np.ones(1), np.ones(1000)

def made_again():
    return dist.all_reduce(x)

CALLS = {
    "general": lambda: dist.all_reduce(x, dist.ReduceOp.PREMUL_SUM(1.0)),  # no call that is prepared
    "again": made_again,
    "async": lambda: dist.all_reduce(large, async_op=True).wait(),
    "later": lambda: dist.all_reduce(x, async_op=True).wait(),
    "several": lambda: [work.wait() for work in [dist.all_reduce(each, async_op=True) for each in (x, y)]],
    "group": lambda: dist.new_group([0, 1]),
}
PLACES = {
    "counted": (execution, "set_print"),
    "conducted": (Request, "start"),
    "issued": (execution, "collectives_are_pending"),
    "numbered": (Request, "__init__"),
    "begun": (Work, "__init__"),  # the extension has posted the call
    "begun over another": (Work, "__init__"),
    "posted": (Request, "Test"),
    "looks": (Request, "Test"),
    "finished": (RingRound, "Test"),  # in Python, since the other comes late
    "filled": (MpiControl, "fill"),
    "planned": (EagerMpiSchedule, "_post"),
}

def strike(place):
    # As a handler that raises just when this function has done what it does.
    home, name = PLACES[place]
    found = getattr(home, name)
    before = ["another"] if place == "begun over another" else []

    def struck(*args, **options):
        if before:
            before.pop()
            return found(*args, **options)
        setattr(home, name, found)
        found(*args, **options)
        raise Stop

    if own.rank == 0:
        setattr(home, name, struck)

AGAIN = [("again", "finished")]
LATER = [("later", "begun"), ("later", "looks"), ("several", "begun over another")]
through_ring = os.environ["THROUGH"] != "MPI"
if not through_ring:
    LATER = [("later", "numbered"), ("later", "posted")]
    AGAIN = [("again", "filled")]
    if persistent_collectives():  # else it goes the long way
        AGAIN.append(("again", "planned"))
for call, place in [("general", "counted"), ("general", "issued"), *AGAIN,
                    *LATER, ("async", "numbered"), ("async", "posted"), ("group", "counted"), ("group", "conducted")]:
    dist.init_process_group(timeout=timedelta(seconds=10), comm=MPI.COMM_WORLD, on_failure="raise")
    if call == "again":
        for _ in range(3):
            made_again()
    said, start = [], time.monotonic()
    own.Barrier()
    strike(place)
    if place in ("looks", "finished") and own.rank == 1:
        time.sleep(0.5)  # a rank withdraws after 0.1 s
    for each in (CALLS[call], dist.barrier):
        try:
            each()
            said.append("right")
        except (Stop, dist.DistError) as error:
            said.append(type(error).__name__)
    said.append(time.monotonic() - start < 5)
    struck, other = own.allgather(said)
    assert struck == ["Stop", "GroupBrokenError", True], (call, place, struck, other)
    # Of what has been posted the other may see the end.
    ended = place in ("posted", "planned", "looks", "finished") or (call in ("later", "several") and through_ring)
    assert other[0] == "GroupBrokenError" or ended, (call, place, struck, other)
    assert other[1:] == ["GroupBrokenError", True], (call, place, struck, other)
    for group in list(registry.state().groups.values()):
        group.unwaited.clear()
    claims._sweep()
    if call == "later":  # nothing of it is left
        assert not claims.active, (place, claims.active)
        assert not waiting.pending, (place, waiting.pending)
    elif call == "several" and own.rank == 0:  # nor of the second
        assert all(each.array is x for each in claims.active), (place, claims.active)
        assert all(each.recv is x for each in waiting.pending), (place, waiting.pending)
    dist.destroy_process_group()
print("through", flush=True)
"""


@pytest.mark.parametrize(
    ("engine", "extension"),
    [("auto", "auto"), ("auto", "off"), ("mpi", "auto")],
    ids=["by shared memory", "without the extension", "by MPI"],
)
def test_a_call_that_is_struck_before_it_is_waited_for(engine: str, extension: str) -> None:
    """A handler that raises once this rank has begun a call, before it waits: its group is broken, on all ranks at once."""
    through = "MPI" if engine == "mpi" or extension == "off" or native.found is None else "shared memory"
    env = {"MPICOLL_ENGINE": engine, "MPICOLL_EXTENSION": extension, "THROUGH": through}
    job = run_job(STRUCK, 2, limit=60, env=env)
    assert not job.timed_out, job
    assert job.returncode == 0, job
    assert all("through" in out for out in job.out), job


COMPLETE = """
import os, signal, sys, threading, time
from pathlib import Path
import numpy as np
import mpicoll as dist
from mpicoll.runtime import waiting

waiting.GIVE_UP_AFTER = 10  # however late the other rank is on a busy machine
dist.init_process_group()
r, n = dist.get_rank(), dist.get_world_size()
x, out = np.full(3, r + 1.0), [np.zeros(3) for _ in range(n)]
some = [np.full(3, r + 1.0), np.full(2, r + 1.0)]
planned = np.full(4, r + 1.0)
plan = dist.all_reduce_init(planned)

def by_plan():
    if r == 0:
        plan.start()
        plan.wait()
    else:  # the long way: its array is not in one piece of memory
        apart = np.full(8, r + 1.0)[::2]
        dist.all_reduce(apart)

def gathered():
    dist.all_gather(out, x)

def coalesced():
    some[0][:] = some[1][:] = r + 1
    dist.all_reduce_coalesced(some)

def interrupt(done):
    # Once the main thread waits, so that the other rank is sure to be missing.
    main = threading.main_thread().ident
    while True:
        frame = sys._current_frames()[main]
        while frame is not None and frame.f_code is not waiting._wait_long.__code__:
            frame = frame.f_back
        if frame is not None:
            break
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.03)
    done.touch()

for call in (gathered, coalesced, by_plan):
    for turn in range(3):
        for each in out:
            each[:] = 0
        planned[:] = r + 1
        dist.barrier()
        done = Path(os.environ["TEST_JOB_FOLDER"], f"{call.__name__}-{turn}")
        if r == 0:
            threading.Thread(target=interrupt, args=(done,)).start()
        while r == 1 and not done.exists():
            time.sleep(0.01)
        try:
            call()
            if r == 0:
                time.sleep(1)
                raise SystemExit("not interrupted")
        except KeyboardInterrupt:
            assert r == 0
        assert dist.group.WORLD.broken is None, (call, turn)
        right = {
            gathered: lambda: all((each == rank + 1).all() for rank, each in enumerate(out)),
            coalesced: lambda: all((each == n * (n + 1) / 2).all() for each in some),
            by_plan: lambda: r != 0 or (planned == n * (n + 1) / 2).all(),
        }[call]
        assert right(), (call, turn)
        dist.barrier()
        assert right(), (call, turn)
print("through", flush=True)
"""


@pytest.mark.parametrize(
    "engine", ["auto", pytest.param("mpi", marks=pytest.mark.slow)], ids=["by shared memory", "by MPI"]
)
def test_control_c_in_a_call_that_completes_all_the_same(engine: str) -> None:
    """It is raised when the call is over, with all its results there, and nothing left under way."""
    job = run_job(COMPLETE, 2, limit=40, env={"MPICOLL_ENGINE": engine})
    assert not job.timed_out, job
    assert job.returncode == 0, job
    assert all("through" in out for out in job.out), job
