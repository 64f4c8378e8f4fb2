"""Nodes come from MPI, alike on all ranks."""

from __future__ import annotations

import os

import numpy as np
import pytest

import mpicoll as dist
from mpicoll.groups import registry
from mpicoll.lifecycle.endpoint import endpoint_of


@pytest.mark.mpi
def test_node_table_is_the_same_everywhere() -> None:
    """All ranks hold the same node table, numbered by lowest rank, and local ranks count from 0 on each node."""
    topology = registry.state().topology
    size = dist.get_world_size()
    told: list[object] = [None] * size
    dist.all_gather_object(told, (topology.node_of, topology.hosts, topology.local_rank, dist.get_node_local_rank()))
    assert len({entry[:2] for entry in told}) == 1  # type: ignore[index]
    node_of = topology.node_of
    firsts = [node_of.index(node) for node in range(max(node_of) + 1)]
    assert firsts == sorted(firsts)
    for rank, (_, _, local, asked) in enumerate(told):  # type: ignore[misc]
        assert local == asked == [r for r in range(size) if node_of[r] == node_of[rank]].index(rank)


@pytest.mark.mpi
def test_mpich_cliques_are_nodes() -> None:
    """Where MPICH imitates several nodes the table has as many, with the ranks dealt in turn."""
    cliques = int(os.environ.get("MPIR_CVAR_NUM_CLIQUES", "1"))
    if cliques > dist.get_world_size():
        pytest.skip("fewer ranks than imitated nodes")
    assert registry.state().topology.node_of == tuple(r % cliques for r in range(dist.get_world_size()))


@pytest.mark.mpi
def test_node_communicator_is_made_once() -> None:
    """The communicator of a node holds its ranks in order, and asking again makes no other."""
    state = registry.state()
    base = endpoint_of(state.board)
    comm = base.node_communicator(state.world.pair.control)
    assert comm is base.node_communicator(state.world.pair.control)
    assert comm.Get_size() == len(state.topology.local_ranks)
    assert comm.Get_rank() == state.topology.local_rank
    ranks = np.empty(comm.Get_size(), np.int64)
    comm.Allgather(np.array([dist.get_rank()]), ranks)
    assert tuple(ranks) == state.topology.local_ranks


@pytest.mark.mpi
def test_the_groups_of_a_node_and_of_the_first_ranks() -> None:
    """Each is made once, by its members alone, and anew when it has been destroyed; collectives and blocks work on it."""
    topology, me = registry.state().topology, dist.get_rank()
    firsts = [topology.node_of.index(node) for node in range(max(topology.node_of) + 1)]
    for _ in range(2):
        node = dist.node_group()
        assert dist.node_group() is node
        assert tuple(dist.get_process_group_ranks(node)) == topology.local_ranks
        leaders = dist.leaders_group()
        assert (leaders is dist.GroupMember.NON_GROUP_MEMBER) == (me not in firsts)
        # A sum over all ranks in three steps: over each node, over the nodes, and back.
        x = np.full(3, float(me))
        dist.reduce(x, group=node, group_dst=0)
        if me in firsts:
            assert dist.leaders_group() is leaders
            assert dist.get_process_group_ranks(leaders) == firsts
            dist.all_reduce(x, group=leaders)
        dist.broadcast(x, group=node, group_src=0)
        assert (x == sum(range(dist.get_world_size()))).all()
        with dist.zero_first(scope="node") as turn:
            assert turn.is_leader == (me in firsts)
        if me in firsts:
            dist.destroy_process_group(leaders)
        dist.destroy_process_group(node)
