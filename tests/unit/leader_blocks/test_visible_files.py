"""What a rank wrote is seen by others before they go on: sizes, times, folders, and what is late."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from mpicoll.leader_blocks import visible_files
from mpicoll.leader_blocks.visible_files import VisibleFiles, await_visible, path_list, record_files


class Clock:
    """Time that passes only in sleeps; ``happens`` is called in each."""

    def __init__(self, happens: Callable[[float], None] = lambda now: None) -> None:
        self.now = 0.0
        self.happens = happens

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert 0 < seconds <= 0.5
        self.now += seconds
        self.happens(self.now)


def look(published: list[VisibleFiles], clock: Clock, timeout: float = 10.0) -> None:
    await_visible(published, timeout, writer="rank 0 (a)", host="b", clock=clock, sleep=clock.sleep)


def test_path_list(tmp_path: Path) -> None:
    """One path or several, strings or path objects, absolute afterwards; a string is not taken for a list of letters."""
    assert path_list("x") == [os.path.abspath("x")]
    assert path_list(tmp_path) == [str(tmp_path)]
    assert path_list([tmp_path / "a", "b"]) == [str(tmp_path / "a"), os.path.abspath("b")]
    assert path_list(()) == []
    for wrong in (None, 3, b"x", [3], [None]):
        with pytest.raises(TypeError, match="publish"):
            path_list(wrong)


def test_what_is_there_is_seen_at_once(tmp_path: Path) -> None:
    """Files, empty files, folders with folders in them, links and an empty folder: announced, pickled, seen without a sleep."""
    (tmp_path / "file").write_text("hello")
    (tmp_path / "empty").touch()
    (tmp_path / "tree" / "deep").mkdir(parents=True)
    (tmp_path / "tree" / "a").write_text("a")
    (tmp_path / "tree" / "deep" / "b").write_text("bb")
    (tmp_path / "tree" / "link").symlink_to("nowhere")
    (tmp_path / "hollow").mkdir()
    paths = [str(tmp_path / name) for name in ("file", "empty", "tree", "hollow")]
    published = pickle.loads(pickle.dumps(record_files(paths)))
    assert [len(item.files) for item in published] == [1, 1, 3, 0]
    assert published[0].files[0][:2] == ("", 5)
    clock = Clock()
    look(published, clock)
    assert clock.now == 0.0


def test_what_the_leader_did_not_write() -> None:
    """A path that is not there at the end of the block is an error that names it."""
    with pytest.raises(FileNotFoundError, match=r"publish.*/nowhere/at/all"):
        record_files(["/nowhere/at/all"])


def test_everything_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file, its folder, and the folder above a published one."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a").write_text("a")
    (tmp_path / "file").write_text("x")
    flushed: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    record_files([str(tmp_path / "file"), str(tmp_path / "tree")])
    assert set(flushed) == {str(tmp_path / name) for name in ("file", "tree", "tree/a")} | {str(tmp_path)}


@pytest.mark.parametrize("late", ["missing", "shorter", "old version of the same size", "folder without a file"])
def test_late(late: str, tmp_path: Path) -> None:
    """A reader looks until it sees what was announced: the file, all of it, and not an older one."""
    folder = tmp_path / "data"
    folder.mkdir()
    path = folder / "x"
    path.write_text("new!")
    (folder / "y").write_text("y")
    published = record_files([str(folder if late.startswith("folder") else path)])
    found = path.stat()

    def before() -> None:
        if late in ("missing", "folder without a file"):
            path.unlink()
        elif late == "shorter":
            path.write_text("ne")
            os.utime(path, ns=(found.st_mtime_ns, found.st_mtime_ns))
        else:
            path.write_text("old!")
            os.utime(path, ns=(0, found.st_mtime_ns - 3_000_000_000))

    def after(now: float) -> None:
        if now > 2.0:
            path.write_text("new!")
            os.utime(path, ns=(found.st_mtime_ns, found.st_mtime_ns))

    before()
    clock = Clock(after)
    look(published, clock)
    assert 2.0 < clock.now < 3.0
    before()
    with pytest.raises(TimeoutError, match=rf"{path}.*as seen from b 10 s after rank 0 \(a\) had written it"):
        look(published, Clock())


def test_times_of_other_file_systems(tmp_path: Path) -> None:
    """A time that was cut to whole seconds is the same, and a file written again since is good whatever its size."""
    path = tmp_path / "x"
    path.write_text("abcd")
    os.utime(path, ns=(0, 1_700_000_000_123_456_789))
    published = record_files([str(path)])
    os.utime(path, ns=(0, 1_700_000_000_000_000_000))
    look(published, Clock())
    path.write_text("longer than before")
    look(published, Clock())


def test_a_folder_with_very_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number and bytes are compared; more than announced is right, as others may have written since."""
    monkeypatch.setattr(visible_files, "MOST_LISTED", 3)
    for i in range(5):
        (tmp_path / str(i)).write_text("x" * i)
    published = record_files([str(tmp_path)])
    assert (published[0].files, published[0].count, published[0].size) == ((), 5, 10)
    look(published, Clock())
    (tmp_path / "6").write_text("more")
    look(published, Clock())
    (tmp_path / "6").unlink()
    (tmp_path / "4").unlink()
    with pytest.raises(TimeoutError, match="has 4 files with 6 bytes instead of 5 files with 10 bytes"):
        look(published, Clock())


@pytest.mark.parametrize("grain", [100, 1000, 1_000_000, 1_000_000_000, 2_000_000_000])
def test_times_that_are_cut(grain: int, tmp_path: Path) -> None:
    """A file system that keeps times less finely shows the same file; one of another size is another one."""
    path = tmp_path / "x"
    path.write_text("abcd")
    changed = 1_700_000_001_123_456_789
    os.utime(path, ns=(0, changed))
    published = record_files([str(path)])
    os.utime(path, ns=(0, changed // grain * grain))
    look(published, Clock())
    path.write_text("abc")
    os.utime(path, ns=(0, changed // grain * grain))
    with pytest.raises(TimeoutError):
        look(published, Clock())


def test_an_old_version_with_a_later_time(tmp_path: Path) -> None:
    """A new version that keeps the time of its source may be older than the one before: that one is not taken for it."""
    path = tmp_path / "x"
    path.write_text("new version")
    os.utime(path, ns=(0, 1_600_000_000_000_000_000))
    published = record_files([str(path)])
    path.write_text("old")
    os.utime(path, ns=(0, 1_650_000_000_000_000_000))
    with pytest.raises(TimeoutError, match="still as it was before"):
        look(published, Clock())


def test_a_folder_with_a_socket(tmp_path: Path) -> None:
    """What cannot be opened is left alone."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        look(record_files([str(tmp_path)]), Clock())
