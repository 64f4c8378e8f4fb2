"""Train a small network on several ranks and on one, and compare: `broadcast_parameters`, `DistributedSampler`.

    mpicoll run -n 4 examples/train_like_one.py

A network of one hidden layer learns a curve from 240 points. Every rank makes its own random parameters and then gets
the parameters of rank 0. In each epoch the sampler divides the points in a new order, and each step averages the gradients
of the ranks. Then rank 0 trains by itself, from the same parameters, on the same batches, and gets the same parameters.
(The averages are sums of the same numbers in another order. So the last digits may differ, but not on one rank.)
All ranks have the same parameters after every step, bit for bit.
"""

import sys

import numpy as np

import mpicoll as dist

POINTS, HIDDEN, BATCH, EPOCHS, RATE = 240, 16, 60, 100, 0.2

dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()

x = np.linspace(-1.0, 1.0, POINTS)[:, None]
y = np.sin(3.0 * x)


def new_network(seed):
    """Return random parameters, by name."""
    rng = np.random.default_rng(seed)
    return {
        "w1": rng.normal(size=(1, HIDDEN)),
        "b1": rng.normal(size=HIDDEN),
        "w2": rng.normal(size=(HIDDEN, 1)) / HIDDEN,
    }


def gradients(network, x, y):
    """Return the gradient of the mean squared error by each parameter, and the error."""
    hidden = np.tanh(x @ network["w1"] + network["b1"])
    wrong = hidden @ network["w2"] - y
    back = 2 / len(x) * wrong @ network["w2"].T * (1 - hidden**2)
    return {"w1": x.T @ back, "b1": back.sum(0), "w2": 2 / len(x) * hidden.T @ wrong}, float((wrong**2).mean())


def step(network, slopes):
    """Update the parameters, in place."""
    for name, slope in slopes.items():
        network[name] -= RATE * slope


def batches(sampler, epoch):
    """Yield this rank's part of each batch of an epoch: BATCH points, divided equally between the ranks."""
    sampler.set_epoch(epoch)
    order = np.array(list(sampler))
    yield from np.split(order, range(BATCH // ranks, len(order), BATCH // ranks))


def check_that_all_have(network):
    """End the program if the parameters of the ranks differ in any bit."""
    own = np.concatenate([value.reshape(-1) for value in network.values()]).view(np.uint8)
    everybodys = np.empty((ranks, own.size), np.uint8)
    dist.all_gather_into_tensor(everybodys, own)
    if (everybodys != own).any():
        sys.exit(f"rank {rank}: the ranks have different parameters")


# --- together ------------------------------------------------------------------------------------------------------
if BATCH % ranks:
    sys.exit(f"{BATCH} points of a batch cannot be shared out evenly among {ranks} ranks")
network = new_network(seed=rank)
dist.broadcast_parameters(network)
start = {name: value.copy() for name, value in network.items()}
sampler = dist.DistributedSampler(POINTS)
for epoch in range(EPOCHS):
    for mine in batches(sampler, epoch):
        slopes, _ = gradients(network, x[mine], y[mine])
        dist.average_gradients(list(slopes.values()))
        step(network, slopes)
        check_that_all_have(network)

# --- rank 0 by itself, on the batches that all ranks had together --------------------------------------------------
if rank == 0:
    alone = start
    samplers = [dist.DistributedSampler(POINTS, num_replicas=ranks, rank=r) for r in range(ranks)]
    for epoch in range(EPOCHS):
        for parts in zip(*(batches(each, epoch) for each in samplers), strict=True):
            whole = np.concatenate(parts)
            step(alone, gradients(alone, x[whole], y[whole])[0])
    apart = max(float(np.abs(network[name] - alone[name]).max()) for name in network)
    _, error = gradients(network, x, y)
    print(
        f"{ranks} ranks and one process: mean squared error {error:.4f}, parameters at most {apart:.1e} apart",
        flush=True,
    )
    if apart > 1e-12 or (ranks == 1 and apart != 0) or error > 0.05:
        sys.exit("one process that trains alone comes to other parameters, or nothing was learnt")

dist.destroy_process_group()
