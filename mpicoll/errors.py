"""The exception tree of mpicoll.

::

    RuntimeError
    └── DistError                      anything that went wrong between ranks
        ├── DistBackendError           MPI reported an error; its own text is kept
        ├── DistNetworkError           a connection outside MPI failed
        ├── DistStoreError             a key-value store failed
        ├── BufferInUseError           memory of an operation under way was given to another one, or written
        ├── CollectiveMismatchError    ranks made different calls; nothing was moved, the group is still good
        ├── DeadlockError              ranks wait for each other and nobody can release them
        ├── PeerFailedError            another rank failed (uncaught exception, signal)
        │   └── FirstFailedError       the rank that goes first failed in its block
        ├── PeerExitedError            another rank ended without making the call that this one waits in
        ├── CollectiveTimeoutError     the time limit of the call or its group passed (also a TimeoutError)
        ├── GroupBrokenError           the group was given up earlier (time-out, withdrawal) and cannot be used
        └── LaunchError                the job was started in a way that cannot work

``DistError``, ``DistBackendError``, ``DistNetworkError`` and ``DistStoreError`` carry the names of
``torch.distributed``. Wrong arguments raise what ``torch.distributed`` raises: ``TypeError``, ``ValueError`` or
``RuntimeError``; a collective's ``ValueError`` is a ``RuntimeError``, too, as torch's backends raise that for some of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
"""Set on an exception about the caller's arguments: its message says all, the library's own frames say nothing."""


class _WrongValue(ValueError, RuntimeError):
    """A wrong argument of a collective: torch raises ValueError for some, and its backends RuntimeError for others."""

    def __reduce__(self) -> tuple[Any, ...]:
        return ValueError, self.args


_WrongValue.__name__ = _WrongValue.__qualname__ = "ValueError"
_WrongValue.__module__ = "builtins"


def wrong_argument(error: Exception) -> Exception:
    """Return an exception about the caller's arguments as it is raised: a ValueError that is a RuntimeError, too."""
    if type(error) is ValueError:
        told, error = error, _WrongValue(*error.args)
        error.__traceback__, error.__cause__ = told.__traceback__, told.__cause__
        error.__suppress_context__ = True  # else that would be ``told``
    setattr(error, ARGUMENT, True)
    return error


class DistError(RuntimeError):
    """Anything that went wrong between ranks; the root of this tree.

    Attributes:
        reporter: where all members of a group raise the same text, the global rank that prints all of it when the
            program ends with it; the others print one line. None: every rank prints its own.
        report: what the message is made from (``mpicoll.diagnosis.report.report.Report``), where several ranks were heard.
        group: the group that it concerns, as it is displayed.
        ranks: the global ranks at fault as far as can be told (they differ from the others, are late, or have left), else
            all that it concerns.
        calls: what the ranks said: a dict for each different call. Its keys are ranks (list of int), op, arguments (dict of
            strings), seq (int, 0: not numbered), site (file:line), group, async (bool), state (see
            ``mpicoll.diagnosis.report.entries.Standing``), problem, needs, waited (the least and the most seconds of one of
            the ranks, or None) and text; all others are strings, empty where nothing is known.
    """

    reporter: int | None = None
    report: Any = None
    group: str = ""
    ranks: Sequence[int] = ()
    calls: Sequence[dict[str, Any]] = ()


class DistBackendError(DistError):
    """MPI reported an error; the message holds the operation, the group, this rank and MPI's own text."""


class DistNetworkError(DistError):
    """A connection outside MPI failed."""


class DistStoreError(DistError):
    """A key-value store failed or timed out."""


class QueueEmptyError(DistStoreError):
    """A queue of a store has no value (``queue_pop`` with ``block=False``)."""


class CollectiveMismatchError(DistError):
    """The members of a group made different calls, or one of them passed arguments that are wrong.

    Raised on every member at the same call, before any data moved: the group is still good. A receive raises it, on its own
    rank, when the message is of another dtype or size; the message stays where it is.
    """


class BufferInUseError(DistError):
    """A buffer of an operation that has not been waited for was given to another one that writes it, or was written.

    Raised at check level ``full``, by the call that is given the buffer or by the ``wait`` that finds it written. A collective
    that is given one is not made on any member: the others raise CollectiveMismatchError, and the group is still good.
    """


class DeadlockError(DistError):
    """Ranks wait for each other and nobody outside can release them."""


class PeerFailedError(DistError):
    """Another rank failed; the message holds its rank, exception and file:line."""


class FirstFailedError(PeerFailedError):
    """The rank that goes first failed in its block, so the others did not run it."""


class PeerExitedError(DistError):
    """Another rank ended without making the call that this rank waits in."""


class CollectiveTimeoutError(DistError, TimeoutError):
    """The time limit of a call passed; the message says who is late. The group is broken afterwards."""


class GroupBrokenError(DistError):
    """The group was given up earlier (time-out, interrupt, failed member) and cannot be used any more."""


class LaunchError(DistError):
    """The job was started in a way that cannot work; the message holds the command that would."""


AGREED = "_mpicoll_agreed"
"""Set on an exception that is an outcome of a call, which all members know of: the group is still good."""


def in_one_line(error: BaseException) -> str:
    """Return an exception's message; of one over several lines the first, or the headline of its report."""
    lines = str(error).splitlines() or [""]
    report = error.report if isinstance(error, DistError) and len(lines) > 1 else None
    return lines[0] if report is None else str(report.one_line())
