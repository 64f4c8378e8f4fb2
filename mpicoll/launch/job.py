"""Run a planned job: start the launcher, copy the output, end all processes when asked, report how the job ended."""

from __future__ import annotations

import ctypes
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from mpicoll.errors import LaunchError
from mpicoll.launch.environment import Family, allocated_tasks
from mpicoll.launch.job_folder import RUN_DIR, Record, read_records, read_report, write_ours
from mpicoll.launch.mpi_library import MpiLibrary, conflicting_wheels, find_library
from mpicoll.launch.mpiexec import (
    Launch,
    find_mpiexec,
    is_local,
    launch_command,
    parameter_files,
    settings_in_files,
    srun_command,
    this_machine,
)
from mpicoll.launch.slurm import find_plugins, how
from mpicoll.launch.streams import LauncherOutput, Streams, is_stdin_usable, write_all

GRACE = 1.0  # seconds between asking the launcher to end the job and killing the rest of the job
FAR_GRACE = 10.0  # the same if ranks are on other hosts, which only the launcher can reach
TIMED_OUT = 124  # as timeout(1)
LISTENER = b"listener thread failed to start"  # Open MPI 5.0, in about 2 of 90 starts on a busy machine
SLOTS = b"not enough slots"  # Open MPI calls the tasks of an allocation and the places of a hostfile slots
_SIGNALS = {129, 130, 131, 134, 137, 143, 9, 15}


@dataclass(frozen=True)
class Options:
    """The options of `mpicoll run`."""

    nprocs: int = 1
    tag_output: bool = False
    timeout: float | None = None
    mpiexec: str | None = None
    host: str | None = None
    hostfile: str | None = None
    extra: tuple[str, ...] = ()
    launcher: Literal["auto", "mpiexec", "srun"] = "auto"


@dataclass(frozen=True)
class Outcome:
    """The job's exit code, the rank that failed first if it is known, and whether a rank has ended the job by intent."""

    code: int
    rank: int | None = None
    intended: bool = False


def decide(records: Sequence[Record], mpiexec_code: int, family: Family, *, local: bool = True) -> Outcome:
    """Return the exit code of the rank that failed first; pure.

    The first recorded failure counts, with one exception: after ``MPI_Abort(7)`` the launcher kills every rank, the caller
    included, and only the launcher knows the 7. The exception does not apply if a rank that failed later, with its own code,
    ended the job, for example because it lost the killed rank.
    """
    code = 128 - mpiexec_code if mpiexec_code < 0 else mpiexec_code
    if stop := next((record for record in records if record.kind == "stop"), None):
        return Outcome(stop.value, intended=True)
    first = next((record for record in records if record.kind in ("exit", "fail") and record.value != 0), None)
    if first is None or (not local and code != 0):
        return Outcome(code)
    killed = first.kind == "exit" and first.value in (129, 130, 131, 137, 143)
    # MPICH's mpiexec combines the codes of all ranks by OR; codes of signals only combine to one of _SIGNALS again.
    signals = _SIGNALS if family == "mpich" else {first.value}
    later = {record.value for record in records if record.kind in ("fail", "blame")}
    if killed and code != 0 and code not in signals | later:
        return Outcome(code)
    return Outcome(first.value, first.rank)


def plan_job(options: Options, command: Sequence[str], run_dir: Path, environ: Mapping[str, str]) -> Launch:
    """Find the MPI library and its launcher on this machine, and plan the job.

    Raises:
        LaunchError: there is no MPI, no mpiexec belongs to it, or two MPIs have overwritten each other.
    """
    conflict = conflicting_wheels()
    if conflict is not None:
        raise LaunchError(conflict)
    library = find_library(environ=environ)
    try:
        mpiexec = None if options.launcher == "srun" else find_mpiexec(library, options.mpiexec)
    except LaunchError:
        # A Cray has no mpiexec, and other sites may have srun only.
        if options.launcher != "auto" or options.mpiexec is not None or allocated_tasks(environ) is None:
            raise
        mpiexec = None
    if mpiexec is None:
        return _plan_srun(library, options, command, run_dir, environ)
    openmpi = mpiexec.family == "openmpi"
    return launch_command(
        mpiexec,
        options.nprocs,
        command,
        environ,
        this_machine(),
        run_dir=str(run_dir),
        tag_output=options.tag_output,
        host=options.host,
        hostfile=options.hostfile,
        extra=options.extra,
        site_settings=settings_in_files(parameter_files(mpiexec.path, environ)) if openmpi else frozenset(),
        from_wheel=library.path.startswith(sys.prefix + os.sep),
    )


def _plan_srun(
    library: MpiLibrary, options: Options, command: Sequence[str], run_dir: Path, environ: Mapping[str, str]
) -> Launch:
    way = how(library.text, find_plugins(environ), environ)
    srun = shutil.which("srun", path=environ.get("PATH"))
    if way.mpi is None or srun is None:
        raise LaunchError(f"srun cannot start {library.name} {library.version}: {way.reason}")
    if options.host is not None or options.hostfile is not None:
        raise LaunchError(
            "--host and --hostfile are options of mpiexec; name nodes to srun with --mpiexec-args='--nodelist=n1,n2'"
        )
    return srun_command(
        srun,
        way.mpi,
        library.family,
        options.nprocs,
        command,
        environ,
        run_dir=str(run_dir),
        tag_output=options.tag_output,
        extra=options.extra,
        from_wheel=library.path.startswith(sys.prefix + os.sep),
    )


class Job:
    """One job. One thread calls `run`; any thread or signal handler may call `stop`."""

    def __init__(
        self,
        options: Options,
        command: Sequence[str],
        environ: Mapping[str, str] | None = None,
        *,
        stdin: bool = False,
        directory: Path | None = None,
        lifeline: int | None = None,
        sinks: tuple[int, int] = (1, 2),
        name: str = "mpicoll run",
    ) -> None:
        self.options = options
        self.directory = directory or Path(tempfile.mkdtemp(prefix="mpicoll-run-"))  # mode 0700
        self._own_directory = directory is None
        self._lifeline = lifeline  # a pipe: the job ends when the pipe ends
        self._sinks = sinks  # descriptors for the job's stdout and stderr
        self._name = name
        self._stdin = stdin and is_stdin_usable()
        self._stop_code: int | None = None
        self._stop_time: float | None = None
        self._hurry = False
        self._asked = False  # the launcher has been asked to end
        self._failed = 0.0  # when a rank's failure was first seen
        self._next_look = 0.0
        self._given_up = False
        self._launcher: subprocess.Popen[bytes] | None = None
        try:
            self.launch = plan_job(options, command, self.directory, os.environ if environ is None else environ)
        except BaseException:
            self.clean()
            raise

    # --- from any thread ---

    def stop(self, code: int) -> None:
        """Ask for the end of the job, with exit code ``code``. A second call kills all processes of the job at once."""
        if self._stop_code is None:
            self._stop_code, self._stop_time = code, self._stop_time or time.monotonic()
        else:
            self._hurry = True

    def pass_on(self, number: int) -> None:
        """Send a signal to the launcher, which sends it to the ranks."""
        if self._launcher is not None and self._launcher.poll() is None:
            send_signal(self._launcher.pid, number)

    def clean(self) -> None:
        """Remove the private directory if this job made it."""
        if self._own_directory:
            shutil.rmtree(self.directory, ignore_errors=True)

    # --- running the job ---

    def run_with_signals(self) -> Outcome:
        """Run the job until its end, Ctrl-C or SIGTERM; then remove its private directory."""
        before = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup and in a script's background jobs
                before[number] = signal.signal(number, lambda number, _: self.stop(128 + number))
        for number in (signal.SIGUSR1, signal.SIGUSR2):  # from --signal=B:USR1@120, or for the program's own use
            before[number] = signal.signal(number, lambda number, _: self.pass_on(number))
        try:
            return self.run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self.clean()

    def run(self) -> Outcome:
        """Run the job to its end; kill the processes that a failed job leaves running."""
        try:
            outcome, printed = self._attempt()
            if outcome.code and LISTENER in printed and not read_records(self.directory) and self._stop_code is None:
                self._print("Open MPI's listener thread failed to start before any rank ran; trying once more")
                outcome, printed = self._attempt()
            if outcome.code and SLOTS in printed and self._stop_code is None:
                self._print(
                    f"Open MPI has fewer slots than the {self.options.nprocs} ranks of this job; ask for as many tasks "
                    f"(sbatch -n {self.options.nprocs}), or allow more ranks than slots: --mpiexec-args=--oversubscribe"
                )
            return outcome
        finally:
            self._sweep()

    def _attempt(self) -> tuple[Outcome, bytes]:
        for old in self.directory.iterdir():
            if old.name.startswith(("in.", "out.", "err.", "records", "termination")):
                old.unlink()
        (self.directory / "records").touch(0o600)
        write_ours(self.directory, self.launch.ours)
        streams = None
        if self.launch.streams:
            streams = Streams(self.directory, self.options.nprocs, tag=self.options.tag_output, sinks=self._sinks)
            if self._stdin:
                # Rank 0 opens stdin itself: Open MPI 5.0's mpirun does not pass on the end of its input, and MPICH's mpiexec
                # never closes the inputs of the other ranks.
                (self.directory / "in.0").symlink_to(f"/proc/{os.getpid()}/fd/0")
        # MPICH's proxies kill their ranks if mpiexec has been killed; on SIGTERM the proxies only ask the ranks to end.
        asked = self.launch.srun or self.launch.family == "openmpi"
        die = partial(end_with_parent, signal.SIGTERM if asked else signal.SIGKILL)
        try:
            process = subprocess.Popen(
                self.launch.argv,
                env=self.launch.env,
                stdin=None if self._stdin and streams is None else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches this process only, which ends the job in an orderly way
                preexec_fn=die if threading.current_thread() is threading.main_thread() else None,
            )
        except OSError as error:
            raise LaunchError(f"could not start {self.launch.argv[0]}: {error}") from None
        self._launcher = process
        printed = self._pump(process, streams)
        code = process.wait()
        report = read_report(self.directory)
        if streams is None and report not in printed.recent:  # Open MPI 5.0's mpirun forwards nothing after SIGTERM
            with suppress(OSError):
                write_all(self._sinks[1], report)
        if self._stop_code is not None:
            return Outcome(self._stop_code), bytes(printed.seen)
        records = read_records(self.directory)
        if self._given_up:
            code = 0  # the exit code of a launcher that this process ended by SIGTERM means nothing
        outcome = decide(records, code, self.launch.family, local=self.launch.local)
        if outcome.rank is None and not outcome.intended:
            printed.show()
        return outcome, bytes(printed.seen)

    def _pump(self, process: subprocess.Popen[bytes], streams: Streams | None) -> LauncherOutput:
        assert process.stdout is not None and process.stderr is not None  # noqa: PT018
        printed = LauncherOutput(self.directory, silent=streams is not None)
        sinks = dict(zip((process.stdout.fileno(), process.stderr.fileno()), self._sinks, strict=True))
        with selectors.DefaultSelector() as selector:
            for descriptor in sinks:
                selector.register(descriptor, selectors.EVENT_READ)
            if streams is not None:
                streams.register(selector)
            if self._lifeline is not None:
                selector.register(self._lifeline, selectors.EVENT_READ, self)
            begun = time.monotonic()
            while True:
                if process.poll() is not None and not sinks:
                    break
                ended = process.returncode is not None
                events = selector.select(0.0 if ended else 0.05)
                try:
                    for key, _ in events:
                        alive = True
                        if key.data is streams and streams is not None:
                            alive = streams.read(key.fd)
                        elif key.data is self:
                            self.stop(128 + signal.SIGTERM)
                            alive = False
                        elif data := os.read(key.fd, 1 << 16):
                            printed.feed(sinks[key.fd], data)
                        else:
                            del sinks[key.fd]
                            alive = False
                        if alive:
                            continue
                        selector.unregister(key.fd)
                    if streams is not None:
                        streams.show_unfinished()
                except BrokenPipeError:
                    self.stop(128 + signal.SIGPIPE)  # the reader of the output has ended (mpicoll run ... | head)
                if ended and not events:
                    break  # a process outside the job still has the launcher's pipes open
                if self.options.timeout is not None and time.monotonic() - begun > self.options.timeout:
                    self._time_out()
                self._give_up_after_failure()
                self._escalate(process)
        if streams is not None:
            streams.close()
        process.stdout.close()
        process.stderr.close()
        return printed

    def _time_out(self) -> None:
        if self._stop_code is None:
            self._print(f"the job has run for {self.options.timeout:g} seconds (--timeout); ending it")
            self.stop(TIMED_OUT)

    def _give_up_after_failure(self) -> None:
        """End a job in which a rank has failed, if its launcher does not end the job.

        MPICH 5.0: if a rank dies before MPI_Init, mpiexec leaves the other ranks waiting in MPI_Init without end. A launcher
        that got arguments from the user is not ended here, as fault tolerance may be among the arguments.
        """
        now = time.monotonic()
        if now < self._next_look or self._stop_time is not None or self.options.extra:
            return
        self._next_look = now + 0.2
        if not any(record.kind == "exit" and record.value for record in read_records(self.directory)):
            return
        self._failed = self._failed or now
        if now - self._failed > GRACE:
            self._given_up, self._stop_time = True, now

    def _escalate(self, process: subprocess.Popen[bytes]) -> None:
        """After `stop`, ask the launcher to end its ranks; after the grace time, kill all processes of the job."""
        if self._stop_time is None:
            return
        if not self._asked:
            self._asked = True
            send_signal(process.pid, signal.SIGTERM)
        elif self._hurry or time.monotonic() - self._stop_time > (GRACE if self.launch.local else FAR_GRACE):
            for pid in processes_of(self.directory):
                send_signal(pid, signal.SIGKILL)
            send_signal(process.pid, signal.SIGKILL)

    def _sweep(self) -> None:
        """Kill the processes that the job has left running."""
        deadline = time.monotonic() + 0.5
        while (left := processes_of(self.directory)) and time.monotonic() < deadline:
            for pid in left:
                send_signal(pid, signal.SIGKILL)
            time.sleep(0.005)

    def _print(self, text: str) -> None:
        with suppress(OSError):
            write_all(self._sinks[1], f"{self._name}: {text}\n".encode())


def run_job(options: Options, command: Sequence[str], environ: Mapping[str, str] | None = None) -> int:
    """Run ``command`` on ``options.nprocs`` ranks; return the exit code of the rank that failed first, or 0.

    Called in the main thread. Ctrl-C and SIGTERM end the whole job within two seconds on one host, and within FAR_GRACE on
    several hosts; a second signal kills the job at once.

    Raises:
        LaunchError: the job cannot be started; the message says what to do.
    """
    outcome = Job(options, command, environ, stdin=True).run_with_signals()
    if outcome.rank is not None:
        write_all(2, f"mpicoll run: rank {outcome.rank} failed first: {describe(outcome.code)}\n".encode())
    return outcome.code


def planned_line(options: Options, command: Sequence[str], environ: Mapping[str, str] | None = None) -> str:
    """Return the command line that starts the same job by hand; start nothing.

    Raises:
        LaunchError: the job cannot be started.
    """
    return plan_job(options, command, Path("/nonexistent"), os.environ if environ is None else environ).line


def run_job_for_spawn(options: Options, command: Sequence[str], directory: Path) -> Outcome:
    """Run a job for `spawn`: on this host, in the caller's directory, until the caller closes its end of stdin."""
    if not is_local(os.environ, None, None, ()):
        options = replace(options, host=f"localhost:{options.nprocs}")
    return Job(options, command, directory=directory, lifeline=0, name="spawn").run_with_signals()


def describe(code: int) -> str:
    """Return an exit code in words."""
    if 128 < code < 128 + signal.NSIG:
        try:
            return f"killed by {signal.Signals(code - 128).name} (exit code {code})"
        except ValueError:
            pass
    return f"exit code {code}"


def end_with_parent(number: int) -> None:
    """Let the kernel send a signal to the launcher when this process is killed. Runs between fork and exec."""
    ctypes.CDLL(None).prctl(1, number, 0, 0, 0)  # PR_SET_PDEATHSIG


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    try:
        os.kill(pid, number)
    except OSError:
        pass


def processes_of(directory: Path) -> list[int]:
    """Return the processes that have this run directory in their environment: the launcher and the ranks."""
    marker = f"{RUN_DIR}={directory}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if marker in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
            except OSError:
                continue
    return found
