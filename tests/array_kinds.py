"""mpicoll as ``collective_cases`` calls it, with every array handed on as one of another kind of the same memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np

import mpicoll as dist

__all__ = ["Exported", "Interface", "Through"]


class Interface:
    """An array that has the array interface alone."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.__array_interface__ = owner.__array_interface__


class Exported:
    """An array that has DLPack alone."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __dlpack_device__(self) -> Any:
        return self.owner.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.owner.__dlpack__(**options)


class _Returned(dist.Work):
    """A Work whose results are told as the NumPy arrays that they are memory of."""

    def __init__(self, work: dist.Work, back: dict[int, Any]) -> None:
        self.work, self.back = work, back

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return self.work.wait(timeout)

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def is_success(self) -> bool:
        return self.work.is_success()

    def result(self) -> list[Any]:
        # A result that is not one of the very objects passed is a KeyError.
        return [self.back[id(each)] for each in self.work.result()]


class Through:
    """The public names of mpicoll; functions get ``convert(x)`` for every NumPy array ``x`` that they are given."""

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
        return _Returned(result, back) if isinstance(result, dist.Work) else result
