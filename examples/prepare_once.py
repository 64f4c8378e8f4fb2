"""Prepare data once, on rank 0, and read it on all ranks: `zero_first`.

    mpicoll run -n 4 examples/prepare_once.py

Rank 0 writes a file of word counts while the other ranks wait. They enter the block when the file is complete, and see
the whole file, also on a shared file system (`publish=`). Then a preparation fails: every rank raises an error with
the reason, and the program continues.
"""

import collections
import json
import os
import pathlib
import sys
import tempfile
import time

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
folder = pathlib.Path(dist.run_first(tempfile.mkdtemp))
path = folder / "counts.json"


def prepare():
    """Count the words of this file, slowly."""
    counts = collections.Counter(pathlib.Path(__file__).read_text().split())
    with path.open("w") as file:
        for text in json.JSONEncoder().iterencode(counts):
            file.write(text)
            time.sleep(0.001)  # a reader that is too early would find half a file


with dist.zero_first("count words", publish=[path]) as turn:
    if not path.exists():
        prepare()
        turn.share(f"prepared by rank {rank}, process {os.getpid()}")
    counts = json.loads(path.read_text())

print(f"rank {rank}: {len(counts)} words, {turn.value}", flush=True)
if counts["the"] < 5 or turn.is_leader != (rank == 0) or not turn.value.startswith("prepared by rank 0,"):
    sys.exit(f"rank {rank}: the data is not what rank 0 prepared")

# With a missing source rank 0 raises its own exception; the other ranks raise FirstFailedError and do not run the block.
missing = folder / "gone" / "words.txt"
told = ""
try:
    with dist.zero_first("count the words of a file that is not there"):
        missing.read_text()
except FileNotFoundError as error:
    told = f"{type(error).__name__} of its own"
except dist.FirstFailedError as error:
    told = str(error).splitlines()[0]
print(f"rank {rank}: {told}", flush=True)
if ("of its own" if rank == 0 else "FileNotFoundError") not in told:
    sys.exit(f"rank {rank}: was not told why there is no data")

# The group can still be used.
dist.barrier()
if rank == 0:
    path.unlink()
    folder.rmdir()
dist.destroy_process_group()
