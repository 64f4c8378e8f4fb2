"""Two threads reduce on one group, and who comes first differs from rank to rank.

ranks: 2
raises: CollectiveMismatchError on all
says: all_reduce | [4] | [6]
"""

import threading
import time

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()


def reduce(elements, delay):
    time.sleep(delay)
    dist.all_reduce(np.ones(elements))  # all ranks


late = 0.5 * rank
threads = [threading.Thread(target=reduce, args=(4, late)), threading.Thread(target=reduce, args=(6, 0.5 - late))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
