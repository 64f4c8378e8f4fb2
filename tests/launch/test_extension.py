"""Jobs of which ranks lack the C extension: all go through MPI with the same results, and rank 0 says so in one line."""

from __future__ import annotations

import pytest
from jobs import JobResult, run_job

from mpicoll.cli.main import main
from mpicoll.runtime import native

PROGRAM = """
import os, sys
me = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK"))
who, how = sys.argv[1:]
if who == "all" or who == str(me):
    if how == "off":
        os.environ["MPICOLL_EXTENSION"] = "off"
    elif how == "copies":
        os.environ["MPICOLL_SINGLE_COPY"] = "off"
    else:
        sys.modules["mpicoll._native"] = None
import hashlib
import numpy as np
import mpicoll as dist
from mpicoll.groups import registry
dist.init_process_group()
n, digest = dist.get_world_size(), hashlib.sha256()
for turn in range(3):
    for count in (0, 1, 200, 300, 5000, 70_000, 300_000):
        for dtype in ("i2", "f8", "?", "g", "c8", "f2"):
            x = (np.arange(count) % 5 + me).astype(dtype)
            out, parts = np.zeros(count * n, dtype), (np.arange(count * n) % 7 + me).astype(dtype)
            work = dist.all_reduce(x, async_op=turn == 2 and me == 1)
            if work is not None:
                work.wait()
            digest.update(x.astype("c16").tobytes())
            dist.all_gather_single(out, x)
            digest.update(out.astype("c16").tobytes())
            dist.reduce_scatter_single(x, parts)
            dist.all_gather_single(out, x)
            digest.update(out.astype("c16").tobytes())
            dist.broadcast(x, turn)
            digest.update(x.astype("c16").tobytes())
    dist.barrier()
print(registry.state().pool.extension, digest.hexdigest(), registry.state().pool.single_copy)
"""


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    if native.found is None:
        pytest.skip(f"this machine lacks the extension: {native.why_not}")


def job(who: str, how: str, engine: str = "auto") -> JobResult:
    result = run_job(PROGRAM, 3, limit=60, env={"MPICOLL_ENGINE": engine, "MPICOLL_EXTENSION": None}, args=[who, how])
    assert result.returncode == 0, result
    assert len({out.split()[1] for out in result.out}) == 1, result
    return result


@pytest.fixture(scope="module")
def digest() -> str:
    """The results of a job in which all ranks have the extension."""
    result = job("none", "")
    assert not any(result.err), result
    assert all(out.startswith("True ") for out in result.out), result
    return result.out[0].split()[1]


@pytest.mark.parametrize(
    ("who", "how", "engine", "line"),
    [
        ("1", "absent", "auto", "1 of 3 ranks lack the C extension, so all data of all ranks goes through MPI ("),
        pytest.param("0", "off", "auto", "1 of 3 ranks lack the C extension", marks=pytest.mark.slow),
        pytest.param("all", "absent", "auto", "3 of 3 ranks lack the C extension", marks=pytest.mark.slow),
        pytest.param("all", "absent", "node", "3 of 3 ranks lack the C extension", marks=pytest.mark.slow),
        ("all", "off", "auto", ""),
        ("all", "off", "node", "MPI, though MPICOLL_ENGINE=node asks for shared memory"),
    ],
)
def test_all_go_through_mpi(who: str, how: str, engine: str, line: str, digest: str) -> None:
    """The results are those with the extension; rank 0 says one line unless all switched it off and did not ask for it."""
    result = job(who, how, engine)
    assert [out.split() for out in result.out] == [["False", digest, "False"]] * 3, result
    assert line in result.err[0], result
    assert result.err[0].count("\n") == bool(line), result
    assert not result.err[1] + result.err[2], result


def test_no_rank_copies_from_process_to_process(digest: str) -> None:
    """One rank has this switched off: none copies once, none prints a line, and the results are those of other jobs."""
    result = job("1", "copies")
    assert [out.split() for out in result.out] == [["True", digest, "False"]] * 3, result
    assert not any(result.err), result


@pytest.mark.slow
def test_doctor_says_that_it_is_off(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The self-check says whether its two ranks used the extension, and why they did not."""
    monkeypatch.setenv("MPICOLL_EXTENSION", "off")
    main(["doctor"])
    assert "none: MPICOLL_EXTENSION=off" in " ".join(capfd.readouterr().out.split())
