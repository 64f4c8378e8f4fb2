"""Members that meet before a blocking call of MPI."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from mpicoll.checks.agreement import MEETINGS, meet
from mpicoll.runtime.waiting import GIVE_UP_AFTER, STALL


class Comm:
    """A communicator on which another member posts each meeting later than this member, by the given seconds."""

    def __init__(self, *late: float) -> None:
        self.late, self.posted = list(late), 0

    def Iallreduce(self, _: Any, times: Any, __: Any) -> Any:
        times[0] += int(self.late[min(self.posted, len(self.late) - 1)] * 1e6)
        self.posted += 1
        return SimpleNamespace(Test=lambda: True)


@pytest.mark.parametrize(
    ("late", "posted"),
    [
        ((0.0,), 1),
        ((0.9 * STALL,), 1),
        ((600.0, 0.0), 2),
        ((600.0, 1.5 * STALL), 2),
        ((600.0, 3 * STALL, 3 * STALL), 3),
        ((5.0,), MEETINGS),  # the clocks of two hosts differ by that much
    ],
)
def test_how_often_members_meet(late: tuple[float, ...], posted: int) -> None:
    """Until all have posted within a time that doubles, and a bounded number of times; each stays for twice that time."""
    comm, call = Comm(*late), SimpleNamespace(stays_until=0.0)
    before = time.monotonic()
    for number, meeting in enumerate(meet(SimpleNamespace(epoch=before - 100.0), comm, call)):  # type: ignore[arg-type]
        stays = call.stays_until - GIVE_UP_AFTER * 2**number
        assert before <= stays <= time.monotonic()
        assert meeting.Test()
        before = time.monotonic()
    assert comm.posted == posted
