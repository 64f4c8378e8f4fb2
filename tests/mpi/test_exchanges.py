"""Exchanges of parts of any size: on one node the parts come with the round, and their lengths are compared there."""

from __future__ import annotations

import ctypes
import random
import signal
import time
from typing import Any

import numpy as np
import pytest
from ranks import run_threads

import mpicoll as dist
from mpicoll.groups import registry
from mpicoll.operations import execution
from mpicoll.operations.prepare import scattering as prepare
from mpicoll.operations.prepare.scattering import PreparedExchange
from mpicoll.operations.prepared import PreparedOperation
from mpicoll.pytest_plugin import collective_raises
from mpicoll.transports.base import EXCHANGE_BYTES, Kind

pytestmark = pytest.mark.mpi(min_size=2)


def part(source: int, to: int, rows: int, dtype: Any = float) -> Any:
    """Return what one rank sends to another."""
    return (np.arange(rows * 3).reshape(rows, 3) + 100 * source + 10 * to).astype(dtype)


class Exchange:
    """The arrays of a call, in which rank i sends ``table[i][j]`` rows to rank j."""

    def __init__(self, table: list[list[int]], group: Any = None, dtype: Any = float) -> None:
        me = dist.get_rank(group)
        self.sent, self.received = table[me], [row[me] for row in table]
        self.inputs = [part(me, to, rows, dtype) for to, rows in enumerate(self.sent)]
        self.wanted = [part(source, me, rows, dtype) for source, rows in enumerate(self.received)]
        self.group = group

    def single(self, **more: Any) -> None:
        """Make the call on two arrays, and compare."""
        output = np.zeros_like(np.concatenate(self.wanted))
        work = dist.all_to_all_single(output, np.concatenate(self.inputs), self.received, self.sent, self.group, **more)
        if work is not None:
            work.wait()
        np.testing.assert_array_equal(output, np.concatenate(self.wanted))

    def lists(self, **more: Any) -> None:
        """Make the call on two lists of arrays, and compare."""
        outputs = [np.zeros_like(each) for each in self.wanted]
        work = dist.all_to_all(outputs, self.inputs, self.group, **more)
        if work is not None:
            work.wait()
        for output, wanted in zip(outputs, self.wanted, strict=True):
            np.testing.assert_array_equal(output, wanted)


def table_of(size: int, of: random.Random, most: int) -> list[list[int]]:
    return [[of.choice([0, 1, of.randrange(most)]) for _ in range(size)] for _ in range(size)]


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("most", [3, 200, 5_000])
def test_sizes_that_change_from_call_to_call(most: int, async_op: bool) -> None:
    """Each part arrives, with no and with many rows, in both forms; asynchronous on some ranks only."""
    size, of, alone = dist.get_world_size(), random.Random(most), random.Random(dist.get_rank())
    for turn in range(60):
        made = Exchange(table_of(size, of, most))
        asynchronous = async_op and alone.random() < 0.6
        (made.single if turn % 2 else made.lists)(async_op=asynchronous)


@pytest.mark.parametrize("level", ["full", "roll", "off"])
def test_at_every_level_with_names_and_limits(level: str) -> None:
    """Results are right at every level, with and without a name and a limit."""
    group = dist.new_group()
    group.level = level
    size, of = group.size(), random.Random(3)
    for turn in range(30):
        Exchange(table_of(size, of, 50), group).single(name=f"step {turn}" if turn % 3 else None)
    group.level = "full"
    dist.destroy_process_group(group)


def test_later_calls_move_with_their_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first calls no exchange goes the general way, in which the sizes are exchanged by themselves."""
    group = dist.new_group()
    size = group.size()
    made = Exchange([[2 + i + j for j in range(size)] for i in range(size)], group)
    for _ in range(3):
        made.single()
        made.lists()
        made.lists()
    prepared = [each for each in group.prepared.values() if type(each) is PreparedExchange]
    assert len(prepared) == 2
    checked: list[Any] = []
    find, check = execution._check_splits, checked.append

    def counting(*given: Any) -> Any:
        check(given)
        return find(*given)

    monkeypatch.setattr(execution, "_check_splits", counting)
    for _ in range(20):
        made.single()
        dist.barrier(group)  # if a member is late to read, all make the next call in the general way
        made.lists()
        dist.barrier(group)
    if group.pair.agreement.channel.carries_data:
        assert len(checked) < 20  # of 40: calls to which a rank comes late go the general way
    dist.destroy_process_group(group)


def test_sizes_that_do_not_fit() -> None:
    """A pair that differs is reported on all ranks, after equal calls as well, and nothing was moved."""
    me, size = dist.get_rank(), dist.get_world_size()
    for call in ("single", "lists"):
        for _ in range(3):
            getattr(Exchange([[2 + j for j in range(size)] for _ in range(size)]), call)()
        sent = [2 + j + (me == 0 and j == 1) for j in range(size)]
        inputs, output = np.ones((sum(sent), 3)), np.full((size * (2 + me), 3), -1.0)
        outputs = np.split(output, size)
        with collective_raises(dist.CollectiveMismatchError, match=r"rank 0 .*sends|sends .* rank|expects") as caught:
            if call == "single":
                dist.all_to_all_single(output, inputs, [2 + me] * size, sent)
            else:
                dist.all_to_all(outputs, np.split(inputs, np.cumsum(sent)[:-1]))
        assert me > 1 or "9 elements" in str(caught.value) or "12 elements" in str(caught.value)
        assert (output == -1).all()
        getattr(Exchange([[2 + j for j in range(size)] for _ in range(size)]), call)()


def test_a_wrong_dtype_or_another_call() -> None:
    """After equal calls another dtype or function on one rank is reported on all."""
    me, size = dist.get_rank(), dist.get_world_size()
    table = [[1 + j for j in range(size)] for _ in range(size)]
    for dtype in (float, np.float32):
        for _ in range(3):
            Exchange(table, dtype=dtype).single()
    with collective_raises(dist.CollectiveMismatchError, match="float32"):
        Exchange(table, dtype=np.float32 if me == 1 else float).single()
    with collective_raises(dist.CollectiveMismatchError, match="barrier"):
        dist.barrier() if me == 1 else Exchange(table).single()
    Exchange(table).single()


def test_what_a_report_says_of_equal_parts() -> None:
    """Parts that are equal this time are told like those of a first call: only the dtype differs."""
    me, size = dist.get_rank(), dist.get_world_size()
    for _ in range(3):
        Exchange([[1 + i + j for j in range(size)] for i in range(size)]).single()
    dtype = np.float32 if me == 1 else np.float64
    with collective_raises(dist.CollectiveMismatchError, match="float32") as caught:
        dist.all_to_all_single(np.zeros(2 * size, dtype), np.zeros(2 * size, dtype), [2] * size, [2] * size)
    assert "elements" not in str(caught.value).split("next:")[1]


def test_lists_that_are_no_lists() -> None:
    """After calls of unequal lists wrong lists on one rank raise there, and the other ranks are told."""
    me, size = dist.get_rank(), dist.get_world_size()
    for _ in range(3):
        Exchange([[1 + i + j for j in range(size)] for i in range(size)]).lists()
    for wrong in (None, 3, np.zeros(3), (each for each in ())):
        arrays: Any = [np.zeros(2) for _ in range(size)]
        with collective_raises(TypeError if size == 1 else (TypeError, dist.CollectiveMismatchError)) as caught:
            dist.all_to_all(wrong if me == 0 else arrays, [np.zeros(2) for _ in range(size)])  # type: ignore[arg-type]
        assert isinstance(caught.value, TypeError) == (me == 0)


def test_equal_parts_with_sizes_are_a_call_without() -> None:
    """A call whose sizes have always been equal is the prepared call of equal parts."""
    group = dist.new_group()
    size, me = group.size(), group.rank()
    prepare.unequal.discard("all_to_all_single")
    for _ in range(5):
        output = np.zeros(40 * size)
        dist.all_to_all_single(output, np.full(40 * size, float(me)), [40] * size, [40] * size, group)
        assert (output == np.repeat(np.arange(float(size)), 40)).all()
    if group.pair.agreement.channel.carries_data:
        assert [type(each) for each in group.prepared.values()] == [PreparedOperation]
    dist.destroy_process_group(group)


def test_wrong_sizes() -> None:
    """Sizes that are no integers, negative, too few, or do not add up, raise on the rank, and all others are told."""
    me, size = dist.get_rank(), dist.get_world_size()
    right = [2] * size
    for _ in range(3):
        dist.all_to_all_single(np.zeros(2 * size), np.zeros(2 * size), right, right)
    for wrong in ([1.0] * size, [2] * (size + 1), [-1, 5, *[2] * (size - 2)], [3] * size, "22", [True] * size):
        with collective_raises((TypeError, RuntimeError)) as caught:
            sizes: Any = wrong if me == 0 else right
            dist.all_to_all_single(np.zeros(2 * size), np.zeros(2 * size), right, sizes)
        assert isinstance(caught.value, dist.CollectiveMismatchError) == (me != 0)
    output = np.zeros(2 * size)
    dist.all_to_all_single(output, np.full(2 * size, float(me)), tuple(right), np.array(right))  # type: ignore[arg-type]
    assert (output == np.repeat(np.arange(float(size)), 2)).all()


def test_one_array_in_and_out_and_arrays_that_are_not_contiguous() -> None:
    """The input may be the output; strided, reversed and read-only arrays move, too."""
    me, size = dist.get_rank(), dist.get_world_size()
    sizes = [3] * size
    wanted = np.repeat(np.arange(float(size)), 3)
    for turn in range(4):
        array = np.full(3 * size, float(me))
        dist.all_to_all_single(array, array, sizes, sizes)
        assert (array == wanted).all()
        wide, reverse = np.zeros((3 * size, 2)), np.full(3 * size, float(me))[::-1]
        dist.all_to_all_single(
            wide[:, turn % 2] if me == 0 else array, reverse if me == 1 else reverse.copy(), sizes, sizes
        )
        assert ((wide[:, turn % 2] if me == 0 else array) == wanted).all()
        fixed = np.full(3 * size, float(me))
        fixed.flags.writeable = False
        dist.all_to_all_single(array, fixed, sizes, sizes)
        assert (array == wanted).all()


def test_parts_that_have_no_room_on_one_rank() -> None:
    """If the parts of one rank are too long, all ranks move them in another way, and the next small ones again with the round."""
    size = dist.get_world_size()
    rows = EXCHANGE_BYTES // 24
    for turn in range(6):
        table = [[1 + i + j for j in range(size)] for i in range(size)]
        if turn % 2:
            table[turn % size][0] = rows
        Exchange(table).single()
        Exchange(table).lists()


def test_late_members_and_calls_under_way() -> None:
    """Whoever is late, and whatever else is under way, the parts arrive."""
    me, size, of = dist.get_rank(), dist.get_world_size(), random.Random(1)
    for turn in range(12):
        if me == turn % size:
            time.sleep(0.01)
        x = np.full(10, float(me))
        work = dist.all_reduce(x, async_op=True) if turn % 2 else None
        Exchange(table_of(size, of, 30)).single()
        if work is not None:
            work.wait()
            assert (x == size * (size - 1) / 2).all()


def test_several_under_way() -> None:
    """Several asynchronous exchanges are waited for in another order."""
    me, size, of = dist.get_rank(), dist.get_world_size(), random.Random(7)
    for _ in range(10):
        works = []
        for _ in range(5):
            made = Exchange(table_of(size, of, 100))
            output = np.zeros_like(np.concatenate(made.wanted))
            source = np.concatenate(made.inputs)
            work: Any = dist.all_to_all_single(output, source, made.received, made.sent, async_op=True)
            works.append((work, output, source, np.concatenate(made.wanted)))
        random.Random(me).shuffle(works)
        for work, output, _, wanted in works:
            work.wait()
            np.testing.assert_array_equal(output, wanted)


@pytest.mark.parametrize("rows", [2, 2_000, 40_000])
def test_a_result_that_the_program_writes(rows: int) -> None:
    """An input, or an output of up to 64 KiB, that is written before the wait is reported on that rank."""
    me, size = dist.get_rank(), dist.get_world_size()
    Exchange([[1 + i + j for j in range(size)] for i in range(size)]).single()  # now exchanges are prepared
    sizes = [rows] * size
    for which in ("output", "input") if rows * size * 8 <= 1 << 16 else ("input",):
        for _ in range(4):
            output, source = np.zeros(rows * size), np.full(rows * size, float(me))
            work: Any = dist.all_to_all_single(output, source, sizes, sizes, async_op=True)
            if me == 0:
                (output if which == "output" else source)[0] = 7.0
                with pytest.raises(dist.BufferInUseError):
                    work.wait()
            else:
                work.wait()
            dist.barrier()


def test_threads_with_groups_of_their_own() -> None:
    """Threads exchange on groups of their own at a time."""
    if not registry.state().thread_multiple:
        pytest.skip("this MPI has no MPI_THREAD_MULTIPLE")
    groups, done = [dist.new_group() for _ in range(3)], []

    def work(thread: int) -> None:
        of = random.Random(thread)
        for _ in range(40):
            Exchange(table_of(dist.get_world_size(), of, 40), groups[thread]).single()
        done.append(thread)

    run_threads(work, range(3))
    assert sorted(done) == [0, 1, 2]
    for group in groups:
        dist.destroy_process_group(group)


@pytest.mark.parametrize("rows", [3, 2_000, 40_000])
def test_asynchronous_lengths_that_differ(rows: int) -> None:
    """A wait of an asynchronous exchange raises on all ranks if one pair differs in its length; the next exchange is right."""
    me, size = dist.get_rank(), dist.get_world_size()
    for turn in range(6):
        Exchange([[1 + i + j for j in range(size)] for i in range(size)]).single(async_op=turn > 2)
    for turn in range(3):
        sent, received = [rows] * size, [rows] * size
        if me == turn % size:
            sent[size - 1 - turn % size] += 1
        output, source = np.zeros(sum(received)), np.zeros(sum(sent))
        work: Any = dist.all_to_all_single(output, source, received, sent, async_op=True)
        with pytest.raises(dist.CollectiveMismatchError, match=f"sends {rows + 1} elements"):
            work.wait()
        Exchange([[rows] * size for _ in range(size)]).single(async_op=True)


def test_split_sizes_of_another_number_of_ranks() -> None:
    """Too few split sizes are an error after calls without sizes were prepared, too."""
    size = dist.get_world_size()
    output, source = np.zeros(4 * size), np.zeros(4 * size)
    for _ in range(3):
        dist.all_to_all_single(output, source)
    for sizes in ([4 * size], [4 * size, *[0] * size]):
        with pytest.raises(RuntimeError, match="Number of tensor splits"):
            dist.all_to_all_single(output, source, input_split_sizes=sizes)


LONG = EXCHANGE_BYTES // 24 + 1
"""Rows of a part that has no room beside the lengths."""


def with_long_parts(size: int, of: random.Random) -> list[list[int]]:
    """Return how many rows each rank sends to each: none, some, or more than come with the round."""
    return [[of.choice([0, 1, 70, of.randrange(2 * LONG), LONG]) for _ in range(size)] for _ in range(size)]


@pytest.mark.parametrize("which", ["waits", "asynchronous", "both"])
def test_long_parts(which: str) -> None:
    """Long, short and empty parts of the same call arrive, in both forms, and in order with other calls under way."""
    size, of, alone = dist.get_world_size(), random.Random(5), random.Random(dist.get_rank())
    for turn in range(40):
        made = Exchange(with_long_parts(size, of))
        asynchronous = which == "asynchronous" or (which == "both" and alone.random() < 0.5)
        x = np.ones(3)
        work: Any = dist.all_reduce(x, async_op=True) if turn % 5 == 4 else None
        (made.single if turn % 2 else made.lists)(async_op=asynchronous)
        if work is not None:
            work.wait()
            assert (x == size).all()


def test_long_parts_are_not_compared_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first calls the lengths of long parts come with the round, and the parts are copied once."""
    group: Any = dist.new_group()
    size, of = group.size(), random.Random(9)
    for _ in range(3):
        Exchange([[1 + i + j for j in range(size)] for i in range(size)], group).lists()
    dist.barrier(group)  # if a member is late to read, all make the next call in the general way
    checked: list[Any] = []
    find = execution._check_splits

    def counting(*given: Any) -> Any:
        checked.append(given)
        return find(*given)

    monkeypatch.setattr(execution, "_check_splits", counting)
    for turn in range(10):
        rows = [of.choice([0, 70, LONG, 2 * LONG]) for _ in range(size)]
        table = [[rows[i] + i + 2 * j for j in range(size)] for i in range(size)]  # on no rank all parts are equal
        Exchange(table, group).lists(async_op=turn % 2 == 1)
        dist.barrier(group)
    node = group.pair.node
    if node is not None and node.ready and node._copies_once(Kind.ALL_TO_ALL, 1 << 40):
        assert not checked
    dist.destroy_process_group(group)


@pytest.mark.parametrize("async_op", [False, True])
def test_long_parts_in_one_array(async_op: bool) -> None:
    """The input may be the output, or overlap it; on some ranks only, too."""
    me, size = dist.get_rank(), dist.get_world_size()
    rows, wanted = 3 * LONG, np.repeat(np.arange(float(size)), 3 * LONG)
    for turn in range(6):
        memory = np.full(rows * size + 8, float(me))
        source = memory[:-8] if turn % 2 or me else np.full(rows * size, float(me))
        output = memory[8 * (turn % 3 == 1) :][: rows * size]
        work = dist.all_to_all_single(output, source, [rows] * size, [rows] * size, async_op=async_op)
        if work is not None:
            work.wait()
        assert (output == wanted).all(), turn


def test_lengths_of_long_parts_that_differ() -> None:
    """A pair of a long and of a longer part is reported on all ranks before data moves, and the next exchange is right."""
    me, size = dist.get_rank(), dist.get_world_size()
    table = [[LONG + i + j for j in range(size)] for i in range(size)]
    for async_op in (False, True):
        for _ in range(3):
            Exchange(table).lists(async_op=async_op)
        inputs = [np.ones(LONG) for _ in range(size)]
        outputs = [np.full(LONG + (me == peer == size - 1), -1.0) for peer in range(size)]
        with collective_raises(dist.CollectiveMismatchError, match=f"expects {LONG + 1} elements from rank {size - 1}"):
            work = dist.all_to_all(outputs, inputs, async_op=async_op)
            if work is not None:
                work.wait()
        assert all((each == -1).all() for each in outputs)
    Exchange(table).lists()


def test_long_parts_that_the_kernel_does_not_copy() -> None:
    """Memory that a process can read and the kernel cannot copy: all parts of that call move in pieces instead."""
    with open("/proc/self/maps", encoding="ascii") as maps:
        found = [line.split()[0].split("-") for line in maps if line.rstrip().endswith("[vvar]")]
    if not found:
        pytest.skip("this kernel shows no memory of its own in the process")
    special = np.ctypeslib.as_array((ctypes.c_ubyte * 4096).from_address(int(found[0][0], 16)))
    me, size = dist.get_rank(), dist.get_world_size()
    group: Any = dist.new_group()
    group.level = "off"  # the kernel writes that memory while the call is under way
    for async_op in (False, False, False, True):
        inputs = [np.full(EXCHANGE_BYTES + 5 + 10 * me + peer, 1 + me, np.uint8) for peer in range(size)]
        outputs = [np.zeros(EXCHANGE_BYTES + 5 + 10 * peer + me, np.uint8) for peer in range(size)]
        if me == 0:
            inputs[1] = special
        if me == 1:
            outputs[0] = np.full(4096, 77, np.uint8)
        work = dist.all_to_all(outputs, inputs, group, async_op)
        if work is not None:
            work.wait()
        for peer in range(size):
            wanted = special[-1000:] if me == 1 and peer == 0 else 1 + peer
            assert (outputs[peer][-1000:] == wanted).all()
    group.level = "full"
    dist.destroy_process_group(group)


@pytest.mark.parametrize("async_op", [False, True])
def test_long_parts_beside_a_rank_with_equal_ones(async_op: bool) -> None:
    """A rank whose parts are equal makes another prepared call: all ranks move in a way in which the longest part counts."""
    size = dist.get_world_size()
    for turn in range(6):
        equal = turn % size
        table = [[5 if equal in (i, j) else 3 * LONG + i + j for j in range(size)] for i in range(size)]
        Exchange(table).lists(async_op=async_op)
        Exchange(table).single(async_op=async_op)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("empty", ["output", "input"])
def test_an_empty_array_at_the_address_of_the_other(empty: str, async_op: bool) -> None:
    """A rank that receives nothing, or sends nothing, may pass an empty view of its other array."""
    me, size = dist.get_rank(), dist.get_world_size()
    for _ in range(3):
        sends = [[0 if (j if empty == "output" else i) == 0 else 70 + i for j in range(size)] for i in range(size)]
        memory = np.full(400 * size, float(me))
        sent, received = sends[me], [row[me] for row in sends]
        source, output = memory[: sum(sent)], memory[: sum(received)] if me == 0 else np.zeros(sum(received))
        work = dist.all_to_all_single(output, source, received, sent, async_op=async_op)
        if work is not None:
            work.wait()
        assert (output == np.repeat(np.arange(float(size)), received)).all()


def test_a_signal_handler_while_long_parts_wait() -> None:
    """A handler that raises while a rank waits breaks the group; all are told, and no memory is written later."""
    me, size = dist.get_rank(), dist.get_world_size()
    group: Any = dist.new_group()
    table = [[LONG + i + j for j in range(size)] for i in range(size)]
    for _ in range(3):
        Exchange(table, group).lists()

    def handler(*_: Any) -> None:
        raise KeyError("of the handler")

    before = signal.signal(signal.SIGALRM, handler)
    made = Exchange(table, group)
    outputs = [np.full_like(each, -1.0) for each in made.wanted]
    dist.barrier()
    try:
        if me == 0:
            with pytest.raises(KeyError):
                signal.setitimer(signal.ITIMER_REAL, 0.1)
                dist.all_to_all(outputs, made.inputs, group)
            signal.setitimer(signal.ITIMER_REAL, 0)
        else:
            time.sleep(0.4)
            with pytest.raises(dist.GroupBrokenError):
                dist.all_to_all(outputs, made.inputs, group)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert all((each == -1).all() for each in outputs)
    dist.barrier()
