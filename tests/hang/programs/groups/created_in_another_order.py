"""Groups are made in the order of a set that differs from rank to rank.

ranks: 3
raises: CollectiveMismatchError on all
says: new_group | 0, 1 | 1, 2
"""

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
wanted = [[0, 1], [1, 2]] if rank < 2 else [[1, 2], [0, 1]]
groups = [dist.new_group(ranks) for ranks in wanted]  # all ranks
