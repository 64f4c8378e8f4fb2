"""Start the ranks from a plain script, as torch.multiprocessing.spawn does, and catch a rank's exception in the script.

    python examples/spawn.py

The script needs no mpicoll run and no mpiexec (but also runs under mpiexec, with `-n 1`). The first job adds up the ranks. In
the second job rank 1 raises while rank 0 waits, and this process raises an error with the traceback of rank 1.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

import mpicoll as dist


def add_up(rank: int, folder: Path) -> None:
    """Add up the numbers of all ranks, and leave the sum in a file."""
    dist.init_process_group()
    x = np.array([float(rank)])
    dist.all_reduce(x)
    (folder / f"{rank}.txt").write_text(f"{x[0]:g}")
    dist.destroy_process_group()


def fail_on_one(rank: int) -> None:
    """Raise on rank 1, while the other ranks wait for it."""
    dist.init_process_group()
    if rank == 1:
        raise ValueError("rank 1 has read bad data")
    dist.barrier()


def main() -> None:
    """Run both jobs."""
    with tempfile.TemporaryDirectory() as name:
        dist.spawn(add_up, (Path(name),), nprocs=3)
        sums = [path.read_text() for path in sorted(Path(name).iterdir())]
    print(f"three ranks added up their numbers: {sums}")
    if sums != ["3", "3", "3"]:
        sys.exit(f"expected 0 + 1 + 2 = 3 on each of three ranks, got {sums}")

    try:
        dist.spawn(fail_on_one, nprocs=2)
    except dist.ProcessRaisedException as error:
        print(f"spawn raised {type(error).__name__} for rank {error.error_index}:{error}")
        if error.error_index != 1 or "rank 1 has read bad data" not in str(error):
            sys.exit("the exception is not that of rank 1")
    else:
        sys.exit("rank 1 failed, and spawn did not say so")


# The ranks import this script: without the guard each rank would start jobs, too.
if __name__ == "__main__":
    main()
