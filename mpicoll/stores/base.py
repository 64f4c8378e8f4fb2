"""Stores: small values by name, shared by threads, processes or hosts, with waits for values that do not exist yet.

Every store has a table (:mod:`mpicoll.stores.table`) and a way to apply operations to the table: in this process, by replaying a
file, or in the process that serves the table to other processes (:mod:`mpicoll.stores.tcp_server`).
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from mpicoll.errors import QueueEmptyError
from mpicoll.groups import registry
from mpicoll.runtime import waiting
from mpicoll.runtime.settings import read_settings

DEFAULT_TIMEOUT = timedelta(seconds=300)
"""The limit of a store's waits, as in torch, without a limit from the program or MPICOLL_TIMEOUT."""


def to_bytes(value: Any, what: str) -> bytes:
    """Return a string or bytes as bytes; ``what`` names the argument in the error."""
    if isinstance(value, str):
        return value.encode(errors="surrogateescape")  # as name_of_key decodes a key that is no text
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise TypeError(f"{what} must be a string or bytes, not {type(value).__name__}")


def _integer(value: Any, what: str) -> int:
    """Return an argument as an integer of 64 bits. As in torch any integer-like object is accepted, but no float or string."""
    whole = hasattr(value, "__index__") or hasattr(value, "__int__")
    if isinstance(value, (float, str, bytes, bytearray)) or not whole:
        raise TypeError(f"{what} must be an integer, not {type(value).__name__}")
    number = int(value)
    if not -(1 << 63) <= number < 1 << 63:
        raise TypeError(f"{what} must be an integer of 64 bits, got {number}")
    return number


FOR_EVER = 365 * 86400.0


def _duration(timeout: Any) -> timedelta:
    """Return a limit as a timedelta, from a timedelta or a float of seconds (as in torch not from an int)."""
    if isinstance(timeout, float) and abs(timeout) <= FOR_EVER:
        return timedelta(seconds=timeout)
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a datetime.timedelta, not {type(timeout).__name__}")
    return timeout


def default_timeout() -> timedelta:
    """Return the limit of a store that is made without one: MPICOLL_TIMEOUT if it is set, else ``DEFAULT_TIMEOUT``."""
    chosen = {name: text for name, text in os.environ.items() if name == "MPICOLL_TIMEOUT"}
    return timedelta(seconds=min(read_settings(chosen).timeout, FOR_EVER)) if chosen else DEFAULT_TIMEOUT


def to_seconds(timeout: Any) -> float:
    """Return a limit in seconds; 0 means no limit."""
    seconds = _duration(timeout).total_seconds()
    if seconds < 0:
        raise ValueError(f"timeout must not be negative, got {timeout}")
    return min(seconds or FOR_EVER, FOR_EVER)


def _until(end: float) -> timedelta:
    """Return the time that is left until ``end`` (time.monotonic); never 0, which is no limit."""
    return timedelta(seconds=min(max(end - time.monotonic(), 0.001), FOR_EVER))


def name_of_key(key: bytes) -> str:
    """Return a key as a string."""
    return key.decode(errors="surrogateescape")


def _listed(values: Any, what: str) -> Any:
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        raise TypeError(f"{what} must be a list, not {type(values).__name__}")
    return list(values)


class Store:
    """The base class of stores. A program's own store defines ``set``, ``get``, ``add``, ``check``, ``wait``, and more if needed.

    Keys are strings. Values are strings or bytes, and are returned as bytes.

    Source: torch.distributed.Store.
    """

    _hidden: tuple[str, ...] = ()
    """Keys of the store's own, which :meth:`list_keys` leaves out."""

    def __init__(self) -> None:
        self._timeout = default_timeout()

    def _ask(self, op: str, args: Sequence[bytes], timeout: float) -> list[bytes]:
        """Apply an operation of :class:`StoreTable`, waiting at most ``timeout`` seconds.

        Operations that a program's own class does not define are composed from its other operations, as in torch.

        Raises:
            DistStoreError: the time passed.
        """
        if op == "multi_get":
            return [self.get(name_of_key(key)) for key in args]
        if op == "multi_set":
            for key, value in zip(args[::2], args[1::2], strict=True):
                self.set(name_of_key(key), value)
            return []
        if op == "append":
            before, now = b"", self.compare_set(name_of_key(args[0]), b"", args[1])
            while now != before + args[1]:
                before, now = now, self.compare_set(name_of_key(args[0]), now, now + args[1])
            return []
        raise NotImplementedError(f"{type(self).__name__} does not define {op}")

    def _do(self, op: str, *args: Any, timeout: timedelta | None = None) -> list[bytes]:
        parts = [to_bytes(arg, "a key or value") for arg in args]
        return self._ask(op, parts, to_seconds(self._timeout if timeout is None else timeout))

    @property
    def timeout(self) -> timedelta:
        """The limit of the waits, as a timedelta."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of each call; default MPICOLL_TIMEOUT, or 300 s.

        As in torch ``timedelta(0)`` means no limit, also for a single wait.
        """
        to_seconds(timeout)
        self._timeout = _duration(timeout)

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value under a key; replace an earlier value."""
        self._do("set", key, value)

    def get(self, key: str) -> bytes:
        """Return the value of a key; wait until the key exists.

        Raises:
            DistStoreError: the key was not set within the limit.
        """
        return self._do("get", key)[0]

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the number of a key, 0 if the key does not exist, and return the sum."""
        return int(self._do("add", key, b"%d" % _integer(amount, "amount"))[0])

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set a key to a value if it has the expected value; return the value of the key afterwards.

        An empty expected value stands for a key that does not exist. If the key does not exist and another value is expected,
        return the expected value (as torch does).
        """
        return self._do("compare_set", key, expected_value, desired_value)[0]

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether the key existed."""
        return self._do("delete_key", key)[0] == b"1"

    def num_keys(self) -> int:
        """Return the number of keys, without queues.

        As in torch a FileStore, and a TCPStore that waited for its workers, has one key more than ``list_keys`` returns.
        """
        return int(self._do("num_keys")[0])

    def list_keys(self) -> list[str]:
        """Return the keys."""
        return [key for key in map(name_of_key, self._do("list_keys")) if key not in self._hidden]

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        return self._do("check", *_listed(keys, "keys"))[0] == b"1"

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist.

        Raises:
            DistStoreError: not all keys were set within the limit.
        """
        self._do("wait", *_listed(keys, "keys"), timeout=timeout)

    def append(self, key: str, value: str | bytes) -> None:
        """Append a value to the value of a key."""
        self._do("append", key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of several keys; wait until all keys exist."""
        return self._do("multi_get", *_listed(keys, "keys"))

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Set several keys at once."""
        keys, values = _listed(keys, "keys"), _listed(values, "values")
        if len(keys) != len(values):
            raise ValueError(f"the numbers of keys and values differ: {len(keys)} keys, {len(values)} values")
        self._do("multi_set", *(part for pair in zip(keys, values, strict=True) for part in pair))

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Append a value to a queue."""
        self._do("queue_push", key, value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Remove and return the first value of a queue; wait until there is a value if ``block``.

        Raises:
            QueueEmptyError: the queue is empty, and ``block`` is False.
        """
        if not hasattr(type(block), "__bool__"):
            raise TypeError(f"block must be True or False, not {type(block).__name__}")
        found = self._do("queue_pop", key, b"1" if block else b"0")
        if not found:
            raise QueueEmptyError(f"queue {key!r} is empty")
        return found[0]

    def queue_len(self, key: str) -> int:
        """Return the number of values in a queue."""
        return int(self._do("queue_len", key)[0])

    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        """Wait until ``world_size`` callers have called ``barrier`` with this key. The key can be used again.

        Raises:
            ValueError: ``world_size`` is below 1.
            DistStoreError: not all callers called ``barrier`` within the limit.
        """
        world_size = _integer(world_size, "world_size")
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        key = name_of_key(to_bytes(key, "a key or value"))
        limit = to_seconds(self.timeout if timeout is None else timeout)
        end = time.monotonic() + limit
        own = type(self)._ask is Store._ask  # a program's own store: its functions have no limit for one call
        came = f"{key}/came"
        number = (self.add(came, 1) if own else int(self._do("add", came, b"1", timeout=_until(end))[0])) - 1
        over = f"{key}/over {number // world_size}"
        if number % world_size == world_size - 1:
            if own:
                self.set(over, b"1")
            else:
                self._do("set", over, b"1", timeout=_until(end))
        is_late = end - time.monotonic() < 0.9 * limit
        self.wait([over], _until(end) if is_late else timeout)

    def has_extended_api(self) -> bool:
        """Return whether the store has ``append``, ``multi_get`` and ``multi_set``; a program's own store: defines ``append``."""
        return type(self).append is not Store.append or type(self)._ask is not Store._ask

    def clone(self) -> Store:
        """Return a store of the same values that another thread may use at the same time."""
        return self


PROGRESS_SECONDS = 0.005


def longest_rest() -> float:
    """Return the seconds for which a wait in a store may sleep before it calls :func:`progress`; infinite outside a job."""
    known = registry.current()
    if known is None or os.getpid() != known.pid:
        return math.inf
    may_call_mpi = known.thread_multiple or threading.get_ident() == known.thread
    return PROGRESS_SECONDS if may_call_mpi else math.inf


def progress() -> None:
    """Progress this rank's requests and answer other ranks, as every wait of a rank does.

    The peers of the caller may wait for its part of an asynchronous call before they set a key.
    """
    if longest_rest() < math.inf:
        waiting.serve()
        waiting.progress()
