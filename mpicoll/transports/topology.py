"""Find out which ranks share a node: the node table.

MPI finds the nodes (MPI_Comm_split_type). Then one rank of each supposed node writes a word to shared memory, and the other
ranks read it: two containers on one host may share everything except memory. Host names are for display only.
"""

from __future__ import annotations

import os
import secrets
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.transports.shm import mapping


@dataclass(frozen=True)
class Topology:
    """The node table of one world.

    Attributes:
        node_of: number of the node of each rank; nodes are numbered by their lowest ranks.
        hosts: name of each node, for display.
        rank: this rank.
        oversubscribed: whether ranks of this node share cores (``share_cores``); the same on all ranks of the node.
        devices: GPU that each rank had selected when the table was made, and number of GPUs that it saw.
        secret: bytes that only the ranks of the job know.
    """

    node_of: tuple[int, ...]
    hosts: tuple[str, ...]
    rank: int
    oversubscribed: bool = False
    devices: tuple[tuple[str, int], ...] = ()
    secret: bytes = b""

    @property
    def node(self) -> int:
        """The number of this rank's node."""
        return self.node_of[self.rank]

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks of this node, in order."""
        return tuple(rank for rank, node in enumerate(self.node_of) if node == self.node)

    @property
    def local_rank(self) -> int:
        """This rank's place among the ranks of its node."""
        return self.local_ranks.index(self.rank)


def node_communicator(topology: Topology, parent: MPI.Intracomm) -> MPI.Intracomm:
    """Make a communicator of the ranks of this node, which all call this function and are known to.

    Callers make one only at the first use, and store it: MPICH has about 2,000 communicators a process.
    """
    all_ranks = parent.Get_group()
    members = all_ranks.Incl(list(topology.local_ranks))
    try:
        return parent.Create_group(members, NODE_TAG)
    finally:
        members.Free()
        all_ranks.Free()


NODE_TAG = 32700


def share_cores(bound: list[frozenset[int]]) -> bool:
    """Return whether there are more ranks than logical cores, of all ranks together or of those with the same cores.

    Args:
        bound: the logical cores on which each rank of a node may run.
    """
    every = frozenset[int]().union(*bound)
    return len(bound) > len(every) or any(count > len(cores) for cores, count in Counter(bound).items())


def discover(comm: MPI.Intracomm, device: tuple[str, int] = ("", 0)) -> Topology:
    """Build the node table. All ranks of ``comm`` call this function, and are known to (it uses blocking MPI calls).

    Args:
        device: GPU that this rank has selected, and number of GPUs that it sees.

    Source: MPI_Comm_split_type with MPI_COMM_TYPE_SHARED (MPI-4.1 section 7.4.2).
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    supposed = comm.Split_type(MPI.COMM_TYPE_SHARED, rank)
    try:
        leader = _confirmed_leader(supposed, rank)
        sharing = share_cores(supposed.allgather(frozenset(os.sched_getaffinity(0))))
    finally:
        supposed.Free()
    table = np.empty((size, 2), np.int64)
    comm.Allgather(np.array([leader, sharing], np.int64), table)
    leaders = table[:, 0]
    own = secrets.token_bytes(32) if rank == 0 else b""
    facts = comm.allgather((os.uname().nodename if leader == rank else None, device, own))
    order = sorted(set(leaders.tolist()))
    number = {lead: i for i, lead in enumerate(order)}
    return Topology(
        tuple(number[lead] for lead in leaders.tolist()),
        tuple(str(facts[lead][0]) for lead in order),
        rank,
        bool(table[leaders == leader, 1].any()),
        tuple(gpu for _, gpu, _ in facts),
        facts[0][2],
    )


def _confirmed_leader(node: MPI.Comm, rank: int) -> int:
    """Return the lowest rank whose shared memory this rank can read; in each pass the lowest rank without a leader writes."""
    place = node.Get_rank()
    leader = -1
    while True:
        unplaced = np.array([place if leader < 0 else node.Get_size()], np.int64)
        node.Allreduce(MPI.IN_PLACE, unplaced, MPI.MIN)
        first = int(unplaced[0])
        if first == node.Get_size():
            return leader
        announced: Any = None
        path = ""
        if place == first:
            word, path = secrets.token_hex(16), mapping.path_of("node")
            announced = (rank, path if _write(path, word) else "", word)
        lead, where, word = node.bcast(announced, first)
        if leader < 0 and (place == first or not where or _read(where) == word):
            leader = lead
        node.Barrier()
        if path:
            try:
                os.unlink(path)
            except OSError:
                pass


def _write(path: str, word: str) -> bool:
    try:
        with open(path, "x", encoding="ascii") as file:
            file.write(word)
    except OSError:
        return False  # no shared memory here: only the answer of MPI counts
    return True


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except OSError:
        return ""
