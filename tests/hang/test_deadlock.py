"""Deadlocks that are certain are reported at once, on every rank involved; what only looks like one is left alone."""

from __future__ import annotations

import re
import signal
import time

import pytest
from jobs import RunningJob, run_job

HEAD = """
import _thread, sys, threading, time
from datetime import timedelta
import numpy as np
import mpicoll as dist
dist.init_process_group()
r, n = dist.get_rank(), dist.get_world_size()
x, big = np.ones(4), np.ones(400_000)
right, left = (r + 1) % n, (r - 1) % n
"""

STUCK = {
    "a cycle of receives": (
        "dist.recv(x, right); dist.send(x, left)",
        "recv float64[4] from rank 1 tag 0 at job.py:",
    ),
    "head-to-head large sends": (
        "dist.send(big, right); dist.recv(big, left)",
        "send float64[400000] to rank 1 tag 0 at job.py:",
    ),
    "a collective against a receive": ("dist.recv(x, 1) if r == 0 else dist.barrier()", "needs rank 1 to send"),
    "two groups in opposite order": (
        "a, b = dist.new_group(), dist.new_group()\n"
        "for group in (a, b) if r else (b, a): dist.all_reduce(x, group=group)",
        "all_reduce #1 float64[4] SUM on group",
    ),
    "overlapping groups in a cycle": (
        "groups = [dist.new_group([i, (i + 1) % n]) for i in range(n)]\n"
        "for group in (groups[r], groups[left]): dist.barrier(group)",
        "barrier #1 on group [",
    ),
    "a tag that nobody sends": (
        "if r == 0: dist.send(big, 1, tag=1); dist.barrier()\nelif r == 1: dist.recv(big, 0, tag=2)\nelse: dist.barrier()",
        "recv float64[400000] from rank 0 tag 2",
    ),
    "receives from anybody on all ranks": ("dist.recv(x)", "needs a message from any rank"),
    "a receive behind one that has its message": (
        "if r == 0: works = [dist.irecv(np.ones(4), 1) for _ in range(2)]; works[1].wait()\n"
        "elif r == 1: dist.send(x, 0); time.sleep(0.2)\n"
        "dist.barrier()",
        "irecv float64[4] from rank 1 tag 0 at job.py:",
    ),
    "an asynchronous collective against a receive": (
        "dist.all_reduce(x, async_op=True).wait() if r == 0 else dist.recv(x, 0)",
        "needs rank",
    ),
}


SOME = list(STUCK)[::3]
"""Those of `make test`."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in SOME)) for name in STUCK])
def test_a_certain_deadlock(name: str) -> None:
    """Every rank raises within two seconds and names the calls and their lines.

    Two ranks may be a cycle before the third rank waits; the third rank then raises what these two have told it.
    """
    source, words = STUCK[name]
    job = run_job(
        HEAD
        + "dist.barrier()\n"
        + "t = time.monotonic()\ntry:\n"
        + "".join(f"    {line}\n" for line in source.splitlines())
        + """
except dist.DeadlockError as error:
    assert r in error.ranks and any(r in call["ranks"] for call in error.calls), (error.ranks, error.calls)
    print(f"{time.monotonic() - t:.2f} {error}", flush=True)
except dist.GroupBrokenError as error:
    print(f"{time.monotonic() - t:.2f} outside the cycle: {error}", flush=True)
time.sleep(1)
sys.exit(7)
""",
        3,
        limit=30,
        env={"MPICOLL_TIMEOUT": "20"},
    )
    assert not job.timed_out, job
    assert job.returncode == 7, job
    outside = [rank for rank, out in enumerate(job.out) if "outside the cycle" in out]
    assert len(outside) <= 1, job
    for rank, out in enumerate(job.out):
        assert "deadlock: ranks" in out, job
        assert "job.py:" in out, job
        assert float(out.split()[0]) < 2, job
        if rank in outside:
            cycle = ("1-2", "0, 2", "0-1")[rank]
            assert f"gave the group up: deadlock: ranks {cycle} wait for each other" in out, job
        else:
            assert words in out, job


@pytest.mark.slow
def test_a_progress_bar_does_not_hide_a_deadlock() -> None:
    """With a thread that only sleeps and prints, a deadlock is certain once nothing has changed for two seconds."""
    job = run_job(
        HEAD
        + """
def bar():
    while True:
        print(".", end="", file=sys.stderr, flush=True)
        time.sleep(0.1)

threading.Thread(target=bar, daemon=True).start()
dist.barrier()
t = time.monotonic()
try:
    dist.recv(x, right)
    dist.send(x, left)
except dist.DeadlockError as error:
    assert error.ranks == list(range(n)), error.ranks
    print(f"{time.monotonic() - t:.2f} {error}", flush=True)
time.sleep(1)
sys.exit(7)
""",
        3,
        limit=30,
        env={"MPICOLL_TIMEOUT": "20"},
    )
    assert not job.timed_out, job
    assert job.returncode == 7, job
    for out in job.out:
        assert "deadlock: ranks 0-2 wait for each other" in out, job
        assert "recv float64[4] from rank 1 tag 0 at job.py:" in out, job
        assert re.fullmatch(r"Other threads are alive; no state has changed for 2\.\d s\.", out.splitlines()[-1]), job
        assert 2 <= float(out.split()[0]) < 8, job


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        "threading.Thread(target=later, args=(4,), daemon=True).start()",
        "threading.Timer(12, late).start()",
        "helper = threading.Thread(target=later, args=(12,)); helper.start()",
        "loader = Loader(); threading.Thread(target=loader.run, daemon=True).start()",
    ],
)
def test_a_thread_that_makes_its_first_call_late(how: str) -> None:
    """A rank waits, and a thread of it that has made no call so far makes the call that the others need: no deadlock."""
    job = run_job(
        HEAD
        + f"""
def late():
    dist.send(x, 1)
def later(seconds):
    time.sleep(seconds)
    late()
class Loader:
    def __init__(self):
        self.communicate = dist
    def run(self):
        time.sleep(4)
        self.give()
    def give(self):
        self.communicate.send(x, 1)
if r == 0:
    {how}
    dist.recv(x, 1, tag=9)
else:
    dist.recv(x, 0)
    dist.send(x, 0, tag=9)
dist.barrier()
""",
        2,
        limit=40,
    )
    assert not job.timed_out, job
    assert job.returncode == 0, job


LATE = (
    HEAD
    + """
dist.barrier()
if r == n - 1:
    time.sleep(float(sys.argv[1]))
began = time.time()
try:
    dist.recv(x, right)
except dist.DeadlockError:
    print("found", time.time(), "began", began, flush=True)
time.sleep(2)
sys.exit(7)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("size", [5, 24])
def test_the_last_rank_to_block_is_found_at_once(size: int) -> None:
    """A deadlock is certain soon after its last rank has blocked: far sooner than the wait of the other ranks and their limit."""
    waited = 15
    job = run_job(LATE, size, limit=80, args=[str(waited)], env={"MPICOLL_TIMEOUT": "50"})
    assert not job.timed_out, job
    assert job.returncode == 7, job
    began = float(job.out[-1].split()[3])
    found = [float(out.split()[1]) - began for out in job.out]
    print(f"{size} ranks: {min(found):.2f} to {max(found):.2f} s after the last one blocked")
    assert max(found) < waited / 2, job


RIGHT = (
    HEAD
    + """
def ring(data):
    other = np.empty_like(data)
    work = dist.irecv(other, left)
    dist.send(data, right)
    work.wait()

def straggle(seconds=0.6):
    if r == n - 1:
        time.sleep(seconds)

# A straggler, while the others wait in different things for it and for each other.
straggle()
ring(x)
straggle()
ring(big)
# A long chain of waiting without a cycle.
if r == n - 1:
    time.sleep(0.7)
else:
    dist.recv(x, r + 1)
if r > 0:
    dist.send(x, r - 1)
dist.barrier()
# Any source, uneven counts.
if r == 0:
    for _ in range(sum(range(1, n))):
        dist.recv(x)
else:
    for i in range(r):
        time.sleep(0.25)
        dist.send(x, 0)
# Sent before the receive, and received after another call.
if r == 0:
    dist.send(x, 1, tag=5)
straggle()
dist.barrier()
if r == 1:
    dist.recv(x, 0, tag=5)
# Head to head, in a batch, and one side late.
straggle()
buffer = np.empty_like(big)
for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, big, right), dist.P2POp(dist.irecv, buffer, left)]):
    work.wait()
# A receive that is matched while its rank waits in a collective that needs the sender.
if r == 0:
    work = dist.irecv(buffer, 1)
    dist.barrier()
    work.wait()
else:
    if r == 1:
        time.sleep(0.4)
        dist.send(big, 0)
    dist.barrier()
# Overlapping groups in a consistent order, uneven work in them.
groups = [dist.new_group([i, i + 1]) for i in range(n - 1)]
for i, group in enumerate(groups):
    if r in (i, i + 1):
        time.sleep(0.2 * r)
        dist.all_reduce(x, group=group)
# Many asynchronous calls waited for in another order, one rank late.
works = [dist.all_reduce(np.ones(3), async_op=True) for _ in range(20)]
straggle()
for work in reversed(works):
    work.wait()
# One rank asynchronous, the others not.
if r == 0:
    work = dist.all_reduce(x, async_op=True)
    time.sleep(0.4)
    work.wait()
else:
    dist.all_reduce(x)
# A thread that waits beside one that will act.
group = dist.new_group()
if r == 0:
    thread = threading.Thread(target=lambda: dist.recv(np.empty(4), 1, group=group))
    thread.start()
    time.sleep(0.6)
    dist.send(x, 1, group=group)
    thread.join()
elif r == 1:
    dist.recv(x, 0, group=group)
    dist.send(x, 0, group=group)
# A thread each with a group of its own, in no common order.
def work_in(group, pause):
    for _ in range(3):
        time.sleep(pause)
        dist.all_reduce(np.ones(2), group=group)
own = [dist.new_group() for _ in range(3)]
threads = [threading.Thread(target=work_in, args=(g, 0.15 * ((i + r) % 3))) for i, g in enumerate(own)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
# A busy peer that holds the interpreter lock.
if r == 1:
    sum(i * i for i in range(6_000_000))
dist.barrier()
# A group that some have destroyed already, while one is still on its way out of its last call.
for busy in range(n):
    group = dist.new_group()
    if r == busy:
        work = dist.reduce(x, 0, group=group, async_op=True)
        time.sleep(0.4)
        work.wait()
    else:
        dist.reduce(x, 0, group=group)
    dist.destroy_process_group(group)
    dist.barrier()
# A thread that the threading module does not know, and that has not used the library so far.
if r == 0:
    _thread.start_new_thread(lambda: (time.sleep(0.5), dist.send(x, 1, tag=1)), ())
    dist.recv(big, 1, tag=2)
elif r == 1:
    dist.recv(x, 0, tag=1)
    dist.send(big, 0, tag=2)
dist.barrier()
# A callback that computes, while its rank waits in a send that has been received by now.
if r == 0:
    dist.all_reduce(x, async_op=True).get_future().add_done_callback(lambda future: time.sleep(0.5))
    dist.send(big, 1)
else:
    if r == 1:
        time.sleep(0.4)
    dist.all_reduce(x)
    if r == 1:
        dist.recv(big, 0)
dist.barrier()
# Waits that end by themselves: only then the rank makes the call that the others wait for.
sent = dist.all_reduce(x, async_op=True) if r == 0 else None
if r == 0:
    try:
        sent.get_future().result(timeout=1)
    except TimeoutError:
        dist.send(x + 1, 1)
elif r == 1:
    dist.recv(x, 0)
dist.all_reduce(x) if r else sent.wait()
print("done", flush=True)
# A rank that leaves early and is not needed; a sender that is gone before its message is received.
if r == n - 1:
    dist.send(x, 0, tag=9)
    sys.exit(0)
time.sleep(0.5)
if r == 0:
    dist.recv(x, n - 1, tag=9)
    print("received", flush=True)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_what_only_looks_like_a_deadlock(size: int) -> None:
    """Correct programs that wait long and in many ways end well, and nothing is said about them."""
    job = run_job(RIGHT, size, limit=60, env={"MPICOLL_TIMEOUT": "30"})
    assert not job.timed_out, job
    assert job.returncode == 0, job
    assert all("done" in out for out in job.out), job
    assert "received" in job.out[0], job
    assert job.err == [""] * size, job


STOPPED = {
    "what it waits for comes meanwhile": (
        1,
        """
if r == 1:
    print("waits", flush=True)
    dist.recv(x, 0, tag=1)
    dist.send(x, 0, tag=2)
elif r == 0:
    time.sleep(1.5)
    dist.send(x, 1, tag=1)
    dist.recv(x, 1, tag=2)
dist.barrier()
""",
    ),
    "the others are through with its collective": (
        1,
        """
group = dist.new_group()
if r == 1:
    print("waits", flush=True)
else:
    time.sleep(1.5)
dist.all_reduce(x, group=group)
dist.recv(x, left, tag=1) if r else dist.send(x, right, tag=1)
dist.send(x, right, tag=1) if r else dist.recv(x, left, tag=1)
""",
    ),
    "a thread of its own would release it": (
        1,
        """
if r == 1:
    threading.Thread(target=lambda: (time.sleep(1.5), dist.send(x, 0, tag=2))).start()
    print("waits", flush=True)
    dist.recv(np.empty(4), 0, tag=1)
elif r == 0:
    dist.recv(x, 1, tag=2)
    dist.send(x, 1, tag=1)
dist.barrier()
""",
    ),
    "a thread of its own would release it, and it searches itself": (
        0,
        """
if r == 0:
    threading.Thread(target=lambda: (time.sleep(1.5), dist.send(x, 1, tag=2))).start()
    print("waits", flush=True)
    dist.recv(np.empty(4), 1, tag=1)
elif r == 1:
    dist.recv(x, 0, tag=2)
    dist.send(x, 0, tag=1)
dist.barrier()
""",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STOPPED)
def test_a_debugger(name: str) -> None:
    """A rank that is stopped while it waits, for longer than a search takes, is no deadlock; all ends well when it goes on."""
    rank, source = STOPPED[name]

    def debug(job: RunningJob) -> None:
        job.wait_for("waits", rank)
        time.sleep(0.5)
        job.signal(signal.SIGSTOP, rank)
        time.sleep(4)
        assert job.process.poll() is None, "the job has ended"
        job.signal(signal.SIGCONT, rank)

    job = run_job(
        HEAD + source + 'print("done", flush=True)\n', 3, limit=30, env={"MPICOLL_TIMEOUT": "20"}, meanwhile=debug
    )
    assert not job.timed_out, job
    assert job.returncode == 0, job
    assert all("done" in out for out in job.out), job
    assert job.err == ["", "", ""], job


@pytest.mark.slow
@pytest.mark.parametrize(("level", "engine"), [("roll", "mpi"), ("off", "mpi"), ("roll", "auto"), ("off", "auto")])
def test_different_calls_at_every_level(level: str, engine: str) -> None:
    """Ranks that hang in different calls that nobody compares are found by their waiting; on a node they are compared."""
    job = run_job(
        HEAD.replace("init_process_group()", f"init_process_group(check={level!r})")
        + """
dist.all_reduce(x)
try:
    dist.all_reduce(x) if r else dist.barrier()
except (dist.DeadlockError, dist.CollectiveMismatchError, dist.GroupBrokenError) as error:
    print(error, flush=True)
    time.sleep(1)
    sys.exit(7)
""",
        3,
        limit=30,
        env={"MPICOLL_TIMEOUT": "20", "MPICOLL_ENGINE": engine},
    )
    assert not job.timed_out, job
    assert job.returncode == 7, job
    assert job.seconds < 15, job
    # One of the two that agree may come when the others have given the group up.
    late = [rank for rank in (1, 2) if "gave the group up: deadlock: ranks" in job.out[rank]]
    assert len(late) < 2, job
    for rank in {0, 1, 2}.difference(late):
        said = job.out[rank].replace(">", "").replace("<", "")  # which mark what differs
        assert "barrier #2 " in said, job
        assert "all_reduce #2 float64[4] SUM" in said, job
