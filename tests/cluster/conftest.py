"""What the tests on several hosts share: one Slurm for all that do not break it."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import slurm as own
from slurm import Slurm


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder that all hosts see; the name is short enough to be told in full in reports."""
    with tempfile.TemporaryDirectory(prefix="test-") as name:
        yield Path(name)


@pytest.fixture(scope="session")
def shared_slurm() -> Iterator[Slurm]:
    """One Slurm of two nodes with 4 CPUs and 4 pretended GPUs each, for the whole run."""
    if why := own.missing():
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, own.slurm(Path(name), nodes=2, gpus=4) as up:
        yield up


@pytest.fixture
def slurm(shared_slurm: Slurm) -> Iterator[Slurm]:
    """The Slurm that the tests share: no job is left in it before and after."""
    yield shared_slurm
    shared_slurm.clear()
