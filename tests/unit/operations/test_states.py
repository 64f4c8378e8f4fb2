"""Every transition of a request, with an exception of a signal handler before and after each effect."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mpicoll.checks.order import CallOrder
from mpicoll.diagnosis.call import CallDescription
from mpicoll.errors import CollectiveMismatchError, DistError, GroupBrokenError
from mpicoll.operations import request as module
from mpicoll.operations import states
from mpicoll.operations.operation import Operation
from mpicoll.operations.request import Request
from mpicoll.operations.states import (
    AGREED,
    COMPLETE,
    DISPUTED,
    FAILED,
    IDLE,
    MOVING,
    POSTED,
    QUEUED,
    PythonRequestFields,
    RequestFields,
    State,
)
from mpicoll.runtime import native
from mpicoll.runtime.call_site import NOWHERE


class Struck(Exception):
    """What a handler of the program raises."""


class World:
    """The group, the channel and the transfer of one request.

    ``strikes`` are the steps that raise, each once; ``never`` is the step whose test is never true.
    """

    def __init__(self, *strikes: str, same: bool = True, transfer: BaseException | None = None) -> None:
        self.strikes = list(strikes)
        self.log: list[str] = []
        self.reasons: list[BaseException] = []
        self.same = same
        self.transfer_error = transfer
        self.order = CallOrder()
        self.pair = SimpleNamespace(agreement=self, control=self)
        self.unwaited: dict[int, Any] = {}
        self.futures: dict[int, Any] = {}
        self.never = ""
        self.broken: str | None = None
        self.started: Callable[[], list[Any]] = list
        self.display, self.ranks = "WORLD", (0, 1)
        self.lock = threading.RLock()
        self.unknown_mismatch: Any = None
        self.waited: Any = None

    def step(self, name: str, result: Any = None) -> Any:
        """Note a step; raise before it or after it if it is to be struck."""
        self._strike(f"before {name}")
        self.log.append(name)
        self._strike(f"after {name}")
        return False if name == self.never else result

    def _strike(self, place: str) -> None:
        if place in self.strikes:
            self.strikes.remove(place)
            raise Struck(place)

    # The agreement and its round.

    def may_post(self, number: int) -> bool:
        return bool(self.step("room", True))

    def may_pass(self, number: int) -> bool:
        return self.may_post(number)

    def post(self, words: Any) -> World:
        self.order.posted += 1
        return self.step("post", self)  # type: ignore[no-any-return]

    def Test(self) -> bool:
        return bool(self.step("round", True))

    def agreed(self) -> Any:
        return self.step("agreed", SimpleNamespace(same=self.same, error=False, waited=0.0))

    def release(self) -> None:
        self.step("release")

    # The transfer, and the policy of waits.

    def transfer(self, agreed: Any) -> Iterator[Any]:
        self.step("start")
        yield SimpleNamespace(Test=lambda: self.step("move", True))
        if self.transfer_error is not None:
            raise self.transfer_error
        self.step("finish")

    def give_up(self, why: str, *, told: bool = False) -> None:
        self.broken = why

    def withdraw(self, reason: BaseException) -> None:
        self.reasons.append(reason)
        self.give_up(str(reason))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Request]:
    """Return what makes a request of a World."""

    def explain(world: World, *_: Any) -> Iterator[Any]:
        yield SimpleNamespace(Test=lambda: world.step("explain", True))
        raise CollectiveMismatchError("they differ")

    def request(world: World, *, waited: bool = False, **fields: Any) -> Request:
        monkeypatch.setattr(Request, "policy", lambda *_: world)
        monkeypatch.setattr(module, "explain", explain)
        call = CallDescription("all_reduce", (), NOWHERE)
        for name, value in fields.items():
            setattr(call, name, value)
        return Request(world, call, [], 1.0, waited=waited)  # type: ignore[arg-type]

    return request


def path_of(request: Request, world: World, *, struck: bool = False) -> list[State]:
    """Start a request and test it until it is over; return its states in order."""
    seen: list[State] = [request.state]
    end = states.observe(lambda _, old, new: seen.append(new))
    try:
        for attempt in range(10):
            try:
                if attempt == 0:
                    world.order.issue()
                    request.start(0, world.transfer)
                if request.Test():
                    break
            except Struck:
                assert struck
    finally:
        end()
    return seen


def test_the_way_of_a_call(make: Callable[..., Request]) -> None:
    """A call is queued, posted, agreed, moving, complete; its round is released and its turn passed on once."""
    world = World()
    request = make(world)
    assert path_of(request, world) == [IDLE, QUEUED, POSTED, AGREED, MOVING, COMPLETE]
    assert world.log == ["room", "post", "round", "agreed", "release", "start", "move", "finish"]
    assert (world.order.moving, request.error, world.reasons) == (1, None, [])


def test_a_call_without_a_round(make: Callable[..., Request]) -> None:
    """It posts nothing."""
    world = World()
    assert path_of(make(world, passes=True), world) == [IDLE, QUEUED, AGREED, MOVING, COMPLETE]
    assert world.log == ["room", "start", "move", "finish"]


def test_a_mismatch(make: Callable[..., Request]) -> None:
    """The members exchange what they called; the error is of the request, and the group can be used."""
    world = World(same=False)
    request = make(world)
    assert path_of(request, world) == [IDLE, QUEUED, POSTED, DISPUTED, FAILED]
    assert isinstance(request.error, CollectiveMismatchError)
    assert (world.order.moving, world.broken) == (1, None)
    with pytest.raises(CollectiveMismatchError):
        request.complete()


def test_a_mismatch_holds_later_calls_back_until_it_is_known(make: Callable[..., Request]) -> None:
    """An asynchronous call holds later calls back, unless a later call was made, or another thread makes one."""
    world = World(same=False)
    request = make(world)
    world.order.issue()
    request.start(0, world.transfer)
    assert request.hold_back()
    assert world.unknown_mismatch is request
    with pytest.raises(CollectiveMismatchError):
        request.complete()
    assert world.unknown_mismatch is None

    with world.lock:
        thread = threading.Thread(target=lambda: found.append(request.hold_back()))
        found: list[bool] = []
        thread.start()
        thread.join()
    assert (found, world.unknown_mismatch) == ([False], None)

    world.waited = request  # a blocking call beside asynchronous calls, whose thread has the lock
    with world.lock:
        thread = threading.Thread(target=lambda: found.append(request.hold_back()))
        thread.start()
        thread.join()
    assert (found, world.unknown_mismatch) == ([False, True], None)
    world.waited = None

    world.order.issue()
    assert not request.hold_back()
    assert world.unknown_mismatch is None


def test_a_blocking_call_holds_nothing_back(make: Callable[..., Request]) -> None:
    """The program gets the error of a blocking call before it can make another call."""
    world = World(same=False)
    request = make(world, waited=True)
    world.order.issue()
    request.start(0, world.transfer)
    assert request.hold_back()
    assert world.unknown_mismatch is None


def test_calls_of_a_broken_group_do_not_go_on(make: Callable[..., Request]) -> None:
    """A call that is posted when another call breaks its group ends with the reason, and moves nothing."""
    world = World()
    world.never = "round"
    request = make(world)
    request.start(0, world.transfer)
    world.give_up("rank 1 gave up")
    world.never = ""
    assert request.Test()
    assert isinstance(request.error, GroupBrokenError)
    assert "rank 1 gave up" in str(request.error)
    assert "start" not in world.log
    assert "release" not in world.log, "a round that may not be over keeps its slot"
    assert world.order.moving == 0


def test_unequal_numbers_of_calls_break_the_group(make: Callable[..., Request]) -> None:
    """The members are out of step after such a mismatch."""
    world = World(same=False)
    path_of(make(world, breaks="its ranks made unequal numbers of calls"), world)
    assert world.broken is not None


def test_an_error_of_the_result(make: Callable[..., Request]) -> None:
    """All has moved: the error is raised here, and the group can be used."""
    wrong = ValueError("no room for it")
    world = World(transfer=wrong)
    request = make(world, error=wrong)
    assert path_of(request, world)[-1] is FAILED
    assert (request.error, world.reasons, world.order.moving) == (wrong, [], 1)


@pytest.mark.parametrize("waited", [False, True])
def test_the_memory_runs_out(waited: bool, make: Callable[..., Request]) -> None:
    """The call is lost, and the group is given up: other members may wait for this rank's data."""
    world = World(transfer=MemoryError("none left"))
    request = make(world, waited=waited)
    if waited:
        assert path_of(request, world)[-1] is FAILED
        assert isinstance(request.error, MemoryError)
    else:
        with pytest.raises(MemoryError):
            path_of(request, world)
        assert isinstance(request.error, DistError)
        assert request.state is FAILED
    assert [type(reason) for reason in world.reasons] == [MemoryError]


STEPS = ("room", "post", "round", "agreed", "release", "start", "move", "finish")
LOST = {
    "after post",
    "before post",
    "before start",
    "after start",
    "before move",
    "after move",
    "before finish",
    "after finish",
}
"""Where other members may have seen an effect whose transition is not made: nothing is done twice, so the call is lost."""


@pytest.mark.parametrize("waited", [False, True])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_handler_strikes(place: str, step: str, waited: bool, make: Callable[..., Request]) -> None:
    """The call goes on where nothing was done, and is given up where something was; no effect comes twice."""
    world = World(f"{place} {step}")
    request = make(world, waited=waited)
    path = path_of(request, world, struck=True)
    assert not world.strikes
    for effect in ("post", "start", "finish"):
        assert world.log.count(effect) <= 1
    if f"{place} {step}" in LOST:
        assert path[-1] is FAILED
        assert [type(reason) for reason in world.reasons] == [Struck]
        assert isinstance(request.error, Struck if waited else DistError)
        assert world.order.moving == 0, "no later call of a broken group moves"
    else:
        assert path[-1] is COMPLETE
        assert (world.reasons, request.error) == ([], None)
        assert world.order.moving == 1


@pytest.mark.parametrize(
    ("state", "never"),
    [(QUEUED, "room"), (POSTED, "round"), (DISPUTED, "explain"), (AGREED, "turn"), (MOVING, "move")],
)
def test_a_request_is_withdrawn(state: State, never: str, make: Callable[..., Request]) -> None:
    """From every state it fails with the reason, once; a later test changes nothing."""
    world = World(same=state is not DISPUTED)
    world.never = never
    request = make(world)
    request.start(1 if never == "turn" else 0, world.transfer)
    assert not request.Test()
    assert request.state is state
    reason = DistError("over")
    request.withdraw(reason)
    assert (request.state, request.error, world.reasons) == (FAILED, reason, [reason])
    world.never = ""
    assert request.Test()
    assert request.error is reason
    assert "finish" not in world.log


def test_transitions_that_are_not() -> None:
    """Only the rows of the table are transitions."""
    for old in State:
        for new in State:
            holder = SimpleNamespace(state=old)
            if (old, new) in states.TRANSITIONS:
                states.to(holder, new)
                assert holder.state is new
            else:
                with pytest.raises(AssertionError, match=f"from {old.name} to {new.name}"):
                    states.to(holder, new)


def test_an_operation_of_steps() -> None:
    """It moves from the start, and ends with what its steps return."""

    def steps() -> Iterator[Any]:
        yield SimpleNamespace(Test=lambda: True)
        return 3

    world = World()
    operation = Operation(world, CallDescription("recv", (), NOWHERE), steps(), [], 1.0, peer=3)  # type: ignore[arg-type]
    assert (operation.state, operation.returned, operation.done) == (COMPLETE, 3, True)


def test_fields_with_the_extension_and_without() -> None:
    """A request has the same fields with the same first values, whether the extension holds them or Python."""
    if native.found is None:
        pytest.skip(f"there is one class only: {native.why_not}")
    here, there = PythonRequestFields(), native.found.RequestFields()
    assert RequestFields is native.found.RequestFields
    for name in PythonRequestFields.__slots__:
        mine, its = getattr(here, name), getattr(there, name)
        assert mine == its, name
        assert (mine is None) == (its is None), name
    assert not here.finish()
    assert not there.finish()


def test_requests_without_the_extension() -> None:
    """Where the extension is missing, each kind of request can be made, whatever names its class uses."""
    program = """
import sys
sys.modules["mpicoll._native"] = None
from mpicoll.operations.messages import _PreparedReceive, _PreparedSend
from mpicoll.operations.request import Request
from mpicoll.operations.states import PythonRequestFields, RequestFields
assert RequestFields is PythonRequestFields
for kind in (Request, _PreparedSend, _PreparedReceive):
    made = kind.__new__(kind)
    assert made.number == -1 and made.claim is None and made.waited is False, kind
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
