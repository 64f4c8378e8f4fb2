"""The shared memory of a node's ranks, with processes of the test's own for ranks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from mpicoll.diagnosis import node_board as slots_module
from mpicoll.diagnosis.node_board import SLOT_BYTES, NodeBoard
from mpicoll.diagnosis.place import Place
from mpicoll.transports.shm import mapping

RANKS = (4, 7, 9)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "slots"
    file.write_bytes(bytes(SLOT_BYTES * len(RANKS)))
    return file


def slots_of(path: Path, rank: int) -> NodeBoard:
    second = os.open(path, os.O_RDONLY)
    return NodeBoard(os.open(path, os.O_RDWR), second, rank, RANKS)


def other(path: Path, rank: int, end: str) -> int:
    """Start a process that is a rank; return its id once it is there. ``end``: how it ends when told by SIGUSR1."""
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        slots = slots_of(path, rank)
        slots.write_state(b"state of " + str(rank).encode())
        slots.write_place("somewhere.py:3 in f()", "barrier", "/a/somewhere.py:2")
        slots.confirm(time.monotonic_ns())
        os.write(told, b"x")
        signal.sigwait({signal.SIGUSR1})
        if end == "orderly":
            slots.leave()
        if end == "signal":
            slots.end()
        os._exit(0)
    os.read(ready, 1)
    os.close(ready)
    os.close(told)
    return pid


def finish(pid: int) -> None:
    os.kill(pid, signal.SIGUSR1)
    os.waitpid(pid, 0)


def test_what_a_rank_writes_is_read_by_the_others(path: Path) -> None:
    """State, place and the moment of its confirmation; what is too large is not there at all."""
    before = time.monotonic_ns()
    pid = other(path, 7, "orderly")
    mine = slots_of(path, 4)
    assert mine.read(7, "state") == b"state of 7"
    assert mine.read(9, "state") == b""
    place = mine.place(7)
    assert (place.site, place.op, place.last) == ("somewhere.py:3 in f()", "barrier", "/a/somewhere.py:2")
    assert str(place) == "somewhere.py:3 in f(), after its last known call barrier at /a/somewhere.py:2"
    assert 0 <= place.ago < 60
    assert mine.place(9) == Place()
    assert not mine.place(9).site
    mine.write_place(f"/{'d' * 4000}.py:17 in f()", "barrier", f"/{'e' * 4000}.py:18")
    assert mine.place(4).site.endswith("d.py:17 in f()")
    assert mine.place(4).last.endswith("e.py:18")
    assert before < mine.confirmed(7) < time.monotonic_ns()
    assert mine.confirmed(9) == 0
    assert not mine.write("state", bytes(SLOT_BYTES))
    assert mine.read(4, "state") == b""
    assert mine.write("state", b"small")
    assert mine.read(4, "state") == b"small"
    assert mine.write("state", b"")
    assert mine.read(4, "state") == b""
    finish(pid)
    mine.close()


def test_half_written_memory_is_not_read(path: Path) -> None:
    """A text that does not fit its checksum, or a length that cannot be, reads as nothing."""
    mine = slots_of(path, 4)
    mine.write("state", b"abcdef")
    at = mine._memory.find(b"abcdef")
    mine._memory[at : at + 1] = b"x"
    assert mine.read(4, "state") == b""
    mine._memory[at - 8 : at - 4] = b"\xff\xff\xff\x7f"
    assert mine.read(4, "state") == b""
    mine.close()


def test_a_process_that_is_gone_is_noticed(path: Path) -> None:
    """One that ends without a word is dead, also as a zombie; one that has never been there, or has left, is not."""
    mine = slots_of(path, 4)
    assert mine.dead() == []
    first, second = other(path, 7, "sudden"), other(path, 9, "orderly")
    assert mine.dead() == []
    os.kill(second, signal.SIGUSR1)
    os.kill(first, signal.SIGUSR1)  # not waited for yet: a zombie
    assert mine.await_death() == 7
    assert mine.dead() == [7]
    for pid in (first, second):
        os.waitpid(pid, 0)
    assert mine.dead() == [7]
    mine.close()


def test_waiting_follows_ranks_that_leave(path: Path) -> None:
    """A rank that ends in an orderly way is followed by the next; when all have left there is nobody to wait for."""
    mine = slots_of(path, 9)
    first, second = other(path, 4, "orderly"), other(path, 7, "sudden")
    finish(first)
    finish(second)
    assert mine.await_death() == 7
    mine.close()
    again = slots_of(path, 9)
    finish(other(path, 7, "orderly"))
    assert again.await_death() == -1
    again.close()


def test_no_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the memory cannot be had, nothing is left behind."""
    monkeypatch.setattr(mapping, "DIRECTORY", str(tmp_path))
    descriptor, path, why = mapping.create("test", 4096)
    os.close(descriptor)
    assert (Path(path).stat().st_size, why) == (4096, "")

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert mapping.create("test", 4096) == (-1, "", f"No space left on device (4 KiB in {tmp_path})")
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(mapping, "DIRECTORY", str(tmp_path / "missing"))
    assert mapping.create("test", 4096)[:2] == (-1, "")


def test_news_of_the_ranks_that_wait(path: Path) -> None:
    """The last change on the node is seen by all, and each rank knows how many lower ones have a state that still holds."""
    first, mine, last = (slots_of(path, rank) for rank in RANKS)
    assert mine.changed() == 0
    assert [slots.waiting_below() for slots in (first, mine, last)] == [0, 0, 0]
    before = time.monotonic_ns()
    last.write_state(b"waits")
    last.confirm(time.monotonic_ns())
    changed = mine.changed()
    assert before <= changed <= time.monotonic_ns()
    first.write_state(b"waits, too")
    first.confirm(time.monotonic_ns())
    confirmed = mine.confirmed(4)
    assert mine.changed() > changed
    assert [slots.waiting_below() for slots in (first, mine, last)] == [0, 1, 1]
    assert [slots.waiting_below(confirmed) for slots in (first, mine, last)] == [0, 1, 1]
    assert mine.waiting_below(confirmed + 1) == 0
    changed = mine.changed()
    first.write("state", b"")
    assert mine.changed() == changed  # nobody can be stuck because a rank goes on
    assert last.waiting_below() == 0
    for slots in (first, mine, last):
        slots.close()


def test_a_rank_that_a_signal_ends_is_dead_a_while_later(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same signal is on its way to the others, as a rule: that its process is gone is no news at once, and nobody says so."""
    mine = slots_of(path, 4)
    monkeypatch.setattr(slots_module, "ENDED_FOR", 3600.0)
    finish(other(path, 7, "signal"))
    finish(other(path, 9, "orderly"))
    assert mine.ended(7)
    assert not mine.ended(9)
    assert [mine.orderly(rank) for rank in RANKS] == [False, False, True]
    assert mine.await_death() == -1
    assert mine.dead() == []
    monkeypatch.setattr(slots_module, "ENDED_FOR", 0.0)
    assert mine.dead() == [7]
    mine.close()


def test_one_rank_reports(path: Path) -> None:
    """Who reports where all are says so, and the others of the node read it for a while."""
    mine = slots_of(path, 4)
    assert not mine.reported(within=60)
    mine.report()
    assert mine.reported(within=60)
    assert not mine.reported(within=0)
    mine.close()
