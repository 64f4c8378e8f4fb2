"""Messages that do not fit, and senders that are gone: what must end on every rank, and what must simply work."""

from __future__ import annotations

import re
import signal
import time

import pytest
from jobs import RunningJob, run_job

HEAD = """
import sys, time
import numpy as np
import mpicoll as dist
dist.init_process_group()
r, n = dist.get_rank(), dist.get_world_size()
"""


@pytest.mark.parametrize("count", [4, 50_000])
def test_a_wrong_dtype_that_nobody_handles(count: int) -> None:
    """The receiver's error names both sides and their lines; the sender, wherever it waits, learns that it failed."""
    job = run_job(
        HEAD
        + f"""
if r == 0:
    dist.send(np.zeros({count}, "f"), 1)
elif r == 1:
    dist.recv(np.zeros({count}), 0)
dist.barrier()
""",
        3,
        limit=20,
        env={"MPICOLL_TIMEOUT": "15"},
    )
    assert not job.timed_out, job
    assert job.returncode == 1, job
    assert job.seconds < 10, job
    mismatch = f"rank 0 sent float32, {count} elements (tag 0, send at "
    assert f"CollectiveMismatchError: recv on group WORLD: {mismatch}" in job.err[1], job
    assert f"of float64, {count} elements at " in job.err[1], job
    assert job.err[1].count("job.py:9)") == 1, job
    for rank in (0, 2):
        assert "PeerFailedError: rank 1 failed: CollectiveMismatchError" in job.err[rank], job
        assert (
            f"rank 0 sent float32, {count} elements (tag 0, send at job.py:9), recv on rank 1 of float64"
            in job.err[rank]
        ), job
        assert f"{count} elements at job.py:11 (at job.py:11), while" in job.err[rank], job


def test_neither_end_of_a_message_is_cleared() -> None:
    """If a receive fails as its message does not fit, the other ranks learn both ends, and not that they did nothing wrong."""
    job = run_job(
        HEAD
        + """
try:
    if r == 0:
        dist.send(np.zeros(5, "i4,f8"), 1)
    elif r == 1:
        dist.recv(np.zeros(4, "i4,f8"), 0)
    dist.barrier()
except dist.PeerFailedError as error:
    print(error, flush=True)
    raise
""",
        3,
        limit=20,
        env={"MPICOLL_TIMEOUT": "15"},
    )
    assert job.returncode == 1, job
    named = "[('f0', '<i4'), ('f1', '<f8')]"
    for rank in (0, 2):
        told = " ".join(job.out[rank].split())
        assert f"rank 0 sent {named}, 5 elements (tag 0, send at " in told, job
        assert f"recv on rank 1 of {named}, 4 elements at job.py:12 (at job.py:12), while" in told, job
        assert "is about the calls of several ranks: compare these" in told, job
        assert "did nothing wrong" not in told, job


@pytest.mark.parametrize(
    "ends",
    [
        'raise RuntimeError("step 17 failed") from error',
        pytest.param('raise RuntimeError("step 17 failed")', marks=pytest.mark.slow),
        pytest.param('raise RuntimeError("step 17 failed") from None', marks=pytest.mark.slow),
        pytest.param("sys.exit(3)", marks=pytest.mark.slow),
    ],
)
def test_an_error_of_the_program_that_another_error_caused(ends: str) -> None:
    """A program may raise an error of its own for the error of a message: the other end is not told that it did nothing wrong."""
    job = run_job(
        HEAD
        + f"""
import sys
try:
    if r == 0:
        dist.send(np.zeros(5), 1)
    else:
        try:
            dist.recv(np.zeros(4), 0)
        except dist.DistError as error:
            {ends}
    dist.barrier()
except dist.PeerFailedError as error:
    print(error, flush=True)
    raise
""",
        2,
        limit=20,
        env={"MPICOLL_TIMEOUT": "15"},
    )
    assert job.returncode == (3 if "xit" in ends else 1), job
    told = " ".join(job.out[0].split())
    assert ("sys.exit(3)" if "xit" in ends else "RuntimeError: step 17 failed") in told, job
    assert "caused by CollectiveMismatchError: recv on group WORLD: rank 0 sent float64, 5 elements" in told, job
    assert "is about the calls of several ranks: compare these" in told, job
    assert "did nothing wrong" not in told, job


SAME_TAG, SAME_GROUP = "pass the same tag= to its send", "pass the same group= to its send"
NEVER_COMES = {
    # what rank 0 does; what the others do; the error on rank 0, and what it says
    "all have ended": (
        "dist.recv(x, tag=9)",
        "dist.send(x, 0, tag=r) if r == 1 else None",
        ("DeadlockError", "(ranks 1-2 have ended; rank 1 has sent tag 1)", "ranks 1-2: ended the program", SAME_TAG),
    ),
    "a barrier": (
        "dist.irecv(x, tag=9).wait()",
        "dist.send(x, 0, tag=r); dist.barrier()",
        ("DeadlockError", "from any rank (rank 1 has sent tag 1; rank 2 has sent tag 2)", SAME_TAG),
    ),
    "objects": (
        "dist.recv_object_list([None])",
        "dist.send_object_list([r], 0, group=group); dist.barrier()",
        ("DeadlockError", "(ranks 1-2 have sent tag 0 on group [0-2])", SAME_GROUP),
    ),
    "late": (
        "dist.group.WORLD.set_timeout(timedelta(seconds=1)); dist.recv(x, tag=9)",
        "dist.send(x, 0, tag=r); time.sleep(4)",
        ("CollectiveTimeoutError", "Not received so far: tag 1 from rank 1, tag 2 from rank 2.", SAME_TAG, "py-spy"),
    ),
    "polled": (
        "poll(dist.irecv(x, tag=9))",
        "dist.send(x, 0, tag=r) if r == 1 else None",
        ("PeerExitedError", "Not received so far: tag 1 from rank 1.", "ranks 1-2: ended the program", SAME_TAG),
    ),
    "polled, from one rank": (
        "y = x.copy(); works = [dist.irecv(each, 1, tag=9) for each in (x, y)]; poll(works[0]); poll(works[1])",
        "[dist.send(x, 0, tag=tag) for tag in (5, 9)] if r == 1 else None",
        ("PeerExitedError", "Not received so far: tag 5 from rank 1.", SAME_TAG),
    ),
    "another group": (
        "dist.recv(x, 1, tag=9)",
        "dist.send(x, 0, group, tag=9); dist.barrier()",
        ("DeadlockError", "needs rank 1 to send (it has sent tag 9 on group [0-2])", SAME_GROUP),
    ),
    "another group, ended": (
        "dist.recv(x, 1, tag=9)",
        "dist.send(x, 0, group, tag=9)",
        ("PeerExitedError", "Not received so far: tag 9 from rank 1 on group [0-2].", SAME_GROUP),
    ),
    "another group, late": (
        "group.set_timeout(timedelta(seconds=1)); dist.recv(x, 1, group)",
        "dist.send(x, 0, tag=0); time.sleep(4)",
        ("CollectiveTimeoutError", "Not received so far: tag 0 from rank 1 on group WORLD.", SAME_GROUP, "py-spy"),
    ),
}
FEW = ("all have ended", "polled", "another group, ended")
"""Those of `make test`."""


@pytest.mark.parametrize(
    ("case", "env"),
    [
        pytest.param(case, env, id=f"{case}{''.join(env)}", marks=[pytest.mark.slow] * (bool(env) or case not in FEW))
        for case in NEVER_COMES
        for env in ({}, {"MPIR_CVAR_NUM_CLIQUES": "2"}, {"MPICOLL_EXTENSION": "off"})
    ],
)
def test_a_message_that_never_comes(case: str, env: dict[str, str]) -> None:
    """The receive says which messages with another tag, or on another group, have arrived from whom, and who has ended."""
    receives, sends, words = NEVER_COMES[case]
    job = run_job(
        HEAD
        + f"""
from datetime import timedelta
group = dist.new_group()
x = np.ones(3)


def poll(work):
    while not work.is_completed():
        time.sleep(0.01)


if r == 0:
    try:
        {receives}
    except dist.DistError as error:
        print(type(error).__name__, error, flush=True)
        raise
else:
    {sends}
""",
        3,
        limit=20,
        env={"MPICOLL_TIMEOUT": "15", **env},
    )
    assert not job.timed_out, job
    assert job.returncode == 1, job
    told = " ".join(job.out[0].split())
    for each in words:
        assert each in told, job
    assert "every rank waits for a message" not in told, job


def test_a_refused_large_message_that_nobody_takes_is_a_deadlock() -> None:
    """The sender of a large message waits until it is taken: with its receiver waiting for something else it never is."""
    job = run_job(
        HEAD
        + """
try:
    if r == 0:
        dist.send(np.zeros(50_000), 1)
    elif r == 1:
        try:
            dist.recv(np.zeros(3), 0)
        except dist.CollectiveMismatchError:
            print("refused", flush=True)
    dist.barrier()
except dist.DeadlockError as error:
    print(error, flush=True)
time.sleep(1)
sys.exit(7)
""",
        2,
        limit=20,
        env={"MPICOLL_TIMEOUT": "15"},
    )
    assert job.returncode == 7, job
    assert "refused" in job.out[1], job
    for out in job.out:
        assert "send float64[50000] to rank 1 tag 0 at job.py:10" in out, job
        assert "needs rank 1 to receive" in out, job


def test_a_sender_that_has_ended() -> None:
    """Small messages of a rank that is gone are received, in order, also after one was refused; then nothing comes."""
    job = run_job(
        HEAD
        + """
if r == 1:
    for count in (1, 100, 2000):
        work = dist.isend(np.full(count, float(count)), 0, tag=3)
        if count < 2000:
            work.wait()
    work.wait()
    sys.exit(0)
time.sleep(0.5)
try:
    dist.recv(np.zeros(7), 1, tag=3)
except dist.CollectiveMismatchError as error:
    assert "rank 1 sent float64, 1 element (tag 3, isend at " in str(error), error
for count in (1, 100, 2000):
    x = np.zeros(count)
    dist.recv(x, 1, tag=3)
    assert (x == count).all()
try:
    dist.recv(x, 1, tag=3)
except (dist.PeerExitedError, dist.DeadlockError):
    print("told", flush=True)
""",
        2,
        limit=30,
        env={"MPICOLL_TIMEOUT": "20"},
    )
    assert not job.timed_out, job
    assert "told" in job.out[0], job
    assert job.returncode == 0, job


def test_groups_of_the_same_ranks_one_after_the_other() -> None:
    """What one group sent and did not receive, taken and refused messages among it, never reaches the next group."""
    job = run_job(
        HEAD
        + """
for turn in range(3):
    group = dist.new_group()
    if r == 0:
        for count in (1, 2, 1, 400):
            dist.send(np.full(count, 10.0 + turn), 1, group=group, tag=count)
        dist.send(np.full(5, float(turn)), 1, group=group)
    if r == 1:
        x = np.zeros(1)
        dist.recv(np.zeros(5), 0, group=group)
        for source in (0, None):
            try:
                dist.recv(x, source, group=group, tag=2)
            except dist.CollectiveMismatchError:
                pass
        dist.recv(x, 0, group=group, tag=1)
        assert x[0] == 10 + turn, (turn, x)
    dist.barrier(group)
    dist.destroy_process_group(group)
print("done", flush=True)
""",
        3,
        limit=30,
        env={"MPICOLL_TIMEOUT": "20"},
    )
    assert all("done" in out for out in job.out), job
    assert job.returncode == 1, job
    for tag in (2, 400):
        lost = f"1 message from rank 0 to rank 1 with tag {tag} on group [0-2] had not been received"
        assert job.err[1].count(lost) == 3, job


CLOSES_TWICE = """
group = dist.new_group([0, 1])
if r == 0:
    for turn in range(3):
        dist.send(np.zeros(1), 1, group=group)
else:
    dist.recv(np.zeros(1), 0, group=group)
"""
LEFT = (
    "the program ended, and 2 messages from rank 0 to rank 1 with tag 0 on group [0-1] had not been received (send at "
)


@pytest.mark.parametrize(
    "end", ["", "dist.destroy_process_group()", "from mpi4py import MPI; MPI.Finalize(); print('goes on'); sys.exit(0)"]
)
def test_messages_that_are_left_are_a_warning_if_asked(end: str) -> None:
    """MPICOLL_LEFTOVER=warn: the receiver prints the same report as a warning, once, and the program ends as by itself."""
    for leftover, code, words in ((None, 1, ""), ("warn", 0, "warning: ")):
        job = run_job(HEAD + CLOSES_TWICE + end + "\n", 2, limit=20, env={"MPICOLL_LEFTOVER": leftover})
        assert not job.timed_out, job
        assert job.returncode == code, job
        said = [[line for line in err.splitlines() if "Abort(" not in line] for err in job.err]
        assert not said[0], job
        assert len(said[1]) == 1, job
        assert ("goes on" in job.out[0]) == ("Finalize" in end), job
        assert said[1][0].startswith(f"[rank 1] mpicoll: {words}{LEFT}"), job
        assert not job.left_running, job


@pytest.mark.slow
def test_a_warning_of_messages_changes_no_other_error() -> None:
    """MPICOLL_LEFTOVER=warn: operations that were never waited for, and codes of sys.exit, end the job as ever."""
    for end, code, words in (
        ("works = [dist.irecv(np.zeros(1), 1 - r, tag=9)]", 1, "never waited for: irecv issued at"),
        ("sys.exit(3)", 3, ""),
    ):
        job = run_job(HEAD + CLOSES_TWICE + end + "\n", 2, limit=20, env={"MPICOLL_LEFTOVER": "warn"})
        assert not job.timed_out, job
        assert job.returncode == code, job
        assert words in job.err[0], job


def test_what_is_left_is_judged_alike() -> None:
    """MPICOLL_LEFTOVER that differs between ranks is told by init_process_group."""
    source = """
import os
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    os.environ["MPICOLL_LEFTOVER"] = "warn"
"""
    job = run_job(source + HEAD, 3, limit=20)
    assert not job.timed_out, job
    assert job.returncode == 1, job
    assert "CollectiveMismatchError: " in job.err[0], job
    assert ">MPICOLL_LEFTOVER warn<" in job.err[0], job
    assert "next: pass the same MPICOLL_LEFTOVER on all ranks" in job.err[0], job


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, pytest.param(50_000, marks=pytest.mark.slow)])
def test_ctrl_c_in_a_receive_that_was_made_before(count: int) -> None:
    """Ctrl-C in a receive that is made again is answered while it waits, and the peer is told."""

    def interrupt(job: RunningJob) -> None:
        job.wait_for("ready", 0, 1)
        time.sleep(0.3)
        job.signal(signal.SIGINT, 1)

    job = run_job(
        HEAD
        + f"""
x = np.zeros({count})
for turn in range(5):
    dist.send(x, 1) if r == 0 else dist.recv(x, 0)
print("ready", flush=True)
try:
    if r == 0:
        time.sleep(1.5)  # with both of them waiting it would be a deadlock
        dist.recv(x, 1)
    dist.recv(x, 0)
except dist.GroupBrokenError as error:
    assert "rank 1 gave" in str(error), error
    print("told", flush=True)
except KeyboardInterrupt:
    try:
        dist.recv(x, 0)
    except dist.GroupBrokenError:
        print("interrupted", flush=True)
    time.sleep(3)
time.sleep(0.5)
sys.exit(7)
""",
        2,
        limit=30,
        env={"MPICOLL_TIMEOUT": "20"},
        meanwhile=interrupt,
    )
    assert not job.timed_out, job
    assert "told" in job.out[0], job
    assert "interrupted" in job.out[1], job


@pytest.mark.slow
def test_limits_and_deadlocks_of_calls_that_were_made_before() -> None:
    """A receive that is made again runs into the limit where its peer is late, and into a certificate where nobody can come."""
    job = run_job(
        HEAD
        + """
from datetime import timedelta
x = np.zeros(3)
group = dist.new_group()
for turn in range(5):
    for g in (None, group):
        dist.send(x, 1, g) if r == 0 else dist.recv(x, 0, g)
if r == 0:
    time.sleep(2)
else:
    group.set_timeout(timedelta(seconds=0.5))
    try:
        dist.recv(x, 0, group)
    except dist.CollectiveTimeoutError as error:
        assert "recv float64[3] from rank 0 tag 0" in str(error), error
        print("late", flush=True)
for turn in range(3):
    dist.send(x, 1) if r == 0 else dist.recv(x, 0)
try:
    dist.recv(x, 1 - r)
except dist.DeadlockError as error:
    assert "recv float64[3] from rank 0 tag 0" in str(error), error
    print("deadlock", flush=True)
time.sleep(0.5)
sys.exit(7)
""",
        2,
        limit=30,
        env={"MPICOLL_TIMEOUT": "20"},
    )
    assert not job.timed_out, job
    assert "late" in job.out[1], job
    assert all("deadlock" in out for out in job.out), job


@pytest.mark.slow
def test_the_tests_of_messages_without_the_extension() -> None:
    """Ranks on which the extension was not built make and repeat messages in Python."""
    job = run_job(
        """
import sys
sys.modules["mpicoll._native"] = None
import pytest
from mpicoll.runtime import native
assert native.found is None
files = ("test_repeated_messages", "test_strided_messages", "test_p2p", "test_isend_irecv")
sys.exit(pytest.main(["-q", "--with-mpi", "-p", "no:cacheprovider", *(f"tests/mpi/{name}.py" for name in files)]))
""",
        2,
        limit=120,
    )
    assert not job.timed_out, job
    assert job.returncode == 0, job
    assert re.search(r"\d\d passed", job.out[0]), job
