"""Choose how Slurm starts the ranks of an MPI: which plugin of srun works with which library, and when mpirun is needed.

Sources: Slurm's MPI guide (https://slurm.schedmd.com/mpi_guide.html), Open MPI 5's "Launching with Slurm"
(https://docs.open-mpi.org/en/v5.0.x/launching-apps/slurm.html), and starts tried on Slurm 22.05.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mpicoll.errors import LaunchError
from mpicoll.launch.environment import mpi_family, without_launcher

_LISTED = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class Way:
    """How to start ranks in a Slurm job.

    Attributes:
        mpi: the value for ``srun --mpi=``, or ``None`` if srun cannot start this MPI and its own mpirun is needed.
        reason: why, in one sentence without a full stop.
    """

    mpi: str | None
    reason: str

    @property
    def launcher(self) -> str:
        """``"srun"`` or ``"mpirun"``."""
        return "mpirun" if self.mpi is None else "srun"


def plugins(text: str) -> list[str]:
    """Return the values that ``srun --mpi=`` accepts, from the output of ``srun --mpi=list`` on stdout and stderr.

    Up to Slurm 21.08 the list is on stderr with ``srun:`` before each line, later on stdout, indented. The versions of PMIx
    are in the list or in a separate line.

    Example:
        >>> plugins("srun: MPI types are...\\nsrun: none\\nsrun: pmi2\\n")
        ['none', 'pmi2']
        >>> plugins("MPI plugin types are...\\n\\tpmix\\n\\tnone\\nspecific pmix plugin versions available: pmix_v4,pmix_v5")
        ['pmix', 'none', 'pmix_v4', 'pmix_v5']
    """
    found: list[str] = []
    listing = False
    for line in text.splitlines():
        line = re.sub(r"^\s*srun:\s*", "", line).strip()
        head = re.match(
            r"(MPI (?:plugin )?types are\W*|specific \w+ plugin versions available\W*)", line, re.IGNORECASE
        )
        if head:
            listing, line = True, line[head.end() :]
        names = [name for name in re.split(r"[\s,]+", line) if name]
        # A warning between the lines ("slurm_load_conf: error: ...") is no list of names.
        if listing and (head or len(names) == 1) and all(_LISTED.fullmatch(name) for name in names):
            found += names
    return list(dict.fromkeys(found))


def find_plugins(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the plugins that ``srun --mpi=list`` lists on this host.

    Raises:
        LaunchError: there is no srun, or it prints no list.
    """
    env = without_launcher(os.environ if environ is None else environ)
    srun = shutil.which("srun", path=env.get("PATH"))
    if srun is None:
        raise LaunchError("there is no srun on PATH: this is no node of a Slurm cluster, or its module is not loaded")
    try:
        done = subprocess.run(
            [srun, "--mpi=list"], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"could not ask {srun} --mpi=list: {error}") from None
    # Old versions end with code 1 after a good list, so only the output counts.
    listed = plugins(done.stdout + "\n" + done.stderr)
    if not listed:
        output = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise LaunchError(f"{srun} --mpi=list printed no list, but: {output}")
    return listed


def how(mpi: str, listed: Iterable[str], environ: Mapping[str, str] | None = None) -> Way:
    """Return how ranks of an MPI library can be started in a Slurm job; pure.

    Args:
        mpi: ``MPI.Get_library_version()``, or ``MpiLibrary.text``, or only a name and version ("Open MPI v5.0.11").
        listed: the plugins, as `plugins` returns them.
        environ: variables that change the answer (``I_MPI_PMI_LIBRARY``); None: no variables.

    Example:
        >>> how("Open MPI v5.0.11", ["none", "pmi2", "pmix", "pmix_v4"]).mpi
        'pmix'
        >>> how("MPICH Version: 5.0.2", ["none", "pmi2", "pmix"]).mpi
        'pmi2'
        >>> how("Open MPI v5.0.11", ["none", "pmi2"]).launcher
        'mpirun'
    """
    names = list(listed)
    text = mpi.lower()
    pmix = _pmix(names)
    pmi2 = "pmi2" if "pmi2" in names else None
    offered = ", ".join(names) or "nothing"
    if mpi_family(mpi) == "openmpi":
        return _open_mpi(mpi, pmix, offered)
    if "cray" in text:
        # Cray has its own PMI; the plugin is called cray_shasta on EX machines. There is no other launcher than srun.
        plugin = "cray_shasta" if "cray_shasta" in names else pmi2
        return Way(plugin, "Cray MPICH is started by srun" if plugin else f"srun offers {offered}, not cray_shasta")
    if "intel" in text or "impi" in text:
        # Without the variable every rank under srun is a world of size 1.
        # https://www.intel.com/content/www/us/en/docs/mpi-library/developer-guide-linux/current/job-schedulers-support.html
        if pmi2 and (environ or {}).get("I_MPI_PMI_LIBRARY"):
            return Way(pmi2, "Intel MPI uses PMI-2 through I_MPI_PMI_LIBRARY")
        return Way(None, "Intel MPI needs I_MPI_PMI_LIBRARY=.../libpmi2.so and the plugin pmi2 to be started by srun")
    if mpi_family(mpi) == "mpich":
        name = "MVAPICH" if "mvapich" in text else "MPICH"
        # The configure line of an MPICH that was built for PMIx names it. MPICH 5.0 without PMIx aborts under PMIx:
        # "Runtime environment uses unsupported PMI version PMIx".
        if re.search(r"--with-pmix\b|--with-pmi=\S*pmix", text):
            why = f"this {name} was built for PMIx"
            return Way(pmix, why) if pmix else Way(None, f"{why} and srun offers {offered}")
        return Way(pmi2, f"{name} uses PMI-2") if pmi2 else Way(None, f"{name} needs pmi2 and srun offers {offered}")
    return Way(None, f"it is not known which of srun's plugins ({offered}) this MPI works with")


def _pmix(names: list[str]) -> str | None:
    """Return the plugin for PMIx: ``pmix``, else the newest version; None if there is only version 1, which no MPI supports."""
    versions = [(int(name[6:]), name) for name in names if re.fullmatch(r"pmix_v\d+", name)]
    if versions and max(versions)[0] < 2:
        return None
    return "pmix" if "pmix" in names else max(versions)[1] if versions else None


def _open_mpi(mpi: str, pmix: str | None, offered: str) -> Way:
    found = re.search(r"open ?mpi,? v?(\d+)", mpi, re.IGNORECASE)
    major = int(found.group(1)) if found else 5
    name = f"Open MPI {major}" if found else "this Open MPI"
    # PMI-2 is not used: Open MPI 5 has no code for it; up to version 4 only a build --with-pmi has, which no output shows.
    if pmix and major >= 2:
        return Way(pmix, f"{name} uses PMIx")
    return Way(None, f"{name} needs PMIx and srun offers {offered}")
