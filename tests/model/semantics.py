"""What must become of a program: an abstract machine for collectives and messages that knows no MPI and no mpicoll.

Collectives: the k-th calls of all members of a group belong together; they end when all are issued, well if they are alike,
with an error on every member otherwise. Messages: the oldest of a group, source, target and tag goes to the receive that
was started first of those that take it; a small one is sent at once, a large one when it is received.

Every rank goes on as long as it can. What a rank does can only help others on, so the order in which ranks are looked at
changes nothing, with two exceptions, both followed up in all ways: which message a receive from any rank takes (looked at
only when nothing else can go on, so that every message that could have come has come), and whether a large message
that the receiver refuses releases its sender. Partial-order argument: Vakkalanka, Gopalakrishnan, Kirby, "Dynamic
verification of MPI programs with reductions in presence of split operations and relaxed orderings" (CAV 2008).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from model.programs import COLLECTIVES, LARGE, MESSAGES, ROOTED, Program, Step

__all__ = ["Checks", "End", "Verdict", "verdicts"]

MOST_PATHS = 200


@dataclass(frozen=True)
class Checks:
    """What is looked at; each can be taken back to what a checker without it would see.

    Attributes:
        envelope: a message is refused when its dtype or number of elements is not that of its receive; without, only when
            it has more bytes than the receive.
        unreceived: a message that nobody has received is an error at the end of the program.
    """

    envelope: bool = True
    unreceived: bool = True


@dataclass(frozen=True)
class End:
    """How one rank ends.

    Attributes:
        state: "done"; "mismatch": in a collective whose members call different things, or a receive of another message;
            "argument": its own arguments are wrong; "blocked": for ever.
        step: where, -1 when done.
        unwaited: it is done, and has Works that it never waited for.
    """

    state: str
    step: int = -1
    unwaited: bool = False


@dataclass(frozen=True)
class Verdict:
    """One possible outcome of a program.

    Attributes:
        ends: of each rank.
        unreceived: the messages that are left, and nobody has received: (group, source, target, tag) of each, sorted.
        in_step: no rank waits for another, nothing is under way and all members of every group have made as many calls on
            it, so the groups can be used by another program.
    """

    ends: tuple[End, ...]
    unreceived: tuple[tuple[int, int, int, int], ...]
    in_step: bool

    def harmless(self, checks: Checks) -> bool:
        """Whether nothing is wrong with it."""
        good = all(end.state == "done" and not end.unwaited for end in self.ends)
        return good and not (checks.unreceived and self.unreceived)


@dataclass(eq=False)
class _Operation:
    done: bool = False
    error: str = ""
    waited: bool = False


@dataclass(eq=False)
class _Call(_Operation):
    key: tuple[object, ...] = ()


@dataclass(eq=False)
class _Message(_Operation):
    step: Step = field(default_factory=lambda: Step("send"))
    source: int = -1


@dataclass(eq=False)
class _Receive(_Operation):
    step: Step = field(default_factory=lambda: Step("recv"))


class _Path:
    """One way through a program; ``choices`` are taken at the first places where there are several ways."""

    def __init__(self, program: Program, checks: Checks, choices: tuple[int, ...]) -> None:
        self.program = program
        self.checks = checks
        self.choices = choices
        self.taken: list[tuple[int, int]] = []  # (which, of how many)
        size = program.size
        self.at = [0] * size
        self.current: list[_Operation | None] = [None] * size
        self.ends: list[End | None] = [None] * size
        self.works: list[dict[int, _Operation]] = [{} for _ in range(size)]
        self.issued: dict[tuple[int, int], list[_Call]] = {
            (group, rank): [] for group, members in enumerate(program.groups) for rank in members
        }
        self.messages: dict[tuple[int, int], list[_Message]] = {}  # (group, target) -> not yet received, oldest first
        self.receives: dict[tuple[int, int], list[_Receive]] = {}  # (group, target) -> without a message, oldest first

    def choose(self, ways: int) -> int:
        at = len(self.taken)
        which = self.choices[at] if at < len(self.choices) else 0
        self.taken.append((which, ways))
        return which

    def play(self) -> Verdict:
        while True:
            moved = False
            for rank in range(self.program.size):
                while self.ends[rank] is None and self.go_on(rank):
                    moved = True
            if not moved and not self.take_from_anybody():
                break
        ends = tuple(end or End("blocked", self.at[rank]) for rank, end in enumerate(self.ends))
        left = sorted(
            (group, message.source, target, message.step.tag)
            for (group, target), messages in self.messages.items()
            for message in messages
            if message.done
        )
        idle = all(end.state != "blocked" for end in ends) and all(
            work.waited for works in self.works for work in works.values()
        )
        level = all(
            len({len(self.issued[group, rank]) for rank in members}) == 1
            for group, members in enumerate(self.program.groups)
        )
        return Verdict(ends, tuple(left), idle and level and not left)

    def go_on(self, rank: int) -> bool:
        """Let a rank do one thing; False when it cannot."""
        operation = self.current[rank]
        if operation is None:
            if self.at[rank] == len(self.program.steps[rank]):
                unwaited = any(not work.waited for work in self.works[rank].values())
                self.ends[rank] = End("done", unwaited=unwaited)
            else:
                self.start(rank, self.program.steps[rank][self.at[rank]])
            return True
        if not operation.done:
            return False
        operation.waited = True
        self.current[rank] = None
        if operation.error:
            self.ends[rank] = End(operation.error, self.at[rank])
        else:
            self.at[rank] += 1
        return True

    def start(self, rank: int, step: Step) -> None:
        """Start a call: the rank waits in it, or goes on with its Work."""
        if step.kind == "pause":
            self.at[rank] += 1
            return
        if step.kind == "wait":
            self.current[rank] = self.works[rank][step.handle]
            return
        wrong, operation = self.issue(rank, step)
        if wrong and operation is None:
            self.ends[rank] = End("argument", self.at[rank])
        elif operation is None:  # not in the group: nothing is called
            self.works[rank][step.handle] = _Operation(done=True, waited=True)
            self.at[rank] += 1
        elif step.handle >= 0 and not wrong:
            self.works[rank][step.handle] = operation
            self.at[rank] += 1
        else:
            self.current[rank] = operation

    def issue(self, rank: int, step: Step) -> tuple[bool, _Operation | None]:
        """Return whether the arguments are wrong on this rank alone, and what was started (None: nothing)."""
        members = self.program.groups[step.group]
        if rank not in members:
            # torch's rule: a send into a group that this rank is not in raises, other calls warn and do nothing.
            return step.kind == "send", None
        if step.kind in COLLECTIVES:
            wrong = step.kind in ROOTED and step.root not in members
            # Wrong arguments take part: they are like no other call, and the others learn of them.
            key = (step.kind, rank) if wrong else (step.kind, *(getattr(step, name) for name in step.fields))
            call = _Call(key=key, error="argument" if wrong else "")
            self.issued[step.group, rank].append(call)
            self.meet(step.group, len(self.issued[step.group, rank]) - 1)
            return wrong, call
        assert step.kind in MESSAGES
        if step.peer >= 0 and step.peer not in members:
            return True, None
        if step.kind in ("send", "isend"):
            message = _Message(done=step.count < LARGE, step=step, source=rank)
            self.messages.setdefault((step.group, step.peer), []).append(message)
            self.match(step.group, step.peer)
            return False, message
        receive = _Receive(step=step)
        self.receives.setdefault((step.group, rank), []).append(receive)
        self.match(step.group, rank)
        return False, receive

    def meet(self, group: int, number: int) -> None:
        """End a collective when all members have issued it."""
        ranks = self.program.groups[group]
        if any(len(self.issued[group, rank]) <= number for rank in ranks):
            return
        calls = [self.issued[group, rank][number] for rank in ranks]
        alike = len({call.key for call in calls}) == 1 and not any(call.error for call in calls)
        for call in calls:
            call.done = True
            call.error = call.error or ("" if alike else "mismatch")

    def match(self, group: int, target: int) -> None:
        """Give messages to the receives that name their source."""
        again = True
        while again:
            again = False
            held: set[int] = set()  # tags that a receive from anybody comes first for
            for receive in self.receives.get((group, target), []):
                if receive.step.peer < 0:
                    held.add(receive.step.tag)
                elif receive.step.tag not in held:
                    found = self.oldest(group, target, receive.step.tag, receive.step.peer)
                    if found is not None:
                        self.give(group, target, receive, found)
                        again = True
                        break

    def oldest(self, group: int, target: int, tag: int, source: int) -> _Message | None:
        """Return the message that was sent first of those from one rank with one tag."""
        messages = self.messages.get((group, target), [])
        return next((m for m in messages if (m.step.tag, m.source) == (tag, source)), None)

    def give(self, group: int, target: int, receive: _Receive, message: _Message) -> None:
        self.receives[group, target].remove(receive)
        receive.done = True
        if not self.checks.envelope and message.step.nbytes > receive.step.nbytes:
            receive.error = "argument"  # refused, and the message stays
            return
        alike = (message.step.dtype, message.step.count) == (receive.step.dtype, receive.step.count)
        if not self.checks.envelope or alike:
            self.messages[group, target].remove(message)
        if self.checks.envelope and not alike:
            receive.error = "mismatch"  # refused, and the message stays for the next receive
            if not message.done:
                message.done = self.choose(2) == 0
        else:
            message.done = True

    def take_from_anybody(self) -> bool:
        """Let the first receive from anybody that has messages to choose from take one."""
        for (group, target), receives in self.receives.items():
            for number, receive in enumerate(receives):
                step = receive.step
                earlier = any(r.step.peer < 0 and r.step.tag == step.tag for r in receives[:number])
                if step.peer >= 0 or earlier:
                    continue
                sources = sorted({m.source for m in self.messages.get((group, target), []) if m.step.tag == step.tag})
                if not sources:
                    continue
                source = sources[self.choose(len(sources))]
                found = self.oldest(group, target, step.tag, source)
                assert found is not None
                self.give(group, target, receive, found)
                self.match(group, target)
                return True
        return False


def verdicts(program: Program, checks: Checks) -> frozenset[Verdict] | None:
    """Return every possible outcome, or None when there are too many ways to follow."""
    found = set()
    todo: list[tuple[int, ...]] = [()]
    paths = 0
    while todo:
        prefix = todo.pop()
        paths += 1
        if paths > MOST_PATHS:
            return None
        path = _Path(program, checks, prefix)
        found.add(path.play())
        which = tuple(chosen for chosen, _ in path.taken)
        for at in range(len(prefix), len(path.taken)):
            todo += [(*which[:at], other) for other in range(1, path.taken[at][1])]
    return frozenset(found)
