"""The ranks that share a leader block, and their group."""

from __future__ import annotations

from typing import Any, Literal

from mpicoll.groups import registry
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.groups.registry import JobWithGroups
from mpicoll.operations import execution
from mpicoll.operations.group_creation import Watch, group_of_node
from mpicoll.runtime.call_site import CallSite
from mpicoll.runtime.settings import has_type

Scope = Literal["world", "node"] | ProcessGroup


class Members:
    """The ranks of a scope and their group. The ranks of a node make their group when a block first needs the group.

    Attributes:
        me: this rank's global rank.
        ranks: global ranks, the leader first.
        key: equal for equal scopes.
        known_group: the group, or None if it has not been made yet.
        display: the group's name in messages.
    """

    def __init__(self, known: JobWithGroups, scope: Any) -> None:
        self.known = known
        self.me = known.world.rank()
        is_name = has_type(scope, str)
        if is_name and scope == "node":
            self.ranks, self.key, self.known_group = known.topology.local_ranks, "node", known.node
            self.display = f"node {known.topology.hosts[known.topology.node]}"
            return
        if is_name and scope != "world":
            raise ValueError(f'scope must be "world", "node" or a ProcessGroup, not {scope!r}')
        group = known.world if is_name else registry.resolve(scope)
        if group is None:
            raise ValueError(f"rank {self.me} is not in the group given as scope: only members may run the block")
        self.ranks, self.key, self.known_group, self.display = group.ranks, group.group_name, group, group.display

    def group(self, op: str, site: CallSite, watch: Watch | None = None) -> ProcessGroup:
        """Return the group; make the group of a node if necessary, which all ranks of the node must do."""
        if self.known_group is None:
            self.known_group = group_of_node(self.known, op, site, watch)
        return self.known_group

    def check_usable(self, op: str) -> None:
        """Raise an error if this process or thread may not communicate, or if the group cannot be used."""
        execution.enter(self.known_group or self.known.world, op)

    def host(self, rank: int) -> str:
        """Return the name of the host of a global rank."""
        topology = self.known.topology
        return topology.hosts[topology.node_of[rank]]
