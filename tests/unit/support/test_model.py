"""The model that random programs are compared with: what it says of small programs whose outcome is known."""

from __future__ import annotations

import pytest
from model.programs import LARGE, MUTATIONS, Program, Step, as_script, correct, mutate
from model.semantics import Checks, verdicts

ALL = Checks()


def _collective(kind: str = "all_reduce", group: int = 0, handle: int = -1, **arguments: object) -> Step:
    return Step(kind, group, handle=handle, **arguments)  # type: ignore[arg-type]


def _message(kind: str, peer: int, **arguments: object) -> Step:
    return Step(kind, peer=peer, **arguments)  # type: ignore[arg-type]


REDUCE, OTHER = _collective(), _collective(op="MAX")
SEND, RECV = _message("send", 1), _message("recv", 0)
BIG = _message("send", 1, count=LARGE)
WAIT = Step("wait", handle=1)

# Steps of rank 0 and of rank 1, and how they end.
KNOWN = {
    "alike": ([REDUCE], [REDUCE], {"done done"}),
    "different ops": ([REDUCE], [OTHER], {"mismatch mismatch"}),
    "different, then alike": ([REDUCE, REDUCE], [OTHER, REDUCE], {"mismatch mismatch"}),
    "asynchronous and not": ([_collective(handle=1), WAIT], [REDUCE], {"done done"}),
    "never waited for": ([_collective(handle=1)], [REDUCE], {"unwaited done"}),
    "a mismatch is known when it is waited for": ([_collective(handle=1), WAIT], [OTHER], {"mismatch mismatch"}),
    "one call less": ([REDUCE, REDUCE], [REDUCE], {"blocked done"}),
    "groups in opposite order": (
        [REDUCE, _collective(group=1)],
        [_collective(group=1), REDUCE],
        {"blocked blocked"},
    ),
    "groups in opposite order, asynchronous": (
        [_collective(handle=1), _collective(group=1), WAIT],
        [_collective(group=1, handle=1), REDUCE, WAIT],
        {"done done"},
    ),
    "a message": ([SEND], [RECV], {"done done"}),
    "a cycle of receives": (
        [_message("recv", 1), SEND],
        [RECV, _message("send", 0)],
        {"blocked blocked"},
    ),
    "head-to-head small sends": ([SEND, _message("recv", 1)], [_message("send", 0), RECV], {"done done"}),
    "head-to-head large sends": (
        [BIG, _message("recv", 1, count=LARGE)],
        [_message("send", 0, count=LARGE), _message("recv", 0, count=LARGE)],
        {"blocked blocked"},
    ),
    "another tag": ([SEND], [_message("recv", 0, tag=1)], {"unreceived done blocked"}),
    "tags out of order": (
        [_message("send", 1, tag=1), _message("send", 1, tag=2)],
        [_message("recv", 0, tag=2), _message("recv", 0, tag=1)],
        {"done done"},
    ),
    "another dtype": ([SEND], [_message("recv", 0, dtype="int64")], {"unreceived done mismatch"}),
    "a large one refused": ([BIG], [RECV], {"unreceived done mismatch", "blocked mismatch"}),
    "nobody receives": ([SEND, REDUCE], [REDUCE], {"unreceived done done"}),
    "a collective against a receive": ([REDUCE], [RECV], {"blocked blocked"}),
    "the receive that was started first": (
        [SEND, _message("send", 1, count=2)],
        [_message("irecv", 0, handle=1), _message("recv", 0, count=2), WAIT],
        {"done done"},
    ),
}


def _words(steps: tuple[list[Step], ...], checks: Checks = ALL) -> set[str]:
    found = verdicts(Program(len(steps), "by hand", tuple(map(tuple, steps))), checks)
    assert found is not None
    return {
        ("unreceived " if verdict.unreceived and checks.unreceived else "")
        + " ".join("unwaited" if end.unwaited else end.state for end in verdict.ends)
        for verdict in found
    }


@pytest.mark.parametrize("name", KNOWN)
def test_known_outcomes(name: str) -> None:
    """The model gives the outcome that MPI's rules give."""
    first, second, expected = KNOWN[name]
    assert _words((first, second)) == expected


def test_what_is_left_is_named() -> None:
    """Messages that nobody receives are named by their group, ranks and tag; one that is not sent yet is none."""
    sends = [SEND, _message("send", 1, tag=3), SEND, SEND, BIG]
    found = verdicts(Program(2, "by hand", (tuple(sends), (RECV,))), ALL)
    assert found is not None
    assert [verdict.unreceived for verdict in found] == [((0, 0, 1, 0), (0, 0, 1, 0), (0, 0, 1, 3))]


def test_receives_from_anybody_in_every_order() -> None:
    """A receive from any rank may take either message: a program that is right for one order only has both outcomes."""
    two = _message("recv", -1, tag=20), _message("recv", -1, tag=20, count=2)
    one, other = _message("send", 0, tag=20), _message("send", 0, tag=20, count=2)
    assert _words(([*two], [one], [other])) == {"done done done", "unreceived mismatch done done"}
    # The same without looking at what a message carries: only the one that is too long is refused.
    assert _words(([*two], [one], [other]), Checks(envelope=False, unreceived=False)) == {
        "done done done",
        "argument done done",
    }


def test_correct_programs_are_correct() -> None:
    """What the generator writes is harmless by the model whatever happens, and leaves all groups in step."""
    kinds = set()
    for size in (2, 3, 4):
        for seed in range(300):
            program = correct(seed, size)
            kinds |= {step.kind for steps in program.steps for step in steps}
            found = verdicts(program, ALL)
            assert found, program.name
            assert all(verdict.harmless(ALL) and verdict.in_step for verdict in found), as_script(program)
    assert kinds == {
        *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_single", "gather"),
        *("gather_single", "scatter"),
        *("reduce_scatter_single", "all_to_all_single", "barrier", "send", "recv", "isend", "irecv", "wait"),
    }


@pytest.mark.parametrize("kind", MUTATIONS)
def test_mutations(kind: str) -> None:
    """A mutation changes the steps of one rank, the same each time, and what it makes is a program that can be run."""
    wrong = 0
    for seed in range(100):
        program = correct(seed, 3)
        changed = mutate(program, kind, seed)
        if changed is None:
            continue
        assert changed == mutate(program, kind, seed)
        assert sum(a != b for a, b in zip(program.steps, changed.steps, strict=True)) == 1
        compile(as_script(changed), changed.name, "exec")
        found = verdicts(changed, ALL)
        wrong += found is not None and not any(verdict.harmless(ALL) for verdict in found)
    assert wrong >= 10
