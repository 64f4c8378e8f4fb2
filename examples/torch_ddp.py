"""Train a network of torch on handwritten digits with DistributedDataParallel, over MPI.

    mpicoll run -n 4 examples/torch_ddp.py

Two lines, marked below, differ from the script that torchrun starts with gloo: the import of mpicoll.torch, and the call of
init_process_group. The program needs torch and scikit-learn (for its 1,797 digits; nothing is downloaded): pip install
"mpicoll[torch,examples]". It prints a test accuracy of about 97 %. Then rank 0 trains the same network by itself, on the same
batches, and must get the same parameters.
"""

import copy
import sys
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mpicoll.torch  # noqa: F401 (line 1 of 2; with gloo: nothing)

BATCH, EPOCHS, RATE = 64, 20, 0.1

dist.init_process_group("mpicoll", init_method="mpi://")  # line 2 of 2; with gloo: dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)  # the ranks share the cores

pixels, labels = (torch.tensor(each) for each in load_digits(return_X_y=True))
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
pixels, labels = pixels[order] / 16, labels[order]
train, test = TensorDataset(pixels[360:], labels[360:]), (pixels[:360], labels[:360])

torch.manual_seed(rank)  # DistributedDataParallel gives all ranks the parameters of rank 0
network = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).double()
alone = copy.deepcopy(network)  # for the comparison at the end
model = DistributedDataParallel(network)


def batches(of_rank: int, epoch: int):
    """Return the batches of a rank in an epoch: its share of BATCH images each."""
    sampler = DistributedSampler(train, ranks, of_rank, drop_last=True)
    sampler.set_epoch(epoch)
    return DataLoader(train, BATCH // ranks, sampler=sampler, drop_last=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Update the parameters by one batch, and return its loss."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()  # with DistributedDataParallel: averages the gradients of all ranks, while it computes the next
    optimizer.step()
    return loss.item()


def flat(model: nn.Module) -> torch.Tensor:
    """Return all parameters in one tensor."""
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


started = time.monotonic()
optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
for epoch in range(EPOCHS):
    losses = [step(model, optimizer, *batch) for batch in batches(rank, epoch)]
    if rank == 0 and epoch % 5 == 4:
        print(f"epoch {epoch + 1:2d}: loss {sum(losses) / len(losses):.3f}", flush=True)
seconds = time.monotonic() - started

everybodys = [torch.empty_like(flat(network)) for _ in range(ranks)]
dist.all_gather(everybodys, flat(network))
if any(not torch.equal(each, flat(network)) for each in everybodys):
    sys.exit(f"rank {rank}: the ranks have different parameters")

if rank == 0:
    accuracy = (network(test[0]).argmax(1) == test[1]).double().mean().item()
    print(f"test accuracy {accuracy:.1%} after {EPOCHS} epochs on {ranks} ranks in {seconds:.1f} s", flush=True)
    optimizer = torch.optim.SGD(alone.parameters(), RATE, momentum=0.9)
    for epoch in range(EPOCHS):
        for parts in zip(*(batches(each, epoch) for each in range(ranks)), strict=True):
            images, labels = (torch.cat(each) for each in zip(*parts, strict=True))
            step(alone, optimizer, images, labels)
    difference = (flat(alone) - flat(network)).abs().max().item()
    print(
        f"one process that trains alone comes to the same parameters: largest difference {difference:.1e}", flush=True
    )
    if difference > 1e-10 or accuracy < 0.95:
        sys.exit("the ranks together did not train what one process trains alone")
dist.destroy_process_group()
