"""The MPICOLL_* environment variables, read once into a frozen Settings."""

from __future__ import annotations

import difflib
import operator
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, Literal, get_args

from mpicoll.runtime.call_site import program_level

Level = Literal["full", "roll", "off"]
LEVELS: tuple[Level, ...] = ("full", "roll", "off")
"""How many of the ranks' calls are compared; see MPICOLL_CHECK."""

asked_level: Level | None = None
"""The check level of ``set_debug_level``, which replaces MPICOLL_CHECK; None: not called."""

Engine = Literal["auto", "mpi", "node"]
Cuda = Literal["auto", "off", "aware"]
AutoOrOff = Literal["auto", "off"]
Progress = Literal["none", "thread"]
Leftover = Literal["error", "warn"]
# What the values mean: see Settings.


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


def has_type(value: Any, *types: type) -> bool:
    """Return whether a value is of one of the types. The value is not looked at, as ``isinstance`` does: it may raise."""
    return issubclass(type(value), types)


def need_integer(value: Any, name: str) -> None:
    """Raise TypeError, which names the parameter, unless the value is an integer; a bool is none."""
    try:
        operator.index(value)
    except TypeError:  # also of an array of several elements
        is_integer = False
    else:
        is_integer = not isinstance(value, bool)
    if not is_integer:
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}")


def need_bool(value: Any, name: str) -> bool:
    """Return the truth of a value. If it has none, as an array has none, raise the error of the value, naming the parameter."""
    try:
        return bool(value)
    except Exception as error:
        if type(error) not in (TypeError, ValueError):
            raise
        raise type(error)(f"{name}: {error}") from error


def need_timedelta(timeout: Any, *, positive: bool = False) -> timedelta:
    """Return a limit as the program gave it.

    Raises:
        TypeError: not a timedelta (as in torch).
        ValueError: negative, as of a deadline that has passed; or not positive, if it has to be.
    """
    if not isinstance(timeout, timedelta):
        number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
        hint = f": pass datetime.timedelta(seconds={timeout!r})" if number else ""
        raise TypeError(f"Expected timeout argument to be of type datetime.timedelta, got {timeout!r}{hint}")
    if timeout.days < 0 and not positive:
        raise ValueError(f"timeout must not be negative, got {timeout.total_seconds():g} seconds")
    if positive and timeout <= timedelta(0):
        raise ValueError(f"timeout must be positive, got {timeout}")
    return timeout


def need_string(value: Any, name: str) -> str:
    """Return a string; raise TypeError, which names the parameter, for anything else."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, not {type(value).__name__}")
    return value


def _seconds(text: str) -> float:
    return to_seconds(float(text))


def _flag(text: str) -> bool:
    known = {"0": False, "false": False, "no": False, "off": False, "1": True, "true": True, "yes": True, "on": True}
    return known[text.strip().lower()]


def _one_of(words: Any) -> Callable[[str], str]:
    """Return a reader that accepts the words of a Literal."""
    return lambda text: {choice: choice for choice in get_args(words)}[text.strip().lower()]


def _megabytes(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError("must not be negative")
    return value


@dataclass(frozen=True)
class Setting:
    """One setting: its environment variable, reader, default, accepted values and meaning. README.md lists them."""

    variable: str
    parse: Callable[[str], Any]
    default: Any
    values: str
    meaning: str

    @property
    def field(self) -> str:
        """The name of the setting in :class:`Settings`: MPICOLL_EXIT_GRACE is ``exit_grace``."""
        return self.variable.removeprefix("MPICOLL_").lower()


def _setting(parse: Callable[[str], Any], default: Any, values: str, meaning: str) -> Any:
    return field(default=default, metadata={"parse": parse, "values": values, "meaning": meaning})


@dataclass(frozen=True)
class Settings:
    """The value of each setting, from the variable of its name: ``exit_grace`` is MPICOLL_EXIT_GRACE. Times are in seconds."""

    timeout: float = _setting(
        _seconds,
        1800.0,
        "seconds > 0",
        "time limit of every wait of the default group, of groups made from it, and of stores (these: 300 if it is not set)",
    )
    stall_warn: float = _setting(
        _seconds, 60.0, "seconds > 0", "a rank that has waited this long prints once which ranks are missing"
    )
    exit_grace: float = _setting(
        _seconds,
        30.0,
        "seconds > 0",
        "how long ranks that handle another rank's failure may continue before the job ends",
    )
    check: Level = _setting(
        _one_of(Level),
        "full",
        "full, roll or off",
        "what the ranks compare: every call before data moves, a rolling fingerprint every 16 calls, or nothing",
    )
    leftover: Leftover = _setting(
        _one_of(Leftover),
        "error",
        "error or warn",
        "what a message that no rank has received is at the end of the program: an error with exit code 1, or a warning",
    )
    job_end: float = _setting(
        _seconds,
        0.0,
        "seconds since 1970",
        "the end of the job, for `time_left` and `should_stop`; 0: the batch system is asked",
    )
    engine: Engine = _setting(
        _one_of(Engine),
        "auto",
        "auto, mpi or node",
        "what moves data between ranks of one node: the faster one for each call, MPI always, or shared memory always",
    )
    profile: str = _setting(
        str,
        "",
        "a file, or none",
        "the measurements of `mpicoll tune`; by default mpicoll/profiles.json in ~/.config, if it exists",
    )
    shm_mb: int = _setting(_megabytes, 256, "MiB >= 0", "shared memory that all groups on one node may use together")
    cuda: Cuda = _setting(
        _one_of(Cuda),
        "auto",
        "auto, off or aware",
        "whether GPU memory is passed to MPI: if there is proof that MPI supports it, never, or always",
    )
    cuda_ipc: AutoOrOff = _setting(
        _one_of(AutoOrOff),
        "auto",
        "auto or off",
        "whether ranks that share a GPU reduce large arrays on it: if CUDA proves to give them shared memory, or never",
    )
    pinned_mb: int = _setting(
        _megabytes,
        256,
        "MiB >= 0",
        "pinned host memory through which a rank moves arrays of a GPU; beyond it, ordinary memory is used",
    )
    extension: AutoOrOff = _setting(
        _one_of(AutoOrOff),
        "auto",
        "auto or off",
        "whether the ranks of a node use shared memory, by the C extension: if all ranks have it, or never (then MPI)",
    )
    single_copy: AutoOrOff = _setting(
        _one_of(AutoOrOff),
        "auto",
        "auto or off",
        "whether ranks of a node copy large arrays from process to process: if the kernel allows that to all ranks, or never",
    )
    progress: Progress = _setting(
        _one_of(Progress),
        "none",
        "none or thread",
        "what progresses pending operations while the program computes: nothing, or a thread of the library",
    )
    strict: bool = _setting(_flag, False, "0 or 1", "an unknown MPICOLL_ variable is an error instead of a warning")


SETTINGS = tuple(
    Setting(f"MPICOLL_{each.name.upper()}", default=each.default, **each.metadata) for each in fields(Settings)
)

# Variables that the library itself sets for child processes of a launcher or a rank; they are no settings.
INTERNAL = frozenset({"MPICOLL_RANK_PID", "MPICOLL_RUN_DIR"})


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read every MPICOLL_ variable of ``environ`` (default: the process environment).

    Raises:
        ValueError: a known variable has a value that it does not accept, or, with ``MPICOLL_STRICT=1``, a variable is
            unknown. Otherwise unknown variables give one warning that names the nearest known ones.
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
            message = f"{setting.variable}={text!r} is no valid value ({setting.values})"
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
    """Warn at the line outside this package whose call led here."""
    warnings.warn(message, UserWarning, stacklevel=program_level())


def _unknown(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f"{name} is not a variable of this version of mpicoll; the nearest known variable is {near[0]}"
