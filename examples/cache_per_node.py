"""Fill a cache on every node once, by the first rank of that node: `local_zero_first`, alias `wait_for_the_master`.

    mpicoll run -n 4 examples/cache_per_node.py

Node-local disks (/tmp here) must be filled on every node, by one rank of each node. A slow node delays no other node. The
same code runs before `init_process_group`, and in a single process without a group.
"""

import os
import pathlib
import sys
import tempfile
import time

import numpy as np

import mpicoll as dist

name = f"cache-{os.environ.get('USER', 'me')}-{os.getppid()}"


def load(folder):
    """Return the data, from the cache if it exists."""
    path = folder / "data.npy"
    with dist.wait_for_the_master():
        if not path.exists():
            time.sleep(0.2)  # a download
            np.save(path, np.arange(1000.0))
            (folder / f"filled-by-{os.getpid()}").touch()
        return np.load(path)


# Without a default group the block just runs.
with tempfile.TemporaryDirectory() as alone:
    assert load(pathlib.Path(alone)).sum() == 499500

dist.init_process_group()
rank, local = dist.get_rank(), dist.get_node_local_rank()
folder = pathlib.Path(dist.run_first(tempfile.mkdtemp, prefix=name, scope="node"))
began = time.monotonic()
data = load(folder)
print(f"rank {rank}, number {local} on its node: {data.size} values after {time.monotonic() - began:.2f} s", flush=True)
dist.barrier()
filled = list(folder.glob("filled-by-*"))
if data.sum() != 499500 or len(filled) != 1 or (local == 0) != (filled[0].name == f"filled-by-{os.getpid()}"):
    sys.exit(f"rank {rank}: the cache was not filled by the first rank of the node alone: {filled}")
dist.barrier()
if local == 0:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
dist.destroy_process_group()
