"""all_to_all_single with unequal splits that fit each other.

ranks: 3
raises: nothing
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
sends = [(rank + peer) % 3 for peer in range(size)]
expects = [(peer + rank) % 3 for peer in range(size)]
received = np.empty(sum(expects))
dist.all_to_all_single(received, np.full(sum(sends), float(rank)), expects, sends)
assert received.tolist() == [float(peer) for peer in range(size) for _ in range(expects[peer])]
