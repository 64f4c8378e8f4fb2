"""One buffer may be sent to two ranks at once: nobody writes it.

ranks: 3
raises: nothing
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
x = np.arange(300_000.0)
if rank == 0:
    works = [dist.isend(x, dst=1), dist.isend(x, dst=2)]
    for work in works:
        work.wait()
else:
    dist.recv(x, src=0)
assert x[-1] == 299_999
