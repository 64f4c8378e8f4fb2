"""Blocking messages that are made again, by a persistent request: late ranks, failures of MPI, and other threads."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from ranks import give_up

import mpicoll as dist
from mpicoll.api import messages as messages_api
from mpicoll.operations import messages
from mpicoll.runtime import signals, waiting
from mpicoll.transports.mpi.envelope import KnownSites

pytestmark = pytest.mark.mpi(min_size=2)

INSIDE, APART, SYNCHRONOUS = 4, 1000, 40_000
"""Numbers of elements: in the envelope; apart from the envelope; and so many that a send waits for its receive."""


@pytest.fixture
def handles_ctrl_c() -> Iterator[None]:
    """Handle Ctrl-C as in a job of its own: an earlier test may have started the library with ``comm=``, without a handler."""
    before = signals.guard.installed
    signals.guard.install()
    assert signals.guard.installed
    yield
    if not before:
        signals.guard.uninstall()


@pytest.fixture
def group() -> Iterator[Any]:
    """Return a group of its own: that of all tests may have as many persistent messages as a group has."""
    made = dist.new_group()
    yield made
    dist.barrier(made)
    dist.destroy_process_group(made)


def make(x: Any, group: Any, tag: int = 0) -> None:
    """Make one message from rank 0 to rank 1, always from the same lines."""
    if dist.get_rank() == 0:
        dist.send(x, 1, group, tag)
    elif dist.get_rank() == 1:
        dist.recv(x, 0, group, tag)


def learn(x: Any, group: Any, tag: int = 0) -> Any:
    """Make the message until it has a persistent request, and return the persistent message."""
    for _ in range(4):
        make(x, group, tag)
    dist.barrier()
    return group.sends.last if dist.get_rank() == 0 else group.receives.last


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("spins", [0, None], ids=["no polls", "polls"])
@pytest.mark.parametrize("count", [INSIDE, APART, SYNCHRONOUS])
def test_a_rank_that_is_late(
    count: int, spins: int | None, late: int, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call whose message does not come within its polls waits like every call."""
    rank, x = dist.get_rank(), np.zeros(count)
    again = learn(x, group, tag=1)
    waits: list[Any] = []
    finish = messages.finish
    monkeypatch.setattr(messages, "finish", lambda *args: (waits.append(args), finish(*args)))
    if again is not None and spins is not None:
        monkeypatch.setattr(again, "spins", spins)
    for turn in range(6):
        x[...] = turn if rank == 0 else -1
        dist.barrier()
        if rank == late:
            time.sleep(0.02)
        make(x, group, tag=1)
        assert (x == (turn if rank < 2 else -1)).all()
    if rank == 1 and late == 0:
        assert waits, "the receive waited for the late send"
    if rank == 0 and late == 1 and count == SYNCHRONOUS:
        assert waits, "the send waited for the late receive"
    assert not waiting.pending
    dist.barrier()


@pytest.mark.parametrize("count", [INSIDE, APART, SYNCHRONOUS])
@pytest.mark.parametrize("fails", [0, 1])
def test_mpi_fails_in_a_start(count: int, fails: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group is given up, and the receive is no longer posted."""
    group: Any = dist.new_group()
    rank, x = dist.get_rank(), np.ones(count)
    again = learn(x, group)

    def failing() -> None:
        raise MPI.Exception(MPI.ERR_OTHER)

    if rank == fails:
        monkeypatch.setattr(again, "start", failing)
        with pytest.raises(dist.DistBackendError, match="send" if rank == 0 else "recv"):
            make(x, group)
        assert group.broken is not None
        assert not group.pair.receiver.posted
        monkeypatch.undo()
    dist.barrier()
    give_up(group, "MPI failed in a call on it")
    dist.destroy_process_group(group)
    dist.barrier()


@pytest.mark.usefixtures("handles_ctrl_c")
def test_ctrl_c_while_the_call_site_changes(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The send is made, the interrupt is raised after it, and the persistent request is free."""
    rank, x = dist.get_rank(), np.ones(INSIDE)
    again = learn(x, group, tag=5)
    if rank == 0:
        sites = group.known_sites

        def interrupted(*args: Any) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            return KnownSites.known(sites, *args)

        def elsewhere() -> None:
            dist.send(x, 1, group, tag=5)

        elsewhere()  # the receiver learns this line
        make(x, group, tag=5)
        with monkeypatch.context() as changed:
            changed.setattr(sites, "known", interrupted)
            with pytest.raises(KeyboardInterrupt):
                elsewhere()
        assert group.broken is None
        again.take()
        again.give_back()
        make(x, group, tag=5)
    else:
        for _ in range(4):
            make(x, group, tag=5)
    dist.barrier()


@pytest.mark.parametrize("first", ["plain", "unpickled"])
@pytest.mark.parametrize("count", [INSIDE, APART])
def test_an_equal_dtype_that_is_another_object(
    count: int, first: str, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays that were unpickled use the same persistent request as other arrays."""
    rank, tag = dist.get_rank(), 6 if first == "plain" else 7
    plain, unpickled = np.ones(count), pickle.loads(pickle.dumps(np.ones(count)))
    assert plain.dtype is not unpickled.dtype
    again = learn(plain if first == "plain" else unpickled, group, tag=tag)
    general = messages_api.start_send if rank == 0 else messages_api.start_receive
    made: list[Any] = []
    name = general.__name__
    monkeypatch.setattr(messages_api, name, lambda *args: (made.append(args), general(*args))[1])
    for turn in range(6):
        x = (plain, unpickled)[turn % 2]
        x[...] = turn if rank == 0 else -1
        make(x, group, tag=tag)
        assert (x == (turn if rank < 2 else -1)).all()
    assert not made
    assert again is None or rank > 1 or again.dtype == plain.dtype
    dist.barrier()


@pytest.mark.parametrize("count", [INSIDE, APART, SYNCHRONOUS])
def test_a_thread_that_waits_for_another_tag(count: int, group: Any) -> None:
    """Messages of one thread are made while another thread waits for a message of the same rank."""
    rank, x, y = dist.get_rank(), np.zeros(count), np.zeros(count)
    learn(x, group, tag=2)
    learn(y, group, tag=3)
    if rank == 1:
        waits = threading.Thread(target=make, args=(y, group, 3))
        waits.start()
    for turn in range(20):
        x[...] = turn if rank == 0 else -1
        make(x, group, tag=2)
        if rank == 1:
            assert (x == turn).all()
    if rank == 0:
        y[...] = 8
        make(y, group, tag=3)
    elif rank == 1:
        waits.join(20)
        assert not waits.is_alive()
        assert (y == 8).all()
    dist.barrier()


@pytest.mark.parametrize("count", [INSIDE, APART])
def test_two_lines_that_alternate(count: int, group: Any) -> None:
    """An error names the line of the send whose message it is about, whichever of two lines sent the message."""
    rank, x = dist.get_rank(), np.zeros(count)
    source = Path(__file__).read_text().splitlines()
    lines = [
        f"{__file__}:{source.index(f'            dist.send(x + turn, 1, group, tag=4)  # {word}') + 1}"
        for word in ("even", "odd")
    ]
    for turn in range(12):
        if rank == 0 and turn % 2:
            dist.send(x + turn, 1, group, tag=4)  # odd
        elif rank == 0:
            dist.send(x + turn, 1, group, tag=4)  # even
        elif rank == 1:
            if turn > 6:
                with pytest.raises(dist.CollectiveMismatchError) as told:
                    dist.recv(np.zeros(count, "f"), 0, group, tag=4)
                assert f"send at {lines[turn % 2]})" in str(told.value)
            dist.recv(x, 0, group, tag=4)
            assert (x == turn).all()
            x[...] = 0
    dist.barrier()


@pytest.mark.parametrize("kind", [ValueError, AttributeError])
def test_a_handler_that_raises_while_the_call_site_is_found(
    kind: type[Exception], group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of a signal handler is raised, and no message is sent or received; the next message arrives."""
    x = np.zeros(INSIDE)
    learn(x, group)

    def handler(*_: Any) -> None:
        raise kind("of the handler")

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(messages, "_frame", lambda _: signal.raise_signal(signal.SIGUSR1))
            if dist.get_rank() < 2:
                with pytest.raises(kind, match="of the handler"):
                    make(x, group)
    finally:
        signal.signal(signal.SIGUSR1, before)
    x[:] = 5.0 if dist.get_rank() == 0 else 0.0
    make(x, group)
    assert dist.get_rank() > 1 or (x == 5).all()
