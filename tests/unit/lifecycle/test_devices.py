"""Which GPU a rank selects, and the warning about one that ranks share while others are idle."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from standin_gpu import Gpu

import mpicoll as dist
from mpicoll.lifecycle import devices
from mpicoll.lifecycle.devices import idle_while_shared, warn_of_sharing
from mpicoll.memory.device import runtime as device_runtime


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    found = Gpu()
    monkeypatch.setattr(device_runtime, "_runtime", found)
    monkeypatch.setattr(devices, "_chosen", ("", 0))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return found


@pytest.mark.parametrize(("visible", "rank", "expected"), [(4, 0, 0), (4, 3, 3), (4, 6, 2), (1, 5, 0), (2, 3, 1)])
def test_by_local_rank(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, visible: int, rank: int, expected: int) -> None:
    """The local rank modulo the devices that are seen; the only one where there is one."""
    gpu.devices = visible
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    assert dist.select_device() == expected == gpu.used
    assert devices.chosen() == (f"0000:{expected:02x}:00.0", visible)


def test_by_name(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number, a word of torch's, a device of torch or of CuPy."""
    monkeypatch.setenv("LOCAL_RANK", "6")
    given: list[tuple[Any, int]] = [(3, 3), ("cuda:1", 1), ("cuda", 2), (SimpleNamespace(id=2), 2)]
    given += [(SimpleNamespace(type="cuda", index=1), 1), (SimpleNamespace(type="cuda", index=None), 2)]
    for device, number in given:
        assert dist.select_device(device) == number == gpu.used
    for device in (4, -1, "cuda:4"):
        with pytest.raises(ValueError, match=r"there is no device -?\d: this rank sees 4, numbered from 0"):
            dist.select_device(device)
    for device in ("cpu", "cuda:x", "1", 1.0, True, SimpleNamespace(type="cpu", index=0)):
        with pytest.raises(TypeError, match="names no device of CUDA"):
            dist.select_device(device)


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what is missing."""
    monkeypatch.setattr(device_runtime, "_runtime", None)
    monkeypatch.delitem(sys.modules, "mpicoll.memory.device.cuda", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match="select_device: this needs CuPy"):
        dist.select_device()


def test_sharing() -> None:
    """Ranks of a node that share a device while another is idle are told; those that have to, or have selected none, are not."""
    a, b, c = ("a", 4), ("b", 4), ("c", 4)
    two = [0, 0, 0, 0, 1, 1]
    assert idle_while_shared([a, b, c, ("d", 4), a, b], two, ["one", "two"]) == []
    found = idle_while_shared([a, a, b, ("", 0), c, c], two, ["one", "two"])
    assert [rank for rank, _ in found] == [0, 4]
    assert found[0][1].startswith("ranks 0, 1 on one share the GPU at a, while 2 that they see are idle")
    assert found[1][1].startswith("ranks 4, 5 on two share the GPU at c, while 3 that they see are idle")
    assert idle_while_shared([("a", 2), ("a", 2), ("b", 2), ("b", 2)], [0] * 4, ["one"]) == []  # more ranks than GPUs
    assert idle_while_shared([("a", 1), ("a", 1)], [0, 0], ["one"]) == []
    assert idle_while_shared([("", 0)] * 6, two, ["one", "two"]) == []
    with pytest.warns(UserWarning, match="share the GPU at a"):
        warn_of_sharing(0, [a, a], [0, 0], ["one"])
    warn_of_sharing(1, [a, a], [0, 0], ["one"])
