"""A server takes requests from anybody, which threads on each rank send at once.

ranks: 3
raises: nothing
"""

import threading

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()


def serve():
    for _ in range(20 * (size - 1)):
        box = [None]
        sender = dist.recv_object_list(box)
        assert box[0]["from"] == sender
        assert (box[0]["data"] == sender).all()


def ask(times):
    for turn in range(times):
        dist.send_object_list([{"from": rank, "data": np.full(3000 * (turn % 3) + 10, rank)}], dst=0)


threads = (
    [threading.Thread(target=serve)] if rank == 0 else [threading.Thread(target=ask, args=(10,)) for _ in range(2)]
)
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
dist.barrier()
