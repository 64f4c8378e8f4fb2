"""Memory that the processes of a node share: files in memory, with their pages reserved before anybody touches them."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import sys
import time

__all__ = ["create", "map_file", "path_of", "remove", "reserve", "sweep"]

DIRECTORY = "/dev/shm"


def path_of(kind: str) -> str:
    """Return a name for a file that nobody else has; the one who makes it removes it as soon as the others have it open."""
    return os.path.join(DIRECTORY, f"mpicoll-{kind}-{secrets.token_hex(8)}")


def create(kind: str, size: int, reserved: int | None = None) -> tuple[int, str, str]:
    """Make a file of ``size`` bytes.

    Args:
        kind: part of its name.
        size: in bytes.
        reserved: how many of them, from the first on, get their pages now; default all.

    Returns:
        Its descriptor, its path and ""; or -1, "" and why there is none.
    """
    path = path_of(kind)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return -1, "", f"{error.strerror} ({path})"
    _named.add(path)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _LOCK)
        os.ftruncate(descriptor, size)
        if reserved != 0:
            reserve(descriptor, 0, size if reserved is None else reserved)
    except OSError as error:
        os.close(descriptor)
        remove(path)
        return -1, "", f"{error.strerror} ({size >> 10} KiB in {DIRECTORY})"
    return descriptor, path, ""


_named: set[str] = set()
_LOCK = 1 << 40
"""The byte of a file on which its maker holds a lock as long as it has a name, and lives."""
OLD = 60.0


def remove(*paths: str) -> None:
    """Take the names of files away that this process has made; without arguments of all that still have one."""
    for path in paths or tuple(_named):
        _named.discard(path)
        with contextlib.suppress(OSError):
            os.unlink(path)


def sweep(kind: str) -> None:
    """Remove files of this user whose makers were killed before they could do it themselves."""
    for name in os.listdir(DIRECTORY):
        path = os.path.join(DIRECTORY, name)
        if not name.startswith(f"mpicoll-{kind}-") or path in _named:
            continue
        with contextlib.suppress(OSError):
            known = os.stat(path)
            if known.st_uid != os.getuid() or time.time() - known.st_mtime < OLD:
                continue
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _LOCK)
                os.unlink(path)
            finally:
                os.close(descriptor)


def reserve(descriptor: int, start: int, size: int) -> None:
    """Give a part of a file its pages, on the memory of the core that asks.

    After ftruncate alone, a full tmpfs kills by SIGBUS whoever touches the memory first.

    Raises:
        OSError: there is not so much.
    """
    os.posix_fallocate(descriptor, start, size)


_MAP_FIXED = 0x10
_lost: list[mmap.mmap] = []


def map_file(descriptor: int, size: int) -> mmap.mmap:
    """Map the first bytes of a file, and keep no descriptor of it.

    Before Python 3.13 a mapping keeps one for good: some hundred groups would leave a program none to open its own files with.

    Raises:
        OSError: there is no room for it.
    """
    if sys.version_info >= (3, 13):
        return mmap.mmap(descriptor, size, trackfd=False)
    import ctypes

    if not sys.platform.startswith("linux") or ctypes.sizeof(ctypes.c_void_p) < 8:
        return mmap.mmap(descriptor, size)
    # The file takes the place of memory without one, which is given back as any other when nobody uses it any more.
    memory = mmap.mmap(-1, size)
    put = ctypes.CDLL(None, use_errno=True).mmap
    put.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    put.restype = ctypes.c_void_p
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if put(start, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0) != start:
        code = ctypes.get_errno()
        _lost.append(memory)  # what is at its address now is not known
        raise OSError(code, os.strerror(code))
    return memory
