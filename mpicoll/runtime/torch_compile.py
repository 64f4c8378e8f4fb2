"""Functions compiled by ``torch.compile`` call this package as it is: its own functions are left to Python.

The compiler follows calls into Python code and takes the arrays of NumPy there for tensors of its own: memory that ranks share,
or that MPI has, is none. Each function of the package is marked as :func:`torch.compiler.disable` marks one, without a wrapper
and without loading the compiler.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

REASON = "it talks to other ranks"

_left: set[str] = set()
_strategy: Any = None


def exclude_from_compile() -> None:
    """Have the compiler of a torch that is loaded leave all functions alone that are loaded by now."""
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
            # Of a decorated one the compiler sees the wrapper, and the function that it wraps.
            while isinstance(function, FunctionType):
                yield function
                function = getattr(function, "__wrapped__", None)


def _leave(function: FunctionType) -> None:
    """Mark a function: it is not followed from a compiled one, and what it calls is not compiled either."""
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
    except (AttributeError, KeyError, TypeError):  # a torch that has it not, or calls it otherwise
        return False
    return True
