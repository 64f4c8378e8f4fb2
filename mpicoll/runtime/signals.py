"""Signals inside a call of the library: answered where they can be, never in between.

Nothing here knows MPI. The waiting loop asks :data:`guard` and :data:`shield` at each of its steps.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from mpicoll.runtime.output import flush_streams

try:
    import ctypes

    # Called by main threads alone, and for less than the interpreter lock costs to give away.
    _sigaction: Any = ctypes.PyDLL(None).sigaction
except (ImportError, OSError, AttributeError):
    _sigaction = None


ENDING = (signal.SIGTERM, signal.SIGUSR1)
"""What launchers send to the ranks that are left when one has died: Open MPI the first, MPICH without cleanup the second."""


# Without what the signal module puts around them, which turns numbers into enums: 0.05 us instead of 1 us, a dozen times a call.
_plain: Any = importlib.import_module("_signal")
_handler = _plain.getsignal
_set_handler = _plain.signal

_ROOM = 512
"""Bytes, more than any C library's ``struct sigaction``."""


def disposition(number: int) -> bytes | None:
    """Return what the process does on a signal, as sigaction(2) tells it, opaque; None where that cannot be asked.

    It may be another thing than what ``signal.getsignal`` says: faulthandler.register, profilers, virtual machines and
    numerical libraries put a handler of their own in the place of Python's default, or before Python's handler.
    """
    if _sigaction is None:
        return None
    room = ctypes.create_string_buffer(_ROOM)
    return None if _sigaction(number, None, room) else room.raw


def c_handler(number: int) -> int | None:
    """Return the address of the C function that a signal calls, 0 for its default effect; None where that is not known."""
    found = disposition(number)
    # The structure begins with it; behind it are bytes that nobody sets.
    return None if found is None else ctypes.c_void_p.from_buffer_copy(found).value or 0


class _Symbol(ctypes.Structure if _sigaction is not None else object):  # type: ignore[misc]
    """``Dl_info``: what dladdr(3) tells of an address."""

    if _sigaction is not None:
        _fields_ = [
            (name, ctypes.c_void_p if "base" in name or "saddr" in name else ctypes.c_char_p)
            for name in ("fname", "fbase", "sname", "saddr")
        ]


def library_of(address: int) -> str:
    """Return the file name of the library that a C function belongs to, or "" where that is not known."""
    found = _Symbol()
    try:
        known = ctypes.PyDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(found))
    except (OSError, AttributeError):
        return ""
    return os.path.basename(os.fsdecode(found.fname)) if known and found.fname else ""


def unhandled(number: int) -> bool:
    """Whether a signal has its default effect: no handler of Python's stands for it, and none of anybody else's.

    MPICH has one of its own for SIGUSR1, by which its launcher tells of a rank that has died: it ends the others.
    """
    if signal.getsignal(number) is not signal.SIG_DFL:
        return False
    address = c_handler(number)
    return not address or library_of(address).startswith(("libmpi", "libpmpi"))


def exchange(number: int, handler: Any) -> None:
    """Give a signal another handler in the table of Python, and leave what the process does on it as it is.

    signal.signal puts Python's C function in place, too: that would drop a C handler that calls it in the end
    (faulthandler.register(chain=True)), and what signal.siginterrupt has set.
    """
    put(number, handler, disposition(number))


def put(number: int, handler: Any, does: bytes | None) -> None:
    """Give a signal a handler in the table of Python, and a disposition; None: the one that comes with the handler."""
    try:
        _set_handler(number, handler)
    finally:  # that handler may have raised already
        if does is not None:
            _sigaction(number, does, None)


class Terminated(BaseException):
    """A signal came that ends this process, while this rank waited. Never raised.

    Attributes:
        number: of the signal.
        at: when it came (time.monotonic).
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.at = time.monotonic()


class Guard:
    """Ctrl-C inside a call of the library is answered at a point where it can be answered, never in between.

    With the handler installed, a Ctrl-C in the program's own code raises KeyboardInterrupt as always; inside a call it is
    noted, the waiting loop sees it within one poll, withdraws and raises it. An exception out of one of the program's own
    signal handlers is treated alike as far as it strikes inside the waiting loop.
    """

    def __init__(self) -> None:
        self._holders: list[FrameType] = []  # those that are inside it, on the stack of the main thread
        self.noted: BaseException | None = None
        self.installed = False
        self._ignores = False
        self.armed: dict[signal.Signals, tuple[bytes | None, int | None]] = {}
        """The signals of ``ENDING`` that are noted just now: the disposition before, and the C handler that notes them."""
        self.waits = False
        """The main thread waits, for long enough to be answered there."""
        self.inside: set[CodeType] = set()
        """Functions that count as entered: they are looked for on the stack, since entering takes time."""

    def install(self) -> None:
        """Take over SIGINT where Python's default handler stands; anybody else's handler is left alone."""
        if threading.get_ident() == _main_ident and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            exchange(signal.SIGINT, self._handle)
            self.installed = True

    def uninstall(self) -> None:
        """Give SIGINT back, if it is still ours."""
        if self.installed and threading.get_ident() == _main_ident:
            if signal.getsignal(signal.SIGINT) == self._handle:
                exchange(signal.SIGINT, signal.default_int_handler)
            self.installed = False

    @property
    def depth(self) -> int:
        """How many functions of the main thread are inside it."""
        return len(self._holders)

    def _prune(self, frame: FrameType) -> None:
        """Drop holders that are not on the stack any more: an exception out of a handler may strike as one leaves.

        Between the end of a block and the first line of ``__exit__`` Python runs handlers, too.
        """
        while self._holders:
            each: FrameType | None = frame
            while each is not None and each is not self._holders[-1]:
                each = each.f_back
            if each is not None:
                return
            self._holders.pop()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if frame is not None:
            self._prune(frame)
        if not self.depth:
            while frame is not None and frame.f_code not in self.inside:
                frame = frame.f_back
            if frame is None:
                raise KeyboardInterrupt
        self.noted = KeyboardInterrupt()

    def arm(self) -> None:
        """Note the signals of ``ENDING`` instead of ending by them, where nobody handles them, until :meth:`disarm`.

        Only while this rank waits, where it is answered: in the program's own code and in MPI it ends the process at once.
        """
        if self.installed and threading.get_ident() == _main_ident:
            self.waits = True
            for number in ENDING:
                if number not in self.armed and unhandled(number):
                    before = disposition(number)
                    self.armed[number] = before, None
                    signal.signal(number, self._terminate)
                    self.armed[number] = before, c_handler(number)

    def disarm(self) -> None:
        """Give the signals their default back, or MPI its handler."""
        if self.waits and threading.get_ident() == _main_ident:
            self.waits = False
        if self.armed and threading.get_ident() == _main_ident:
            try:
                while True:
                    if not self.armed:
                        break
                    number = next(iter(self.armed))
                    self._give_back(number, signal.SIG_DFL)
                    self.armed.pop(number, None)
            except BaseException:  # out of a handler of the program's
                self.disarm()
                raise

    def _give_back(self, number: signal.Signals, handler: signal.Handlers) -> None:
        """Set ``handler`` for a signal that is armed, unless somebody has taken it since."""
        if signal.getsignal(number) == self._terminate:
            before, ours = self.armed[number]
            if ours not in (None, c_handler(number)):
                exchange(number, handler.value)
            elif handler is signal.SIG_DFL and before is not None:
                put(number, handler.value, before)
            else:
                signal.signal(number, handler)

    def ignore_news(self) -> None:
        """Leave MPICH's signal for a rank that has died without effect from now on: this rank knows."""
        if self.installed and threading.get_ident() == _main_ident:
            if signal.SIGUSR1 in self.armed:
                self._give_back(signal.SIGUSR1, signal.SIG_IGN)
                self._ignores = True
            elif unhandled(signal.SIGUSR1):
                signal.signal(signal.SIGUSR1, signal.SIG_IGN)
                self._ignores = True

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.noted = Terminated(number)

    def end(self, by: Terminated) -> None:
        """End by a signal, as a process that does not handle it."""
        self.disarm()
        end_by(by.number)

    def forget(self) -> None:
        """Give every signal back in a forked child, where nobody waits in a call of the library."""
        self._holders.clear()
        self.noted = None
        self.disarm()
        if self._ignores and signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        self._ignores = False
        self.uninstall()

    def __enter__(self) -> None:
        ident = threading.get_ident()
        if ident == _main_ident:
            holder = sys._getframe(1)
            if self._holders:
                self._prune(holder)
            self._holders.append(holder)
        else:
            threads.add(ident)

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if threading.get_ident() == _main_ident:
            holder = sys._getframe(1)
            while self._holders and self._holders.pop() is not holder:
                pass
            if self.noted is not None:
                self.answer(value)

    def answer(self, value: BaseException | None) -> None:
        """Raise what was noted, at the end of the outermost call of the library, which ends with ``value``."""
        if self.noted is not None and not self.depth and threading.get_ident() == _main_ident:
            noted, self.noted = self.noted, None
            if not isinstance(noted, Terminated):
                raise noted from value
            if value is None:  # else what is on its way says more, such as which rank has died
                self.end(noted)

    def take(self) -> BaseException | None:
        """Return what the main thread has to answer, once."""
        if self.noted is None or threading.get_ident() != _main_ident:
            return None
        noted, self.noted = self.noted, None
        return noted


class Shield:
    """Between the agreement on a call and its native transfer no handler of the program's own may raise.

    A rank that does not enter a transfer that the others have been promised leaves them inside MPI, where nothing can be
    answered. So the program's handlers are replaced by one that takes a note, and run at the next point where the rank may
    still withdraw (inside the waiting loop), or when the call is over. Blocking the signals would not do: another thread
    of the process may take them, and Python runs the handler in the main thread all the same.
    """

    SIGNALS = tuple(
        getattr(signal, f"SIG{name}")
        for name in ("HUP", "INT", "QUIT", "USR1", "USR2", "ALRM", "VTALRM", "PROF", "TERM", "CHLD", "XCPU", "IO")
    )

    def __init__(self) -> None:
        self._depth = 0
        self._found: dict[int, Any] = {}
        self._noted: list[tuple[Callable[[int, FrameType | None], Any], int, FrameType | None]] = []

    @property
    def up(self) -> bool:
        """Whether the main thread is under it."""
        return self._depth > 0

    def __enter__(self) -> None:
        if threading.get_ident() != _main_ident:
            return
        self._depth += 1
        if self._depth > 1:
            return
        ours = (guard._handle, guard._terminate, self._note, notes.take)
        try:
            for number in self.SIGNALS:
                handler = _handler(number)
                if not callable(handler) or handler in ours:
                    continue
                self._found[number] = handler
                exchange(number, self._note)
        except BaseException:  # out of a handler that was still in its place
            self._depth -= 1
            self._give_back()
            raise

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if threading.get_ident() != _main_ident:
            return
        self._depth -= 1
        if not self._depth and self._found:
            self._give_back()

    def _give_back(self) -> None:
        """Put the program's handlers back and run those whose signals have come: all, whatever one of them raises."""
        try:
            while True:
                if not self._found:
                    break
                number, handler = next(iter(self._found.items()))
                if _handler(number) == self._note:
                    exchange(number, handler)
                self._found.pop(number, None)
            self.deliver()
        except BaseException:
            if self._found or self._noted:
                self._give_back()
            raise

    def forget(self) -> None:
        """Give every signal back in a forked child."""
        self._depth = 0
        self._noted.clear()
        self._give_back()

    def _note(self, number: int, frame: FrameType | None) -> None:
        handler = self._found.get(number)
        if handler is not None:
            self._noted.append((handler, number, frame))

    def deliver(self) -> None:
        """Run the handlers of the signals that have come; what they raise is raised here."""
        while self._noted and threading.get_ident() == _main_ident:
            handler, number, frame = self._noted.pop(0)
            handler(number, frame)


class Notes:
    """Signals that are answered at a step on which the ranks agree: until then nothing is done but to note them.

    Attributes:
        came: when each of them first came (time.monotonic).
        unanswered: the same of those that no step has answered.
        watched: SIGTERM is told to a thread, which ends the process where no step is to answer it.
    """

    AGAIN_AFTER = 2.0
    """Seconds after which another SIGTERM is meant as one: Slurm's and a launcher's, for one cause, come together."""

    def __init__(self) -> None:
        self.came: dict[int, float] = {}
        self.unanswered: dict[int, float] = {}
        self._answered: set[int] = set()
        self._holders: dict[int, int] = {}
        self._found: dict[int, tuple[Any, bytes | None]] = {}
        self._tell: Callable[[bool], None] | None = None

    @property
    def held(self) -> bool:
        """Whether a step is to answer any."""
        return bool(self._holders)

    @property
    def taken(self) -> bool:
        """Whether any has another handler than the program gave it."""
        return bool(self._found)

    @property
    def watched(self) -> bool:
        return self._tell is not None

    def has(self, number: int) -> bool:
        """Whether its handler is the one for a signal now: any thread may ask."""
        return bool(_handler(number) == self.take)

    def watch(self, tell: Callable[[bool], None]) -> bool:
        """Have ``tell`` called in the main thread when SIGTERM comes, where nobody handles it; return whether that is so.

        Args:
            tell: given whether the signal is to end the process.
        """
        number = signal.SIGTERM
        if threading.get_ident() != _main_ident or not (number in self._found or unhandled(number)):
            return False
        self._tell = tell
        if number not in self._found:
            self._found[number] = _handler(number), disposition(number)
            signal.signal(number, self.take)
        return True

    def unwatch(self) -> None:
        """Give SIGTERM back, unless a step is to answer it."""
        if self._tell is not None:
            self._tell = None
            if not self._holders.get(signal.SIGTERM) and signal.SIGTERM in self._found:
                self._give_back(signal.SIGTERM)

    def again(self, number: int, now: float) -> bool:
        """Whether a signal that comes now ends the process: no step is to answer it, or it is a second SIGTERM."""
        first = self.came.get(number, now)
        return not self._holders.get(number) or (number == signal.SIGTERM and now - first > self.AGAIN_AFTER)

    def hold(self, numbers: tuple[int, ...], *, free: bool) -> tuple[int, ...]:
        """Note these signals from now on, called in the main thread; return those that are. ``free``: that nobody handles."""
        held = []
        for number in numbers:
            if number not in self._found:
                if free and not unhandled(number):
                    continue
                self._found[number] = _handler(number), disposition(number)
                signal.signal(number, self.take)
            self._holders[number] = self._holders.get(number, 0) + 1
            held.append(number)
        return tuple(held)

    def release(self, numbers: tuple[int, ...]) -> None:
        """Give signals back that nobody else holds."""
        for number in numbers:
            self._holders[number] -= 1
            if not self._holders[number]:
                del self._holders[number]
                self.came.pop(number, None)
                self.unanswered.pop(number, None)
                self._answered.discard(number)
                if number != signal.SIGTERM or not self.watched:
                    self._give_back(number)

    def _give_back(self, number: int) -> None:
        if threading.get_ident() != _main_ident:
            return  # :meth:`take` does then what the signal does by default
        handler, does = self._found.pop(number)
        if signal.getsignal(number) == self.take:
            # None: a handler that was not installed from Python.
            put(number, signal.SIG_DFL.value if handler is None else handler, does)

    def renew(self, numbers: set[int]) -> None:
        """Forget that these have come, and have been answered."""
        for number in numbers:
            self.came.pop(number, None)
            self._answered.discard(number)

    def agreed(self, number: int) -> None:
        """Note that a step has answered a signal, which may have come to another rank only, or comes here later."""
        self._answered.add(number)
        self.unanswered.pop(number, None)

    def take(self, number: int, frame: FrameType | None) -> None:
        """Note a signal (the handler)."""
        now = time.monotonic()
        again = self.again(number, now)
        if not again:
            self.came.setdefault(number, now)
            if number not in self._answered:
                self.unanswered.setdefault(number, now)
        if number == signal.SIGTERM and self._tell is not None:
            self._tell(again)
        elif again:
            end_by(number)

    def end(self) -> None:
        """Let signals that steps have answered do nothing any more: the program is at its end.

        Python gives each its default back before MPI is finalised, and MPICH's launcher sends SIGUSR1 when a rank ends.
        """
        if threading.get_ident() == _main_ident:
            for number in self._holders:
                if number != signal.SIGTERM and _handler(number) == self.take:
                    signal.signal(number, signal.SIG_IGN)

    def forget(self) -> None:
        """Give every signal back in a forked child, which has no steps."""
        if self._tell is not None:
            signal.set_wakeup_fd(-1)
        self._tell = None
        self._holders.clear()
        self.came.clear()
        self.unanswered.clear()
        self._answered.clear()
        for number in tuple(self._found):
            self._give_back(number)


def end_by(number: int) -> None:
    """End by a signal, as a process that does not handle it."""
    if threading.get_ident() == _main_ident:
        signal.signal(number, signal.SIG_DFL)  # MPI's own handler would not
        flush_streams()
    elif _sigaction is not None:
        _sigaction(number, bytes(_ROOM), None)  # SIG_DFL is zero
    else:
        os._exit(128 + number)
    os.kill(os.getpid(), number)


_main_ident = threading.main_thread().ident
guard = Guard()
shield = Shield()
notes = Notes()

threads: set[int] = set()
"""Threads other than the main one that have called the library."""


class _Blocked(threading.local):
    """The signals that a thread had blocked before it forks."""

    before: set[int] | None = None


_blocked = _Blocked()


def _before_fork() -> None:
    """Hold signals back in the thread that forks: Python drops those that it gets in a child that is not set up yet."""
    if guard.installed or shield.up or notes.taken:
        _blocked.before = signal.pthread_sigmask(signal.SIG_BLOCK, ())  # apart: blocking may run a handler that raises
        signal.pthread_sigmask(signal.SIG_BLOCK, Shield.SIGNALS)


def _unblock() -> None:
    before, _blocked.before = _blocked.before, None
    if before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _in_child() -> None:
    """Start anew in a forked child, whose main thread is the one that forked; no other thread is there."""
    global _main_ident
    _main_ident = threading.get_ident()
    threads.clear()
    guard.forget()
    shield.forget()
    notes.forget()
    _unblock()


os.register_at_fork(before=_before_fork, after_in_parent=_unblock, after_in_child=_in_child)
