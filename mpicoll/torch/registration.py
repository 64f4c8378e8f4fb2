"""Register the backend and the rendezvous with torch.distributed, without loading MPI.

A program's data loaders may start workers that import the program; these processes are no ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as c10d  # type: ignore[import-not-found,unused-ignore]

from mpicoll.launch.environment import read_launcher
from mpicoll.runtime.child_process import leave_mpi_unstarted
from mpicoll.runtime.torch_compile import exclude_from_compile
from mpicoll.torch.names import DEVICES, NAME, SCHEME
from mpicoll.torch.sites import skip_torch

Handler = Callable[..., Iterator[tuple[Any, int, int]]]
"""A rendezvous handler of torch: takes a URL, and yields store, rank and number of ranks."""


def load_backend() -> Any:
    """Return the module that makes process groups; its import loads MPI."""
    leave_mpi_unstarted()
    from mpicoll.torch import backend as found

    return found


def register() -> None:
    """Register the backend and the rendezvous with torch.distributed, once."""
    skip_torch()
    exclude_from_compile()
    if NAME.upper() not in c10d.Backend._plugins:
        c10d.Backend.register_backend(NAME, _create, extended_api=True, devices=DEVICES)
    handlers = c10d.rendezvous.__globals__["_rendezvous_handlers"]
    if SCHEME not in handlers:
        c10d.register_rendezvous_handler(SCHEME, _rendezvous)
        handlers["env"] = _or_mpi(handlers["env"])


def _create(opts: Any, pg_options: Any) -> Any:
    return load_backend().create(opts, pg_options)


def _rendezvous(url: str, **more: Any) -> Iterator[tuple[Any, int, int]]:
    made: Iterator[tuple[Any, int, int]] = load_backend().rendezvous(url, **more)
    return made


def _or_mpi(by_environment: Handler) -> Handler:
    """Return a rendezvous by the environment, torch's default; over MPI where torch's own raises as no rank is set.

    Without this ``init_process_group("mpicoll")`` under an MPI launcher asks for ``RANK``.
    """

    def rendezvous(url: str, **more: Any) -> Iterator[tuple[Any, int, int]]:
        has_rank = "RANK" in os.environ or "rank=" in url
        if has_rank or read_launcher(os.environ).kind == "none":
            return by_environment(url, **more)
        return _rendezvous(url, **more)

    return rendezvous
