"""TCPStore between ranks: found by a port that is told, with a secret that has travelled over MPI."""

from __future__ import annotations

from datetime import timedelta

import pytest

import mpicoll as dist

pytestmark = pytest.mark.mpi


def test_between_ranks() -> None:
    """Every rank writes, and reads what the others wrote; counters count all; the default secret is the job's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    port = [0]
    store = None
    if rank == 0:
        store = dist.TCPStore("localhost", 0, size, True, timedelta(seconds=15), wait_for_workers=False)
        port = [store.port]
    dist.broadcast_object_list(port, 0)
    if store is None:
        store = dist.TCPStore("localhost", port[0], size, timeout=timedelta(seconds=15))
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
