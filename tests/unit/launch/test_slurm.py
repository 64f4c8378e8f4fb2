"""Slurm's list of plugins as its versions print it, and what starts which MPI. No Slurm, no MPI."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mpicoll.errors import LaunchError
from mpicoll.launch.slurm import find_plugins, how, plugins

SLURM_20 = "srun: MPI types are...\nsrun: cray_shasta\nsrun: pmi2\nsrun: none\nsrun: pmix\nsrun: pmix_v3\n"
SLURM_19 = "srun: MPI types are... none pmi2 openmpi pmix_v2\n"
SLURM_22 = (
    "MPI plugin types are...\n\tpmix\n\tnone\n\tcray_shasta\n\tpmi2\nspecific pmix plugin versions available: pmix_v4\n"
)
SLURM_24 = "MPI plugin types are...\n\tnone\n\tpmi2\n\tpmix\nspecific pmix plugin versions available: pmix_v4,pmix_v5\n"
WITHOUT_PMIX = "MPI plugin types are...\n\tcray_shasta\n\tnone\n\tpmi2\n"

OPEN_MPI_5 = "Open MPI v5.0.11, package: Open MPI user@host Distribution, ident: 5.0.11, Sep 16, 2026"
OPEN_MPI_4 = "Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4, repo rev: v4.1.4, May 26, 2022"
OPEN_MPI_1 = "Open MPI v1.10.7, package: Open MPI mockbuild@site Distribution, ident: 1.10.7"
MPICH = "MPICH Version:      5.0.2\nMPICH Device:   ch4:ucx ofi\nMPICH configure: --with-pm=hydra:gforker"
MPICH_PMIX = "MPICH Version:\t4.2.0\nMPICH configure:\t--with-device=ch4:ofi --with-pmix=/opt/pmix"
INTEL = "Intel(R) MPI Library 2021.13 for Linux* OS"
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.28.15 (ANL base 3.4a2)"
MVAPICH = "MVAPICH2 Version      :\t2.3.7\nMVAPICH2 Configure:\t--with-pm=slurm --with-pmi=pmi2"


@pytest.mark.parametrize(
    ("printed", "names"),
    [
        (SLURM_19, ["none", "pmi2", "openmpi", "pmix_v2"]),
        (SLURM_20, ["cray_shasta", "pmi2", "none", "pmix", "pmix_v3"]),
        (SLURM_22, ["pmix", "none", "cray_shasta", "pmi2", "pmix_v4"]),
        (SLURM_24, ["none", "pmi2", "pmix", "pmix_v4", "pmix_v5"]),
        ("srun: error: Unable to open pidfile\n" + SLURM_20, ["cray_shasta", "pmi2", "none", "pmix", "pmix_v3"]),
        (WITHOUT_PMIX + "srun: error: something else is wrong\n", ["cray_shasta", "none", "pmi2"]),
        ("srun: error: could not establish a configuration source\n", []),
        ("", []),
    ],
)
def test_plugins(printed: str, names: list[str]) -> None:
    """Whatever the form of the list, its names are read, and other lines are not taken for names."""
    assert plugins(printed) == names


@pytest.mark.parametrize(
    ("mpi", "printed", "plugin", "reason"),
    [
        (OPEN_MPI_5, SLURM_22, "pmix", "Open MPI 5 uses PMIx"),
        (OPEN_MPI_5, SLURM_19, "pmix_v2", "Open MPI 5"),
        (OPEN_MPI_5, WITHOUT_PMIX, None, "needs PMIx and srun offers cray_shasta, none, pmi2"),
        (OPEN_MPI_5, "MPI plugin types are...\n\tpmix\n\tpmix_v1\n", None, "needs PMIx"),
        (OPEN_MPI_4, SLURM_22, "pmix", "Open MPI 4"),
        (OPEN_MPI_4, WITHOUT_PMIX, None, "Open MPI 4 needs PMIx"),
        (OPEN_MPI_1, SLURM_22, None, "Open MPI 1"),
        (MPICH, SLURM_22, "pmi2", "PMI-2"),
        (MPICH, "MPI plugin types are...\n\tnone\n\tpmix\n", None, "needs pmi2 and srun offers none, pmix"),
        (MPICH_PMIX, SLURM_24, "pmix", "built for PMIx"),
        (MPICH_PMIX, WITHOUT_PMIX, None, "built for PMIx and srun offers"),
        (CRAY, SLURM_22, "cray_shasta", "srun"),
        (CRAY, SLURM_24, "pmi2", "srun"),
        (MVAPICH, SLURM_24, "pmi2", "MVAPICH"),
        (INTEL, SLURM_24, None, "I_MPI_PMI_LIBRARY"),
        ("Some MPI 1.0", SLURM_24, None, "not known"),
        ("", SLURM_24, None, "not known"),
    ],
)
def test_how(mpi: str, printed: str, plugin: str | None, reason: str) -> None:
    """Each MPI gets the plugin that it speaks with, or its mpirun with the reason."""
    way = how(mpi, plugins(printed))
    assert way.mpi == plugin
    assert way.launcher == ("mpirun" if plugin is None else "srun")
    assert reason in way.reason
    assert not way.reason.endswith(".")


def test_how_intel_under_srun() -> None:
    """Intel MPI is started by srun where its variable names Slurm's PMI library."""
    environ = {"I_MPI_PMI_LIBRARY": "/usr/lib64/libpmi2.so"}
    assert how(INTEL, plugins(SLURM_24), environ).mpi == "pmi2"
    assert how(INTEL, ["none", "pmix"], environ).mpi is None


@pytest.mark.parametrize(
    ("program", "listed"),
    [
        ("printf 'srun: MPI types are...\\nsrun: none\\nsrun: pmi2\\n' >&2; exit 1", ["none", "pmi2"]),
        ("[ \"$1\" = --mpi=list ] && printf 'MPI plugin types are...\\n\\tnone\\n\\tpmix\\n'", ["none", "pmix"]),
        ("[ -z \"$PMI_RANK\" ] && printf 'MPI types are... none\\n'", ["none"]),
        ("echo 'srun: error: no configuration' >&2; exit 1", "printed no list, but: srun: error: no configuration"),
        ("exit 0", "printed no list, but: nothing"),
        (None, "there is no srun on PATH"),
    ],
)
def test_find_plugins(tmp_path: Path, program: str | None, listed: list[str] | str) -> None:
    """srun is asked without what a launcher has left in the environment; a list counts whatever its exit code is."""
    if program is not None:
        (tmp_path / "srun").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "srun").chmod(0o755)
    environ = {"PATH": str(tmp_path), "PMI_RANK": "0", "PMI_SIZE": "4"}
    if isinstance(listed, str):
        with pytest.raises(LaunchError, match=re.escape(listed)):
            find_plugins(environ)
    else:
        assert find_plugins(environ) == listed
