"""What the code and the variables of a thread lead to: calls of the library, or none."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import queue
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpicoll as dist
from mpicoll import send as give
from mpicoll.diagnosis import reach
from mpicoll.diagnosis.held import stack
from mpicoll.diagnosis.reach import may_call

LOG = logging.getLogger(__name__)
x = np.ones(4)


class Heart:
    """Objects of a program, with methods that communicate and methods that do not."""

    __slots__ = ("log", "name", "pauses", "task", "tasks_by_name")

    def __init__(self) -> None:
        self.log, self.pauses, self.name = LOG, [1.0, 2.0], "heart"
        self.tasks_by_name = {"add_up": self.add_up}
        self.task: Callable[[], object] = time.time

    @property
    def summed_up(self) -> object:
        return dist.all_reduce(x)

    @staticmethod
    def gather_up() -> None:
        dist.barrier()

    def add_up(self) -> None:
        dist.all_reduce(x)

    def beat(self) -> None:
        for pause in self.pauses:
            time.sleep(pause)
            self.log.info("%s of rank %s beats", self.name, dist.get_rank())

    def beat_then_add_up(self) -> None:
        self.beat()
        self.add_up()

    def beat_then_ask(self) -> None:
        self.beat()
        print(self.summed_up)

    def beat_then_meet(self) -> None:
        self.beat()
        self.gather_up()

    def beat_then_work(self) -> None:
        self.beat()
        for work in self.tasks_by_name.values():
            work()


class Sized:
    """An object whose operators communicate."""

    def __len__(self) -> int:
        dist.barrier()
        return 1

    def __enter__(self) -> None:
        dist.barrier()

    def __exit__(self, *_: object) -> None: ...


class Plain:
    """An object with a dictionary."""

    def __init__(self, task: object, other: object) -> None:
        self.task, self.other = task, other

    def run(self) -> None:
        time.sleep(1)
        self.task()  # type: ignore[operator]


class Making:
    """A class whose instances communicate when they are made."""

    def __init__(self) -> None:
        dist.barrier()


def _imports() -> None:
    from mpicoll import barrier

    barrier()


def _imports_unknown() -> None:
    import a_module_that_is_not_loaded  # type: ignore[import-not-found]

    a_module_that_is_not_loaded.run()


def _by_name(name: str = "barrier") -> None:
    getattr(dist, name)()


def _serve(tasks: queue.Queue[Any]) -> None:
    while True:
        try:
            tasks.get(timeout=1)()
        except queue.Empty:
            pass


def _generate() -> Iterator[int]:
    yield 1
    dist.barrier()


def _take(values: Iterator[int]) -> None:
    for value in values:
        print(value)


def _enter(context: Any) -> None:
    with context:
        pass


def _run_in_thread() -> None:
    thread = threading.Thread(target=_generate)
    thread.start()
    thread.join()


def _report() -> None:
    try:
        np.sort(x)
        print(np.mean(x), dist.get_rank(), dist.get_world_size(), dist.is_initialized(), flush=True)
    except dist.DistError as error:
        sys.stderr.write(f"{error}\n")
        LOG.exception("no rank")
    with socket.socket() as connection:
        connection.connect(("localhost", 1))


def _full(task: object) -> queue.Queue[Any]:
    tasks: queue.Queue[Any] = queue.Queue()
    tasks.put(task)
    return tasks


def _started(values: Iterator[int]) -> Iterator[int]:
    next(values)
    return values


HEART = Heart()

CALLS: dict[str, object] = {
    "a function": lambda: dist.barrier(),
    "a function under its own name": lambda: give(x, 1),
    "a function of the library": dist.send,
    "a method": HEART.beat_then_add_up,
    "a property": HEART.beat_then_ask,
    "a static method": HEART.beat_then_meet,
    "methods in a dictionary": HEART.beat_then_work,
    "an attribute": Plain(dist.barrier, None).run,
    "an operator": functools.partial(print, Sized()),
    "a with statement": functools.partial(_enter, Sized()),
    "a class": lambda: Making(),
    "arguments": functools.partial(_enter, functools.partial(dist.send, x, 1)),
    "a function in a queue": functools.partial(_serve, _full(HEART.add_up)),
    "a generator": functools.partial(_take, _started(_generate())),
    "the target of a thread": _run_in_thread,
    "a late import": _imports,
    "a late import of an unknown module": _imports_unknown,
    "a name": _by_name,
    "a timer": threading.Timer(1, dist.barrier).run,
    "code in text": lambda: exec(""),
    "a weak reference": [weakref.ref(_imports)],
    "a group": functools.partial(print, dist.Work),
}

NO_CALLS: dict[str, object] = {
    "a sleep": lambda: time.sleep(1),
    "an event": lambda: threading.Event().wait(10),
    "questions, output and errors": _report,
    "a method": HEART.beat,
    "an attribute that no code uses": Plain(time.time, dist.barrier).run,
    "a queue": functools.partial(_serve, _full(time.time)),
    "a timer": threading.Timer(1, print).run,
    "a method of an object that also communicates": Plain(HEART.beat, Plain(dist.barrier, None).run).run,
}


class Trainer:
    """Has methods with the names of a variable of the module, and of a function that its own code calls."""

    def LOG(self) -> None:
        dist.all_reduce(x)

    def len(self) -> None:
        dist.all_reduce(x)

    def beat(self) -> None:
        LOG.info("%d", len(self.__dict__))

    def beat_and_call(self) -> None:
        self.len()


NO_CALLS["a variable with the name of a method"] = Trainer().beat
CALLS["the same name as an attribute"] = Trainer().beat_and_call


def _stop() -> None:
    os.kill(os.getpid(), 2)


def _without_package() -> Callable[[], object]:
    variables: dict[str, Any] = {"__name__": "__main__"}
    exec("def run():\n    from . import neighbour", variables)
    found: Callable[[], object] = variables["run"]
    return found


CALLS |= {"a signal to itself": _stop, "an import that fails": _without_package()}


@pytest.mark.parametrize("name", CALLS)
def test_what_may_call(name: str) -> None:
    """A call of the library is found wherever the code finds it."""
    assert may_call([CALLS[name]])


@pytest.mark.parametrize("name", NO_CALLS)
def test_what_makes_no_call(name: str) -> None:
    """Questions to the library, and calls that the code does not use, are no calls."""
    assert not may_call([NO_CALLS[name]])


@pytest.mark.parametrize(("task", "calls"), [(HEART.add_up, True), (HEART.beat, False)])
def test_the_frames_of_a_thread(task: Callable[[], object], calls: bool) -> None:
    """Variables of functions that are running count, too."""
    box: queue.Queue[bool] = queue.Queue()

    def run(function: Callable[[], object]) -> None:
        if box.get():
            function()

    thread = threading.Thread(target=run, args=(task,))
    thread.start()
    try:
        assert may_call(stack(sys._current_frames()[thread.ident or 0])) is calls
    finally:
        box.put(False)
        thread.join()


def test_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that does not use the library leads to it only by the objects that the program has left in its modules."""
    sources = {
        "some_scheduler": "tasks = []\ndef run():\n    for task in tasks: task()\n",
        "some_loader": "def load():\n    import some_package_that_is_not_there\n",
        "some_users": "import mpicoll\ndef use(): mpicoll.barrier()\n",
        "some_wrapper": "import some_users\ndef wrap(): some_users.use()\n",
    }
    place = tmp_path / "site-packages"
    place.mkdir()
    monkeypatch.syspath_prepend(place)
    loaded = {}
    for name, source in sources.items():
        (place / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
        loaded[name] = importlib.import_module(name)
    scheduler = loaded["some_scheduler"]
    assert not may_call([lambda: scheduler.run()])
    scheduler.tasks.append(HEART.add_up)
    assert may_call([lambda: scheduler.run()])
    assert not may_call([loaded["some_loader"].load])
    assert may_call([loaded["some_users"].use])
    assert may_call([loaded["some_wrapper"].wrap])
    for name in sources:
        monkeypatch.delitem(sys.modules, name)


def test_what_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thread that reaches very many objects it is unknown what it calls."""
    many = [[number] for number in range(100)]
    assert not may_call([many])
    monkeypatch.setattr(reach, "MOST", 50)
    assert may_call([many])
