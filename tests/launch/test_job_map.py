"""`mpicoll doctor --job` on this machine: started in every way, by all ranks of a job, and by one process alone."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from launch.launching import RUN, call

JOB = ["-m", "mpicoll", "doctor", "--job"]


def test_map_of_a_job() -> None:
    """Rank 0 prints where each rank is, its threads, one link within the node, and what is wrong; no other prints."""
    result = call([*RUN, "-n", "3", "--tag-output", *JOB], env={"OMP_NUM_THREADS": "1000", "CUDA_VISIBLE_DEVICES": "1"})
    assert result.code == 0, result
    assert result.err == "", result
    assert "[1]" not in result.out, result
    assert "3 ranks on 1 node, " in result.out, result
    name = os.uname().nodename
    placed = re.findall(rf"^\[0\] +(\d) +{re.escape(name)} +(\d) +(\d+) .* 1 +OMP 1000", result.out, re.MULTILINE)
    assert [(rank, local) for rank, local, _ in placed] == [("0", "0"), ("1", "1"), ("2", "2")], result
    assert len({pid for _, _, pid in placed}) == 3
    assert re.search(rf"within {re.escape(name)} +0, 1 +[\d.]+ [um]s +[\d.]+ [GM]B/s", result.out), result
    assert "3 ranks share GPU 1 (ranks 0-2)" in result.out, result
    assert "OMP_NUM_THREADS is too large: 3 ranks may make 3000 threads" in result.out, result


def test_map_of_one_process() -> None:
    """Without a launcher it is a job of one rank, without links."""
    result = call([sys.executable, *JOB])
    assert (result.code, result.err) == (0, ""), result
    assert "1 rank on 1 node" in result.out
    assert "latency" not in result.out


@pytest.mark.slow
def test_picture_of_a_job(tmp_path: Path) -> None:
    """The picture lies where it was asked for; where it cannot be drawn, the table is there and the exit code is 1."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "map.png"
    result = call([*RUN, "-n", "2", *JOB, "--plot", str(path)])
    assert result.code == 0, result
    assert f"The picture is in {path}" in result.out
    assert path.read_bytes().startswith(b"\x89PNG")
    result = call([*RUN, "-n", "2", *JOB, "--plot", str(tmp_path / "no" / "map.png")])
    assert result.code == 1, result
    assert "2 ranks on 1 node" in result.out
    assert "could not draw the map" in result.err


def test_picture_without_matplotlib(tmp_path: Path) -> None:
    """Without matplotlib, which is an extra, the table is printed, and one line tells what to install."""
    (tmp_path / "matplotlib.py").write_text(
        "raise ModuleNotFoundError('No module named matplotlib', name='matplotlib')\n"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    result = call([*RUN, "-n", "3", *JOB, "--plot", str(tmp_path / "map.png")], env={"PYTHONPATH": path})
    assert result.code == 1, result
    assert "3 ranks on 1 node" in result.out, result
    assert result.err.count("matplotlib") == 1, result
    assert 'could not draw the map: --plot needs matplotlib: pip install "mpicoll[plot]"' in result.err, result
    assert not (tmp_path / "map.png").exists()
