"""Send and receive lists of objects: send_object_list and recv_object_list.

An ordinary message with tag 0 carries the length of the list and the head of its pickle (``memory.pickled``). The rest of a
long head and the buffers follow in synchronous messages on the control communicator. Their tag depends on the number of the
list, so that several threads may receive at a time.
"""

from __future__ import annotations

import os
import struct
from typing import Any

import numpy as np

from mpicoll.checks.memory_in_use import check_read
from mpicoll.diagnosis.call import CallDescription
from mpicoll.errors import DistError
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.groups.registry import need_member, peer_rank
from mpicoll.memory import pickled
from mpicoll.memory.pickled import HEADER, IncomingObject, Packed, WireError, need_list
from mpicoll.operations import execution
from mpicoll.operations.failures import begun
from mpicoll.operations.operation import Operation, misfit, receiving
from mpicoll.operations.prepare_messages import refuse_self, source_rank
from mpicoll.runtime import signals, waiting
from mpicoll.runtime.call_site import call_site
from mpicoll.runtime.settings import need_bool
from mpicoll.runtime.waiting import Steps
from mpicoll.transports.mpi.collectives import AllRequests, Post, library_tag, post_all
from mpicoll.transports.mpi.envelope import SMALL_BYTES, describe_list, write
from mpicoll.transports.mpi.matching import OBJECT_TAGS, ObjectReceive

_KIND = b"M"
_TAG = 0
_LENGTH = struct.Struct("=q")
_INSIDE = SMALL_BYTES - _LENGTH.size
_MOST = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # bytes of memory of this machine: no object is larger


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
    operation = _start_send(found, pickled.pack(object_list), len(object_list), peer)
    operation.complete(found.timeout)


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
    operation, arrived = _start_recv(found, len(object_list), peer)
    operation.complete(found.timeout)
    source = int(found.ranks[operation.returned])
    object_list[:] = arrived[0].load(f"recv_object_list: the list of rank {source}", weights_only)
    return source


def _call(op: str, group: ProcessGroup, length: int, peer: int) -> CallDescription:
    other = f"rank {group.ranks[peer]}" if peer >= 0 else "any rank"
    key = (("to " if op == "send" else "from ") + other, ("tag", _TAG), ("objects", length))
    return CallDescription(op, key, call_site(), alias=f"{op}_object_list")


def _start_send(group: ProcessGroup, packed: Packed, length: int, peer: int) -> Operation:
    call = _call("send", group, length, peer)
    if group.compares:
        check_read(call.name, call.site, packed.parts, group.gone, group.display)
    with signals.guard, group.posting:
        number = group.objects_sent[peer] = group.objects_sent.get(peer, 0) + 1
        prefix = packed.prefix(_KIND, number)
        first = _first_bytes(packed.head_bytes)
        inside = np.empty(_LENGTH.size + first, np.uint8)
        _LENGTH.pack_into(inside.data, 0, length)
        packed.block(prefix, inside[_LENGTH.size :])
        message = write(inside, "", *group.known_sites.place(peer, _TAG, call.name, call.site), objects=True)
        rest = [*packed.rest(prefix, first), *pickled.pieces(packed.parts)]
        held = message, rest
        with begun(group, call, group.timeout, held, peer=group.ranks[peer], tag=_TAG):
            control, tag = group.pair.control, _tag_of(number)
            posts: list[Post] = [(group.pair.data.Isend, message, peer, _TAG)]
            posts += [(control.Issend, piece, peer, tag) for piece in rest]
            requests = post_all(posts)
            group.count_sent(peer, _TAG)
            waiting.transfer_hint(sum(piece.nbytes for piece in rest))
            steps = execution.sending(AllRequests(requests, held))
            where = group.ranks[peer]
            return Operation(group, call, steps, [], group.timeout, peer=where, tag=_TAG)


def _start_recv(group: ProcessGroup, length: int, peer: int) -> tuple[Operation, list[IncomingObject]]:
    call = _call("recv", group, length, peer)
    with signals.guard, group.posting:
        receiver = group.pair.receiver
        where = group.ranks[peer] if peer >= 0 else -1
        receive = ObjectReceive(receiver, length, peer, _TAG, group.objects_received)
        with begun(group, call, group.timeout, receive, peer=where, tag=_TAG):
            receiver.begin(receive)
            arrived: list[IncomingObject] = []
            steps = _receiving(group, call, receive, arrived)
            return receiving(group, call, receive, steps, [], group.timeout), arrived


def _receiving(
    group: ProcessGroup, call: CallDescription, receive: ObjectReceive, arrived: list[IncomingObject]
) -> Steps:
    try:
        yield receive
        if receive.refused is not None:
            raise misfit(group, call, receive, receive.refused, describe_list(receive.length))
        block = receive.memory.flat[_LENGTH.size :]
        header = pickled.read_header(block, _KIND, receive.number, _MOST, _MOST)
        first = _first_bytes(header.head_bytes)
        incoming = IncomingObject(block[:first], header)
        yield from _rest(group, receive, incoming.rest(first))
        incoming.open()
        yield from _rest(group, receive, pickled.pieces(incoming.parts))
    except WireError as error:
        group.count_received(receive.sender, _TAG)
        group.give_up(f"the bytes received for {call.name} are no list of objects")
        raise DistError(
            f"{call.describe()} on group {group.display}, rank {group.ranks[group.rank()]}, at {call.site}: the bytes "
            f"received from rank {group.ranks[receive.sender]} are no list of objects, since {error}"
        ) from error
    receive.receiver.taken(receive)
    group.count_received(receive.sender, _TAG)
    arrived.append(incoming)
    return receive.sender


def _rest(group: ProcessGroup, receive: ObjectReceive, pieces: list[Any]) -> Steps:
    control, tag = group.pair.control, _tag_of(receive.number)
    if pieces:
        waiting.transfer_hint(sum(piece.nbytes for piece in pieces))
        yield AllRequests(post_all((control.Irecv, piece, receive.sender, tag) for piece in pieces))


def _first_bytes(head: int) -> int:
    """Return the number of bytes of the head in the message."""
    return head if head <= _INSIDE else HEADER.size


def _tag_of(number: int) -> int:
    return library_tag(16 + number % OBJECT_TAGS)
