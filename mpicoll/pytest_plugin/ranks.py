"""The plugin's own communicator, whose calls are all nonblocking."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mpicoll.launch.job_folder import append_record

if TYPE_CHECKING:
    from mpi4py import MPI


MOST_TEXT = 1 << 20  # bytes of failure text that one phase sends to every rank, all ranks together

_TAGS = 30_000  # messages within a step of a test have the number of the step, modulo this, as their tag
_HERE, _ELSEWHERE = b"+", b"-"


class Ranks:
    """The plugin's own communicator, whose calls are all nonblocking and polled, so that Ctrl-C and the limit take effect.

    Attributes:
        where: returns what this rank does, for ranks that wait for it in a block while this rank gathers.
    """

    def __init__(self) -> None:
        from mpi4py import MPI

        self.mpi = MPI
        self.where: Callable[[], str] | None = None
        self._answers: list[MPI.Request] = []
        self._gathered = 0
        # Never freed: freeing is collective, and at the end of a session some ranks may have ended already.
        self.comm, request = MPI.COMM_WORLD.Idup()
        self._poll(request)
        self.rank: int = self.comm.Get_rank()
        self.size: int = self.comm.Get_size()

    def _poll(self, request: MPI.Request) -> None:
        polls = 0
        while not request.Test():
            if self.where is not None:
                self._answer(self.where)
            polls = _nap(polls)

    def gather(self, record: bytes) -> list[bytes]:
        """Return the records of all ranks; all records have the same length."""
        width = len(record)
        gathered = bytearray(width * self.size)
        self._gathered += 1
        self._poll(self.comm.Iallgather([record, self.mpi.BYTE], [gathered, self.mpi.BYTE]))
        return [bytes(gathered[start : start + width]) for start in range(0, len(gathered), width)]

    def gather_text(self, text: str) -> list[str]:
        """Return every rank's text, each cut to its share of MOST_TEXT."""
        own = self._encoded(text)
        counts = [struct.unpack("q", record)[0] for record in self.gather(struct.pack("q", len(own)))]
        gathered = bytearray(sum(counts))
        self._gathered += 1
        self._poll(self.comm.Iallgatherv([own, self.mpi.BYTE], [gathered, counts, self.mpi.BYTE]))
        texts, start = [], 0
        for count in counts:
            texts.append(gathered[start : start + count].decode("utf-8", "replace"))
            start += count
        return texts

    def exchange(self, text: str, members: Sequence[int]) -> tuple[dict[int, str], dict[int, str]]:
        """Return the texts of the members, and the places of members that have left the test's step instead.

        Only the members call the method. A member that is in no block gathers with all ranks already, and answers from there
        with its place (see ``where``). So the other members distinguish that member from a late member.
        """
        own = _HERE + text.encode()
        missing = [rank for rank in members if rank != self.rank]
        sends = [self.comm.Isend([own, self.mpi.BYTE], rank, self._gathered % _TAGS) for rank in missing]
        texts, elsewhere = {self.rank: text}, dict[int, str]()
        polls = 0
        while missing or not self.mpi.Request.Testall(sends):
            for rank in tuple(missing):
                if (received := self._receive(rank, self._gathered)) is not None:
                    kind, words = received[1][:1], received[1][1:].decode("utf-8", "replace")
                    (texts if kind == _HERE else elsewhere)[rank] = words
                    missing.remove(rank)
            polls = _nap(polls)
        return texts, elsewhere

    def _answer(self, where: Callable[[], str]) -> None:
        """Answer the ranks that wait for this rank in a block, with this rank's place.

        Only ranks in the step that this rank has left get an answer: other ranks can be in the next step already.
        """
        left = self._gathered - 1
        while (received := self._receive(self.mpi.ANY_SOURCE, left)) is not None:
            words = _ELSEWHERE + self._encoded(where())
            self._answers.append(self.comm.Isend([words, self.mpi.BYTE], received[0], left % _TAGS))
        self._answers = [request for request in self._answers if not request.Test()]

    def _receive(self, source: int, step: int) -> tuple[int, bytes] | None:
        """Return the source and the bytes of a message for a block of this step, or None if there is none."""
        status = self.mpi.Status()
        if not self.comm.Iprobe(source, step % _TAGS, status):
            return None
        data = bytearray(status.Get_count(self.mpi.BYTE))
        self.comm.Recv([data, self.mpi.BYTE], status.Get_source(), step % _TAGS)
        return status.Get_source(), bytes(data)

    def members(self, group: Any) -> tuple[int, ...]:
        """Return the ranks of a process group or an mpi4py communicator, as ranks of this communicator; None: all ranks.

        Raises:
            ValueError: ``group`` is neither, or this rank is not in the group.
        """
        if group is None:
            return tuple(range(self.size))
        comm = group if isinstance(group, self.mpi.Comm) else getattr(getattr(group, "pair", None), "data", None)
        if comm is None or comm == self.mpi.COMM_NULL:
            raise ValueError(f"{group!r} is no process group or communicator that this rank is in")
        theirs, ours = comm.Get_group(), self.comm.Get_group()
        ranks = theirs.Translate_ranks(None, ours)
        theirs.Free()
        ours.Free()
        return tuple(sorted(int(rank) for rank in ranks))

    def _encoded(self, text: str) -> bytes:
        return text.encode("utf-8", "replace")[-max(1024, MOST_TEXT // self.size) :]

    def abort(self) -> None:
        """End the job from any thread. `mpicoll run` then blames no rank."""
        append_record("stop", self.rank, 1)
        if self.mpi.Query_thread() == self.mpi.THREAD_MULTIPLE and not self.mpi.Is_finalized():
            self.mpi.COMM_WORLD.Abort(1)
        os._exit(1)


def _nap(polls: int) -> int:
    time.sleep(0.0 if polls < 200 else min(0.005, polls * 1e-6))
    return polls + 1
