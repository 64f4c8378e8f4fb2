"""Load objects that hold data only: numbers, strings, bytes, containers, NumPy arrays, and tensors of torch.

An ordinary pickle may call any function that the receiver can import. :func:`load_data` refuses all functions and classes but
those that rebuild such data, and those that the program passed to ``torch.serialization.add_safe_globals``.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

_CLASSES = {
    "builtins": "bytearray complex frozenset range set slice",
    "collections": "Counter OrderedDict",
    "numpy": "dtype ndarray",
    "numpy.core.multiarray": "_reconstruct scalar",
    "numpy._core.multiarray": "_reconstruct scalar",
    "numpy.core.numeric": "_frombuffer",
    "numpy._core.numeric": "_frombuffer",
    "torch": "Size device",
    "torch._utils": "_rebuild_parameter _rebuild_sparse_tensor _rebuild_tensor_v2",
    "torch.serialization": "_get_layout",
    "torch.storage": "_load_from_bytes",
}
"""Functions and classes by module. NumPy pickles by its own functions, and torch by the functions of ``torch._utils``."""

_ALLOWED = {(module, name) for module, names in _CLASSES.items() for name in names.split()}


class _Rebuild:
    """A function that a pickle may call, and of which the pickle can set no attribute."""

    __slots__ = ("_function",)

    _function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "_function", function)

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __setattr__(self, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"weights_only=True: a pickle sets the attribute {name!r} of a function")


class _DataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a function or class that rebuilds data.

        Raises:
            pickle.UnpicklingError: the name is that of another function or class.
        """
        for known in _safe_globals():
            if (module, name) == known[1:]:
                return known[0]
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _Rebuild(_load_storage)
        if (module, name) in _ALLOWED:
            found = super().find_class(module, name)
            # A class of C, which a pickle cannot change, may have to be the class itself, as numpy.ndarray for _reconstruct.
            return found if isinstance(found, type) and not found.__flags__ & _HEAP_TYPE else _Rebuild(found)
        if module in ("torch", "ml_dtypes") and module in sys.modules:
            dtype = _dtype(module, getattr(sys.modules[module], name, None))
            if dtype is not None:
                return dtype
        raise pickle.UnpicklingError(
            f"weights_only=True: the object needs {module}.{name}, which is not loaded. Numbers, strings, bytes, containers, "
            "NumPy arrays and tensors of torch are loaded; torch.serialization.add_safe_globals adds classes"
        )


_HEAP_TYPE = 1 << 9
"""``Py_TPFLAGS_HEAPTYPE``: the attributes of such a class can be set."""


def _dtype(module: str, found: Any) -> Any:
    """Return what stands for a dtype of torch or of ml_dtypes in a pickle; None: ``found`` is another object."""
    if module == "torch":
        return found if isinstance(found, sys.modules["torch"].dtype) else None
    if isinstance(found, type) and issubclass(found, np.generic):
        return np.dtype(found)  # for numpy.dtype() as good as the class, whose attributes a pickle could set
    return None


def _safe_globals() -> Iterable[tuple[Any, str, str]]:
    """Yield what the program added by ``torch.serialization.add_safe_globals``: the object, its module, its name."""
    torch = sys.modules.get("torch.serialization")
    for each in getattr(torch, "get_safe_globals", list)():
        found, path = each if isinstance(each, tuple) else (each, f"{each.__module__}.{each.__qualname__}")
        module, _, name = path.rpartition(".")
        yield found, module, name


def _load_storage(data: bytes) -> Any:
    return sys.modules["torch"].load(io.BytesIO(data), weights_only=True)


def load_data(stream: memoryview, buffers: Iterable[Any]) -> Any:
    """Unpickle an object that holds data only.

    Args:
        stream: the pickle stream, which is copied.
        buffers: the buffers outside the stream.

    Raises:
        pickle.UnpicklingError: the object needs a function or class that is not loaded; the message names it.
        Exception: as unpickling raises.
    """
    return _DataUnpickler(io.BytesIO(stream), buffers=buffers).load()
