"""Shared memory of the processes of a node: files in memory, whose pages are reserved before the first access."""

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

from mpicoll.runtime.waiting import Pollable

DIRECTORY = "/dev/shm"


def path_of(kind: str) -> str:
    """Return a new file name. The process that makes the file removes its name when the other processes have opened it."""
    return os.path.join(DIRECTORY, f"mpicoll-{kind}-{secrets.token_hex(8)}")


def create(kind: str, size: int, reserved: int | None = None) -> tuple[int, str, str]:
    """Make a file of ``size`` bytes.

    Args:
        kind: part of the file name.
        size: size in bytes.
        reserved: number of bytes, from the first on, whose pages are reserved now; default all.

    Returns:
        The descriptor, the path and ""; or -1, "" and why there is none.
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
"""The byte of a file on which its maker holds a lock, while it lives and the file has a name."""
OLD = 60.0


def remove(*paths: str) -> None:
    """Remove the names of files that this process has made; without arguments of all that still have a name."""
    for path in paths or tuple(_named):
        _named.discard(path)
        with contextlib.suppress(OSError):
            os.unlink(path)


def remove_stale(kind: str) -> None:
    """Remove files of this user whose makers were killed before they removed the files."""
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
    """Reserve the pages of a part of a file, in the memory of the calling core.

    After only ftruncate, the first access to the memory of a full tmpfs ends the process by SIGBUS.

    Raises:
        OSError: there is not enough memory.
    """
    os.posix_fallocate(descriptor, start, size)


_MAP_FIXED = 0x10
_lost: list[mmap.mmap] = []


def map_file(descriptor: int, size: int) -> mmap.mmap:
    """Map the first bytes of a file without a descriptor in the mapping.

    Before Python 3.13 a mapping holds a descriptor: a few hundred groups would leave none for files of the program.

    Raises:
        OSError: there is not enough address space.
    """
    if sys.version_info >= (3, 13):
        return mmap.mmap(descriptor, size, trackfd=False)
    import ctypes

    if not sys.platform.startswith("linux") or ctypes.sizeof(ctypes.c_void_p) < 8:
        return mmap.mmap(descriptor, size)
    # The file replaces anonymous memory at the same address, which Python unmaps when the mapping is deleted.
    memory = mmap.mmap(-1, size)
    put = ctypes.CDLL(None, use_errno=True).mmap
    put.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    put.restype = ctypes.c_void_p
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if put(start, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0) != start:
        code = ctypes.get_errno()
        _lost.append(memory)  # never unmapped, as the contents of its addresses are unknown
        raise OSError(code, os.strerror(code))
    return memory


def map_together(
    comm: MPI.Intracomm, head: int, part: int, why_not: str = ""
) -> Generator[Pollable, None, tuple[mmap.mmap, int] | str]:
    """Map a new file, of ``head`` bytes and a part of ``part`` bytes for each member, on all members.

    All members of a communicator on one node call this function, and are known to. The file has a name only until all members
    have opened it.

    Args:
        head, part: bytes, multiples of the page size; the values of member 0 count.
        why_not: why this member has no memory for the file; "" if it has.

    Returns:
        The memory and the bytes of a part; or on all members a string that says why there is none ("" if not known).
    """
    me, size = comm.Get_rank(), comm.Get_size()
    descriptor, path, why = -1, "", why_not
    record = np.zeros(256, np.uint8)
    if me == 0 and not why:
        with contextlib.suppress(OSError):
            remove_stale("segment")
        descriptor, path, why = create("segment", head + size * part, head)
        words = f"{part} {path}".encode() if path else b""
        record[: len(words)] = np.frombuffer(words, np.uint8)
    memory: mmap.mmap | None = None
    try:
        yield comm.Ibcast(record, 0)
        length, _, where = bytes(record).rstrip(b"\0").decode().partition(" ")
        if length and not why:
            part = int(length)
            try:
                if descriptor < 0:
                    descriptor = os.open(where, os.O_RDWR | os.O_CLOEXEC)
                reserve(descriptor, head + me * part, part)
                memory = map_file(descriptor, head + size * part)
            except (OSError, ValueError) as error:
                why = f"{getattr(error, 'strerror', None) or error} ({part >> 10} KiB in {DIRECTORY})"
        mapped = np.array([memory is not None], np.int64)
        yield comm.Iallreduce(MPI.IN_PLACE, mapped, MPI.MIN)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
        if path:
            remove(path)
    return (memory, part) if mapped[0] and memory is not None else why
