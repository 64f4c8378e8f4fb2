"""The sources without Python, under the thread sanitizer: threads are the members of a group, on one ring and one segment."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [str(ROOT / "mpicoll" / "native" / f"{name}.c") for name in ("ring", "segment", "reduce", "copy", "poll")]
TURNS = 300


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program ``threads.c``, built with the thread sanitizer."""
    if shutil.which("gcc") is None:
        pytest.skip("this machine lacks gcc")
    found = subprocess.run(["gcc", "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True)
    if not os.path.isabs(found.stdout.strip()):
        pytest.skip("this machine lacks libtsan")
    built = tmp_path_factory.mktemp("native") / "threads"
    options = ("-std=gnu11", "-O1", "-g", "-fsanitize=thread", "-Wall", "-Wextra", "-Werror", "-pthread")
    here = (f"-I{ROOT / 'mpicoll' / 'native'}", str(Path(__file__).with_name("threads.c")))
    subprocess.run(["gcc", *options, *here, *SOURCES, "-o", str(built)], timeout=120, check=True)
    return built


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_threads(program: Path, size: int) -> None:
    """Rounds, calls in one step and transfers of each kind, with delays: what is read is right, and ordered by atomics."""
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    for seed in range(3):
        command = [str(program), str(size), str(TURNS), str(seed)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"{size} members made {TURNS} turns" in done.stdout
