"""Small functions that several tests on several ranks use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

import mpicoll as dist

__all__ = ["Unloadable", "Unpicklable", "give_up", "neighbours", "run_threads", "sum_of_ranks"]


class Unpicklable:
    """An object that raises when it is pickled."""

    def __reduce__(self) -> Any:
        raise RuntimeError("this one cannot be pickled")


class Unloadable:
    """An object that raises where it is unpickled on one rank."""

    def __init__(self, odd: int) -> None:
        self.odd = odd

    def __reduce__(self) -> Any:
        return _load, (self.odd,)


def _load(odd: int) -> str:
    if dist.get_rank() == odd:
        raise LookupError("this one cannot be unpickled here")
    return "loaded"


def neighbours(group: Any = None) -> tuple[int, int]:
    """Return the group ranks before and after this one on the ring."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    return (rank - 1) % size, (rank + 1) % size


def give_up(group: Any, reason: str) -> None:
    """Give a group up, and forget its messages: one that is never received would rightly be an error when the tests end."""
    group.give_up(reason)
    for each in group.persistent:
        each.count = each.begun = 0
    group._sent.clear()
    group._received.clear()


def sum_of_ranks(group: Any) -> float:
    """Return the sum of the global ranks of a group's members, as the group reduces it."""
    x = np.array([float(dist.get_rank())])
    dist.all_reduce(x, group=group)
    return float(x[0])


def run_threads(function: Callable[[Any], object], values: Iterable[Any]) -> None:
    """Call a function with each of the values, each in a thread of its own, and wait for all threads."""
    threads = [threading.Thread(target=function, args=(value,)) for value in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
