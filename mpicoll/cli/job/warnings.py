"""Warnings about the places of a job's ranks, each with a remedy. Pure functions of the map."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from mpicoll.cli.job.links import Link
from mpicoll.cli.job.model import JobMap, Place, few, in_microseconds, in_rate, link_ends
from mpicoll.diagnosis.report.entries import compress_ranks, name_ranks


def warnings(job: JobMap) -> list[str]:
    """Return the warnings about a job, each with its remedy."""
    found: dict[tuple[str, str], list[tuple[str, list[int]]]] = defaultdict(list)
    for node in job.nodes():
        for problem, remedy, ranks in (*_crowds(node), *_shared_gpus(node), *_too_many_threads(node)):
            found[problem, remedy].append((node[0].host, ranks))
    lines = []
    for (problem, remedy), where in found.items():
        ranks = [rank for _, some in where for rank in some]
        lines.append(f"{few([host for host, _ in where])}: {problem} ({name_ranks(ranks)}). {remedy}")
    return lines + _slow(job)


_Problem = tuple[str, str, list[int]]


@dataclass(frozen=True)
class Wrong:
    """The ranks of a node that have a problem: too few cores, a shared GPU, too many threads."""

    cores: frozenset[int]
    gpus: frozenset[int]
    threads: frozenset[int]


def wrong_on(node: Sequence[Place]) -> Wrong:
    """Return the ranks of a node that :func:`warnings` names."""
    return Wrong(
        *(
            frozenset(rank for _, _, ranks in problems for rank in ranks)
            for problems in (_crowds(node), _shared_gpus(node), _too_many_threads(node))
        )
    )


def _crowds(node: Sequence[Place]) -> list[_Problem]:
    """Return the problems of ranks that share fewer cores than there are ranks."""
    masks: dict[tuple[int, ...], list[Place]] = defaultdict(list)
    for place in node:
        masks[place.cores].append(place)
    found: list[_Problem] = []
    for cores, places in masks.items():
        if len(places) <= len(cores):
            continue
        ranks = [place.rank for place in places]
        many = f"{len(places)} ranks have {len(cores)} core{'s' * (len(cores) != 1)}"
        if len(places[0].cpus) == places[0].node_cpus:
            remedy = "Start fewer ranks on a node: waiting ranks take the cores from those that compute"
            found.append((f"{many}, all of the node", remedy, ranks))
        elif len(cores) == 1:
            found.append(
                (
                    f"{many}: all are bound to core {cores[0]}",
                    "Give each a core of its own (srun --cpu-bind=cores -c 1, mpirun --bind-to core), or bind none "
                    "(srun --cpu-bind=none, mpirun --bind-to none)",
                    ranks,
                )
            )
        else:
            remedy = "Ask for as many cores as ranks (sbatch --ntasks-per-node, --cpus-per-task), or bind none"
            found.append((f"{many}, since they are bound to {compress_ranks(cores)}", remedy, ranks))
    return found


def _shared_gpus(node: Sequence[Place]) -> list[_Problem]:
    seen: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for place in node:
        if place.gpus and not place.own_gpus:
            seen[place.gpus].append(place.rank)
    return [
        (
            f"{len(ranks)} ranks share GPU {', '.join(gpus)}",
            "Start one rank for each GPU (srun --gpus-per-task=1, or --ntasks-per-node like --gpus-per-node)",
            ranks,
        )
        for gpus, ranks in seen.items()
        if len(ranks) > len(gpus)
    ]


def _too_many_threads(node: Sequence[Place]) -> list[_Problem]:
    cores = {core for place in node for core in place.cores}
    limits = [_number(place.threads.get("OMP_NUM_THREADS", "")) for place in node]
    wanted = sum(limit or len(place.cores) for limit, place in zip(limits, node, strict=True))
    if len(node) < 2 or wanted <= max(len(cores), len(node)):
        return []  # _crowds reports more ranks than cores
    each = max(1, len(cores) // len(node))
    how = "is not set" if None in limits else "is too large"
    return [
        (
            f"OMP_NUM_THREADS {how}: {len(node)} ranks may make {wanted} threads on {len(cores)} cores",
            f"export OMP_NUM_THREADS={each}",
            [place.rank for place in node],
        )
    ]


def _number(text: str) -> int | None:
    head = text.split(",")[0].strip()
    return int(head) if head.isdigit() else None


def _between(job: JobMap) -> tuple[list[Link], float, float]:
    """Return the links between nodes, their median bandwidth and their median latency."""
    links = [link for link in job.links if link.nodes[0] != link.nodes[1]]
    if len(links) < 3:
        return [], 0.0, 0.0
    return links, median(link.bandwidth for link in links), median(link.latency for link in links)


def slow_links(job: JobMap) -> list[Link]:
    """Return the links between nodes that are much slower than most."""
    links, bandwidth, latency = _between(job)
    return [link for link in links if link.bandwidth < bandwidth / 2 or link.latency > 3 * latency]


def _slow(job: JobMap) -> list[str]:
    """Return warnings about slow links; the cause is unknown."""
    _, *usual = _between(job)
    slow = slow_links(job)
    more = [f"{len(slow) - 8} more links between nodes are as slow"] if len(slow) > 8 else []
    return [
        f"{link_ends(job, link)}: {in_rate(link.bandwidth)} and {in_microseconds(link.latency)}; the median between "
        f"nodes is {in_rate(usual[0])} and {in_microseconds(usual[1])}. Measure again, and ask your site about that link"
        for link in slow[:8]
    ] + more
