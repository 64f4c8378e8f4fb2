"""The map of a running job: for each rank its node, cores and GPUs, and the links between the nodes.

Every rank of the job runs `show_map` and reads the facts of its own process; collectives gather them.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from mpicoll.cli.job.links import Link
from mpicoll.diagnosis.report.entries import compress_ranks

MOST_ROWS = 64
"""The most ranks that have a row each; in larger jobs nodes with the same facts share a row."""

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_GIVEN = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")


@dataclass(frozen=True)
class Place:
    """The place of one rank.

    Attributes:
        rank: rank in the job.
        node: number of the rank's node.
        local_rank: rank among the ranks of the node.
        host: name of the node.
        pid: process id on the node.
        cpus: hardware threads that the rank may run on.
        cores: the cores of these threads, each named by its lowest hardware thread.
        node_cpus: number of hardware threads of the node.
        gpus: the devices that the rank may see, as a variable names them; None if there is no such variable.
        own_gpus: whether Slurm gives each task devices of its own, which are numbered from 0 in each task.
        models: the GPUs of the node, by model.
        threads: the variables that limit the threads of a library, as they are set.
    """

    rank: int
    node: int
    local_rank: int
    host: str
    pid: int
    cpus: tuple[int, ...]
    cores: tuple[int, ...]
    node_cpus: int
    gpus: tuple[str, ...] | None = None
    own_gpus: bool = False
    models: tuple[str, ...] = ()
    threads: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class JobMap:
    """The facts about a job.

    Attributes:
        places: the places of the ranks, in the order of ranks.
        links: the links that were measured.
        library: the MPI library and its version.
        launcher: the launcher of the ranks.
        pairs: number of pairs of nodes.
    """

    places: tuple[Place, ...]
    links: tuple[Link, ...] = ()
    library: str = ""
    launcher: str = ""
    pairs: int = 0

    @property
    def hosts(self) -> list[str]:
        """The names of the nodes, by number."""
        named = {place.node: place.host for place in self.places}
        return [named[node] for node in sorted(named)]

    def nodes(self) -> list[list[Place]]:
        """Return the ranks of each node."""
        found: dict[int, list[Place]] = defaultdict(list)
        for place in self.places:
            found[place.node].append(place)
        return [found[node] for node in sorted(found)]


def place_here(rank: int, node: int, local_rank: int, environ: Mapping[str, str] = os.environ) -> Place:
    """Return the place of this process."""
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    variable = next((name for name in (*_VISIBLE, *_GIVEN) if name in environ), None)
    gpus = None if variable is None else tuple(part for part in environ[variable].split(",") if part.strip())
    return Place(
        rank,
        node,
        local_rank,
        os.uname().nodename,
        os.getpid(),
        cpus,
        tuple(sorted({_core(cpu) for cpu in cpus})),
        os.cpu_count() or len(cpus),
        gpus,
        "SLURM_GPUS_PER_TASK" in environ or "gres/gpu" in environ.get("SLURM_TRES_PER_TASK", ""),
        _models(),
        {name: environ[name] for name in _THREADS if name in environ},
    )


def _core(cpu: int) -> int:
    """Return the lowest hardware thread of a core."""
    try:
        text = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return cpu
    return min(int(number) for number in re.findall(r"\d+", text))


def _models() -> tuple[str, ...]:
    """Return the models of this node's NVIDIA GPUs, from the driver's files; no program is started."""
    found = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        try:
            model = re.search(r"Model:\s*(.+)", path.read_text(errors="replace"))
        except OSError:
            continue
        found.append(model.group(1).strip() if model else "NVIDIA GPU")
    return tuple(found)


@dataclass(frozen=True)
class Row:
    """One line of the map: a rank, or ranks with the same facts."""

    ranks: str
    node: str
    local: str
    pid: str
    cores: str
    gpus: str
    threads: str


def rows(job: JobMap) -> list[Row]:
    """Return the lines of the map: one for each rank, or in a large job one for all nodes with the same facts."""
    if len(job.places) <= MOST_ROWS:
        return [
            Row(
                str(place.rank),
                place.host,
                str(place.local_rank),
                str(place.pid),
                _cores(place),
                gpus_of(place.gpus),
                threads_of(place),
            )
            for place in job.places
        ]
    alike: dict[object, list[list[Place]]] = defaultdict(list)
    for node in job.nodes():
        shape = tuple((place.cpus, place.node_cpus, place.gpus, tuple(place.threads.items())) for place in node)
        alike[shape].append(node)
    return [_joint(nodes) for nodes in alike.values()]


def _joint(nodes: Sequence[Sequence[Place]]) -> Row:
    """Return the line of nodes with the same facts."""
    first = nodes[0]
    ranks = [place.rank for node in nodes for place in node]
    masks = {place.cpus for place in first}
    union = compress_ranks({cpu for mask in masks for cpu in mask})
    sizes = sorted({len(mask) for mask in masks})
    each = f"{' or '.join(map(str, sizes))} each of {union}"
    cores = _cores(first[0]) if len(masks) == 1 else each
    seen = {place.gpus for place in first}
    gpus = gpus_of(first[0].gpus) if len(seen) == 1 else f"{len(seen)} different"
    threads = {threads_of(place) for place in first}
    return Row(
        few(compress_ranks(ranks).split(", ")),
        few([node[0].host for node in nodes]) + (f" ({len(nodes)} nodes)" if len(nodes) > 1 else ""),
        compress_ranks([place.local_rank for place in first]),
        "",
        cores,
        gpus,
        threads.pop() if len(threads) == 1 else "differ",
    )


def few(words: Sequence[str]) -> str:
    """Return names in one line; of more than four names the middle ones are left out."""
    return ", ".join(words) if len(words) <= 4 else f"{words[0]}, {words[1]}, ..., {words[-1]}"


def _cores(place: Place) -> str:
    text = compress_ranks(place.cpus)
    return f"all ({text})" if len(place.cpus) == place.node_cpus else text


def gpus_of(gpus: tuple[str, ...] | None) -> str:
    """Return the GPUs that a rank may see, in one line."""
    return "" if gpus is None else ", ".join(gpus) or "none"


def threads_of(place: Place) -> str:
    """Return the limits of a rank's threads, in one line."""
    limits = (f"{name.removesuffix('_NUM_THREADS')} {value}" for name, value in place.threads.items())
    return ", ".join(limits) or "not set"


def link_rows(job: JobMap) -> list[tuple[str, str, str, str]]:
    """Return for each measured link its ends, ranks, latency and bandwidth; of many links the median and the worst."""
    if len(job.links) <= MOST_ROWS // 2:
        return [
            (
                link_ends(job, link),
                f"{link.ranks[0]}, {link.ranks[1]}",
                in_microseconds(link.latency),
                in_rate(link.bandwidth),
            )
            for link in job.links
        ]
    found = []
    for inside, title in ((True, "within nodes"), (False, "between nodes")):
        links = [link for link in job.links if (link.nodes[0] == link.nodes[1]) == inside]
        if links:
            latency, bandwidth = [link.latency for link in links], [link.bandwidth for link in links]
            found += [
                (f"{title}, median of {len(links)}", "", in_microseconds(median(latency)), in_rate(median(bandwidth))),
                (f"{title}, worst", "", in_microseconds(max(latency)), in_rate(min(bandwidth))),
            ]
    return found


def link_ends(job: JobMap, link: Link) -> str:
    """Return the two ends of a link, by the names of the nodes."""
    hosts = job.hosts
    one, other = link.nodes
    return f"within {hosts[one]}" if one == other else f"{hosts[one]} - {hosts[other]}"


def in_microseconds(seconds: float) -> str:
    """Return a time with its unit: us or ms."""
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def in_rate(bandwidth: float) -> str:
    """Return a bandwidth with its unit: MB/s or GB/s."""
    return f"{bandwidth / 1e9:.3g} GB/s" if bandwidth >= 1e8 else f"{bandwidth / 1e6:.3g} MB/s"
