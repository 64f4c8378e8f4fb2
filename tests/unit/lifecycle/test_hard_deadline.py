"""The end of a process that is stuck in C with the interpreter lock held."""

from __future__ import annotations

import faulthandler
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpicoll.lifecycle.hard_deadline import within
from mpicoll.runtime.signal_table import c_handler


def test_it_ends_what_holds_the_interpreter() -> None:
    """The process is ended in time, with the stack of its main thread; other threads and handlers could not run."""
    source = (
        "import ctypes\nfrom mpicoll.lifecycle.hard_deadline import within\n"
        "with within(0.3):\n    ctypes.PyDLL(None).sleep(20)\n"
    )
    start = time.monotonic()
    command = [sys.executable, "-c", source]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=15, check=False, cwd=Path(__file__).parents[3]
    )
    assert done.returncode < 0, done
    assert -done.returncode >= signal.SIGRTMIN, done
    assert time.monotonic() - start > 0.3
    assert 'File "<string>", line 4 in <module>' in done.stderr, done


def test_it_ends_what_outlives_the_interpreter() -> None:
    """A process that hangs in C after all of Python's exit handlers is ended in time; the handlers have longer."""
    source = """
import atexit, ctypes, time
from mpicoll.lifecycle.hard_deadline import afterwards
ctypes.pythonapi.Py_AtExit(ctypes.cast(ctypes.CDLL(None).pause, ctypes.CFUNCTYPE(None)))
atexit.register(lambda: (time.sleep(0.3), print("handled", flush=True)))
afterwards(0.1)
afterwards(60)
"""
    done = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        timeout=15,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert -done.returncode >= signal.SIGRTMIN, done
    assert (done.stdout, done.stderr) == ("handled\n", ""), done


def test_it_leaves_nothing_behind() -> None:
    """After a block in time, or one that raises, nothing comes; and no signal is handled that was not."""
    before = [c_handler(number) for number in range(signal.SIGRTMIN, signal.SIGRTMAX + 1)]
    with within(0.05):
        assert [c_handler(number) for number in range(signal.SIGRTMIN, signal.SIGRTMAX + 1)] != before
    with pytest.raises(ValueError), within(0.05):
        raise ValueError
    time.sleep(0.1)
    assert [c_handler(number) for number in range(signal.SIGRTMIN, signal.SIGRTMAX + 1)] == before


def test_it_leaves_the_timer_of_faulthandler_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program's dump_traceback_later is neither replaced nor cancelled; also with limits that nobody waits for."""
    called: list[str] = []
    for name in ("dump_traceback_later", "cancel_dump_traceback_later"):
        monkeypatch.setattr(faulthandler, name, lambda *_, name=name, **__: called.append(name))
    for seconds in (1.0, 1800.0, 86_400e9):
        with within(seconds):
            pass
    assert not called
