"""Run the stages of the test suite on both MPIs, each with a hard limit, its time, and every skip with its reason.

``python tests/support/stages.py fast`` is what ``make test`` runs: lint, then for Open MPI and for MPICH the unit tests, the
multi-rank tests on several numbers of ranks, and the tests that start jobs of their own, all without those marked ``slow``.
``python tests/support/stages.py slow`` runs the rest, the tests of torch's tensors and those of tests/gpu, which
have environments of their own, and some on Debian's Open MPI and on other Pythons, where those are installed.
Four stages run at a time: one of tests on several ranks, one of jobs that hang and one of Slurm, which mostly wait, and one of
the rest. What loads the whole machine runs after them, alone.
Options narrow it down while developing::

    python tests/support/stages.py fast --mpi openmpi --stage mpi --sizes 2,3 -- -k all_reduce

Standard library only; it runs outside the environments that it tests. Whole logs are kept under ``.ci-logs/``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pythons
from jobs import LISTENER, MARK, ROOT, end_job, job_environment, mpiexec_command

LOGS = ROOT / ".ci-logs"
SIZES = (1, 2, 3, 4, 5)
TENSOR_SIZES = (2, 3)
FAST_SIZES = {"openmpi": (1, 3), "mpich": (3,)}  # in `make test`; the others in `make test-all`
# The numbers of ranks with the long tests too, and with those alone that are `both_mpis`.
SLOW_SIZES = (3,)
BOTH_SIZES = (2,)
TWO_NODES = {"openmpi": 0, "mpich": 4}
THROUGH_MPI = 5  # ranks that share no memory in `make test-all`
# The number of ranks at which the slow part does without the C extension, on the first MPI.
WITHOUT_EXTENSION = 4
# The tests on stand-ins for a GPU take a third of the time of a run: all on the first MPI, the short ones on the other.
STANDINS_SIZE = 2
STANDINS = tuple(
    f"--ignore=tests/mpi/{name}.py"
    for name in ("test_device_arrays", "test_device_link", "test_device_pieces", "test_direct_lists")
)
# What says little about the MPI below, or takes long: `make test` runs it on the first, the slow part on the second, without
# what is long and not `both_mpis`.
ONCE = ("unit", "launch", "hang", "examples")
SHORT = ("-m", "not slow")
SHORT_OR_BOTH = ("-m", "not slow or both_mpis")
# Hard limits of one stage in seconds; a stage that needs more is broken or does not belong into `make test`.
LIMITS = {"fast": 600.0, "slow": 2400.0}
TAIL = 120  # lines of the log of a stage that failed
# On a busy machine one test in some thousands meets a moment that it did not foresee. At most so many of a stage are tried
# again, alone, and have to pass each time; they are listed at the end, with their first log, and are defects to be mended.
MOST_AGAIN, TIMES_AGAIN = 3, 3
# Some dozens of ranks on two cores leave little to anybody else, and one test compares times: these run by themselves.
ALONE = ("tests/hang/test_scale.py", "tests/hang/test_release.py")
FOLDERS = {  # the stages that are plain pytest, and the folders they run
    "unit": ("tests/unit", "tests/native"),
    "launch": ("tests/launch",),
    "hang": ("tests/hang", *(f"--ignore={file}" for file in ALONE)),
    "scale": ALONE,
    "examples": ("tests/examples",),
    "cluster": ("tests/cluster",),
}
# What runs beside the tests on several ranks: jobs that hang and those of Slurm, which mostly wait, and all others.
BESIDE = {
    "hang": "hangs",
    "cluster": "clusters",
    **dict.fromkeys(("unit", "launch", "examples", "gpu"), "others"),
}
LANES = ("ranks", *dict.fromkeys(BESIDE.values()))
# CuPy on a stand-in for CUDA: by way of the host and on the GPU that ranks share, handed to MPI, and whole programs.
CUPY = ROOT / ".venv-cupy"
ON_CUPY = {
    "n=2 gpu": (2, "off", "auto", ("test_gpu", "test_kinds", "test_link")),
    "n=3 handed gpu": (3, "aware", "off", ("test_gpu", "test_kinds")),
    "jobs gpu": (0, "auto", "auto", ("test_jobs",)),
}
# The tests of shared memory on an extension with the address and undefined-behaviour sanitizers: on ranks, and in one process.
SANITIZED = ROOT / ".venv-mpich" / "sanitized"
SANITIZED_SIZE = 2
# What is run on the MPI that Debian has: on some ranks, and a handful of the tests of whole jobs.
DEBIAN_SIZE = 3
# What is run on the other Pythons of this machine, on MPICH: unit tests and some ranks, on the newest the jobs that hang, too.
PYTHON_SIZE = 2
# How a test says that it was skipped for want of memory, say: no defect, but to be told at the end.
LACKS = "this machine lacks"
DEBIAN_HANG = ("tests/hang/test_waiting.py", "tests/hang/test_signals.py", "tests/hang/test_reports.py")


@dataclass(frozen=True)
class Stage:
    """One run of pytest or of a checker: what to start, and in whose environment."""

    name: str
    command: tuple[str, ...]
    venv: str
    size: int = 0  # ranks; 0 is no job
    env: tuple[tuple[str, str], ...] = ()
    mpi: str = ""  # of a venv that is not named after its MPI

    @property
    def slug(self) -> str:
        return self.name.replace(" ", "-")

    @property
    def lane(self) -> str:
        """Beside what it runs: one of ``LANES``, which are driven at once, or "alone" after them."""
        kind = self.name.split()[-1]
        return BESIDE.get(kind, "alone" if kind == "scale" else LANES[0])


@dataclass
class Outcome:
    """How a stage ended: counts, and the outcome of every test for the check of tests that never run."""

    stage: Stage
    seconds: float = 0.0
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    notes: list[str] = field(default_factory=list)
    skips: dict[tuple[str, str], int] = field(default_factory=dict)
    tests: dict[str, str] = field(default_factory=dict)
    lacking: set[str] = field(default_factory=set)
    unsteady: list[str] = field(default_factory=list)

    def line(self) -> str:
        state = "FAILED" if self.failed else "ok"
        counts = f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"
        if not self.passed + self.failed + self.skipped:
            counts = "no tests in this part"
        return f"{state:<7}{self.stage.name:<28}{self.seconds:7.1f} s   {counts}"


def plan(
    part: str, mpis: Sequence[str], only: Sequence[str], sizes: Sequence[int], extra: Sequence[str]
) -> list[Stage]:
    """Return the stages to run, in order."""
    marks = ("-m", "not slow" if part == "fast" else "slow")
    ranks_of = ("--with-mpi", "tests/mpi")
    stages = []
    if part == "fast" and (not only or "lint" in only):
        checks = {"ruff check": ("ruff", "check", "."), "ruff format": ("ruff", "format", "--check", ".")}
        checks["mypy"] = ("mypy",)
        stages += [Stage(f"lint {name}", ("-m", *command), ".venv-dev") for name, command in checks.items()]
    for mpi in mpis:
        venv = f".venv-{mpi}"
        pytest = ("-m", "pytest", "-q", "--color=no", *marks, *extra)
        half = (*pytest, *ranks_of)
        fast = FAST_SIZES[mpi] if tuple(sizes) == SIZES else tuple(sizes)
        everything = ("-m", "pytest", "-q", "--color=no", *extra, *ranks_of)
        short = ("-m", "pytest", "-q", "--color=no", *SHORT, *extra, *ranks_of)
        short_or_both = ("-m", "pytest", "-q", "--color=no", *SHORT_OR_BOTH, *extra, *ranks_of)
        slow = SLOW_SIZES if tuple(sizes) == SIZES else tuple(sizes)
        both = BOTH_SIZES if tuple(sizes) == SIZES else ()
        ranks = []
        for size in sizes:
            if size in fast:
                command = half  # the other in the other part
                wanted = part == "fast" or size in slow
            else:
                command = everything if size in slow else short_or_both if size in both else short
                wanted = part == "slow" and size not in (THROUGH_MPI, TWO_NODES[mpi])
            with_standins = (
                mpi == mpis[0] if part == "fast" else size == STANDINS_SIZE or (mpi == mpis[0] and size in slow)
            )
            standins = () if with_standins else STANDINS
            name, env = f"{mpi} mpi n={size}", ()
            if part == "slow" and mpi == mpis[0] and size == WITHOUT_EXTENSION:
                name, env = f"{name} without extension", (("MPICOLL_EXTENSION", "off"),)
            if wanted:
                ranks.append(Stage(name, (*command, *standins), venv, size, env))
        if part == "slow" and THROUGH_MPI in sizes:
            # As ranks of several nodes do: without the memory that those of one node share.
            env = (("MPICOLL_ENGINE", "mpi"),)
            ranks.append(Stage(f"{mpi} mpi n={THROUGH_MPI} through MPI", (*short, *STANDINS), venv, THROUGH_MPI, env))
        if part == "slow" and mpi == "mpich" and (not only or "torch" in only):
            tensors = ("-m", "pytest", "-q", "--color=no", *extra, "--with-mpi", "tests/tensors")
            stages += [
                Stage(f"torch n={size}", tensors, ".venv-torch", size, mpi=mpi)
                for size in sizes
                if size in TENSOR_SIZES
            ]
        if _wants_cupy(part, only) and mpi == "mpich" and _has_cupy():
            room = str(CUPY / "standin")
            env = (
                ("LD_LIBRARY_PATH", room),
                ("CUDA_PATH", room),
                ("CUPY_CACHE_DIR", f"{room}/cache"),
                ("CUPY_ACCELERATORS", ""),
                ("STANDIN_GPUS", "2"),
            )
            for name, (size, cuda, ipc, files) in ON_CUPY.items():
                tests = (*(("--with-mpi",) if size else ()), *(f"tests/gpu/{file}.py" for file in files))
                special = (*env, ("MPICOLL_CUDA", cuda), ("MPICOLL_CUDA_IPC", ipc))
                command = ("-m", "pytest", "-q", "--color=no", *extra, *tests)
                stages.append(Stage(f"{mpi} {name}", command, CUPY.name, size, special, mpi=mpi))
        if _wants_sanitizers(part, only) and mpi == "mpich" and _has_sanitizers():
            # Not --capture=fd: what a sanitizer says as it ends the process has to reach the log.
            sanitized = ("tests/native/sanitized.py", "pytest", "-q", "--capture=sys", "--color=no")
            on_ranks = (*sanitized, *extra, "--with-mpi", "tests/mpi/test_shared_memory.py")
            alone = (*sanitized, *SHORT, *extra, "tests/unit/native/test_native.py")
            stages += [
                Stage(f"{mpi} mpi n={SANITIZED_SIZE} sanitizers", on_ranks, venv, SANITIZED_SIZE),
                Stage(f"{mpi} unit sanitizers", alone, venv),
            ]
        if part == "slow" and TWO_NODES[mpi] in sizes:
            # On what MPICH takes for two nodes.
            env = (("MPIR_CVAR_NUM_CLIQUES", "2"),)
            size = TWO_NODES[mpi]
            ranks.append(Stage(f"{mpi} mpi n={size} two nodes", (*short, *STANDINS), venv, size, env))
        for name in ("unit", "mpi", "launch", "hang", "scale", "examples", "cluster"):
            if only and name not in only:
                continue
            if name in ONCE and mpi != mpis[0] and part == "fast":
                continue
            if name == "mpi":
                stages += ranks
            elif folders := [each for each in FOLDERS[name] if each.startswith("--") or _has_tests(ROOT / each)]:
                elsewhere = ROOT / (".venv-mpich" if mpi == "openmpi" else ".venv-openmpi")
                env = (("TEST_OTHER_VENV", str(elsewhere)),) if name == "launch" else ()
                other = name in ONCE and mpi != mpis[0]
                chosen = ("-m", "pytest", "-q", "--color=no", *SHORT_OR_BOTH, *extra) if other else pytest
                stages.append(Stage(f"{mpi} {name}", (*chosen, *folders), venv, env=env))
    if _wants_debian(part, only) and _has_debian():
        tests = ("-m", "pytest", "-q", "--color=no", "-m", "not slow", *extra)
        stages += [
            Stage(f"debian mpi n={DEBIAN_SIZE}", (*tests, "--with-mpi", "tests/mpi"), ".venv-debian", DEBIAN_SIZE),
            Stage("debian hang", (*tests, *DEBIAN_HANG), ".venv-debian"),
        ]
    if _wants_pythons(part, only):
        short = ("-m", "pytest", "-q", "--color=no", *SHORT, *extra)
        others = [version for version in pythons.OTHERS if _has_python(version)]
        for version in others:
            venv, name = f".venv-python{version}", f"python {version}"
            stages += [
                Stage(f"{name} mpi n={PYTHON_SIZE}", (*short, *ranks_of, *STANDINS), venv, PYTHON_SIZE, mpi="mpich"),
                Stage(f"{name} unit", (*short, "tests/unit"), venv, mpi="mpich"),
            ]
        if others:
            stages.append(Stage(f"{name} hang", (*short, *FOLDERS["hang"]), venv, mpi="mpich"))
    return stages


def _wants_pythons(part: str, only: Sequence[str]) -> bool:
    return part == "slow" and (not only or "python" in only)


def _has_python(version: str) -> bool:
    return (ROOT / f".venv-python{version}/.installed").exists()


def _wants_debian(part: str, only: Sequence[str]) -> bool:
    return part == "slow" and (not only or "debian" in only)


def _has_debian() -> bool:
    return shutil.which("mpirun.openmpi") is not None and (ROOT / ".venv-debian/bin/mpiexec").exists()


def _wants_cupy(part: str, only: Sequence[str]) -> bool:
    return part == "slow" and (not only or "gpu" in only)


def _has_cupy() -> bool:
    return (CUPY / "standin/.installed").exists()


def _wants_sanitizers(part: str, only: Sequence[str]) -> bool:
    return part == "slow" and (not only or "sanitizers" in only)


def _has_sanitizers() -> bool:
    return (SANITIZED / "library").exists()


def not_tested(part: str, only: Sequence[str], outcomes: Sequence[Outcome]) -> list[str]:
    """Return what the tests leave out since this machine lacks something: a cluster, Debian's MPI, or memory."""
    lines = []
    for outcome in outcomes:
        reasons: dict[str, int] = {}
        for (_, reason), count in outcome.skips.items():
            if outcome.stage.name.endswith(" cluster") or reason.startswith(LACKS):
                reasons[reason] = reasons.get(reason, 0) + count
        lines += [f"{outcome.stage.name}: {count} tests: {reason}" for reason, count in reasons.items()]
    if _wants_cupy(part, only) and not _has_cupy():
        lines.append("gpu: no stand-in for CUDA in .venv-cupy (make .venv-cupy/standin/.installed, which needs g++)")
    if _wants_sanitizers(part, only) and not _has_sanitizers():
        lines.append(
            "sanitizers: no extension with them (make .venv-mpich/sanitized/library, which needs gcc and libasan)"
        )
    if _wants_pythons(part, only):
        lines += [
            f"python {version}: no such Python on this machine, or no .venv-python{version}"
            for version in pythons.OTHERS
            if not _has_python(version)
        ]
    if _wants_debian(part, only) and not _has_debian():
        lines.append("debian: no mpirun.openmpi on this machine, or no .venv-debian (make .venv-debian/bin/mpiexec)")
    return lines


def _has_tests(folder: Path) -> bool:
    return folder.is_file() or any(folder.rglob("test_*.py"))


def run(stage: Stage, limit: float) -> Outcome:
    """Run one stage, and once more if the launcher failed in the one way that is known to be nobody's fault."""
    outcome = _run_once(stage, limit)
    if outcome.failed and stage.size and not outcome.tests and LISTENER in _log(stage).read_text(errors="replace"):
        outcome = _run_once(stage, limit)
        outcome.notes.append(f"started twice: the first time Open MPI said {LISTENER!r} before any rank ran")
    failed = [name for name, kind in outcome.tests.items() if kind == "failed"]
    if failed and len(failed) == outcome.failed <= MOST_AGAIN:
        _try_again(outcome, failed, limit)
    return outcome


def _try_again(outcome: Outcome, failed: list[str], limit: float) -> None:
    """Run the tests of a stage that failed some more times, by themselves; those of which all pass are unsteady."""
    stage = outcome.stage
    at = stage.command.index("--color=no") + 1
    while stage.command[at : at + 1] == ("-m",):
        at += 2
    chosen = (*stage.command[:at], *(("--with-mpi",) if "--with-mpi" in stage.command else ()), *map(_node, failed))
    for number in range(TIMES_AGAIN):
        again = _run_once(replace(stage, name=f"{stage.name} again {number + 1}", command=chosen), limit)
        outcome.seconds += again.seconds
        if again.failed or again.passed != len(failed):
            outcome.notes.append(f"tried again alone: failed in try {number + 1} of {TIMES_AGAIN}")
            return
    outcome.failed -= len(failed)
    outcome.passed += len(failed)
    outcome.unsteady += failed
    outcome.tests.update(dict.fromkeys(failed, "passed"))


def _node(name: str) -> str:
    """Return what pytest calls a test, from its name in a report: ``tests.unit.test_x.TestY::test_z[1]``."""
    where, _, test = name.partition("::")
    parts = where.split(".")
    file = next(end for end in range(len(parts), 0, -1) if (ROOT.joinpath(*parts[:end])).with_suffix(".py").exists())
    return "::".join(["/".join(parts[:file]) + ".py", *parts[file:], test])


def _log(stage: Stage) -> Path:
    return LOGS / f"{stage.slug}.log"


def _run_once(stage: Stage, limit: float) -> Outcome:
    python = str(ROOT / stage.venv / "bin" / "python")
    report = LOGS / f"{stage.slug}.xml"
    report.unlink(missing_ok=True)
    command = [python, *stage.command]
    is_pytest = "pytest" in stage.command
    if is_pytest:
        command.append(f"--junitxml={report}")
    mpi = stage.mpi or stage.venv.removeprefix(".venv-")
    environment = job_environment(mpi, dict(stage.env))
    # The environments are installed without bytecode: compiling NumPy and the package takes each process half a second.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPYCACHEPREFIX"] = str(LOGS / "compiled")
    if stage.size:
        command = mpiexec_command(stage.size, command, python=python, mpi=mpi)
    mark = uuid.uuid4().hex
    environment[MARK] = mark
    # pytest's folders of a user are numbered and swept by all sessions of this machine.
    environment["PYTEST_DEBUG_TEMPROOT"] = temporary = tempfile.mkdtemp(prefix="stage-")
    memory = ""
    if stage.size and os.access("/dev/shm", os.W_OK):
        # Open MPI 5 names a job's shared memory by 16 bits: now and then a job that starts beside this one has the same, writes
        # over it, and both end by a segmentation fault.
        environment["OMPI_MCA_btl_sm_backing_directory"] = memory = tempfile.mkdtemp(prefix="stage-", dir="/dev/shm")
    outcome = Outcome(stage)
    started = time.monotonic()
    with open(_log(stage), "wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            outcome.notes.append(f"killed at its limit of {limit:.0f} s")
            outcome.failed += 1
        finally:
            end_job(process, mark)
            shutil.rmtree(temporary, ignore_errors=True)
            if memory:
                shutil.rmtree(memory, ignore_errors=True)
    outcome.seconds = time.monotonic() - started
    if is_pytest and report.exists():
        _read(report, outcome)
    elif not is_pytest and process.returncode == 0:
        outcome.passed += 1
    outcome.notes += [
        line
        for line in _log(stage).read_text(errors="replace").splitlines()
        if "the job ends here" in line or line.startswith("random programs on")
    ]
    # pytest's exit code 5: no test was selected.
    if process.returncode not in ((0, 5) if is_pytest else (0,)) and not outcome.failed:
        outcome.failed += 1
        outcome.notes.append(f"exit code {process.returncode}")
    return outcome


def _read(report: Path, outcome: Outcome) -> None:
    for case in ET.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        kinds = {child.tag: child for child in case}
        if "failure" in kinds or "error" in kinds:
            outcome.failed += 1
            outcome.tests[name] = "failed"
        elif "skipped" in kinds and kinds["skipped"].get("type") != "pytest.xfail":
            reason = kinds["skipped"].get("message", "").partition(", only ")[0] or "no reason given"
            where = name.partition("[")[0]
            outcome.skipped += 1
            outcome.tests[name] = "skipped"
            if reason.startswith(LACKS):
                outcome.lacking.add(name)
            outcome.skips[where, reason] = outcome.skips.get((where, reason), 0) + 1
        else:
            outcome.passed += 1
            outcome.tests[name] = "passed"


def run_all(stages: Sequence[Stage], limit: float, lanes: int) -> list[Outcome]:
    """Run the stages, in their order or on several lanes, and say of each how it ended as soon as it has."""
    outcomes: dict[str, Outcome] = {}
    printing = threading.Lock()

    def drive(lane: Sequence[Stage]) -> None:
        for stage in lane:
            outcome = run(stage, limit)
            with printing:
                outcomes[stage.name] = outcome
                show(outcome)

    if lanes == 1:
        drive(stages)
    else:
        of = {lane: [stage for stage in stages if stage.lane == lane] for lane in (*LANES, "alone")}
        others = [threading.Thread(target=drive, args=(of[lane],)) for lane in LANES[1:]]
        for other in others:
            other.start()
        drive(of[LANES[0]])
        for other in others:
            other.join()
        drive(of["alone"])
    missing = [stage for stage in stages if stage.name not in outcomes]
    for stage in missing:
        outcomes[stage.name] = Outcome(stage, failed=1, notes=["never ended: see the traceback above"])
        show(outcomes[stage.name])
    return [outcomes[stage.name] for stage in stages]


def show(outcome: Outcome) -> None:
    """Print how a stage ended, and the end of its log where something failed."""
    print(outcome.line(), flush=True)
    for note in outcome.notes:
        print(f"       {note}", flush=True)
    for name in outcome.unsteady:
        print(f"       UNSTEADY {name}: failed once, then passed {TIMES_AGAIN} times alone")
    if (outcome.failed or outcome.unsteady) and _log(outcome.stage).exists():
        lines = _log(outcome.stage).read_text(errors="replace").splitlines()
        print(f"--- the end of {_log(outcome.stage).relative_to(ROOT)} ({len(lines)} lines) ---")
        print("\n".join(lines[-TAIL:]), flush=True)
        print("--- end ---", flush=True)


def never_run(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the multi-rank tests that were skipped on every number of ranks, per MPI, but for what the machine lacks."""
    seen: dict[tuple[str, str], set[str]] = {}
    lacking = set()
    for outcome in outcomes:
        # Debian's MPI and other Pythons are tried on one number of ranks; a special environment skips what does not fit it.
        if outcome.stage.size and not outcome.stage.venv.startswith((".venv-debian", ".venv-python")):
            mpi = outcome.stage.venv.removeprefix(".venv-")
            lacking.update((mpi, name) for name in outcome.lacking)
            for name, kind in outcome.tests.items():
                if kind != "skipped" or not outcome.stage.env:
                    seen.setdefault((mpi, name), set()).add(kind)
    return [
        f"{mpi} {name}"
        for (mpi, name), kinds in sorted(seen.items())
        if kinds == {"skipped"} and (mpi, name) not in lacking
    ]


def skip_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Return every skip with its reason, alike ones together."""
    where: dict[tuple[str, str], dict[str, int]] = {}
    for outcome in outcomes:
        for key, count in outcome.skips.items():
            where.setdefault(key, {})[outcome.stage.name] = count
    return [
        f"  {test}: {reason} ({', '.join(f'{stage}: {count}' for stage, count in stages.items())})"
        for (test, reason), stages in sorted(where.items())
    ]


def total() -> int:
    """Print the sum of the parts that were run last."""
    sums = {"passed": 0, "failed": 0, "skipped": 0}
    for part in ("fast", "slow"):
        path = LOGS / f"{part}.json"
        if path.exists():
            counts = json.loads(path.read_text())
            sums = {kind: count + counts[kind] for kind, count in sums.items()}
    print(", ".join(f"{count} {kind}" for kind, count in sums.items()), flush=True)
    return 1 if sums["failed"] or not sums["passed"] else 0


def main(argv: Sequence[str]) -> int:
    at = list(argv).index("--") if "--" in argv else len(argv)
    own, extra = list(argv[:at]), list(argv[at + 1 :])
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=("fast", "slow", "total"))
    parser.add_argument("--mpi", default="openmpi,mpich", help="which environments (default: %(default)s)")
    parser.add_argument(
        "--stage",
        default="",
        help="which: lint, unit, mpi, sanitizers, torch, launch, hang, scale, examples, gpu, cluster, debian, python",
    )
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="numbers of ranks (default: %(default)s)")
    parser.add_argument(
        "--lanes", type=int, choices=(1, len(LANES)), default=len(LANES), help="stages at a time (default: %(default)s)"
    )
    options = parser.parse_args(own)
    if options.part == "total":
        return total()
    sizes = [int(size) for size in options.sizes.split(",")]
    only = [s for s in options.stage.split(",") if s]
    stages = plan(options.part, options.mpi.split(","), only, sizes, extra)
    LOGS.mkdir(exist_ok=True)
    (LOGS / f"{options.part}.json").unlink(missing_ok=True)

    began = time.monotonic()
    outcomes = run_all(stages, LIMITS[options.part], options.lanes)
    unreached = [] if extra or set(sizes) != set(SIZES) else never_run(outcomes)

    if skips := skip_lines(outcomes):
        print("skipped, with the stages and how many:")
        print("\n".join(skips))
    if unreached:
        print("skipped on every number of ranks, which is a failure:")
        print("\n".join(f"  {name}" for name in unreached))
    if any(outcome.unsteady for outcome in outcomes):
        print(
            f"UNSTEADY, to be mended: failed once, then passed {TIMES_AGAIN} times alone (their first logs are above):"
        )
        print("\n".join(f"  {outcome.stage.name}: {name}" for outcome in outcomes for name in outcome.unsteady))
    if lines := not_tested(options.part, only, outcomes):
        print("*" * 100)
        print("*** NOT TESTED: this machine lacks what these need (for clusters: tests/cluster/install.sh)")
        print("\n".join(f"***   {line}" for line in lines))
        print("*" * 100, flush=True)
    passed, failed, skipped = (sum(getattr(o, kind) for o in outcomes) for kind in ("passed", "failed", "skipped"))
    failed += len(unreached)
    seconds = time.monotonic() - began
    (LOGS / f"{options.part}.json").write_text(
        json.dumps({"passed": passed, "failed": failed, "skipped": skipped, "seconds": seconds})
    )
    print(f"{options.part} part: {seconds:.0f} s")
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
