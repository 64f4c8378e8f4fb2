"""Load objects that hold data only: numbers, strings, bytes, containers, NumPy arrays, and tensors of torch.

An ordinary pickle may call any function that the receiver can import, and may set any attribute. :func:`load_data` calls only the
functions and classes of :data:`_CALLED`, and those that the program passed to ``torch.serialization.add_safe_globals``. As
functions of NumPy trust their arguments, arrays and dtypes are built from arguments that were checked here.
"""

from __future__ import annotations

import io
import math
import pickle
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, ClassVar

import numpy as np

_CALLED = {
    "builtins": "bytearray complex frozenset range set slice",
    "collections": "Counter OrderedDict",
    "numpy": "dtype",
    "numpy.core.multiarray": "_reconstruct scalar",
    "numpy._core.multiarray": "_reconstruct scalar",
    "numpy.core.numeric": "_frombuffer",
    "numpy._core.numeric": "_frombuffer",
    "torch": "Size device",
    "torch._utils": (
        "_rebuild_meta_tensor_no_storage _rebuild_parameter _rebuild_parameter_with_state _rebuild_sparse_tensor "
        "_rebuild_tensor _rebuild_tensor_v2"
    ),
    "torch.serialization": "_get_layout",
    "torch.storage": "_load_from_bytes",
}
"""Functions and classes by module. NumPy pickles by its own functions, and torch by the functions of ``torch._utils``."""

_ALLOWED = {(module, name) for module, names in _CALLED.items() for name in names.split()} | {("numpy", "ndarray")}

_ALIGNED_STRUCT = 0x80
"""The flag of a structured dtype with the alignment of C (``NPY_ALIGNED_STRUCT``)."""


_Unpickler: Any = pickle._Unpickler


class _DataUnpickler(_Unpickler):  # type: ignore[misc]
    """The unpickler of the standard library in Python, whose opcodes can be replaced.

    Attributes:
        added: functions and classes that the program added, by their paths.
        called: what the stream may call, as :meth:`find_class` returned it, by identity; with what is called in its place.
        unbuilt: arrays and dtypes that were made, and whose state has not come yet, by identity. A dtype comes with its
            description.
    """

    dispatch: ClassVar = dict(_Unpickler.dispatch)

    def __init__(self, stream: io.BytesIO, buffers: Iterable[Any]) -> None:
        super().__init__(stream, buffers=buffers)
        self.added = _added()
        self.called: dict[int, tuple[Any, Any]] = {}
        self.unbuilt: dict[int, tuple[Any, Any]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return a function or class that holds or rebuilds data.

        Raises:
            pickle.UnpicklingError: the name is that of another function or class.
        """
        if (module, name) in _ALLOWED:
            found = getattr(import_module(module), name)
            if found is not np.ndarray:
                self.called[id(found)] = found, _SPECIAL.get(name)
            return found
        added = self.added.get(f"{module}.{name}")
        if added is not None:
            self.called[id(added)] = added, None
            return added
        if module in ("torch", "ml_dtypes") and "." not in name:
            found = _dtype(module, name)
            if found is not None:
                return found
        raise pickle.UnpicklingError(
            f"weights_only=True: the object needs {module}.{name}, which is not loaded. Numbers, strings, bytes, list, tuple, "
            "dict, set, OrderedDict, Counter, NumPy arrays and tensors of torch are loaded"
            + ("; torch.serialization.add_safe_globals adds classes" if "torch" in sys.modules else "")
        )

    def _call(self) -> None:
        """REDUCE: call a function."""
        arguments, function = self.stack.pop(), self.stack[-1]
        known, special = self.called.get(id(function), (None, None))
        if known is not function or type(arguments) is not tuple:
            raise _refused(f"a call of {_named(function)}")
        self.stack[-1] = function(*arguments) if special is None else special(self, function, *arguments)

    def _make(self) -> None:
        """NEWOBJ: make an object of a class that the program added."""
        arguments, cls = self.stack.pop(), self.stack[-1]
        if not isinstance(cls, type) or not self._is_added(cls) or type(arguments) is not tuple:
            raise _refused(f"an object of {_named(cls)}")
        self.stack[-1] = cls.__new__(cls, *arguments)

    def _is_added(self, cls: type) -> bool:
        """Return whether the program added a class."""
        return any(each is cls for each in self.added.values())

    def _build(self) -> None:
        """BUILD: set the state of an object."""
        state, found = self.stack.pop(), self.stack[-1]
        kind = type(found)
        if id(found) in self.unbuilt:
            _, description = self.unbuilt.pop(id(found))
            if kind is np.ndarray:
                found.__setstate__(self._array_state(state))
            else:
                found.__setstate__(self._dtype_state(description, state))
        elif kind is OrderedDict and type(state) is dict:
            found.__dict__.update(state)
        elif self._is_added(kind):
            self.stack.append(state)
            super().load_build()
        else:
            raise _refused(f"the state of {_named(kind)}")

    def _need_built(self, dtype: Any) -> Any:
        if not isinstance(dtype, np.dtype) or id(dtype) in self.unbuilt:
            raise _refused("an array without a dtype")
        return dtype

    def _array_state(self, state: Any) -> Any:
        """Return the state of an array: version, shape, dtype, order, and bytes or a list of objects."""
        _, shape, dtype, _, values = state
        self._need_built(dtype)
        if type(shape) is not tuple or any(type(length) is not int or length < 0 for length in shape):
            raise _refused(f"an array of shape {shape!r}")
        if dtype.hasobject and (type(values) is not list or len(values) != math.prod(shape)):
            raise _refused("an array of objects with another number of objects")
        return state

    def _dtype_state(self, made_of: Any, state: Any) -> Any:
        """Return the state of a dtype, as NumPy returns it of a dtype that NumPy made of the same description."""
        try:
            found = self._described(made_of, *state)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise _refused(f"a dtype of NumPy with the state {state!r}") from error
        reduced: Any = found.__reduce__()
        if reduced[1][0] != made_of or reduced[2] != state:
            raise _refused(f"a dtype of NumPy with the state {state!r}")
        return reduced[2]

    def _described(
        self,
        made_of: Any,
        _: Any,
        order: Any,
        sub: Any,
        names: Any,
        fields: Any,
        size: Any,
        __: Any,
        flags: Any,
        *unit: Any,
    ) -> np.dtype[Any]:
        """Return the dtype that NumPy makes of what a state describes."""
        found: np.dtype[Any]
        if fields is not None:
            given = [tuple(fields[name]) for name in names]
            each: Any = {"names": list(names), "itemsize": size}
            each["formats"], each["offsets"] = ([self._need_built(one[0]) for one in given], [one[1] for one in given])
            if any(len(one) > 2 for one in given):
                each["titles"] = [one[2] if len(one) > 2 else None for one in given]
            found = np.dtype(each, align=bool(flags & _ALIGNED_STRUCT))
        elif sub is not None:
            found = np.dtype((self._need_built(sub[0]), sub[1]))
        elif unit and unit[0] is not None:
            (_, (name, count, _, _)) = unit[0]
            word = name.decode() if isinstance(name, bytes) else name
            found = np.dtype(f"{order}{made_of}" + ("" if word == "generic" else f"[{count}{word}]"))
        else:
            found = np.dtype(made_of)
            found = found if order in "=|" else found.newbyteorder(order)
        return found

    def _refuse(self) -> None:
        raise _refused("an opcode that data do not need")


def _refused(what: str) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(f"weights_only=True: the pickle has {what}, and is not loaded")


def _named(found: Any) -> str:
    return _path(found) if isinstance(found, type) or callable(found) else f"an object of {_path(type(found))}"


def _path(found: Any) -> str:
    return f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', '')}"


def _of_exact_type(opcode: bytes, *kinds: type) -> Callable[[_DataUnpickler], None]:
    """Return the opcode that adds elements to the object on the stack, for objects of these types and of added classes."""
    add = _Unpickler.dispatch[opcode[0]]
    below = {pickle.APPEND: 2, pickle.SETITEM: 3}.get(
        opcode, 0
    )  # 0: the object is below the mark, and the elements above

    def checked(self: _DataUnpickler) -> None:
        kind = type(self.stack[-below] if below else self.metastack[-1][-1])
        if kind not in kinds and not self._is_added(kind):
            raise _refused(f"elements of {_named(kind)}")
        add(self)

    return checked


_DataUnpickler.dispatch |= {
    pickle.REDUCE[0]: _DataUnpickler._call,
    pickle.BUILD[0]: _DataUnpickler._build,
    pickle.NEWOBJ[0]: _DataUnpickler._make,
    pickle.APPEND[0]: _of_exact_type(pickle.APPEND, list),
    pickle.APPENDS[0]: _of_exact_type(pickle.APPENDS, list),
    pickle.ADDITEMS[0]: _of_exact_type(pickle.ADDITEMS, set),
    pickle.SETITEM[0]: _of_exact_type(pickle.SETITEM, dict, OrderedDict, Counter),
    pickle.SETITEMS[0]: _of_exact_type(pickle.SETITEMS, dict, OrderedDict, Counter),
}
for _opcode in (pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX):
    _DataUnpickler.dispatch[_opcode[0]] = _DataUnpickler._refuse


def _make_dtype(self: _DataUnpickler, function: Any, made_of: Any, *_: Any) -> Any:
    """Make a dtype whose state will come: a copy, as other arrays use the dtypes of NumPy."""
    is_class = isinstance(made_of, type) and made_of.__module__ == "ml_dtypes"
    if not is_class and type(made_of) is not str:
        raise _refused(f"a dtype of {made_of!r}")
    made = np.dtype(made_of, False, True)
    self.unbuilt[id(made)] = made, made_of
    return made


def _make_array(self: _DataUnpickler, function: Any, cls: Any, shape: Any, letter: Any) -> Any:
    """Make an array whose state will come."""
    if cls is not np.ndarray:
        raise _refused(f"an array of {_named(cls)}")
    made = np.ndarray((0,), np.int8)
    self.unbuilt[id(made)] = made, None
    return made


def _make_scalar(self: _DataUnpickler, function: Any, dtype: Any, value: Any = None) -> Any:
    if self._need_built(dtype).hasobject or type(value) is not bytes:
        raise _refused(f"a scalar of {dtype}")
    return function(dtype, value)


def _view(self: _DataUnpickler, function: Any, buffer: Any, dtype: Any, *rest: Any) -> Any:
    self._need_built(dtype)
    return function(buffer, dtype, *rest)


def _load_storage(self: _DataUnpickler, function: Any, data: bytes) -> Any:
    return import_module("torch").load(io.BytesIO(data), weights_only=True)


_SPECIAL: dict[str, Callable[..., Any]] = {
    "dtype": _make_dtype,
    "_reconstruct": _make_array,
    "scalar": _make_scalar,
    "_frombuffer": _view,
    "_load_from_bytes": _load_storage,
}
"""What is called in place of a function of :data:`_CALLED`, by its name."""


def _dtype(module: str, name: str) -> Any:
    """Return the dtype of torch or the class of ml_dtypes of a name; None: the name is that of another object."""
    try:
        found = getattr(import_module(module), name, None)
    except ImportError:
        return None
    if module == "torch":
        return found if isinstance(found, sys.modules["torch"].dtype) else None
    return found if isinstance(found, type) and issubclass(found, np.generic) else None


def _added() -> dict[str, Any]:
    """Return what the program added by ``torch.serialization.add_safe_globals``, by the path that a pickle has."""
    serialization = sys.modules.get("torch.serialization")
    found = {}
    for each in getattr(serialization, "get_safe_globals", list)():
        if isinstance(each, tuple):
            found[each[1]] = each[0]
        else:
            found[_path(each)] = each
    return found


def load_data(stream: memoryview, buffers: Iterable[Any]) -> Any:
    """Unpickle an object that holds data only.

    Args:
        stream: the pickle stream, which is copied.
        buffers: the buffers outside the stream.

    Raises:
        pickle.UnpicklingError: the object needs a function or class that is not loaded; the message names it.
        Exception: as unpickling raises.
    """
    found = _DataUnpickler(io.BytesIO(stream), buffers).load()
    if "torch._utils" in sys.modules:
        sys.modules["torch._utils"]._validate_loaded_sparse_tensors()
    return found
