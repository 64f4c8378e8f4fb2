"""The programs of the processes of `spawn`: the process that runs the job, and the ranks. Started as a file, not as a module.

Until the caller's ``sys.path`` is restored, only the standard library can be imported here.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import shutil
import sys
import traceback
from pathlib import Path
from types import TracebackType


def supervise_job(directory: Path, nprocs: int) -> int:
    """Run the job and write its result to the file ``outcome``."""
    from mpicoll.errors import LaunchError
    from mpicoll.launch.job import Options, run_job_for_spawn

    error: str | None = None
    code, rank = 1, None
    try:
        ended = run_job_for_spawn(Options(nprocs=nprocs), [sys.executable, __file__, str(directory)], directory)
        code, rank = ended.code, ended.rank
    except LaunchError as problem:
        error = str(problem)
    if select.select([0], [], [], 0)[0]:  # the pipe has ended: the caller has ended
        shutil.rmtree(directory, ignore_errors=True)
        return code
    unfinished = directory / "outcome.new"
    unfinished.write_text(json.dumps({"code": code, "rank": rank, "error": error}))
    unfinished.rename(directory / "outcome")
    return code


def run_rank(directory: Path) -> None:
    """Run one rank: restore the caller's ``__main__`` and call the function."""
    from multiprocessing import spawn as mp_spawn

    from mpicoll.launch import spawn as our_spawn
    from mpicoll.launch.environment import read_launcher
    from mpicoll.launch.job_folder import append_record

    rank = read_launcher(os.environ).rank
    if rank is None:
        raise RuntimeError("started without a launcher")
    append_record("pid", rank, os.getpid())
    sys.excepthook = silent
    try:
        our_spawn.bootstrapping = True
        mp_spawn.prepare(pickle.loads((directory / "preparation").read_bytes()))
        fn, args = pickle.loads((directory / "payload").read_bytes())
        our_spawn.bootstrapping = False
        fn(rank, *args)
    except Exception as error:
        record_exception(directory, rank, error)
        sys.stdout.flush()
        if sys.excepthook is silent:
            end_mpi()
        raise  # to the hook that ends the job, if the library has installed one


def record_exception(directory: Path, rank: int, error: Exception) -> None:
    """Record a rank's exception for the caller of `spawn`, before any other rank can fail in consequence."""
    from mpicoll.errors import GroupBrokenError, PeerExitedError, PeerFailedError
    from mpicoll.launch.job_folder import append_record

    # The first frame is that of run_rank.
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    text = "".join(traceback.format_exception(type(error), error, frames))
    blames_peer = isinstance(error, (PeerFailedError, PeerExitedError, GroupBrokenError))
    unfinished = directory / f"error.{rank}.new"
    unfinished.write_text(text, errors="backslashreplace")
    unfinished.rename(directory / f"error.{rank}")
    append_record("blame" if blames_peer else "fail", rank, 1)


def silent(kind: type[BaseException], value: BaseException, frames: TracebackType | None) -> None:
    """Print nothing: the caller of `spawn` gets the traceback."""


def end_mpi() -> None:
    """Abort the job if MPI is initialised, so that no rank waits for this rank."""
    module = sys.modules.get("mpi4py.MPI")
    if module is not None and module.Is_initialized() and not module.Is_finalized():
        module.COMM_WORLD.Abort(1)


def main(directory: Path, role: str) -> int:
    """Run this process in its role: ``"job"`` or ``"rank"``."""
    start = json.loads((directory / "start").read_text())
    sys.path[:] = start["sys_path"]
    if role == "job":
        return supervise_job(directory, start["nprocs"])
    run_rank(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), (sys.argv[2:] or ["rank"])[0]))
