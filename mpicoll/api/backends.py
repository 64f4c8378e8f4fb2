"""Functions of torch.distributed about backends and check levels, for the only backend, MPI."""

from __future__ import annotations

import enum
import os
from typing import Any

from mpicoll.api import job as api_job
from mpicoll.groups import registry
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.lifecycle.init import is_mpi_available
from mpicoll.memory.reduce_op import RedOpType, ReduceOp
from mpicoll.runtime import settings
from mpicoll.runtime.settings import Level, need_string


class Backend(str):
    """The name of a backend, in lower case: ``Backend("MPI") == "mpi"``. Any name is accepted, as in torch.

    Raises:
        ValueError: the name is not a string.

    Source: torch.distributed.Backend.
    """

    UNDEFINED = "undefined"
    GLOO = "gloo"
    NCCL = "nccl"
    UCC = "ucc"
    MPI = "mpi"
    XCCL = "xccl"

    backend_list = (UNDEFINED, GLOO, NCCL, XCCL, UCC, MPI)

    def __new__(cls, name: str) -> Backend:
        """Return the name in lower case."""
        if not isinstance(name, str):
            raise ValueError(f"Backend constructor parameter must be string-ish, not {type(name).__name__}")
        return super().__new__(cls, name.lower())


def get_backend_config(group: Any = None) -> str:
    """Return the backend of each device on a group: ``"cpu:mpi,cuda:mpi"``.

    Raises:
        ValueError: there is no default group, or this rank is not a member.

    Source: torch.distributed.get_backend_config.
    """
    backend = api_job.get_backend(group)
    return f"cpu:{backend},cuda:{backend}"


def get_backend_impl(group: Any = None, device: Any = None) -> ProcessGroup:
    """Return the object that makes the calls of ``group`` (default: the world) on a device: the group itself.

    Args:
        group: the group, or its ``group_name``.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, or a device of torch; None stands for all of them.

    Raises:
        ValueError: another device, no group of this name, there is no default group, or this rank is not a member.

    Source: torch.distributed.get_backend_impl of torch 2.15.
    """
    named = registry.state().groups.get(group, group) if isinstance(group, str) else group
    found = registry.resolve(named)
    if found is None:
        raise ValueError("Invalid process group specified")
    if device is not None:
        get_default_backend_for_device(device)
    return found


def is_backend_available(backend: str) -> bool:
    """Return whether a backend is available: only "mpi" is, also in the form ``"cpu:mpi,cuda:mpi"``. MPI is not started.

    ``init_process_group`` accepts the names of other backends, too, and moves all data over MPI.

    Raises:
        TypeError: ``backend`` is not a string.

    Source: torch.distributed.is_backend_available.
    """
    names = {part.rsplit(":", 1)[-1].strip() for part in need_string(backend, "backend").lower().split(",")}
    return names == {"mpi"} and is_mpi_available()


def is_gloo_available() -> bool:
    """Return False: gloo is not used (torch.distributed.is_gloo_available)."""
    return False


def is_nccl_available() -> bool:
    """Return False: NCCL is not used (torch.distributed.is_nccl_available)."""
    return False


def is_ucc_available() -> bool:
    """Return False: UCC is not used (torch.distributed.is_ucc_available)."""
    return False


def is_xccl_available() -> bool:
    """Return False: XCCL is not used (torch.distributed.is_xccl_available)."""
    return False


def is_torchelastic_launched() -> bool:
    """Return whether torchrun has started this process, and has set ``TORCHELASTIC_RUN_ID``.

    Source: torch.distributed.is_torchelastic_launched.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ


def supports_complex(reduceOp: RedOpType | ReduceOp) -> bool:
    """Return whether an op can reduce complex numbers: SUM, AVG and PREMUL_SUM can.

    Source: torch.distributed.supports_complex (of torch.distributed.distributed_c10d).
    """
    return getattr(reduceOp, "op", reduceOp) in (RedOpType.SUM, RedOpType.AVG, RedOpType.PREMUL_SUM)


def get_pg_count() -> int:
    """Return the number of groups made since ``init_process_group``, including the default group; 0 before.

    Source: torch.distributed.get_pg_count.
    """
    known = registry.current()
    return 0 if known is None else known.created + 1


class DebugLevel(enum.IntEnum):
    """The check level, by torch's names: how much of a call is compared between the ranks.

    Source: torch.distributed.DebugLevel.
    """

    OFF = 0
    INFO = 1
    DETAIL = 2

    def __str__(self) -> str:
        return f"DebugLevel.{self.name}"


_LEVELS: dict[Level, DebugLevel] = {"off": DebugLevel.OFF, "roll": DebugLevel.INFO, "full": DebugLevel.DETAIL}


def get_debug_level() -> DebugLevel:
    """Return the last level passed to :func:`set_debug_level`; if there is none, the check level of the default group.

    OFF is check level ``off``, INFO is ``roll``, DETAIL is ``full``. Before ``init_process_group`` the check level is that of
    ``MPICOLL_CHECK``. Only :func:`set_debug_level_from_env` reads ``TORCH_DISTRIBUTED_DEBUG``.

    Source: torch.distributed.get_debug_level.
    """
    if settings.asked_level is not None:
        return _LEVELS[settings.asked_level]
    known = registry.current()
    return _LEVELS[settings.read_settings().check if known is None else known.world.level]


def set_debug_level(level: DebugLevel) -> None:
    """Set the check level of the next ``init_process_group`` without ``check=``.

    All ranks call this function with the same level before ``init_process_group``, which compares the levels. Existing groups
    keep the level on which their ranks agreed. The level replaces ``MPICOLL_CHECK`` for the rest of the program.

    Raises:
        TypeError: not a :class:`DebugLevel` (as in torch).

    Source: torch.distributed.set_debug_level.
    """
    if not isinstance(level, DebugLevel):
        raise TypeError(f"level must be a DebugLevel such as DebugLevel.DETAIL, not {type(level).__name__}")
    settings.asked_level = next(name for name, each in _LEVELS.items() if each is level)


def set_debug_level_from_env() -> None:
    """Call :func:`set_debug_level` with the level in ``TORCH_DISTRIBUTED_DEBUG``; if not set, return to ``MPICOLL_CHECK``.

    Raises:
        ValueError: the variable is none of OFF, INFO and DETAIL (as in torch).

    Source: torch.distributed.set_debug_level_from_env.
    """
    word = os.environ.get("TORCH_DISTRIBUTED_DEBUG")
    if word is None:
        settings.asked_level = None
        return
    if word.upper() not in DebugLevel.__members__:
        raise ValueError(f"The value of TORCH_DISTRIBUTED_DEBUG must be OFF, INFO, or DETAIL, got {word!r}")
    set_debug_level(DebugLevel[word.upper()])


def get_default_backend_for_device(device: Any) -> str:
    """Return ``"mpi"``, the backend for arrays on every supported device.

    Args:
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or a device of torch.

    Raises:
        ValueError: another device.

    Source: torch.distributed.get_default_backend_for_device.
    """
    if str(device).partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"Default backend not registered for device : {device}")
    return "mpi"
