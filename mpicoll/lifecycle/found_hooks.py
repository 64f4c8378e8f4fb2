"""Hooks of Python that the library's hooks replace and call.

Another package may wrap the library's hook, as torch's ``init_process_group`` does at each call. Then the library's hook stays
when it is to be removed, and a second installation finds a hook that calls the library's hook.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class FoundHook:
    """The hook that the library's hook has replaced, at each installation that was not undone.

    Args:
        module, name: where Python has the hook: ``sys`` and ``excepthook``.
        ours: the library's hook.
    """

    def __init__(self, module: Any, name: str, ours: Callable[..., None]) -> None:
        self._module, self._name, self._ours = module, name, ours
        self._found: list[Callable[..., Any]] = []
        self._local = threading.local()

    def install(self) -> None:
        """Replace the hook of Python."""
        self._found.append(getattr(self._module, self._name))
        setattr(self._module, self._name, self._ours)

    def restore(self) -> None:
        """Restore the hook found, if the library's is still installed."""
        if getattr(self._module, self._name) is self._ours:
            setattr(self._module, self._name, self._found.pop())

    @property
    def calls(self) -> bool:
        """Whether this thread is in the found hook, so that the library's hook is called from a hook that it has called."""
        return getattr(self._local, "level", None) is not None

    def __call__(self, *given: Any) -> None:
        """Call the hook found last; from inside of that hook, the hook found before."""
        before = getattr(self._local, "level", None)
        self._local.level = level = (len(self._found) if before is None else before) - 1
        try:
            self._found[max(level, 0)](*given)
        finally:
            self._local.level = before
