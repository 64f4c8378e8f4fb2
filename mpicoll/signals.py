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
from types import CodeType, FrameType
from typing import Any

__all__ = ["Guard", "Shield", "Terminated", "guard", "shield", "threads"]

ENDING = (signal.SIGTERM, signal.SIGUSR1)
"""What launchers send to the ranks that are left when one has died: Open MPI the first, MPICH without cleanup the second."""


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
        self.depth = 0
        self.noted: BaseException | None = None
        self.installed = False
        self.armed: list[signal.Signals] = []
        self.inside: set[CodeType] = set()
        """Functions that count as entered: they are looked for on the stack, since entering takes time."""

    def install(self) -> None:
        """Take over SIGINT where Python's default handler stands; anybody else's handler is left alone."""
        if threading.get_ident() == _main_ident and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)
            self.installed = True

    def uninstall(self) -> None:
        """Give SIGINT back, if it is still ours."""
        if self.installed and threading.get_ident() == _main_ident:
            if signal.getsignal(signal.SIGINT) == self._handle:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            self.installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.depth:
            while frame is not None and frame.f_code not in self.inside:
                frame = frame.f_back
            if frame is None:
                raise KeyboardInterrupt
        self.noted = KeyboardInterrupt()

    def arm(self) -> None:
        """Note the signals of ``ENDING`` instead of ending by them, where their default stands, until :meth:`disarm`.

        Only while this rank waits, where it is answered: in the program's own code and in MPI it ends the process at once.
        """
        if self.installed and threading.get_ident() == _main_ident:
            for number in ENDING:
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, self._terminate)
                    self.armed.append(number)

    def disarm(self) -> None:
        """Give the signals their default back."""
        if self.armed and threading.get_ident() == _main_ident:
            while self.armed:
                number = self.armed.pop()
                if signal.getsignal(number) == self._terminate:
                    signal.signal(number, signal.SIG_DFL)

    def ignore_news(self) -> None:
        """Leave MPICH's signal for a rank that has died without effect from now on: this rank knows."""
        ours = (signal.SIG_DFL, self._terminate)
        if self.installed and threading.get_ident() == _main_ident and signal.getsignal(signal.SIGUSR1) in ours:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.noted = Terminated(number)

    def end(self, by: Terminated) -> None:
        """End by a signal, as a process that does not handle it."""
        self.disarm()
        sys.stdout.flush()
        sys.stderr.flush()
        os.kill(os.getpid(), by.number)

    def __enter__(self) -> None:
        ident = threading.get_ident()
        if ident == _main_ident:
            self.depth += 1
        else:
            threads.add(ident)

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if threading.get_ident() == _main_ident:
            self.depth -= 1
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


# Without what the signal module puts around it, which turns numbers into enums: 0.05 us instead of 1 us, a dozen times a call.
_handler: Any = importlib.import_module("_signal").getsignal


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
        self._noted: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> None:
        if threading.get_ident() != _main_ident:
            return
        self._depth += 1
        if self._depth > 1:
            return
        ours = (guard._handle, guard._terminate)
        for number in self.SIGNALS:
            handler = _handler(number)
            if callable(handler) and handler not in ours:
                self._found[number] = handler
                signal.signal(number, self._note)

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if threading.get_ident() != _main_ident:
            return
        self._depth -= 1
        if not self._depth and self._found:
            for number, handler in self._found.items():
                if signal.getsignal(number) == self._note:
                    signal.signal(number, handler)
            try:
                self.deliver()
            finally:
                self._found.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.append((number, frame))

    def deliver(self) -> None:
        """Run the handlers of the signals that have come; what they raise is raised here."""
        while self._noted and threading.get_ident() == _main_ident:
            number, frame = self._noted.pop(0)
            handler = self._found.get(number)
            if callable(handler):
                handler(number, frame)


_main_ident = threading.main_thread().ident
guard = Guard()
shield = Shield()

threads: set[int] = set()
"""Threads other than the main one that have called the library."""
