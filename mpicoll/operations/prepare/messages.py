"""Prepare messages: check arguments, claim memory, start messages the general way, and make persistent ones.

Here is what a message does for the first time, and each time if there is no persistent request for it.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import numpy as np

from mpicoll.checks.memory_in_use import Claim, claims
from mpicoll.diagnosis.call import CallDescription
from mpicoll.groups import registry
from mpicoll.groups.communicators import MpiError
from mpicoll.groups.process_group import MessageCache, ProcessGroup
from mpicoll.groups.registry import peer_rank
from mpicoll.memory.adapt import adapt, viewed
from mpicoll.memory.dtypes import dtype_name, is_native
from mpicoll.memory.memory import AnyArray, Array, Memory, StreamOrder
from mpicoll.operations import execution
from mpicoll.operations.failures import begun
from mpicoll.operations.operation import Operation, describe_message, receive_operation
from mpicoll.operations.work import Work
from mpicoll.runtime import signals, waiting
from mpicoll.runtime.call_site import call_site
from mpicoll.transports.mpi.collectives import library_tag
from mpicoll.transports.mpi.envelope import SMALL_BYTES, WORDS, element_name, first_word, has_number, write
from mpicoll.transports.mpi.messages import ANY_SOURCE, Busy, PersistentReceive, PersistentSend, post_send

MOST = 128
"""Number of persistent sends, and of persistent receives, of a group; each takes 6 KiB at most, but for ``packed`` memory."""

_MOST_SEEN = 1024
_RARELY = 8
_misses = itertools.count()


def source_rank(group: ProcessGroup, src: int | None, group_src: int | None) -> int:
    """Return the rank in the group of the source, or ANY_SOURCE."""
    if src is None and group_src is None:
        return ANY_SOURCE
    return peer_rank(group, src, group_src, "src")


def refuse_self(group: ProcessGroup, peer: int, end: str) -> None:
    """Raise ValueError (text of torch) if the peer of a blocking message is this rank.

    Args:
        end: of the message at the peer: source or destination.
    """
    if peer == group.rank():
        raise ValueError(f"Invalid {end} rank: {end} rank should not be the same as the rank of the current process.")


def check_tag(tag: Any) -> None:
    """Raise TypeError or ValueError unless a tag is an integer in the range of programs."""
    if not hasattr(tag, "__index__") or isinstance(tag, bool):
        raise TypeError(f"tag must be an integer, not {type(tag).__name__}")
    limit = library_tag(32)  # the library uses the 32 largest tags
    if not 0 <= tag <= limit:
        raise ValueError(f"tag must be between 0 and {limit} (MPI_TAG_UB - 32), got {tag}")


def receive_at_once(group: ProcessGroup, tensor: Any, peer: int, tag: Any) -> int | None:
    """Receive a message of few elements that has arrived, or arrives soon; return its sender, or None with nothing received.

    Args:
        peer: rank in the group, or ANY_SOURCE.
    """
    if waiting.pending or claims.active or type(tensor) is not np.ndarray or type(tag) is not int:
        return None
    if tensor.nbytes > SMALL_BYTES or not tensor.flags.carray or not is_native(tensor.dtype):
        return None
    check_tag(tag)
    execution.enter(group, "recv")
    expected, found = first_word(tensor.dtype, tensor.size), -1

    def takes(source: int, buffer: Array) -> bool:
        nonlocal found
        word, _ = WORDS.unpack_from(buffer.data)
        if word != expected:
            return False
        tensor.reshape(-1).view(np.uint8)[...] = buffer[WORDS.size :]
        group.count_received(source, tag)
        found = source
        return True

    with signals.guard:
        try:
            group.pair.receiver.take_at_once(peer, tag, takes)
        except BaseException:
            key = describe_message(group, dtype_name(tensor.dtype), tensor.size, peer, tag, receives=True)
            where = group.ranks[peer] if peer >= 0 else -1
            with begun(group, CallDescription("recv", key, call_site()), group.timeout, tensor, peer=where, tag=tag):
                raise
    return found if found >= 0 else None


signals.guard.inside.add(receive_at_once.__code__)


def start_send(
    name: str, group: ProcessGroup, tensor: AnyArray, peer: int, tag: int, limit: float, stream: Any
) -> tuple[Operation, Claim | None]:
    """Start a send the general way; return its operation, and its claim of memory unless the send is blocking.

    Args:
        name: of the public function.
        peer: rank in the group.
    """
    memory, call, claim = _prepare(name, group, tensor, peer, tag, stream, direct="send")
    with signals.guard, group.posting:
        if claim is not None:
            claim.snapshot_reads()
        flat = memory.filled()
        message = write(flat, memory.named, *group.known_sites.place(peer, tag, name, call.site, memory))
        with begun(group, call, limit, (message, flat), peer=group.ranks[peer], tag=tag):
            request = post_send(group.pair.control, group.pair.data, message, flat, peer, tag)
            group.count_sent(peer, tag)
            waiting.transfer_hint(flat.nbytes)
            steps = execution.sending(request)
            return Operation(group, call, steps, [tensor], limit, peer=group.ranks[peer], tag=tag), claim


def start_receive(
    name: str, group: ProcessGroup, tensor: AnyArray, peer: int, tag: int, limit: float, stream: Any
) -> tuple[Operation, Claim | None]:
    """Start a receive the general way; arguments and result as in :func:`start_send`, and ``peer`` may be ANY_SOURCE."""
    # A message that is not compared may be smaller than the array, and stand in its envelope.
    memory, call, claim = _prepare(
        name, group, tensor, peer, tag, stream, direct="recv" if group.compares else "", writes=True
    )
    if memory.direct:
        memory.filled()  # MPI writes there as soon as the message arrives
    with signals.guard, group.posting:
        source = group.ranks[peer] if peer >= 0 else -1
        with begun(group, call, limit, memory, peer=source, tag=tag):
            receive = group.pair.receiver.start(memory, peer, tag, exact=group.compares)
            if claim is not None:
                receive.watch(claim)
            return receive_operation(group, call, memory, receive, tensor, limit), claim


def _prepare(
    name: str,
    group: ProcessGroup,
    tensor: AnyArray,
    peer: int,
    tag: int,
    stream: Any,
    direct: str,
    *,
    writes: bool = False,
) -> tuple[Memory, CallDescription, Claim | None]:
    """Check the arguments of a message; return its memory, its description, and its claim.

    Args:
        direct: as in ``adapt``.
        writes: the message is received.
    """
    with StreamOrder(stream):
        memory = adapt(tensor, "tensor", writable=writes, direct=direct, nonblocking=True)
    check_tag(tag)
    execution.enter(group, name)
    parts = describe_message(group, memory.name, memory.flat.size, peer, tag, receives=writes)
    call = CallDescription(name, parts, call_site())
    return memory, call, _claim(group, call, memory, writes)


def _claim(group: ProcessGroup, call: CallDescription, memory: Memory, writes: bool) -> Claim | None:
    """Compare the memory of a message with active claims; return its claim, or None for a blocking message.

    Raises:
        BufferInUseError: a pending operation uses the memory.
    """
    blocking = call.op in ("send", "recv")
    if not group.compares or (blocking and not claims.active):
        return None
    arrays, nothing = [memory.own], ()
    reads, written = (nothing, arrays) if writes else (arrays, nothing)
    claim = Claim(call.op, call.site, reads=reads, writes=written, gone=group.gone, group=group.display)
    claims.check(claim)
    if blocking:
        claim.clear()
        return None
    return claim


def learn(group: ProcessGroup, peer: int, tensor: Any, rank: Any, tag: Any, *, receives: bool) -> None:
    """Note a message that was made the general way; made a second time, it gets a persistent request.

    Args:
        peer: rank in the group.
        rank, tag: as the program gave them.
        receives: the message was received.
    """
    if type(rank) is not int or type(tag) is not int or peer == group.rank():
        return
    array = tensor if type(tensor) is np.ndarray else viewed(tensor) if type(tensor).__module__ == "torch" else None
    if type(array) is not np.ndarray:
        return
    dtype = array.dtype if array.dtype.isnative else array.dtype.newbyteorder("=")
    if not has_number(dtype):
        return
    if not registry.state().thread_multiple or group.broken is not None:
        return
    key = (rank, tag, array.shape, dtype)
    seen = (receives, *key)
    if seen not in group.seen:
        if len(group.seen) >= _MOST_SEEN:
            group.seen.clear()
        group.seen.add(seen)
        return
    cache: MessageCache = group.receives if receives else group.sends
    if key in cache:
        return
    with signals.guard, group.posting:
        if len(cache) >= MOST:
            # A program with ever new tags would make and free one in every call.
            if next(_misses) % _RARELY:
                return
            oldest = next(iter(cache))
            with group.pair.receiver.lock:  # a receive is posted under it, if it has not been dropped by then
                if group.pair.receiver.posted:
                    return
                try:
                    cache[oldest].take()
                except Busy:
                    return
                dropped = cache.drop(oldest)
            group.retire(dropped)
        kind = PersistentReceive if receives else PersistentSend
        made = kind(group.pair.control, group.pair.data, rank, peer, tag, array.shape, dtype)
        made.described = describe_message(group, element_name(dtype), array.size, peer, tag, receives=receives)
        made.compares = group.compares
        if isinstance(made, PersistentReceive):
            made.attach(group.pair.receiver)
        else:
            made.acquire, made.release = group.posting.acquire, group.posting.release
        group.persistent.append(made)
        cache[key] = made


def learn_pending(work: Work, *given: Any, receives: bool) -> None:
    """Learn a message that is pending: no exception may lose its Work. Other arguments as in :func:`learn`."""
    try:
        learn(*given, receives=receives)
    except MpiError:
        pass  # MPI made no request: the next message goes the general way, too
    except BaseException:
        work.get_future()
        raise


def _forget_in_child() -> None:
    known = registry.current()
    if known is not None:
        for group in known.groups.values():
            group.sends, group.receives = MessageCache(), MessageCache()


os.register_at_fork(after_in_child=_forget_in_child)
