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
        sys.stderr.write("END")
        sys.stderr.flush()
        seen = b""
        while not seen.endswith(b"END"):  # what a terminal is given, it has a moment later
            seen += os.read(outer, 1 << 16)
        sys.stdout.write(seen.decode().removesuffix("END"))

    atexit.register(tell)
if r == 1:
    time.sleep(2)
dist.barrier()
dist.recv(np.empty(4), 1 - r)
"""
)


@pytest.mark.slow
def test_colours_on_a_terminal_alone() -> None:
    """What is printed of a late rank and of a deadlock is in colour on a terminal, and otherwise the same as in a log."""
    told = {}
    for where in ("terminal", "log"):
        job = run_job(
            ON_A_TERMINAL,
            2,
            limit=20,
            args=[where],
            env={"MPICOLL_STALL_WARN": "1", "TERM": "xterm-256color", "NO_COLOR": None},
        )
        assert not job.timed_out, job
        assert job.returncode == 1, job
        text = job.out[0].replace("\r\n", "\n") if where == "terminal" else job.err[0]
        lines = [line for line in text.splitlines() if not line.startswith("Abort(")]  # MPICH's own last words
        assert all(line.startswith("[rank 0] ") for line in lines if "deadlock:" in line or "cycle:" in line), job
        coloured = [re.sub(r"^\[rank 0\] ", "", line) for line in lines if "\x1b[" in line]
        if where == "terminal":
            assert coloured[0].startswith("mpicoll: \x1b[1;31mrank 0 has waited"), job
            assert sum(line.startswith("\x1b[36m  rank") for line in coloured) >= 4, job
            assert any("\x1b[1;31mdeadlock: ranks 0-1 wait for each other" in line for line in coloured), job
        else:
            assert not coloured, job
            assert "\x1b[" not in job.err[1], job
        uncoloured = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(lines))
        told[where] = re.sub(r"/\S*/|[0-9.]+ (to [0-9.]+ )?s\b", "", uncoloured)
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
    if r < 4:
        dist.all_reduce(np.ones(2))
    else:
        dist.all_reduce(np.ones(2))
except dist.DistError as error:
    print(type(error).__name__, error, flush=True)
    assert error.ranks == [1], error.ranks
    assert [call["ranks"] for call in error.calls] == [[1], [0, 2, 3], [4]], error.calls
    places = {(call["text"], call["site"].rpartition("/")[2]) for call in error.calls[1:]}
    assert places == {("all_reduce #2 float64[2] SUM", f"job.py:{line}") for line in (14, 16)}, error.calls
    raise
"""
)


@pytest.mark.parametrize("leave", ["raise ValueError(f'bad{chr(10)}sample 17')", "sys.exit(0)"])
def test_who_waits_for_a_rank_that_has_left(leave: str) -> None:
    """Ranks of a node that wait for one that failed or ended tell the same, in a report: all who wait, and how it left."""
    job = run_job(WAITING.replace("LEAVE", leave), 5, limit=20)
    assert not job.timed_out, job
    assert job.returncode == 1, job
    for rank in (0, 2, 3, 4):
        here, there = (14, 16) if rank < 4 else (16, 14)
        lines = job.out[rank].splitlines()
        if "raise" in leave:
            assert lines[0] == "PeerFailedError rank 1 failed: ValueError: bad sample 17 (at job.py:11),", job
            call = f"    while rank {rank} waited in all_reduce #2 float64[2] SUM on group WORLD at job.py:{here}"
            assert lines[1] == call, job
            assert "rank 1: failed: ValueError: bad sample 17 (at job.py:11)" in map(str.strip, lines), job
            headline = f"[rank {rank}] PeerFailedError: {lines[0].partition(' ')[2]} {call.strip()}"
            assert headline in job.err[rank].splitlines(), job
        else:
            assert lines[0] == f"PeerExitedError all_reduce #2 float64[2] SUM on group WORLD at job.py:{here}:", job
            by = ", by sys.exit(0) at job.py:11"
            assert f"rank 1 ended the program after 1 call on this group{by}" in lines[1], job
        same, others = ("ranks 0, 2-3: wait", "rank 4: waits") if rank < 4 else ("rank 4: waits", "ranks 0, 2-3: wait")
        waited = r"waited [0-9.]+ .*s"
        elsewhere = rf"in all_reduce #2 float64\[2\] SUM at job.py:{there}"
        assert any(re.match(rf" *{same} in this call, {waited} <- this rank$", line) for line in lines), job
        assert any(re.match(rf" *{others} {elsewhere}, {waited}$", line) for line in lines), job


CHECK = (
    HEAD
    + """
from datetime import timedelta

KEYS = {
    "ranks": list, "op": str, "arguments": dict, "seq": int, "site": str, "called_from": str, "group": str, "async": bool,
    "state": str, "problem": str, "needs": str, "handling": str,
    "waited": (tuple, type(None)), "text": str,
}

def expect(kind, call, *states, op, ranks, place=True):
    try:
        call()
    except dist.DistError as error:
        assert type(error) is kind, error
        assert list(error.ranks) == ranks, error.ranks
        assert error.group, error
        assert sorted(each["state"] for each in error.calls) == sorted(states), error.calls
        assert op in [each["op"] for each in error.calls], error.calls
        for each in error.calls:
            assert list(each) == list(KEYS), each
            assert all(isinstance(each[key], type_) for key, type_ in KEYS.items()), each
            assert all(isinstance(x, str) for part in each["arguments"].items() for x in part), each
            assert each["ranks"] and all(type(rank) is int for rank in each["ranks"]), each
            assert each["site"].rpartition(":")[0].endswith("job.py") or each["state"] in ("silent", "exited"), each
            assert bool(each["text"]) == bool(each["op"]), each
        print(kind.__name__, [each["text"] or each["problem"] for each in error.calls], flush=True)
    else:
        raise AssertionError(f"no {kind.__name__}")

x = np.ones(4)
seconds = lambda n: timedelta(seconds=n)
"""
)

IN_ONE_JOB = """
expect(
    dist.CollectiveMismatchError, lambda: dist.all_reduce(x.astype("f") if r == 1 else x), "called", "called",
    op="all_reduce", ranks=[1],
)
if r == 0:
    dist.send(x, 1, tag=7)
elif r == 1:
    wrong = lambda: dist.recv(np.ones(4, "f"), 0, tag=7)
    expect(dist.CollectiveMismatchError, wrong, "called", "called", op="send", ranks=[0, 1])
    dist.recv(x, 0, tag=7)
work = dist.all_reduce(x, async_op=True)
expect(dist.BufferInUseError, lambda: dist.all_reduce(x), "called", "called", op="all_reduce", ranks=[r])
work.wait()
if r == 0:
    work = dist.isend(x, 1)
    x += 1
    expect(dist.BufferInUseError, work.wait, "called", op="isend", ranks=[0])
elif r == 1:
    dist.recv(x, 0)
group = dist.new_group()
expect(
    dist.DeadlockError, lambda: dist.recv(x, (r + 1) % n, group=group), "waits", "waits", "waits", op="recv",
    ranks=[0, 1, 2],
)
group = dist.new_group()
if r == 2:
    time.sleep(1.5)
else:
    late = lambda: dist.barrier(group, timeout=seconds(0.5))
    expect(dist.CollectiveTimeoutError, late, "silent", "waits", op="new_group", ranks=[2])
if r == 1:
    try:
        dist.new_group([0, 1, 2], timeout="soon", use_local_synchronization=True)
    except TypeError:
        pass
else:
    wrong = lambda: dist.new_group([0, 1, 2], use_local_synchronization=True)
    expect(dist.CollectiveMismatchError, wrong, "called", "called", op="new_group", ranks=[1])
dist.group.WORLD.set_timeout(seconds(1))
if r == 2:
    time.sleep(2)
else:
    late = lambda: dist.new_group([0, 1, 2], use_local_synchronization=True)
    expect(dist.CollectiveTimeoutError, late, "silent", "waits", op="new_group", ranks=[2])
print("done", flush=True)
"""

FROM_ONE_THAT_LEAVES = """
dist.barrier()
if r == 2:
    sys.exit(CODE)
kind, state = (dist.PeerFailedError, "failed") if CODE else (dist.PeerExitedError, "exited")
if r == 0:
    new = lambda: dist.new_group([0, 2], use_local_synchronization=True)
    expect(kind, new, state, "waits", op="" if CODE else "barrier", ranks=[2])
expect(kind, dist.barrier, state, "waits", op="" if CODE else "barrier", ranks=[2])
dist.destroy_process_group()
expect(kind, dist.init_process_group, state, "waits", op="init_process_group", ranks=[2])
print("done", flush=True)
"""

ONE_NEVER_COMES = """
dist.destroy_process_group()
if r == 2:
    time.sleep(2)
else:
    late = lambda: dist.init_process_group(timeout=seconds(0.7))
    expect(dist.CollectiveTimeoutError, late, "waits", op="init_process_group", ranks=[0, 1, 2])
    time.sleep(3)  # rank 0 may not end while rank 1 still waits
print("done", flush=True)
"""


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(IN_ONE_JOB, marks=pytest.mark.slow),
        FROM_ONE_THAT_LEAVES.replace("CODE", "0"),
        FROM_ONE_THAT_LEAVES.replace("CODE", "3"),
        pytest.param(ONE_NEVER_COMES, marks=pytest.mark.slow),
    ],
    ids=["calls", "ended", "failed", "init"],
)
def test_every_error_says_the_calls_as_data(source: str) -> None:
    """Each class of error that carries calls has all of the documented keys, with the types that are documented."""
    job = run_job(CHECK + source, 3, limit=30, env={"MPICOLL_TIMEOUT": "20"})
    assert not job.timed_out, job
    ranks = (0, 1) if "sys.exit" in source else (0, 1, 2)
    assert all("done" in job.out[rank] for rank in ranks), job


OF_A_PACKAGE = (
    HEAD
    + """
from pathlib import Path
package = Path(__file__).parent / "site-packages"
if r == 0:
    package.mkdir()
    code = "import mpicoll as dist\\ndef step(x, op=dist.ReduceOp.SUM):\\n    dist.all_reduce(x, op)\\n"
    (package / "trainer.py").write_text(code)
dist.barrier()
sys.path.insert(0, str(package))
import trainer
x = np.ones(4)
trainer.step(x)
if r == 0:
    trainer.step(x)  # THE CALL
else:
    OTHER  # THE OTHER
"""
)


@pytest.mark.parametrize(
    ("other", "error", "told"),
    [
        (
            "trainer.step(x, dist.ReduceOp.MAX)",
            "CollectiveMismatchError",
            "rank 1: all_reduce #3 float64[4] >MAX< at trainer.py:3, called from OTHER",
        ),
        pytest.param(
            "dist.recv(x, 0)",
            "DeadlockError",
            "rank 1: recv float64[4] from rank 0 tag 0 at OTHER, needs rank 0 to send",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "pass",
            "PeerExitedError",
            "rank 1: ended the program after 2 calls on this group",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_calls_of_an_installed_package(other: str, error: str, told: str) -> None:
    """Reports name the line of the package and, on every rank, the line of the program that called the package."""
    program = OF_A_PACKAGE.replace("OTHER", other, 1)
    lines = {
        mark: f"job.py:{next(at for at, line in enumerate(program.splitlines(), 1) if f'# THE {mark}' in line)}"
        for mark in ("CALL", "OTHER")
    }
    job = run_job(program, 2, limit=30)
    assert not job.timed_out, job
    assert job.returncode == 1, job
    report = " ".join(job.err[0].replace("[rank 0]", "").split())
    assert f"{error}: " in report, job
    assert f"at trainer.py:3, called from {lines['CALL']}" in report, job
    assert told.replace("OTHER", lines["OTHER"]) in report, job


@pytest.mark.parametrize("engine", ["auto", pytest.param("mpi", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "other", ["dist.all_reduce(x)", pytest.param("dist.all_gather_object([None, None], 1)", marks=pytest.mark.slow)]
)
def test_two_threads_in_calls_of_one_group(other: str, engine: str) -> None:
    """A rank warns, at the line of the call, that two of its threads make collectives of one group; not if one sends messages."""
    program = (
        HEAD
        + f"""
import threading
x, y = np.ones(2), np.ones(2)
dist.all_reduce(x)
def other():
    dist.recv(y, 1) if r == 0 else dist.send(y, 0)  # MESSAGE
    time.sleep(0.5 if r == 0 else 2)  # rank 0 waits in its barrier meanwhile
    {other}  # OTHER
work = dist.all_reduce(y, async_op=True)
waiter = threading.Thread(target=work.wait)
waiter.start()
time.sleep(0.2 * r)
dist.all_gather_object([None, None], 1)  # beside a thread that only waits for an earlier call
waiter.join()
thread = threading.Thread(target=other, name="loader")
if r == 0:
    thread.start()
else:
    other()
if r == 0:
    dist.barrier()
    thread.join()
else:
    dist.barrier()
"""
    )
    line = next(at for at, line in enumerate(program.splitlines(), 1) if "# OTHER" in line)
    job = run_job(program, 2, limit=30, env={"MPICOLL_ENGINE": engine})
    assert not job.timed_out, job
    warned = [text for text in job.err[0].splitlines() if "RuntimeWarning" in text]
    assert len(warned) == 1, job
    assert (
        f"job.py:{line}: RuntimeWarning: threads MainThread and loader make collective calls of group WORLD"
        in warned[0]
    ), job
    assert "RuntimeWarning" not in job.err[1], job


DESTROYED = (
    HEAD
    + """
from datetime import timedelta
x, large = np.ones(4), np.ones(100_000)
for start, call in enumerate([
    lambda g: dist.isend(large, 1, group=g).wait(), lambda g: dist.send(large, 1, group=g), lambda g: dist.recv(x, 1, group=g),
    lambda g: dist.irecv(x, group=g).wait(), lambda g: dist.all_reduce(x, group=g),
]):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=20))
    if r == 0:
        for _ in range(3):
            dist.recv(x, 1, group=group)
        t = time.monotonic()
        try:
            call(group)
        except dist.PeerExitedError as error:
            print(f"{time.monotonic() - t:.2f}", error.ranks, " ".join(str(error).split()), flush=True)
    else:
        for _ in range(3):
            dist.send(x, 0, group=group)
        dist.destroy_process_group(group)
        time.sleep(1)
        dist.get_rank()
    dist.barrier()
"""
)


def test_calls_on_a_group_that_another_rank_has_destroyed() -> None:
    """Messages and collectives end at once, and name the line; messages that were sent before arrive."""
    line = next(at for at, line in enumerate(DESTROYED.splitlines(), 1) if "destroy_process_group" in line)
    job = run_job(DESTROYED, 2, limit=40)
    assert not job.timed_out, job
    told = job.out[0].splitlines()
    assert len(told) == 5, job
    for text, call in zip(told, ("isend", "send", "recv", "irecv", "all_reduce"), strict=True):
        assert f" [1] {call}" in text, job
        assert "rank 1 destroyed the group at" in text, job
        assert f"job.py:{line}" in text, job
        assert float(text.split()[0]) < 10, job


THROUGH_A_WRAPPER = (
    HEAD
    + """
def total(x):
    EXCHANGE
    return x
def energy():
    return total(np.ones(3))  # ENERGY
def momentum():
    return total(np.ones(4))  # MOMENTUM
(momentum if r == 1 else energy)()
"""
)


@pytest.mark.parametrize(
    ("exchange", "error", "row"),
    [
        ("dist.all_reduce(x)", "CollectiveMismatchError", "rank {}: all_reduce #1 float64[{}] SUM"),
        ("dist.recv(x, 1 - r)", "DeadlockError", "rank {}: recv float64[{}] from rank 1 tag 0"),
    ],
)
def test_different_calls_through_one_wrapper(exchange: str, error: str, row: str) -> None:
    """The rows of calls at one line of the program name the functions that have called the wrapper."""
    program = THROUGH_A_WRAPPER.replace("EXCHANGE", f"{exchange}  # EXCHANGE")
    lines = {
        mark: next(at for at, line in enumerate(program.splitlines(), 1) if f"# {mark}" in line)
        for mark in ("EXCHANGE", "ENERGY", "MOMENTUM")
    }
    job = run_job(program, 2, limit=30)
    assert not job.timed_out, job
    assert job.returncode == 1, job
    report = " ".join(job.err[0].replace("[rank 0]", "").replace(">", "").replace("<", "").split())
    assert f"{error}: " in report, job
    assert f"{row.format(0, 3)} at job.py:{lines['EXCHANGE']}, called from job.py:{lines['ENERGY']}" in report, job
    other = row.format(1, 4).replace("from rank 1", "from rank 0")
    assert f"{other} at job.py:{lines['EXCHANGE']}, called from job.py:{lines['MOMENTUM']}" in report, job


@pytest.mark.parametrize(
    ("others", "error"),
    [("dist.all_reduce(np.ones(3))", "CollectiveMismatchError"), ("dist.recv(np.ones(1), 1)", "DeadlockError")],
)
def test_a_call_in_a_finally_block_names_the_exception(others: str, error: str) -> None:
    """The report of a call that a rank makes with an exception on its way has this exception, and the place that raised it."""
    job = run_job(
        HEAD
        + f"""
try:
    if r == 1:
        raise ValueError("no data")
    {others}
finally:
    dist.barrier()
""",
        2,
        limit=20,
    )
    assert not job.timed_out, job
    assert job.returncode != 0, job
    text = " ".join((job.err[0] + job.err[1]).replace("[rank 0]", "").replace("[rank 1]", "").split())
    assert f"{error}: " in text, job
    assert "at job.py:13, while handling ValueError: no data (at job.py:10)" in text, job
    assert "next: correct the error that rank 1 was handling; or, if that is intended, " in text, job
