"""Stores without a server: in this process, in a file, and a part of another store."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from mpicoll.errors import DistStoreError
from mpicoll.stores.base import (
    CHANGES,
    Store,
    StoreTable,
    Wait,
    decode,
    encode,
    name_of_key,
    timed_out,
    to_bytes,
    to_seconds,
)


class HashStore(Store):
    """A store of this process, for its threads.

    Source: torch.distributed.HashStore.
    """

    def __init__(self) -> None:
        super().__init__()
        self._table = StoreTable()
        self._changed = threading.Condition()

    def _ask(self, op: str, args: Sequence[bytes], timeout: float) -> list[bytes]:
        end = time.monotonic() + timeout
        with self._changed:
            while True:
                found = self._table.do(op, args)
                if not isinstance(found, Wait):
                    if op in CHANGES:
                        self._changed.notify_all()
                    return found
                left = end - time.monotonic()
                if left > 0 and self._changed.wait(left):
                    continue
                raise timed_out(op, args, timeout, self._table.values)


_MAGIC = b"mpicoll store 1\n"
_HEAD = len(_MAGIC) + 16
_CLOSED = b"\0closed"


class FileStore(Store):
    """A store in a file, for processes of one host (a network file system may not lock).

    The file holds every operation since it was made, and each process applies them in order. The file is removed when the last
    of ``world_size`` stores is closed or deleted; otherwise the file stays, and a later run finds its values.

    Args:
        file_name: the path.
        world_size: number of stores that use the file; -1: not known.

    Raises:
        DistStoreError: the file is no file of a FileStore, or cannot be read or written.

    Source: torch.distributed.FileStore.
    """

    def __init__(self, file_name: str, world_size: int = -1) -> None:
        super().__init__()
        self.path = os.fspath(file_name)
        self.world_size = world_size
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._open = True
        self._reset()
        self._do("num_keys")

    def _reset(self) -> None:
        self._table, self._read, self._head = StoreTable(), 0, b""

    def _ask(self, op: str, args: Sequence[bytes], timeout: float) -> list[bytes]:
        end, pause = time.monotonic() + timeout, 0.001
        while True:
            try:
                with self._lock:
                    found = self._once(op, args)
            except OSError as error:
                raise DistStoreError(f"FileStore {self.path}: {error.strerror or error}") from error
            if not isinstance(found, Wait):
                return found
            if time.monotonic() >= end:
                raise timed_out(op, args, timeout, self._table.values)
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _once(self, op: str, args: Sequence[bytes]) -> list[bytes] | Wait:
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                try:
                    self._catch_up(file, os.fstat(file).st_size)
                    found = self._table.do(op, args)
                    if op in CHANGES and not isinstance(found, Wait):
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
                    self._reset()  # the file is read again: only its operations count
                    raise
                return found
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # a child that was forked meanwhile has the file open, too
        finally:
            os.close(file)

    def _catch_up(self, file: int, size: int) -> None:
        head = os.pread(file, _HEAD, 0)
        if not size:
            head = _MAGIC + os.urandom(_HEAD - len(_MAGIC))  # random, to recognise a file that replaces another one
            os.pwrite(file, head, 0)
        elif len(head) < _HEAD or not head.startswith(_MAGIC):
            raise DistStoreError(f"{self.path} is no file of a FileStore: choose another path, or remove it")
        if head != self._head or size < self._read:
            self._reset()
            self._head, self._read = head, _HEAD
        while self._read < size:
            length = int.from_bytes(os.pread(file, 8, self._read), "big")
            if self._read + 8 + length > size:
                return  # the writer died while it wrote: the next operation overwrites the rest
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
        """Close the store. The last of ``world_size`` stores removes the file."""
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
    """A part of another store: each of its keys has a prefix there.

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
        """Return the number of keys of the whole underlying store (as torch)."""
        return self.underlying_store.num_keys()

    @property
    def timeout(self) -> timedelta:
        """The limit of the waits: that of the underlying store."""
        return self.underlying_store.timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of the waits of the underlying store."""
        self.underlying_store.set_timeout(timeout)

    def _do(self, op: str, *args: Any, timeout: timedelta | None = None) -> list[bytes]:
        return super()._do(op, *args, timeout=self.timeout if timeout is None else timeout)

    def _ask(self, op: str, args: Sequence[bytes], timeout: float) -> list[bytes]:
        front = f"{self.prefix}/".encode()
        store = self.underlying_store
        if type(store)._ask is Store._ask:  # a program's own store, which has the public functions only
            if op != "list_keys":
                return _by_functions(store, op, self._with_prefix(op, args), timeout)
            keys = [key.encode(errors="surrogateescape") for key in store.list_keys()]
        elif op == "list_keys":
            keys = store._ask("list_keys", [], timeout)
        else:
            return store._ask(op, self._with_prefix(op, args), timeout)
        return [key[len(front) :] for key in keys if key.startswith(front)]

    def _with_prefix(self, op: str, args: Sequence[bytes]) -> list[bytes]:
        """Return the arguments with the prefix before each key."""
        front = f"{self.prefix}/".encode()
        if op in ("check", "wait", "multi_get"):
            return [front + arg for arg in args]
        if op == "multi_set":
            return [front + arg if not place % 2 else arg for place, arg in enumerate(args)]
        return [front + args[0], *args[1:]]

    def clone(self) -> Store:
        """Return the same part of a clone of the underlying store."""
        return PrefixStore(self.prefix, self.underlying_store.clone())


def _by_functions(store: Store, op: str, args: list[bytes], timeout: float) -> list[bytes]:
    """Apply an operation by the store's function of that name."""
    found: Any
    if op == "wait":
        keys = [name_of_key(arg) for arg in args]
        if timeout == to_seconds(store.timeout):
            store.wait(keys)
        else:
            store.wait(keys, timedelta(seconds=timeout))
        return []
    if op in ("check", "multi_get"):
        found = getattr(store, op)([name_of_key(arg) for arg in args])
        if op == "multi_get":
            return [to_bytes(each, "a value") for each in found]
    elif op == "multi_set":
        store.multi_set([name_of_key(arg) for arg in args[::2]], list(args[1::2]))
        return []
    elif op == "add":
        found = store.add(name_of_key(args[0]), int(args[1]))
    elif op == "queue_pop":
        found = store.queue_pop(name_of_key(args[0]), args[1] == b"1")
    else:
        found = getattr(store, op)(name_of_key(args[0]), *args[1:])
    if found is None:
        return []
    if isinstance(found, int):
        return [b"%d" % found]
    return [to_bytes(found, "a value")]
