"""The sources without Python, also under the thread sanitizer: threads are the members of a group, on a ring and a segment."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    str(ROOT / "mpicoll" / "native" / f"{name}.c")
    for name in ("ring", "segment", "single_copy", "peer_memory", "reduce", "copy")
]
TURNS = 300


def build(folder: Path, *options: str) -> Path:
    """Return the program ``threads.c``, built with some options more."""
    if shutil.which("gcc") is None:
        pytest.skip("this machine lacks gcc")
    built = folder / "threads"
    general = ("-std=gnu11", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", *options)
    here = (f"-I{ROOT / 'mpicoll' / 'native'}", str(Path(__file__).with_name("threads.c")))
    subprocess.run(["gcc", *general, *here, *SOURCES, "-o", str(built)], timeout=120, check=True)
    return built


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, built with the thread sanitizer."""
    if shutil.which("gcc") is None:
        pytest.skip("this machine lacks gcc")
    found = subprocess.run(["gcc", "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True)
    if not os.path.isabs(found.stdout.strip()):
        pytest.skip("this machine lacks libtsan")
    return build(tmp_path_factory.mktemp("sanitized"), "-O1", "-fsanitize=thread")


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_threads(sanitized: Path, size: int) -> None:
    """Rounds, calls in one step and transfers of each kind, with delays: what is read is right, and ordered by atomics."""
    for seed in range(3):
        run(sanitized, size, seed)


@pytest.mark.parametrize("size", [2, 3])
def test_non_temporal_stores(size: int, tmp_path: Path) -> None:
    """The same with larger pieces, where some members write by non-temporal stores: what is read is right."""
    program = build(tmp_path, "-O2", "-DROOM_BYTES=32768")
    for seed in range(3):
        run(program, size, seed)


def run(program: Path, size: int, seed: int) -> None:
    command = [str(program), str(size), str(TURNS), str(seed)]
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{size} members made {TURNS} turns" in done.stdout
