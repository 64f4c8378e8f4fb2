"""Messages of arrays whose elements do not stand one behind the other: faces of grids, as a halo exchange sends them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from ranks import neighbours

import mpicoll as dist
from mpicoll.api import messages as api
from mpicoll.checks.memory_in_use import claims
from mpicoll.operations import messages
from mpicoll.runtime import native

Array = np.ndarray[Any, Any]

pytestmark = pytest.mark.mpi(min_size=2)

VIEWS: dict[str, Callable[[Array], Array]] = {
    "column": lambda own: own[0, :, 1],
    "plane": lambda own: own[:, 1],
    "plane across": lambda own: own[:, :, 2],
    "part of each row": lambda own: own[1:, ::2, 1:3],
    "backwards": lambda own: own[::-1, ::-2, ::-1],
    "transposed": lambda own: own.T,
    "axes exchanged": lambda own: own.swapaxes(0, 1),
    "new axes": lambda own: own[:, None, ::3, None],
    "each other": lambda own: own.reshape(-1)[::2],
}


@pytest.fixture
def own_group() -> Iterator[Any]:
    """A group whose table of persistent requests is empty."""
    group = dist.new_group()
    yield group
    dist.barrier(group)
    dist.destroy_process_group(group)
    assert not claims.active


@pytest.mark.parametrize("rows", [4, 60, 900], ids=["inside", "apart", "large"])
@pytest.mark.parametrize("view", VIEWS)
def test_views(view: str, rows: int, own_group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each view arrives in each view of the same shape, and no other element is written, by all kinds of messages."""
    me, (before, after) = dist.get_rank(), neighbours()
    for dtype in ("f8", "c16", "i4", "f2", "u1"):
        own = np.arange(5 * rows * 7).reshape(5, rows, 7).astype(dtype)
        given, there = VIEWS[view](own + np.asarray(me, dtype)), VIEWS[view](own + np.asarray(before, dtype))
        whole = np.zeros_like(own)
        landing = VIEWS[view](whole)
        untouched = np.ones(own.shape, bool)
        VIEWS[view](untouched)[...] = False
        for turn in range(5):
            with monkeypatch.context() as patched:
                if turn >= 3 and native.found is not None:
                    patched.setattr(api, "start_send", None)
                    patched.setattr(api, "start_receive", None)
                sent = dist.isend(given, after, own_group)
                dist.recv(landing, before, own_group)
                assert sent is not None
                sent.wait()
                assert (landing == there).all(), (dtype, turn)
                landing[...] = 0
                received = dist.irecv(landing, before, own_group)
                dist.send(given, after, own_group)
                assert received is not None
                received.wait()
                assert (landing == there).all(), (dtype, turn)
                landing[...] = 0
                contiguous = np.empty(given.shape, dtype)
                works = [dist.irecv(contiguous, before, own_group, 1), dist.isend(given.copy(), after, own_group, 1)]
                works += [dist.irecv(landing, before, own_group), dist.isend(given, after, own_group)]
                for work in reversed(works):
                    assert work is not None
                    work.wait()
                assert (contiguous == there).all()
                assert (landing == there).all()
                assert not whole[untouched].any()
                landing[...] = 0


def test_the_faces_of_a_grid(own_group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All faces of a grid move at once: the memory of no two is taken for that of one."""
    me, (before, after) = dist.get_rank(), neighbours()
    size = dist.get_world_size()
    for shape in ((6, 7), (40, 300), (5, 6, 7), (20, 30, 40)):
        inner = (slice(1, -1),) * len(shape)
        for turn in range(5):
            grid = np.zeros(shape)
            grid[inner] = me + 1
            with monkeypatch.context() as patched:
                if turn >= 3 and native.found is not None:
                    patched.setattr(api, "start_send", None)
                    patched.setattr(api, "start_receive", None)
                ops = []
                for axis, up in product(range(len(shape)), (False, True)):
                    ghost, edge = list(inner), list(inner)
                    ghost[axis], edge[axis] = (-1, 1) if up else (0, -2)
                    source, target = (after, before) if up else (before, after)
                    tag = 2 * axis + up
                    ops.append(dist.P2POp(dist.irecv, grid[tuple(ghost)], source, own_group, tag))
                    ops.append(dist.P2POp(dist.isend, grid[tuple(edge)], target, own_group, tag))
                for work in dist.batch_isend_irecv(ops):
                    work.wait()
            low, high = (me - 1) % size + 1, (me + 1) % size + 1
            for axis in range(len(shape)):
                for at, value in ((0, low), (-1, high)):
                    ghost = list(inner)
                    ghost[axis] = at
                    assert (grid[tuple(ghost)] == value).all(), (shape, turn, axis)
            assert grid.sum() == grid[inner].sum() + sum(
                np.prod([n - 2 for other, n in enumerate(shape) if other != axis]) * (low + high)
                for axis in range(len(shape))
            )


def test_memory_that_is_shared(own_group: Any) -> None:
    """A message of a view is refused exactly if it writes bytes that a pending message uses, or the other way round."""
    before, after = neighbours()
    random = np.random.default_rng(7)
    whole = np.zeros((6, 7, 8))
    seen = {False: 0, True: 0}

    def some(length: int) -> Any:
        if random.random() < 0.2:
            return int(random.integers(length))
        start, stop = int(random.integers(length // 2)), int(random.integers(length // 2 + 1, length + 1))
        return slice(start, stop, int(random.integers(1, 3)))

    for _ in range(160):
        one, other = (np.atleast_1d(whole[tuple(some(n) for n in whole.shape)]) for _ in range(2))
        writes = bool(random.integers(2))
        expected = writes and np.shares_memory(one, other)
        seen[bool(expected)] += 1
        twin = np.zeros(other.shape)
        for _ in range(4):  # from the third time on by persistent requests
            sent = dist.isend(one, after, own_group, tag=1)
            assert sent is not None
            if expected:
                with pytest.raises(dist.BufferInUseError, match="bytes in common"):
                    dist.irecv(other, before, own_group, tag=2)
            elif writes:
                work = dist.irecv(other, before, own_group, tag=2)
                dist.send(twin, after, own_group, tag=2)
                assert work is not None
                work.wait()
            else:
                work = dist.isend(other, after, own_group, tag=2)
                dist.recv(twin, before, own_group, tag=2)
                assert work is not None
                work.wait()
            dist.recv(np.empty(one.shape), before, own_group, tag=1)
            sent.wait()
            for given in (one, other):  # so that a refused message has a persistent request, too
                sent = dist.isend(given.copy(), after, own_group, tag=2)
                dist.recv(np.empty(given.shape), before, own_group, tag=2)
                assert sent is not None
                sent.wait()
    assert min(seen.values()) > 20, seen


@pytest.mark.parametrize("rows", [3, 700, 9000], ids=["inside", "apart", "sampled"])
@pytest.mark.parametrize("again", [False, True])
def test_writes_before_the_wait(again: bool, rows: int, own_group: Any) -> None:
    """Writes of the program to a view whose message is pending are found; writes between its elements are none."""
    before, after = neighbours()
    grid = np.ones((rows, 4))
    mine, halo = grid[:, 1], grid[:, 2]

    def pair() -> Any:
        works = dist.isend(mine, after, own_group), dist.irecv(halo, before, own_group)
        assert None not in works
        return works

    for _ in range(4 if again else 0):
        for work in pair():
            work.wait()
    sent, received = pair()
    grid[:, 0], grid[:, 3] = 5, 6
    sent.wait()
    received.wait()
    sent, received = pair()
    mine[:] = 2
    with pytest.raises(dist.BufferInUseError, match="written before its wait"):
        sent.wait()
    received.wait()
    dist.barrier(own_group)
    received = dist.irecv(halo, before, own_group)
    halo[:] = 3
    dist.send(grid[:, 0], after, own_group)
    assert received is not None
    with pytest.raises(dist.BufferInUseError, match="written before its wait"):
        received.wait()


def test_views_that_no_receive_may_have(own_group: Any) -> None:
    """A view whose elements share memory, or that is read-only, is refused after messages of its shape; it can be sent."""
    before, after = neighbours()
    x, y = np.arange(8.0).reshape(2, 4), np.zeros((4, 2)).T
    y = np.zeros((2, 8))[:, ::2]
    shares = np.lib.stride_tricks.as_strided(np.arange(5.0), (2, 4), (8, 8))
    readonly = np.zeros((2, 8))[:, ::2]
    readonly.setflags(write=False)
    for _ in range(4):
        for given, wanted in ((x, x), (shares, [[0, 1, 2, 3], [1, 2, 3, 4]])):
            sent = dist.isend(given, after, own_group)
            dist.recv(y, before, own_group)
            assert sent is not None
            sent.wait()
            assert (y == wanted).all()
    for receive in (dist.recv, dist.irecv):
        with pytest.raises(ValueError, match="share memory"):
            receive(shares, before, own_group)
        with pytest.raises(ValueError, match="read-only"):
            receive(readonly, before, own_group)


@pytest.mark.filterwarnings("ignore:Setting the strides:DeprecationWarning")
def test_an_array_that_changes_its_strides_meanwhile(own_group: Any) -> None:
    """The program changes the strides of an array while it receives a message: that is where the array was, or where it is."""
    before, after = neighbours()
    x = np.arange(900.0)
    for _ in range(4):
        sent = dist.isend(x, after, own_group)
        dist.recv(np.zeros(1800)[::2], before, own_group)
        assert sent is not None
        sent.wait()
    for first, then in ((8, 16), (16, 8)):
        whole = np.zeros(1800)
        y = whole[:900] if first == 8 else whole[::2]
        received = dist.irecv(y, before, own_group)
        y.strides = (then,)
        sent = dist.isend(x, after, own_group)
        assert sent is not None
        assert received is not None
        received.wait()
        sent.wait()
        assert (y == x).all() or (np.ndarray((900,), buffer=whole, strides=(first,)) == x).all()


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4)])
def test_views_without_elements(shape: tuple[int, ...], own_group: Any) -> None:
    """A view without elements is sent and received like any other."""
    before, after = neighbours()
    x, y = np.zeros((6, 8))[: shape[0] * 2 : 2, ::2] if len(shape) > 1 else np.zeros(0), np.zeros(shape)
    x = x[:, : shape[1]] if len(shape) > 1 else x
    for _ in range(5):
        for given in (x, y):
            sent = dist.isend(given, after, own_group)
            dist.recv(y, before, own_group)
            received = dist.irecv(x, before, own_group)
            dist.send(y, after, own_group)
            assert sent is not None
            assert received is not None
            sent.wait()
            received.wait()


def test_memory_that_messages_keep(own_group: Any) -> None:
    """Persistent messages keep a limited amount of memory; messages beyond the limit still arrive."""
    before, after = neighbours()
    whole = np.zeros((2 * messages.PACKED_BYTES // 8 // 10, 2))
    for rows in range(len(whole) - 12, len(whole)):
        for _ in range(4):
            whole[:, 0] = rows
            sent = dist.isend(whole[:rows, 0], after, own_group)
            dist.recv(whole[:rows, 1], before, own_group)
            assert sent is not None
            sent.wait()
            assert (whole[:rows, 1] == rows).all()
    for cache in (own_group.sends, own_group.receives):
        kept = [each.packed.nbytes for each in cache.values() if each.packed is not None]
        assert sum(kept) <= messages.PACKED_BYTES
        assert len(kept) > 2 or native.found is None


def test_the_request_of_packed_elements(own_group: Any) -> None:
    """A message knows the request of its packed elements among those of other arrays, and makes and frees none to find out."""
    before, after = neighbours()
    arrays = [np.zeros((1000, 2))[:, 0], *(np.zeros(1000) for _ in range(4))]
    for _ in range(2):
        for y in (*arrays[1:], arrays[0]):
            sent = dist.isend(np.ones(1000), after, own_group)
            received = dist.irecv(y, before, own_group)
            assert sent is not None
            assert received is not None
            sent.wait()
            received.wait()
            assert (y == 1).all()
    (again,) = own_group.receives.values()
    known = dict(again.payloads)
    assert [again.moves_packed(each) for each in known.values()].count(True) == 1
    again.packed = None
    assert not any(again.moves_packed(each) for each in (*known.values(), None))
    assert again.payloads == known


def test_strides_change_within_a_call(own_group: Any) -> None:
    """Code of the program that runs within a blocking call changes the strides: no other memory is read or written."""
    before, after = neighbours()
    x = np.arange(900.0)

    def both(y: Array) -> None:
        sent = dist.isend(x, after, own_group)
        dist.recv(y, before, own_group)
        assert sent is not None
        sent.wait()

    for keeps in (False, True):
        for _ in range(3):
            both(np.zeros(1800)[::2] if keeps else np.zeros(900))
        whole = np.zeros(1800)
        y = whole[:900]

        def change(frame: Any, event: str, given: Any, y: Array = y) -> None:
            if event == "return" and frame.f_code.co_name == "payload_of":
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    y.strides = (16,)

        sent = dist.isend(x, after, own_group)
        sys.setprofile(change)
        try:
            dist.recv(y, before, own_group)
        finally:
            sys.setprofile(None)
        assert sent is not None
        sent.wait()
        assert (whole[:900] == x).all() or (whole[::2] == x).all()
