"""How much of the copies to and from a GPU is hidden behind the host, on a GPU that is none and whose copies take their time.

    mpicoll run -n 2 benchmarks/pieces.py [--sizes 16,64] [--bandwidths 1,4] [--rounds 7]

A large all_reduce of an array that is on a GPU, by way of the host: as a whole and in pieces. The stand-in for a GPU copies
nothing: a copy is over when its bytes would be through at so many GB/s, each way by itself. So it tells how well copies and host
overlap where both take as long as they are said to, and nothing of what CUDA's own calls take. Shown is the fastest of some
rounds, and how many times the slower of one copy and the same call on the host it takes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import mpicoll as dist
from mpicoll.memory.device import array as device_array
from mpicoll.memory.device import pool as device_pool
from mpicoll.memory.device import runtime as device_runtime
from mpicoll.memory.device.runtime import DeviceArray

Array = npt.NDArray[Any]
NOWHERE = 0x7ABC << 48


class OnGpu:
    """An array on it."""

    def __init__(self, count: int) -> None:
        self.dtype, self.shape = np.dtype(np.float32), (count,)
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (NOWHERE, False),
        }


class Stream:
    """What runs in order; ``end`` is when all of it is over (time.perf_counter)."""

    def __init__(self) -> None:
        self.end = 0.0


class Simulated:
    """A GPU whose copies take ``seconds`` a byte; events are the times at which they come."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.current, self.copy_streams = Stream(), (Stream(), Stream())

    def array(self, value: Any, name: str, *, writable: bool) -> DeviceArray:
        """Return what an array is."""
        return DeviceArray(value, value.dtype, value.shape, (value.dtype.itemsize,), NOWHERE, 0, False, self.current)

    def plain(self, array: DeviceArray) -> bool:
        """Whether MPI could be handed it."""
        return False

    def count(self) -> int:
        """Return the number of devices."""
        return 1

    def current_device(self) -> int:
        """Return the current device."""
        return 0

    def use(self, device: int) -> None:
        """Choose a device."""

    def bus(self, device: int) -> str:
        """Return where a device is."""
        return ""

    def stream(self, given: Any, device: int) -> Any:
        """Return a stream that the program gave."""
        return given

    def copy_stream(self, device: int, second: bool = False) -> Stream:
        """Return a stream of the library."""
        return self.copy_streams[second]

    def mark(self, device: int, stream: Stream) -> float:
        """Return when a stream has come so far."""
        return stream.end

    def over(self, event: float) -> bool:
        """Whether that is over."""
        return time.perf_counter() >= event

    def await_(self, event: float) -> None:
        """Wait for it."""
        time.sleep(max(0.0, event - time.perf_counter()))

    def follow(self, device: int, stream: Stream, event: float) -> None:
        """Have a stream go on after that."""
        stream.end = max(stream.end, event)

    def copy_out(self, host: Array, array: DeviceArray, stream: Stream, begin: int | None = None) -> None:
        """Take the time of a copy."""
        stream.end = max(stream.end, time.perf_counter()) + host.nbytes * self.seconds

    def copy_in(self, array: DeviceArray, host: Array, stream: Stream, begin: int | None = None) -> None:
        """Take the time of a copy."""
        self.copy_out(host, array, stream)

    def pinned(self, nbytes: int, device: int) -> Array:
        """Return memory of the host."""
        return np.zeros(nbytes, np.uint8)


def fastest(rounds: int, call: Callable[[], None]) -> float:
    """Return the seconds of the fastest of some calls."""
    times = []
    for _ in range(rounds):
        dist.barrier()
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def measure(megabytes: int, bandwidth: float, rounds: int) -> str:
    """Return a line of the table."""
    nbytes = megabytes << 20
    gpu = Simulated(1e-9 / bandwidth)
    device_runtime._runtime, device_pool._pool = gpu, None
    x, y = OnGpu(nbytes // 4), np.ones(nbytes // 4, np.float32)

    def on_gpu() -> None:
        dist.all_reduce(x, dist.ReduceOp.MAX)
        gpu.await_(gpu.current.end)

    found = []
    least = device_array.PIECES_FROM
    for limit in (nbytes, least):
        device_array.PIECES_FROM = limit
        found.append(fastest(rounds, on_gpu))
    device_array.PIECES_FROM = least
    host, copy = fastest(rounds, lambda: dist.all_reduce(y, dist.ReduceOp.MAX) or None), nbytes * gpu.seconds
    device_pool.close()
    whole, pieces = found
    times = " | ".join(f"{1e3 * each:.1f}" for each in (copy, host, whole, pieces))
    return f"| {megabytes} MiB | {bandwidth:g} | {times} | {pieces / max(copy, host):.2f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="16,64,128", help="MiB, with commas between them")
    parser.add_argument("--bandwidths", default="1,4", help="GB/s")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    dist.init_process_group()
    first = dist.get_rank() == 0
    if first:
        print("| size | GB/s | one copy, ms | on the host | as a whole | in pieces | times the slower |")
        print("|---|---|---|---|---|---|---|", flush=True)
    for size in given.sizes.split(","):
        for bandwidth in given.bandwidths.split(","):
            line = measure(int(size), float(bandwidth), given.rounds)
            if first:
                print(line, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
