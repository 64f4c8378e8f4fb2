"""The ranks' output as whole lines: pipes or terminals in the run directory, passed to the sinks of this process."""

from __future__ import annotations

import fcntl
import os
import stat
import termios
import time
import tty
from pathlib import Path

from mpicoll.launch.job_folder import read_records
from mpicoll.launch.sinks import Sink, Sinks, Sources

IDLE, IDLE_OF_SEVERAL = 0.05, 0.25
"""Seconds after which an unfinished line (a prompt, a progress bar) is written, of one rank and of several ranks. `print` makes
two writes: a rank that gets no processor between these would have lines of other ranks in its line."""
LONGEST = 1 << 20  # bytes of an unfinished line that are held; a longer line is written in pieces
_READ = 1 << 16  # bytes of one read
_MOST_READS = (
    16  # of one pipe at the end of the job: the capacity of a pipe, while a process outside the job goes on writing
)
_RECENT = 1 << 18  # bytes at the end of the output, in which a termination report is searched


class Lines:
    """A stream of bytes cut into lines, each with the tag before it and its line end."""

    def __init__(self, tag: bytes = b"") -> None:
        self.tag = tag
        self.rest = bytearray()

    def feed(self, data: bytes) -> bytes:
        """Return the lines that ``data`` completes; a carriage return ends a line too (progress bars).

        Each byte is searched once. A line above LONGEST is returned in pieces: as they are, or tagged as lines of their own.
        """
        begin = len(self.rest) - self.rest.endswith(b"\r")  # a carriage return at the end may be half of "\r\n"
        self.rest += data
        end = max(self.rest.rfind(b"\n", begin), self.rest.rfind(b"\r", begin, -1)) + 1
        whole = self._take(end)
        return whole + self._take(len(self.rest)) if len(self.rest) > LONGEST else whole

    def flush(self, *, end: bool = False) -> bytes:
        """Return the unfinished line. A tagged line is returned only at the end of the stream, with a line end added."""
        if not self.rest or (self.tag and not end and not self.rest.endswith(b"\r")):
            return b""
        return self._take(len(self.rest))

    def _take(self, end: int) -> bytes:
        taken = bytes(self.rest[:end])
        del self.rest[:end]
        if not self.tag or not taken:
            return taken
        if not taken.endswith((b"\n", b"\r")):
            taken += b"\n"
        tagged = taken  # searched and replaced as a whole: a loop over lines of 8 bytes takes five times as long
        if b"\r" in taken:
            tagged = tagged.replace(b"\r", b"\r" + self.tag).replace(b"\r" + self.tag + b"\n", b"\r\n")
        tagged = self.tag + tagged.replace(b"\n", b"\n" + self.tag)
        return tagged[: -len(self.tag)]


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

    def __init__(self, directory: Path, nprocs: int, *, tag: bool, sinks: Sinks) -> None:
        self._lines: dict[int, tuple[Lines, Sink]] = {}
        self._fed: dict[int, float] = {}
        self._inner_ends: list[int] = []
        self._idle = IDLE if nprocs == 1 else IDLE_OF_SEVERAL
        for rank in range(nprocs):
            for name, sink, descriptor in (
                ("out", sinks.out, sinks.descriptors[0]),
                ("err", sinks.err, sinks.descriptors[1]),
            ):
                path = directory / f"{name}.{rank}"
                if os.isatty(descriptor) and not tag:
                    outer, inner = terminal_like(descriptor)
                    self._inner_ends.append(inner)  # as long as this end is open, reading the other end never fails
                    path.symlink_to(os.ttyname(inner))
                else:
                    os.mkfifo(path, 0o600)
                    outer = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                self._lines[outer] = (Lines(b"[%d] " % rank if tag else b""), sink)

    def register(self, sources: Sources) -> None:
        """Add every pipe to ``sources``."""
        for descriptor, (_, sink) in self._lines.items():
            sources.add(descriptor, sink, self.read)

    def read(self, descriptor: int) -> bool:
        """Copy the available output; return False if the pipe has ended."""
        lines, sink = self._lines[descriptor]
        try:
            data = os.read(descriptor, _READ)
        except BlockingIOError:
            return True
        if not data:
            self._end(descriptor)
            return False
        sink.put(lines.feed(data))
        if lines.rest:
            self._fed[descriptor] = time.monotonic()
        else:
            self._fed.pop(descriptor, None)
        return True

    def show_unfinished(self) -> None:
        """Write lines that have been unfinished for a while, unless the pipe is not read for want of room."""
        limit = time.monotonic() - self._idle
        for descriptor in [descriptor for descriptor, when in self._fed.items() if when < limit]:
            lines, sink = self._lines[descriptor]
            if not sink.full:
                sink.put(lines.flush())
                del self._fed[descriptor]

    def close(self) -> None:
        """Copy the rest of the output and close the pipes."""
        for descriptor in list(self._lines):
            for _ in range(_MOST_READS):
                if not self._read_rest(descriptor):
                    break
            if descriptor in self._lines:
                self._end(descriptor)
        for inner in self._inner_ends:
            os.close(inner)

    def _read_rest(self, descriptor: int) -> bool:
        try:
            return self.read(descriptor)
        except OSError:  # a terminal
            return False

    def _end(self, descriptor: int) -> None:
        lines, sink = self._lines.pop(descriptor)
        self._fed.pop(descriptor, None)
        os.close(descriptor)
        sink.put(lines.flush(end=True))


class LauncherOutput:
    """The launcher's own output. Output after the failure of a rank is delayed, as `mpicoll run` reports the failure itself."""

    def __init__(self, directory: Path, *, silent: bool) -> None:
        self._directory = directory
        self._silent = silent
        self._delayed: list[tuple[Sink, bytes]] = []
        self._room = LONGEST
        self.seen = bytearray()
        self.recent = bytearray()

    def feed(self, sink: Sink, data: bytes) -> None:
        """Write data to a sink, or delay it; of delayed data only the first LONGEST bytes stay."""
        if len(self.seen) < 1 << 16:
            self.seen += data
        self.recent += data
        if len(self.recent) > 2 * _RECENT:
            del self.recent[:-_RECENT]
        if self._silent and any(row.kind in ("exit", "stop") and row.value for row in read_records(self._directory)):
            if self._room:
                self._delayed.append((sink, data[: self._room]))
                self._room -= len(self._delayed[-1][1])
        else:
            sink.put(data)

    def show(self) -> None:
        """Write the delayed output."""
        for sink, data in self._delayed:
            sink.put(data)


def is_stdin_usable() -> bool:
    """Return whether rank 0 may read this standard input; false if another program has the terminal."""
    try:
        mode = os.fstat(0).st_mode
        if os.isatty(0):
            return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISCHR(mode)
