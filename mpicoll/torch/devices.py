"""Groups with one backend for each kind of device, as ``init_process_group("cpu:mpicoll,cuda:nccl")`` asks for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import signature
from types import FrameType, FunctionType
from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore]
import torch.distributed as c10d  # type: ignore[import-not-found,unused-ignore]
from torch.distributed import distributed_c10d  # type: ignore[import-not-found,unused-ignore]

from mpicoll.groups.process_group import ProcessGroup as Group
from mpicoll.torch.names import NAME
from mpicoll.torch.process_group import ProcessGroup
from mpicoll.torch.work import tensors_in


def other_backends() -> dict[str, str]:
    """Return the backends that the caller of :func:`mpicoll.torch.backend.create` wants for other devices.

    torch 2.13 replaces the whole process group by a group that is made in Python, and does not say which other backends were
    asked for. They are read from the function of torch that makes the group; {} if it has no such variable.
    """
    frame: FrameType | None = sys._getframe(1)
    maker = distributed_c10d._new_process_group_helper.__code__
    while frame is not None and frame.f_code is not maker:
        frame = frame.f_back
    config = None if frame is None else frame.f_locals.get("backend_config")
    found = config.get_device_backend_map() if isinstance(config, distributed_c10d.BackendConfig) else {}
    return {device: str(name) for device, name in found.items() if name != NAME}


def with_others(group: Group, others: dict[str, str], opts: Any, *, owns: bool) -> ProcessGroup:
    """Return a process group that passes the calls of tensors on other devices to groups of other backends.

    Args:
        others: the backend of each such device.
        opts: of the function that torch calls to make a group.
    """
    made: dict[str, Any] = {}
    for name in dict.fromkeys(others.values()):
        full = f"{opts.group_id}:{name}"
        made[name], _ = distributed_c10d._new_process_group_helper(
            opts.group_size,
            opts.group_rank,
            list(opts.global_ranks_in_group),
            c10d.Backend(name),
            opts.store,
            full,
            timeout=opts.timeout,
            group_desc=full,
        )
        distributed_c10d._world.pg_group_ranks[made[name]] = {rank: at for at, rank in enumerate(group.ranks)}
    return ByDevice(group, {device: made[name] for device, name in others.items()}, owns=owns, store=opts.store)


class ByDevice(ProcessGroup):
    """A process group with other backends for other kinds of devices.

    Args:
        group, owns, store: as of :class:`mpicoll.torch.process_group.ProcessGroup`.
        others: process groups of the same ranks, by the type of the device.
    """

    def __init__(self, group: Group, others: dict[str, Any], *, owns: bool, store: Any) -> None:
        self._others = others
        super().__init__(group, owns=owns, store=store)

    def backends(self) -> dict[str, Any]:
        """Return the backends of the group for C++, by the type of the device."""
        # Each of these groups has one backend, which torch has registered for the devices that it knows of the backend.
        others = {device: other._get_backend(other._device_types[0]) for device, other in self._others.items()}
        return super().backends() | others

    def passes_on(self, given: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """Return whether the group of another backend makes a call with these arguments."""
        return _device_of(given, named) in self._others

    def _get_backend(self, device: Any) -> Any:
        other = self._others.get(torch.device(device).type)
        return self if other is None else other._get_backend(device)

    def shutdown(self) -> None:
        """Wait for the calls that are under way, and destroy the groups of this object."""
        super().shutdown()
        for other in set(self._others.values()):
            if other in distributed_c10d._world.pg_map and c10d.group.WORLD is not self:
                c10d.destroy_process_group(other)


def _device_of(given: tuple[Any, ...], named: dict[str, Any]) -> str:
    return next((each.device.type for each in tensors_in((*given, *named.values()))), "")


def _by_device(name: str) -> Callable[..., Any]:
    own = getattr(ProcessGroup, name)

    def call(self: ByDevice, *given: Any, **named: Any) -> Any:
        other = self._others.get(_device_of(given, named))
        return own(self, *given, **named) if other is None else getattr(other, name)(*given, **named)

    call.__name__, call.__doc__ = name, own.__doc__
    return call


for _name, _method in tuple(vars(ProcessGroup).items()):
    # The methods that take tensors, as their first argument or as the place of their result.
    if isinstance(_method, FunctionType) and "".join([*signature(_method).parameters][1:2]).startswith(
        ("tensors", "output")
    ):
        setattr(ByDevice, _name, _by_device(_name))
