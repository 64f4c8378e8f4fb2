"""Stores: small values by name, shared by threads, processes or hosts, with waits for what is not there yet.

Every store is a :class:`Table` somewhere, and a way to have it do an operation: in this process, in a file that is replayed, or
in the process that serves it to others (:mod:`mpicoll.stores.tcp_server`).
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Container, Sequence
from datetime import timedelta
from typing import Any

from mpicoll.errors import DistStoreError, QueueEmptyError

DEFAULT_TIMEOUT = timedelta(seconds=300)


class Wait:
    """What an operation gives that has to wait for another one."""


WAIT = Wait()
LARGEST_VALUE = 60 << 20
"""Bytes that the value of a key may have by appending to it: what is longer would not go through a TCPStore in one piece."""
CHANGES = frozenset({"set", "add", "compare_set", "delete_key", "append", "multi_set", "queue_push", "queue_pop"})
"""The operations that may change a table."""


class Table:
    """Values and queues by name; each operation takes and gives bytes, and never waits."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.queues: dict[bytes, deque[bytes]] = {}

    def do(self, op: str, args: Sequence[bytes]) -> list[bytes] | Wait:
        """Do one operation; WAIT where it is not possible yet.

        Raises:
            DistStoreError: there is no such operation, or it does not take these arguments.
        """
        method = _METHODS.get(op)
        if method is None:
            raise DistStoreError(f"a store has no operation {op[:40]!r}")
        try:
            found: list[bytes] | Wait = method(self, *args)
        except (TypeError, ValueError) as error:
            raise DistStoreError(f"{op}: {error}") from None
        return found

    def _set(self, key: bytes, value: bytes) -> list[bytes]:
        self.values[key] = value
        return []

    def _get(self, key: bytes) -> list[bytes] | Wait:
        return [self.values[key]] if key in self.values else WAIT

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

    def _wait(self, *keys: bytes) -> list[bytes] | Wait:
        return [] if self._check(*keys) == [b"1"] else WAIT

    def _append(self, key: bytes, value: bytes) -> list[bytes]:
        before = self.values.get(key, b"")
        if len(before) + len(value) > LARGEST_VALUE:
            raise ValueError(f"the value would have more than {LARGEST_VALUE} bytes, and is left as it was")
        self.values[key] = before + value
        return []

    def _multi_get(self, *keys: bytes) -> list[bytes] | Wait:
        return [self.values[key] for key in keys] if all(key in self.values for key in keys) else WAIT

    def _multi_set(self, *pairs: bytes) -> list[bytes]:
        if len(pairs) % 2:
            raise ValueError("as many values as keys are needed")
        self.values.update(zip(pairs[::2], pairs[1::2], strict=True))
        return []

    def _queue_push(self, key: bytes, value: bytes) -> list[bytes]:
        self.queues.setdefault(key, deque()).append(value)
        return []

    def _queue_pop(self, key: bytes, block: bytes) -> list[bytes] | Wait:
        queue = self.queues.get(key)
        if not queue:
            return WAIT if block == b"1" else []
        value = queue.popleft()
        if not queue:
            del self.queues[key]
        return [value]

    def _queue_len(self, key: bytes) -> list[bytes]:
        return [b"%d" % len(self.queues.get(key, ()))]


_METHODS: dict[str, Any] = {
    name[1:]: method for name, method in vars(Table).items() if name.startswith("_") and not name.startswith("__")
}


def encode(parts: Sequence[bytes]) -> bytes:
    """Return bytes that hold a list of bytes: how many, then each with its length before it (32 bits, big end first)."""
    out = [len(parts).to_bytes(4, "big")]
    for part in parts:
        out += [len(part).to_bytes(4, "big"), part]
    return b"".join(out)


def decode(data: bytes) -> list[bytes]:
    """Return the list that :func:`encode` has made bytes of.

    Raises:
        ValueError: the bytes are no such list.
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
        raise ValueError("more than the list")
    return parts


_LENGTH = struct.Struct(">I").unpack_from


def to_bytes(value: Any, what: str) -> bytes:
    if isinstance(value, str):
        return value.encode(errors="surrogateescape")  # as a key that is no text comes back
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise TypeError(f"{what} must be a string or bytes, not {type(value).__name__}")


def _integer(value: Any, what: str) -> int:
    """Return a number of 64 bits: of whatever says that it is one, as in torch, but not of a float or of digits."""
    whole = hasattr(value, "__index__") or hasattr(value, "__int__")
    if isinstance(value, (float, str, bytes, bytearray)) or not whole:
        raise TypeError(f"{what} must be an integer, not {type(value).__name__}")
    number = int(value)
    if not -(1 << 63) <= number < 1 << 63:
        raise TypeError(f"{what} must be an integer of 64 bits, got {number}")
    return number


FOR_EVER = 365 * 86400.0


def _duration(timeout: Any) -> timedelta:
    """Return the limit that is meant by a timedelta, or by a float, of seconds (as torch: an int is none)."""
    if isinstance(timeout, float) and abs(timeout) <= FOR_EVER:
        return timedelta(seconds=timeout)
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a datetime.timedelta, not {type(timeout).__name__}")
    return timeout


def to_seconds(timeout: Any) -> float:
    seconds = _duration(timeout).total_seconds()
    if seconds < 0:
        raise ValueError(f"timeout must not be negative, got {timeout}")
    return min(seconds or FOR_EVER, FOR_EVER)


def name_of_key(key: bytes) -> str:
    return key.decode(errors="surrogateescape")


def _listed(values: Any, what: str) -> Any:
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        raise TypeError(f"{what} must be a list, not {type(values).__name__}")
    return list(values)


class Store:
    """What every store has. A class of one's own defines ``set``, ``get``, ``add``, ``check``, ``wait`` and what else it needs.

    Keys are strings; values are strings or bytes, and come back as bytes.

    Source: torch.distributed.Store.
    """

    def __init__(self) -> None:
        self._timeout = DEFAULT_TIMEOUT

    def _ask(self, op: str, args: Sequence[bytes], timeout: float) -> list[bytes]:
        """Have an operation of :class:`Table` done, waiting at most ``timeout`` seconds; DistStoreError when that passes.

        What a class of one's own leaves out is done by what it has, where torch does that.
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
        """The limit of the waits."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of the waits; default 300 s. ``timedelta(0)`` is none, as in torch, here and for a single wait."""
        to_seconds(timeout)
        self._timeout = _duration(timeout)

    def set(self, key: str, value: str | bytes) -> None:
        """Keep a value under a key, in the place of what was there."""
        self._do("set", key, value)

    def get(self, key: str) -> bytes:
        """Return the value of a key; waits until it is there.

        Raises:
            DistStoreError: it did not come within the limit.
        """
        return self._do("get", key)[0]

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 where there was none, and return the sum."""
        return int(self._do("add", key, b"%d" % _integer(amount, "amount"))[0])

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set a key to a value if it holds the expected one, or if that is empty and there is none; return what it holds then.

        Where there is none and one was expected, return that (as torch).
        """
        return self._do("compare_set", key, expected_value, desired_value)[0]

    def delete_key(self, key: str) -> bool:
        """Delete a key; whether it was there."""
        return self._do("delete_key", key)[0] == b"1"

    def num_keys(self) -> int:
        """Return the number of keys, without queues. As in torch a FileStore has one more than ``list_keys`` says, and so has a
        TCPStore whose makers waited for the workers.
        """
        return int(self._do("num_keys")[0])

    def list_keys(self) -> list[str]:
        """Return the keys."""
        return [name_of_key(key) for key in self._do("list_keys")]

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return self._do("check", *_listed(keys, "keys"))[0] == b"1"

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there.

        Raises:
            DistStoreError: not all came within the limit.
        """
        self._do("wait", *_listed(keys, "keys"), timeout=timeout)

    def append(self, key: str, value: str | bytes) -> None:
        """Put a value behind that of a key."""
        self._do("append", key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of several keys; waits until all are there."""
        return self._do("multi_get", *_listed(keys, "keys"))

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Set several keys at once."""
        keys, values = _listed(keys, "keys"), _listed(values, "values")
        if len(keys) != len(values):
            raise ValueError(f"as many values as keys are needed, got {len(values)} and {len(keys)}")
        self._do("multi_set", *(part for pair in zip(keys, values, strict=True) for part in pair))

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Put a value at the end of a queue."""
        self._do("queue_push", key, value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value of a queue; waits for one, or raises QueueEmptyError without ``block``."""
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
        """Return when so many have called it with this key; the key can be used again and again.

        Raises:
            ValueError: ``world_size`` is below 1.
            DistStoreError: not all came within the limit.
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
        """Whether ``append``, ``multi_get`` and ``multi_set`` are there: in a class of one's own if it defines ``append``."""
        return type(self).append is not Store.append or type(self)._ask is not Store._ask

    def clone(self) -> Store:
        """Return a store of the same values, which another thread may use beside this one."""
        return self


def late(op: str, args: Sequence[bytes], timeout: float, there: Container[bytes]) -> DistStoreError:
    """Return the error of an operation that could not be done within its limit; it names the keys that are not ``there``."""
    keys = args[:1] if op in ("queue_pop", "get") else [key for key in args if key not in there] or args
    words = ", ".join(repr(key.decode(errors="replace")) for key in keys[:5]) + (", …" if len(keys) > 5 else "")
    return DistStoreError(f"wait timeout after {round(timeout * 1000)}ms, keys: {words} ({op})")
