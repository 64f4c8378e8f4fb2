"""Stores without a server: in this process, in a file, and a part of another store."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from mpicoll.errors import DistStoreError
from mpicoll.stores.base import (
    CHANGES,
    Store,
    StoreTable,
    decode,
    encode,
    longest_rest,
    name_of_key,
    progress,
    timed_out,
    to_bytes,
    to_seconds,
)


class _LocalStore(Store):
    """A store that applies its operations in this process. It tries an operation until the operation is possible."""

    def __init__(self) -> None:
        super().__init__()
        self._table = StoreTable()

    def _try(self, op: str, args: Sequence[bytes]) -> list[bytes] | None:
        """Apply an operation to the table, or return None if it is not possible yet."""
        return self._table.do(op, args)

    def _rest(self, waited: float, left: float) -> None:
        """Wait, for ``left`` seconds at most, until an operation that was not possible may have become possible."""
        raise NotImplementedError

    def _ask(self, op: str, args: Sequence[bytes], timeout: float) -> list[bytes]:
        start = time.monotonic()
        while True:
            found = self._try(op, args)
            if found is not None:
                return found
            waited = time.monotonic() - start
            if waited >= timeout:
                raise timed_out(op, args, timeout, self._table.values)
            self._rest(waited, min(timeout - waited, longest_rest()))
            progress()


class HashStore(_LocalStore):
    """A store of this process, for its threads.

    Source: torch.distributed.HashStore.
    """

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()

    def _ask(self, op: str, args: Sequence[bytes], timeout: float) -> list[bytes]:
        with self._changed:
            found = super()._ask(op, args, timeout)
            if op in CHANGES:
                self._changed.notify_all()
            return found

    def _rest(self, waited: float, left: float) -> None:
        self._changed.wait(left)


_MAGIC = b"mpicoll store 1\n"
_HEAD = len(_MAGIC) + 16
_CLOSED = "\0closed"


class FileStore(_LocalStore):
    """A store in a file, for processes of one host (a network file system may not lock).

    The file holds every operation since it was made, and each process applies them in order. The file is removed when the last
    of ``world_size`` stores is closed or deleted. Otherwise the file stays, and a later run finds its values.

    Args:
        file_name: the path.
        world_size: number of stores that use the file; -1: not known.

    Raises:
        DistStoreError: the file is no file of a FileStore, or cannot be read or written.

    Source: torch.distributed.FileStore.
    """

    _hidden = (_CLOSED,)

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

    def _try(self, op: str, args: Sequence[bytes]) -> list[bytes] | None:
        try:
            with self._lock, self._locked_file() as file:
                try:
                    return self._apply(file, op, args)
                except DistStoreError:
                    raise
                except BaseException:
                    self._reset()  # the file is read again: only the operations in the file count
                    raise
        except OSError as error:
            raise DistStoreError(f"FileStore {self.path}: {error.strerror or error}") from error

    def _rest(self, waited: float, left: float) -> None:
        time.sleep(min(max(waited, 0.001), 0.05, left))

    @contextlib.contextmanager
    def _locked_file(self) -> Iterator[int]:
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a child that was forked meanwhile has the file open, too
            os.close(file)

    def _apply(self, file: int, op: str, args: Sequence[bytes]) -> list[bytes] | None:
        """Apply an operation to the values of the file; append the operation to the file if it may change the table."""
        self._catch_up(file, os.fstat(file).st_size)
        found = self._table.do(op, args)
        if op in CHANGES and found is not None:
            data = encode([op.encode(), *args])
            data = len(data).to_bytes(8, "big") + data
            os.ftruncate(file, self._read)
            while data:
                count = os.pwrite(file, data, self._read)
                self._read += count
                data = data[count:]
        return found

    def _catch_up(self, file: int, size: int) -> None:
        head = os.pread(file, _HEAD, 0)
        if not size:
            head = _MAGIC + os.urandom(_HEAD - len(_MAGIC))  # random, to recognise a file that replaces another file
            os.pwrite(file, head, 0)
        elif len(head) < _HEAD or not head.startswith(_MAGIC):
            raise DistStoreError(f"{self.path} is no file of a FileStore: choose another path, or remove the file")
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

    def close(self) -> None:
        """Close the store. The last of ``world_size`` stores removes the file."""
        if not self._open or os.getpid() != self._pid:
            return
        self._open = False
        if self.world_size > 0 and self.add(_CLOSED, 1) == self.world_size:
            with contextlib.suppress(OSError):
                os.unlink(self.path)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


class PrefixStore(Store):
    """A part of another store: each key has a prefix in the other store.

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
        """The limit of the waits of the underlying store."""
        return self.underlying_store.timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of the waits of the underlying store."""
        self.underlying_store.set_timeout(timeout)

    def _do(self, op: str, *args: Any, timeout: timedelta | None = None) -> list[bytes]:
        return super()._do(op, *args, timeout=self.timeout if timeout is None else timeout)

    def _ask(self, op: str, args: Sequence[bytes], timeout: float) -> list[bytes]:
        front = f"{self.prefix}/".encode()
        store = self.underlying_store
        if type(store)._ask is Store._ask:  # a program's own store, which has only the public functions
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
    if op in ("check", "wait", "multi_get"):
        keys = [name_of_key(arg) for arg in args]
        limited = op == "wait" and timeout != to_seconds(store.timeout)
        found = getattr(store, op)(keys, *([timedelta(seconds=timeout)] if limited else []))
    elif op == "multi_set":
        store.multi_set([name_of_key(arg) for arg in args[::2]], list(args[1::2]))
        return []
    else:
        key, rest = name_of_key(args[0]), args[1:]
        given = [int(rest[0])] if op == "add" else [rest[0] == b"1"] if op == "queue_pop" else rest
        found = getattr(store, op)(key, *given)
    results = found if op == "multi_get" else [] if found is None or op == "wait" else [found]
    return [b"%d" % each if isinstance(each, int) else to_bytes(each, "a value") for each in results]
