"""TCPStore between ranks: found by a port that is told, with a secret that has travelled over MPI."""

from __future__ import annotations

import fcntl
import os
import tempfile
from datetime import timedelta

import numpy as np
import pytest

import mpicoll as dist
from mpicoll.stores import file

pytestmark = pytest.mark.mpi


def of_all_ranks() -> dist.TCPStore:
    """Return a store that rank 0 serves."""
    rank, size = dist.get_rank(), dist.get_world_size()
    port = [0]
    store = None
    if rank == 0:
        store = dist.TCPStore("localhost", 0, size, True, timedelta(seconds=15), wait_for_workers=False)
        port = [store.port]
    dist.broadcast_object_list(port, 0)
    if store is None:
        store = dist.TCPStore("localhost", port[0], size, timeout=timedelta(seconds=15))
    return store


def file_of_all_ranks() -> dist.FileStore:
    """Return a store in a file that the last rank to close it removes."""
    path = [f"{tempfile.gettempdir()}/mpicoll-store-{os.getpid()}"]
    dist.broadcast_object_list(path, 0)
    store = dist.FileStore(path[0], dist.get_world_size())
    store.set_timeout(timedelta(seconds=15))
    return store


def test_between_ranks() -> None:
    """Every rank writes, and reads what the others wrote; counters count all; the default secret is the job's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = of_all_ranks()
    store.set(f"rank {rank}", str(rank * rank))
    assert store.multi_get([f"rank {each}" for each in range(size)]) == [b"%d" % each**2 for each in range(size)]
    for _ in range(100):
        store.add("all", 1)
    mine = dist.PrefixStore(str(rank), store)
    mine.queue_push("q", b"x")
    dist.barrier()
    assert store.get("all") == b"%d" % (100 * size)
    assert mine.queue_pop("q") == b"x"
    dist.barrier()
    assert len(store.list_keys()) == size + 1
    dist.barrier()
    store.close()
    dist.barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_a_wait_in_a_store_progresses_requests(kind: str) -> None:
    """A rank that waits for a key does its part of the calls that others wait for before they set the key.

    A callback of such a call may use the same store.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    store: dist.Store = of_all_ranks()
    if kind == "file":
        served, store = store, file_of_all_ranks()
    x = np.ones(1 << 20)
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.get_future().add_done_callback(lambda _: store.set("called", b"1"))
        store.wait([f"rank {each}" for each in range(1, size)])
        work.wait()
        assert store.get("called") == b"1"
    else:
        dist.all_reduce(x)
        store.set(f"rank {rank}", b"1")
    assert (x == size).all()
    dist.barrier()
    store.close()  # type: ignore[attr-defined]
    if kind == "file":
        served.close()
    dist.barrier()


@pytest.mark.mpi(min_size=2)
def test_a_wait_for_a_lock_progresses_requests() -> None:
    """A rank that waits for a file's lock does its part of the call that the rank with the lock waits for."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = file_of_all_ranks()
    reads = os.open(store.path, os.O_RDONLY)
    dist.barrier()  # every rank has made its store, which needs the lock
    if rank == 1:
        fcntl.flock(reads, fcntl.LOCK_EX)
    dist.barrier()
    x = np.ones(1 << 20)
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        store.set("a", "1")
        work.wait()
    else:
        dist.all_reduce(x)
        fcntl.flock(reads, fcntl.LOCK_UN)
    os.close(reads)
    assert (x == size).all()
    assert store.get("a") == b"1"
    dist.barrier()
    store.close()
    dist.barrier()


def test_a_file_of_ranks_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank replaces the file again and again while the others use it; nothing is lost, and the last removes it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    monkeypatch.setattr(file, "COMPACT_BYTES", 1000)
    store = file_of_all_ranks()
    store._reset()
    for number in range(100):
        store.set(f"rank {rank}", str(number))
        store.queue_push("q", str(rank))
        store.add("all", 1)
        assert int(store.queue_pop("q")) in range(size)
    dist.barrier()
    assert store.multi_get([f"rank {each}" for each in range(size)]) == [b"99"] * size
    assert (store.get("all"), store.queue_len("q")) == (b"%d" % (100 * size), 0)
    assert os.path.getsize(store.path) < 3000
    dist.barrier()
    store.close()
    dist.barrier()
    assert not os.path.exists(store.path)
