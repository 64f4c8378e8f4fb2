"""Which engine moves a call: a function of what all members know, so that all choose alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mpicoll.engines.base import Kind

__all__ = ["Choice"]

NEVER = 1 << 62

SMALLEST: Mapping[Kind, int] = {
    Kind.ALL_REDUCE: 16 * 1024 + 1,
    Kind.REDUCE: 16 * 1024 + 1,
    Kind.BROADCAST: 16 * 1024 + 1,
    Kind.ALL_GATHER: 16 * 1024 + 1,
    Kind.GATHER: 16 * 1024 + 1,
    Kind.SCATTER: 16 * 1024 + 1,
    Kind.REDUCE_SCATTER: 16 * 1024 + 1,
    Kind.ALL_TO_ALL: 16 * 1024 + 1,
}
"""Bytes of the largest block from which on the node engine was faster than Open MPI 5.0 and MPICH 5.0 (docs/performance.md)."""


@dataclass(frozen=True)
class Choice:
    """What decides for the groups of one world; agreed when it was made.

    Attributes:
        mode: ``auto``, ``mpi`` or ``node``.
        least: bytes below which no call is moved through shared memory: small ones that are not compared go through MPI.
        smallest: bytes of the largest block of a call from which on the node engine moves it.
    """

    mode: str = "auto"
    least: int = 1
    smallest: Mapping[Kind, int] = field(default_factory=lambda: SMALLEST)

    def node(self, kind: Kind, nbytes: int) -> bool:
        """Whether the members of a group on one node move a call of such blocks through shared memory."""
        if self.mode == "mpi" or kind is Kind.BARRIER:
            return False
        return nbytes >= self.least and (self.mode == "node" or nbytes >= self.smallest.get(kind, NEVER))
