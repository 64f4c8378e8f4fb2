"""Stores: small values by name, shared by threads, processes or hosts, with waits for values that do not exist yet.

Every store has a :class:`StoreTable` and a way to apply operations to it: in this process, by replaying a file, or in the
process that serves the table to other processes (:mod:`mpicoll.stores.tcp_server`).
"""

from __future__ import annotations

import math
import os
import struct
import threading
from collections import deque
from collections.abc import Container, Sequence
from datetime import timedelta
from typing import Any

from mpicoll.errors import DistStoreError, QueueEmptyError
from mpicoll.groups import registry
from mpicoll.runtime import waiting

DEFAULT_TIMEOUT = timedelta(seconds=300)


LARGEST_VALUE = 60 << 20
"""The most bytes of a value after ``append``: a TCPStore could not send a longer value in one frame."""
CHANGES = frozenset({"set", "add", "compare_set", "delete_key", "append", "multi_set", "queue_push", "queue_pop"})
"""The operations that may change a table."""


class StoreTable:
    """Values and queues by name. Operations take and return bytes, and never wait."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.queues: dict[bytes, deque[bytes]] = {}

    def do(self, op: str, args: Sequence[bytes]) -> list[bytes] | None:
        """Apply one operation and return its result, or None if the operation is not possible before another operation.

        Raises:
            DistStoreError: there is no such operation, or the operation does not accept these arguments.
        """
        method = _METHODS.get(op)
        if method is None:
            raise DistStoreError(f"a store has no operation {op[:40]!r}")
        try:
            found: list[bytes] | None = method(self, *args)
        except (TypeError, ValueError) as error:
            raise DistStoreError(f"{op}: {error}") from None
        return found

    def _set(self, key: bytes, value: bytes) -> list[bytes]:
        self.values[key] = value
        return []

    def _get(self, key: bytes) -> list[bytes] | None:
        return [self.values[key]] if key in self.values else None

    def _add(self, key: bytes, amount: bytes) -> list[bytes]:
        self.values[key] = b"%d" % (int(self.values.get(key, b"0")) + int(amount))
        return [self.values[key]]

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> list[bytes]:
        if key not in self.values:
            if expected:
                return [expected]
            self.values[key] = desired
        elif self.values[key] == expected:
            self.values[key] = desired
        return [self.values[key]]

    def _delete_key(self, key: bytes) -> list[bytes]:
        return [b"1" if self.values.pop(key, None) is not None else b"0"]

    def _num_keys(self) -> list[bytes]:
        return [b"%d" % len(self.values)]

    def _list_keys(self) -> list[bytes]:
        return sorted(self.values)

    def _check(self, *keys: bytes) -> list[bytes]:
        return [b"1" if all(key in self.values or self.queues.get(key) for key in keys) else b"0"]

    def _wait(self, *keys: bytes) -> list[bytes] | None:
        return [] if self._check(*keys) == [b"1"] else None

    def _append(self, key: bytes, value: bytes) -> list[bytes]:
        before = self.values.get(key, b"")
        if len(before) + len(value) > LARGEST_VALUE:
            raise ValueError(f"the value would have more than {LARGEST_VALUE} bytes, and is unchanged")
        self.values[key] = before + value
        return []

    def _multi_get(self, *keys: bytes) -> list[bytes] | None:
        return [self.values[key] for key in keys] if all(key in self.values for key in keys) else None

    def _multi_set(self, *pairs: bytes) -> list[bytes]:
        if len(pairs) % 2:
            raise ValueError("the numbers of keys and values differ")
        self.values.update(zip(pairs[::2], pairs[1::2], strict=True))
        return []

    def _queue_push(self, key: bytes, value: bytes) -> list[bytes]:
        self.queues.setdefault(key, deque()).append(value)
        return []

    def _queue_pop(self, key: bytes, block: bytes) -> list[bytes] | None:
        queue = self.queues.get(key)
        if not queue:
            return None if block == b"1" else []
        value = queue.popleft()
        if not queue:
            del self.queues[key]
        return [value]

    def _queue_len(self, key: bytes) -> list[bytes]:
        return [b"%d" % len(self.queues.get(key, ()))]


_METHODS: dict[str, Any] = {
    name[1:]: method for name, method in vars(StoreTable).items() if name.startswith("_") and not name.startswith("__")
}


def encode(parts: Sequence[bytes]) -> bytes:
    """Return a list of bytes as bytes: the number of parts, then each part with its length before it (32 bits, big-endian)."""
    out = [len(parts).to_bytes(4, "big")]
    for part in parts:
        out += [len(part).to_bytes(4, "big"), part]
    return b"".join(out)


def decode(data: bytes) -> list[bytes]:
    """Return the list that :func:`encode` has encoded.

    Raises:
        ValueError: :func:`encode` has not made the bytes.
    """
    size = len(data)
    if size < 4:
        raise ValueError("not a list")
    (count,), at = _LENGTH(data), 4
    if count > size:
        raise ValueError("not a list")
    parts = []
    for _ in range(count):
        if at + 4 > size:
            raise ValueError("cut short")
        (length,) = _LENGTH(data, at)
        at += 4 + length
        if at > size:
            raise ValueError("cut short")
        parts.append(data[at - length : at])
    if at != size:
        raise ValueError("bytes follow the list")
    return parts


_LENGTH = struct.Struct(">I").unpack_from


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


def to_seconds(timeout: Any) -> float:
    """Return a limit in seconds; 0 means no limit."""
    seconds = _duration(timeout).total_seconds()
    if seconds < 0:
        raise ValueError(f"timeout must not be negative, got {timeout}")
    return min(seconds or FOR_EVER, FOR_EVER)


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
        self._timeout = DEFAULT_TIMEOUT

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
        """Set the limit of the waits; default 300 s. As in torch ``timedelta(0)`` means no limit, also for a single wait."""
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
        number = self.add(f"{key}/came", 1) - 1
        over = f"{key}/over {number // world_size}"
        if number % world_size == world_size - 1:
            self.set(over, b"1")
        self.wait([over], timeout)

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


def timed_out(op: str, args: Sequence[bytes], timeout: float, existing: Container[bytes]) -> DistStoreError:
    """Return the error of an operation that was not possible within its limit; the message names the missing keys."""
    keys = args[:1] if op in ("queue_pop", "get") else [key for key in args if key not in existing] or args
    words = ", ".join(repr(key.decode(errors="replace")) for key in keys[:5]) + (", …" if len(keys) > 5 else "")
    return DistStoreError(f"wait timeout after {round(timeout * 1000)}ms, keys: {words} ({op})")
