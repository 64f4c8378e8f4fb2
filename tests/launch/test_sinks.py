"""`mpicoll run` where nobody reads its output, where its output cannot be written, and where much of it comes."""

from __future__ import annotations

import hashlib
import os
import shlex
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import marked
from launch.launching import LAUNCH_MARK, RUN, call, end, environment, write
from polling import until

ENDLESS = """
    import pathlib, signal, sys
    if "stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stream = sys.stderr if "err" in sys.argv else sys.stdout
    for number in range(1 << 30):
        stream.write("x" * 99 + chr(10))
        if number == 1000:
            pathlib.Path(sys.argv[1]).touch()
"""


@pytest.fixture
def mark() -> Iterator[str]:
    """A mark for a job's processes, which are ended after the test."""
    name = f"{uuid.uuid4()}"
    yield name
    end(name)


@pytest.mark.parametrize(
    ("how", "ranks"), [("SIGINT", "out"), ("SIGTERM", "err"), ("SIGTERM", "stubborn"), ("--timeout", "out")]
)
def test_ended_although_nobody_reads(how: str, ranks: str, mark: str, tmp_path: Path) -> None:
    """Signals (once, twice where ranks are stubborn) and --timeout end a job whose output nobody reads; nothing is left."""
    written = tmp_path / "written"
    limit = ["--timeout", "3"] if how == "--timeout" else []
    process = subprocess.Popen(
        [*RUN, "-n", "2", *limit, write(tmp_path, ENDLESS), str(written), ranks],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment({LAUNCH_MARK: mark}),
    )
    assert until(written.exists, 20)  # more than the pipe to nobody holds
    time.sleep(0.5)
    if how != "--timeout":
        process.send_signal(signal.Signals[how])
        if ranks == "stubborn":
            time.sleep(0.2)
            process.send_signal(signal.Signals[how])
    assert process.wait(20) == (124 if how == "--timeout" else 128 + signal.Signals[how])
    assert until(lambda: marked(mark, LAUNCH_MARK) == [], 5)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stderr.close()


@pytest.mark.parametrize("limit", [[], ["--timeout", "3"]])
def test_late_readers(limit: list[str], mark: str, tmp_path: Path) -> None:
    """Output of a job that has ended waits for a reader, and is complete; --timeout ends this wait too."""
    script = write(tmp_path, "import pathlib, sys\nprint('y' * 300_000)\npathlib.Path(sys.argv[1]).touch()\n")
    process = subprocess.Popen(
        [*RUN, "-n", "1", *limit, script, str(tmp_path / "written")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=environment({LAUNCH_MARK: mark}),
    )
    assert process.stdout is not None
    assert until((tmp_path / "written").exists, 20)
    if limit:
        assert process.wait(20) == 124
    else:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        assert process.stdout.read() == b"y" * 300_000 + b"\n"
        assert process.wait(20) == 0
    process.stdout.close()


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    """A full disk or a closed stdout: one line, the job goes on, and the exit code says that output is lost."""
    script = write(
        tmp_path,
        """
        import pathlib, sys, time
        for _ in range(20):
            print("lost")
            time.sleep(0.02)
        print("kept", file=sys.stderr)
        pathlib.Path(sys.argv[1]).touch()
        sys.exit(int(sys.argv[2]))
        """,
    )
    done = tmp_path / "done"
    for to, why in ((">/dev/full", "No space left on device"), (">&-", "Bad file descriptor")):
        for code in (0, 3):
            result = call(["/bin/sh", "-c", f"{shlex.join([*RUN, '-n', '1', script, str(done), str(code)])} {to}"])
            line = f"mpicoll run: cannot write to stdout: {why}; output is lost, the job goes on\n"
            failed = f"mpicoll run: rank 0 failed first: exit code {code}\n" if code else ""
            assert sorted([*result.err.splitlines(True)]) == sorted(["kept\n", line, failed][: 2 + bool(code)]), result
            assert result.code == (code or 74), result
            done.unlink()
    result = call(["/bin/sh", "-c", f"{shlex.join([*RUN, '-n', '1', script, str(done), '0'])} 2>/dev/full"])
    assert result.code == 74
    assert result.out.count("lost\n") == 20
    assert "cannot write to stderr: No space left on device; output is lost" in result.out
    both = call(["/bin/sh", "-c", f"{shlex.join([*RUN, '-n', '1', script, str(done), '0'])} >&- 2>&-"])
    assert (both.code, both.out, both.err) == (74, "", "")


def test_a_reader_that_has_ended(tmp_path: Path) -> None:
    """A reader that goes away (| head) ends the job with one line, and with the exit code of SIGPIPE."""
    script = write(tmp_path, "import time\nfor i in range(3000):\n    print(i)\n    time.sleep(0.01)\n")
    piped = f"{{ {shlex.join([*RUN, '-n', '2', script])}; echo $? >&2; }} | head -n 1"
    begun = time.monotonic()
    result = call(["/bin/sh", "-c", piped])
    assert result.out == "0\n"
    assert result.err == "mpicoll run: cannot write to stdout: Broken pipe; ending the job\n141\n"
    assert time.monotonic() - begun < 20


def test_a_long_line_and_much_output(tmp_path: Path) -> None:
    """64 MiB without a newline, and binary output of two ranks on stdout and stderr, arrive in time and intact."""
    script = write(
        tmp_path,
        """
        import os, sys
        rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))
        if "line" in sys.argv:
            sys.stdout.buffer.write(b"x" * (64 << 20))
        elif rank == "0":
            sys.stdout.buffer.write(bytes(range(256)) * (1 << 14))
        else:
            sys.stderr.buffer.write(bytes(reversed(range(256))) * (1 << 14))
        """,
    )
    done = subprocess.run([*RUN, "-n", "1", script, "line"], capture_output=True, env=environment(), timeout=60)
    assert (done.returncode, len(done.stdout)) == (0, 64 << 20), done.stderr
    assert hashlib.sha256(done.stdout).digest() == hashlib.sha256(b"x" * (64 << 20)).digest()
    done = subprocess.run([*RUN, "-n", "2", script], capture_output=True, env=environment(), timeout=60)
    assert done.returncode == 0
    assert done.stdout == bytes(range(256)) * (1 << 14)
    assert done.stderr == bytes(reversed(range(256))) * (1 << 14)


def test_order_of_stdout_and_stderr(tmp_path: Path) -> None:
    """Where both are one pipe (2>&1), lines that a rank writes one after the other stay in this order."""
    source = "import sys, time\nfor i in range(10):\n    print(i, file=(sys.stdout, sys.stderr)[i % 2])\n    time.sleep(0.2)\n"
    command = shlex.join([*RUN, "-n", "1", write(tmp_path, source)])
    result = call(["/bin/sh", "-c", f"{command} 2>&1"])
    assert result.out == "".join(f"{i}\n" for i in range(10)), os.linesep + result.out
