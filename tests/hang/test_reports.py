"""Reports where they are read: on a terminal, in a log, and as data."""

from __future__ import annotations

import re

import pytest
from jobs import run_job

HEAD = """
import atexit, os, sys, time
import numpy as np
import mpicoll as dist
dist.init_process_group()
r, n = dist.get_rank(), dist.get_world_size()
"""

ON_A_TERMINAL = (
    HEAD
    + """
if r == 0 and sys.argv[1] == "terminal":
    outer, inner = os.openpty()
    os.dup2(inner, 2)

    def tell():
        sys.stderr.flush()
        os.set_blocking(outer, False)
        sys.stdout.write(os.read(outer, 1 << 16).decode())

    atexit.register(tell)
if r == 1:
    time.sleep(1)
dist.barrier()
dist.recv(np.empty(4), 1 - r)
"""
)


def test_colours_on_a_terminal_alone() -> None:
    """What is printed of a late rank and of a deadlock is in colour on a terminal, and otherwise the same as in a log."""
    told = {}
    for where in ("terminal", "log"):
        job = run_job(
            ON_A_TERMINAL,
            2,
            limit=20,
            args=[where],
            env={"MPICOLL_STALL_WARN": "0.3", "TERM": "xterm-256color", "NO_COLOR": None},
        )
        assert not job.timed_out, job
        assert job.returncode == 1, job
        text = job.out[0].replace("\r\n", "\n") if where == "terminal" else job.err[0]
        lines = text.splitlines()
        assert all(line.startswith("[rank 0] ") for line in lines if "deadlock:" in line or "cycle:" in line), job
        coloured = [re.sub(r"^\[rank 0\] ", "", line) for line in lines if "\x1b[" in line]
        if where == "terminal":
            assert coloured[0].startswith("mpicoll: \x1b[1;31mrank 0 has waited"), job
            assert sum(line.startswith("\x1b[36m  rank") for line in coloured) >= 4, job
            assert any("\x1b[1;31mdeadlock: ranks 0-1 wait for each other" in line for line in coloured), job
        else:
            assert not coloured, job
            assert "\x1b[" not in job.err[1], job
        told[where] = re.sub(r"/\S*/|[0-9.]+ (to [0-9.]+ )?s\b", "", re.sub(r"\x1b\[[0-9;]*m", "", text))
    assert told["terminal"] == told["log"]
    assert "Traceback" in told["log"]


WAITING = (
    HEAD
    + """
dist.barrier()
if r == 1:
    time.sleep(1)
    LEAVE
try:
    dist.all_reduce(np.ones(2))
except dist.DistError as error:
    print(type(error).__name__, error, flush=True)
    assert error.ranks == [1], error.ranks
    assert [call["ranks"] for call in error.calls] == [[1], [0, 2, 3]], error.calls
    raise
"""
)


@pytest.mark.parametrize("leave", ["raise ValueError(f'bad{chr(10)}sample 17')", "sys.exit(0)"])
def test_who_waits_for_a_rank_that_has_left(leave: str) -> None:
    """Ranks of a node that wait for one that failed or ended tell the same, in a report: all who wait, and how it left."""
    job = run_job(WAITING.replace("LEAVE", leave), 4, limit=20)
    assert not job.timed_out, job
    assert job.returncode == 1, job
    for rank in (0, 2, 3):
        lines = job.out[rank].splitlines()
        if "raise" in leave:
            assert lines[0] == "PeerFailedError rank 1 failed: ValueError: bad sample 17 (at job.py:11),", job
            call = f"    while rank {rank} waited in all_reduce #2 float64[2] SUM on group WORLD at job.py:13"
            assert lines[1] == call, job
            assert "rank 1: failed: ValueError: bad sample 17 (at job.py:11)" in map(str.strip, lines), job
            headline = f"[rank {rank}] PeerFailedError: {lines[0].partition(' ')[2]} {call.strip()}"
            assert headline in job.err[rank].splitlines(), job
        else:
            assert lines[0] == "PeerExitedError all_reduce #2 float64[2] SUM on group WORLD at job.py:13:", job
            assert "rank 1 ended the program after 1 call on this group" in lines[1], job
        assert any(re.match(r"  ranks 0, 2-3: wait in it, waited [0-9.]+ .*s <- this rank$", line) for line in lines), (
            job
        )
