"""The picture of a job: its nodes with the cores of each rank, and the links between them as heat maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.checks.call import compress_ranks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mpicoll.cli.job_map import JobMap, Place

__all__ = ["draw", "matrix"]

MOST_NODES = 12
"""So many nodes are drawn one by one; of larger jobs the first ones."""
MOST_LABELS = 16  # names along a heat map, and figures in its cells
GREY, LINE = "#e6e8eb", "#5b6470"


def matrix(job: JobMap, value: Callable[[Any], float]) -> NDArray[np.float64]:
    """Return a figure of each measured link by node and node, NaN where none was; pure."""
    nodes = len(job.hosts)
    found = np.full((nodes, nodes), np.nan)
    for link in job.links:
        one, other = link.nodes
        found[one, other] = found[other, one] = value(link)
    return found


def draw(job: JobMap, path: str) -> None:
    """Draw the map into a file; its ending says in which format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    nodes = job.nodes()
    shown = nodes[:MOST_NODES]
    columns = min(len(shown), 4)
    lines = -(-len(shown) // columns)
    tall = [max(_height(node) for node in shown[at : at + columns]) for at in range(0, len(shown), columns)]
    heat = bool(job.links)
    above = 0.45 * sum(tall) + 0.35 * lines
    figure = Figure(figsize=(11, 1.0 + above + (4.6 if heat else 0)), layout="constrained")
    FigureCanvasAgg(figure)
    count = len(job.places)
    title = f"{count} rank{'s' * (count != 1)} on {len(nodes)} node{'s' * (len(nodes) != 1)}, {job.library}"
    figure.suptitle(title, fontsize=13, fontweight="bold")
    parts: Any = figure.subfigures(2, 1, height_ratios=[above + 0.3, 4.6]) if heat else [figure, figure]
    top, bottom = parts
    axes = top.subplots(lines, columns, squeeze=False, gridspec_kw={"height_ratios": tall})
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, node in zip(axes.flat, shown, strict=False):
        _node(axis, node)
    if len(nodes) > len(shown):
        top.supxlabel(f"and {len(nodes) - len(shown)} nodes more", fontsize=10, color=LINE)
    if heat:
        left, right = bottom.subplots(1, 2)
        _heat(figure, left, job, matrix(job, lambda link: link.latency * 1e6), "latency, µs", "viridis")
        _heat(figure, right, job, matrix(job, lambda link: link.bandwidth / 1e9), "bandwidth, GB/s", "viridis_r")
    figure.savefig(path, dpi=130)


# --- nodes ----------------------------------------------------------------------------------------------------------


def _groups(node: list[Place]) -> list[list[Place]]:
    """Return the ranks of a node that may run on the same cores, together."""
    found: dict[tuple[int, ...], list[Place]] = {}
    for place in node:
        found.setdefault(place.cpus, []).append(place)
    return list(found.values())


MOST_BARS = 16


def _height(node: list[Place]) -> float:
    return 1.6 + min(len(_groups(node)), MOST_BARS + 1)


def _node(axis: Any, node: list[Place]) -> None:
    """Draw one node: its hardware threads from left to right, and below them a bar for the ranks that run there."""
    from matplotlib import colormaps
    from matplotlib.patches import FancyBboxPatch, Rectangle

    wide = node[0].node_cpus
    groups = _groups(node)
    height = _height(node)
    axis.set_xlim(-0.02 * wide, wide * 1.02)
    axis.set_ylim(-height - 0.05, 0.05)
    frame = FancyBboxPatch(
        (0, -height), wide, height, boxstyle="round,pad=0,rounding_size=0.02", mutation_aspect=1 / wide,
        facecolor="white", edgecolor=LINE, linewidth=1.2,
    )  # fmt: skip
    axis.add_patch(frame)
    about = f"{len(node)} rank{'s' * (len(node) != 1)}, {wide} CPUs"
    axis.text(wide * 0.03, -0.45, node[0].host, va="center", ha="left", fontsize=11, fontweight="bold")
    axis.text(wide * 0.97, -0.45, about, va="center", ha="right", fontsize=8.5, color=LINE)
    left, space = wide * 0.03, wide * 0.94
    cell = space / wide
    colours = colormaps["tab20"]
    for number, group in enumerate(groups[:MOST_BARS]):
        low = -1.0 - number - 0.85
        gap = 0.12 * cell if wide <= 64 else 0
        used = set(group[0].cpus)
        # More ranks than cores: red, whatever the ranks' own colour would be.
        colour = "#c0392b" if len(group) > len(group[0].cores) else colours((group[0].local_rank * 2) % 20)
        for cpu in range(wide):
            inside = cpu in used
            axis.add_patch(
                Rectangle(
                    (left + cpu * cell + gap / 2, low), cell - gap, 0.7, facecolor=colour if inside else GREY,
                    linewidth=0, alpha=1.0 if inside else 0.8,
                )
            )  # fmt: skip
        _label(axis, left + space / 2, low + 0.35, group)
    if len(groups) > MOST_BARS:
        more = f"and {len(groups) - MOST_BARS} more"
        axis.text(wide / 2, -1.0 - MOST_BARS - 0.5, more, va="center", ha="center", fontsize=8.5, color=LINE)


def _label(axis: Any, x: float, y: float, group: list[Place]) -> None:
    ranks = [place.rank for place in group]
    text = f"rank{'s' * (len(ranks) != 1)} {compress_ranks(ranks)}"
    seen = {place.gpus for place in group}
    gpus = seen.pop() if len(seen) == 1 else None
    if gpus:
        text += f"   GPU {', '.join(gpus)}"
    box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
    axis.text(x, y, text, va="center", ha="center", fontsize=8.5, bbox=box)


# --- links ----------------------------------------------------------------------------------------------------------


def _heat(figure: Any, axis: Any, job: JobMap, values: NDArray[np.float64], title: str, colours: str) -> None:
    """Draw a figure by node and node; dark is better, grey was not measured, the diagonal is within a node."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm, Normalize

    hosts = job.hosts
    known = values[~np.isnan(values)]
    low, high = float(known.min()), float(known.max())
    # Within a node and between two lie a factor of ten or more apart.
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
            axis.text(column, row, f"{value:.3g}", ha="center", va="center", fontsize=8, color=colour)
    else:
        axis.set_xlabel("node", fontsize=9)
        axis.set_ylabel("node", fontsize=9)
    axis.tick_params(length=0)
    for side in axis.spines.values():
        side.set_visible(False)
    figure.colorbar(image, ax=axis, shrink=0.85)
