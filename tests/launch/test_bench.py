"""`mpicoll bench` in a real job: it runs, and what it times gives right results. Nothing here asserts a time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from launch.launching import RUN, call

BENCH = [sys.executable, "-m", "mpicoll", "bench"]


@pytest.mark.slow
def test_short_bench(tmp_path: Path) -> None:
    """Every operation is timed in every way, beside raw MPI; the table is printed and the figures are written."""
    result = call(
        [*BENCH, "-n", "2", "--rounds", "1", "--sizes", "8,32K", "--no-torch", "--json", str(tmp_path / "b.json")]
    )
    assert result.code == 0, result
    told = json.loads((tmp_path / "b.json").read_text())
    assert told["ranks"] == 2
    assert len(told["measured"]) == 2 * 8 + 1, told
    for each in told["measured"]:
        assert len(each["raw"]) == len(each["ours"]) == 5, each
        assert all(time > 0 for times in each["ours"].values() for time in times), each
    assert "all_reduce" in result.out
    assert "with all checks mpicoll takes" in " ".join(result.out.split())
    assert told["about"]["command"].startswith("mpicoll bench")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-n", "1"], "two ranks at least"),
        ([], "two ranks at least"),
        (["-n", "2", "--sizes", "3"], "multiple of 8"),
        (["-n", "2", "--ops", "foo"], "--ops: unknown foo; known are all_reduce,"),
        (["-n", "2", "--json", "/no/such/folder/b.json"], "there is no folder /no/such/folder"),
        (["--json", "/no/such/folder/b.json"], "there is no folder /no/such/folder"),
        (["--ops", "all_reduces"], "unknown all_reduces; known are all_reduce,"),
        (["--rounds", "0"], "at least 1"),
    ],
)
def test_wrong_arguments(words: list[str], said: str) -> None:
    """One line each, and nothing is started."""
    result = call([*BENCH, *words])
    assert result.code == 2, result
    assert said in result.err, result
    assert len(result.err.splitlines()) == 1, result
    assert not result.out, result


def test_all_ranks_with_a_wrong_argument() -> None:
    """Ranks that a launcher started print the error once, on rank 0, and end without a measurement."""
    for words in (["--ops", "foo"], ["--sizes", "foo"], ["--json", "/no/such/folder/b.json"]):
        result = call([*RUN, "-n", "3", "--tag-output", *BENCH[1:], *words])
        assert result.code == 2, result
        said = [line for line in result.err.splitlines() if not line.startswith("mpicoll run: ")]
        assert len(said) == 1, result
        assert said[0].startswith(f"[0] mpicoll: {words[0]}"), result
        assert "rank 0 failed first: exit code 2" in result.err, result
        assert not result.out, result


@pytest.mark.slow
def test_short_tuning(tmp_path: Path) -> None:
    """A profile is written, and a job takes the engine that it names; another MPI's counts for nothing."""
    profile = tmp_path / "profiles.json"
    result = call(
        [
            sys.executable,
            "-m",
            "mpicoll",
            "tune",
            "-n",
            "2",
            "--rounds",
            "1",
            "--sizes",
            "1K,32K",
            "--output",
            str(profile),
        ]
    )
    assert result.code == 0, result
    assert "all_reduce: shared memory for" in result.out, result
    told = json.loads(profile.read_text())
    assert [each["ranks"] for each in told["profiles"]] == [2]
    assert set(told["profiles"][0]["node"]) >= {"all_reduce", "gather", "all_to_all"}
    told["profiles"][0]["node"] = {"broadcast": [[32, 64]]}
    profile.write_text(json.dumps(told))
    script = tmp_path / "script.py"
    script.write_text(
        "import numpy as np\nimport mpicoll as dist\nfrom mpicoll.groups.registry import state\ndist.init_process_group()\n"
        "pair = state().world.pair\nfrom mpicoll.transports.base import Kind\n"
        "print([size for size in (8, 32, 64, 65, 1 << 20) if pair.through(Kind.BROADCAST, size)], "
        "pair.through(Kind.REDUCE, 1 << 20))\ndist.destroy_process_group()\n"
    )
    run = [sys.executable, "-m", "mpicoll", "run", "-n", "2", str(script)]
    assert call(run, env={"MPICOLL_PROFILE": str(profile)}).out == "[32, 64] None\n" * 2
    profile.write_text("{}")
    result = call(run, env={"MPICOLL_PROFILE": str(profile)})
    assert result.code == 0, result
    assert result.err.count("no file of profiles") == 1, result
    assert "[1048576]" in result.out, result
