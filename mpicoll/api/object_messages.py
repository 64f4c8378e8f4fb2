"""Send and receive lists of objects: send_object_list and recv_object_list."""

from __future__ import annotations

from typing import Any

from mpicoll.groups.registry import need_member, peer_rank
from mpicoll.memory.pickled import need_list
from mpicoll.operations import execution
from mpicoll.operations.object_messages import receive_list, send_list
from mpicoll.operations.prepare.messages import refuse_self, source_rank
from mpicoll.runtime.settings import need_bool


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Any = None,
    device: Any = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
) -> None:
    """Send the objects of a list to one rank; return when the objects may be changed again.

    Only this rank calls this function; the destination calls :func:`recv_object_list` with a list of the same length. Objects
    may have any type and size. A list of up to about 4,000 bytes may be sent before it is received; a larger list is not.
    Arrays of 16 KiB and more are sent without a copy.

    Args:
        object_list: the objects to send.
        dst: global rank of the destination; or ``group_dst``, its rank in the group.
        group: the group; default the world.
        device, use_batch: accepted and ignored, as all objects move in one way through host memory.
        weights_only: accepted and ignored, as the receiver loads the objects.

    Raises:
        TypeError: not a list.
        ValueError: the destination is this rank itself, or one of both is not in the group.
        Exception: as pickle raises for an object that cannot be pickled.
        Others as :func:`mpicoll.send`.

    Source: torch.distributed.send_object_list.
    """
    found = need_member(group)
    peer = peer_rank(found, dst, group_dst, "dst")
    refuse_self(found, peer, "destination")
    need_list(object_list, "object_list")
    execution.enter(found, "send_object_list")
    send_list(found, object_list, peer)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
) -> int:
    """Receive objects into a list; return the global rank of the sender.

    Only this rank calls this function; the source calls :func:`send_object_list` with a list of the same length. Each array
    inside an object is received into memory of its own, and is writable unless it was read-only on the source.

    Args:
        object_list: a list whose elements are replaced.
        src: global rank of the source; or ``group_src``, its rank in the group; neither: any member (an error in torch).
        group: the group; default the world.
        device, use_batch: accepted and ignored, as in :func:`send_object_list`.
        weights_only: load the objects only if they hold data, as in :func:`broadcast_object_list`.

    Raises:
        TypeError: not a list.
        ValueError: the source is this rank itself, or one of both is not in the group.
        CollectiveMismatchError: the message is a list of another length, or an array; another receive can still get the
            message, and the group can be used.
        Exception: as pickle raises for an object that cannot be unpickled (pickle.UnpicklingError: with ``weights_only`` the
            objects hold other things than data); the message is lost, the list is unchanged.
        Others as :func:`mpicoll.recv`.

    Source: torch.distributed.recv_object_list.
    """
    found = need_member(group)
    peer = source_rank(found, src, group_src)
    refuse_self(found, peer, "source")
    need_list(object_list, "object_list")
    weights_only = need_bool(weights_only, "weights_only")
    execution.enter(found, "recv_object_list")
    object_list[:], source = receive_list(found, len(object_list), peer, weights_only)
    return int(found.ranks[source])
