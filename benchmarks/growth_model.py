"""Tell what calls cost on up to 10,000 ranks: a LogGP model whose constants come from what ``growth.py`` has measured.

    python benchmarks/growth_model.py FILE.json [--plot FILE.png]
    python benchmarks/growth_model.py FILE.json --markdown
    python benchmarks/growth_model.py FILE.json --update docs/performance.md

Prints what was measured, the constants and the model's costs; ``--plot`` draws them; ``--markdown`` prints the tables of the
documentation, and ``--update`` puts them between their marks in a file.

The model is LogGP (Alexandrov, Ionescu, Schauser, Scheiman: "LogGP: Incorporating Long Messages into the LogP Model", SPAA
1995): a message of k bytes takes o + (k - 1) G + L + o, and a port sends one message each g at most. Assumed:

- Nodes of 64 ranks, one rank a core, ranks placed node by node, one network port a node which its ranks share.
- Small all-reduces and barriers: recursive doubling, ceil(log2) levels on the node and then between nodes. Where an MPI goes up
  and down a tree instead it takes twice the levels.
- 1 MiB: Rabenseifner's algorithm, recursive halving and doubling, on the node first (Thakur, Rabenseifner, Gropp:
  "Optimization of Collective Communication Operations in MPICH", 2005): twice the levels, and each byte out of a node and into
  it twice at most.
- No contention in the network beyond the port, no noise of the system, and all members come at the same time.
- The network is one like InfiniBand of 100 Gb/s: see ``Network``.
- mpicoll on one node: what two ranks take, and for each further member the time in which a record is looked at (measured),
  and the ``LINE`` in which its cache lines come from another core (assumed). Data of 1 MiB is copied through shared memory, at
  the speed per byte of two ranks and at most at ``MEMORY`` for the whole node (assumed); each of its steps looks at all members.
- mpicoll on several nodes: a constant, which is what two ranks take when all goes through MPI, less the levels in it; one MAX
  all-reduce of 112 bytes, polled; and, but for the barrier, the data's own MPI call.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpicoll.cli.bench.table import in_bytes

BARRIER, SMALL, LARGE = CALLS = ("barrier", "all_reduce 8 B", "all_reduce 1 MiB")
BYTES = {BARRIER: 0, SMALL: 8, LARGE: 1 << 20}
ROUND = 112
"""Bytes of the all-reduce in which members on several nodes agree."""
NODE = 64
"""Ranks of a node; as many as make their rounds through shared memory."""
LINE = 0.1
"""Microseconds in which a cache line comes from another core."""
LINES = {BARRIER: 2, SMALL: 3, LARGE: 2}
"""Cache lines that are read of each member: its record of 128 bytes, and what stands beside it."""
MEMORY = 200e3
"""Bytes a microsecond that the memory and the caches of a node move for all its ranks together."""
SHM = 256 << 20
"""Bytes of MPICOLL_SHM_MB."""
RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096, 10_000)

RAW, OURS, MPI_WAY = "#20252b", "#d64541", "#7b61ff"


@dataclass(frozen=True)
class Network:
    """The network between nodes, in microseconds, and per byte.

    Defaults: 2 us for a step between two ranks (o + L + o). Ping-pongs of vendors say 1.0 to 1.3 us (QLogic's manual of an
    InfiniBand adapter prints 1.26); a step of an all-reduce in a busy MPI takes more. 12.5 GB/s is the line rate of 100 Gb/s,
    and 100 million messages a second a port half of what vendors quote.
    """

    latency: float = 1.2  # L
    overhead: float = 0.4  # o
    gap: float = 0.01  # g, of a port
    per_byte: float = 1 / 12.5e3  # G

    def level(self, nbytes: int, sharing: int) -> float:
        """Return the cost of one level in which as many ranks of a node send so many bytes through its port."""
        one = 2 * self.overhead + self.latency + max(0, nbytes - 1) * self.per_byte
        return one + (sharing - 1) * max(self.gap, nbytes * self.per_byte)


@dataclass(frozen=True)
class Constants:
    """What was measured of one MPI library, in microseconds.

    Attributes:
        start, step: a raw call takes ``start + step * levels`` on one node.
        per_byte: a byte of a large raw call, of 2 n (1 - 1/P) that a rank sends.
        two: what the library takes on two ranks of a node.
        member: what each further member of the node adds.
        added: what the library adds to what MPI does, through MPI alone.
    """

    start: dict[str, float]
    step: dict[str, float]
    per_byte: float
    two: dict[str, float]
    member: dict[str, float]
    added: dict[str, float] = field(default_factory=dict)


def levels(ranks: int) -> tuple[int, int]:
    """Return the levels on a node and between nodes."""
    nodes = -(-ranks // NODE)
    return math.ceil(math.log2(min(ranks, NODE))), math.ceil(math.log2(nodes))


def small(constants: Constants, network: Network, call: str, ranks: int, nbytes: int) -> float:
    """Return the cost of the levels of a small all-reduce or a barrier of MPI."""
    near, far = levels(ranks)
    return constants.step[call] * near + network.level(nbytes, min(ranks, NODE)) * far


def raw(constants: Constants, network: Network, call: str, ranks: int) -> float:
    """Return the cost of a raw call of MPI."""
    if call != LARGE:
        return constants.start[call] + small(constants, network, call, ranks, BYTES[call])
    near, far = levels(ranks)
    local, nodes = min(ranks, NODE), -(-ranks // NODE)
    sent = 2 * BYTES[call] * (1 - 1 / local)
    on_node = max(sent * constants.per_byte, 2 * local * sent / MEMORY)
    between = 2 * BYTES[call] * (1 - 1 / nodes) * network.per_byte
    return 2 * (constants.step[SMALL] * near + network.level(0, local) * far) + on_node + between


def room(ranks: int) -> int:
    """Return the bytes of a buffer of the node engine."""
    return min(1024 << 10, max(32 << 10, SHM // ranks // 16)) // 4096 * 4096


def ours(constants: Constants, network: Network, call: str, ranks: int) -> float:
    """Return the cost of a call of mpicoll at level full."""
    if ranks > NODE:
        round_ = small(constants, network, SMALL, ranks, ROUND)
        return constants.added[call] + round_ + (0 if call == BARRIER else raw(constants, network, call, ranks))
    further = (ranks - 2) * (constants.member[call] + LINE * LINES[call])
    if call != LARGE:
        return constants.two[call] + further
    nbytes = BYTES[call]
    per_byte = (constants.two[LARGE] - constants.two[BARRIER]) / (2 * nbytes)
    if ranks == 2:
        return constants.two[LARGE]
    moved = nbytes * (3 * (1 - 1 / ranks) + 1 / ranks)
    steps = 2 * -(-nbytes // room(ranks))
    looking = (ranks - 1) * (constants.member[call] + LINE)
    return constants.two[BARRIER] + further + max(moved * per_byte, ranks * moved / MEMORY) + steps * looking


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the start and the slope of the line with the least squares of relative errors; one point: through zero."""
    if len({x for x, _ in points}) == 1:
        return 0.0, statistics.median(y / x for x, y in points)
    weights = [1 / y**2 for _, y in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    over = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    slope = over / sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    return mean_y - slope * mean_x, slope


def time_of(times: dict[str, list[float]], how: str) -> float:
    """Return the median of a call's times: ``raw``, of all rounds, or how the library made it."""
    if how == "raw":
        return statistics.median(value for name, values in times.items() if name.startswith("raw/") for value in values)
    return statistics.median(times[how])


def fit(runs: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]] = ()) -> Constants:
    """Return the constants of one MPI library, from its runs with at most one rank a core.

    Args:
        runs: of this library.
        others: runs with any library: what one process reads does not depend on it, and others can only add to it.

    Raises:
        ValueError: there is none of two ranks.
    """
    quiet = [run for run in runs if 2 <= run["ranks"] <= run["about"]["cores"]]
    two = next((run["calls"] for run in quiet if run["ranks"] == 2), None)
    if two is None:
        raise ValueError("no run of two ranks on two cores or more: mpicoll run -n 2 benchmarks/growth.py --json FILE")
    lines = {
        call: fit_line([(math.log2(run["ranks"]), time_of(run["calls"][call], "raw")) for run in quiet])
        for call in (BARRIER, SMALL)
    }
    step = {call: slope for call, (_, slope) in lines.items()}
    per_byte = statistics.median(
        max(0.0, time_of(run["calls"][LARGE], "raw") - 2 * math.log2(run["ranks"]) * step[SMALL])
        / (2 * BYTES[LARGE] * (1 - 1 / run["ranks"]))
        for run in quiet
    )
    readings = [run["reading"] for run in (*quiet, *others) if run["ranks"] <= run["about"]["cores"]]
    member = {
        what: fit_line([(int(size), min(min(of[size][what]) for of in readings)) for size in readings[0]])[1]
        for what in ("barrier", "all_reduce")
    }
    through = {call: time_of(two[call], "through MPI") for call in CALLS}
    return Constants(
        start={call: start for call, (start, _) in lines.items()},
        step=step,
        per_byte=per_byte,
        two={call: time_of(two[call], "full") for call in CALLS},
        member={BARRIER: member["barrier"], SMALL: member["all_reduce"], LARGE: member["barrier"]},
        added={
            BARRIER: max(0.0, through[BARRIER] - step[SMALL]),
            SMALL: max(0.0, through[SMALL] - time_of(two[SMALL], "raw") - step[SMALL]),
            LARGE: max(0.0, through[LARGE] - time_of(two[LARGE], "raw/through MPI") - step[SMALL]),
        },
    )


def by_library(runs: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of each MPI library by the number of ranks; of several of the same number the last counts.

    One without sizes leaves those that were timed before.
    """
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for run in runs:
        known = found.setdefault(run["about"]["MPI"], {})
        before = known.get(run["ranks"], run)
        sized = run if run["sizes"] else before
        about = sized.get("sizes_about", sized["about"])
        known[run["ranks"]] = {**run, "sizes": sized["sizes"], "sizes_about": about}
    return {name: [of[ranks] for ranks in sorted(of)] for name, of in sorted(found.items())}


Table = list[list[str]]


def digits(value: float) -> str:
    """Return a time with as many digits as mean something."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def spread(values: Sequence[float]) -> str:
    """Return the median and, in brackets, the quartiles."""
    low, half, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{digits(half)} ({digits(low)} to {digits(high)})"


def short(library: str) -> str:
    """Return ``Open MPI 5.0.11`` or ``MPICH 5.0.2``."""
    return re.sub(r"\s*(?:v|Version: )(?=\d)", " ", library)


def ratios(times: dict[str, list[float]], how: str) -> list[float]:
    """Return how many times as long as the raw call a call takes, round by round."""
    return [ours / raw for ours, raw in zip(times[how], times[f"raw/{how}"], strict=True)]


def machine_table(libraries: dict[str, list[dict[str, Any]]]) -> Table:
    """Return where the runs were made, and their commands."""
    names = ("command", "processor", "cores", "mpi4py", "numpy", "Python", "date")
    rows = [["MPI", *names]]
    for library, runs in libraries.items():
        for run in runs:
            for about in [run["about"]] + [run["sizes_about"]] * (run["sizes_about"] != run["about"]):
                command, *rest = (str(about.get(name, "")) for name in names)
                rows.append([short(library), f"`{command}`", *rest])
    return rows


def others(times: dict[str, list[float]]) -> str:
    """Return the share of the machine that other programs took."""
    return f"{times['others'][0]:.0%}".replace("%", " %")


def ranks_table(libraries: dict[str, list[dict[str, Any]]]) -> Table:
    """Return the cost against ranks, as measured."""
    rows = [["MPI", "ranks", "call", "raw, us", "`full`, us", "times raw", "through MPI, us", "times raw", "others"]]
    for library, runs in libraries.items():
        for run in runs:
            turns = " (in turns)" if run["ranks"] > run["about"]["cores"] else ""
            for call, times in run["calls"].items():
                cells = [spread([v for name, of in times.items() if name.startswith("raw/") for v in of])]
                for how in ("full", "through MPI"):
                    cells += [spread(times[how]), f"{statistics.median(ratios(times, how)):.2f}"]
                rows.append([short(library), f"{run['ranks']}{turns}", call, *cells, others(times)])
    return rows


def sizes_table(libraries: dict[str, list[dict[str, Any]]]) -> Table:
    """Return the cost against size, as measured."""
    rows = [["MPI", "ranks", "size", "raw, us", "`full`, us", "times raw", "`full`, GB/s", "others"]]
    for library, runs in libraries.items():
        for run in runs:
            for size, times in run["sizes"].items():
                rate = int(size) / statistics.median(times["full"]) / 1e3
                cells = [
                    spread(times["raw/full"]),
                    spread(times["full"]),
                    f"{statistics.median(ratios(times, 'full')):.2f}",
                ]
                rows.append(
                    [short(library), str(run["ranks"]), in_bytes(int(size)), *cells, f"{rate:.2g}", others(times)]
                )
    return rows


def memory_table(libraries: dict[str, list[dict[str, Any]]]) -> Table:
    """Return what the library adds to the memory of a rank, as measured."""
    rows = [["MPI", "ranks", "after", "a rank adds", "of it shared memory", "files of the job in /dev/shm"]]
    for library, runs in libraries.items():
        for run in runs:
            first = run["memory"][0]["resident"]
            for stage in run["memory"][1:]:
                added, shared = (stage["resident"][name] - first[name] for name in ("VmRSS", "RssShmem"))
                files = sum(stage["files"].values()) >> 10
                cells = [f"{value / 1024:.1f} MiB" for value in (added, shared, files)]
                rows.append([short(library), str(run["ranks"]), stage["after"], *cells])
    return rows


def constants_table(fitted: dict[str, Constants], network: Network) -> Table:
    """Return the constants of the model, and where they are from."""
    rows = [["constant", *map(short, fitted), "where from"]]

    def add(name: str, values: list[str], where: str) -> None:
        rows.append([name, *values, where])

    of = list(fitted.values())
    for call in (BARRIER, SMALL):
        add(f"a level on a node, {call}", [f"{c.step[call]:.2f} us" for c in of], "fitted: raw calls")
    add("a byte on a node", [f"{c.per_byte * 1e3:.3f} ns" for c in of], "fitted: raw calls of 1 MiB")
    for call in CALLS:
        add(f"`full` on two ranks, {call}", [f"{digits(c.two[call])} us" for c in of], "measured")
    for call, name in ((BARRIER, "a record read"), (SMALL, "a record read, and 8 bytes reduced")):
        add(name, [f"{c.member[call]:.2f} us" for c in of], "fitted: one process, 2 to 64 members, the fastest rounds")
    for call in CALLS:
        add(f"added on several nodes, {call}", [f"{digits(c.added[call])} us" for c in of], "two ranks through MPI")
    same = [""] * (len(of) - 1)
    for name, value in (
        ("L", f"{network.latency:g} us"),
        ("o", f"{network.overhead:g} us"),
        ("g of a port", f"{network.gap:g} us"),
        ("G", f"{network.per_byte * 1e3:.3g} ns a byte"),
        ("a cache line from another core", f"{LINE:g} us"),
        ("memory of a node", f"{MEMORY / 1e3:g} GB/s"),
    ):
        add(name, [value, *same], "assumed")
    return rows


def model_table(fitted: dict[str, Constants], network: Network) -> Table:
    """Return what the model says."""
    rows = [["MPI", "ranks", "nodes", *(f"{call}: {who}" for call in CALLS for who in ("raw", "`full`"))]]
    for library, constants in fitted.items():
        for ranks in RANKS:
            cells = [digits(of(constants, network, call, ranks)) for call in CALLS for of in (raw, ours)]
            rows.append([short(library), f"{ranks:,}", str(-(-ranks // NODE)), *cells])
    return rows


def markdown(rows: Table) -> str:
    """Return a table in Markdown; a first cell that is that of the row above is left empty."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    last = ""
    for first, *rest in rows[1:]:
        lines.append("| " + " | ".join(["" if first == last else first, *rest]) + " |")
        last = first
    return "\n".join(lines)


def update(text: str, tables: dict[str, Table]) -> str:
    """Put each table between its marks, ``<!-- growth: NAME -->`` and ``<!-- end -->``."""
    for name, rows in tables.items():
        mark, end = f"<!-- growth: {name} -->\n", "\n<!-- end -->"
        before, found, rest = text.partition(mark)
        if found:
            text = before + mark + markdown(rows) + end + rest.partition(end)[2]
    return text


def draw(libraries: dict[str, list[dict[str, Any]]], fitted: dict[str, Constants], network: Network, path: str) -> None:
    """Draw cost against ranks, measured and by the model; the file's ending says in which format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.4, 3.7 * len(fitted) + 1.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(len(fitted), len(CALLS), squeeze=False, sharex=True, sharey="col")
    for line, (library, constants) in enumerate(fitted.items()):
        for column, call in enumerate(CALLS):
            _panel(axes[line][column], libraries[library], constants, network, call)
            if not line:
                axes[line][column].set_title(call, fontsize=11)
            if line == len(fitted) - 1:
                axes[line][column].set_xlabel("ranks")
        axes[line][0].set_ylabel(f"{short(library)}\n\nµs a call")
    handles, labels = axes[0][0].get_legend_handles_labels()
    order = [place + half for place in range(len(handles) // 2) for half in (0, len(handles) // 2)]  # raw above ours
    handles, labels = ([of[i] for i in order] for of in (handles, labels))
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.suptitle("Cost against ranks: raw mpi4py, and mpicoll with all checks", fontsize=12, fontweight="bold")
    figure.savefig(path, dpi=120)


def _panel(axis: Any, runs: list[dict[str, Any]], constants: Constants, network: Network, call: str) -> None:

    from matplotlib.ticker import LogLocator

    near, far = (range(2, NODE + 1), sorted({round(NODE * 1.02**i) + 1 for i in range(257)} & set(range(65, 10_001))))
    both = ((raw, "raw", RAW, "raw mpi4py"), (ours, "full", OURS, "mpicoll, full"))
    axis.axvspan(1.6, NODE, color="#1f8a70", alpha=0.06, lw=0)
    for of, how, colour, name in both:
        for ranks in (near, far):
            label = f"{name}: the model" if ranks is near else None
            axis.plot(ranks, [of(constants, network, call, n) for n in ranks], color=colour, lw=1.8, label=label)
        for one_a_core in (True, False):
            points = [
                (run["ranks"], time_of(run["calls"][call], how))
                for run in runs
                if (run["ranks"] <= run["about"]["cores"]) == one_a_core
            ]
            axis.plot(
                [x for x, _ in points],
                [y for _, y in points],
                color=colour,
                ls="" if one_a_core else ":",
                lw=0.8,
                marker="o",
                ms=5.5,
                mfc=colour if one_a_core else "white",
                label=f"{name}: measured" + ("" if one_a_core else ", ranks in turns"),
            )
    axis.set(xscale="log", yscale="log", xlim=(1.6, 13_000))
    axis.set_xticks([2, 8, 64, 1000, 10_000], ["2", "8", "64", "1,000", "10,000"], fontsize=8)
    axis.minorticks_off()
    axis.grid(alpha=0.25, lw=0.6)
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if call == LARGE else (1,)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axis.tick_params(axis="y", labelsize=8)
    for x, text, colour in ((11, "one node", "#1f8a70"), (800, "several nodes", "#5b6570")):
        axis.text(
            x, 0.02, text, transform=axis.get_xaxis_transform(), ha="center", va="bottom", fontsize=8, color=colour
        )
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def main() -> None:
    """Print, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path, help="what growth.py --json has written")
    parser.add_argument("--latency", type=float, default=Network.latency, help="L, us (default: %(default)s)")
    parser.add_argument("--overhead", type=float, default=Network.overhead, help="o, us (default: %(default)s)")
    parser.add_argument("--gap", type=float, default=Network.gap, help="g of a port, us (default: %(default)s)")
    parser.add_argument("--gigabytes", type=float, default=12.5, help="1/G, GB/s (default: %(default)s)")
    parser.add_argument("--plot", metavar="FILE", help="draw it (PNG, SVG or PDF; needs matplotlib)")
    parser.add_argument("--markdown", action="store_true", help="print the tables of the documentation")
    parser.add_argument("--update", metavar="FILE", type=Path, help="put the tables between their marks in a file")
    options = parser.parse_args()
    network = Network(options.latency, options.overhead, options.gap, 1 / (options.gigabytes * 1e3))
    libraries = by_library(json.loads(options.file.read_text()))
    everything = [run for runs in libraries.values() for run in runs]
    fitted = {library: fit(runs, everything) for library, runs in libraries.items()}
    tables = {
        "machine": machine_table(libraries),
        "ranks": ranks_table(libraries),
        "sizes": sizes_table(libraries),
        "memory": memory_table(libraries),
        "constants": constants_table(fitted, network),
        "model": model_table(fitted, network),
    }
    if options.update:
        options.update.write_text(update(options.update.read_text(), tables))
    elif options.markdown:
        print("\n\n".join(f"<!-- growth: {name} -->\n{markdown(rows)}\n<!-- end -->" for name, rows in tables.items()))
    else:
        for rows in tables.values():
            widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
            print(
                "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows), "\n"
            )
        print(__doc__[__doc__.index("The model is") :] if __doc__ else "")
    if options.plot:
        draw(libraries, fitted, network, options.plot)


if __name__ == "__main__":
    main()
