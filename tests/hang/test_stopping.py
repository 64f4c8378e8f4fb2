"""Signals from outside: those that all ranks answer at a step, and SIGTERM that ends a job, with the report of where it was."""

from __future__ import annotations

import re
import signal
import time

import pytest
from jobs import JobResult, RunningJob, run_job

STEPS = """
import signal, sys, time
import numpy as np
import mpicoll as dist
dist.init_process_group()
me, seen, step = dist.get_rank(), [], 0
if sys.argv[1] == "handler":
    dist.on_signal(seen.append)
dist.should_stop()  # from here on signals are noted, also without a handler
dist.barrier()
print("ready", flush=True)
while not dist.should_stop():
    step += 1
    time.sleep(0.005)
    assert step < 10_000
told = np.array([step, -step])
dist.all_reduce(told, dist.ReduceOp.MAX)
print("stopped together" if told[0] == -told[1] else "apart", seen, flush=True)
"""


@pytest.mark.parametrize(("number", "mode"), [(signal.SIGUSR1, "handler"), (signal.SIGTERM, "alone")])
def test_one_rank_is_told_and_all_stop(number: signal.Signals, mode: str) -> None:
    """A signal from outside to one rank ends the loop of all at the same step, and the job ends well."""

    def tell(job: RunningJob) -> None:
        job.wait_for("ready", 0, 1, 2)
        job.signal(number, 1)

    result = run_job(STEPS, 3, limit=40, args=[mode], meanwhile=tell)
    assert not result.timed_out, result
    assert result.returncode == 0, result
    expected = f"stopped together [{int(number)}]" if mode == "handler" else "stopped together []"
    assert all(expected in out for out in result.out), result
    assert not any(result.err), result


AT = """
import os, signal, sys, time
import numpy as np
import mpicoll as dist

def compute():
    x = np.random.rand(400, 400)
    print("ready", flush=True)
    while True:
        x = x @ x
        x /= x.max()

def sleep():
    print("ready", flush=True)
    time.sleep(60)

dist.init_process_group()
dist.barrier()
me = dist.get_rank()
if me == 0:
    compute()
elif me == 1:
    sleep()
else:
    print("ready", flush=True)
    dist.all_reduce(np.ones(3))
"""


def report(result: JobResult) -> str:
    """Return what the ranks and the launcher have printed; the report may come by either."""
    return "\n".join([*result.err, result.launcher])


@pytest.mark.parametrize("launcher", [pytest.param(False, marks=pytest.mark.slow), True])
def test_sigterm_leaves_one_report(launcher: bool) -> None:
    """It says where each rank was, whether SIGTERM reaches the ranks or their launcher; the job is over soon."""
    told = [0.0]

    def end(job: RunningJob) -> None:
        job.wait_for("ready", 0, 1, 2)
        time.sleep(1.0)  # the last one waits for longer than the moment in which a wait is not answered yet
        told[0] = time.monotonic()
        if launcher:
            job.signal(signal.SIGTERM)
        else:
            job.signal(signal.SIGTERM, 0, 1, 2)

    result = run_job(AT, 3, limit=40, meanwhile=end)
    assert not result.timed_out, result
    assert time.monotonic() - told[0] < 15, result
    assert result.returncode != 0, result
    text = report(result)
    # A rank that is slow to answer is shown where it was last seen.
    assert text.count("SIGTERM ends rank") == 1, result
    assert re.search(r"rank 0: .*:\d+ in compute\(\)", text), result
    assert re.search(r"rank 1: .*:\d+ in sleep\(\)", text), result
    assert re.search(r"rank 2: (all_reduce #2 float64\[3\] SUM at|.*at) \S+:26", text), result
    assert "Traceback" not in text, result
    assert "without a report" not in text, result
    assert not result.left_running, result


@pytest.mark.slow
def test_a_rank_that_is_ended_alone() -> None:
    """SIGTERM to one rank: it says where it was and where the others are, and the job ends with an error."""

    def end(job: RunningJob) -> None:
        job.wait_for("ready", 0, 1, 2)
        time.sleep(1.0)
        job.signal(signal.SIGTERM, 1)

    result = run_job(AT, 3, limit=40, meanwhile=end)
    assert not result.timed_out, result
    assert result.returncode != 0, result
    text = report(result)
    assert text.count("SIGTERM ends rank 1 ") == 1, result
    assert re.search(r"rank 1: .*:\d+ in sleep\(\)", text), result
    assert re.search(r"rank 0: .*:\d+ in compute\(\)", text), result


AGAIN = """
import signal, sys, time
import mpicoll as dist
dist.init_process_group()
dist.on_signal(lambda number: print("handler", number, flush=True))
dist.barrier()
print("ready", flush=True)
time.sleep(60)  # no step
"""


@pytest.mark.slow
def test_a_second_sigterm_ends() -> None:
    """One that no step answers is reported after some seconds and goes on; a later one ends the job, with the report."""

    def end(job: RunningJob) -> None:
        job.wait_for("ready", 0, 1)
        for _ in range(2):
            job.signal(signal.SIGTERM, 0, 1)
            time.sleep(0.1)
        time.sleep(6)
        assert job.process.poll() is None
        job.signal(signal.SIGTERM, 0, 1)

    result = run_job(AGAIN, 2, limit=60, meanwhile=end)
    assert not result.timed_out, result
    assert result.returncode != 0, result
    assert result.seconds > 6, result
    text = report(result)
    assert text.count("no step has answered it") == 1, result
    assert text.count("SIGTERM ends rank") == 1, result
    assert "handler" not in result.stdout, result


@pytest.mark.slow
def test_the_limit_of_the_group_ends_a_program_without_steps() -> None:
    """A SIGTERM that no step answers within the limit of the group ends the process."""
    source = AGAIN.replace(
        "init_process_group()", "init_process_group(timeout=__import__('datetime').timedelta(seconds=5))"
    )

    def end(job: RunningJob) -> None:
        job.wait_for("ready", 0, 1)
        job.signal(signal.SIGTERM, 0, 1)

    result = run_job(source, 2, limit=60, meanwhile=end)
    assert not result.timed_out, result
    assert result.returncode != 0, result
    assert 4 < result.seconds < 45, result
    assert "SIGTERM ends rank" in report(result), result


CHILDREN = """
import os, signal, subprocess, sys, time
import mpicoll as dist
dist.init_process_group()
for held in (False, True):
    if held:
        dist.on_signal(lambda number: None)
    child = os.fork()
    if child == 0:
        print("child", flush=True)
        time.sleep(30)
        os._exit(3)
    time.sleep(0.3)
    os.kill(child, signal.SIGTERM)
    forked = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    other.terminate()
    print(held, forked, other.wait(), flush=True)
    dist.barrier()
time.sleep(0.5)
dist.barrier()
print("through", dist.should_stop(), flush=True)
"""


@pytest.mark.slow
def test_children_end_by_sigterm() -> None:
    """Workers, forked or started, are ended by SIGTERM as ever, and their parent hears nothing of it."""
    result = run_job(CHILDREN, 1, limit=60)
    assert result.returncode == 0, result
    assert "False -15 -15" in result.out[0], result
    assert "True -15 -15" in result.out[0], result
    assert "through False" in result.out[0], result
    assert not result.err[0], result


@pytest.mark.slow
def test_an_event_loop_keeps_its_place() -> None:
    """asyncio in the main thread wakes by its signals, and SIGTERM is still reported."""
    source = """
        import asyncio, os, signal
        import mpicoll as dist
        dist.init_process_group()

        async def main():
            loop = asyncio.get_running_loop()
            woken = asyncio.Event()
            loop.add_signal_handler(signal.SIGUSR2, woken.set)
            loop.call_later(0.2, os.kill, os.getpid(), signal.SIGUSR2)
            await asyncio.wait_for(woken.wait(), 20)
            print("woken", flush=True)
            loop.call_later(0.2, os.kill, os.getpid(), signal.SIGTERM)
            await asyncio.sleep(20)

        asyncio.run(main())
    """
    result = run_job(source, 1, limit=40)
    assert result.returncode != 0, result
    assert "woken" in result.out[0], result
    assert "SIGTERM ends rank 0" in report(result), result
    assert result.seconds < 20, result


def test_handlers_of_the_program_stay() -> None:
    """A program that handles SIGTERM, before the start or after it, is not interfered with."""
    source = """
        import os, signal
        import mpicoll as dist

        def handler(number, frame):
            print("mine", flush=True)

        signal.signal(signal.SIGTERM, handler)
        dist.init_process_group()
        os.kill(os.getpid(), signal.SIGTERM)
        dist.destroy_process_group()
        assert signal.getsignal(signal.SIGTERM) is handler
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        dist.init_process_group()
        signal.signal(signal.SIGTERM, handler)
        os.kill(os.getpid(), signal.SIGTERM)
        dist.barrier()
        dist.destroy_process_group()
        assert signal.getsignal(signal.SIGTERM) is handler
        print("through", flush=True)
    """
    result = run_job(source, 1, limit=40)
    assert result.returncode == 0, result
    assert result.out[0].split() == ["mine", "mine", "through"], result
    assert not result.err[0], result


QUICK = """
import os, signal, threading, time
import mpicoll as dist
dist.init_process_group()
for _ in range(4):
    threading.Thread(target=lambda: [sum(range(20_000)) for _ in iter(int, 1)], daemon=True).start()
began = time.monotonic()
while time.monotonic() - began < 5:
    seen = []
    with dist.on_signal(seen.append):
        os.kill(os.getpid(), signal.SIGTERM)
        dist.barrier()
        assert seen == [15], seen
    seen = []
    with dist.on_signal(seen.append):
        dist.barrier()
        dist.should_stop()
        assert seen == [], seen
print("through", flush=True)
"""


@pytest.mark.slow
def test_a_signal_is_not_heard_twice() -> None:
    """The thread that hears of SIGTERM, too, may come to it late: when it has been answered, and the handler removed."""
    result = run_job(QUICK, 1, limit=60)
    assert result.returncode == 0, result
    assert "through" in result.out[0], result
