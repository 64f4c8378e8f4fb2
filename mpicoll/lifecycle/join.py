"""Join a job: make the default group and the state that it needs, after MPI is started."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.checks.memory_in_use import claims
from mpicoll.diagnosis.board import Board
from mpicoll.diagnosis.call import CallDescription
from mpicoll.diagnosis.deadlock_search import describe_state
from mpicoll.diagnosis.job_state import await_death, waits_lately, waits_now, write_place
from mpicoll.diagnosis.node_board import NodeBoard, make_node_board
from mpicoll.diagnosis.report.entries import RankState
from mpicoll.diagnosis.report.report import with_calls
from mpicoll.diagnosis.wait_policy import failed_entry
from mpicoll.errors import (
    ARGUMENT,
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    PeerExitedError,
    PeerFailedError,
)
from mpicoll.groups import process_group, registry
from mpicoll.groups.communicators import CommunicatorPair, Pool, duplicate, mpi_text
from mpicoll.launch.job_folder import append_record
from mpicoll.launch.wrong_starts import ask_srun, check_world, script_of, unused_allocation
from mpicoll.lifecycle import exit_code, hooks, teardown, termination
from mpicoll.lifecycle.endpoint import JobEndpoint, endpoints
from mpicoll.memory.device import array as device_array
from mpicoll.memory.device import pool as device_pool
from mpicoll.memory.device import runtime as device_runtime
from mpicoll.operations import composed
from mpicoll.operations.failures import BlockingCall
from mpicoll.runtime import native, signals, waiting, watchdog
from mpicoll.runtime.call_site import call_site
from mpicoll.runtime.output import say
from mpicoll.runtime.progress import ProgressThread
from mpicoll.runtime.settings import LEVELS, Level, Settings, warn_caller
from mpicoll.runtime.torch_compile import exclude_from_compile
from mpicoll.transports.device.capability import allows
from mpicoll.transports.selection import share_extension, share_profile, share_single_copy
from mpicoll.transports.topology import Topology, discover

Steps = Generator[MPI.Request, None, tuple[JobEndpoint, CommunicatorPair]]

TOLD_WITHIN = 10.0
"""Seconds for which a rank with a wrong ``comm`` waits for the other ranks on COMM_WORLD, to send them the error."""
FREE_WITHIN = 5.0
"""Seconds for which freeing a communicator waits for the other ranks to free it, too."""

_initialisations = 0
_endpoint_keyval = MPI.KEYVAL_INVALID
_rendezvous_keyval = MPI.KEYVAL_INVALID


def join(
    comm: Any,
    rank: Any,
    world_size: Any,
    on_failure: Any,
    check: Any,
    settings: Settings,
    limit: float,
    problem: Exception | None,
) -> None:
    """Make the default group with all other ranks of a communicator; MPI is started.

    Args:
        comm, rank, world_size, on_failure, check: arguments of ``init_process_group``.
        settings: of the environment.
        limit: of waits, in seconds.
        problem: the error in this rank's arguments, raised on all ranks.
    """
    global _initialisations
    devices = sys.modules.get("mpicoll.lifecycle.devices")  # imported by a program that selects a GPU
    base_comm, wrong = _communicator(comm)
    if wrong is not None:
        problem, limit = problem or wrong, min(limit, TOLD_WITHIN)
    size, me = base_comm.Get_size(), base_comm.Get_rank()
    try:
        _check_launch(size, me, rank, world_size, guest=comm is not None)
    except ValueError as error:
        problem = problem or error
    # An argument of another type may compare like an array, which has no truth value.
    level: Level = check if isinstance(check, str) and check in LEVELS else settings.check
    how: str = "job" if comm is None else "raise"
    if isinstance(on_failure, str) and on_failure in ("job", "raise"):
        how = on_failure
    hooks.register()
    if how == "job":
        hooks.install()
    site = call_site()
    try:
        endpoint, pair = _meet(base_comm, limit, str(site))
    except CollectiveTimeoutError:
        if wrong is None:
            raise
        hooks.never_joined(wrong, settings.exit_grace)
        raise wrong from None
    except DistError:
        raise
    except (
        BaseException
    ) as error:  # of a signal handler: the other ranks wait for operations that this rank does not post
        exit_code.mark(error)
        teardown.mark_unfinished()
        raise
    endpoint.job = endpoint.job or how == "job"
    device_pool.bound(settings.pinned_mb << 20)
    # MPI is asked with the first array of a GPU.
    device_array.permit(partial(allows, settings.cuda))
    _initialisations += 1
    state = registry.JobWithGroups(
        world=process_group.ProcessGroup(
            str(_initialisations), pair, me, limit, level="full", display="WORLD", desc="default_pg"
        ),
        board=endpoint.board,
        pool=endpoint.pool,
        settings=settings,
        topology=endpoint.topology,
        on_failure=how,
        pid=os.getpid(),
        thread_multiple=MPI.Query_thread() >= MPI.THREAD_MULTIPLE,
        thread=threading.get_ident(),
        endpoint=endpoint,
    )
    state.groups[state.world.group_name] = state.world
    registry.set_state(state)
    watchdog.start(deadly=how == "job")
    try:
        # Ranks that have made default groups on other communicators count differently: the largest count names the group.
        key: tuple[Any, ...] = (size, ("on_failure", how), ("check", level), ("MPICOLL_ENGINE", settings.engine))
        if settings.leftover != "error":
            key += (("MPICOLL_LEFTOVER", settings.leftover),)  # seldom set: reports do without the default
        call = CallDescription(
            "init_process_group",
            key,
            site,
            error=problem,
            block_bytes=_initialisations,
        )
        flags = composed.agree(state.world, call, limit)
        with signals.guard, BlockingCall(state.world, call, limit):
            if endpoint.topology is None:
                _look_around(endpoint, pair, settings, ("", 0) if devices is None else devices.chosen())
                if how == "job" and endpoint.board.slots is not None and len(endpoint.board.slots.ranks) > 1:
                    watchdog.watch(partial(await_death, endpoint.board, lambda rank: append_record("died", rank, 0)))
        topology = state.topology = endpoint.topology
        endpoint.settle(*composed.drive(state.world, call, pair.sweep(), limit))
        state.pool.open_transports(pair, topology, settings, level)
        composed.drive(state.world, call, state.pool.open_channel(pair), limit)
    except BaseException as error:
        registry.set_state(None)
        pair.idle = True
        if isinstance(error, MPI.Exception):
            raise DistBackendError(f"init_process_group at {site}: {mpi_text(error)}") from error
        raise
    state.secret = topology.secret
    if devices is not None:
        devices.warn_of_sharing(me, topology.devices, topology.node_of, topology.hosts)
    if "torch" in sys.modules:
        exclude_from_compile()
    _initialisations = flags.block_bytes
    state.world.level = level
    state.world.calls, state.world.last = 0, None  # messages number only the program's own calls
    state.world.group_name = str(flags.block_bytes)
    state.groups = {state.world.group_name: state.world}
    waiting.set_oversubscribed(topology.oversubscribed)
    endpoint.board.state = describe_state
    waiting.add_service(endpoint.board.poll)
    if write_place not in watchdog.services:
        watchdog.services.append(write_place)
    _start_progress_thread(state)
    if how == "job":
        termination.start()
    teardown.group_limit, teardown.leftover = limit, settings.leftover
    claims.rank = me


def _communicator(comm: Any) -> tuple[MPI.Intracomm, TypeError | None]:
    """Return the communicator to join on, and the error in the argument ``comm`` or None.

    A rank with a wrong argument joins on COMM_WORLD: the other ranks are most likely there, and raise, too.
    """
    found = MPI.COMM_WORLD if comm is None else comm
    null = isinstance(found, MPI.Comm) and found == MPI.COMM_NULL
    if isinstance(found, MPI.Intracomm) and not null:
        return found, None
    wrong = TypeError(f"comm must be an mpi4py intracommunicator, not {'COMM_NULL' if null else type(comm).__name__}")
    if null:
        raise wrong  # this rank is no member of the other ranks' communicator: no rank waits for it
    setattr(wrong, ARGUMENT, True)
    return MPI.COMM_WORLD, wrong


def _check_launch(size: int, me: int, rank: Any, world_size: Any, *, guest: bool) -> None:
    """Raise if the job was started in a way that cannot work; warn if an allocation has tasks that the job does not use."""
    library, script = MPI.Get_library_version(), script_of(sys.orig_argv, sys.argv)
    check_world(
        os.environ,
        size,
        me,
        -1 if rank is None else rank,
        -1 if world_size is None else world_size,
        library,
        guest=guest,
        script=script,
        listing=ask_srun,
    )
    if not guest and world_size in (-1, None):
        warning = unused_allocation(os.environ, size, library, script=script, listing=ask_srun)
        if warning is not None:
            warn_caller(warning)


def _look_around(endpoint: JobEndpoint, pair: CommunicatorPair, settings: Settings, device: tuple[str, int]) -> None:
    """Find the nodes of the job and the features that all ranks have, by blocking calls of MPI; all ranks take part."""
    topology: Topology = discover(pair.data, device)
    endpoint.topology = topology
    endpoint.board.slots = _node_board(pair.data, topology)
    on_node = len(topology.local_ranks)
    endpoint.pool.profile = share_profile(pair.data, settings.profile, on_node)
    is_off = settings.extension == "off"
    endpoint.pool.extension = share_extension(pair.data, native.found is not None, is_off, settings.engine, on_node)
    if endpoint.pool.extension:
        is_off = settings.single_copy == "off"
        endpoint.pool.single_copy = share_single_copy(pair.data, topology.local_ranks, is_off)


def _node_board(comm: MPI.Intracomm, topology: Topology) -> NodeBoard | None:
    node = comm.Split(topology.node, topology.rank)
    try:
        return make_node_board(node, topology.rank, topology.local_ranks)
    finally:
        node.Free()


def _start_progress_thread(state: registry.JobWithGroups) -> None:
    """Start the progress thread if the settings ask for it and this MPI allows it."""
    waiting.progress_thread = None
    if state.settings.progress != "thread":
        return
    if not state.thread_multiple:
        say(
            f"mpicoll: rank {state.world.rank()}: MPICOLL_PROGRESS=thread has no effect: this MPI gives no MPI_THREAD_MULTIPLE\n"
        )
        return
    waiting.progress_thread = _progress_thread(every=True)


def _progress_thread(*, every: bool) -> ProgressThread:
    return ProgressThread(waits_lately, device_runtime.current_device, device_runtime.use, every)


def background_progress() -> waiting.BackgroundProgress | None:
    """Return the progress thread, of requests that the program waits for without the library; None if MPI allows no thread."""
    if waiting.progress_thread is None and registry.state().thread_multiple:
        waiting.progress_thread = _progress_thread(every=False)
    return waiting.progress_thread


def _meet(comm: MPI.Intracomm, limit: float, site: str) -> tuple[JobEndpoint, CommunicatorPair]:
    """Return the endpoint of a communicator, and the idle pair of its default group; make them at the first use.

    The endpoint is an attribute of the communicator, so freeing the communicator frees the endpoint, on all ranks alike.
    """
    global _endpoint_keyval, _rendezvous_keyval
    if _endpoint_keyval == MPI.KEYVAL_INVALID:
        _endpoint_keyval = MPI.Comm.Create_keyval(delete_fn=_forget)
        _rendezvous_keyval = MPI.Comm.Create_keyval()
    found = comm.Get_attr(_endpoint_keyval)
    endpoint = found if isinstance(found, JobEndpoint) else None
    policy = _InitWait(limit, site, comm.Get_rank(), comm.Get_size(), endpoint.board if endpoint is not None else None)
    found = comm.Get_attr(_rendezvous_keyval)
    rendezvous = found if isinstance(found, Rendezvous) else Rendezvous(_steps(comm, endpoint))
    comm.Set_attr(_rendezvous_keyval, rendezvous)

    def wait(request: MPI.Request) -> None:
        with signals.guard:
            waiting.wait(request.Test, policy)

    try:
        return rendezvous.resume(wait)
    finally:
        if rendezvous.over:
            comm.Delete_attr(_rendezvous_keyval)


class Rendezvous:
    """The operations, one after the other, by which the ranks of a communicator make a default group.

    MPI matches the operations of a communicator by their order. So the next call resumes the operation from which an
    earlier call has withdrawn.
    """

    def __init__(self, steps: Steps) -> None:
        self.over = False
        self._steps = steps
        self._request: MPI.Request | None = None

    def resume(self, wait: Callable[[MPI.Request], None]) -> tuple[JobEndpoint, CommunicatorPair]:
        """Wait for one operation after the other; if ``wait`` raises, the next call resumes here."""
        while True:
            if self._request is not None:
                wait(self._request)
            try:
                self._request = next(self._steps)
            except BaseException as end:
                self.over = True
                if isinstance(end, StopIteration):
                    found: tuple[JobEndpoint, CommunicatorPair] = end.value
                    return found
                raise


def _steps(comm: MPI.Intracomm, endpoint: JobEndpoint | None) -> Steps:
    ranks = tuple(range(comm.Get_size()))
    if endpoint is not None:
        index = endpoint.pool.candidate(ranks)
        words = np.array([index, -index], np.int64)
        yield endpoint.again.Iallreduce(MPI.IN_PLACE, words, MPI.MAX)
        if words[0] == -words[1] and index >= 0:  # else a rank may have given up a call on its pair
            return endpoint, endpoint.pool.take(ranks, index)
    control = yield from duplicate(comm)
    data = yield from duplicate(control)
    pair = CommunicatorPair(ranks, control, data)
    if endpoint is None:
        calls: dict[str, int] = {}
        board = Board((yield from duplicate(control)), partial(waits_now, calls))
        endpoint = JobEndpoint(board, Pool(), (yield from duplicate(control)), calls)
        comm.Set_attr(_endpoint_keyval, endpoint)
        endpoints.append(endpoint)
    endpoint.pool.add(pair)
    yield control.Ibarrier()
    pair.agreement.epoch = time.monotonic()
    return endpoint, pair


def _forget(comm: MPI.Comm, keyval: int, endpoint: Any) -> None:
    """Free the endpoint of a communicator that its owner frees (MPI calls this function on all ranks of it)."""
    known = registry.current()
    if comm == MPI.COMM_WORLD or MPI.Is_finalized() or endpoint not in endpoints:
        return
    if known is not None and known.board is endpoint.board:
        return  # its default group is still in use
    endpoints.remove(endpoint)
    if endpoint.board.slots is not None:
        endpoint.board.slots.close()
        endpoint.board.slots = None
    if not _all_received(endpoint):
        return
    endpoint.pool.close()
    for each in (endpoint.board.comm, endpoint.again, endpoint.node):
        if each is not None:
            each.Free()


def _all_received(endpoint: JobEndpoint) -> bool:
    """Return whether no message is left on the communicators of an endpoint; else no rank frees them.

    MPICH 5.0 gives the context of a freed communicator to the next one, and unreceived messages with it.
    """
    endpoint.board.poll()
    spoiled = any(pair.spoiled or pair.closing for pair in endpoint.pool.all())
    left = np.array([endpoint.balance() + endpoint.board.balance, spoiled], np.int64)
    request = endpoint.again.Iallreduce(MPI.IN_PLACE, left, MPI.SUM)
    if not teardown.poll_until(request.Test, endpoint.board, FREE_WITHIN):
        teardown.mark_unfinished()
        return False
    return not left.any()


class _InitWait:
    """Wait policy of ``init_process_group``: the ranks have no group yet, so no rank can be asked."""

    stall_warn = 60.0
    stays_until = 0.0

    def __init__(self, limit: float, site: str, rank: int, size: int, board: Board | None) -> None:
        self.limit = limit
        self.site = site
        self.rank = rank
        self.size = size
        self.board = board

    def check(self, waited: float) -> BaseException | None:
        """Return an error if a rank has ended; known only if the ranks have had a default group before."""
        if self.board is None:
            return None
        self.board.poll()
        self.board.notice_dead()
        for failure in self.board.failed.values():
            failed = PeerFailedError(f"{failure}, while {self._text(waited)}")
            return self._with_calls(failed, waited, [failure.rank], [failed_entry(failure)])
        for rank in self.board.exited:
            gone = RankState(
                ((rank, rank),), state="exited", problem="ended the program without calling init_process_group"
            )
            exited = PeerExitedError(f"rank {rank} {gone.problem}: {self._text(waited)}")
            return self._with_calls(exited, waited, [rank], [gone])
        return None

    def _with_calls(
        self, error: DistError, waited: float, ranks: Iterable[int], others: Iterable[RankState]
    ) -> DistError:
        """Return an error with its facts as data: this rank's call, and what other ranks did."""
        mine = ((self.rank, self.rank),)
        waits = RankState(mine, "init_process_group", site=self.site, state="waits", waited=(waited, waited))
        return with_calls(error, "WORLD", ranks, [*others, waits])

    def stalled(self, waited: float) -> None:
        """Print that ranks are missing."""
        say(f"mpicoll: {self._text(waited)}\n")

    def timed_out(self, waited: float) -> BaseException:
        """Return the error for ranks that have not called ``init_process_group``."""
        error = CollectiveTimeoutError(f"Timed out: {self._text(waited)}")
        return self._with_calls(error, waited, range(self.size), [])

    def withdraw(self, reason: BaseException) -> None:
        """Record that the posted operation may never complete."""
        teardown.mark_unfinished()

    def _text(self, waited: float) -> str:
        return (
            f"init_process_group at {self.site} has waited {waited:.1f} s (limit {self.limit:g} s): not all "
            f"{self.size} ranks have called it"
        )
