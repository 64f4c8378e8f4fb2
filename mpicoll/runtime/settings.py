"""The MPICOLL_* environment variables, read once into a frozen Settings."""

from __future__ import annotations

import difflib
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Literal, cast

from mpicoll.runtime.call_site import PACKAGE

Level = Literal["full", "roll", "off"]
LEVELS: tuple[Level, ...] = ("full", "roll", "off")
"""How much of what the ranks call is compared; see MPICOLL_CHECK."""

asked_level: Level | None = None
"""What ``set_debug_level`` has asked for, in the place of MPICOLL_CHECK."""

Engine = Literal["auto", "mpi", "node"]
ENGINES: tuple[Engine, ...] = ("auto", "mpi", "node")
"""What moves data between ranks of one node; see MPICOLL_ENGINE."""

Cuda = Literal["auto", "off", "aware"]
CUDA: tuple[Cuda, ...] = ("auto", "off", "aware")
"""Whether memory of a GPU is handed to MPI; see MPICOLL_CUDA."""

CudaIpc = Literal["auto", "off"]
CUDA_IPC: tuple[CudaIpc, ...] = ("auto", "off")
"""Whether ranks that share a GPU reduce on it; see MPICOLL_CUDA_IPC."""

Extension = Literal["auto", "off"]
EXTENSION: tuple[Extension, ...] = ("auto", "off")
"""Whether the C extension is used; see MPICOLL_EXTENSION."""

Progress = Literal["none", "thread"]
PROGRESS: tuple[Progress, ...] = ("none", "thread")
"""What moves operations on while the program computes; see MPICOLL_PROGRESS."""


def to_seconds(value: float | int | timedelta, name: str = "timeout") -> float:
    """Return a positive limit in seconds from a number of seconds or a timedelta."""
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value)
    else:
        raise TypeError(f"{name} must be a number of seconds or a datetime.timedelta, not {type(value).__name__}")
    if not seconds > 0:
        raise ValueError(f"{name} must be positive, got {value!r}")
    return seconds


def _seconds(text: str) -> float:
    return to_seconds(float(text))


def _flag(text: str) -> bool:
    known = {"0": False, "false": False, "no": False, "off": False, "1": True, "true": True, "yes": True, "on": True}
    return known[text.strip().lower()]


def _level(text: str) -> Level:
    return {level: level for level in LEVELS}[cast("Level", text.strip().lower())]


def _engine(text: str) -> Engine:
    return {engine: engine for engine in ENGINES}[cast("Engine", text.strip().lower())]


def _cuda(text: str) -> Cuda:
    return {choice: choice for choice in CUDA}[cast("Cuda", text.strip().lower())]


def _cuda_ipc(text: str) -> CudaIpc:
    return {choice: choice for choice in CUDA_IPC}[cast("CudaIpc", text.strip().lower())]


def _progress(text: str) -> Progress:
    return {choice: choice for choice in PROGRESS}[cast("Progress", text.strip().lower())]


def _extension(text: str) -> Extension:
    return {choice: choice for choice in EXTENSION}[cast("Extension", text.strip().lower())]


def _megabytes(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError("must not be negative")
    return value


@dataclass(frozen=True)
class Setting:
    """One environment variable: its name, reader, default, the values it takes and what it does."""

    variable: str
    field: str
    parse: Callable[[str], Any]
    default: Any
    values: str
    meaning: str


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "MPICOLL_TIMEOUT",
        "timeout",
        _seconds,
        1800.0,
        "seconds > 0",
        "limit of every wait of the default group, and of groups made from it",
    ),
    Setting(
        "MPICOLL_STALL_WARN",
        "stall_warn",
        _seconds,
        60.0,
        "seconds > 0",
        "a rank that has waited this long says once who is missing",
    ),
    Setting(
        "MPICOLL_EXIT_GRACE",
        "exit_grace",
        _seconds,
        30.0,
        "seconds > 0",
        "how long ranks that handle another rank's failure may go on before the job ends",
    ),
    Setting(
        "MPICOLL_CHECK",
        "check",
        _level,
        "full",
        "full, roll or off",
        "what is compared between the ranks: every call before data moves, a rolling fingerprint every 16 calls, or nothing",
    ),
    Setting(
        "MPICOLL_JOB_END",
        "job_end",
        _seconds,
        0.0,
        "seconds since 1970",
        "when the job has to end, for `time_left` and `should_stop`; 0: the batch system is asked",
    ),
    Setting(
        "MPICOLL_ENGINE",
        "engine",
        _engine,
        "auto",
        "auto, mpi or node",
        "what moves data between ranks of one node: the faster one for each call, MPI always, or shared memory always",
    ),
    Setting(
        "MPICOLL_PROFILE",
        "profile",
        str,
        "",
        "a file, or none",
        "what `mpicoll tune` has measured; by default mpicoll/profiles.json in ~/.config, if it is there",
    ),
    Setting(
        "MPICOLL_SHM_MB",
        "shm_mb",
        _megabytes,
        256,
        "MiB >= 0",
        "shared memory that the groups on one node may take in all",
    ),
    Setting(
        "MPICOLL_CUDA",
        "cuda",
        _cuda,
        "auto",
        "auto, off or aware",
        "whether MPI is handed memory of a GPU: where something proves that it knows of it, never, or always",
    ),
    Setting(
        "MPICOLL_CUDA_IPC",
        "cuda_ipc",
        _cuda_ipc,
        "auto",
        "auto or off",
        "whether ranks that share a GPU reduce large arrays on it: where CUDA proves to give them memory in common, or never",
    ),
    Setting(
        "MPICOLL_PINNED_MB",
        "pinned_mb",
        _megabytes,
        256,
        "MiB >= 0",
        "pinned host memory through which a rank moves arrays on a GPU; beyond it, ordinary memory",
    ),
    Setting(
        "MPICOLL_EXTENSION",
        "extension",
        _extension,
        "auto",
        "auto or off",
        "whether the ranks of a node use shared memory, which the C extension does: if all have it, or never (then MPI)",
    ),
    Setting(
        "MPICOLL_PROGRESS",
        "progress",
        _progress,
        "none",
        "none or thread",
        "what moves operations under way on while the program computes: nothing, or a thread of the library",
    ),
    Setting(
        "MPICOLL_STRICT",
        "strict",
        _flag,
        False,
        "0 or 1",
        "an unknown MPICOLL_ variable is an error instead of a warning",
    ),
)

# Variables that the library itself passes from a launcher or a rank to its children: not settings.
INTERNAL = frozenset({"MPICOLL_RANK_PID", "MPICOLL_RUN_DIR"})


@dataclass(frozen=True)
class Settings:
    """What the environment asks for, in seconds where it is a time."""

    timeout: float = 1800.0
    stall_warn: float = 60.0
    exit_grace: float = 30.0
    check: Level = "full"
    job_end: float = 0.0
    engine: Engine = "auto"
    profile: str = ""
    shm_mb: int = 256
    cuda: Cuda = "auto"
    cuda_ipc: CudaIpc = "auto"
    pinned_mb: int = 256
    extension: Extension = "auto"
    progress: Progress = "none"
    strict: bool = False


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read every MPICOLL_ variable of ``environ`` (default: the process environment).

    Raises:
        ValueError: a known variable has a value that it does not take, or, with ``MPICOLL_STRICT=1``, a variable is
            unknown. Without it an unknown variable gives one warning that names the nearest known one.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for setting in SETTINGS:
        text = environ.get(setting.variable)
        if text is None:
            continue
        try:
            values[setting.field] = setting.parse(text)
        except (KeyError, ValueError):
            message = f"{setting.variable}={text!r} is not a value it takes ({setting.values})"
            raise ValueError(message) from None
    if asked_level is not None:
        values["check"] = asked_level
    settings = Settings(**values)
    known = {setting.variable for setting in SETTINGS}
    unknown = sorted(name for name in environ if name.startswith("MPICOLL_") and name not in known | INTERNAL)
    if unknown:
        message = "; ".join(_unknown(name, known) for name in unknown)
        if settings.strict:
            raise ValueError(message)
        warn_caller(message)
    return settings


def warn_caller(message: str) -> None:
    """Warn at the line outside this package that led here."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)


def _unknown(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f"{name} is not a variable of this version of mpicoll; the nearest it knows is {near[0]}"


assert {field.name for field in fields(Settings)} == {setting.field for setting in SETTINGS}
