"""The batch script that `mpicoll slurm-script` prints: for which MPI and Slurm which lines. No Slurm, no MPI."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mpicoll.cli import slurm_script
from mpicoll.cli.main import main
from mpicoll.cli.slurm_script import Plan, Wanted, script
from mpicoll.errors import LaunchError
from mpicoll.launch import mpi_library as library_module
from mpicoll.launch import mpiexec as mpiexec_module
from mpicoll.launch import slurm
from mpicoll.launch.mpi_library import MpiLibrary
from mpicoll.launch.mpiexec import Mpiexec

OPEN_MPI = MpiLibrary("openmpi", "Open MPI", "5.0.11", (3, 1), "", "Open MPI v5.0.11, package: ...")
MPICH = MpiLibrary("mpich", "MPICH", "5.0.2", (5, 0), "", "MPICH Version:      5.0.2\nMPICH configure: --with-pm=hydra")
BOTH = ["none", "pmi2", "pmix", "pmix_v4"]

Site = Callable[..., None]


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Site:
    """Make this a site with an MPI, a list of srun's plugins (``None``: no srun) and an mpirun or none."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b.py").write_text("")

    def make(library: MpiLibrary, plugins: list[str] | None, mpirun: bool = True) -> None:
        def find_plugins() -> list[str]:
            if plugins is None:
                raise LaunchError("there is no srun on PATH")
            return plugins

        def find_mpiexec(library: MpiLibrary) -> Mpiexec:
            if not mpirun:
                raise LaunchError("found no mpiexec")
            return Mpiexec("/opt/mpi/bin/mpiexec", library.family, library.version)

        monkeypatch.setattr(library_module, "find_library", lambda: library)
        monkeypatch.setattr(slurm, "find_plugins", find_plugins)
        monkeypatch.setattr(mpiexec_module, "find_mpiexec", find_mpiexec)

    return make


def last_line(text: str) -> str:
    return text.splitlines()[-1]


def options_of(text: str) -> dict[str, str]:
    """Return the #SBATCH options of a script."""
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH ")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


@pytest.mark.parametrize(
    ("library", "plugins", "arguments", "start"),
    [
        (OPEN_MPI, BOTH, [], "exec srun --kill-on-bad-exit=1 --mpi=pmix --cpus-per-task=1 "),
        (MPICH, BOTH, [], "exec srun --kill-on-bad-exit=1 --mpi=pmi2 --cpus-per-task=1 "),
        (MPICH, BOTH, ["-c", "6"], "exec srun --kill-on-bad-exit=1 --mpi=pmi2 --cpus-per-task=6 "),
        (
            MPICH,
            BOTH,
            ["--gpus-per-node", "4"],
            "exec srun --kill-on-bad-exit=1 --mpi=pmi2 --cpus-per-task=1 --gpu-bind=none ",
        ),
        (OPEN_MPI, ["none", "pmi2"], [], 'exec /opt/mpi/bin/mpiexec -n "$SLURM_NTASKS" '),
        (MPICH, ["none"], [], 'exec /opt/mpi/bin/mpiexec -n "$SLURM_NTASKS" -ppn 1 '),
        (
            OPEN_MPI,
            None,
            ["--launcher", "mpirun", "-c", "2"],
            'exec /opt/mpi/bin/mpiexec -n "$SLURM_NTASKS" --bind-to none ',
        ),
        (OPEN_MPI, None, ["--mpi", "pmix_v5"], "exec srun --kill-on-bad-exit=1 --mpi=pmix_v5 --cpus-per-task=1 "),
    ],
)
def test_start(
    site: Site,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    library: MpiLibrary,
    plugins: list[str] | None,
    arguments: list[str],
    start: str,
) -> None:
    """The last line starts the ranks in the way that this MPI and this Slurm share; nothing is said on stderr."""
    site(library, plugins)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["slurm-script", *arguments, "a b.py", "--x", "y z"]) == 0
    out, err = capsys.readouterr()
    assert last_line(out).startswith(start)
    assert last_line(out).endswith(" 'a b.py' --x 'y z'")
    assert err == ""


def test_no_way(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Where nothing is known to work one line says so, the code is 1, and the script is there to be adapted."""
    site(OPEN_MPI, ["none", "pmi2"], mpirun=False)
    assert main(["slurm-script", "a b.py"]) == 1
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert "no way is known to start Open MPI 5.0.11 here" in err
    assert "srun offers none, pmi2" in err
    assert last_line(out).startswith("exec srun --kill-on-bad-exit=1 --cpus-per-task=1 ")
    assert main(["slurm-script", "--launcher", "srun", "a b.py"]) == 1
    assert "srun is not known to start Open MPI 5.0.11" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a b.py"], "there is no srun on PATH"),
        (["--mpi-type"], "there is no srun on PATH"),
        ([], "the script is missing"),
        (["nowhere.py"], "there is no file nowhere.py"),
        (["-m", "nowhere_at_all"], "there is no module nowhere_at_all"),
        (["--mpi", "pmix", "--launcher", "mpirun", "a b.py"], "--mpi is for srun"),
        (["--launcher", "mpirun", "--output", "missing/x.sbatch", "a b.py"], "--output missing/x.sbatch: No such file"),
    ],
)
def test_refused(site: Site, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    """What cannot be done ends with code 2 and one line."""
    site(OPEN_MPI, None)
    assert main(["slurm-script", *arguments]) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert err.count("\n") == 1
    assert out == ""


@pytest.mark.parametrize(
    "arguments",
    [["--nodes", "0"], ["--time", "tomorrow"], ["--partition", "a b"], ["--account", "a\n#SBATCH --exclusive"]],
)
def test_wrong_values(site: Site, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    """What Slurm would refuse, or what would break the script, is refused at once."""
    site(OPEN_MPI, BOTH)
    with pytest.raises(SystemExit):
        main(["slurm-script", *arguments, "a b.py"])
    assert arguments[0] in capsys.readouterr().err


def test_options(site: Site, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What was asked for is in the #SBATCH lines, before the first command, and the file is as what is printed."""
    site(OPEN_MPI, BOTH)
    asked = [
        "--nodes",
        "2",
        "--ntasks-per-node",
        "4",
        "--gpus-per-node",
        "4",
        "--time",
        "1-12:00",
        "--partition",
        "gpu",
    ]
    asked += ["--account", "me", "--module", "openmpi/5"]
    assert main(["slurm-script", *asked, "a b.py"]) == 0
    printed = capsys.readouterr().out
    assert options_of(printed) == {
        "job-name": "a_b",
        "nodes": "2",
        "ntasks-per-node": "4",
        "cpus-per-task": "1",
        "gpus-per-node": "4",
        "time": "1-12:00",
        "partition": "gpu",
        "account": "me",
        "chdir": str(tmp_path),
        "output": "%x-%j.out",
    }
    commands = [line for line in printed.splitlines() if line and not line.startswith("#")]
    assert commands[:2] == ["set -eo pipefail", "module load openmpi/5"]
    assert printed.rindex("#SBATCH") < printed.index("module load")
    assert main(["slurm-script", *asked, "--output", "job.sbatch", "a b.py"]) == 0
    assert (tmp_path / "job.sbatch").read_text() == printed
    assert capsys.readouterr().out == ""


def test_queries(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """The templates ask for the plugin and for mpirun alone."""
    site(MPICH, BOTH)
    assert main(["slurm-script", "--mpi-type"]) == 0
    assert main(["slurm-script", "--mpirun"]) == 0
    assert capsys.readouterr().out == "pmi2\n/opt/mpi/bin/mpiexec\n"
    site(MPICH, ["none"])
    assert main(["slurm-script", "--mpi-type"]) == 2
    assert "srun cannot start MPICH 5.0.2 here: MPICH needs pmi2 and srun offers none" in capsys.readouterr().err


def test_bash_reads_it(tmp_path: Path) -> None:
    """Whatever the command is made of, bash hands it on word by word."""
    words = ("/py thon", "a'b.py", 'say "$HOME"', "two\nlines", "*")
    printed = script(Wanted(words, folder="/tmp/it's here"), Plan("pmix", None, "openmpi", ("Open MPI.",)))
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/bash\nprintf "%s\\0" "$@"\n')
    srun.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["bash"], input=printed, capture_output=True, text=True, timeout=20, env=environ, check=True)
    assert tuple(done.stdout.split("\0")[-6:-1]) == words
    assert slurm_script._job_name("dir/my script.py") == "my_script"
