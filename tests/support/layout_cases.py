"""Arrays of every layout and dtype in one call of every collective, compared with NumPy on the inputs of all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

import mpicoll as dist
from mpicoll import ReduceOp

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

Array = Any

RECORDS = np.dtype([("a", "<i4"), ("b", ">f8"), ("c", "S3", (2,))])
GAPPY = np.dtype([("a", "u1"), ("b", "i4")], align=True)
HALVES = ["e", "bfloat16"]
MOVING = ["d", "?", "g", "G", "F", "i", "e", "bfloat16", "float8_e4m3fnuz", "complex32", "U2", "S3", "M8[s]"]
MOVING += [RECORDS, GAPPY]
REDUCING = ["e", "bfloat16", "d", "f", "i", "F"]

SMALL, LARGE = (3, 4), (81, 120)  # with float64, and with halves as float32, the second count moves by blocking calls


def dtype_of(name: Any) -> np.dtype[Any] | None:
    """Return a dtype by name, or None if its package is not installed or too old."""
    if isinstance(name, str) and name[0] in "bfc" and len(name) > 6:
        found = getattr(ml_dtypes, name, None)
        return None if found is None else np.dtype(found)
    return np.dtype(name)


def dtypes(names: list[Any]) -> list[np.dtype[Any]]:
    return [dtype for dtype in map(dtype_of, names) if dtype is not None]


@lru_cache(maxsize=200)
def block(dtype: np.dtype[Any], shape: tuple[int, ...], *key: int) -> Array:
    """Return the contiguous array of ``key``: small multiples of a quarter, exact in every dtype and order."""
    if dtype.names is not None:
        whole = np.zeros(shape, dtype)
        for number, name in enumerate(dtype.names):
            part = whole[name]
            part[...] = block(part.dtype, part.shape, number, *key)
        return whole
    rng = np.random.default_rng([*shape, *key])
    numbers = rng.integers(-8, 9, shape) / 4
    if dtype.kind in "US":
        return np.array(["", "a", "bc"])[rng.integers(0, 3, shape)].astype(dtype)
    if dtype.kind in "iuMm":
        # Unsigned numbers do not go below zero: Open MPI 5.0 adds 8 and 16 bits with saturation, but NumPy wraps around.
        numbers = rng.integers(0 if dtype.kind == "u" else -2, 3, shape)
    if dtype.kind == "b":
        numbers = rng.integers(0, 2, shape)
    if dtype.kind == "c":
        numbers = numbers + 1j * rng.integers(-8, 9, shape) / 4
    if dtype.name in ("complex32", "bcomplex32"):
        return numbers.astype(np.complex64).astype(dtype)
    return numbers.astype(dtype)


LAYOUTS: dict[str, tuple[Callable[[tuple[int, ...]], tuple[int, ...]], Callable[[Array], Array]]] = {
    "C": (lambda s: s, lambda b: b),
    "transposed": (lambda s: s[::-1], lambda b: b.T),
    "every second column": (lambda s: (s[0], 2 * s[1] + 1), lambda b: b[:, 1::2]),
    "backwards": (lambda s: s, lambda b: b[::-1, ::-1]),
    "some rows of a cube": (lambda s: (2, 3 * s[0], s[1]), lambda b: b[1, 2::3]),
    "not aligned": (lambda s: s, lambda b: b),
}
"""By name: the shape of the array behind a view of two dimensions, and what makes the view of it."""

WAYS = [(layout, swapped) for layout in LAYOUTS for swapped in (False, True)]


@dataclass
class Given:
    """An array in some layout, and the memory around it."""

    view: Array
    base: Array
    before: Array
    around: Array

    def intact(self) -> bool:
        """Return whether only the view has been written."""
        return fields_of(self.base[self.around]) == fields_of(self.before[self.around])


def lay(values: Array, way: tuple[str, bool]) -> Given:
    """Return an array that holds ``values`` in another layout, and perhaps in the other byte order."""
    outer, view_of = LAYOUTS[way[0]]
    shape = values.shape if values.ndim == 2 else (1, values.size)
    dtype = values.dtype.newbyteorder(">") if way[1] and values.dtype.kind in "biufcMmU" else values.dtype
    base, mask = np.zeros(outer(shape), dtype), np.ones(outer(shape), bool)
    if way[0] == "not aligned":
        base = np.zeros(base.nbytes + 1, np.uint8)[1:].view(dtype).reshape(shape)
    view = view_of(base)
    view[...] = values.reshape(shape)
    view_of(mask)[...] = False
    return Given(view, base, base.copy(), mask)


class Call:
    """The arrays of one call: made in the given layouts one after the other, and checked after the call."""

    def __init__(
        self, dtype: np.dtype[Any], shape: tuple[int, int], inputs: Any, outputs: Any, api: Any = None, **more: Any
    ) -> None:
        self.dtype, self.shape, self.more = dtype, shape, more
        self.inputs, self.outputs = itertools.cycle(inputs), itertools.cycle(outputs)
        self.given: list[tuple[Given, Array]] = []
        self.group = more.get("group")
        self.me, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.dist = dist if api is None else api

    def world(self, rank: int) -> int:
        """Return a rank of the group as a rank of the world."""
        return dist.get_process_group_ranks(self.group)[rank]

    def block(self, *key: int) -> Array:
        return block(self.dtype, self.shape, *key)

    def rows(self, *key: int) -> Array:
        """Return the blocks for all ranks as rows."""
        return np.concatenate([self.block(*key, r) for r in range(self.size)]).astype(self.dtype)

    def take(self, values: Array) -> Array:
        """Return an input that holds ``values``."""
        given = lay(values, next(self.inputs))
        self.given.append((given, values))
        return given.view

    def room(self, expected: Array, start: Array | None = None) -> Array:
        """Return an output that will hold ``expected``, and now holds ``start`` or other values."""
        other = np.zeros(expected.shape, self.dtype) if start is None else start
        given = lay(other, next(self.outputs))
        self.given.append((given, expected))
        return given.view

    def finish(self, work: Any, what: str) -> None:
        if work is not None:
            assert work.wait() is True
        for number, (given, values) in enumerate(self.given):
            got = given.view
            if got.dtype != values.dtype:
                got = got.astype(values.dtype)
            values = values.reshape(got.shape)
            # Products of complex numbers have zeros of either sign: NumPy chooses different instructions.
            wrong = fields_of(got) != fields_of(values) and not (got.dtype.kind in "fc" and np.array_equal(got, values))
            where = f"{what}, rank {self.me} of {self.size}, {values.dtype} {values.shape}, array {number}"
            assert not wrong, f"{where}, strides {given.view.strides}:\n{got}\nnot\n{values}"
            assert given.intact(), f"{where}: memory around it was written"


def fields_of(array: Array) -> list[bytes]:
    """Return the bytes of an array, without the bytes of its gaps."""
    if array.dtype.type in (np.longdouble, np.clongdouble):
        return [array.astype(complex).tobytes()]  # some of their bytes have no meaning
    if array.dtype.names is None:
        return [np.ascontiguousarray(array).tobytes()]
    return [piece for name in array.dtype.names for piece in fields_of(array[name])]


def reduced(call: Call, op: Any, inputs: list[Array]) -> Array:
    """Return the reduction of small numbers, which is exact before the one rounding."""
    functions = {ReduceOp.PRODUCT: np.multiply, ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum}
    wide = np.float32 if call.dtype.name in ("float16", "bfloat16") else call.dtype
    stacked = np.stack([each.astype(wide) for each in inputs])
    if type(op) is ReduceOp:
        stacked = stacked * np.asarray(op.factor).astype(wide)
    function = np.add if type(op) is ReduceOp else functions.get(op, np.add)
    result = function.reduce(stacked, axis=0, dtype=wide)
    if op is ReduceOp.AVG:
        result = np.divide(result, call.size, dtype=wide)
    return result.astype(call.dtype)


def broadcast(c: Call, op: Any, root: int) -> Any:
    values = c.block(root)
    return c.dist.broadcast(c.take(values) if c.me == root else c.room(values), c.world(root), **c.more)


def all_gather(c: Call, op: Any, root: int) -> Any:
    outputs = [c.room(c.block(r)) for r in range(c.size)]
    return c.dist.all_gather(outputs, c.take(c.block(c.me)), **c.more)


def all_gather_into_tensor(c: Call, op: Any, root: int) -> Any:
    return c.dist.all_gather_into_tensor(c.room(c.rows()), c.take(c.block(c.me)), **c.more)


def gather(c: Call, op: Any, root: int) -> Any:
    outputs = [c.room(c.block(r)) for r in range(c.size)] if c.me == root else None
    return c.dist.gather(c.take(c.block(c.me)), outputs, c.world(root), **c.more)


def scatter(c: Call, op: Any, root: int) -> Any:
    inputs = [c.take(c.block(r)) for r in range(c.size)] if c.me == root else None
    return c.dist.scatter(c.room(c.block(c.me)), inputs, c.world(root), **c.more)


def all_to_all(c: Call, op: Any, root: int) -> Any:
    outputs = [c.room(c.block(r, c.me)) for r in range(c.size)]
    return c.dist.all_to_all(outputs, [c.take(c.block(c.me, r)) for r in range(c.size)], **c.more)


def all_to_all_single(c: Call, op: Any, root: int) -> Any:
    expected = np.concatenate([c.block(r, c.me) for r in range(c.size)]).astype(c.dtype)
    splits = [c.shape[0]] * c.size if root % 2 else None
    return c.dist.all_to_all_single(c.room(expected), c.take(c.rows(c.me)), splits, splits, **c.more)


def ring(c: Call, op: Any, root: int) -> Any:
    """Send to the next rank, receive from the rank before."""
    place, group = (c.me - 1) % c.size, c.group
    to, source = c.world((c.me + 1) % c.size), c.world(place)
    room, x = c.room(c.block(place)), c.take(c.block(c.me))
    if c.more.get("async_op") or c.size == 1:
        works = [dist.irecv(room, source, group), c.dist.isend(x, to, group)]
        for work in works:
            assert work is not None
            assert work.wait() is True
    elif c.me % 2 or (c.size % 2 and c.me == c.size - 1):
        c.dist.recv(room, source, group)
        c.dist.send(x, to, group)
    else:
        c.dist.send(x, to, group)
        c.dist.recv(room, source, group)
    return None


MOVEMENTS = (broadcast, all_gather, all_gather_into_tensor, gather, scatter, all_to_all, all_to_all_single, ring)


def all_reduce(c: Call, op: Any, root: int) -> Any:
    inputs = [c.block(r) for r in range(c.size)]
    return c.dist.all_reduce(c.room(reduced(c, op, inputs), inputs[c.me]), op, **c.more)


def reduce(c: Call, op: Any, root: int) -> Any:
    inputs = [c.block(r) for r in range(c.size)]
    x = c.room(reduced(c, op, inputs) if c.me == root else inputs[c.me], inputs[c.me])
    return c.dist.reduce(x, c.world(root), op, **c.more)


def reduce_scatter(c: Call, op: Any, root: int) -> Any:
    out = c.room(reduced(c, op, [c.block(r, c.me) for r in range(c.size)]))
    return c.dist.reduce_scatter(out, [c.take(c.block(c.me, r)) for r in range(c.size)], op, **c.more)


def reduce_scatter_single(c: Call, op: Any, root: int) -> Any:
    out = c.room(reduced(c, op, [c.block(r, c.me) for r in range(c.size)]))
    return c.dist.reduce_scatter_single(out, c.take(c.rows(c.me)), op, **c.more)


REDUCTIONS = (all_reduce, reduce, reduce_scatter, reduce_scatter_single)


def operations(dtype: np.dtype[Any]) -> list[Any]:
    if dtype.kind == "c":
        return [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM(0.5j)]
    plain = [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]
    if dtype.kind in "iu":
        return [*plain, ReduceOp.PREMUL_SUM(3)]
    return [*plain, ReduceOp.AVG, ReduceOp.PREMUL_SUM(0.75)]


def make(
    function: Any,
    dtype: Any,
    shape: tuple[int, int],
    inputs: Any,
    outputs: Any,
    op: Any,
    turn: int,
    ways: Any = (False, True),
) -> None:
    """Make one call, usually both blocking and asynchronous."""
    for async_op in ways:
        call = Call(dtype, shape, inputs, outputs, async_op=async_op)
        what = f"{function.__name__}, {op}, async_op={async_op}, from {inputs} into {outputs}"
        call.finish(function(call, op, turn % call.size), what)


def pairs() -> Iterator[tuple[int, tuple[str, bool], tuple[str, bool]]]:
    """Yield every layout and byte order of inputs, each with some layouts of outputs, numbered."""
    for turn, way in enumerate(WAYS):
        yield turn, way, WAYS[(3 * turn + 1) % len(WAYS)]
