"""Large arrays on a GPU, in pieces: right, in the order of their streams, and copied while others move; on a stand-in."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal

import collective_cases as cases
import numpy as np
import pytest
from array_kinds import OnGpu
from standin_gpu import Gpu, Stream, fails_at_some_pace, select
from striking import strike

import mpicoll as dist
from mpicoll.memory.device import array as device_array
from mpicoll.memory.device import pool as device_pool
from mpicoll.memory.device import runtime as device_runtime
from mpicoll.memory.dtypes import named_element
from mpicoll.transports.base import Movement
from mpicoll.transports.device import staged
from mpicoll.transports.selection import Selection

pytestmark = pytest.mark.mpi

Array = np.ndarray[Any, Any]
several = pytest.mark.mpi(min_size=2)
SLOW = pytest.mark.slow

FROM = 16 * 1024
"""Bytes above which arrays move in pieces here."""
PIECE = 4096
MANY = 5 * PIECE // 8 + 17
"""Elements of eight bytes that make six pieces, the last one short."""


class Recording(Gpu):
    """The stand-in, which writes down what is copied in pieces."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.log: list[tuple[str, int]] = []

    def copy_out(self, host: Array, array: Any, stream: Any, begin: int | None = None) -> None:
        if begin is not None:
            self.log.append(("out", begin))
        super().copy_out(host, array, stream, begin)

    def copy_in(self, array: Any, host: Array, stream: Any, begin: int | None = None) -> None:
        if begin is not None:
            self.log.append(("in", begin))
        super().copy_in(array, host, stream, begin)


def use(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, piece: int = PIECE) -> None:
    """Make a stand-in the GPU of this rank, and have arrays move in small pieces."""
    select(gpu, monkeypatch)
    monkeypatch.setattr(device_array, "PIECES_FROM", FROM)
    monkeypatch.setattr(staged, "PIECE_BYTES", piece)


@pytest.fixture(params=[pytest.param("eager", marks=pytest.mark.slow), "lazy"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recording]:
    """The stand-in, as the GPU of this rank."""
    found = Recording(request.param)
    use(found, monkeypatch)
    yield found
    device_pool.close()


@pytest.fixture(params=["node", "mpi"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What moves the pieces of the world: its shared memory, or MPI."""
    world = dist.group.WORLD
    assert world is not None
    monkeypatch.setattr(world.pair, "selection", Selection(request.param))
    return str(request.param)


NAMES = ("broadcast", "all_reduce", "reduce", "reduce_scatter_tensor", "all_gather_single", "all_to_all_single")


@pytest.mark.parametrize(
    ("piece", "who"), [(3000, "one"), (PIECE, "all"), pytest.param(3 * FROM, "others", marks=SLOW)]
)
@pytest.mark.parametrize("name", NAMES)
def test_every_collective(
    name: str, piece: int, who: str, engine: str, gpu: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every op and several dtypes, waited for or not, with arrays of the host on some ranks."""
    monkeypatch.setattr(staged, "PIECE_BYTES", piece)
    last = dist.get_rank() == dist.get_world_size() - 1
    if who == "all" or last == (who == "one"):
        monkeypatch.setattr(cases, "dist", OnGpu(gpu))
    for dtype in "fdFihb?q":
        cases.run(name, cases.taste(name, dtype, (cases.large(dtype),)))
    assert gpu.log or cases.dist is dist


def test_uneven_blocks(engine: str, gpu: Recording) -> None:
    """Blocks that differ in size, empty ones among them, go in pieces, too."""
    size, rank = dist.get_world_size(), dist.get_rank()
    rows = [[0 if i == j == 0 and size > 1 else 3000 + 700 * (i + 2 * j) for j in range(size)] for i in range(size)]
    sent, received = rows[rank], [rows[i][rank] for i in range(size)]
    x = np.concatenate([np.arange(many) * 1.0 + 100 * rank + j for j, many in enumerate(sent)])
    for async_op in (False, True):
        y = np.full(sum(received), -1.0)
        work = dist.all_to_all_single(gpu.array_of(y), gpu.array_of(x), received, sent, async_op=async_op)
        if work is not None:
            work.wait()
        gpu.finish()
        assert (y == np.concatenate([np.arange(many) * 1.0 + 100 * i + rank for i, many in enumerate(received)])).all()
    assert gpu.log


def test_a_part_of_the_result_as_input(engine: str, gpu: Recording) -> None:
    """What is read may be a part of what is written: then all is copied as a whole."""
    size, rank = dist.get_world_size(), dist.get_rank()
    y = np.full(size * MANY, -1.0)
    mine = y[rank * MANY : (rank + 1) * MANY]
    mine[:] = rank
    dist.all_gather_into_tensor(gpu.array_of(y), gpu.array_of(mine))
    gpu.finish()
    assert (y == np.repeat(np.arange(size), MANY)).all()
    dist.reduce_scatter_tensor(gpu.array_of(mine), gpu.array_of(y))
    gpu.finish()
    assert (mine == size * rank).all()
    assert not gpu.log


def test_halves_beside_each_other(engine: str, gpu: Recording) -> None:
    """A result that begins where what is read ends, as in an allocator's pool: halves move as wider elements, and are apart."""
    size = dist.get_world_size()
    block = 2 * FROM
    whole = np.ones((size + 1) * block, np.float16)
    dist.reduce_scatter_tensor(gpu.array_of(whole[:block]), gpu.array_of(whole[block:]))
    gpu.finish()
    assert (whole[:block] == size).all()
    assert (whole[block:] == 1).all()


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG], ids=["sum", "avg"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_same_bits(op: Any, dtype: str, engine: str, gpu: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums have the same bits in pieces and as a whole; halves are reduced as float32, and rounded once."""
    size, rank = dist.get_world_size(), dist.get_rank()
    count = size * 4 * FROM
    rng = np.random.default_rng(rank)
    given = rng.standard_normal(count).astype(np.float32)
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
        found = named_element(dtype)
        assert found is not None
    given = given.astype(np.dtype(dtype))
    results: list[list[bytes]] = []
    for least in (FROM, 1 << 40):
        monkeypatch.setattr(device_array, "PIECES_FROM", least)
        copies = len(gpu.log)
        x, y, part = given.copy(), given.copy(), np.zeros(count // size, given.dtype)
        work = dist.all_reduce(gpu.array_of(x), op, async_op=True)
        assert work is not None
        work.wait()
        dist.reduce(gpu.array_of(y), 0, op)
        dist.reduce_scatter_tensor(gpu.array_of(part), gpu.array_of(given), op)
        gpu.finish()
        results.append([x.tobytes(), y.tobytes(), part.tobytes()])
        assert (len(gpu.log) > copies) == (least == FROM)
    assert results[0] == results[1]


@several
@pytest.mark.parametrize("rounds", ["node", "mpi"])
@pytest.mark.parametrize("level", ["full", pytest.param("roll", marks=SLOW), "off"])
def test_ranks_that_have_practised(level: str, rounds: str, gpu: Recording, request: pytest.FixtureRequest) -> None:
    """A call that has been made with arrays of the host before, and that others now make with theirs on a GPU."""
    if rounds == "mpi":
        request.getfixturevalue("rounds_of_mpi")
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    kept, group.level = group.level, level  # type: ignore[assignment]
    try:
        for turn in range(12):
            on_gpu = turn in (5, 6, 9) and (rank + turn) % 2 == 0
            x, y = elements(rank), elements(rank)
            dist.all_reduce(gpu.array_of(x) if on_gpu else x, dist.ReduceOp.AVG)
            dist.broadcast(gpu.array_of(y) if on_gpu else y, 1)
            gpu.finish()
            assert np.allclose(x, elements(0) + 1e6 * (size - 1) / 2)
            assert (y == elements(1)).all()
    finally:
        group.level = kept
    assert gpu.log


@several
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_what_others_hand_to_mpi(dtype: str, async_op: bool, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another rank hands its array to MPI as it is, this one's goes by way of the host as a whole."""
    rank, size = dist.get_rank(), dist.get_world_size()
    gpu = Recording("lazy", known_to_mpi=True)
    gpu.allocates_plainly = rank == 0
    use(gpu, monkeypatch)
    monkeypatch.setattr(device_array, "_permitted", lambda operation, nonblocking: True)
    count = device_array.DIRECT_BYTES
    x, y = np.zeros(count, dtype), np.zeros(count * size, dtype)
    gpu.launch(lambda: x.fill(rank + 1))
    calls: list[Callable[[], dist.Work | None]] = [
        lambda: dist.all_gather_into_tensor(gpu.array_of(y), gpu.array_of(x), async_op=async_op),
        lambda: dist.all_reduce(gpu.array_of(x), async_op=async_op),
        lambda: dist.broadcast(gpu.array_of(x), 1, async_op=async_op),
    ]
    for call in calls:
        work = call()
        if work is not None:
            work.wait()
    gpu.finish()
    assert (y == np.repeat(np.arange(size) + 1, count)).all()
    assert (x == size * (size + 1) / 2).all()
    assert bool(gpu.log) == (dtype == "float16")  # which nobody can hand to MPI
    device_pool.close()


def elements(rank: int) -> Array:
    """Return what a rank contributes: no piece is like another."""
    return np.arange(MANY) * 1.0 + 1e6 * rank


def test_it_overlaps(engine: str, gpu: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a piece moves the next ones have been given to the GPU, and those before it are on their way back."""
    found = staged.move_pieces

    def recorded(*args: Any) -> Any:
        *others, moved = args

        def noted(piece: Movement) -> Generator[Any, None, None]:
            gpu.log.append(("moves", 0))
            yield from moved(piece)
            gpu.log.append(("moved", 0))

        return found(*others, noted)

    monkeypatch.setattr(staged, "move_pieces", recorded)
    x = (np.arange(MANY) % 100).astype(np.int64)  # of whole numbers: MPI's pieces are as small
    dist.all_reduce(gpu.array_of(x))
    gpu.finish()
    assert (x == dist.get_world_size() * (np.arange(MANY) % 100)).all()
    order = [what for what, _ in gpu.log]
    assert order.count("out") == order.count("in") == order.count("moved") == 6
    ends = [at for at, what in enumerate(order) if what == "moved"]
    for number, end in enumerate(ends):
        before = order[:end]
        assert before.count("out") == min(6, number + staged.PIECE_BUFFERS), (number, order)
        assert before.count("in") == number, (number, order)


def test_little_pinned_memory(engine: str, gpu: Recording) -> None:
    """However large an array is, a few pieces of pinned memory do, and they are used again."""
    size = dist.get_world_size()
    x = np.ones(60 * PIECE // 8, np.int64)
    for _ in range(5):
        x[:] = 1
        dist.all_reduce(gpu.array_of(x))
        gpu.finish()
        assert (x == size).all()
    pool = device_pool.pool()
    assert 0 < pool.taken <= 2 * staged.PIECE_BUFFERS * PIECE
    pool.limit = 0
    pool._free.clear()
    x[:] = 1
    dist.all_reduce(gpu.array_of(x))  # in ordinary memory
    gpu.finish()
    assert (x == size).all()


def test_pieces_carry_what_kernels_before_the_call_write(gpu: Recording) -> None:
    """The elements are read after the kernels before the call."""
    x = np.zeros(MANY)
    gpu.launch(lambda: np.copyto(x, elements(dist.get_rank())))
    dist.broadcast(gpu.array_of(x), 0)
    gpu.finish()
    assert (x == elements(0)).all() or dist.get_rank() == 0


def test_pieces_take_turns_in_memory(gpu: Recording) -> None:
    """No piece overwrites the memory of one that is still on its way, out or back."""
    size = dist.get_world_size()
    # Of integers: floating-point numbers are not cut so small where MPI reduces them.
    x, y, seen = elements(dist.get_rank()).astype(np.int64), np.zeros(size * MANY), []
    total = sum(elements(each).astype(np.int64) for each in range(size))
    dist.all_reduce(gpu.array_of(x))
    gpu.launch(lambda: seen.append(x.copy()))
    gpu.finish()
    assert (seen[0] == total).all()
    dist.all_gather_into_tensor(gpu.array_of(y), gpu.array_of(elements(dist.get_rank())))
    gpu.finish()
    assert (y == np.concatenate([elements(each) for each in range(size)])).all()


@several
def test_pieces_come_after_kernels_that_read_the_old_ones(gpu: Recording) -> None:
    """Results are written after the kernels that were put on the stream before the call, and before those after it."""
    rank = dist.get_rank()
    x, seen = np.full(MANY, -1.0), []
    gpu.launch(lambda: seen.append(x.copy()))
    dist.broadcast(gpu.array_of(elements(7) if rank == 0 else x), 0)
    gpu.launch(lambda: seen.append(x.copy()))
    gpu.finish()
    assert (seen[0] == -1).all()
    assert (seen[1] == (-1 if rank == 0 else elements(7))).all()


@several
def test_memory_of_pieces_is_not_used_again_too_early(gpu: Recording) -> None:
    """Results that are still on their way to the device stay what they are while later calls use memory of the host."""
    rank = dist.get_rank()
    results = [np.zeros(MANY) for _ in range(6)]
    streams = [Stream() for _ in results]  # on one alone each call would come after the results of the one before
    for turn, (x, stream) in enumerate(zip(results, streams, strict=True)):
        dist.broadcast(gpu.array_of(elements(turn) if rank == 0 else x), 0, stream=stream)
    for stream in streams:
        gpu.finish(stream)
    if rank != 0:
        assert all((x == elements(turn)).all() for turn, x in enumerate(results))


def test_the_host_does_not_wait_for_kernels_of_an_asynchronous_call(engine: str, gpu: Recording) -> None:
    """A large array that is not waited for is issued while kernels before the call still run."""
    gpu.pace, gpu.polls = "lazy", 60  # its kernels run when they are waited for
    x, ran = np.ones(MANY), []
    gpu.launch(lambda: ran.append(1))
    work = dist.all_reduce(gpu.array_of(x), async_op=True)
    assert not ran
    work.wait()
    assert ran
    gpu.finish()
    assert (x == dist.get_world_size()).all()


def test_a_call_behind_a_kernel_holds_up_no_other(engine: str, gpu: Recording) -> None:
    """While a call in pieces waits for a kernel, calls whose stream has come go on, in other groups and as messages."""
    gpu.pace, gpu.polls = "lazy", 10**9  # a kernel that does not end before it is waited for
    size, rank = dist.get_world_size(), dist.get_rank()
    other = dist.new_group()
    late, free = Stream(), Stream()
    x, y, z, ran = np.ones(MANY), np.ones(10), np.full(10, float(rank)), []
    gpu.launch(lambda: ran.append(1), late)
    work = dist.all_reduce(gpu.array_of(x), async_op=True, stream=late)
    for _ in range(20):
        work.is_completed()
    dist.all_reduce(gpu.array_of(y), group=other, stream=free)
    if size > 1:
        received = np.zeros(10)
        sent = dist.isend(gpu.array_of(z), (rank + 1) % size, stream=free)
        dist.recv(gpu.array_of(received), (rank - 1) % size, stream=free)
        sent.wait()
        gpu.finish(free)
        assert (received == (rank - 1) % size).all()
    assert not ran
    gpu.polls = 1
    work.wait()
    assert ran
    gpu.finish(late)
    gpu.finish(free)
    assert (x == size).all()
    assert (y == size).all()
    dist.barrier()
    dist.destroy_process_group(other)


class Ending(Gpu):
    """A GPU that fails, or does nothing more, when so many pieces have been awaited."""

    def __init__(self, after: int, fails: bool) -> None:
        super().__init__("lazy")
        self.left, self.fails = after, fails

    def over(self, event: Any) -> bool:
        if self.left <= 0:
            if self.fails:
                raise RuntimeError("cudaErrorIllegalAddress")
            return False
        return super().over(event)

    def await_(self, event: Any) -> None:
        if self.left <= 0 and self.fails:
            raise RuntimeError("cudaErrorIllegalAddress")
        self.left -= 1
        super().await_(event)


@several
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("fails", [True, False], ids=["fails", "hangs"])
def test_a_gpu_that_ends_in_the_middle(
    fails: bool, after: int, async_op: bool, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank's GPU fails, or goes on no more: that rank says so, and no other waits beyond its limit."""
    rank = dist.get_rank()
    gpu = Ending(after, fails) if rank == 0 else Gpu("lazy")
    use(gpu, monkeypatch)
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    group.pair.selection = Selection(engine)
    x = np.ones(MANY, np.int64)
    says = "cudaErrorIllegalAddress" if fails and rank == 0 else None
    with pytest.raises((RuntimeError, dist.DistError), match=says):
        work = dist.all_reduce(gpu.array_of(x), group=group, async_op=async_op, timeout=timedelta(seconds=1))
        assert work is not None
        work.wait()
    assert group.broken is not None
    if isinstance(gpu, Ending):
        gpu.left = 1 << 30
    dist.barrier()
    device_pool.close()


@several
@SLOW
@pytest.mark.parametrize(
    "function",
    [
        staged.CopyPipeline.__init__,
        staged.CopyPipeline.begin,
        staged.CopyPipeline.put,
        staged.CopyPipeline.wait,
        device_runtime.await_event,
        staged.CopyPipeline.copy_back,
        staged.move_pieces,
    ],
)
def test_struck_at_every_line(function: Any, engine: str, gpu: Recording) -> None:
    """An exception between any two lines breaks the group, and nothing is copied after what the program does next."""
    rank, size = dist.get_rank(), dist.get_world_size()
    first = function.__code__.co_firstlineno
    struck = 0
    lines = sorted({line for *_, line in function.__code__.co_lines() if line and line > first})
    for line in lines:
        group = dist.new_group()
        assert isinstance(group, dist.ProcessGroup)
        group.pair.selection = Selection(engine)
        x = np.ones(MANY, np.int64)

        def call(x: Array = x, group: Any = group) -> None:
            dist.all_reduce(gpu.array_of(x), group=group)

        if rank == 0:
            struck += strike(function, line, call)
        else:
            with suppress(dist.DistError):
                call()
        gpu.launch(lambda x=x: x.fill(5))  # type: ignore[misc]
        gpu.finish()
        y = np.ones(MANY)
        dist.all_reduce(gpu.array_of(y))
        for stream in gpu.copy_streams.values():
            stream.run(len(stream.work))
        gpu.finish()
        assert (x == 5).all(), line
        assert (y == size).all(), line
        dist.barrier()
        if group.broken is None:
            group.give_up("a call on it was struck")
        dist.destroy_process_group(group)
    assert struck >= min(3, len(lines) - 1) or rank != 0


NOTICED_BY: dict[int, Callable[[Any], None]] = {
    1: test_pieces_carry_what_kernels_before_the_call_write,
    2: test_pieces_carry_what_kernels_before_the_call_write,
    3: test_pieces_come_after_kernels_that_read_the_old_ones,
    4: test_memory_of_pieces_is_not_used_again_too_early,
    5: test_pieces_take_turns_in_memory,
    6: test_pieces_take_turns_in_memory,
}


@several
@pytest.mark.parametrize("wait", [0, *NOTICED_BY])
def test_every_wait_is_needed(wait: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Without any one of the waits, numbered in the source, a test of those above fails at some pace; with all, none."""
    lines = inspect.getsource(staged.CopyPipeline).splitlines()
    kept = [re.sub(r"\S.*", "pass", line) if line.endswith(f"# {wait}") else line for line in lines]
    assert sum(one != other for one, other in zip(lines, kept, strict=True)) == (1 if wait else 0)
    monkeypatch.setattr(staged, "CopyPipeline", staged.CopyPipeline)
    exec(compile("from __future__ import annotations\n" + "\n".join(kept), staged.__file__, "exec"), vars(staged))

    def stand_in(pace: Literal["eager", "lazy"]) -> Recording:
        gpu = Recording(pace)
        use(gpu, monkeypatch)
        return gpu

    checks = [NOTICED_BY[wait]] if wait else dict.fromkeys(NOTICED_BY.values())
    assert fails_at_some_pace(checks, stand_in) == bool(wait)
