"""ReduceOp, and the table of what it does on which dtype."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from mpicoll.buffers.dtypes import MOVABLE, movable, resolve_reduction
from mpicoll.buffers.reduce_op import RedOpType, ReduceOp

OPS = [op for op in RedOpType if op is not RedOpType.PREMUL_SUM]


def refusal(op: object, char: str) -> type[Exception] | None:
    try:
        resolve_reduction("all_reduce", op, np.dtype(char))
    except Exception as error:
        return type(error)
    return None


def test_numbers_and_names_are_those_of_torch() -> None:
    """ReduceOp has torch's members with torch's numbers."""
    names = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"]
    assert [(op.name, int(op)) for op in RedOpType] == [(name, i) for i, name in enumerate(names)]
    for name in names:
        assert getattr(ReduceOp, name) is RedOpType[name]
        assert str(getattr(ReduceOp, name)) == f"ReduceOp.{name}"


def test_reduce_ops_compare_by_their_op() -> None:
    """A ReduceOp equals its member and every ReduceOp of the same op, and hashes alike."""
    assert ReduceOp(ReduceOp.SUM) == ReduceOp.SUM
    member: object = ReduceOp.SUM
    assert member == ReduceOp(ReduceOp.SUM)
    assert ReduceOp(ReduceOp.SUM) != ReduceOp.MAX
    assert ReduceOp.PREMUL_SUM(2.0) == ReduceOp.PREMUL_SUM(3.0)
    assert ReduceOp.PREMUL_SUM(2.0) == ReduceOp.PREMUL_SUM
    assert hash(ReduceOp(ReduceOp.SUM)) == hash(ReduceOp.SUM)
    assert {ReduceOp.SUM: 1}[ReduceOp(ReduceOp.SUM)] == 1
    assert ReduceOp(ReduceOp.SUM) != "SUM"


def test_premul_sum_is_made_with_its_factor() -> None:
    """PREMUL_SUM alone takes a factor, which a copy and a pickle keep."""
    op = ReduceOp.PREMUL_SUM(0.5)
    assert (op.op, op.factor) == (RedOpType.PREMUL_SUM, 0.5)
    assert ReduceOp(op).factor == 0.5
    assert "0.5" in repr(op)
    assert pickle.loads(pickle.dumps(op)).factor == 0.5
    for wrong in (lambda: ReduceOp.SUM(2.0), lambda: ReduceOp(ReduceOp.MAX, 2.0)):
        with pytest.raises(TypeError, match=r"only ReduceOp\.PREMUL_SUM takes a factor"):
            wrong()


def test_every_dtype_has_the_ops_that_make_sense() -> None:
    """bool takes all but AVG; integers all but AVG; floats no bit operations; complex SUM and AVG alone."""
    for char in MOVABLE:
        kind = np.dtype(char).kind
        for op in OPS:
            bitwise = op in (RedOpType.BAND, RedOpType.BOR, RedOpType.BXOR)
            expected: type[Exception] | None = None
            if kind == "c":
                expected = None if op in (RedOpType.SUM, RedOpType.AVG) else ValueError
            elif kind == "f":
                expected = RuntimeError if bitwise else None
            elif op is RedOpType.AVG:
                expected = RuntimeError
            assert refusal(op, char) is expected, f"{op} on {np.dtype(char)}"
            assert refusal(ReduceOp(op), char) is expected, f"ReduceOp({op}) on {np.dtype(char)}"
        assert refusal(ReduceOp.PREMUL_SUM(1), char) is (RuntimeError if kind == "b" else None), np.dtype(char)


def test_bool_is_reduced_by_logical_operations() -> None:
    """MPI refuses SUM on bool: or, and, exclusive or stand in."""
    names = {op: resolve_reduction("all_reduce", op, np.dtype(bool)).mpi_op for op in OPS if op is not RedOpType.AVG}
    assert {names[op] for op in (RedOpType.SUM, RedOpType.MAX, RedOpType.BOR)} == {"LOR"}
    assert {names[op] for op in (RedOpType.PRODUCT, RedOpType.MIN, RedOpType.BAND)} == {"LAND"}
    assert names[RedOpType.BXOR] == "LXOR"


def test_ops_that_are_none() -> None:
    """Strings, numbers and functions are not ops."""
    for wrong in ("SUM", 0, None, np.add, max):
        assert refusal(wrong, "d") is TypeError


def test_factors_have_to_fit_the_dtype() -> None:
    """A factor is a number or an array of one element that the dtype can hold."""
    for char, good in {
        "f": (2, 0.5, np.float64(0.5), np.array([[3]]), True),
        "d": (1, np.float32(2), np.longdouble(2)),
        "D": (1j, 2, 0.5, np.array([1j], "F")),
        "i": (2, -3, np.int64(5), np.uint8(200), np.array([7])),
        "B": (0, 255, np.int64(17)),
        "b": (-128, 127),
        "Q": (2**64 - 1,),
    }.items():
        for factor in good:
            assert refusal(ReduceOp.PREMUL_SUM(factor), char) is None, f"{factor!r} on {char}"
    for char, bad in {
        "d": ("2", np.ones(2), [1, 2], 1j, np.ones(0), object()),
        "i": (0.5, 2**31, np.float32(2)),
        "B": (-1, 256, 1.5),
        "b": (128, -129),
    }.items():
        for factor in bad:
            assert refusal(ReduceOp.PREMUL_SUM(factor), char) is ValueError, f"{factor!r} on {char}"
    assert refusal(ReduceOp.PREMUL_SUM, "d") is ValueError


def test_before_and_after_do_what_the_op_says() -> None:
    """PREMUL_SUM scales into a new array of the same dtype, AVG divides in place, others do nothing."""
    for char in "fdgFDGbBiQ":
        x = np.array([1, 2, 3], char)
        scaled = resolve_reduction("all_reduce", ReduceOp.PREMUL_SUM(2), x.dtype).before(x)
        assert scaled.dtype == x.dtype
        assert (scaled == [2, 4, 6]).all()
        assert (x == [1, 2, 3]).all()
        assert resolve_reduction("all_reduce", ReduceOp.SUM, x.dtype).before(x) is x
    for char in "fdgFDG":
        x = np.array([1, 2, 3], char)
        resolve_reduction("all_reduce", ReduceOp.AVG, x.dtype).after(x, 2)
        assert (x == [0.5, 1, 1.5]).all()


def test_which_dtypes_move() -> None:
    """bool, integers, floats from 32 bits and complex numbers in this machine's byte order move; others say why not."""
    for char in MOVABLE:
        assert movable(np.dtype(char)) is None
    for wrong in ("e", "O", "S3", "U1", "M8[s]", "m8[s]", "V4", "i4,f8"):
        assert "not supported" in str(movable(np.dtype(wrong))), wrong
    for wrong in (">f8", ">i2", ">c16"):
        assert "byte order" in str(movable(np.dtype(wrong))), wrong
