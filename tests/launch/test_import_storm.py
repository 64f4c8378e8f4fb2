"""How many files each rank opens at its start: on thousands of ranks they all come from one file server at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from jobs import family, job_environment

pytestmark = pytest.mark.slow

SOURCE = """
import importlib, json, os, sys, sysconfig
import numpy as np

opened, phase = {"import": [], "first collective": []}, "import"

def note(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        opened[phase].append(os.fsdecode(arguments[0]))

def mapped():
    with open("/proc/self/maps") as maps:
        return {line.split(None, 5)[5].strip() for line in maps if len(line.split(None, 5)) > 5 and "/" in line}

before = mapped()
sys.addaudithook(note)
import mpicoll as dist
phase = "first collective"
dist.init_process_group()
dist.all_reduce(np.ones(3))
phase = "after"
opened["after"] = []
home = lambda name: os.path.dirname(os.path.realpath(importlib.import_module(name).__file__))
print(json.dumps({
    "opened": opened,
    "libraries": sorted(mapped() - before),
    "homes": {name: home(name) for name in ("mpicoll", "mpi4py", "numpy")},
    "standard": sysconfig.get_paths()["stdlib"],
}))
"""

# Measured with Python 3.11: 2, 63 and 32. With room for a few more: who adds much to the start sees it here.
MOST_ON_IMPORT = 4
MOST_OF_OURS = 126  # one file for each concern, and one for each package
MOST_OF_OTHERS = 60


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process opens that runs alone, with its modules compiled."""
    environment = job_environment(family(), {"PYTHONDONTWRITEBYTECODE": None, "PYTHONFAULTHANDLER": None})
    environment["PYTHONPYCACHEPREFIX"] = str(tmp_path_factory.mktemp("compiled"))
    for _ in range(2):  # the first one compiles
        done = subprocess.run(
            [sys.executable, "-c", SOURCE], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["compiled"] = environment["PYTHONPYCACHEPREFIX"]
    return found


def owner(path: str, account: dict[str, Any]) -> str:
    """Return whose file it is: a package's, the standard library's, memory's, or the path itself."""
    compiled = path.startswith(account["compiled"])
    path = os.path.realpath(path.removeprefix(account["compiled"]) if compiled else path)
    for name, home in account["homes"].items():
        if path.startswith(home + os.sep):
            return str(name)
    if path.startswith(
        (os.path.realpath(account["standard"]), *(os.path.realpath(p) for p in sys.path if "python" in p))
    ):
        return "standard"
    if path.startswith(("/proc/", "/sys/", "/dev/")):
        return "memory"
    return path


def test_few_files_are_opened(account: dict[str, Any]) -> None:
    """Importing opens two files of ours; the first collective each module once, and no file but of packages and memory."""
    first = [path for path in account["opened"]["import"] if owner(path, account) == "mpicoll"]
    assert 1 <= len(first) <= MOST_ON_IMPORT, first
    opened = account["opened"]["import"] + account["opened"]["first collective"]
    whose = Counter(owner(path, account) for path in opened)
    assert set(whose) <= {"mpicoll", "mpi4py", "numpy", "standard", "memory"}, whose
    ours = [path for path in opened if owner(path, account) == "mpicoll"]
    assert len(ours) <= MOST_OF_OURS, sorted(ours)
    assert max(Counter(ours).values()) == 1, Counter(ours).most_common(5)
    assert sum(whose.values()) - len(ours) <= MOST_OF_OTHERS, whose
    print(f"\n{len(ours)} files of mpicoll, others: {dict(whose)}", *sorted(Path(path).name for path in ours))


def test_one_library_of_ours_is_loaded(account: dict[str, Any]) -> None:
    """What is mapped between the import and the first collective is MPI's, Python's, the system's, and the C extension."""
    ours = [path for path in account["libraries"] if path.startswith(account["homes"]["mpicoll"])]
    assert len(ours) <= 1
    assert all(os.path.basename(path).startswith("_native.") for path in ours), ours
    named = [path for path in account["libraries"] if ".so" in path]
    assert any("mpi" in os.path.basename(path).lower() for path in named), account["libraries"]
    print(f"\n{len(named)} shared libraries")
