"""How many bytes of the ranks' output `mpicoll run` passes on in a second.

    python benchmarks/output.py [--ranks 1] [--megabytes 500] [--rounds 5]

The ranks write lines as fast as they can, and another process reads all output and drops it. The time counts from the first
write to the end of the output. Lines of 8 bytes with tags are the hardest case, as a tag is added to each line. Prints the median
of the rounds, with the quartiles in brackets.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from quiet import middle

LENGTHS = (100, 8)
TARGET = 100.0
"""Megabytes in a second."""
WRITER = """
import sys, time
length, total = int(sys.argv[1]), int(sys.argv[2])
block = (b"x" * (length - 1) + b"\\n") * (65536 // length)
open(sys.argv[3], "w").write(repr(time.time()))
for _ in range(-(-total // len(block))):
    sys.stdout.buffer.write(block)
"""


def rate(ranks: int, length: int, nbytes: int, tag: list[str], folder: Path) -> float:
    """Return the megabytes of lines that a job has written in a second, without tags."""
    script, began = folder / "writer.py", folder / "began"
    script.write_text(WRITER)
    command = [sys.executable, "-m", "mpicoll", "run", "-n", str(ranks), *tag, str(script)]
    arguments = [str(length), str(nbytes // ranks), str(began)]
    with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        while os.read(job.stdout.fileno(), 1 << 20):
            pass
        took = time.time() - float(began.read_text())
    if job.returncode:
        raise SystemExit(f"the job ended with exit code {job.returncode}")
    return nbytes / took / 1e6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=1, help="ranks that write (default: %(default)s)")
    parser.add_argument("--megabytes", type=int, default=500, help="of all ranks (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for tag in ([], ["--tag-output"]):
            for length in LENGTHS:
                rates = [
                    rate(given.ranks, length, given.megabytes * 1_000_000, tag, Path(folder))
                    for _ in range(given.rounds)
                ]
                verdict = "met" if statistics.median(rates) >= TARGET else "missed"
                title = f"lines of {length} bytes {' '.join(tag)}".strip()
                print(f"{title:>34}: {middle(rates, 0):>20} MB/s, target {TARGET:g}: {verdict}", flush=True)


if __name__ == "__main__":
    main()
