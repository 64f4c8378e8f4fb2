"""Start ranks in ways that cannot work: each start is refused with its cause and a command that works.

    mpicoll run -n 1 examples/wrong_start.py

The wrong starts are simulated: a child process gets the environment variables that srun without an MPI plugin,
torchrun, or a rank that starts a child would set.
"""

import os
import subprocess
import sys

import mpicoll as dist

CHILD = """
import sys
import mpicoll as dist
try:
    dist.init_process_group(**eval(sys.argv[1]))
except (dist.LaunchError, ValueError) as error:
    print(f"{type(error).__name__}: {error}")
    sys.exit(9)
"""
LAUNCHER = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "MPI_LOCAL", "SLURM_", "MPICOLL_")
SRUN = {
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "2",
}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2"}


def must_be_refused(title: str, environ: dict[str, str], arguments: str = "{}") -> None:
    """Run a child with this environment, and end with an error if the child starts."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, arguments], env=environ, capture_output=True, text=True, timeout=60
    )
    print(f"{title}\n    {done.stdout.strip()}")
    if done.returncode != 9:
        sys.exit(f"{title}: the child started, with exit code {done.returncode}\n{done.stderr}")


clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
must_be_refused("srun -n 4 without --mpi:", {**clean, **SRUN})
must_be_refused("torchrun with 4 ranks:", {**clean, **TORCHRUN})
must_be_refused("python script.py, and world_size=4:", clean, "{'world_size': 4}")
must_be_refused("python script.py, and rank=2:", clean, "{'rank': 2}")

dist.init_process_group()
must_be_refused("a child of a rank that starts MPI itself:", dict(os.environ))
dist.destroy_process_group()
