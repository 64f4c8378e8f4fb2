"""Arrays of other packages as NumPy arrays of the same memory, without importing these packages.

:func:`as_numpy` accepts CPU tensors of torch, and objects with the buffer protocol, ``__array_interface__`` or DLPack, which
give their memory without a copy. An array that has only ``__array__`` can only be read, as ``__array__`` may return a copy.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from mpicoll.runtime import handler_calls
from mpicoll.runtime.call_site import CallSite, caller, passes_through
from mpicoll.runtime.native import found as extension

Array = npt.NDArray[Any]
_ndarray = np.ndarray


def _bare(name: str, element: type[np.generic]) -> np.dtype[Any]:
    return np.dtype([(name, element)])


BARE = {
    "bfloat16": _bare("bfloat16", np.uint16),
    "complex32": _bare("complex32", np.uint32),
    "float8_e4m3fn": _bare("float8_e4m3fn", np.uint8),
    "float8_e4m3fnuz": _bare("float8_e4m3fnuz", np.uint8),
    "float8_e5m2": _bare("float8_e5m2", np.uint8),
    "float8_e5m2fnuz": _bare("float8_e5m2fnuz", np.uint8),
    "float8_e8m0fnu": _bare("float8_e8m0fnu", np.uint8),
}
"""Dtypes of torch that NumPy does not have: a structured dtype with one field, of the dtype's name, that holds the bits.

It is not a plain unsigned integer, so that arrays of both do not match.
"""

_BARE_NAMES = {dtype: name for name, dtype in BARE.items()}

_TORCH_NAMES = {
    f"torch.{name}": np.dtype(name)
    for name in (
        "bool",
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
} | {f"torch.{name}": dtype for name, dtype in BARE.items()}

_torch_dtypes: dict[Any, np.dtype[Any]] = {}
"""Dtypes seen so far, by the dtype objects of torch, as the name of a dtype takes long to make."""

# Device types of DLPack (DLDeviceType) that the host can read: host memory, and host memory pinned by CUDA or ROCm.
_HOST = (1, 3, 11)

# Types that have some of the protocols, but are no arrays: a class has the protocols of its instances.
_NO_ARRAYS = (type(None), bool, int, float, complex, str, list, tuple, dict, set, type, np.generic)

# Exceptions that protocols of a foreign object may raise; other exceptions reach the program unchanged.
_FOREIGN = (TypeError, ValueError, BufferError, RuntimeError, NotImplementedError, AttributeError)

_INSTEAD = "pass numpy.array(x), and convert the result to the first type afterwards"


def bare_name(dtype: np.dtype[Any]) -> str | None:
    """Return the name in torch of a dtype of :data:`BARE`, or None for another dtype."""
    return _BARE_NAMES.get(dtype)


def as_numpy(value: Any, name: str, *, writable: bool) -> Array | None:
    """Return a NumPy array of the memory of ``value``, or None if ``value`` is no array.

    Args:
        value: any object but a NumPy array.
        name: the name of the parameter, for messages.
        writable: the call writes into the array; then the result is never a copy.

    Raises:
        TypeError: the memory of the array is not accessible, for example on a device, or of a sparse array.
        ValueError: the call writes into the array, which is read-only.
    """
    torch: Any = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", None)
    if isinstance(tensor, type) and isinstance(value, tensor):
        plain: Array | None = None
        if extension is not None:
            plain = extension.tensor_array(value, tensor, torch.strided, _torch_dtypes)
        if plain is not None:
            return plain
        value = waited_for(value)
        try:
            array = _torch_array(torch, value, name, writable)
        except RuntimeError as error:  # torch raises it for a tensor that vmap or grad has wrapped
            raise TypeError(f"parameter `{name}`: this tensor has no memory of its own: {error}") from error
    else:
        found = None if isinstance(value, _NO_ARRAYS) else _foreign_array(value, name, writable)
        if found is None:
            return None
        array = found
    if writable:
        _check_writable(array, value, name)
    return array


def view_of(tensor: Any, depth: int = 2) -> Any:
    """Return a torch tensor of the host as a NumPy array of the same memory; None for all else, and if that is impossible.

    None, too, if this package makes the call for the program: then the general way finds the line of the program.

    Args:
        depth: frames between this function and the program.
    """
    if type(tensor).__module__ != "torch" or (not passes_through() and CallSite.inside(caller(depth).f_code)):
        return None
    try:
        array = as_numpy(tensor, "tensor", writable=True)
    except Exception as error:  # of a device, with gradients, read-only: raised where it is raised on all members
        if handler_calls.raised(error) is not None:
            raise
        return None
    return array if array is not None and (array.dtype.kind in "biufc" or bare_name(array.dtype)) else None


def views_of(values: Any, depth: int = 2) -> list[Any] | None:
    """Return a list with :func:`view_of` of each item that is no array of NumPy; None for all but lists, and if one has none."""
    if type(values) is not list:
        return None
    views: list[Any] = []
    for each in values:  # a comprehension is a frame of its own before Python 3.12
        views.append(each if type(each) is _ndarray else view_of(each, depth + 1))
        if views[-1] is None:
            return None
    return views


def _check_writable(array: Array, value: Any, name: str) -> None:
    if not array.flags.writeable:
        raise ValueError(
            f"parameter `{name}` ({type_name(value)}) is read-only, and this call writes its result into it: {_INSTEAD}"
        )


class Holder:
    """Object that gives NumPy the address of memory, and keeps the owner alive while an array of it exists."""

    __slots__ = ("__array_interface__", "__array_struct__", "owner")

    def __init__(self, interface: Any, owner: Any, attribute: str = "__array_interface__") -> None:
        setattr(self, attribute, interface)
        self.owner = owner


def _torch_array(torch: Any, tensor: Any, name: str, writable: bool) -> Array:
    """Return the memory of a tensor, by its address.

    ``tensor.numpy()`` would forbid the program to resize the storage, and needs the version of NumPy that torch was built with.
    """
    dtype = torch_dtype(torch, tensor, name, "cpu")
    if not writable and (tensor.is_conj() or tensor.is_neg()):
        tensor = tensor.detach().resolve_conj().resolve_neg()
    shape = tuple(tensor.shape)
    address = tensor.data_ptr()
    if not address and 0 not in shape:
        raise RuntimeError("its address is 0, as of a tensor in traced code")
    if writable:
        check_torch_result(torch, tensor, name)
    if 0 in shape:
        return np.empty(shape, dtype)
    strides, nbytes = None, tensor.nbytes
    if not tensor.is_contiguous():
        strides = tuple(stride * dtype.itemsize for stride in tensor.stride())
        nbytes = dtype.itemsize + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * nbytes).from_address(address)
    # With a reference to the storage, not the tensor: ``x.data = y`` and ``x.set_(y)`` give the tensor another storage.
    memory.storage = tensor.untyped_storage()
    array: Array = np.ndarray(shape, dtype, memory, strides=strides)
    return array


def waited_for(tensor: Any) -> Any:
    """Return the tensor inside a result of torch's functional collectives, after a wait for it; or any other tensor as it is.

    torch has such results in tensor parallel modules, and in ``DTensor.redistribute(async_op=True)``.
    """
    is_result = type(tensor).__module__ == "torch.distributed._functional_collectives"
    return tensor.trigger_wait() if is_result and hasattr(tensor, "trigger_wait") else tensor


def torch_dtype(torch: Any, tensor: Any, name: str, device: str) -> np.dtype[Any]:
    """Return the dtype of a tensor on a kind of device, ``cpu`` or ``cuda``.

    Raises:
        TypeError: the memory of the tensor is not accessible; ``name`` is the name of the parameter, for the message.
    """
    dtype = _torch_dtypes.get(tensor.dtype)
    if dtype is None:
        from mpicoll.runtime.torch_compile import exclude_from_compile

        exclude_from_compile()  # torch may have been imported after this package
        dtype = _TORCH_NAMES.get(str(tensor.dtype))
        if dtype is not None:
            _torch_dtypes[tensor.dtype] = dtype
    why = _torch_refusal(torch, tensor, dtype, device)
    if why is not None:
        raise TypeError(f"parameter `{name}`: {why}")
    assert dtype is not None
    return dtype


def _torch_refusal(torch: Any, tensor: Any, dtype: np.dtype[Any] | None, wanted: str) -> str | None:
    """Return why the memory of a tensor is not accessible, or None if it is."""
    plain = type(tensor) is torch.Tensor
    if not plain and torch.nn.parameter.is_lazy(tensor):
        return "this parameter of a lazy module has no shape yet: call the module once before"
    if tensor.is_nested:
        return "nested tensors are not supported: pass the tensors in it, one by one"
    dispatch = None if plain else getattr(torch.Tensor, "__torch_dispatch__", None)
    if not plain and getattr(type(tensor), "__torch_dispatch__", None) is not dispatch:
        return f"a {type_name(tensor)} has no memory of its own: pass the plain tensor in it, such as x.to_local() of a DTensor"
    if not (tensor.is_cpu if wanted == "cpu" else tensor.is_cuda):
        if tensor.device.type == "meta":
            return "a tensor on the meta device has no elements"
        return _on_device(str(tensor.device), "x.cpu()")
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout} is not supported: pass x.to_dense()"
    if tensor.is_quantized:
        return f"a quantized tensor ({tensor.dtype}) is not supported: pass x.int_repr() or x.dequantize()"
    if dtype is None:
        return f"dtype {tensor.dtype} is not supported: pass x.view(torch.uint8), or convert it"
    return None


def check_torch_result(torch: Any, tensor: Any, name: str) -> None:
    """Raise ValueError if a tensor must not be written, as it is a conjugate or negative view."""
    what = "conjugate" if tensor.is_conj() else "negative" if tensor.is_neg() else ""
    if what:
        method = {"conjugate": "resolve_conj", "negative": "resolve_neg"}[what]
        raise ValueError(
            f"parameter `{name}` is a tensor whose memory holds the {what} of its values, and this call writes its "
            f"result into it: pass x.{method}(), and keep that"
        )


def _foreign_array(value: Any, name: str, writable: bool) -> Array | None:
    """Return the memory of an array of any package, by the first protocol that succeeds."""
    _check_device(value, name)
    problem: Exception | None = None
    for protocol in _PROTOCOLS:
        try:
            found = protocol(value)
        except _FOREIGN as error:
            problem = error
            continue
        if found is not None:
            return found
    if hasattr(value, "__array__"):
        if writable:
            raise TypeError(
                f"parameter `{name}`: a {type_name(value)} may give a copy of its elements (__array__ only), and this call "
                f"writes its result into it: {_INSTEAD}"
            )
        try:
            return np.asarray(value)
        except _FOREIGN as error:
            problem = error
    if problem is not None:
        raise TypeError(
            f"parameter `{name}`: the elements of a {type_name(value)} are not accessible: {problem or type(problem).__name__}"
        ) from problem
    return None


def _check_device(value: Any, name: str) -> None:
    """Raise TypeError if an array is in the memory of a device."""
    query = getattr(value, "__dlpack_device__", None)
    device = None
    if query is not None:
        try:
            device = int(query()[0])
        except Exception:
            pass  # an array on several devices, in JAX: the protocols raise for it
    if device is not None and device not in _HOST:
        raise TypeError(f"parameter `{name}`: {_on_device(f'a device (DLPack type {device})', 'a copy on the host')}")
    if device is None and hasattr(value, "__cuda_array_interface__"):
        raise TypeError(f"parameter `{name}`: {_on_device('a CUDA device', 'a copy on the host')}")


def _on_device(device: str, instead: str) -> str:
    return f"only arrays on the host and on CUDA devices can be moved, and this array is on {device}: pass {instead}"


def _by_buffer(value: Any) -> Array | None:
    try:
        view = memoryview(value)
    except TypeError:
        return None  # it does not have the protocol
    return np.asarray(view)


def _by_interface(value: Any) -> Array | None:
    for attribute in ("__array_struct__", "__array_interface__"):
        interface = getattr(value, attribute, None)
        if interface is not None:
            # The holder has no other protocol, so that NumPy does not call __array__, which may copy.
            return np.asarray(Holder(interface, value, attribute))
    return None


def _by_dlpack(value: Any) -> Array | None:
    if not hasattr(value, "__dlpack__") or not hasattr(value, "__dlpack_device__"):
        return None
    # The result is read-only if the array has no flag for that, as before DLPack 1.0.
    return np.from_dlpack(value)


_PROTOCOLS: tuple[Callable[[Any], Array | None], ...] = (_by_buffer, _by_interface, _by_dlpack)


def type_name(value: Any) -> str:
    """Return the name of an object's type, for messages."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
