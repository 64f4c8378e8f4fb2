"""What the tests of `spawn` run on the ranks: the ranks import this file, not the tests."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import mpicoll as dist


def work(rank: int, folder: Path, how: str) -> None:
    """Be a rank."""
    import numpy as np

    dist.init_process_group()
    x = np.ones(1)
    dist.all_reduce(x)
    (folder / f"rank.{rank}").write_text(f"{dist.get_rank()} {dist.get_world_size()} {x[0]:g} {os.getpid()}")
    if how == "wait":
        time.sleep(50)
    if rank == 1:
        if how == "raise":
            raise ValueError("a bad day on rank 1")
        if how == "exit":
            sys.exit(5)
        if how == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
    elif how != "fine":
        dist.all_reduce(x)  # rank 1 never comes
    dist.destroy_process_group()


def alone(rank: int) -> None:
    """Do without MPI."""
    if rank == 1:
        raise KeyError("without MPI")
