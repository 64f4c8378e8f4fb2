"""Deliver signals that arrive inside calls of the library at points where the call can answer them.

One mechanism (``signal_table.ReplacedHandlers``) replaces handlers in three modes:

- *deliver* (:class:`DeferredInterrupt`): Ctrl-C, and signals of launchers, are raised in the next step of a wait, or when the
  call ends;
- *defer* (:class:`SignalShield`): handlers of the program run when the call may be withdrawn, or when it ends;
- *note* (:class:`SignalNotes`): signals are recorded until a step on which the ranks agree.

The module needs no MPI. The waiting loop asks :data:`guard` and :data:`shield` in each of its steps.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from threading import get_ident
from types import FrameType
from typing import Any

from mpicoll.runtime import handler_calls
from mpicoll.runtime.output import flush_streams
from mpicoll.runtime.signal_table import (
    SHIELDED,
    ReplacedHandlers,
    exchange,
    program_handlers,
    put,
    set_default_effect,
    shielded,
    unhandled,
)

ENDING = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that launchers send to the remaining ranks when a rank has died: Open MPI SIGTERM, MPICH without cleanup SIGUSR1."""


class Terminated(BaseException):
    """A signal that ends this process came while this rank waited. Never raised.

    Attributes:
        number: the signal.
        at: when it came (time.monotonic).
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.at = time.monotonic()


class DeferredInterrupt:
    """Delivers Ctrl-C, and signals that end the process, at a point of a call where they can be answered.

    In the program's own code a Ctrl-C raises KeyboardInterrupt as always. Inside a call it is noted. The waiting loop sees the
    note within one poll, withdraws the call, and raises the exception. What a signal handler of the program raises inside the
    waiting loop is treated in the same way.

    Attributes:
        noted: the exception that is still to be raised in the main thread.
        installed: whether the object handles Ctrl-C.
        waits: whether the main thread is in a wait that is long enough to answer signals.
        inside: code of functions that count as calls without entering (entering takes time); the stack is searched for them.
    """

    def __init__(self) -> None:
        self._entered: list[FrameType] = []  # frames of the main thread that are inside `with guard`
        self._armed = ReplacedHandlers(self._terminate)
        self._ignores = False
        self.noted: BaseException | None = None
        self.installed = False
        self.waits = False
        self.inside = handler_calls.calls

    def install(self) -> None:
        """Handle SIGINT, if Python's default handler does; leave any other handler as it is."""
        if get_ident() == _main_ident and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            exchange(signal.SIGINT, self._handle)
            self.installed = True

    def uninstall(self) -> None:
        """Restore Python's handler of SIGINT, if the library's is still installed."""
        if self.installed and get_ident() == _main_ident:
            if signal.getsignal(signal.SIGINT) == self._handle:
                exchange(signal.SIGINT, signal.default_int_handler)
            self.installed = False

    @property
    def depth(self) -> int:
        """The number of calls of the main thread that are entered now."""
        return len(self._entered)

    def _prune(self, frame: FrameType) -> None:
        """Drop frames that are no longer on the stack: a handler may raise when its frame ends.

        Python also runs handlers between the end of a block and the first line of ``__exit__``.
        """
        while self._entered:
            each: FrameType | None = frame
            while each is not None and each is not self._entered[-1]:
                each = each.f_back
            if each is not None:
                return
            self._entered.pop()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if frame is not None:
            self._prune(frame)
        if not self._entered:
            while frame is not None and frame.f_code not in self.inside:
                frame = frame.f_back
            if frame is None:
                raise KeyboardInterrupt
        self.noted = KeyboardInterrupt()

    def arm(self) -> None:
        """Note the signals of ``ENDING`` until :meth:`disarm`, if the program does not handle them.

        Only while this rank waits. In the program's own code and inside MPI these signals end the process at once.
        """
        if self.installed and get_ident() == _main_ident:
            self.waits = True
            for number in ENDING:
                if number not in self._armed and unhandled(number):
                    self._armed.replace(number)

    def disarm(self) -> None:
        """Restore the default effect of the armed signals, or MPI's handler."""
        if get_ident() == _main_ident:
            self.waits = False
            if self._armed:
                self._armed.restore_all()

    def ignore_news(self) -> None:
        """Ignore MPICH's signal that a rank has died, which this rank knows already."""
        if self.installed and get_ident() == _main_ident:
            if signal.SIGUSR1 in self._armed:
                self._armed.restore(signal.SIGUSR1, signal.SIG_IGN)
                self._ignores = True
            elif unhandled(signal.SIGUSR1):
                put(signal.SIGUSR1, signal.SIG_IGN, None)
                self._ignores = True

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.noted = Terminated(number)

    def end(self, by: Terminated) -> None:
        """End the process by a signal, like a process that does not handle it."""
        self.disarm()
        end_by(by.number)

    def forget(self) -> None:
        """Restore every handler in a forked child, which is in no call of the library."""
        self._entered.clear()
        self.noted = None
        self.disarm()
        if self._ignores and signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN:
            put(signal.SIGUSR1, signal.SIG_DFL, None)
        self._ignores = False
        self.uninstall()

    def __enter__(self) -> None:
        ident = get_ident()
        if ident == _main_ident:
            frame = sys._getframe(1)
            if self._entered:
                self._prune(frame)
            self._entered.append(frame)
        else:
            threads.add(ident)

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if get_ident() == _main_ident:
            frame = sys._getframe(1)
            while self._entered and self._entered.pop() is not frame:
                pass
            if self.noted is not None:
                self.answer(value)

    def answer(self, value: BaseException | None) -> None:
        """Raise the noted exception at the end of the outermost call of the library, which ends with ``value``."""
        if self.noted is not None and not self._entered and get_ident() == _main_ident:
            noted, self.noted = self.noted, None
            if not isinstance(noted, Terminated):
                raise noted from value
            if value is None:  # else the error of the call has more facts, such as which rank has died
                self.end(noted)

    def note(self, reason: BaseException) -> bool:
        """Note an exception that the main thread is to answer; return False in other threads."""
        if get_ident() != _main_ident:
            return False
        self.noted = reason
        return True

    def pop(self) -> BaseException | None:
        """Remove and return the exception that the main thread has to answer, or None."""
        if self.noted is None or get_ident() != _main_ident:
            return None
        noted, self.noted = self.noted, None
        return noted


class SignalShield:
    """Prevents handlers of the program from raising between the agreement on a call and its transfer.

    A rank that does not enter a transfer to which all ranks have agreed leaves the other ranks inside MPI, where nothing can be
    answered. So a handler that records the signal replaces the program's handlers. These run in the waiting loop, in which the
    rank may still withdraw, or when the call is over. To block the signals would not help: another thread of the process may
    receive them, and Python runs the handler in the main thread in any case.
    """

    __slots__ = ("_depth", "_none_to_replace", "_noted", "_replaced")

    def __init__(self) -> None:
        self._depth = 0
        self._replaced = ReplacedHandlers(self._note)
        self._noted: list[tuple[Callable[[int, FrameType | None], Any], int, FrameType | None]] = []
        self._none_to_replace: tuple[Any, ...] = ()  # the last result of `shielded` without a handler of the program

    @property
    def up(self) -> bool:
        """Whether the main thread is inside the shield."""
        return self._depth > 0

    def __enter__(self) -> None:
        if get_ident() != _main_ident:
            return
        self._depth += 1
        if self._depth > 1:
            return
        found = shielded()
        if found != self._none_to_replace:
            self._replace(found)

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if get_ident() != _main_ident:
            return
        self._depth -= 1
        if not self._depth and self._replaced:
            self._restore()

    def _replace(self, found: tuple[Any, ...]) -> None:
        ours = (guard._handle, guard._terminate, self._note, notes.note)
        try:
            for number, handler in zip(SHIELDED, found, strict=True):
                if not callable(handler) or handler in ours:
                    continue
                self._replaced.replace_in_python(number)
        except BaseException:  # out of a handler that was not replaced yet
            self._depth -= 1
            self._restore()
            raise
        if not self._replaced:
            self._none_to_replace = found

    def _restore(self) -> None:
        """Restore the program's handlers, and run those whose signals have arrived: all, even if one of them raises."""
        try:
            self._replaced.restore_all()
            self.deliver()
        except BaseException:
            if self._replaced or self._noted:
                self._restore()
            raise

    def forget(self) -> None:
        """Restore every handler in a forked child."""
        self._depth = 0
        self._noted.clear()
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in self._replaced:
            self._noted.append((self._replaced[number][0], number, frame))

    def deliver(self) -> None:
        """Run the handlers of the signals that have arrived; raise their exceptions."""
        while self._noted and get_ident() == _main_ident:
            handler, number, frame = self._noted.pop(0)
            outermost = not handler_calls.inside
            handler_calls.inside.add(get_ident())
            try:
                handler(number, frame)
            finally:
                if outermost:
                    handler_calls.inside.clear()


handler_calls.waits.add(SignalShield.deliver.__code__)


class SignalNotes:
    """Signals that are answered at a step on which the ranks agree: before that step they are only recorded.

    Attributes:
        came: when each signal first arrived (time.monotonic).
        unanswered: the same for signals that no step has answered.
    """

    AGAIN_AFTER = 2.0
    """Seconds after which another SIGTERM counts as a second one: Slurm and a launcher send one each for the same cause."""

    def __init__(self) -> None:
        self.came: dict[int, float] = {}
        self.unanswered: dict[int, float] = {}
        self._answered: set[int] = set()
        self._users: dict[int, int] = {}
        self._replaced = ReplacedHandlers(self.note)
        self._listener: Callable[[bool], None] | None = None

    @property
    def active(self) -> bool:
        """Whether a step is to answer any signal."""
        return bool(self._users)

    @property
    def installed(self) -> bool:
        """Whether the handler of any signal is replaced."""
        return bool(self._replaced)

    @property
    def watched(self) -> bool:
        """Whether a listener receives SIGTERM, and ends the process if no step is to answer the signal."""
        return self._listener is not None

    def has(self, number: int) -> bool:
        """Return whether a signal is noted now; any thread may call the method."""
        return self._replaced.is_set(number)

    def watch(self, listener: Callable[[bool], None]) -> bool:
        """Call ``listener`` in the main thread when SIGTERM arrives; return False if the program handles SIGTERM.

        Args:
            listener: called with whether the signal is to end the process.
        """
        number = signal.SIGTERM
        if get_ident() != _main_ident or not (number in self._replaced or unhandled(number)):
            return False
        self._listener = listener
        if number not in self._replaced:
            self._replaced.replace(number)
        return True

    def unwatch(self) -> None:
        """Restore SIGTERM, unless a step is to answer it."""
        if self._listener is not None:
            self._listener = None
            if not self._users.get(signal.SIGTERM) and signal.SIGTERM in self._replaced:
                self._restore(signal.SIGTERM)

    def ends_process(self, number: int, now: float) -> bool:
        """Return whether a signal that comes now ends the process: no step is to answer it, or it is a second SIGTERM."""
        first = self.came.get(number, now)
        return not self._users.get(number) or (number == signal.SIGTERM and now - first > self.AGAIN_AFTER)

    def start(self, numbers: tuple[int, ...], *, free: bool) -> tuple[int, ...]:
        """Note these signals from now on; return those that are noted. The main thread calls the method.

        Args:
            numbers: the signals.
            free: note only signals that the program does not handle.
        """
        noted = []
        for number in numbers:
            if number not in self._replaced:
                if free and not unhandled(number):
                    continue
                self._replaced.replace(number)
            self._users[number] = self._users.get(number, 0) + 1
            noted.append(number)
        return tuple(noted)

    def stop(self, numbers: tuple[int, ...]) -> None:
        """End one use of these signals; restore signals that have no other use."""
        for number in numbers:
            self._users[number] -= 1
            if not self._users[number]:
                del self._users[number]
                self.came.pop(number, None)
                self.unanswered.pop(number, None)
                self._answered.discard(number)
                if number != signal.SIGTERM or not self.watched:
                    self._restore(number)

    def _restore(self, number: int) -> None:
        if get_ident() == _main_ident:  # else :meth:`note` does what the signal does by default
            self._replaced.restore(number)

    def renew(self, numbers: set[int]) -> None:
        """Forget that these signals have come and have been answered."""
        for number in numbers:
            self.came.pop(number, None)
            self._answered.discard(number)

    def agreed(self, number: int) -> None:
        """Record that a step has answered a signal, which may have reached only other ranks, or reaches this rank later."""
        self._answered.add(number)
        self.unanswered.pop(number, None)

    def note(self, number: int, frame: FrameType | None) -> None:
        """Record a signal (the handler)."""
        now = time.monotonic()
        ends = self.ends_process(number, now)
        if not ends:
            self.came.setdefault(number, now)
            if number not in self._answered:
                self.unanswered.setdefault(number, now)
        if number == signal.SIGTERM and self._listener is not None:
            self._listener(ends)
        elif ends:
            end_by(number)

    def end(self) -> None:
        """Ignore the signals that steps answer: the program is at its end.

        Python restores their defaults before MPI is finalised, and MPICH's launcher sends SIGUSR1 when a rank ends.
        """
        if get_ident() == _main_ident:
            for number in self._users:
                if number != signal.SIGTERM and self.has(number):
                    put(number, signal.SIG_IGN, None)

    def forget(self) -> None:
        """Restore every handler in a forked child, which makes no steps."""
        if self._listener is not None:
            signal.set_wakeup_fd(-1)
        self._listener = None
        self._users.clear()
        self.came.clear()
        self.unanswered.clear()
        self._answered.clear()
        self._replaced.restore_all()


def end_by(number: int) -> None:
    """End the process by a signal, like a process that does not handle it."""
    if get_ident() == _main_ident:
        put(number, signal.SIG_DFL, None)  # a handler of MPI would not end the process
        flush_streams()
    elif not set_default_effect(number):
        os._exit(128 + number)
    os.kill(os.getpid(), number)


_main_ident = threading.main_thread().ident
guard = DeferredInterrupt()
shield = SignalShield()
notes = SignalNotes()


def handlers() -> list[tuple[int, Any]]:
    """Return the signals that the program handles, with its handlers; any thread may call the function."""
    own = guard._handle, signal.default_int_handler
    return program_handlers(own, (guard._armed, shield._replaced, notes._replaced))


threads: set[int] = set()
"""Threads other than the main thread that have called the library."""


class _Blocked(threading.local):
    """The signals that a thread has blocked before it forks."""

    before: set[int] | None = None


_blocked = _Blocked()


def _before_fork() -> None:
    """Block signals in the thread that forks: Python drops signals that reach a child before it is set up."""
    if guard.installed or shield.up or notes.installed:
        _blocked.before = signal.pthread_sigmask(signal.SIG_BLOCK, ())  # apart: blocking may run a handler that raises
        signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED)


def _unblock() -> None:
    before, _blocked.before = _blocked.before, None
    if before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _in_child() -> None:
    """Reset this module in a forked child. The thread that forked is its main thread, and its only one."""
    global _main_ident
    _main_ident = get_ident()
    threads.clear()
    handler_calls.inside.clear()
    guard.forget()
    shield.forget()
    notes.forget()
    _unblock()


os.register_at_fork(before=_before_fork, after_in_parent=_unblock, after_in_child=_in_child)
