"""Threads of one rank take objects from the same sender at once: each gets whole ones.

ranks: 3
raises: nothing
"""

import threading

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()


def take(results):
    for _ in range(10):
        box = [None]
        dist.recv_object_list(box, src=0)
        results.append(box[0])


if rank == 1:
    results = []
    threads = [threading.Thread(target=take, args=(results,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(int(result[0]) for result in results) == list(range(30))
    assert all(result.size == 5000 and (result == result[0]).all() for result in results)
if rank == 0:
    for turn in range(30):
        dist.send_object_list([np.full(5000, turn)], dst=1)
dist.barrier()
