"""The values and queues of a store: its operations, what it may hold, and lists of bytes as bytes."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from mpicoll.errors import DistStoreError

LARGEST_KEY = 64 << 10
"""The most bytes of a key."""
LARGEST_VALUE = 60 << 20
"""The most bytes of a value: a TCPStore could not send a longer value in one frame."""
LARGEST_STORE = 1 << 30
"""The most bytes of all keys and values, with ``ENTRY`` bytes more for each value."""
ENTRY = 200
"""The bytes that count for a value besides its own and its key's: about what Python needs for them."""
CHANGES = frozenset({"set", "add", "compare_set", "delete_key", "append", "multi_set", "queue_push", "queue_pop"})
"""The operations that may change a table."""


class StoreTable:
    """Values and queues by name. Operations take and return bytes, and never wait."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.queues: dict[bytes, deque[bytes]] = {}
        self.bytes = 0  # of all values, with the key of each
        self.entries = 0

    def records(self) -> Iterator[list[bytes]]:
        """Yield the operations, with their arguments, that make an empty table equal to this one."""
        for key, value in self.values.items():
            yield [b"set", key, value]
        for key, queue in self.queues.items():
            for value in queue:
                yield [b"queue_push", key, value]

    def grow(self, entries: int, count: int) -> None:
        """Count more values and bytes, or raise if the table would be too large."""
        entries, count = self.entries + entries, self.bytes + count
        size = count + ENTRY * entries
        if size > LARGEST_STORE and size > self.bytes + ENTRY * self.entries:
            raise ValueError(
                f"the store would have {size} bytes (with {ENTRY} for each of {entries} values); a store may have "
                f"{LARGEST_STORE}: delete keys that are no longer needed"
            )
        self.entries, self.bytes = entries, count

    def put(self, new: Mapping[bytes, bytes]) -> list[bytes]:
        """Set keys to values: all of them, or none if one of them, or the table with them, would be too large."""
        entries = count = 0
        for key, value in new.items():
            _need_sizes(key, value)
            before = self.values.get(key)
            entries += before is None
            count += len(value) + (len(key) if before is None else -len(before))
        self.grow(entries, count)
        self.values.update(new)
        return []

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
        return self.put({key: value})

    def _get(self, key: bytes) -> list[bytes] | None:
        return [self.values[key]] if key in self.values else _not_yet(key)

    def _add(self, key: bytes, amount: bytes) -> list[bytes]:
        self.put({key: b"%d" % (int(self.values.get(key, b"0")) + int(amount))})
        return [self.values[key]]

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> list[bytes]:
        if key not in self.values:
            if expected:
                return [expected]
            self.put({key: desired})
        elif self.values[key] == expected:
            self.put({key: desired})
        return [self.values[key]]

    def _delete_key(self, key: bytes) -> list[bytes]:
        value = self.values.pop(key, None)
        if value is not None:
            self.grow(-1, -len(key) - len(value))
        return [b"0" if value is None else b"1"]

    def _num_keys(self) -> list[bytes]:
        return [b"%d" % len(self.values)]

    def _list_keys(self) -> list[bytes]:
        return sorted(self.values)

    def _check(self, *keys: bytes) -> list[bytes]:
        return [b"1" if all(key in self.values or self.queues.get(key) for key in keys) else b"0"]

    def _wait(self, *keys: bytes) -> list[bytes] | None:
        return [] if self._check(*keys) == [b"1"] else _not_yet(*keys)

    def _append(self, key: bytes, value: bytes) -> list[bytes]:
        return self.put({key: self.values.get(key, b"") + value})

    def _multi_get(self, *keys: bytes) -> list[bytes] | None:
        return [self.values[key] for key in keys] if all(key in self.values for key in keys) else _not_yet(*keys)

    def _multi_set(self, *pairs: bytes) -> list[bytes]:
        if len(pairs) % 2:
            raise ValueError("the numbers of keys and values differ")
        return self.put(dict(zip(pairs[::2], pairs[1::2], strict=True)))

    def _queue_push(self, key: bytes, value: bytes) -> list[bytes]:
        _need_sizes(key, value)
        self.grow(1, len(key) + len(value))
        self.queues.setdefault(key, deque()).append(value)
        return []

    def _queue_pop(self, key: bytes, block: bytes) -> list[bytes] | None:
        queue = self.queues.get(key)
        if not queue:
            return _not_yet(key) if block == b"1" else []
        value = queue.popleft()
        self.grow(-1, -len(key) - len(value))
        if not queue:
            del self.queues[key]
        return [value]

    def _queue_len(self, key: bytes) -> list[bytes]:
        return [b"%d" % len(self.queues.get(key, ()))]


_METHODS: dict[str, Any] = {
    name[1:]: method for name, method in vars(StoreTable).items() if name.startswith("_") and not name.startswith("__")
}


def _need_sizes(key: bytes, value: bytes) -> None:
    if len(key) <= LARGEST_KEY and len(value) <= LARGEST_VALUE:
        return
    for what, size, most in (("key", len(key), LARGEST_KEY), ("value", len(value), LARGEST_VALUE)):
        if size > most:
            raise ValueError(f"the {what} would have {size} bytes; a {what} may have {most}")


def _not_yet(*keys: bytes) -> list[bytes] | None:
    """Return None, for an operation that is not possible before another operation sets keys; raise if a key is too large."""
    for key in keys:
        _need_sizes(key, b"")
    return None


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


def timed_out(
    op: str, args: Sequence[bytes], timeout: float, existing: Container[bytes], why: str = ""
) -> DistStoreError:
    """Return the error of an operation that was not possible within its limit; the message names the missing keys."""
    keys = args[:1] if op in ("queue_pop", "get") else [key for key in args if key not in existing] or args
    words = ", ".join(repr(key.decode(errors="replace")) for key in keys[:5]) + (", …" if len(keys) > 5 else "")
    return DistStoreError(f"wait timeout after {round(timeout * 1000)}ms, keys: {words} ({op}){why}")
