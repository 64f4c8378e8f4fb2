"""Run the stages of the test suite on both MPIs, each with a hard limit, and print how each ended, with all skips.

``make test`` runs ``python tests/support/stages.py fast``: lint, then the tests on several ranks on Open MPI and on MPICH, and
the unit tests and most tests that start jobs on Open MPI, all without the tests marked ``slow``.
``python tests/support/stages.py slow`` runs the other tests. These include the tests of torch's tensors and of ``tests/gpu``,
which have environments of their own, and some tests on Debian's Open MPI and on other Pythons, if the machine has these.
``stage_plan.py`` plans the stages.
Stages of different kinds run at the same time, ``WORKERS`` at most: tests on several ranks, jobs that hang, jobs of Slurm and so
on. Stages that load the whole machine run at the end, one by one.
Options select stages, for use during development::

    python tests/support/stages.py fast --mpi openmpi --stage mpi --sizes 2,3 -- -k all_reduce

Standard library only: this program runs outside the environments that it tests. Whole logs are in ``.ci-logs/``.
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
import traceback
import uuid
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from jobs import LISTENER, MARK, ROOT, end_job, job_environment, mpiexec_command, start_command
from stage_plan import CLUSTER, EXCLUSIVE, KINDS, SIZES, STAGES, Selection, Stage, missing_environments, plan

LOGS = ROOT / ".ci-logs"
# Hard limits of a stage in seconds. A stage that needs more is broken, or does not belong into `make test`.
LIMITS = {"fast": 600.0, "slow": 3600.0}
WORKERS = 4  # stages at a time
TAIL = 120  # lines that are printed of the log of a failed stage
# On a busy machine one test in some thousands fails by its timing. At most MOST_AGAIN failed tests of a stage are run again
# by themselves, and have to pass TIMES_AGAIN times. They are listed at the end with their first log: each is a defect.
MOST_AGAIN, TIMES_AGAIN = 3, 3
started_jobs: dict[str, subprocess.Popen[bytes]] = {}
"""The launchers of the stages that run, by the marks of their jobs."""
# A reason for a skip that begins with this text is printed at the end, and is no defect: for example too little memory.
LACKS = "this machine lacks"


@dataclass
class Outcome:
    """How a stage ended: counts, and the outcome of each test, for the check for tests that never run."""

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


def not_tested(part: str, only: Sequence[str], outcomes: Sequence[Outcome]) -> list[str]:
    """Return which tests did not run because this machine lacks something: a cluster, Debian's MPI, or memory."""
    lines = []
    for outcome in outcomes:
        reasons: dict[str, int] = {}
        for (_, reason), count in outcome.skips.items():
            if outcome.stage.name.endswith(f" {CLUSTER}") or reason.startswith(LACKS):
                reasons[reason] = reasons.get(reason, 0) + count
        lines += [f"{outcome.stage.name}: {count} tests: {reason}" for reason, count in reasons.items()]
    return lines + missing_environments(part, only)


def run(stage: Stage, limit: float) -> Outcome:
    """Run a stage; run it again if Open MPI's launcher failed before any rank ran, and run its failed tests again."""
    outcome = _run_once(stage, limit)
    if outcome.failed and stage.size and not outcome.tests and LISTENER in _log(stage).read_text(errors="replace"):
        outcome = _run_once(stage, limit)
        outcome.notes.append(f"started twice: the first time Open MPI said {LISTENER!r} before any rank ran")
    failed = [name for name, kind in outcome.tests.items() if kind == "failed"]
    if failed and len(failed) == outcome.failed <= MOST_AGAIN:
        _try_again(outcome, failed, limit)
    return outcome


def _try_again(outcome: Outcome, failed: list[str], limit: float) -> None:
    """Run the failed tests of a stage TIMES_AGAIN times with no other tests; if all pass, they count as unsteady."""
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
    """Return pytest's node id of a test, from the name in a report: ``tests.unit.test_x.TestY::test_z[1]``."""
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
    # The environments are installed without bytecode, and to compile NumPy and the package costs each process half a second.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPYCACHEPREFIX"] = str(LOGS / "compiled")
    if stage.size:
        command = mpiexec_command(stage.size, command, python=python, mpi=mpi)
    mark = uuid.uuid4().hex
    environment[MARK] = mark
    # pytest numbers the folders of a user, and each session removes old folders of all sessions.
    environment["PYTEST_DEBUG_TEMPROOT"] = temporary = tempfile.mkdtemp(prefix="stage-")
    memory = ""
    if stage.size and os.access("/dev/shm", os.W_OK):
        # Open MPI 5 names the shared memory of a job by 16 bits. Two jobs at the same time sometimes get the same name, and both
        # end by a segmentation fault.
        environment["OMPI_MCA_btl_sm_backing_directory"] = memory = tempfile.mkdtemp(prefix="stage-", dir="/dev/shm")
    outcome = Outcome(stage)
    started = time.monotonic()
    with open(_log(stage), "wb") as log:
        process = started_jobs[mark] = start_command(command, log, environment, ROOT)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            outcome.notes.append(f"killed at its limit of {limit:.0f} s")
            outcome.failed += 1
        finally:
            end_job(process, mark)
            started_jobs.pop(mark, None)
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


def run_all(stages: Sequence[Stage], limit: float, workers: int) -> list[Outcome]:
    """Run the stages, those of one kind one after the other; print how each ended as soon as it has ended."""
    outcomes: dict[str, Outcome] = {}
    waiting = sorted((s for s in stages if s.kind != EXCLUSIVE), key=lambda stage: KINDS.index(stage.kind))
    running: set[str] = set()
    changed = threading.Condition()

    def work() -> None:
        while True:
            with changed:
                while (stage := next((s for s in waiting if s.kind not in running), None)) is None and waiting:
                    changed.wait()
                if stage is None:
                    return
                waiting.remove(stage)
                running.add(stage.kind)
            try:
                outcome = run(stage, limit)
            except Exception:
                outcome = Outcome(stage, failed=1, notes=traceback.format_exc().splitlines())
            with changed:
                outcomes[stage.name] = outcome
                show(outcome)
                running.remove(stage.kind)
                changed.notify_all()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C: no stage begins any more, and no job stays
        with changed:
            waiting.clear()
        for mark, process in tuple(started_jobs.items()):
            end_job(process, mark)
        raise
    waiting = [stage for stage in stages if stage.kind == EXCLUSIVE]
    work()
    return [outcomes[stage.name] for stage in stages]


def show(outcome: Outcome) -> None:
    """Print how a stage ended, and the end of its log if a test failed."""
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
    """Return the tests on several ranks that an MPI skipped on every number of ranks, though the machine lacks nothing."""
    seen: dict[tuple[str, str], set[str]] = {}
    lacking: set[tuple[str, str]] = set()
    for outcome in outcomes:
        # Debian's MPI runs on one number of ranks. A special environment may skip tests that do not fit it.
        if outcome.stage.size and not outcome.stage.venv.startswith(".venv-debian"):
            mpi = outcome.stage.mpi or outcome.stage.venv.removeprefix(".venv-")
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
    """Return a line for each skipped test and reason, with the stages that skipped the test."""
    where: dict[tuple[str, str], dict[str, int]] = {}
    for outcome in outcomes:
        for key, count in outcome.skips.items():
            where.setdefault(key, {})[outcome.stage.name] = count
    return [
        f"  {test}: {reason} ({', '.join(f'{stage}: {count}' for stage, count in stages.items())})"
        for (test, reason), stages in sorted(where.items())
    ]


def total() -> int:
    """Print the sum of the results of the last runs of both parts; return the exit code."""
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
        help=f"which stages: {STAGES} (default: all)",
    )
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="numbers of ranks (default: %(default)s)")
    parser.add_argument(
        "--workers",
        type=int,
        default=WORKERS,
        help="stages at a time (default: %(default)s)",
    )
    options = parser.parse_args(own)
    if options.workers < 1:
        parser.error("--workers must be at least 1")
    if options.part == "total":
        return total()
    sizes = [int(size) for size in options.sizes.split(",")]
    only = [s for s in options.stage.split(",") if s]
    stages = plan(Selection(options.part, options.mpi.split(","), only, sizes, extra))
    LOGS.mkdir(exist_ok=True)
    (LOGS / f"{options.part}.json").unlink(missing_ok=True)

    began = time.monotonic()
    outcomes = run_all(stages, LIMITS[options.part], options.workers)
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
