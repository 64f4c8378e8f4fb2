"""What one key, one value and a whole store may have, and the limit of stores that are given none."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

import mpicoll as dist
from mpicoll.stores import table
from mpicoll.stores.table import ENTRY, LARGEST_KEY, LARGEST_STORE, LARGEST_VALUE, StoreTable

MAKERS: dict[str, Callable[[Path], dist.Store]] = {
    "hash": lambda path: dist.HashStore(),
    "file": lambda path: dist.FileStore(str(path / "store")),
    "tcp": lambda path: dist.TCPStore("localhost", 0, is_master=True, secret="x"),
    "prefix": lambda path: dist.PrefixStore("p", dist.HashStore()),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_sizes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too large is refused with its size and the most there may be, on every store; nothing changes."""
    monkeypatch.setattr(table, "LARGEST_KEY", 20)
    monkeypatch.setattr(table, "LARGEST_VALUE", 1000)
    monkeypatch.setattr(table, "LARGEST_STORE", 10 * (1000 + ENTRY) - 1)
    store = MAKERS[kind](tmp_path)
    store.set("n", "1" * 990)
    most = "a value may have 1000"
    for call, why in (
        (lambda: store.set("k" * 21, "x"), r"the key would have 2\d bytes; a key may have 20"),
        (lambda: store.add("k" * 21, 1), "a key may have 20"),
        (lambda: store.queue_push("k" * 21, "x"), "a key may have 20"),
        (lambda: store.set("k", bytes(1001)), "the value would have 1001 bytes; " + most),
        (lambda: store.compare_set("k", "", bytes(1001)), most),
        (lambda: store.append("n", bytes(11)), "the value would have 1001 bytes; " + most),
        (lambda: store.multi_set(["k", "l"], ["x", bytes(1001)]), most),
        (lambda: store.queue_push("q", bytes(1001)), most),
        (lambda: store.get("k" * 21), "a key may have 20"),
        (lambda: store.wait(["n", "k" * 21]), "a key may have 20"),
        (lambda: store.multi_get(["n", "k" * 21]), "a key may have 20"),
        (lambda: store.queue_pop("k" * 21), "a key may have 20"),
    ):
        with pytest.raises(dist.DistStoreError, match=why):
            call()
    assert (store.list_keys(), store.get("n"), store.queue_len("q")) == (["n"], b"1" * 990, 0)
    for _ in range(8):
        store.queue_push("q", bytes(1000))
    for call in (lambda: store.set("k", bytes(1000)), lambda: store.queue_push("q", bytes(1000))):
        with pytest.raises(dist.DistStoreError, match=r"of 10 values\); a store may have 11999: delete keys"):
            call()
    store.set("n", "2")  # smaller: always possible
    store.set("k", bytes(900))
    store.queue_pop("q")
    store.multi_set(["l", "k"], [bytes(900), "x"])
    assert sorted(store.list_keys()) == ["k", "l", "n"]
    if isinstance(store, dist.TCPStore):
        store.close()


def test_the_documented_sizes() -> None:
    """The page on stores names the sizes of the code."""
    text = (Path(__file__).parents[3] / "docs" / "groups.md").read_text()
    sizes = (LARGEST_KEY >> 10, LARGEST_VALUE >> 20, LARGEST_STORE >> 30, ENTRY)
    assert (
        "A key may have {} KiB, a value {} MiB, and a store {} GiB, with {} bytes more for each".format(*sizes) in text
    )


def test_the_sizes_that_are_counted() -> None:
    """After any operations a table counts what it holds."""
    rng, made = random.Random(3), StoreTable()
    ops = ("set", "add", "compare_set", "delete_key", "append", "multi_set", "queue_push", "queue_pop")
    for _ in range(5000):
        op, key = rng.choice(ops), b"k%d" % rng.randrange(6)
        value = b"%d" % rng.randrange(10 ** rng.randrange(1, 6))
        args = {
            "delete_key": [key],
            "compare_set": [key, made.values.get(key, b""), value],
            "multi_set": [key, value, b"k1", value, key, b"1"],
            "queue_pop": [key, b"0"],
        }.get(op, [key, value])
        made.do(op, args)
        queued = [(name, each) for name, queue in made.queues.items() for each in queue]
        assert made.bytes == sum(len(name) + len(each) for name, each in [*made.values.items(), *queued])
        assert made.entries == len(made.values) + len(queued)
    copy = StoreTable()
    for name, *parts in made.records():
        copy.do(name.decode(), parts)
    assert (copy.values, copy.queues) == (made.values, made.queues)


@pytest.mark.parametrize("kind", MAKERS)
def test_the_limit_without_a_limit(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is given no limit has MPICOLL_TIMEOUT, or torch's 300 s."""
    for text, seconds in ((None, 300.0), ("12.5", 12.5), ("1e300", 365 * 86400.0)):
        if text is not None:
            monkeypatch.setenv("MPICOLL_TIMEOUT", text)
        store = MAKERS[kind](tmp_path)
        assert store.timeout == timedelta(seconds=seconds)
        if isinstance(store, dist.TCPStore):
            given = timedelta(seconds=3)
            other = dist.TCPStore("localhost", store.port, timeout=given, secret="x")
            assert other.timeout == other.clone().timeout == given
            other.close()
            store.close()
    monkeypatch.setenv("MPICOLL_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="MPICOLL_TIMEOUT='soon' is no valid value"):
        MAKERS[kind](tmp_path)
    if kind == "tcp":
        monkeypatch.setenv("MPICOLL_TIMEOUT", "0.3")
        with pytest.raises(dist.DistNetworkError, match=r"within 0\.3 s"):
            dist.TCPStore("localhost", 1, secret="x")
        with pytest.raises(dist.DistStoreError, match=r"1 of 2 workers connected within 0\.3 s"):
            dist.TCPStore("localhost", 0, 2, True, secret="x")
