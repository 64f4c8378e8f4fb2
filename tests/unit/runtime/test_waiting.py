"""The waiting loop, with a clock and a sleep of the test's own; and what the watchdog finds overdue."""

from __future__ import annotations

import importlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import mpi4py
import pytest

from mpicoll.errors import CollectiveTimeoutError, DistBackendError, PeerFailedError
from mpicoll.runtime import signals, waiting, watchdog
from mpicoll.runtime.signals import SignalShield


class Clock:
    """A time that moves by ``step`` whenever it is looked at, and by every sleep."""

    def __init__(self, step: float = 1e-5) -> None:
        self.now = 1000.0
        self.step = step
        self.naps: list[tuple[float, float]] = []

    def __call__(self) -> float:
        self.now += self.step
        return self.now

    def sleep(self, seconds: float) -> None:
        self.naps.append((self.now - 1000.0, seconds))
        self.now += seconds


class WaitPolicy:
    """Notes what the loop tells it."""

    def __init__(self, limit: float = 1e9, stall_warn: float = 1e9) -> None:
        self.limit = limit
        self.stall_warn = stall_warn
        self.stays_until = 0.0
        self.stalls: list[float] = []
        self.given_up: list[BaseException] = []
        self.verdict: Callable[[float], BaseException | None] = lambda waited: None

    def check(self, waited: float) -> BaseException | None:
        return self.verdict(waited)

    def stalled(self, waited: float) -> None:
        self.stalls.append(waited)

    def timed_out(self, waited: float) -> BaseException:
        return CollectiveTimeoutError(f"waited {waited}")

    def withdraw(self, reason: BaseException) -> None:
        self.given_up.append(reason)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "pending", [])
    monkeypatch.setattr(waiting, "_services", [])
    monkeypatch.setattr(waiting, "oversubscribed", False)
    monkeypatch.setattr(signals.guard, "noted", None)


def after(clock: Clock, seconds: float) -> Callable[[], bool]:
    """Return a test that is true once the clock has moved on."""
    return lambda: clock.now - 1000.0 >= seconds


def test_pause_spins_then_yields_then_sleeps() -> None:
    """Spin first, yield below 20 ms, then sleep at most 1/500 of the time waited and at most 10 ms."""
    assert waiting.pause(0.0, 0, False) is None
    assert waiting.pause(0.0, waiting.SPIN_POLLS, False) == 0.0
    assert waiting.pause(0.0199, 10_000, False) == 0.0
    for waited in (0.02, 0.1, 1.0, 4.9, 5.0, 60.0, 1e6):
        nap = waiting.pause(waited, 10_000, False)
        assert nap is not None
        assert 0 < nap <= min(0.01, waited / 500), waited


def test_pause_sleeps_early_where_ranks_outnumber_cores() -> None:
    """With more ranks than cores it never spins, and sleeps after 50 to 200 polls."""
    assert waiting.pause(0.0, 0, True) == 0.0
    assert waiting.pause(0.001, 50, True) == 0.0
    assert waiting.pause(0.001, 200, True) == waiting.OVERSUBSCRIBED_SLEEP
    assert waiting.pause(1.0, 200, True) == pytest.approx(0.002)
    assert waiting.pause(1e6, 200, True) == 0.01


def test_no_wait_for_what_is_there() -> None:
    """What is complete at once costs one look."""
    looks: list[int] = []
    waiting.wait(lambda: not looks.append(1), WaitPolicy())  # type: ignore[func-returns-value]
    assert len(looks) == 1


def test_a_long_wait_uses_little_of_a_core() -> None:
    """A rank that waits a minute looks a few thousand times, not millions."""
    clock, looks = Clock(), 0

    def test() -> bool:
        nonlocal looks
        looks += 1
        return clock.now >= 1060.0

    waiting.wait_long(test, WaitPolicy(), clock=clock, sleep=clock.sleep)
    assert looks < 20_000
    assert all(nap <= max(at, 0.02) / 500 + 1e-9 and nap <= 0.01 for at, nap in clock.naps)
    assert sum(nap for _, nap in clock.naps) > 0.9 * 59


def test_the_limit_ends_a_wait() -> None:
    """Past the limit the call is given up once, and the error of the policy is raised."""
    clock, policy = Clock(), WaitPolicy(limit=2.0)
    with pytest.raises(CollectiveTimeoutError) as caught:
        waiting.wait_long(lambda: False, policy, clock=clock, sleep=clock.sleep)
    assert policy.given_up == [caught.value]
    assert 2.0 <= clock.now - 1000.0 < 2.1


def test_the_limit_ends_a_wait_whose_test_always_raises() -> None:
    """Each exception could be one of a signal handler, after which the wait goes on; at the limit the last one is raised."""
    clock, policy, raised = Clock(), WaitPolicy(limit=2.0), []

    def test() -> bool:
        raised.append(ValueError(len(raised)))
        raise raised[-1]

    with pytest.raises(ValueError, match=r"^\d+$") as caught:
        waiting.wait_long(test, policy, clock=clock, sleep=clock.sleep)
    assert policy.given_up == [caught.value] == raised[-1:]
    assert 2.0 <= clock.now - 1000.0 < 2.1


def test_nobody_gives_up_before_twice_the_stall_time() -> None:
    """A limit shorter than twice the stall time is kept only then: a peer may be inside the blocking call until then."""
    clock, policy = Clock(), WaitPolicy(limit=0.001)
    with pytest.raises(CollectiveTimeoutError):
        waiting.wait_long(lambda: False, policy, clock=clock, sleep=clock.sleep)
    assert clock.now - 1000.0 >= waiting.GIVE_UP_AFTER == 2 * waiting.STALL


@pytest.mark.parametrize("by_signal", [False, True])
def test_nobody_gives_up_before_the_time_that_the_policy_gives(by_signal: bool) -> None:
    """A rank that has posted again during its wait stays for that time, whatever its limit is or its handler raises."""
    clock, policy = Clock(), WaitPolicy(limit=1e9 if by_signal else 1.0)
    policy.stays_until = clock.now + 3.0
    reason = KeyboardInterrupt() if by_signal else None
    with pytest.raises(KeyboardInterrupt if by_signal else CollectiveTimeoutError):
        waiting.wait_long(lambda: False, policy, reason, clock=clock, sleep=clock.sleep)
    assert 3.0 <= clock.now - 1000.0 < 3.1
    assert len(policy.given_up) == 1


def test_a_call_that_completes_at_the_last_moment_is_complete() -> None:
    """The verdict looks once more before it is passed."""
    clock, policy = Clock(), WaitPolicy(limit=1.0)
    done = False

    def verdict(waited: float) -> BaseException | None:
        nonlocal done
        if waited < 0.5:
            return None
        done = True
        return PeerFailedError("too late")

    policy.verdict = verdict
    waiting.wait_long(lambda: done, policy, clock=clock, sleep=clock.sleep)
    assert policy.given_up == []


def test_a_peer_that_failed_ends_the_wait() -> None:
    """What check returns is raised after giving up."""
    clock, policy = Clock(), WaitPolicy()
    failure = PeerFailedError("rank 3 failed")
    policy.verdict = lambda waited: failure if waited > 0.03 else None
    with pytest.raises(PeerFailedError) as caught:
        waiting.wait_long(lambda: False, policy, clock=clock, sleep=clock.sleep)
    assert caught.value is failure
    assert policy.given_up == [failure]


def test_a_stall_is_told_once() -> None:
    """stalled is called once, when stall_warn has passed."""
    clock, policy = Clock(), WaitPolicy(stall_warn=1.0)
    waiting.wait_long(after(clock, 30.0), policy, clock=clock, sleep=clock.sleep)
    assert len(policy.stalls) == 1
    assert 1.0 <= policy.stalls[0] < 1.1
    assert policy.given_up == []


def test_services_run_in_waits_that_last() -> None:
    """Services run every few milliseconds, and not in a short wait."""
    clock, ran = Clock(), []

    def service() -> None:
        ran.append(clock.now)

    waiting.add_service(service)
    waiting.add_service(service)
    waiting.wait_long(after(clock, 0.002), WaitPolicy(), clock=clock, sleep=clock.sleep)
    assert ran == []
    waiting.wait_long(after(clock, 1.0), WaitPolicy(), clock=clock, sleep=clock.sleep)
    assert 50 < len(ran) <= 1.0 / waiting.SERVICE_EVERY + 1
    waiting.remove_service(service)
    count = len(ran)
    waiting.wait_long(after(clock, 2.0), WaitPolicy(), clock=clock, sleep=clock.sleep)
    assert len(ran) == count


def test_waits_move_everything_that_is_pending() -> None:
    """Each poll advances the other operations of the process, and drops those that are done."""
    clock = Clock()

    class Item:
        left = 3

        def Test(self) -> bool:
            self.left -= 1
            return self.left == 0

    short, long = Item(), Item()
    long.left = 10**9
    waiting.pending[:] = [short, long]
    waiting.wait_long(after(clock, 0.01), WaitPolicy(), clock=clock, sleep=clock.sleep)
    assert short.left == 0
    assert waiting.pending == [long]
    assert long.left < 10**9


def test_an_error_of_the_operation_is_raised_at_once() -> None:
    """A DistError out of the test itself gives the call up and is raised, in the first polls and later."""
    for polls in (1, waiting.SPIN_POLLS + 1, 3000):
        policy, seen = WaitPolicy(), 0

        def test(polls: int = polls) -> bool:
            nonlocal seen
            seen += 1
            if seen == polls:
                raise DistBackendError("MPI says no")
            return False

        with pytest.raises(DistBackendError, match="MPI says no") as caught:
            waiting.wait(test, policy)
        assert policy.given_up == [caught.value]


class Alarm(Exception):
    """What a signal handler of a program raises."""


def test_an_exception_out_of_a_signal_handler_waits_until_the_call_may_be_left() -> None:
    """It strikes anywhere, is kept until twice the stall time, and then raised after withdrawing."""
    for strike in (1, 500):
        clock, policy, looks = Clock(), WaitPolicy(), 0

        def test(strike: int = strike) -> bool:
            nonlocal looks
            looks += 1
            if looks == strike:
                raise Alarm
            return False

        with pytest.raises(Alarm):
            waiting.wait_long(test, policy, clock=clock, sleep=clock.sleep)
        assert clock.now - 1000.0 >= waiting.GIVE_UP_AFTER
        assert [type(reason) for reason in policy.given_up] == [Alarm]


def test_a_call_that_completes_meanwhile_is_finished_first() -> None:
    """When the call completes before it may be left, the interrupt is raised at the end of the library's call."""
    clock, policy = Clock(), WaitPolicy()
    interrupted = False

    def test() -> bool:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            raise Alarm
        return clock.now - 1000.0 > waiting.GIVE_UP_AFTER / 2

    def call() -> None:
        with signals.guard:
            waiting.wait_long(test, policy, clock=clock, sleep=clock.sleep)

    with pytest.raises(Alarm):
        call()
    assert policy.given_up == []
    assert signals.guard.noted is None


@pytest.mark.parametrize("how", ["handler", "Ctrl-C"])
def test_a_call_that_completes_just_before_it_is_left_is_complete(how: str) -> None:
    """Also one that a signal wants left, since the others do not know: it is raised when the call returns."""
    clock, policy = Clock(), WaitPolicy()
    looks = 0

    def test() -> bool:
        nonlocal looks
        looks += 1
        if looks == 1 and how == "handler":
            raise Alarm
        return looks > 1

    def call() -> None:
        with signals.guard:
            if how == "Ctrl-C":
                signals.guard.noted = KeyboardInterrupt()
            waiting.wait_long(test, policy, clock=clock, sleep=clock.sleep)
            assert clock.now - 1000.0 > waiting.GIVE_UP_AFTER

    clock.step = 0.8 * waiting.GIVE_UP_AFTER  # nothing in between: the first look afterwards is the last before leaving
    with pytest.raises(Alarm if how == "handler" else KeyboardInterrupt):
        call()
    assert policy.given_up == []


def test_a_wait_inside_another_leaves_it_its_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A callback that communicates ends with a wait of its own; the outer one answers SIGTERM again soon after."""
    monkeypatch.setattr(signals.guard, "installed", True)
    clock, inner = Clock(), Clock()
    armed: list[tuple[float, bool]] = []
    nested = False

    def test() -> bool:
        nonlocal nested
        waited = clock.now - 1000.0
        armed.append((waited, signal.getsignal(signal.SIGTERM) == signals.guard._terminate))
        if waited > 0.1 and not nested:
            nested = True
            waiting.wait_long(after(inner, 0.1), WaitPolicy(), clock=inner, sleep=inner.sleep)
            armed.append((waited, signal.getsignal(signal.SIGTERM) == signals.guard._terminate))
        return waited > 0.2

    waiting.wait_long(test, WaitPolicy(), clock=clock, sleep=clock.sleep)
    assert {noted for waited, noted in armed if waited < waiting.YIELD_FOR} == {False}
    assert {noted for waited, noted in armed if 0.03 < waited <= 0.1} == {True}
    assert {noted for waited, noted in armed if waited > 0.12} == {True}
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_ctrl_c_is_noted_inside_and_raised_outside() -> None:
    """The guard's handler raises between calls, and notes inside one what the wait then answers."""
    guard = signals.DeferredInterrupt()
    with pytest.raises(KeyboardInterrupt):
        guard._handle(2, None)  # type: ignore[arg-type]

    def call() -> None:
        with guard, guard:
            guard._handle(2, None)  # type: ignore[arg-type]
            assert isinstance(guard.noted, KeyboardInterrupt)

    with pytest.raises(KeyboardInterrupt):
        call()
    assert guard.noted is None
    with guard:
        guard._handle(2, None)  # type: ignore[arg-type]
        assert isinstance(guard.pop(), KeyboardInterrupt)
        assert guard.pop() is None

    def failing_call() -> None:
        with guard:
            guard._handle(2, None)  # type: ignore[arg-type]
            raise ValueError("first")

    with pytest.raises(KeyboardInterrupt) as caught:  # it is not lost, and neither is the error
        failing_call()
    assert isinstance(caught.value.__cause__, ValueError)


@dataclass
class _Inside:
    """A native call that nobody has made."""

    since: float
    limit: float
    describe: Callable[[], str]
    hopeless: Callable[[float], str]


def test_overdue_calls() -> None:
    """A native call is ended when it has been inside MPI for longer than its own limit."""
    call = _Inside(100.0, 5.0, lambda: "a call", lambda inside: "")
    assert watchdog.verdict(104.9, call, {}) == ""
    assert "inside MPI for 6.0 s, past its limit" in watchdog.verdict(106.0, call, {})


def test_hopeless_calls() -> None:
    """One that can never end is ended when that has been so for a while; not looked at while it is as quick as it should be."""
    asked: list[float] = []
    words = ["rank 1 is gone"]

    def hopeless(inside: float) -> str:
        asked.append(inside)
        return words[0]

    call = _Inside(100.0, 1800.0, lambda: "a call", hopeless)
    since: dict[float, float] = {}
    assert watchdog.verdict(100.9, call, since) == ""
    assert not asked
    assert watchdog.verdict(101.5, call, since) == ""
    assert watchdog.verdict(103.4, call, since) == ""
    assert watchdog.verdict(103.5, call, since) == "rank 1 is gone"
    words[0] = ""  # it was about to return
    assert watchdog.verdict(103.6, call, since) == ""
    words[0] = "rank 1 is gone"
    assert watchdog.verdict(103.7, call, since) == ""
    assert asked == [1.5, 3.4000000000000057, 3.5, 3.5999999999999943, 3.700000000000003]


def test_the_watchdog_outlives_what_fails_in_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A service that fails is told of when it fails again, once; the others and the last resort go on."""
    ran = 0

    def broken() -> None:
        raise RuntimeError("dictionary changed size during iteration")

    def now_and_then() -> None:
        nonlocal ran
        ran += 1
        if ran % 2:
            raise RuntimeError("a race")

    def unreadable(inside: float) -> str:
        raise ValueError("unmapped")

    monkeypatch.setattr(watchdog, "_EVERY", 0.002)
    monkeypatch.setattr(watchdog, "services", [broken, now_and_then])
    monkeypatch.setattr(watchdog, "active", {1: _Inside(time.monotonic() - 2, 2.05, lambda: "a call", unreadable)})
    watchdog.start(deadly=False)
    until = time.monotonic() + 10
    try:
        err = ""
        while (ran < 20 or "past its limit" not in err) and time.monotonic() < until:
            time.sleep(0.01)
            err += capsys.readouterr().err
    finally:
        watchdog.stop()
    assert ran >= 20
    assert err.count("mpicoll: broken fails in the watchdog: RuntimeError: dictionary changed size") == 1
    assert err.count("mpicoll: a call: all ranks had agreed to this call, and it has been inside MPI for 2.") == 1
    assert "a race" not in err


def test_a_place_is_told_while_groups_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog reads the groups while other threads of the program make and destroy some."""
    monkeypatch.setattr(mpi4py.rc, "initialize", False)
    job_state = importlib.import_module("mpicoll.diagnosis.job_state")
    told: list[tuple[str, ...]] = []
    slots = SimpleNamespace(write_place=lambda *words: told.append(words))
    known = SimpleNamespace(groups={}, thread=0, board=SimpleNamespace(slots=slots))

    class Group:
        display = "WORLD"

        @property
        def calls(self) -> int:
            known.groups[object()] = Group()  # as another thread does in between
            return 1

        def last_call(self) -> str:
            return "barrier at here.py:1"

    known.groups["1"] = Group()
    monkeypatch.setattr(job_state, "current", lambda: known)
    job_state.write_place()
    assert told == [("", "barrier", "here.py:1")]


def test_handlers_of_the_program_run_where_they_may_raise() -> None:
    """Under the shield a handler runs when it is delivered, or at the end, after the program's handlers are back."""
    seen: list[int] = []

    def handler(number: int, frame: object) -> None:
        seen.append(number)
        if len(seen) > 1:
            raise ValueError("second")

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        shield = SignalShield()
        with shield:
            with shield:
                signal.raise_signal(signal.SIGUSR1)
            assert not seen
            shield.deliver()
            assert seen == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is handler

        def struck() -> None:
            with shield:
                signal.raise_signal(signal.SIGUSR1)
                seen.append(0)

        with pytest.raises(ValueError, match="second"):
            struck()
        assert seen == [signal.SIGUSR1, 0, signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        signal.signal(signal.SIGUSR1, before)
