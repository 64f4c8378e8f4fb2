"""Print the oldest and the newest of the other Pythons of this machine that mpicoll supports, one a line: version and path.

They are searched on the path, and in the folders beside the running Python, as tools that install several Pythons lay them out.
Standard library only; a Python without venv is left out.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["OTHERS", "found"]

OTHERS = tuple(
    v for v in ("3.10", "3.11", "3.12", "3.13", "3.14") if v != f"{sys.version_info[0]}.{sys.version_info[1]}"
)


def _candidates(version: str) -> Iterator[str]:
    yield f"python{version}"
    for folder in sorted(Path(sys.base_prefix).parent.glob(f"*{version}*"), reverse=True):
        yield str(folder / "bin" / f"python{version}")


def found(version: str) -> str | None:
    """Return a Python of a version that can make an environment, or None."""
    question = "import sys, venv, ensurepip; print(sys.executable, '%d.%d' % sys.version_info[:2])"
    for candidate in _candidates(version):
        try:
            told = subprocess.run([candidate, "-c", question], capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            continue
        path, _, answer = told.stdout.strip().rpartition(" ")
        if told.returncode == 0 and answer == version:
            return path
    return None


if __name__ == "__main__":
    there = [(each, path) for each in OTHERS if (path := found(each)) is not None]
    for each, path in dict.fromkeys(there[:1] + there[-1:]):
        print(each, path)
