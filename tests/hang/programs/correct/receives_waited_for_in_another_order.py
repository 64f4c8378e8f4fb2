"""Two receives with different tags, waited for in the order in which their messages do not come.

ranks: 2
raises: nothing
"""

import time

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
first, second = np.zeros(2), np.zeros(300_000)
if rank == 0:
    works = [dist.irecv(first, src=1, tag=1), dist.irecv(second, src=1, tag=2)]
    for work in reversed(works):
        work.wait()
    assert first[0] == 1
    assert second[-1] == 2
else:
    dist.send(np.ones(2), dst=0, tag=1)
    time.sleep(0.5)
    dist.send(np.full(300_000, 2.0), dst=0, tag=2)
