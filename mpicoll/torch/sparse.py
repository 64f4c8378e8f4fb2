"""Sparse COO tensors: an all_reduce as a gathering of indices and values."""

from __future__ import annotations

from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore]

from mpicoll.api import gathering
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.memory.reduce_op import RedOpType


def all_reduce_sparse(tensor: Any, op: Any, group: ProcessGroup) -> None:
    """Sum a sparse COO tensor over all members, in place; all members call the function, and it waits for them.

    Args:
        tensor: of the same shape, dtype and number of sparse dimensions on all members. Each member may store other elements.

    Raises:
        ValueError: ``op`` is not SUM. Others as :func:`mpicoll.all_gather`.
    """
    if op is not RedOpType.SUM:
        raise ValueError("an all_reduce of sparse tensors can only be a SUM")
    own = tensor.coalesce()
    members = range(group.size())
    counts = [torch.zeros(1, dtype=torch.int64) for _ in members]
    gathering.all_gather(counts, torch.tensor([own._nnz()]), group)
    stored = [int(count) for count in counts]
    indices = [own.indices().new_empty((own.sparse_dim(), count)) for count in stored]
    values = [own.values().new_empty((count, *own.values().shape[1:])) for count in stored]
    gathering.all_gather(indices, own.indices().contiguous(), group)
    gathering.all_gather(values, own.values().contiguous(), group)
    summed = torch.sparse_coo_tensor(
        torch.cat(indices, 1), torch.cat(values), tensor.shape, check_invariants=False
    ).coalesce()
    tensor.copy_(summed)
