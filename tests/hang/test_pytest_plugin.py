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
    import numpy as np
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


@pytest.mark.parametrize("option", ["", "--full-trace"])
def test_the_traceback_ends_at_the_call_of_the_test(option: str, suite: Suite) -> None:
    """An error of the library is shown without the library's frames, unless all frames are asked for."""
    job = suite(
        """
        import mpicoll as dist

        dist.init_process_group()

        def test_differs():
            dist.all_reduce(np.ones(3 + rank))
        """,
        2,
        *filter(None, [option]),
    )
    assert not job.timed_out, job
    assert job.returncode == 1, job
    assert ">       dist.all_reduce(np.ones(3 + rank))" in job.out[0].replace(">           ", ">       "), job
    assert "rank 1: all_reduce #1 float64[>4<]" in job.out[0], job
    assert ("mismatch.py" in job.out[0]) is bool(option), job


@pytest.mark.slow
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


@pytest.mark.slow
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
    assert "ranks 0, 2: passed (call) and waited for the other ranks" in result.stderr
    assert re.search(r"\[rank 1\] .*test_it.py.*in test_waits", result.stderr)
    assert result.stderr.count("the job ends here") == 1
    assert not result.left_running


@pytest.mark.slow
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


def test_a_hang_shows_the_failures_before_it(suite: Suite) -> None:
    """Failures and errors of earlier tests are printed once, before the report of the hang, whichever rank prints."""
    result = suite(
        """
        def test_fails_on_one():
            print("words of", rank)
            assert rank != 1, "the odd one"

        def test_fails_on_all():
            raise ValueError("everywhere")

        @pytest.fixture
        def bad_setup():
            raise RuntimeError("no setup")

        def test_setup_fails(bad_setup):
            pass

        def test_passes():
            print("nothing to see")

        @pytest.mark.mpi_timeout(2)
        def test_waits():
            if rank == 1:
                comm.recv(source=0)  # never sent
        """,
        2,
    )
    assert not result.timed_out
    assert result.returncode != 0
    text = result.stderr
    assert text.count("= FAILURES =") == text.count("= ERRORS =") == text.count("the job ends here") == 1
    before, _, after = text.partition("test_waits was not over on all ranks")
    for words in ("AssertionError: the odd one", "words of 1", "ValueError: everywhere", "RuntimeError: no setup"):
        assert words in before, words
        assert words not in after, words
    assert "failed on rank 1; passed on rank 0" in before
    assert "FAILED test_it.py::test_fails_on_all - ValueError: everywhere" in before
    assert "ERROR test_it.py::test_setup_fails - RuntimeError: no setup" in before
    assert "nothing to see" not in text


def stuck(suite: Suite, how: str) -> JobResult:
    """Return how a job of two ranks has ended in which rank 0 holds the interpreter in a test with a limit of 1 s."""
    result = suite(
        f"""
        import ctypes

        @pytest.mark.mpi_timeout(1)
        def test_stuck():
            if rank == 0:
                {how}
        """,
        2,
    )
    assert not result.timed_out
    assert result.returncode != 0
    return result


@pytest.mark.slow
def test_the_report_of_a_hang_is_the_last_word(suite: Suite) -> None:
    """A rank that could not answer, and wakes when the job ends, prints no second report; the rank that ended the job says so."""
    result = stuck(suite, "ctypes.PyDLL(None).usleep(int(3.15e6)); time.sleep(60)")
    assert result.stderr.count("the job ends here") == 1
    assert re.search(r"rank [01] ends the job now\. It has not failed", result.stderr)


@pytest.mark.slow
def test_limit_reaches_a_rank_that_never_releases_the_interpreter(suite: Suite) -> None:
    """A rank stuck in native code that no other thread can get past does not keep the job alive."""
    result = stuck(suite, "ctypes.PyDLL(None).sleep(60)")
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_block_that_raises_on_all_ranks_passes(suite: Suite) -> None:
    """collective_raises passes where every rank, or every member, raises what it should, and shows the others' words."""
    result = suite(
        """
        import mpicoll as dist
        from mpicoll.pytest_plugin import collective_raises

        def test_everybody():
            for turn in range(50):
                with collective_raises((KeyError, ValueError), match=rf"{turn} on rank {rank}") as caught:
                    raise ValueError(f"turn {turn} on rank {rank}")
                assert str(caught.value) == f"turn {turn} on rank {rank}"
                assert caught.type is ValueError
                assert caught.tb is not None
                assert caught.match("turn")
                assert caught.per_rank == {r: f"ValueError: turn {turn} on rank {r}" for r in range(size)}

        def test_each_its_own():
            with collective_raises(LookupError if rank == 1 else TypeError) as caught:
                with pytest.raises(AttributeError):
                    caught.value
                raise KeyError("a subclass") if rank == 1 else TypeError("no")
            assert caught.type is (KeyError if rank == 1 else TypeError)
            assert caught.per_rank[1] == "KeyError: 'a subclass'"

        def test_some_ranks():
            half = comm.Split(rank % 2, -rank)
            for _ in range(20 + 5 * (rank % 2)):
                with collective_raises(ValueError, group=half) as caught:
                    raise ValueError("long " * 100_000)
                assert list(caught.per_rank) == list(range(rank % 2, size, 2))
            half.Free()

        def test_the_members_of_a_group():
            dist.init_process_group()
            group = dist.new_group([2, 0])
            if rank == 1:
                with pytest.raises(ValueError, match="no process group"):
                    collective_raises(dist.CollectiveMismatchError, group=group)
            else:
                with collective_raises(dist.CollectiveMismatchError, group=group) as caught:
                    dist.all_reduce(np.ones(1 + rank), group=group)
                assert list(caught.per_rank) == [0, 2]
                assert len({text.replace(" <- this rank", "") for text in caught.per_rank.values()}) == 1
            dist.destroy_process_group()
        """,
        3,
    )
    assert result.returncode == 0
    assert counts(result) == "4 passed"


@pytest.mark.slow
def test_a_block_that_does_not_raise_on_all_ranks_fails_on_all(suite: Suite) -> None:
    """No rank goes on alone: each fails with a line for every group of ranks that ended the block alike."""
    result = suite(
        """
        from mpicoll.pytest_plugin import collective_raises

        def test_nothing_on_one():
            with collective_raises(ValueError):
                if rank != 1:
                    raise ValueError("right")
            comm.barrier()  # nobody comes here

        def test_another_type():
            with collective_raises((ValueError, KeyError)):
                raise TypeError("odd") if rank == 0 else ValueError("right")

        def test_another_message():
            with collective_raises(ValueError, match="rank [02]"):
                raise ValueError(f"of rank {rank}")

        def test_failed_before():
            assert rank != 2, "never came"
            with collective_raises(ValueError):
                raise ValueError("right")

        def test_skips_within():
            with collective_raises(ValueError):
                if rank == 1:
                    pytest.skip("not here")
                raise ValueError("right")

        def test_still_in_step():
            with collective_raises(ValueError):
                raise ValueError("right")
            assert comm.allreduce(1) == size
        """,
        3,
    )
    assert not result.timed_out
    assert result.seconds < 30
    assert result.returncode != 0
    assert counts(result) == "5 failed, 1 passed"
    shown = re.findall(r"(?m)^E +Failed: collective_raises: .*\n((?:E   +ranks? .*\n)+)", result.out[0])
    lines = [[line.strip(" E") for line in text.splitlines()] for text in shown]
    assert lines == [
        ["ranks 0, 2: ValueError: right", "rank 1: nothing raised (ValueError expected)"],
        ["rank 0: TypeError: odd (ValueError or KeyError expected)", "ranks 1-2: ValueError: right"],
        [
            "rank 0: ValueError: of rank 0",
            "rank 1: ValueError: of rank 1 (no match of 'rank [02]')",
            "rank 2: ValueError: of rank 2",
        ],
        [
            "ranks 0-1: ValueError: right",
            "rank 2: did not end this block: failed (call) and waited for the other ranks",
        ],
        [
            "ranks 0, 2: ValueError: right",
            "rank 1: did not end this block: skipped (call) and waited for the other ranks",
        ],
    ]
    assert result.out[0].count("failed on ranks 0-2") == 4
    assert "failed on ranks 0, 2; skipped on rank 1" in result.out[0]
    assert re.search(r"\[rank 2\] E +AssertionError: never came", result.out[0])


@pytest.mark.slow
def test_ranks_in_different_blocks_fail(suite: Suite) -> None:
    """Ranks that are in blocks of other members fail, naming both places, and the next test goes on."""
    result = suite(
        """
        from mpicoll.pytest_plugin import collective_raises

        def test_different():
            two = comm.Split(rank == 2)
            if rank == 0:
                with collective_raises(ValueError, group=two):
                    raise ValueError("right")
            with collective_raises(ValueError):
                raise ValueError("right")

        def test_still_in_step():
            with collective_raises(ValueError):
                raise ValueError("right")
        """,
        3,
    )
    assert not result.timed_out
    assert counts(result) == "1 failed, 1 passed"
    assert re.search(r"(?m)^E +rank 1: is in another block, at test_it.py:18$", result.out[0])
    assert re.search(r"(?m)^\[rank 1\] E +rank 0: is in another block, at test_it.py:16$", result.out[0])


@pytest.mark.slow
def test_a_rank_that_stays_in_the_block_is_ended_by_the_limit(suite: Suite) -> None:
    """The others tell how they ended the block; one that was wrong about it shortens the limit."""
    result = suite(
        """
        import mpicoll as dist
        from mpicoll.pytest_plugin import collective_raises

        @pytest.mark.mpi_timeout(6)
        def test_stays():
            dist.init_process_group()
            with collective_raises(ValueError):
                if rank == 0:
                    raise ValueError("right")
                if rank == 1:
                    dist.recv(np.zeros(2), 0)
        """,
        3,
    )
    assert not result.timed_out
    assert result.returncode != 0
    text = result.stderr
    assert "test_stays was not over on all ranks within a third of its limit of 6 s after a rank had failed" in text
    block = "ended the block of collective_raises at test_it.py:17"
    assert f"  rank 0: {block} (ValueError: right) and waited for the other ranks" in text
    assert f"  rank 2: {block} (nothing raised (ValueError expected)) and waited for the other ranks" in text
    assert "[rank 2] test_it.py:17: nothing raised (ValueError expected)" in text
    assert re.search(r"rank 1: recv float64\[2\] from rank 0 tag 0 at test_it.py:21, waited [\d.]+ s", text)
    assert re.search(r"ranks 0, 2: in no call of mpicoll", text)


def test_a_deadlock_in_a_test_is_certain_at_once(suite: Suite) -> None:
    """The plugin's own thread is none that could release the ranks, so the library does not wait for it."""
    result = suite(
        """
        import mpicoll as dist
        from mpicoll.pytest_plugin import collective_raises

        def test_all_receive():
            dist.init_process_group()
            with collective_raises(dist.DeadlockError, match="wait for each other") as caught:
                dist.recv(np.ones(1), (rank + 1) % size)
            assert "threads are alive" not in str(caught.value)
        """,
        2,
    )
    assert counts(result) == "1 passed"


def test_a_hanging_test_shows_the_calls_of_the_library(suite: Suite) -> None:
    """Below where the ranks are stands the call that each waits in, for how long, or its last one."""
    result = suite(
        """
        import mpicoll as dist

        @pytest.mark.mpi_timeout(3)
        def test_waits():
            dist.init_process_group()
            group = dist.new_group([1, 3])
            dist.barrier()
            if rank == 1:
                comm.recv(source=0)  # never sent
            if rank == 3:
                dist.all_reduce(np.ones(2), group=group, async_op=True).wait()
            dist.all_reduce(np.ones(3, "f"))
        """,
        4,
    )
    assert not result.timed_out
    assert result.returncode != 0
    text = result.stderr
    assert text.count("the ranks are in these calls of mpicoll:") == 1
    assert re.search(r"rank 1: in no call of mpicoll, last call barrier at test_it.py:17$", text, re.M)
    waited = r"waited [\d.]+(?: to [\d.]+)? s$"
    assert re.search(rf"ranks 0, 2: all_reduce #\d+ float32\[3\] SUM at test_it.py:22, {waited}", text, re.M)
    assert re.search(
        rf"rank 3: all_reduce #1 float64\[2\] SUM on group .+ at test_it.py:21, async, {waited}", text, re.M
    )


@pytest.mark.slow
def test_a_hanging_test_shows_where_a_silent_rank_was(suite: Suite) -> None:
    """A rank that holds the interpreter is shown where it last wrote down that it is."""
    result = suite(
        """
        import ctypes
        import mpicoll as dist

        @pytest.mark.mpi_timeout(3)
        def test_stuck():
            dist.init_process_group()
            dist.barrier()
            if rank == 1:
                time.sleep(1)
                ctypes.PyDLL(None).sleep(60)
            dist.barrier()
        """,
        2,
    )
    assert not result.timed_out
    assert result.returncode != 0
    text = " ".join(result.err[0].split())
    assert re.search(r"rank 0: barrier #\d+ at test_it.py:21, waited", text)
    silent = r"rank 1: does not answer: it was last seen \d+ s ago at \S*test_it.py:19 in test_stuck\(\), after its"
    assert re.search(silent, text)


@pytest.mark.slow
def test_a_hanging_test_without_the_library_says_nothing_of_it(suite: Suite) -> None:
    """Where nobody has made a default group there is no report of calls, also where the library is imported."""
    result = suite(
        """
        import mpicoll as dist

        @pytest.mark.mpi_timeout(1)
        def test_waits():
            dist.is_available()
            time.sleep(60 * rank)
        """,
        2,
    )
    assert "was not over on all ranks within its limit of 1 s" in result.stderr
    assert "calls of mpicoll" not in result.stderr


@pytest.mark.slow
def test_rank_zero_alone_writes_the_report(suite: Suite, tmp_path: Path) -> None:
    """The JUnit report is rank 0's, and holds the failure of another rank."""
    result = suite("def test_it(): assert rank == 0", 2, f"--junitxml={tmp_path / 'report.xml'}")
    assert result.returncode != 0
    assert "failed on rank 1; passed on rank 0" in (tmp_path / "report.xml").read_text()


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_block_on_one_rank_is_pytest_raises(tmp_path: Path) -> None:
    """Without ``--with-mpi``, and on one rank, a block raises what pytest.raises would."""
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent(
            """
            import pytest
            from mpicoll.pytest_plugin import collective_raises

            pytestmark = pytest.mark.mpi if WITH else []

            def test_passes():
                with collective_raises(LookupError, match="here") as caught:
                    raise KeyError("here")
                assert caught.type is KeyError
                assert str(caught.value) == "'here'"
                assert caught.per_rank == {0: "KeyError: 'here'"}

            def test_nothing():
                with collective_raises(ValueError):
                    pass

            def test_another():
                with collective_raises(ValueError):
                    raise TypeError("as it is")

            def test_message():
                with collective_raises(ValueError, match="this"):
                    raise ValueError("that")

            def test_arguments():
                with pytest.raises(TypeError):
                    collective_raises("ValueError")
            """
        )
    )
    for options in ([], ["--with-mpi"]):
        text = (tmp_path / "test_it.py").read_text()
        (tmp_path / "test_it.py").write_text(re.sub("if .* else", f"if {bool(options)} else", text))
        program = ["-m", "pytest", "-p", "mpicoll.pytest_plugin", "-p", "no:cacheprovider", "--color=no", *options]
        result = run_job(program, 1, limit=60, cwd=tmp_path)
        assert result.returncode == 1
        assert counts(result) == "3 failed, 2 passed"
        for words in ("Failed: DID NOT RAISE", "TypeError: as it is", "Regex"):
            assert re.search(rf"(?m)^E +(AssertionError: )?{words}", result.out[0]), words


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
