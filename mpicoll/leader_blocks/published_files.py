"""What one rank wrote to files, told to the others so that they read all of it: also over a shared file system.

Network file systems keep what they know of a file, and of a file that is not there, for seconds on each host. The writer
flushes files and folders and announces their sizes and times; a reader looks until it sees them. Knows nothing of MPI.
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
"""Files of one folder that are looked at one by one; of a larger folder their number and their bytes are compared."""

_SECOND = 1_000_000_000
_GRAINS = (1, 100, 1000, 1_000_000, _SECOND, 2 * _SECOND)
"""Nanoseconds to which file systems cut times."""
_SKEW = 2 * _SECOND
"""Nanoseconds by which the clocks of hosts and file servers may differ."""
_FIRST_NAP, _LONGEST_NAP = 0.001, 0.5
_NOT_FOR_THIS = {
    errno.ENXIO,
    errno.EINVAL,
    errno.ENOTSUP,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EISDIR,
    errno.EBADF,
}


@dataclass(frozen=True)
class Published:
    """A file or a folder as its writer sees it.

    Attributes:
        path: absolute.
        files: (path below it, "" the path itself; bytes; time of the last change in ns) of each file.
        count, size: of a folder with too many files to list, how many there are and their bytes; else 0.
        at: when it was announced, in ns since the epoch.
    """

    path: str
    files: tuple[tuple[str, int, int], ...]
    count: int = 0
    size: int = 0
    at: int = 0


def path_list(paths: object) -> list[str]:
    """Return what ``publish=`` means: one path or several, each a string or a path object.

    Raises:
        TypeError: something else.
    """
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    if isinstance(paths, bytes) or not isinstance(paths, Iterable):
        raise TypeError(f"publish must be a list of paths, not {type(paths).__name__}")
    found = []
    for path in paths:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"publish must be a list of paths, and holds {path!r}")
        found.append(os.path.abspath(os.fsdecode(path)))
    return found


def announce(paths: Iterable[str]) -> list[Published]:
    """Flush files and folders, the folders they are in as well, and return what is to be told of them.

    Raises:
        FileNotFoundError: one is not there.
        OSError: it could not be written out.
    """
    return [_announce_one(path) for path in paths]


def _announce_one(path: str) -> Published:
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, "publish: the block has ended and this is not there", path) from None
    if not is_folder:
        _flush(path)
        _flush(os.path.dirname(path))
        return Published(path, (("", *_look(path)),), at=time.time_ns())
    files: list[tuple[str, int, int]] = []
    count = size = 0
    for full in _files(path, flush=True):
        found = _look(full, follow=False)
        count, size = count + 1, size + found[0]
        if count <= MOST_LISTED:
            files.append((os.path.relpath(full, path), *found))
    _flush(path)
    _flush(os.path.dirname(path))
    now = time.time_ns()
    return Published(path, tuple(files), at=now) if count <= MOST_LISTED else Published(path, (), count, size, now)


def _files(folder: str, flush: bool = False) -> Iterator[str]:
    """Yield the files below a folder; ``flush`` them, and the folders."""
    for where, _, names in os.walk(folder):
        for name in names:
            full = os.path.join(where, name)
            if flush and not os.path.islink(full):
                _flush(full)
            yield full
        if flush:
            _flush(where)


def _flush(path: str) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NOT_FOR_THIS:  # sockets, read-only mounts, what we may not open: nothing to be done
            raise


def _look(path: str, follow: bool = True) -> tuple[int, int]:
    found = os.stat(path, follow_symlinks=follow)
    return found.st_size, found.st_mtime_ns


def await_visible(
    published: Iterable[Published],
    timeout: float,
    *,
    writer: str,
    host: str,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when all of it is seen from here.

    Args:
        timeout: seconds.
        writer: who wrote it, for the message.
        host: the name of this host, for the message.

    Raises:
        TimeoutError: it is not seen within the time; the message names path and host.
    """
    end = clock() + timeout
    for item in published:
        nap = _FIRST_NAP
        while missing := _missing(item):
            if clock() >= end:
                raise TimeoutError(
                    f"{missing}, as seen from {host} {timeout:g} s after {writer} had written it. A file system that is not "
                    "shared between the two hosts, or one that is slow to show changes (then a larger visibility_timeout=)?"
                )
            sleep(min(nap, max(0.0, end - clock())))
            nap = min(2 * nap, _LONGEST_NAP)


def _missing(item: Published) -> str:
    """Return what cannot be seen of it yet, as the beginning of a sentence, or ""."""
    _revalidate(os.path.dirname(item.path))
    if item.count:
        count = size = 0
        for full in _files(item.path):
            with contextlib.suppress(OSError):
                size += _look(full, follow=False)[0]
                count += 1
        if count >= item.count and size >= item.size:
            return ""
        return f"{item.path} has {count} files with {size} bytes instead of {item.count} with {item.size}"
    if not item.files and not os.path.isdir(item.path):
        return f"{item.path} is not there"
    for name, size, changed in item.files:
        full = os.path.join(item.path, name) if name else item.path
        if name:
            _revalidate(os.path.dirname(full))
        try:
            _open_once(full)
            seen, when = _look(full, follow=not name)
        except FileNotFoundError:
            return f"{full} is not there"
        except OSError as error:
            return f"{full} cannot be read ({error.strerror})"
        if when > changed and when > item.at - _SKEW:
            continue  # written again since
        if not any(when == changed // grain * grain for grain in _GRAINS) or seen != size:
            return f"{full} is still as it was before: {seen} bytes instead of {size}, {(changed - when) / _SECOND:.3f} s older"
    return ""


def _revalidate(folder: str) -> None:
    """Have a network file system ask its server whether the folder has changed: opening it does."""
    with contextlib.suppress(OSError):
        os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def _open_once(path: str) -> None:
    """The same for a file (close-to-open consistency)."""
    if not os.path.islink(path):
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError as error:
            if error.errno not in _NOT_FOR_THIS:  # it is there, and readable or not is the program's business
                raise
