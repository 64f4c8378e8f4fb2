"""Let other libraries' "one rank first" helpers fail in each way, on two ranks over gloo: the table of docs/zero-first.md.

    pip install torch accelerate transformers lightning
    pip download --no-deps -d wheels super-gradients ultralytics
    python docs/measure/first_elsewhere.py wheels

Two processes for each cell, forked from one that has imported everything, so no launcher ends one when the other fails.
Prints what each rank did, and where it was when the limit passed. Of super-gradients and ultralytics, whose packages need
more than torch, the one function is taken out of the wheel as it stands.
"""

from __future__ import annotations

import ast
import contextlib
import os
import socket
import sys
import tempfile
import threading
import time
import traceback
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

LIMIT = 12.0  # seconds for one cell; a cell without a wait takes less than two

Block = Callable[[], AbstractContextManager[Any]]
HELPERS = ("ultralytics", "super-gradients", "lightning", "accelerate", "transformers")
CASES = (
    "all well",
    "leader raises and ends",
    "leader raises, is caught",
    "follower raises and ends",
    "follower raises, is caught",
    "follower skips",
    "leader skips",
    "follower skips, a barrier comes next",
    "nested",
    "collective inside",
    "not initialised",
)


def function_of(wheels: Path, package: str, file: str, name: str) -> Callable[[int], AbstractContextManager[Any]]:
    """Return one function of a module in a wheel, without importing the rest."""
    import torch.distributed

    (wheel,) = wheels.glob(f"{package}-*.whl")
    tree = ast.parse(zipfile.ZipFile(wheel).read(file))
    (found,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    names: dict[str, Any] = {"contextmanager": contextlib.contextmanager, "dist": torch.distributed}
    exec(compile(ast.Module([found], []), file, "exec"), names)
    function: Callable[[int], AbstractContextManager[Any]] = names[name]
    return function


def block_of(helper: str, wheels: Path, rank: int, initialise: bool) -> Block:
    """Initialise as the library does, unless it is not to, and return what makes its context manager."""
    import torch.distributed

    if helper in ("ultralytics", "super-gradients"):
        if helper == "ultralytics":
            made = function_of(wheels, helper, "ultralytics/utils/torch_utils.py", "torch_distributed_zero_first")
        else:
            file = "super_gradients/training/utils/distributed_training_utils.py"
            made = function_of(wheels, "super_gradients", file, "wait_for_the_master")
        if initialise:
            torch.distributed.init_process_group("gloo")
        return lambda: made(rank)
    if (
        not initialise and helper != "lightning"
    ):  # these initialise by themselves where a launcher has set its variables
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
    if helper == "accelerate":
        from accelerate import PartialState

        return PartialState(cpu=True).local_main_process_first
    if helper == "transformers":
        from transformers import TrainingArguments

        arguments = TrainingArguments(tempfile.mkdtemp(), use_cpu=True, ddp_backend="gloo" if initialise else None)
        return lambda: arguments.main_process_first(local=True)
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    if initialise:
        fabric.launch()
    return lambda: fabric.rank_zero_first(local=True)


def rank_main(helper: str, case: str, wheels: Path, rank: int, say: Callable[[str], None]) -> None:
    """Run one cell on one rank."""
    import torch
    import torch.distributed

    initialised = case != "not initialised"
    block = block_of(helper, wheels, rank, initialised)
    say("ready")
    leads = rank == 0
    if not case.startswith("leader skips" if leads else "follower skips"):
        try:
            say("to the block")
            with block():
                say("runs the block")
                if leads:
                    time.sleep(0.5)
                if case.startswith("leader raises" if leads else "follower raises"):
                    raise ValueError("no data")
                if case == "nested":
                    with block():
                        say("runs the inner block")
                    if leads:
                        time.sleep(0.5)
                        say("ends the outer block")
                if case == "collective inside":
                    x = torch.ones(1)
                    torch.distributed.all_reduce(x)
                    say(f"sum inside {x.item():g}")
            say("left the block")
        except Exception as error:
            say(f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}")
            if case.endswith("ends"):
                return
    if initialised:
        x = torch.ones(1)
        try:
            if "barrier" in case:
                say("to the barrier")
                torch.distributed.barrier()
            say("to all_reduce")
            torch.distributed.all_reduce(x)
            say(f"sum {x.item():g}")
            # One more, of another size, as the next step of a program would.
            x = torch.arange(3.0)
            torch.distributed.all_reduce(x)
            say(f"next sum {x.tolist()}")
        except Exception as error:
            say(f"{type(error).__name__}: {str(error).splitlines()[0][:160]}")
    say("end")


def fork_rank(helper: str, case: str, wheels: Path, rank: int, port: int, file: Path, began: float) -> int:
    """Start one rank; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE="2",
            LOCAL_WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TORCHELASTIC_RUN_ID="measure",
            GLOO_SOCKET_IFNAME="lo",
        )
        log = file.open("w", buffering=1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(file.with_suffix(".err"), os.O_WRONLY | os.O_CREAT), 2)

        def say(text: str) -> None:
            log.write(f"{text} [{time.monotonic() - began:.1f}]\n")

        rank_main(helper, case, wheels, rank, say)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def cell(helper: str, case: str, wheels: Path) -> list[str]:
    """Run one cell and return a line for each rank."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"rank{rank}" for rank in (0, 1)]
        port = free_port()
        now = time.monotonic()
        pids = {rank: fork_rank(helper, case, wheels, rank, port, file, now) for rank, file in enumerate(files)}
        how = {}
        until = now + 60
        while pids and time.monotonic() < until:
            if until == now + 60 and all(file.exists() and "ready" in file.read_text() for file in files):
                until = time.monotonic() + LIMIT
            for rank, pid in list(pids.items()):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    how[rank] = ""
                    del pids[rank]
            time.sleep(0.05)
        said = [file.read_text().splitlines() for file in files]  # before the end of one shows on the other
        for rank, pid in pids.items():
            how[rank] = f"; STILL THERE after {LIMIT:g} s"
            os.kill(pid, 9)
        for pid in pids.values():
            os.waitpid(pid, 0)
        lines = []
        for rank, file in enumerate(files):
            text = "; ".join(said[rank]) + how[rank]
            if "end" not in text and not how[rank]:
                last = file.with_suffix(".err").read_text(errors="replace").strip().splitlines()[-1:]
                text += "".join(f" ({line[:200]})" for line in last)
            lines.append(f"rank {rank}: {text}")
        return lines


def main() -> None:
    """Run the cells that are named, or all."""
    wheels = Path(sys.argv[1])
    helpers = [name for name in sys.argv[2:] if name in HELPERS] or list(HELPERS)
    cases = [name for name in sys.argv[2:] if name in CASES] or list(CASES)
    import accelerate
    import lightning.fabric
    import torch.distributed
    import transformers

    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, accelerate {accelerate.__version__}, transformers {transformers.__version__}, ",
        end="",
    )
    print(f"lightning {lightning.__version__}", *(sorted(p.name for p in wheels.glob("*.whl"))), flush=True)
    if threading.active_count() > 1:
        print("threads are alive: forks of this process may hang for that reason", file=sys.stderr)
    for helper in helpers:
        for case in cases:
            print(f"\n{helper}: {case}", *cell(helper, case, wheels), sep="\n  ", flush=True)


if __name__ == "__main__":
    main()
