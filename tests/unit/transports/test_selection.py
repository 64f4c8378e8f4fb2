"""Profiles of a machine: what `mpicoll tune` writes, and what a job takes of it."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpicoll.cli.tune import faster
from mpicoll.memory.device import array as device_array
from mpicoll.memory.device.addresses import DeviceAddresses
from mpicoll.operations.execution import _facts
from mpicoll.runtime.mpi_library import library_name
from mpicoll.transports import selection
from mpicoll.transports.base import EAGER_BYTES, SMALL_BYTES, Kind, Movement, block_bytes
from mpicoll.transports.control import AS_IT_IS, IN_PIECES, NO_DEVICE, decode, make_words
from mpicoll.transports.device.staged import Staged, StagedInPieces
from mpicoll.transports.selection import (
    NEVER,
    Facts,
    Selection,
    Way,
    add_profile,
    find_profile,
    path_of_profiles,
    select,
    stage,
)

SIZES = [1024, 4096, 16384, 65536]


@pytest.mark.parametrize(
    ("ratios", "found"),
    [
        ([1.5, 0.9, 0.5, 0.4], [(2049, NEVER)]),
        ([1.5, 1.2, 1.0, 0.98], []),
        ([0.5, 0.5, 0.9, 2.0], [(1024, 32768)]),
        ([0.5, 1.05, 0.5, 2.0], [(1024, 32768)]),  # one size that is hardly slower stays with those around it
        ([0.5, 1.5, 0.5, 2.0], [(1024, 2048), (8193, 32768)]),
    ],
)
def test_ranges(ratios: list[float], found: list[tuple[int, int]]) -> None:
    """Where shared memory is faster, between the sizes that were measured."""
    assert faster(SIZES, ratios) == found


def test_files() -> None:
    """One profile for a library and a number of ranks; the nearest number counts; the latest takes the place of another."""
    text = add_profile("", "Open MPI v5.0.11", 2, {Kind.REDUCE: [(10, 20), (30, NEVER)]}, {"processor": "x"})
    text = add_profile(text, "Open MPI v5.0.11", 16, {Kind.REDUCE: [], Kind.GATHER: [(1, 2)]}, {})
    text = add_profile(text, "MPICH Version: 5", 2, {Kind.REDUCE: [(5, 6)]}, {})
    assert find_profile(text, "Open MPI v5.0.11", 3) == {Kind.REDUCE: [(10, 20), (30, NEVER)]}
    assert find_profile(text, "Open MPI v5.0.11", 64) == {Kind.REDUCE: [], Kind.GATHER: [(1, 2)]}
    assert find_profile(text, "Open MPI v4", 2) is None
    text = add_profile(text, "Open MPI v5.0.11", 2, {Kind.REDUCE: [(7, 8)]}, {})
    assert find_profile(text, "Open MPI v5.0.11", 2) == {Kind.REDUCE: [(7, 8)]}
    chosen = Selection("auto", ranges={Kind.REDUCE: [(7, 8)]})
    assert [size for size in (6, 7, 8, 9) if chosen.node(Kind.REDUCE, size)] == [7, 8]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"profiles": 3}',
        '{"profiles": [{"MPI": "m"}]}',
        '{"profiles": [{"MPI": "m", "ranks": 2, "node": {"x": []}}]}',
    ]
    + ['{"profiles": [{"MPI": "m", "ranks": 2, "node": {"reduce": [["a", 2]]}}]}'],
)
def test_what_is_no_such_file(text: str) -> None:
    """It is refused with one error, whatever is wrong."""
    with pytest.raises(ValueError, match="no file of profiles"):
        find_profile(text, "m", 2)


def test_where_it_is() -> None:
    """Where the setting says, or among the user's settings."""
    assert path_of_profiles("/a/b.json") == Path("/a/b.json")
    assert path_of_profiles("", {"XDG_CONFIG_HOME": "/c"}) == Path("/c/mpicoll/profiles.json")
    assert path_of_profiles("", {}).parts[-3:] == (".config", "mpicoll", "profiles.json")
    assert library_name("Open MPI v5.0.11, package: x\nmore\0") == "Open MPI v5.0.11"
    assert library_name("MPICH Version:      5.0.2\nMPICH Release") == "MPICH Version: 5.0.2"


def movements(draw: random.Random, kind: Kind, size: int) -> list[Movement]:
    """Return what each member of a group moves in one call of a kind, with random counts."""
    root, op = draw.randrange(size), draw.choice(("SUM", "MAX"))
    most = draw.choice((0, 1, 7, 200, EAGER_BYTES // 8, SMALL_BYTES // 8 + 1, 40_000))
    uneven = draw.random() < 0.3 and kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL)
    counts = [draw.randint(0, most) for _ in range(size)] if uneven else [most] * size
    given: Any = counts if uneven else None
    made = []
    for rank in range(size):
        block, whole, at_root = np.empty(counts[rank]), np.empty(sum(counts)), rank == root
        if kind is Kind.BARRIER:
            made.append(Movement(kind))
        elif kind in (Kind.BROADCAST, Kind.ALL_REDUCE):
            made.append(
                Movement(
                    kind,
                    recv=block,
                    root=root if kind is Kind.BROADCAST else -1,
                    op="" if kind is Kind.BROADCAST else op,
                )
            )
        elif kind is Kind.REDUCE:
            made.append(Movement(kind, send=block, recv=block if at_root else None, root=root, op=op))
        elif kind is Kind.ALL_GATHER:
            made.append(Movement(kind, send=block, recv=whole, recvcounts=given, vector=uneven))
        elif kind is Kind.GATHER:
            made.append(Movement(kind, send=block, recv=whole if at_root else None, root=root))
        elif kind is Kind.SCATTER:
            made.append(Movement(kind, send=whole if at_root else None, recv=block, root=root))
        elif kind is Kind.REDUCE_SCATTER:
            made.append(Movement(kind, send=whole, recv=block, sendcounts=given, op=op, vector=uneven))
        else:
            made.append(
                Movement(
                    kind,
                    send=whole,
                    recv=np.empty(counts[rank] * size),
                    sendcounts=counts,
                    recvcounts=[counts[rank]] * size,
                    vector=uneven,
                )
            )
    return made


def test_all_members_select_the_same() -> None:
    """What a call is moved by follows from facts that each member finds in its own arguments and in the agreement."""
    draw = random.Random(7)
    ways = set()
    for _ in range(3000):
        kind, size = draw.choice(list(Kind)), draw.randint(2, 6)
        moves = movements(draw, kind, size)
        largest = max(block_bytes(move, size) for move in moves)
        nonblocking, device = draw.random() < 0.3, draw.choice((NO_DEVICE, NO_DEVICE, IN_PIECES, AS_IT_IS))
        words = make_words(1, largest, device=device, nonblocking=nonblocking)
        agreed = decode([*words], 0.0, 0.0)
        selection, carries = Selection(draw.choice(("auto", "mpi", "node"))), draw.random() < 0.5

        def through(kind: Kind, nbytes: int, selection: Selection = selection) -> Any:
            return object() if selection.node(kind, nbytes) else None

        agreement = SimpleNamespace(channel=SimpleNamespace(carries_data=carries))
        group: Any = SimpleNamespace(
            size=lambda size=size: size, pair=SimpleNamespace(through=through, agreement=agreement)
        )
        facts = {_facts(group, move, agreed, True) for move in moves}
        assert len(facts) == 1, (kind, facts)
        ways.add(select(facts.pop()))
    assert ways == set(Way), "each way is selected at times"


def test_a_kind_that_shared_memory_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind without a row in the table moves through MPI only, also with the engine ``node``."""
    small = Facts(Kind.ALL_REDUCE, 2, 64, reduces=True, carries_data=True)
    assert Selection("node").node(Kind.ALL_REDUCE, 1 << 20)
    assert select(small) is Way.IN_RANK_ORDER
    monkeypatch.delitem(selection.DEFAULT, Kind.ALL_REDUCE)
    assert not Selection("node").node(Kind.ALL_REDUCE, 1 << 20)
    assert select(small) is Way.PERSISTENT


def test_what_a_way_needs() -> None:
    """A way is selected only for calls that it can move."""
    draw = random.Random(8)
    for _ in range(20_000):
        facts = Facts(
            draw.choice(list(Kind)),
            draw.randint(1, 8),
            draw.choice((0, 8, EAGER_BYTES, EAGER_BYTES + 1, SMALL_BYTES, SMALL_BYTES + 1, 1 << 30)),
            *(draw.random() < 0.4 for _ in range(8)),
            draw.choice((NO_DEVICE, IN_PIECES, AS_IT_IS)),
            draw.random() < 0.4,
        )
        way = select(facts)
        assert (way is Way.ROUND) == (facts.kind is Kind.BARRIER)
        if way is Way.SHARED_MEMORY:
            assert facts.shared
            assert facts.in_pieces or not facts.device
        if way is Way.IN_RANK_ORDER:
            assert facts.reduces
            assert facts.block_bytes <= EAGER_BYTES
        if way is Way.PERSISTENT:
            assert facts.block_bytes <= SMALL_BYTES
            assert not any((facts.nonblocking, facts.uneven, facts.several, facts.follows, facts.device))
        if way is Way.NONBLOCKING:
            assert not facts.exceeds_count
        if way is Way.BLOCKING:
            assert not facts.nonblocking or facts.exceeds_count or facts.in_pieces


def test_what_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a GPU goes through the host unless MPI gets it, in pieces if all members can, and pieces keep their order."""
    monkeypatch.setattr(device_array, "_permitted", lambda operation, nonblocking: not nonblocking)
    host = np.zeros(8)
    on_gpu = host.view(DeviceAddresses)

    def staged(device: int, flat: Any, **facts: Any) -> Any:
        move = Movement(Kind.ALL_REDUCE, recv=flat, op="SUM")
        return stage(Facts(Kind.ALL_REDUCE, 2, 64, reduces=True, device=device, **facts), move, 0, 16)

    on_gpu.passed_directly = False
    for nonblocking in (False, True):
        assert staged(AS_IT_IS, host, nonblocking=nonblocking) is None
        assert type(staged(AS_IT_IS, on_gpu, nonblocking=nonblocking)) is Staged
        for flat in (host, on_gpu):
            assert type(staged(IN_PIECES, flat, nonblocking=nonblocking)) is StagedInPieces
            assert type(staged(IN_PIECES, flat, nonblocking=nonblocking, shared=True, ordered=True)) is StagedInPieces
    assert staged(IN_PIECES, on_gpu, ordered=True).block_bytes == 16
    assert staged(IN_PIECES, host, ordered=True, nonblocking=True) is None
    assert type(staged(IN_PIECES, on_gpu, ordered=True, nonblocking=True)) is Staged
    on_gpu.passed_directly = True
    assert staged(AS_IT_IS, on_gpu) is None
    assert type(staged(AS_IT_IS, on_gpu, nonblocking=True)) is Staged
