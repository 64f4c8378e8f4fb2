"""Memory that the processes of a node share: files in memory, with their pages reserved before anybody touches them."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import sys
import time
from collections.abc import Generator

import numpy as np
from mpi4py import MPI

from mpicoll.transports.base import Request
from mpicoll.transports.shm import mapping

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


def remove_stale(kind: str) -> None:
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


def map_together(
    comm: MPI.Intracomm, head: int, part: int, why_not: str = ""
) -> Generator[Request, None, tuple[mmap.mmap, int] | str]:
    """Map a new file into the memory of all members, of ``head`` bytes and a part of ``part`` bytes for each of them.

    Called by all members of a communicator on one node, which are known to. The file has a name only until all have opened it.

    Args:
        head, part: in bytes, multiples of the page; those of member 0 count.
        why_not: why this member has no memory to give, "" if it has.

    Returns:
        The memory and the bytes of a part; or why there is none: on all members alike, in words on those that know.
    """
    me, size = comm.Get_rank(), comm.Get_size()
    descriptor, path, why = -1, "", why_not
    told = np.zeros(256, np.uint8)
    if me == 0 and not why:
        with contextlib.suppress(OSError):
            mapping.remove_stale("segment")
        descriptor, path, why = mapping.create("segment", head + size * part, head)
        words = f"{part} {path}".encode() if path else b""
        told[: len(words)] = np.frombuffer(words, np.uint8)
    memory: mmap.mmap | None = None
    try:
        yield comm.Ibcast(told, 0)
        said, _, where = bytes(told).rstrip(b"\0").decode().partition(" ")
        if said and not why:
            part = int(said)
            try:
                if descriptor < 0:
                    descriptor = os.open(where, os.O_RDWR | os.O_CLOEXEC)
                mapping.reserve(descriptor, head + me * part, part)
                memory = mapping.map_file(descriptor, head + size * part)
            except (OSError, ValueError) as error:
                why = f"{getattr(error, 'strerror', None) or error} ({part >> 10} KiB in {mapping.DIRECTORY})"
        everybody = np.array([memory is not None], np.int64)
        yield comm.Iallreduce(MPI.IN_PLACE, everybody, MPI.MIN)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
        if path:
            mapping.remove(path)
    return (memory, part) if everybody[0] and memory is not None else why
