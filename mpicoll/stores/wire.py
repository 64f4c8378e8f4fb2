"""Frames between the server and the clients of a TCPStore, and the proof that both know the secret.

A frame is its length (32 bits, big-endian) and a list of bytes (``stores.table.encode``); nothing in it is executed. Server and
client first prove to each other that they know a secret, by HMAC-SHA256 (RFC 2104) over new random numbers of both sides. Frames
are not encrypted. Until the proof a frame may have ``MOST_GREETING`` bytes, afterwards ``LARGEST``.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import socket
import struct
import time
from typing import Any

from mpicoll.runtime.watchdog import OwnThread
from mpicoll.stores.base import longest_rest, progress
from mpicoll.stores.table import decode, encode

LARGEST = 64 << 20
"""Bytes of the largest frame."""
MOST_GREETING = 512
GREETING_SECONDS = 10.0  # within these seconds a connection must prove that it knows the secret
REFUSED = b"refused"
FULL = b"full"
_CONNECT_SECONDS = 5.0
_TIMEVAL = struct.Struct("ll")


def proof_of(secret: bytes, role: bytes, ours: bytes, theirs: bytes) -> bytes:
    """Return the proof that one side knows the secret, for the random numbers of both sides."""
    return hmac.digest(secret, role + ours + theirs, "sha256")


def frame(parts: list[bytes]) -> bytes:
    """Return the frame of a list of bytes."""
    data = encode(parts)
    return len(data).to_bytes(4, "big") + data


def connect(host: str, port: int, end: float) -> socket.socket:
    """Connect to the first address of a host that accepts, until ``end`` (time.monotonic)."""
    failure = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in _addresses(host, port, end):
        connection = None
        try:
            connection = socket.socket(family, kind, protocol)
            connection.settimeout(max(0.05, min(end - time.monotonic(), _CONNECT_SECONDS)))
            connection.connect(address)
            return connection
        except OSError as error:
            failure = error
            if connection is not None:
                connection.close()
    raise failure


def _addresses(host: str, port: int, end: float) -> list[Any]:
    """Return the addresses of a host, as ``getaddrinfo``, until ``end``. A thread waits for a name server, without a limit.

    Raises:
        OSError, ValueError: the host has no address, or no answer came until ``end``.
    """
    with contextlib.suppress(socket.gaierror):
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except Exception as error:
            answers.append(error)

    thread = OwnThread(target=ask, name="mpicoll-name", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # no more threads
        raise OSError(f"the address of {host} cannot be asked for: {error}") from error
    end = max(end, time.monotonic() + 0.05)
    while not answers:
        left = end - time.monotonic()
        if left <= 0:
            raise OSError(f"no name server has told the address of {host}")
        thread.join(min(left, longest_rest(), 60.0))
        if not answers:
            progress()
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers[0]  # type: ignore[no-any-return]


def tune(connection: socket.socket) -> None:
    """Set options of a connection: send small frames at once, and notice lost hosts, which close no connection."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def limit_waits(connection: socket.socket, limit: float) -> None:
    """Set the kernel's limit of each wait, in seconds; a timeout of Python's socket would cost a poll(2) each time."""
    connection.setblocking(True)
    whole, part = divmod(limit, 1)
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(whole), int(part * 1e6)))


def send(connection: socket.socket, parts: list[bytes], end: float = math.inf) -> None:
    """Send a frame; ``end`` as in :func:`receive`."""
    data: bytes | memoryview = frame(parts)
    while True:
        try:
            count = connection.send(data)
            if count == len(data):
                return
            data = memoryview(data)[count:]
        except BlockingIOError:
            progress()
        _need_time(end)


def receive(connection: socket.socket, most: int, end: float = math.inf) -> list[bytes]:
    """Return the next frame. No bytes follow the frame, as each question has one answer.

    Args:
        end: the limit of the whole frame (time.monotonic). A wait that reaches the kernel's limit (:func:`limit_waits`)
            progresses this rank's requests and goes on.

    Raises:
        TimeoutError: the frame is not complete at ``end``.
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
        _need_time(end)
        try:
            data = connection.recv(most)
        except BlockingIOError:
            progress()
            continue
        if not data:
            raise ConnectionError("closed")
        return data


def _need_time(end: float) -> None:
    if time.monotonic() >= end:
        raise TimeoutError("timed out")
