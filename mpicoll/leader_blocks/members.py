"""The ranks that share a leader block, and their group."""

from __future__ import annotations

from typing import Any, Literal

from mpicoll.groups import registry
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.groups.registry import JobWithGroups
from mpicoll.operations import execution
from mpicoll.operations.group_creation import Watch, group_of_node
from mpicoll.runtime.call_site import Site

Scope = Literal["world", "node"] | ProcessGroup


class Members:
    """The ranks of a scope and their group. The group of a node is made when it is first needed, by the node's ranks only.

    Attributes:
        ranks: global ranks, the leader first.
        key: equal for equal scopes.
        display: the group's name in messages.
    """

    def __init__(self, known: JobWithGroups, scope: Any) -> None:
        self.known = known
        self._group: ProcessGroup | None = None
        if isinstance(scope, str) and scope == "node":
            self.ranks: tuple[int, ...] = known.topology.local_ranks
            self.key = "node"
            self.display = f"node {known.topology.hosts[known.topology.node]}"
            self._group = known.node
        elif isinstance(scope, str) and scope == "world":
            self._use(known.world)
        elif isinstance(scope, str):
            raise ValueError(f'scope must be "world", "node" or a ProcessGroup, not {scope!r}')
        else:
            found = registry.resolve(scope)
            if found is None:
                raise ValueError(
                    f"rank {known.world.rank()} is not in the group given as scope: only its members may run the block"
                )
            self._use(found)

    def _use(self, group: ProcessGroup) -> None:
        self.ranks, self.key, self.display, self._group = group.ranks, group.group_name, group.display, group

    @property
    def me(self) -> int:
        """This rank's global rank."""
        return self.known.world.rank()

    @property
    def known_group(self) -> ProcessGroup | None:
        """The group, or None if the group has not been made yet."""
        return self._group

    def group(self, op: str, site: Site, watch: Watch | None = None) -> ProcessGroup:
        """Return the group; make the group of a node if necessary, which all ranks of the node must do."""
        if self._group is None:
            self._group = group_of_node(self.known, op, site, watch)
        return self._group

    def check_usable(self, op: str) -> None:
        """Raise an error if this process or thread may not communicate, or if the group cannot be used."""
        execution.enter(self._group or self.known.world, op)

    def host(self, rank: int) -> str:
        """Return the name of the host of a global rank."""
        topology = self.known.topology
        return topology.hosts[topology.node_of[rank]]
