"""Sparse COO tensors: an all_reduce as a gathering of indices and values."""

from __future__ import annotations

from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore]

from mpicoll.api import gathering
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.memory.reduce_op import RedOpType

_MOST_DIMENSIONS = 16


def all_reduce_sparse(tensor: Any, op: Any, group: ProcessGroup) -> None:
    """Sum a sparse COO tensor over all members, in place; all members call the function, and it waits for them.

    Args:
        tensor: of the same shape, dtype and number of sparse dimensions on all members. Each member may store other elements.

    Raises:
        ValueError: on all members: ``op`` is not SUM on one of them, or the tensors differ. Others as :func:`mpicoll.all_gather`.
    """
    own = tensor.coalesce()
    shape = [*own.shape, *[-1] * (_MOST_DIMENSIONS - own.dim())]
    about = torch.tensor([own._nnz(), op is RedOpType.SUM, own.sparse_dim(), *_name_of(own.dtype), *shape])
    told = [torch.empty_like(about) for _ in range(group.size())]
    _gather(told, about, group)
    if not all(bool(each[1]) for each in told):
        raise ValueError("an all_reduce of sparse tensors can only be a SUM, and a rank of the group passed another op")
    for rank, each in zip(group.ranks, told, strict=True):
        if not torch.equal(each[2:], about[2:]):
            sizes = [int(n) for n in each[-_MOST_DIMENSIONS:] if n >= 0]
            raise ValueError(
                "an all_reduce of sparse tensors needs one shape, dtype and number of sparse dimensions: here shape "
                f"{list(own.shape)}, dtype {own.dtype}, {own.sparse_dim()}; rank {rank} has shape {sizes}, or another of them"
            )
    stored = [int(each[0]) for each in told]
    indices = [own.indices().new_empty((own.sparse_dim(), count)) for count in stored]
    values = [own.values().new_empty((count, *own.values().shape[1:])) for count in stored]
    _gather(indices, own.indices().contiguous(), group)
    _gather(values, own.values().contiguous(), group)
    summed = torch.sparse_coo_tensor(torch.cat(indices, 1), torch.cat(values), tensor.shape, check_invariants=False)
    tensor.copy_(summed.coalesce())


def _gather(results: list[Any], source: Any, group: ProcessGroup) -> None:
    group.note_maker("sparse all_reduce")
    gathering.all_gather(results, source, group)


def _name_of(dtype: Any) -> list[int]:
    """Return the name of a dtype as three numbers."""
    text = str(dtype).removeprefix("torch.").encode().ljust(24)[:24]
    return [int.from_bytes(text[at : at + 7], "little") for at in (0, 7, 14)]
