"""A process group of torch.distributed whose calls are calls of a group of this library."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore]
import torch.distributed as c10d  # type: ignore[import-not-found,unused-ignore]
from torch.autograd.profiler import record_function  # type: ignore[import-not-found,unused-ignore]

from mpicoll.api import coalesced, collectives, gathering, messages, scattering
from mpicoll.api.groups import new_group
from mpicoll.diagnosis.call import CallDescription
from mpicoll.diagnosis.wait_policy import CallWait
from mpicoll.errors import BufferInUseError, DistError
from mpicoll.groups.process_group import ProcessGroup as Group
from mpicoll.lifecycle.destroy import destroy_process_group
from mpicoll.memory.reduce_op import RedOpType, WholeAverage
from mpicoll.operations import work as works
from mpicoll.operations.request import Request
from mpicoll.runtime import waiting
from mpicoll.runtime.call_site import call_site
from mpicoll.torch import hooks
from mpicoll.torch.named_group import NamedGroup
from mpicoll.torch.names import DEVICES, NAME
from mpicoll.torch.sites import DDP, PIPELINING, maker
from mpicoll.torch.sparse import all_reduce_sparse
from mpicoll.torch.work import Joint, Work, forget_registered, tensors_in
from mpicoll.torch.world import add_to_world, store_of

Tensor = Any
Made = Any
"""A Work, or None for a call that was waited for."""

_OPS = {getattr(c10d.ReduceOp, op.name).value: op for op in RedOpType if hasattr(c10d.ReduceOp, op.name)}
"""The reductions by the numbers of torch's: the hash of an enumeration of C++ takes 2 us."""
_SUM = c10d.ReduceOp.SUM
_WHOLE_AVERAGE = WholeAverage()
_MOST_DROPPED = 32
"""Works that a part of torch has dropped and may still wait for."""
_NO_TIME = timedelta(0)
_is_profiled = torch.autograd._profiler_enabled


def reduce_op(opts: Any, tensor: Tensor) -> Any:
    """Return the reduction of this library for a reduction of torch, or for the options of a call; ``tensor`` gives the dtype."""
    op = getattr(opts, "reduceOp", opts)
    if op == _SUM:  # 1 us, and to find the number of another reduction 2.5 us
        return RedOpType.SUM
    found = _OPS.get(getattr(op, "op", op).value)
    if found is RedOpType.PREMUL_SUM:
        factor = op.__getstate__()[1]
        return RedOpType.PREMUL_SUM(factor.item() if isinstance(factor, torch.Tensor) else factor)
    if found is RedOpType.AVG and isinstance(tensor, torch.Tensor):
        # Lightning passes integers to every backend but gloo.
        return found if tensor.is_floating_point() or tensor.is_complex() else _WHOLE_AVERAGE
    if found is None:
        raise ValueError(f"the backend {NAME} has no reduction {op}")
    return found


def _one(given: Any, what: str) -> Any:
    """Return the only tensor of a list, or a tensor that is in no list."""
    if type(given) is list and len(given) == 1:
        return given[0]
    if isinstance(given, torch.Tensor):
        return given
    if len(given) != 1:
        raise ValueError(f"{what} must hold one tensor, as a process has one device, got {len(given)}")
    return given[0]


def _inner(given: Any) -> Any:
    """Return the only list of a list, or a list of tensors."""
    return given[0] if given and not isinstance(given[0], torch.Tensor) else given


class ProcessGroup(NamedGroup):
    """A process group of torch.distributed: of ``init_process_group("mpicoll")``, ``new_group``, or :func:`mpicoll.torch.wrap`.

    Its methods are those of ``torch.distributed.ProcessGroup``, which the functions of torch.distributed call. A call whose
    options say that the caller waits at once is complete when the method returns, and the method returns None.

    Args:
        group: the group of this library.
        owns: whether the group is destroyed with this object.
        store: the store of the group, for torch; this object only keeps it.
    """

    def __init__(self, group: Group, *, owns: bool, store: Any = None) -> None:
        super().__init__(group, store)
        self._owns = owns
        self._coalesced: list[Any] | None = None
        # The last backward pass with a call of DistributedDataParallel, and the number of that call.
        self._backward = -1, 0
        self._dropped: deque[Work] = deque(maxlen=_MOST_DROPPED)
        if hooks.AVAILABLE:
            hooks.add_backends(self, self.backends())

    def backends(self) -> dict[str, Any]:
        """Return the backends of the group for C++, by the type of the device."""
        return dict.fromkeys(DEVICES, hooks.Backend(self, ProcessGroup))

    def passes_on(self, given: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """Return whether the group of another backend makes a call with these arguments."""
        return False

    # Calls.

    def _make(
        self,
        call: Callable[..., works.Work | None],
        given: tuple[Any, ...],
        outputs: Any,
        opts: Any,
        timeout: timedelta | None = None,
    ) -> Made:
        """Make a call of this library.

        Args:
            given: its arguments but the group, ``async_op`` and the limit.
            outputs: the tensors of the result.
            opts: the options of torch: whether the caller waits at once, and the limit of the call. With anything else, as in the
                overloads of torch's methods without options, the caller does not; a timedelta is the limit.
            timeout: the limit of the call, in the overloads without options.
        """
        try:
            wait, limit = opts.asyncOp is False, opts.timeout
        except AttributeError:
            wait, limit = False, opts if timeout is None else timeout
        part = maker()
        if part:
            part = self._bucket() if part is DDP else part
            self.group.note_maker(part)
        limit = limit if isinstance(limit, timedelta) and limit > _NO_TIME else None
        if _is_profiled():
            with record_function(f"{NAME}:{call.__name__}"):
                made = call(*given, group=self.group, async_op=not wait, timeout=limit)
        else:
            made = call(*given, group=self.group, async_op=not wait, timeout=limit)
        return None if made is None and wait else self._started(made, outputs, self._dropped if part else None)

    def _root(self, opts: Any, root: int | None = None) -> int:
        """Return the global rank of the root that a program or the options give."""
        return self._global(int(getattr(opts, "rootRank", opts)) if root is None else root)

    def _global(self, rank: int) -> int:
        """Return the global rank of a member; for another number one that is none, which the call refuses on all members."""
        ranks = self.group.ranks
        if 0 <= rank < len(ranks):
            return ranks[rank]
        return -1 if rank in ranks else rank

    def _bucket(self) -> str:
        """Return the name of a call of DistributedDataParallel, with its number in the backward pass: that of the bucket."""
        task = torch._C._current_graph_task_id()
        if task < 0:
            return DDP
        before, number = self._backward
        self._backward = task, number + 1 if task == before else 0
        return f"{DDP}(bucket {self._backward[1]})"

    def _started(self, made: works.Work | None, outputs: Any, dropped: deque[Work] | None = None) -> Made:
        outputs = tensors_in(outputs)
        if made is None:
            return Joint((), outputs)
        work = Work(made, outputs, dropped)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _make_each(self, call: Callable[..., Made], given: Iterable[tuple[Any, ...]], outputs: Any, opts: Any) -> Made:
        """Make several calls as one."""
        made = [each for each in [call(self, *one, opts) for one in given] if each is not None]
        return Joint(made, outputs) if made or getattr(opts, "asyncOp", True) else None

    def allreduce(self, tensors: Any, opts: Any = _SUM, timeout: timedelta | None = None, *, op: Any = None) -> Made:
        """Reduce a tensor over all members, in place: :func:`mpicoll.all_reduce`; also a sparse COO tensor."""
        tensor = _one(tensors, "tensors")
        op = reduce_op(opts if op is None else op, tensor)
        if tensor.is_sparse:
            all_reduce_sparse(tensor, op, self.group)
            return Joint((), tensors)
        return self._make(collectives.all_reduce, (tensor, op), tensors, opts, timeout)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = _SUM) -> Made:
        """Reduce each tensor of a list over all members, in place: :func:`mpicoll.all_reduce_coalesced` for each dtype."""
        alike: dict[Any, list[Tensor]] = {}
        once = {id(tensor): tensor for tensor in tensors}  # as torch, which reduces a tensor twice to the same values
        for tensor in once.values():
            alike.setdefault(tensor.dtype, []).append(tensor)
        if len(alike) == 1:
            given = next(iter(alike.values())), reduce_op(opts, tensors[0])
            return self._make(coalesced.all_reduce_coalesced, given, tensors, opts)
        return self._make_each(ProcessGroup.allreduce_coalesced, ((each,) for each in alike.values()), tensors, opts)

    def broadcast(
        self, tensors: Any, opts: Any = 0, timeout: timedelta | None = None, *, root: int | None = None
    ) -> Made:
        """Copy a tensor of one rank to all members: :func:`mpicoll.broadcast`."""
        given = _one(tensors, "tensors"), self._root(opts, root)
        return self._make(collectives.broadcast, given, tensors, opts, timeout)

    def reduce(
        self,
        tensors: Any,
        opts: Any = 0,
        op: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Made:
        """Reduce a tensor over all members to one rank: :func:`mpicoll.reduce`."""
        if op is None:
            op = opts if hasattr(opts, "reduceOp") else _SUM
        tensor = _one(tensors, "tensors")
        given = tensor, self._root(opts, root), reduce_op(op, tensor)
        return self._make(collectives.reduce, given, tensors, opts, timeout)

    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, *, timeout: timedelta | None = None
    ) -> Made:
        """Gather the tensors of all members: :func:`mpicoll.all_gather`."""
        given = _inner(output_tensors), _one(input_tensors, "input_tensors")
        return self._make(gathering.all_gather, given, output_tensors, opts, timeout)

    def allgather_coalesced(self, output_lists: Any, input_list: list[Tensor], opts: Any = None) -> Made:
        """Gather every tensor of a list: :func:`mpicoll.all_gather_coalesced`."""
        given = output_lists, input_list
        return self._make(coalesced.all_gather_coalesced, given, output_lists, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Made:
        """Gather into one tensor: :func:`mpicoll.all_gather_single`."""
        given = _one(output, "output"), _one(input, "input")
        return self._make(gathering.all_gather_single, given, output, opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Made:
        """Gather into one tensor, for each pair of tensors of two lists."""
        return self._make_each(ProcessGroup.all_gather_single, zip(outputs, inputs, strict=True), outputs, opts)

    def gather(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = 0,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Made:
        """Gather to one rank: :func:`mpicoll.gather`."""
        given = _one(input_tensors, "input_tensors"), _inner(output_tensors) or None, self._root(opts, root)
        return self._make(gathering.gather, given, output_tensors, opts, timeout)

    def gather_single(self, output: Any, input: Any, opts: Any) -> Made:
        """Gather to one rank into one tensor: :func:`mpicoll.gather_single`."""
        dst = self._root(opts)
        into = _one(output, "output") if dst == self.group.ranks[self.rank()] else None
        return self._make(gathering.gather_single, (_one(input, "input"), into, dst), output, opts)

    def scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = 0,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Made:
        """Scatter from one rank: :func:`mpicoll.scatter`."""
        given = _one(output_tensors, "output_tensors"), _inner(input_tensors) or None, self._root(opts, root)
        return self._make(scattering.scatter, given, output_tensors, opts, timeout)

    def reduce_scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = _SUM,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
    ) -> Made:
        """Reduce over all members, one tensor of a list for each member: :func:`mpicoll.reduce_scatter`."""
        output = _one(output_tensors, "output_tensors")
        given = output, _inner(input_tensors), reduce_op(opts if op is None else op, output)
        return self._make(scattering.reduce_scatter, given, output_tensors, opts, timeout)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = _SUM) -> Made:
        """Reduce over all members, one block of a tensor for each member: :func:`mpicoll.reduce_scatter_single`."""
        given = _one(output, "output"), _one(input, "input"), reduce_op(opts, _one(output, "output"))
        return self._make(scattering.reduce_scatter_single, given, output, opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = _SUM) -> Made:
        """Reduce over all members, one block of a tensor for each member, for each pair of tensors of two lists."""
        return self._make_each(ProcessGroup.reduce_scatter_single, zip(outputs, inputs, strict=True), outputs, opts)

    def alltoall(
        self,
        output_tensors: list[Tensor],
        input_tensors: list[Tensor],
        opts: Any = None,
        *,
        timeout: timedelta | None = None,
    ) -> Made:
        """Exchange tensors between all members: :func:`mpicoll.all_to_all`."""
        return self._make(scattering.all_to_all, (output_tensors, input_tensors), output_tensors, opts, timeout)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
        *,
        timeout: timedelta | None = None,
    ) -> Made:
        """Exchange blocks of a tensor between all members: :func:`mpicoll.all_to_all_single`; no splits: equal blocks."""
        splits = list(output_split_sizes) or None, list(input_split_sizes) or None
        given = _one(output, "output"), _one(input, "input"), *splits
        return self._make(scattering.all_to_all_single, given, output, opts, timeout)

    def alltoall_base(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
        *,
        timeout: timedelta | None = None,
    ) -> Made:
        """Make the call of :meth:`all_to_all_single`."""
        splits = output_split_sizes, input_split_sizes
        return self.all_to_all_single(output_tensor, input_tensor, *splits, opts, timeout=timeout)

    def barrier(self, opts: Any = None, *, timeout: timedelta | None = None) -> Made:
        """Wait for all members: :func:`mpicoll.barrier`."""
        return self._make(collectives.barrier, (), [], opts, timeout)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all members, and name those that do not come: :func:`mpicoll.monitored_barrier`."""
        collectives.monitored_barrier(self.group, timeout, wait_all_ranks)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _reduce_scatter_base(self, outputTensor: Tensor, inputTensor: Tensor, opts: Any = _SUM) -> Made:
        return self.reduce_scatter_single(outputTensor, inputTensor, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Made:
        """Start to send a tensor to a rank of the group: :func:`mpicoll.isend`."""
        tensor = _one(tensors, "tensors")
        return self._started(messages.isend(tensor, self._global(dstRank), self.group, tag), tensors)

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Made:
        """Start to receive a tensor from a rank of the group: :func:`mpicoll.irecv`."""
        tensor, source = _one(tensors, "tensors"), self._global(srcRank)
        try:
            return self._started(messages.irecv(tensor, source, self.group, tag), tensors)
        except BufferInUseError:
            if maker() != PIPELINING:
                raise
        # A stage of torch.distributed.pipelining receives its first two messages into one tensor, and never reads the tensor.
        return self._started(messages.irecv(torch.empty_like(tensor), source, self.group, tag), tensors)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Made:
        """Start to receive a tensor from any rank of the group: :func:`mpicoll.irecv`."""
        return self._started(messages.irecv(_one(tensors, "tensors"), None, self.group, tag), tensors)

    def _start_coalescing(self, device: Any) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any) -> Made:
        made, self._coalesced = self._coalesced or [], None
        return Joint(made, [])

    # The end.

    def split_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> ProcessGroup | None:
        """Make a group of some members of this group; only they call the method (MPI_Comm_create_group).

        Before torch 2.15 the functions of torch.distributed know the group. From then on ``dist.split_group`` calls this method,
        and makes the group known.

        Args:
            ranks: ranks in this group. A rank that is not among them gets None.
        """
        if self.rank() not in ranks:
            return None
        members = [self._global(each) for each in ranks]
        group = new_group(members, timeout, None, None, True, group_desc, None, False)
        name = group_name or f"{NAME}:{group.group_name}"
        made = ProcessGroup(group, owns=True, store=store_of(name, self._store))
        if self.supports_splitting:
            made.setGroupName(name)
            made.setGroupDesc(group_desc or made.group_desc)
        else:
            add_to_world(made, name, group.ranks, NAME)
        return made

    splitGroup = split_group

    def abort(self) -> None:
        """Give the group up: calls of the group raise GroupBrokenError, on all members."""
        if self.group.broken is None:
            call = CallDescription("abort", (), call_site())
            CallWait(self.group, call, self.group.timeout).withdraw(
                DistError("abort() of its process group was called")
            )

    def shutdown(self) -> None:
        """Wait for the calls that are under way, and destroy the group of this library if this object owns it.

        Warn of the errors of these calls: the end of a group must not stop half-way.
        """
        group = self.group
        forget_registered()
        if group.destroyed:
            return
        pending = [
            each for each in waiting.pending if isinstance(each, Request) and each.group is group and not each.done
        ]
        for request in dict.fromkeys([*group.started(), *pending]):
            try:
                works.Work(request).wait()
            except Exception as error:
                warnings.warn(f"destroy_process_group: {error}", RuntimeWarning, stacklevel=3)
        self._dropped.clear()
        if self._owns:
            destroy_process_group(group)
