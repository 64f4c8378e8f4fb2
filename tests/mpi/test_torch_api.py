"""What a script written for torch.distributed 2.13 finds here: return values, warnings, errors and defaults, call by call."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import mpicoll as dist
from mpicoll import ReduceOp
from mpicoll.pytest_plugin import collective_raises
from mpicoll.runtime import settings

pytestmark = pytest.mark.mpi

NOBODY = dist.GroupMember.NON_GROUP_MEMBER
Calls = dict[str, Callable[[], Any]]


@pytest.fixture
def _level() -> Iterator[None]:
    """Let a test set the debug level, and leave the default group as the other tests want it."""
    yield
    settings.asked_level = None
    if dist.is_initialized():
        dist.destroy_process_group()


def with_roots(group: Any, **peer: int) -> Calls:
    """Return each call that has a source or a destination, which ``peer`` names as ``src`` (or ``group_src``)."""
    (name, rank), x = *peer.items(), np.ones(2)
    src: dict[str, Any] = {name: rank}
    dst: dict[str, Any] = {name.replace("src", "dst"): rank}
    return {
        "broadcast": lambda: dist.broadcast(x, group=group, **src),
        "reduce": lambda: dist.reduce(x, group=group, **dst),
        "gather": lambda: dist.gather(x, group=group, **dst),
        "scatter": lambda: dist.scatter(x, group=group, **src),
        "isend": lambda: dist.isend(x, group=group, **dst),
        "irecv": lambda: dist.irecv(x, group=group, **src),
        "recv": lambda: dist.recv(x, group=group, **src),
        "broadcast_object_list": lambda: dist.broadcast_object_list([1], group=group, **src),
        "gather_object": lambda: dist.gather_object(1, group=group, **dst),
        "scatter_object_list": lambda: dist.scatter_object_list([1], group=group, **src),
    }


@pytest.mark.mpi(min_size=2)
def test_ranks_outside_a_group_may_name_their_peer_by_its_global_rank() -> None:
    """All ranks may make a call with ``src=`` or ``dst=``: those outside warn, return None (recv: -1), and do nothing."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    group = dist.new_group([last])
    if rank == last:
        dist.destroy_process_group(group)
        return
    for peer in ({"src": last}, {"group_src": 0}):
        for name, call in with_roots(group, **peer).items():
            with pytest.warns(UserWarning, match=f"Running {name} on global rank {rank} which does not belong") as seen:
                assert call() == (-1 if name == "recv" else None), name
            assert seen[0].filename == __file__, name
    for call in (  # in torch, too
        lambda: dist.send(np.ones(2), last, group),
        lambda: dist.send_object_list([1], last, group),
        lambda: dist.recv_object_list([1], last, group),
        lambda: dist.send(np.ones(2), group=group, group_dst=0),
        lambda: dist.send_object_list([1], group=group, group_dst=0),
        lambda: dist.recv_object_list([1], group=group, group_src=0),
        lambda: dist.recv_object_list([1], group=group),
    ):
        with pytest.raises(ValueError, match="Invalid process group specified"):
            call()


@pytest.mark.mpi(min_size=2)
def test_a_batch_on_a_group_that_this_rank_is_not_in() -> None:
    """P2POp says nothing; batch_isend_irecv warns of each operation, and returns no Work."""
    rank = dist.get_rank()
    group = dist.new_group([0])
    if rank == 0:
        dist.destroy_process_group(group)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops = [dist.P2POp(op, np.ones(2), 0, group) for op in (dist.isend, dist.irecv)]
    with pytest.warns(UserWarning, match="Running i(send|recv)") as seen:
        assert dist.batch_isend_irecv(ops) == []
    said = [str(each.message) for each in seen]
    assert [text.split(" which")[0] for text in said] == [
        f"Running {op} on global rank {rank}" for op in ("isend", "irecv")
    ]
    assert seen[0].filename == __file__


@pytest.mark.mpi(min_size=2)
def test_global_and_group_ranks() -> None:
    """Both are refused, neither is where there is no default, and who is not in the group is none of its ranks."""
    size, rank = dist.get_world_size(), dist.get_rank()
    x = np.ones(2)
    both: Calls = {
        "broadcast": lambda: dist.broadcast(x, 0, group_src=0),
        "reduce": lambda: dist.reduce(x, 0, group_dst=0),
        "gather": lambda: dist.gather(x, None, 0, group_dst=0),
        "scatter": lambda: dist.scatter(x, None, 0, group_src=0),
        "broadcast_object_list": lambda: dist.broadcast_object_list([1], 0, group_src=0),
        "gather_object": lambda: dist.gather_object(1, None, 0, group_dst=0),
        "scatter_object_list": lambda: dist.scatter_object_list([1], None, 0, group_src=0),
        "send": lambda: dist.send(x, 0, group_dst=0),
        "isend": lambda: dist.isend(x, 0, group_dst=0),
        "recv": lambda: dist.recv(x, 0, group_src=0),
        "irecv": lambda: dist.irecv(x, 0, group_src=0),
        "P2POp": lambda: dist.P2POp(dist.isend, x, 0, group_peer=0),
        "send_object_list": lambda: dist.send_object_list([1], 0, group_dst=0),
        "recv_object_list": lambda: dist.recv_object_list([1], 0, group_src=0),
    }
    for call in both.values():
        with collective_raises(ValueError, match="Can't specify both group_rank and global_rank"):
            call()
    neither: Calls = {
        "broadcast": lambda: dist.broadcast(x),
        "reduce": lambda: dist.reduce(x),
        "send": lambda: dist.send(x),
        "isend": lambda: dist.isend(x),
        "P2POp": lambda: dist.P2POp(dist.isend, x),
        "send_object_list": lambda: dist.send_object_list([1]),
    }
    for call in neither.values():
        with collective_raises(ValueError, match="Must specify global_rank or group_rank"):
            call()
    group = dist.new_group(list(range(size))[::-1], sort_ranks=False)
    for call in with_roots(group, src=size).values():
        with collective_raises(ValueError, match=f"Global rank {size} is not part of group"):
            call()
    # The same source by both numbers.
    for peer in ({"src": 0}, {"group_src": size - 1}):
        y = np.full(2, float(rank))
        dist.broadcast(y, group=group, **peer)
        assert y.tolist() == [0, 0]
    dist.destroy_process_group(group)


def test_what_is_returned() -> None:
    """With async_op a Work, which wait() makes True; else None."""
    size = dist.get_world_size()
    x, blocks = np.ones(size), [np.ones(size) for _ in range(size)]
    mine = blocks if dist.get_rank() == 0 else None
    calls: dict[str, Callable[[bool], Any]] = {
        "broadcast": lambda a: dist.broadcast(x, 0, async_op=a),
        "all_reduce": lambda a: dist.all_reduce(x, async_op=a),
        "all_reduce_coalesced": lambda a: dist.all_reduce_coalesced([x], async_op=a),
        "reduce": lambda a: dist.reduce(x, 0, async_op=a),
        "all_gather": lambda a: dist.all_gather(blocks, x, async_op=a),
        "all_gather_single": lambda a: dist.all_gather_single(np.ones((size, size)), x, async_op=a),
        "all_gather_coalesced": lambda a: dist.all_gather_coalesced([[each] for each in blocks], [x], async_op=a),
        "gather": lambda a: dist.gather(x, mine, async_op=a),
        "gather_single": lambda a: dist.gather_single(x, np.ones((size, size)) if mine else None, async_op=a),
        "scatter": lambda a: dist.scatter(x, mine, async_op=a),
        "reduce_scatter": lambda a: dist.reduce_scatter(x, blocks, async_op=a),
        "reduce_scatter_single": lambda a: dist.reduce_scatter_single(x, np.ones(size * size), async_op=a),
        "all_to_all": lambda a: dist.all_to_all(blocks, [each.copy() for each in blocks], async_op=a),
        "all_to_all_single": lambda a: dist.all_to_all_single(x, np.ones(size), async_op=a),
        "barrier": lambda a: dist.barrier(async_op=a),
    }
    for name, call in calls.items():
        assert call(False) is None, name
        work = call(True)
        assert isinstance(work, dist.Work), name
        assert work.wait() is True, name
        assert work.is_completed(), name
        assert work.is_success(), name
        assert work.exception() is None, name


def test_works_and_their_futures() -> None:
    """wait takes a timedelta; a Future has wait, value, then and callbacks, as torch's."""
    size = dist.get_world_size()
    x = np.ones(2)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    with pytest.raises(TypeError, match="timedelta"):
        work.wait(3)  # type: ignore[arg-type]
    assert work.wait(timedelta(seconds=10))
    assert work.result()[0] is x
    work.synchronize()
    assert work.get_future().value()[0] is x  # type: ignore[attr-defined]
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    future: Any = work.get_future()
    seen: list[Any] = []
    future.add_done_callback(lambda done: seen.append(done.value()[0]))
    later = future.then(lambda done: done.value()[0] * 3).then(lambda done: done.wait() + 1)
    assert later.wait().tolist() == [size * size * 3 + 1] * 2
    assert later.value().tolist() == later.result().tolist()
    assert len(seen) == 1
    assert seen[0] is x
    work = dist.barrier(async_op=True)
    assert work is not None
    failing: Any = work.get_future()
    with pytest.raises(ZeroDivisionError):
        failing.then(lambda done: 1 // 0).wait()
    assert failing.wait() == []


@pytest.mark.mpi(min_size=2)
def test_futures_of_what_is_not_done() -> None:
    """value() raises before the end, and a chain of then() is as good to wait for as the call."""
    rank = dist.get_rank()
    x = np.zeros(2)
    other = 1 - rank if rank < 2 else None
    if other is not None:
        receiving = dist.irecv(x, other)
        assert receiving is not None
        future: Any = receiving.get_future()
        chain = future.then(lambda done: done.value()[0].sum())
        if rank == 0:  # nobody sends before this rank does
            for each in (future, chain):
                with pytest.raises(RuntimeError, match="not done yet"):
                    each.value()
            dist.send(np.ones(2), 1)
            assert chain.wait() == 4
        else:
            assert chain.wait() == 2
            dist.send(np.full(2, 2.0), 0)
    dist.barrier()


@pytest.mark.mpi(min_size=2)
def test_messages() -> None:
    """send and recv refuse this rank itself, isend and irecv do not; recv returns a global rank, source_rank one in the group."""
    size, rank = dist.get_world_size(), dist.get_rank()
    x = np.full(2, float(rank))
    for call, word in ((dist.send, "destination"), (dist.recv, "source")):
        with pytest.raises(ValueError, match=f"Invalid {word} rank: {word} rank should not be the same as the rank of"):
            call(x, rank)
    y = np.zeros(2)
    sending, receiving = dist.isend(x, rank), dist.irecv(y, rank)
    assert sending is not None
    assert receiving is not None
    receiving.wait()
    sending.wait()
    assert y.tolist() == x.tolist()
    group = dist.new_group(list(range(size))[::-1], sort_ranks=False)
    if rank == 0:
        for tag in (0, 7):
            assert dist.send(x, 1, group, tag) is None  # type: ignore[func-returns-value]
        work = dist.isend(x, group_dst=size - 2, group=group)
        assert work is not None
        work.wait()
    elif rank == 1:
        assert dist.recv(y, group=group) == 0
        assert dist.recv(y, group_src=size - 1, group=group, tag=7) == 0
        receiving = dist.irecv(y, group=group)
        assert receiving is not None
        receiving.wait()
        assert receiving.source_rank() == receiving._source_rank() == size - 1
    dist.barrier(group)
    dist.destroy_process_group(group)


@pytest.mark.mpi(min_size=2)
def test_batches_of_messages() -> None:
    """P2POp takes isend and irecv alone; a batch a list of them, of one group."""
    size, rank = dist.get_world_size(), dist.get_rank()
    x = np.full(2, float(rank))
    for op in (dist.broadcast, "isend", None):
        with pytest.raises(ValueError, match=r"^Invalid ``op``"):
            dist.P2POp(op, x, 0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Invalid function argument"):
        dist.P2POp(dist.isend, "x", 0)
    group = dist.new_group()
    one = dist.P2POp(dist.isend, x, 0, tag=3)
    assert (one.peer, one.group_peer, one.tag, one.group) == (0, 0, 3, dist.group.WORLD)
    for wrong in ("x", [1], (one,), [one, 1]):
        with pytest.raises(ValueError, match=r"^Invalid ``p2p_op_list``"):
            dist.batch_isend_irecv(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="All ops need to use the same group"):
        dist.batch_isend_irecv([one, dist.P2POp(dist.isend, x, 0, group)])
    with pytest.raises(IndexError):
        dist.batch_isend_irecv([])
    y = np.zeros(2)
    before, after = (rank - 1) % size, (rank + 1) % size
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, after, group), dist.P2POp(dist.irecv, y, group_peer=before, group=group)]
    )
    assert [work.wait() for work in works] == [True, True]
    assert y.tolist() == [before] * 2
    dist.destroy_process_group(group)


def test_lists_of_objects() -> None:
    """The default root is rank 0; lists may be longer than the group; scattered objects come into the first place."""
    size, rank = dist.get_world_size(), dist.get_rank()
    gathered: list[Any] = [None] * size + ["rest"]
    dist.all_gather_object(gathered, rank)
    assert gathered == [*range(size), "rest"]
    gathered = [None] * size + ["rest"]
    dist.gather_object(rank, gathered if rank == 0 else None)
    assert gathered == ([*range(size), "rest"] if rank == 0 else [None] * size + ["rest"])
    out = [None, 7]
    dist.scatter_object_list(out, list(range(size)) if rank == 0 else None)
    assert out == [rank, 7]
    dist.scatter_object_list(out, list(range(10, 10 + size)))  # what the others pass is ignored
    assert out == [10 + rank, 7]
    told = [rank, rank]
    dist.broadcast_object_list(told, device="cpu")
    assert told == [0, 0]
    with collective_raises(ValueError, match=r"scatter_object_output_list to be a list of size at least 1\."):
        dist.scatter_object_list([], [1] * size)
    with collective_raises(ValueError, match="one place for each"):
        dist.all_gather_object([None] * (size - 1), 1)


def test_split_sizes() -> None:
    """Rows for each rank in a list, a tuple or an array; none, or an empty list, are equal parts; zeros are legal."""
    size, rank = dist.get_world_size(), dist.get_rank()
    x = np.arange(4.0 * size).reshape(2 * size, 2) + 100 * rank
    expected = np.concatenate([np.arange(4.0).reshape(2, 2) + 4 * rank + 100 * r for r in range(size)])
    for splits in (None, [], [2] * size, (2,) * size, np.full(size, 2), [np.int64(2)] * size):
        for other in (None, splits):
            out = np.zeros((2 * size, 2))
            dist.all_to_all_single(out, x, splits, other)  # type: ignore[arg-type]
            assert out.tolist() == expected.tolist(), (splits, other)
    mine = [2] * size if rank == 0 else [0] * size
    out = np.zeros((sum(mine), 2))
    dist.all_to_all_single(out, x[:2], mine, [2] + [0] * (size - 1))
    assert (
        out.tolist()
        == [row for r in range(size) for row in (np.arange(4.0).reshape(2, 2) + 100 * r).tolist()][: len(out)]
    )
    for text, wrong in (
        ("Split sizes doesn't match total dim 0 size", [1] * size),
        ("Number of tensor splits not equal to group size", [2] * (size + 1)),
    ):
        with collective_raises(RuntimeError, match=text):
            dist.all_to_all_single(np.zeros((2 * size, 2)), x, wrong, [2] * size)
    if size > 1:
        with collective_raises(RuntimeError, match="Tensor's dim 0 does not divide equally across group size"):
            dist.all_to_all_single(np.zeros(size + 1), np.zeros(size + 1))


def test_one_output_or_input_for_all() -> None:
    """all_gather_single, gather_single and reduce_scatter_single take the concatenation and the stack."""
    size, rank = dist.get_world_size(), dist.get_rank()
    x = np.full(3, float(rank))
    for gather in (dist.all_gather_single, dist.all_gather_into_tensor):
        for shape in ((size * 3,), (size, 3)):
            out = np.zeros(shape)
            gather(out, x)
            assert out.reshape(size, 3)[:, 0].tolist() == list(range(size))
    for gather_to_one in (dist.gather_single, dist.gather_into_tensor):
        for shape in ((size * 3,), (size, 3)):
            for dst in range(size):
                into = np.zeros(shape) if rank == dst else None
                gather_to_one(x, into, dst)
                assert into is None or into.reshape(size, 3)[:, 0].tolist() == list(range(size))
                method = dist.group.WORLD.gather_single
                made = method(into.fill(7) or into if rank == dst else None, x, dst)
                made.wait()
                assert into is None or into.reshape(size, 3)[:, 0].tolist() == list(range(size))
    for scatter in (dist.reduce_scatter_single, dist.reduce_scatter_tensor):
        for shape in ((size * 3,), (size, 3)):
            out = np.zeros(3)
            scatter(out, np.repeat(np.arange(float(size)), 3).reshape(shape))
            assert out.tolist() == [size * rank] * 3


def test_reduce_ops() -> None:
    """Their numbers, their types, copies and pickles; and the old name, which gives a FutureWarning."""
    names = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"]
    assert [int(getattr(ReduceOp, name)) for name in names] == list(range(9))
    for op in (ReduceOp.SUM, ReduceOp(ReduceOp.SUM)):
        assert isinstance(op, ReduceOp)
        assert op == ReduceOp.SUM
        assert op != ReduceOp.MAX
        for other in (copy.copy(op), copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
            assert other == op
        x = np.ones(2)
        dist.all_reduce(x, op)
        assert x.tolist() == [dist.get_world_size()] * 2
    assert isinstance(ReduceOp.SUM, ReduceOp.RedOpType)
    assert not isinstance(0, ReduceOp)
    assert ReduceOp(ReduceOp.MAX).op is ReduceOp.MAX
    factor: Any = ReduceOp.PREMUL_SUM(2.0)
    assert (factor.op, factor.factor) == (ReduceOp.PREMUL_SUM, 2.0)
    assert pickle.loads(pickle.dumps(factor)).factor == 2.0
    for wrong in ("SUM", 0, None):
        with pytest.raises(TypeError):
            ReduceOp(wrong)  # type: ignore[arg-type]
        with collective_raises(TypeError, match="op must be"):
            dist.all_reduce(np.ones(1), wrong)  # type: ignore[arg-type]
    with pytest.warns(FutureWarning, match="reduce_op is deprecated"):
        assert dist.reduce_op.SUM is ReduceOp.SUM
    with pytest.raises(AttributeError):
        _ = dist.reduce_op.NONE


@pytest.mark.parametrize(("real", "both"), [("f", "F"), ("d", "D")])
def test_complex_arrays_among_real_ones(real: str, both: str) -> None:
    """all_reduce_coalesced takes both in one list, where the parts of the one are of the other's dtype."""
    size = dist.get_world_size()
    for async_op in (False, True):
        arrays: list[Any] = [np.ones(2, real), np.full(3, 1 + 2j, both), np.full((2, 2), 3, real)]
        work = dist.all_reduce_coalesced(arrays, async_op=async_op)
        if work is not None:
            work.wait()
        assert [array.reshape(-1)[0] for array in arrays] == [size, size * (1 + 2j), 3 * size]
        assert [array.dtype.char for array in arrays] == [real, both, real]
    with collective_raises(ValueError, match="all_reduce does not support .*MAX on complex tensors"):
        dist.all_reduce_coalesced([np.ones(1, real), np.ones(1, both)], ReduceOp.MAX)
    other = "F" if both == "D" else "D"
    for wrong in (
        [np.ones(1, real), np.ones(1, other)],
        [np.ones(1, "f"), np.ones(1, "d")],
        [np.ones(1, "i"), np.ones(1)],
    ):
        with collective_raises(ValueError, match="Invalid usage of tensors with different dtypes"):
            dist.all_reduce_coalesced(wrong)


def test_new_groups() -> None:
    """What is wrong with their ranks is said in torch's words; the same ranks twice are two groups."""
    size = dist.get_world_size()
    for ranks, text in (
        ([0, 0], "ranks list must not contain duplicate entries"),
        ([size], rf"Rank {size} is out of range. Valid ranks are 0 to {size - 1} \(world_size={size}\)"),
        ([-1], "Rank -1 is out of range"),
    ):
        with collective_raises(ValueError, match=text):
            dist.new_group(ranks)
    before = dist.get_pg_count()
    groups = [dist.new_group(group_desc="fine") for _ in range(2)]
    assert dist.get_pg_count() == before + 2
    assert groups[0] is not groups[1]
    assert groups[0].group_name != groups[1].group_name
    for group in groups:
        assert (group.rank(), group.size(), group.name()) == (dist.get_rank(), size, dist.get_backend(group))
        assert (group.group_desc, group.bound_device_id) == ("fine", None)
        with pytest.raises(TypeError, match="timedelta"):
            group.set_timeout(3)
        dist.destroy_process_group(group)
    for call in (dist.get_rank, dist.get_backend, dist.get_backend_config, dist.destroy_process_group):
        for wrong in (5, "world", groups[0]):
            with pytest.raises(ValueError, match="Invalid process group specified"):
                call(wrong)  # type: ignore[operator]
    dist.destroy_process_group(NOBODY)
    with pytest.raises(ValueError, match="trying to initialize the default process group twice!"):
        dist.init_process_group()


@pytest.mark.mpi(min_size=2)
def test_subgroups_of_groups_that_differ_by_rank() -> None:
    """new_subgroups divides the group that each rank passes, and gives it the parts of that one."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mine, _ = dist.new_subgroups_by_enumeration([list(range(0, size, 2)), list(range(1, size, 2))])
    part, parts = dist.new_subgroups(1, group=mine)
    assert len(parts) == mine.size()
    assert dist.get_process_group_ranks(part) == [rank]
    assert parts[mine.rank()] is part
    assert [each for each in parts if each is not NOBODY] == [part]
    halves = dist.new_group([0, 1])
    whole, only = dist.new_subgroups(2 if rank < 2 else mine.size(), group=halves if rank < 2 else mine)
    assert only == [whole]
    assert dist.get_process_group_ranks(whole) == ([0, 1] if rank < 2 else list(range(rank % 2, size, 2)))
    with collective_raises(ValueError, match="must not exceed"):
        dist.new_subgroups(size + 1, group=mine)


def test_what_is_asked_of_backends() -> None:
    """MPI is the backend of every device that it serves."""
    for device in ("cpu", "cuda", "cuda:1"):
        assert dist.get_default_backend_for_device(device) == "mpi"
    with pytest.raises(ValueError, match="Default backend not registered for device : mps"):
        dist.get_default_backend_for_device("mps")
    assert dist.Backend.MPI in dist.Backend.backend_list
    assert dist.Backend("Mpi") == dist.get_backend()


@pytest.mark.usefixtures("_level")
def test_the_debug_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set is what is asked for, and what the next default group compares; check= stands above it."""
    assert str(dist.DebugLevel.OFF) == "DebugLevel.OFF"
    dist.destroy_process_group()
    for level, check in (
        (dist.DebugLevel.INFO, "roll"),
        (dist.DebugLevel.OFF, "off"),
        (dist.DebugLevel.DETAIL, "full"),
    ):
        dist.set_debug_level(level)
        assert dist.get_debug_level() is level
        dist.init_process_group()
        world = dist.group.WORLD
        assert world is not None
        assert world.level == check
        assert dist.get_debug_level() is level
        dist.destroy_process_group()
    dist.set_debug_level(dist.DebugLevel.OFF)
    dist.init_process_group(check="full")
    assert dist.group.WORLD is not None
    assert dist.group.WORLD.level == "full"
    for wrong in (2, "OFF", None):
        with pytest.raises(TypeError, match="DebugLevel"):
            dist.set_debug_level(wrong)  # type: ignore[arg-type]
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "info")
    dist.set_debug_level_from_env()
    assert dist.get_debug_level() is dist.DebugLevel.INFO
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "loud")
    with pytest.raises(ValueError, match="must be OFF, INFO, or DETAIL"):
        dist.set_debug_level_from_env()
    monkeypatch.delenv("TORCH_DISTRIBUTED_DEBUG")
    dist.set_debug_level_from_env()
    assert dist.get_debug_level() is dist.DebugLevel.DETAIL


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("_level")
def test_debug_levels_that_differ() -> None:
    """init_process_group notices that the ranks have set others."""
    dist.destroy_process_group()
    dist.set_debug_level(dist.DebugLevel.OFF if dist.get_node_local_rank(0) else dist.DebugLevel.DETAIL)
    with collective_raises(dist.CollectiveMismatchError, match="check"):
        dist.init_process_group()
    settings.asked_level = None
    dist.init_process_group()


def test_how_init_process_group_is_called() -> None:
    """A store needs rank and world_size, and no init_method; every wrong argument raises what torch raises."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.HashStore()
    wrong: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
        ({"store": store, "init_method": "env://"}, AssertionError, "Cannot specify both init_method and store"),
        ({"store": store, "rank": rank}, AssertionError, "world_size must be positive"),
        ({"store": store, "world_size": size}, AssertionError, "rank must be non-negative"),
        ({"init_method": "nowhere://"}, RuntimeError, "No rendezvous handler for nowhere://"),
        ({"timeout": 5}, TypeError, "timedelta"),
        ({"backend": 5}, ValueError, "string"),
    )
    for arguments, kind, text in wrong:
        with collective_raises(kind, match=text):
            dist.init_process_group(**arguments)
        assert not dist.is_initialized()
    dist.init_process_group(store=store, rank=rank, world_size=size, timeout=timedelta(seconds=15))
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    dist.destroy_process_group()
    dist.init_process_group("mpi", "env://", timedelta(seconds=15))
    with pytest.raises(AssertionError, match="Process group cannot be None"):
        dist.destroy_process_group()
        dist.destroy_process_group()


def test_errors_are_those_of_torch() -> None:
    """A script that catches torch's kinds of errors catches these."""
    for kind in (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError):
        assert kind.__bases__ == (dist.DistError,)
    assert dist.DistError.__bases__ == (RuntimeError,)
    assert issubclass(dist.QueueEmptyError, dist.DistStoreError)
    for kind in (dist.CollectiveTimeoutError, dist.CollectiveMismatchError, dist.DeadlockError, dist.PeerFailedError):
        assert issubclass(kind, dist.DistError)


@pytest.mark.mpi(min_size=2)
def test_methods_of_a_group() -> None:
    """A ProcessGroup has the calls as methods, by torch's older names: with ranks of the group, and a Work of each."""
    size = dist.get_world_size()
    group = dist.new_group(list(range(size))[::-1], sort_ranks=False)
    me = group.rank()

    def done(work: Any) -> bool:
        return isinstance(work, dist.Work) and work.wait() is True

    def blocks() -> list[Any]:
        return [np.zeros(2) for _ in range(size)]

    mine, total = np.full(2, float(me)), float(sum(range(size)))
    for wrap in (lambda x: x, lambda x: [x]):
        x = mine.copy()
        assert done(group.allreduce(wrap(x)))
        assert x.tolist() == [total] * 2
        x = mine.copy()
        assert done(group.allreduce(wrap(x), ReduceOp.MAX))
        assert x.tolist() == [size - 1] * 2
        x = mine.copy()
        assert done(group.broadcast(wrap(x), 1))
        assert x.tolist() == [1, 1]
        x = mine.copy()
        assert done(group.reduce(wrap(x), 1, ReduceOp.SUM, timedelta(seconds=10)))
        assert x.tolist() == ([total] * 2 if me == 1 else mine.tolist())
        out = blocks()
        assert done(group.allgather(wrap(out), wrap(mine)))
        assert [each[0] for each in out] == list(range(size))
        gathered: Any = blocks() if me == 1 else []
        assert done(group.gather(wrap(gathered) if me == 1 else gathered, wrap(mine), 1))
        assert [each[0] for each in gathered] == list(range(size))[: len(gathered)]
        assert done(group.scatter(wrap(x), wrap(out) if me == 0 else [], 0))
        assert x.tolist() == mine.tolist()
        assert done(group.reduce_scatter(wrap(x), wrap(out)))
        assert x.tolist() == [size * me] * 2
        if me == 0:
            assert done(group.send(wrap(mine), 1, 5))
            assert done(group.send(wrap(mine), 1, 6))
        elif me == 1:
            assert done(group.recv(wrap(x), 0, 5))
            assert x.tolist() == [0, 0]
            work = group.recv_anysource(wrap(x), 6)
            assert done(work)
            assert work.source_rank() == 0
    x = mine.copy()
    assert done(group.allreduce_coalesced([x]))
    assert x.tolist() == [total] * 2
    lists = [[np.zeros(2)] for _ in range(size)]
    assert done(group.allgather_coalesced(lists, [mine]))
    assert [each[0][0] for each in lists] == list(range(size))
    for name in ("all_gather_single", "_allgather_base"):
        flat = np.zeros(2 * size)
        assert done(getattr(group, name)(flat, mine))
        assert flat.tolist() == [float(r) for r in range(size) for _ in range(2)]
    for name in ("reduce_scatter_single", "_reduce_scatter_base"):
        assert done(getattr(group, name)(x, flat))
        assert x.tolist() == [size * me] * 2
    for name in ("all_to_all_single", "alltoall_base"):
        got = np.zeros(2 * size)
        assert done(getattr(group, name)(got, np.repeat(mine, size), [], []))
        assert got.tolist() == flat.tolist()
    out = blocks()
    assert done(group.alltoall(out, [mine] * size))
    assert [each[0] for each in out] == list(range(size))
    assert done(group.barrier())
    group.monitored_barrier(timedelta(seconds=10))
    with collective_raises(ValueError, match="must hold one tensor"):
        group.allreduce([mine, mine])
    with pytest.raises(AttributeError, match="no attribute 'allreduced'"):
        _ = group.allreduced
    group.shutdown()
    with pytest.raises(ValueError, match="Invalid process group specified"):
        group.allreduce(mine)


def test_private_names_that_programs_use() -> None:
    """_rank_not_in_group, _get_default_group, _all_gather_base and _reduce_scatter_base do what torch's do."""
    library: Any = dist
    size, rank = dist.get_world_size(), dist.get_rank()
    first = dist.new_group([0])
    assert library._rank_not_in_group(first) == (rank > 0)
    assert not library._rank_not_in_group(None)
    assert not library._rank_not_in_group(dist.group.WORLD)
    assert library._get_default_group() is dist.group.WORLD
    assert library._make_nccl_premul_sum(0.5) == dist.ReduceOp.PREMUL_SUM(0.5)
    assert library._make_nccl_premul_sum(0.5).factor == 0.5
    gathered, mine = np.empty(2 * size), np.full(2, float(rank))
    library._all_gather_base(gathered, mine)
    assert gathered.tolist() == [float(each) for each in range(size) for _ in range(2)]
    library._reduce_scatter_base(mine, gathered)
    assert mine.tolist() == [rank * size] * 2


def test_modules_by_torchs_names() -> None:
    """What torch has in distributed_c10d and device_mesh is found there."""
    from mpicoll import device_mesh, distributed_c10d

    library: Any = dist
    assert library.device_mesh is device_mesh
    assert library.distributed_c10d is distributed_c10d
    assert distributed_c10d.all_reduce is dist.all_reduce
    assert distributed_c10d._get_default_group() is dist.group.WORLD
    assert device_mesh.init_device_mesh is dist.init_device_mesh
    with pytest.raises(AttributeError, match="no_such_name"):
        distributed_c10d.no_such_name  # noqa: B018


def test_what_coalesced_calls_return_is_a_future_too() -> None:
    """done, value and then, which torch's Future of all_reduce_coalesced has."""
    size = dist.get_world_size()
    arrays = [np.ones(3), np.full(2, 2.0)]
    work = dist.all_reduce_coalesced(arrays, async_op=True)
    assert work is not None
    doubled = work.then(lambda future: [2 * each for each in future.value()])
    work.wait()
    assert work.done()
    assert [each.tolist() for each in work.value()] == [[size] * 3, [2 * size] * 2]
    assert [each.tolist() for each in doubled.result()] == [[2 * size] * 3, [4 * size] * 2]


def test_wrong_sizes_are_caught_as_either() -> None:
    """torch raises ValueError for some wrong arguments and its backends RuntimeError for others: programs catch either."""
    size = dist.get_world_size()
    x = np.ones(2)
    for wrong in (
        lambda: dist.all_gather([x.copy() for _ in range(size + 1)], x),
        lambda: dist.broadcast(x, src=size + 4),
        lambda: dist.all_gather_into_tensor(np.ones(size * 2 + 1), x),
        lambda: dist.broadcast_object_list([1], src=size + 4),
    ):
        with collective_raises(ValueError):
            wrong()
        try:
            wrong()
        except RuntimeError as error:
            told = error
        assert isinstance(told, ValueError)
        assert (type(told).__name__, type(told).__module__) == ("ValueError", "builtins")
        again = pickle.loads(pickle.dumps(told))
        assert (type(again), again.args) == (ValueError, told.args)
        assert told.__suppress_context__ or told.__context__ is None
