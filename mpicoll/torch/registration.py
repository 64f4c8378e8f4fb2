"""Register the backend and the rendezvous with torch.distributed, without loading MPI.

A program's data loaders may start workers that import the program; these processes are no ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as c10d  # type: ignore[import-not-found,unused-ignore]

from mpicoll.runtime.torch_compile import exclude_from_compile
from mpicoll.torch.names import DEVICES, NAME, SCHEME
from mpicoll.torch.sites import skip_torch


def load_backend() -> Any:
    """Return the module that makes process groups; its import loads MPI."""
    from mpicoll.torch import backend as found

    return found


def register() -> None:
    """Register the backend and the rendezvous with torch.distributed, once."""
    skip_torch()
    exclude_from_compile()
    if NAME.upper() not in c10d.Backend._plugins:
        c10d.Backend.register_backend(NAME, _create, extended_api=True, devices=DEVICES)
    if SCHEME not in c10d.rendezvous.__globals__["_rendezvous_handlers"]:
        c10d.register_rendezvous_handler(SCHEME, _rendezvous)


def _create(opts: Any, pg_options: Any) -> Any:
    return load_backend().create(opts, pg_options)


def _rendezvous(url: str, **more: Any) -> Iterator[tuple[Any, int, int]]:
    made: Iterator[tuple[Any, int, int]] = load_backend().rendezvous(url, **more)
    return made
