"""The line of the program that calls the library, with and without the code of another package between."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from mpicoll.runtime import call_site


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return pass_through; its effect ends with the test."""
    for name in ("_no_places", "_frame"):
        monkeypatch.setattr(call_site, name, getattr(call_site, name))
    monkeypatch.setattr(call_site, "_passed", {})
    monkeypatch.setattr(call_site, "_followers", [])
    return call_site.pass_through


def between(path: Path, call: str = "function()") -> Callable[[Callable[[], Any]], Any]:
    """Return a function of another package, in a file of its own, that calls its argument."""
    found: dict[str, Any] = {}
    exec(compile(f"def run(function):\n    return {call}\n", str(path), "exec"), found)
    run: Callable[[Callable[[], Any]], Any] = found["run"]
    return run


def own(function: Callable[[], Any]) -> Any:
    """Call a function from code of this package."""
    return between(Path(call_site.PACKAGE) / "own.py")(function)


def test_the_innermost_line_outside_the_package(tmp_path: Path) -> None:
    other = between(tmp_path / "other.py")
    assert str(own(call_site.call_site)).startswith(f"{__file__}:")
    assert str(own(lambda: other(call_site.call_site))).startswith(str(tmp_path / "other.py"))


def test_code_that_is_passed_through(tmp_path: Path, passing: Callable[..., None]) -> None:
    other = between(tmp_path / "other" / "file.py")
    assert str(other(call_site.call_site)).startswith(str(tmp_path))
    passing(str(tmp_path / "other") + "/")
    assert str(other(call_site.call_site)).startswith(__file__)
    frame: FrameType = other(lambda: other(call_site.program_frame))
    assert frame.f_code.co_filename == __file__
    assert call_site.passes_through()


def test_followers_learn_how_frames_are_found(tmp_path: Path, passing: Callable[..., None]) -> None:
    seen: list[Any] = []
    call_site.follow(seen.append)
    assert seen == [sys._getframe]
    passing(str(tmp_path))
    assert seen == [sys._getframe, call_site.program_frame]


def test_a_thread_without_a_line_of_the_program(tmp_path: Path, passing: Callable[..., None]) -> None:
    """The place is that of the main thread, which waits for the thread."""
    passing(threading.__file__, str(tmp_path))
    found: list[str] = []
    target = between(tmp_path / "thread.py", "function(str(__import__('mpicoll').runtime.call_site.call_site()))")
    thread = threading.Thread(target=target, args=(found.append,))
    thread.start()
    thread.join()
    assert found[0].startswith(__file__)


LOOKS_AT_A_THREAD = """
import gc, threading, time
from mpicoll.runtime.call_site import thread_site

class Garbage:
    def __init__(self):
        self.itself = self
    def __del__(self):
        may_return.set()
        others_run.wait(1.0)

def look():
    while not waits:
        time.sleep(0.001)
    time.sleep(0.01)
    gc.collect()
    Garbage()
    gc.set_threshold(allocations)
    places.add(thread_site(main).partition(" in ")[2])
    gc.set_threshold(1000)
    gc.collect()

passed = "def one(): two()\\ndef two(): waits.append(1), may_return.wait()\\ndef deep(n): return deep(n - 1) if n else None"
exec(compile(passed, "<passed>", "exec"))
main, places = threading.get_ident(), set()
for allocations in range(1, 40):
    waits, may_return, others_run = [], threading.Event(), threading.Event()
    thread = threading.Thread(target=look)
    thread.start()
    one()
    deep(500)
    others_run.set()
    thread.join()
print(*places)
"""


def test_the_stack_of_a_thread_that_runs(tmp_path: Path) -> None:
    """A finalizer that lets the thread run does no harm while its frames are read: CPython 3.11 would crash or loop."""
    script = tmp_path / "looks.py"
    script.write_text(LOOKS_AT_A_THREAD)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=50)
    assert (done.stdout, done.stderr) == ("<module>()\n", "")


def test_no_collection_while_stacks_are_read() -> None:
    """Garbage is collected again when the last of several blocks has ended, if it was before."""
    unsafe = sys.version_info[:2] == (3, 11)
    assert gc.isenabled()
    with call_site.stacks() as frames, call_site.stacks():
        assert threading.get_ident() not in frames
        assert gc.isenabled() is not unsafe
    assert gc.isenabled()
    gc.disable()
    try:
        with call_site.stacks():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_place_of_this_thread() -> None:
    """A thread that asks for its own place gets the innermost line that is not of the library."""
    assert call_site.thread_site(threading.get_ident()).endswith("in test_the_place_of_this_thread()")


def test_the_program_that_called_an_installed_package(tmp_path: Path) -> None:
    """The line of the program is found while the call of the package is on the stack, and not for a call of the program."""
    package = between(tmp_path / "site-packages" / "trainer.py")
    sites: list[call_site.CallSite] = []

    def call() -> list[str]:
        frame = sys._getframe(1)
        sites.append(call_site.CallSite(frame.f_code, frame.f_lasti))
        return call_site.callers_of(sites[-1])

    line = sys._getframe().f_lineno + 1
    assert package(call) == [f"{__file__}:{line}"]
    assert call_site.callers_of(sites[-1]) == []  # it is over
    assert call() == []  # the call stands in the program, in a function that only packages have called


def test_the_functions_that_led_to_a_call_of_the_program() -> None:
    """The callers of a wrapper are found, the nearest first, each function once."""

    def look() -> list[str]:
        frame = sys._getframe(1)
        return call_site.callers_of(call_site.CallSite(frame.f_code, frame.f_lasti))

    def wrapper() -> list[str]:
        return look()

    def again(times: int) -> list[str]:
        return again(times - 1) if times else wrapper()

    here, line = sys._getframe().f_lineno, again.__code__.co_firstlineno + 1
    assert again(3) == [f"{__file__}:{line}", f"{__file__}:{here + 1}"]


def test_the_program_of_another_thread(tmp_path: Path) -> None:
    """The call of a thread that waits is found, and a thread with no line of the program has none."""
    package = between(tmp_path / "dist-packages" / "trainer.py")
    found: list[call_site.CallSite] = []
    here, go_on = threading.Event(), threading.Event()

    def note() -> None:
        frame = sys._getframe(1)
        found.append(call_site.CallSite(frame.f_code, frame.f_lasti))
        here.set()
        go_on.wait(10)

    def program() -> None:
        package(note)  # the line of the program

    thread = threading.Thread(target=program)
    thread.start()
    assert here.wait(10)
    line = program.__code__.co_firstlineno + 1
    assert call_site.callers_of(found[0]) == [f"{__file__}:{line}"]
    go_on.set()
    thread.join()
    assert call_site.callers_of(found[0]) == []


def test_a_call_that_no_line_of_the_program_makes() -> None:
    """The thread is named: an executor calls a function that the program has passed."""

    def look() -> list[str]:
        frame = sys._getframe(1)
        return call_site.callers_of(call_site.CallSite(frame.f_code, frame.f_lasti))

    with ThreadPoolExecutor(1, "loader") as pool:
        assert pool.submit(look).result() == ["thread loader_0"]
