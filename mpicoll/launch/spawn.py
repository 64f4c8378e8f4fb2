"""Run a function on several MPI ranks from a plain `python script.py`: torch.multiprocessing's ``spawn``."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import spawn as mp_spawn
from pathlib import Path
from typing import Any

from mpicoll.errors import LaunchError
from mpicoll.launch.job_folder import read_records

CHILD = Path(__file__).with_name("spawn_child.py")
bootstrapping = False  # True in a rank while it imports the script that called spawn


class ProcessException(Exception):
    """A rank of `spawn` failed; ``error_index`` is its rank, ``error_pid`` its process."""

    def __init__(self, msg: str, error_index: int, error_pid: int) -> None:
        super().__init__(msg)
        self.msg = msg
        self.error_index = error_index
        self.error_pid = error_pid

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.msg, self.error_index, self.error_pid)

    @property
    def pid(self) -> int:
        """The process id of the rank that failed."""
        return self.error_pid


class ProcessRaisedException(ProcessException):
    """The function raised on a rank; the message holds that rank's traceback."""


class ProcessExitedException(ProcessException):
    """A rank ended with an exit code other than 0, or was killed by the signal ``signal_name``."""

    def __init__(
        self, msg: str, error_index: int, error_pid: int, exit_code: int, signal_name: str | None = None
    ) -> None:
        super().__init__(msg, error_index, error_pid)
        self.exit_code = exit_code
        self.signal_name = signal_name

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.msg, self.error_index, self.error_pid, self.exit_code, self.signal_name)


class SpawnContext:
    """A job that `spawn` started. The job ends with this process at the latest."""

    def __init__(self, directory: Path, nprocs: int, process: subprocess.Popen[bytes], daemon: bool) -> None:
        self._directory = directory
        self._nprocs = nprocs
        self._process = process
        self._daemon = daemon
        self._error: Exception | None = None
        self._done = False
        atexit.register(self._at_exit)

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end of the job; return False if ``timeout`` seconds pass before the end.

        Raises:
            ProcessRaisedException: the function raised on a rank; the first rank that failed is reported.
            ProcessExitedException: a rank ended with an exit code other than 0, or by a signal.
            LaunchError: the job could not be started.
        """
        if not self._done:
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                return False
            except KeyboardInterrupt:
                self._end()
                raise
            self._finish()
        if self._error is not None:
            raise self._error
        return True

    def pids(self) -> list[int]:
        """Return the process ids of all ranks, in rank order; wait until all ranks have started."""
        while True:
            known = {record.rank: record.value for record in read_records(self._directory) if record.kind == "pid"}
            if len(known) == self._nprocs or self._process.poll() is not None:
                return [known[rank] for rank in sorted(known)]
            time.sleep(0.01)

    def _finish(self) -> None:
        try:
            self._error = outcome(self._directory, self._process.returncode)
        finally:
            self._done = True
            if self._process.stdin is not None:
                self._process.stdin.close()
            atexit.unregister(self._at_exit)
            shutil.rmtree(self._directory, ignore_errors=True)

    def _end(self) -> None:
        """End the job and wait for it: within two seconds."""
        if self._done:
            return
        with contextlib.suppress(OSError):
            self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._finish()

    def _at_exit(self) -> None:
        if self._daemon:
            self._end()
        elif not self._done:
            self._process.wait()
            self._finish()


def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> SpawnContext | None:
    """Run ``fn(rank, *args)`` on ``nprocs`` MPI ranks on this host, each a new process.

    Called from a plain ``python script.py``, below ``if __name__ == "__main__":`` (each rank imports the script).
    The ranks form one MPI world, so ``fn`` may call `init_process_group` without arguments.

    Args:
        fn: a function that can be imported: defined at the top level of a module or of the script.
        args: its arguments after the rank; they are sent by pickle.
        nprocs: number of ranks.
        join: whether to wait for the end of the job and return None; False: return a `SpawnContext` at once.
        daemon: with ``join=False``: whether the job ends when this process ends; False: this process waits for the job.
        start_method: only ``"spawn"``: MPI ranks are always new processes.

    Raises:
        ProcessRaisedException: ``fn`` raised on a rank. If other ranks failed in consequence, the first rank is reported.
        ProcessExitedException: a rank ended with an exit code other than 0, or by a signal.
        LaunchError: no MPI that can start the ranks is installed.
        pickle.PicklingError: ``fn`` or ``args`` cannot be sent to another process.

    Example: ``examples/spawn.py``. Reference: ``torch.multiprocessing.spawn``.
    """
    if start_method != "spawn":
        raise ValueError(f'start_method={start_method!r}: MPI ranks are new processes, only "spawn" is possible')
    if isinstance(nprocs, bool) or not isinstance(nprocs, int):
        raise TypeError(f"nprocs must be an int, not {type(nprocs).__name__}")
    if nprocs < 1:
        raise ValueError(f"nprocs={nprocs}: a job has at least one rank")
    if bootstrapping:
        raise RuntimeError(
            "spawn was called while a rank was importing the script. Put the call below "
            '`if __name__ == "__main__":`, so that importing the script does not start another job'
        )
    payload = _pickled(fn, args)
    directory = Path(tempfile.mkdtemp(prefix="mpicoll-run-"))
    try:
        (directory / "payload").write_bytes(payload)
        preparation = mp_spawn.get_preparation_data("mpicoll.spawn")
        preparation.pop("authkey", None)  # cannot be pickled into a file
        (directory / "preparation").write_bytes(pickle.dumps(preparation))
        (directory / "start").write_text(json.dumps({"nprocs": nprocs, "sys_path": preparation["sys_path"]}))
        executable = os.fsdecode(mp_spawn.get_executable() or sys.executable)
        sys.stdout.flush()
        # Another process runs the job, so that this process needs no threads and no signal handlers. The pipe ends when this
        # process ends.
        process = subprocess.Popen([executable, str(CHILD), str(directory), "job"], stdin=subprocess.PIPE)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    context = SpawnContext(directory, nprocs, process, daemon)
    if not join:
        return context
    context.join()
    return None


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    name = getattr(fn, "__qualname__", repr(fn))
    main = sys.modules["__main__"]
    if getattr(fn, "__module__", None) == "__main__" and getattr(main, "__file__", None) is None:
        raise pickle.PicklingError(
            f"spawn cannot run {name}: it was defined in an interactive session, which the ranks cannot import. "
            "Put it into a file"
        )
    try:
        return pickle.dumps((fn, tuple(args)), protocol=5)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if "<lambda>" in name or "<locals>" in name:
            advice = "the ranks import it by name, so it must be defined at the top of a module: no lambda, no function inside another"  # noqa: E501
        else:
            advice = "the function and its arguments are sent to the ranks by pickle"
        raise pickle.PicklingError(f"spawn cannot run {name}: {advice} ({error})") from error


def outcome(directory: Path, code: int) -> Exception | None:
    """Return the exception that `spawn` raises at the end of the job, from the files that the job left, or None.

    A rank that blames another rank is not recorded as failed, so the first recorded failure is the root cause.
    """
    try:
        ended = json.loads((directory / "outcome").read_text())
    except (OSError, ValueError):
        return LaunchError(f"the process that ran the job ended with code {code} and without a report")
    if ended["error"] is not None:
        return LaunchError(ended["error"])
    if ended["code"] == 0:
        return None
    rank = -1 if ended["rank"] is None else int(ended["rank"])
    pid = next((row.value for row in read_records(directory) if row.kind == "pid" and row.rank == rank), -1)
    try:
        text = (directory / f"error.{rank}").read_text()
        return ProcessRaisedException(f"\n\n-- Rank {rank} ended with this error:\n{text}", rank, pid)
    except OSError:
        pass  # the rank did not raise
    subject = "the job" if rank < 0 else f"rank {rank}"
    number = ended["code"] - 128
    if number in set(signal.Signals):
        name = signal.Signals(number).name
        return ProcessExitedException(f"{subject} was ended by signal {name}", rank, pid, -number, name)
    return ProcessExitedException(f"{subject} ended with exit code {ended['code']}", rank, pid, ended["code"])
