"""`mpicoll doctor --job`: show the nodes, cores, GPUs and links of a job's ranks."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpicoll.cli.job.model import JobMap, Place, link_rows, place_here, rows
from mpicoll.cli.outputs import Output, picture_format
from mpicoll.errors import LaunchError

if TYPE_CHECKING:
    from rich.table import Table


def show_map(plot: str | None = None) -> int:
    """Collect the places of the ranks, measure their links, and print the map on rank 0. All ranks of the job call the function.

    Args:
        plot: a file for the picture (PNG, PDF, SVG); rank 0 writes it.
    """
    import mpicoll as dist

    started = not dist.is_initialized()
    if started:
        dist.init_process_group()
    try:
        with _Picture(plot if dist.get_rank() == 0 else None) as picture:
            job = _collect()
            if dist.get_rank() == 0:
                _print(job)
                picture.draw(job)
                sys.stdout.flush()
            dist.barrier()
    finally:
        if started and sys.exc_info()[0] is None:
            dist.destroy_process_group()
    return picture.code


class _Picture:
    """The file of the picture, opened before the measurement. An error is printed, and the map is shown without a picture.

    Args:
        path: the file; None: there is no picture.

    Attributes:
        code: the exit code: 1 after an error.
    """

    def __init__(self, path: str | None) -> None:
        self.code = 0
        self._output: Output | None = None
        if path is None:
            return
        try:
            self._format = picture_format("--plot", path)
            self._output = Output("--plot", path)
        except LaunchError as error:
            self._tell(error)

    def __enter__(self) -> _Picture:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._output is not None:
            self._output.__exit__(*error)

    def draw(self, job: JobMap) -> None:
        """Draw the map, if there is a file for the picture."""
        if self._output is None:
            return
        from mpicoll.cli.job.picture import draw

        try:
            self._output.write(draw(job, self._format))
            print(f"The picture is in {self._output.path}")
        except LaunchError as error:
            self._tell(error)

    def _tell(self, error: LaunchError) -> None:
        print(f"mpicoll: could not draw the map: {error}", file=sys.stderr, flush=True)
        self.code = 1


def _collect() -> JobMap:
    from mpi4py import MPI

    import mpicoll as dist
    from mpicoll.cli.job.links import measure
    from mpicoll.groups.registry import state
    from mpicoll.launch.environment import read_launcher

    topology = state().topology
    rank, size = dist.get_rank(), dist.get_world_size()
    places: list[Place | None] | None = [None] * size if rank == 0 else None
    dist.gather_object(place_here(rank, topology.node, topology.local_rank), places)
    links = measure(topology.node_of)
    library = MPI.Get_library_version().replace("\n", ",").split(",")[0].rstrip("\0")
    nodes = len(topology.hosts)
    known = tuple(place for place in places or () if place is not None)
    return JobMap(known, links, " ".join(library.split()), read_launcher(os.environ).kind, nodes * (nodes - 1) // 2)


def _print(job: JobMap) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from mpicoll.cli.job.warnings import warnings

    # No colours: under Open MPI's mpirun a rank's output is a terminal, even if the job's output goes to a file.
    width = shutil.get_terminal_size((160, 24)).columns
    console = Console(highlight=False, color_system=None, width=max(width, 100))
    number, nodes = len(job.places), len(job.hosts)
    title = f"{number} rank{'s' * (number != 1)} on {nodes} node{'s' * (nodes != 1)}, {job.library}"
    console.print(escape(title) + (f", started by {job.launcher}" if job.launcher != "none" else ""))
    lines = rows(job)
    columns = ["rank", "node", "local", "pid", "cores", "GPU", "threads"]
    values = [[row.ranks, row.node, row.local, row.pid, row.cores, row.gpus, row.threads] for row in lines]
    console.print(_table(Table(box=SIMPLE), columns, values))
    models = sorted({model for place in job.places for model in place.models})
    if models:
        console.print(f"GPUs of the nodes: {escape(', '.join(models))}\n")
    if job.links:
        columns = ["link", "ranks", "latency", "bandwidth"]
        console.print(_table(Table(box=SIMPLE), columns, link_rows(job)))
    between = sum(link.nodes[0] != link.nodes[1] for link in job.links)
    if between < job.pairs:
        console.print(f"{between} of {job.pairs} pairs of nodes were measured.\n")
    for warning in warnings(job):
        console.print(f"- {escape(warning)}", soft_wrap=True)


def _table(table: Table, columns: Sequence[str], values: Sequence[Sequence[str]]) -> Table:
    """Fill a table, without the empty columns."""
    from rich.markup import escape

    filled = [index for index in range(len(columns)) if any(row[index] for row in values)]
    for index in filled:
        right = columns[index] in ("rank", "local", "pid", "latency", "bandwidth")
        table.add_column(columns[index], justify="right" if right else "left", overflow="fold")
    for row in values:
        table.add_row(*(escape(row[index]) for index in filled))
    return table
