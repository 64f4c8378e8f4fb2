"""The object collectives: any picklable Python object, moved as bytes.

A pickle from another rank of the same job is trusted as that rank's program is.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from mpicoll import execution
from mpicoll.checks.agreement import Flags
from mpicoll.checks.call import Call, call_site
from mpicoll.engines.base import Kind, Movement
from mpicoll.errors import ARGUMENT
from mpicoll.groups import ProcessGroup, member_or_warn, no_global_peer, peer_rank

__all__ = ["all_gather_object", "broadcast_object_list"]

_HEADER = 8


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
    *,
    name: str | None = None,
) -> None:
    """Copy the objects of one rank's list into the list of all members.

    Called by all members with the same source and lists of the same length.

    Args:
        object_list: on the source what is sent, on the others a list whose elements are replaced.
        src: global rank of the source (default 0); or ``group_src``, its rank in the group.
        group: the group; default the world.
        device: taken and ignored, as objects travel through host memory.
        name: as in :func:`mpicoll.broadcast`.

    Raises:
        TypeError: not a list; and what pickle raises for an object that cannot be pickled, on the source, while the
            other members raise CollectiveMismatchError (at check level ``full``).
        Others as :func:`mpicoll.broadcast`, but for memory.

    Source: torch.distributed.broadcast_object_list.
    """
    no_global_peer(group, src)
    found = member_or_warn(group, "broadcast_object_list")
    if found is None:
        return
    received: list[Any] = []

    def prepare(g: ProcessGroup) -> _Ready:
        root = peer_rank(g, src, group_src, "src", default=0)
        _need_list(object_list, "object_list")
        at_root = g.rank() == root
        payload = _pickle(object_list) if at_root else None

        def move(flags: Flags) -> Movement:
            buffer = payload if payload is not None else np.empty(flags.block_bytes, np.uint8)
            received.append(buffer)
            return Movement(Kind.BROADCAST, recv=buffer, root=root)

        def after() -> None:
            if not at_root:
                object_list[:] = pickle.loads(received[0].data)

        key = (("root", g.ranks[root]), ("objects", len(object_list)))
        return key, move, after, 0 if payload is None else payload.size

    _run("broadcast_object_list", found, prepare, name)


def all_gather_object(object_list: list[Any], obj: Any, group: Any = None, *, name: str | None = None) -> None:
    """Gather one object of every member into ``object_list`` on all of them.

    Called by all members, with lists of one place for each of them; the objects may be of any kind and size.

    Args:
        object_list: a list with one place for each member, by rank in the group; its elements are replaced.
        obj: this rank's object.
        group: the group; default the world.
        name: as in :func:`mpicoll.broadcast`.

    Raises:
        TypeError, ValueError: not a list, or of another length; and what pickle raises for an object that cannot be
            pickled, on that rank, while the other members raise CollectiveMismatchError (at check level ``full``).
        Others as :func:`mpicoll.broadcast`, but for memory.

    Source: torch.distributed.all_gather_object.
    """
    found = member_or_warn(group, "all_gather_object")
    if found is None:
        return
    received: list[Any] = []

    def prepare(g: ProcessGroup) -> _Ready:
        _need_list(object_list, "object_list")
        if len(object_list) != g.size():
            raise ValueError(
                f"object_list must have one place for each of the {g.size()} ranks, got {len(object_list)}"
            )
        payload = _pickle(obj)

        def move(flags: Flags) -> Movement:
            # Every block is as long as the longest, behind the length of what it holds.
            send = np.zeros(_HEADER + flags.block_bytes, np.uint8)
            send[:_HEADER] = np.frombuffer(payload.size.to_bytes(_HEADER, "little"), np.uint8)
            send[_HEADER : _HEADER + payload.size] = payload
            received.append(np.empty((g.size(), send.size), np.uint8))
            return Movement(Kind.ALL_GATHER, send=send, recv=received[0].reshape(-1))

        def after() -> None:
            for i, row in enumerate(received[0]):
                length = int.from_bytes(row[:_HEADER].tobytes(), "little")
                object_list[i] = pickle.loads(row[_HEADER : _HEADER + length].data)

        return (("objects", 1),), move, after, payload.size

    _run("all_gather_object", found, prepare, name)


_Ready = tuple[tuple[Any, ...], Callable[[Flags], Movement], Callable[[], None], int]


def _run(op: str, group: ProcessGroup, prepare: Callable[[ProcessGroup], _Ready], name: str | None) -> None:
    site = call_site()
    execution.enter(group, op)
    try:
        execution.check_name(name)
        key, move, after, size = prepare(group)
    except Exception as error:
        setattr(error, ARGUMENT, True)
        execution.run(group, Call(op, (), site, error=error), None, outputs=[])
        raise AssertionError("a call with wrong arguments always raises") from error
    if name is not None:
        key = (*key, ("name", name))
    execution.run(group, Call(op, key, site, block_bytes=size), move, outputs=[], after=after)


def _need_list(value: Any, name: str) -> None:
    if not isinstance(value, list):
        raise TypeError(
            f"Invalid function argument. Expected parameter `{name}` of type list but got {type(value).__name__} instead."
        )


def _pickle(value: Any) -> Any:
    return np.frombuffer(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), np.uint8)
