"""Run the bodies of PyTorch's own suite of distributed tests on the ranks of this job, one body at a time.

The suite starts processes of its own, and its decorators skip bodies by the name of the backend and by the number of GPUs. Here
the ranks are those of mpiexec, and a body is run without these decorators: ``bodies.py`` lists the bodies that then cannot pass.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from mpi4py import MPI
from torch_backend.bodies import RANKS
from torch_backend.ends import end_groups

BACKEND = os.environ.get("TEST_TORCH_BACKEND", "mpicoll")
"""The backend that the bodies run on; gloo gives the reference."""
LIMIT = timedelta(seconds=10)
WORLD = MPI.COMM_WORLD


class _Name(str):
    """The name of the backend, which is also equal to that of gloo: bodies branch by it between CPU and GPU."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def load() -> ModuleType:
    """Import the suite. Its decorators, which only say what to skip, see the backend gloo."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(WORLD.size), RANK=str(WORLD.rank), INIT_METHOD="file://")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch.testing._internal.distributed.distributed_test as module

    module.BACKEND = _Name(BACKEND)
    # The decorators that need a number of ranks, and bodies, read the variable when they are called.
    os.environ["BACKEND"] = BACKEND
    return module


SUITE = load()
from torch.testing._internal.common_utils import set_rng_seed  # noqa: E402  (the suite's import comes first)

BODIES = {name: body for name, body in inspect.getmembers(SUITE.DistributedTest._DistTestBase) if name[:5] == "test_"}


def bare(body: Callable[..., Any]) -> Callable[..., Any]:
    """Return a body without the decorators that skip it; one that repeats it for several debug levels stays."""
    levels = None
    while hasattr(body, "__wrapped__"):
        levels = inspect.getclosurevars(body).nonlocals.get("levels", levels)
        body = body.__wrapped__
    return SUITE.with_dist_debug_levels(levels)(body) if levels else body


def ranks_needed(name: str) -> tuple[int, bool]:
    """Return how many ranks a body needs, and whether exactly as many, by its decorators."""
    body, fewest, exact = BODIES[name], RANKS.get(name, 2), False
    while hasattr(body, "__wrapped__"):
        found = re.search(r"(exact )?world size of (\d+)", str(getattr(body, "__unittest_skip_why__", "")))
        if found:
            fewest, exact = int(found[2]), found[1] is not None
        if "small_worldsize" in body.__code__.co_consts:
            fewest = max(fewest, 3)  # its groups are of ranks 1 and 2
        body = body.__wrapped__
    return fewest, exact


class Case(SUITE.TestDistBackend, SUITE.DistributedTest._DistTestBase):  # type: ignore[misc,name-defined]
    """A test case of the suite on a rank of this job, which starts no processes."""

    __test__ = False

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name)
        self.rank = WORLD.rank
        self.file_name = str(folder / "store")


@contextlib.contextmanager
def folder_of_all() -> Iterator[Path]:
    """Yield a new folder that all ranks use."""
    path = Path(WORLD.bcast(tempfile.mkdtemp(prefix="mpicoll-suite-") if not WORLD.rank else None))
    try:
        yield path
    finally:
        WORLD.Barrier()
        if not WORLD.rank:
            shutil.rmtree(path)


def run(name: str, folder: Path) -> None:
    """Run a body; all ranks call the function.

    Raises: what the body raises.
    """
    end_groups()
    for each in ("barrier", "test_dir", "init_dir"):
        (folder / each).mkdir(exist_ok=True)
    os.environ["TEMP_DIR"] = str(folder)
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"
    dist.set_debug_level_from_env()
    SUITE.INIT_METHOD = os.environ["INIT_METHOD"] = f"file://{folder}/init_dir/store"
    SUITE.Barrier.barrier_id = 0
    WORLD.Barrier()
    case = Case(name, folder)
    dist.init_process_group(BACKEND, case.init_method, LIMIT, WORLD.size, WORLD.rank)
    set_rng_seed()
    try:
        bare(BODIES[name])(case)
        case._barrier()
    finally:
        case.doCleanups()
        end_groups()
