"""Collectives that gather blocks of all ranks, with torch.distributed's names and arguments."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np

from mpicoll.memory.memory import AnyArray
from mpicoll.memory.protocols import view_of, views_of
from mpicoll.operations.prepare import gathering as prepare
from mpicoll.operations.prepare.run import NOT_CACHED, run_cached
from mpicoll.operations.work import Work

_ndarray = np.ndarray


def all_gather(
    tensor_list: list[AnyArray],
    tensor: AnyArray,
    group: Any = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
    stream: Any = None,
) -> Work | None:
    """Gather the ``tensor`` of every member into ``tensor_list`` on all members.

    All members call this function with the same dtype. The blocks may differ in size: on all members
    ``tensor_list[r]`` has as many elements as ``tensor`` of rank r.

    Args:
        tensor_list: one output array for each member, by rank in the group.
        tensor: this rank's input.
        group, async_op, timeout, name, stream: as in :func:`broadcast`.

    Raises:
        TypeError, ValueError: no list of one array for each member; dtypes or numbers of elements that do not fit.
        Others as :func:`broadcast`.

    Source: torch.distributed.all_gather; MPI-4.1 section 6.7.
    """
    recv: Any = tensor_list
    send = tensor if type(tensor) is _ndarray else view_of(tensor)
    if send is not tensor:
        recv = views_of(tensor_list)
    plain = send is not None and type(recv) is list
    cached = (("all_gather", send.dtype, send.shape), send, recv, tensor_list) if plain else NOT_CACHED
    arguments = tensor_list, tensor, async_op
    return run_cached("all_gather", group, cached, prepare.all_gather, arguments, async_op, timeout, name, stream)


def all_gather_single(
    output_tensor: AnyArray,
    input_tensor: AnyArray,
    group: Any = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
    stream: Any = None,
) -> Work | None:
    """Gather the ``input_tensor`` of every member into one array on all members.

    All members call this function with the same dtype and number of elements.

    Args:
        output_tensor: output for the inputs in the order of ranks: their concatenation along the first dimension, or their
            stack. The number of elements is the number of members times that of the input; the shape does not matter.
        input_tensor: this rank's input.
        group, async_op, timeout, name, stream: as in :func:`broadcast`.

    Raises:
        ValueError: dtypes or numbers of elements that do not fit.
        Others as :func:`broadcast`.

    Source: torch.distributed.all_gather_single (formerly all_gather_into_tensor); MPI-4.1 section 6.7.
    """
    return _all_gather_single("all_gather_single", output_tensor, input_tensor, group, async_op, timeout, name, stream)


def all_gather_into_tensor(
    output_tensor: AnyArray,
    input_tensor: AnyArray,
    group: Any = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
    stream: Any = None,
) -> Work | None:
    """Gather into one array, by the older name of :func:`all_gather_single`, with the same arguments and errors.

    Source: torch.distributed.all_gather_into_tensor.
    """
    return _all_gather_single(
        "all_gather_into_tensor", output_tensor, input_tensor, group, async_op, timeout, name, stream
    )


def _all_gather_single(
    function: str,
    output: AnyArray,
    source: AnyArray,
    group: Any,
    async_op: bool,
    timeout: timedelta | None,
    name: str | None,
    stream: Any,
) -> Work | None:
    send = source if type(source) is _ndarray else view_of(source, 3)
    recv = output if type(output) is _ndarray else view_of(output, 3)
    plain = send is not None and recv is not None
    cached = ((function, send.dtype, send.shape, recv.dtype, recv.shape), send, recv, output) if plain else NOT_CACHED
    call, op, arguments = prepare.all_gather_single, "all_gather_single", (output, source, function)
    return run_cached(op, group, cached, call, arguments, async_op, timeout, name, stream, function, 2)


def gather(
    tensor: AnyArray,
    gather_list: list[AnyArray] | None = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
    stream: Any = None,
) -> Work | None:
    """Gather the ``tensor`` of every member into ``gather_list`` on the rank ``dst``.

    All members call this function with the same destination, dtype and number of elements.

    Args:
        tensor: this rank's input.
        gather_list: on the destination one output array for each member, of the input's size; on other members None
            or [].
        dst: global rank of the destination (default 0); or ``group_dst``, its rank in the group.
        group, async_op, timeout, name, stream: as in :func:`broadcast`.

    Raises:
        TypeError, ValueError: no list of one array for each member on the destination, or a list on another member; dtypes or
            numbers of elements that do not fit.
        Others as :func:`broadcast`.

    Source: torch.distributed.gather; MPI-4.1 section 6.5.
    """
    send, recv = tensor if type(tensor) is _ndarray else view_of(tensor), gather_list
    if send is not tensor and gather_list is not None:
        recv = views_of(gather_list)
    plain = send is not None and group_dst is None and (dst is None or type(dst) is int)
    plain = plain and (gather_list is None or type(recv) is list)
    cached = (("gather", dst, send.dtype, send.shape), send, recv or None, gather_list or []) if plain else NOT_CACHED
    arguments = tensor, gather_list, dst, group_dst, async_op
    return run_cached("gather", group, cached, prepare.gather, arguments, async_op, timeout, name, stream)


def gather_single(
    tensor: AnyArray,
    gather_tensor: AnyArray | None = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
    stream: Any = None,
) -> Work | None:
    """Gather the ``tensor`` of every member into one array on the rank ``dst``.

    All members call this function with the same destination, dtype and number of elements.

    Args:
        tensor: this rank's input.
        gather_tensor: on the destination the output for the inputs in the order of ranks, as in :func:`all_gather_single`; on
            other members None.
        dst: global rank of the destination (default 0); or ``group_dst``, its rank in the group.
        group, async_op, timeout, name, stream: as in :func:`broadcast`.

    Raises:
        ValueError: no output on the destination, or an output on another member; dtypes or numbers of elements that do not fit.
        Others as :func:`broadcast`.

    Source: torch.distributed.gather_single of torch 2.15; MPI-4.1 section 6.5.
    """
    return _gather_single(
        "gather_single", tensor, gather_tensor, dst, group, async_op, group_dst, timeout, name, stream
    )


def gather_into_tensor(
    tensor: AnyArray,
    gather_tensor: AnyArray | None = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
    stream: Any = None,
) -> Work | None:
    """Gather into one array, by the older name of :func:`gather_single`, with the same arguments and errors.

    Source: torch.distributed.gather_into_tensor of torch 2.15.
    """
    return _gather_single(
        "gather_into_tensor", tensor, gather_tensor, dst, group, async_op, group_dst, timeout, name, stream
    )


def _gather_single(
    function: str,
    tensor: AnyArray,
    output: AnyArray | None,
    dst: int | None,
    group: Any,
    async_op: bool,
    group_dst: int | None,
    timeout: timedelta | None,
    name: str | None,
    stream: Any,
) -> Work | None:
    send = tensor if type(tensor) is _ndarray else view_of(tensor, 3)
    recv = output if output is None or type(output) is _ndarray else view_of(output, 3)
    plain = send is not None and (recv is None) is (output is None)
    if plain and group_dst is None and (dst is None or type(dst) is int):
        shape = None if recv is None else (recv.dtype, recv.shape)
        key = function, dst, send.dtype, send.shape, shape
        cached = key, send, recv, [] if output is None else output
    else:
        cached = NOT_CACHED
    call, op, arguments = prepare.gather_single, "gather_single", (tensor, output, dst, group_dst, function)
    return run_cached(op, group, cached, call, arguments, async_op, timeout, name, stream, function, 2)
