"""What a waiting rank tells of the others, from what a synthetic job answers."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mpicoll.diagnosis import board as boards
from mpicoll.diagnosis import job_state, wait_policy
from mpicoll.diagnosis.board import Board, Failure
from mpicoll.diagnosis.call import CallDescription
from mpicoll.diagnosis.deadlock_search import search
from mpicoll.diagnosis.job_state import await_death, reported_dead, waits_now
from mpicoll.diagnosis.place import Place
from mpicoll.diagnosis.report.entries import RankState
from mpicoll.diagnosis.report.texts import deadlock
from mpicoll.diagnosis.wait_policy import CallWait
from mpicoll.errors import DeadlockError, GroupBrokenError, PeerExitedError, PeerFailedError
from mpicoll.groups import registry
from mpicoll.runtime.call_site import call_site

RANKS, ME = 1_000, 500


class SyntheticBoard(Board):
    """A board whose other ranks answer at once, as ``where`` says: (calls made, what it waits in), or None for silence."""

    answers: dict[int, tuple[int, RankState] | None]
    asked: list[int]

    def post(self, kind: str, payload: Any, ranks: Iterable[int]) -> None:
        if kind == "ask":
            self.asked = list(ranks)
            for rank in self.asked:
                answer = self.answers.get(rank, (41, RankState(((rank, rank),), state="late")))
                if answer is not None:
                    self._read("where", rank, (payload, *answer))

    def poll(self) -> None:
        pass


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[SyntheticBoard]:
    monkeypatch.setattr(boards, "ANSWER_WITHIN", 0.01)
    comm: Any = SimpleNamespace(Get_rank=lambda: ME, Get_size=lambda: RANKS)
    made = SyntheticBoard(comm, lambda name: (0, RankState(((ME, ME),))))
    made.answers = {}
    state: Any = SimpleNamespace(
        world=SimpleNamespace(rank=lambda: ME, size=lambda: RANKS, group_name="0"),
        board=made,
        settings=SimpleNamespace(stall_warn=60.0),
        groups={},
        waits={},
        meetings={},
    )
    registry.set_state(state)
    yield made
    registry.set_state(None)


@pytest.mark.parametrize("destroyed", [{}, {"1": 4}, {"0": 3, "1": 4}])
def test_a_death_is_told_whoever_notices_it_first(destroyed: dict[str, int], board: SyntheticBoard) -> None:
    """The thread that waits for it says so, once, also where the main thread has seen it: that one may be at its end.

    It is noted unless the rank had destroyed its default group.
    """
    slots: Any = SimpleNamespace(await_death=lambda: 7, place=lambda rank: Place(0.0, "job.py:3", ""))
    slots.read = lambda rank, what: pickle.dumps(("job.py:2", destroyed)) if destroyed else b""
    board.slots = slots
    board.dead.add(7)
    noted: list[int] = []
    try:
        assert "rank 7's process ended without a report" in await_death(board, noted.append)
        assert await_death(board, noted.append) == ""
        assert noted == ([] if "0" in destroyed else [7])
    finally:
        reported_dead.discard(7)


def wait(seq: int = 41, peer: int | None = None) -> CallWait:
    group: Any = SimpleNamespace(group_name="1", display="WORLD", ranks=tuple(range(RANKS)))
    return CallWait(group, CallDescription("barrier", (), call_site(), seq=seq), 3.0, peer)


def test_ranks_that_were_not_asked_are_not_called_silent(board: SyntheticBoard) -> None:
    """Of 1,000 ranks the nearest 256 are asked; those that were not are neither late nor at fault, and their number is told."""
    board.answers = {490: None, 510: None, 511: (40, RankState(((511, 511),), state="late"))}
    error: Any = wait().timed_out(3.0)
    assert len(board.asked) == 256
    assert {490, 510, 511} < set(board.asked)
    assert error.ranks == [490, 510, 511]
    told = {call["state"]: call["ranks"] for call in error.calls}
    assert told["silent"] == [490, 510]
    assert told["late"] == [511]
    assert told["waits"] == sorted({*board.asked, ME} - {490, 510, 511})
    text = str(error)
    assert "ranks 490, 510-511 did not make the matching call" in text
    assert "743 of the group's 1000 ranks were not asked. The group is broken now." in text


def test_a_rank_that_does_not_answer_but_waits_in_the_call(board: SyntheticBoard) -> None:
    """The record of a rank of this node says which collective the rank waits in; such a rank is not late."""
    records = {499: ("1", 41), 501: ("1", 40), 502: ("2", 41), 503: None}
    board.answers = dict.fromkeys(records)

    def read(rank: int, what: str) -> bytes:
        assert what == "waits"
        record = records[rank]
        return b"" if record is None else pickle.dumps([(*record, time.time() - 2.0, "job.py:3")])

    slots: Any = SimpleNamespace(ranks=[*records, ME], me=ME, read=read, place=lambda rank: Place(0.0, "job.py:3", ""))
    board.slots = slots
    error: Any = wait().timed_out(3.0)
    assert error.ranks == [501, 502, 503]
    told = {call["state"]: call["ranks"] for call in error.calls}
    assert told["silent"] == [501, 502, 503]
    assert told["unheard"] == [499]
    assert "rank 499: made this call, and does not answer" in str(error)


def test_nobody_of_those_asked_is_late(board: SyntheticBoard) -> None:
    """Where all that were asked have come, it is not said that all have."""
    error: Any = wait().timed_out(3.0)
    text = str(error)
    assert "the 257 ranks whose state is known have made the call" in text
    assert "all ranks have come" not in text
    assert "743 of the group's 1000 ranks were not asked" in text
    assert "read what ranks far from this rank print" in text


def test_one_rank_that_is_waited_for_is_asked(board: SyntheticBoard) -> None:
    """A receive asks its source alone, however far it is, and nobody is left out."""
    board.answers = {3: None}
    error: Any = wait(peer=3).timed_out(3.0)
    assert board.asked == [3]
    assert error.ranks == [3]
    assert "not asked" not in str(error)


@pytest.mark.parametrize(("made", "ends_at_once"), [(40, True), (41, False), (42, False)])
def test_a_call_that_the_failed_rank_has_made_may_complete(
    board: SyntheticBoard, made: int, ends_at_once: bool
) -> None:
    """A rank that failed after this call ends the wait only if the call does not complete a moment later."""
    waiting = wait()
    board.failed[3] = Failure(3, "KeyError: 'x'", "job.py:7", 1, calls={"1": made})
    assert isinstance(waiting.ended(board, 0.2), PeerFailedError) is ends_at_once
    assert isinstance(waiting.ended(board, 0.6), PeerFailedError) is ends_at_once
    assert isinstance(waiting.ended(board, 0.8), PeerFailedError)


def test_a_rank_has_made_the_calls_of_a_group_that_it_has_destroyed(
    board: SyntheticBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another member may reach its time limit in the last call while this rank destroys the group and ends."""
    registry.state().groups["1.1"] = SimpleNamespace(calls=50, last=None, display="rows", last_call=lambda: "")  # type: ignore[assignment]
    assert [waits_now({"1": 3}, name)[0] for name in ("1", "1.1", "1.2")] == [3, 50, 0]
    monkeypatch.setattr(job_state, "_job", None)
    assert [waits_now({"1": 3}, name)[0] for name in ("1", "1.2")] == [3, 0]


def test_the_last_call_of_those_that_are_late(board: SyntheticBoard) -> None:
    """A rank that is between two calls answers with its last one; one that does not answer has written its own down."""
    called: Any = SimpleNamespace(calls=40, last="…", display="WORLD", last_call=lambda: "barrier at /a b/train.py:17")
    other: Any = SimpleNamespace(calls=50, last="…", display="rows", last_call=lambda: "all_reduce at /a b/train.py:18")
    unused: Any = SimpleNamespace(calls=0, last=None, display="columns", last_call=lambda: "")
    registry.state().groups.update({"1": called, "1.1": other, "1.2": unused})
    calls, entry = waits_now({}, "1")
    assert (calls, entry.state, entry.op, entry.site, entry.group) == (
        40,
        "late",
        "barrier",
        "/a b/train.py:17",
        "WORLD",
    )
    assert waits_now({}, "1.2")[1].op == "all_reduce"
    slots: Any = SimpleNamespace(
        me=ME,
        ranks=(499, ME, 501),
        read=lambda rank, what: b"",
        place=lambda rank: Place(0.1, "/a b/train.py:30 in f()", "barrier", "/a b/train.py:17"),
    )
    board.slots = slots
    board.answers = {498: (40, entry), 499: None, 501: None}
    error: Any = wait().timed_out(3.0)
    text = " ".join(str(error).split())
    assert (
        "rank 498: has not made the matching call, between two calls, or at the end, last known call barrier at train.py:17"
        in text
    )
    silent = "ranks 499, 501: did not make the matching call, it is at /a b/train.py:30 in f()"
    assert f"{silent}, last known call barrier at train.py:17" in text
    assert [(call["op"], call["site"]) for call in error.calls[:2]] == [("barrier", "/a b/train.py:17")] * 2
    assert error.ranks == [498, 499, 501]


def test_ranks_that_are_late_in_many_ways(board: SyntheticBoard) -> None:
    """However many places the late ranks are in, those who wait keep their row and are not late."""
    late = range(400, 600, 3)
    board.answers = {rank: (40, RankState((), "recv", site=f"/train.py:{rank}", state="late")) for rank in late}
    error: Any = wait().timed_out(3.0)
    assert error.ranks == list(late)
    assert [call["ranks"] for call in error.calls if call["state"] == "waits"] == [sorted({*board.asked, ME} - {*late})]
    assert len(str(error).splitlines()) <= 20


def test_a_certificate_is_waited_for(board: SyntheticBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that hears that another gave its group up for a certificate with both waits for its own copy, if not for long."""
    told = deadlock([RankState(((rank, rank),), "recv", state="waits") for rank in (ME, 501)], {ME: [501], 501: [ME]})
    withdrawn = ("1", "it is a deadlock", told.members, False)
    board._read("withdrawn", 501, withdrawn)
    waiting = wait()
    assert waiting.check(0.01) is None
    board._read("deadlock", 499, ({ME: search.epoch}, told))
    certain = waiting.check(0.01)
    assert isinstance(certain, DeadlockError)
    assert certain.ranks == [ME, 501]
    late = wait()
    monkeypatch.setattr(wait_policy, "VERDICT_WITHIN", 0.0)
    broken = late.check(0.01)
    assert isinstance(broken, GroupBrokenError)
    assert "rank 501 gave the group up: it is a deadlock" in str(broken)
    board.withdrawn.clear()
    board._read("withdrawn", 501, ("1", "it is a deadlock", ((501, 502),), False))
    assert isinstance(wait().check(0.01), GroupBrokenError)


@pytest.mark.parametrize(("sent", "ends"), [({}, True), ({"1": {5: 1}}, False)])
def test_a_receive_from_any_rank_when_all_have_ended(board: SyntheticBoard, sent: dict[str, Any], ends: bool) -> None:
    """It ends when the last rank has ended, unless any of them has sent a message that is not received."""
    group: Any = SimpleNamespace(
        group_name="1",
        display="WORLD",
        ranks=(ME, 499, 501),
        received={},
        by_peer=lambda counts: counts,
        unwaited={},
        futures={},
    )
    waiting = CallWait(group, CallDescription("recv", (), call_site()), 3.0, peer=-1, tag=3)
    board._read("exited", 499, ({}, sent, {}, "ended the program"))
    assert waiting.ended(board, 0.1) is None
    board._read("exited", 501, ({}, {}, {}, "ended the program"))
    assert isinstance(waiting.ended(board, 0.1), PeerExitedError) is ends


def test_whoever_ended_is_named_before_those_that_failed_for_it(board: SyntheticBoard) -> None:
    """Each rank that waits for one that has ended says so itself, also where another was faster to fail."""
    board._read("exited", 499, ({}, {}, {}, "ended the program"))
    board._read("failed", 501, ("PeerExitedError: barrier on group WORLD", "train.py:3", 1))
    error = wait().ended(board, 0.01)
    assert isinstance(error, PeerExitedError)
    assert "rank 499 ended the program" in str(error)
    board._read("failed", 502, ("ValueError: no such file", "train.py:5", 1))
    error = wait().ended(board, 0.01)
    assert isinstance(error, PeerFailedError)
    assert "rank 502 failed: ValueError" in str(error)


@pytest.mark.parametrize("op", ["reduce", "gather", "gather_single"])
def test_the_root_alone_needs_the_members(op: str) -> None:
    """Without a round a member that only sends needs nobody, and the root needs all members; a root that sends needs nobody."""
    call = CallDescription(op, (("root", 0),), call_site(), seq=1, passes=True)
    assert wait_policy._needs(call, 0, "roll") is None
    assert wait_policy._needs(call, 1, "roll") == ()
    call = CallDescription("broadcast", (("root", 0),), call_site(), seq=1, passes=True)
    assert (wait_policy._needs(call, 0, "roll"), wait_policy._needs(call, 1, "roll")) == ((), (0,))


@pytest.mark.usefixtures("board")
def test_calls_that_mpi_completes_do_not_wait_for_each_other() -> None:
    """Where calls are not compared, another reduction or name is no deadlock; another root, size or function may be one."""
    group: Any = SimpleNamespace(
        group_name="1", display="WORLD", ranks=tuple(range(RANKS)), rank=lambda: ME, level="off"
    )

    def call_of(op: str, *key: Any) -> int:
        return CallWait(group, CallDescription(op, key, call_site(), seq=4), 3.0).as_wait().call

    plain = call_of("all_reduce", "ReduceOp.SUM", "float64", ("elements", 4))
    assert plain == call_of("all_reduce", "ReduceOp.MAX", "float64", ("elements", 4), ("name", "loss"))
    assert plain != call_of("all_reduce", "ReduceOp.SUM", "float64", ("elements", 5))
    assert plain != call_of("reduce", "ReduceOp.SUM", "float64", ("elements", 4))
