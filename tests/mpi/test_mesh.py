"""Meshes: coordinates, the group of each dimension, slices by name, flattening, and meshes over groups that are there."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import numpy as np
import pytest
from ranks import sum_of_ranks

import mpicoll as dist
from mpicoll.pytest_plugin import collective_raises

pytestmark = pytest.mark.mpi


def test_one_dimension() -> None:
    """A line of all ranks is the world itself."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (size,))
    assert mesh.get_group() is dist.group.WORLD
    assert mesh.get_local_rank() == mesh.get_rank() == rank
    assert mesh.get_coordinate() == (rank,)
    assert mesh.mesh.tolist() == list(range(size))
    assert (mesh.ndim, mesh.shape, mesh.size(), mesh.size(0)) == (1, (size,), size, size)
    assert repr(mesh) == f"DeviceMesh('cpu', {list(range(size))})"
    with mesh as inside:
        assert inside is mesh
    for refused in (mesh._flatten, lambda: mesh["dp"], lambda: mesh._unflatten(0, (size, 1), ("a", "b"))):
        with pytest.raises(RuntimeError, match="without mesh_dim_names"):
            refused()
    named = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",), backend_override={"dp": "gloo"})
    assert named._flatten() is named["dp"] is named


@pytest.mark.mpi(min_size=2)
def test_two_dimensions() -> None:
    """Each dimension has a group of the ranks that differ along it alone; slices by name have the same groups."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = 2
    columns = size // rows
    mesh = dist.init_device_mesh("cpu", (rows, columns), mesh_dim_names=("dp", "tp"))
    if rank >= rows * columns:  # one too many
        assert mesh.get_coordinate() is None
        assert mesh.get_all_groups() == [dist.GroupMember.NON_GROUP_MEMBER] * 2
        assert mesh["dp"].size() == 0
        assert mesh["dp"].get_group() == dist.GroupMember.NON_GROUP_MEMBER
        with pytest.raises(RuntimeError, match="is not in DeviceMesh"):
            mesh.get_local_rank("dp")
    else:
        row, column = divmod(rank, columns)
        assert mesh.get_coordinate() == (row, column)
        assert mesh.get_local_rank("dp") == mesh.get_local_rank(0) == row
        assert mesh.get_local_rank("tp") == mesh.get_local_rank(-1) == column
        assert dist.get_process_group_ranks(mesh.get_group("dp")) == [column, column + columns]
        assert dist.get_process_group_ranks(mesh.get_group("tp")) == [row * columns + each for each in range(columns)]
        assert sum_of_ranks(mesh.get_group("dp")) == 2 * column + columns
        assert sum_of_ranks(mesh.get_group(1)) == sum(row * columns + each for each in range(columns))
        part = mesh["tp"]
        assert part.get_group() is mesh.get_group("tp")
        assert part.mesh.tolist() == [row * columns + each for each in range(columns)]
        assert part.get_local_rank() == column
        assert (mesh.size(), mesh.size(0), mesh.size(1), part.size()) == (rows * columns, rows, columns, columns)
        assert mesh["dp", "tp"] is mesh
        assert [each.group_desc for each in mesh.get_all_groups()] == [
            "default_pg" if len(line) == size else f"mesh_{name}"
            for name, line in (("dp", range(rows)), ("tp", range(columns)))
        ]
        again = dist.DeviceMesh.from_group(mesh.get_all_groups(), "cpu", mesh.mesh, mesh_dim_names=("dp", "tp"))
        assert again == mesh
        assert hash(again) == hash(mesh)
        assert mesh["dp"] != part
        assert repr(part) == f"DeviceMesh((tp={columns}), 'cpu', {part.mesh.tolist()})"
        if columns > 1:
            with pytest.raises(KeyError, match="in the order of the mesh's dimensions"):
                mesh["tp", "dp"]
        with pytest.raises(RuntimeError, match="named twice"):
            mesh["tp", "tp"]
        with pytest.raises(KeyError, match="Invalid mesh_dim_name"):
            mesh["pp"]
        with pytest.raises(RuntimeError, match="Optional kwarg `mesh_dim` needs to be specified"):
            mesh.get_group()
        with pytest.raises(IndexError):
            mesh.get_group(2)
    flat = mesh._flatten("all")
    assert flat.mesh.tolist() == list(range(rows * columns))
    if rank < rows * columns:
        assert sum_of_ranks(flat.get_group()) == sum(range(rows * columns))
    assert mesh["all"] is flat
    if rank < rows * columns:
        assert mesh.get_local_rank("all") == mesh["dp"].get_local_rank("all") == rank
        assert flat.get_group().group_desc == ("default_pg" if rows * columns == size else "mesh_all")
        with pytest.raises(KeyError, match="Invalid mesh_dim_name"):
            mesh["dp"]["all"]
    assert mesh.get_group("all") is flat.get_group() or rank >= rows * columns
    assert mesh._flatten("all") is flat
    again = mesh["tp"]._flatten("line")
    assert mesh["line"] is again
    assert again.get_group() == mesh["tp"].get_group()
    with pytest.raises(ValueError, match="is a dimension"):
        mesh._flatten("dp")
    if rank < rows * columns:
        with pytest.raises(ValueError, match="another flattened mesh"):
            mesh["tp"]._flatten("all")


def test_slices_of_three_dimensions() -> None:
    """A slice of two dimensions is flattened by each rank with those of its own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = 1 if size % 2 else 2
    length = size // parts
    mesh = dist.init_device_mesh("cpu", (parts, 1, length), mesh_dim_names=("pp", "dp", "tp"))
    part = mesh["dp", "tp"]
    assert part.shape == (1, length)
    flat = part._flatten("rest")
    mine = [rank // length * length + each for each in range(length)]
    assert flat.mesh.tolist() == mine
    assert mesh["rest"] is flat
    assert sum_of_ranks(flat.get_group()) == sum(mine)


@pytest.mark.mpi(min_size=2)
def test_by_ranks_and_from_groups() -> None:
    """A mesh of ranks in any order, and one over groups that there are."""
    size = dist.get_world_size()
    mesh = dist.DeviceMesh("cuda", [1, 0])
    if dist.get_rank() < 2:
        assert mesh.get_coordinate() == (1 - dist.get_rank(),)
        assert mesh.get_local_rank() == dist.get_group_rank(mesh.get_group(), dist.get_rank())
        assert sum_of_ranks(mesh.get_group()) == 1
    world = dist.group.WORLD
    assert world is not None
    known = dist.DeviceMesh.from_group(world, "cpu", mesh_dim_names=("dp",))
    assert known["dp"].get_group() is world
    row = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    both = dist.DeviceMesh.from_group([row, world], "cpu", [list(range(size))], mesh_dim_names=("one", "all"))
    assert both.get_group("all") is world
    for groups, ranks, names in (
        ([], None, None),
        ([row, world], None, ("a", "b")),
        ([row, world], [list(range(size))], None),
        ([world], [[0]], ("a",)),
        ([world], [0], ("a",)),
        (world, [0], None),
    ):
        with pytest.raises(ValueError):
            dist.DeviceMesh.from_group(groups, "cpu", ranks, mesh_dim_names=names)


def test_one_dimension_becomes_several() -> None:
    """Each of them has groups; the other dimensions keep theirs, and a rank outside the mesh takes part."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = 2 if size > 1 else 1
    columns = size // rows
    line = dist.init_device_mesh("cpu", (1, rows * columns), mesh_dim_names=("pp", "world"))
    mesh = line._unflatten("world", (rows, columns), ("dp", "tp"))
    part = line["world"]._unflatten(-1, (columns, rows), ("cp", "ep"))
    assert mesh.mesh_dim_names == ("pp", "dp", "tp")
    if rank >= rows * columns:
        assert mesh.get_coordinate() is part.get_coordinate() is None
    else:
        row, column = divmod(rank, columns)
        assert mesh.shape == (1, rows, columns)
        assert mesh.get_coordinate() == (0, row, column)
        assert mesh.get_group("pp") is line.get_group("pp")
        assert mesh.get_group("tp").group_desc == ("default_pg" if columns == size else "mesh_tp")
        assert sum_of_ranks(mesh.get_group("tp")) == sum(row * columns + each for each in range(columns))
        assert sum_of_ranks(mesh["dp"].get_group()) == sum(column + each * columns for each in range(rows))
        assert part.get_coordinate() == divmod(rank, rows)
        assert part.get_local_rank("ep") == rank % rows
        with pytest.raises(ValueError, match="do not make up"):
            line._unflatten("world", (rows, columns + 1), ("dp", "tp"))
    with pytest.raises(ValueError, match="is not one of"):
        line._unflatten("dp", (1, 1), ("a", "b"))
    with pytest.raises(ValueError, match="is not one of"):
        line._unflatten(2, (1, 1), ("a", "b"))
    with pytest.raises(RuntimeError, match="same length"):
        line._unflatten("world", (rows, columns), ("dp",))
    with pytest.raises(RuntimeError, match="must be unique"):
        line._unflatten("world", (rows, columns), ("dp", "pp"))


def test_wrong_meshes() -> None:
    """What cannot be laid out raises on all ranks."""
    size = dist.get_world_size()
    for shape, names, words in (
        ((size + 1,), None, "should not be bigger than default world size"),
        ((1, 1), ("a", "a"), "must be unique"),
        ((1, 1), ("a",), "should have same length"),
        ((0, 1), None, "positive"),
    ):
        with collective_raises(RuntimeError, match=words):
            dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
    with collective_raises(RuntimeError, match="without a number"):
        dist.init_device_mesh("cuda:0", (1,))
    for override in ({"pp": "gloo"}, {1: "gloo"}, {0: "gloo", "dp": "gloo"}):
        with collective_raises(RuntimeError, match="backend_override has"):
            dist.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",), backend_override=override)
    with collective_raises(ValueError, match="2 entries for 1 dimensions"):
        dist.DeviceMesh("cpu", [0], backend_override=(None, None))
    empty: Any = ([], [[], []], np.zeros((0, 2), int))
    for ranks in empty:
        with collective_raises(ValueError, match="mesh must have at least one rank, got none"):
            dist.DeviceMesh("cpu", ranks)
    with collective_raises(RuntimeError, match="one place of the mesh only"):
        dist.DeviceMesh("cpu", [0, 0])
    with collective_raises(RuntimeError, match="dimensions and 2 names"):
        dist.DeviceMesh("cpu", [0], mesh_dim_names=("a", "b"))


def test_arguments_of_wrong_types() -> None:
    """Each TypeError names the argument and what it may be; so does the IndexError of a number that is no dimension."""
    size = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (1, size), mesh_dim_names=("a", "b"))
    line = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("c",))
    wrong: Any = (5, 1.5, True, slice(1), b"a")
    in_index, in_dim, in_size = (
        "mesh[...]: needs the name of a dimension, or a tuple of names, not ",
        "mesh_dim must be the number or the name of a dimension, not ",
        "mesh_dim must be an integer, not ",
    )
    world = dist.group.WORLD
    make = dist.DeviceMesh.from_group
    for call, words in (
        (lambda: mesh[wrong[0]], f"{in_index}int"),
        (lambda: mesh["a", wrong[0]], f"{in_index}int"),
        (lambda: mesh[wrong[4]], f"{in_index}bytes"),
        *((lambda each=each: mesh.get_group(each), f"{in_dim}{type(each).__name__}") for each in wrong[1:]),
        (lambda: mesh.get_local_rank(wrong[1]), f"{in_dim}float"),
        *((lambda each=each: mesh.size(each), f"{in_size}{type(each).__name__}") for each in wrong[1:]),
        (lambda: make(world, wrong[0]), "device_type must be a string, not int"),
        (
            lambda: make(world, "cpu", [0.5]),
            "mesh must be an array of integers, or integers in lists of one length, not list of float64",
        ),
        (lambda: make(world, "cpu", mesh_dim_names=wrong[0]), "mesh_dim_names must be a tuple of strings, not int"),
        (lambda: make(world, "cpu", mesh_dim_names=wrong[:1]), "mesh_dim_names[0] must be a string, not int"),
        (lambda: mesh._flatten(wrong[0]), "mesh_dim_name must be a string, not int"),
        (lambda: line._unflatten(0, wrong[0], ("x", "y")), "mesh_sizes must be a tuple of integers, not int"),
        (lambda: line._unflatten(0, (1, size), wrong[0]), "mesh_dim_names must be a tuple of strings, not int"),
        (lambda: line._unflatten(0, (1, size), ("x", "y"), wrong[0]), "backend_override must be a dict with a backend"),
    ):
        with pytest.raises(TypeError, match=re.escape(words)):
            call()
    for number in (2, -3):
        for each in (mesh.size, mesh.get_group, mesh.get_local_rank):
            with pytest.raises(IndexError, match=f"mesh_dim is {number}, and the mesh has 2 dimensions"):
                each(number)
    for override in (5, "c", [0]):
        with collective_raises(
            TypeError, match=f"backend_override must be a dict with .*, not {type(override).__name__}"
        ):
            dist.init_device_mesh("cpu", (size,), backend_override=override)
    for override in (5, "c", {0: "gloo"}):
        with collective_raises(
            TypeError, match=f"backend_override must be a tuple of backends, not {type(override).__name__}"
        ):
            dist.DeviceMesh("cpu", [0], backend_override=override)
    for key in ("dp", 0):
        for backend in (5, True, b"mpi", ["gloo"], ("gloo", "mpi"), (5, None)):
            match = rf"backend_override\[{key!r}\] must be the name of a backend.* not {type(backend).__name__}"
            with collective_raises(TypeError, match=match):
                dist.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",), backend_override={key: backend})
    with collective_raises(ValueError, match=r"backend_override\['dp'\]: Invalid backend 'glo'"):
        dist.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",), backend_override={"dp": "glo"})
    with collective_raises(TypeError, match=r"backend_override\[1\] must be the name of a backend.* not int"):
        dist.DeviceMesh("cpu", [[0]], backend_override=("gloo", 5))
    for right in (None, "NCCL", "cpu:gloo,cuda:nccl", ("gloo", None), (None, object()), object()):
        dist.init_device_mesh("cpu", (size,), backend_override={0: right})
        dist.DeviceMesh("cpu", list(range(size)), backend_override=(right,))
    for ranks in ("ab", [0.5], [[0], [1, 2]], [True], None):
        with collective_raises(TypeError, match=f"mesh must be an array of integers, .* not {type(ranks).__name__}"):
            dist.DeviceMesh("cpu", ranks)


def test_flattened_dimensions_beside_others() -> None:
    """What was flattened is a dimension of the whole mesh: hybrid sharding and context parallelism take it so."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = 2 if size % 2 == 0 else 1
    mesh = dist.init_device_mesh("cpu", (rows, 1, size // rows), mesh_dim_names=("rep", "shard", "cp"))
    flat = mesh["shard", "cp"]._flatten("sc")
    both = mesh["rep", "sc"]
    assert both.mesh.tolist() == np.arange(size).reshape(rows, -1).tolist()
    assert both.mesh_dim_names == ("rep", "sc")
    assert both.get_group("sc") is flat.get_group()
    assert both.get_group("rep") is mesh.get_group("rep")
    assert both.get_coordinate() == divmod(rank, size // rows)
    assert sum_of_ranks(both.get_group("sc")) == sum(both.mesh[rank // (size // rows)].tolist())
    assert both["sc"].mesh.tolist() == flat.mesh.tolist()
    for overlapping in (("shard", "sc"), ("sc", "cp"), ("rep", "sc", "sc")):
        with pytest.raises(RuntimeError, match="Slicing overlapping dim_names"):
            mesh[overlapping]
    with pytest.raises(KeyError, match="Invalid mesh_dim_name"):
        mesh["rep", "cp"]["rep", "sc"]
    if rows > 1 and size > rows:
        with pytest.raises(KeyError, match="in the order of the mesh's dimensions"):
            mesh["sc", "rep"]


def test_a_dimension_of_all_ranks_is_the_world() -> None:
    """No group is made for it, nor for a whole mesh that is flattened."""
    size = dist.get_world_size()
    made = dist.get_pg_count()
    mesh = dist.init_device_mesh("cpu", (1, size), mesh_dim_names=("a", "b"))
    assert mesh.get_group("b") is dist.group.WORLD
    assert mesh._flatten("all").get_group() is dist.group.WORLD
    assert dist.get_pg_count() - made == (0 if size == 1 else size)


def test_copies_of_a_mesh() -> None:
    """A copy has the same groups, and so has one that was pickled in this program; elsewhere it cannot be read."""
    size = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (1, size), mesh_dim_names=("a", "b"))
    assert copy.deepcopy({"mesh": mesh})["mesh"] is mesh
    assert copy.copy(mesh) is mesh
    again = pickle.loads(pickle.dumps(mesh))
    assert again == mesh
    assert again.get_all_groups() == mesh.get_all_groups()
    kept = pickle.dumps(mesh)
    for each in mesh.get_all_groups()[:1]:
        if each is not dist.group.WORLD:
            dist.destroy_process_group(each)
            with pytest.raises(ValueError, match="not in this process: make the mesh again"):
                pickle.loads(kept)
