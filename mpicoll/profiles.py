"""Where the profiles of a machine are, and which one holds for a job; read by one rank, told to the others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mpicoll.settings import say

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.engines.base import Kind
    from mpicoll.engines.choice import Ranges

__all__ = ["library_name", "path_of_profiles", "share_profile"]

NONE = "none"


def path_of_profiles(setting: str, environ: Mapping[str, str] | None = None) -> Path:
    """Return the file: that of ``MPICOLL_PROFILE``, or ``profiles.json`` in the user's folder for settings."""
    if setting:
        return Path(setting).expanduser()
    env = os.environ if environ is None else environ
    return Path(env.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "mpicoll" / "profiles.json"


def library_name(text: str) -> str:
    """Return the first words of ``MPI.Get_library_version()``: name and version."""
    return " ".join(text.strip("\0 \n").split(",")[0].splitlines()[0].split())


def share_profile(
    comm: MPI.Intracomm, setting: str, ranks: int, extension: bool = True
) -> tuple[Mapping[Kind, Ranges] | None, bool]:
    """Return what was measured for this MPI and about so many ranks on a node, as rank 0 finds it; None: nothing.

    Called by all ranks of ``comm``, which are known to (it uses blocking MPI calls). Of a file that cannot be read rank 0 tells,
    and the defaults count.

    Args:
        extension: this rank has the C extension.

    Returns:
        What was measured, and whether all ranks have the extension: where some have not, nobody uses it, and all reduce alike.
    """
    from mpi4py import MPI

    from mpicoll.engines.choice import find_profile

    found = None
    if comm.Get_rank() == 0 and setting != NONE:
        path = path_of_profiles(setting)
        try:
            found = find_profile(path.read_text(), library_name(MPI.Get_library_version()), ranks)
        except FileNotFoundError as error:
            if setting:
                say(f"mpicoll: MPICOLL_PROFILE={setting}: {error.strerror}\n")
        except (OSError, RuntimeError, ValueError) as error:
            say(f"mpicoll: {path}: {error}\n")
    have_it = comm.allreduce(int(extension))
    everybody = have_it == comm.Get_size()
    if comm.Get_rank() == 0 and have_it and not everybody:
        lack = comm.Get_size() - have_it
        say(f"mpicoll: {lack} of {comm.Get_size()} ranks lack the C extension, so none of them uses it\n")
    told: Mapping[Kind, Ranges] | None = comm.bcast(found, 0)
    return told, everybody
