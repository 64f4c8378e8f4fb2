"""Small messages that the extension starts and completes: what other threads and signal handlers do meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpicoll as dist
from mpicoll.checks.memory_in_use import claims
from mpicoll.operations import messages
from mpicoll.runtime import native, signals, waiting

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.skipif(native.found is None, reason=f"these are messages of the extension: {native.why_not}"),
]


class Struck(Exception):
    """What a signal handler of a program raises."""


def pair(tag: int) -> tuple[bool, Callable[[], Any], np.ndarray[Any, Any]]:
    """Practise a message from rank 0 to rank 1; return whether this rank takes part, how it starts the message, and its array."""
    rank = dist.get_rank()
    x = np.full(4, 1.0 - rank)

    def one() -> Any:
        return dist.isend(x, 1, tag=tag) if rank == 0 else dist.irecv(x, 0, tag=tag)

    for _ in range(4 if rank < 2 else 0):
        one().wait()
    dist.barrier()
    return rank < 2, one, x


def test_a_future_while_another_thread_waits() -> None:
    """A future that is asked for while the extension polls MPI is done with its message."""
    mine, one, x = pair(1)
    if mine:
        work = one()
        again = work._request.held
        assert again.current is work._request
        test, polled, go = again.test, threading.Event(), threading.Event()

        def slow() -> bool:
            polled.set()
            go.wait(10)
            return bool(test())

        again.test = slow
        thread = threading.Thread(target=work.wait)
        thread.start()
        assert polled.wait(10)
        future = work.get_future()
        go.set()
        thread.join()
        again.test = test
        assert future.result(10) == [x]
        assert (x == 1).all()
    dist.barrier()


def test_ctrl_c_in_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message goes its way without a Work, and nothing of it is left; the next messages are as usual."""
    mine, one, _ = pair(2)
    group: Any = dist.group.WORLD
    if dist.get_rank() == 0:
        real = messages.Work

        def struck(*given: Any) -> Any:
            signals.guard.noted = KeyboardInterrupt()  # as the handler of Ctrl-C does inside a call
            return real(*given)

        with monkeypatch.context() as patch:
            patch.setattr(messages, "Work", struck)
            with pytest.raises(KeyboardInterrupt):
                one()
        assert not group.unwaited
    elif mine:
        one().wait()
    dist.barrier()
    waiting.progress()
    assert not claims.active
    assert group.broken is None
    if mine:
        one().wait()


def test_a_handler_in_a_start_that_starts_nothing() -> None:
    """An exception after the extension has declined, as the same array is being sent, leaves the earlier send and the group."""
    mine, one, _ = pair(3)
    group: Any = dist.group.WORLD
    if dist.get_rank() == 0:
        work, again = one(), group.sends.last

        class Declined:
            def __getattr__(self, name: str) -> Any:
                return getattr(again, name)

            def begin(self, *given: Any) -> None:
                assert again.begin(*given) is None
                raise Struck

        group.sends.last = Declined()
        try:
            with pytest.raises(Struck):
                one()
        finally:
            group.sends.last = again
        work.wait()
    elif mine:
        one().wait()
    assert group.broken is None
    dist.barrier()


def test_a_handler_before_the_end_of_a_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """A send that is struck just before its end still has the message: another send of it takes none of its place."""
    mine, one, x = pair(4)
    if dist.get_rank() == 0:
        work = one()

        def struck(self: Any) -> None:
            raise Struck

        with monkeypatch.context() as patch:
            patch.setattr(messages._PreparedSend, "_complete", struck)
            with pytest.raises(Struck):
                while not work.is_completed():
                    pass
        x[...] = 1
        other = dist.isend(np.full(4, 7.0), 1, tag=4)
        work.wait()
        other.wait()
    elif mine:
        one().wait()
        one().wait()
        assert (x == 7).all()
    dist.barrier()
