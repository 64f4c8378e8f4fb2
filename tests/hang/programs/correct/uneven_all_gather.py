"""all_gather of blocks whose sizes all ranks know.

ranks: 3
raises: nothing
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
counts = [5, 0, 2]
outputs = [np.empty(count) for count in counts]
dist.all_gather(outputs, np.full(counts[rank], float(rank)))
assert [block.sum() for block in outputs] == [0, 0, 4]
