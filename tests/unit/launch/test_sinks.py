"""The ranks' output between pipes and sinks: linear, bounded, and never waiting for readers. No MPI."""

from __future__ import annotations

import errno
import os
import random
import select
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from polling import until

from mpicoll.launch import streams
from mpicoll.launch.sinks import FULL, Sinks, Sources, write_all
from mpicoll.launch.streams import LONGEST, Lines


@pytest.mark.parametrize("tag", [b"", b"[0] "])
def test_a_long_line_comes_in_pieces(tag: bytes) -> None:
    """A line of 64 MiB is passed on as it comes; never more than LONGEST bytes are kept."""
    lines, data, count = Lines(tag), b"x" * (1 << 16), 0
    for _ in range(1024):
        out = lines.feed(data)
        count += out.count(b"x")
        assert len(lines.rest) <= LONGEST
        assert not out or (out.startswith(tag) and out.endswith(b"\n") == bool(tag))
    count += lines.flush(end=True).count(b"x")
    assert count == 64 << 20


def test_tags_stand_before_the_lines_that_bytes_has() -> None:
    """Whatever carriage returns, line feeds and text like tags follow each other."""
    numbers = random.Random(2)
    for _ in range(2000):
        data = bytes(numbers.choice(b"\n\r[0] x") for _ in range(numbers.randint(1, 12)))
        found = [b"[0] " + line for line in data.splitlines(keepends=True)]
        end = b"" if data.endswith((b"\r", b"\n")) else b"\n"
        lines = Lines(b"[0] ")
        assert lines.feed(data) + lines.flush(end=True) == b"".join(found) + end, data


def test_short_lines_with_tags_pass_in_linear_time() -> None:
    """A block of 32 MiB of short lines takes about 0.2 s of the processor; five times what 100 MB/s need is an error.

    A million pieces of one byte take about a second.
    """
    lines, block, before = Lines(b"[0] "), b"1234567\n" * (4 << 20), time.process_time()
    assert len(lines.feed(block)) == len(block) // 8 * 12
    assert time.process_time() - before < 5 * len(block) / 100e6
    for _ in range(1 << 20):
        lines.feed(b"x")
    assert time.process_time() - before < 20


def test_binary_output_is_intact() -> None:
    """Without tags bytes are passed on as they are, wherever they are cut."""
    numbers = random.Random(1)
    data = (
        numbers.randbytes(200_000) + b"\r" * 5 + b"\r\n" * 5 + b"\n\r" * 5 + b"a" * (LONGEST + 5) + numbers.randbytes(9)
    )
    for most in (1, 3, 1 << 16):
        lines, out, at = Lines(), [], 0
        part = data[-20_000:] if most < 100 else data
        while at < len(part):
            size = numbers.randint(1, most)
            out.append(lines.feed(part[at : at + size]))
            at += size
        assert b"".join(out) + lines.flush(end=True) == part


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe that is closed at the end."""
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            pass


def test_nobody_reads(pipe: tuple[int, int]) -> None:
    """Output that nobody reads waits in a thread of the sink; its sources are not read meanwhile, and nothing is lost."""
    sinks = Sinks((pipe[1], 2))
    sources = Sources(sinks)
    source, feeder = os.pipe()
    text = b"".join(b"%07d\n" % number for number in range(FULL // 2))  # 4 MiB
    thread = threading.Thread(target=write_all, args=(feeder, text), daemon=True)
    thread.start()

    def read(descriptor: int) -> bool:
        sinks.out.put(os.read(descriptor, 1 << 16))
        return True

    sources.add(source, sinks.out, read)
    while not sources.paused:
        sources.poll(0.01)
    assert FULL <= sinks.waiting < FULL + (1 << 16)
    assert not sources.poll(0)
    got = bytearray()
    while len(got) < len(text):
        if select.select([pipe[0]], [], [], 0)[0]:
            got += os.read(pipe[0], 1 << 16)
        # At the last poll the source may have been empty, so this loop must not wait for the sink alone.
        sources.poll(0.001)
    assert got == text
    assert until(lambda: not sinks.waiting)
    thread.join()
    sources.close()
    sinks.close()
    os.close(source)
    os.close(feeder)


def test_sinks_that_fail(pipe: tuple[int, int]) -> None:
    """A full disk, a reader that has ended, a closed descriptor: each is told once, and what comes later does not wait."""
    full = os.open("/dev/full", os.O_WRONLY)
    os.close(pipe[0])
    for descriptor, number in ((full, errno.ENOSPC), (pipe[1], errno.EPIPE), (-1, errno.EBADF)):
        sinks = Sinks((2, 2))
        sinks.out._descriptor = descriptor
        for _ in range(3):
            sinks.out.put(b"lost\n")
            assert until(lambda sinks=sinks: not sinks.waiting)
        assert [(sink.name, error.errno) for sink, error in sinks.failures()] == [("stdout", number)]
        assert sinks.failures() == []
        assert [error.errno for error in sinks.errors] == [number]
        sinks.close()
    os.close(full)


def test_a_nonblocking_sink(pipe: tuple[int, int]) -> None:
    """A descriptor that another process has made nonblocking is waited for."""
    os.set_blocking(pipe[1], False)
    text = os.urandom(1 << 18)
    thread = threading.Thread(target=write_all, args=(pipe[1], text), daemon=True)
    thread.start()
    got = bytearray()
    while len(got) < len(text):
        got += os.read(pipe[0], 1 << 16)
    thread.join(10)
    assert got == text


def test_one_sink_for_one_file(pipe: tuple[int, int]) -> None:
    """Where stdout and stderr are the same file, one thread writes both, in order."""
    again = os.dup(pipe[1])
    sinks = Sinks((pipe[1], again))
    assert sinks.out is sinks.err
    for number in range(100):
        (sinks.out, sinks.err)[number % 2].put(b"%d " % number)
    assert until(lambda: not sinks.waiting)
    assert os.read(pipe[0], 1 << 16) == b"".join(b"%d " % number for number in range(100))
    sinks.close()
    os.close(again)


@pytest.mark.parametrize("nprocs", [1, 3])
def test_how_long_an_unfinished_line_waits(nprocs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of a rank that has not written its end is kept longer if other ranks write, too; both kinds are shown at last."""
    written: list[bytes] = []
    sink = SimpleNamespace(full=False, put=written.append)
    pipe = os.pipe()
    sinks: Any = SimpleNamespace(out=sink, err=sink, descriptors=pipe)
    now = [100.0]
    monkeypatch.setattr(streams.time, "monotonic", lambda: now[0])
    made = streams.Streams(tmp_path, nprocs, tag=False, sinks=sinks)
    descriptor, writer = next(iter(made._lines)), os.open(tmp_path / "out.0", os.O_WRONLY)

    def after(seconds: float, data: bytes) -> bytes:
        written.clear()
        os.write(writer, data)
        made.read(descriptor)
        now[0] += seconds
        made.show_unfinished()
        return b"".join(written)

    assert after(0.1, b"5") == (b"5" if nprocs == 1 else b"")
    assert after(0.1, b"\n") == (b"\n" if nprocs == 1 else b"5\n")
    assert after(0.3, b"name? ") == b"name? "
    os.close(writer)
    made.close()
    for end in pipe:
        os.close(end)
