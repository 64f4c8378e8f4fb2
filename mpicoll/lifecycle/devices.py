"""Select the GPU of a rank, and warn if ranks share a GPU while GPUs are idle."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from mpicoll.groups import registry
from mpicoll.launch.environment import local_rank_hint
from mpicoll.memory.device import runtime as device_runtime
from mpicoll.runtime.settings import warn_caller

Chosen = tuple[str, int]
"""The bus address of the GPU that a rank has selected ("": none), and the number of GPUs that it sees."""

_chosen: Chosen = "", 0


def chosen() -> Chosen:
    """Return the GPU that this process has selected."""
    return _chosen


def count() -> int:
    """Return the number of GPUs that this rank sees; raise ImportError if CuPy is not installed, or finds none."""
    return device_runtime.runtime().count()


def select_device(device: Any = None) -> int:
    """Select this rank's GPU: the current device of CuPy, and of torch if torch is imported.

    Each rank calls the function by itself, before or after :func:`mpicoll.init_process_group`. It does not communicate.

    Args:
        device: its number among the GPUs that this rank sees, or ``"cuda:1"``, a ``torch.device`` or a ``cupy.cuda.Device``. By
            default the local rank modulo the number of GPUs that this rank sees: if it sees one GPU, that GPU.

    Returns:
        The number of the device.

    Raises:
        RuntimeError: CuPy is not installed, or finds no GPU.
        ValueError: there is no such device.
        TypeError: ``device`` names no device of CUDA.

    If ranks have called `select_device` before ``init_process_group``, ``init_process_group`` warns if ranks of a node share a
    GPU while GPUs are idle. The device is current for the calling thread, as in CUDA.

    Source: torch.cuda.set_device; cupy.cuda.Device.use.
    """
    global _chosen
    try:
        gpu = device_runtime.runtime()
    except ImportError as error:
        raise RuntimeError(f"select_device: {error}") from error
    count = gpu.count()
    number = _local_rank() % count if device is None else _number(device)
    if not 0 <= number < count:
        raise ValueError(f"select_device: there is no device {number}: this rank sees {count}, numbered from 0")
    gpu.use(number)
    _chosen = gpu.bus(number), count
    return number


def _local_rank() -> int:
    if registry.current() is not None:
        return registry.state().topology.local_rank
    return local_rank_hint(os.environ) or 0


def _number(device: Any) -> int:
    if isinstance(device, str):
        kind, _, number = device.partition(":")
        if kind == "cuda" and (not number or number.isdecimal()):
            return int(number) if number else _local_rank() % device_runtime.runtime().count()
    elif isinstance(getattr(device, "type", None), str) and hasattr(device, "index"):  # torch.device
        if device.type == "cuda":
            return _number("cuda") if device.index is None else int(device.index)
    elif isinstance(getattr(device, "id", None), int):  # cupy.cuda.Device
        return int(device.id)
    elif hasattr(device, "__index__") and not isinstance(device, bool):
        return int(device)
    raise TypeError(f"select_device: {device!r} names no device of CUDA: pass its number")


def idle_while_shared(devices: Sequence[Chosen], node_of: Sequence[int], hosts: Sequence[str]) -> list[tuple[int, str]]:
    """Return the lowest rank that shares a GPU, and a warning, for each node with idle GPUs.

    Args:
        devices: the selected GPU of each rank of the world.
        node_of, hosts: as in :class:`mpicoll.transports.topology.Topology`.
    """
    found = []
    for node, host in enumerate(hosts):
        ranks = [rank for rank, its_node in enumerate(node_of) if its_node == node and devices[rank][0]]
        users: dict[str, list[int]] = {}
        for rank in ranks:
            users.setdefault(devices[rank][0], []).append(rank)
        bus, sharing = max(users.items(), key=lambda item: len(item[1]), default=("", []))
        idle = max((devices[rank][1] for rank in ranks), default=0) - len(users)
        if len(sharing) > 1 and idle > 0:
            names = ", ".join(map(str, sharing[:8])) + (", …" if len(sharing) > 8 else "")
            found.append(
                (
                    sharing[0],
                    f"ranks {names} on {host} share the GPU at {bus}, while {idle} that they see {'is' if idle == 1 else 'are'} "
                    "idle: call select_device() without a number, or select another GPU on each rank",
                )
            )
    return found


def warn_of_sharing(rank: int, devices: Sequence[Chosen], node_of: Sequence[int], hosts: Sequence[str]) -> None:
    """Warn, on one rank of each node, if ranks share a GPU while GPUs are idle."""
    for reporter, text in idle_while_shared(devices, node_of, hosts):
        if reporter == rank:
            warn_caller(text)
