"""The functions of leader blocks that programs call: zero_first, run_first, ordered, and the names of other packages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar, overload

from mpicoll.groups import registry
from mpicoll.leader_blocks.blocks import LeaderBlock, OrderedBlock
from mpicoll.leader_blocks.members import Scope

P = ParamSpec("P")
R = TypeVar("R")


def zero_first(
    name: str | None = None,
    *,
    scope: Scope = "world",
    timeout: float | timedelta | None = None,
    rejoin: bool = True,
    publish: Any = (),
    visibility_timeout: float | timedelta = 60.0,
) -> LeaderBlock:
    """Return a context manager whose block one rank, the leader, runs first while the other ranks wait::

        with dist.zero_first("download", publish=[path]) as turn:
            if turn.is_leader:
                download(path)
            data = load(path)

    Called by all ranks of the scope; all these ranks run the block. The leader runs its block at once. The other ranks run their
    blocks when the leader's block has ended well. Without a default group, or with one rank, the block runs at once. Inside a
    block of the same scope, the outer block shares the outcome. A collective of the same ranks inside the block raises at once.

    Args:
        name: for messages; the same on all ranks.
        scope: ``"world"``: rank 0 is the leader. ``"node"``: the first rank of each node is the leader of that node, and no
            node waits for another node. A ProcessGroup: its rank 0 is the leader; called by its members only.
        timeout: seconds, or a timedelta, that the other ranks wait for the leader at most. Default: as long as the leader
            lives. A leader on another node that gives no sign of life for the limit of the group counts as lost.
        rejoin: whether all ranks meet at the end of the block (within the limit of the group), so that each rank learns of a
            failure of any other rank. False: each rank continues by itself.
        publish: paths that the leader writes. The files are flushed to disk at the end of the leader's block. The other ranks
            wait until they see the files as the leader wrote them, also on a file system of several hosts.
        visibility_timeout: seconds, or a timedelta, that the other ranks look for these files.

    Returns:
        A context manager that gives a :class:`Turn`: ``is_leader``, ``leader``, ``share(value)``, ``value``.

    Raises:
        FirstFailedError: on the other ranks: the leader's block failed, so they have not run their blocks. The leader raises its
            own exception. The group can still be used.
        PeerFailedError: at the end of the block: the block failed on another rank, which raises its own exception. The group
            can still be used.
        CollectiveMismatchError: ranks of the scope wait for the end of an outer block, or make another call.
        CollectiveTimeoutError: a limit passed; the group is broken.
        TimeoutError: a file of ``publish`` cannot be seen here.
        TypeError, ValueError: wrong arguments, or this rank is not in the group.

    Source: the helpers of yolov5 (torch_distributed_zero_first), accelerate (main_process_first) and others.
    """
    return LeaderBlock(name, scope, timeout, rejoin, publish, visibility_timeout)


def local_zero_first(
    name: str | None = None,
    *,
    timeout: float | timedelta | None = None,
    rejoin: bool = True,
    publish: Any = (),
    visibility_timeout: float | timedelta = 60.0,
) -> LeaderBlock:
    """Return :func:`zero_first` with ``scope="node"``: the first rank of each node is the leader of its node."""
    return LeaderBlock(name, "node", timeout, rejoin, publish, visibility_timeout)


def run_first(fn: Callable[..., R], *args: Any, scope: Scope = "world", share: bool = True, **kwargs: Any) -> R | None:
    """Run ``fn(*args, **kwargs)`` on one rank only, and return its value on all ranks.

    Called by all ranks of the scope. Inside a :func:`zero_first` of the same scope, that block shares the value.

    Args:
        fn: the function; only the leader runs it.
        scope: as in :func:`zero_first`.
        share: whether the other ranks get a (pickled) copy of the value; False: the other ranks get None.

    Raises:
        FirstFailedError: on the other ranks: ``fn`` raised, or its value cannot be pickled. The leader raises its own exception.
        Others as :func:`zero_first`.
    """
    return _run_first(fn, args, kwargs, scope, share)


def _run_first(fn: Callable[..., R], args: Any, kwargs: Any, scope: Scope, share: bool) -> R | None:
    name, problem = type(fn).__qualname__, None
    try:
        name = str(getattr(fn, "__qualname__", None) or name)
    except Exception as error:  # of a proxy
        problem = error
    value: R | None = None
    with LeaderBlock(name, scope, rejoin=False, op="run_first", problem=problem) as turn:
        if turn.is_leader:
            value = fn(*args, **kwargs)
            if share:
                turn.share(value)
    return value if turn.is_leader else turn.value


@overload
def first(fn: Callable[P, R], /) -> Callable[P, R | None]: ...


@overload
def first(*, scope: Scope = "world", share: bool = True) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...


def first(fn: Any = None, /, *, scope: Scope = "world", share: bool = True) -> Any:
    """Return the function decorated so that the leader only runs it and all ranks return its value (:func:`run_first`).

    Written ``@first``, or ``@first(scope="node")``.
    """

    def decorate(function: Callable[..., R]) -> Callable[..., R | None]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> R | None:
            return _run_first(function, args, kwargs, scope, share)

        return wrapper

    if fn is not None and not callable(fn):
        raise TypeError(f'first: {fn!r} is no function; options are named: @first(scope="node")')
    return decorate if fn is None else decorate(fn)


def rank_zero_only(fn: Callable[P, R]) -> Callable[P, R | None]:
    """Return the function decorated so that rank 0 of the world only runs it; other ranks return None without waiting.

    Nothing is sent. Before ``init_process_group`` every process runs the function, as there are no ranks yet.
    """

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
        known = registry.current()
        if known is not None and known.world.rank() != 0:
            return None
        return fn(*args, **kwargs)

    return wrapper


def ordered(group: Any = None) -> OrderedBlock:
    """Return a context manager whose block the ranks run one after the other, in the order of their ranks in the group.

    Called by all members. All members leave the block together, when the last member has ended its block. Without a default
    group, or with one rank, the block runs at once. No collective of the group can be made inside the block.

    Args:
        group: the group; default the world. ``"node"``: the ranks of each node, one after the other.

    Raises:
        FirstFailedError: the block of an earlier rank failed, so this rank has not run its own block.
        PeerFailedError: the block of a later rank failed.
        Others as :func:`zero_first`.
    """
    return OrderedBlock(group)


def torch_distributed_zero_first(local_rank: int) -> LeaderBlock:
    """Return :func:`local_zero_first`, under its name in yolov5 and its descendants.

    Args:
        local_rank: this rank's place on its node, as in ``LOCAL_RANK``; -1: not distributed, the block runs at once.

    Raises:
        ValueError: ``local_rank`` is not this rank's place on its node. For a rank of the world use :func:`zero_first`.
    """
    return LeaderBlock(None, "node", op="torch_distributed_zero_first", local_rank=local_rank)


def wait_for_the_master(local_rank: int | None = None) -> LeaderBlock:
    """Return :func:`local_zero_first`, under its name in super-gradients.

    Args:
        local_rank: None, or this rank's place on its node, as in ``LOCAL_RANK``.

    Raises:
        ValueError: ``local_rank`` is not this rank's place on its node.
    """
    return LeaderBlock(None, "node", op="wait_for_the_master", local_rank=local_rank)


def main_process_first(local: bool = True, desc: str | None = None) -> LeaderBlock:
    """Return :func:`zero_first`, under its name in transformers (and, for the world only, in accelerate).

    Args:
        local: whether the first rank of each node is the leader of its node (transformers' default). False: rank 0 of the world
            is the leader, as in accelerate, whose local_main_process_first is :func:`local_zero_first`.
        desc: what the block does, for messages.
    """
    return LeaderBlock(desc, op="main_process_first", local=False if local is None else local)
