"""The names of torch.distributed.distributed_c10d, which are those of this package: for programs that ask for them there."""

from __future__ import annotations

from typing import Any

import mpicoll

__all__ = mpicoll.__all__


def __getattr__(name: str) -> Any:
    return getattr(mpicoll, name)
