"""The server of a TCPStore: one process has the table; clients ask over TCP after a proof that they know the secret.

A frame is its length (32 bits, big-endian) and a list of bytes (``stores.base.encode``); nothing in it is executed. Server and
client first prove to each other that they know a secret, by HMAC-SHA256 (RFC 2104) over new random numbers of both sides. Frames
are not encrypted. Until the proof a frame may have ``MOST_GREETING`` bytes, afterwards ``LARGEST``.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import math
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from mpicoll.errors import DistNetworkError, DistStoreError
from mpicoll.stores.base import CHANGES, FOR_EVER, StoreTable, decode, encode, progress, timed_out

LARGEST = 64 << 20
"""Bytes of the largest frame."""

MOST_GREETING = 512
_MOST_CLIENTS = 65_536
_MOST_STRANGERS = 256
_AT_ONCE = 1 << 18
"""The most bytes that are read from a connection before other connections are served."""
_FRAMES_AT_ONCE = 256
_PAUSE = 3600.0
REFUSED = b"refused"
GREETING_SECONDS = 10.0  # within these seconds a connection must prove that it knows the secret


def proof_of(secret: bytes, role: bytes, ours: bytes, theirs: bytes) -> bytes:
    """Return the proof that one side knows the secret, for the random numbers of both sides."""
    return hmac.digest(secret, role + ours + theirs, "sha256")


class _Client:
    """The server's state of one connection.

    Attributes:
        nonce: the server's random number for the proof.
        since: when the client connected.
        received: bytes of frames that have not been handled.
        unsent: the rest of at most one answer; until the rest is sent no further question is handled.
        asks: the question that waits: operation, arguments, limit in seconds, end of the limit.
        waits_for: the keys whose change can end the wait.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.nonce = secrets.token_bytes(32)
        self.since = time.monotonic()
        self.received = bytearray()
        self.unsent = memoryview(b"")
        self.asks: tuple[str, list[bytes], float, float] | None = None
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
        self._strangers: dict[_Client, None] = {}  # clients that have not proved that they know the secret
        self._waiting: dict[_Client, None] = {}
        self._waiting_for: dict[bytes, dict[_Client, None]] = {}  # the waiting clients of each key
        self._buffer = bytearray(_AT_ONCE)
        self._unread: dict[_Client, None] = {}  # clients that may have sent frames that have not been handled
        self._over = False
        of_this_process.add(self)
        self._thread = threading.Thread(target=self._serve, name="mpicoll TCPStore", daemon=True)
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
        self._selector.close()

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
        """Return the seconds until the next limit of a client."""
        ends = [client.asks[3] for client in self._waiting if client.asks is not None]
        ends += [client.since + GREETING_SECONDS for client in self._strangers]
        return max(0.0, min(min(ends) - time.monotonic(), _PAUSE)) if ends else _PAUSE

    def _sweep(self) -> None:
        """Drop clients without a proof in time, and answer waits whose limit has passed."""
        now = time.monotonic()
        for client in tuple(self._strangers):
            if now > client.since + GREETING_SECONDS:
                self._drop(client)
        for client in tuple(self._waiting):
            if client.asks is not None and now >= client.asks[3]:
                late = timed_out(*client.asks[:3], self._table.values)
                self._guarded(client, self._answer, [b"late", str(late).encode()])

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            time.sleep(0.05)  # no descriptor is free
            return
        if len(self._strangers) >= _MOST_STRANGERS:
            self._drop(next(iter(self._strangers)))
        if len(self._clients) >= _MOST_CLIENTS:
            connection.close()
            return
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            tune(connection)
        client = _Client(connection)
        self._clients[client] = self._strangers[client] = None
        self._guarded(client, self._greet)

    def _greet(self, client: _Client) -> None:
        self._selector.register(client.connection, selectors.EVENT_READ, client)
        self._send(client, [client.nonce])

    def _drop(self, client: _Client) -> None:
        self._clients.pop(client, None)
        self._strangers.pop(client, None)
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
        client.asks = op, parts[2:], timeout, time.monotonic() + timeout
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
        op, args, _, _ = client.asks
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
        self._waiting[client] = None
        client.waits_for = keys
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
_TIMEVAL = struct.Struct("ll")


def frame(parts: list[bytes]) -> bytes:
    """Return the frame of a list of bytes."""
    data = encode(parts)
    return len(data).to_bytes(4, "big") + data


def tune(connection: socket.socket) -> None:
    """Set options of a connection: send small frames at once, and notice lost hosts, which close no connection."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def send(connection: socket.socket, parts: list[bytes]) -> None:
    """Send a frame."""
    try:
        connection.sendall(frame(parts))
    except BlockingIOError:
        raise TimeoutError("timed out") from None


def limit_waits(connection: socket.socket, sends: float, receives: float) -> None:
    """Set the kernel's limits of each wait, in seconds; a timeout of Python's socket would cost a poll(2) each time."""
    connection.setblocking(True)
    for option, limit in ((socket.SO_SNDTIMEO, sends), (socket.SO_RCVTIMEO, receives)):
        whole, part = divmod(limit, 1) if limit < math.inf else (0, 0)  # 0: no limit
        connection.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(whole), int(part * 1e6) or (limit < 1)))


def receive(connection: socket.socket, most: int, end: float = 0.0) -> list[bytes]:
    """Return the next frame. No bytes follow the frame, as each question has one answer.

    Args:
        end: time (time.monotonic) until which a wait that reaches the kernel's limit progresses this rank's requests and goes on.
    """
    data = bytearray()
    while len(data) < 4:
        data += _some(connection, 1 << 16, end)
    length = 4 + int.from_bytes(data[:4], "big")
    if length > 4 + most or len(data) > length:
        raise ValueError("too long")
    while len(data) < length:
        data += _some(connection, min(length - len(data), 1 << 20), end)
    return decode(bytes(memoryview(data)[4:]))


def _some(connection: socket.socket, most: int, end: float) -> bytes:
    while True:
        try:
            data = connection.recv(most)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise TimeoutError("timed out") from None
            progress()
            continue
        if not data:
            raise ConnectionError("closed")
        return data


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
