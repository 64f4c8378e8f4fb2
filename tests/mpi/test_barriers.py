"""monitored_barrier in torch's words, and what is asked about backends."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import numpy as np
import pytest

import mpicoll as dist
from mpicoll.api import collectives

pytestmark = pytest.mark.mpi


def test_all_come() -> None:
    """It returns when all have come, and a barrier may stand for it; seconds are taken with a warning."""
    dist.monitored_barrier()
    if dist.get_rank():
        dist.barrier()
    else:
        dist.monitored_barrier(timeout=timedelta(seconds=5), wait_all_ranks=True)
    with pytest.warns(UserWarning, match="timeout arg as a timedelta"):
        dist.monitored_barrier(timeout=5.0)


@pytest.mark.mpi(min_size=2)
def test_a_limit_of_nothing() -> None:
    """It is over at once, and not the group's limit."""
    group = dist.new_group(timeout=timedelta(seconds=1000))
    if dist.get_rank() == 0:
        with pytest.raises(
            dist.CollectiveTimeoutError, match="Rank 0 timed out in monitoredBarrier after 0 ms"
        ) as caught:
            dist.monitored_barrier(group, timedelta(0))
        assert str(caught.value).startswith("[Rank 0]: Rank 1 failed to pass monitoredBarrier in 0 ms")
    dist.barrier()
    dist.destroy_process_group(group)


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("every", [False, True])
def test_some_do_not_come(every: bool) -> None:
    """Rank 0 names the first that is missing, or all; the others say that they came."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    late = list(range(1, size - 1))
    if rank in late:
        time.sleep(2.5)
    else:
        with pytest.raises(dist.CollectiveTimeoutError) as caught:
            dist.monitored_barrier(group, timedelta(seconds=1), every)
        text = str(caught.value)
        if rank == 0:
            who = f"Ranks {', '.join(map(str, late))}" if every else "Rank 1"
            assert text.startswith(f"[Rank 0]: {who} failed to pass monitoredBarrier in 1000 ms")
        else:
            assert text.startswith(f"Rank {rank} successfully reached monitoredBarrier")
        assert " Timed out " in text
        assert caught.value.ranks == late
    dist.barrier()
    dist.destroy_process_group(group)


@pytest.mark.mpi(min_size=2)
def test_the_place_of_a_call_that_is_made_again() -> None:
    """Errors name the line of the program, at the first call and at later ones; a barrier waited for is not called async."""
    group, other = dist.new_group(), dist.new_group()
    pending = dist.all_reduce(np.ones(1), group=other, async_op=True)
    for _ in range(3):
        dist.monitored_barrier(group)
        with pytest.raises(dist.CollectiveMismatchError) as caught:
            if dist.get_rank() == 0:
                dist.monitored_barrier(group)
            else:
                dist.broadcast(np.ones(2), 0, group)
        assert len(caught.value.calls) == 2
        for call in caught.value.calls:
            assert os.path.basename(call["site"]).startswith("test_barriers.py:"), call
            assert not call["async"], call
    pending.wait()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("where", ["on this group", "on another group"])
def test_others_are_in_another_call(where: str) -> None:
    """Rank 0 still says in torch's words who has not come; what is the matter stands behind them."""
    rank = dist.get_rank()
    group, other = dist.new_group(), dist.new_group()
    kinds: tuple[type[Exception], ...] = (dist.CollectiveMismatchError,)
    if where == "on another group":
        # Rank 0 and one other wait for each other for certain; one that comes later finds the group given up.
        kinds = (dist.DeadlockError, *((dist.GroupBrokenError,) if rank else ()))
    with pytest.raises(kinds) as caught:
        if rank == 0:
            dist.monitored_barrier(group, timedelta(seconds=10))
        else:
            dist.all_reduce(np.ones(2), group=group if where == "on this group" else other)
    if rank == 0:
        assert str(caught.value).startswith("[Rank 0]: Rank 1 failed to pass monitoredBarrier:\n")
    assert "all_reduce" in str(caught.value)
    dist.barrier()
    for each in (group, other):
        dist.destroy_process_group(each)


def test_breakpoint(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One rank stops, the others wait; the first calls may pass by."""
    stops = []
    monkeypatch.setattr(collectives.pdb, "set_trace", lambda: stops.append(dist.get_rank()))
    monkeypatch.setattr(collectives, "_skipped", 0)
    for _ in range(3):
        dist.breakpoint(dist.get_world_size() - 1, skip=1)
    last = dist.get_rank() == dist.get_world_size() - 1
    assert stops == [dist.get_rank()] * 2 * last
    assert ("stops here" in capsys.readouterr().out) == last


def test_what_is_asked_about_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is MPI, and no other."""
    assert dist.Backend("GLOO") == "gloo"
    assert dist.Backend.GLOO == "gloo"
    assert dist.Backend("Mine") == "mine"
    with pytest.raises(ValueError, match="string-ish"):
        dist.Backend(3)  # type: ignore[arg-type]
    assert dist.get_backend_config() == "cpu:mpi,cuda:mpi"
    assert dist.is_backend_available("MPI")
    assert dist.is_backend_available("cpu:mpi,cuda:mpi")
    assert not dist.is_backend_available("cpu:gloo,cuda:mpi")
    assert not (dist.is_gloo_available())
    assert not (dist.is_nccl_available())
    assert not (dist.is_ucc_available())
    assert not (dist.is_xccl_available())
    assert not dist.is_torchelastic_launched()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert dist.is_torchelastic_launched()
    assert dist.supports_complex(dist.ReduceOp.AVG)
    assert dist.supports_complex(dist.ReduceOp.PREMUL_SUM(2.0))
    assert not dist.supports_complex(dist.ReduceOp.MAX)
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    before = dist.get_pg_count()
    group = dist.new_group()
    assert dist.get_pg_count() == before + 1
    dist.destroy_process_group(group)


@pytest.mark.mpi(min_size=2)
def test_not_a_member() -> None:
    """A group that this rank is not in has no backend."""
    group = dist.new_group([0])
    if dist.get_rank():
        with pytest.raises(ValueError, match="Invalid process group"):
            dist.get_backend_config(group)
        with pytest.raises(ValueError, match="Invalid process group specified"):
            dist.get_backend_impl(group)
    else:
        assert dist.get_backend_config(group) == "cpu:mpi,cuda:mpi"
        assert dist.get_backend_impl() is dist.group.WORLD
        assert dist.get_backend_impl(group.group_name) is group
        with pytest.raises(ValueError, match="Invalid process group specified"):
            dist.get_backend_impl("no such group")
        for device in (None, "cpu", "cuda:1"):
            assert dist.get_backend_impl(group, device) is group
        with pytest.raises(ValueError, match="not registered for device : tpu"):
            dist.get_backend_impl(group, "tpu")
