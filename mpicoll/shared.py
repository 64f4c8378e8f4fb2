"""Memory that the processes of a node share: files in memory, with their pages reserved before anybody touches them."""

from __future__ import annotations

import os
import secrets

__all__ = ["create", "path_of", "reserve"]

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
    try:
        os.ftruncate(descriptor, size)
        reserve(descriptor, 0, size if reserved is None else reserved)
    except OSError as error:
        os.close(descriptor)
        os.unlink(path)
        return -1, "", f"{error.strerror} ({size >> 10} KiB in {DIRECTORY})"
    return descriptor, path, ""


def reserve(descriptor: int, start: int, size: int) -> None:
    """Give a part of a file its pages, on the memory of the core that asks.

    After ftruncate alone, a full tmpfs kills by SIGBUS whoever touches the memory first.

    Raises:
        OSError: there is not so much.
    """
    os.posix_fallocate(descriptor, start, size)
