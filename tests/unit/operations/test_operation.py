"""Steps that end soon run without an operation; all others go on in one, and it meets what they raise."""

from __future__ import annotations

import pytest

from mpicoll.operations.operation import soon
from mpicoll.runtime import waiting
from mpicoll.runtime.waiting import MOST_POLLS, Condition, Steps


class Late:
    """A request that is complete at the n-th test."""

    def __init__(self, tests: int) -> None:
        self.left = tests

    def Test(self) -> bool:
        self.left -= 1
        return self.left <= 0


@pytest.fixture(autouse=True)
def on_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "oversubscribed", False)
    monkeypatch.setattr(waiting, "pending", [])


def steps_of(*tests: int, error: Exception | None = None) -> Steps:
    for each in tests:
        yield Late(each)
    if error is not None:
        raise error
    return 3


def test_steps_that_end_soon() -> None:
    assert soon(steps_of(1, MOST_POLLS)) == (True, 3)


def test_steps_that_go_on() -> None:
    """The request that was not complete comes first, and then the other steps."""
    over, rest = soon(steps_of(1, MOST_POLLS + 2, 1))
    assert not over
    request = next(rest)
    assert not request.Test()
    assert request.Test()
    assert next(rest).Test()
    with pytest.raises(StopIteration) as end:
        next(rest)
    assert end.value.value == 3


def test_steps_that_raise() -> None:
    """The error is raised where an operation runs the steps, which gives the group up if that is needed."""
    over, rest = soon(steps_of(1, error=OSError("of MPI")))
    assert not over
    with pytest.raises(OSError, match="of MPI"):
        next(rest)


def test_beside_other_requests_no_step_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a wait progresses the other requests of the process."""
    monkeypatch.setattr(waiting, "pending", [Condition(lambda: False)])
    steps = steps_of(1)
    assert soon(steps) == (False, steps)
    assert isinstance(next(steps), Late)
