"""Select the transport of a call, by facts that all members know, so that all select the same.

A profile holds limits that ``mpicoll tune`` has measured on a machine, for one MPI and one number of ranks on a node, as JSON.
"""

from __future__ import annotations

import enum
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.memory.device.array import movable_array, on_device, permits
from mpicoll.runtime import native
from mpicoll.runtime.mpi_library import library_name
from mpicoll.runtime.output import say
from mpicoll.transports.base import EAGER_BYTES, SMALL_BYTES, Kind, Movement
from mpicoll.transports.control import AS_IT_IS, IN_PIECES, NO_DEVICE
from mpicoll.transports.device import staged

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.runtime.settings import Settings


NEVER = 1 << 62

Ranges = Sequence[tuple[int, int]]
"""First and last number of bytes of each range, both included."""

_KIB = 1024
DEFAULT: Mapping[Kind, Ranges] = {
    Kind.ALL_REDUCE: ((2 * _KIB + 1, NEVER),),
    Kind.REDUCE: ((2 * _KIB + 1, NEVER),),
    Kind.REDUCE_SCATTER: ((65, NEVER),),
    # To move without a reduction, both MPIs copy once, from the memory of the other process; shared memory needs two copies, but
    # the extension makes the whole call: an all_gather of two blocks of 128 KiB takes 50 us, and 115 to 130 us through MPI.
    # If the kernel copies between the processes, these five have no last size (single_copy_from).
    Kind.BROADCAST: ((2 * _KIB + 1, 4 * 1024 * _KIB),),
    Kind.ALL_GATHER: ((2 * _KIB + 1, 256 * _KIB),),
    Kind.GATHER: ((2 * _KIB + 1, 1024 * _KIB),),
    Kind.SCATTER: ((65, 512 * _KIB),),
    Kind.ALL_TO_ALL: ((65, 256 * _KIB),),
}
"""Bytes of the largest block for which shared memory moves a call, if there is no profile (docs/performance.md).

Only kinds with a row move through shared memory, or are reduced in the order of the ranks: other kinds go through MPI only.
"""

_EXCHANGES = (Kind.ALL_GATHER, Kind.ALL_TO_ALL)


def single_copy_from(oversubscribed: bool) -> Mapping[Kind, int]:
    """Return the bytes of the largest block from which a call copies once, from process to process (measured).

    For a smaller block two copies take less time than system calls and the wait for all members. Ranks that share cores wait
    longer.
    """
    exchange = 512 * _KIB if oversubscribed else 64 * _KIB
    found = dict.fromkeys((Kind.GATHER, Kind.SCATTER), 64 * _KIB) | dict.fromkeys(_EXCHANGES, exchange)
    return {Kind.BROADCAST: 1024 * _KIB + 1, **found}


@dataclass(frozen=True)
class Selection:
    """The rule of selection for the groups of one world, agreed when the world was made.

    Attributes:
        mode: ``auto``, ``mpi`` or ``node``.
        least: smaller calls do not move through shared memory: small calls that are not compared move through MPI.
        ranges: bytes of the largest block for which shared memory moves a call.
        single_copy: bytes of the largest block from which a call copies once; empty if the processes of a node cannot read each
            other's memory.
    """

    mode: str = "auto"
    least: int = 1
    ranges: Mapping[Kind, Ranges] = field(default_factory=lambda: DEFAULT)
    single_copy: Mapping[Kind, int] = field(default_factory=dict)

    def node(self, kind: Kind, nbytes: int) -> bool:
        """Return whether a group on one node moves a call with blocks of ``nbytes`` through shared memory."""
        if self.mode == "mpi" or kind not in DEFAULT or nbytes < self.least:
            return False
        measured = self.ranges is not DEFAULT  # by mpicoll tune, with single copies
        if self.mode == "node" or (self.copies_once(kind, nbytes) and not measured):
            return True
        return any(first <= nbytes <= last for first, last in self.ranges.get(kind, ()))

    def copies_once(self, kind: Kind, nbytes: int) -> bool:
        """Return whether a call with blocks of ``nbytes`` that moves through shared memory copies once."""
        return nbytes >= self.single_copy.get(kind, NEVER)


class Way(enum.Enum):
    """How an agreed call of host memory moves."""

    ROUND = "the round of the call, as of a barrier"
    SHARED_MEMORY = "through shared memory"
    IN_RANK_ORDER = "gathered, and reduced in the order of the ranks"
    NONBLOCKING = "by nonblocking calls of MPI"
    PERSISTENT = "by a persistent call of MPI that is cached for the call"
    BLOCKING = "by blocking calls of MPI, in pieces"


@dataclass(frozen=True, slots=True)
class Facts:
    """What all members know alike of an agreed call and of their group.

    Attributes:
        kind: of the movement.
        size: of the group.
        block_bytes: of the largest block of any member.
        reduces: the movement reduces.
        shared: shared memory moves the call, if its memory is of the host.
        carries_data: data can be sent with a round.
        several: the call has several movements.
        uneven: the blocks may differ in size.
        follows: the movement follows from the agreement.
        exceeds_count: a rank may pass more bytes in one call of MPI than a C int counts.
        nonblocking: a member is asynchronous.
        device: how memory of a GPU moves that is not copied as a whole (:mod:`mpicoll.transports.control`).
        ordered: memory of a GPU moves, and the bits of the result depend on the order of its terms.
    """

    kind: Kind
    size: int
    block_bytes: int
    reduces: bool = False
    shared: bool = False
    carries_data: bool = False
    several: bool = False
    uneven: bool = False
    follows: bool = False
    exceeds_count: bool = False
    nonblocking: bool = False
    device: int = NO_DEVICE
    ordered: bool = False

    @property
    def in_pieces(self) -> bool:
        """Whether all members move pieces through the host, so that copies from and to GPUs overlap.

        If MPI reduces and the order of the ranks matters, the pieces are those of an array of the host, which may be the whole.
        """
        whole = self.ordered and self.nonblocking and not (self.shared or self.exceeds_count)
        return self.device == IN_PIECES and not (self.several or whole)


def select(facts: Facts) -> Way:
    """Return how a call moves: the only place that decides. All members have the same facts, so all get the same way."""
    if facts.kind is Kind.BARRIER:
        return Way.ROUND  # no member sees the end of the round before all have posted it
    if facts.device and facts.in_pieces:
        return Way.SHARED_MEMORY if facts.shared else Way.BLOCKING
    if facts.shared and not facts.device:
        return Way.SHARED_MEMORY
    brings = facts.block_bytes * (facts.size if facts.kind is Kind.REDUCE_SCATTER else 1)
    in_order = facts.reduces and facts.kind in DEFAULT
    if (
        in_order
        and facts.carries_data
        and brings <= EAGER_BYTES
        and not (facts.several or facts.device or facts.uneven)
    ):
        return Way.IN_RANK_ORDER  # as a call whose data comes with the round, so that the result has the same bits
    if facts.nonblocking and not facts.exceeds_count:
        return Way.NONBLOCKING
    if facts.block_bytes <= SMALL_BYTES and not (facts.exceeds_count or facts.device):
        once = facts.uneven or facts.several or facts.follows
        return Way.NONBLOCKING if once else Way.PERSISTENT
    return Way.BLOCKING


def stage(facts: Facts, move: Movement, rank: int, largest: int) -> staged.Staged | None:
    """Return the schedule by which memory of a GPU moves through the host; None if the transport gets memory as it is.

    Args:
        facts, move, rank: of the call, and of this rank in the group.
        largest: most bytes of a native call.
    """
    if facts.in_pieces:
        most = largest if facts.ordered and not facts.shared else min(largest, staged.PIECE_BYTES)
        return staged.StagedInPieces(move, rank, facts.size, facts.block_bytes, most)
    permitted = move.device == AS_IT_IS and (not facts.nonblocking or permits(move.kind.value, True))
    return None if permitted or move.device == NO_DEVICE else staged.Staged(move, facts.block_bytes)


def prefer(group: Any, value: Any, settings: Settings) -> Any:
    """Return the schedule that a reduction of an array may prefer (see :class:`mpicoll.transports.base.Preferred`), or None."""
    if not group.pair.on_node or settings.cuda_ipc == "off" or not on_device(value):
        return None
    from mpicoll.transports.device.ipc import DeviceReduction  # which programs without a GPU do not load

    return DeviceReduction(group.opened, movable_array(value, "tensor", writable=True))


def find_profile(text: str, library: str, ranks: int) -> Mapping[Kind, Ranges] | None:
    """Return the profile of an MPI library from the text of a file, for the nearest number of ranks on a node, or None.

    Raises:
        ValueError: the text is not of a file of profiles.
    """
    try:
        known = list(filter(lambda each: each["MPI"] == library, json.loads(text)["profiles"]))
        if not known:
            return None
        nearest = min(known, key=lambda each: abs(math.log(each["ranks"] / ranks)))
        return {Kind(kind): [_range(*each) for each in ranges] for kind, ranges in nearest["node"].items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"no file of profiles of mpicoll tune: {error!r}") from None


def _range(first: Any, last: Any) -> tuple[int, int]:
    if not isinstance(first, int) or not isinstance(last, (int, type(None))):
        raise TypeError(f"{first!r} to {last!r} are no numbers of bytes")
    return first, NEVER if last is None else last


def add_profile(text: str, library: str, ranks: int, ranges: Mapping[Kind, Ranges], about: Mapping[str, str]) -> str:
    """Return the text of a file of profiles with one more, which replaces the one for the same library and number of ranks."""
    profiles = json.loads(text)["profiles"] if text else []
    profiles = [each for each in profiles if (each["MPI"], each["ranks"]) != (library, ranks)]
    node = {
        kind.value: [[first, None if last == NEVER else last] for first, last in found]
        for kind, found in ranges.items()
    }
    profiles.append({"MPI": library, "ranks": ranks, "node": node, "about": dict(about)})
    return json.dumps({"profiles": profiles}, indent=1) + "\n"


NONE = "none"


def path_of_profiles(setting: str, environ: Mapping[str, str] | None = None) -> Path:
    """Return the path of the profiles: ``MPICOLL_PROFILE``, or ``profiles.json`` in the user's folder for settings."""
    if setting:
        return Path(setting).expanduser()
    env = os.environ if environ is None else environ
    return Path(env.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "mpicoll" / "profiles.json"


def share_profile(comm: MPI.Intracomm, setting: str, ranks: int) -> Mapping[Kind, Ranges] | None:
    """Return the profile that rank 0 reads for this MPI and the nearest number of ranks on a node, or None.

    All ranks of ``comm`` call this function, and are known to (it uses blocking MPI calls). If the file cannot be read, rank 0
    writes a line to stderr, and the defaults count.
    """
    from mpi4py import MPI

    found = None
    if comm.Get_rank() == 0 and setting != NONE:
        path = path_of_profiles(setting)
        try:
            found = find_profile(path.read_text(), library_name(MPI.Get_library_version()), ranks)
        except FileNotFoundError as error:
            if setting:
                say(f"mpicoll: MPICOLL_PROFILE={setting}: {error.strerror}\n")
        except (OSError, RuntimeError, ValueError) as error:
            say(f"mpicoll: {path}: {error}\n")
    shared: Mapping[Kind, Ranges] | None = comm.bcast(found, 0)
    return shared


def share_single_copy(comm: MPI.Intracomm, on_node: Sequence[int], is_off: bool) -> bool:
    """Return whether all ranks can read and write the memory of all other ranks of their nodes, and none has this switched off.

    All ranks of ``comm`` call this function, and are known to (it uses blocking MPI calls); all have the C extension.

    Args:
        on_node: the ranks of this node.
        is_off: this rank must not copy from process to process.
    """
    words = np.empty((comm.Get_size(), 3), np.int64)
    comm.Allgather(np.array(native.found.peer_word(), np.int64), words)
    can = not is_off and all(native.found.allows_copies(*words[rank].tolist()) for rank in on_node)
    return bool(comm.allreduce(int(can)) == comm.Get_size())


def share_extension(comm: MPI.Intracomm, is_there: bool, is_off: bool, engine: str, ranks: int) -> bool:
    """Return whether all ranks have the C extension. If one lacks it, all ranks use MPI, and rank 0 writes a line to stderr.

    All ranks of ``comm`` call this function, and are known to (it uses blocking MPI calls). There is no line if all ranks have
    switched the extension off, or each rank has a node of its own, unless the setting of the engine asks for shared memory.

    Args:
        is_there: this rank has the extension.
        is_off: this rank must not use the extension.
        engine: the setting ``MPICOLL_ENGINE``, the same on all ranks.
        ranks: number of ranks on this node.
    """
    size = comm.Get_size()
    uses, off, alone = comm.allreduce(np.array([is_there and not is_off, is_off, ranks == 1], np.int64))
    asked = engine == "node"
    if comm.Get_rank() == 0 and uses < size and (asked or (off < size and alone < size)):
        why = ", though MPICOLL_ENGINE=node asks for shared memory" if asked else ""
        say(
            f"mpicoll: {size - uses} of {size} ranks lack the C extension, so all data of all "
            f"ranks goes through MPI{why} (run mpicoll doctor for the reason)\n"
        )
    return bool(uses == size)
