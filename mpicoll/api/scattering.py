"""Collectives that send a different block to each rank, with torch.distributed's names and arguments."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np

from mpicoll.groups.process_group import ProcessGroup
from mpicoll.groups.registry import default
from mpicoll.memory.memory import AnyArray
from mpicoll.memory.protocols import view_of, views_of
from mpicoll.memory.reduce_op import RedOpType, ReduceOp
from mpicoll.operations.prepare import scattering as prepare
from mpicoll.operations.prepare.run import NOT_CACHED, run_cached
from mpicoll.operations.work import Work

_ndarray = np.ndarray


def scatter(
    tensor: AnyArray,
    scatter_list: list[AnyArray] | None = None,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
    stream: Any = None,
) -> Work | None:
    """Send one array of ``scatter_list`` on the rank ``src`` to ``tensor`` of each member.

    All members call this function with the same source, dtype and number of elements.

    Args:
        tensor: array for the result of this rank.
        scatter_list: on the source one input array for each member, of the output's size; on other members None or
            [].
        src: global rank of the source (default 0); or ``group_src``, its rank in the group.
        group, async_op, timeout, name, stream: as in :func:`broadcast`.

    Raises:
        TypeError, ValueError: no list of one array for each member on the source, or a list on another member; dtypes or
            numbers of elements that do not fit.
        Others as :func:`broadcast`.

    Source: torch.distributed.scatter; MPI-4.1 section 6.6.
    """
    send, recv = scatter_list, tensor if type(tensor) is _ndarray else view_of(tensor)
    if recv is not tensor and scatter_list is not None:
        send = views_of(scatter_list)
    plain = recv is not None and group_src is None and (src is None or type(src) is int)
    plain = plain and (scatter_list is None or type(send) is list)
    cached = (("scatter", src, recv.dtype, recv.shape), send or None, recv, tensor) if plain else NOT_CACHED
    arguments = tensor, scatter_list, src, group_src, async_op
    return run_cached("scatter", group, cached, prepare.scatter, arguments, async_op, timeout, name, stream)


def reduce_scatter(
    output: AnyArray,
    input_list: list[AnyArray],
    op: RedOpType | ReduceOp = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
    stream: Any = None,
) -> Work | None:
    """Reduce the lists of all members; ``output`` of member r holds the result of ``input_list[r]``.

    All members call this function with the same op, dtype and sizes of the arrays. The arrays of the list may
    differ in size.

    Args:
        output: output array, with as many elements as ``input_list[r]``; r is this rank in the group.
        input_list: one input array for each member, by rank in the group.
        op: as in :func:`all_reduce`.
        group, async_op, timeout, name, stream: as in :func:`broadcast`.

    Raises: as :func:`all_reduce`.

    Source: torch.distributed.reduce_scatter; MPI-4.1 section 6.10.
    """
    send: Any = input_list
    recv = output if type(output) is _ndarray else view_of(output)
    if recv is not output:
        send = views_of(input_list)
    plain = recv is not None and type(op) is RedOpType and type(send) is list
    cached = (("reduce_scatter", op, recv.dtype, recv.shape), send, recv, output) if plain else NOT_CACHED
    arguments = output, input_list, op, async_op
    return run_cached(
        "reduce_scatter", group, cached, prepare.reduce_scatter, arguments, async_op, timeout, name, stream
    )


def reduce_scatter_single(
    output: AnyArray,
    input: AnyArray,
    op: RedOpType | ReduceOp = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
    stream: Any = None,
) -> Work | None:
    """Reduce ``input`` over all members; ``output`` of member r holds the r-th of the equal parts.

    All members call this function with the same op, dtype and number of elements.

    Args:
        output: output array of one part.
        input: input array: the parts in the order of ranks, concatenated along the first dimension or stacked. The number of
            elements is the number of members times that of the output; the shape does not matter.
        op: as in :func:`all_reduce`.
        group, async_op, timeout, name, stream: as in :func:`broadcast`.

    Raises: as :func:`all_reduce`.

    Source: torch.distributed.reduce_scatter_single (formerly reduce_scatter_tensor); MPI-4.1 section 6.10.1.
    """
    return _reduce_scatter_single("reduce_scatter_single", output, input, op, group, async_op, timeout, name, stream)


def reduce_scatter_tensor(
    output: AnyArray,
    input: AnyArray,
    op: RedOpType | ReduceOp = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
    stream: Any = None,
) -> Work | None:
    """Reduce and scatter one array, by the older name of :func:`reduce_scatter_single`, with the same arguments and errors.

    Source: torch.distributed.reduce_scatter_tensor.
    """
    return _reduce_scatter_single("reduce_scatter_tensor", output, input, op, group, async_op, timeout, name, stream)


def _reduce_scatter_single(
    function: str,
    output: AnyArray,
    source: AnyArray,
    op: RedOpType | ReduceOp,
    group: Any,
    async_op: bool,
    timeout: timedelta | None,
    name: str | None,
    stream: Any,
) -> Work | None:
    send = source if type(source) is _ndarray else view_of(source, 3)
    recv = output if type(output) is _ndarray else view_of(output, 3)
    plain = send is not None and recv is not None and type(op) is RedOpType
    cached = (
        ((function, op, send.dtype, send.shape, recv.dtype, recv.shape), send, recv, output) if plain else NOT_CACHED
    )
    call, arguments = prepare.reduce_scatter_single, (output, source, op, function)
    return run_cached(
        "reduce_scatter_single", group, cached, call, arguments, async_op, timeout, name, stream, function, 2
    )


def all_to_all_single(
    output: AnyArray,
    input: AnyArray,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Any = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
    stream: Any = None,
) -> Work | None:
    """Send one part of ``input`` to each member, and receive one part of ``output`` from each member.

    All members call this function with the same dtype. The part that rank i sends to rank j has as many rows as
    rank j expects from rank i.

    Args:
        output: output array: the parts one behind the other along dimension 0.
        input: input array: the parts to send one behind the other along dimension 0.
        output_split_sizes: rows of ``output`` from each member; None or []: equal parts.
        input_split_sizes: rows of ``input`` to each member; None or []: equal parts.
        group, async_op, timeout, name, stream: as in :func:`broadcast`.

    Raises:
        TypeError, RuntimeError: no list of integers; dimension 0 does not divide equally, or the split sizes do not add up to
            the rows (texts of torch).
        CollectiveMismatchError: a rank sends another number of elements than the receiver expects; either may be wrong.
        Others as :func:`broadcast`.

    Source: torch.distributed.all_to_all_single; MPI-4.1 section 6.8.
    """
    send = input if type(input) is _ndarray else view_of(input)
    recv = output if type(output) is _ndarray else view_of(output)
    key: Any = None
    if send is not None and recv is not None:
        if output_split_sizes is None and input_split_sizes is None:
            key = ("all_to_all_single", send.dtype, send.shape, recv.dtype, recv.shape)
        else:
            key, send, recv = _parts(group, send, recv, input_split_sizes, output_split_sizes)
    call, arguments = prepare.all_to_all_single, (output, input, output_split_sizes, input_split_sizes)
    return run_cached(
        "all_to_all_single", group, (key, send, recv, output), call, arguments, async_op, timeout, name, stream
    )


def _parts(group: Any, send: Any, recv: Any, sent: Any, received: Any) -> tuple[Any, Any, Any]:
    """Return the signature of an exchange, and the parts of both arrays in lists; three times None for all but right sizes.

    As long as the parts of all calls of this rank are equal, these are the signature and the arrays of a call without sizes.
    """
    known = [sizes for sizes in (sent, received) if sizes is not None]
    if not all(type(sizes) is list for sizes in known) or not (send.ndim and recv.ndim) or send.dtype != recv.dtype:
        return None, None, None
    members, known_group = max(map(len, known)), default.world if group is None else group
    if not members or type(known_group) is not ProcessGroup or members != known_group.size():
        return None, None, None
    inputs, outputs = _cut(send, sent, members), _cut(recv, received, members)
    if inputs is None or outputs is None:
        return None, None, None
    if "all_to_all_single" not in prepare.unequal and not _differ(inputs[0], inputs, outputs):
        return ("all_to_all_single", send.dtype, send.shape, recv.dtype, recv.shape), send, recv
    return ("all_to_all_single", prepare.OF_ANY_SIZE, send.dtype), inputs, outputs


def _cut(array: Any, sizes: list[Any] | None, members: int) -> list[Any] | None:
    """Cut an array along its rows; None if the sizes are no list of integers that add up to the rows."""
    rows = len(array)
    if not sizes:
        if rows % members:
            return None
        sizes = [rows // members] * members
    parts, start = [], 0
    for size in sizes:
        if type(size) is not int or size < 0:
            return None
        stop = start + size
        parts.append(array[start:stop])
        start = stop
    return parts if start == rows else None


def all_to_all(
    output_tensor_list: list[AnyArray],
    input_tensor_list: list[AnyArray],
    group: Any = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
    stream: Any = None,
) -> Work | None:
    """Send ``input_tensor_list[j]`` to member j, and receive ``output_tensor_list[i]`` from member i.

    All members call this function with the same dtype. The sizes may differ from pair to pair.

    Args:
        output_tensor_list: one output array for each member, by rank in the group.
        input_tensor_list: one input array for each member, by rank in the group.
        group, async_op, timeout, name, stream: as in :func:`broadcast`.

    Raises:
        TypeError, ValueError: no lists of one array for each member, or dtypes that differ.
        CollectiveMismatchError: a rank sends another number of elements than the receiver expects; either may be wrong.
        Others as :func:`broadcast`.

    Source: torch.distributed.all_to_all; MPI-4.1 section 6.8.
    """
    send, recv = input_tensor_list, output_tensor_list
    first = send[0] if type(send) is list and send else None
    if first is not None and type(first) is not _ndarray:
        send, recv = views_of(send) or [], views_of(recv) or []
        first = send[0] if send and recv else None
    key: Any = None
    if type(first) is _ndarray:
        key = ("all_to_all", first.dtype, first.shape)
        if "all_to_all" in prepare.unequal and type(recv) is list and _differ(first, send, recv):
            key = ("all_to_all", prepare.OF_ANY_SIZE, first.dtype)
    cached = key, send, recv, output_tensor_list
    arguments = (output_tensor_list, input_tensor_list, async_op)
    return run_cached("all_to_all", group, cached, prepare.all_to_all, arguments, async_op, timeout, name, stream)


def _differ(first: Any, *lists: list[Any]) -> bool:
    return any(type(each) is _ndarray and each.size != first.size for arrays in lists for each in arrays)
