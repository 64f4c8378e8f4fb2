"""Processes that a program starts with multiprocessing: they have the environment of a rank and are none."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping


def multiprocessing_child() -> tuple[str, int] | None:
    """Return the name of this process and the id of its parent if multiprocessing started it, by whatever method."""
    process = sys.modules.get("multiprocessing.process")  # every child has it
    parent = process.parent_process() if process is not None else None
    return (process.current_process().name, parent.pid) if process is not None and parent is not None else None


RANK_VARIABLES = (
    *("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "PALS_RANKID", "MV2_COMM_WORLD_RANK"),
    *("JSM_NAMESPACE_RANK", "FLUX_TASK_RANK"),
)
"""The variables in which launchers that start MPI pass the rank."""


def is_in_job(environ: Mapping[str, str]) -> bool:
    """Return whether this process has the environment of a rank, so that MPI_Init takes the place of the rank."""
    return any(name in environ for name in RANK_VARIABLES)


def leave_mpi_unstarted() -> None:
    """In a child of multiprocessing in a job, let an import of ``mpi4py.MPI`` start no MPI. Called before a name is loaded.

    A child imports the program's script anew, with names of this library at its top. If MPI started then, the child would take
    the place of the rank whose environment it has, before :func:`mpicoll.init_process_group` can refuse the child.
    """
    process = sys.modules.get("multiprocessing.process")
    if process is None or "mpi4py.MPI" in sys.modules or not is_in_job(os.environ):
        return
    # The attribute is true while a child, or the server of the method forkserver, imports the script.
    if process.parent_process() is None and not getattr(process.current_process(), "_inheriting", False):
        return
    try:
        settings = importlib.import_module("mpi4py").rc
    except ImportError:
        return  # said where MPI is needed
    settings.initialize, settings.finalize = False, True
