"""The map of a job: tables, warnings with their remedies, which links are measured, the matrix of the picture. No MPI."""

from __future__ import annotations

import dataclasses
import html
import math
import os
import re
from collections.abc import Mapping

import pytest

from mpicoll.cli.job.links import MOST_PAIRS, Link, pairs_between, pairs_within
from mpicoll.cli.job.model import JobMap, Place, few, in_microseconds, in_rate, link_rows, place_here, rows
from mpicoll.cli.job.picture import RED, draw, matrix
from mpicoll.cli.job.warnings import warnings

OMP1: Mapping[str, str] = {"OMP_NUM_THREADS": "1"}


def place(rank: int, node: int, local: int, cpus: tuple[int, ...], **more: object) -> Place:
    given = {"node_cpus": 8, "cores": cpus, "threads": OMP1, **more}
    return Place(rank, node, local, f"n{node}", 100 + rank, cpus, **given)  # type: ignore[arg-type]


def job(nodes: int, each: int, links: tuple[Link, ...] = (), **more: object) -> JobMap:
    """Return a job in which every rank has a core of its own."""
    places = [place(n * each + i, n, i, (i,), **more) for n in range(nodes) for i in range(each)]
    return JobMap(tuple(places), links, "Open MPI v5", "openmpi", nodes * (nodes - 1) // 2)


# --- tables ---


def test_a_row_for_each_rank() -> None:
    """A small job has a row for each rank: where it is, its cores, GPUs and threads."""
    places = (
        place(0, 0, 0, (0, 1, 2, 3), gpus=("0",), threads={}),
        place(1, 0, 1, tuple(range(8)), gpus=()),
        place(2, 1, 0, (4, 6)),
    )
    first, second, third = rows(JobMap(places))
    assert (first.ranks, first.node, first.local, first.pid) == ("0", "n0", "0", "100")
    assert (first.cores, first.gpus, first.threads) == ("0-3", "0", "not set")
    assert (second.cores, second.gpus, second.threads) == ("all (0-7)", "none", "OMP 1")
    assert (third.node, third.cores, third.gpus) == ("n1", "4, 6", "")


def test_alike_nodes_of_a_large_job_share_a_row() -> None:
    """A thousand ranks are a few rows: one for all nodes that are alike, one for each that is not."""
    places = list(job(128, 8).places)
    places[80] = place(80, 10, 0, (0, 1))
    alike, other = rows(JobMap(tuple(places)))
    assert (alike.ranks, alike.node) == ("0-79, 88-1023", "n0, n1, ..., n127 (127 nodes)")
    assert (alike.local, alike.cores, alike.threads) == ("0-7", "1 each of 0-7", "OMP 1")
    assert (other.ranks, other.node, other.cores) == ("80-87", "n10", "1 or 2 each of 0-7")


def test_link_rows() -> None:
    """Few links are told one by one, many by median and worst, within nodes and between them apart."""
    near, far = Link((0, 1), (0, 0), 5e-7, 9.5e9), Link((0, 2), (0, 1), 1.2e-3, 2e7)
    assert link_rows(job(2, 2, (near, far))) == [
        ("within n0", "0, 1", "0.5 us", "9.5 GB/s"),
        ("n0 - n1", "0, 2", "1.2 ms", "20 MB/s"),
    ]
    many = tuple(Link((0, n), (0, n), n * 1e-6, 1e9 / n) for n in range(1, 40))
    assert [(row[0], row[2], row[3]) for row in link_rows(job(40, 1, (*many, near)))] == [
        ("within nodes, median of 1", "0.5 us", "9.5 GB/s"),
        ("within nodes, worst", "0.5 us", "9.5 GB/s"),
        ("between nodes, median of 39", "20 us", "50 MB/s"),
        ("between nodes, worst", "39 us", "25.6 MB/s"),
    ]


def test_words() -> None:
    """Times and rates have three digits, long lists their ends."""
    assert in_microseconds(4.5678e-6) == "4.57 us"
    assert in_rate(1.23456e10) == "12.3 GB/s"
    assert few(["a", "b", "c"]) == "a, b, c"
    assert few(["a", "b", "c", "d", "e"]) == "a, b, ..., e"


# --- warnings ---


def test_nothing_is_wrong() -> None:
    """A rank on each core, a GPU for each rank, threads as many as cores: no warning."""
    assert warnings(job(4, 8)) == []
    assert warnings(job(2, 4, gpus=("0", "1", "2", "3"))) == []
    alone = place(0, 0, 0, tuple(range(8)), threads={})
    assert warnings(JobMap((alone,))) == []
    assert warnings(JobMap(())) == []


CROWDED = {
    "one core": ([(0,), (0,)], ["n0: 2 ranks have 1 core: all are bound to core 0 (ranks 0-1)", "--cpu-bind=none"]),
    "two of three": ([(3,), (5,), (3,)], ["all are bound to core 3 (ranks 0, 2)", "--bind-to core"]),
    "a part": ([(0, 1)] * 3, ["3 ranks have 2 cores, since they are bound to 0-1", "--cpus-per-task"]),
    "the node": ([tuple(range(8))] * 9, ["9 ranks have 8 cores, all of the node (ranks 0-8)", "fewer ranks"]),
}


@pytest.mark.parametrize("masks", CROWDED.values(), ids=CROWDED)
def test_more_ranks_than_cores(masks: tuple[list[tuple[int, ...]], list[str]]) -> None:
    """Ranks on too few cores are named, with the reason and the remedy; once."""
    cpus, words = masks
    said = warnings(JobMap(tuple(place(i, 0, i, cpu) for i, cpu in enumerate(cpus))))
    assert len(said) == 1, said
    for word in words:
        assert word in said[0]


def test_two_hardware_threads_of_a_core() -> None:
    """Two ranks on the two hardware threads of one core share a core."""
    places = (place(0, 0, 0, (0,), cores=(0,)), place(1, 0, 1, (4,), cores=(0,)))
    assert "2 ranks have 1 core" in warnings(JobMap(places))[0]


def test_the_same_on_many_nodes_is_said_once() -> None:
    """What is wrong on a hundred nodes is one line."""
    places = tuple(place(2 * n + i, n, i, (0,)) for n in range(100) for i in range(2))
    said = warnings(JobMap(places))
    assert len(said) == 1
    assert said[0].startswith("n0, n1, ..., n99: 2 ranks have 1 core: all are bound to core 0 (ranks 0-199). ")


def test_shared_gpus() -> None:
    """Two ranks that see one GPU share it; not where Slurm numbers each task's own from 0, or where they choose."""
    said = warnings(job(1, 2, gpus=("0",)))
    assert len(said) == 1
    assert "n0: 2 ranks share GPU 0 (ranks 0-1)" in said[0]
    assert "--gpus-per-task=1" in said[0]
    assert warnings(job(1, 2, gpus=("0",), own_gpus=True)) == []
    assert warnings(job(1, 2, gpus=("0", "1"))) == []
    assert "3 ranks share GPU 0, 1" in warnings(job(1, 3, gpus=("0", "1")))[0]
    assert warnings(job(1, 2, gpus=())) == []


def test_too_many_threads() -> None:
    """OMP_NUM_THREADS that is not set, or too large, names the number that fits."""

    def two(threads: Mapping[str, str]) -> list[str]:
        return warnings(JobMap(tuple(place(i, 0, i, tuple(range(8)), threads=threads) for i in range(2))))

    assert two({}) == [
        "n0: OMP_NUM_THREADS is not set: 2 ranks may make 16 threads on 8 cores (ranks 0-1). export OMP_NUM_THREADS=4"
    ]
    assert "is too large: 2 ranks may make 10 threads" in two({"OMP_NUM_THREADS": "5"})[0]
    assert two({"OMP_NUM_THREADS": "4"}) == []
    assert two({"OMP_NUM_THREADS": "4,2"}) == []
    assert warnings(job(1, 4, threads={})) == []  # bound to a core each: one thread each


def test_slow_links() -> None:
    """A link far from the median is told with both figures; of one or two links nothing is said."""
    usual = [Link((0, n), (0, n), 2e-6, 1e10) for n in range(1, 5)]
    slow = Link((1, 2), (1, 2), 2e-6, 1e9)
    late = Link((1, 3), (1, 3), 9e-6, 1e10)
    within = Link((0, 1), (0, 0), 1e-3, 1e6)
    said = warnings(job(5, 1, (*usual, slow, late, within)))
    assert [text.split(":")[0] for text in said] == ["n1 - n2", "n1 - n3"]
    assert "1 GB/s and 2 us; the median between nodes is 10 GB/s and 2 us" in said[0]
    assert warnings(job(5, 1, (usual[0], slow))) == []


# --- which links ---


def test_all_pairs_of_few_nodes() -> None:
    """The first ranks of all pairs of nodes are measured, and the first two ranks of each node, however they lie."""
    cyclic = [0, 1, 2, 0, 1]
    assert pairs_between(cyclic) == [(0, 1), (0, 2), (1, 2)]
    assert pairs_within(cyclic) == [(0, 3), (1, 4)]
    assert pairs_between([0, 0]) == []
    assert pairs_within([0]) == []


@pytest.mark.parametrize("nodes", [12, 13, 33, 64, 128, 1000])
def test_a_sample_of_many_nodes(nodes: int) -> None:
    """Of many nodes a bounded number of pairs is measured, none twice, and as many nodes as possible are in it."""
    node_of = [rank // 2 for rank in range(2 * nodes)]
    pairs = pairs_between(node_of)
    assert len(pairs) == min(MOST_PAIRS, nodes * (nodes - 1) // 2)
    assert len(set(pairs)) == len(pairs)
    assert all(a < b and a % 2 == 0 and b % 2 == 0 for a, b in pairs)
    assert len({node_of[rank] for pair in pairs for rank in pair}) >= min(nodes - 1, 1.9 * MOST_PAIRS)


# --- this process, and the picture ---


def test_place_here() -> None:
    """A process knows its cores and what the variables say; nothing is said of GPUs that nobody names."""
    here = place_here(3, 1, 2, {"CUDA_VISIBLE_DEVICES": "0,2", "OMP_NUM_THREADS": "4"})
    assert (here.rank, here.node, here.local_rank, here.pid) == (3, 1, 2, os.getpid())
    assert here.cpus == tuple(sorted(os.sched_getaffinity(0)))
    assert set(here.cores) <= set(range(os.cpu_count() or 1))
    assert (here.gpus, here.threads, here.own_gpus) == (("0", "2"), {"OMP_NUM_THREADS": "4"}, False)
    assert place_here(0, 0, 0, {}).gpus is None
    assert place_here(0, 0, 0, {"CUDA_VISIBLE_DEVICES": ""}).gpus == ()
    assert place_here(0, 0, 0, {"SLURM_STEP_GPUS": "1", "SLURM_GPUS_PER_TASK": "1"}).own_gpus


def test_matrix() -> None:
    """The matrix is symmetric, within a node on its diagonal, and not a number where nothing was measured."""
    links = (Link((0, 1), (0, 0), 1e-6, 5e9), Link((0, 2), (0, 1), 2e-6, 1e9))
    found = matrix(job(3, 1, links), lambda link: link.latency * 1e6)
    assert found[0, 0] == pytest.approx(1)
    assert found[0, 1] == found[1, 0] == pytest.approx(2)
    assert math.isnan(found[1, 1])
    assert math.isnan(found[2, 0])


@pytest.mark.slow
def test_pictures() -> None:
    """Jobs of one rank, of a few nodes and of many, with links and without, crowded or not, can be drawn."""
    pytest.importorskip("matplotlib")
    node_of = [rank // 16 for rank in range(320)]
    links = [Link(pair, (node_of[pair[0]], node_of[pair[1]]), 2e-6, 1e10) for pair in pairs_between(node_of)]
    maps = {
        "one": job(1, 1),
        "node": job(1, 3, (Link((0, 1), (0, 0), 1e-6, 5e9),)),
        "two": job(2, 2, (Link((0, 2), (0, 1), 1e-6, 5e9),), gpus=("0", "1")),
        "many": job(20, 16, tuple(links), node_cpus=16),
        "crowded": JobMap(tuple(place(i, 0, i, (i // 2, 5)) for i in range(40))),
    }
    for name, known in maps.items():
        assert draw(known).startswith(b"\x89PNG"), name


def texts(known: JobMap) -> list[tuple[str, bool]]:
    """Return the words of a picture, and whether they are red."""
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        svg = draw(known, "svg").decode()
    found = re.findall(r"<text style=\"([^\"]*)\"[^>]*>([^<]*)</text>", svg)
    return [(html.unescape(words), RED in style) for style, words in found]


def test_the_picture_tells_who_is_where() -> None:
    """Ranks, their GPUs and threads, and the link with its units stand in the node; a legend tells what the colours mean."""
    link = Link((0, 1), (0, 0), 7.14e-5, 4.44e9)
    places = (place(0, 0, 0, (0, 1), gpus=("0",)), place(1, 0, 1, (2, 3), gpus=("1",)))
    said = texts(JobMap(places, (link,), "MPICH 5"))
    words = [text for text, _ in said]
    for text in ("2 ranks on 1 node, MPICH 5", "n0", "rank 0", "rank 1", "GPU 0", "GPU 1", "threads: OMP 1"):
        assert text in words, words
    assert "link between ranks 0 and 1: 71.4 us, 4.44 GB/s" in words
    assert "hardware thread (number) that the ranks of the line may use" in words
    assert "other hardware thread of the node" in words
    assert "Nothing is red: no warnings." in words
    assert not any(red for _, red in said)


def test_the_picture_tells_what_is_red_and_why() -> None:
    """What a warning names is red, and the warning with its remedy stands below."""
    crowded = (*(place(i, 0, i, (0,), threads=OMP1) for i in range(2)), place(2, 0, 2, (1,)))
    said = dict(texts(JobMap(crowded)))
    assert (said["ranks 0-1"], said["rank 2"]) == (True, False)
    assert said["Red, and why:"]
    assert "problem: see below" in said
    assert any("2 ranks have 1 core: all are bound to core 0 (ranks 0-1)" in text for text in said)
    said = dict(texts(JobMap(tuple(place(i, 0, i, (i,), gpus=("0",)) for i in range(2)))))
    assert (said["rank 0"], said["GPU 0"], said["threads: OMP 1"]) == (False, True, False)
    said = dict(texts(JobMap(tuple(place(i, 0, i, (0, 1), threads={}) for i in range(2)))))
    assert (said["ranks 0-1"], said["threads: not set"]) == (False, True)


def test_a_slow_link_has_a_red_frame() -> None:
    """Both places of the link in each heat map have a frame; without a slow link none has."""
    usual = [Link((0, n), (0, n), 2e-6, 1e10) for n in range(1, 5)]
    frames = []
    for links in (usual, [*usual, Link((1, 2), (1, 2), 2e-6, 1e9)]):
        pytest.importorskip("matplotlib")
        svg = draw(job(5, 1, tuple(links)), "svg").decode().lower()
        frames.append(len(re.findall(rf"<path [^>]*style=\"fill: none; stroke: {RED.lower()}; stroke-width: 2", svg)))
    assert frames == [0, 4]


def test_the_picture_names_the_ranks_of_nodes_with_one_name() -> None:
    """The heat maps have units, and tell two nodes of one name apart."""
    places = tuple(dataclasses.replace(place(i, i % 2, i // 2, (i // 2,)), host="vm") for i in range(4))
    words = [text for text, _ in texts(JobMap(places, (Link((0, 1), (0, 1), 2e-6, 1e9),), "MPICH"))]
    assert words.count("ranks 0, 2") >= 2  # at both axes of a map
    assert words.count("ranks 1, 3") >= 2
    assert {"latency in µs (dark is slow)", "bandwidth in GB/s (dark is fast)"} <= set(words)
