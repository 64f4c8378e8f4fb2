"""`mpicoll bench`: sizes, ratios, the table, the words, JSON and the picture, of figures that are made up."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from mpicoll.cli.bench.command import without_n
from mpicoll.cli.bench.measure import CONFIGS, Measured, Results
from mpicoll.cli.bench.table import in_bytes, parse_sizes, ratio, summary, table, to_json
from mpicoll.cli.main import main
from mpicoll.cli.outputs import Output
from mpicoll.errors import LaunchError


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
        with pytest.raises(ValueError, match=r"multiple of 8 bytes|is not a size: 8, 64K, 1M"):
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


def test_the_spread_of_a_ratio_is_its_quartiles() -> None:
    """A ratio of two rounds far apart is shown with its quartiles, which no ratio below 0 can be among."""
    results = made()
    for each in results.measured:
        each.raw["full"], each.ours["full"] = [10.0] * 5, [3.0, 4.0, 5.0, 20.0, 24.0]
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(table(results))
    text = console.export_text()
    assert "0.50 (0.40-2.00)" in text
    assert "±" not in text
    assert "quartiles in brackets" in text


def test_picture() -> None:
    """It is drawn, where matplotlib is installed."""
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    from mpicoll.cli.bench.plot import draw

    assert draw(made())[:4] == b"\x89PNG"
    assert b"<svg" in draw(made(), "svg")


def test_the_command_of_the_ranks() -> None:
    """The job that the command starts runs it without the number of ranks."""
    for number in (["-n", "2"], ["-n2"], ["--nprocs=2"], ["--nprocs", "2"]):
        assert without_n(["bench", *number, "--sizes", "8"]) == ["bench", "--sizes", "8"]


WRONG = {
    "folder": (["--json", "{tmp}/no/b.json"], "--json {tmp}/no/b.json: there is no folder {tmp}/no"),
    "a folder": (["--json", "{tmp}"], "--json {tmp}: Is a directory"),
    "folder of the picture": (["--plot", "{tmp}/no/b.png"], "--plot {tmp}/no/b.png: there is no folder {tmp}/no"),
    "format": (["--plot", "{tmp}/b.xyz"], "--plot {tmp}/b.xyz: the ending of the name is the format, one of "),
    "no format": (["--plot", "{tmp}/b"], "the ending of the name is the format"),
    "nothing to draw": (["--plot", "{tmp}/b.png", "--ops", "barrier"], "barrier has not"),
    "operation": (["--ops", "foo"], "--ops: unknown foo; known are all_reduce, "),
    "no operation": (["--ops", "all_reduce,"], "--ops: unknown an empty name; known"),
    "size": (["--sizes", "foo"], "--sizes foo: FOO is not a size: 8, 64K, 1M"),
    "rounds": (["--rounds", "0"], "must be at least 1"),
}


@pytest.mark.parametrize(("words", "said"), WRONG.values(), ids=WRONG)
def test_nothing_starts_with_a_wrong_argument(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Arguments are checked and outputs opened before any rank starts: one line, and no file is left."""
    if "--plot" in words:
        pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    monkeypatch.setattr("mpicoll.launch.job.run_job", lambda *_: pytest.fail("the job was started"))
    assert main(["bench", "-n", "2", *(word.format(tmp=tmp_path) for word in words)]) == 2
    said_lines = capsys.readouterr().err.splitlines()
    assert len(said_lines) == 1
    assert said.format(tmp=tmp_path) in said_lines[0]
    assert list(tmp_path.iterdir()) == []


def test_tuning_opens_its_profile_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that cannot be a profile is refused before any rank starts, and stays as it is."""
    (tmp_path / "text").write_text("no JSON")
    for path, said in (
        (tmp_path / "text", "is no file of profiles"),
        (tmp_path / "text" / "b", "folder cannot be made"),
    ):
        assert main(["tune", "-n", "2", "--output", str(path)]) == 2
        assert said in capsys.readouterr().err
    assert (tmp_path / "text").read_text() == "no JSON"


def test_an_output_keeps_the_old_content_until_it_is_written(tmp_path: Path) -> None:
    """A measurement that fails leaves the file as it was; a new file is removed."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("long old content")
    for path in (old, new):
        with pytest.raises(KeyboardInterrupt), Output("--json", str(path)):
            assert path.exists()
            raise KeyboardInterrupt
    assert old.read_text() == "long old content"
    assert not new.exists()
    for path in (old, new):
        with Output("--json", str(path)) as output:
            output.write(b"content")
        assert path.read_text() == "content"
    with Output("--json", os.devnull) as output:
        output.write(b"content")
    with (
        pytest.raises(LaunchError, match="--json /dev/full: No space left on device"),
        Output("--json", "/dev/full") as full,
    ):
        full.write(b"content")
