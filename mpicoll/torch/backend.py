"""Make process groups of torch.distributed from groups of this library."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as c10d  # type: ignore[import-not-found,unused-ignore]
from torch.distributed import distributed_c10d  # type: ignore[import-not-found,unused-ignore]

from mpicoll.api.collectives import barrier
from mpicoll.api.groups import new_group
from mpicoll.api.objects import broadcast_object_list
from mpicoll.groups import registry
from mpicoll.groups.process_group import ProcessGroup as Group
from mpicoll.lifecycle.init import init_process_group
from mpicoll.torch.devices import other_backends, with_others
from mpicoll.torch.names import NAME, SCHEME
from mpicoll.torch.process_group import ProcessGroup
from mpicoll.torch.world import add_to_world, store_of


def create(opts: Any, pg_options: Any) -> ProcessGroup:
    """Make the process group of a backend; its members call the function (``torch.distributed.Backend.register_backend``).

    Args:
        opts: rank, size, limit and global ranks of the group. No global ranks: the default group, of all ranks of MPI.
        pg_options: must be None.
    """
    if pg_options is not None:
        raise TypeError(f"the backend {NAME} has no pg_options, got {type(pg_options).__name__}")
    others, ranks = other_backends(), list(opts.global_ranks_in_group)
    if ranks:
        group, owns = new_group(ranks, _limit(opts.timeout), use_local_synchronization=True, sort_ranks=False), True
    else:
        owns = _joined(opts.timeout, opts.group_rank, opts.group_size)
        group = registry.state().world
    if others:
        return with_others(group, others, opts, owns=owns)
    return ProcessGroup(group, owns=owns, store=opts.store)


def _limit(timeout: timedelta) -> timedelta | None:
    """Return the limit of a group; None if the program gave none: torch passes its default then, and MPICOLL_TIMEOUT counts."""
    return None if timeout == distributed_c10d.default_pg_timeout else timeout


_made_here = False


def _joined(timeout: timedelta, rank: int, size: int) -> bool:
    """Make the default group of this library unless there is one; return whether torch.distributed has made it."""
    global _made_here
    known = registry.current()
    if known is None:
        init_process_group(timeout=_limit(timeout), rank=rank, world_size=size)
        _made_here = True
    elif (rank, size) not in ((known.world.rank(), known.world.size()), (-1, -1)):
        raise ValueError(
            f"rank={rank} and world_size={size} contradict MPI: this is rank {known.world.rank()} of {known.world.size()}"
        )
    made, _made_here = _made_here, False
    return made


def rendezvous(url: str, timeout: timedelta | None = None, **more: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield the store, rank and number of ranks of a job that MPI has started; all ranks call the function.

    The store is a TCPStore of torch on rank 0, whose address and port travel over MPI.

    Args:
        url: ``mpi://``, with ``?rank=`` and ``&world_size=`` if the program gave them: they must be MPI's.

    Raises: as :func:`mpicoll.init_process_group`.
    """
    global _made_here
    given = dict(each.split("=") for each in url.partition("?")[2].split("&") if each)
    rank, size = int(given.get("rank", -1)), int(given.get("world_size", -1))
    limit = timeout or distributed_c10d.default_pg_timeout
    if registry.current() is None:
        init_process_group(timeout=_limit(limit), rank=rank, world_size=size)
        _made_here = True
    world = registry.state().world
    server = (
        c10d.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=limit)
        if not world.rank()
        else None
    )
    place: list[Any] = [None if server is None else (_addresses(), server.port)]
    broadcast_object_list(place, 0)
    store = server
    if store is None:
        addresses, port = place[0]
        store = c10d.TCPStore(_reachable(addresses, port), port, is_master=False, wait_for_workers=False, timeout=limit)
    barrier()  # else rank 0 could end the store before the others have reached it
    yield store, world.rank(), world.size()
    raise RuntimeError("a rendezvous over mpi:// cannot be made again")


def _addresses() -> list[str]:
    """Return names and addresses by which the other ranks may reach this host, the best first."""
    name = socket.gethostname()
    found = [name, socket.getfqdn()]
    try:
        found += [str(each[4][0]) for each in socket.getaddrinfo(name, None, socket.AF_INET)]
    except OSError:
        pass  # a name that this host cannot resolve, and other hosts may
    return [*dict.fromkeys(found), "127.0.0.1"]


def _reachable(addresses: list[str], port: int) -> str:
    """Return the first address that accepts a connection.

    Raises:
        ConnectionError: none does.
    """
    problems = []
    for address in addresses:
        try:
            socket.create_connection((address, port), 5).close()
            return address
        except OSError as error:
            problems.append(f"{address}: {error}")
    raise ConnectionError(
        f"no address of the store on rank 0 accepts a connection at port {port}: {'; '.join(problems)}"
    )


def wrap(group: Any = None) -> Any:
    """Return a process group of torch.distributed for a group of this library, with which ``torch.distributed`` can be called.

    The calls of both are calls of one group, numbered and compared together. Each member of the group calls this function; it
    communicates only for the default group.

    Args:
        group: a group of this library; None: the default group. If torch.distributed has no default group yet, the
            default group becomes that of torch.distributed, and another group is an error.

    Raises:
        ValueError: this rank is not in the group, or torch.distributed has no default group.
    """
    found = registry.resolve(group)
    if found is None:
        raise ValueError("Invalid process group specified: this rank is not in the group")
    world = registry.state().world
    if not c10d.is_initialized():
        if found is not world:
            raise ValueError(
                'torch.distributed has no default group: call init_process_group("mpicoll", init_method="mpi://") first'
            )
        c10d.init_process_group(NAME, init_method=f"{SCHEME}://", timeout=timedelta(seconds=world.timeout))
    for known in distributed_c10d._world.pg_names:
        if isinstance(known, ProcessGroup) and known.group is found:
            return known
    name = f"{NAME}:{found.group_name}"
    made = ProcessGroup(found, owns=False, store=store_of(name))
    add_to_world(made, name, found.ranks, NAME)
    return made


def group_of(process_group: Any = None) -> Group:
    """Return the group of this library of a process group of torch.distributed; None: of its default group.

    Raises:
        TypeError: the process group has another backend.
    """
    found = c10d.group.WORLD if process_group is None else process_group
    if not isinstance(found, ProcessGroup):
        what = "no process group" if found is None else f"a {type(found).__name__}"
        raise TypeError(f"group_of: {what} has no group of {NAME}: pass a process group of the backend {NAME!r}")
    return found.group
