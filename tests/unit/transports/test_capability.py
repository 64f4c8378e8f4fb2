"""What may be handed memory of a GPU: the evidence, in its order, and what is known to fail."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from mpicoll.cli import doctor
from mpicoll.cli.gpu_probe import judge, probe_all, save
from mpicoll.errors import LaunchError
from mpicoll.memory.device import runtime as device_runtime
from mpicoll.transports.device.capability import (
    KNOWN_BAD,
    OPERATIONS,
    REDUCTIONS,
    ask,
    decide,
    path_of_probes,
    read_probes,
)

MPICH = "MPICH Version:      5.0.2\n"
OPEN_MPI = "Open MPI v5.0.11, package: x, ident: 5.0.11"


def everything(direct: bool, bad: tuple[tuple[str, bool], ...] = ()) -> set[tuple[str, bool]]:
    return {(op, form) for op in OPERATIONS for form in (False, True) if direct and (op, form) not in bad}


@pytest.mark.parametrize(
    ("kinds", "asked", "environ", "aware", "words"),
    [
        (None, None, {}, False, "nothing says"),
        (None, True, {}, True, "the library says yes"),
        (None, False, {"MPICH_GPU_SUPPORT_ENABLED": "1"}, False, "the library says no"),
        ("mpi,system", True, {}, False, "mpi_memory_alloc_kinds"),
        ("mpi,system,cuda", False, {}, True, "mpi_memory_alloc_kinds"),
        ("system, cuda:device:host", None, {}, True, "mpi_memory_alloc_kinds"),
        ("system,cuda:host", True, {}, False, "mpi_memory_alloc_kinds"),
        ("system,rocm", True, {}, False, "mpi_memory_alloc_kinds"),
        (None, None, {"MPICH_GPU_SUPPORT_ENABLED": "1"}, True, "Cray MPICH"),
        (None, None, {"MV2_USE_CUDA": "1"}, True, "MVAPICH2"),
        (None, None, {"PSP_CUDA": "1"}, True, "ParaStation"),
        (None, None, {"PSP_CUDA": "0", "MV2_USE_CUDA": ""}, False, "nothing says"),
    ],
)
def test_evidence(kinds: str | None, asked: bool | None, environ: dict[str, str], aware: bool, words: str) -> None:
    """The first that says anything counts; without any, memory goes by way of the host."""
    found = decide("auto", kinds, asked, environ, MPICH)
    assert words in found.evidence
    assert set(found.direct) == everything(aware)


def test_the_setting_goes_before_all() -> None:
    """MPICOLL_CUDA decides, whatever else is said."""
    assert not decide("off", "cuda", True, {"MV2_USE_CUDA": "1"}, MPICH).direct
    assert set(decide("aware", "system", False, {}, MPICH).direct) == everything(True)
    assert decide("off", None, None, {}, MPICH).evidence == "MPICOLL_CUDA=off"


@pytest.mark.parametrize("choice", ["auto", "aware"])
def test_what_is_known_to_fail(choice: str) -> None:
    """Open MPI's nonblocking reductions are not handed memory of a GPU, whatever says that it knows of them."""
    found = decide(choice, None, True, {}, OPEN_MPI)  # type: ignore[arg-type]
    bad = tuple((op, True) for op in REDUCTIONS)
    assert set(found.direct) == everything(True, bad)
    assert not found.allows("all_reduce", True)
    assert found.allows("all_reduce", False)
    assert found.allows("send", True)
    assert found.bad == KNOWN_BAD
    assert not decide(choice, None, True, {}, MPICH).bad  # type: ignore[arg-type]
    assert all("#" in bad.why for bad in KNOWN_BAD)


def test_a_library_that_has_no_such_question() -> None:
    """A file that is no library, and a library that is no MPI."""
    assert ask(["/nowhere/libmpi.so", "libc.so.6"]) is None
    assert ask([]) is None


def test_what_was_probed(tmp_path: Path) -> None:
    """What doctor has found for this library goes before what libraries say, and after the setting."""
    told: dict[str, str] = {}
    fails = {("all_reduce", True), ("send", False)}

    def probing(operation: str, nonblocking: bool, where: str) -> str:
        return "crashed: SIGSEGV" if (operation, nonblocking) in fails else "right"

    right = probe_all(told.__setitem__, "cuda", probing)
    assert right == everything(True) - fails
    assert told["all_reduce, nonblocking"] == "crashed: SIGSEGV"
    assert len(told) == 2 * len(OPERATIONS)
    path = tmp_path / "mpicoll" / "gpu.json"
    assert path == path_of_probes({"XDG_CONFIG_HOME": str(tmp_path)})
    save(right, "MPICH 5", path)
    save(set(), "Open MPI 5", path)
    assert read_probes(path.read_text(), "MPICH 5") == right
    assert read_probes(path.read_text(), "Open MPI 5") == frozenset()
    assert read_probes(path.read_text(), "another") is None
    assert set(decide("auto", None, True, {}, MPICH, frozenset(right)).direct) == right
    assert set(decide("auto", None, None, {}, MPICH, frozenset(right)).direct) == right
    assert not decide("auto", "mpi,system", None, {}, MPICH, frozenset(right)).direct
    assert not decide("auto", None, False, {}, MPICH, frozenset(right)).direct
    assert not decide("off", None, True, {}, MPICH, frozenset(right)).direct
    assert not decide("auto", None, True, {}, OPEN_MPI, frozenset({("all_reduce", True)})).direct
    for text in ("[]", '{"MPICH 5": 3}', "{"):
        with pytest.raises(ValueError, match=r"not what mpicoll|Expecting"):
            read_probes(text, "MPICH 5")
    path.write_text("{")
    with pytest.raises(LaunchError, match=r"gpu\.json"):
        save(right, "MPICH 5", path)


def test_how_probes_end() -> None:
    """Exit codes in words."""
    assert judge(0, "x\nprobe: right\n", "") == "right"
    assert judge(0, "probe: wrong", "") == "wrong"
    assert judge(0, "", "") == "no result printed"
    assert judge(139, "", "") == "crashed: SIGSEGV"
    assert judge(124, "", "").startswith("did not end within")
    assert judge(1, "", "x\nValueError: no\n") == "failed with exit code 1: ValueError: no"


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what is missing, and that --save belongs to --gpu."""
    monkeypatch.setattr(device_runtime, "_runtime", None)
    monkeypatch.delitem(sys.modules, "mpicoll.memory.device.cuda", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", None)
    parser = argparse.ArgumentParser()
    doctor.add_parser(parser.add_subparsers())
    with pytest.raises(LaunchError, match="CuPy"):
        doctor.main(parser.parse_args(["doctor", "--gpu"]))
    with pytest.raises(LaunchError, match="--gpu --save"):
        doctor.main(parser.parse_args(["doctor", "--save"]))
