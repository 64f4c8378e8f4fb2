"""Files in memory that processes share: none keeps its name, whatever becomes of who made it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpicoll import shared


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(shared, "DIRECTORY", str(tmp_path))
    return tmp_path


def test_names_are_taken_away(folder: Path) -> None:
    """One by one, or all that are left."""
    made = [shared.create("test", 4096) for _ in range(3)]
    assert len(list(folder.iterdir())) == 3
    shared.remove(made[0][1])
    assert len(list(folder.iterdir())) == 2
    shared.remove()
    shared.remove(made[0][1])
    assert not list(folder.iterdir())
    for descriptor, _, _ in made:
        os.close(descriptor)


def test_what_a_killed_process_has_left_is_swept(folder: Path) -> None:
    """Only if it is old, of this kind, and its maker gone."""
    program = f"""
import os, sys, time
from mpicoll import shared
shared.DIRECTORY = {str(folder)!r}
for kind in ("segment", "other"):
    shared.create(kind, 4096)
print("made", flush=True)
sys.stdin.read()
"""
    maker = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert maker.stdout is not None
    assert maker.stdout.readline() == b"made\n"
    shared.sweep("segment")
    assert len(list(folder.iterdir())) == 2  # young
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    shared.sweep("segment")
    assert len(list(folder.iterdir())) == 2  # its maker lives
    maker.kill()
    maker.communicate()
    shared.sweep("segment")
    assert [path.name.split("-")[1] for path in folder.iterdir()] == ["other"]
