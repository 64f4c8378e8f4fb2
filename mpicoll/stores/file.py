"""A store in a file, which each process reads and extends under a lock."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence

from mpicoll.errors import DistStoreError
from mpicoll.stores.local import LocalStore
from mpicoll.stores.table import CHANGES, StoreTable, decode, encode

COMPACT_BYTES = 1 << 20
"""Bytes up to which a file is not compacted."""
_MAGIC = b"mpicoll store 1\n"
_HEAD = len(_MAGIC) + 16
_RECORD = 34  # bytes of a record in the file without its key and value
_CLOSED = "\0closed"
_LAST_SECONDS = 5.0


class FileStore(LocalStore):
    """A store in a file, for processes of one host (a network file system may not lock).

    The file holds operations, and each process applies them in order. A file of more than 1 MiB is compacted if the present
    values need less than half of it: another file with only these values replaces the file. The file is removed when the last of
    ``world_size`` stores is closed or deleted. Otherwise the file stays, and a later run finds its values.

    A new file can be read and written by its user only. Every process that may read the file can hold its lock: then a call
    waits until the store's timeout.

    Args:
        file_name: the path; not a symbolic link.
        world_size: number of stores that use the file; -1: not known.

    Raises:
        DistStoreError: the file is no file of a FileStore, cannot be read or written, or is locked for the whole limit.

    Source: torch.distributed.FileStore.
    """

    _hidden = (_CLOSED,)

    def __init__(self, file_name: str, world_size: int = -1) -> None:
        super().__init__()
        self.path = os.fspath(file_name)
        self.world_size = world_size
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._reset()
        self._open = False
        self._do("num_keys")
        self._open = True

    def _reset(self) -> None:
        self._table, self._read, self._head, self._compact_from = StoreTable(), 0, b"", COMPACT_BYTES

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
        except BlockingIOError:
            raise
        except OSError as error:
            why = error.strerror or str(error)
            if error.errno == errno.ELOOP and os.path.islink(self.path):
                why = "is a symbolic link, which a FileStore does not follow: pass the path of the file"
            raise DistStoreError(f"FileStore {self.path}: {why}") from error

    def _blocked(self, op: str, timeout: float) -> DistStoreError:
        return DistStoreError(
            f"FileStore {self.path}: {op}: other processes have held the lock of the file for {timeout:g} s "
            f"(`fuser -v {self.path}` shows them)"
        )

    def _rest(self, waited: float, left: float) -> None:
        time.sleep(min(max(waited, 0.0002), 0.05, left))

    @contextlib.contextmanager
    def _locked_file(self) -> Iterator[int]:
        """Open and lock the file.

        Raises:
            BlockingIOError: another process has the lock, or has removed or replaced the file before this process had the lock.
        """
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self._is_at_path(file):
                raise BlockingIOError
            yield file
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a child that was forked meanwhile has the file open, too
            os.close(file)

    def _is_at_path(self, file: int) -> bool:
        """Return whether an open file still stands at the store's path."""
        try:
            return os.path.samestat(os.fstat(file), os.lstat(self.path))
        except FileNotFoundError:
            return False

    def _apply(self, file: int, op: str, args: Sequence[bytes]) -> list[bytes] | None:
        """Apply an operation to the values of the file; append the operation to the file if it may change the table."""
        self._catch_up(file, os.fstat(file).st_size)
        found = self._table.do(op, args)
        if op in CHANGES and found is not None:
            data = _framed([op.encode(), *args])
            os.ftruncate(file, self._read)
            while data:
                count = os.pwrite(file, data, self._read)
                self._read += count
                data = data[count:]
            if args[0] == _CLOSED.encode() and int(found[0]) == self.world_size:
                os.unlink(self.path)  # under the lock: a store of another run has not yet written into this file
            elif self._read > max(self._compact_from, 2 * self._living()):
                self._compact(file)
        return found

    def _living(self) -> int:
        """Return the bytes of a file that holds only the present values."""
        return _HEAD + self._table.bytes + _RECORD * self._table.entries

    def _compact(self, file: int) -> None:
        """Replace the file by a file that holds only the present values, in one step: other stores notice another file."""
        was, head, path = os.fstat(file), _new_head(), f"{self.path}.compacting"
        self._compact_from = 2 * self._read  # if the file cannot be replaced: not tried again soon
        if was.st_uid != os.geteuid():  # the new file would be this user's
            return
        try:
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as left:
                if left.read(len(_MAGIC)) == _MAGIC:  # of a process that was killed here
                    os.unlink(path)
            new = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with open(new, "wb") as out:
                out.write(head)
                out.writelines(map(_framed, self._table.records()))
                size = out.tell()
                os.fchown(new, -1, was.st_gid)
                os.fchmod(new, stat.S_IMODE(was.st_mode))
            os.rename(path, self.path)
        except OSError:  # a full disk, or a folder that this process may not write: the old file is whole
            with contextlib.suppress(OSError):
                os.unlink(path)
            return
        self._head, self._read, self._compact_from = head, size, COMPACT_BYTES

    def _catch_up(self, file: int, size: int) -> None:
        head = os.pread(file, _HEAD, 0)
        if not size:
            head = _new_head()
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
        if self._may_close():
            try:
                self.add(_CLOSED, 1)
            except DistStoreError:
                self._open = True  # the file does not count this store yet
                raise

    def _may_close(self) -> bool:
        """Return whether the store has to be counted as closed, once."""
        is_open, self._open = self._open and os.getpid() == self._pid, False
        return is_open and self.world_size > 0

    def _close_at_deletion(self) -> None:
        """Close the store without progress of requests, since a deletion may happen inside any call; give up soon."""
        end = time.monotonic() + _LAST_SECONDS
        is_counted = not self._may_close()
        while not is_counted and time.monotonic() < end:
            try:
                self._try("add", [_CLOSED.encode(), b"1"])
                is_counted = True
            except BlockingIOError:
                time.sleep(0.001)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._close_at_deletion()


def _new_head() -> bytes:
    """Return the first bytes of a new file: random, to recognise a file that replaces another file."""
    return _MAGIC + os.urandom(_HEAD - len(_MAGIC))


def _framed(parts: Sequence[bytes]) -> bytes:
    data = encode(parts)
    return len(data).to_bytes(8, "big") + data
