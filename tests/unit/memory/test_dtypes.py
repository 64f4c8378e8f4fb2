"""ReduceOp, and the table of what it does on which dtype."""

from __future__ import annotations

import itertools
import pickle
import re
from pathlib import Path

import numpy as np
import pytest

from mpicoll.memory.dtypes import FOREIGN, MOVABLE, Element, element, resolve_reduction
from mpicoll.memory.reduce_op import RedOpType, ReduceOp, WholeAverage

OPS = [op for op in RedOpType if op is not RedOpType.PREMUL_SUM]


def refusal(op: object, char: str, name: str = "") -> type[Exception] | None:
    try:
        resolve_reduction("all_reduce", op, np.dtype(char), name)
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
    for char in "bBhHiIqQ":
        x = np.array([0, 1, 5, 100], char)
        resolve_reduction("all_reduce", WholeAverage(), x.dtype).after(x, 3)
        assert (x == [0, 0, 1, 33]).all()
        x = np.array([-7, 7, -1, -6]).astype(char)
        want = np.trunc(x.astype("O") / 3).astype("O") if x.dtype.kind == "i" else x // 3
        resolve_reduction("all_reduce", WholeAverage(), x.dtype).after(x, 3)
        assert (x == want).all()
    x = np.array([127, -128], np.int8)
    resolve_reduction("all_reduce", WholeAverage(), x.dtype).after(x, 1000)
    assert (x == 0).all()
    assert refusal(WholeAverage(), "?") is RuntimeError


def test_what_only_moves_is_not_reduced() -> None:
    """Texts, dates and structured dtypes take no op at all."""
    for text in ("S3", "U1", "V4", "M8[s]", "m8[D]", "i4,f8"):
        found = element(np.dtype(text))
        for op in (*OPS, ReduceOp.PREMUL_SUM(2)):
            with pytest.raises(RuntimeError, match="moved, not reduced"):
                resolve_reduction("all_reduce", op, found.wire, found.name)


def test_halves_take_the_ops_of_floats() -> None:
    """float16 and bfloat16 take what float32 takes, with a factor of float32, and errors that name them."""
    wide = np.dtype("f")
    for name in ("float16", "bfloat16"):
        for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
            assert resolve_reduction("all_reduce", op, wide, name) == resolve_reduction("all_reduce", op, wide)
        for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
            with pytest.raises(RuntimeError, match=f"non-integral dtype {name}"):
                resolve_reduction("all_reduce", op, wide, name)
        factor = resolve_reduction("all_reduce", ReduceOp.PREMUL_SUM(1 / 3), wide, name).factor
        assert (factor.dtype, factor) == (wide, np.float32(1 / 3))


def test_which_dtypes_move() -> None:
    """Everything moves but objects, elements without bytes, and types that other packages have made."""
    for char in MOVABLE:
        assert element(np.dtype(char)) == Element(np.dtype(char)), char
        for order in ("<", ">"):
            dtype = np.dtype(char).newbyteorder(order)
            assert element(dtype) == Element(np.dtype(char), swapped=not dtype.isnative), (order, char)
    for text, wire, name in (
        ("e", "u2", "float16"),
        ("S3", "V3", "|S3"),
        ("U2", "u8", "<U2"),
        ("M8[s]", "i8", "datetime64[s]"),
        ("m8[D]", "i8", "timedelta64[D]"),
        ("V5", "V5", "|V5"),
        ("i4,f8", "V12", "[('f0', '<i4'), ('f1', '<f8')]"),
    ):
        assert element(np.dtype(text)) == Element(np.dtype(wire), name), text
    for text, name in ((">f2", "float16"), (">U2", "<U2"), (">M8[s]", "datetime64[s]")):
        found = element(np.dtype(text))
        assert (found.name, found.swapped) == (name, True), text
    for wrong in ("O", "i4,O", [], "V0", [("a", [("b", "O")])]):
        with pytest.raises(TypeError, match="not supported"):
            element(np.dtype(wrong))  # type: ignore[call-overload]
    texts = getattr(getattr(np, "dtypes", None), "StringDType", None)  # of NumPy 2
    if texts is not None:
        with pytest.raises(TypeError, match="not supported"):
            element(texts())


def test_records_have_the_name_of_their_fields() -> None:
    """A recarray meets an array of its fields; a dtype of other fields, orders or places has another name."""
    fields = [("a", "<i4"), ("b", "<f8")]
    name = element(np.dtype(fields)).name
    assert element(np.dtype((np.record, fields))).name == name
    others = ([("a", "<i4"), ("c", "<f8")], [("a", ">i4"), ("b", "<f8")], [("a", "<i4"), ("b", "<i8")])
    assert all(element(np.dtype(other)).name != name for other in others)
    aligned = np.dtype([("a", "<i4"), ("b", [("c", "<f8"), ("d", "<i2")])], align=True)
    same = np.dtype({"names": ["a", "b"], "formats": ["<i4", aligned["b"]], "offsets": [0, 8], "itemsize": 24})
    assert element(aligned).name == element(same).name
    assert element(aligned).name != element(np.dtype([("a", "<i4"), ("b", [("c", "<f8"), ("d", "<i2")])])).name


def test_gaps_of_structured_dtypes() -> None:
    """Bytes that belong to no field are found, in fields of fields and in arrays of them too."""
    gappy = np.dtype("u1,i4", align=True)
    three = np.zeros(2, "i4,f8,i2")
    for dtype in (gappy, three[["f0", "f2"]].dtype, np.dtype([("a", gappy)]), np.dtype([("a", gappy, (3,))])):
        assert element(dtype).gaps, dtype
    union = np.dtype({"names": ["a", "b"], "formats": ["i4", "u1"], "offsets": [0, 1]})
    for dtype in (three.dtype, np.dtype([("a", "i4,f8", (2, 3)), ("b", "S3")]), union, np.dtype("V7")):
        assert not element(dtype).gaps, dtype


def test_types_of_ml_dtypes_are_known_by_name_and_size() -> None:
    """Each of its dtypes moves under its own name, though its type character may be that of another dtype."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    seen = set()
    for name, size in FOREIGN.items():
        if not hasattr(ml_dtypes, name):
            continue  # of a newer ml_dtypes
        dtype = np.dtype(getattr(ml_dtypes, name))
        found = element(dtype)
        assert (found.name, found.wire.itemsize, found.wire.kind) == (name, size, "u"), dtype
        assert found.name == str(dtype)
        seen.add(name)
        if name != "bfloat16":
            with pytest.raises(RuntimeError, match=f"{name}: its elements are moved, not reduced"):
                resolve_reduction("all_reduce", ReduceOp.SUM, found.wire, found.name)
    assert {"bfloat16", "float8_e4m3fn", "float8_e5m2", "int4"} <= seen
    # One with the character of clongdouble, which takes 32 bytes.
    assert np.dtype(ml_dtypes.float8_e4m3fnuz).char == "G"


def test_the_table_of_ops_in_the_docs() -> None:
    """Each cell of the table of ops in docs/arrays.md names the error that is raised, or none where the op works."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "arrays.md").read_text()
    rows = re.findall(r"^\| ([A-Z_, ]+) \| (.+) \| (.+) \| (.+) \| (.+) \|$", page, re.MULTILINE)
    columns = ([("?", "")], [(char, "") for char in "bBlQ"], [*((char, "") for char in "fdg"), ("f", "float16")])
    named = []
    for names, *cells in rows:
        for name, (cell, dtypes) in itertools.product(
            names.split(", "), zip(cells, (*columns, [(char, "") for char in "FDG"]), strict=True)
        ):
            op = ReduceOp.PREMUL_SUM(1) if name == "PREMUL_SUM" else RedOpType[name]
            for char, half in dtypes:
                error = refusal(op, char, half)
                told = f"`{error.__name__}`" if error is not None else ""
                assert told == (cell if "Error" in cell else ""), (name, char)
        named += names.split(", ")
    assert sorted(named) == sorted(op.name for op in RedOpType)
