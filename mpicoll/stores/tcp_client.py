"""The clients' side of a store that a server on one rank serves."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

from mpicoll.errors import DistNetworkError, DistStoreError
from mpicoll.groups import registry
from mpicoll.stores.base import FOR_EVER, Store, longest_rest, progress, to_bytes, to_seconds
from mpicoll.stores.table import timed_out
from mpicoll.stores.tcp_server import Server, of_this_process, servers
from mpicoll.stores.wire import (
    FULL,
    GREETING_SECONDS,
    LARGEST,
    MOST_GREETING,
    REFUSED,
    connect,
    limit_waits,
    proof_of,
    receive,
    send,
    tune,
)

_ANSWER_SECONDS = 0.2
"""How long after the limit of a question the server's answer is awaited: the server knows which keys are missing."""
_WAITS = ("get", "wait", "multi_get", "queue_pop")
"""The operations that wait for a key."""
_WAKE_SECONDS = 0.25
"""The longest wait in the kernel; then the limit of the whole call is examined."""
_WORKERS, _ALL, _MET = "mpicoll/workers", "mpicoll/all workers", "mpicoll/met"


class TCPStore(Store):
    """A store that one process serves to other processes over TCP.

    Args:
        host_name: the host of the server; the server itself listens on all addresses of its host.
        port: the server's port; 0 on the server: any free port, which ``port`` names afterwards.
        world_size: with ``wait_for_workers`` the number of stores, the server's own included, that the server waits for.
        is_master: whether this process is the server.
        timeout: the limit of the constructor, and of each call as a whole; default MPICOLL_TIMEOUT, or 300 s as in torch.
        wait_for_workers: whether the server waits for the other stores when it is made.
        multi_tenant: whether several stores of this process may share one server on the same port.
        master_listen_fd: a listening socket that the server uses and closes (as in torch).
        use_libuv: accepted for compatibility; no effect.
        secret: proves that a process belongs to the job. Default: after ``init_process_group`` a secret that all ranks have
            received over MPI.

    Raises:
        TypeError: ``port`` is no port.
        ValueError: there is no secret and no default group; a client has no port.
        DistNetworkError: no server answers within the limit, the port is in use, or the other side does not know the secret.
        DistStoreError: the workers did not connect within the limit; ``master_listen_fd`` is bound to another port.

    Source: torch.distributed.TCPStore (which has no secret).
    """

    _hidden = (_WORKERS, _ALL, _MET)

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta | None = None,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
        *,
        secret: str | bytes | None = None,
    ) -> None:
        super().__init__()
        if timeout is not None:
            self.set_timeout(timeout)
        if not 0 <= port < 1 << 16:
            raise TypeError(f"TCPStore: port must be from 0 to 65535, got {port}")
        self.host = host_name
        self.world_size = world_size
        self.is_master = is_master
        self._secret = _secret(secret)
        self._server: Server | None = None
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.RLock()  # a wait progresses requests, whose callbacks may use the store
        self._asks = False
        self._connection: socket.socket | None = None
        self._wakes = 0.0  # seconds; the limit of the connection's waits in the kernel
        of_this_process.add(self)
        if is_master:
            shared = servers.get((port, self._secret)) if multi_tenant and port else None
            if shared is None or not shared.alive:
                shared = Server(port, self._secret, master_listen_fd)
                if multi_tenant:
                    servers[shared.port, self._secret] = shared
            self._server = shared
            shared.users += 1
            port = shared.port
        elif not port:
            raise ValueError("TCPStore: pass the port of the server")
        self.port = port
        self._own = "localhost" if self._server is None else self._server.address
        try:
            end = time.monotonic() + self._limit()
            self._connect(end, self._limit())
            if world_size is not None and world_size > 0:
                self._arrive(world_size, is_master and wait_for_workers, end)
                if wait_for_workers:
                    self._ask_until(end, "set", _MET, "")
        except BaseException:
            self.close()
            raise

    def _limit(self) -> float:
        return to_seconds(self._timeout)

    def _ask_until(self, end: float, op: str, *args: str) -> list[bytes]:
        return self._ask(op, [to_bytes(arg, "a key or value") for arg in args], max(end - time.monotonic(), 0.001))

    def _arrive(self, world_size: int, waits: bool, end: float) -> None:
        if int(self._ask_until(end, "add", _WORKERS, "1")[0]) >= world_size:
            self._ask_until(end, "set", _ALL, "1")
        if waits:
            try:
                self._ask_until(end, "wait", _ALL)
            except DistStoreError:
                connected = int(self._ask_until(end, "get", _WORKERS)[0])
                raise DistStoreError(
                    f"TCPStore on port {self.port}: {connected} of {world_size} workers connected within "
                    f"{self._timeout.total_seconds():g} s"
                ) from None

    def _connect(self, end: float, limit: float) -> None:
        """Connect until ``end``; both sides prove that they know the secret. ``limit``: the seconds that the error names."""
        failure: Exception
        pause = 0.01
        host = self._own if self.is_master else self.host
        while True:
            try:
                connection = connect(host, self.port, end)
                try:
                    self._greet(connection, max(0.1, min(end - time.monotonic(), GREETING_SECONDS)))
                except BaseException:
                    connection.close()
                    raise
                self._connection = connection
                return
            except _ServerFullError as error:
                failure, why = (
                    error,
                    f"TCPStore: the server at {self.host}:{self.port} accepts no connection within {limit:g} s",
                )
            except (OSError, ValueError) as error:
                failure, why = error, f"TCPStore: no server at {self.host}:{self.port} within {limit:g} s"
            if time.monotonic() >= end:
                raise DistNetworkError(f"{why}: {failure or type(failure).__name__}") from failure
            time.sleep(max(0.0, min(pause, end - time.monotonic())))
            pause = min(2 * pause, 0.5)

    def _greet(self, connection: socket.socket, limit: float) -> None:
        end = time.monotonic() + limit
        tune(connection)
        self._wakes = min(_WAKE_SECONDS, limit, longest_rest())
        limit_waits(connection, self._wakes)
        ours = secrets.token_bytes(32)
        (theirs,) = receive(connection, MOST_GREETING, end)
        if theirs == FULL:
            raise _ServerFullError(
                "its process has no free file descriptor: close files there, or increase its `ulimit -n`"
            )
        send(connection, [ours, proof_of(self._secret, b"client", ours, theirs)], end)
        (proof,) = receive(connection, MOST_GREETING, end)
        if proof == REFUSED:
            raise DistNetworkError(
                f"TCPStore: the server at {self.host}:{self.port} has another secret, and refuses this process: "
                "pass the same secret="
            )
        if not hmac.compare_digest(proof, proof_of(self._secret, b"server", theirs, ours)):
            raise DistNetworkError(
                f"TCPStore: the server at {self.host}:{self.port} does not know the secret: pass the same secret="
            )

    def _ask(self, op: str, args: Sequence[bytes], timeout: float) -> list[bytes]:
        if self._closed:
            raise DistNetworkError(f"TCPStore {self.host}:{self.port}: {op} after close()")
        if sum(map(len, args)) > LARGEST - 4 * len(args) - 100:
            raise DistStoreError(f"{op}: more than {LARGEST} bytes in one call")
        end = time.monotonic() + timeout
        self._acquire(op, end, timeout)
        try:
            left = min(max(end - time.monotonic(), 0.001), FOR_EVER)
            if self._asks:  # this thread is in a callback, or in a signal handler
                return self._clone(timedelta(seconds=left))._ask(op, args, left)
            if self._connection is None:
                limit = min(timeout, self._limit())
                self._connect(min(end, time.monotonic() + limit), limit)
            return self._exchange(op, args, timeout, end)
        except DistNetworkError as error:
            is_late = isinstance(error.__cause__, TimeoutError) and time.monotonic() >= end
            if is_late and op in _WAITS and (op, args[-1:]) != ("queue_pop", [b"0"]):
                raise timed_out(op, args, timeout, (), f": {error}") from error
            raise
        finally:
            self._lock.release()

    def _acquire(self, op: str, end: float, timeout: float) -> None:
        """Acquire the store's lock until ``end``."""
        if self._lock.acquire(blocking=False):
            return
        while not self._lock.acquire(timeout=max(0.0, min(end - time.monotonic(), longest_rest(), 60.0))):
            if time.monotonic() >= end:
                raise DistStoreError(
                    f"{op}: another thread has used this store for {timeout:g} s: make a store for each thread, with clone()"
                )
            progress()

    def _exchange(self, op: str, args: Sequence[bytes], timeout: float, end: float) -> list[bytes]:
        """Send a question and return its answer, both until ``end`` and ``_ANSWER_SECONDS``."""
        connection = self._connection
        assert connection is not None
        try:
            self._asks = True
            wakes = min(_WAKE_SECONDS, longest_rest())
            if wakes != self._wakes:
                limit_waits(connection, wakes)
                self._wakes = wakes
            left = min(max(end - time.monotonic(), 0.0), FOR_EVER)
            send(connection, [op.encode(), repr(left).encode(), *args], end + _ANSWER_SECONDS)
            kind, *found = receive(connection, LARGEST + 4096, end + _ANSWER_SECONDS)
        except BaseException as error:
            self._disconnect()  # a late answer would be read as the answer to the next question
            where = f"{self.host}:{self.port}"
            if isinstance(error, TimeoutError):
                raise DistNetworkError(
                    f"TCPStore: {op}: the server at {where} has not answered within {timeout:g} s: find whether its process is "
                    "stopped, or computes without a pause"
                ) from error
            if isinstance(error, (OSError, ValueError)):
                lost = DistNetworkError(f"TCPStore: the connection to {where} is lost: {error or type(error).__name__}")
                lost.is_lost = True
                raise lost from error
            raise
        finally:
            self._asks = False
        if kind == b"late":
            raise timed_out(op, args, timeout, found)
        if kind != b"done":
            raise DistStoreError(found[0].decode(errors="replace"))
        return found

    def after_fork(self) -> None:
        """Drop the parent's connection and server in a forked process; the next call makes a connection of its own."""
        self._pid, self._lock, self._asks, self._server = os.getpid(), threading.RLock(), False, None
        self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def clone(self) -> Store:
        """Return a store with a connection of its own."""
        return self._clone(self._timeout)

    def _clone(self, timeout: timedelta) -> TCPStore:
        return TCPStore(self.host, self.port, None, False, timeout, secret=self._secret)

    def num_keys(self) -> int:
        """Return the number of keys, and one more if the store waited for its workers (as torch)."""
        keys = self._do("list_keys")
        return len(keys) - (_WORKERS.encode() in keys) - (_ALL.encode() in keys)

    def close(self) -> None:
        """End the connection; the last store of this process that uses the server ends the server. The store is unusable then."""
        if self._closed:
            return
        self._closed = True
        self._disconnect()
        server, self._server = self._server, None
        if server is not None and self._pid == os.getpid():
            server.users -= 1
            if not server.users:
                servers.pop((server.port, self._secret), None)
                server.close()

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:  # at the interpreter's end modules have lost their names
            pass


class _ServerFullError(OSError):
    """The server has no descriptor for this connection."""


def _secret(given: str | bytes | None) -> bytes:
    if given is None:
        known = registry.current()
        if known is None:
            raise ValueError(
                "TCPStore needs secret=, the same in all processes: any process that can reach the port could read and write the "
                "store. After init_process_group the default is a secret that the ranks know"
            )
        given = known.secret
    if not isinstance(given, (str, bytes, bytearray)):
        raise TypeError(f"TCPStore: the secret must be a string or bytes, not {type(given).__name__}")
    secret = given.encode() if isinstance(given, str) else bytes(given)
    if not secret:
        raise ValueError("TCPStore: the secret must not be empty")
    return secret
