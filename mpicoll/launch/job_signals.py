"""Signals of a job: the handlers of `mpicoll run`, and signals to the launcher and to all processes of the job."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path
from typing import Protocol, TypeVar

from mpicoll.launch.job_folder import RUN_DIR

T = TypeVar("T", covariant=True)


class SignalledJob(Protocol[T]):
    """A job that signals of this process can end, or reach."""

    def run(self) -> T:
        """Run the job to its end."""

    def stop(self, code: int) -> None:
        """Ask for the end of the job."""

    def pass_on(self, number: int) -> None:
        """Send a signal to the launcher."""

    def clean(self) -> None:
        """Remove the private directory."""


def run_with_signals(job: SignalledJob[T]) -> T:
    """Run a job that Ctrl-C and SIGTERM end."""
    before = {}

    def ask(number: int, frame: object) -> None:
        job.stop(128 + number)

    def pass_on(number: int, frame: object) -> None:
        job.pass_on(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or started in the background by a script
            before[number] = signal.signal(number, ask)
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # from --signal=B:USR1@120, or for the program's own use
        before[number] = signal.signal(number, pass_on)
    try:
        return job.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        job.clean()


def die_with_parent() -> None:
    """Let the kernel send SIGTERM to the launcher when this process is killed. Runs between fork and exec."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG


def be_killed_with_parent() -> None:
    """Let the kernel send SIGKILL: MPICH's proxies kill their ranks when mpiexec is gone; on SIGTERM they only ask them."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


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
