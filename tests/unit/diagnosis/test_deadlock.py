"""Certificates of deadlock: what is stuck, and what only looks so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpicoll.diagnosis.deadlock import State, Wait, blocked_set, report
from mpicoll.diagnosis.report.advice import after_deadlock
from mpicoll.diagnosis.report.entries import RankState


def _entry(op: str, group: str, peer: str = "", seq: int = 0) -> RankState:
    return RankState((), op, (("peer", peer),) if peer else (), seq, "job.py:1", group, state="waits")


def _recv(source: int, tag: int = 0, members: tuple[int, ...] = (0, 1, 2)) -> Wait:
    return Wait("w", members, _entry("recv", "w", f"from rank {source}"), peer=source, tag=tag)


def _anybody(tag: int) -> Wait:
    return Wait("w", (0, 1, 2), replace(_entry("recv", "w", "from any rank"), peer=-1), peer=-1, tag=tag)


def _send(peer: int, tag: int = 0) -> Wait:
    return Wait("w", (0, 1, 2), _entry("send", "w", f"to rank {peer}"), peer=peer, sending=True, tag=tag)


def _collective(group: str, seq: int, members: tuple[int, ...] = (0, 1, 2)) -> Wait:
    return Wait(group, members, _entry("barrier", group, seq=seq), seq=seq, since=990.0)


def _states(*states: State) -> dict[int, State]:
    """Return the states by rank; all know the groups."""
    return {
        state.rank: state if state.gone else replace(state, calls={"a": 0, "b": 0, "w": 0, **state.calls})
        for state in states
    }


def test_a_cycle_of_receives_is_stuck() -> None:
    """Ranks that each wait for a message of the next one are stuck, and the report names all of them."""
    states = _states(*(State(r, waits=(_recv((r + 1) % 3),)) for r in range(3)))
    assert blocked_set(states) == {0, 1, 2}
    text = report(states, {0, 1, 2}).text()
    assert text.splitlines()[0] == "deadlock: ranks 0-2 wait for each other, and no rank can release them (group w)"
    assert "  rank 2: recv from rank 0 at job.py:1, needs rank 0 to send" in text
    assert "  cycle: rank 0 waits for 1 -> 2 -> 0" in text


def test_a_chain_to_a_free_rank_is_not_stuck() -> None:
    """A long chain of waiting that ends at a rank that did not answer, or has a free thread, can still be released."""
    chain = [State(r, waits=(_recv(r + 1, members=tuple(range(6))),)) for r in range(4)]
    assert blocked_set(_states(*chain)) == set()
    assert blocked_set(_states(*chain, State(4, waits=(_recv(0),), free=True))) == set()
    assert blocked_set(_states(*chain, State(4))) == set()


def test_a_message_on_its_way_releases() -> None:
    """A receive whose message has been sent, with its tag, is not stuck; with another tag it is."""
    waiting = State(0, waits=(_recv(1, tag=3),))
    peer = {"waits": (_recv(0),)}
    assert blocked_set(_states(waiting, State(1, sent={("w", 0, 3): 1}, **peer))) == set()  # type: ignore[arg-type]
    assert blocked_set(_states(waiting, State(1, sent={("w", 0, 4): 1}, **peer))) == {0, 1}  # type: ignore[arg-type]
    received = State(0, waits=(_recv(1, tag=3),), received={("w", 1, 3): 1})
    assert blocked_set(_states(received, State(1, sent={("w", 0, 3): 1}, **peer))) == {0, 1}  # type: ignore[arg-type]


def test_head_to_head_sends() -> None:
    """Two sends to each other are stuck, unless one side has started a receive that takes the message."""
    assert blocked_set(_states(State(0, waits=(_send(1),)), State(1, waits=(_send(0),)))) == {0, 1}
    started = State(1, waits=(_send(0),), receives=(("w", 0, 0),))
    assert blocked_set(_states(State(0, waits=(_send(1),)), started)) == set()
    anybody = State(1, waits=(_send(0),), receives=(("w", -1, 0),))
    assert blocked_set(_states(State(0, waits=(_send(1),)), anybody)) == set()
    other_tag = State(1, waits=(_send(0),), receives=(("w", 0, 9),))
    assert blocked_set(_states(State(0, waits=(_send(1),)), other_tag)) == {0, 1}


def test_collectives_in_opposite_order_on_two_groups() -> None:
    """Ranks that call two groups in opposite order wait for each other; those who only follow them are stuck too."""
    states = _states(
        State(0, waits=(_collective("a", 1, (0, 1)),), calls={"a": 1}),
        State(1, waits=(_collective("b", 1, (0, 1)),), calls={"b": 1}),
        State(2, waits=(_recv(0),)),
    )
    assert blocked_set(states) == {0, 1, 2}
    told = report(states, {0, 1}, 1000.0)
    assert "rank 0: barrier #1 on group a at job.py:1, needs rank 1, waited 10 s" in told.text()
    assert told.ranks == [0, 1]


def test_a_collective_that_all_have_issued_is_not_stuck() -> None:
    """A wait for a collective that every member has issued is about to end."""
    states = _states(*(State(r, waits=(_collective("a", 2, (0, 1)),), calls={"a": 2}) for r in range(2)))
    assert blocked_set(states) == set()


def test_a_missing_member_outside_does_not_hide_one_inside() -> None:
    """One stuck member is enough to keep a collective from ending, whoever else is still to come."""
    states = _states(
        State(0, waits=(_collective("w", 1),), calls={"w": 1}),
        State(1, waits=(_recv(0),)),
    )  # rank 2 computes
    assert blocked_set(states) == {0, 1}


def test_any_source() -> None:
    """A receive from anybody is stuck only when everybody is, and nothing is on its way."""
    anybody = State(0, waits=(_recv(-1),))
    waiting = [State(r, waits=(_recv(0),)) for r in (1, 2)]
    assert blocked_set(_states(anybody, *waiting)) == {0, 1, 2}
    assert blocked_set(_states(anybody, waiting[0])) == set()
    assert blocked_set(_states(anybody, waiting[0], State(2, gone=True))) == {0, 1}
    assert blocked_set(_states(anybody, waiting[0], State(2, gone=True, sent={("w", 0, 0): 1}))) == set()


ANYBODY = {
    "other tags": (
        {1: {("w", 0, 5): 1, ("w", 0, 7): 2}, 2: {("w", 0, 5): 1}},
        "a message from any rank (rank 1 has sent tags 5, 7; rank 2 has sent tag 5)",
        "pass the same tag= to its send and its receive; else some ranks wait in a collective",
    ),
    "another group": (
        {1: {("a", 0, 3): 1, ("b", 0, 4): 1}, 2: {("a", 0, 3): 1, ("b", 1, 3): 1}},
        "a message from any rank (ranks 1-2 have sent tag 3 on group rows)",
        "pass the same group= to its send and its receive; else some ranks wait in a collective",
    ),
    "both": (
        {2: {("w", 0, 5): 1, ("a", 0, 3): 1}},
        "a message from any rank (rank 2 has sent tag 5 and tag 3 on group rows)",
        "pass the same group= to its send and its receive; else a message has arrived with a tag that rank 0 does not wait for",
    ),
    "a rank that is no member": (
        {3: {("a", 0, 3): 1, ("a", 0, 4): 1}},
        "a message from any rank (rank 3 has sent tag 3 on group rows)",
        "pass the same group= to its send and its receive; else some ranks wait in a collective",
    ),
    "received": ({1: {("w", 0, 9): 2}}, "a message from any rank", "some ranks wait in a collective"),
}


@pytest.mark.parametrize("case", ANYBODY)
def test_what_was_sent_to_a_receive_from_any_rank(case: str) -> None:
    """The report names the messages that no receive takes, with their senders; for a message it may mean, the advice says so."""
    sent, needs, advice = ANYBODY[case]
    known = {"groups": {"w": "w", "a": "rows", "b": "columns"}, "received": {("w", 1, 9): 2}}
    waits = [State(r, waits=(_collective("w", 1),), calls={"w": 1}, sent=sent.get(r, {})) for r in (1, 2)]
    outside = [State(r, free=True, sent=sent[r]) for r in sent if r == 3]
    states = _states(State(0, waits=(_anybody(3),), **known), *waits, *outside)  # type: ignore[arg-type]
    assert blocked_set(states) == {0, 1, 2}
    told = report(states, {0, 1, 2})
    assert next(row["needs"] for row in told.calls) == needs
    assert advice in told.next_step


def test_a_tag_that_some_ranks_do_not_wait_for() -> None:
    """The advice names the receivers of such messages only, is shown to its end, and does not deny that these have arrived."""
    sender = State(1, waits=(_anybody(5),), sent={("w", 0, 5): 1, ("w", 2, 6): 1})
    told = report(_states(State(0, waits=(_anybody(3),)), sender, State(2, waits=(_anybody(3),))), {0, 1, 2})
    assert told.next_step == (
        "a message has arrived with a tag that ranks 0, 2 do not wait for: if it is the expected message, pass the same tag= to "
        "its send and its receive; else every rank waits for a message and no rank sends: let one rank send first"
    )
    assert told.next_step in " ".join(told.text(width=80).split())


def test_a_message_from_another_rank_than_the_receive_names() -> None:
    """The row says which rank has sent a message with the tag; a message that the receive's own source has sent counts more."""
    sent = {"sent": {("w", 1, 0): 1}}
    states = _states(State(0, waits=(_recv(1),), **sent), State(1, waits=(_recv(2),)), State(2, waits=(_recv(0),)))  # type: ignore[arg-type]
    told = report(states, {0, 1, 2})
    assert "rank 1: recv from rank 2 at job.py:1, needs rank 2 to send (rank 0 has sent tag 0)" in told.text()
    assert told.next_step.endswith("a message with its tag has arrived on rank 1 from another rank")
    states[2] = replace(states[2], sent={("w", 1, 5): 1})
    told = report(states, {0, 1, 2})
    assert "needs rank 2 to send (it has sent tag 5)" in told.text()
    assert "from another rank" not in told.next_step


@pytest.mark.parametrize(
    ("ops", "advice"),
    [
        (("recv", "recv"), "all ranks receive first"),
        (("irecv", "irecv"), "all ranks wait for messages that no rank has sent"),
        (("recv", "irecv"), "all ranks receive first"),
        (("send", "isend"), "a large send ends when its message is received"),
        (("send_object_list", "send_object_list"), "a send of large objects ends when they are received"),
        (("recv_object_list", "recv_object_list"), "a send of large objects ends when they are received"),
        (("send_object_list", "recv"), "a send and its receive must name each other's rank"),
    ],
)
def test_advice_on_messages(ops: tuple[str, str], advice: str) -> None:
    """What to do depends on the calls that wait: sends, receives that were started before, objects."""
    rows = [RankState(((r, r),), op, (), 0, "job.py:1", "w", state="waits", peer=1 - r) for r, op in enumerate(ops)]
    assert after_deadlock(rows, ()).startswith(advice)


def test_a_receive_from_any_rank_that_has_ended() -> None:
    """Ranks that have ended are named, and nobody is told to send first while there is nobody who could."""
    waits = {"waits": (_anybody(3),)}
    gone = State(1, gone=True, sent={("w", 0, 5): 1})
    told = report(_states(State(0, **waits), gone, State(2, gone=True)), {0})  # type: ignore[arg-type]
    words = "needs a message from any rank (ranks 1-2 have ended; rank 1 has sent tag 5)"
    assert words in " ".join(told.text().split())
    assert "ranks 1-2: ended the program" in told.text()
    assert "pass the same tag=" in told.next_step
    told = report(_states(State(0, **waits), State(1, gone=True), State(2, waits=(_recv(0),))), {0, 2})  # type: ignore[arg-type]
    assert told.next_step.startswith("no rank sends the message that rank 0 waits for: ")


def test_a_message_on_another_group_of_the_same_ranks() -> None:
    """Two groups that read alike are told apart by their names, also where ranks wait on one of them only."""
    sent = {("a", 0, 0): 1}
    receiver = State(0, waits=(_recv(1),), groups={"w": "w", "a": "w"})
    told = report(_states(receiver, State(1, waits=(_recv(0),), sent=sent)), {0, 1})
    assert "recv from rank 1 at job.py:1, needs rank 1 to send (it has sent tag 0 on group w (a))" in told.text()
    assert "(group w (w))" in told.text()


def test_ranks_that_are_gone() -> None:
    """A rank that has ended holds those that need it, and is not itself reported."""
    states = _states(State(0, waits=(_collective("w", 2),), calls={"w": 2}), State(1, gone=True, calls={"w": 1}))
    assert blocked_set(states) == {0}
    told = report(states, {0})
    assert "rank 0: barrier #2 at job.py:1, needs rank 1" in told.text()
    assert "rank 1: ended the program" in told.text()
    assert told.ranks == [0]
    done = _states(State(0, waits=(_collective("w", 2),), calls={"w": 2}), State(1, gone=True, calls={"w": 2}))
    assert blocked_set(done) == set()


def test_every_wait_of_a_rank_must_be_stuck() -> None:
    """A rank with two waiting threads is released when one of them may be."""
    two = State(0, waits=(_recv(1), _recv(2)))
    assert blocked_set(_states(two, State(1, waits=(_recv(0),)))) == set()
    assert blocked_set(_states(two, State(1, waits=(_recv(0),)), State(2, waits=(_recv(0),)))) == {0, 1, 2}


def test_a_group_that_a_rank_has_destroyed() -> None:
    """Nothing is certain about a rank that does not speak of the group any more; a meeting that it does not know it missed."""
    waits = State(0, waits=(_collective("w", 1, (0, 1)),), calls={"w": 1})
    assert blocked_set({0: waits, 1: State(1, waits=(_collective("a", 1, (0, 1)),), calls={"a": 1})}) == set()
    meets = State(0, waits=(replace(_collective("w", 1, (0, 1)), meeting=True),), calls={"w": 1})
    other = State(1, waits=(_collective("a", 1, (0, 1)),), calls={"a": 1})
    assert blocked_set({0: replace(meets, calls={"w": 1, "a": 0}), 1: other}) == {0, 1}
    receives = State(0, waits=(_recv(1),), calls={"w": 0, "a": 0})
    assert blocked_set({0: receives, 1: other}) == set()
    assert blocked_set({0: receives, 1: replace(other, calls={"a": 1, "w": 0})}) == {0, 1}


def test_a_call_that_needs_its_root_alone() -> None:
    """Where nothing is compared, one who waits for a root that computes is not stuck, however stuck the others are."""
    first = State(1, waits=(replace(_collective("w", 1), needs=(0,)),), calls={"w": 1})
    second = State(2, waits=(_recv(1),))
    assert blocked_set(_states(first, second)) == set()
    assert blocked_set(_states(State(0, waits=(_recv(1),)), first, second)) == {0, 1, 2}
    root = State(0, waits=(replace(_collective("w", 1), needs=()),), calls={"w": 1})
    assert blocked_set(_states(root, first, second)) == set()


def test_looked_since() -> None:
    """Each wait of a state must have been found not to be over again."""
    state = State(0, looks=(3, 7))
    assert state.looked_since((2, 6))
    assert not state.looked_since((3, 6))
    assert not state.looked_since((2, 7))
