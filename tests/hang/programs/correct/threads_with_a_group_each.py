"""Each thread has a group of its own, and they run in no common order.

ranks: 2
raises: nothing
"""

import threading
import time

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()


def train(group, pause):
    for _ in range(5):
        time.sleep(pause)
        dist.all_reduce(np.ones(2), group=group)


groups = [dist.new_group() for _ in range(3)]
threads = [threading.Thread(target=train, args=(g, 0.05 * ((i + rank) % 3))) for i, g in enumerate(groups)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
