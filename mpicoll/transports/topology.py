"""Which ranks share a node: the node table.

Nodes come from MPI (MPI_Comm_split_type), confirmed by a word that one rank of each supposed node writes to shared memory
and the others read: two containers on one host may share everything but that. Host names are for display only.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.transports.shm import mapping


@dataclass(frozen=True)
class Topology:
    """The node table of one world.

    Attributes:
        node_of: number of the node of each rank; nodes are numbered by their lowest rank.
        hosts: name of each node, for display.
        rank: this rank.
        cores: the least that a rank of this node takes for the number of its cores; the same on all of them.
        devices: the GPU that each rank had selected when the table was made, and how many it saw.
        secret: bytes that all ranks know, and nobody else.
    """

    node_of: tuple[int, ...]
    hosts: tuple[str, ...]
    rank: int
    cores: int = 1 << 30
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

    @property
    def oversubscribed(self) -> bool:
        """Whether this node has more ranks than cores; the same on all its ranks."""
        return len(self.local_ranks) > self.cores


def node_communicator(topology: Topology, parent: MPI.Intracomm) -> MPI.Intracomm:
    """Return a communicator of the ranks of this node; all of them call it, and are known to. Keep it: each call makes one.

    Made only when something needs it: MPICH has about 2,000 communicators a process.
    """
    everybody = parent.Get_group()
    members = everybody.Incl(list(topology.local_ranks))
    try:
        return parent.Create_group(members, NODE_TAG)
    finally:
        members.Free()
        everybody.Free()


NODE_TAG = 32700


def cores() -> int:
    """Return the number of cores of this node that the ranks share (not those that this rank is bound to)."""
    return os.cpu_count() or 1


def discover(comm: MPI.Intracomm, device: tuple[str, int] = ("", 0)) -> Topology:
    """Build the node table; all ranks of ``comm`` call it, and are known to (it uses blocking MPI calls).

    Args:
        device: the GPU that this rank has selected, and how many it sees.

    Source: MPI_Comm_split_type with MPI_COMM_TYPE_SHARED (MPI-4.1 section 7.4.2).
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    supposed = comm.Split_type(MPI.COMM_TYPE_SHARED, rank)
    try:
        leader = _confirmed_leader(supposed, rank)
    finally:
        supposed.Free()
    told = np.empty((size, 2), np.int64)
    comm.Allgather(np.array([leader, cores()], np.int64), told)
    leaders = told[:, 0]
    own = secrets.token_bytes(32) if rank == 0 else b""
    said = comm.allgather((os.uname().nodename if leader == rank else None, device, own))
    order = sorted(set(leaders.tolist()))
    number = {lead: i for i, lead in enumerate(order)}
    return Topology(
        tuple(number[lead] for lead in leaders.tolist()),
        tuple(str(said[lead][0]) for lead in order),
        rank,
        int(told[leaders == leader, 1].min()),
        tuple(its for _, its, _ in said),
        said[0][2],
    )


def _confirmed_leader(node: MPI.Comm, rank: int) -> int:
    """Return the lowest rank whose shared memory this rank can read, going round by round through those left over."""
    place = node.Get_rank()
    leader = -1
    while True:
        unplaced = np.array([place if leader < 0 else node.Get_size()], np.int64)
        node.Allreduce(MPI.IN_PLACE, unplaced, MPI.MIN)
        first = int(unplaced[0])
        if first == node.Get_size():
            return leader
        told: Any = None
        path = ""
        if place == first:
            word, path = secrets.token_hex(16), mapping.path_of("node")
            told = (rank, path if _write(path, word) else "", word)
        lead, where, word = node.bcast(told, first)
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
        return False  # no shared memory here: MPI's word stands alone
    return True


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except OSError:
        return ""
