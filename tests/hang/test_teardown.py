"""How ranks leave: exceptions, exit codes, early ends, forks, guests. Each job has a hard limit."""

from __future__ import annotations

import re
import signal
import sys

import pytest
from jobs import JobResult, RunningJob, family, run_job

HEAD = """
import atexit, os, sys, time
import numpy as np
import mpicoll as dist
dist.init_process_group()
r, n = dist.get_rank(), dist.get_world_size()
"""


def test_an_exception_ends_the_job_and_is_printed_once() -> None:
    """An uncaught exception on one rank is printed once, by that rank; the others name it; exit handlers still run."""
    job = run_job(
        HEAD
        + """
atexit.register(lambda: print("handler", r, flush=True))
dist.barrier()
if r == 1: time.sleep(0.5)  # the others are through the barrier, too
if r == 1: raise RuntimeError("boom")
dist.barrier()
""",
        3,
        limit=20,
    )
    assert not job.timed_out, job
    assert job.returncode == 1, job
    assert job.seconds < 8, job
    assert job.stderr.count("Traceback") == 1, job
    assert "[rank 1] RuntimeError: boom" in job.err[1], job
    for rank in (0, 2):
        assert "PeerFailedError: rank 1 failed: RuntimeError: boom" in job.err[rank], job
        assert f"(at job.py:11), while rank {rank} waited in barrier #2 on group WORLD at job.py:12" in job.err[rank], (
            job
        )
    assert all(f"handler {rank}" in job.out[rank] for rank in range(3)), job
    assert not job.left_running, job


def test_a_wrong_argument_is_shown_without_the_library() -> None:
    """The traceback of a wrong argument ends at the program's line: a few lines a rank."""
    job = run_job(HEAD + "dist.all_reduce([1.0])\n", 2, limit=20)
    assert job.returncode == 1, job
    for err in job.err:
        shown = [line for line in err.splitlines() if line.startswith("[rank")]
        assert len(shown) <= 5, job
        assert "job.py:7" in err or "line 7" in err, job
        assert "TypeError: Invalid function argument. Expected parameter `tensor`" in err, job


@pytest.mark.parametrize(
    "gone",
    [
        "sys.stderr = None",
        "sys.stderr.close()",
        pytest.param("sys.stderr = open('/dev/full', 'w', buffering=1)", marks=pytest.mark.slow),
    ],
    ids=["none", "closed", "full"],
)
def test_a_failure_that_cannot_be_printed_as_usual(gone: str) -> None:
    """The job ends at once all the same, and what the program began with takes the traceback."""
    job = run_job(
        HEAD
        + f"""
if r == 1:
    {gone}
    raise ValueError("silent")
dist.barrier()
""",
        3,
        limit=40,
        env={"MPICOLL_EXIT_GRACE": "30"},
    )
    assert not job.timed_out, job
    assert job.returncode == 1, job
    assert job.seconds < 20, job
    assert "[rank 1] ValueError: silent" in job.err[1], job
    for rank in (0, 2):
        assert "PeerFailedError: rank 1 failed: ValueError: silent" in job.err[rank], job


def test_an_error_between_ranks_in_an_exit_handler() -> None:
    """Python passes over what an exit handler raises; what ranks have to do with each other ends the job with a code."""
    job = run_job(HEAD + "atexit.register(lambda: dist.all_reduce(np.ones(2 + (r == 1))))\n", 3, limit=20)
    assert not job.timed_out, job
    assert job.returncode == 1, job
    assert "[rank 0] mpicoll.errors.CollectiveMismatchError" in job.err[0], job
    assert "rank 1: all_reduce #1 float64[>3<] SUM at job.py:7" in job.err[0], job
    assert "agreement.py" not in job.stderr, job
    assert all("CollectiveMismatchError" in err for err in job.err), job


def test_an_error_of_the_program_in_an_exit_handler() -> None:
    """Whoever waits for what the handler would have called is told of it; else the job ends well, as Python has it."""
    handler = """
def flush():
    if r == 1: raise OSError("quota")
    {call}
atexit.register(flush)
"""
    job = run_job(HEAD + handler.format(call="dist.barrier()"), 3, limit=20)
    assert not job.timed_out, job
    assert job.returncode == 1, job
    assert "OSError: quota" in job.err[1], job
    for rank in (0, 2):
        told = " ".join(job.err[rank].replace(f"[rank {rank}]", "").split())
        assert "rank 1 ended the program (OSError: quota at job.py:9, in an exit handler) after 0 calls" in told, job
    job = run_job(HEAD + handler.format(call="pass"), 2, limit=20)
    assert job.returncode == 0, job
    assert "OSError: quota" in job.err[1], job


def test_destroy_on_the_way_of_an_exception() -> None:
    """The usual ``finally: destroy_process_group()`` does not hide which rank failed, and with what."""
    job = run_job(
        HEAD
        + """
try:
    if r == 1:
        1 / 0
    dist.barrier()
finally:
    dist.destroy_process_group()
""",
        3,
        limit=20,
    )
    assert not job.timed_out, job
    assert job.returncode == 1, job
    assert "[rank 1] ZeroDivisionError" in job.err[1], job
    for rank in (0, 2):
        assert "PeerFailedError: rank 1 failed: ZeroDivisionError" in job.err[rank], job


def test_sys_exit_gives_its_code() -> None:
    """sys.exit(3) on one rank ends the job with 3, whoever waits for it, and they say in which line it was."""
    job = run_job(HEAD + "if r == 1: sys.exit(3)\ndist.barrier()\n", 3, limit=20)
    assert not job.timed_out, job
    assert job.returncode == 3, job
    for rank in (0, 2):
        assert "rank 1 failed: sys.exit(3) (at job.py:7), while" in job.err[rank], job


def test_an_exit_inside_a_library_is_the_programs_line() -> None:
    """Where a package calls sys.exit, as argparse does, the others read where the program called that package."""
    source = """
import argparse
def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    return parser.parse_args(["--steps", "ten"] if r == 1 else [])

options()
dist.barrier()
"""
    job = run_job(HEAD + source, 2, limit=20)
    assert job.returncode == 2, job
    assert "rank 1 failed: sys.exit(2) (at job.py:12), while" in job.err[0], job


def test_sys_exit_zero_is_silent() -> None:
    """sys.exit(0) at the end of every rank, one of them a second early, prints nothing and gives 0."""
    job = run_job(
        HEAD + "dist.barrier()\nif r == 1: sys.exit(0)\ntime.sleep(1)\nsys.exit(0)\n",
        3,
        limit=20,
    )
    assert not job.timed_out, job
    assert job.returncode == 0, job
    assert job.out == ["", "", ""], job
    assert job.err == ["", "", ""], job


def test_a_caught_exit_is_not_an_exit() -> None:
    """A SystemExit that the program catches does not become its exit code."""
    job = run_job(
        HEAD
        + """
for code in (4, "text"):
    try:
        sys.exit(code)
    except SystemExit as exit:
        assert exit.code == code
dist.barrier()
""",
        2,
        limit=20,
    )
    assert job.returncode == 0, job


def test_all_ranks_may_exit_with_a_code() -> None:
    """When every rank exits with 3 the job gives 3, and nobody has to be ended."""
    job = run_job(HEAD + "dist.barrier()\nsys.exit(3)\n", 3, limit=20)
    assert not job.timed_out, job
    assert job.returncode == 3, job
    assert job.seconds < 8, job


def test_a_rank_that_leaves_early_is_named() -> None:
    """A rank that ends before a call that the others wait in is named within a second, with the calls it has made."""
    job = run_job(
        HEAD
        + """
dist.barrier()
if r == 1:
    sys.exit(0)
t = time.monotonic()
try:
    dist.barrier()
except dist.PeerExitedError as error:
    print(f"{time.monotonic() - t:.2f}", error, flush=True)
    raise
""",
        2,
        limit=20,
    )
    assert not job.timed_out, job
    assert job.returncode == 1, job
    seconds, _, text = " ".join(job.out[0].split()).partition(" ")
    assert float(seconds) < 1.0, job
    how = "ended the program after 1 call on this group, by sys.exit(0) at job.py:10"
    assert "barrier #2 on group WORLD at job.py:" in text, job
    assert f"rank 1 {how}, so this call can never complete" in text, job
    assert f"rank 1: {how}, last call barrier at job.py:8" in text, job


@pytest.mark.slow
def test_a_handled_failure_gets_its_grace() -> None:
    """A rank that handles a peer's failure has time for a checkpoint; the job then ends with the origin's code."""
    job = run_job(
        HEAD
        + """
if r == 1:
    sys.exit(5)
try:
    dist.barrier()
except dist.PeerFailedError:
    time.sleep(5.5)
    print("saved", flush=True)
    try:
        dist.barrier()
    except dist.GroupBrokenError as error:
        print(error, flush=True)
    sys.exit(9)
""",
        2,
        limit=30,
    )
    assert not job.timed_out, job
    assert "saved" in job.out[0], job
    assert "cannot be used any more, because rank 1 failed: sys.exit(5)" in job.out[0], job
    assert job.returncode == 5, job


@pytest.mark.slow
def test_grace_is_bounded() -> None:
    """A rank that handles a failure for ever is ended after MPICOLL_EXIT_GRACE."""
    job = run_job(
        HEAD
        + """
if r == 1:
    sys.exit(5)
try:
    dist.barrier()
except dist.PeerFailedError:
    time.sleep(60)
""",
        2,
        limit=30,
        env={"MPICOLL_EXIT_GRACE": "5"},
    )
    assert not job.timed_out, job
    assert job.returncode == 5, job
    assert 4.5 < job.seconds < 15, job


@pytest.mark.slow
def test_nobody_handles_it() -> None:
    """When the others compute and nobody handles the failure, the job is over within 5 s (and the start)."""
    job = run_job(HEAD + "if r == 1: raise ValueError('bad')\ntime.sleep(60)\n", 2, limit=30)
    assert not job.timed_out, job
    assert job.returncode == 1, job
    assert job.seconds < 12, job


def test_own_finalize_and_abort() -> None:
    """A program may call MPI.Finalize() itself, early on one rank, and MPI.Abort."""
    job = run_job(
        HEAD
        + """
from mpi4py import MPI
dist.all_reduce(np.ones(1))
if r == 1: time.sleep(0.5)
MPI.Finalize()
try:
    dist.barrier()
except RuntimeError as error:
    print(error, flush=True)
""",
        2,
        limit=20,
    )
    assert job.returncode == 0, job
    assert all("MPI has been finalised" in out for out in job.out), job
    job = run_job(HEAD + "from mpi4py import MPI\nif r == 1: MPI.COMM_WORLD.Abort(7)\ndist.barrier()\n", 2, limit=20)
    assert job.returncode == 7, job


def test_a_forked_child_may_exit() -> None:
    """A forked child asks rank and size, cannot communicate, runs its exit handlers and ends with its own code."""
    job = run_job(
        HEAD
        + """
atexit.register(lambda: print("handler", os.getpid(), flush=True))
for code in (0, 5):
    pid = os.fork()
    if pid == 0:
        assert (dist.get_rank(), dist.get_world_size()) == (r, n)
        try:
            dist.barrier()
        except RuntimeError as error:
            assert "forked child" in str(error)
        if code:
            sys.exit(code)
        break
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
    print("child", code, flush=True)
else:
    pid = os.fork()
    if pid == 0:
        raise RuntimeError("in the child")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    dist.barrier()
    print("end", flush=True)
""",
        2,
        limit=30,
    )
    assert not job.timed_out, job
    assert job.returncode == 0, job
    for rank in range(2):
        assert "child 0" in job.out[rank], job
        assert "child 5" in job.out[rank], job
        assert "end" in job.out[rank], job
        assert job.out[rank].count("handler") == 4, job


ALL_EXITS = sys.version_info >= (3, 12)
"""Whether ``raise SystemExit(5)`` is seen: Python says what its outermost frame ends with."""


def test_a_forked_child_ends_with_its_code() -> None:
    """However a child ends, its exit code is what Python would give it, also behind another excepthook; so a grandchild's."""
    job = run_job(
        "from sys import exit as early\n"
        + HEAD
        + """
def raises(): raise SystemExit(5)
def imported(): early(5)
def quits(): quit(5)
def text(): exit("a reason")
def hooked(): sys.excepthook = lambda *_: print("hook", flush=True); raise ValueError
def interrupted(): raise KeyboardInterrupt
def stored():
    try:
        1 / 0
    except ZeroDivisionError as error:
        sys.last_value, sys.last_traceback = error, error.__traceback__
def kept():
    global error
    try:
        sys.exit(5)
    except SystemExit as found:
        error = found
def again():
    grandchild = os.fork()
    if not grandchild:
        print("grandchild", flush=True)
        sys.exit(6)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) + 1)

codes = {}
for end in (raises, imported, quits, text, hooked, interrupted, stored, kept, again):
    pid = os.fork()
    if pid == 0:
        end()
        break
    codes[end.__name__] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
else:
    print(codes, flush=True)
    dist.barrier()
""",
        2,
        limit=30,
    )
    assert not job.timed_out, job
    assert job.returncode == 0, job
    seen = 5 if ALL_EXITS else 0
    codes = {"raises": seen, "imported": seen, "quits": 5, "text": 1, "hooked": 1, "interrupted": -2}
    codes.update(stored=0, kept=0, again=7)
    for out in job.out:
        assert str(codes) in out, job
        assert "hook" in out, job
        assert "grandchild" in out, job


def test_a_failure_behind_another_excepthook() -> None:
    """A rank whose program puts an excepthook in the place of the library's has failed all the same, as its peers hear."""
    job = run_job(
        HEAD
        + """
sys.excepthook = lambda kind, value, trace: print("pretty:", value, file=sys.stderr, flush=True)
if r == 1:
    raise ValueError("boom")
try:
    dist.barrier()
except dist.PeerFailedError as error:
    print(error, flush=True)
    raise
""",
        2,
        limit=20,
    )
    assert not job.timed_out, job
    assert job.returncode == 1, job
    assert job.err[1].startswith("pretty: boom\n"), job
    assert "rank 1 failed: ValueError: boom" in job.out[0], job
    assert "job.py:10" in job.out[0], job


def test_an_error_in_a_thread_is_shown_without_the_library() -> None:
    """The traceback of a thread's error has the lines of the program, and not those of the library."""
    job = run_job(
        HEAD
        + """
import threading
thread = threading.Thread(target=lambda: dist.all_reduce(np.ones(3 + r)))
thread.start()
thread.join()
""",
        2,
        limit=20,
    )
    assert not job.timed_out, job
    assert job.returncode == 1, job
    assert "Exception in thread Thread-" in job.err[0], job
    assert "CollectiveMismatchError: call 1 on group WORLD" in job.err[0], job
    assert "in <lambda>" in job.err[0], job
    assert "mpicoll/operations" not in job.err[0], job


def test_a_failure_whose_text_raises() -> None:
    """An exception whose ``__str__`` raises is shown as Python shows it, by the program's own hook; its peers hear of it."""
    job = run_job(
        """
import sys
found = sys.excepthook
def hook(*failure):
    print("hook", file=sys.stderr)
    found(*failure)
sys.excepthook = hook
"""
        + HEAD
        + """
class Bad(Exception):
    def __str__(self):
        raise ValueError("no text")

if r == 1:
    raise Bad
dist.barrier()
""",
        2,
        limit=20,
    )
    assert not job.timed_out, job
    assert job.returncode == 1, job
    assert "hook" in job.err[1], job
    assert "Error in sys.excepthook" not in job.err[1], job
    assert "Bad: <exception str() failed>" in job.err[1], job
    assert "rank 1 failed: Bad: <exception str() failed>" in job.err[0], job


def test_system_exit_that_is_raised() -> None:
    """``raise SystemExit(main())`` is an exit as sys.exit is, where Python tells of it."""
    source = """
def main():
    return 3 if r == 1 else dist.barrier()
raise SystemExit(main())
"""
    job = run_job(HEAD + source, 2, limit=20)
    assert not job.timed_out, job
    assert job.returncode == (3 if ALL_EXITS else 1), job
    said = "rank 1 failed: sys.exit(3)" if ALL_EXITS else "rank 1 ended the program"
    assert said in job.err[0], job
    job = run_job(HEAD + source.replace("3 if", "0 if") + "\n", 1, limit=20)
    assert job.returncode == 0, job


# Each ends rank 1 with exit code 3.
EXITS_ELSEWHERE = {
    "task": "async def main(): leave()\nasyncio.run(main())",
    "task of a task": "async def main(): await asyncio.gather(asyncio.to_thread(dist.get_rank), inner())\n"
    "async def inner(): leave()\nasyncio.run(main())",
    "coroutine by hand": "async def main(): leave()\nmain().send(None)",
    "held": "held = []\ntry: leave()\nexcept SystemExit as error: held.append(error); raise",
}
# No rank ends in these.
EXITS_CAUGHT = {
    "task": "async def main(): sys.exit(3)\ntry: asyncio.run(main())\nexcept SystemExit as error: held = error",
    "thread": "thread = threading.Thread(target=sys.exit, args=(3,)); thread.start(); thread.join()",
    "thread with calls": "dist.barrier()\ndef work(): dist.barrier(); sys.exit(3)\n"
    "thread = threading.Thread(target=work); thread.start(); thread.join()",
    "thread without a name": "_thread.start_new_thread(sys.exit, (3,)); time.sleep(0.2)",
    "pool": "pool = ThreadPoolExecutor(1); future = pool.submit(sys.exit, 3); pool.shutdown(); error = future.exception()",
    "pool, raised": "try: ThreadPoolExecutor(1).submit(sys.exit, 3).result()\nexcept SystemExit as error: held = error",
    "loop": "held = []\nfor _ in range(3):\n    try: sys.exit(3)\n    except SystemExit as error: held.append(error)",
    "pool in a function": "def main():\n"
    "    with ThreadPoolExecutor(1) as pool: future = pool.submit(sys.exit, 3)\n"
    "    future.exception()\n    dist.barrier(); print('through'); sys.exit(0)\nmain()",
    "daemon": "held = []\ndef work():\n    for job in (lambda: sys.exit(3), lambda: time.sleep(9)):\n"
    "        try: job()\n        except BaseException as error: held.append(error)\n"
    "threading.Thread(target=work, daemon=True).start(); time.sleep(0.2)",
    "generator": "import gc\ndef numbers():\n    try: yield 1\n    finally: sys.exit(3)\n"
    "found = numbers(); next(found); sys.stderr = open('/dev/null', 'w'); del found; gc.collect(); sys.stderr = sys.__stderr__",
    "thread that raises again": "held = []\ndef work():\n    try: sys.exit(3)\n"
    "    except SystemExit as error: held.append(error); raise\n_thread.start_new_thread(work, ()); time.sleep(0.2)",
    "cycle": "class C: pass\nc = C()\ntry: sys.exit(3)\nexcept SystemExit as error: c.c, c.error = c, error\ndel c",
}


@pytest.mark.parametrize("how", EXITS_ELSEWHERE)
def test_sys_exit_in_a_task(how: str) -> None:
    """sys.exit ends the program with its code also where a task, or the program itself, holds the exception."""
    source = f"""
import asyncio
from concurrent.futures import ThreadPoolExecutor
def leave():
    if r == 1: sys.exit(3)
    dist.barrier()
{EXITS_ELSEWHERE[how]}
"""
    job = run_job(HEAD + source, 2, limit=20)
    assert not job.timed_out, job
    assert job.returncode == 3, job
    assert "rank 1 failed: sys.exit(3) (at job.py:11), while" in job.err[0], job


@pytest.mark.parametrize("how", EXITS_CAUGHT)
def test_sys_exit_that_ends_no_program(how: str) -> None:
    """A sys.exit that the program catches, or that ends a thread only, is no end of the rank."""
    source = f"""
import _thread, asyncio, threading
from concurrent.futures import ThreadPoolExecutor
{EXITS_CAUGHT[how]}
dist.barrier()
print("through")
"""
    job = run_job(HEAD + source, 2, limit=20)
    assert not job.timed_out, job
    assert job.returncode == 0, job
    assert job.out == ["through\n"] * 2, job
    assert not any("Traceback" in err for err in job.err), job


@pytest.mark.parametrize("end", ["raise ValueError('no halo')", "dist.destroy_process_group()"])
def test_what_was_not_waited_for_at_an_error(end: str) -> None:
    """Beside an error of the program its pending operations are named, those of one line once; as at its end."""
    start = (
        "works = [dist.irecv(np.zeros(1), 1 - r, tag=tag) for tag in range(300)]\nwork = dist.barrier(async_op=True)\n"
    )
    job = run_job(HEAD + start + f"if r == 0:\n    {end}\ndist.barrier()\n", 2, limit=20)
    assert not job.timed_out, job
    assert job.returncode == 1, job
    words = (
        "at this error the program had not waited for"
        if "raise" in end
        else "operations were issued and never waited for"
    )
    text = " ".join(job.err[0].split())
    named = r"irecv issued at \S*job\.py:7 \(300 times\); barrier issued at \S*job\.py:8"
    assert re.search(f"{words}: {named}", text), job
    assert len(job.err[0]) < 4000, job


def test_never_waited_for_at_the_end() -> None:
    """An operation that nobody ever waits for makes the job fail, and its line is named."""
    job = run_job(HEAD + "work = dist.all_reduce(np.ones(1), async_op=True)\ndist.barrier()\n", 2, limit=20)
    assert not job.timed_out, job
    assert job.returncode == 1, job
    assert "never waited for: all_reduce issued at " in job.err[0], job
    assert "job.py:7\n" in job.err[0], job


@pytest.mark.parametrize("end", ["", "dist.destroy_process_group()"])
@pytest.mark.parametrize("look", ["", "; future = work.get_future()", "; work.get_future()"])
@pytest.mark.parametrize("over", [False, True])
def test_a_mismatch_that_nobody_has_waited_for(over: bool, look: str, end: str) -> None:
    """The program fails at its end if its ranks have dropped calls that differed, and one rank prints the report.

    The ranks may know the difference before the end, or learn of the difference at the end.
    """
    source = f"""
work = dist.all_reduce(np.ones(2 + r), async_op=True){look}
while {over} and not is_over(work):
    time.sleep(0.01)
MPI.COMM_WORLD.Barrier()  # both calls are posted
{end}
"""
    head = HEAD + "import time\nfrom mpi4py import MPI\nfrom mpicoll.operations.work import is_over\n"
    job = run_job(head + source, 2, limit=20)
    assert not job.timed_out, job
    assert job.returncode == 1, job
    assert ["rank 0: all_reduce #1" in err for err in job.err] == [True, False], job
    assert "its ranks made different calls" in job.err[1], job
    assert all(line.startswith("[rank 0] ") for line in job.err[0].splitlines() if "rank 1: all_reduce" in line), job


@pytest.mark.parametrize("end", ["", "dist.destroy_process_group()"])
@pytest.mark.parametrize(
    "look", ["future.exception()", "works[0].exception()", "while not future.done(): pass\nfuture.exception()"]
)
def test_an_error_that_the_program_has_looked_at(look: str, end: str) -> None:
    """Is not told again; futures of calls that ended well need no look."""
    source = f"""
works = [dist.all_reduce(np.ones(2 + (r if differ else 0)), async_op=True) for differ in (False, True)]
future = works[1].get_future()
other = works[0].get_future()
other.result()
try:
    works[1].wait()
except dist.CollectiveMismatchError:
    {look.replace(chr(10), chr(10) + "    ")}
third = dist.all_reduce(np.ones(2), async_op=True).get_future()
while not third.done():
    time.sleep(0.001)
{end}
"""
    job = run_job(HEAD + "import time\n" + source, 2, limit=20)
    assert not job.timed_out, job
    assert job.returncode == 0, job
    assert job.err == ["", ""], job


@pytest.mark.slow
def test_what_was_given_up_goes_in_silence() -> None:
    """A program that handles its errors and ends prints nothing of the operations that were given up with them."""
    job = run_job(
        HEAD
        + """
other, x = 1 - r, np.ones(4)
works = [dist.irecv(np.ones(4), other, tag=1), dist.isend(np.ones(400_000), other, tag=2)]
for wait in (lambda: dist.recv(x, other), *(work.wait for work in works)):
    try:
        wait()
    except dist.DistError as error:
        print(type(error).__name__, flush=True)
""",
        2,
        limit=20,
    )
    assert not job.timed_out, job
    for out in job.out:
        first, *others = out.split()
        assert first == "DeadlockError", job
        assert len(others) == 2, job
        assert set(others) <= {"DeadlockError", "GroupBrokenError", "PeerExitedError"}, job
    said = [line for err in job.err for line in err.splitlines() if line and "had not been received" not in line]
    assert not [line for line in said if "Abort(" not in line], job


def test_a_guest_touches_nothing() -> None:
    """With comm= no hook is installed."""
    job = run_job(
        """
import signal, sys, threading
from mpi4py import MPI
before = sys.excepthook, threading.excepthook, sys.exit, exit, signal.getsignal(signal.SIGINT)
import numpy as np
import mpicoll as dist
dist.init_process_group(comm=MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2))
assert before == (sys.excepthook, threading.excepthook, sys.exit, exit, signal.getsignal(signal.SIGINT))
x = np.ones(1)
dist.all_reduce(x)
print(x[0], dist.get_world_size(), flush=True)
dist.destroy_process_group()
""",
        4,
        limit=20,
    )
    assert job.returncode == 0, job
    assert all("2.0 2" in out for out in job.out), job


@pytest.mark.parametrize("how", ["comm=MPI.COMM_WORLD", pytest.param("on_failure='raise'", marks=pytest.mark.slow)])
def test_a_guest_that_fails_is_known_to_those_who_wait(how: str) -> None:
    """With comm= the job is the program's, but what ends one rank ends the waits of the others, who may handle it."""
    job = run_job(
        f"""
from mpi4py import MPI
import mpicoll as dist
dist.init_process_group({how})
if dist.get_rank() == 1:
    raise ValueError("no such grid")
try:
    dist.barrier()
except dist.PeerFailedError as error:
    print(str(error).splitlines()[0], flush=True)
""",
        3,
        limit=20,
    )
    assert not job.timed_out, job
    assert job.out[0].startswith("rank 1 failed: ValueError: no such grid (at job.py:6)"), job
    assert job.out[2] == job.out[0], job
    assert "ValueError: no such grid" in job.err[1], job


@pytest.mark.parametrize("theirs", [pytest.param("None", marks=pytest.mark.slow), "MPI.COMM_WORLD"])
def test_a_wrong_communicator_on_one_rank(theirs: str) -> None:
    """Where the others start on COMM_WORLD they are told at once what is wrong on that rank, and the job ends."""
    job = run_job(
        f"""
from mpi4py import MPI
import mpicoll as dist
dist.init_process_group(comm=5 if MPI.COMM_WORLD.rank == 1 else {theirs})
""",
        2,
        limit=20,
    )
    assert not job.timed_out, job
    assert job.returncode == 1, job
    assert job.seconds < 12, job
    assert "TypeError: comm must be an mpi4py intracommunicator, not int" in job.err[1], job
    assert "CollectiveMismatchError" in job.err[0], job
    assert "comm must be an mpi4py intracommunicator, not int" in job.err[0], job


@pytest.mark.slow
def test_a_wrong_communicator_that_nobody_hears_of() -> None:
    """Where the others start elsewhere, the rank raises soon all the same, and ends the job instead of hanging at its end."""
    job = run_job(
        """
from mpi4py import MPI
import mpicoll as dist
from mpicoll.lifecycle import join
join.TOLD_WITHIN = 1.0
comm = MPI.COMM_WORLD.Dup()
dist.init_process_group(comm="world" if comm.rank == 1 else comm)
""",
        2,
        limit=30,
        env={"MPICOLL_EXIT_GRACE": "1.5"},
    )
    assert not job.timed_out, job
    assert job.returncode == 1, job
    assert 2.5 < job.seconds < 15, job
    assert "TypeError: comm must be an mpi4py intracommunicator, not str" in job.err[1], job
    assert "This rank ends the job in 1.5 s" in job.err[1], job


def test_a_rank_outside_of_the_communicator() -> None:
    """COMM_NULL raises at once, and concerns nobody else."""
    job = run_job(
        """
from mpi4py import MPI
import numpy as np
import mpicoll as dist
comm = MPI.COMM_WORLD.Split(MPI.UNDEFINED if MPI.COMM_WORLD.rank == 2 else 0)
try:
    dist.init_process_group(comm=comm)
    x = np.ones(1)
    dist.all_reduce(x)
    print(x[0], flush=True)
except TypeError as error:
    print(error, flush=True)
""",
        3,
        limit=20,
    )
    assert job.returncode == 0, job
    assert job.out[0] == job.out[1] == "2.0\n", job
    assert "not COMM_NULL" in job.out[2], job


def test_hooks_call_those_they_found() -> None:
    """The excepthook calls the one it found, and destroying puts that one back."""
    job = run_job(
        """
import sys
def mine(kind, value, trace):
    print("mine:", value, file=sys.stderr)
sys.excepthook = mine
import mpicoll as dist
dist.init_process_group()
dist.destroy_process_group()
assert sys.excepthook is mine
dist.init_process_group()
if dist.get_rank() == 0:
    raise ValueError("seen")
dist.barrier()
""",
        2,
        limit=20,
    )
    assert job.returncode == 1, job
    assert "[rank 0] mine: seen" in job.err[0], job


def test_a_failing_thread_that_communicates_ends_the_job() -> None:
    """An exception in a thread that has called the library fails the job; one in another thread does not."""
    job = run_job(
        HEAD
        + """
import threading
def quiet():
    raise ValueError("not ours")
def talks():
    dist.all_reduce(np.ones(1))
    if r == 1:
        raise ValueError("ours")
thread = threading.Thread(target=quiet); thread.start(); thread.join()
dist.barrier()
print("after the first", flush=True)
thread = threading.Thread(target=talks); thread.start(); thread.join()
if r == 0:
    dist.barrier()
""",
        2,
        limit=30,
    )
    assert not job.timed_out, job
    assert job.returncode == 1, job
    assert all("after the first" in out for out in job.out), job
    assert "rank 1 failed: ValueError in thread" in job.err[0], job


LARGE = (
    HEAD
    + """
x = np.ones(4_000_000)
dist.barrier()
print("go", flush=True)
while True:
    dist.all_reduce(x, dist.ReduceOp.MAX)
"""
)


@pytest.mark.parametrize("recover", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["launcher", "alone"])
def test_kill_nine_inside_a_large_all_reduce(recover: bool) -> None:
    """kill -9 of a rank ends the job, with the launcher's help and without; it is said who died."""

    def kill(job: RunningJob) -> None:
        job.wait_for("go", 0, 1, 2)
        job.signal(signal.SIGKILL, 1)

    job = run_job(LARGE, 3, limit=20, meanwhile=kill, recover=recover, settle=10)
    assert not job.timed_out, job
    assert job.returncode != 0, job
    assert not job.left_running, job
    # MPICH's launcher kills at once, and a rank that is just then inside MPICH's all-reduce may crash there itself.
    if family() == "openmpi":
        # Its neighbour's thread says so, or the main thread, whichever hears of it first.
        assert re.search(r"rank 1('s| failed: its) process ended without a report", job.err[0]), job
        if recover:  # out of a wait, or by the watchdog out of MPI
            for rank in (0, 2):
                inside, waiting = (
                    "all_reduce(ReduceOp.MAX, float64, 4000000 elements)",
                    r"all_reduce #\d+ float64\[4000000\] MAX",
                )
                said = " ".join(job.err[rank].split())
                assert re.search(rf"({re.escape(inside)}|{waiting}) on group WORLD", said), job


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "how", ["os._exit(0)", pytest.param("os._exit(3)", marks=SLOW), pytest.param("os.kill(os.getpid(), 9)", marks=SLOW)]
)
def test_a_rank_that_is_gone_without_a_word(how: str) -> None:
    """Ranks that wait for one whose process is gone raise at once, naming it and where it was; handlers still run."""
    job = run_job(
        HEAD
        + f"""
atexit.register(lambda: print("handler", r, flush=True))
dist.barrier()
if r == 1:
    time.sleep(0.5)
    {how}
try:
    dist.all_reduce(np.ones(2))
except dist.PeerFailedError as error:
    print(error, flush=True)
    time.sleep(0.5)
    try:
        dist.barrier()
    except dist.GroupBrokenError:
        print("broken", flush=True)
    raise
""",
        3,
        limit=20,
        recover=True,
    )
    assert not job.timed_out, job
    assert job.returncode != 0, job
    assert job.seconds < 12, job
    # Its neighbour's thread says so, or the main thread, whichever hears of it first.
    assert re.search(r"rank 1('s| failed: its) process ended without a report", job.err[0]), job
    if "kill" in how and family() == "mpich":
        return  # its mpiexec kills the others all the same when it sees a signal; `mpicoll run` hides that from it
    for rank in (0, 2):
        said = " ".join(job.out[rank].split())
        assert "rank 1 failed: its process ended without a report" in said, job
        assert "(last seen at job.py:11 in <module>()), after its last known call barrier at job.py:9, while" in said, (
            job
        )
        assert f"while rank {rank} waited in all_reduce #2 float64[2] SUM on group WORLD at job.py:14" in said, job
        assert re.search(r"rank 1: failed: its process ended .*, last call barrier at job.py:9 ", said), job
        assert "broken" in job.out[rank], job
        assert f"handler {rank}" in job.out[rank], job


def test_a_rank_that_is_gone_while_nobody_waits() -> None:
    """Ranks that come to their end find that one died without a word: the job has not ended well."""
    job = run_job(HEAD + "if r == 1: os._exit(0)\ntime.sleep(1)\n", 3, limit=20, recover=True)
    assert not job.timed_out, job
    assert job.returncode != 0, job
    # Its neighbour's thread says so, or the main thread, whichever hears of it first.
    assert re.search(r"rank 1('s| failed: its) process ended without a report", job.err[0]), job


@pytest.mark.slow
def test_the_launchers_signal_is_answered_with_the_rank_that_died() -> None:
    """SIGTERM in a wait, as a launcher sends it when a rank has died, raises what says so; alone it ends the process."""
    job = run_job(
        HEAD
        + """
import signal
dist.barrier()
if r == 1:
    time.sleep(1)
    os._exit(0)
if r == 0:
    import threading
    threading.Timer(1.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
try:
    dist.barrier()
except dist.PeerFailedError as error:
    print(error, flush=True)
    raise
""",
        2,
        limit=20,
        recover=True,
    )
    assert not job.timed_out, job
    assert "rank 1 failed: its process ended without a report" in job.out[0], job

    def terminate(running: RunningJob) -> None:
        running.wait_for("waiting", 0)
        running.signal(signal.SIGTERM, 0)

    job = run_job(
        HEAD + "if r: time.sleep(30)\nprint('waiting', flush=True); dist.barrier()\n", 2, limit=20, meanwhile=terminate
    )
    assert not job.timed_out, job
    assert job.returncode in (143, 15), job
    assert not job.out[0].replace("waiting", "").strip(), job


def test_a_failure_outside_the_group_breaks_it_too() -> None:
    """A rank that leaves a call because a rank outside the group failed breaks the group: the call stays half made."""
    job = run_job(
        HEAD
        + """
group, x = dist.new_group([0, 2]), np.ones(2)
if r == 1:
    time.sleep(0.3)  # the others are through new_group
    raise ValueError("no member of the group")
time.sleep(0.5 * r)
said = []
for _ in range(2):
    try:
        dist.all_reduce(x, group=group)
    except dist.DistError as error:
        said.append(type(error).__name__)
print(*said, flush=True)
""",
        3,
        limit=30,
        env={"MPICOLL_TIMEOUT": "20"},
    )
    assert not job.timed_out, job
    assert job.seconds < 15, job
    for rank in (0, 2):
        assert job.out[rank].split()[-1:] == ["GroupBrokenError"], job
        assert "CollectiveTimeoutError" not in job.out[rank], job


@pytest.mark.parametrize("early", [True, False])
def test_a_guest_whose_program_ends(early: bool) -> None:
    """Ranks that wait for one that has ended are told so, where the library is a guest, too; nobody waits at a common end."""
    job = run_job(
        f"early = {early}\n"
        + """
import sys, time
from datetime import timedelta
from mpi4py import MPI
import mpicoll as dist
dist.init_process_group(comm=MPI.COMM_WORLD, timeout=timedelta(seconds=60))
dist.barrier()
if early and dist.get_rank() == 1:
    sys.exit(0)
began = time.monotonic()
try:
    dist.barrier()
    print("through", flush=True)
except dist.PeerExitedError as error:
    assert "rank 1 ended the program after 1 call on this group" in " ".join(str(error).split()), error
    print("told", time.monotonic() - began < 20, flush=True)
""",
        3,
        limit=40,
    )
    assert job.returncode == 0, job
    assert job.out == (["told True\n", "", "told True\n"] if early else ["through\n"] * 3), job
    assert not job.left_running, job


STRUCK_AT_THE_END = """
import atexit, os, signal, sys, threading, time
import numpy as np
import mpicoll as dist
dist.init_process_group()
dist.barrier()
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(CODE))
begins = threading.Event()
def strike():
    begins.wait()
    time.sleep(DELAY)
    os.kill(os.getpid(), signal.NUMBER)
if dist.get_rank() == 0:
    if PENDING:
        future = dist.all_reduce(np.ones(4), async_op=True).get_future()
    threading.Thread(target=strike, daemon=True).start()
    atexit.register(begins.set)  # before the library's own end
else:
    time.sleep(1.0)
    if PENDING:
        dist.all_reduce(np.ones(4))
    dist.barrier()
"""


def struck(*, code: int, delay: float, pending: bool, number: str = "SIGTERM") -> JobResult:
    """Run a job whose rank 0 gets a signal at its end, while rank 1 still makes calls."""
    program = STRUCK_AT_THE_END
    for name, value in {"CODE": code, "DELAY": delay, "PENDING": pending, "NUMBER": number}.items():
        program = program.replace(name, str(value))
    job = run_job(program, 2, limit=30, env={"MPICOLL_TIMEOUT": "60"})
    assert not job.timed_out, job
    assert not job.left_running, job
    assert job.seconds < 20, job
    return job


@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("delay", [0.04, 0.3])
def test_a_handler_that_exits_at_the_end(delay: float, pending: bool) -> None:
    """The job ends with the code of the handler: rank 1 does not wait for a rank that has left its end half-way."""
    assert struck(code=5, delay=delay, pending=pending).returncode == 5


@pytest.mark.parametrize("delay", [0.04, 0.3])
def test_a_handler_that_exits_with_zero_at_the_end(delay: float) -> None:
    """Rank 1 is told that rank 0 has ended."""
    job = struck(code=0, delay=delay, pending=False)
    assert job.returncode == 1, job
    assert "rank 0 ended the program after 1 call on this group" in " ".join(job.err[1].split()), job


def test_control_c_while_errors_on_their_way_are_awaited() -> None:
    """The other rank is told of the interrupt."""
    job = struck(code=0, delay=0.04, pending=True, number="SIGINT")
    assert job.returncode == 130, job
    assert "rank 0 failed: KeyboardInterrupt" in " ".join(job.err[1].split()), job


@pytest.mark.parametrize("what", ["the world", "a group"])
def test_a_rank_destroys_a_group_that_others_use(what: str) -> None:
    """The others raise although the rank goes on; a rank that destroys the group after its last call disturbs nobody."""
    job = run_job(
        HEAD
        + f"group = None if {what!r} == 'the world' else dist.new_group([0, 1, 2])"
        + """
x = np.ones(3)
for _ in range(2):
    dist.all_reduce(x, group=group)
if r == 2:
    dist.destroy_process_group(group)
    time.sleep(60)
time.sleep(r)
dist.all_reduce(x, group=group)
""",
        3,
        limit=40,
    )
    assert not job.timed_out, job
    assert "PeerExitedError" in job.err[0], job
    assert "PeerExitedError" in job.err[1], job
    assert re.search(r"rank 2 destroyed the\s+group at \S+:\d+ after 2 calls on this group", job.stderr), job


def test_a_forked_child_that_destroys_the_groups_disturbs_nobody() -> None:
    """The parent goes on with the groups; another rank waits meanwhile."""
    job = run_job(
        HEAD
        + """
if r == 0 and os.fork() == 0:
    dist.destroy_process_group()
    os._exit(0)
if r == 0:
    time.sleep(1.5)
x = np.ones(3)
dist.all_reduce(x)
print(x[0], flush=True)
""",
        2,
        limit=40,
    )
    assert job.returncode == 0, job
    assert [out.splitlines() for out in job.out] == [["2.0"]] * 2, job
