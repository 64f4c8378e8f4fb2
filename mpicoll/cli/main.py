"""The `mpicoll` command: read the command line and call the file of the command."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

from mpicoll._version import __version__
from mpicoll.cli import doctor, run, slurm_script, tune
from mpicoll.cli.bench import command
from mpicoll.errors import LaunchError


def parser() -> argparse.ArgumentParser:
    """Return the command line of ``mpicoll``."""
    top = argparse.ArgumentParser(prog="mpicoll", description="The API of torch.distributed over MPI.")
    top.add_argument("--version", action="version", version=f"mpicoll {__version__}")
    commands = top.add_subparsers(title="commands", metavar="command", required=True)
    run.add_parser(commands)
    doctor.add_parser(commands)
    command.add_parser(commands)
    tune.add_parser(commands)
    slurm_script.add_parser(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    top = parser()
    options, unknown = top.parse_known_args(arguments)
    try:
        if unknown:
            getattr(options, "unknown", lambda _: top.error(f"unrecognized arguments: {shlex.join(unknown)}"))(unknown)
        code: int = options.main(options)
        if sys.stdout is not None:  # None: it was closed at the start
            sys.stdout.flush()
        return code
    except LaunchError as error:
        print(f"mpicoll: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # mpicoll doctor | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
