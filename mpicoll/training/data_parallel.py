"""Tools for data-parallel training: equal parameters on all ranks, and each rank's part of the data."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from mpicoll.api.collectives import broadcast
from mpicoll.api.job import get_rank, get_world_size, is_initialized
from mpicoll.memory.memory import AnyArray
from mpicoll.operations import execution
from mpicoll.operations.prepare.refusal import member, refuse
from mpicoll.runtime.call_site import call_site

_MASK = (1 << 64) - 1


def broadcast_parameters(
    parameters: Mapping[str, AnyArray] | Iterable[Any],
    src: int | None = None,
    group: Any = None,
    *,
    group_src: int | None = None,
) -> None:
    """Broadcast the parameters of one member to all members, in place.

    Called by all members, with parameters of the same names, shapes and dtypes in the same order.

    Args:
        parameters: a mapping of names to arrays (``state_dict()``), pairs of both (``named_parameters()``), or arrays only
            (``parameters()``), of any shapes and dtypes. Mappings, lists and tuples may be nested: their names are joined by
            dots, and other objects in them are ignored. torch's leaves that require grad are written, too.
        src: global rank whose parameters are sent, default 0; or ``group_src``, its rank in the group.
        group: the group; default the world.

    Raises: as :func:`broadcast`; the message names the parameter that differs.

    Source: horovod.torch.broadcast_parameters; the constructor of torch's DistributedDataParallel does the same.
    """
    found = member(group, "broadcast_parameters")
    if found is None:
        return
    if src is None and group_src is None:
        group_src = 0
    site = call_site()
    execution.enter(found, "broadcast")
    try:
        writable = [(name, _writable(array)) for name, array in _named(parameters)]
    except Exception as error:
        refuse(found, "broadcast", site, error, "broadcast_parameters")
    for name, array in writable:
        broadcast(array, src, found, group_src=group_src, name=f"parameter {name}")


def _writable(array: Any) -> Any:
    return array.detach() if getattr(array, "requires_grad", False) else array


def _named(parameters: Any) -> Iterator[tuple[str, Any]]:
    """Yield the arrays with their names. Items of the iterable that are no containers go to ``broadcast`` unchanged."""
    if isinstance(parameters, Mapping):
        yield from _inside("", parameters)
        return
    if not isinstance(parameters, Iterable) and not hasattr(parameters, "__getitem__"):
        raise TypeError(f"parameters must be a mapping or an iterable of arrays, not {type(parameters).__name__}")
    for place, each in enumerate(parameters):
        pair = isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str)
        name, value = each if pair else (str(place), each)
        if isinstance(value, (Mapping, list, tuple)):
            yield from _inside(name, value)
        else:
            yield name, value


def _inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (Mapping, list, tuple)):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _inside(f"{name}.{key}" if name else str(key), each)
    elif hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, np.generic):
        yield name, value


class DistributedSampler:
    """This rank's part of the numbers 0 to n - 1, divided between the ranks in a new order in each epoch.

    There is no communication: every rank draws the same order and uses every ``num_replicas``-th number of the order, so all
    ranks get equally many numbers. If n cannot be divided evenly, some numbers occur twice, or not at all with ``drop_last``.
    The object serves as the ``sampler=`` of torch's DataLoader, and as an iterable of indices into an array.

    Args:
        dataset: an object with a length, or the length itself.
        num_replicas, rank: the number of parts, and the number of this part; default the world size and this rank, and 1 and
            0 before ``init_process_group``.
        shuffle: whether the order is random; False: 0, 1, 2 and so on.
        seed: seed of the order; the same on all ranks.
        drop_last: whether numbers that cannot be divided evenly are left out.

    Attributes:
        num_samples, total_size: numbers of each rank in an epoch, and of all ranks together.

    Raises:
        ValueError: ``rank`` is not below ``num_replicas``, or the length is negative.

    Source: torch.utils.data.DistributedSampler (whose random order is different).
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        ready = is_initialized()
        self.num_replicas = (get_world_size() if ready else 1) if num_replicas is None else operator.index(num_replicas)
        self.rank = (get_rank() if ready else 0) if rank is None else operator.index(rank)
        self.dataset = dataset
        self.length = len(dataset) if hasattr(dataset, "__len__") else operator.index(dataset)
        if self.num_replicas < 1 or not 0 <= self.rank < self.num_replicas:
            raise ValueError(
                f"Invalid rank {self.rank}, rank should be in the interval [0, {self.num_replicas - 1}] of num_replicas"
            )
        if self.length < 0:
            raise ValueError(f"the length of the data must not be negative, got {self.length}")
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        even, rest = divmod(self.length, self.num_replicas)
        self.num_samples = even if drop_last or not rest else even + 1
        self.total_size = self.num_samples * self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch. Called before each epoch by all ranks, or every epoch has the same order."""
        self.epoch = operator.index(epoch)

    def indices(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return this rank's numbers of the epoch, in order: int64[num_samples]."""
        order = np.arange(self.length)
        if self.shuffle:
            np.random.default_rng([self.seed & _MASK, self.epoch & _MASK]).shuffle(order)
        wanted = self.total_size
        if wanted > len(order) > 0:
            order = np.resize(order, wanted)  # repeats from the beginning
        return order[:wanted][self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices().tolist())

    def __len__(self) -> int:
        return self.num_samples
