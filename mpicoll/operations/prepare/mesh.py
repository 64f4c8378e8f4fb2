"""Check the arguments of a device mesh on this rank, and agree on them with the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from mpicoll.diagnosis.call import CallDescription
from mpicoll.errors import wrong_argument
from mpicoll.groups.registry import state
from mpicoll.operations import composed, execution
from mpicoll.runtime.call_site import call_site
from mpicoll.runtime.settings import need_integer, need_string

Ranks = npt.NDArray[np.int64]
Checked = tuple[Ranks, tuple[str, ...] | None]
"""The rank at each place of a mesh, and the names of the dimensions."""


def agree(op: str, check: Callable[[], Checked]) -> Checked:
    """Return a mesh that all ranks of the world make alike.

    Args:
        op: name of the call.
        check: checks the arguments of this rank. All ranks raise what this function raises.
    """
    world, site = state().world, call_site()
    execution.enter(world, op)
    problem: Exception | None = None
    made: Checked = np.empty(0, np.int64), None
    key: tuple[Any, ...] = ()
    try:
        made = ranks, names = check()
        key = (("shape", ranks.shape), ("names", names))
        if (flat := ranks.reshape(-1).tolist()) != list(range(len(flat))):
            key = (*key, ("ranks", tuple(flat)))
    except Exception as error:
        problem = wrong_argument(error)
    composed.agree(world, CallDescription(op, key, site, error=problem))
    return made


def shape_of(given: Any) -> tuple[int, ...]:
    """Return the lengths of a mesh; raise TypeError unless they are integers."""
    lengths = _items(given, "mesh_shape", "integers")
    for at, length in enumerate(lengths):
        need_integer(length, f"mesh_shape[{at}]")
    return tuple(int(length) for length in lengths)


def names_of(given: Any) -> tuple[str, ...] | None:
    """Return the names of dimensions, or None; raise TypeError unless they are strings."""
    if given is None:
        return None
    names = _items(given, "mesh_dim_names", "strings")
    return tuple(need_string(name, f"mesh_dim_names[{at}]") for at, name in enumerate(names))


def _items(given: Any, name: str, what: str) -> tuple[Any, ...]:
    if isinstance(given, (str, bytes)) or not hasattr(given, "__iter__"):
        raise TypeError(f"{name} must be a tuple of {what}, not {type(given).__name__}")
    return tuple(given)


def check_override(override: Any, ndim: int, names: tuple[str, ...] | None) -> None:
    """Raise RuntimeError if a key of ``backend_override`` is no dimension, or a dimension is named twice."""
    for dim, name in enumerate(names or ()):
        if override and dim in override and name in override:
            raise RuntimeError(f"backend_override has the dimension {name!r} twice: by name, and by its number {dim}")
    wrong = [key for key in override or () if key not in range(ndim) and key not in (names or ())]
    if wrong:
        raise RuntimeError(
            f"backend_override has the keys {wrong}: the dimensions are 0 to {ndim - 1}, with the names {names or ()}"
        )


def check_size(places: int) -> None:
    """Raise RuntimeError if a mesh has more places than the world has ranks."""
    size = state().world.size()
    if places > size:
        raise RuntimeError(f"Mesh should not be bigger than default world size {size}, but found {places} ranks!")
