"""What scripts ask of torch.distributed about backends and levels, answered for the one backend that there is."""

from __future__ import annotations

import enum
import os
from typing import Any

from mpicoll.api import job as api_job
from mpicoll.groups import registry
from mpicoll.lifecycle.init import is_mpi_available
from mpicoll.memory.reduce_op import RedOpType, ReduceOp
from mpicoll.runtime import settings
from mpicoll.runtime.settings import Level


class Backend(str):
    """The name of a backend, in lower case: ``Backend("MPI") == "mpi"``; every name is taken, as in torch.

    Raises:
        ValueError: the name is no string.

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
    """Return which backend serves which device on a group: ``"cpu:mpi,cuda:mpi"``.

    Raises:
        ValueError: there is no default group, or this rank is not a member.

    Source: torch.distributed.get_backend_config.
    """
    backend = api_job.get_backend(group)
    return f"cpu:{backend},cuda:{backend}"


def is_backend_available(backend: str) -> bool:
    """Whether a backend is there: "mpi" alone is, also in the form ``"cpu:mpi,cuda:mpi"``; nothing is started.

    ``init_process_group`` takes the names of others all the same, and moves everything over MPI.

    Source: torch.distributed.is_backend_available.
    """
    names = {part.rsplit(":", 1)[-1].strip() for part in backend.lower().split(",")}
    return names == {"mpi"} and is_mpi_available()


def is_gloo_available() -> bool:
    """Whether gloo is there: never (torch.distributed.is_gloo_available)."""
    return False


def is_nccl_available() -> bool:
    """Whether NCCL is there: never (torch.distributed.is_nccl_available)."""
    return False


def is_ucc_available() -> bool:
    """Whether UCC is there: never (torch.distributed.is_ucc_available)."""
    return False


def is_xccl_available() -> bool:
    """Whether XCCL is there: never (torch.distributed.is_xccl_available)."""
    return False


def is_torchelastic_launched() -> bool:
    """Whether torchrun has started this process: ``TORCHELASTIC_RUN_ID`` is set (torch.distributed.is_torchelastic_launched)."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def supports_complex(reduceOp: RedOpType | ReduceOp) -> bool:
    """Whether complex numbers can be reduced by an op: SUM, AVG and PREMUL_SUM.

    Source: torch.distributed.supports_complex (of torch.distributed.distributed_c10d).
    """
    return getattr(reduceOp, "op", reduceOp) in (RedOpType.SUM, RedOpType.AVG, RedOpType.PREMUL_SUM)


def get_pg_count() -> int:
    """Return how many groups have been made since ``init_process_group``, the default group among them; 0 before it.

    Source: torch.distributed.get_pg_count.
    """
    known = registry.current()
    return 0 if known is None else known.created + 1


class DebugLevel(enum.IntEnum):
    """How much is compared between the ranks, in torch's words.

    Source: torch.distributed.DebugLevel.
    """

    OFF = 0
    INFO = 1
    DETAIL = 2

    def __str__(self) -> str:
        return f"DebugLevel.{self.name}"


_LEVELS: dict[Level, DebugLevel] = {"off": DebugLevel.OFF, "roll": DebugLevel.INFO, "full": DebugLevel.DETAIL}


def get_debug_level() -> DebugLevel:
    """Return the level that :func:`set_debug_level` was called with last; else the check level of the default group.

    The check levels are OFF for ``off``, INFO for ``roll``, DETAIL for ``full``. Before ``init_process_group`` it is that of
    ``MPICOLL_CHECK``. ``TORCH_DISTRIBUTED_DEBUG`` is looked at by :func:`set_debug_level_from_env` alone.

    Source: torch.distributed.get_debug_level.
    """
    if settings.asked_level is not None:
        return _LEVELS[settings.asked_level]
    known = registry.current()
    return _LEVELS[settings.read_settings().check if known is None else known.world.level]


def set_debug_level(level: DebugLevel) -> None:
    """Set the check level that the next ``init_process_group`` takes, where it is not called with ``check=``.

    Called by all ranks alike, before ``init_process_group``, which compares it. The groups that there are keep theirs, as their
    ranks have agreed on it. It stands in the place of ``MPICOLL_CHECK`` for the rest of the program.

    Raises:
        TypeError: not a :class:`DebugLevel` (as torch).

    Source: torch.distributed.set_debug_level.
    """
    if not isinstance(level, DebugLevel):
        raise TypeError(f"level must be a DebugLevel such as DebugLevel.DETAIL, not {type(level).__name__}")
    settings.asked_level = next(name for name, each in _LEVELS.items() if each is level)


def set_debug_level_from_env() -> None:
    """Call :func:`set_debug_level` with what ``TORCH_DISTRIBUTED_DEBUG`` names; without it ``MPICOLL_CHECK`` counts again.

    Raises:
        ValueError: it is none of OFF, INFO and DETAIL (as torch).

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
    """Return ``"mpi"``, for devices whose arrays it takes: ``"cpu"``, ``"cuda:1"`` or a device of torch.

    Raises:
        ValueError: another device.

    Source: torch.distributed.get_default_backend_for_device.
    """
    if str(device).partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"Default backend not registered for device : {device}")
    return "mpi"
