"""Objects from nothing to a megabyte.

ranks: 3
raises: nothing
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
mine = [None, "x" * 1_000_000, {"rank": 2, "array": np.arange(5)}][rank]
everything = [None] * size
dist.all_gather_object(everything, mine)
assert everything[0] is None
assert len(everything[1]) == 1_000_000
config = [{"seed": 1}, "text"] if rank == 2 else [None, None]
dist.broadcast_object_list(config, src=2)
assert config == [{"seed": 1}, "text"]
