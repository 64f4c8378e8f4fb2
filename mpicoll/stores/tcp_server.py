"""The server of a TCPStore: one process has the table; clients ask over TCP after a proof that they know the secret.

Connections without a proof (*strangers*) are few: beyond a part of the process's descriptors the oldest is closed. The limits of
strangers and of waiting clients are in the order in which they pass: no event looks at all of them.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import hmac
import os
import resource
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from mpicoll.errors import DistNetworkError, DistStoreError
from mpicoll.runtime.output import say
from mpicoll.runtime.watchdog import OwnThread
from mpicoll.stores.base import FOR_EVER
from mpicoll.stores.table import CHANGES, StoreTable, decode
from mpicoll.stores.wire import FULL, GREETING_SECONDS, LARGEST, MOST_GREETING, REFUSED, frame, proof_of, tune

_MOST_CLIENTS = 65_536
_MOST_STRANGERS = 256
_AT_ONCE = 1 << 18
"""The most bytes that are read from a connection before other connections are served."""
_FRAMES_AT_ONCE = 256
_PAUSE = 3600.0
_DEAF_SECONDS = 0.1
_SAY_SECONDS = 60.0


def most_strangers() -> int:
    """Return how many connections may be without a proof: an eighth of the descriptors that this process may have, 4 to 256."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST_STRANGERS if limit == resource.RLIM_INFINITY else max(4, min(limit // 8, _MOST_STRANGERS))


class _Client:
    """The server's state of one connection.

    Attributes:
        nonce: the server's random number for the proof.
        since: when the client connected.
        received: bytes of frames that have not been handled.
        unsent: the rest of at most one answer; until the rest is sent no further question is handled.
        asks: the question that waits: operation, arguments, end of its limit.
        waits_for: the keys whose change can end the wait.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.nonce = secrets.token_bytes(32)
        self.since = time.monotonic()
        self.received = bytearray()
        self.unsent = memoryview(b"")
        self.asks: tuple[str, list[bytes], float] | None = None
        self.waits_for: Sequence[bytes] = ()


class Server:
    """The table and the thread that serves it."""

    def __init__(self, port: int, secret: bytes, listening: int | None) -> None:
        self._secret = secret
        self._table = StoreTable()
        self._pid = os.getpid()
        self.users = 0
        try:
            self._listener = _listen(port) if listening is None else socket.socket(fileno=listening)
        except OSError as error:
            raise DistNetworkError(f"TCPStore cannot listen on port {port}: {error}") from error
        self.address, self.port = _where(self._listener)
        if listening is not None and port not in (0, self.port):
            self._listener.detach()  # the socket remains the caller's
            raise DistStoreError(f"TCPStore: listen fd {listening} is bound to port {self.port}, not to port {port}")
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._waker, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._clients: dict[_Client, None] = {}  # in the order of their connections
        self._strangers: dict[
            _Client, None
        ] = {}  # clients that have not proved that they know the secret, the oldest first
        self._waiting: dict[_Client, None] = {}
        self._ends: list[
            tuple[float, int, _Client, object]
        ] = []  # a heap of limits, number, client, question; some are over
        self._questions = 0
        self._waiting_for: dict[bytes, dict[_Client, None]] = {}  # the waiting clients of each key
        self._buffer = bytearray(_AT_ONCE)
        self._unread: dict[_Client, None] = {}  # clients that may have sent frames that have not been handled
        self._spare = _spare()
        self._deaf_until = 0.0  # when connections are accepted again; 0: now
        self._says_at = 0.0  # when a missing descriptor may be reported again
        self._over = False
        of_this_process.add(self)
        self._thread = OwnThread(target=self._serve, name="mpicoll TCPStore", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether this process runs the server's thread."""
        return not self._over and self._pid == os.getpid() and self._thread.is_alive()

    def close(self) -> None:
        """End the thread and every connection; do nothing in a forked process, which does not own them."""
        if self._pid != os.getpid():
            return
        self._over = True
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join(5)

    def after_fork(self) -> None:
        """Close all sockets in a forked process; they stay registered for the parent."""
        for client in self._clients:
            client.connection.close()
        self._close_own()

    def _close_own(self) -> None:
        for each in (self._listener, self._wakes, self._waker):
            each.close()
        self._close_spare()
        self._selector.close()

    def _close_spare(self) -> None:
        spare, self._spare = self._spare, -1
        if spare >= 0:
            os.close(spare)

    def _serve(self) -> None:
        try:
            while True:
                if self._over:
                    break
                for key, events in self._selector.select(0 if self._unread else self._pause()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data is not None:
                        self._guarded(key.data, self._move, events)
                    else:
                        with contextlib.suppress(OSError):
                            self._wakes.recv(100)
                unread, self._unread = self._unread, {}
                for client in unread:
                    self._guarded(client, self._read)
                self._sweep()
        finally:
            for client in tuple(self._clients):
                self._drop(client)
            self._close_own()

    def _guarded(self, client: _Client, step: Callable[..., None], *args: Any) -> None:
        """Run one step for a client; an error drops this client only."""
        if client not in self._clients:
            return
        try:
            step(client, *args)
        except (BlockingIOError, InterruptedError):
            pass
        except Exception:
            self._drop(client)

    def _pause(self) -> float:
        """Return the seconds until the next limit passes."""
        while self._ends and self._ends[0][2].asks is not self._ends[0][3]:
            heapq.heappop(self._ends)
        end = self._ends[0][0] if self._ends else FOR_EVER * 1e3
        for oldest in self._strangers:
            end = min(end, oldest.since + GREETING_SECONDS)
            break
        end = min(end, self._deaf_until or end)
        return max(0.0, min(end - time.monotonic(), _PAUSE))

    def _sweep(self) -> None:
        """Drop clients without a proof in time, answer waits whose limit has passed, and accept connections again."""
        now = time.monotonic()
        while self._strangers and now > (oldest := next(iter(self._strangers))).since + GREETING_SECONDS:
            self._drop(oldest)
        while self._ends and self._ends[0][0] <= now:
            _, _, client, question = heapq.heappop(self._ends)
            if client.asks is question and client.asks is not None:
                existing = [key for key in client.asks[1] if key in self._table.values]
                self._guarded(client, self._answer, [b"late", *existing])
        if self._deaf_until and now >= self._deaf_until:
            self._deaf_until = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError as error:
            self._accept_without_descriptor(error)
            return
        while len(self._strangers) >= most_strangers():
            self._drop(next(iter(self._strangers)))
        if len(self._clients) >= _MOST_CLIENTS:
            _refuse(connection)
            return
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            tune(connection)
        client = _Client(connection)
        self._clients[client] = self._strangers[client] = None
        self._guarded(client, self._greet)

    def _accept_without_descriptor(self, error: OSError) -> None:
        """Make room by the oldest stranger, or use the spare descriptor to tell a client that there is no room."""
        if self._strangers:
            self._drop(next(iter(self._strangers)))  # the listener is still ready: the next pass accepts
            return
        now = time.monotonic()
        if now >= self._says_at:
            self._says_at = now + _SAY_SECONDS
            say(
                f"mpicoll: the TCPStore on port {self.port} refuses connections: {error.strerror} (this process may have "
                f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]}, {len(self._clients)} are clients of the store): close files, "
                "or increase `ulimit -n`\n"
            )
        self._close_spare()
        with contextlib.suppress(OSError):
            _refuse(self._listener.accept()[0])
            self._spare = _spare()
        if self._spare < 0:  # another thread has used the spare descriptor
            self._spare = _spare()
            self._selector.unregister(self._listener)
            self._deaf_until = now + _DEAF_SECONDS

    def _greet(self, client: _Client) -> None:
        self._selector.register(client.connection, selectors.EVENT_READ, client)
        self._send(client, [client.nonce])

    def _drop(self, client: _Client) -> None:
        self._clients.pop(client, None)
        self._strangers.pop(client, None)
        client.asks = None
        self._end_wait(client)
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._selector.unregister(client.connection)
        client.connection.close()

    def _move(self, client: _Client, events: int) -> None:
        if events & selectors.EVENT_WRITE and client.unsent:
            client.unsent = client.unsent[client.connection.send(client.unsent) :]
            if not client.unsent:
                client.unsent = memoryview(b"")
                self._selector.modify(client.connection, selectors.EVENT_READ, client)
                self._unread[client] = None
        elif events & selectors.EVENT_READ:
            count = client.connection.recv_into(self._buffer)
            if not count:
                self._drop(client)
                return
            client.received += memoryview(self._buffer)[:count]
            if len(client.received) > LARGEST + (1 << 20):
                raise ValueError("too long")
            self._read(client)

    def _read(self, client: _Client) -> None:
        """Handle the received frames of a client, one after the other, until one has to wait or an answer is not sent yet."""
        received = client.received
        for _ in range(_FRAMES_AT_ONCE):
            if client.asks is not None or client.unsent or len(received) < 4:
                return
            length = int.from_bytes(received[:4], "big")
            handle, most = (self._verify, MOST_GREETING) if client in self._strangers else (self._do, LARGEST)
            if length > most:
                raise ValueError("too long")
            if len(received) < 4 + length:
                return
            data = bytes(memoryview(received)[4 : 4 + length])
            del received[: 4 + length]
            handle(client, decode(data))
        self._unread[client] = None  # the rest is handled after the other clients

    def _verify(self, client: _Client, parts: list[bytes]) -> None:
        """Check a client's proof that it knows the secret, and send the server's proof."""
        nonce, proof = parts
        if not hmac.compare_digest(proof, proof_of(self._secret, b"client", nonce, client.nonce)):
            self._send(client, [REFUSED])
            raise ValueError("wrong secret")
        del self._strangers[client]
        self._send(client, [proof_of(self._secret, b"server", client.nonce, nonce)])

    def _do(self, client: _Client, parts: list[bytes]) -> None:
        op, timeout = parts[0].decode(), float(parts[1])
        if not 0 <= timeout <= FOR_EVER:
            raise ValueError("no limit")
        client.asks = op, parts[2:], time.monotonic() + timeout
        try:
            self._try(client)
        finally:  # also if the client has disconnected before the answer: its change is made
            if client.asks is None and self._waiting_for and op in CHANGES:
                for key in parts[2::2] if op == "multi_set" else parts[2:3]:
                    for other in tuple(self._waiting_for.get(key, ())):
                        self._guarded(other, self._try)

    def _try(self, client: _Client) -> None:
        if client.asks is None:
            return
        op, args, _ = client.asks
        try:
            found = self._table.do(op, args)
        except DistStoreError as error:
            self._answer(client, [b"wrong", str(error).encode()])
            return
        if found is None:
            self._wait(client, args if op in ("wait", "multi_get") else args[:1])
        elif sum(map(len, found)) > LARGEST - 4 * len(found) - 100:
            self._answer(client, [b"wrong", f"{op}: the answer has more than {LARGEST} bytes".encode()])
        else:
            self._answer(client, [b"done", *found])

    def _wait(self, client: _Client, keys: Sequence[bytes]) -> None:
        """Register a client whose question is tried again when one of these keys has changed."""
        if client in self._waiting:
            return
        question = client.asks
        assert question is not None
        self._waiting[client] = None
        client.waits_for = keys
        self._questions += 1
        heapq.heappush(self._ends, (question[2], self._questions, client, question))
        if len(self._ends) > 100 + 2 * len(self._waiting):
            self._ends = [each for each in self._ends if each[2].asks is each[3]]
            heapq.heapify(self._ends)
        for key in keys:
            self._waiting_for.setdefault(key, {})[client] = None

    def _end_wait(self, client: _Client) -> None:
        """Remove a client from the waiting clients."""
        if self._waiting.pop(client, self) is self:
            return
        for key in client.waits_for:
            others = self._waiting_for.get(key, {})
            others.pop(client, None)
            if not others:
                self._waiting_for.pop(key, None)
        client.waits_for = ()

    def _answer(self, client: _Client, parts: list[bytes]) -> None:
        client.asks = None
        self._end_wait(client)
        if client.received:
            self._unread[client] = None
        self._send(client, parts)

    def _send(self, client: _Client, parts: list[bytes]) -> None:
        data, count = frame(parts), 0
        with contextlib.suppress(BlockingIOError, InterruptedError):
            count = client.connection.send(data)
        if count < len(data):
            client.unsent = memoryview(data)[count:]
            self._selector.modify(client.connection, selectors.EVENT_WRITE, client)


def _where(listener: socket.socket) -> tuple[str, int]:
    """Return the address and port at which this process reaches a listening socket."""
    address, port = listener.getsockname()[:2]
    return ("localhost" if address in ("0.0.0.0", "::", "") else address), port


def _listen(port: int) -> socket.socket:
    """Return a socket that listens on all addresses of this host, of both IP versions if possible."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    return socket.create_server(("", port), backlog=4096)


servers: dict[tuple[int, bytes], Server] = {}
of_this_process: weakref.WeakSet[Any] = weakref.WeakSet()


def _spare() -> int:
    """Return a descriptor to be closed when no other is free, or -1."""
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _refuse(connection: socket.socket) -> None:
    """Tell a client that this process has no room for its connection, and close the connection."""
    with connection, contextlib.suppress(OSError):
        connection.setblocking(False)
        connection.send(frame([FULL]))


def _in_child() -> None:
    """Close the parent's sockets in a forked process; otherwise a socket stays open after the parent has closed it."""
    servers.clear()
    known = tuple(of_this_process)
    of_this_process.clear()
    for each in known:
        with contextlib.suppress(OSError):
            each.after_fork()
        if not isinstance(each, Server):
            of_this_process.add(each)


os.register_at_fork(after_in_child=_in_child)
