"""The same parameters on all ranks, and the data dealt out: evenly, padded or dropped, anew in each epoch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpicoll as dist
from mpicoll.pytest_plugin import collective_raises

pytestmark = pytest.mark.mpi


def parameters(rank: int) -> dict[str, Any]:
    rng = np.random.default_rng(rank)
    return {"weight": rng.normal(size=(3, 4)), "bias": rng.normal(size=4).astype("f"), "step": 3, "rate": np.float64(1)}


def test_parameters_are_those_of_one_rank() -> None:
    """From a mapping, pairs, or arrays; what is no array stays."""
    rank, size = dist.get_rank(), dist.get_world_size()
    last = size - 1
    given = parameters(rank)
    dist.broadcast_parameters(given, src=last)
    expected = parameters(last)
    assert (given["weight"] == expected["weight"]).all()
    assert (given["bias"] == expected["bias"]).all()
    pairs = [("w", np.full(2, float(rank))), ("b", np.full((2, 2), float(rank)))]
    dist.broadcast_parameters(pairs)
    assert all((each == 0).all() for _, each in pairs)
    arrays = [np.full(2, float(rank)), np.full(3, rank)]
    dist.broadcast_parameters(iter(arrays), group_src=last)
    assert all((each == last).all() for each in arrays)


def test_parameters_inside_others() -> None:
    """Mappings, lists and tuples are walked through, however deep, from every form in which parameters come."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def model() -> dict[str, Any]:
        w, b, c, d = (np.full(each, float(rank)) for each in range(1, 5))
        return {"layer1": {"w": w, "steps": 3}, "layer2": [b, {"deep": (c, None, "word")}], "last": d}

    def arrays(given: dict[str, Any]) -> list[Any]:
        return [given["layer1"]["w"], *given["layer2"][:1], given["layer2"][1]["deep"][0], given["last"]]

    for form in (
        lambda given: given,
        lambda given: list(given.items()),
        lambda given: iter(given.values()),
        lambda given: [given],
    ):
        given = model()
        dist.broadcast_parameters(form(given), src=size - 1)
        assert all((each == size - 1).all() for each in arrays(given))


@pytest.mark.mpi(min_size=2)
def test_parameters_that_differ() -> None:
    """A parameter of another shape, or another one, is told by its name."""
    odd = dist.get_rank() == 1
    with collective_raises(dist.CollectiveMismatchError, match="parameter layer.1.bias"):
        dist.broadcast_parameters({"layer": [np.ones(2), {"bias": np.ones(2 + odd)}]})
    with collective_raises(dist.CollectiveMismatchError, match="parameter layer.1.bias"):
        dist.broadcast_parameters({"layer": [np.ones(2), {"gain" if odd else "bias": np.ones(2)}]})
    with collective_raises(dist.CollectiveMismatchError, match="parameter bias"):
        dist.broadcast_parameters({"weight": np.ones(2), "bias": np.ones(2 + (dist.get_rank() == 1))})


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("length", [0, 1, 7, 60])
def test_the_parts_make_the_whole(length: int, shuffle: bool, drop_last: bool) -> None:
    """All ranks get equally many; together every number once, some twice, or some not at all."""
    size = dist.get_world_size()
    sampler = dist.DistributedSampler(range(length), shuffle=shuffle, drop_last=drop_last, seed=5)
    epochs = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        mine = list(sampler)
        assert len(mine) == len(sampler) == sampler.num_samples
        parts: list[Any] = [None] * size
        dist.all_gather_object(parts, mine)
        assert len({len(part) for part in parts}) == 1
        everything = [number for part in parts for number in part]
        if drop_last:
            assert len(everything) == len(set(everything)) == length // size * size
        else:
            assert set(everything) == set(range(length))
            assert len(everything) == -(-length // size) * size
        if not epoch:
            others = [dist.DistributedSampler(length, size, each, shuffle, 5, drop_last) for each in range(size)]
            assert parts == [list(each) for each in others]
        epochs.append(everything)
    if length == 60:
        assert (len({tuple(each) for each in epochs}) == 3) == shuffle


def test_what_torchs_sampler_has() -> None:
    """Its attributes, and negative epochs and seeds."""
    sampler = dist.DistributedSampler(range(7), 2, 0, seed=-1)
    sampler.set_epoch(-1)
    assert len(list(sampler)) == 4
    assert sampler.total_size == 8
    assert len(sampler.dataset) == 7


def test_wrong_parts() -> None:
    """A rank that there is not, and a negative length."""
    for arguments in ((10, 2, 2), (10, 0, 0), (10, 2, -1), (-1, 1, 0)):
        with pytest.raises(ValueError):
            dist.DistributedSampler(*arguments)
