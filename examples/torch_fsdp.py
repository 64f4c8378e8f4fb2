"""Train a small transformer that is sharded over the ranks, save checkpoints, and go on from them: `fully_shard`.

    mpicoll run -n 4 examples/torch_fsdp.py

The transformer learns the text of this file, letter by letter. Each rank holds its part of every parameter (FSDP2). Every 20
steps, at a signal, and at the step --stop-at, the ranks save a checkpoint together, each its own part. A second run, on any
number of ranks, goes on from the last checkpoint, and removes the checkpoints when the training is complete:

    mpicoll run -n 4 examples/torch_fsdp.py checkpoints --stop-at 30
    mpicoll run -n 2 examples/torch_fsdp.py checkpoints

Then rank 0 trains the same transformer by itself, from the first step, and must get the same parameters. The program needs
torch: pip install "mpicoll[torch]". `slurm/torch-fsdp.sbatch` is a job for this program.
"""

import argparse
import pathlib
import shutil
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mpicoll
import mpicoll.torch

BATCH, LENGTH, WIDTH, LETTERS, STEPS, EVERY = 12, 32, 64, 128, 60, 20

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=pathlib.Path, nargs="?", default="checkpoints", help="where the checkpoints are")
parser.add_argument("--stop-at", type=int, default=STEPS, help="save a checkpoint at this step, and end")
options = parser.parse_args()
folder = options.folder

dist.init_process_group("mpicoll", init_method="mpi://")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)  # the ranks share the cores
if BATCH % ranks:
    sys.exit(f"{BATCH} sequences of a batch cannot be shared out evenly among {ranks} ranks")


class Block(nn.Module):
    """One layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        return x + self.inner(self.norms[1](x))


class Transformer(nn.Module):
    """Predict the next letter at each place of a text, and return the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(WIDTH, LETTERS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.letters(text[:, :-1]) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.out(x).flatten(0, 1), text[:, 1:].flatten())


def new_transformer() -> Transformer:
    """Return a transformer with the same random parameters on all ranks."""
    torch.manual_seed(0)
    return Transformer().double()


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 3e-3)


text = torch.tensor([min(ord(letter), LETTERS - 1) for letter in pathlib.Path(__file__).read_text()])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, share: slice) -> torch.Tensor:
    """Update the parameters by this rank's share of the batch of a step, and return the loss of the share."""
    begins = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=torch.Generator().manual_seed(number))
    loss: torch.Tensor = model(text[begins + torch.arange(LENGTH + 1)][share])
    optimizer.zero_grad()
    loss.backward()  # with fully_shard: gathers each block's parameters, and scatters the averages of their gradients
    optimizer.step()
    return loss.detach()


# --- checkpoints: a folder for each, which is complete if it has the file .metadata ----------------------------------


def last_checkpoint() -> int:
    """Return the step of the last complete checkpoint; 0: there is none. Only rank 0 looks."""
    return max((int(file.parent.name) for file in folder.glob("*/.metadata")), default=0)


def state(number: int) -> dict:
    """Return everything that a checkpoint holds; of parameters and optimizer this rank's parts."""
    parameters, moments = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments, "step": number}


def save(number: int) -> None:
    """Save a checkpoint; all ranks call this after the same step."""
    dcp.save(state(number), checkpoint_id=folder / str(number))
    with mpicoll.zero_first("old checkpoints") as turn:
        if turn.is_leader:
            for old in folder.iterdir():
                if int(old.name) != number:
                    shutil.rmtree(old)
            print(f"checkpoint of step {number} saved", flush=True)


def load(number: int) -> None:
    """Load a checkpoint into the model and the optimizer; the number of ranks that have saved it may be another."""
    found = state(0)
    dcp.load(found, checkpoint_id=folder / str(number))
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])


# --- the training ----------------------------------------------------------------------------------------------------
model = new_transformer()
mesh = init_device_mesh("cpu", (ranks,))
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = new_optimizer(model)

began = done = mpicoll.run_first(last_checkpoint)
if done:
    load(done)
mpicoll.on_signal(lambda number: print(f"rank {rank}: signal {number} after step {done}", flush=True))
if rank == 0:
    held = sum(each.to_local().numel() for each in model.parameters())
    total = sum(each.numel() for each in model.parameters())
    print(f"starting after {done} steps; rank 0 holds {held} of {total} parameters", flush=True)
share = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
stopped = False
while done < STEPS and not stopped:
    loss = step(model, optimizer, done, share)
    done += 1
    stopped = mpicoll.should_stop() or done == options.stop_at < STEPS  # a signal on any rank stops all at one step
    if stopped or (done % EVERY == 0 and done < STEPS):
        dist.all_reduce(loss, dist.ReduceOp.AVG)
        if rank == 0:
            print(f"step {done}: loss {loss.item():.3f}", flush=True)
        save(done)

if not stopped:
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        alone = new_transformer()
        alone_optimizer = new_optimizer(alone)
        for number in range(STEPS):
            loss = step(alone, alone_optimizer, number, slice(None))
        differences = [(whole[name] - each).abs().max() for name, each in alone.state_dict().items()]
        difference = torch.stack(differences).max().item()
        shutil.rmtree(folder, ignore_errors=True)
        print(f"done after {done} steps, {done - began} of them since the start; loss {loss.item():.3f}", flush=True)
        print(f"one process comes to the same parameters: largest difference {difference:.1e}", flush=True)
        if not difference < 1e-9:  # also if it is not a number
            sys.exit("the ranks together did not train what one process trains alone")
dist.destroy_process_group()
