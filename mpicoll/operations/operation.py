"""Requests whose transitions come from a generator: messages, and calls that belong to no order of a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpicoll.diagnosis.call import Call
from mpicoll.operations.request import Request
from mpicoll.operations.schedules import Steps
from mpicoll.operations.states import MOVING, to

if TYPE_CHECKING:
    from mpicoll.groups.process_group import ProcessGroup


class Operation(Request):
    """A request whose transitions come from a generator: a message, or objects.

    Args:
        steps: yields what has to complete next, and returns the rank in the group that a message came from, or None.
        withdraw: called when the operation is given up.
    """

    __slots__ = ("_withdraw",)

    def __init__(
        self,
        group: ProcessGroup,
        call: Call,
        steps: Steps,
        outputs: list[Any],
        limit: float,
        *,
        peer: int | None = None,
        tag: int = 0,
        withdraw: Callable[[], None] | None = None,
        held: Any = None,
        waited: bool = False,
    ) -> None:
        super().__init__(group, call, outputs, limit, peer=peer, tag=tag, held=held, waited=waited)
        self.steps = steps
        self._withdraw = withdraw
        to(self, MOVING)
        if not waited:
            self.Test()

    def _advance(self) -> None:
        if self._move():
            self._complete()

    def _move(self) -> bool:
        """Progress the message; return whether it is complete."""
        return self._run_steps()

    def _take_back(self) -> None:
        if self._withdraw is not None:
            self._withdraw()
