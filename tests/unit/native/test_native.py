"""The C extension by itself: members that share memory in one process, arguments that are refused, how it is built."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import threading
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reductions import fold, is_same, values

import mpicoll
from mpicoll.operations import dispatch
from mpicoll.runtime import native
from mpicoll.transports.control import COMPARED, SAID
from mpicoll.transports.shm import control, transport

ROOT = Path(__file__).parents[3]
SOURCES = Path(mpicoll.__file__).with_name("native")
COMPILER = shutil.which("cc") or shutil.which("gcc")
INCLUDE = sysconfig.get_paths()["include"]
CAN_BUILD = COMPILER is not None and Path(INCLUDE, "Python.h").exists()

SIZES = (2, 3, 4, 5)
ROOM = 1024
"""Bytes of a buffer, so that little data takes many pieces."""
FIRST = 640
"""Where the buffers begin: behind the counters of five members."""
LOOK_ONCE = -1
DTYPES = ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8", "g", "c8", "c16", "G", "?")


# ---- how it is built ----


def test_it_is_there() -> None:
    """The extension is there if this was installed where a C compiler is."""
    if not CAN_BUILD:
        pytest.skip("this machine lacks a C compiler, or the headers of Python")
    assert native.found is not None, native.why_not
    assert native.why_not == ""


def test_the_version_is_the_sum_of_the_sources() -> None:
    """A change of a source changes ``VERSION`` in ``runtime/native.py`` to this sum, so that no older build is used."""
    files = sorted(SOURCES.rglob("*.[ch]"))
    if not files:
        pytest.skip("installed without its sources")
    assert f"{zlib.crc32(b''.join(path.read_bytes() for path in files)):08x}" == native.VERSION


@pytest.mark.parametrize("name", sorted(str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.c")))
def test_sources_compile_without_warnings(name: str, tmp_path: Path) -> None:
    """Each source compiles with the warnings of -Wall and -Wextra as errors."""
    if not CAN_BUILD:
        pytest.skip("this machine lacks a C compiler, or the headers of Python")
    options = ("-std=gnu11", "-O2", "-ffp-contract=off", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-I{INCLUDE}")
    command = [str(COMPILER), *options, "-c", str(SOURCES / name), "-o", str(tmp_path / "object.o")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


WITHOUT = """
import sys, types
sys.modules["mpicoll._native"] = {module}
from mpicoll.runtime import native
assert native.found is None
print(native.why_not)
"""


@pytest.mark.parametrize(
    ("module", "words"),
    [("None", "mpicoll._native"), ('types.SimpleNamespace(VERSION="unknown")', "another version")],
)
def test_without_it(module: str, words: str) -> None:
    """An extension that was not built, or for another version of the library, is not used, and the reason is noted."""
    command = [sys.executable, "-c", WITHOUT.format(module=module)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert words in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["", "false"])
def test_a_wheel(compiler: str, tmp_path: Path) -> None:
    """A wheel has the extension; where the compiler fails it is built without the extension, and without an error."""
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    shutil.copytree(ROOT / "mpicoll", clone / "mpicoll", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(clone)]
    environment = {**os.environ, "CC": compiler} if compiler else dict(os.environ)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("mpicoll-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    built = "mpicoll/_native" + str(sysconfig.get_config_var("EXT_SUFFIX")) in names
    assert built == (not compiler and CAN_BUILD), names
    assert "mpicoll/runtime/native.py" in names
    assert "mpicoll/py.typed" in names


@pytest.fixture
def extension() -> Any:
    if native.found is None:
        pytest.skip(f"this machine lacks the extension: {native.why_not}")
    return native.found


def test_its_numbers_are_those_of_the_library(extension: Any) -> None:
    """The layouts of ``native/ring.h`` and ``native/segment.h`` are those with which Python makes the memory."""
    assert extension.AHEAD == control.AHEAD
    assert extension.PLACES == control.MASK + 1
    assert extension.EAGER_BYTES == control.EAGER_BYTES
    assert (extension.COMPARED, extension.SAID) == (COMPARED, SAID)
    assert extension.RING_BYTES <= control.PART
    assert transport._LINE == extension.SEGMENT_LINE
    assert transport._BUFFERS == extension.BUFFERS
    assert transport._ENTRY == extension.SINGLE_COPY_ENTRY


def test_it_is_told_of_the_library_right(extension: Any) -> None:
    """Other collections than it uses, and arrays that are laid out otherwise, are a TypeError."""
    probe = np.zeros((2, 3))
    address = probe.__array_interface__["data"][0]
    known = (dispatch._finish, dispatch._give_up, dispatch._await)
    known += (dispatch._pending, dispatch._active, dispatch._threads, dispatch._inside)
    with pytest.raises(TypeError, match="list"):
        extension.configure(*known[:3], set(), *known[4:])
    for array, at in ((probe, address + 8), (probe.T, address), (np.zeros((3, 3)), address)):
        with pytest.raises(TypeError, match="laid out"):
            extension.check_arrays(array, at)
    extension.configure(*known)
    extension.check_arrays(probe, address)


def test_calls_with_other_things(extension: Any) -> None:
    """Too few arguments, and what is no frame, are a TypeError; so is an operation without a lock or a name an error."""
    (ring,) = rings(extension, 1)
    operation = prepared(extension, ring)
    for given in ((), (1, 2, 3, 4, 5), (None,) * 5, (None,) * 8):
        with pytest.raises(TypeError):
            operation.run(*given)
    nothing = (None, None, None, None)
    for given in (
        (),
        ("barrier", None, nothing),
        ("barrier", None, (), *(None,) * 6),
        ("barrier", None, nothing, *(None,) * 9),
    ):
        with pytest.raises(TypeError, match="other arguments"):
            extension.run_cached(*given)
    with pytest.raises(AttributeError):
        prepared(extension, ring, lock=None)
    with pytest.raises(TypeError):
        prepared(extension, ring, op=7)


# ---- rounds ----


def rings(extension: Any, size: int) -> list[Any]:
    """Return the ring of each of some members."""
    memory = mmap.mmap(-1, size * control.PART)
    return [extension.Ring(memory, me, size, control.PART) for me in range(size)]


@pytest.mark.parametrize("size", [1, *SIZES])
@pytest.mark.parametrize("yields", [False, True])
def test_rounds(extension: Any, size: int, yields: bool, request: pytest.FixtureRequest) -> None:
    """A round is over when all have posted; it says whether the words are the same, and the largest of each."""
    request.addfinalizer(lambda: extension.set_yields(False))
    extension.set_yields(yields)
    members = rings(extension, size)
    for number in range(1, 3 * extension.PLACES):
        odd = number % (2 * size)
        words = [tuple(number * (i - 4) + (rank == odd and i == 9) for i in range(SAID)) for rank in range(size)]
        for rank, ring in enumerate(members):
            ring.write(number, words[rank])
            assert [each.is_over(number) for each in members] == [size == 1] * size
        for rank, ring in enumerate(members):
            ring.post(number)
            over = [all(other <= rank or other == me for other in range(size)) for me in range(size)]
            assert [each.is_over(number) for each in members] == over
            assert members[0].poll(number, 100_000 if yields else 1000) == over[0]
        for rank, ring in enumerate(members):
            assert ring.is_unanimous(number) == (len(set(words)) == 1)
            largest, spread, waited = ring.maxima(number)
            assert largest == [max(column) for column in zip(*words, strict=True)]
            assert 0 <= waited <= spread == ring.spread(number)
            assert rank < size - 1 or waited == 0


def test_rounds_that_are_taken_back(extension: Any) -> None:
    """A member that posts a withdrawn round later finds it never over; rounds that were over stay so."""
    one, late, other = rings(extension, 3)
    words = (0,) * SAID
    for number in (1, 2, 3):
        for ring in (one, other) if number > 1 else (one, late, other):
            ring.write(number, words)
            ring.post(number)
    one.withdraw(3)
    for number in (2, 3):
        late.write(number, words)
        late.post(number)
    assert [late.is_over(number) for number in (1, 2, 3)] == [True, False, False]
    assert [other.is_over(number) for number in (1, 2, 3)] == [True, False, False]


@pytest.mark.parametrize("wrong", [{"me": 2}, {"me": -1}, {"size": 0}, {"size": 3}, {"stride": 128}, {"stride": 34817}])
def test_a_ring_that_does_not_fit(extension: Any, wrong: dict[str, int]) -> None:
    """Members and places outside the memory are a ValueError, and the memory is not kept."""
    memory = mmap.mmap(-1, 2 * control.PART)
    with pytest.raises(ValueError):
        extension.Ring(**{"memory": memory, "me": 0, "size": 2, "stride": control.PART, **wrong})
    memory.close()  # BufferError if something still refers to it


def test_wrong_arguments_of_a_ring(extension: Any) -> None:
    """Other things than numbers and memory, and numbers below 0, are refused."""
    ring = rings(extension, 2)[0]
    words = tuple(range(SAID))
    for number in (-1, -16, -(1 << 63)):
        for call in (ring.post, ring.is_over, ring.is_unanimous, ring.spread, ring.maxima):
            with pytest.raises(ValueError):
                call(number)
        with pytest.raises(ValueError):
            ring.write(number, words)
        with pytest.raises(ValueError):
            ring.poll(number, 0)
    for given in ((1, words[:-1]), (1, list(words)), (1,), ("1", words), (1, ("x",) * SAID), (1 << 64, words)):
        with pytest.raises((TypeError, OverflowError)):
            ring.write(*given)
    for memory in (bytes(2 * control.PART), 5, None):
        with pytest.raises((TypeError, BufferError)):
            extension.Ring(memory, 0, 2, control.PART)
    with pytest.raises(ValueError, match="not made"):
        extension.Ring.__new__(extension.Ring).post(1)
    with pytest.raises(TypeError, match="once"):
        ring.__init__(bytearray(1), 0, 2, 1)


# ---- segments and transfers ----


def segments(extension: Any, size: int, room: int = ROOM) -> list[Any]:
    """Return the segment of each of some members."""
    memory = mmap.mmap(-1, FIRST + 2 * size * room)
    return [extension.Segment(memory, me, size, FIRST, room) for me in range(size)]


def moved(transfers: Sequence[Any], order: random.Random) -> None:
    """Complete the transfers of all members, in turns that come as they like."""
    left = list(transfers)
    for _ in range(10_000):
        order.shuffle(left)
        left = [each for each in left if not each.Test()]
        if not left:
            return
    raise AssertionError(f"waits: {[each.waits_for for each in left]}")


def has_reduction(extension: Any, name: str) -> bool:
    """Return whether the extension reduces rows by that name; 64 bytes are whole elements of each dtype."""
    try:
        extension.reduce_rows(bytes(128), 2, bytearray(64), name)
    except ValueError:
        return False
    return True


def ops_of(extension: Any, dtype: str) -> list[str]:
    every = ("SUM", "PROD", "MAX", "MIN", "BAND", "BOR", "BXOR", "LAND", "LOR", "LXOR")
    return [op for op in every if has_reduction(extension, native.name_of(op, np.dtype(dtype)))]


def counts_of(dtype: str) -> tuple[int, ...]:
    """Return numbers of elements around the limits: none, one, a piece, several pieces."""
    most = ROOM // np.dtype(dtype).itemsize
    return 0, 1, 7, most - 1, most, most + 1, 3 * most + 5


def named(op: str, dtype: str) -> dict[str, Any]:
    kind = np.dtype(dtype)
    return {"reduction": native.name_of(op, kind), "itemsize": kind.itemsize}


def raw(array: Any) -> Any:
    return array.view(np.uint8)


def reduced(segment: Any, send: Any, recv: Any, op: str, root: int) -> Any:
    """Return the transfer of a member: all that want the result reduce everything."""
    result = recv if root in (-1, segment.me) else None
    return segment_transfer(segment, "reduce", send, result, op, writes=[(segment.me, 0, raw(send))])


def in_parts(segment: Any, send: Any, recv: Any, op: str, root: int) -> Any:
    """Return the transfer of a member: each reduces its part."""
    return segment_transfer(segment, "parts", send, recv if root in (-1, segment.me) else None, op)


def segment_transfer(segment: Any, kind: str, send: Any, recv: Any, op: str, **more: Any) -> Any:
    assert native.found is not None
    width = segment.room // send.itemsize * send.itemsize
    result = None if recv is None else raw(recv)
    dtype = send.dtype.str
    return native.found.SharedTransfer(
        segment, kind, send.nbytes, width, LOOK_ONCE, send=raw(send), recv=result, **more, **named(op, dtype)
    )


def test_every_reduction_is_known(extension: Any) -> None:
    """All operations that MPI has for a native dtype are there, and none of others."""
    expected = {"b": 3, "i": 7, "u": 7, "f": 4, "c": 1}
    for dtype in DTYPES:
        assert len(ops_of(extension, dtype)) == expected[np.dtype(dtype).kind], dtype
    for name in ("", "SUM", "SUM f2", "MAX c8", "BAND f8", "SUM f", "sum f8", "PROD c16", "SUM b1"):
        assert not has_reduction(extension, name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [reduced, in_parts])
def test_reductions(extension: Any, make: Callable[..., Any], dtype: str) -> None:
    """Each op, number of members and size around a limit, in place and not, for all and for one: NumPy's bits."""
    order = random.Random(7)
    for size in SIZES:
        members = segments(extension, size)
        for op in ops_of(extension, dtype):
            for count in counts_of(dtype):
                root = order.randrange(-1, size)
                terms = [values(dtype, count, rank) for rank in range(size)]
                expected = fold(op, terms)
                for in_place in (True, False):
                    sends = [term.copy() for term in terms]
                    recvs = sends if in_place else [np.full_like(term, 1) for term in terms]
                    transfers = [make(*each, op, root) for each in zip(members, sends, recvs, strict=True)]
                    moved(transfers, order)
                    for rank in range(size):
                        where = (op, size, count, root, in_place, rank)
                        if root in (-1, rank):
                            assert is_same(recvs[rank], expected, op), where
                        if not in_place or root not in (-1, rank):
                            assert sends[rank].tobytes() == terms[rank].tobytes(), where
        assert len({segment.step for segment in members}) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions_in_place(extension: Any, dtype: str) -> None:
    """Arrays that all members share, larger than what is reduced at once."""
    order = random.Random(8)
    itemsize = np.dtype(dtype).itemsize
    for size in SIZES:
        members = segments(extension, size)
        for op in ops_of(extension, dtype):
            for count in (1, size - 1, 8192 // itemsize + 1, size * 8192 // itemsize + 3):
                terms = [values(dtype, count, rank) for rank in range(size)]
                expected, arrays = fold(op, terms), [raw(term) for term in terms]
                moved(
                    [
                        extension.SharedTransfer(
                            segment,
                            "in place",
                            terms[0].nbytes,
                            order.choice((itemsize, 1000 * itemsize, 1 << 20)),
                            LOOK_ONCE,
                            arrays=arrays,
                            **named(op, dtype),
                        )
                        for segment in members
                    ],
                    order,
                )
                assert all(is_same(term, expected, op) for term in terms), (op, size, count)


@pytest.mark.parametrize("dtype", ["f8", "i2", "G"])
def test_a_block_of_the_result_for_each_member(extension: Any, dtype: str) -> None:
    """Blocks of unequal size, some of them empty, each reduced by the member that it is for."""
    order, itemsize = random.Random(9), np.dtype(dtype).itemsize
    for size in SIZES:
        members, room = segments(extension, size), ROOM // size // 16 * 16
        for scale in (0, 1, 50, 500):
            counts = [scale * ((rank + 1) % 3) for rank in range(size)]
            terms = [[values(dtype, count, rank) for count in counts] for rank in range(size)]
            results = [np.zeros(count, dtype) for count in counts]
            moved(
                [
                    extension.SharedTransfer(
                        segment,
                        "reduce",
                        max(counts) * itemsize,
                        room // itemsize * itemsize,
                        LOOK_ONCE,
                        writes=[(me, to * room, raw(terms[me][to])) for to in range(size) if to != me],
                        send=raw(terms[me][me]),
                        recv=raw(results[me]),
                        read_at=me * room,
                        **named("SUM", dtype),
                    )
                    for me, segment in enumerate(members)
                ],
                order,
            )
            for me in range(size):
                assert is_same(results[me], fold("SUM", [terms[rank][me] for rank in range(size)]), "SUM"), (size, me)


def test_copies(extension: Any) -> None:
    """Blocks of any length from each member to each, one behind the other: all arrive, and nothing beside them is written."""
    order = random.Random(10)
    for size in SIZES:
        members, place = segments(extension, size), ROOM // size // 16 * 16
        for width in (1, 16, place):
            for _ in range(5):
                lengths = [[order.choice((0, 1, width, 3 * width + 1)) for _ in range(size)] for _ in range(size)]
                sent = [[values("u1", length, rank) for length in lengths[rank]] for rank in range(size)]
                got = [[np.full(lengths[rank][me] + 2, 77, np.uint8) for rank in range(size)] for me in range(size)]
                moved(
                    [
                        extension.SharedTransfer(
                            segment,
                            "copy",
                            max(map(max, lengths)),
                            width,
                            LOOK_ONCE,
                            [(me, to * place, sent[me][to]) for to in range(size) if to != me],
                            [(rank, me * place, got[me][rank][1:-1]) for rank in range(size) if rank != me],
                        )
                        for me, segment in enumerate(members)
                    ],
                    order,
                )
                for me in range(size):
                    for rank in set(range(size)) - {me}:
                        assert got[me][rank].tolist() == [77, *sent[rank][me], 77]


def test_copies_by_ordinary_and_by_non_temporal_stores(extension: Any) -> None:
    """The first 16 copies of a size use ordinary stores, the next 16 non-temporal ones: all bytes arrive, and no other."""
    order, room = random.Random(11), 3 << 13
    for at, start, length in ((0, 0, 4096), (1, 3, 4099), (63, 1, 9000), (16, 17, 16384), (8192, 0, 3 << 12)):
        memory = mmap.mmap(-1, FIRST + 4 * room)
        writer, reader = (extension.Segment(memory, me, 2, FIRST, room) for me in range(2))
        buffers = np.frombuffer(memory, np.uint8)[FIRST : FIRST + 2 * room].reshape(
            2, room
        )  # of the writer, used in turns
        for number in range(32):
            source = values("u1", length + start, number)[start:]
            target = np.full(length + 2, 77, np.uint8)
            block = [(0, at, source)], [(0, at, target[1:-1])]
            buffers[...] = 78
            moved(
                [
                    extension.SharedTransfer(writer, "copy", length, room, LOOK_ONCE, block[0], []),
                    extension.SharedTransfer(reader, "copy", length, room, LOOK_ONCE, [], block[1]),
                ],
                order,
            )
            assert target[0] == target[-1] == 77
            assert np.array_equal(target[1:-1], source), (at, start, length, number)
            written = buffers[writer.step % 2]
            assert (written[:at] == 78).all(), (at, start, length, number)
            assert (written[at + length :] == 78).all(), (at, start, length, number)


def test_a_root_that_writes_ahead(extension: Any) -> None:
    """A member that only writes is one piece ahead at most; one that only reads may come first; each says for whom it waits."""
    source, target = np.arange(1000, dtype=np.uint16).view(np.uint8)[:1000], np.zeros(1000, np.uint8)
    members = segments(extension, 2)
    writer = extension.SharedTransfer(members[0], "copy", 1000, 64, LOOK_ONCE, [(0, 0, source)], [])
    reader = extension.SharedTransfer(members[1], "copy", 1000, 64, LOOK_ONCE, [], [(0, 0, target)])
    assert not reader.Test()
    assert reader.waits_for == (1, [0])
    assert not writer.Test()
    assert members[0].step == 2
    assert writer.waits_for == (2, [1])
    moved([writer, reader], random.Random(0))
    assert (source == target).all()
    assert [segment.step for segment in members] == [16, 16]
    assert members[0].has_reached(16)
    assert not members[0].has_reached(17, 1)
    assert writer.Test()
    assert members[0].step == 16


def once(segment: Any, total: int, writes: Any, reads: Any, **own: Any) -> Any:
    """Return the transfer of a member that copies from process to process; its peers are segments of this process."""
    assert native.found is not None
    return native.found.SharedTransfer(segment, "single copy", total, 64, LOOK_ONCE, writes, reads, **own)


@pytest.mark.parametrize("size", SIZES)
def test_single_copies(extension: Any, size: int) -> None:
    """Blocks of different lengths for each member, or one for all: they arrive whole, and nothing else is written."""
    order = random.Random(5)
    for longest in (1, 300, 9000, 70_000):
        members = segments(extension, size)
        lengths = [[order.randrange(longest + 1) for _ in range(size)] for _ in range(size)]
        sent = [[values("u1", lengths[me][to], 10 * me + to) for to in range(size)] for me in range(size)]
        got = [[np.full(lengths[rank][me] + 2, 77, np.uint8) for rank in range(size)] for me in range(size)]
        moved(
            [
                once(
                    segment,
                    longest,
                    [(me, 0, sent[me][to], to) for to in range(size) if to != me],
                    [(rank, 0, got[me][rank][1:-1]) for rank in range(size) if rank != me],
                    send=sent[me][me],
                    recv=got[me][me][1:-1],
                )
                for me, segment in enumerate(members)
            ],
            order,
        )
        assert [segment.step for segment in members] == [2] * size
        for me in range(size):
            for rank in range(size):
                assert got[me][rank].tolist() == [77, *sent[rank][me], 77], (me, rank)
        root, source, targets = size - 1, values("u1", longest, 3), [np.zeros(longest, np.uint8) for _ in range(size)]
        to_all = [once(members[root], longest, [(root, 0, source)], [])]
        moved([*(once(members[me], longest, [], [(root, 0, targets[me])]) for me in range(root)), *to_all], order)
        assert all((each == source).all() for each in targets[:root])


def test_a_single_copy_that_the_kernel_refuses(extension: Any) -> None:
    """Memory that the process can read and the kernel cannot copy: the blocks move in pieces, and the next call is as usual."""
    with open("/proc/self/maps", encoding="ascii") as maps:
        found = [line.split()[0].split("-") for line in maps if line.rstrip().endswith("[vvar]")]
    if not found:
        pytest.skip("this kernel shows no memory of its own in the process")
    start = int(found[0][0], 16)
    special = np.ctypeslib.as_array((ctypes.c_ubyte * 4096).from_address(start))
    members, target, source = segments(extension, 2), np.full(4096, 77, np.uint8), values("u1", 4096, 1)
    own = np.zeros(4096, np.uint8)
    transfers = [
        once(members[0], 4096, [(0, 0, special, 1)], []),
        once(members[1], 4096, [], [(0, 0, target)], send=source, recv=own),
    ]
    moved(transfers, random.Random(0))
    assert [segment.step for segment in members] == [2 + 4096 // 64] * 2
    assert (target[-1000:] == special[-1000:]).all()
    assert (target[-1000:] == 0).all()
    assert (own == source).all()
    moved(
        [once(members[0], 4096, [(0, 0, source)], []), once(members[1], 4096, [], [(0, 0, target)])], random.Random(0)
    )
    assert (target == source).all()
    assert [segment.step for segment in members] == [4 + 4096 // 64] * 2


def test_a_single_copy_that_is_given_up(extension: Any) -> None:
    """When a member has given its transfer up, the other member writes nothing into its memory."""
    members, target, source = segments(extension, 2), np.full(70_000, 77, np.uint8), values("u1", 70_000, 1)
    reader = once(members[1], 70_000, [], [(0, 0, target)])
    writer = once(members[0], 70_000, [(0, 0, source)], [])
    reader.revoke()  # has told nobody where its memory is
    assert not reader.Test()
    reader.revoke()
    assert not writer.Test()
    assert writer.waits_for == (2, [1])
    assert (target == 77).all()
    again = segments(extension, 2)
    reader, writer = once(again[1], 70_000, [], [(0, 0, target)]), once(again[0], 70_000, [(0, 0, source)], [])
    while again[0].step < 2:  # the sender has copied all it could, and waits
        reader.Test()
        writer.Test()
    writer.revoke()
    assert not reader.Test()  # may have read what the sender has changed since: never complete
    assert reader.waits_for == (3, [0])
    assert not again[1].has_reached(3)  # so that who waits for this step does not go round at once
    assert not reader.Test()


def test_the_word_of_a_process(extension: Any) -> None:
    """A process reads its own word, and not that of a process that does not exist, nor another value."""
    pid, address, value = extension.peer_word()
    assert pid == os.getpid()
    assert extension.peer_word() == (pid, address, value)
    assert extension.allows_copies(pid, address, value)
    assert not extension.allows_copies(pid, address, value + 1)
    assert not extension.allows_copies(pid, 8, value)
    assert not extension.allows_copies(2**22 + 1, address, value)
    other = subprocess.run(
        [sys.executable, "-c", "from mpicoll._native import peer_word as w; print(w())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not extension.allows_copies(*eval(other.stdout))


@pytest.mark.parametrize("size", SIZES)
def test_announcements(extension: Any, size: int) -> None:
    """All learn the two words of each."""
    members, order = segments(extension, size), random.Random(size)
    for turn in range(5):
        words = [(turn - rank, rank << 60) for rank in range(size)]
        announced = [
            extension.SharedTransfer(segment, "announce", 1, 1, LOOK_ONCE, words=words[me])
            for me, segment in enumerate(members)
        ]
        moved(announced, order)
        for segment in members:
            assert [segment.announced(rank) for rank in range(size)] == words


@pytest.mark.parametrize(
    "wrong",
    [
        {"me": 2},
        {"me": -1},
        {"size": 0},
        {"size": 3},
        {"first": 641},
        {"first": 128},
        {"first": 1 << 40},
        {"room": 0},
        {"room": 24},
        {"room": 2 * ROOM},
    ],
)
def test_a_segment_that_does_not_fit(extension: Any, wrong: dict[str, int]) -> None:
    """Counters and buffers outside the memory are a ValueError, and the memory is not kept."""
    memory = mmap.mmap(-1, FIRST + 4 * ROOM)
    with pytest.raises(ValueError):
        extension.Segment(**{"memory": memory, "me": 0, "size": 2, "first": FIRST, "room": ROOM, **wrong})
    memory.close()


def test_wrong_arguments_of_a_segment(extension: Any) -> None:
    """Members that there are not, and a segment that was not made, are refused."""
    segment = segments(extension, 2)[0]
    with pytest.raises(ValueError):
        segment.has_reached(1, 2)
    for rank in (-1, 2):
        with pytest.raises(ValueError):
            segment.announced(rank)
    empty = extension.Segment.__new__(extension.Segment)
    for call in (empty.advance, lambda: empty.has_reached(1), lambda: empty.announced(0)):
        with pytest.raises(ValueError, match="not made"):
            call()
    with pytest.raises(ValueError, match="not made"):
        extension.SharedTransfer(empty, "announce", 1, 1, 0)
    with pytest.raises(TypeError, match="once"):
        segment.__init__(bytearray(1), 0, 2, 1, 1)


SUM = {"reduction": "SUM f8", "itemsize": 8}
F8 = {"send": bytes(64), "recv": bytearray(64), "total": 64, **SUM}


@pytest.mark.parametrize(
    "wrong",
    [
        {"width": 0},
        {"total": -1},
        {"itemsize": 0},
        {"writes": [(0, ROOM - 63, bytes(64))]},
        {"writes": [(0, -1, bytes(64))]},
        {"writes": [(1, 0, bytes(64))]},
        {"writes": [(0, 0, bytes(1001))]},
        {"reads": [(2, 0, bytearray(64))]},
        {"reads": [(-1, 0, bytearray(64))]},
        {"reads": [(1, 1 << 62, bytearray(64))]},
        {"kind": "reduce", **F8, "reduction": "SUM f2"},
        {"kind": "reduce", **F8, "reduction": ""},
        {"kind": "reduce", **F8, "itemsize": 4},
        {"kind": "reduce", **F8, "itemsize": 0},
        {"kind": "reduce", **F8, "width": 60},
        {"kind": "reduce", **F8, "send": bytes(56)},
        {"kind": "reduce", **F8, "total": 56},
        {"kind": "reduce", **F8, "recv": bytearray(60)},
        {"kind": "reduce", **F8, "read_at": ROOM - 56},
        {"kind": "reduce", **F8, "read_at": -8},
        {"kind": "reduce", **F8, "reads": [(1, 0, bytearray(64))]},
        {"kind": "parts", **F8, "send": bytes(56)},
        {"kind": "parts", **F8, "recv": bytearray(56)},
        {"kind": "parts", **F8, "width": ROOM + 8},
        {"kind": "parts", **F8, "writes": [(0, 0, bytes(64))]},
        {"kind": "in place", **SUM, "total": 64, "arrays": [bytearray(64)]},
        {"kind": "in place", **SUM, "total": 64, "arrays": [bytearray(64), bytearray(56)]},
        {"kind": "in place", **SUM, "total": 60, "arrays": [bytearray(60), bytearray(60)]},
        {"kind": "in place", "total": 64, "arrays": [bytearray(64)] * 2},
        {"kind": "single copy", **SUM},
        {"kind": "single copy", "send": bytes(8)},
        {"kind": "single copy", "send": bytes(8), "recv": bytearray(9)},
        {"kind": "single copy", "reads": [(2, 0, bytearray(8))]},
        {"kind": "single copy", "writes": [(0, 0, bytes(8), 2)]},
        {"kind": "copy", **SUM},
        {"kind": "announce", **SUM},
    ],
)
def test_a_transfer_that_does_not_fit(extension: Any, wrong: dict[str, Any]) -> None:
    """A transfer that would leave its memory is a ValueError, also when it is made again, and keeps nothing."""
    given = {"kind": "copy", "total": 1000, "width": 64, "poll_ns": 0, **wrong}
    memory = bytearray(64)
    given["reads"] = [*given.get("reads", []), (1, 0, memory)] if given["kind"] == "copy" else given.get("reads", [])
    with pytest.raises(ValueError):
        extension.SharedTransfer(segments(extension, 2)[0], **given)
    memory.append(1)  # BufferError if something still refers to it
    refused = extension.SharedTransfer.__new__(extension.SharedTransfer)
    with pytest.raises(ValueError):
        refused.__init__(segments(extension, 2)[0], **given)
    with pytest.raises(ValueError, match="not made"):
        refused.Test()


@pytest.mark.parametrize(
    "wrong",
    [
        {"writes": ()},
        {"reads": [(0, 0, bytes(8))]},
        {"writes": [(0, 0)]},
        {"writes": [1]},
        {"writes": [(0, 0, 5)]},
        {"kind": "move"},
        {"arrays": 5},
        {"words": (1,)},
        {"segment": object()},
        {"send": 5},
        {"recv": bytes(8)},
    ],
)
def test_a_transfer_of_other_things(extension: Any, wrong: dict[str, Any]) -> None:
    """What is no block, no kind, or cannot be written to, is an error, and nothing can be made of the transfer."""
    segment = segments(extension, 2)[0]
    refused = extension.SharedTransfer.__new__(extension.SharedTransfer)
    with pytest.raises((TypeError, BufferError)):
        refused.__init__(**{"segment": segment, "kind": "copy", "total": 64, "width": 64, "poll_ns": 0, **wrong})
    for use in (refused.Test, lambda: refused.waits_for):
        with pytest.raises(ValueError, match="not made"):
            use()


# ---- prepared calls ----


def prepared(extension: Any, ring: Any, **other: Any) -> Any:
    """Return a prepared call: an all_reduce of three float64 beside the records."""
    given: dict[str, Any] = {
        "op": "all_reduce",
        "lock": threading.RLock(),
        "ring": ring,
        "segment": None,
        "order": extension.CallOrder(),
        "words": tuple(range(SAID)),
        "dtype": np.dtype("f8"),
        "itemsize": 8,
        "sends": 24,
        "offset": 0,
        "block": 24,
        "width": 24,
        "root": -1,
        "send": (3,),
        "recv": (3,),
        "result": "reduced",
        "reduction": "SUM f8",
        "average": False,
        "in_place": False,
        "poll_ns": 0,
    }
    return extension.SharedOperation(**{**given, **other})


@pytest.mark.parametrize("dtype", DTYPES)
def test_prepared_reductions(extension: Any, dtype: str) -> None:
    """Each op and the average, as much as goes beside a record, in place and not: NumPy's bits."""
    kind, number = np.dtype(dtype), 0
    for size in (1, *SIZES):
        members = rings(extension, size)
        for op in (*ops_of(extension, dtype), *(["AVG"] if kind.kind in "fc" else [])):
            for count in (0, 1, 5, extension.EAGER_BYTES // kind.itemsize):
                name, nbytes = op.replace("AVG", "SUM"), count * kind.itemsize
                about = {"dtype": kind, "itemsize": kind.itemsize, "sends": nbytes, "block": nbytes}
                about |= {"width": max(nbytes, 1), "send": (count,), "recv": (count,)}
                about |= {"reduction": native.name_of(name, kind), "average": op == "AVG"}
                terms = [values(dtype, count, rank) for rank in range(size)]
                expected = fold(name, terms)
                if op == "AVG":
                    with np.errstate(all="ignore"):
                        expected = np.divide(expected, size, dtype=kind)
                for in_place in (True, False):
                    number += 1
                    calls = [prepared(extension, ring, in_place=in_place, **about) for ring in members]
                    for rank, call in enumerate(calls):
                        call.write(number, terms[rank])
                    for rank, call in enumerate(calls):
                        out = terms[rank].copy() if in_place else np.zeros(count, kind)
                        call.read(number, out)
                        assert is_same(out, expected, op), (op, size, count, in_place, rank)


@pytest.mark.parametrize("size", [1, *SIZES])
def test_a_list_of_arrays_is_reduced_where_it_stands(extension: Any, size: int) -> None:
    """The data of a member is its arrays, one behind the other; each array gets its part of the result."""
    shapes = [(3,), (), (2, 2), (0,)]
    about = {"sends": 64, "block": 64, "width": 64, "send": shapes, "recv": shapes, "in_place": True}
    calls = [prepared(extension, ring, average=True, **about) for ring in rings(extension, size)]
    terms = [[np.full(shape, rank + 10.0 * i) for i, shape in enumerate(shapes)] for rank in range(size)]
    for number in (1, 2):
        given = [[array.copy() for array in arrays] for arrays in terms]
        for call, arrays in zip(calls, given, strict=True):
            call.write(number, arrays)
        for call, arrays in zip(calls, given, strict=True):
            call.read(number, arrays)
            for i, array in enumerate(arrays):
                assert (array == (size - 1) / 2 + 10.0 * i).all(), (number, i)
    same = np.zeros(3)
    assert calls[0].accepts(given[0], given[-1])
    for wrong in (
        None,
        same,
        [same],
        [*given[0][:3], [0.0]],
        [same, np.zeros(()), np.zeros((2, 2)), np.zeros((0,), "f4")],
        [same, same[1:2].reshape(()), np.zeros((2, 2)), np.zeros(0)],
    ):
        assert not calls[0].accepts(given[0], wrong)
        with pytest.raises(ValueError):
            calls[0].read(2, wrong)
    with pytest.raises(TypeError, match="accepts"):
        calls[0].accepts(given[0])


def test_other_prepared_results(extension: Any) -> None:
    """A row of each member, a list of them, and what the root has; of one block for each member, too."""
    size, number = 3, 5
    members = rings(extension, size)
    about = {"reduction": "", "sends": 72, "send": [(3,)] * size}
    for rank, ring in enumerate(members):
        call = prepared(extension, ring, result="", recv=None, **about)
        call.write(number, [np.full(3, 10.0 * rank + to) for to in range(size)])
    expected = [[10.0 * rank + me for rank in range(size)] for me in range(size)]
    for me, ring in enumerate(members):
        about["offset"] = 24 * me
        rows, arrays, block = np.zeros((size, 3)), [np.zeros(3) for _ in range(size)], np.zeros(3)
        prepared(extension, ring, result="rows", recv=(size, 3), **about).read(number, rows)
        prepared(extension, ring, result="list", recv=[(3,)] * size, **about).read(number, arrays)
        prepared(extension, ring, result="copied", root=2, **about).read(number, block)
        assert rows[:, 0].tolist() == [each[2] for each in arrays] == expected[me]
        assert block.tolist() == [20.0 + me] * 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"sends": 4096},
        {"sends": -8},
        {"sends": 20},
        {"block": 4096},
        {"block": 20},
        {"block": -8},
        {"offset": 2032},
        {"offset": -8},
        {"width": 0},
        {"width": 16},
        {"itemsize": 0},
        {"itemsize": 4, "sends": 12},
        {"root": 2},
        {"words": tuple(range(11))},
        {"send": [(3,), (3,)], "sends": 40},
        {"send": [(3,), (3,)], "sends": 48, "block": 32},
        {"send": (1 << 61, 4)},
        {"send": (-1,)},
        {"segment": object()},
        {"result": "other"},
        {"result": "copied"},
        {"result": "rows"},
        {"result": "list"},
        {"result": "reduced", "recv": None},
        {"send": [(3,), (3,)], "recv": [(3,), (3,)]},
        {"send": [(3,), (3,)], "recv": [(3,)], "sends": 48, "block": 48, "width": 48},
        {"send": [(3,), (3,)], "recv": [(3,), (3,)], "sends": 48, "block": 56, "width": 56},
        {"reduction": "SUM f2"},
        {"reduction": "SUM f4"},
        {"reduction": ""},
        {"reduction": "MAX f8", "average": True},
    ],
)
def test_a_prepared_call_that_does_not_fit(extension: Any, wrong: dict[str, Any]) -> None:
    """A call that would read or write beside its memory, or has no such result, is a ValueError."""
    with pytest.raises(ValueError):
        prepared(extension, rings(extension, 2)[1], **wrong)


def test_pieces_that_do_not_fit(extension: Any) -> None:
    """A call in several pieces has one array of all its bytes, and pieces that fit into a buffer."""
    ring, segment = rings(extension, 2)[1], segments(extension, 2)[1]
    fits = {"segment": segment, "sends": 4096, "block": 4096, "width": ROOM, "send": (512,), "recv": (512,)}
    prepared(extension, ring, **fits)
    for wrong in (
        {"recv": (511,)},
        {"width": 2 * ROOM},
        {"width": ROOM - 4},
        {"offset": 8},
        {"segment": None},
        {"segment": segments(extension, 2)[0]},
        {"segment": segments(extension, 3)[1]},
        {"recv": [(256,)] * 2, "result": "list"},
    ):
        with pytest.raises(ValueError):
            prepared(extension, ring, **{**fits, **wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        {"send": 3},
        {"recv": [3]},
        {"recv": [("x",)]},
        {"result": 1},
        {"words": [0] * SAID},
        {"ring": object()},
        {"order": object()},
    ],
)
def test_a_prepared_call_of_other_things(extension: Any, wrong: dict[str, Any]) -> None:
    """Arguments of other types are a TypeError."""
    with pytest.raises(TypeError):
        prepared(extension, **{"ring": rings(extension, 2)[1], **wrong})


def test_only_arrays_that_were_prepared_for(extension: Any) -> None:
    """Other shapes, dtypes, layouts and types are refused, and so are places that there are not."""
    call = prepared(extension, rings(extension, 2)[0])
    readonly = np.zeros(3)
    readonly.setflags(write=False)
    others = (np.zeros(4), np.zeros((3, 2))[:, 0], None, [1.0] * 3, b"x" * 24, np.zeros(3, ">f8"), np.zeros(3, "i8"))
    for array in others:
        with pytest.raises(ValueError):
            call.write(1, array)
        with pytest.raises(ValueError):
            call.read(1, array)
    call.write(1, readonly)
    with pytest.raises(ValueError):
        call.read(1, readonly)
    for use in (call.write, call.read):
        with pytest.raises(ValueError):
            use(-1, np.zeros(3))
    two = prepared(extension, rings(extension, 2)[0], recv=[(3,)] * 2, result="list", reduction="")
    whole = np.zeros(5)
    with pytest.raises(ValueError):  # results that overlap
        two.read(1, [whole[:3], whole[2:]])


# ---- functions ----


@pytest.mark.parametrize("receives", [False, True])
def test_fits(extension: Any, receives: bool) -> None:
    """A message tells arrays of its dtype and shape from others, and knows whether it can move them."""
    message = extension.MessageFields()
    x = np.zeros((2, 3))
    assert not message.fits(x)
    message.dtype, message.shape, message.nbytes, message.inside = x.dtype, (2, 3), x.nbytes, x.nbytes
    message.posted = [] if receives else None
    wide = np.zeros((4, 6))
    for given in (x, wide[::2, ::2], wide[1::-1, :3], np.zeros((3, 2)).T, wide[:2, 5:2:-1]):
        assert message.fits(given)
    readonly, odd = x.copy(), np.zeros(49, np.int8)[1:].view(x.dtype).reshape(2, 3)
    readonly.setflags(write=False)
    assert message.fits(readonly) is (not receives)
    shares = np.lib.stride_tricks.as_strided(x, (2, 3), (8, 8))
    assert message.fits(shares) is (not receives)
    for other in (x[0], x.reshape(3, 2), x.astype("f4"), x.astype(">f8"), x.view(np.recarray), odd, [0.0], None):
        assert not message.fits(other)
    message.inside = -1  # the elements move apart from the envelope
    assert message.fits(x)
    assert not message.fits(wide[::2, ::2])
    message.packed = np.empty((2, 3))
    assert message.fits(wide[::2, ::2])
    message.shape = (2, "3")
    assert not message.fits(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows(extension: Any, dtype: str) -> None:
    """Rows that stand one behind the other are reduced in their order; memory of another size is refused."""
    for op in ops_of(extension, dtype):
        rows = np.array([values(dtype, 9, rank) for rank in range(4)])
        out = np.zeros(9, dtype)
        native.reduce_rows(op, rows, 4, out)
        assert is_same(out, fold(op, list(rows)), op), op
    for size, name in ((3, "SUM f8"), (1, "SUM f8"), (-1, "SUM f8"), (4, "SUM f2"), (4, "")):
        with pytest.raises(ValueError):
            extension.reduce_rows(np.zeros((4, 9)), size, np.zeros(9), name)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8", ""])
def test_memory_of_half_types(extension: Any, name: str) -> None:
    """Memory of another size is refused; a name that the extension does not know leaves the result as it was."""
    words = np.arange(37, dtype=np.uint16) + 0x3C00
    wide, narrow = np.zeros(37, np.float32), np.zeros(37, np.uint16)
    known = extension.convert_half(name, words, wide)
    assert extension.convert_half(name, wide, narrow) is known
    assert known or (name != "bfloat16" and not wide.any())
    assert not known or (narrow == words).all()
    for source, out in ((words, wide[1:]), (words[1:], wide), (wide, narrow[1:]), (words, narrow)):
        with pytest.raises(ValueError):
            extension.convert_half(name, source, out)
    with pytest.raises(TypeError):
        extension.convert_half(name, words, wide.data.toreadonly())
