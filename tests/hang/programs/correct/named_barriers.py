"""Barriers with names, the same on all ranks.

ranks: 2
raises: nothing
"""

import mpicoll as dist

dist.init_process_group()
for epoch in range(3):
    dist.barrier(name=f"epoch {epoch}")
