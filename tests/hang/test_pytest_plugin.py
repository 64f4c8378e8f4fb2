"""The plugin makes a multi-rank test fail on all ranks with the failing rank's words, and never hang."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import JobResult, run_job

HEADER = """
    import time
    import pytest
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rank, size = comm.rank, comm.size
    pytestmark = pytest.mark.mpi
"""

Suite = Callable[..., JobResult]


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    """Run a test file of its own on several ranks."""

    def start(source: str, n: int, *options: str, limit: float = 60) -> JobResult:
        (tmp_path / "conftest.py").write_text('pytest_plugins = ["mpicoll.pytest_plugin"]\n')
        (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers -p no:cacheprovider\n")
        (tmp_path / "test_it.py").write_text(textwrap.dedent(HEADER) + textwrap.dedent(source))
        program = ["-m", "pytest", "--with-mpi", "--color=no", *options]
        return run_job(program, n, limit=limit, cwd=tmp_path, env={"PYTEST_ADDOPTS": None})

    return start


def counts(result: JobResult) -> str:
    """Return the counts of rank 0's closing line."""
    return re.findall(r"=+ (.*) in [\d.]+s", result.out[0])[-1]


def test_verdicts_are_the_same_on_all_ranks(suite: Suite) -> None:
    """One job with every way in which ranks can end a test alike or differently."""
    result = suite(
        """
        def test_passes():
            comm.barrier()

        def test_fails_on_one():
            print("words of", rank)
            assert rank != 1, "the odd one"

        def test_fails_on_all():
            raise ValueError(f"from rank {rank}")

        def test_one_skips():
            if rank == 2:
                pytest.skip("not here")

        def test_all_skip():
            pytest.skip("nowhere")

        @pytest.mark.xfail(strict=True)
        def test_expected_on_one():
            assert rank == 0

        @pytest.fixture
        def bad_setup():
            if rank == 1:
                raise RuntimeError("no setup")

        def test_setup_fails_on_one(bad_setup):
            comm.barrier()  # would hang if the other ranks came here

        @pytest.fixture
        def bad_teardown():
            yield
            assert rank != 2, "no teardown"

        def test_teardown_fails_on_one(bad_teardown):
            pass

        def test_still_in_step():
            assert comm.allreduce(1) == size
        """,
        3,
    )
    assert not result.timed_out
    assert result.returncode != 0
    assert counts(result) == "3 failed, 3 passed, 1 skipped, 1 xfailed, 2 errors"
    text = result.out[0]
    assert "failed on rank 1; passed on ranks 0, 2" in text
    assert re.search(r"\[rank 1\] E +AssertionError: the odd one", text)
    assert "[rank 1] words of 1" in text
    for rank in range(3):
        assert f"ValueError: from rank {rank}" in text
    assert "the ranks disagree: passed on ranks 0-1; skipped on rank 2" in text
    assert "[rank 2] Skipped: not here" in text
    assert re.search(r"\[rank 1\] E +RuntimeError: no setup", text)
    assert re.search(r"\[rank 2\] E +AssertionError: no teardown", text)
    assert not result.out[1] + result.out[2] + result.err[1] + result.err[2]


def test_quiet_when_all_pass(suite: Suite) -> None:
    """Only rank 0 prints, and the exit code is 0."""
    result = suite("def test_sum(): assert comm.allreduce(1) == size", 3)
    assert result.returncode == 0
    assert counts(result) == "1 passed"
    assert not result.out[1] + result.out[2]


def test_hang_on_one_rank_ends_the_job(suite: Suite) -> None:
    """The rank that waits for ever is named with its line, and so are those that had finished."""
    result = suite(
        """
        @pytest.mark.mpi_timeout(2)
        def test_waits():
            if rank == 1:
                comm.recv(source=0)  # never sent
        """,
        3,
    )
    assert not result.timed_out
    assert result.returncode != 0
    assert result.seconds < 30
    assert "test_it.py::test_waits was not over on all ranks within its limit of 2 s" in result.stderr
    assert "rank 1: did not finish the test" in result.stderr
    assert "ranks 0, 2: passed (call) and waited for the others" in result.stderr
    assert re.search(r"\[rank 1\] .*test_it.py.*in test_waits", result.stderr)
    assert result.stderr.count("the job ends here") == 1
    assert not result.left_running


def test_failure_while_others_wait_is_shown(suite: Suite) -> None:
    """A rank that fails while the others wait for it in MPI ends the job soon, and its assertion is what is shown."""
    result = suite(
        """
        @pytest.mark.mpi_timeout(6)
        def test_waits():
            assert rank != 2, "why the others wait"
            comm.recv(source=2)
        """,
        3,
    )
    assert not result.timed_out
    assert result.returncode != 0
    assert "within a third of its limit of 6 s after a rank had failed" in result.stderr
    assert "[rank 2] E       AssertionError: why the others wait" in result.stderr
    assert "ranks 0-1: did not finish the test" in result.stderr


def test_limit_reaches_a_rank_that_never_releases_the_interpreter(suite: Suite) -> None:
    """A rank stuck in native code that no other thread can get past does not keep the job alive."""
    result = suite(
        """
        import ctypes

        @pytest.mark.mpi_timeout(1)
        def test_stuck():
            if rank == 0:
                ctypes.PyDLL(None).sleep(60)
        """,
        2,
    )
    assert not result.timed_out
    assert result.returncode != 0
    assert result.seconds < 30
    assert "no answer (in native code, or on another node): rank 0" in result.stderr


def test_different_collections_end_the_session(suite: Suite) -> None:
    """Ranks that collected different tests say where they differ instead of running into each other."""
    result = suite(
        """
        @pytest.mark.parametrize("value", ["a", "b", "c"][: 3 - rank])
        def test_it(value):
            comm.barrier()
        """,
        2,
    )
    assert not result.timed_out
    assert result.returncode != 0
    message = "rank 0 has 3, rank 1 has 2; number 3 is test_it.py::test_it[c] on rank 0 and nothing more on rank 1"
    assert message in result.stdout + result.stderr


def test_session_that_ends_on_one_rank(suite: Suite) -> None:
    """A rank that leaves the session is noticed at the next step, not at the limit."""
    result = suite(
        """
        def test_leaves():
            if rank == 1:
                pytest.exit("enough", returncode=5)

        def test_next():
            comm.barrier()
        """,
        2,
    )
    assert not result.timed_out
    assert result.returncode != 0
    assert "the ranks are not at the same step of the session" in result.stdout + result.stderr
    assert "rank 1 is at the end of its session" in result.stdout + result.stderr


def test_trouble_at_the_end_of_one_session(suite: Suite, tmp_path: Path) -> None:
    """A plugin that fails on one rank at the end of its session fails the job, and the others do not wait for it."""
    (tmp_path / "late.py").write_text(
        textwrap.dedent(HEADER) + "def pytest_sessionfinish():\n    assert rank != 1, 'late trouble'\n"
    )
    result = suite("def test_it(): pass", 3, "-p", "late")
    assert not result.timed_out
    assert result.seconds < 30
    assert result.returncode != 0
    assert "late trouble" in result.err[1]


def test_rank_zero_alone_writes_the_report(suite: Suite, tmp_path: Path) -> None:
    """The JUnit report is rank 0's, and holds the failure of another rank."""
    result = suite("def test_it(): assert rank == 0", 2, f"--junitxml={tmp_path / 'report.xml'}")
    assert result.returncode != 0
    assert "failed on rank 1; passed on rank 0" in (tmp_path / "report.xml").read_text()


def test_option_limits_every_test(suite: Suite) -> None:
    """``--mpi-timeout`` is the limit of the tests without a mark."""
    result = suite("def test_it(): time.sleep(60 * rank)", 2, "--mpi-timeout=1")
    assert not result.timed_out
    assert "within its limit of 1 s" in result.stderr
    assert result.returncode != 0


def test_does_nothing_without_with_mpi(tmp_path: Path) -> None:
    """Without ``--with-mpi`` the plugin imports no MPI and changes nothing."""
    (tmp_path / "test_it.py").write_text("import sys\ndef test_it(): assert 'mpi4py.MPI' not in sys.modules\n")
    program = ["-m", "pytest", "-p", "mpicoll.pytest_plugin", "-p", "no:cacheprovider"]
    result = run_job(program, 1, limit=60, cwd=tmp_path)
    assert result.returncode == 0


def test_both_mark_packages_are_one_clear_error(tmp_path: Path) -> None:
    """pytest-mpi and mpi-pytest in one environment is a usage error with the repair line."""
    for name in ("mpi-pytest", "pytest-mpi"):
        metadata = tmp_path / "path" / f"{name.replace('-', '_')}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (tmp_path / "test_it.py").write_text("def test_it(): pass\n")
    path = os.pathsep.join([str(tmp_path / "path"), *filter(None, [os.environ.get("PYTHONPATH")])])
    program = ["-m", "pytest", "-p", "mpicoll.pytest_plugin", "-p", "no:cacheprovider"]
    result = run_job(program, 1, limit=60, cwd=tmp_path, env={"PYTHONPATH": path})
    assert result.returncode == 4
    assert "pip uninstall -y mpi-pytest pytest-mpi && pip install pytest-mpi" in result.stderr
