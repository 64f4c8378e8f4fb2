"""Arithmetic without warnings."""

from __future__ import annotations

import threading

import numpy as np

from mpicoll.memory.arithmetic import _with_errstate, without_warnings


def test_nothing_is_said() -> None:
    """Overflows raise nothing, whatever the program has set, which stays as it is; in every thread."""
    largest = np.full(4, np.finfo(np.float64).max)

    def work() -> None:
        with np.errstate(all="raise"):
            out = np.empty(4)
            without_warnings(np.add, largest, largest, out=out)
            assert np.isinf(out).all()
            assert np.geterr() == dict.fromkeys(("divide", "over", "under", "invalid"), "raise")
            assert np.isnan(_with_errstate(np.subtract, out, out)).all()
        done.append(True)

    done: list[bool] = []
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    assert len(done) == 5
