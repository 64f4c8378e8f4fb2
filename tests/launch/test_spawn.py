"""`spawn`: a function on several ranks, from this very process."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
from pathlib import Path

import pytest
from jobs import is_alive
from launch.launching import RUN, call, write
from launch.spawned import alone, work
from polling import until

from mpicoll.errors import LaunchError
from mpicoll.launch.job_folder import read_records
from mpicoll.launch.outcome import decide
from mpicoll.launch.spawn import ProcessExitedException, ProcessRaisedException, outcome, spawn


def test_spawn(tmp_path: Path) -> None:
    """Every rank runs the function, in one MPI world; None comes back."""
    assert spawn(work, (tmp_path, "fine"), nprocs=3) is None
    for rank in range(3):
        assert (tmp_path / f"rank.{rank}").read_text().startswith(f"{rank} 3 3 ")


def test_exception(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The exception of the rank that failed first is raised with its traceback, not what the others made of it."""
    with pytest.raises(ProcessRaisedException) as caught:
        spawn(work, (tmp_path, "raise"), nprocs=3)
    text = str(caught.value)
    assert text.lstrip().startswith("-- Rank 1 ended with this error:")
    assert "ValueError: a bad day on rank 1" in text
    assert "in work" in text
    assert "child.py" not in text
    assert caught.value.error_index == 1
    assert caught.value.error_pid == caught.value.pid == int((tmp_path / "rank.1").read_text().split()[3])
    assert "Traceback" not in capfd.readouterr().err
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.error_index) == (text, 1)


def test_exception_without_mpi() -> None:
    """A function that never starts MPI is treated alike."""
    with pytest.raises(ProcessRaisedException, match="KeyError: 'without MPI'"):
        spawn(alone, nprocs=2)


@pytest.mark.parametrize(("how", "code", "name"), [("exit", 5, None), ("signal", -9, "SIGKILL")])
def test_exit_and_signal(how: str, code: int, name: str | None, tmp_path: Path) -> None:
    """A rank that ends otherwise than by an exception is reported with exit code or signal."""
    with pytest.raises(ProcessExitedException) as caught:
        spawn(work, (tmp_path, how), nprocs=2)
    assert (caught.value.error_index, caught.value.exit_code, caught.value.signal_name) == (1, code, name)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.exit_code, copy.signal_name) == (code, name)


def test_context(tmp_path: Path) -> None:
    """join=False returns at once; join(timeout) says whether the job is over; pids are the ranks'."""
    context = spawn(work, (tmp_path, "wait"), nprocs=2, join=False, daemon=True)
    assert context is not None
    assert context.join(0.05) is False
    pids = context.pids()
    assert until(lambda: (tmp_path / "rank.1").exists())
    assert until(lambda: (tmp_path / "rank.1").read_text() != "")
    assert pids[1] == int((tmp_path / "rank.1").read_text().split()[3])
    os.kill(pids[1], signal.SIGTERM)
    with pytest.raises(ProcessExitedException) as caught:
        context.join(20)
    assert caught.value.error_index == 1
    with pytest.raises(ProcessExitedException):
        context.join()
    assert not any(is_alive(pid) for pid in pids)


def test_functions_that_cannot_be_sent() -> None:
    """A lambda, a local function and bad arguments are refused here, at once."""

    def local(rank: int) -> None:
        pass

    for fn in (lambda rank: None, local):
        with pytest.raises(pickle.PicklingError, match="top of a module"):
            spawn(fn, nprocs=2)
    with open(os.devnull) as file, pytest.raises(pickle.PicklingError, match="spawn cannot run work"):
        spawn(work, (file, "fine"), nprocs=2)
    for nprocs, kind in ((0, ValueError), (True, TypeError), (2.0, TypeError)):
        with pytest.raises(kind, match="nprocs"):
            spawn(work, nprocs=nprocs)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="start_method"):
        spawn(work, start_method="fork")


def test_no_mpi_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no MPI, LaunchError says what to install."""
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nonexistent/libmpi.so")
    with pytest.raises(LaunchError, match="pip install"):
        spawn(work, (tmp_path, "fine"), nprocs=2)


SCRIPT = """
    import sys
    import mpicoll as dist

    def say(rank, word):
        dist.init_process_group()
        print(word, rank, dist.get_world_size(), __name__, flush=True)

    if {guard}:
        if "rank" in sys.argv:
            dist.init_process_group()
        try:
            dist.spawn(say, ("hello",), nprocs=2)
        except dist.ProcessRaisedException as error:
            print("caught", error)
        print("done")
"""


def test_from_a_script(tmp_path: Path) -> None:
    """Functions of a plain script work, from a rank too; without the guard we say what to do."""
    guarded = write(tmp_path, SCRIPT.format(guard='__name__ == "__main__"'), "guarded.py")
    expected = ["done", "hello 0 2 __mp_main__", "hello 1 2 __mp_main__"]
    for command in ([sys.executable, guarded], [*RUN, "-n", "1", guarded, "rank"]):
        result = call(command)
        assert result.code == 0, result
        assert sorted(result.out.splitlines()) == expected
    result = call([sys.executable, write(tmp_path, SCRIPT.format(guard="True"), "unguarded.py")])
    assert 'if __name__ == "__main__":' in result.out, result
    assert "RuntimeError: spawn was called while" in result.out


def test_the_job_ends_with_its_caller(tmp_path: Path) -> None:
    """When the process that called spawn is killed, the ranks go too."""
    script = write(
        tmp_path,
        """
        import os, sys, time
        import mpicoll as dist

        def wait(rank):
            time.sleep(50)

        if __name__ == "__main__":
            context = dist.spawn(wait, nprocs=2, join=False)
            print(*context.pids(), context._directory, flush=True)
            os.kill(os.getpid(), 9)
        """,
    )
    result = call([sys.executable, script])
    assert result.code == -9
    *words, directory = result.out.split()
    pids = [int(word) for word in words]
    assert len(pids) == 2
    assert until(lambda: not any(is_alive(pid) for pid in pids), 10)
    assert until(lambda: not Path(directory).exists(), 10)


def test_root_cause_wins(tmp_path: Path) -> None:
    """Of several exceptions the first that blames no other rank is reported, whoever was first to write."""
    for rank, text in enumerate(("PeerFailedError", "ValueError", "KeyError")):
        (tmp_path / f"error.{rank}").write_text(text)
    (tmp_path / "records").write_text("pid 1 77\nblame 0 1\nfail 1 1\nfail 2 1\nexit 0 1\nexit 1 1\n")
    ended = decide(read_records(tmp_path), 1, "openmpi")
    (tmp_path / "outcome").write_text(json.dumps({"code": ended.code, "rank": ended.rank, "error": None}))
    error = outcome(tmp_path, 1)
    assert isinstance(error, ProcessRaisedException)
    assert (error.error_index, error.pid) == (1, 77)
    assert "ValueError" in str(error)
