"""Hooks of Python that the library's hooks replace, and that other packages wrap."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mpicoll.lifecycle.hooks import FoundHook


class Python:
    """A module with a hook, and the library's hook for it; ``told`` has who was called with what."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.module = SimpleNamespace(hook=lambda what: self.told.append(("python", what)))
        self.hook = FoundHook(self.module, "hook", self.ours)

    def ours(self, what: str) -> None:
        if not self.hook.calls:
            self.told.append(("ours", what))
        self.hook(what)

    def wrap(self) -> None:
        before: Callable[[str], Any] = self.module.hook

        def wrapper(what: str) -> None:
            self.told.append(("wrapper", what))
            before(what)

        self.module.hook = wrapper

    def tell(self) -> list[str]:
        self.told.clear()
        self.module.hook("what")
        assert all(what == "what" for _, what in self.told)
        return [who for who, _ in self.told]


def test_the_hook_is_replaced_and_restored() -> None:
    python = Python()
    found = python.module.hook
    python.hook.install()
    assert python.tell() == ["ours", "python"]
    python.hook.restore()
    assert python.module.hook is found
    python.hook.install()
    assert python.tell() == ["ours", "python"]


@pytest.mark.parametrize("times", [1, 5])
def test_a_package_that_wraps_the_hook_each_time(times: int) -> None:
    """As torch does: each hook is called once, and the library's is not called again inside of it."""
    python = Python()
    for turn in range(times):
        python.hook.install()
        assert python.tell() == ["ours", *["wrapper"] * turn, "python"]
        python.wrap()
        assert python.tell() == ["wrapper", "ours", *["wrapper"] * turn, "python"]
        python.hook.restore()  # nothing, as another hook is installed
    assert python.tell() == ["wrapper", "ours", *["wrapper"] * (times - 1), "python"]


def test_a_hook_that_raises() -> None:
    """The next call begins at the hook found last again."""
    python = Python()

    def raises(what: str) -> None:
        raise LookupError(what)

    python.module.hook = raises
    python.hook.install()
    for _ in range(2):
        with pytest.raises(LookupError):
            python.module.hook("what")
    assert python.told == [("ours", "what")] * 2
    assert not python.hook.calls
