"""TCPStore: a limit is that of the whole call, and neither strangers nor missing descriptors stop the server."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

import mpicoll as dist
from mpicoll.stores import tcp_server, wire

SECRET = "a secret of this test"


def store_at(port: int, seconds: float = 20.0) -> dist.TCPStore:
    return dist.TCPStore("localhost", port, secret=SECRET, timeout=timedelta(seconds=seconds))


class SlowServer:
    """A server that sends one of its frames byte by byte, each before the limit of a client that counts from the last byte.

    ``slow`` is the number of this frame: 0 the greeting, 1 the proof, 2 and on the answers; ``"reads"``: it reads like this.
    """

    def __init__(self, slow: int | str) -> None:
        self.slow = slow
        self.over = threading.Event()
        self.listener = socket.create_server(("localhost", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=(self.listener.accept()[0],), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        nonce = bytes(32)
        with connection, contextlib.suppress(OSError, ValueError):
            self._send(connection, 0, [nonce])
            ours, _ = wire.receive(connection, 512)
            self._send(connection, 1, [wire.proof_of(SECRET.encode(), b"server", nonce, ours)])
            for number in range(2, 100):
                while self.slow == "reads" and not self.over.wait(0.1):
                    connection.recv(1000)
                op, *_ = wire.receive(connection, wire.LARGEST)
                self._send(connection, number, [b"done", b"1"] if op in (b"add", b"get") else [b"done"])

    def _send(self, connection: socket.socket, number: int, parts: list[bytes]) -> None:
        data = wire.frame(parts)
        if number != self.slow:
            connection.sendall(data)
            return
        for each in data:
            connection.sendall(bytes([each]))
            if self.over.wait(0.3):
                return

    def close(self) -> None:
        self.over.set()
        self.listener.close()


WHOLE: dict[str, tuple[int | str, Callable[[int], object], type[Exception], str]] = {
    "greeting": (0, lambda port: store_at(port, 0.5), dist.DistNetworkError, "within 0\\.5 s: timed out"),
    "proof": (1, lambda port: store_at(port, 0.5), dist.DistNetworkError, "within 0\\.5 s: timed out"),
    "workers": (
        3,
        lambda port: dist.TCPStore("localhost", port, 1, timeout=timedelta(seconds=0.5), secret=SECRET),
        dist.DistNetworkError,
        "set: the server at .* has not answered",
    ),
    "get": (
        2,
        lambda port: store_at(port, 0.5).get("a"),
        dist.DistStoreError,
        "wait timeout after 500ms, keys: 'a' \\(get\\): .*get: .*has not answered within 0\\.5 s",
    ),
    "wait": (
        2,
        lambda port: store_at(port, 30).wait(["a"], timedelta(seconds=0.5)),
        dist.DistStoreError,
        "wait: .* within 0\\.5 s",
    ),
    "barrier": (
        3,
        lambda port: store_at(port, 30).barrier("b", 1, timedelta(seconds=0.5)),
        dist.DistNetworkError,
        "set: .*has not answered",
    ),
    "large value": (
        "reads",
        lambda port: store_at(port, 0.5).set("a", bytes(60 << 20)),
        dist.DistNetworkError,
        "set: .*has not answered within 0\\.5 s",
    ),
}


@pytest.mark.parametrize("case", WHOLE)
def test_a_limit_is_of_the_whole_call(case: str) -> None:
    """A server that sends, or takes, a byte now and then does not prolong a call."""
    slow, call, kind, why = WHOLE[case]
    server = SlowServer(slow)
    started = time.monotonic()
    try:
        with pytest.raises(kind, match=why):
            call(server.port)
        assert 0.4 < time.monotonic() - started < 4
    finally:
        server.close()


def test_a_limit_counts_for_another_thread() -> None:
    """A thread does not wait beyond its limit for another's call on the same store; it is told of clone()."""
    server = dist.TCPStore("localhost", 0, is_master=True, secret=SECRET, timeout=timedelta(seconds=20))
    thread = threading.Thread(target=server.get, args=("late",))
    thread.start()
    time.sleep(0.1)
    started = time.monotonic()
    with pytest.raises(dist.DistStoreError, match=r"wait: another thread has used this store for 0\.3 s: .*clone\(\)"):
        server.wait(["late"], timedelta(seconds=0.3))
    assert 0.2 < time.monotonic() - started < 5
    server.clone().set("late", "1")
    thread.join()
    server.close()


SERVER = """
import os, resource, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))
import mpicoll as dist
from mpicoll.stores import tcp_server
if sys.argv[2] == "without spare":
    tcp_server._spare = lambda: -1
store = dist.TCPStore("localhost", 0, is_master=True, secret="a secret of this test")
print(store.port, flush=True)
opened = []
for line in sys.stdin:
    if line == "use\\n":
        try:
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass
    elif line == "free\\n":
        while opened:
            os.close(opened.pop())
    print(time.process_time(), flush=True)
"""


class ServerProcess:
    """A process with a server, which may have ``limit`` descriptors."""

    def __init__(self, limit: int, kind: str = "") -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", SERVER, str(limit), kind]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def do(self, what: str) -> float:
        """Use or free all descriptors, or neither; return the processor time so far."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def end(self) -> str:
        """End the process and return its stderr."""
        return self.process.communicate(timeout=20)[1]


@contextlib.contextmanager
def silent(port: int, count: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as opened:
        yield [opened.enter_context(socket.create_connection(("localhost", port), timeout=5)) for _ in range(count)]


def is_open(connection: socket.socket) -> bool:
    """Return whether the server has not closed a connection, beyond its greeting."""
    connection.settimeout(0.05)
    try:
        while connection.recv(1000):
            pass
        return False
    except TimeoutError:
        return True
    except OSError:
        return False


def test_strangers_do_not_take_the_descriptors() -> None:
    """Of 300 silent connections an eighth of the limit stays, the latest; who knows the secret is served as before."""
    server = ServerProcess(128)
    client = store_at(server.port)
    before = server.descriptors()
    with silent(server.port, 300) as strangers:
        started = time.monotonic()
        for number in range(200):
            assert client.add("n", 1) == number + 1
        assert time.monotonic() - started < 5  # at most 12 in a second, while a server without a descriptor pauses
        assert server.descriptors() <= before + 16
        assert store_at(server.port, 5).get("n") == b"200"
        open_ones = [is_open(each) for each in strangers]
        assert not any(open_ones[:-17])
        assert all(open_ones[-14:])
    assert server.end() == ""


@pytest.mark.parametrize(("limit", "most"), [(20, 4), (128, 16), (1024, 128), (1 << 20, 256), (-1, 256)])
def test_how_many_strangers(limit: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number follows from the limit of descriptors."""
    monkeypatch.setattr("resource.getrlimit", lambda _: (limit, limit))
    assert tcp_server.most_strangers() == most


@pytest.mark.parametrize("kind", ["", "without spare"])
def test_a_server_without_descriptors(kind: str) -> None:
    """It says so once, also to clients, serves those it has, uses no processor, and accepts again when there are descriptors."""
    server = ServerProcess(64, kind)
    client = store_at(server.port)
    used = server.do("use")
    why = ".* no free file descriptor: .*`ulimit -n`" if not kind else "within 1 s"
    started = time.monotonic()
    with pytest.raises(dist.DistNetworkError, match=f"localhost:{server.port} .*{why}"):
        store_at(server.port, 1)
    assert time.monotonic() - started < 5
    for number in range(100):
        assert client.add("n", 1) == number + 1
    late: list[bytes] = []
    thread = threading.Thread(target=lambda: late.append(store_at(server.port, 20).get("n")))
    thread.start()
    time.sleep(0.5)
    assert server.do("free") - used < 0.8
    thread.join()
    assert late == [b"100"]
    said = server.end()
    assert re.fullmatch(
        rf"mpicoll: the TCPStore on port {server.port} refuses connections: Too many open files \(this process may have 64, "
        r"2 are clients of the store\): close files, or increase `ulimit -n`\n",
        said,
    )


def test_a_stranger_gives_its_descriptor_up() -> None:
    """Where no descriptor is free, one that has proved nothing makes room for the next."""
    server = ServerProcess(64)
    with silent(server.port, 3):
        time.sleep(0.3)
        server.do("use")
        for _ in range(3):
            store_at(server.port, 5).close()
    assert server.end() == ""


def test_no_event_looks_at_all() -> None:
    """What an event costs does not grow with the clients that wait and the strangers."""
    own = dist.TCPStore("localhost", 0, is_master=True, secret=SECRET)
    server = own._server
    assert server is not None
    own.close()
    one, two = socket.socketpair()
    now = time.monotonic()

    def cost() -> float:
        took = []
        for _ in range(50):
            started = time.perf_counter()
            server._pause()
            server._sweep()
            took.append(time.perf_counter() - started)
        return min(took)

    costs = []
    for count in (10, 5_000):
        for number in range(count):
            client = tcp_server._Client(one)
            client.asks = "get", [b"k%d" % number], now + 300 + number % 7
            server._clients[client] = None
            server._wait(client, client.asks[1])
            server._strangers[tcp_server._Client(one)] = None
        costs.append(cost())
    assert costs[1] < 50 * costs[0]  # 500 times as many
    one.close()
    two.close()


def test_limits_that_are_over_are_forgotten() -> None:
    """Waits that ended well before their limits leave nothing behind; a later limit passes at its time."""
    server = dist.TCPStore("localhost", 0, is_master=True, secret=SECRET)
    other = store_at(server.port)
    serving = server._server
    assert serving is not None
    for number in range(1000):
        thread = threading.Thread(target=other.queue_pop, args=("q",))
        thread.start()
        while not serving._waiting:
            time.sleep(0.0005)
        server.queue_push("q", str(number))
        thread.join()
    assert len(serving._ends) < 110
    started = time.monotonic()
    with pytest.raises(dist.DistStoreError, match=r"wait timeout after 300ms, keys: 'b' \(wait\)"):
        server.set("a", "1")
        server.wait(["a", "b"], timedelta(seconds=0.3))
    assert 0.2 < time.monotonic() - started < 5
    server.close()


def test_a_server_that_is_stopped() -> None:
    """A call ends at its limit, and says which server has not answered; a wait raises the error of a missing key, each time."""
    server = ServerProcess(256)
    client = store_at(server.port, 0.3)
    silent = r"(: .* has not answered|no server at .*) within 0\.3 s: "
    server.process.send_signal(signal.SIGSTOP)
    try:
        for call, kind, words in (
            (lambda: client.wait(["a", "b"], timedelta(seconds=0.3)), dist.DistStoreError, r"'a', 'b' \(wait\)"),
            (lambda: client.get("a"), dist.DistStoreError, r"wait timeout after 300ms, keys: 'a' \(get\)"),
            (lambda: client.queue_pop("q"), dist.DistStoreError, r"keys: 'q' \(queue_pop\)"),
            (lambda: client.queue_pop("q", block=False), dist.DistNetworkError, ""),
            (lambda: client.set("a", "1"), dist.DistNetworkError, ""),
        ):
            started = time.monotonic()
            with pytest.raises(kind, match=f"{words}.*{silent}"):
                call()
            assert 0.2 < time.monotonic() - started < 5
    finally:
        server.process.send_signal(signal.SIGCONT)
    assert client.add("n", 1) == 1
    assert server.end() == ""


def test_a_name_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit holds while the address of the host is looked up, and an address that comes is used."""
    over, real = threading.Event(), socket.getaddrinfo

    def getaddrinfo(host: str, *args: int, flags: int = 0, **more: int) -> object:
        if host != "far.example" or flags & socket.AI_NUMERICHOST:
            return real(host, *args, flags=flags, **more)
        assert over.wait(60)
        return real("localhost", *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    server = dist.TCPStore("localhost", 0, is_master=True, secret=SECRET)
    with pytest.raises(dist.DistNetworkError, match=r"no name server has told the address of far\.example"):
        dist.TCPStore("far.example", server.port, secret=SECRET, timeout=timedelta(seconds=0.3))
    assert not over.is_set()
    over.set()
    assert dist.TCPStore("far.example", server.port, secret=SECRET).num_keys() == 0
    with pytest.raises(dist.DistNetworkError, match=r"no server at nowhere\.invalid:"):
        dist.TCPStore("nowhere.invalid", server.port, secret=SECRET, timeout=timedelta(seconds=0.3))
    server.close()
