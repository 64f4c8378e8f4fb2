"""Temporary memory is used again when nothing refers to it, and only then."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpicoll.memory import scratch as module
from mpicoll.memory.scratch import LEAST_BYTES, MOST_BYTES, concatenated, scratch

BYTE, REAL = np.dtype(np.uint8), np.dtype(np.float64)


@pytest.fixture(autouse=True)
def no_memory_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_lent", set())
    monkeypatch.setattr(module, "_released", deque())
    monkeypatch.setattr(module, "_unused", deque())


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_is_used_again_by_any_dtype_and_shape() -> None:
    """The next array of about so many bytes has the memory of one that is gone."""
    first = scratch(LEAST_BYTES, BYTE)
    at = address(first)
    del first
    second = scratch((16, LEAST_BYTES // 8 // 16), REAL)
    assert address(second) == at
    assert second.shape == (16, LEAST_BYTES // 8 // 16)
    assert second.flags.c_contiguous
    assert second.flags.writeable


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "array": lambda array: array,
    "view": lambda array: array[5:9],
    "memoryview": lambda array: memoryview(array)[3:4],
    "ctypes": lambda array: array.ctypes,
    "other dtype": lambda array: array.view(np.float64).reshape(2, -1).T[1:],
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_in_use_stays(holder: str) -> None:
    """While anything refers to the array, a view, or a buffer of it, no other array gets its memory."""
    array = scratch(LEAST_BYTES, BYTE)
    at = address(array)
    held = HOLDERS[holder](array)
    del array
    other = scratch(LEAST_BYTES, BYTE)
    assert address(other) != at
    del held
    assert address(scratch(LEAST_BYTES, BYTE)) == at


def test_the_memory_is_bounded() -> None:
    """Small and very large arrays have memory of their own, and so has what exceeds the bound; memory in use is never lost."""
    assert scratch(LEAST_BYTES - 1, BYTE).base is None
    assert scratch(MOST_BYTES + 1, BYTE).base is None
    arrays = [scratch(MOST_BYTES // 4, BYTE) for _ in range(7)]
    assert len({address(array) for array in arrays}) == 7
    assert [array.base is None for array in arrays] == [False] * 4 + [True] * 3
    for number, array in enumerate(arrays):
        array[:] = number
    assert [int(array.min()) for array in arrays] == [int(array.max()) for array in arrays] == list(range(7))
    arrays.clear()
    assert scratch(MOST_BYTES, BYTE).base is not None  # instead of the four
    assert sum(memory.nbytes for memory in module._unused) == 0


def test_much_memory_is_not_used_for_little() -> None:
    """A small array does not hold memory that is twice as large or larger."""
    large = scratch(4 * LEAST_BYTES, BYTE)
    at = address(large)
    del large
    small = scratch(2 * LEAST_BYTES, BYTE)
    assert address(small) != at
    assert address(scratch(2 * LEAST_BYTES + 1, BYTE)) == at


def test_threads_do_not_share_memory() -> None:
    """Threads that take and release memory at once never have the same memory."""
    wrong: list[int] = []

    def work(mark: int) -> None:
        for _ in range(300):
            array = scratch(LEAST_BYTES + 8 * mark, BYTE)
            array[::4096] = mark
            if (array[::4096] != mark).any():
                wrong.append(mark)
            del array

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_concatenated() -> None:
    """Arrays of one dtype stand one behind the other, small ones and large ones."""
    for count in (0, 3, LEAST_BYTES):
        parts = [np.arange(count, dtype="i4") + place for place in range(3)]
        joined = concatenated(parts)
        assert joined.dtype == "i4"
        assert (joined == np.concatenate(parts)).all()
