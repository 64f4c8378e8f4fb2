"""Values that no argument can be."""

from __future__ import annotations

from typing import Any

__all__ = ["Shy", "Untrue"]


class Untrue:
    """An object without a truth value, as an array of two elements is."""

    def __bool__(self) -> bool:
        raise ValueError("neither true nor false")


class Shy:
    """An object that raises when looked at."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"do not look at {name}")

    def __call__(self) -> None:
        raise AssertionError("not reached")
