"""Make a process group known to the functions of torch.distributed."""

from __future__ import annotations

from typing import Any

import torch.distributed as c10d  # type: ignore[import-not-found,unused-ignore]
from torch.distributed import distributed_c10d  # type: ignore[import-not-found,unused-ignore]


def add_to_world(made: Any, name: str, ranks: tuple[int, ...], backend: str) -> None:
    """Let the functions of torch.distributed find a process group that they have not made.

    Args:
        name: by which torch finds the group, the same on all members.
        ranks: global ranks of the members.
        backend: the name of the backend.
    """
    made.setGroupName(name)
    _, store = distributed_c10d._world.pg_map[c10d.group.WORLD]
    distributed_c10d._register_pg_in_world(
        made,
        backend_name=backend,
        store=c10d.PrefixStore(f"{name}/", store),
        group_name=name,
        backend_config=str(distributed_c10d.BackendConfig(c10d.Backend(backend))),
        rank_mapping={rank: at for at, rank in enumerate(ranks)},
    )
