"""Wrong programs of torch.distributed on the backend: who is named, with which line, and that no rank hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import run_job

HEAD = """
import os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
import mpicoll.torch

torch.set_num_threads(1)
LIMIT = timedelta(seconds=60)
dist.init_process_group("mpicoll", init_method="mpi://", timeout=LIMIT)
rank, size = dist.get_rank(), dist.get_world_size()
"""

MODEL = """
from torch.nn.parallel import DistributedDataParallel
model = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.ReLU(), torch.nn.Linear(20, 5))
"""

CALLS = {
    "elements": "dist.all_reduce(torch.ones(3 + rank))  # THE LINE",
    "waited later": "dist.all_reduce(torch.ones(3 + rank), async_op=True).wait()  # THE LINE",
    "functions": "dist.all_reduce(torch.ones(3)) if rank else dist.broadcast(torch.ones(3), 0)  # THE LINE",
    "objects": "dist.barrier() if rank else dist.broadcast_object_list([1], 0)  # THE LINE",
    "a subgroup": "dist.all_reduce(torch.ones(3 + rank), group=dist.new_group([0, 1]))  # THE LINE",
    "functional": "import torch.distributed._functional_collectives as f\n"
    "f.wait_tensor(f.all_reduce(torch.ones(3 + rank), 'sum', dist.group.WORLD))  # THE LINE",
}


def line_of(program: str, mark: str = "# THE LINE") -> int:
    return next(at for at, line in enumerate(program.splitlines(), 1) if mark in line)


@pytest.mark.parametrize("case", CALLS)
def test_a_mismatch_names_the_line_of_the_program(case: str) -> None:
    program = HEAD + CALLS[case]
    result = run_job(program, 2, limit=90)
    assert result.returncode == 1, result
    assert not result.timed_out, result
    whole = result.stdout + result.stderr
    place = f"job.py:{line_of(program)}"
    assert "rank 0: " in whole, result
    assert whole.count(place) >= 2, result
    assert all("CollectiveMismatchError" in each for each in result.err), result
    assert "distributed_c10d.py:" not in whole, result  # as the place of a call


def test_a_mismatch_is_an_error_that_can_be_handled() -> None:
    result = run_job(
        HEAD
        + """
import mpicoll
try:
    dist.all_reduce(torch.ones(3 + rank))
except mpicoll.CollectiveMismatchError as error:
    print(f"{len(error.ranks)} ranks")
x = torch.ones(2)
work = dist.all_reduce(torch.ones(3 + rank), async_op=True)
try:
    work.get_future().wait()
except RuntimeError as error:
    print("CollectiveMismatchError" in str(error), work.is_completed(), work.is_success())
dist.all_reduce(x)
print(x.tolist())
dist.destroy_process_group()
""",
        2,
        limit=90,
    )
    assert result.returncode == 0, result
    for each in result.out:
        lines = each.splitlines()
        assert lines[0].endswith("ranks"), result
        assert lines[1:] == ["True True False", "[2.0, 2.0]"], result


def test_a_work_that_is_only_polled() -> None:
    """The library lets a Work go that is complete, and the program needs no wait()."""
    result = run_job(
        HEAD
        + """
import mpicoll.torch
for _ in range(3):
    x = torch.ones(2)
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        pass
    print(x.tolist(), len(mpicoll.torch.group_of(dist.group.WORLD).unwaited))
""",
        2,
        limit=90,
    )
    assert result.returncode == 0, result
    assert result.out == ["[2.0, 2.0] 0\n" * 3] * 2, result


@pytest.mark.parametrize("end", ["", "dist.destroy_process_group()\n"])
def test_a_model_that_lives_to_the_end(end: str) -> None:
    """The Work that DistributedDataParallel holds goes when Python ends, without a word."""
    result = run_job(
        HEAD
        + MODEL
        + """
model = DistributedDataParallel(model, find_unused_parameters=True)
for _ in range(3):
    model(torch.ones(1, 10)).sum().backward()
"""
        + end,
        2,
        limit=90,
    )
    assert result.returncode == 0, result
    assert not any("Exception ignored" in each or "Traceback" in each for each in result.err), result


def test_an_error_that_nobody_knows_at_the_end_of_the_group() -> None:
    """destroy_process_group does not stop half-way: the error is a warning."""
    result = run_job(
        HEAD
        + """
import mpicoll, mpicoll.torch
group = mpicoll.torch.group_of(dist.group.WORLD)
future = mpicoll.all_reduce(torch.ones(3 + rank), group=group, async_op=True).get_future()
while not future.done():
    pass
dist.destroy_process_group()
print(dist.is_initialized())
""",
        2,
        limit=90,
    )
    assert result.returncode == 0, result
    assert result.out == ["False\n"] * 2, result
    assert all("RuntimeWarning: destroy_process_group: call " in each for each in result.err), result
    assert all("its ranks made different calls" in each for each in result.err), result


STEPS = """
for step in range(3):
    if rank == 1 and step == 2:
        {act}
    wrapped(torch.randn(4, 10)).sum().backward()  # THE LINE
dist.destroy_process_group()
"""

WRAPS = {
    "DDP": "wrapped = DistributedDataParallel(model)",
    "FSDP": "from torch.distributed.fsdp import fully_shard\nfully_shard(model[0])\nfully_shard(model)\nwrapped = model",
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_call_that_torch_makes_is_told_as_its(wrap: str) -> None:
    program = HEAD + MODEL + WRAPS[wrap] + STEPS.format(act="dist.all_reduce(torch.ones(2))  # EXTRA")
    result = run_job(program, 2, limit=120)
    assert result.returncode == 1, result
    assert not result.timed_out, result
    report = result.err[0]
    assert f"by {wrap}" in report, result
    assert f"job.py:{line_of(program)}" in report, result
    assert f"job.py:{line_of(program, '# EXTRA')}" in report, result
    assert "by FSDP(root)" in report or wrap != "FSDP", result
    assert "CollectiveMismatchError" in result.err[1], result


def test_the_bucket_of_a_call() -> None:
    """A hook of the program makes a call on one rank, after the first bucket of the backward pass."""
    program = (
        HEAD
        + """
first, second = torch.nn.Linear(40, 40), torch.nn.Linear(40, 40)
wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(first, second), bucket_cap_mb=0.005)
wrapped(torch.ones(2, 40)).sum().backward()  # the buckets are built anew
if rank == 1:
    first.register_full_backward_hook(lambda *_: dist.all_reduce(torch.ones(2)))  # EXTRA
wrapped(torch.ones(2, 40)).sum().backward()
"""
    )
    result = run_job(program, 2, limit=120)
    assert result.returncode == 1, result
    assert not result.timed_out, result
    assert "by DDP(bucket 1) at job.py" in result.err[0], result
    assert f"job.py:{line_of(program, '# EXTRA')}" in result.err[0], result


@pytest.mark.parametrize(
    ("act", "code", "told"),
    [
        ("raise ValueError('bad batch')", 1, "ValueError: bad batch"),
        ("sys.exit(5)", 5, ""),
        ("break", 1, "rank 1 ended the program"),
    ],
)
def test_a_rank_that_leaves_a_backward_pass(act: str, code: int, told: str) -> None:
    """The other ranks wait in C++ for a future, and come out with an error that names the rank."""
    end = "" if act != "break" else "if rank == 1: os.environ['X'] = ''"
    program = HEAD + MODEL + WRAPS["DDP"] + STEPS.format(act=act).replace("dist.destroy", f"{end}\n0 and dist.destroy")
    result = run_job(program, 2, limit=120)
    assert result.returncode == code, result
    assert not result.timed_out, result
    assert result.seconds < 60, result
    assert told in result.err[0], result
    assert not result.left_running, result


def test_a_rank_that_is_killed_in_a_step() -> None:
    program = HEAD + MODEL + WRAPS["DDP"] + STEPS.format(act="print('now', flush=True); time.sleep(60)")
    result = run_job(
        program, 2, limit=60, meanwhile=lambda job: (job.wait_for("now", 1, limit=60), job.signal(signal.SIGKILL, 1))
    )
    assert result.returncode != 0, result
    assert not result.timed_out, result
    assert not result.left_running, result


def test_the_limit_of_a_future_that_cpp_waits_for() -> None:
    """No rank has failed, and one does not come: the progress thread watches the limit."""
    program = (HEAD + MODEL + WRAPS["DDP"] + STEPS).replace("seconds=60", "seconds=4")
    result = run_job(program.format(act="time.sleep(12)"), 2, limit=120)
    assert result.returncode == 1, result
    assert not result.timed_out, result
    assert "Timed out" in result.err[0], result
    assert "by DDP" in result.err[0], result


START = """
import sys
import torch.distributed as dist
import mpicoll.torch
"""


def test_rank_and_size_that_contradict_mpi() -> None:
    result = run_job(
        START + "dist.init_process_group('mpicoll', init_method='mpi://', rank=0, world_size=3)", 2, limit=90
    )
    assert result.returncode != 0, result
    assert not result.timed_out, result
    assert "world_size" in result.stderr, result
    assert "MPI" in result.stderr, result


def test_rank_and_size_that_contradict_a_group_that_is_there() -> None:
    """The library was started first; the program's store brings a rank and a size of its own."""
    result = run_job(
        START
        + "import mpicoll\nmpicoll.init_process_group()\n"
        + "dist.init_process_group('mpicoll', store=dist.HashStore(), rank=0, world_size=3)",
        2,
        limit=90,
    )
    assert result.returncode == 1, result
    assert all("contradict MPI: this is rank" in each for each in result.err), result


def test_processes_of_torchrun_without_mpi(tmp_path: Path) -> None:
    """The error names a line that starts the program with MPI."""
    script = tmp_path / "train.py"
    script.write_text(START + "dist.init_process_group('mpicoll')")
    unset = ("OMPI_", "PMI", "MPI_", "HYDRA")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        str(script),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert result.returncode != 0
    assert "LaunchError: torchrun" in result.stderr, result.stderr
    assert "mpicoll run -n 2" in result.stderr, result.stderr


TUTORIAL = """
import os, sys
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, size):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29611")
    import mpicoll.torch

    try:
        dist.init_process_group("mpicoll", rank=rank, world_size=size)
    except mpicoll.LaunchError as error:
        print("dist.spawn" in str(error), flush=True)


if __name__ == "__main__":
    mp.spawn(run, (2,), 2)
"""


@pytest.mark.parametrize("launcher", [[], ["-m", "mpicoll", "run", "-n", "1"]], ids=["alone", "mpicoll run"])
def test_ranks_that_the_program_starts_itself(launcher: list[str], tmp_path: Path) -> None:
    """Processes of ``mp.spawn`` are told of ``mpicoll.spawn`` before MPI starts."""
    script = tmp_path / "tutorial.py"
    script.write_text(TUTORIAL)
    unset = ("OMPI_", "PMI", "MPI_", "HYDRA")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    command = [sys.executable, *launcher, str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert result.returncode == 0, result
    # Both processes write to one pipe, so that a line may end in another line.
    assert result.stdout.count("True") == 2, result
    assert "False" not in result.stdout, result


def test_pg_options_and_devices_that_are_not_served() -> None:
    result = run_job(
        HEAD
        + """
for make in (
    lambda: dist.new_group([0, 1], pg_options=object()),
    lambda: dist.all_reduce(torch.ones(2, device="meta")),
    lambda: dist.all_gather([torch.ones(2, device="meta"), torch.ones(2)], torch.ones(2)),
    lambda: dist.all_reduce(torch.ones(2), op=None),
):
    try:
        make()
    except Exception as error:
        print(type(error).__name__, error)
    else:
        print("no error")
x = torch.ones(2)
dist.all_reduce(x)
print(x.tolist())
dist.destroy_process_group()
""",
        2,
        limit=90,
    )
    assert result.returncode == 0, result
    for each in result.out:
        assert "no error" not in each, result
        assert each.count("meta") >= 2, result
        assert each.endswith("[2.0, 2.0]\n"), result


def test_another_backend_for_another_device() -> None:
    """Tensors on the CPU go through this library, tensors on another device through the backend asked for."""
    result = run_job(
        HEAD.replace('"mpicoll", init', '"cpu:mpicoll,meta:gloo", init')
        + """
other = dist.group.WORLD._others["meta"]
for group in (None, dist.new_group([0, 1])):
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    try:
        dist.all_reduce(torch.ones(2, device="meta"), group=group)  # this library would raise TypeError
    except RuntimeError as error:
        print("gloo:", error)
    print(x.tolist(), mpicoll.torch.group_of(group).calls, other.name())
dist.barrier()
dist.destroy_process_group(group)
plain = dist.new_group([0, 1], backend="gloo")
dist.all_reduce(x, group=plain)
print(x.tolist())
dist.destroy_process_group()
""",
        2,
        limit=120,
    )
    assert result.returncode == 0, result
    for each in result.out:
        lines = [line for line in each.splitlines() if not line.startswith("gloo:")]
        assert [line.split("]")[0] for line in lines] == ["[2.0, 2.0", "[2.0, 2.0", "[4.0, 4.0"], result
        assert lines[0].endswith("gloo"), result


def test_workers_that_import_the_program(tmp_path: Path) -> None:
    """Workers of a data loader that start anew import the module of the program, and are no ranks of MPI."""
    program = (
        HEAD.replace("dist.init_process_group", "if __name__ == '__main__':\n    dist.init_process_group").replace(
            "rank, size = ", "    rank, size = "
        )
        + """
    from torch.utils.data import DataLoader

    data = DataLoader(range(8), batch_size=4, num_workers=1, multiprocessing_context="spawn")
    print([batch.tolist() for batch in data])
    dist.destroy_process_group()
"""
    )
    result = run_job(program, 2, limit=150)
    assert result.returncode == 0, result
    assert result.out == ["[[0, 1, 2, 3], [4, 5, 6, 7]]\n"] * 2, result


def test_the_limit_of_the_environment() -> None:
    """torch passes its own default if the program gives no limit."""
    result = run_job(
        HEAD.replace(", timeout=LIMIT", "") + "print(mpicoll.torch.group_of().timeout)\ndist.destroy_process_group()",
        2,
        limit=90,
        env={"MPICOLL_TIMEOUT": "77"},
    )
    assert result.out == ["77.0\n"] * 2, result


def test_an_error_of_the_program_around_one_of_the_library() -> None:
    result = run_job(
        HEAD
        + """
try:
    dist.all_reduce(torch.ones(3 + rank), async_op=True).get_future().wait()
except RuntimeError as error:
    raise RuntimeError(f"in file data.pt: {error}") from error
""",
        2,
        limit=90,
    )
    assert result.returncode == 1, result
    assert "RuntimeError: in file data.pt: Got" in result.stdout + result.stderr, result
    assert "went into Futures" not in result.stdout + result.stderr, result


def test_an_error_in_a_future_that_no_code_reads() -> None:
    """A hook of DDP whose callback does not read its Future: the report is printed when the program ends."""
    result = run_job(
        HEAD
        + MODEL
        + """
model = DistributedDataParallel(model)
def hook(state, bucket):
    part = bucket.buffer()[: 5 + rank]
    return dist.all_reduce(part, async_op=True).get_future().then(lambda future: bucket.buffer())  # THE LINE
model.register_comm_hook(None, hook)
model(torch.ones(2, 10)).sum().backward()
print("went on", flush=True)
dist.destroy_process_group()
""",
        2,
        limit=90,
    )
    assert result.returncode == 0, result
    whole = result.stdout + result.stderr
    assert whole.count("went on") == 2, result
    assert whole.count("errors of 1 asynchronous call went into Futures of torch") == 2, result
    assert "rank 1: all_reduce" in whole, result


def test_an_error_of_the_program_after_a_second_init() -> None:
    """Each init of torch wraps the hook for uncaught exceptions: the error is printed once, and told to the other rank."""
    result = run_job(
        HEAD
        + """
dist.destroy_process_group()
dist.init_process_group("mpicoll", init_method="mpi://", timeout=LIMIT)
if rank == 1:
    raise ValueError("my own mistake")
dist.all_reduce(torch.ones(3))
""",
        2,
        limit=90,
    )
    assert result.returncode == 1, result
    assert not result.timed_out, result
    assert result.err[1].count("ValueError: my own mistake") == 1, result
    assert "Error in sys.excepthook" not in result.err[1], result
    assert "PeerFailedError: rank 1 failed: ValueError: my own mistake (at job.py:" in result.err[0], result
