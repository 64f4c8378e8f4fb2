"""The `mpicoll` command: read the command line and call the file of the command."""

from __future__ import annotations

import argparse
import os
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
    options = parser().parse_args(arguments)
    try:
        code: int = options.main(options)
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
