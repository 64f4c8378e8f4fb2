"""The probe of `mpicoll doctor --gpu`, tried on memory of the host, where each operation has to be right."""

from __future__ import annotations

import pytest
from jobs import ROOT

from mpicoll.cli import gpu_probe
from mpicoll.transports.device.capability import OPERATIONS


@pytest.mark.parametrize(
    "operation", [pytest.param(name, marks=[pytest.mark.slow] * (name != "reduce")) for name in OPERATIONS]
)
def test_every_operation(operation: str) -> None:
    """Each call of the probe is right, blocking and not."""
    assert [gpu_probe.probe(operation, form, "host") for form in (False, True)] == ["right", "right"]


def test_a_crash_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that ends by a signal, and one that gives something else, are told from one that is right."""
    source = gpu_probe._PROBE
    assert "x, y = " in source
    assert "found == expected" in source
    monkeypatch.setattr(gpu_probe, "_PROBE", source.replace("x, y = ", "import os; os.kill(os.getpid(), 11); x, y = "))
    assert gpu_probe.probe("broadcast", False, "host") == "crashed: SIGSEGV"
    monkeypatch.setattr(gpu_probe, "_PROBE", source.replace("found == expected", "found == expected + 1"))
    assert gpu_probe.probe("broadcast", False, "host") == "wrong"


def test_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether two ranks have memory of a GPU in common, and why not."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'tests' / 'support'}:{ROOT}")
    assert gpu_probe.probe_sharing("standin") == "yes"
    assert gpu_probe.probe_sharing("standin", "export") == "no: RuntimeError: cudaErrorNotSupported"
    monkeypatch.setenv("MPICOLL_CUDA_IPC", "off")
    assert gpu_probe.probe_sharing("standin") == "not tried: MPICOLL_CUDA_IPC=off"
