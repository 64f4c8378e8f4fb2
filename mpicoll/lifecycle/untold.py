"""Find asynchronous calls that the program has not waited for, and errors that the program does not know."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from mpicoll.errors import CollectiveMismatchError
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.runtime import signals, waiting

MOMENT, EXCHANGED_WITHIN = 0.1, 2.0
"""Seconds for which pending calls are progressed, as an error may be on its way: all calls, and while members exchange calls."""


def untold(groups: Iterable[ProcessGroup]) -> list[Any]:
    """Progress the pending calls of groups for a moment, and return the calls that the program does not know the end of.

    The calls whose members made different calls come first, then other calls that have failed: later errors follow from them.
    """
    groups = tuple(groups)
    started = [call for group in groups for call in group.started() if call.error is None]
    began = time.monotonic()
    while started and time.monotonic() < began + _moment(started):
        started = _pending(started)
        waiting.serve()
        time.sleep(MOMENT / 1000)
    return sorted((call for group in groups for call in group.untold()), key=_rank_of)


def _moment(calls: list[Any]) -> float:
    return EXCHANGED_WITHIN if any(call.call.explaining for call in calls) else MOMENT


def _pending(calls: list[Any]) -> list[Any]:
    with signals.guard:
        is_over = [call.Test() for call in calls]
    return [call for call, over in zip(calls, is_over, strict=True) if not over]


def _rank_of(call: Any) -> int:
    return 0 if isinstance(call.error, CollectiveMismatchError) else 1 if call.error is not None else 2
