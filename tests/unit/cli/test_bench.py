"""`mpicoll bench`: sizes, ratios, the table, the words, JSON and the picture, of figures that are made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpicoll.cli.bench.command import without_n
from mpicoll.cli.bench.measure import CONFIGS, Measured, Results
from mpicoll.cli.bench.table import in_bytes, parse_sizes, ratio, summary, table, to_json


def made() -> Results:
    """Two operations: one twice as fast as raw MPI when large, one three times as slow."""
    measured = []
    for op, factor in (("all_reduce", 0.5), ("gather", 3.0)):
        for nbytes in (8, 1 << 16, 1 << 24):
            each = Measured(op, nbytes, copy=[nbytes / 1e4 + 0.1] * 3)
            for config in CONFIGS:
                each.raw[config.name] = [10.0, 20.0, 30.0]
                each.ours[config.name] = [(4.0 if nbytes == 8 else factor) * raw for raw in (10.0, 20.0, 30.0)]
            measured.append(each)
    return Results(2, 1, {"MPI": "Open MPI v5.0", "processor": "an abacus"}, measured)


def test_sizes() -> None:
    """Lists, and powers of four from one to another; what is no size is refused."""
    assert parse_sizes("8,64K, 1MiB,2G") == [8, 65536, 1 << 20, 2 << 30]
    assert parse_sizes("8:1K") == [8, 32, 128, 512, 1024]
    for text in ("7", "0", "x", "8:", "-8", "1.5K"):
        with pytest.raises(ValueError):
            parse_sizes(text)
    assert [in_bytes(size) for size in (8, 1000, 1024, 3 << 20)] == ["8 B", "1000 B", "1 KiB", "3 MiB"]


def test_ratios_are_of_the_same_round() -> None:
    """A machine that was slower in one round has no part in them."""
    assert ratio(made().measured[1], "full") == (0.5, 0.5, 0.5)
    assert ratio(made().measured[4], "full") == (3.0, 3.0, 3.0)


def test_words_and_table() -> None:
    """The summary names the best and the worst, and counts who is faster."""
    lines = summary(made())
    assert "from 64 KiB to 1 MiB: with all checks mpicoll takes 1.75 times" in lines[1]
    assert "1 of 2 faster, 1 slower" in lines[1]
    assert "best all_reduce of 64 KiB 0.50, worst gather of 64 KiB 3.00" in lines[1]
    assert lines[-1].startswith("8 bytes: the checks and Python add 60.0 µs")
    shown = table(made())
    assert shown.row_count == 6
    assert len(shown.columns) == 3 + len(CONFIGS) + 1
    told = json.loads(to_json(made(), lines))
    assert told["measured"][1]["ours"]["full"] == [5.0, 10.0, 15.0]
    assert told["summary"] == lines


def test_picture(tmp_path: Path) -> None:
    """It is drawn, where matplotlib is installed."""
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    from mpicoll.cli.bench.plot import draw

    draw(made(), str(tmp_path / "bench.png"))
    assert (tmp_path / "bench.png").read_bytes()[:4] == b"\x89PNG"


def test_the_command_of_the_ranks() -> None:
    """The job that the command starts runs it without the number of ranks."""
    for number in (["-n", "2"], ["-n2"], ["--nprocs=2"], ["--nprocs", "2"]):
        assert without_n(["bench", *number, "--sizes", "8"]) == ["bench", "--sizes", "8"]
