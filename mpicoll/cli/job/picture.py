"""The picture of a job: its nodes with the cores of each rank, and the links between them as heat maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.diagnosis.report.entries import compress_ranks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mpicoll.cli.job.model import JobMap, Place


MOST_NODES = 8
"""The most nodes that are drawn; of larger jobs the first ones are drawn."""
MOST_BARS = 8  # lines of a node, one for each set of hardware threads; a node with more sets is drawn as a grid
ACROSS = 16  # hardware threads in a line of that grid
MOST_LABELS = 16  # names along a heat map, and figures in its cells
GREY, LINE, CROWDED = "#e6e8eb", "#5b6470", "#d64541"


def matrix(job: JobMap, value: Callable[[Any], float]) -> NDArray[np.float64]:
    """Return a figure of each measured link in a matrix of nodes, NaN for links that were not measured; pure."""
    nodes = len(job.hosts)
    found = np.full((nodes, nodes), np.nan)
    for link in job.links:
        one, other = link.nodes
        found[one, other] = found[other, one] = value(link)
    return found


def draw(job: JobMap, path: str) -> None:
    """Draw the map into a file; the file's ending selects the format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from mpicoll.cli.job.model import in_microseconds, in_rate

    nodes = job.nodes()
    shown = nodes[:MOST_NODES]
    columns = min(len(shown), 4)
    lines = -(-len(shown) // columns)
    tall = [max(_height(node) for node in shown[at : at + columns]) for at in range(0, len(shown), columns)]
    heat = bool(job.links) and len(nodes) > 1
    above = 0.32 * sum(tall) + 0.3 * lines
    figure = Figure(figsize=(11, 0.6 + above + (5.0 if heat else 0)), layout="constrained")
    FigureCanvasAgg(figure)
    count = len(job.places)
    title = f"{count} rank{'s' * (count != 1)} on {len(nodes)} node{'s' * (len(nodes) != 1)}, {job.library}"
    if job.links and not heat:
        title += f": {in_microseconds(job.links[0].latency)}, {in_rate(job.links[0].bandwidth)}"
    figure.suptitle(title, fontsize=13, fontweight="bold")
    parts: Any = figure.subfigures(2, 1, height_ratios=[above + 0.3, 5.0]) if heat else [figure, figure]
    top, bottom = parts
    axes = top.subplots(lines, columns, squeeze=False, gridspec_kw={"height_ratios": tall})
    for axis in axes.flat:
        axis.set_axis_off()
    for number, node in enumerate(shown):
        _node(axes.flat[number], node, tall[number // columns])
    notes = [f"and {len(nodes) - len(shown)} nodes more"] if len(nodes) > len(shown) else []
    if any(len(_groups(node)) > MOST_BARS for node in shown):
        notes.append("the numbers of CPUs are the local ranks that run there")
    top.supxlabel("; ".join(notes), fontsize=9, color=LINE)
    if heat:
        left, right = bottom.subplots(1, 2)
        _heat(figure, left, job, matrix(job, lambda link: link.latency * 1e6), "latency, µs: dark is slow", "YlOrRd")
        _heat(
            figure,
            right,
            job,
            matrix(job, lambda link: link.bandwidth / 1e9),
            "bandwidth, GB/s: dark is fast",
            "YlGnBu",
        )
        bottom.supxlabel("on the diagonal within a node; grey: not measured", fontsize=9, color=LINE)
    figure.savefig(path, dpi=130)


# --- nodes ----------------------------------------------------------------------------------------------------------


def _groups(node: list[Place]) -> list[list[Place]]:
    """Return the ranks of a node in groups that may run on the same cores."""
    found: dict[tuple[int, ...], list[Place]] = {}
    for place in node:
        found.setdefault(place.cpus, []).append(place)
    return list(found.values())


def _height(node: list[Place]) -> float:
    """Return the height of a node in lines, the line of its name included."""
    groups = len(_groups(node))
    return 1.4 + (groups if groups <= MOST_BARS else -(-node[0].node_cpus // ACROSS))


def _node(axis: Any, node: list[Place], height: float) -> None:
    """Draw one node: a bar of hardware threads for each group of ranks, or one grid if there are many groups."""
    from matplotlib.patches import FancyBboxPatch

    axis.set_xlim(-0.01, 1.01)
    axis.set_ylim(-height - 0.05, 0.05)
    frame = FancyBboxPatch((0, -height), 1, height, boxstyle="round,pad=0,rounding_size=0.02", mutation_aspect=height)
    frame.set(facecolor="white", edgecolor=LINE, linewidth=1.2)
    axis.add_patch(frame)
    about = f"{len(node)} rank{'s' * (len(node) != 1)}, {node[0].node_cpus} CPUs"
    axis.text(0.03, -0.55, node[0].host, va="center", ha="left", fontsize=11, fontweight="bold")
    axis.text(0.97, -0.55, about, va="center", ha="right", fontsize=8.5, color=LINE)
    groups = _groups(node)
    if len(groups) <= MOST_BARS:
        for number, group in enumerate(groups):
            _bar(axis, group, -1.1 - number)
    else:
        _grid(axis, node)


def _bar(axis: Any, group: list[Place], top: float) -> None:
    """Draw the hardware threads of a node in one line, the threads of a group of ranks in colour; red if they are too few."""
    ranks = [place.rank for place in group]
    text = f"rank{'s' * (len(ranks) != 1)} {compress_ranks(ranks)}"
    seen = {place.gpus for place in group}
    gpus = seen.pop() if len(seen) == 1 else None
    text += f", GPU {', '.join(gpus)}" if gpus else ""
    axis.text(0.03, top - 0.45, text if len(text) < 26 else f"{len(ranks)} ranks", va="center", ha="left", fontsize=8.5)
    wide, used = group[0].node_cpus, set(group[0].cpus)
    colour = CROWDED if len(group) > len(group[0].cores) else _colour(group[0].local_rank)
    for first, count, inside in _runs(wide, used):
        width = 0.57 / wide
        _cell(axis, 0.4 + first * width, top - 0.8, count * width, 0.7, colour if inside else GREY)


def _runs(wide: int, used: set[int]) -> list[tuple[int, int, bool]]:
    """Return first thread, number and kind of each drawn piece: a single thread, or on a wide node neighbours of one kind."""
    found: list[tuple[int, int, bool]] = []
    for cpu in range(wide):
        inside = cpu in used
        if wide > ACROSS and found and found[-1][2] == inside:
            found[-1] = (found[-1][0], found[-1][1] + 1, inside)
        else:
            found.append((cpu, 1, inside))
    return found


def _grid(axis: Any, node: list[Place]) -> None:
    """Draw the hardware threads of a node in lines, each with the local rank that may run there, or the number of ranks."""
    there: dict[int, list[Place]] = {}
    for place in node:
        for cpu in place.cpus:
            there.setdefault(cpu, []).append(place)
    for cpu in range(node[0].node_cpus):
        places = there.get(cpu, [])
        x, y = 0.03 + (cpu % ACROSS) * 0.94 / ACROSS, -2.0 - cpu // ACROSS
        colour = GREY if not places else _colour(places[0].local_rank) if len(places) == 1 else CROWDED
        _cell(axis, x, y, 0.94 / ACROSS, 0.85, colour)
        if places:
            text = str(places[0].local_rank) if len(places) == 1 else f"{len(places)}x"
            axis.text(x + 0.47 / ACROSS, y + 0.42, text, va="center", ha="center", fontsize=6.5)


def _cell(axis: Any, x: float, y: float, width: float, height: float, colour: Any) -> None:
    from matplotlib.patches import Rectangle

    axis.add_patch(Rectangle((x, y), max(width * 0.88, width - 0.005), height, facecolor=colour, linewidth=0))


def _colour(local_rank: int) -> Any:
    from matplotlib import colormaps

    return colormaps["Set2"](local_rank % 8)


# --- links ----------------------------------------------------------------------------------------------------------


def _heat(figure: Any, axis: Any, job: JobMap, values: NDArray[np.float64], title: str, colours: str) -> None:
    """Draw a matrix of nodes as a heat map."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm, Normalize

    hosts = job.hosts
    known = values[~np.isnan(values)]
    low, high = float(known.min()), float(known.max())
    # Figures within a node and between nodes differ by a factor of ten or more.
    scale = LogNorm(low, high) if high > 8 * low else Normalize(0, high)
    shades = colormaps[colours].with_extremes(bad=GREY)
    image = axis.imshow(np.ma.masked_invalid(values), cmap=shades, norm=scale, interpolation="nearest")
    axis.set_title(title, fontsize=11)
    if len(hosts) <= MOST_LABELS:
        ticks = range(len(hosts))
        axis.set_xticks(ticks, hosts, rotation=45 if max(map(len, hosts)) > 4 else 0, fontsize=8.5)
        axis.set_yticks(ticks, hosts, fontsize=8.5)
        for (row, column), value in np.ndenumerate(values):
            if np.isnan(value):
                continue
            red, green, blue, _ = shades(scale(value))
            bright = 0.3 * red + 0.59 * green + 0.11 * blue
            colour = "black" if bright > 0.5 else "white"
            axis.text(
                column,
                row,
                f"{value:.3g}" if value < 1000 else f"{value:.0f}",
                ha="center",
                va="center",
                fontsize=8,
                color=colour,
            )
    else:
        axis.set_xlabel("node", fontsize=9)
        axis.set_ylabel("node", fontsize=9)
    axis.tick_params(length=0)
    for side in axis.spines.values():
        side.set_visible(False)
    bar = figure.colorbar(image, ax=axis, shrink=0.85)
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    bar.ax.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if high < 50 * low else "")
    bar.ax.tick_params(labelsize=8, which="both")
