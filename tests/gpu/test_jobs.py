"""Whole programs on a GPU: they end well, and the example trains. Run without mpiexec: each test starts a job of two ranks."""

from __future__ import annotations

import os
import re

import pytest
from gpu.conftest import STANDIN
from jobs import ROOT, run_job

LAUNCHER = os.environ.get("TEST_LAUNCHER", "").split() or None
"""What starts them, up to its ``-n``, where it is not the mpiexec of this environment."""


SPIN = 'extern "C" __global__ void spin(long long n) { long long t = clock64(); while (clock64() - t < n) {} }'
"""A kernel that keeps a stream busy for so many cycles; nanoseconds on a stand-in."""


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


@pytest.mark.skipif(not STANDIN, reason="a stand-in for CUDA alone fails when it is told to")
@pytest.mark.parametrize("count", [1000, 300_000, 3_000_000])
@pytest.mark.parametrize("ipc", ["auto", "off"])
@pytest.mark.parametrize("async_op", [False, True])
def test_a_device_that_fails_while_a_call_waits_for_it(count: int, ipc: str, async_op: bool) -> None:
    """The rank whose kernel has done wrong gets CUDA's error at once, the other one that this rank has failed."""
    job = run_job(
        f"""
        import ctypes, threading, time
        import cupy, numpy
        import mpicoll as dist

        dist.init_process_group()
        x = cupy.ones({count})
        dist.all_reduce(x)
        cupy.cuda.Device().synchronize()
        spin = cupy.RawKernel({SPIN!r}, "spin")
        if dist.get_rank() == 1:
            spin((1,), (1,), (numpy.int64(3_000_000_000),))
            threading.Timer(1.0, ctypes.CDLL("libcuda.so.1").standin_break, (700,)).start()
        began = time.monotonic()
        try:
            work = dist.all_reduce(x, async_op={async_op})
            if work is not None:
                work.wait()
        except Exception as error:
            print(type(error).__name__, str(error).splitlines()[0], f"{{time.monotonic() - began:.1f}} s", flush=True)
            raise
        """,
        2,
        limit=60,
        env={"MPICOLL_CUDA_IPC": ipc, "MPICOLL_TIMEOUT": "30"},
        launcher=LAUNCHER,
    )
    assert job.out[1].startswith("CUDARuntimeError cudaErrorIllegalAddress"), job
    assert "Error" in job.out[0], job
    assert "rank 1" in job.out[0], job
    assert "Timeout" not in str(job), job


@pytest.mark.skipif(not STANDIN, reason="MPI takes memory of a stand-in for a GPU as it is, whichever MPI that is")
@pytest.mark.parametrize(
    ("call", "count", "cuda", "engine"),
    [
        ("all_reduce(x)", 1000, "off", "auto"),
        ("all_reduce(x)", 300_000, "aware", "auto"),
        ("all_reduce(x)", 3_000_000, "off", "auto"),
        ("all_reduce(x)", 300_000, "off", "mpi"),
        ("broadcast(x, 1)", 300_000, "off", "mpi"),
        ("all_gather_into_tensor(y, x)", 10_000, "off", "mpi"),
        ("broadcast(x, 1)", 300_000, "aware", "auto"),
        ("all_gather_into_tensor(y, x)", 300_000, "aware", "auto"),
        ("all_gather_into_tensor(y, x)", 3_000_000, "off", "auto"),
    ],
)
def test_a_kernel_that_outlasts_the_limit(call: str, count: int, cuda: str, engine: str) -> None:
    """Both ranks get a CollectiveTimeoutError, which says on whose GPU it is; nobody is left inside MPI."""
    job = run_job(
        f"""
        import cupy, numpy
        import mpicoll as dist

        dist.init_process_group()
        x, y = cupy.ones({count}), cupy.ones(2 * {count})
        dist.{call}
        spin = cupy.RawKernel({SPIN!r}, "spin")
        spin((1,), (1,), (numpy.int64(0),))
        cupy.cuda.Device().synchronize()
        if dist.get_rank() == 1:
            spin((1,), (1,), (numpy.int64(6_000_000_000),))
        dist.barrier()  # on a busy machine the kernel may be launched late
        try:
            dist.{call}
        except (dist.CollectiveTimeoutError, dist.GroupBrokenError) as error:
            print(error, flush=True)
            dist.destroy_process_group()
        """,
        2,
        limit=60,
        env={"MPICOLL_CUDA": cuda, "MPICOLL_CUDA_IPC": "off", "MPICOLL_TIMEOUT": "2", "MPICOLL_ENGINE": engine},
        launcher=LAUNCHER,
    )
    assert job.returncode == 0, job
    assert "time limit" in job.out[0] + job.out[1], job
    assert "this rank waits for its GPU" in job.out[1] or "rank 0 gave" in job.out[1], job
    assert "the GPU of another rank is behind" in job.out[0] or "rank 1 gave" in job.out[0], job
