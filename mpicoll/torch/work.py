"""Work of torch.distributed around a Work of this library."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore]
import torch.distributed as c10d  # type: ignore[import-not-found,unused-ignore]

from mpicoll.errors import pass_to_c
from mpicoll.lifecycle.join import background_progress
from mpicoll.operations import work as works

_c10d = torch._C._distributed_c10d
_is_input_of_graphs = getattr(_c10d, "_allow_inflight_collective_as_graph_input", lambda: False)
"""Whether the program is in ``allow_inflight_collective_as_graph_input_ctx()``."""
_registered: set[Work] = set()


def forget_registered() -> None:
    """Remove the Works that are over, and that the program has not waited for, from torch's registry."""
    for each in tuple(_registered):
        each.is_completed()


def _each(given: Any) -> Iterator[Any]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, (list, tuple)):
        for each in given:
            yield from _each(each)


def tensors_in(given: Any) -> list[Any]:
    """Return the tensors of a tensor, or of lists of lists, one after the other, as the future of a call has them."""
    if type(given) is list and len(given) == 1 and type(given[0]) is torch.Tensor:
        return [given[0]]
    return list(_each(given))


class Work(c10d.Work):  # type: ignore[misc,unused-ignore]
    """The handle of a call that was started (torch.distributed.Work).

    Args:
        work: of the call.
        outputs: the tensors of the result.
        dropped: where to store the Work when nothing refers to it any more; None: it is deleted. A part of torch that made
            the call need not wait, or waits from C++ when no object of Python refers to the Work.
    """

    def __init__(self, work: works.Work, outputs: Any, dropped: deque[Any] | None = None) -> None:
        super().__init__()
        self._work = work
        self._outputs = outputs
        self._future: Any = None
        self._dropped = dropped
        self._is_registered = _is_input_of_graphs()
        if self._is_registered:
            self._register()

    def _register(self) -> None:
        """Let torch's ``wait_tensor`` find the Work by its tensors, also if the program drops the Work."""
        _registered.add(self)
        for tensor in self._outputs:
            _c10d._register_work(tensor, self)

    def _unregister(self) -> None:
        """Remove the Work, which is over. torch's only function that does so waits for all Works of a tensor."""
        self._is_registered = False
        _registered.discard(self)
        for tensor in self._outputs:
            with contextlib.suppress(Exception):  # of a call, which its own Work raises
                torch.ops._c10d_functional.wait_tensor(tensor)

    def __del__(self, _is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # Without the object of Python the methods below do not exist for C++, and its own wait() never returns.
        if self._dropped is not None and self._future is None and not _is_ending():
            thread = None if self._work.get_future().done() else _other_thread()
            if thread is not None:
                works.attend(self._work, thread)
            self._dropped.append(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the call, and return True. Errors as :meth:`mpicoll.Work.wait`."""
        try:
            return self._work.wait(timeout)
        finally:
            if self._is_registered:
                self._unregister()

    def synchronize(self) -> None:
        """Wait for the call, as :meth:`wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the call is complete or failed, as in torch; make progress, and never wait."""
        is_over = works.is_over(self._work)
        if is_over and self._is_registered:
            self._unregister()
        return is_over

    def is_success(self) -> bool:
        """Return whether the call is complete without an error."""
        return self._work.is_success()

    def exception(self) -> BaseException | None:
        """Return the error of the call; None if the call is pending, or complete without an error."""
        return self._work.exception()

    def result(self) -> Any:
        """Return the tensors of the result of a complete call."""
        self._work.wait()
        return self._outputs

    def source_rank(self) -> int:
        """Return the rank in the group of the sender of a complete receive."""
        return self._work.source_rank()

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a ``torch.futures.Future`` of the list of tensors of the result.

        C++ waits for it without calling this library. So the progress thread progresses the call from now on, and watches its
        limit and the other ranks. If MPI gives no MPI_THREAD_MULTIPLE, or in a callback that the progress thread runs, this
        function waits for the call.
        """
        if self._future is None:
            self._future = _future_of(self._work, self._outputs)
            if self._is_registered:
                self._future.add_done_callback(lambda _: self.is_completed())
        return self._future


def _future_of(work: works.Work, outputs: Any) -> Any:
    future = work.get_future()
    thread = None if future.done() else _other_thread()
    if thread is None:
        future.exception()  # waits
    called = torch.futures.Future()
    if future.done() and future.exception(0) is None:
        called.set_result(outputs)
        return called
    # An exception as the result of a Future is one for Python only. That of a callback is one for C++, too.

    def result(_: Any) -> Any:
        error = future.exception(0)
        if error is not None:
            pass_to_c(error)
            raise error
        return outputs

    returned = called.then(result)
    future.add_done_callback(lambda _: called.set_result(None))
    if thread is not None and not future.done():
        works.attend(work, thread)
    return returned


def _other_thread() -> Any:
    """Return the progress thread; None if MPI allows none, or this is the progress thread."""
    thread = background_progress()
    return None if thread is None or thread.is_current else thread


class Joint(c10d.Work):  # type: ignore[misc,unused-ignore]
    """The handle of several calls that were started one after the other; of none if nothing has to be waited for."""

    def __init__(self, works: Sequence[Any], outputs: Any) -> None:
        super().__init__()
        self._works = works
        self._outputs = outputs
        self._future: Any = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for all calls, and return True."""
        for each in self._works:
            each.wait(timeout)
        return True

    def synchronize(self) -> None:
        """Wait for all calls."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether all calls are complete or failed."""
        return all(each.is_completed() for each in self._works)

    def is_success(self) -> bool:
        """Return whether all calls are complete without an error."""
        return all(each.is_success() for each in self._works)

    def exception(self) -> BaseException | None:
        """Return the first error of the calls, or None."""
        return next((error for error in [each.exception() for each in self._works] if error is not None), None)

    def result(self) -> Any:
        """Return the tensors of the results of complete calls."""
        self.wait()
        return self._outputs

    def get_future(self) -> Any:
        """Return a ``torch.futures.Future`` of the tensors of all results."""
        if self._future is None:
            futures = torch.futures.collect_all([each.get_future() for each in self._works])
            self._future = futures.then(lambda done: [[each.value() for each in done.value()], self._outputs][1])
        return self._future
