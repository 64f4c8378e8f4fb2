"""A pool of pinned host memory for copies from and to a device."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from mpicoll.memory.device.runtime import Array, Runtime, drop_in_child, over, runtime

_SMALLEST = 4096


class _Block:
    """Memory of the pool in use: it returns to the pool when the last array on it is deleted."""

    __slots__ = ("__array_interface__", "busy", "memory", "pool")

    def __init__(self, pool: Pool, memory: Array) -> None:
        self.pool, self.memory = pool, memory
        self.busy: Any = None
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        try:
            self.pool.give_back(self.memory, self.busy)
        except Exception:  # at the end of the interpreter
            pass


MOST_TOO_LARGE = 4
"""Largest ratio of the size of a block to the size that a call needs."""


class Pool:
    """Pinned host memory. None is freed before the pool is closed, as CUDA waits for the whole device to free pinned memory.

    Attributes:
        limit: most bytes of the pool; calls that need more get ordinary memory, which is copied more slowly.
        taken: bytes of the pool, in use or not.
    """

    def __init__(self, gpu: Runtime, limit: int) -> None:
        self._gpu = gpu
        self.limit = limit
        self.taken = 0
        self._closed = False
        self._lock = threading.Lock()
        # The garbage collector may return memory at any time: it is put here without a lock.
        self._back: deque[tuple[Array, Any]] = deque()
        self._free: dict[int, list[tuple[Array, Any]]] = {}

    def take(self, nbytes: int, device: int) -> tuple[Array, _Block | None]:
        """Return bytes of host memory, and their block; None for ordinary memory."""
        memory = self._found(_rounded(nbytes), device)
        if memory is None:
            return np.empty(nbytes, np.uint8), None
        block = _Block(self, memory)
        return np.asarray(block)[:nbytes], block

    def _found(self, size: int, device: int) -> Array | None:
        if size > self.limit:
            return None
        with self._lock:
            self._sort()
            for larger in sorted(each for each in self._free if size <= each <= MOST_TOO_LARGE * size):
                free = self._free[larger]
                for at, (memory, busy) in enumerate(free):
                    if busy is not None and not over(self._gpu, busy):
                        continue
                    del free[at]
                    return memory
            if self.taken + size > self.limit:
                return None
            self.taken += size
        try:
            return self._gpu.pinned(size, device)
        except MemoryError:
            with self._lock:
                self.taken -= size
            return None

    def _sort(self) -> None:
        while self._back:
            memory, busy = self._back.popleft()
            self._free.setdefault(memory.nbytes, []).append((memory, busy))

    def give_back(self, memory: Array, busy: Any) -> None:
        """Return memory to the pool, to be used again after the event ``busy``."""
        if self._closed:
            self._let_go(memory, busy)
        else:
            self._back.append((memory, busy))

    def _let_go(self, memory: Array, busy: Any) -> None:
        try:
            if busy is not None:
                self._gpu.await_(busy)
        except Exception:  # the device has failed, and makes no more copies
            pass
        self.taken -= memory.nbytes

    def close(self) -> None:
        """Free all memory that is not in use, and other memory when it is returned."""
        with self._lock:
            self._closed = True
            self._sort()
            for blocks in self._free.values():
                for memory, busy in blocks:
                    self._let_go(memory, busy)
            self._free.clear()


def _rounded(nbytes: int) -> int:
    """Return the size of the block for ``nbytes``, rounded up so that calls of similar sizes use the same blocks."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    step = 1 << max(0, (nbytes - 1).bit_length() - (3 if nbytes > 1 << 20 else 0))
    return -(-nbytes // step) * step


_pool: Pool | None = None
_limit = 256 << 20


def pool() -> Pool:
    """Return the pool of this process."""
    global _pool
    if _pool is None:
        _pool = Pool(runtime(), _limit)
    return _pool


def bound(nbytes: int) -> None:
    """Set the limit of pinned memory of the next pool, in bytes."""
    global _limit
    _limit = nbytes


closers: list[Callable[[], None]] = []
"""Functions that free other memory of this process on devices, when the pool is closed."""


def close() -> None:
    """Free the pinned memory; the next call makes a new pool."""
    global _pool
    for closer in closers:
        closer()
    found, _pool = _pool, None
    if found is not None:
        found.close()


drop_in_child(globals(), "_pool")
