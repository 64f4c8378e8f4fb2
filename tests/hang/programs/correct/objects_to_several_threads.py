"""A server takes requests from anybody, and threads on each rank exchange large objects at once.

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
