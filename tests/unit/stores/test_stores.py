"""Stores: the same operations on all of them, waits, and a server that lives whatever its clients send."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

import mpicoll as dist
from mpicoll.stores import tcp_server, wire
from mpicoll.stores.table import StoreTable, decode, encode

SECRET = "a secret of this test"


def served(port: int = 0, **options: object) -> dist.TCPStore:
    return dist.TCPStore(
        "localhost", port, is_master=port == 0, secret=SECRET, timeout=timedelta(seconds=20), **options
    )  # type: ignore[arg-type]


MAKERS: dict[str, Callable[[Path], dist.Store]] = {
    "hash": lambda path: dist.HashStore(),
    "file": lambda path: dist.FileStore(str(path / "store"), 2),
    "tcp": lambda path: served(),
    "prefix": lambda path: dist.PrefixStore("outer", dist.PrefixStore("inner", dist.HashStore())),
}


@pytest.fixture(params=MAKERS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dist.Store]:
    made = MAKERS[request.param](tmp_path)
    yield made
    if isinstance(made, dist.TCPStore):
        made.close()


def test_operations(store: dist.Store) -> None:
    """Every operation, on every store."""
    store.set("a", "1")
    store.set("b", b"\x00\xff")
    assert store.get("a") == b"1"
    assert store.get("b") == b"\x00\xff"
    assert (store.add("n", 2), store.add("n", -5)) == (2, -3)
    assert store.get("n") == b"-3"
    assert store.compare_set("c", "old", "new") == b"old"
    assert not store.check(["c"])
    assert store.compare_set("c", "", "new") == b"new"
    assert store.compare_set("c", "old", "newer") == b"new"
    assert store.compare_set("c", "new", "newer") == b"newer"
    store.append("a", "23")
    store.append("d", "x")
    assert store.multi_get(["a", "d"]) == [b"123", b"x"]
    store.multi_set(["e", "f"], ["5", b"6"])
    assert store.get("f") == b"6"
    assert store.check(["a", "e"])
    assert not store.check(["a", "z"])
    more = isinstance(store, dist.FileStore)  # one key for the file itself, as torch has it
    assert store.num_keys() == 7 + more
    assert sorted(store.list_keys()) == ["a", "b", "c", "d", "e", "f", "n"]
    assert store.delete_key("a")
    assert not store.delete_key("a")
    assert store.num_keys() == 6 + more
    for value in ("1", "2"):
        store.queue_push("q", value)
    assert store.queue_len("q") == 2
    assert (store.queue_pop("q"), store.queue_pop("q", block=False)) == (b"1", b"2")
    assert store.queue_len("q") == 0
    with pytest.raises(dist.QueueEmptyError, match="'q' is empty"):
        store.queue_pop("q", block=False)
    assert store.has_extended_api()
    assert store.clone().get("e") == b"5"
    big = bytes(range(256)) * 4096
    store.set("big", big)
    assert store.get("big") == big


def test_limits_of_waits(store: dist.Store) -> None:
    """What does not come within the limit is an error that names it; the store can be used afterwards."""
    store.set_timeout(timedelta(seconds=0.2))
    assert store.timeout == timedelta(seconds=0.2)
    for call in (lambda: store.get("none"), lambda: store.queue_pop("none"), lambda: store.multi_get(["none"])):
        started = time.monotonic()
        with pytest.raises(dist.DistStoreError, match=r"wait timeout after 200ms, keys: .*none'"):
            call()
        assert 0.15 < time.monotonic() - started < 5
    with pytest.raises(dist.DistStoreError, match="wait timeout after 50ms"):
        store.wait(["none"], timedelta(seconds=0.05))
    store.set("some", "1")
    with pytest.raises(dist.DistStoreError, match=r"keys: '[^', ]*none' \(wait\)"):
        store.wait(["some", "none"], timedelta(seconds=0.05))
    assert store.get("some") == b"1"


def test_waits_end_when_the_value_comes(store: dist.Store) -> None:
    """Of threads that wait each gets its value, a queue's each once."""
    got: list[bytes] = []
    clones = [store.clone() for _ in range(6)]
    threads = [threading.Thread(target=lambda each=each: got.append(each.get("late"))) for each in clones[:3]]  # type: ignore[misc]
    threads += [threading.Thread(target=lambda each=each: got.append(each.queue_pop("jobs"))) for each in clones[3:]]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    store.set("late", "x")
    for number in range(3):
        store.queue_push("jobs", str(number))
    for thread in threads:
        thread.join(10)
    assert sorted(got) == [b"0", b"1", b"2", b"x", b"x", b"x"]


def test_wrong_arguments(store: dist.Store) -> None:
    """What is no key, value or limit raises, and a number that is none."""
    for call in (
        lambda: store.set(3, "x"),
        lambda: store.set("x", 3),
        lambda: store.get(None),
        lambda: store.set_timeout(3),
        lambda: store.wait(["x"], 3),
        lambda: store.add("n", 1.5),
        lambda: store.add("n", "1"),
        lambda: store.add("n", None),
        lambda: store.add("n", 1 << 63),
        lambda: store.queue_pop("q", block="no"),
        lambda: store.barrier("b", 1.5),
    ):  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            call()
    assert not store.check(["n"])
    with pytest.raises(ValueError, match="at least 1"):
        store.barrier("b", 0)
    with pytest.raises(ValueError, match="the numbers of keys and values differ"):
        store.multi_set(["a"], [])
    store.set("word", "x")
    with pytest.raises(dist.DistStoreError, match="add"):
        store.add("word", 1)


def test_kinds_of_arguments(store: dist.Store) -> None:
    """Whatever is a whole number counts, floats are limits in seconds, and a key of bytes is the same as its text."""
    assert store.add("n", True) == 1
    assert store.add(b"n", np.int64(2)) == 3  # type: ignore[arg-type]
    store.set_timeout(2.5)  # type: ignore[arg-type]
    assert store.timeout == timedelta(seconds=2.5)
    store.wait(("n",), 0.5)  # type: ignore[arg-type]
    store.barrier(b"b", 1)  # type: ignore[arg-type]
    store.barrier("b", 1)
    assert store.get("b/came") == b"2"
    store.set(b"\xff", "1")  # type: ignore[arg-type]
    (name,) = (key for key in store.list_keys() if key not in ("n", "b/came", "b/over 0", "b/over 1"))
    assert store.get(name) == b"1"


def test_prefixes() -> None:
    """Two parts of a store are apart, and their keys are there in the whole."""
    whole = dist.HashStore()
    a, b = dist.PrefixStore("a", whole), dist.PrefixStore("b", whole)
    a.set("k", "1")
    b.set("k", "2")
    b.multi_set(["l", "m"], ["3", "4"])
    assert (a.get("k"), b.get("k"), whole.get("b/l")) == (b"1", b"2", b"3")
    assert (a.num_keys(), b.num_keys(), b.list_keys()) == (4, 4, ["k", "l", "m"])
    assert a.underlying_store is whole


def test_a_file_after_its_writer_died(tmp_path: Path) -> None:
    """A record that was cut short is written over; a store that is opened later has all that is whole."""
    path = tmp_path / "store"
    first = dist.FileStore(str(path))
    first.set("a", "1")
    whole = path.read_bytes()
    first.set("b", "2")
    cut = path.read_bytes()
    for length in range(len(whole), len(cut)):
        path.write_bytes(cut[:length])
        again = dist.FileStore(str(path))
        assert again.get("a") == b"1"
        assert not again.check(["b"])
        again.set("c", "3")
        assert dist.FileStore(str(path)).multi_get(["a", "c"]) == [b"1", b"3"]


def test_lists_of_bytes() -> None:
    """What is encoded comes back; whatever else is told to be none."""
    for parts in ([], [b""], [b"a", b"", bytes(1000)]):
        assert decode(encode(parts)) == parts
    data = encode([b"abc", b"de"])
    for wrong in (data[:-1], data + b"x", b"", data[:3], b"\xff" * 12):
        with pytest.raises(ValueError):
            decode(wrong)
    with pytest.raises(dist.DistStoreError, match="no operation"):
        StoreTable().do("__class__", [])


def test_who_does_not_know_the_secret() -> None:
    """Neither side goes on with one that has another secret, and without any there is an error."""
    server = served()
    for other in ("another", b"x"):
        with pytest.raises(dist.DistNetworkError, match="another secret, and refuses"):
            dist.TCPStore("localhost", server.port, secret=other, timeout=timedelta(seconds=5))
    with pytest.raises(ValueError, match="secret="):
        dist.TCPStore("localhost", server.port)
    with pytest.raises(ValueError, match="must not be empty"):
        dist.TCPStore("localhost", server.port, secret="")
    with pytest.raises(ValueError, match="port"):
        dist.TCPStore("localhost", 0, secret=SECRET)
    with pytest.raises(dist.DistNetworkError, match="cannot listen"):
        dist.TCPStore("localhost", server.port, is_master=True, secret=SECRET)
    server.set("still", "here")
    assert server.get("still") == b"here"
    server.close()
    with pytest.raises(dist.DistNetworkError, match="no server at"):
        dist.TCPStore("localhost", server.port, secret=SECRET, timeout=timedelta(seconds=0.3))


def test_a_server_that_is_none() -> None:
    """A client tells a server that does not prove itself from one that does."""
    listener = socket.create_server(("localhost", 0))
    port = listener.getsockname()[1]

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            nonce = encode([bytes(32)])
            connection.sendall(struct.pack(">I", len(nonce)) + nonce)
            connection.recv(1000)
            proof = encode([bytes(32)])
            connection.sendall(struct.pack(">I", len(proof)) + proof)

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(dist.DistNetworkError, match="does not know the secret"):
        dist.TCPStore("localhost", port, secret=SECRET, timeout=timedelta(seconds=5))
    thread.join()
    listener.close()


def test_workers_are_awaited() -> None:
    """The server waits for as many as it is told, and says how many came."""
    with pytest.raises(dist.DistStoreError, match=r"1 of 2 workers connected within 0\.2 s"):
        dist.TCPStore("localhost", 0, 2, True, timedelta(seconds=0.2), secret=SECRET)
    server = dist.TCPStore("localhost", 0, 3, True, timedelta(seconds=20), wait_for_workers=False, secret=SECRET)
    others = [dist.TCPStore("localhost", server.port, 3, secret=SECRET) for _ in range(2)]
    others[0].set("a", "1")
    assert server.get("a") == b"1"
    assert (others[1].num_keys(), others[1].list_keys()) == (2, ["a"])
    again = dist.TCPStore("localhost", server.port, multi_tenant=True, secret=SECRET)
    assert again.get("a") == b"1"
    server.close()


def raw(port: int) -> socket.socket:
    connection = socket.create_connection(("localhost", port), timeout=5)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return connection


def known(port: int) -> socket.socket:
    """Return a connection that has shown that it knows the secret."""
    connection = raw(port)
    (theirs,) = wire.receive(connection, 512)
    ours = bytes(32)
    wire.send(connection, [ours, wire.proof_of(SECRET.encode(), b"client", ours, theirs)])
    wire.receive(connection, 512)
    return connection


def frames(rng: random.Random, first: bytes) -> Iterator[bytes]:
    """Give frames of every kind, well-formed and not, with the length before each; ``first`` is what the server expects."""
    ops = [
        b"set",
        b"get",
        b"wait",
        b"queue_pop",
        b"queue_push",
        b"add",
        b"append",
        b"multi_set",
        b"multi_get",
        b"check",
    ]
    ops += [b"compare_set", b"delete_key", b"list_keys", b"num_keys", b"queue_len", b"", b"\xff", b"__init__", b"do"]
    while True:
        kind = rng.randrange(8)
        some = [b"junk %d" % rng.randrange(30), *(rng.randbytes(rng.randrange(9)) for _ in range(rng.randrange(5)))]
        limit = rng.choice([b"0.0", b"0.0", b"0.001", b"1e9", b"nan", b"", b"x"])
        body = encode([rng.choice(ops), limit, *some])
        if kind == 1:  # any bytes
            body = rng.randbytes(rng.randrange(60))
        elif kind == 2:  # lengths inside that lie
            at = rng.randrange(len(body))
            body = body[:at] + rng.randbytes(rng.randrange(1, 5)) + body[at + 4 :]
        elif kind == 3:  # a list inside lists
            for _ in range(rng.randrange(1, 20)):
                body = encode([rng.choice(ops), b"0.0", body])
        elif kind == 4:  # what is expected, but too much or too little of it
            body = rng.choice([first[: rng.randrange(len(first))], first + b"x", encode([*decode(first), b""])])
        elif kind == 5:  # a number of parts that is not there
            body = rng.choice([0, 1, 100, 1 << 31, (1 << 32) - 1]).to_bytes(4, "big") + body[4:]
        elif kind == 6:  # more than a stranger may send
            body += bytes(rng.randrange(2000))
        yield struct.pack(">I", len(body)) + body


@pytest.mark.parametrize("knows", [False, True], ids=["stranger", "known"])
def test_random_frames(knows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server reads 10,000 random frames, of strangers and of those who know the secret; it lives, and others are served."""
    counts = {"come": 0, "no list": 0, "met": 0, "done": 0}
    plain = tcp_server.decode

    def counted(data: bytes) -> list[bytes]:
        if threading.current_thread().name == "mpicoll TCPStore":
            counts["come"] += 1
            try:
                return plain(data)
            except ValueError:
                counts["no list"] += 1
                raise
        return plain(data)

    def counting(name: str, function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: object) -> None:
            counts[name] += 1
            function(*args)

        return call

    monkeypatch.setattr(tcp_server, "decode", counted)
    monkeypatch.setattr(tcp_server.Server, "_verify", counting("met", tcp_server.Server._verify))
    monkeypatch.setattr(tcp_server.Server, "_do", counting("done", tcp_server.Server._do))
    server, rng = served(), random.Random(knows)
    other = served(server.port)
    junk = frames(rng, encode([b"get", b"0.0", b"junk 1"]) if knows else encode([bytes(32), bytes(32)]))
    mine, besides = 0, counts["come"]  # frames of others, and of greetings
    while counts["come"] - besides < 5_000:
        with known(server.port) if knows else raw(server.port) as connection:
            besides += knows
            if not knows:
                wire.receive(connection, 512)
            for _ in range(20):  # until the server hangs up
                frame = next(junk)
                with contextlib.suppress(OSError, ValueError):
                    if rng.random() < 0.02:  # less, or more, than is said
                        connection.sendall(frame[:-1] if rng.random() < 0.5 else rng.randbytes(4) + frame)
                        break
                    connection.sendall(frame)
                    connection.settimeout(0.3)
                    wire.receive(connection, wire.LARGEST)
                    continue
                break
        if rng.random() < 0.1:
            mine += 1
            other.set("mine", str(mine))
            assert other.get("mine") == b"%d" % mine
            besides += 2
    assert counts["no list"] > 500, counts
    assert counts["done" if knows else "met"] > 2_000, counts
    assert other.get("mine") == b"%d" % mine
    assert "mine" in other.list_keys() if knows else other.list_keys() == ["mine"]
    server.close()


def test_a_client_that_does_not_read() -> None:
    """Of one that asks on and on the server keeps one answer, and no questions to speak of; each is answered when it reads."""
    server = served()
    value = bytes(8 << 20)
    server.set("big", value)
    other = served(server.port)
    serving = server._server
    assert serving is not None
    held, stop = [0], threading.Event()

    def look() -> None:
        while not stop.is_set():
            held[0] = max(held[0], sum(len(each.received) + len(each.unsent) for each in tuple(serving._clients)))
            time.sleep(0.001)

    looker = threading.Thread(target=look)
    looker.start()
    with known(server.port) as silent:
        for _ in range(40):
            wire.send(silent, [b"get", b"3.0", b"big"])
        for number in range(1, 21):
            assert other.add("n", 1) == number
            time.sleep(0.01)
        assert held[0] < len(value) + (1 << 20)
        for _ in range(40):
            answer = b""
            while len(answer) < 4:
                answer += silent.recv(4 - len(answer))
            body = bytearray()
            while len(body) < int.from_bytes(answer, "big"):
                body += silent.recv(min(1 << 20, int.from_bytes(answer, "big") - len(body)))
            assert decode(bytes(body)) == [b"done", value]
        wire.send(silent, [b"get", b"3.0", b"big"])
        silent.settimeout(0.5)
        question = encode([b"get", b"3.0", b"big"])
        with pytest.raises(TimeoutError):  # it has to wait, too
            while True:
                silent.sendall((len(question).to_bytes(4, "big") + question) * 10_000)
        assert other.add("n", 1) == 21
    stop.set()
    looker.join()
    assert held[0] < len(value) + (1 << 20)
    until = time.monotonic() + 5
    while len(serving._clients) > 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    server.close()


def test_many_questions_at_once() -> None:
    """A client that sends many questions before it reads gets all answers in order, and others have their turn meanwhile."""
    server = served()
    other = served(server.port)
    question = encode([b"add", b"3.0", b"n", b"1"])
    wait = encode([b"wait", b"9.0", b"go"])
    with known(server.port) as many:
        many.sendall(struct.pack(">I", len(wait)) + wait + (struct.pack(">I", len(question)) + question) * 30_000)
        time.sleep(0.2)
        other.set("go", "1")
        seen = int(other.add("n", 0))
        assert seen < 30_000
        whole = len(encode([b"done"])) + 4 + sum(len(encode([b"done", b"%d" % n])) + 4 for n in range(1, 30_001))
        came = bytearray()
        while len(came) < whole:
            came += many.recv(1 << 16)
        assert came.endswith(encode([b"done", b"30000"]))
    server.close()


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("op", [[b"set", b"1.0", b"key", b"value"], [b"queue_pop", b"9.0", b"key", b"1"]])
def test_a_client_that_dies_at_each_byte(reset: bool, op: list[bytes]) -> None:
    """A connection that ends anywhere in the greeting or in a message harms nobody, and does nothing by halves.

    It ends in order, or is reset, as that of a process that is killed with data unread.
    """
    server = served()
    other = served(server.port)

    def die(connection: socket.socket) -> None:
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    message = encode(op)
    whole = struct.pack(">I", len(message)) + message
    for length in range(len(whole)):
        with known(server.port) as connection:
            connection.sendall(whole[:length])
            die(connection)
        assert other.add("n", 1) == length + 1
    greeting = struct.pack(">I", 80) + bytes(80)
    for length in range(len(greeting)):
        with raw(server.port) as connection:
            connection.sendall(greeting[:length])
            die(connection)
        assert not other.check(["key"])
    message = encode([b"set", b"1.0", b"key", b"value"])
    whole = struct.pack(">I", len(message)) + message
    with known(server.port) as connection:
        connection.sendall(whole)
        wire.receive(connection, 100)
    assert other.get("key") == b"value"
    server.close()


def test_a_connection_that_is_lost() -> None:
    """A client whose connection breaks tells so, and makes a new one with its next call."""
    server = served()
    client = served(server.port)
    client.set("a", "1")
    assert client._connection is not None
    client._connection.shutdown(socket.SHUT_RDWR)
    with pytest.raises(dist.DistNetworkError, match="is lost"):
        client.get("a")
    assert client.get("a") == b"1"
    with pytest.raises(dist.DistStoreError, match="more than"):
        client.set("a", bytes(wire.LARGEST))
    server.close()


@pytest.mark.parametrize("timeout", [b"nan", b"inf", b"-inf", b"1e30", b"-1", b"x"])
def test_limits_that_are_none(timeout: bytes) -> None:
    """A frame with such a limit ends its connection, and not the server."""
    server = served()
    with known(server.port) as connection:
        wire.send(connection, [b"get", timeout, b"none"])
        with pytest.raises(OSError):
            wire.receive(connection, 1000)
    server.set("a", "1")
    assert server.get("a") == b"1"
    server.close()


def test_very_long_limits() -> None:
    """A month is a limit like others, and no limit at all as well."""
    server = served()
    for limit in (timedelta(days=30), timedelta(0), timedelta(days=10_000)):
        other = served(server.port)
        other.set_timeout(limit)
        got: list[bytes] = []
        thread = threading.Thread(target=lambda other=other, got=got: got.append(other.get("late")))  # type: ignore[misc]
        thread.start()
        time.sleep(0.1)
        server.set("late", "x")
        thread.join(10)
        assert got == [b"x"]
        server.delete_key("late")
    with pytest.raises(ValueError, match="negative"):
        server.set_timeout(timedelta(seconds=-1))
    server.close()


def test_what_stands_behind_a_wait() -> None:
    """Junk that a client sends while it waits ends that client when its turn comes, and nobody else."""
    server = served()
    with known(server.port) as junk, known(server.port) as good:
        wire.send(junk, [b"wait", b"9.0", b"k"])
        junk.sendall(b"\xff" * 8)
        wire.send(good, [b"wait", b"9.0", b"k"])
        wire.send(good, [b"get", b"9.0", b"k"])
        time.sleep(0.1)
        server.set("k", "1")
        answers = [encode(answer) for answer in ([b"done"], [b"done", b"1"])]
        whole, came = b"".join(len(answer).to_bytes(4, "big") + answer for answer in answers), b""
        while len(came) < len(whole):
            came += good.recv(100)
        assert came == whole
        assert server.get("k") == b"1"
    server.close()


def test_many_wait_for_keys_of_their_own() -> None:
    """Each goes on when its keys have come, and not with another's; one that has hung up meanwhile is in nobody's way."""
    server = served()
    with known(server.port) as gone, known(server.port) as both, known(server.port) as one, known(server.port) as queue:
        wire.send(gone, [b"wait", b"9.0", b"a", b"b"])
        wire.send(both, [b"multi_get", b"9.0", b"a", b"b", b"a"])
        wire.send(one, [b"get", b"9.0", b"b"])
        wire.send(queue, [b"queue_pop", b"9.0", b"q", b"1"])
        time.sleep(0.1)
        gone.close()
        server.multi_set(["a", "c"], ["1", "b"])
        for waits in (both, one, queue):
            waits.settimeout(0.1)
            with pytest.raises(TimeoutError):
                wire.receive(waits, 100)
            waits.settimeout(5)
        server.append("b", "2")
        assert wire.receive(both, 100) == [b"done", b"1", b"2", b"1"]
        assert wire.receive(one, 100) == [b"done", b"2"]
        server.queue_push("q", "3")
        assert wire.receive(queue, 100) == [b"done", b"3"]
    serving = server._server
    assert serving is not None
    assert not serving._waiting
    assert not serving._waiting_for
    server.close()


CHANGING: dict[str, Callable[[dist.Store], object]] = {
    "set": lambda store: store.set("k", "5"),
    "add": lambda store: store.add("k", 5),
    "compare_set": lambda store: store.compare_set("k", "", "5"),
    "append": lambda store: store.append("k", "5"),
    "multi_set": lambda store: store.multi_set(["a", "k", "b"], ["1", "5", "2"]),
    "queue_push": lambda store: store.queue_push("k", "5"),
}


@pytest.mark.parametrize("op", CHANGING)
def test_what_lets_others_go_on(op: str) -> None:
    """Each operation that brings a key lets those go on that wait for it, in whatever way, and no others."""
    server = served()
    values = [encode([name, b"9.0", b"k"]) for name in (b"get", b"multi_get")]
    queues = [encode([b"queue_pop", b"9.0", b"k", b"1"])]
    go_on = [encode([b"wait", b"9.0", b"k"]), *(queues if op == "queue_push" else values)]
    stay = [*(values if op == "queue_push" else queues), encode([b"wait", b"9.0", b"k", b"z"])]
    with contextlib.ExitStack() as opened:
        waiting = []
        for question in (*go_on, *stay):
            waiting.append(opened.enter_context(known(server.port)))
            waiting[-1].sendall(struct.pack(">I", len(question)) + question)
        serving = server._server
        assert serving is not None
        until = time.monotonic() + 5
        while len(serving._waiting) < len(waiting):
            assert time.monotonic() < until
            time.sleep(0.01)
        server.delete_key("k")
        with contextlib.suppress(dist.QueueEmptyError):
            server.queue_pop("k", block=False)
        server.compare_set("k", "other", "x")
        assert len(serving._waiting) == len(waiting)
        CHANGING[op](server)
        for each in waiting[: len(go_on)]:
            assert wire.receive(each, 100)[0] == b"done"
        assert len(serving._waiting) == len(stay)
    server.close()


def test_a_change_by_one_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait for it go on, also where its client had hung up before it was answered."""
    server = served()
    other = served(server.port)
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(other.get("k")))
    thread.start()
    time.sleep(0.1)
    with known(server.port) as dies:
        plain = tcp_server.Server._send

        def broken(self: tcp_server.Server, client: tcp_server._Client, parts: list[bytes]) -> None:
            if client.connection.getpeername()[1] == dies.getsockname()[1]:
                raise BrokenPipeError
            plain(self, client, parts)

        monkeypatch.setattr(tcp_server.Server, "_send", broken)
        wire.send(dies, [b"set", b"1.0", b"k", b"1"])
        thread.join(5)
    assert got == [b"1"]
    server.close()


def test_after_the_end() -> None:
    """A store that was closed, or whose server is gone, says so soon."""
    server = served()
    other = served(server.port)
    server.close()
    for store in (server, other):
        started = time.monotonic()
        with pytest.raises(dist.DistNetworkError):
            store.wait(["a"], timedelta(seconds=0.2))
        with pytest.raises(dist.DistNetworkError):
            store.wait(["a"], timedelta(seconds=0.2))
        assert time.monotonic() - started < 5


def test_a_wait_during_which_the_store_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a wait on a rank progresses may use the same store, in the same thread."""
    store = served()
    monkeypatch.setattr("mpicoll.stores.tcp_client.longest_rest", lambda: 0.005)
    monkeypatch.setattr("mpicoll.stores.wire.progress", lambda: store.set("a", b"1"))
    store.wait(["a"], timedelta(seconds=5))
    assert store.get("a") == b"1"
    store.close()


def test_servers_that_are_shared() -> None:
    """Stores of several tenants have one server, which ends with the last of them."""
    first = served(multi_tenant=True)
    second = dist.TCPStore("localhost", first.port, None, True, multi_tenant=True, secret=SECRET)
    assert second._server is first._server
    first.set("a", "1")
    first.close()
    assert second.get("a") == b"1"
    running = second._server
    assert running is not None
    second.close()
    assert not running.alive


@pytest.mark.parametrize("address", ["", "127.0.0.5"])
def test_a_socket_that_listens_already(address: str) -> None:
    """The server takes it over, wherever it is bound to, and closes it at the end; another port than its own is refused."""
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    with pytest.raises(dist.DistStoreError, match=f"is bound to port {port}, not to port {port + 1}"):
        dist.TCPStore("localhost", port + 1, is_master=True, master_listen_fd=listener.fileno(), secret=SECRET)
    own = dist.TCPStore(address or "localhost", port, is_master=True, master_listen_fd=listener.detach(), secret=SECRET)
    assert own.port == port
    other = dist.TCPStore(address or "localhost", port, secret=SECRET)
    other.set("a", "1")
    assert own.get("a") == b"1"
    other.close()
    own.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address or "localhost", port), timeout=5).close()


def test_a_port_that_is_none() -> None:
    """Refused before a socket is made."""
    with pytest.raises(TypeError, match="port must be from 0 to 65535, got 70000"):
        dist.TCPStore("localhost", 70000, is_master=True, secret=SECRET)


def test_values_do_not_grow_past_what_can_be_read(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would not go through a TCPStore in one piece is not appended, and the value stays as it was."""
    monkeypatch.setattr("mpicoll.stores.table.LARGEST_VALUE", 10)
    store.append("a", "12345678")
    with pytest.raises(dist.DistStoreError, match="would have 11 bytes; a value may have 10"):
        store.append("a", "9ab")
    store.append("a", "9a")
    assert store.get("a") == b"123456789a"


def test_many_strangers() -> None:
    """Connections that say nothing give way to others."""
    server = served()
    strangers = [raw(server.port) for _ in range(300)]
    other = served(server.port)
    other.set("a", "1")
    assert server.get("a") == b"1"
    for each in strangers:
        each.close()
    server.close()


@pytest.mark.parametrize("secret", [4, 1.0, [b"x"]])
def test_secrets_that_are_none(secret: object) -> None:
    """A number is no secret: bytes(4) is four zeros."""
    with pytest.raises(TypeError, match="string or bytes"):
        dist.TCPStore("localhost", 0, is_master=True, secret=secret)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12, of a process with threads
def test_a_forked_child() -> None:
    """It has a connection of its own, and leaves the parent's server alone."""
    server = served()
    server.set("a", "1")
    child = os.fork()
    if not child:
        code = 1
        try:
            code = 0 if server.get("a") == b"1" and server.add("n", 1) == 1 else 2
            server.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert server.get("n") == b"1"
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.15
    server.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_that_stays() -> None:
    """What the parent closes is closed, though a child lives on that has not used it."""
    server = served()
    other = served(server.port)
    end, tell = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(tell)
            os.read(end, 1)
        finally:
            os._exit(0)
    os.close(end)
    try:
        serving = server._server
        assert serving is not None
        other._disconnect()
        until = time.monotonic() + 5
        while len(serving._clients) > 1:
            assert time.monotonic() < until, "the server does not see that a client has hung up"
            time.sleep(0.01)
        other.set("a", "1")
        server.close()
        started = time.monotonic()
        with pytest.raises(dist.DistNetworkError):
            other.get("a")
        assert time.monotonic() - started < 5
        with pytest.raises(dist.DistNetworkError, match="no server at"):
            dist.TCPStore("localhost", server.port, secret=SECRET, timeout=timedelta(seconds=0.2))
    finally:
        os.close(tell)
        os.waitpid(child, 0)


def test_barriers_of_stores(store: dist.Store) -> None:
    """All leave it when the last has come, again and again."""
    left: list[int] = []

    def come(number: int) -> None:
        each = store.clone()
        for _ in range(3):
            each.barrier("b", 3)
            left.append(number)

    threads = [threading.Thread(target=come, args=(number,)) for number in range(3)]
    for thread in threads[:2]:
        thread.start()
    time.sleep(0.1)
    assert not left
    threads[2].start()
    for thread in threads:
        thread.join(10)
    assert sorted(left) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_lists_are_lists(store: dist.Store) -> None:
    """A word is not taken for the list of its letters."""
    for call in (
        lambda: store.wait("key"),
        lambda: store.check("key"),
        lambda: store.multi_get("key"),
        lambda: store.multi_set("k", "v"),
    ):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="must be a list"):
            call()


def test_files_that_are_none(tmp_path: Path) -> None:
    """A file of something else is left alone; one that is replaced, or cut down, is read from its beginning."""
    other = tmp_path / "other"
    other.write_bytes(b"some text that is no store" * 10)
    with pytest.raises(dist.DistStoreError, match="is no file of a FileStore"):
        dist.FileStore(str(other))
    assert other.read_bytes().startswith(b"some text")
    with pytest.raises(dist.DistStoreError, match="No such file"):
        dist.FileStore(str(tmp_path / "none" / "store"))
    path = tmp_path / "store"
    first = dist.FileStore(str(path))
    first.set("a", "1")
    path.unlink()
    second = dist.FileStore(str(path))
    second.set("b", "2")
    first.set("c", "3")
    assert sorted(second.list_keys()) == sorted(first.list_keys()) == ["b", "c"]


def test_the_last_store_removes_the_file(tmp_path: Path) -> None:
    """A file whose number of stores is known is gone when all of them are."""
    path = tmp_path / "store"
    stores = [dist.FileStore(str(path), 2) for _ in range(2)]
    stores[0].set("a", "1")
    stores[0].close()
    stores[0].close()
    assert stores[1].get("a") == b"1"
    assert stores[1].num_keys() == 2
    del stores
    assert not path.exists()


class Own(dist.Store):
    """A store of a program's own, as torch's are made."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self.values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
        return int(self.values[key])


def test_parts_of_a_store_of_ones_own() -> None:
    """A prefix serves what the store below has; its limit is the other's."""
    own = Own()
    part = dist.PrefixStore("p", own)
    part.set("a", "1")
    assert own.values == {"p/a": b"1"}
    assert part.get("a") == b"1"
    assert part.add("n", 3) == 3
    part.set_timeout(timedelta(seconds=7))
    assert own.timeout == part.timeout == timedelta(seconds=7)
    assert part.multi_get(["a", "n"]) == [b"1", b"3"]
    part.multi_set(["b", "c"], ["4", b"5"])
    assert (own.values["p/b"], own.values["p/c"]) == (b"4", b"5")
    for call in (
        lambda: part.wait(["a"]),
        lambda: part.check(["a"]),
        lambda: part.num_keys(),
        lambda: part.append("a", ""),
    ):
        with pytest.raises(NotImplementedError, match="Own does not define"):
            call()


class Full(Own):
    """One that defines the others, too."""

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def wait(self, keys: list[str]) -> None:  # type: ignore[override]
        assert self.check(keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values[key] + b"!" for key in keys]

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        if self.values.get(key, b"") == expected_value:
            self.set(key, desired_value)
        return self.values[key]

    def list_keys(self) -> list[str]:
        return list(self.values)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return f"{key} {block}".encode()


def test_parts_of_a_whole_store_of_ones_own() -> None:
    """A prefix hands every operation on to the function of that name, through other prefixes, too."""
    own = Full()
    part = dist.PrefixStore("o", dist.PrefixStore("p", own))
    own.set("elsewhere", "1")
    part.multi_set(["a", "b"], ["1", "2"])
    assert own.values == {"elsewhere": b"1", "p/o/a": b"1", "p/o/b": b"2"}
    assert (part.check(["a", "b"]), part.check(["a", "c"])) == (True, False)
    assert part.multi_get(["a", "b"]) == [b"1!", b"2!"]
    part.wait(["a"])
    part.append("a", "3")
    part.append("c", "4")
    assert (part.get("a"), part.get("c")) == (b"13", b"4")
    assert sorted(part.list_keys()) == ["a", "b", "c"]
    assert part.queue_pop("q", block=False) == b"p/o/q False"
