"""The exception tree of mpicoll.

::

    RuntimeError
    └── DistError                      an error between ranks
        ├── DistBackendError           MPI reported an error; its own text is in the message
        ├── DistNetworkError           a connection outside MPI failed
        ├── DistStoreError             a key-value store failed
        │   └── QueueEmptyError        a queue of a store has no value
        ├── BufferInUseError           memory of a pending operation was passed to another call, or written
        ├── CollectiveMismatchError    ranks made different calls; nothing was moved
        ├── DeadlockError              ranks wait for each other, and no rank can release them
        ├── PeerFailedError            another rank failed (uncaught exception, signal)
        │   └── FirstFailedError       the rank that runs a block first failed in the block
        ├── PeerExitedError            another rank ended without making the call that this rank waits in
        ├── CollectiveTimeoutError     the time limit of a call or of its group passed (also a TimeoutError)
        ├── GroupBrokenError           the group was given up earlier (time limit, withdrawal) and cannot be used
        └── LaunchError                the job was started in a way that cannot work

``DistError``, ``DistBackendError``, ``DistNetworkError`` and ``DistStoreError`` have the names of
``torch.distributed``. Wrong arguments raise the types that ``torch.distributed`` raises: ``TypeError``, ``ValueError`` or
``RuntimeError``. A collective's ``ValueError`` is also a ``RuntimeError``, as torch's backends raise that type for some of them.

``docs/messages.md`` lists the classes: the docstring says when a class is raised, ``what_to_do`` what its reader can do.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

__all__ = [
    "BufferInUseError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "DeadlockError",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "FirstFailedError",
    "GroupBrokenError",
    "LaunchError",
    "PeerExitedError",
    "PeerFailedError",
    "QueueEmptyError",
    "in_one_line",
    "wrong_argument",
]


ARGUMENT = "_mpicoll_argument"
"""Attribute set on an exception about the caller's arguments: its traceback is printed without the library's own frames."""


_passed_to_c: deque[BaseException] = deque(maxlen=16)
"""The last errors that code in C++ may raise again as a RuntimeError with their text, as of the futures of torch."""


_unseen: deque[BaseException] = deque(maxlen=16)
"""Those of them that no uncaught exception has shown."""

RAISED_AGAIN = "Got the following error when running the callback: "
"""How torch begins the text of an error that a callback of a future has raised."""


def pass_to_c(error: BaseException) -> None:
    """Note an error that code in C++ is about to raise again; without the frames of its traceback, which refer to arrays."""
    passed = copy.copy(error)
    _passed_to_c.append(passed)
    _unseen.append(passed)


def unseen() -> list[BaseException]:
    """Return the errors that code in C++ has, and that no uncaught exception has shown: the program may not know them."""
    return [*_unseen]


def before_c(error: BaseException) -> BaseException:
    """Return the error that code in C++ has raised again, or ``error`` itself; an uncaught exception shows this error."""
    alone = error.__cause__ is None and error.__context__ is None
    text = message_of(error) if type(error) is RuntimeError and alone else ""
    if text.startswith(RAISED_AGAIN):
        for found in _passed_to_c:
            if _text(found) in text:
                error = found.with_traceback(error.__traceback__)
                break
    shown = "\n".join(map(_text, chain_of(error))) if _unseen else ""
    for each in [*_unseen]:
        if _text(each) in shown:
            _unseen.remove(each)
    return error


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {message_of(error)}"


def message_of(error: BaseException) -> str:
    """Return the message of an error of the program, whose ``__str__`` may raise; then as Python's tracebacks do."""
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"


def chain_of(error: BaseException | None) -> list[BaseException]:
    """Return an error, and the errors that it was raised from or behind."""
    found: list[BaseException] = []
    while error is not None and all(error is not each for each in found):
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


@dataclass(frozen=True, slots=True)
class Message:
    """A message that users can meet. ``docs/messages.md`` lists all messages that are attributes of modules.

    Attributes:
        text: the message; names in braces stand for facts, ``{n:is/are}`` for a verb that agrees with a number of ranks.
        when: when the message is printed.
        what_to_do: what the reader can do.
    """

    text: str
    when: str
    what_to_do: str = ""

    def __call__(self, **facts: Any) -> str:
        """Return the text with its facts filled in."""
        return self.text.format(**facts)


class _WrongValue(ValueError, RuntimeError):
    """A wrong argument of a collective: torch raises ValueError for some of these, and its backends RuntimeError."""

    def __reduce__(self) -> tuple[Any, ...]:
        return ValueError, self.args


_WrongValue.__name__ = _WrongValue.__qualname__ = "ValueError"
_WrongValue.__module__ = "builtins"


def wrong_argument(error: Exception) -> Exception:
    """Return an exception about the caller's arguments in the form in which the exception is raised.

    A ValueError becomes an exception that is also a RuntimeError.
    """
    if type(error) is ValueError:
        plain, error = error, _WrongValue(*error.args)
        error.__traceback__, error.__cause__ = plain.__traceback__, plain.__cause__
        error.__suppress_context__ = True  # the context would be ``plain``
    setattr(error, ARGUMENT, True)
    return error


class DistError(RuntimeError):
    """An error between ranks; the root of this tree.

    Attributes:
        reporter: the global rank that prints the whole text when the program ends with this error, if all members of a
            group raise the same text. The other ranks print one line, and the lowest of them the text if this rank handles its
            error. None: every rank prints its own text.
        report: the data that the message is made from (``mpicoll.diagnosis.report.report.Report``), if several ranks were
            asked.
        group: the name of the group that the error concerns, as messages display it.
        ranks: the global ranks at fault, if known: ranks that differ from the other ranks, are late, or have left. Otherwise
            all ranks that the error concerns.
        calls: the reports of the ranks: a dict for each different call. The keys are ranks (list of int), op, arguments (dict
            of strings), seq (int, 0: not numbered), site (file:line), called_from (file:line of the program, if the site is in
            an installed package, or in a function through which ranks have made different calls), group, async (bool), state (see
            ``mpicoll.diagnosis.report.entries.Standing``), problem, needs, handling (the exception of the program in whose
            ``except`` or ``finally`` block the call was made), waited (the least and the most seconds that one of the ranks has
            waited, or None) and text. All other values are strings, empty if nothing is known.
    """

    what_to_do: ClassVar[str] = "read the message, which names the ranks, the place (file:line) and what happened"

    reporter: int | None = None
    report: Any = None
    group: str = ""
    ranks: Sequence[int] = ()
    calls: Sequence[dict[str, Any]] = ()


class DistBackendError(DistError):
    """MPI reported an error; the message holds the operation, the group, this rank and MPI's own text."""

    what_to_do = (
        "look up MPI's text in the documentation of the MPI library; `mpicoll doctor` says which library is loaded"
    )


class DistNetworkError(DistError):
    """A connection outside MPI failed.

    Attributes:
        is_lost: the connection had been made, and has ended.
    """

    is_lost = False
    what_to_do = "check that the host and the port in the message can be reached, and that the server is still running"


class DistStoreError(DistError):
    """A key-value store failed or timed out."""

    what_to_do = (
        "check that a rank sets the key in the message, and that the process or the folder of the store still exists"
    )


class QueueEmptyError(DistStoreError):
    """A queue of a store has no value (``queue_pop`` with ``block=False``)."""

    what_to_do = "try again later, or wait for a value with `block=True`"


class CollectiveMismatchError(DistError):
    """The members of a group made different calls, or a member passed wrong arguments.

    Raised on every member at the same call, before any data moved. The group can still be used, unless a member had made later
    asynchronous calls of the group: then the group is broken on all members, as these calls could be taken for others. The last
    line of the message says which. If an asynchronous call fails and the program has not looked at its outcome, the next
    collective of the group raises the error, and is not made. A receive raises this error on its own rank only, if the message
    has another dtype or size; the message is not lost.
    """

    what_to_do = "compare the calls in the message and make the calls alike on all ranks; the line `next:` says how"


class BufferInUseError(DistError):
    """A buffer of a pending operation was passed to another call that writes it, or was written by the program.

    Raised at check level ``full``, by the call that gets the buffer or by the ``wait`` that finds the buffer written. A
    collective that gets such a buffer is made on no member: the other members raise CollectiveMismatchError, and the group can
    still be used.
    """

    what_to_do = "call `wait()` on the operation in the message before the buffer is used again, or use another buffer"


class DeadlockError(DistError):
    """Ranks wait for each other, and no other rank can release them."""

    what_to_do = "put the calls in the message into an order in which every rank can finish; the line `next:` says how"


class PeerFailedError(DistError):
    """Another rank failed; the message holds its rank, exception and file:line."""

    what_to_do = (
        "correct the error on the rank in the message; if it is an error between ranks, such as CollectiveMismatchError, any "
        "rank that it names may be wrong"
    )


class FirstFailedError(PeerFailedError):
    """The rank that runs a block first failed in the block, so this rank did not run the block."""

    what_to_do = "correct the error whose traceback is in the message; the group can still be used"


class PeerExitedError(DistError):
    """Another rank ended without making the call that this rank waits in."""

    what_to_do = (
        "find why the rank in the message ended: an early return, a shorter loop, or a call that the rank does not make"
    )


class CollectiveTimeoutError(DistError, TimeoutError):
    """The time limit of a call passed; the message says which ranks are late. The group is broken afterwards."""

    what_to_do = (
        "find what the late ranks in the message do; if these are only slow, increase `timeout=` or `MPICOLL_TIMEOUT`"
    )


class GroupBrokenError(DistError):
    """The group was given up earlier (time limit, interrupt, failed member) and cannot be used any more."""

    what_to_do = (
        "correct the first error of the group, which the message repeats; continue with a new group, or end the job"
    )


class LaunchError(DistError):
    """The job was started in a way that cannot work; the message holds a command that works."""

    what_to_do = (
        "start the job with the command in the message; `mpicoll doctor` shows this machine's launchers and libraries"
    )


def in_one_line(error: BaseException) -> str:
    """Return an exception's message in one line: its first line, or the headline of its report."""
    lines = message_of(error).splitlines() or [""]
    report = error.report if isinstance(error, DistError) and len(lines) > 1 else None
    return lines[0] if report is None else str(report.one_line())


CAUSED_BY = ", caused by "
"""Precedes the error of this library for which a program has ended with an error of its own."""
_MOST_CAUSES, _CAUSE_LENGTH = 20, 400


def cause_among(handled: BaseException | None) -> str:
    """Return the error of this library among an exception that the program handled and its causes, after :data:`CAUSED_BY`.

    Returns "" if there is none.
    """
    for _ in range(_MOST_CAUSES):
        if isinstance(handled, DistError):
            return f"{CAUSED_BY}{type(handled).__name__}: {in_one_line(handled)}"[:_CAUSE_LENGTH]
        if handled is not None:
            handled = handled.__cause__ or handled.__context__
    return ""


def reason_of(error: BaseException, *, whole: bool = False) -> str:
    """Return why a call ended: the first line of an exception's message, after the name of its class if the program raised it.

    Args:
        whole: return why a rank ended: always with the name of the class, with all lines of an error that has no report, and
            with the error of this library for which the program raised ``error``.
    """
    kind, of_program = type(error).__name__, not isinstance(error, DistError)
    cause = cause_among(error) if whole and of_program else ""
    reported = isinstance(error, DistError) and error.report is not None
    text = message_of(error) if whole and not reported and not cause else in_one_line(error)
    return (kind if not text else f"{kind}: {text}" if whole or of_program else text) + cause
