"""Move memory of GPUs in a call that all members are known to make: as it is, in pieces, through the host, or reduced there."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mpicoll.diagnosis.call import Call
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.memory.device import array as device_array
from mpicoll.memory.device.addresses import DeviceAddresses
from mpicoll.operations.failures import BlockingCall
from mpicoll.operations.schedules import open_memory
from mpicoll.runtime import waiting
from mpicoll.runtime.waiting import Pollable, Steps
from mpicoll.transports import large_counts
from mpicoll.transports.base import Movement, piece_elements
from mpicoll.transports.control import Agreed
from mpicoll.transports.selection import NEVER

if TYPE_CHECKING:
    from mpi4py import MPI


def on_gpu(move: Movement) -> list[DeviceAddresses]:
    return [array for array in (move.send, move.recv) if isinstance(array, DeviceAddresses)]


def device_test(call: Call, move: Any, ready: Callable[[], bool] | None) -> Callable[[], bool] | None:
    """Return what asks whether this rank's GPU has come to a call; None where no array is on one."""
    if call.device_reduction is not None:
        ready_now: Callable[[], bool] = call.device_reduction.is_ready
        return ready_now
    if call.device and isinstance(move, Movement):
        return lambda: all(map(device_array.is_ready, on_gpu(move)))
    return ready


def is_ready() -> bool:
    """Whether this rank's GPU has come to a call for which it has none, and others do."""
    return True


def is_permitted(move: Movement, agreed: Agreed) -> bool:
    """Return whether MPI takes memory of a GPU in the form that all members use now."""
    return not agreed.nonblocking or device_array.permits(move.kind.value, True)


def in_pieces(
    group: ProcessGroup, call: Call, move: Movement, agreed: Agreed, limit: float, largest: int
) -> Generator[Pollable, None, bool]:
    """Move in pieces, as somebody's memory is a GPU's and goes by way of the host; return whether that was done.

    All members know alike whether it is done, and how large the pieces are. Where MPI reduces and the order of the ranks
    matters, they are those of an array of the host, and so the bits of the result: it may be the whole.
    """
    from mpicoll.transports.device import staged

    rank, size, data = group.rank(), group.size(), group.pair.data
    engine = group.pair.native
    # What is reduced goes through shared memory as the largest arrays do: there pieces of any size give the same bits.
    node = group.pair.through(move.kind, NEVER if move.op else agreed.block_bytes)
    if node is not None:
        yield from open_memory(group, node)
        if not node.usable:
            node = None
    most = staged.PIECE_BYTES
    if node is None and staged.rank_order_matters(move):
        if agreed.nonblocking and not large_counts.exceeds_count(move, size, agreed.block_bytes):
            return False
        most = largest
    most = min(most, large_counts.COUNT_LIMIT)
    buffer = move.recv if move.recv is not None else move.send
    assert buffer is not None
    block = piece_elements(move, buffer.itemsize, size, most) * buffer.itemsize

    def moved(piece: Movement) -> Steps:
        if node is not None:
            waiting.transfer_hint(most)
            yield from node.steps(piece, min(block, agreed.block_bytes))
        elif agreed.nonblocking:
            waiting.transfer_hint(most)
            yield engine.nonblocking(piece)
        else:
            yield data.Ibarrier()  # a member whose GPU is late, or has failed, does not come
            with BlockingCall(group, call, limit):
                engine.blocking(piece)

    yield from staged.move_pieces(move, rank, size, agreed.block_bytes, most, moved)
    return True


def on_device(call: Call, comm: MPI.Intracomm, agreed: Agreed) -> Generator[Pollable, None, bool]:
    """Reduce on the GPU that all members share, which all have offered; whether that was done, the same on all."""
    if agreed.block_bytes != call.block_bytes:  # at check level "off" nobody compares them
        raise ValueError(f"{call.describe()}: another rank passes an array of another size")
    waiting.transfer_hint(agreed.block_bytes)
    done: bool = yield from call.device_reduction.steps(comm)
    return done


def by_host(move: Movement, after: Callable[[], None] | None) -> tuple[Movement, Callable[[], None] | None]:
    """Return a movement through the host, if MPI takes no memory of a GPU in the nonblocking form of the call."""
    send, recv = move.send, move.recv
    steps = [] if after is None else [after]
    if isinstance(send, DeviceAddresses):
        send, pack, _ = device_array.on_host(send)
        pack()
    if isinstance(recv, DeviceAddresses):
        recv, pack, unpack = device_array.on_host(recv)
        if move.reads_recv:
            pack()
        steps.insert(0, unpack)

    def then() -> None:
        for step in steps:
            step()

    return replace(move, send=send, recv=recv), then
