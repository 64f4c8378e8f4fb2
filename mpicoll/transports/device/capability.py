"""Find out which operations of the loaded MPI may get memory of a GPU directly, by evidence.

An MPI that does not know about memory of a GPU ends the process by a signal, or moves wrong bytes. So memory of a GPU is passed
directly only if there is evidence for an operation. Otherwise it moves through the host.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

from mpicoll.runtime.mpi_library import library_name
from mpicoll.runtime.output import say
from mpicoll.runtime.settings import Cuda
from mpicoll.transports.selection import path_of_profiles

REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
OPERATIONS = (*REDUCTIONS, "broadcast", "all_gather", "gather", "scatter", "all_to_all", "send", "recv")
"""The operations that a table has, each blocking and nonblocking."""


@dataclass(frozen=True)
class Bad:
    """A known defect of an MPI with memory of a GPU.

    Attributes:
        library: pattern of the version of the library.
        operations, nonblocking: operations and their form; None for both forms.
        why: what happens, with the source.
    """

    library: str
    operations: tuple[str, ...]
    nonblocking: bool | None
    why: str


KNOWN_BAD = (
    Bad(
        r"^Open MPI v[1-5]\.",
        REDUCTIONS,
        True,
        "nonblocking reductions of device memory read it from the host and crash: open-mpi/ompi#9845, #12045",
    ),
)


@dataclass(frozen=True)
class Capability:
    """The table of one MPI.

    Attributes:
        direct: pairs (operation, nonblocking) that may get memory of a GPU.
        evidence: source of the table, in words.
        bad: known defects of this MPI.
    """

    direct: frozenset[tuple[str, bool]]
    evidence: str
    bad: tuple[Bad, ...] = ()

    def allows(self, operation: str, nonblocking: bool) -> bool:
        """Return whether an operation may get memory of a GPU."""
        return (operation, nonblocking) in self.direct


def decide(
    choice: Cuda,
    kinds: str | None,
    asked: bool | None,
    environ: Mapping[str, str],
    version: str,
    probed: frozenset[tuple[str, bool]] | None = None,
) -> Capability:
    """Return the table for one MPI.

    Args:
        choice: MPICOLL_CUDA.
        kinds: ``mpi_memory_alloc_kinds`` of MPI_COMM_WORLD (MPI-4.1 section 11.4.3), or None.
        asked: result of MPIX_Query_cuda_support or MPIX_GPU_query_support; None if there is neither.
        environ: the environment, with the settings of vendors.
        version: result of MPI_Get_library_version.
        probed: pairs that `mpicoll doctor --gpu` found to be right; None if it has not run.
    """
    bad = tuple(each for each in KNOWN_BAD if re.search(each.library, version))
    aware, evidence = _judge(choice, kinds, asked, environ)
    if choice == "auto" and probed is not None and (aware or (kinds is None and asked is None)):
        # The denial of a library counts: another build of the same version may have been tried.
        return Capability(_without(probed, bad), "mpicoll doctor --gpu has tried each operation", bad)
    if not aware:
        return Capability(frozenset(), evidence, bad)
    everything = frozenset((operation, nonblocking) for operation in OPERATIONS for nonblocking in (False, True))
    return Capability(_without(everything, bad), evidence, bad)


def _without(direct: frozenset[tuple[str, bool]], bad: tuple[Bad, ...]) -> frozenset[tuple[str, bool]]:
    for each in bad:
        forms = (False, True) if each.nonblocking is None else (each.nonblocking,)
        direct -= {(operation, form) for operation in each.operations for form in forms}
    return direct


def path_of_probes(environ: Mapping[str, str] | None = None) -> Path:
    """Return the path of the file in which `mpicoll doctor --gpu --save` stores its findings."""
    return path_of_profiles("", environ).with_name("gpu.json")


def read_probes(text: str, library: str) -> frozenset[tuple[str, bool]] | None:
    """Return the stored findings for an MPI library, or None.

    Raises:
        ValueError: the text is not of a file that `mpicoll doctor --gpu --save` writes.
    """
    known = json.loads(text)
    if not isinstance(known, dict) or not all(isinstance(each, list) for each in known.values()):
        raise ValueError("not what mpicoll doctor --gpu --save writes")
    found = known.get(library)
    forms = {f"{operation} {form}": (operation, form == "nonblocking") for operation in OPERATIONS for form in _FORMS}
    return (
        None if found is None else frozenset(forms[each] for each in found if isinstance(each, str) and each in forms)
    )


_FORMS = ("blocking", "nonblocking")

_VENDORS = (
    ("MPICH_GPU_SUPPORT_ENABLED", "Cray MPICH"),
    ("MV2_USE_CUDA", "MVAPICH2"),
    ("MVP_USE_CUDA", "MVAPICH"),
    ("PSP_CUDA", "ParaStation MPI"),
)


def _judge(choice: Cuda, kinds: str | None, asked: bool | None, environ: Mapping[str, str]) -> tuple[bool, str]:
    if choice != "auto":
        return choice == "aware", f"MPICOLL_CUDA={choice}"
    if kinds is not None:
        # Kinds with restrictors: "system,mpi,cuda:device:managed".
        named = [part.strip().partition(":") for part in kinds.split(",")]
        device = any(name == "cuda" and (not more or "device" in more.split(":")) for name, _, more in named)
        return device, f"mpi_memory_alloc_kinds of MPI_COMM_WORLD: {kinds}"
    if asked is not None:
        return asked, f"the library says {'yes' if asked else 'no'} when asked for CUDA (MPIX)"
    for variable, vendor in _VENDORS:
        if environ.get(variable, "").strip() not in ("", "0"):
            return True, f"{variable}={environ[variable]} ({vendor})"
    return False, "nothing says that this MPI knows of GPUs"


@cache
def loaded_mpi(choice: Cuda) -> Capability:
    """Return the table of the MPI of this process, which has been initialised."""
    from mpi4py import MPI

    info = MPI.COMM_WORLD.Get_info()
    try:
        kinds = info.Get("mpi_memory_alloc_kinds")
    finally:
        info.Free()
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        asked = ask(line.rstrip("\n").split(None, 5)[5] for line in maps if "/libmpi" in line)
    version = MPI.Get_library_version()
    probed = None
    try:
        probed = read_probes(path_of_probes().read_text(), library_name(version))
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        say(f"mpicoll: {path_of_probes()}: {error}\n")
    return decide(choice, kinds, asked, os.environ, version, probed)


@cache
def allows(choice: Cuda, operation: str, nonblocking: bool) -> bool:
    """Return whether memory of a GPU may be passed to an operation of the MPI of this process."""
    return loaded_mpi(choice).allows(operation, nonblocking)


_MPICH_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA


def ask(libraries: Iterable[str]) -> bool | None:
    """Ask a loaded MPI library, by its path, whether it supports CUDA; None if no library has the function."""
    for path in dict.fromkeys(libraries):
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        query = getattr(library, "MPIX_Query_cuda_support", None)
        if query is not None:
            return bool(query())
        query = getattr(library, "MPIX_GPU_query_support", None)
        if query is not None:
            found = ctypes.c_int(0)
            return cast("int", query(ctypes.c_int(_MPICH_CUDA), ctypes.byref(found))) == 0 and bool(found.value)
    return None
