"""Check the names of backends that programs ask for, and warn once in a job about arguments that are not used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpicoll.runtime.settings import warn_caller

_FOREIGN = {"ccl", "gloo", "nccl", "ucc", "xccl"}
_warned: set[str] = set()


def check_backend(backend: Any, is_first: Callable[[], bool]) -> None:
    """Raise ValueError unless MPI can serve ``backend``; warn once if another backend was asked for.

    Args:
        is_first: returns whether this rank is the one that warns.
    """
    if backend is None:
        return
    if not isinstance(backend, str):
        raise ValueError(f"backend must be a string or None, not {type(backend).__name__}")
    if names_in(backend) != {"mpi"}:
        warn_once("backend", f"backend={backend!r}: mpicoll moves everything over MPI instead", is_first)


def names_in(backend: str, argument: str = "") -> set[str]:
    """Return the backends that a string names, as ``"cpu:gloo,cuda:nccl"``; raise ValueError if MPI cannot serve one.

    Args:
        argument: what the error begins with.
    """
    names = {part.rsplit(":", 1)[-1] for part in backend.lower().split(",")}
    if not names <= _FOREIGN | {"mpi"}:
        raise ValueError(f"{argument}Invalid backend {backend!r}: mpicoll has one backend, 'mpi'")
    return names


def warn_once(topic: str, message: str, is_first: Callable[[], bool]) -> None:
    """Warn once in a job: on its first rank."""
    if topic not in _warned:
        _warned.add(topic)
        if is_first():
            warn_caller(message)
