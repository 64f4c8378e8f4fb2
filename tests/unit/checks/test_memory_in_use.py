"""Memory of operations under way: what may be used at once, and what was written meanwhile."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest

from mpicoll.checks import memory_ranges
from mpicoll.checks.memory_in_use import Claim, Registry, RequestClaim
from mpicoll.checks.memory_ranges import EVERYWHERE, SNAPSHOT_BYTES, Snapshot, contents, seal, span
from mpicoll.errors import BufferInUseError
from mpicoll.runtime.call_site import call_site


def _claim(op: str, *, reads: tuple = (), writes: tuple = (), gone: bool = False) -> Claim:
    return Claim(op, call_site(), reads, writes, lambda: gone)


def _issue(registry: Registry, *args: object, **kwargs: object) -> Claim:
    claim = _claim(*args, **kwargs)
    registry.check(claim)
    registry.add(claim)
    return claim


def test_reading_twice_is_right_and_writing_what_is_used_is_not() -> None:
    """Of two operations on common memory, both must read; the error names both, their places and the bytes."""
    x = np.zeros(10)
    for first, second, right in (
        ("reads", "reads", True),
        ("reads", "writes", False),
        ("writes", "reads", False),
        ("writes", "writes", False),
    ):
        registry = Registry()
        old = _issue(registry, "isend", **{first: (x[:6],)})
        new = _claim("irecv", **{second: (x[4:],)})
        if right:
            registry.check(new)
        else:
            with pytest.raises(BufferInUseError) as caught:
                registry.check(new)
            text = str(caught.value)
            assert text.count("test_memory_in_use.py:") == 2, text
            assert (
                f"irecv at {new.site} {second} memory that isend at {old.site} still {first} (16 bytes in common)"
                in text
            )
        registry.remove(old)
        registry.check(new)
        assert not registry.active


def test_memory_side_by_side_and_interleaved() -> None:
    """Neighbours, every second element, empty arrays and 0-d arrays share nothing; reversed and transposed ones do."""
    x = np.zeros((8, 8))
    registry = Registry()
    _issue(registry, "irecv", writes=(x[::2],))
    _issue(registry, "irecv", writes=(x[1::4],))
    _issue(registry, "irecv", writes=(x[3:4, :4],))
    _issue(registry, "irecv", writes=(x[3:4, 4:],))
    _issue(registry, "irecv", writes=(x[:0],))
    _issue(registry, "isend", reads=(x[7, 7:8].reshape(()), x[7, :3]))
    for wrong in (x[::-1], x.T, x[2, 3:4], x[7, 2], x[3:5, 3:5]):
        with pytest.raises(BufferInUseError):
            registry.check(_claim("irecv", writes=(np.asarray(wrong) if wrong.shape else x[7, 2:3],)))
    registry.check(_claim("isend", reads=(x[7, 2:5],)))
    assert span(x[::-1]) == span(x)
    assert span(x[::-1, ::2])[1] - span(x[::-1, ::2])[0] == x.nbytes - 8


def test_an_operation_may_use_its_own_memory_twice() -> None:
    """What one operation reads and writes in place is its own business, and its result is no write of the program."""
    x = np.zeros(4)
    claim = _claim("all_reduce", reads=(x,), writes=(x,))
    Registry().check(claim)
    claim.snapshot_reads()
    x += 1
    assert claim.verdict() is None


def test_those_whose_group_is_gone_are_passed_over() -> None:
    """Operations that nobody can wait for any more do not keep their memory."""
    x = np.zeros(4)
    registry = Registry()
    _issue(registry, "irecv", writes=(x,), gone=True)
    registry.check(_claim("isend", reads=(x,)))


def test_what_is_lent_counts_until_it_is_taken_back() -> None:
    """An operation that comes and goes is found while it is lent, keeps its memory for the next time, and no other's is lost."""
    registry, x = Registry(), np.zeros(10)
    lent, reader = _claim("all_reduce", writes=(x[:4],)), _claim("isend", reads=(x[2:],))
    _issue(registry, "isend", reads=(x[6:],))
    for _ in range(3):
        registry.check(reader)
        registry.claim(lent)
        with pytest.raises(BufferInUseError, match="all_reduce"):
            registry.check(reader)
        registry.check(_claim("irecv", writes=(x[4:6],)))
        registry._rebuild()
        registry.release(lent)
        registry.release(lent)
    registry.check(reader)
    with pytest.raises(BufferInUseError, match="isend"):
        registry.check(_claim("irecv", writes=(x,)))
    assert not registry.reusable
    assert len(registry.active) == 1


def test_a_dropped_handle_keeps_its_memory_until_the_end() -> None:
    """When nobody holds the handle any more the operation is forgotten, but not before it is over."""
    x = np.zeros(4)
    registry = Registry()
    old = _issue(registry, "irecv", writes=(x,))
    over = False
    old.over = lambda: over
    registry.drop(old)
    for _ in range(2):
        with pytest.raises(BufferInUseError):
            registry.check(_claim("irecv", writes=(x,)))
    over = True
    registry.check(_claim("irecv", writes=(x,)))
    assert not registry.active


def test_random_ranges_as_a_byte_map_has_them() -> None:
    """Thousands of operations that come and go are judged as a map of every byte judges them."""
    chosen = random.Random(5)
    memory = np.zeros(3000, np.uint8)
    registry = Registry()
    reading, writing = np.zeros(3000, int), np.zeros(3000, int)
    under_way: list[tuple[Claim, slice, bool]] = []
    refused = 0
    for _ in range(4000):
        if under_way and chosen.random() < 0.45:
            claim, where, writes = under_way.pop(chosen.randrange(len(under_way)))
            registry.remove(claim)
            (writing if writes else reading)[where] -= 1
            continue
        start = chosen.randrange(3000)
        where = slice(start, min(3000, start + chosen.choice((1, 7, 64, 600))))
        writes = chosen.random() < 0.4
        wrong = bool(writing[where].any() or (writes and reading[where].any()))
        claim = _claim("op", **{"writes" if writes else "reads": (memory[where],)})
        assert registry.conflicts(claim) == wrong
        if wrong:
            refused += 1
            with pytest.raises(BufferInUseError):
                registry.check(claim)
            continue
        registry.check(claim)
        registry.add(claim)
        under_way.append((claim, where, writes))
        (writing if writes else reading)[where] += 1
    assert 200 < refused < 3500


def test_all_memory_of_a_claim_stands_between_its_bounds() -> None:
    """Those of strided arrays and of several arrays have room between; those of a list are not looked for."""
    x = np.zeros((4, 4))
    start = x.ctypes.data
    assert RequestClaim(x[1], writes=True).bounds() == (start + 32, start + 64)
    assert RequestClaim(x[1:, 1][::-1], writes=True).bounds() == (start + 40, start + 112)
    assert RequestClaim(x[3], writes=True, reads=(x[0],)).bounds() == (start, start + 128)
    assert RequestClaim(None, writes=True, reads=(x[0], x[2])).bounds() == (start, start + 96)
    assert RequestClaim([x[0], x[1]], writes=True).bounds() == EVERYWHERE
    registry = Registry()
    for claim in (RequestClaim(None, writes=True), RequestClaim(x[2:2], writes=True), RequestClaim(x[0], writes=True)):
        assert not registry.conflicts(claim)
        registry.claim(claim)
        assert claim.end - claim.start == (32 if claim.array is not None and claim.array.size else 0)
    assert registry.conflicts(RequestClaim([x[3], x[0]], writes=True))
    assert not registry.conflicts(RequestClaim([x[3], x[1]], writes=True))


def test_arrays_that_are_only_read_are_compared() -> None:
    """Those that share memory with an array that is written are not, wherever they stand in a list."""
    x, y = np.zeros(8), np.zeros(8)
    for own in (x[:4], [y[:1], x[:4]], [x[:4], x[6:]]):
        for reads, changed, seen in (
            ((x[4:6],), x[4:5], True),
            ((x[2:6],), x[4:5], False),
            ([x[2:6], y[4:]], y[5:6], True),
            ([x[2:6], y[4:]], x[4:5], False),
            ((x[4:4], x[5:6]), x[5:6], True),
        ):
            claim = RequestClaim(own, writes=True, reads=reads)
            claim.snapshot_reads()
            assert claim._snapshot is not None
            assert not claim._snapshot.is_changed()
            changed += 1
            assert claim._snapshot.is_changed() == seen
            assert claim.reads


def test_ten_thousand_at_once() -> None:
    """The time for one more does not grow with the number under way."""
    memory = np.zeros(20_000)
    registry = Registry()
    start = time.process_time()
    claims_made = [_issue(registry, "irecv", writes=(memory[i : i + 1],)) for i in range(10_000)]
    claims_made += [_issue(registry, "isend", reads=(memory[10_000:],)) for _ in range(1000)]
    for claim in claims_made:
        registry.remove(claim)
    assert time.process_time() - start < 5  # about 0.1 s; comparing each with all took a minute


@pytest.mark.parametrize("dtype", ["?", "b", "i", "d", "g", "D", "G"])
def test_a_seal_shows_a_write(dtype: str) -> None:
    """A changed element breaks the seal, whatever the dtype, shape and strides; equal bytes do not."""
    for shape in ((), (3,), (2, 0), (4, 5)):
        for array in (np.ones(shape, dtype), np.ones(shape, dtype).T, np.ones((*shape, 2), dtype)[..., 0]):
            seal = Snapshot([array])
            assert not seal.is_changed()
            if array.size:
                if dtype not in "gG":  # they have bytes that belong to no element
                    array[...] = 1
                    assert not seal.is_changed()
                array[(-1,) * array.ndim] = 0
                assert seal.is_changed()


@pytest.fixture(params=["extension", "Python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Contents are read by the extension, or by Python."""
    if request.param == "Python":
        monkeypatch.setattr(memory_ranges, "extension", None)
    elif memory_ranges.extension is None:
        pytest.skip("without the extension there is one way")
    return request.param


def test_a_sample_of_large_buffers_is_sealed(way: str) -> None:
    """Above the limit both ends and some places in between are read, so that sealing costs little."""
    for nbytes in (SNAPSHOT_BYTES + 1, 1 << 20, (1 << 23) + 8):
        large = np.zeros(nbytes, np.uint8)
        assert len(contents(large)) <= 256 + 1024 * 32
        for place in (0, 127, nbytes // 2, nbytes - 128, nbytes - 1):
            claim = _claim("isend", reads=(large,))
            claim.snapshot_reads()
            assert claim.verdict() is None
            large[place : place + (nbytes // 12 if place == nbytes // 2 else 1)] += 1
            error = claim.verdict()
            assert isinstance(error, BufferInUseError), (nbytes, place)
            assert f"isend at {claim.site} was written before its wait() had returned" in str(error)
        claim = _claim("isend", reads=(large,))
        claim.snapshot_reads()
        large += 1
        assert claim.verdict() is not None


@pytest.mark.parametrize(
    ("nbytes", "parts"), [(66_000, 12), (160_000, 19), (800_000, 60), (8_000_000, 160), (40_000_000, 500)]
)
def test_each_slice_of_two_parts_is_sampled(way: str, nbytes: int, parts: int) -> None:
    """A write to so small a part of an array is seen wherever it begins, in each array of a list, and in arrays with gaps."""
    whole = np.zeros(nbytes + 8, np.uint8)[5:-3]  # no place of the cache begins where the array begins
    apart = np.zeros((nbytes // 8, 2))[:, 0]
    large, small = np.zeros(nbytes, np.uint8), np.zeros(nbytes // 4, np.uint8)
    cases: tuple[tuple[Any, Any, int], ...] = (
        (whole, whole, parts),
        (apart, apart, parts),
        ([small, large], large, parts // 3),
        ([small, large], small, parts // 4),
    )
    for given, written, many in cases:
        length = len(written) // many
        for start in np.linspace(0, len(written) - length, 67).astype(int):
            held = contents(given)
            assert not memory_ranges.differ(given, held)
            written[start : start + length] += 1
            assert memory_ranges.differ(given, held), (many, start)


def test_small_arrays_of_a_large_list_are_sampled() -> None:
    """The arrays of a list count together: a copy of each array would take a fifth of the time of the call."""
    arrays = [np.zeros(4000) for _ in range(100)]
    claim = _claim("all_to_all", reads=arrays)
    claim.snapshot_reads()
    assert claim._snapshot is not None
    assert len(claim._snapshot._held) < SNAPSHOT_BYTES
    arrays[50][:1000] = 1
    assert claim.verdict() is not None


@pytest.mark.parametrize("nbytes", [160_000, 800_000, 8_000_000])
def test_each_hundredth_element_is_sampled(way: str, nbytes: int) -> None:
    """Places stand at unequal distances, so that they meet most writes at equal distances, whatever the distance is."""
    array = np.zeros(nbytes // 8)
    for step in (50, 64, 100, 128):
        seen = 0
        for start in range(step):
            held = contents(array)
            array[start::step] += 1
            seen += memory_ranges.differ(array, held)
        assert seen > 0.75 * step, (step, seen)


@pytest.mark.parametrize("nbytes", [0, 8, 300, 400, 64 * 1024, 64 * 1024 + 8, 200_008, (1 << 23) + 16])
def test_contents_are_the_same_with_the_extension_and_without(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may compare what the extension has read with what NumPy reads; lists, bytes and read-only arrays are read, too."""
    if memory_ranges.extension is None:
        pytest.skip("without the extension there is one way")
    array = np.random.default_rng(1).integers(0, 255, nbytes, np.uint8)
    array.flags.writeable = False
    given = (array, [array, array[: nbytes // 3], array[:8]], array.view("S1"), array[:8].reshape(1, -1))
    found = [contents(each) for each in given]
    assert (found[0] == array.tobytes()) == (nbytes <= SNAPSHOT_BYTES)
    monkeypatch.setattr(memory_ranges, "extension", None)
    assert [contents(each) for each in given] == found


def test_the_extension_reads_arrays_without_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a large call each function of Python that looks at an array takes as long as the sample; fields are left to Python."""
    if memory_ranges.extension is None:
        pytest.skip("without the extension there is one way")

    class Own(np.ndarray):
        pass

    whole = np.zeros((300, 1, 300), "f8")
    records = np.zeros((), "u1,i4"), np.zeros(3, "u1,i4")
    assert all(memory_ranges.extension.contents(each) is None for each in (*records, list(records), whole.T, b"bytes"))
    monkeypatch.setattr(memory_ranges, "_has_fields", None)
    for array in (whole, whole.view("M8[s]"), whole[:0], whole[:1, :, :1], whole.view(Own), whole.view(">f4")):
        sealed = seal(array)
        assert isinstance(sealed, bytes)
        assert seal([array]) == contents(array) == sealed
        assert isinstance(seal([array, array[..., :0]]), bytes)


@pytest.mark.parametrize("dtype", ["f8", "M8[s]", "S24", "i4,f8", ">f4"])
def test_samples_of_other_arrays(dtype: str) -> None:
    """Columns, dtypes without a buffer, and fields are sampled, and no copy of the whole is made."""
    whole = np.zeros((1000, 1000), dtype)
    for array in (whole, whole[:, ::2], whole[::3, 500:], whole.T):
        seal = Snapshot([array])
        assert not seal.is_changed()
        assert len(contents(array)) < SNAPSHOT_BYTES
        array[-1, -1] = np.ones(1, "i8").astype(dtype.split(",")[0])[0] if "," not in dtype else (1, 1.0)
        assert seal.is_changed()
        array[...] = np.zeros(1, dtype)[0]


def test_an_exception_out_of_a_signal_handler_leaves_the_ranges_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever has been added or removed of an operation then, the next ones are compared with those that there are."""
    memory = np.zeros(64)
    registry = Registry()
    first = _issue(registry, "irecv", writes=(memory[:8], memory[16:24]))
    for method in ("add", "remove"):
        found = getattr(memory_ranges.Ranges, method)
        calls = []

        def striking(self: Any, each: Any, found: Any = found, calls: list[int] = calls) -> None:
            found(self, each)
            calls.append(1)
            if len(calls) == 1:
                raise KeyboardInterrupt

        monkeypatch.setattr(memory_ranges.Ranges, method, striking)
        with pytest.raises(KeyboardInterrupt):
            if method == "add":
                _issue(registry, "irecv", writes=(memory[32:40], memory[48:56]))
            else:
                registry.remove(first)
        monkeypatch.setattr(memory_ranges.Ranges, method, found)
        if method == "add":
            registry.remove(next(each for each in registry.active if each is not first))
    assert not registry.active
    _issue(registry, "irecv", writes=(memory,))


def test_what_stands_between_fields_is_no_part_of_a_seal() -> None:
    """A copy of a structured array may hold anything there, and the program may write other fields of the same records."""
    records = np.zeros((5, 4), [("a", "u1"), ("b", "f8"), ("c", [("d", "u1"), ("e", "f8")])])
    views = records.T[["a", "c"]], records[::2][["a"]], np.zeros((), np.dtype("u1,i4", align=True))
    seals = [Snapshot([view]) for view in views]
    for value in range(20):
        np.full(1000, value, np.uint8)  # for a copy to find in what it does not write
        records["b"] = value
        assert not any(seal.is_changed() for seal in seals)
    records["c"]["e"][0, 1] = 1
    assert [seal.is_changed() for seal in seals] == [True, False, False]
