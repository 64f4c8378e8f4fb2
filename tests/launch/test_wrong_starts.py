"""Starts that cannot work are refused with what was found and what would work, by every process, at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from launch.launching import OTHER, RUN, call, write

from mpicoll.launch.mpi_library import find_library
from mpicoll.launch.mpiexec import find_mpiexec, identify

SCRIPT = """
    import sys
    import mpicoll as dist
    try:
        dist.init_process_group(**eval(sys.argv[1]))
        print("size", dist.get_world_size(), flush=True)
        dist.destroy_process_group()
    except (dist.LaunchError, ValueError) as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\\n")
        sys.stdout.flush()
        sys.exit(9)
"""
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "0",
}
BATCH = {name: value for name, value in STEP.items() if "STEP" not in name}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}


CHILDREN = """
    import multiprocessing, sys
    import mpicoll as dist

    def run(rank, size):
        try:
            dist.init_process_group(rank=rank, world_size=size)
            sys.stdout.write("not refused\\n")
        except dist.LaunchError as error:
            sys.stdout.write(f"{error}\\n")
        sys.stdout.flush()

    if __name__ == "__main__":
        context = multiprocessing.get_context(sys.argv[1])
        if "join" in sys.argv:
            dist.init_process_group()
        children = [context.Process(target=run, args=(rank, 2)) for rank in range(2)]
        for child in children:
            child.start()
        for child in children:
            child.join()
"""


NAMES = """
    import multiprocessing, sys
    import mpicoll as dist
    from mpicoll import all_reduce, init_process_group
    from mpicoll.device_mesh import init_device_mesh
    from mpicoll.training import DistributedSampler

    @dist.rank_zero_only
    def log(text):
        print(text)

    def compute(number):
        mpi = sys.modules.get("mpi4py.MPI")
        sys.stdout.write(f"computes, MPI started: {mpi is not None and mpi.Is_initialized()}\\n")
        sys.stdout.flush()

    def run(rank, size):
        try:
            init_process_group(rank=rank, world_size=size)
            sys.stdout.write("not refused\\n")
        except dist.LaunchError as error:
            sys.stdout.write(f"{error}\\n")
        sys.stdout.flush()

    if __name__ == "__main__":
        context = multiprocessing.get_context(sys.argv[1])
        if "join" in sys.argv:
            init_process_group()
        children = [context.Process(target=compute, args=(1,)), context.Process(target=run, args=(0, 2))]
        for child in children:
            child.start()
        for child in children:
            child.join()
            assert child.exitcode == 0, child.exitcode
"""


def family() -> str:
    return find_library().family


@pytest.mark.parametrize("environ", [STEP, TORCHRUN], ids=["srun without plugin", "torchrun"])
def test_world_of_one_in_a_job_of_many(environ: dict[str, str], tmp_path: Path) -> None:
    """A launcher that MPI does not understand has started four: each of them says so instead of running alone."""
    result = call([sys.executable, write(tmp_path, SCRIPT), "{}"], env=environ)
    assert result.code == 9, result
    assert result.out.startswith("LaunchError: ")
    assert "-n 4" in result.out
    assert "world of size 1" in result.out


def test_serial_run_in_an_allocation(tmp_path: Path) -> None:
    """``python script.py`` in an sbatch script is a world of one: a warning, unless it is asked for, and no error."""
    script = write(tmp_path, SCRIPT)
    result = call([sys.executable, script, "{}"], env=BATCH)
    assert (result.code, result.out) == (0, "size 1\n"), result
    assert "UserWarning: Slurm job 7 was given 4 tasks, but only this process was started" in result.err
    assert f"`mpicoll run -n 4 {script} '{{}}'`" in result.err
    assert result.err.startswith(f"{script}:5: ")
    result = call([sys.executable, script, "{'world_size': 1}"], env=BATCH)
    assert (result.code, result.out) == (0, "size 1\n"), result
    assert "UserWarning" not in result.err


def test_contradicting_rank_and_size(tmp_path: Path) -> None:
    """rank= and world_size= that MPI does not confirm are refused on all ranks, with both sides."""
    script = write(tmp_path, SCRIPT)
    result = call([*RUN, "-n", "2", script, "{'world_size': 3}"])
    assert result.code == 9, result
    assert "ValueError: init_process_group(world_size=3) contradicts MPI" in result.out
    result = call([sys.executable, script, "{'rank': 0, 'world_size': 4}"])
    assert result.code == 9, result
    assert f"mpicoll run -n 4 {script} " in result.out


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
@pytest.mark.parametrize("parent", ["alone", "join"])
def test_children_of_multiprocessing(parent: str, method: str, tmp_path: Path) -> None:
    """A child that starts MPI is told of dist.spawn, without a launcher and under each, also if its parent never starts MPI."""
    script = write(tmp_path, CHILDREN)
    mpiexec = find_mpiexec(find_library())
    options = ["--allow-run-as-root", "--oversubscribe"] if mpiexec.family == "openmpi" else []
    python = [sys.executable, script, method, parent]
    jobs = [python, [*RUN, "-n", "1", *python[1:]], [mpiexec.path, *options, "-n", "2", *python]]
    for job, number in zip(jobs, (2, 2, 4), strict=True):
        result = call(job)
        assert result.code == 0, result
        assert result.out.count("call `dist.spawn(run, args, nprocs)` in place of `mp.spawn`") == number, result
        assert result.out.count(f"{script} {method} {parent}`. Or start no processes") == number, result
        assert "not refused" not in result.out


@pytest.mark.parametrize(
    ("parent", "method"),
    [
        ("alone", "forkserver"),
        ("join", "spawn"),
        pytest.param("alone", "spawn", marks=pytest.mark.slow),
        pytest.param("join", "forkserver", marks=pytest.mark.slow),
    ],
)
def test_children_that_import_names_at_the_top(parent: str, method: str, tmp_path: Path) -> None:
    """A child that imports the script with names of the library starts no MPI in a job: it may compute, and is no rank."""
    script = write(tmp_path, NAMES)
    mpiexec = find_mpiexec(find_library())
    options = ["--allow-run-as-root", "--oversubscribe"] if mpiexec.family == "openmpi" else []
    python = [sys.executable, script, method, parent]
    jobs = [python, [*RUN, "-n", "1", *python[1:]], [mpiexec.path, *options, "-n", "2", *python]]
    for job, number in zip(jobs, (1, 1, 2), strict=True):
        result = call(job)
        assert result.code == 0, result
        assert result.out.count("computes, MPI started: ") == number, result
        assert result.out.count("computes, MPI started: False") == number or job is python, result
        assert result.out.count("call `dist.spawn(run, args, nprocs)` in place of `mp.spawn`") == number, result
        assert "not refused" not in result.out


@pytest.fixture
def other_mpiexec() -> str:
    """The mpiexec of an environment with another MPI."""
    venv = os.environ.get(OTHER)
    if not venv:
        pytest.skip(f"{OTHER} does not name an environment with another MPI")
    path = Path(venv, "bin", "mpiexec").resolve()
    found = identify(str(path))
    assert found is not None
    assert found.family != family()
    return str(path)


def test_mpiexec_of_another_mpi(other_mpiexec: str, tmp_path: Path) -> None:
    """Started by another MPI's mpiexec, every rank gets LaunchError; never N silent copies."""
    options = ["--allow-run-as-root", "--oversubscribe"] if family() == "mpich" else []
    script = write(tmp_path, SCRIPT)
    command = [other_mpiexec, *options, "-n", "2", sys.executable, script, "{}"]
    result = call(command)
    assert result.code != 0, result
    assert "LaunchError: " in result.out
    assert f"mpicoll run -n 2 {script} " in result.out
    assert "size 1" not in result.out.replace("world of size 1", "")


def test_mpicoll_run_does_not_take_it_from_path(other_mpiexec: str, tmp_path: Path) -> None:
    """`mpicoll run` finds its own mpiexec although another MPI's is first on PATH, and refuses that one by name."""
    env = {"PATH": f"{os.path.dirname(other_mpiexec)}:{os.environ['PATH']}"}
    script = write(tmp_path, SCRIPT)
    result = call([*RUN, "-n", "2", script, "{}"], env=env)
    assert (result.code, result.out) == (0, "size 2\nsize 2\n"), result
    result = call([*RUN, "-n", "2", "--mpiexec", other_mpiexec, script, "{}"])
    assert result.code == 2
    assert "belongs to" in result.err
    result = call([sys.executable, "-m", "mpicoll", "doctor"], env=env)
    assert result.code == 0, result
    assert "does not belong to" in result.out
    assert find_mpiexec(find_library()).path in result.out
