"""Run random programs on the ranks of one MPI job, and compare what becomes of each with what the model says.

    mpiexec -n 3 python -m model.driver --correct 1000 --mutated 100

Correct programs run one after the other on the same groups, with their results checked. A mutated one runs alone: when
it has ended on this rank, well or not, the ranks meet on a communicator of the driver's own and tell each other how it went.

No rank can exit within a job that goes on. So a rank at the end of its program, or with an error in it, says on the board
what a process says there that ends or fails, and answers questions until all have met: those who wait for it raise
PeerExitedError or PeerFailedError as they would. After that the board forgets it and the groups are made again, unless the
model says that they are still in step: then the next program uses them, also after a mismatch.

Nor can a job be at its end after each program, where the library says which messages nobody has received. What it says it
from are its counters, and those the ranks compare with each other after each program.

A program that goes wrong is printed as a script. The mutated program of number N of a job alone: ``--seed N-1 --mutated 1``,
with the same ``--kinds``.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
from model.programs import COLLECTIVES, MUTATIONS, Program, Step, as_script, correct, mutate
from model.semantics import Checks, Verdict, verdicts
from mpi4py import MPI

import mpicoll as dist
from mpicoll.diagnosis import deadlock_search
from mpicoll.diagnosis.deadlock import State, blocked_set
from mpicoll.groups import process_group, registry
from mpicoll.groups.process_group import untold
from mpicoll.lifecycle import teardown
from mpicoll.lifecycle.endpoint import endpoint_of
from mpicoll.operations import execution, prepared
from mpicoll.runtime import waiting

LIMIT = 20.0
BATCH = 50
SAY_SO_AFTER = 0.03
STUCK_AFTER = 1.0
FOLLOWERS = ("PeerFailedError", "GroupBrokenError")
DIFFERED = "pending when the calls of its ranks differed"
"""The words of a GroupBrokenError of a call behind asynchronous calls that differ, whose own waits raise the report."""
TABLE = ("flagged", "harmless", "missed", "false")


class WrongData(Exception):
    """A correct call moved something else than it should."""


Messages = tuple[tuple[int, int, int, int], ...]
"""(group, source, target, tag) of each, sorted."""


@dataclass(frozen=True)
class Ending:
    """How a program ended on one rank: ``kind`` is "done" or the name of the exception."""

    kind: str
    step: int = -1
    text: str = ""
    unwaited: bool = False

    @property
    def bad(self) -> bool:
        """Whether the rank said that something is wrong."""
        return self.kind != "done" or self.unwaited


@dataclass(frozen=True)
class Outcome:
    """How a program ended on all ranks.

    Attributes:
        endings: of each rank.
        told: a rank has told the board how it ended.
        lost: the messages that nobody has received, as the library would name them at the end of the job.
    """

    endings: tuple[Ending, ...]
    told: bool
    lost: Messages

    @property
    def bad(self) -> bool:
        """Whether the library would say that something is wrong."""
        return bool(self.lost) or any(end.bad for end in self.endings)


class Runner:
    """One rank's part: the groups, and running a program on them."""

    def __init__(self, limit: float) -> None:
        self.books = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self.books.Get_rank(), self.books.Get_size()
        self.limit = limit
        self.works: dict[int, Any] = {}
        self.comm = self.books.Dup()
        self.made = 0
        self.make()

    def make(self) -> None:
        """Make the default group, and the groups of the programs."""
        self.made += 1
        dist.init_process_group(comm=self.comm, timeout=timedelta(seconds=self.limit))
        known = registry.state()
        self.board = known.board
        self.base = endpoint_of(known.board)
        self.groups: list[Any] = [None]
        shapes = correct(0, self.size).groups
        self.groups += [dist.new_group(list(members), sort_ranks=False) for members in shapes[1:]]
        self.settled = self.base.balance()  # of earlier groups, whose messages were received or dropped
        # Who is not in the last of the groups is through first, and would fail in the next program while others make it.
        self.together()

    def together(self) -> None:
        """Wait for the other ranks, and leave the processor to them."""
        met = self.books.Ibarrier()
        while not met.Test():
            time.sleep(2e-4)

    def make_anew(self) -> None:
        """Destroy what the last program has used, have the board forget it, and make the groups again."""
        for work in self.works.values():
            if work is not None:
                work.get_future()  # whoever holds its future is taken to look after it: no complaint when it is destroyed
        self.works.clear()
        # Messages of one rank come in order: behind this one there is none that speaks of the last program.
        self.board.post("ended", None, range(self.size))
        start = time.monotonic()
        while len(self.board.ended) < self.size - 1:
            self.board.poll()
            time.sleep(1e-4)
            if time.monotonic() - start > LIMIT:
                raise RuntimeError("the ranks do not meet on the board")
        self.together()
        for group in registry.state().groups.values():
            group.unknown_mismatch = None  # the program has ended with this error, or beside the error
            group.futures.clear()
        dist.destroy_process_group()
        for known in (
            "failed",
            "exited",
            "ended",
            "handling",
            "withdrawn",
            "joins",
            "left",
            "announced",
            "searched_by",
        ):
            getattr(self.board, known).clear()
        self.board.verdict = None
        self.make()

    def run(self, program: Program, check: bool) -> Ending:
        """Run this rank's steps; ``check``: the results too."""
        shapes = program.groups
        steps = program.steps[self.rank]
        self.works.clear()
        looks: dict[int, Callable[[], None]] = {}
        at = -1
        try:
            for at, step in enumerate(steps):  # noqa: B007 (read where it raises)
                if step.kind == "wait":
                    work = self.works[step.handle]
                    if work is not None:
                        work.wait()
                    look = looks.pop(step.handle, None)
                elif step.kind == "pause":
                    time.sleep(step.seconds)
                    continue
                else:
                    work, look = self.call(step, shapes[step.group])
                    if step.handle >= 0:
                        self.works[step.handle] = work
                        looks[step.handle] = look
                        continue
                if check and look is not None:
                    look()
        except Exception as error:
            if not isinstance(error, (dist.DistError, ValueError, TypeError, WrongData)):
                traceback.print_exc()
            return Ending(type(error).__name__, at, str(error))
        never = teardown.never_waited(untold(registry.state().groups.values()))
        return Ending("done", text=never, unwaited=bool(never))

    def call(self, step: Step, members: tuple[int, ...]) -> tuple[Any, Callable[[], None]]:
        """Make one call; return its Work and what looks at its result."""
        n, group, value, root = len(members), self.groups[step.group], step.value, step.root
        me = members.index(self.rank) if self.rank in members else 0
        kind, count, dtype = step.kind, step.count, step.dtype
        options: dict[str, Any] = {"group": group}
        if kind in COLLECTIVES and step.handle >= 0:
            options["async_op"] = True

        def full(number: int, elements: int = count) -> Any:
            return np.full(elements, number, dtype)

        def blocks(*numbers: int) -> Any:
            return np.concatenate([full(number) for number in numbers])

        def reduced(first: int) -> Any:
            """Return ``first``, ``first + 1`` and so on of all members, reduced."""
            each = range(first, first + n)
            return full(sum(each) if step.op == "SUM" else max(each) if step.op == "MAX" else min(each))

        def same(*pairs: tuple[Any, Any]) -> Callable[[], None]:
            def look() -> None:
                for got, expected in pairs:
                    if not np.array_equal(got, expected):
                        raise WrongData(f"{step}: {got[:8]} instead of {expected[:8]}")

            return look

        if kind == "barrier":
            return dist.barrier(**options), same()
        if kind in ("send", "isend", "recv", "irecv"):
            sends = kind.endswith("send")
            x = full(value if sends else 0)
            peer = (step.peer,) if step.peer >= 0 else ()
            return getattr(dist, kind)(x, *peer, tag=step.tag, **options), same((x, full(value)))
        op = getattr(dist.ReduceOp, step.op)
        x = full(value + me)
        if kind == "all_reduce":
            return dist.all_reduce(x, op, **options), same((x, reduced(value)))
        if kind == "reduce":
            work = dist.reduce(x, root, op, **options)
            return work, same((x, reduced(value) if self.rank == root else full(value + me)))
        if kind == "broadcast":
            x = full(value if self.rank == root else 0)
            return dist.broadcast(x, root, **options), same((x, full(value)))
        if kind == "all_gather":
            several = [full(0) for _ in range(n)]
            return dist.all_gather(several, x, **options), same(
                *((got, full(value + i)) for i, got in enumerate(several))
            )
        if kind == "all_gather_single":
            joined = full(0, n * count)
            return dist.all_gather_single(joined, x, **options), same((joined, blocks(*range(value, value + n))))
        if kind == "gather":
            several = [full(0) for _ in range(n)] if self.rank == root else []
            return dist.gather(x, several or None, root, **options), same(
                *((got, full(value + i)) for i, got in enumerate(several))
            )
        if kind == "gather_single":
            whole = full(0, n * count) if self.rank == root else None
            return dist.gather_single(x, whole, root, **options), same(
                *([] if whole is None else [(whole, blocks(*range(value, value + n)))])
            )
        if kind == "scatter":
            several = [full(value + i) for i in range(n)] if self.rank == root else []
            return dist.scatter(x, several or None, root, **options), same((x, full(value + me)))
        if kind == "reduce_scatter_single":
            joined = blocks(*(value + me + i for i in range(n)))
            return dist.reduce_scatter_single(x, joined, op, **options), same((x, reduced(value + me)))
        assert kind == "all_to_all_single"
        source, joined = blocks(*(value + 10 * me + i for i in range(n))), full(0, n * count)
        return dist.all_to_all_single(joined, source, **options), same(
            (joined, blocks(*(value + 10 * i + me for i in range(n))))
        )

    def meet(self, mine: Ending, *, alone: bool) -> Outcome:
        """Meet after a program; return how it ended on every rank.

        Args:
            alone: other ranks may be waiting for this one.
        """
        tell_after = (0.0 if mine.bad else SAY_SO_AFTER) if alone else STUCK_AFTER
        met = self.books.Ibarrier()
        start = time.monotonic()
        told = False
        while not met.Test():
            waited = time.monotonic() - start
            self.board.poll()
            if not mine.bad:
                waiting.progress()
            if not told and waited >= tell_after:
                told = True
                self.tell(mine)
            time.sleep(2e-4)
        everybody = self.books.allgather((mine, told, self.base.balance() - self.settled, self.counted()))
        endings, said, balances, counted = zip(*everybody, strict=True)
        # As at the end of a job: the sum says whether a message is lost, and only then the ranks look for which.
        return Outcome(endings, any(said), named(counted) if sum(balances) else ())

    def counted(self) -> tuple[dict[tuple[int, int, int], int], dict[tuple[int, int, int], int]]:
        """Return the messages sent and received on the groups that are there, by (group, other rank, tag)."""
        known = [registry.state().world, *self.groups[1:]]
        index = {group.group_name: at for at, group in enumerate(known) if group != dist.GroupMember.NON_GROUP_MEMBER}
        sent, received = (
            {
                (index[name], rank, tag): count
                for name, there in by_group.items()
                if name in index
                for (rank, tag), count in there.items()
            }
            for by_group in (self.base.all_sent(), self.base.all_received())
        )
        return sent, received

    def tell(self, mine: Ending) -> None:
        """Say what a process says when it fails, or comes to its end."""
        if mine.bad:
            self.board.post("failed", (f"{mine.kind}: {mine.text[:200]}", "", 1), range(self.size))
            return
        for rank in range(self.size):
            self.board.post("exited", (*self.base.counters(rank), "ended the program"), [rank])


def named(counted: Sequence[tuple[Mapping[tuple[int, int, int], int], Mapping[tuple[int, int, int], int]]]) -> Messages:
    """Return the messages that were sent and not received, from what each rank has counted."""
    lost = []
    for source, (sent, _) in enumerate(counted):
        for (group, target, tag), count in sent.items():
            lost += [(group, source, target, tag)] * (count - counted[target][1].get((group, source, tag), 0))
    return tuple(sorted(lost))


def fits(verdict: Verdict, outcome: Outcome) -> str:
    """Return why an outcome is not what the model says, or "" when it is."""
    endings = outcome.endings
    first = [
        rank
        for rank, end in enumerate(endings)
        if end.unwaited or end.kind not in ("done", *FOLLOWERS) or DIFFERED in end.text
    ]
    for rank, (end, expected) in enumerate(zip(endings, verdict.ends, strict=True)):
        if end.kind == "done":
            if expected.state != "done" or end.unwaited != expected.unwaited:
                return f"missed: rank {rank} should have ended with {expected}"
        elif end.kind in FOLLOWERS:
            if DIFFERED not in end.text and not any(other != rank for other in first):
                return f"false: rank {rank} speaks of another rank's failure, and there is none"
        elif end.kind == "CollectiveTimeoutError":
            return f"missed: rank {rank} ran into the time limit"
        else:
            means = {
                "CollectiveMismatchError": "mismatch",
                "DeadlockError": "blocked",
                "PeerExitedError": "blocked",
                "ValueError": "argument",
                "DistBackendError": "argument",
            }.get(end.kind, "nothing that the model knows")
            # A rank whose call refuses its arguments raises that error also if its wait for the other ranks ends as a deadlock.
            refused = end.kind == "ValueError" and expected.state == "blocked" and end.step == expected.step
            if not refused and (means, end.step) != (expected.state, expected.step):
                return f"false: rank {rank} ended with {end.kind} in step {end.step}, not with {expected}"
    # A job that ends by an error says nothing of messages: the ranks had more to do.
    if outcome.lost != verdict.unreceived and not any(end.bad for end in endings):
        missed = set(verdict.unreceived) - set(outcome.lost)
        return f"{'missed' if missed else 'false'}: left are {verdict.unreceived}, counted as left {outcome.lost}"
    return ""


def judge(possible: frozenset[Verdict], outcome: Outcome) -> tuple[str, str]:
    """Return the column of the table that a program belongs into, and why where that is bad."""
    reasons = [fits(verdict, outcome) for verdict in possible]
    if not all(reasons):
        return "flagged" if outcome.bad else "harmless", ""
    reason = min(reasons)
    return reason.partition(":")[0], reason


def shown(program: Program, reason: str, outcome: Outcome) -> str:
    """Return what a reader needs of a program that did not end as it should."""
    lines = [f"--- {program.name}: {reason}"]
    lines += [f"rank {rank}: {end.kind} in step {end.step}: {end.text}" for rank, end in enumerate(outcome.endings)]
    return "\n".join(lines) + "\n" + as_script(program)


def run_correct(runner: Runner, seeds: Sequence[int], pauses: int, table: Counter[str]) -> list[str]:
    """Run correct programs, many between two meetings; ``pauses`` of them have a straggler."""
    problems = []
    every = len(seeds) // pauses if pauses else 0
    numbered = list(enumerate(seeds))
    for at in range(0, len(seeds), BATCH):
        mine = Ending("done")
        batch = [
            correct(seed, runner.size, (0.3, 1.3)[number // every % 2] if every and number % every == 0 else 0.0)
            for number, seed in numbered[at : at + BATCH]
        ]
        ran = 0
        for program in batch:
            ran += 1
            mine = runner.run(program, check=True)
            if mine.bad:
                break
        outcome = runner.meet(mine, alone=mine.kind != "done")
        counts = runner.books.allgather(ran)
        bad = [rank for rank, end in enumerate(outcome.endings) if end.bad]
        table["harmless"] += min(counts) - outcome.bad
        table["false"] += outcome.bad
        if bad:
            # The first program that failed by itself; ranks further on failed because of it.
            rank = min(bad, key=lambda rank: (outcome.endings[rank].kind in FOLLOWERS, counts[rank]))
            problems.append(shown(batch[counts[rank] - 1], "false: it is correct", outcome))
        elif outcome.bad:
            names = f"{batch[0].name} or one of the {len(batch) - 1} after it"
            problems.append(f"--- {names}: false: counted as left {outcome.lost}")
        if outcome.told or outcome.bad:
            runner.make_anew()
    return problems


def run_mutated(
    runner: Runner, kinds: Sequence[str], number: int, seed: int, table: dict[str, Counter[str]], errors: Counter[str]
) -> tuple[list[str], float]:
    """Run ``number`` mutated programs; return what was wrong, and the seconds that the slowest took to end on this rank.

    ``errors`` counts what the ranks ended with, and the messages that were left.
    """
    problems = []
    slowest = 0.0
    found = 0
    while found < number:
        seed += 1
        kind = kinds[seed % len(kinds)]
        program = mutate(correct(seed, runner.size), kind, seed)
        possible = verdicts(program, Checks()) if program is not None else None
        if program is None or possible is None:
            continue
        found += 1
        simple = all(verdict.in_step for verdict in possible)
        began = time.monotonic()
        mine = runner.run(program, check=False)
        slowest = max(slowest, time.monotonic() - began)
        outcome = runner.meet(mine, alone=not simple)
        column, reason = judge(possible, outcome)
        table[kind][column] += 1
        errors.update("never waited" if end.unwaited else end.kind for end in outcome.endings)
        errors["message never received"] += len(outcome.lost)
        if reason:
            problems.append(shown(program, reason, outcome))
        broken = any(DIFFERED in end.text or "The group is broken now" in end.text for end in outcome.endings)
        if outcome.told or not simple or reason or broken:
            runner.make_anew()
    return problems, slowest


def in_columns(table: Mapping[str, Mapping[str, int]]) -> str:
    """Return the table for people, with its sums."""
    rows = [(kind, [row[column] for column in TABLE]) for kind, row in table.items()]
    rows.append(("all", [sum(numbers) for numbers in zip(*(numbers for _, numbers in rows), strict=True)]))
    lines = [" " * 10 + "".join(f"{column:>10}" for column in TABLE)]
    return "\n".join(lines + [f"{kind:10}" + "".join(f"{number:10}" for number in numbers) for kind, numbers in rows])


def plant(fault: str) -> None:
    """Break the checker, so that a run must end with something missed or false."""
    if fault == "dtype":  # integers and floating point numbers of the same size are taken for the same
        known = execution.fingerprint
        for module in (execution, prepared):
            vars(module)["fingerprint"] = lambda op, key: known(
                op, tuple("float64" if part == "int64" else part for part in key)
            )
    elif fault == "busy":  # a rank that does not answer is taken for one that has ended

        def wrong(states: Any) -> set[int]:
            size = registry.state().board.size
            return blocked_set({rank: State(rank, gone=True) for rank in range(size)} | dict(states))

        vars(deadlock_search)["blocked_set"] = wrong
    elif fault == "blind":  # no deadlock is ever found
        vars(deadlock_search)["blocked_set"] = lambda states: set()
    elif fault == "uncounted":  # messages are not counted, but for those that are sent or received again

        def forget(self: object, peer: int, tag: int) -> None: ...

        vars(process_group)["ProcessGroup"].count_sent = forget
        vars(process_group)["ProcessGroup"].count_received = forget
    elif fault:
        raise ValueError(fault)


def main() -> None:
    """Run what the arguments say; rank 0 prints the table and what went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--correct", type=int, default=0, help="how many correct programs")
    parser.add_argument("--pauses", type=int, default=0, help="how many of them with a straggler")
    parser.add_argument("--mutated", type=int, default=0, help="how many mutated programs")
    parser.add_argument("--kinds", default=",".join(MUTATIONS), help="which mutations")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds that a call may take")
    parser.add_argument("--plant", default="", help="a fault in the checker: dtype, busy, blind or uncounted")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # calls of ranks outside a group, Works that were not waited for: meant so here
    began = time.monotonic()
    runner = Runner(options.limit)
    plant(options.plant)  # not before: a checker with a fault may refuse the groups
    table: dict[str, Counter[str]] = {"correct": Counter(), **{kind: Counter() for kind in options.kinds.split(",")}}
    errors: Counter[str] = Counter()
    seeds = range(options.seed, options.seed + options.correct)
    problems = run_correct(runner, seeds, options.pauses, table["correct"])
    middle = time.monotonic()
    more, slowest = run_mutated(runner, options.kinds.split(","), options.mutated, options.seed, table, errors)
    problems += more
    end = time.monotonic()
    dist.destroy_process_group()
    if runner.rank == 0:
        print(json.dumps({kind: {column: row[column] for column in TABLE} for kind, row in table.items()}))
        print(in_columns(table))
        print(f"correct {middle - began:.1f} s, mutated {end - middle:.1f} s, the slowest {slowest:.1f} s on rank 0")
        print(f"groups made {runner.made} times")
        print("ranks of mutated programs:", ", ".join(f"{kind} {count}" for kind, count in errors.most_common()))
        print("\n".join(problems), flush=True)


if __name__ == "__main__":
    main()
