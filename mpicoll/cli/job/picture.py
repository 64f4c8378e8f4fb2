"""The picture of a job: its nodes with the cores of each rank, the links as heat maps, and the reason for what is red."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.cli.job.model import JobMap, Place, few, gpus_of, in_microseconds, in_rate, threads_of
from mpicoll.cli.job.warnings import Wrong, slow_links, warnings, wrong_on
from mpicoll.diagnosis.report.entries import compress_ranks, name_ranks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mpicoll.cli.job.links import Link


MOST_NODES = 8
"""The most nodes that are drawn; of larger jobs the first ones are drawn."""
MOST_BARS = 8  # lines of a node, one for each set of hardware threads; a node with more sets is drawn as a grid
MOST_WARNINGS = 8
ACROSS = 16  # hardware threads in a line of that grid
MOST_LABELS = 16  # names along a heat map, and figures in its cells
LINE_HEIGHT = 0.4  # inches of a line of a node
WIDTH = 11  # inches
HEAT_HEIGHT = 4.6
TEXT_HEIGHT = 0.175
CHARACTERS = 150  # in a line of text
GREY, LINE, RED = "#e6e8eb", "#5b6470", "#d62728"
COLOURS = ("#59a89c", "#7b8fc4", "#dcb84c", "#8bbf56", "#b08fcf", "#5aa7d6")  # nothing that looks like red


def matrix(job: JobMap, value: Callable[[Any], float]) -> NDArray[np.float64]:
    """Return a figure of each measured link in a matrix of nodes, NaN for links that were not measured; pure."""
    nodes = len(job.hosts)
    found = np.full((nodes, nodes), np.nan)
    for link in job.links:
        one, other = link.nodes
        found[one, other] = found[other, one] = value(link)
    return found


def draw(job: JobMap, kind: str = "png") -> bytes:
    """Return a picture of the map in a format of matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    nodes = job.nodes()
    shown = nodes[:MOST_NODES]
    columns = min(len(shown), 3)
    lines = -(-len(shown) // columns)
    tall = [max(_height(node) for node in shown[at : at + columns]) for at in range(0, len(shown), columns)]
    heat = bool(job.links) and len(nodes) > 1
    words = _words(job)
    heights = [
        LINE_HEIGHT * sum(tall) + 0.3 * lines,
        *([HEAT_HEIGHT] if heat else []),
        TEXT_HEIGHT * len(words) + 0.65,
    ]
    figure = Figure(figsize=(WIDTH, 0.5 + sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    count = len(job.places)
    title = f"{count} rank{'s' * (count != 1)} on {len(nodes)} node{'s' * (len(nodes) != 1)}, {job.library}"
    figure.suptitle(title, fontsize=13, fontweight="bold")
    parts: Any = figure.subfigures(len(heights), 1, height_ratios=heights)
    axes = parts[0].subplots(lines, columns, squeeze=False, gridspec_kw={"height_ratios": tall})
    for axis in axes.flat:
        axis.set_axis_off()
    within = {link.nodes[0]: link for link in job.links if link.nodes[0] == link.nodes[1]}
    for number, node in enumerate(shown):
        _node(axes.flat[number], node, tall[number // columns], within.get(node[0].node))
    if heat:
        left, right = parts[1].subplots(1, 2)
        latency = matrix(job, lambda link: link.latency * 1e6)
        bandwidth = matrix(job, lambda link: link.bandwidth / 1e9)
        _heat(figure, left, job, latency, "latency in µs (dark is slow)", "viridis_r")
        _heat(figure, right, job, bandwidth, "bandwidth in GB/s (dark is fast)", "YlGnBu")
    _legend(parts[-1], words)
    drawn = io.BytesIO()
    figure.savefig(drawn, format=kind, dpi=130)
    return drawn.getvalue()


def _words(job: JobMap) -> list[str]:
    """Return the lines below the picture: what it leaves out, and the warnings, which say why something is red."""
    nodes = job.nodes()
    notes = [f"{len(nodes) - MOST_NODES} more nodes are not drawn"] if len(nodes) > MOST_NODES else []
    if any(len(_groups(node)) > MOST_BARS for node in nodes[:MOST_NODES]):
        notes.append("on nodes with many ranks a box has the local rank that may run there, or the number of ranks")
    if job.links and len(nodes) > 1:
        notes.append(
            "heat maps: mpicoll's send and recv between nodes, on the diagonal within a node; grey: not measured"
        )
    found = warnings(job)
    lines = [f"{'; '.join(notes)}."] if notes else []
    lines.append("Red, and why:" if found else "Nothing is red: no warnings.")
    lines += [f"- {warning}" for warning in found[:MOST_WARNINGS]]
    if len(found) > MOST_WARNINGS:
        lines.append(f"- {len(found) - MOST_WARNINGS} more, which mpicoll doctor --job prints")
    return [
        part
        for line in lines
        for part in textwrap.wrap(line, CHARACTERS, subsequent_indent="  ", break_long_words=True)
    ]


def _legend(part: Any, words: list[str]) -> None:
    """Draw the legend, and the lines below it."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    meanings = (
        (COLOURS[:3], "hardware thread (number) that the ranks of the line may use"),
        ((GREY,), "other hardware thread of the node"),
        ((RED,), "problem: see below"),
    )
    patches = [tuple(Patch(facecolor=colour) for colour in colours) for colours, _ in meanings]
    axis = part.subplots()
    axis.set_axis_off()
    axis.set_ylim(0, len(words) + 2)
    axis.set_xlim(0, 1)
    axis.legend(
        patches,
        [meaning for _, meaning in meanings],
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="upper left",
        ncols=3,
        frameon=False,
        fontsize=8.5,
        borderpad=0,
        borderaxespad=0,
    )
    for number, line in enumerate(words):
        is_heading = line == "Red, and why:"
        axis.text(
            0.0,
            len(words) - number - 0.2,
            line,
            va="center",
            fontsize=8.5,
            color=RED if is_heading else "black",
            fontweight="bold" if is_heading else "normal",
        )


# --- nodes ----------------------------------------------------------------------------------------------------------


def _groups(node: list[Place]) -> list[list[Place]]:
    """Return the ranks of a node in groups that may run on the same cores."""
    found: dict[tuple[int, ...], list[Place]] = {}
    for place in node:
        found.setdefault(place.cpus, []).append(place)
    return list(found.values())


def _height(node: list[Place]) -> float:
    """Return the height of a node in lines: its name, its ranks and its link."""
    groups = len(_groups(node))
    return 1.8 + (groups if groups <= MOST_BARS else -(-node[0].node_cpus // ACROSS))


def _node(axis: Any, node: list[Place], height: float, link: Link | None) -> None:
    """Draw one node: a bar of hardware threads for each group of ranks, or one grid if there are many groups."""
    from matplotlib.patches import FancyBboxPatch

    axis.set_xlim(-0.01, 1.01)
    axis.set_ylim(-height - 0.05, 0.05)
    frame = FancyBboxPatch((0, -height), 1, height, boxstyle="round,pad=0,rounding_size=0.02", mutation_aspect=height)
    frame.set(facecolor="white", edgecolor=LINE, linewidth=1.2)
    axis.add_patch(frame)
    about = f"{len(node)} rank{'s' * (len(node) != 1)}, {node[0].node_cpus} hardware threads"
    axis.text(0.03, -0.5, node[0].host, va="center", ha="left", fontsize=11, fontweight="bold")
    wrong = wrong_on(node)
    groups = _groups(node)
    colour = LINE
    if len(groups) > MOST_BARS:
        about = f"{few(name_ranks([place.rank for place in node]).split(', '))}, {node[0].node_cpus} hardware threads"
        if wrong.gpus or wrong.threads:
            about += ", GPUs shared" * bool(wrong.gpus) + ", too many threads" * bool(wrong.threads)
            colour = RED
    axis.text(0.97, -0.5, about, va="center", ha="right", fontsize=8, color=colour)
    if len(groups) <= MOST_BARS:
        for number, group in enumerate(groups):
            _bar(axis, group, -1.0 - number, wrong)
    else:
        _grid(axis, node, wrong)
    if link is not None:
        one, other = link.ranks
        text = f"link between ranks {one} and {other}: {in_microseconds(link.latency)}, {in_rate(link.bandwidth)}"
        axis.text(0.03, -height + 0.4, text, va="center", ha="left", fontsize=8, color=LINE)


def _bar(axis: Any, group: list[Place], top: float, wrong: Wrong) -> None:
    """Draw the hardware threads of a node in one line, the threads of a group of ranks in colour; red if they are too few."""
    ranks = {place.rank for place in group}
    first = group[0]
    gpus = {gpus_of(place.gpus) for place in group}
    threads = {threads_of(place) for place in group}
    named = few(compress_ranks(ranks).split(", "))
    texts = [(f"rank{'s' * (len(ranks) != 1)} {named}", 8.5, bool(ranks & wrong.cores))]
    if gpus != {""}:
        texts.append((f"GPU {gpus.pop()}" if len(gpus) == 1 else "different GPUs", 7, bool(ranks & wrong.gpus)))
    text = f"threads: {threads.pop()}" if len(threads) == 1 else "threads: differ"
    texts.append((text, 7, bool(ranks & wrong.threads)))
    for number, (text, size, is_red) in enumerate(texts):
        y = top - (number + 0.5) / len(texts)
        axis.text(0.03, y, text, va="center", ha="left", fontsize=size, color=RED if is_red else "black")
    wide, used = first.node_cpus, set(first.cpus)
    colour = RED if ranks & wrong.cores else _colour(first.local_rank)
    width = 0.57 / wide
    for start, count, inside in _runs(wide, used):
        _cell(axis, 0.4 + start * width, top - 0.85, count * width, 0.7, colour if inside else GREY)
        text = str(start) if count == 1 else f"{start}-{start + count - 1}"
        if wide <= ACROSS or count * width > 0.02 * len(text):
            x = 0.4 + (start + count / 2) * width
            axis.text(x, top - 0.5, text, va="center", ha="center", fontsize=6.5, color="black" if inside else LINE)


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


def _grid(axis: Any, node: list[Place], wrong: Wrong) -> None:
    """Draw the hardware threads of a node in lines, each with the local rank that may run there, or the number of ranks."""
    there: dict[int, list[Place]] = {}
    for place in node:
        for cpu in place.cpus:
            there.setdefault(cpu, []).append(place)
    for cpu in range(node[0].node_cpus):
        places = there.get(cpu, [])
        x, y = 0.03 + (cpu % ACROSS) * 0.94 / ACROSS, -2.0 - cpu // ACROSS
        colour = GREY if not places else _colour(places[0].local_rank)
        if any(place.rank in wrong.cores for place in places):
            colour = RED
        _cell(axis, x, y, 0.94 / ACROSS, 0.85, colour)
        if places:
            text = str(places[0].local_rank) if len(places) == 1 else f"{len(places)}x"
            axis.text(x + 0.47 / ACROSS, y + 0.42, text, va="center", ha="center", fontsize=6.5)


def _cell(axis: Any, x: float, y: float, width: float, height: float, colour: str) -> None:
    from matplotlib.patches import Rectangle

    axis.add_patch(Rectangle((x, y), max(width * 0.88, width - 0.005), height, facecolor=colour, linewidth=0))


def _colour(local_rank: int) -> str:
    return COLOURS[local_rank % len(COLOURS)]


# --- links ----------------------------------------------------------------------------------------------------------


def _heat(figure: Any, axis: Any, job: JobMap, values: NDArray[np.float64], title: str, colours: str) -> None:
    """Draw a matrix of nodes as a heat map."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.patches import Rectangle

    hosts = job.hosts
    if len(hosts) <= MOST_NODES:
        ranks = [name_ranks([place.rank for place in node]) for node in job.nodes()]
        hosts = [f"{host}\n{few(where.split(', '))}" for host, where in zip(hosts, ranks, strict=True)]
    known = values[~np.isnan(values)]
    low, high = float(known.min()), float(known.max())
    # Figures within a node and between nodes differ by a factor of ten or more.
    scale = LogNorm(low, high) if high > 8 * low else Normalize(0, high)
    shades = colormaps[colours].with_extremes(bad=GREY)
    image = axis.imshow(np.ma.masked_invalid(values), cmap=shades, norm=scale, interpolation="nearest")
    axis.set_title(title, fontsize=11)
    if len(hosts) <= MOST_LABELS:
        ticks = range(len(hosts))
        longest = max(len(line) for host in hosts for line in host.splitlines())
        axis.set_xticks(ticks, hosts, rotation=45 if longest * len(hosts) > 45 else 0, fontsize=8.5)
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
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.yaxis.get_major_locator().set_params(integer=True)
    for link in slow_links(job):
        for x, y in (link.nodes, link.nodes[::-1]):
            axis.add_patch(Rectangle((x - 0.47, y - 0.47), 0.94, 0.94, fill=False, edgecolor=RED, linewidth=2))
    axis.tick_params(length=0)
    for side in axis.spines.values():
        side.set_visible(False)
    bar = figure.colorbar(image, ax=axis, shrink=0.85)
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    bar.ax.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if high < 50 * low else "")
    bar.ax.tick_params(labelsize=8, which="both")
