"""Measure the links of a job: ping-pongs between two ranks of each node, and between nodes, in bounded time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

MOST_PAIRS = 64
"""The most pairs of nodes that are measured, one after the other, each for about a quarter of a second."""

LARGE = 4 << 20  # bytes of a message that measures bandwidth; less if the link is slow
FIRST = 64 << 10
SHARE = 0.05  # seconds for one series of messages


@dataclass(frozen=True)
class Link:
    """Latency and bandwidth between two ranks, measured with mpicoll's send and recv.

    Attributes:
        ranks: the two ranks.
        nodes: the numbers of their nodes.
        latency: half the round trip of 8 bytes, in seconds.
        bandwidth: bytes per second of large messages in one direction.
    """

    ranks: tuple[int, int]
    nodes: tuple[int, int]
    latency: float
    bandwidth: float


def pairs_within(node_of: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first two ranks of each node with two ranks or more."""
    first: dict[int, list[int]] = {}
    for rank, node in enumerate(node_of):
        first.setdefault(node, []).append(rank)
    return [(ranks[0], ranks[1]) for ranks in first.values() if len(ranks) > 1]


def pairs_between(node_of: Sequence[int], most: int = MOST_PAIRS) -> list[tuple[int, int]]:
    """Return the pairs of nodes' first ranks to measure: all pairs, or in a large job a sample over as many nodes as possible.

    Example:
        >>> pairs_between([0, 0, 1, 2])
        [(0, 2), (0, 3), (2, 3)]
    """
    leaders = [node_of.index(node) for node in sorted(set(node_of))]
    nodes = len(leaders)
    everything = nodes * (nodes - 1) // 2
    if everything <= most:
        return [(leaders[a], leaders[b]) for a in range(nodes) for b in range(a + 1, nodes)]
    # Pair each node with the node half the job away, which is far away in most networks; then a quarter, an eighth, ...
    chosen: dict[tuple[int, int], None] = {}
    halves = [nodes >> times for times in range(1, nodes.bit_length())]
    for distance in dict.fromkeys([*halves, *range(1, nodes // 2 + 1)]):
        if len(chosen) >= most:
            break
        starts = range(nodes // 2) if distance * 2 == nodes else range(nodes)
        step = max(1, len(starts) // (most - len(chosen)))
        for a in starts[::step]:
            b = (a + distance) % nodes
            if len(chosen) < most:
                chosen.setdefault((leaders[min(a, b)], leaders[max(a, b)]))
    return list(chosen)


def measure(node_of: Sequence[int]) -> tuple[Link, ...]:
    """Return the measured links on rank 0, and nothing on other ranks. All ranks of the job call the function.

    The pairs within nodes are measured at the same time, the pairs between nodes one after the other.
    """
    import mpicoll as dist

    rank = dist.get_rank()
    mine = [_pair(rank, pair, node_of) for pair in pairs_within(node_of) if rank in pair]
    for pair in pairs_between(node_of):
        dist.barrier()
        if rank in pair:
            mine.append(_pair(rank, pair, node_of))
    found: list[list[Link] | None] | None = [None] * len(node_of) if rank == 0 else None
    dist.gather_object([link for link in mine if link is not None], found)
    return tuple(link for some in found or () for link in some or ())


def _pair(rank: int, pair: tuple[int, int], node_of: Sequence[int]) -> Link | None:
    """Measure one link. Both ranks call the function; the first rank returns the link, the other rank None."""
    leads = rank == pair[0]
    peer = pair[1] if leads else pair[0]
    _series(leads, peer, 8, 3)
    some = _series(leads, peer, 8, 10)
    rounds = _agreed(leads, peer, min(500, max(5, int(SHARE / 5 / some))))
    latency = median(_series(leads, peer, 8, rounds) for _ in range(5))
    _series(leads, peer, FIRST, 1)
    some = _series(leads, peer, FIRST, 2)
    size = _agreed(leads, peer, max(FIRST, min(LARGE, int(FIRST * SHARE / some))))
    some = _series(leads, peer, size, 1)
    rounds = _agreed(leads, peer, min(10, max(1, int(SHARE / 3 / some))))
    large = median(_series(leads, peer, size, rounds) for _ in range(3))
    return Link(pair, (node_of[pair[0]], node_of[pair[1]]), latency, size / large) if leads else None


def _series(leads: bool, peer: int, size: int, rounds: int) -> float:
    """Exchange messages between the two ranks; return the seconds of one message in one direction."""
    import mpicoll as dist

    buffer = np.zeros(size, np.uint8)
    begun = time.monotonic()
    for _ in range(rounds):
        if leads:
            dist.send(buffer, peer)
            dist.recv(buffer, peer)
        else:
            dist.recv(buffer, peer)
            dist.send(buffer, peer)
    return max(1e-9, (time.monotonic() - begun) / (2 * rounds))


def _agreed(leads: bool, peer: int, number: int) -> int:
    """Return the number that the first rank of the pair has chosen."""
    import mpicoll as dist

    chosen = np.array([number])
    if leads:
        dist.send(chosen, peer)
    else:
        dist.recv(chosen, peer)
    return int(chosen[0])
