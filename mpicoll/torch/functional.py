"""Differentiable collectives on torch's tensors, out of place: gradients flow back to the ranks whose values were used.

The loss of a job counts as the sum of the losses of its ranks: the gradient of a tensor is the sum of the gradients of all
results that the tensor contributed to. All members of the group call the function, and all of them call ``backward``, in the
same order. A rank that is not in the group gets a ValueError, as there is no result for it (torch warns, and returns memory
that was never set).
"""

from __future__ import annotations

from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore]

from mpicoll.api import collectives, gathering, scattering
from mpicoll.api.job import get_group_rank, get_rank, get_world_size
from mpicoll.memory.reduce_op import RedOpType, ReduceOp
from mpicoll.operations.prepare.refusal import refuse_group
from mpicoll.runtime.torch_compile import exclude_from_compile

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]

Tensor = Any
_SUMS = (RedOpType.SUM, RedOpType.AVG)


def all_reduce(tensor: Tensor, op: RedOpType = ReduceOp.SUM, group: Any = None) -> Tensor:
    """Return the reduction of ``tensor`` over all members.

    Args:
        tensor: this rank's tensor; all members pass one shape and dtype.
        op: as in :func:`mpicoll.all_reduce`; SUM and AVG have gradients.
        group: the group; default the world.

    Raises: as :func:`mpicoll.all_reduce`; RuntimeError in ``backward`` for another op.

    Source: torch.distributed.nn.functional.all_reduce.
    """
    _member(group, "all_reduce")
    return _AllReduce.apply(op, group, tensor)


def all_gather(tensor: Tensor, group: Any = None) -> tuple[Tensor, ...]:
    """Return the tensors of all members, all of one shape and dtype.

    Raises: as :func:`mpicoll.all_gather`.

    Source: torch.distributed.nn.functional.all_gather.
    """
    _member(group, "all_gather")
    return tuple(_AllGather.apply(group, None, tensor))


def reduce_scatter(output: Tensor, input_list: list[Tensor], op: RedOpType = ReduceOp.SUM, group: Any = None) -> Tensor:
    """Return the reduction over all members of their tensors for this rank.

    Args:
        output: of the shape and dtype of the result; its values are not used.
        input_list: one tensor for each member.
        op, group: as in :func:`all_reduce`.

    Raises: as :func:`mpicoll.reduce_scatter`; RuntimeError in ``backward`` for another op than SUM and AVG.

    Source: torch.distributed.nn.functional.reduce_scatter.
    """
    _member(group, "reduce_scatter")
    return _ReduceScatter.apply(op, group, output, *input_list)


def broadcast(tensor: Tensor, src: int, group: Any = None) -> Tensor:
    """Return the tensor of one rank.

    Args:
        tensor: on the source the tensor to send; on other ranks a tensor of its shape and dtype. It requires grad on all
            members or on none.
        src: global rank of the source.
        group: the group; default the world.

    Raises: as :func:`mpicoll.broadcast`.

    Source: torch.distributed.nn.functional.broadcast.
    """
    _member(group, "broadcast")
    return _Broadcast.apply(src, group, tensor)


def reduce(tensor: Tensor, dst: int, op: RedOpType = ReduceOp.SUM, group: Any = None) -> Tensor:
    """Return the reduction of ``tensor`` over all members on one rank; on other ranks the tensor, without a gradient of its own.

    Args:
        tensor: this rank's tensor; all members pass one shape and dtype.
        dst: global rank of the destination.
        op, group: as in :func:`all_reduce`.

    Raises: as :func:`mpicoll.reduce`; RuntimeError in ``backward`` for another op than SUM and AVG.

    Source: torch.distributed.nn.functional.reduce.
    """
    _member(group, "reduce")
    return _Reduce.apply(dst, op, group, tensor)


def gather(tensor: Tensor, dst: int = 0, group: Any = None) -> tuple[Tensor, ...]:
    """Return the tensors of all members on one rank; on other ranks as many tensors of zeros, without gradients of their own.

    Args:
        tensor: this rank's tensor; all members pass one shape and dtype.
        dst: global rank of the destination.
        group: the group; default the world.

    Raises: as :func:`mpicoll.gather`.

    Source: torch.distributed.nn.functional.gather.
    """
    _member(group, "gather")
    return tuple(_Gather.apply(dst, group, tensor))


def scatter(tensors: list[Tensor], src: int = 0, group: Any = None) -> Tensor:
    """Return this rank's tensor of the list of one rank.

    Args:
        tensors: one tensor for each member, all of one shape and dtype; on ranks other than the source only shape and dtype
            are used. They require grad on all members or on none.
        src: global rank of the source.
        group: the group; default the world.

    Raises: as :func:`mpicoll.scatter`; ValueError if the shapes differ, or if there is no tensor.

    Source: torch.distributed.nn.functional.scatter.
    """
    _member(group, "scatter")
    return _Scatter.apply(src, group, *tensors)


def all_to_all(
    output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], group: Any = None
) -> tuple[Tensor, ...]:
    """Return each member's tensor for this rank.

    Args:
        output_tensor_list: one tensor for each member, of the shape and dtype of its result; their values are not used.
        input_tensor_list: one tensor for each member.
        group: the group; default the world.

    Raises: as :func:`mpicoll.all_to_all`.

    Source: torch.distributed.nn.functional.all_to_all.
    """
    _member(group, "all_to_all")
    return tuple(_AllToAll.apply(group, len(output_tensor_list), *output_tensor_list, *input_tensor_list))


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Any = None,
) -> Tensor:
    """Return the members' parts for this rank, joined along the first dimension.

    Args:
        output: of the shape and dtype of the result; its values are not used.
        input: one part for each member.
        output_split_sizes, input_split_sizes: rows of each part; None: all equal.
        group: the group; default the world.

    Raises: as :func:`mpicoll.all_to_all_single`.

    Source: torch.distributed.nn.functional.all_to_all_single.
    """
    _member(group, "all_to_all_single")
    return _AllToAllSingle.apply(output, output_split_sizes, input_split_sizes, group, input)


def _member(group: Any, operation: str) -> None:
    try:
        rank = get_rank(group)
    except ValueError as error:
        refuse_group(group, operation, error)
    if rank < 0:
        raise ValueError(f"{operation}: rank {get_rank()} is not in the group, so there is no result for it")


def _of_a_sum(op: Any) -> None:
    if op not in _SUMS:
        raise RuntimeError(f"there is no gradient of a reduction by {op!s}: only SUM and AVG have one")


def _is(rank: int, group: Any) -> bool:
    """Return whether a global rank is this rank."""
    return get_rank(group) == (rank if group is None else get_group_rank(group, rank))


class _AllReduce(torch.autograd.Function):  # type: ignore[misc,unused-ignore]
    @staticmethod
    def forward(ctx: Any, op: Any, group: Any, tensor: Tensor) -> Tensor:
        ctx.op, ctx.group = op, group
        result = tensor.clone(memory_format=torch.contiguous_format)
        collectives.all_reduce(result, op, group)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _of_a_sum(ctx.op)
        return None, None, _AllReduce.apply(ctx.op, ctx.group, grad)


class _AllGather(torch.autograd.Function):  # type: ignore[misc,unused-ignore]
    @staticmethod
    def forward(ctx: Any, group: Any, shapes: Any, tensor: Tensor) -> tuple[Tensor, ...]:
        """Gather tensors of these shapes; None: all have the shape of ``tensor``."""
        ctx.group, ctx.shape = group, tensor.shape
        mine = tensor.detach().contiguous()
        results = [mine.new_empty(shape) for shape in shapes or [tensor.shape] * get_world_size(group)]
        gathering.all_gather(results, mine, group)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, _ReduceScatter.apply(ReduceOp.SUM, ctx.group, grads[0].new_empty(ctx.shape), *grads)


class _ReduceScatter(torch.autograd.Function):  # type: ignore[misc,unused-ignore]
    @staticmethod
    def forward(ctx: Any, op: Any, group: Any, output: Tensor, *inputs: Tensor) -> Tensor:
        ctx.op, ctx.group, ctx.shapes = op, group, [each.shape for each in inputs]
        result = torch.empty_like(output, memory_format=torch.contiguous_format)
        scattering.reduce_scatter(result, [each.detach().contiguous() for each in inputs], op, group)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _of_a_sum(ctx.op)
        parts = _AllGather.apply(ctx.group, ctx.shapes, grad)
        if ctx.op == RedOpType.AVG:
            parts = tuple(part / len(parts) for part in parts)
        return None, None, None, *parts


class _Broadcast(torch.autograd.Function):  # type: ignore[misc,unused-ignore]
    @staticmethod
    def forward(ctx: Any, src: int, group: Any, tensor: Tensor) -> Tensor:
        ctx.src, ctx.group = src, group
        result = tensor.clone(memory_format=torch.contiguous_format)
        collectives.broadcast(result, src, group)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        back = _AllReduce.apply(ReduceOp.SUM, ctx.group, grad)
        return None, None, back if _is(ctx.src, ctx.group) else torch.zeros_like(grad)


class _Reduce(torch.autograd.Function):  # type: ignore[misc,unused-ignore]
    @staticmethod
    def forward(ctx: Any, dst: int, op: Any, group: Any, tensor: Tensor) -> Tensor:
        ctx.dst, ctx.op, ctx.group = dst, op, group
        result = tensor.clone(memory_format=torch.contiguous_format)
        collectives.reduce(result, dst, op, group)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _of_a_sum(ctx.op)
        back = _Broadcast.apply(ctx.dst, ctx.group, grad)
        if ctx.op == RedOpType.AVG:
            back = back / get_world_size(ctx.group)
        return None, None, None, back


class _Gather(torch.autograd.Function):  # type: ignore[misc,unused-ignore]
    @staticmethod
    def forward(ctx: Any, dst: int, group: Any, tensor: Tensor) -> tuple[Tensor, ...]:
        ctx.dst, ctx.group = dst, group
        like = tensor.detach().contiguous()
        results = [torch.zeros_like(like) for _ in range(get_world_size(group))]
        gathering.gather(like, results if _is(dst, group) else None, dst, group)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, _Scatter.apply(ctx.dst, ctx.group, *grads)


class _Scatter(torch.autograd.Function):  # type: ignore[misc,unused-ignore]
    @staticmethod
    def forward(ctx: Any, src: int, group: Any, *tensors: Tensor) -> Tensor:
        ctx.src, ctx.group = src, group
        if len({each.shape for each in tensors}) != 1:
            raise ValueError("scatter: parameter `tensors` must hold one tensor for each rank, all of one shape")
        parts = [each.detach().contiguous() for each in tensors]
        result = torch.empty_like(parts[0])
        scattering.scatter(result, parts if _is(src, group) else None, src, group)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, *_Gather.apply(ctx.src, ctx.group, grad)


class _AllToAll(torch.autograd.Function):  # type: ignore[misc,unused-ignore]
    @staticmethod
    def forward(ctx: Any, group: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs, inputs = tensors[:count], tensors[count:]
        ctx.group, ctx.count = group, count
        ctx.shapes = [each.shape for each in inputs]
        results = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in outputs]
        scattering.all_to_all(results, [each.detach().contiguous() for each in inputs], group)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        like = [grads[0].new_empty(shape) for shape in ctx.shapes]
        return None, None, *[None] * ctx.count, *_AllToAll.apply(ctx.group, len(like), *like, *grads)


class _AllToAllSingle(torch.autograd.Function):  # type: ignore[misc,unused-ignore]
    @staticmethod
    def forward(ctx: Any, output: Tensor, received: Any, sent: Any, group: Any, tensor: Tensor) -> Tensor:
        ctx.received, ctx.sent, ctx.group, ctx.shape = received, sent, group, tensor.shape
        result = torch.empty_like(output, memory_format=torch.contiguous_format)
        scattering.all_to_all_single(result, tensor.detach().contiguous(), received, sent, group)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        like = grad.new_empty(ctx.shape)
        return None, None, None, None, _AllToAllSingle.apply(like, ctx.sent, ctx.received, ctx.group, grad)


exclude_from_compile()
