"""Profiles of a machine: what `mpicoll tune` writes, and what a job takes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpicoll.cli.tune import faster
from mpicoll.runtime.mpi_library import library_name
from mpicoll.transports.base import Kind
from mpicoll.transports.selection import NEVER, Selection, add_profile, find_profile, path_of_profiles

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
