"""Arrays of other packages in every call: their own memory is read and written, and guarded while a call uses it."""

from __future__ import annotations

import array
import gc
from collections.abc import Callable
from typing import Any

import collective_cases as cases
import numpy as np
import pytest
from array_kinds import Exported, Interface, Through

import mpicoll as dist

pytestmark = pytest.mark.mpi

Array = np.ndarray[Any, Any]


KINDS: dict[str, tuple[Callable[[Array], Any], str]] = {
    "a memoryview": (memoryview, cases.DTYPES),
    "the array interface": (Interface, cases.DTYPES),
    "DLPack": (Exported, "?bBhHiIlLfdFD"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_collective(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every collective takes every kind for each of its arrays, and gives back the very objects that it was given."""
    convert, dtypes = KINDS[kind]
    monkeypatch.setattr(cases, "dist", Through(convert))
    for turn, name in enumerate(cases.ALL):
        dtype = dtypes[turn % len(dtypes)]
        counts = (3, cases.large(dtype))
        cases.run(name, cases.taste(name, dtype, counts))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_collective_on_every_dtype(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every dtype that a kind has goes through every collective."""
    convert, dtypes = KINDS[kind]
    monkeypatch.setattr(cases, "dist", Through(convert))
    for dtype in dtypes:
        for name in cases.ALL:
            cases.run(name, cases.taste(name, dtype, (*cases.SMALL, cases.large(dtype))))


@pytest.mark.mpi(min_size=2)
def test_messages() -> None:
    """Messages leave one kind of array and arrive in another."""
    rank, size = dist.get_rank(), dist.get_world_size()
    before, after = (rank - 1) % size, (rank + 1) % size
    for count in (3, 5000):
        numbers = range(rank, rank + count)
        sent = array.array("d", numbers)
        received: list[Any] = [np.zeros(count), array.array("d", bytes(8 * count)), bytearray(8 * count)]
        received[2] = memoryview(received[2]).cast("d")
        for tag, into in enumerate(received):
            work = dist.isend(sent, after, tag=tag)
            if tag == 1:
                other = dist.irecv(into, before, tag=tag)
                other.wait()
                assert other.result()[0] is into
            else:
                assert dist.recv(into, before, tag=tag) == before
            work.wait()
            assert list(into) == [before + i for i in range(count)], f"{count} elements, {type(into).__name__}"
        into = bytearray(count)
        ops = [dist.P2POp(dist.isend, bytes(x % 251 for x in numbers), after), dist.P2POp(dist.irecv, into, before)]
        assert f"uint8 x {count}" in repr(ops[1])
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert list(into) == [(before + i) % 251 for i in range(count)]


def test_inputs_that_are_read_only() -> None:
    """What cannot be written serves wherever a call only reads, and where it does not write on this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()

    class Computed:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
            return np.full(2, rank, np.uint8)

    for value in (bytes([rank, rank]), memoryview(bytes([rank, rank])), Computed()):
        out = bytearray(2 * size)
        dist.all_gather_single(out, value)
        assert list(out) == [r for r in range(size) for _ in range(2)]
        whole = bytearray(2 * size) if rank == 0 else None
        dist.gather_single(value, whole)
        assert whole is None or list(whole) == [r for r in range(size) for _ in range(2)]
        into = value if rank == 0 else bytearray(2)
        dist.broadcast(into, 0)
        assert rank == 0 or into == bytes(2)
        parts = [bytearray(2) for _ in range(size)]
        dist.all_to_all(parts, [value] * size)
        assert [list(part) for part in parts] == [[r, r] for r in range(size)]


@pytest.mark.mpi(min_size=2)
def test_memory_under_way_is_known_whatever_holds_it() -> None:
    """Memory that a call under way uses raises when it is given to another one as another kind of array."""
    held = bytearray(64)
    work = dist.all_reduce(memoryview(held), async_op=True)
    with pytest.raises(dist.BufferInUseError, match=r"\(16 bytes in common\)"):
        dist.isend(np.frombuffer(held, np.float64)[2:4], (dist.get_rank() + 1) % dist.get_world_size())
    with pytest.raises(BufferError):
        held.append(0)
    work.wait()
    del work
    dist.barrier()
    work = dist.all_reduce(held, async_op=True)
    held[3] ^= 1  # whatever came meanwhile: also what another rank wrote just before it was sent
    with pytest.raises(dist.BufferInUseError, match="was written before its wait"):
        work.wait()


@pytest.mark.mpi(min_size=2)
def test_memory_is_let_go_when_a_call_is_over() -> None:
    """A bytearray can change its size right after each call, without a search for cycles, also while others are under way."""
    rank, size = dist.get_rank(), dist.get_world_size()
    before, after = (rank - 1) % size, (rank + 1) % size

    def ring(count: int) -> None:
        work = dist.isend(bytes(count), after)
        dist.recv(held, before)
        work.wait()

    def nonblocking_ring(count: int) -> None:
        works = [dist.irecv(held, before), dist.isend(bytes(count), after)]
        for work in works:
            work.wait()

    calls: dict[str, Callable[[int], Any]] = {
        "all_reduce": lambda count: dist.all_reduce(held),
        "all_reduce, async": lambda count: dist.all_reduce(held, async_op=True).wait(),
        "broadcast": lambda count: dist.broadcast(held, 0),
        "all_gather": lambda count: dist.all_gather([held, *(bytearray(count) for _ in range(size - 1))], bytes(count)),
        "all_gather_single": lambda count: dist.all_gather_single(bytearray(size * count), held),
        "a ring": ring,
        "irecv": nonblocking_ring,
    }
    gc.disable()
    try:
        for count in (8, 40_000):
            held = bytearray(count)
            for busy in (False, True):
                other = dist.all_reduce(bytearray(8), async_op=True) if busy else None
                for name, call in calls.items():
                    for _ in range(3):
                        call(count)
                        try:
                            held.append(0)
                        except BufferError as error:
                            raise AssertionError(f"{name}, {count} bytes, busy={busy}") from error
                        held.pop()
                if other is not None:
                    other.wait()
    finally:
        gc.enable()
