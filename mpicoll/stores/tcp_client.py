"""The clients' side of a store that a server on one rank serves."""

from __future__ import annotations

import hmac
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

from mpicoll.errors import DistNetworkError, DistStoreError
from mpicoll.groups import registry
from mpicoll.stores.base import DEFAULT_TIMEOUT, Store, longest_rest, to_seconds
from mpicoll.stores.tcp_server import (
    GREETING_SECONDS,
    LARGEST,
    MOST_GREETING,
    REFUSED,
    Server,
    limit_waits,
    of_this_process,
    proof_of,
    receive,
    send,
    servers,
    tune,
)

_LONG = 86400.0
_WORKERS, _ALL, _MET = "mpicoll/workers", "mpicoll/all workers", "mpicoll/met"


class TCPStore(Store):
    """A store that one process serves to other processes over TCP.

    Args:
        host_name: the host of the server; the server itself listens on all addresses of its host.
        port: the server's port; 0 on the server: any free port, which ``port`` names afterwards.
        world_size: with ``wait_for_workers`` the number of stores, the server's own included, that the server waits for.
        is_master: whether this process is the server.
        timeout: the limit of the waits and of the connection.
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
        timeout: timedelta = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
        *,
        secret: str | bytes | None = None,
    ) -> None:
        super().__init__()
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
        self._socket_limits = -1.0, -1.0  # seconds; the limits of the connection's waits in the kernel
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
            self._connect(self._limit())
            if world_size is not None and world_size > 0:
                self._arrive(world_size, is_master and wait_for_workers)
                if wait_for_workers:
                    self.set(_MET, b"")
        except BaseException:
            self.close()
            raise

    def _limit(self) -> float:
        return to_seconds(self._timeout)

    def _arrive(self, world_size: int, waits: bool) -> None:
        if self.add(_WORKERS, 1) >= world_size:
            self.set(_ALL, b"1")
        if waits:
            try:
                self.wait([_ALL])
            except DistStoreError:
                connected = int(self.get(_WORKERS))
                raise DistStoreError(
                    f"TCPStore on port {self.port}: {connected} of {world_size} workers connected within "
                    f"{self._timeout.total_seconds():g} s"
                ) from None

    def _connect(self, limit: float) -> None:
        """Connect within ``limit`` seconds; both sides prove that they know the secret."""
        end = time.monotonic() + limit
        pause = 0.01
        host = self._own if self.is_master else self.host
        while True:
            try:
                connection = socket.create_connection((host, self.port), timeout=max(0.1, min(limit, 5.0)))
                try:
                    self._greet(connection, max(0.1, min(end - time.monotonic(), GREETING_SECONDS)))
                except BaseException:
                    connection.close()
                    raise
                self._connection = connection
                return
            except (OSError, ValueError) as error:
                if time.monotonic() >= end:
                    raise DistNetworkError(
                        f"TCPStore: no server at {self.host}:{self.port} within {limit:g} s: {error or type(error).__name__}"
                    ) from error
            time.sleep(max(0.0, min(pause, end - time.monotonic())))
            pause = min(2 * pause, 0.5)

    def _greet(self, connection: socket.socket, limit: float) -> None:
        tune(connection)
        connection.settimeout(limit)
        ours = secrets.token_bytes(32)
        (theirs,) = receive(connection, MOST_GREETING)
        send(connection, [ours, proof_of(self._secret, b"client", ours, theirs)])
        (proof,) = receive(connection, MOST_GREETING)
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
        with self._lock:
            if self._asks:  # this thread is in a callback, or in a signal handler
                return self.clone()._ask(op, args, timeout)
            if self._connection is None:
                self._connect(min(timeout, self._limit()))
            connection = self._connection
            assert connection is not None
            try:
                self._asks = True
                limit = timeout + GREETING_SECONDS if timeout < _LONG else math.inf
                limits = limit, min(limit, longest_rest())
                if limits != self._socket_limits:
                    limit_waits(connection, *limits)
                    self._socket_limits = limits
                send(connection, [op.encode(), repr(float(timeout)).encode(), *args])
                kind, *found = receive(connection, LARGEST + 4096, time.monotonic() + limit)
            except BaseException as error:
                self._disconnect()  # a late answer would be read as the answer to the next question
                if isinstance(error, (OSError, ValueError)):
                    raise DistNetworkError(
                        f"TCPStore: the connection to {self.host}:{self.port} is lost: {error or type(error).__name__}"
                    ) from error
                raise
            finally:
                self._asks = False
        if kind != b"done":
            raise DistStoreError(found[0].decode(errors="replace"))
        return found

    def after_fork(self) -> None:
        """Drop the parent's connection and server in a forked process; the next call makes a connection of its own."""
        self._pid, self._lock, self._asks, self._server = os.getpid(), threading.RLock(), False, None
        self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection, self._socket_limits = self._connection, None, (-1.0, -1.0)
        if connection is not None:
            connection.close()

    def clone(self) -> Store:
        """Return a store with a connection of its own."""
        return TCPStore(self.host, self.port, None, False, self._timeout, secret=self._secret)

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
