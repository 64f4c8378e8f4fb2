"""Lists of objects as messages: the steps of send_object_list and recv_object_list.

An ordinary message with tag 0 carries the length of the list and the head of its pickle (``memory.pickled``). The rest of a
long head and the buffers follow in synchronous messages on the control communicator. Their tag depends on the number of the
list, so that several threads may receive at a time.

If no other operation is pending, a list whose whole pickle stands in the message moves in one step, and the steps of other lists
run without an operation if they end soon.
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
from mpicoll.memory import pickled
from mpicoll.memory.pickled import HEADER, IncomingObject, Packed, WireError
from mpicoll.operations import execution
from mpicoll.operations.failures import begun
from mpicoll.operations.operation import Operation, misfit, receiving, soon
from mpicoll.runtime import signals, waiting
from mpicoll.runtime.call_site import CallSite, call_site
from mpicoll.runtime.waiting import Steps
from mpicoll.transports.mpi.collectives import AllRequests, Post, library_tag, post_all
from mpicoll.transports.mpi.envelope import SMALL_BYTES, describe_list, list_in, write, write_list
from mpicoll.transports.mpi.matching import OBJECT_TAGS, ObjectReceive

_KIND = b"M"
_SEND = "send_object_list"
_TAG = 0
_LENGTH = struct.Struct("=q")
_INSIDE = SMALL_BYTES - _LENGTH.size
_MOST = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # bytes of memory of this machine: no object is larger


def send_list(group: ProcessGroup, objects: list[Any], peer: int) -> None:
    """Send a list of objects; errors as ``send_object_list``.

    Args:
        peer: rank of the destination in the group.
    """
    stream, parts = pickled.stream_of(objects)
    site = call_site()
    place = group.known_sites.known(peer, _TAG, _SEND, site)
    if parts or place is None or HEADER.size + len(stream) > _INSIDE:
        operation = _start_send(group, Packed(stream, parts), len(objects), peer, site)
    else:
        operation = _send_in_one(group, stream, len(objects), peer, site, place)
    if operation is not None:
        operation.complete(group.timeout)


def receive_list(group: ProcessGroup, length: int, peer: int, weights_only: bool) -> tuple[list[Any], int]:
    """Receive a list of objects of a given length; return the list and the rank in the group that sent the list.

    Args:
        peer: rank of the source in the group; negative for any rank.
        weights_only: load the objects only if they hold data.
    """
    stream, parts, source = _receive_in_one(group, length, peer) or _receive(group, length, peer)
    whose = f"recv_object_list: the list of rank {group.ranks[source]}"
    return pickled.load(stream, parts, whose, weights_only), source


def _call(op: str, group: ProcessGroup, length: int, peer: int, site: CallSite) -> CallDescription:
    other = f"rank {group.ranks[peer]}" if peer >= 0 else "any rank"
    key = (("to " if op == "send" else "from ") + other, ("tag", _TAG), ("objects", length))
    return CallDescription(op, key, site, alias=f"{op}_object_list")


def _send_in_one(
    group: ProcessGroup, stream: bytes, length: int, peer: int, site: CallSite, place: int
) -> Operation | None:
    """Send a list whose pickle stands in one message; return its operation if MPI has not sent the message soon.

    Args:
        stream: the pickle, which has no buffers.
        place: number of the call site, which the receiver knows.
    """
    message = b""
    with signals.guard:
        try:
            with group.posting:
                number = group.objects_sent[peer] = group.objects_sent.get(peer, 0) + 1
                header = pickled.header_of(_KIND, number, 0, len(stream), 0)
                message = write_list(place, _LENGTH.pack(length) + header + stream)
                requests = AllRequests(post_all(((group.pair.data.Isend, message, peer, _TAG),)), message)
                group.count_sent(peer, _TAG)
            return None if requests.Test() else _operation_of_send(group, requests, length, peer, site)
        except BaseException:
            call = _call("send", group, length, peer, site)
            with begun(group, call, group.timeout, message, peer=group.ranks[peer], tag=_TAG):
                raise


def _receive_in_one(group: ProcessGroup, length: int, peer: int) -> tuple[memoryview, list[Any], int] | None:
    """Receive a list whose pickle stands in one message that has arrived, or arrives soon.

    Returns:
        The pickle, no buffers, and the rank of the sender; None, with nothing received, if no such list arrives soon, or another
        receive may get the message.
    """
    if waiting.pending:
        return None
    counts = group.objects_received
    found: list[tuple[memoryview, list[Any], int]] = []

    def takes(source: int, buffer: Any) -> bool:
        content = list_in(buffer)
        if content is None:
            return False
        number = counts.get(source, 0) + 1
        start = _LENGTH.size + HEADER.size
        expected = _LENGTH.pack(length) + pickled.header_of(_KIND, number, 0, len(content) - start, 0)
        if content[:start] != expected:
            return False  # another length, or more than this message
        counts[source] = number
        found.append((content[start:], [], source))
        return True

    with signals.guard:
        if not group.pair.receiver.take_at_once(peer, _TAG, takes):
            return None
        group.count_received(found[0][2], _TAG)
    return found[0]


def _start_send(group: ProcessGroup, packed: Packed, length: int, peer: int, site: CallSite) -> Operation | None:
    """Send a list of any size; return its operation if the list is not received soon."""
    call = _call("send", group, length, peer, site)
    if group.compares:
        check_read(call.name, call.site, packed.parts, group.gone, group.display)
    held: list[Any] = []
    with signals.guard, begun(group, call, group.timeout, held, peer=group.ranks[peer], tag=_TAG):
        with group.posting:
            number = group.objects_sent[peer] = group.objects_sent.get(peer, 0) + 1
            prefix = packed.prefix(_KIND, number)
            first = _first_bytes(packed.head_bytes)
            inside = np.empty(_LENGTH.size + first, np.uint8)
            _LENGTH.pack_into(inside.data, 0, length)
            packed.block(prefix, inside[_LENGTH.size :])
            message = write(inside, "", *group.known_sites.place(peer, _TAG, _SEND, call.site), objects=True)
            rest = [*packed.rest(prefix, first), *pickled.pieces(packed.parts)]
            held += message, rest
            control, tag = group.pair.control, _tag_of(number)
            posts: list[Post] = [(group.pair.data.Isend, message, peer, _TAG)]
            posts += [(control.Issend, piece, peer, tag) for piece in rest]
            requests = AllRequests(post_all(posts), held)
            group.count_sent(peer, _TAG)
        waiting.transfer_hint(sum(piece.nbytes for piece in rest))
        return _operation_of_send(group, requests, length, peer, site)


def _operation_of_send(
    group: ProcessGroup, requests: AllRequests, length: int, peer: int, site: CallSite
) -> Operation | None:
    over, steps = soon(execution.sending(requests))
    if over:
        return None
    call = _call("send", group, length, peer, site)
    return Operation(group, call, steps, [], group.timeout, peer=group.ranks[peer], tag=_TAG)


def _receive(group: ProcessGroup, length: int, peer: int) -> tuple[memoryview, list[Any], int]:
    """Receive a list of any size; result as of :func:`_receive_in_one`."""
    call = _call("recv", group, length, peer, call_site())
    arrived: list[IncomingObject] = []
    operation = None
    with signals.guard, group.posting:
        receiver = group.pair.receiver
        where = group.ranks[peer] if peer >= 0 else -1
        receive = ObjectReceive(receiver, length, peer, _TAG, group.objects_received)
        with begun(group, call, group.timeout, receive, peer=where, tag=_TAG):
            receiver.begin(receive)
            over, steps = False, _receiving(group, call, receive, arrived)
            if receive.complete:
                over, steps = soon(steps)
            if not over:
                operation = receiving(group, call, receive, steps, [], group.timeout)
    if operation is not None:
        operation.complete(group.timeout)
    return arrived[0].stream, arrived[0].parts, receive.sender


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
