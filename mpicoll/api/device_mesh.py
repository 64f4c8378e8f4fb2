"""DeviceMesh: ranks on a grid of several dimensions, with a group for each line of each dimension."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpicoll.api.groups import new_subgroups_by_enumeration
from mpicoll.api.job import (
    get_process_group_ranks,
    get_rank,
    get_world_size,
    group,
    init_process_group,
    is_initialized,
)
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.groups.registry import NON_MEMBER, state
from mpicoll.operations import execution
from mpicoll.operations.prepare.mesh import (
    Checked,
    Ranks,
    agree,
    backends_of,
    check_override,
    check_size,
    dimension_of,
    index_of,
    names_of,
    ranks_of,
    shape_of,
)
from mpicoll.operations.prepare.refusal import refuse
from mpicoll.runtime.call_site import call_site
from mpicoll.runtime.settings import need_bool, need_string


def init_device_mesh(
    device_type: str,
    mesh_shape: tuple[int, ...],
    *,
    mesh_dim_names: tuple[str, ...] | None = None,
    backend_override: Any = None,
) -> DeviceMesh:
    """Arrange the ranks of the world on a grid, in C order, and make a group for each line of the grid.

    All ranks of the world call this function with the same arguments. The call initialises the default group if there is none.

    Args:
        device_type: name of the kind of device of the arrays, such as "cpu" or "cuda"; without effect.
        mesh_shape: number of ranks along each dimension. If the product is less than the size of the world, the last ranks are
            in no group.
        mesh_dim_names: a name for each dimension.
        backend_override: a backend for some dimensions, by number or name, checked and ignored.

    Raises:
        RuntimeError: more places than ranks, a length that is not positive, names that are not unique, another number of names
            than of dimensions, a device with a number, a key of ``backend_override`` that is no dimension. Other ranks raise
            CollectiveMismatchError.
        TypeError: a shape, names, a device or ``backend_override`` of a wrong type; on other ranks as above.
        ValueError: a value of ``backend_override`` is the name of no backend; on other ranks as above.
        CollectiveMismatchError: the ranks passed different shapes or names.
        Others as :func:`new_group`.

    Source: torch.distributed.init_device_mesh.
    """
    if not is_initialized():
        init_process_group()

    def check() -> Checked:
        shape, names = shape_of(mesh_shape), names_of(mesh_dim_names)
        if names is not None and len(set(names)) != len(names):
            raise RuntimeError(f"Each mesh_dim_name must be unique, got {names}")
        if names is not None and len(names) != len(shape):
            raise RuntimeError(
                f"mesh_shape and mesh_dim_names should have same length, got {len(shape)} and {len(names)}"
            )
        check_override(backend_override, len(shape), names)
        if not need_string(device_type, "device_type").isalpha():
            raise RuntimeError(
                f"device_type must be a kind of device without a number, such as 'cuda', got {device_type!r}"
            )
        if any(length <= 0 for length in shape):
            raise RuntimeError(f"the lengths of mesh_shape must be positive, got {shape}")
        places = math.prod(shape)
        check_size(places)
        return np.arange(places).reshape(shape), names

    made = DeviceMesh.__new__(DeviceMesh)
    made._make(device_type, *agree("init_device_mesh", check))
    return made


class DeviceMesh:
    """Ranks on a grid.

    All ranks of the world make a mesh in the same order, as :func:`new_group`; each rank makes slices without communication.

    Args:
        device_type: name of the kind of device of the arrays.
        mesh: the global rank at each place, as an array, a tensor or nested lists of integers.
        mesh_dim_names: a name for each dimension.
        backend_override: one backend for each dimension, as in torch, checked and ignored.

    Attributes:
        mesh: the ranks, as an array of int64; of a slice, the ranks of the slice that this rank is in.
        device_type, mesh_dim_names: as passed.

    As in torch a mesh is a context manager; here ``with mesh:`` has no effect.

    Raises:
        RuntimeError: a rank at two places, more places than ranks, or another number of names than of dimensions. Other ranks
            raise CollectiveMismatchError, as with other wrong arguments.
        ValueError: a mesh without ranks; ``backend_override`` has another length, or the name of no backend.
        Others as :func:`init_device_mesh`.

    Source: torch.distributed.DeviceMesh.
    """

    def __init__(
        self,
        device_type: str,
        mesh: Any,
        *,
        mesh_dim_names: tuple[str, ...] | None = None,
        backend_override: Any = None,
    ) -> None:
        if not is_initialized():
            init_process_group()

        def check() -> Checked:
            need_string(device_type, "device_type")
            ranks, names = ranks_of(mesh), names_of(mesh_dim_names)
            if ranks.size != np.unique(ranks).size:
                raise RuntimeError(f"a rank can be at one place of the mesh only, got {ranks.tolist()}")
            check_size(ranks.size)
            if names is not None and len(names) != ranks.ndim:
                raise RuntimeError(f"the mesh has {ranks.ndim} dimensions and {len(names)} names")
            backends = None if backend_override is None else backends_of(backend_override)
            if backends is not None and len(backends) != ranks.ndim:
                raise ValueError(f"backend_override has {len(backends)} entries for {ranks.ndim} dimensions")
            return ranks, names

        self._make(device_type, *agree("DeviceMesh", check))

    def _make(self, device_type: str, ranks: Ranks, names: tuple[str, ...] | None) -> None:
        """Make the groups of a mesh on which all ranks have agreed."""
        self._set(device_type, ranks, names, [_line(ranks, dim, names) for dim in range(ranks.ndim)])

    def __copy__(self) -> DeviceMesh:
        return self

    def __deepcopy__(self, memo: object) -> DeviceMesh:
        """Return this mesh: copies of an object with a mesh share the mesh and its groups."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the mesh by the names of its groups; only a process with these groups, on the same rank, can unpickle it."""
        known = [None if each is NON_MEMBER else each.group_name for each in self._groups]
        return _with_groups, (self.device_type, self.mesh.tolist(), self.mesh.shape, self.mesh_dim_names, known)

    def _set(self, device_type: str, ranks: Ranks, names: tuple[str, ...] | None, groups: list[Any]) -> None:
        self.device_type = device_type
        self.mesh = ranks
        self.mesh_dim_names = names
        self._groups = groups
        self._root = self
        # The dimensions of the root that each dimension covers.
        self._of: list[tuple[int, ...]] | None = [(dim,) for dim in range(ranks.ndim)]
        self._flat: dict[str, DeviceMesh] = {}  # of the root: the flattened meshes by name

    @staticmethod
    def from_group(
        group: ProcessGroup | list[ProcessGroup],
        device_type: str,
        mesh: Any = None,
        *,
        mesh_dim_names: tuple[str, ...] | None = None,
    ) -> DeviceMesh:
        """Return a mesh with one dimension for each of some existing groups, without communication.

        Args:
            group: one group, whose ranks are the mesh, or a list with one for each dimension of ``mesh``.
            device_type, mesh, mesh_dim_names: as for the class; with a list of groups both are needed.

        Raises:
            ValueError: no group; ``mesh`` or the names are missing, or do not fit the groups.
            TypeError: a device, ``mesh`` or names of a wrong type.

        Source: torch.distributed.device_mesh.DeviceMesh.from_group.
        """
        several = isinstance(group, (list, tuple))
        groups = list(group) if isinstance(group, (list, tuple)) else [group]
        if not groups:
            raise ValueError("Expects at least one ProcessGroup to be passed")
        for word, given in (("mesh", mesh), ("mesh_dim_names", mesh_dim_names)):
            if several and given is None:
                raise ValueError(f"Must pass {word} if passing multiple ProcessGroups")
        need_string(device_type, "device_type")
        ranks = ranks_of(get_process_group_ranks(groups[0]) if mesh is None else mesh)
        names = names_of(mesh_dim_names)
        if ranks.ndim != len(groups) or (names is not None and len(names) != len(groups)):
            raise ValueError(
                f"{len(groups)} groups, {ranks.ndim} dimensions and the names {names} do not fit each other"
            )
        if len(groups) == 1 and ranks.tolist() != get_process_group_ranks(groups[0]):
            raise ValueError(
                f"Invalid mesh {ranks.tolist()} for a group of the ranks {get_process_group_ranks(groups[0])}"
            )
        made = DeviceMesh.__new__(DeviceMesh)
        made._set(device_type, ranks, names, groups)
        return made

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.mesh.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of ranks along each dimension."""
        return self.mesh.shape

    def size(self, mesh_dim: int | None = None) -> int:
        """Return the number of ranks along a dimension, or in the whole mesh."""
        return int(self.mesh.size) if mesh_dim is None else self.shape[dimension_of(mesh_dim, self.ndim, "an integer")]

    def get_rank(self) -> int:
        """Return the global rank of this rank."""
        return get_rank()

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Return this rank's place along each dimension; None if this rank is not in the mesh."""
        found = np.argwhere(self.mesh == get_rank())
        return tuple(found[0].tolist()) if len(found) else None

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return this rank's rank in the group of a dimension, or of a flattened mesh.

        The result is the place along the dimension if the ranks ascend along the dimension.

        Args:
            mesh_dim: number or name of a dimension, or name of a flattened mesh; None: the only dimension.

        Raises:
            RuntimeError: ``mesh_dim`` is None, and there are several dimensions; this rank is not in the mesh.
            KeyError, IndexError: there is no dimension of that name or number.
            TypeError: ``mesh_dim`` is no string and no integer.
        """
        rank = get_rank(self._group(mesh_dim, "get_local_rank"))
        if rank < 0:
            raise RuntimeError(f"rank {get_rank()} is not in {self!r}")
        return rank

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """Return the group of this rank's line along a dimension, or of a flattened mesh.

        A rank that is not in the mesh gets ``GroupMember.NON_GROUP_MEMBER``. Arguments as in :meth:`get_local_rank`.

        Raises: as :meth:`get_local_rank`, except for a rank that is not in the mesh.
        """
        return self._group(mesh_dim, "get_group")

    def _group(self, mesh_dim: int | str | None, what: str) -> Any:
        if isinstance(mesh_dim, str) and mesh_dim in self._root._flat:
            return self._root._flat[mesh_dim]._groups[0]
        return self._groups[self._dim(mesh_dim, what)]

    def get_all_groups(self) -> list[Any]:
        """Return the groups of all dimensions, in order."""
        return list(self._groups)

    def _dim(self, mesh_dim: int | str | None, what: str) -> int:
        if mesh_dim is None:
            if self.ndim > 1:
                raise RuntimeError(
                    f"Found the DeviceMesh have {self.ndim} dimensions. Optional kwarg `mesh_dim` needs to be specified when "
                    f"device_mesh.ndim > 1: {what}(0), or by a name"
                )
            return 0
        if isinstance(mesh_dim, str):
            return self._named(mesh_dim)
        return dimension_of(mesh_dim, self.ndim, "the number or the name of a dimension")

    def _named(self, name: str) -> int:
        if self.mesh_dim_names is None or name not in self.mesh_dim_names:
            raise KeyError(f"Invalid mesh_dim_name {name!r}: the dimensions are {self.mesh_dim_names}")
        return self.mesh_dim_names.index(name)

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """Return the slice of some dimensions that this rank is in, without communication.

        The ranks of the slice have this rank's place along all other dimensions. On a rank that is not in the mesh the slice has
        no places. For the whole mesh, the name of a flattened mesh is a name of a dimension, too.

        Raises:
            RuntimeError: the dimensions of the mesh have no names, or a dimension is named twice, also by a flattened mesh.
            KeyError: there is no dimension of that name, or the names are not in the order of the dimensions.
            TypeError: a name is no string.
        """
        if self.mesh_dim_names is None:
            raise RuntimeError("Cannot slice a DeviceMesh without mesh_dim_names!")
        wanted = index_of(names)
        if wanted == self.mesh_dim_names:
            return self
        if len(wanted) == 1 and wanted[0] in self._root._flat and self == self._root:
            return self._root._flat[wanted[0]]
        parts = [self._part(name) for name in wanted]
        dims = [dim for part in parts for dim in part]
        if len(dims) != len(set(dims)):
            raise RuntimeError(f"Slicing overlapping dim_names {wanted} is not allowed: a dimension is named twice")
        long = [
            dim for dim in dims if self.shape[dim] != 1
        ]  # as in torch, the order of dimensions of length 1 does not matter
        if long != sorted(long):
            raise KeyError(
                f"Invalid mesh_dim_names {wanted}: name them in the order of the mesh's dimensions, {self.mesh_dim_names}"
            )
        place = self.get_coordinate()
        if place is None:
            ranks: Ranks = np.empty((0,) * len(parts), np.int64)
        else:
            at = tuple(slice(None) if dim in dims else place[dim] for dim in range(self.ndim))
            ranks = self.mesh[at].transpose([sorted(dims).index(dim) for dim in dims])
            ranks = ranks.reshape([math.prod(self.shape[dim] for dim in part) for part in parts])
        made = self._slice(ranks, wanted, [self._group(name, "") for name in wanted])
        made._of = None if self._of is None else [sum((self._of[dim] for dim in part), ()) for part in parts]
        return made

    def _part(self, name: str) -> tuple[int, ...]:
        """Return the dimensions of this mesh that a name means: one dimension, or the dimensions of a flattened mesh."""
        if name not in (self.mesh_dim_names or ()) and name in self._root._flat and self == self._root:
            of = self._root._flat[name]._of
            if of is not None:
                return of[0]
        return (self._named(name),)

    def _slice(self, ranks: Ranks, names: tuple[str, ...], groups: list[Any]) -> DeviceMesh:
        made = DeviceMesh.__new__(DeviceMesh)
        made._set(self.device_type, ranks, names, groups)
        made._root, made._of = self._root, None
        return made

    def _flatten(self, mesh_dim_name: str | None = None) -> DeviceMesh:
        """Return a mesh of the same ranks with one dimension; its name becomes a name of a dimension of the whole mesh.

        All ranks of the world call this method, each on the whole mesh or on its own slice.

        Raises:
            RuntimeError: the dimensions of the mesh have no names.
            ValueError: the name is the name of a dimension, or of another flattened mesh.
        """
        if self.mesh_dim_names is None:
            raise RuntimeError("Cannot flatten a DeviceMesh without mesh_dim_names!")
        root, ranks = self._root, self.mesh.reshape(-1)
        try:
            given = need_bool(mesh_dim_name, "mesh_dim_name")
            name = need_string(mesh_dim_name if given else "_".join(self.mesh_dim_names), "mesh_dim_name")
            if self.mesh_dim_names == (name,):
                return self
            if name in (root.mesh_dim_names or ()):
                raise ValueError(f"{name!r} is a dimension of {root!r} already: flatten under another name")
            known = root._flat.get(name)
            if known is not None and known.mesh.tolist() != ranks.tolist():
                raise ValueError(f"{name!r} is the name of another flattened mesh already: {known!r}")
        except Exception as error:
            if self.ndim == 1 or root._flat:  # the other ranks may communicate, or find the mesh that they name
                raise
            execution.enter(state().world, "all_gather_object")
            refuse(state().world, "all_gather_object", call_site(), error, "_flatten")
        if known is not None:
            return known
        mine = self._groups[0] if self.ndim == 1 else _everybodys(ranks, name)
        made = root._flat[name] = self._slice(ranks, (name,), [mine])
        made._of = None if self._of is None else [sum(self._of, ())]
        return made

    def _unflatten(
        self,
        dim: int | str,
        mesh_sizes: tuple[int, ...],
        mesh_dim_names: tuple[str, ...],
        backend_override: Any = None,
    ) -> DeviceMesh:
        """Return a mesh of the same ranks in which several new dimensions, with new groups, replace one dimension.

        All ranks of the world call this method, each on the whole mesh or on its own slice.

        Args:
            dim: number or name of the dimension to replace.
            mesh_sizes, mesh_dim_names: number of ranks along each new dimension, and its name.
            backend_override: as for :func:`init_device_mesh`, of the new dimensions.

        Raises:
            ValueError: no such dimension, or the product of the sizes is not its length.
            RuntimeError: another number of names than of sizes, a mesh without names, or two dimensions of the same name.
        """
        if self.mesh_dim_names is None:
            raise RuntimeError("Cannot unflatten a DeviceMesh without mesh_dim_names!")
        if (dim not in self.mesh_dim_names) if isinstance(dim, str) else dim not in range(-self.ndim, self.ndim):
            raise ValueError(f"dim {dim!r} specified in `_unflatten` is not one of {self.mesh_dim_names}")
        at, sizes, inner = (
            self._dim(dim, "_unflatten"),
            shape_of(mesh_sizes, "mesh_sizes"),
            names_of(mesh_dim_names) or (),
        )
        if len(sizes) != len(inner):
            raise RuntimeError("mesh_dim_names must have same length as mesh_sizes in _unflatten!")
        names = self.mesh_dim_names[:at] + inner + self.mesh_dim_names[at + 1 :]
        if len(set(names)) != len(names):
            raise RuntimeError(f"Each mesh_dim_name must be unique, got {names}")
        check_override(backend_override, len(sizes), inner)
        inside = self.mesh.size > 0
        if inside and (math.prod(sizes) != self.shape[at] or min(sizes, default=0) < 1):
            raise ValueError(f"mesh_sizes={sizes} do not make up the {self.shape[at]} ranks along {dim!r}")
        shape = self.shape[:at] + (sizes if inside else (0,) * len(sizes)) + self.shape[at + 1 :]
        ranks = self.mesh.reshape(shape)
        place = np.argwhere(ranks == get_rank())
        made = []
        for new, name in enumerate(inner, at):
            line: Ranks = np.empty(0, np.int64)
            if len(place):
                line = ranks[tuple(slice(None) if each == new else place[0][each] for each in range(ranks.ndim))]
            made.append(_everybodys(line, name))
        return self._slice(ranks, names, self._groups[:at] + made + self._groups[at + 1 :])

    def __enter__(self) -> DeviceMesh:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, DeviceMesh)
            and self.device_type == other.device_type
            and self.mesh_dim_names == other.mesh_dim_names
            and np.array_equal(self.mesh, other.mesh)
        )

    def __hash__(self) -> int:
        return hash((self.device_type, self.mesh_dim_names, self.mesh.tobytes(), self.mesh.shape))

    def __repr__(self) -> str:
        if self.mesh_dim_names is None:
            return f"DeviceMesh({self.device_type!r}, {self.mesh.tolist()})"
        named = ", ".join(f"{name}={length}" for name, length in zip(self.mesh_dim_names, self.shape, strict=True))
        return f"DeviceMesh(({named}), {self.device_type!r}, {self.mesh.tolist()})"


def _with_groups(
    device_type: str, ranks: Any, shape: tuple[int, ...], names: tuple[str, ...] | None, known: list[str | None]
) -> DeviceMesh:
    """Return a mesh from its pickled fields, with the groups of this process."""
    there = state().groups
    lost = [each for each in known if each is not None and each not in there]
    if lost:
        raise ValueError(f"the groups {lost} of a pickled mesh are not in this process: make the mesh again")
    made = DeviceMesh.__new__(DeviceMesh)
    groups = [NON_MEMBER if each is None else there[each] for each in known]
    made._set(device_type, np.array(ranks, np.int64).reshape(shape), names, groups)
    return made


def _is_world(lists: list[list[int]]) -> bool:
    """Return whether the lists are one list of all ranks of the world, in order."""
    return lists == [list(range(get_world_size()))]


def _line(ranks: Ranks, dim: int, names: tuple[str, ...] | None) -> Any:
    """Make the groups of all lines along a dimension; return the group of this rank."""
    lines = np.moveaxis(ranks, dim, -1).reshape(-1, ranks.shape[dim])
    if _is_world(lines.tolist()):
        return group.WORLD
    return _described(new_subgroups_by_enumeration(lines.tolist())[0], f"dim_{dim}" if names is None else names[dim])


def _everybodys(ranks: Ranks, name: str) -> Any:
    """Make the groups of the ranks that each rank of the world passes; return the group of this rank."""
    from mpicoll.api.objects import all_gather_object

    told: list[Any] = [None] * get_world_size()
    all_gather_object(told, ranks.reshape(-1).tolist())
    lists = [list(each) for each in dict.fromkeys(tuple(each) for each in told) if each]
    if _is_world(lists):
        return group.WORLD
    return _described(new_subgroups_by_enumeration(lists)[0], name)


def _described(mine: ProcessGroup | None, name: str) -> Any:
    """Set the description of a group as torch does. Errors show the ranks of the group, as lines of a dimension share it."""
    if mine is None:
        return NON_MEMBER
    mine.group_desc = f"mesh_{name}"
    return mine
