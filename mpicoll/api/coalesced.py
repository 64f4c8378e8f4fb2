"""Many arrays in few collectives: coalesced reductions and gathers, and the average of gradients in buckets."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from mpicoll.memory.memory import AnyArray
from mpicoll.memory.reduce_op import RedOpType, ReduceOp
from mpicoll.operations.prepare import coalesced as prepare
from mpicoll.operations.prepare import gathering
from mpicoll.operations.prepare.coalesced import BUCKET_BYTES, made_again
from mpicoll.operations.prepare.refusal import is_group
from mpicoll.operations.prepare.run import run_prepared
from mpicoll.operations.work import Work


def all_reduce_coalesced(
    tensors: list[AnyArray] | AnyArray,
    op: RedOpType | ReduceOp = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
    stream: Any = None,
) -> Work | None:
    """Reduce each array of a list over all members, in place, in one call; all members get the results.

    All members call this function with the same op, and the same number of arrays with the same dtype and shapes in the same
    order. A list that differs is an error on all members (torch would mix up the arrays).

    Args:
        tensors: inputs and outputs, of one dtype (complex arrays and arrays of their parts' dtype may be mixed, as in torch); or
            one array.
        op: as in :func:`all_reduce`.
        group, timeout, name, stream: as in :func:`broadcast`.
        async_op: return a :class:`Work` of the whole at once (torch: its Future, here ``get_future()``).

    Raises:
        ValueError: the list is empty, or its dtypes differ.
        Others as :func:`all_reduce`.

    Source: torch.distributed.all_reduce_coalesced.
    """
    made: Work | bool = type(async_op) is bool and is_group(
        group
    )  # if not, the general way tells all members what is wrong
    made = made and made_again("all_reduce_coalesced", group, op, tensors, BUCKET_BYTES, async_op, timeout, name)
    if made:
        return made if isinstance(made, Work) else None
    call, arguments = prepare.all_reduce_coalesced, (tensors, op)
    return run_prepared("all_reduce_coalesced", group, call, arguments, async_op, timeout, name, stream)


def average_gradients(
    arrays: Any,
    group: Any = None,
    async_op: bool = False,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    timeout: timedelta | None = None,
    name: str | None = None,
    stream: Any = None,
) -> Work | None:
    """Average each array over all members, in place: the sum, divided once by the number of members.

    All members call this function with the same number of arrays with the same shapes and dtypes in the same order. There may be
    several dtypes. A list that differs is an error on all members, before anything moves. The arrays move in flat buffers of
    ``bucket_bytes``, one collective each, after one agreement. The buffers are cached for the next call with such arrays. No copy
    is made of an array of 1 MiB or more, and of up to 32 arrays that move through the shared memory of a node in one step.

    A blocking call is faster than an asynchronous call and its wait, or as fast with ``MPICOLL_PROGRESS=thread``. To average
    layer by layer with ``async_op=True``, during the computation of the next layer, is faster with that thread, large layers and
    free cores (docs/performance.md, "Overlap").

    Args:
        arrays: a list of floating-point or complex arrays; or an object with ``parameters()``, such as a module of torch: the
            ``grad`` of each parameter is averaged, except if it is None, for the same parameters on all members.
        bucket_bytes: bytes of a bucket, the same on all members.
        group, timeout, name, stream: as in :func:`broadcast`.
        async_op: return a :class:`Work` of the whole at once.

    Raises:
        RuntimeError: an array of integers or bools, which cannot represent an average.
        ValueError: ``bucket_bytes`` is not positive.
        Others as :func:`all_reduce`.

    Example::

        x, y = np.full(3, 2.0 * dist.get_rank()), np.ones((2, 2), np.float32)
        dist.average_gradients([x, y])  # on two ranks x holds 1.0 now

    Source: buckets of torch's DistributedDataParallel; Li et al., VLDB 2020, section 3.2.
    """
    made: Work | bool = type(async_op) is bool and is_group(group)  # as in all_reduce_coalesced
    made = made and made_again("average_gradients", group, RedOpType.AVG, arrays, bucket_bytes, async_op, timeout, name)
    if made:
        return made if isinstance(made, Work) else None
    arguments = arrays, bucket_bytes
    return run_prepared(
        "average_gradients", group, prepare.average_gradients, arguments, async_op, timeout, name, stream
    )


def all_gather_coalesced(
    output_tensor_lists: list[list[AnyArray]],
    input_tensor_list: list[AnyArray],
    group: Any = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
    stream: Any = None,
) -> Work | None:
    """Gather every array of a list from all members, in one call: ``output_tensor_lists[r][k]`` is rank r's k-th array.

    All members call this function with the same dtype, the same number of arrays, and output lists of the same shapes. The
    arrays of one rank may have other shapes than those of another rank (in torch they must not).

    Args:
        output_tensor_lists: one list of output arrays for each member, by rank in the group.
        input_tensor_list: this rank's inputs, of the shapes of its own output list.
        group, timeout, name, stream: as in :func:`broadcast`.
        async_op: return a :class:`Work` of the whole at once (torch: its Future, here ``get_future()``).

    Raises:
        TypeError, ValueError: not lists of arrays of one dtype; an empty, too long or too short list; an output with another
            shape than its input.
        Others as :func:`broadcast`.

    Source: torch.distributed.all_gather_coalesced.
    """
    call, arguments = gathering.all_gather_coalesced, (output_tensor_lists, input_tensor_list)
    return run_prepared("all_gather_coalesced", group, call, arguments, async_op, timeout, name, stream)
