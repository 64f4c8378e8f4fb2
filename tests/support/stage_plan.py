"""Plan the stages of the test suite: which tests run on which MPI, in which environment, on how many ranks.

A stage is one run of pytest or of a checker. ``stages.py`` runs the stages; the numbers and names to change stand at the top.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass

import pythons
from jobs import ROOT

__all__ = ["CLUSTER", "EXCLUSIVE", "KINDS", "SIZES", "STAGES", "Selection", "Stage", "missing_environments", "plan"]

SIZES = (1, 2, 3, 4)
TENSOR_SIZES = (3,)
BACKEND_SIZES = (2, 3, 4)
# The numbers of ranks in `make test`; `make test-all` runs the other numbers.
FAST_SIZES = {"openmpi": (1, 3), "mpich": (3,)}
# The numbers of ranks with all long tests, and the numbers with the long tests marked `both_mpis` only.
SLOW_SIZES = (3,)
BOTH_SIZES = (2,)
TWO_NODES = {"openmpi": 0, "mpich": 4}
# The number of ranks that share no memory in `make test-all`. Open MPI's share none without the extension.
THROUGH_MPI = {"openmpi": 0, "mpich": 3}
# The number of ranks without the C extension in the slow part, on the first MPI.
WITHOUT_EXTENSION = 4
# Tests on stand-ins for a GPU need a third of the time of a run: they run on the first MPI, and with CuPy on the second.
STANDINS_SIZE = 2
STANDINS = tuple(
    f"--ignore=tests/mpi/{name}.py"
    for name in ("test_device_arrays", "test_device_link", "test_device_pieces", "test_direct_lists")
)
# Stages that depend little on the MPI, or that are long. `make test` runs these stages on the first MPI only. The slow part
# runs their short tests, and the tests marked `both_mpis`, on the second MPI.
ONCE = ("unit", "launch", "hang", "examples")
PYTEST = ("-m", "pytest", "-q", "--color=no")
SHORT = ("-m", "not slow")
SHORT_OR_BOTH = ("-m", "not slow or both_mpis")
LONG_ON_BOTH = ("-m", "slow and both_mpis")
ON_RANKS = ("--with-mpi", "tests/mpi")
# These files load all cores: one starts dozens of ranks, one compares times. No other stage runs beside them.
LOADING = ("tests/hang/test_scale.py", "tests/hang/test_release.py")
# The examples and the benchmark of mpicoll.torch: jobs in the environment with torch.
WITH_TORCH = "tests/examples/test_with_torch.py"
TORCH_JOBS = "tests/torch_backend/test_jobs.py"
FOLDERS = {  # the stages that are one run of pytest in one process, and the folders that each runs
    "unit": ("tests/unit", "tests/native"),
    "launch": ("tests/launch",),
    "hang": ("tests/hang", *(f"--ignore={file}" for file in LOADING)),
    "scale": LOADING,
    "examples": ("tests/examples", f"--ignore={WITH_TORCH}"),
    "cluster": ("tests/cluster",),
}
CLUSTER = "cluster"
# The values of --stage.
STAGES = "lint, unit, mpi, sanitizers, torch, launch, hang, scale, examples, gpu, cluster, debian, python"
# The kinds of stages, the kinds that need most time first. Stages of different kinds run at the same time, stages of one kind
# one after the other. Jobs that hang or use Slurm mostly wait.
KINDS = ("ranks", "hang", "cluster", "gpu", "unit", "launch", "examples", "jobs", "lint")
EXCLUSIVE = "scale"
# CuPy on a stand-in for CUDA, as (ranks, MPICOLL_CUDA, MPICOLL_CUDA_IPC, files): through the host and on the shared GPU,
# passed to MPI, and whole programs.
CUPY = ROOT / ".venv-cupy"
ON_CUPY = {
    "n=2 gpu": (2, "off", "auto", ("test_gpu", "test_kinds", "test_link")),
    "n=3 direct gpu": (3, "aware", "off", ("test_gpu", "test_kinds")),
    "jobs gpu": (0, "auto", "auto", ("test_jobs",)),
}
# The tests of shared memory with the address and undefined-behaviour sanitizers: on ranks, and in one process.
SANITIZED = ROOT / ".venv-mpich" / "sanitized"
SANITIZED_SIZE = 2
SANITIZED_FILES = (
    "tests/mpi/test_shared_memory.py",
    "tests/mpi/test_async_small_calls.py",
    "tests/mpi/test_isend_irecv.py",
    "tests/mpi/test_extension_messages.py",
    "tests/mpi/test_repeated_messages.py",
    "tests/mpi/test_single_copy.py",
)
# The jobs that hang which Debian's MPI and the newest other Python run.
FEW_HANG = ("tests/hang/test_waiting.py", "tests/hang/test_signals.py", "tests/hang/test_reports.py")
# Debian's MPI: tests on some ranks, and a few tests of whole jobs.
DEBIAN_SIZE = 3
# The oldest and the newest of the other Pythons of this machine, on MPICH: unit tests, and jobs whose ends are recognised in ways
# that depend on the version (bytecode, sys.monitoring, threads). The newest also runs tests on some ranks and a few more jobs.
PYTHON_SIZE = 2
ENDS = ("tests/hang/test_handlers.py", "tests/hang/test_joined_threads.py", "tests/hang/test_teardown.py")
# These unit tests read the files of the repository: their results do not depend on the MPI or the Python.
TEXTS = ("tests/unit/test_architecture.py", "tests/unit/test_words.py")


@dataclass(frozen=True)
class Stage:
    """One run of pytest or of a checker: what to start, and in which environment."""

    name: str
    command: tuple[str, ...]
    venv: str
    size: int = 0  # ranks; 0: no job
    env: tuple[tuple[str, str], ...] = ()
    mpi: str = ""  # if the environment is not named after its MPI

    @property
    def slug(self) -> str:
        return self.name.replace(" ", "-")

    @property
    def kind(self) -> str:
        """Return one of ``KINDS``, or ``EXCLUSIVE`` for a stage that runs beside no other stage."""
        words = self.name.split()
        found = [word for word in (words[-1], words[0]) if word in (*KINDS, EXCLUSIVE)]
        return found[0] if found else KINDS[0]


@dataclass(frozen=True)
class Selection:
    """What the command line asks for: a part, MPIs, stages (none: all), numbers of ranks, and options of pytest."""

    part: str
    mpis: Sequence[str]
    only: Sequence[str]
    sizes: Sequence[int]
    extra: Sequence[str]

    def wants(self, stage: str) -> bool:
        return not self.only or stage in self.only

    def wants_slow(self, stage: str) -> bool:
        return self.part == "slow" and self.wants(stage)

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the options that select the tests of the part."""
        return SHORT if self.part == "fast" else ("-m", "slow")

    def pytest(self, marks: Sequence[str], *tests: str) -> tuple[str, ...]:
        return (*PYTEST, *marks, *self.extra, *tests)


def plan(chosen: Selection) -> list[Stage]:
    """Return the stages to run, in order."""
    stages = _lint() if chosen.part == "fast" and chosen.wants("lint") else []
    for mpi in chosen.mpis:
        if mpi == "mpich":
            stages += [*_torch(chosen), *_cupy(chosen, mpi), *_sanitizers(chosen, mpi)]
        for name in ("unit", "mpi", "launch", "hang", "scale", "examples", "cluster"):
            if chosen.wants(name) and not (name in ONCE and mpi != chosen.mpis[0] and chosen.part == "fast"):
                stages += _on_ranks(chosen, mpi) if name == "mpi" else _in_one_process(chosen, mpi, name)
    return [*stages, *_debian(chosen), *_pythons(chosen)]


def _lint() -> list[Stage]:
    checks = {
        "ruff check": ("ruff", "check", "."),
        "ruff format": ("ruff", "format", "--check", "."),
        "mypy": ("mypy",),
    }
    return [Stage(f"lint {name}", ("-m", *command), ".venv-dev") for name, command in checks.items()]


def _on_ranks(chosen: Selection, mpi: str) -> list[Stage]:
    venv, slow, is_first = f".venv-{mpi}", chosen.part == "slow", mpi == chosen.mpis[0]
    sizes = tuple(chosen.sizes)
    fast_sizes, long_sizes, both_sizes = (
        (FAST_SIZES[mpi], SLOW_SIZES, BOTH_SIZES) if sizes == SIZES else (sizes, sizes, ())
    )
    short = chosen.pytest(SHORT, *ON_RANKS, *STANDINS)
    stages = []
    for size in sizes:
        if size in fast_sizes:
            marks = chosen.marks if is_first or not slow else LONG_ON_BOTH  # each part runs its own tests
            wanted = not slow or size in long_sizes
        else:
            marks = () if size in long_sizes else SHORT_OR_BOTH if size in both_sizes else SHORT
            if size == PYTHON_SIZE and not is_first and _others(chosen):
                marks = LONG_ON_BOTH  # the newest other Python runs the short tests on this MPI
            wanted = slow and size != TWO_NODES[mpi]
        with_standins = is_first and (not slow or size == STANDINS_SIZE or size in long_sizes)
        name = f"{mpi} mpi n={size}"
        env: tuple[tuple[str, str], ...] = ()
        if slow and is_first and size == WITHOUT_EXTENSION:
            name, env = f"{name} without extension", (("MPICOLL_EXTENSION", "off"),)
        if wanted:
            command = chosen.pytest(marks, *ON_RANKS, *(() if with_standins else STANDINS))
            stages.append(Stage(name, command, venv, size, env))
    if slow and THROUGH_MPI[mpi] in sizes:
        # Without the memory that ranks of one node share, as on several nodes.
        size, env = THROUGH_MPI[mpi], (("MPICOLL_ENGINE", "mpi"),)
        stages.append(Stage(f"{mpi} mpi n={size} through MPI", short, venv, size, env))
    if slow and TWO_NODES[mpi] in sizes:
        # MPICH then takes the ranks for ranks of two nodes.
        size, env = TWO_NODES[mpi], (("MPIR_CVAR_NUM_CLIQUES", "2"),)
        stages.append(Stage(f"{mpi} mpi n={size} two nodes", short, venv, size, env))
    return stages


def _in_one_process(chosen: Selection, mpi: str, name: str) -> list[Stage]:
    folders = [each for each in FOLDERS[name] if each.startswith("--") or _has_tests(each)]
    if name == "unit" and mpi != chosen.mpis[0]:
        if _others(chosen):
            folders = []  # the unit tests of the other Pythons are on this MPI
        folders += [f"--ignore={file}" for file in TEXTS if folders]
    if not folders:
        return []
    other = ROOT / (".venv-mpich" if mpi == "openmpi" else ".venv-openmpi")
    env = (("TEST_OTHER_VENV", str(other)),) if name == "launch" else ()
    marks = SHORT_OR_BOTH if name in ONCE and mpi != chosen.mpis[0] else chosen.marks
    return [Stage(f"{mpi} {name}", chosen.pytest(marks, *folders), f".venv-{mpi}", env=env)]


def _has_tests(path: str) -> bool:
    return (ROOT / path).is_file() or any((ROOT / path).rglob("test_*.py"))


def _torch(chosen: Selection) -> list[Stage]:
    """Return the stages with torch: on tensors, and those of the backend of torch.distributed."""
    if not chosen.wants_slow("torch"):
        return []
    parts = (
        ("torch", TENSOR_SIZES, ("tests/tensors",)),
        ("torch backend", BACKEND_SIZES, ("tests/torch_backend", f"--ignore={TORCH_JOBS}")),
    )
    stages = [
        Stage(f"{name} n={size}", chosen.pytest((), "--with-mpi", *files), ".venv-torch", size, mpi="mpich")
        for name, sizes, files in parts
        for size in chosen.sizes
        if size in sizes
    ]
    return [*stages, Stage("torch jobs", chosen.pytest((), WITH_TORCH, TORCH_JOBS), ".venv-torch", mpi="mpich")]


def _cupy(chosen: Selection, mpi: str) -> list[Stage]:
    if not chosen.wants_slow("gpu") or not _has_cupy():
        return []
    folder = str(CUPY / "standin")
    env = (
        ("LD_LIBRARY_PATH", folder),
        ("CUDA_PATH", folder),
        ("CUPY_CACHE_DIR", f"{folder}/cache"),
        ("CUPY_ACCELERATORS", ""),
        ("STANDIN_GPUS", "2"),
    )
    stages = []
    for name, (size, cuda, ipc, files) in ON_CUPY.items():
        command = chosen.pytest((), *(("--with-mpi",) if size else ()), *(f"tests/gpu/{file}.py" for file in files))
        special = (*env, ("MPICOLL_CUDA", cuda), ("MPICOLL_CUDA_IPC", ipc))
        stages.append(Stage(f"{mpi} {name}", command, CUPY.name, size, special, mpi=mpi))
    return stages


def _sanitizers(chosen: Selection, mpi: str) -> list[Stage]:
    if not chosen.wants_slow("sanitizers") or not _has_sanitizers():
        return []
    # Not --capture=fd: the report that a sanitizer prints as it ends the process has to reach the log.
    command = ("tests/native/sanitized.py", "pytest", "-q", "--capture=sys", "--color=no")
    on_ranks = (*command, *chosen.extra, "--with-mpi", *SANITIZED_FILES)
    in_one = (*command, *SHORT, *chosen.extra, "tests/unit/native/test_native.py")
    venv = f".venv-{mpi}"
    return [
        Stage(f"{mpi} mpi n={SANITIZED_SIZE} sanitizers", on_ranks, venv, SANITIZED_SIZE),
        Stage(f"{mpi} unit sanitizers", in_one, venv),
    ]


def _debian(chosen: Selection) -> list[Stage]:
    if not chosen.wants_slow("debian") or not _has_debian():
        return []
    on_ranks = chosen.pytest(SHORT, *ON_RANKS)
    return [
        Stage(f"debian mpi n={DEBIAN_SIZE}", on_ranks, ".venv-debian", DEBIAN_SIZE),
        Stage("debian hang", chosen.pytest(SHORT, *FEW_HANG), ".venv-debian"),
    ]


def _pythons(chosen: Selection) -> list[Stage]:
    stages = []
    on_ranks = chosen.pytest(SHORT, *ON_RANKS, *STANDINS)
    others = _others(chosen)
    for version in dict.fromkeys(others[:1] + others[-1:]):
        venv, name = f".venv-python{version}", f"python {version}"
        unit = chosen.pytest(SHORT, "tests/unit", *(f"--ignore={file}" for file in TEXTS))
        stages.append(Stage(f"{name} unit", unit, venv, mpi="mpich"))
        hang = (SHORT_OR_BOTH, *ENDS) if version != others[-1] else (SHORT, *ENDS, *FEW_HANG)
        stages.append(Stage(f"{name} hang", chosen.pytest(*hang), venv, mpi="mpich"))
    if others:
        stages.append(Stage(f"{name} mpi n={PYTHON_SIZE}", on_ranks, venv, PYTHON_SIZE, mpi="mpich"))
    return stages


def _others(chosen: Selection) -> list[str]:
    return [each for each in pythons.OTHERS if _has_python(each)] if chosen.wants_slow("python") else []


def _has_python(version: str) -> bool:
    return (ROOT / f".venv-python{version}/.installed").exists()


def _has_debian() -> bool:
    return shutil.which("mpirun.openmpi") is not None and (ROOT / ".venv-debian/bin/mpiexec").exists()


def _has_cupy() -> bool:
    return (CUPY / "standin/.installed").exists()


def _has_sanitizers() -> bool:
    return (SANITIZED / "library").exists()


def missing_environments(part: str, only: Sequence[str]) -> list[str]:
    """Return what this machine lacks for the wanted stages that need more than the Makefile's environments."""
    chosen = Selection(part, (), only, (), ())
    lines = []
    if chosen.wants_slow("gpu") and not _has_cupy():
        lines.append("gpu: no stand-in for CUDA in .venv-cupy (make .venv-cupy/standin/.installed, which needs g++)")
    if chosen.wants_slow("sanitizers") and not _has_sanitizers():
        lines.append(
            "sanitizers: no extension with them (make .venv-mpich/sanitized/library, which needs gcc and libasan)"
        )
    if chosen.wants_slow("python"):
        lines += [
            f"python {version}: no such Python on this machine, or no .venv-python{version}"
            for version in pythons.OTHERS
            if not _has_python(version)
        ]
    if chosen.wants_slow("debian") and not _has_debian():
        lines.append("debian: no mpirun.openmpi on this machine, or no .venv-debian (make .venv-debian/bin/mpiexec)")
    return lines
