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
from mpicoll.memory.pickled import pack

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
    packed = pack(value)
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
    with pytest.raises((pickle.UnpicklingError, TypeError, AttributeError)):
        load_data(memoryview(stream), ())
    assert of.__name__ == before
    assert pickle.loads(f"c{__name__}\nOwn\n".encode() + stream.split(b"\n", 2)[2]).__name__ == "renamed"
