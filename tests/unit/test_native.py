"""The C extension: it is built where there is a compiler, refuses what does not fit it, and nothing needs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpicoll
from mpicoll.checks.agreement import Lane
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.operations import riding
from mpicoll.runtime import native as extension_module
from mpicoll.transports.shm.segment import Segment

ROOT = Path(__file__).parents[2]


def can_build() -> bool:
    """Whether there is a C compiler, and the headers of this Python."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    return compiler is not None and Path(sysconfig.get_paths()["include"], "Python.h").exists()


def test_it_is_there() -> None:
    """Where this was installed with a C compiler at hand."""
    if not can_build():
        pytest.skip("this machine lacks a C compiler, or the headers of Python")
    assert riding.extension is not None, riding.why_not
    assert riding.why_not == ""
    assert riding.ride is riding.extension.ride


def test_the_version_is_the_sum_of_the_source() -> None:
    """Who changes the source changes the number in ``runtime/native.py`` to this, so that no older build of it is used."""
    source = Path(mpicoll.__file__).with_name("_riding.c")
    if not source.exists():
        pytest.skip("installed without its source")
    assert f"{zlib.crc32(source.read_bytes()):08x}" == extension_module.VERSION


ABSENT = """
import sys
sys.modules["mpicoll._riding"] = None
from mpicoll.operations import riding
assert riding.extension is None
assert riding.ride is riding.ride_in_python
print(riding.why_not)
"""

STALE = """
import types, sys
sys.modules["mpicoll._riding"] = types.SimpleNamespace(VERSION="unknown")
from mpicoll.operations import riding
assert riding.extension is None
assert riding.ride is riding.ride_in_python
print(riding.why_not)
"""


@pytest.mark.parametrize(("program", "words"), [(ABSENT, "mpicoll._riding"), (STALE, "another version")])
def test_without_it(program: str, words: str) -> None:
    """An extension that was not built, or for another version of the library, is done without, and the reason is kept."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert words in done.stdout


@pytest.fixture
def extension() -> Any:
    if riding.extension is None:
        pytest.skip(f"this machine lacks the extension: {riding.why_not}")
    return riding.extension


class _Lane(Lane):
    def __init__(self) -> None:
        self.issued = self.posted = self.turn = self.rounds = 0


def prepared(extension: Any, **other: Any) -> Any:
    """A call of member 1 of 2: an all_reduce of three float64, in memory that is only just enough."""
    part = 16 * 128 + 16 * 64
    given: dict[str, Any] = {
        "rounds": bytearray(2 * part),
        "part": part,
        "ring": 16,
        "me": 1,
        "size": 2,
        "first": 16 * 128,
        "apart": part,
        "room": 64,
        "places": 16,
        "line": 0,
        "lane": _Lane(),
        "segment": None,
        "body": bytes(80),
        "dtype": np.dtype("f8"),
        "itemsize": 8,
        "brings": 24,
        "start": 0,
        "nbytes": 24,
        "root": -1,
        "send": (3,),
        "recv": (3,),
        "take": "reduce",
        "reduction": "SUM f8",
        "average": False,
        "in_place": False,
        "width": 24,
        "patience": 1000,
    }
    given.setdefault("data", given["rounds"])
    return extension.Quick(**{**given, **other})


@pytest.mark.parametrize(
    "wrong",
    [
        {"rounds": bytearray(16 * 128)},
        {"ring": 15},
        {"ring": 0},
        {"me": 2},
        {"me": -1},
        {"size": 3},
        {"part": 128},
        {"apart": 64},
        {"first": 16 * 128 + 8},
        {"first": -8},
        {"places": 17},
        {"room": -1},
        {"brings": 72},
        {"brings": -8},
        {"nbytes": 72},
        {"nbytes": 20},
        {"start": 48},
        {"start": -8},
        {"itemsize": 0},
        {"root": 2},
        {"body": bytes(79)},
        {"send": [(3,), (3,)], "brings": 40},
        {"send": [(3,), (3,)], "brings": 48, "nbytes": 64},
        {"brings": 20},
        {"lane": object()},
        {"segment": object(), "places": 2},
    ],
)
def test_memory_that_does_not_fit(extension: Any, wrong: dict[str, Any]) -> None:
    """A prepared call says so when it is made, and never reads or writes beside its memory."""
    with pytest.raises(ValueError):
        prepared(extension, **wrong)


@pytest.mark.parametrize(
    "wrong", [{"send": 3}, {"recv": [3]}, {"rounds": bytes(6144)}, {"recv": [("x",)]}, {"take": 1}]
)
def test_arguments_of_other_kinds(extension: Any, wrong: dict[str, Any]) -> None:
    """They are a TypeError, and nothing is kept of them."""
    with pytest.raises((TypeError, BufferError)):
        prepared(extension, **wrong)


def test_what_is_taken(extension: Any) -> None:
    """The sum of what stands in the memory of both, in the order of the ranks; into what it was prepared for alone."""
    memory = bytearray(2 * 3072)
    rows = np.frombuffer(memory, np.uint8).reshape(2, 3072)[:, 16 * 128 :].reshape(2, 16, 64)
    quick = prepared(extension, rounds=memory, data=memory)
    assert quick.takes
    for place in range(16):
        for rank in range(2):
            rows[rank, place, :24].view("f8")[:] = [1e16 * (rank == 0), place, -rank]
        into = np.zeros(3)
        quick.take(place, into)
        assert into.tolist() == [1e16, 2 * place, -1]
    for recv in (np.zeros(4), np.zeros((3, 2))[:, 0], None, [1.0] * 3, b"x" * 24):
        with pytest.raises(ValueError):
            quick.take(0, recv)
    readonly = np.zeros(3)
    readonly.setflags(write=False)
    for place, recv in ((16, np.zeros(3)), (-1, np.zeros(3)), (0, readonly)):
        with pytest.raises(ValueError):
            quick.take(place, recv)


def test_what_is_left_to_numpy(extension: Any) -> None:
    """Elements that it does not know, averages that are no division, and bytes in the other order."""
    for reduction, average in (
        ("SUM f2", False),
        ("SUM c16", True),
        ("MAX c8", False),
        ("", False),
        ("SUM f16", False),
    ):
        quick = prepared(extension, reduction=reduction, average=average)
        assert not quick.takes, reduction
        with pytest.raises(ValueError):
            quick.take(0, np.zeros(3))
    assert prepared(extension, reduction="SUM f8", average=True).takes


def test_it_is_told_of_the_library_once_and_right(extension: Any) -> None:
    """Classes that keep their attributes elsewhere, and arrays that are laid out otherwise, are a TypeError."""
    probe = np.zeros((2, 3))
    address = probe.__array_interface__["data"][0]
    functions = (
        riding.ride_in_python,
        riding._finish,
        riding._lose,
        riding._await,
        riding._pending,
        riding._flights,
        riding._threads,
    )

    class Elsewhere:
        issued = posted = turn = rounds = 0

    with pytest.raises(TypeError, match="is no slot"):
        extension.prepare(*functions, riding.Ride, Elsewhere, ProcessGroup, Segment, probe, address)
    for array, at in ((probe, address + 8), (probe.T, address), (np.zeros((3, 3)), address)):
        with pytest.raises(TypeError, match="laid out"):
            extension.prepare(*functions, riding.Ride, Lane, ProcessGroup, Segment, array, at)
    extension.prepare(*functions, riding.Ride, Lane, ProcessGroup, Segment, probe, address)


def test_calls_with_other_things(extension: Any) -> None:
    """What is no group, no prepared call or no frame is a TypeError."""
    for given in ((), (1, 2, 3, 4, 5), (None,) * 5):
        with pytest.raises(TypeError):
            extension.ride(*given)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["", "false"])
def test_a_wheel(compiler: str, tmp_path: Path) -> None:
    """It is built with the extension; and without it, and without an error, where the compiler fails."""
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    shutil.copytree(ROOT / "mpicoll", clone / "mpicoll", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(clone)]
    environment = {"CC": compiler} if compiler else {}
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("mpicoll-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    built = "mpicoll/_riding" + str(sysconfig.get_config_var("EXT_SUFFIX")) in names
    assert built == (not compiler and can_build()), names
    assert "mpicoll/operations/riding.py" in names
    assert "mpicoll/py.typed" in names


def moved(extension: Any, memory: Any, me: int, step: int = 0, **other: Any) -> Any:
    """A movement of member ``me`` of 2, with buffers of 128 bytes."""
    given: dict[str, Any] = {
        "data": memory,
        "first": 256,
        "apart": 256,
        "room": 128,
        "places": 2,
        "line": 128,
        "me": me,
        "size": 2,
        "step": step,
        "total": 1000,
        "width": 64,
        "writes": [],
        "reads": [],
        "reduction": "",
        "itemsize": 1,
        "patience": 1000,
    }
    return extension.Mover(**{**given, **other})


SHARED = 256 + 2 * 256


def test_a_movement_in_turns(extension: Any) -> None:
    """One member writes, two pieces ahead at most; the other reads. Who is stopped says what it waits for."""
    memory = bytearray(SHARED)
    source, target = np.arange(1000, dtype=np.uint16).view(np.uint8)[:1000], np.zeros(1000, np.uint8)
    writer = moved(extension, memory, 0, writes=[(0, 0, source)])
    reader = moved(extension, memory, 1, reads=[(0, 0, target)])
    assert not reader.go()
    assert (reader.step, reader.wanted, reader.has_written) == (1, 1, 1)
    turns = 0
    while not (writer.go() & reader.go()):
        assert abs(writer.step - reader.step) <= 1  # who only reads may come first
        assert turns < 20
        turns += 1
    assert (source == target).all()
    assert writer.step == reader.step == 16
    assert writer.go()
    assert writer.step == 16


@pytest.mark.parametrize(("op", "dtype"), [("SUM", "f8"), ("PROD", "i2"), ("MAX", "f4"), ("SUM", "c16"), ("LXOR", "?")])
def test_a_reduction_in_turns(extension: Any, op: str, dtype: str) -> None:
    """Both members get the same, in place, and what NumPy says."""
    from mpicoll.transports.shm.transport import OPS

    kind = np.dtype(dtype)
    terms = [(np.arange(100) % (7 + rank)).astype(kind) for rank in range(2)]
    expected = OPS[op](*terms)
    memory = bytearray(SHARED)
    blocks = [(rank, 0, terms[rank].view(np.uint8)) for rank in range(2)]
    both = [
        moved(
            extension,
            memory,
            rank,
            step=0,
            total=terms[0].nbytes,
            writes=[blocks[rank]],
            reads=[blocks[rank]],
            reduction=f"{op} {kind.kind}{kind.itemsize}",
            itemsize=kind.itemsize,
        )
        for rank in range(2)
    ]
    for _ in range(200):
        if both[0].go() & both[1].go():
            break
    assert all((term == expected).all() for term in terms)


@pytest.mark.parametrize(
    "wrong",
    [
        {"data": bytearray(SHARED - 1)},
        {"first": 255},
        {"apart": 255},
        {"places": 1},
        {"line": 4},
        {"me": 2},
        {"size": 0},
        {"width": 0},
        {"total": -1},
        {"itemsize": 0},
        {"itemsize": 0, "reduction": "SUM f8"},
        {"writes": [(0, 65, bytes(64))]},
        {"writes": [(0, -1, bytes(64))]},
        {"reads": [(2, 0, bytearray(64))]},
        {"reads": [(-1, 0, bytearray(64))]},
        {"reduction": "SUM f2", "itemsize": 2},
        {"reduction": "SUM f8", "itemsize": 8, "width": 60},
        {"reduction": "SUM f8", "itemsize": 8, "writes": [(0, 0, bytes(64))]},
        {"reduction": "SUM f8", "itemsize": 8, "total": 64, "writes": [(0, 0, bytes(64))] * 2},
        {"reduction": "SUM f8", "itemsize": 8, "total": 64, "reads": [(0, 8, bytearray(64))]},
    ],
)
def test_a_movement_that_does_not_fit(extension: Any, wrong: dict[str, Any]) -> None:
    """It says so when it is made."""
    with pytest.raises(ValueError):
        moved(extension, bytearray(SHARED), wrong.pop("me", 0), **wrong)


@pytest.mark.parametrize(
    "wrong", [{"writes": ()}, {"reads": [(0, 0, bytes(8))]}, {"writes": [(0, 0)]}, {"writes": [1]}]
)
def test_a_movement_of_other_things(extension: Any, wrong: dict[str, Any]) -> None:
    """What is no block, or cannot be written to, is an error, and nothing is kept of it."""
    with pytest.raises((TypeError, BufferError)):
        moved(extension, bytearray(SHARED), 0, **wrong)
    with pytest.raises(ValueError):
        extension.Mover.__new__(extension.Mover).go()
