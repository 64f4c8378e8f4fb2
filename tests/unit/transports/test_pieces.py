"""How a movement is cut into pieces."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mpicoll.transports.base import Kind, Movement, block_bytes, block_elements, pieces, starts

WHOLE = (Kind.BROADCAST, Kind.ALL_REDUCE, Kind.REDUCE)
BLOCKS = (Kind.ALL_GATHER, Kind.GATHER, Kind.SCATTER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL)


def layouts(kind: Kind, size: int, uneven: bool, rng: random.Random) -> tuple[list[Movement], list[list[int]]]:
    """Return the movement of every rank, and the number of elements that rank i passes to rank j."""
    fixed = rng.choice([0, 1, 5, 33])

    def draw() -> int:
        return rng.choice([0, 1, 2, 7, 20, 33]) if uneven else fixed

    root = rng.randrange(size)
    if kind in WHOLE:
        count = rng.choice([0, 1, 5, 33])
        buffers = [np.arange(count, dtype="d") for _ in range(size)]
        return [Movement(kind, recv=buffer, root=root, op="SUM") for buffer in buffers], [[count] * size] * size
    if kind is Kind.ALL_TO_ALL:
        table = [[draw() for _ in range(size)] for _ in range(size)]
    else:
        per_rank = [draw() for _ in range(size)]
        table = [per_rank] * size if kind in (Kind.SCATTER, Kind.REDUCE_SCATTER) else [[n] * size for n in per_rank]
    moves = []
    for rank in range(size):
        sent, received = table[rank], [row[rank] for row in table]
        send: Any = np.arange(sum(sent), dtype="d")
        recv: Any = np.zeros(sum(received))
        sendcounts: Any = sent if uneven or kind is Kind.ALL_TO_ALL else None
        recvcounts: Any = received if uneven or kind is Kind.ALL_TO_ALL else None
        if kind in (Kind.ALL_GATHER, Kind.GATHER):
            send, sendcounts = np.arange(per_rank[rank], dtype="d"), None
        if kind in (Kind.SCATTER, Kind.REDUCE_SCATTER):
            recv, recvcounts = np.zeros(per_rank[rank]), None
        if kind is Kind.GATHER and rank != root:
            recv, recvcounts = None, None
        if kind is Kind.SCATTER and rank != root:
            send, sendcounts = None, None
        moves.append(Movement(kind, send, recv, sendcounts, recvcounts, root=root, op="SUM", vector=uneven))
    return moves, table


def spans(buffer: Any, counts: Any, displs: Any, size: int) -> list[range]:
    """Return where in a buffer each block of a movement lies."""
    counts = [buffer.size // size] * size if counts is None else counts
    displs = starts(counts) if displs is None else displs
    return [range(start, start + count) for start, count in zip(displs, counts, strict=True)]


def test_pieces_cover_every_element_of_every_block_once() -> None:
    """Whatever the sizes, the pieces of all ranks fit together and move each element exactly once, in place."""
    rng = random.Random(7)
    for kind, size, uneven, limit in itertools.product(
        (*WHOLE, *BLOCKS), (1, 2, 3, 5), (False, True), (1, 40, 100, 10**6)
    ):
        moves, _ = layouts(kind, size, uneven and kind in BLOCKS, rng)
        where = f"{kind}, {size} ranks, uneven={uneven}, limit {limit}"
        agreed = max(block_elements(move, size) for move in moves) * 8
        cuts = [list(pieces(move, size, agreed, limit)) for rank, move in enumerate(moves)]
        assert len({len(cut) for cut in cuts}) == 1, f"{where}: the ranks make {[len(cut) for cut in cuts]} calls"
        assert len({piece.vector for cut in cuts for piece in cut}) == 1, where
        for rank, (move, cut) in enumerate(zip(moves, cuts, strict=True)):
            for side in ("send", "recv"):
                whole = getattr(move, side)
                if whole is None:
                    assert all(getattr(piece, side) is None for piece in cut), where
                    continue
                seen: list[float] = []
                whole[...] = np.arange(whole.size)
                for piece in [replace(p) for p in pieces(move, size, agreed, limit)]:
                    part = getattr(piece, side)
                    counts, displs = getattr(piece, f"{side}counts"), getattr(piece, f"{side}displs")
                    if counts is None:
                        seen += part.tolist()
                    else:
                        for span in spans(part, counts, displs, size):
                            seen += part[span.start : span.stop].tolist()
                assert sorted(seen) == list(range(whole.size)), f"{where}, rank {rank}, {side}: {sorted(seen)}"


def test_what_one_rank_sends_in_a_piece_is_what_the_other_receives() -> None:
    """In every piece of an all-to-all the number that i sends to j is the number that j expects from i."""
    rng = random.Random(8)
    for size, limit in itertools.product((2, 3, 5), (8, 100, 1000)):
        moves, table = layouts(Kind.ALL_TO_ALL, size, True, rng)
        agreed = max(block_elements(move, size) for move in moves) * 8
        cuts = [list(pieces(move, size, agreed, limit)) for rank, move in enumerate(moves)]
        moved = np.zeros((size, size), int)
        for step in zip(*cuts, strict=True):
            for i, j in itertools.product(range(size), repeat=2):
                sent, expected = step[i].sendcounts, step[j].recvcounts
                assert sent is not None
                assert expected is not None
                assert sent[j] == expected[i]
                moved[i, j] += sent[j]
        assert (moved == np.array(table)).all()


def test_no_piece_moves_more_than_the_limit() -> None:
    """A rank passes at most the limit through one native call, as soon as the limit holds one element a rank."""
    rng = random.Random(9)
    for kind, size, limit in itertools.product((*WHOLE, *BLOCKS), (1, 2, 5), (40, 400)):
        moves, _ = layouts(kind, size, kind in BLOCKS, rng)
        agreed = max(block_elements(move, size) for move in moves) * 8
        for move in moves:
            for piece in pieces(move, size, agreed, limit):
                for buffer, counts in ((piece.send, piece.sendcounts), (piece.recv, piece.recvcounts)):
                    moved = 0 if buffer is None else buffer.size if counts is None else sum(counts)
                    assert moved * 8 <= limit, f"{kind}, {size} ranks, limit {limit}: {moved} elements"


def test_small_movements_are_left_whole() -> None:
    """A movement below the limit, and a barrier, is one piece: itself."""
    for move in (
        Movement(Kind.BARRIER),
        Movement(Kind.ALL_REDUCE, recv=np.zeros(4)),
        Movement(Kind.ALL_REDUCE, recv=np.zeros(0)),
    ):
        assert list(pieces(move, 2, block_elements(move, 2) * 8, 100)) == [move]


def test_further_movements_of_a_call() -> None:
    """They are cut one after the other, each by its own size; the largest counts as the block of the call."""
    moves = [
        Movement(Kind.ALL_REDUCE, recv=np.arange(count, dtype=dtype)) for count, dtype in ((3, "d"), (9, "f"), (7, "d"))
    ]
    whole = replace(moves[0], more=tuple(moves[1:]))
    assert [part.recv is move.recv for part, move in zip(whole.parts, moves, strict=True)] == [True] * 3
    assert not any(part.more for part in whole.parts)
    assert block_bytes(whole, 2) == 56
    sizes = [piece.recv.size for piece in pieces(whole, 2, 1, 32) if piece.recv is not None]
    assert sizes == [3, 8, 1, 4, 3]
    assert block_bytes(Movement(Kind.BARRIER), 2) == 0


def test_block_elements() -> None:
    """The largest block between this rank and a peer; 0 where nothing moves."""
    x = np.zeros(12)
    assert block_elements(Movement(Kind.BARRIER), 4) == 0
    assert block_elements(Movement(Kind.BROADCAST, recv=x), 4) == 12
    assert block_elements(Movement(Kind.REDUCE, send=x), 4) == 12
    assert block_elements(Movement(Kind.ALL_GATHER, send=x[:3], recv=x), 4) == 3
    assert block_elements(Movement(Kind.SCATTER, recv=x[:3]), 4) == 3
    assert block_elements(Movement(Kind.REDUCE_SCATTER, send=x, recv=x[:7], sendcounts=[7, 0, 1, 4]), 4) == 7
    assert block_elements(Movement(Kind.ALL_TO_ALL, x, x, [1, 2, 3, 6], [9, 1, 1, 1]), 4) == 9


@pytest.mark.parametrize("counts", [[], [0], [3, 0, 2], [0, 0, 1]])
def test_starts(counts: list[int]) -> None:
    """Blocks start where the ones before them end."""
    assert starts(counts) == [sum(counts[:i]) for i in range(len(counts))]
