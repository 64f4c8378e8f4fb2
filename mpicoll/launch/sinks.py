"""Where the job's output goes: this process's stdout and stderr, each written by a thread that waits if nobody reads."""

from __future__ import annotations

import os
import select
import selectors
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

FULL = 1 << 20  # bytes that wait for a sink; the ranks' pipes are not read until half of them are written
_PIECE = 1 << 16  # bytes of one write


class Sink:
    """A descriptor that output is written to, in order.

    Attributes:
        waiting: bytes that are not written yet.
        error: the first error of a write. The bytes of a write that fails are lost; the next bytes are written, if possible.
    """

    def __init__(self, descriptor: int, name: str, changed: Callable[[], None]) -> None:
        self.name = name
        self.waiting = 0
        self.error: OSError | None = None
        self._descriptor = descriptor
        self._call_changed = (
            changed  # called by the thread when there is room again, all is written, or a write has failed
        )
        self._pieces: deque[bytes] = deque()
        self._arrived = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def full(self) -> bool:
        """Whether no more bytes should be passed to `put` now."""
        return self.waiting >= FULL

    def put(self, data: bytes) -> None:
        """Write data soon; never wait."""
        if not data:
            return
        with self._arrived:
            self._pieces.append(data)
            self.waiting += len(data)
            self._arrived.notify()
        if self._thread is None:
            # A daemon: if nobody ever reads, the process ends without the thread.
            self._thread = threading.Thread(target=self._run, name=f"mpicoll-{self.name}", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._arrived:
                self._arrived.wait_for(lambda: self._pieces)
                data = self._take()
            failed = False
            try:
                write_all(self._descriptor, data)
            except OSError as error:
                failed = self.error is None
                self.error = self.error or error
            with self._arrived:
                before, self.waiting = self.waiting, self.waiting - len(data)
                changed = failed or not self.waiting or self.waiting < FULL // 2 <= before
            if changed:
                self._call_changed()

    def _take(self) -> bytes:
        pieces = [self._pieces.popleft()]
        size = len(pieces[0])
        while self._pieces and size + len(self._pieces[0]) <= _PIECE:
            size += len(self._pieces[0])
            pieces.append(self._pieces.popleft())
        return b"".join(pieces)


class Sinks:
    """The sinks for stdout and stderr (one object if both are the same file, so that lines stay in order)."""

    def __init__(self, descriptors: tuple[int, int] = (1, 2)) -> None:
        closed = _occupy_closed()
        self.descriptors = tuple(-1 if descriptor in closed else descriptor for descriptor in descriptors)
        self._told: set[Sink] = set()
        self.wake, self._wake = os.pipe()  # readable when a sink has changed
        os.set_blocking(self.wake, False)
        os.set_blocking(self._wake, False)
        self._open = True
        self._lock = threading.Lock()  # no thread writes into a descriptor that has been closed
        out, err = self.descriptors
        self.out = Sink(out, "stdout", self._changed)
        same = not closed.intersection(descriptors) and _file(out) == _file(err)
        self.err = self.out if same else Sink(err, "stderr", self._changed)

    def _changed(self) -> None:
        with self._lock, suppress(BlockingIOError):
            if self._open:
                os.write(self._wake, b"\0")

    def clear(self) -> bool:
        """Read what the threads have written into `wake`; return True."""
        with suppress(BlockingIOError):
            os.read(self.wake, 1 << 12)
        return True

    @property
    def waiting(self) -> int:
        """Bytes that are not written yet."""
        return self.out.waiting + (self.err.waiting if self.err is not self.out else 0)

    @property
    def errors(self) -> list[OSError]:
        """The first error of each sink."""
        return [sink.error for sink in {self.out, self.err} if sink.error is not None]

    def failures(self) -> list[tuple[Sink, OSError]]:
        """Return the sinks that have failed since the last call, with their errors."""
        both = dict.fromkeys((self.out, self.err))
        new = [(sink, sink.error) for sink in both if sink.error is not None and sink not in self._told]
        self._told.update(sink for sink, _ in new)
        return new

    def tell(self, text: str) -> None:
        """Write a line to stderr, or to stdout if stderr has failed."""
        (self.err if self.err.error is None else self.out).put(text.encode(errors="backslashreplace"))

    def close(self) -> None:
        """Close the pipe `wake`. A thread that still waits for a reader stays until the end of the process."""
        with self._lock:
            if self._open:
                self._open = False
                os.close(self.wake)
                os.close(self._wake)


class Sources:
    """Descriptors that are read, each only while its sink has room; the pipe `wake` of the sinks is one of them."""

    def __init__(self, sinks: Sinks) -> None:
        self._selector = selectors.DefaultSelector()
        self._read: dict[int, tuple[Sink | None, Callable[[int], bool]]] = {}
        self._paused: set[Sink] = set()
        self.add(sinks.wake, None, lambda _: sinks.clear())

    @property
    def paused(self) -> bool:
        """Whether a sink was full at the last call of `poll`."""
        return bool(self._paused)

    def add(self, descriptor: int, sink: Sink | None, read: Callable[[int], bool]) -> None:
        """Call ``read`` with the descriptor when it is readable, until ``read`` returns False."""
        self._read[descriptor] = sink, read
        self._selector.register(descriptor, selectors.EVENT_READ)

    def poll(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds, and read once what is readable; return False if nothing was."""
        used = {sink for sink, _ in self._read.values() if sink is not None}
        for sink in used:
            if sink in self._paused and sink.waiting < FULL // 2:
                self._paused.discard(sink)
                self._each(sink, lambda descriptor: self._selector.register(descriptor, selectors.EVENT_READ))
            elif sink not in self._paused and sink.full:
                self._paused.add(sink)
                self._each(sink, self._selector.unregister)
        self._paused &= used
        events = self._selector.select(timeout)
        for key, _ in events:
            to, read = self._read[key.fd]
            if (to is None or not to.full) and not read(key.fd):
                self._selector.unregister(key.fd)
                del self._read[key.fd]
        return bool(events)

    def _each(self, sink: Sink, call: Callable[[int], object]) -> None:
        for descriptor, (other, _) in self._read.items():
            if other is sink:
                call(descriptor)

    def close(self) -> None:
        """End reading; the descriptors stay open."""
        self._selector.close()


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of ``data`` to ``descriptor``, also if another process has made the descriptor nonblocking."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()


def _occupy_closed() -> set[int]:
    """Return which of the descriptors 0 to 2 are closed, and open them on /dev/null: no pipe of the job may take their place."""
    closed = set()
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            closed.add(descriptor)
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor
    return closed


def _file(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
