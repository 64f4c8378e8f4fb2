"""A job on NumPy arrays imports none of the packages whose arrays the library knows as well."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from jobs import run_job

KNOWN = ("torch", "jax", "jaxlib", "cupy", "ml_dtypes", "pandas", "tensorflow")

SOURCE = f"""
    import array
    import sys
    import numpy as np
    import mpicoll as dist

    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    for x in (np.ones(4), np.ones(4, np.float16), np.ones((4, 4))[::2, ::2], array.array("d", [1] * 4)):
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.all_gather([np.zeros_like(x) for _ in range(size)], x)
        if rank:
            dist.send(x, 0)
        else:
            dist.recv(x, 1)
    try:
        dist.all_reduce(1.5)
    except TypeError:
        print(sorted({{name.partition(".")[0] for name in sys.modules}} & set({KNOWN!r})), flush=True)
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_no_package_of_arrays_is_imported(tmp_path: Path) -> None:
    """Each of them would end the job here: what is on the path in their place raises when it is imported."""
    for name in KNOWN:
        (tmp_path / f"{name}.py").write_text("raise SystemExit(f'{__name__} was imported')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = run_job(SOURCE, 2, limit=60, env={"PYTHONPATH": path})
    assert result.returncode == 0, result.err
    assert [out.strip() for out in result.out] == ["[]", "[]"], result.out
