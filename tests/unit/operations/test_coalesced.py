"""How lists of arrays go into buckets, and what is said of them."""

from __future__ import annotations

import itertools
import random

import numpy as np

from mpicoll.memory.lists import list_words
from mpicoll.operations.prepare.coalesced import LARGE_BYTES, Plan

DTYPES = [np.dtype(char) for char in "dfD"]


def test_every_array_stands_in_one_bucket_of_its_dtype() -> None:
    """In the order of the list; a bucket is no larger than it may be unless it holds one array alone."""
    rng = random.Random(3)
    for turn, limit in itertools.product(range(20), (1, 100, 1000, 10**6)):
        count = rng.randrange(30)
        dtypes = [rng.choice(DTYPES) for _ in range(count)]
        shapes = [tuple(rng.randrange(5) for _ in range(rng.randrange(3))) for _ in range(count)]
        plan = Plan(dtypes, shapes, limit)
        assert sorted(place for bucket in plan.buckets for place in bucket.places) == list(range(count)), turn
        for bucket in plan.buckets:
            assert bucket.places == sorted(bucket.places)
            assert {dtypes[place] for place in bucket.places} == {bucket.dtype}
            assert len(bucket.places) == 1 or bucket.nbytes <= limit
        for kind in set(dtypes):
            order = [place for bucket in plan.buckets if bucket.dtype == kind for place in bucket.places]
            assert order == sorted(order)


def test_a_large_array_moves_by_itself() -> None:
    """It needs no buffer, and the arrays around it stand in one bucket."""
    d = np.dtype("d")
    large = LARGE_BYTES // d.itemsize
    plan = Plan([d] * 5, [(3,), (large,), (large - 1,), (4,), (large, 2)], 25 * LARGE_BYTES)
    assert [bucket.places for bucket in plan.buckets] == [[0, 2, 3], [1], [4]]
    assert [flat is None for flat in plan.take()] == [False, True, True]
    plan = Plan([d] * 2, [(large,), (3,)], 10)
    assert [bucket.places for bucket in plan.buckets] == [[0], [1]]


def test_buffers_have_one_user_at_a_time() -> None:
    """What is taken is not given to another until it comes back; large arrays alone need none."""
    plan = Plan([np.dtype("d")] * 3, [(2,), (3, 1), (100_000,)], 1000)
    first, second = plan.take(), plan.take()
    assert first[1] is None
    assert first[0] is not None
    assert second[0] is not None
    assert first[0] is not second[0]
    assert [part.shape for part in first[0].parts] == [(2,), (3, 1)]
    assert all(np.shares_memory(part, first[0].whole) for part in first[0].parts)
    plan.give_back(first)
    plan.give_back(second)
    assert plan.take() is first
    assert plan.take() is not second


def test_other_lists_have_other_words() -> None:
    """Runs are told once, texts are short, and what is left out still tells lists apart."""
    f, d = "float32", "float64"
    assert list_words([f, f, d], [(2, 3), (2, 3), ()]) == "2 x float32(2, 3), float64()"
    lists = [[(i,) for i in range(100)] for _ in range(100)]
    for i, shapes in enumerate(lists):
        shapes[i] = (7, i)
    words = {list_words([f] * 100, shapes) for shapes in lists}
    assert len(words) == 100
    assert max(map(len, words)) <= 60


def test_halves_have_buckets_of_their_own() -> None:
    """Arrays that are reduced as one dtype stand in one bucket only if they are of one dtype of the program's."""
    f = np.dtype("f")
    plan = Plan([f] * 4, [(2,)] * 4, 1000, ["", "float16", "bfloat16", "float16"])
    assert [(bucket.named, bucket.places) for bucket in plan.buckets] == [
        ("", [0]),
        ("float16", [1, 3]),
        ("bfloat16", [2]),
    ]
    assert plan.words == "float32(2), float16(2), bfloat16(2), float16(2)"
