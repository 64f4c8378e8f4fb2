"""Processes that a program starts with multiprocessing: they have the environment of a rank and are none."""

from __future__ import annotations

import importlib
import sys


def multiprocessing_child() -> tuple[str, int] | None:
    """Return the name of this process and the id of its parent if multiprocessing started it, by whatever method."""
    process = sys.modules.get("multiprocessing.process")  # every child has it
    parent = process.parent_process() if process is not None else None
    return (process.current_process().name, parent.pid) if process is not None and parent is not None else None


def leave_mpi_unstarted() -> None:
    """In a child of multiprocessing, let an import of ``mpi4py.MPI`` start no MPI. Called before a public name is loaded.

    A child imports the program's script anew, with names of this library at its top. If MPI started then, the child would take
    the place of the rank whose environment it has, before :func:`mpicoll.init_process_group` can refuse the child.
    """
    process = sys.modules.get("multiprocessing.process")
    if process is None or "mpi4py.MPI" in sys.modules:
        return
    # The attribute is true while a child, or the server of the method forkserver, imports the script.
    if process.parent_process() is None and not getattr(process.current_process(), "_inheriting", False):
        return
    try:
        settings = importlib.import_module("mpi4py").rc
    except ImportError:
        return  # said where MPI is needed
    settings.initialize, settings.finalize = False, True
