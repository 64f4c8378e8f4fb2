"""The ranks' output as whole lines: pipes or terminals in the run directory, copied to this process's stdout and stderr."""

from __future__ import annotations

import fcntl
import os
import re
import selectors
import stat
import termios
import time
import tty
from pathlib import Path

from mpicoll.launch.job_folder import read_records

IDLE = 0.05  # seconds after which an unfinished line (a prompt, a progress bar) is written
_RECENT = 1 << 18  # bytes at the end of the output, in which a termination report is searched
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r(?=[^\n]))")


class Lines:
    """A stream of bytes cut into lines, each with the tag before it and its line end."""

    def __init__(self, tag: bytes = b"") -> None:
        self.tag = tag
        self.rest = b""

    def feed(self, data: bytes) -> bytes:
        """Return the lines that ``data`` completes; a carriage return ends a line too (progress bars)."""
        self.rest += data
        lines = _LINE.findall(self.rest)
        self.rest = self.rest[sum(map(len, lines)) :]
        return b"".join(self.tag + line for line in lines)

    def flush(self, *, end: bool = False) -> bytes:
        """Return the unfinished line. A tagged line is returned only at the end of the stream, with a line end added."""
        if not self.rest or (self.tag and not end and not self.rest.endswith(b"\r")):
            return b""
        rest, self.rest = self.rest, b""
        newline = b"\n" if self.tag and not rest.endswith((b"\n", b"\r")) else b""
        return self.tag + rest + newline


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of ``data`` to ``descriptor``."""
    while data:
        data = data[os.write(descriptor, data) :]


def terminal_like(sink: int) -> tuple[int, int]:
    """Return both ends of a new terminal as wide as ``sink`` that changes no bytes."""
    outer, inner = os.openpty()
    os.set_blocking(outer, False)
    tty.setraw(inner)
    fcntl.ioctl(inner, termios.TIOCSWINSZ, fcntl.ioctl(sink, termios.TIOCGWINSZ, b"\0" * 8))
    return outer, inner


class Streams:
    """The output of all ranks: for each stdout and stderr a named pipe, or a terminal if this process's stream is one.

    On a terminal Python writes line by line and progress bars move. Tagged lines go through pipes: a moving bar between lines
    of other ranks is unreadable.
    """

    def __init__(self, directory: Path, nprocs: int, *, tag: bool, sinks: tuple[int, int] = (1, 2)) -> None:
        self._lines: dict[int, tuple[Lines, int]] = {}
        self._fed: dict[int, float] = {}
        self._inner_ends: list[int] = []
        for rank in range(nprocs):
            for name, sink in zip(("out", "err"), sinks, strict=True):
                path = directory / f"{name}.{rank}"
                if os.isatty(sink) and not tag:
                    descriptor, inner = terminal_like(sink)
                    self._inner_ends.append(inner)  # as long as this end is open, reading the other end never fails
                    path.symlink_to(os.ttyname(inner))
                else:
                    os.mkfifo(path, 0o600)
                    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                self._lines[descriptor] = (Lines(b"[%d] " % rank if tag else b""), sink)

    def register(self, selector: selectors.BaseSelector) -> None:
        """Register every pipe with ``selector``, with this object as data."""
        for descriptor in self._lines:
            selector.register(descriptor, selectors.EVENT_READ, self)

    def read(self, descriptor: int) -> bool:
        """Copy the available output; return False if the pipe has ended."""
        lines, sink = self._lines[descriptor]
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return True
        if not data:
            self._end(descriptor)
            return False
        write_all(sink, lines.feed(data))
        if lines.rest:
            self._fed[descriptor] = time.monotonic()
        else:
            self._fed.pop(descriptor, None)
        return True

    def show_unfinished(self) -> None:
        """Write lines that have been unfinished for ``IDLE`` seconds."""
        limit = time.monotonic() - IDLE
        for descriptor in [descriptor for descriptor, when in self._fed.items() if when < limit]:
            lines, sink = self._lines[descriptor]
            write_all(sink, lines.flush())
            del self._fed[descriptor]

    def close(self) -> None:
        """Copy the rest of the output and close the pipes."""
        for descriptor in list(self._lines):
            try:
                while True:
                    data = os.read(descriptor, 1 << 16)
                    if not data:
                        break
                    lines, sink = self._lines[descriptor]
                    write_all(sink, lines.feed(data))
            except OSError:
                pass  # the pipe is empty, or the reader of this process's output has ended
            self._end(descriptor)
        for inner in self._inner_ends:
            os.close(inner)

    def _end(self, descriptor: int) -> None:
        lines, sink = self._lines.pop(descriptor)
        self._fed.pop(descriptor, None)
        os.close(descriptor)
        try:
            write_all(sink, lines.flush(end=True))
        except OSError:
            pass


class LauncherOutput:
    """The launcher's own output. Output after the failure of a rank is delayed, as `mpicoll run` reports the failure itself."""

    def __init__(self, directory: Path, *, silent: bool) -> None:
        self._directory = directory
        self._silent = silent
        self._delayed: list[tuple[int, bytes]] = []
        self.seen = bytearray()
        self.recent = bytearray()

    def feed(self, sink: int, data: bytes) -> None:
        """Write data to a descriptor, or delay it."""
        if len(self.seen) < 1 << 16:
            self.seen += data
        self.recent += data
        if len(self.recent) > 2 * _RECENT:
            del self.recent[:-_RECENT]
        if self._silent and any(row.kind in ("exit", "stop") and row.value for row in read_records(self._directory)):
            self._delayed.append((sink, data))
        else:
            write_all(sink, data)

    def show(self) -> None:
        """Write the delayed output."""
        for sink, data in self._delayed:
            try:
                write_all(sink, data)
            except OSError:
                pass


def is_stdin_usable() -> bool:
    """Return whether rank 0 may read this standard input; false if another program has the terminal."""
    try:
        mode = os.fstat(0).st_mode
        if os.isatty(0):
            return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISCHR(mode)
