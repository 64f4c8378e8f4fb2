"""What a waiting rank tells of the others, from what a synthetic job answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mpicoll import groups
from mpicoll.checks import board as boards
from mpicoll.checks.board import Board
from mpicoll.checks.call import Call, call_site
from mpicoll.checks.entries import Entry
from mpicoll.patience import CallWait

RANKS, ME = 1_000, 500


class SyntheticBoard(Board):
    """A board whose other ranks answer at once, as ``where`` says: (calls made, what it waits in), or None for silence."""

    answers: dict[int, tuple[int, Entry] | None]
    asked: list[int]

    def post(self, kind: str, payload: Any, ranks: Iterable[int]) -> None:
        if kind == "ask":
            self.asked = list(ranks)
            for rank in self.asked:
                answer = self.answers.get(rank, (41, Entry(((rank, rank),), state="late")))
                if answer is not None:
                    self._read("where", rank, (payload, *answer))

    def poll(self) -> None:
        pass


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[SyntheticBoard]:
    monkeypatch.setattr(boards, "ANSWER_WITHIN", 0.01)
    comm: Any = SimpleNamespace(Get_rank=lambda: ME, Get_size=lambda: RANKS)
    made = SyntheticBoard(comm, lambda name: (0, Entry(((ME, ME),))))
    made.answers = {}
    state: Any = SimpleNamespace(
        world=SimpleNamespace(rank=lambda: ME), board=made, settings=SimpleNamespace(stall_warn=60.0)
    )
    groups.set_state(state)
    yield made
    groups.set_state(None)


def wait(seq: int = 41, peer: int | None = None) -> CallWait:
    group: Any = SimpleNamespace(group_name="1", display="WORLD", ranks=tuple(range(RANKS)))
    return CallWait(group, Call("barrier", (), call_site(), seq=seq), 3.0, peer)


def test_ranks_that_were_not_asked_are_not_called_silent(board: SyntheticBoard) -> None:
    """Of 1,000 ranks the nearest 256 are asked; those that were not are neither late nor at fault, and their number is told."""
    board.answers = {490: None, 510: None, 511: (40, Entry(((511, 511),), state="late"))}
    error: Any = wait().timed_out(3.0)
    assert len(board.asked) == 256
    assert {490, 510, 511} < set(board.asked)
    assert error.ranks == [490, 510, 511]
    told = {call["state"]: call["ranks"] for call in error.calls}
    assert told["silent"] == [490, 510]
    assert told["late"] == [511]
    assert told["waits"] == sorted({*board.asked, ME} - {490, 510, 511})
    text = str(error)
    assert "ranks 490, 510-511 did not come to it" in text
    assert "743 of its 1000 ranks were not asked. The group is broken now." in text


def test_nobody_of_those_asked_is_late(board: SyntheticBoard) -> None:
    """Where all that were asked have come, it is not said that all have."""
    error: Any = wait().timed_out(3.0)
    text = str(error)
    assert "the 257 ranks that are known of have come to it" in text
    assert "all ranks have come" not in text
    assert "743 of its 1000 ranks were not asked" in text
    assert "see what ranks far from this one print" in text


def test_one_rank_that_is_waited_for_is_asked(board: SyntheticBoard) -> None:
    """A receive asks its source alone, however far it is, and nobody is left out."""
    board.answers = {3: None}
    error: Any = wait(peer=3).timed_out(3.0)
    assert board.asked == [3]
    assert error.ranks == [3]
    assert "not asked" not in str(error)
