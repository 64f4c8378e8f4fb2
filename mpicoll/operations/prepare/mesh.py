"""Check the arguments of a device mesh on this rank, and agree on them with the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from numbers import Number
from typing import Any

import numpy as np
import numpy.typing as npt

from mpicoll.diagnosis.call import CallDescription
from mpicoll.errors import wrong_argument
from mpicoll.groups.registry import state
from mpicoll.operations import composed, execution
from mpicoll.runtime.backend_names import names_in
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


def ranks_of(mesh: Any) -> Ranks:
    """Return a mesh as an array; raise TypeError unless it has integers, ValueError if it has none."""
    try:  # the numbers of a tensor are copied: NumPy warns if it converts a tensor itself
        given = np.asarray(mesh.tolist() if hasattr(mesh, "tolist") else mesh)
    except ValueError:
        given = np.empty(1, object)  # of lists of different lengths
    if given.size and given.dtype.kind not in "iu":
        kind = f"{type(mesh).__name__}{f' of {given.dtype}' if given.ndim else ''}"
        raise TypeError(f"mesh must be an array of integers, or integers in lists of one length, not {kind}")
    if not given.size:
        raise ValueError(f"mesh must have at least one rank, got none (shape {given.shape})")
    return given.astype(np.int64)


def shape_of(given: Any, name: str = "mesh_shape") -> tuple[int, ...]:
    """Return the lengths of a mesh; raise TypeError unless they are integers."""
    lengths = _items(given, name, "integers")
    for at, length in enumerate(lengths):
        need_integer(length, f"{name}[{at}]")
    return tuple(int(length) for length in lengths)


def names_of(given: Any) -> tuple[str, ...] | None:
    """Return the names of dimensions, or None; raise TypeError unless they are strings."""
    if given is None:
        return None
    names = _items(given, "mesh_dim_names", "strings")
    return tuple(need_string(name, f"mesh_dim_names[{at}]") for at, name in enumerate(names))


def index_of(given: Any) -> tuple[str, ...]:
    """Return the names in ``mesh[...]``; raise TypeError unless they are strings."""
    if isinstance(given, str):
        return (given,)
    names = tuple(given) if hasattr(given, "__iter__") and not isinstance(given, bytes) else (given,)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"mesh[...]: needs the name of a dimension, or a tuple of names, not {type(name).__name__}")
    return names


def dimension_of(given: Any, ndim: int, what: str) -> int:
    """Return the number of a dimension, at least 0; raise TypeError unless it is an integer, IndexError if it is out of range.

    Args:
        what: what ``mesh_dim`` may be, for the error.
    """
    if not hasattr(given, "__index__") or isinstance(given, bool):
        raise TypeError(f"mesh_dim must be {what}, not {type(given).__name__}")
    if given not in range(-ndim, ndim):
        raise IndexError(f"mesh_dim is {given}, and the mesh has {ndim} dimension{'s' if ndim > 1 else ''}")
    return range(ndim)[int(given)]


def backends_of(override: Any) -> tuple[Any, ...]:
    """Return the ``backend_override`` of ``DeviceMesh``, one for each dimension; raise TypeError unless it is such a tuple."""
    if isinstance(override, Mapping):
        raise TypeError(f"backend_override must be a tuple of backends, not {type(override).__name__}")
    backends = _items(override, "backend_override", "backends")
    for at, backend in enumerate(backends):
        _check_backend(backend, f"backend_override[{at}]")
    return backends


def _check_backend(given: Any, argument: str) -> None:
    """Raise TypeError unless a value is the name of a backend, options, or a pair of both; ValueError for a wrong name."""
    alone = (given, None) if given is None or isinstance(given, str) else (None, given)
    name, options = given if isinstance(given, tuple) and len(given) == 2 else alone
    if not (name is None or isinstance(name, str)) or isinstance(options, (Number, Collection)):
        raise TypeError(
            f"{argument} must be the name of a backend, options of a process group, or a tuple of both, "
            f"not {type(given).__name__}"
        )
    if name is not None:
        names_in(name, f"{argument}: ")


def _items(given: Any, name: str, what: str) -> tuple[Any, ...]:
    if isinstance(given, (str, bytes)) or not hasattr(given, "__iter__"):
        raise TypeError(f"{name} must be a tuple of {what}, not {type(given).__name__}")
    return tuple(given)


def check_override(override: Any, ndim: int, names: tuple[str, ...] | None) -> None:
    """Raise TypeError if ``backend_override`` is no dict of backends, RuntimeError for a key that is no dimension or is twice."""
    if override is not None and not isinstance(override, Mapping):
        raise TypeError(
            "backend_override must be a dict with a backend for numbers or names of dimensions, "
            f"not {type(override).__name__}"
        )
    for dim, name in enumerate(names or ()):
        if override and dim in override and name in override:
            raise RuntimeError(f"backend_override has the dimension {name!r} twice: by name, and by its number {dim}")
    wrong = [key for key in override or () if key not in range(ndim) and key not in (names or ())]
    if wrong:
        raise RuntimeError(
            f"backend_override has the keys {wrong}: the dimensions are 0 to {ndim - 1}, with the names {names or ()}"
        )
    for key, backend in (override or {}).items():
        _check_backend(backend, f"backend_override[{key!r}]")


def check_size(places: int) -> None:
    """Raise RuntimeError if a mesh has more places than the world has ranks."""
    size = state().world.size()
    if places > size:
        raise RuntimeError(f"Mesh should not be bigger than default world size {size}, but found {places} ranks!")
