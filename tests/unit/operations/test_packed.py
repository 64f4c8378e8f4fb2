"""Packed arrays in place of those of the program: one array takes a shorter way, with the same result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpicoll.operations.prepare import packed

ARRAYS: dict[str, Callable[[], Any]] = {
    "column": lambda: np.arange(20.0).reshape(10, 2)[:, 1],
    "reversed": lambda: np.arange(7, dtype="i2")[::-1],
    "Fortran": lambda: np.asfortranarray(np.arange(12, dtype="c8").reshape(3, 4)),
    "broadcast": lambda: np.broadcast_to(np.arange(3.0), (2, 3)),
    "read-only": lambda: np.broadcast_to(np.float64(2), (1,)),
    "overlapping": lambda: np.lib.stride_tricks.as_strided(np.arange(8.0), (3, 3), (16, 8)),
    "unaligned": lambda: np.frombuffer(bytearray(33), np.uint8)[1:].view(np.float64),
    "byte order": lambda: np.arange(5, dtype=">i4"),
    "float16": lambda: np.linspace(-3, 60000, 9).astype(np.float16),
    "float16 column": lambda: np.arange(20, dtype=np.float16).reshape(10, 2)[:, 1],
    "float16 byte order": lambda: np.arange(5, dtype=">f2"),
    "plain": lambda: np.arange(6.0).reshape(2, 3),
    "empty": lambda: np.zeros((3, 0, 2))[:, :, ::2],
    "no axis": lambda: np.array([1.0, 2.0])[:1].reshape(()),
    "bool": lambda: (np.arange(8) % 3 == 0)[::2],
    "structured": lambda: np.zeros(4, [("a", "i1"), ("b", "f8")])[::2],
    "object": lambda: np.array([None, 1]),
}


def result(send: Any, recv: Any, reads: bool, writes: bool, reduces: bool) -> Any:
    """Return the packed arrays, and the arrays of the program after a call with other bytes as its result."""
    found = packed.pack(send, recv, reads, writes, reduces)
    if found is None:
        return None
    sent = None if found.send is None or not reads else (found.send.dtype, found.send.shape, found.send.tobytes())
    if writes and found.recv is not None:
        assert found.recv.flags.carray
        found.recv.reshape(-1).view(np.uint8)[...] = 60  # also a number of each dtype
        found.unpack()
    return sent, None if recv is None else (recv.dtype, recv.tobytes()), found.send is found.recv, found.shares


@pytest.mark.parametrize("name", ["column", "float16", "Fortran"])
@pytest.mark.filterwarnings("ignore:Setting the shape")
def test_the_program_sets_the_shape_of_its_array_meanwhile(name: str) -> None:
    """The result goes to the memory of the array, whatever its shape has become."""
    array = ARRAYS[name]()
    expected = array / 2
    found = packed.pack(array, array, True, True, True)
    assert found is not None
    found.recv /= 2
    array.shape = (*array.shape, 1)
    found.unpack()
    assert (array[..., 0] == expected).all()


@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize("output", [*ARRAYS, "same", "none"])
@pytest.mark.parametrize("name", [*ARRAYS, "none"])
def test_one_array_packs_as_lists_do(name: str, output: str, reduces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The elements that move, the results and what is refused are the same; arrays that move as they are do not come here."""
    if "none" in (name, output) and (name == output or output == "same"):
        return
    made = []
    for short in (packed._pack_one, lambda *_: None):
        monkeypatch.setattr(packed, "_pack_one", short)
        send = None if name == "none" else ARRAYS[name]()
        recv = send if output == "same" else None if output == "none" else ARRAYS[output]()
        made.append(result(send, recv, send is not None, recv is not None, reduces))
    assert made[0] == made[1]
