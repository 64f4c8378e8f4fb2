"""Visible files: files that one rank wrote, and that other ranks wait to see in full, also on a shared file system.

Network file systems cache the state of a file, and the absence of a file, for seconds on each host. The writer flushes files
and folders and records their sizes and times; a reader looks at the files until it sees the recorded state. No MPI.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

MOST_LISTED = 10_000
"""The most files of a folder that are compared one by one; of a larger folder the number and total bytes are compared."""

_SECOND = 1_000_000_000
_GRAINS = (1, 100, 1000, 1_000_000, _SECOND, 2 * _SECOND)
"""Units in nanoseconds to which file systems round times down."""
_SKEW = 2 * _SECOND
"""Nanoseconds by which the clocks of hosts and file servers may differ."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.5
_CANNOT_OPEN = {
    *(errno.ENXIO, errno.EINVAL, errno.ENOTSUP, errno.EISDIR, errno.EBADF),  # sockets and the like
    *(errno.EROFS, errno.EACCES, errno.EPERM),  # read-only mounts, files that may not be opened
}


@dataclass(frozen=True)
class VisibleFiles:
    """The record of a file, or of a folder with its files, as the writer sees them.

    Attributes:
        path: absolute path of the file or folder.
        files: for each file its path below ``path`` ("": ``path`` itself), its bytes, and its time of last change in ns.
        count, size: number and total bytes of the files of a folder with too many files to list; else 0.
        at: time of the record, in ns since the epoch.
    """

    path: str
    files: tuple[tuple[str, int, int], ...]
    count: int = 0
    size: int = 0
    at: int = 0


def path_list(paths: object) -> list[str]:
    """Return the absolute paths that ``publish=`` names: one path or several, each a string or a path object.

    Raises:
        TypeError: ``paths`` is something else.
    """
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    if isinstance(paths, bytes) or not isinstance(paths, Iterable):
        raise TypeError(f"publish must be a list of paths, not {type(paths).__name__}")
    found = []
    for path in paths:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"publish must be a list of paths, and contains {path!r}")
        found.append(os.path.abspath(os.fsdecode(path)))
    return found


def record_files(paths: Iterable[str]) -> list[VisibleFiles]:
    """Flush files and folders, and the folders that contain them; return the record of each.

    Raises:
        FileNotFoundError: a path does not exist.
        OSError: a file could not be flushed.
    """
    return [_record_one(path) for path in paths]


def _record_one(path: str) -> VisibleFiles:
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError:
        raise FileNotFoundError(
            errno.ENOENT, "publish: the block has ended, and this path does not exist", path
        ) from None
    files: list[tuple[str, int, int]] = []
    count = size = 0
    for full in _files(path, flush=True) if is_folder else ():
        found = _look(full, follow=False)
        count, size = count + 1, size + found[0]
        if count <= MOST_LISTED:
            files.append((os.path.relpath(full, path), *found))
    _open(path, flush=True)
    _open(os.path.dirname(path), flush=True)
    if not is_folder:
        files.append(("", *_look(path)))
    if count > MOST_LISTED:
        return VisibleFiles(path, (), count, size, time.time_ns())
    return VisibleFiles(path, tuple(files), at=time.time_ns())


def _files(folder: str, flush: bool = False) -> Iterator[str]:
    """Yield the files below a folder; flush the files and the folders if ``flush``."""
    for where, _, names in os.walk(folder):
        for name in names:
            full = os.path.join(where, name)
            if flush and not os.path.islink(full):
                _open(full, flush=True)
            yield full
        if flush:
            _open(where, flush=True)


def _look(path: str, follow: bool = True) -> tuple[int, int]:
    found = os.stat(path, follow_symlinks=follow)
    return found.st_size, found.st_mtime_ns


def await_visible(
    records: Iterable[VisibleFiles],
    timeout: float,
    *,
    writer: str,
    host: str,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until this host sees all files as they were recorded.

    Args:
        timeout: seconds.
        writer: the rank that wrote the files, for the message.
        host: the name of this host, for the message.

    Raises:
        TimeoutError: a file is not seen in time; the message names path and host.
    """
    end = clock() + timeout
    for item in records:
        pause = _FIRST_PAUSE
        while missing := _missing(item):
            if clock() >= end:
                raise TimeoutError(
                    f"{missing}, as seen from {host} {timeout:g} s after {writer} had written it. Check that both hosts share "
                    "the file system; if it only shows changes late, pass a larger visibility_timeout="
                )
            sleep(min(pause, max(0.0, end - clock())))
            pause = min(2 * pause, _LONGEST_PAUSE)


def _missing(item: VisibleFiles) -> str:
    """Return the first file that this host does not see yet, as the beginning of a sentence; "" if it sees all files."""
    _revalidate(os.path.dirname(item.path))
    if item.count:
        count = size = 0
        for full in _files(item.path):
            with contextlib.suppress(OSError):
                size += _look(full, follow=False)[0]
                count += 1
        if count >= item.count and size >= item.size:
            return ""
        return f"{item.path} has {count} files with {size} bytes instead of {item.count} files with {item.size} bytes"
    if not item.files and not os.path.isdir(item.path):
        return f"{item.path} does not exist"
    for name, size, changed in item.files:
        full = os.path.join(item.path, name) if name else item.path
        if name:
            _revalidate(os.path.dirname(full))
        try:
            if not os.path.islink(full):
                _open(full)
            seen, when = _look(full, follow=not name)
        except FileNotFoundError:
            return f"{full} does not exist"
        except OSError as error:
            return f"{full} cannot be read ({error.strerror})"
        if when > changed and when > item.at - _SKEW:
            continue  # written again since
        if not any(when == changed // grain * grain for grain in _GRAINS) or seen != size:
            return f"{full} is still as it was before: {seen} bytes instead of {size}, {(changed - when) / _SECOND:.3f} s older"
    return ""


def _revalidate(folder: str) -> None:
    """Open a folder, so that a network file system asks its server whether the folder has changed."""
    with contextlib.suppress(OSError):
        os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def _open(path: str, flush: bool = False) -> None:
    """Open and close a file, so that a network file system asks its server for changes; flush the file if ``flush``.

    Errors of special files, and of files that this process may not read, are ignored: the program itself meets such an error.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if flush:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_OPEN:
            raise
