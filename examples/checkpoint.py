"""A solver that saves its state when the job is about to end, and continues from it: `on_signal`, `should_stop`.

    mpicoll run -n 4 examples/checkpoint.py state.npz

A plate has given temperatures on its edges; each inner point becomes the mean of its four neighbours, repeatedly, until
nothing changes. The rows are divided between the ranks. If a signal (SIGUSR1 of `sbatch --signal`, SIGTERM of a
preemption) reaches any rank, all ranks handle the signal after the same sweep: they save the state and end. Started again, on
any number of ranks, the program continues from the file, and removes the file when the result is complete.
`slurm/requeue.sbatch` is a job for this program.
"""

import argparse
import os
import pathlib
import sys
import time

import numpy as np

import mpicoll as dist

parser = argparse.ArgumentParser()
parser.add_argument("state", type=pathlib.Path, nargs="?", default="checkpoint.npz")
parser.add_argument("--size", type=int, default=24, help="rows and columns")
parser.add_argument(
    "--pause", type=float, default=0.0, help="seconds that each sweep takes longer, to see something happen"
)
options = parser.parse_args()
path, size = options.state, options.size

dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
x = np.linspace(0.0, 1.0, size)
exact = x[:, None] ** 2 - x[None, :] ** 2  # the values on the edges, and the solution inside


def load():
    """Return the number of sweeps made and the plate, from the file or in the initial state. Only rank 0 reads the file."""
    if path.exists():
        with np.load(path) as file:
            return int(file["sweeps"]), file["plate"]
    plate = exact.copy()
    plate[1:-1, 1:-1] = 0.0
    return 0, plate


sweeps, plate = dist.run_first(load)
if plate.shape != exact.shape:
    sys.exit(f"{path} is of a plate with {len(plate)} rows: remove it, or give --size {len(plate)}")
began = sweeps
bounds = np.linspace(1, size - 1, ranks + 1).astype(int)
mine = plate[bounds[rank] - 1 : bounds[rank + 1] + 1].copy()  # this rank's rows, and a row above and below


def exchange():
    """Get the row above from the rank above, and the row below from the rank below."""
    works = []
    if rank > 0:
        works += [dist.isend(mine[1], rank - 1), dist.irecv(mine[0], rank - 1)]
    if rank < ranks - 1:
        works += [dist.isend(mine[-2], rank + 1), dist.irecv(mine[-1], rank + 1)]
    for work in works:
        work.wait()


def collect():
    """Put the plate together on rank 0."""
    parts = [None] * ranks if rank == 0 else None
    dist.gather_object(mine[1:-1], parts)
    if rank == 0:
        plate[1:-1] = np.concatenate(parts)


def save(number):
    """Save the state after a signal; all ranks call this after the same sweep."""
    collect()
    with dist.zero_first("checkpoint") as turn:  # the other ranks wait until the file is written
        if turn.is_leader:
            new = path.with_name(path.name + ".new")
            with new.open("wb") as file:
                np.savez(file, sweeps=sweeps, plate=plate)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)  # atomic: a reader finds the whole old state or the whole new one
    print(f"rank {rank}: signal {number}, state saved after {sweeps} sweeps", flush=True)


dist.on_signal(save)
if rank == 0:
    print(f"starting after {began} sweeps", flush=True)
change = np.ones(1)
stopped = False
while change[0] > 1e-9 and not stopped:
    exchange()
    inside = (mine[:-2, 1:-1] + mine[2:, 1:-1] + mine[1:-1, :-2] + mine[1:-1, 2:]) / 4
    change[0] = np.abs(inside - mine[1:-1, 1:-1]).max(initial=0.0)
    mine[1:-1, 1:-1] = inside
    sweeps += 1
    dist.all_reduce(change, dist.ReduceOp.MAX)
    time.sleep(options.pause)
    stopped = dist.should_stop()  # calls save() on all ranks before it becomes true

if not stopped:
    collect()
    error = float(np.abs(plate - exact).max())
    if rank == 0:
        path.unlink(missing_ok=True)
        print(f"done after {sweeps} sweeps, {sweeps - began} of them since the start; error {error:.1e}", flush=True)
        if error > 1e-6:
            sys.exit(f"the plate is wrong by {error}")
dist.destroy_process_group()
