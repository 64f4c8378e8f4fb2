"""Blocks that one rank runs first, when ranks die, leave, are late or far away: never a hang, and right exit codes."""

from __future__ import annotations

import re
import signal

import pytest
from jobs import JobResult, RunningJob, family, run_job

HEAD = """
import os, signal, sys, time
import numpy as np
import mpicoll as dist
dist.init_process_group()
r, n = dist.get_rank(), dist.get_world_size()
scope = sys.argv[1] if len(sys.argv) > 1 else "world"
"""

SCOPES = ["world", pytest.param("node", marks=pytest.mark.slow)]


def fine(job: JobResult, code: int = 0) -> None:
    assert not job.timed_out, job
    assert job.returncode == code, job
    assert not job.left_running, job


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("raise OSError('no route')", 1, "OSError: no route"),
        ("sys.exit(3)", 3, "SystemExit: 3"),
        pytest.param("raise KeyboardInterrupt", 130, "KeyboardInterrupt", marks=pytest.mark.slow),
    ],
)
def test_the_leader_ends_in_its_block(how: str, code: int, words: str, scope: str) -> None:
    """The job ends with its code, its traceback stands there once, and the others say in a line whom they waited for."""
    job = run_job(
        HEAD + f"with dist.zero_first('get', scope=scope):\n    if r == 0: {how}\n", 3, limit=30, args=[scope]
    )
    fine(job, code)
    assert job.seconds < 15, job
    assert sum(err.count("Traceback") for err in job.err) == (0 if "exit" in how else 1), job
    for rank in (1, 2):
        assert re.search(
            rf"\[rank {rank}\] FirstFailedError: rank 0 \(.*\), which goes first in zero_first\('get'\)", job.err[rank]
        ), job
        assert words in job.err[rank], job
        assert "ran" not in job.out[rank], job


@pytest.mark.slow
@pytest.mark.parametrize("scope", SCOPES)
def test_the_leader_is_killed(scope: str) -> None:
    """The others end within seconds, and say who died; the launcher's own reaction left aside."""
    job = run_job(
        HEAD
        + """
try:
    with dist.zero_first("download", scope=scope):
        if r == 0:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
except dist.PeerFailedError as error:
    print(type(error).__name__, error, flush=True)
    time.sleep(2)
    os._exit(0)
""",
        3,
        limit=30,
        args=[scope],
        recover=True,
    )
    assert not job.timed_out, job
    assert job.seconds < 15, job
    for rank in (1, 2):
        # MPICH's launcher kills them too, in about two of ten such jobs, when rank 0 has died: one has said so by then.
        said = job.out[rank] or (job.stderr if family() == "mpich" else "")
        assert "rank 0" in said, job
        assert "process ended without a report" in said, job
        assert "zero_first" in said, job


@pytest.mark.parametrize("level", ["full", "roll"])
def test_a_rank_skips_the_block_and_ends(level: str) -> None:
    """Those who wait for it, in the block or at its end, are told that it has ended, and after which call."""
    job = run_job(
        HEAD
        + """
dist.barrier()
if r == n - 1:
    sys.exit(0)
with dist.zero_first("work"):
    pass
print("through", flush=True)
""",
        3,
        limit=30,
        env={"MPICOLL_CHECK": level},
    )
    fine(job, 1)
    assert "through" not in job.stdout, job
    assert "zero_first" in job.stderr, job
    assert re.search(r"rank 2: .*(ended|has left|exit|end of the program)", job.stderr), job


@pytest.mark.slow
def test_a_rank_skips_the_block_for_another_call_while_rolling() -> None:
    """Where small calls are not compared, ranks that hang in different calls are found, and both calls are named."""
    job = run_job(
        HEAD
        + """
try:
    if r == n - 1:
        dist.all_reduce(np.ones(1))  # skipped
    else:
        with dist.zero_first("work"):
            pass
except (dist.DeadlockError, dist.CollectiveMismatchError) as error:
    print(error, flush=True)
    time.sleep(2)
    os._exit(0)
""",
        3,
        limit=30,
        env={"MPICOLL_CHECK": "roll"},
    )
    assert not job.timed_out, job
    assert job.seconds < 10, job
    for out in job.out:
        assert "zero_first" in out, job
        assert "all_reduce" in out, job
        assert out.count("job.py:") >= 2, job


@pytest.mark.slow
def test_a_limit() -> None:
    """A rank that waits no longer than it was told to says for whom; the group is broken then."""
    job = run_job(
        HEAD
        + """
began = time.monotonic()
try:
    with dist.zero_first("slow", timeout=1.5):
        if r == 0:
            time.sleep(4)
except dist.DistError as error:
    print(f"{time.monotonic() - began:.1f}", type(error).__name__, error, flush=True)
time.sleep(max(0, began + 6 - time.monotonic()))
try:
    dist.barrier()
except dist.GroupBrokenError:
    print("broken", flush=True)
""",
        2,
        limit=30,
    )
    assert not job.timed_out, job
    assert job.out[1].startswith(("1.5", "1.6", "1.7", "1.8", "1.9", "2.")), job
    assert "CollectiveTimeoutError" in job.out[1], job
    assert "zero_first" in job.out[1], job
    assert "rank 0" in job.out[1], job
    assert "broken" in job.out[1], job
    assert "broken" in job.out[0], job


@pytest.mark.slow
def test_waiting_is_cheap_has_no_limit_and_is_not_silent() -> None:
    """Past the limit of the group the others still wait, asleep; one rank of a node says so, at doubling intervals."""
    job = run_job(
        HEAD
        + """
cpu = time.process_time()
with dist.zero_first("download"):
    if r == 0:
        time.sleep(7.5)
    else:
        print(f"cpu {time.process_time() - cpu:.2f}", flush=True)
with dist.zero_first():  # without a name
    if r == 0:
        time.sleep(1.5)
""",
        3,
        limit=40,
        env={"MPICOLL_TIMEOUT": "2", "MPICOLL_STALL_WARN": "1"},
    )
    fine(job)
    for rank in (1, 2):
        assert float(job.out[rank].split()[1]) < 1.5, job  # a fifth of a core, on a machine that may be busy
    said = re.findall(r"mpicoll: waiting (\d+) s for rank 0 \(.+?\) in '(\w+)'; it is at", job.err[1])
    assert [name for _, name in said] == ["download"] * 3, job
    assert [int(seconds) for seconds, _ in said] == [1, 2, 4], job
    assert re.search(r"waiting 1 s for rank 0 \(.+\) in zero_first at .*job.py:\d+", job.err[1]), job
    assert "waiting" not in job.err[0] + job.err[2], job


@pytest.mark.slow
@pytest.mark.skipif(family() != "mpich", reason="MPICH alone imitates several nodes on one host")
@pytest.mark.parametrize("first", ["zero_first", "ordered"])
def test_a_slow_node_holds_up_no_other(first: str) -> None:
    """Ranks of node 0 are through while the first rank of node 1 still works; nothing passes between the nodes."""
    job = run_job(
        HEAD
        + f"""
from mpicoll.groups.registry import state
node = state().topology.node
dist.barrier()
began = time.monotonic()
for _ in range(2):
    with dist.{first}({"" if first == "ordered" else "scope="}"node"):
        if node == 1 and r == 1:
            time.sleep(1.5)
print(node, f"{{time.monotonic() - began:.2f}}", flush=True)
dist.barrier()
""",
        4,
        limit=30,
        env={"MPIR_CVAR_NUM_CLIQUES": "2"},
    )
    fine(job)
    for out in job.out:
        node, seconds = out.split()
        assert (float(seconds) >= 3.0) == (node == "1"), job


@pytest.mark.slow
@pytest.mark.skipif(family() != "mpich", reason="MPICH alone imitates several nodes on one host")
def test_a_leader_on_another_node() -> None:
    """One that works longer than the limit of the group gives signs of life; one that is stopped is lost at the limit."""
    program = (
        HEAD
        + """
from datetime import timedelta
began = time.monotonic()
try:
    with dist.zero_first("far"):
        if r == 0:
            print("working", flush=True)
            time.sleep(5)
except dist.DistError as error:
    print(f"{time.monotonic() - began:.1f} {type(error).__name__} {error}", flush=True)
    os._exit(0)
print("through", flush=True)
"""
    )
    env = {"MPIR_CVAR_NOLOCAL": "1", "MPICOLL_TIMEOUT": "2"}
    job = run_job(program, 2, limit=40, env=env)
    fine(job)
    assert job.stdout.count("through") == 2, job

    def stop(job: RunningJob) -> None:
        job.wait_for("working", 0)
        job.signal(signal.SIGSTOP, 0)

    job = run_job(program, 2, limit=40, env=env, meanwhile=stop)
    assert "CollectiveTimeoutError" in job.out[1], job
    assert 2 <= float(job.out[1].split()[0]) < 10, job
    assert "zero_first" in job.out[1], job


@pytest.mark.slow
@pytest.mark.skipif(family() != "mpich", reason="MPICH alone imitates several nodes on one host")
def test_blocks_of_other_scopes_inside_across_nodes() -> None:
    """A block of the node inside one of the world, and the other way round, is an error on the ranks that are first."""
    job = run_job(
        HEAD
        + """
for outer, inner in (("world", "node"), ("node", "world")):
    try:
        with dist.zero_first("outer", scope=outer), dist.zero_first("inner", scope=inner):
            pass
    except dist.DistError as error:
        print(outer, type(error).__name__, str(error).splitlines()[0], flush=True)
    dist.barrier()
""",
        4,
        limit=30,
        env={"MPIR_CVAR_NUM_CLIQUES": "2"},
    )
    fine(job)
    for rank, out in enumerate(job.out):
        world, node = out.splitlines()
        assert world.startswith("world CollectiveMismatchError" if rank == 0 else "world FirstFailedError"), job
        assert node.startswith("node CollectiveMismatchError" if rank < 2 else "node FirstFailedError"), job
        assert "for the outer block to end, and cannot enter the inner block" in out, job


def test_a_program_goes_on_after_failures() -> None:
    """It catches what it gets, a hundred times, and the group is as good as before."""
    job = run_job(
        HEAD
        + """
for i in range(100):
    try:
        with dist.zero_first("try", scope=scope) as turn:
            if r == i % n:
                raise ValueError(i)
    except (ValueError, dist.PeerFailedError) as error:
        assert isinstance(error, ValueError) == (r == i % n), error
    else:
        raise AssertionError("nobody was told")
x = np.ones(1)
dist.all_reduce(x)
assert x[0] == n
""",
        3,
        limit=60,
    )
    fine(job)
    assert not job.stderr.strip(), job


@pytest.mark.parametrize("level", ["full", pytest.param("off", marks=pytest.mark.slow)])
def test_control_c_just_before_the_leader_is_through(level: str) -> None:
    """The rank that is struck leaves with KeyboardInterrupt, the others are told, and all are in step."""
    source = (
        HEAD
        + """
from mpicoll.runtime import waiting

def strike():
    waiting.remove_service(strike)
    signal.raise_signal(signal.SIGINT)

struck = i = 0
while i < 20 or (struck < 6 and i < 200):  # on a busy machine many waits end before a service is called
    i += 1
    dist.barrier()
    if r == 1:
        waiting.add_service(strike)  # called a few milliseconds after a wait has begun
    said = "nothing"
    try:
        with dist.zero_first("step"):
            if r == 0:
                time.sleep(0.03 + 0.002 * (i % 10))
    except KeyboardInterrupt:
        assert r == 1
        said = "interrupted"
    except dist.PeerFailedError as error:
        assert "rank 1 failed" in str(error) and "KeyboardInterrupt" in str(error), error
        said = "told"
    finally:
        waiting.remove_service(strike)
    x = np.array([float(r == 1 and said == "interrupted"), float(r == 0 and said == "told")])
    dist.all_reduce(x)
    assert x[0] == x[1], (i, x)
    struck += int(x[0])
assert struck > 5, struck
print("through", flush=True)
"""
    )
    for _ in range(4):
        job = run_job(source, 3, limit=40, env={"MPICOLL_CHECK": level, "MPICOLL_TIMEOUT": "5"})
        # On a busy machine the leader may take more than the tenth of a second after which a struck rank gives the group up.
        if not re.search("gave (the group )?up: KeyboardInterrupt", job.stderr):
            break
    fine(job)
    assert job.stdout.count("through") == 3, job


def test_a_forked_child_leaves_the_block() -> None:
    """What ends in a child is none of the ranks' business: the block goes on."""
    job = run_job(
        HEAD
        + """
with dist.zero_first("fork") as turn:
    if turn.is_leader:
        pid = os.fork()
        if pid == 0:
            sys.exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        turn.share("from the parent")
assert turn.value == "from the parent"
dist.barrier()
print("through", flush=True)
""",
        2,
        limit=20,
    )
    fine(job)
    assert job.stdout.count("through") == 2, job


@pytest.mark.slow
def test_a_follower_that_is_killed_in_its_block() -> None:
    """The others, at the end of the block, end within seconds and say who died."""
    job = run_job(
        HEAD
        + """
try:
    with dist.zero_first("read") as turn:
        if r == n - 1:
            time.sleep(1)  # the other ranks are at the end of the block
            os.kill(os.getpid(), signal.SIGKILL)
except dist.PeerFailedError as error:
    print(error, flush=True)
    time.sleep(2)
    os._exit(0)
""",
        3,
        limit=30,
        recover=True,
    )
    assert not job.timed_out, job
    assert job.seconds < 15, job
    for rank in (0, 1):
        said = job.out[rank] or (job.stderr if family() == "mpich" else "")  # as above
        assert "rank 2" in said, job
        assert "end of zero_first" in said, job


@pytest.mark.slow
def test_the_first_block_of_a_node_after_a_limit() -> None:
    """A rank that waited no longer than it was told to cannot come back into another block: the group of the node is given up."""
    job = run_job(
        HEAD
        + """
for turn in range(2):
    try:
        with dist.zero_first("node", scope="node", timeout=1):
            if r == 0 and turn == 0:
                time.sleep(2.5)
    except dist.DistError as error:
        print(type(error).__name__, flush=True)
dist.barrier()
""",
        2,
        limit=30,
        env={"MPICOLL_TIMEOUT": "10"},
    )
    fine(job)
    assert job.out[1].split() == ["CollectiveTimeoutError", "GroupBrokenError"], job
    assert job.out[0].split() == ["GroupBrokenError"] * 2, job
    assert job.seconds < 10, job
