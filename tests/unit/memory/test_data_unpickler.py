"""Objects that load_data loads, and pickles that it refuses."""

from __future__ import annotations

import collections
import datetime
import functools
import os
import pickle
import types
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpicoll.memory.data_unpickler import load_data
from mpicoll.memory.pickled import Packed, stream_of

DATA = [
    *(None, True, 3, 2**80, 0.5, 1j, "text", b"bytes", bytearray(b"bytes"), ()),
    {"a": [1, (2, {3}), frozenset({4})], "range": range(3), "slice": slice(1, 2)},
    collections.OrderedDict(a=1),
    collections.Counter("aab"),
    np.float32(2.5),
    np.datetime64("2026-01-02"),
    np.dtype("i4,f8"),
]
ARRAYS = [
    np.arange(5),
    np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    np.arange(40_000.0),
    np.zeros(3, "i4,S5"),
    np.array([1, "text", None], object),
    np.zeros(0, "e"),
]


def loaded(value: Any) -> Any:
    packed = Packed(*stream_of(value))
    return load_data(packed.memory.data, packed.parts)


@pytest.mark.parametrize("value", DATA, ids=repr)
def test_data(value: Any) -> None:
    """Numbers, strings, bytes, containers and NumPy's scalars and dtypes come back as they are."""
    found = loaded(value)
    assert type(found) is type(value)
    assert found == value


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: str(array.dtype))
def test_arrays(array: Any) -> None:
    """So do arrays, also in a container, and those whose buffers are outside of the stream."""
    found = loaded({"array": array})["array"]
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert not array.size or found.strides == array.strides
    assert (found == array).all()


class Own:
    """A class that pickle.loads lets a stream rename."""


class Calls:
    """Its pickle calls a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.how = function, arguments

    def __reduce__(self) -> Any:
        return self.how


REFUSED = {
    "Fraction": Fraction(1, 3),
    "datetime": datetime.date(2026, 1, 2),
    "a function": os.getcwd,
    "a call of eval": Calls(eval, "1 + 1"),
    "a call of getattr": Calls(getattr, "text", "upper"),
    "a call of a partial": functools.partial(print, 1),
    "a class": Calls,
    "a type of builtins": Calls(type, "name", (), {}),
    "an array of objects that call": np.array([Calls(os.getcwd)], object),
    "a namespace": types.SimpleNamespace(a=1),
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_objects_are_refused(what: str) -> None:
    """The error names the function or class; nothing is called."""
    with pytest.raises(
        pickle.UnpicklingError, match=r"weights_only=True: the object needs \w+[.\w]*, which is not loaded"
    ):
        loaded(REFUSED[what])


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("numpy", "load"),
        ("numpy", "f2py.os.system"),
        ("ml_dtypes", "finfo"),
        ("ml_dtypes", "bfloat16.__reduce__"),
        ("torch", "load"),
        ("builtins", "range.count"),
        ("__main__", "x"),
    ],
)
def test_other_names_of_the_same_modules_are_refused(module: str, name: str) -> None:
    """Also names with dots, and functions of NumPy and torch."""
    words = b"".join(pickle.SHORT_BINUNICODE + bytes([len(word)]) + word.encode() for word in (module, name))
    stream = pickle.PROTO + b"\x04" + words + pickle.STACK_GLOBAL + pickle.STOP
    with pytest.raises(pickle.UnpicklingError, match=f"needs {module}.{name}, which is not loaded"):
        load_data(memoryview(stream), ())


def test_dtypes_of_ml_dtypes() -> None:
    """Arrays and dtypes of ml_dtypes are data."""
    array = np.arange(4, dtype=ml_dtypes.bfloat16)
    assert (loaded(array) == array).all()
    assert loaded(array.dtype) == array.dtype


@pytest.mark.parametrize("of", [collections.Counter, collections.OrderedDict, set, np.dtype])
def test_a_pickle_cannot_change_a_class_that_it_may_call(of: type) -> None:
    """The opcode BUILD sets attributes; pickle.loads lets the same stream rename a class of Python."""
    before = of.__name__
    stream = f"c{of.__module__}\n{before}\n".encode() + b"(N}\x8c\x08__name__\x8c\x07renamedstb."
    with pytest.raises(pickle.UnpicklingError, match=r"the pickle has the state of [\w.]+"):
        load_data(memoryview(stream), ())
    assert of.__name__ == before
    assert pickle.loads(f"c{__name__}\nOwn\n".encode() + stream.split(b"\n", 2)[2]).__name__ == "renamed"


def test_classes_are_data() -> None:
    """A class that may be called is the class itself."""
    assert loaded([collections.Counter, ml_dtypes.bfloat16]) == [collections.Counter, ml_dtypes.bfloat16]


def text(word: str) -> bytes:
    return b"\x8c" + bytes([len(word)]) + word.encode()


RECONSTRUCT, SCALAR = np.zeros(1).__reduce__()[0], np.float64(1).__reduce__()[0]


def named(function: Any) -> bytes:
    return f"c{function.__module__}\n{function.__name__}\n".encode()


def dtype(made_of: str, state: Any) -> bytes:
    """Return a stream of a dtype with a state, which is pickled."""
    inner = pickle.dumps(state, 4)
    frame = inner[11:] if inner[2:3] == b"\x95" else inner[2:]
    return b"cnumpy\ndtype\n(" + text(made_of) + b"\x89\x88tR" + frame[:-1] + b"b"


FORGED = {
    "an array with the memory of a buffer": b"cnumpy\nndarray\n(K\x01\x85" + text("O") + b"C\x08AAAAAAAAtR.",
    "objects without the flag": dtype("V8", (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0)) + b".",
    "a field outside": dtype("V8", (3, "|", None, ("a",), {"a": (np.dtype("i8"), 1 << 20)}, 8, 1, 0)) + b".",
    "a field before": dtype("V8", (3, "|", None, ("a",), {"a": (np.dtype("i8"), -8)}, 8, 1, 0)) + b".",
    "a smaller size": dtype("f8", (3, "<", None, None, None, 1, 8, 0)) + b".",
    "objects of a scalar": named(SCALAR)
    + b"("
    + dtype("O8", (3, "|", None, None, None, -1, -1, 63))
    + b"C\x08AAAAAAAAtR.",
    "too few objects": named(RECONSTRUCT)
    + b"(cnumpy\nndarray\nK\x00\x85C\x01btR(K\x01K\x02\x85"
    + dtype("O8", (3, "|", None, None, None, -1, -1, 63))
    + b"\x89]Natb.",
    "a dtype whose state has not come": named(SCALAR)
    + b"(cnumpy\ndtype\n("
    + text("f8")
    + b"\x89\x88tRC\x08AAAAAAAAtR.",
    "an array of another class": named(RECONSTRUCT) + b"(ccollections\nCounter\nK\x00\x85C\x01btR.",
    "an extension": b"\x82\x01.",
    "an instance": b"(icollections\nCounter\n.",
    "an instance on the stack": b"(ccollections\nCounter\no.",
    "an object made without a call": b"ccollections\nCounter\n)\x81.",
    "an id": b"K\x01Q.",
    "elements of a counter": b"ccollections\nCounter\n)RK\x01a.",
    "a call of data": b"K\x01)R.",
}


@pytest.mark.parametrize("what", FORGED)
def test_forged_pickles_are_refused(what: str) -> None:
    """Opcodes that data do not need, and arguments of NumPy's functions that NumPy would trust."""
    with pytest.raises(pickle.UnpicklingError, match=r"weights_only=True|persistent"):
        load_data(memoryview(FORGED[what]), ())


def test_the_forged_dtypes_are_well_formed() -> None:
    """The streams above are refused for what they hold: the same stream with the right state is loaded."""
    right = np.dtype([("a", "i8"), ("b", "f4", (2,))])
    assert load_data(memoryview(dtype("V16", right.__reduce__()[2]) + b"."), ()) == right
    floats = named(SCALAR) + b"(" + dtype("f8", (3, "<", None, None, None, -1, -1, 0)) + b"C\x08" + bytes(8) + b"tR."
    assert load_data(memoryview(floats), ()) == 0.0


@pytest.mark.parametrize(
    "of",
    [
        np.dtype({"names": ["a", "b"], "formats": ["i4", "O"], "offsets": [8, 0], "itemsize": 24}),
        np.dtype([(("title", "a"), "i4"), ("b", "S3")]),
        np.dtype("i1,f8", align=True),
        np.dtype(">u2"),
        np.dtype("M8[25us]"),
        np.dtype("m8"),
        np.dtype(("f4", (2, 3))),
        np.dtype([("a", [("b", ">i2", (2,)), ("c", "U4")])]),
        np.dtype("?"),
        np.dtype("g"),
    ],
    ids=str,
)
def test_dtypes(of: Any) -> None:
    """Dtypes come back as NumPy made them, and as copies: the pickle cannot change a dtype that others use."""
    found = loaded(of)
    flags = pickle.loads(pickle.dumps(of)).flags
    assert (found, found.flags, found.itemsize, found.alignment) == (of, flags, of.itemsize, of.alignment)
    assert found.__reduce__() == of.__reduce__()


def test_attributes_of_an_ordered_dict() -> None:
    """A state dict of torch has attributes."""
    given = collections.OrderedDict(a=1)
    given.more = [2]  # type: ignore[attr-defined]
    assert loaded(given).more == [2]


def test_objects_that_hold_themselves() -> None:
    """A list that holds itself is data."""
    given: list[Any] = [1]
    given.append(given)
    found = loaded(given)
    assert found[1] is found
