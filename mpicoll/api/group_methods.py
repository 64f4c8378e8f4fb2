"""Methods of ``ProcessGroup``: the public calls by torch's older names, with ranks of the group; each returns a Work.

``ProcessGroup`` looks here for attributes that it does not have. As in torch a call accepts a tensor, or a list of one
tensor: the backends of torch accept one tensor for each device of a process.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import FunctionType
from typing import Any

from mpicoll.api import coalesced, collectives, gathering, messages, scattering
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.lifecycle.destroy import destroy_process_group
from mpicoll.memory.memory import AnyArray
from mpicoll.memory.reduce_op import RedOpType, ReduceOp
from mpicoll.operations import execution
from mpicoll.operations.prepare.refusal import refuse
from mpicoll.operations.work import Work
from mpicoll.runtime.call_site import call_site

Op = RedOpType | ReduceOp
Tensors = AnyArray | list[AnyArray]
Made = Work | None
Limit = timedelta | None


def _one(given: Any, name: str, group: ProcessGroup, op: str = "") -> Any:
    """Return the only element of a list, or an object that is no list unchanged.

    Args:
        op: the collective, whose other members learn of a list that has no single element; "": a message.
    """
    if not isinstance(given, list):
        return given
    if len(given) != 1:
        error = ValueError(f"{name} must hold one tensor, as there is one device in a process, got {len(given)}")
        if not op:
            raise error
        execution.enter(group, op)
        refuse(group, op, call_site(), error)
    return given[0]


def _inner(given: Any, name: str, group: ProcessGroup, op: str) -> Any:
    """Return the only element of a list of lists, or another object unchanged."""
    return _one(given, name, group, op) if isinstance(given, list) and given and isinstance(given[0], list) else given


def allreduce(group: ProcessGroup, tensors: Tensors, op: Op = ReduceOp.SUM, timeout: Limit = None) -> Made:
    """Start :func:`mpicoll.all_reduce`."""
    return collectives.all_reduce(_one(tensors, "tensors", group, "all_reduce"), op, group, True, timeout=timeout)


def allreduce_coalesced(
    group: ProcessGroup, tensors: list[AnyArray], op: Op = ReduceOp.SUM, timeout: Limit = None
) -> Made:
    """Start :func:`mpicoll.all_reduce_coalesced`."""
    return coalesced.all_reduce_coalesced(tensors, op, group, True, timeout=timeout)


def broadcast(group: ProcessGroup, tensors: Tensors, root: int, timeout: Limit = None) -> Made:
    """Start :func:`mpicoll.broadcast`."""
    return collectives.broadcast(_one(tensors, "tensors", group, "broadcast"), None, group, True, root, timeout=timeout)


def reduce(group: ProcessGroup, tensors: Tensors, root: int, op: Op = ReduceOp.SUM, timeout: Limit = None) -> Made:
    """Start :func:`mpicoll.reduce`."""
    return collectives.reduce(_one(tensors, "tensors", group, "reduce"), None, op, group, True, root, timeout=timeout)


def allgather(group: ProcessGroup, output_tensors: Any, input_tensors: Tensors, timeout: Limit = None) -> Made:
    """Start :func:`mpicoll.all_gather`."""
    outputs, source = (
        _inner(output_tensors, "output_tensors", group, "all_gather"),
        _one(input_tensors, "input_tensors", group, "all_gather"),
    )
    return gathering.all_gather(outputs, source, group, True, timeout=timeout)


def allgather_coalesced(
    group: ProcessGroup, output_lists: list[list[AnyArray]], input_list: list[AnyArray], timeout: Limit = None
) -> Made:
    """Start :func:`mpicoll.all_gather_coalesced`."""
    return coalesced.all_gather_coalesced(output_lists, input_list, group, True, timeout=timeout)


def all_gather_single(group: ProcessGroup, output: AnyArray, input: AnyArray, timeout: Limit = None) -> Made:
    """Start :func:`mpicoll.all_gather_single`."""
    return gathering.all_gather_single(output, input, group, True, timeout=timeout)


def gather(group: ProcessGroup, output_tensors: Any, input_tensors: Tensors, root: int, timeout: Limit = None) -> Made:
    """Start :func:`mpicoll.gather`."""
    outputs, source = (
        _inner(output_tensors, "output_tensors", group, "gather"),
        _one(input_tensors, "input_tensors", group, "gather"),
    )
    return gathering.gather(source, outputs, None, group, True, root, timeout=timeout)


def gather_single(
    group: ProcessGroup, output: AnyArray | None, input: AnyArray, root: int, timeout: Limit = None
) -> Made:
    """Start :func:`mpicoll.gather_single`."""
    return gathering.gather_single(input, output, None, group, True, root, timeout=timeout)


def scatter(group: ProcessGroup, output_tensors: Tensors, input_tensors: Any, root: int, timeout: Limit = None) -> Made:
    """Start :func:`mpicoll.scatter`."""
    result, inputs = (
        _one(output_tensors, "output_tensors", group, "scatter"),
        _inner(input_tensors, "input_tensors", group, "scatter"),
    )
    return scattering.scatter(result, inputs, None, group, True, root, timeout=timeout)


def reduce_scatter(
    group: ProcessGroup, output_tensors: Tensors, input_tensors: Any, op: Op = ReduceOp.SUM, timeout: Limit = None
) -> Made:
    """Start :func:`mpicoll.reduce_scatter`."""
    result, inputs = (
        _one(output_tensors, "output_tensors", group, "reduce_scatter"),
        _inner(input_tensors, "input_tensors", group, "reduce_scatter"),
    )
    return scattering.reduce_scatter(result, inputs, op, group, True, timeout=timeout)


def reduce_scatter_single(
    group: ProcessGroup, output: AnyArray, input: AnyArray, op: Op = ReduceOp.SUM, timeout: Limit = None
) -> Made:
    """Start :func:`mpicoll.reduce_scatter_single`."""
    return scattering.reduce_scatter_single(output, input, op, group, True, timeout=timeout)


def alltoall(group: ProcessGroup, output: list[AnyArray], input: list[AnyArray], timeout: Limit = None) -> Made:
    """Start :func:`mpicoll.all_to_all`."""
    return scattering.all_to_all(output, input, group, True, timeout=timeout)


def all_to_all_single(
    group: ProcessGroup,
    output: AnyArray,
    input: AnyArray,
    output_split_sizes: list[int],
    input_split_sizes: list[int],
    timeout: Limit = None,
) -> Made:
    """Start :func:`mpicoll.all_to_all_single`."""
    return scattering.all_to_all_single(
        output, input, output_split_sizes, input_split_sizes, group, True, timeout=timeout
    )


def send(group: ProcessGroup, tensors: Tensors, dst: int, tag: int = 0) -> Made:
    """Start :func:`mpicoll.isend`."""
    return messages.isend(_one(tensors, "tensors", group), None, group, tag, dst)


def recv(group: ProcessGroup, tensors: Tensors, src: int, tag: int = 0) -> Made:
    """Start :func:`mpicoll.irecv`."""
    return messages.irecv(_one(tensors, "tensors", group), None, group, tag, src)


def recv_anysource(group: ProcessGroup, tensors: Tensors, tag: int = 0) -> Made:
    """Start :func:`mpicoll.irecv` of a message from any member."""
    return messages.irecv(_one(tensors, "tensors", group), None, group, tag)


def barrier(group: ProcessGroup, timeout: Limit = None) -> Made:
    """Start :func:`mpicoll.barrier`."""
    return collectives.barrier(group, True, None, timeout)


def monitored_barrier(group: ProcessGroup, timeout: Limit = None, wait_all_ranks: bool = False) -> None:
    """Call :func:`mpicoll.monitored_barrier`."""
    collectives.monitored_barrier(group, timeout, wait_all_ranks)


def shutdown(group: ProcessGroup) -> None:
    """Destroy the group: :func:`mpicoll.destroy_process_group`."""
    destroy_process_group(group)


METHODS: dict[str, Callable[..., Any]] = {
    name: found
    for name, found in tuple(globals().items())
    if isinstance(found, FunctionType) and found.__module__ == __name__ and not name.startswith("_")
}
"""The functions of this file by name, the older names of torch among them."""
METHODS |= {
    "_allgather_base": all_gather_single,
    "_reduce_scatter_base": reduce_scatter_single,
    "alltoall_base": all_to_all_single,
}
