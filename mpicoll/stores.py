"""Stores: small values by name, shared by threads, processes or hosts, with waits for what is not there yet.

Every store is a :class:`Table` somewhere, and a way to have it do an operation: in this process, in a file that is replayed, or
in the process that serves it to others (:mod:`mpicoll.tcpstore`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Container, Sequence
from datetime import timedelta
from typing import Any

from mpicoll.errors import DistStoreError, QueueEmptyError

__all__ = ["WAIT", "FileStore", "HashStore", "PrefixStore", "Store", "Table", "decode", "encode"]

DEFAULT_TIMEOUT = timedelta(seconds=300)


class _Wait:
    """What an operation gives that has to wait for another one."""


WAIT = _Wait()
LARGEST_VALUE = 60 << 20
"""Bytes that the value of a key may have by appending to it: what is longer would not go through a TCPStore in one piece."""
CHANGES = frozenset({"set", "add", "compare_set", "delete_key", "append", "multi_set", "queue_push", "queue_pop"})
"""The operations that may change a table."""


class Table:
    """Values and queues by name; each operation takes and gives bytes, and never waits."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.queues: dict[bytes, deque[bytes]] = {}

    def do(self, op: str, args: Sequence[bytes]) -> list[bytes] | _Wait:
        """Do one operation; WAIT where it is not possible yet.

        Raises:
            DistStoreError: there is no such operation, or it does not take these arguments.
        """
        method = _METHODS.get(op)
        if method is None:
            raise DistStoreError(f"a store has no operation {op[:40]!r}")
        try:
            found: list[bytes] | _Wait = method(self, *args)
        except (TypeError, ValueError) as error:
            raise DistStoreError(f"{op}: {error}") from None
        return found

    def _set(self, key: bytes, value: bytes) -> list[bytes]:
        self.values[key] = value
        return []

    def _get(self, key: bytes) -> list[bytes] | _Wait:
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

    def _wait(self, *keys: bytes) -> list[bytes] | _Wait:
        return [] if self._check(*keys) == [b"1"] else WAIT

    def _append(self, key: bytes, value: bytes) -> list[bytes]:
        before = self.values.get(key, b"")
        if len(before) + len(value) > LARGEST_VALUE:
            raise ValueError(f"the value would have more than {LARGEST_VALUE} bytes, and is left as it was")
        self.values[key] = before + value
        return []

    def _multi_get(self, *keys: bytes) -> list[bytes] | _Wait:
        return [self.values[key] for key in keys] if all(key in self.values for key in keys) else WAIT

    def _multi_set(self, *pairs: bytes) -> list[bytes]:
        if len(pairs) % 2:
            raise ValueError("as many values as keys are needed")
        self.values.update(zip(pairs[::2], pairs[1::2], strict=True))
        return []

    def _queue_push(self, key: bytes, value: bytes) -> list[bytes]:
        self.queues.setdefault(key, deque()).append(value)
        return []

    def _queue_pop(self, key: bytes, block: bytes) -> list[bytes] | _Wait:
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


def _bytes(value: Any, what: str) -> bytes:
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


def _seconds(timeout: Any) -> float:
    seconds = _duration(timeout).total_seconds()
    if seconds < 0:
        raise ValueError(f"timeout must not be negative, got {timeout}")
    return min(seconds or FOR_EVER, FOR_EVER)


def _name(key: bytes) -> str:
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
            return [self.get(_name(key)) for key in args]
        if op == "multi_set":
            for key, value in zip(args[::2], args[1::2], strict=True):
                self.set(_name(key), value)
            return []
        if op == "append":
            before, now = b"", self.compare_set(_name(args[0]), b"", args[1])
            while now != before + args[1]:
                before, now = now, self.compare_set(_name(args[0]), now, now + args[1])
            return []
        raise NotImplementedError(f"{type(self).__name__} does not define {op}")

    def _do(self, op: str, *args: Any, timeout: timedelta | None = None) -> list[bytes]:
        parts = [_bytes(arg, "a key or value") for arg in args]
        return self._ask(op, parts, _seconds(self._timeout if timeout is None else timeout))

    @property
    def timeout(self) -> timedelta:
        """The limit of the waits."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of the waits; default 300 s. ``timedelta(0)`` is none, as in torch, here and for a single wait."""
        _seconds(timeout)
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
        return [_name(key) for key in self._do("list_keys")]

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
        key = _name(_bytes(key, "a key or value"))
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


class HashStore(Store):
    """A store of this process, for its threads.

    Source: torch.distributed.HashStore.
    """

    def __init__(self) -> None:
        super().__init__()
        self._table = Table()
        self._changed = threading.Condition()

    def _ask(self, op: str, args: Sequence[bytes], timeout: float) -> list[bytes]:
        end = time.monotonic() + timeout
        with self._changed:
            while True:
                found = self._table.do(op, args)
                if not isinstance(found, _Wait):
                    if op in CHANGES:
                        self._changed.notify_all()
                    return found
                left = end - time.monotonic()
                if left > 0 and self._changed.wait(left):
                    continue
                raise late(op, args, timeout, self._table.values)


_MAGIC = b"mpicoll store 1\n"
_HEAD = len(_MAGIC) + 16
_CLOSED = b"\0closed"


class FileStore(Store):
    """A store in a file, for processes that see the same one (of this host: a network's file system may not lock).

    The file holds every operation since it was made, and each process does them in order. It is removed when the last of
    ``world_size`` stores is closed, or gone; otherwise it stays, and a later run finds its values.

    Args:
        file_name: the path.
        world_size: how many stores use the file; -1: nobody knows.

    Raises:
        DistStoreError: the file is none of a FileStore's, or cannot be read or written.

    Source: torch.distributed.FileStore.
    """

    def __init__(self, file_name: str, world_size: int = -1) -> None:
        super().__init__()
        self.path = os.fspath(file_name)
        self.world_size = world_size
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._open = True
        self._forget()
        self._do("num_keys")

    def _forget(self) -> None:
        self._table, self._read, self._head = Table(), 0, b""

    def _ask(self, op: str, args: Sequence[bytes], timeout: float) -> list[bytes]:
        end, pause = time.monotonic() + timeout, 0.001
        while True:
            try:
                with self._lock:
                    found = self._once(op, args)
            except OSError as error:
                raise DistStoreError(f"FileStore {self.path}: {error.strerror or error}") from error
            if not isinstance(found, _Wait):
                return found
            if time.monotonic() >= end:
                raise late(op, args, timeout, self._table.values)
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _once(self, op: str, args: Sequence[bytes]) -> list[bytes] | _Wait:
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                try:
                    self._catch_up(file, os.fstat(file).st_size)
                    found = self._table.do(op, args)
                    if op in CHANGES and not isinstance(found, _Wait):
                        data = encode([op.encode(), *args])
                        data = len(data).to_bytes(8, "big") + data
                        os.ftruncate(file, self._read)
                        while True:
                            if not data:
                                break
                            count = os.pwrite(file, data, self._read)
                            self._read += count
                            data = data[count:]
                except DistStoreError:
                    raise
                except BaseException:
                    self._forget()  # what is in the file counts, and nothing else
                    raise
                return found
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # a child that was forked meanwhile has the file, too
        finally:
            os.close(file)

    def _catch_up(self, file: int, size: int) -> None:
        head = os.pread(file, _HEAD, 0)
        if not size:
            head = _MAGIC + os.urandom(_HEAD - len(_MAGIC))  # a file that replaces another one is told from it
            os.pwrite(file, head, 0)
        elif len(head) < _HEAD or not head.startswith(_MAGIC):
            raise DistStoreError(f"{self.path} is no file of a FileStore: choose another path, or remove it")
        if head != self._head or size < self._read:
            self._forget()
            self._head, self._read = head, _HEAD
        while self._read < size:
            length = int.from_bytes(os.pread(file, 8, self._read), "big")
            if self._read + 8 + length > size:
                return  # its writer died in the middle: the next one writes over it
            try:
                op, *args = decode(os.pread(file, length, self._read + 8))
            except ValueError as error:
                raise DistStoreError(f"{self.path} is damaged: {error}") from error
            self._table.do(op.decode(errors="replace"), args)
            self._read += 8 + length

    def num_keys(self) -> int:
        """Return the number of keys, and one more for the file itself (as torch)."""
        return len(self.list_keys()) + 1

    def list_keys(self) -> list[str]:
        """Return the keys."""
        return [key for key in super().list_keys() if key != _CLOSED.decode()]

    def close(self) -> None:
        """Use it no more; the last of ``world_size`` stores removes the file."""
        if not self._open or os.getpid() != self._pid:
            return
        self._open = False
        if self.world_size > 0 and self.add(_CLOSED.decode(), 1) == self.world_size:
            with contextlib.suppress(OSError):
                os.unlink(self.path)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


class PrefixStore(Store):
    """A part of another store, in which each key has a prefix.

    Source: torch.distributed.PrefixStore.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        super().__init__()
        if not isinstance(prefix, str):
            raise TypeError(f"PrefixStore: prefix must be a string, not {type(prefix).__name__}")
        if store is None:
            raise ValueError("PrefixStore: store must not be None")
        self.prefix = prefix
        self.underlying_store = store

    def num_keys(self) -> int:
        """Return the number of keys of the whole store below (as torch)."""
        return self.underlying_store.num_keys()

    @property
    def timeout(self) -> timedelta:
        """The limit of the waits: that of the store below."""
        return self.underlying_store.timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of the waits, of the store below."""
        self.underlying_store.set_timeout(timeout)

    def _do(self, op: str, *args: Any, timeout: timedelta | None = None) -> list[bytes]:
        return super()._do(op, *args, timeout=self.timeout if timeout is None else timeout)

    def _ask(self, op: str, args: Sequence[bytes], timeout: float) -> list[bytes]:
        front = f"{self.prefix}/".encode()
        store = self.underlying_store
        if type(store)._ask is Store._ask:  # a program's own, which has these functions and no other
            if op != "list_keys":
                return _by_functions(store, op, self._with_front(op, args), timeout)
            keys = [key.encode(errors="surrogateescape") for key in store.list_keys()]
        elif op == "list_keys":
            keys = store._ask("list_keys", [], timeout)
        else:
            return store._ask(op, self._with_front(op, args), timeout)
        return [key[len(front) :] for key in keys if key.startswith(front)]

    def _with_front(self, op: str, args: Sequence[bytes]) -> list[bytes]:
        """Return the arguments with the prefix before each that is a key."""
        front = f"{self.prefix}/".encode()
        if op in ("check", "wait", "multi_get"):
            return [front + arg for arg in args]
        if op == "multi_set":
            return [front + arg if not place % 2 else arg for place, arg in enumerate(args)]
        return [front + args[0], *args[1:]]

    def clone(self) -> Store:
        """Return the same part of a clone of the store below."""
        return PrefixStore(self.prefix, self.underlying_store.clone())


def _by_functions(store: Store, op: str, args: list[bytes], timeout: float) -> list[bytes]:
    """Have an operation done by the function of that name."""
    found: Any
    if op == "wait":
        keys = [_name(arg) for arg in args]
        if timeout == _seconds(store.timeout):
            store.wait(keys)
        else:
            store.wait(keys, timedelta(seconds=timeout))
        return []
    if op in ("check", "multi_get"):
        found = getattr(store, op)([_name(arg) for arg in args])
        if op == "multi_get":
            return [_bytes(each, "a value") for each in found]
    elif op == "multi_set":
        store.multi_set([_name(arg) for arg in args[::2]], list(args[1::2]))
        return []
    elif op == "add":
        found = store.add(_name(args[0]), int(args[1]))
    elif op == "queue_pop":
        found = store.queue_pop(_name(args[0]), args[1] == b"1")
    else:
        found = getattr(store, op)(_name(args[0]), *args[1:])
    if found is None:
        return []
    if isinstance(found, int):
        return [b"%d" % found]
    return [_bytes(found, "a value")]
