"""Make a process group known to the functions of torch.distributed."""

from __future__ import annotations

from typing import Any

import torch.distributed as c10d  # type: ignore[import-not-found,unused-ignore]
from torch.distributed import distributed_c10d  # type: ignore[import-not-found,unused-ignore]


def store_of(name: str, store: Any = None) -> Any:
    """Return the part of a store for the group of a name; None without a store.

    Args:
        store: default the store of torch's default group, if there is one.
    """
    if store is None and c10d.is_initialized():
        _, store = distributed_c10d._world.pg_map[c10d.group.WORLD]
    return None if store is None else c10d.PrefixStore(f"{name}/", store)


def add_to_world(made: Any, name: str, ranks: tuple[int, ...], backend: str) -> None:
    """Let the functions of torch.distributed find a process group that they have not made.

    Args:
        name: by which torch finds the group, the same on all members.
        ranks: global ranks of the members.
        backend: the name of the backend.
    """
    made.setGroupName(name)
    made.setGroupDesc(made.group_desc)
    distributed_c10d._register_pg_in_world(
        made,
        backend_name=backend,
        store=store_of(name),
        group_name=name,
        backend_config=str(distributed_c10d.BackendConfig(c10d.Backend(backend))),
        rank_mapping={rank: at for at, rank in enumerate(ranks)},
    )
