"""Recognise threads that are held: they wait without a limit for the end of a thread, or of a call in a pool, that cannot end.

A held thread stands (:mod:`standing`), and it is certain for what. It waits for the end of a thread (``Thread.join``, the end of
a ``with`` block of a pool, the end of the main thread) or for the result of a call that runs in a thread of a pool
(``concurrent.futures``, ``multiprocessing.pool.ThreadPool``). That thread waits in the library, or is held itself. So neither a
thread that sleeps nor one that computes can release it.

What remains is that such a thread makes the missing call of the library itself, or lets another thread make it. Threads that
have never made a call are expected to make none if their code and their variables lead to no call (:mod:`reach`). The same holds
for signal handlers, unless a timer of the process will send the signal.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

from mpicoll.diagnosis.reach import may_call
from mpicoll.diagnosis.standing import END, JOIN, idles, places, standing, stands
from mpicoll.runtime import signals
from mpicoll.runtime.signal_table import ALRM, CHLD, PROF, VTALRM

ASK_EVERY = 1.0
"""Seconds for which it is known what threads may call, at least."""

ASK_SHARE = 1 / 50
"""The part of the time that these questions take at most."""

_CONDITION = threading.Condition.wait.__code__
_EVENT = threading.Event.wait.__code__
_TIMERS = {ALRM: signal.ITIMER_REAL, VTALRM: signal.ITIMER_VIRTUAL, PROF: signal.ITIMER_PROF}
_STARTS = threading.Thread._bootstrap.__code__, threading.Thread._bootstrap_inner.__code__  # type: ignore[attr-defined]

_asked: tuple[tuple[object, ...], float, bool] = ((), 0.0, False)


def standing_beside(
    frames: dict[int, FrameType],
    idents: Collection[int | None],
    users: Collection[int | None],
    waiting: Collection[int],
) -> tuple[tuple[str, int], ...]:
    """Return the places of the threads that are held, like ``standing``; () if another thread may make a call of the library.

    Args:
        frames: the frame of each thread of this process that runs Python, also of the thread that asks.
        idents: the threads in question: all of the program that do not wait in the library.
        users: the threads that have made calls of the library, and the main thread.
        waiting: the threads that wait in the library.
    """
    held = held_by(frames, waiting).intersection(idents)
    others = {ident: frames.get(ident or 0) for ident in idents if ident not in held}
    if not held or any(frame is None or (ident in users and not idles(frame)) for ident, frame in others.items()):
        return ()
    handlers = signals.handlers()
    if any(number == CHLD or _is_timed(number) for number, _ in handlers):
        return ()
    if (others or handlers) and _may_call(
        [frame for frame in others.values() if frame], [each for _, each in handlers]
    ):
        return ()
    return places(frames, held)


def may_begin(frames: dict[int, FrameType], idents: Collection[int]) -> bool:
    """Return whether threads that have never made a call of the library may make one: not if all of them stand.

    Args:
        frames, idents: as for :func:`standing_beside`.
    """
    found = [frames[ident] for ident in sorted(idents) if ident in frames]
    return not standing(frames, idents) and (len(found) < len(idents) or _may_call(found, []))


def held_by(frames: dict[int, FrameType], waiting: Collection[int]) -> set[int]:
    """Return the threads that cannot go on as long as all threads in ``waiting`` wait."""
    needs = {ident: _needs(frame, frames) for ident, frame in frames.items() if ident not in waiting and stands(frame)}
    held: set[int] = set()
    while True:
        more = {
            ident for ident, needed in needs.items() if ident not in held and not needed.isdisjoint(held.union(waiting))
        }
        if not more:
            return held
        held |= more


def _needs(frame: FrameType, frames: dict[int, FrameType]) -> set[int | None]:
    """Return threads of which each must end, or end a call, before a thread that stands goes on; none if that is unknown."""
    if frame.f_code is JOIN:
        thread = frame.f_locals.get("self")
        return {threading.Thread.ident.fget(thread)} if isinstance(thread, threading.Thread) else set()  # type: ignore[attr-defined]
    if frame.f_code is END:
        return {thread.ident for thread in threading.enumerate() if not thread.daemon} - {threading.main_thread().ident}
    caller = frame.f_back
    if frame.f_code is not _CONDITION or caller is None:
        return set()
    pools, above = sys.modules.get("concurrent.futures.thread"), caller.f_back
    if pools is not None and caller.f_code in (
        pools._base.Future.result.__code__,
        pools._base.Future.exception.__code__,
    ):
        future = caller.f_locals.get("self")
        calls = _calls(frames, pools._WorkItem.run.__code__)
        return {ident for ident, known in calls if getattr(known.get("self"), "future", None) is future}
    pools = sys.modules.get("multiprocessing.pool")
    if pools is not None and caller.f_code is _EVENT and above and above.f_code is pools.ApplyResult.wait.__code__:
        result = above.f_locals.get("self")
        number, results = getattr(result, "_job", None), getattr(getattr(result, "_pool", None), "_outqueue", None)
        calls = _calls(frames, pools.worker.__code__)
        return {ident for ident, known in calls if known.get("job") == number and known.get("outqueue") is results}
    return set()


def _calls(frames: dict[int, FrameType], code: CodeType) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the threads that are inside a function, and its variables."""
    for ident, innermost in frames.items():
        yield from ((ident, frame.f_locals) for frame in stack(innermost) if frame.f_code is code)


def stack(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of a thread, from the innermost on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_timed(number: int) -> bool:
    """Return whether a timer of this process will send a signal."""
    return number in _TIMERS and signal.getitimer(_TIMERS[number])[0] > 0


def _may_call(threads: list[FrameType], handlers: list[Any]) -> bool:
    """Return whether threads or handlers may make a call of the library: a search of milliseconds, now and then."""
    global _asked
    roots = [frame for thread in threads for frame in stack(thread) if frame.f_code not in _STARTS]
    last = [list(stack(thread))[-1] for thread in threads]
    key = (*map(id, last), *map(id, handlers))
    known, until, answer = _asked
    now = time.monotonic()
    if known != key or now > until:
        answer = may_call([*roots, *handlers])
        over = time.monotonic()
        _asked = key, over + max(ASK_EVERY, (over - now) / ASK_SHARE), answer
    return answer
