"""Run a short program on two ranks and return its output: for the self-check and the probes of `mpicoll doctor`."""

from __future__ import annotations

import sys
import tempfile

from mpicoll.launch.job import Job, Options


def run_two_ranks(arguments: list[str], limit: float) -> tuple[int, str, str]:
    """Run ``python -c`` with arguments on two ranks; return the exit code, and the output on stdout and stderr.

    Raises:
        LaunchError: the job cannot be started.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        options = Options(nprocs=2, timeout=limit)
        job = Job(options, [sys.executable, "-c", *arguments], sinks=(out.fileno(), err.fileno()))
        try:
            code = job.run().code
        finally:
            job.clean()
        out.seek(0)
        err.seek(0)
        return code, out.read().decode(errors="replace"), err.read().decode(errors="replace")
