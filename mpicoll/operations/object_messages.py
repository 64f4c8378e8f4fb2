"""Lists of objects as messages: the steps of send_object_list and recv_object_list.

An ordinary message with tag 0 carries the length of the list and the head of its pickle (``memory.pickled``). The rest of a
long head and the buffers follow in synchronous messages on the control communicator. Their tag depends on the number of the
list, so that several threads may receive at a time.

If no other operation is pending, a list is received at once if its first message has arrived, and its steps run without an
operation if they end soon.
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
from mpicoll.memory.pickled import HEADER, Bytes, IncomingObject, WireError
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
    site, length = call_site(), len(objects)
    if parts and group.compares:
        check_read(_SEND, site, parts, group.gone, group.display)
    held: list[Any] = []
    operation = None
    with signals.guard:
        try:
            with group.posting:
                requests, moves = _post(group, stream, parts, length, peer, site, held)
            if not requests.Test():  # a short list is sent by then, as a rule
                waiting.transfer_hint(moves)
                over, steps = soon(execution.sending(requests))
                if not over:
                    call = _call("send", group, length, peer, site)
                    operation = Operation(group, call, steps, [], group.timeout, peer=group.ranks[peer], tag=_TAG)
        except BaseException:
            call = _call("send", group, length, peer, site)
            with begun(group, call, group.timeout, held, peer=group.ranks[peer], tag=_TAG):
                raise
    if operation is not None:
        operation.complete(group.timeout)


def receive_list(group: ProcessGroup, length: int, peer: int, weights_only: bool) -> tuple[list[Any], int]:
    """Receive a list of objects of a given length; return the list and the rank in the group that sent the list.

    Args:
        peer: rank of the source in the group; negative for any rank.
        weights_only: load the objects only if they hold data.
    """
    stream, parts, source = _receive_at_once(group, length, peer) or _receive(group, length, peer)
    whose = f"recv_object_list: the list of rank {group.ranks[source]}"
    return pickled.load(stream, parts, whose, weights_only), source


def _call(op: str, group: ProcessGroup, length: int, peer: int, site: CallSite) -> CallDescription:
    other = f"rank {group.ranks[peer]}" if peer >= 0 else "any rank"
    key = (("to " if op == "send" else "from ") + other, ("tag", _TAG), ("objects", length))
    return CallDescription(op, key, site, alias=f"{op}_object_list")


def _post(
    group: ProcessGroup, stream: bytes, parts: list[Bytes], length: int, peer: int, site: CallSite, held: list[Any]
) -> tuple[AllRequests, int]:
    """Post the messages of a list; return their requests, and the number of bytes that follow the first message.

    Args:
        held: gets what MPI may read until the requests are complete.
    """
    number = group.objects_sent[peer] = group.objects_sent.get(peer, 0) + 1
    sizes = [part.size for part in parts]
    prefix = pickled.header_of(_KIND, number, len(sizes), len(stream), sum(sizes))
    if parts:
        prefix += struct.pack(f"={len(sizes)}q", *sizes)
    rest: list[Any] = []
    if len(prefix) + len(stream) <= _INSIDE:
        inside = _LENGTH.pack(length) + prefix + stream
    else:
        inside = _LENGTH.pack(length) + prefix[: HEADER.size]
        if parts:
            rest.append(prefix[HEADER.size :])
        rest += pickled.pieces([np.frombuffer(stream, np.uint8)])
    rest += pickled.pieces(parts)
    place, text = group.known_sites.place(peer, _TAG, _SEND, site)
    message: Any = write_list(place, inside)
    if text:
        message = write(np.frombuffer(inside, np.uint8), "", place, text, objects=True)
    held += (message, rest)
    control, tag = group.pair.control, _tag_of(number)
    posts: list[Post] = [(group.pair.data.Isend, message, peer, _TAG)]
    posts += [(control.Issend, piece, peer, tag) for piece in rest]
    requests = AllRequests(post_all(posts), held)
    group.count_sent(peer, _TAG)
    return requests, len(prefix) + len(stream) + sum(sizes) if rest else 0


def _receive_at_once(group: ProcessGroup, length: int, peer: int) -> tuple[memoryview, list[Bytes], int] | None:
    """Receive a list whose first message has arrived, or arrives soon; result as of :func:`_receive`.

    Returns:
        None, with nothing received, if no such list arrives soon, or another receive may get the message.
    """
    if waiting.pending:
        return None
    receiver, counts = group.pair.receiver, group.objects_received
    found: list[tuple[memoryview, int]] = []
    longer: list[ObjectReceive] = []

    def takes(source: int, buffer: Any) -> bool:
        content = list_in(buffer)
        if content is None or content[: _LENGTH.size] != _LENGTH.pack(length):
            return False
        number, start = counts.get(source, 0) + 1, _LENGTH.size + HEADER.size
        if content[_LENGTH.size : start] != pickled.header_of(_KIND, number, 0, len(content) - start, 0):
            receive = ObjectReceive(receiver, length, peer, _TAG, counts)
            receive.take(source, content)
            longer.append(receive)
        else:
            counts[source] = number
            group.count_received(source, _TAG)
            found.append((content[start:], source))
        return True

    operation, arrived = None, list[IncomingObject]()
    where = group.ranks[peer] if peer >= 0 else -1
    with signals.guard:
        try:
            if not receiver.take_at_once(peer, _TAG, takes):
                return None
            if longer:
                site = call_site()
                over, steps = soon(_completing(group, longer[0], site, arrived))
                if not over:
                    call = _call("recv", group, length, peer, site)
                    operation = receiving(group, call, longer[0], steps, [], group.timeout)
        except BaseException:
            call = _call("recv", group, length, peer, call_site())
            with begun(group, call, group.timeout, longer, peer=where, tag=_TAG):
                raise
    if found:
        return found[0][0], [], found[0][1]
    if operation is not None:
        operation.complete(group.timeout)
    return arrived[0].stream, arrived[0].parts, longer[0].sender


def _receive(group: ProcessGroup, length: int, peer: int) -> tuple[memoryview, list[Bytes], int]:
    """Receive a list; return its pickle, the buffers, and the rank in the group that sent the list."""
    site = call_site()
    call = _call("recv", group, length, peer, site)
    arrived: list[IncomingObject] = []
    with signals.guard, group.posting:
        receiver = group.pair.receiver
        where = group.ranks[peer] if peer >= 0 else -1
        receive = ObjectReceive(receiver, length, peer, _TAG, group.objects_received)
        with begun(group, call, group.timeout, receive, peer=where, tag=_TAG):
            receiver.begin(receive)
            steps = _receiving(group, call, receive, arrived)
            operation = receiving(group, call, receive, steps, [], group.timeout)
    operation.complete(group.timeout)
    return arrived[0].stream, arrived[0].parts, receive.sender


def _receiving(
    group: ProcessGroup, call: CallDescription, receive: ObjectReceive, arrived: list[IncomingObject]
) -> Steps:
    yield receive
    if receive.refused is not None:
        raise misfit(group, call, receive, receive.refused, describe_list(receive.length))
    return (yield from _completing(group, receive, call.site, arrived))


def _completing(group: ProcessGroup, receive: ObjectReceive, site: CallSite, arrived: list[IncomingObject]) -> Steps:
    """Receive what follows the first message of a list; return the rank of the sender in the group."""
    try:
        block = receive.memory.flat[_LENGTH.size :]
        header = pickled.read_header(block, _KIND, receive.number, _MOST, _MOST)
        first = _first_bytes(header.head_bytes)
        incoming = IncomingObject(block[:first], header)
        yield from _rest(group, receive, incoming.rest(first))
        incoming.open()
        yield from _rest(group, receive, pickled.pieces(incoming.parts))
    except WireError as error:
        call = _call("recv", group, receive.length, receive.source, site)
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


signals.guard.inside.update((send_list.__code__, _receive_at_once.__code__))
