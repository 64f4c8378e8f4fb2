"""The addresses of arrays on a GPU, as NumPy arrays that no code on the host can read or write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpicoll.memory.device.runtime import Array, DeviceArray, over, runtime
from mpicoll.memory.protocols import Holder


class DeviceAddresses(np.ndarray[Any, np.dtype[Any]]):
    """The addresses of an array on a GPU, as an ndarray whose elements cannot be read or written on the host.

    Access to the elements raises: in NumPy a signal would end the process. Slices and views have none of the attributes.

    Attributes:
        array: the array on the GPU.
        began: the event that the call follows.
        passed_directly: MPI gets the addresses; otherwise the elements move in pieces through the host.
        finish: function applied to each piece of a result before the piece is copied to the GPU, or None.
        narrower: None, or for an array that moves as a wider dtype: its own dtype, the function that widens elements, and
            the function that narrows elements. Addresses then count wider elements.
    """

    array: DeviceArray
    began: Any
    passed_directly: bool
    finish: Callable[[Array], None] | None = None
    narrower: tuple[np.dtype[Any], Callable[[Array, Array], None], Callable[[Array, Array], None]] | None = None

    def is_ready(self) -> bool:
        """Return whether the GPU has reached the call that the array was passed to."""
        return over(runtime(), self.began)

    def widened(
        self,
        dtype: np.dtype[Any],
        widen: Callable[[Array, Array], None],
        narrow: Callable[[Array, Array], None],
    ) -> DeviceAddresses:
        """Return the addresses for elements that move as a wider dtype.

        Args:
            widen, narrow: write converted elements of the first argument into the second.
        """
        interface = {"version": 3, "data": (self.ctypes.data, False), "shape": self.shape, "typestr": dtype.str}
        wide = np.asarray(Holder(interface, self.array.held)).view(DeviceAddresses)
        wide.array, wide.began, wide.passed_directly = self.array, self.began, False
        wide.narrower = self.dtype, widen, narrow
        return wide

    def __array_ufunc__(self, *_: Any, **__: Any) -> Any:
        raise _unreadable()

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func not in (np.may_share_memory, np.shares_memory):
            raise _unreadable()
        return super().__array_function__(func, types, args, kwargs)

    def __repr__(self) -> str:
        return f"DeviceAddresses(shape={self.shape}, dtype={self.dtype})"

    __str__ = __repr__

    def _no(self, *_: Any, **__: Any) -> Any:
        raise _unreadable()

    copy = tobytes = tolist = item = __setitem__ = fill = __iter__ = __array__ = _no


def _unreadable() -> RuntimeError:
    return RuntimeError("the elements of an array on a GPU are not to be had on the host: this is a bug of mpicoll")


def addresses_of(array: DeviceArray) -> Array:
    """Return the addresses of an array. Host and GPU share no address (CUDA guide, unified virtual addressing)."""
    if 0 in array.shape:
        return np.empty(array.shape, array.dtype).view(DeviceAddresses)
    raw = np.dtype((np.void, array.dtype.itemsize))
    interface = {
        "version": 3,
        "data": (array.address, False),
        "shape": array.shape,
        "strides": array.strides,
        "typestr": raw.str,
    }
    return np.asarray(Holder(interface, array.held)).view(array.dtype).view(DeviceAddresses)
