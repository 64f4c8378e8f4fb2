"""ReduceOp: the reductions, with the names and numbers of torch.distributed."""

from __future__ import annotations

import enum
import warnings
from typing import Any


class RedOpType(enum.IntEnum):
    """The kind of a reduction (``torch.distributed.ReduceOp.RedOpType``)."""

    SUM = 0
    AVG = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    PREMUL_SUM = 8

    __hash__ = int.__hash__  # faster than the hash of Enum, which is in Python: calls are looked up by their op

    def __call__(self, factor: Any) -> ReduceOp:
        """Return PREMUL_SUM with its factor: ``ReduceOp.PREMUL_SUM(0.5)``."""
        if self is not RedOpType.PREMUL_SUM:
            raise TypeError(f"only ReduceOp.PREMUL_SUM takes a factor, not ReduceOp.{self.name}")
        return ReduceOp(self, factor)

    def __str__(self) -> str:
        return f"ReduceOp.{self.name}"


_Kind = RedOpType  # inside ReduceOp the name RedOpType means the class attribute


class _AnyOp(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _Kind) or type.__instancecheck__(cls, value)


class ReduceOp(metaclass=_AnyOp):
    """A reduction for ``all_reduce``, ``reduce``, ``reduce_scatter`` and similar calls.

    The members SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR and PREMUL_SUM can be passed as they are.
    They are instances of this class, as in torch.
    ``PREMUL_SUM(factor)`` multiplies each rank's input by ``factor`` (a number, or an array of one element) and sums.

    Raises:
        TypeError: ``op`` is not a ReduceOp, or a factor for another op than PREMUL_SUM.

    Source: torch.distributed.ReduceOp; MPI-4.1 section 6.9.
    """

    RedOpType = RedOpType
    SUM = RedOpType.SUM
    AVG = RedOpType.AVG
    PRODUCT = RedOpType.PRODUCT
    MIN = RedOpType.MIN
    MAX = RedOpType.MAX
    BAND = RedOpType.BAND
    BOR = RedOpType.BOR
    BXOR = RedOpType.BXOR
    PREMUL_SUM = RedOpType.PREMUL_SUM

    __slots__ = ("factor", "op")

    op: _Kind
    factor: Any

    def __init__(self, op: _Kind | ReduceOp, factor: Any = None) -> None:
        if not isinstance(op, ReduceOp):
            raise TypeError(f"op must be a ReduceOp such as ReduceOp.SUM, not {type(op).__name__}")
        if not isinstance(op, _Kind):
            factor = op.factor if factor is None else factor
            op = op.op
        self.op = op
        self.factor = factor
        if factor is not None and self.op is not RedOpType.PREMUL_SUM:
            raise TypeError(f"only ReduceOp.PREMUL_SUM takes a factor, not {self.op}")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            return self.op == other
        return self.op == other.op if isinstance(other, ReduceOp) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.op)

    def __repr__(self) -> str:
        return str(self.op) if self.factor is None else f"{self.op}({self.factor!r})"


class WholeAverage(ReduceOp):
    """AVG that averages integers as well, rounded toward zero, as NCCL does: for programs of torch."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(RedOpType.AVG)


def premul_sum(factor: Any) -> ReduceOp:
    """Return PREMUL_SUM with its factor (the private function of torch that programs for NCCL use)."""
    return RedOpType.PREMUL_SUM(factor)


class _Deprecated:
    """The members of :class:`ReduceOp`, by the name of the class in the first versions of torch; each use gives a FutureWarning.

    Source: torch.distributed.reduce_op.
    """

    def __getattr__(self, name: str) -> Any:
        value = getattr(_Kind, name)
        warnings.warn("mpicoll.reduce_op is deprecated, use mpicoll.ReduceOp", FutureWarning, stacklevel=2)
        return value


reduce_op = _Deprecated()
