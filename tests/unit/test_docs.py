"""What the documentation calculates is calculated right, and the files that it names are there."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from mpicoll.checks import memory_ranges
from mpicoll.diagnosis import node_board
from mpicoll.groups import process_group
from mpicoll.leader_blocks import outcome
from mpicoll.operations import prepared
from mpicoll.operations.prepare import coalesced
from mpicoll.operations.prepare import messages as prepare_messages
from mpicoll.stores import tcp_client, tcp_server, wire
from mpicoll.transports import control
from mpicoll.transports.mpi import control as mpi_control
from mpicoll.transports.mpi import envelope
from mpicoll.transports.shm import control as shm_control
from mpicoll.transports.shm import transport

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "order-checks.md").read_text()
SAMPLES = {"66 KB": 24, "160 kB": 38, "512 KiB to 2 MiB": 128, "8 MiB": 340, "24 MiB and more": 1024}
"""Places of a sample, by the size of an array, as docs/order-checks.md has them."""
CALLS, STEP, EVERY = 300, 100e-3, 16
_ROW = re.compile(
    r"^\| ([\d,]+) \| (\d+) us \| (\d+) us \| (\d+) to (\d+) % \| ([\d.]+) to ([\d.]+) % \|$", re.MULTILINE
)


def constant(name: str) -> float:
    found = re.search(rf"\| {name} = ([\d.]+) us \|", PAGE)
    assert found is not None, name
    return float(found[1])


def test_the_table_of_the_cost_model() -> None:
    """Each row is what its formula gives for the constants that the page states."""
    a, c, r = constant("a"), constant("c"), constant("r")
    rows = _ROW.findall(PAGE)
    assert [row[0] for row in rows] == ["128", "1,024", "10,240", "131,072"]
    for ranks, *told in rows:
        steps = math.log2(int(ranks.replace(",", "")))
        rounds = [steps * a + c, 2 * steps * a + c]
        shares = [100 * CALLS * each * 1e-6 / STEP for each in rounds]
        rolling = [100 * CALLS * (each / EVERY + r) * 1e-6 / STEP for each in rounds]
        right = [*(f"{each:.0f}" for each in (*rounds, *shares)), *(f"{each:.1f}" for each in rolling)]
        assert told == right, ranks


WORDS = {11: "eleven", 12: "twelve", 14: "fourteen"}
ROUND = f"{WORDS[control.SAID + 2]} 64-bit words ({8 * (control.SAID + 2)} bytes)"
MESSAGES = (envelope.WORDS.size + envelope.SMALL_BYTES, envelope.ROOM)
TOLD = {
    "docs/performance.md": (
        f"| slot of the call board | {node_board.SLOT_BYTES >> 10} KiB |",
        f"| {shm_control.PART >> 10} KiB a group: {2 * shm_control.AHEAD} records of 128 bytes, "
        f"{shm_control.EAGER_BYTES >> 10} KiB beside each, in whole pages |",
        f"| 2 of up to {transport.LARGEST_BUFFER >> 20} MiB a group |",
        f"| {process_group.MOST_PLANS} a group, and {process_group.MOST_PLANS} at `roll` and `off`:",
        f"| up to {MESSAGES[0]:,} bytes a send, {MESSAGES[1]:,} a receive | {prepare_messages.MOST} of each a group: "
        f"{sum(MESSAGES) * prepare_messages.MOST / 2**20:.1f} MiB |",
        f"| 2 times {8 * (control.SAID + 2)} bytes | {mpi_control.AHEAD} a group |",
        f"| {prepared.MOST} a group; one with lists",
        f"| {coalesced._MOST_PLANS} layouts, {coalesced.CACHED_BYTES >> 20} MiB a process,",
    ),
    "docs/order-checks.md": (
        f"a MAX all-reduce of {ROUND}",
        f"{memory_ranges._END_BYTES} bytes at both ends, and {memory_ranges._PLACE_BYTES} bytes at each of 24 to 1024",
        *(f"| {size} | {places} |" for size, places in SAMPLES.items()),
    ),
    "docs/design.md": (
        f"A round has {WORDS[control.SAID]} words",
        f"{WORDS[control.COMPARED].capitalize()} words are compared",
        f"its negative: {8 * (control.SAID + 2)} bytes",
    ),
    "docs/zero-first.md": (
        f"one broadcast of {outcome._MESSAGE_BYTES} bytes",
        f"agreement, of {8 * (control.SAID + 2)} bytes over MPI",
    ),
    "docs/groups.md": (
        f"{tcp_client._ANSWER_SECONDS:g} s after its `timeout`",
        f"and {tcp_server._MOST_STRANGERS}, for connections that have not proved that they know the secret, "
        f"each for {wire.GREETING_SECONDS:g} s at most",
    ),
}
"""What pages say of the constants of the code."""


@pytest.mark.parametrize(("name", "told"), [(name, told) for name in TOLD for told in TOLD[name]])
def test_numbers_of_the_code(name: str, told: str) -> None:
    page = " ".join((ROOT / name).read_text().split())
    assert told in page, told


@pytest.mark.parametrize(("size", "places"), SAMPLES.items())
def test_places_of_a_sample(size: str, places: int) -> None:
    """The table of docs/order-checks.md has what the rules give, and an array has a sample from 64 KiB on."""
    number, unit = re.findall(r"(\d+) (\w+)", size)[0]
    nbytes = int(number) * {"kB": 1000, "KB": 1000, "KiB": 1 << 10, "MiB": 1 << 20}[unit]
    taken = memory_ranges.contents(np.zeros(nbytes, np.uint8))
    assert len(taken) == 2 * memory_ranges._END_BYTES + places * memory_ranges._PLACE_BYTES
    assert len(memory_ranges.contents(np.zeros(1 << 16, np.uint8))) == 1 << 16


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "CONTRIBUTING.md",
        "docs/arrays.md",
        "docs/clusters.md",
        "docs/groups.md",
        "docs/mpi4py.md",
        "docs/order-checks.md",
        "docs/performance.md",
        "docs/waiting.md",
        "docs/design.md",
        "docs/objects.md",
        "docs/torch.md",
    ],
)
def test_named_files_are_there(name: str) -> None:
    """A script or test that a page names in code exists, and so does what it links to."""
    text = (ROOT / name).read_text()
    files = re.findall(r"(?<![\w/.-])((?:benchmarks|docs|examples|tests)/[\w/.-]+\.(?:py|md|txt))", text)
    links = re.findall(r"\]\(([\w./-]+)\)", text)
    missing = [file for file in files if not (ROOT / file).exists()]
    missing += [link for link in links if not ((ROOT / name).parent / link).exists()]
    assert not missing, missing
