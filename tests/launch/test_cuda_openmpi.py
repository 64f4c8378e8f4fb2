"""An Open MPI that was built with CUDA: it is found to be one, and works where no GPU is.

TEST_CUDA_OPENMPI names its prefix; ``tests/gpu/build_openmpi.sh`` builds one.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import pytest
from launch import launching
from launch.launching import RUN, call, write

PREFIX = os.environ.get("TEST_CUDA_OPENMPI", "")
pytestmark = pytest.mark.skipif(
    not PREFIX, reason="TEST_CUDA_OPENMPI names no Open MPI with CUDA (tests/gpu/build_openmpi.sh builds one)"
)
DOCTOR = [sys.executable, "-m", "mpicoll", "doctor"]


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def on_it(driver: bool = True, **extra: str) -> dict[str, str]:
    """Return the environment in which mpi4py loads it; ``driver``: with what stands in for one that is not there."""
    folders = [f"{PREFIX}/lib"] + [f"{PREFIX}/driver"] * (driver and not has_driver())
    return {
        "OPAL_PREFIX": PREFIX,
        "PATH": f"{PREFIX}/bin:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": ":".join(folders),
        "MPI4PY_LIBMPI": f"{PREFIX}/lib/libmpi.so",
        **extra,
    }


def test_doctor() -> None:
    """It is handed memory of a GPU, and what is known to crash is named; MPICOLL_CUDA=off says otherwise."""
    found = call(DOCTOR, env=on_it())
    assert found.code == 0, found
    assert "passed to MPI: the library says yes when asked for CUDA (MPIX)" in found.out
    assert "but nonblocking reductions of device memory read it from the host and crash" in found.out
    found = call(DOCTOR, env=on_it(MPICOLL_CUDA="off"))
    assert found.code == 0, found
    assert "copied through the host: MPICOLL_CUDA=off" in found.out
    assert "nonblocking reductions" not in found.out


def test_table(tmp_path: Path) -> None:
    """Every operation is in the table but nonblocking reductions, on all ranks of a job."""
    script = write(
        tmp_path,
        """
        import mpicoll as dist
        from mpicoll.memory.device.array import permits
        from mpicoll.transports.device.capability import OPERATIONS, REDUCTIONS

        dist.init_process_group()
        for operation in OPERATIONS:
            for nonblocking in (False, True):
                expected = not (nonblocking and operation in REDUCTIONS)
                assert permits(operation, nonblocking) == expected, (operation, nonblocking)
        dist.barrier()
        print("rank", dist.get_rank(), "is well")
        """,
    )
    found = call([*RUN, "-n", "2", script], env=on_it())
    assert found.code == 0, found
    assert all(f"rank {rank} is well" in found.out for rank in range(2))


@pytest.mark.skipif(has_driver(), reason="this machine has NVIDIA's driver")
def test_without_a_driver() -> None:
    """Where it cannot be loaded, what is missing is named."""
    found = call(DOCTOR, env=on_it(driver=False))
    assert found.code == 1, found
    assert "cannot be loaded without libcuda.so.1, which NVIDIA's driver brings" in found.out


@pytest.mark.slow
@pytest.mark.parametrize("tests", ["test_device_arrays", "test_direct_arrays", "test_direct_lists"])
def test_arrays_that_it_is_handed(tests: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of what MPI is handed pass on it, with memory of the host in a GPU's place."""
    monkeypatch.setattr(launching, "LIMIT", 300.0)
    file = Path(__file__).parents[1] / "mpi" / f"{tests}.py"
    options = ["-m", "not slow", "-q", "--with-mpi", "-p", "no:cacheprovider"]
    found = call([*RUN, "-n", "2", "-m", "pytest", *options, str(file)], env=on_it())
    assert found.code == 0, found
    assert "passed" in found.out


COUNTED = "way_of_the_host or no_memory or forms_that_fail or test_uneven or nobody_reads"
"""Tests of how often something goes by way of the host, or of what is on it."""


@pytest.mark.slow
@pytest.mark.skipif(has_driver(), reason="this machine has NVIDIA's driver")
@pytest.mark.parametrize("tests", ["test_direct_arrays", "test_direct_lists"])
def test_addresses_that_only_a_driver_can_read(tests: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It moves what is at addresses of a device: whoever reads from them without the driver ends by a signal."""
    monkeypatch.setattr(launching, "LIMIT", 300.0)
    file = Path(__file__).parents[1] / "mpi" / f"{tests}.py"
    options = ["-q", "--with-mpi", "-p", "no:cacheprovider", "-k", f"not ({COUNTED})"]
    found = call([*RUN, "-n", "2", "-m", "pytest", *options, str(file)], env=on_it(TEST_GPU_AWAY="0x200000000000"))
    assert found.code == 0, found
    assert "passed" in found.out
