"""The picture of `mpicoll bench`: for each operation the time by size, and the ratio to raw MPI."""

from __future__ import annotations

import io
import statistics
from typing import Any

from mpicoll.cli.bench.measure import CONFIGS, GLOO, Measured, Results
from mpicoll.cli.bench.table import in_bytes, ratio, raw_time

COLOURS = dict(
    zip(
        [*(config.name for config in CONFIGS), GLOO],
        ("#9aa5b1", "#7b61ff", "#d64541", "#f2a33a", "#1f8a70", "#3b82c4"),
        strict=True,
    )
)
RAW = "#20252b"
TICKS = (0.25, 0.5, 1, 2, 4, 8, 16, 32)


def draw(results: Results, kind: str = "png") -> bytes:
    """Return a picture of the results in a format of matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ops = [op for op in dict.fromkeys(each.op for each in results.measured) if op != "barrier"]
    columns = min(4, len(ops))
    lines = -(-len(ops) // columns)
    figure = Figure(figsize=(max(3.6 * columns + 0.6, 7.8), 4.4 * lines + 1.3), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(2 * lines, columns, squeeze=False, gridspec_kw={"height_ratios": [3, 2] * lines})
    for number, op in enumerate(ops):
        line, column = divmod(number, columns)
        of = sorted((each for each in results.measured if each.op == op), key=lambda each: each.nbytes)
        _times(axes[2 * line][column], op, of)
        _ratios(axes[2 * line + 1][column], of)
        if column == 0:
            axes[2 * line][column].set_ylabel("µs a call")
            axes[2 * line + 1][column].set_ylabel("x raw MPI")
    for number in range(len(ops), lines * columns):
        line, column = divmod(number, columns)
        axes[2 * line][column].axis("off")
        axes[2 * line + 1][column].axis("off")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4), frameon=False, fontsize=9)
    about = results.about
    figure.suptitle(
        f"{results.ranks} ranks on {results.nodes} node{'s' * (results.nodes != 1)}, {about['MPI']}\n{about['processor']}",
        fontsize=11,
        fontweight="bold",
    )
    drawn = io.BytesIO()
    figure.savefig(drawn, format=kind, dpi=110)
    return drawn.getvalue()


def _names(of: list[Measured]) -> list[str]:
    return [name for name in COLOURS if name in of[0].ours]


def _times(axis: Any, op: str, of: list[Measured]) -> None:
    sizes = [each.nbytes for each in of]
    axis.plot(
        sizes, [statistics.median(each.copy) for each in of], color="#c3cad2", lw=1, ls=":", label="one copy of memory"
    )
    axis.plot(sizes, [raw_time(each) for each in of], color=RAW, lw=2.2, marker="o", ms=3, label="raw mpi4py")
    for name in _names(of):
        # Ratios to the raw time of the same rounds: other load of the machine at that time cancels out.
        times = [ratio(each, name)[0] * raw_time(each) for each in of]
        axis.plot(sizes, times, color=COLOURS[name], lw=1.3, marker="o", ms=2.5, label=name)
    axis.set(xscale="log", yscale="log", title=op)
    _sizes(axis, sizes, labels=False)


def _ratios(axis: Any, of: list[Measured]) -> None:
    sizes = [each.nbytes for each in of]
    axis.axhline(1, color=RAW, lw=1.2)
    axis.axhspan(0.01, 1, color="#1f8a70", alpha=0.06, lw=0)
    for name in _names(of):
        found = [ratio(each, name) for each in of]
        axis.plot(sizes, [half for half, _, _ in found], color=COLOURS[name], lw=1.3, marker="o", ms=2.5)
        axis.fill_between(
            sizes, [low for _, low, _ in found], [high for _, _, high in found], color=COLOURS[name], alpha=0.12, lw=0
        )
    axis.set(xscale="log", ylim=(0.25, 32))
    axis.set_yscale("log", base=2)
    axis.set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
    _sizes(axis, sizes, labels=True)


def _sizes(axis: Any, sizes: list[int], *, labels: bool) -> None:
    shown = sizes[:: max(1, len(sizes) // 4)]
    axis.set_xticks(shown, [in_bytes(size) if labels else "" for size in shown], fontsize=7.5)
    axis.minorticks_off()
    axis.grid(alpha=0.25, lw=0.6)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
