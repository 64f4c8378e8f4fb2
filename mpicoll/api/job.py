"""Start and end the default process group, and the questions about a job, as torch.distributed has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpicoll.groups.process_group import register_methods
from mpicoll.lifecycle.init import (
    at_start,
    default_pg_timeout,
    destroy_process_group,
    get_node_local_rank,
    init_process_group,
    is_available,
    is_mpi_available,
)

__all__ = [
    "default_pg_timeout",
    "destroy_process_group",
    "get_node_local_rank",
    "init_process_group",
    "is_available",
    "is_mpi_available",
]


def _find_method(name: str) -> Callable[..., Any] | None:
    """Return a method of groups that is made of the public calls; None if there is none of that name."""
    from mpicoll.api.group_methods import METHODS  # at the first use: few programs use them

    return METHODS.get(name)


def _load_calls() -> None:
    """Import the calls that most programs make: here, at one time on all ranks, as each takes milliseconds."""
    from mpicoll.api import collectives, messages, objects  # noqa: F401


register_methods(_find_method)
at_start.append(_load_calls)
