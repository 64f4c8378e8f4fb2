"""The private directory that `mpicoll run` and its ranks share: starts and ends of ranks, settings of this job, the report.

Every line of ``records`` is appended by one write, so the order of the lines is the order of the events on this host.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

RUN_DIR = "MPICOLL_RUN_DIR"

_where: str | None = None  # the directory, after scrub() has removed it from the environment

# The shell script that runs every rank. A plain shell costs about 1 ms. The shell is in the rank's process group, so signals
# that launchers send to the group reach the rank itself. The shell survives these signals and records how the rank ended.
# SIGUSR1 is ignored unless the program handles it: MPICH's mpiexec sends it to all ranks when one has died.
# If the directory is missing (on another host), the rank runs as without the script. The directory is the first argument, too: a
# site's launcher may clean the environment. If it sets no variable of the rank, only the start of an unknown rank is recorded.
WRAPPER = """\
r=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-$PMIX_RANK}}
export MPICOLL_RUN_DIR="${MPICOLL_RUN_DIR:-$1}"; shift
d=$MPICOLL_RUN_DIR
[ -d "$d" ] || exec "$@"
[ -n "$r" ] || { echo "start -1 $$" >>"$d/records"; exec "$@"; }
trap : HUP INT TERM USR2; trap '' USR1
echo "start $r $$" >>"$d/records"
if [ -e "$d/err.$r" ]; then
i=/dev/null; [ -e "$d/in.$r" ] && i=$d/in.$r
exec <"$i" >"$d/out.$r" 2>/dev/null; (exec "$@" 2>"$d/err.$r")
else "$@"; fi
s=$?
echo "exit $r $s" >>"$d/records"
exit $s"""


@dataclass(frozen=True)
class Record:
    """One line of ``records``; rank -1: not known.

    The kind is ``start`` or ``pid`` (value: the process id of the shell, of the rank), ``exit`` or ``fail`` (value: the exit
    code), ``blame``: a failure in consequence of another rank's failure, or ``stop``: the rank ends the job by intent, has
    printed why, and no rank counts as failed; or ``died``: a rank of the same host has seen the process of the rank end without
    the end of the library; or ``end`` (value: the process): the program of the rank has ended without an error, and MPI_Finalize
    comes. A rank that fails writes before its own record ``early`` if another rank has
    reached its end without an error before the calls that this rank makes, and ``lost`` if the process of another rank has
    ended before its own: the rank is the other.
    """

    kind: str
    rank: int
    value: int


def read_records(directory: Path) -> list[Record]:
    """Return the records in the order in which they were written."""
    rows = (line.split() for line in _read(directory, "records").decode().splitlines())
    return [Record(row[0], int(row[1]), int(row[2])) for row in rows if len(row) == 3]


def write_ours(directory: Path, settings: Mapping[str, str]) -> None:
    """Record the variables that `mpicoll run` set for this job only."""
    (directory / "ours").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))


def scrub(environ: MutableMapping[str, str]) -> None:
    """Remove from ``environ`` the variables that `mpicoll run` set for this job only: child processes must not inherit them.

    Called right after MPI is initialised: until then MPI needs the settings. A variable that was changed since then stays.
    Without `mpicoll run` the function does nothing.
    """
    global _where
    directory = environ.pop(RUN_DIR, None)
    if directory is None:
        return
    _where = directory
    for line in _read(Path(directory), "ours").decode().splitlines():
        name, _, value = line.partition("=")
        if environ.get(name) == value:
            del environ[name]


def _read(directory: Path, name: str) -> bytes:
    """Return a file of the directory; b"" if the file is missing."""
    try:
        return (directory / name).read_bytes()
    except OSError:
        return b""


def append_record(kind: str, rank: int, value: int, environ: Mapping[str, str] | None = None) -> None:
    """Append one record, in one write. Never raises; without `mpicoll run` the function does nothing."""
    _append("records", f"{kind} {rank} {value}\n".encode(), environ)


def save_report(text: bytes) -> bool:
    """Append a termination report for `mpicoll run`, in one write; return False without `mpicoll run` on this host."""
    return _append("termination.txt", text)


def read_report(directory: Path) -> bytes:
    """Return the termination report of the ranks of this host, or b""."""
    return _read(directory, "termination.txt")


def write_cause(directory: Path, cause: str) -> None:
    """Record what has asked `mpicoll run` to end the job, before the ranks get SIGTERM."""
    (directory / "termination.cause").write_text(cause)


def read_cause() -> str:
    """Return what has asked `mpicoll run` to end the job; "": SIGTERM, or a rank without `mpicoll run` on this host."""
    return _read(Path(_where), "termination.cause").decode() if _where is not None else ""


def _append(name: str, data: bytes, environ: Mapping[str, str] | None = None) -> bool:
    """Append to a file of the directory in one write; never raise."""
    directory = _where or (os.environ if environ is None else environ).get(RUN_DIR)
    if directory is None:
        return False
    try:
        descriptor = os.open(os.path.join(directory, name), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError:
        return False
    try:
        return os.write(descriptor, data) == len(data)
    except OSError:
        return False
    finally:
        os.close(descriptor)
