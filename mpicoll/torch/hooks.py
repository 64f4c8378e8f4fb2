"""Hooks of torch 2.15: calls of a process group that has hooks go through torch's C++, which calls the hooks.

A hook is a function of the program, torch's flight recorder, or torch's check of NaNs. Python calls the methods of
:class:`mpicoll.torch.process_group.ProcessGroup` without C++, and so without hooks: a call through C++ takes longer
(docs/torch.md). The first hook changes the class of the process group to one of :func:`_class_with_hooks`. The methods of that
class call a second process group, which is one of C++. The second process group calls the hooks, and its :class:`Backend` calls
the methods without hooks.
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

from mpicoll.errors import DistError
from mpicoll.operations.prepare.refusal import refuse
from mpicoll.runtime.call_site import call_site
from mpicoll.torch.names import NAME
from mpicoll.torch.work import Joint, tensors_in

AVAILABLE = hasattr(c10d.ProcessGroup, "register_pre_hook")
"""Whether this torch has hooks. Then a class of Python can be a backend, too."""

_OPS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "barrier": "barrier",
    "send": "isend",
    "recv": "irecv",
    "recv_anysource": "irecv",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "all_gather_single": "all_gather_single",
    "all_gather_single_coalesced": "all_gather_single",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter_single",
    "reduce_scatter_single_coalesced": "reduce_scatter_single",
    "alltoall": "all_to_all",
    "all_to_all_single": "all_to_all_single",
}
"""The methods of process groups and backends that make calls, with the functions of this library."""
_ALIASES = {
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}
"""Other names of such methods, which only process groups have."""
_MESSAGES = ("send", "recv", "recv_anysource")
_RECORDERS = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_KIND = c10d.ProcessGroup.BackendType.CUSTOM
_NOT_MADE = object()
_classes: dict[Any, Any] = {}
"""Classes with hooks, by those without."""


class _Calls(threading.local):
    """The calls of a thread that are in C++, one in the hook of another.

    Attributes:
        results: what the backend has returned for each. C++ gives Python only two methods of a Work of Python.
    """

    def __init__(self) -> None:
        self.results: list[Any] = []


_calls = _Calls()


def options(limit: timedelta) -> Any:
    """Return the options of a backend, which tell C++ its name."""
    return in_c.Backend.Options(NAME, timeout=limit)


class Backend(in_c.Backend):  # type: ignore[misc,unused-ignore]
    """The backend of a process group. Without hooks C++ only reads names and devices from it.

    Args:
        group: the process group of this library.
        calls: the class whose methods make the calls of the process group.
    """

    def __init__(self, group: Any, calls: type) -> None:
        super().__init__(group.rank(), group.size())
        self._group = weakref.ref(group)
        self._methods = calls
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


def _backend_method(method: str) -> Callable[..., Any]:
    def call(self: Any, *given: Any) -> Any:
        made = getattr(self._methods, method)(self._group(), *given)
        if _calls.results:
            _calls.results[-1] = made
        # Hooks of C++ want a Work also of a call that is complete.
        return Joint((), tensors_in(given[:1] if method != "barrier" else ())) if made is None else made

    call.__name__ = method
    return call


for _name in _OPS:
    setattr(Backend, _name, _backend_method(_name))
Backend.allreduce_sparse = _backend_method("allreduce")


def add_backends(target: Any, backends: dict[str, Any]) -> None:
    """Register backends with a process group.

    Args:
        target: a process group of this library, or one of C++.
        backends: by the type of the device. That of this library has the type CUSTOM, another one its own.
    """
    target._set_default_backend(_KIND)
    for device, backend in backends.items():
        name = backend.name() if not isinstance(backend, Backend) else ""
        kind = c10d.Backend.backend_type_map.get(name, _KIND)
        target._register_backend(torch.device(device), kind, backend)


def use_hooks(group: Any) -> Any:
    """Let the calls of a process group call hooks from now on; return the process group of C++ that has the hooks."""
    if group.in_c is None:
        made = c10d.ProcessGroup(c10d.HashStore(), group.rank(), group.size())
        add_backends(made, group.backends())
        made._set_group_name(group.group_name)
        made._set_group_desc(group.group_desc)
        group.in_c = made
        group.__class__ = _class_with_hooks(type(group))
    return group.in_c


def use_hooks_of_torch(group: Any) -> None:
    """Let the calls of a process group call torch's flight recorder and check of NaNs, if the environment asks for them."""
    if group.in_c is not None:
        return
    size = next((os.environ[name] for name in _RECORDERS if os.environ.get(name)), "0")
    if int(size) > 0:
        group.recorder = in_c.FlightRecorderHook.attach(use_hooks(group), list(group.group.ranks))
    if os.environ.get("TORCH_DIST_NAN_CHECK") == "1":
        in_c.NanCheckHook.attach(use_hooks(group))


def _hooked_method(name: str, plain: type) -> Callable[..., Any]:
    method = _ALIASES.get(name, name)

    def call(self: Any, *given: Any, **named: Any) -> Any:
        _calls.results.append(_NOT_MADE)
        try:
            returned = getattr(self.in_c, name)(*given, **named)
        except Exception as error:
            ours = _calls.results[-1] is _NOT_MADE and not self.passes_on(given, named)
            if ours and not isinstance(error, DistError) and method not in _MESSAGES:
                # An error of a hook or of C++ before this library made the call: the other members must not wait.
                refuse(self.group, _OPS[method], call_site(), error)
            raise
        finally:
            made = _calls.results.pop()
        if made is not _NOT_MADE:
            return made
        # Another backend has made the call; or C++ has left it out, as for tensors on the meta device.
        return returned if self.passes_on(given, named) else getattr(plain, name)(self, *given, **named)

    call.__name__ = name
    return call


def _class_with_hooks(plain: Any) -> Any:
    if plain not in _classes:
        methods = {name: _hooked_method(name, plain) for name in (*_OPS, *_ALIASES)}
        more = {"__module__": plain.__module__, "__doc__": plain.__doc__}
        _classes[plain] = type(plain.__name__, (plain,), {**methods, **more})
    return _classes[plain]
