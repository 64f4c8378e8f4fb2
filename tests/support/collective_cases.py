"""Every collective, called once and compared with NumPy on the inputs of all ranks.

The inputs of a rank follow from its number, so every rank knows the inputs of all ranks. Their values are small
multiples of a quarter: sums and products of five values are exact in every dtype and every order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import mpicoll as dist
from mpicoll import ReduceOp

DTYPES = "?bBhHiIlLqQfdgFDG"
SMALL = (0, 1, 7)
BARELY_LARGE = 16 * 1024  # bytes, transports.base.SMALL_BYTES: larger blocks move by blocking calls

Array = Any


@dataclass(frozen=True)
class Case:
    """One call; a failed assertion shows its repr."""

    dtype: str
    count: int = 3
    op: Any = ReduceOp.SUM
    factor: Any = None
    root: int = 0
    group: Any = None
    async_op: bool = False
    by_group_rank: bool = False
    seed: int = 0

    @property
    def ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def me(self) -> int:
        return dist.get_rank(self.group)

    @property
    def operation(self) -> Any:
        return self.op if self.factor is None else ReduceOp.PREMUL_SUM(self.factor)

    def peer(self, name: str) -> dict[str, int]:
        """Return the argument that names the root, by its rank in the world or in the group."""
        return {f"group_{name}": self.root} if self.by_group_rank else {name: self.ranks[self.root]}

    def block(self, *key: int, count: int | None = None) -> Array:
        """Return the input that belongs to ``key``, whose first number is the rank in the group."""
        return values(self.dtype, self.count if count is None else count, self.seed, *key)

    def empty(self, count: int | tuple[int, ...] | None = None) -> Array:
        """Return an array to receive into, filled with a value that no input holds."""
        shape = self.count if count is None else count
        return np.full(shape, True if self.dtype == "?" else 99, self.dtype)

    def uneven(self, *key: int) -> int:
        """Return a number of elements that differs from key to key; 0 for some keys."""
        which = sum((place + 1) * number for place, number in enumerate(key))
        return (0, 1, self.count, 2 * self.count + 1, 3)[which % 5]

    def same(self, got: Array, expected: Array, what: str = "result", exact: bool = True) -> None:
        """Assert that an array holds the expected values, to the last bit if ``exact``."""
        expected = np.asarray(expected)
        assert got.dtype.char == self.dtype, f"{self}: {what} has become {got.dtype}"
        assert got.size == expected.size, f"{self}: {what} has {got.size} elements, not {expected.size}"
        flat, wanted = got.reshape(-1), expected.reshape(-1)
        good = flat == wanted
        if not exact:
            good |= np.isclose(flat, wanted, rtol=4 * float(np.finfo(self.dtype).eps), atol=0)
        if not good.all():
            at = int(np.flatnonzero(~good)[0])
            wrong = f"{what}[{at}] is {flat[at]}, not {wanted[at]} ({np.count_nonzero(~good)} of {got.size} are wrong)"
            raise AssertionError(f"rank {self.me} of {self.size}, {self}: {wrong}")

    def finish(self, work: Any, outputs: list[Array]) -> None:
        """Assert that the call returned the same as in torch, and wait for its Work."""
        if not self.async_op:
            assert work is None, f"{self}: a call that waits returned {work!r}"
            return
        assert isinstance(work, dist.Work), f"{self}: async_op=True returned {work!r}"
        assert work.wait() is True, f"{self}"
        assert work.is_completed(), f"{self}"
        assert work.is_success(), f"{self}"
        assert [id(x) for x in work.result()] == [id(x) for x in outputs], f"{self}: {work.result()}"


PERIOD = 10_007  # prime: a piece in the wrong place does not look right by chance


def values(dtype: str, count: int, *key: int) -> Array:
    """Return ``count`` small numbers of a dtype that follow from ``key``; long arrays repeat their values."""
    rng = np.random.default_rng([count, *key])
    kind = np.dtype(dtype).kind
    drawn = min(count, PERIOD)
    if kind == "b":
        numbers = rng.integers(0, 2, drawn)
    elif kind in "iu":
        numbers = rng.integers(-2 if kind == "i" else 0, 3, drawn)
    else:
        numbers = rng.integers(-8, 9, drawn) / 4
        if kind == "c":
            numbers = numbers + 1j * rng.integers(-8, 9, drawn) / 4
    return np.resize(numbers.astype(dtype), count)


UFUNCS: dict[Any, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PREMUL_SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}
"""What NumPy reduces with; AVG is divided afterwards, and PREMUL_SUM multiplied before."""


def expected_reduction(case: Case, inputs: Array) -> Array:
    """Return NumPy's reduction over the first axis; on bool its sum is "or" and its product "and", as in torch."""
    stacked = np.stack(inputs)
    if case.op is ReduceOp.AVG:
        return np.mean(stacked, axis=0, dtype=case.dtype)
    if case.op is ReduceOp.PREMUL_SUM:
        stacked = (stacked * np.asarray(case.factor).reshape(())[()]).astype(case.dtype)
    # dtype: NumPy widens small integers in sums and products, MPI does not.
    options = {"dtype": case.dtype} if case.op in (ReduceOp.SUM, ReduceOp.PREMUL_SUM, ReduceOp.PRODUCT) else {}
    return UFUNCS[case.op].reduce(stacked, axis=0, **options)


def operations(dtype: str) -> list[tuple[Any, Any]]:
    """Return every (op, factor) that is valid for a dtype."""
    kind = np.dtype(dtype).kind
    plain = {
        "b": (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR),
        "f": (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX),
        "c": (ReduceOp.SUM, ReduceOp.AVG),
    }
    integers = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
    ops = plain.get(kind, (*integers, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR))
    factors = {"f": (0.5, np.array([2.0])), "c": (0.5j, np.array([2.0], "F"))}.get(kind, (3, np.array([2], np.uint8)))
    scaled = () if kind == "b" else tuple((ReduceOp.PREMUL_SUM, factor) for factor in factors)
    return [(op, None) for op in ops] + list(scaled)


def broadcast(case: Case) -> None:
    inputs = case.block(case.root)
    x = inputs.copy() if case.me == case.root else case.empty()
    case.finish(dist.broadcast(x, group=case.group, async_op=case.async_op, **case.peer("src")), [x])
    case.same(x, inputs)


def all_reduce(case: Case) -> None:
    inputs = [case.block(r) for r in range(case.size)]
    x = inputs[case.me].copy()
    case.finish(dist.all_reduce(x, case.operation, case.group, case.async_op), [x])
    case.same(x, expected_reduction(case, inputs), exact=case.op is not ReduceOp.AVG)


def reduce(case: Case) -> None:
    inputs = [case.block(r) for r in range(case.size)]
    x = inputs[case.me].copy()
    work = dist.reduce(x, op=case.operation, group=case.group, async_op=case.async_op, **case.peer("dst"))
    case.finish(work, [x])
    if case.me == case.root:
        case.same(x, expected_reduction(case, inputs), exact=case.op is not ReduceOp.AVG)
    else:
        case.same(x, inputs[case.me], "what a rank keeps that is not the destination")


def all_gather(case: Case) -> None:
    outputs = [case.empty() for _ in range(case.size)]
    case.finish(dist.all_gather(outputs, case.block(case.me), case.group, case.async_op), outputs)
    for r, output in enumerate(outputs):
        case.same(output, case.block(r), f"tensor_list[{r}]")


def all_gather_uneven(case: Case) -> None:
    outputs = [case.empty(case.uneven(r)) for r in range(case.size)]
    mine = case.block(case.me, count=case.uneven(case.me))
    case.finish(dist.all_gather(outputs, mine, case.group, case.async_op), outputs)
    for r, output in enumerate(outputs):
        case.same(output, case.block(r, count=case.uneven(r)), f"tensor_list[{r}]")


def _all_gather_one(function: Callable[..., Any], case: Case, shape: Any) -> None:
    x, out = case.block(case.me), case.empty(shape)
    case.finish(function(out, x, case.group, case.async_op), [out])
    case.same(out, np.concatenate([case.block(r) for r in range(case.size)]))


def all_gather_single(case: Case) -> None:
    _all_gather_one(dist.all_gather_single, case, (case.size, case.count))


def all_gather_into_tensor(case: Case) -> None:
    _all_gather_one(dist.all_gather_into_tensor, case, case.size * case.count)


def gather(case: Case) -> None:
    outputs = [case.empty() for _ in range(case.size)] if case.me == case.root else None
    x = case.block(case.me)
    work = dist.gather(x, outputs, group=case.group, async_op=case.async_op, **case.peer("dst"))
    case.finish(work, outputs or [])
    for r, output in enumerate(outputs or []):
        case.same(output, case.block(r), f"gather_list[{r}]")
    case.same(x, case.block(case.me), "the input")


def _gather_one(function: Callable[..., Any], case: Case, shape: Any) -> None:
    x, out = case.block(case.me), case.empty(shape) if case.me == case.root else None
    work = function(x, out, group=case.group, async_op=case.async_op, **case.peer("dst"))
    case.finish(work, [] if out is None else [out])
    if out is not None:
        case.same(out, np.concatenate([case.block(r) for r in range(case.size)]))
    case.same(x, case.block(case.me), "the input")


def gather_single(case: Case) -> None:
    _gather_one(dist.gather_single, case, (case.size, case.count))


def gather_into_tensor(case: Case) -> None:
    _gather_one(dist.gather_into_tensor, case, case.size * case.count)


def scatter(case: Case) -> None:
    inputs = [case.block(r) for r in range(case.size)] if case.me == case.root else None
    x = case.empty()
    case.finish(dist.scatter(x, inputs, group=case.group, async_op=case.async_op, **case.peer("src")), [x])
    case.same(x, case.block(case.me))


def _reduce_scattered(case: Case, counts: list[int]) -> None:
    inputs = [[case.block(r, part, count=counts[part]) for part in range(case.size)] for r in range(case.size)]
    out = case.empty(counts[case.me])
    work = dist.reduce_scatter(out, inputs[case.me], case.operation, case.group, case.async_op)
    case.finish(work, [out])
    expected = expected_reduction(case, [inputs[r][case.me] for r in range(case.size)])
    case.same(out, expected, exact=case.op is not ReduceOp.AVG)


def reduce_scatter(case: Case) -> None:
    _reduce_scattered(case, [case.count] * case.size)


def reduce_scatter_uneven(case: Case) -> None:
    _reduce_scattered(case, [case.uneven(part) for part in range(case.size)])


def _reduce_scatter_one(function: Callable[..., Any], case: Case, shape: Any) -> None:
    inputs = [case.block(r, count=case.size * case.count) for r in range(case.size)]
    out = case.empty()
    work = function(out, inputs[case.me].reshape(shape), case.operation, case.group, case.async_op)
    case.finish(work, [out])
    expected = expected_reduction(case, inputs).reshape(case.size, case.count)[case.me]
    case.same(out, expected, exact=case.op is not ReduceOp.AVG)


def reduce_scatter_single(case: Case) -> None:
    _reduce_scatter_one(dist.reduce_scatter_single, case, (case.size, case.count))


def reduce_scatter_tensor(case: Case) -> None:
    _reduce_scatter_one(dist.reduce_scatter_tensor, case, case.size * case.count)


def _all_to_all(case: Case, count: Callable[[int, int], int]) -> None:
    ranks = range(case.size)
    outputs = [case.empty(count(r, case.me)) for r in ranks]
    inputs = [case.block(case.me, r, count=count(case.me, r)) for r in ranks]
    case.finish(dist.all_to_all(outputs, inputs, case.group, case.async_op), outputs)
    for r, output in enumerate(outputs):
        case.same(output, case.block(r, case.me, count=count(r, case.me)), f"output_tensor_list[{r}]")


def all_to_all(case: Case) -> None:
    _all_to_all(case, lambda i, j: case.count)


def all_to_all_uneven(case: Case) -> None:
    _all_to_all(case, case.uneven)


def all_to_all_single(case: Case) -> None:
    rows = [
        case.block(r, count=2 * case.count * case.size).reshape(case.size * case.count, 2) for r in range(case.size)
    ]
    out = case.empty((case.size * case.count, 2))
    case.finish(dist.all_to_all_single(out, rows[case.me], group=case.group, async_op=case.async_op), [out])
    mine = slice(case.me * case.count, (case.me + 1) * case.count)
    case.same(out, np.concatenate([rows[r][mine] for r in range(case.size)]))


def all_to_all_single_splits(case: Case) -> None:
    ranks = range(case.size)
    parts = [[case.block(i, j, count=3 * case.uneven(i, j)).reshape(-1, 3) for j in ranks] for i in ranks]
    sent, received = [case.uneven(case.me, j) for j in ranks], [case.uneven(i, case.me) for i in ranks]
    out = case.empty((sum(received), 3))
    x = np.concatenate(parts[case.me])
    case.finish(dist.all_to_all_single(out, x, received, sent, case.group, case.async_op), [out])
    case.same(out, np.concatenate([parts[i][case.me] for i in ranks]))


def barrier(case: Case) -> None:
    case.finish(dist.barrier(case.group, case.async_op), [])


ROOTED: dict[str, Callable[[Case], None]] = {
    "broadcast": broadcast,
    "gather": gather,
    "gather_single": gather_single,
    "gather_into_tensor": gather_into_tensor,
    "scatter": scatter,
}
ROOTLESS: dict[str, Callable[[Case], None]] = {
    "all_gather": all_gather,
    "all_gather_uneven": all_gather_uneven,
    "all_gather_single": all_gather_single,
    "all_gather_into_tensor": all_gather_into_tensor,
    "all_to_all": all_to_all,
    "all_to_all_uneven": all_to_all_uneven,
    "all_to_all_single": all_to_all_single,
    "all_to_all_single_splits": all_to_all_single_splits,
}
REDUCING: dict[str, Callable[[Case], None]] = {
    "all_reduce": all_reduce,
    "reduce": reduce,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_uneven": reduce_scatter_uneven,
    "reduce_scatter_single": reduce_scatter_single,
    "reduce_scatter_tensor": reduce_scatter_tensor,
}
ALL = {**ROOTED, **ROOTLESS, **REDUCING}


def large(dtype: str) -> int:
    """Return an odd number of elements whose block is just over the limit of the small path."""
    return BARELY_LARGE // np.dtype(dtype).itemsize + 3


def sweep(name: str, dtype: str, counts: tuple[int, ...], group: Any = None) -> Iterator[Case]:
    """Yield cases with every op and count, blocking and asynchronous; roots and keywords alternate."""
    size = dist.get_world_size(group)
    ops = operations(dtype) if name in REDUCING else [(ReduceOp.SUM, None)]
    turn = 0
    for op, factor in ops:
        for count in counts:
            for async_op in (False, True):
                roots = range(size) if name in ROOTED and count == counts[-1] else (turn % size,)
                for root in roots:
                    yield Case(dtype, count, op, factor, root, group, async_op, turn % 2 == 1, turn)
                    turn += 1


def taste(name: str, dtype: str, counts: tuple[int, ...], group: Any = None) -> Iterator[Case]:
    """Yield few cases with every op and every count; over all dtypes every combination occurs."""
    size = dist.get_world_size(group)
    ops = operations(dtype) if name in REDUCING else [(ReduceOp.SUM, None)]
    start = DTYPES.index(dtype)
    for turn in range(max(len(ops), len(counts))):
        op, factor = ops[turn % len(ops)]
        count = counts[(turn + start) % len(counts)]
        by_group_rank = (turn + start // 2) % 2 == 1
        yield Case(dtype, count, op, factor, (turn + start) % size, group, (turn + start) % 2 == 1, by_group_rank, turn)


def run(name: str, cases: Iterator[Case]) -> None:
    """Make every call of ``cases``."""
    check = ALL[name]
    for case in cases:
        try:
            check(case)
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(f"{name}, {case}: {type(error).__name__}: {error}") from error


def every_collective(group: Any, counts: tuple[int, ...] = (5,), dtype: str = "d") -> None:
    """Make every collective for each count, asynchronous and blocking, with changing roots."""
    size = dist.get_world_size(group)
    for turn, name in enumerate(ALL):
        for count in counts:
            case = Case(dtype, count, root=turn % size, group=group, async_op=True, by_group_rank=turn % 2 == 0)
            run(name, iter((case, replace(case, async_op=False))))
    barrier(Case(dtype, group=group))
    barrier(Case(dtype, group=group, async_op=True))
