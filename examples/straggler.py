"""One slow rank delays all ranks: every rank waits in the barrier until the slow rank reaches the barrier.

    mpicoll run -n 2 examples/straggler.py

Rank 1 sleeps 5 seconds before its first barrier. Both ranks measure 5.00 s from their start to the end of the barrier; a second
barrier costs almost nothing. (--delay 1 makes the example shorter.)
"""

import argparse
import sys
import time

import mpicoll as dist

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--delay", type=float, default=5.0, metavar="SECONDS", help="how long rank 1 sleeps (default: 5)")
parser.add_argument("--within", type=float, default=0.1, metavar="SECONDS", help="allowed deviation (default: 0.1)")
options = parser.parse_args()
delay, within = options.delay, options.within

dist.init_process_group()
rank = dist.get_rank()
straggler = 1 % dist.get_world_size()

start = time.monotonic()
if rank == straggler:
    time.sleep(delay)
dist.barrier()
first = time.monotonic() - start
dist.barrier()
second = time.monotonic() - start - first
print(f"rank {rank}: {first:.2f} s until the first barrier was over, {second:.2f} s for the second", flush=True)

if abs(first - delay) > within or second > within:
    sys.exit(f"rank {rank}: expected {delay:.2f} s and 0.00 s, each within {within:g} s")
dist.destroy_process_group()
