"""Destroy one group or all groups: destroy_process_group."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from typing import Any

from mpicoll.diagnosis import job_state
from mpicoll.diagnosis.job_state import Counters, note_destroyed
from mpicoll.errors import DistError, GroupBrokenError
from mpicoll.groups import registry
from mpicoll.groups.process_group import ProcessGroup, name_started, untold
from mpicoll.memory.device import pool as device_pool
from mpicoll.runtime import waiting
from mpicoll.runtime.call_site import call_site


def destroy_process_group(group: Any = None) -> None:
    """Destroy a group, or all groups; wait for no other rank, but at most 1 s for ranks that share memory of a GPU.

    Each member calls the function by itself, at any time after its last call on the group, also if the group is broken.

    Args:
        group: the group; None or the world: every group, after which ``init_process_group`` may be called again.

    Raises:
        AssertionError: there is no default group (as torch).
        ValueError: the group is destroyed already, or is no group of this process.
        DistError: operations of the group were issued and never waited for; the group stays usable. If one of these operations
            has failed, its error is raised.
        CollectiveMismatchError: inside a block that one rank runs first while the other ranks wait for its end.

    Errors of other ranks are not raised here. Messages that no rank has received, and at check level ``roll`` calls that differed
    after the last comparison, are reported when the program ends (``on_failure="job"``; ``MPICOLL_LEFTOVER``).

    Source: torch.distributed.destroy_process_group.
    """
    if registry.current() is None:
        raise AssertionError("Process group cannot be None")
    found = registry.resolve(group)
    if found is None:
        return
    known, site = registry.state(), call_site()
    is_world = found is known.world
    doomed = list(known.groups.values()) if is_world else [found]
    is_own = os.getpid() == known.pid  # and not a forked child, whose parent still uses the groups
    if is_own:
        for block in tuple(known.blocks):
            if is_world or block.group() is found:
                raise block.refuse("destroy_process_group", site)
        _refuse_unwaited(doomed)
        known.board.poll()
        for each in doomed:
            if each.group_name in known.board.withdrawn:
                each.give_up(known.board.withdrawn[each.group_name][1])  # its communicators are not used again
    endpoint = known.endpoint
    with nullcontext() if waiting.progress_thread is None else waiting.progress_thread.resting():
        for each in doomed:
            each.destroyed_at = str(site)
            _destroy(each, endpoint)
            if is_own:
                note_destroyed(known, str(site))
            known.groups.pop(each.group_name, None)
            known.node = None if known.node is each else known.node
            known.leaders = None if known.leaders is each else known.leaders
    if is_world:
        job_state.destroyed_at = str(site)
        _destroy_world(known)


def _refuse_unwaited(doomed: list[ProcessGroup]) -> None:
    calls = untold(doomed)
    failed = [call for call in calls if call.error is not None]
    for call in failed:
        call.is_known()
    if failed:
        failed[0].complete()
    if calls:
        raise DistError(
            "destroy_process_group: operations were issued and never waited for: "
            + name_started(calls)
            + ". Call wait() on each of them first"
        )


def _destroy(group: ProcessGroup, endpoint: Counters | None) -> None:
    from mpicoll.operations.request import Request  # MPI is started: there is a default group

    busy = [item for item in tuple(waiting.pending) if getattr(item, "group", None) is group]
    for item in busy:
        item.Test()
    if any(not item.Test() for item in busy):
        group.give_up("it was destroyed while an operation was under way")
        for item in busy:
            if isinstance(item, Request) and not item.done:  # the program may hold its future
                item.abandon(GroupBrokenError(f"{item.call.describe()} on group {group.display}: {group.broken}"))
    for item in busy:
        waiting.drop(item)
    waiting.drop(group.pair.receiver)
    if group.stopping is not None:
        group.stopping.remove()
    if endpoint is not None:
        endpoint.remember(group)
    group.pair.last = group.group_name
    group.pair.sent, group.pair.received = group.by_peer(group.sent), group.by_peer(group.received)
    group.free_plans()
    for transport in group.opened.values():
        transport.close(awaited=group.broken is None)
    if group.level == "roll" and not group.pair.spoiled:
        op = "destroy_process_group"
        group.pair.closing = group.pair.agreement.close(op, call_site(), group.calls + 1, group.display, group.ranks)
    group.destroyed = True
    if not group.pair.spoiled:
        group.pair.idle = True


def _destroy_world(known: registry.JobWithGroups) -> None:
    """Stop the threads and services of the default group; all groups are destroyed."""
    from mpicoll.lifecycle import hooks, termination  # as above

    if waiting.progress_thread is not None:
        waiting.progress_thread.stop()
    termination.stop()
    waiting.remove_service(known.board.poll)
    registry.set_state(None)
    device_pool.close()
    if sys.exc_info()[0] is None:  # in a "finally" the hooks may still have to report an exception
        hooks.uninstall()
