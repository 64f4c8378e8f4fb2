"""Run a planned job: start the launcher, copy the output, end all processes when asked, report how the job ended."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mpicoll.errors import LaunchError
from mpicoll.launch.environment import allocated_tasks
from mpicoll.launch.job_folder import RUN_DIR, read_records, read_report, write_cause, write_ours
from mpicoll.launch.mpi_library import MpiLibrary, conflicting_wheels, find_library
from mpicoll.launch.mpiexec import (
    Launch,
    check_hostfile,
    find_mpiexec,
    is_local,
    launch_command,
    parameter_files,
    settings_in_files,
    srun_command,
    this_machine,
)
from mpicoll.launch.outcome import FINALIZE_GRACE, GRACE, GivenUp, Outcome, decide, is_left_in_finalize, time_to_end
from mpicoll.launch.sinks import Sinks, Sources
from mpicoll.launch.slurm import find_plugins, how
from mpicoll.launch.streams import LauncherOutput, Streams, is_stdin_usable

FAR_GRACE = 10.0  # seconds, in place of GRACE, if ranks are on other hosts, which only the launcher can reach
MOMENT = 0.5  # seconds for which output of a job that was stopped waits for a reader
TIMED_OUT = 124  # as timeout(1)
CAUSES = {
    128 + signal.SIGINT: "SIGINT to {name}",
    128 + signal.SIGHUP: "SIGHUP to {name}",
    128 + signal.SIGPIPE: "the end of the reader of the output",
    TIMED_OUT: "the time limit of {name} (--timeout)",
}
"""What the ranks report as the reason of their SIGTERM, by the code of `stop`; for other codes SIGTERM itself."""
OUTPUT_LOST = 74  # EX_IOERR of sysexits.h: every rank ended well, but output could not be written
LISTENER = b"listener thread failed to start"  # Open MPI 5.0, in about 2 of 90 starts on a busy machine
SLOTS = b"not enough slots"  # Open MPI calls the tasks of an allocation and the places of a hostfile slots


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


def plan_job(options: Options, command: Sequence[str], run_dir: Path, environ: Mapping[str, str]) -> Launch:
    """Find the MPI library and its launcher on this machine, and plan the job.

    Raises:
        LaunchError: there is no MPI, no mpiexec belongs to it, or two MPIs have overwritten each other.
    """
    if options.hostfile is not None:
        check_hostfile(options.hostfile)
    conflict = conflicting_wheels()
    if conflict is not None:
        raise LaunchError(conflict)
    library = find_library(environ=environ)
    try:
        mpiexec = None if options.launcher == "srun" else find_mpiexec(library, options.mpiexec, command)
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
        blame: bool = False,
    ) -> None:
        self.options = options
        self._sinks = Sinks(sinks)  # for the job's stdout and stderr
        self.directory = directory or Path(tempfile.mkdtemp(prefix="mpicoll-run-"))  # mode 0700
        self._own_directory = directory is None
        self._lifeline = lifeline  # a pipe: the job ends when the pipe ends
        self._name = name
        self._blame = blame  # whether to print the rank that failed first
        self._stdin = stdin and is_stdin_usable()
        self._stop_code: int | None = None
        self._stop_time: float | None = None
        self._hurry = False
        self._asked = False  # the launcher has been asked to end
        self._grace: float | None = None  # seconds for which the job may go on after a failure
        self._failed = 0.0  # when this failure was first seen
        self._next_look = 0.0
        self._begun = 0.0
        self._over = 0.0  # when the job had ended
        self._given_up: GivenUp = ""
        self._launcher: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
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
        self._sinks.close()
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
        """Run the job to its end; kill the processes that a failed job leaves running; wait until the output is written."""
        try:
            outcome, printed = self._attempt()
            if outcome.code and LISTENER in printed and not read_records(self.directory) and self._stop_code is None:
                self._print("Open MPI's listener thread failed to start before any rank ran; trying once more")
                outcome, printed = self._attempt()
        finally:
            self._sweep()
        if self._stop_code is None:
            outcome = self._judge(outcome, printed)
        return self._drain(outcome)

    def _judge(self, outcome: Outcome, printed: bytes) -> Outcome:
        """Say why the job has failed, if this is known; a launcher that has started nothing has failed."""
        nprocs, launcher, local = self.options.nprocs, self.launch.argv[0], self.launch.local
        if outcome.code and SLOTS in printed:
            self._print(
                f"Open MPI has fewer slots than the {nprocs} ranks of this job; ask for as many tasks "
                f"(sbatch -n {nprocs}), or allow more ranks than slots: --mpiexec-args=--oversubscribe"
            )
        elif outcome.rank is not None:
            if self._blame:
                self._print(outcome.text)
        elif not local and outcome.code and not printed:
            self._print(f"{launcher} ended with exit code {outcome.code} and printed nothing")
        elif local and (outcome.code or not printed) and not read_records(self.directory):
            nothing = "" if printed else " and printed nothing"
            self._print(
                f"{launcher} ended with exit code {outcome.code}{nothing}: no rank has reported its start. `mpicoll doctor` "
                "names the mpiexec to use"
            )
            return Outcome(outcome.code or 1)
        return outcome

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
        try:
            process = subprocess.Popen(
                self.launch.argv,
                env=self.launch.env,
                stdin=None if self._stdin and streams is None else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches this process only, which ends the job in an orderly way
            )
        except OSError as error:
            raise LaunchError(f"could not start {self.launch.argv[0]}: {error}") from None
        self._launcher = process
        self._guard = start_guard(process.pid, self.launch)
        try:
            printed = self._pump(process, streams)
            code = process.wait()
        finally:
            self._end_guard()
        report = read_report(self.directory)
        if streams is None and report not in printed.recent:  # Open MPI 5.0's mpirun forwards nothing after SIGTERM
            self._sinks.err.put(report)
        if self._stop_code is not None:
            return Outcome(self._stop_code), bytes(printed.seen)
        records = read_records(self.directory)
        if self._given_up:
            code = 0  # the exit code of a launcher that this process ended by SIGTERM means nothing
        outcome = decide(records, code, self.launch.family, local=self.launch.local, given_up=self._given_up)
        if outcome.rank is None and not outcome.intended:
            printed.show()
        return outcome, bytes(printed.seen)

    def _pump(self, process: subprocess.Popen[bytes], streams: Streams | None) -> LauncherOutput:
        assert process.stdout is not None and process.stderr is not None  # noqa: PT018
        printed = LauncherOutput(self.directory, silent=streams is not None)
        own = {process.stdout.fileno(): self._sinks.out, process.stderr.fileno(): self._sinks.err}

        def read(descriptor: int) -> bool:
            data = os.read(descriptor, 1 << 16)
            printed.feed(own[descriptor], data)
            if not data:
                del own[descriptor]
            return bool(data)

        sources = self._sources()
        for descriptor, sink in own.items():
            sources.add(descriptor, sink, read)
        if streams is not None:
            streams.register(sources)
        self._begun = time.monotonic()
        while process.poll() is None or own:
            ended = process.returncode is not None
            if ended:
                self._end_guard()
            busy = sources.poll(0.0 if ended and not sources.paused else 0.05)
            if streams is not None:
                streams.show_unfinished()
            self._tell_failures("ending the job", "output is lost, the job goes on")
            self._check_time()
            if not ended:
                self._give_up_after_failure()
                self._escalate(process)
            elif not busy and (not sources.paused or self._stops_waiting()):
                break  # a process outside the job still has the launcher's pipes open, or nobody reads the output
        sources.close()
        if streams is not None:
            streams.close()
        process.stdout.close()
        process.stderr.close()
        return printed

    def _sources(self) -> Sources:
        sources = Sources(self._sinks)
        if self._lifeline is not None and self._stop_code is None:

            def end(_: int) -> bool:
                self.stop(128 + signal.SIGTERM)
                return False

            sources.add(self._lifeline, None, end)
        return sources

    def _drain(self, outcome: Outcome) -> Outcome:
        """Wait until the output is written, after `stop` for a MOMENT; return the outcome if all was."""
        sources = self._sources()
        self._over = time.monotonic()
        while True:
            self._tell_failures("output is lost", "output is lost")
            if not self._sinks.waiting or self._stops_waiting():
                break
            sources.poll(0.05)
            self._check_time("the job has ended, but its output was not read within {limit:g} seconds (--timeout)")
        sources.close()
        if self._stop_code is not None:
            return Outcome(self._stop_code)
        if outcome.code == 0 and (errors := self._sinks.errors):
            pipe = any(isinstance(error, BrokenPipeError) for error in errors)
            return Outcome(128 + signal.SIGPIPE if pipe else OUTPUT_LOST)
        return outcome

    def _tell_failures(self, broken_pipe: str, other: str) -> None:
        """Print a line for a sink that has failed. If a reader has ended (mpicoll run ... | head), end a job that runs."""
        for sink, error in self._sinks.failures():
            pipe = isinstance(error, BrokenPipeError)
            if pipe and self._stop_code is None and broken_pipe != other:
                self.stop(128 + signal.SIGPIPE)
            self._print(f"cannot write to {sink.name}: {error.strerror}; {broken_pipe if pipe else other}")

    def _stops_waiting(self) -> bool:
        if self._stop_code is None:
            return False
        return self._hurry or time.monotonic() - max(self._stop_time or 0.0, self._over) > MOMENT

    def _check_time(self, text: str = "the job has run for {limit:g} seconds (--timeout); ending it") -> None:
        limit = self.options.timeout
        if self._stop_code is None and limit is not None and time.monotonic() - self._begun > limit:
            self._print(text.format(limit=limit))
            self.stop(TIMED_OUT)

    def _give_up_after_failure(self) -> None:
        """End a job in which a rank has failed, if its launcher does not end the job.

        A launcher that got arguments from the user is not ended here, as fault tolerance may be among the arguments.
        """
        now = time.monotonic()
        if now < self._next_look or self._stop_time is not None or self.options.extra:
            return
        self._next_look = now + 0.2
        records = read_records(self.directory)
        finalizing = self.launch.local and is_left_in_finalize(records, self.options.nprocs, is_child)
        grace = time_to_end(records, finalizing)
        if grace != self._grace:
            self._grace, self._failed = grace, now
        if grace is not None and now - self._failed > grace:
            self._given_up, self._stop_time = "in MPI_Finalize" if grace == FINALIZE_GRACE else "after a failure", now

    def _end_guard(self) -> None:
        """End the guard when the launcher has ended, or has been asked to end: the number of the process may be given anew."""
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.communicate(b"over\n")

    def _escalate(self, process: subprocess.Popen[bytes]) -> None:
        """After `stop`, ask the launcher to end its ranks; after the grace time, kill all processes of the job."""
        if self._stop_time is None:
            return
        if not self._asked:
            self._asked = True
            if self._stop_code in CAUSES:
                write_cause(self.directory, CAUSES[self._stop_code].format(name=self._name))
            self._end_guard()
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
        self._sinks.tell(f"{self._name}: {text}\n")


def run_job(options: Options, command: Sequence[str], environ: Mapping[str, str] | None = None) -> int:
    """Run ``command`` on ``options.nprocs`` ranks; return the exit code of the rank that failed first, or 0.

    Called in the main thread. Ctrl-C and SIGTERM end the whole job within two seconds on one host, and within FAR_GRACE on
    several hosts; a second signal kills the job at once.

    Raises:
        LaunchError: the job cannot be started; the message says what to do.
    """
    return Job(options, command, environ, stdin=True, blame=True).run_with_signals().code


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


def start_guard(pid: int, launch: Launch) -> subprocess.Popen[bytes] | None:
    """Start a shell that sends one signal to the launcher if this process is killed, and ends when it reads a line.

    The kernel's own way (PR_SET_PDEATHSIG) sends a signal for each thread of this process, and Open MPI's launcher leaves its
    ranks running when a second SIGTERM comes.
    """
    # MPICH's proxies kill their ranks if mpiexec has been killed; on SIGTERM the proxies only ask the ranks to end.
    signal_name = "TERM" if launch.srun or launch.family == "openmpi" else "KILL"
    try:
        return subprocess.Popen(
            ["/bin/sh", "-c", 'read -r line || kill -s "$1" "$2"', "mpicoll-guard", signal_name, f"{pid}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:  # too many processes: the job runs without the guard
        return None


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    try:
        os.kill(pid, number)
    except OSError:
        pass


def is_child(pid: int, parent: int) -> bool:
    """Return whether a process of this host lives, and is a child of the other."""
    try:
        state, found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return False
    return int(found) == parent and state not in "ZX"


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
