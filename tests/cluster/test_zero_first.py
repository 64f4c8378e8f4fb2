"""Blocks that one rank runs first, on two hosts: each has its own, and what one writes is late on the other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from jobs import JobResult, RunningJob, run_job

sys.path.insert(0, str(Path(__file__).parent))
from hosts import Hosts, hosts_up, missing

WHY_NOT = missing()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "two hosts can be made")]

HEAD = """
import os, socket, sys, time
import mpicoll as dist
dist.init_process_group()
r, n, local = dist.get_rank(), dist.get_world_size(), dist.get_node_local_rank()
host = socket.gethostname()
assert (n, host, local) == (4, "host1" if r < 2 else "host2", r % 2), (r, n, host, local)
dist.barrier()
"""


def two(folder: Path) -> AbstractContextManager[Hosts]:
    """Bring up two hosts; the second sees the content of "far" where the first sees that of "near"."""
    return hosts_up(folder, mounts={"host2": [(folder / "far", folder / "near")]})


@pytest.fixture
def folder(folder: Path) -> Path:
    """Make the two folders that the hosts see under one name."""
    for sub in ("near", "far"):
        (folder / sub).mkdir()
    return folder


@pytest.fixture
def hosts(folder: Path) -> Iterator[Hosts]:
    with two(folder) as up:
        yield up


def fine(job: JobResult) -> None:
    assert not job.timed_out, job
    assert job.returncode == 0, job
    assert not job.left_running, job


def test_a_slow_host_holds_up_no_other(hosts: Hosts, folder: Path) -> None:
    """The ranks of one host are through two blocks while the first rank of the other is still in the first."""

    def let_go(job: RunningJob) -> None:
        job.wait_for("in the block", 2)
        job.wait_for("through", 0, 1)
        time.sleep(0.5)
        assert not any("through" in job.printed(rank) for rank in (2, 3)), "did not wait for the first rank of the host"
        (folder / "go on").touch()

    job = run_job(
        HEAD
        + """
for number in range(2):
    with dist.zero_first("cache", scope="node") as turn:
        assert turn.leader == r - local
        if turn.is_leader:
            turn.share((host, number))
            while host == "host2" and not os.path.exists(sys.argv[1]):
                print("in the block", flush=True)
                time.sleep(0.05)
    assert turn.value == (host, number)
print("through", flush=True)
dist.barrier()
""",
        4,
        limit=60,
        launcher=hosts.launcher(2),
        args=[str(folder / "go on")],
        meanwhile=let_go,
    )
    fine(job)


def show(folder: Path) -> None:
    """Make what the first host has written visible on the second: with the same times, and each file as a whole."""
    for source in sorted((folder / "near").rglob("*")):
        target = folder / "far" / source.relative_to(folder / "near")
        if source.is_dir():
            target.mkdir(exist_ok=True)
        else:
            shutil.copy2(source, folder / "on its way")
            os.rename(folder / "on its way", target)


def test_what_is_published_is_late_on_the_other_host(hosts: Hosts, folder: Path) -> None:
    """The ranks there enter the block when they see all of it, first nothing, then old content; the others at once."""

    def late(job: RunningJob) -> None:
        job.wait_for("written", 0)
        time.sleep(1)
        assert not any("entered" in job.printed(rank) for rank in (2, 3)), "entered before anything could be seen"
        (folder / "far" / "data").mkdir()
        old = folder / "far" / "data" / "0.txt"
        old.write_text("old")
        os.utime(old, (1e9, 1e9))
        time.sleep(1)
        assert not any("entered" in job.printed(rank) for rank in (2, 3)), "entered when old content could be seen"
        show(folder)

    job = run_job(
        HEAD
        + """
from pathlib import Path
path = Path(sys.argv[1]) / "data"
assert not path.exists()
with dist.zero_first("preprocess", publish=[path]) as turn:
    if turn.is_leader:
        path.mkdir()
        for i in range(20):
            (path / f"{i}.txt").write_text(str(i) * 1000)
        print("written", time.time(), flush=True)
    else:
        print("entered", time.time(), flush=True)
        for i in range(20):
            assert (path / f"{i}.txt").read_text() == str(i) * 1000, (host, i)
""",
        4,
        limit=60,
        launcher=hosts.launcher(2),
        args=[str(folder / "near")],
        meanwhile=late,
    )
    fine(job)
    when = [float(out.split()[1]) for out in job.out]
    assert when[1] - when[0] < 1, job
    for rank in (2, 3):
        assert 2 <= when[rank] - when[0] < 10, job


def test_what_is_published_is_never_seen(hosts: Hosts, folder: Path) -> None:
    """The ranks that do not see it say what, where and whose it is; the others learn of that, and the group is good."""
    job = run_job(
        HEAD
        + """
from pathlib import Path
path = Path(sys.argv[1]) / "data.bin"
entered = False
try:
    with dist.zero_first("preprocess", publish=[path], visibility_timeout=1.5) as turn:
        entered = True
        if turn.is_leader:
            path.write_bytes(bytes(10))
except (TimeoutError, dist.PeerFailedError) as error:
    print(entered, type(error).__name__, error, flush=True)
dist.barrier()
print("good", flush=True)
""",
        4,
        limit=60,
        launcher=hosts.launcher(2),
        args=[str(folder / "near")],
    )
    fine(job)
    path = folder / "near" / "data.bin"
    for rank, out in enumerate(job.out):
        if rank < 2:
            assert out.startswith("True PeerFailedError rank 2 failed in zero_first('preprocess')"), job
        else:
            assert out.startswith(f"False TimeoutError {path} does not exist, as seen from host2 1.5 s after"), job
            assert "rank 0 (host1) had written it" in out, job
        assert f"{path} does not exist, as seen from host2" in out, job
        assert "good" in out.splitlines(), job


def test_nothing_is_left_behind(folder: Path) -> None:
    """The hosts are gone with what used them, and the machine has the network links and mounts that it had."""

    def state() -> tuple[set[str], list[str], str]:
        links = set(os.listdir("/sys/class/net"))
        spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        return links, sorted(Path("/proc/mounts").read_text().splitlines()), spaces

    before = state()
    with two(folder) as up:
        pids = list(up.first.values())
        sees = [
            subprocess.run([*up.enter(name), "hostname"], capture_output=True, text=True).stdout for name in up.names
        ]
        assert sees == ["host1\n", "host2\n"]
        assert state() == before
        others = [os.readlink(f"/proc/{pid}/ns/net") for pid in pids]
        assert len({*others, os.readlink("/proc/self/ns/net")}) == 4
    assert state() == before
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
