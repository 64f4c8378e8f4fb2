"""Random programs over several groups: correct ones by construction, and what one changed call makes of them.

A program is a list of steps for each rank. The generator writes one global order of events, in which nothing ever waits for
a later event, and deals the steps of each event out to its ranks: so a program is correct whatever MPI does in between.
Pure, and the same on every rank for the same seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

__all__ = ["DTYPES", "GROUPS", "LARGE", "MUTATIONS", "Program", "Step", "as_script", "correct", "mutate"]

GROUPS: dict[int, tuple[tuple[int, ...], ...]] = {
    2: ((0, 1), (0, 1), (0, 1), (1, 0)),
    3: ((0, 1, 2), (0, 1), (1, 2), (0, 2), (2, 1, 0)),
    4: ((0, 1, 2, 3), (0, 1, 2), (1, 2, 3), (0, 3), (3, 1)),
}
"""The groups of a program by world size, as global ranks in the order of the group; the first is the world."""

DTYPES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4}
OPS = ("SUM", "MAX", "MIN")
MOST_SMALL = 8  # elements: at most 64 bytes, which every MPI sends without waiting for the receiver
LARGE = 300_000  # elements: at least 1.2 MB, which no MPI does

ROOTED = ("broadcast", "reduce", "gather", "gather_single", "scatter")
REDUCING = ("all_reduce", "reduce", "reduce_scatter_single")
COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_single",
    "gather",
    "gather_single",
    "scatter",
    "reduce_scatter_single",
    "all_to_all_single",
    "barrier",
)
MESSAGES = ("send", "recv", "isend", "irecv")


@dataclass(frozen=True)
class Step:
    """One call of one rank.

    Attributes:
        kind: the public function, or "wait" or "pause".
        group: index into the groups of the program.
        root, peer: global ranks; -1: none (a ``recv`` takes a message from any rank).
        handle: names the Work of an asynchronous call, and what a "wait" waits for; -1: the call is waited for itself.
        value: what is moved, so that the result can be checked.
        seconds: of a "pause", in which the rank computes.
    """

    kind: str
    group: int = 0
    dtype: str = "float64"
    count: int = 1
    op: str = "SUM"
    root: int = -1
    peer: int = -1
    tag: int = 0
    handle: int = -1
    value: int = 0
    seconds: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of one block."""
        return DTYPES[self.dtype] * self.count

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the arguments that mean something to this call."""
        if self.kind in MESSAGES:
            return ("dtype", "count", "tag", "peer") if self.peer >= 0 else ("dtype", "count", "tag")
        if self.kind not in COLLECTIVES or self.kind == "barrier":
            return ()
        names = ["dtype", "count"]
        if self.kind in ROOTED:
            names.append("root")
        if self.kind in REDUCING:
            names.append("op")
        return tuple(names)


@dataclass(frozen=True)
class Program:
    """The steps of every rank; ``name`` says how to make it again."""

    size: int
    name: str
    steps: tuple[tuple[Step, ...], ...]

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups that the steps name by index."""
        return GROUPS[self.size]


@dataclass
class _Message:
    group: int
    source: int
    target: int
    step: Step
    waits: int = -1  # the sender's handle that may be waited for when this message has been received


class _Writer:
    """Writes one correct program, event by event."""

    def __init__(self, random_: random.Random, size: int) -> None:
        self.random = random_
        self.size = size
        self.steps: list[list[Step]] = [[] for _ in range(size)]
        self.handles = 0
        self.finished: list[list[int]] = [[] for _ in range(size)]  # handles that may be waited for
        self.under_way: list[_Message] = []  # sent, not yet received
        self.any_source = False

    def handle(self) -> int:
        self.handles += 1
        return self.handles

    def arguments(self, smallest: int) -> tuple[str, int, int]:
        """Return a dtype, a number of elements and a value."""
        large = self.random.random() < 0.01
        return (
            self.random.choice(tuple(DTYPES)),
            LARGE if large else self.random.randint(smallest, MOST_SMALL),
            self.random.randint(1, 50),
        )

    def collective(self) -> None:
        group = self.random.randrange(len(GROUPS[self.size]))
        members = GROUPS[self.size][group]
        kind = self.random.choice(COLLECTIVES)
        dtype, count, value = self.arguments(0)
        if kind not in ("all_reduce", "broadcast"):
            count = min(count, MOST_SMALL)
        step = Step(kind, group, dtype, count, value=value)
        if kind in ROOTED:
            step = replace(step, root=self.random.choice(members))
        if kind in REDUCING:
            step = replace(step, op=self.random.choice(OPS))
        asynchronous = self.random.random() < 0.3
        for rank in members:
            # Asynchronous on some ranks and waited for on others is legal.
            if asynchronous and self.random.random() < 0.9:
                handle = self.handle()
                self.steps[rank].append(replace(step, handle=handle))
                self.finished[rank].append(handle)
            else:
                self.steps[rank].append(step)

    def message(self) -> None:
        """Send now, to be received at a later event; the receive may have been started before."""
        group = self.random.randrange(len(GROUPS[self.size]))
        source, target = self.random.sample(GROUPS[self.size][group], 2)
        dtype, count, value = self.arguments(1)
        step = Step("send", group, dtype, count, tag=self.random.randint(0, 2), value=value)
        taken = any(
            (m.group, m.source, m.target, m.step.tag) == (group, source, target, step.tag) for m in self.under_way
        )
        early = not taken and self.random.random() < 0.3
        if early:
            handle = self.handle()
            self.steps[target].append(replace(step, kind="irecv", peer=source, handle=handle))
            self.finished[target].append(handle)
        message = _Message(group, source, target, step)
        if self.random.random() < 0.4 or (count == LARGE and not early):
            message.waits = self.handle()
            self.steps[source].append(replace(step, kind="isend", peer=target, handle=message.waits))
            if early or count != LARGE:
                self.finished[source].append(message.waits)
                message.waits = -1
        else:
            self.steps[source].append(replace(step, peer=target))
        if not early:
            self.under_way.append(message)

    def receive(self) -> None:
        """Receive a message that is under way: the oldest of its source, target, group and tag."""
        if not self.under_way:
            return
        message = self.random.choice(self.under_way)
        same = (message.group, message.source, message.target, message.step.tag)
        message = next(m for m in self.under_way if (m.group, m.source, m.target, m.step.tag) == same)
        self.under_way.remove(message)
        step = replace(message.step, kind="recv", peer=message.source)
        if self.random.random() < 0.3:
            step = replace(step, kind="irecv", handle=self.handle())
            self.finished[message.target].append(step.handle)
        self.steps[message.target].append(step)
        if message.waits >= 0:
            self.finished[message.source].append(message.waits)

    def ring(self) -> None:
        """Every member sends to the next one: receive started first, or everything started and then waited for."""
        group = self.random.randrange(len(GROUPS[self.size]))
        members = GROUPS[self.size][group]
        dtype, count, value = self.arguments(1)
        step = Step("irecv", group, dtype, count, tag=3 + group, value=value)
        together = self.random.random() < 0.5
        for place, rank in enumerate(members):
            left, right = members[place - 1], members[(place + 1) % len(members)]
            handle = self.handle()
            mine = [replace(step, peer=left, handle=handle)]
            self.finished[rank].append(handle)
            if together:
                handle = self.handle()
                mine.append(replace(step, kind="isend", peer=right, handle=handle))
                self.finished[rank].append(handle)
                self.random.shuffle(mine)
            else:
                mine.append(replace(step, kind="send", peer=right))
            self.steps[rank] += mine

    def from_anybody(self) -> None:
        """One member receives from all others of a group in the order in which they come."""
        if self.any_source:
            return
        self.any_source = True
        group = self.random.randrange(len(GROUPS[self.size]))
        members = GROUPS[self.size][group]
        target = self.random.choice(members)
        dtype, count, value = self.arguments(1)
        step = Step("send", group, dtype, min(count, MOST_SMALL), tag=20, value=value)
        others = [rank for rank in members if rank != target]
        for rank in others:
            self.steps[rank].append(replace(step, peer=target))
        self.steps[target] += [replace(step, kind="recv") for _ in others]

    def wait(self, all_: bool = False) -> None:
        """Have ranks wait for some of what may be waited for, in any order."""
        for rank in range(self.size):
            ready = self.finished[rank]
            self.random.shuffle(ready)
            while ready and (all_ or self.random.random() < 0.3):
                self.steps[rank].append(Step("wait", handle=ready.pop()))

    def pause(self, seconds: float) -> None:
        self.steps[self.random.randrange(self.size)].append(Step("pause", seconds=seconds))


def correct(seed: int, size: int, pause: float = 0.0) -> Program:
    """Return a random correct program; with ``pause`` one of its ranks computes that many seconds somewhere."""
    random_ = random.Random(seed * 7 + size)
    writer = _Writer(random_, size)
    events = (
        [writer.collective] * 10 + [writer.message] * 4 + [writer.receive] * 3 + [writer.ring] + [writer.from_anybody]
    )
    number = random_.randint(4, 12)
    at = random_.randrange(number) if pause else -1
    for index in range(number):
        if index == at:
            writer.pause(pause)
        random_.choice(events)()
        writer.wait()
    while writer.under_way:
        writer.receive()
    writer.wait(all_=True)
    # A receive from anybody might take a message of the program that follows, but for a barrier at its end.
    if writer.any_source or random_.random() < 0.7:
        for steps in writer.steps:
            steps.append(Step("barrier"))
    paused = f", pause={pause}" if pause else ""
    return Program(size, f"correct({seed}, {size}{paused})", tuple(tuple(steps) for steps in writer.steps))


def _drop(random_: random.Random, rank: int, size: int, steps: list[Step]) -> list[Step] | None:
    step = random_.choice(steps)
    kept = [each for each in steps if each is not step]
    if step.handle >= 0 and step.kind != "wait":
        kept = [each for each in kept if each.handle != step.handle]
    return kept


def _swap(random_: random.Random, rank: int, size: int, steps: list[Step]) -> list[Step] | None:
    places = [
        at
        for at in range(len(steps) - 1)
        if replace(steps[at], handle=0) != replace(steps[at + 1], handle=0)
        and (steps[at].handle < 0 or steps[at].handle != steps[at + 1].handle)
    ]
    if not places:
        return None
    at = random_.choice(places)
    return [*steps[:at], steps[at + 1], steps[at], *steps[at + 2 :]]


def _duplicate(random_: random.Random, rank: int, size: int, steps: list[Step]) -> list[Step] | None:
    at = random_.randrange(len(steps))
    step = steps[at]
    twice = steps[: at + 1] + [step] + steps[at + 1 :]
    if step.handle < 0 or step.kind == "wait":
        return twice
    other = 1 + max(each.handle for each in steps)
    twice[at + 1] = replace(step, handle=other)
    end = next(i for i, each in enumerate(twice) if each.kind == "wait" and each.handle == step.handle)
    return [*twice[: end + 1], Step("wait", handle=other), *twice[end + 1 :]]


def _argument(name: str) -> Callable[[random.Random, int, int, list[Step]], list[Step] | None]:
    def change(random_: random.Random, rank: int, size: int, steps: list[Step]) -> list[Step] | None:
        places = [at for at, step in enumerate(steps) if name in step.fields]
        if not places:
            return None
        at = random_.choice(places)
        step = steps[at]
        others: list[object]
        if name == "dtype":
            others = [dtype for dtype in DTYPES if dtype != step.dtype]
        elif name == "op":
            others = [op for op in OPS if op != step.op]
        elif name == "count":
            others = [step.count + 1] if step.count == LARGE else [n for n in range(1, 9) if n != step.count]
            if random_.random() < 0.1 and step.kind in ("send", "recv", "all_reduce"):
                others = [LARGE] if step.count != LARGE else [2]
        elif name == "tag":
            others = [tag for tag in (0, 1, 2, 9) if tag != step.tag]
        else:  # root, peer: any other rank of the world, in the group or not
            others = [other for other in range(size) if other != getattr(step, name)]
            if name == "peer":
                others = [other for other in others if other != rank]
        if not others:
            return None
        changed = {name: random_.choice(others)}
        return [*steps[:at], replace(step, **changed), *steps[at + 1 :]]  # type: ignore[arg-type]

    return change


def _group(random_: random.Random, rank: int, size: int, steps: list[Step]) -> list[Step] | None:
    places = [at for at, step in enumerate(steps) if step.kind in COLLECTIVES or step.kind in MESSAGES]
    if not places:
        return None
    at = random_.choice(places)
    other = random_.choice([index for index in range(len(GROUPS[size])) if index != steps[at].group])
    return [*steps[:at], replace(steps[at], group=other), *steps[at + 1 :]]


MUTATIONS = {
    "drop": _drop,
    "swap": _swap,
    "duplicate": _duplicate,
    "dtype": _argument("dtype"),
    "count": _argument("count"),
    "root": _argument("root"),
    "op": _argument("op"),
    "tag": _argument("tag"),
    "peer": _argument("peer"),
    "group": _group,
}


def mutate(program: Program, kind: str, seed: int) -> Program | None:
    """Return the program with one step of one rank changed; None when it has no step of which that could be said."""
    random_ = random.Random(f"{kind} {seed}")
    rank = random_.randrange(program.size)
    steps = list(program.steps[rank])
    changed = MUTATIONS[kind](random_, rank, program.size, steps) if steps else None
    if changed is None:
        return None
    return Program(
        program.size,
        f"mutate({program.name}, {kind!r}, {seed}), on rank {rank}",
        (*program.steps[:rank], tuple(changed), *program.steps[rank + 1 :]),
    )


def _source(step: Step, size: int) -> str:
    """Return the call as a line of Python."""
    if step.kind == "wait":
        return f"works[{step.handle}] and works[{step.handle}].wait()"
    if step.kind == "pause":
        return f"time.sleep({step.seconds})"
    n = len(GROUPS[size][step.group])
    dtype, count = f"np.{step.dtype}", step.count
    block = f"np.full({count}, {step.value}, {dtype})"
    several = f"[np.zeros({count}, {dtype}) for _ in range({n})]"
    joined = f"np.full({count * n}, {step.value}, {dtype})"
    op = f"dist.ReduceOp.{step.op}"
    arguments = {
        "all_reduce": f"{block}, {op}",
        "broadcast": f"{block}, {step.root}",
        "reduce": f"{block}, {step.root}, {op}",
        "all_gather": f"{several}, {block}",
        "all_gather_single": f"{joined}, {block}",
        "gather": f"{block}, {several} if r == {step.root} else None, {step.root}",
        "gather_single": f"{block}, {joined} if r == {step.root} else None, {step.root}",
        "scatter": f"{block}, {several} if r == {step.root} else None, {step.root}",
        "reduce_scatter_single": f"{block}, {joined}, {op}",
        "all_to_all_single": f"{joined}, {joined}",
        "barrier": "",
    }.get(step.kind, block)
    words = [arguments] if arguments else []
    if step.kind in MESSAGES:
        if step.peer >= 0:
            words.append(str(step.peer))
        words.append(f"tag={step.tag}")
    if step.group:
        words.append(f"group=groups[{step.group}]")
    if step.handle >= 0 and step.kind in COLLECTIVES:
        words.append("async_op=True")
    call = f"dist.{step.kind}({', '.join(words)})"
    return f"works[{step.handle}] = {call}" if step.handle >= 0 else call


def as_script(program: Program) -> str:
    """Return the program as a script that runs under mpiexec on as many ranks."""
    lines = [
        f"# {program.name}; run on {program.size} ranks",
        "import time",
        "import numpy as np",
        "import mpicoll as dist",
        "dist.init_process_group()",
        "r, works = dist.get_rank(), {}",
        "groups = [None]",
    ]
    lines += [f"groups.append(dist.new_group({list(group)}, sort_ranks=False))" for group in program.groups[1:]]
    for rank, steps in enumerate(program.steps):
        lines.append(f"if r == {rank}:")
        lines += [f"    {_source(step, program.size)}" for step in steps] or ["    pass"]
    return "\n".join(lines) + "\n"
