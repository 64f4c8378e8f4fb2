"""Prepare coalesced reductions and gathers, and the average of gradients: many arrays in few collectives.

The arrays of a bucket are copied into one flat buffer, and each bucket is one movement of the call. So the members agree once
on the number, order, shapes and dtypes of all arrays. A large array is a bucket of its own, and moves without a copy.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from operator import attrgetter
from typing import Any

import numpy as np

from mpicoll.checks.memory_in_use import claims
from mpicoll.checks.memory_ranges import SNAPSHOT_BYTES
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.groups.registry import resolve
from mpicoll.memory.adapt import adapt, adapt_list, apart, viewed
from mpicoll.memory.dtypes import Reduction, dtype_name, is_native, resolve_reduction
from mpicoll.memory.half import wide
from mpicoll.memory.layouts import are_disjoint
from mpicoll.memory.lists import list_words, shortened
from mpicoll.memory.memory import AnyArray, Memory
from mpicoll.memory.protocols import as_numpy
from mpicoll.memory.reduce_op import RedOpType, ReduceOp
from mpicoll.operations import dispatch
from mpicoll.operations.prepare.run import Prepared
from mpicoll.operations.prepared import PreparedOperation
from mpicoll.operations.work import Work
from mpicoll.runtime import signals
from mpicoll.runtime.settings import need_integer
from mpicoll.transports.base import EAGER_BYTES, Kind, Movement

BUCKET_BYTES = 25 * 1024 * 1024
"""Bytes of a bucket (the same as in DistributedDataParallel of torch)."""

LARGE_BYTES = 1024 * 1024
"""Bytes of an array that moves by itself, since the two copies of its elements take longer than one movement more (measured)."""

CACHED_BYTES = 256 * 1024 * 1024
"""Most bytes of all flat buffers that are cached for lists of the same shapes and dtypes."""

FEW = 32
"""Most arrays that are reduced where they stand, without a flat buffer."""

_MOST_PLANS = 16
_plain = attrgetter("flags.carray")


class _Bucket:
    """Arrays of one dtype that are reduced together.

    Attributes:
        dtype: dtype in which the arrays are reduced.
        named: name of the program's dtype, if it is another one.
        places: places of the arrays in the list.
        starts: start of each array in the flat buffer, and then the length of the buffer.
    """

    __slots__ = ("dtype", "named", "places", "starts")

    def __init__(self, dtype: np.dtype[Any], named: str) -> None:
        self.dtype = dtype
        self.named = named
        self.places: list[int] = []
        self.starts = [0]

    def add(self, place: int, elements: int) -> None:
        """Add an array."""
        self.places.append(place)
        self.starts.append(self.starts[-1] + elements)

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.starts[-1] * self.dtype.itemsize

    @property
    def alone(self) -> bool:
        """Whether the bucket is one array that is too large for a copy, and for snapshots that find writes."""
        return len(self.places) == 1 and self.nbytes > SNAPSHOT_BYTES


class _Flat:
    """The flat buffer of a bucket, and its parts in the shapes of the arrays."""

    __slots__ = ("parts", "whole")

    def __init__(self, bucket: _Bucket, shapes: Sequence[tuple[int, ...]]) -> None:
        self.whole = np.empty(bucket.starts[-1], bucket.dtype)
        ends = zip(bucket.places, bucket.starts, bucket.starts[1:], strict=False)
        self.parts = [self.whole[start:end].reshape(shapes[place]) for place, start, end in ends]


class Plan:
    """The buckets of a list of arrays, by the dtypes and shapes of the arrays.

    Args:
        bytes_: bytes of a bucket; a larger array gets a bucket of its own.
        names: names of the program's dtypes, as ``Memory.named``; () if all are "".

    Attributes:
        bytes: bytes of a bucket.
        words: dtypes and shapes as a short text, with a checksum if it is too long.
    """

    def __init__(
        self,
        dtypes: Sequence[np.dtype[Any]],
        shapes: Sequence[tuple[int, ...]],
        bytes_: int,
        names: Sequence[str] = (),
    ) -> None:
        names = names or ("",) * len(dtypes)
        self.shapes = shapes
        self.bytes = bytes_
        self.buckets: list[_Bucket] = []
        self.words = list_words([name or dtype_name(dtype) for dtype, name in zip(dtypes, names, strict=True)], shapes)
        self._free: list[list[_Flat | None]] = []
        filling: dict[tuple[np.dtype[Any], str], _Bucket] = {}
        for place, (dtype, name, shape) in enumerate(zip(dtypes, names, shapes, strict=True)):
            elements = int(np.prod(shape, dtype=np.int64))
            if elements * dtype.itemsize >= LARGE_BYTES:
                self.buckets.append(_Bucket(dtype, name))
                self.buckets[-1].add(place, elements)
                continue
            bucket = filling.get((dtype, name))
            if bucket is None or (bucket.places and bucket.nbytes + elements * dtype.itemsize > bytes_):
                bucket = filling[dtype, name] = _Bucket(dtype, name)
                self.buckets.append(bucket)
            bucket.add(place, elements)
        self.nbytes = sum(bucket.nbytes for bucket in self.buckets if not bucket.alone)

    def take(self) -> list[_Flat | None]:
        """Return a flat buffer for each bucket that needs one, for this caller only until :meth:`give_back`."""
        try:
            return self._free.pop()
        except IndexError:
            return [None if bucket.alone else _Flat(bucket, self.shapes) for bucket in self.buckets]

    def give_back(self, flats: list[_Flat | None]) -> None:
        """Return the buffers, which are cached for the next call."""
        if not self._free and self.nbytes <= CACHED_BYTES:
            self._free.append(flats)


_plans: dict[Any, Plan] = {}
_plans_lock = threading.Lock()


def _plan(dtypes: list[np.dtype[Any]], shapes: list[tuple[int, ...]], bytes_: int, names: tuple[str, ...] = ()) -> Plan:
    key = (bytes_, tuple(dtypes), tuple(shapes), names)
    with _plans_lock:
        found = _plans.pop(key, None)
        if found is None:
            found = Plan(dtypes, shapes, bytes_, names)
        _plans[key] = found  # the plan used last is the last one
        while True:
            if len(_plans) == 1 or (
                len(_plans) <= _MOST_PLANS and sum(plan.nbytes for plan in _plans.values()) <= CACHED_BYTES
            ):
                break
            del _plans[next(iter(_plans))]
        return found


@dataclass(slots=True)
class _List:
    """The arrays of a call, the memories of all arrays if one is not a plain array, and the arrays as the program gave them."""

    arrays: list[Any]
    memories: list[Memory] | None
    outputs: list[Any]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the program's dtypes, if one differs from the dtype that is reduced."""
        names = tuple(memory.named for memory in self.memories or ())
        return names if any(names) else ()

    def into(self, bucket: _Bucket, flat: _Flat) -> None:
        """Copy the arrays of a bucket into its flat buffer."""
        if self.memories is None:
            arrays = self.arrays
            for place, part in zip(bucket.places, flat.parts, strict=True):
                part[...] = arrays[place]
        else:
            for place, part in zip(bucket.places, flat.parts, strict=True):
                part.reshape(-1)[...] = self.memories[place].filled()

    def out_of(self, bucket: _Bucket, flat: _Flat) -> None:
        """Copy the results of a bucket to its arrays."""
        if self.memories is None:
            arrays = self.arrays
            for place, part in zip(bucket.places, flat.parts, strict=True):
                arrays[place][...] = part
        else:
            for place, part in zip(bucket.places, flat.parts, strict=True):
                memory = self.memories[place]
                memory.flat[...] = part.reshape(-1)
                if memory.unpack is not None:
                    memory.unpack()

    def memory(self, place: int) -> Memory:
        """Return the memory of one array."""
        if self.memories is not None:
            return self.memories[place]
        array = self.arrays[place]
        return Memory(array.reshape(-1), array.shape)


def _plain_list(arrays: Any) -> tuple[list[np.dtype[Any]], list[tuple[int, ...]]] | None:
    """Return the dtypes and shapes of a list of NumPy arrays that MPI can move without a copy; None for another object."""
    if type(arrays) is not list or set(map(type, arrays)) != {np.ndarray} or not all(map(_plain, arrays)):
        return None
    dtypes = [array.dtype for array in arrays]
    if not all(map(is_native, set(dtypes))):
        return None
    return dtypes, [array.shape for array in arrays]


def _views(arrays: Any) -> Any:
    """Return a list with NumPy arrays of the memory of host tensors in it; None if a tensor of torch has no such array."""
    if type(arrays) is not list or not any(type(each).__module__ == "torch" for each in arrays):
        return arrays
    try:
        return [as_numpy(each, "", writable=True) if type(each).__module__ == "torch" else each for each in arrays]
    except Exception:  # raised where all members raise
        return None


def _adapted(arrays: Any, name: str, one_dtype: bool) -> tuple[_List, list[np.dtype[Any]], list[tuple[int, ...]]]:
    """Adapt the arrays of a list, which the call writes; return also their dtypes and shapes."""
    if type(arrays) is list:
        arrays = [*arrays]  # the program may change its list until the call is over
    views = _views(arrays)
    plain = _plain_list(views)
    if plain is not None and (len(set(plain[0])) == 1 or not one_dtype):
        apart(views, name)
        return _List(views, None, arrays), *plain
    if one_dtype or not isinstance(arrays, list):
        memories = adapt_list(arrays, name, writable=True)
    else:
        memories = [adapt(array, f"{name}[{i}]", writable=True) for i, array in enumerate(arrays)]
        apart([memory.own for memory in memories], name)
    memories = [wide(memory) for memory in memories]
    return (
        _List(list(arrays), memories, list(arrays)),
        [memory.dtype for memory in memories],
        [memory.shape for memory in memories],
    )


_PAIRS = ({"float32", "complex64"}, {"float64", "complex128"})


def _complex_among_real(arrays: Any) -> bool:
    """Return whether a list holds complex arrays and arrays of their parts' dtype only: torch accepts both in one call."""
    if not isinstance(arrays, list):
        return False
    return {str(getattr(array, "dtype", "")).removeprefix("torch.") for array in arrays} in _PAIRS


def _learn(
    g: ProcessGroup, function: str, given: _List, plan: Plan, reductions: list[Reduction], key: tuple[Any, ...]
) -> None:
    """Prepare a call with one bucket, so that the next such call costs less.

    Few arrays on one node that move in one step are reduced where they stand. Other arrays go through the flat buffer.
    """
    plain = len(plan.buckets) == 1 and not plan.buckets[0].alone and given.memories is None
    if not plain or reductions[0].factor is not None or reductions[0].rounds:
        return
    (reduction,), (bucket,), flats = reductions, plan.buckets, plan.take()
    assert flats[0] is not None
    few = len(given.arrays) <= FEW and g.pair.agreement.channel.carries_data
    moves: Any = given.arrays if few and _in_one_step(g, bucket.nbytes) else flats[0].whole
    again = PreparedOperation(
        function, key, Kind.ALL_REDUCE, bucket.nbytes, mpi_op=reduction.mpi_op, average=reduction.average
    )
    signature = _signature(function, reduction.op, plan.bytes, [bucket.dtype] * len(given.arrays), plan.shapes)
    dispatch.cache(g, signature, again, bucket.dtype, moves, moves)
    plan.give_back(flats)


def _in_one_step(g: ProcessGroup, nbytes: int) -> bool:
    node = g.pair.through(Kind.ALL_REDUCE, nbytes)
    return nbytes <= EAGER_BYTES or (node is not None and node.in_one_step(Kind.ALL_REDUCE, nbytes) is not None)


def _signature(function: str, op: Any, bytes_: int, dtypes: Iterable[Any], shapes: Iterable[Any]) -> tuple[Any, ...]:
    return function, op, bytes_, *dtypes, *shapes


def made_again(
    function: str,
    group: Any,
    op: Any,
    arrays: Any,
    bytes_: Any,
    async_op: bool,
    timeout: timedelta | None,
    name: str | None,
) -> Work | bool:
    """Make a prepared call: return True, or its Work; return False, and do nothing, if the call is not prepared."""
    if type(op) is not RedOpType or type(bytes_) is not int or type(arrays) is not list:
        return False
    outputs, arrays = [*arrays], _views([*arrays])  # the program may change its list until the call is over
    plain, g = _plain_list(arrays), resolve(group)
    if plain is None or g is None:
        return False
    key = _signature(function, op, bytes_, *plain)
    found = g.prepared.get(key)
    if found is None:
        return False
    if found.lists:
        return dispatch.again(g, key, arrays, arrays, 3, timeout, name, async_op, outputs)
    if (claims.active and not async_op) or not are_disjoint(arrays):
        return False
    plan = _plan(*plain, bytes_)
    given, flats = _List(arrays, None, outputs), plan.take()
    bucket, flat = plan.buckets[0], flats[0]
    assert flat is not None

    def spread() -> None:
        given.out_of(bucket, flat)
        plan.give_back(flats)

    with signals.guard:  # to the end: a Ctrl-C noted in a complete call must not prevent the copy of its results
        given.into(bucket, flat)
        made = dispatch.again(
            g, key, flat.whole, flat.whole, 3, timeout, name, async_op, outputs, spread, (arrays, arrays)
        )
        if made is True:
            spread()
        elif not made:
            plan.give_back(flats)
    return made


def _reduced(g: ProcessGroup, given: _List, plan: Plan, reductions: list[Reduction], key: tuple[Any, ...]) -> Prepared:
    """Return the call that reduces the buckets of a plan, one movement each."""
    flats = plan.take()
    moves, steps = [], []
    for bucket, flat, reduction in zip(plan.buckets, flats, reductions, strict=True):
        memory = given.memory(bucket.places[0]) if flat is None else None
        whole = memory.flat if memory is not None else flat.whole  # type: ignore[union-attr]
        moves.append(Movement(Kind.ALL_REDUCE, recv=whole, op=reduction.mpi_op))
        steps.append((bucket, flat, memory, whole, reduction))

    def before() -> None:
        for bucket, flat, memory, whole, reduction in steps:
            if flat is not None:
                given.into(bucket, flat)
            elif memory is not None:
                memory.filled()
            if reduction.factor is not None:
                whole[...] = reduction.before(whole)

    def after() -> None:
        for bucket, flat, memory, whole, reduction in steps:
            reduction.after(whole, g.size())
            if flat is not None:
                given.out_of(bucket, flat)
            elif memory is not None and memory.unpack is not None:
                memory.unpack()
        plan.give_back(flats)

    move = replace(moves[0], more=tuple(moves[1:])) if moves else Movement(Kind.BARRIER)
    awaits = tuple(given.memories or ())
    return Prepared(key, move, list(given.outputs), awaits=awaits, before=before, after=after)


def all_reduce_coalesced(g: ProcessGroup, tensors: list[AnyArray] | AnyArray, op: RedOpType | ReduceOp) -> Prepared:
    """Prepare an ``all_reduce_coalesced``."""
    one = not isinstance(tensors, list) and viewed(tensors) is not None
    given, dtypes, shapes = _adapted([tensors] if one else tensors, "tensors", not _complex_among_real(tensors))
    if not dtypes:
        raise ValueError("all_reduce_coalesced: parameter `tensors` must hold one array at least")
    plan = _plan(dtypes, shapes, BUCKET_BYTES, given.names)
    named = plan.buckets[0].named
    # The name in messages is all_reduce, as in torch.
    reductions = [resolve_reduction("all_reduce", op, bucket.dtype, bucket.named) for bucket in plan.buckets]
    key = (str(reductions[0].op), named or dtype_name(dtypes[0]), ("arrays", len(dtypes)), ("layout", plan.words))
    _learn(g, "all_reduce_coalesced", given, plan, reductions, key)
    return _reduced(g, given, plan, reductions, key)


def average_gradients(g: ProcessGroup, arrays: Any, bucket_bytes: int) -> Prepared:
    """Prepare an average of gradients."""
    need_integer(bucket_bytes, "bucket_bytes")
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
    listed, without = _gradients(arrays)
    given, dtypes, shapes = _adapted(listed, "arrays", False)
    plan = _plan(dtypes, shapes, int(bucket_bytes), given.names)
    reductions = [
        resolve_reduction("average_gradients", ReduceOp.AVG, bucket.dtype, bucket.named) for bucket in plan.buckets
    ]
    key: tuple[Any, ...] = (("arrays", len(dtypes)), ("layout", plan.words), ("bucket_bytes", int(bucket_bytes)))
    if without:
        key = (*key, ("without gradient", without))
    else:
        _learn(g, "average_gradients", given, plan, reductions, key)
    return _reduced(g, given, plan, reductions, key)


def _gradients(arrays: Any) -> tuple[Any, str]:
    """Return the list of arrays, and the places of parameters without a gradient as a text."""
    parameters: Callable[[], Iterable[Any]] | None = getattr(arrays, "parameters", None)
    if not callable(parameters):
        torch = sys.modules.get("torch")
        leaves = isinstance(arrays, list) and any(
            getattr(each, "requires_grad", False) and getattr(each, "is_leaf", False) for each in arrays
        )
        if isinstance(arrays, Iterator) or (leaves and torch is not None and torch.is_grad_enabled()):
            what = "a list of tensors that require grad" if leaves else f"a {type(arrays).__name__}, not a list"
            raise TypeError(
                f"average_gradients: parameter `arrays` is {what}. For the gradients of a module pass the module itself, or "
                "[p.grad for p in module.parameters()]"
            )
        return arrays, ""
    gradients = [parameter.grad for parameter in parameters()]
    without = ", ".join(str(place) for place, gradient in enumerate(gradients) if gradient is None)
    return [gradient for gradient in gradients if gradient is not None], shortened(without)
