"""Find the line of the program that made a call, and the part of torch that made the call for the program."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import warnings
from types import FrameType

import torch  # type: ignore[import-not-found,unused-ignore]
import typing_extensions

from mpicoll.runtime.call_site import PACKAGE, find_frame_outside, pass_through

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_WRAPPERS = tuple(module.__file__ for module in (typing_extensions, warnings, contextlib) if module.__file__)
"""Files of the functions that are around each deprecated function of torch, and around its context managers."""
_GENERATED = (
    "<eval_with_key>",
    os.path.join(tempfile.gettempdir(), "torchinductor_"),
    *filter(None, [os.environ.get("TORCHINDUCTOR_CACHE_DIR")]),
)
"""The beginnings of the names of code that torch.compile generates."""
_TESTING = os.path.join(_TORCH, "testing", "")

DDP, PIPELINING = "DDP", "torch.distributed.pipelining"

_MAKERS = {
    os.path.join("nn", "parallel", ""): DDP,
    os.path.join("autograd", ""): "autograd",
    os.path.join("distributed", "algorithms", ""): DDP,
    os.path.join("distributed", "fsdp", ""): "FSDP",
    os.path.join("distributed", "tensor", ""): "DTensor",
    os.path.join("distributed", "checkpoint", ""): "torch.distributed.checkpoint",
    os.path.join("distributed", "pipelining", ""): PIPELINING,
    os.path.join("distributed", "optim", ""): "torch.distributed.optim",
}
"""Names of the parts of torch that make calls of their own, by the folders of their code."""

_OUTSIDE, _BETWEEN = "outside", ""
_known: dict[str, str] = {}
"""The part of torch of each file that was seen."""
_between: dict[str, bool] = {sys._getframe().f_code.co_filename: True}
"""Whether a file of :data:`_known` belongs to torch or to this package, but to none of the named parts."""


def skip_torch() -> None:
    """Let call sites skip the code of torch."""
    pass_through(
        *_WRAPPERS,
        *_GENERATED,
        *(os.path.join(_TORCH, each) for each in sorted(os.listdir(_TORCH)) if each != "testing"),
    )


def _part(name: str) -> str:
    """Return the part of torch that code in this file belongs to, "" for another file of torch or of this package."""
    if name.startswith((PACKAGE, *_WRAPPERS, *_GENERATED)):
        return _BETWEEN
    if not name.startswith(_TORCH) or name.startswith(_TESTING):
        return _OUTSIDE
    inner = name[len(_TORCH) :]
    return next((part for folder, part in _MAKERS.items() if inner.startswith(folder)), _BETWEEN)


def maker() -> str:
    """Return what made the call of the caller's caller: "" for the program, else a part of torch, with its module if known.

    DistributedDataParallel reduces gradients from C++: then no frame is between autograd and this package. A backward function of
    the program calls torch.distributed, whose frames are between.
    """
    frame: FrameType | None = find_frame_outside(_between)
    if frame is not None and _known[frame.f_code.co_filename] is _OUTSIDE:
        return ""
    frame = sys._getframe(2)
    direct = True
    while frame is not None:
        name = frame.f_code.co_filename
        try:
            part = _known[name]
        except KeyError:
            part = _known[name] = _part(name)
            _between[name] = part is _BETWEEN
        if part == "autograd":
            if direct:
                return DDP
        elif part:
            return "" if part is _OUTSIDE else _with_module(part, frame)
        direct = direct and name.startswith(PACKAGE)
        frame = frame.f_back
    return DDP if direct else ""  # a thread of autograd


def _with_module(part: str, frame: FrameType | None) -> str:
    if part == "FSDP":
        while frame is not None and _known.get(frame.f_code.co_filename, _BETWEEN) is not _OUTSIDE:
            module = getattr(frame.f_locals.get("self"), "_module_fqn", None)
            if isinstance(module, str):
                return f"FSDP({module or 'root'})"
            frame = frame.f_back
    return part
