"""What the import of the backend says without a torch that serves."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

OLDEST = "2.13"


def said(path: Path) -> str:
    """Return what ``import mpicoll.torch`` raises if the modules in a folder are found first."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])}
    program = "try:\n import mpicoll.torch\nexcept ImportError as error:\n print(error)"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
    )
    return result.stdout


def _has_torch() -> bool:
    found = importlib.util.find_spec("torch")
    return found is not None and found.origin is not None


@pytest.mark.skipif(_has_torch(), reason="torch is installed here")
def test_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()  # a folder of this name is no package
    assert 'pip install "mpicoll[torch]"' in said(tmp_path)


@pytest.mark.parametrize(
    ("version", "available", "text"),
    [("2.4.1+cpu", True, f"torch {OLDEST} or later, not 2.4.1"), ("99.0.0", False, "torch.distributed")],
)
def test_a_torch_that_does_not_serve(tmp_path: Path, version: str, available: bool, text: str) -> None:
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").write_text(f"__version__ = {version!r}\nfrom torch import distributed\n")
    (folder / "distributed.py").write_text(f"def is_available():\n    return {available}\n")
    assert text in said(tmp_path)
