"""What the figures of a run depend on: the command, the machine and the versions, to be kept beside them."""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["about"]


def about(comm: Any) -> dict[str, Any]:
    """Return what the figures of this script, which runs on the ranks of a communicator, depend on."""
    import mpi4py
    from mpi4py import MPI

    import mpicoll

    words = [f"benchmarks/{Path(sys.argv[0]).name}", *(os.path.basename(word) for word in sys.argv[1:])]
    seconds = os.environ.get("BENCHMARK_SECONDS")
    if seconds is not None:
        words.append(f"(BENCHMARK_SECONDS={seconds})")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "command": " ".join(["mpicoll run -n", str(comm.Get_size()), *words]),
        "processor": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "MPI": " ".join(MPI.Get_library_version().strip("\0 \n").split(",")[0].splitlines()[0].split()),
        "mpi4py": mpi4py.__version__,
        "numpy": np.__version__,
        "mpicoll": mpicoll.__version__,
        "Python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
