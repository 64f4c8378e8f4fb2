"""Train a small neural network on handwritten digits, data-parallel, in plain NumPy; or in CuPy, on GPUs.

    mpicoll run -n 4 examples/train_digits.py
    mpicoll run -n 4 examples/train_digits.py --device cuda

The program needs scikit-learn (for its 1,797 digits, 8 x 8 pixels each; nothing is downloaded) and matplotlib: pip install
"mpicoll[examples]". It prints a test accuracy of about 98 %, and draws the loss curve and the digits that the network
reads wrongly into digits.png. Then rank 0 trains the same network by itself, on all the data, and must get the same
parameters.

As in DistributedDataParallel every rank has the whole network and a part of the images. In each step each rank computes
the gradient for its own images of the batch, one all_reduce averages the gradients, and all ranks make the same update.
"""

import argparse
import hashlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.progress import Progress

import mpicoll as dist

PIXELS, HIDDEN, DIGITS = 64, 64, 10
BATCH, RATE, MOMENTUM, DECAY = 64, 0.1, 0.9, 1e-3

Array = Any  # of NumPy, or of CuPy with --device cuda
xp: Any = np  # the package that computes; the calls of mpicoll are the same for both


def on_host(array: Array) -> np.ndarray:
    """Return an array of NumPy."""
    return array if isinstance(array, np.ndarray) else array.get()


# --- the network: one hidden layer, its parameters in one flat vector so that one all_reduce is enough ---------------


def layers(flat: Array) -> list[Array]:
    """Return the weights and biases as views of a flat vector."""
    shapes = [(PIXELS, HIDDEN), (HIDDEN,), (HIDDEN, DIGITS), (DIGITS,)]
    ends = np.cumsum([np.prod(shape) for shape in shapes]).tolist()
    return [flat[end - int(np.prod(shape)) : end].reshape(shape) for shape, end in zip(shapes, ends, strict=True)]


def new_network(seed: int = 0) -> Array:
    """Return random weights and zero biases."""
    network = np.zeros(PIXELS * HIDDEN + HIDDEN + HIDDEN * DIGITS + DIGITS)
    rng = np.random.default_rng(seed)
    for weights in layers(network)[::2]:
        weights[...] = rng.normal(scale=len(weights) ** -0.5, size=weights.shape)
    return xp.asarray(network)


def predict(network: Array, images: Array) -> tuple[Array, Array]:
    """Return the probability of each digit for each image, and the hidden layer."""
    w1, b1, w2, b2 = layers(network)
    hidden = xp.tanh(images @ w1 + b1)
    scores = hidden @ w2 + b2
    scores = xp.exp(scores - scores.max(axis=1, keepdims=True))
    return scores / scores.sum(axis=1, keepdims=True), hidden


def gradient_and_loss(network: Array, images: Array, labels: Array) -> Array:
    """Return the gradient of the cross entropy and, at its end, the loss: sums over the images."""
    joint = xp.zeros(network.size + 1)
    w1, b1, w2, b2 = layers(joint[:-1])
    probabilities, hidden = predict(network, images)
    joint[-1] = -xp.log(probabilities[xp.arange(len(labels)), labels]).sum()
    error = probabilities - xp.eye(DIGITS)[labels]
    w2[...], b2[...] = hidden.T @ error, error.sum(axis=0)
    error = error @ layers(network)[2].T * (1 - hidden**2)
    w1[...], b1[...] = images.T @ error, error.sum(axis=0)
    return joint


# --- the training ----------------------------------------------------------------------------------------------------


def train(network: Array, shard: Array, first: int, total: int, epochs: int, *, alone: bool = False) -> Iterator[float]:
    """Train the network in place, and yield the loss on the batch of each step.

    Every rank draws the same batches, as indices into all ``total`` training images, and works on those that it holds:
    the rows of ``shard`` are the images from ``first`` on, each with its label behind its pixels.
    """
    images, labels = shard[:, :-1], shard[:, -1].astype(int)
    world = 1 if alone else dist.get_world_size()
    velocity = xp.zeros_like(network)
    for epoch in range(epochs):
        rate = RATE * (1 + np.cos(np.pi * epoch / epochs)) / 2
        order = np.random.default_rng([1, epoch]).permutation(total)
        for batch in np.array_split(order, total // BATCH):
            mine = xp.asarray(batch[(first <= batch) & (batch < first + len(shard))] - first)
            joint = gradient_and_loss(network, images[mine], labels[mine])
            # The ranks hold different numbers of a batch's images, so an average of their averages would be wrong. Each
            # rank gives its sum, scaled such that the average over ranks is the average over images.
            joint *= world / len(batch)
            if not alone:
                dist.all_reduce(joint, op=dist.ReduceOp.AVG)
            velocity = MOMENTUM * velocity - rate * (joint[:-1] + DECAY * network)
            network += velocity
            yield float(joint[-1])


def scatter_rows(rows: Array | None, total: int) -> tuple[Array, list[int]]:
    """Scatter the rows of rank 0's array, in order; return this rank's rows, and the first row of each rank.

    1,437 rows make shards of 360, 359, 359 and 359 on four ranks. scatter moves blocks of one size, so shorter blocks
    have an empty row at their end.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    bounds = [r * (total // world) + min(r, total % world) for r in range(world + 1)]
    block = xp.zeros((-(-total // world), PIXELS + 1))
    blocks = []
    if rows is not None:
        blocks = [xp.zeros_like(block) for _ in range(world)]
        for r, padded in enumerate(blocks):
            padded[: bounds[r + 1] - bounds[r]] = rows[bounds[r] : bounds[r + 1]]
    dist.scatter(block, blocks, src=0)
    return block[: bounds[rank + 1] - bounds[rank]], bounds


def same_on_all_ranks(network: Array) -> bool:
    """Return whether all ranks hold the same parameters, bit for bit."""
    own = np.frombuffer(hashlib.sha256(on_host(network).tobytes()).digest(), np.uint8)
    everybodys = np.empty((dist.get_world_size(), own.size), np.uint8)
    dist.all_gather_into_tensor(everybodys, own)
    return bool((everybodys == own).all())


# --- the data and the picture: for rank 0 only -----------------------------------------------------------------------


def load_digits() -> tuple[Array, Array]:
    """Return 1,437 rows to train with and 360 to test with: 64 pixels from 0 to 1, then the label."""
    from sklearn import datasets

    digits = datasets.load_digits()
    rows = np.column_stack([digits.data / 16, digits.target])
    np.random.default_rng(0).shuffle(rows)
    rows = xp.asarray(rows)
    return rows[360:], rows[:360]


def draw(path: str, losses: list[float], accuracies: list[float], test: Array, probabilities: Array) -> None:
    """Draw loss and accuracy over the epochs, and the digits that are read wrongly, the surest mistakes first."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ink, pale, blue, green, red = "#22252a", "#c9ced6", "#2f6fb0", "#2c8c5a", "#d1495b"
    plt.rcParams.update({"text.color": ink, "axes.edgecolor": pale, "xtick.color": ink, "ytick.color": ink})
    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left"})
    plt.rcParams.update({"axes.titlesize": 11, "axes.titlepad": 8, "xtick.major.size": 0, "ytick.major.size": 0})
    figure = plt.figure(figsize=(12.5, 6), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    left, right = figure.subfigures(1, 2, width_ratios=[5, 7])

    left.suptitle(f"{dist.get_world_size()} MPI ranks learn to read", x=0.03, ha="left", fontsize=15, weight="bold")
    above, below = left.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    by_epoch = np.reshape(losses, (len(accuracies), -1))
    above.semilogy(np.arange(len(losses)) / by_epoch.shape[1], losses, color=blue, alpha=0.35, linewidth=0.8)
    above.semilogy(np.arange(len(by_epoch)) + 0.5, by_epoch.mean(axis=1), color=blue, linewidth=2.5)
    above.set_title("training loss, in every step and over each epoch")
    below.plot(np.arange(len(accuracies)) + 1, accuracies, color=green, linewidth=2.5)
    below.set_title(f"test accuracy, {accuracies[-1]:.1%} in the end")
    below.set_xlabel("epoch")
    below.xaxis.get_major_locator().set_params(integer=True)
    below.yaxis.set_major_formatter(lambda y, _: f"{100 * y:g}%")
    for axes in (above, below):
        axes.grid(axis="y", color=pale, alpha=0.5)

    truth, read, sureness = test[:, -1].astype(int), probabilities.argmax(axis=1), probabilities.max(axis=1)
    wrong = np.flatnonzero(read != truth)
    wrong = wrong[np.argsort(-sureness[wrong])]
    title = f"{len(wrong)} of {len(test)} test digits are read wrongly" + (", the surest:" if len(wrong) > 8 else "")
    right.suptitle(title, x=0.03, ha="left", fontsize=15, weight="bold")
    cells = right.subplots(4, 4, height_ratios=[5, 1, 5, 1])
    for k, (picture, bars) in enumerate(zip(cells[::2].flat, cells[1::2].flat, strict=True)):
        if k >= len(wrong):
            picture.set_axis_off()
            bars.set_axis_off()
            continue
        i = wrong[k]
        picture.imshow(np.pad(test[i, :-1].reshape(8, 8), 1), cmap="gray_r", vmin=0, vmax=1, interpolation="bicubic")
        picture.set_title(f"true: {truth[i]}", color=green)
        picture.set_title(f"read: {read[i]}", color=red, loc="right")
        picture.set(xticks=[], yticks=[], frame_on=False)
        colours = [green if d == truth[i] else red if d == read[i] else pale for d in range(DIGITS)]
        bars.bar(range(DIGITS), probabilities[i], color=colours)
        bars.set(ylim=(0, 1), yticks=[], xticks=range(DIGITS))
        bars.tick_params(labelsize=8, pad=1)
        bars.spines["left"].set_visible(False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to compute (default: cpu)")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the training images (default: 30)")
    parser.add_argument("--plot", default="digits.png", metavar="PATH", help="where to draw (default: digits.png)")
    parser.add_argument("--no-plot", action="store_const", const=None, dest="plot", help="draw nothing")
    options = parser.parse_args()
    if options.epochs < 1:
        parser.error("--epochs must be at least 1")

    if options.device == "cuda":
        global xp
        dist.select_device()  # this rank's GPU
        import cupy as xp
    dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()

    # Rank 0 has the data and the first parameters, and sends them to the other ranks.
    rows, test = load_digits() if rank == 0 else (None, None)
    network = new_network() if rank == 0 else xp.empty_like(new_network())
    count = np.array([0 if rows is None else len(rows)])
    dist.broadcast(count, src=0)
    dist.broadcast(network, src=0)
    total = int(count[0])
    shard, bounds = scatter_rows(rows, total)
    shards = " + ".join(str(size) for size in np.diff(bounds))
    if rank == 0:
        print(f"{total} images to train with on {world} ranks: {shards}", flush=True)

    losses, accuracies = [], []
    steps = total // BATCH
    started = time.monotonic()
    with Progress(*Progress.get_default_columns(), "{task.fields[state]}", disable=rank != 0) as progress:
        task = progress.add_task("training", total=options.epochs * steps, state="")
        for loss in train(network, shard, bounds[rank], total, options.epochs):
            losses.append(loss)
            if not same_on_all_ranks(network):
                sys.exit(f"rank {rank}: the ranks have different parameters after step {len(losses)}")
            if test is not None and len(losses) % steps == 0:
                probabilities, _ = predict(network, test[:, :-1])
                accuracies.append(float((probabilities.argmax(axis=1) == test[:, -1]).mean()))
                progress.update(task, state=f"loss {loss:.3f}, test accuracy {accuracies[-1]:.1%}")
            progress.advance(task)
    seconds = time.monotonic() - started

    if rank == 0:
        print(f"test accuracy {accuracies[-1]:.1%} after {len(losses)} steps in {seconds:.1f} s")
        print(f"all {world} ranks had the same parameters after every step, bit for bit")
        alone = new_network()
        for _ in train(alone, rows, 0, total, options.epochs, alone=True):
            pass
        difference = float(abs(alone - network).max())
        print(f"one process that trains alone comes to the same parameters: largest difference {difference:.1e}")
        if options.plot:
            draw(options.plot, losses, accuracies, on_host(test), on_host(probabilities))
            print(f"drew {options.plot}", flush=True)
        if difference > 1e-10:
            sys.exit("the ranks together did not train what one process trains alone")
        if accuracies[-1] < 0.95:
            sys.exit("expected a test accuracy of at least 95 %")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
