"""mpicoll for ``collective_cases``, which passes every array as an array of another kind of the same memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
from standin_gpu import Gpu

import mpicoll as dist

__all__ = ["Exported", "Interface", "OnGpu", "Returned", "Through"]


class Interface:
    """An array that has only the array interface."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.__array_interface__ = owner.__array_interface__


class Exported:
    """An array that has only DLPack."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __dlpack_device__(self) -> Any:
        return self.owner.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.owner.__dlpack__(**options)


class Returned(dist.Work):
    """A Work whose results are the NumPy arrays of the same memory."""

    def __init__(self, work: dist.Work, back: dict[int, Any]) -> None:
        self.work, self.back = work, back

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return self.work.wait(timeout)

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def is_success(self) -> bool:
        return self.work.is_success()

    def result(self) -> list[Any]:
        # A result that is not one of the passed objects is a KeyError.
        return [self.back[id(each)] for each in self.work.result()]


class Through:
    """The public names of mpicoll; functions get ``convert(x)`` for every NumPy array ``x`` in their arguments."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self._convert = convert

    def __getattr__(self, name: str) -> Any:
        found = getattr(dist, name)
        return functools.partial(self._call, found) if callable(found) and not isinstance(found, type) else found

    def _call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        back: dict[int, Any] = {}
        kept = []

        def converted(value: Any) -> Any:
            if isinstance(value, list):
                return [converted(each) for each in value]
            if not isinstance(value, np.ndarray):
                return value
            other = self._convert(value)
            kept.append(other)
            back[id(other)] = value
            return other

        result = function(*map(converted, args), **{name: converted(value) for name, value in options.items()})
        return Returned(result, back) if isinstance(result, dist.Work) else result


class OnGpu(Through):
    """mpicoll, with every array on the GPU; the program waits for its stream before it reads results."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(gpu.array_of)
        self.gpu = gpu

    def _call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        result = super()._call(function, *args, **options)
        if isinstance(result, dist.Work):
            wait = result.wait

            def waited(*args: Any, **options: Any) -> bool:
                over = wait(*args, **options)
                self.gpu.finish()
                return over

            result.wait = waited  # type: ignore[method-assign]
        else:
            self.gpu.finish()
        return result
