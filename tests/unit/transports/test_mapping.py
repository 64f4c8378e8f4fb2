"""Files in memory that processes share: none keeps its name, whatever becomes of who made it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpicoll.transports.shm import mapping


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(mapping, "DIRECTORY", str(tmp_path))
    return tmp_path


def test_names_are_taken_away(folder: Path) -> None:
    """One by one, or all that are left."""
    made = [mapping.create("test", 4096) for _ in range(3)]
    assert len(list(folder.iterdir())) == 3
    mapping.remove(made[0][1])
    assert len(list(folder.iterdir())) == 2
    mapping.remove()
    mapping.remove(made[0][1])
    assert not list(folder.iterdir())
    for descriptor, _, _ in made:
        os.close(descriptor)


def test_what_a_killed_process_has_left_is_swept(folder: Path) -> None:
    """Only if it is old, of this kind, and its maker gone."""
    program = f"""
import os, sys, time
from mpicoll.transports.shm import mapping
mapping.DIRECTORY = {str(folder)!r}
for kind in ("segment", "other"):
    mapping.create(kind, 4096)
print("made", flush=True)
sys.stdin.read()
"""
    maker = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert maker.stdout is not None
    assert maker.stdout.readline() == b"made\n"
    mapping.remove_stale("segment")
    assert len(list(folder.iterdir())) == 2  # young
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    mapping.remove_stale("segment")
    assert len(list(folder.iterdir())) == 2  # its maker lives
    maker.kill()
    maker.communicate()
    mapping.remove_stale("segment")
    assert [path.name.split("-")[1] for path in folder.iterdir()] == ["other"]


def test_a_mapping_keeps_no_descriptor(tmp_path: Path) -> None:
    """What is written through one is read through the other, with no file open; what cannot be mapped is an OSError."""
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    before = os.listdir("/proc/self/fd")
    with path.open("r+b") as file:
        one, other = (mapping.map_file(file.fileno(), 8192) for _ in range(2))
    assert os.listdir("/proc/self/fd") == before
    one[5000] = 7
    assert (len(other), other[5000], path.read_bytes()[5000]) == (8192, 7, 7)
    places = Path("/proc/self/maps").read_text().count(str(path))
    assert places == 2
    del one, other
    assert str(path) not in Path("/proc/self/maps").read_text()
    with path.open("rb") as file, pytest.raises(OSError, match="denied"):
        mapping.map_file(file.fileno(), 8192)
