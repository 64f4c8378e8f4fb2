"""Whole programs on a GPU: they end well, and the example trains. Run without mpiexec: each test starts a job of two ranks."""

from __future__ import annotations

import os
import re

import pytest
from jobs import ROOT, run_job

LAUNCHER = os.environ.get("TEST_LAUNCHER", "").split() or None
"""What starts them, up to its ``-n``, where it is not the mpiexec of this environment."""


@pytest.fixture(autouse=True)
def _initialised() -> None:
    """MPI is for the jobs alone."""


ENDS = {
    "as it comes": "",
    "destroyed": "dist.destroy_process_group()",
    "arrays first": "del x",
    "arrays last": "import builtins; builtins.kept = x",
    "under way": "import builtins; builtins.kept = x, dist.all_reduce(x, async_op=True); builtins.kept[1].wait()",
    "window open": "y = cupy.ones(1 << 20); dist.all_reduce(y); assert (y == dist.get_world_size()).all()",
    "window closed": "dist.all_reduce(cupy.ones(1 << 20)); dist.destroy_process_group()",
    "pool emptied": "dist.destroy_process_group(); del x; cupy.get_default_memory_pool().free_all_blocks()",
}


@pytest.mark.parametrize("first", ["cupy", "mpicoll"])
@pytest.mark.parametrize("end", ENDS)
def test_ends(end: str, first: str) -> None:
    """A program ends well, in whatever order MPI, CuPy and the library are taken down."""
    imports = ["import cupy", "import mpicoll as dist"]
    source = "\n".join(
        [
            *(imports if first == "cupy" else imports[::-1]),
            "dist.init_process_group()",
            "x = cupy.ones(100_000)",
            "dist.all_reduce(x)",
            "assert (x == dist.get_world_size()).all()",
            ENDS[end],
        ]
    )
    job = run_job(source, 2, limit=60, launcher=LAUNCHER)
    assert job.returncode == 0, job
    assert "Traceback" not in str(job), job


def test_the_example_trains() -> None:
    """To the same accuracy as on the host."""
    pytest.importorskip("sklearn")

    def accuracy(device: str) -> str:
        options = ["--device", device, "--epochs", "4", "--no-plot"]
        job = run_job(ROOT / "examples" / "train_digits.py", 2, limit=200, args=options, launcher=LAUNCHER)
        assert job.returncode == 0, job
        assert "all 2 ranks had the same parameters after every step" in job.out[0]
        (found,) = re.findall(r"^test accuracy ([0-9.]+)% after", job.out[0], re.MULTILINE)
        return found

    assert accuracy("cuda") == accuracy("cpu")
