"""FileStore: its lock has a limit, its file is the user's own, nothing is lost when it is removed, and it stays small."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

import mpicoll as dist
from mpicoll.stores import file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@contextlib.contextmanager
def locked(path: Path, seconds: float = 60.0):  # type: ignore[no-untyped-def]
    """Hold the lock of a file as a process that may only read it can, for the block or some seconds."""
    reads = os.open(path, os.O_RDONLY)
    fcntl.flock(reads, fcntl.LOCK_EX)
    frees = threading.Timer(seconds, fcntl.flock, (reads, fcntl.LOCK_UN))
    frees.start()
    try:
        yield
    finally:
        frees.cancel()
        frees.join()
        os.close(reads)


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.get("a"),
        lambda store: store.set("a", "2"),
        lambda store: store.add("n", 1),
        lambda store: store.wait(["a"], timedelta(seconds=0.3)),
        lambda store: store.barrier("b", 1),
        lambda store: store.close(),
    ],
)
def test_the_limit_counts_for_the_lock(path: Path, call: Callable[[dist.FileStore], object]) -> None:
    """A call that cannot have the lock ends at the store's limit, names the file, and has changed nothing."""
    store = dist.FileStore(str(path), 1)
    store.set("a", "1")
    store.set_timeout(timedelta(seconds=0.3))
    with locked(path):
        started = time.monotonic()
        with pytest.raises(
            dist.DistStoreError, match=r"have held the lock of the file for 0\.[23]\d* s .*fuser -v .*store"
        ):
            call(store)
        assert 0.2 < time.monotonic() - started < 5
    assert store.multi_get(["a"]) == [b"1"]
    store.close()
    assert not path.exists()


def test_a_lock_that_becomes_free(path: Path) -> None:
    """A call goes on when the lock is free; so does a new store's constructor, whose limit is MPICOLL_TIMEOUT."""
    store = dist.FileStore(str(path))
    with locked(path, 0.3):
        started = time.monotonic()
        store.set("a", "1")
        assert 0.2 < time.monotonic() - started < 10
    with pytest.MonkeyPatch.context() as patch, locked(path):
        patch.setenv("MPICOLL_TIMEOUT", "0.3")
        with pytest.raises(dist.DistStoreError, match="num_keys: other processes have held the lock"):
            dist.FileStore(str(path))
    assert dist.FileStore(str(path)).get("a") == b"1"


def test_a_store_that_is_deleted_while_its_file_is_locked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its deletion gives up soon, and progresses nothing: it may happen inside any call."""
    monkeypatch.setattr(file, "_LAST_SECONDS", 0.3)
    store = dist.FileStore(str(path), 1)
    monkeypatch.setattr("mpicoll.stores.local.progress", lambda: pytest.fail("a deletion makes progress"))
    started = time.monotonic()
    with locked(path):
        del store
    assert 0.2 < time.monotonic() - started < 5
    assert path.exists()


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_the_file_is_the_users_own(path: Path, mask: int) -> None:
    """Nobody else may read a new file, whatever the umask; the mode of a file that exists stays, also when it is compacted."""
    before = os.umask(mask)
    try:
        store = dist.FileStore(str(path))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.chmod(0o640)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(file, "COMPACT_BYTES", 100)
            store._reset()
            number = path.stat().st_ino
            with path.open():  # else a later file may get the number of this one
                for each in range(100):
                    store.set("a", str(each))
                assert path.stat().st_ino != number
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        assert [each.name for each in path.parent.iterdir()] == ["store"]
    finally:
        os.umask(before)


def test_no_symbolic_links(tmp_path: Path) -> None:
    """A link is refused, whether there is a file behind it or not; a folder may be one."""
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    for _ in range(2):
        with pytest.raises(
            dist.DistStoreError, match=r"link: is a symbolic link, which a FileStore does not follow: pass the path"
        ):
            dist.FileStore(str(link))
        assert target.exists() == bool(_)
        target.touch()
    assert not target.read_bytes()
    folder = tmp_path / "folder"
    folder.symlink_to(tmp_path)
    dist.FileStore(str(folder / "store")).set("a", "1")
    assert dist.FileStore(str(tmp_path / "store")).get("a") == b"1"


def test_a_file_that_is_removed_before_it_is_locked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value of the next run does not go into the file that the last store of the run before removes."""
    old, new = dist.FileStore(str(path), 1), dist.FileStore(str(path), 2)
    plain = fcntl.flock

    def flock(number: int, how: int) -> None:
        if how & fcntl.LOCK_EX and threading.current_thread() is threading.main_thread():
            closes = threading.Thread(target=old.close)  # the file is open, and not locked
            closes.start()
            closes.join()
        plain(number, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    new.set("a", "1")
    monkeypatch.undo()
    assert dist.FileStore(str(path)).check(["a"])


def test_a_file_is_removed_under_its_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that the next run sets while the last store of the run before removes the file goes into a new file."""
    old, new = dist.FileStore(str(path), 1), dist.FileStore(str(path), 2)
    plain, threads = os.unlink, []

    def unlink(*args: str) -> None:
        threads.append(threading.Thread(target=new.set, args=("a", "1")))
        threads[0].start()
        threads[0].join(0.3)
        plain(*args)

    monkeypatch.setattr(os, "unlink", unlink)
    old.close()
    monkeypatch.undo()
    threads[0].join()
    assert dist.FileStore(str(path)).check(["a"])


def test_a_file_that_stays_small(path: Path) -> None:
    """500 values of 50 kB under 50 keys, queues and counters: the file has less than twice what is there, and 1 MiB."""
    store, other = dist.FileStore(str(path)), dist.FileStore(str(path))
    largest = 0
    for number in range(500):
        store.set(f"k{number % 50}", bytes([number % 256]) * 50_000)
        other.queue_push("q", str(number))
        if number > 5:
            assert store.queue_pop("q") == b"%d" % (number - 6)
        other.add("n", 1)
        largest = max(largest, path.stat().st_size)
    assert largest < 2 * 50 * 50_100 + (1 << 20)
    for each in (store, other, dist.FileStore(str(path))):
        assert each.multi_get([f"k{key}" for key in range(50)]) == [
            bytes([(450 + key) % 256]) * 50_000 for key in range(50)
        ]
        assert (each.get("n"), each.queue_len("q")) == (b"500", 6)
    assert [other.queue_pop("q") for _ in range(6)] == [b"%d" % each for each in range(494, 500)]
    for key in store.list_keys():
        store.delete_key(key)
    store.set("a", "1")
    assert path.stat().st_size < 1 << 20
    assert other.list_keys() == ["a"]


def test_a_folder_that_may_not_be_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be replaced, or is another user's, stays in use; replacing it is not tried at every call."""
    store = dist.FileStore(str(path))
    tried = []
    plain = os.rename

    def rename(*args: str) -> None:
        tried.append(args)
        raise PermissionError

    monkeypatch.setattr(os, "rename", rename)
    for number in range(200):
        store.set("a", bytes([number]) * 50_000)
    assert 2 <= len(tried) < 5
    assert path.stat().st_size > 9_000_000
    assert [each.name for each in path.parent.iterdir()] == ["store"]
    assert dist.FileStore(str(path)).get("a") == store.get("a") == bytes([199]) * 50_000
    monkeypatch.setattr(os, "rename", plain)
    others = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: others)
    for number in range(300):
        store.set("a", bytes([number % 256]) * 50_000)
    assert path.stat().st_size > 20_000_000
    monkeypatch.undo()
    for number in range(600):
        store.set("a", bytes([number % 256]) * 50_000)
    assert path.stat().st_size < 2_000_000


WORKER = """
import sys
import mpicoll as dist
from mpicoll.stores import file
file.COMPACT_BYTES = 400
store = dist.FileStore(sys.argv[1])
me = sys.argv[2]
print("ready", flush=True)
for number in range(int(sys.argv[3])):
    store.add("all", 1)
    store.set(me, str(store.add(f"n{me}", 1)))
    print(number + 1, flush=True)
"""


@pytest.mark.slow
def test_processes_that_are_killed_while_they_compact(path: Path) -> None:
    """Whenever a process is killed, no operation that has returned is lost, and none is done twice."""
    rng = random.Random(5)
    store = dist.FileStore(str(path))

    def start(me: object, count: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", WORKER, str(path), str(me), str(count)], stdout=subprocess.PIPE, text=True
        )

    steady = start("steady", 1500)
    least = 0
    for number in range(8):
        dies = start(number, 100_000)
        assert dies.stdout is not None
        dies.stdout.readline()
        time.sleep(rng.uniform(0.1, 0.5))
        dies.send_signal(signal.SIGKILL)
        done = len(dies.communicate()[0].splitlines())
        if done:
            assert int(store.get(f"n{number}")) in (done, done + 1)
        least += done
    assert steady.wait(120) == 0
    assert steady.communicate()[0].splitlines()[-1] == "1500"
    assert least + 1500 <= int(store.get("all")) <= least + 1500 + 8
    assert store.get("steady") == b"1500"
    assert path.stat().st_size < 10_000
