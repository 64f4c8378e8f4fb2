"""Start `mpicoll run` and scripts for the tests of launching, with hard limits and a mark to find what is left."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs import marked

LIMIT = 60.0
OTHER = "TEST_OTHER_VENV"
LAUNCH_MARK = "LAUNCH_TEST"
RUN = [sys.executable, "-m", "mpicoll", "run"]


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment without what these tests look at, and what `mpicoll run` would leave alone."""
    own = (OTHER, "PYTHONUNBUFFERED", "OMPI_MCA_pml", "OMPI_MCA_btl")
    kept = {name: value for name, value in os.environ.items() if name not in own}
    return {**kept, **(extra or {})}


def write(folder: Path, source: str, name: str = "script.py") -> str:
    """Write a script and return its path."""
    path = folder / name
    path.write_text(textwrap.dedent(source))
    return str(path)


def call(command: Sequence[str], *, env: Mapping[str, str] | None = None, given: str | None = None) -> Result:
    """Run a command to its end; what it starts is ended when it takes longer than LIMIT."""
    mark = f"{uuid.uuid4()}"
    process = subprocess.Popen(
        command,
        env=environment({**(env or {}), LAUNCH_MARK: mark}),
        stdin=subprocess.DEVNULL if given is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(given, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        end(mark)
        out, err = process.communicate()
        raise AssertionError(f"{command} took longer than {LIMIT} s\n{out}\n{err}") from None
    return Result(process.returncode, out, err)


def end(mark: str) -> None:
    """Kill what carries this mark, by process id."""
    for pid in marked(mark, LAUNCH_MARK):
        try:
            os.kill(pid, 9)
        except OSError:
            pass
