"""Hooks of torch 2.15: calls of a process group that has hooks go through torch's C++, which calls the hooks.

A hook is a function of the program, torch's flight recorder, or its check of NaNs. Python calls the methods of
:class:`mpicoll.torch.process_group.ProcessGroup` without C++, and so without hooks, as C++ takes some 15 us more.
From the first hook on the process group has the class of :func:`_with_hooks`. Its methods call those of a second process group,
of C++, which calls the hooks and its backend. The backend makes the call of this library.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore]
import torch.distributed as c10d  # type: ignore[import-not-found,unused-ignore]
from torch._C import _distributed_c10d as in_c  # type: ignore[import-not-found,unused-ignore]

from mpicoll.torch.names import DEVICES, NAME

AVAILABLE = hasattr(c10d.ProcessGroup, "register_pre_hook")
"""Whether this torch has hooks. Then a class of Python can be a backend, too."""

_CALLS = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier", "send", "recv", "recv_anysource"),
    *("allgather", "allgather_coalesced", "all_gather_single", "all_gather_single_coalesced", "gather"),
    *("scatter", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall", "all_to_all_single"),
)
_OTHER_NAMES = (
    *("_allgather_base", "allgather_into_tensor_coalesced", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    "alltoall_base",
)
"""Names of such methods that only process groups have."""
_RECORDERS = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_KIND = c10d.ProcessGroup.BackendType.CUSTOM
_classes: dict[Any, Any] = {}
"""Classes with hooks, by those without."""
_made = threading.local()
"""``work``: what the last call of a backend in this thread returned. C++ gives Python only some methods of a Work of Python."""


def options(limit: timedelta) -> Any:
    """Return the options of a backend, which tell C++ its name."""
    return in_c.Backend.Options(NAME, timeout=limit)


class Backend(in_c.Backend):  # type: ignore[misc,unused-ignore]
    """The backend of a process group of C++. Without hooks it only tells C++ the names and devices of the group.

    Args:
        group: the process group of this library that makes the calls.
        calls: its class.
    """

    def __init__(self, group: Any, calls: type) -> None:
        super().__init__(group.rank(), group.size())
        self._group = weakref.ref(group)
        self._calls = calls
        self._options = options(c10d.default_pg_timeout)

    @property
    def options(self) -> Any:
        """The name of the backend, for C++."""
        return self._options

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return NAME

    def shutdown(self) -> None:
        """Do nothing: the process group ends itself."""

    abort = shutdown


def _by_group(method: str) -> Callable[..., Any]:
    def call(self: Any, *given: Any) -> Any:
        _made.work = getattr(self._calls, method)(self._group(), *given)
        return _made.work

    return call


for _name in _CALLS:
    setattr(Backend, _name, _by_group(_name))
Backend.allreduce_sparse = _by_group("allreduce")


def add_backend(group: Any, to: Any, calls: type) -> None:
    """Give a process group of torch a backend.

    Args:
        group: the process group of this library that makes the calls.
        to: that process group, or one of C++.
        calls: the class of the methods that make the calls.
    """
    backend = Backend(group, calls)
    to._set_default_backend(_KIND)
    for device in DEVICES:
        to._register_backend(torch.device(device), _KIND, backend)


def call_hooks(group: Any, calls: type) -> Any:
    """Let the calls of a process group call hooks from now on; return the process group of C++ that has the hooks.

    Args:
        calls: the class of the methods that make the calls.
    """
    if not hasattr(group, "hooked"):
        group.hooked = c10d.ProcessGroup(c10d.HashStore(), group.rank(), group.size())
        add_backend(group, group.hooked, calls)
        group.hooked._set_group_name(group.group_name)
        group.hooked._set_group_desc(group.group_desc)
        group.__class__ = _with_hooks(type(group))
    return group.hooked


def call_hooks_of_torch(group: Any, ranks: list[int], calls: type) -> None:
    """Let the calls of a process group call torch's flight recorder and check of NaNs, if the environment asks for them.

    Args:
        ranks: global ranks of the members.
        calls: as of :func:`call_hooks`.
    """
    if hasattr(group, "hooked"):
        return
    size = next((os.environ[name] for name in _RECORDERS if os.environ.get(name)), "0")
    if size.strip("0"):
        group.recorder = in_c.FlightRecorderHook.attach(call_hooks(group, calls), ranks)
    if os.environ.get("TORCH_DIST_NAN_CHECK") == "1":
        in_c.NanCheckHook.attach(call_hooks(group, calls))


def _through_hooks(name: str) -> Callable[..., Any]:
    def call(self: Any, *given: Any, **named: Any) -> Any:
        _made.work = None
        try:
            returned = getattr(self.hooked, name)(*given, **named)
            return returned if _made.work is None else _made.work
        finally:
            _made.work = None

    call.__name__ = name
    return call


def _with_hooks(kind: Any) -> Any:
    if kind not in _classes:
        methods = {name: _through_hooks(name) for name in (*_CALLS, *_OTHER_NAMES)}
        _classes[kind] = type(
            kind.__name__, (kind,), {**methods, "__module__": kind.__module__, "__doc__": kind.__doc__}
        )
    return _classes[kind]
