"""Jobs on several hosts: what holds on one machine holds across them, and a host that is lost ends the job."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import ROOT, JobResult, RunningJob, is_alive, run_job

sys.path.insert(0, str(Path(__file__).parent))
from hosts import Hosts, hosts_up, missing

WHY_NOT = missing()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "hosts can be made")]

HEAD = """
import socket, sys, time
import numpy as np
import mpicoll as dist
dist.init_process_group()
r, n, local = dist.get_rank(), dist.get_world_size(), dist.get_node_local_rank()
host = socket.gethostname()
x = np.ones(4)
dist.barrier()
"""


@pytest.fixture
def two(folder: Path) -> Iterator[Hosts]:
    with hosts_up(folder) as up:
        yield up


@pytest.fixture
def three(folder: Path) -> Iterator[Hosts]:
    with hosts_up(folder, ("host1", "host2", "host3")) as up:
        yield up


def await_end(job: RunningJob, *ranks: int, limit: float) -> None:
    """Wait until the processes of these ranks are gone."""
    pids = [int((job.folder / f"pid.{rank}").read_text()) for rank in ranks]
    until = time.monotonic() + limit
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < until, f"left of ranks {ranks} after {limit} s: {left}"
        time.sleep(0.05)


def check_soon(job: JobResult, *words: str) -> None:
    """Check that each rank printed these words, and had its error within three seconds of the last rank's call."""
    assert not job.timed_out, job
    times = []
    for out in job.out:
        assert all(word in out for word in words), job
        times.append([float(word) for word in out.split()[:2]])
    assert max(end for _, end in times) - max(begin for begin, _ in times) < 3, (times, job)
    assert not job.left_running, job


def suite(hosts: Hosts, ranks: int, *names: str) -> None:
    """Run some of the tests on several ranks over the hosts."""
    # The one that says which nodes MPICH imitates on one host is not about hosts.
    options = ["-q", "--color=no", "--with-mpi", "-m", "not slow", "-k", "not cliques_are_nodes"]
    files = [f"tests/mpi/test_{name}.py" for name in names]
    job = run_job(
        ["-m", "pytest", *options, *files],
        len(hosts.names) * ranks,
        limit=400,
        launcher=[*hosts.launcher(ranks), "-wdir", str(ROOT)],
    )
    assert not job.timed_out, job
    assert job.returncode == 0, job
    passed = re.search(r"^(\d+) passed", job.out[0], re.MULTILINE)
    assert passed, job
    assert int(passed[1]) > 30, job
    assert not job.left_running, job


def test_suite_on_two_hosts(two: Hosts) -> None:
    """The tests of all collectives, of objects and of messages pass on two hosts of two ranks."""
    suite(two, 2, "collectives", "objects", "p2p")


def test_suite_on_three_hosts(three: Hosts) -> None:
    """The tests of all collectives, of groups, topology and leader blocks pass on three hosts of one rank."""
    suite(three, 1, "collectives", "groups", "topology", "leader_blocks")


def test_who_is_where(three: Hosts) -> None:
    """Ranks, nodes and their groups are those of the hosts, and the names are the hosts' names."""
    job = run_job(
        HEAD
        + """
node, leaders = dist.node_group(), dist.leaders_group()
assert (n, local, host) == (6, r % 2, f"host{r // 2 + 1}"), (r, n, local, host)
assert dist.get_process_group_ranks(node) == [r - local, r - local + 1], dist.get_process_group_ranks(node)
assert (dist.get_world_size(node), dist.get_rank(node)) == (2, local)
if local == 0:
    assert dist.get_process_group_ranks(leaders) == [0, 2, 4], dist.get_process_group_ranks(leaders)
else:
    assert leaders is dist.GroupMember.NON_GROUP_MEMBER
dist.all_reduce(x, group=node)
assert x[0] == 2
print("good")
""",
        6,
        limit=60,
        launcher=three.launcher(2),
    )
    assert job.returncode == 0, job
    assert job.out == ["good\n"] * 6, job
    assert not job.left_running, job


def test_mismatch(three: Hosts) -> None:
    """Ranks of other hosts that make another call are named, with their line, on all ranks, within three seconds."""
    job = run_job(
        HEAD
        + """
dist.barrier()
began = time.monotonic()
try:
    if host == "host2":
        dist.all_reduce(x)  # here
    else:
        dist.broadcast(x, 0)  # there
except dist.CollectiveMismatchError as error:
    took = time.monotonic() - began
    print(error.ranks, error, "took", took, flush=True)
dist.barrier()
""",
        6,
        limit=60,
        launcher=three.launcher(2),
    )
    assert job.returncode == 0, job
    for out in job.out:
        assert out.startswith("[2, 3] "), job
        assert re.search(r"ranks 2-3.*all_reduce.*job\.py:\d+", out), job
        assert re.search(r"ranks 0-1, 4-5.*broadcast.*job\.py:\d+", out), job
        assert float(out.split()[-1]) < 3, job
    assert not job.left_running, job


def test_deadlock(two: Hosts) -> None:
    """Ranks of two hosts that wait for each other have the certificate within three seconds."""
    job = run_job(
        HEAD
        + """
if r == 3:
    time.sleep(1)
began = time.time()
try:
    dist.recv(x, (r + 1) % n)
except dist.DeadlockError as error:
    print(began, time.time(), error, flush=True)
""",
        4,
        limit=60,
        launcher=two.launcher(2),
    )
    check_soon(job, "recv")


def test_deadlock_of_collectives(two: Hosts) -> None:
    """A rank of each host waits in the group of its host for one that waits in a message from the other host.

    The cycle has all four ranks, so none finds its deadlock before the last one has come.
    """
    job = run_job(
        HEAD
        + """
group = dist.node_group()
dist.barrier(group=group)
dist.barrier()
began = time.time()
try:
    if local == 0:
        dist.all_reduce(x, group=group)
    else:
        dist.recv(x, (r + 1) % n)
except dist.DeadlockError as error:
    print(began, time.time(), error, flush=True)
""",
        4,
        limit=60,
        launcher=two.launcher(2),
    )
    check_soon(job, "all_reduce", "recv")


def test_tcp_store(two: Hosts) -> None:
    """Ranks of two hosts share a server, by a secret that has travelled over MPI; a wrong one from the other host is refused."""
    job = run_job(
        HEAD
        + """
from datetime import timedelta
limit = timedelta(seconds=20)
where, store = [host, 0], None
if r == 0:
    store = dist.TCPStore(host, 0, n, True, limit, wait_for_workers=False)
    where = [host, store.port]
dist.broadcast_object_list(where, 0)
if store is None:
    store = dist.TCPStore(*where, n, timeout=limit)
assert where[0] == store.host == "host1"
store.set(f"of {r}", f"{host} {local}")
store.wait([f"of {each}" for each in range(n)])
assert store.multi_get([f"of {each}" for each in range(n)]) == [b"host1 0", b"host1 1", b"host2 0", b"host2 1"]
for _ in range(50):
    store.add("all", r + 1)
store.barrier("added", n)
assert store.get("all") == b"%d" % (50 * n * (n + 1) // 2)
began = time.monotonic()
if r == 3:
    time.sleep(1)
    store.set("late", bytes(1 << 20))
assert store.get("late") == bytes(1 << 20)
assert time.monotonic() - began > 0.5
try:
    dist.TCPStore(*where, secret="a guess", timeout=limit)
except dist.DistNetworkError as error:
    assert "refuses" in str(error), error
else:
    raise AssertionError("a wrong secret was taken")
dist.barrier()
began = time.monotonic()
try:
    store.wait(["never"], timedelta(seconds=0.5))
except dist.DistStoreError as error:
    assert "wait timeout after 500ms, keys: 'never'" in str(error), error
else:
    raise AssertionError("never came")
assert 0.4 < time.monotonic() - began < 10
store.barrier("end", n)
dist.barrier()
store.close()
print("good")
""",
        4,
        limit=60,
        launcher=two.launcher(2),
    )
    assert job.returncode == 0, job
    assert job.out == ["good\n"] * 4, job
    assert not job.left_running, job


@pytest.mark.parametrize("what", ["kill", "cut"])
@pytest.mark.parametrize("size", [4, 2_000_000])
def test_lost_host(two: Hosts, what: str, size: int) -> None:
    """A host that dies or is cut off: the others raise or report after the limit, and no rank is left on either side.

    Launchers may go on waiting for a silent host: mpirun of Open MPI always, mpiexec of MPICH when a rank ends without MPI_Abort.
    """
    limit = 6.0

    def lose(job: RunningJob) -> None:
        job.wait_for("ready", 0, 1, 2, 3)
        time.sleep(0.5)
        getattr(two, what)("host2")
        # The limit, the exit's grace, 20 seconds for an abort that MPI does not get through, and as much for a busy machine.
        await_end(job, 0, 1, *((2, 3) if what == "cut" else ()), limit=60)

    job = run_job(
        HEAD
        + """
x = np.ones(int(sys.argv[1]))
print("ready", flush=True)
try:
    while True:
        began = time.time()
        dist.all_reduce(x)
        time.sleep(0.01)
except dist.DistError as error:
    print("raised", time.time() - began, type(error).__name__, error, flush=True)
    raise
""",
        4,
        limit=5,
        args=[str(size)],
        launcher=two.launcher(2, ["MPICOLL_TIMEOUT"]),
        env={"MPICOLL_TIMEOUT": str(limit)},
        meanwhile=lose,
    )
    assert job.returncode != 0, job
    # In a call that all had agreed to there is nothing to be raised: the watchdog reports and ends the process.
    said = [f"{out}\n{err}" for out, err in zip(job.out, job.err, strict=True)]
    for rank in (0, 1, 2, 3) if what == "cut" else (0, 1):
        raised = re.search(r"^raised (\S+) \w+", job.out[rank], re.MULTILINE)
        if raised:
            assert limit - 1 < float(raised[1]) < 3 * limit, job
            assert "all_reduce" in job.out[rank], job
    for side in ((0, 1), (2, 3)) if what == "cut" else ((0, 1),):
        others = "2-3" if side == (0, 1) else "0-1"
        words = (f"ranks {others} did not make the matching call", "it has been inside MPI for")
        assert any(word in said[rank] for rank in side for word in words), job


def test_mended_link(two: Hosts) -> None:
    """A link that is away for two seconds of a longer limit does no harm: the calls go on when it is back."""

    def blink(job: RunningJob) -> None:
        job.wait_for("ready", 0, 1, 2, 3)
        two.cut("host2")
        time.sleep(2)
        two.mend("host2")
        (two.folder / "back").touch()

    job = run_job(
        HEAD
        + """
import os
print("ready", flush=True)
calls, longest, more = 0, 0.0, np.ones(1)
while more[0]:
    began = time.time()
    dist.all_reduce(x := np.ones(4))
    assert x[0] == n
    longest = max(longest, time.time() - began)
    more[0] = not os.path.exists(sys.argv[1])
    dist.broadcast(more, 0)
    calls += 1
    time.sleep(0.01)
print("went on", longest, flush=True)
""",
        4,
        limit=60,
        args=[str(two.folder / "back")],
        launcher=two.launcher(2, ["MPICOLL_TIMEOUT"]),
        env={"MPICOLL_TIMEOUT": "40"},
        meanwhile=blink,
    )
    assert not job.timed_out, job
    assert job.returncode == 0, job
    for out in job.out:
        went_on = re.search(r"^went on (\S+)", out, re.MULTILINE)
        assert went_on, job
        assert float(went_on[1]) > 1, job
    assert not job.left_running, job
