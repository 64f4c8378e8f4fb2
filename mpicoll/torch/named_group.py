"""What a process group of torch.distributed tells of itself: names, numbers, devices and options; and its hooks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore]
import torch.distributed as c10d  # type: ignore[import-not-found,unused-ignore]

from mpicoll.groups.process_group import ProcessGroup as Group
from mpicoll.torch import hooks
from mpicoll.torch.names import DEVICES, NAME


class NamedGroup(c10d.ProcessGroup):  # type: ignore[misc,unused-ignore]
    """A process group without calls.

    Args:
        group: the group of this library.
        store: the store of the group, for torch; this object only keeps it.
    """

    in_c: Any = None
    """The process group of C++ that has the hooks; None without hooks."""

    def __init__(self, group: Group, store: Any) -> None:
        super().__init__(group.rank(), group.size())
        self.group = group
        self._store = store
        self._name = group.group_name
        self._desc = group.group_desc

    # C++ calls the names with capitals.

    def rank(self) -> int:
        """Return the rank of this process in the group."""
        return self.group.rank()

    def size(self) -> int:
        """Return the number of ranks of the group."""
        return self.group.size()

    def name(self) -> str:
        """Return the name of the backend."""
        return NAME

    getRank, getSize, getBackendName = rank, size, name

    def getGroupName(self) -> str:
        """Return the name by which torch finds the group."""
        return self._name

    def getGroupDesc(self) -> str:
        """Return the description of the group."""
        return self._desc

    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    def setGroupName(self, name: str) -> None:
        """Set the name by which torch finds the group."""
        self._name = name
        if hooks.AVAILABLE:
            super()._set_group_name(name)
            if self.in_c is not None:
                self.in_c._set_group_name(name)

    def setGroupDesc(self, desc: str) -> None:
        """Set the description of the group."""
        self._desc = desc
        if hooks.AVAILABLE:
            super()._set_group_desc(desc)
            if self.in_c is not None:
                self.in_c._set_group_desc(desc)
            hooks.use_hooks_of_torch(self)  # torch sets the name first

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    def _get_backend_name(self) -> str:
        return NAME

    def _get_backend(self, device: Any) -> Any:
        return self

    @property
    def _device_types(self) -> list[Any]:
        return [torch.device(name) for name in DEVICES]

    supports_coalescing = supports_time_estimate = False
    supports_splitting = hooks.AVAILABLE
    """Whether dist.split_group() makes groups of members of this group. Before torch 2.15 it needs an accelerator."""

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Return False: the group has no memory of its own for tensors."""
        return False

    @property
    def options(self) -> Any:
        """The name and the limit of the group, as the options of a backend."""
        return hooks.options(timedelta(seconds=self.group.timeout))

    def get_group_store(self) -> Any:
        """Return the store of the group, a ``torch.distributed.Store``."""
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self.group.calls

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the calls of each group are numbered from 1."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of the calls that follow."""
        self.group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    if hooks.AVAILABLE:

        def register_pre_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
            """Call a hook before each call of the group from now on."""
            hooks.use_hooks(self).register_pre_hook(hook_id, hook)

        def register_post_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
            """Call a hook after the start of each call of the group from now on."""
            hooks.use_hooks(self).register_post_hook(hook_id, hook)

        def unregister_pre_hook(self, hook_id: int) -> None:
            """Remove the hook of a number."""
            if self.in_c is not None:
                self.in_c.unregister_pre_hook(hook_id)

        def unregister_post_hook(self, hook_id: int) -> None:
            """Remove the hook of a number."""
            if self.in_c is not None:
                self.in_c.unregister_post_hook(hook_id)
