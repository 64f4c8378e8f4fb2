"""Exclude the functions of this package from ``torch.compile``: compiled functions call them as Python.

The compiler follows calls into Python code, and treats arrays of NumPy there as its own tensors. That is wrong for memory that
ranks share or that MPI uses. Each function of the package is marked like :func:`torch.compiler.disable` does, without a wrapper
and without loading the compiler.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

REASON = "it communicates with other ranks"

_left: set[str] = set()
_strategy: Any = None


def exclude_from_compile() -> None:
    """Exclude all functions loaded so far from the compiler of torch, if torch is imported."""
    if "torch" not in sys.modules:
        return
    for name, module in tuple(sys.modules.items()):
        if name.startswith("mpicoll.") and name not in _left:
            _left.add(name)
            for function in _functions(module):
                _leave(function)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    for value in tuple(vars(module).values()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        found = (value,) if not isinstance(value, type) else tuple(vars(value).values())
        for each in found:
            function = getattr(each, "fget", None) or getattr(each, "__func__", each)
            # Of a decorated function the compiler sees the wrapper, and the function that it wraps.
            while isinstance(function, FunctionType):
                yield function
                function = getattr(function, "__wrapped__", None)


def _leave(function: FunctionType) -> None:
    """Mark a function: torch compiles neither the function nor functions that it calls."""
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=REASON)
    if _strategy is not None or _found_strategy():
        frames, strategy = _strategy
        frames.set_code_exec_strategy(function.__code__, strategy)


def _found_strategy() -> bool:
    global _strategy
    try:
        frames = sys.modules["torch"]._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        _strategy = frames, frames._FrameExecStrategy(skip, skip)
    except (AttributeError, KeyError, TypeError):  # this torch has no such function, or another name for it
        return False
    return True
