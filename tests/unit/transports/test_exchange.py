"""The comparison of the lengths of blocks: the numbers of the pairs of members."""

from __future__ import annotations

import numpy as np
import pytest

from mpicoll.transports.mpi.exchange import _numbers_of_pairs


@pytest.mark.parametrize("size", [1, 2, 3, 17])
def test_both_members_of_a_pair_find_its_number(size: int) -> None:
    """A sender and its receiver find the same odd number, which no other pair has."""
    sends = np.array([_numbers_of_pairs(rank, size)[0] for rank in range(size)])
    expects = np.array([_numbers_of_pairs(rank, size)[1] for rank in range(size)])
    assert (sends == expects.T).all()
    assert (sends % 2 == 1).all()
    assert len(np.unique(sends)) == size * size


def test_lengths_that_differ_change_the_sum() -> None:
    """One length, two that cancel as numbers, and blocks of exchanged members are found; equal lengths give 0."""
    size, of = 5, np.random.default_rng(3)
    numbers = np.array([_numbers_of_pairs(rank, size)[0] for rank in range(size)])
    for _ in range(200):
        sent = of.integers(0, 1 << 40, (size, size)).astype(np.uint64)
        wrong = sent.copy()
        first, second = of.choice(size * size, 2, replace=False)
        match of.integers(3):
            case 0:
                wrong.flat[first] += np.uint64(1 << int(of.integers(64)))
            case 1:
                wrong.flat[first] += np.uint64(8)
                wrong.flat[second] -= np.uint64(8)
            case 2:
                wrong.flat[first], wrong.flat[second] = sent.flat[second], sent.flat[first]
        total = (numbers * sent).sum() - (numbers * sent.copy()).sum()
        assert total == 0
        assert ((numbers * sent) - (numbers * wrong)).sum() != 0 or (sent == wrong).all()
