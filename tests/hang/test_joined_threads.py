"""Deadlocks of threads that the main thread waits for, in a join or on a lock of Python; and waits that only look so."""

from __future__ import annotations

import pytest
from jobs import JobResult, family, run_job

HEAD = """
import asyncio, functools, os, queue, signal, subprocess, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
import numpy as np
import mpicoll as dist
dist.init_process_group()
r, n = dist.get_rank(), dist.get_world_size()
x, other = np.ones(4), 1 - dist.get_rank()
group = dist.new_group()
"""

LIMIT = {"MPICOLL_TIMEOUT": "25"}

RECEIVE = """
dist.barrier()
began = time.monotonic()
def receive():
    try:
        dist.recv(x, other)
    except dist.DeadlockError as error:
        assert error.ranks == [0, 1] and error.calls[r]["ranks"] == [r], (error.ranks, error.calls)
        print(f"{time.monotonic() - began:.2f} {error}", flush=True)
        time.sleep(1)
        raise
"""

STUCK = {
    "a join, with a handler for children of which there are none": """
signal.signal(signal.SIGCHLD, lambda *_: None)
subprocess.run(["true"])
thread = threading.Thread(target=receive); thread.start(); thread.join()
""",
    "a join": "thread = threading.Thread(target=receive); thread.start(); thread.join()",
    "a future of a pool": "with ThreadPoolExecutor(3) as pool: pool.submit(receive).result()",
    "a queue": """
results = queue.Queue()
def give():
    try:
        receive()
    finally:
        results.put(1)
threading.Thread(target=give).start()  # no daemon: the program ends when the error was reported
results.get()
""",
    "a lock": """
lock = threading.Lock()
def locked():
    with lock:
        receive()
threading.Thread(target=locked, daemon=True).start()
time.sleep(1)
lock.acquire()
""",
    "the end of the main thread": "threading.Thread(target=receive).start()",
    "a thread on one rank, none on the other": """
if r == 0:
    thread = threading.Thread(target=receive); thread.start(); thread.join()
else:
    receive()
""",
    "a thread that joins a thread": """
def join():
    thread = threading.Thread(target=receive); thread.start(); thread.join()
thread = threading.Thread(target=join); thread.start(); thread.join()
""",
    "a join, beside a thread that sleeps": """
def beat():
    while True:
        time.sleep(0.5)
        if not r: os.stat(".")
threading.Thread(target=beat, daemon=True).start()
thread = threading.Thread(target=receive); thread.start(); thread.join()
""",
    "a future of a pool, beside a thread that waits with a limit": """
class Monitor(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.stop = threading.Event()
        self.start()
    def run(self):
        while not self.stop.wait(10):
            print("rank", dist.get_rank(), "is alive")
monitor = Monitor()
with ThreadPoolExecutor(3) as pool: pool.submit(receive).result()
""",
    "the end of the main thread, beside a thread that computes": """
def compute():
    while True:
        np.sort(np.arange(200_000)[::-1])
threading.Thread(target=compute, daemon=True).start()
threading.Thread(target=receive).start()
""",
    "a result of a pool of threads": "with ThreadPool(2) as pool: pool.apply(receive)",
    "results of a pool of threads": "with ThreadPool(2) as pool: pool.map(lambda part: part or receive(), [0, 1, 2])",
    "a join, with handlers of signals": """
stops = []
signal.signal(signal.SIGUSR1, lambda number, frame: stops.append(number))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
thread = threading.Thread(target=receive); thread.start(); thread.join()
""",
}
ALWAYS = {"a join", "a join, beside a thread that sleeps"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ALWAYS)) for name in STUCK]
)
def test_a_deadlock_of_threads(name: str) -> None:
    """Every rank raises within ten seconds, and names the calls and where the other threads wait."""
    _ends(run_job(HEAD + RECEIVE + STUCK[name], 2, limit=40, env=LIMIT))


@pytest.mark.skipif(family() != "mpich", reason="MPICH can treat each rank as a node of its own")
def test_a_deadlock_of_threads_on_two_nodes() -> None:
    """Ranks of other nodes are asked, at growing intervals: the threads stand late."""
    _ends(
        run_job(
            HEAD + RECEIVE + "thread = threading.Thread(target=receive); thread.start(); time.sleep(2); thread.join()",
            2,
            limit=40,
            env={**LIMIT, "MPIR_CVAR_NOLOCAL": "1"},
        )
    )


def _ends(job: JobResult) -> None:
    """Require the error of a deadlock on both ranks."""
    assert not job.timed_out, job
    assert job.returncode, job
    for rank, out in enumerate(job.out):
        assert "deadlock: ranks 0-1 wait for each other" in out, job
        for each in (0, 1):
            assert f"rank {each}: recv float64[4] from rank {1 - each} tag 0 at job.py:16, needs rank" in out, job
        assert "Threads outside of mpicoll wait in a join or on a lock (on rank 0 at " in out, job
        assert float(out.split()[0]) < 10, (rank, job)


LOOKS_SO = {
    "a wait with a limit": "threading.Event().wait(6)",
    "a join with a limit": "thread.join(6)",
    "a pool's future with a limit": """
try:
    ThreadPoolExecutor(1).submit(thread.join).result(6)
except TimeoutError:
    pass
except Exception as error:
    assert type(error).__name__ == "TimeoutError"
""",
    "a helper that computes": """
def compute():
    end = time.monotonic() + 6
    while time.monotonic() < end:
        np.sort(np.arange(200_000)[::-1])
helper = threading.Thread(target=compute, daemon=True); helper.start(); helper.join()
""",
    "a helper that sleeps": "helper = threading.Thread(target=time.sleep, args=(6,)); helper.start(); helper.join()",
    "a timer": "helper = threading.Timer(6, print); helper.start(); helper.join()",
    "a helper that reads what another process writes": """
child = subprocess.Popen(["sh", "-c", "sleep 6; echo"], stdout=subprocess.PIPE)
with ThreadPoolExecutor(2) as pool: pool.submit(child.stdout.read).result()
child.wait()
""",
    "threads that exchange items": """
there, back = queue.Queue(), queue.Queue()
def answer():
    while there.get(): back.put(1)
helper = threading.Thread(target=answer); helper.start()
end = time.monotonic() + 6
while time.monotonic() < end: there.put(1); back.get()
there.put(0)
""",
    "an event loop": """
async def main():
    await asyncio.get_running_loop().run_in_executor(None, time.sleep, 6)
asyncio.run(main())
""",
    "a worker of a pool that begins with a function in C": """
with ThreadPoolExecutor(1, initializer=time.sleep, initargs=(6,)) as pool: pool.submit(int).result()
""",
    "a helper with a name like the library's": """
helper = threading.Thread(target=time.sleep, args=(6,), name="mpicoll loader"); helper.start(); helper.join()
""",
    "an event that a signal handler sets": """
done = threading.Event()
signal.signal(signal.SIGALRM, lambda *_: done.set())
signal.alarm(6)
done.wait()
""",
    "an event that the handler of a child's end sets": """
done = threading.Event()
signal.signal(signal.SIGCHLD, lambda *_: done.set())
child = subprocess.Popen(["sleep", "6"])
done.wait()
child.wait()
""",
    "a wait that a signal handler ends": """
def end(*_): raise InterruptedError
signal.signal(signal.SIGALRM, end)
signal.alarm(6)
try:
    threading.Event().wait()  # no join: Python 3.11 takes a thread for ended after that
except InterruptedError:
    pass
""",
    "a helper that waits for a signal handler, which runs in a call": """
done = threading.Event()
signal.signal(signal.SIGALRM, lambda *_: done.set())
signal.alarm(6)
def give():
    dist.all_reduce(np.ones(2), group=group)
    done.wait()
    dist.send(x, other, tag=1)
helper = threading.Thread(target=give); helper.start()
dist.recv(np.empty(4), other, tag=1)
helper.join()
""",
    "a callback of an asynchronous call": """
if r < 2:
    done = threading.Event()
    dist.all_reduce(np.ones(2), group=group, async_op=True).get_future().add_done_callback(lambda future: done.set())
    done.wait()
    time.sleep(1)  # the thread of the other rank, which makes progress there, has to see the end of the call, too
else:
    time.sleep(6)
    dist.all_reduce(np.ones(2), group=group)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOKS_SO)
def test_threads_that_will_go_on(name: str) -> None:
    """A main thread that will send what all wait for, later than a certificate takes, is no deadlock."""
    source = "".join(f"    {line}\n" for line in LOOKS_SO[name].splitlines())
    job = run_job(
        HEAD
        + "thread = threading.Thread(target=lambda: r < 2 and dist.recv(np.empty(4), other)); thread.start()\n"
        + "time.sleep(0.5)\n"
        + "began = time.monotonic()\n"
        + f"if True:\n{source}"
        + """
assert time.monotonic() - began > 5.5
if r < 2: dist.send(x, other)
thread.join()
print("done", flush=True)
""",
        3 if "callback" in name else 2,
        limit=40,
        env=LIMIT,
    )
    assert not job.timed_out, job
    assert job.returncode == 0, job
    assert all("done" in out for out in job.out), job
    assert not any(job.err), job


RELEASED = {
    "a thread that sleeps": """
threading.Thread(target=lambda: (time.sleep(8), dist.send(x, other)), daemon=True).start()
""",
    "a timer": "threading.Timer(8, dist.send, (x, other)).start()",
    "a thread that tries again, and its object": """
class Sender:
    def __init__(self):
        self.peer, self.pauses = other, [1, 2, 5]
    def send(self):
        dist.send(x, self.peer)
    def run(self):
        for pause in self.pauses: time.sleep(pause)
        self.send()
threading.Thread(target=Sender().run, daemon=True).start()
""",
    "a thread that takes functions from a queue": """
tasks = queue.Queue()
def serve():
    while True:
        try:
            tasks.get(timeout=0.5)()
        except queue.Empty:
            pass
def give():
    for function in (lambda: time.sleep(8), functools.partial(dist.send, x, other)): tasks.put(function)
for target in (serve, give): threading.Thread(target=target, daemon=True).start()
""",
    "a thread that imports late": """
def late():
    time.sleep(8)
    from mpicoll import send
    send(x, other)
threading.Thread(target=late, daemon=True).start()
""",
    "a thread that sets an event": """
event = threading.Event()
def wait():
    event.wait()
    dist.send(x, other)
threading.Thread(target=wait, daemon=True).start()
threading.Thread(target=lambda: (time.sleep(8), event.set()), daemon=True).start()
""",
    "a pool of threads": "pool = ThreadPool(1); pool.apply_async(lambda: (time.sleep(8), dist.send(x, other)))",
    "a handler that communicates": """
signal.signal(signal.SIGUSR1, lambda *_: dist.send(x, other))
child = subprocess.Popen(["sh", "-c", f"sleep 8; kill -USR1 {os.getpid()}"])
thread.join()
child.wait()
""",
    "a handler of a timer's signal, which raises": """
def end(*_): raise InterruptedError
signal.signal(signal.SIGALRM, end)
signal.alarm(8)
pool = ThreadPoolExecutor(1)
try:
    pool.submit(thread.join).result()  # The other rank's message may end this before the own timer does.
    signal.alarm(0)
except InterruptedError:
    pass
dist.send(x, other)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RELEASED)
def test_threads_that_others_release(name: str) -> None:
    """The main thread joins a thread that waits, and a third thread or a handler makes the missing call late: no deadlock."""
    job = run_job(
        HEAD
        + "thread = threading.Thread(target=lambda: dist.recv(np.empty(4), other)); thread.start()\n"
        + RELEASED[name]
        + """
thread.join()
print("done", flush=True)
""",
        2,
        limit=40,
        env=LIMIT,
    )
    assert not job.timed_out, job
    assert job.returncode == 0, job
    assert job.seconds > 8, job
    assert all("done" in out for out in job.out), job
    assert not any(job.err), job


def test_a_thread_that_has_sent_while_the_program_ends() -> None:
    """The message is received before the thread that sent the message has counted it: no message is lost."""
    job = run_job(
        HEAD
        + """
from mpicoll.diagnosis.membership import Membership
count_sent = Membership.count_sent
def late(*arguments):
    time.sleep(0.5)
    count_sent(*arguments)
Membership.count_sent = late
def send():
    time.sleep(0.5)
    dist.send(x, other)
threading.Thread(target=send, daemon=True).start()
dist.recv(np.empty(4), other)
print("done", flush=True)
""",
        2,
        limit=40,
    )
    assert job.returncode == 0, job
    assert all("done" in out for out in job.out), job
    assert not any(job.err), job


@pytest.mark.slow
def test_functions_at_the_end_of_the_main_thread() -> None:
    """The main thread calls functions, then waits for threads: a function in C is no wait for them."""
    job = run_job(
        HEAD
        + """
def serve():
    dist.recv(np.empty(4), other)
    print("served", flush=True)
threading._register_atexit(dist.send, x, other)
threading._register_atexit(time.sleep, 6)
threading.Thread(target=serve).start()
""",
        2,
        limit=40,
        env=LIMIT,
    )
    assert job.returncode == 0, job
    assert all("served" in out for out in job.out), job
    assert not any(job.err), job
