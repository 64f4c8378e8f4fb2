"""Call functions of NumPy without warnings of overflows and invalid values, which MPI does not give either."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import numpy as np


def make_runner() -> Callable[..., Any]:
    """Return a function that calls a function of NumPy without warnings; one thread uses it at a time."""
    before = np.geterr()
    context = contextvars.Context()
    context.run(np.seterr, all="ignore")
    if np.geterr() == before:
        return context.run
    np.seterr(**before)
    return _with_errstate


class _Context(threading.local):
    """The runner of each thread.

    NumPy 2.0 and later keep the settings of errors in the context: a context of its own costs less than ``np.errstate``, which
    takes 3 us to enter.
    """

    def __init__(self) -> None:
        self.run = make_runner()


def _with_errstate(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    with np.errstate(all="ignore"):
        return function(*arguments, **named)


_context = _Context()


def without_warnings(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Return what a function of NumPy returns; ``np.seterr`` of the program has no effect on the call."""
    return _context.run(function, *arguments, **named)
