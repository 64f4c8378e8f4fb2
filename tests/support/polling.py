"""Wait in a test for a condition that becomes true by itself."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["until"]


def until(condition: Callable[[], bool], limit: float = 20.0) -> bool:
    """Poll a condition; return whether it became true within the limit, in seconds."""
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True
