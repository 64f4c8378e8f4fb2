"""Arrays of other packages: their own memory where it can be had, an error with the parameter's name where not."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import sys
import types
import weakref
from typing import Any

import numpy as np
import pytest

from mpicoll.memory.adapt import adapt, adapt_list, viewed
from mpicoll.memory.protocols import as_numpy


class Interface:
    """An array of a package that has the array interface, and one thing that copies."""

    def __init__(self, owner: np.ndarray[Any, Any]) -> None:
        self.owner = owner

    @property
    def __array_interface__(self) -> Any:
        return self.owner.__array_interface__

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise AssertionError("this may copy")


class Struct:
    """An array of a package that has the C form of the array interface."""

    def __init__(self, owner: np.ndarray[Any, Any]) -> None:
        self.owner = owner

    @property
    def __array_struct__(self) -> Any:
        return self.owner.__array_struct__


class Exported:
    """An array that has DLPack alone, of version 1 or as it was before."""

    def __init__(self, owner: np.ndarray[Any, Any], old: bool = False, device: int = 1) -> None:
        self.owner, self.old, self.device = owner, old, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def __dlpack__(self, **options: Any) -> Any:
        return self.owner.__dlpack__() if self.old else self.owner.__dlpack__(**options)


class Converted:
    """An array that has ``__array__`` alone."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        if isinstance(self.values, Exception):
            raise self.values
        return self.values


def new_dlpack() -> bool:
    """Whether this NumPy writes and reads DLPack with its flag for what must not be written (from 2.1 on)."""
    return np.from_dlpack(np.ones(1)).flags.writeable


def writable_kinds() -> dict[str, tuple[Any, np.ndarray[Any, Any]]]:
    """Return arrays of (1, 2, 3, 4), and the NumPy array of their memory."""
    kinds: dict[str, Any] = {
        "bytearray": bytearray(b"\1\2\3\4"),
        "memoryview": memoryview(bytearray(b"\1\2\3\4")),
        "array.array": array.array("d", [1, 2, 3, 4]),
        "ctypes": (ctypes.c_int32 * 4)(1, 2, 3, 4),
    }
    pairs = {name: (value, np.frombuffer(value, np.asarray(value).dtype)) for name, value in kinds.items()}
    anonymous = mmap.mmap(-1, 4)
    anonymous[:] = b"\1\2\3\4"
    pairs["mmap"] = anonymous, np.frombuffer(anonymous, np.uint8)
    floats = np.arange(1.0, 5.0)
    pairs["__array_interface__"] = Interface(floats), floats
    pairs["__array_struct__"] = Struct(floats), floats
    if new_dlpack():
        pairs["DLPack"] = Exported(floats), floats
    return pairs


def test_the_memory_itself() -> None:
    """What can be written is written where it is: no protocol copies."""
    for what, (value, memory) in writable_kinds().items():
        for writable in (False, True):
            found = adapt(value, "tensor", writable=writable)
            assert found.flat.dtype == memory.dtype, what
            assert found.shape == (4,), what
            assert found.flat.tolist() == [1, 2, 3, 4], what
            assert found.pack is None, what
            found.flat[1] = 9
            assert memory.tolist() == [1, 9, 3, 4], what
            found.flat[1] = 2


def test_shapes_and_strides() -> None:
    """Shape and strides are the array's own; what has none, or no elements, is one too."""
    grid = np.arange(6.0).reshape(2, 3)
    for value in (Interface(grid.T), memoryview(grid.T), Struct(grid.T)):
        got = as_numpy(value, "x", writable=True)
        assert got is not None
        assert (got.shape, got.strides) == ((3, 2), grid.T.strides)
        assert (got == grid.T).all()
    for value in (ctypes.c_double(2.5), Interface(np.array(2.5))):
        got = as_numpy(value, "x", writable=True)
        assert got is not None
        assert (got.shape, float(got)) == ((), 2.5)
    assert adapt(b"", "x", writable=False).flat.size == 0
    assert adapt(array.array("d"), "x", writable=True).flat.dtype == np.float64


@pytest.mark.parametrize("old", [False, True])
def test_read_only_memory_is_read_and_never_written(old: bool) -> None:
    """It is an input like any other; as a result it is refused with the name of the parameter."""
    values = np.arange(3.0)
    frozen = values.copy()
    frozen.flags.writeable = False
    kinds: list[Any] = [values.tobytes(), memoryview(values.tobytes()), Interface(frozen)]
    if old or new_dlpack():
        kinds.append(Exported(values if old else frozen, old))
    for value in kinds:
        got = as_numpy(value, "x", writable=False)
        assert got is not None
        assert bytes(got.data) == values.tobytes()
        with pytest.raises(ValueError, match=r"parameter `output` \(.*\) is read-only"):
            as_numpy(value, "output", writable=True)


def test_what_may_be_a_copy_is_an_input_only() -> None:
    """An array that has no more than ``__array__`` is read; NumPy itself does not know whether that copied."""
    got = as_numpy(Converted(np.arange(3)), "x", writable=False)
    assert got is not None
    assert got.tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match=r"parameter `x`: a .*Converted may give a copy of its elements"):
        as_numpy(Converted(np.arange(3)), "x", writable=True)


def test_arrays_on_devices_are_refused() -> None:
    """They say so themselves, and are not copied to the host behind the program's back."""

    class Cuda(Converted):
        __cuda_array_interface__ = {"version": 3}  # noqa: RUF012

    class Several(Converted):
        def __dlpack_device__(self) -> Any:
            raise BufferError("on several devices")

    for value in (Exported(np.ones(2), device=2), Exported(np.ones(2), device=10), Cuda(np.ones(2))):
        with pytest.raises(TypeError, match="parameter `x`: only arrays on the host and on CUDA devices can be moved"):
            as_numpy(value, "x", writable=False)
    for value in (Exported(np.ones(2), device=3), Several(np.ones(2))):
        assert as_numpy(value, "x", writable=False) is not None, value


def test_what_is_no_array() -> None:
    """Numbers, text, lists and classes are refused in the words for what is no array."""

    class Plain:
        pass

    for value in (
        None,
        True,
        3,
        2.5,
        1j,
        "text",
        [1.0],
        (1.0,),
        {},
        np.float64(1),
        np.bool_(True),
        Plain(),
        np.ndarray,
    ):
        assert as_numpy(value, "x", writable=False) is None, value
        with pytest.raises(TypeError, match=r"Expected parameter `x` of type numpy\.ndarray but got"):
            adapt(value, "x", writable=False)
    with pytest.raises(TypeError, match=r"of type List\[numpy.ndarray\] but got list holding float, str instead"):
        adapt_list([bytearray(2), 1.5, "a"], "tensors", writable=False)
    with pytest.raises(TypeError, match=r"but got bytes instead"):
        adapt_list(b"12", "tensors", writable=False)


def test_what_a_protocol_raises_is_told() -> None:
    """It becomes part of an error that names the parameter."""

    class Wrong:
        __array_interface__ = {"version": 3, "shape": "wide"}  # noqa: RUF012

    released = memoryview(b"12")
    released.release()
    cases: list[tuple[Any, str]] = [
        (Converted(RuntimeError("abstract value")), "abstract value"),
        (released, "released memoryview"),
        (Wrong(), ""),
    ]
    for value, words in cases:
        with pytest.raises(TypeError, match=f"parameter `x`: the elements of a .* are not accessible: .*{words}"):
            as_numpy(value, "x", writable=False)


def test_dtypes_that_do_not_move_are_refused_by_name() -> None:
    """The dtype is looked at as that of a NumPy array is."""
    for value in (Converted([None]), Converted(np.zeros(2, "i4,O")), Interface(np.zeros(2, np.dtype([])))):
        with pytest.raises(TypeError, match="parameter `x`"):
            adapt(value, "x", writable=False)


def test_lists_hold_arrays_of_many_kinds() -> None:
    """A list may hold arrays of several packages; what is wrong with one names its place."""
    values = [np.ones(2), array.array("d", [1, 1]), Interface(np.ones(2))]
    assert [memory.flat.tolist() for memory in adapt_list(values, "tensors", writable=True)] == [[1, 1]] * 3
    with pytest.raises(ValueError, match=r"parameter `tensors\[1\]` \(bytes\) is read-only"):
        adapt_list([np.ones(2, np.uint8), b"12"], "tensors", writable=True)


def test_memory_lives_as_long_as_it_is_used() -> None:
    """What a call holds keeps the owner of the memory alive, and no longer."""
    for kind in (Interface, Struct, Exported):
        value = kind(np.arange(4.0))
        alive = weakref.ref(value.owner)
        memory = adapt(value, "x", writable=False)
        del value
        gc.collect()
        assert alive() is not None, kind
        assert memory.flat.tolist() == [0, 1, 2, 3], kind
        del memory
        gc.collect()
        assert alive() is None, kind
    held = bytearray(4)
    memory = adapt(held, "x", writable=True)
    with pytest.raises(BufferError):
        held.append(1)
    del memory
    held.append(1)


def test_views_for_comparison() -> None:
    """``viewed`` gives the memory that two operations may share, whatever the array is."""
    plain = np.ones(2)
    assert viewed(plain) is plain
    held = bytearray(8)
    assert np.shares_memory(viewed(held), viewed(memoryview(held)[4:]))  # type: ignore[arg-type]


def test_a_module_named_torch_that_is_another_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a torch that has tensors is asked whether something is one."""
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert adapt(bytearray(2), "x", writable=True).flat.tolist() == [0, 0]
    assert as_numpy("x", "x", writable=False) is None
